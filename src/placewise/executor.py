"""PyTorch modules run op by op as a plan says: a worker for each device, all at work at once.

Each worker runs the ops of its device as one function of plain calls that is written for it: in the plan's order, or in
that of its simulation. It waits only where it needs what another makes. Weights are where they are read, or, where the
plan keeps them elsewhere, are fetched in each run, ahead of time. Devices may be logical: several on one CPU, with
threads of their own, so that what overlaps is seen without a GPU. Autograd goes through: backward runs where torch runs
it.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.fx import Node
from torch.utils import _pytree

from placewise.errors import InvalidInput, PlacewiseError
from placewise.importers import torch_export
from placewise.layout import Layout, exported
from placewise.machine import keep_memory
from placewise.plans import Plan
from placewise.ports import Port, port, torch_devices

#: How often whoever waits for a worker looks whether it is still there.
_LOOK: Final = 0.5  # seconds
#: What a script may do besides running.
_TIMED, _COUNTED = "timed", "counted"


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
    try:
        return PlacedModule(plan, module, homes, threads, args, kwargs or {})
    except torch.OutOfMemoryError as error:
        what = f"a device has not enough memory for its weights: {torch_export.first_line(error)}"
        raise PlacewiseError(what) from None


@dataclass(eq=False)
class _Form:
    """The module in one mode: what runs where."""

    layout: Layout
    workers: list[_Worker]
    here: int  # which of them is the thread that calls
    scripts: list[_Script]
    timed: list[_Script] = field(default_factory=list)
    counted: list[_Script] = field(default_factory=list)
    #: What gives each input of the program its value; None for an argument of the call.
    sources: list[Callable[[], Any] | None] = field(default_factory=list)


class PlacedModule(nn.Module):
    """Call it like the module. `close` ends its workers; so does the end of a `with` block, and of the object.

    `train` and `eval` do what they do to the module. Calls from several threads take turns.
    """

    def __init__(
        self,
        plan: Plan,
        module: nn.Module,
        homes: Sequence[torch.device],
        threads: int | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.training = module.training
        self.module, self._plan, self._homes = module, plan, homes
        on_cpu = sum(home.type == "cpu" for home in homes)  # a device is no faster for another's having no work
        self._threads = threads or max(1, len(os.sched_getaffinity(0)) // max(1, on_cpu))
        self._ports: dict[int, Port] = {}
        self._workers: dict[int, _Worker] = {}
        self._turn = threading.Lock()
        self._forms: dict[tuple[bool, ...], _Form] = {}
        self._mode: tuple[bool, ...] = ()
        self._form = self._in_its_mode(args, kwargs)
        weakref.finalize(self, _close, self._workers)

    @property
    def ran_on(self) -> dict[str, list[str]]:
        """Device to the ops that its worker runs."""
        layout = self._form.layout
        return {
            layout.names[d]: [layout.op_of.get(layout.slot[node], node.name) for node in layout.calls(d)]
            for d in layout.used
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run once."""
        with self._turn:
            form = self._in_its_mode(args, kwargs)
            return self._run(form, form.scripts, args, kwargs)[0]

    def timed(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Ran]]:
        """Run once with a clock at each op: what it returned, and how long which op took where."""
        with self._turn:
            form = self._in_its_mode(args, kwargs)
            form.timed = form.timed or self._scripts(form.layout, _TIMED)
            for script in form.timed:
                if isinstance(script.clock, _Marks):
                    script.clock.again()
            result, run = self._run(form, form.timed, args, kwargs)
        notes = zip(form.workers, run.notes, strict=True)
        return result, [
            Ran(form.layout.op_of[slot], worker.name, _seconds(began, ended), "" if on is None else str(on))
            for worker, found in notes for slot, began, ended, on in found
        ]  # fmt: skip

    def counted(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Run once: bytes of weights, and of tensors that are yet to be read, of each device at most.

        Where devices share the memory of a CPU, this is what can be told of each. What ops take for themselves while
        they run is not in it.
        """
        with self._turn:
            form = self._in_its_mode(args, kwargs)
            form.counted = form.counted or self._scripts(form.layout, _COUNTED)
            for script in form.counted:
                script.held.clear()
            self._run(form, form.counted, args, kwargs)
        found = {}
        for d, script in zip(form.layout.used, form.counted, strict=True):
            kept = {
                tensor.untyped_storage().data_ptr(): float(tensor.untyped_storage().nbytes())
                for node, source in zip(form.layout.inputs.values(), form.sources, strict=True)
                if source is not None and form.layout.where[node] == d and isinstance(tensor := source(), torch.Tensor)
            }
            found[form.layout.names[d]] = sum(kept.values()) + script.held.most
        return found

    def brought(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, on the devices where the plan has them."""
        layout = self._form.layout
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

    def _in_its_mode(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Form:
        """The module as it runs now; parts of it may be in different modes. In a new one, it is exported anew."""
        mode = tuple(part.training for part in self.module.modules())
        if mode != self._mode or mode not in self._forms:
            if mode not in self._forms:
                self._forms[mode] = self._laid_out(args, kwargs)
            form = self._forms[mode]
            specs = form.layout.program.graph_signature.input_specs
            form.sources = [_source(spec, self.module, form.layout, self._homes) for spec in specs]
            self._mode, self._form = mode, form
        return self._form

    def _laid_out(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Form:
        layout = Layout(self._plan, *exported(self._plan, self.module, args, kwargs))
        on_gpu = [self._homes[d].type == "cuda" for d in layout.used]
        for d, gpu in zip(layout.used, on_gpu, strict=True):
            if d not in self._workers:
                self._ports[d] = port(self._homes[d])
                self._workers[d] = _Worker(layout.names[d], self._ports[d], 1 if gpu else self._threads)
        # The thread that calls does the work of a CPU, if there is one: it has threads of OpenMP already, and those of
        # a second team would be more than there are cores, at which all of them go to sleep between ops.
        here = on_gpu.index(False) if False in on_gpu else 0
        return _Form(layout, [self._workers[d] for d in layout.used], here, self._scripts(layout))

    def _scripts(self, layout: Layout, extra: str = "") -> list[_Script]:
        homes = {d: opening.device for d, opening in self._ports.items()}
        return [_Script(layout, d, homes, self._ports[d], extra) for d in layout.used]

    def _run(
        self, form: _Form, scripts: Sequence[_Script], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, _Run]:
        layout = form.layout
        slots: list[Any] = [None] * len(layout.slot)
        for node, value in zip(layout.inputs.values(), self._given(form, args, kwargs), strict=True):
            slots[layout.slot[node]] = value
        run = _Run(slots, form.workers, layout.crossing, layout.handed_on)
        if scripts:
            jobs = list(zip(form.workers, scripts, run.notes, strict=True))
            worker, script, notes = jobs.pop(form.here)
            begun: list[_Job] = []
            try:
                for another, its, its_notes in jobs:
                    begun.append(another.start(run, its.function, its_notes))
                worker.run_here(run, script.function, notes)
                for job in begun:
                    job.join()
            except BaseException as error:  # Ctrl-C, say: the others stop, and the next call finds nothing of this one
                run.fail(error)
                for job in begun:
                    job.join()
                raise
        if run.failure is not None:
            raise run.failure
        return self._collected(layout, run), run

    def _given(self, form: _Form, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """A value for each input of the program: weights, buffers, constants, and the arguments of this call."""
        flat, spec = _pytree.tree_flatten((args, dict(kwargs)))
        if spec != form.layout.program.call_spec.in_spec:
            raise InvalidInput("the arguments are not of the form that the module was placed with")
        arguments = iter(flat)
        return [next(arguments) if source is None else source() for source in form.sources]

    @staticmethod
    def _collected(layout: Layout, run: _Run) -> Any:
        wanted = set(layout.program.graph_signature.user_outputs)
        found = []
        for node in layout.results:
            if not isinstance(node, Node):
                found.append(node)
            elif node.name in wanted:
                found.append(run.slots[layout.slot[node]] if node.op == "placeholder" else run.results[node.name])
        return _pytree.tree_unflatten(found, layout.program.call_spec.out_spec)


def _source(spec: Any, module: nn.Module, layout: Layout, homes: Sequence[torch.device]) -> Callable[[], Any] | None:
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


# ---- what workers run ------------------------------------------------------------------------------------------------


class _Script:
    """The calls of one device as a function; as `extra`, each of them is timed, or what is held is counted."""

    def __init__(self, layout: Layout, device: int, homes: Any, opening: Port, extra: str) -> None:
        self._slot = layout.slot
        timed, counted = extra == _TIMED, extra == _COUNTED
        self.held = _Held()
        self.clock: Callable[[], Any] = _Marks() if opening.device.type == "cuda" else time.perf_counter
        self._names: dict[str, Any] = {
            "give": opening.give, "begin": opening.begin, "end": opening.end, "device": opening.device,
            "mark": opening.mark, "passed": opening.passed,
            "clock": self.clock, "on": _device_of, "hold": self.held.hold, "drop": self.held.drop,
        }  # fmt: skip
        self._layout, self._device = layout, device
        mine = layout.calls(device)
        turn = {node: position for position, node in enumerate(mine)}
        fetched, early = self._fetches(mine)
        marked = {reader for fetches in early.values() for reader, _ in fetches}
        lines: list[str] = [line for _, node in early.get(-1, ()) for line in self._begin(node)]
        held: set[Node] = set()
        counts: set[Node] = set()
        if counted:  # arguments are there from the start
            read = dict.fromkeys(arg for node in mine for arg in node.all_input_nodes)
            counts |= {arg for arg in read if arg.name in layout.arguments and layout.where[arg] == device}
            lines += [f"hold(slots[{layout.slot[arg]}])" for arg in read if arg in counts]
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
                if counted and arg not in counts and not (arg.op != "call_function" and layout.where[arg] == device):
                    lines.append(f"hold(v{i})")
                    counts.add(arg)
            before = layout.drawn_before.get(layout.slot[node])
            if before is not None:
                waits = True
                lines.append(f"draws({before})")
            # What is between ops counts for the next one, but not the wait for others.
            lines += ["t = clock()"] if timed and waits else []
            i = layout.slot[node]
            held.add(node)
            self._names[f"f{i}"] = node.target
            inside = [self._text(part) for part in node.args]
            inside += [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]
            inside += ["device=device"] if _is_on_no_device(node) else []
            lines.append(f"v{i} = f{i}({', '.join(inside)})")
            lines += [f"drawn[{i}].release()"] if i in layout.handed_on else []
            if counted:
                lines.append(f"hold(v{i})")
                counts.add(node)
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
                    if arg in counts:
                        lines.append(f"drop(v{layout.slot[arg]})")
                        counts.remove(arg)
                    lines.append(f"v{layout.slot[arg]} = None")
            lines += [f"m{position} = mark()"] if position in marked else []
            for reader, later in early.get(position, ()):
                lines += [f"passed(m{reader})", *self._begin(later), *(["t = clock()"] if timed else [])]
        body = "\n    ".join(lines) or "pass"
        exec(f"def run(slots, results, ready, take, drawn, draws, notes):\n    {body}\n", self._names)
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


def _is_on_no_device(node: Node) -> bool:
    """Whether a call makes something of nothing, and does not say where: PyTorch would make it on the CPU."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or "device" in node.kwargs or all(argument.name != "device" for argument in schema.arguments):
        return False
    return not any(isinstance(arg.meta.get("val"), torch.Tensor) for arg in node.all_input_nodes)


class _Held:
    """Bytes of tensors, those that share memory once."""

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}  # address to how many values lie there
        self._now = self.most = 0.0

    def clear(self) -> None:
        """Before another run."""
        self._storages.clear()
        self._now = self.most = 0.0

    def hold(self, value: Any) -> None:
        """From now on."""
        for storage in self._of(value):
            count = self._storages.get(storage.data_ptr(), 0)
            self._storages[storage.data_ptr()] = count + 1
            self._now += 0.0 if count else storage.nbytes()
        self.most = max(self.most, self._now)

    def drop(self, value: Any) -> None:
        """No more."""
        for storage in self._of(value):
            count = self._storages[storage.data_ptr()] = self._storages[storage.data_ptr()] - 1
            self._now -= 0.0 if count else storage.nbytes()

    @staticmethod
    def _of(value: Any) -> list[Any]:
        tensors = (value,) if isinstance(value, torch.Tensor) else value if isinstance(value, (list, tuple)) else ()
        return [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]


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


# ---- workers ---------------------------------------------------------------------------------------------------------


class _Run:
    """One call of the module."""

    def __init__(
        self, slots: list[Any], workers: Sequence[_Worker], crossing: Mapping[int, int], handed_on: Iterable[int]
    ) -> None:
        self.slots, self._workers = slots, workers
        self._unread = dict(crossing)  # slot to how many devices have yet to read it
        self.results: dict[str, Any] = {}
        self.notes: list[list[Any]] = [[] for _ in workers]  # of each worker
        #: Held until what crosses is made, and until random numbers are drawn. Plain locks are a tenth of the cost of
        #: events.
        self.ready, self.drawn = ({i: threading.Lock() for i in slots} for slots in (crossing, handed_on))
        for lock in (*self.ready.values(), *self.drawn.values()):
            lock.acquire()
        self.with_gradients = torch.is_grad_enabled()
        self.failure: BaseException | None = None

    def take(self, slot: int) -> Any:
        """What another worker makes for a slot, once it is made. The last device to read it empties the slot."""
        lock = self.ready[slot]
        self._await(lock)
        value = self.slots[slot]
        self._unread[slot] -= 1
        if not self._unread[slot]:
            self.slots[slot] = None
        lock.release()  # for the next who reads it
        self._go_on()
        return value

    def draws(self, slot: int) -> None:
        """Wait until it is this op's turn to draw random numbers."""
        self._await(self.drawn[slot])
        self._go_on()

    def _await(self, lock: threading.Lock) -> None:
        while not lock.acquire(timeout=_LOOK):
            self.check()

    def _go_on(self) -> None:
        if self.failure is not None:
            raise _Aborted

    def check(self) -> None:
        """A worker that is gone makes nothing more."""
        for worker in self._workers:
            if worker.is_gone:
                self.fail(PlacewiseError(f"the worker of {worker.name} has ended, and its work is not done"))

    def fail(self, error: BaseException) -> None:
        """The first failure counts. Whoever waits is let go, and stops."""
        if self.failure is None or (isinstance(self.failure, _Aborted) and not isinstance(error, _Aborted)):
            self.failure = error
        for lock in (*self.ready.values(), *self.drawn.values()):
            if lock.locked():
                with suppress(RuntimeError):  # it was made just now
                    lock.release()


class _Job:
    """What a worker does in one run."""

    def __init__(self, run: _Run, function: Callable[..., None], notes: list[Any], worker: _Worker) -> None:
        self.run, self.function, self.notes, self._worker = run, function, notes, worker
        self.over = threading.Lock()  # held until it is
        self.over.acquire()

    def join(self) -> None:
        """Until the job is done; a thread that is gone will never say so."""
        while not self.over.acquire(timeout=_LOOK):
            if self._worker.is_gone:
                self.run.check()
                return


class _Worker:
    """A thread that runs what a device runs. It begins with the first call that needs it."""

    def __init__(self, name: str, opening: Port, threads: int) -> None:
        self.name, self._port, self._threads = name, opening, threads
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def is_gone(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def start(self, run: _Run, function: Callable[..., None], notes: list[Any]) -> _Job:
        if self._closed:
            raise InvalidInput("the placed module is closed: apply the plan again")
        if self._thread is None or self.is_gone:
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._serve, name=f"placewise {self.name}", daemon=True)
            self._thread.start()
        job = _Job(run, function, notes, self)
        self._jobs.put(job)
        return job

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
        jobs = self._jobs
        while (job := jobs.get()) is not None:
            self._work(job.run, job.function, job.notes)
            over, job = job.over, None  # what the run made is not kept while this waits
            over.release()

    def _work(self, run: _Run, function: Callable[..., None], notes: list[Any]) -> None:
        home = self._port.device
        try:
            with (
                torch.set_grad_enabled(run.with_gradients),
                torch.cuda.device(home.index if home.type == "cuda" else -1),
            ):
                function(run.slots, run.results, run.ready, run.take, run.drawn, run.draws, notes)
                self._port.finish()
        except torch.OutOfMemoryError as error:
            run.fail(PlacewiseError(f"{self.name} has not enough memory: {torch_export.first_line(error)}"))
        except MemoryError:
            run.fail(PlacewiseError(f"{self.name} has not enough memory"))
        except BaseException as error:
            short = "DefaultCPUAllocator" in str(error)  # how torch says so on a CPU
            what = f"{self.name} has not enough memory: {torch_export.first_line(error)}"
            run.fail(PlacewiseError(what) if short else error)


def _close(workers: Mapping[int, _Worker]) -> None:
    for worker in workers.values():
        worker.close()
