"""What work there is: operations, the tensors that they exchange, and the bytes that they keep.

A `Graph` is frozen and array-backed (structure of arrays). It knows nothing of devices or times.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placewise.errors import MAX_TEXT, InvalidInput, check_length, check_text
from placewise.quantities import LARGEST

if TYPE_CHECKING:
    from placewise.transforms import Contraction

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]

PHASES: Final = ("forward", "backward", "update")
#: Ops of these kinds take no time and hold their outputs for the whole run: they are placed where their bytes live.
STORED_KINDS: Final = frozenset({"parameter", "state"})
#: What an op has unless it says otherwise, by the names of `Graph`'s per-op fields (every op has a name of its own).
OP_DEFAULTS: Final[dict[str, Any]] = {
    "op_kinds": "op", "op_dtypes": "float32", "op_modules": "", "op_signatures": "", "flops": 0.0,
    "bytes_accessed": 0.0, "scratch": 0.0, "resident": 0.0, "phase": 0, "model": 0, "group": -1,
}  # fmt: skip
#: Parts of a module path. Modules are drawn and summed up as a tree; thousands of levels would fill the memory.
MAX_LEVELS: Final = 100
_PATH: Final = re.compile(r"[^\s.<>=]+(?:\.[^\s.<>=]+)*")


@dataclass(frozen=True, eq=False)
class Graph:
    """A directed acyclic graph of `N` ops and `T` tensors.

    A tensor has one producer, a size and any number of consumers; it crosses to a device once, however many
    consumers it has there. Parameters and state are ops too (see `STORED_KINDS`): their placement is their residency.
    Sizes are bytes, kept as float64 because published cost tables hold fractional ones; none exceeds
    `quantities.LARGEST`. Arrays that describe each op's surroundings come as (start, items) pairs: op i has
    items[start[i]:start[i + 1]].
    """

    name: str
    op_names: tuple[str, ...]
    op_kinds: tuple[str, ...]  # "conv2d", "matmul", ...
    op_dtypes: tuple[str, ...]  # what the arithmetic runs in: "float32", "bfloat16", ...
    op_modules: tuple[str, ...]  # the module path that engines address; "" where there is none
    op_signatures: tuple[str, ...]  # kind, shapes, dtypes and attributes (`kinds.Op.signature`); "" where not known
    flops: Floats  # [N]
    bytes_accessed: Floats  # [N] read and written by the op itself
    scratch: Floats  # [N] bytes held only while the op runs
    resident: Floats  # [N] bytes held for the whole run (weights that were collapsed into the op)
    phase: Ints  # [N] index into PHASES
    model: Ints  # [N] index into `models`
    group: Ints  # [N] ops with the same group >= 0 must share a device; -1 = free
    models: tuple[str, ...]  # several models may be planned together
    tensor_producer: Ints  # [T]
    tensor_bytes: Floats  # [T]
    consumer_ptr: Ints  # [T + 1] tensor t is read by consumers[consumer_ptr[t]:consumer_ptr[t + 1]]
    consumers: Ints  # [E]

    @classmethod
    def create(
        cls,
        *,
        op_names: Sequence[str],
        tensor_producer: ArrayLike = (),
        tensor_bytes: ArrayLike = (),
        edge_tensor: ArrayLike = (),
        edge_consumer: ArrayLike = (),
        name: str = "graph",
        op_kinds: Sequence[str] | str = "op",
        op_dtypes: Sequence[str] | str = "float32",
        op_modules: Sequence[str] | str = "",
        op_signatures: Sequence[str] | str = "",
        flops: ArrayLike = 0.0,
        bytes_accessed: ArrayLike = 0.0,
        scratch: ArrayLike = 0.0,
        resident: ArrayLike = 0.0,
        phase: ArrayLike = 0,
        model: ArrayLike = 0,
        group: ArrayLike = -1,
        models: Sequence[str] | None = None,
    ) -> Graph:
        """Build and validate. Per-op arguments are one value for all or one per op; edges are (tensor, consumer)."""
        check_text(name, "the graph's name")
        if isinstance(op_names, str):
            raise InvalidInput(f"ops.name: must be a list of texts, found {op_names!r:.60}")
        names = _texts(op_names, None, "ops.name")
        n = len(names)
        producer = to_ints(tensor_producer, None, "tensors.producer")
        tensors = len(producer)
        of_tensor = to_ints(edge_tensor, None, "edges.tensor")
        consumer = to_ints(edge_consumer, len(of_tensor), "edges.consumer")
        consumer_ptr, consumers = _consumer_lists(of_tensor, consumer, tensors, n)
        graph = cls(
            name=name,
            op_names=names,
            op_kinds=_texts(op_kinds, n, "ops.kind"),
            op_dtypes=_texts(op_dtypes, n, "ops.dtype"),
            op_modules=_texts(op_modules, n, "ops.module"),
            op_signatures=_texts(op_signatures, n, "ops.signature"),
            flops=_sizes(flops, n, "ops.flops"),
            bytes_accessed=_sizes(bytes_accessed, n, "ops.bytes_accessed"),
            scratch=_sizes(scratch, n, "ops.scratch"),
            resident=_sizes(resident, n, "ops.resident"),
            phase=to_ints(phase, n, "ops.phase"),
            model=to_ints(model, n, "ops.model"),
            group=to_ints(group, n, "ops.group"),
            models=(name,) if models is None else _texts(models, None, "models"),
            tensor_producer=producer,
            tensor_bytes=_sizes(tensor_bytes, tensors, "tensors.bytes"),
            consumer_ptr=consumer_ptr,
            consumers=consumers,
        )
        graph._validate()
        return graph

    def __repr__(self) -> str:
        return f"<Graph {self.name!r}: {self.num_ops} ops, {self.num_tensors} tensors, {self.num_edges} edges>"

    # ---- sizes and views -------------------------------------------------------------------------------------------

    @property
    def num_ops(self) -> int:
        """N."""
        return len(self.op_names)

    @property
    def num_tensors(self) -> int:
        """T."""
        return len(self.tensor_producer)

    @property
    def num_edges(self) -> int:
        """E: how many (tensor, consumer) pairs there are."""
        return len(self.consumers)

    @cached_property
    def edge_tensor(self) -> Ints:
        """[E] the tensor of each edge, beside `consumers`."""
        return _frozen(np.repeat(np.arange(self.num_tensors, dtype=np.int32), np.diff(self.consumer_ptr)))

    @cached_property
    def edge_producer(self) -> Ints:
        """[E] the op at the head of each edge, beside `consumers`."""
        return _frozen(self.tensor_producer[self.edge_tensor])

    @cached_property
    def outputs(self) -> tuple[Ints, Ints]:
        """(start [N + 1], tensors [T]): the tensors that each op makes."""
        return _grouped(self.tensor_producer, self.num_ops)

    @cached_property
    def in_edges(self) -> tuple[Ints, Ints]:
        """(start [N + 1], edges [E]): the edges over which each op reads, by tensor."""
        return _grouped(self.consumers, self.num_ops)

    @cached_property
    def out_edges(self) -> tuple[Ints, Ints]:
        """(start [N + 1], edges [E]): the edges over which each op is read, by tensor, then by consumer."""
        return _grouped(self.edge_producer, self.num_ops)

    @cached_property
    def is_stored(self) -> NDArray[np.bool_]:
        """[N] whether the op is a parameter or state (see `STORED_KINDS`)."""
        return _frozen(np.fromiter((kind in STORED_KINDS for kind in self.op_kinds), np.bool_, self.num_ops))

    @cached_property
    def is_parameter(self) -> NDArray[np.bool_]:
        """[N] whether the op is a parameter, which is the same for every sample."""
        return _frozen(np.fromiter((kind == "parameter" for kind in self.op_kinds), np.bool_, self.num_ops))

    @cached_property
    def resident_bytes(self) -> Floats:
        """[N] bytes that the op keeps on its device for the whole run: its own, and its outputs if it is stored."""
        held = self.resident.copy()
        stored = self.is_stored[self.tensor_producer]
        np.add.at(held, self.tensor_producer[stored], self.tensor_bytes[stored])
        return _frozen(held)

    @cached_property
    def topological_order(self) -> Ints:
        """Op indices with every producer before its consumers; the graph's own order where that already holds."""
        if bool(np.all(self.edge_producer < self.consumers)):
            return _frozen(np.arange(self.num_ops, dtype=np.int32))
        waiting = np.bincount(self.consumers, minlength=self.num_ops).tolist()
        start, edges = self.out_edges[0].tolist(), self.out_edges[1]
        children = self.consumers[edges].tolist()
        order = [op for op in range(self.num_ops) if waiting[op] == 0]
        for op in order:
            for child in children[start[op] : start[op + 1]]:
                waiting[child] -= 1
                if waiting[child] == 0:
                    order.append(child)
        if len(order) < self.num_ops:
            raise InvalidInput(f"graph {self.name!r:.60} has a cycle: {self._describe_cycle(waiting)}")
        return _frozen(np.array(order, np.int32))

    def op_index(self, name: str) -> int:
        """The position of the op with this name."""
        check_text(name, "the name of an op")
        if name not in self._position:
            near = get_close_matches(name, self.op_names[:10_000], 1) if len(name) < 200 else []
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidInput(f"graph {self.name!r:.60} has no op named {name!r:.60}{hint}")
        return self._position[name]

    @cached_property
    def _position(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.op_names)}

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the content; equal graphs have equal digests on every machine."""
        sha = hashlib.sha256()
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, np.ndarray):
                sha.update(f"{part.name}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
            else:  # as JSON, because what `repr` shows of a text depends on the version of Python
                sha.update(json.dumps([part.name, value]).encode())
        return sha.hexdigest()

    # ---- transforms (see transforms.py) ----------------------------------------------------------------------------

    def collapse_parameters(self) -> Contraction:
        """The default view: each parameter lives with its consumer (see `transforms.collapse_parameters`)."""
        from placewise import transforms

        return transforms.collapse_parameters(self)

    # ---- validation ------------------------------------------------------------------------------------------------

    def _validate(self) -> None:
        n, tensors = self.num_ops, self.num_tensors
        if len(set(self.op_names)) < n:
            seen: set[str] = set()
            twice = next(name for name in self.op_names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise InvalidInput(f"graph {self.name!r:.60}: two ops are named {twice!r:.60}; op names must differ")
        if max(map(len, self.op_modules), default=0) >= 2 * MAX_LEVELS:  # for most graphs, the end of it
            deep = next((i for i, path in enumerate(self.op_modules) if path.count(".") >= MAX_LEVELS), None)
            if deep is not None:
                raise InvalidInput(f"ops.module[{deep}]: must have at most {MAX_LEVELS} parts with dots between them")
        _within(self.phase, 0, len(PHASES), "ops.phase", self.op_names)
        _within(self.model, 0, len(self.models), "ops.model", self.op_names)
        _within(self.group, -1, 2**31 - 1, "ops.group", self.op_names)
        bad = np.flatnonzero((self.tensor_producer < 0) | (self.tensor_producer >= n))
        if len(bad):
            raise InvalidInput(
                f"tensors.producer[{bad[0]}]: there is no op {self.tensor_producer[bad[0]]}: there are {n} ops"
            )
        if tensors and self.is_stored[self.consumers].any():
            op = self.consumers[np.argmax(self.is_stored[self.consumers])]
            what = f"{self.op_kinds[op]} {self.op_names[op]!r:.60}"
            raise InvalidInput(f"graph {self.name!r:.60}: {what} cannot have inputs")
        self.topological_order  # noqa: B018 - raises on a cycle

    def _describe_cycle(self, waiting: list[int]) -> str:
        """Walk back through unfinished ops until one repeats."""
        edges = zip(self.edge_producer.tolist(), self.consumers.tolist(), strict=True)
        blocked_by = {consumer: producer for producer, consumer in edges if waiting[producer] and waiting[consumer]}
        op = next(iter(blocked_by))
        step: dict[int, int] = {}
        while op not in step:
            step[op] = len(step)
            op = blocked_by[op]
        loop = [f"{self.op_names[i]:.60}" for i in reversed(list(step)[step[op] :])]
        shown = loop if len(loop) <= 6 else [*loop[:3], "...", *loop[-2:]]
        return " -> ".join([*shown, loop[0]])


@dataclass(frozen=True)
class Tensor:
    """A handle that `GraphBuilder.op` returns for each output, to be passed as an input of later ops."""

    index: int


class GraphBuilder:
    """Adds ops one at a time, for importers and for models written as code.

    >>> build = GraphBuilder("tiny")
    >>> x, = build.op("x", kind="input", outputs=[400.0])
    >>> y, = build.op("y", kind="relu", inputs=[x], outputs=[400.0], flops=100.0)
    >>> build.graph().num_edges
    1
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._ops: list[dict[str, Any]] = []
        self._producer: list[int] = []
        self._bytes: list[float] = []
        self._edges: list[tuple[int, int]] = []

    def op(
        self, name: str, *, kind: str, inputs: Iterable[Tensor] = (), outputs: Iterable[float] = (), **columns: Any
    ) -> list[Tensor]:
        """Add an op; `outputs` are the sizes of its output tensors, `columns` other per-op fields of `Graph.create`."""
        if unknown := columns.keys() - OP_DEFAULTS.keys():
            raise InvalidInput(f"op {name!r}: {min(unknown)!r} is not one of {', '.join(OP_DEFAULTS)}")
        for what, value in (("inputs", inputs), ("outputs", outputs)):
            if not isinstance(value, Iterable) or isinstance(value, str):
                raise InvalidInput(f"op {name!r:.60}: {what} must be a list, found {value!r:.60}")
        index, given, sizes = len(self._ops), list(inputs), list(outputs)
        if not all(isinstance(tensor, Tensor) for tensor in given):
            raise InvalidInput(f"op {name!r:.60}: inputs must be tensors that `op` has returned")
        self._ops.append({"op_names": name, "op_kinds": kind, **columns})
        self._edges.extend((tensor.index, index) for tensor in given)
        first = len(self._producer)
        self._producer.extend([index] * len(sizes))
        self._bytes.extend(sizes)
        return [Tensor(i) for i in range(first, len(self._producer))]

    def size(self, tensor: Tensor) -> float:
        """Bytes of a tensor that was added before."""
        return float(self._bytes[tensor.index])

    def graph(self) -> Graph:
        """Validate and freeze."""
        columns = {key: [op.get(key, default) for op in self._ops] for key, default in OP_DEFAULTS.items()}
        last = int(to_ints(columns["model"], None, "ops.model").max(initial=0))
        models = [f"{self.name}/{i}" for i in range(min(last + 1, len(self._ops)))]
        return Graph.create(
            name=self.name,
            op_names=[op["op_names"] for op in self._ops],
            models=models if last else None,
            tensor_producer=self._producer,
            tensor_bytes=self._bytes,
            edge_tensor=[tensor for tensor, _ in self._edges],
            edge_consumer=[consumer for _, consumer in self._edges],
            **columns,
        )


