"""Boxes of ideals: a bound that no pipeline is below, against brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from oracles import brute_force
from placewise import plan
from placewise.driver import Budget
from placewise.planners import ideals
from placewise.planners.ideals_bound import Boxes, _cut
from placewise.planners.stages import stages_of
from placewise.problem import Execution
from problems import problem_of
from test_ideals import pipeline, with_equal_links


def test_the_least_cut_of_all_sets():
    """A sender pays if some reader is beyond the border, and readers if the sender is."""
    negative = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        n, m = int(rng.integers(1, 8)), int(rng.integers(0, 9)) * (seed % 10 > 0)
        label, weight = rng.integers(-1, 2, n).astype(np.int8), rng.integers(-6, 7, n)
        sender, send, receive = rng.integers(0, n, m), rng.integers(0, 6, m), rng.integers(0, 6, m)
        readers = [sorted({int(r) for r in rng.integers(0, n, rng.integers(1, 4))} - {int(s)}) for s in sender]
        start = np.cumsum([0, *map(len, readers)])
        reader = np.array([r for those in readers for r in those], np.int64)

        def cost(inside, given=(weight, sender, readers, send, receive)):
            weight, sender, readers, send, receive = given
            total = weight[inside].sum()
            for i, s in enumerate(sender):
                there = [inside[r] for r in readers[i]]
                total += send[i] * (inside[s] and not all(there)) + receive[i] * (not inside[s] and any(there))
            return total

        sets = [np.array(s, bool) for s in product([False, True], repeat=n)]
        able = [s for s in sets if s[label == 1].all() and not s[label == -1].any()]
        inside = np.zeros(n, np.bool_)
        value = _cut(label, weight, sender, start, reader, send, receive, inside)
        assert value == min(cost(s) for s in able) == cost(inside), seed
        negative += value < 0
    assert negative > 50


def looked_at_closely(boxes, limit):
    """Whether a chain may keep the limit when there is nothing left to look at."""
    while boxes.reach(limit):
        if not boxes.refine():
            return True
    return False


def test_boxes_never_rule_out_what_a_pipeline_keeps():
    """Any options; where links differ too. Often they rule out all that is a little less."""
    able = close = 0
    for seed in range(250):
        rng = np.random.default_rng(seed)
        problem = pipeline(rng)
        if seed % 2:
            problem = with_equal_links(rng, problem)
        execution = replace(problem.execution, replicate=seed % 3 == 0, microbatches=1 + seed % 4)
        problem = replace(problem, execution=execution)
        best = brute_force(problem)[0] if problem.num_ops else np.inf
        if not 0.0 < best < np.inf:
            continue
        able += 1
        boxes = Boxes(stages_of(problem), problem.max_devices)
        for share in (0.7, 0.9, 1.0):  # what was seen at a limit is used at the next
            passes = looked_at_closely(boxes, share * best)
        assert passes, seed
        assert looked_at_closely(Boxes(stages_of(problem), problem.max_devices), best), seed
        close += not looked_at_closely(Boxes(stages_of(problem), problem.max_devices), 0.9 * best)
    assert able > 150
    assert close > 0.4 * able


def test_transfers_of_large_graphs_are_in_the_bound(monkeypatch):
    """Four rows of four ops that read the one before and the one above: any cut crosses some of them."""
    at = np.arange(16).reshape(4, 4)
    edges = [(int(at[i, j]), int(at[i + 1, j])) for i in range(3) for j in range(4)]
    edges += [(int(at[i, j]), int(at[i, j + 1])) for i in range(4) for j in range(3)]
    problem = problem_of(
        np.ones((16, 3)) * [1.0, 1.0, 2.0], sorted(edges), sizes=0.5, objective="throughput", contiguous=True,
        execution=Execution(contention="none", overlap=False, staged=True),
    )  # fmt: skip
    exact = plan(problem, "ideals", budget=Budget(seconds=60))
    assert exact.gap < 1e-8
    monkeypatch.setattr(ideals, "_MOST_NODES", 8)
    monkeypatch.setattr(ideals, "_FEW_LOOKS", 0)
    monkeypatch.setattr(ideals, "MOST_LOOKS", 0)
    found = plan(problem, "ideals", budget=Budget(seconds=60))
    area = 16.0 / 2.5
    assert found.lower_bound <= exact.value
    assert found.lower_bound - area > 0.7 * (exact.value - area)
