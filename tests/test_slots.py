"""Slots: the paper's latency model, its bounds, and the planners made for it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import reference
from oracles import all_placements, brute_force
from placewise import Budget, files, plan
from placewise.cluster import Cluster, Device, Link
from placewise.driver import Context
from placewise.errors import InvalidInput, Unsupported
from placewise.importers import dnn_partitioning
from placewise.planners import slot_milp
from placewise.planners.rows import Row
from placewise.planners.slot_search import Walk
from placewise.problem import Execution
from placewise.report.explain import critical_chain
from placewise.simulator import evaluate, simulate, violations
from placewise.simulator.bounds import lower_bound
from placewise.simulator.pieces import in_pieces
from problems import problem_of, random_placement, random_problem

SLOTS = Execution(concurrency="slots", memory="static")


def accelerators_and_pool(count, *, memory=np.inf, bandwidth=1.0):
    """Accelerators, then a pool of CPUs."""
    devices = [Device(f"acc{i}", memory=memory) for i in range(count)] + [Device("cpu", "cpu", copies=False)]
    names = [device.name for device in devices]
    return Cluster(tuple(devices), tuple(Link(a, b, bandwidth) for a in names for b in names if a != b))


def random_slots(seed, *, max_ops=9, most_slots=3, **options):
    rng = np.random.default_rng(seed)
    objective = "completion" if seed % 4 == 0 else "latency"
    execution = replace(SLOTS, slots=1 + (seed // 4) % most_slots)
    stored = 0.2 if seed % 3 == 0 else 0.0
    problem = random_problem(rng, max_ops=max_ops, objective=objective, execution=execution, stored=stored, **options)
    return problem, rng


# ---- what a piece costs ----------------------------------------------------------------------------------------------


def test_a_piece_waits_for_all_inputs_and_shows_nothing_before_its_end():
    """cpu(2) -> acc0: receives 3, runs 1 + 4, sends 5 -> acc1: receives 5, runs 2 -> nothing to send."""
    cluster = accelerators_and_pool(2)
    seconds = [[9, 9, 2], [1, 9, 9], [4, 9, 9], [9, 2, 9]]
    problem = problem_of(
        seconds, [(0, 1), (1, 2), (2, 3)], sizes=[3.0, 7.0, 5.0, 1.0], cluster=cluster, execution=SLOTS
    )
    timeline = simulate(problem, [2, 0, 0, 1])
    assert timeline.value == 2 + (3 + 1 + 4 + 5) + (5 + 2)
    assert timeline.start.tolist() == [0, 5, 6, 20]
    assert timeline.finish.tolist() == [2, 6, 10, 22]
    moves = timeline.transfers
    assert moves.start.tolist() == [2, 10]  # the second lies in host memory from 15, when acc1 begins to receive it
    assert moves.finish.tolist() == [5, 20]
    assert sum(step.seconds for step in critical_chain(timeline)) == timeline.value
    # Two readers of one tensor on the same device: received once; sent once, however many devices read it.
    fork = problem_of(
        [[1, 9, 9], [9, 2, 9], [9, 2, 9], [9, 9, 4]], [(0, 1), (0, 2), (0, 3)], sizes=3.0, cluster=cluster,
        execution=SLOTS,
    )  # fmt: skip
    assert evaluate(fork, [0, 1, 1, 2]).value.tolist() == [(1 + 3) + (3 + 2 + 2)]


def test_a_pool_runs_any_number_at_once():
    problem = problem_of([[1, 5]] * 4, cluster=accelerators_and_pool(1), execution=SLOTS)
    assert evaluate(problem, [[1, 1, 1, 1], [0, 0, 0, 0]]).value.tolist() == [5, 4]


def test_more_pieces_than_slots_is_a_broken_rule():
    cluster = accelerators_and_pool(1)
    chain = problem_of([[1, 1]] * 3, [(0, 1), (1, 2)], cluster=cluster, execution=SLOTS)
    assert violations(chain, [0, 1, 0]) == [
        "data leaves acc0 and comes back for op 'op2' once too often: one piece is allowed on each device"
    ]
    assert not evaluate(chain, [0, 1, 0]).feasible[0]
    with pytest.raises(InvalidInput, match="data leaves acc0 and comes back"):
        simulate(chain, [0, 1, 0])
    two = replace(chain, execution=replace(SLOTS, slots=2))
    assert violations(two, [0, 1, 0]) == []
    assert evaluate(two, [0, 1, 0]).value.tolist() == [(1 + 1) + 1 + (1 + 1)]


def test_pieces_that_wait_for_each_other_are_a_broken_rule():
    """a0 -> b0 and b1 -> a1: each device is convex, but neither can go first."""
    problem = problem_of([[1, 1, 9]] * 4, [(0, 1), (2, 3)], cluster=accelerators_and_pool(2), execution=SLOTS)
    assert violations(problem, [0, 1, 1, 0]) == [
        "op 'op3' on acc0 can never start: pieces wait for each other in a circle"
    ]
    with pytest.raises(InvalidInput, match="circle"):
        simulate(problem, [0, 1, 1, 0])


def test_settings_that_make_no_sense():
    with pytest.raises(InvalidInput, match=r'execution\.memory: must be "static"'):
        Execution(concurrency="slots")
    with pytest.raises(InvalidInput, match=r"execution\.slots: must be a whole number"):
        replace(SLOTS, slots=0)
    with pytest.raises(InvalidInput, match="an engine with slots has no pipeline"):
        problem_of([[1.0]], objective="throughput", execution=SLOTS)


def test_a_file_keeps_the_slots(tmp_path):
    problem = problem_of([[1.0, 2.0]], execution=replace(SLOTS, slots=3))
    files.save_problem(problem, tmp_path / "p.json")
    assert files.load_problem_file(tmp_path / "p.json").execution == replace(SLOTS, slots=3)


def test_the_kernel_equals_its_twin():
    seen = {"": 0, "too many": 0, "circle": 0}
    for seed in range(240):
        problem, rng = random_slots(seed, integers=seed % 2 == 0)
        rows = np.array([random_placement(rng, problem) for _ in range(6)], np.int32).reshape(6, problem.num_ops)
        expected = [reference.run_in_slots(problem, row) for row in rows]
        assert evaluate(problem, rows).value.tolist() == [value for value, _ in expected]
        for row, (value, why) in zip(rows, expected, strict=True):
            seen[why] += 1
            words = [text for text in violations(problem, row) if "memory" not in text]
            assert bool(words) == bool(why)
            assert not why or ("circle" in words[0]) == (why == "circle")
            if not why and problem.objective == "latency":
                timeline = simulate(problem, row)
                assert timeline.value == value
                assert timeline.makespan == pytest.approx(value)
                for t, u, v in zip(
                    problem.graph.edge_tensor, problem.graph.edge_producer, problem.graph.consumers, strict=True
                ):
                    assert timeline.finish[u] <= timeline.start[v] * (1 + 1e-12), t
                assert sum(step.seconds for step in critical_chain(timeline)) == pytest.approx(value)
    assert min(seen.values()) > 10, seen


def test_no_placement_beats_the_bound():
    met = 0
    for seed in range(100):
        problem, _ = random_slots(seed, max_ops=6, max_devices=3, constrained=True)
        if problem.num_ops:
            best, _ = brute_force(problem)
            bound = lower_bound(problem).value
            assert bound <= best * (1 + 1e-12)
            met += bool(bound == pytest.approx(best))
    assert met > 30  # and it is no empty claim


def test_no_placement_beats_the_bound_where_memory_cuts_paths():
    shown = met = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        n, accelerators = int(rng.integers(2, 8)), int(rng.integers(1, 3))
        seconds = rng.integers(0, 9, (n, accelerators + 1)) * [*[1.0] * accelerators, 3.0]
        skips = {(int(a), int(b)) for a, b in rng.integers(0, n, (3, 2)) if a < b}
        problem = problem_of(
            seconds, sorted({(i, i + 1) for i in range(n - 1) if rng.random() < 0.9} | skips),
            sizes=rng.integers(0, 5, n), resident=rng.integers(0, 4, n),
            group=np.where(rng.random(n) < 0.4, rng.integers(0, 2, n), -1),
            cluster=accelerators_and_pool(accelerators, memory=5.0), execution=replace(SLOTS, slots=1 + seed % 2),
        )  # fmt: skip
        best, bound = brute_force(problem)[0], lower_bound(problem)
        assert bound.value <= best * (1 + 1e-12), seed
        shown += "path under memory" in bound.parts
        met += bound.value == pytest.approx(best)
    assert shown > 30
    assert met > 30


# ---- planners --------------------------------------------------------------------------------------------------------


def small_problems(count, **options):
    """Those with a feasible placement that such planners take, and the least value."""
    found = 0
    for seed in range(1000):
        problem, _ = random_slots(seed, max_ops=6, max_devices=3, constrained=True, **options)
        if problem.num_ops and not problem.contiguous and problem.max_devices is None:
            best, _ = brute_force(problem)
            if np.isfinite(best):
                yield seed, problem, best
                found += 1
                if found == count:
                    return


@pytest.mark.parametrize("solver", ["highs", "cpsat"])
def test_the_integer_programme_is_right(solver):
    """With one slot it finds and proves the best; with several, what it proves is true."""
    for seed, problem, best in small_problems(40):
        budget = Budget(seconds=None if solver == "cpsat" else 60.0, evaluations=40_000)
        found = plan(problem, "slot-milp", budget=budget, options={"solver": solver})
        assert found.lower_bound <= best * (1 + 1e-9), seed
        if problem.execution.slots == 1:
            assert found.value == pytest.approx(best), seed
            assert found.lower_bound == pytest.approx(best, rel=1e-4), seed


@pytest.mark.parametrize("solver", ["highs", "cpsat"])
def test_the_integer_programme_finds_the_best_from_the_worst(solver):
    """The solvers find what the search would have given them."""
    better = 0
    for seed, problem, best in small_problems(30, most_slots=1):
        rows = all_placements(problem)
        score = evaluate(problem, rows).score
        worst = int(np.where(np.isfinite(score), score, -1.0).argmax())
        programme = slot_milp._Programme(problem, rows[worst], score[worst], 0.0, whole=solver == "cpsat")
        ctx = Context(problem, Budget(seconds=60), 0, 0.0, None, "slot-milp")
        proved, answer = slot_milp._solve(ctx, programme.rows, programme.value, solver)
        assert proved * programme.unit == pytest.approx(best, rel=1e-4), seed
        placement = programme.placement(answer)
        if placement is None:
            assert score[worst] == best
        else:
            better += bool(score[worst] > best)
            assert evaluate(problem, placement).score[0] == pytest.approx(best), seed
    assert better > 15


def test_the_search_finds_nearly_every_optimum_of_tiny_problems():
    values = [
        (plan(problem, "slot-search", budget=Budget(evaluations=1000)).value, best)
        for _, problem, best in small_problems(40, integers=False)
    ]
    assert all(value >= best * (1 - 1e-12) for value, best in values)
    assert sum(value <= best * (1 + 1e-9) for value, best in values) >= 37


def test_a_row_is_cut_in_the_best_way():
    """A chain: two ops per piece fit, and the cheap tensors are those after the first and the third op."""
    cluster = accelerators_and_pool(3, memory=2.0)
    problem = problem_of(
        [[1, 1, 1, 9]] * 5, [(i, i + 1) for i in range(4)], sizes=[1.0, 5.0, 1.0, 5.0, 5.0], resident=np.ones(5),
        cluster=cluster, execution=SLOTS,
    )  # fmt: skip
    found = plan(problem, "slot-search", budget=Budget(evaluations=2))
    assert found.value == (1 + 1) + (1 + 2 + 1) + (1 + 2)
    assert brute_force(problem)[0] == found.value


def test_a_cut_chain_is_the_best_of_all_placements():
    """On a chain, only intervals are convex. Accelerators differ in every other case: then their order counts too."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 7))
        seconds = np.repeat(rng.integers(1, 9, (n, 1)), 3, axis=1) * [1, 1 + seed % 2, 4]
        problem = problem_of(
            seconds, [(i, i + 1) for i in range(n - 1)], sizes=rng.integers(0, 5, n), resident=rng.integers(0, 4, n),
            cluster=accelerators_and_pool(2, memory=6.0), execution=SLOTS,
        )  # fmt: skip
        row = Row(problem)
        row.anneal(0.0, 40, seed)
        assert evaluate(problem, row.plan()[0]).score[0] == brute_force(problem)[0], seed


