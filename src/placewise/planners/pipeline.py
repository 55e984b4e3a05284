"""Chains and pipelines: intervals of the program, by sweeping a cut through it or by dynamic programming."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import product
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from placewise.colocation import colocate_backward
from placewise.driver import Context
from placewise.errors import InvalidInput
from placewise.graph import Floats, Ints
from placewise.planners import planner
from placewise.planners.blocks import Blocks, fastest_first, headroom
from placewise.planners.repair import bytes_needed, messages
from placewise.planners.single import all_on
from placewise.problem import Problem
from placewise.simulator.alike import alike
from placewise.simulator.throughput import held_bytes, sent_share

_BATCH = 2_000_000  # entries of placements that are evaluated at once
_STEPS = 1.0e8  # of dynamic programming: well below a second,
_PER_SECOND = 3.0e7  # if there is so much time
_MOST_PAIRS = 100_000  # of arcs in the graph of device sets
_FOLDS = 4  # rounds
_BEHIND = 2.0**-20  # of a place in the program
_MOST_CUTS = 512  # places where a stage may end


Reorder = Callable[[Problem, NDArray[np.int64]], NDArray[np.int64]]  # the places of units, from the program's


def program(problem: Problem, reorder: Reorder | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(the units in a row, where the row may be cut: numbers of units, 0 and all included).

    Units come in the order in which the program first runs them; in training, what only runs backward comes where it
    exchanges most (`_fold`). Where colocation makes forward data flow in circles, the units of a circle stand together,
    and a contiguous plan may not cut there. With `reorder`, units come in another order, as far as the flow of data
    lets them.
    """
    graph, units = problem.graph, problem.num_units
    position = np.empty(problem.num_ops, np.int64)
    position[graph.topological_order] = np.arange(problem.num_ops)
    first, ahead = problem.per_unit(position, np.minimum), problem.per_unit(graph.phase == 0, np.logical_or)
    edge = (graph.phase[graph.edge_producer] == 0) & (graph.phase[graph.consumers] == 0)
    edge &= ~graph.is_stored[graph.edge_producer]
    p, q = (problem.unit[end[edge]].astype(np.int64) for end in (graph.edge_producer, graph.consumers))
    circle, place = np.arange(units), first.astype(np.float64)
    if reorder:
        first = reorder(problem, first)
    if reorder or (first[p] > first[q]).any():
        circle = connected_components(coo_array((np.ones(len(p)), (p, q)), (units, units)), connection="strong")[1]
        earliest = np.full(units, problem.num_ops)
        np.minimum.at(earliest, circle, first)
        place = dataflow_order(circle[p], circle[q], earliest)[circle].astype(np.float64)
    back = np.flatnonzero(~ahead)
    _fold(problem, place, back[np.argsort(first[back], kind="stable")])
    row = np.lexsort((first, place))
    cuts = np.flatnonzero(np.diff(circle[row], prepend=-1, append=-1)) if problem.contiguous else np.arange(units + 1)
    return row, cuts


def _with_fellow_readers(problem: Problem, first: NDArray[np.int64]) -> NDArray[np.int64]:
    """[units] the places of units, of those that read a message with others that of its first reader; the message that
    has most bytes decides. What is stored goes where it is first read.

    So a recurrent network comes layer by layer, though it runs step by step.
    """
    sent, forward, place = messages(problem), _forward(problem), first.copy()
    several = (np.bincount(sent.message, minlength=len(sent.sender)) > 1) & forward[sent.tensor]
    earliest = np.full(len(sent.sender), problem.num_ops)
    np.minimum.at(earliest, sent.message, first[sent.reader])
    edges = np.flatnonzero(several[sent.message])
    edges = edges[np.argsort(sent.bytes[sent.message[edges]], kind="stable")]
    place[sent.reader[edges]] = earliest[sent.message[edges]]
    stored = problem.per_unit(problem.graph.is_stored, np.logical_and)[sent.sender]
    place[sent.sender[stored]] = earliest[stored]
    return place


