"""Local search over placements: move a unit, swap two, move a connected piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from placewise.driver import Context
from placewise.graph import Ints
from placewise.planners import planner
from placewise.planners.blocks import Blocks, blocks_by_load, blocks_by_memory
from placewise.planners.heft import schedule
from placewise.planners.random_search import sample
from placewise.planners.single import all_on
from placewise.problem import Problem
from placewise.simulator.bottleneck import bottleneck
from placewise.simulator.incremental import Incremental

BATCH = 32
FOCUSED = 0.5  # share of moves that begin with an op that holds the plan up
_LUCK = 32  # batches of random placements, where no simple plan keeps every constraint


def _compile(problem: Problem) -> None:
    if problem.objective != "throughput":
        schedule(problem)
    Blocks(problem).fill([0, 1], 1.0)


@planner("local-search", compile=_compile)
def local_search(problem: Problem, ctx: Context, *, patience: int = 20, kick: int = 4) -> None:
    """Moves, swaps and group moves from the best simple plan, with kicks when stuck (iterated local search).

    Lourenço, Martin, Stützle 2003 (doi:10.1007/0-306-48056-5_11). Half of the moves begin where the plan is held up.
    `patience` is how many times as many moves as there are units may fail in a row before the current placement is
    disturbed by `kick` random group moves; the search ends when three disturbances in a row bring nothing.
    """
    for _ in explore(ctx, patience, kick):
        pass


def explore(ctx: Context, patience: int = 20, kick: int = 4) -> Iterator[float]:
    """The search, a batch of moves at a time; yields the best value."""
    problem = ctx.problem
    _try_simple_plans(problem, ctx)
    for _ in range(_LUCK):
        if ctx.best is None and not ctx.should_stop():
            ctx.evaluate_batch(sample(problem, ctx.rng, 64))
    if ctx.best is not None and problem.num_units and problem.num_devices > 1:
        yield from climb(ctx, ctx.best[0], [UnitMoves(problem, ctx.rng, kick)], patience)


def _try_simple_plans(problem: Problem, ctx: Context) -> None:
    """Where to start: one device, blocks, and HEFT where it applies."""
    for device in range(problem.num_devices):
        ctx.evaluate(all_on(problem, device))
    ctx.evaluate(blocks_by_memory(problem, ctx))
    if problem.objective != "throughput" and not problem.contiguous and problem.max_devices is None:
        placement, order = schedule(problem)
        ctx.evaluate(placement, order)
        ctx.evaluate(placement)
    blocks_by_load(problem, ctx)


class Moves(Protocol):
    """Proposes changes to a placement."""

    def batch(self, placement: Ints, count: int) -> tuple[NDArray[np.int32], list[list[int]]]:
        """Up to `count` changed placements and the ops that changed in each."""

    def kicked(self, placement: Ints) -> Ints:
        """A placement some changes away."""

    def focus(self, ops: NDArray[np.bool_]) -> None:
        """Change these ops [N] more often than others."""


def climb(ctx: Context, start: Ints, kinds: Sequence[Moves], patience: int, kicks: int = 3) -> Iterator[float]:
    """Iterated local search from a placement, a batch of moves at a time; yields the best value so far.

    Kinds of moves take turns. After `patience` moves per unit that failed in a row the best placement is disturbed; it
    is over when `kicks` disturbances in a row have brought nothing.
    """
    problem, current = ctx.problem, Current(ctx.problem, ctx, start)
    if not (problem.unit_allowed.sum(axis=1) > 1).any():  # nothing can move
        return
    home, home_value, fruitless, failed = start, np.inf, 0, 0
    looked_at: Ints | None = None
    for moves in cycle(kinds):
        yield min(home_value, current.value)
        if ctx.should_stop():
            return
        if current.improve(moves):
            failed = 0
            continue
        failed += BATCH
        if looked_at is not current.placement:
            looked_at, held = current.placement, bottleneck(problem, current.placement)
            for each in kinds:
                each.focus(held)
        if failed < patience * problem.num_units:
            continue
        failed, fruitless = 0, fruitless + 1
        if current.value < home_value * (1 - 1e-9):
            home, home_value, fruitless = current.placement, current.value, 0
        if fruitless >= kicks:
            return
        current.move_to(moves.kicked(home))


class Current:
    """The placement that the search stands on, and what its neighbours are worth."""

    def __init__(self, problem: Problem, ctx: Context, placement: Ints) -> None:
        self._problem, self._ctx = problem, ctx
        simulated = problem.objective != "throughput" and problem.execution.concurrency == "parallel"
        self._incremental = Incremental(problem, placement) if simulated else None
        self.placement = placement
        self.value = ctx.evaluate(placement)

    def improve(self, moves: Moves) -> bool:
        """Try a batch of moves and take the best that helps."""
        # One evaluation is kept for the full simulation of the move that is taken.
        candidates, changed = moves.batch(self.placement, min(BATCH, max(1, self._ctx.evaluations_left - 1)))
        if not len(candidates):
            return False
        if self._incremental is None:
            values = self._ctx.evaluate_batch(candidates)
        else:
            values = self._incremental.probe(candidates, changed, self.value)
            self._ctx.spend(len(candidates))
        for b in np.argsort(values, kind="stable").tolist():
            if not values[b] < self.value * (1 - 1e-12):
                return False
            # The full evaluation also knows memory and the other constraints.
            if self._incremental is None or self._ctx.evaluate(candidates[b]) < np.inf:
                self.placement, self.value = candidates[b], float(values[b])
                if self._incremental is not None:
                    self._incremental.accept(self.placement)
                return True
        return False

    def move_to(self, placement: Ints) -> None:
        """Stand on another placement, better or not, if it keeps the constraints."""
        value = self._ctx.evaluate(placement)
        if value < np.inf:
            self.placement, self.value = placement, value
            if self._incremental is not None:
                self._incremental.accept(placement)


class UnitMoves:
    """Random changes that keep colocation, pins, allowed devices and (resident) memory."""

    def __init__(self, problem: Problem, rng: np.random.Generator, kick: int = 4) -> None:
        graph = problem.graph
        self._problem, self._rng, self._kick = problem, rng, kick
        allowed = problem.unit_allowed
        self._allowed = allowed
        self._movable = self._focus = np.flatnonzero(allowed.sum(axis=1) > 1)
        self._resident = problem.per_unit(graph.resident_bytes)
        self._by_unit = np.argsort(problem.unit, kind="stable")
        self._unit_ptr = np.searchsorted(problem.unit[self._by_unit], np.arange(problem.num_units + 1))
        self._first = problem.first_of_unit
        ends = problem.unit[graph.edge_producer], problem.unit[graph.consumers]
        source, target = np.concatenate(ends), np.concatenate(ends[::-1])
        order = np.argsort(source, kind="stable")
        self._neighbour = target[order]
        self._neighbour_ptr = np.searchsorted(source[order], np.arange(problem.num_units + 1))

    def batch(self, placement: Ints, count: int) -> tuple[NDArray[np.int32], list[list[int]]]:
        """Up to `count` changed placements and the ops that changed in each."""
        if not len(self._movable):
            return np.zeros((0, len(placement)), np.int32), []
        device = placement[self._first]
        used = np.zeros(self._problem.num_devices)
        np.add.at(used, device, self._resident)
        kinds: tuple[Callable[[Ints], dict[int, int]], ...] = (self._move, self._move, self._swap, self._group)
        rows, changed = [], []
        for kind in self._rng.integers(0, len(kinds), count).tolist():
            change = kinds[kind](device)
            if change and self._fits(device, used, change):
                row = placement.copy()
                ops: list[int] = []
                for unit, d in change.items():
                    members = self._by_unit[self._unit_ptr[unit] : self._unit_ptr[unit + 1]]
                    row[members] = d
                    ops.extend(members.tolist())
                rows.append(row)
                changed.append(ops)
        return np.array(rows, np.int32).reshape(-1, len(placement)), changed

    def kicked(self, placement: Ints) -> Ints:
        """A placement some group moves away."""
        device = placement[self._first].copy()
        for _ in range(min(self._kick, len(device))):
            for unit, d in self._group(device).items():
                device[unit] = d
        kicked: Ints = device[self._problem.unit]
        return kicked

    def focus(self, ops: NDArray[np.bool_]) -> None:
        """Change these ops [N] more often than others."""
        held = np.zeros(self._problem.num_units, np.bool_)
        held[self._problem.unit[ops]] = True
        focus = self._movable[held[self._movable]]
        self._focus = focus if len(focus) else self._movable

    def _any(self, units: NDArray[np.int64]) -> int:
        return int(units[self._rng.integers(len(units))])

    def _seed(self) -> int:
        return self._any(self._focus if self._rng.random() < FOCUSED else self._movable)

    def _move(self, device: Ints) -> dict[int, int]:
        unit = self._seed()
        target = self._target(unit, device)
        return {unit: target} if target != device[unit] else {}

    def _swap(self, device: Ints) -> dict[int, int]:
        a, b = self._seed(), self._any(self._movable)
        x, y = int(device[a]), int(device[b])
        return {a: y, b: x} if x != y and self._allowed[a, y] and self._allowed[b, x] else {}

    def _group(self, device: Ints) -> dict[int, int]:
        """A connected piece of what is on one device, of 2 to 32 units."""
        seed = self._seed()
        target = self._target(seed, device)
        size = int(2 ** self._rng.integers(1, 6))
        piece, seen = [seed], {seed}
        for unit in piece:
            if len(piece) >= size or target == device[seed]:
                break
            for other in self._neighbour[self._neighbour_ptr[unit] : self._neighbour_ptr[unit + 1]].tolist():
                if other not in seen and device[other] == device[seed] and self._allowed[other, target]:
                    seen.add(other)
                    piece.append(other)
        return dict.fromkeys(piece[:size], target) if target != device[seed] else {}

    def _target(self, unit: int, device: Ints) -> int:
        """Half the time the device of a neighbour, else any."""
        low, high = self._neighbour_ptr[unit], self._neighbour_ptr[unit + 1]
        if low < high and self._rng.random() < 0.5:
            near = int(device[self._neighbour[self._rng.integers(low, high)]])
            if self._allowed[unit, near]:
                return near
        return int(self._rng.choice(np.flatnonzero(self._allowed[unit])))

    def _fits(self, device: Ints, used: NDArray[np.float64], change: dict[int, int]) -> bool:
        after = used.copy()
        for unit, d in change.items():
            after[device[unit]] -= self._resident[unit]
            after[d] += self._resident[unit]
        over = after > self._problem.capacity
        return not (over & (after > used)).any()
