"""What an ONNX file holds: checked, its functions inlined, with the types of all values that can be known.

Nothing is run: shapes are inferred by a process of its own (`onnx_shapes`).
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from placewise.errors import InvalidInput, listed, naming
from placewise.importers import require
from placewise.importers.assembly import MAX_OPS
from placewise.importers.values import check_dims, need_dims
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

#: Before the name of an op whose node has none of its own.
MADE_UP: Final = "%"
_DTYPES: Final = {
    "FLOAT": "float32", "DOUBLE": "float64", "FLOAT8E4M3FN": "float8_e4m3fn", "FLOAT8E4M3FNUZ": "float8_e4m3fnuz",
    "FLOAT8E5M2": "float8_e5m2", "FLOAT8E5M2FNUZ": "float8_e5m2fnuz", "FLOAT8E8M0": "float8_e8m0fnu",
    "FLOAT4E2M1": "float4_e2m1fn",
}  # fmt: skip


def opened(path: str | Path) -> Any:
    """A model as it is read: without its data, in order, its functions inlined."""
    model = _inlined(parsed(path))
    _check_order(model.graph)
    _slice_sequences(model.graph)
    return model


def whole(path: str | Path, dims: Mapping[str, int] | None = None) -> tuple[Any, dict[str, Any]]:
    """A model with its weights, to be cut up, and its values by name. Nodes have the names of their ops."""
    with naming(path):
        values = {value.name: value for value in _typed(_inlined(parsed(path)), Dims(dims or {}))}
        model = parsed(path, keep_data=True)
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
    return [key for key in (*node.input, *(name for graph in inner_graphs(node) for name in captured(graph))) if key]


# ---- the file --------------------------------------------------------------------------------------------------------


def parsed(path: str | Path, *, keep_data: bool = False) -> Any:
    """The file itself; of large tensors only their types, unless `keep_data`."""
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
    for tensor in () if keep_data else constants(model.graph):
        if math.prod(tensor.dims) > _MAX_SETTINGS or len(tensor.raw_data) > 8 * _MAX_SETTINGS:
            for part in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                tensor.ClearField(part)
    return model


def constants(graph: Any) -> Iterator[Any]:
    """The tensors that a graph and the graphs within it store."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield attribute.t
            yield from attribute.tensors
        for inner in inner_graphs(node):
            yield from constants(inner)


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
            total += sum(count(graph.node, within) for graph in inner_graphs(node))
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


def numbers(graph: Any) -> dict[str, list[int]]:
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
    known = numbers(graph)
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
        for key in (*node.input, *(key for inner in inner_graphs(node) for key in captured(inner))):
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
class Dims:
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
        """Each that is given is one of the model's."""
        for name in self.given:
            if name not in self.names:
                has = f"it has {listed(list(self.names))}" if self.names else "all its dimensions are fixed"
                raise InvalidInput(f"dims: the model has no dimension {name!r:.60}: {has}")


def inferred(model: Any, dims: Dims) -> dict[str, TensorType]:
    """The types of all values, as far as they can be known without running anything."""
    return {value.name: found for value in _typed(model, dims) if (found := _type_of(value)) is not None}


def _typed(model: Any, dims: Dims) -> list[Any]:
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
    return TensorType(dtype(tensor.elem_type), tuple(size.dim_value for size in tensor.shape.dim))


def dtype(number: int) -> str:
    """What Placewise calls a data type of ONNX."""
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
STANDARD: Final = ("", "ai.onnx")


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
            sizes = {attribute.name: plain_value(attribute) for attribute in node.attribute}
            weight = f"{outputs[0]}/weight"
            if node.op_type == "MatMulNBits":
                width = [sizes.get("K", 0), sizes.get("N", 0)]
            else:  # x [batch, steps, in], weight [in, q + k + v]
                held = next((t.dims for t in graph.initializer if t.name == inputs[1]), [0, 0])
                width = [held[0], widths(sizes, held[-1])[2]]
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


def widths(attributes: Mapping[str, Any], total: int) -> list[int]:
    """Of queries, keys and values, all heads together."""
    return attributes.get("qkv_hidden_sizes") or [total // 3] * 3


# ---- nodes -----------------------------------------------------------------------------------------------------------


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


def inner_graphs(node: Any) -> Iterator[Any]:
    """The branches or the body of a node that has some."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def inside(node: Any) -> Iterator[Any]:
    """All nodes of its branches or its body."""
    for graph in inner_graphs(node):
        for inner in graph.node:
            yield inner
            yield from inside(inner)


def captured(graph: Any) -> list[str]:
    """Names that an inner graph reads from around it."""
    own = {value.name for value in (*graph.input, *graph.initializer)} | {key for n in graph.node for key in n.output}
    read = [key for node in graph.node for key in node.input] + [value.name for value in graph.output]
    for node in graph.node:
        for inner in inner_graphs(node):
            read += captured(inner)
    return list(dict.fromkeys(key for key in read if key and key not in own))


def plain_value(attribute: Any) -> Any:
    """The value of an attribute that is a number, a text, or a list of numbers."""
    kinds = {1: "f", 2: "i", 3: "s", 6: "floats", 7: "ints"}
    value = getattr(attribute, kinds[attribute.type]) if attribute.type in kinds else None
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if value is None or isinstance(value, (int, float)) else list(value)
