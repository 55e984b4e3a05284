"""Graphs from OpenVINO IR (`.xml`), and which of its ops the CPU plugin fuses.

The XML says all that a graph needs (types, shapes, edges), so it is read here, and neither OpenVINO nor the weights
(`.bin`) are needed for it. OpenVINO does what only it can: fix the shapes of a dynamic model, and say what it fuses.
"""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from xml.parsers import expat

from placewise.errors import InvalidInput, Unsupported, naming
from placewise.graph import Graph
from placewise.importers import require
from placewise.importers.assembly import MAX_OPS, Assembly
from placewise.importers.einsum import einsum
from placewise.importers.values import SAME, SMALL, Values, Work, check_body, check_dims, need_dims, own_kind
from placewise.kinds import TensorType
from placewise.quantities import format_bytes

MAX_BYTES = 512 * 1024**2
_MAX_DEPTH = 64
_VERSIONS = ("10", "11")

_DTYPES: Final = {
    "fp64": "float64", "fp32": "float32", "f32": "float32", "fp16": "float16", "f16": "float16", "bf16": "bfloat16",
    "f64": "float64", "boolean": "bool", "bool": "bool", "bin": "uint1", "nf4": "uint4", "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2", "f8e8m0": "float8_e8m0fnu", "f4e2m1": "float4_e2m1fn", "string": "string",
    **{f"{letter}{bits}": f"{'u' * (letter == 'u')}int{bits}" for letter in "iu" for bits in (64, 32, 16, 8, 4)},
    "u2": "uint2", "u1": "uint1",
}  # fmt: skip


def load(
    path: str | Path, name: str | None = None, *, dims: Mapping[str, int] | None = None, fuse: bool = False
) -> Graph:
    """Read a model. `dims` gives the sizes of dimensions that are not fixed: {"x.0": 1} for the first of input x.

    With `fuse`, ops that the CPU plugin runs as one kernel share a group.
    """
    with naming(path):
        check_dims(dims or {})
        network = _parsed(path)
        if dims:
            _fix_shapes(network, read_model(path, dims))
        groups = _groups(path, dims) if fuse else {}
        return _Reader(network, name or Path(path).name.removesuffix(".xml"), groups).graph()


# ---- what OpenVINO is asked ------------------------------------------------------------------------------------------


def read_model(path: str | Path, dims: Mapping[str, int] | None = None) -> Any:
    """The model as OpenVINO reads it, with fixed shapes."""
    openvino = require("openvino", "openvino")
    if not Path(path).with_suffix(".bin").is_file():
        raise InvalidInput("its weights are missing: there is no .bin file beside it")
    try:
        model = openvino.Core().read_model(str(path))
        shapes, left = {}, dict(dims or {})
        for value in model.inputs:
            shape = value.get_partial_shape()
            for axis in range(len(shape)):
                size = left.pop(f"{value.get_node().get_friendly_name()}.{axis}", None)
                if size is not None:
                    shape[axis] = size
            shapes[value] = shape
        if left:
            raise InvalidInput(f"dims: no input has a dimension {min(left)!r:.60}: they are named like 'x.0'")
        model.reshape(shapes)
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(f"OpenVINO refuses it: {_brief(error)}") from None
    return model


def _fix_shapes(network: _Network, model: Any) -> None:
    """Take over what OpenVINO found the shapes to be."""
    layers = {layer.name: layer for layer in network.layers}
    for op in model.get_ops():
        layer = layers.get(op.get_friendly_name())
        if layer is None or len(layer.outputs) != op.get_output_size():
            continue
        for number, (_, sizes) in enumerate(layer.outputs.values()):
            shape = op.get_output_partial_shape(number)
            if shape.rank.is_static:
                sizes[:] = [size.get_length() if size.is_static else -1 for size in shape]


