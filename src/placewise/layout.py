"""A PyTorch module as a program whose calls are laid out over the devices of a plan: which runs where, and when.

The module is exported as it is, and its ops are found in the plan. What is no op (a view, an item) is where it reads
from; writes, and random numbers, stay in the order of the program.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree

from placewise.errors import InvalidInput, Unsupported
from placewise.graph import Graph
from placewise.importers import torch_export
from placewise.plans import Plan


def exported(
    plan: Plan, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.export.ExportedProgram, Mapping[str, Node], dict[str, int]]:
    """The module as a program in the mode that it is in, the node of each of its ops, and the plan's op of each.

    Weights may be anywhere by now, so the program is exported with all of it on the CPU. torch lays some results out
    otherwise on the meta device, which shows as a copy more or less: a plan of a graph that was exported there is for
    the program that is exported there.
    """
    args, kwargs = _pytree.tree_map_only(torch.Tensor, lambda value: value.cpu(), (tuple(args), dict(kwargs)))
    elsewhere = any(tensor.device.type != "cpu" for tensor in (*module.parameters(), *module.buffers()))
    forms = [_like(module, "cpu") if elsewhere else module, _like(module, "meta")]
    name, graph = plan.problem.graph.name, plan.problem.graph
    if (graph.phase != 0).any():
        _check_parts(graph, module)
        program = torch_export.export(forms[0], args, kwargs, in_its_mode=True)
        reading = torch_export.read(program, name)
        matched = _alike(graph, reading.graph)
        numbered = (f"input_{number}" for number in range(len(program.graph_signature.user_inputs)))
        inputs = zip(program.graph_signature.user_inputs, numbered, strict=True)
        matched |= {str(mine): graph.op_index(theirs) for mine, theirs in inputs if theirs in graph.op_names}
        return program, reading.nodes, matched
    for form in forms:
        try:
            program = torch_export.export(form, args, kwargs)
            reading = torch_export.read(program, name)
            matched = _matched(plan, reading)
        except InvalidInput:
            if form is forms[-1]:
                raise
        else:
            break
    if any(part.training for part in module.modules()):
        # It is the plan's model: as it is for inference, it has the plan's ops. In this mode it may have others.
        program, evaluated = torch_export.export(form, args, kwargs, in_its_mode=True), reading.graph
        reading = torch_export.read(program, name)
        alike = {other: evaluated.op_names[i] for other, i in _alike(evaluated, reading.graph).items()}
        matched = {other: matched[one] for other, one in alike.items() if one in matched}
    _without_idle_masks(program)
    return program, reading.nodes, matched


def _like(module: nn.Module, device: str) -> nn.Module:
    """The module with weights and buffers of the same shapes elsewhere, which nobody has written or will read."""
    shapes: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device=device, requires_grad=False)
        shapes[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, shapes)


def _matched(plan: Plan, reading: torch_export.Reading) -> dict[str, int]:
    """The module's op names to the plan's ops: by name or, where a file has lost names, one after the other."""
    graph, other = plan.problem.graph, reading.graph
    if not set(graph.op_names) <= set(other.op_names):
        mine, module = _computing(graph), _computing(other)
        if [graph.op_signatures[i] for i in mine] == [other.op_signatures[i] for i in module]:
            return {other.op_names[j]: i for i, j in zip(mine, module, strict=True)}
    plan.check_model(other)
    return {name: i for i, name in enumerate(graph.op_names)}


def _computing(graph: Graph) -> list[int]:
    signatures = zip(graph.op_kinds, graph.op_signatures, graph.is_stored, strict=True)
    return [i for i, (kind, signature, stored) in enumerate(signatures) if signature and not stored and kind != "input"]


def _alike(graph: Graph, other: Graph) -> dict[str, int]:
    """The op names of a program to the ops of a graph that is of the same module in another mode, or in training.

    What is of one kind in one module of the forward pass is paired one after the other. The rest goes with what it
    reads.
    """
    known: dict[tuple[str, str], list[int]] = {}
    for i in np.flatnonzero((graph.phase == 0) & ~graph.is_stored).tolist():
        known.setdefault((graph.op_modules[i], graph.op_kinds[i]), []).append(i)
    found: dict[str, int] = {}
    for name, module, kind in zip(other.op_names, other.op_modules, other.op_kinds, strict=True):
        if ops := known.get((module, kind)):
            found[name] = ops.pop(0)
    return found


def _check_parts(graph: Graph, module: nn.Module) -> None:
    """A training step has autograd's ops, which are not those of the module; but modules and parameters it shares."""
    modules, held = dict(module.named_modules()), dict(module.named_parameters(remove_duplicate=False))
    columns = zip(graph.op_names, graph.op_modules, graph.op_kinds, graph.resident_bytes.tolist(), strict=True)
    for name, path, kind, size in columns:
        if path not in modules:
            raise InvalidInput(f"not the model of this plan: it has no module {path!r:.80}")
        if kind == "parameter" and (name not in held or held[name].nbytes != size):
            found = f"{name!r:.80} of {held[name].nbytes} bytes, not {size:.0f}" if name in held else f"no {name!r:.80}"
            raise InvalidInput(f"not the model of this plan: it has {found}")


