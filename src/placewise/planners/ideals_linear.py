"""Contiguous pipelines along a row of the program's nodes: ideals of a path, of which there are few."""

from __future__ import annotations

import numpy as np

from placewise.driver import Context
from placewise.graph import Ints
from placewise.planners import planner
from placewise.planners.ideals import settle, why_not
from placewise.planners.ideals_search import Search
from placewise.planners.pipeline import dataflow_order, late, program
from placewise.planners.stages import Stages, Whole, stages_of
from placewise.problem import Problem


def _compile(problem: Problem) -> None:
    Search(stages_of(problem), 1.0, np.arange(1)).reach([np.inf])


@planner("ideals-linear", objectives={"throughput"}, supports=why_not, compile=_compile)
def ideals_linear(problem: Problem, ctx: Context, *, orders: int = 8) -> Ints | None:
    """The best cuts of a few topological orders, as if each were a chain (DPL in Tarnawski 2020, arXiv:2006.16423).

    The first order is the program's, the second has units that send more than they read late, the others are random.
    Stages cost what they do in the graph itself, with devices of any kinds in any order; pipeline-dp charges what
    crosses several stages as if each handed it on to the next.
    """
    if not problem.num_units:
        return np.zeros(0, np.int32)
    stages = stages_of(problem)
    for i in range(orders):
        if ctx.should_stop() and i > 0:
            break
        settle(problem, ctx, stages, stages, _order(problem, stages, ctx, i), proves=False)
    return None


def _order(problem: Problem, stages: Stages, ctx: Context, number: int) -> Whole:
    """The nodes as the program has them, with some of them late, or in random orders that keep the flow of data."""
    rank = np.arange(stages.num_nodes) if number == 0 else ctx.rng.permutation(stages.num_nodes)
    if number == 1:
        row = program(problem, late)[0]
        rank[stages.node[row[::-1]]] = np.arange(len(row))[::-1]  # the first unit of a node decides
    return np.argsort(dataflow_order(stages.tail, stages.head, rank))
