"""The rules that a placement must keep, in one place: devices, groups, intervals, number of devices, slots, memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from placewise.problem import Problem
from placewise.quantities import format_bytes
from placewise.simulator.timeline import Floats


def broken_rules(
    problem: Problem, rows: NDArray[np.int32], value: Floats | None, peak: Floats | None
) -> dict[str, NDArray[np.bool_]]:
    """Which rows break which rule; memory needs the measured peaks, and slots the measured value."""
    broken: dict[str, Any] = {"device": np.zeros(len(rows), np.bool_)}
    if not problem.allowed.all():
        broken["device"] = ~problem.allowed[np.arange(problem.num_ops), rows].all(axis=1)
    if problem.num_units < problem.num_ops:
        broken["group"] = (rows != rows[:, problem.first_of_unit[problem.unit]]).any(axis=1)
    if problem.contiguous:
        broken["contiguous"] = np.array([_has_cycle(quotient(problem, row)) for row in rows], np.bool_)
    if problem.max_devices is not None:
        broken["devices"] = np.array([len(np.unique(row)) > problem.max_devices for row in rows], np.bool_)
    if value is not None and problem.execution.concurrency == "slots":
        broken["slots"] = ~np.isfinite(value)
    if peak is not None:
        broken["memory"] = (peak > problem.capacity).any(axis=1)
    return broken


def quotient(problem: Problem, row: NDArray[np.int32]) -> NDArray[np.bool_]:
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


def describe(problem: Problem, rule: str, row: NDArray[np.int32], peak: Floats | None) -> str:
    """How one placement breaks a rule, in words."""
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
    if rule == "slots":
        from placewise.simulator.slots import why_not_in_slots

        return why_not_in_slots(problem, row)
    assert peak is not None
    d = int(np.argmax(peak[0] - problem.capacity))
    need, has = format_bytes(peak[0, d]), format_bytes(problem.capacity[d])
    if need == has:
        return f"{names[d]} needs {format_bytes(peak[0, d] - problem.capacity[d])} more than its {has} of memory"
    return f"{names[d]} needs {need} of memory and has {has}"


def resident(problem: Problem, rows: NDArray[np.int32]) -> Floats:
    """[B, D] bytes that are held for the whole run."""
    d = problem.num_devices
    flat = rows + np.arange(len(rows), dtype=np.int64)[:, None] * d
    weights = np.broadcast_to(problem.graph.resident_bytes, rows.shape)
    held: Floats = np.bincount(flat.ravel(), weights.ravel(), len(rows) * d).reshape(-1, d).astype(np.float64)
    return held
