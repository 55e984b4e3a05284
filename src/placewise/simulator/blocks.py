"""Blocks in stretches: the parts of a graph between ops that everything passes through, each laid out in every way.

When such an op, a *joint*, ends, all that comes before has ended, no transfer is under way and nothing that comes after
has begun. So the times of the blocks between joints add up. The op at the end of a block is on the device of the one
where it begins, *here*, or on another, *there*; each other op is here, there or *elsewhere*. For every way to lay them
out, a block takes at least

- its longest path, each transfer paid for; and
- what one device or one channel does in turn: each piece of work has a time before which it cannot begin, and one that
  is left at least from its end on, so that the pieces take no less than if they could be interrupted, nor any two of
  them than one after the other.

Elsewhere is as many devices as one likes, without limits of memory and with channels of their own. Blocks that follow
each other with their joints on one device are a *stretch*: all that they have there must fit, together with what any
one op holds while it runs. Which devices come back later is not asked. So the cheapest row of layouts that fits is a
bound for every plan. Of layouts that take as much time and as much room as others, or more, nothing is kept.

Where a block has too many layouts, times and bytes are rounded down to fewer values, which leaves a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placewise.graph import Floats
from placewise.problem import Problem
from placewise.simulator.alike import kinds
from placewise.simulator.pieces import Part
from placewise.simulator.working import takes_time, working_set

_MOST: Final = 20_000  # ops and edges of graphs that are looked at
_MOVES: Final = 10_000  # from joint to joint, between kinds of devices
_EFFORT: Final = 40_000_000  # ops of one block that are put somewhere, and rows that each is compared with
_IN_ALL: Final = 200_000_000  # of all blocks
_ROWS: Final = 1_000_000  # layouts that are tried behind others
_GRAINS: Final = (0.0, 0.1)  # to which times and bytes are rounded down, as shares of the least and of the memory


def in_blocks(problem: Problem, path: list[int], seconds: Floats, slack: float) -> float:
    """Seconds that no plan beats, by joints on a path of ops; `seconds` [N, D] is infinite where one does not fit."""
    graph, groups = problem.graph, kinds(problem)
    if graph.num_ops + graph.num_edges > _MOST:
        return 0.0
    layouts = _Layouts(problem, Part(problem, path), seconds, slack)
    moves = [(a, a, True) for a in range(len(groups))]
    moves += [(a, b, False) for a, b in product(range(len(groups)), repeat=2) if a != b or len(groups[a]) > 1]
    if len(layouts.joints) * len(moves) > _MOVES:
        return 0.0
    ways = [layouts.first(group[0]) for group in groups]  # rows of time, bytes and the most that an op holds, by kind
    tried = 0
    for a, b in pairwise(layouts.joints):
        block, following = layouts.block(a, b), [[np.empty((0, 3))] for _ in groups]
        for here, there, stays in moves:
            before, found = ways[here][:, None], layouts.of(block, here, there, stays)
            time, used, most = before[..., 0] + found[:, 0], before[..., 1] + found[:, 1], found[:, 2]
            most = np.maximum(before[..., 2], most)
            fits = used + most <= layouts.room[groups[here][0]]
            rows = [time, used, most] if stays else [time, *np.broadcast_arrays(found[:, 3], found[:, 4], time)[:2]]
            following[there].append(np.stack([column[fits] for column in rows], axis=1))
            tried += time.size
        if tried > _ROWS:
            return 0.0
        ways = [_least(np.concatenate(found)) for found in following]
    return float(min((way[:, 0].min() for way in ways if len(way)), default=np.inf)) * (1.0 - slack)


@dataclass(frozen=True, eq=False)
class _Block:
    """Ops in a topological order, from a joint, which has run, to the next; tensors in the order of their makers."""

    ops: NDArray[np.int64]
    unit: NDArray[np.int64]  # [n] numbered from zero
    resident: Floats  # [units] bytes, each unit counted in one block only
    out_ptr: NDArray[np.int64]  # [n + 1] of tensors
    size: Floats
    read_ptr: NDArray[np.int64]  # [tensors + 1] of readers
    reader: NDArray[np.int64]
    in_ptr: NDArray[np.int64]  # [n + 1] of inputs
    inputs: NDArray[np.int64]  # tensors


class _Layouts:
    """What blocks take at least, by how much room they need; blocks that are equal are laid out once."""

    def __init__(self, problem: Problem, part: Part, seconds: Floats, slack: float) -> None:
        self._problem, self._part, self._seconds, self._left = problem, part, seconds, _IN_ALL
        self._resident = problem.per_unit(problem.graph.resident_bytes)
        self._held = np.zeros_like(seconds)
        if problem.execution.memory == "live":
            self._held = np.where(takes_time(problem), working_set(problem)[:, None], 0.0)
        self.room: Floats = problem.capacity * (1.0 + slack)
        #: The places of ops that everything passes through: no edge jumps over them.
        reach = np.zeros(len(part.order), np.int64)
        for _, made, reader in part.edges(0, len(part.order) - 1):
            reach[made] = max(reach[made], reader)
        jumps = np.maximum.accumulate(np.append(0, reach[:-1]))
        self.joints = [at for at in part.joints if jumps[at] <= at]
        self._counted = {int(problem.unit[part.order[0]])}
        self._known: dict[bytes, Floats] = {}
        self._known_sides: dict[tuple[int, int, bool], tuple[NDArray[Any], ...]] = {}

    def first(self, device: int) -> Floats:
        """One row for the op where it all begins, or none: its time, its bytes, what it holds while it runs."""
        op = self._part.order[0]
        limited = self.room[device] < np.inf
        row = [self._seconds[op, device], limited * self._resident[self._problem.unit[op]], self._held[op, device]]
        return np.array([row if np.isfinite(row[0]) else []]).reshape(-1, 3)

    def block(self, a: int, b: int) -> _Block:
        """From one joint to the next."""
        graph, ops = self._problem.graph, np.array(self._part.order[a : b + 1])
        units, unit = np.unique(self._problem.unit[ops], return_inverse=True)
        fresh = [0.0 if u in self._counted else float(self._resident[u]) for u in units.tolist()]
        self._counted.update(units.tolist())
        made: dict[tuple[int, int], list[int]] = {}
        for t, maker, reader in self._part.edges(a, b):
            made.setdefault((maker - a, t), []).append(reader - a)
        keys, counts = sorted(made), np.arange(len(ops) + 1)
        readers = [made[key] for key in keys]
        pairs = sorted((reader, t) for t, mine in enumerate(readers) for reader in mine)
        return _Block(
            ops, unit, np.array(fresh), np.searchsorted([maker for maker, _ in keys], counts),
            graph.tensor_bytes[[t for _, t in keys]], np.cumsum([0, *map(len, readers)]),
            np.array([reader for mine in readers for reader in mine]),
            np.searchsorted([reader for reader, _ in pairs], counts), np.array([t for _, t in pairs]),
        )  # fmt: skip

    def of(self, block: _Block, here: int, there: int, stays: bool) -> Floats:
        """[k, 5] time, bytes here, the most that an op holds here, the same there; between two kinds of devices."""
        last, (devices, others, latency, per_byte) = len(block.ops) - 1, self._sides(here, there, stays)
        seconds = np.empty((last + 1, 3))
        seconds[:, :2] = self._seconds[block.ops][:, devices]
        seconds[:, 2] = self._seconds[block.ops][:, others].min(axis=1, initial=np.inf)
        seconds[0], seconds[last, [1, 2] if stays else [0, 2]] = [0.0, np.inf, np.inf], np.inf
        if stays:
            seconds[:, 1] = np.inf
        held, room = self._held[block.ops][:, devices], self.room[devices]
        arrays = (
            block.unit, seconds, block.in_ptr, block.inputs, block.out_ptr, block.size, block.read_ptr, block.reader,
            latency, per_byte, block.resident, held, room,
        )  # fmt: skip
        key = b"|".join(array.tobytes() for array in arrays)
        if key not in self._known:
            for grain in _GRAINS:
                effort = min(_EFFORT, self._left)
                rows, spent = _lay_out(*arrays, self._problem.execution.contention == "channel", grain, effort)
                self._left = max(self._left - spent, 0)
                if spent <= effort:
                    break
            self._known[key] = rows
        return self._known[key]

    def _sides(self, here: int, there: int, stays: bool) -> tuple[NDArray[Any], ...]:
        """(devices here and there, others, latency and seconds per byte [3, 3] between here, there and elsewhere)."""
        if (here, there, stays) not in self._known_sides:
            groups, cluster = kinds(self._problem), self._problem.cluster
            devices = np.array([groups[here][0], groups[there][0 if stays or there != here else 1]])
            others = np.setdiff1d(np.arange(self._problem.num_devices), devices)
            sides = [devices[:1], devices[1:], others]
            least = ([[table[np.ix_(a, b)].min(initial=np.inf) for b in sides] for a in sides]
                     for table in (cluster.latency, cluster.seconds_per_byte))  # fmt: skip
            self._known_sides[here, there, stays] = (devices, others, *map(np.array, least))
        return self._known_sides[here, there, stays]


def _least(rows: Floats) -> Floats:
    """Those that no other row is below in all columns."""
    ordered = np.ascontiguousarray(rows[np.lexsort(rows.T[::-1])])
    return ordered[: _keep_least(ordered)]


@njit(cache=True, nogil=True)
def _keep_least(rows):  # type: ignore[no-untyped-def]
    """How many are kept, at the front, of rows in lexicographic order."""
    count = 0
    for i in range(len(rows)):
        if not _is_known(rows, count, rows[i]):
            rows[count] = rows[i]
            count += 1
    return count


@njit(cache=True, nogil=True)
def _lay_out(  # type: ignore[no-untyped-def]
    unit, seconds, in_ptr, inputs, out_ptr, size, read_ptr, reader, latency, per_byte, resident, held, room, queues,
    grain, effort,
):  # fmt: skip
    """(rows, effort) of a block: ops are put here, there or elsewhere, in turn, and put back.

    Its first op begins at zero. What is worse than a row that is known, whatever follows, is not followed. Where it
    takes too much effort, the longest path is all that is said.
    """
    n, tensors = len(unit), len(size)
    maker = np.empty(tensors, np.int64)
    owner = np.full(len(resident), n)  # the first op of a unit, which decides for the others
    for op in range(n - 1, -1, -1):
        owner[unit[op]] = op
        for t in range(out_ptr[op], out_ptr[op + 1]):
            maker[t] = op
    rest = np.zeros((n, 3))  # least time from the end of an op to the end of the block
    for op in range(n - 1, -1, -1):
        for c in range(3):
            for t in range(out_ptr[op], out_ptr[op + 1]):
                for j in range(read_ptr[t], read_ptr[t + 1]):
                    r, least = reader[j], np.inf
                    for e in range(3):
                        if e == c:
                            least = min(least, seconds[r, e] + rest[r, e])
                        elif unit[r] != unit[op]:
                            way = latency[c, e] + size[t] * per_byte[c, e]
                            least = min(least, way + seconds[r, e] + rest[r, e])
                    rest[op, c] = max(rest[op, c], least)
    rows, count = np.zeros((64, 5)), 0
    if rest[0, 0] == np.inf:
        return rows[:0], 0
    grains = np.array([grain * rest[0, 0], grain * room[0], grain * room[0], grain * room[1], grain * room[1]])
    grains[np.isinf(grains)] = 0.0
    place, chosen = np.full(len(resident), -1), np.full(n, -1)
    finish = np.zeros(n)
    known = np.zeros((n + 1, 5))  # a row, as far as ops are put somewhere
    row = np.zeros(5)
    work = n + 2 * tensors  # ops, and messages of each tensor to here and to there
    head, length, tail = np.zeros(work), np.zeros(work), np.zeros(work)
    of = np.full(work, -1)  # here, there, the channel from here, the channel from there
    heads, lengths, tails, left = np.empty(work), np.empty(work), np.empty(work), np.empty(work)
    op = spent = 0
    while op >= 0:
        if op == n:
            spent += work * work
            of[n:] = -1
            tail[:] = 0.0
            for p in range(n - 1, -1, -1):
                a = place[unit[p]]
                for t in range(out_ptr[p], out_ptr[p + 1]):
                    for j in range(read_ptr[t], read_ptr[t + 1]):
                        r = reader[j]
                        d, after = place[unit[r]], seconds[r, place[unit[r]]] + tail[r]
                        way = 0.0 if a == d else latency[a, d] + size[t] * per_byte[a, d]
                        tail[p] = max(tail[p], way + after)
                        if a != d and a < 2 and d < 2 and queues:
                            m = n + 2 * t + d
                            of[m], head[m], length[m], tail[m] = 2 + a, finish[p], way, max(tail[m], after)
                of[p], head[p], length[p] = a if a < 2 else -1, finish[p] - seconds[p, a], seconds[p, a]
            time = known[n, 0]
            for resource in range(4):
                some = 0
                for i in range(work):
                    if of[i] == resource and length[i] > 0.0:
                        heads[some], lengths[some], tails[some] = head[i], length[i], tail[i]
                        some += 1
                if some > 1:
                    time = max(time, _in_turn(some, heads, lengths, tails, left))
            row[:] = known[n]
            row[0] = time
            _round(row, grains)
            if not _is_known(rows, count, row):
                kept = 0
                for i in range(count):
                    if not (row <= rows[i]).all():
                        rows[kept] = rows[i]
                        kept += 1
                if kept == len(rows):
                    rows = np.concatenate((rows, np.zeros_like(rows)))
                rows[kept] = row
                count = kept + 1
            op -= 1
            continue
        u = unit[op]
        leads = owner[u] == op
        if leads:
            chosen[op] += 1
            place[u] = chosen[op]
        else:  # once, where its unit is
            chosen[op] = place[u] if chosen[op] < 0 else 3
        c = chosen[op]
        if c == 3:
            chosen[op] = -1
            op -= 1
            continue
        spent += 1 + count
        if spent > effort:
            rows[0] = 0.0
            rows[0, 0] = rest[0, 0]
            return rows[:1], spent
        begin = 0.0
        for j in range(in_ptr[op], in_ptr[op + 1]):
            t = inputs[j]
            a = place[unit[maker[t]]]
            way = 0.0 if a == c else latency[a, c] + size[t] * per_byte[a, c]
            begin = max(begin, finish[maker[t]] + way)
        finish[op] = begin + seconds[op, c]
        known[op + 1] = known[op]
        known[op + 1, 0] = max(known[op, 0], finish[op] + rest[op, c])
        if known[op + 1, 0] == np.inf:
            continue
        if c < 2 and room[c] < np.inf:
            if leads:
                known[op + 1, 1 + 2 * c] += resident[u]
            known[op + 1, 2 + 2 * c] = max(known[op, 2 + 2 * c], held[op, c])
            if known[op + 1, 1 + 2 * c] + known[op + 1, 2 + 2 * c] > room[c]:
                continue
        row[:] = known[op + 1]
        _round(row, grains)
        if not _is_known(rows, count, row):
            op += 1
    return rows[:count], spent


@njit(cache=True, nogil=True)
def _round(row, grains):  # type: ignore[no-untyped-def]
    for k in range(len(row)):
        if grains[k] > 0.0:
            row[k] = np.floor(row[k] / grains[k]) * grains[k]


@njit(cache=True, nogil=True)
def _is_known(rows, count, row):  # type: ignore[no-untyped-def]
    """Whether a row is nowhere below some other."""
    for i in range(count):
        k = 0
        while k < len(row) and rows[i, k] <= row[k]:
            k += 1
        if k == len(row):
            return True
    return False


@njit(cache=True, nogil=True)
def _in_turn(count, head, length, tail, left):  # type: ignore[no-untyped-def]
    """When pieces of work that take turns, and what comes after each, have ended at the earliest.

    They may be interrupted, for that with the longest tail; but of any two, one has ended before the other begins.
    """
    best = now = 0.0
    for i in range(count):
        left[i] = length[i]
        for j in range(i):
            first = max(max(head[i] + length[i], head[j]) + length[j] + tail[j], head[i] + length[i] + tail[i])
            second = max(max(head[j] + length[j], head[i]) + length[i] + tail[i], head[j] + length[j] + tail[j])
            best = max(best, min(first, second))
    todo = count
    while todo:
        at, until = -1, np.inf
        for i in range(count):
            if left[i] >= 0.0 and head[i] <= now:
                at = i if at < 0 or tail[i] > tail[at] else at
            elif left[i] >= 0.0:
                until = min(until, head[i])
        if at < 0:
            now = until
        elif now + left[at] <= until:
            now += left[at]
            left[at] = -1.0
            todo -= 1
            best = max(best, now + tail[at])
        else:
            left[at] -= until - now
            now = until
    return best
