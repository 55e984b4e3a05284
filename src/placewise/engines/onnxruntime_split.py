"""ONNX Runtime, a model for each piece: the model cut into segments, each run by a session on one device.

A session has one accelerator, so several take several sessions. Segments are cut so that each can be run as a whole.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placewise.engines import Run, along, check_devices, engine
from placewise.engines.names import check_ops
from placewise.engines.onnxruntime import ADVICE, Provider, assigned, open_session, provider, readable
from placewise.errors import InvalidInput, Unsupported
from placewise.plans import Plan
from placewise.problem import Problem
from placewise.transforms import subgraph

if TYPE_CHECKING:
    from placewise.measure import Timing

_FORMAT: Final = "placewise-onnxruntime-split/1"
_RUNS: Final = 5
_LARGE: Final = (
    2**30
)  # bytes of a model beyond which weights go into a file of their own: a model holds less than 2 GiB


def segments_in_turn(problem: Problem) -> Problem:
    """For latency, segments run one after the other. For throughput, samples overlap, each device with one segment."""
    if problem.objective == "throughput":
        return replace(problem, contiguous=True)
    return replace(problem, execution=replace(problem.execution, concurrency="sequential"))


@contextmanager
def run(plan: Plan, model: str, devices: Mapping[str, str]) -> Iterator[Pipeline]:
    """An .onnx file, or a model of the zoo; two logical CPUs are two sessions with threads of their own."""
    with readable(plan, model, devices) as path, TemporaryDirectory() as folder:
        _cut_up(plan, path, Path(folder))
        yield Pipeline(plan, path, Path(folder), devices)


def write(plan: Plan, model: str, folder: Path) -> None:
    """A model file for each segment, and manifest.json: what each reads, makes and runs on, in order."""
    with readable(plan, model, {}) as path:
        _cut_up(plan, path, folder)


@engine("onnxruntime-split", fit=segments_in_turn, versions="onnxruntime>=1.20", run=run, write=write)
def onnxruntime_split(plan: Plan) -> str:
    """JSON of segments in order, each a device and its nodes; with --model, the sub-models in a folder."""
    check_ops(plan, "onnxruntime-split")
    graph, cluster = plan.problem.graph, plan.problem.cluster
    start, edges = graph.in_edges
    reads = [graph.edge_producer[edges[start[op] : start[op + 1]]].tolist() for op in range(graph.num_ops)]
    order = graph.topological_order.tolist()
    work = [op for op in order if not graph.is_stored[op] and graph.op_kinds[op] != "input"]
    rows = [
        {"device": cluster.device_names[device], "nodes": [graph.op_names[op] for op in ops]}
        for device, ops in in_turn(work, reads, plan.placement.tolist())
    ]
    return json.dumps({"format": _FORMAT, "segments": rows}, indent=1) + "\n"


# ---- cutting ---------------------------------------------------------------------------------------------------------


def in_turn(nodes: Sequence[int], reads: Sequence[Sequence[int]], device: Sequence[int]) -> list[tuple[int, list[int]]]:
    """(device, nodes) of segments that can run one after the other, as few as going on with a device makes.

    `nodes` are in an order in which they could run; what they read beyond these is there from the start.
    """
    inside = set(nodes)
    needs = {node: {source for source in reads[node] if source in inside} for node in nodes}
    readers: dict[int, list[int]] = {node: [] for node in nodes}
    for node in nodes:
        for source in sorted(needs[node]):
            readers[source].append(node)

    def beginning_with(first: int) -> list[tuple[int, list[int]]]:
        left = {node: len(needs[node]) for node in nodes}
        ready: dict[int, list[int]] = {d: [] for d in sorted({device[node] for node in nodes})}
        for node in nodes:
            if not left[node]:
                ready[device[node]].append(node)
        found: list[tuple[int, list[int]]] = []
        now = first
        while any(ready.values()):
            if not ready[now]:
                now = max(ready, key=lambda d: len(ready[d]))
            mine: list[int] = []
            for node in ready[now]:  # grows as it goes
                mine.append(node)
                for reader in readers[node]:
                    left[reader] -= 1
                    if not left[reader]:
                        ready[device[reader]].append(reader)
            ready[now] = []
            found.append((now, sorted(mine, key=place.__getitem__)))
        return found

    place = {node: position for position, node in enumerate(nodes)}
    starts = sorted({device[node] for node in nodes if not needs[node]})
    return min((beginning_with(first) for first in starts), key=len, default=[])


class Segment(NamedTuple):
    """A piece of a model."""

    device: str
    nodes: list[int]
    inputs: list[str]
    outputs: list[str]


def _cut_up(plan: Plan, path: Path, folder: Path) -> None:
    from placewise.files import write_text
    from placewise.importers import onnx as importer
    from placewise.importers import onnx_model, require

    onnx = require("onnx", "onnx")
    plan.check_model(importer.load(path), ADVICE)
    model, values = onnx_model.whole(path)
    found = _segments(plan, model.graph, onnx_model.names_read)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    stored |= {tensor.values.name: tensor for tensor in model.graph.sparse_initializer}
    constants = {node.output[0]: node for node in model.graph.node if node.op_type == "Constant"}
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, segment in enumerate(found):
        piece = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
        piece.graph.name = f"{model.graph.name or 'model'}-{number}"
        own = [model.graph.node[i] for i in segment.nodes]
        read = dict.fromkeys(name for node in own for name in onnx_model.names_read(node))
        piece.graph.node.extend([*(constants[name] for name in read if name in constants), *own])
        for name in read:
            if name in stored and isinstance(stored[name], onnx.SparseTensorProto):
                piece.graph.sparse_initializer.append(stored[name])
            elif name in stored:
                piece.graph.initializer.append(stored[name])
        for names, ends in ((segment.inputs, piece.graph.input), (segment.outputs, piece.graph.output)):
            for name in names:
                if name not in values:
                    raise Unsupported(f"{path}: the type of {name!r:.60}, which crosses, cannot be inferred")
                ends.append(values[name])
        file = f"segment-{number}.onnx"
        _save(onnx, piece, folder / file)
        names = [node.name for node in own]
        row = {"file": file, "device": segment.device, "inputs": segment.inputs, "outputs": segment.outputs}
        rows.append(row | {"nodes": names})
    given = [value.name for value in model.graph.input if value.name not in stored]
    manifest = {"format": _FORMAT, "model": plan.problem.graph.name, "inputs": given}
    manifest |= {"outputs": [value.name for value in model.graph.output], "segments": rows}
    write_text(folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")


def _save(onnx: Any, piece: Any, path: Path) -> None:
    from placewise.files import write_bytes

    if sum(tensor.ByteSize() for tensor in piece.graph.initializer) < _LARGE:
        write_bytes(path, piece.SerializeToString())
    else:
        weights = f"{path.stem}.weights"
        (path.parent / weights).unlink(missing_ok=True)  # it would be written to, not anew
        onnx.save_model(piece, str(path), save_as_external_data=True, location=weights)


def _segments(plan: Plan, graph: Any, names_read: Any) -> list[Segment]:
    """Nodes of which the plan says nothing go with what they read. Constants are everywhere, like weights."""
    names = plan.problem.cluster.device_names
    makers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    everywhere = {i for i, node in enumerate(graph.node) if node.op_type == "Constant"}
    reads = [[makers[name] for name in names_read(node) if name in makers] for node in graph.node]
    place = dict(zip(plan.problem.graph.op_names, plan.placement.tolist(), strict=True))
    known = {i: place[node.name] for i, node in enumerate(graph.node) if node.name in place and i not in everywhere}
    if not known:
        raise InvalidInput("not the model of this plan: none of its nodes is in it")
    device = along(reads, known)
    work = [i for i in range(len(graph.node)) if i not in everywhere]
    wanted = {value.name for value in graph.output}
    free = {value.name for value in graph.initializer} | {value.values.name for value in graph.sparse_initializer}
    free |= {name for i in everywhere for name in graph.node[i].output}
    if missing := wanted & free or wanted - set(makers):
        raise Unsupported(f"the output {min(missing)!r:.60} is made by no node that could be in a segment")
    turns = in_turn(work, reads, device)
    segment_of = {node: number for number, (_, nodes) in enumerate(turns) for node in nodes}
    leaves = set(wanted)
    for node in work:
        for name in names_read(graph.node[node]):
            if name in makers and name not in free and segment_of[makers[name]] != segment_of[node]:
                leaves.add(name)
    found = []
    for where, nodes in turns:
        made = [name for node in nodes for name in graph.node[node].output if name]
        read = dict.fromkeys(name for node in nodes for name in names_read(graph.node[node]))
        inputs = [name for name in read if name not in free and name not in set(made)]
        found.append(Segment(names[where], nodes, inputs, [name for name in made if name in leaves]))
    return found


# ---- running ---------------------------------------------------------------------------------------------------------


class Sessions:
    """The segments of a folder that `write` has written, opened. `where` says what runs each device."""

    def __init__(self, folder: Path, where: Mapping[str, Provider]) -> None:
        self.manifest = _manifest(folder)
        self._lock = {name: Lock() for name in where}
        self.segments = [
            (row["device"], open_session(folder / row["file"], where[row["device"]]), row["inputs"], row["outputs"])
            for row in self.manifest["segments"]
        ]

    def __call__(self, given: Mapping[str, Any], spent: dict[str, float] | None = None) -> list[NDArray[Any]]:
        """Run once. What the sessions of each device took is added to `spent`."""
        values = dict(given)
        for device, session, inputs, outputs in self.segments:
            with self._lock[device]:
                began = time.perf_counter()
                made = session.run(outputs, {name: values[name] for name in inputs})
                if spent is not None:
                    spent[device] = spent.get(device, 0.0) + time.perf_counter() - began
            values.update(zip(outputs, made, strict=True))
        return [values[name] for name in self.manifest["outputs"]]

    def stream(self, samples: Iterable[Mapping[str, Any]]) -> list[list[NDArray[Any]]]:
        """Many samples: while a device runs one, the others run those before and after it."""
        with ThreadPoolExecutor(len(self._lock) + 1) as pool:
            return list(pool.map(self, samples))


def _manifest(folder: Path) -> dict[str, Any]:
    from placewise.files import load_split

    path = folder / "manifest.json"
    found = load_split(path)
    if any(os.path.basename(row["file"]) != row["file"] for row in found["segments"]):
        raise InvalidInput(f"{path}: a segment is outside of the folder")
    return found


class Pipeline(Run):
    """A model as segments, and in one session on the plan's best device. What crosses goes through host memory."""

    def __init__(self, plan: Plan, path: Path, folder: Path, devices: Mapping[str, str]) -> None:
        from placewise.importers import require

        check_devices(plan, devices)
        self.library = f"onnxruntime {require('onnxruntime', 'onnx').__version__}"
        self._plan, self._path, self._folder = plan, path, folder
        used, names = sorted(set(plan.placement.tolist())), plan.problem.cluster.device_names
        self._where = {names[d]: provider(plan, d, devices) for d in used}
        self.sessions = Sessions(folder, self._where)

    def plain(self) -> list[NDArray[Any]]:
        """In one session, on the device that the plan's costs say is the fastest for the whole."""
        return list(self._plain.run(None, self.inputs))

    def placed(self) -> list[NDArray[Any]]:
        """One segment after the other."""
        return self._sessions_run()

    def ran_on(self) -> dict[str, str]:
        """As each session tells it; what a provider leaves to the CPU is told by the provider's name."""
        known, found = set(self._plan.problem.graph.op_names), {}
        for device, session, _, _ in self.sessions.segments:
            for node, ep in assigned(session).items():
                if node in known:
                    found[node] = device if ep == self._where[device].name else ep
        return found

    def busy(self) -> dict[str, float]:
        """What the sessions of each device took, copies within them included."""
        runs: list[dict[str, float]] = [{} for _ in range(_RUNS)]
        for spent in runs:
            self._sessions_run(spent)
        return {device: float(np.median([spent[device] for spent in runs])) for device in runs[0]}

    def times(self) -> Iterator[tuple[str, str, Timing]]:
        """By the profiler of each session."""
        from placewise.measure import shared_out
        from placewise.measure.onnxruntime import kernels

        values = dict(self.inputs)
        found: dict[str, list[tuple[list[str], list[float]]]] = {}
        for row, (device, session, inputs, outputs) in zip(
            self.sessions.manifest["segments"], self.sessions.segments, strict=True
        ):
            given = {name: values[name] for name in inputs}
            values.update(zip(outputs, session.run(outputs, given), strict=True))
            file, where = self._folder / row["file"], self._where[device]
            measured = kernels(str(file), partial(open_session, file, where), {}, given)
            found.setdefault(device, []).extend(measured)
        graph = self._plan.problem.graph
        for device, measured in found.items():
            d = self._plan.problem.cluster.device_index(device)
            here = subgraph(graph, self._plan.placement == d)
            for signature, timing in shared_out(here, measured, set(here.op_signatures) - {""}):
                yield device, signature, timing

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """Random, the same each time."""
        from placewise.measure.onnxruntime import random_inputs

        return random_inputs(self._plain, {})

    @cached_property
    def _plain(self) -> Any:
        names, seconds = self._plan.problem.cluster.device_names, self._plan.problem.costs.seconds.sum(axis=0)
        best = min(self._where, key=lambda name: float(seconds[names.index(name)]))
        return open_session(self._path, self._where[best])

    def _sessions_run(self, spent: dict[str, float] | None = None) -> list[NDArray[Any]]:
        from placewise.measure import told

        with told(f"{self._path}: ONNX Runtime cannot run a segment"):
            return self.sessions(self.inputs, spent)
