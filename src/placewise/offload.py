"""PyTorch models that do not fit a GPU, run as a plan of `--engine torch-offload` says, on the model itself.

Each part of the model is resident on a device, or its weights are at home on another (the host) and are streamed to
where it computes: through memory for as many as the plan's `prefetch`, filled while earlier parts compute. Hooks
do all of it, so `model(...)` and `model.generate(...)` work as before; caches are kept where a layer computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from placewise.costs import LABELS, Costs
from placewise.engines.torch_offload import AFTER, WEIGHTS, modes
from placewise.errors import InvalidInput, PlacewiseError
from placewise.importers.torch_export import first_line
from placewise.machine import keep_memory
from placewise.plans import Plan
from placewise.ports import event, stream, torch_devices
from placewise.problem import Problem
from placewise.quantities import format_bytes

#: Where each weight begins in a buffer, in bytes: copies and kernels like round addresses.
_ALIGNED = 256


def offloaded(plan: Plan, module: nn.Module, *, devices: Mapping[str, str] | None = None) -> Offload:
    """Have the module run as the plan says; the module itself is changed. For inference: weights get no gradients."""
    return Offload(plan, module, torch_devices(plan, devices or {}))


class Took(NamedTuple):
    """A part in one run."""

    part: str
    device: str
    seconds: float


@dataclass(eq=False)
class _Part:
    """A module, where it computes, and where its weights are."""

    path: str
    module: nn.Module
    compute: int
    home: int
    weights: list[nn.Parameter]
    inner: _Part | None = None  # its feed-forward block
    early: bool = False  # whether its weights are no longer read once the feed-forward block begins
    number: int = -1  # in its ring; -1 = resident
    source: torch.Tensor | None = None  # all weights in a row, at home
    notes: list[Any] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(_padded(weight) for weight in self.weights)


class Offload:
    """A model that runs as a plan says. `close` makes it a plain one again, on the CPU."""

    def __init__(self, plan: Plan, module: nn.Module, homes: Sequence[torch.device]) -> None:
        self.plan, self.module, self._homes = plan, module, homes
        self._names = plan.problem.cluster.device_names
        self._parts = _parts(plan, module)
        if any(homes[part.compute].type == "cpu" for part in self._parts):
            keep_memory()
        self._rings: dict[int, _Ring] = {}
        self._hooks: list[Any] = []
        self._with_gradients = [weight for weight in module.parameters() if weight.requires_grad]
        self._clock: list[Took] | None = None
        self._marks: list[Any] = []  # events for the clock, to be used again
        self._windows = self._with_room()
        self.held = self._held()  # bytes of weights and buffers by device, counted
        try:
            self._place()
        except (torch.OutOfMemoryError, MemoryError) as error:
            self.close()
            raise PlacewiseError(f"a device has not enough memory for the plan: {first_line(error)}") from None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        try:
            return self.module(*args, **kwargs)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise PlacewiseError(f"a device has not enough memory for this call: {first_line(error)}") from None

    def __enter__(self) -> Offload:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def weights_on(self) -> dict[str, set[str]]:
        """Part to where torch has its weights, which is where they are read."""
        return {part.path: {str(weight.device) for weight in part.weights} for part in self._parts}

    def close(self) -> None:
        """No more hooks, and all weights on the CPU."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for ring in self._rings.values():
            ring.close()
        for part in self._parts:
            if part.source is not None:
                _spread(part.weights, part.source.to("cpu"))
                part.source, part.number = None, -1
        self._rings = {}
        self.module.to("cpu")
        for weight in self._with_gradients:
            weight.requires_grad_(True)

    def timed(self, call: Callable[[], Any]) -> list[Took]:
        """How long each part took in a call of the model: without the wait for others, and without its inner part."""
        self._clock, taken = [], self._clock
        for part in self._parts:
            part.notes.clear()  # of a call that failed
        try:
            call()
            for home in {home for home in self._homes if home.type == "cuda"}:
                torch.cuda.synchronize(home)
            for part in self._parts:
                spans = [_seconds(*note) for note in part.notes]
                inner = [_seconds(*note) for note in part.inner.notes] if part.inner else [0.0] * len(spans)
                for span, within in zip(spans, inner, strict=True):
                    self._clock.append(Took(part.path, self._names[part.compute], max(0.0, span - within)))
            for part in self._parts:
                self._marks += [mark for note in part.notes for mark in note if not isinstance(mark, float)]
                part.notes.clear()
            return self._clock
        finally:
            self._clock = taken

    # ---- memory ----

    def _held(self) -> dict[str, float]:
        held = dict.fromkeys(self._names, 0.0)
        streamed: dict[int, list[int]] = {}
        for part in self._parts:
            held[self._names[part.home]] += part.bytes
            if part.home != part.compute:
                sizes = streamed.setdefault(part.compute, [])
                part.number = len(sizes)
                sizes.append(part.bytes)
        for d in streamed:
            window, around = self._windows[d]
            self._rings[d] = _Ring(self._homes[d], streamed[d], window, around)
            held[self._names[d]] += self._rings[d].bytes
        return held

    def _with_room(self) -> dict[int, tuple[int, bool]]:
        """Device to how many streamed parts in a row lie side by side, and whether over the end of a run, too.

        As many as the plan has ahead, if there is room. Where copies wait for the link, the simulation need not have
        had so many at once, and then so many are not needed. Weights, buffers, caches and the workspace must fit.
        """
        graph, execution = self.plan.problem.graph, self.plan.problem.execution
        within = any(
            part.inner and not part.early and part.home != part.compute and part.inner.home != part.inner.compute
            for part in self._parts
        )
        found = {}
        for d, device in enumerate(self.plan.problem.cluster.devices):
            here = self.plan.placement == d
            need = float(graph.resident_bytes[here].sum() + graph.scratch[here].max(initial=0.0))
            streamed = [part for part in self._parts if part.compute == d != part.home]
            if streamed:
                sizes = [sum(weight.nbytes for weight in part.weights) for part in streamed]
                least = min(execution.prefetch, 1 + within)
                ways = [(window, around) for window in range(execution.prefetch, least - 1, -1)
                        for around in (True, False)]  # fmt: skip
                takes = [_end(_side_by_side(sizes, *way), sizes) for way in ways]
                fits = [way for way, size in zip(ways, takes, strict=True) if need + size <= device.memory]
                found[d] = fits[0] if fits else ways[-1]
                need += min(takes)
            if need > device.memory:
                raise InvalidInput(
                    f"{device.name} would hold {format_bytes(need)}, with buffers for what is streamed, and has "
                    f"{format_bytes(device.memory)}: plan with less memory (--max-memory) or a smaller prefetch"
                )
        return found

    def _place(self) -> None:
        """Weights to their homes, or into the ring; what no part has goes with the first part."""
        self.module.requires_grad_(False)
        with torch.no_grad():
            for part in self._parts:
                home = self._homes[part.home]
                if part.number < 0:
                    for weight in part.weights:
                        weight.data = weight.data.to(home)
                    continue
                ring = self._rings[part.compute]
                part.source = _row(part.weights, part.bytes, home, pinned=self._homes[part.compute].type == "cuda")
                ring.add(part)
        placed = {id(weight) for part in self._parts for weight in part.weights}
        for part in self._parts:  # inner parts come after the parts that they are in, and have the last word
            for name, buffer in part.module.named_buffers():
                _set_buffer(part.module, name, buffer.to(self._homes[part.compute]))
        for weight in self.module.parameters():
            if id(weight) not in placed:
                weight.data = weight.data.to(self._homes[self._parts[0].compute])
        for part in self._parts:
            self._hook(part)
        self._hooks += [
            self.module.register_forward_pre_hook(self._enter_model, with_kwargs=True),
            self.module.register_forward_hook(self._leave_model, with_kwargs=True),
        ]
        for ring in self._rings.values():
            ring.start()

    # ---- running ----

    def _hook(self, part: _Part) -> None:
        home, outer = self._homes[part.compute], next((p for p in self._parts if p.inner is part), None)

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if outer is not None and outer.early and outer.number >= 0:
                self._rings[outer.compute].release(outer)
            moved = _moved(args, home), _moved(kwargs, home)
            if part.number >= 0:
                self._rings[part.compute].acquire(part)
            if self._clock is not None:
                part.notes.append([self._now(home)])
            return moved

        def leave(_: nn.Module, __: Any, result: Any) -> Any:
            if self._clock is not None:
                part.notes[-1].append(self._now(home))
            late = part.inner is None or not part.early
            if part.number >= 0 and late:
                self._rings[part.compute].release(part)
            return _moved(result, self._homes[outer.compute]) if outer is not None else result

        self._hooks += [
            part.module.register_forward_pre_hook(enter, with_kwargs=True),
            part.module.register_forward_hook(leave),
        ]

    def _now(self, home: torch.device) -> Any:
        if home.type != "cuda":
            return time.perf_counter()
        # To make an event takes longer than to record it, which is most of what a small part takes.
        mark = self._marks.pop() if self._marks else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(home))
        return mark

    def _enter_model(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = next((t for t in _tensors((args, kwargs))), None)
        self._asked_on = None if given is None else given.device
        for ring in self._rings.values():
            ring.restart()  # the call before may have failed half way

    def _leave_model(self, _: nn.Module, __: Any, ___: Any, result: Any) -> Any:
        return result if self._asked_on is None else _moved(result, self._asked_on)


# ---- streaming -------------------------------------------------------------------------------------------------------


class _Ring:
    """Memory on a device through which weights are streamed, part after part, run after run.

    Each part has its place there, so its weights are views that never change. Any `window` parts in a row lie side by
    side; others share places. A part is fetched again when what it would overwrite has been read; that goes on over the
    end of a run, as the next run begins with the first part again, if they lie side by side `around` it, too.
    """

    def __init__(self, device: torch.device, sizes: Sequence[int], window: int, around: bool) -> None:
        self._device, self._sizes = device, sizes
        self._places = places = _side_by_side(sizes, window, around)
        #: Bytes that it takes.
        self.bytes = _end(places, sizes)
        self._over = [[other for other, there in enumerate(places) if other != part
                       and there < begin + sizes[part] and begin < there + sizes[other]]
                      for part, begin in enumerate(places)]  # fmt: skip
        self._parts: list[_Part] = []
        self._memory: torch.Tensor | None = None
        self._loaded = [False] * len(sizes)  # or on its way
        self._wanted = [False] * len(sizes)  # loaded, and not read since
        self._busy = [False] * len(sizes)  # being read
        self._next = 0
        self._copier: _Copier = _CudaCopier(device, len(sizes)) if device.type == "cuda" else _Copier(len(sizes))

    def add(self, part: _Part) -> None:
        """The next in order."""
        self._parts.append(part)
        _spread(part.weights, self._place(part.number))

    def start(self) -> None:
        """Fetch what comes first."""
        for number in range(len(self._parts)):
            self._copier.done(number)  # what used this memory before
        self.restart()

    def restart(self) -> None:
        """From the first part on, whatever became of the run before."""
        for number in range(len(self._parts)):
            if self._busy[number]:
                self._copier.done(number)
            self._busy[number] = self._wanted[number] = False
        self._next = 0
        self._ahead()

    def acquire(self, part: _Part) -> None:
        """Work that follows finds the part's weights in their place."""
        number = part.number
        if not self._loaded[number]:  # the model does not come to its parts as expected
            if any(self._busy[other] for other in self._over[number]):
                raise PlacewiseError(f"{part.path} needs memory that is in use: plan with a larger prefetch")
            self._fetch(number)
            self._next = (number + 1) % len(self._parts)
        self._wanted[number] = self._busy[number] = True
        self._copier.wait(number)

    def release(self, part: _Part) -> None:
        """Its weights are no longer read, once the work so far is done."""
        if self._busy[part.number]:
            self._wanted[part.number] = self._busy[part.number] = False
            self._copier.done(part.number)
            self._ahead()

    def close(self) -> None:
        """No more copies."""
        self._copier.close()

    def _ahead(self) -> None:
        """Begin to fetch what comes next, as long as nothing is in the way that has yet to be read."""
        for _ in self._parts:
            number = self._next
            if self._wanted[number] or any(self._wanted[other] for other in self._over[number]):
                return
            if not self._loaded[number]:
                self._fetch(number)
            self._wanted[number] = True
            self._next = (number + 1) % len(self._parts)

    def _fetch(self, number: int) -> None:
        source = self._parts[number].source
        assert source is not None
        for other in self._over[number]:
            self._loaded[other] = self._wanted[other] = False
        self._loaded[number] = True
        self._copier.copy(number, source, self._place(number), self._over[number])

    def _place(self, number: int) -> torch.Tensor:
        if self._memory is None:
            self._memory = torch.empty(self.bytes, dtype=torch.uint8, device=self._device)
        return self._memory[self._places[number] :][: self._sizes[number]]


def _side_by_side(sizes: Sequence[int], window: int, around: bool) -> list[int]:
    """Where each of some parts begins, such that no two that are less than `window` apart overlap.

    With `around`, the first follows the last. Two at a time begin at either end, in turn, which takes no more than the
    largest two in a row. Else the largest come first, each as far down as it can be, which is seldom much more.
    """
    count = len(sizes)
    if window == 2 and count > 1 and not (around and count % 2):
        height = max(sizes[part - 1] + sizes[part] for part in range(0 if around else 1, count))
        return [height - size if part % 2 else 0 for part, size in enumerate(sizes)]
    places = [-1] * count
    for part in sorted(range(count), key=lambda part: -sizes[part]):
        near = {other % count for other in range(part + 1 - window, part + window) if around or 0 <= other < count}
        begin = 0
        for there, size in sorted((places[other], sizes[other]) for other in near - {part} if places[other] >= 0):
            if there < begin + sizes[part]:
                begin = max(begin, there + size)
        places[part] = begin
    return places


def _end(places: Sequence[int], sizes: Sequence[int]) -> int:
    return max(begin + size for begin, size in zip(places, sizes, strict=True))


class _Copier:
    """Copies beside the work, in a thread."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="placewise copies")
        self._coming: list[Future[Any] | None] = [None] * count

    def copy(self, number: int, source: torch.Tensor, target: torch.Tensor, over: Sequence[int]) -> None:
        """Begin; what others had there is read by then, or will be once the work so far is done."""
        self._coming[number] = self._pool.submit(self._copied, source, target)

    @staticmethod
    def _copied(source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def wait(self, number: int) -> None:
        """Until the copy of a part is through."""
        coming = self._coming[number]
        if coming is not None:
            coming.result()

    def done(self, number: int) -> None:
        """The part has been read."""

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class _CudaCopier(_Copier):
    """Copies on a stream of their own; nobody waits but the streams."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device, self._stream = device, stream(device)
        self._arrived = [event() for _ in range(count)]
        self._read = [event() for _ in range(count)]

    def copy(self, number: int, source: torch.Tensor, target: torch.Tensor, over: Sequence[int]) -> None:
        with torch.cuda.stream(self._stream):
            for other in (number, *over):
                self._stream.wait_event(self._read[other])
            target.copy_(source, non_blocking=True)
            self._arrived[number].record(self._stream)

    def wait(self, number: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._arrived[number])

    def done(self, number: int) -> None:
        self._read[number].record(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        torch.cuda.synchronize(self._device)


# ---- parts of a model ------------------------------------------------------------------------------------------------


def _parts(plan: Plan, module: nn.Module) -> list[_Part]:
    """In the order in which the model comes to them."""
    graph, cluster = plan.problem.graph, plan.problem.cluster
    found, modules = modes(plan), dict(module.named_modules())
    missing = next((path for path in found if path not in modules), None)
    if missing is not None:
        raise InvalidInput(f"not the model of this plan: it has no module {missing!r:.80}")
    lists = dict.fromkeys(path.rpartition(".")[0] for path in found if path.rpartition(".")[2].isdigit())
    layers = (
        f"{holder}.{child}".removeprefix(".") for holder in lists for child, _ in modules[holder].named_children()
    )
    more = next((path for path in layers if path not in found), None)
    if more is not None:
        raise InvalidInput(f"not the model of this plan: the plan has no module {more!r:.80}")
    empty = next((name for name, weight in module.named_parameters() if weight.is_meta), None)
    if empty is not None:
        raise InvalidInput(f"the model has no values to run with: {empty} is on the meta device")
    parts: dict[str, _Part] = {}
    claimed: set[int] = set()
    for path in sorted(found, key=len, reverse=True):  # blocks before the layers that they are in
        weights = [weight for weight in modules[path].parameters() if id(weight) not in claimed]
        claimed.update(id(weight) for weight in weights)
        compute, home = (cluster.device_index(found[path][key]) for key in ("compute", "weights"))
        parts[path] = _Part(path, modules[path], compute, home, weights)
    readers = _readers_after(plan)
    for path, part in parts.items():
        outer = next((parts[other] for other in parts if path.startswith(f"{other}.")), None)
        if outer is not None:
            outer.inner, outer.early = part, outer.path not in readers
    sizes = dict(zip(graph.op_names, graph.resident_bytes.tolist(), strict=True))
    for path, part in parts.items():
        planned, real = sizes.get(path + WEIGHTS), sum(w.numel() * w.element_size() for w in part.weights)
        if planned is not None and planned != real:
            raise InvalidInput(
                f"not the model of this plan: {path} has weights of {format_bytes(real)}, not {format_bytes(planned)}"
            )
    return [parts[path] for path in found]


def _readers_after(plan: Plan) -> set[str]:
    """Parts whose weights are read after their feed-forward block too."""
    graph = plan.problem.graph
    edges = zip(graph.edge_producer.tolist(), graph.consumers.tolist(), strict=True)
    names = graph.op_names
    return {names[a].removesuffix(WEIGHTS) for a, b in edges if names[a].endswith(WEIGHTS) and names[b].endswith(AFTER)}


def _padded(weight: torch.Tensor) -> int:
    size = weight.numel() * weight.element_size()
    return -(-size // _ALIGNED) * _ALIGNED


def _row(weights: Sequence[torch.Tensor], size: int, home: torch.device, pinned: bool) -> torch.Tensor:
    """All weights in one buffer at their home; pinned, if a GPU fetches them from a CPU."""
    row = torch.empty(size, dtype=torch.uint8, device=home, pin_memory=pinned and home.type == "cpu")
    for weight, view in zip(weights, _views(weights, row), strict=True):
        view.copy_(weight)
    return row


def _views(weights: Sequence[torch.Tensor], row: torch.Tensor) -> Iterator[torch.Tensor]:
    begin = 0
    for weight in weights:
        size = weight.numel() * weight.element_size()
        yield row[begin : begin + size].view(weight.dtype).view(weight.shape)
        begin += _padded(weight)


def _spread(weights: Sequence[nn.Parameter], row: torch.Tensor) -> None:
    """Have the weights look at their places in a buffer."""
    for weight, view in zip(weights, list(_views(weights, row)), strict=True):
        weight.data = view


def _set_buffer(module: nn.Module, path: str, value: torch.Tensor) -> None:
    owner, _, name = path.rpartition(".")
    module.get_submodule(owner)._buffers[name] = value


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors, and those in lists and dicts, on a device. Caches are objects, and stay."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    if isinstance(value, tuple):
        moved = [_moved(part, device) for part in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    if isinstance(value, list):
        return [_moved(part, device) for part in value]
    if isinstance(value, dict):
        for key in list(value):  # outputs of transformers are dicts with fields: they are changed in place
            part = _moved(value[key], device)
            if part is not value[key]:
                value[key] = part
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)


def _seconds(began: Any, ended: Any) -> float:
    return float(ended - began) if isinstance(began, float) else float(began.elapsed_time(ended)) / 1e3


# ---- measured --------------------------------------------------------------------------------------------------------


def measured(
    problem: Problem,
    module: nn.Module,
    call: Callable[[Any], Any],
    *,
    prepare: Callable[[], Any] = lambda: None,
    devices: Mapping[str, str] | None = None,
    rounds: int = 5,
    alike: int = 4,
) -> Problem:
    """The problem (of `--engine torch-offload`) with the times that its parts take in a call of the model, measured.

    On each device in turn: parts that do the same as others are measured for `alike` of them, all with their weights
    there; the rest of the model is on the first CPU meanwhile. Of `rounds` calls the median counts. What `prepare`
    returns (a cache, say) is made anew for each device, and is what the call is given.
    """
    graph, cluster = problem.graph, problem.cluster
    host = next((d for d, device in enumerate(cluster.devices) if device.kind == "cpu"), 0)
    seconds, label = problem.costs.seconds.copy(), problem.costs.label.copy()
    for d in range(cluster.num_devices):
        placement = np.full(graph.num_ops, host, np.int32)
        if d != host:
            placement[_some_of_each(problem, d, alike)] = d
        probe = Plan(problem, placement, None, 0.0, 0.0, "probe", "")
        with offloaded(probe, module, devices=devices) as placed, torch.no_grad():
            given = prepare()
            call(given)
            taken = [took for _ in range(rounds) for took in placed.timed(partial(call, given))]
        by_signature: dict[str, list[float]] = {}
        for took in taken:
            if took.device == cluster.device_names[d]:
                by_signature.setdefault(graph.op_signatures[graph.op_index(took.part)], []).append(took.seconds)
        for op, signature in enumerate(graph.op_signatures):
            if signature in by_signature and graph.op_modules[op] and not graph.op_names[op].endswith(AFTER):
                seconds[op, d] = np.median(by_signature[signature])
                label[op, d] = LABELS.index("measured")
        for op, name in enumerate(graph.op_names):
            if name.endswith(AFTER):  # it is part of what was measured
                seconds[op, d] = 0.0
    return replace(problem, costs=Costs.create(seconds, label))


def _some_of_each(problem: Problem, device: int, alike: int) -> list[int]:
    """Ops of so many parts of each kind, with their weights and groups, as far as the device has room."""
    graph, room = problem.graph, 0.9 * float(problem.capacity[device])
    weights = {name.removesuffix(WEIGHTS): op for op, name in enumerate(graph.op_names) if name.endswith(WEIGHTS)}
    kinds: dict[str, list[int]] = {}
    for op, signature in enumerate(graph.op_signatures):
        if graph.op_modules[op] and not graph.is_stored[op] and not graph.op_names[op].endswith(AFTER):
            kinds.setdefault(signature, []).append(op)
    chosen: dict[int, None] = {}
    for turn in range(alike):  # one of each kind, then another of each, so that none is left out for lack of room
        for op in (ops[turn] for ops in kinds.values() if turn < len(ops)):
            unit = np.flatnonzero(problem.unit == problem.unit[op]).tolist()
            unit += [weights[graph.op_names[member]] for member in unit if graph.op_names[member] in weights]
            size = float(graph.resident_bytes[[member for member in unit if member not in chosen]].sum())
            if size <= room:
                room -= size
                chosen.update(dict.fromkeys(unit))
    return list(chosen)