def _groups(path: str | Path, dims: Mapping[str, int] | None) -> dict[str, int]:
    """Of the ops that the CPU plugin fuses with others, the number of the kernel that each becomes part of."""
    model = read_model(path, dims)
    openvino = require("openvino", "openvino")
    try:
        compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        notes = [op.get_rt_info() for op in compiled.get_runtime_model().get_ordered_ops()]
        kernels = [note["originalLayersNames"].value.split(",") for note in notes if "originalLayersNames" in note]
    except Exception as error:
        raise InvalidInput(f"OpenVINO cannot compile it: {_brief(error)}") from None
    return {name: number for number, names in enumerate(kernels) if len(names) > 1 for name in names}


def _brief(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{lines[-1] if lines else type(error).__name__:.200}"


# ---- XML -------------------------------------------------------------------------------------------------------------


@dataclass
class _Layer:
    """One <layer>."""

    id: str
    name: str
    type: str
    data: dict[str, str] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)  # ports
    outputs: dict[str, tuple[str, list[int]]] = field(default_factory=dict)  # port: dtype and sizes, -1 if not fixed
    inner: list[_Layer] = field(default_factory=list)  # all within its body, if it has one


@dataclass
class _Network:
    layers: list[_Layer] = field(default_factory=list)
    edges: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)  # (layer, port): what it reads


class _Builder:
    """Handlers of a parser that does not build a tree."""

    def __init__(self) -> None:
        self.network = _Network()
        self._path: list[str] = []
        self._layers: list[_Layer] = []  # open ones; those of a body are within another
        self._port: list[int] | None = None
        self._text = ""

    def start(self, tag: str, given: dict[str, str]) -> None:
        self._path.append(tag)
        self._text = ""
        if len(self._path) > _MAX_DEPTH:
            raise InvalidInput("elements are nested too deep")
        if len(self._path) == 1 and (tag != "net" or given.get("version") not in _VERSIONS):
            raise InvalidInput(f'not an OpenVINO model: <net version="11"> is expected, found <{tag:.60}>')
        place = self._path[-3:-1]
        if tag == "layer":
            self._layers.append(_Layer(given["id"], given["name"], given["type"]))
        elif tag == "edge" and self._path[1:-1] == ["edges"]:
            self.network.edges[given["to-layer"], given["to-port"]] = given["from-layer"], given["from-port"]
        elif not self._layers:
            return
        elif tag == "data" and place[-1] == "layer":
            self._layers[-1].data = given
        elif tag == "port" and place == ["layer", "input"]:
            self._layers[-1].inputs.append(given["id"])
        elif tag == "port" and place == ["layer", "output"]:
            self._port = []
            self._layers[-1].outputs[given["id"]] = given.get("precision", ""), self._port

    def text(self, text: str) -> None:
        self._text += text

    def end(self, tag: str) -> None:
        self._path.pop()
        if tag == "dim" and self._port is not None:
            self._port.append(int(self._text))
        elif tag == "port":
            self._port = None
        elif tag == "layer":
            layer = self._layers.pop()
            if self._layers:
                self._layers[-1].inner += [*layer.inner, layer]
            else:
                self.network.layers.append(layer)
                if len(self.network.layers) > MAX_OPS:
                    raise InvalidInput(f"the model has more than {MAX_OPS:,} ops")


def _parsed(path: str | Path) -> _Network:
    builder = _Builder()
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = builder.start, builder.end
    parser.CharacterDataHandler = builder.text
    parser.StartDoctypeDeclHandler = _refuse  # entities could expand without end, or name other files
    try:
        if not os.path.isfile(path):
            raise InvalidInput("is not a file")
        if os.path.getsize(path) > MAX_BYTES:
            raise InvalidInput(f"larger than {format_bytes(MAX_BYTES)}")
        with open(path, "rb") as file:
            parser.ParseFile(file)
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror}") from None
    except expat.ExpatError as error:
        what = expat.ErrorString(error.code)
        raise InvalidInput(f"not XML at line {error.lineno}, column {error.offset + 1}: {what}") from None
    except KeyError as error:
        raise InvalidInput(f"line {parser.CurrentLineNumber}: {error.args[0]} is missing") from None
    except ValueError:
        raise InvalidInput(f"line {parser.CurrentLineNumber}: a whole number is expected") from None
    if not builder.network.layers:
        raise InvalidInput("not an OpenVINO model: it has no layers")
    return builder.network


