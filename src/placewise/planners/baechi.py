"""Baechi's three placers: m-TOPO, m-ETF and m-SCT (Jeon et al. 2020, doi:10.1145/3419111.3421302)."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placewise.apart import answer
from placewise.driver import Context
from placewise.errors import InvalidInput
from placewise.graph import Floats, Ints
from placewise.planners import planner
from placewise.planners.baselines import accelerators
from placewise.planners.blocks import headroom
from placewise.planners.heft import ignores_shape, schedule
from placewise.planners.list_scheduling import mean_costs
from placewise.problem import Problem
from placewise.simulator.arrays import channels_of_links, priority_order

_MAKESPANS: Final = ("latency", "completion")
_LP_EDGES: Final = 40_000  # beyond, the linear programme of m-SCT is hopeless
_QUICK_EDGES: Final = 1_000  # it takes no longer than to begin another process
_QUICK_OPS: Final = 2_000  # m-ETF too; where much is ready at a time, it takes the square of that

# ---- m-TOPO ----------------------------------------------------------------------------------------------------------


@planner("m-topo")
def m_topo(problem: Problem, ctx: Context) -> Ints:
    """Blocks of the program with equal memory on every device (m-TOPO; Jeon et al. 2020, doi:10.1145/3419111.3421302).

    Each device in turn is filled up to its share of all bytes plus the largest op's. Unlike the authors' code, no
    device is filled beyond its own memory; ops that must share a device stay together, but are not grouped or fused
    beforehand (`coplace`); the bytes of an op include its parameters, not only what it makes and needs while it runs;
    and ops come in the order of the program, which is a topological one, not breadth first. The paper's devices are
    GPUs: CPUs beside them get only what cannot run, or has no room, elsewhere.
    """
    need = problem.per_unit(_bytes_of_ops(problem))
    may = problem.unit_allowed
    devices = accelerators(problem)
    room = np.minimum(problem.capacity, need.sum() / len(devices) + need.max(initial=0.0))
    chosen, used, turn = np.full(problem.num_units, -1, np.int32), np.zeros(problem.num_devices), 0
    for unit in problem.unit[problem.graph.topological_order].tolist():
        if chosen[unit] >= 0:
            continue
        device = devices[turn]
        while may[unit, device] and used[device] + need[unit] > room[device] and turn + 1 < len(devices):
            turn += 1
            device = devices[turn]
        if not may[unit, device] or used[device] + need[unit] > room[device]:  # the freest that may take it
            device = int(np.where(may[unit], problem.capacity - used, -np.inf).argmax())
        chosen[unit] = device
        used[device] += need[unit]
    placement: Ints = chosen[problem.unit]
    return placement


def _bytes_of_ops(problem: Problem) -> Floats:
    """[N] what an op keeps, makes and needs while it runs, as if nothing were ever freed."""
    graph = problem.graph
    need = graph.resident_bytes.copy()
    if problem.execution.memory == "live":
        live = ~graph.is_stored[graph.tensor_producer]
        np.add.at(need, graph.tensor_producer[live], graph.tensor_bytes[live])
        need += graph.scratch
    return need


# ---- m-ETF and m-SCT -------------------------------------------------------------------------------------------------


def _compile(problem: Problem) -> None:
    schedule(problem)
    _try(problem, 0.0, None)


@planner("m-etf", objectives=_MAKESPANS, supports=ignores_shape, compile=_compile)
def m_etf(problem: Problem, ctx: Context) -> tuple[Ints, Ints]:
    """In event time, the op that can start first on a device with room (m-ETF; Jeon et al. 2020, doi:10.1145/3419111.3421302).

    Memory is followed as it fills and empties: an op waits while nothing has room for it. Ops share a device where the
    problem says so; unlike in the authors' code none are grouped or fused beforehand (`coplace`). Transfers queue on
    the cluster's channels. Where the paper goes by position in the graph, ties go to the higher upward rank and then to
    the device that ends the op first, as devices here may differ. The paper's devices are GPUs: a CPU beside them takes
    ops that only it can run or for which nothing else has room. A simulated peak above a device's memory (the simulator's
    transfers run ahead of the method's) makes it start again with some memory set aside. Where time runs out before all
    ops are placed, the answer is HEFT's.
    """  # noqa: E501
    return _with_reserve(problem, ctx, None)


def _solvable(problem: Problem) -> bool | str:
    edges = problem.graph.num_edges
    return ignores_shape(problem) if edges <= _LP_EDGES else f"solves for up to {_LP_EDGES:,} edges, not {edges:,}"


@planner("m-sct", objectives=_MAKESPANS, supports=_solvable, compile=_compile)
def m_sct(problem: Problem, ctx: Context, *, threshold: float = 0.1) -> tuple[Ints, Ints]:
    """m-ETF where devices wait for the favourite child of their last op (m-SCT; Jeon et al. 2020, doi:10.1145/3419111.3421302).

    A linear programme (Hanen, Munier 1995) says how much of each transfer must be paid; an edge of which less than
    `threshold` must be is a favourite. Times in it are means over devices. Else as `m-etf`; and all as `m-etf` where the
    programme is not solved within half of the budget.
    """  # noqa: E501
    if threshold > 0.5:
        raise InvalidInput(f"option threshold = {threshold}: above 0.5, an op may have two favourites")

    def favourites() -> NDArray[np.int64]:
        return favourite_children(problem, threshold)

    def in_time() -> bool:
        return not ctx.should_stop() and ctx.spent < 0.5

    small = problem.graph.num_edges <= _QUICK_EDGES
    return _with_reserve(problem, ctx, favourites() if small else answer(favourites, in_time))


def _with_reserve(problem: Problem, ctx: Context, favourite: NDArray[np.int64] | None) -> tuple[Ints, Ints]:
    ends_soon, found = problem.num_ops <= _QUICK_OPS, schedule(problem)
    for share in (0.0, 0.5, 1.0):
        work = partial(_try, problem, share, favourite)
        placed = work() if ends_soon else answer(work, lambda: not ctx.should_stop())
        found = placed or found
        if ctx.evaluate(*found) < np.inf or ctx.should_stop():
            break
    return found


def favourite_children(problem: Problem, threshold: float) -> NDArray[np.int64]:
    """[N] the child that should run right after each op on the same device; -1 where there is none."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_array, vstack

    graph, n = problem.graph, problem.num_ops
    favourite = np.full(n, -1)
    time, latency, per_byte = mean_costs(problem)
    runs = ~graph.is_stored[graph.edge_producer]
    pairs, edge_pair = np.unique(graph.edge_producer[runs] * np.int64(n) + graph.consumers[runs], return_inverse=True)
    parent, child = pairs // max(n, 1), pairs % max(n, 1)
    m = len(pairs)
    if not m:
        return favourite
    transfer = np.zeros(m)
    np.add.at(transfer, edge_pair, latency + graph.tensor_bytes[graph.edge_tensor[runs]] * per_byte)

    # Variables: the share [m] of each transfer that is paid, when each op starts [n], when all is done.
    edges, ops, ones = np.arange(m), np.arange(n), np.ones(max(m, n))
    scale = max(float(time.max()), float(transfer.max())) or 1.0  # keeps the solver's numbers near one
    precedence = coo_array(
        (np.concatenate([transfer / scale, ones[:m], -ones[:m]]),
         (np.tile(edges, 3), np.concatenate([edges, m + parent, m + child]))), shape=(m, m + n + 1)
    )  # fmt: skip
    one_child = coo_array((-ones[:m], (parent, edges)), shape=(n, m + n + 1))
    one_parent = coo_array((-ones[:m], (child, edges)), shape=(n, m + n + 1))
    all_done = coo_array(
        (np.concatenate([ones[:n], -ones[:n]]), (np.tile(ops, 2), np.concatenate([m + ops, np.full(n, m + n)]))),
        shape=(n, m + n + 1),
    )
    done_by = np.concatenate([-time[parent] / scale, 1 - np.bincount(parent, minlength=n),
                              1 - np.bincount(child, minlength=n), -time / scale])  # fmt: skip
    answer = linprog(
        np.eye(1, m + n + 1, m + n)[0],
        A_ub=vstack([precedence, one_child, one_parent, all_done]).tocsr(),
        b_ub=done_by,
        bounds=np.repeat([[0.0, 1.0], [0.0, np.inf]], [m, n + 1], axis=0),
        method="highs-ds",  # at a vertex more edges are favourites than inside, where an interior method may end
    )
    if answer.status == 0:
        chosen = answer.x[:m] < threshold
        favourite[parent[chosen]] = child[chosen]
    return favourite


