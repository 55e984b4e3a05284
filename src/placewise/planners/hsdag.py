"""HSDAG: groups and their devices learned together, for one graph at a time."""

from __future__ import annotations

from placewise import learned
from placewise.driver import Context
from placewise.planners import planner
from placewise.problem import Problem


@planner("hsdag", supports=learned.supports, compile=learned.warm_up("hsdag"))
def hsdag(
    problem: Problem,
    ctx: Context,
    *,
    policy: str = "none",
    train: bool = False,
    nodes: int = 1000,
    colocate: bool = True,
    shape: bool = True,
    node_id: bool = True,
    structure: bool = True,
    keep: float = 0.15,
    hidden: int = 128,
    samples: int = 16,
    epochs: int = 2,
    rate: float = 1e-3,
    pace: float = 1.0,
    entropy: float = 3.0,
    horizon: int = 1000,
    updates: int = 2000,
    patience: int = 200,
) -> None:
    """Learns to parse the graph into groups and to place them (HSDAG; Duan et al. 2024, arXiv:2405.14185).

    A graph network scores neighbours. Each node joins one of them or none, and each group that this makes gets a
    device. Both choices are trained, on the inverse of the time, by PPO with so many `epochs`. `keep` is the
    probability of joining a neighbour at first, `pace` the rate of the scores as a multiple of `rate`. Without `shape`,
    `node_id` or `structure` the network does not see these, as in the paper's ablations; without `colocate`, parsing
    begins with ops instead of chains of them. Beyond so many `nodes`, heavy edges are merged first. All else as in
    `colocrl`.
    """
    options = {name: value for name, value in locals().items() if name not in ("problem", "ctx")}
    from placewise.learned.one_graph import place

    place("hsdag", problem, ctx, options)
