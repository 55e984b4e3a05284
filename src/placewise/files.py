"""Graphs, problems and plans as JSON files, clusters as YAML files; reading trusts nothing, writing is all or nothing.

JSON files say what they are ("placewise-graph/1") and hold one list per property, so that 100,000 ops load in a moment.
Numbers are in SI units and come back exactly; null stands for unlimited, and for the time of an op on a device that
cannot run it. Every file may be compressed by gzip.
"""

from __future__ import annotations

import difflib
import gzip
import json
import math
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import resources
from itertools import chain, permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

import numpy as np

from placewise.cluster import Cluster, Device, Link
from placewise.costs import LABELS, Costs
from placewise.errors import InvalidInput
from placewise.graph import OP_DEFAULTS, PHASES, Graph
from placewise.plans import Plan
from placewise.problem import Execution, Problem

if TYPE_CHECKING:
    from placewise._schemas import ClusterData, CostsData, GraphData, ProblemData

#: How much a file may hold once decompressed; what is larger is refused before it fills the memory.
MAX_BYTES = 2 * 1024**3
MAX_YAML_BYTES = 4 * 1024**2

#: The columns of "ops" in a file, and the fields of `Graph` that they are.
_OP_COLUMNS: Final = {"name": "op_names", "kind": "op_kinds", "dtype": "op_dtypes", "module": "op_modules"} | {
    name: name for name in ("flops", "bytes_accessed", "scratch", "resident", "phase", "model", "group")
}


# ---- whatever the user names as a model --------------------------------------------------------------------------------


def load_problem(
    model: str | Path,
    cluster: str | Path | Cluster | None = None,
    *,
    objective: str | None = None,
    execution: Execution | None = None,
    pins: Mapping[str, str] | None = None,
    forbidden: Sequence[str] | None = None,
    contiguous: bool | None = None,
    max_devices: int | None = None,
    max_memory: Mapping[str, float] | None = None,
    place_parameters: bool = False,
) -> Problem:
    """A problem from a problem file, a benchmark file, or a model (a graph file or a bundled name) on a cluster.

    Options replace what the file says. Parameters live with their consumers unless `place_parameters` is set.
    """
    from placewise import zoo

    if model in zoo.names():
        found: Graph | Problem = zoo.load(str(model))
    else:
        found = _load_graph_or_problem(_existing(model, "model", zoo.names()))

    if isinstance(found, Graph):
        if cluster is None:
            raise InvalidInput(f"{model} needs a cluster: a YAML file, or one of {', '.join(bundled_boxes())}")
        cluster = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
        found = Problem(found if place_parameters else found.collapse_parameters().graph, cluster)
    elif cluster is not None:
        raise InvalidInput(f"{model} already has a cluster: leave the other one out")
    elif place_parameters:
        raise InvalidInput(f"{model} is a whole problem: whether parameters are placed is part of it")

    changes: dict[str, Any] = {
        "objective": objective, "execution": execution, "pins": pins, "contiguous": contiguous,
        "forbidden": None if forbidden is None else tuple(forbidden), "max_devices": max_devices,
        "cluster": None if max_memory is None else found.cluster.with_memory(max_memory),
    }  # fmt: skip
    return replace(found, **{name: value for name, value in changes.items() if value is not None})


def _load_graph_or_problem(path: Path) -> Graph | Problem:
    """By what the file says it is, or by its keys where it is of a published format that does not say."""
    with _naming(path):
        data = _read_json(path)
    keys = data.keys() if isinstance(data, dict) else set()
    name = path.name.removesuffix(".gz").removesuffix(".json")
    if "format" in keys and data["format"] == "placement-instance/1":
        from placewise.importers import instances

        return instances.load(data, name)
    if {"maxSizePerFPGA", "maxFPGAs", "nodes", "edges"} <= keys:
        from placewise.importers import dnn_partitioning

        return dnn_partitioning.load(data, name)
    with _naming(path):
        kind, content = _unwrapped(data, "graph", "problem")
        return _graph_in(content) if kind == "graph" else _problem_in(content)