def _without_idle_masks(program: torch.export.ExportedProgram) -> None:
    """Attention is told in short what a mask says that is the same in every run: all, or what comes before.

    Libraries leave such masks out, but not when they are traced; with a mask, attention takes slower kernels.
    """
    attention = torch.ops.aten.scaled_dot_product_attention.default
    names = ("query", "key", "value")
    nodes = list(program.graph.nodes)
    if any(_others_see_what_is_written(node) for node in nodes):
        return
    found: dict[Node, torch.Tensor | None] = {}
    for node in nodes:
        if node.target is not attention:
            continue
        told = _told(node)
        mask = _constant(told["attn_mask"], found) if isinstance(told.get("attn_mask"), Node) else None
        if mask is None or mask.dtype != torch.bool:
            continue
        causal = mask.shape[-1] == mask.shape[-2] and torch.equal(mask, torch.ones_like(mask).tril())
        if causal or bool(mask.all()):
            node.args = tuple(told.pop(name) for name in names)
            node.kwargs = {**told, "attn_mask": None, "is_causal": causal}


def _constant(node: Node, found: dict[Node, torch.Tensor | None]) -> torch.Tensor | None:
    """What a node makes, if that is made of no input."""
    if node not in found:
        found[node] = None
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        made = {arg: _constant(arg, found) for arg in node.all_input_nodes} if node.op == "call_function" else {}
        if callable(node.target) and not random and all(value is not None for value in made.values()):
            args, kwargs = map_arg((node.args, node.kwargs), made.__getitem__)
            with torch.no_grad():
                value = node.target(*args, **kwargs)
            found[node] = value if isinstance(value, torch.Tensor) and not value.is_meta else None
    return found[node]


# ---- where its calls run ---------------------------------------------------------------------------------------------


class Layout:
    """A program laid out over devices: the device of each node, what crosses, and each device's calls in order."""

    def __init__(
        self, plan: Plan, program: torch.export.ExportedProgram, ops: Mapping[str, Node], index: Mapping[str, int]
    ) -> None:
        self.program, self.names = program, plan.problem.cluster.device_names
        self.prefetch = plan.problem.execution.prefetch
        nodes = [node for node in program.graph.nodes if node.op in ("placeholder", "call_function", "get_attr")]
        self.slot = {node: i for i, node in enumerate(nodes)}
        self.inputs = {node.name: node for node in nodes if node.op == "placeholder"}
        (output,) = [node for node in program.graph.nodes if node.op == "output"]
        self.results = list(output.args[0])
        op = {node: index[name] for name, node in ops.items() if name in index}
        self.op_of = {self.slot[node]: plan.problem.graph.op_names[i] for node, i in op.items()}
        given = {self.inputs[name]: index[name] for name in program.graph_signature.user_inputs if name in index}
        self.where = _where(plan, nodes, program, op | given)
        self.used = sorted({self.where[node] for node in nodes if node.op == "call_function"})
        _check_writes(nodes, self.where, self.names)
        self._ordered = _ordered(plan, nodes, op, len(self.used))
        #: Slots of ops that draw random numbers, and what those that come next on another device wait for.
        self.handed_on = _handed_on(self._ordered, self.where, self.slot)
        self.drawn_before = {after: slot for slot, after in self.handed_on.items()}
        #: Slots of what one device makes and others read, and how many others.
        self.crossing = {
            self.slot[node]: len(readers) for node in self._ordered if (readers := self.readers_elsewhere(node))
        }
        self.arguments = set(program.graph_signature.user_inputs)
        #: Weights that another device than their home reads.
        self.streamed = {
            node for name, node in self.inputs.items() if name not in self.arguments and self.readers_elsewhere(node)
        }

    def calls(self, device: int) -> list[Node]:
        """What a device runs, in order."""
        return [node for node in self._ordered if self.where[node] == device]

    def readers_elsewhere(self, node: Node) -> set[int]:
        """Other devices that read what a node makes."""
        return {self.where[user] for user in node.users if user in self.where} - {self.where[node]}


def _where(plan: Plan, nodes: Sequence[Node], program: Any, op: Mapping[Node, int]) -> dict[Node, int]:
    """The device of each node: that of its op, or, where it is none (a view, an item), of what it reads.

    A weight is where the plan has it, if it is an op there, else where it is read first.
    """
    place = plan.placement.tolist()
    where: dict[Node, int] = {}
    for node in nodes:
        if node.op == "call_function":
            sources = [where[arg] for arg in node.all_input_nodes if arg in where]
            where[node] = place[op[node]] if node in op else sources[0] if sources else -1
    first = next((d for d in where.values() if d >= 0), 0)
    for node in where:  # what reads nothing goes with who reads it
        if where[node] < 0:
            where[node] = next((where[user] for user in node.users if where.get(user, -1) >= 0), first)
    kept = {name: place[i] for i, name in enumerate(plan.problem.graph.op_names) if plan.problem.graph.is_stored[i]}
    specs = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs}
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            reader = next((where[user] for user in node.users if user in where), first)
            where[node] = place[op[node]] if node in op else kept.get(specs.get(node.name, ""), reader)
            if any(node in _written(user) for user in node.users):  # a copy of it would be written to in vain
                where[node] = reader
    return where


