"""PyTorch modules run as a plan says: a worker for each device, all at work at once.

Each worker runs the ops of its device, in the order of the program, as one function of plain calls that is written for
it. It waits only where it needs what another makes. Devices may be logical: several on one CPU, with threads of their
own, so that what overlaps is seen without a GPU. Autograd goes through: backward runs where torch runs it.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.fx import Node
from torch.utils import _pytree

from placewise.errors import InvalidInput, PlacewiseError, Unsupported
from placewise.importers import torch_export
from placewise.plans import Plan

_MISSING: Final = object()  # what was never made, because a worker failed


class _Aborted(Exception):
    """Another worker failed."""


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
    Several may be "cpu"; each of them has `threads`, by default an equal share of the cores.
    """
    program = torch_export.export(module, args, kwargs)
    reading = torch_export.read(program, plan.problem.graph.name)
    homes = _torch_devices(plan, devices or {})
    where = _devices_of_nodes(plan, program, reading)
    return PlacedModule(module, program, where, homes, plan.problem.cluster.device_names, threads)


class PlacedModule(nn.Module):
    """Call it like the module. `close` ends its workers; so does the end of the program."""

    def __init__(
        self,
        module: nn.Module,
        program: torch.export.ExportedProgram,
        where: Mapping[Node, int],
        homes: Sequence[torch.device],
        names: Sequence[str],
        threads: int | None,
    ) -> None:
        super().__init__()
        self.module = module
        self._program = program
        self._signature = program.graph_signature
        self._out = program.call_spec.out_spec
        nodes = [node for node in program.graph.nodes if node.op in ("placeholder", "call_function", "get_attr")]
        self._slot = {node: i for i, node in enumerate(nodes)}
        (output,) = [node for node in program.graph.nodes if node.op == "output"]
        self._results = list(output.args[0])
        used = sorted({where[node] for node in nodes if node.op == "call_function"})
        on_cpu = sum(homes[d].type == "cpu" for d in used)
        each = threads or max(1, len(os.sched_getaffinity(0)) // max(1, on_cpu))
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._sources = [_source(entry, module, program) for entry in self._signature.input_specs]
        self._crossing = _crossing(nodes, where)
        self._scripts = [_Script(d, nodes, where, homes, self._slot, self._crossing, program) for d in used]
        self._workers = [_Worker(names[d], homes[d], each) for d in used]
        self.ran_on = {names[d]: [node.name for node in nodes if where[node] == d] for d in used}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run once."""
        slots: list[Any] = [_MISSING] * len(self._slot)
        for node, value in zip(self._inputs, self._given(args, kwargs), strict=True):
            slots[self._slot[node]] = value
        run = _Run(slots, {i: threading.Event() for i in self._crossing}, torch.is_grad_enabled())
        if not self._workers:
            return self._collected(slots)
        last = len(self._workers) - 1
        for worker, script in list(zip(self._workers, self._scripts, strict=True))[:last]:
            worker.start(run, script.function)
        self._workers[last].run_here(run, self._scripts[last].function)
        for worker in self._workers[:last]:
            worker.join()
        if run.failure is not None:
            raise run.failure
        return self._collected(slots)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.close()

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """A value for each input of the program: weights, buffers, constants, and the arguments of this call."""
        flat, spec = _pytree.tree_flatten((args, dict(kwargs)))
        if spec != self._program.call_spec.in_spec:
            raise InvalidInput("the arguments are not of the form that the module was placed with")
        arguments = iter(flat)
        return [next(arguments) if source is None else source() for source in self._sources]

    def _collected(self, slots: list[Any]) -> Any:
        found = [slots[self._slot[node]] if isinstance(node, Node) else node for node in self._results]
        wanted = set(self._signature.user_outputs)
        mine = [value for value, node in zip(found, self._results, strict=True)
                if not isinstance(node, Node) or node.name in wanted]  # fmt: skip
        return _pytree.tree_unflatten(mine, self._out)


def _source(entry: Any, module: nn.Module, program: Any) -> Callable[[], Any] | None:
    """What gives an input of the program its value; None for an argument of the call. Weights may be replaced."""
    from torch.export.graph_signature import InputKind

    path = str(entry.target)
    if entry.kind == InputKind.USER_INPUT:
        return None
    if entry.kind in (InputKind.PARAMETER, InputKind.BUFFER):
        owner, _, name = path.rpartition(".")
        with suppress(AttributeError):
            held = module.get_submodule(owner)
            getattr(held, name)
            return lambda: getattr(held, name)
    constant = program.constants[path] if path in program.constants else program.state_dict[path]
    return lambda: constant


# ---- where ops run ---------------------------------------------------------------------------------------------------


def _torch_devices(plan: Plan, given: Mapping[str, str]) -> list[torch.device]:
    cluster, homes, gpus = plan.problem.cluster, [], 0
    for unknown in given.keys() - set(cluster.device_names):
        raise InvalidInput(f"devices: there is no device {unknown!r:.60}; there are {', '.join(cluster.device_names)}")
    for device in cluster.devices:
        name = given.get(device.name)
        if name is None:
            name = "cpu" if device.kind == "cpu" else f"cuda:{gpus}"
        gpus += device.kind != "cpu"
        try:
            homes.append(torch.device(name))
        except RuntimeError as error:
            raise InvalidInput(f"devices: {device.name} = {name!r:.60}: {torch_export.first_line(error)}") from None
    for d in sorted(set(plan.placement.tolist())):
        count = torch.cuda.device_count()
        if homes[d].type == "cuda" and (homes[d].index or 0) >= count:
            raise InvalidInput(
                f"the plan uses {cluster.device_names[d]} as {homes[d]}, and torch sees {count} CUDA devices; say what "
                f"it is, as in devices={{{cluster.device_names[d]!r}: 'cpu'}}"
            )
    return homes


def _devices_of_nodes(plan: Plan, program: Any, reading: torch_export.Reading) -> dict[Node, int]:
    """The device of each node: that of its op, or, where it is none (a view, an item), of what it reads."""
    graph = plan.problem.graph
    place = dict(zip(graph.op_names, plan.placement.tolist(), strict=True))
    _check_same(plan, reading)
    of_node = {node: name for name, node in reading.nodes.items()}
    where: dict[Node, int] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if hasattr(node.target, "_schema") and node.target._schema.is_mutable:
            raise Unsupported(
                f"{node.name} writes to a tensor that others may read ({node.target}); use its other form"
            )
        name = of_node.get(node)
        sources = [where[arg] for arg in node.all_input_nodes if arg in where]
        where[node] = place[name] if name in place else sources[0] if sources else -1
    first = next((d for d in where.values() if d >= 0), 0)
    for node in where:  # what reads nothing goes with who reads it
        if where[node] < 0:
            where[node] = next((where[user] for user in node.users if where.get(user, -1) >= 0), first)
    for node in program.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            where[node] = next((where[user] for user in node.users if user in where), first)
    return where


def _check_same(plan: Plan, reading: torch_export.Reading) -> None:
    graph = plan.problem.graph
    theirs = dict(zip(reading.graph.op_names, reading.graph.op_signatures, strict=True))
    for name, signature in zip(graph.op_names, graph.op_signatures, strict=True):
        if name not in theirs:
            raise InvalidInput(f"not the model of this plan: it has no op {name!r:.80}")
        if signature and theirs[name] != signature:
            raise InvalidInput(
                f"not the model of this plan: op {name!r:.80} is {theirs[name]:.120}, not {signature:.120}"
            )


def _crossing(nodes: Sequence[Node], where: Mapping[Node, int]) -> set[int]:
    """Slots of what one device makes and another reads."""
    return {
        i for i, node in enumerate(nodes)
        if node.op == "call_function" and any(where.get(user, where[node]) != where[node] for user in node.users)
    }  # fmt: skip


# ---- what workers run ------------------------------------------------------------------------------------------------


class _Script:
    """The calls of one device as a function `run(slots, ready)`."""

    def __init__(
        self, device: int, nodes: Sequence[Node], where: Mapping[Node, int], homes: Sequence[torch.device],
        slot: Mapping[Node, int], crossing: set[int], program: Any,
    ) -> None:  # fmt: skip
        self._slot, self._home = slot, homes[device]
        self._names: dict[str, Any] = {"fetch": _fetch, "device": self._home}
        mine = [node for node in nodes if where[node] == device and node.op == "call_function"]
        turn = {node: position for position, node in enumerate(mine)}
        held: set[Node] = set()
        lines: list[str] = []
        for position, node in enumerate(mine):
            for arg in node.all_input_nodes:
                if arg in held:
                    continue
                held.add(arg)
                i = slot[arg]
                if arg.op == "get_attr":
                    self._names[f"c{i}"] = getattr(program.graph_module, str(arg.target))
                    lines.append(f"v{i} = c{i}")
                elif i in crossing and where[arg] != device:
                    lines += [f"ready[{i}].wait()", f"v{i} = fetch(slots[{i}], device)"]
                else:
                    lines.append(f"v{i} = fetch(slots[{i}], device)")
            i = slot[node]
            held.add(node)
            self._names[f"f{i}"] = node.target
            inside = [self._text(part) for part in node.args]
            inside += [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]
            lines.append(f"v{i} = f{i}({', '.join(inside)})")
            kept = any(user.op == "output" for user in node.users)
            if i in crossing or kept:
                lines.append(f"slots[{i}] = v{i}")
            if i in crossing:
                lines.append(f"ready[{i}].set()")
            # What nobody here reads any more is let go, so that memory is held no longer than the plan says.
            for arg in (*node.all_input_nodes, node):
                if all(turn.get(user, -1) <= position for user in arg.users):
                    lines.append(f"v{slot[arg]} = None")
        body = "\n    ".join(lines) or "pass"
        exec(f"def run(slots, ready):\n    {body}\n", self._names)
        self.function: Callable[[list[Any], dict[int, threading.Event]], None] = self._names["run"]

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


def _fetch(value: Any, device: torch.device) -> Any:
    """What another device made, here."""
    if value is _MISSING:
        raise _Aborted
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    if isinstance(value, (list, tuple)):
        return type(value)(_fetch(part, device) for part in value)
    return value


@dataclass
class _Run:
    """One call of the module."""

    slots: list[Any]
    ready: dict[int, threading.Event]
    with_gradients: bool
    failure: BaseException | None = field(default=None)

    def fail(self, error: BaseException) -> None:
        """The first failure counts. Whoever waits is let go, and finds nothing."""
        if self.failure is None or isinstance(self.failure, _Aborted):
            self.failure = error
        for event in self.ready.values():
            event.set()


class _Worker:
    """A thread that runs what a device runs. It begins with the first call that needs it."""

    def __init__(self, name: str, home: torch.device, threads: int) -> None:
        self._name, self._home, self._threads = name, home, threads
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done = threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def start(self, run: _Run, function: Callable[..., None]) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._serve, name=f"placewise {self._name}", daemon=True)
            self._thread.start()
        self._jobs.put((run, function))

    def join(self) -> None:
        self._done.acquire()

    def close(self) -> None:
        self._jobs.put(None)

    def run_here(self, run: _Run, function: Callable[..., None]) -> None:
        """In the thread that calls, with this device's threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            self._work(run, function)
        finally:
            torch.set_num_threads(before)

    def _serve(self) -> None:
        torch.set_num_threads(self._threads)
        while (job := self._jobs.get()) is not None:
            self._work(*job)
            self._done.release()

    def _work(self, run: _Run, function: Callable[..., None]) -> None:
        try:
            with torch.set_grad_enabled(run.with_gradients):
                if self._home.type == "cuda":
                    with torch.cuda.device(self._home):
                        function(run.slots, run.ready)
                        torch.cuda.synchronize(self._home)
                else:
                    function(run.slots, run.ready)
        except _Aborted as error:
            run.fail(error)
        except torch.OutOfMemoryError as error:
            run.fail(PlacewiseError(f"{self._name} has not enough memory: {torch_export.first_line(error)}"))
        except BaseException as error:
            run.fail(error)
