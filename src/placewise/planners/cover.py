"""A lower bound on the busiest device: can so many sets, none of which loads its device for longer, cover all items?

If prices make all items together worth more than the best sets of all devices can be, no plan has such sets. Which
prices, a linear programme says that knows some sets (the master); which sets it should know, a search for sets that are
worth too much at its prices (column generation). For identical devices there is one best set, whatever their number:
so the bound is far above what the relaxed placement proves, in which every device gets a bit of each item and nothing
is sent. Archer et al. 2024 (ICML, "Practical Performance Guarantees for Pipelined DNN Inference") bound the busiest
stage by one set with a price of one second per second; here prices adapt, and devices differ.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from placewise.driver import Context
from placewise.graph import Floats, Ints
from placewise.planners.linear import TOLERANCE, Programme, Tariff
from placewise.planners.loads import Loads, Whole, walk, walk_tables
from placewise.planners.solvers import Solver, effort, effort_left

_WALKS: Final = 8  # for sets of each kind, with the prices of one master
_STEPS: Final = 50  # of a walk, for each item
_BEST: Final = 40  # sets that are worth most, from which walks begin
_HIGHEST: Final = 0.3  # price of an item without work, in terms of the mean
_NOTHING: Final = 1e-6  # of the mean price of an item
_CLOSE: Final = 1e-3  # relative; what is nearer than this is not divided further
_MORE: Final = 3.0  # times as long as a slice, for the first prices: they prove most in the least time
_PATIENCE: Final = 25  # masters whose prices are not tried out while there are sets to be found
_NODES: Final = 500  # of a solve, where there is no clock
_MASTERS: Final = 50  # of a slice, where there is no clock
_IDLE = np.zeros(5, np.int64), np.zeros(0, np.int64), 0  # two devices without channels


class Cover:
    """Sets of items that one device of a kind can take within a target, and what prices prove about them."""

    def __init__(
        self, given: Loads, costs: Tariff, solver: Solver, rng: np.random.Generator, before: Cover | None = None
    ) -> None:
        from ortools.math_opt.python import mathopt

        self._given, self._costs, self._solver, self._rng = given, costs, solver, rng
        self._kinds = _kinds(given, costs)
        self._first = np.array([kind[0] for kind in self._kinds])
        self._copies = np.array([len(kind) for kind in self._kinds])
        self._kind_of = {d: k for k, kind in enumerate(self._kinds) for d in kind}
        most = given.problem.max_devices
        seconds = np.where(given.may, given.seconds.sum(axis=0), np.inf).min(axis=1)
        self._work = seconds
        ceiling = seconds + _HIGHEST * max(float(seconds.mean()), 1e-300)

        # The master: how little is left over, at a price for each item, if so many sets of each kind are chosen.
        self._model = mathopt.Model()
        self._scale = 1.0 / float(ceiling.mean())
        rest = [self._model.add_variable(lb=0.0) for _ in range(given.items)]
        self._covered = [self._model.add_linear_constraint(x >= 1.0) for x in rest]
        self._at_most = [self._model.add_linear_constraint(lb=0.0, ub=float(n)) for n in self._copies]
        if most is not None:
            self._at_most.append(self._model.add_linear_constraint(lb=0.0, ub=float(most)))
        prices = (self._scale * ceiling).tolist()
        self._model.minimize(mathopt.fast_sum([price * x for price, x in zip(prices, rest, strict=True)]))
        self._master = mathopt.IncrementalSolver(self._model, mathopt.SolverType.GLOP)
        self._sets: list[tuple[int, Whole, float, Any]] = []  # kind, items, load, variable
        self._known: dict[tuple[int, bytes], None] = {}
        self._goal = self._target = self._ceiling = np.inf
        self._begun, self._patience = False, _PATIENCE
        self.bound = 0.0
        self.exhausted = False  # whether no prices prove more
        if before is not None:  # the same problem before it was known how good plans can be
            self.bound, self._begun = before.bound, before._begun
            same = before._given.items == given.items and len(before._kinds) == len(self._kinds)
            for kind, items, _, _ in before._sets if same else ():
                self._add(kind, items)

    def learn(self, device: Ints) -> None:
        """Know the sets of a plan."""
        for d, kind in self._kind_of.items():
            self._add(kind, np.flatnonzero(device == d))

    def prove(self, ctx: Context, value: float, seconds: float) -> None:
        """Try for so long to prove that no plan is below the value, or else as much as can be proved."""
        until, masters = effort(ctx) + seconds, 0
        if value != self._goal:
            self._goal = self._ceiling = value
            self._aim(value)
        if not self._begun:
            self._begun = self._decide(ctx, self._work, _MORE * seconds)
        while not self.exhausted and effort(ctx) < until and not ctx.should_stop():
            masters += 1
            if math.isinf(seconds) and masters > _MASTERS:
                return
            ctx.spend(1)
            prices, worth, left = self._prices()
            if left <= _NOTHING:  # the sets that are known could be a plan, for all that prices can tell
                self._ceiling = self._target
                self._between()
            elif not self._search(ctx, prices, worth) or self._patience == 0:
                self._patience = _PATIENCE
                self._decide(ctx, prices, max(until - effort(ctx), seconds / 2))
            else:
                self._patience -= 1

    # ---- steps ----

    def _between(self) -> None:
        """Aim at what is between what is proved and what cannot be; at the goal itself, where that is near."""
        near = self._ceiling - self.bound <= _CLOSE * self._goal
        proved = self.bound >= self._goal * (1 - 2 * TOLERANCE)
        self.exhausted = proved or (near and self._ceiling < self._goal)
        self._aim(self._ceiling if near else (self.bound + self._ceiling) / 2)

    def _aim(self, target: float) -> None:
        """Sets within the target count, others do not."""
        self._target = target
        for _, _, load, variable in self._sets:
            variable.upper_bound = np.inf if load <= target else 0.0

    def _add(self, kind: int, items: Whole) -> bool:
        """Know a set; False if it was known, or is too much for its device."""
        load, key = self._load(kind, items), (kind, items.tobytes())
        if key in self._known or not load <= self._goal:
            return False
        self._known[key] = None
        variable = self._model.add_variable(lb=0.0, ub=np.inf if load <= self._target else 0.0)
        for u in items.tolist():
            self._covered[u].set_coefficient(variable, 1.0)
        self._at_most[kind].set_coefficient(variable, 1.0)
        if len(self._at_most) > len(self._kinds):
            self._at_most[-1].set_coefficient(variable, 1.0)
        self._sets.append((kind, items, load, variable))
        return True

    def _prices(self) -> tuple[Floats, Floats, float]:
        """(price of each item, what a set of each kind may be worth, what is left over)."""
        result = self._master.solve()
        if not result.has_dual_feasible_solution():  # lost in numbers: these prices prove nothing
            return np.zeros(self._given.items), np.zeros(len(self._kinds)), 0.0
        dual, scale = result.dual_values(), self._scale
        prices = np.array([dual[row] for row in self._covered]) / scale
        worth = np.array([-dual[row] for row in self._at_most]) / scale
        shared = float(worth[len(self._kinds)]) if len(worth) > len(self._kinds) else 0.0
        return np.maximum(prices, 0.0), np.maximum(worth[: len(self._kinds)] + shared, 0.0), result.objective_value()

    def _search(self, ctx: Context, prices: Floats, worth: Floats) -> bool:
        """Look for sets that are worth more than they may be: plans for two devices, this one and elsewhere."""
        found = False
        for k, d in enumerate(self._first.tolist()):
            rest = float(prices.sum()) - float(worth[k]) * (1 + 1e-6)
            mine = [(-float(prices[items].sum()), i) for i, (kind, items, load, _) in enumerate(self._sets)
                    if kind == k and load <= self._target]  # fmt: skip
            if rest <= 0.0:
                continue
            starts = [i for _, i in sorted(mine)[:_BEST]]
            tables = self._two_devices(d, prices * (self._target / rest))
            for _ in range(_WALKS if self._copies[k] > 1 else 2):
                side = np.ones(self._given.items, np.int32)
                if starts:
                    side[self._sets[starts[int(self._rng.integers(len(starts)))]][1]] = 0
                hot = self._target * 10 ** self._rng.uniform(-2.0, -0.7)
                best, value = walk(tables, side, self._target, hot, hot * 1e-2, _STEPS * self._given.items,
                                   int(self._rng.integers(2**31)))  # fmt: skip
                ctx.spend(max(0, min(_STEPS * self._given.items, ctx.evaluations_left - 1)))
                items = np.flatnonzero(best == 0)
                if value <= self._target and prices[items].sum() > worth[k]:
                    found |= self._add(k, items)
        return found

    def _two_devices(self, d: int, elsewhere: Floats) -> tuple[Any, ...]:
        given, costs = self._given, self._costs
        seconds = np.stack([given.seconds.sum(axis=0)[:, d], elsewhere], axis=1)[None]
        times = np.zeros((len(given.sender), 2, 2))
        times[:, 1, 0], times[:, 0, 1] = costs.receive[:, d], costs.send[:, d]
        may = np.stack([given.may[:, d], np.ones(given.items, np.bool_)], axis=1)
        room = np.array([max(given.problem.capacity[d] - given.scratch.max(initial=0.0), 1e-9), np.inf])
        return walk_tables(given, seconds, may, times, np.zeros_like(given.phase), room, np.array([True, False]),
                           _IDLE, True, 2)  # fmt: skip

    def _decide(self, ctx: Context, prices: Floats, seconds: float) -> bool:
        """The least load with which one set of each kind, times its copies, is worth all items: whatever the prices, a
        bound. Returns whether the solver came to an end.
        """
        cover = self._first, self._copies, prices
        programme = Programme(self._given, self._costs, self._solver, self._target, self.bound, cover=cover)
        answer = programme.solve(ctx, min(seconds, effort_left(ctx)), _NODES, gap=_CLOSE)
        self.bound = max(self.bound, answer.bound)
        ctx.bound(self.bound)
        if answer.device is not None:
            for k, d in enumerate(self._first.tolist()):
                self._add(k, np.flatnonzero(answer.device == d))
        if self.bound >= self._target * (1 - 2 * TOLERANCE):
            self._between()
        return answer.done

    def _load(self, kind: int, items: Whole) -> float:
        """Seconds that a set costs a device of a kind."""
        given, costs, d = self._given, self._costs, self._first[kind]
        if not given.may[items, d].all():
            return float(np.inf)
        inside = np.zeros(given.items, np.bool_)
        inside[items] = True
        readers = np.bincount(given.message, inside[given.reader], len(given.sender))
        comes = (readers > 0) & ~inside[given.sender]
        goes = inside[given.sender] & (readers < np.diff(given.starts))
        moved = np.where(comes, costs.receive[:, d], 0.0) + np.where(goes, costs.send[:, d], 0.0)
        compute = given.seconds[:, items, d].sum(axis=1)
        transfer = np.bincount(given.phase, moved, len(compute))
        load = np.maximum(compute, transfer) if given.problem.execution.overlap else compute + transfer
        return float(load.sum())


def _kinds(given: Loads, costs: Tariff) -> list[list[int]]:
    """Usable devices, those together that any set costs the same."""
    kinds: dict[bytes, list[int]] = {}
    for d in given.usable.tolist():
        columns = given.seconds[:, :, d], given.may[:, d], costs.receive[:, d], costs.send[:, d]
        key = b"".join(np.ascontiguousarray(column).tobytes() for column in columns)
        kinds.setdefault(key + given.problem.capacity[d].tobytes(), []).append(d)
    return list(kinds.values())
