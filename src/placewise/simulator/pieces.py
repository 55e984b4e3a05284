"""Slots: a bound by a path, cut into pieces that fit, and by what lies beside it.

No path comes back to a piece that it has left, so each slot has one stretch of the path at most. It pays for the
tensors between it and the rest of the path. An op that all others come before or after is a *joint*: a piece with two
joints has all ops between them, whose times add up and whose bytes must fit. Where a piece has one joint and not the
next, what it sends parts the two; so does what a piece receives that has a joint and not the one before. Beside what is
known of the path, that costs no less than a minimum cut.

Joints are those of a part of the graph: of what lies between both ends of the path. What is left out costs nothing.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placewise.graph import Floats
from placewise.problem import Problem
from placewise.simulator.slots import slot_arrays

_WHOLE: Final = 2**28  # all costs of a flow together
_MOST: Final = 20_000  # ops and edges of graphs that are looked at beside the path
_EFFORT: Final = 200_000  # tensors in all networks together


def in_pieces(problem: Problem, path: list[int], may: NDArray[np.bool_], slack: float) -> float:
    """Seconds that no plan in slots beats; `may` [N, D] is where each op may run and fits.

    Accelerators count as if each were as fast and as large as the best; so do pools.
    """
    graph, arrays = problem.graph, slot_arrays(problem)
    table = np.where(may, problem.seconds, np.inf)
    fast, slow = (table[:, these].min(axis=1, initial=np.inf) for these in (~arrays.pool, arrays.pool))
    into, out = (cost[:, ~arrays.pool].min(axis=1, initial=np.inf) for cost in (arrays.into, arrays.out))
    room = float(problem.capacity[~arrays.pool].max(initial=0.0)) * (1.0 + slack)
    resident = problem.per_unit(graph.resident_bytes)
    slots = problem.execution.slots * int((~arrays.pool).sum())
    place = np.full(graph.num_ops, -1)
    place[path] = np.arange(len(path))
    edges = np.flatnonzero((place[graph.edge_producer] >= 0) & (place[graph.consumers] >= 0))
    tensor, message = np.unique(graph.edge_tensor[edges], return_inverse=True)
    by_reader = np.argsort(place[graph.consumers[edges]], kind="stable")
    by_producer = np.argsort(place[graph.tensor_producer[tensor]], kind="stable")
    counts = np.arange(len(path) + 1)
    whole = np.diff(problem.unit[path], prepend=-1) == 0  # what shares a device is in the same piece
    first = np.unique(problem.unit[path], return_index=True)[1]
    need = np.zeros(len(path))
    need[first] = resident[problem.unit[path]][first]
    value = _cut_path(
        fast[path], slow[path], need, room, into[tensor], out[tensor], place[graph.tensor_producer[tensor]],
        np.bincount(message, minlength=len(tensor)),
        np.searchsorted(place[graph.consumers[edges]][by_reader], counts), message[by_reader],
        np.searchsorted(place[graph.tensor_producer[tensor]][by_producer], counts), by_producer,
        whole & (problem.execution.slots == 1), min(slots, len(path)), slack, *_beside(problem, path, fast, into, out),
    )  # fmt: skip
    return float(value) * (1.0 - slack)


def _beside(problem: Problem, path: list[int], fast: Floats, into: Floats, out: Floats) -> tuple[Any, ...]:
    """What joints tell about the rest of the graph, by place on the path, in the order in which the kernel takes it."""
    graph, n = problem.graph, len(path)
    joint = np.zeros(n, np.bool_)
    beside, bytes_beside, enters, leaves = np.zeros((4, n))
    if graph.num_ops + graph.num_edges > _MOST:
        return joint, beside, bytes_beside, enters, leaves
    part = Part(problem, path)
    resident, seen = problem.per_unit(graph.resident_bytes), set(problem.unit[path].tolist())
    on_path = {op: i for i, op in enumerate(path)}
    joint[[on_path[part.order[at]] for at in part.joints]] = True
    made_at: dict[int, int] = {}  # places on the path, by tensor: of its maker
    read_at: dict[int, int] = {}  # and of its last reader
    for t, made, reader in part.edges(0, len(part.order) - 1):
        if part.order[made] in on_path and part.order[reader] in on_path:
            made_at[t] = on_path[part.order[made]]
            read_at[t] = max(read_at.get(t, 0), on_path[part.order[reader]])
    effort = 0
    for a, b in pairwise(part.joints):
        ops = part.order[a : b + 1]
        first, last = on_path[ops[0]], on_path[ops[-1]]
        others = [op for op in ops if op not in on_path]
        beside[last] = sum(float(fast[op]) for op in others)
        units = {int(problem.unit[op]) for op in others} - seen
        seen |= units
        bytes_beside[last] = sum(float(resident[u]) for u in sorted(units))
        tensors = list(dict.fromkeys(t for t, _, _ in part.edges(a, b)))
        effort += (last - first) * len(tensors)
        for cut in range(first, last) if others and effort <= _EFFORT else ():  # between two ops of the path
            known = {t for t in tensors if t in made_at and made_at[t] <= cut < read_at[t]}
            costs = ({t: 0.0 if t in known else float(cost[t]) for t in tensors} for cost in (into, out))
            enters[cut + 1], leaves[cut] = (part.least_cut(a, b, cost) for cost in costs)
    return joint, beside, bytes_beside, enters, leaves


class Part:
    """The ops between both ends of a path, in a topological order, and the joints among them."""

    def __init__(self, problem: Problem, path: list[int]) -> None:
        graph = problem.graph
        order = graph.topological_order.tolist()
        start, edges = graph.in_edges
        makers = [graph.edge_producer[edges[start[op] : start[op + 1]]].tolist() for op in range(graph.num_ops)]
        after, before = {path[0]}, {path[-1]}
        for op in order:
            if any(maker in after for maker in makers[op]):
                after.add(op)
        for op in reversed(order):
            if op in before:
                before.update(makers[op])
        inside = after & before
        self.order: list[int] = [op for op in order if op in inside]
        place = {op: i for i, op in enumerate(self.order)}
        self._reads: list[list[tuple[int, int]]] = [[] for _ in self.order]  # tensors, and the places of their makers
        goes_on = [len(place)] * len(place)  # the first place that reads from each one
        ends = zip(graph.edge_tensor.tolist(), graph.edge_producer.tolist(), graph.consumers.tolist(), strict=True)
        for t, made, reader in ends:
            if made in inside and reader in inside:
                self._reads[place[reader]].append((t, place[made]))
                goes_on[place[made]] = min(goes_on[place[made]], place[reader])
        # All that comes before leads here if each goes on to something no further along; all that follows, likewise.
        comes_from = [max((made for _, made in reads), default=-1) for reads in self._reads]
        furthest = np.maximum.accumulate([-1, *goes_on[:-1]])
        nearest = np.minimum.accumulate([len(place), *comes_from[:0:-1]])[::-1]
        places = np.arange(len(place))
        #: The places of ops of the path that all others come before or after.
        self.joints: list[int] = places[(furthest <= places) & (nearest >= places) & np.isin(self.order, path)].tolist()

    def edges(self, a: int, b: int) -> list[tuple[int, int, int]]:
        """(tensor, maker, reader) from one place to another, both included."""
        return [(t, made, i) for i in range(a + 1, b + 1) for t, made in self._reads[i] if made >= a]

    def least_cut(self, a: int, b: int, cost: dict[int, float]) -> float:
        """The least cost of tensors without which the second joint has nothing from the first."""
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import maximum_flow

        edges = self.edges(a, b)
        tensors = {t: b + 1 + k for k, t in enumerate(cost)}
        total = sum(cost.values())
        if not 0.0 < total < np.inf:
            return 0.0
        # Ops, tensors and the far sides of tensors are nodes; only the way across a tensor has a limit.
        arcs = dict.fromkeys([(made, tensors[t]) for t, made, _ in edges], _WHOLE)
        arcs |= dict.fromkeys([(tensors[t] + len(tensors), i) for t, _, i in edges], _WHOLE)
        for t, node in tensors.items():
            arcs[node, node + len(tensors)] = int(cost[t] / total * (1 - 1e-12) * _WHOLE)
        rows, columns = np.array(list(arcs)).T - a
        size = b + 1 + 2 * len(tensors) - a
        network = coo_array((np.array(list(arcs.values()), np.int32), (rows, columns)), (size, size)).tocsr()
        return float(maximum_flow(network, 0, b - a).flow_value) / _WHOLE * total


@njit(cache=True, nogil=True)
def _cut_path(  # type: ignore[no-untyped-def]
    fast, slow, need, room, into, out, producer, readers, in_ptr, inputs, out_ptr, outputs, whole, slots, slack,
    joint, beside, bytes_beside, enters, leaves,
):  # fmt: skip
    """The least time of a path with so many slots, where an op takes `fast` in one and `slow` on a pool.

    A piece pays for the tensors between it and the rest of the path, and for what else `enters` or `leaves` where it
    has one of two joints; with both it has what is `beside` the path up to the second. None begins at an op that is
    `whole` with the one before, except on a pool after a pool. `slack` is for rounding, of all that was ever added up:
    a sum from which most is taken away again may be nothing else.
    """
    n = len(fast)
    least = np.full((slots + 1, n + 1), np.inf)  # of so many ops, with so many slots
    on_pool = np.full((slots + 1, n + 1), np.inf)  # the same, the last of them on a pool
    waiting = np.zeros(len(producer), np.int64)  # readers of a tensor that are not in its piece
    received = np.full(len(producer), -1, np.int64)  # the last start of a piece that received a tensor
    least[0, 0] = 0.0
    for start in range(n):
        for f in range(slots + 1):
            before = on_pool[f, start] if whole[start] else least[f, start]
            on_pool[f, start + 1] = before + slow[start]
            least[f, start + 1] = min(least[f, start + 1], on_pool[f, start + 1])
        if whole[start]:
            continue
        used, added, taken, last = 0.0, 0.0, 0.0, -1  # the last joint of the piece
        for end in range(start, n):
            used += need[end]
            added += fast[end]
            if joint[end]:
                if last >= 0:
                    used += bytes_beside[end]
                    added += beside[end]
                else:
                    added += enters[start]
                last = end
            if used > room:
                break
            for k in range(in_ptr[end], in_ptr[end + 1]):
                t = inputs[k]
                if producer[t] >= start:
                    waiting[t] -= 1
                    if waiting[t] == 0:
                        taken += out[t]
                elif received[t] != start:
                    received[t] = start
                    added += into[t]
            for k in range(out_ptr[end], out_ptr[end + 1]):
                t = outputs[k]
                waiting[t] = readers[t]
                added += out[t]
            if end + 1 < n and whole[end + 1]:
                continue
            time = max(0.0, added - taken - slack * added) + (leaves[end] if last >= 0 else 0.0)
            for f in range(slots):
                least[f + 1, end + 1] = min(least[f + 1, end + 1], least[f, start] + time)
    value = np.inf
    for f in range(slots + 1):
        value = min(value, least[f, n])
    return value