def blocks_in_slots(rng, slots):
    """Branches between ops that everything passes through, with a jump; two accelerators with little memory, a pool."""
    edges, joint, n = [], 0, 1
    while n < 7:
        branches = [int(rng.integers(1, 3)) for _ in range(int(rng.integers(1, 4)))]
        ends = []
        for length in branches:
            before = joint
            for _ in range(min(length, 7 - n)):
                edges.append((before, n))
                before, n = n, n + 1
            ends.append(before)
        if n < 7:
            edges += [(end, n) for end in sorted(set(ends))]
            joint, n = n, n + 1
    if rng.random() < 0.3:
        edges.append((0, 6))
    seconds = np.repeat(rng.integers(0, 9, (7, 1)).astype(float), 3, axis=1) * [1, 1, rng.integers(1, 8)]
    execution = replace(SLOTS, slots=slots)
    return problem_of(
        seconds, sorted(set(edges)), sizes=rng.integers(0, 9, 7), resident=rng.integers(0, 5, 7).astype(float),
        group=np.where(rng.random(7) < 0.2, 0, -1), execution=execution,
        cluster=accelerators_and_pool(2, memory=float(rng.integers(5, 15))),
    )  # fmt: skip


@pytest.mark.parametrize("slots", [1, 2])
def test_no_plan_beats_pieces_that_fit_and_are_cut_out_whole(slots):
    said = met = 0
    for seed in range(100):
        problem = blocks_in_slots(np.random.default_rng(seed), slots)
        best, bound = brute_force(problem)[0], lower_bound(problem)
        assert bound.value <= best, seed
        found = bound.parts.get("path under memory", 0.0)
        said += math.isfinite(best) and found > 0
        met += found >= best * (1 - 1e-9) > 0
        path, rng = [0], np.random.default_rng(seed)  # any other path will do as well
        while len(readers := problem.graph.consumers[problem.graph.edge_producer == path[-1]]):
            path.append(int(rng.choice(readers)))
        assert in_pieces(problem, path, problem.allowed, 1e-9) <= best, seed
    assert said > 40
    assert met > 4  # so that a bound that is a little too high would have been noticed


