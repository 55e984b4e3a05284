"""Time per sample in a full pipeline: the load of the busiest device or channel.

After Tarnawski et al. 2020 (arXiv:2006.16423), generalised to links that differ. A device's load is its compute plus
the transfers that it takes part in, or the longer of the two where they overlap. A tensor is received once by each
device that reads it; it is sent once per receiving device, or once in all where sends are staged through host memory.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placewise.problem import Problem
from placewise.simulator.arrays import channels_of_links
from placewise.simulator.constraints import resident
from placewise.simulator.timeline import Floats


def time_per_sample(problem: Problem, rows: NDArray[np.int32]) -> tuple[Floats, Floats]:
    """(seconds [B], bytes [B, D] that each device holds in a full pipeline)."""
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
    peak = resident(problem, rows)
    if execution.memory == "live":
        scratch = np.zeros_like(peak)
        for d in range(problem.num_devices):
            scratch[:, d] = np.where(rows == d, graph.scratch, 0.0).max(axis=1, initial=0.0)
        peak = peak + held + scratch
    return value, peak


def throughput_loads(problem: Problem, rows: NDArray[np.int32]) -> tuple[Floats, Floats, Floats, Floats]:
    """compute and transfer [B, phase, D], channel [B, phase, channels] in seconds; held [B, D] in bytes."""
    graph, cluster, execution = problem.graph, problem.cluster, problem.execution
    b, d = len(rows), problem.num_devices
    via_ptr, via = channels_of_links(problem)
    channels = len(cluster.channels) if execution.contention == "channel" else 0
    compute, transfer, channel = np.zeros((b, 2, d)), np.zeros((b, 2, d)), np.zeros((b, 2, channels))
    held = np.zeros((b, d))
    stored = graph.is_stored[graph.tensor_producer]
    _loads(
        np.where(np.isfinite(problem.seconds), problem.seconds, 0.0), (graph.phase > 0).astype(np.int32),
        graph.tensor_producer, graph.tensor_bytes, graph.consumer_ptr, graph.consumers,
        cluster.latency, cluster.seconds_per_byte, via_ptr, via,
        np.array([device.copies for device in cluster.devices]), channels, rows,
        execution.overlap, execution.staged, execution.sends == "edge", compute, transfer, channel, held,
    )  # fmt: skip
    # What is stored counts as resident at home, not as held a second time.
    for t in np.flatnonzero(stored).tolist():
        held[np.arange(b), rows[:, graph.tensor_producer[t]]] -= graph.tensor_bytes[t]
    return compute, transfer, channel, held


@njit(cache=True, nogil=True)
def _loads(  # type: ignore[no-untyped-def]
    seconds, backward, tensor_producer, tensor_bytes, consumer_ptr, consumers, latency, per_byte, via_ptr, via,
    pays_for_copies, num_channels, rows, overlap, staged, per_edge, compute, transfer, channel, held,
):  # fmt: skip
    """For each row: compute[b, phase, d], transfer[b, phase, d], channel[b, phase, c] seconds, by the producer's phase
    (0 forward, 1 backward and update); held[b, d] bytes of the tensors that a device produces or receives.
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
            held[b, a] += size
            staged_send = 0.0
            for e in range(consumer_ptr[t], consumer_ptr[t + 1]):
                d = row[consumers[e]]
                if d == a or (seen[d] == t and not per_edge):
                    continue
                seen[d] = t
                time = latency[a, d] + size * per_byte[a, d]
                held[b, d] += size
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
