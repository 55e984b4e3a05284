"""PyTorch modules run op by op as a plan says: a worker for each device, all at work at once.

Each worker runs the ops of its device as one function of plain calls that is written for it: in the plan's order, or in
that of its simulation. It waits only where it needs what another makes. Weights are where they are read, or, where the
plan keeps them elsewhere, are fetched in each run, ahead of time. Devices may be logical: several on one CPU, with
threads of their own, so that what overlaps is seen without a GPU. Autograd goes through: backward runs where torch runs
it.
"""

from __future__ import annotations

import copy
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree

from placewise.errors import InvalidInput, PlacewiseError, Unsupported
from placewise.graph import Graph
from placewise.importers import torch_export
from placewise.machine import keep_memory
from placewise.plans import Plan
from placewise.ports import Port, port, torch_devices

#: How often whoever waits for a worker looks whether it is still there.
_LOOK: Final = 0.5  # seconds


class _Aborted(Exception):
    """Another worker failed."""


class Ran(NamedTuple):
    """One op in one run."""

    op: str
    device: str  # of the cluster: the worker that ran it
    seconds: float
    on: str  # where torch says that its result is


def placed(
    plan: Plan,
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: Mapping[str, str] | None = None,
    threads: int | None = None,
) -> PlacedModule:
    """The module, to be called as before with arguments of the same shapes, run as the plan says.

    `devices` says what the cluster's devices are to torch: by default a CPU is "cpu" and GPUs are "cuda:0" and so on.
    Several may be "cpu"; each of them has `threads`, by default an equal share of the cores, whether the plan uses all
    of them or not. Weights move to the device that reads them: the module itself is changed. With a CPU among the
    devices, the process keeps memory that is freed (`machine.keep_memory`).
    """
    homes = torch_devices(plan, devices or {})
    if any(homes[d].type == "cpu" for d in plan.placement.tolist()):
        keep_memory()
    without = next((name for name, tensor in module.named_parameters() if tensor.is_meta), None)
    if without is not None:
        raise InvalidInput(f"the module has no values to run with: {without} is on the meta device")
    layout = _Layout(plan, *_exported(plan, module, args, kwargs))
    try:
        return PlacedModule(module, layout, homes, threads)
    except torch.OutOfMemoryError as error:
        what = f"a device has not enough memory for its weights: {torch_export.first_line(error)}"
        raise PlacewiseError(what) from None


def _exported(
    plan: Plan, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[torch.export.ExportedProgram, Mapping[str, Node], dict[str, int]]:
    """The module as a program, the node of each of its ops, and the plan's op of each.

    Weights may be anywhere by now, so the program is exported with all of it on the CPU. torch lays some results out
    otherwise on the meta device, which shows as a copy more or less: a plan of a graph that was exported there is for
    the program that is exported there.
    """
    args, kwargs = _pytree.tree_map_only(torch.Tensor, lambda value: value.cpu(), (tuple(args), dict(kwargs or {})))
    elsewhere = any(tensor.device.type != "cpu" for tensor in (*module.parameters(), *module.buffers()))
    forms = [_like(module, "cpu") if elsewhere else module, _like(module, "meta")]
    for form in forms:
        try:
            program = torch_export.export(form, args, kwargs)
            reading = torch_export.read(program, plan.problem.graph.name)
            matched = _matched(plan, reading)
        except InvalidInput:
            if form is forms[-1]:
                raise
        else:
            break
    _without_idle_masks(program)
    return program, reading.nodes, matched


def _like(module: nn.Module, device: str) -> nn.Module:
    """The module with weights and buffers of the same shapes elsewhere, which nobody has written or will read."""
    shapes: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device=device, requires_grad=False)
        shapes[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, shapes)


