"""A genetic algorithm with biased random keys, decoded by list scheduling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numba import njit

from placewise.driver import Context
from placewise.errors import InvalidInput
from placewise.graph import Floats, Ints
from placewise.planners import planner
from placewise.planners.blocks import headroom
from placewise.planners.heft import ignores_shape, place_in_order, schedule
from placewise.planners.list_scheduling import topological
from placewise.problem import Problem
from placewise.simulator.arrays import priority_order, upward_rank

_ELITE: Final = 0.2  # share of a generation that lives on
_MUTANTS: Final = 0.15  # share that is new
_BIAS: Final = 0.7  # chance that a child's key is its elite parent's
_FREE: Final = 0.8  # keys below this leave the choice of device to the decoder;
_FREE_OF_TRANSFERS: Final = 0.2  # fewer do where it knows loads only


def _compile(problem: Problem) -> None:
    if problem.objective != "throughput":
        schedule(problem)
    _Decoder(problem)(np.zeros(problem.num_units + problem.num_ops))


@planner("genetic", supports=ignores_shape, compile=_compile)
def genetic(problem: Problem, ctx: Context, *, population: int = 60, patience: int = 20) -> None:
    """Biased random keys over devices and priorities, decoded by list scheduling (Gonçalves and Resende 2011).

    doi:10.1007/s10732-010-9143-1; for placement, Paliwal et al. 2020 (REGAL, arXiv:1905.02494). Unlike there, most keys
    leave an op to the decoder, which puts it where it ends first, and priorities are around upward ranks: so the first
    individual is HEFT's plan, and the search is for where to depart from it. It ends when `patience` generations in a
    row bring nothing better.
    """
    if population < 4:
        raise InvalidInput(f"option population of genetic = {population}: it must be 4 or more")
    for _ in evolve(ctx, population, patience):
        pass


def evolve(ctx: Context, population: int = 60, patience: int = 20) -> Iterator[float]:
    """The search, a generation at a time; yields the best value."""
    problem = ctx.problem
    decode, rng = _Decoder(problem), ctx.rng
    length = problem.num_units + problem.num_ops
    elite, mutants = max(1, round(_ELITE * population)), max(1, round(_MUTANTS * population))
    children = population - elite - mutants
    keys = rng.random((population, length))
    keys[0, : problem.num_units], keys[0, problem.num_units :] = 0.0, 0.5
    if ctx.best is not None:
        keys[1] = decode.keys_of(ctx.best[0])
    value = np.array([ctx.evaluate(*decode(row)) for row in keys])
    best, fruitless = value.min(), 0
    while fruitless < patience:
        yield float(best)
        if ctx.should_stop():
            return
        ranked = np.argsort(value, kind="stable")
        keys, value = keys[ranked], value[ranked]
        mothers = keys[rng.integers(0, elite, children)]
        fathers = keys[rng.integers(elite, population, children)]
        keys[elite : elite + children] = np.where(rng.random(mothers.shape) < _BIAS, mothers, fathers)
        keys[elite + children :] = rng.random((mutants, length))
        value[elite:] = [ctx.evaluate(*decode(row)) for row in keys[elite:]]
        best, fruitless = (value.min(), 0) if value.min() < best else (best, fruitless + 1)


class _Decoder:
    """Keys in [0, 1), one per unit for its device and one per op for its priority, to a plan."""

    def __init__(self, problem: Problem) -> None:
        graph, self._problem = problem.graph, problem
        self._free = _FREE_OF_TRANSFERS if problem.objective == "throughput" else _FREE
        self._may = problem.unit_allowed
        self._choices = self._may.sum(axis=1)
        # [U, D] which of the unit's allowed devices a device is, counted from 0
        self._which = np.where(self._may, np.cumsum(self._may, axis=1) - 1, -1)
        self._rank = upward_rank(problem)
        self._seconds = problem.per_unit(np.where(problem.allowed, problem.seconds, 0.0))
        self._need = problem.per_unit(graph.resident_bytes)
        self._room = problem.capacity - headroom(problem)
        self._urgency = priority_order(problem)

    def __call__(self, keys: Floats) -> tuple[Ints, Ints | None]:
        """(placement, order); there is no order where only loads count."""
        problem, units = self._problem, self._problem.num_units
        # A key that leaves no choice names a device: the share of the way through the allowed ones.
        named = np.floor((keys[:units] - self._free) / (1.0 - self._free) * self._choices)
        wanted = (self._which == named[:, None]) & self._may
        priority = self._rank * (0.5 + keys[units:])
        order = topological(problem, priority, self._urgency)
        if problem.objective != "throughput":
            # What an op costs where it is not wanted: more than any schedule takes.
            bias = np.where(wanted.any(axis=1, keepdims=True) & ~wanted, 1e3 * (1.0 + self._rank.sum()), 0.0)
            return place_in_order(problem, order, bias=bias[problem.unit])
        program = problem.unit[order]
        program = program[np.sort(np.unique(program, return_index=True)[1])].astype(np.int64)
        device = _balance(program, self._may, wanted, self._seconds, self._need, self._room)
        placement: Ints = device[problem.unit]
        return placement, None

    def keys_of(self, placement: Ints) -> Floats:
        """Keys that name the device of every unit, and priorities by rank."""
        problem = self._problem
        which = self._which[np.arange(problem.num_units), placement[problem.first_of_unit]]
        device = self._free + (1.0 - self._free) * (which + 0.5) / np.maximum(self._choices, 1)
        return np.concatenate([device, np.full(problem.num_ops, 0.5)])


@njit(cache=True, nogil=True)
def _balance(program, may, wanted, seconds, need, room):  # type: ignore[no-untyped-def]
    """Each unit on the device that it wants, else where the load is least with it; if there is room."""
    units, devices = may.shape
    load, left = np.zeros(devices), room.copy()
    chosen = np.zeros(units, np.int32)
    for unit in program:
        best, least, level = -1, np.inf, 4
        for d in range(devices):
            if may[unit, d]:
                # 0: wanted and fits, 1: fits, 2: not even that
                here = 2 if need[unit] > left[d] else (0 if wanted[unit, d] else 1)
                after = -left[d] if here == 2 else load[d] + seconds[unit, d]
                if here < level or (here == level and after < least):
                    best, least, level = d, after, here
        load[best] += seconds[unit, best]
        left[best] -= need[unit]
        chosen[unit] = best
    return chosen
