"""Everything on one device."""

from __future__ import annotations

import numpy as np

from placewise.driver import Context
from placewise.graph import Ints
from placewise.planners import planner
from placewise.problem import Problem


@planner("single")
def single(problem: Problem, ctx: Context) -> None:
    """The best single device that fits; ops that may not run there go where they are fastest."""
    for device in range(problem.num_devices):
        ctx.evaluate(all_on(problem, device))


def all_on(problem: Problem, device: int) -> Ints:
    """Every op on one device, except those that may not run there."""
    may = problem.allowed[:, device]
    if may.all():
        return np.full(problem.num_ops, device, np.int32)
    return np.where(may, device, problem.unit_seconds.argmin(axis=1)[problem.unit]).astype(np.int32)
