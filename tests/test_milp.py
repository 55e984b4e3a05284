"""Throughput by mixed-integer programming: equal to brute force whatever the settings, and no bound above it."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from threading import Timer

import numpy as np
import pytest

from oracles import all_placements, brute_force
from placewise.driver import Budget, Context, plan
from placewise.errors import NoFeasiblePlan, Unsupported
from placewise.planners.cover import Cover
from placewise.planners.linear import TOLERANCE, Programme, SolverFailed, tariff
from placewise.planners.loads import Annealer, fused, loads
from placewise.problem import Execution
from placewise.simulator import evaluate
from problems import problem_of, random_placement, random_problem, shared_bus

SETTINGS = [
    Execution(overlap=overlap, staged=staged, sends=sends, contention=contention, memory=memory, pipeline=pipeline)
    for overlap in (False, True)
    for staged in (False, True)
    for sends in ("tensor", "edge")
    for contention, memory, pipeline in (("channel", "live", "gpipe"), ("none", "static", "1f1b"))
]


def small(seed, execution=None, **options):
    """A random problem for throughput without intervals."""
    rng = np.random.default_rng(seed)
    found = random_problem(rng, max_ops=6, max_devices=3, objective="throughput", execution=execution, **options)
    return replace(found, contiguous=False)


def equal_devices(seed, ops=8, devices=3, **options):
    """Devices that are all alike, where symmetry is broken and a cover has one set for all of them."""
    rng = np.random.default_rng(seed)
    seconds = np.repeat(rng.integers(1, 9, (ops, 1)).astype(float), devices, axis=1)
    edges = [(i, j) for j in range(1, ops) for i in range(j) if rng.random() < 1.5 / ops or i == j - 1]
    sizes = rng.integers(0, 4, ops).astype(float)
    return problem_of(seconds, edges, sizes=sizes, objective="throughput", **options)


def hard():
    """A problem that takes solvers long."""
    return equal_devices(0, ops=60, devices=4, execution=Execution(overlap=False))


def context(problem, **budget):
    return Context(problem, Budget(**budget), 0, 0.0, None, "milp")


# ---- what is charged -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", SETTINGS, ids=str)
def test_a_walk_knows_what_the_simulator_says(execution):
    """The least value on a walk is what its best placement is worth, and where it ends is what it says."""
    met = 0
    for seed in range(6):
        problem = small(seed, execution)
        if not problem.num_units:
            continue
        given = loads(problem)
        start = given.devices(random_placement(np.random.default_rng(seed), problem))
        first, value = Annealer(given).walk(start.copy(), 1.0, 1.0, 1.0, 0, 0)
        assert first.tolist() == start.tolist()
        assert value == pytest.approx(float(evaluate(problem, given.placement(start)).value[0]), rel=1e-9)
        best, value = Annealer(given).walk(start, 1.0, 3.0, 0.1, 500, seed)
        assert value == pytest.approx(float(evaluate(problem, given.placement(best)).value[0]), rel=1e-9, abs=1e-12)
        met += 1
    assert met >= 4


@pytest.mark.parametrize("solver", ["highs", "cpsat"])
@pytest.mark.parametrize("execution", SETTINGS, ids=str)
def test_the_programme_has_the_optimum(execution, solver):
    for seed in range(8):
        problem = small(100 + seed, execution, constrained=seed % 2 == 1, integers=seed % 4 < 2)
        best, _ = brute_force(problem)
        if not problem.num_units or not 0 < best < math.inf:
            continue
        given = loads(problem)
        programme = Programme(given, tariff(given), solver, 1.25 * best, 0.0)
        answer = programme.solve(context(problem), math.inf, 10_000)
        assert answer.done
        assert answer.bound <= best
        assert answer.bound >= best * (1 - 5e-6)
        found = evaluate(problem, given.placement(answer.device)).score[0]
        assert found == pytest.approx(best, rel=1e-5)
        # Nothing is below the optimum.
        refused = Programme(given, tariff(given), solver, best * 0.999, 0.0).solve(context(problem), math.inf, 10_000)
        assert refused.device is None or evaluate(problem, given.placement(refused.device)).score[0] > best * 0.999


@pytest.mark.parametrize("solver", ["highs", "cpsat"])
def test_scratch_space_has_to_fit(solver):
    """Memory binds, in units of which CP-SAT would by itself cut off all but the smallest amounts."""
    problem = small(10_652, SETTINGS[12], constrained=True)
    best, placement = brute_force(problem)
    given = loads(problem)
    answer = Programme(given, tariff(given), solver, 1.5 * best, 0.0).solve(context(problem), math.inf, 1000)
    assert answer.device[problem.unit].tolist() == placement.tolist()
    assert answer.bound == pytest.approx(best, rel=1e-5)


def test_a_tariff_is_exact_where_links_are_equal():
    chain = [(0, 1), (1, 2)]
    fork = [(0, 1), (0, 2)]
    none = Execution(contention="none")
    exact = {
        "chain": problem_of(np.ones((3, 3)), chain, objective="throughput"),
        "fork, staged": problem_of(np.ones((3, 3)), fork, objective="throughput", execution=Execution(staged=True)),
        "fork, two devices": problem_of(np.ones((3, 2)), fork, objective="throughput"),
        "fork, per edge": problem_of(np.ones((3, 3)), fork, objective="throughput", execution=Execution(sends="edge")),
    }
    loose = {
        "fork": problem_of(np.ones((3, 3)), fork, objective="throughput"),
        "bus": problem_of(np.ones((3, 3)), chain, cluster=shared_bus(3), objective="throughput"),
    }
    assert {name: tariff(loads(problem)).exact for name, problem in exact.items()} == dict.fromkeys(exact, True)
    assert {name: tariff(loads(problem)).exact for name, problem in loose.items()} == dict.fromkeys(loose, False)
    free = replace(loose["bus"], execution=none)
    assert tariff(loads(free)).exact


def test_what_no_better_plan_can_separate_is_fused():
    """A message of 9 s, others of 1 s: within 8 s its ends stay together, within 10 s they need not."""
    problem = problem_of(np.ones((4, 2)), [(0, 1), (1, 2), (2, 3)], sizes=[1.0, 9.0, 1.0, 1.0], objective="throughput")
    assert fused(loads(problem), 8.0).item.tolist() == [0, 1, 1, 2]
    assert fused(loads(problem), 10.0).items == 4
    # Each alone may run on one device only, within 8 s.
    slow = problem_of([[1.0, 9.0], [1.0, 1.0]], objective="throughput")
    assert fused(loads(slow), 8.0).may.tolist() == [[True, False], [True, True]]


def test_fusing_loses_no_better_plan():
    for seed in range(60):
        problem = small(seed, constrained=seed % 2 == 1)
        best, placement = brute_force(problem)
        if placement is None or not problem.num_units:
            continue
        given = fused(loads(problem), best)
        assert given.placement(given.devices(placement)).tolist() == placement.tolist()
        assert given.may[given.item, placement[problem.first_of_unit]].all()


# ---- the bound -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_a_cover_proves_no_more_than_is_true(seed):
    problem = equal_devices(seed) if seed % 2 else small(300 + seed)
    best, placement = brute_force(problem)
    if placement is None or not problem.num_units or best == 0:
        pytest.skip("nothing to cover")
    given = loads(problem)
    for claim in (best * (1 - TOLERANCE), 1.5 * best):
        ctx = context(problem, evaluations=60)
        cover = Cover(given, tariff(given), "highs", np.random.default_rng(seed))
        cover.learn(given.devices(placement))
        cover.prove(ctx, claim, math.inf)
        assert 0 < cover.bound <= best
        assert ctx.lower_bound == cover.bound


def test_a_cover_is_above_the_area():
    """Four ops of 3 s on three devices: two must share one, though 4 s each would do if ops could be cut up."""
    problem = problem_of(np.full((4, 3), 3.0), objective="throughput", execution=Execution(overlap=False))
    given = loads(problem)
    ctx = context(problem, evaluations=50)
    cover = Cover(given, tariff(given), "highs", np.random.default_rng(0))
    cover.learn(np.array([0, 1, 2, 2], np.int32))
    cover.prove(ctx, 6.0, math.inf)
    assert cover.bound == pytest.approx(6.0, rel=1e-5)


# ---- the planner -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", range(10))
def test_the_planner_finds_the_optimum(batch):
    for seed in range(20 * batch, 20 * batch + 20):
        execution = SETTINGS[seed % len(SETTINGS)]
        problem = small(seed, execution, constrained=seed % 3 == 0, integers=seed % 5 > 0)
        best, _ = brute_force(problem)
        try:
            found = plan(problem, "milp", budget=Budget(evaluations=200_000))
        except NoFeasiblePlan:
            assert math.isinf(best)
            continue
        assert found.value == pytest.approx(best, rel=1e-5)
        assert found.lower_bound <= best
        assert found.gap <= 5e-6
        assert found.stopped == "finished"


@pytest.mark.parametrize("seed", range(3))
def test_the_solvers_agree(seed):
    """On 14 ops, too many for brute force."""
    problem = equal_devices(seed, ops=14, devices=3, execution=Execution(overlap=False, staged=True, contention="none"))
    values = [
        plan(problem, "milp", budget=Budget(seconds=60), options={"solver": solver}) for solver in ("highs", "cpsat")
    ]
    assert values[0].value == pytest.approx(values[1].value, rel=1e-5)
    assert all(found.gap < 1e-5 for found in values)
    assert max(found.lower_bound for found in values) <= min(found.value for found in values)


def test_the_other_solver_takes_over_from_one_that_fails(monkeypatch):
    """HiGHS ends with an internal error on one programme of a thousand; here it does on every one."""
    asked, solve = [], Programme.solve

    def fails(self, *arguments, **options):
        asked.append(self._solver)
        if self._solver == "highs":
            raise SolverFailed("internal error")
        return solve(self, *arguments, **options)

    monkeypatch.setattr(Programme, "solve", fails)
    problem = equal_devices(0, execution=Execution(overlap=False, staged=True, contention="none"))
    found = plan(problem, "milp", budget=Budget(seconds=60))
    assert found.value == pytest.approx(brute_force(problem)[0], rel=1e-6)
    assert found.gap < 1e-5
    assert (asked[0], asked[-1]) == ("highs", "cpsat")


def test_more_than_intervals():
    """Ops of 4, 3, 3, 2 s in a row and nothing to send: the ends balance the middle, no interval does."""
    seconds = np.repeat(np.array([[4.0], [3.0], [3.0], [2.0]]), 2, axis=1)
    problem = problem_of(seconds, [(0, 1), (1, 2), (2, 3)], sizes=0.0, objective="throughput")
    assert plan(problem, "milp").value == 6.0
    assert brute_force(problem)[0] == 6.0
    with pytest.raises(Unsupported, match="intervals"):
        plan(replace(problem, contiguous=True), "milp")


def test_devices_are_counted():
    problem = equal_devices(1, ops=7, devices=3, max_devices=2)
    found = plan(problem, "milp")
    assert found.value == pytest.approx(brute_force(problem)[0], rel=1e-6)
    assert len(set(found.placement.tolist())) <= 2
    assert len(all_placements(problem)) == 3**7


@pytest.mark.parametrize("evaluations", [1, 2, 300, 20_000])
def test_a_budget_in_evaluations_ends_it_and_gives_the_same_plan_again(evaluations):
    """Far too large to be proved, so it has use for all of it."""
    problem = hard()
    first, second = (plan(problem, "milp", budget=Budget(evaluations=evaluations), seed=1) for _ in range(2))
    assert first.evaluations <= evaluations
    assert first.placement.tolist() == second.placement.tolist()
    assert (first.evaluations, first.lower_bound) == (second.evaluations, second.lower_bound)
    assert first.gap > 0.0
    assert first.seconds < 60


@pytest.mark.parametrize("solver", ["highs", "cpsat"])
def test_ctrl_c_ends_a_solve(solver):
    """Though HiGHS cannot be asked to end."""
    problem = hard()
    given = loads(problem)
    ctx = context(problem)
    Timer(0.5, ctx.interrupt).start()
    began = time.perf_counter()
    answer = Programme(given, tariff(given), solver, given.seconds.sum(), 0.0).solve(ctx, 60.0, 10**6)
    assert time.perf_counter() - began < 10
    assert not answer.done
