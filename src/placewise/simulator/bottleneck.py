"""Which ops hold a plan up. To make it faster, one of them must move, or something that they wait for.

For latency: walk back from the op that ends last. It started when its last input came or when its device became free,
whichever was later, so the op that sent the input or held the device comes before it, and so on to time zero. A
transfer that waited for its channel adds the op whose transfer was before it. For `completion`, a walk for each model.
For throughput: the ops on the busiest device, or whose tensors pass through the busiest channel.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placewise.graph import Ints
from placewise.problem import Problem
from placewise.simulator.evaluation import simulate
from placewise.simulator.throughput import busy, throughput_loads
from placewise.simulator.timeline import Timeline


def bottleneck(problem: Problem, placement: Ints) -> NDArray[np.bool_]:
    """[N] the ops that hold a plan up; all of them where an engine does one thing at a time."""
    if problem.objective == "throughput":
        return _busiest(problem, placement)
    held = np.zeros(problem.num_ops, np.bool_)
    if problem.execution.concurrency != "parallel":
        return ~held
    walk = _Walk(simulate(problem, placement))
    graph = problem.graph
    models = graph.model if problem.objective == "completion" else np.zeros_like(graph.model)
    for model in np.unique(models):
        mine = np.flatnonzero(models == model)
        walk.back_from(int(mine[walk.timeline.finish[mine].argmax()]), held)
    return held


def _busiest(problem: Problem, placement: Ints) -> NDArray[np.bool_]:
    graph = problem.graph
    device, channel, _ = busy(problem, placement[None], *throughput_loads(problem, placement[None]))
    load, moved = device[0].sum(axis=0), channel[0].sum(axis=0)
    if not len(moved) or load.max(initial=0.0) > moved.max(initial=0.0):
        return np.asarray(placement == load.argmax())
    through = np.zeros((problem.num_devices, problem.num_devices), np.bool_)
    for (a, b), via in problem.cluster.channels_of.items():
        through[a, b] = int(moved.argmax()) in via
    crosses = through[placement[graph.edge_producer], placement[graph.consumers]]
    held = np.zeros(problem.num_ops, np.bool_)
    held[graph.edge_producer[crosses]] = held[graph.consumers[crosses]] = True
    return held


class _Walk:
    """Who waited for whom in a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        problem, graph, moving = timeline.problem, timeline.problem.graph, timeline.transfers
        d = problem.num_devices
        self._per_edge = problem.execution.sends == "edge"
        self._keys = moving.tensor.astype(np.int64) * (problem.num_ops if self._per_edge else d)
        self._keys += moving.reader if self._per_edge else moving.target
        self._by_key = np.argsort(self._keys, kind="stable")
        self._keys = self._keys[self._by_key]
        self._by_end = np.argsort(moving.finish, kind="stable")
        self._ends = moving.finish[self._by_end]
        # Ops device by device in the order in which they ran; who was before each.
        ran = np.lexsort((timeline.finish, timeline.start, timeline.placement))
        ran = ran[(timeline.finish > timeline.start)[ran]]
        self._before = np.full(problem.num_ops, -1, np.int64)
        same = timeline.placement[ran[1:]] == timeline.placement[ran[:-1]]
        self._before[ran[1:][same]] = ran[:-1][same]
        self._input_ptr, in_edges = graph.in_edges
        self._inputs = graph.edge_tensor[in_edges]

    def back_from(self, op: int, held: NDArray[np.bool_]) -> None:
        """Mark the ops from one back to time zero."""
        timeline, graph, moving = self.timeline, self.timeline.problem.graph, self.timeline.transfers
        while op >= 0 and not held[op]:
            held[op] = True
            ready, source, moved = 0.0, -1, -1
            for tensor in self._inputs[self._input_ptr[op] : self._input_ptr[op + 1]].tolist():
                producer = int(graph.tensor_producer[tensor])
                i = self._brought(tensor, producer, op)
                came = float(timeline.finish[producer] if i < 0 else moving.finish[i])
                if came > ready:
                    ready, source, moved = came, producer, i
            before = int(self._before[op])
            if before >= 0 and timeline.finish[before] >= ready:
                op = before
                continue
            while moved >= 0 and (ahead := self._ahead_on_channel(moved)) >= 0:
                held[graph.tensor_producer[moving.tensor[moved]]] = held[moving.reader[moved]] = True
                moved = ahead
            if moved >= 0:
                source = int(graph.tensor_producer[moving.tensor[moved]])
                if graph.is_stored[source]:  # streamed: whoever made room for it comes before it
                    held[source] = True
                    source = self._ended_at(float(moving.start[moved]), int(moving.target[moved]))
            op = source

    def _brought(self, tensor: int, producer: int, op: int) -> int:
        """The transfer by which an input came; -1 if it was there."""
        place = self.timeline.placement
        if place[producer] == place[op]:
            return -1
        key = tensor * (len(place) if self._per_edge else self.timeline.problem.num_devices)
        key += op if self._per_edge else int(place[op])
        at = int(np.searchsorted(self._keys, key))
        return int(self._by_key[at]) if at < len(self._keys) and self._keys[at] == key else -1

    def _ahead_on_channel(self, moved: int) -> int:
        """The transfer that a transfer waited for; -1 if it could start as soon as there was something to send."""
        moving, channels = self.timeline.transfers, self.timeline.problem.cluster.channels_of
        start = float(moving.start[moved])
        if start <= self.timeline.finish[self.timeline.problem.graph.tensor_producer[moving.tensor[moved]]]:
            return -1
        mine = set(channels[int(moving.source[moved]), int(moving.target[moved])])
        low, high = (int(np.searchsorted(self._ends, start, side)) for side in ("left", "right"))
        for j in self._by_end[low:high].tolist():
            if mine & set(channels[int(moving.source[j]), int(moving.target[j])]) and moving.start[j] < start:
                return int(j)
        return -1

    def _ended_at(self, time: float, device: int) -> int:
        ended = np.flatnonzero((self.timeline.finish == time) & (self.timeline.placement == device))
        ended = ended[self.timeline.start[ended] < time]
        return int(ended[0]) if len(ended) else -1
