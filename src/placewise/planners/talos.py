"""Talos: ops of several models, placed step by step by a minimum-cost flow over weighted speedups, then reassigned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from placewise.driver import Context
from placewise.graph import Floats, Ints
from placewise.planners import planner
from placewise.planners.blocks import fastest_first, headroom
from placewise.planners.heft import schedule
from placewise.planners.order_search import compile_search, improve, strict_only
from placewise.problem import Problem

_RESOLUTION = 2.0**44  # flows have whole costs


@planner("talos", objectives={"latency", "completion"}, supports=strict_only, compile=compile_search)
def talos(problem: Problem, ctx: Context, *, sv: float = 2.0, tv: float = 0.01, moves: int = 500) -> None:
    """Minimum-cost flow over weighted speedups, then reassignment (Talos, ASAP 2021, doi:10.1109/ASAP52443.2021.00023).

    Neighbours whose speedups are within a factor `sv` are packed until a pack takes `tv` seconds on the slowest device;
    `sv=0` packs nothing. Reassignment tries `moves` changes per op and round; `moves=0` leaves it out. Departures from
    the paper are in docs/talos.md. Where time runs out before all ops are placed, the answer is HEFT's.
    """
    found = place(problem, ctx, pack(problem, sv, tv))
    placement, order = schedule(problem) if found is None else found
    ctx.evaluate(placement, order)
    for _ in improve(ctx, placement, order, moves):
        pass


# ---- the formulas ----------------------------------------------------------------------------------------------------


def cost(finish: Floats, ended: Floats) -> Floats:
    """[ops, D] Eq. 4: by how much an op that finishes then would delay the end of its model (ended [ops])."""
    return np.maximum(finish - ended[:, None], 0.0)


def weighted_speedup(costs: Floats, reference: int) -> Floats:
    """[ops, D] the cost on the reference device over the cost on each; 1 where both are nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(costs == costs[:, [reference]], 1.0, costs[:, [reference]] / costs)


def distance(a: Floats, b: Floats) -> float:
    """Eq. 2: how far apart the speedups of two models are, op by op, as far as both go."""
    both = min(len(a), len(b))
    return float(np.abs(a[:both] - b[:both]).sum())


def hellinger(a: Floats, b: Floats) -> float:
    """The distance that the paper's tables come from: of sorted speedups as shares of their sum, from 0 to 1."""
    longest = max(len(a), len(b))
    p, q = (np.pad(np.sort(x) / x.sum(), (longest - len(x), 0)) for x in (a, b))
    return float(np.sqrt(((np.sqrt(p) - np.sqrt(q)) ** 2).sum() / 2))


def affinity(distance: float, common: float, total: float) -> float:
    """Eq. 3: a distance over the share of op names that two models have in common. Higher: more is to be gained."""
    return distance / (common / total)


# ---- packing ---------------------------------------------------------------------------------------------------------


