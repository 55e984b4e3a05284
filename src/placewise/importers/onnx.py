"""Graphs from ONNX files, and placements in them (the device configurations of IR 11).

Only the file itself is opened: weights are known by their types, wherever their data is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from placewise.errors import InvalidInput, Unsupported, listed, naming
from placewise.graph import Graph
from placewise.importers import require
from placewise.importers.assembly import Assembly
from placewise.importers.onnx_kinds import KINDS, Node
from placewise.importers.onnx_model import (
    STANDARD,
    Dims,
    captured,
    constants,
    dtype,
    inferred,
    inner_graphs,
    inside,
    node_names,
    numbers,
    opened,
    parsed,
    plain_value,
    widths,
)
from placewise.importers.values import SAME, SMALL, Values, Work, check_body, own_kind
from placewise.kinds import TensorType

#: Name of the configuration that `write_placement` writes.
_CONFIGURATION = "placewise"


def load(path: str | Path, name: str | None = None, *, dims: Mapping[str, int] | None = None) -> Graph:
    """Read a model. `dims` gives the sizes of its symbolic dimensions: {"batch": 1}."""
    with naming(path):
        model = opened(path)
        given = Dims(dims or {})
        types = inferred(model, given)
        given.check_all_used()
        return _Reader(model, types, name or Path(path).name.removesuffix(".onnx")).graph()


# ---- nodes -----------------------------------------------------------------------------------------------------------


class _Reader:
    """Goes through the nodes in order."""

    def __init__(self, model: Any, types: Mapping[str, TensorType], name: str) -> None:
        self._types = types
        self._graph = model.graph
        self._assembly = Assembly(name)
        self._values = Values(self._assembly)
        self._numbers = numbers(model.graph)
        self._opset = max((held.version for held in model.opset_import if held.domain in STANDARD), default=1)
        self._groups = -1

    def graph(self) -> Graph:
        graph, values = self._graph, self._values
        self._store(graph.initializer)
        for sparse in graph.sparse_initializer:
            held = TensorType(dtype(sparse.values.data_type), tuple(sparse.dims))
            values.constant(sparse.values.name, held, sparse.values.name, _owner(sparse.values.name))
        for value in graph.input:
            if value.name not in values:
                values.op(value.name, "input", [], {value.name: self._known_type(value.name, "input")})
        for node, name in zip(graph.node, node_names(graph), strict=True):
            self._add(node, name)
        return self._assembly.graph()

    def _store(self, tensors: Iterable[Any], prefix: str = "") -> list[str]:
        """Their keys: names, which only differ within one graph."""
        keys = []
        for tensor in tensors:
            held = TensorType(dtype(tensor.data_type), tuple(tensor.dims))
            keys.append(prefix + tensor.name)
            self._values.constant(keys[-1], held, tensor.name, _owner(tensor.name))
        return keys

    def _known_type(self, name: str, where: str) -> TensorType:
        if name not in self._types:
            raise InvalidInput(
                f"{where:.60}: the shape of {name!r:.60} depends on data, or on an op that is not known here: give its "
                f"sizes, such as dims={{'{name:.60}.0': 1}}, or infer the file's shapes first"
            )
        return self._types[name]

    def _add(self, node: Any, name: str) -> None:
        values, where = self._values, f"node {name:.60} ({node.op_type:.60})"
        inputs = list(node.input)
        for number, graph in enumerate(inner_graphs(node)):
            inputs += [*self._store(graph.initializer, f"{name}/{number}/"), *captured(graph)]
        made = [key for key in node.output if key]
        op = node.op_type if node.domain in STANDARD else f"{node.domain}.{node.op_type}"
        module = _module(node, name)
        read = inputs[:1] if op in ("Cast", "CastLike") else [key for key in inputs if key]
        if op == "Constant":
            self._constant(node, made, where, module)
        elif op in ("Shape", "Size") or (read and all(map(values.is_known, read)) and self._small(made)):
            for key in made:
                values.set_known(key, self._types.get(key))
        else:
            plain = {attribute.name: plain_value(attribute) for attribute in node.attribute}
            attributes = {key: value for key, value in plain.items() if value is not None}
            found = Node(
                op,
                inputs,
                {key: self._known_type(key, where) for key in made},
                attributes,
                values,
                self._numbers,
                self._opset,
            )
            try:
                check_body((inner.op_type, inner.name or " ".join(inner.output)) for inner in inside(node))
                self._work(found, name, module)
            except (InvalidInput, Unsupported) as error:
                raise type(error)(f"{where}: {error}") from None
            except (ArithmeticError, LookupError, TypeError, ValueError):
                raise InvalidInput(f"{where}: its inputs or attributes are not those of such an op") from None

    def _small(self, made: Sequence[str]) -> bool:
        """Shape arithmetic, whose own shapes need not be known."""
        return not all(key in self._types for key in made) or sum(self._types[key].bytes for key in made) <= SMALL

    def _constant(self, node: Any, made: Sequence[str], where: str, module: str) -> None:
        if len(made) != 1 or len(node.attribute) != 1:
            raise InvalidInput(f"{where}: must have one value and one output")
        value = node.attribute[0]
        if value.name == "value":
            held = TensorType(dtype(value.t.data_type), tuple(value.t.dims))
        else:
            held = self._known_type(made[0], where)
        if held.elements == 1:
            self._values.set_known(made[0], held)
        else:
            self._values.constant(made[0], held, made[0], module)

    def _work(self, node: Node, name: str, module: str) -> None:
        if node.op == "com.microsoft.Attention":
            self._attention_with_weights(node, name, module)
            return
        work = KINDS[node.op](node) if node.op in KINDS else Work(own_kind("onnx", node.op))
        inputs = [key for key in (node.inputs if work.inputs is None else work.inputs) if key]
        outputs = dict(list(node.outputs.items())[:1]) if work.kind == SAME else node.outputs
        for key in node.outputs.keys() - outputs.keys():  # the mask of a dropout that drops nothing
            self._values.set_known(key, node.outputs[key])
        self._values.op(name, work.kind, inputs, outputs, work.attributes, seen_as=work.seen_as, module=module)

    def _attention_with_weights(self, node: Node, name: str, module: str) -> None:
        """x [batch, steps, in] by weights [in, q + k + v], then attention: two kernels of one node."""
        batch, steps, _ = node.shape(0)
        heads, total = node.attributes["num_heads"], node.shape(1)[-1]
        made = next(iter(node.outputs.values()))
        product = f"{name}/qkv"
        self._groups += 1
        place: dict[str, Any] = {"module": module, "group": self._groups}
        outputs = {product: TensorType(made.dtype, (batch, steps, total))}
        self._values.op(product, "matmul", [key for key in node.inputs[:3] if key], outputs, **place)
        seen = {
            position: TensorType(made.dtype, (batch, heads, steps, width // heads))
            for position, width in enumerate(widths(node.attributes, total))
        }
        rest = [key for key in node.inputs[3:] if key]
        keys = {"keys": node.shape(4)[3] + steps} if node.has(4) else {}  # past: [2, batch, heads, steps, width]
        self._values.op(name, "attention", [product] * 3 + rest, node.outputs, keys, seen_as=seen, **place)


def _owner(parameter: str) -> str:
    """layer1.0.conv1.weight belongs to layer1.0.conv1."""
    return parameter.rpartition(".")[0]


def _module(node: Any, name: str) -> str:
    """The module that a node came from: as PyTorch's exporter notes it, or else from a name made of scopes, in which
    /layer1/layer1.0/conv1/Conv is a node of layer1.0.conv1.
    """
    for note in node.metadata_props:
        if note.key == "pkg.torch.onnx.name_scopes" and len(note.value) < 10_000:
            try:
                scopes = ast.literal_eval(note.value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                continue
            if isinstance(scopes, list) and len(scopes) > 1 and isinstance(scopes[-2], str):
                return scopes[-2]
    path: list[str] = []
    for part in name.split("/")[1:-1] if name.startswith("/") else ():
        if path and part.startswith(f"{path[-1]}."):
            path.pop()
        path.append(part)
    return ".".join(path)


# ---- placements ------------------------------------------------------------------------------------------------------


def read_placement(path: str | Path) -> dict[str, tuple[str, int | None]]:
    """The device and, where it is noted, the pipeline stage of each node that the file places on one device."""
    with naming(path):
        model = parsed(path)
        devices = {found.name: list(found.device) for found in model.configuration}
        placement: dict[str, tuple[str, int | None]] = {}
        for node, name in zip(model.graph.node, node_names(model.graph), strict=True):
            for entry in node.device_configurations:
                used = sorted({number for spec in entry.sharding_spec for number in spec.device})
                names = devices.get(entry.configuration_id)
                if names is None:
                    raise InvalidInput(f"node {name:.60}: there is no configuration {entry.configuration_id!r:.60}")
                if len(used) != 1:
                    continue  # sharded, or nothing is said
                if not 0 <= used[0] < len(names):
                    raise InvalidInput(f"node {name:.60}: there is no device {used[0]}: there are {len(names)}")
                stage = entry.pipeline_stage if entry.HasField("pipeline_stage") else None
                placement[name] = (names[used[0]], stage)
        return placement


def write_placement(
    source: str | Path, target: str | Path, devices: Sequence[str], placement: Mapping[str, tuple[str, int | None]]
) -> None:
    """Copy a model with the device (and pipeline stage, or None) of each node that is named in `placement`.

    External data stays where it is, so such a model can only be written beside its source.
    """
    from placewise.files import write_bytes

    onnx = require("onnx", "onnx")
    with naming(source):
        model = parsed(source, keep_data=True)
        names = node_names(model.graph)
        if unknown := placement.keys() - set(names):
            raise InvalidInput(f"has no node named {min(unknown)!r:.60}")
        for node, (device, stage) in placement.items():
            if device not in devices:
                raise InvalidInput(f"node {node:.60}: {device!r:.60} is not one of the devices {listed(list(devices))}")
            if stage is not None and (not isinstance(stage, int) or not 0 <= stage < 2**31):
                raise InvalidInput(f"node {node:.60}: a stage must be a whole number or None, found {stage!r:.60}")
        external = any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in constants(model.graph))
        if external and Path(source).resolve().parent != Path(target).resolve().parent:
            raise InvalidInput("has external data, which its copy finds only in the same folder: write it there")
        kept = [found for found in model.configuration if found.name != _CONFIGURATION]
        del model.configuration[:]
        model.configuration.extend(kept)
        model.configuration.add(name=_CONFIGURATION, num_devices=len(devices), device=devices)
        model.ir_version = max(model.ir_version, 11)  # the first that has them
        for node, name in zip(model.graph.node, names, strict=True):
            other = [entry for entry in node.device_configurations if entry.configuration_id != _CONFIGURATION]
            del node.device_configurations[:]
            node.device_configurations.extend(other)
            if name in placement:
                device, stage = placement[name]
                entry = node.device_configurations.add(configuration_id=_CONFIGURATION, pipeline_stage=stage)
                for key in node.output:
                    entry.sharding_spec.add(tensor_name=key, device=[devices.index(device)])
        raw = model.SerializeToString()
    write_bytes(target, raw)
