"""Graph partitioning: what the packages are told, what becomes of their parts, and plans that keep every constraint."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest

from placewise.apart import POSSIBLE
from placewise.cluster import Cluster, Device, Link
from placewise.driver import Budget, plan
from placewise.errors import NoFeasiblePlan, Unsupported
from placewise.planners import get, partition
from placewise.planners.partition import _deal, _distances, _machine, _merged, _shares, _weighted
from placewise.problem import Execution
from placewise.simulator import violations
from problems import problem_of, random_problem
from test_memory import fitting_placements, tight_problem

PACKAGES = {"metis": "pymetis", "scotch": "pyscotch", "kahip": "kahip"}


@pytest.fixture(params=PACKAGES)
def method(request):
    pytest.importorskip(PACKAGES[request.param])
    return request.param


def cliques(groups, size, devices=None, **options):
    """Groups of ops that exchange much, in a row with little between them."""
    n = groups * size
    dense = [
        (a, b) for g in range(groups) for a in range(g * size, g * size + size) for b in range(a + 1, (g + 1) * size)
    ]
    thin = [(g * size + size - 1, (g + 1) * size) for g in range(groups - 1)]
    producers = [a for a, _ in [*dense, *thin]]
    sizes = [100.0] * len(dense) + [1.0] * len(thin)
    edges = [(t, b) for t, (_, b) in enumerate([*dense, *thin])]
    seconds = np.ones((n, devices or groups))
    return problem_of(options.pop("seconds", seconds), edges, tensor_producer=producers, tensor_bytes=sizes, **options)


# ---- the parts -------------------------------------------------------------------------------------------------------


def test_cuts_where_little_flows(method):
    problem = cliques(4, 6, objective="throughput", bandwidth=1e9)
    found = plan(problem, method).placement.reshape(4, 6)
    assert (found == found[:, :1]).all()
    assert sorted(found[:, 0].tolist()) == [0, 1, 2, 3]


@pytest.mark.skipif(not POSSIBLE, reason="there is no fork here")
def test_kahip_ends_with_its_budget(monkeypatch):
    kahip = pytest.importorskip("kahip")
    monkeypatch.setattr(kahip, "kaffpa", lambda *given: time.sleep(600))
    problem = cliques(4, 6, resident=1.0, memory=3000.0, objective="throughput", bandwidth=1e9)
    found = plan(problem, "kahip", budget=Budget(seconds=0.2))
    assert found.stopped == "budget"
    assert found.placement.tolist() == plan(problem, "blocks-by-memory").placement.tolist()


def test_a_faster_device_gets_more(method):
    """d0 is three times as fast: three of the four groups."""
    seconds = np.tile([1.0, 3.0], (24, 1))
    problem = cliques(4, 6, seconds=seconds, objective="throughput", bandwidth=1e9)
    assert np.bincount(plan(problem, method).placement).tolist() == [18, 6]


def test_memory_pins_and_groups_are_kept(method):
    solved = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, max_ops=14, constrained=True, integers=seed % 2 == 0)
        try:
            found = plan(problem, method, budget=Budget(evaluations=200))
        except (NoFeasiblePlan, Unsupported):
            continue
        assert violations(problem, found.placement) == []
        solved += 1
    assert solved > 30


def test_memory_decides_against_balance(method):
    """Everything is as fast everywhere, but d1 holds two ops and d0 eight."""
    problem = cliques(2, 4, resident=1.0, memory=[8.0, 2.0], execution=Execution(memory="static"))
    assert np.bincount(plan(problem, method).placement, minlength=2)[1] <= 2


def test_edges_of_the_range(method):
    assert plan(problem_of(np.zeros((0, 2))), method).value == 0.0
    assert plan(problem_of([[1.0], [2.0]], [(0, 1)]), method).value == 3.0
    assert plan(problem_of([[1.0, 2.0, 3.0]]), method).value == 1.0
    assert plan(problem_of(np.ones((9, 3)), forbidden=("d0", "d2")), method).placement.tolist() == [1] * 9
    unconnected = plan(problem_of(np.ones((9, 3))), method)
    assert unconnected.value == 3.0
    pinned = plan(problem_of(np.ones((5, 2)), [(i, i + 1) for i in range(4)], pins={"op0": "d1", "op4": "d0"}), method)
    assert pinned.placement[[0, 4]].tolist() == [1, 0]
    parameters = problem_of(np.zeros((6, 2)), op_kinds="parameter", sizes=2.0, memory=6.0)
    assert np.bincount(plan(parameters, method).placement).tolist() == [3, 3]


def test_the_same_seed_gives_the_same_plan(method):
    problem = random_problem(np.random.default_rng(5), max_ops=200, objective="latency", execution=Execution())
    first, second = (plan(problem, method, seed=7) for _ in range(2))
    assert first.placement.tolist() == second.placement.tolist()


def test_nothing_is_said_on_stdout(method, capfd):
    plan(cliques(2, 4), method)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_named_with_the_command_that_adds_it(name, monkeypatch):
    monkeypatch.setattr(partition, "find_spec", lambda package: None)
    expected = f"needs the package {PACKAGES[name]}: pip install 'placewise[partition]'"
    assert get(name).why_not(cliques(2, 3)) == expected
    with pytest.raises(Unsupported, match="pip install"):
        plan(cliques(2, 3), name)


def test_packages_are_imported_only_when_used():
    code = "import sys; from placewise import planners; planners.available(); print([m in sys.modules for m in %r])"
    names = list(PACKAGES.values())
    done = subprocess.run([sys.executable, "-c", code % names], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([False] * 3)


def test_parts_change_places_where_links_differ(method):
    """Data comes in at d0 and goes out at d2; d0 and d1 are far apart."""
    names = ["d0", "d1", "d2"]
    slow = {("d0", "d1"), ("d1", "d0")}
    links = [Link(a, b, 1e-3 if (a, b) in slow else 1e6) for a in names for b in names if a != b]
    problem = cliques(3, 5, cluster=Cluster(tuple(map(Device, names)), tuple(links)))
    found = plan(problem, method).placement.reshape(3, 5)
    assert found[1].tolist() == [2] * 5


# ---- what they are told ----------------------------------------------------------------------------------------------


def test_the_graph_of_units():
    """op1 and op2 are a unit, which op0 sends 6 bytes and op3 none; each edge weighs a byte more."""
    edges = [(0, 1), (0, 2), (3, 2), (1, 2)]
    seconds = [[1.0, 3.0], [1.0, 1.0], [2.0, 2.0], [math.inf, 1.0]]
    graph = _weighted(problem_of(seconds, edges, sizes=[6.0, 1.0, 1.0, 0.0], group=[-1, 4, 4, -1]))
    assert graph.start.tolist() == [0, 1, 3, 4]
    assert graph.neighbour.tolist() == [1, 0, 2, 1]
    assert graph.vertex / graph.vertex[2] == pytest.approx([2.0, 3.0, 1.0], rel=1e-6)
    assert graph.edge / graph.edge[3] == pytest.approx([7.0, 7.0, 1.0, 1.0], rel=1e-6)


def test_shares_follow_speed():
    problem = problem_of([[1.0, 3.0, 9.0], [1.0, 3.0, 9.0]], forbidden=("d2",))
    assert _shares(problem) == pytest.approx([0.75, 0.25, 0.0])
    assert _shares(problem_of(np.zeros((2, 2)))) == pytest.approx([0.5, 0.5])


def test_the_machine_as_a_table():
    distance = np.array([[1, 50, 10, 50], [50, 1, 50, 10], [10, 50, 1, 50], [50, 10, 50, 1]])
    text = _machine(np.array([0.4, 0.4, 0.1, 0.1]), distance)
    assert text.split("\n")[:6] == ["deco 0", "4 7", "0 4000 4", "1 4000 6", "2 1000 5", "3 1000 7"]
    assert text.split("\n")[6:9] == ["50", "10 50", "50 10 50"]


def test_distances_are_times_of_a_mean_message():
    names = ["d0", "d1", "d2"]
    links = [Link(a, b, 2.0 if {a, b} == {"d0", "d1"} else 1.0) for a in names for b in names if a != b]
    problem = problem_of(np.ones((2, 3)), sizes=[2.0, 6.0], cluster=Cluster(tuple(map(Device, names)), tuple(links)))
    assert _distances(problem)[np.triu_indices(3, 1)].tolist() == [10, 20, 20]


@pytest.mark.parametrize(
    ("share", "count"),
    [([0.5, 0.5], [1, 1]), ([0.75, 0.25], [3, 1]), ([0.4, 0.4, 0.2], [2, 2, 1]), ([0.999, 0.001], [2, 0])],
)
def test_equal_parts_are_dealt_by_share(share, count):
    assert _deal(np.array(share)).tolist() == count


def test_pieces_next_to_each_other_are_merged():
    """Six pieces in a row: the first device takes four, which must be neighbours."""
    problem = problem_of(np.ones((6, 2)), [(i, i + 1) for i in range(5)])
    merged = _merged(_weighted(problem), np.arange(6, dtype=np.int32), np.array([4, 2]))
    assert np.bincount(merged).tolist() == [4, 2]
    assert np.abs(np.diff(merged)).sum() == 1


def test_what_is_alive_at_a_time_is_repaired_too(method, monkeypatch):
    """Not only what stays on a device. Where no part fits, units go on moving by what was measured."""

    def found():
        count = 0
        for seed in range(100):
            problem = tight_problem(np.random.default_rng(seed), most=3_000)
            if get(method).why_not(problem) is None and fitting_placements(problem):
                with suppress(NoFeasiblePlan):
                    best = plan(problem, method, budget=Budget(evaluations=200))
                    assert not violations(problem, best.placement, best.order)
                    count += 1
        return count

    repaired = found()
    monkeypatch.setattr(partition, "settled", lambda *_: None)
    assert repaired >= 1.2 * found() > 5
