"""What limits a plan: its critical path of work and waits, the loads that set the pace, what a move would give;
and what the plan is: which ops are where, and what moves between them.

Everything here is read off a `Timeline`; nothing is planned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Final

import numpy as np

from placewise.graph import Ints, module_parts
from placewise.quantities import format_bytes, format_seconds, format_share
from placewise.simulator import Timeline, evaluate, violations
from placewise.simulator.arrays import priority_order
from placewise.simulator.constraints import quotient
from placewise.simulator.throughput import busy, throughput_loads
from placewise.simulator.timeline import Floats

KINDS: Final = ("compute", "transfer", "waiting for device", "waiting for channel")
MAX_MODULES: Final = 12
MAX_TRANSFERS: Final = 1_000
NEARLY_FULL: Final = 0.95  # of a device's memory
NEARLY_ALL: Final = 0.8  # of the time
SAME: Final = 1e-9  # as a share: what differs by less than rounding does
LEVEL: Final = 0.02  # as a share: loads that differ by less are level
TOLD: Final = 0.005  # of the whole: less is not worth a word
NAMED: Final = 3  # of many, in a sentence
_WORDS: Final = dict(zip(KINDS, ("compute", "transfers", "waits", "waits"), strict=True))
_PHASES: Final = (" forward", " backward", "")
_SIDES: Final = ("left", "right")


@dataclass(frozen=True)
class Step:
    """One piece of the chain; the pieces tile the run from time zero to its end."""

    kind: str  # one of KINDS
    start: float
    finish: float
    where: str  # a device, or "source->target"
    op: int  # what computes, whose output moves, or who waits
    behind: int | None = (
        None  # waits: the op that used the device, or whose output used the channel, until the wait ended
    )

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.finish - self.start


@dataclass(frozen=True)
class Stretch:
    """Steps of one kind in one place that follow each other."""

    kind: str
    where: str
    start: float
    seconds: float
    steps: int
    first: str  # op
    last: str  # op


@dataclass(frozen=True)
class Run:
    """Ops on one device that follow each other in the dataflow order; what is stored takes no part in it."""

    device: str
    ops: int
    first: str
    last: str


@dataclass(frozen=True)
class Moved:
    """A transfer, by the op whose output moves and the op that it is sent for."""

    tensor: str
    reader: str
    where: str  # "source->target"
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Load:
    """Throughput: what one device or channel does per sample."""

    where: str
    compute: float
    transfer: float
    total: float  # the sum, or the longer of the two where they overlap; with what replicas share and exchange
    sets_pace: bool
    replicas: int  # devices that do this in turn


@dataclass(frozen=True)
class Fullest:
    """The device with the least memory left, by its share, and what fills it."""

    device: str
    memory: float
    peak: float
    weights: float  # what stays there all the time; the rest comes and goes
    op: str | None  # during which one run holds most; None where weights are all


@dataclass(frozen=True)
class Explanation:
    """What limits a plan. A pipeline is limited by its loads, a single run by its chain; the other is empty."""

    verdict: str  # in a sentence or two
    runs: tuple[Run, ...]  # where the ops are, in dataflow order; of contiguous plans, stage by stage
    transfers: tuple[Moved, ...]  # the largest first, `MAX_TRANSFERS` at most
    chain: tuple[Step, ...]
    by_kind: dict[str, float]
    by_module: dict[str, dict[str, float]]  # waits are charged to what uses the device or channel meanwhile
    waited_for: dict[str, float]  # seconds by module: what uses the devices and channels that the chain waits for
    stretches: tuple[Stretch, ...]
    loads: tuple[Load, ...]
    pace_modules: dict[str, float]  # seconds per sample on the first load that sets the pace, the largest first
    fullest: Fullest | None  # None where no memory is limited, or none is used


def explain(timeline: Timeline) -> Explanation:
    """Why the plan is not faster."""
    pipelined = timeline.problem.objective == "throughput"
    chain = () if pipelined else tuple(critical_chain(timeline))
    loads = tuple(pipeline_loads(timeline)) if pipelined else ()
    pace_modules = _pace_modules(timeline, loads)
    fullest = _fullest(timeline)
    places, charged, idle = _places(timeline, chain)
    waits = [step for step in charged if _WORDS[step.kind] == "waits" and step.behind is not None]
    waited_for = {module: sum(split.values()) for module, split in _by_module(timeline, waits).items()}
    by_kind = dict.fromkeys(KINDS, 0.0)
    for step in chain:
        by_kind[step.kind] += step.seconds
    said = list(_pace(loads, pace_modules))
    if chain:
        said += [*_spent(places, waited_for, idle), _busiest(timeline)]
    return Explanation(
        verdict=" ".join([*said, *_full(timeline, fullest)]),
        runs=tuple(_runs(timeline)),
        transfers=tuple(_largest_transfers(timeline)),
        chain=chain,
        by_kind=by_kind,
        by_module=_by_module(timeline, charged),
        waited_for=waited_for,
        stretches=tuple(_stretches(timeline, chain)),
        loads=loads,
        pace_modules=pace_modules,
        fullest=fullest,
    )


def in_words(kind: str, where: str) -> str:
    """What a step of the chain is, and where."""
    return {
        "compute": f"compute on {where}",
        "transfer": f"transfer {where}",
        "waiting for device": f"wait for {where}",
        "waiting for channel": f"wait for {where}",
    }[kind]


def _spent(places: dict[str, dict[str, float]], waited_for: dict[str, float], idle: float) -> Iterator[str]:
    """Which kind of steps the chain mostly is, and where: a chain over many places has no step that says much."""
    sums = {what: sum(seconds.values()) for what, seconds in places.items()}
    total = sum(sums.values())
    most = max(sums, key=lambda what: sums[what])
    others = [
        f"{what} {format_share(part / total)}" for what, part in sums.items() if what != most and part >= TOLD * total
    ]
    where = sorted(((name, part) for name, part in places[most].items() if part >= TOLD * total), key=lambda p: -p[1])
    said = (
        f"{most.capitalize()} take{'s' * (most == 'compute')} {format_share(sums[most] / total)} of the critical path"
    )
    if len(where) == 1:
        yield f"{said}, all {'for' if most == 'waits' else 'on'} {where[0][0]}."
    else:
        yield f"{said}: {in_a_row([f'{name} {format_share(seconds / total)}' for name, seconds in where])}."
    used = sum(waited_for.values())
    if most == "waits" and used > 0:
        by = [f"{module} {format_share(seconds / used)}" for module, seconds in waited_for.items()]
        yield f"It is held up by {in_a_row(by if len(by) > 1 else list(waited_for))}."
    if most == "waits" and idle >= TOLD * total:
        yield f"For {format_share(idle / total)} the device is idle: its next op in the order waits, too."
    if others:
        yield f"The rest: {in_a_row(others)}."


def _pace(loads: tuple[Load, ...], modules: dict[str, float]) -> Iterator[str]:
    """Which loads are the largest, which are level with them, how far the next is below, what the time goes to."""
    pace = [load for load in loads if load.sets_pace]
    if not pace:
        return
    compute, transfer = (sum(getattr(load, kind) for load in pace) for kind in ("compute", "transfer"))
    said = f"{in_a_row([load.where for load in pace])} set{'s' * (len(pace) == 1)} the pace, mostly by "
    said += "computing" if compute >= transfer else "moving data"
    most = {_phase(load): load.total for load in pace}
    below = {load: 1 - load.total / most[_phase(load)] for load in loads if not load.sets_pace}
    level = [load for load in below if below[load] <= LEVEL]
    lower = [load for load in below if below[load] > LEVEL]
    if level:
        verb = "is" if len(level) == 1 else "are"
        within = max(below[load] for load in level)
        said += f"; {in_a_row([load.where for load in level])} {verb} within {format_share(max(within, 1e-3))} of it"
    if level and not any(load.compute for load in lower):
        said += ", so the load is balanced"
    elif lower:
        after = min(lower, key=lambda load: below[load])
        said += f"; next comes {after.where}, with {format_seconds(after.total)}, {format_share(below[after])} less"
    yield said + "."
    if len(modules) > 1:
        first = [f"{name} ({format_seconds(seconds)})" for name, seconds in list(modules.items())[:NAMED]]
        yield f"Most time on {pace[0].where} goes to {in_a_row(first)}."


def _phase(load: Load) -> str:
    """Where the pipeline runs one phase after the other."""
    return next(phase for phase in _PHASES if load.where.endswith(phase))


def in_a_row(names: Sequence[str], most: int = NAMED) -> str:
    """ "a, b and c"; "gpu0 to gpu7" of names that count up; of many others the first, and how many more."""
    names = list(_counted_up(names))
    if len(names) > most + 1:
        names = [*names[:most], f"{len(names) - most} others"]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _counted_up(names: Sequence[str]) -> Iterator[str]:
    """Three or more names whose numbers follow each other are one."""
    numbered = [re.fullmatch(r"(.*?)(\d+)", name) for name in names]
    keys = [
        (found[1], int(found[2]) - i) if found else (name, 0)
        for i, (name, found) in enumerate(zip(names, numbered, strict=True))
    ]
    for _, run in groupby(range(len(names)), key=lambda i: keys[i]):
        first, *rest = run
        yield from [f"{names[first]} to {names[rest[-1]]}"] if len(rest) > 1 else [names[i] for i in (first, *rest)]


def _busiest(timeline: Timeline) -> str:
    cluster = timeline.problem.cluster
    device = int(timeline.busy.argmax())
    share = timeline.busy[device] / timeline.makespan
    said = f"The busiest device is {cluster.device_names[device]}, {format_share(share)} of the run"
    if timeline.channel_busy.any():
        channel = int(timeline.channel_busy.argmax())
        share = timeline.channel_busy[channel] / timeline.makespan
        said += f"; the busiest channel is {cluster.channels[channel]}, {format_share(share)}"
    return said + "."


def _full(timeline: Timeline, fullest: Fullest | None) -> Iterator[str]:
    """Where memory binds."""
    problem = timeline.problem
    full = np.flatnonzero(timeline.peak > NEARLY_FULL * problem.capacity)
    names = [problem.cluster.device_names[d] for d in full]
    if len(names) == 1:
        left = format_bytes(problem.capacity[full[0]] - timeline.peak[full[0]])
        yield f"The memory of {names[0]} is full: {left} left of {format_bytes(problem.capacity[full[0]])}."
    elif names:
        yield f"The memory of {in_a_row(names)} is full."
    if names and fullest:
        yield what_fills(timeline, fullest, named=len(names) > 1)


def what_fills(timeline: Timeline, fullest: Fullest, named: bool = True) -> str:
    """Weights, what comes and goes, and when most of it is there."""
    said = (
        f"Weights take {format_bytes(fullest.weights)}" + f" of {fullest.device}'s {format_bytes(fullest.peak)}" * named
    )
    if fullest.op is not None:
        when = " of one sample" if timeline.problem.objective == "throughput" else ""
        said += f" and tensors{when} up to {format_bytes(fullest.peak - fullest.weights)}, during {fullest.op}"
    return said + "."


def _fullest(timeline: Timeline) -> Fullest | None:
    problem, capacity = timeline.problem, timeline.problem.capacity
    limited = np.flatnonzero(np.isfinite(capacity) & (capacity > 0))
    if not timeline.peak[limited].any():
        return None
    d = int(limited[(timeline.peak[limited] / capacity[limited]).argmax()])
    weights = float(problem.graph.resident_bytes[timeline.placement == d].sum())
    peak = float(timeline.peak[d])
    op = None
    if peak > weights:
        times, held = timeline.memory_profile(d)
        begun = (timeline.placement == d) & ~problem.graph.is_stored & (timeline.start <= times[held.argmax()])
        latest = int(np.where(begun, timeline.start, -np.inf).argmax())
        op = problem.graph.op_names[latest] if begun.any() else None
    return Fullest(problem.cluster.device_names[d], float(capacity[d]), peak, weights, op)


# ---- what the plan is ------------------------------------------------------------------------------------------------


def _runs(timeline: Timeline) -> Iterator[Run]:
    graph, devices = timeline.problem.graph, timeline.problem.cluster.device_names
    order = graph.topological_order
    order = order[~graph.is_stored[order]]
    if timeline.problem.contiguous:
        order = _stage_by_stage(timeline, order)
    placed = timeline.placement[order]
    ends = np.flatnonzero(np.diff(placed, append=-1)).tolist()
    first = 0
    for last in ends:
        names = (graph.op_names[order[first]], graph.op_names[order[last]])
        yield Run(devices[placed[first]], last - first + 1, *names)
        first = last + 1


def _stage_by_stage(timeline: Timeline, order: Ints) -> Ints:
    """The order with the ops of each stage together: forward as data flows between the devices, then back."""
    problem, devices = timeline.problem, range(timeline.problem.num_devices)
    flows = quotient(problem, timeline.placement)
    depth = np.zeros(len(devices), np.int64)  # stages that come before at least
    for _ in devices:
        depth = np.where(flows, depth[:, None] + 1, 0).max(axis=0)
    placed = timeline.placement[order]
    first = np.full(len(devices), len(order))
    np.minimum.at(first, placed, np.arange(len(order)))
    stage = np.empty(len(devices), np.int64)
    stage[np.lexsort((first, depth))] = devices
    back = problem.graph.phase[order] > 0
    return order[np.lexsort((np.where(back, -stage[placed], stage[placed]), back))]


def _largest_transfers(timeline: Timeline) -> Iterator[Moved]:
    graph, moving = timeline.problem.graph, timeline.transfers
    sizes = graph.tensor_bytes[moving.tensor]
    for i in np.argsort(-sizes, kind="stable")[:MAX_TRANSFERS].tolist():
        step = _transfer(timeline, i)
        names = (graph.op_names[step.op], graph.op_names[moving.reader[i]])
        yield Moved(*names, step.where, float(sizes[i]), step.seconds)


# ---- the chain -------------------------------------------------------------------------------------------------------


def critical_chain(timeline: Timeline) -> list[Step]:
    """The steps from time zero to the last finish.

    Walk back from the op that finishes last: it waited for its device since its last input came; that input was moved,
    after it waited for its channel since its producer finished; and so on with the producer. A sequential engine does
    one thing at a time, so there everything is on the chain.
    """
    if timeline.problem.execution.concurrency == "sequential":
        steps = [_compute(timeline, op) for op in range(timeline.problem.num_ops)]
        steps += [_transfer(timeline, i) for i in range(len(timeline.transfers))]
    else:
        steps = list(_walk_back(timeline))
    return sorted((step for step in steps if step.seconds > 0), key=lambda step: step.start)


def _walk_back(timeline: Timeline) -> Iterator[Step]:
    graph, moving = timeline.problem.graph, timeline.transfers
    devices = timeline.problem.cluster.device_names
    came_by = _transfer_of_input(timeline)
    opened_by = _prefetch_windows(timeline)
    had_device, had_channel = _user_of_device(timeline), _user_of_channel(timeline)
    input_ptr, inputs = graph.in_edges

    op: int | None = int(timeline.finish.argmax()) if graph.num_ops else None
    while op is not None:
        yield _compute(timeline, op)
        arrivals = [
            (float(timeline.finish[graph.tensor_producer[tensor]]), tensor, None)
            if (moved := came_by(tensor, op)) is None
            else (float(moving.finish[moved]), tensor, moved)
            for tensor in graph.edge_tensor[inputs[input_ptr[op] : input_ptr[op + 1]]].tolist()
        ]
        ready, tensor, moved = max(arrivals, key=lambda arrival: arrival[0], default=(0.0, -1, None))
        started = float(timeline.start[op])
        if started > ready:
            where = devices[timeline.placement[op]]
            yield Step("waiting for device", ready, started, where, op, had_device(op))
        if tensor < 0:
            return
        producer = int(graph.tensor_producer[tensor])
        if moved is None:
            op = None if graph.is_stored[producer] else producer
            continue
        step = _transfer(timeline, moved)
        yield step
        op = opened_by.get(int(moving.reader[moved])) if graph.is_stored[producer] else producer
        could_start = float(timeline.finish[op]) if op is not None else 0.0
        if step.start > could_start:
            yield Step("waiting for channel", could_start, step.start, step.where, producer, had_channel(moved))


def _compute(timeline: Timeline, op: int) -> Step:
    where = timeline.problem.cluster.device_names[timeline.placement[op]]
    return Step("compute", float(timeline.start[op]), float(timeline.finish[op]), where, op)


def _transfer(timeline: Timeline, i: int) -> Step:
    moving, devices = timeline.transfers, timeline.problem.cluster.device_names
    where = f"{devices[moving.source[i]]}->{devices[moving.target[i]]}"
    producer = int(timeline.problem.graph.tensor_producer[moving.tensor[i]])
    return Step("transfer", float(moving.start[i]), float(moving.finish[i]), where, producer)


def _transfer_of_input(timeline: Timeline) -> Any:
    """(tensor, consumer) -> the transfer that brought it, or None if it was there already."""
    moving, per_edge = timeline.transfers, timeline.problem.execution.sends == "edge"
    receiver = moving.reader if per_edge else moving.target
    found = {key: i for i, key in enumerate(zip(moving.tensor.tolist(), receiver.tolist(), strict=True))}
    return lambda tensor, op: found.get((tensor, op if per_edge else int(timeline.placement[op])))


def _prefetch_windows(timeline: Timeline) -> dict[int, int]:
    """For an op that reads streamed parameters: the op whose end made room to fetch them, if any."""
    problem, moving = timeline.problem, timeline.transfers
    stored = problem.graph.is_stored[problem.graph.tensor_producer[moving.tensor]]
    if not stored.any():
        return {}
    order = timeline.order if timeline.order is not None else priority_order(problem)
    rank = np.empty(problem.num_ops, np.int64)
    rank[order] = np.arange(problem.num_ops)
    windows: dict[int, int] = {}
    for d in range(problem.num_devices):
        readers = np.unique(moving.reader[stored & (moving.target == d)])
        queue = readers[np.argsort(rank[readers])].tolist()
        windows |= dict(zip(queue[problem.execution.prefetch :], queue, strict=False))
    return windows


def _user_of_device(timeline: Timeline) -> Callable[[int], int | None]:
    """For an op: the op that had its device until it started, if any; rather one that took time."""
    placement, start = timeline.placement, timeline.start
    by_end = np.lexsort((start, timeline.finish, placement))
    queues = np.split(by_end, np.searchsorted(placement[by_end], np.arange(1, timeline.problem.num_devices)))
    ends = [timeline.finish[queue] for queue in queues]

    def user(op: int) -> int | None:
        d = int(placement[op])
        first, last = (np.searchsorted(ends[d], start[op], side) for side in _SIDES)
        return next((int(other) for other in queues[d][first:last] if other != op), None)

    return user


def _user_of_channel(timeline: Timeline) -> Callable[[int], int | None]:
    """For a transfer: the op whose output had one of its channels until it started, if any."""
    moving, channels = timeline.transfers, timeline.problem.cluster.channels_of
    by_end = np.argsort(moving.finish, kind="stable")
    ends = moving.finish[by_end]

    def user(i: int) -> int | None:
        mine = set(channels[int(moving.source[i]), int(moving.target[i])])
        first, last = (np.searchsorted(ends, moving.start[i], side) for side in _SIDES)
        for j in by_end[first:last].tolist():
            if mine & set(channels[int(moving.source[j]), int(moving.target[j])]):
                return int(timeline.problem.graph.tensor_producer[moving.tensor[j]])
        return None

    return user


# ---- sums over the chain ---------------------------------------------------------------------------------------------


def _stretches(timeline: Timeline, chain: tuple[Step, ...]) -> Iterator[Stretch]:
    names = timeline.problem.graph.op_names
    for (kind, where), group in groupby(chain, key=lambda step: (step.kind, step.where)):
        steps = list(group)
        seconds = sum(step.seconds for step in steps)
        yield Stretch(kind, where, steps[0].start, seconds, len(steps), names[steps[0].op], names[steps[-1].op])


def _places(timeline: Timeline, chain: tuple[Step, ...]) -> tuple[dict[str, dict[str, float]], list[Step], float]:
    """Seconds of the chain by what it does and on which device or channel; its steps, where waits are charged to the
    ops that use what they wait for; and how long it waits for a device that is idle, since the order is the plan's.
    """
    cluster = timeline.problem.cluster
    names = (*cluster.device_names, *cluster.channels)
    of_device = {name: [d] for d, name in enumerate(cluster.device_names)}
    of_route = {
        f"{names[a]}->{names[b]}": [len(of_device) + c for c in channels]
        for (a, b), channels in cluster.channels_of.items()
    }
    busy = [*timeline.busy.tolist(), *timeline.channel_busy.tolist()]
    use = _use(timeline)
    found: dict[str, dict[str, float]] = {what: {} for what in _WORDS.values()}
    charged: list[Step] = []
    idle = 0.0
    for step in chain:
        on_device = step.kind in ("compute", "waiting for device")
        lanes = (of_device if on_device else of_route)[step.where]
        if _WORDS[step.kind] == "waits":
            users = [use(lane, step.start, step.finish) for lane in lanes]
            lane, (by, seconds) = max(zip(lanes, users, strict=True), key=lambda one: one[1][1].sum())
            rest = max(0.0, step.seconds - float(seconds.sum()))
            parts = [(op, op, part) for op, part in zip(by.tolist(), seconds.tolist(), strict=True)]
            parts.append((step.op, None, rest))
            charged += [Step(step.kind, 0.0, part, step.where, op, behind) for op, behind, part in parts if part > 0]
            idle += rest if on_device else 0.0
        else:
            lane = max(lanes, key=lambda lane: busy[lane])
            charged.append(step)
        places = found[_WORDS[step.kind]]
        places[names[lane]] = places.get(names[lane], 0.0) + step.seconds
    return found, charged, idle


def _use(timeline: Timeline) -> Callable[[int, float, float], tuple[Ints, Floats]]:
    """(device, or channel after them, from, to) -> the ops that use it, or whose output does, and for how long."""
    moving, devices = timeline.transfers, timeline.problem.num_devices
    transfer, channel = timeline.bookings
    producer = timeline.problem.graph.tensor_producer[moving.tensor[transfer]]
    lane = np.concatenate([timeline.placement, devices + channel])
    op = np.concatenate([np.arange(timeline.problem.num_ops), producer])
    start = np.concatenate([timeline.start, moving.start[transfer]])
    finish = np.concatenate([timeline.finish, moving.finish[transfer]])
    order = np.lexsort((finish, start, lane))
    ends = np.searchsorted(lane[order], np.arange(devices + len(timeline.problem.cluster.channels) + 1))
    queues = [order[a:b] for a, b in pairwise(ends.tolist())]
    since_when = [start[queue] for queue in queues]
    until = [np.maximum.accumulate(finish[queue]) for queue in queues]

    def users(lane: int, since: float, to: float) -> tuple[Ints, Floats]:
        first = np.searchsorted(until[lane], since, "right")
        some = queues[lane][first : np.searchsorted(since_when[lane], to)]
        return op[some], np.maximum(0.0, np.minimum(finish[some], to) - np.maximum(start[some], since))

    return users


def _by_module(timeline: Timeline, chain: Sequence[Step]) -> dict[str, dict[str, float]]:
    """Seconds by module and kind, the largest first.

    As deep into the module tree as `MAX_MODULES` rows allow, and deeper where one row would have nearly all.
    """
    graph = timeline.problem.graph
    several = len(graph.models) > 1
    paths = {}
    for step in chain:
        path = _module_path(graph.op_modules[step.op]) or (graph.op_kinds[step.op],)
        paths[step.op] = (graph.models[graph.model[step.op]], *path) if several else path
    deepest = max(map(len, paths.values()), default=1)
    sums: dict[str, dict[str, float]] = {}
    for depth in range(1, deepest + 1):
        deeper: dict[str, dict[str, float]] = {}
        for step in chain:
            split = deeper.setdefault(".".join(paths[step.op][:depth]), dict.fromkeys(KINDS, 0.0))
            split[step.kind] += step.seconds
        totals = [sum(split.values()) for split in sums.values()]
        if sums and len(deeper) > MAX_MODULES and max(totals) <= NEARLY_ALL * sum(totals):
            break
        sums = deeper
    return dict(sorted(sums.items(), key=lambda item: -sum(item[1].values())))


def _module_path(module: str) -> tuple[str, ...]:
    """Repeated layers are one: "layers.3.mlp" reads "layers.*.mlp"."""
    return tuple("*" if part.isdecimal() else part for part in module_parts(module))


# ---- pipelines -------------------------------------------------------------------------------------------------------


def pipeline_loads(timeline: Timeline) -> list[Load]:
    """Throughput: the load of each device and channel, per phase where the pipeline runs one phase after the other."""
    problem = timeline.problem
    loads = throughput_loads(problem, timeline.placement[None])
    compute, transfer, channel, _ = (load[0] for load in loads)
    device, passed, count = busy(problem, timeline.placement[None], *loads)
    together = problem.execution.pipeline == "1f1b"
    phases = {"": slice(0, 2)} if together else {" forward": slice(0, 1), " backward": slice(1, 2)}
    found: list[Load] = []
    for i, (phase, rows) in enumerate(phases.items()):
        parts = [
            (name, float(compute[rows, d].sum()), float(transfer[rows, d].sum()))
            for d, name in enumerate(problem.cluster.device_names)
        ]
        parts += [
            (name, 0.0, float(load))
            for name, load in zip(problem.cluster.channels, channel[rows].sum(axis=0), strict=False)
        ]
        repeats = [*count[0].tolist(), *[1] * passed.shape[2]]
        totals = [*device[0, i].tolist(), *passed[0, i].tolist()]
        found += [
            Load(name + phase, work, moves, total, total >= (1 - SAME) * max(totals), same)
            for (name, work, moves), total, same in zip(parts, totals, repeats, strict=True)
            if total > 0
        ]
    return found


def _pace_modules(timeline: Timeline, loads: tuple[Load, ...]) -> dict[str, float]:
    """What the first load that sets the pace is spent on; of a channel, whose outputs it carries."""
    pace = next((load for load in loads if load.sets_pace), None)
    if pace is None:
        return {}
    graph, cluster = timeline.problem.graph, timeline.problem.cluster
    phase = _phase(pace)
    name = pace.where.removesuffix(phase)
    if name in cluster.device_names:
        ops = np.flatnonzero((timeline.placement == cluster.device_index(name)) & ~graph.is_stored)
        steps = [_compute(timeline, op) for op in ops.tolist()]
    else:
        transfer, channel = timeline.bookings
        steps = [_transfer(timeline, i) for i in transfer[channel == cluster.channels.index(name)].tolist()]
    steps = [step for step in steps if not phase or (graph.phase[step.op] > 0) == (phase == " backward")]
    sums = {module: sum(split.values()) / pace.replicas for module, split in _by_module(timeline, steps).items()}
    return {module: seconds for module, seconds in sums.items() if seconds > 0}


def occupied(timeline: Timeline) -> tuple[Floats, Floats, float]:
    """Seconds of compute of each device, seconds of each channel, and what both are shares of.

    That is one run; or in a full pipeline the time per sample, for which replicas deal the samples out.
    """
    problem = timeline.problem
    if problem.objective != "throughput":
        return timeline.busy, timeline.channel_busy, timeline.makespan
    compute, _, channel, _ = throughput_loads(problem, timeline.placement[None])
    count = np.maximum(1, replicas(timeline))
    contended = channel.shape[2] > 0
    return (
        compute[0].sum(axis=0) / count,
        channel[0].sum(axis=0) if contended else timeline.channel_busy,
        timeline.value,
    )


def replicas(timeline: Timeline) -> list[int]:
    """Throughput: how many devices do the work of each, itself included; 0 where it has no ops of its own."""
    problem, row = timeline.problem, timeline.placement[None]
    count: list[int] = busy(problem, row, *throughput_loads(problem, row))[2][0].tolist()
    return count


# ---- one op ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """The plan with one op, and the ops that share its device, moved elsewhere; `value` is None where it cannot be."""

    device: str
    ops: int
    seconds: float  # that the op takes there
    value: float | None
    problem: str
    is_current: bool


def moves_of(timeline: Timeline, op: int) -> list[Move]:
    """What each device would give for this op, everything else unchanged."""
    problem = timeline.problem
    unit = problem.unit == problem.unit[op]
    rows = np.tile(timeline.placement, (problem.num_devices, 1))
    rows[:, unit] = np.arange(problem.num_devices, dtype=np.int32)[:, None]
    values = evaluate(problem, rows, timeline.order)
    found = []
    for d, device in enumerate(problem.cluster.device_names):
        value = float(values.value[d]) if values.feasible[d] else None
        broken = "" if value is not None else "; ".join(violations(problem, rows[d], timeline.order))
        seconds = float(problem.seconds[op, d])
        found.append(Move(device, int(unit.sum()), seconds, value, broken, d == int(timeline.placement[op])))
    return found
