"""Modelled costs: an op takes its launch overhead plus the longer of its arithmetic and its memory traffic.

(Williams, Waterman, Patterson 2009, doi:10.1145/1498765.1498785.) Rates come from the cluster file.
"""

from __future__ import annotations

import numpy as np

from placewise.cluster import Cluster
from placewise.costs import Costs, check_table_size
from placewise.graph import Graph


def roofline(graph: Graph, cluster: Cluster) -> Costs:
    """Seconds for every op on every device. Parameters and inputs take no time."""
    check_table_size(graph.num_ops, cluster.num_devices)
    dtypes, of_op = np.unique(np.array(graph.op_dtypes, dtype=object), return_inverse=True)
    works = ~graph.is_stored & ((graph.flops > 0) | (graph.bytes_accessed > 0))
    needed = set(of_op[works & (graph.flops > 0)].tolist())
    seconds = np.zeros((graph.num_ops, cluster.num_devices))
    for d, device in enumerate(cluster.devices):
        peak = np.array([device.peak(str(dtype)) if i in needed else np.inf for i, dtype in enumerate(dtypes)])
        arithmetic = graph.flops / peak[of_op] if len(peak) else graph.flops
        traffic = graph.bytes_accessed / device.bandwidth
        seconds[:, d] = np.where(works, device.launch + np.maximum(arithmetic, traffic), 0.0)
    return Costs.create(seconds, "modelled")
