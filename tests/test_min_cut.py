"""Minimum cuts against brute force, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from oracles import all_placements, brute_force
from placewise.cluster import Cluster, Device, Link
from placewise.driver import Budget, plan
from placewise.errors import NoFeasiblePlan, Unsupported
from placewise.planners.min_cut import _Cut, _Relaxation, _Sum
from placewise.planners.repair import bytes_needed, fitted, messages
from placewise.problem import Execution
from placewise.simulator import evaluate
from problems import problem_of, random_problem

SEQUENTIAL = Execution(concurrency="sequential")


def sequential(seed, *, devices, memory=False, sends="tensor"):
    """A random problem for a sequential engine with so many devices, or None if it came out otherwise."""
    rng = np.random.default_rng(seed)
    execution = Execution(concurrency="sequential", sends=sends, memory="static" if seed % 3 == 0 else "live")
    problem = random_problem(
        rng, max_ops=9 if devices == 2 else 7, max_devices=devices, objective="latency", execution=execution,
        integers=seed % 2 == 0, constrained=True,
    )  # fmt: skip
    limited = bool(np.isfinite(problem.capacity).any())
    if problem.num_devices != devices or problem.contiguous or problem.max_devices or limited != memory:
        return None
    return problem


def drawn(count, **kind):
    found = (sequential(seed, **kind) for seed in range(1000))
    return [problem for problem in found if problem is not None and problem.num_ops > 2][:count]


def the_plan(problem, **options):
    return plan(problem, "min-cut", budget=Budget(evaluations=20_000), **options)


# ---- two devices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sends", ["tensor", "edge"])
def test_two_devices_are_optimal_and_proved_so(sends):
    problems = drawn(60, devices=2, sends=sends)
    assert len(problems) == 60
    for problem in problems:
        found = the_plan(problem)
        assert found.value == pytest.approx(brute_force(problem)[0], rel=1e-9)
        assert found.gap <= 1e-9


@pytest.mark.parametrize("devices", [2, 3])
def test_little_memory_is_planned_for_exactly(devices):
    """A plan wherever there is one, and none better; proved, but where it hangs on the order what fits."""
    solved = proved = 0
    for problem in drawn(60, devices=devices, memory=True):
        best, _ = brute_force(problem)
        try:
            found = the_plan(problem)
        except NoFeasiblePlan:
            assert best == math.inf
            continue
        solved += 1
        assert found.value <= best * (1 + 1e-9)  # which other orders may make possible
        assert found.lower_bound <= found.value
        proved += found.gap <= 1e-9
        assert found.gap <= 1e-9 or problem.execution.memory == "live"
    assert solved > 30
    assert proved > 0.9 * solved


def test_a_tensor_with_many_readers_is_paid_for_once():
    """op0 must be on d0 and its three readers want d1: each saves 2 s there, and one transfer takes 5 s."""
    seconds = [[1.0, math.inf], [3.0, 1.0], [3.0, 1.0], [3.0, 1.0]]
    edges = [(0, 1), (0, 2), (0, 3)]
    once = the_plan(problem_of(seconds, edges, sizes=5.0, execution=SEQUENTIAL))
    assert (once.placement.tolist(), once.value, once.lower_bound) == ([0, 1, 1, 1], 9.0, pytest.approx(9.0))
    each = Execution(concurrency="sequential", sends="edge")
    assert the_plan(problem_of(seconds, edges, sizes=5.0, execution=each)).placement.tolist() == [0, 0, 0, 0]


def test_links_may_differ_by_direction():
    """From d0 to d1 costs 1 s, back 10 s: op1 gains 4 s on d1, but its reader must be on d0."""
    cluster = Cluster((Device("d0"), Device("d1")), (Link("d0", "d1", 1.0), Link("d1", "d0", 0.1)))
    seconds = [[0.0, 9.0], [5.0, 1.0], [0.0, math.inf]]
    there = problem_of(seconds[:2], [(0, 1)], cluster=cluster, execution=SEQUENTIAL)
    assert the_plan(there).placement.tolist() == [0, 1]
    back = problem_of(seconds, [(0, 1), (1, 2)], cluster=cluster, execution=SEQUENTIAL)
    assert the_plan(back).placement.tolist() == [0, 0, 0]


def test_a_price_of_memory_chooses_what_moves():
    """Three ops of 4, 4 and 2 bytes gain 8, 6 and 5 s on the fast device, which holds 6 bytes: 4 + 2 it is."""
    seconds = [[1.0, 9.0], [1.0, 7.0], [1.0, 6.0]]
    problem = problem_of(seconds, sizes=0.0, resident=[4.0, 4.0, 2.0], memory=[6.0, math.inf], execution=SEQUENTIAL)
    found = the_plan(problem)
    assert found.placement.tolist() == [0, 1, 0]
    assert (found.value, found.lower_bound) == (9.0, pytest.approx(9.0))


def test_tiny_and_huge_times_keep_their_precision():
    for unit in (1e-12, 1.0, 1e9):
        seconds = unit * np.array([[1.0, 1.5], [2.0, 1.0], [1.0, 3.0]])
        problem = problem_of(seconds, [(0, 1), (1, 2)], sizes=0.4, bandwidth=1 / unit, execution=SEQUENTIAL)
        found = the_plan(problem)
        assert found.placement.tolist() == [0, 1, 0]
        assert found.value == pytest.approx(3.8 * unit, rel=1e-12)
        assert found.gap < 1e-9


# ---- more devices ----------------------------------------------------------------------------------------------------


def test_three_devices_are_optimal_and_proved_so_where_the_graph_is_small():
    problems = drawn(60, devices=3)
    optimal = proved = 0
    for problem in problems:
        best, found = brute_force(problem)[0], the_plan(problem)
        optimal += found.value <= best * (1 + 1e-9)
        proved += found.gap < 1e-9
        assert found.lower_bound <= best * (1 + 1e-9)
    assert len(problems) == 60
    assert optimal == proved == 60


@pytest.mark.parametrize("devices", [2, 3])
def test_an_expansion_bounds_the_sum_and_never_makes_it_worse(devices):
    for problem in drawn(30, devices=devices):
        total, free = _Sum(problem), np.zeros(devices)
        for row in all_placements(problem)[::7][:10]:
            for target in range(devices):
                moved, bound = total.expand(row[problem.first_of_unit], target, free)
                value, before = evaluate(problem, [moved[problem.unit], row]).value
                assert value <= bound * (1 + 1e-9) <= before * (1 + 1e-9) ** 2 + 1e-12


def test_any_rewards_and_prices_prove_a_bound():
    for seed, problem in enumerate(drawn(20, devices=3, memory=True)):
        rng, best = np.random.default_rng(seed), brute_force(problem)[0]
        relaxed = _Relaxation(_Sum(problem))
        relaxed._reward = rng.uniform(0.0, 9.0, problem.num_units)
        relaxed.price = np.where(np.isfinite(problem.capacity), rng.uniform(0.0, 0.5, 3), 0.0)
        assert relaxed.bound() <= best * (1 + 1e-9)


def test_the_bound_begins_with_the_sum_of_the_minima():
    problem = problem_of([[1.0, 2.0, 3.0], [5.0, 4.0, 6.0]], [(0, 1)], sizes=10.0, execution=SEQUENTIAL)
    relaxed = _Relaxation(_Sum(problem))
    assert relaxed.bound() == 5.0
    found = the_plan(problem)
    assert found.value == 6.0
    assert found.gap < 0.02


# ---- the cut itself --------------------------------------------------------------------------------------------------


def test_groups_of_a_cut_against_enumeration():
    for seed in range(40):
        rng = np.random.default_rng(seed)
        units, groups = int(rng.integers(1, 6)), int(rng.integers(1, 5))
        stay, go = rng.integers(0, 9, (2, units)).astype(float)
        owner, cost = rng.integers(0, units, (2, groups)), rng.integers(0, 9, (2, groups)).astype(float)
        pairs = np.argwhere(rng.random((groups, units)) < 0.6)
        cut = _Cut(stay, go)
        cut.any_goes(cut.node[owner[0]], cost[0], pairs[:, 0], pairs[:, 1])
        cut.any_stays(cut.node[owner[1]], cost[1], pairs[:, 0], pairs[:, 1])

        def value(goes, stay=stay, go=go, owner=owner, cost=cost, pairs=pairs):
            total = np.where(goes, go, stay).sum()
            for g in range(len(cost[0])):
                members = goes[pairs[pairs[:, 0] == g, 1]]
                total += cost[0, g] * (not goes[owner[0, g]] and members.any())
                total += cost[1, g] * (goes[owner[1, g]] and not members.all())
            return total

        every = [np.array([bits >> u & 1 for u in range(units)], bool) for bits in range(2**units)]
        goes, least = cut.solve()
        assert least == pytest.approx(min(map(value, every)), rel=1e-12)
        assert value(goes) == pytest.approx(least, rel=1e-12)


# ---- what else it is asked -------------------------------------------------------------------------------------------


def test_parallel_engines_get_a_plan_but_no_proof():
    """The least sum is 4 s on one device; side by side the two ops take 2 s."""
    problem = problem_of([[2.0, 2.5], [2.0, 2.5]])
    found = the_plan(problem)
    assert found.value == 4.0
    assert found.lower_bound <= 2.5


def test_edges_of_the_range():
    empty = problem_of(np.zeros((0, 2)), execution=SEQUENTIAL)
    assert the_plan(empty).value == 0.0
    alone = problem_of([[1.0], [2.0]], [(0, 1)], execution=SEQUENTIAL)
    assert the_plan(alone).value == 3.0
    pinned = problem_of([[1.0, 9.0], [1.0, 9.0]], [(0, 1)], pins={"op1": "d1"}, execution=SEQUENTIAL)
    assert the_plan(pinned).placement.tolist() == [0, 1]
    with pytest.raises(Unsupported, match="contiguity"):
        the_plan(problem_of([[1.0, 2.0]], contiguous=True, execution=SEQUENTIAL))


def test_parameters_are_homes():
    """A parameter of 4 bytes next to its reader costs nothing; elsewhere it is fetched."""
    columns = {"op_kinds": ["parameter", "op"], "sizes": [4.0, 0.0]}
    problem = problem_of([[0.0, 0.0], [1.0, 6.0]], [(0, 1)], memory=[3.0, math.inf], execution=SEQUENTIAL, **columns)
    found = the_plan(problem)
    assert (found.placement.tolist(), found.value) == ([1, 1], 6.0)
    fast = problem_of([[0.0, 0.0], [1.0, 6.0]], [(0, 1)], execution=SEQUENTIAL, **columns)
    assert the_plan(fast).placement.tolist() == [0, 0]


def test_stops_when_asked():
    """A bound that is not reached would take 50 rounds; one evaluation is all that it gets."""
    problem = drawn(1, devices=3)[0]
    assert plan(problem, "min-cut", budget=Budget(evaluations=1)).evaluations == 1


# ---- repair ----------------------------------------------------------------------------------------------------------


def test_repair_moves_what_costs_least_per_byte():
    """d0 holds 6 of 8 bytes: op1 loses 1 s for 2 bytes, op0 loses 4 s for 4, op2 cannot go."""
    seconds = [[1.0, 5.0], [1.0, 2.0], [1.0, math.inf]]
    problem = problem_of(seconds, sizes=0.0, resident=[4.0, 2.0, 2.0], memory=[6.0, 9.0], execution=SEQUENTIAL)
    assert fitted(problem, np.zeros(3, np.int32)).tolist() == [0, 1, 0]


def test_repair_counts_transfers():
    """Both ops are as fast on d1, but op1 exchanges much with op2, which is pinned to d0."""
    problem = problem_of(
        np.ones((3, 2)), [(0, 1), (1, 2)], sizes=[1.0, 9.0, 0.0], resident=[2.0, 2.0, 0.0], memory=[3.0, 9.0],
        pins={"op2": "d0"}, execution=Execution(concurrency="sequential", memory="static"),
    )  # fmt: skip
    assert fitted(problem, np.zeros(3, np.int32)).tolist() == [1, 0, 0]


def test_repair_leaves_what_fits_and_gives_up_where_nothing_does():
    problem = problem_of(np.ones((2, 2)), sizes=0.0, resident=3.0, memory=[3.0, 2.0], execution=SEQUENTIAL)
    assert fitted(problem, np.zeros(2, np.int32)).tolist() == [0, 0]
    roomy = problem_of(np.ones((2, 2)), sizes=0.0, resident=3.0, memory=6.0, execution=SEQUENTIAL)
    assert fitted(roomy, np.zeros(2, np.int32)).tolist() == [0, 0]


def test_messages_are_tensors_or_edges_between_units():
    edges = [(0, 1), (0, 2), (0, 3), (1, 2)]
    columns = {"group": [-1, 7, 7, -1], "sizes": [5.0, 2.0, 1.0, 1.0]}
    sent = messages(problem_of(np.ones((4, 2)), edges, **columns))
    assert [part.tolist() for part in sent] == [[0], [0], [5.0], [0, 0], [1, 2]]
    sent = messages(problem_of(np.ones((4, 2)), edges, execution=Execution(sends="edge"), **columns))
    assert [part.tolist() for part in sent] == [[0, 0, 0], [0, 0, 0], [5.0] * 3, [0, 1, 2], [1, 1, 2]]


def test_a_pipeline_needs_room_for_tensors_too():
    columns = {"sizes": [2.0, 3.0], "resident": [1.0, 1.0]}
    assert bytes_needed(problem_of(np.ones((2, 2)), [(0, 1)], **columns)).tolist() == [1.0, 1.0]
    assert bytes_needed(problem_of(np.ones((2, 2)), objective="throughput", **columns)).tolist() == [3.0, 4.0]
