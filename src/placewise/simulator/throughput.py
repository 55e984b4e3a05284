"""Time per sample in a full pipeline: the load of the busiest device or channel.

After Tarnawski et al. 2020 (arXiv:2006.16423), generalised to links that differ. A device's load is its compute plus
the transfers that it takes part in, or the longer of the two where they overlap. A tensor is received once by each
device that reads it; it is sent once per receiving device, or once in all where sends are staged through host memory.
Parameters stay where they are read, and are sent again only when training has changed them.
Devices without ops may take over samples of others like them, and training may hold several samples at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placewise.problem import Problem
from placewise.simulator.alike import kinds
from placewise.simulator.arrays import channels_of_links
from placewise.simulator.constraints import quotient, resident
from placewise.simulator.timeline import Floats

Whole = NDArray[np.int64]


def time_per_sample(problem: Problem, rows: NDArray[np.int32]) -> tuple[Floats, Floats]:
    """(seconds [B], bytes [B, D] that each device holds in a full pipeline)."""
    graph = problem.graph
    loads = throughput_loads(problem, rows)
    device, channel, _ = busy(problem, rows, *loads[:3])
    value = np.concatenate([device, channel], axis=2).max(axis=2).sum(axis=1)
    peak = resident(problem, rows) + loads[3]
    if problem.execution.memory == "live":
        scratch = np.zeros_like(peak)
        for d in range(problem.num_devices):
            scratch[:, d] = np.where(rows == d, graph.scratch, 0.0).max(axis=1, initial=0.0)
        peak = peak + scratch
    return value, peak


def busy(
    problem: Problem, rows: NDArray[np.int32], compute: Floats, transfer: Floats, channel: Floats
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
        device = _shared(problem, rows, device, channel, count)
    return device, channel, count


def throughput_loads(problem: Problem, rows: NDArray[np.int32]) -> tuple[Floats, Floats, Floats, Floats]:
    """compute and transfer [B, phase, D], channel [B, phase, channels] in seconds; held [B, D] in bytes."""
    graph, cluster, execution = problem.graph, problem.cluster, problem.execution
    b, d = len(rows), problem.num_devices
    via_ptr, via = channels_of_links(problem)
    channels = len(cluster.channels) if execution.contention == "channel" else 0
    compute, transfer, channel = np.zeros((b, 2, d)), np.zeros((b, 2, d)), np.zeros((b, 2, channels))
    held, kept = np.zeros((b, d)), np.zeros((b, d))
    _loads(
        np.where(np.isfinite(problem.seconds), problem.seconds, 0.0), (graph.phase > 0).astype(np.int32),
        graph.tensor_producer, graph.tensor_bytes, sent_share(problem), graph.consumer_ptr, graph.consumers,
        cluster.latency, cluster.seconds_per_byte, via_ptr, via,
        np.array([device.copies for device in cluster.devices]), channels, rows,
        execution.staged, execution.sends == "edge", *held_bytes(problem), *kept_bytes(problem),
        compute, transfer, channel, held, kept,
    )  # fmt: skip
    if execution.in_flight == "pipeline" and trains(problem):
        if execution.memory == "live":
            held += (_samples(problem, rows) - 1) * kept
        if execution.recompute:
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


def _samples(problem: Problem, rows: NDArray[np.int32]) -> Whole:
    """[B, D] samples in flight: all of a step, or as many as there are stages from here on, one after another."""
    execution = problem.execution
    count = np.ones((len(rows), problem.num_devices), np.int64)
    if execution.pipeline == "gpipe":
        return count * execution.microbatches
    for b, row in enumerate(rows):
        flows = quotient(problem, row)
        for _ in range(problem.num_devices - 1):
            count[b] = 1 + np.where(flows, count[b], 0).max(axis=1)
    return count


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
    problem: Problem, rows: NDArray[np.int32], device: Floats, channel: Floats, count: Whole
) -> Floats:  # fmt: skip
    """The seconds of each device with its samples dealt out to replicas, whose number is set."""
    kind, cost = np.full(problem.num_devices, -1), exchange(problem)
    for k, devices in enumerate(kinds(problem)):
        kind[list(devices)] = k
    ring, hop = resident(problem, rows) * cost.per_byte[kind], cost.latency[kind]
    size = np.bincount(kind[kind >= 0], minlength=1)
    least = channel.max(axis=2, initial=0.0)
    _deal_out(device, least, ring, hop, kind, size, problem.max_devices or problem.num_devices, count)
    r = np.maximum(count, 1)
    device = device / r[:, None]
    device[:, -1] += (r - 1) / r * ring + (r - 1) * hop
    return device


@njit(cache=True, nogil=True, no_cpython_wrapper=True)
def _time(load, replicas, ring, hop):  # type: ignore[no-untyped-def]
    return load / replicas + ((replicas - 1) / replicas * ring + (replicas - 1) * hop)


@njit(cache=True, nogil=True)
def _deal_out(load, least, ring, hop, kind, size, most, count):  # type: ignore[no-untyped-def]
    """Set count[b, d], 1 where device d has ops and else 0, to the numbers of replicas with the least time per sample.

    The last phase has the fewest replicas that keep any limit, so its busiest device gets more until there are none
    that help. Where another phase comes first, its limit is one of the times that some device can have.
    """
    phases, devices = load.shape[1], load.shape[2]
    lowest, trial, left = np.zeros(devices, np.int64), np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    for b in range(len(load)):
        best, extra = np.inf, most
        for d in range(devices):
            extra -= count[b, d]
        first = count[b].copy()
        for limiting in range(devices if phases > 1 else 1):
            for share in range(1, size[kind[limiting]] + 1 if phases > 1 and first[limiting] else 2):
                # ---- the fewest replicas that keep the limit of the first phase
                limit = load[b, 0, limiting] / share if phases > 1 else np.inf
                spare, able = extra, True
                for k in range(len(size)):
                    left[k] = size[k]
                for d in range(devices):
                    trial[d] = first[d]
                    if trial[d]:
                        while load[b, 0, d] / trial[d] > limit and trial[d] < size[kind[d]]:
                            trial[d] += 1
                        able = able and load[b, 0, d] / trial[d] <= limit
                        left[kind[d]] -= trial[d]
                        spare -= trial[d] - 1
                    lowest[d] = trial[d]
                for k in range(len(size)):
                    able = able and left[k] >= 0
                if not able or (spare < 0 and spare < extra):
                    continue
                # ---- more for whoever is busiest in the last phase
                time = np.inf
                while True:
                    busiest, time = -1, least[b, phases - 1]
                    for d in range(devices):
                        if trial[d]:
                            now = _time(load[b, phases - 1, d], trial[d], ring[b, d], hop[d])
                            if now > time:
                                busiest, time = d, now
                    if busiest < 0:
                        break
                    more, room = trial[busiest] + 1, min(left[kind[busiest]], spare)
                    while (
                        more <= trial[busiest] + room
                        and _time(load[b, phases - 1, busiest], more, ring[b, busiest], hop[busiest]) >= time
                    ):
                        more += 1
                    if more > trial[busiest] + room:
                        break
                    left[kind[busiest]] -= more - trial[busiest]
                    spare -= more - trial[busiest]
                    trial[busiest] = more
                # ---- where several were busiest, and one of them could get no more, the others need none either
                top = least[b, 0] if phases > 1 else 0.0
                for d in range(devices):
                    if trial[d]:
                        trial[d] = lowest[d]
                        while _time(load[b, phases - 1, d], trial[d], ring[b, d], hop[d]) > time:
                            trial[d] += 1
                        if phases > 1:
                            top = max(top, load[b, 0, d] / trial[d])
                if top + time < best:
                    best = top + time
                    for d in range(devices):
                        count[b, d] = trial[d]


# ---- loads -----------------------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _loads(  # type: ignore[no-untyped-def]
    seconds, backward, tensor_producer, tensor_bytes, share, consumer_ptr, consumers, latency, per_byte, via_ptr, via,
    pays_for_copies, num_channels, rows, staged, per_edge, held_home, held_copy, kept_home, kept_copy, compute,
    transfer, channel, held, kept,
):  # fmt: skip
    """For each row: compute[b, phase, d], transfer[b, phase, d], channel[b, phase, c] seconds, by the producer's phase
    (0 forward, 1 backward and update); held[b, d] bytes of the tensors that a device produces or receives, kept[b, d]
    those of every sample in flight.
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
            held[b, a] += held_home[t]
            kept[b, a] += kept_home[t]
            staged_send = 0.0
            for e in range(consumer_ptr[t], consumer_ptr[t + 1]):
                d = row[consumers[e]]
                if d == a or (seen[d] == t and not per_edge):
                    continue
                seen[d] = t
                time = share[t] * (latency[a, d] + size * per_byte[a, d])
                held[b, d] += held_copy[t]
                kept[b, d] += kept_copy[t]
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
