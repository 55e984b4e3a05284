"""A row of units cut into pieces, one for each device: the best cut of one order, for one order after another."""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from placewise.driver import Context
from placewise.graph import Floats, Ints
from placewise.planners import get, planner
from placewise.planners.repair import roomy, settled
from placewise.problem import Problem
from placewise.simulator import evaluate
from placewise.simulator.slots import slot_arrays
from placewise.simulator.working import working_set
from placewise.transforms import contract

_HOT, _COLD = 1e-2, 1e-4  # of the value
_WORK: Final = 3_000_000  # steps of dynamic programming between two glances at the clock
_LARGE: Final = 100 * _WORK  # beyond, even one cut takes too long
_PASSED: Final = -(2**40)


def _supports(problem: Problem) -> bool | str:
    if problem.execution.concurrency == "slots":
        return "is a part of slot-search, which knows engines with slots"
    if problem.contiguous or problem.max_devices:
        return "ignores contiguity and device counts"
    if roomy(problem):
        return "cuts up what does not fit on one device; here each device has room for all"
    if problem.num_units**2 * problem.num_devices > _LARGE:
        return "looks at every piece of the graph: it takes smaller graphs only"
    return True


def _compile(problem: Problem) -> None:
    row = Row(problem)
    row.anneal(0.0, 2, 0)
    row.cut()
    get("fit").compile(problem)  # type: ignore[misc]  # it has one


@planner("rows", objectives={"latency"}, supports=_supports, compile=_compile)
def rows(problem: Problem, ctx: Context, *, orders: int = 100) -> None:
    """The best cuts of many orders of the units into pieces, one per device, where not all fits on one device.

    Units stand in a row; dynamic programming cuts it such that each piece fits with what is alive at a time, and times
    of ops and transfers add up to the least. The row changes by annealing: a unit moves, with those that depend on it.
    `orders` is how many rows to try per unit. What runs at the same time is left to others; so is memory in which no
    such pieces fit.
    """
    search(ctx, Row(problem), orders, 1.0)
    if ctx.best is None:
        ctx.delegate("fit")


