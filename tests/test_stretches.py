"""A path that does not fit on one device must move on: no plan beats what that costs, and some meet it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from oracles import brute_force, brute_force_orders
from placewise import certificate
from placewise.certificate import check
from placewise.cluster import Cluster, Device, Link
from placewise.costs import Costs
from placewise.driver import plan
from placewise.graph import Graph
from placewise.problem import Execution, Problem
from placewise.simulator.bounds import lower_bound, made_of
from problems import problem_of

NAME = "path in stretches"


def row(rng, *, ops=7, kinds=2, each=2, live=True, sequential=False):
    """A chain with residual connections and a side branch, on devices some of which are alike, with little memory."""
    n, devices = int(rng.integers(3, ops + 1)), kinds * each
    edges = [(i, i + 1) for i in range(n - 1) if rng.random() < 0.9]
    if rng.random() < 0.4:  # two ops in a row are side by side instead
        at = int(rng.integers(0, max(n - 3, 1)))
        edges = [edge for edge in edges if edge != (at + 1, at + 2)]
        edges += [(a, b) for a, b in [(at, at + 2), (at + 1, at + 3)] if b < n]
    edges += [(int(a), int(b)) for a, b in rng.integers(0, n, (3, 2)) if a < b]
    seconds = np.repeat(rng.integers(0, 9, (n, kinds)).astype(float), each, axis=1)
    resident = rng.integers(0, 5, n).astype(float)
    sizes = rng.integers(0, 6, n).astype(float)
    # Kinds differ in memory; one of them may have plenty.
    rooms = [math.inf if k and rng.random() < 0.5 else float(rng.integers(4, 14)) for k in range(kinds)]
    names = [f"d{d}" for d in range(devices)]
    bandwidth = rng.choice([0.5, 1.0, 2.0], (kinds, kinds))
    links = [Link(a, b, bandwidth[i // each, j // each], float(rng.random() < 0.3))
             for i, a in enumerate(names) for j, b in enumerate(names) if i != j]  # fmt: skip
    cluster = Cluster(tuple(Device(name, memory=rooms[d // each]) for d, name in enumerate(names)), tuple(links))
    graph = Graph.create(
        op_names=[f"op{i}" for i in range(n)], tensor_producer=np.arange(n), tensor_bytes=sizes,
        edge_tensor=[a for a, _ in edges], edge_consumer=[b for _, b in edges], resident=resident,
        scratch=rng.integers(0, 3, n).astype(float), group=np.where(rng.random(n) < 0.2, 0, -1),
    )  # fmt: skip
    execution = Execution(
        memory="live" if live else "static", concurrency="sequential" if sequential else "parallel",
        contention=str(rng.choice(["channel", "none"])), sends=str(rng.choice(["tensor", "edge"])),
    )  # fmt: skip
    return Problem(graph, cluster, Costs.create(seconds), execution=execution)


@pytest.mark.parametrize(("live", "sequential", "kinds", "each"), [
    (True, False, 2, 2), (False, False, 2, 2), (True, True, 2, 1), (True, False, 3, 1), (False, False, 1, 3),
])  # fmt: skip
def test_no_placement_beats_it(live, sequential, kinds, each):
    said = met = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        problem = row(rng, ops=6, kinds=kinds, each=each, live=live, sequential=sequential)
        best, _ = brute_force(problem)
        bound = lower_bound(problem)
        assert bound.value <= best, seed
        said += NAME in bound.parts and math.isfinite(best)
        met += bound.parts.get(NAME, 0.0) >= best * (1 - 1e-9)
    assert said > 10
    assert met > 5  # so that a bound that is a little too high would have been noticed


def test_no_order_beats_it():
    said = 0
    for seed in range(40):
        problem = row(np.random.default_rng(seed), ops=5, each=1)
        bound = lower_bound(problem)
        assert bound.value <= brute_force_orders(problem)[0], seed
        said += NAME in bound.parts
    assert said > 5


def chain(memory, **options):
    """Four ops of 1 s with 2 bytes each, and 5, 3 and 1 bytes between them; two devices that are alike."""
    edges = [(0, 1), (1, 2), (2, 3)]
    options = {"sizes": [5.0, 3.0, 1.0, 0.0], "resident": 2.0, "execution": Execution(memory="static")} | options
    return problem_of(np.ones((4, 2)), edges, memory=memory, **options)


def test_a_path_moves_on_where_it_is_cheapest():
    assert NAME not in lower_bound(chain(8.0)).parts
    assert lower_bound(chain(6.0)).parts[NAME] == pytest.approx(4 + 1) == brute_force(chain(6.0))[0]
    assert lower_bound(chain(4.0)).parts[NAME] == pytest.approx(4 + 3) == brute_force(chain(4.0))[0]
    assert made_of(chain(4.0))[NAME] == pytest.approx({"compute": 4.0, "transfer": 0.0, "memory": 3.0})


def test_what_an_op_holds_while_it_runs_takes_room_too():
    """The first two ops hold 5 and 8 bytes beside what is resident, so no other op's weights fit beside op 1's."""
    live = chain(11.0, execution=Execution())
    assert lower_bound(live).parts[NAME] == pytest.approx(brute_force(live)[0])
    # With 9 bytes op 1 fits nowhere, though all that is resident does.
    assert lower_bound(chain(9.0, execution=Execution())).parts == {"memory": math.inf}
    assert brute_force(chain(9.0, execution=Execution()))[0] == math.inf
    assert lower_bound(chain(9.0)).value == pytest.approx(4.0)


def test_a_residual_connection_moves_with_its_path():
    """The cheapest cut of the path is inside the block, but what jumps over it must get across as well."""
    edges = [(0, 1), (1, 2), (2, 3), (0, 3)]
    columns = {"sizes": [9.0, 1.0, 9.0, 0.0], "resident": [2.0, 2.0, 2.0, 2.0]}
    execution = Execution(memory="static", contention="none")
    problem = problem_of(np.ones((4, 2)), edges, memory=6.0, execution=execution, **columns)
    assert lower_bound(problem).parts[NAME] == pytest.approx(1 + 9 + 1) == brute_force(problem)[0]


def test_what_is_beside_the_path_takes_its_turn_or_goes_there_and_back():
    """op1 and op2 are side by side. The last op's 2 bytes do not fit with the rest, so that stretches are counted."""
    edges = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)]
    seconds = np.array([[1.0], [4.0], [3.0], [1.0], [1.0]]) * [1, 1]
    columns = {"sizes": [5.0, 5.0, 2.0, 1.0, 0.0], "resident": [1.0, 1.0, 1.0, 1.0, 2.0]}
    execution = Execution(memory="static")
    problem = problem_of(seconds, edges, memory=4.0, execution=execution, **columns)
    assert lower_bound(problem).parts[NAME] == pytest.approx(1 + (4 + 3) + 1 + 1 + 1) == brute_force(problem)[0]
    near = problem_of(seconds, edges, memory=4.0, bandwidth=20.0, execution=execution, **columns)
    # Elsewhere, op2 takes 0.25 + 3 + 0.1 s, and op1 takes longer.
    assert lower_bound(near).parts[NAME] == pytest.approx(1 + 4 + 1 + 0.05 + 1) == brute_force(near)[0]


