"""Multilevel: the coarser graphs are right, acyclic and keep what binds; moves keep it too; plans are good."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from oracles import brute_force
from placewise.driver import Budget, Context, plan
from placewise.errors import InvalidInput
from placewise.planners.heft import schedule
from placewise.planners.multilevel import Level, by_longest_path, coarser, group_moves, hierarchy
from placewise.problem import Execution
from placewise.simulator import evaluate, violations
from placewise.simulator.arrays import checked_order
from problems import problem_of, random_placement, random_problem


def chain(n, devices=2, **options):
    return problem_of(np.ones((n, devices)), [(i, i + 1) for i in range(n - 1)], **options)


def context(problem, **budget):
    return Context(problem, Budget(**budget), 0, 0.0, None)


def large(seed, **options):
    rng = np.random.default_rng(seed)
    return random_problem(rng, max_ops=150, max_devices=3, **options)


# ---- coarsening ------------------------------------------------------------------------------------------------------


def test_a_chain_is_cut_into_pieces_of_four():
    level = coarser(chain(10), 1, connected=True)
    assert level.label.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert level.problem.seconds.tolist() == [[4.0, 4.0], [4.0, 4.0], [2.0, 2.0]]
    assert level.problem.graph.num_edges == 2


def test_branches_are_fused_along_and_not_across():
    # 0 -> (1 -> 2 -> 3), (4 -> 5 -> 6) -> 7; the heavier branch is walked last, right before the join.
    edges = [(0, 1), (1, 2), (2, 3), (0, 4), (4, 5), (5, 6), (3, 7), (6, 7)]
    problem = problem_of(np.ones((8, 2)), edges, sizes=[1, 1, 1, 2, 1, 1, 1, 1])
    level = coarser(problem, 1, connected=True)
    # The walk leaves 0 4 5 6 first, since the lighter input of the join comes first.
    assert level.label.tolist() == [0, 1, 1, 1, 0, 0, 0, 1]


def test_ops_that_exchange_nothing_are_fused_only_where_nothing_else_can_be():
    flat = problem_of(np.ones((9, 2)))
    assert coarser(flat, 1, connected=True).problem.num_ops == 9
    assert coarser(flat, 1, connected=False).problem.num_ops == 3
    assert [level.problem.num_ops for level in hierarchy(flat, context(flat), 4)] == [9, 3]


def test_what_differs_in_kind_is_not_fused():
    pinned = chain(4, pins={"op1": "d1"})
    assert coarser(pinned, 1, connected=True).label.tolist() == [0, 1, 2, 2]
    assert coarser(chain(4, phase=[0, 0, 1, 1]), 1, connected=True).label.tolist() == [0, 0, 1, 1]
    models = chain(4, model=[0, 1, 1, 1], models=["a", "b"])
    assert coarser(models, 1, connected=True).label.tolist() == [0, 1, 1, 1]


def test_no_fused_op_weighs_more_than_its_share():
    # Two ops at the coarsest: each may weigh all there is. Four: half of it, in seconds and in bytes.
    assert coarser(chain(4), 2, connected=True).problem.num_ops == 1
    assert coarser(chain(4), 4, connected=True).label.tolist() == [0, 0, 1, 1]
    assert coarser(chain(4, resident=[3.0, 3.0, 1.0, 1.0]), 4, connected=True).label.tolist() == [0, 1, 1, 2]


def test_units_that_meet_weigh_what_all_their_ops_do():
    # Ops 0 and 3 share a device, and so do 1 and 4: fusing 0 with 1 makes one unit of four ops, of six.
    problem = chain(6, group=[0, 1, -1, 0, 1, -1])
    level = coarser(problem, 3, connected=True)  # at most two thirds: four ops
    assert level.label.tolist()[:2] == [0, 0]
    assert level.label[2] != 0
    merged = level.problem
    assert merged.unit[level.label[0]] == merged.unit[level.label[3]] == merged.unit[level.label[4]]


@pytest.mark.parametrize("seed", range(30))
def test_a_coarse_placement_is_a_placement(seed):
    """Whatever there is of groups, pins, parameters and models: the quotient is acyclic and nothing forbidden."""
    problem = large(seed, constrained=True)
    levels = hierarchy(problem, context(problem), 4)
    for finer, level in pairwise(levels):
        assert level.problem.num_ops < finer.problem.num_ops  # `contract` has refused cycles
        rng = np.random.default_rng(seed)
        fine = random_placement(rng, level.problem)[level.label]
        assert finer.problem.allowed[np.arange(finer.problem.num_ops), fine].all()
        assert (fine == fine[finer.problem.first_of_unit[finer.problem.unit]]).all()
        expected = np.zeros((level.problem.num_ops, problem.num_devices))
        np.add.at(expected, level.label, finer.problem.seconds)
        np.testing.assert_allclose(level.problem.costs.seconds, expected)
        total = finer.problem.graph.resident_bytes.sum()
        assert level.problem.graph.resident_bytes.sum() == pytest.approx(total)


def test_levels_shrink_to_the_coarsest():
    problem = chain(5000)
    sizes = [level.problem.num_ops for level in hierarchy(problem, context(problem), 50)]
    assert sizes[0] == 5000
    assert sizes[-1] <= 50
    assert all(b <= 0.8 * a for a, b in pairwise(sizes))


# ---- moves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_moves_keep_what_binds(seed):
    problem = large(seed, constrained=True)
    rng = np.random.default_rng(seed)
    placement = random_placement(rng, problem)
    moves = group_moves(hierarchy(problem, context(problem), 4), rng)
    used = np.bincount(placement, problem.graph.resident_bytes, problem.num_devices)
    for row in moves.batch(placement, 40):
        assert (row != placement).any()
        assert problem.allowed[np.arange(problem.num_ops), row].all()
        assert (row == row[problem.first_of_unit[problem.unit]]).all()
        after = np.bincount(row, problem.graph.resident_bytes, problem.num_devices)
        assert not ((after > problem.capacity * (1 + 1e-9)) & (after > used * (1 + 1e-9))).any()


def test_moves_are_of_groups_of_every_level_at_the_boundary():
    problem = chain(64)
    placement = np.repeat([0, 1], 32).astype(np.int32)
    rows = group_moves(hierarchy(problem, context(problem), 4), np.random.default_rng(0)).batch(placement, 500)
    changed = [np.flatnonzero(row != placement) for row in rows]
    assert sorted({len(ops) for ops in changed if len(set(placement[ops])) == 1}) == [1, 4, 16]
    assert {31, 32} >= {op for ops in changed if len(ops) == 1 for op in ops}


def test_full_devices_change_places():
    problem = chain(4, sizes=0.0, resident=1.0, memory=2.0, execution=Execution(memory="static"))
    placement = np.array([0, 1, 0, 1], np.int32)
    rows = group_moves([Level(problem, np.arange(4, dtype=np.int32))], np.random.default_rng(0)).batch(placement, 200)
    assert len(rows) > 0
    assert all(np.bincount(row).tolist() == [2, 2] for row in rows)


# ---- schedules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_longest_paths_give_a_topological_order(seed):
    problem = large(seed)
    if problem.num_ops:
        checked_order(problem, by_longest_path(problem, random_placement(np.random.default_rng(seed), problem)))


# ---- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["latency", "throughput", "completion"])
def test_small_plans_are_near_the_best(objective):
    ratios = []
    for seed in range(12):
        rng = np.random.default_rng(100 + seed)
        problem = random_problem(rng, max_ops=8, max_devices=3, objective=objective, execution=Execution())
        best, _ = brute_force(problem)
        if best > 0:
            found = plan(problem, "multilevel", options={"coarsest": 3}, budget=Budget(evaluations=2000))
            ratios.append(found.value / best)
    assert np.mean(ratios) < 1.01  # an order may even beat the best placement without one


def test_a_large_plan_is_better_than_list_scheduling_and_keeps_memory():
    rng = np.random.default_rng(5)
    n = 1500
    edges = [(int(i - back), i) for i in range(1, n) for back in np.unique(np.minimum(rng.integers(1, 20, 2), i))]
    seconds = rng.uniform(1, 9, (n, 1)) * [1.0, 1.5, 2.0]
    problem = problem_of(seconds, edges, sizes=rng.uniform(0, 9, n), resident=1.0, memory=[600.0, 600.0, 900.0],
                         execution=Execution(memory="static"))  # fmt: skip
    found = plan(problem, "multilevel", budget=Budget(evaluations=6000))
    placement, order = schedule(problem)
    listed = min(evaluate(problem, placement, given).score[0] for given in (None, order))
    assert found.value < 0.995 * listed
    assert violations(problem, found.placement, found.order) == []


def test_it_ends_by_itself_and_the_seed_decides():
    problem = chain(260, sizes=0.0, objective="throughput")
    first, second = (plan(problem, "multilevel", budget=Budget(), seed=4) for _ in range(2))
    assert first.stopped == "finished"
    assert first.value == 130.0  # half of the chain each
    assert np.array_equal(first.placement, second.placement)


def test_the_coarsest_level_has_at_least_an_op():
    with pytest.raises(InvalidInput, match="coarsest"):
        plan(chain(3), "multilevel", options={"coarsest": 0})


def test_nothing_to_fuse():
    assert plan(problem_of(np.zeros((0, 2))), "multilevel").value == 0.0
    assert plan(problem_of([[3.0]]), "multilevel").value == 3.0
    assert math.isclose(plan(chain(2, bandwidth=0.1), "multilevel", options={"coarsest": 1}).value, 2.0)


# ---- a context aside -------------------------------------------------------------------------------------------------


def test_what_is_done_aside_counts_and_ends_with_its_share():
    problem, other = chain(6), chain(3)
    ctx = context(problem, evaluations=100)
    with ctx.aside(other, 0.25) as inner:
        while True:
            inner.evaluate(np.zeros(3, np.int32))  # ends the block, not the planner
    assert ctx.evaluations == inner.evaluations == 25
    assert inner.best_value == 3.0
    assert ctx.best is None
    assert not ctx.should_stop()
    assert ctx.spent == 0.25


def test_an_interrupt_reaches_what_is_done_aside():
    ctx = context(chain(6))
    with ctx.aside(chain(3), 0.5) as inner:
        assert not inner.should_stop()
        ctx.interrupt()
        assert inner.should_stop()
    assert ctx.spent == 0.0  # there is no budget
