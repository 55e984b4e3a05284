"""HEFT: list scheduling by upward rank, each op where it finishes first, with insertion into idle gaps."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placewise.driver import Context
from placewise.graph import Floats, Ints
from placewise.planners import planner
from placewise.planners.blocks import headroom
from placewise.problem import Problem
from placewise.simulator.arrays import priority_order

_BLOCK: Final = 64  # gaps in a row whose longest is known, so that a search passes over all of them at once
_READERS: Final = 64  # lookahead goes no further: a tensor that thousands read would cost their number squared


def ignores_shape(problem: Problem) -> bool | str:
    """Whether a list scheduler applies: it minds neither contiguity nor device counts."""
    return "ignores contiguity and device counts" if problem.contiguous or problem.max_devices else True


@planner("heft", objectives={"latency", "completion"}, supports=ignores_shape, compile=lambda small: schedule(small))
def heft(problem: Problem, ctx: Context, *, self_links: bool = False) -> tuple[Ints, Ints]:
    """Earliest finish by upward rank, with insertion (Topcuoglu, Hariri, Wu 2002, doi:10.1109/71.993206).

    As in the paper, transfers are estimated without contention. Beyond it: colocated ops follow the first of them, a
    parameter goes with its first reader or, if there is no room, to the device with the most, and a device is passed
    over where the op's resident bytes would exceed its room. Room is memory less a headroom for activations, which are
    not followed: twice what the most demanding op touches. So a plan may be refused that would just fit, or made that
    does not. Where nothing has room, the fastest device gets the op. `self_links` averages transfer costs over links
    that include each device's free link to itself, as SAGA does.
    """
    return schedule(problem, self_links)


def schedule(problem: Problem, self_links: bool = False) -> tuple[Ints, Ints]:
    """(placement, order) of HEFT."""
    return place_in_order(problem, priority_order(problem, self_links=self_links))


def place_in_order(
    problem: Problem, order: Ints, *, bias: Floats | None = None, lookahead: bool = False
) -> tuple[Ints, Ints]:
    """(placement, order) when ops are placed one by one in a topological order, each into the gap where it ends first.

    `bias` [N, D] is added to when an op would end on a device before devices are compared. With `lookahead`, they are
    compared by when the last of the op's readers would end, if those were placed next.
    """
    n = problem.num_ops
    position = np.empty(n, np.int64)
    position[order] = np.arange(n)
    reader_ptr, readers = _most_urgent_readers(problem, position) if lookahead else (np.zeros(n + 1), np.zeros(0))
    place, start = _schedule(
        order.astype(np.int64), *_given(problem), np.zeros((0, 0)) if bias is None else bias,
        reader_ptr.astype(np.int64), readers.astype(np.int64),
    )  # fmt: skip
    return place.astype(np.int32), np.lexsort((position, start)).astype(np.int32)


def _given(problem: Problem) -> tuple[NDArray[Any], ...]:
    """What the kernel needs to know of a problem, made once: a search places its ops thousands of times."""
    if "list scheduling" not in problem.derived:
        graph = problem.graph
        input_ptr, in_edges = graph.in_edges
        problem.derived["list scheduling"] = (
            problem.seconds, graph.is_stored,
            input_ptr.astype(np.int64), graph.edge_tensor[in_edges].astype(np.int64),
            graph.tensor_producer.astype(np.int64), graph.tensor_bytes,
            problem.cluster.latency, problem.cluster.seconds_per_byte,
            problem.unit.astype(np.int64), problem.per_unit(graph.resident_bytes),
            problem.capacity - headroom(problem), problem.seconds.min(axis=0, initial=np.inf),
        )  # fmt: skip
    given: tuple[NDArray[Any], ...] = problem.derived["list scheduling"]
    return given


def _most_urgent_readers(problem: Problem, position: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """(start [N + 1], ops): up to `_READERS` ops that read from each op, those first that are placed first."""
    graph, n = problem.graph, problem.num_ops
    pairs = np.unique(graph.edge_producer * np.int64(n) + position[graph.consumers])
    source = pairs // max(n, 1)
    first = np.searchsorted(source, np.arange(n + 1))
    kept = np.arange(len(pairs)) - first[source] < _READERS
    source, reader = source[kept], np.argsort(position)[pairs[kept] % max(n, 1)]
    return np.searchsorted(source, np.arange(n + 1)), reader


@njit(cache=True, nogil=True)
def _schedule(
    order, seconds, stored, input_ptr, inputs, producer, size, latency, per_byte, unit, resident, room, shortest,
    bias, reader_ptr, readers,
):  # fmt: skip
    """(device, start) of each op. A device's idle gaps are kept sorted; the last one never ends.

    `longest` [D, blocks] is at least the length of each gap in a block, with what rounding may add to it.
    """
    n, devices = seconds.shape
    place = np.full(n, -1, np.int64)
    unit_device = np.full(len(resident), -1, np.int64)
    start, finish = np.zeros(n), np.zeros(n)
    placed = stored.copy()
    room = room.copy()
    gap_start, gap_end = np.zeros((devices, 64)), np.full((devices, 64), np.inf)
    gaps, longest = np.ones(devices, np.int64), np.full((devices, 64 // _BLOCK), np.inf)
    for index in range(n):
        op = order[index]
        if stored[op]:
            continue
        best_device, best_start, best_finish, best_gap, best_value = -1, np.inf, np.inf, -1, np.inf
        for attempt in range(2):  # first where there is room for the parameters too, then where there is for the op
            for d in range(devices):
                time = seconds[op, d]
                u = unit[op]
                if time == np.inf or (unit_device[u] >= 0 and unit_device[u] != d):
                    continue
                need = resident[u] if unit_device[u] < 0 else 0.0
                ready = 0.0
                for i in range(input_ptr[op], input_ptr[op + 1]):
                    t = inputs[i]
                    source = producer[t]
                    if stored[source] and unit_device[unit[source]] < 0:
                        need += resident[unit[source]] if attempt == 0 and unit[source] != u else 0.0
                        continue
                    a = unit_device[unit[source]]
                    ready = max(ready, finish[source] + (0.0 if a == d else latency[a, d] + size[t] * per_byte[a, d]))
                if need > room[d]:
                    continue
                gap = _first_gap(gap_end, gaps, d, ready)
                begin = max(ready, gap_start[d, gap])
                if begin + time > gap_end[d, gap]:
                    gap = _next_gap(gap_start, gap_end, longest, d, gap + 1, time)
                    begin = gap_start[d, gap]
                value = begin + time + (bias[op, d] if len(bias) else 0.0)
                if reader_ptr[op] < reader_ptr[op + 1]:
                    value = _last_reader_ends(
                        op, d, begin, begin + time, room[d] - need, readers[reader_ptr[op] : reader_ptr[op + 1]],
                        seconds, placed, finish, input_ptr, inputs, producer, size, latency, per_byte,
                        unit, unit_device, resident, room, gap_start, gap_end, gaps,
                    )  # fmt: skip
                if value < best_value or (value == best_value and begin + time < best_finish):
                    best_device, best_start, best_finish, best_gap, best_value = d, begin, begin + time, gap, value
            if best_device >= 0:
                break
        if best_device < 0:  # no room anywhere: the fastest allowed device, and the driver will say what is wrong
            best_device = unit_device[unit[op]] if unit_device[unit[op]] >= 0 else int(np.argmin(seconds[op]))
            best_gap = gaps[best_device] - 1
            best_start = max(gap_start[best_device, best_gap], 0.0)
            for i in range(input_ptr[op], input_ptr[op + 1]):
                source = producer[inputs[i]]
                best_start = max(best_start, finish[source])
            best_finish = best_start + seconds[op, best_device]
        d = best_device
        if unit_device[unit[op]] < 0:
            unit_device[unit[op]] = d
            room[d] -= resident[unit[op]]
        for i in range(input_ptr[op], input_ptr[op + 1]):
            source = producer[inputs[i]]
            if unit_device[unit[source]] < 0:  # a parameter with no home yet
                home = d if resident[unit[source]] <= room[d] and seconds[source, d] < np.inf else -1
                if home < 0:
                    for other in range(devices):
                        if seconds[source, other] < np.inf and (home < 0 or room[other] > room[home]):
                            home = other
                unit_device[unit[source]] = home
                room[home] -= resident[unit[source]]
        start[op], finish[op], placed[op] = best_start, best_finish, True

        # Cut the gap: what remains before and after, where something could still fit.
        g = best_gap
        end = gap_end[d, g]
        before = best_start - gap_start[d, g] >= shortest[d] and best_start > gap_start[d, g]
        after = end == np.inf or (end - best_finish >= shortest[d] and end > best_finish)
        if before and after:
            if gaps[d] == gap_start.shape[1]:
                wider_start = np.zeros((devices, 2 * gap_start.shape[1]))
                wider_end = np.full((devices, 2 * gap_start.shape[1]), np.inf)
                wider_longest = np.full((devices, 2 * longest.shape[1]), np.inf)
                for x in range(devices):
                    for y in range(gaps[x]):
                        wider_start[x, y] = gap_start[x, y]
                        wider_end[x, y] = gap_end[x, y]
                gap_start, gap_end, longest = wider_start, wider_end, wider_longest
            for y in range(gaps[d], g + 1, -1):
                gap_start[d, y] = gap_start[d, y - 1]
                gap_end[d, y] = gap_end[d, y - 1]
            gaps[d] += 1
            gap_end[d, g] = best_start
            gap_start[d, g + 1], gap_end[d, g + 1] = best_finish, end
            for block in range((g + 1) // _BLOCK, (gaps[d] - 1) // _BLOCK + 1):  # the first may have come from before
                longest[d, block] = max(longest[d, block], _length(gap_start, gap_end, d, block * _BLOCK))
        elif before:
            gap_end[d, g] = best_start
        elif after:
            gap_start[d, g] = best_finish
        else:
            for y in range(g, gaps[d] - 1):
                gap_start[d, y] = gap_start[d, y + 1]
                gap_end[d, y] = gap_end[d, y + 1]
            gaps[d] -= 1
            for block in range(g // _BLOCK, gaps[d] // _BLOCK):  # the last came from behind
                last = (block + 1) * _BLOCK - 1
                longest[d, block] = max(longest[d, block], _length(gap_start, gap_end, d, last))
    for op in range(n):
        u = unit[op]
        if unit_device[u] < 0:  # a parameter that nobody reads
            for d in range(devices):
                if seconds[op, d] < np.inf and (unit_device[u] < 0 or room[d] > room[unit_device[u]]):
                    unit_device[u] = d
            room[unit_device[u]] -= resident[u]
        place[op] = unit_device[u]
    return place, start


@njit(cache=True, nogil=True)
def _first_gap(gap_end, gaps, d, ready):
    """The first gap on a device that ends after the inputs are there."""
    low, high = 0, gaps[d] - 1
    while low < high:
        middle = (low + high) // 2
        if gap_end[d, middle] > ready:
            high = middle
        else:
            low = middle + 1
    return low


@njit(cache=True, nogil=True)
def _length(gap_start, gap_end, d, gap):
    """How long a gap is, at least as seen by one who adds a time to its start."""
    return gap_end[d, gap] - gap_start[d, gap] + 4e-16 * gap_end[d, gap]


@njit(cache=True, nogil=True)
def _next_gap(gap_start, gap_end, longest, d, gap, time):
    """The first gap on a device, from this one on, that is long enough."""
    while True:
        end = gap - gap % _BLOCK + _BLOCK
        if longest[d, gap // _BLOCK] >= time:
            most, whole = 0.0, gap % _BLOCK == 0
            for g in range(gap, end):
                if gap_start[d, g] + time <= gap_end[d, g]:
                    return g
                most = max(most, _length(gap_start, gap_end, d, g))
            if whole:
                longest[d, gap // _BLOCK] = most
        gap = end


@njit(cache=True, nogil=True)
def _last_reader_ends(
    op, device, begin, end, room_left, readers, seconds, placed, finish, input_ptr, inputs, producer, size,
    latency, per_byte, unit, unit_device, resident, room, gap_start, gap_end, gaps,
):  # fmt: skip
    """When the last reader of an op ends if the op runs on a device from begin to end and its readers come next.

    Inputs that are not placed yet hold nobody up. A reader that fits nowhere does not count.
    """
    slots = len(readers) + 1  # what the op and the readers so far would take
    slot_device, slot_start, slot_end = np.full(slots, device), np.full(slots, begin), np.full(slots, end)
    taken, last = 1, end
    for reader in readers:
        u = unit[reader]
        home = device if u == unit[op] else unit_device[u]
        best_device, best_start, best_end = -1, np.inf, np.inf
        for d in range(seconds.shape[1]):
            time = seconds[reader, d]
            need = resident[u] if home < 0 else 0.0
            if time == np.inf or (home >= 0 and home != d) or need > (room_left if d == device else room[d]):
                continue
            ready = 0.0
            for i in range(input_ptr[reader], input_ptr[reader + 1]):
                source = producer[inputs[i]]
                a = device if source == op else unit_device[unit[source]]
                if source != op and (a < 0 or not placed[source]):
                    continue
                arrival = end if source == op else finish[source]
                if a != d:
                    arrival += latency[a, d] + size[inputs[i]] * per_byte[a, d]
                ready = max(ready, arrival)
            gap = _first_gap(gap_end, gaps, d, ready)
            at = max(ready, gap_start[d, gap])
            slot = 0
            while slot < taken or at + time > gap_end[d, gap]:
                if at + time > gap_end[d, gap]:
                    gap, slot = gap + 1, 0
                    at = max(ready, gap_start[d, gap])
                elif slot_device[slot] == d and at < slot_end[slot] and slot_start[slot] < at + time:
                    at, slot = slot_end[slot], 0
                else:
                    slot += 1
            if at + time < best_end:
                best_device, best_start, best_end = d, at, at + time
        if best_device >= 0:
            slot_device[taken], slot_start[taken], slot_end[taken] = best_device, best_start, best_end
            taken += 1
            last = max(last, best_end)
    return last
