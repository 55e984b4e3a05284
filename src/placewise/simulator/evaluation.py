"""What placements are worth and whether they are allowed: the one place where every planner and file reader asks."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placewise.errors import InvalidInput
from placewise.graph import Ints
from placewise.problem import Problem
from placewise.simulator.arrays import arrays_for, checked_order
from placewise.simulator.constraints import broken_rules, describe, resident
from placewise.simulator.engine import Engine
from placewise.simulator.timeline import Floats, Timeline, Transfers


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One row per placement. `value` is what the simulator says whether or not the placement keeps the constraints;
    it is infinite only where it cannot run at all: not on these devices, or not in their slots.
    """

    value: Floats  # [B] seconds
    feasible: NDArray[np.bool_]  # [B]
    peak: Floats | None  # [B, D] bytes; None where memory could not bind and was not asked for

    @property
    def score(self) -> Floats:
        """[B] the value where feasible, else infinity."""
        return np.where(self.feasible, self.value, np.inf)


def evaluate(
    problem: Problem,
    placements: ArrayLike,
    order: Ints | None = None,
    *,
    peaks: bool = True,
    threads: int | None = None,
) -> Evaluation:
    """Score placements [B, N] (or one [N]) on all cores. `peaks=False` skips memory where it cannot bind."""
    rows = _as_rows(problem, placements)
    value, peak = _measure(problem, rows, order, peaks, threads)
    broken = broken_rules(problem, rows, value, peak)
    value[broken["device"]] = np.inf
    feasible = ~np.logical_or.reduce(list(broken.values()))
    return Evaluation(value, feasible, peak)


def violations(problem: Problem, placement: ArrayLike, order: Ints | None = None) -> list[str]:
    """What is wrong with a placement, in words; empty if it keeps every constraint."""
    rows = _as_rows(problem, placement)
    value, peak = _measure(problem, rows, order, True, 1)
    broken = broken_rules(problem, rows, value, peak)
    return [describe(problem, rule, rows[0], peak) for rule, rows_broken in broken.items() if rows_broken[0]]


def simulate(problem: Problem, placement: ArrayLike, order: Ints | None = None) -> Timeline:
    """The full timeline of one placement; `order` makes each device run its ops in that order, strictly."""
    rows = _as_rows(problem, placement)
    if len(rows) != 1:
        raise InvalidInput("simulate takes one placement; use evaluate for many")
    if broken_rules(problem, rows, None, None)["device"][0]:
        raise InvalidInput(describe(problem, "device", rows[0], None))
    if problem.execution.concurrency == "slots":
        from placewise.simulator.slots import simulate_slots

        return simulate_slots(problem, rows[0], order, resident(problem, rows)[0])
    engine = Engine(problem, arrays_for(problem, order), strict=order is not None, record=True)
    value, peak = np.empty(1), np.zeros((1, problem.num_devices))
    count = engine.run(rows, value, peak)
    if problem.execution.memory == "static" or problem.objective == "throughput":
        value, measured = _measure(problem, rows, order, True, 1)
        peak = peak if measured is None else measured
    log, arrays = engine.log, engine.arrays
    start, finish = np.empty(problem.num_ops), np.empty(problem.num_ops)
    start[arrays.op], finish[arrays.op] = log.start, log.finish
    tensor = arrays.tensor[log.tensor[:count]].astype(np.int32)
    reader = arrays.op[log.reader[:count]].astype(np.int32)
    transfers = Transfers(
        tensor=tensor,
        reader=reader,
        source=rows[0, problem.graph.tensor_producer[tensor]],
        target=rows[0, reader],
        start=log.sent[:count],
        finish=log.arrived[:count],
    )
    return Timeline(problem, rows[0], order, float(value[0]), start, finish, transfers, peak[0])


# ---- measuring -----------------------------------------------------------------------------------------------------


def _as_rows(problem: Problem, placements: ArrayLike) -> NDArray[np.int32]:
    rows = np.atleast_2d(np.asarray(placements))
    if rows.size == 0:
        rows = rows.reshape(-1 if problem.num_ops else max(1, len(rows)), problem.num_ops)
    if rows.ndim != 2 or rows.shape[1] != problem.num_ops:
        raise InvalidInput(f"a placement has {rows.shape[-1]} entries, but the graph has {problem.num_ops} ops")
    if rows.size and (rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= problem.num_devices):
        raise InvalidInput(f"a placement must hold whole numbers of devices, from 0 to {problem.num_devices - 1}")
    return np.require(rows, np.int32, ["C", "W"])  # compiled for writeable arrays only


def _measure(
    problem: Problem, rows: NDArray[np.int32], order: Ints | None, peaks: bool, threads: int | None
) -> tuple[Floats, Floats | None]:
    """(value [B], peak [B, D] or None)."""
    if problem.objective == "throughput":
        from placewise.simulator.throughput import time_per_sample

        return time_per_sample(problem, rows)
    static = problem.execution.memory == "static"
    track = not static and (peaks or _memory_may_bind(problem))
    value = np.empty(len(rows))
    peak = np.zeros((len(rows), problem.num_devices)) if track else None
    run: Callable[[slice], object]
    if problem.execution.concurrency == "slots":
        from placewise.simulator.slots import measure_slots

        if order is not None:
            checked_order(problem, order)  # it must be one, though the value is the same in any

        def run(chunk: slice) -> None:
            measure_slots(problem, rows[chunk], value[chunk])

    else:
        arrays = arrays_for(problem, order)

        def run(chunk: slice) -> None:
            engine = Engine(problem, arrays, strict=order is not None, record=track)
            engine.run(rows[chunk], value[chunk], None if peak is None else peak[chunk])

    workers = min(threads or cores(), len(rows))
    if workers < 2 or rows.size < 20_000:
        run(slice(None))
    else:
        bounds = np.linspace(0, len(rows), min(len(rows), workers * 4) + 1).astype(int)
        list(_pool(workers).map(run, [slice(a, b) for a, b in pairwise(bounds)]))
    if static:
        return value, resident(problem, rows)
    return value, peak


def _memory_may_bind(problem: Problem) -> bool:
    """Whether some placement could exceed some device: all bytes on one device is the most there can be."""
    graph = problem.graph
    most = graph.resident_bytes.sum() + graph.tensor_bytes.sum() + graph.scratch.max(initial=0.0)
    if problem.execution.sends == "edge":
        most += graph.tensor_bytes[graph.edge_tensor].sum()
    return bool(most > problem.capacity.min())


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, "placewise")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads stay behind
