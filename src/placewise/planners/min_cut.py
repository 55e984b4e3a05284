"""Minimum cuts: exact for a sequential engine with two devices, moves of many units at once for more.

In a sequential engine the latency is a sum: the time of each unit on its device, and of each tensor to each other
device that reads it. Which units change from their device to another one, all at once, is then a minimum s-t cut: units
on the source's side stay, those on the sink's side go. A tensor that several units read gets a node of its own in each
direction, so that it is paid for once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from placewise.driver import Context
from placewise.graph import Floats, Ints
from placewise.planners import planner
from placewise.planners.fit import Necessary, saving_order
from placewise.planners.local_search import climb
from placewise.planners.moves import UnitMoves, compile_moves
from placewise.planners.repair import messages, settled
from placewise.planners.single import all_on
from placewise.problem import Problem

_TOTAL = 2.0**59  # what all capacities add up to as integers
_ENDLESS = 2**60
_SLACK = 1e-12  # relative; above what rounding in sums can amount to
_CLOSED = 1e-9  # a gap that is none
_SMALL = 2000  # choices, of units and of messages, that are left to a solver
_TICKS = 2.0**45  # in all costs together
_EFFORT = 2.0  # of the solver at a time: about so many seconds, but the same on every machine

Flags = NDArray[np.bool_]
Indices = NDArray[np.int64]


def _applies(problem: Problem) -> bool | str:
    return "ignores contiguity and device counts" if problem.contiguous or problem.max_devices else True


@planner("min-cut", objectives={"latency"}, supports=_applies, compile=compile_moves)
def min_cut(problem: Problem, ctx: Context, *, rounds: int = 50, patience: int = 10) -> None:
    """The least sum of op and transfer times by s-t minimum cuts; optimal for two devices of a sequential engine.

    Two devices: one cut (Stone 1977, doi:10.1109/TSE.1977.233840), and where memory binds, a price per byte that
    bisection finds. More: alpha-expansion (Boykov, Veksler, Zabih 2001, doi:10.1109/34.969114) until no device can
    attract any set of units; then `rounds` of a Lagrangian relaxation that proves a bound and prices memory. Plans that
    overfill a device are repaired by moving the units that cost least per byte; the best of them is then improved by
    moves and swaps until `patience` per unit have failed in a row. What is then not proved is left to CP-SAT where the
    graph is small: the least sum among placements that keep what every plan that fits must keep. Where ops run in
    parallel, the sum is no bound and the method a heuristic.

    Beyond the papers: a tensor with several readers is paid for once per device. For three devices or more an expansion
    then minimises an upper bound that is tight at the current placement (exact for tensors with one reader and links
    that keep the triangle inequality), so no expansion makes the sum worse.
    """
    if not problem.num_units or problem.num_devices == 1:
        ctx.evaluate(np.zeros(problem.num_ops, np.int32))
        return
    total, proves = _Sum(problem), problem.execution.concurrency == "sequential"
    (_two_devices if problem.num_devices == 2 else _many_devices)(total, ctx, rounds, proves)
    for device in range(problem.num_devices):
        if ctx.best is None and not ctx.should_stop():  # cuts do not see activations, which can be too much for each
            total.judge(ctx, all_on(problem, device)[problem.first_of_unit])
    if ctx.best is not None and total.repaired:
        _polish(problem, ctx, patience)
    small = (total.units + len(total.sent.reader) * problem.num_devices) * problem.num_devices <= _SMALL
    if proves and small and ctx.lower_bound < ctx.best_value * (1 - _CLOSED):
        _decide(total, ctx)
    if ctx.best is None:
        ctx.delegate("fit")


def _polish(problem: Problem, ctx: Context, patience: int) -> None:
    """What repair moved, it moved one by one and by estimates: the moves of local search set that right."""
    assert ctx.best is not None
    for _ in climb(ctx, ctx.best[0], [UnitMoves(problem, ctx.rng)], patience, kicks=0):
        pass


def _decide(total: _Sum, ctx: Context) -> None:
    """The least sum of a placement that keeps what every plan that fits must keep, by CP-SAT.

    If it fits, it is the best. If not, the next best one comes; some other order may yet make room for the one before,
    so what is proved stays. Seconds are whole numbers of ticks, rounded down.
    """
    from ortools.sat.python import cp_model

    problem, sent, necessary = total.problem, total.sent, Necessary(total.problem)
    model, on = necessary.model, necessary.on
    finite = np.where(np.isfinite(total.seconds), total.seconds, 0.0)
    pairs = [(a, d) for a in range(problem.num_devices) for d in range(problem.num_devices) if a != d]
    moves = {pair: sent.seconds(problem, *pair) for pair in pairs}
    tick = max(float(finite.sum()) + sum(float(move.sum()) for move in moves.values()), 1e-200) / _TICKS
    costs = [(x, float(finite[u, d])) for u, row in enumerate(on) for d, x in enumerate(row) if x is not None]
    readers: dict[int, list[int]] = {}
    for message, reader in zip(sent.message.tolist(), sent.reader.tolist(), strict=True):
        readers.setdefault(message, []).append(reader)
    for message, units in readers.items():
        for a, d in pairs:
            there, here = [on[u][d] for u in units if on[u][d] is not None], on[sent.sender[message]][a]
            if there and here is not None and moves[a, d][message] > 0:
                goes = model.new_bool_var("")
                for x in there:
                    model.add_bool_or([~here, ~x, goes])
                costs.append((goes, float(moves[a, d][message])))
    model.minimize(sum(int(seconds / tick * (1 - 1e-15)) * x for x, seconds in costs))
    proving = True
    while not ctx.should_stop():
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        # With presolve, OR-tools 9.15 calls models impossible that are not (its issue 5274): no basis for a proof.
        solver.parameters.cp_model_presolve = False
        solver.parameters.max_deterministic_time = _EFFORT
        solver.parameters.max_time_in_seconds = max(min(ctx.seconds_left, 1e6), 1e-3)
        status = solver.solve(model)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) and proving:
            ctx.bound(solver.best_objective_bound * tick * (1 - _SLACK))
        if status != cp_model.OPTIMAL or solver.objective_value * tick >= ctx.best_value * (1 - _CLOSED):
            return
        device = [next(d for d, x in enumerate(row) if x is not None and solver.boolean_value(x)) for row in on]
        placement = np.array(device, np.int32)[problem.unit]
        for order in (None, saving_order(problem)):
            if ctx.evaluations_left and np.isfinite(ctx.evaluate(placement, order)):
                return
        model.add_bool_or([~row[d] for row, d in zip(on, device, strict=True)])
        proving = False


def _two_devices(total: _Sum, ctx: Context, rounds: int, proves: bool) -> None:
    """The optimum where memory does not bind; else a price for a byte on one device rather than the other."""
    capacity, start = total.problem.capacity, np.zeros(total.units, np.int32)

    def cut(difference: float) -> Flags:
        """Which devices are too full at this difference of prices."""
        price = np.array([max(difference, 0.0), max(-difference, 0.0)])
        device, value = total.expand(start, 1, price)
        if proves:
            paid = price > 0  # a price is only ever asked of memory that is limited
            ctx.bound(value * (1 - _SLACK) - float((price[paid] * capacity[paid]).sum()))
        return total.judge(ctx, device)

    full = cut(0.0)
    if not full.any() or full.all():
        return
    crowded = int(full.argmax())
    sign = 1.0 if crowded == 0 else -1.0
    low, high = 0.0, total.dearest()
    for _ in range(rounds):
        if ctx.should_stop():
            return
        # The first try is steep, then halves: most prices that matter are far below the dearest.
        middle = high / 16 if low == 0 else (low * high) ** 0.5
        if not low < middle < high or high < low * (1 + 1e-9):
            return
        low, high = (middle, high) if cut(sign * middle)[crowded] else (low, middle)


def _many_devices(total: _Sum, ctx: Context, rounds: int, proves: bool) -> None:
    problem = total.problem
    free = np.zeros(problem.num_devices)
    best, least = np.zeros(total.units, np.int32), np.inf
    for start in range(problem.num_devices):
        if ctx.should_stop():
            return
        device, value = total.descend(all_on(problem, start)[problem.first_of_unit], free, ctx)
        total.judge(ctx, device)
        if value < least:
            best, least = device, value
    limited = np.isfinite(problem.capacity)
    binds = bool(total.too_full(best).any())
    relaxed = _Relaxation(total)
    for k in range(rounds):
        if ctx.should_stop() or not (proves or binds):
            return
        bound = relaxed.bound()
        if proves:
            ctx.bound(bound * (1 - _SLACK))
        goal = ctx.best_value if proves and np.isfinite(ctx.best_value) else max(least, bound * 1.05)
        relaxed.step(goal)
        if binds and limited.any() and k % 5 == 4:
            best, _ = total.descend(best, relaxed.price, ctx)
            total.judge(ctx, best)


class _Sum:
    """The latency of a sequential engine as a sum over units and messages, with a price for bytes."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.units, self.repaired = problem, problem.num_units, False
        self.seconds: Floats = problem.unit_seconds
        self.resident: Floats = problem.per_unit(problem.graph.resident_bytes)
        self.sent = messages(problem)

    def dearest(self) -> float:
        """A price per byte at which any unit with bytes leaves the device."""
        finite = self.seconds[np.isfinite(self.seconds)]
        most = float(finite.sum()) + sum(
            float(self.sent.seconds(self.problem, a, b).sum())
            for a in range(self.problem.num_devices)
            for b in range(self.problem.num_devices)
        )
        return most / float(self.resident[self.resident > 0].min(initial=1.0))

    def too_full(self, device: Ints) -> Flags:
        """[D] which devices cannot even hold what is resident."""
        used = np.bincount(device, self.resident, self.problem.num_devices)
        full: Flags = used > self.problem.capacity
        return full

    def judge(self, ctx: Context, device: Ints) -> Flags:
        """Evaluate a placement, repaired where it must be; returns which devices were too full."""
        found = settled(self.problem, ctx, device)
        self.repaired = self.repaired or not np.array_equal(found, device)
        return self.too_full(device)

    def descend(self, device: Ints, price: Floats, ctx: Context) -> tuple[Ints, float]:
        """Expand each device in turn until none gains."""
        value, idle, target = np.inf, 0, 0
        while idle < self.problem.num_devices and not ctx.should_stop():
            device, found = self.expand(device, target, price)
            idle = 0 if found < value * (1 - 1e-9) else idle + 1
            value, target = min(found, value), (target + 1) % self.problem.num_devices
        return device, value

    def expand(self, device: Ints, target: int, price: Floats) -> tuple[Ints, float]:
        """Let the best set of units go to one device: (device of each unit, a bound on the sum over all such sets).

        With two devices and all units on the other one, the bound is the minimum of the sum itself.
        """
        problem, sent, d = self.problem, self.sent, self.problem.num_devices
        cost = self.seconds + np.multiply.outer(self.resident, price)
        stay, go = cost[np.arange(self.units), device], cost[:, target]
        cut = _Cut(stay, np.where(device == target, np.inf, go))

        at, reader_at = device[sent.sender], device[sent.reader]
        move = sent.seconds(problem, at, target)  # of each message to the target, while its sender stays
        # Readers that stay, in groups by device: each group is sent its own copy.
        staying = reader_at != target
        group, inverse = np.unique(sent.message[staying] * d + reader_at[staying], return_inverse=True)
        m, to = group // d, (group % d).astype(np.int32)
        readers = sent.reader[staying]
        size = sent.bytes[m]
        latency, per_byte = problem.cluster.latency, problem.cluster.seconds_per_byte
        before = latency[at[m], to] + size * per_byte[at[m], to]  # zero where sender and readers share a device
        after = latency[target, to] + size * per_byte[target, to]
        gone = at[m] == target  # senders that are on the target already
        more = np.where(gone, 0.0, before - after)
        cut.any_stays(np.full(len(m), cut.sink), np.where(gone, after, np.minimum(before, after)), inverse, readers)
        cut.any_stays(cut.node[sent.sender[m]], np.maximum(-more, 0.0), inverse, readers)
        cut.stays(sent.sender[m], np.maximum(more, 0.0))
        # Readers that go, while the sender stays: one copy, which is there already if the target reads the message.
        reads = np.bincount(sent.message, reader_at == target, len(sent.sender)) > 0
        cut.stays(sent.sender[reads], move[reads])
        single = np.bincount(sent.message, minlength=len(sent.sender)) == 1
        known = np.zeros(len(sent.sender))
        known[m] = np.where(single[m], np.maximum(more, 0.0), 0.0)
        copy = np.where(reads | (at == target), 0.0, np.maximum(move - known, 0.0))
        cut.any_goes(cut.node[sent.sender], copy, sent.message, sent.reader)
        goes, value = cut.solve()
        return np.where(goes, target, device).astype(np.int32), value


