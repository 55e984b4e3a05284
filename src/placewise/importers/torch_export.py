"""PyTorch modules as graphs, by `torch.export`: nothing is run, and weights may be on the meta device or fake.

Ops stay as the module calls them (a linear layer is one op, and so is attention), each with the path of its module.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from placewise.errors import InvalidInput, PlacewiseError, Unsupported
from placewise.graph import Graph
from placewise.importers import require
from placewise.importers.assembly import Assembly
from placewise.importers.aten import Call, Laid, Value, translate
from placewise.kinds import TensorType

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram
    from torch.fx import GraphModule, Node


@dataclass(frozen=True, eq=False)
class Reading:
    """A graph, and the call behind each of its ops (by name), for whoever wants to run them one by one."""

    graph: Graph
    nodes: Mapping[str, Node]


def from_torch(
    module: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    training: str | None = None,
) -> Graph:
    """The graph of a module that is called with these arguments.

    It is that of inference or, with `training` the name of an optimizer, of a training step (see
    `training.training_step`, which has more options). Only shapes and dtypes of weights and arguments matter, so both
    may be on the meta device, or fake.
    """
    if training is not None:
        from placewise.importers.training import training_step

        return training_step(module, args, kwargs, name=name, optimizer=training)
    return read(export(module, args, kwargs), name or type(module).__name__).graph


def export(
    module: torch.nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> ExportedProgram:
    """The module as torch exports it for inference, whatever mode it is in."""
    torch = require("torch", "torch")
    require("torch.export", "torch")
    if not isinstance(module, torch.nn.Module):
        raise InvalidInput(f"module: must be a torch.nn.Module, found {module!r:.60}")
    try:
        with quiet(), torch.no_grad(), _evaluating(module), _plain_attention():
            given = like(module, tuple(args), dict(kwargs or {}))
            program: ExportedProgram = torch.export.export(module, *given, strict=False)
    except PlacewiseError:
        raise
    except Exception as error:
        raise Unsupported(f"torch cannot export {type(module).__name__}: {first_line(error)}") from error
    return program


def read(program: ExportedProgram, name: str, *, state: Sequence[str] = ()) -> Reading:
    """The graph of an exported program. Inputs whose names begin with one of `state` are kept between runs."""
    return _FxReader(program, name, tuple(state)).reading()


# ---- what readers of traces share ------------------------------------------------------------------------------------


class Recorder:
    """Adds calls of ATen operators to a graph. Tensors are found again under the keys that the trace gives them."""

    def __init__(self, name: str) -> None:
        self.assembly = Assembly(name)
        self.values: dict[Any, Any] = {}  # a `Value`, a list of them, or what is no tensor
        self.recorded: list[Any] = []  # the key of the call behind each op
        self._memory: dict[int, int] = {}  # tensor: the tensor whose memory it is part of
        self._sharing: dict[int, list[Any]] = {}  # that tensor: the keys of all values that lie there

    def given(self, key: Any, name: str, kind: str, held: Laid, *, module: str = "", **columns: Any) -> Value:
        """A parameter, state or an input."""
        (tensor,) = self.assembly.op(name, kind, [], [held.type], module=module, **columns)
        self.recorded.append(key)
        value = Value(held.type, held.strides, tensor)
        self._keep(key, value)
        return value

    def call(self, key: Any, call: Call, *, module: str, mutates: bool = False, several: bool, **columns: Any) -> None:
        """Add what a call does, if anything, and keep what it returns: one tensor, or a list of `several`."""
        try:
            work = translate(call)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            what = f"{call.operator}: its arguments are not those of the operator of that name"
            raise InvalidInput(f"{what}: {error!r:.100}") from None
        if isinstance(work, Value):
            results = [Value(made.type, made.strides, work.tensor) for made in call.made[:1]]
        else:
            inputs = [self.assembly.view(value.tensor, value.type) for value in work.inputs]
            name = f"{module}.{call.operator}" if module else call.operator
            outputs = [made.type for made in call.made]
            made = self.assembly.op(name, work.kind, inputs, outputs, work.attributes, module=module, **columns)
            self.recorded.append(key)
            results = [Value(laid.type, laid.strides, tensor) for laid, tensor in zip(call.made, made, strict=True)]
            if work.kind == "view":
                for value in results:
                    self._memory[value.tensor.index] = self._home(work.inputs[0])
            if mutates:
                self._overwrite(call.tensors[0], results[0])
        if several:
            self.values[key] = results
            for i, value in enumerate(results):
                self._keep((key, i), value)
        elif results:
            self._keep(key, results[0])

    def graph(self) -> Graph:
        """Validate and freeze."""
        return self.assembly.graph()

    def _home(self, value: Value) -> int:
        return self._memory.get(value.tensor.index, value.tensor.index)

    def _keep(self, key: Any, value: Value) -> None:
        self.values[key] = value
        self._sharing.setdefault(self._home(value), []).append(key)

    def _overwrite(self, old: Value, new: Value) -> None:
        """Whoever reads that memory from now on waits for the call that wrote to it."""
        home = self._home(old)
        self._memory[new.tensor.index] = home
        for key in self._sharing.get(home, []):
            value = self.values[key]
            self.values[key] = Value(value.type, value.strides, new.tensor)


# ---- exported programs -----------------------------------------------------------------------------------------------


class _FxReader(Recorder):
    def __init__(self, program: ExportedProgram, name: str, state: tuple[str, ...]) -> None:
        super().__init__(name)
        self.program, self.state = program, state

    def reading(self) -> Reading:
        self._inputs()
        self._run(self.program.graph_module)
        graph = self.graph()
        nodes = dict(zip(graph.op_names, self.recorded, strict=True))
        return Reading(graph, {name: node for name, node in nodes.items() if node.op == "call_function"})

    def _inputs(self) -> None:
        """Parameters, buffers, constants and the arguments of the call. Tied parameters are one op."""
        from torch.export.graph_signature import InputKind

        signature = self.program.graph_signature
        specs = {spec.arg.name: spec for spec in signature.input_specs}
        written = {*signature.buffers_to_mutate.values()}
        first: dict[int, Value] = {}
        for node in self.program.graph_module.graph.nodes:
            if node.op != "placeholder":
                continue
            laid = _laid(node.meta.get("val"))
            spec = specs[node.name]
            if not isinstance(laid, Laid):
                self.values[node] = laid
            elif spec.kind in (InputKind.USER_INPUT, InputKind.TOKEN):
                kept = node.name.startswith(self.state) if self.state else False
                self.given(node, node.name, "state" if kept else "input", laid)
            else:
                if spec.kind == InputKind.BUFFER and not node.users:
                    continue  # kept by the module, but no part of the work
                path = str(spec.target)
                held = self.program.state_dict.get(path)
                if id(held) in first:
                    self._keep(node, first[id(held)])
                    continue
                kind = "state" if path in written else "parameter"
                value = self.given(node, path, kind, laid, module=path.rpartition(".")[0])
                if held is not None:
                    first[id(held)] = value

    def _run(self, module: GraphModule) -> None:
        import torch

        for node in module.graph.nodes:
            if node.op == "get_attr":
                found = module
                for part in str(node.target).split("."):
                    found = getattr(found, part)
                self.values[node] = found
            elif node.op == "call_function" and node.target is operator.getitem:
                self._pick(node)
            elif node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
                self._inline(node)
            elif node.op == "call_function":
                self._call(node)

    def _pick(self, node: Node) -> None:
        source, index = node.args
        key = (source, index)
        if key in self.values:
            self._keep(node, self.values[key])
        elif source in self.values:
            self.values[node] = self.values[source][index]

    def _call(self, node: Node) -> None:
        made = _laid(node.meta.get("val"))
        several = isinstance(made, (list, tuple))
        kept = made if several else [made]
        results = [laid for laid in kept if isinstance(laid, Laid)]
        if not results:  # an assertion, or a number
            self.values[node] = made
            return
        schema = node.target._schema  # type: ignore[union-attr]
        names = [argument.name for argument in schema.arguments]
        given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        name, mutates = operator_name(schema.name)
        call = Call(name, {key: self._resolved(value) for key, value in given.items()}, results)
        self.call(node, call, module=_module_of(node), mutates=mutates, several=several, **self._columns(node))
        if several and len(results) < len(kept):  # some outputs are not made: the others keep their places
            found = iter(self.values[node])
            placed = [next(found) if isinstance(laid, Laid) else None for laid in kept]
            for i, value in enumerate(placed):
                self.values[node, i] = value
            self.values[node] = placed

    def _columns(self, node: Node) -> dict[str, Any]:
        return {}

    def _inline(self, node: Node) -> None:
        """Regions with another setting of autograd or autocast are part of the work around them."""
        import torch

        given = [self._resolved(argument) for argument in node.args]
        bodies = [i for i, argument in enumerate(given) if isinstance(argument, torch.fx.GraphModule)]
        what = node.target.name()  # type: ignore[union-attr]
        if not what.startswith("wrap") or len(bodies) != 1:
            raise Unsupported(f"{what}: how often a branch or a loop runs is not known beforehand")
        body: GraphModule = given[bodies[0]]
        inner = [inside for inside in body.graph.nodes if inside.op == "placeholder"]
        for inside, value in zip(inner, given[bodies[0] + 1 :], strict=True):
            self._pass(inside, value)
        self._run(body)
        (output,) = [inside for inside in body.graph.nodes if inside.op == "output"]
        results = [self._resolved(result) for result in output.args[0]]
        self.values[node] = results
        for i, value in enumerate(results):
            self._pass((node, i), value)

    def _pass(self, key: Any, value: Any) -> None:
        if isinstance(value, Value):
            self._keep(key, value)
        else:
            self.values[key] = value

    def _resolved(self, argument: Any) -> Any:
        import torch

        if isinstance(argument, torch.fx.Node):
            return self.values[argument]
        if isinstance(argument, (list, tuple)):
            return [self._resolved(entry) for entry in argument]
        return whole(argument) if isinstance(argument, torch.SymInt) else argument


def operator_name(qualified: str) -> tuple[str, bool]:
    """The operator's name, without the namespace if that is ATen, and whether it writes to its first argument."""
    space, _, name = qualified.rpartition("::")
    in_place = name.endswith("_") and not name.endswith("__")
    name = name.removesuffix("_") if in_place else name
    return (name if space in ("aten", "") else f"{space}.{name}"), in_place


