"""The simulator equals its plain twin, obeys docs/execution-model.md, and gives the exact numbers of small cases."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from oracles import all_placements
from placewise.cluster import Cluster, Device, Link
from placewise.costs import Costs
from placewise.errors import InvalidInput
from placewise.problem import OBJECTIVES, Execution, Problem
from placewise.simulator import Timeline, evaluate, kernel, simulate, violations
from placewise.simulator.arrays import priority_order, upward_rank
from problems import problem_of, random_order, random_placement, random_problem, renumbered, shared_bus


def rows_of(transfers):
    columns = (transfers.tensor, transfers.source, transfers.target, transfers.start, transfers.finish)
    return list(zip(*(column.tolist() for column in columns), strict=True))


# ---- the twin --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(10))
def test_equals_its_twin_bit_for_bit(block):
    """Except peaks of fractional sizes, which are sums of the same terms in another order."""
    for seed in range(250 * block, 250 * (block + 1)):
        rng = np.random.default_rng(seed)
        integers = seed % 4 > 0
        problem = random_problem(rng, max_ops=12, integers=integers, constrained=seed % 3 == 0)
        order = random_order(rng, problem) if seed % 5 < 2 else None
        placements = np.stack([random_placement(rng, problem) for _ in range(3)])
        scores = evaluate(problem, placements, order)
        for row, placement in enumerate(placements):
            timeline = simulate(problem, placement, order)
            assert scores.value[row] == timeline.value, seed
            assert scores.peak[row].tolist() == timeline.peak.tolist(), seed
        value, start, finish, transfers, peak = reference.run(problem, placement, order)
        assert timeline.start.tolist() == start, seed
        assert timeline.finish.tolist() == finish, seed
        assert rows_of(timeline.transfers) == transfers, seed
        if problem.objective != "throughput":  # recounted below
            assert timeline.value == value, seed
            if problem.execution.memory == "static":
                peak = [float(problem.graph.resident_bytes[placement == d].sum()) for d in range(problem.num_devices)]
            assert timeline.peak.tolist() == (peak if integers else pytest.approx(peak, rel=1e-12)), seed
            most = [timeline.memory_profile(d)[1].max() for d in range(problem.num_devices)]
            assert most == (peak if integers else pytest.approx(peak, rel=1e-12)), seed


def test_a_batch_on_threads_equals_a_batch_on_one():
    rng = np.random.default_rng(0)
    for seed in range(6):
        objective = OBJECTIVES[seed % 3]
        problem = random_problem(np.random.default_rng(seed), max_ops=60, objective=objective)
        placements = np.stack([random_placement(rng, problem) for _ in range(20_000 // problem.num_ops + 1)])
        one, many = (evaluate(problem, placements, threads=threads) for threads in (1, 5))
        np.testing.assert_array_equal(one.value, many.value)
        np.testing.assert_array_equal(one.peak, many.peak)
        assert len(np.unique(one.value)) > 1 or problem.num_devices == 1


def test_peaks_are_skipped_only_where_memory_cannot_bind():
    roomy = problem_of(np.ones((3, 2)), [(0, 1)])
    assert evaluate(roomy, [0, 1, 0], peaks=False).peak is None
    assert evaluate(roomy, [0, 1, 0]).peak is not None
    tight = replace(roomy, cluster=roomy.cluster.with_memory({"d1": 0.5}))
    assert not evaluate(tight, [0, 1, 0], peaks=False).feasible[0]
    assert evaluate(tight, [0, 0, 0], peaks=False).feasible[0]


def test_memory_may_bind_by_copies_scratch_or_on_one_device_only():
    """Where it may, it is measured whether asked for or not."""
    free = Execution(contention="none", sends="edge")
    copies = problem_of(np.ones((4, 2)), [(0, 1), (0, 2), (0, 3)], sizes=[10.0, 0.0, 0.0, 0.0], memory=[math.inf, 29.0])
    assert evaluate(copies, [0, 1, 1, 1], peaks=False).feasible[0]  # one copy
    copies = replace(copies, execution=free)
    assert evaluate(copies, [0, 1, 1, 1]).peak.tolist() == [[10.0, 30.0]]
    assert not evaluate(copies, [0, 1, 1, 1], peaks=False).feasible[0]
    scratch = problem_of(np.ones((2, 2)), sizes=0.0, scratch=[3.0, 5.0], memory=[4.0, 5.0])
    assert evaluate(scratch, [[0, 1], [1, 0]], peaks=False).feasible.tolist() == [True, False]


def test_thousands_of_ops_are_ready_at_once():
    """More than a word of words of the ready set: each device runs its own, the longest first."""
    n = 5000
    rng = np.random.default_rng(0)
    seconds, placement = 1.0 + rng.permutation(n), rng.integers(0, 2, n)
    timeline = simulate(problem_of(np.repeat(seconds[:, None], 2, axis=1)), placement)
    for d in range(2):
        mine = np.flatnonzero(placement == d)
        mine = mine[np.argsort(-seconds[mine])]
        assert timeline.start[mine].tolist() == [0.0, *np.cumsum(seconds[mine])[:-1].tolist()]


def test_thousands_of_ops_wait_for_their_inputs():
    """One op sends to 5000, over a link that is not contended: they start in the order in which their inputs arrive."""
    n = 5000
    rng = np.random.default_rng(0)
    columns = {"tensor_producer": np.zeros(n, int), "tensor_bytes": 1.0 + rng.permutation(n)}
    seconds = np.repeat(np.append(1.0, np.full(n, 0.5))[:, None], 2, axis=1)
    problem = problem_of(seconds, [(i, i + 1) for i in range(n)], execution=Execution(contention="none"), **columns)
    timeline = simulate(problem, np.append(0, np.ones(n, int)))
    assert timeline.start[1:].tolist() == (1.0 + columns["tensor_bytes"]).tolist()


# ---- rules that every run keeps --------------------------------------------------------------------------------------


class Case(NamedTuple):
    problem: Problem
    placement: np.ndarray
    order: np.ndarray | None

    @property
    def timeline(self) -> Timeline:
        return simulate(self.problem, self.placement, self.order)

    @property
    def seconds(self):
        """[N] of each op where it is placed."""
        return self.problem.seconds[np.arange(self.problem.num_ops), self.placement]


def cases(max_ops=12, ordered=None, execution=None, **options):
    """Random runs (fewer ops are simpler); `execution` fixes some of the settings."""

    def build(most, seed):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, max_ops=most, **options)
        problem = replace(problem, execution=replace(problem.execution, **(execution or {})))
        order = random_order(rng, problem) if ordered or (ordered is None and rng.random() < 0.4) else None
        return Case(problem, random_placement(rng, problem), order)

    return st.builds(build, st.integers(0, max_ops), st.integers(0, 2**32 - 1))


def holds_for(*strategies, examples=150):
    def decorate(test):
        return settings(max_examples=examples, deadline=None)(given(*strategies)(test))

    return decorate


PARALLEL = {"concurrency": "parallel"}


@holds_for(cases(integers=False, objective="latency"))
def test_no_run_beats_its_critical_path_or_its_busiest_device(case):
    graph, end = case.problem.graph, np.zeros(case.problem.num_ops)
    for op in graph.topological_order:
        inputs = graph.edge_producer[graph.consumers == op]
        end[op] = end[inputs].max(initial=0.0) + case.seconds[op]
    assert case.timeline.value >= end.max(initial=0.0)
    busy = np.bincount(case.placement, case.seconds, case.problem.num_devices)
    assert case.timeline.busy == pytest.approx(busy)
    assert case.timeline.value >= busy.max() * (1 - 1e-12)
    assert case.timeline.value == case.timeline.makespan


@holds_for(cases(integers=False), cases(integers=True))
def test_nothing_overlaps_on_a_device_or_a_channel(fractional, whole):
    for case in (fractional, whole):
        timeline, execution = case.timeline, case.problem.execution
        intervals = defaultdict(list)
        for op in np.flatnonzero(~case.problem.graph.is_stored):
            intervals["device", case.placement[op]].append((timeline.start[op], timeline.finish[op]))
        for _, source, target, start, finish in rows_of(timeline.transfers):
            for channel in case.problem.cluster.channels_of[source, target]:
                if execution.contention == "channel":
                    intervals["channel", channel].append((start, finish))
        if execution.concurrency == "sequential":
            # A transfer may pass several channels.
            intervals = {"all": list(dict.fromkeys(span for spans in intervals.values() for span in spans))}
        for what, spans in intervals.items():
            spans.sort()
            for (_, end), (start, _) in pairwise(spans):
                assert end <= start, what


@holds_for(cases(integers=False), cases(integers=True))
def test_an_op_starts_after_its_inputs_are_there(fractional, whole):
    for case in (fractional, whole):
        timeline, graph = case.timeline, case.problem.graph
        moved = timeline.transfers
        for t, producer, reader in zip(graph.edge_tensor, graph.edge_producer, graph.consumers, strict=True):
            if case.placement[producer] == case.placement[reader]:
                assert timeline.finish[producer] <= timeline.start[reader]
            else:
                mine = (moved.tensor == t) & (moved.target == case.placement[reader])
                if case.problem.execution.sends == "edge":
                    mine &= moved.reader == reader
                (i,) = np.flatnonzero(mine)
                assert timeline.finish[producer] <= moved.start[i]
                assert moved.finish[i] <= timeline.start[reader]


@holds_for(cases())
def test_each_tensor_crosses_once_to_each_device_that_reads_it(case):
    """Or once for each reader, with sends="edge"; and each transfer takes the link's time."""
    timeline, graph, cluster = case.timeline, case.problem.graph, case.problem.cluster
    remote = case.placement[graph.edge_producer] != case.placement[graph.consumers]
    wanted = list(zip(graph.edge_tensor[remote], case.placement[graph.consumers[remote]], strict=True))
    moved = timeline.transfers
    sent = Counter(zip(moved.tensor, moved.target, strict=True))
    assert sent == (Counter(wanted) if case.problem.execution.sends == "edge" else Counter(set(wanted)))
    assert moved.source.tolist() == case.placement[graph.tensor_producer[moved.tensor]].tolist()
    assert timeline.bytes_moved == sum(graph.tensor_bytes[t] for t in sent.elements() for t in t[:1])
    size = graph.tensor_bytes[moved.tensor]
    link = moved.source, moved.target
    assert (
        moved.finish.tolist()
        == (moved.start + (cluster.latency[link] + size * cluster.seconds_per_byte[link])).tolist()
    )


