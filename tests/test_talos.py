"""Talos and its rivals: the paper's example op by op, its formulas, flows by enumeration, packs, the packed chains."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from placewise.driver import Budget, Context, plan
from placewise.errors import InvalidInput, Unsupported
from placewise.importers import packed_chains
from placewise.planners import get, talos
from placewise.planners.heft import schedule
from placewise.planners.order_search import Annealing
from placewise.planners.speedup_rivals import _speedup_over_others, transient_speedup
from placewise.problem import Execution
from placewise.simulator import evaluate, simulate
from placewise.simulator.arrays import checked_order
from placewise.transforms import contract
from problems import problem_of, random_order, random_placement, random_problem

GPU, CPU = 0, 1
FREE = Execution(contention="none", sends="edge", memory="static")

# ---- the paper's example ---------------------------------------------------------------------------------------------


def example(**options):
    """Fig. 1: two models of three ops; seconds on the GPU and the CPU."""
    seconds = [[1.0, 5.0], [3.0, 1.0], [2.0, 3.0], [1.5, 1.5], [1.0, 3.0], [4.0, 2.0]]
    settings = {"sizes": 0.0, "objective": "completion", "model": [0, 0, 0, 1, 1, 1], "models": ["one", "two"]}
    return problem_of(seconds, [(0, 1), (1, 2), (3, 5), (4, 5)], **settings | options)


def queues(found):
    """Per device, (op as the paper counts, start, end) in the order of time."""
    timeline = found.timeline
    ran = [(timeline.start[op], op + 1, timeline.finish[op], found.placement[op]) for op in range(6)]
    return [[(op, a, b) for a, op, b, device in sorted(ran) if device == d] for d in (GPU, CPU)]


def test_average_speedup_gives_the_papers_schedule():
    found = plan(example(), "aswm")
    assert queues(found) == [[(1, 0, 1), (2, 1, 4), (3, 4, 6)], [(4, 0, 1.5), (5, 1.5, 4.5), (6, 4.5, 6.5)]]
    assert (found.value, found.timeline.makespan) == (12.5, 6.5)


def test_transient_speedup_gives_the_papers_schedule():
    found = plan(example(), "tsam")
    assert queues(found) == [[(1, 0, 1), (5, 1, 2), (6, 2, 6)], [(4, 0, 1.5), (2, 1.5, 2.5), (3, 2.5, 5.5)]]
    assert (found.value, found.timeline.makespan) == (11.5, 6)


@pytest.mark.parametrize("moves", [0, 500])
def test_talos_gives_the_papers_schedule_and_the_optimum(moves):
    found = plan(example(), "talos", options={"moves": moves})
    assert queues(found) == [[(1, 0, 1), (5, 1, 2), (3, 2.5, 4.5)], [(4, 0, 1.5), (2, 1.5, 2.5), (6, 2.5, 4.5)]]
    assert (found.value, found.timeline.makespan) == (9, 4.5)
    if moves == 0:
        assert (found.order + 1).tolist() == [1, 4, 5, 2, 6, 3]  # as the paper commits them


def test_a_device_may_wait_for_a_shorter_model():
    """d0 is free from the start, and waits a second for op1 rather than begin op2, which takes ten."""
    pins = {"op0": "d1", "op1": "d0", "op2": "d0"}
    two = {"model": [0, 0, 1], "models": ["short", "long"], "objective": "completion", "pins": pins}
    problem = problem_of([[1.0, 1.0], [1.0, 1.0], [10.0, 10.0]], [(0, 1)], sizes=0.0, **two)
    found = plan(problem, "talos")
    assert found.value == 2 + 12
    assert simulate(problem, found.placement).value == 10 + 11  # without the order, no device waits


def test_talos_is_not_led_astray_by_the_papers_transfer():
    """Fig. 7: op5 fetches its input for 0.1 s. That overlaps with op1 here, so that op5 ends at 2, not at 2.1."""
    # The input: an op on the CPU that takes no time.
    base = example()
    seconds = np.vstack([base.seconds, [[math.inf, 0.0]]])
    edges = [(0, 1), (1, 2), (3, 5), (4, 5), (6, 4)]
    columns = {"model": [0, 0, 0, 1, 1, 1, 1], "models": ["one", "two"], "tensor_bytes": [0.0] * 6 + [0.1]}
    problem = problem_of(seconds, edges, objective="completion", **columns)
    found = plan(problem, "talos")
    assert found.value == 9
    assert found.timeline.finish[4] == 2


# ---- the formulas ----------------------------------------------------------------------------------------------------


def test_costs_and_weighted_speedups_of_the_paper():
    """Op by op in the paper's order: Eq. 4 on (GPU, CPU) when the op is placed."""
    ends = np.array([[1, 5], [2.5, 1.5], [2, 4.5], [5, 2.5], [6, 4.5], [4.5, 7.5]])
    ended = np.array([0, 0, 1.5, 1, 2, 2.5])  # of the op's model
    costs = talos.cost(ends, ended)
    assert costs.tolist() == [[1, 5], [2.5, 1.5], [0.5, 3], [4, 1.5], [4, 2.5], [2, 5]]
    assert costs.min(axis=1).sum() == 9  # chosen costs add up to the sum of completion times
    speedups = talos.weighted_speedup(costs, CPU)
    assert speedups[4, GPU] == 0.625  # as printed for op6
    assert speedups[2, GPU] == 6
    assert (speedups[:, CPU] == 1).all()
    assert talos.cost(np.array([[2.0, 4.0]]), np.array([3.0])).tolist() == [[0, 1]]  # off the longest path: nothing
    with_transfer = talos.cost(np.array([[2.1, 4.5]]), np.array([1.5]))
    assert talos.weighted_speedup(with_transfer, CPU)[0, GPU] == pytest.approx(5)  # Fig. 7
    assert talos.weighted_speedup(np.array([[0.0, 0.0], [0.0, 2.0]]), CPU).tolist() == [[1, 1], [math.inf, 1]]


