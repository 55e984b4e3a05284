"""Walks from a pipeline to better ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oracles import brute_force
from placewise import plan
from placewise.driver import Budget
from placewise.planners import ideals, ideals_walk
from placewise.planners.ideals_walk import anneal, tables
from placewise.planners.pipeline import dataflow_order
from placewise.planners.stages import stages_of
from placewise.problem import Execution
from placewise.simulator import evaluate
from problems import problem_of
from test_ideals import pipeline, with_equal_links


def walked(problem, seed, steps=3000):
    """(what a walk says, what the simulator says, what it began with) of its best pipeline; None if none is tried."""
    if not problem.num_ops or problem.max_devices:
        return None
    stages = stages_of(problem)
    if stages.compute.shape[2] > 1 or stages.keeps:
        return None
    kind = np.array([k for k, devices in enumerate(stages.kinds.devices) for _ in devices])
    stage = dataflow_order(stages.tail, stages.head, np.arange(stages.num_nodes))
    stage = stage * len(kind) // stages.num_nodes

    def value():
        left = [list(devices) for devices in stages.kinds.devices]
        device = np.array([left[k].pop(0) for k in kind.tolist()], np.int32)
        return float(evaluate(problem, device[stage[stages.node]][problem.unit]).score[0])

    before = value()
    now, found = (stage.copy(), kind.copy()), np.inf
    for leg in range(3):  # from where the last one ended, at its temperature
        hot, cold = (1e-1 * 1e-5 ** (at / 3) for at in (leg, leg + 1))
        found = anneal(*tables(stages), *now, stage, kind, found, hot, cold, 30.0, steps // 3, seed + leg)
    assert (stage[stages.tail] <= stage[stages.head]).all()
    return found, value(), before


def test_a_walk_knows_what_its_pipelines_cost_and_mostly_finds_the_best_of_small_graphs():
    able = same = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        problem = with_equal_links(rng, pipeline(rng))
        problem = replace(problem, execution=replace(problem.execution, replicate=False))
        found = walked(problem, seed)
        if found is None:
            continue
        told, value, before = found
        assert value <= before * (1 + 1e-9), seed
        if value < np.inf:
            able += 1
            exact = not stages_of(problem).scratch.any()  # else as much is set aside as any node needs
            assert told == pytest.approx(value, rel=1e-9) if exact else told >= value * (1 - 1e-9), seed
            same += value <= brute_force(problem)[0] * (1 + 1e-9)
    assert able > 100
    assert same > 0.8 * able


def test_where_the_search_does_not_end_a_walk_finds_better_pipelines(monkeypatch):
    """A grid, whose rows the program has one after another, but where cuts across the rows are the cheapest."""
    at = np.arange(48).reshape(4, 12)
    edges = [(int(at[i, j]), int(at[i + 1, j])) for i in range(3) for j in range(12)]
    edges += [(int(at[i, j]), int(at[i, j + 1])) for i in range(4) for j in range(11)]
    problem = problem_of(
        np.ones((48, 3)) * [1.0, 1.0, 1.5], sorted(edges), sizes=0.5, objective="throughput", contiguous=True,
        execution=Execution(contention="none", overlap=False, staged=True),
    )  # fmt: skip
    monkeypatch.setattr(ideals, "_MOST_NODES", 8)
    monkeypatch.setattr(ideals, "_FEW_LOOKS", 0)
    monkeypatch.setattr(ideals, "MOST_LOOKS", 0)
    found = plan(problem, "ideals", budget=Budget(seconds=60))
    monkeypatch.setattr(ideals_walk, "_WALKS", 0)
    without = plan(problem, "ideals", budget=Budget(seconds=60))
    assert found.lower_bound <= found.value < without.value
