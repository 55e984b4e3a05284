"""Modelled times: an op takes its launch overhead plus the longer of its arithmetic and its memory traffic.

(Williams, Waterman, Patterson 2009, doi:10.1145/1498765.1498785.) Rates come from the cluster file.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placewise.cluster import Device
from placewise.graph import Graph


def roofline(graph: Graph, device: Device) -> NDArray[np.float64]:
    """[N] seconds."""
    dtypes, of_op = np.unique(np.array(graph.op_dtypes, dtype=object), return_inverse=True)
    needed = set(of_op[~graph.is_stored & (graph.flops > 0)].tolist())
    peak = np.array([device.peak(str(dtype)) if i in needed else np.inf for i, dtype in enumerate(dtypes)])
    arithmetic = graph.flops / peak[of_op] if len(peak) else graph.flops
    return device.launch + np.maximum(arithmetic, graph.bytes_accessed / device.bandwidth)