def _try(problem: Problem, reserve: float, favourite: NDArray[np.int64] | None) -> tuple[Ints, Ints]:
    """(placement, order), with some of the headroom set aside."""
    graph, n, devices = problem.graph, problem.num_ops, problem.num_devices
    live = problem.execution.memory == "live"
    input_ptr, in_edges = graph.in_edges
    reader_ptr, out_edges = graph.out_edges
    accelerator = np.isin(np.arange(devices), accelerators(problem))
    accelerated = problem.allowed[:, accelerator].any(axis=1, keepdims=True)
    channel_ptr, channels = channels_of_links(problem)
    home = np.full(problem.num_units, -1)
    by_rank = priority_order(problem)
    order = _place(
        by_rank, np.argsort(by_rank), np.full(n, -1) if favourite is None else favourite,
        problem.seconds, np.where(accelerated, problem.allowed & accelerator, problem.allowed),
        np.bincount(graph.consumers[~graph.is_stored[graph.edge_producer]], minlength=n),
        input_ptr, graph.edge_tensor[in_edges], *graph.outputs, reader_ptr, graph.consumers[out_edges],
        graph.is_stored, graph.tensor_producer, graph.tensor_bytes, np.diff(graph.consumer_ptr),
        np.full((graph.num_tensors, devices), np.inf),
        graph.tensor_bytes * live, graph.scratch * live, problem.per_unit(graph.resident_bytes),
        problem.capacity - reserve * headroom(problem), problem.unit, home,
        problem.cluster.latency, problem.cluster.seconds_per_byte,
        channel_ptr, channels, np.zeros(int(channels.max(initial=0)) + 1),
    )  # fmt: skip
    for op in np.flatnonzero(home[problem.unit] < 0).tolist():  # parameters that nobody reads
        home[problem.unit[op]] = np.where(problem.allowed[op], problem.capacity, -1.0).argmax()
    return home[problem.unit].astype(np.int32), order.astype(np.int32)


