"""Reads the inputs of Tarnawski et al. 2020, "Efficient Algorithms for Device Placement of DNN Graph Operators".

The files are those of github.com/msr-fiddle/dnn-partitioning: operator and layer graphs with a time per kind of device,
`maxFPGAs` equal accelerators with limited memory and `maxCPUs` CPUs. Times are milliseconds. Transfers go through host
memory, cost the same between any two devices, and are charged to accelerators only.

Mind the unit trap: the `cost` of an edge is milliseconds in the operator graphs and in the latency inputs, but seconds
in the layer graphs among the throughput inputs, which makes their communication 1000 times too cheap. Published results
use the files as they are, and so does `load`; pass `transfer_scale=1000` for the physical problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
from pydantic import Field

from placewise._schemas import List, validated
from placewise.cluster import Cluster, Device, Link, check_device_count
from placewise.costs import Costs, check_table_size
from placewise.errors import InvalidInput
from placewise.graph import Graph, Ints
from placewise.importers.fields import Amount, DeviceCount, Flag, Identifier, Record
from placewise.problem import Execution, Problem
from placewise.quantities import LARGEST

_MILLISECOND = 1e-3
#: The bandwidth behind the published costs; used where a file does not tell (edges have a cost but no size).
_USUAL_BANDWIDTH = 2.0**31
_SAME_COST = 1e-6


class _Node(Record):
    id: Identifier
    name: str = ""
    supported: Flag = Field(alias="supportedOnFpga")
    cpu_latency: Amount = Field(alias="cpuLatency")
    fpga_latency: Amount = Field(alias="fpgaLatency")
    is_backward: Flag = Field(False, alias="isBackwardNode")
    color_class: Identifier | None = Field(None, alias="colorClass")
    size: Amount = 0.0


class _Edge(Record):
    source: Identifier = Field(alias="sourceId")
    target: Identifier = Field(alias="destId")
    cost: Amount
    size: Amount = 0.0


class _Input(Record):
    memory: Amount = Field(alias="maxSizePerFPGA")
    accelerators: DeviceCount = Field(alias="maxFPGAs")
    cpus: DeviceCount = Field(alias="maxCPUs")
    nodes: List[_Node]
    edges: List[_Edge]


class _Share(Record):
    nodes: List[Identifier]


class _Split(Record):
    fpgas: List[_Share]
    cpus: List[_Share] = Field(default_factory=list)


def load(data: Any, name: str, *, objective: str | None = None, transfer_scale: float = 1.0) -> Problem:
    """The problem in a parsed input file. Ops are named "id:name", so that a split file finds them.

    The latency of inference is that of the paper, with one slot per accelerator. Training is not defined there: its
    latency is that of a parallel engine.
    """
    given = validated(_Input, data)
    check_device_count(given.accelerators + given.cpus)
    check_table_size(len(given.nodes), given.accelerators + given.cpus)
    if not (transfer_scale >= 0 and math.isfinite(transfer_scale)):
        raise InvalidInput(f"transfer_scale: must be a finite number, 0 or more, found {transfer_scale}")
    position: dict[int, int] = {}
    for i, node in enumerate(given.nodes):
        if position.setdefault(node.id, i) != i:
            raise InvalidInput(f"nodes[{i}].id: nodes[{position[node.id]}] has the same id, {node.id}")
    seconds_out = _transfer_seconds(given.edges, position, transfer_scale)
    bandwidth = _bandwidth(given.edges, transfer_scale)

    sends = sorted(seconds_out)
    tensor_of = {producer: tensor for tensor, producer in enumerate(sends)}
    classes = {node.color_class: None for node in given.nodes if node.color_class is not None}
    group_of: dict[int | None, int] = {color: group for group, color in enumerate(classes)} | {None: -1}
    graph = Graph.create(
        name=name,
        op_names=[f"{node.id}:{node.name}" if node.name else f"{node.id}" for node in given.nodes],
        resident=[node.size for node in given.nodes],
        phase=[int(node.is_backward) for node in given.nodes],
        group=[group_of[node.color_class] for node in given.nodes],
        tensor_producer=sends,
        # `size` disagrees with `cost` in the training files, and published results go by `cost`.
        tensor_bytes=[seconds_out[producer] * bandwidth for producer in sends],
        edge_tensor=[tensor_of[position[edge.source]] for edge in given.edges],
        edge_consumer=[position[edge.target] for edge in given.edges],
    )
    accelerated = [node.fpga_latency * _MILLISECOND if node.supported else math.inf for node in given.nodes]
    execution = Execution(contention="none", memory="static", overlap=False, staged=True)
    if objective == "latency" and not any(node.is_backward for node in given.nodes):
        execution = replace(execution, concurrency="slots")
    on_cpu = [node.cpu_latency * _MILLISECOND for node in given.nodes]
    return Problem(
        graph,
        _cluster(given, bandwidth, name),
        Costs.create(np.array([accelerated] * given.accelerators + [on_cpu] * given.cpus).T),
        objective=objective or "throughput",
        execution=execution,
    )


def load_split(data: Any, problem: Problem) -> Ints:
    """The placement in a parsed split file (a human expert's, or a result). Unlisted ops follow their colour class."""
    split = validated(_Split, data)
    position = {op.partition(":")[0]: i for i, op in enumerate(problem.graph.op_names)}
    placement = np.full(problem.num_ops, -1, np.int32)
    for kind, field, shares in (("fpga", "fpgas", split.fpgas), ("cpu", "cpus", split.cpus)):
        devices = [d for d, device in enumerate(problem.cluster.devices) if device.kind == kind]
        for j, share in enumerate(shares):
            if share.nodes and j >= len(devices):
                raise InvalidInput(f"{field}[{j}] has nodes, but the problem has {len(devices)} of these devices")
            for i, node in enumerate(share.nodes):
                where = f"{field}[{j}].nodes[{i}] = {node}"
                op = position.get(str(node))
                if op is None:
                    raise InvalidInput(f"{where}: the problem has no node with that id")
                if placement[op] >= 0:
                    raise InvalidInput(f"{where}: this node was placed before")
                placement[op] = devices[j]

    listed = placement >= 0
    of_unit = np.full(problem.num_units, -1, np.int32)
    of_unit[problem.unit[listed]] = placement[listed]
    for wrong, what in (
        (listed & (of_unit[problem.unit] != placement), "is not on the device of its colour class"),
        (of_unit[problem.unit] < 0, "is on no device"),
    ):
        if wrong.any():
            raise InvalidInput(f"node {problem.graph.op_names[np.argmax(wrong)]} {what}")
    return of_unit[problem.unit]


def _transfer_seconds(edges: Sequence[_Edge], position: dict[int, int], scale: float) -> dict[int, float]:
    """The transfer time of each node with out-edges. A file gives it once per edge, and the edges must agree."""
    cost_of: dict[int, float] = {}
    for i, edge in enumerate(edges):
        for field, end in (("sourceId", edge.source), ("destId", edge.target)):
            if end not in position:
                raise InvalidInput(f"edges[{i}].{field}: no node has the id {end}")
        cost = cost_of.setdefault(position[edge.source], edge.cost)
        if abs(edge.cost - cost) > _SAME_COST:
            raise InvalidInput(
                f"edges[{i}].cost: must be {cost}, as on another edge out of node {edge.source}, found {edge.cost}; "
                "a node sends one tensor"
            )
    return {producer: cost * scale * _MILLISECOND for producer, cost in cost_of.items()}


def _bandwidth(edges: Sequence[_Edge], scale: float) -> float:
    """Bytes per second. It only decides how many bytes a transfer is said to have, never how long it takes."""
    timed = [(edge.size, edge.cost * scale * _MILLISECOND) for edge in edges]
    rates = [size / seconds for size, seconds in timed if size > 0 and seconds > 0]
    usual = float(np.median(rates)) if rates else _USUAL_BANDWIDTH
    return usual if 1.0 / LARGEST <= usual <= LARGEST else _USUAL_BANDWIDTH


def _cluster(given: _Input, bandwidth: float, name: str) -> Cluster:
    fpgas = [Device(f"fpga{i}", "fpga", memory=given.memory) for i in range(given.accelerators)]
    cpus = [Device(f"cpu{i}", "cpu", copies=False) for i in range(given.cpus)]
    devices = (*fpgas, *cpus)
    links = tuple(
        Link(a.name, b.name, math.inf if a.kind == b.kind == "cpu" else bandwidth) for a, b in permutations(devices, 2)
    )
    return Cluster(devices, links, name)