class _Relaxation:
    """A lower bound on the sum: each device claims units by itself, and prices make them agree.

    A unit pays `reward` to whoever claims it. A device claims the set that leaves it most after the seconds, the price
    of the bytes and half of each transfer that enters or leaves the set, at its cheapest: a minimum cut. The rewards
    and what all devices lose prove a bound, whatever the rewards. It begins with the sum of the minima.
    """

    def __init__(self, total: _Sum) -> None:
        problem, self._total = total.problem, total
        self.price = np.zeros(problem.num_devices)
        self._reward: Floats = total.seconds.min(axis=1)
        self._capacity = np.where(np.isfinite(problem.capacity), problem.capacity, 0.0)
        self._bytes = max(float(total.resident.sum()), 1.0)
        self._bound, self._best, self._stalled, self._pace = 0.0, -np.inf, 0, 1.0
        self._claims = np.zeros((total.units, problem.num_devices))

    def bound(self) -> float:
        """What the prices prove."""
        total, sent, devices = self._total, self._total.sent, self._total.problem.num_devices
        value = float(self._reward.sum()) - float((self.price * self._capacity).sum())
        for d in range(devices):
            others = [other for other in range(devices) if other != d]
            leaving = np.min([sent.seconds(total.problem, d, other) for other in others], axis=0)
            entering = np.min([sent.seconds(total.problem, other, d) for other in others], axis=0)
            claim = total.seconds[:, d] + self.price[d] * total.resident - self._reward
            cut = _Cut(np.zeros(total.units), claim)
            cut.any_stays(cut.node[sent.sender], leaving / 2, sent.message, sent.reader)
            cut.any_goes(cut.node[sent.sender], entering / 2, sent.message, sent.reader)
            self._claims[:, d], loss = cut.solve()
            value += loss
        self._bound = value
        self._stalled = 0 if value > self._best else self._stalled + 1
        self._best = max(self._best, value)
        if self._stalled == 3:
            self._pace, self._stalled = self._pace / 2, 0
        return value

    def step(self, goal: float) -> None:
        """Raise the reward of units that nobody claims, and the price where too much is claimed (Polyak's step)."""
        missing = 1.0 - self._claims.sum(axis=1)
        limited = np.isfinite(self._total.problem.capacity)
        over = np.where(limited, (self._total.resident @ self._claims - self._capacity) / self._bytes, 0.0)
        over = np.where((self.price <= 0) & (over < 0), 0.0, over)
        norm = float((missing**2).sum() + (over**2).sum())
        if norm > 0:
            length = self._pace * max(goal - self._bound, 0.0) / norm
            self._reward = self._reward + length * missing
            self.price = np.maximum(self.price + length * over / self._bytes, 0.0)


