"""What each operator of ATen (PyTorch's library of ops) is, in the kinds that Placewise knows.

An operator is named without its overload, its arguments as in its schema. Three things can come of a call: nothing,
where its result is one of its arguments, perhaps in another shape; an op of a known kind; or an op that keeps its own
name and is costed by its bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from placewise.errors import Unsupported
from placewise.graph import Tensor
from placewise.importers.einsum import einsum
from placewise.kinds import TensorType


@dataclass(frozen=True)
class Laid:
    """The type of a tensor, and how its elements lie in memory: the distance between neighbours along each axis."""

    type: TensorType
    strides: tuple[int, ...]

    @property
    def order(self) -> list[int]:
        """The axes from slowest to fastest; without those of one element, and those that repeat the same elements."""
        axes = [axis for axis, size in enumerate(self.type.shape) if size > 1 and self.strides[axis] > 0]
        return sorted(axes, key=lambda axis: -self.strides[axis])

    @property
    def in_order(self) -> bool:
        """Whether neighbours in memory are neighbours along the last axis, and so on, as in a fresh tensor."""
        return self.order == [axis for axis, size in enumerate(self.type.shape) if size > 1]

    @property
    def contiguous(self) -> bool:
        """Whether the elements are in order and without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.type.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True)
class Value(Laid):
    """A tensor of the graph, as the consumer sees it."""

    tensor: Tensor


@dataclass(frozen=True)
class Call:
    """An operator, its arguments by name (tensors are `Value`s), and what it makes."""

    operator: str
    arguments: Mapping[str, Any]
    made: Sequence[Laid]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def tensors(self) -> list[Value]:
        """All that it reads."""
        return list(_values(self.arguments.values()))


@dataclass(frozen=True)
class Work:
    """What a call is as an op of the graph."""

    kind: str
    inputs: Sequence[Value]
    attributes: Mapping[str, Any] = field(default_factory=dict)


def translate(call: Call) -> Work | Value:
    """The op that a call is; or the tensor that it returns as it is, perhaps in another shape."""
    name = call.operator
    if name in _SAME_ELEMENTS or (name in _MAY_COPY and not _copies(call)):
        return call.tensors[0]
    if name in _RULES:
        work = _RULES[name](call)
    elif name in _KIND_OF:
        work = Work(_KIND_OF[name], [value for value in call.tensors if value.type.elements], _manner(call))
        if work.kind == "concat" and len(work.inputs) == 1:
            return work.inputs[0]  # what is empty adds nothing
    elif _GEMM_LIKE.search(name):
        raise Unsupported(f"{name}: it multiplies matrices, but how much it computes is not known; please report it")
    else:
        work = Work(name if "." in name else f"aten.{name}", call.tensors)
    # A tensor that lies in memory in another order takes another time.
    strided = {str(i): value.order for i, value in enumerate(work.inputs) if not value.in_order}
    if not strided or work.kind == "view":
        return work
    return Work(work.kind, work.inputs, {**work.attributes, "strided": strided})


def known(operator: str) -> bool:
    """Whether it is in these tables. Such operators compute, and do nothing else."""
    return operator in _SAME_ELEMENTS or operator in _MAY_COPY or operator in _RULES or operator in _KIND_OF


def views(operator: str) -> bool:
    """Whether the operator's result may lie in the memory of its first argument."""
    return operator in _SAME_ELEMENTS or operator in _MAY_COPY or _KIND_OF.get(operator) == "view"


def _values(arguments: Any) -> Iterator[Value]:
    for argument in arguments:
        if isinstance(argument, Value):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _values(argument)


# ---- calls that may do nothing ---------------------------------------------------------------------------------------

_SAME_ELEMENTS: Final = frozenset({
    "view", "_unsafe_view", "view_as", "view_copy", "unflatten", "transpose", "t", "permute", "movedim", "moveaxis",
    "swapaxes", "swapdims", "numpy_T", "mT", "adjoint", "unsqueeze", "squeeze", "alias", "detach", "lift_fresh",
    "view_as_real", "view_as_complex", "resolve_conj", "resolve_neg", "positive", "set", "requires_grad",
})  # fmt: skip
_MAY_COPY: Final = frozenset({
    "reshape", "reshape_as", "flatten", "ravel", "contiguous", "to", "type_as", "expand", "expand_as", "broadcast_to",
    "slice", "narrow", "split", "chunk", "dropout", "feature_dropout", "alpha_dropout", "native_dropout", "_to_copy",
})  # fmt: skip


