"""Slots by cutting a row: the best cut of one order of the units into pieces, for one order after another."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from placewise.driver import Context
from placewise.graph import Ints
from placewise.planners import get, planner
from placewise.problem import Problem
from placewise.simulator.slots import slot_arrays
from placewise.transforms import contract

_HOT, _COLD = 1e-2, 1e-4  # of the value, for rows
_HEAT: Final = (0.03, 0.1, 0.01)  # of the value, at the start of each walk in turn
_FROZEN: Final = 1e-5  # and at its end
_STEPS: Final = 40  # temperatures of a walk
_GIVE_UP: Final = 5  # walks in a row that bring nothing
_WORK: Final = 3_000_000  # steps of dynamic programming between two glances at the clock
_ORDERS: Final = 0.1  # of the budget, for rows
_ONE_PIECE: Final = 0.6  # of the budget where devices may have more than one
_PASSED: Final = -(2**40)


def slots_only(problem: Problem) -> bool | str:
    """Whether a planner applies that thinks in pieces."""
    if problem.execution.concurrency != "slots":
        return "cuts a graph into pieces that run as a whole; this engine has no slots"
    return "ignores contiguity and device counts" if problem.contiguous or problem.max_devices else True


def _compile(problem: Problem) -> None:
    Row(problem).anneal(0.0, 2, 0)
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
    _cut_rows(ctx, orders)
    if ctx.best is not None and problem.num_units and problem.num_devices > 1:
        _walk_on(ctx, moves, until=_ONE_PIECE if problem.execution.slots > 1 else 1.0)
    if ctx.best is None or problem.execution.slots > 1:
        ctx.delegate("annealing")


def _cut_rows(ctx: Context, orders: int) -> None:
    row = Row(ctx.problem)
    most = orders * row.num_nodes
    steps = max(1, min(_WORK // row.work, most // 40))
    tried, count, began = 0, 1, ctx.spent
    while row.num_nodes and tried < most and ctx.spent - began <= _ORDERS and not ctx.should_stop():
        count = min(count, most - tried, ctx.evaluations_left - 1)
        if count < 1:
            break
        done = max(tried / most, (ctx.spent - began) / _ORDERS)
        better = row.anneal(_HOT * (_COLD / _HOT) ** done, count, int(ctx.rng.integers(2**31)))
        ctx.spend(count)
        if better:
            ctx.evaluate(row.placement())
        tried, count = tried + count, steps


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


class Row:
    """Units in a row, and the best way found to cut it. Units that depend on each other in a circle are one node."""

    def __init__(self, problem: Problem) -> None:
        arrays, graph, unit, units = slot_arrays(problem), problem.graph, problem.unit, problem.num_units
        flows = unit[graph.edge_producer], unit[graph.consumers]
        circle = coo_array((np.ones(graph.num_edges), flows), (units, units))
        label = connected_components(circle, connection="strong")[1] if units else np.zeros(0, np.int32)
        self._node = label[unit].astype(np.int64)  # of each op
        self.num_nodes = n = int(self._node.max(initial=-1)) + 1

        # Tensors that leave their node, and who reads them.
        source, target = self._node[graph.edge_producer], self._node[graph.consumers]
        away = np.flatnonzero(source != target)
        pair = np.unique(graph.edge_tensor[away].astype(np.int64) * max(n, 1) + target[away])
        tensor, message = np.unique(pair // max(n, 1), return_inverse=True)
        producer, reader = self._node[graph.tensor_producer[tensor]], pair % max(n, 1)
        by_producer, by_reader = np.argsort(producer, kind="stable"), np.argsort(reader, kind="stable")

        self._accelerators, self._kinds = accelerator_kinds(problem)
        example = self._accelerators[np.unique(self._kinds, return_index=True)[1]]
        seconds = np.zeros((n, problem.num_devices))
        np.add.at(seconds, self._node, problem.seconds)
        pools = np.flatnonzero(arrays.pool)
        self._pool = int(pools[seconds[:, pools].sum(axis=0).argmin()]) if len(pools) else -1
        on_pool = seconds[:, self._pool] if len(pools) else np.full(n, np.inf)
        given = (
            np.column_stack([seconds[:, example], on_pool]), np.bincount(self._node, graph.resident_bytes, n),
            problem.capacity[example], arrays.into[tensor][:, example], arrays.out[tensor][:, example],
            producer, np.bincount(message, minlength=len(tensor)),
            np.searchsorted(producer[by_producer], np.arange(n + 1)), by_producer,
            np.searchsorted(reader[by_reader], np.arange(n + 1)), message[by_reader],
        )  # fmt: skip
        self._order = contract(graph, self._node).graph.topological_order.astype(np.int64)
        rest = given[0].min(axis=1)  # least time from each node's start to the end
        for node in self._order[::-1].tolist():
            for k in range(given[9][node], given[9][node + 1]):
                before = producer[given[10][k]]
                rest[before] = max(rest[before], given[0][before].min() + rest[node])
        self._given = tuple(map(np.ascontiguousarray, (*given, rest)))
        self._sequence = self._kinds.copy()  # of the accelerators along the row
        self._best = self._order.copy(), self._sequence.copy()
        self._value = np.full(2, np.inf)  # of the current row and of the best
        self._least = np.zeros((len(self._kinds) + 1, n + 1))
        self._from = np.zeros((len(self._kinds) + 1, n + 1), np.int64)
        self.work = max(1, n * n * (len(self._kinds) + 1) // 4)  # to cut a row once, roughly

    def anneal(self, temperature: float, count: int, seed: int) -> bool:
        """Try so many changes at a temperature, in shares of the value; says whether there is a new best cut."""
        before = self._value[1]
        _anneal(
            *self._given, self._order, self._sequence, *self._best, self._value, self._least, self._from,
            temperature, count, seed,
        )  # fmt: skip
        return bool(self._value[1] < before)

    def placement(self) -> Ints:
        """The best cut as a placement."""
        order, sequence = self._best
        _cut(*self._given, order, sequence, np.inf, self._least, self._from)
        free = [self._accelerators[self._kinds == kind].tolist() for kind in range(len(self._kinds))]
        device = np.empty(self.num_nodes, np.int32)
        used, end = int(self._least[:, -1].argmin()), self.num_nodes
        while end > 0 or used > 0:
            start = int(self._from[used, end])
            if start == _PASSED:
                used -= 1
            elif start < 0:
                device[order[-start - 1 : end]] = self._pool
                end = -start - 1
            else:
                device[order[start:end]] = free[sequence[used - 1]].pop(0)
                used, end = used - 1, start
        placement: Ints = device[self._node]
        return placement


def accelerator_kinds(problem: Problem) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(the accelerators, the kind of each): those of a kind may change places, and nothing changes."""
    arrays = slot_arrays(problem)
    found = np.flatnonzero(~arrays.pool)
    facts = np.concatenate([problem.seconds, arrays.into, arrays.out, problem.capacity[None]])[:, found]
    kinds: NDArray[np.int64] = np.unique(facts, axis=1, return_inverse=True)[1].reshape(-1)
    return found, kinds


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