def late(problem: Problem, first: NDArray[np.int64]) -> NDArray[np.int64]:
    """[units] the places of units, of those that send more than they read right before the first that reads them.

    So the logits of all steps come after the decoder, though each is there as soon as its step is.
    """
    sent, units = messages(problem), problem.num_units
    goes, comes, place = np.zeros(units), np.zeros(units), first.astype(np.float64)
    stored = problem.graph.is_stored[problem.graph.tensor_producer[sent.tensor]]
    within = stored & ~problem.per_unit(problem.graph.is_stored, np.logical_and)[sent.sender]  # a weight of some unit
    counts = np.where(_forward(problem)[sent.tensor] & ~within, sent.bytes, 0.0)
    np.add.at(goes, sent.sender, counts)
    np.add.at(comes, sent.reader, np.where(stored, 0.0, counts)[sent.message])
    by_sender = np.argsort(sent.sender[sent.message], kind="stable")
    by_sender = by_sender[counts[sent.message[by_sender]] > 0]
    reader = sent.reader[by_sender]
    start = np.searchsorted(sent.sender[sent.message][by_sender], np.arange(units + 1))
    for unit in np.argsort(-first).tolist():
        readers = reader[start[unit] : start[unit + 1]]
        if goes[unit] > comes[unit] and len(readers):
            place[unit] = place[readers].min() - _BEHIND
    return np.argsort(np.argsort(place, kind="stable"))


def _forward(problem: Problem) -> NDArray[np.bool_]:
    """[T] tensors that forward ops make and what is stored: those that decide the order of the program."""
    made: NDArray[np.bool_] = (problem.graph.phase == 0)[problem.graph.tensor_producer]
    return made


def _late_with_fellow_readers(problem: Problem, first: NDArray[np.int64]) -> NDArray[np.int64]:
    """[units] both: layer by layer, and what makes much after what makes little."""
    return late(problem, _with_fellow_readers(problem, late(problem, first)))


def _fold(problem: Problem, place: Floats, units: NDArray[np.int64]) -> None:
    """Move units to the places of those that they talk to: first to the earliest that they read, as their activations
    are there, then a few times to the median, by bytes, of all.
    """
    sent = messages(problem)
    sender, size = sent.sender[sent.message], sent.bytes[sent.message]
    one, other = np.concatenate([sent.reader, sender]), np.concatenate([sender, sent.reader])
    read = np.arange(len(one)) < len(sender)
    weight = np.concatenate([size, size]) + 1e-9  # a message without bytes still is one
    stored = problem.per_unit(problem.graph.is_stored, np.logical_and)
    by_unit = np.flatnonzero(~stored[other])
    by_unit = by_unit[np.argsort(one[by_unit], kind="stable")]
    start = np.searchsorted(one[by_unit], np.arange(problem.num_units + 1))
    for unit in units.tolist():
        mine = by_unit[start[unit] : start[unit + 1]]
        place[unit] = place[other[mine[read[mine]]]].min(initial=place[unit])
    for _ in range(_FOLDS):
        for unit in units.tolist():
            mine = by_unit[start[unit] : start[unit + 1]]
            if len(mine):
                mine = mine[np.argsort(place[other[mine]], kind="stable")]
                half = np.searchsorted(np.cumsum(weight[mine]), weight[mine].sum() / 2)
                place[unit] = place[other[mine[half]]] + _BEHIND


def dataflow_order(p: NDArray[np.int64], q: NDArray[np.int64], rank: NDArray[np.int64]) -> NDArray[np.int64]:
    """[nodes] positions such that every edge p -> q goes up, by rank where there is a choice."""
    n = len(rank)
    edges = np.unique(p[p != q] * n + q[p != q])
    source, target = edges // n, (edges % n).tolist()
    start, waiting = np.searchsorted(source, np.arange(n + 1)).tolist(), np.bincount(edges % n, minlength=n)
    ready = [(int(rank[node]), node) for node in np.flatnonzero(waiting == 0).tolist()]
    heapify(ready)
    position = np.zeros(n, np.int64)
    for at in range(n):
        _, node = heappop(ready)
        position[node] = at
        for child in target[start[node] : start[node + 1]]:
            waiting[child] -= 1
            if waiting[child] == 0:
                heappush(ready, (int(rank[child]), child))
    return position


# ---- prefix sweep ----------------------------------------------------------------------------------------------------