@pytest.mark.parametrize("size", [1.1, 1.3, 1.7, 1.9, 3.3])
def test_a_tensor_that_is_not_sent_leaves_no_rounding_behind(size):
    """1.7 s come and go again, and of 1 ns more is left than there was. One device is too small, so pieces count."""
    problem = problem_of(
        [[0.0, 0.0], [1e-9, 1e-9]], [(0, 1)], sizes=[size, 0.0], resident=[0.0, 5.0], memory=[9.0, 4.0], execution=SLOTS
    )
    assert lower_bound(problem).value <= brute_force(problem)[0] == 1e-9


def test_what_two_joints_share_all_between_them_shares():
    """Four branches of 1 s and 2 bytes between two ops; one byte too many for one piece."""
    edges = [(0, i) for i in (1, 2, 3, 4)] + [(i, 5) for i in (1, 2, 3, 4)]
    problem = problem_of(
        np.ones((6, 2)), edges, sizes=[9, 1, 1, 1, 1, 0], resident=[1.0, 2.0, 2.0, 2.0, 2.0, 1.0], execution=SLOTS,
        memory=9.0,
    )  # fmt: skip
    # The best are op0 to op4 in a piece, which sends four tensors of 1 s, and op5 in another, which receives them.
    assert brute_force(problem)[0] == 5 + (4 + 4) + 1
    # The bound knows of the path and of all that is cut, but not where the other branches are.
    assert lower_bound(problem).value == pytest.approx(3 + (4 + 4), rel=1e-6)