def _module_of(node: Node) -> str:
    """The path of the innermost module whose call this is; a second call of it is marked by "@1" in traces."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    entries = list(stack.values())
    return str(entries[-1][0]).partition("@")[0] if entries else ""


def _laid(value: Any) -> Any:
    """The type of what an op makes: tensors become `Laid`, lists stay lists."""
    import torch

    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        held = TensorType(dtype, tuple(whole(size) for size in value.shape))
        return Laid(held, tuple(whole(step) for step in value.stride()) if value.layout == torch.strided else ())
    if isinstance(value, (list, tuple)):
        return [_laid(entry) for entry in value]
    return whole(value) if isinstance(value, torch.SymInt) else value


def whole(size: Any) -> int:
    """A size as a number. A dynamic one is what it was for the example inputs."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is None:
        raise Unsupported("a shape depends on values that only a run can tell")
    return int(hint)


# ---- around an export ------------------------------------------------------------------------------------------------


def like(module: torch.nn.Module, *arguments: Any) -> tuple[Any, ...]:
    """The arguments on the meta device where the module is there, as nothing but their types matters."""
    import torch
    from torch.utils import _pytree

    held = next(module.parameters(), None)
    if held is None or held.device.type != "meta":
        return arguments
    moved = _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), arguments)
    return tuple(moved)


@contextmanager
def quiet() -> Iterator[None]:
    """What torch warns of while it traces is about the module's code, not about the graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Modules may be in different modes, and get theirs back."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in before:
            part.training = mode


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Attention as ops that are known, rather than one that does a whole layer."""
    from torch.backends import mha

    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(before)


def first_line(error: BaseException) -> str:
    """What torch says, without its many lines of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{lines[0] if lines else type(error).__name__:.300}"
