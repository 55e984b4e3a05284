"""A training step of a PyTorch module as one graph: forward, backward, and the update of every parameter.

The backward pass is the one that torch's autograd traces (graph "NAME-training"). Where it cannot be traced, it is
mirrored from the forward pass (graph "NAME-training-mirrored", see `transforms.with_backward`), and a warning says why.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from placewise.errors import InvalidInput, PlacewiseError, Unsupported
from placewise.graph import PHASES, Graph, Ints
from placewise.importers import require
from placewise.importers.aten import Laid, Value, views
from placewise.importers.torch_export import FxReader, export, first_line, laid_out, quiet, read
from placewise.importers.tracing import operator_name
from placewise.kinds import Op, TensorType
from placewise.transforms import with_backward

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule, Node

#: What each optimizer keeps for a parameter, as large as the parameter, under the names that torch has for it.
OPTIMIZERS: Final = {"sgd": (), "momentum": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq")}
_BACKWARD, _UPDATE = PHASES.index("backward"), PHASES.index("update")


def training_step(
    module: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: str = "adam",
    colocate: bool = False,
    name: str | None = None,
) -> Graph:
    """One step of training a module that is called with these arguments.

    `loss` makes one number of what the module returns. Without it, that is the loss itself, if it is one number or has
    one as its `loss`; else the sum of all outputs stands for it. A parameter, its optimizer state and its update always
    share a device. With `colocate`, so do the forward and backward of an op, and the parameters that only it reads.
    """
    torch = require("torch", "torch")
    if optimizer not in OPTIMIZERS:
        raise InvalidInput(f"optimizer: must be one of {', '.join(OPTIMIZERS)}, found {optimizer!r:.60}")
    if not isinstance(module, torch.nn.Module):
        raise InvalidInput(f"module: must be a torch.nn.Module, found {module!r:.60}")
    called = (name or type(module).__name__).removesuffix("-training")
    try:
        joint = _joint(module, tuple(args), dict(kwargs or {}), _checked(loss) if loss else _found_loss)
        return _JointReader(f"{called}-training", joint, _first_names(module), optimizer, colocate).step()
    except Unsupported as error:
        graph = mirrored(read(export(module, args, kwargs), called).graph, optimizer, colocate=colocate)
        warnings.warn(f"{called}: the backward pass is mirrored from the forward pass: {error}", stacklevel=2)
        return graph


def _checked(loss: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    """What is wrong with the loss is the user's to mend."""
    import torch

    def checked(output: Any) -> torch.Tensor:
        try:
            found = loss(output)
        except PlacewiseError:
            raise
        except Exception as error:
            raise InvalidInput(f"loss: {type(error).__name__}: {first_line(error)}") from error
        if not isinstance(found, torch.Tensor) or found.numel() != 1 or not found.is_floating_point():
            what = f"a {found.dtype} tensor {[*found.shape]}" if isinstance(found, torch.Tensor) else f"{found!r:.60}"
            raise InvalidInput(f"loss: must return one number, a floating-point tensor, found {what}")
        return found

    return checked


def _found_loss(output: Any) -> torch.Tensor:
    import torch
    from torch.utils import _pytree

    found = getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    if isinstance(output, torch.Tensor) and output.dim() == 0:
        return output
    floats = [
        part for part in _pytree.tree_leaves(output) if isinstance(part, torch.Tensor) and part.is_floating_point()
    ]
    if not floats:
        raise InvalidInput("the module returns nothing that could be minimised: pass a loss")
    return reduce(torch.add, [part.sum() for part in floats])


