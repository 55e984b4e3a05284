"""Reads "placement-instance/1" files: task graphs on unequal devices, with schedules that other schedulers found.

Times are microseconds, bandwidths bytes per microsecond. The model is that of the scheduling literature: each edge is
sent by itself, transfers never wait for each other, memory is unlimited, and the makespan counts.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from placewise._schemas import List, validated
from placewise.cluster import MAX_DEVICES, Cluster, Device, Link
from placewise.costs import Costs
from placewise.errors import InvalidInput, check_length
from placewise.graph import Floats, Graph, Ints
from placewise.importers.fields import Amount, Index, Rate, Record
from placewise.problem import Execution, Problem

_MICROSECOND = 1e-6


@dataclass(frozen=True, eq=False)
class Baseline:
    """A schedule that another scheduler found, in seconds."""

    makespan: float
    placement: Ints  # [N]
    start: Floats  # [N]
    makespans: tuple[float, ...]  # the same method under several hash seeds; empty where it ran once


class _Units(Record):
    time: Literal["us"]
    size: Literal["bytes"]
    bandwidth: Literal["bytes/us"]


class _Device(Record):
    name: str


class _Links(Record):
    bandwidth: List[List[Rate | None]]
    latency: List[List[Amount]]
    contention: Literal["none"]


class _Node(Record):
    name: str
    times: List[Amount]


class _Schedule(Record):
    makespan: Amount
    makespan_hashseed_0_3: List[Amount] | None = None
    placement: List[Index]
    start: List[Amount]


class _Baselines(Record):
    baselines: dict[str, dict[str, _Schedule]] = Field(default_factory=dict)


#: Source, target, bytes. Not strict itself, as JSON has lists and no tuples; its members are.
_Edge = Annotated[tuple[Index, Index, Amount], Field(strict=False)]


class _Instance(Record):
    format: Literal["placement-instance/1"]
    units: _Units
    devices: Annotated[List[_Device], Field(max_length=MAX_DEVICES)]
    links: _Links
    nodes: List[_Node]
    edges: List[_Edge]


def load(data: Any, name: str) -> Problem:
    """The problem in a parsed instance file."""
    given = validated(_Instance, data)
    tasks, devices = len(given.nodes), len(given.devices)
    for i, node in enumerate(given.nodes):
        check_length(node.times, devices, f"nodes[{i}].times")
    for i, (source, target, _) in enumerate(given.edges):
        if max(source, target) >= tasks:
            raise InvalidInput(f"edges[{i}]: there is no node {max(source, target)}: there are {tasks} nodes")
    graph = Graph.create(
        name=name,
        op_names=[node.name for node in given.nodes],
        # Sizes differ between the edges of one producer, so each edge is a tensor.
        tensor_producer=[source for source, _, _ in given.edges],
        tensor_bytes=[size for _, _, size in given.edges],
        edge_tensor=range(len(given.edges)),
        edge_consumer=[target for _, target, _ in given.edges],
    )
    seconds = np.array([node.times for node in given.nodes]).reshape(tasks, devices) * _MICROSECOND
    return Problem(
        graph,
        _cluster(given, name),
        Costs.create(seconds),
        objective="latency",
        execution=Execution(contention="none", sends="edge"),
    )


def load_baselines(data: Any) -> dict[str, Baseline]:
    """The stored schedules by "tool/method", such as "saga-2.1.0/HEFT"."""
    found: dict[str, Baseline] = {}
    for tool, methods in validated(_Baselines, data).baselines.items():
        for method, schedule in methods.items():
            check_length(schedule.start, len(schedule.placement), f"baselines.{tool}.{method}.start")
            found[f"{tool}/{method}"] = Baseline(
                makespan=schedule.makespan * _MICROSECOND,
                placement=np.array(schedule.placement, np.int32),
                start=np.array(schedule.start) * _MICROSECOND,
                makespans=tuple(value * _MICROSECOND for value in schedule.makespan_hashseed_0_3 or ()),
            )
    return found


def _cluster(given: _Instance, name: str) -> Cluster:
    names = [device.name for device in given.devices]
    _check_square(given.links.bandwidth, len(names), "links.bandwidth")
    _check_square(given.links.latency, len(names), "links.latency")
    links = []
    for a, source in enumerate(names):
        for b, target in enumerate(names):
            bandwidth = given.links.bandwidth[a][b]
            if a == b:
                continue
            if bandwidth is None:
                raise InvalidInput(f"links.bandwidth[{a}][{b}]: must be a number, found null")
            links.append(Link(source, target, bandwidth / _MICROSECOND, given.links.latency[a][b] * _MICROSECOND))
    return Cluster(tuple(Device(device, "device") for device in names), tuple(links), name)


def _check_square(matrix: Sequence[Sized], size: int, where: str) -> None:
    check_length(matrix, size, where)
    for i, row in enumerate(matrix):
        check_length(row, size, f"{where}[{i}]")
