"""Placeto: a policy that has learned to improve placements, or that learns from this one graph alone."""

from __future__ import annotations

from typing import Literal

from placewise import learned
from placewise.driver import Context
from placewise.planners import planner
from placewise.problem import Problem


def _compile(problem: Problem) -> None:
    """PyTorch is imported, and what a network sees is compiled."""
    learned.require()
    from placewise.learned.placeto import warm_up

    warm_up(problem)


@planner("placeto", supports=learned.supports, compile=_compile)
def placeto(
    problem: Problem,
    ctx: Context,
    *,
    policy: str = "shipped",
    train: bool = False,
    groups: int = 100,
    episodes: int = 8,
    passes: int = 4,
    batch: int = 2,
    epochs: int = 4,
    order: Literal["program", "random", "heaviest"] = "program",
    reward: Literal["improvement", "final"] = "improvement",
    discount: float = 0.9,
    rate: float = 1e-2,
    entropy: float = 0.02,
    updates: int = 1000,
    view: Literal["devices", "paper"] = "devices",
    width: int = 16,
    rounds: int = 8,
) -> None:
    """Improves a placement group by group, as a policy trained on other graphs says (Placeto 2019, arXiv:1906.08879).

    `policy` is the shipped one, `none` (train a new one on this graph) or a file that `placewise train` wrote; with
    `train` it goes on learning from this graph, for `updates` of `batch` episodes, with so many `epochs` each (more
    than one: PPO). Without, there are `passes` of `episodes`, one of them greedy: from the fastest device packed first,
    from random placements, then from the best so far. `groups` is the most groups of ops, `order` that of their turns.
    With `train` or `none`: `reward` is each step's improvement or the final value, `discount` of what follows, `rate`
    of Adam, `entropy` of exploration at first; with `none`: what the network looks like (`view=paper` has one output
    per device, as the paper has).
    """
    options = {name: value for name, value in locals().items() if name not in ("problem", "ctx")}
    from placewise.learned.placeto import place

    place(problem, ctx, options)