def _without_idle_masks(program: torch.export.ExportedProgram) -> None:
    """Attention is told in short what a mask says that is the same in every run: all, or what comes before.

    Libraries leave such masks out, but not when they are traced; with a mask, attention takes slower kernels.
    """
    attention = torch.ops.aten.scaled_dot_product_attention.default
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    nodes = list(program.graph.nodes)
    if any(node.op == "call_function" and _writes(node) for node in nodes):
        return
    found: dict[Node, torch.Tensor | None] = {}
    for node in nodes:
        if node.target is not attention:
            continue
        told = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        mask = _constant(told["attn_mask"], found) if isinstance(told.get("attn_mask"), Node) else None
        if mask is None or mask.dtype != torch.bool:
            continue
        causal = mask.shape[-1] == mask.shape[-2] and torch.equal(mask, torch.ones_like(mask).tril())
        if causal or bool(mask.all()):
            node.args = tuple(told.pop(name) for name in names[:3])
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


class PlacedModule(nn.Module):
    """Call it like the module. `close` ends its workers; so does the end of a `with` block, and of the object."""

    def __init__(self, module: nn.Module, layout: _Layout, homes: Sequence[torch.device], threads: int | None) -> None:
        super().__init__()
        self.module, self._layout, self._homes = module, layout, homes
        on_cpu = sum(home.type == "cpu" for home in homes)  # a device is no faster for another's having no work
        each = threads or max(1, len(os.sched_getaffinity(0)) // max(1, on_cpu))
        self._sources = [_source(spec, module, layout, homes) for spec in layout.program.graph_signature.input_specs]
        self._ports = {d: port(homes[d]) for d in layout.used}
        self._scripts = [_Script(layout, d, homes, self._ports[d], timed=False) for d in layout.used]
        self._timed: list[_Script] = []
        on_gpu = [homes[d].type == "cuda" for d in layout.used]
        self._workers = [
            _Worker(layout.names[d], self._ports[d], 1 if gpu else each)
            for d, gpu in zip(layout.used, on_gpu, strict=True)
        ]
        # The thread that calls does the work of a CPU, if there is one: it has threads of OpenMP already, and those of
        # a second team would be more than there are cores, at which all of them go to sleep between ops.
        self._here = on_gpu.index(False) if False in on_gpu else 0
        weakref.finalize(self, _close, self._workers)
        #: Device to the ops that its worker runs.
        self.ran_on = {
            layout.names[d]: [layout.op_of.get(layout.slot[node], node.name) for node in layout.calls(d)]
            for d in layout.used
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run once."""
        return self._run(self._scripts, args, kwargs)[0]

    def timed(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Ran]]:
        """Run once with a clock at each op: what it returned, and how long which op took where."""
        if not self._timed:
            homes = {d: opening.device for d, opening in self._ports.items()}
            self._timed = [_Script(self._layout, d, homes, self._ports[d], timed=True) for d in self._layout.used]
        for script in self._timed:
            if isinstance(script.clock, _Marks):
                script.clock.again()
        result, run = self._run(self._timed, args, kwargs)
        notes = zip(self._workers, run.notes, strict=True)
        return result, [
            Ran(self._layout.op_of[slot], worker.name, _seconds(began, ended), "" if on is None else str(on))
            for worker, found in notes for slot, began, ended, on in found
        ]  # fmt: skip

    def brought(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, on the devices where the plan has them."""
        layout = self._layout
        nodes = [layout.inputs[name] for name in layout.program.graph_signature.user_inputs]
        flat, spec = _pytree.tree_flatten((args, dict(kwargs)))
        moved = [value.to(self._homes[layout.where[node]]) if isinstance(value, torch.Tensor) else value
                 for node, value in zip(nodes, flat, strict=True)]  # fmt: skip
        found: tuple[tuple[Any, ...], dict[str, Any]] = _pytree.tree_unflatten(moved, spec)
        return found

    def close(self) -> None:
        """End the workers."""
        _close(self._workers)

    def __enter__(self) -> PlacedModule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, scripts: Sequence[_Script], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, _Run]:
        layout = self._layout
        slots: list[Any] = [None] * len(layout.slot)
        for node, value in zip(layout.inputs.values(), self._given(args, kwargs), strict=True):
            slots[layout.slot[node]] = value
        run = _Run(slots, self._workers, layout.crossing)
        if scripts:
            jobs = list(zip(self._workers, scripts, run.notes, strict=True))
            worker, script, notes = jobs.pop(self._here)
            for another, its_script, its_notes in jobs:
                another.start(run, its_script.function, its_notes)
            worker.run_here(run, script.function, notes)
            for another, _, _ in jobs:
                another.join(run)
        if run.failure is not None:
            raise run.failure
        return self._collected(run), run

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """A value for each input of the program: weights, buffers, constants, and the arguments of this call."""
        flat, spec = _pytree.tree_flatten((args, dict(kwargs)))
        if spec != self._layout.program.call_spec.in_spec:
            raise InvalidInput("the arguments are not of the form that the module was placed with")
        arguments = iter(flat)
        return [next(arguments) if source is None else source() for source in self._sources]

    def _collected(self, run: _Run) -> Any:
        layout = self._layout
        wanted = set(layout.program.graph_signature.user_outputs)
        found = []
        for node in layout.results:
            if not isinstance(node, Node):
                found.append(node)
            elif node.name in wanted:
                found.append(run.slots[layout.slot[node]] if node.op == "placeholder" else run.results[node.name])
        return _pytree.tree_unflatten(found, layout.program.call_spec.out_spec)


def _source(spec: Any, module: nn.Module, layout: _Layout, homes: Sequence[torch.device]) -> Callable[[], Any] | None:
    """What gives an input of the program its value; None for an argument of the call.

    A weight moves to its home, and is looked up in each run: it may be replaced.
    """
    from torch.export.graph_signature import InputKind

    if spec.kind == InputKind.USER_INPUT:
        return None
    path, node = str(spec.target), layout.inputs[spec.arg.name]
    home, streamed = homes[layout.where[node]], node in layout.streamed
    if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
        owner, _, name = path.rpartition(".")
        held = module.get_submodule(owner)
        table: Any = held._parameters if name in held._parameters else held._buffers
        if name in table:
            table[name].data = _moved(table[name].data, home, streamed)
            return lambda: table[name]
    held_apart = layout.program.constants if path in layout.program.constants else layout.program.state_dict
    constant = held_apart[path]
    if isinstance(constant, torch.Tensor):
        constant = _moved(constant, home, streamed)
    return lambda: constant


def _moved(tensor: torch.Tensor, home: torch.device, streamed: bool) -> torch.Tensor:
    """At its home; pinned, if a GPU fetches it from there."""
    here = tensor.to(home)
    return here.pin_memory() if streamed and home.type == "cpu" and torch.cuda.is_available() else here


# ---- where ops run ---------------------------------------------------------------------------------------------------


class _Layout:
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
    return where


def _ordered(plan: Plan, nodes: Sequence[Node], op: Mapping[Node, int], devices: int) -> list[Node]:
    """All calls in an order in which each device may run its own: whatever is read comes before.

    It is the plan's order, or, of several devices, that in which the simulation starts the ops; what is no op comes
    right behind what it reads. A single device runs the program as it is written. So do programs that write to
    tensors, where readers must not be moved past the write.
    """
    calls = [node for node in nodes if node.op == "call_function"]
    if (plan.order is None and devices < 2) or any(_writes(node) for node in calls):
        return calls
    graph = plan.problem.graph
    depth = np.empty(graph.num_ops, np.int64)
    depth[graph.topological_order] = np.arange(graph.num_ops)
    starts = plan.timeline.start
    order = np.lexsort((depth, plan.timeline.finish, starts)) if plan.order is None else np.asarray(plan.order)
    turn = np.empty(graph.num_ops, np.int64)
    turn[order] = np.arange(graph.num_ops)
    key: dict[Node, int] = {}
    for node in calls:
        before = max((key[arg] for arg in node.all_input_nodes if arg in key), default=-1)
        key[node] = max(before, int(turn[op[node]])) if node in op else before
    return sorted(calls, key=key.__getitem__)


def _writes(node: Node) -> bool:
    """Whether a call changes what it is given; `detach_` has a result and leaves its argument as it is."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and node.target is not torch.ops.aten.detach_.default


def _check_writes(nodes: Sequence[Node], where: Mapping[Node, int], names: Sequence[str]) -> None:
    """What shares memory with a tensor that is written to must stay on one device, else some would see old values."""
    if not any(_writes(node) for node in nodes if node.op == "call_function"):
        return
    root: dict[Node, Node] = {}
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        aliased = [
            arg for declared, arg in zip(schema.arguments, node.args, strict=False)
            if declared.alias_info is not None and isinstance(arg, Node)
        ] if schema else []  # fmt: skip
        if node.op == "call_function" and not schema:  # an item of what a call returned
            aliased = node.all_input_nodes[:1]
        root[node] = root[aliased[0]] if aliased else node
    written = {root[node.args[0]]: node for node in nodes
               if node.op == "call_function" and _writes(node) and isinstance(node.args[0], Node)}  # fmt: skip
    for node in nodes:
        if root[node] in written:
            writer = written[root[node]]
            for other in (node, *(user for user in node.users if user in where)):
                if where[other] != where[writer]:
                    raise Unsupported(
                        f"{writer.name} ({writer.target}) on {names[where[writer]]} writes to a tensor that "
                        f"{other.name} shares on {names[where[other]]}: pin both to one device"
                    )


# ---- what workers run ------------------------------------------------------------------------------------------------


class _Script:
    """The calls of one device as a function."""

    def __init__(self, layout: _Layout, device: int, homes: Any, opening: Port, *, timed: bool) -> None:
        self._slot = layout.slot
        self.clock: Callable[[], Any] = _Marks() if opening.device.type == "cuda" else time.perf_counter
        self._names: dict[str, Any] = {
            "give": opening.give, "begin": opening.begin, "end": opening.end, "device": opening.device,
            "mark": opening.mark, "passed": opening.passed,
            "clock": self.clock, "on": _device_of,
        }  # fmt: skip
        self._layout, self._device = layout, device
        mine = layout.calls(device)
        turn = {node: position for position, node in enumerate(mine)}
        fetched, early = self._fetches(mine)
        marked = {reader for fetches in early.values() for reader, _ in fetches}
        lines: list[str] = [line for _, node in early.get(-1, ()) for line in self._begin(node)]
        held: set[Node] = set()
        for position, node in enumerate(mine):
            waits = position == 0
            for arg in node.all_input_nodes:
                if arg in held:
                    continue
                held.add(arg)
                i = layout.slot[arg]
                if arg.op == "get_attr":
                    constant = getattr(layout.program.graph_module, str(arg.target))
                    self._names[f"c{i}"] = constant.to(opening.device) if hasattr(constant, "to") else constant
                    lines.append(f"v{i} = c{i}")
                elif arg in fetched:
                    waits = True
                    lines.append(f"v{i} = end(v{i})")
                elif arg.op == "placeholder" and layout.where[arg] == device and arg.name not in layout.arguments:
                    lines.append(f"v{i} = slots[{i}]")
                else:
                    waits = True
                    lines += [*self._begin(arg), f"v{i} = end(v{i})"]
            # What is between ops counts for the next one, but not the wait for others.
            lines += ["t = clock()"] if timed and waits else []
            i = layout.slot[node]
            held.add(node)
            self._names[f"f{i}"] = node.target
            inside = [self._text(part) for part in node.args]
            inside += [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]
            lines.append(f"v{i} = f{i}({', '.join(inside)})")
            if timed and i in layout.op_of:
                lines += ["u = clock()", f"notes.append(({i}, t, u, on(v{i})))", "t = u"]
            if i in layout.crossing:
                to_other = any(homes[d].type != opening.device.type for d in layout.readers_elsewhere(node))
                lines += [f"slots[{i}] = give(v{i}, {to_other})", f"ready[{i}].release()"]
            if any(user.op == "output" for user in node.users):
                lines.append(f"results[{node.name!r}] = v{i}")
            # What nobody here reads any more is let go, so that memory is held no longer than the plan says.
            for arg in (*node.all_input_nodes, node):
                if all(turn.get(user, -1) <= position for user in arg.users):
                    lines.append(f"v{layout.slot[arg]} = None")
            lines += [f"m{position} = mark()"] if position in marked else []
            for reader, later in early.get(position, ()):
                lines += [f"passed(m{reader})", *self._begin(later), *(["t = clock()"] if timed else [])]
        body = "\n    ".join(lines) or "pass"
        exec(f"def run(slots, results, ready, take, notes):\n    {body}\n", self._names)
        self.function: Callable[..., None] = self._names["run"]

    def _fetches(self, mine: Sequence[Node]) -> tuple[set[Node], dict[int, list[tuple[int, Node]]]]:
        """Weights that are fetched for each run, and those whose fetch begins after each call (-1: at once).

        As in the simulation: for the k-th call that reads such weights when the one `prefetch` before it, which is
        named beside them, is through. The host waits for that, or it would have all of them on their way at once; so
        that the device has work meanwhile, one call more is under way by then, if there is one.
        """
        fetched: set[Node] = set()
        early: dict[int, list[tuple[int, Node]]] = {}
        readers: list[int] = []
        for position, node in enumerate(mine):
            new = [arg for arg in node.all_input_nodes
                   if arg in self._layout.streamed and self._layout.where[arg] != self._device
                   and arg not in fetched]  # fmt: skip
            if new:
                ahead = len(readers) - self._layout.prefetch
                reader = readers[ahead] if ahead >= 0 else -1
                after = min(reader + 1, position - 1) if ahead >= 0 else -1
                early.setdefault(after, []).extend((reader, weight) for weight in new)
                readers.append(position)
                fetched.update(new)
        return fetched, early

    def _begin(self, node: Node) -> list[str]:
        i = self._slot[node]
        return [f"v{i} = begin({f'take({i})' if i in self._layout.crossing else f'slots[{i}]'})"]

    def _text(self, value: Any) -> str:
        """An argument as code; what has no short form is passed by a name of its own."""
        if isinstance(value, Node):
            return f"v{self._slot[value]}"
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self._text(part) for part in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if value else "()"
        if isinstance(value, torch.device):
            return "device"
        if value is None or isinstance(value, (bool, int)):
            return repr(value)
        name = f"k{len(self._names)}"
        self._names[name] = value
        return name


class _Marks:
    """A clock for a GPU: marks in its stream. To make one takes longer than to record it, so runs use them again."""

    def __init__(self) -> None:
        self._made: list[torch.cuda.Event] = []
        self._used = 0

    def __call__(self) -> torch.cuda.Event:
        if self._used == len(self._made):
            self._made.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        mark = self._made[self._used]
        self._used += 1
        mark.record()
        return mark

    def again(self) -> None:
        """For another run."""
        self._used = 0


def _device_of(value: Any) -> torch.device | None:
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return first.device if isinstance(first, torch.Tensor) else None


def _seconds(began: Any, ended: Any) -> float:
    """Between two readings of a clock: of the host, or of a GPU whose work is done."""
    return float(ended - began) if isinstance(began, float) else float(began.elapsed_time(ended)) / 1e3


class _Run:
    """One call of the module."""

    def __init__(self, slots: list[Any], workers: Sequence[_Worker], crossing: Mapping[int, int]) -> None:
        self.slots, self._workers = slots, workers
        self._unread = dict(crossing)  # slot to how many devices have yet to read it
        self.results: dict[str, Any] = {}
        self.notes: list[list[Any]] = [[] for _ in workers]  # of each worker
        #: Held until what crosses is made. Plain locks are a tenth of the cost of events.
        self.ready = {i: threading.Lock() for i in crossing}
        for lock in self.ready.values():
            lock.acquire()
        self.with_gradients = torch.is_grad_enabled()
        self.failure: BaseException | None = None

    def take(self, slot: int) -> Any:
        """What another worker makes for a slot, once it is made. The last device to read it empties the slot."""
        lock = self.ready[slot]
        while not lock.acquire(timeout=_LOOK):
            self.check()
        value = self.slots[slot]
        self._unread[slot] -= 1
        if not self._unread[slot]:
            self.slots[slot] = None
        lock.release()  # for the next who reads it
        if self.failure is not None:
            raise _Aborted
        return value

    def check(self) -> None:
        """A worker that is gone makes nothing more."""
        for worker in self._workers:
            if worker.is_gone:
                self.fail(PlacewiseError(f"the worker of {worker.name} has ended, and its work is not done"))

    def fail(self, error: BaseException) -> None:
        """The first failure counts. Whoever waits is let go, and stops."""
        if self.failure is None or (isinstance(self.failure, _Aborted) and not isinstance(error, _Aborted)):
            self.failure = error
        for lock in self.ready.values():
            if lock.locked():
                with suppress(RuntimeError):  # it was made just now
                    lock.release()


class _Worker:
    """A thread that runs what a device runs. It begins with the first call that needs it."""

    def __init__(self, name: str, opening: Port, threads: int) -> None:
        self.name, self._port, self._threads = name, opening, threads
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def is_gone(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def start(self, run: _Run, function: Callable[..., None], notes: list[Any]) -> None:
        if self._closed:
            raise InvalidInput("the placed module is closed: apply the plan again")
        if self._thread is None or self.is_gone:
            self._jobs, self._done = queue.SimpleQueue(), threading.Semaphore(0)
            self._thread = threading.Thread(target=self._serve, name=f"placewise {self.name}", daemon=True)
            self._thread.start()
        self._jobs.put((run, function, notes))

    def join(self, run: _Run) -> None:
        """Until the job is done; a thread that is gone will never say so."""
        while not self._done.acquire(timeout=_LOOK):
            if self.is_gone:
                run.check()
                return

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(timeout=10)

    def run_here(self, run: _Run, function: Callable[..., None], notes: list[Any]) -> None:
        """In the thread that calls, with this device's threads."""
        if self._closed:
            raise InvalidInput("the placed module is closed: apply the plan again")
        before = torch.get_num_threads()
        if before != self._threads:
            torch.set_num_threads(self._threads)
        try:
            self._work(run, function, notes)
        finally:
            if before != self._threads:
                torch.set_num_threads(before)

    def _serve(self) -> None:
        torch.set_num_threads(self._threads)
        jobs, done = self._jobs, self._done
        while (job := jobs.get()) is not None:
            self._work(*job)
            job = None  # what the run made is not kept while this waits
            done.release()

    def _work(self, run: _Run, function: Callable[..., None], notes: list[Any]) -> None:
        home = self._port.device
        try:
            with (
                torch.set_grad_enabled(run.with_gradients),
                torch.cuda.device(home.index if home.type == "cuda" else -1),
            ):
                function(run.slots, run.results, run.ready, run.take, notes)
                self._port.finish()
        except torch.OutOfMemoryError as error:
            run.fail(PlacewiseError(f"{self.name} has not enough memory: {torch_export.first_line(error)}"))
        except MemoryError:
            run.fail(PlacewiseError(f"{self.name} has not enough memory"))
        except BaseException as error:
            short = "DefaultCPUAllocator" in str(error)  # how torch says so on a CPU
            what = f"{self.name} has not enough memory: {torch_export.first_line(error)}"
            run.fail(PlacewiseError(what) if short else error)


def _close(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.close()
