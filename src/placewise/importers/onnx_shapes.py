"""Shapes of an ONNX model, as a program: `python -m placewise.importers.onnx_shapes BYTES < model > model`.

A process of its own, with at most so many bytes of memory, because sizes that a file claims can make shape inference
use all memory and never end. What follows from shapes and constants alone is computed, until no shape is new: ONNX
itself follows only the simplest of such arithmetic.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, Final

#: Larger values are no shapes, axes or indices.
_MAX_ELEMENTS: Final = 65536
#: The ops of shape arithmetic.
_COMPUTED: Final = frozenset({
    "Abs", "Add", "And", "Cast", "Ceil", "Concat", "ConstantOfShape", "CumSum", "Div", "Equal", "Expand", "Flatten",
    "Floor", "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual",
    "Max", "Min", "Mod", "Mul", "Neg", "NonZero", "Not", "Or", "Pow", "Range", "ReduceMax", "ReduceMin", "ReduceProd",
    "ReduceSum", "Reshape", "ScatterElements", "ScatterND", "Size", "Slice", "Sqrt", "Squeeze", "Sub", "Tile",
    "Transpose", "Trilu", "Unsqueeze", "Where",
})  # fmt: skip


def with_shapes(raw: bytes) -> bytes:
    """Infer, compute, and infer again what that makes known."""
    from onnx import ModelProto, helper, numpy_helper, shape_inference

    model = ModelProto.FromString(raw)
    while True:
        model = shape_inference.infer_shapes(model, data_prop=True)
        graph = model.graph
        shapes = _shapes(graph)
        found = _computed(model, shapes)
        if not found:
            return bytes(model.SerializeToString())
        stored = [numpy_helper.from_array(value, name) for name, value in found.items()]
        graph.initializer.extend(stored)
        graph.value_info.extend(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            for tensor in stored
            if tensor.name not in shapes
        )
        left = [node for node in graph.node if not (len(node.output) == 1 and node.output[0] in found)]
        del graph.node[:]
        graph.node.extend(left)


def _shapes(graph: Any) -> dict[str, list[int]]:
    """Those that are known."""
    return {
        value.name: [size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.HasField("shape")
        and all(size.HasField("dim_value") for size in value.type.tensor_type.shape.dim)
    }


def _computed(model: Any, shapes: Mapping[str, list[int]]) -> dict[str, Any]:
    """The values that shapes and constants decide, by name."""
    import numpy as np
    from onnx import numpy_helper
    from onnx.reference import ReferenceEvaluator

    opsets = {entry.domain: entry.version for entry in model.opset_import}
    known = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer if _is_setting(tensor)}
    found: dict[str, Any] = {}
    for node in model.graph.node:
        if len(node.output) != 1 or node.domain not in ("", "ai.onnx"):
            continue
        name, inputs = node.output[0], [key for key in node.input if key]
        if node.op_type == "Shape" and inputs and inputs[0] in shapes:
            ends = {attribute.name: attribute.i for attribute in node.attribute}
            found[name] = np.array(shapes[inputs[0]], np.int64)[ends.get("start", 0) : ends.get("end")]
        elif node.op_type == "Constant" and all(_is_setting(attribute.t) for attribute in node.attribute):
            found[name] = _run(ReferenceEvaluator, node, opsets, {})
        elif node.op_type in _COMPUTED and math.prod(shapes.get(name, ())) <= _MAX_ELEMENTS:
            given = {key: found[key] if key in found else known.get(key) for key in inputs}
            if all(value is not None for value in given.values()):
                found[name] = _run(ReferenceEvaluator, node, opsets, given)
        if name in found and (not isinstance(found[name], np.ndarray) or found[name].size > _MAX_ELEMENTS):
            del found[name]
    return found


def _is_setting(tensor: Any) -> bool:
    """Whether a stored tensor is there, and whole numbers or a single one."""
    from onnx import TensorProto

    elements = math.prod(tensor.dims)
    whole = tensor.data_type in (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)
    return bool(tensor.data_location != TensorProto.EXTERNAL and elements <= (_MAX_ELEMENTS if whole else 1))


def _run(evaluator: Any, node: Any, opsets: Mapping[str, int], given: Mapping[str, Any]) -> Any:
    """The value of an op; None for one that cannot be, whose shape then stays unknown."""
    try:
        return evaluator(node, opsets=opsets).run(None, given)[0]
    except Exception:
        return None


if __name__ == "__main__":
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
    except (ImportError, ValueError, OSError):
        pass  # not on this system
    sys.stdout.buffer.write(with_shapes(sys.stdin.buffer.read()))
