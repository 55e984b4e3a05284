"""What methods share that decide first and look at memory afterwards: move units off devices that are too full."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placewise.graph import Floats, Ints
from placewise.planners.blocks import headroom
from placewise.problem import Problem


class Messages(NamedTuple):
    """What units send each other. Unit `reader[i]` reads message m = `message[i]`, which unit `sender[m]` sends."""

    sender: NDArray[np.int64]  # [M]
    bytes: Floats  # [M]
    message: NDArray[np.int64]  # [P] rising
    reader: NDArray[np.int64]  # [P]

    def seconds(self, problem: Problem, source: Ints | int, target: Ints | int) -> Floats:
        """[M] how long each message takes from one device to another."""
        cluster = problem.cluster
        seconds: Floats = cluster.latency[source, target] + self.bytes * cluster.seconds_per_byte[source, target]
        return seconds


def messages(problem: Problem) -> Messages:
    """A message is a tensor that other units read; where sends are per edge, an edge to another unit."""
    graph = problem.graph
    tensor = graph.edge_tensor.astype(np.int64)
    sender, reader = problem.unit[graph.edge_producer].astype(np.int64), problem.unit[graph.consumers].astype(np.int64)
    away = sender != reader
    if problem.execution.sends == "edge":
        found = np.arange(int(away.sum()))
        return Messages(sender[away], graph.tensor_bytes[tensor[away]], found, reader[away])
    pair = np.unique(tensor[away] * max(problem.num_units, 1) + reader[away])
    tensors, message = np.unique(pair // max(problem.num_units, 1), return_inverse=True)
    producer = problem.unit[graph.tensor_producer[tensors]].astype(np.int64)
    return Messages(producer, graph.tensor_bytes[tensors], message, pair % max(problem.num_units, 1))


def bytes_needed(problem: Problem) -> Floats:
    """[units] bytes that a unit brings to its device; a full pipeline also holds every tensor of a sample at once."""
    graph, need = problem.graph, problem.graph.resident_bytes.copy()
    if problem.objective == "throughput" and problem.execution.memory == "live":
        live = ~graph.is_stored[graph.tensor_producer]
        np.add.at(need, graph.tensor_producer[live], graph.tensor_bytes[live])
    needed: Floats = problem.per_unit(need)
    return needed


def fitted(problem: Problem, device: Ints, room: Floats | None = None) -> Ints:
    """[units] the same with the units moved that cost least, per byte, until no device is too full.

    What a move costs is estimated as if nothing ran at the same time: its seconds and its transfers. Half of what is
    too much goes at a time, so that the estimates of the rest are made anew. Where nothing fits any more, the rest
    stays; the driver then says which device is too small. `room` leaves space for activations by default.
    """
    room = problem.capacity - headroom(problem) if room is None else room
    need, device = bytes_needed(problem), device.astype(np.int32)
    used = np.bincount(device, need, problem.num_devices)
    if not (used > room).any():
        return device
    sent, seconds = messages(problem), problem.per_unit(problem.seconds)
    while (used > room).any():
        full = int((used - room).argmax())
        here = np.flatnonzero((device == full) & (need > 0))
        loss = _cost(problem, sent, seconds, device)[here]
        loss = (loss - loss[:, [full]]) / need[here, None]
        loss[:, full] = np.inf
        loss[need[here, None] + used > room] = np.inf
        target, at_most = loss.argmin(axis=1), max((used[full] - room[full]) / 2, 0.0)
        moved = 0.0
        for i in np.argsort(loss.min(axis=1), kind="stable").tolist():
            unit, to = here[i], target[i]
            if moved > at_most or not np.isfinite(loss[i, to]):
                break
            if used[to] + need[unit] <= room[to]:
                device[unit] = to
                used[to] += need[unit]
                moved += need[unit]
        if not moved:
            break
        used[full] -= moved
    return device


def _cost(problem: Problem, sent: Messages, seconds: Floats, device: Ints) -> Floats:
    """[units, D] seconds of each unit and of its transfers on each device, the others where they are."""
    cost, size = seconds.copy(), sent.bytes[sent.message, None]
    latency, per_byte = problem.cluster.latency, problem.cluster.seconds_per_byte
    sender = sent.sender[sent.message]
    source, target = device[sender], device[sent.reader]
    np.add.at(cost, sender, latency[:, target].T + size * per_byte[:, target].T)
    np.add.at(cost, sent.reader, latency[source] + size * per_byte[source])
    return cost