@njit(cache=True, nogil=True)
def _cut(  # type: ignore[no-untyped-def]
    seconds, need, room, into, out, producer, readers, out_ptr, outputs, in_ptr, inputs, rest,
    order, sequence, limit, least, start_of,
):  # fmt: skip
    """The least sum of times over all cuts of a row, infinite if above the limit.

    least[f, i] is that of the first i nodes with the first f accelerators of the sequence, and start_of[f, i] where the
    last piece begins: as it is for an accelerator, -1 less for a pool, _PASSED if the last accelerator has none.
    """
    n, accelerators = len(order), len(sequence)
    kinds = len(room)
    place = np.empty(n, np.int64)
    for i in range(n):
        place[order[i]] = i
    received = np.full(len(producer), -1, np.int64)  # the last start of a piece that received a tensor
    waiting = np.zeros(len(producer), np.int64)  # readers of a tensor that are not in its piece yet
    finish = np.zeros(n)
    left = np.zeros(n + 1)  # least time of what comes after a place
    for i in range(n - 1, -1, -1):
        left[i] = max(left[i + 1], rest[order[i]])
    for f in range(accelerators + 1):
        for i in range(n + 1):
            least[f, i] = np.inf
    least[0, 0] = 0.0
    for start in range(n + 1):
        best = least[0, start]
        for f in range(accelerators):
            if least[f, start] < least[f + 1, start]:
                least[f + 1, start] = least[f, start]
                start_of[f + 1, start] = _PASSED
            best = min(best, least[f + 1, start])
        if best + left[start] > limit or best == np.inf:
            continue

        for kind in range(kinds):
            used, length = 0.0, 0.0
            for end in range(start, n):
                node = order[end]
                used += need[node]
                length += seconds[node, kind]
                if used > room[kind] or length == np.inf:
                    break
                for k in range(in_ptr[node], in_ptr[node + 1]):
                    t = inputs[k]
                    if place[producer[t]] >= start:
                        waiting[t] -= 1
                        if waiting[t] == 0:
                            length -= out[t, kind]
                    elif received[t] != start * kinds + kind:
                        received[t] = start * kinds + kind
                        length += into[t, kind]
                for k in range(out_ptr[node], out_ptr[node + 1]):
                    t = outputs[k]
                    waiting[t] = readers[t]
                    length += out[t, kind]
                if best + length + left[end + 1] > limit:
                    continue
                for f in range(accelerators):
                    if sequence[f] == kind and least[f, start] + length < least[f + 1, end + 1]:
                        least[f + 1, end + 1] = least[f, start] + length
                        start_of[f + 1, end + 1] = start

        length = 0.0
        for end in range(start, n):  # on a pool, the longest path
            node = order[end]
            time = 0.0
            for k in range(in_ptr[node], in_ptr[node + 1]):
                source = producer[inputs[k]]
                if place[source] >= start:
                    time = max(time, finish[source])
            finish[node] = time + seconds[node, kinds]
            length = max(length, finish[node])
            if best + length > limit or length == np.inf:
                break
            if best + length + left[end + 1] > limit:
                continue
            for f in range(accelerators + 1):
                if least[f, start] + length < least[f, end + 1]:
                    least[f, end + 1] = least[f, start] + length
                    start_of[f, end + 1] = -1 - start
    value = np.inf
    for f in range(accelerators + 1):
        value = min(value, least[f, n])
    return value if value <= limit else np.inf