def test_walks_see_what_the_simulator_sees():
    for seed in range(60):
        problem, rng = random_slots(seed, most_slots=1, max_ops=12)
        if problem.num_ops and problem.num_devices > 1:
            walk = Walk(problem, random_placement(rng, problem))
            walk.anneal(1.0, 20, seed)
            assert walk.value[1] == evaluate(problem, walk.placement()).value[0]


def test_other_engines_are_refused():
    for planner in ("slot-search", "slot-milp"):
        with pytest.raises(Unsupported, match="this engine has no slots"):
            plan(problem_of([[1.0, 2.0]]), planner)


# ---- published inputs ------------------------------------------------------------------------------------------------


def published(path):
    root = os.environ.get("PLACEWISE_DATA")
    if not root:
        pytest.skip("PLACEWISE_DATA is not set")
    file = Path(root) / "dnn-partitioning" / path
    if not file.exists():
        pytest.skip(f"PLACEWISE_DATA has no {path}")
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    ("name", "milliseconds"),
    [
        ("LayerGraphs/bert24", 924.06), ("LayerGraphs/gnmt", 1824.35), ("LayerGraphs/inceptionv3", 1952.77),
        ("OperatorGraphs/bert_l-3", 1099.93), ("OperatorGraphs/bert_l-12", 14016.84),
        ("OperatorGraphs/resnet50", 6666.67),
    ],
)  # fmt: skip
def test_the_latency_of_cpus_alone(name, milliseconds):
    problem = dnn_partitioning.load(published(f"latency-inputs/{name}_inference.json"), name, objective="latency")
    on_cpu = np.full(problem.num_ops, problem.num_devices - 1)
    assert evaluate(problem, on_cpu).value[0] == pytest.approx(milliseconds * 1e-3, abs=0.01e-3)


