"""What placements are worth and whether they are allowed: the one place where every planner and file reader asks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placewise.errors import InvalidInput
from placewise.graph import Ints
from placewise.problem import Problem
from placewise.quantities import format_bytes
from placewise.simulator.arrays import Arrays, arrays_for
from placewise.simulator.timeline import Floats, Timeline, Transfers

_U = np.uint64
#: The kernel's last arguments where runs are neither recorded, nor cut off, nor saved.
NO_LOG = (None,) * 7
_TO_THE_END: tuple[Any, ...] = (np.inf, np.empty(0), np.empty(0, np.uint64))
_NO_CHECKPOINTS: tuple[Any, ...] = (
    _U(0), np.empty((0, 0)), np.empty((0, 0), np.int32), np.empty((0, 0), np.uint64), np.empty(0, np.uint32),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One row per placement. `value` is what the simulator says whether or not the placement keeps the constraints;
    it is infinite only where an op cannot run on its device at all.
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
    broken = _broken_rules(problem, rows, peak)
    value[broken["device"]] = np.inf
    feasible = ~np.logical_or.reduce(list(broken.values()))
    return Evaluation(value, feasible, peak)


def violations(problem: Problem, placement: ArrayLike, order: Ints | None = None) -> list[str]:
    """What is wrong with a placement, in words; empty if it keeps every constraint."""
    rows = _as_rows(problem, placement)
    _, peak = _measure(problem, rows, order, True, 1)
    broken = _broken_rules(problem, rows, peak)
    return [_describe(problem, rule, rows[0], peak) for rule, rows_broken in broken.items() if rows_broken[0]]


def simulate(problem: Problem, placement: ArrayLike, order: Ints | None = None) -> Timeline:
    """The full timeline of one placement; `order` makes each device run its ops in that order, strictly."""
    rows = _as_rows(problem, placement)
    if len(rows) != 1:
        raise InvalidInput("simulate takes one placement; use evaluate for many")
    if _broken_rules(problem, rows, None)["device"][0]:
        raise InvalidInput(_describe(problem, "device", rows[0], None))
    arrays = arrays_for(problem, order)
    log = Log.create(problem)
    value, peak = np.empty(1), np.zeros((1, problem.num_devices))
    count = _run_kernel(problem, arrays, rows, order is not None, value, peak, log)
    if problem.execution.memory == "static" or problem.objective == "throughput":
        value, measured = _measure(problem, rows, order, True, 1)
        peak = peak if measured is None else measured
    start, finish = np.empty(problem.num_ops), np.empty(problem.num_ops)
    start[arrays.op], finish[arrays.op] = log.start, log.finish
    transfers = Transfers(
        tensor=arrays.tensor[log.tensor[:count]].astype(np.int32),
        reader=arrays.op[log.reader[:count]].astype(np.int32),
        source=(log.link[:count] // problem.num_devices).astype(np.int32),
        target=(log.link[:count] % problem.num_devices).astype(np.int32),
        start=log.sent[:count],
        finish=log.arrived[:count],
    )
    return Timeline(problem, rows[0], order, float(value[0]), start, finish, transfers, peak[0])


@contextmanager
def announced(text: str, announce: Callable[[str], None] | None) -> Iterator[None]:
    """Tell the user what is going on if it takes longer than a moment."""
    timer = threading.Timer(2.0, announce or (lambda _: None), [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
        return _throughput(problem, rows)
    static = problem.execution.memory == "static"
    track = not static and (peaks or _memory_may_bind(problem))
    arrays = arrays_for(problem, order)
    value = np.empty(len(rows))
    peak = np.zeros((len(rows), problem.num_devices)) if track else None

    def run(chunk: slice) -> None:
        log = Log.create(problem) if track else None
        peaks_of_chunk = None if peak is None else peak[chunk]
        _run_kernel(problem, arrays, rows[chunk], order is not None, value[chunk], peaks_of_chunk, log)

    workers = min(threads or _cores(), len(rows))
    if workers < 2 or rows.size < 20_000:
        run(slice(None))
    else:
        bounds = np.linspace(0, len(rows), min(len(rows), workers * 4) + 1).astype(int)
        list(_pool(workers).map(run, [slice(a, b) for a, b in pairwise(bounds)]))
    if static:
        return value, _resident(problem, rows)
    return value, peak


class Log(NamedTuple):
    """Room for the times of ops and transfers, in the order in which the kernels take it; ops have their numbers."""

    start: Floats  # [N]
    finish: Floats  # [N]
    tensor: NDArray[np.uint32]  # [E] and so on: at most one transfer per edge
    reader: NDArray[np.uint32]
    link: NDArray[np.uint32]  # source * D + target
    sent: Floats
    arrived: Floats

    @classmethod
    def create(cls, problem: Problem) -> Log:
        """For the runs of one thread."""
        n, edges = problem.num_ops, problem.graph.num_edges
        tensor, reader, link = np.empty((3, edges), np.uint32)
        return cls(np.zeros(n), np.zeros(n), tensor, reader, link, np.empty(edges), np.empty(edges))


def _run_kernel(
    problem: Problem,
    arrays: Arrays,
    rows: NDArray[np.int32],
    strict: bool,
    value: Floats,
    peak: Floats | None,
    log: Log | None,
) -> int:
    """Run all rows to the end, with peak memory and a log or without both; returns the number of transfers."""
    from placewise.simulator import kernel

    execution, given = problem.execution, arrays._asdict()
    del given["tensor"]
    devices, models = _U(problem.num_devices), _U(num_models(problem))
    per_edge = execution.sends == "edge"
    if execution.concurrency == "sequential":
        for unused in ("num_inputs", "sources", "via_ptr", "via"):
            del given[unused]
        log = log or Log.create(problem)
        peak = np.empty((len(rows), problem.num_devices)) if peak is None else peak
        room = kernel.memory_workspace(len(arrays.op), len(arrays.bytes), len(arrays.consumer), problem.num_devices)
        return int(kernel.run_sequential(*given.values(), devices, models, room, rows, per_edge, value, peak, *log))
    room = kernel.workspace(arrays, problem.num_devices, num_models(problem), log is not None)
    return int(
        kernel.run(
            *given.values(), devices, _U(arrays.num_channels), models, *room,
            rows, strict, per_edge, _U(execution.prefetch), value, peak, *(log or NO_LOG),
            *_TO_THE_END, np.full(len(rows), -1), *_NO_CHECKPOINTS,
        )
    )  # fmt: skip


def num_models(problem: Problem) -> int:
    """How many completion times the value adds up."""
    return len(problem.graph.models) if problem.objective == "completion" else 1


def _throughput(problem: Problem, rows: NDArray[np.int32]) -> tuple[Floats, Floats]:
    compute, transfer, channel, held = throughput_loads(problem, rows)
    execution, graph = problem.execution, problem.graph
    device = np.maximum(compute, transfer) if execution.overlap else compute + transfer
    load = np.concatenate([device, channel], axis=2)  # [B, phase, devices and channels]
    if execution.pipeline == "gpipe":
        value = load.max(axis=2).sum(axis=1)
    else:
        # The longer of compute and transfers is taken over the whole step, not phase by phase.
        both = [np.maximum(compute.sum(1), transfer.sum(1)) if execution.overlap else device.sum(1), channel.sum(1)]
        value = np.concatenate(both, axis=1).max(axis=1)
    peak = _resident(problem, rows)
    if execution.memory == "live":
        scratch = np.zeros_like(peak)
        for d in range(problem.num_devices):
            scratch[:, d] = np.where(rows == d, graph.scratch, 0.0).max(axis=1, initial=0.0)
        peak = peak + held + scratch
    return value, peak


def throughput_loads(problem: Problem, rows: NDArray[np.int32]) -> tuple[Floats, Floats, Floats, Floats]:
    """compute and transfer [B, phase, D], channel [B, phase, channels] in seconds; held [B, D] in bytes."""
    from placewise.simulator import throughput

    graph, cluster, execution = problem.graph, problem.cluster, problem.execution
    b, d = len(rows), problem.num_devices
    queues = execution.contention == "channel"
    pairs = [(x, y) for x in range(d) for y in range(d)]
    via = [cluster.channels_of.get(pair, ()) if queues else () for pair in pairs]
    channels = len(cluster.channels) if queues else 0
    compute, transfer, channel = np.zeros((b, 2, d)), np.zeros((b, 2, d)), np.zeros((b, 2, channels))
    held = np.zeros((b, d))
    stored = graph.is_stored[graph.tensor_producer]
    throughput.loads(
        np.where(np.isfinite(problem.seconds), problem.seconds, 0.0), (graph.phase > 0).astype(np.int32),
        graph.tensor_producer, graph.tensor_bytes, graph.consumer_ptr, graph.consumers,
        cluster.latency, cluster.seconds_per_byte, np.cumsum([0, *map(len, via)]),
        np.array([c for channels_of_link in via for c in channels_of_link], np.int64),
        np.array([device.copies for device in cluster.devices]), channels, rows,
        execution.overlap, execution.staged, execution.sends == "edge", compute, transfer, channel, held,
    )  # fmt: skip
    # What is stored counts as resident at home, not as held a second time.
    for t in np.flatnonzero(stored).tolist():
        held[np.arange(b), rows[:, graph.tensor_producer[t]]] -= graph.tensor_bytes[t]
    return compute, transfer, channel, held


def _resident(problem: Problem, rows: NDArray[np.int32]) -> Floats:
    """[B, D] bytes that are held for the whole run."""
    d = problem.num_devices
    flat = rows + np.arange(len(rows), dtype=np.int64)[:, None] * d
    weights = np.broadcast_to(problem.graph.resident_bytes, rows.shape)
    held: Floats = np.bincount(flat.ravel(), weights.ravel(), len(rows) * d).reshape(-1, d).astype(np.float64)
    return held


def _memory_may_bind(problem: Problem) -> bool:
    """Whether some placement could exceed some device: all bytes on one device is the most there can be."""
    graph = problem.graph
    copies = graph.num_edges if problem.execution.sends == "edge" else 0
    most = graph.resident_bytes.sum() + graph.tensor_bytes.sum() + graph.scratch.max(initial=0.0)
    most += graph.tensor_bytes[graph.edge_tensor].sum() if copies else 0.0
    return bool(most > problem.capacity.min())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, "placewise")


# ---- constraints ---------------------------------------------------------------------------------------------------


def _broken_rules(problem: Problem, rows: NDArray[np.int32], peak: Floats | None) -> dict[str, NDArray[np.bool_]]:
    """Which rows break which rule; memory needs the measured peaks."""
    broken: dict[str, Any] = {"device": np.zeros(len(rows), np.bool_)}
    if not problem.allowed.all():
        broken["device"] = ~problem.allowed[np.arange(problem.num_ops), rows].all(axis=1)
    if problem.num_units < problem.num_ops:
        broken["group"] = (rows != rows[:, problem.first_of_unit[problem.unit]]).any(axis=1)
    if problem.contiguous:
        broken["contiguous"] = np.array([_has_cycle(_quotient(problem, row)) for row in rows], np.bool_)
    if problem.max_devices is not None:
        broken["devices"] = np.array([len(np.unique(row)) > problem.max_devices for row in rows], np.bool_)
    if peak is not None:
        broken["memory"] = (peak > problem.capacity).any(axis=1)
    return broken


def _quotient(problem: Problem, row: NDArray[np.int32]) -> NDArray[np.bool_]:
    """[D, D] whether forward data flows from one device to another."""
    graph = problem.graph
    forward = (graph.phase[graph.edge_producer] == 0) & (graph.phase[graph.consumers] == 0)
    forward &= ~graph.is_stored[graph.edge_producer]
    flows = np.zeros((problem.num_devices, problem.num_devices), np.bool_)
    flows[row[graph.edge_producer[forward]], row[graph.consumers[forward]]] = True
    np.fill_diagonal(flows, False)
    return flows


def _has_cycle(flows: NDArray[np.bool_]) -> bool:
    """Whether the device graph has a cycle, so that no order of the devices gives each an interval."""
    alive = np.ones(len(flows), np.bool_)
    while True:
        leaves = alive & ~(flows & alive).any(axis=1)
        if not leaves.any():
            return bool(alive.any())
        alive &= ~leaves


def _describe(problem: Problem, rule: str, row: NDArray[np.int32], peak: Floats | None) -> str:
    graph, names = problem.graph, problem.cluster.device_names
    if rule == "device":
        op = int(np.argmin(problem.allowed[np.arange(problem.num_ops), row]))
        return f"op {graph.op_names[op]!r} may not run on {names[row[op]]}"
    if rule == "group":
        op = int(np.argmax(row != row[problem.first_of_unit[problem.unit]]))
        other = graph.op_names[problem.first_of_unit[problem.unit[op]]]
        return f"ops {other!r} and {graph.op_names[op]!r} must share a device"
    if rule == "contiguous":
        return "the devices do not form intervals of the dataflow: data flows back to a device that it has left"
    if rule == "devices":
        return f"it uses {len(np.unique(row))} devices, at most {problem.max_devices} are allowed"
    assert peak is not None
    d = int(np.argmax(peak[0] - problem.capacity))
    return f"{names[d]} needs {format_bytes(peak[0, d])} of memory and has {format_bytes(problem.capacity[d])}"