@holds_for(cases(ordered=False, execution=PARALLEL))
def test_a_device_never_idles_or_prefers_a_lesser_op_while_an_op_is_ready(case):
    timeline, graph = case.timeline, case.problem.graph
    ready = np.zeros(case.problem.num_ops)
    here = case.placement[graph.edge_producer] == case.placement[graph.consumers]
    np.maximum.at(ready, graph.consumers[here], timeline.finish[graph.edge_producer[here]])
    moved = timeline.transfers
    for t, reader in zip(graph.edge_tensor[~here], graph.consumers[~here], strict=True):
        mine = (moved.tensor == t) & (moved.target == case.placement[reader])
        if case.problem.execution.sends == "edge":
            mine &= moved.reader == reader
        ready[reader] = max(ready[reader], moved.finish[mine].max())
    priority = np.argsort(priority_order(case.problem))
    runs = ~graph.is_stored
    for op in np.flatnonzero(runs & (timeline.start > ready)):
        others = runs & (case.placement == case.placement[op]) & (np.arange(len(ready)) != op)
        low, high = np.maximum(timeline.start, ready[op]), np.minimum(timeline.finish, timeline.start[op])
        assert np.maximum(high - low, 0.0)[others].sum() == timeline.start[op] - ready[op]
        overtook = others & (timeline.start > ready[op]) & (timeline.start < timeline.start[op])
        assert (priority[overtook] < priority[op]).all()


