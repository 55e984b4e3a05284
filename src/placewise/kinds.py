"""Kinds of ops and the work that each does: FLOPs by formula, bytes that it reads and writes.

An op's work follows from its kind, the types of its tensors and a few attributes, whichever framework it came from. A
multiplication and an addition are two FLOPs. A kind that is not listed here is costed by its bytes alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from placewise.errors import InvalidInput

#: Bits of one element.
_BITS: Final = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8,
    "float8_e4m3fnuz": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8, "float4_e2m1fn": 4,
    "int64": 64, "int32": 32, "int16": 16, "int8": 8, "int4": 4, "int2": 2,
    "uint64": 64, "uint32": 32, "uint16": 16, "uint8": 8, "uint4": 4, "uint2": 2, "uint1": 1,
    "bool": 8, "complex64": 64, "complex128": 128, "string": 64,
}  # fmt: skip


class TensorType(NamedTuple):
    """Dtype and shape, written like float32[32,3,299,299]."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> float:
        """Packed, without padding."""
        if self.dtype not in _BITS:
            raise InvalidInput(f"a tensor of dtype {self.dtype!r:.60}: must be one of {', '.join(_BITS)}")
        return self.elements * _BITS[self.dtype] / 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Op:
    """What decides an op's work, and its time on a device."""

    kind: str
    inputs: Sequence[TensorType]  # parameters among them
    outputs: Sequence[TensorType]
    attributes: Mapping[str, Any] = field(default_factory=dict)  # what else matters: strides, groups, axes

    @property
    def flops(self) -> float:
        """By the kind's formula; zero for a kind that has none."""
        if self.kind not in KINDS:
            return 0.0
        try:
            work = float(KINDS[self.kind].flops(self))
        except (IndexError, KeyError, ValueError, ZeroDivisionError, OverflowError):
            raise InvalidInput(f"{self.signature:.300}: these are no tensors for an op of this kind") from None
        if work <= 0 and KINDS[self.kind].family in NEVER_FREE and all(out.elements for out in self.outputs):
            raise InvalidInput(f"{self.signature:.300}: an op of this kind cannot cost nothing")
        return work

    @property
    def bytes_accessed(self) -> float:
        """Every input read and every output written once, unless the kind touches less."""
        touched = KINDS[self.kind].touched if self.kind in KINDS else _all
        return float(touched(self))

    @property
    def signature(self) -> str:
        """One line that says it all: two ops with the same signature take the same time on the same device."""
        given = ", ".join(map(str, self.inputs))
        made = ", ".join(map(str, self.outputs))
        extra = "; " + json.dumps(self.attributes, sort_keys=True, separators=(",", ":")) if self.attributes else ""
        return f"{self.kind}({given}{extra}) -> {made}"


class Kind(NamedTuple):
    """What is known of a kind of op. Ops of one family reach similar fractions of a device's rates."""

    family: str
    flops: Callable[[Op], float]
    touched: Callable[[Op], float]


def family(kind: str) -> str:
    """The family of a kind, or of what it is the backward of; "other" where that is not known."""
    known = KINDS.get(kind) or KINDS.get(kind.removesuffix("_backward"))
    return known.family if known else "other"


#: Families whose ops always compute: zero FLOPs would be a mistake.
NEVER_FREE: Final = frozenset({"matmul", "conv", "attention", "recurrent"})


# ---- bytes -----------------------------------------------------------------------------------------------------------


def _all(op: Op) -> float:
    return sum(t.bytes for t in op.inputs) + sum(t.bytes for t in op.outputs)


def _picked(op: Op) -> float:
    """Only what is picked is read, and the indices."""
    made = sum(t.bytes for t in op.outputs)
    return 2 * made + sum(min(t.bytes, made) for t in op.inputs[1:])


def _bag_touched(op: Op) -> float:
    """inputs: table [rows, width], indices. A row is read for every index, of whichever bag."""
    table, indices, *rest = op.inputs
    row = TensorType(table.dtype, table.shape[1:]).bytes
    return indices.elements * row + sum(t.bytes for t in (indices, *rest, *op.outputs))


def _put(op: Op) -> float:
    """The values are read and written in place; what they replace is left alone."""
    return 2 * sum(t.bytes for t in op.inputs[1:])


def _updated(op: Op) -> float:
    """inputs: parameter, gradient, state. All are read; all but the gradient are written again."""
    return 2 * sum(t.bytes for t in op.inputs) - op.inputs[1].bytes


def _nothing(op: Op) -> float:
    return 0.0


def _experts(op: Op) -> float:
    """Of the stacked weights, only those of experts that have a token are read."""
    tokens, weights, *rest = op.inputs
    experts = weights.shape[0] if len(weights.shape) == 3 else 0
    used = min(1.0, tokens.shape[-2] / experts) if experts else 1.0
    return tokens.bytes + used * weights.bytes + sum(t.bytes for t in (*rest, *op.outputs))


