"""m-TOPO, m-ETF and m-SCT: known answers, favourite children, and memory that is really kept."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from placewise.apart import POSSIBLE
from placewise.cluster import Cluster, Device, full_mesh
from placewise.driver import Budget, plan
from placewise.errors import InvalidInput, NoFeasiblePlan, Unsupported
from placewise.planners import baechi
from placewise.planners.baechi import favourite_children
from placewise.problem import Execution
from placewise.simulator import violations
from placewise.simulator.arrays import checked_order
from problems import problem_of, random_problem, shared_bus

FORK_JOIN = [(0, 1), (0, 2), (0, 3), (0, 4), (1, 5), (2, 5), (3, 5), (4, 5)]
CHAIN = [(i, i + 1) for i in range(5)]
TWO_CHAINS = [(i, i + 2) for i in range(6)]


def on_a_bus(times, edges, transfer):
    """Two equal devices that send one tensor at a time, as in the authors' virtual scheduler."""
    return problem_of(np.repeat(np.array([times], float).T, 2, axis=1), edges, sizes=transfer, cluster=shared_bus(2))


@pytest.mark.parametrize(
    ("problem", "topo", "etf", "sct"),
    [
        (on_a_bus([100] * 6, CHAIN, 10.0), 610, 600, 600),
        (on_a_bus([100] * 6, CHAIN, 1.0), 601, 600, 600),
        (on_a_bus([100] * 8, TWO_CHAINS, 10.0), 710, 400, 400),
        (on_a_bus([10, 100, 100, 100, 100, 10], FORK_JOIN, 10.0), 330, 230, 230),
        (on_a_bus([10, 100, 100, 100, 100, 10], FORK_JOIN, 300.0), 1220, 420, 420),
    ],
    ids=["chain", "chain, cheap transfers", "two chains", "fork and join", "fork and join, dear transfers"],
)
def test_values_of_the_authors_code(problem, topo, etf, sct):
    assert [plan(problem, name).value for name in ("m-topo", "m-etf", "m-sct")] == [topo, etf, sct]


# ---- m-TOPO ----------------------------------------------------------------------------------------------------------


def test_m_topo_shares_memory_equally_but_never_beyond_a_device():
    # Six ops of 4 bytes: 24 / 3 + 4 = 12 bytes each; the second device has 4.
    static = Execution(memory="static")
    problem = problem_of(np.ones((6, 3)), CHAIN, resident=4.0, memory=[100.0, 4.0, 100.0], execution=static)
    assert plan(problem, "m-topo").placement.tolist() == [0, 0, 0, 1, 2, 2]


@pytest.mark.skipif(not POSSIBLE, reason="there is no fork here")
def test_a_programme_that_takes_too_long_leaves_all_to_m_etf(monkeypatch):
    problem = on_a_bus([10, 100, 100, 100, 100, 10], FORK_JOIN, 10.0)
    monkeypatch.setattr(baechi, "_QUICK_EDGES", 0)
    assert plan(problem, "m-sct").value == 230
    monkeypatch.setattr(baechi, "favourite_children", lambda problem, threshold: time.sleep(600))
    found = plan(problem, "m-sct", budget=Budget(seconds=0.4))
    assert (found.value, found.stopped) == (230, "finished")
    monkeypatch.setattr(baechi, "_QUICK_OPS", 0)
    monkeypatch.setattr(baechi, "_try", lambda *given: time.sleep(600))
    found = plan(problem, "m-etf", budget=Budget(seconds=0.2))
    assert (found.value, found.stopped) == (plan(problem, "heft").value, "budget")


# ---- favourite children ----------------------------------------------------------------------------------------------


def test_every_edge_of_a_chain_is_a_favourite():
    assert favourite_children(on_a_bus([100] * 6, CHAIN, 10.0), 0.1).tolist() == [1, 2, 3, 4, 5, -1]


def test_an_op_has_one_favourite_and_is_the_favourite_of_one():
    star = problem_of(np.ones((5, 2)), [(0, 1), (0, 2), (0, 3), (0, 4)], sizes=1.0)
    assert (favourite_children(star, 0.1) >= 0).sum() <= 1
    for seed in range(30):
        problem = random_problem(np.random.default_rng(seed), max_ops=14, objective="latency", stored=0.2)
        favourite = favourite_children(problem, 0.5)
        chosen = favourite[favourite >= 0].tolist()
        assert len(set(chosen)) == len(chosen)
        edges = set(zip(problem.graph.edge_producer.tolist(), problem.graph.consumers.tolist(), strict=True))
        assert {(op, child) for op, child in enumerate(favourite.tolist()) if child >= 0} <= edges
        assert (favourite[problem.graph.is_stored] < 0).all()


