"""Local search over placements: move a unit, swap two, move a connected piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from placewise.driver import Context
from placewise.graph import Ints
from placewise.planners import planner
from placewise.planners.blocks import Blocks, blocks_by_load, blocks_by_memory
from placewise.planners.heft import schedule
from placewise.planners.moves import Moves, UnitMoves, compile_moves
from placewise.planners.random_search import sample
from placewise.planners.single import all_on
from placewise.problem import Problem
from placewise.simulator.bottleneck import bottleneck
from placewise.simulator.incremental import Incremental
from placewise.simulator.throughput import total_load

BATCH = 32
_LUCK = 32  # batches of random placements, where no simple plan keeps every constraint


def _compile(problem: Problem) -> None:
    if problem.objective != "throughput":
        schedule(problem)
    Blocks(problem).fill([0, 1], 1.0)
    compile_moves(problem)


@planner("local-search", compile=_compile)
def local_search(problem: Problem, ctx: Context, *, patience: int = 20, kick: int = 4) -> None:
    """Moves ops, pairs and connected pieces from the best simple plan, with kicks when stuck (iterated local search).

    Lourenço, Martin, Stützle 2003 (doi:10.1007/0-306-48056-5_11). Half of the moves begin where the plan is held up.
    `patience` is how many times as many moves as there are units may fail in a row before the current placement is
    disturbed by `kick` random moves of pieces; the search ends when three disturbances in a row bring nothing.
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
        candidates = moves.batch(self.placement, min(BATCH, max(1, self._ctx.evaluations_left - 1)))
        if not len(candidates):
            return False
        if self._incremental is None:
            values = self._ctx.evaluate_batch(candidates)
        else:
            values = self._incremental.probe(candidates, self.value)
            self._ctx.spend(len(candidates))
        for b in np.argsort(values, kind="stable").tolist():
            if not values[b] < self.value * (1 - 1e-12):
                break
            # The full evaluation also knows memory and the other constraints.
            if self._incremental is None or self._ctx.evaluate(candidates[b]) < np.inf:
                self.placement, self.value = candidates[b], float(values[b])
                if self._incremental is not None:
                    self._incremental.accept(self.placement)
                return True
        return self._problem.objective == "throughput" and self._lighten(candidates[values <= self.value])

    def _lighten(self, candidates: NDArray[np.int32]) -> bool:
        """Most moves leave the busiest device as it is: take the one after which the others have least to do."""
        total = total_load(self._problem, np.concatenate([self.placement[None], candidates]))
        best = int(total.argmin())
        if not total[best] < total[0] * (1 - 1e-9):
            return False
        self.placement = candidates[best - 1]
        return True

    def move_to(self, placement: Ints) -> None:
        """Stand on another placement, better or not, if it keeps the constraints."""
        value = self._ctx.evaluate(placement)
        if value < np.inf:
            self.placement, self.value = placement, value
            if self._incremental is not None:
                self._incremental.accept(placement)
