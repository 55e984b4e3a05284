"""Contiguous blocks of the program order, fastest device first: what people do by hand and engines do by default."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placewise.driver import Context
from placewise.graph import Ints
from placewise.planners import planner
from placewise.problem import Problem


@planner("blocks-by-memory")
def blocks_by_memory(problem: Problem, ctx: Context) -> Ints:
    """Fill each device's memory before going on to the next, as `device_map="sequential"` does."""
    placement, _ = fill(problem, np.inf)
    return placement


@planner("blocks-by-load")
def blocks_by_load(problem: Problem, ctx: Context, *, steps: int = 40) -> Ints:
    """The smallest load per device with which blocks cover the model and respect memory, by bisection."""
    low, high = 0.0, float(problem.seconds[np.isfinite(problem.seconds)].sum())
    placement, _ = fill(problem, np.inf)
    for _ in range(steps):
        limit = (low + high) / 2
        found, covered = fill(problem, limit)
        if covered:
            placement, high = found, limit
        else:
            low = limit
    return placement


def fill(problem: Problem, load_limit: float) -> tuple[Ints, bool]:
    """Go through the program, filling devices in turn up to a load; what is left over stays on the last one.

    Returns the placement and whether everything was within the limits. A unit goes where its first op goes.
    """
    may = problem.per_unit(problem.allowed, np.logical_and)
    seconds = problem.per_unit(np.where(problem.allowed, problem.seconds, 0.0))
    resident = problem.per_unit(problem.graph.resident_bytes)
    room = problem.capacity - headroom(problem)
    load, used = np.zeros(problem.num_devices), np.zeros(problem.num_devices)
    order = np.argsort(problem.seconds.sum(axis=0), kind="stable").tolist()  # fastest first; inf = cannot run all
    device = np.full(problem.num_units, -1, np.int32)
    at, covered = 0, True
    units = problem.unit[problem.graph.topological_order]
    for unit in units[np.sort(np.unique(units, return_index=True)[1])].tolist():
        while at + 1 < len(order) and not _fits(unit, order[at], may, load, used, seconds, resident, load_limit, room):
            # A unit that may not run here at all (a pin, say) does not end the block.
            if not may[unit, order[at]]:
                break
            at += 1
        d = order[at] if may[unit, order[at]] else int(np.flatnonzero(may[unit])[0])
        covered &= _fits(unit, d, may, load, used, seconds, resident, load_limit, room)
        device[unit] = d
        load[d] += seconds[unit, d]
        used[d] += resident[unit]
    return device[problem.unit], covered


def headroom(problem: Problem) -> NDArray[np.float64]:
    """[D] bytes to leave free for activations: what the most demanding op touches, where memory is limited."""
    graph = problem.graph
    touched = graph.scratch.copy()
    live = ~graph.is_stored[graph.tensor_producer]
    np.add.at(touched, graph.tensor_producer[live], graph.tensor_bytes[live])
    read = live[graph.edge_tensor]
    np.add.at(touched, graph.consumers[read], graph.tensor_bytes[graph.edge_tensor[read]])
    most = touched.max(initial=0.0) if problem.execution.memory == "live" else 0.0
    return np.where(np.isfinite(problem.capacity), 2 * most, 0.0)


def _fits(
    unit: int,
    d: int,
    may: NDArray[np.bool_],
    load: NDArray[np.float64],
    used: NDArray[np.float64],
    seconds: NDArray[np.float64],
    resident: NDArray[np.float64],
    load_limit: float,
    room: NDArray[np.float64],
) -> bool:
    return bool(may[unit, d] and load[d] + seconds[unit, d] <= load_limit and used[d] + resident[unit] <= room[d])