def test_distances_between_models():
    a, b = np.array([1.0, 3.0, 2.0]), np.array([2.0, 0.5])
    assert talos.distance(a, b) == 1 + 2.5
    assert talos.affinity(0.3, common=3, total=4) == pytest.approx(0.4)
    assert talos.hellinger(a, 7 * a[::-1]) == pytest.approx(0)  # shares of the sum, sorted
    assert talos.hellinger(np.array([1.0, 1.0]), np.array([5.0])) == pytest.approx(
        math.sqrt((0.5 + (1 - math.sqrt(0.5)) ** 2) / 2)
    )


# ---- the flow --------------------------------------------------------------------------------------------------------


def cheapest_by_enumeration(costs):
    """Every way to send as many ops as possible to different devices; the cheapest arc of the cheapest way."""
    ops, devices = costs.shape
    ways = []
    if ops <= devices:
        ways = [list(zip(range(ops), chosen, strict=True)) for chosen in permutations(range(devices), ops)]
    else:
        ways = [list(zip(chosen, range(devices), strict=True)) for chosen in permutations(range(ops), devices)]
    best = min(ways, key=lambda way: sum(costs[arc] for arc in way))
    return min(best, key=lambda arc: costs[arc])


def test_the_flow_is_the_cheapest_one():
    for seed in range(150):
        rng = np.random.default_rng(seed)
        costs = rng.random((int(rng.integers(1, 8)), int(rng.integers(1, 4))))
        assert talos._cheapest_of_flow(costs, costs) == cheapest_by_enumeration(costs), seed


def test_the_flow_leaves_out_what_may_not_be():
    inf = math.inf
    costs = np.array([[1.0, inf], [2.0, inf], [inf, 9.0]])
    assert talos._cheapest_of_flow(costs, costs) == (0, 0)
    only = np.array([[3.0, inf], [2.0, inf], [4.0, inf]])
    assert talos._cheapest_of_flow(only, only) == (1, 0)


