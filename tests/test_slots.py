"""Slots: the paper's latency model, its bounds, and the planners made for it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import reference
from oracles import brute_force
from placewise import Budget, plan
from placewise.cluster import Cluster, Device, Link
from placewise.errors import InvalidInput, Unsupported
from placewise.importers import dnn_partitioning
from placewise.problem import Execution
from placewise.report.explain import critical_chain
from placewise.simulator import evaluate, simulate, violations
from placewise.simulator.bounds import lower_bound
from problems import problem_of, random_placement, random_problem

SLOTS = Execution(concurrency="slots", memory="static")


def accelerators_and_pool(count, *, memory=np.inf, bandwidth=1.0):
    """Accelerators, then a pool of CPUs."""
    devices = [Device(f"acc{i}", memory=memory) for i in range(count)] + [Device("cpu", "cpu", copies=False)]
    names = [device.name for device in devices]
    return Cluster(tuple(devices), tuple(Link(a, b, bandwidth) for a in names for b in names if a != b))


def random_slots(seed, *, max_ops=9, **options):
    rng = np.random.default_rng(seed)
    objective = "completion" if seed % 4 == 0 else "latency"
    execution = replace(SLOTS, slots=1 + (seed // 4) % 3)
    stored = 0.2 if seed % 3 == 0 else 0.0
    problem = random_problem(rng, max_ops=max_ops, objective=objective, execution=execution, stored=stored, **options)
    return problem, rng


# ---- what a piece costs ----------------------------------------------------------------------------------------------


def test_a_piece_waits_for_all_inputs_and_shows_nothing_before_its_end():
    """cpu(2) -> acc0: receives 3, runs 1 + 4, sends 5 -> acc1: receives 5, runs 2 -> nothing to send."""
    cluster = accelerators_and_pool(2)
    seconds = [[9, 9, 2], [1, 9, 9], [4, 9, 9], [9, 2, 9]]
    problem = problem_of(
        seconds, [(0, 1), (1, 2), (2, 3)], sizes=[3.0, 7.0, 5.0, 1.0], cluster=cluster, execution=SLOTS
    )
    timeline = simulate(problem, [2, 0, 0, 1])
    assert timeline.value == 2 + (3 + 1 + 4 + 5) + (5 + 2)
    assert timeline.start.tolist() == [0, 5, 6, 20]
    assert timeline.finish.tolist() == [2, 6, 10, 22]
    moves = timeline.transfers
    assert moves.start.tolist() == [2, 10]  # the second lies in host memory from 15, when acc1 begins to receive it
    assert moves.finish.tolist() == [5, 20]
    assert sum(step.seconds for step in critical_chain(timeline)) == timeline.value
    # Two readers of one tensor on the same device: received once; sent once, however many devices read it.
    fork = problem_of(
        [[1, 9, 9], [9, 2, 9], [9, 2, 9], [9, 9, 4]], [(0, 1), (0, 2), (0, 3)], sizes=3.0, cluster=cluster,
        execution=SLOTS,
    )  # fmt: skip
    assert evaluate(fork, [0, 1, 1, 2]).value.tolist() == [(1 + 3) + (3 + 2 + 2)]


def test_a_pool_runs_any_number_at_once():
    problem = problem_of([[1, 5]] * 4, cluster=accelerators_and_pool(1), execution=SLOTS)
    assert evaluate(problem, [[1, 1, 1, 1], [0, 0, 0, 0]]).value.tolist() == [5, 4]


def test_more_pieces_than_slots_is_a_broken_rule():
    cluster = accelerators_and_pool(1)
    chain = problem_of([[1, 1]] * 3, [(0, 1), (1, 2)], cluster=cluster, execution=SLOTS)
    assert violations(chain, [0, 1, 0]) == [
        "data leaves acc0 and comes back for op 'op2' once too often: one piece is allowed on each device"
    ]
    assert not evaluate(chain, [0, 1, 0]).feasible[0]
    with pytest.raises(InvalidInput, match="data leaves acc0 and comes back"):
        simulate(chain, [0, 1, 0])
    two = replace(chain, execution=replace(SLOTS, slots=2))
    assert violations(two, [0, 1, 0]) == []
    assert evaluate(two, [0, 1, 0]).value.tolist() == [(1 + 1) + 1 + (1 + 1)]


def test_pieces_that_wait_for_each_other_are_a_broken_rule():
    """a0 -> b0 and b1 -> a1: each device is convex, but neither can go first."""
    problem = problem_of([[1, 1, 9]] * 4, [(0, 1), (2, 3)], cluster=accelerators_and_pool(2), execution=SLOTS)
    assert violations(problem, [0, 1, 1, 0]) == [
        "op 'op3' on acc0 can never start: pieces wait for each other in a circle"
    ]
    with pytest.raises(InvalidInput, match="circle"):
        simulate(problem, [0, 1, 1, 0])


def test_settings_that_make_no_sense():
    with pytest.raises(InvalidInput, match=r'execution\.memory: must be "static"'):
        Execution(concurrency="slots")
    with pytest.raises(InvalidInput, match=r"execution\.slots: must be a whole number"):
        replace(SLOTS, slots=0)
    with pytest.raises(InvalidInput, match="an engine with slots has no pipeline"):
        problem_of([[1.0]], objective="throughput", execution=SLOTS)


def test_the_kernel_equals_its_twin():
    seen = {"": 0, "too many": 0, "circle": 0}
    for seed in range(400):
        problem, rng = random_slots(seed, integers=seed % 2 == 0)
        rows = np.array([random_placement(rng, problem) for _ in range(6)], np.int32).reshape(6, problem.num_ops)
        expected = [reference.run_in_slots(problem, row) for row in rows]
        assert evaluate(problem, rows).value.tolist() == [value for value, _ in expected]
        for row, (value, why) in zip(rows, expected, strict=True):
            seen[why] += 1
            words = [text for text in violations(problem, row) if "memory" not in text]
            assert bool(words) == bool(why)
            assert not why or ("circle" in words[0]) == (why == "circle")
            if not why and problem.objective == "latency":
                timeline = simulate(problem, row)
                assert timeline.value == value
                assert timeline.makespan == pytest.approx(value)
                for t, u, v in zip(
                    problem.graph.edge_tensor, problem.graph.edge_producer, problem.graph.consumers, strict=True
                ):
                    assert timeline.finish[u] <= timeline.start[v] * (1 + 1e-12), t
                assert sum(step.seconds for step in critical_chain(timeline)) == pytest.approx(value)
    assert min(seen.values()) > 20, seen


def test_no_placement_beats_the_bound():
    met = 0
    for seed in range(150):
        problem, _ = random_slots(seed, max_ops=6, max_devices=3, constrained=True)
        if problem.num_ops:
            best, _ = brute_force(problem)
            bound = lower_bound(problem).value
            assert bound <= best * (1 + 1e-12)
            met += bool(bound == pytest.approx(best))
    assert met > 50  # and it is no empty claim