@planner("prefix-sweep")
def prefix_sweep(problem: Problem, ctx: Context, *, cuts: int = 256) -> None:
    """Each prefix of the program on one device and the rest on another, then more cuts while they help.

    With two devices this is what Neurosurgeon does to a chain (Kang et al. 2017, doi:10.1145/3037697.3037698).
    Generalised: from the best so far, the first k units or all but those go to any one device, for every k, until
    nothing helps. Programs longer than `cuts` are swept in strides, which get finer around the best.
    """
    if cuts < 1:
        raise InvalidInput(f"option cuts of prefix-sweep = {cuts}: it must be 1 or more")
    sweep = _Sweep(problem, ctx, cuts)
    starts = [all_on(problem, device) for device in range(problem.num_devices)]
    best, value = min((sweep.best_from(start, suffix_only=True) for start in starts), key=lambda found: found[1])
    while np.isfinite(value) and not ctx.should_stop():
        found, improved = sweep.best_from(best)
        if not improved < value * (1 - 1e-12):
            return
        best, value = found, improved


class _Sweep:
    """Cuts through the program."""

    def __init__(self, problem: Problem, ctx: Context, cuts: int) -> None:
        self._problem, self._ctx, self._cuts = problem, ctx, cuts
        place = np.empty(problem.num_units, np.int64)
        place[program(problem)[0]] = np.arange(problem.num_units)
        self._place: NDArray[np.int64] = place[problem.unit]  # of each op's unit in the program

    def best_from(self, start: Ints, suffix_only: bool = False) -> tuple[Ints, float]:
        """The best placement where one part of the program, before or after some cut, has gone to one device."""
        best, value, n = start, np.inf, self._problem.num_units
        for device in range(self._problem.num_devices):
            gone = all_on(self._problem, device)
            for prefix in (False,) if suffix_only else (False, True):
                low, high = 0, n
                while True:
                    stride = max(1, -(-(high - low) // self._cuts))
                    at = np.arange(low, high + 1, stride)
                    k, found = self._try(start, gone, prefix, at)
                    if found < value:
                        best, value = self._row(start, gone, prefix, k), found
                    if stride == 1 or self._ctx.should_stop():
                        break
                    low, high = max(0, k - stride), min(n, k + stride)
        return best, value

    def _row(self, start: Ints, gone: Ints, prefix: bool, cut: int) -> Ints:
        return np.where((self._place < cut) == prefix, gone, start).astype(np.int32)

    def _try(self, start: Ints, gone: Ints, prefix: bool, cuts: NDArray[np.int64]) -> tuple[int, float]:
        best, value, size = int(cuts[0]), np.inf, max(1, min(64, _BATCH // max(1, len(start))))
        for low in range(0, len(cuts), size):
            if self._ctx.should_stop():
                break
            batch = cuts[low : low + size].tolist()
            values = self._ctx.evaluate_batch([self._row(start, gone, prefix, cut) for cut in batch])
            if len(values) and values.min() < value:
                best, value = batch[int(values.argmin())], float(values.min())
        return best, value


# ---- dynamic programming over stages ---------------------------------------------------------------------------------


def _compile(problem: Problem) -> None:
    _Stages(problem, np.arange(2), np.arange(3), lenient=False).solve(_device_orders(problem)[0])


@planner("pipeline-dp", objectives={"latency", "throughput"}, compile=_compile)
def pipeline_dp(problem: Problem, ctx: Context) -> Ints | None:
    """The best intervals of the program, one per device, by dynamic programming (PipeDream 2019, arXiv:1806.03377).

    For throughput the busiest stage counts, for latency the sum of all. Exact on chains where each link has a channel
    of its own; where the plan must be contiguous, that is a proof. On other graphs, what a stage exchanges with any
    earlier one is charged as if it came from the one before, and what it sends to later ones as if to the next.

    Beyond the paper: unequal devices and links, memory, any set and order of devices, each at most once, and more rows:
    units that read the same large message together, units that send more than they read late, or both; in training,
    also with backward ops that must be with their forward ops. Without it: replicated stages. Devices that are alike
    are used in turn; where too many orders remain, fastest first. In a long program stages end at some units only, then
    at any close to the best ends so found.
    """
    if not problem.num_units:
        return np.zeros(0, np.int32)
    orders, every = _device_orders(problem)
    steps = min(_STEPS, _PER_SECOND * ctx.seconds_left)
    most = int(np.clip((2 * steps / orders.pairs) ** 0.5, 8, _MOST_CUTS))
    together = colocate_backward(problem)
    forms = [problem, together] if together.num_units < problem.num_units else [problem]
    for lenient in (False, True):
        for form, reorder in product(forms, (None, _with_fellow_readers, late, _late_with_fellow_readers)):
            if reorder and ctx.should_stop():
                break
            row, cuts = program(form, reorder)
            ends, value = _spread(0, len(cuts) - 1, most + 1), np.inf
            while not (ctx.should_stop() and np.isfinite(value)):
                stages = _Stages(form, row, cuts[ends], lenient=lenient)
                placement, estimate, used = stages.solve(orders)
                if not estimate < value * (1 - 1e-9):
                    break
                if form is problem and every and not lenient and stages.prove():
                    ctx.bound(estimate * (1 - 1e-12))
                ctx.evaluate(placement)
                ends, value = _finer(ends, np.searchsorted(cuts, used), most), estimate
        if ctx.best is not None:
            return None
    return Blocks(problem).fill(fastest_first(problem), np.inf)[0]  # intervals do not fit: the driver says why


def _spread(low: int, high: int, most: int) -> NDArray[np.int64]:
    """Whole numbers from low to high: all of them, or so many in strides."""
    return np.linspace(low, high, min(high - low + 1, most)).astype(np.int64)


def _finer(ends: NDArray[np.int64], used: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Where stages may end next: anywhere between the neighbours of the ends in use, or in strides if that is much."""
    at = np.searchsorted(ends, used[1:-1])
    count = max(3, most // max(1, len(at)))
    return np.unique(np.concatenate([used, *(_spread(ends[i - 1], ends[i + 1], count) for i in at)]))


class _Orders(NamedTuple):
    """Orders in which stages may use devices, as a graph: an arc is a device and the next, after a set of others."""

    device: Ints  # [arcs] -1 before the first stage
    following: Ints  # [arcs] -1 after the last stage
    start: Ints  # [arcs + 1] the arcs that may come before arc r are before[start[r]:start[r + 1]], all below r
    before: Ints

    @property
    def pairs(self) -> int:
        """How many pairs of arcs there are: what each pair of cuts costs."""
        return max(1, len(self.before))


def _device_orders(problem: Problem) -> tuple[_Orders, bool]:
    """The orders to try, and whether no other can be better."""
    usable = [d for d in fastest_first(problem) if problem.allowed[:, d].any()]
    most = min(len(usable), problem.max_devices or len(usable))
    twin = [
        next((a for a in usable[i - 1 :: -1] if alike(problem, a, d)), -1) if i else -1 for i, d in enumerate(usable)
    ]
    orders = _orders(usable, twin, most)
    if orders:
        return orders, True
    orders = _orders(usable, [-1, *usable[:-1]], most)
    assert orders
    return orders, False


def _orders(usable: list[int], after: list[int], most: int) -> _Orders | None:
    """Every order of up to `most` devices in which usable[i] comes after after[i]; None if there are too many."""
    device, following, pairs = [-1] * len(usable), list(usable), 0
    before: list[list[int]] = [[] for _ in usable]
    entering: dict[tuple[int, int], list[int]] = {
        (1 << d, d): [arc] for arc, d in enumerate(usable) if after[arc] < 0
    }  # (set of devices, the last of them) -> arcs
    while entering:
        deeper: dict[tuple[int, int], list[int]] = {}
        for (used, d), arcs in entering.items():
            able = [e for e, a in zip(usable, after, strict=True) if not used >> e & 1 and (a < 0 or used >> a & 1)]
            for e in [-1, *(able if used.bit_count() < most else ())]:
                if e >= 0:
                    deeper.setdefault((used | 1 << e, e), []).append(len(device))
                device.append(d)
                following.append(e)
                before.append(arcs)
                pairs += len(arcs)
                if pairs > _MOST_PAIRS:
                    return None
        entering = deeper
    start = np.cumsum([0, *map(len, before)])
    flat = [arc for arcs in before for arc in arcs]
    return _Orders(*(np.array(column, np.int32) for column in (device, following, start, flat)))


class _Stages:
    """The program cut at some places, and what each stage between two cuts computes, exchanges and holds.

    Tables [cuts, cuts] are indexed by a stage's first and last cut. `lenient`: units that may not run on a stage's
    device go where they are fastest, at no charge; else no stage on that device has them.
    """

    def __init__(self, problem: Problem, row: NDArray[np.int64], ends: NDArray[np.int64], *, lenient: bool) -> None:
        self._problem, self._row, self._ends = problem, row, ends
        n = len(ends) - 1
        segment = np.empty(problem.num_units, np.int64)
        segment[row] = np.repeat(np.arange(n), np.diff(ends))
        self._segment = segment
        seconds = problem.unit_seconds
        self._allowed = np.isfinite(seconds)
        self._fastest = seconds.argmin(axis=1)
        self._compute = self._sums(np.where(self._allowed, seconds, 0.0))
        self._forbidden = self._sums((~self._allowed & (not lenient)).astype(np.float64))
        self._number, self._bytes, self._copies = np.zeros((3, 4, n + 1, n + 1))
        self._exchange()
        self._need = self._needed()

    def _sums(self, per_unit: Floats) -> Floats:
        """[cuts, ...] of everything before each cut."""
        total = np.cumsum(per_unit[self._row], axis=0)
        found: Floats = np.concatenate([np.zeros((1, *per_unit.shape[1:])), total])[self._ends]
        return found

    def _exchange(self) -> None:
        """How many messages, and bytes, a stage gets from the left and sends there, sends to the right and gets.

        Third, the bytes that whoever gets them holds.
        """
        problem, sent = self._problem, messages(self._problem)
        pipelined = problem.objective == "throughput"
        often = sent_share(problem)[sent.tensor] if pipelined else np.ones(len(sent.tensor))
        weights = (often, often * sent.bytes, held_bytes(problem)[1][sent.tensor])
        p, q = self._segment[sent.sender[sent.message]], self._segment[sent.reader]
        away = p != q
        m, p, q = sent.message[away], p[away], q[away]
        order = np.lexsort((q, m))
        m, p, q = m[order], p[order], q[order]
        n = len(self._ends) - 1
        for cut in range(1, n):
            for crosses, of_sender, of_reader, first in (
                ((p < cut) & (q >= cut), 2, 0, 1),  # to the right: the first reader fetches it
                ((p >= cut) & (q < cut), 1, 3, -1),  # to the left: the last one does
            ):
                which = np.flatnonzero(crosses)[::first]
                which = which[np.unique(m[which], return_index=True)[1]]
                for kind, place in ((of_sender, p[which]), (of_reader, q[which])):
                    for table, weight in zip((self._number, self._bytes, self._copies), weights, strict=True):
                        inside = np.bincount(place, weight[m[which]], n)
                        if kind < 2:  # the cut is where the stage begins, and it ends anywhere after
                            table[kind, cut, cut + 1 :] = np.cumsum(inside[cut:])
                        else:
                            table[kind, :cut, cut] = np.cumsum(inside[:cut][::-1])[::-1]

    def _needed(self) -> Floats:
        """[cuts, cuts] bytes that a stage needs on its device."""
        problem, total = self._problem, self._sums(bytes_needed(self._problem))
        need: Floats = total[None, :] - total[:, None]
        if problem.objective == "throughput":
            need += self._copies[0] + self._copies[3]
        if problem.objective == "throughput" and problem.execution.memory == "live":
            scratch = np.zeros(len(self._ends) - 1)
            np.maximum.at(scratch, self._segment, problem.per_unit(problem.graph.scratch, np.maximum))
            for cut in range(len(scratch)):
                need[cut, cut + 1 :] += np.maximum.accumulate(scratch[cut:])
        return need

    def solve(self, orders: _Orders) -> tuple[Ints, float, NDArray[np.int64]]:
        """(placement, its value, where stages begin and end); the value is infinite if no intervals fit."""
        problem, cluster = self._problem, self._problem.cluster
        pipelined = problem.objective == "throughput"
        room = problem.capacity if pipelined else problem.capacity - headroom(problem)
        pays = np.array([device.copies for device in cluster.devices])
        queues = problem.execution.contention == "channel"
        value, cuts, devices = _best_stages(
            *orders, self._compute, self._forbidden, self._number, self._bytes, self._need, room,
            cluster.latency, cluster.seconds_per_byte, pays, pipelined, problem.execution.overlap, queues,
        )  # fmt: skip
        if not np.isfinite(value):
            return np.zeros(problem.num_ops, np.int32), value, self._ends[[0, -1]]
        stage = np.repeat(devices[::-1], np.diff(cuts[::-1]))[self._segment]
        home = np.where(self._allowed[np.arange(len(stage)), stage], stage, self._fastest)
        return home[problem.unit].astype(np.int32), value, self._ends[cuts[::-1]]

    def prove(self) -> bool:
        """Whether no contiguous plan for throughput is better than the best stages.

        Contiguous plans of a connected chain are intervals. Their loads are what is computed here if each unit only
        talks to its neighbours, no two links share a channel, and nothing is added up over phases or shared out.
        """
        problem, graph = self._problem, self._problem.graph
        execution = problem.execution
        forward = (graph.phase[graph.edge_producer] == 0) & (graph.phase[graph.consumers] == 0)
        forward &= ~graph.is_stored[graph.edge_producer]
        p, q = (self._segment[problem.unit[end]] for end in (graph.edge_producer, graph.consumers))
        joined = np.unique(p[forward & (q == p + 1)])
        return bool(
            len(self._ends) == problem.num_units + 1
            and not execution.replicate
            and problem.objective == "throughput"
            and problem.contiguous
            and len(joined) == problem.num_units - 1
            and (np.abs(p - q) <= 1).all()
            and (execution.contention == "none" or not problem.cluster.has_shared_channels)
            and (execution.pipeline == "1f1b" or (graph.phase == 0).all())
        )


@njit(cache=True, nogil=True)
def _best_stages(  # type: ignore[no-untyped-def]
    device, following, start, before, compute, forbidden, number, size, need, room, latency, per_byte, pays,
    pipelined, overlap, queues,
):  # fmt: skip
    """(value, cuts from the last to the first, devices from the last to the first)."""
    arcs, n = len(device), len(compute) - 1
    value = np.full((arcs, n + 1), np.inf)  # of the stages up to a cut, where the next one is on following[r]
    from_arc, from_cut = np.zeros((arcs, n + 1), np.int32), np.zeros((arcs, n + 1), np.int32)
    best, best_arc = np.inf, -1
    for r in range(arcs):
        d, e = device[r], following[r]
        if d < 0:
            value[r, 0] = 0.0
            continue
        for x in range(start[r], start[r + 1]):
            other = before[x]
            c = device[other]
            for i in range(1 if e >= 0 else n, n + 1 if e < 0 else n):
                for j in range(i):
                    so_far = value[other, j]
                    if not so_far < value[r, i] or need[j, i] > room[d] or forbidden[i, d] > forbidden[j, d]:
                        continue
                    stage, left_in, left_out, right = compute[i, d] - compute[j, d], 0.0, 0.0, 0.0
                    if c >= 0:
                        left_in = number[0, j, i] * latency[c, d] + size[0, j, i] * per_byte[c, d]
                        left_out = number[1, j, i] * latency[d, c] + size[1, j, i] * per_byte[d, c]
                    if pipelined:
                        if e >= 0:
                            right = number[2, j, i] * latency[d, e] + size[2, j, i] * per_byte[d, e]
                            right += number[3, j, i] * latency[e, d] + size[3, j, i] * per_byte[e, d]
                        moved = left_in + left_out + right if pays[d] else 0.0
                        load = max(stage, moved) if overlap else stage + moved
                        if queues:
                            load = max(load, left_in, left_out)
                        total = max(so_far, load)
                    else:
                        total = so_far + stage + left_in + left_out
                    if total < value[r, i]:
                        value[r, i] = total
                        from_arc[r, i], from_cut[r, i] = other, j
        if e < 0 and value[r, n] < best:
            best, best_arc = value[r, n], r
    cuts, devices = np.zeros(n + 1, np.int64), np.zeros(n, np.int64)
    stages, r, i = 0, best_arc, n
    cuts[0] = n
    while i > 0 and best_arc >= 0:
        devices[stages] = device[r]
        r, i = from_arc[r, i], from_cut[r, i]
        stages += 1
        cuts[stages] = i
    return best, cuts[: stages + 1], devices[:stages]