@njit(cache=True, nogil=True)
def _place(
    by_rank, number, favourite, seconds, preferred, missing, input_ptr, inputs, output_ptr, outputs, reader_ptr,
    readers, stored, producer, size, reads_left, arrival, held, scratch, resident, room, unit, home,
    latency, per_byte, channel_ptr, channels, channel_free,
):  # fmt: skip
    """The ops by start; `home` says where. `now` goes from one end of an op, or one arrival of inputs, to the next.

    A tensor stays wherever it has come (`arrival` [T, D]) until its last reader has ended, wherever that runs.
    """
    n, devices = seconds.shape
    free, begins = np.zeros(devices), np.zeros(devices)
    running, last, awaited = np.full(devices, -1), np.full(devices, -1), np.full(devices, -1)
    passing = np.zeros(devices)  # bytes that the running op holds while it runs
    order, count, now, lenient = np.empty(n, np.int64), 0, 0.0, 0
    ready, num_ready = np.empty(n, np.int64), 0  # places in `by_rank`, ascending: the most urgent first
    for item in range(n):
        if stored[by_rank[item]]:
            order[count] = by_rank[item]
            count += 1
        elif missing[by_rank[item]] == 0:
            ready[num_ready] = item
            num_ready += 1
    while count < n:
        next_end = np.inf
        for d in range(devices):
            op = running[d]
            if op < 0 or free[d] > now:
                next_end = min(next_end, free[d]) if op >= 0 else next_end
                continue
            running[d], last[d] = -1, op
            room[d] += passing[d]
            for i in range(input_ptr[op], input_ptr[op + 1]):
                t = inputs[i]
                reads_left[t] -= 1
                if reads_left[t] == 0 and not stored[producer[t]]:
                    for e in range(devices):
                        room[e] += held[t] if arrival[t, e] < np.inf else 0.0
            for i in range(reader_ptr[op], reader_ptr[op + 1]):
                reader = readers[i]
                missing[reader] -= 1
                if missing[reader] == 0:
                    at = num_ready
                    while at > 0 and ready[at - 1] > number[reader]:
                        ready[at] = ready[at - 1]
                        at -= 1
                    ready[at] = number[reader]
                    num_ready += 1

        # The first candidates are favourite children: an idle device waits for that of its last op, unless another
        # device can start it sooner. Then all that are ready, the most urgent first.
        waits = False
        best, best_device, best_start, best_finish = -1, -1, np.inf, np.inf
        for index in range(-devices, num_ready):
            if index < 0:
                d = index + devices
                awaited[d] = -1
                op = favourite[last[d]] if running[d] < 0 and last[d] >= 0 else -1
                if op < 0 or missing[op] != 0:
                    continue
            else:
                op = by_rank[ready[index]]
            for e in range(devices):
                if running[e] < 0 or waits or index < 0:
                    begins[e] = _start(
                        op, e, max(now, free[e]), input_ptr, inputs, stored, producer, size, arrival, unit, home,
                        latency, per_byte, channel_ptr, channels, channel_free, False,
                    )  # fmt: skip
            soonest, anywhere = np.inf, 0.0  # when it could start on the first and on every device
            for e in range(devices):
                if preferred[op, e] and (waits or index < 0):
                    soonest, anywhere = min(soonest, begins[e]), max(anywhere, begins[e])
            for d in range(devices):
                able = seconds[op, d] < np.inf if lenient else preferred[op, d]
                if running[d] >= 0 or not able or (home[unit[op]] >= 0 and home[unit[op]] != d):
                    continue
                if index < 0 and (d != index + devices or soonest < begins[d]):
                    continue
                if index >= 0 and awaited[d] >= 0 and awaited[d] != op and anywhere > now:
                    continue  # before the awaited op, only what could start anywhere may run
                need = _need(
                    op, d, lenient, input_ptr, inputs, output_ptr, outputs, stored, producer, arrival, held, scratch,
                    resident, unit, home,
                )  # fmt: skip
                if need > room[d]:
                    continue
                if index < 0:
                    awaited[d], waits = op, True
                    continue
                finish = begins[d] + seconds[op, d]
                same = best == index and begins[d] == best_start and awaited[best_device] != op
                if begins[d] < best_start or (same and (finish < best_finish or awaited[d] == op)):
                    best, best_device, best_start, best_finish = index, d, begins[d], finish
            if best_start <= now:
                break  # no other is more urgent

        if next_end < np.inf and (best < 0 or best_start >= next_end):  # who ends first may bring something better
            now, lenient = next_end, 0
            continue
        if best < 0:  # nothing runs, and nothing may
            lenient += 1
            continue
        op, d = by_rank[ready[best]], best_device
        num_ready -= 1
        for index in range(best, num_ready):
            ready[index] = ready[index + 1]
        now, lenient, missing[op] = best_start, 0, -1
        order[count] = op
        count += 1
        if home[unit[op]] < 0:
            home[unit[op]] = d
            room[d] -= resident[unit[op]]
        passing[d] = scratch[op]
        for i in range(input_ptr[op], input_ptr[op + 1]):
            t = inputs[i]
            source = producer[t]
            u = unit[source]
            if home[u] < 0:  # a parameter goes with its first reader, or where there is most room
                h = d
                if seconds[source, d] == np.inf or resident[u] > room[d]:
                    for e in range(devices):
                        able = seconds[source, e] < np.inf
                        if able and (seconds[source, h] == np.inf or room[e] > room[h]):
                            h = e
                home[u] = h
                room[h] -= resident[u]
            if stored[source]:
                passing[d] += held[t] if home[u] != d else 0.0
            elif arrival[t, d] == np.inf:
                room[d] -= held[t]
        _start(
            op, d, now, input_ptr, inputs, stored, producer, size, arrival, unit, home, latency, per_byte,
            channel_ptr, channels, channel_free, True,
        )  # fmt: skip
        for i in range(output_ptr[op], output_ptr[op + 1]):
            arrival[outputs[i], d] = best_finish
            room[d] -= held[outputs[i]]
        room[d] -= passing[d]
        running[d], free[d] = op, best_finish
    return order


