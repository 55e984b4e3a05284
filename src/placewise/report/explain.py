"""What limits a plan: the chain of work and waits that ends last, the loads that set the pace, what a move would give.

Everything here is read off a `Timeline`; nothing is planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from placewise.simulator import Timeline, evaluate, violations
from placewise.simulator.arrays import priority_order
from placewise.simulator.bounds import lower_bound
from placewise.simulator.evaluation import throughput_loads

KINDS: Final = ("compute", "transfer", "waiting for device", "waiting for channel")
MAX_MODULES: Final = 12


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


@dataclass(frozen=True)
class Load:
    """Throughput: what one device or channel does per sample."""

    where: str
    compute: float
    transfer: float
    total: float  # the sum, or the longer of the two where they overlap
    sets_pace: bool


@dataclass(frozen=True)
class Explanation:
    """What limits a plan. A pipeline is limited by its loads, a single run by its chain; the other is empty."""

    chain: tuple[Step, ...]
    by_kind: dict[str, float]
    by_module: dict[str, dict[str, float]]
    stretches: tuple[Stretch, ...]
    loads: tuple[Load, ...]
    busiest_device: tuple[str, float]  # and its seconds
    busiest_channel: tuple[str, float]  # ("", 0) where nothing moves
    bound_parts: dict[str, float]


def explain(timeline: Timeline) -> Explanation:
    """Why the plan is not faster."""
    problem, cluster = timeline.problem, timeline.problem.cluster
    pipelined = problem.objective == "throughput"
    chain = () if pipelined else tuple(critical_chain(timeline))
    by_kind = dict.fromkeys(KINDS, 0.0)
    for step in chain:
        by_kind[step.kind] += step.seconds
    device = int(timeline.busy.argmax())
    channel = int(timeline.channel_busy.argmax()) if len(timeline.transfers) else None
    return Explanation(
        chain=chain,
        by_kind=by_kind,
        by_module=_by_module(timeline, chain),
        stretches=tuple(_stretches(chain)),
        loads=tuple(pipeline_loads(timeline)) if pipelined else (),
        busiest_device=(cluster.device_names[device], float(timeline.busy[device])),
        busiest_channel=("", 0.0)
        if channel is None
        else (cluster.channels[channel], float(timeline.channel_busy[channel])),
        bound_parts={name: float(seconds) for name, seconds in lower_bound(problem).parts.items()},
    )


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
    inputs: list[list[int]] = [[] for _ in range(graph.num_ops)]
    for tensor, consumer in zip(graph.edge_tensor.tolist(), graph.consumers.tolist(), strict=True):
        inputs[consumer].append(tensor)

    op: int | None = int(timeline.finish.argmax()) if graph.num_ops else None
    while op is not None:
        yield _compute(timeline, op)
        arrivals = [
            (float(timeline.finish[graph.tensor_producer[tensor]]), tensor, None)
            if (moved := came_by(tensor, op)) is None
            else (float(moving.finish[moved]), tensor, moved)
            for tensor in inputs[op]
        ]
        ready, tensor, moved = max(arrivals, key=lambda arrival: arrival[0], default=(0.0, -1, None))
        started = float(timeline.start[op])
        if started > ready:
            where = devices[timeline.placement[op]]
            yield Step("waiting for device", ready, started, where, op, _previous_on_device(timeline, op))
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
            behind = _previous_on_channel(timeline, moved)
            yield Step("waiting for channel", could_start, step.start, step.where, producer, behind)


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


def _previous_on_device(timeline: Timeline, op: int) -> int | None:
    just_done = (timeline.placement == timeline.placement[op]) & (timeline.finish == timeline.start[op])
    just_done[op] = False
    before = np.flatnonzero(just_done)
    return int(before[timeline.start[before].argmin()]) if len(before) else None  # rather one that took time


def _previous_on_channel(timeline: Timeline, i: int) -> int | None:
    moving, channels = timeline.transfers, timeline.problem.cluster.channels_of
    mine = set(channels[int(moving.source[i]), int(moving.target[i])])
    for j in np.flatnonzero(moving.finish == moving.start[i]).tolist():
        if mine & set(channels[int(moving.source[j]), int(moving.target[j])]):
            return int(timeline.problem.graph.tensor_producer[moving.tensor[j]])
    return None


# ---- sums over the chain ---------------------------------------------------------------------------------------------


def _stretches(chain: tuple[Step, ...]) -> list[Stretch]:
    found: list[Stretch] = []
    for step in chain:
        if found and (found[-1].kind, found[-1].where) == (step.kind, step.where):
            last = found.pop()
            found.append(Stretch(last.kind, last.where, last.start, last.seconds + step.seconds, last.steps + 1))
        else:
            found.append(Stretch(step.kind, step.where, step.start, step.seconds, 1))
    return found


def _by_module(timeline: Timeline, chain: tuple[Step, ...]) -> dict[str, dict[str, float]]:
    """Seconds by module and kind, the largest first, as deep into the module tree as `MAX_MODULES` rows allow."""
    graph = timeline.problem.graph
    paths = {step.op: _module_path(graph.op_modules[step.op] or graph.op_kinds[step.op]) for step in chain}
    depth = 1
    while any(len(path) > depth for path in paths.values()):
        if len({path[: depth + 1] for path in paths.values()}) > MAX_MODULES:
            break
        depth += 1
    sums: dict[str, dict[str, float]] = {}
    for step in chain:
        split = sums.setdefault(".".join(paths[step.op][:depth]), dict.fromkeys(KINDS, 0.0))
        split[step.kind] += step.seconds
    return dict(sorted(sums.items(), key=lambda item: -sum(item[1].values())))


def _module_path(module: str) -> tuple[str, ...]:
    """Repeated layers are one: "layers.3.mlp" reads "layers.*.mlp"."""
    return tuple("*" if part.isdecimal() else part for part in module.split("."))


# ---- pipelines -------------------------------------------------------------------------------------------------------


def pipeline_loads(timeline: Timeline) -> list[Load]:
    """Throughput: the load of each device and channel, per phase where the pipeline runs one phase after the other."""
    problem = timeline.problem
    compute, transfer, channel = (loads[0] for loads in throughput_loads(problem, timeline.placement[None])[:3])
    phases = (
        {"": slice(0, 2)}
        if problem.execution.pipeline == "1f1b"
        else {" forward": slice(0, 1), " backward": slice(1, 2)}
    )
    found: list[Load] = []
    for phase, rows in phases.items():
        parts = [
            (name, float(compute[rows, d].sum()), float(transfer[rows, d].sum()))
            for d, name in enumerate(problem.cluster.device_names)
        ]
        parts += [
            (name, 0.0, float(load))
            for name, load in zip(problem.cluster.channels, channel[rows].sum(axis=0), strict=False)
        ]
        totals = [max(work, moves) if problem.execution.overlap else work + moves for _, work, moves in parts]
        found += [
            Load(name + phase, work, moves, total, total == max(totals) > 0)
            for (name, work, moves), total in zip(parts, totals, strict=True)
            if total > 0
        ]
    return found


# ---- one op ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """The plan with one op, and the ops that share its device, moved elsewhere; `value` is None where it cannot be."""

    device: str
    ops: int
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
        found.append(Move(device, int(unit.sum()), value, broken, d == int(timeline.placement[op])))
    return found