def test_equal_costs_are_decided_by_the_end_then_by_weighted_speedup():
    nothing = np.zeros((2, 2))
    assert talos._cheapest_of_flow(nothing, np.array([[4.0, 5.0], [3.0, 6.0]])) == (1, 0)
    costs = np.array([[1.0, 3.0], [1.0, 5.0]])  # 3 and 5 times as fast on the first device
    assert talos._cheapest_of_flow(costs, np.ones((2, 2))) == (1, 0)


# ---- packing ---------------------------------------------------------------------------------------------------------


def chain(speedups, times, **options):
    """On the CPU the given times, on the GPU less by the speedups; the CPU is the slowest."""
    seconds = np.stack([np.array(times) / speedups, times], axis=1)
    return problem_of(seconds, [(i, i + 1) for i in range(len(times) - 1)], **options)


def test_packs_hold_neighbours_of_similar_speedup():
    problem = chain([2.0, 4.0, 1.0, 4.5, 9.0, 1.0], [1.0] * 6)
    assert talos.pack(problem, 2.0, 100.0) == [[0, 1, 2], [3, 4], [5]]  # within (1, 4) of 2, (2.25, 9) of 4.5
    assert talos.pack(problem, 0.0, 100.0) == [[i] for i in range(6)]
    assert talos.pack(problem, 10.0, 100.0) == [[0, 1, 2, 3, 4, 5]]


def test_packs_end_once_they_are_long_enough():
    problem = chain([2.0] * 6, [1.0, 1.0, 3.0, 0.5, 0.5, 0.5])
    assert talos.pack(problem, 2.0, 1.5) == [[0, 1], [2], [3, 4, 5]]


def test_packs_stay_within_chains_models_groups_and_what_is_allowed():
    fork = problem_of(np.ones((5, 2)), [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4)])
    assert talos.pack(fork, 2.0, 100.0) == [[0, 1], [2], [3], [4]]
    assert talos.pack(chain([1.0] * 3, [1.0] * 3, model=[0, 1, 1], models=["a", "b"]), 2.0, 9.0) == [[0], [1, 2]]
    assert talos.pack(chain([1.0] * 3, [1.0] * 3, group=[0, -1, 0]), 2.0, 9.0) == [[0], [1], [2]]
    assert talos.pack(chain([1.0] * 3, [1.0] * 3, pins={"op2": "d1"}), 2.0, 9.0) == [[0, 1], [2]]


def test_packs_never_make_a_cycle():
    packed = 0
    for seed in range(100):
        problem = random_problem(np.random.default_rng(seed), max_ops=20, objective="latency", constrained=True)
        packs = talos.pack(problem, 50.0, math.inf)
        label = np.full(problem.num_ops, -1)
        for i, ops in enumerate(packs):
            label[ops] = i
        stored = np.flatnonzero(label < 0)
        label[stored] = len(packs) + np.arange(len(stored))
        contract(problem.graph, label)  # refuses a cycle
        packed += problem.num_ops - len(packs) - len(stored)
    assert packed > 5


# ---- any problem -----------------------------------------------------------------------------------------------------


def construct(planner, problem):
    """(placement, order) as the method makes it, whether or not it is feasible."""
    ctx = Context(problem, Budget(), 0, 0.0, None)
    if planner == "talos":
        return talos.place(problem, ctx, talos.pack(problem, 2.0, 5.0))
    return get(planner).function(problem, ctx)


def test_tsam_without_time_is_heft():
    problem = random_problem(np.random.default_rng(0), max_ops=30, objective="latency", stored=0.0)
    problem = replace(problem, contiguous=False, max_devices=None, execution=Execution())
    context = Context(problem, Budget(seconds=1e-9), 0, 0.0, None, "tsam")
    placement, order = transient_speedup(problem, context)
    expected = schedule(problem)
    assert (placement.tolist(), order.tolist()) == (expected[0].tolist(), expected[1].tolist())


@pytest.mark.parametrize("planner", ["talos", "aswm", "tsam", "spt"])
def test_answers_are_orders_of_allowed_placements(planner):
    for seed in range(120):
        problem = random_problem(
            np.random.default_rng(seed), max_ops=14, objective="completion", stored=0.3, constrained=True
        )
        placement, order = construct(planner, problem)
        checked_order(problem, order)
        assert problem.allowed[np.arange(problem.num_ops), placement].all()
        assert (placement == placement[problem.first_of_unit][problem.unit]).all()