# ---- FLOPs -----------------------------------------------------------------------------------------------------------


def _free(op: Op) -> float:
    return 0.0


def _per_output(count: float) -> Callable[[Op], float]:
    return lambda op: count * max((t.elements for t in op.outputs), default=0)


def _per_input(count: float) -> Callable[[Op], float]:
    return lambda op: count * op.inputs[0].elements


def _matmul(op: Op) -> float:
    """inputs: a [..., m, k], b [..., k, n], perhaps a bias; attribute `k` where the layout is another."""
    k: int = op.attributes.get("k", op.inputs[0].shape[-1])
    bias = op.outputs[0].elements if len(op.inputs) > 2 else 0
    return 2.0 * k * op.outputs[0].elements + bias


def _bilinear(op: Op) -> float:
    """inputs: x [..., i], y [..., j], weight [out, i, j], perhaps a bias: x by the weight, then that by y."""
    i, j = op.inputs[2].shape[1:]
    bias = op.outputs[0].elements if len(op.inputs) > 3 else 0
    return 2.0 * (i * j + j) * op.outputs[0].elements + bias


def _grouped_matmul(op: Op) -> float:
    """inputs: a, b, where the groups begin; the groups are stacked in b (a's rows are split over them), in a (b's
    columns are), or in the result (what is summed over is).
    """
    a, made = op.inputs[0], op.outputs[0]
    return 2.0 * (a.elements * made.shape[-1] if len(a.shape) == 2 else made.elements * a.shape[-1])


def _conv(op: Op) -> float:
    """inputs: x, weight [out, in / groups, *window], perhaps a bias."""
    bias = op.outputs[0].elements if len(op.inputs) > 2 else 0
    return 2.0 * math.prod(op.inputs[1].shape[1:]) * op.outputs[0].elements + bias


def _conv_transposed(op: Op) -> float:
    """inputs: x, weight [in, out / groups, *window], perhaps a bias."""
    bias = op.outputs[0].elements if len(op.inputs) > 2 else 0
    return 2.0 * math.prod(op.inputs[1].shape[1:]) * op.inputs[0].elements + bias


def _conv_backward(op: Op) -> float:
    """inputs: gradient of the output, x, weight. Each of the gradients made (of x, of weight) costs one convolution."""
    gradient, x, weight = op.inputs[:3]
    through = x if op.attributes.get("transposed") else gradient
    convolution = 2.0 * math.prod(weight.shape[1:]) * through.elements
    made = sum(1 for out in op.outputs if out.shape in (x.shape, weight.shape))
    return convolution * made + gradient.elements * (len(op.outputs) - made)


def _attention(op: Op) -> float:
    """inputs: q [..., s, d], k [..., t, d], v [..., t, e]; scores, softmax, weighted sum.

    Attribute `keys`: t, where some of them come from a cache.
    """
    q, k, v = (t.shape for t in op.inputs[:3])
    keys: int = op.attributes.get("keys", k[-2])
    scores = math.prod(q[:-1]) * keys
    return 2.0 * scores * (q[-1] + v[-1]) + 5.0 * scores


def _attention_backward(op: Op) -> float:
    """inputs: gradient, q, k, v. Scores are computed again, then five products where the forward pass has two."""
    return 2.5 * _attention(Op(op.kind, op.inputs[1:], op.outputs))


def _recurrent(gates: int) -> Callable[[Op], float]:
    """inputs: x [steps, batch, in], or of one step [batch, in]; weights. Attributes `hidden`, `layers`, `directions`.

    Attribute `projected`: the width of the output, where that is not `hidden` but a product with it.
    """

    def flops(op: Op) -> float:
        x = op.inputs[0].shape
        hidden, directions = op.attributes["hidden"], op.attributes.get("directions", 1)
        out = op.attributes.get("projected", hidden)
        projection = 2.0 * hidden * out if "projected" in op.attributes else 0.0
        total, width = 0.0, x[-1]
        for _ in range(op.attributes.get("layers", 1)):
            per_step = gates * hidden * (2.0 * (width + out) + 8) + projection
            total += directions * math.prod(x[:-1]) * per_step
            width = out * directions
        return total

    return flops


def _bag(op: Op) -> float:
    """inputs: table [rows, width], indices. The rows of a bag are added up."""
    return float(op.inputs[1].elements * op.inputs[0].shape[-1])


def _pool(op: Op) -> float:
    """Attribute `window`: elements that each output looks at."""
    return float(op.attributes["window"]) * op.outputs[0].elements


def _sort(op: Op) -> float:
    n = op.inputs[0].elements
    return n * math.log2(max(2, op.inputs[0].shape[-1] if op.inputs[0].shape else 1))


