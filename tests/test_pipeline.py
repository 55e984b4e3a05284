"""Prefix sweeps and stages by dynamic programming, against brute force."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oracles import brute_force
from placewise.cluster import Cluster, Device, Link
from placewise.driver import Budget, plan
from placewise.errors import InvalidInput, NoFeasiblePlan, Unsupported
from placewise.files import load_problem
from placewise.planners import pipeline
from placewise.planners.pipeline import _device_orders, _finer, _orders, _Stages, program
from placewise.problem import Execution
from placewise.simulator import evaluate, violations
from problems import problem_of, random_cluster, random_problem


def chain(rng, devices, *, ops=6, integers=True, training=False, **options):
    """A chain on devices and links that differ, each link with a channel of its own; with training, backward too.

    A forward op and its backward op share a device.
    """
    cluster = random_cluster(rng, devices, integers=integers)
    cluster = replace(cluster, links=tuple(replace(link, via=()) for link in cluster.links))
    n = 2 * ops if training else ops
    columns = {"scratch": rng.integers(0, 3, n), "resident": rng.integers(0, 5, n).astype(float)}
    if training:
        columns |= {"phase": [0] * ops + [1] * ops, "group": [*range(ops), *reversed(range(ops))]}
    seconds = rng.integers(0, 9, (n, devices)).astype(float) if integers else rng.exponential(3.0, (n, devices))
    edges = [(i, i + 1) for i in range(n - 1)]
    if training:
        edges += [(i, 2 * ops - 1 - i) for i in range(ops - 1)]  # activations that backward wants, on the same device
    sizes = rng.integers(0, 9, n).astype(float)
    columns |= {"tensor_producer": np.arange(n), "tensor_bytes": sizes} | options
    return problem_of(seconds, edges, cluster=cluster, **columns)


def interval_placements(problem):
    """[B, N] every placement of the program in intervals, each device once."""
    order, n = program(problem)[0], problem.num_units
    rows = []
    for stages in range(1, min(n, problem.num_devices) + 1):
        for cuts in itertools.combinations(range(1, n), stages - 1):
            lengths = np.diff([0, *cuts, n])
            for devices in itertools.permutations(range(problem.num_devices), stages):
                home = np.empty(n, np.int32)
                home[order] = np.repeat(devices, lengths)
                rows.append(home[problem.unit])
    rows = np.array(rows)
    return rows[problem.allowed[np.arange(problem.num_ops), rows].all(axis=1)]


def best_intervals(problem):
    return float(evaluate(problem, interval_placements(problem)).score.min(initial=math.inf))


def proves(problem, ends=None):
    row, cuts = program(problem)
    return _Stages(problem, row, cuts if ends is None else np.array(ends), lenient=False).prove()


# ---- dynamic programming ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_stages_are_optimal_on_chains(training):
    tight = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        execution = Execution(
            overlap=seed % 2 == 0, staged=seed % 3 == 0, contention="none" if seed % 5 == 0 else "channel",
            sends="edge" if seed % 7 == 0 else "tensor", memory="static" if seed % 4 == 0 else "live",
        )  # fmt: skip
        problem = chain(
            rng, 1 + seed % 3, ops=4 if training else 6, integers=seed % 2 == 0, training=training,
            objective="throughput", execution=execution, contiguous=seed % 2 == 1,
        )  # fmt: skip
        if seed % 3 != 1:
            room = problem.graph.resident.sum() + problem.graph.tensor_bytes.sum()
            limits = {name: float(room * rng.uniform(0.3, 1.0)) for name in problem.cluster.device_names}
            problem = replace(problem, cluster=problem.cluster.with_memory(limits))
        best = best_intervals(problem)
        try:
            found = plan(problem, "pipeline-dp")
        except NoFeasiblePlan:
            assert best == math.inf
            tight += 1
            continue
        assert found.value == pytest.approx(best, rel=1e-9)
        if problem.contiguous:
            assert found.gap < 1e-9  # and that it says so
            assert brute_force(problem)[0] == pytest.approx(best, rel=1e-9)
    assert tight < 30


def test_stages_are_the_best_intervals_for_the_latency_of_chains():
    for seed in range(40):
        rng = np.random.default_rng(seed)
        problem = chain(rng, 1 + seed % 3, integers=seed % 2 == 0)
        assert plan(problem, "pipeline-dp").value == pytest.approx(best_intervals(problem), rel=1e-9)


def test_pipedream_by_hand():
    """Four layers of 4, 1, 1 and 4 s on two devices, the second twice as slow, with 1 s between layers.

    4 + 1 + 1 | 8 would be 8 s, 4 + 1 | 2 + 8 is 10 s; all on d0 is 10 s; with the slow device first, 8 | 1 + 1 + 4.
    """
    seconds = np.array([[4.0, 8.0], [1.0, 2.0], [1.0, 2.0], [4.0, 8.0]])
    problem = problem_of(seconds, [(0, 1), (1, 2), (2, 3)], objective="throughput", contiguous=True)
    found = plan(problem, "pipeline-dp")
    assert (found.value, found.lower_bound) == (8.0, pytest.approx(8.0))
    assert found.placement.tolist() in ([0, 0, 0, 1], [1, 0, 0, 0])
    added = replace(problem, execution=Execution(overlap=False))
    assert plan(added, "pipeline-dp").value == 9.0


def test_a_graph_that_is_no_chain_gets_no_proof():
    fork = problem_of(np.ones((3, 2)), [(0, 1), (0, 2)], objective="throughput", contiguous=True)
    assert not proves(fork)
    for seed in range(80):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, max_ops=7, max_devices=3, objective="throughput", constrained=True)
        problem = replace(problem, contiguous=True)
        try:
            found = plan(problem, "pipeline-dp")
        except NoFeasiblePlan:
            continue
        assert violations(problem, found.placement) == []
        assert found.lower_bound <= brute_force(problem)[0] * (1 + 1e-9)


def test_shared_channels_and_gpipe_give_no_proof():
    rng = np.random.default_rng(0)
    options = {"objective": "throughput", "contiguous": True}
    alone = chain(rng, 2, training=True, **options)
    assert proves(alone)
    assert not proves(alone, [0, 2, 6])
    gpipe = replace(alone, execution=Execution(pipeline="gpipe"))
    assert not proves(gpipe)
    bus = Cluster(alone.cluster.devices, tuple(replace(link, via=("bus",)) for link in alone.cluster.links))
    assert not proves(replace(alone, cluster=bus))
    free = replace(alone, contiguous=False)
    assert not proves(free)


def test_pinned_units_leave_their_interval_where_they_must():
    """op1 in the middle is pinned to d1, and d0 is the only one that may have its neighbours."""
    seconds = [[1.0, math.inf], [1.0, 1.0], [1.0, math.inf]]
    problem = problem_of(seconds, [(0, 1), (1, 2)], pins={"op1": "d1"}, objective="throughput")
    assert plan(problem, "pipeline-dp").placement.tolist() == [0, 1, 0]


def test_long_programs_are_cut_in_strides_that_get_finer(monkeypatch):
    rng = np.random.default_rng(1)
    problem = chain(rng, 3, ops=60, objective="throughput", integers=False)
    exact = plan(problem, "pipeline-dp").value
    monkeypatch.setattr(pipeline, "_MOST_CUTS", 12)
    rough = plan(problem, "pipeline-dp")
    assert exact <= rough.value <= 1.15 * exact
    assert _finer(np.array([0, 10, 20, 30]), np.array([0, 10, 30]), 100).tolist() == [*range(21), 30]
    assert _finer(np.array([0, 10, 20, 30]), np.array([0, 10, 30]), 5).tolist() == [0, 5, 10, 15, 20, 30]


def test_no_more_devices_than_allowed():
    problem = chain(np.random.default_rng(3), 3, objective="throughput", max_devices=2, integers=False)
    found = plan(problem, "pipeline-dp")
    rows = [row for row in interval_placements(problem) if len(set(row.tolist())) <= 2]
    assert found.value == pytest.approx(evaluate(problem, rows).score.min())


# ---- orders of devices -----------------------------------------------------------------------------------------------


def paths(orders):
    """Every order of devices in the graph, from the first stage to the last."""
    found = []

    def back(arc, tail):
        if orders.device[arc] < 0:
            found.append(tuple(tail))
            return
        for other in orders.before[orders.start[arc] : orders.start[arc + 1]].tolist():
            back(other, [int(orders.device[arc]), *tail])

    for arc in np.flatnonzero(orders.following < 0):
        back(int(arc), [])
    return sorted(found)


def test_every_order_of_every_set_is_there_once():
    expected = sorted(p for k in (1, 2, 3) for p in itertools.permutations(range(3), k))
    assert paths(_orders([0, 1, 2], [-1, -1, -1], 3)) == expected
    assert paths(_orders([2, 0], [-1, -1], 1)) == [(0,), (2,)]
    assert paths(_orders([0, 1, 2], [-1, 0, 1], 3)) == [(0,), (0, 1), (0, 1, 2)]


def test_devices_that_are_alike_are_used_in_turn():
    problem = problem_of(np.ones((3, 4)), [(0, 1)], objective="throughput")
    orders, every = _device_orders(problem)
    assert every
    assert paths(orders) == [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)]
    slower = problem_of(np.tile([1.0, 1.0, 2.0], (3, 1)), [(0, 1)])
    assert paths(_device_orders(slower)[0]) == [
        (0,), (0, 1), (0, 1, 2), (0, 2), (0, 2, 1), (2,), (2, 0), (2, 0, 1),
    ]  # fmt: skip
    names = ["d0", "d1", "d2"]
    links = [Link(a, b, 2.0 if "d2" in (a, b) else 1.0) for a in names for b in names if a != b]
    near = problem_of(np.ones((3, 3)), cluster=Cluster(tuple(map(Device, names)), tuple(links)))
    assert (0, 2, 1) in paths(_device_orders(near)[0])
    assert (1, 0) not in paths(_device_orders(near)[0])
    one_way = [replace(link, latency=5.0) if link.source == "d0" else link for link in links]
    assert (1, 0) in paths(_device_orders(replace(near, cluster=Cluster(near.cluster.devices, tuple(one_way))))[0])


def test_many_devices_that_differ_are_used_fastest_first():
    seconds = np.tile(np.arange(20.0, 0.0, -1.0), (4, 1))
    orders, every = _device_orders(problem_of(seconds, objective="throughput"))
    assert not every
    assert paths(orders)[-1] == tuple(range(19, -1, -1))
    chained = problem_of(seconds, [(0, 1), (1, 2), (2, 3)], sizes=0.0, objective="throughput")
    assert plan(chained, "pipeline-dp").value == 3.0  # two units of 1 s, one of 2 s, one of 3 s


# ---- prefix sweep ----------------------------------------------------------------------------------------------------


def splits(problem):
    """[B, N] a prefix of the program on one device, the rest on another."""
    order, n, rows = program(problem)[0], problem.num_units, []
    for a, b in itertools.product(range(problem.num_devices), repeat=2):
        for k in range(n + 1):
            home = np.full(n, b, np.int32)
            home[order[:k]] = a
            rows.append(home[problem.unit])
    return np.array(rows)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_a_sweep_is_at_least_as_good_as_every_split(objective):
    equal = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        execution = Execution(concurrency="sequential" if seed % 2 and objective == "latency" else "parallel")
        problem = random_problem(rng, max_ops=9, objective=objective, execution=execution)
        if problem.num_ops:
            found, best = plan(problem, "prefix-sweep").value, evaluate(problem, splits(problem)).score.min()
            assert found <= best * (1 + 1e-12)
            equal += found == best
    assert 10 < equal < 40  # more than one cut helps at times


def test_a_sweep_in_strides_finds_the_cut():
    """Ops get slower on d0 and faster on d1 along a chain of 1000; a transfer costs little."""
    n = 1000
    seconds = np.stack([np.linspace(1.0, 3.0, n), np.linspace(3.0, 1.0, n)], axis=1)
    problem = problem_of(seconds, [(i, i + 1) for i in range(n - 1)], sizes=0.1)
    found = plan(problem, "prefix-sweep", options={"cuts": 16}, budget=Budget(evaluations=5000))
    assert found.placement.tolist() == [0] * 500 + [1] * 500
    assert found.evaluations < 1500


def test_a_sweep_returns_to_a_device():
    """The ends of a chain are fast on d0 only, the middle on d1 only."""
    seconds = np.array([[1.0, 9.0]] * 3 + [[9.0, 1.0]] * 4 + [[1.0, 9.0]] * 3)
    problem = problem_of(seconds, [(i, i + 1) for i in range(9)], sizes=0.5)
    found = plan(problem, "prefix-sweep")
    assert (found.placement.tolist(), found.value) == ([0] * 3 + [1] * 4 + [0] * 3, 11.0)


def test_a_sweep_leaves_pins_alone():
    problem = problem_of(np.ones((4, 2)), [(0, 1), (1, 2), (2, 3)], pins={"op1": "d1"}, objective="throughput")
    assert plan(problem, "prefix-sweep").placement[1] == 1


# ---- both ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["prefix-sweep", "pipeline-dp"])
def test_edges_of_the_range(method):
    assert plan(problem_of(np.zeros((0, 2))), method).value == 0.0
    assert plan(problem_of([[1.0], [2.0]], [(0, 1)]), method).value == 3.0
    assert plan(problem_of([[2.0, 1.0]], objective="throughput"), method).value == 1.0
    tight = problem_of(np.ones((4, 2)), [(0, 1)], sizes=0.0, resident=1.0, memory=2.0, objective="throughput")
    assert np.bincount(plan(tight, method).placement).tolist() == [2, 2]
    with pytest.raises(NoFeasiblePlan):
        plan(problem_of(np.ones((3, 2)), sizes=0.0, resident=2.0, memory=3.0), method)


def test_what_they_refuse():
    with pytest.raises(InvalidInput, match="cuts"):
        plan(problem_of([[1.0, 2.0]]), "prefix-sweep", options={"cuts": 0})
    with pytest.raises(Unsupported, match="completion"):
        plan(problem_of([[1.0, 2.0]], objective="completion"), "pipeline-dp")


def test_the_program_lists_units_by_their_first_op():
    problem = problem_of(np.ones((4, 2)), [(3, 2), (2, 1), (1, 0)], group=[-1, 5, 5, -1])
    row, cuts = program(problem)
    assert (row.tolist(), cuts.tolist()) == ([2, 1, 0], [0, 1, 2, 3])


def test_units_that_data_circles_through_stand_together():
    """op0 and op3 share a device, and between them flows a -> op1 -> op2; op4 comes after."""
    edges = [(0, 1), (1, 2), (2, 3), (3, 4)]
    problem = problem_of(np.ones((5, 2)), edges, group=[7, -1, -1, 7, -1], contiguous=True)
    row, cuts = program(problem)
    assert (row.tolist(), cuts.tolist()) == ([0, 1, 2, 3], [0, 3, 4])
    assert program(replace(problem, contiguous=False))[1].tolist() == [0, 1, 2, 3, 4]


def test_circles_are_put_into_the_order_of_the_data():
    """op1 and op3 share a device; op2, which op1's partner reads, runs in between and must come before both."""
    problem = problem_of(np.ones((4, 2)), [(0, 1), (2, 3)], group=[-1, 7, -1, 7], contiguous=True)
    row, cuts = program(problem)
    assert (row.tolist(), cuts.tolist()) == ([0, 2, 1], [0, 1, 2, 3])


