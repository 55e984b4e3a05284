"""Any plan that fits: found wherever there is one on small problems, in whatever order, and never wrongly ruled out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from oracles import all_placements, brute_force, brute_force_orders
from placewise.driver import Budget, Context, plan
from placewise.errors import NoFeasiblePlan
from placewise.planners.fit import _list_solutions, fit, saving_order
from placewise.planners.repair import bytes_at_peak, fitted, settled
from placewise.problem import Execution
from placewise.simulator import evaluate, violations
from problems import problem_of, random_problem, renumbered
from test_memory import tight_problem

STATIC = Execution(memory="static")
SEQUENTIAL = Execution(concurrency="sequential")


def context(problem, **budget):
    return Context(problem, Budget(**budget), seed=0, bound=0.0, on_progress=None, planner="fit")


def solutions(problem):
    """Every placement that keeps the necessary conditions, or None where it is proved that there is none."""
    found = []
    some = _list_solutions(problem, 0, lambda rows: found.extend(rows) or True)
    return {tuple(np.array(row)[problem.unit].tolist()) for row in found} if some else None


# ---- necessary conditions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_no_placement_that_fits_is_ruled_out(seed):
    """In the default order or any other; for pipelines and resident bytes the conditions are exact."""
    rng = np.random.default_rng(seed)
    problem = tight_problem(rng, max_ops=7, most=300)
    if seed % 3 == 0:
        problem = replace(problem, contiguous=True)
    if seed % 5 == 0:
        problem = replace(problem, max_devices=1 + seed % 2)
    rows = all_placements(problem)
    listed = solutions(problem) or set()
    orders = [None, saving_order(problem), *(saving_order(problem, 99 * rng.random(problem.num_ops)) for _ in range(4))]
    for order in orders:
        fits = {tuple(row) for row in rows[evaluate(problem, rows, order).feasible].tolist()}
        assert fits <= listed
        if problem.objective == "throughput" or problem.execution.memory == "static":
            assert fits == listed


def test_what_the_presolve_of_the_solver_gets_wrong():
    """OR-tools 9.15 with presolve calls this model impossible."""
    problem = tight_problem(np.random.default_rng(111), most=5000)
    rows = all_placements(problem)
    fits = {tuple(row) for row in rows[evaluate(problem, rows).feasible].tolist()}
    assert fits
    assert fits <= solutions(problem)


def test_an_op_needs_room_for_what_it_reads_and_makes():
    """2 bytes come in, 3 go out, 1 is needed besides, 4 stay: 10 in all; without any time it holds nothing at once."""
    columns = {"sizes": [2.0, 3.0], "scratch": [0.0, 1.0], "resident": [0.0, 4.0]}
    for seconds, room, possible in [(1.0, 10.0, True), (1.0, 9.0, False), (0.0, 9.0, True)]:
        problem = problem_of([[0.0], [seconds]], [(0, 1)], memory=room, **columns)
        assert (solutions(problem) is not None) is possible
        assert math.isfinite(brute_force(problem)[0]) is possible


def test_a_streamed_parameter_needs_room_at_home_and_for_its_copy():
    columns = {"op_kinds": ["parameter", "op"], "sizes": [4.0, 1.0], "pins": {"op0": "d0", "op1": "d1"}}
    for room, possible in [([4.0, 5.0], True), ([3.0, 5.0], False), ([4.0, 4.0], False)]:
        problem = problem_of([[0.0, 0.0], [1.0, 1.0]], [(0, 1)], memory=room, **columns)
        assert (solutions(problem) is not None) is possible
        assert math.isfinite(brute_force(problem)[0]) is possible


def test_results_stay_to_the_end():
    problem = problem_of(np.ones((3, 1)), sizes=2.0, memory=5.0)
    assert solutions(problem) is None
    assert solutions(problem_of(np.ones((3, 1)), sizes=2.0, memory=6.0)) == {(0, 0, 0)}


def test_it_says_what_is_proved():
    """Three times 3 bytes in 5 + 5: enough in sum, so only a search can tell."""
    problem = problem_of(np.ones((3, 2)), resident=3.0, memory=5.0, execution=STATIC)
    with pytest.raises(NoFeasiblePlan, match=r"does not fit: no placement leaves room .*proved"):
        plan(problem, "fit")
    with pytest.raises(NoFeasiblePlan, match="proved"):  # a member's proof is the portfolio's
        context(problem).delegate("fit")


# ---- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_finds_a_plan_if_any_order_has_one(seed):
    rng = np.random.default_rng(seed)
    problem = tight_problem(rng, max_ops=5, most=40)
    exists = math.isfinite(brute_force_orders(problem)[0])
    try:
        found = plan(problem, "fit", budget=Budget(evaluations=20_000))
    except NoFeasiblePlan:
        assert not exists
    else:
        assert exists
        assert violations(problem, found.placement, found.order) == []


@pytest.mark.parametrize("seed", range(30))
def test_finds_a_plan_under_every_kind_of_constraint(seed):
    problem = random_problem(np.random.default_rng(seed), max_ops=7, max_devices=3, constrained=True)
    if math.isfinite(brute_force(problem)[0]):
        found = plan(problem, "fit", budget=Budget(evaluations=20_000))
        assert violations(problem, found.placement, found.order) == []


def two_branches():
    """Both branches begin with 9 bytes that their second op turns into 1; the default order begins both at once."""
    edges = [(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5)]
    sizes = [1.0, 9.0, 1.0, 9.0, 1.0, 1.0]
    return problem_of(np.ones((6, 1)), edges, sizes=sizes, memory=12.0, execution=SEQUENTIAL)


def test_gives_an_order_where_only_that_helps():
    problem = two_branches()
    assert math.isinf(brute_force(problem)[0])
    found = plan(problem, "fit")
    assert found.order.tolist() in ([0, 1, 2, 3, 4, 5], [0, 3, 4, 1, 2, 5])


def test_does_nothing_where_there_is_a_plan():
    problem = problem_of(np.ones((3, 2)))
    ctx = context(problem)
    ctx.evaluate([0, 1, 0])
    assert fit(problem, ctx) is None
    assert ctx.evaluations == 1


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_packs_where_little_is_left_over(objective):
    """60 layers of 1 to 9 bytes on three devices with 1% to spare."""
    rng = np.random.default_rng(4)
    resident = rng.integers(1, 10, 60) * 100.0
    share = np.array([0.5, 0.3, 0.2]) * resident.sum() * 1.01 + 4
    problem = problem_of(
        np.ones((60, 3)), [(i, i + 1) for i in range(59)], resident=resident, sizes=0.01, memory=share,
        objective=objective,
    )  # fmt: skip
    found = plan(problem, "fit", budget=Budget(evaluations=20_000))
    assert violations(problem, found.placement) == []


# ---- what it is made of ----------------------------------------------------------------------------------------------


def test_an_order_that_saves_memory_finishes_a_branch_before_the_next():
    assert saving_order(two_branches()).tolist() in ([0, 1, 2, 3, 4, 5], [0, 3, 4, 1, 2, 5])


def test_an_order_with_a_handicap_can_be_any():
    problem, rng = problem_of(np.ones((4, 1)), [(0, 1)]), np.random.default_rng(0)
    found = {tuple(saving_order(problem, 99 * rng.random(4)).tolist()) for _ in range(300)}
    assert len(found) == 12  # 4! orders, half of them with op0 before op1


def test_bytes_at_the_peak_are_those_alive_when_most_is():
    """op0's 5 bytes wait for op3; op1's 2 are gone when op2's 4 are there."""
    edges = [(0, 1), (1, 2), (2, 3), (0, 3)]
    columns = {"sizes": [5.0, 2.0, 4.0, 1.0], "resident": [1.0, 0.0, 0.0, 7.0]}
    assert bytes_at_peak(problem_of(np.ones((4, 1)), edges, **columns)).tolist() == [6.0, 2.0, 4.0, 7.0]
    assert bytes_at_peak(problem_of(np.ones((4, 1)), edges, execution=STATIC, **columns)).tolist() == [1.0, 0, 0, 7.0]
    pipeline = problem_of(np.ones((4, 1)), edges, objective="throughput", **columns)
    assert bytes_at_peak(pipeline).tolist() == [6.0, 2.0, 4.0, 8.0]