def test_chosen_costs_add_up_to_the_value_where_transfers_do_not_wait(monkeypatch):
    """The exact form of Eq. 4 telescopes: each cost is what its op adds to the sum of completion times."""
    for seed in range(60):
        problem = random_problem(
            np.random.default_rng(seed), max_ops=15, objective="completion", execution=FREE, stored=0.0
        )
        chosen = []

        def noted(costs, ends, chosen=chosen, cheapest=talos._cheapest_of_flow):
            arc = cheapest(costs, ends)
            chosen.append(costs[arc])
            return arc

        with monkeypatch.context() as patch:
            patch.setattr(talos, "_cheapest_of_flow", noted)
            placement, order = construct("talos", problem)
        value = simulate(problem, placement, order).value
        if not (problem.graph.group >= 0).any():  # an op whose group has a home elsewhere is chosen twice
            assert sum(chosen) == pytest.approx(value, rel=1e-12)


def test_memory_is_respected():
    # Every op is fastest on d0, which holds two of the four.
    problem = problem_of(np.ones((4, 1)) * [1.0, 9.0], sizes=0.0, resident=2.0, memory=[5.0, 99.0],
                         model=[0, 0, 1, 1], models=["a", "b"], objective="completion")  # fmt: skip
    for planner in ("talos", "aswm", "tsam", "spt", "order-search"):
        found = plan(problem, planner)
        assert (found.placement == 0).sum() <= 2, planner


def test_talos_serves_latency_too():
    """Two ops that read nothing, in one second rather than two, whatever their models."""
    problem = problem_of(np.ones((2, 2)), model=[0, 1], models=["a", "b"], objective="latency")
    assert plan(problem, "talos", options={"moves": 0}).value == 1


def test_the_shortest_model_goes_first():
    """On the fast device alone 5 s and 2 s: 2 + 7 s, not 5 + 7 s; and the other device where that is sooner."""
    seconds = np.array([[5.0, 50.0], [1.0, 50.0], [1.0, 50.0]])
    two = {"edges": [(1, 2)], "model": [0, 1, 1], "models": ["long", "short"], "objective": "completion"}
    found = plan(problem_of(seconds, **two), "spt")
    assert found.order.tolist() == [1, 2, 0]
    assert found.value == 2 + 7
    seconds[0, 1] = 6.0
    assert plan(problem_of(seconds, **two), "spt").value == 2 + 6


def test_speedups_over_others():
    problem = problem_of([[1.0, 2.0, 6.0], [0.0, 0.0, 0.0], [2.0, math.inf, math.inf]])
    assert _speedup_over_others(problem).tolist()[0] == [4, 1.75, 0.25]
    assert _speedup_over_others(problem)[1:, 0].tolist() == [1, 1]


@pytest.mark.parametrize("planner", ["talos", "aswm", "tsam", "spt", "order-search"])
def test_edge_cases(planner):
    empty = problem_of(np.zeros((0, 2)), objective="completion")
    assert plan(empty, planner).value == 0
    assert plan(problem_of([[2.0], [3.0]], objective="completion"), planner).value == 5
    pinned = example(pins={"op0": "d1", "op5": "d0"})
    assert plan(pinned, planner).placement[[0, 5]].tolist() == [1, 0]
    for options in ({"contiguous": True}, {"max_devices": 1}, {"execution": Execution(concurrency="sequential")}):
        with pytest.raises(Unsupported, match=planner):
            plan(example(**options), planner)


def test_a_slow_start_falls_back_on_heft(monkeypatch):
    monkeypatch.setattr(talos, "place", lambda *_: None)
    found = plan(example(), "talos", options={"moves": 0})
    assert found.value == plan(example(), "heft").value