def _refuse(*_: Any) -> None:
    raise InvalidInput("a document type is declared, which no OpenVINO model has")


# ---- layers ----------------------------------------------------------------------------------------------------------

_Port = tuple[str, str]  # layer and port


@dataclass
class _Node:
    """A layer with what it reads and makes."""

    layer: _Layer
    inputs: list[_Port]
    outputs: dict[_Port, TensorType]
    values: Values

    def type(self, position: int) -> TensorType:
        """Of an input."""
        if position >= len(self.inputs):
            raise InvalidInput(f"a {self.layer.type:.60} needs an input {position}")
        return self.values.type_of(self.inputs[position])

    def numbers(self, key: str) -> list[int]:
        """An attribute like "1, 1"."""
        text = self.layer.data.get(key, "")
        try:
            return [int(part) for part in text.split(",") if part.strip()]
        except ValueError:
            raise InvalidInput(f"{key}: must be whole numbers, found {text!r:.60}") from None


class _Reader:
    """Goes through the layers in an order in which each finds what it reads."""

    def __init__(self, network: _Network, name: str, groups: Mapping[str, int]) -> None:
        self._network, self._groups = network, groups
        self._assembly = Assembly(name)
        self._values = Values(self._assembly)
        self._read = set(network.edges.values())
        self._places: dict[tuple[str, str], _Port] = {}  # of large constants in the file of weights

    def graph(self) -> Graph:
        layers = {layer.id: layer for layer in self._network.layers}
        if len(layers) < len(self._network.layers):
            raise InvalidInput("two layers have the same id")
        for (reader, port), (source, out) in self._network.edges.items():
            if reader not in layers or port not in layers[reader].inputs:
                raise InvalidInput(f"an edge leads to port {port:.20} of layer {reader:.20}, which does not exist")
            if source not in layers or out not in layers[source].outputs:
                raise InvalidInput(f"an edge leads from port {out:.20} of layer {source:.20}, which does not exist")
        missing = [
            f"{layer.name}.{axis}"
            for layer in self._network.layers
            if layer.type == "Parameter"
            for _, sizes in layer.outputs.values()
            for axis, size in enumerate(sizes)
            if size < 0
        ]
        if missing:
            raise need_dims(missing)
        for layer in self._in_order(layers):
            try:
                self._add(layer)
            except (InvalidInput, Unsupported) as error:
                raise type(error)(f"layer {layer.name:.60} ({layer.type:.60}): {error}") from None
            except (ArithmeticError, LookupError, TypeError, ValueError):
                what = "its inputs or attributes are not those of such a layer"
                raise InvalidInput(f"layer {layer.name:.60} ({layer.type:.60}): {what}") from None
        return self._assembly.graph()

    def _in_order(self, layers: Mapping[str, _Layer]) -> Iterator[_Layer]:
        """The file's own order where that already is one."""
        order = {key: position for position, key in enumerate(layers)}
        waiting = dict.fromkeys(layers, 0)
        readers: dict[str, list[str]] = {key: [] for key in layers}
        for (reader, _), (source, _) in self._network.edges.items():
            waiting[reader] += 1
            readers[source].append(reader)
        ready = [(order[key], key) for key, count in waiting.items() if not count]
        done = 0
        while ready:
            _, key = heapq.heappop(ready)
            done += 1
            yield layers[key]
            for reader in readers[key]:
                waiting[reader] -= 1
                if not waiting[reader]:
                    heapq.heappush(ready, (order[reader], reader))
        if done < len(layers):
            blocked = next(layers[key].name for key, count in waiting.items() if count)
            raise InvalidInput(f"the layers form a cycle; {blocked!r:.60} is in it or after it")

    def _add(self, layer: _Layer) -> None:
        values = self._values
        if layer.type == "Result":
            return
        if layer.type == "Const":
            self._constant(layer, _module(layer.name))
            return
        inputs = []
        for port in layer.inputs:
            if (layer.id, port) not in self._network.edges:
                raise InvalidInput(f"nothing leads to its port {port:.20}")
            inputs.append(self._network.edges[layer.id, port])
        check_body((inner.type, inner.name) for inner in layer.inner)
        for constant in (inner for inner in layer.inner if inner.type == "Const"):  # the weights of a loop's body
            constant.id = f"{layer.id}/{len(inputs)}"
            self._constant(constant, _module(layer.name))
            inputs += [(constant.id, port) for port in constant.outputs]
        if layer.type == "ShapeOf":
            for port, (dtype, sizes) in layer.outputs.items():
                values.set_known((layer.id, port), _type(dtype, sizes))
            return
        outputs = {  # the first, and what is read of others, such as the indices of a pool
            (layer.id, port): _type(dtype, sizes)
            for position, (port, (dtype, sizes)) in enumerate(layer.outputs.items())
            if not position or (layer.id, port) in self._read
        }
        settled = bool(inputs) and all(values.is_known(key) for key in inputs)
        if settled and sum(made.bytes for made in outputs.values() if min(made.shape, default=0) >= 0) <= SMALL:
            for key, made in outputs.items():
                values.set_known(key, made)
            return
        if any(size < 0 for made in outputs.values() for size in made.shape):
            raise InvalidInput("the shape of its output depends on data")
        node = _Node(layer, inputs, outputs, values)
        work = _KINDS[layer.type](node) if layer.type in _KINDS else Work(own_kind("openvino", layer.type))
        values.op(
            layer.name,
            work.kind,
            inputs if work.inputs is None else work.inputs,
            outputs,
            work.attributes,
            seen_as=work.seen_as,
            module=_module(layer.name),
            group=self._groups.get(layer.name, -1),
        )

    def _constant(self, layer: _Layer, module: str) -> None:
        """Large ones that lie at the same place in the file of weights are one, such as tied embeddings."""
        for port, (dtype, sizes) in layer.outputs.items():
            held = _type(dtype, sizes)
            place = layer.data.get("offset", ""), layer.data.get("size", "")
            if held.bytes > SMALL and place in self._places and self._values.type_of(self._places[place]) == held:
                self._values.set_same((layer.id, port), self._places[place])
                continue
            self._values.constant((layer.id, port), held, layer.name, module)
            self._places[place] = (layer.id, port)


