"""The costs of a graph on a cluster, from the best source that each device has."""

from __future__ import annotations

import numpy as np

from placewise.cluster import Cluster
from placewise.costs import LABELS, Costs, check_table_size
from placewise.costs.roofline import roofline
from placewise.graph import Graph


def estimate(graph: Graph, cluster: Cluster) -> Costs:
    """Seconds for every op on every device. Parameters, inputs and views take no time.

    A device with a profile has its measured times, and for ops that were not measured the rates fitted to them, both
    times what a whole model takes over the sum of its ops. Any other device has the roofline model's.
    """
    check_table_size(graph.num_ops, cluster.num_devices)
    works = ~graph.is_stored & ((graph.flops > 0) | (graph.bytes_accessed > 0))
    seconds = np.zeros((graph.num_ops, cluster.num_devices))
    label = np.full(seconds.shape, LABELS.index("modelled"))
    for d, device in enumerate(cluster.devices):
        if device.profile is None:
            times = roofline(graph, device)
        else:
            known = [device.profile.ops.get(signature) for signature in graph.op_signatures]
            measured = np.array([time is not None for time in known], np.bool_) & works
            times = device.profile.predict(graph.op_kinds, graph.op_dtypes, graph.flops, graph.bytes_accessed)
            times = np.where(measured, [time.seconds if time else 0.0 for time in known], times)
            times = times * device.profile.overhead(graph.name)
            label[measured, d] = LABELS.index("measured")
        seconds[:, d] = np.where(works, times, 0.0)
    return Costs.create(seconds, label)