# ---- annealing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["latency", "completion"])
def test_annealing_estimates_what_the_simulator_says(objective):
    """After any number of changes, kept or not: the same value, a topological order, allowed devices, whole units."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        problem = random_problem(
            rng, max_ops=16, objective=objective, execution=FREE, stored=0.0 if seed % 2 else 0.2, constrained=True
        )
        if problem.num_ops == 0:
            continue
        problem = replace(problem, contiguous=False, max_devices=None)
        placement = random_placement(rng, problem)
        search = Annealing(problem, placement, random_order(rng, problem))
        for temperature in (5.0, 0.5, 0.0):
            search.run(temperature, 200, seed)
            current = search._device[problem.unit]
            for device, order, value in (
                (current, search._order, search._value[0]),
                (*search.best, search.best_value),
            ):
                checked_order(problem, order)
                assert problem.allowed[np.arange(problem.num_ops), device].all()
                if not problem.graph.is_stored.any():  # parameters are fetched just in time, not at once
                    assert value == pytest.approx(evaluate(problem, device, order).value[0], rel=1e-12)


def test_annealing_finds_the_best_order_and_placement_of_the_example():
    for planner in ("talos", "order-search"):
        assert plan(example(), planner).value == 9


def test_annealing_keeps_resident_memory():
    problem = problem_of(np.ones((6, 1)) * [1.0, 9.0], sizes=0.0, resident=1.0, memory=[3.0, 99.0],
                         execution=Execution(memory="static"))  # fmt: skip
    search = Annealing(problem, np.ones(6, np.int32), np.arange(6, dtype=np.int32))
    for seed in range(20):
        search.run(100.0, 50, seed)
        assert (search._device == 0).sum() <= 3
    assert (search.best[0] == 0).sum() == 3


# ---- the packed chains -----------------------------------------------------------------------------------------------

CHAINS = {"unit": "us", "models": {"a": {"cpu": [5e6, 2e6], "gpu": [1e6, 1e6]}, "b": {"cpu": [3e6], "gpu": [2e6]}}}


def test_packed_chains_are_read():
    problem = packed_chains.load(CHAINS, ["b", "a"])
    assert problem.graph.op_names == ("b/0", "a/0", "a/1")
    assert problem.seconds.tolist() == [[2, 3], [1, 5], [1, 2]]
    assert list(zip(problem.graph.edge_producer.tolist(), problem.graph.consumers.tolist(), strict=True)) == [(1, 2)]
    assert (problem.objective, problem.graph.models) == ("completion", ("b", "a"))
    with pytest.raises(InvalidInput, match="there is no 'c'; there are a, b"):
        packed_chains.load(CHAINS, ["c"])
    with pytest.raises(InvalidInput, match=r"models\.a\.cpu"):
        packed_chains.load({"unit": "us", "models": {"a": {"cpu": [1.0], "gpu": [1.0, 2.0]}}}, ["a"])
    with pytest.raises(InvalidInput, match="unit"):
        packed_chains.load({**CHAINS, "unit": "ms"}, ["a"])


#: Milliseconds: the first on the GPU and the second on the CPU, transient speedup, the shortest first on the GPU.
PUBLISHED = {
    "alexnet+squeezenet": (1013.2, 444.5, 373.9),
    "googlenet+alexnet": (1052.4, 645.4, 486.8),
    "bert+squeezenet": (1321.3, 752.4, 763.4),
    "resnet+bert": (4997.4, 1581.0, 1437.5),
}


@pytest.mark.skipif("PLACEWISE_DATA" not in os.environ, reason="PLACEWISE_DATA is not set")
@pytest.mark.parametrize("pair", PUBLISHED)
def test_rivals_and_optima_of_the_packed_chains(pair):
    data = json.loads((Path(os.environ["PLACEWISE_DATA"]) / "talos" / "packed_tv20.json").read_text())
    problem = packed_chains.load(data, pair.split("+"))
    found = [round(plan(problem, planner).value * 1e3, 1) for planner in ("aswm", "tsam", "spt")]
    assert tuple(found) == PUBLISHED[pair]
    exact = data["exact_optimal_toct_ms"][pair]
    reached = plan(problem, "talos", budget=Budget(evaluations=600_000)).value * 1e3
    assert exact - 1e-3 <= reached <= 1.01 * exact
