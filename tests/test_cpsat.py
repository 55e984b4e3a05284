"""The execution model in CP-SAT: what it proves against every placement in every order, and what it may be asked."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from oracles import brute_force, brute_force_orders
from placewise.cluster import Cluster, Device, Link
from placewise.driver import Budget, plan
from placewise.errors import NoFeasiblePlan, Unsupported
from placewise.planners.cpsat import first_twins
from placewise.problem import Execution
from problems import problem_of, random_problem, shared_bus

ENOUGH = Budget(evaluations=200_000)


def drawn(seed):
    """Some of everything that the model knows: queues, both ways to send, live memory, parameters, groups, pins."""
    rng = np.random.default_rng(seed)
    objective = ("latency", "completion")[seed % 2]
    problem = random_problem(
        rng, max_ops=5, max_devices=2 + seed % 3 % 2, objective=objective, constrained=seed % 3 > 0,
        integers=seed % 4 > 0,
    )  # fmt: skip
    return replace(problem, execution=replace(problem.execution, concurrency="parallel"), contiguous=False)


def the_best(problem):
    """Over every placement, in every order and without one."""
    return min(brute_force_orders(problem)[0], brute_force(problem)[0])


@pytest.mark.parametrize("part", range(4))
def test_it_finds_and_proves_the_best_of_all_placements_and_orders(part):
    proved = found = 0
    for seed in range(part * 40, part * 40 + 40):
        problem = drawn(seed)
        best = the_best(problem)
        try:
            answer = plan(problem, "cpsat", budget=ENOUGH)
        except NoFeasiblePlan:
            assert math.isinf(best), seed
            continue
        assert answer.lower_bound <= best, seed  # a false bound is the worst that can happen
        assert answer.value >= best * (1 - 1e-12), seed
        if problem.execution.contention == "none" and not problem.graph.is_stored.any():
            assert answer.value == pytest.approx(best, rel=1e-9), seed
        found += 1
        proved += answer.is_optimal
    assert proved >= 0.9 * found > 25


def test_the_bound_holds_where_queues_cost_what_the_solver_does_not_see():
    """op0 sends 5 bytes from 1 s on, op1 one byte from 2 s on, over one bus. The solver holds the long transfer back
    until the short one has passed; the simulator, as first come is first served, does not.
    """
    far = 99.0
    seconds = [[1.0, far, far], [far, 2.0, far], [far, far, 1.0], [far, far, 6.0]]
    pins = {"op0": "d0", "op1": "d1", "op2": "d2", "op3": "d2"}
    problem = problem_of(seconds, [(0, 2), (1, 3)], sizes=[5.0, 1.0, 0.0, 0.0], cluster=shared_bus(3), pins=pins)
    answer = plan(problem, "cpsat", budget=ENOUGH)
    assert answer.value == the_best(problem) == 13.0  # op3 has its input at 7 s
    assert answer.lower_bound == pytest.approx(10.0, rel=1e-9)  # at 3 s, and op2 comes after it


def test_a_goal_is_met_or_proved_out_of_reach():
    """Two ops of 3 s and one of 4 s on two devices: 6 s is the best."""
    problem = problem_of([[3.0, 3.0], [3.0, 3.0], [4.0, 4.0]], sizes=0.0)
    for goal, bound in [(5.5, 5.5), (7.0, 6.0), (0.0, 6.0)]:
        answer = plan(problem, "cpsat", budget=ENOUGH, options={"goal": goal})
        assert answer.lower_bound == pytest.approx(bound, rel=1e-9)
        assert answer.value == 6.0


def test_a_transfer_may_take_longer_than_numbers_go():
    """A billion years to another device: nobody goes there."""
    problem = problem_of([[1.0, 1.0], [2.0, 2.0]], [(0, 1)], sizes=3e16)
    answer = plan(problem, "cpsat", budget=ENOUGH)
    assert answer.value == 3.0
    assert answer.is_optimal


def test_memory_over_time_decides_an_order():
    """Two branches whose first op makes 4 bytes that its second turns into nothing, on a device that holds 5."""
    problem = problem_of(
        np.array([[2.0], [1.0], [3.0], [1.0]]), [(0, 1), (2, 3)], sizes=[4.0, 0.0, 4.0, 0.0], memory=5.0
    )
    answer = plan(problem, "cpsat", budget=ENOUGH)
    assert answer.value == 7.0
    place = np.argsort(answer.order)
    assert place[1] < place[2] or place[3] < place[0]


def test_devices_are_twins_only_if_their_channels_are():
    assert first_twins(problem_of(np.ones((2, 3)))) == [0, 0, 0]
    assert first_twins(problem_of(np.ones((2, 3)), cluster=shared_bus(3))) == [0, 0, 0]
    seconds = np.ones((2, 3))
    seconds[1, 1] = 2.0
    assert first_twins(problem_of(seconds)) == [0, 1, 0]
    names = ("a", "b", "c")
    links = [Link(x, y, 1.0, 0.0, ("bus",) if "a" in (x, y) else ()) for x in names for y in names if x != y]
    lopsided = Cluster(tuple(map(Device, names)), tuple(links))
    assert first_twins(problem_of(np.ones((2, 3)), cluster=lopsided)) == [0, 1, 1]


def test_it_says_what_it_does_not_do():
    large = problem_of(np.ones((3000, 8)), [(i, i + 1) for i in range(2999)])
    for problem, why in [
        (large, "use series or auto"),
        (problem_of(np.ones((2, 2)), contiguous=True), "contiguity"),
        (problem_of(np.ones((2, 2)), execution=Execution(concurrency="sequential")), "this engine does not"),
    ]:
        with pytest.raises(Unsupported, match=why):
            plan(problem, "cpsat")
