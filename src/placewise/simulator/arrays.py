"""The problem as flat arrays in the order in which the kernels want them.

Ops are renumbered by priority: the plan's order where it has one, else upward rank. The number of an op is then its
priority, a ready set is a bitmap, and neighbours in the graph are neighbours in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placewise.errors import InvalidInput
from placewise.graph import Ints
from placewise.problem import Problem


class Arrays(NamedTuple):
    """What the kernels read, in the order in which `kernel.run` takes it (all but `tensor`)."""

    op: NDArray[np.uint32]  # [N] the graph's number of each op
    seconds: NDArray[np.float64]  # [N * D]
    num_inputs: NDArray[np.int32]  # [N]
    sources: NDArray[np.uint32]  # ops without inputs that run
    stored: NDArray[np.uint32]  # parameters and state
    model: NDArray[np.uint32]  # [N]
    tensor_ptr: NDArray[np.uint32]  # [N + 1] outputs of each op
    tensor: NDArray[np.uint32]  # [T] the graph's number of each tensor
    bytes: NDArray[np.float64]  # [T]
    consumer_ptr: NDArray[np.uint32]  # [T + 1]
    consumer: NDArray[np.uint32]  # [E] by priority within a tensor
    edge_ptr: NDArray[np.uint32]  # [N + 1] the edges from each op
    edge_tensor: NDArray[np.uint32]  # [E]
    input_ptr: NDArray[np.uint32]  # [N + 1]
    input: NDArray[np.uint32]  # [E] tensors read by each op
    producer: NDArray[np.uint32]  # [T]
    resident: NDArray[np.float64]  # [N]
    scratch: NDArray[np.float64]  # [N]
    latency: NDArray[np.float64]  # [D * D]
    per_byte: NDArray[np.float64]  # [D * D]
    via_ptr: NDArray[np.uint32]  # [D * D + 1] channels of each link; empty where each link has one of its own
    via: NDArray[np.uint32]

    @property
    def num_channels(self) -> int:
        """Room for every channel, numbered by link or by the cluster."""
        return max(len(self.latency), int(self.via.max(initial=0)) + 1)


def arrays_for(problem: Problem, order: Ints | None = None) -> Arrays:
    """The arrays of a problem, by upward rank (made once) or by a plan's order."""
    if order is not None:
        return _build(problem, checked_order(problem, order))
    if "arrays" not in problem.derived:
        problem.derived["arrays"] = _build(problem, priority_order(problem))
    found: Arrays = problem.derived["arrays"]
    return found


def checked_order(problem: Problem, order: Any) -> Ints:
    """A plan's order must be a topological order of the graph, so that strict execution can never deadlock."""
    n, graph = problem.num_ops, problem.graph
    sequence = np.asarray(order)
    if sequence.shape != (n,) or not np.array_equal(np.sort(sequence), np.arange(n)):
        raise InvalidInput(f"an order must list each of the {n} ops once")
    position = np.empty(n, np.int32)
    position[sequence] = np.arange(n)
    late = np.flatnonzero(position[graph.edge_producer] > position[graph.consumers])
    if len(late):
        first, then = graph.edge_producer[late[0]], graph.consumers[late[0]]
        raise InvalidInput(f"the order runs {graph.op_names[then]!r} before its input {graph.op_names[first]!r}")
    return sequence.astype(np.int32)


def upward_rank(problem: Problem, *, self_links: bool = False) -> NDArray[np.float64]:
    """[N] length of the longest path from each op to the end, with mean times and mean transfers (HEFT's rank_u).

    Means are taken over sorted values, so that permuting devices cannot change the last bit. `self_links` counts a
    device's free link to itself in the mean, as some implementations do.
    """
    from placewise.simulator import kernel

    graph, d = problem.graph, problem.num_devices
    pairs = ~np.eye(d, dtype=np.bool_)
    links = d * (d + 1) if self_links else d * (d - 1)
    mean_latency, mean_per_byte = (
        float(np.sort(matrix[pairs]).sum() / links) if d > 1 else 0.0
        for matrix in (problem.cluster.latency, problem.cluster.seconds_per_byte)
    )
    runs = np.sort(problem.seconds, axis=1)
    count = np.isfinite(runs).sum(axis=1)
    mean_time = np.where(np.isfinite(runs), runs, 0.0).sum(axis=1) / np.maximum(count, 1)
    transfer = mean_latency + graph.tensor_bytes * mean_per_byte
    ranks: NDArray[np.float64] = kernel.longest_path_to_end(
        graph.topological_order, mean_time, transfer, *graph.outputs, graph.consumer_ptr, graph.consumers
    )
    return ranks