def test_what_sends_more_than_it_reads_comes_late():
    """Four steps of 1 s in a row; each hands 1/8 of a second of data to an op of 1 s, which hands 5 s of it to the end.

    Cut where the program is, a device pays for some of the 5 s; with all four late, only for four times 1/8.
    """
    edges = [(0, 2), (2, 4), (4, 6), *((i, i + 1) for i in (0, 2, 4, 6)), *((i, 8) for i in (1, 3, 5, 7))]
    problem = problem_of(
        [[1.0] * 2] * 8 + [[0.0] * 2], sorted(edges), sizes=[0.125, 5.0] * 4 + [0.0], objective="throughput",
        contiguous=True, execution=Execution(overlap=False, contention="none"),
    )  # fmt: skip
    assert program(problem)[0].tolist() == list(range(9))
    assert program(problem, pipeline.late)[0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8]
    assert plan(problem, "pipeline-dp").value == 4 + 4 / 8 == brute_force(problem)[0]


def test_what_only_runs_backward_is_folded_to_where_it_exchanges_most():
    """Forward 0, 1, 2; backward 3 reads 9 bytes of op1, op4 reads 9 bytes of op0; the update op5 reads op4."""
    edges = [(0, 1), (1, 2), (2, 3), (1, 3), (3, 4), (0, 4), (4, 5)]
    problem = problem_of(np.ones((6, 2)), edges, sizes=[9.0, 9.0, 1.0, 1.0, 1.0, 1.0], phase=[0, 0, 0, 1, 1, 2])
    assert program(problem)[0].tolist() == [0, 4, 5, 1, 3, 2]


PUBLISHED = {  # ms; Tarnawski et al.'s DP over a linearised graph, as their program computes it
    "LayerGraphs/bert24_inference": 17.790, "LayerGraphs/bert24_training": 41.746,
    "LayerGraphs/inceptionv3_inference": 51.552, "LayerGraphs/resnet50_inference": 33.775,
    "LayerGraphs/resnet50_training": 78.650, "OperatorGraphs/bert_l-3_inference": 27.919,
    "OperatorGraphs/bert_l-12_inference": 147.478, "OperatorGraphs/resnet50_inference": 124.349,
    "OperatorGraphs/resnet50_training": 255.194, "OperatorGraphs/bert_l-3_training": 65.3031,
    "OperatorGraphs/bert_L-12_training": 437.998,
}  # fmt: skip


@pytest.mark.skipif("PLACEWISE_DATA" not in os.environ, reason="PLACEWISE_DATA is not set")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_pipelines(name):
    file = Path(os.environ["PLACEWISE_DATA"], "dnn-partitioning", "throughput-inputs", f"{name}.json")
    problem = replace(load_problem(file), contiguous=True)
    assert 1e3 * plan(problem, "pipeline-dp").value <= PUBLISHED[name] + 5e-4
