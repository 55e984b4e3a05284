"""Contiguous blocks of the program order: what people do by hand and engines do by default."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placewise.driver import Context
from placewise.graph import Floats, Ints
from placewise.planners import planner
from placewise.problem import Problem

_MANY = 1_000_000  # steps through the program at each of which all orders of the devices may be tried


def _compile(problem: Problem) -> None:
    Blocks(problem).fill([0, 1], 1.0)


@planner("blocks-by-memory", compile=_compile)
def blocks_by_memory(problem: Problem, ctx: Context) -> Ints:
    """Fill each device's memory before going on to the next, fastest first, as `device_map="sequential"` does."""
    return Blocks(problem).fill(fastest_first(problem), math.inf)[0]


@planner("blocks-by-load", compile=_compile)
def blocks_by_load(problem: Problem, ctx: Context, *, steps: int = 20) -> None:
    """The smallest load per device with which blocks cover the model and respect memory, by bisection.

    Every order of the devices is tried where that is cheap, else fastest first and slowest first.
    """
    blocks = Blocks(problem)
    for devices in _device_orders(problem):
        low, high = 0.0, float(problem.seconds[np.isfinite(problem.seconds)].sum())
        placement, _ = blocks.fill(devices, math.inf)
        for _ in range(steps):
            limit = (low + high) / 2
            if not low < limit < high or ctx.should_stop():
                break
            found, covered = blocks.fill(devices, limit)
            if covered:
                placement, high = found, limit
            else:
                low = limit
        ctx.evaluate(placement)


def fastest_first(problem: Problem) -> list[int]:
    """Devices by the time that they would need for everything, last those that may run nothing.

    An op that may not run on a device counts as long as where it is slowest.
    """
    finite = np.where(problem.allowed, problem.seconds, 0.0)
    slowest = finite.max(axis=1, keepdims=True, initial=0.0)
    total = np.where(problem.allowed, problem.seconds, slowest).sum(axis=0)
    order: list[int] = np.lexsort((total, ~problem.allowed.any(axis=0))).tolist()
    return order


def _device_orders(problem: Problem) -> Iterator[Sequence[int]]:
    order = fastest_first(problem)
    if math.factorial(min(len(order), 20)) * problem.num_units <= _MANY:
        yield from permutations(order)
    else:
        yield from (order, order[::-1])


class Blocks:
    """The program as a row of units, and what each needs: by default what is surely held, with space left for the rest.

    `need` is in bytes for each unit, `room` for each device.
    """

    def __init__(self, problem: Problem, need: Floats | None = None, room: Floats | None = None) -> None:
        graph, self._problem = problem.graph, problem
        surely = graph.resident_bytes.copy()
        if problem.objective == "throughput" and problem.execution.memory == "live":
            # A full pipeline is charged for every tensor of a sample at once.
            live = ~graph.is_stored[graph.tensor_producer]
            np.add.at(surely, graph.tensor_producer[live], graph.tensor_bytes[live])
        units = problem.unit[graph.topological_order]
        self._given = (
            units[np.sort(np.unique(units, return_index=True)[1])],  # the program
            problem.unit_allowed,
            problem.per_unit(np.where(problem.allowed, problem.seconds, 0.0)),
            problem.per_unit(surely) if need is None else need,
            problem.capacity - headroom(problem) if room is None else room,
        )

    def fill(self, devices: Sequence[int], load_limit: float) -> tuple[Ints, bool]:
        """Go through the program, filling devices in turn up to a load; what is left over stays on the last one.

        Returns the placement and whether everything was within the limits. A unit goes where its first op goes; one
        that may not run on the device in turn (it is pinned, say) goes elsewhere and does not end the block.
        """
        chosen = np.zeros(self._problem.num_units, np.int32)
        covered = _fill(*self._given, np.array(devices, np.int64), load_limit, chosen)
        placement: Ints = chosen[self._problem.unit]
        return placement, bool(covered)


@njit(cache=True, nogil=True)
def _fill(program, may, seconds, need, room, devices, load_limit, chosen):  # type: ignore[no-untyped-def]
    load, used = np.zeros(len(room)), np.zeros(len(room))
    at, covered = 0, True
    for unit in program:
        d = devices[at]
        while may[unit, d] and at + 1 < len(devices):
            if load[d] + seconds[unit, d] <= load_limit and used[d] + need[unit] <= room[d]:
                break
            at += 1
            d = devices[at]
        if not may[unit, d]:
            d = 0
            while not may[unit, d]:
                d += 1
        load[d] += seconds[unit, d]
        used[d] += need[unit]
        covered = covered and load[d] <= load_limit and used[d] <= room[d]
        chosen[unit] = d
    return covered


def headroom(problem: Problem) -> NDArray[np.float64]:
    """[D] bytes to leave free for activations: twice what the most demanding op touches, where memory is limited."""
    graph = problem.graph
    touched = graph.scratch.copy()
    live = ~graph.is_stored[graph.tensor_producer]
    np.add.at(touched, graph.tensor_producer[live], graph.tensor_bytes[live])
    read = live[graph.edge_tensor]
    np.add.at(touched, graph.consumers[read], graph.tensor_bytes[graph.edge_tensor[read]])
    most = touched.max(initial=0.0) if problem.execution.memory == "live" else 0.0
    return np.where(np.isfinite(problem.capacity), 2 * most, 0.0)
