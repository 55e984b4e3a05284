"""What an op holds on its device while it runs, beside what is resident there."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from placewise.graph import Floats
from placewise.problem import Problem

_INSTANT: Final = 1e-12  # of all times together: what takes less may be lost in rounding, and hold nothing


def working_set(problem: Problem) -> Floats:
    """[N] bytes that each op reads, makes and needs besides, wherever it takes time; parameters may be resident."""
    graph = problem.graph
    made = ~graph.is_stored[graph.tensor_producer]
    size = np.where(made, graph.tensor_bytes, 0.0)
    makes = np.bincount(graph.tensor_producer, size, problem.num_ops)
    reads = np.bincount(graph.consumers, size[graph.edge_tensor], problem.num_ops)
    held: Floats = graph.scratch + makes + reads
    return held


def takes_time(problem: Problem) -> NDArray[np.bool_]:
    """[N, D] whether an op runs long enough on a device for a clock to notice, and for memory to be held."""
    graph, cluster = problem.graph, problem.cluster
    finite = np.where(np.isfinite(problem.seconds), problem.seconds, 0.0)
    moved = cluster.latency.max(initial=0.0) + graph.tensor_bytes[graph.edge_tensor] * cluster.seconds_per_byte.max()
    longest = finite.max(axis=1, initial=0.0).sum() + moved.sum() * problem.num_devices  # no clock shows more
    long_enough: NDArray[np.bool_] = finite > _INSTANT * longest
    return long_enough
