"""What each operator of ONNX is, in the kinds that Placewise knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from placewise.errors import InvalidInput
from placewise.importers.einsum import einsum
from placewise.importers.values import SAME, Values, Work, own_kind
from placewise.kinds import TensorType


@dataclass
class Node:
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


def _plainly(kind: str, of: str = "") -> Callable[[Node], Work]:
    """`of` names an op that takes another time than the usual one of its kind."""
    return lambda node: Work(kind, {"of": of} if of else {})


def _along(kind: str, usual: int = -1) -> Callable[[Node], Work]:
    """Along one axis, by default the last."""

    def work(node: Node) -> Work:
        axis, rank = node.attributes.get("axis", usual), len(node.shape(0))
        axis = axis + rank if axis < 0 else axis
        return Work(kind, {} if axis == rank - 1 else {"axis": axis})

    return work


def _softmax(kind: str) -> Callable[[Node], Work]:
    """Before version 13, over all axes from one on, by default the second, as if they were one."""

    def work(node: Node) -> Work:
        if node.opset >= 13:
            return _along(kind)(node)
        found = _along(kind, 1)(node)
        return Work(kind, found.attributes | ({"flattened": True} if found.attributes else {}))

    return work


def _product(node: Node) -> Work:
    """MatMul, Gemm and their kin: factors that lie transposed in memory are seen as they are multiplied."""
    seen, strided = {}, {}
    for position, flag in enumerate(("transA", "transB")):
        *batch, rows, columns = (1, *node.shape(position))
        if node.attributes.get(flag):
            held = node.values.type_of(node.inputs[position]).dtype
            seen[position] = TensorType(held, (*batch[1:], columns, rows))
            axes = list(range(len(batch) - 1))
            strided[str(position)] = [*axes, len(axes) + 1, len(axes)]
    return Work("matmul", {"strided": strided} if strided else {}, seen_as=seen)


def _product_of_bits(node: Node) -> Work:
    return Work("matmul", {key: node.attributes[key] for key in ("bits", "block_size") if key in node.attributes})


def _quantized(kind: str) -> Callable[[Node], Work]:
    """inputs: a, its scale and zero point, b, its scale and zero point, then those of the output, perhaps a bias."""

    def work(node: Node) -> Work:
        given = node.inputs
        found = _conv(node) if kind == "conv" else Work(kind)
        return Work(kind, found.attributes, [given[0], given[3], *given[1:3], *given[4:]])

    return work


def _einsum(node: Node) -> Work:
    equation = str(node.attributes.get("equation", ""))
    product = einsum(equation, [node.shape(i) for i in range(len(node.inputs))])
    if product is not None:
        return Work("matmul", product)
    if len(node.inputs) > 1:
        return Work(own_kind("onnx", node.op))
    made = next(iter(node.outputs.values()))
    return Work(SAME if made.elements == math.prod(node.shape(0)) else "reduce", {"equation": equation})


def _conv(node: Node, kind: str = "conv") -> Work:
    given, rank = node.attributes, len(node.shape(0)) - 2
    usual = {"stride": [1] * rank, "padding": [0] * rank, "dilation": [1] * rank, "groups": 1}
    found = {
        "stride": given.get("strides"),
        "padding": _padding(given, rank),
        "dilation": given.get("dilations"),
        "groups": given.get("group"),
    }
    return Work(kind, {key: value for key, value in found.items() if value and value != usual[key]})


def _padding(given: Mapping[str, Any], rank: int) -> Any:
    """Per axis; before and after it only where the two differ."""
    if given.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return given["auto_pad"]
    pads = given.get("pads") or [0] * rank
    return pads[:rank] if pads[:rank] == pads[rank:] else pads


def _conv_transposed(node: Node) -> Work:
    return _conv(node, "conv_transposed")


def _pool(kind: str) -> Callable[[Node], Work]:
    def work(node: Node) -> Work:
        window = node.attributes.get("kernel_shape") or list(node.shape(0)[2:])
        stride = node.attributes.get("strides") or [1] * len(window)
        found = {"window": math.prod(window), "kernel": window, "stride": stride}
        padding = _padding(node.attributes, len(window))
        return Work(kind, found | ({"padding": padding} if padding != [0] * len(window) else {}))

    return work


def _recurrent(kind: str) -> Callable[[Node], Work]:
    def work(node: Node) -> Work:
        directions = 2 if node.attributes.get("direction") == "bidirectional" else 1
        return Work(kind, {"hidden": node.attributes.get("hidden_size", node.shape(2)[-1]), "directions": directions})

    return work


def _attention(node: Node) -> Work:
    """inputs: q, k, v, each [batch, heads, steps, width] or [batch, steps, heads * width]; keys may be cached ones."""
    if not all(node.has(i) for i in range(3)) or any(len(node.shape(i)) not in (3, 4) for i in range(3)):
        return Work(own_kind("onnx", node.op))  # packed in another way
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
    return Work("attention", {"keys": steps} if past else {}, seen_as=seen)


#: Where ops that attend have the keys of earlier steps.
_PAST: Final = {"Attention": (4,), "com.microsoft.MultiHeadAttention": (6,), "com.microsoft.GroupQueryAttention": (3,)}


def _gather(node: Node) -> Work:
    """Of a table of weights, an embedding; at one place, a part of what is there."""
    if node.values.is_weight(node.inputs[0]) and len(node.shape(0)) == 2 and not node.attributes.get("axis"):
        return Work("embedding")
    if node.op == "Gather" and node.values.is_known(node.inputs[1]) and not node.shape(1):
        return Work("view")
    return Work("gather", {"axis": node.attributes.get("axis", 0)})


def _reduce(node: Node) -> Work:
    axes = node.attributes.get("axes", node.attributes.get("axis"))
    if axes is None and node.has(1):
        axes = node.numbers.get(node.inputs[1])
    of = node.op.removeprefix("Reduce").lower()
    return Work("reduce", {"of": of} | ({} if axes is None else {"axes": axes}), node.inputs[:1])


def _resize(node: Node) -> Work:
    return Work("resize", {"mode": node.attributes.get("mode", "nearest")}, node.inputs[:1])


def _gelu(node: Node) -> Work:
    approximate = node.attributes.get("approximate", "none")
    return Work("gelu", {} if approximate == "none" else {"approximate": approximate})


def _cast(node: Node) -> Work:
    return Work("cast", inputs=node.inputs[:1])


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

KINDS: Final[dict[str, Callable[[Node], Work]]] = {
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