def _type(precision: str, sizes: list[int]) -> TensorType:
    dtype = _DTYPES.get(precision.lower())
    if dtype is None:
        raise InvalidInput(f"there is no precision {precision!r:.60}")
    return TensorType(dtype, tuple(sizes))


def _module(name: str) -> str:
    """__module.layer1.0.conv1/aten::_convolution/Convolution came from layer1.0.conv1, and self.fc.weight from fc."""
    if name.startswith("__module."):
        return name.removeprefix("__module.").partition("/")[0]
    if name.startswith("self.") and "/" not in name:
        return name.removeprefix("self.").rpartition(".")[0]
    return ""


# ---- kinds -----------------------------------------------------------------------------------------------------------


def _plainly(kind: str, of: str = "") -> Callable[[_Node], Work]:
    """`of` names a layer that takes another time than the usual one of its kind."""
    return lambda node: Work(kind, {"of": of} if of else {})


def _first(kind: str) -> Callable[[_Node], Work]:
    """All but the first input only say how."""
    return lambda node: Work(kind, inputs=node.inputs[:1])


def _along(kind: str) -> Callable[[_Node], Work]:
    def work(node: _Node) -> Work:
        rank = len(node.type(0).shape)
        axis = (node.numbers("axis") or [-1])[0]
        axis = axis + rank if axis < 0 else axis
        return Work(kind, {} if axis == rank - 1 else {"axis": axis})

    return work


