"""Turns: what an op waits for and what cannot be elsewhere by then runs one after another.

A *head* is a time before which an op cannot start on a device, a *tail* what is left at least from its end on. Heads
are found along the dataflow: an input comes at the earliest from the device that suits it best. That alone is a path,
along which nothing waits for a device. So take some of the ops that an op waits for, and ask whether it can start on a
device d by a time e. Each of them starts after its head and must end early enough for what it makes to come to d in
time. That leaves it a few devices, often d alone, as the way from elsewhere is too long. On each device a window is
left, from the least of these heads to the last of these ends, and what runs there takes turns within it. With any
prices of the devices' time, then,

    the ops, each where it is cheapest of the devices left to it, cost no more than all windows are worth.

If not, no plan starts the op on d by e, and its head is later. The question is asked with the prices of the area, with
equal ones and with one that charges for d alone, of sets that grow from the nearest ops outwards, or from the latest
heads down. A later e leaves more devices and longer windows. What a window lacks with the devices that are left to its
ops now, or when the next device is left to one of them, says which e to ask about next.

Tails are heads of the graph turned around. Head, time and tail of an op add up to a bound, for any one device; so does
the same question asked of all ops before the end. Ops that a question is about are a choice: leaving some out, or
asking it of few ops only, as is done where graphs are large, makes a bound weaker and not wrong. No memory is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placewise.graph import Floats, Ints
from placewise.problem import Problem
from placewise.simulator.alike import kinds

_NEAR: Final = 24  # ops that a question is about
_EFFORT: Final = 30_000_000  # pairs of devices of pairs of ops that are looked at
_WIDTH: Final = 2.0**-26  # of the time that something takes: how exactly a start is found
_SLACK: Final = 1e-10  # of a time; above what rounding can amount to in a sum over one question


@dataclass(frozen=True, eq=False)
class Turns:
    """What is proved, in seconds: by model, and what stands behind it."""

    seconds: Floats  # [models]
    head: Floats  # [N, D]
    tail: Floats  # [N, D]
    price: Floats  # [D] of the devices' time


def turns(problem: Problem, seconds: Floats, model: Ints, price: Floats) -> Turns:
    """Heads and tails of all ops; `seconds` is infinite where an op may not run, `price` [D] is of the area.

    A tail ends with the op's model.
    """
    graph, groups = problem.graph, kinds(problem)
    devices = np.array([d for group in groups for d in group[:2]])  # the second of a kind stands for all but the first
    kind = np.array([k for k, group in enumerate(groups) for _ in group[:2]])
    first = np.searchsorted(kind, np.arange(len(groups)))
    count = np.array([c for group in groups for c in ([1.0, len(group) - 1.0] if len(group) > 1 else [1.0])])
    mean = np.array([price[list(group)].mean() for group in groups])[kind]
    prices = np.unique([mean, np.full(len(devices), 1.0 / count.sum())], axis=0)
    seconds = np.ascontiguousarray(seconds[:, devices])
    link = [cost[np.ix_(devices, devices)] for cost in (problem.cluster.latency, problem.cluster.seconds_per_byte)]
    order, size = graph.topological_order.astype(np.int64), graph.tensor_bytes[graph.edge_tensor]
    whole = model[graph.edge_producer] == model[graph.consumers]  # a model does not end later for what others read
    back = [cost.T.copy() for cost in link]  # from each device to each other, seen from where it goes
    ends = [(graph.edge_producer, graph.consumers, order, back, np.ones(len(size), np.bool_))]
    ends += [(graph.consumers, graph.edge_producer, order[::-1].copy(), link, whole)]
    unit = problem.unit.astype(np.int64)
    found = []
    for source, target, sequence, (latency, per_byte), counts in ends:
        edges = np.flatnonzero(counts)[np.argsort(target[counts], kind="stable")]
        start = np.searchsorted(target[edges], np.arange(graph.num_ops + 1))
        found.append(
            _heads(
                sequence, seconds, unit, start, source[edges].astype(np.int64), size[edges], latency, per_byte,
                prices, count, first, kind, _asked(np.diff(start), len(devices) ** 2 * len(groups)),
            )
        )  # fmt: skip
    head, tail = found
    through = (head + seconds + tail).min(axis=1)
    best = np.zeros(int(model.max(initial=0)) + 1)
    np.maximum.at(best, model, through)
    for m in range(len(best)):
        ops = np.flatnonzero((model == m) & ~graph.is_stored)
        best[m] = _end(best[m], ops, seconds[ops], head[ops], tail[ops], prices, count)
    of_device = np.zeros(problem.num_devices, np.int64)
    for k, group in enumerate(groups):
        of_device[list(group)] = first[k]
    return Turns(best, head[:, of_device], tail[:, of_device], mean[of_device])


def _asked(inputs: Ints, effort: int) -> NDArray[np.bool_]:
    """[N] which ops are asked about: those with several inputs, those with most first, as far as the effort allows."""
    asked = np.zeros(len(inputs), np.bool_)
    joins = np.argsort(-inputs, kind="stable")[: int((inputs > 1).sum())]
    most = _EFFORT // (effort * _NEAR * 2)
    asked[joins[:most]] = True
    return asked


def _end(least: float, ops: Any, seconds: Floats, head: Floats, tail: Floats, prices: Floats, count: Floats) -> float:
    """The earliest end of all ops that is not refuted, none below `least`."""
    if not len(ops) or least == 0.0 or not np.isfinite(least):
        return least
    orders = np.array([np.argsort(-times.min(axis=1), kind="stable") for times in (head, tail)])
    over, windows = (head + seconds + tail).T.copy(), np.empty((2, len(count)))
    earliest = _earliest(
        least, _WIDTH * least, prices, -1, np.empty(0), len(ops), orders, head, tail, seconds.T.copy(), over, count,
        np.empty(len(ops)), *windows,
    )  # fmt: skip
    return float(earliest)


@njit(cache=True, nogil=True)
def _needs(limit, ops, orders, head, tail, seconds, over, price, count, paid, begins, leaves):  # type: ignore[no-untyped-def]
    """0 if no window of the first so many ops overflows, at these prices, if all is over by the limit.

    Else a later limit, all before which are refuted too: when the window is long enough for what it has now, or the
    next device is left to one of the ops. Heads and tails are [ops, D]; `seconds` and `over`, when all is over at the
    earliest with an op there, are [D, ops]. Ops that cost nothing take part in no window. As windows only grow, they
    are looked at again where they were too short. The last three are filled.
    """
    devices = len(price)
    paid[:ops] = np.inf
    for a in range(devices):
        each, mine, ends = price[a], seconds[a], over[a]
        for i in range(ops):
            paid[i] = min(paid[i], each * mine[i] if ends[i] <= limit else np.inf)
    for order in orders:
        cost, room, looked = 0.0, 0.0, 0
        begins[:], leaves[:] = np.inf, np.inf
        for k in range(ops):
            cost += paid[order[k]]
            if cost == np.inf:
                return over[:, order[k]].min()
            if cost <= room + _SLACK * cost:
                continue
            for i in order[looked : k + 1]:
                if paid[i] > 0.0:
                    for a in range(devices):
                        if over[a, i] <= limit:
                            begins[a] = min(begins[a], head[i, a])
                            leaves[a] = min(leaves[a], tail[i, a])
            room, rate, looked = 0.0, 0.0, k + 1
            for a in range(devices):
                if begins[a] < np.inf:
                    room += count[a] * price[a] * max(0.0, limit - begins[a] - leaves[a])
                    rate += count[a] * price[a]
            if cost > room + _SLACK * cost:
                later = limit + (cost - room) / rate
                for i in order[: k + 1]:
                    for a in range(devices):
                        if over[a, i] > limit:
                            later = min(later, over[a, i])
                return later
    return 0.0


@njit(cache=True, nogil=True)
def _needs_at_home(limit, ops, orders, head, tail, seconds, over, home, count, elsewhere):  # type: ignore[no-untyped-def]
    """The same at a price for `home` alone: of ops that are over too late anywhere else, by `elsewhere`."""
    for order in orders:
        cost, begins, leaves, first = 0.0, np.inf, np.inf, np.inf
        for op in order[:ops]:
            if elsewhere[op] <= limit or seconds[home, op] == 0.0:
                continue
            first = min(first, elsewhere[op])
            if over[home, op] > limit:
                return min(over[home, op], elsewhere[op])
            cost += seconds[home, op]
            begins, leaves = min(begins, head[op, home]), min(leaves, tail[op, home])
            if cost > count[home] * max(0.0, limit - begins - leaves) + _SLACK * cost:
                return min(first, begins + leaves + cost / count[home])
    return 0.0


@njit(cache=True, nogil=True)
def _all_need(  # type: ignore[no-untyped-def]
    start, prices, home, elsewhere, ops, orders, head, tail, seconds, over, count, paid, begins, leaves
):
    """The same at all prices, and at one for `home` alone if there is one."""
    limit, longest = start * (1.0 + _SLACK), 0.0
    if home >= 0:
        longest = _needs_at_home(limit, ops, orders, head, tail, seconds, over, home, count, elsewhere)
    for price in prices:
        need = _needs(limit, ops, orders, head, tail, seconds, over, price, count, paid, begins, leaves)
        longest = max(longest, need)
    return longest


@njit(cache=True, nogil=True)
def _earliest(least, width, *given):  # type: ignore[no-untyped-def]
    """The earliest start, none before `least`, that is not refuted, to within `width`: a refuted one, or `least`."""
    low, high = least, _all_need(least, *given)
    if high == 0.0:
        return least
    for trial in range(64):
        high = max(high, low + width * 2.0**trial)
        need = _all_need(high, *given)
        if need == 0.0:
            break
        low, high = high, need
    middle = high - width  # refuted, if it is what was needed
    for _ in range(64):
        if not low < middle < high:
            break
        if _all_need(middle, *given) > 0.0:
            low = middle
        else:
            high = middle
        if high - low <= width:
            break
        middle = 0.5 * (low + high)
    return low


@njit(cache=True, nogil=True)
def _heads(  # type: ignore[no-untyped-def]
    sequence, seconds, unit, in_ptr, source, size, latency, per_byte, prices, count, first, kind, asked
):
    """[N, D] a time before which each op cannot start on each device; those of a kind are equal.

    Links are [to, from], and cost nothing from a device to itself.
    """
    num_ops, devices = seconds.shape
    head = np.zeros((num_ops, devices))
    place = np.empty(num_ops, np.int64)  # in the sequence
    place[sequence] = np.arange(num_ops)
    seen = np.full(num_ops, -1, np.int64)  # by which op
    near, row = np.empty(_NEAR, np.int64), np.empty(num_ops, np.int64)  # what is near, and where it is there
    along, late, orders = np.empty(_NEAR, np.int64), np.empty(_NEAR), np.empty((2, _NEAR), np.int64)
    its_seconds, its_head, tail = np.empty((_NEAR, devices)), np.empty((_NEAR, devices)), np.empty((_NEAR, devices))
    by_device, over, elsewhere = np.empty((devices, _NEAR)), np.empty((devices, _NEAR)), np.empty(_NEAR)
    then, least = np.empty(devices), np.empty(devices)
    paid, begins, leaves = np.empty(_NEAR), np.empty(devices), np.empty(devices)
    nearest, cheapest = np.inf, np.inf  # what any way takes
    for a in range(devices):
        for b in range(devices):
            if a != b:
                nearest, cheapest = min(nearest, latency[a, b]), min(cheapest, per_byte[a, b])
    for op in sequence:
        for e in range(in_ptr[op], in_ptr[op + 1]):
            made = source[e]
            for d in range(devices):
                arrives = np.inf
                for a in range(devices):
                    if a == d or unit[made] != unit[op]:
                        moves = latency[d, a] + size[e] * per_byte[d, a]
                        arrives = min(arrives, head[made, a] + seconds[made, a] + moves)
                head[op, d] = max(head[op, d], arrives)
        if not asked[op]:
            continue
        found, looked, work = 0, -1, 0.0  # what is near, outwards
        seen[op] = op
        while looked < found and found < _NEAR:
            at = op if looked < 0 else near[looked]
            looked += 1
            for e in range(in_ptr[at], in_ptr[at + 1]):
                made = source[e]
                if seen[made] != op and found < _NEAR:
                    seen[made] = op
                    near[found] = made
                    row[made] = found
                    its_seconds[found], its_head[found], by_device[:, found] = seconds[made], head[made], seconds[made]
                    late[found] = head[made].min()
                    work += seconds[made].min()
                    found += 1
        for i in range(found):  # sorted by insertion: from the latest heads down, and against the dataflow
            orders[0, i], j, k = i, i, i
            while j > 0 and late[orders[1, j - 1]] < late[i]:
                orders[1, j] = orders[1, j - 1]
                j -= 1
            while k > 0 and place[near[along[k - 1]]] < place[near[i]]:
                along[k] = along[k - 1]
                k -= 1
            orders[1, j], along[k] = i, i
        for d in first:
            low = head[op, d]
            if seconds[op, d] == np.inf or low == np.inf or not 0.0 < work < np.inf:
                continue
            tail[:found] = 0.0  # from the end of each on each device until the op may start on d
            for i in range(-1, found):
                reader = op if i < 0 else near[along[i]]
                longest = 0.0
                for b in range(devices if i >= 0 else 0):
                    then[b] = its_seconds[along[i], b] + tail[along[i], b]
                    longest = max(longest, then[b])
                for e in range(in_ptr[reader], in_ptr[reader + 1]):
                    made = source[e]
                    if seen[made] != op:
                        continue
                    apart = unit[made] != unit[reader]
                    if i < 0:
                        for a in range(devices):
                            least[a] = latency[d, a] + size[e] * per_byte[d, a] if apart or a == d else np.inf
                    else:
                        for a in range(devices):
                            least[a] = then[a]
                        for b in range(devices if apart else 0):
                            if nearest + size[e] * cheapest + then[b] >= longest:
                                continue
                            for a in range(devices):
                                least[a] = min(least[a], latency[b, a] + size[e] * per_byte[b, a] + then[b])
                    for a in range(devices):
                        tail[row[made], a] = max(tail[row[made], a], least[a])
            elsewhere[:found] = np.inf
            for a in range(devices):
                for i in range(found):
                    over[a, i] = its_head[i, a] + its_seconds[i, a] + tail[i, a]
                    if a != d:
                        elsewhere[i] = min(elsewhere[i], over[a, i])
            head[op, d] = _earliest(
                low, _WIDTH * work, prices, d, elsewhere, found, orders, its_head, tail, by_device, over, count, paid,
                begins, leaves,
            )  # fmt: skip
        for d in range(devices):
            head[op, d] = head[op, first[kind[d]]]
    return head