def test_the_longer_branch_is_the_favourite():
    # 0 feeds 1 (then 3, long) and 2 (short): sparing the transfer to the long branch shortens the whole.
    problem = problem_of([[1.0, 1.0], [5.0, 5.0], [1.0, 1.0], [5.0, 5.0]], [(0, 1), (0, 2), (1, 3)], sizes=2.0)
    assert favourite_children(problem, 0.1)[:2].tolist() == [1, 3]


def test_a_threshold_that_allows_two_favourites_is_refused():
    with pytest.raises(InvalidInput, match="threshold"):
        plan(on_a_bus([1, 1], [(0, 1)], 1.0), "m-sct", options={"threshold": 0.6})


def test_m_sct_says_where_its_linear_programme_is_too_large(monkeypatch):
    monkeypatch.setattr(baechi, "_LP_EDGES", 4)
    with pytest.raises(Unsupported, match="'m-sct' solves for up to 4 edges, not 5"):
        plan(on_a_bus([100] * 6, CHAIN, 10.0), "m-sct")


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["m-etf", "m-sct"])
def test_an_op_waits_for_memory(name):
    """Three ops of 1 s read 6 bytes each from as many sources; at 13 bytes, not all outputs can be there at once."""
    edges = [(0, 3), (1, 4), (2, 5)]
    sizes = [6.0, 6.0, 6.0, 0.0, 0.0, 0.0]
    roomy = problem_of(np.ones((6, 1)), edges, sizes=sizes, memory=18.0)
    tight = problem_of(np.ones((6, 1)), edges, sizes=sizes, memory=6.0)
    for problem in (roomy, tight):
        found = plan(problem, name)
        assert violations(problem, found.placement, found.order) == []
        assert found.value == 6.0
    with pytest.raises(NoFeasiblePlan):
        plan(problem_of(np.ones((6, 1)), edges, sizes=sizes, memory=5.0), name)


@pytest.mark.parametrize("name", ["m-etf", "m-sct"])
def test_resident_bytes_spread_the_model(name):
    problem = problem_of(np.ones((6, 3)), CHAIN, sizes=0.0, resident=2.0, memory=5.0)
    assert np.bincount(plan(problem, name).placement).tolist() == [2, 2, 2]


@pytest.mark.parametrize("name", ["m-etf", "m-sct"])
def test_a_cpu_takes_what_gpus_have_no_room_for(name):
    devices = [Device("cpu", kind="cpu"), Device("gpu0", memory=4.0), Device("gpu1", memory=4.0)]
    cluster: Cluster = full_mesh(devices, 1.0)
    seconds = np.ones((6, 1)) * [1.0, 1.0, 1.0]
    fits = problem_of(seconds[:4], CHAIN[:3], sizes=0.0, resident=2.0, cluster=cluster)
    assert (plan(fits, name).placement > 0).all()
    full = problem_of(seconds, CHAIN, sizes=0.0, resident=2.0, cluster=cluster)
    assert np.bincount(plan(full, name).placement).tolist() == [2, 2, 2]


@pytest.mark.parametrize("name", ["m-topo", "m-etf", "m-sct"])
def test_tight_random_problems_end_in_a_feasible_plan_or_an_error(name):
    found = 0
    for seed in range(80):
        problem = random_problem(np.random.default_rng(seed), max_ops=12, objective="latency", constrained=True)
        if problem.contiguous or problem.max_devices:
            continue
        try:
            answer = plan(problem, name)
        except NoFeasiblePlan:
            continue
        found += 1
        assert violations(problem, answer.placement, answer.order) == []
        if answer.order is not None:
            checked_order(problem, answer.order)
    assert found > 40


# ---- edge cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["m-topo", "m-etf", "m-sct"])
def test_edge_cases(name):
    assert plan(problem_of(np.zeros((0, 2))), name).placement.tolist() == []
    assert plan(problem_of([[1.0], [2.0]], [(0, 1)]), name).placement.tolist() == [0, 0]
    pinned = problem_of(np.ones((3, 2)), [(0, 1), (1, 2)], pins={"op1": "d1"}, group=[0, -1, 0])
    placement = plan(pinned, name).placement
    assert placement[1] == 1
    assert placement[0] == placement[2]
    unread = problem_of([[0.0, 0.0], [1.0, math.inf]], op_kinds=["parameter", "op"])
    assert plan(unread, name).placement[1] == 0
