"""Graphs from ONNX files, and placements in them (the device configurations of IR 11).

Only the file itself is opened: weights are known by their types, wherever their data is.
"""

from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from placewise.errors import InvalidInput, Unsupported, listed
from placewise.graph import Graph
from placewise.importers import naming, require
from placewise.importers.assembly import MAX_OPS, Assembly
from placewise.importers.einsum import einsum
from placewise.importers.values import SAME, SMALL, Values, check_body, check_dims, need_dims, own_kind
from placewise.kinds import TensorType
from placewise.quantities import format_bytes

#: What Protocol Buffers can hold.
MAX_BYTES = 2 * 1024**3
#: Tensors with more elements are no shapes or axes: their data is dropped before shapes are inferred.
_MAX_SETTINGS = 1024
#: The program that infers shapes, and what it may use.
_SHAPES = "placewise.importers.onnx_shapes"
_INFERENCE_BYTES = 4 * 1024**3
_INFERENCE_SECONDS = 120
#: Name of the configuration that `write_placement` writes.
_CONFIGURATION = "placewise"

#: Before the name of an op whose node has none of its own.
MADE_UP: Final = "%"
_DTYPES: Final = {
    "FLOAT": "float32", "DOUBLE": "float64", "FLOAT8E4M3FN": "float8_e4m3fn", "FLOAT8E4M3FNUZ": "float8_e4m3fnuz",
    "FLOAT8E5M2": "float8_e5m2", "FLOAT8E5M2FNUZ": "float8_e5m2fnuz", "FLOAT8E8M0": "float8_e8m0fnu",
    "FLOAT4E2M1": "float4_e2m1fn",
}  # fmt: skip


def load(path: str | Path, name: str | None = None, *, dims: Mapping[str, int] | None = None) -> Graph:
    """Read a model. `dims` gives the sizes of its symbolic dimensions: {"batch": 1}."""
    with naming(path):
        model = _inlined(_parsed(path))
        _check_order(model.graph)
        _slice_sequences(model.graph)
        given = _Dims(dims or {})
        types = _inferred(model, given)
        given.check_all_used()
        return _Reader(model, types, name or Path(path).name.removesuffix(".onnx")).graph()


def whole(path: str | Path, dims: Mapping[str, int] | None = None) -> tuple[Any, dict[str, Any]]:
    """A model with its weights, to be cut up, and its values by name. Nodes have the names of their ops."""
    with naming(path):
        values = {value.name: value for value in _typed(_inlined(_parsed(path)), _Dims(dims or {}))}
        model = _parsed(path, keep_data=True)
        try:
            require("onnx", "onnx").load_external_data_for_model(model, str(Path(path).parent))
        except Exception as error:
            raise InvalidInput(f"its weights cannot be read: {_brief(error)}") from None
        model = _inlined(model)
        for node, name in zip(model.graph.node, node_names(model.graph), strict=True):
            node.name = name
        return model, values


def names_read(node: Any) -> list[str]:
    """What a node reads, and what its branches or its body read from around it."""
    return [key for key in (*node.input, *(name for graph in _inner_graphs(node) for name in _captured(graph))) if key]


# ---- the file --------------------------------------------------------------------------------------------------------


def _parsed(path: str | Path, *, keep_data: bool = False) -> Any:
    onnx = require("onnx", "onnx")
    try:
        if not os.path.isfile(path):
            raise InvalidInput("is not a file")
        if os.path.getsize(path) > MAX_BYTES:
            raise InvalidInput(f"larger than {format_bytes(MAX_BYTES)}: store its weights as external data")
        with open(path, "rb") as file:
            model = onnx.ModelProto.FromString(file.read())
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror}") from None
    except require("google.protobuf.message", "onnx").DecodeError:
        raise InvalidInput("not an ONNX model: the file is damaged or ends too early") from None
    if not model.ir_version or not model.graph.node:
        raise InvalidInput("not an ONNX model: it holds no graph")
    if not all(isinstance(text, str) for part in (model.graph, *model.functions) for text in _texts(part)):
        raise InvalidInput("a text in it is not UTF-8: the file is damaged")
    for tensor in () if keep_data else _constants(model.graph):
        if math.prod(tensor.dims) > _MAX_SETTINGS or len(tensor.raw_data) > 8 * _MAX_SETTINGS:
            for part in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                tensor.ClearField(part)
    return model