def _ordered(plan: Plan, nodes: Sequence[Node], op: Mapping[Node, int], devices: int) -> list[Node]:
    """All calls in an order in which each device may run its own: whatever is read comes before.

    It is the plan's order, or, of several devices, that in which the simulation starts the ops; what is no op comes
    right behind what it reads. A single device runs the program as it is written. So do programs that write to
    tensors, where readers must not be moved past the write.
    """
    calls = [node for node in nodes if node.op == "call_function"]
    if (plan.order is None and devices < 2) or any(_others_see_what_is_written(node) for node in calls):
        return calls
    graph = plan.problem.graph
    depth = np.empty(graph.num_ops, np.int64)
    depth[graph.topological_order] = np.arange(graph.num_ops)
    starts = plan.timeline.start
    order = np.lexsort((depth, plan.timeline.finish, starts)) if plan.order is None else np.asarray(plan.order)
    turn = np.empty(graph.num_ops, np.int64)
    turn[order] = np.arange(graph.num_ops)
    key: dict[Node, int] = {}
    drawn = -1  # random numbers are drawn in the order of the program, as without a plan
    for node in calls:
        before = max((key[arg] for arg in node.all_input_nodes if arg in key), default=-1)
        before = max(before, drawn) if _draws(node) else before
        key[node] = max(before, int(turn[op[node]])) if node in op else before
        drawn = key[node] if _draws(node) else drawn
    return sorted(calls, key=key.__getitem__)


def _handed_on(ordered: Sequence[Node], where: Mapping[Node, int], slot: Mapping[Node, int]) -> dict[int, int]:
    """Each call that draws random numbers right before one on another device, and that one.

    So seeds have the results that they have without a plan: the generator is one for all.
    """
    drawing = [node for node in ordered if _draws(node)]
    return {slot[a]: slot[b] for a, b in pairwise(drawing) if where[a] != where[b]}


def _check_writes(nodes: Sequence[Node], where: Mapping[Node, int], names: Sequence[str]) -> None:
    """What shares memory with a tensor that is written to must stay on one device, else some would see old values."""
    writers = [node for node in nodes if node.op == "call_function" and _written(node)]
    if not writers:
        return
    root: dict[Node, Node] = {}
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        told = _told(node)
        aliased = [
            told[declared.name] for declared in schema.arguments
            if declared.alias_info is not None and isinstance(told.get(declared.name), Node)
        ] if schema else []  # fmt: skip
        if node.op == "call_function" and not schema:  # an item of what a call returned
            aliased = node.all_input_nodes[:1]
        root[node] = root[aliased[0]] if aliased else node
    written = {root[arg]: node for node in writers for arg in _written(node)}
    for node in nodes:
        if root[node] in written:
            writer = written[root[node]]
            for other in (node, *(user for user in node.users if user in where)):
                if where[other] != where[writer]:
                    raise Unsupported(
                        f"{writer.name} ({writer.target}) on {names[where[writer]]} writes to a tensor that "
                        f"{other.name} shares on {names[where[other]]}: pin both to one device"
                    )


# ---- what calls do besides returning something -----------------------------------------------------------------------


def _told(node: Node) -> dict[str, Any]:
    """The arguments of a call by name."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _written(node: Node) -> list[Node]:
    """The arguments that a call changes; `detach_` has a result and leaves its argument as it is."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.target is torch.ops.aten.detach_.default:
        return []
    told = _told(node)
    found = [
        told.get(argument.name) for argument in schema.arguments if getattr(argument.alias_info, "is_write", False)
    ]
    if told.get("training") or told.get("use_input_stats"):  # of norms, which say nothing of it in their schemas
        found += [told.get("running_mean"), told.get("running_var")]
    return [arg for arg in found if isinstance(arg, Node)]


def _others_see_what_is_written(node: Node) -> bool:
    """Whether order matters beyond what is read: not for a buffer that this call alone reads."""
    changed = _written(node)
    shared = any(arg.op != "placeholder" or len(arg.users) > 1 for arg in changed)
    return bool(changed) and (shared or (bool(node.users) and node.target._schema.is_mutable))  # type: ignore[union-attr]


def _draws(node: Node) -> bool:
    """Whether a call draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    told = _told(node)
    idle = [told.get(name, True) for name in ("train", "training", "dropout")]
    drops = any(argument.name == "dropout_p" for argument in node.target._schema.arguments)  # type: ignore[union-attr]
    return all(idle) and bool(not drops or told.get("dropout_p", 0.0))
