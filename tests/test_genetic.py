"""The genetic algorithm: its kernel equals a plain twin, its keys mean what they say, and plans are near the best."""

from __future__ import annotations

import numpy as np
import pytest

from oracles import brute_force, brute_force_orders
from placewise.driver import Budget, Context, plan
from placewise.errors import InvalidInput
from placewise.planners.genetic import _balance, _Decoder, genetic
from placewise.planners.heft import schedule
from placewise.problem import Execution
from placewise.simulator import evaluate, violations
from problems import problem_of, random_placement, random_problem

# ---- twins -----------------------------------------------------------------------------------------------------------


def plain_balance(program, may, wanted, seconds, need, room):
    load, left, chosen = [0.0] * len(room), list(room), {}
    for unit in program:
        able = [d for d in range(len(room)) if may[unit, d]]
        fitting = [d for d in able if need[unit] <= left[d]]
        asked = [d for d in fitting if wanted[unit, d]]
        best = min(asked or fitting or able, key=lambda d: load[d] + seconds[unit, d] if fitting else -left[d])
        load[best] += seconds[unit, best]
        left[best] -= need[unit]
        chosen[unit] = best
    return [chosen[unit] for unit in range(len(chosen))]


@pytest.mark.parametrize("seed", range(30))
def test_the_balance_equals_its_twin(seed):
    rng = np.random.default_rng(seed)
    units, devices = int(rng.integers(1, 12)), int(rng.integers(1, 5))
    may = rng.random((units, devices)) < 0.7
    may[np.arange(units), rng.integers(0, devices, units)] = True
    wanted = may & (rng.random((units, devices)) < 0.2)
    seconds, need = rng.random((units, devices)), rng.integers(0, 4, units).astype(float)
    given = rng.permutation(units), may, wanted, seconds, need, rng.integers(0, 9, devices).astype(float)
    assert _balance(*given).tolist() == plain_balance(*given)


# ---- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_keys_of_nobody_in_particular_give_the_plan_of_heft(seed):
    problem = random_problem(np.random.default_rng(seed), max_ops=20, objective="latency", integers=False, stored=0.0)
    keys = np.concatenate([np.zeros(problem.num_units), np.full(problem.num_ops, 0.5)])
    placement, order = _Decoder(problem)(keys)
    ours, theirs = (evaluate(problem, *answer).value[0] for answer in ((placement, order), schedule(problem)))
    assert ours == pytest.approx(theirs)


@pytest.mark.parametrize("objective", ["latency", "completion", "throughput"])
@pytest.mark.parametrize("seed", range(10))
def test_keys_name_devices(seed, objective):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, max_ops=15, objective=objective, stored=0.0)
    wanted, decode = random_placement(rng, problem), _Decoder(problem)
    assert decode(decode.keys_of(wanted))[0].tolist() == wanted.tolist()


def test_a_key_is_a_share_of_the_way_through_the_allowed_devices():
    problem = problem_of([[1.0, np.inf, 3.0, 4.0]])
    decode = _Decoder(problem)
    keys = [0.0, 0.79, 0.81, 0.86, 0.9, 0.93, 0.94, 0.999]
    assert [int(decode(np.array([key, 0.5]))[0][0]) for key in keys] == [0, 0, 0, 0, 2, 2, 3, 3]


# ---- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["latency", "throughput", "completion"])
def test_small_plans_are_near_the_best_and_random_ones_are_not(objective):
    ratios, by_chance = [], []
    for seed in range(8):
        rng = np.random.default_rng(100 + seed)
        problem = random_problem(rng, max_ops=9, max_devices=3, objective=objective, execution=Execution())
        best, _ = brute_force(problem)
        if best > 0:
            ratios.append(plan(problem, "genetic", budget=Budget(evaluations=2000)).value / best)
            by_chance.append(plan(problem, "random", options={"samples": 20}).value / best)
    assert np.mean(ratios) < 1.02
    assert np.mean(by_chance) > np.mean(ratios) + 0.03


def test_it_finds_the_best_order_too():
    for seed in range(4):
        rng = np.random.default_rng(seed)
        problem = problem_of(rng.uniform(1, 9, (5, 2)), [(0, 2), (1, 3), (1, 4)], sizes=rng.uniform(0, 5, 5))
        best = brute_force_orders(problem)[0]
        assert plan(problem, "genetic").value == pytest.approx(best)


def test_it_goes_on_from_the_best_so_far():
    rng = np.random.default_rng(1)
    problem = problem_of(rng.uniform(1, 9, (30, 3)), [(i, i + 3) for i in range(27)], sizes=rng.uniform(0, 5, 30))
    ctx = Context(problem, Budget(evaluations=2), 0, 0.0, None)
    given = random_placement(rng, problem)
    ctx.best, ctx.best_value = (given, None), 1e9
    seen = []
    ctx.evaluate = lambda placement, order=None: seen.append(placement) or 1e9
    ctx.should_stop = lambda: True
    genetic(problem, ctx)
    assert seen[1].tolist() == given.tolist()


def test_memory_pins_and_the_seed():
    rng = np.random.default_rng(0)
    problem = problem_of(rng.uniform(1, 9, (8, 2)), sizes=0.0, resident=1.0, memory=[5.0, 4.0], pins={"op3": "d0"})
    first, second = (plan(problem, "genetic", seed=3, budget=Budget(evaluations=1500)) for _ in range(2))
    assert violations(problem, first.placement, first.order) == []
    assert first.placement[3] == 0
    assert first.value <= 1.02 * brute_force(problem)[0]
    assert np.array_equal(first.placement, second.placement)
    assert first.history[-1][1:] == second.history[-1][1:]


def test_a_population_has_parents_and_children():
    with pytest.raises(InvalidInput, match="population"):
        plan(problem_of([[1.0, 2.0]]), "genetic", options={"population": 3})