def _constants(graph: Any) -> Iterator[Any]:
    """The tensors that a graph and the graphs within it store."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield attribute.t
            yield from attribute.tensors
        for inner in _inner_graphs(node):
            yield from _constants(inner)


def _texts(part: Any) -> Iterator[Any]:
    """The names in a message and the messages within it; those that are not UTF-8 come as bytes."""
    for field_, value in part.ListFields():
        if field_.cpp_type == field_.CPPTYPE_MESSAGE:
            for inner in value if isinstance(value, Iterable) else (value,):
                yield from _texts(inner)
        elif field_.type == field_.TYPE_STRING:
            yield from (value,) if isinstance(value, (str, bytes)) else value


def _inlined(model: Any) -> Any:
    """The model with the functions that it defines replaced by their nodes."""
    if not model.functions:
        return model
    functions = {(function.domain, function.name): function for function in model.functions}
    sizes: dict[tuple[str, str], int] = {}

    def count(nodes: Iterable[Any], within: tuple[tuple[str, str], ...]) -> int:
        """Nodes that there will be."""
        total = 0
        for node in nodes:
            key = node.domain, node.op_type
            total += size(key, within) if key in functions else 1
            total += sum(count(graph.node, within) for graph in _inner_graphs(node))
        return total

    def size(key: tuple[str, str], within: tuple[tuple[str, str], ...]) -> int:
        if key in within or len(within) > 100:
            raise InvalidInput(f"the function {key[1]!r:.60} calls itself, or functions are nested too deep")
        if key not in sizes:
            sizes[key] = count(functions[key].node, (*within, key))
        return sizes[key]

    if count(model.graph.node, ()) > MAX_OPS:
        raise InvalidInput(f"the model has more than {MAX_OPS:,} ops")
    inliner = require("onnx.inliner", "onnx")
    try:
        return inliner.inline_local_functions(model)
    except Exception as error:
        raise InvalidInput(f"its functions cannot be inlined: {_brief(error)}") from None


def _numbers(graph: Any) -> dict[str, list[int]]:
    """The constants of a graph that are a few whole numbers and in the file itself."""
    onnx, to_array = require("onnx", "onnx"), require("onnx.numpy_helper", "onnx").to_array
    found: dict[str, list[int]] = {}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and len(node.attribute) == 1 and len(node.output) == 1:
            value = node.attribute[0]
            if value.name in ("value_int", "value_ints"):
                found[node.output[0]] = list(value.ints) or [value.i]
            elif value.name == "value":
                tensors[node.output[0]] = value.t
    for name, tensor in tensors.items():
        here = tensor.data_location != onnx.TensorProto.EXTERNAL
        if here and tensor.data_type == onnx.TensorProto.INT64 and math.prod(tensor.dims) <= _MAX_SETTINGS:
            try:
                found[name] = to_array(tensor).ravel().tolist()
            except Exception as error:
                raise InvalidInput(f"the constant {name!r:.60} is damaged: {_brief(error)}") from None
    return found


def _slice_sequences(graph: Any) -> None:
    """Replace parts of sequences (that is how PyTorch's exporter writes a split) by slices."""
    helper = require("onnx.helper", "onnx")
    splits = {node.output[0]: node for node in graph.node if node.op_type == "SplitToSequence" and node.output}
    if not splits:
        return
    known = _numbers(graph)
    left: list[Any] = []
    for node in graph.node:
        split = splits.get(node.input[0]) if node.op_type == "SequenceAt" and len(node.input) == 2 else None
        sizes = known.get(split.input[1]) if split is not None and len(split.input) == 2 else None
        position = known.get(node.input[1]) if sizes else None
        if split is None or not sizes or not position or position[0] < 0:
            left.append(node)
            continue
        at = position[0]
        start = at * sizes[0] if len(sizes) == 1 else sum(sizes[:at])
        end = start + (sizes[0] if len(sizes) == 1 else sum(sizes[at : at + 1]))
        axis = next((attribute.i for attribute in split.attribute if attribute.name == "axis"), 0)
        bounds = {f"{node.output[0]}/{what}": value for what, value in (("from", start), ("to", end), ("axis", axis))}
        graph.initializer.extend(helper.make_tensor(key, 7, [1], [value]) for key, value in bounds.items())
        part = helper.make_node("Slice", [split.input[0], *bounds], node.output, name=node.name)
        part.metadata_props.extend(node.metadata_props)
        left.append(part)
    read = {key for node in left for key in node.input}
    del graph.node[:]
    graph.node.extend(node for node in left if node.op_type != "SplitToSequence" or node.output[0] in read)


def _brief(error: Exception) -> str:
    return f"{' '.join(str(error).split()):.200}"


def _check_order(graph: Any) -> None:
    """Each value is made once, before it is read: there is no cycle."""
    made = {value.name for value in (*graph.input, *graph.initializer)}
    made |= {sparse.values.name for sparse in graph.sparse_initializer}
    for node, name in zip(graph.node, node_names(graph), strict=True):
        where = f"node {name:.60} ({node.op_type:.60})"
        for key in (*node.input, *(key for inner in _inner_graphs(node) for key in _captured(inner))):
            if key and key not in made:
                raise InvalidInput(f"{where}: reads {key!r:.60}, which nothing before it makes: a cycle, or no order")
        for key in node.output:
            if key in made:
                raise InvalidInput(f"{where}: makes {key!r:.60}, which exists already")
        made.update(key for key in node.output if key)
    for value in graph.output:
        if value.name not in made:
            raise InvalidInput(f"its output {value.name!r:.60} is made by no node")


# ---- shapes ----------------------------------------------------------------------------------------------------------


@dataclass
class _Dims:
    """Sizes that the user gives, by the name of a dimension or, where it has none, by tensor and axis: "x.0"."""

    given: Mapping[str, int]
    names: dict[str, None] = field(default_factory=dict)  # all that the model has

    def __post_init__(self) -> None:
        check_dims(self.given)

    def fill(self, value: Any) -> list[str]:
        """Set the dimensions of a value that are given; the names of those that are not."""
        missing = []
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            if size.HasField("dim_value"):
                continue
            keys = [size.dim_param] if size.dim_param else []
            keys.append(f"{value.name}.{axis}")
            self.names.update(dict.fromkeys(keys))
            known = [self.given[key] for key in keys if key in self.given]
            if known:
                size.dim_value = known[0]
            else:
                missing.append(keys[0])
        return missing

    def check_all_used(self) -> None:
        for name in self.given:
            if name not in self.names:
                has = f"it has {listed(list(self.names))}" if self.names else "all its dimensions are fixed"
                raise InvalidInput(f"dims: the model has no dimension {name!r:.60}: {has}")


def _inferred(model: Any, dims: _Dims) -> dict[str, TensorType]:
    """The types of all values, as far as they can be known without running anything."""
    return {value.name: found for value in _typed(model, dims) if (found := _type_of(value)) is not None}


def _typed(model: Any, dims: _Dims) -> list[Any]:
    """All values, as ONNX describes them."""
    graph = model.graph
    stored = {tensor.name for tensor in graph.initializer}
    if missing := [name for value in graph.input if value.name not in stored for name in dims.fill(value)]:
        raise need_dims(missing)
    for value in (*graph.value_info, *graph.output):
        dims.fill(value)
        for size in value.type.tensor_type.shape.dim:
            if not size.HasField("dim_value"):
                size.Clear()  # found anew

    sketch = type(model)()
    sketch.CopyFrom(model)
    _stand_in(sketch.graph)
    for _ in range(len(dims.given) + 1):
        sketch = _with_shapes(sketch)
        before = len(dims.names)
        for value in (*sketch.graph.value_info, *sketch.graph.output):
            dims.fill(value)
        if not dims.given.keys() & list(dims.names)[before:]:
            break
    return [*sketch.graph.input, *sketch.graph.value_info, *sketch.graph.output]


def _with_shapes(model: Any) -> Any:
    """In a process of its own, which has limits (see `onnx_shapes`)."""
    command = [sys.executable, "-P", "-m", _SHAPES, str(_INFERENCE_BYTES)]
    given = model.SerializeToString()
    try:
        child = subprocess.run(command, input=given, capture_output=True, timeout=_INFERENCE_SECONDS, check=True)
        return type(model).FromString(child.stdout)
    except (OSError, require("google.protobuf.message", "onnx").DecodeError):
        raise InvalidInput("its shapes cannot be inferred") from None
    except subprocess.TimeoutExpired:
        raise InvalidInput(f"its shapes cannot be inferred within {_INFERENCE_SECONDS} s") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.decode(errors="replace").strip().splitlines() or ["the library crashed"])[-1]
        raise InvalidInput(f"its shapes cannot be inferred: {last:.200}") from None


