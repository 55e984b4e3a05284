"""Scoring small changes: equal to `evaluate` bit for bit, and nothing better than the cutoff is dropped."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from placewise.problem import Execution
from placewise.simulator import evaluate
from placewise.simulator.incremental import Incremental
from problems import problem_of, random_placement, random_problem

SETTINGS = [
    # objective, share of parameters (which rule out checkpoints), whole numbers (which bring ties)
    ("latency", 0.0, True), ("latency", 0.0, False), ("latency", 0.3, True), ("completion", 0.0, True),
    ("completion", 0.3, False),
]  # fmt: skip


def changes(rng, problem, placement, count=6):
    """(placements, changed ops): moves of an op, swaps, moves of a colocation group, several at once, and none."""
    rows, changed = [], []
    for _ in range(count):
        row, kind = placement.copy(), rng.integers(4)
        if kind == 0:
            row[rng.integers(len(row))] = rng.integers(problem.num_devices)
        elif kind == 1:
            a, b = rng.integers(len(row), size=2)
            row[[a, b]] = row[[b, a]]
        elif kind == 2:
            row[problem.unit == rng.integers(problem.num_units)] = rng.integers(problem.num_devices)
        else:
            some = rng.random(len(row)) < 0.3
            row[some] = rng.integers(0, problem.num_devices, some.sum())
        rows.append(row)
        changed.append(np.flatnonzero(row != placement).tolist())
    return np.array(rows, np.int32), changed


def random_walks(objective, stored, integers, count):
    for seed in range(count):
        rng = np.random.default_rng(seed)
        problem = random_problem(
            rng, max_ops=200 if seed % 20 == 0 else 24, objective=objective, stored=stored, integers=integers
        )
        if problem.num_ops:
            execution = replace(problem.execution, concurrency="parallel")
            yield rng, replace(problem, execution=execution)


@pytest.mark.parametrize(("objective", "stored", "integers"), SETTINGS)
def test_probes_equal_full_evaluations(objective, stored, integers):
    for rng, problem in random_walks(objective, stored, integers, 300):
        current = Incremental(problem, random_placement(rng, problem))
        for _ in range(4):
            full = evaluate(problem, current.placement)
            assert current.value == full.value[0]
            if problem.execution.memory == "live":
                assert current.peak.tolist() == full.peak[0].tolist()
            rows, changed = changes(rng, problem, current.placement)
            probed = current.probe(rows, changed, np.inf)
            assert probed.tolist() == evaluate(problem, rows).value.tolist()
            chosen = int(rng.integers(len(rows)))
            assert current.accept(rows[chosen]) == probed[chosen]


@pytest.mark.parametrize(("objective", "stored", "integers"), SETTINGS)
def test_only_what_is_not_better_than_the_cutoff_is_dropped(objective, stored, integers):
    """Up to rounding: a value within 1e-12 of the cutoff may go either way."""
    dropped = kept = 0
    for rng, problem in random_walks(objective, stored, integers, 300):
        current = Incremental(problem, random_placement(rng, problem))
        for _ in range(4):
            rows, changed = changes(rng, problem, current.placement)
            full = evaluate(problem, rows).value
            cutoff = float(rng.choice([current.value, np.median(full), full.min() * (1 + 1e-9), full.max() * 1.1]))
            probed = current.probe(rows, changed, cutoff)
            better = np.isfinite(probed)
            assert probed[better].tolist() == full[better].tolist()
            assert (full[better] < cutoff).all()
            assert (full[~better] >= cutoff * (1 - 1e-11)).all()
            kept, dropped = kept + better.sum(), dropped + (~better).sum()
            current.accept(rows[int(np.argmin(full))])
    assert min(kept, dropped) > 300


def test_a_probe_leaves_the_current_placement_alone():
    problem = problem_of(np.ones((40, 2)), [(i, i + 1) for i in range(39)])
    current = Incremental(problem, np.zeros(40, np.int32))
    away = np.zeros((1, 40), np.int32)
    away[0, 30] = 1
    assert [float(current.probe(away, [[30]], np.inf)[0]) for _ in range(2)] == [42.0, 42.0]
    assert current.value == 40.0
    assert current.placement.tolist() == [0] * 40
    assert current.probe(away, [[30]], 41.0).tolist() == [np.inf]
    assert current.accept(away[0]) == 42.0
    assert current.probe(np.zeros((1, 40), np.int32), [[30]], 42.0).tolist() == [40.0]


def test_no_probe_is_no_work():
    problem = problem_of(np.ones((3, 2)), execution=Execution(contention="none"))
    current = Incremental(problem, np.zeros(3, np.int32))
    assert current.probe(np.zeros((0, 3), np.int32), [], np.inf).tolist() == []
    assert current.probe(current.placement[None], [[]], np.inf).tolist() == [3.0]
