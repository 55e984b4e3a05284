"""The portfolio: quick methods first, then search from the best that they found."""

from __future__ import annotations

from typing import Final

from placewise.driver import Context
from placewise.planners import get, planner
from placewise.problem import Problem

#: Each ends by itself, soon; none is tried where it does not apply.
QUICK: Final = ("single", "blocks-by-memory", "heft", "cpop", "lookahead", "min-cut", "blocks-by-load")
#: Each goes on for as long as it is let; one that does not apply, or ends, leaves its time to the next.
SEARCHES: Final = ("multilevel", "local-search", "annealing")
#: Beyond so many units, only moves of many at once get anywhere: the first search may take all the time.
_LARGE: Final = 4000


def _compile(problem: Problem) -> None:
    for info in map(get, (*QUICK, *SEARCHES)):
        if info.compile and info.why_not(problem) is None:
            info.compile(problem)


@planner("auto", compile=_compile)
def auto(problem: Problem, ctx: Context) -> None:
    """Many methods in turn, each going on from the best so far, until the gap is closed or the time is up.

    Never worse than its quick members, which run to their end, nor than the best single device that fits.
    """
    for name in QUICK:
        ctx.delegate(name)
    for i, name in enumerate(SEARCHES):
        ctx.delegate(name, share=1.0 if problem.num_units > _LARGE else 1 / (len(SEARCHES) - i))
