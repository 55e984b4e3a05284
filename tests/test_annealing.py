"""Simulated annealing: Metropolis' rule, a falling temperature, and plans near the best."""

from __future__ import annotations

import numpy as np
import pytest

from oracles import brute_force
from placewise.driver import Budget, Context, plan
from placewise.errors import InvalidInput
from placewise.planners.annealing import _State
from placewise.planners.moves import UnitMoves
from placewise.problem import Execution
from placewise.simulator import violations
from problems import problem_of, random_problem


class OneMove(UnitMoves):
    """Always the same move: the only op to the other device."""

    def __init__(self) -> None:
        pass

    def batch(self, placement, count):
        return 1 - placement[None]


def context(problem, seed=0):
    return Context(problem, Budget(), seed, 0.0, None)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_a_move_that_costs_c_is_accepted_with_probability_exp_minus_c_over_the_temperature(objective):
    problem = problem_of([[2.0, 3.0]], objective=objective)
    ctx, accepted = context(problem), 0
    for _ in range(2000):
        state = _State(ctx, np.zeros(1, np.int32))
        state.step(OneMove(), 0.8)
        accepted += int(state.placement[0])
        assert state.value == (3.0 if state.placement[0] else 2.0)
    assert accepted / 2000 == pytest.approx(np.exp(-1 / 0.8), abs=0.04)  # 0.2865; 4 standard deviations


def test_what_is_better_is_always_accepted_and_without_temperature_nothing_else():
    problem = problem_of([[3.0, 2.0]])
    state = _State(context(problem), np.zeros(1, np.int32))
    state.step(OneMove(), 1e-300)
    assert state.placement.tolist() == [1]
    state.step(OneMove(), 1e-300)
    assert state.placement.tolist() == [1]


def test_what_breaks_a_constraint_is_not_accepted():
    # The faster device has room for the op's weights but not for its output.
    problem = problem_of([[3.0, 2.0]], sizes=2.0, resident=1.0, memory=[9.0, 2.0])
    state = _State(context(problem), np.zeros(1, np.int32))
    state.step(OneMove(), 10.0)
    assert state.placement.tolist() == [0]


def test_the_typical_loss_is_the_median_of_moves_that_make_things_worse():
    problem = problem_of([[2.0, 3.0]])
    state = _State(context(problem), np.zeros(1, np.int32))
    assert state.typical_loss(OneMove()) == 1.0
    assert _State(context(problem), np.ones(1, np.int32)).typical_loss(OneMove()) == 0.03  # none does: 1% of the value


@pytest.mark.parametrize("objective", ["latency", "throughput", "completion"])
def test_small_plans_are_near_the_best_and_random_ones_are_not(objective):
    ratios, by_chance = [], []
    for seed in range(8):
        rng = np.random.default_rng(100 + seed)
        problem = random_problem(rng, max_ops=9, max_devices=3, objective=objective, execution=Execution())
        best, _ = brute_force(problem)
        if best > 0:
            ratios.append(plan(problem, "annealing", budget=Budget(evaluations=2000)).value / best)
            by_chance.append(plan(problem, "random", options={"samples": 20}).value / best)
    assert np.mean(ratios) < 1.01
    assert np.mean(by_chance) > np.mean(ratios) + 0.03


def test_it_leaves_a_local_optimum():
    # Two ops that exchange much, where the other device is faster for both but not for one alone.
    problem = problem_of([[3.0, 2.0], [3.0, 2.0]], [(0, 1)], sizes=5.0, resident=1.0)
    assert plan(problem, "annealing", budget=Budget(evaluations=300)).value == 4.0


def test_tight_memory_and_the_seed():
    # Eight ops of one byte on two devices of four: only exchanges move anything.
    rng = np.random.default_rng(0)
    problem = problem_of(rng.uniform(1, 9, (8, 2)), sizes=0.0, resident=1.0, memory=4.0)
    best, _ = brute_force(problem)
    first, second = (plan(problem, "annealing", seed=3, budget=Budget(evaluations=1500)) for _ in range(2))
    assert first.value == best
    assert violations(problem, first.placement) == []
    assert np.array_equal(first.placement, second.placement)
    assert first.history[-1][1:] == second.history[-1][1:]


def test_it_ends_by_itself():
    found = plan(problem_of(np.ones((4, 2)), [(0, 1)]), "annealing", budget=Budget(), options={"sweeps": 20})
    assert found.stopped == "finished"
    assert found.evaluations < 20 * 4 * 3


def test_it_does_not_heat_up():
    with pytest.raises(InvalidInput, match="cooling"):
        plan(problem_of([[1.0, 2.0]]), "annealing", options={"cooling": 0.5})
