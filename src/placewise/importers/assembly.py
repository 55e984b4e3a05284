"""What every importer of models shares: tensors with types in, ops with their work out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from placewise.errors import InvalidInput
from placewise.graph import Graph, GraphBuilder, Tensor
from placewise.kinds import KINDS, Op, TensorType

#: Ops of one model; what claims more is refused before it fills the memory.
MAX_OPS = 2_000_000


@dataclass(frozen=True)
class View(Tensor):
    """A tensor under another shape or dtype than it was made with, for who reads it by this handle."""

    type: TensorType


class Assembly:
    """A `GraphBuilder` for typed tensors: FLOPs, bytes and signature of an op follow from its kind and its tensors."""

    def __init__(self, name: str) -> None:
        self._builder = GraphBuilder(name)
        self._types: list[TensorType] = []
        self._names: Counter[str] = Counter()

    def type_of(self, tensor: Tensor) -> TensorType:
        """Dtype and shape of a tensor that was added before."""
        return tensor.type if isinstance(tensor, View) else self._types[tensor.index]

    def view(self, tensor: Tensor, type: TensorType) -> Tensor:
        """The same bytes seen with another shape (reshaped, transposed): no op, and the tensor stays what it is."""
        return View(tensor.index, type)

    def stored(self, name: str, held: TensorType, *, kind: str = "parameter", module: str = "") -> Tensor:
        """A parameter or, as kind "state", a cache or the state of an optimizer."""
        return self.op(name, kind, [], [held], module=module)[0]

    def op(
        self,
        name: str,
        kind: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[TensorType],
        attributes: Mapping[str, Any] | None = None,
        *,
        module: str = "",
        **columns: Any,
    ) -> list[Tensor]:
        """Add an op. `columns` are other per-op fields of `Graph.create`, such as phase and group.

        A name that is taken gets a number.
        """
        if len(self._names) >= MAX_OPS:
            raise InvalidInput(f"the model has more than {MAX_OPS:,} ops")
        taken = self._names[name]
        self._names[name] += 1
        if taken:
            return self.op(f"{name}:{taken}", kind, inputs, outputs, attributes, module=module, **columns)
        op = Op(kind, [self.type_of(tensor) for tensor in inputs], outputs, attributes or {})
        self._types.extend(outputs)
        return self._builder.op(
            name,
            kind=kind,
            inputs=inputs,
            outputs=[made.bytes for made in outputs],
            op_dtypes=_arithmetic(op),
            op_modules=module,
            op_signatures=op.signature,
            flops=op.flops,
            bytes_accessed=op.bytes_accessed,
            **columns,
        )

    def graph(self) -> Graph:
        """Validate and freeze."""
        return self._builder.graph()


def kinds_without_formula(graph: Graph) -> Counter[str]:
    """Kinds of ops that are costed by their bytes alone, because no formula for them is known, and how often.

    A backward op that was mirrored from its forward op has twice that one's cost.
    """
    known = KINDS.keys() | {f"{kind}_backward" for kind in KINDS}
    return Counter(kind for kind in graph.op_kinds if kind not in known)


def _arithmetic(op: Op) -> str:
    """The dtype that an op computes in: that of the first tensor of numbers that it reads, or else makes."""
    for tensor in (*op.inputs, *op.outputs):
        if "float" in tensor.dtype:
            return tensor.dtype
    return op.outputs[0].dtype if op.outputs else "float32"