@holds_for(cases(ordered=True, execution=PARALLEL))
def test_each_device_keeps_the_order_of_the_plan(case):
    timeline = case.timeline
    for d in range(case.problem.num_devices):
        mine = [op for op in case.order if case.placement[op] == d and not case.problem.graph.is_stored[op]]
        assert (timeline.finish[mine][:-1] <= timeline.start[mine][1:]).all()


@holds_for(cases(stored=0.0, objective="latency"))
def test_one_device_takes_the_sum_of_its_ops_and_moves_nothing(case):
    placement = np.full_like(case.placement, case.problem.num_devices - 1)
    timeline = simulate(case.problem, placement, case.order)
    assert timeline.value == case.problem.seconds[:, -1].sum()
    assert len(timeline.transfers) == 0


@holds_for(cases(ordered=True))
def test_devices_without_ops_change_nothing(case):
    problem, last = case.problem, case.problem.num_devices - 1
    alone = replace(
        problem,
        cluster=Cluster(problem.cluster.devices[-1:]),
        costs=Costs.create(problem.seconds[:, -1:]),
    )
    one = simulate(alone, np.zeros_like(case.placement), case.order)
    all_there = simulate(problem, np.full_like(case.placement, last), case.order)
    assert one.value == all_there.value
    assert one.start.tolist() == all_there.start.tolist()
    assert one.peak[0] == all_there.peak[last]
    assert all_there.peak[:last].tolist() == [0.0] * last


@holds_for(cases(integers=False))
def test_the_unit_of_time_scales_everything(case):
    problem = case.problem
    links = [replace(link, latency=link.latency * 2, bandwidth=link.bandwidth / 2) for link in problem.cluster.links]
    slower = replace(
        problem, cluster=replace(problem.cluster, links=tuple(links)), costs=Costs.create(problem.seconds * 2)
    )
    once, twice = case.timeline, simulate(slower, case.placement, case.order)
    assert twice.value == 2 * once.value
    assert twice.start.tolist() == (2 * once.start).tolist()
    assert twice.finish.tolist() == (2 * once.finish).tolist()
    assert twice.transfers.start.tolist() == (2 * once.transfers.start).tolist()
    assert twice.transfers.tensor.tolist() == once.transfers.tensor.tolist()
    assert twice.peak.tolist() == pytest.approx(once.peak.tolist(), rel=1e-12)  # fractions may add up in another order


@holds_for(cases(objective="latency", execution={"concurrency": "sequential"}))
def test_a_sequential_engine_takes_the_sum_of_all_times(case):
    moved = case.timeline.transfers
    assert case.timeline.value == case.seconds.sum() + (moved.finish - moved.start).sum()


@holds_for(cases(integers=False), cases(integers=True), st.integers(0, 2**32 - 1), examples=300)
def test_names_and_numbers_of_ops_and_devices_play_no_part(fractional, whole, seed):
    """Whole numbers bring ties; resident bytes tell the ops apart, so that none are exact twins."""
    rng = np.random.default_rng(seed)
    n = whole.problem.num_ops
    graph = replace(whole.problem.graph, resident=100.0 + rng.permutation(n))
    for case in (fractional, whole._replace(problem=replace(whole.problem, graph=graph))):
        problem, timeline = case.problem, case.timeline
        ops, devices = rng.permutation(problem.num_ops), rng.permutation(problem.num_devices)
        number, new_device = np.argsort(ops), np.argsort(devices)
        other = renumbered(problem, ops, devices)
        assert upward_rank(other).tolist() == upward_rank(problem)[ops].tolist()
        names = tuple(f"renamed {i}" for i in rng.permutation(problem.num_ops))
        other = replace(other, graph=replace(other.graph, op_names=names))
        order = None if case.order is None else number[case.order].astype(np.int32)
        again = simulate(other, new_device[case.placement[ops]].astype(np.int32), order)
        exact = problem.objective != "throughput" or case is not fractional  # loads are sums over ops
        assert again.value == (timeline.value if exact else pytest.approx(timeline.value, rel=1e-12))
        assert again.start.tolist() == timeline.start[ops].tolist()
        assert again.finish.tolist() == timeline.finish[ops].tolist()
        assert again.peak == pytest.approx(timeline.peak[devices], rel=1e-12)
        sent, sent_again = (
            sorted(zip(numbering[run.transfers.reader], run.transfers.start, run.transfers.finish, strict=True))
            for run, numbering in ((timeline, number), (again, np.arange(len(number))))
        )
        assert sent_again == sent


def test_ops_that_are_fast_on_different_devices_are_no_twins():
    problem = problem_of([[1, 2], [2, 1], [5, 5], [5, 5]], [(0, 2), (1, 3)], sizes=3.0)
    other = renumbered(problem, np.array([1, 0, 3, 2]), np.arange(2))
    assert simulate(other, [0, 0, 1, 1]).value == simulate(problem, [0, 0, 1, 1]).value


@holds_for(cases(max_ops=8))
def test_an_order_that_runs_an_op_before_its_input_is_refused(case):
    graph, order = case.problem.graph, random_order(np.random.default_rng(0), case.problem)
    for producer, reader in zip(graph.edge_producer, graph.consumers, strict=True):
        swapped = order.copy()
        swapped[[np.argmax(order == producer), np.argmax(order == reader)]] = reader, producer
        with pytest.raises(InvalidInput, match="before its input"):
            simulate(case.problem, case.placement, swapped)


def test_an_order_lists_each_op_once():
    problem = problem_of(np.ones((3, 1)))
    for order in ([0, 1], [0, 1, 1], [0, 1, 3], [-1, 0, 1]):
        with pytest.raises(InvalidInput, match="each of the 3 ops once"):
            evaluate(problem, [0, 0, 0], np.array(order))