def _copies(call: Call) -> bool:
    """Whether anything is left to do, as far as the types tell."""
    given, made = call.tensors[0], call.made[0]
    if len(call.made) > 1 or given.type.dtype != made.type.dtype or given.type.elements != made.type.elements:
        return True
    match call.operator:
        case "dropout" | "feature_dropout" | "alpha_dropout" | "native_dropout":
            return bool(call.arguments.get("train")) and call["p"] > 0
        case "_to_copy":
            return True
        case "contiguous" | "to" | "type_as":
            return given.strides != made.strides and not (given.contiguous and made.contiguous)
        case "reshape" | "reshape_as" | "flatten" | "ravel":
            return not _fits(given, made.type.shape)
    return False


def _fits(given: Laid, shape: tuple[int, ...]) -> bool:
    """Whether a tensor has this shape without a copy: each run of axes without gaps must become whole axes."""
    runs: list[int] = []
    last = 0
    for size, stride in zip(given.type.shape, given.strides, strict=True):
        if size == 1:
            continue
        if runs and last == stride * size:
            runs[-1] *= size
        else:
            runs.append(size)
        last = stride
    wanted = [size for size in shape if size != 1]
    for run in runs:
        covered = 1
        while covered < run and wanted:
            covered *= wanted.pop(0)
        if covered != run:
            return False
    return True


# ---- calls that compute ----------------------------------------------------------------------------------------------

#: Whatever is named like this computes much; to cost it by its bytes would be a grave mistake.
_GEMM_LIKE: Final = re.compile(
    r"(mm|matmul|gemm|linear|conv\d?d?|convolution|attention|lstm|gru|rnn|einsum|cdist)(_|\.|\d|$)"
    r"|^_?(linalg_|cholesky|svd|qr$|lu_|triangular_solve|p?inverse|(log|slog)?det$|matrix_(power|exp))"
)