def test_repair_takes_other_needs():
    """Nothing is resident, so by itself repair sees nothing to do."""
    problem = problem_of([[1.0, 5.0], [1.0, 2.0]], sizes=3.0, memory=[3.0, 9.0])
    everything = np.zeros(2, np.int32)
    assert fitted(problem, everything, problem.capacity).tolist() == [0, 0]
    assert fitted(problem, everything, problem.capacity, np.array([3.0, 3.0])).tolist() == [0, 1]


def test_what_is_alive_is_measured_and_given_room():
    """Two results of 3 bytes each on a device with 3."""
    problem = problem_of([[1.0, 5.0], [1.0, 2.0]], sizes=3.0, memory=[3.0, 9.0])
    ctx = context(problem)
    assert settled(problem, ctx, np.zeros(2, np.int32)).tolist() == [0, 1]
    assert ctx.best_value == 2.0


def test_the_numbers_of_ops_and_devices_do_not_matter():
    problem = tight_problem(np.random.default_rng(7), max_ops=7, most=300)
    rng = np.random.default_rng(0)
    same = renumbered(problem, rng.permutation(problem.num_ops), rng.permutation(problem.num_devices))
    assert (solutions(problem) is None) == (solutions(same) is None)
    assert len(solutions(problem) or ()) == len(solutions(same) or ())
