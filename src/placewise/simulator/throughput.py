"""Time per sample in a full pipeline: the load of the busiest device or channel.

After Tarnawski et al. 2020 (arXiv:2006.16423), generalised to links that differ. A device's load is its compute plus
the transfers that it takes part in, or the longer of the two where they overlap. A tensor is received once by each
device that reads it; it is sent once per receiving device, or once in all where sends are staged through host memory.
Parameters stay where they are read, and are sent again only when training has changed them.
Devices without ops may take over samples of others like them, and training may hold several samples at once.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placewise.problem import Problem
from placewise.simulator.alike import kinds
from placewise.simulator.arrays import channels_of_links
from placewise.simulator.constraints import quotient, resident
from placewise.simulator.timeline import Floats

Whole = NDArray[np.int64]

_ANY: Final = 1 << 31  # samples


def time_per_sample(problem: Problem, rows: NDArray[np.int32]) -> tuple[Floats, Floats]:
    """(seconds [B], bytes [B, D] that each device holds in a full pipeline)."""
    loads = throughput_loads(problem, rows)
    device, channel, count = busy(problem, rows, *loads)
    value = np.concatenate([device, channel], axis=2).max(axis=2).sum(axis=1)
    peak = _alone(problem, rows, loads[3])
    if in_flight(problem):
        peak = peak + (_samples(problem, rows, count) - 1) * loads[3][:, 1]
    return value, peak


def busy(
    problem: Problem, rows: NDArray[np.int32], compute: Floats, transfer: Floats, channel: Floats, held: Floats
) -> tuple[Floats, Floats, Whole]:
    """(device [B, P, D], channel [B, P, C]) seconds in each phase that has a busiest of its own, or in all (P = 1).

    Third, how many devices do the work of each [B, D], itself included; none where it has no ops of its own.
    """
    apart, overlap = problem.execution.pipeline == "gpipe", problem.execution.overlap
    if overlap and not apart:  # the longer of compute and transfers is taken over the whole step, not phase by phase
        compute, transfer = compute.sum(axis=1, keepdims=True), transfer.sum(axis=1, keepdims=True)
    device = np.maximum(compute, transfer) if overlap else compute + transfer
    if not apart:
        device, channel = device.sum(axis=1, keepdims=True), channel.sum(axis=1, keepdims=True)
    count = np.zeros((len(rows), problem.num_devices), np.int64)
    np.put_along_axis(count, rows.astype(np.int64), 1, axis=1)
    if problem.execution.replicate and problem.num_ops:
        device = _shared(problem, rows, device, channel, held, count)
    return device, channel, count


def total_load(problem: Problem, rows: NDArray[np.int32]) -> Floats:
    """[B] seconds that all devices and channels take together."""
    device, channel, _ = busy(problem, rows, *throughput_loads(problem, rows))
    total: Floats = device.sum(axis=(1, 2)) + channel.sum(axis=(1, 2))
    return total


def throughput_loads(problem: Problem, rows: NDArray[np.int32]) -> tuple[Floats, Floats, Floats, Floats]:
    """compute and transfer [B, phase, D], channel [B, phase, channels] in seconds; held [B, 2, D] in bytes.

    Held are the tensors of one sample, and of each more in flight.
    """
    graph, cluster, execution = problem.graph, problem.cluster, problem.execution
    b, d = len(rows), problem.num_devices
    via_ptr, via = channels_of_links(problem)
    channels = len(cluster.channels) if execution.contention == "channel" else 0
    compute, transfer, channel = np.zeros((b, 2, d)), np.zeros((b, 2, d)), np.zeros((b, 2, channels))
    held = np.zeros((b, 2, d))
    _loads(
        np.where(np.isfinite(problem.seconds), problem.seconds, 0.0), (graph.phase > 0).astype(np.int32),
        graph.tensor_producer, graph.tensor_bytes, sent_share(problem), graph.consumer_ptr, graph.consumers,
        cluster.latency, cluster.seconds_per_byte, via_ptr, via,
        np.array([device.copies for device in cluster.devices]), channels, rows,
        execution.staged, execution.sends == "edge", *held_bytes(problem), *kept_bytes(problem),
        compute, transfer, channel, held,
    )  # fmt: skip
    if execution.recompute and trains(problem):
        compute[:, 1] += compute[:, 0]
    return compute, transfer, channel, held


# ---- tensors ---------------------------------------------------------------------------------------------------------


def sent_share(problem: Problem) -> Floats:
    """[T] how often each tensor is sent per sample: once; a parameter never, or in training once for each step."""
    graph, again = problem.graph, 1.0 / problem.execution.microbatches if trains(problem) else 0.0
    return np.where(graph.is_parameter[graph.tensor_producer], again, 1.0)


def held_bytes(problem: Problem) -> tuple[Floats, Floats]:
    """[T] bytes of each tensor that are held where it is made, beyond what is resident there, and where it is received.

    Copies of parameters count even where no other tensor does: they are there for the whole run.
    """
    graph, live = problem.graph, problem.execution.memory == "live"
    home = live & ~graph.is_stored[graph.tensor_producer]
    away = live | graph.is_parameter[graph.tensor_producer]
    return np.where(home, graph.tensor_bytes, 0.0), np.where(away, graph.tensor_bytes, 0.0)


# ---- samples in flight -----------------------------------------------------------------------------------------------


def trains(problem: Problem) -> bool:
    """Whether some op runs backward."""
    return bool((problem.graph.phase > 0).any())


def kept_bytes(problem: Problem) -> tuple[Floats, Floats]:
    """[T] bytes of each tensor that are kept for each sample in flight: where it is made, where it is received."""
    graph = problem.graph
    forward = (graph.phase[graph.tensor_producer] == 0) & ~graph.is_stored[graph.tensor_producer]
    if problem.execution.recompute:
        return np.zeros(graph.num_tensors), np.where(forward, graph.tensor_bytes, 0.0)
    again = np.zeros(graph.num_tensors, np.bool_)
    again[graph.edge_tensor[graph.phase[graph.consumers] > 0]] = True
    kept = np.where(forward & again, graph.tensor_bytes, 0.0)
    return kept, kept


def in_flight(problem: Problem) -> bool:
    """Whether a device may hold several samples."""
    execution = problem.execution
    return execution.in_flight == "pipeline" and execution.memory == "live" and trains(problem)


class Flight(NamedTuple):
    """How many samples there are in flight from a stage to the end of the pipeline and back."""

    drains: bool  # all of a step; else as many as devices have stages from here on
    step: int  # most

    def samples(self, devices: Whole, replicas: Whole | int) -> Whole:
        """How many of them one of the replicas of a stage holds, with so many devices from here on."""
        total: Whole = np.full_like(devices, self.step) if self.drains else np.minimum(devices, self.step)
        return np.asarray(-(-total // replicas))


def flight(problem: Problem) -> Flight:
    """A step of one sample says nothing of how long the pipeline is fed."""
    drains, step = problem.execution.pipeline == "gpipe", problem.execution.microbatches
    return Flight(drains, step if step > 1 or drains else _ANY)


def _alone(problem: Problem, rows: NDArray[np.int32], held: Floats) -> Floats:
    """[B, D] bytes with one sample in flight."""
    peak = resident(problem, rows) + held[:, 0]
    if problem.execution.memory == "live":
        scratch = np.zeros_like(peak)
        for d in range(problem.num_devices):
            scratch[:, d] = np.where(rows == d, problem.graph.scratch, 0.0).max(axis=1, initial=0.0)
        peak = peak + scratch
    return peak


def _samples(problem: Problem, rows: NDArray[np.int32], count: Whole) -> Whole:
    """[B, D] samples in flight on each device, and on each of those that repeat its work."""
    return flight(problem).samples(_devices_ahead(problem, rows, count), np.maximum(count, 1))


def _devices_ahead(problem: Problem, rows: NDArray[np.int32], count: Whole) -> Whole:
    """[B, D] the most devices along the flow of data from each on, where `count` of them have its stage."""
    total = count
    if problem.execution.pipeline == "1f1b":
        flows = np.array([quotient(problem, row) for row in rows])
        for _ in range(problem.num_devices - 1):
            total = count + np.where(flows, total[:, None], 0).max(axis=2)
    return total


# ---- replicas --------------------------------------------------------------------------------------------------------


class Exchange(NamedTuple):
    """What replicas pay per sample for adding up gradients: (r - 1) / r of `per_byte` a byte, r - 1 times `latency`."""

    per_byte: Floats  # [K]
    latency: Floats  # [K]


def exchange(problem: Problem) -> Exchange:
    """In a ring each replica sends all its resident bytes twice, less a share, once for all samples of a step."""
    cluster, found = problem.cluster, np.zeros((2, len(kinds(problem))))
    for k, (a, *others) in enumerate(kinds(problem)):
        if others and trains(problem):  # all links within a kind are equal
            found[:, k] = cluster.seconds_per_byte[a, others[0]], cluster.latency[a, others[0]]
    return Exchange(*(2.0 * found / problem.execution.microbatches))


def _shared(
    problem: Problem, rows: NDArray[np.int32], device: Floats, channel: Floats, held: Floats, count: Whole
) -> Floats:  # fmt: skip
    """The seconds of each device with its samples dealt out to replicas, whose number is set."""
    kind, cost = np.full(problem.num_devices, -1), exchange(problem)
    for k, devices in enumerate(kinds(problem)):
        kind[list(devices)] = k
    ring, hop = resident(problem, rows) * cost.per_byte[kind], cost.latency[kind]
    size = np.bincount(kind[kind >= 0], minlength=1)
    least = channel.max(axis=2, initial=0.0)
    order, flows = np.tile(np.arange(problem.num_devices), (len(rows), 1)), np.zeros((len(rows), 0, 0), np.bool_)
    most, many = np.full_like(count, _ANY), Flight(True, 1)
    if in_flight(problem):
        many = flight(problem)
        most = _most_samples(problem, _alone(problem, rows, held), held[:, 1])
        if not many.drains:
            flows = np.array([quotient(problem, row) for row in rows])
            order = np.argsort(_devices_ahead(problem, rows, count), axis=1, kind="stable")
    _deal_out(
        device, least, ring, hop, kind, size, problem.max_devices or problem.num_devices, order, flows, most, *many,
        count,
    )  # fmt: skip
    r = np.maximum(count, 1)
    device = device / r[:, None]
    device[:, -1] += (r - 1) / r * ring + (r - 1) * hop
    return device


def _most_samples(problem: Problem, alone: Floats, each: Floats) -> Whole:
    """[B, D] how many samples a device has room for."""
    capacity = np.broadcast_to(problem.capacity, alone.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        more = np.floor(np.clip(np.nan_to_num((capacity - alone) / each, nan=_ANY), -1, _ANY))
    more += alone + (more + 1) * each <= capacity  # however the division was rounded
    more -= alone + more * each > capacity
    found: Whole = np.clip(more + 1, 0, _ANY).astype(np.int64)
    return found


@njit(cache=True, nogil=True, no_cpython_wrapper=True)
def _time(load, replicas, ring, hop):  # type: ignore[no-untyped-def]
    return load / replicas + ((replicas - 1) / replicas * ring + (replicas - 1) * hop)


@njit(cache=True, nogil=True, no_cpython_wrapper=True)
def _fewest(  # type: ignore[no-untyped-def]
    load, ring, hop, kind, size, extra, limit, below, order, flows, most, drains, step, trial, ahead, left
):  # fmt: skip
    """Raise trial[d] to the least that keep a limit of the first phase, are below one of the last, and have the memory.

    A device needs the more replicas the more there are ahead of it, so they are set from the end of the pipeline, and
    each is the least that it can be. False if there are not so many devices.
    """
    left[:], ahead[:] = size, 0
    spare = extra
    for d in order:
        if trial[d] == 0:
            continue
        for e in range(len(flows)):
            if flows[d, e]:
                ahead[d] = max(ahead[d], ahead[e])
        if most[d] < 1:
            return False
        needs = -(-step // most[d])
        if not drains and (most[d] > 1 or ahead[d] == 0):
            needs = min(needs, -(-ahead[d] // (most[d] - 1)) if ahead[d] > 0 else 1)
        r = max(trial[d], needs)
        while r <= size[kind[d]] and (
            load[0, d] / r > limit or _time(load[len(load) - 1, d], r, ring[d], hop[d]) >= below
        ):
            r += 1
        left[kind[d]] -= r
        spare -= r - 1
        if left[kind[d]] < 0 or (spare < 0 and spare < extra):
            return False
        ahead[d] += r
        trial[d] = r
    return True


@njit(cache=True, nogil=True)
def _deal_out(  # type: ignore[no-untyped-def]
    load, least, ring, hop, kind, size, max_devices, order, flows, most, drains, step, count
):  # fmt: skip
    """Set count[b, d], 1 where device d has ops and else 0, to the numbers of replicas with the least time per sample.

    They are the fewest that the memory needs; then, as often as there are so many devices, the fewest that are faster.
    Where another phase comes first, its limit is one of the times that some device can have. If no numbers keep the
    memory, it is left out of account.
    """
    phases, devices = load.shape[1], load.shape[2]
    trial, ahead, left = np.zeros(devices, np.int64), np.zeros(devices, np.int64), np.zeros(len(size), np.int64)
    any_number = np.full(devices, 1 << 62)
    for b in range(len(load)):
        best, extra = np.inf, max_devices
        for d in range(devices):
            extra -= count[b, d]
        first = count[b].copy()
        for room in (most[b], any_number):
            if best < np.inf:
                break
            for limiting in range(devices if phases > 1 else 1):
                for share in range(1, size[kind[limiting]] + 1 if phases > 1 and first[limiting] else 2):
                    limit = load[b, 0, limiting] / share if phases > 1 else np.inf
                    below = np.inf
                    trial[:] = first
                    while below > least[b, phases - 1] and _fewest(
                        load[b], ring[b], hop, kind, size, extra, limit, below, order[b], flows[b], room, drains, step,
                        trial, ahead, left,
                    ):  # fmt: skip
                        top, below = least[b, 0] if phases > 1 else 0.0, least[b, phases - 1]
                        for d in range(devices):
                            if trial[d]:
                                below = max(below, _time(load[b, phases - 1, d], trial[d], ring[b, d], hop[d]))
                                if phases > 1:
                                    top = max(top, load[b, 0, d] / trial[d])
                        if top + below < best:
                            best = top + below
                            count[b] = trial


# ---- loads -----------------------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _loads(  # type: ignore[no-untyped-def]
    seconds, backward, tensor_producer, tensor_bytes, share, consumer_ptr, consumers, latency, per_byte, via_ptr, via,
    pays_for_copies, num_channels, rows, staged, per_edge, held_home, held_copy, kept_home, kept_copy, compute,
    transfer, channel, held,
):  # fmt: skip
    """For each row: compute[b, phase, d], transfer[b, phase, d], channel[b, phase, c] seconds, by the producer's phase
    (0 forward, 1 backward and update); held[b, 0, d] bytes of the tensors that a device produces or receives, and
    held[b, 1, d] those that each more sample in flight adds.
    """
    num_devices = seconds.shape[1]
    seen = np.empty(num_devices, np.int64)
    for b in range(rows.shape[0]):
        row = rows[b]
        for op in range(seconds.shape[0]):
            compute[b, backward[op], row[op]] += seconds[op, row[op]]
        for d in range(num_devices):
            seen[d] = -1
        for t in range(len(tensor_producer)):
            op = tensor_producer[t]
            a, phase, size = row[op], backward[op], tensor_bytes[t]
            held[b, 0, a] += held_home[t]
            held[b, 1, a] += kept_home[t]
            staged_send = 0.0
            for e in range(consumer_ptr[t], consumer_ptr[t + 1]):
                d = row[consumers[e]]
                if d == a or (seen[d] == t and not per_edge):
                    continue
                seen[d] = t
                time = share[t] * (latency[a, d] + size * per_byte[a, d])
                held[b, 0, d] += held_copy[t]
                held[b, 1, d] += kept_copy[t]
                if pays_for_copies[d]:
                    transfer[b, phase, d] += time
                if staged:
                    staged_send = max(staged_send, time)
                elif pays_for_copies[a]:
                    transfer[b, phase, a] += time
                link = a * num_devices + d
                for v in range(via_ptr[link], via_ptr[link + 1]):
                    channel[b, phase, via[v]] += time
            if staged and pays_for_copies[a]:
                transfer[b, phase, a] += staged_send
