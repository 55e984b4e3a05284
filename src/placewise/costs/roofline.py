"""Modelled times: an op takes its launch overhead plus the longer of its arithmetic and its memory traffic.

(Williams, Waterman, Patterson 2009, doi:10.1145/1498765.1498785.) Rates come from the cluster file and are those of
large, simple kernels; other families of ops reach a share of them. `bench/costs.py` says how far off this is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from placewise.cluster import Device
from placewise.graph import Graph
from placewise.kinds import family

#: Of a device's rates, by kind of device and family of ops; all of them where nothing is said. Rounded from the
#: profiles of an H200 and a 16-core Xeon that come with Placewise (sums over their ops, 2026-11-16). Convolutions on
#: that GPU reach twice its float32 rate, because cuDNN computes them in TF32; that is not counted on.
EFFICIENCY: Final[Mapping[str, Mapping[str, float]]] = {
    "gpu": {"matmul": 0.75, "attention": 0.2, "norm": 0.6, "pool": 0.3, "gather": 0.3, "copy": 0.8, "reduce": 0.1},
    "cpu": {"matmul": 0.7, "conv": 0.5, "attention": 0.9, "norm": 0.45, "elementwise": 0.55, "pool": 0.07,
            "gather": 0.5, "copy": 0.7, "reduce": 0.1},
}  # fmt: skip


def roofline(graph: Graph, device: Device) -> NDArray[np.float64]:
    """[N] seconds."""
    dtypes, of_op = np.unique(np.array(graph.op_dtypes, dtype=object), return_inverse=True)
    needed = set(of_op[~graph.is_stored & (graph.flops > 0)].tolist())
    peak = np.array([device.peak(str(dtype)) if i in needed else np.inf for i, dtype in enumerate(dtypes)])
    arithmetic = graph.flops / peak[of_op] if len(peak) else graph.flops
    reached = EFFICIENCY.get(device.kind, {})
    share = np.array([reached.get(family(kind), 1.0) for kind in graph.op_kinds])
    limit = np.maximum(arithmetic, graph.bytes_accessed / device.bandwidth)
    seconds: NDArray[np.float64] = device.launch + limit / share
    return seconds
