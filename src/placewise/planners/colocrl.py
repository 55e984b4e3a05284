"""ColocRL: co-location groups placed by a network that learns from this one graph."""

from __future__ import annotations

from placewise import learned
from placewise.driver import Context
from placewise.planners import planner
from placewise.problem import Problem


@planner("colocrl", supports=learned.supports, compile=learned.warm_up("colocrl"))
def colocrl(
    problem: Problem,
    ctx: Context,
    *,
    policy: str = "none",
    train: bool = False,
    groups: int = 256,
    hidden: int = 64,
    constant: float = 5.0,
    temperature: float = 10.0,
    samples: int = 16,
    rate: float = 4e-3,
    entropy: float = 12.0,
    horizon: int = 250,
    updates: int = 2000,
    patience: int = 50,
) -> None:
    """An attentional LSTM learns to place co-location groups (Mirhoseini et al. 2017, arXiv:1706.04972).

    At most so many `groups`. Logits are `constant * tanh(logits / temperature)`. The bonus for `entropy`, of the
    average decision, falls to zero over `horizon` updates, or while the budget lasts; after three quarters of that only
    samples that keep every constraint are trained on, if there are any. It ends after `updates`, or when nothing has
    become better for `patience` of them and for as many as that took. `policy` is a file that `placewise train` wrote
    for this very problem: its network, built as the file says, proposes placements as it is, or with `train` goes on
    learning.
    """
    options = {name: value for name, value in locals().items() if name not in ("problem", "ctx")}
    from placewise.learned.one_graph import place

    place("colocrl", problem, ctx, options)
