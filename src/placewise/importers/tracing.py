"""A trace as a graph: calls of ATen operators one after another, on tensors that may share memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from placewise.errors import InvalidInput
from placewise.graph import Graph, Tensor
from placewise.importers.assembly import Assembly
from placewise.importers.aten import Call, Laid, Value, translate, views


class Recorder:
    """Adds the calls of a trace to a graph. What they made is found again under the keys that the trace gives it."""

    def __init__(self, name: str) -> None:
        self.assembly = Assembly(name)
        self.values: dict[Hashable, Any] = {}  # a `Value`, a list of them, or what is no tensor
        self.origins: list[Hashable] = []  # the key of the call behind each op
        self._memory: dict[int, int] = {}  # tensor: the tensor in whose memory it lies
        self._sharing: dict[int, list[Hashable]] = {}  # that tensor: the keys of all that lies there

    def given(self, key: Hashable, name: str, kind: str, held: Laid, *, module: str = "", **columns: Any) -> Value:
        """A parameter, state or an input."""
        (tensor,) = self.assembly.op(name, kind, [], [held.type], module=module, **columns)
        self.origins.append(key)
        value = Value(held.type, held.strides, tensor)
        self.keep(key, value)
        return value

    def empty(self, key: Hashable, held: Laid) -> None:
        """A constant without elements, of which nothing is ever read."""
        self.values[key] = Value(held.type, held.strides, Tensor(-1))

    def call(self, key: Hashable, call: Call, *, module: str, writes: bool, **columns: Any) -> list[Value]:
        """Add what a call does, if anything; `writes` says that it changes its first argument."""
        try:
            work = translate(call)
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            what = f"{call.operator:.60}: its arguments are not those of the operator of that name"
            raise InvalidInput(f"{what}: {error!r:.100}") from None
        if isinstance(work, Value):
            return [Value(made.type, made.strides, work.tensor) for made in call.made]
        made = self.assembly.op(
            f"{module}.{call.operator}" if module else call.operator,
            work.kind,
            [self.assembly.view(value.tensor, value.type) for value in work.inputs if value.tensor.index >= 0],
            [laid.type for laid in call.made],
            work.attributes,
            module=module,
            **columns,
        )
        self.origins.append(key)
        results = [Value(laid.type, laid.strides, tensor) for laid, tensor in zip(call.made, made, strict=True)]
        if work.kind == "view" and work.inputs:  # else it is one of nothing
            for value in results:
                self._memory[value.tensor.index] = self._home(work.inputs[0])
        if writes:
            self._overwrite(call.tensors[0], results[0])
        return results

    def keep(self, key: Hashable, value: Any) -> None:
        """Let later calls find it."""
        self.values[key] = value
        if isinstance(value, Value):
            self._sharing.setdefault(self._home(value), []).append(key)

    def graph(self) -> Graph:
        """Validate and freeze."""
        return self.assembly.graph()

    def _home(self, value: Value) -> int:
        return self._memory.get(value.tensor.index, value.tensor.index)

    def _overwrite(self, old: Value, new: Value) -> None:
        """Whoever reads that memory from now on waits for the call that wrote to it."""
        home = self._home(old)
        self._memory[new.tensor.index] = home
        for key in self._sharing.get(home, []):
            value = self.values[key]
            self.values[key] = Value(value.type, value.strides, new.tensor)


def operator_name(qualified: str) -> tuple[str, bool]:
    """The name in "aten::add_", without the namespace if that is ATen, and whether it writes to its first argument."""
    space, _, name = qualified.rpartition("::")
    in_place = name.endswith("_") and not name.endswith("__")
    name = name.removesuffix("_") if in_place else name
    return (name if space in ("aten", "") else f"{space}.{name}"), in_place


def written(calls: Iterable[tuple[str, Hashable, Hashable]]) -> set[Hashable]:
    """The keys of all that is written to, also through views. Calls are (qualified name, first argument, result)."""
    base: dict[Hashable, Hashable] = {}
    found: set[Hashable] = set()
    for qualified, first, result in calls:
        name, writes = operator_name(qualified)
        if writes or views(name):
            base[result] = base.get(first, first)
        if writes:
            found.add(base[result])
    return found
