"""The Hierarchical Planner: groups and their devices learned together, from this one graph."""

from __future__ import annotations

from typing import Literal

from placewise import learned
from placewise.driver import Context
from placewise.planners import planner
from placewise.problem import Problem


@planner("hierarchical", supports=learned.supports, compile=learned.warm_up("hierarchical"))
def hierarchical(
    problem: Problem,
    ctx: Context,
    *,
    policy: str = "none",
    train: bool = False,
    grouping: Literal["learned", "merged", "random", "none"] = "learned",
    groups: int = 0,
    pieces: int = 4,
    together: float = 0.98,
    hidden: int = 64,
    constant: float = 5.0,
    temperature: float = 10.0,
    samples: int = 16,
    placements: int = 4,
    rate: float = 4e-3,
    pace: float = 2.0,
    entropy: float = 12.0,
    horizon: int = 250,
    updates: int = 2000,
    patience: int = 50,
) -> None:
    """One network groups ops, another places the groups (Mirhoseini et al. 2018, Hierarchical Planner, ICLR).

    At most so many `groups`; 0 = 16, or one for each op where there are no more ops than pieces. They begin as what
    merging ops along the heaviest edges gives, in so many `pieces` each. A piece is `together` with its group by this
    probability at first; 0 = anywhere by chance, as in the paper. `pace` is the rate of the grouper as a multiple of
    `rate`. Of an update's `samples`, `placements` at a time have the same grouping. `grouping` may be what was merged
    or random, and then stays so, or none: then each op is placed by itself. All else as in `colocrl`; a piece that
    is a group by itself pays for leaving it as much as the bonus for `entropy` pays for exploring.
    """
    options = {name: value for name, value in locals().items() if name not in ("problem", "ctx")}
    from placewise.learned.one_graph import place

    place("hierarchical", problem, ctx, options)
