"""Answers that are right because they try everything."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from placewise.problem import Problem
from placewise.simulator import evaluate

Placement = NDArray[np.int32]


def all_placements(problem: Problem) -> Placement:
    """[B, N] every placement that keeps pins, groups and supported devices."""
    first_of_unit = np.unique(problem.unit, return_index=True)[1]
    choices = [np.flatnonzero(problem.allowed[op]).tolist() for op in first_of_unit]
    by_unit = np.array(list(itertools.product(*choices)), np.int32)
    return by_unit[:, problem.unit]


def all_orders(problem: Problem) -> Iterator[Placement]:
    """Every topological order of the graph."""
    edges = list(zip(problem.graph.edge_producer.tolist(), problem.graph.consumers.tolist(), strict=True))
    for order in itertools.permutations(range(problem.num_ops)):
        position = {op: i for i, op in enumerate(order)}
        if all(position[producer] < position[consumer] for producer, consumer in edges):
            yield np.array(order, np.int32)


def brute_force(problem: Problem, order: Placement | None = None) -> tuple[float, Placement | None]:
    """(value, placement) of the best feasible placement; infinity and None if there is none."""
    placements = all_placements(problem)
    score = evaluate(problem, placements, order).score
    best = int(np.argmin(score))
    return (float(score[best]), placements[best]) if np.isfinite(score[best]) else (math.inf, None)


def brute_force_orders(problem: Problem) -> tuple[float, Placement | None, Placement | None]:
    """(value, placement, order) of the best over every order too: up to about 5 ops on 2 devices."""
    found = [(*brute_force(problem, order), order) for order in all_orders(problem)]
    value, placement, order = min(found, key=lambda case: case[0])
    return value, placement, order if placement is not None else None
