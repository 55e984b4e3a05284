"""Weights that may be streamed: no plan beats what memory, links and devices prove together, and some meet it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from oracles import brute_force
from placewise.certificate import check
from placewise.driver import Budget, plan
from placewise.simulator.bounds import lower_bound, made_of
from problems import layers, random_problem

NAME = "streaming"


def test_what_does_not_fit_is_computed_slowly_or_fetched():
    """Two of four layers fit. Of the others a share s is fetched, in 8 s each, and the path is 2 + s + 3 (2 - s)."""
    bound = lower_bound(layers(4, room=16.0))
    assert bound.parts[NAME] == pytest.approx(6.4) == bound.value  # 8 s = 8 - 2 s, s = 0.8
    assert max(seconds for name, seconds in bound.parts.items() if name != NAME) == pytest.approx(4.0)


def test_where_one_thing_runs_at_a_time_a_slow_fetch_is_no_help():
    problem = layers(4, room=16.0, concurrency="sequential")
    assert lower_bound(problem).value == pytest.approx(8.0) == brute_force(problem)[0]


def test_copies_that_never_wait_cost_a_path_nothing():
    assert NAME not in lower_bound(layers(4, room=16.0, contention="none")).parts


def test_where_all_fits_there_is_nothing_to_say():
    assert lower_bound(layers(4, room=32.0)).parts.keys() == {"unit", "area", "path"}


def test_layers_that_are_alike_are_one_in_the_programme():
    """A thousand layers, of which a quarter fits; and what memory is to blame for is said."""
    problem = layers(1000, room=2000.0)
    assert lower_bound(problem).value == pytest.approx(2000.0)  # a share of 750: s = 250, 8 s = 250 + 250 + 3 * 500
    assert made_of(problem)[NAME] == pytest.approx({"compute": 1000.0, "transfer": 0.0, "memory": 1000.0})


def scarce(seed):
    """A random problem with stored tensors and too little room; None where there is no such."""
    rng = np.random.default_rng(seed)
    problem = random_problem(
        rng, max_ops=7, max_devices=3, integers=seed % 2 == 0, objective="latency", constrained=True
    )
    graph, cluster = problem.graph, problem.cluster
    if cluster.num_devices < 2 or not graph.is_stored.any():
        return None
    room = graph.resident_bytes.sum() * rng.uniform(0.2, 0.9, cluster.num_devices)
    cluster = cluster.with_memory(dict(zip(cluster.device_names, room.tolist(), strict=True)))
    concurrency, memory = str(rng.choice(["parallel", "sequential"])), str(rng.choice(["live", "static"]))
    return replace(
        problem, cluster=cluster, execution=replace(problem.execution, concurrency=concurrency, memory=memory)
    )


def test_no_placement_beats_it():
    said = met = 0
    for seed in range(800):
        problem = scarce(seed)
        best = brute_force(problem)[0] if problem else math.inf
        if math.isfinite(best):
            bound = lower_bound(problem)
            assert bound.value <= best, seed
            said += bound.parts.get(NAME, 0.0) == bound.value
            met += bound.parts.get(NAME, 0.0) >= best * (1 - 1e-9)
    assert said > 10
    assert met > 0


def test_its_prices_are_gone_over_by_the_checker():
    problem = layers(4, room=16.0)
    found = plan(problem, "heft", budget=Budget(evaluations=10))
    [holds] = [finding for finding in check(found) if finding.claim == f"bound: {NAME}"]
    assert holds.verdict == "holds"
    assert holds.found == pytest.approx(6.4)
    bound = lower_bound(problem)
    bound.streaming.load[:] = [1.5, *([0.0] * (len(bound.streaming.load) - 1))]  # no longer a mean of loads
    [wrong] = [finding for finding in check(found) if finding.claim == f"bound: {NAME}"]
    assert wrong.verdict == "it proves less"


def test_the_checker_agrees_on_random_problems():
    agreed = 0
    for seed in range(400):
        problem = scarce(seed)
        if problem and math.isfinite(brute_force(problem)[0]) and NAME in lower_bound(problem).parts:
            again = {finding.claim: finding for finding in check(plan(problem, "fit"))}
            agreed += again[f"bound: {NAME}"].verdict == "holds"
            assert again[f"bound: {NAME}"].verdict == "holds", seed
    assert agreed > 5