def test_a_placement_is_a_device_number_for_each_op():
    problem = problem_of(np.ones((2, 2)))
    for placement, message in [
        ([0], "has 1 entries"),
        ([0, 2], "from 0 to 1"),
        ([0, -1], "from 0 to 1"),
        ([0.0, 1.0], "numbers"),
    ]:
        for function in (evaluate, simulate, violations):
            with pytest.raises(InvalidInput, match=message):
                function(problem, placement)
    with pytest.raises(InvalidInput, match="one placement"):
        simulate(problem, [[0, 0], [1, 1]])


def test_nothing_to_run_takes_no_time():
    for objective in OBJECTIVES:
        problem = problem_of(np.ones((0, 2)), objective=objective)
        assert simulate(problem, []).value == 0.0
        assert evaluate(problem, np.zeros((3, 0), int)).value.tolist() == [0.0, 0.0, 0.0]
        assert violations(problem, []) == []


# ---- small cases: transfers ------------------------------------------------------------------------------------------


def test_a_transfer_of_no_bytes_pays_latency():
    problem = problem_of(np.ones((2, 2)), [(0, 1)], sizes=0.0, latency=0.5)
    assert simulate(problem, [0, 1]).value == 2.5
    assert simulate(problem, [0, 0]).value == 2.0


def test_a_transfer_takes_latency_plus_bytes_over_bandwidth():
    problem = problem_of(np.ones((2, 2)), [(0, 1)], sizes=6.0, bandwidth=4.0, latency=0.5)
    assert rows_of(simulate(problem, [0, 1]).transfers) == [(0, 0, 1, 1.0, 3.0)]


def test_one_tensor_to_two_devices_queues_only_on_a_shared_channel():
    """Ready at 1, 5 s each; the longer reader is the more urgent."""
    problem = problem_of([[1] * 3, [1] * 3, [2] * 3], [(0, 1), (0, 2)], sizes=5.0)
    assert simulate(problem, [0, 1, 2]).start.tolist() == [0, 6, 6]
    problem = replace(problem, cluster=shared_bus(3))
    assert simulate(problem, [0, 1, 2]).start.tolist() == [0, 11, 6]
    problem = replace(problem, execution=Execution(contention="none"))
    assert simulate(problem, [0, 1, 2]).start.tolist() == [0, 6, 6]


def test_opposite_directions_of_a_dedicated_link_do_not_queue():
    problem = problem_of(np.ones((4, 2)), [(0, 2), (1, 3)], sizes=5.0)
    assert simulate(problem, [0, 1, 1, 0]).start.tolist() == [0, 0, 6, 6]
    problem = replace(problem, cluster=shared_bus(2))
    assert sorted(simulate(problem, [0, 1, 1, 0]).start.tolist()) == [0, 0, 6, 11]


def test_two_outputs_of_one_op_both_arrive():
    """50 s and 10 s, one after the other over one link."""
    columns = {"tensor_producer": [0, 0], "tensor_bytes": [50.0, 10.0]}
    problem = problem_of([[1, 1], [1, 1]], [(0, 1), (1, 1)], **columns)
    timeline = simulate(problem, [0, 1])
    assert rows_of(timeline.transfers) == [(0, 0, 1, 1, 51), (1, 0, 1, 51, 61)]
    assert timeline.start[1] == 61
    problem = replace(problem, execution=Execution(contention="none"))
    assert simulate(problem, [0, 1]).start[1] == 51


def test_two_readers_on_one_device_share_one_transfer_unless_sends_are_per_edge():
    problem = problem_of([[1, 1], [2, 2], [1, 1]], [(0, 1), (0, 2)], sizes=5.0)
    assert simulate(problem, [0, 1, 1]).start.tolist() == [0, 6, 8]
    problem = replace(problem, execution=Execution(sends="edge"))
    assert simulate(problem, [0, 1, 1]).start.tolist() == [0, 6, 11]


@pytest.mark.parametrize("listing", [[0, 1, 2, 3], [1, 0, 3, 2], [3, 2, 1, 0]])
def test_channels_are_served_in_event_time_whatever_the_listing(listing):
    """A (1000 s on d0) and B (10 s on d2) each send 50 s to d1 over one channel: B's child starts at 60."""
    seconds = np.repeat([[1000.0], [10.0], [10.0], [10.0]], 3, axis=1)  # A, B, child of A, child of B
    problem = problem_of(seconds, [(0, 2), (1, 3)], sizes=50.0, cluster=shared_bus(3))
    timeline = simulate(renumbered(problem, listing, [0, 1, 2]), np.array([0, 2, 1, 1])[listing])
    assert timeline.start[np.argsort(listing)].tolist() == [0, 0, 1050, 60]
    assert timeline.value == 1060


