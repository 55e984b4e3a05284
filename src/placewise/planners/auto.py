"""The portfolio: searches from the plans of many methods race, and two of three give up, again and again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from placewise.driver import Context
from placewise.graph import Ints
from placewise.planners import get, planner
from placewise.planners.list_search import reprioritise
from placewise.planners.local_search import UnitMoves, climb
from placewise.planners.multilevel import Moves, hierarchy
from placewise.planners.order_search import improve, ordered_start
from placewise.problem import Problem

#: Quick however large the graph is.
FIRST: Final = ("fit", "single", "blocks-by-memory", "heft", "etf", "blocks-by-load")
#: Where searches begin besides. Most end soon.
STARTS: Final = ("expert", "cpop", "peft", "lookahead", "metis", "scotch", "min-cut", "multilevel")
#: And one more, by what counts: loads, or times. Plans by chance and HEFT lead where no method's plan does.
_OF_LOADS, _OF_TIMES = "pipeline-dp", "genetic"
#: Each knows a kind of problem well, and proves bounds for it: intervals, loads, slots, blocks in series.
EXACT: Final = ("ideals", "milp", "slot-search", "slot-milp", "series")
#: Searches for an order as well, which the simulator then follows.
ORDERED: Final = ("list-search", "order-search")
MEMBERS: Final = (*FIRST, _OF_LOADS, *STARTS, _OF_TIMES, *EXACT, *ORDERED)
#: Of what is left, at most.
_SHARE: Final = {"fit": 0.5, "multilevel": 0.3, _OF_TIMES: 0.15, **dict.fromkeys(EXACT, 0.4)}
_USUAL_SHARE: Final = 0.1
_LARGE: Final = 20_000  # units; beyond, only moves of many at once get anywhere
_HOPELESS: Final = 1.5  # times worse than the best start
_COARSEST: Final = 200  # groups, of the largest moves
_PATIENCE: Final = 10


def _compile(problem: Problem) -> None:
    for info in map(get, (*_methods(problem), *EXACT, *ORDERED)):
        if info.compile and info.why_not(problem) is None:
            info.compile(problem)


@planner("auto", compile=_compile)
def auto(problem: Problem, ctx: Context) -> None:
    """The portfolio: searches from the plans of many methods race; two of three give up, again and again.

    Successive halving (Jamieson, Talwalkar 2016, arXiv:1502.07943). Local moves, of single units and of groups of all
    sizes, start from each method's plan, as where a search begins decides where it ends. Beside them run searches for
    an order. It ends when the gap is closed, the time is up or nothing helps any more.
    """
    if problem.num_units > _LARGE:
        for name in FIRST:
            ctx.delegate(name, share=0.5)
        ctx.delegate("multilevel")
        return
    plans = _starts(problem, ctx)
    for name in ("cpsat", "fit") if ctx.best is None else ():  # half the budget was not enough: memory comes first
        ctx.delegate(name, share=0.8)
    if not plans or not problem.num_units or problem.num_devices == 1 or ctx.should_stop():
        return
    runners = [_Runner(name, steps) for name, steps in _searches(problem, ctx, plans)]
    out: list[_Runner] = []
    while runners and not ctx.should_stop():
        heats = math.ceil(math.log(len(runners), 3)) + 2  # this one and those that follow; the last is twice as long
        began, share = ctx.spent, (1.0 - ctx.spent) / heats if len(runners) > 1 else 1.0
        for i, runner in enumerate(runners):
            runner.run(ctx, began + share * (i + 1) / len(runners))
        runners.sort(key=lambda runner: runner.best)
        third = math.ceil(len(runners) / 3)
        runners, out = [runner for runner in runners[:third] if not runner.done], runners[third:] + out
    for runner in out:  # the best have come to an end, and there is time for second thoughts
        runner.run(ctx, 1.0)
    for name in EXACT if math.isfinite(ctx.seconds_left) else ():  # and for proofs, if a clock will end them
        ctx.delegate(name)


def _methods(problem: Problem) -> tuple[str, ...]:
    """Those that make plans to begin with, in turn."""
    of_loads = problem.objective == "throughput"
    return (*FIRST, _OF_LOADS, *STARTS) if of_loads else (*FIRST, *STARTS, _OF_TIMES)


def _starts(problem: Problem, ctx: Context) -> dict[str, Ints]:
    """Placements by the name of the method, without those that repeat another or are hopeless."""
    placements: dict[str, Ints] = {}
    for name in _methods(problem):
        found = ctx.delegate(name, share=_SHARE.get(name, _USUAL_SHARE), afresh=True)
        if found and not any((found[0] == other).all() for other in placements.values()):
            placements[name] = found[0]
    for name in EXACT:
        before = ctx.best_value
        found = ctx.delegate(name, share=_SHARE[name])
        if found and ctx.best_value < before:
            placements[name] = found[0]
    value = {name: ctx.evaluate(placement) for name, placement in placements.items()}
    best = min(value.values(), default=math.inf)
    return {name: placement for name, placement in placements.items() if value[name] <= _HOPELESS * best}


def _searches(problem: Problem, ctx: Context, plans: dict[str, Ints]) -> Iterator[tuple[str, Iterator[float]]]:
    levels = hierarchy(problem, ctx, _COARSEST)
    for name, placement in plans.items():
        moves = (UnitMoves(problem, ctx.rng), Moves(levels, ctx.rng))
        yield f"local search from {name}", climb(ctx, placement, moves, _PATIENCE)
    if get("list-search").why_not(problem) is None:
        yield "list-search", reprioritise(ctx, patience=20)
        yield "order-search", improve(ctx, *ordered_start(ctx), moves=500)


class _Runner:
    """A search in the race."""

    def __init__(self, name: str, steps: Iterator[float]) -> None:
        self.name, self._steps, self.best, self.done = name, steps, math.inf, False

    def run(self, ctx: Context, until: float) -> None:
        """Go on until so much of the budget is spent."""
        before = ctx.best_value
        try:
            for best in self._steps:
                self.best = best
                if ctx.should_stop() or ctx.spent >= until:
                    break
            else:
                self.done = True
        finally:  # the budget may end it anywhere
            if ctx.best_value < before:
                ctx.found_by = self.name
