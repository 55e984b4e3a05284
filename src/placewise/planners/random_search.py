"""Random placements: what any other method must beat."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placewise.driver import Context
from placewise.errors import InvalidInput
from placewise.planners import planner
from placewise.problem import Problem


@planner("random")
def random_search(problem: Problem, ctx: Context, *, samples: int = 1000) -> None:
    """The best of many placements drawn uniformly from the allowed devices of each op."""
    if samples < 1:
        raise InvalidInput(f"option samples of random = {samples}: it must be 1 or more")
    left = samples
    while left > 0 and not ctx.should_stop():
        ctx.evaluate_batch(sample(problem, ctx.rng, min(left, 64)))
        left -= 64


def sample(problem: Problem, rng: np.random.Generator, count: int) -> NDArray[np.int32]:
    """[count, N] placements that keep colocation, pins and allowed devices."""
    allowed = problem.unit_allowed
    draw = rng.random((count, *allowed.shape)) * allowed
    return draw.argmax(axis=2).astype(np.int32)[:, problem.unit] if problem.num_ops else np.zeros((count, 0), np.int32)
