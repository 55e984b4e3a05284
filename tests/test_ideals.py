"""Contiguous pipelines by dynamic programming over ideals, against brute force and published optima."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oracles import brute_force
from placewise import plan
from placewise.cluster import Cluster, Device, Link
from placewise.costs import Costs
from placewise.driver import Budget
from placewise.errors import NoFeasiblePlan, Unsupported
from placewise.files import load_problem
from placewise.planners import ideals, ideals_kernel, ideals_search, stages
from placewise.planners.ideals_kernel import TooManyIdeals
from placewise.planners.ideals_search import Search
from placewise.problem import Execution
from problems import problem_of, random_execution, random_problem

INPUTS = "dnn-partitioning/throughput-inputs"


def pipeline(rng, **options):
    """A problem with some of everything that throughput knows, contiguous."""
    execution = random_execution(rng, "throughput")
    settings = {"max_ops": 7, "max_devices": 3, "constrained": True, "stored": 0.1, "integers": rng.random() < 0.5}
    problem = random_problem(rng, objective="throughput", execution=execution, **settings | options)
    return replace(problem, contiguous=True)


def with_equal_links(rng, problem):
    """The same with links that are all alike, and sends whose costs ideals know exactly; often with equal devices."""
    cluster, execution = problem.cluster, replace(problem.execution, contention="none")
    if execution.sends == "tensor":
        execution = replace(execution, staged=True)
    devices, seconds = list(cluster.devices), problem.costs.seconds.copy()
    if len(devices) > 1 and not problem.pins and rng.random() < 0.5:
        devices[1] = replace(devices[0], name=devices[1].name)
        seconds[:, 1] = seconds[:, 0]
    bandwidth, latency = float(rng.choice([0.5, 1.0, 2.0])), float(rng.integers(0, 3))
    names = cluster.device_names
    links = tuple(Link(a, b, bandwidth, latency) for a in names for b in names if a != b)
    if not np.isfinite(seconds).any(axis=1).all():
        seconds = problem.costs.seconds
    try:
        return replace(problem, execution=execution, cluster=Cluster(devices, links), costs=Costs.create(seconds))
    except ValueError:  # a group that no device can run any more
        return replace(problem, execution=execution, cluster=Cluster(cluster.devices, links))


def planned(problem, planner="ideals"):
    """(value, bound) or infinities where there is no plan."""
    try:
        found = plan(problem, planner, budget=Budget(seconds=60))
    except NoFeasiblePlan:
        return math.inf, math.inf
    assert found.stopped == "finished"
    return found.value, found.lower_bound


# ---- against brute force ---------------------------------------------------------------------------------------------


def test_what_is_no_better_than_something_known_need_not_be_found():
    """It is enough to prove that nothing is below; where something is, it is found with its proof."""
    closed = 0
    for seed in range(80):
        rng = np.random.default_rng(seed)
        problem = with_equal_links(rng, pipeline(rng)) if seed % 2 else pipeline(rng)
        best = brute_force(problem)[0] if problem.num_ops else 0.0
        if not 0 < best < math.inf:
            continue
        for goal in (0.8 * best, best, 1.2 * best):
            try:
                found = plan(problem, "ideals", below=goal)
                value, bound = found.value, found.lower_bound
            except NoFeasiblePlan as error:
                value, bound = math.inf, error.lower_bound
            assert min(goal, best) * (1 - 2e-9) <= bound <= best * (1 + 1e-9), (seed, goal)
            assert value == pytest.approx(best, rel=1e-12) if goal > best else value >= best * (1 - 1e-12)
            closed += value > best * (1 + 1e-9)
    assert closed > 5


def test_the_best_of_all_pipelines_with_proof_where_links_are_equal():
    some = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        problem = with_equal_links(rng, pipeline(rng))
        best = brute_force(problem)[0] if problem.num_ops else 0.0
        value, bound = planned(problem)
        assert value == pytest.approx(best, rel=1e-12), seed
        assert math.isinf(best) or bound >= value * (1 - 2e-9), seed
        some += math.isfinite(best)
    assert some > 100


def test_the_best_with_proof_where_links_differ(monkeypatch):
    """Shared channels and sends to each reader too: what stages are charged too little for is closed part by part."""
    able, divided, undercharged = 0, list[int](), ideals._undercharged
    monkeypatch.setattr(ideals, "_undercharged", lambda *given: (divided.append(seed), undercharged(*given))[1])
    for seed in range(150):
        problem = pipeline(np.random.default_rng(1000 + seed))
        best = brute_force(problem)[0] if problem.num_ops else 0.0
        value, bound = planned(problem)
        assert value == pytest.approx(best, rel=1e-12), seed
        assert math.isinf(best) or best * (1 + 1e-9) >= bound >= value * (1 - 2e-9), seed
        able += math.isfinite(best)
    assert able > 100
    assert divided


def test_branches_that_hold_several_samples():
    """Two branches side by side hold fewer samples at a time than if one came after the other."""
    able = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        n, devices = int(rng.integers(3, 6)), int(rng.integers(2, 4))
        flow = [(i, j) for i in range(n) for j in range(i + 1, min(n, i + 3)) if rng.random() < 0.5]
        edges = [*flow, *((n + j, n + i) for i, j in flow), *((i, n + i) for i in range(n))]
        speed = np.ones(devices) if seed % 2 else rng.uniform(1.0, 2.0, devices)
        execution = Execution(
            contention="none", overlap=False, staged=True, in_flight="pipeline", recompute=seed % 3 == 0,
        )  # fmt: skip
        problem = problem_of(
            rng.integers(0, 8, (2 * n, 1)) * speed, sorted(edges), sizes=rng.integers(0, 4, 2 * n).astype(float),
            group=[*range(n), *range(n)], phase=[0] * n + [1] * n, objective="throughput", contiguous=True,
            execution=execution, resident=rng.integers(0, 3, 2 * n).astype(float),
            memory=float(rng.choice([8.0, 14.0, 20.0])),
        )  # fmt: skip
        best = brute_force(problem)[0]
        value, bound = planned(problem)
        assert value == pytest.approx(best, rel=1e-12), seed
        assert math.isinf(best) or bound >= value * (1 - 2e-9), seed
        able += math.isfinite(best)
    assert able > 15


def test_training_with_units_that_only_run_backward():
    """They may be anywhere; ideals leave them out as long as that proves enough."""
    left_out = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        layers, orphans = 3, 2
        n = 2 * layers + orphans
        edges = [(i, i + 1) for i in range(layers - 1)]
        edges += [(layers + i + 1, layers + i) for i in range(layers - 1)]  # backward
        edges += [(layers - 1, 2 * layers - 1)]
        for orphan in range(2 * layers, n):  # sums gradients of some layers, and one reads the sum
            read = rng.permutation(np.arange(layers + 1, 2 * layers))[: rng.integers(1, 3)]
            edges += [(int(r), orphan) for r in read] + [(orphan, layers)]
        group = [*range(layers), *range(layers), *[-1] * orphans]
        speed = rng.uniform(1.0, 3.0, 3) if seed % 2 else np.ones(3)
        seconds = rng.integers(0 if seed % 3 else 1, 9, (n, 1)) * speed
        execution = Execution(
            contention="none", overlap=seed % 5 == 0, staged=True, pipeline="gpipe" if seed % 4 == 0 else "1f1b",
            memory="static",
        )  # fmt: skip
        problem = problem_of(
            seconds, edges, sizes=rng.integers(0, 5, n).astype(float), group=group, objective="throughput",
            phase=[0] * layers + [1] * (n - layers), execution=execution, contiguous=True,
            resident=rng.integers(0, 4, n).astype(float), memory=rng.choice([8.0, 30.0]),
        )  # fmt: skip
        left_out += len(stages.free_nodes(stages.stages_of(problem))) > 0
        value, bound = planned(problem)
        assert value == pytest.approx(brute_force(problem)[0], rel=1e-12), seed
        assert math.isinf(value) or bound >= value * (1 - 2e-9)
    assert left_out > 30


def test_light_nodes_that_are_left_out_at_first_are_added_until_the_bound_is_met(monkeypatch):
    monkeypatch.setattr(ideals, "_MOST_NODES", 2)
    for seed in range(60):
        rng = np.random.default_rng(2000 + seed)
        problem = with_equal_links(rng, pipeline(rng))
        value, bound = planned(problem)
        assert value == pytest.approx(brute_force(problem)[0] if problem.num_ops else 0.0, rel=1e-12), seed
        assert math.isinf(value) or bound >= value * (1 - 2e-9), seed


def test_backward_ops_that_may_be_anywhere_begin_tied_to_their_forward_ops(monkeypatch):
    """Each layer has an op forward, one that reads it backward, and one that reads only the latter."""
    monkeypatch.setattr(ideals, "_MOST_NODES", 2)
    tied = 0
    for seed in range(40):
        rng = np.random.default_rng(4000 + seed)
        n = int(rng.integers(2, 4))
        edges = [(i, i + 1) for i in range(n - 1)] + [(n + i + 1, n + i) for i in range(n - 1)]
        edges += [(i, n + i) for i in range(n)] + [(n + i, 2 * n + i) for i in range(n)]
        problem = problem_of(
            rng.integers(1, 9, (3 * n, 1)) * rng.uniform(1.0, 2.0, 2), edges,
            sizes=rng.integers(0, 5, 3 * n).astype(float), phase=[0] * n + [1] * (2 * n), objective="throughput",
            execution=Execution(contention="none", staged=True, memory="static"), contiguous=True,
            resident=rng.integers(0, 4, 3 * n).astype(float), memory=float(rng.choice([8.0, 30.0])),
        )  # fmt: skip
        tied += ideals._tied(problem) is not problem
        value, bound = planned(problem)
        assert value == pytest.approx(brute_force(problem)[0], rel=1e-12), seed
        assert math.isinf(value) or bound >= value * (1 - 2e-9), seed
    assert tied == 40


def test_orders_are_never_better_than_the_best():
    for seed in range(60):
        rng = np.random.default_rng(seed)
        problem = with_equal_links(rng, pipeline(rng))
        value, bound = planned(problem, "ideals-linear")
        best = brute_force(problem)[0] if problem.num_ops else 0.0
        assert value >= best * (1 - 1e-12)
        assert bound <= best * (1 + 1e-9) or math.isinf(best)


# ---- by hand ---------------------------------------------------------------------------------------------------------


def diamond(**options):
    """a reads nothing; b and c read a; d reads both. b and c fit together only across the order that the program has.

    Work 1, 4, 4, 1 s on two equal devices, transfers of 1 s on both sides.
    """
    execution = Execution(contention="none", overlap=False, staged=True)
    settings = {"objective": "throughput", "contiguous": True, "execution": execution} | options
    return problem_of(np.repeat([[1.0], [4.0], [4.0], [1.0]], 2, axis=1), [(0, 1), (0, 2), (1, 3), (2, 3)], **settings)


def test_a_diamond():
    """{a, b} | {c, d} computes 5 and 5 s; a's and b's outputs are sent, and received, at 1 s each."""
    found = plan(diamond(), "ideals")
    assert (found.value, found.gap) == (7.0, pytest.approx(0.0, abs=1e-9))
    assert plan(diamond(max_devices=1), "ideals").value == 10.0


def test_gpipe_adds_the_busiest_forward_and_the_busiest_backward():
    """Layers of 3 and 1 s forward, 1 and 3 s backward: apart, 3 + 3; together, 4 + 4; all is free to move."""
    problem = problem_of(
        np.repeat([[3.0], [1.0], [1.0], [3.0]], 2, axis=1), [(0, 1), (1, 3), (3, 2)], sizes=0.0, phase=[0, 0, 1, 1],
        group=[0, 1, 0, 1], objective="throughput", contiguous=True, execution=Execution(pipeline="gpipe"),
    )  # fmt: skip
    found = plan(problem, "ideals")
    assert (found.value, found.gap) == (6.0, pytest.approx(0.0, abs=1e-9))
    assert plan(replace(problem, execution=Execution()), "ideals").value == 4.0


def test_only_contiguous_throughput_and_not_too_many_sets_of_devices():
    with pytest.raises(Unsupported, match="contiguous"):
        plan(diamond(contiguous=False), "ideals")
    with pytest.raises(Unsupported, match="plans for throughput"):
        plan(diamond(objective="latency"), "ideals")
    many = problem_of(np.tile(np.arange(1.0, 14.0), (2, 1)), [(0, 1)], objective="throughput", contiguous=True)
    with pytest.raises(Unsupported, match="sets of devices"):
        plan(many, "ideals")


def test_too_many_ideals_leave_the_best_so_far_and_a_bound(monkeypatch):
    rng = np.random.default_rng(0)
    wide = problem_of(
        rng.uniform(1.0, 2.0, (40, 1)) * np.ones(3), [(0, i) for i in range(1, 39)] + [(i, 39) for i in range(1, 39)],
        sizes=0.1, objective="throughput", contiguous=True, execution=Execution(staged=True, overlap=False),
    )  # fmt: skip
    monkeypatch.setattr(ideals_kernel, "_MOST_BYTES", 1 << 18)
    monkeypatch.setattr(ideals, "MOST_LOOKS", 4)
    monkeypatch.setattr(ideals_search, "_STEPS", 50_000)
    with pytest.raises(TooManyIdeals):
        Search(stages.stages_of(wide), 100.0, None).reach([30.0])
    found = plan(wide, "ideals", budget=Budget(seconds=60))
    assert found.stopped == "finished"
    assert 0.0 < found.lower_bound < found.value < 1.2 * found.lower_bound


def test_without_a_limit_ops_still_run_only_where_they_may():
    seconds = [[1.0, math.inf], [math.inf, 1.0], [1.0, 1.0]]
    problem = problem_of(seconds, [(0, 1), (1, 2)], objective="throughput", contiguous=True)
    found = Search(stages.stages_of(problem), math.inf, None).reach([math.inf])
    assert found
    assert [(nodes.tolist(), kind) for nodes, kind in found[1]] == [([True, False, False], 0), ([False, True, True], 1)]


def test_the_table_grows():
    """12 ops in any order have 4096 ideals, more than the table begins with."""
    problem = problem_of(np.ones((12, 2)), sizes=0.0, objective="throughput")
    search = Search(stages.stages_of(replace(problem, contiguous=True)), 12.0, None)
    assert search.reach([5.9]) is None
    found = search.reach([6.0])
    assert found
    assert found[0] == pytest.approx(6.0, rel=1e-9)
    assert [int(nodes.sum()) for nodes, _ in found[1]] == [6, 6]


# ---- nodes -----------------------------------------------------------------------------------------------------------


def test_a_view_goes_with_what_it_reads_and_a_cast_with_what_reads_it():
    """op0 - view - cast - op3, where the view halves what it reads and the cast quadruples it."""
    seconds = np.array([[3.0], [0.0], [0.0], [3.0]]) * np.ones(2)
    problem = problem_of(seconds, [(0, 1), (1, 2), (2, 3)], sizes=[2.0, 1.0, 4.0, 0.0], objective="throughput")
    found = stages.stages_of(replace(problem, contiguous=True))
    assert found.node.tolist() == [0, 0, 1, 1]
    assert found.receive.tolist() == [[1.0]]


def test_nodes_that_cost_too_much_apart_are_fused():
    problem = diamond(sizes=[1.0, 11.0, 1.0, 1.0], execution=Execution(staged=True))
    assert stages.stages_of(problem).num_nodes == 4
    assert stages.below(stages.stages_of(problem), 10.0).node.tolist() == [0, 1, 2, 1]


def test_devices_that_are_alike_are_of_one_kind():
    speed = np.tile([1.0, 2.0, 1.0], (2, 1))
    problem = problem_of(speed, [(0, 1)], objective="throughput", contiguous=True)
    assert stages.stages_of(problem).kinds.devices == ((0, 2), (1,))
    copies = replace(problem.cluster, devices=tuple(Device(f"d{i}", copies=i < 2) for i in range(3)))
    assert stages.stages_of(replace(problem, cluster=copies)).kinds.devices == ((0,), (1,), (2,))


# ---- published -------------------------------------------------------------------------------------------------------

PUBLISHED = {  # ms; the optimum as the authors' program computes it, or proved where it does not finish
    "LayerGraphs/bert24_inference": 17.7899, "LayerGraphs/bert24_training": 41.7458,
    "LayerGraphs/gnmt_inference": 32.9107, "LayerGraphs/gnmt_training": 107.0044,
    "LayerGraphs/inceptionv3_inference": 51.5519, "LayerGraphs/resnet50_inference": 33.7747,
    "LayerGraphs/resnet50_training": 78.6318, "OperatorGraphs/bert_l-3_inference": 27.9186,
    "OperatorGraphs/bert_l-3_training": 65.3031, "OperatorGraphs/bert_l-12_inference": 147.478,
    "OperatorGraphs/bert_L-12_training": 437.998, "OperatorGraphs/resnet50_inference": 124.349,
    "OperatorGraphs/resnet50_training": 255.194,
}  # fmt: skip


@pytest.mark.skipif("PLACEWISE_DATA" not in os.environ, reason="PLACEWISE_DATA is not set")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_optima(name):
    problem = replace(load_problem(Path(os.environ["PLACEWISE_DATA"], INPUTS, f"{name}.json")), contiguous=True)
    found = plan(problem, "ideals", budget=Budget(seconds=120))
    assert 1e3 * found.value == pytest.approx(PUBLISHED[name], rel=3e-6)
    assert found.gap < 1e-8
