"""Time per sample in a full pipeline: the load of the busiest device or channel.

After Tarnawski et al. 2020 (arXiv:2006.16423), generalised to links that differ. A device's load is its compute plus
the transfers that it takes part in, or the longer of the two where they overlap. A tensor is received once by each
device that reads it; it is sent once per receiving device, or once in all where sends are staged through host memory.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def loads(
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
