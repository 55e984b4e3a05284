"""Tight memory: every planner returns a plan that fits or says that it has none, and `auto` finds one where there is.

`bench/memory.py` asks the same of a thousand problems.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from oracles import all_placements, brute_force
from placewise import planners
from placewise.driver import Budget, plan
from placewise.errors import NoFeasiblePlan
from placewise.problem import Execution
from placewise.simulator import evaluate, violations
from problems import random_placement, random_problem


def tight_problem(rng, *, max_ops=14, most=20_000):
    """Room for what one placement needs, drawn at random among those that need little, or for hardly that.

    All objectives and settings, unequal devices and links, groups, training phases, several models, parameters to
    stream, scratch space. At most `most` placements, so that all can be tried.
    """
    while True:
        problem = random_problem(rng, max_ops=max_ops, integers=bool(rng.random() < 0.8))
        resident = rng.integers(0, 6, problem.num_ops) * (rng.random(problem.num_ops) < 0.7)
        problem = replace(problem, graph=replace(problem.graph, resident=resident.astype(float)))
        if problem.num_devices > 1 and problem.num_units > 3 and problem.num_devices**problem.num_units <= most:
            break
    peak = evaluate(problem, np.array([random_placement(rng, problem) for _ in range(24)])).peak
    total = peak.sum(axis=1)
    peak = peak[total <= np.quantile(total, rng.choice([0.0, 0.2, 0.5]))]
    limits = peak[rng.integers(len(peak))] * rng.choice([0.85, 0.95, 1.0, 1.0, 1.1], problem.num_devices)
    limits = dict(zip(problem.cluster.device_names, limits.tolist(), strict=True))
    return replace(problem, cluster=problem.cluster.with_memory(limits))


def fitting_placements(problem):
    """How many placements keep every constraint, in the default order."""
    return int(evaluate(problem, all_placements(problem)).feasible.sum())


def asked(problem, planner):
    """The plan, checked; None where the planner says that it found none."""
    try:
        found = plan(problem, planner, budget=Budget(evaluations=1000))
    except NoFeasiblePlan:
        return None
    assert violations(problem, found.placement, found.order) == []
    return found


PROBLEMS = [tight_problem(np.random.default_rng(seed), max_ops=8, most=300) for seed in range(40)]


def test_the_problems_are_tight():
    counts = [fitting_placements(problem) for problem in PROBLEMS]
    assert sum(count == 0 for count in counts) >= 10
    assert sum(1 <= count <= 4 for count in counts) >= 8
    assert {problem.objective for problem in PROBLEMS} == {"latency", "throughput", "completion"}
    assert {problem.execution.memory for problem in PROBLEMS} == {"live", "static"}
    assert {problem.execution.concurrency for problem in PROBLEMS} == {"parallel", "sequential"}


@pytest.mark.parametrize("planner", sorted(planners.available()))
def test_every_planner_fits_or_says_that_it_does_not(planner):
    for problem in PROBLEMS[::5]:
        if planners.get(planner).why_not(problem) is None:
            asked(problem, planner)


@pytest.mark.parametrize("planner", ["auto", "fit"])
def test_a_plan_is_found_wherever_there_is_one(planner):
    for seed, problem in enumerate(PROBLEMS):
        assert asked(problem, planner) is not None or not fitting_placements(problem), seed


def test_cuts_of_small_graphs_are_optimal_where_memory_is_short():
    """Three devices of a sequential engine: what the Lagrangian leaves open is decided."""
    decided = 0
    for seed in range(120):
        problem = random_problem(
            np.random.default_rng(seed), max_ops=7, max_devices=3, objective="latency", constrained=True,
            execution=Execution(concurrency="sequential"),
        )  # fmt: skip
        best, _ = brute_force(problem)
        if planners.get("min-cut").why_not(problem) or problem.num_devices < 3 or not math.isfinite(best):
            continue
        if np.isfinite(problem.capacity).any():
            found = plan(problem, "min-cut", budget=Budget(evaluations=5000))
            assert found.value <= best * (1 + 1e-9), seed
            decided += 1
    assert decided > 10