_FILLS = (
    "arange", "full", "full_like", "ones", "ones_like", "zeros", "zeros_like", "new_ones", "new_zeros", "new_full",
    "new_empty", "new_empty_strided", "empty", "empty_like", "empty_strided", "empty_permuted", "scalar_tensor", "eye",
    "fill", "zero", "linspace", "rand", "rand_like", "randn", "randn_like", "randint", "normal", "uniform",
    "tril_indices", "triu_indices", "exponential",
)  # fmt: skip
_REDUCTIONS = (
    "sum", "mean", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "norm", "linalg_vector_norm",
    "var", "var_mean", "std", "std_mean", "logsumexp", "count_nonzero", "aminmax", "nansum", "median",
)  # fmt: skip
_KINDS: Final[dict[str, tuple[str, ...]]] = {
    "view": ("select", "slice", "narrow", "split", "split_with_sizes", "chunk", "tensor_split", "unbind", "expand",
             "expand_as", "broadcast_to", "broadcast_tensors", "diagonal", "linalg_diagonal", "unfold",
             "as_strided", "real", "imag", "unsafe_split", "unsafe_chunk", "hsplit", "vsplit", "dsplit"),
    "copy": ("clone", "contiguous", "reshape", "reshape_as", "flatten", "ravel", "lift_fresh_copy", "flip", "roll",
             "repeat", "tile", "repeat_interleave", "tril", "triu", "pixel_shuffle", "pixel_unshuffle",
             "channel_shuffle", "im2col", "meshgrid", "diag", "diag_embed"),
    "concat": ("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack"),
    "pad": ("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
            "replication_pad2d", "replication_pad3d", "slice_backward", "select_backward"),
    "gather": ("index", "index_select", "gather", "take", "take_along_dim", "_unsafe_index", "masked_select"),
    "scatter": ("index_put", "_unsafe_index_put", "index_copy", "index_add", "scatter", "scatter_add", "index_fill",
                "scatter_reduce", "slice_scatter", "select_scatter", "masked_scatter"),
    "embedding": ("embedding",),
    "embedding_bag": ("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"),
    "embedding_backward": ("embedding_dense_backward",),
    "batch_norm": ("batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_no_update",
                   "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional", "cudnn_batch_norm",
                   "_batch_norm_with_update", "_batch_norm_with_update_functional"),
    "batch_norm_backward": ("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward"),
    "layer_norm": ("layer_norm", "native_layer_norm"),
    "layer_norm_backward": ("native_layer_norm_backward", "_fused_rms_norm_backward"),
    "group_norm": ("group_norm", "native_group_norm", "instance_norm"),
    "group_norm_backward": ("native_group_norm_backward",),
    "rms_norm": ("rms_norm", "_fused_rms_norm"),
    "softmax_backward": ("_softmax_backward_data", "_log_softmax_backward_data"),
    "cross_entropy": ("cross_entropy_loss",),
    "nll_loss": ("nll_loss", "nll_loss_nd", "nll_loss_forward", "nll_loss2d", "nll_loss2d_forward"),
    "pool_backward": ("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "avg_pool2d_backward",
                      "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
                      "adaptive_max_pool2d_backward", "upsample_nearest1d_backward", "upsample_nearest2d_backward",
                      "upsample_nearest3d_backward", "upsample_linear1d_backward", "upsample_bilinear2d_backward",
                      "upsample_trilinear3d_backward", "upsample_bicubic2d_backward", "avg_pool1d_backward"),
    "resize": ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d",
               "upsample_linear1d", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa",
               "_upsample_nearest_exact2d", "_upsample_bicubic2d_aa"),
    "cumsum": ("cumsum", "cumprod", "logcumsumexp", "histc", "bincount", "bucketize", "searchsorted"),
    "sub": ("sub", "subtract", "rsub", "diff"),
    "add": ("add", "add_"), "mul": ("mul", "multiply", "outer", "ger"), "addcmul": ("addcmul",),
    "div": ("div", "divide", "true_divide", "floor_divide"), "neg": ("neg", "negative"), "abs": ("abs",),
    "sign": ("sign", "sgn"), "floor": ("floor",), "ceil": ("ceil",), "round": ("round",), "trunc": ("trunc", "fix"),
    "square": ("square",), "maximum": ("maximum", "fmax"), "minimum": ("minimum", "fmin"),
    "clamp": ("clamp", "clamp_min", "clamp_max", "clip"), "where": ("where",), "mask": ("masked_fill",),
    "not": ("logical_not", "bitwise_not"), "and": ("logical_and", "bitwise_and", "__and__"),
    "or": ("logical_or", "bitwise_or", "__or__"), "xor": ("logical_xor", "bitwise_xor", "__xor__"),
    "shift": ("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__"),
    "eq": ("eq",), "ne": ("ne", "not_equal"), "lt": ("lt", "less"), "le": ("le",), "gt": ("gt", "greater"),
    "ge": ("ge",), "isnan": ("isnan",), "isinf": ("isinf", "isfinite"), "relu": ("relu",), "relu6": ("relu6",),
    "leaky_relu": ("leaky_relu",), "prelu": ("prelu", "_prelu_kernel"), "threshold": ("threshold",),
    "hardtanh": ("hardtanh",), "dropout": ("dropout", "native_dropout", "feature_dropout", "alpha_dropout"),
    "relu_backward": ("threshold_backward",), "dropout_backward": ("native_dropout_backward",),
    "sqrt": ("sqrt",), "rsqrt": ("rsqrt",), "reciprocal": ("reciprocal",), "addcdiv": ("addcdiv",), "lerp": ("lerp",),
    "remainder": ("remainder", "fmod"), "hardswish": ("hardswish",), "hardsigmoid": ("hardsigmoid",),
    "elementwise_backward": ("hardtanh_backward", "hardswish_backward", "hardsigmoid_backward", "leaky_relu_backward",
                             "_prelu_kernel_backward", "mse_loss_backward", "l1_loss_backward",
                             "smooth_l1_loss_backward", "huber_loss_backward", "elu_backward", "softplus_backward",
                             "nll_loss_backward", "nll_loss2d_backward", "binary_cross_entropy_backward",
                             "mish_backward", "glu_backward", "pow_backward"),
    "sigmoid_backward": ("sigmoid_backward",), "tanh_backward": ("tanh_backward",),
    "exp": ("exp", "exp2"), "expm1": ("expm1",), "log": ("log", "log2", "log10"), "log1p": ("log1p",),
    "sigmoid": ("sigmoid", "log_sigmoid"), "tanh": ("tanh",), "erf": ("erf", "erfc", "erfinv"), "sin": ("sin", "tan"),
    "cos": ("cos",), "atan": ("atan", "atan2", "asin", "acos"), "softplus": ("softplus",), "elu": ("elu", "celu"),
    "selu": ("selu",), "silu": ("silu",), "gelu": ("gelu",), "mish": ("mish",), "silu_backward": ("silu_backward",),
    "gelu_backward": ("gelu_backward",), "swiglu": ("glu",),
    "elementwise": ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
                    "binary_cross_entropy_with_logits", "nan_to_num", "polar", "complex", "hypot", "bernoulli",
                    "linalg_cross"),
}  # fmt: skip
_KIND_OF: Final = {operator: kind for kind, operators in _KINDS.items() for operator in operators}
#: Kinds whose operators take different times for the same tensors, except for those that do nothing special.
_MIXED: Final = frozenset({
    "copy", "pad", "gather", "scatter", "cumsum", "pool_backward", "resize", "elementwise", "elementwise_backward",
    "mul", "sub", "div", "remainder", "log", "erf", "sin", "atan", "sigmoid", "group_norm",
})  # fmt: skip
_PLAIN: Final = frozenset({
    "clone", "contiguous", "reshape", "reshape_as", "flatten", "ravel", "lift_fresh_copy", "constant_pad_nd",
    "slice_backward", "select_backward", "index", "_unsafe_index", "index_select", "index_put", "_unsafe_index_put",
    "slice_scatter", "select_scatter", "histc", "avg_pool2d_backward", "max_pool2d_with_indices_backward",
    "nll_loss_backward", "multiply", "subtract", "rsub", "diff", "divide", "true_divide", "floor_divide",
    "native_group_norm",
})  # fmt: skip