class _Cut:
    """A minimum s-t cut over units, on integers: capacities are rounded down, so that its value is a lower bound."""

    def __init__(self, stay: Floats, go: Floats) -> None:
        """What it costs that each unit stays or goes; infinite where it cannot, though not both."""
        units = len(stay)
        self.source, self.sink, self._nodes = units, units + 1, units + 2
        stays, goes = np.isinf(go), np.isinf(stay)
        self.node: Indices = np.where(stays, self.source, np.where(goes, self.sink, np.arange(units)))
        free = ~stays & ~goes
        self._base = float(stay[stays].sum() + go[goes].sum() + np.minimum(stay, go)[free].sum())
        self._arcs: list[tuple[Any, Any, Any]] = [([self.source], [self.sink], [0.0])]
        more = go[free] - stay[free]
        self._add(self.source, self.node[free], np.maximum(more, 0.0))
        self._add(self.node[free], self.sink, np.maximum(-more, 0.0))

    def stays(self, unit: Indices, cost: Floats) -> None:
        """Costs so much each if the unit stays."""
        self._add(self.node[unit], self.sink, cost)

    def any_goes(self, owner: Indices, cost: Floats, group: Indices, unit: Indices) -> None:
        """Costs so much for each group of which a unit goes while the owner of the group stays."""
        through, inner, outer = self._junctions(cost, group, unit)
        self._add(owner, through, cost)
        self._add(inner, outer, np.full(len(inner), np.inf))

    def any_stays(self, owner: Indices, cost: Floats, group: Indices, unit: Indices) -> None:
        """Costs so much for each group of which a unit stays while the owner of the group goes."""
        through, inner, outer = self._junctions(cost, group, unit)
        self._add(through, owner, cost)
        self._add(outer, inner, np.full(len(inner), np.inf))

    def _junctions(self, cost: Floats, group: Indices, unit: Indices) -> tuple[Indices, Indices, Indices]:
        """A node for each group, which is the unit itself where there is only one; (nodes, junction and unit pairs)."""
        through = self._nodes + np.arange(len(cost))
        self._nodes += len(cost)
        single = np.bincount(group, minlength=len(cost))[group] == 1
        through[group[single]] = self.node[unit[single]]
        pays = ~single & (cost[group] > 0)
        return through, through[group[pays]], self.node[unit[pays]]

    def _add(self, tail: Any, head: Any, capacity: Floats) -> None:
        tail, head = np.broadcast_to(tail, capacity.shape), np.broadcast_to(head, capacity.shape)
        useful = (capacity > 0) & (tail != head) & (head != self.source) & (tail != self.sink)
        self._arcs.append((tail[useful], head[useful], capacity[useful]))

    def solve(self) -> tuple[Flags, float]:
        """(which units go, the value of the cut, or hardly less)."""
        from ortools.graph.python.max_flow import SimpleMaxFlow

        tail, head, capacity = (np.concatenate(column) for column in zip(*self._arcs, strict=True))
        endless = np.isinf(capacity)
        scale = _TOTAL / max(float(capacity[~endless].sum()), 1e-200)
        whole = np.where(endless, _ENDLESS, np.floor(np.where(endless, 0.0, capacity) * scale)).astype(np.int64)
        flow = SimpleMaxFlow()
        flow.add_arcs_with_capacity(tail.astype(np.int32), head.astype(np.int32), whole)
        if flow.solve(self.source, self.sink) != flow.OPTIMAL:
            raise RuntimeError("the maximum flow was not found")
        goes = np.ones(self._nodes, np.bool_)
        goes[flow.get_source_side_min_cut()] = False
        return goes[self.node], self._base + flow.optimal_flow() / scale
