"""What happens when a plan runs: start and finish of every op and transfer, memory over time, the objective's value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from placewise.graph import Ints
from placewise.problem import Problem

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Transfers:
    """One row per transfer, by booking order."""

    tensor: Ints
    reader: Ints  # the op that it is sent for (the most urgent of those that read it there)
    source: Ints
    target: Ints
    start: Floats
    finish: Floats

    def __len__(self) -> int:
        return len(self.tensor)


@dataclass(frozen=True, eq=False)
class Timeline:
    """A simulated run. For `throughput` it shows one sample; `value` is the time per sample in a full pipeline."""

    problem: Problem
    placement: Ints
    order: Ints | None
    value: float
    start: Floats  # [N]
    finish: Floats  # [N]
    transfers: Transfers
    peak: Floats  # [D] bytes

    def __repr__(self) -> str:
        return f"<Timeline of {self.problem!r}: {self.value} s, {len(self.transfers)} transfers>"

    @property
    def makespan(self) -> float:
        """When the last op ends."""
        return float(self.finish.max(initial=0.0))

    @cached_property
    def busy(self) -> Floats:
        """[D] seconds that each device computes."""
        busy = np.zeros(self.problem.num_devices)
        np.add.at(busy, self.placement, self.finish - self.start)
        return busy

    @cached_property
    def channel_busy(self) -> Floats:
        """[channels] seconds that each channel carries something, in the order of `cluster.channels`."""
        busy = np.zeros(len(self.problem.cluster.channels))
        moving = self.transfers
        spans = (moving.finish - moving.start).tolist()
        for a, b, seconds in zip(moving.source.tolist(), moving.target.tolist(), spans, strict=True):
            busy[list(self.problem.cluster.channels_of[a, b])] += seconds
        return busy

    @property
    def bytes_moved(self) -> float:
        """Total size of all transfers."""
        return float(self.problem.graph.tensor_bytes[self.transfers.tensor].sum())

    def memory_profile(self, device: int) -> tuple[Floats, Floats]:
        """(times, bytes): bytes[i] are held from times[i] to times[i + 1]; the last value holds to the end."""
        graph = self.problem.graph
        events: list[tuple[float, float]] = [(0.0, float(graph.resident_bytes[self.placement == device].sum()))]
        if self.problem.execution.memory == "live":
            for start, finish, size in self._holdings(device):
                if finish > start:
                    events += [(start, size), (finish, -size)] if finish < np.inf else [(start, size)]
        events.sort()
        times = np.array([time for time, _ in events])
        held = np.cumsum([change for _, change in events])
        last = np.append(np.diff(times) > 0, True)  # what ends at an instant makes room for what begins
        return times[last], held[last]

    def _holdings(self, device: int) -> list[tuple[float, float, float]]:
        """(from, to, bytes) of every tensor, received copy and scratch space on a device; results are held for ever."""
        graph = self.problem.graph
        last_read = np.zeros((graph.num_tensors,))  # by a consumer on this device
        here = self.placement[graph.consumers] == device
        np.maximum.at(last_read, graph.edge_tensor[here], self.finish[graph.consumers[here]])
        last_send = np.zeros(graph.num_tensors)
        moving = self.transfers
        np.maximum.at(last_send, moving.tensor, moving.finish)
        found: list[tuple[float, float, float]] = []
        for op in np.flatnonzero((self.placement == device) & (graph.scratch > 0)).tolist():
            found.append((self.start[op], self.finish[op], graph.scratch[op]))
        local = (self.placement[graph.tensor_producer] == device) & ~graph.is_stored[graph.tensor_producer]
        for t in np.flatnonzero(local).tolist():
            op = graph.tensor_producer[t]
            unread = graph.consumer_ptr[t] == graph.consumer_ptr[t + 1]
            until = np.inf if unread else max(last_read[t], last_send[t])
            found.append((self.start[op], until, graph.tensor_bytes[t]))
        for i in np.flatnonzero(moving.target == device).tolist():
            one_reader = self.problem.execution.sends == "edge"
            until = self.finish[moving.reader[i]] if one_reader else last_read[moving.tensor[i]]
            found.append((moving.start[i], until, graph.tensor_bytes[moving.tensor[i]]))
        return found
