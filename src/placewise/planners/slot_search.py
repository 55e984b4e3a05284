"""Slots by search: the best cuts of a row into pieces (`rows.py`), then annealing over the pieces."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numba import njit

from placewise.driver import Context
from placewise.graph import Ints
from placewise.planners import get, planner, rows
from placewise.problem import Problem
from placewise.simulator.slots import slot_arrays

_HEAT: Final = (0.03, 0.1, 0.01)  # of the value, at the start of each walk in turn
_FROZEN: Final = 1e-5  # and at its end
_STEPS: Final = 40  # temperatures of a walk
_GIVE_UP: Final = 5  # walks in a row that bring nothing
_ORDERS: Final = 0.1  # of the budget, for rows
_ONE_PIECE: Final = 0.6  # of the budget where devices may have more than one


def slots_only(problem: Problem) -> bool | str:
    """Whether a planner applies that thinks in pieces."""
    if problem.execution.concurrency != "slots":
        return "cuts a graph into pieces that run as a whole; this engine has no slots"
    return "ignores contiguity and device counts" if problem.contiguous or problem.max_devices else True


def _compile(problem: Problem) -> None:
    rows.Row(problem).anneal(0.0, 2, 0)
    Walk(problem, np.zeros(problem.num_ops, np.int32)).anneal(0.0, 2, 0)
    get("annealing").compile(problem)  # type: ignore[misc]  # it has one


@planner("slot-search", objectives={"latency", "completion"}, supports=slots_only, compile=_compile)
def slot_search(problem: Problem, ctx: Context, *, orders: int = 100, moves: int = 2000) -> None:
    """The best cuts of many orders of the units into pieces, then annealing over the pieces.

    For the slots of Tarnawski et al. 2020 (arXiv:2006.16423), who solve an integer programme. Here, units stand in a
    row, and dynamic programming cuts it into pieces for accelerators and stretches for CPUs so that their times add up
    to the least. The row changes by annealing: a unit moves, with those that depend on it. What runs at the same time
    is left to walks from the best cut: units move between pieces, alone or with those next to them. `orders` is how
    many rows, and `moves` how many changes in the first walk, to try per unit; a walk that brings nothing is followed
    by one twice as long. All this is with one piece per accelerator; where there may be more, `annealing` goes on.
    """
    rows.search(ctx, rows.Row(problem), orders, _ORDERS)
    if ctx.best is not None and problem.num_units and problem.num_devices > 1:
        _walk_on(ctx, moves, until=_ONE_PIECE if problem.execution.slots > 1 else 1.0)
    if ctx.best is None or problem.execution.slots > 1:
        ctx.delegate("annealing")


def _walk_on(ctx: Context, moves: int, until: float) -> None:
    """Walks from the best, as long as they bring something; each is over when the budget is."""
    length, fruitless, turn, tried, began = moves * ctx.problem.num_units, 0, 0, 0, ctx.seconds
    while fruitless < _GIVE_UP and ctx.spent < until and not ctx.should_stop():
        assert ctx.best is not None
        walk, before = Walk(ctx.problem, ctx.best[0]), ctx.best_value
        left = min(float(length), ctx.evaluations_left / 2)
        if tried and math.isfinite(ctx.seconds_left):
            left = min(left, ctx.seconds_left * tried / (ctx.seconds - began))
        count, hot = max(1, int(left / _STEPS)), _HEAT[turn % len(_HEAT)]
        for step in range(_STEPS):
            if ctx.should_stop() or ctx.evaluations_left <= count:
                break
            better = walk.anneal(hot * (_FROZEN / hot) ** (step / _STEPS), count, int(ctx.rng.integers(2**31)))
            ctx.spend(count)
            tried += count
            if better and walk.value[1] < ctx.best_value:
                ctx.evaluate(walk.placement())
        if ctx.evaluations_left <= count:
            return
        found = ctx.best_value < before * (1 - 1e-9)
        length, fruitless, turn = (length, 0, turn) if found else (2 * length, fruitless + 1, turn + 1)


class Walk:
    """A placement with one piece per accelerator that changes by annealing: units move, alone or with others."""

    def __init__(self, problem: Problem, placement: Ints) -> None:
        arrays, graph, unit = slot_arrays(problem), problem.graph, problem.unit.astype(np.int64)
        pair = np.unique(unit[graph.edge_producer] * max(problem.num_units, 1) + unit[graph.consumers])
        above, below = pair // max(problem.num_units, 1), pair % max(problem.num_units, 1)
        above, below = above[above != below], below[above != below]
        units, backwards = np.arange(problem.num_units + 1), np.argsort(below, kind="stable")
        allowed = problem.allowed[problem.first_of_unit]
        self._unit = unit
        self._given = (
            *arrays, unit, allowed, problem.per_unit(graph.resident_bytes), problem.capacity,
            np.searchsorted(above, units), below, np.searchsorted(below[backwards], units), above[backwards],
        )  # fmt: skip
        self._device = placement[problem.first_of_unit].astype(np.int64)
        self._best = self._device.copy()
        self.value = np.full(2, np.inf)  # of the current placement and of the best

    def anneal(self, temperature: float, count: int, seed: int) -> bool:
        """Try so many changes at a temperature, in shares of the value; says whether there is a new best."""
        before = self.value[1]
        _walk(*self._given, self._device, self._best, self.value, temperature, count, seed)
        return bool(self.value[1] < before)

    def placement(self) -> Ints:
        """The best so far."""
        return self._best[self._unit].astype(np.int32)


# ---- the kernels -----------------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _value(  # type: ignore[no-untyped-def]
    order, seconds, tensor_ptr, tensor, producer, consumer_ptr, consumer, into, out, pool, stored, model, unit, device,
    piece, length, start, missing, seen, first_op, next_op, ready, ends,
):  # fmt: skip
    """What the simulator says of a placement with one slot per accelerator; infinite where it cannot run.

    The pieces are the accelerators, and then the ops on pools. One that is not convex waits for itself.
    """
    num_ops, num_devices = seconds.shape
    total = num_devices
    for p in range(num_devices + num_ops):
        length[p] = 0.0
        start[p] = 0.0
        missing[p] = 0
        seen[p] = -1
        first_op[p] = -1
    for i in range(num_ops):
        op = order[i]
        d = device[unit[op]]
        piece[op] = d
        if stored[op]:
            piece[op] = -1
            continue
        if pool[d]:
            piece[op] = total
            total += 1
        length[piece[op]] += seconds[op, d]
        next_op[op] = first_op[piece[op]]
        first_op[piece[op]] = op
    for t in range(len(producer)):
        op = producer[t]
        home = device[unit[op]]
        leaves = False
        for e in range(consumer_ptr[t], consumer_ptr[t + 1]):
            p, there = piece[consumer[e]], device[unit[consumer[e]]]
            if p == piece[op] or (stored[op] and there == home):
                continue
            leaves = True
            if not stored[op]:
                missing[p] += 1
            if seen[p] != t:
                seen[p] = t
                length[p] += into[t, there]
        if leaves and not stored[op]:
            length[piece[op]] += out[t, home]
    count, done = 0, 0
    for p in range(total):
        if missing[p] == 0:
            ready[count] = p
            count += 1
    for m in range(len(ends)):
        ends[m] = 0.0
    while done < count:
        p = ready[done]
        done += 1
        end = start[p] + length[p]
        op = first_op[p]
        while op >= 0:
            ends[model[op]] = max(ends[model[op]], end)
            for k in range(tensor_ptr[op], tensor_ptr[op + 1]):
                t = tensor[k]
                for e in range(consumer_ptr[t], consumer_ptr[t + 1]):
                    q = piece[consumer[e]]
                    if q != p:
                        start[q] = max(start[q], end)
                        missing[q] -= 1
                        if missing[q] == 0:
                            ready[count] = q
                            count += 1
            op = next_op[op]
    if done < total:
        return np.inf
    value = 0.0
    for m in range(len(ends)):
        value += ends[m]
    return value


@njit(cache=True, nogil=True)
def _walk(  # type: ignore[no-untyped-def]
    order, seconds, tensor_ptr, tensor, producer, consumer_ptr, consumer, into, out, pool, stored, model, unit,
    allowed, need, room, down_ptr, down, up_ptr, up, device, best_device, value, temperature, count, seed,
):  # fmt: skip
    """Try `count` changes: some units that touch each other go to another device, and perhaps others make room."""
    num_ops, num_devices = seconds.shape
    units, pieces = len(device), num_ops + num_devices
    piece, first_op, next_op = np.empty(num_ops, np.int64), np.empty(pieces, np.int64), np.empty(num_ops, np.int64)
    length, start = np.empty(pieces), np.empty(pieces)
    missing, seen, ready = np.empty(pieces, np.int64), np.empty(pieces, np.int64), np.empty(pieces, np.int64)
    models = 1
    for op in range(num_ops):
        models = max(models, model[op] + 1)
    ends = np.zeros(models)
    np.random.seed(seed)
    used = np.zeros(num_devices)
    for u in range(units):
        used[device[u]] += need[u]
    if value[0] == np.inf:
        value[0] = _value(
            order, seconds, tensor_ptr, tensor, producer, consumer_ptr, consumer, into, out, pool, stored, model, unit,
            device, piece, length, start, missing, seen, first_op, next_op, ready, ends,
        )  # fmt: skip
        value[1] = min(value[0], value[1])
    moved, moved_from = np.empty(2 * units, np.int64), np.empty(2 * units, np.int64)
    mark = np.full(units, -1, np.int64)
    for trial in range(count):
        changed = 0
        fits = True
        u = np.random.randint(units)
        for turn in range(2):
            source = device[u]
            target = np.random.randint(num_devices)
            near = np.random.randint(4)  # the device of a neighbour, rather than any
            if near < 3:
                low, high = down_ptr[u], down_ptr[u + 1]
                v = down[np.random.randint(low, high)] if high > low else u
                low, high = up_ptr[u], up_ptr[u + 1]
                if high > low and (near == 0 or v == u):
                    v = up[np.random.randint(low, high)]
                target = device[v]
            if target == source:
                break
            # With it go those on its device that follow from it, that it follows from, or both; or some; or none.
            along = np.random.randint(4)
            most = 1 << np.random.randint(1, 6) if np.random.randint(2) == 0 else units
            first = changed
            mark[u] = 2 * trial + turn
            moved[changed] = u
            changed += 1
            at = first
            while at < changed and along > 0:
                w = moved[at]
                at += 1
                for k in range(down_ptr[w], down_ptr[w + 1] if along != 2 else down_ptr[w]):
                    v = down[k]
                    if device[v] == source and mark[v] != 2 * trial + turn and changed - first < most:
                        mark[v] = 2 * trial + turn
                        moved[changed] = v
                        changed += 1
                for k in range(up_ptr[w], up_ptr[w + 1] if along != 1 else up_ptr[w]):
                    v = up[k]
                    if device[v] == source and mark[v] != 2 * trial + turn and changed - first < most:
                        mark[v] = 2 * trial + turn
                        moved[changed] = v
                        changed += 1
            for i in range(first, changed):
                v = moved[i]
                moved_from[i] = source
                device[v] = target
                used[source] -= need[v]
                used[target] += need[v]
                fits = fits and allowed[v, target]
            if used[target] <= room[target] or not fits:
                break
            # The target is too full: something there goes elsewhere.
            u = np.random.randint(units)
            for _ in range(units):
                if device[u] == target and mark[u] != 2 * trial:
                    break
                u = u + 1 if u + 1 < units else 0
        if changed == 0:
            continue
        for d in range(num_devices):
            fits = fits and used[d] <= room[d]
        found = np.inf
        limit = value[0] * (1.0 - temperature * np.log(1.0 - np.random.random()))
        if fits:
            found = _value(
                order, seconds, tensor_ptr, tensor, producer, consumer_ptr, consumer, into, out, pool, stored, model,
                unit, device, piece, length, start, missing, seen, first_op, next_op, ready, ends,
            )  # fmt: skip
        if found < np.inf and found <= limit:
            value[0] = found
            if found < value[1]:
                value[1] = found
                for v in range(units):
                    best_device[v] = device[v]
        else:
            for i in range(changed - 1, -1, -1):
                v = moved[i]
                used[device[v]] -= need[v]
                used[moved_from[i]] += need[v]
                device[v] = moved_from[i]
