"""Search over the priorities of list scheduling: who is placed first decides who goes where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from placewise.driver import Context
from placewise.planners import planner
from placewise.planners.heft import place_in_order, schedule
from placewise.planners.list_scheduling import topological
from placewise.planners.order_search import strict_only
from placewise.problem import Problem
from placewise.simulator.arrays import priority_order, upward_rank

_SHARES: Final = (0.03, 0.01, 0.003)  # of the ops, that change their priority at once
_STEP: Final = 0.5  # how far a priority goes, in mean op times: past a neighbour or two


def _compile(problem: Problem) -> None:
    schedule(problem)
    topological(problem, upward_rank(problem), priority_order(problem))


@planner("list-search", objectives={"latency", "completion"}, supports=strict_only, compile=_compile)
def list_search(problem: Problem, ctx: Context, *, patience: int = 20) -> None:
    """HEFT over and over, with a few upward ranks changed a little each time; what is no worse stays.

    Hill climbing in the space of problem data, after Storer, Wu, Vaccari 1992 (doi:10.1287/mnsc.38.10.1495), who
    disturb what a dispatching rule sees and judge the schedule that it makes. It ends when `patience` changes per op in
    a row bring nothing better.
    """
    for _ in reprioritise(ctx, patience):
        pass


def reprioritise(ctx: Context, patience: int) -> Iterator[float]:
    """The search, a schedule at a time; yields the best value. It goes on from the best plan so far, if that helps."""
    problem, rng, n = ctx.problem, ctx.rng, ctx.problem.num_ops
    urgency, rank = priority_order(problem), upward_rank(problem)
    value, fruitless = ctx.evaluate(*place_in_order(problem, urgency)), 0
    if ctx.best and ctx.best[1] is not None:
        again = ctx.evaluate(*place_in_order(problem, ctx.best[1]))
        if again < value:
            value, rank[ctx.best[1]] = again, np.sort(rank)[::-1]
    step = _STEP * float(np.where(problem.allowed, problem.seconds, 0.0).sum() / max(1, problem.allowed.sum()))
    while fruitless < patience * n:
        yield value
        if ctx.should_stop():
            return
        changed = np.flatnonzero(rng.random(n) < rng.choice(_SHARES))
        changed = changed if len(changed) else rng.integers(0, n, 1)
        other = rank.copy()
        other[changed] += step * rng.standard_normal(len(changed))
        found = ctx.evaluate(*place_in_order(problem, topological(problem, other, urgency)))
        fruitless = 0 if found < value else fruitless + 1
        if found <= value:
            value, rank = found, other