def pack(problem: Problem, sv: float, tv: float) -> list[list[int]]:
    """The ops that compute, in packs that are placed as one, in topological order.

    An op joins the one whose only reader it is and which is all that it reads: what is fused along such links has no
    cycle. Its speedup on each device must be within a factor `sv` of that of the pack's first op, and the pack shorter
    than `tv` on the slowest device. (The paper packs chains, which are all links of this kind.)
    """
    graph, slowest = problem.graph, fastest_first(problem)[-1] if problem.num_devices else 0
    runs = ~graph.is_stored
    links = np.flatnonzero(runs[graph.edge_producer])
    pairs = np.unique(np.stack([graph.edge_producer[links], graph.consumers[links]], axis=1), axis=0)
    readers = np.bincount(pairs[:, 0], minlength=graph.num_ops)
    reads = np.bincount(pairs[:, 1], minlength=graph.num_ops)
    before = dict(zip(pairs[:, 1].tolist(), pairs[:, 0].tolist(), strict=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        speedup = problem.seconds[:, [slowest]] / problem.seconds
    in_group = np.bincount(problem.unit, minlength=problem.num_units)[problem.unit] > 1
    packs: list[list[int]] = []
    pack_of: dict[int, int] = {}
    length: list[float] = []
    for op in graph.topological_order[runs[graph.topological_order]].tolist():
        last = before.get(op, -1)
        joins = reads[op] == 1 and readers[last] == 1 and graph.model[op] == graph.model[last] and sv > 0
        if joins and not (in_group[op] or in_group[last]) and (problem.allowed[op] == problem.allowed[last]).all():
            first = packs[pack_of[last]][0]
            able = np.isfinite(speedup[op]) & np.isfinite(speedup[first])
            near = (speedup[op] <= speedup[first] * sv) & (speedup[op] * sv >= speedup[first])
            joins = bool(near[able].all()) and length[pack_of[last]] < tv
        else:
            joins = False
        if not joins:
            packs.append([])
            length.append(0.0)
        pack_of[op] = pack_of[last] if joins else len(packs) - 1
        packs[pack_of[op]].append(op)
        time = problem.seconds[op]
        length[pack_of[op]] += float(time[slowest] if np.isfinite(time[slowest]) else time[np.isfinite(time)].max())
    return packs


# ---- the flow --------------------------------------------------------------------------------------------------------


def place(problem: Problem, ctx: Context, packs: Sequence[Sequence[int]]) -> tuple[Ints, Ints] | None:
    """(placement, order), or None where time runs out first.

    A step is all packs whose inputs are placed. While there are some, a flow sends one pack to each device at the least
    total cost; the cheapest of these is committed, which changes the costs of the others, and the flow is solved again.
    """
    graph, homes = problem.graph, Homes(problem)
    one_by_one = problem.objective == "completion"
    seconds = [problem.seconds[ops].sum(axis=0) for ops in map(list, packs)]
    pack_of = np.full(graph.num_ops, -1)
    for p, ops in enumerate(packs):
        pack_of[list(ops)] = p
    inner = (pack_of[graph.edge_producer] == pack_of[graph.consumers]) | graph.is_stored[graph.edge_producer]
    waiting = np.bincount(pack_of[graph.consumers[~inner]], minlength=len(packs))
    start, out = graph.out_edges
    free, ended = np.zeros(problem.num_devices), np.zeros(len(graph.models))
    finish = np.zeros(graph.num_ops)
    order: list[int] = np.flatnonzero(graph.is_stored).tolist()
    step = np.flatnonzero(waiting == 0).tolist()
    while step:
        arrival = np.array([homes.arrival(packs[p], finish) for p in step])
        may = np.array([homes.may(packs[p]) for p in step])
        needed = np.array([seconds[p] for p in step])
        of_model = np.array([graph.model[packs[p][0]] if one_by_one else 0 for p in step])
        left, following = np.arange(len(step)), []
        while len(left):
            if ctx.should_stop():
                return None
            ends = np.where(may[left], np.maximum(free, arrival[left]) + needed[left], np.inf)
            i, d = _cheapest_of_flow(cost(ends, ended[of_model[left]]), ends)
            row = left[i]
            p = step[row]
            may[row] = homes.may(packs[p])  # there may be less room by now, or one of its group may have a home
            if not may[row, d]:
                continue
            homes.settle(packs[p], d)
            time = max(free[d], arrival[row, d])
            for op in packs[p]:
                time += problem.seconds[op, d]
                finish[op] = time
                for reader in graph.consumers[out[start[op] : start[op + 1]]].tolist():
                    if pack_of[reader] != p:
                        waiting[pack_of[reader]] -= 1
                        if waiting[pack_of[reader]] == 0:
                            following.append(int(pack_of[reader]))
            free[d] = time
            ended[of_model[row]] = max(ended[of_model[row]], time)
            order.extend(packs[p])
            left = np.delete(left, i)
        step = sorted(following)
    return homes.placement(), np.array(order, np.int32)


def _cheapest_of_flow(costs: Floats, ends: Floats) -> tuple[int, int]:
    """(row, device) of the cheapest arc in a minimum-cost flow that sends at most one op to each device.

    Between arcs of equal cost, the earlier end decides, then the larger weighted speedup.
    """
    able = np.isfinite(costs)
    worst = np.where(able, costs, 0.0).max(axis=1, keepdims=True)
    latest = np.where(able, ends, 0.0).max()
    price = costs / (worst.max() or 1.0) + 1e-8 * ends / (latest or 1.0) + 1e-11 * costs / np.where(worst, worst, 1.0)
    devices = costs.shape[1]
    rows = np.arange(len(costs))
    if len(rows) > devices**2:  # a device is sent none but one of the D ops that are cheapest there
        rows = np.unique(np.argpartition(price, devices, axis=0)[:devices])
    op, device = np.nonzero(able[rows])
    whole = np.rint(price[rows[op], device] * _RESOLUTION).astype(np.int64)
    if len(rows) == 1 or devices == 1:  # one path: no flow needed
        best = int(whole.argmin())
        return int(rows[op[best]]), int(device[best])
    from ortools.graph.python.min_cost_flow import SimpleMinCostFlow  # here, as it takes a moment to import

    flow = SimpleMinCostFlow()
    used = np.unique(device)
    source, sink, first_device = len(rows), len(rows) + 1, len(rows) + 2
    tails = np.concatenate([op, np.full(len(rows), source), first_device + used])
    heads = np.concatenate([first_device + device, np.arange(len(rows)), np.full(len(used), sink)])
    prices = np.concatenate([whole, np.zeros(len(rows) + len(used), np.int64)])
    flow.add_arcs_with_capacity_and_unit_cost(tails, heads, np.ones(len(tails), np.int64), prices)
    amount = min(len(rows), len(used))
    flow.set_nodes_supplies(np.array([source, sink]), np.array([amount, -amount]))
    flow.solve_max_flow_with_min_cost()
    carries = np.flatnonzero(flow.flows(np.arange(len(op))) > 0)
    best = int(carries[whole[carries].argmin()])
    return int(rows[op[best]]), int(device[best])


# ---- where things are ------------------------------------------------------------------------------------------------


class Homes:
    """Where units live while a plan is made, and the room that is left."""

    def __init__(self, problem: Problem) -> None:
        graph, self._problem = problem.graph, problem
        self._device = np.full(problem.num_units, -1)
        self._bytes = problem.per_unit(graph.resident_bytes)
        self._room = problem.capacity - headroom(problem)
        self._start, edges = graph.in_edges
        self._producer, self._size = graph.edge_producer[edges], graph.tensor_bytes[graph.edge_tensor[edges]]

    def may(self, ops: Sequence[int]) -> NDArray[np.bool_]:
        """[D] where ops may go together: with room for what they read too, else for them, else for want of room."""
        units = self._problem.unit[list(ops)]
        allowed = np.logical_and.reduce(self._problem.allowed[list(ops)])
        home = self._device[units].max()
        if home >= 0:
            allowed = allowed & (np.arange(len(allowed)) == home)
        own = self._bytes[np.unique(units[self._device[units] < 0])].sum()
        read = {int(self._problem.unit[op]) for op in self._homeless(ops)} - set(units.tolist())
        for need in (own + sum(self._bytes[unit] for unit in sorted(read)), own):
            fits: NDArray[np.bool_] = allowed & (need <= self._room)
            if fits.any():
                return fits
        return np.asarray(allowed)

    def settle(self, ops: Sequence[int], device: int) -> None:
        """Give ops their home, and the parameters that they read: with them if there is room, else where most is."""
        for op in ops:
            self._move_in(op, device)
        for op in self._homeless(ops):
            self._find_home(op, device)

    def arrival(self, ops: Sequence[int], finish: Floats) -> Floats:
        """[D] when all that ops read, but what they make themselves, is on each device, without contention."""
        cluster, there = self._problem.cluster, np.zeros(self._problem.num_devices)
        for op in ops:
            for i in range(self._start[op], self._start[op + 1]):
                a = self._device[self._problem.unit[self._producer[i]]]
                if a >= 0 and self._producer[i] not in ops:
                    sent = cluster.latency[a] + self._size[i] * cluster.seconds_per_byte[a]
                    sent[a] = 0.0
                    there = np.maximum(there, finish[self._producer[i]] + sent)
        return there

    def placement(self) -> Ints:
        """[N] the device of each op; parameters that nobody reads go where there is room."""
        for op in np.flatnonzero(self._device[self._problem.unit] < 0).tolist():
            self._find_home(op, None)
        return self._device[self._problem.unit].astype(np.int32)

    def _homeless(self, ops: Sequence[int]) -> list[int]:
        """What ops read that has no home yet: parameters."""
        read = [int(i) for op in ops for i in self._producer[self._start[op] : self._start[op + 1]]]
        return [op for op in read if self._device[self._problem.unit[op]] < 0 and self._problem.graph.is_stored[op]]

    def _find_home(self, op: int, device: int | None) -> None:
        size, allowed = self._bytes[self._problem.unit[op]], self._problem.allowed[op]
        if device is None or not allowed[device] or size > self._room[device]:
            device = int(np.where(allowed, self._room, -np.inf).argmax())
        self._move_in(op, device)

    def _move_in(self, op: int, device: int) -> None:
        unit = self._problem.unit[op]
        if self._device[unit] < 0:
            self._device[unit] = device
            self._room[device] -= self._bytes[unit]