@njit(cache=True, nogil=True)
def _need(
    op, d, lenient, input_ptr, inputs, output_ptr, outputs, stored, producer, arrival, held, scratch, resident, unit,
    home,
):  # fmt: skip
    """Bytes that an op would take on a device. Less is asked for as `lenient` rises, when all devices idle in vain.

    At 1, nothing less, but a CPU may help accelerators; at 2, activations and parameters need no room; at 3, nothing
    does, and the driver will say what is wrong.
    """
    if lenient == 3:
        return -np.inf
    u = unit[op]
    need = resident[u] if home[u] < 0 else 0.0
    if lenient == 2:
        return need
    need += scratch[op]
    for i in range(output_ptr[op], output_ptr[op + 1]):
        need += held[outputs[i]]
    for i in range(input_ptr[op], input_ptr[op + 1]):
        t = inputs[i]
        other = unit[producer[t]]
        if stored[producer[t]] and home[other] < 0:
            need += resident[other] if other != u else 0.0
        elif home[other] != d if stored[producer[t]] else arrival[t, d] == np.inf:
            need += held[t]
    return need


@njit(cache=True, nogil=True)
def _start(
    op, d, begin, input_ptr, inputs, stored, producer, size, arrival, unit, home, latency, per_byte,
    channel_ptr, channels, channel_free, book,
):  # fmt: skip
    """When an op could start on a device: its inputs are sent, one after the other, as soon as their channels are free.

    With `book`, they are. Streamed parameters are fetched in advance.
    """
    if not book:
        channel_free = channel_free.copy()
    for i in range(input_ptr[op], input_ptr[op + 1]):
        t = inputs[i]
        if stored[producer[t]]:
            continue
        at = arrival[t, d]
        if at == np.inf:
            a = home[unit[producer[t]]]
            link = a * len(latency) + d
            at = arrival[t, a]
            for c in range(channel_ptr[link], channel_ptr[link + 1]):
                at = max(at, channel_free[channels[c]])
            at += latency[a, d] + size[t] * per_byte[a, d]
            for c in range(channel_ptr[link], channel_ptr[link + 1]):
                channel_free[channels[c]] = at
            if book:
                arrival[t, d] = at
        begin = max(begin, at)
    return begin