def priority_order(problem: Problem, *, self_links: bool = False) -> Ints:
    """Ops by falling upward rank, ties by structure and never by name: a topological order.

    Ops that no structural key tells apart (exact twins) keep the order in which the graph lists them.
    """
    graph = problem.graph
    rank = upward_rank(problem, self_links=self_links)
    by_rank = np.argsort(-rank, kind="stable")
    ties = np.flatnonzero(np.diff(rank[by_rank]) == 0)
    if not len(ties):
        return by_rank.astype(np.int32)
    from placewise.simulator import kernel

    ones = np.ones(graph.num_ops)
    nothing = np.zeros(graph.num_tensors)
    hops = kernel.longest_path_to_end(
        graph.topological_order, ones, nothing, *graph.outputs, graph.consumer_ptr, graph.consumers
    )
    return np.lexsort((_structure(problem), -hops, -rank)).astype(np.int32)


def _structure(problem: Problem) -> NDArray[np.uint64]:
    """[N] a hash of each op's neighbourhood (Weisfeiler-Leman), equal whatever the ops' names and numbers."""
    graph = problem.graph
    # Times count by their rank among all times, so that the unit of time plays no part; devices by their names, so that
    # their order plays none.
    devices = sorted(range(problem.num_devices), key=problem.cluster.device_names.__getitem__)
    times = np.unique(problem.seconds[:, devices], return_inverse=True)[1].reshape(problem.seconds.shape)
    own = [times.astype(np.uint64).T, graph.resident_bytes.view(np.uint64)[None]]
    own += [graph.scratch.view(np.uint64)[None], graph.model.astype(np.uint64)[None]]
    colour = np.zeros(graph.num_ops, np.uint64)
    for row in np.concatenate(own):
        colour = _mix(colour ^ row)
    size = _mix(graph.tensor_bytes.view(np.uint64))[graph.edge_tensor]
    producer, consumer = graph.edge_producer, graph.consumers
    classes = 0
    for _ in range(32):
        above, below = np.zeros_like(colour), np.zeros_like(colour)
        np.add.at(above, consumer, _mix(colour[producer] ^ size))
        np.add.at(below, producer, _mix(colour[consumer] + size))
        colour = _mix(colour ^ _mix(above) ^ _mix(below + np.uint64(1)))
        found = len(np.unique(colour))
        if found == classes:
            break
        classes = found
    return colour


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _build(problem: Problem, order: Ints) -> Arrays:
    from placewise.simulator import kernel

    graph, cluster = problem.graph, problem.cluster
    (output_ptr, outputs), (input_ptr, in_edges) = graph.outputs, graph.in_edges
    new_output_ptr, tensor, producer, consumer_ptr, consumer, edge_tensor, new_input_ptr, new_inputs = kernel.renumber(
        order, output_ptr, outputs, graph.consumer_ptr, input_ptr, graph.edge_tensor[in_edges]
    )
    num_inputs, stored = np.diff(new_input_ptr), graph.is_stored[order]
    queues = problem.execution.contention == "channel"
    via_ptr, via = (_u32([]), _u32([])) if queues and not cluster.has_shared_channels else channels_of_links(problem)
    return Arrays(
        op=_u32(order),
        seconds=np.where(np.isfinite(problem.seconds), problem.seconds, 0.0)[order].ravel(),
        num_inputs=num_inputs.astype(np.int32),
        sources=_u32(np.flatnonzero((num_inputs == 0) & ~stored)),
        stored=_u32(np.flatnonzero(stored)),
        model=_u32(graph.model[order]),
        tensor_ptr=new_output_ptr,
        tensor=tensor,
        bytes=graph.tensor_bytes[tensor],
        consumer_ptr=consumer_ptr,
        consumer=consumer,
        edge_ptr=consumer_ptr[new_output_ptr],
        edge_tensor=edge_tensor,
        input_ptr=new_input_ptr,
        input=new_inputs,
        producer=producer,
        resident=graph.resident_bytes[order],
        scratch=graph.scratch[order],
        latency=cluster.latency.ravel(),
        per_byte=cluster.seconds_per_byte.ravel(),
        via_ptr=via_ptr,
        via=via,
    )


def channels_of_links(problem: Problem) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """(start [D * D + 1], channels) that each link occupies: none where transfers never queue."""
    if problem.execution.contention == "none":
        return np.zeros(problem.num_devices**2 + 1, np.uint32), np.zeros(0, np.uint32)
    start, channels = problem.cluster.link_channels
    return _u32(start), _u32(channels)


def _u32(values: Any) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values, dtype=np.uint32)
