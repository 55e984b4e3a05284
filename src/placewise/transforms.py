"""Graphs from graphs: fuse ops into groups and back, collapse parameters, cut out a part, attach a backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placewise.errors import InvalidInput
from placewise.graph import OP_DEFAULTS, Graph, Ints, to_ints


@dataclass(frozen=True, eq=False)
class Contraction:
    """A smaller graph and, for each op of the larger one, the op that it became part of."""

    graph: Graph
    label: Ints  # [N of the larger graph]

    def expand(self, placement: ArrayLike) -> NDArray[Any]:
        """A per-op array of the smaller graph (a placement, say), read for the larger graph."""
        given = np.asarray(placement)
        if given.shape[:1] != (self.graph.num_ops,):
            raise InvalidInput(f"placement: must have {self.graph.num_ops} entries, found an array {given.shape}")
        return given[self.label]


def contract(graph: Graph, label: ArrayLike) -> Contraction:
    """Fuse the ops that share a label (0..K-1). Work and residency add up, scratch is the largest; a tensor that
    nobody outside its group reads disappears. A grouping whose quotient has a cycle is an error.
    """
    of_op = to_ints(label, graph.num_ops, "labels")
    k = int(of_op.max(initial=-1)) + 1
    if (of_op < 0).any() or len(np.unique(of_op)) < k:
        raise InvalidInput("labels: must be 0..K-1 with no gap")
    size = np.bincount(of_op, minlength=k)

    # The first op that computes something gives the group its name and character.
    leader = np.full(k, 2 * graph.num_ops, np.int64)
    np.minimum.at(leader, of_op, np.arange(graph.num_ops) + graph.num_ops * graph.is_stored)
    leader %= graph.num_ops
    leads = leader.tolist()
    all_stored = np.bincount(of_op, graph.is_stored, k) == size
    computing = np.bincount(of_op[~graph.is_stored], minlength=k)

    # A tensor survives if it leaves its group or is a result; what stored ops hold stays with them, and whoever must
    # share their device finds it there without waiting for the op that they became part of.
    home = of_op[graph.tensor_producer]
    group = _merge_groups(graph.group, of_op, k)
    source, reader = home[graph.edge_tensor], of_op[graph.consumers]
    at_hand = graph.is_stored[graph.edge_producer] & ~all_stored[source]
    at_hand &= (group[source] >= 0) & (group[source] == group[reader])
    foreign = (source != reader) & ~at_hand
    leaves = np.bincount(graph.edge_tensor[foreign], minlength=graph.num_tensors) > 0
    unread = np.diff(graph.consumer_ptr) == 0
    kept = leaves | (unread & ~graph.is_stored[graph.tensor_producer]) | all_stored[home]
    new_index = np.cumsum(kept) - 1
    edges = foreign & kept[graph.edge_tensor]
    held = np.where(graph.is_stored & ~all_stored[of_op], graph.resident_bytes, graph.resident)
    smaller = Graph.create(
        name=graph.name,
        op_names=[graph.op_names[i] for i in leads],
        op_kinds=[graph.op_kinds[i] if c <= 1 else "fused" for i, c in zip(leads, computing.tolist(), strict=True)],
        op_dtypes=[graph.op_dtypes[i] for i in leads],
        op_modules=[graph.op_modules[i] for i in leads],
        op_signatures=[
            graph.op_signatures[i] if c <= 1 else "" for i, c in zip(leads, computing.tolist(), strict=True)
        ],
        flops=np.bincount(of_op, graph.flops, k),
        bytes_accessed=np.bincount(of_op, graph.bytes_accessed, k),
        scratch=_largest(graph.scratch, of_op, k),
        resident=np.bincount(of_op, held, k),
        phase=graph.phase[leader],
        model=graph.model[leader],
        group=group,
        models=graph.models,
        tensor_producer=home[kept],
        tensor_bytes=graph.tensor_bytes[kept],
        edge_tensor=new_index[graph.edge_tensor[edges]],
        edge_consumer=reader[edges],
    )
    return Contraction(smaller, of_op)


def collapse_parameters(graph: Graph) -> Contraction:
    """Give each parameter to its consumer: the view for planners that do not place parameters.

    Exactly the restriction "resident where it is used". A parameter whose consumers need not share a device
    (tied weights, say) has no such home and stays an op.
    """
    label = np.arange(graph.num_ops)
    start, edges = graph.out_edges
    for owner in np.flatnonzero(graph.is_stored).tolist():
        readers = graph.consumers[edges[start[owner] : start[owner + 1]]]
        groups = graph.group[readers]
        if len(readers) and ((readers == readers[0]).all() or (groups[0] >= 0 and (groups == groups[0]).all())):
            label[owner] = readers.min()
    dense = np.unique(label, return_inverse=True)[1]
    return contract(graph, dense)


def subgraph(graph: Graph, keep: ArrayLike) -> Graph:
    """The part of the graph on the ops in the mask; tensors from outside become someone else's business."""
    mask = np.asarray(keep)
    if mask.shape != (graph.num_ops,) or (mask.size and mask.dtype != np.bool_):
        raise InvalidInput(f"keep: must be {graph.num_ops} flags, True or False, one per op")
    mask = mask.astype(np.bool_)
    ops = np.flatnonzero(mask)
    new_op = np.cumsum(mask) - 1
    tensors = mask[graph.tensor_producer]
    new_tensor = np.cumsum(tensors) - 1
    edges = tensors[graph.edge_tensor] & mask[graph.consumers]
    return Graph.create(
        name=graph.name,
        **_columns(graph, ops),
        models=graph.models,
        tensor_producer=new_op[graph.tensor_producer[tensors]],
        tensor_bytes=graph.tensor_bytes[tensors],
        edge_tensor=new_tensor[graph.edge_tensor[edges]],
        edge_consumer=new_op[graph.consumers[edges]],
    )