# ---- the table -------------------------------------------------------------------------------------------------------


#: FLOPs per element. What is computed by a short polynomial counts as its terms.
_PER_ELEMENT: Final[dict[float, tuple[str, ...]]] = {
    1: ("add", "sub", "mul", "div", "neg", "abs", "sign", "floor", "ceil", "round", "trunc", "square", "maximum",
        "minimum", "clamp", "where", "mask", "dropout", "not", "and", "or", "xor", "shift", "eq", "ne", "lt", "le",
        "gt", "ge", "isnan", "isinf", "relu", "relu6", "leaky_relu", "prelu", "threshold", "hardtanh", "elementwise",
        "relu_backward", "dropout_backward"),
    2: ("sqrt", "rsqrt", "reciprocal", "addcmul", "addcdiv", "lerp", "remainder", "hardswish", "hardsigmoid",
        "elementwise_backward"),
    3: ("sigmoid_backward", "tanh_backward"),
    4: ("exp", "expm1", "log", "log1p", "sigmoid", "tanh", "erf", "sin", "cos", "atan", "pow", "softplus", "elu",
        "selu"),
    5: ("silu",),
    6: ("swiglu", "rope"),
    8: ("gelu", "silu_backward"),
    10: ("mish",),
    12: ("gelu_backward",),
}  # fmt: skip

KINDS: Final[Mapping[str, Kind]] = {
    "parameter": Kind("stored", _free, _nothing),
    "state": Kind("stored", _free, _nothing),
    "input": Kind("stored", _free, _nothing),
    "output": Kind("stored", _free, _nothing),
    "constant": Kind("stored", _free, _nothing),
    "view": Kind("view", _free, _nothing),
    "matmul": Kind("matmul", _matmul, _all),
    "bilinear": Kind("matmul", _bilinear, _all),
    "grouped_matmul": Kind("matmul", _grouped_matmul, _experts),
    "conv": Kind("conv", _conv, _all),
    "conv_transposed": Kind("conv", _conv_transposed, _all),
    "conv_backward": Kind("conv", _conv_backward, _all),
    "attention": Kind("attention", _attention, _all),
    "attention_backward": Kind("attention", _attention_backward, _all),
    "lstm": Kind("recurrent", _recurrent(4), _all),
    "gru": Kind("recurrent", _recurrent(3), _all),
    "rnn": Kind("recurrent", _recurrent(1), _all),
    "softmax": Kind("norm", _per_output(5), _all),
    "log_softmax": Kind("norm", _per_output(5), _all),
    "softmax_backward": Kind("norm", _per_output(4), _all),
    "batch_norm": Kind("norm", _per_output(4), _all),
    "batch_norm_backward": Kind("norm", _per_output(10), _all),
    "layer_norm": Kind("norm", _per_output(8), _all),
    "layer_norm_backward": Kind("norm", _per_output(14), _all),
    "group_norm": Kind("norm", _per_output(8), _all),
    "group_norm_backward": Kind("norm", _per_output(14), _all),
    "rms_norm": Kind("norm", _per_output(5), _all),
    "lrn": Kind("norm", _per_output(12), _all),
    "cross_entropy": Kind("norm", _per_input(6), _all),
    "nll_loss": Kind("reduce", _per_output(1), _picked),
    "reduce": Kind("reduce", _per_input(1), _all),
    "cumsum": Kind("reduce", _per_input(1), _all),
    "sort": Kind("reduce", _sort, _all),
    "topk": Kind("reduce", _sort, _all),
    "max_pool": Kind("pool", _pool, _all),
    "avg_pool": Kind("pool", _pool, _all),
    "pool_backward": Kind("pool", _per_output(2), _all),
    "resize": Kind("pool", _per_output(7), _all),
    "embedding": Kind("gather", _free, _picked),
    "embedding_bag": Kind("gather", _bag, _bag_touched),
    "gather": Kind("gather", _free, _picked),
    "slice": Kind("gather", _free, _picked),
    "scatter": Kind("gather", _free, _put),
    "embedding_backward": Kind("gather", _per_input(1), _all),
    "copy": Kind("copy", _free, _all),
    "cast": Kind("copy", _free, _all),
    "concat": Kind("copy", _free, _all),
    "split": Kind("copy", _free, _all),
    "pad": Kind("copy", _free, _all),
    "transpose": Kind("copy", _free, _all),
    "fill": Kind("copy", _free, lambda op: sum(t.bytes for t in op.outputs)),
    "sgd": Kind("elementwise", _per_input(2), _updated),
    "momentum": Kind("elementwise", _per_input(4), _updated),
    "adam": Kind("elementwise", _per_input(12), _updated),
    **{name: Kind("elementwise", _per_output(flops), _all) for flops, names in _PER_ELEMENT.items() for name in names},
}