def _type_of(value: Any) -> TensorType | None:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not tensor.HasField("shape") or not tensor.elem_type:
        return None
    if not all(size.HasField("dim_value") for size in tensor.shape.dim):
        return None
    return TensorType(_dtype(tensor.elem_type), tuple(size.dim_value for size in tensor.shape.dim))


def _dtype(number: int) -> str:
    types = require("onnx", "onnx").TensorProto.DataType
    if number not in types.values():
        raise InvalidInput(f"there is no data type {number}")
    name: str = types.Name(number)
    return _DTYPES.get(name, name.lower())


#: Ops that runtimes add to ONNX, and the standard op whose output has the same shape (None: that of the first input).
_STAND_INS: Final = {
    "FusedConv": "Conv", "FusedGemm": "Gemm", "Gelu": None, "FastGelu": None, "BiasGelu": None,
    "QuickGelu": None, "BiasAdd": "Add", "SkipLayerNormalization": None, "SkipSimplifiedLayerNormalization": None,
    "SimplifiedLayerNormalization": None, "GroupNorm": None, "RotaryEmbedding": None, "MultiHeadAttention": None,
    "GroupQueryAttention": None, "BiasSoftmax": None,
}  # fmt: skip
_STANDARD: Final = ("", "ai.onnx")


def _stand_in(graph: Any) -> None:
    """Replace ops whose shapes ONNX does not know by ops that make the same shapes."""
    helper = require("onnx.helper", "onnx")
    nodes: list[Any] = []
    for node in graph.node:
        inputs, outputs = list(node.input), list(node.output)
        foreign = node.domain == "com.microsoft" or node.op_type == "SimplifiedLayerNormalization"
        if not foreign or not inputs or not outputs:
            nodes.append(node)
        elif node.op_type == "FusedMatMul":
            for side, flag in enumerate(("transA", "transB")):
                if any(attribute.name == flag and attribute.i for attribute in node.attribute):
                    swapped = f"{outputs[0]}/{flag}"
                    nodes.append(helper.make_node("Einsum", [inputs[side]], [swapped], equation="...ij->...ji"))
                    inputs[side] = swapped
            nodes.append(helper.make_node("MatMul", inputs[:2], outputs[:1]))
        elif node.op_type in ("MatMulNBits", "Attention"):
            sizes = {attribute.name: _plain(attribute) for attribute in node.attribute}
            weight = f"{outputs[0]}/weight"
            if node.op_type == "MatMulNBits":
                width = [sizes.get("K", 0), sizes.get("N", 0)]
            else:  # x [batch, steps, in], weight [in, q + k + v]
                held = next((t.dims for t in graph.initializer if t.name == inputs[1]), [0, 0])
                width = [held[0], _widths(sizes, held[-1])[2]]
            graph.input.append(helper.make_tensor_value_info(weight, 1, width))
            nodes.append(helper.make_node("MatMul", [inputs[0], weight], outputs[:1]))
            if node.op_type == "Attention" and len(inputs) > 4 and len(outputs) > 1:
                nodes += _present(inputs, outputs, sizes)
        elif node.op_type in _STAND_INS:
            like = _STAND_INS[node.op_type]
            if like is None:
                nodes.append(helper.make_node("Identity", inputs[:1], outputs[:1]))
                if node.op_type.startswith("Skip") and len(outputs) > 3 and outputs[3]:  # the sum of the two inputs
                    nodes.append(helper.make_node("Identity", inputs[:1], outputs[3:4]))
            else:
                made = helper.make_node(like, inputs[:3], outputs)
                known = ("kernel_shape", "strides", "pads", "dilations", "group", "auto_pad", "transA", "transB")
                made.attribute.extend(attribute for attribute in node.attribute if attribute.name in known)
                nodes.append(made)
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _present(inputs: Sequence[str], outputs: Sequence[str], sizes: Mapping[str, Any]) -> list[Any]:
    """The keys and values so far, [2, batch, heads, steps, width]: those of the past, and one more for each step of x
    [batch, steps, in].
    """
    helper = require("onnx.helper", "onnx")
    past, made = inputs[4], outputs[1]
    if sizes.get("past_present_share_buffer"):
        return [helper.make_node("Identity", [past], [made])]
    new = f"{made}/new"
    return [
        helper.make_node("Einsum", [past, inputs[0]], [new], equation="abhtw,bsi->abhsw"),
        helper.make_node("Concat", [past, new], [made], axis=3),
    ]


