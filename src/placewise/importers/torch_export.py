"""PyTorch modules as graphs, by `torch.export`: nothing is run, and weights may be on the meta device or fake.

Ops stay as the module calls them (a linear layer is one op, and so is attention), each with the path of its module.
"""

from __future__ import annotations

import logging
import operator
import sys
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from placewise.errors import InvalidInput, PlacewiseError, Unsupported
from placewise.graph import Graph
from placewise.importers import require
from placewise.importers.aten import Call, Laid, Value
from placewise.importers.tracing import Recorder, operator_name, written
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
    module: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    in_its_mode: bool = False,
) -> ExportedProgram:
    """The module as torch exports it for inference, whatever mode it is in, or else as it is in its mode."""
    torch = require("torch", "torch")
    require("torch.export", "torch")
    if not isinstance(module, torch.nn.Module):
        raise InvalidInput(f"module: must be a torch.nn.Module, found {module!r:.60}")
    know_caches()
    try:
        with quiet(), torch.no_grad(), nullcontext() if in_its_mode else _evaluating(module), _plain_attention():
            given = like(module, tuple(args), dict(kwargs or {}))
            program: ExportedProgram = torch.export.export(module, *given, strict=False)
    except PlacewiseError:
        raise
    except Exception as error:
        raise Unsupported(f"torch cannot export {type(module).__name__}: {first_line(error)}") from error
    return program


def load_program(path: str | Path) -> ExportedProgram:
    """A saved program, to be run with weights of any content: none of the file's own are read (see `pt2`)."""
    from placewise.importers import pt2

    return export(*pt2.as_module(path))


def read(program: ExportedProgram, name: str, *, state: Sequence[str] = ()) -> Reading:
    """The graph of an exported program. Inputs whose names begin with one of `state` are kept between runs."""
    reader = FxReader(name)
    reader.take_inputs(program, tuple(state))
    reader.run(program.graph_module)
    return reader.reading()


# ---- exported programs -----------------------------------------------------------------------------------------------


