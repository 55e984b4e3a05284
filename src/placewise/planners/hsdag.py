"""HSDAG: groups and their devices learned together, for one graph at a time."""

from __future__ import annotations

from placewise import learned
from placewise.driver import Context
from placewise.planners import get, planner
from placewise.problem import Problem


def _compile(problem: Problem) -> None:
    """PyTorch is imported, and what parses and describes graphs is compiled."""
    from placewise.learned.hsdag import learner

    for changed in ({}, {"colocate": False, "nodes": 1}):
        student, policy = learner(problem, 0, get("hsdag").settings(changed))
        policy.score(policy.sample(1, student.generator))


@planner("hsdag", supports=learned.supports, compile=_compile)
def hsdag(
    problem: Problem,
    ctx: Context,
    *,
    updates: int = 1000,
    samples: int = 16,
    rate: float = 1e-3,
    entropy: float = 1.0,
    hidden: int = 64,
    keep: float = 0.7,
    nodes: int = 1000,
    colocate: bool = True,
    shape: bool = True,
    node_id: bool = True,
    structure: bool = True,
    patience: int = 200,
) -> None:
    """Learns to parse the graph into groups and to place them (HSDAG; Duan et al. 2024, arXiv:2405.14185).

    A graph network scores edges. Each is kept by its score, what kept edges connect is a group, and each group gets a
    device. Both choices are trained, on the inverse of the time. `keep` is the probability of keeping an edge at first,
    `entropy` the weight of the mean entropy of a decision, which falls to zero over the `updates`.
    Without `shape`, `node_id` or `structure` the network does not see these, as in the paper's ablations; without
    `colocate`, parsing begins with ops instead of chains of them. Beyond so many `nodes`, heavy edges are merged first.
    It ends after `updates`, or when nothing better has come for `patience` of them and for as many as the best took.
    """
    options = {name: value for name, value in locals().items() if name not in ("problem", "ctx")}
    from placewise.learned.hsdag import REWARD, learner
    from placewise.learned.reinforce import single_threaded, train

    with single_threaded():
        student, policy = learner(problem, int(ctx.rng.integers(2**31)), options)
        train(ctx, student, policy, REWARD, updates=updates, patience=patience)