def _manner(call: Call) -> dict[str, Any]:
    """What the tensors do not tell, but takes its own time: the operator behind a mixed kind, or how it computes."""
    kind = _KIND_OF[call.operator]
    if kind in _MIXED and call.operator != kind and call.operator not in _PLAIN:
        return {"of": call.operator}
    approximate = call.arguments.get("approximate", "none")  # of a gelu
    return {} if approximate == "none" else {"approximate": approximate}


def _product(first: str, second: str, bias: str | None = None) -> Callable[[Call], Work]:
    def rule(call: Call) -> Work:
        a, b = call[first], call[second]
        inputs = [a, b] if bias is None or call.arguments.get(bias) is None else [a, b, call[bias]]
        return Work("matmul", inputs)

    return rule


def _linear(call: Call) -> Work:
    """The weight is kept as [out, in] and read as [in, out]."""
    weight: Value = call["weight"]
    turned = TensorType(weight.type.dtype, weight.type.shape[::-1])
    rest = [call["bias"]] if call.arguments.get("bias") is not None else []
    return Work("matmul", [call["input"], Value(turned, weight.strides[::-1], weight.tensor), *rest])


def _einsum(call: Call) -> Work:
    values, equation = call.tensors, str(call["equation"])
    if len(values) == 1:
        return Work("reduce", values, {"axes": equation})
    product = einsum(equation, [value.type.shape for value in values])
    if product is None:
        raise Unsupported(f"einsum {equation!r:.60}: how much it computes is known for two tensors only")
    return Work("matmul", values, product)


def _named_product(name: str, first: str, second: str) -> Callable[[Call], Work]:
    """Sums over an axis of its own, by default the last, that both factors have."""

    def rule(call: Call) -> Work:
        a, b = call[first], call[second]
        return Work("matmul", [a, b], {"of": name, "k": a.type.shape[call.arguments.get("dim", -1)]})

    return rule


def _bilinear(call: Call) -> Work:
    bias = [call["bias"]] if call.arguments.get("bias") is not None else []
    return Work("bilinear", [call["input1"], call["input2"], call["weight"], *bias])


def _grouped(call: Call) -> Work:
    return Work("grouped_matmul", call.tensors)


def _contracted(call: Call) -> Work:
    axes = call["dims_self"]
    return Work("matmul", call.tensors, {"k": math.prod(call["self"].type.shape[axis] for axis in axes)})


def _summed_product(call: Call) -> Work:
    """addbmm: the products of a batch are added up."""
    a: Value = call["batch1"]
    return Work("matmul", [a, call["batch2"], call["self"]], {"k": a.type.shape[0] * a.type.shape[2]})


