"""List scheduling beyond HEFT: CPoP, PEFT and lookahead, which place ops one by one as HEFT does, and ETF."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
from numba import njit

from placewise.driver import Context
from placewise.graph import Floats, Ints
from placewise.planners import planner
from placewise.planners.blocks import headroom
from placewise.planners.heft import ignores_shape, place_in_order
from placewise.problem import Problem
from placewise.simulator.arrays import priority_order, upward_rank

_MAKESPANS = ("latency", "completion")

# ---- placed one by one, into gaps ------------------------------------------------------------------------------------


@planner("cpop", objectives=_MAKESPANS, supports=ignores_shape, compile=lambda small: critical_path_first(small))
def cpop(problem: Problem, ctx: Context) -> tuple[Ints, Ints]:
    """The critical path on one device, the rest by earliest finish (Topcuoglu, Hariri, Wu 2002, doi:10.1109/71.993206).

    The critical path is followed from op to op, so that rounding cannot lose it. An op of it that may not run on its
    device, or for which there is no room, goes where it ends first. Room (memory less a headroom), groups and
    parameters as in `heft`.
    """
    return critical_path_first(problem)


@planner("peft", objectives=_MAKESPANS, supports=ignores_shape, compile=lambda small: optimistic(small))
def peft(problem: Problem, ctx: Context, *, real_links: bool = False) -> tuple[Ints, Ints]:
    """Earliest finish plus what must follow at best (PEFT; Arabnejad, Barbosa 2014, doi:10.1109/TPDS.2013.57).

    The table of what follows counts mean transfer times, as in the paper; `real_links` counts those between the two
    devices instead, as SAGA does. Room (memory less a headroom), groups and parameters as in `heft`.
    """
    return optimistic(problem, real_links)


@planner(
    "lookahead",
    objectives=_MAKESPANS,
    supports=ignores_shape,
    compile=lambda small: place_in_order(small, priority_order(small), lookahead=True),
)
def lookahead(problem: Problem, ctx: Context) -> tuple[Ints, Ints]:
    """HEFT that tries each device with all readers of the op placed after it (Bittencourt et al. 2010, doi:10.1109/PDP.2010.56).

    The device counts on which the last reader ends first (the paper's variant without weights). Only the 64 most urgent
    readers are looked at. Room (memory less a headroom), groups and parameters as in `heft`.
    """  # noqa: E501
    return place_in_order(problem, priority_order(problem), lookahead=True)


def critical_path_first(problem: Problem) -> tuple[Ints, Ints]:
    """(placement, order) of CPoP."""
    graph = problem.graph
    time, latency, per_byte = mean_costs(problem)
    rank, urgency = upward_rank(problem), priority_order(problem)
    transfer = latency + graph.tensor_bytes * per_byte
    input_ptr, in_edges = graph.in_edges
    before = _longest_path_from_start(
        graph.topological_order, time, transfer, graph.is_stored, input_ptr, graph.edge_tensor[in_edges],
        graph.tensor_producer,
    )  # fmt: skip
    path = _critical_path(problem, rank, transfer, urgency)
    # Where fewest of its ops may not run, then where it takes least time.
    able = np.where(problem.allowed[path], problem.seconds[path], 0.0).sum(axis=0)
    device = np.lexsort((able, -problem.allowed[path].sum(axis=0)))[0]
    elsewhere = np.zeros(problem.seconds.shape)
    # Longer than any schedule, so that any other device is the last resort.
    longest = np.where(problem.allowed, problem.seconds, 0.0).max(axis=1, initial=0.0).sum()
    slowest = problem.cluster.latency.max() + graph.tensor_bytes * problem.cluster.seconds_per_byte.max()
    elsewhere[path] = 1.0 + 2.0 * (longest + slowest[graph.edge_tensor].sum())
    elsewhere[path, device] = 0.0
    return place_in_order(problem, topological(problem, before + rank, urgency), bias=elsewhere)


def optimistic(problem: Problem, real_links: bool = False) -> tuple[Ints, Ints]:
    """(placement, order) of PEFT."""
    graph, cluster = problem.graph, problem.cluster
    latency, per_byte = cluster.latency, cluster.seconds_per_byte
    if not real_links:
        _, mean_latency, mean_per_byte = mean_costs(problem)
        latency, per_byte = np.full(latency.shape, mean_latency), np.full(per_byte.shape, mean_per_byte)
    table = _optimistic_cost(
        graph.topological_order, problem.seconds, *graph.outputs, graph.consumer_ptr, graph.consumers,
        graph.tensor_bytes, latency, per_byte,
    )  # fmt: skip
    count = np.maximum(problem.allowed.sum(axis=1), 1)
    rank = np.where(problem.allowed, table, 0.0).sum(axis=1) / count
    return place_in_order(problem, topological(problem, rank, priority_order(problem)), bias=table)


def mean_costs(problem: Problem) -> tuple[Floats, float, float]:
    """Mean time [N] over the devices that may run an op; mean latency and seconds per byte over the links."""
    others = ~np.eye(problem.num_devices, dtype=np.bool_)
    links = max(1, int(others.sum()))
    time = np.where(problem.allowed, problem.seconds, 0.0).sum(axis=1) / np.maximum(problem.allowed.sum(axis=1), 1)
    latency, per_byte = problem.cluster.latency[others].sum(), problem.cluster.seconds_per_byte[others].sum()
    return time, float(latency) / links, float(per_byte) / links


def _critical_path(problem: Problem, rank: Floats, transfer: Floats, urgency: Ints) -> list[int]:
    """The ops of the longest path, ties by urgency. It begins at the op with the highest rank."""
    graph = problem.graph
    position = np.empty(problem.num_ops, np.int64)
    position[urgency] = np.arange(problem.num_ops)
    start, edges = graph.out_edges
    runs = urgency[~graph.is_stored[urgency]]
    path: list[int] = runs[:1].tolist()
    while path:
        mine = edges[start[path[-1]] : start[path[-1] + 1]]
        if not len(mine):
            break
        readers = graph.consumers[mine]
        onwards = transfer[graph.edge_tensor[mine]] + rank[readers]
        path.append(int(readers[np.lexsort((position[readers], -onwards))[0]]))
    return path


def topological(problem: Problem, rank: Floats, urgency: Ints) -> Ints:
    """Of the ops whose inputs have come, the one with the highest rank next; ties by urgency."""
    graph = problem.graph
    wish = urgency[np.argsort(-rank[urgency], kind="stable")]
    start, edges = graph.out_edges
    missing = np.bincount(graph.consumers, minlength=problem.num_ops)
    order: Ints = _ready_queue(wish, np.argsort(wish), missing, start, graph.consumers[edges])
    return order


@njit(cache=True, nogil=True)
def _longest_path_from_start(order, time, transfer, stored, input_ptr, inputs, producer):
    """[N] the longest path to each op without the op itself (rank_d). Parameters are there from the start."""
    rank = np.zeros(len(order))
    for op in order:
        for i in range(input_ptr[op], input_ptr[op + 1]):
            source = producer[inputs[i]]
            if not stored[source]:
                rank[op] = max(rank[op], rank[source] + time[source] + transfer[inputs[i]])
    return rank


@njit(cache=True, nogil=True)
def _optimistic_cost(order, seconds, output_ptr, outputs, reader_ptr, readers, size, latency, per_byte):
    """[N, D] the longest way from each op on each device to the end, every later op where that is shortest."""
    n, devices = seconds.shape
    table = np.zeros((n, devices))
    for index in range(n - 1, -1, -1):
        op = order[index]
        for i in range(output_ptr[op], output_ptr[op + 1]):
            t = outputs[i]
            for r in range(reader_ptr[t], reader_ptr[t + 1]):
                reader = readers[r]
                for a in range(devices):
                    best = np.inf
                    for b in range(devices):
                        transfer = 0.0 if a == b else latency[a, b] + size[t] * per_byte[a, b]
                        best = min(best, table[reader, b] + seconds[reader, b] + transfer)
                    table[op, a] = max(table[op, a], best)
    return table


# ---- the op that can start first -------------------------------------------------------------------------------------


@planner("etf", objectives=_MAKESPANS, supports=ignores_shape, compile=lambda small: earliest_first(small))
def etf(problem: Problem, ctx: Context) -> tuple[Ints, Ints]:
    """Of all ready ops and devices, the pair that starts first (ETF; Hwang et al. 1989, doi:10.1137/0218016).

    Ties go to the higher upward rank, as in the paper, then (the paper's devices are equal) to the device that ends it
    first. Unlike there, a device may be passed over: it needs room for the op. Transfers are estimated without
    contention, and streamed parameters are fetched in advance. Room (memory less a headroom), groups and parameters as
    in `heft`.
    """
    return earliest_first(problem)


def earliest_first(problem: Problem) -> tuple[Ints, Ints]:
    """(placement, order) of ETF."""
    graph = problem.graph
    input_ptr, in_edges = graph.in_edges
    output_ptr, out_edges = graph.out_edges
    runs = ~graph.is_stored[graph.edge_producer]
    by_rank = priority_order(problem)
    home, order = _earliest_first(
        by_rank, np.argsort(by_rank), problem.seconds, graph.is_stored,
        np.bincount(graph.consumers[runs], minlength=problem.num_ops),
        input_ptr, graph.edge_tensor[in_edges], graph.tensor_producer, graph.tensor_bytes,
        output_ptr, graph.consumers[out_edges],
        problem.cluster.latency, problem.cluster.seconds_per_byte,
        problem.unit, problem.per_unit(graph.resident_bytes), problem.capacity - headroom(problem),
    )  # fmt: skip
    return home[problem.unit].astype(np.int32), order.astype(np.int32)


@njit(cache=True, nogil=True)
def _earliest_first(
    by_rank, number, seconds, stored, missing, input_ptr, inputs, producer, size, reader_ptr, readers, latency,
    per_byte, unit, resident, room,
):  # fmt: skip
    """(device of each unit, ops by start). An op is known by its place in `by_rank`, so that smaller is more urgent.

    When the inputs of a ready op are on a device never changes. So each device keeps two heaps: ops whose inputs are
    there by the time it is free, the most urgent on top, and the others, the first to arrive on top.
    """
    n, devices = seconds.shape
    home = np.full(len(resident), -1, np.int64)
    finish, free, room = np.zeros(n), np.zeros(devices), room.copy()
    arrival, no_key = np.zeros((devices, n)), np.zeros(n)
    able, coming = np.empty((devices, n), np.int64), np.empty((devices, n), np.int64)
    num_able, num_coming = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    refused = np.zeros(n, np.int64)  # devices that had no room for the op
    demand = np.full(n, 2)  # 2: room for the op and its parameters; 1: for the op; 0: none, and the driver will object
    done = stored.copy()
    order, count = np.empty(n, np.int64), 0
    for op in by_rank:
        if stored[op]:
            order[count] = op
            count += 1

    fresh, num_fresh = np.empty(n, np.int64), 0  # ops to offer to the devices
    for op in by_rank:
        if missing[op] == 0 and not stored[op]:
            fresh[num_fresh] = op
            num_fresh += 1
    while count < n:
        while num_fresh > 0:
            num_fresh -= 1
            op = fresh[num_fresh]
            item = number[op]
            refused[op] = 0
            for d in range(devices):
                if seconds[op, d] == np.inf:
                    refused[op] += 1
                    continue
                at = 0.0
                for i in range(input_ptr[op], input_ptr[op + 1]):
                    source = producer[inputs[i]]
                    a = home[unit[source]]
                    if not stored[source]:
                        transfer = 0.0 if a == d else latency[a, d] + size[inputs[i]] * per_byte[a, d]
                        at = max(at, finish[source] + transfer)
                arrival[d, item] = at
                num_coming[d] = _push(coming[d], num_coming[d], arrival[d], item)

        best, best_device, best_start, best_finish = n, -1, np.inf, np.inf
        for d in range(devices):
            while num_able[d] + num_coming[d] > 0:
                while num_coming[d] > 0 and arrival[d, coming[d, 0]] <= free[d]:
                    item, num_coming[d] = _pop(coming[d], num_coming[d], arrival[d])
                    num_able[d] = _push(able[d], num_able[d], no_key, item)
                item = able[d, 0] if num_able[d] > 0 else coming[d, 0]
                op = by_rank[item]
                u = unit[op]
                fits = home[u] < 0 or home[u] == d
                if fits and demand[op] > 0 and not done[op]:
                    need = resident[u] if home[u] < 0 else 0.0
                    if demand[op] == 2:
                        for i in range(input_ptr[op], input_ptr[op + 1]):
                            other = unit[producer[inputs[i]]]
                            need += resident[other] if home[other] < 0 and other != u else 0.0
                    fits = need <= room[d]
                if fits and not done[op]:
                    break
                if num_able[d] > 0:
                    _, num_able[d] = _pop(able[d], num_able[d], no_key)
                else:
                    _, num_coming[d] = _pop(coming[d], num_coming[d], arrival[d])
                if not done[op]:
                    refused[op] += 1
                    if refused[op] == devices:
                        demand[op] -= 1
                        fresh[num_fresh] = op
                        num_fresh += 1
            if num_able[d] + num_coming[d] > 0:
                item = able[d, 0] if num_able[d] > 0 else coming[d, 0]
                begin = max(free[d], arrival[d, item])
                end = begin + seconds[by_rank[item], d]
                if (begin, item, end) < (best_start, best, best_finish):
                    best, best_device, best_start, best_finish = item, d, begin, end
        if num_fresh > 0:  # an op is offered again, to devices that we have passed
            continue

        op, d = by_rank[best], best_device
        done[op], finish[op], free[d] = True, best_finish, best_finish
        order[count] = op
        count += 1
        if home[unit[op]] < 0:
            home[unit[op]] = d
            room[d] -= resident[unit[op]]
        for i in range(input_ptr[op], input_ptr[op + 1]):
            source = producer[inputs[i]]
            if home[unit[source]] < 0:
                _settle(source, d, unit[source], seconds, resident, home, room)
        for i in range(reader_ptr[op], reader_ptr[op + 1]):
            reader = readers[i]
            missing[reader] -= 1
            if missing[reader] == 0:
                fresh[num_fresh] = reader
                num_fresh += 1
    for op in range(n):
        if home[unit[op]] < 0:  # a parameter that nobody reads
            _settle(op, -1, unit[op], seconds, resident, home, room)
    return home, order


@njit(cache=True, nogil=True)
def _settle(op, d, u, seconds, resident, home, room):
    """Give a parameter a home: with its reader, else where there is most room."""
    if d < 0 or seconds[op, d] == np.inf or resident[u] > room[d]:
        d = -1
        for other in range(len(room)):
            if seconds[op, other] < np.inf and (d < 0 or room[other] > room[d]):
                d = other
    home[u] = d
    room[d] -= resident[u]


@njit(cache=True, nogil=True)
def _ready_queue(wish, number, missing, reader_ptr, readers):
    """The topological order that comes closest to the wish."""
    n, no_key = len(wish), np.zeros(len(wish))
    heap, size, order = np.empty(n, np.int64), 0, np.empty(n, np.int32)
    for op in range(n):
        if missing[op] == 0:
            size = _push(heap, size, no_key, number[op])
    for index in range(n):
        item, size = _pop(heap, size, no_key)
        op = wish[item]
        order[index] = op
        for i in range(reader_ptr[op], reader_ptr[op + 1]):
            missing[readers[i]] -= 1
            if missing[readers[i]] == 0:
                size = _push(heap, size, no_key, number[readers[i]])
    return order


@njit(cache=True, nogil=True)
def _push(heap, size, key, item):
    """Add an item to a binary heap by (key, item); returns the new size."""
    at = size
    while at > 0:
        above = (at - 1) // 2
        if (key[heap[above]], heap[above]) < (key[item], item):
            break
        heap[at] = heap[above]
        at = above
    heap[at] = item
    return size + 1


@njit(cache=True, nogil=True)
def _pop(heap, size, key):
    """Take the first item off a binary heap; returns it and the new size."""
    top, item, size, at = heap[0], heap[size - 1], size - 1, 0
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size and (key[heap[below + 1]], heap[below + 1]) < (key[heap[below]], heap[below]):
            below += 1
        if (key[item], item) < (key[heap[below]], heap[below]):
            break
        heap[at] = heap[below]
        at = below
    heap[at] = item
    return top, size