def search(ctx: Context, row: Row, orders: int, share: float) -> None:
    """Cut so many rows per unit, for a share of the budget; each best one is simulated."""
    most = orders * row.num_nodes
    steps = max(1, min(_WORK // row.work, most // 40))
    tried, count, began = 0, 1, ctx.spent
    while row.num_nodes and tried < most and ctx.spent - began <= share and not ctx.should_stop():
        count = min(count, most - tried, (ctx.evaluations_left - 1) // row.evaluations)
        if count < 1:
            break
        done = max(tried / most, (ctx.spent - began) / share)
        better = row.anneal(_HOT * (_COLD / _HOT) ** done, count, int(ctx.rng.integers(2**31)))
        ctx.spend(count * row.evaluations)
        if better:
            row.judge(ctx)
        tried, count = tried + count, steps


class Row:
    """Units in a row, and the best way found to cut it. Units that depend on each other in a circle are one node.

    Where an engine has slots, pieces are for its accelerators and stretches between them for a pool. Elsewhere each
    piece has a device for itself, and receives what it reads but does not make.
    """

    def __init__(self, problem: Problem) -> None:
        graph, unit, units = problem.graph, problem.unit, problem.num_units
        self._problem = problem
        pool, into, out = _ends(problem)
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

        self._accelerators = np.flatnonzero(~pool)
        facts = np.concatenate([problem.seconds, into, out, problem.capacity[None]])[:, self._accelerators]
        self._kinds = np.unique(facts, axis=1, return_inverse=True)[1].reshape(-1)
        example = self._accelerators[np.unique(self._kinds, return_index=True)[1]]
        seconds = np.zeros((n, problem.num_devices))
        np.add.at(seconds, self._node, problem.seconds)
        pools = np.flatnonzero(pool)
        self._pool = int(pools[seconds[:, pools].sum(axis=0).argmin()]) if len(pools) else -1
        on_pool = seconds[:, self._pool] if len(pools) else np.full(n, np.inf)
        self._room = problem.capacity[example]
        size, held = np.zeros(len(tensor)), np.zeros(n)
        if problem.execution.memory == "live":
            size = np.where(graph.is_stored[graph.tensor_producer[tensor]], 0.0, graph.tensor_bytes[tensor])
            np.maximum.at(held, self._node, working_set(problem))
        given = (
            np.column_stack([seconds[:, example], on_pool]), np.bincount(self._node, graph.resident_bytes, n),
            self._room, size, held, into[tensor][:, example], out[tensor][:, example],
            producer, np.bincount(message, minlength=len(tensor)),
            np.searchsorted(producer[by_producer], np.arange(n + 1)), by_producer,
            np.searchsorted(reader[by_reader], np.arange(n + 1)), message[by_reader],
        )  # fmt: skip
        self._order = contract(graph, self._node).graph.topological_order.astype(np.int64)
        rest = given[0].min(axis=1)  # least time from each node's start to the end
        for node in self._order[::-1].tolist():
            for k in range(given[11][node], given[11][node + 1]):
                before = producer[given[12][k]]
                rest[before] = max(rest[before], given[0][before].min() + rest[node])
        self._given = tuple(map(np.ascontiguousarray, (*given, rest)))
        self._sequence = self._kinds.copy()  # of the accelerators along the row
        self._best = self._order.copy(), self._sequence.copy()
        self._value = np.full(2, np.inf)  # of the current row and of the best
        self._least = np.zeros((len(self._kinds) + 1, n + 1))
        self._from = np.zeros((len(self._kinds) + 1, n + 1), np.int64)
        self.work = max(1, n * n * (len(self._kinds) + 1) // 4)  # to cut a row once, roughly
        self.evaluations = max(1, n * (len(self._kinds) + 1) // 25)  # that take as long as a cut, roughly

    def anneal(self, temperature: float, count: int, seed: int) -> bool:
        """Try so many changes at a temperature, in shares of the value; says whether there is a new best cut."""
        before = self._value[1]
        _anneal(
            *self._given, self._order, self._sequence, *self._best, self._value, self._least, self._from,
            temperature, count, seed,
        )  # fmt: skip
        return bool(self._value[1] < before)

    @property
    def value(self) -> float:
        """Of the best cut, as if nothing ran at the same time."""
        return float(self._value[1])

    def judge(self, ctx: Context) -> None:
        """Simulate the best cut; where it does not fit after all, the next ones leave so much room.

        Without an order more may be alive at a time. Then some units move, so that others have where to begin.
        """
        problem, (placement, order) = ctx.problem, self.plan()
        if problem.execution.concurrency == "slots":
            ctx.evaluate(placement)
            return
        fits = np.isfinite(ctx.evaluate(placement, order))
        device = settled(problem, ctx, placement[problem.first_of_unit])
        if fits or np.isfinite(evaluate(problem, device[problem.unit], threads=1).score[0]):
            return
        peak = evaluate(problem, placement, order, threads=1).peak
        assert peak is not None
        beyond = np.maximum(peak[0] - problem.capacity, 0.0)[self._accelerators]
        np.subtract.at(self._room, self._kinds, beyond)
        self._value[:] = np.inf

    def cut(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find the pieces of the best row, and say which row that is."""
        order, sequence = self._best
        _cut(*self._given, order, sequence, np.inf, self._least, self._from)
        return order, sequence

    def plan(self) -> tuple[Ints, Ints]:
        """The best cut as (placement, order)."""
        order, sequence = self.cut()
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
        ops = np.lexsort((np.argsort(self._problem.graph.topological_order), np.argsort(order)[self._node]))
        return device[self._node], ops.astype(np.int32)


def _ends(problem: Problem) -> tuple[NDArray[np.bool_], Floats, Floats]:
    """([D] which devices are pools, [T, D] what it costs a piece to receive a tensor, and to send it)."""
    if problem.execution.concurrency == "slots":
        arrays = slot_arrays(problem)
        return arrays.pool, arrays.into, arrays.out
    cluster, sizes = problem.cluster, problem.graph.tensor_bytes[:, None]
    into = np.zeros((len(sizes), problem.num_devices))
    for source in range(problem.num_devices):
        np.maximum(into, cluster.latency[source] + sizes * cluster.seconds_per_byte[source], out=into)
    return np.zeros(problem.num_devices, np.bool_), into, np.zeros_like(into)


# ---- the kernels -----------------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _cut(  # type: ignore[no-untyped-def]
    seconds, need, room, size, held, into, out, producer, readers, out_ptr, outputs, in_ptr, inputs, rest,
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
    last = np.zeros(len(producer), np.int64)  # the last place that reads a tensor
    for i in range(n):
        for k in range(in_ptr[order[i]], in_ptr[order[i] + 1]):
            last[inputs[k]] = i
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
            alive, most = 0.0, 0.0  # bytes between nodes: now, and the most so far with what the nodes hold
            for end in range(start, n):
                node = order[end]
                used += need[node]
                length += seconds[node, kind]
                own = held[node]
                for k in range(in_ptr[node], in_ptr[node + 1]):
                    t = inputs[k]
                    if place[producer[t]] >= start:
                        waiting[t] -= 1
                        if waiting[t] == 0:
                            length -= out[t, kind]
                    elif received[t] != start * kinds + kind:
                        received[t] = start * kinds + kind
                        length += into[t, kind]
                        alive += size[t]
                        most += size[t]  # it may have come early
                    own -= size[t]
                most = max(most, alive + own)
                if used + most > room[kind] or length == np.inf:
                    break
                for k in range(in_ptr[node], in_ptr[node + 1]):
                    t = inputs[k]
                    if last[t] == end:
                        alive -= size[t]
                for k in range(out_ptr[node], out_ptr[node + 1]):
                    t = outputs[k]
                    waiting[t] = readers[t]
                    length += out[t, kind]
                    alive += size[t]
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
    seconds, need, room, size, held, into, out, producer, readers, out_ptr, outputs, in_ptr, inputs, rest,
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
            seconds, need, room, size, held, into, out, producer, readers, out_ptr, outputs, in_ptr, inputs, rest,
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