def _convolution(call: Call) -> Work:
    transposed = bool(call.arguments.get("transposed", "transpose" in call.operator))
    given = {key: call.arguments.get(key, value) for key, value in _CONV_DEFAULTS.items()}
    inputs = [call["input"], call["weight"]] + ([call["bias"]] if call.arguments.get("bias") is not None else [])
    axes = len(call["weight"].type.shape) - 2
    usual = {key: _spread(value, axes) for key, value in _CONV_DEFAULTS.items()}
    attributes = {key: value for key, value in given.items() if _spread(value, axes) != usual[key]}
    return Work("conv_transposed" if transposed else "conv", inputs, attributes)


_CONV_DEFAULTS: Final[dict[str, Any]] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}


def _spread(value: Any, axes: int) -> Any:
    """One number stands for all axes."""
    if isinstance(value, (list, tuple)):
        return list(value) * axes if len(value) == 1 else list(value)
    return [value] * axes if isinstance(value, int) else value


def _convolution_backward(call: Call) -> Work:
    keys = ("stride", "padding", "dilation", "groups", "transposed", "output_padding")
    inputs = [call["grad_output"], call["input"], call["weight"]]
    attributes = {key: call[key] for key in keys if call.arguments.get(key)}
    return Work("conv_backward", inputs, {**attributes, "made": list(call["output_mask"])})


def _attention(call: Call) -> Work:
    names = ("query", "key", "value", "attn_mask", "attn_bias")
    inputs = [call[name] for name in names if call.arguments.get(name) is not None]
    attributes = {"causal": True} if call.arguments.get("is_causal") else {}
    return Work("attention", inputs, attributes)


def _attention_backward(call: Call) -> Work:
    gradient = next(call[name] for name in ("grad_out", "grad_out_", "grad_output") if name in call.arguments)
    named = [call[name] for name in ("query", "key", "value")]
    rest = [value for value in call.tensors if value not in (gradient, *named)]
    attributes = {"causal": True} if call.arguments.get("is_causal") else {}
    return Work("attention_backward", [gradient, *named, *rest], attributes)


_GATES: Final = {"lstm": 4, "gru": 3, "rnn": 1}


def _recurrent(call: Call) -> Work:
    """lstm, gru, rnn_tanh, rnn_relu: x, the weights, the state. The output of an LSTM may be projected."""
    kind = call.operator.partition("_")[0]
    weights: list[Value] = call["params"]
    x: Value = call["input"] if "input" in call.arguments else call["data"]
    rows, out = weights[1].type.shape
    attributes = {
        "hidden": rows // _GATES[kind],
        "layers": call["num_layers"],
        "directions": 2 if call["bidirectional"] else 1,
        "batch_first": bool(call.arguments.get("batch_first")),
    }
    if out != attributes["hidden"]:
        attributes["projected"] = out
    state = [value for value in call.tensors if value is not x and value not in weights]
    return Work(kind, [x, *weights, *state], attributes)


def _cell(call: Call) -> Work:
    """One step: x [batch, in], the state, the weights."""
    kind = call.operator.partition("_")[0]
    return Work(kind, call.tensors, {"hidden": call["w_hh"].type.shape[1]})


def _pool(call: Call) -> Work:
    """The window of an adaptive pool is what its sizes imply."""
    kind = "max_pool" if "max_pool" in call.operator else "avg_pool"
    x, made = call.tensors[0], call.made[0]
    if "adaptive" in call.operator:
        return Work(kind, [x], {"window": math.ceil(x.type.elements / max(1, made.type.elements)), "adaptive": True})
    axes = int(re.findall(r"(\d)d", call.operator)[0])
    kernel = _spread(call["kernel_size"], axes)
    stride = _spread(call.arguments.get("stride") or kernel, axes)
    attributes = {"window": math.prod(kernel), "kernel": kernel, "stride": stride}
    if padding := call.arguments.get("padding"):
        attributes["padding"] = _spread(padding, axes)
    return Work(kind, [x], attributes)


def _along(kind: str) -> Callable[[Call], Work]:
    def rule(call: Call) -> Work:
        axis = call.arguments.get("dim", -1)
        last = len(call.tensors[0].type.shape) - 1
        return Work(kind, call.tensors, {} if axis in (-1, last) else {"axis": axis})

    return rule


