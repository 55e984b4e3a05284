"""Scoring small changes: equal to `evaluate` bit for bit, and nothing better than the cutoff is dropped."""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
import pytest

from placewise.costs import Costs
from placewise.problem import Execution
from placewise.simulator import evaluate, kernel
from placewise.simulator.incremental import Incremental
from problems import problem_of, random_placement, random_problem

SETTINGS = [
    # objective, share of parameters (which rule out checkpoints), whole numbers (which bring ties)
    ("latency", 0.0, True), ("latency", 0.0, False), ("latency", 0.3, True), ("completion", 0.0, True),
    ("completion", 0.3, False),
]  # fmt: skip


def changes(rng, problem, placement, count=6):
    """Placements: moves of an op, swaps, moves of a colocation group, several at once, and none."""
    rows = []
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
    return np.array(rows, np.int32)


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
            rows = changes(rng, problem, current.placement)
            probed = current.probe(rows, np.inf)
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
            rows = changes(rng, problem, current.placement)
            full = evaluate(problem, rows).value
            cutoff = float(rng.choice([current.value, np.median(full), full.min() * (1 + 1e-9), full.max() * 1.1]))
            probed = current.probe(rows, cutoff)
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
    assert [float(current.probe(away, np.inf)[0]) for _ in range(2)] == [42.0, 42.0]
    assert current.value == 40.0
    assert current.placement.tolist() == [0] * 40
    assert current.probe(away, 41.0).tolist() == [np.inf]
    assert current.accept(away[0]) == 42.0
    assert current.probe(np.zeros((1, 40), np.int32), 42.0).tolist() == [40.0]


def test_no_probe_is_no_work():
    problem = problem_of(np.ones((3, 2)), execution=Execution(contention="none"))
    current = Incremental(problem, np.zeros(3, np.int32))
    assert current.probe(np.zeros((0, 3), np.int32), np.inf).tolist() == []
    assert current.probe(current.placement[None], np.inf).tolist() == [3.0]


# ---- work that is not done -------------------------------------------------------------------------------------------


def chains(count, length, **options):
    """Chains of ops of 1 s. The kernel numbers ops by their way to go: the i-th ops of all chains are neighbours."""
    edges = [(c * length + i, c * length + i + 1) for c in range(count) for i in range(length - 1)]
    return problem_of(np.ones((count * length, 2)), edges, **options)


def moved(placement, op):
    """The placement with an op on the other device, as the only row of a batch."""
    row = placement.copy()
    row[op] = 1 - row[op]
    return row[None]


def never_started(current):
    """[D] seconds of work that the last row of a probe had left when it ended or was dropped."""
    names = list(inspect.signature(kernel.run.py_func).parameters)
    return current._prober._room[names.index("work_left") - names.index("place")]


@pytest.mark.parametrize(("changed", "first"), [(639, 630), (500, 490), (491, 490), (490, 480), (15, 10), (5, 0)])
def test_a_probe_begins_at_the_last_checkpoint_before_what_it_changes(changed, first):
    """64 checkpoints, 10 ops apart. Ops before the one that it begins with may take any time: they are not run."""
    problem = chains(1, 640)
    current = Incremental(problem, np.zeros(640, np.int32))
    value = 641.0 if changed == 639 else 642.0  # to the other device, and back if there is an op to follow
    current._arrays.seconds[: 2 * first] = 1e6
    assert current.probe(moved(current.placement, changed), np.inf).tolist() == [value]
    current._arrays.seconds[2 * first + 2 : 2 * first + 4] = 1001.0  # the op before was running: its end is known
    assert current.probe(moved(current.placement, changed), np.inf).tolist() == [value + 1000.0]


def test_a_probe_of_several_ops_begins_before_the_first():
    current = Incremental(chains(1, 640), np.zeros(640, np.int32))
    row = current.placement.copy()
    row[[600, 300]] = 1
    current._arrays.seconds[: 2 * 290] = 1e6
    assert current.probe(row[None], np.inf).tolist() == [644.0]
    current._arrays.seconds[2 * 295] = 11.0
    assert current.probe(row[None], np.inf).tolist() == [654.0]


def test_a_probe_that_changes_an_op_without_inputs_begins_at_zero():
    current = Incremental(chains(2, 320), np.zeros(640, np.int32))
    assert current.probe(moved(current.placement, 0), np.inf).tolist() == [639.0]
    current._arrays.seconds[0] = 3.0
    assert current.probe(moved(current.placement, 320), np.inf).tolist() == [641.0]


def test_a_probe_is_dropped_as_soon_as_an_op_has_too_far_to_go():
    """Moving op1 away delays op2 to 4 s, and from there it is 638 s to the end."""
    current = Incremental(chains(1, 640), np.zeros(640, np.int32))
    assert current.probe(moved(current.placement, 1), 643.0).tolist() == [642.0]
    assert never_started(current).tolist() == [0.0, 0.0]
    assert current.probe(moved(current.placement, 1), 642.0).tolist() == [np.inf]
    assert never_started(current).tolist() == [638.0, 0.0]


def test_a_probe_trusts_the_way_to_go_only_past_what_it_changes():
    """op600 becomes fast, so that ops before it have less far to go than before."""
    problem = chains(1, 640, sizes=0.0)
    seconds = problem.seconds.copy()
    seconds[600] = [50.0, 1.0]
    current = Incremental(replace(problem, costs=Costs.create(seconds)), np.zeros(640, np.int32))
    assert current.value == 689.0
    assert current.probe(moved(current.placement, 600), 650.0).tolist() == [640.0]


def test_a_probe_is_dropped_at_once_if_a_device_has_too_much_left():
    """Two chains, one on each device, for 320 s; the last op of one goes to the other, which then takes 321 s.

    The checkpoint is at 316 s: 630 ops have ended or end right then, two more have begun.
    """
    current = Incremental(chains(2, 320, sizes=0.0), np.repeat(np.array([0, 1], np.int32), 320))
    assert current.probe(moved(current.placement, 319), 322.0).tolist() == [321.0]
    assert never_started(current).tolist() == [0.0, 0.0]
    assert current.probe(moved(current.placement, 319), 320.0).tolist() == [np.inf]
    assert never_started(current).tolist() == [3.0, 5.0]


def test_a_probe_is_dropped_as_soon_as_a_device_starts_with_too_much_left():
    """100 ops on each of two devices, one more on the second: 101 s at the least."""
    problem = problem_of(np.ones((200, 2)))
    current = Incremental(problem, np.repeat(np.array([0, 1], np.int32), 100))
    assert current.probe(moved(current.placement, 99), 100.0).tolist() == [np.inf]
    assert never_started(current).sum() >= 198.0
