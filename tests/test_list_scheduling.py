"""CPoP, PEFT, ETF and lookahead: the papers' examples, a plain twin of ETF, and SAGA's schedules if they are there."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from placewise.driver import plan
from placewise.importers import instances
from placewise.planners.blocks import headroom
from placewise.planners.heft import place_in_order
from placewise.planners.list_scheduling import (
    _critical_path,
    critical_path_first,
    earliest_first,
    mean_costs,
    optimistic,
    topological,
)
from placewise.problem import Execution
from placewise.simulator import simulate
from placewise.simulator.arrays import checked_order, priority_order, upward_rank
from problems import problem_of, random_problem

FREE = Execution(contention="none", sends="edge", memory="static")


def example(seconds, edges):
    """A published graph: (from, to, transfer) between ops numbered from 1."""
    return problem_of(
        seconds,
        [(i, target - 1) for i, (_, target, _) in enumerate(edges)],
        tensor_producer=[source - 1 for source, _, _ in edges],
        tensor_bytes=[float(size) for _, _, size in edges],
        execution=FREE,
    )


#: Topcuoglu, Hariri, Wu 2002, figure 2.
HEFT_PAPER = example(
    [[14, 16, 9], [13, 19, 18], [11, 13, 19], [13, 8, 17], [12, 13, 10],
     [13, 16, 9], [7, 15, 11], [5, 11, 14], [18, 12, 20], [21, 7, 16]],
    [(1, 2, 18), (1, 3, 12), (1, 4, 9), (1, 5, 11), (1, 6, 14), (2, 8, 19), (2, 9, 16), (3, 7, 23),
     (4, 8, 27), (4, 9, 23), (5, 9, 13), (6, 8, 15), (7, 10, 17), (8, 10, 11), (9, 10, 13)],
)  # fmt: skip
#: Arabnejad, Barbosa 2014, figure 1.
PEFT_PAPER = example(
    [[22, 21, 36], [22, 18, 18], [32, 27, 43], [7, 10, 4], [29, 27, 35],
     [26, 17, 24], [14, 25, 30], [29, 23, 36], [15, 21, 8], [13, 16, 33]],
    [(1, 2, 17), (1, 3, 31), (1, 4, 29), (1, 5, 13), (1, 6, 7), (2, 8, 3), (2, 9, 30), (3, 7, 16),
     (4, 8, 11), (4, 9, 7), (5, 9, 57), (6, 8, 5), (7, 10, 9), (8, 10, 42), (9, 10, 7)],
)  # fmt: skip

# ---- the papers' examples --------------------------------------------------------------------------------------------


def test_makespans_of_the_papers():
    assert plan(HEFT_PAPER, "heft").value == 80
    assert plan(HEFT_PAPER, "cpop").value == 86
    assert plan(PEFT_PAPER, "heft").value == 133
    assert plan(PEFT_PAPER, "peft").value == 122
    assert plan(PEFT_PAPER, "lookahead").value == 127


def test_the_critical_path_of_the_paper():
    """Ops 1, 2, 9 and 10, all on the second processor."""
    _, latency, per_byte = mean_costs(HEFT_PAPER)
    transfer = latency + HEFT_PAPER.graph.tensor_bytes * per_byte
    path = _critical_path(HEFT_PAPER, upward_rank(HEFT_PAPER), transfer, priority_order(HEFT_PAPER))
    assert path == [0, 1, 8, 9]
    assert critical_path_first(HEFT_PAPER)[0][path].tolist() == [1, 1, 1, 1]


def test_an_op_of_the_critical_path_that_may_not_run_on_its_device_goes_elsewhere():
    """Ops 2 and 9 are pinned to processors 3 and 1: the path loses one op on either, and is faster on the third."""
    pinned = replace(HEFT_PAPER, pins={"op1": "d2", "op8": "d0"})
    assert critical_path_first(pinned)[0][[0, 1, 8, 9]].tolist() == [2, 2, 0, 2]


def test_links_that_differ_count_in_the_table_only_if_asked():
    """A chain is best on the fast device unless the way there is slow; mean links hide which way that is."""
    for seed in range(40):
        problem = random_problem(np.random.default_rng(seed), max_ops=14, objective="latency", integers=False)
        if (optimistic(problem)[0] != optimistic(problem, real_links=True)[0]).any():
            return
    pytest.fail("real links never mattered")


# ---- ETF equals its twin ---------------------------------------------------------------------------------------------


def plain_etf(problem):
    """(placement, order), written from the docstring: every pair is looked at every time."""
    graph, cluster, unit = problem.graph, problem.cluster, problem.unit.tolist()
    urgency = {op: i for i, op in enumerate(priority_order(problem).tolist())}
    held = problem.per_unit(graph.resident_bytes).tolist()
    room, free = (problem.capacity - headroom(problem)).tolist(), [0.0] * problem.num_devices
    home, finish = {}, {}
    order = [op for op in urgency if graph.is_stored[op]]
    sources = [
        [(t, int(graph.tensor_producer[t])) for t in graph.edge_tensor[graph.consumers == op].tolist()]
        for op in range(graph.num_ops)
    ]

    def settle(op, device):
        if unit[op] in home:
            return
        if device is None or not problem.allowed[op, device] or (
            graph.is_stored[op] and held[unit[op]] > room[device]
        ):  # fmt: skip
            device = max(np.flatnonzero(problem.allowed[op]).tolist(), key=lambda d: room[d])
        home[unit[op]] = device
        room[device] -= held[unit[op]]

    def choices(op):
        """(start, urgency, finish, device), with room for parameters too if some device has it."""
        own = 0.0 if unit[op] in home else held[unit[op]]
        homeless = [held[unit[s]] for _, s in sources[op] if unit[s] not in home and unit[s] != unit[op]]
        for need in (own + sum(homeless), own, -math.inf):
            found = []
            for d in range(problem.num_devices):
                if not problem.allowed[op, d] or home.get(unit[op], d) != d or need > room[d]:
                    continue
                start = free[d]
                for t, s in sources[op]:
                    if not graph.is_stored[s]:
                        a = home[unit[s]]
                        away = cluster.latency[a, d] + graph.tensor_bytes[t] * cluster.seconds_per_byte[a, d]
                        start = max(start, finish[s] + (float(away) if a != d else 0.0))
                found.append((start, urgency[op], start + float(problem.seconds[op, d]), d))
            if found:
                return found
        raise AssertionError("an op may run nowhere")

    while len(order) < graph.num_ops:
        ready = [
            op for op in range(graph.num_ops)
            if op not in finish and not graph.is_stored[op]
            and all(s in finish or graph.is_stored[s] for _, s in sources[op])
        ]  # fmt: skip
        (_, _, end, device), op = min((choice, op) for op in ready for choice in choices(op))
        finish[op] = free[device] = end
        settle(op, device)
        for _, source in sources[op]:
            settle(source, device)
        order.append(op)
    for op in range(graph.num_ops):
        settle(op, None)
    return [home[u] for u in unit], order


@pytest.mark.parametrize("block", range(2))
def test_etf_equals_its_twin(block):
    """With parameters, groups, pins, zero times and latencies; memory unlimited or so small that ops are refused."""
    for seed in range(150 * block, 150 * (block + 1)):
        rng = np.random.default_rng(seed)
        problem = random_problem(
            rng, max_ops=16, objective="latency", integers=seed % 3 > 0, stored=0.2, constrained=seed % 2 == 0
        )
        if np.isfinite(problem.capacity).any() and problem.graph.is_stored.any():
            continue  # an op that was refused for its parameters is not offered again when they find a home elsewhere
        placement, order = earliest_first(problem)
        assert (placement.tolist(), order.tolist()) == plain_etf(problem), seed


# ---- what all of them keep -------------------------------------------------------------------------------------------

METHODS = {
    "cpop": critical_path_first,
    "peft": optimistic,
    "etf": earliest_first,
    "lookahead": lambda problem: place_in_order(problem, priority_order(problem), lookahead=True),
}


@pytest.mark.parametrize("name", METHODS)
def test_orders_are_topological_and_devices_allowed(name):
    for seed in range(80):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, max_ops=20, objective="latency", constrained=seed % 2 == 0)
        placement, order = METHODS[name](problem)
        checked_order(problem, order)
        assert problem.allowed[np.arange(problem.num_ops), placement].all()
        assert (placement == placement[problem.first_of_unit][problem.unit]).all()


@pytest.mark.parametrize("name", METHODS)
def test_resident_bytes_are_respected(name):
    # Six independent ops of 2 bytes; the fast device has room for two of them, the slow ones for two each.
    problem = problem_of(np.ones((6, 1)) * [1.0, 50.0, 50.0], sizes=0.0, resident=2.0, memory=5.0, execution=FREE)
    assert np.bincount(METHODS[name](problem)[0]).tolist() == [2, 2, 2]


@pytest.mark.parametrize("name", METHODS)
def test_edge_cases(name):
    assert METHODS[name](problem_of(np.zeros((0, 2))))[0].tolist() == []
    assert METHODS[name](problem_of([[1.0], [2.0]], [(0, 1)]))[0].tolist() == [0, 0]


def test_the_ready_queue_follows_the_rank_where_the_graph_allows():
    problem = problem_of(np.ones((4, 1)), [(0, 1), (2, 3)])
    urgency = np.arange(4, dtype=np.int32)
    assert topological(problem, np.array([1.0, 9.0, 5.0, 7.0]), urgency).tolist() == [2, 3, 0, 1]
    assert topological(problem, np.zeros(4), urgency).tolist() == [0, 1, 2, 3]


def plain_order(problem, priority):
    """Of the ops whose inputs are all done, always the one of highest priority."""
    edges = list(zip(problem.graph.edge_producer.tolist(), problem.graph.consumers.tolist(), strict=True))
    left, order = set(range(problem.num_ops)), []
    while left:
        ready = [op for op in sorted(left) if not any(reader == op and source in left for source, reader in edges)]
        order.append(max(ready, key=lambda op: priority[op]))
        left.remove(order[-1])
    return order


@pytest.mark.parametrize("seed", range(30))
def test_the_order_by_priority_equals_its_twin(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, max_ops=20)
    priority = rng.random(problem.num_ops)
    assert topological(problem, priority, priority_order(problem)).tolist() == plain_order(problem, priority)


def test_lookahead_goes_where_the_reader_ends_first():
    """Op 0 ends first on d0 (2 s), but its reader takes 1 s on d1 alone and the way there takes 10 s."""
    problem = problem_of([[2.0, 3.0], [20.0, 1.0]], [(0, 1)], sizes=10.0, execution=FREE)
    assert place_in_order(problem, priority_order(problem))[0].tolist() == [0, 1]
    assert METHODS["lookahead"](problem)[0].tolist() == [1, 1]


# ---- SAGA's schedules ------------------------------------------------------------------------------------------------


def instance_files():
    root = os.environ.get("PLACEWISE_DATA")
    return sorted((Path(root) / "instances").glob("*.json")) if root else []


@pytest.mark.skipif(not instance_files(), reason="PLACEWISE_DATA has no instances")
def test_beside_saga():
    """PEFT is SAGA's but for ties (0.5%); the simulator agrees with every schedule; lookahead beats SAGA's HEFT."""
    for path in instance_files():
        data = json.loads(path.read_text())
        problem, saga = instances.load(data, path.stem), instances.load_baselines(data)
        peft = plan(problem, "peft", options={"real_links": True}).value
        known = [saga["saga-2.1.0/PEFT"].makespan, *saga["saga-2.1.0/PEFT"].makespans]
        assert min(known) * 0.995 <= peft <= max(known) * 1.005, path.stem
        assert plan(problem, "lookahead").value <= saga["saga-2.1.0/HEFT"].makespan * (1 + 1e-6), path.stem
        for name, method in METHODS.items():
            assert plan(problem, name).value == pytest.approx(simulate(problem, *method(problem)).value)