@pytest.mark.parametrize(
    ("name", "milliseconds", "wrong"),
    [("bert24", 111.937, ""), ("gnmt", 293.403, "fpga5 needs 720 MiB"), ("inceptionv3", 865.519, "fpga0 needs 6.38")],
)
def test_the_latency_of_human_experts(name, milliseconds, wrong):
    """Reproduced to the digit. Two of them exceed the memory, and that for BERT-24 takes six accelerators of five."""
    data = published(f"latency-inputs/LayerGraphs/{name}_inference.json")
    if name == "bert24":
        assert data["maxFPGAs"] == 5
        data["maxFPGAs"] = 6
    problem = dnn_partitioning.load(data, name, objective="latency")
    placement = dnn_partitioning.load_split(published(f"human-experts/{name}_inference_expert.json"), problem)
    assert evaluate(problem, placement).value[0] == pytest.approx(milliseconds * 1e-3, abs=0.0006e-3)
    assert [text[: len(wrong)] for text in violations(problem, placement)] == ([wrong] if wrong else [])


@pytest.mark.parametrize(
    ("name", "milliseconds"),
    [
        ("LayerGraphs/bert24", 100.2185), ("LayerGraphs/inceptionv3", 2485.24), ("OperatorGraphs/bert_l-3", 416.204),
        ("OperatorGraphs/bert_l-12", 867.839), ("OperatorGraphs/resnet50", 839.536),
    ],
)  # fmt: skip
def test_the_latency_of_filling_accelerators_in_turn(name, milliseconds):
    """What the authors' greedy method gives; which depth-first order it takes is not known, so it is one of many."""
    problem = dnn_partitioning.load(published(f"latency-inputs/{name}_inference.json"), name, objective="latency")
    graph, unit = problem.graph, problem.unit
    inputs = [[] for _ in range(problem.num_units)]
    for u, v in np.unique(np.stack([unit[graph.edge_producer], unit[graph.consumers]]), axis=1).T.tolist():
        if u != v:
            inputs[v].append(u)
    need = problem.per_unit(graph.resident_bytes)
    found = []
    for seed in range(100):
        order, rng = {}, np.random.default_rng(seed)
        stack = rng.permutation(np.setdiff1d(np.arange(problem.num_units), np.concatenate(inputs))).tolist()
        while stack:  # a unit is done when it comes up again
            above = [u for u in inputs[stack[-1]] if u not in order]
            if above:
                stack.append(above[rng.integers(len(above))])
            else:
                order.setdefault(stack.pop())
        device, used, place = 0, 0.0, np.empty(problem.num_units, np.int32)
        for u in order:
            if used + need[u] > problem.capacity[0]:
                device, used = device + 1, 0.0
            place[u] = device
            used += need[u]
        found.append(float(evaluate(problem, place[unit]).score[0]))
    assert min(abs(np.array(found) - milliseconds * 1e-3)) < 0.005e-3


def test_the_latency_of_training_is_that_of_a_parallel_engine():
    """The paper has slots for inference only."""
    data = published("throughput-inputs/LayerGraphs/bert24_training.json")
    assert dnn_partitioning.load(data, "training", objective="latency").execution.concurrency == "parallel"
