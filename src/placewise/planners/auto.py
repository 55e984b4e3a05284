"""The portfolio: searches from the plans of many methods race, and two of three give up, again and again."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Final

from placewise.driver import Context
from placewise.graph import Ints
from placewise.planners import get, planner
from placewise.planners.blocks import blocks_by_memory
from placewise.planners.genetic import evolve
from placewise.planners.list_search import reprioritise
from placewise.planners.local_search import climb, explore
from placewise.planners.moves import UnitMoves
from placewise.planners.multilevel import Level, descend, group_moves, hierarchy
from placewise.planners.order_search import improve, ordered_start
from placewise.planners.repair import roomy
from placewise.problem import Problem

#: Quick however large the graph is.
FIRST: Final = ("fit", "single", "blocks-by-memory", "heft", "etf", "blocks-by-load")
#: Where searches begin besides. Most end soon.
STARTS: Final = (
    *("expert", "cpop", "peft", "lookahead", "m-etf", "m-sct", "spt", "tsam", "metis", "scotch", "min-cut"),
    *("pipeline-dp", "rows", "offload"),
)
#: Of these, those that are quick on large graphs, with their shares of what is left.
LARGE: Final = {"expert": 0.1, "lookahead": 0.1, "metis": 0.1, "tsam": 0.4, "min-cut": 0.4}
#: Each knows a kind of problem well, and proves bounds for it: intervals, loads, slots, small graphs, blocks in series.
EXACT: Final = ("ideals", "milp", "slot-search", "slot-milp", "cpsat", "series")
#: A step at a time, so that they can take turns.
SEARCHES: Final[dict[str, Callable[[Context], Iterator[float]]]] = {
    "local-search": explore,
    "multilevel": descend,
    "genetic": evolve,
    "list-search": lambda ctx: reprioritise(ctx, patience=20),
    "order-search": lambda ctx: improve(ctx, *ordered_start(ctx), moves=500),
}
MEMBERS: Final = (*FIRST, *STARTS, *EXACT, *SEARCHES)
#: Of what is left, at most.
_SHARE: Final = {
    "fit": 0.5,
    "cpsat": 0.15,
    "m-sct": 0.05,
    "milp": 0.6,
    **dict.fromkeys(("ideals", "slot-search", "slot-milp", "series"), 0.3),
}
_USUAL_SHARE: Final = 0.1
_STREAMING: Final = 0.3  # of what is left, for layers that are streamed where memory is short
_SELDOM: Final = 0.03  # of what is left, for what may take long and seldom helps
_BESIDE: Final = 0.3  # of what is left, for `milp` where searches are not on other cores meanwhile
_MANY: Final = 300  # units; beyond, `multilevel` is worth a core of its own
_DEEP: Final = 600  # units; beyond, the race would give it up on its coarse levels: without that core, it begins
_STAGES: Final = 300  # the same for throughput, where quick methods are further from the best
_AHEAD: Final = 0.4  # of what is left, before the race;
_WHOLE: Final = 0.6  # of all, which it shares out among its levels
_ANNEALING: Final = 0.25  # of what is left, before heats that would give it up while it is hot; up to _MANY units
_TRIES: Final = 30  # evaluations per unit; with less, of a large graph, annealing the order gets nowhere
_LARGE: Final = 20_000  # units; beyond, only moves of many at once get anywhere
_PROVABLE: Final = 300  # units x devices, for one constraint programme
_CLIMBS: Final = 3  # plans, the best ones, from which searches begin
_FINAL: Final = 4  # heats' worth of budget for the last runner
_HOPELESS: Final = 1.5  # times worse than the best start
_COARSEST: Final = 200  # groups, of the largest moves
_PATIENCE: Final = 10
_GLANCE: Final = 0.05  # seconds from one look at whether to go on to the next


def _compile(problem: Problem) -> None:
    short = replace(problem, cluster=problem.cluster.with_memory({problem.cluster.device_names[0]: 0.0}))
    for given in (problem, short):  # some apply only where memory is short
        for info in map(get, MEMBERS):
            if info.compile and info.why_not(given) is None:
                info.compile(given)


@planner("auto", compile=_compile)
def auto(problem: Problem, ctx: Context) -> None:
    """The portfolio: searches from the plans of many methods race; two of three give up, again and again.

    Successive halving (Jamieson, Talwalkar 2016, arXiv:1502.07943). Each search does what it does by itself with the
    same seed, so what it finds with its part of the budget is found. Beside them, moves of single units and of groups
    of all sizes start from the best plans of quick methods, as where a search begins decides where it ends. It ends
    when the gap is closed, the time is up or nothing helps any more. With a budget in seconds and cores to spare,
    searches race there from the beginning; above 300 units, `multilevel` has the first of these cores for itself.
    Without, above 600 (300 for throughput), it begins before the race, and a climb from its plan is in the race.
    """
    with ExitStack() as stack:
        others = []
        for names in _lanes(problem, ctx.cores_to_spare):
            search = SEARCHES[names[0]] if len(names) == 1 else partial(_race, names=names)
            others.append((names, stack.enter_context(ctx.elsewhere(names[0], search))))
        if problem.num_units > _LARGE:
            _large(ctx)
        else:
            _play(problem, ctx, [name for names, _ in others for name in names])
        while any(not other.done for _, other in others if other) and not ctx.should_stop():
            time.sleep(_GLANCE)
        if ctx.best is None and not ctx.evaluations:  # to begin elsewhere took all the time that there was
            ctx.evaluate(blocks_by_memory(problem, ctx))


def _lanes(problem: Problem, spare: int) -> list[list[str]]:
    """Which searches go to which of the cores to spare."""
    if problem.num_devices == 1 or not problem.num_units:
        return []
    first = [["multilevel"]] if problem.num_units > _MANY else []
    small = problem.num_units <= _LARGE
    names = [name for name in SEARCHES if small and [name] not in first and get(name).why_not(problem) is None]
    rest = max(0, spare - len(first))
    return [*first[:spare], *(names[i::rest] for i in range(min(rest, len(names))))]


def _large(ctx: Context) -> None:
    """Quick methods, and moves of many at once from the best of their plans."""
    for name in FIRST:
        ctx.delegate(name, share=0.5)
    for name, share in LARGE.items():
        ctx.delegate(name, share=share)
    ctx.delegate("multilevel")


def _play(problem: Problem, ctx: Context, away: list[str]) -> None:
    """Starts, proofs and the race of those searches that are not away."""
    plans, multilevel = _starts(problem, ctx, "multilevel" in away)
    for name in ("cpsat", "fit") if ctx.best is None else ():  # half the budget was not enough: memory comes first
        ctx.delegate(name, share=0.8)
    if problem.num_devices == 1 and problem.objective == "completion":
        _order(problem, ctx)
    elif problem.num_devices == 1:
        return
    if not plans or not problem.num_units or ctx.should_stop():
        return
    levels = hierarchy(problem, ctx, _COARSEST)
    runners = [
        _Runner(ctx, f"local search from {name}", partial(_climb, start=start, levels=levels))
        for name, start in list(plans.items())[:_CLIMBS]
    ]
    runners += [multilevel] if multilevel else []
    out = [*away, "order-search"] if multilevel and ctx.evaluations_left < _TRIES * problem.num_units else away
    at_home = [name for name in SEARCHES if name not in out and get(name).why_not(problem) is None]
    runners += [_Runner(ctx, name, SEARCHES[name]) for name in at_home if name != "multilevel" or not multilevel]
    if problem.objective == "completion" and ctx.best and get("order-search").why_not(problem) is None:
        placement, order = ctx.best  # where models share devices, the best start is often one that has an order
        if order is not None:
            again = partial(improve, placement=placement, order=order, moves=500)
            runners.append(_Runner(ctx, "order-search", again))
    _exhaust(_halve(ctx, runners, levels if away else None))
    before = math.inf
    while ctx.best_value < before and not ctx.should_stop():  # and, while it helps, for better luck
        before = ctx.best_value
        for name, start in plans.items():
            again = partial(_climb, start=start, levels=levels)
            runner = _Runner(ctx, f"local search from {name}", again, seed=int(ctx.rng.integers(2**31)))
            _exhaust(runner.run(ctx, 1.0))
    for name in _exact(problem):  # and for proofs, if the budget will end them
        if math.isfinite(ctx.seconds_left) or (name == "cpsat" and ctx.evaluations_left < sys.maxsize):
            ctx.delegate(name)


def _race(ctx: Context, names: list[str]) -> Iterator[float]:
    """Searches by themselves."""
    return _halve(ctx, [_Runner(ctx, name, SEARCHES[name]) for name in names])


def _halve(ctx: Context, runners: list[_Runner], levels: list[Level] | None = None) -> Iterator[float]:
    """Heats, after each of which two of three give up; yields the best value at each step.

    With `levels`, the last one is joined by a climb from what was found elsewhere, if that is better.
    """
    out: list[_Runner] = []
    cools = ctx.problem.num_units <= _MANY and math.isfinite(ctx.seconds_left)  # else one round takes longer than that
    for runner in runners:
        if runner.name == "order-search" and cools:
            yield from runner.run(ctx, ctx.spent + _ANNEALING * (1.0 - ctx.spent))
    while runners and not ctx.should_stop():
        heats = math.ceil(math.log(len(runners), 3)) + _FINAL
        began, share = ctx.spent, (1.0 - ctx.spent) / heats if len(runners) > 1 else 1.0
        for i, runner in enumerate(runners):
            yield from runner.run(ctx, began + share * (i + 1) / len(runners))
        runners.sort(key=lambda runner: runner.best)
        third = math.ceil(len(runners) / 3)
        runners, out = [runner for runner in runners[:third] if not runner.done], runners[third:] + out
        if levels and len(runners) == 1 and ctx.best is not None and ctx.best_value < runners[0].best:
            again = partial(_climb, start=ctx.best[0], levels=levels)
            runners.append(_Runner(ctx, f"local search from {ctx.found_by}", again, seed=int(ctx.rng.integers(2**31))))
    for runner in out:  # the best have come to an end, and there is time for second thoughts
        yield from runner.run(ctx, 1.0)


def _order(problem: Problem, ctx: Context) -> None:
    """Which model is first matters on one device too, where every plan is contiguous and ops never run in parallel."""
    execution = replace(problem.execution, concurrency="parallel")
    free = replace(problem, contiguous=False, max_devices=None, execution=execution)
    if problem.execution.concurrency != "slots" and not ctx.should_stop():
        with ctx.aside(free, 0.3) as inner:
            for name in ("spt", "cpsat"):
                inner.delegate(name, share=0.9)
        if inner.best is not None and ctx.evaluations_left:
            ctx.evaluate(*inner.best)


def _exact(problem: Problem) -> list[str]:
    small = problem.num_units * problem.num_devices <= _PROVABLE
    return [name for name in EXACT if small or name != "cpsat"]


def _starts(problem: Problem, ctx: Context, helped: bool) -> tuple[dict[str, Ints], _Runner | None]:
    """(placements by the name of the method, the best first, without those that repeat another or are hopeless;
    `multilevel` on its way, if it has begun).
    """
    share = _SHARE | ({} if helped else {"milp": _BESIDE})
    if problem.objective == "latency":
        share |= {"pipeline-dp": _SELDOM, "offload": _SELDOM if roomy(problem) else _STREAMING}
    placements: dict[str, Ints] = {}
    for name in (*FIRST, *STARTS):
        found = ctx.delegate(name, share=share.get(name, _USUAL_SHARE), afresh=True)
        if found and not any((found[0] == other).all() for other in placements.values()):
            placements[name] = found[0]
    for name in _exact(problem):
        before = ctx.best_value
        found = ctx.delegate(name, share=share[name])
        if found and ctx.best_value < before:
            placements[name] = found[0]
    multilevel = None
    deep = _STAGES if problem.objective == "throughput" else _DEEP
    if problem.num_units > deep and not helped and not ctx.should_stop():
        multilevel = _Runner(ctx, "multilevel", descend, share=_WHOLE)
        _exhaust(multilevel.run(ctx, ctx.spent + _AHEAD * (1.0 - ctx.spent)))
        if multilevel.plan is not None:  # a climb from it has moves of single units besides
            placements["multilevel"] = multilevel.plan
    value = {name: ctx.evaluate(placement) for name, placement in placements.items()}
    best = min(value.values(), default=math.inf)
    ranked = sorted(value, key=lambda name: value[name])
    return {name: placements[name] for name in ranked if value[name] <= _HOPELESS * best}, multilevel


def _climb(ctx: Context, start: Ints, levels: list[Level]) -> Iterator[float]:
    return climb(ctx, start, (UnitMoves(ctx.problem, ctx.rng), group_moves(levels, ctx.rng)), _PATIENCE)


class _Runner:
    """A search in the race. Its clock runs while it does."""

    def __init__(
        self, ctx: Context, name: str, search: Callable[[Context], Iterator[float]], *,
        share: float = 1.0, seed: int | None = None,
    ) -> None:  # fmt: skip
        self.name, self.best, self.done = name, math.inf, False
        self._whole, self._took, self._since = ctx, 0.0, math.nan
        self._ctx = ctx.beside(name, self._clock, share=share, seed=seed)
        self._steps = search(self._ctx)

    def _clock(self) -> float:
        return self._took if math.isnan(self._since) else self._took + self._whole.seconds - self._since

    @property
    def plan(self) -> Ints | None:
        """Where the best that it found has the ops."""
        return self._ctx.best[0] if self._ctx.best else None

    def run(self, ctx: Context, until: float) -> Iterator[float]:
        """Go on until so much of the budget is spent; yields the best value of all."""
        before, self._since = ctx.best_value, ctx.seconds
        try:
            for best in self._steps:
                self.best = best
                self._sign(ctx, before)
                yield ctx.best_value
                if ctx.should_stop() or ctx.spent >= until:
                    break
            else:
                self.done = True
        finally:  # the budget may end it anywhere
            self._took, self._since = self._clock(), math.nan
            self._sign(ctx, before)

    def _sign(self, ctx: Context, before: float) -> None:
        if self._ctx.best_value <= ctx.best_value < before:
            ctx.found_by = self.name


def _exhaust(steps: Iterator[float]) -> None:
    for _ in steps:
        pass