def test_a_transfer_holds_all_its_channels_and_none_overtakes_it():
    """d0->d1 is on x, d0->d2 on x and y, d1->d2 on y. Ready at 1 (x, 4 s), 2 (x and y, 1 s), 3 (y, 1 s)."""
    via = {("d0", "d1"): ("x",), ("d0", "d2"): ("x", "y"), ("d1", "d2"): ("y",)}
    names = ("d0", "d1", "d2")
    links = tuple(Link(a, b, 1.0, via=via.get((a, b), ())) for a in names for b in names if a != b)
    cluster = Cluster(tuple(Device(name) for name in names), links)
    seconds = np.repeat([[1.0], [1.0], [3.0], [1.0], [1.0], [1.0]], 3, axis=1)
    edges, sizes = [(0, 3), (1, 4), (2, 5)], [4.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    problem = problem_of(seconds, edges, sizes=sizes, cluster=cluster)
    timeline = simulate(problem, [0, 0, 1, 1, 2, 2])
    assert rows_of(timeline.transfers) == [(0, 0, 1, 1, 5), (1, 0, 2, 5, 6), (2, 1, 2, 6, 7)]


# ---- small cases: devices --------------------------------------------------------------------------------------------


def test_a_device_runs_the_ready_op_with_the_longest_way_to_go():
    """op2 has the longest path to the end (2 + 3), then op1 (4), then op0 (1)."""
    problem = problem_of([[1.0], [4.0], [2.0], [3.0]], [(2, 3)], sizes=0.0)
    assert simulate(problem, [0, 0, 0, 0]).start.tolist() == [9, 2, 0, 6]


def test_ties_go_to_the_longer_chain():
    """Both have 4 s to go; op1 in two steps."""
    problem = problem_of([[4.0], [2.0], [2.0]], [(1, 2)], sizes=0.0)
    assert simulate(problem, [0, 0, 0]).start[:2].tolist() == [2, 0]


def test_an_order_is_strict():
    """op2 waits for a transfer until 6; op3 could run before it, and does so only without an order."""
    problem = problem_of([[1, 1], [1, 1], [9, 9], [1, 1]], [(0, 2)], sizes=5.0)
    assert simulate(problem, [0, 1, 1, 1]).start.tolist() == [0, 0, 6, 1]
    assert simulate(problem, [0, 1, 1, 1], np.array([0, 2, 1, 3])).start.tolist() == [0, 15, 6, 16]


def test_completion_sums_over_models():
    """Two chains of their own, 3 s and 4 s, on one device or on two."""
    columns = {"model": [0, 1, 1], "models": ["a", "b"], "objective": "completion"}
    problem = problem_of([[3, 3], [2, 2], [2, 2]], [(1, 2)], sizes=0.0, **columns)
    assert simulate(problem, [0, 1, 1]).value == 3 + 4
    assert simulate(problem, [0, 0, 0]).value == 5 + 7  # op1, op0, op2
    assert simulate(problem, [0, 0, 0], np.array([0, 1, 2])).value == 3 + 7
    assert simulate(replace(problem, objective="latency"), [0, 0, 0]).value == 7


# ---- small cases: parameters -----------------------------------------------------------------------------------------


def streamed_layers(prefetch, **execution):
    """Four layers of 10 s on d0, one after the other, each with a parameter of 4 bytes (4 s) at home on d1."""
    seconds = np.array([[0.0]] * 4 + [[10.0]] * 4).repeat(2, axis=1)
    edges = [(0, 4), (1, 5), (2, 6), (3, 7), (4, 5), (5, 6), (6, 7)]
    columns = {"op_kinds": ["parameter"] * 4 + ["op"] * 4, "sizes": [4.0] * 4 + [0.0] * 4}
    problem = problem_of(seconds, edges, execution=Execution(prefetch=prefetch, **execution), **columns)
    return simulate(problem, [1] * 4 + [0] * 4)


@pytest.mark.parametrize(
    ("prefetch", "fetched", "started", "peak"),
    [
        (1, [0, 14, 28, 42], [4, 18, 32, 46], 4),
        (2, [0, 4, 14, 24], [4, 14, 24, 34], 8),
        (3, [0, 4, 8, 14], [4, 14, 24, 34], 12),
    ],
)
def test_parameters_are_fetched_at_most_so_many_layers_ahead(prefetch, fetched, started, peak):
    timeline = streamed_layers(prefetch)
    assert timeline.transfers.start.tolist() == fetched
    assert timeline.start[4:].tolist() == started
    assert timeline.peak.tolist() == [peak, 16]


def test_a_sequential_engine_fetches_right_before_the_reader():
    timeline = streamed_layers(2, concurrency="sequential")
    assert timeline.transfers.start.tolist() == [0, 14, 28, 42]
    assert timeline.value == 4 * (10 + 4)


def test_a_parameter_is_fetched_once_for_its_most_urgent_reader_and_not_at_all_at_home():
    columns = {"op_kinds": ["parameter", "op", "op"], "sizes": [5.0, 0.0, 0.0]}
    problem = problem_of([[0, 0], [1, 1], [2, 2]], [(0, 1), (0, 2)], **columns)
    timeline = simulate(problem, [1, 0, 0])
    assert timeline.start.tolist() == [0, 7, 5]
    assert timeline.transfers.reader.tolist() == [2]
    assert simulate(problem, [0, 0, 0]).start.tolist() == [0, 2, 0]


# ---- small cases: memory ---------------------------------------------------------------------------------------------


def test_a_level_that_rounding_leaves_below_nothing_hides_no_peak():
    """0.6 + 0.3 - 0.6 - 0.3 is below zero. Then op3 needs 3 bytes besides the 5 that it makes, for a short while."""
    seconds = np.array([[4.0], [4.0], [4.0], [1e-3], [4.1]]) * [1, 1]
    edges, columns = [(0, 1), (1, 2), (2, 3), (3, 4)], {"sizes": [0.6, 0.3, 0.0, 5.0, 0.0], "scratch": [0, 0, 0, 3, 0]}
    problem = problem_of(seconds, edges, bandwidth=0.2, **columns)
    assert evaluate(problem, [0, 0, 1, 0, 0]).peak.tolist() == [[8.0, 0.3]]


def profile(timeline, device):
    """(time, bytes) at each change."""
    times, held = timeline.memory_profile(device)
    changes = np.append(True, np.diff(held) != 0)
    return list(zip(times[changes].tolist(), held[changes].tolist(), strict=True))


def test_a_producer_keeps_its_tensor_until_its_last_send_ends():
    """op0 (1 s) sends 10 bytes (10 s) from 1 to 11; op2 runs beside it with 5 bytes of scratch."""
    columns = {"scratch": [0.0, 0.0, 5.0], "sizes": [10.0, 0.0, 0.0]}
    problem = problem_of([[1, 1], [1, 1], [2, 2]], [(0, 1)], **columns)
    timeline = simulate(problem, [0, 1, 0])
    assert profile(timeline, 0) == [(0, 10), (1, 15), (3, 10), (11, 0)]
    assert profile(timeline, 1) == [(0, 0), (1, 10), (12, 0)]  # from the transfer's start to the reader's end
    assert timeline.peak.tolist() == [15, 10]


def test_a_tensor_is_kept_until_its_last_local_reader_ends():
    problem = problem_of([[1], [3], [2]], [(0, 1), (0, 2)], sizes=[10.0, 0.0, 0.0])
    assert profile(simulate(problem, [0, 0, 0]), 0) == [(0, 10), (6, 0)]


def test_results_are_kept_to_the_end():
    problem = problem_of([[1], [1]], sizes=[7.0, 3.0])
    assert simulate(problem, [0, 0]).peak[0] == 10
    assert profile(simulate(problem, [0, 0]), 0)[-1] == (1, 10)


def test_scratch_is_held_while_its_op_runs():
    """What ends makes room for what begins: two scratch spaces of 4 bytes never meet on one device."""
    problem = problem_of([[1], [1]], sizes=0.0, scratch=4.0, resident=[1.0, 2.0])
    assert simulate(problem, [0, 0]).peak[0] == 3 + 4
    assert profile(simulate(problem, [0, 0]), 0)[-1] == (2, 3)


def test_static_memory_counts_resident_bytes_only():
    columns = {"scratch": 4.0, "resident": [1.0, 2.0], "sizes": 8.0}
    problem = problem_of([[1, 1], [1, 1]], [(0, 1)], execution=Execution(memory="static"), **columns)
    assert simulate(problem, [0, 1]).peak.tolist() == [1, 2]
    assert evaluate(problem, [0, 1]).peak.tolist() == [[1, 2]]
    assert profile(simulate(problem, [0, 0]), 0) == [(0, 3)]


# ---- throughput ------------------------------------------------------------------------------------------------------


def pipeline(seconds, edges, placement, *, devices=3, sizes=2.0, paying=None, cluster=None, phase=0, **settings):
    """Time per sample, with links of 1 byte/s, so a tensor of 2 bytes takes 2 s."""
    table = np.repeat(np.array(seconds, float)[:, None], devices, axis=1)
    execution = Execution(**settings)
    problem = problem_of(
        table, edges, sizes=sizes, cluster=cluster, objective="throughput", execution=execution, phase=phase
    )
    marked = tuple(
        replace(device, copies=paying is None or d in paying) for d, device in enumerate(problem.cluster.devices)
    )
    problem = replace(problem, cluster=replace(problem.cluster, devices=marked))
    value = simulate(problem, placement).value
    assert evaluate(problem, placement).value[0] == value
    return value


def test_a_stage_computes_while_it_copies_or_does_not():
    """3 s on d0, 2 s between, 4 s on d1."""
    assert pipeline([3, 4], [(0, 1)], [0, 1]) == 4
    assert pipeline([3, 4], [(0, 1)], [0, 1], overlap=False) == 4 + 2
    assert pipeline([3, 4], [(0, 1)], [0, 0], overlap=False) == 7
    assert pipeline([3, 1], [(0, 1)], [0, 1], sizes=5.0) == 5


def test_a_device_that_pays_for_no_copies():
    assert pipeline([3, 4], [(0, 1)], [0, 1], overlap=False, paying=[0]) == 3 + 2
    assert pipeline([3, 4], [(0, 1)], [0, 1], overlap=False, paying=[]) == 4


def test_a_sender_pays_for_each_receiver_unless_sends_are_staged():
    """3 s and one tensor of 2 s to two stages of 1 s."""
    assert pipeline([3, 1, 1], [(0, 1), (0, 2)], [0, 1, 2], overlap=False) == 3 + 2 + 2
    assert pipeline([3, 1, 1], [(0, 1), (0, 2)], [0, 1, 2], overlap=False, staged=True) == 3 + 2
    assert pipeline([3, 1, 1], [(0, 1), (0, 2)], [0, 1, 1], overlap=False) == 3 + 2  # once per device
    assert pipeline([3, 1, 1], [(0, 1), (0, 2)], [0, 1, 1], overlap=False, sends="edge") == 3 + 2 + 2
    links = tuple(Link(a, b, 1.0, 4.0 * (b == "d2")) for a in ("d0", "d1", "d2") for b in ("d0", "d1", "d2") if a != b)
    uneven = Cluster(tuple(Device(name) for name in ("d0", "d1", "d2")), links)  # 2 s to d1, 6 s to d2
    staged = {"overlap": False, "staged": True, "cluster": uneven}
    assert pipeline([3, 1, 1], [(0, 1), (0, 2)], [0, 1, 2], **staged) == 3 + 6
    assert pipeline([3, 1, 1], [(0, 1), (0, 2)], [0, 2, 1], **staged) == 3 + 6  # whichever is first
    assert pipeline([3, 1, 1], [(0, 1), (0, 2)], [0, 2, 1], paying=[1, 2], **staged) == 1 + 6


def test_a_shared_channel_can_be_the_bottleneck():
    """Three transfers of 2 s on one bus; each device takes part in two of them at most."""
    chain = ([1, 1, 1, 1], [(0, 1), (1, 2), (2, 3)], [0, 1, 2, 3])
    assert pipeline(*chain, devices=4, cluster=shared_bus(4)) == 6
    assert pipeline(*chain, devices=4, cluster=shared_bus(4), contention="none") == 4


def test_the_phases_of_training_share_a_device_or_alternate():
    """Forward 3 s and 4 s, backward 6 s and 2 s on d0 and d1."""
    step = ([3, 4, 6, 2], [], [0, 1, 0, 1])
    assert pipeline(*step, phase=[0, 0, 1, 1]) == 3 + 6
    assert pipeline(*step, phase=[0, 0, 1, 1], pipeline="gpipe") == 4 + 6
    assert pipeline(*step, phase=[0, 0, 1, 2], pipeline="gpipe") == 4 + 6


def test_the_longer_of_compute_and_copies_is_taken_over_the_whole_step():
    """d0: forward 1 s and a send of 5 s, backward 4 s: 5 s in all, but 5 + 4 one phase after the other."""
    step = ([1, 0, 4], [(0, 1)], [0, 1, 0])
    assert pipeline(*step, sizes=[5.0, 0.0, 0.0], phase=[0, 0, 1]) == 5
    assert pipeline(*step, sizes=[5.0, 0.0, 0.0], phase=[0, 0, 1], pipeline="gpipe") == 5 + 4


def test_pipeline_memory_counts_what_one_sample_needs_at_once():
    """d0: 1 resident, its tensor of 8, the larger scratch; d1: 2 resident, the copy of 8, its own tensor of 3."""
    columns = {"scratch": [4.0, 0.0, 6.0], "resident": [1.0, 2.0, 0.0], "sizes": [8.0, 3.0, 0.0]}
    problem = problem_of(np.ones((3, 2)), [(0, 1)], objective="throughput", **columns)
    assert simulate(problem, [0, 1, 0]).peak.tolist() == [1 + 8 + 6, 2 + 8 + 3]


def test_parameters_stay_where_they_are_read():
    """A weight of 6 bytes at d0 that both stages read, the tensor of 2 between them; backward reads the weight again.

    Inference sends only the tensor. Training sends the weight after each step, the cost of which its samples share.
    """
    columns = {"sizes": [6.0, 2.0, 0.0], "op_kinds": ["parameter", "op", "op"], "objective": "throughput"}
    seconds, edges = [[0, 0], [1, 1], [3, 3]], [(0, 1), (0, 2), (1, 2)]
    for memory, tensors in (("live", 2), ("static", 0)):
        added = Execution(overlap=False, memory=memory)
        problem = problem_of(seconds, edges, execution=added, **columns)
        timeline = simulate(problem, [0, 0, 1])
        assert timeline.value == 3 + 2
        assert timeline.peak.tolist() == [6 + tensors, 6 + tensors]
        trains = problem_of(seconds, edges, execution=added, phase=[0, 0, 1], **columns)
        assert simulate(trains, [0, 0, 1]).value == 3 + 2 + 6
        step = replace(trains, execution=replace(added, microbatches=4))
        assert simulate(step, [0, 0, 1]).value == 3 + 2 + 6 / 4
    state = problem_of(
        seconds, edges, execution=Execution(overlap=False), **columns | {"op_kinds": ["state", "op", "op"]}
    )
    assert simulate(state, [0, 0, 1]).value == 3 + 2 + 6


@holds_for(cases(objective="throughput", stored=0.3))
def test_throughput_equals_a_plain_recount(case):
    problem, graph, execution = case.problem, case.problem.graph, case.problem.execution
    cluster, place = problem.cluster, case.placement.tolist()
    compute, copying, channels = Counter(), Counter(), Counter()  # by (phase, device or channel)
    for op, d in enumerate(place):
        compute[graph.phase[op] > 0, d] += problem.seconds[op, d]
    held = Counter()
    for t, op in enumerate(graph.tensor_producer.tolist()):
        phase, home, size = graph.phase[op] > 0, place[op], graph.tensor_bytes[t]
        live, weight = execution.memory == "live", graph.op_kinds[op] == "parameter"
        held[home] += size * (live or graph.is_stored[op])
        share = 1.0 if not weight else (graph.phase > 0).any() / execution.microbatches
        receivers = [place[r] for r in graph.consumers[graph.edge_tensor == t] if place[r] != home]
        receivers = receivers if execution.sends == "edge" else sorted(set(receivers))
        times = [share * (cluster.latency[home, d] + size * cluster.seconds_per_byte[home, d]) for d in receivers]
        for d, time in zip(receivers, times, strict=True):
            held[d] += size * (live or weight)
            copying[phase, d] += time * cluster.devices[d].copies
            for channel in cluster.channels_of[home, d] if execution.contention == "channel" else ():
                channels[phase, channel] += time
        sending = max(times, default=0.0) if execution.staged else sum(times)
        copying[phase, home] += sending * cluster.devices[home].copies

    def load(phases):
        def total(counts, what):
            return sum(counts[phase, what] for phase in phases)

        combine = max if execution.overlap else lambda a, b: a + b
        devices = [combine(total(compute, d), total(copying, d)) for d in range(problem.num_devices)]
        return max(devices + [total(channels, c) for c in range(len(cluster.channels))])

    expected = load([False]) + load([True]) if execution.pipeline == "gpipe" else load([False, True])
    timeline = case.timeline
    assert timeline.value == expected
    for d in range(problem.num_devices):
        here = case.placement == d
        scratch = graph.scratch[here].max(initial=0.0) if execution.memory == "live" else 0.0
        assert timeline.peak[d] == graph.resident[here].sum() + held[d] + scratch


# ---- what a plan must keep -------------------------------------------------------------------------------------------


def check(problem, placement, *expected):
    """`violations` gives the expected texts, and `evaluate` agrees."""
    assert violations(problem, placement) == list(expected)
    assert bool(evaluate(problem, placement).feasible[0]) is not bool(expected)
    assert math.isfinite(evaluate(problem, placement).score[0]) is not bool(expected)


def test_ops_run_where_they_may():
    seconds = np.ones((2, 3))
    seconds[1, 0] = math.inf
    problem = problem_of(seconds, pins={"op0": "d0"}, forbidden=("d2",))
    check(problem, [0, 1])
    check(problem, [1, 1], "op 'op0' may not run on d1")  # pinned
    check(problem, [0, 0], "op 'op1' may not run on d0")  # unsupported
    check(problem, [0, 2], "op 'op1' may not run on d2")  # forbidden
    assert evaluate(problem, [[0, 1], [0, 0]]).value.tolist() == [1.0, math.inf]
    with pytest.raises(InvalidInput, match="op 'op1' may not run on d0"):
        simulate(problem, [0, 0])


def test_groups_share_a_device():
    problem = problem_of(np.ones((4, 2)), group=[-1, 5, -1, 5])
    check(problem, [0, 1, 0, 1])
    check(problem, [0, 1, 0, 0], "ops 'op1' and 'op3' must share a device")


def test_contiguity_wants_an_order_of_the_devices():
    """a -> b and c -> d with a, d on one device and b, c on the other: both are convex, yet each feeds the other."""
    text = "the devices do not form intervals of the dataflow: data flows back to a device that it has left"
    problem = problem_of(np.ones((4, 2)), [(0, 1), (2, 3)], contiguous=True)
    check(problem, [0, 1, 0, 1])
    check(problem, [0, 1, 1, 0], text)
    chain = problem_of(np.ones((3, 3)), [(0, 1), (1, 2)], contiguous=True)
    check(chain, [2, 0, 1])
    check(chain, [2, 0, 2], text)
    check(replace(chain, contiguous=False), [2, 0, 2])


def test_contiguity_sees_cycles_of_any_length():
    """Each device feeds the next in a ring of three, or of four, though no two feed each other."""
    text = "the devices do not form intervals of the dataflow: data flows back to a device that it has left"
    for length in (3, 4):
        # Pairs of ops: the first of each on one device, the second on the next.
        pairs = problem_of(np.ones((2 * length, length)), [(2 * i, 2 * i + 1) for i in range(length)], contiguous=True)
        ring = [d for i in range(length) for d in (i, (i + 1) % length)]
        check(pairs, ring, text)
        check(pairs, [*ring[:-1], length - 1])
    # A device outside of the cycle does not hide it, before it or after it.
    chain = problem_of(np.ones((6, 5)), [(i, i + 1) for i in range(5)], contiguous=True)
    check(chain, [4, 0, 1, 2, 0, 3], text)
    check(chain, [4, 0, 0, 1, 2, 3])


def test_contiguity_looks_at_forward_data_only():
    """Forward d0 -> d1, backward d1 -> d0; and a parameter at home on d1 that d0 reads."""
    chain = problem_of(np.ones((4, 2)), [(0, 1), (1, 2), (2, 3)], contiguous=True, phase=[0, 0, 1, 1])
    check(chain, [0, 1, 1, 0])
    update = problem_of(np.ones((3, 2)), [(0, 1), (2, 0)], contiguous=True, phase=[0, 0, 2])
    check(update, [0, 1, 1])  # what a later phase hands to a forward op is not forward data either
    kinds = ["parameter", "op", "op"]
    check(problem_of(np.zeros((3, 2)), [(0, 1), (1, 2)], contiguous=True, op_kinds=kinds), [1, 0, 1])


def test_at_most_so_many_devices():
    problem = problem_of(np.ones((3, 3)), max_devices=2)
    check(problem, [0, 1, 1])
    check(problem, [0, 1, 2], "it uses 3 devices, at most 2 are allowed")


def test_no_device_holds_more_than_its_memory():
    problem = problem_of(np.ones((2, 2)), sizes=0.0, resident=[1024.0, 2048.0], memory=[3072.0, 1024.0])
    check(problem, [0, 0])
    check(problem, [1, 0])
    check(problem, [0, 1], "d1 needs 2.00 KiB of memory and has 1.00 KiB")
    assert evaluate(problem, [0, 1]).value[0] == 1.0  # what it would take, if it could
    nearly = problem_of(np.ones((1, 1)), sizes=0.0, resident=[3.0 * 2**30], memory=[3.0 * 2**30 - 2])
    check(nearly, [0], "d0 needs 2 B more than its 3.00 GiB of memory")


def test_every_broken_rule_is_told():
    problem = problem_of(
        np.ones((2, 2)), [(0, 1)], sizes=0.0, resident=2048.0, memory=1024.0, group=0, pins={"op0": "d0"}, max_devices=1
    )
    assert violations(problem, [1, 0]) == [
        "op 'op0' may not run on d1",
        "ops 'op0' and 'op1' must share a device",
        "it uses 2 devices, at most 1 are allowed",
        "d0 needs 2.00 KiB of memory and has 1.00 KiB",
    ]


# ---- known optima ----------------------------------------------------------------------------------------------------

CHAIN = [(i, i + 1) for i in range(5)]
TWO_CHAINS = [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7)]
FORK_JOIN = [(0, 1), (0, 2), (0, 3), (0, 4), (1, 5), (2, 5), (3, 5), (4, 5)]


