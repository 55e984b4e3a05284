"""A timeline as Chrome trace JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing.

A process per device with its ops and its memory, one process for all channels with a thread each, and an arrow from
each producer over its transfer to the first op that reads it. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from placewise.graph import PHASES
from placewise.plans import Plan
from placewise.simulator import Timeline

Event = dict[str, Any]
_ORDER = {phase: i for i, phase in enumerate("MXCstf")}  # arrows come after the slices that they join


def to_trace(plan: Plan) -> str:
    """The trace as text, one event a line."""
    timeline = plan.timeline
    events = [*_names(timeline), *_ops(timeline), *_memory(timeline), *_transfers(timeline)]
    events.sort(key=lambda event: (event["ts"], _ORDER[event["ph"]], event.get("dur", 0.0)))
    about = {
        "model": plan.problem.graph.name, "cluster": plan.problem.cluster.name, "objective": plan.problem.objective,
        "seconds": plan.value, "planner": plan.planner, "placewise": plan.version,
    }  # fmt: skip
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in events)
    about_text = json.dumps(about, allow_nan=False)
    return f'{{"displayTimeUnit": "ms", "otherData": {about_text}, "traceEvents": [\n{lines}\n]}}\n'


def _names(timeline: Timeline) -> Iterator[Event]:
    devices = timeline.problem.cluster.device_names
    for pid, name in enumerate([*devices, "channels"]):
        yield {"ph": "M", "ts": 0, "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "ts": 0, "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}


def _ops(timeline: Timeline) -> Iterator[Event]:
    graph = timeline.problem.graph
    written = np.bincount(graph.tensor_producer, graph.tensor_bytes, graph.num_ops)
    for op in np.flatnonzero(~graph.is_stored).tolist():
        args = {"kind": graph.op_kinds[op], "module": graph.op_modules[op], "phase": PHASES[graph.phase[op]],
                "bytes": float(written[op])}  # fmt: skip
        yield _slice(graph.op_names[op], int(timeline.placement[op]), 0, timeline.start[op], timeline.finish[op], args)


def _memory(timeline: Timeline) -> Iterator[Event]:
    for pid in range(timeline.problem.num_devices):
        for time, held in zip(*(values.tolist() for values in timeline.memory_profile(pid)), strict=True):
            yield {"ph": "C", "ts": time * 1e6, "pid": pid, "tid": 0, "name": "memory", "args": {"bytes": held}}


def _transfers(timeline: Timeline) -> Iterator[Event]:
    problem, graph, moving = timeline.problem, timeline.problem.graph, timeline.transfers
    pid, devices = problem.num_devices, problem.cluster.device_names
    lanes = _Lanes(problem.cluster.channels)
    for i in np.argsort(moving.start, kind="stable").tolist():
        source, target, tensor = int(moving.source[i]), int(moving.target[i]), int(moving.tensor[i])
        producer, start, finish = int(graph.tensor_producer[tensor]), float(moving.start[i]), float(moving.finish[i])
        name = graph.op_names[producer]
        args = {"from": devices[source], "to": devices[target], "bytes": float(graph.tensor_bytes[tensor])}
        tids = [lanes.take(channel, start, finish) for channel in problem.cluster.channels_of[source, target]]
        for tid in tids:
            yield _slice(name, pid, tid, start, finish, args)
        arrow = {"id": i, "name": "transfer", "cat": "transfer"}
        reader = int(moving.reader[i])
        if graph.is_stored[producer]:  # it does not run: the arrow begins where its bytes begin to move
            yield {"ph": "s", "ts": start * 1e6, "pid": pid, "tid": tids[0], **arrow}
        else:
            yield {"ph": "s", "ts": float(timeline.start[producer]) * 1e6, "pid": source, "tid": 0, **arrow}
            yield {"ph": "t", "ts": start * 1e6, "pid": pid, "tid": tids[0], **arrow}
        yield {"ph": "f", "bp": "e", "ts": float(timeline.start[reader]) * 1e6, "pid": target, "tid": 0, **arrow}
    yield from lanes.names(pid)


class _Lanes:
    """Threads for channels: one each, and more where transfers do not queue and so overlap."""

    def __init__(self, channels: tuple[str, ...]) -> None:
        self._channels = channels
        self._lanes: dict[int, list[list[Any]]] = {}  # channel -> [tid, end of the last transfer]
        self._count = 0

    def take(self, channel: int, start: float, finish: float) -> int:
        """The thread for a transfer; transfers must come by start."""
        lanes = self._lanes.setdefault(channel, [])
        for lane in lanes:
            if lane[1] <= start:
                lane[1] = finish
                return int(lane[0])
        lanes.append([self._count, finish])
        self._count += 1
        return self._count - 1

    def names(self, pid: int) -> Iterator[Event]:
        for channel, lanes in self._lanes.items():
            for tid, _ in lanes:
                args = {"name": self._channels[channel]}
                yield {"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": "thread_name", "args": args}


def _slice(name: str, pid: int, tid: int, start: float, finish: float, args: dict[str, Any]) -> Event:
    begins, ends = float(start) * 1e6, float(finish) * 1e6
    return {"ph": "X", "ts": begins, "dur": ends - begins, "pid": pid, "tid": tid, "name": name, "args": args}