@njit(cache=True, nogil=True)
def _anneal(  # type: ignore[no-untyped-def]
    seconds, need, room, into, out, producer, readers, out_ptr, outputs, in_ptr, inputs, rest,
    order, sequence, best_order, best_sequence, value, least, start_of, temperature, count, seed,
):  # fmt: skip
    """Cut `count` rows, each a change of the current one, or the current one itself where it is new."""
    n, accelerators = len(order), len(sequence)
    np.random.seed(seed)
    marked = np.full(n, -1, np.int64)
    feeds = np.full(len(producer), -1, np.int64)  # tensors that a marked node reads
    before = order.copy()
    bits = int(np.log2(n)) + 1 if n else 0
    for trial in range(count):
        at, to = 0, 0
        a, b = 0, 0
        if value[0] < np.inf:
            if len(room) > 1 and np.random.randint(4) == 0:
                a, b = np.random.randint(accelerators), np.random.randint(accelerators)
                sequence[a], sequence[b] = sequence[b], sequence[a]
            else:  # a node goes ahead, with what it needs, or back, with what needs it
                at = np.random.randint(n)
                reach = 1 << np.random.randint(1, bits + 1)
                to = min(max(at + np.random.randint(-reach, reach + 1), 0), n - 1)
                marked[order[at]] = trial
                step = 1 if to > at else -1
                for k in range(in_ptr[order[at]], in_ptr[order[at] + 1]):
                    feeds[inputs[k]] = trial
                for i in range(at + step, to + step, step) if to != at else range(0):
                    node = order[i]
                    if to > at:
                        for k in range(in_ptr[node], in_ptr[node + 1]):
                            if marked[producer[inputs[k]]] == trial:
                                marked[node] = trial
                    else:
                        for k in range(out_ptr[node], out_ptr[node + 1]):
                            if feeds[outputs[k]] == trial:
                                marked[node] = trial
                        if marked[node] == trial:
                            for k in range(in_ptr[node], in_ptr[node + 1]):
                                feeds[inputs[k]] = trial
                low, high = min(at, to), max(at, to)
                next_at = low
                for turn in range(2):  # ahead: the marked ones come first; back: the others
                    for i in range(low, high + 1):
                        if (marked[before[i]] == trial) == ((turn == 0) == (to < at)):
                            order[next_at] = before[i]
                            next_at += 1
        limit = np.inf
        if value[0] < np.inf:
            limit = value[0] * (1.0 - temperature * np.log(1.0 - np.random.random()))
        found = _cut(
            seconds, need, room, into, out, producer, readers, out_ptr, outputs, in_ptr, inputs, rest,
            order, sequence, limit, least, start_of,
        )  # fmt: skip
        if found < np.inf:
            value[0] = found
            for i in range(min(at, to), max(at, to) + 1):
                before[i] = order[i]
            if found < value[1]:
                value[1] = found
                for i in range(n):
                    best_order[i] = order[i]
                for f in range(accelerators):
                    best_sequence[f] = sequence[f]
        else:
            sequence[a], sequence[b] = sequence[b], sequence[a]
            for i in range(min(at, to), max(at, to) + 1):
                order[i] = before[i]