def _product(node: _Node) -> Work:
    """Factors that lie transposed in memory are seen as they are multiplied."""
    seen, strided = {}, {}
    for position, flag in enumerate(("transpose_a", "transpose_b")):
        held = node.type(position)
        if node.layer.data.get(flag) == "true" and len(held.shape) > 1:
            *batch, rows, columns = held.shape
            seen[position] = TensorType(held.dtype, (*batch, columns, rows))
            strided[str(position)] = [*range(len(batch)), len(batch) + 1, len(batch)]
    return Work("matmul", {"strided": strided} if strided else {}, seen_as=seen)


def _conv(kind: str, grouped: bool) -> Callable[[_Node], Work]:
    """Weights of groups are [groups, out, in, *window] (in and out swapped if transposed): seen as one."""

    def work(node: _Node) -> Work:
        weight = node.type(1)
        rank = len(node.type(0).shape) - 2
        before, after = node.numbers("pads_begin"), node.numbers("pads_end")
        automatic = node.layer.data.get("auto_pad", "explicit") not in ("explicit", "valid")
        padding = node.layer.data["auto_pad"] if automatic else before if before == after else before + after
        attributes = {"stride": node.numbers("strides"), "padding": padding, "dilation": node.numbers("dilations")}
        usual: dict[str, Any] = {"stride": [1] * rank, "padding": [0] * rank, "dilation": [1] * rank}
        found = {key: value for key, value in attributes.items() if value and value != usual[key]}
        if not grouped:
            return Work(kind, found, node.inputs[:2])
        if len(weight.shape) < 3:
            raise InvalidInput(f"its weights cannot be {weight!s:.60}")
        groups, first, *rest = weight.shape
        seen = {1: TensorType(weight.dtype, (groups * first, *rest))}
        return Work(kind, {**found, "groups": groups}, node.inputs[:2], seen)

    return work


def _pool(kind: str) -> Callable[[_Node], Work]:
    def work(node: _Node) -> Work:
        kernel = node.numbers("kernel")
        if not kernel:  # adaptive
            made = next(iter(node.outputs.values()))
            window = math.ceil(node.type(0).elements / max(1, made.elements))
            return Work(kind, {"window": window, "adaptive": True}, node.inputs[:1])
        attributes = {"window": math.prod(kernel), "kernel": kernel, "stride": node.numbers("strides")}
        before, after = node.numbers("pads_begin"), node.numbers("pads_end")
        padding = before if before == after else before + after
        return Work(kind, attributes | ({"padding": padding} if any(padding) else {}))

    return work


def _recurrent(kind: str) -> Callable[[_Node], Work]:
    def work(node: _Node) -> Work:
        directions = 2 if node.layer.data.get("direction", "").lower() == "bidirectional" else 1
        hidden = node.numbers("hidden_size")
        if not hidden:
            raise InvalidInput("hidden_size is missing")
        return Work(kind, {"hidden": hidden[0], "directions": directions})

    return work


def _gather(node: _Node) -> Work:
    """Of a table of weights, an embedding; at one place, a part of what is there."""
    if node.values.is_weight(node.inputs[0]) and len(node.type(0).shape) == 2:
        return Work("embedding")
    if node.layer.type == "Gather" and node.values.is_known(node.inputs[1]) and not node.type(1).shape:
        return Work("view")
    return Work("gather")


def _einsum(node: _Node) -> Work:
    product = einsum(node.layer.data.get("equation", ""), [node.type(i).shape for i in range(len(node.inputs))])
    return Work(own_kind("openvino", "Einsum")) if product is None else Work("matmul", product)


def _resize(node: _Node) -> Work:
    return Work("resize", {"mode": node.layer.data.get("mode", "nearest")}, node.inputs[:1])


def _gelu(node: _Node) -> Work:
    form = node.layer.data.get("approximation_mode", "ERF").lower()
    return Work("gelu", {} if form == "erf" else {"approximate": form})


def _reduce(node: _Node) -> Work:
    return Work("reduce", {"of": node.layer.type.removeprefix("Reduce").lower()}, node.inputs[:1])


