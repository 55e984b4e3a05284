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
        transfer, channel = self.bookings
        seconds = (self.transfers.finish - self.transfers.start)[transfer]
        return np.bincount(channel, seconds, len(self.problem.cluster.channels)).astype(np.float64)

    @cached_property
    def bookings(self) -> tuple[NDArray[np.int64], Ints]:
        """(transfer, channel), one for each channel that a transfer occupies."""
        first, channel = self.problem.cluster.link_channels
        link = self.transfers.source * self.problem.num_devices + self.transfers.target
        count = first[link + 1] - first[link]
        transfer = np.repeat(np.arange(len(link)), count)
        within = np.arange(len(transfer)) - np.repeat(np.cumsum(count) - count, count)
        return transfer, channel[np.repeat(first[link], count) + within]

    @property
    def bytes_moved(self) -> float:
        """Total size of all transfers."""
        return float(self.problem.graph.tensor_bytes[self.transfers.tensor].sum())

    def memory_profile(self, device: int) -> tuple[Floats, Floats]:
        """(times, bytes): bytes[i] are held from times[i] to times[i + 1]; the last value holds to the end."""
        graph = self.problem.graph
        start, finish, size = np.zeros((3, 0))
        if self.problem.execution.memory == "live":
            start, finish, size = self._holdings(device)
        lasts = finish > start
        ends = lasts & (finish < np.inf)
        times = np.concatenate([[0.0], start[lasts], finish[ends]])
        changes = np.concatenate(
            [graph.resident_bytes[self.placement == device].sum(keepdims=True), size[lasts], -size[ends]]
        )
        order = np.lexsort((changes, times))
        times, held = times[order], np.cumsum(changes[order])
        last = np.append(np.diff(times) > 0, True)  # what ends at an instant makes room for what begins
        return times[last], held[last]

    def _holdings(self, device: int) -> tuple[Floats, Floats, Floats]:
        """(from, to, bytes) of every tensor, received copy and scratch space on a device; results are held for ever."""
        graph, moving = self.problem.graph, self.transfers
        last_read = np.zeros(graph.num_tensors)  # by a consumer on this device
        here = self.placement[graph.consumers] == device
        np.maximum.at(last_read, graph.edge_tensor[here], self.finish[graph.consumers[here]])
        last_use = last_read.copy()
        np.maximum.at(last_use, moving.tensor, moving.finish)
        last_use[np.diff(graph.consumer_ptr) == 0] = np.inf
        works = np.flatnonzero((self.placement == device) & (graph.scratch > 0))
        maker = graph.tensor_producer
        made = np.flatnonzero((self.placement[maker] == device) & ~graph.is_stored[maker])
        came = np.flatnonzero(moving.target == device)
        one_reader = self.problem.execution.sends == "edge"
        read = self.finish[moving.reader[came]] if one_reader else last_read[moving.tensor[came]]
        return (
            np.concatenate([self.start[works], self.start[maker[made]], moving.start[came]]),
            np.concatenate([self.finish[works], last_use[made], read]),
            np.concatenate([graph.scratch[works], graph.tensor_bytes[made], graph.tensor_bytes[moving.tensor[came]]]),
        )