class FxReader(Recorder):
    """Goes through the calls of a traced module; its nodes are the keys."""

    def reading(self) -> Reading:
        """What was read so far."""
        graph = self.graph()
        origins = zip(graph.op_names, self.origins, strict=True)
        return Reading(graph, {name: cast("Node", node) for name, node in origins if is_call(node)})

    def take_inputs(self, program: ExportedProgram, state: tuple[str, ...]) -> None:
        """Parameters, buffers, constants and the arguments of the call. Tied parameters are one op."""
        from torch.export.graph_signature import InputKind

        nodes = list(program.graph_module.graph.nodes)
        calls = [node for node in nodes if node.op == "call_function" and hasattr(node.target, "_schema")]
        changed = written((node.target._schema.name, node.args[0] if node.args else None, node) for node in calls)
        specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        first: dict[int, Value] = {}
        for node in nodes:
            if node.op != "placeholder":
                continue
            laid, spec = laid_out(node.meta.get("val")), specs[node.name]
            path = str(spec.target)
            held = program.state_dict.get(path)
            if not isinstance(laid, Laid):
                self.values[node] = laid
            elif spec.kind == InputKind.USER_INPUT:
                kept = bool(state) and node.name.startswith(state)
                self.given(node, node.name, "state" if kept else "input", laid)
            elif spec.kind == InputKind.BUFFER and not node.users:
                continue  # the module has it, but the work does not need it
            elif spec.kind == InputKind.CONSTANT_TENSOR and not laid.type.elements:
                self.empty(node, laid)
            elif id(held) in first:
                self.keep(node, first[id(held)])
            else:
                kind = "state" if node in changed else "parameter"
                value = self.given(node, path, kind, laid, module=path.rpartition(".")[0])
                if held is not None:
                    first[id(held)] = value

    def run(self, module: GraphModule) -> None:
        """Add all that the module calls."""
        import torch

        for node in module.graph.nodes:
            if node.op == "get_attr":
                self.values[node] = attrgetter(str(node.target))(module)
            elif node.op != "call_function":
                continue
            elif node.target is operator.getitem:
                self.keep(node, self.values[node.args[0]][node.args[1]])
            elif isinstance(node.target, torch._ops.HigherOrderOperator):
                self._inline(node)
            else:
                self._call(node)

    def _call(self, node: Node) -> None:
        outcome = laid_out(node.meta.get("val"))
        entries = outcome if isinstance(outcome, list) else [outcome]
        made = [laid for laid in entries if isinstance(laid, Laid)]
        if not made:  # an assertion, or a number
            self.values[node] = outcome
            return
        schema = cast("torch._ops.OpOverload", node.target)._schema
        names = [argument.name for argument in schema.arguments]
        given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        name, writes = operator_name(schema.name)
        call = Call(name, {key: self._resolved(value) for key, value in given.items()}, made)
        results = iter(self.call(node, call, module=_module_of(node), writes=writes, **self.columns(node)))
        placed = [next(results) if isinstance(laid, Laid) else None for laid in entries]
        if not isinstance(outcome, list):
            self.keep(node, placed[0])
            return
        for i, value in enumerate(placed):  # each by itself, as one may be written to
            self.keep((node, i), value)
        self.values[node] = _Several(self.values, node)

    def columns(self, node: Node) -> dict[str, Any]:
        """Other per-op fields of the graph, such as the phase."""
        return {}

    def _inline(self, node: Node) -> None:
        """Regions with another setting of autograd or autocast are part of the work around them."""
        import torch

        given = [self._resolved(argument) for argument in node.args]
        bodies = [i for i, argument in enumerate(given) if isinstance(argument, torch.fx.GraphModule)]
        what = str(node.target)
        if not what.startswith("wrap") or len(bodies) != 1:
            raise Unsupported(f"{what}: how often a branch or a loop runs is not known beforehand")
        body: GraphModule = given[bodies[0]]
        inner = [inside for inside in body.graph.nodes if inside.op == "placeholder"]
        for inside, value in zip(inner, given[bodies[0] + 1 :], strict=True):
            self.keep(inside, value)
        self.run(body)
        (output,) = [inside for inside in body.graph.nodes if inside.op == "output"]
        for i, result in enumerate(cast("Sequence[Any]", output.args[0])):
            self.keep((node, i), self._resolved(result))
        self.values[node] = _Several(self.values, node)

    def _resolved(self, argument: Any) -> Any:
        import torch

        if isinstance(argument, torch.fx.Node):
            return self.values[argument]
        if isinstance(argument, (list, tuple)):
            return [self._resolved(entry) for entry in argument]
        return whole(argument) if isinstance(argument, torch.SymInt) else argument


def is_call(key: Hashable) -> bool:
    """Whether this is a node that calls an operator."""
    return getattr(key, "op", None) == "call_function"


class _Several:
    """What a call with several results returned, as it is now."""

    def __init__(self, values: Mapping[Hashable, Any], node: Node) -> None:
        self._values, self._node = values, node

    def __getitem__(self, index: int) -> Any:
        return self._values[self._node, index]


def _module_of(node: Node) -> str:
    """The path of the innermost module whose call this is, or whose backward pass; "@1" marks a second call of it."""
    stack = node.meta.get("fwd_nn_module_stack") or node.meta.get("nn_module_stack") or {}
    entries = list(stack.values())
    return str(entries[-1][0]).partition("@")[0] if entries else ""


def laid_out(value: Any) -> Any:
    """The type of what an op makes: tensors become `Laid`, lists stay lists."""
    import torch

    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        held = TensorType(dtype, tuple(whole(size) for size in value.shape))
        return Laid(held, tuple(whole(step) for step in value.stride()) if value.layout == torch.strided else ())
    if isinstance(value, (list, tuple)):
        return [laid_out(entry) for entry in value]
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


def know_caches() -> None:
    """Models of transformers may take and return a cache, which torch must be told how to take apart."""
    if "transformers" in sys.modules:
        from transformers.integrations import executorch

        executorch.register_dynamic_cache_export_support()  # type: ignore[no-untyped-call]


@contextmanager
def quiet() -> Iterator[None]:
    """What torch warns of and logs while it traces is about the module's code; what fails, it raises as well."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


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
    said = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])  # the reason may have its own line
    return f"{said or type(error).__name__:.300}"