def _existing(path: str | Path, what: str, bundled: Sequence[str]) -> Path:
    if os.path.exists(path):
        return Path(path)
    close = difflib.get_close_matches(str(path), bundled, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise InvalidInput(f"{str(path)!r} is neither a file nor a bundled {what}{hint}; bundled are {', '.join(bundled)}")


# ---- problems ----------------------------------------------------------------------------------------------------------


def load_problem_file(path: str | Path) -> Problem:
    """Read a problem file; `load_problem` reads all that a problem can be made from."""
    with _naming(path):
        return _problem_in(_unwrapped(_read_json(path), "problem")[1])


def save_problem(problem: Problem, path: str | Path) -> None:
    """Write a problem file (gzip if the name ends in .gz)."""
    with _naming(path):
        _write_json(path, "problem", _problem_out(problem))


def _problem_in(content: Any) -> Problem:
    from placewise._schemas import ProblemData, validated

    return _build_problem(validated(ProblemData, content))


def _build_problem(data: ProblemData) -> Problem:
    graph, cluster, limits = _build_graph(data.graph), _build_cluster(data.cluster), data.constraints
    return Problem(
        graph,
        cluster,
        cast(Costs, data.costs and _build_costs(data.costs, graph.num_ops, cluster.device_names)),
        data.objective,
        Execution(**data.execution.model_dump()),
        pins=limits.pins,
        forbidden=tuple(limits.forbidden),
        contiguous=limits.contiguous,
        max_devices=limits.max_devices,
    )


def _problem_out(problem: Problem) -> dict[str, Any]:
    return {
        "graph": _graph_out(problem.graph),
        "cluster": _cluster_out(problem.cluster),
        "costs": _costs_out(problem.costs, problem.cluster.device_names),
        "objective": problem.objective,
        "execution": asdict(problem.execution),
        "constraints": {
            "pins": dict(problem.pins),
            "forbidden": list(problem.forbidden),
            "contiguous": problem.contiguous,
            "max_devices": problem.max_devices,
        },
    }


def _build_costs(data: CostsData, ops: int, devices: Sequence[str]) -> Costs:
    columns = {"costs.seconds": data.seconds} | ({"costs.labels": data.labels} if data.labels is not None else {})
    for where, table in columns.items():
        if table.keys() != set(devices):
            raise InvalidInput(f"{where} must have a list for each device: {', '.join(devices)}")
        for device, column in table.items():
            _need_length(column, ops, f"{where}.{device}")
    seconds = np.array([data.seconds[device] for device in devices], np.float64).T
    seconds[np.isnan(seconds)] = math.inf  # null has become NaN
    if data.labels is None:
        return Costs.create(seconds, data.label)
    return Costs.create(seconds, np.array([[LABELS.index(x) for x in data.labels[d]] for d in devices]).T)


def _costs_out(costs: Costs, devices: Sequence[str]) -> dict[str, Any]:
    table = np.where(np.isfinite(costs.seconds), costs.seconds, None) if np.isinf(costs.seconds).any() else costs.seconds
    seconds = {device: table[:, d].tolist() for d, device in enumerate(devices)}
    if len(costs.shares()) <= 1:
        return {"seconds": seconds, "label": next(iter(costs.shares()), "given")}
    return {
        "seconds": seconds,
        "labels": {device: [LABELS[x] for x in costs.label[:, d].tolist()] for d, device in enumerate(devices)},
    }


# ---- graphs ------------------------------------------------------------------------------------------------------------


def load_graph(path: str | Path) -> Graph:
    """Read a graph file."""
    with _naming(path):
        return _graph_in(_unwrapped(_read_json(path), "graph")[1])


def save_graph(graph: Graph, path: str | Path) -> None:
    """Write a graph file (gzip if the name ends in .gz)."""
    with _naming(path):
        _write_json(path, "graph", _graph_out(graph))


def _graph_in(content: Any) -> Graph:
    from placewise._schemas import GraphData, validated

    return _build_graph(validated(GraphData, content))


def _build_graph(data: GraphData) -> Graph:
    ops, tensors = data.ops, data.tensors
    columns = {field: getattr(ops, column) for column, field in _OP_COLUMNS.items()}
    columns["phase"] = ops.phase and [PHASES.index(phase) for phase in ops.phase]
    _need_length(tensors.consumers, len(tensors.producer), "tensors.consumers")
    for t, readers in enumerate(tensors.consumers):
        if readers and max(readers) >= len(ops.name):
            raise InvalidInput(f"tensors.consumers[{t}]: there is no op {max(readers)}: there are {len(ops.name)} ops")
    return Graph.create(
        name=data.name,
        models=data.models,
        **{field: values for field, values in columns.items() if values is not None},
        tensor_producer=tensors.producer,
        tensor_bytes=tensors.bytes,
        edge_tensor=np.repeat(np.arange(len(tensors.consumers)), [len(readers) for readers in tensors.consumers]),
        edge_consumer=list(chain.from_iterable(tensors.consumers)),
    )


def _graph_out(graph: Graph) -> dict[str, Any]:
    ops = {column: list(getattr(graph, field)) for column, field in _OP_COLUMNS.items()}
    return ops