def module_parts(module: str) -> tuple[str, ...]:
    """The names that a module path is made of, the outermost first; what is no path, as text with dots, is one name."""
    return tuple(module.split(".")) if _PATH.fullmatch(module) else (module,) * bool(module)


def _consumer_lists(of_tensor: Ints, consumer: Ints, tensors: int, ops: int) -> tuple[Ints, Ints]:
    for what, values, count in (("tensor", of_tensor, tensors), ("consumer", consumer, ops)):
        bad = np.flatnonzero((values < 0) | (values >= count))
        if len(bad):
            kind = "tensor" if what == "tensor" else "op"
            raise InvalidInput(
                f"edges.{what}[{bad[0]}]: there is no {kind} {values[bad[0]]}: there are {count} {kind}s"
            )
    # An op that reads a tensor twice receives it once, so repeated edges are one edge.
    keys = np.unique(of_tensor.astype(np.int64) * max(ops, 1) + consumer)
    of_tensor, consumer = (keys // max(ops, 1)).astype(np.int32), (keys % max(ops, 1)).astype(np.int32)
    pointer = np.zeros(tensors + 1, np.int32)
    np.cumsum(np.bincount(of_tensor, minlength=tensors), out=pointer[1:])
    return _frozen(pointer), _frozen(consumer)


def _grouped(owner: Ints, count: int) -> tuple[Ints, Ints]:
    """(start [count + 1], items): the positions at which each owner stands."""
    start = np.zeros(count + 1, np.int32)
    np.cumsum(np.bincount(owner, minlength=count), out=start[1:])
    return _frozen(start), _frozen(np.argsort(owner, kind="stable").astype(np.int32))


def _texts(values: Sequence[str] | str, n: int | None, where: str) -> tuple[str, ...]:
    try:
        texts = (values,) * (n or 0) if isinstance(values, str) else tuple(values)
    except TypeError:
        raise InvalidInput(f"{where}: must be a list of texts, found {values!r:.60}") from None
    try:  # one check for all, and for each only if that fails
        "".join(texts).encode()
        sound = max(map(len, texts), default=0) <= MAX_TEXT
    except (TypeError, UnicodeEncodeError):
        sound = False
    if not sound:
        for i, text in enumerate(texts):
            check_text(text, f"{where}[{i}]")
    if n is not None:
        check_length(texts, n, where)
    return texts


def _sizes(values: ArrayLike, n: int, where: str) -> Floats:
    try:
        array = np.asarray(values)
        if array.dtype.kind not in "iufO":  # texts, which NumPy would read
            raise TypeError
        array = array.astype(np.float64) + 0.0  # where minus zero has become zero: equal is identical
        array = np.full(n, array) if array.ndim == 0 else array
        if array.ndim != 1:
            raise ValueError
    except (OverflowError, TypeError, ValueError):
        raise InvalidInput(f"{where}: must be a list of numbers") from None
    check_length(array, n, where)
    bad = np.flatnonzero(~((array >= 0) & (array <= LARGEST)))
    if len(bad):
        raise InvalidInput(f"{where}[{bad[0]}]: must be from 0 to {LARGEST:g}, found {array[bad[0]]}")
    return _frozen(array)


def to_ints(values: ArrayLike, n: int | None, where: str) -> Ints:
    """A frozen copy of `n` whole numbers, or of as many as there are."""
    try:
        array = np.asarray(values)
        array = np.full(n or 0, array) if array.ndim == 0 else array
        if array.ndim != 1:
            raise ValueError
        if array.size and (array.dtype.kind not in "iu" or array.max() >= 2**31 or array.min() < -(2**31)):
            raise OverflowError
    except (OverflowError, TypeError, ValueError):
        raise InvalidInput(f"{where}: must be a list of whole numbers below 2^31") from None
    if n is not None:
        check_length(array, n, where)
    return _frozen(array.astype(np.int32))


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def _within(values: Ints, low: int, high: int, where: str, names: tuple[str, ...]) -> None:
    bad = np.flatnonzero((values < low) | (values >= high))
    if len(bad):
        op = int(bad[0])
        raise InvalidInput(
            f"{where}[{op}]: must be from {low} to {high - 1}, found {values[op]} (op {names[op]!r:.60})"
        )
