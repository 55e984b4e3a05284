"""What the models of the zoo share: sizes in elements of one dtype, and memory traffic that follows from them."""

from __future__ import annotations

from collections.abc import Sequence

from placewise.graph import GraphBuilder, Tensor

#: Bytes of one element.
ITEM_BYTES = {"bfloat16": 2.0, "float32": 4.0}


class ModelBuilder(GraphBuilder):
    """A builder for one dtype. Sizes are numbers of elements; an op moves all its inputs, weights and outputs once."""

    def __init__(self, name: str, dtype: str) -> None:
        super().__init__(name)
        self.dtype = dtype
        self.item_bytes = ITEM_BYTES[dtype]

    def stored(self, name: str, elements: int, *, kind: str = "parameter") -> Tensor:
        """A weight (or, as kind "state", a cache); it belongs to the module that its name begins with."""
        module = name.rpartition(".")[0]
        size = elements * self.item_bytes
        return self.op(name, kind=kind, outputs=[size], op_dtypes=self.dtype, op_modules=module)[0]

    def compute(
        self,
        name: str,
        kind: str,
        inputs: Sequence[Tensor],
        elements: int,
        *,
        flops: float = 0.0,
        module: str | None = None,
        resident: float = 0.0,
        bytes_accessed: float | None = None,
    ) -> Tensor:
        """An op with one output of that many elements. Its module is its own name unless given."""
        size = elements * self.item_bytes
        moved = sum(self.size(tensor) for tensor in inputs) + size + resident
        return self.op(
            name,
            kind=kind,
            inputs=inputs,
            outputs=[size],
            op_dtypes=self.dtype,
            op_modules=name if module is None else module,
            flops=flops,
            resident=resident,
            bytes_accessed=moved if bytes_accessed is None else bytes_accessed,
        )[0]
