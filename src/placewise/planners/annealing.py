"""Simulated annealing: worse placements are accepted too, ever more seldom."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from placewise.driver import Context
from placewise.errors import InvalidInput
from placewise.graph import Floats, Ints
from placewise.planners import planner
from placewise.planners.blocks import Blocks
from placewise.planners.heft import schedule
from placewise.planners.moves import UnitMoves, compile_moves
from placewise.planners.multilevel import simple_start
from placewise.problem import Problem
from placewise.simulator import evaluate
from placewise.simulator.incremental import Incremental

_BATCH: Final = 8
_SAMPLE: Final = 64  # moves that tell how much worse moves make things


def _compile(problem: Problem) -> None:
    if problem.objective != "throughput":
        schedule(problem)
    Blocks(problem).fill([0, 1], 1.0)
    compile_moves(problem)


@planner("annealing", compile=_compile)
def annealing(problem: Problem, ctx: Context, *, hot: float = 0.1, cooling: float = 1000.0, sweeps: int = 300) -> None:
    """Random moves, worse ones accepted by a falling temperature (Kirkpatrick, Gelatt, Vecchi 1983).

    doi:10.1126/science.220.4598.671. The temperature starts at `hot` times what a move typically costs where it makes
    things worse. It has fallen to `cooling` times less when the budget ends, or after `sweeps` moves per unit. Unlike
    there, the start is the best simple plan and moves are those of local search: ops, pairs and connected pieces.
    """
    if cooling < 1:
        raise InvalidInput(f"option cooling of annealing = {cooling}: it must be 1 or more")
    start = simple_start(ctx)
    if ctx.best is None or problem.num_units == 0 or problem.num_devices == 1:
        return
    moves = UnitMoves(problem, ctx.rng)
    state = _State(ctx, ctx.best[0] if ctx.best[1] is None else start)
    warmest = hot * state.typical_loss(moves)
    tried, most = 0, sweeps * problem.num_units
    while tried < most and not ctx.should_stop():
        temperature = warmest / cooling ** max(ctx.spent, tried / most)
        state.step(moves, temperature)
        tried += _BATCH


class _State:
    """The placement that the walk is at, and the rule by which it goes on."""

    def __init__(self, ctx: Context, placement: Ints) -> None:
        self._ctx, self._problem = ctx, ctx.problem
        simulated = self._problem.objective != "throughput" and self._problem.execution.concurrency == "parallel"
        self._incremental = Incremental(self._problem, placement) if simulated else None
        self.placement, self.value = placement, ctx.evaluate(placement)

    def step(self, moves: UnitMoves, temperature: float) -> None:
        """Try some moves and take the first that is accepted.

        A move that costs c is accepted with probability exp(-c / temperature): if c is below an exponential variate of
        that mean. So each move has a limit before it is judged, and the simulator may give up at it.
        """
        candidates = moves.batch(self.placement, min(_BATCH, max(1, self._ctx.evaluations_left - 1)))
        limits = self.value + temperature * self._ctx.rng.standard_exponential(len(candidates))
        values = self._judge(candidates, float(limits.max(initial=0.0)))
        for b in np.flatnonzero(values < limits).tolist():
            # The full evaluation also knows memory and the other constraints, and keeps the best.
            value = self._ctx.evaluate(candidates[b])
            if value < np.inf:
                self.placement, self.value = candidates[b], value
                if self._incremental is not None:
                    self._incremental.accept(self.placement)
                return

    def typical_loss(self, moves: UnitMoves) -> float:
        """How much a move costs, if it does: the median of some."""
        candidates = moves.batch(self.placement, min(_SAMPLE, max(1, self._ctx.evaluations_left - 1)))
        loss = self._judge(candidates, np.inf) - self.value
        worse = loss[(loss > 0) & (loss < np.inf)]
        return float(np.median(worse)) if len(worse) else 0.01 * self.value

    def _judge(self, candidates: NDArray[np.int32], limit: float) -> Floats:
        if not len(candidates):
            return np.zeros(0)
        self._ctx.spend(len(candidates))
        if self._incremental is None:
            return evaluate(self._problem, candidates, peaks=False).score
        return self._incremental.probe(candidates, limit)