@pytest.mark.parametrize(
    ("seconds", "edges", "transfer", "best", "ways"),
    [
        ([100] * 6, CHAIN, 10, 600, 2),  # all together
        ([100] * 6, CHAIN, 1, 600, 2),  # short transfers do not make moving pay
        ([100] * 8, TWO_CHAINS, 10, 400, 2),  # one device each
        ([10, 100, 100, 100, 100, 10], FORK_JOIN, 10, 230, 12),  # two branches each; the join beside the later pair
        ([10, 100, 100, 100, 100, 10], FORK_JOIN, 300, 420, 2),  # all together
    ],
)
def test_known_optima_on_two_devices(seconds, edges, transfer, best, ways):
    problem = problem_of(np.repeat(np.array(seconds, float)[:, None], 2, axis=1), edges, sizes=transfer)
    values = evaluate(problem, all_placements(problem)).value
    assert values.min() == best
    assert (values == best).sum() == ways


# ---- numbering -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_lists_are_renumbered_as_by_sorting(seed):
    problem = random_problem(np.random.default_rng(seed), max_ops=30)
    graph, n = problem.graph, problem.num_ops
    order = np.random.default_rng(seed).permutation(n).astype(np.int32)
    (output_ptr, outputs), (input_ptr, edges) = graph.outputs, graph.in_edges
    found = kernel.renumber(order, output_ptr, outputs, graph.consumer_ptr, input_ptr, graph.edge_tensor[edges])
    number = np.argsort(order)
    tensor = np.lexsort((np.arange(graph.num_tensors), number[graph.tensor_producer]))
    pairs = sorted(zip(np.argsort(tensor)[graph.edge_tensor].tolist(), number[graph.consumers].tolist(), strict=True))
    by_reader = sorted((reader, read) for read, reader in pairs)
    producer = number[graph.tensor_producer][tensor]
    expected = (
        np.searchsorted(producer, np.arange(n + 1)), tensor, producer,
        np.searchsorted([read for read, _ in pairs], np.arange(graph.num_tensors + 1)),
        [reader for _, reader in pairs], [read for read, _ in pairs],
        np.searchsorted([reader for reader, _ in by_reader], np.arange(n + 1)), [read for _, read in by_reader],
    )  # fmt: skip
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.tolist() == np.asarray(theirs).tolist()