def test_of_what_is_beside_the_path_those_are_elsewhere_that_are_back_soonest():
    """op1, op2 and op3 are side by side. op2 is back after 19.1 s, op3 with its large output after 39 s only."""
    edges = [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4), (4, 5)]
    seconds = np.array([[1.0], [12.0], [8.0], [8.0], [1.0], [1.0]]) * [1, 1]
    columns = {"sizes": [200.0, 200.0, 2.0, 400.0, 1.0, 0.0], "resident": [1.0] * 5 + [3.0]}
    problem = problem_of(seconds, edges, memory=5.0, bandwidth=20.0, execution=Execution(memory="static"), **columns)
    assert lower_bound(problem).parts[NAME] == pytest.approx(1 + (12 + 8 + 1) + 0.05 + 1) == brute_force(problem)[0]


def test_the_path_is_the_witness():
    bound = lower_bound(chain(4.0))
    assert bound.path == (0, 1, 2, 3)
    assert lower_bound(replace(chain(4.0), objective="throughput")).path == ()


def test_the_checker_goes_over_it(monkeypatch):
    """By an implementation of its own, which must prove as much and no more than what is true."""
    checked = 0
    for seed in range(80):
        problem = row(np.random.default_rng(seed), ops=6, kinds=2, each=2, live=seed % 2 == 0)
        bound = lower_bound(problem)
        if NAME not in bound.parts or brute_force(problem)[1] is None:
            continue
        found = plan(problem, "fit")
        findings = {finding.claim: finding for finding in check(found)}
        again = findings[f"bound: {NAME}"]
        assert again.verdict == "holds"
        assert again.found == pytest.approx(bound.parts[NAME], rel=1e-9)
        checked += 1
    assert checked > 10
    # One that is too long is named as `explain` names it, with the reason why it is not gone over.
    found = plan(chain(4.0), "fit")
    monkeypatch.setattr(certificate, "_LONGEST", 3)
    *_, last = check(found)
    assert (last.claim, last.verdict) == (f"bound: {NAME}", "on trust: over 3 ops")
    assert last.claimed == pytest.approx(7.0)
    assert not last.is_wrong
    parts = lower_bound(found.problem).parts
    assert max(parts, key=lambda name: parts[name]) == NAME
    monkeypatch.undo()
    # What is no path proves nothing.
    found = plan(chain(4.0), "random")
    found.problem.derived["bound"] = replace(lower_bound(found.problem), path=(0, 2, 3))
    assert [finding.claim for finding in check(found) if finding.is_wrong] == [f"bound: {NAME}"]