# ---- nodes -----------------------------------------------------------------------------------------------------------


@dataclass
class _Node:
    """A node with what decides its kind."""

    op: str  # "Conv", or "com.microsoft.FusedConv"
    inputs: list[str]  # "" where an optional one is missing
    outputs: dict[str, TensorType]
    attributes: dict[str, Any]
    values: Values
    numbers: Mapping[str, list[int]]  # constants
    opset: int

    def shape(self, position: int) -> tuple[int, ...]:
        """Of an input."""
        if position >= len(self.inputs) or not self.inputs[position]:
            raise InvalidInput(f"a {self.op:.60} needs an input {position}")
        return self.values.type_of(self.inputs[position]).shape

    def has(self, position: int) -> bool:
        """Whether an input is given."""
        return position < len(self.inputs) and bool(self.inputs[position])


@dataclass
class _Work:
    """A node in Placewise's terms."""

    kind: str
    attributes: dict[str, Any] = field(default_factory=dict)
    inputs: list[str] | None = None  # all that the node reads
    seen_as: dict[int, TensorType] = field(default_factory=dict)


class _Reader:
    """Goes through the nodes in order."""

    def __init__(self, model: Any, types: Mapping[str, TensorType], name: str) -> None:
        self._types = types
        self._graph = model.graph
        self._assembly = Assembly(name)
        self._values = Values(self._assembly)
        self._numbers = _numbers(model.graph)
        self._opset = max((held.version for held in model.opset_import if held.domain in _STANDARD), default=1)
        self._groups = -1

    def graph(self) -> Graph:
        graph, values = self._graph, self._values
        self._store(graph.initializer)
        for sparse in graph.sparse_initializer:
            held = TensorType(_dtype(sparse.values.data_type), tuple(sparse.dims))
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
            held = TensorType(_dtype(tensor.data_type), tuple(tensor.dims))
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
        for number, graph in enumerate(_inner_graphs(node)):
            inputs += [*self._store(graph.initializer, f"{name}/{number}/"), *_captured(graph)]
        made = [key for key in node.output if key]
        op = node.op_type if node.domain in _STANDARD else f"{node.domain}.{node.op_type}"
        module = _module(node, name)
        read = inputs[:1] if op in ("Cast", "CastLike") else [key for key in inputs if key]
        if op == "Constant":
            self._constant(node, made, where, module)
        elif op in ("Shape", "Size") or (read and all(map(values.is_known, read)) and self._small(made)):
            for key in made:
                values.set_known(key, self._types.get(key))
        else:
            plain = {attribute.name: _plain(attribute) for attribute in node.attribute}
            attributes = {key: value for key, value in plain.items() if value is not None}
            found = _Node(
                op,
                inputs,
                {key: self._known_type(key, where) for key in made},
                attributes,
                values,
                self._numbers,
                self._opset,
            )
            try:
                check_body((inner.op_type, inner.name or " ".join(inner.output)) for inner in _inside(node))
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
            held = TensorType(_dtype(value.t.data_type), tuple(value.t.dims))
        else:
            held = self._known_type(made[0], where)
        if held.elements == 1:
            self._values.set_known(made[0], held)
        else:
            self._values.constant(made[0], held, made[0], module)

    def _work(self, node: _Node, name: str, module: str) -> None:
        if node.op == "com.microsoft.Attention":
            self._attention_with_weights(node, name, module)
            return
        work = _KINDS[node.op](node) if node.op in _KINDS else _Work(own_kind("onnx", node.op))
        inputs = [key for key in (node.inputs if work.inputs is None else work.inputs) if key]
        outputs = dict(list(node.outputs.items())[:1]) if work.kind == SAME else node.outputs
        for key in node.outputs.keys() - outputs.keys():  # the mask of a dropout that drops nothing
            self._values.set_known(key, node.outputs[key])
        self._values.op(name, work.kind, inputs, outputs, work.attributes, seen_as=work.seen_as, module=module)

    def _attention_with_weights(self, node: _Node, name: str, module: str) -> None:
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
            for position, width in enumerate(_widths(node.attributes, total))
        }
        rest = [key for key in node.inputs[3:] if key]
        keys = {"keys": node.shape(4)[3] + steps} if node.has(4) else {}  # past: [2, batch, heads, steps, width]
        self._values.op(name, "attention", [product] * 3 + rest, node.outputs, keys, seen_as=seen, **place)