def mirrored(graph: Graph, optimizer: str, *, colocate: bool = False) -> Graph:
    """A training step from a forward graph alone: each op gets a backward op of twice its work.

    What shares a device is what does in `training_step`, and what already does in the graph.
    """
    if optimizer not in OPTIMIZERS:
        raise InvalidInput(f"optimizer: must be one of {', '.join(OPTIMIZERS)}, found {optimizer!r:.60}")
    kept = len(OPTIMIZERS[optimizer])
    step = with_backward(graph, optimizer_bytes_per_parameter_byte=float(kept))
    kinds = tuple(optimizer if kind == "update" else kind for kind in step.op_kinds)
    flops, moved = step.flops.copy(), step.bytes_accessed.copy()
    for op in np.flatnonzero(step.phase == _UPDATE).tolist():
        size = step.resident_bytes[op - graph.num_ops]
        held = TensorType("int8", (int(size),))  # so many bytes; the work is counted by elements below
        moved[op] = Op(optimizer, [held] * (2 + kept), []).bytes_accessed
        flops[op] = Op(optimizer, [held], []).flops / TensorType(step.op_dtypes[op], ()).bytes
    alone = step.group[: graph.num_ops]  # each op with its mirror, each parameter with its update
    group = _homes(graph, alone) if colocate else np.where(graph.is_stored, alone, graph.group)
    return replace(
        step,
        name=f"{graph.name}-training-mirrored",
        op_kinds=kinds,
        flops=flops,
        bytes_accessed=moved,
        group=np.tile(group, 2).astype(step.group.dtype),
    )


def _homes(graph: Graph, group: Ints) -> Ints:
    """Groups in which a parameter that only one op reads is with that op."""
    homes = group.copy()
    start, edges = graph.out_edges
    for op in np.flatnonzero(graph.is_stored & (graph.group < 0)).tolist():
        readers = set(graph.consumers[edges[start[op] : start[op + 1]]].tolist())
        if len(readers) == 1:
            homes[op] = group[readers.pop()]
    return homes


def _first_names(module: torch.nn.Module) -> dict[str, str]:
    """The path of each parameter: the first that it has, where it is tied to others."""
    first: dict[int, str] = {}
    return {path: first.setdefault(id(held), path) for path, held in module.named_parameters(remove_duplicate=False)}


# ---- the joint graph of forward and backward -------------------------------------------------------------------------


def _joint(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], torch.Tensor]
) -> GraphModule:
    """Forward and backward. The interface of torch that traces autograd is young: not every module can be traced."""
    try:
        with quiet():
            return _traced(module, args, kwargs, loss)
    except PlacewiseError:
        raise
    except Exception as error:
        raise Unsupported(f"torch cannot trace autograd in it: {first_line(error)}") from error


def _traced(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], torch.Tensor]
) -> GraphModule:
    """What autograd does, traced with tensors that have a type, but no content."""
    import torch
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx import traceback
    from torch.utils import _pytree

    class Step(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return loss(self.inner(*args, **kwargs))

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(given: torch.Tensor) -> torch.Tensor:
        with mode:
            made = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="cpu")
        return torch.nn.Parameter(made, given.requires_grad) if isinstance(given, torch.nn.Parameter) else made

    held = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
    step = Step(copy.deepcopy(module, {key: fake(tensor) for key, tensor in held.items()}).train())
    _tell_modules(step.inner)
    given_args, given_kwargs = _pytree.tree_map_only(torch.Tensor, fake, (args, kwargs))
    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(traceback.preserve_node_meta())
        stack.enter_context(_as_if_exported())
        return aot_export_joint_with_descriptors(stack, step, given_args, given_kwargs, decompositions={}).graph_module


@contextmanager
def _as_if_exported() -> Iterator[None]:
    """Modules ask torch whether they are exported, and then do not look at what their tensors hold."""
    from torch import compiler

    before = compiler._is_compiling_flag, compiler._is_exporting_flag
    compiler._is_compiling_flag = compiler._is_exporting_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = before


def _tell_modules(module: torch.nn.Module) -> None:
    """While a module runs, nodes that are traced carry its path, as they do when torch exports it."""
    from torch.fx import traceback

    running = [""]

    def watch(path: str, part: torch.nn.Module) -> None:
        def enter(*_: Any) -> None:
            running.append(path)
            tell()

        def leave(*_: Any) -> None:
            running.pop()
            tell()

        part.register_forward_pre_hook(enter)
        part.register_forward_hook(leave, always_call=True)

    def tell() -> None:
        traceback.current_meta["nn_module_stack"] = {running[-1]: (running[-1], "")}

    for path, part in module.named_modules():
        watch(path, part)


