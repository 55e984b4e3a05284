"""What an op waits for takes turns where it cannot be elsewhere in time: no plan beats that, and some meet it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from oracles import brute_force, brute_force_orders
from placewise.certificate import _too_much, check
from placewise.driver import plan
from placewise.problem import Execution
from placewise.simulator.bounds import lower_bound
from problems import problem_of

NAME = "turns"


def joins(rng, *, ops, devices, objective="latency"):
    """Ops that read several others, on devices some of which are alike, and not near each other."""
    n = int(rng.integers(3, ops + 1))
    pairs = rng.integers(0, n, (2 * n, 2))
    edges = sorted({(int(a), int(b)) for a, b in pairs if a < b} | {(a, n - 1) for a in range(n - 1)})
    seconds = rng.integers(0, 6, (n, devices)).astype(float)
    if rng.random() < 0.7:
        seconds[:, 1:] = seconds[:, :1]
    return problem_of(
        seconds, edges, sizes=rng.integers(0, 7, n).astype(float), objective=objective,
        bandwidth=float(rng.choice([0.5, 1.0, 3.0])), latency=float(rng.integers(0, 3)),
        group=np.where(rng.random(n) < 0.2, 0, -1), model=(np.arange(n) % 2) * (objective == "completion"),
        models=("a", "b")[: 1 + (objective == "completion")],
        execution=Execution(contention=str(rng.choice(["channel", "none"])), sends=str(rng.choice(["tensor", "edge"]))),
    )  # fmt: skip


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_no_placement_beats_it(devices):
    said = met = 0
    for seed in range(200):
        problem = joins(np.random.default_rng(seed), ops=7 if devices < 3 else 6, devices=devices)
        best, _ = brute_force(problem)
        bound = lower_bound(problem)
        assert bound.value <= best, seed
        said += NAME in bound.parts
        met += bound.parts.get(NAME, 0.0) >= best * (1 - 1e-6) > 0
    assert said > 100
    assert met > 30  # so that a bound that is a little too high would have been noticed


@pytest.mark.parametrize("objective", ["latency", "completion"])
def test_no_order_beats_it(objective):
    for seed in range(40):
        problem = joins(np.random.default_rng(seed), ops=5, devices=2, objective=objective)
        assert lower_bound(problem).value <= brute_force_orders(problem)[0] * (1 + 1e-12), seed


def fork(*, back, bandwidth=1.0):
    """Four ops of 2 s that read one and that one reads; what they make has so many bytes."""
    edges = [(0, i) for i in range(1, 5)] + [(i, 5) for i in range(1, 5)]
    seconds = np.array([[1.0], [2.0], [2.0], [2.0], [2.0], [1.0]]) * np.ones(3)
    return problem_of(seconds, edges, sizes=[3.0] + [back] * 4 + [0.0], bandwidth=bandwidth)


def test_what_is_too_far_away_takes_turns():
    """What is elsewhere is there after 3 s and back after 9 more; or, where links are fast, after 1 and 1."""
    far = fork(back=9.0)
    assert lower_bound(far).parts[NAME] == pytest.approx(1 + 4 * 2 + 1) == brute_force(far)[0]
    near = fork(back=3.0, bandwidth=3.0)
    best, _ = brute_force(near)
    assert 1 + 2 + 1 < lower_bound(near).parts[NAME] <= best < 1 + 4 * 2 + 1
    parts = lower_bound(far).parts
    assert parts["path"] == pytest.approx(4.0)
    assert parts["area"] == pytest.approx(10 / 3)


def test_it_needs_devices_that_work_at_the_same_time():
    far = fork(back=9.0)
    in_turn = replace(far, execution=replace(far.execution, concurrency="sequential"))
    assert NAME not in lower_bound(in_turn).parts


def heads(problem, bound):
    """As they are found by halving, with the questions of the checker."""
    devices, prices = range(problem.num_devices), [bound.turns.price.tolist(), [1.0] * problem.num_devices]
    graph, head = problem.graph, np.zeros(problem.seconds.shape)
    inputs = {op: [] for op in range(problem.num_ops)}
    for t, reader in zip(graph.edge_tensor.tolist(), graph.consumers.tolist(), strict=True):
        made = int(graph.tensor_producer[t])
        way = problem.cluster.latency + graph.tensor_bytes[t] * problem.cluster.seconds_per_byte
        apart = np.where(np.eye(problem.num_devices, dtype=bool), 0.0, math.inf)
        inputs[reader].append((made, way if problem.unit[made] != problem.unit[reader] else apart))
    for op in graph.topological_order.tolist():
        for d in devices:
            comes = [(head[made] + problem.seconds[made] + way[:, d]).min() for made, way in inputs[op]]
            low = head[op, d] = max(comes, default=0.0)
            if len(comes) > 1 and _too_much(op, d, low, inputs, head, problem.seconds, prices):
                high = low + problem.seconds.sum() + 1.0
                assert not _too_much(op, d, high, inputs, head, problem.seconds, prices)
                for _ in range(50):
                    middle = 0.5 * (low + high)
                    refuted = _too_much(op, d, middle, inputs, head, problem.seconds, prices)
                    low, high = (middle, high) if refuted else (low, middle)
                head[op, d] = low
    return head


def test_heads_are_as_late_as_halving_finds_them():
    raised = 0
    for seed in range(60):
        problem = joins(np.random.default_rng(seed), ops=9, devices=1 + seed % 3)
        bound = lower_bound(problem)
        assert bound.turns.head == pytest.approx(heads(problem, bound), rel=1e-6), seed
        raised += NAME in bound.parts
    assert raised > 30


def test_the_checker_goes_over_it():
    """By an implementation of its own, which must prove as much; heads that nothing refutes prove nothing."""
    checked = 0
    for seed in range(40):
        problem = joins(np.random.default_rng(seed), ops=6, devices=2)
        bound = lower_bound(problem)
        if NAME not in bound.parts or not math.isfinite(bound.value):
            continue
        found = plan(problem, "heft")
        again = {finding.claim: finding for finding in check(found)}[f"bound: {NAME}"]
        assert again.verdict == "holds", seed
        assert again.found == pytest.approx(bound.parts[NAME], rel=1e-6)
        checked += 1
    assert checked > 15
    found = plan(fork(back=9.0), "heft")
    bound = lower_bound(found.problem)
    late = replace(bound.turns, head=bound.turns.head + 1.0)
    found.problem.derived["bound"] = replace(bound, turns=late)
    assert f"bound: {NAME}" in [finding.claim for finding in check(found) if finding.is_wrong]
