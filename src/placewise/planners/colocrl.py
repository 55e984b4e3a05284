"""ColocRL: co-location groups placed by a network that learns from this one graph."""

from __future__ import annotations

from placewise import learned
from placewise.driver import Context
from placewise.planners import planner
from placewise.problem import Problem


@planner("colocrl", supports=learned.supports)
def colocrl(
    problem: Problem,
    ctx: Context,
    *,
    groups: int = 256,
    hidden: int = 64,
    constant: float = 5.0,
    temperature: float = 10.0,
    samples: int = 16,
    rate: float = 2e-3,
    entropy: float = 6.0,
    horizon: int = 250,
    updates: int = 2000,
    patience: int = 50,
) -> None:
    """An attentional LSTM learns to place co-location groups (Mirhoseini et al. 2017, arXiv:1706.04972).

    At most so many `groups`. Logits are `constant * tanh(logits / temperature)`. The bonus for `entropy`, of the
    average decision, falls to zero over `horizon` updates; after them only samples that keep every constraint are
    trained on. It ends after `updates`, or when nothing has become better for `patience` of them and for as many as
    that took.
    """
    options = {name: value for name, value in locals().items() if name not in ("problem", "ctx")}
    from placewise.learned.colocrl import learner
    from placewise.learned.reinforce import single_threaded, train

    with single_threaded():
        student, policy = learner(problem, int(ctx.rng.integers(2**31)), options)
        train(ctx, student, policy, updates=updates, patience=patience)
