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
heads down. A later e leaves more devices and longer windows, so the earliest e is found by halving.

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
_HALVINGS: Final = 20
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
    prices = np.stack([mean, np.full(len(devices), 1.0 / count.sum())])
    seconds = np.ascontiguousarray(seconds[:, devices])
    link = problem.cluster.latency[np.ix_(devices, devices)], problem.cluster.seconds_per_byte[np.ix_(devices, devices)]
    order, size = graph.topological_order.astype(np.int64), graph.tensor_bytes[graph.edge_tensor]
    whole = model[graph.edge_producer] == model[graph.consumers]  # a model does not end later for what others read
    ends = [(graph.edge_producer, graph.consumers, order, link, np.ones(len(size), np.bool_))]
    ends += [(graph.consumers, graph.edge_producer, order[::-1].copy(), (link[0].T.copy(), link[1].T.copy()), whole)]
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
    orders = [np.argsort(-times.min(axis=1), kind="stable") for times in (head, tail)]

    def fits(end: float) -> bool:
        return all(_fits(end, order, seconds, head, tail, prices, count) for order in orders)

    step = 0.01 * least
    if not len(ops) or step == 0.0 or not np.isfinite(least) or fits(least):
        return least
    low, high = least, least + step
    while not fits(high):
        low, high = high, high + (high - least)
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


@njit(cache=True, nogil=True)
def _fits(end, order, seconds, head, tail, prices, count):  # type: ignore[no-untyped-def]
    """Whether no window of the first so many ops overflows, at any of the prices, if all end in time.

    All are indexed by op, `tail` says what must be left after an op. Ops that cost nothing take part in no window.
    """
    num_prices, devices = prices.shape
    limit = end * (1.0 + _SLACK)
    cost = np.zeros(num_prices)
    begins = np.full((num_prices, devices), np.inf)
    leaves = np.full((num_prices, devices), np.inf)
    for op in order:
        least = np.full(num_prices, np.inf)
        for a in range(devices):
            if head[op, a] + seconds[op, a] + tail[op, a] <= limit:
                for p in range(num_prices):
                    least[p] = min(least[p], prices[p, a] * seconds[op, a])
        if least[0] == np.inf:
            return False
        for p in range(num_prices):
            if least[p] == 0.0:
                continue
            cost[p] += least[p]
            room = 0.0
            for a in range(devices):
                if head[op, a] + seconds[op, a] + tail[op, a] <= limit:
                    begins[p, a] = min(begins[p, a], head[op, a])
                    leaves[p, a] = min(leaves[p, a], tail[op, a])
                if begins[p, a] < np.inf:
                    room += count[a] * prices[p, a] * max(0.0, limit - begins[p, a] - leaves[p, a])
            if cost[p] > room + _SLACK * cost[p]:
                return False
    return True


@njit(cache=True, nogil=True)
def _all_fit(end, outwards, by_head, seconds, head, tail, prices, count):  # type: ignore[no-untyped-def]
    return _fits(end, outwards, seconds, head, tail, prices, count) and _fits(
        end, by_head, seconds, head, tail, prices, count
    )


@njit(cache=True, nogil=True)
def _heads(  # type: ignore[no-untyped-def]
    sequence, seconds, unit, in_ptr, source, size, latency, per_byte, prices, count, first, kind, asked
):
    """[N, D] a time before which each op cannot start on each device; those of a kind are equal."""
    num_ops, devices = seconds.shape
    head = np.zeros((num_ops, devices))
    place = np.empty(num_ops, np.int64)  # in the sequence
    place[sequence] = np.arange(num_ops)
    seen = np.full(num_ops, -1, np.int64)  # by which op
    near = np.empty(_NEAR, np.int64)
    row = np.empty(num_ops, np.int64)  # of what is near
    with_home = np.zeros((len(prices) + 1, devices))
    with_home[:-1] = prices
    for op in sequence:
        for e in range(in_ptr[op], in_ptr[op + 1]):
            made = source[e]
            for d in range(devices):
                arrives = np.inf
                for a in range(devices):
                    if a == d or unit[made] != unit[op]:
                        moves = latency[a, d] + size[e] * per_byte[a, d] if a != d else 0.0
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
                    found += 1
                    work += seconds[made].min()
        ops = near[:found]
        late = np.empty(found)
        for i in range(found):
            late[i] = head[ops[i]].min()
        by_head, outwards = np.argsort(-late, kind="mergesort"), np.arange(found)
        along = ops[np.argsort(-place[ops])]
        row[ops] = outwards
        its_seconds, its_head = seconds[ops], head[ops]
        for d in first:
            low = head[op, d]
            if seconds[op, d] == np.inf or low == np.inf or not 0.0 < work < np.inf:
                continue
            tail = np.zeros((found, devices))  # from the end of each on each device until the op may start here
            for i in range(-1, found):
                reader = op if i < 0 else along[i]
                for e in range(in_ptr[reader], in_ptr[reader + 1]):
                    made = source[e]
                    if seen[made] != op:
                        continue
                    for a in range(devices):
                        least = np.inf
                        for b in range(devices):
                            if (a == b or unit[made] != unit[reader]) and (i >= 0 or b == d):
                                moves = latency[a, b] + size[e] * per_byte[a, b] if a != b else 0.0
                                then = seconds[reader, b] + tail[row[reader], b] if i >= 0 else 0.0
                                least = min(least, moves + then)
                        tail[row[made], a] = max(tail[row[made], a], least)
            with_home[-1] = 0.0
            with_home[-1, d] = 1.0
            if _all_fit(low, outwards, by_head, its_seconds, its_head, tail, with_home, count):
                continue
            high = low
            for doubling in range(64):
                high += 0.25 * work * 2.0**doubling
                if _all_fit(high, outwards, by_head, its_seconds, its_head, tail, with_home, count):
                    break
                low = high
            for _ in range(_HALVINGS):
                middle = 0.5 * (low + high)
                if _all_fit(middle, outwards, by_head, its_seconds, its_head, tail, with_home, count):
                    high = middle
                else:
                    low = middle
            head[op, d] = low
        for d in range(devices):
            head[op, d] = head[op, first[kind[d]]]
    return head
