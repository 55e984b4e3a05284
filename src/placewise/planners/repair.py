"""What methods share that decide first and look at memory afterwards: move units off devices that are too full."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placewise.driver import Context
from placewise.graph import Floats, Ints
from placewise.planners.blocks import headroom
from placewise.problem import Problem
from placewise.simulator import evaluate
from placewise.simulator.throughput import held_bytes
from placewise.simulator.working import working_set

_ROUNDS: Final = 8  # of repair and measurement


class Messages(NamedTuple):
    """What units send each other. Unit `reader[i]` reads message m = `message[i]`, which unit `sender[m]` sends."""

    sender: NDArray[np.int64]  # [M]
    tensor: NDArray[np.int64]  # [M]
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
        return Messages(sender[away], tensor[away], graph.tensor_bytes[tensor[away]], found, reader[away])
    pair = np.unique(tensor[away] * max(problem.num_units, 1) + reader[away])
    tensors, message = np.unique(pair // max(problem.num_units, 1), return_inverse=True)
    producer = problem.unit[graph.tensor_producer[tensors]].astype(np.int64)
    return Messages(producer, tensors, graph.tensor_bytes[tensors], message, pair % max(problem.num_units, 1))


def roomy(problem: Problem) -> bool:
    """Whether each device has room for all that there is."""
    return bool(problem.graph.resident_bytes.sum() + working_set(problem).max(initial=0.0) <= problem.capacity.min())


def bytes_needed(problem: Problem) -> Floats:
    """[units] bytes that a unit brings to its device; a full pipeline also holds every tensor of a sample at once."""
    graph, need = problem.graph, problem.graph.resident_bytes.copy()
    if problem.objective == "throughput":
        np.add.at(need, graph.tensor_producer, held_bytes(problem)[0])
    needed: Floats = problem.per_unit(need)
    return needed


def bytes_at_peak(problem: Problem) -> Floats:
    """[units] bytes that a unit brings to its device when most is held: its own, and its tensors that are alive then.

    That instant is found as if all ops ran one after the other, in the order of the program, on one device.
    """
    graph, need = problem.graph, problem.graph.resident_bytes.copy()
    if problem.objective == "throughput" or problem.execution.memory == "static" or not graph.num_tensors:
        return bytes_needed(problem)
    position = np.empty(problem.num_ops, np.int64)
    position[graph.topological_order] = np.arange(problem.num_ops)
    since, until = position[graph.tensor_producer], np.full(graph.num_tensors, problem.num_ops)
    read = np.diff(graph.consumer_ptr) > 0
    until[read] = np.maximum.reduceat(position[graph.consumers], graph.consumer_ptr[:-1][read]) + 1
    size = np.where(graph.is_stored[graph.tensor_producer], 0.0, graph.tensor_bytes)
    change = np.bincount(since, size, problem.num_ops + 1) - np.bincount(until, size, problem.num_ops + 1)
    peak = int(np.cumsum(change)[:-1].argmax())
    alive = (since <= peak) & (peak < until)
    np.add.at(need, graph.tensor_producer[alive], size[alive])
    needed: Floats = problem.per_unit(need)
    return needed


def fitted(problem: Problem, device: Ints, room: Floats | None = None, need: Floats | None = None) -> Ints:
    """[units] the same with the units moved that cost least, per byte, until no device is too full.

    What a move costs is estimated as if nothing ran at the same time: its seconds and its transfers. Half of what is
    too much goes at a time, so that the estimates of the rest are made anew. Where nothing fits any more, the rest
    stays; the driver then says which device is too small. `room` [D] leaves space for activations by default, and
    `need` [units] is `bytes_needed`.
    """
    room = problem.capacity - headroom(problem) if room is None else room
    need, device = bytes_needed(problem) if need is None else need, device.astype(np.int32)
    used = np.bincount(device, need, problem.num_devices)
    if not (used > room).any():
        return device
    sent, seconds = messages(problem), problem.unit_seconds
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


def settled(problem: Problem, ctx: Context, device: Ints) -> Ints:
    """[units] the same, repaired for what is alive at a time as well: the first that fits, or the last that was tried.

    What a device holds beyond `bytes_at_peak` is measured, so much room is left there, and it is measured again.
    """
    need, beyond = bytes_at_peak(problem), np.full(problem.num_devices, -np.inf)
    for _ in range(_ROUNDS):
        row = device[problem.unit]
        if ctx.should_stop() or np.isfinite(ctx.evaluate(row)):
            break
        peak = evaluate(problem, row, threads=1).peak
        assert peak is not None
        beyond = np.maximum(beyond, peak[0] - np.bincount(device, need, problem.num_devices))
        moved = fitted(problem, device, problem.capacity - beyond, need)
        if np.array_equal(moved, device):
            break
        device = moved
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
