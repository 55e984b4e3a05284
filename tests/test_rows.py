"""Rows of units cut into pieces: the best cut of a chain, and pieces that fit with what is alive."""

from __future__ import annotations

import math

import numpy as np
import pytest

from oracles import all_placements
from placewise import Budget, plan
from placewise.errors import Unsupported
from placewise.planners.rows import Row
from placewise.problem import Execution
from placewise.simulator import evaluate
from problems import problem_of


def test_a_cut_chain_is_the_best_that_gives_each_device_one_interval():
    """Devices of two kinds, of which one may be slower and have more memory."""
    cut = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 7))
        seconds = np.repeat(rng.integers(1, 9, (n, 1)), 3, axis=1) * [1, 1, int(rng.integers(1, 4))]
        problem = problem_of(
            seconds, [(i, i + 1) for i in range(n - 1)], sizes=rng.integers(0, 5, n), resident=rng.integers(0, 4, n),
            memory=[5.0, 5.0, float(rng.integers(5, 9))], execution=Execution(memory="static"),
        )  # fmt: skip
        row = Row(problem)
        row.anneal(0.0, 200, seed)
        rows = all_placements(problem)
        in_one_piece = [len(set(r.tolist())) == 1 + (np.diff(r) != 0).sum() for r in rows]
        best = evaluate(problem, rows).score[in_one_piece].min()
        assert row.value == pytest.approx(best, rel=1e-12), seed
        if math.isfinite(best):
            assert evaluate(problem, row.plan()[0]).score[0] == best, seed
            cut += len(set(row.plan()[0].tolist())) > 1
    assert cut > 10


def test_pieces_fit_with_what_is_alive():
    """Residual connections, several readers and scratch space; each piece runs in the order of the row."""
    fitted = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        n = 9
        edges = {(i, i + 1) for i in range(n - 1)} | {(int(a), int(b)) for a, b in rng.integers(0, n, (4, 2)) if a < b}
        problem = problem_of(
            np.repeat(rng.integers(0, 9, (n, 1)).astype(float), 3, axis=1), sorted(edges), sizes=rng.integers(0, 6, n),
            resident=rng.integers(0, 4, n), scratch=rng.integers(0, 3, n), memory=float(rng.integers(14, 24)),
            bandwidth=float(rng.choice([0.5, 4.0])),
        )  # fmt: skip
        row = Row(problem)
        row.anneal(1e-2, 50, seed)
        if math.isfinite(row.value):
            assert evaluate(problem, *row.plan()).feasible[0], seed
            fitted += 1
    assert fitted > 30


def test_what_it_is_for():
    seconds, edges = np.ones((4, 2)), [(0, 1), (1, 2), (2, 3)]
    with pytest.raises(Unsupported, match="each device has room for all"):
        plan(problem_of(seconds, edges), "rows")
    found = plan(problem_of(seconds, edges, resident=2.0, memory=6.0), "rows", budget=Budget(evaluations=100))
    assert found.value == 4 + 1


def test_a_cut_counts_as_the_evaluations_that_it_takes_the_time_of(monkeypatch):
    """200 units on two kinds of devices: a cut looks at so many pieces that it stands for 24 evaluations."""
    cuts = []
    anneal = Row.anneal
    monkeypatch.setattr(Row, "anneal", lambda row, t, count, seed: cuts.append(count) or anneal(row, t, count, seed))
    problem = problem_of(
        np.ones((200, 2)) * [1.0, 2.0], [(i, i + 1) for i in range(199)], resident=1.0, memory=[150.0, 160.0]
    )
    found = plan(problem, "rows", budget=Budget(evaluations=500))
    assert Row(problem).evaluations == 24
    assert 1 < sum(cuts) <= 500 // 24
    assert found.evaluations <= 500