def _widths(attributes: Mapping[str, Any], total: int) -> list[int]:
    """Of queries, keys and values, all heads together."""
    return attributes.get("qkv_hidden_sizes") or [total // 3] * 3


def node_names(graph: Any) -> list[str]:
    """A name for each node: its own where it has one that none before it has, else % and the value that it makes."""
    names: dict[str, None] = {}
    for position, node in enumerate(graph.node):
        name = node.name
        if not name or name in names:
            name = MADE_UP + next((key for key in node.output if key), f"{node.op_type}_{position}")
        while name in names:
            name += "'"
        names[name] = None
    return list(names)


def _inner_graphs(node: Any) -> Iterator[Any]:
    """The branches or the body of a node that has some."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _inside(node: Any) -> Iterator[Any]:
    """All nodes of its branches or its body."""
    for graph in _inner_graphs(node):
        for inner in graph.node:
            yield inner
            yield from _inside(inner)


def _captured(graph: Any) -> list[str]:
    """Names that an inner graph reads from around it."""
    own = {value.name for value in (*graph.input, *graph.initializer)} | {key for n in graph.node for key in n.output}
    read = [key for node in graph.node for key in node.input] + [value.name for value in graph.output]
    for node in graph.node:
        for inner in _inner_graphs(node):
            read += _captured(inner)
    return list(dict.fromkeys(key for key in read if key and key not in own))


def _plain(attribute: Any) -> Any:
    """The value of an attribute that is a number, a text, or a list of numbers."""
    kinds = {1: "f", 2: "i", 3: "s", 6: "floats", 7: "ints"}
    value = getattr(attribute, kinds[attribute.type]) if attribute.type in kinds else None
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if value is None or isinstance(value, (int, float)) else list(value)


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
        model = _parsed(path)
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
        model = _parsed(source, keep_data=True)
        names = node_names(model.graph)
        if unknown := placement.keys() - set(names):
            raise InvalidInput(f"has no node named {min(unknown)!r:.60}")
        for node, (device, stage) in placement.items():
            if device not in devices:
                raise InvalidInput(f"node {node:.60}: {device!r:.60} is not one of the devices {listed(list(devices))}")
            if stage is not None and (not isinstance(stage, int) or not 0 <= stage < 2**31):
                raise InvalidInput(f"node {node:.60}: a stage must be a whole number or None, found {stage!r:.60}")
        external = any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in _constants(model.graph))
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


# ---- kinds -----------------------------------------------------------------------------------------------------------


def _plainly(kind: str, of: str = "") -> Callable[[_Node], _Work]:
    """`of` names an op that takes another time than the usual one of its kind."""
    return lambda node: _Work(kind, {"of": of} if of else {})


def _along(kind: str, usual: int = -1) -> Callable[[_Node], _Work]:
    """Along one axis, by default the last."""

    def work(node: _Node) -> _Work:
        axis, rank = node.attributes.get("axis", usual), len(node.shape(0))
        axis = axis + rank if axis < 0 else axis
        return _Work(kind, {} if axis == rank - 1 else {"axis": axis})

    return work


def _softmax(kind: str) -> Callable[[_Node], _Work]:
    """Before version 13, over all axes from one on, by default the second, as if they were one."""

    def work(node: _Node) -> _Work:
        if node.opset >= 13:
            return _along(kind)(node)
        found = _along(kind, 1)(node)
        return _Work(kind, found.attributes | ({"flattened": True} if found.attributes else {}))

    return work


def _product(node: _Node) -> _Work:
    """MatMul, Gemm and their kin: factors that lie transposed in memory are seen as they are multiplied."""
    seen, strided = {}, {}
    for position, flag in enumerate(("transA", "transB")):
        *batch, rows, columns = (1, *node.shape(position))
        if node.attributes.get(flag):
            held = node.values.type_of(node.inputs[position]).dtype
            seen[position] = TensorType(held, (*batch[1:], columns, rows))
            axes = list(range(len(batch) - 1))
            strided[str(position)] = [*axes, len(axes) + 1, len(axes)]
    return _Work("matmul", {"strided": strided} if strided else {}, seen_as=seen)


def _product_of_bits(node: _Node) -> _Work:
    return _Work("matmul", {key: node.attributes[key] for key in ("bits", "block_size") if key in node.attributes})


def _quantized(kind: str) -> Callable[[_Node], _Work]:
    """inputs: a, its scale and zero point, b, its scale and zero point, then those of the output, perhaps a bias."""

    def work(node: _Node) -> _Work:
        given = node.inputs
        found = _conv(node) if kind == "conv" else _Work(kind)
        return _Work(kind, found.attributes, [given[0], given[3], *given[1:3], *given[4:]])

    return work


def _einsum(node: _Node) -> _Work:
    equation = str(node.attributes.get("equation", ""))
    product = einsum(equation, [node.shape(i) for i in range(len(node.inputs))])
    if product is not None:
        return _Work("matmul", product)
    if len(node.inputs) > 1:
        return _Work(own_kind("onnx", node.op))
    made = next(iter(node.outputs.values()))
    return _Work(SAME if made.elements == math.prod(node.shape(0)) else "reduce", {"equation": equation})


def _conv(node: _Node, kind: str = "conv") -> _Work:
    given, rank = node.attributes, len(node.shape(0)) - 2
    usual = {"stride": [1] * rank, "padding": [0] * rank, "dilation": [1] * rank, "groups": 1}
    found = {
        "stride": given.get("strides"),
        "padding": _padding(given, rank),
        "dilation": given.get("dilations"),
        "groups": given.get("group"),
    }
    return _Work(kind, {key: value for key, value in found.items() if value and value != usual[key]})


def _padding(given: Mapping[str, Any], rank: int) -> Any:
    """Per axis; before and after it only where the two differ."""
    if given.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return given["auto_pad"]
    pads = given.get("pads") or [0] * rank
    return pads[:rank] if pads[:rank] == pads[rank:] else pads


def _conv_transposed(node: _Node) -> _Work:
    return _conv(node, "conv_transposed")


def _pool(kind: str) -> Callable[[_Node], _Work]:
    def work(node: _Node) -> _Work:
        window = node.attributes.get("kernel_shape") or list(node.shape(0)[2:])
        stride = node.attributes.get("strides") or [1] * len(window)
        found = {"window": math.prod(window), "kernel": window, "stride": stride}
        padding = _padding(node.attributes, len(window))
        return _Work(kind, found | ({"padding": padding} if padding != [0] * len(window) else {}))

    return work


def _recurrent(kind: str) -> Callable[[_Node], _Work]:
    def work(node: _Node) -> _Work:
        directions = 2 if node.attributes.get("direction") == "bidirectional" else 1
        return _Work(kind, {"hidden": node.attributes.get("hidden_size", node.shape(2)[-1]), "directions": directions})

    return work


def _attention(node: _Node) -> _Work:
    """inputs: q, k, v, each [batch, heads, steps, width] or [batch, steps, heads * width]; keys may be cached ones."""
    if not all(node.has(i) for i in range(3)) or any(len(node.shape(i)) not in (3, 4) for i in range(3)):
        return _Work(own_kind("onnx", node.op))  # packed in another way
    given = node.attributes
    heads = given.get("q_num_heads") or given.get("num_heads") or 1
    fewer = given.get("kv_num_heads") or heads
    seen = {}
    for position, count in ((0, heads), (1, fewer), (2, fewer)):
        shape = node.shape(position)
        if len(shape) == 3:
            held = node.values.type_of(node.inputs[position]).dtype
            seen[position] = TensorType(held, (shape[0], count, shape[1], shape[2] // count))
    past = next((node.shape(i)[-2] for i in _PAST.get(node.op, ()) if node.has(i) and len(node.shape(i)) == 4), 0)
    steps = node.shape(1)[-2] + past
    return _Work("attention", {"keys": steps} if past else {}, seen_as=seen)


#: Where ops that attend have the keys of earlier steps.
_PAST: Final = {"Attention": (4,), "com.microsoft.MultiHeadAttention": (6,), "com.microsoft.GroupQueryAttention": (3,)}


def _gather(node: _Node) -> _Work:
    """Of a table of weights, an embedding; at one place, a part of what is there."""
    if node.values.is_weight(node.inputs[0]) and len(node.shape(0)) == 2 and not node.attributes.get("axis"):
        return _Work("embedding")
    if node.op == "Gather" and node.values.is_known(node.inputs[1]) and not node.shape(1):
        return _Work("view")
    return _Work("gather", {"axis": node.attributes.get("axis", 0)})


def _reduce(node: _Node) -> _Work:
    axes = node.attributes.get("axes", node.attributes.get("axis"))
    if axes is None and node.has(1):
        axes = node.numbers.get(node.inputs[1])
    of = node.op.removeprefix("Reduce").lower()
    return _Work("reduce", {"of": of} | ({} if axes is None else {"axes": axes}), node.inputs[:1])


def _resize(node: _Node) -> _Work:
    return _Work("resize", {"mode": node.attributes.get("mode", "nearest")}, node.inputs[:1])


def _gelu(node: _Node) -> _Work:
    approximate = node.attributes.get("approximate", "none")
    return _Work("gelu", {} if approximate == "none" else {"approximate": approximate})


def _cast(node: _Node) -> _Work:
    return _Work("cast", inputs=node.inputs[:1])


_BY_KIND: Final = {
    SAME: "Identity Reshape Flatten Squeeze Unsqueeze Transpose Dropout",
    "view": "Slice Split Expand",
    "add": "Add Sum", "sub": "Sub", "mul": "Mul", "div": "Div", "neg": "Neg", "abs": "Abs", "sign": "Sign",
    "floor": "Floor", "ceil": "Ceil", "round": "Round", "maximum": "Max", "minimum": "Min", "clamp": "Clip",
    "where": "Where", "mask": "Trilu", "not": "Not BitwiseNot", "and": "And BitwiseAnd", "or": "Or BitwiseOr",
    "xor": "Xor BitwiseXor", "shift": "BitShift", "eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater",
    "ge": "GreaterOrEqual", "isnan": "IsNaN", "isinf": "IsInf", "relu": "Relu", "leaky_relu": "LeakyRelu",
    "prelu": "PRelu", "threshold": "ThresholdedRelu Shrink", "remainder": "Mod", "hardswish": "HardSwish",
    "hardsigmoid": "HardSigmoid", "sqrt": "Sqrt", "reciprocal": "Reciprocal", "exp": "Exp", "log": "Log",
    "sigmoid": "Sigmoid", "tanh": "Tanh", "erf": "Erf", "atan": "Atan Acos Asin Atanh Acosh Asinh",
    "sin": "Sin Sinh Tan", "cos": "Cos Cosh", "pow": "Pow", "softplus": "Softplus Softsign", "elu": "Elu Celu",
    "selu": "Selu", "mish": "Mish", "silu": "Swish com.microsoft.QuickGelu",
    "gelu": "com.microsoft.Gelu com.microsoft.FastGelu com.microsoft.BiasGelu",
    "rope": "RotaryEmbedding com.microsoft.RotaryEmbedding",
    "elementwise": "QuantizeLinear DequantizeLinear DynamicQuantizeLinear com.microsoft.BiasAdd",
    "batch_norm": "BatchNormalization",
    "group_norm": "InstanceNormalization GroupNormalization com.microsoft.GroupNorm",
    "rms_norm": "RMSNormalization SimplifiedLayerNormalization LpNormalization "
    "com.microsoft.SkipSimplifiedLayerNormalization",
    "lrn": "LRN", "copy": "Tile DepthToSpace SpaceToDepth ReverseSequence", "pad": "Pad CenterCropPad",
    "fill": "ConstantOfShape Range EyeLike RandomNormal RandomUniform RandomNormalLike RandomUniformLike Bernoulli",
    "scatter": "ScatterElements ScatterND Scatter TensorScatter", "resize": "GridSample AffineGrid",
}  # fmt: skip

_REDUCTIONS: Final = (
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
    "ReduceLogSum", "ReduceLogSumExp", "ArgMax", "ArgMin", "GlobalLpPool",
)  # fmt: skip

_KINDS: Final[dict[str, Callable[[_Node], _Work]]] = {
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **{
        op: _plainly(kind, op if position and kind not in (SAME, "view", "fill") else "")
        for kind, ops in _BY_KIND.items()
        for position, op in enumerate(ops.split())
    },
    **dict.fromkeys(("Softmax", "Hardmax"), _softmax("softmax")),
    **dict.fromkeys(
        ("LayerNormalization", "com.microsoft.SkipLayerNormalization", "MeanVarianceNormalization"),
        _along("layer_norm"),
    ),
    **dict.fromkeys(("MatMul", "Gemm", "com.microsoft.FusedMatMul", "com.microsoft.FusedGemm"), _product),
    **dict.fromkeys(("GatherElements", "GatherND", "Gather"), _gather),
    **dict.fromkeys(("Cast", "CastLike"), _cast),
    **dict.fromkeys(("Attention", "com.microsoft.MultiHeadAttention", "com.microsoft.GroupQueryAttention"), _attention),
    **dict.fromkeys(("MaxPool", "GlobalMaxPool"), _pool("max_pool")),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "LpPool"), _pool("avg_pool")),
    **dict.fromkeys(("Conv", "ConvInteger", "DeformConv", "com.microsoft.FusedConv"), _conv),
    "LogSoftmax": _softmax("log_softmax"),
    "com.microsoft.BiasSoftmax": _along("softmax", 1),
    "Concat": _along("concat"),
    "CumSum": _plainly("cumsum"),
    "TopK": _along("topk"),
    "ConvTranspose": _conv_transposed,
    "MatMulInteger": _product,
    "QLinearMatMul": _quantized("matmul"),
    "QLinearConv": _quantized("conv"),
    "com.microsoft.MatMulNBits": _product_of_bits,
    "Einsum": _einsum,
    "LSTM": _recurrent("lstm"),
    "GRU": _recurrent("gru"),
    "RNN": _recurrent("rnn"),
    "Resize": _resize,
    "Upsample": _resize,
    "Gelu": _gelu,
}