def with_backward(graph: Graph, *, optimizer_bytes_per_parameter_byte: float = 2.0) -> Graph:
    """One training step by mirroring: each op gets a backward op, each parameter an update op.

    A backward op does twice the work of its forward op, reads the forward inputs (weights too) and the gradients of its
    outputs, and shares its device with the forward op. So does an update op, with its optimizer state, with its
    parameter.
    """
    n = graph.num_ops
    if (graph.phase != 0).any():
        raise InvalidInput(f"graph {graph.name!r} already has ops that are not forward ops")
    stored, names, kinds = graph.is_stored, graph.op_names, graph.op_kinds
    fresh = np.arange(n) + graph.group.max(initial=-1) + 1
    group = np.where(graph.group >= 0, graph.group, fresh)
    held = np.where(stored, graph.resident_bytes * optimizer_bytes_per_parameter_byte, 0.0)

    # Mirror of op v is op n + v; the gradient of (tensor, consumer) is one tensor from the consumer's mirror.
    # An op without outputs hands its mirror an empty tensor, so that its backward does not begin before it has run.
    producer, consumer = graph.edge_producer, graph.consumers
    unread = np.flatnonzero(np.diff(graph.consumer_ptr) == 0)
    gradients = graph.num_tensors + np.arange(graph.num_edges)
    mute = np.flatnonzero((np.bincount(graph.tensor_producer, minlength=n) == 0) & ~stored)
    signals = graph.num_tensors + graph.num_edges + np.arange(len(mute))
    columns = _columns(graph, np.arange(n))
    doubled = {
        key: np.concatenate([columns[key], columns[key] * factor])
        for key, factor in (("flops", 2.0), ("bytes_accessed", 2.0), ("scratch", 1.0))
    }
    return Graph.create(
        name=f"{graph.name}-training",
        op_names=[*names, *(f"{name}:{'update' if s else 'backward'}" for name, s in zip(names, stored, strict=True))],
        op_kinds=[*kinds, *("update" if s else f"{kind}_backward" for kind, s in zip(kinds, stored, strict=True))],
        op_dtypes=graph.op_dtypes * 2,
        op_modules=graph.op_modules * 2,
        op_signatures=(*graph.op_signatures, *("" for _ in range(n))),
        **doubled,
        resident=np.concatenate([graph.resident, held]),
        phase=np.concatenate([graph.phase, np.where(stored, 2, 1)]),
        model=np.tile(graph.model, 2),
        group=np.tile(group, 2),
        models=graph.models,
        tensor_producer=np.concatenate([graph.tensor_producer, n + consumer, mute]),
        tensor_bytes=np.concatenate([graph.tensor_bytes, graph.tensor_bytes[graph.edge_tensor], np.zeros(len(mute))]),
        edge_tensor=np.concatenate([graph.edge_tensor, gradients, graph.edge_tensor, unread, signals]),
        edge_consumer=np.concatenate(
            [consumer, n + producer, n + consumer, n + graph.tensor_producer[unread], n + mute]
        ),
    )


def _columns(graph: Graph, ops: NDArray[np.int64]) -> dict[str, Any]:
    picked = ops.tolist()
    columns = {key: getattr(graph, key) for key in ("op_names", *OP_DEFAULTS)}
    return {
        key: values[ops] if isinstance(values, np.ndarray) else [values[i] for i in picked]
        for key, values in columns.items()
    }


def _largest(values: NDArray[np.float64], of_op: Ints, k: int) -> NDArray[np.float64]:
    largest = np.zeros(k)
    np.maximum.at(largest, of_op, values)
    return largest


def _merge_groups(group: Ints, of_op: Ints, k: int) -> Ints:
    """Colocation groups that meet in one fused op become one group, the one with the lowest number."""
    bound = np.flatnonzero(group >= 0)
    if not len(bound):
        return np.full(k, -1, np.int32)
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    dense = np.unique(group[bound], return_inverse=True)[1]
    total = k + int(dense.max()) + 1
    links = coo_array((np.ones(len(bound)), (of_op[bound], k + dense)), shape=(total, total))
    component = connected_components(links, directed=False)[1]
    lowest = np.full(total, np.iinfo(np.int32).max, np.int32)
    np.minimum.at(lowest, component[of_op[bound]], group[bound])
    merged = np.full(k, -1, np.int32)
    merged[of_op[bound]] = lowest[component[of_op[bound]]]
    return merged