_BY_KIND: Final = {
    SAME: "Reshape Squeeze Unsqueeze Transpose Assign",
    "view": "Split VariadicSplit StridedSlice Slice Broadcast",
    "add": "Add", "sub": "Subtract", "mul": "Multiply", "div": "Divide", "neg": "Negative", "abs": "Abs",
    "sign": "Sign", "floor": "Floor", "ceil": "Ceiling", "round": "Round", "maximum": "Maximum", "minimum": "Minimum",
    "clamp": "Clamp", "where": "Select", "square": "SquaredDifference", "not": "LogicalNot BitwiseNot",
    "and": "LogicalAnd BitwiseAnd", "or": "LogicalOr BitwiseOr", "xor": "LogicalXor BitwiseXor",
    "shift": "BitwiseLeftShift BitwiseRightShift", "eq": "Equal", "ne": "NotEqual", "lt": "Less", "le": "LessEqual",
    "gt": "Greater", "ge": "GreaterEqual", "isnan": "IsNaN", "isinf": "IsInf IsFinite", "relu": "ReLU",
    "prelu": "PReLU", "remainder": "Mod FloorMod", "hardswish": "HSwish", "hardsigmoid": "HSigmoid HardSigmoid",
    "sqrt": "Sqrt", "exp": "Exp", "log": "Log", "sigmoid": "Sigmoid", "tanh": "Tanh", "erf": "Erf",
    "sin": "Sin Sinh Tan", "cos": "Cos Cosh", "atan": "Atan Acos Asin Atanh Acosh Asinh", "pow": "Power",
    "softplus": "SoftPlus SoftSign", "elu": "Elu", "selu": "Selu", "silu": "Swish", "mish": "Mish",
    "elementwise": "FakeQuantize FakeConvert", "batch_norm": "BatchNormInference", "layer_norm": "MVN",
    "group_norm": "GroupNormalization", "rms_norm": "NormalizeL2 RMS", "lrn": "LRN", "cumsum": "CumSum",
    "attention": "ScaledDotProductAttention",
    "copy": "Tile DepthToSpace SpaceToDepth ShuffleChannels ReverseSequence Roll", "pad": "Pad",
    "fill": "Range Eye OneHot RandomUniform",
    "scatter": "ScatterUpdate ScatterNDUpdate ScatterElementsUpdate",
}  # fmt: skip

_KINDS: Final[dict[str, Callable[[_Node], Work]]] = {
    **{
        layer: _plainly(kind, layer if position and kind not in (SAME, "view", "fill") else "")
        for kind, layers in _BY_KIND.items()
        for position, layer in enumerate(layers.split())
    },
    **{f"Reduce{of}": _reduce for of in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogicalAnd", "LogicalOr")},
    **dict.fromkeys(("Gather", "GatherElements", "GatherND"), _gather),
    **dict.fromkeys(("Convert", "ConvertLike"), _first("cast")),
    **dict.fromkeys(("MaxPool", "AdaptiveMaxPool"), _pool("max_pool")),
    **dict.fromkeys(("AvgPool", "AdaptiveAvgPool"), _pool("avg_pool")),
    **{f"{cell}{form}": _recurrent(cell.lower()) for cell in ("LSTM", "GRU", "RNN") for form in ("Sequence", "Cell")},
    "Parameter": _plainly("input"),
    "ReadValue": lambda node: Work("state", inputs=[]),
    "Convolution": _conv("conv", grouped=False),
    "GroupConvolution": _conv("conv", grouped=True),
    "ConvolutionBackpropData": _conv("conv_transposed", grouped=False),
    "GroupConvolutionBackpropData": _conv("conv_transposed", grouped=True),
    "MatMul": _product,
    "Einsum": _einsum,
    "SoftMax": _along("softmax"),
    "LogSoftmax": _along("log_softmax"),
    "Concat": _along("concat"),
    "TopK": _along("topk"),
    "Interpolate": _resize,
    "Gelu": _gelu,
}