def _reduction(call: Call) -> Work:
    """Of one tensor over some axes; max and min of two tensors are elementwise."""
    if len(call.tensors) > 1:
        return Work({"max": "maximum", "min": "minimum"}.get(call.operator, "elementwise"), call.tensors)
    axes = call.arguments.get("dim")
    attributes = {"of": call.operator} | ({} if axes is None else {"axes": axes})
    return Work("reduce", call.tensors, attributes)


def _norm(call: Call) -> Work:
    """Of a vector or a matrix; some of those of a matrix are found from its singular values."""
    axes, x = call.arguments.get("dim"), call.tensors[0].type.shape
    of_matrix = len(axes) == 2 if isinstance(axes, list) else axes is None and len(x) == 2
    if of_matrix and call.arguments.get("ord") in (2, -2, "nuc"):
        raise Unsupported(f"{call.operator}: how much a norm by singular values computes is not known")
    return _reduction(call)


def _power(call: Call) -> Work:
    exponent = call.arguments.get("exponent")
    if exponent == 2:
        return Work("square", call.tensors)
    return Work("pow", call.tensors, {"exponent": exponent} if isinstance(exponent, (int, float)) else {})


def _fill(call: Call) -> Work:
    """What is "like" another tensor does not read it."""
    return Work("fill", [])


def _cast(call: Call) -> Work:
    """To another dtype, or to another layout of the same."""
    x = call.tensors[0]
    return Work("copy" if x.type.dtype == call.made[0].type.dtype else "cast", [x])


def _copy(call: Call) -> Work:
    """copy(self, src): what was in self is overwritten unread."""
    source: Value = call["src"]
    return Work("copy" if source.type.dtype == call.made[0].type.dtype else "cast", [source])


_RULES: Final[Mapping[str, Callable[[Call], Work]]] = {
    "linear": _linear,
    "mm": _product("self", "mat2"),
    "bmm": _product("self", "mat2"),
    "matmul": _product("self", "other"),
    "addmm": _product("mat1", "mat2", "self"),
    "baddbmm": _product("batch1", "batch2", "self"),
    "addbmm": _summed_product,
    "mv": _product("self", "vec"),
    "dot": _product("self", "tensor"),
    "vdot": _product("self", "other"),
    "inner": _named_product("inner", "self", "other"),
    "linalg_vecdot": _named_product("vecdot", "x", "y"),
    "cdist": _named_product("cdist", "x1", "x2"),
    "bilinear": _bilinear,
    "addmv": _product("mat", "vec", "self"),
    "_int_mm": _product("self", "mat2"),
    "_scaled_mm": _product("self", "mat2", "bias"),
    "_weight_int8pack_mm": _product("self", "mat2"),
    "_weight_int4pack_mm": _product("self", "mat2"),
    "_weight_int4pack_mm_for_cpu": _product("self", "mat2"),
    "einsum": _einsum,
    "tensordot": _contracted,
    "_grouped_mm": _grouped,
    "grouped_mm": _grouped,
    "transformers.grouped_mm_fallback": _grouped,
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "convolution", "_convolution", "cudnn_convolution", "conv_transpose1d",
         "conv_transpose2d", "conv_transpose3d"),
        _convolution,
    ),
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(
        ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
         "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
         "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math",
         "_scaled_dot_product_fused_attention_overrideable"),
        _attention,
    ),
    **dict.fromkeys(
        ("_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_flash_attention_for_cpu_backward",
         "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
         "_scaled_dot_product_fused_attention_overrideable_backward"),
        _attention_backward,
    ),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _cell),
    **dict.fromkeys(
        ("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d_with_indices",
         "max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
         "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool1d",
         "adaptive_max_pool2d", "adaptive_max_pool3d"),
        _pool,
    ),
    "softmax": _along("softmax"),
    "_softmax": _along("softmax"),
    "_safe_softmax": _along("softmax"),
    "log_softmax": _along("log_softmax"),
    "_log_softmax": _along("log_softmax"),
    "sort": _along("sort"),
    "argsort": _along("sort"),
    "topk": _along("topk"),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    "linalg_norm": _norm,
    "linalg_matrix_norm": _norm,
    **dict.fromkeys(_FILLS, _fill),
    "pow": _power,
    "to": _cast,
    "_to_copy": _cast,
    "type_as": _cast,
    "copy": _copy,
}  # fmt: skip