class _JointReader(FxReader):
    """Forward and backward as traced, and an update for every gradient of a parameter."""

    def __init__(
        self, name: str, joint: GraphModule, first_names: Mapping[str, str], optimizer: str, colocate: bool
    ) -> None:
        super().__init__(name)
        self.joint, self.first_names, self.optimizer, self.colocate = joint, first_names, optimizer, colocate
        self.groups: dict[Hashable, int] = {}  # by what they are about: an op of the forward pass, or a parameter
        self.parameters: dict[str, list[Node]] = {}  # by path; several nodes where it is tied

    def step(self) -> Graph:
        nodes = list(self.joint.graph.nodes)
        given = [node for node in nodes if node.op == "placeholder"]
        (output,) = [node for node in nodes if node.op == "output"]
        results = list(zip(output.meta["desc"], cast("Sequence[Node | None]", output.args[0]), strict=True))
        for node in given:
            if type(node.meta["desc"]).__name__ == "ParamAOTInput":
                self.parameters.setdefault(self._path(node), []).append(node)
        changed = {what.mutated_input for what, _ in results if hasattr(what, "mutated_input")}
        for node in given:
            self._take(node, changed)
        self.run(self.joint)
        made = {what.grad_of: self.values[node] for what, node in results if hasattr(what, "grad_of") and node}
        for path, parameter in self.parameters.items():
            gradients = [made[node.meta["desc"]] for node in parameter if node.meta["desc"] in made]
            if gradients:
                self._update(path, gradients)
        return self.graph()

    def columns(self, node: Node) -> dict[str, Any]:
        """Autograd numbers the ops that it records; what it does for them in the backward pass has the same number."""
        columns = {"phase": _BACKWARD} if node.meta.get("partitioner_tag") == "is_backward" else {}
        if self.colocate and (number := node.meta.get("seq_nr")) is not None:
            columns["group"] = self._group(number)
        return columns

    def _take(self, node: Node, changed: set[Any]) -> None:
        """Add an input of the joint graph."""
        laid, what = laid_out(node.meta.get("val")), node.meta["desc"]
        role = type(what).__name__
        if not isinstance(laid, Laid):
            self.values[node] = laid
        elif role == "TangentAOTInput":
            self.given(node, "loss_gradient", "fill", laid, phase=_BACKWARD)
        elif role in ("ParamAOTInput", "BufferAOTInput"):
            path = self._path(node)
            if role == "ParamAOTInput" and node is not self.parameters[path][0]:
                self.keep(node, self.values[self.parameters[path][0]])
                return
            group = self._group_of(path) if role == "ParamAOTInput" else -1
            kind = "state" if what in changed else "parameter"
            self.given(node, path, kind, laid, module=path.rpartition(".")[0], group=group)
        else:
            self.given(node, f"input_{getattr(what, 'idx', node.name)}", "input", laid)

    def _update(self, path: str, gradients: list[Value]) -> None:
        """The parameter and its state are written where they are, so that no tensor leaves the update."""
        held: Value = self.values[self.parameters[path][0]]
        where: dict[str, Any] = {"module": path.rpartition(".")[0], "group": self._group_of(path), "phase": _UPDATE}
        total, *rest = [self.assembly.view(value.tensor, value.type) for value in gradients]
        for gradient in rest:
            (total,) = self.assembly.op(f"{path}.add", "add", [total, gradient], [held.type], **where)
        read = [self.assembly.view(held.tensor, held.type), total]
        for part in OPTIMIZERS[self.optimizer]:
            read += self.assembly.op(f"{path}.{part}", "state", [], [held.type], **where)
        self.assembly.op(f"{path}.{self.optimizer}", self.optimizer, read, [], **where)

    def _path(self, node: Node) -> str:
        path = str(node.meta["desc"].target).removeprefix("inner.")
        return self.first_names.get(path, path)

    def _group_of(self, path: str) -> int:
        """Its own or, where ops are colocated and one alone reads the parameter, that op's."""
        readers = {user.meta.get("seq_nr") for node in self.parameters[path] for user in _readers(node)}
        return self._group(readers.pop() if self.colocate and len(readers) == 1 else path)

    def _group(self, what: Hashable) -> int:
        return self.groups.setdefault(what, len(self.groups))


def _readers(node: Node) -> Iterator[Node]:
    """Who reads a parameter in the forward pass, also through views."""
    for user in node.users:
        if user.meta.get("partitioner_tag") == "is_backward" or not hasattr(user.target, "_schema"):
            continue
        if views(operator_name(user.target._schema.name)[0]):
            yield from _readers(user)
        else:
            yield user
