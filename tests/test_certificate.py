"""The checker accepts every plan of every kind of problem, and notices what is made up."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from placewise.certificate import TRUST, check
from placewise.driver import Budget, plan
from placewise.errors import NoFeasiblePlan
from placewise.problem import Execution
from problems import problem_of, random_problem
from test_replication import OPTIONS, several
from test_slots import random_slots


def drawn(kind, seed):
    rng = np.random.default_rng(seed)
    constrained = seed % 2 == 0
    if kind == "slots":
        return random_slots(seed, constrained=constrained)[0]
    if kind in OPTIONS:
        return several(rng, **OPTIONS[kind])
    objective, _, concurrency = kind.partition(" ")
    problem = random_problem(rng, objective=objective, constrained=constrained, integers=seed % 3 > 0)
    return replace(problem, execution=replace(problem.execution, concurrency=concurrency)) if concurrency else problem


KINDS = ["latency parallel", "latency sequential", "completion parallel", "throughput", "slots", *OPTIONS]


@pytest.mark.parametrize("kind", KINDS)
def test_every_plan_holds(kind):
    checked = 0
    for seed in range(60):
        problem = drawn(kind, seed)
        try:
            found = plan(problem, "random", budget=Budget(evaluations=30))
        except NoFeasiblePlan:
            continue
        wrong = [finding for finding in check(found) if finding.is_wrong]
        assert not wrong, (seed, wrong)
        checked += 1
    assert checked > 30


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_is_made_up_is_noticed(kind):
    noticed = 0
    for seed in range(20):
        try:
            found = plan(drawn(kind, seed), "random", budget=Budget(evaluations=5))
        except NoFeasiblePlan:
            continue
        if found.value > 0:
            better = replace(found, value=0.99 * found.value, lower_bound=0.0)
            assert [finding.claim for finding in check(better) if finding.is_wrong] == ["value"]
            noticed += 1
    assert noticed > 5


def a_plan(**options):
    """Two ops in a row on two devices, 5 bytes between them, each op with 3 bytes of its own."""
    problem = problem_of([[1.0, 9.0], [9.0, 1.0]], [(0, 1)], sizes=[5.0, 0.0], resident=3.0, **options)
    return plan(problem, "random", budget=Budget(evaluations=30))


def faults(found):
    return {finding.claim: finding.verdict for finding in check(found) if finding.is_wrong}


def test_a_timeline_that_cannot_be_is_noticed():
    found = a_plan()
    timeline = found.timeline
    assert not faults(found)
    for change, why in [
        ({"start": timeline.start - [0, 1], "finish": timeline.finish - [0, 1]}, "op op1 starts before its inputs"),
        ({"finish": np.add(timeline.finish, [0, 1])}, "op op1 takes another time"),
        ({"transfers": replace(timeline.transfers, start=timeline.transfers.start + 1.0)},
         "what op0 sends is not as it must be"),
    ]:  # fmt: skip
        other = replace(found)
        other.__dict__["timeline"] = replace(timeline, **change)
        assert faults(other) == {"value": why}


def test_two_ops_at_a_time_on_a_device_are_noticed():
    found = plan(problem_of([[1.0], [2.0]]), "single")
    found.__dict__["timeline"] = replace(found.timeline, start=np.zeros(2), finish=np.array([1.0, 2.0]))
    assert faults(found) == {"value": "two things at a time where there is room for one"}


def test_broken_constraints_are_noticed():
    found = a_plan()
    assert found.placement.tolist() == [0, 1]
    pinned = replace(found, problem=replace(found.problem, pins={"op1": "d0"}))
    assert faults(pinned)["placement"] == "op op1 is pinned elsewhere"
    cluster = found.problem.cluster.with_memory({"d0": 7.0, "d1": 8.0})
    small = replace(found, problem=replace(found.problem, cluster=cluster), lower_bound=0.0)
    assert faults(small) == {"memory of d0": "it holds more"}  # 3 bytes and the 5 that it makes


def test_a_bound_is_worked_out_again_or_taken_on_trust():
    found = a_plan()
    assert [finding.verdict for finding in check(found) if finding.claim == "bound"] == ["holds"]
    # Three ops of 1 s on two devices: 1.5 s by area, 2 s by search.
    three = plan(problem_of(np.ones((3, 2))), "cpsat")
    assert (three.value, three.proved_by) == (2.0, "cpsat")
    assert (check(three)[-1].claim, check(three)[-1].verdict) == ("bound: by cpsat", TRUST)
    above = check(replace(found, lower_bound=found.value * 1.1))[-1]
    assert above.verdict == "the plan itself is below it"


def test_prices_that_prove_less_are_noticed():
    """All the price on one device, whose time is then all that counts."""
    problem = problem_of(np.ones((4, 2)), objective="throughput", execution=Execution(contention="none"))
    found = plan(problem, "random", budget=Budget(evaluations=30))
    bound = problem.derived["bound"]
    assert bound.prices[0].tolist() == [[0.5, 0.5]]
    problem.derived["bound"] = replace(bound, prices=(np.array([[1.0, 0.0]]), np.zeros(2)))
    assert faults(found) == {"bound: area": "it proves less"}
    problem.derived["bound"] = replace(bound, prices=(np.array([[1.0, 1.0]]), np.zeros(2)))
    assert faults(found) == {"bound: area": "it proves less"}
    assert math.isclose(found.value, 2.0)


def test_bounds_of_completion_are_worked_out_again_as_far_as_paths_and_units_prove_them():
    """One model of 1 s, 5 bytes on their way, and 1 s: 7 s. Of several, what the area proves is on trust."""
    found = a_plan(objective="completion")
    assert {x.claim: (x.found, x.verdict) for x in check(found)}["bound: alone"] == (7.0, "holds")
    holds = some = 0
    for seed in range(40):
        try:
            found = plan(drawn("completion parallel", seed), "random", budget=Budget(evaluations=30))
        except NoFeasiblePlan:
            continue
        bounds = {finding.claim: finding.verdict for finding in check(found) if finding.claim.startswith("bound")}
        some += 1
        holds += bounds.get("bound") == "holds"
        assert "bound: alone" in bounds or bounds != {"bound": "holds"} or found.lower_bound == 0.0, seed
    assert holds > 0.75 * some > 20
