"""Checks a plan without the simulator: what it claims, worked out again from docs/execution-model.md in plain Python.

The simulator and the bounds are compiled and clever; nothing here is either. What they found is taken as a witness and
gone over: the timeline of a run must be one that the engine can execute, loads and bytes are added up anew, and the
prices behind the area, which any would do for a proof, are charged to every unit again. Sums are exact (`fsum`). A
bound that a planner proved by search has no short witness, and a path may be too long: these are taken on trust, which
is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from typing import Any, Final

import numpy as np

from placewise.plans import Plan
from placewise.problem import Problem
from placewise.simulator.bounds import lower_bound
from placewise.simulator.streaming import Streaming
from placewise.simulator.throughput import busy, throughput_loads
from placewise.simulator.turns import Turns

_SAME: Final = 1e-9  # relative; what rounding may amount to
_LONGEST: Final = 1000  # ops of a path that is gone over in stretches, or whose heads and tails are
_NEAR: Final = 24  # ops before one that take turns
TRUST: Final = "on trust"
NO_CLAIM: Final = "no claim"  # told for what it explains


@dataclass(frozen=True)
class Finding:
    """One claim, and what became of it."""

    claim: str
    claimed: float | None  # seconds or bytes
    found: float | None
    verdict: str  # "holds", "on trust" (and why, where it could be worked out), or what is wrong

    @property
    def is_wrong(self) -> bool:
        """Whether the claim was refuted."""
        return self.verdict not in ("holds", NO_CLAIM) and not self.verdict.startswith(TRUST)


class _Wrong(Exception):
    """What cannot be."""


def check(plan: Plan) -> list[Finding]:
    """Go over everything that a plan claims."""
    problem = plan.problem
    found = [Finding("placement", None, None, _misplaced(plan) or "holds")]
    if found[0].is_wrong:
        return found
    in_slots = problem.execution.concurrency == "slots"
    measure = _pipeline if problem.objective == "throughput" else _slots if in_slots else _run
    try:
        value, bytes_held = measure(plan)
    except _Wrong as wrong:
        return [*found, Finding("value", plan.value, None, str(wrong)), *_bound(plan)]
    same = math.isclose(value, plan.value, rel_tol=_SAME, abs_tol=1e-300)
    found.append(Finding("value", plan.value, value, "holds" if same else "it comes to something else"))
    for d, device in enumerate(problem.cluster.devices):
        if math.isfinite(device.memory):
            fits = bytes_held[d] <= device.memory * (1 + _SAME)
            found.append(Finding(f"memory of {device.name}", device.memory, bytes_held[d],
                                 "holds" if fits else "it holds more"))  # fmt: skip
    return found + list(_bound(plan))


# ---- the placement ---------------------------------------------------------------------------------------------------


def _misplaced(plan: Plan) -> str:
    problem, graph = plan.problem, plan.problem.graph
    place, names = plan.placement.tolist(), plan.problem.cluster.device_names
    pinned = {graph.op_index(op): device for op, device in problem.pins.items()}
    home: dict[int, int] = {}
    for op, d in enumerate(place):
        if not math.isfinite(problem.costs.seconds[op, d]) or names[d] in problem.forbidden:
            return f"op {graph.op_names[op]} may not run on {names[d]}"
        if pinned.get(op, names[d]) != names[d]:
            return f"op {graph.op_names[op]} is pinned elsewhere"
        group = int(graph.group[op])
        if group >= 0 and home.setdefault(group, d) != d:
            return f"op {graph.op_names[op]} is apart from its group"
    if problem.max_devices is not None and len(set(place)) > problem.max_devices:
        return "too many devices"
    if problem.contiguous and _depths(_flows(problem, place), [1] * problem.num_devices) is None:
        return "data flows back to a device that it has left"
    return ""


def _flows(problem: Problem, place: list[int]) -> dict[int, set[int]]:
    """The devices that forward data flows to from each one."""
    graph = problem.graph
    flows: dict[int, set[int]] = {d: set() for d in range(problem.num_devices)}
    for a, b in zip(graph.edge_producer.tolist(), graph.consumers.tolist(), strict=True):
        if place[a] != place[b] and not graph.phase[a] and not graph.phase[b] and not graph.is_stored[a]:
            flows[place[a]].add(place[b])
    return flows


def _depths(flows: dict[int, set[int]], count: list[int]) -> dict[int, int] | None:
    """How many devices a flow passes at most from each one on, replicas included; None where it goes in circles."""
    depth: dict[int, int] = {}
    while len(depth) < len(flows):
        ends = [d for d in flows if d not in depth and flows[d] <= depth.keys()]
        if not ends:
            return None
        depth |= {d: count[d] + max((depth[e] for e in flows[d]), default=0) for d in ends}
    return depth


# ---- one run ---------------------------------------------------------------------------------------------------------


def _run(plan: Plan) -> tuple[float, list[float]]:
    """(value, peak by device) of the timeline, as an execution of the plan."""
    problem, graph, cluster = plan.problem, plan.problem.graph, plan.problem.cluster
    timeline, execution, place = plan.timeline, plan.problem.execution, plan.placement.tolist()
    start, finish, moving = timeline.start.tolist(), timeline.finish.tolist(), timeline.transfers
    slack = _SAME * timeline.makespan
    runs = [op for op in range(problem.num_ops) if not graph.is_stored[op]]
    for op in runs:
        if abs(finish[op] - start[op] - problem.seconds[op, place[op]]) > slack:
            raise _Wrong(f"op {graph.op_names[op]} takes another time")
    # Who is occupied when: devices by ops, channels by transfers; one at a time all over in a sequential engine.
    occupied: dict[Any, list[tuple[float, float]]] = {}
    alone = execution.concurrency == "sequential"
    for op in runs:
        occupied.setdefault("engine" if alone else place[op], []).append((start[op], finish[op]))
    arrives: dict[tuple[int, int], tuple[float, float]] = {}
    rows = zip(moving.tensor.tolist(), moving.source.tolist(), moving.target.tolist(), moving.reader.tolist(),
               moving.start.tolist(), moving.finish.tolist(), strict=True)  # fmt: skip
    for t, a, b, reader, begin, end in rows:
        made = int(graph.tensor_producer[t])
        takes = float(cluster.latency[a, b] + graph.tensor_bytes[t] * cluster.seconds_per_byte[a, b])
        early = begin < (0.0 if graph.is_stored[made] else finish[made]) - slack
        if a != place[made] or early or abs(end - begin - takes) > slack:
            raise _Wrong(f"what {graph.op_names[made]} sends is not as it must be")
        arrives[t, reader if execution.sends == "edge" else b] = begin, end
        for channel in cluster.channels_of[a, b] if execution.contention == "channel" and not alone else ():
            occupied.setdefault(("channel", channel), []).append((begin, end))
        if alone:
            occupied.setdefault("engine", []).append((begin, end))
    for spans in occupied.values():
        if any(second[0] < first[1] - slack for first, second in pairwise(sorted(spans))):
            raise _Wrong("two things at a time where there is room for one")
    for t, op in zip(graph.edge_tensor.tolist(), graph.consumers.tolist(), strict=True):
        made = int(graph.tensor_producer[t])
        key = (t, op if execution.sends == "edge" else place[op])
        there = (0.0, finish[made]) if place[made] == place[op] else arrives.get(key, (0.0, math.inf))
        if start[op] < there[1] - slack:
            raise _Wrong(f"op {graph.op_names[op]} starts before its inputs")
    if plan.order is not None:
        last = [0.0] * problem.num_devices
        for op in [op for op in plan.order.tolist() if not graph.is_stored[op]]:
            if start[op] < last[place[op]] - slack:
                raise _Wrong("ops do not run in the plan's order")
            last[place[op]] = start[op]
    ends = [max((finish[op] for op in runs if graph.model[op] == m), default=0.0) for m in range(len(graph.models))]
    value = fsum(ends) if problem.objective == "completion" else max(ends, default=0.0)
    return value, _peaks(plan, arrives, start, finish)


def _peaks(
    plan: Plan, arrives: dict[tuple[int, int], tuple[float, float]], start: list[float], finish: list[float]
) -> list[float]:
    """[D] the most that is held at one instant."""
    graph, place, execution = plan.problem.graph, plan.placement.tolist(), plan.problem.execution
    base = _resident(plan)
    if execution.memory == "static":
        return base
    events: list[list[tuple[float, int, float]]] = [[] for _ in base]  # (when, 1 if it begins, bytes)

    def held(d: int, begin: float, end: float, size: float) -> None:
        if end > begin:
            events[d] += [(begin, 1, size), (end, 0, -size)]

    for op, d in enumerate(place):
        held(d, start[op], finish[op], float(graph.scratch[op]))
    for t, made in enumerate(graph.tensor_producer.tolist()):
        size = float(graph.tensor_bytes[t])
        readers = graph.consumers[graph.consumer_ptr[t] : graph.consumer_ptr[t + 1]].tolist()
        copies = {key: span for r in readers for key in [(t, r if execution.sends == "edge" else place[r])]
                  if place[r] != place[made] and (span := arrives.get(key))}  # fmt: skip
        for (_, key), (begin, _) in copies.items():
            read = [key] if execution.sends == "edge" else [r for r in readers if place[r] == key]
            held(place[read[0]], begin, max(finish[r] for r in read), size)
        if not graph.is_stored[made]:
            ends = [finish[r] for r in readers if place[r] == place[made]] + [end for _, end in copies.values()]
            held(place[made], start[made], max(ends) if readers else math.inf, size)
    return [base[d] + _highest(rows) for d, rows in enumerate(events)]


def _highest(events: list[tuple[float, int, float]]) -> float:
    """The most at one instant; what ends then makes room for what begins."""
    now = most = 0.0
    for _, _, change in sorted(events):
        now += change
        most = max(most, now)
    return most


def _resident(plan: Plan) -> list[float]:
    """[D] bytes that are held for the whole run."""
    graph = plan.problem.graph
    held: list[list[float]] = [[] for _ in range(plan.problem.num_devices)]
    for op, d in enumerate(plan.placement.tolist()):
        held[d].append(float(graph.resident[op]))
    for t, made in enumerate(graph.tensor_producer.tolist()):
        if graph.is_stored[made]:
            held[int(plan.placement[made])].append(float(graph.tensor_bytes[t]))
    return [fsum(sizes) for sizes in held]


# ---- slots -----------------------------------------------------------------------------------------------------------


def _slots(plan: Plan) -> tuple[float, list[float]]:
    """(value, bytes by device): pieces by their definition, each of which waits for all its inputs."""
    problem, graph, cluster = plan.problem, plan.problem.graph, plan.problem.cluster
    place, devices = plan.placement.tolist(), range(problem.num_devices)
    pool = [not device.copies for device in cluster.devices]
    runs = [op for op in graph.topological_order.tolist() if not graph.is_stored[op]]
    inputs: dict[int, list[int]] = {op: [] for op in range(problem.num_ops)}
    for a, b in zip(graph.edge_producer.tolist(), graph.consumers.tolist(), strict=True):
        if not graph.is_stored[a]:
            inputs[b].append(a)
    # been[op][d]: the last piece of d that data on its way to the op was in, -1 if none.
    been, piece = {op: [-1] * len(pool) for op in runs}, {}
    for op in runs:
        for d in devices:
            been[op][d] = max((been[u][d] for u in inputs[op]), default=-1)
        d = place[op]
        if pool[d]:
            piece[op] = (d, -1 - op)
            continue
        came_back = [been[u][d] + 1 for u in inputs[op] if place[u] != d and been[u][d] >= 0]
        stayed = [piece[u][1] for u in inputs[op] if place[u] == d]
        piece[op] = (d, max([0, *came_back, *stayed]))
        been[op][d] = piece[op][1]
        if piece[op][1] >= problem.execution.slots:
            raise _Wrong(f"op {graph.op_names[op]} needs a slot too many")
    takes: dict[tuple[int, int], list[float]] = {p: [] for p in piece.values()}
    before: dict[tuple[int, int], set[tuple[int, int]]] = {p: set() for p in piece.values()}
    for op in runs:
        takes[piece[op]].append(float(problem.seconds[op, place[op]]))
        before[piece[op]] |= {piece[u] for u in inputs[op]} - {piece[op]}
    for d, k in takes:
        before[d, k] |= {(e, j) for e, j in takes if e == d and 0 <= j < k}

    def link(t: int, ends: list[tuple[int, int]]) -> float:
        size = float(graph.tensor_bytes[t])
        return max((float(cluster.latency[e] + size * cluster.seconds_per_byte[e]) for e in ends), default=0.0)

    for t, made in enumerate(graph.tensor_producer.tolist()):
        readers = graph.consumers[graph.consumer_ptr[t] : graph.consumer_ptr[t + 1]].tolist()
        if graph.is_stored[made]:
            to = {piece[r] for r in readers if place[r] != place[made]}
        else:
            to = {piece[r] for r in readers} - {piece[made]}
            if to and not pool[place[made]]:
                takes[piece[made]].append(link(t, [(place[made], e) for e in devices if e != place[made]]))
        for p in to:
            if not pool[p[0]]:
                takes[p].append(link(t, [(e, p[0]) for e in devices if e != p[0]]))
    finish: dict[tuple[int, int], float] = {}
    while len(finish) < len(takes):
        able = [p for p in takes if p not in finish and before[p] <= finish.keys()]
        if not able:
            raise _Wrong("pieces wait for each other in a circle")
        finish |= {p: max((finish[q] for q in before[p]), default=0.0) + fsum(takes[p]) for p in able}
    ends = [max((finish[piece[op]] for op in runs if graph.model[op] == m), default=0.0)
            for m in range(len(graph.models))]  # fmt: skip
    return fsum(ends) if problem.objective == "completion" else max(ends, default=0.0), _resident(plan)


# ---- pipelines -------------------------------------------------------------------------------------------------------


def _pipeline(plan: Plan) -> tuple[float, list[float]]:
    """(time per sample, bytes by device); how many devices have a stage is the witness."""
    problem, graph, cluster = plan.problem, plan.problem.graph, plan.problem.cluster
    execution, place, devices = problem.execution, plan.placement.tolist(), range(problem.num_devices)
    work: list[list[list[float]]] = [[[], []] for _ in devices]  # by device and phase
    copies: list[list[list[float]]] = [[[], []] for _ in devices]
    passed: list[list[list[float]]] = [[[], []] for _ in cluster.channels]
    held: list[list[float]] = [[] for _ in devices]
    kept: list[list[float]] = [[] for _ in devices]
    trains = bool((graph.phase > 0).any())
    for op, d in enumerate(place):
        work[d][int(graph.phase[op] > 0)].append(float(problem.seconds[op, d]))
    for t, made in enumerate(graph.tensor_producer.tolist()):
        readers = graph.consumers[graph.consumer_ptr[t] : graph.consumer_ptr[t + 1]].tolist()
        home, phase, size = place[made], int(graph.phase[made] > 0), float(graph.tensor_bytes[t])
        stays = phase == 0 and not graph.is_stored[made]  # while the sample is in flight, if backward ops read it
        reread = any(graph.phase[r] > 0 for r in readers)
        weight, live = graph.op_kinds[made] == "parameter", execution.memory == "live"
        often = 1.0 if not weight else 1 / execution.microbatches if trains else 0.0  # sends per sample
        if live and not graph.is_stored[made]:
            held[home].append(size)
        if stays and reread and not execution.recompute:
            kept[home].append(size)
        targets = [place[r] for r in readers if place[r] != home]
        sent = [0.0]
        for d in targets if execution.sends == "edge" else sorted(set(targets)):
            sent.append(often * float(cluster.latency[home, d] + size * cluster.seconds_per_byte[home, d]))
            copies[d][phase].append(sent[-1] * cluster.devices[d].copies)
            held[d] += [size] if live or weight else []
            if stays and (reread or execution.recompute):
                kept[d].append(size)
            for channel in cluster.channels_of[home, d] if execution.contention == "channel" else ():
                passed[channel][phase].append(sent[-1])
        copies[home][phase].append((max(sent) if execution.staged else fsum(sent)) * cluster.devices[home].copies)
    flight = trains and execution.in_flight == "pipeline"
    if flight and execution.recompute:
        for d in devices:
            work[d][1] += work[d][0]
    row = plan.placement[None]
    count = busy(problem, row, *throughput_loads(problem, row))[2][0].tolist()
    resident, depth = _resident(plan), _depths(_flows(problem, place), count) or {}
    bytes_held = [fsum([resident[d], *held[d]]) for d in devices]
    if execution.memory == "live":
        for d in devices:
            step, ahead = execution.microbatches, depth.get(d, 1)
            in_all = step if execution.pipeline == "gpipe" else min(step, ahead) if step > 1 else ahead
            samples = math.ceil(in_all / count[d]) if flight and count[d] else 1
            scratch = max((float(graph.scratch[op]) for op, at in enumerate(place) if at == d), default=0.0)
            bytes_held[d] = fsum([resident[d], *held[d], (samples - 1) * fsum(kept[d]), scratch])
    value = 0.0
    for phases in [[0], [1]] if execution.pipeline == "gpipe" else [[0, 1]]:
        loads = [fsum(seconds for p in phases for seconds in channel[p]) for channel in passed]
        for d in set(place):
            both = [fsum(seconds for p in phases for seconds in table[d][p]) for table in (work, copies)]
            load = (max(both) if execution.overlap else sum(both)) / count[d]
            if trains and 1 in phases and count[d] > 1:
                other = next(e for e in devices if e != d and _twins(problem, d, e))
                ring = 2 * (count[d] - 1) / count[d] * resident[d] * float(cluster.seconds_per_byte[d, other])
                load += (ring + 2 * (count[d] - 1) * float(cluster.latency[d, other])) / execution.microbatches
            loads.append(load)
        value += max(loads, default=0.0)
    if not _enough(problem, place, count):
        raise _Wrong("there are not so many devices to share stages")
    return value, bytes_held


def _enough(problem: Problem, place: list[int], count: list[int]) -> bool:
    """Whether there are so many devices like those that have stages."""
    for d in set(place):
        kind = [e for e in range(problem.num_devices) if e == d or _twins(problem, d, e)]
        if sum(count[e] for e in kind if e in place) > len(kind):
            return False
    return sum(count[d] for d in set(place)) <= max(problem.max_devices or problem.num_devices, len(set(place)))


def _twins(problem: Problem, a: int, b: int) -> bool:
    """Whether two devices can change places."""
    cluster, swap = problem.cluster, {a: b, b: a}
    every = range(problem.num_devices)
    return (
        problem.seconds[:, a].tolist() == problem.seconds[:, b].tolist()
        and (cluster.devices[a].memory, cluster.devices[a].copies)
        == (cluster.devices[b].memory, cluster.devices[b].copies)
        and all(table[c, d] == table[swap.get(c, c), swap.get(d, d)]
                for table in (cluster.latency, cluster.seconds_per_byte) for c in every for d in every)
    )  # fmt: skip


# ---- the bound -------------------------------------------------------------------------------------------------------


def _bound(plan: Plan) -> Iterator[Finding]:
    """The ingredients that can be worked out again, and what the plan makes of them."""
    problem, again = plan.problem, {}
    if problem.num_ops and problem.objective == "completion":
        # What models take by the area has no witness, so that this may prove less, and the rest is on trust.
        claimed, alone = lower_bound(problem).parts["alone"], fsum(_alone(problem))
        if claimed <= alone * (1 + _SAME):
            again["alone"] = alone
            yield Finding("bound: alone", claimed, alone, "holds")
    elif problem.num_ops:
        bound = lower_bound(problem)
        again["unit"] = _unit(problem)
        if bound.prices is not None:
            again["area"] = _area(problem, *bound.prices)
        if "path" in bound.parts and problem.execution.concurrency != "slots":
            again["path"] = max(_paths(problem))
        if "path in stretches" in bound.parts and len(bound.path) <= _LONGEST:
            again["path in stretches"] = _in_stretches(problem, list(bound.path))
        if "turns" in bound.parts and bound.turns and problem.num_ops <= _LONGEST:
            again["turns"] = _turns(problem, bound.turns, bound.parts["turns"])
        if "streaming" in bound.parts and bound.streaming:
            again["streaming"] = _streaming(problem, bound.streaming)
        for name, seconds in again.items():
            good = bound.parts[name] <= seconds * (1 + _SAME)
            yield Finding(f"bound: {name}", bound.parts[name], seconds, "holds" if good else "it proves less")
    shown = max(again.values(), default=0.0)
    if plan.lower_bound > plan.value * (1 + _SAME):
        yield Finding("bound", plan.lower_bound, plan.value, "the plan itself is below it")
    elif plan.lower_bound <= shown * (1 + _SAME):
        yield Finding("bound", plan.lower_bound, shown, "holds")
    else:
        least = plan.lower_bound * (1 - _SAME)
        parts = [name for name, seconds in lower_bound(problem).parts.items() if seconds >= least and name not in again]
        name = f"by {plan.proved_by}" if plan.proved_by else parts[0] if parts else "by other arguments"
        too_long = f": over {_LONGEST:,} ops" if name in ("path in stretches", "turns") else ""
        yield Finding(f"bound: {name}", plan.lower_bound, None, TRUST + too_long)


def _fits(problem: Problem, unit: list[int]) -> list[int]:
    """The devices where a unit may run and has room, together with what any one of its ops holds while it runs."""
    need, held = fsum(float(problem.graph.resident_bytes[op]) for op in unit), _held(problem)
    return [d for d in range(problem.num_devices)
            if all(math.isfinite(problem.seconds[op, d]) for op in unit)
            and all(need + (held[op] if problem.seconds[op, d] > 0 else 0.0) <= problem.capacity[d] * (1 + _SAME)
                    for op in unit)]  # fmt: skip


def _held(problem: Problem) -> list[float]:
    """[N] bytes that each op reads, makes and needs besides; parameters may be resident. Added up once."""
    if "held" not in problem.derived:
        graph, sizes = problem.graph, [[float(scratch)] for scratch in problem.graph.scratch]
        for t, made in enumerate(graph.tensor_producer.tolist()):
            readers = graph.consumers[graph.consumer_ptr[t] : graph.consumer_ptr[t + 1]].tolist()
            for op in [made, *readers] if not graph.is_stored[made] else ():
                sizes[op].append(float(graph.tensor_bytes[t]))
        live = problem.execution.memory == "live"
        problem.derived["held"] = [fsum(mine) if live else 0.0 for mine in sizes]
    found: list[float] = problem.derived["held"]
    return found


def _units(problem: Problem) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for op in range(problem.num_ops):
        group = int(problem.graph.group[op])
        found.setdefault(group + problem.num_ops if group >= 0 else op, []).append(op)
    return list(found.values())


def _counts(problem: Problem, op: int, d: int) -> float:
    """Seconds of an op that count where one thing is done at a time; pools of a machine with slots do all at once."""
    in_pool = problem.execution.concurrency == "slots" and not problem.cluster.devices[d].copies
    return 0.0 if in_pool else float(problem.seconds[op, d])


def _unit(problem: Problem) -> float:
    """The longest that some unit takes where it is fastest, shared by all devices like it if they may repeat it."""
    most = problem.max_devices or problem.num_devices
    every = range(problem.num_devices)
    many = problem.objective == "throughput" and problem.execution.replicate
    alike = [min(most, sum(e == d or _twins(problem, d, e) for e in every)) if many else 1 for d in every]
    return max(
        min((fsum(_counts(problem, op, d) for op in unit) / alike[d] for d in _fits(problem, unit)), default=math.inf)
        for unit in _units(problem)
    )


def _alone(problem: Problem) -> list[float]:
    """How long each model takes at least: its longest path, or what must be on one device."""
    model, found = problem.graph.model.tolist(), [0.0] * len(problem.graph.models)
    if problem.execution.concurrency != "slots":
        found = _paths(problem)
    for unit in _units(problem):
        where = _fits(problem, unit)
        for m in {model[op] for op in unit}:
            takes = (fsum(_counts(problem, op, d) for op in unit if model[op] == m) for d in where)
            found[m] = max(found[m], min(takes, default=math.inf))
    return found


def _area(problem: Problem, time: Any, byte: Any) -> float:
    """What prices prove: the busiest device has at least the mean load at weights that add up to one, and no plan has
    more bytes on a device than fit, so that bytes, at any price, may be charged to it if its memory is credited.
    """
    graph, every = problem.graph, range(problem.num_devices)
    sequential = problem.execution.concurrency == "sequential"
    good = (time >= 0).all() and (byte >= 0).all() and not byte[~np.isfinite(problem.capacity)].any()
    sums = np.ones_like(time) == time if sequential else np.isclose(time.sum(axis=1), 1.0, rtol=0, atol=1e-12)
    if not good or not sums.all():
        return 0.0
    phase = [int(p > 0) if len(time) > 1 else 0 for p in graph.phase.tolist()]
    cheapest = []
    for unit in _units(problem):
        size = fsum(float(graph.resident_bytes[op]) for op in unit)
        prices = [fsum([*(time[phase[op], d] * _counts(problem, op, d) for op in unit), byte[d] * size])
                  for d in _fits(problem, unit)]  # fmt: skip
        cheapest.append(min(prices, default=math.inf))
    worth = [byte[d] * problem.capacity[d] for d in every if byte[d] > 0]
    return max(0.0, fsum(cheapest) - fsum(worth))


def _streaming(problem: Problem, said: Streaming) -> float:
    """What prices prove where stored tensors may be fetched: loads at weights that add up to one are at most the
    largest, bytes are credited as for the area, and a unit is charged for each tensor that it reads what the tensor is
    credited where it is, by its home or by a copy.
    """
    graph, cluster, every = problem.graph, problem.cluster, range(problem.num_devices)
    sequential = problem.execution.concurrency == "sequential"
    load, byte, having = said.load.tolist(), said.byte.tolist(), said.having.tolist()
    units, pairs = _units(problem), list(zip(said.tensor.tolist(), said.reader.tolist(), strict=True))
    read = set(zip(graph.edge_tensor.tolist(), graph.consumers.tolist(), strict=True))
    along = {(int(graph.tensor_producer[t]), op) for t, op in read}
    if (
        min([*load, *byte, *(price for row in having for price in row)]) < 0
        or len(load) != (1 if sequential else 1 + len(every) + len(cluster.channels))
        or abs(fsum(load) - 1.0) > 1e-12
        or any(byte[d] > 0 and math.isinf(problem.capacity[d]) for d in every)
        or any(step not in along for step in zip(said.path, said.path[1:], strict=False))
        or any(not graph.is_stored[graph.tensor_producer[t]] for t, _ in pairs)
        or any(all((t, op) not in read for op in units[u]) for t, u in pairs)
    ):
        return 0.0

    def copies(t: int, a: int, b: int) -> float:
        """What a copy is charged."""
        seconds = float(cluster.latency[a, b] + graph.tensor_bytes[t] * cluster.seconds_per_byte[a, b])
        if sequential:
            return seconds * float(load[0])
        shared = cluster.channels_of[a, b] if problem.execution.contention == "channel" else ()
        return seconds * float(fsum(load[1 + len(every) + c] for c in shared))

    charged: dict[int, list[list[float]]] = {}  # by unit
    worth: dict[int, list[list[float]]] = {}  # by tensor
    for (t, u), prices in zip(pairs, having, strict=True):
        charged.setdefault(u, []).append(prices)
        worth.setdefault(t, []).append(prices)
    of_op: dict[int, list[int]] = {}
    for t in worth:
        of_op.setdefault(int(graph.tensor_producer[t]), []).append(t)
    on_path, cheapest = set(said.path), []
    for u, unit in enumerate(units):
        costs = []
        for d in _fits(problem, unit):
            terms = [byte[d] * float(graph.resident_bytes[op]) for op in unit]
            terms += [prices[d] for prices in charged.get(u, [])]
            for op in unit:
                weight = load[0] if sequential else load[0] * (op in on_path) + load[1 + d]
                terms.append(weight * float(problem.seconds[op, d]))
                for t in of_op.get(op, []):
                    value = [fsum(prices[e] for prices in worth[t]) for e in every]
                    terms.append(-value[d])
                    terms += [min(0.0, copies(t, d, e) - value[e]) for e in every if e != d]
            costs.append(fsum(terms))
        cheapest.append(min(costs, default=math.inf))
    worth_of_memory = fsum(byte[d] * float(problem.capacity[d]) for d in every if byte[d] > 0)
    return max(0.0, fsum(cheapest) - worth_of_memory)


def _paths(problem: Problem) -> list[float]:
    """The longest chain of ops, each on its best device, with every change of device paid for.

    For completion, to the end of each model.
    """
    graph, cluster, every = problem.graph, problem.cluster, range(problem.num_devices)
    model = [m if problem.objective == "completion" else 0 for m in graph.model.tolist()]
    unit = {op: (i, _fits(problem, ops)) for i, ops in enumerate(_units(problem)) for op in ops}
    reads: dict[int, list[int]] = {op: [] for op in range(problem.num_ops)}
    for t, op in zip(graph.edge_tensor.tolist(), graph.consumers.tolist(), strict=True):
        reads[op].append(t)
    written: dict[int, list[tuple[int, int]]] = {op: [] for op in range(problem.num_ops)}
    for op, tensors in reads.items():
        for t in tensors:
            written[int(graph.tensor_producer[t])].append((t, op))

    def moves(t: int, a: int, b: int) -> float:
        return float(cluster.latency[a, b] + graph.tensor_bytes[t] * cluster.seconds_per_byte[a, b]) if a != b else 0.0

    order = graph.topological_order.tolist()
    ready: dict[tuple[int, int], float] = {}  # the earliest start of an op on a device
    for op in order:
        for d in unit[op][1]:
            ready[op, d] = max(
                (min(ready[u, a] + problem.seconds[u, a] + moves(t, a, d)
                     for a in unit[u][1] if unit[u][0] != unit[op][0] or a == d)
                 for t in reads[op] for u in [int(graph.tensor_producer[t])]), default=0.0)  # fmt: skip
    rest: dict[tuple[int, int], float] = {}  # the least time from the end of an op on a device
    for op in reversed(order):
        for d in unit[op][1]:
            rest[op, d] = max(
                (min(moves(t, d, b) + problem.seconds[r, b] + rest[r, b]
                     for b in unit[r][1] if unit[r][0] != unit[op][0] or b == d)
                 for t, r in written[op] if model[r] == model[op]), default=0.0)  # fmt: skip
    found = [0.0] * len(graph.models)
    for op in order:
        through = (ready[op, d] + problem.seconds[op, d] + rest[op, d] for d in every if (op, d) in ready)
        found[model[op]] = max(found[model[op]], float(min(through)))
    return found


def _in_stretches(problem: Problem, path: list[int]) -> float:
    """The least time of a path whose stretches each fit on a device, where not everything fits on one.

    Two things hold of the end of a joint, an op that all tensors between ops of the path end at or begin at if not on
    one side of it. It is no earlier than the path along the stretches. And if the ops since the joint before are not
    all on its device, it is elsewhere itself, or one of them is: it is no earlier than the longest way there, or there
    and back.

    So it is with ops beside the path, between two ops of it after or before which all others come: those on the device
    of both run there in turn, and for the rest it takes the longest way there and back.
    """
    graph, cluster, n = problem.graph, problem.cluster, len(path)
    fits = {op: _fits(problem, unit) for unit in _units(problem) for op in unit}
    home = {op: i for i, unit in enumerate(_units(problem)) for op in unit}
    need = [fsum(float(graph.resident_bytes[op]) for op in unit) for unit in _units(problem)]
    place = {op: s for s, op in enumerate(path)}
    reads: list[dict[int, float]] = [{} for _ in path]  # bytes, by who makes them
    for t, op in zip(graph.edge_tensor.tolist(), graph.consumers.tolist(), strict=True):
        made = place.get(int(graph.tensor_producer[t]))
        if made is not None and op in place:
            mine = reads[place[op]]
            mine[made] = max(mine.get(made, 0.0), float(graph.tensor_bytes[t]))
    if any(s - 1 not in reads[s] for s in range(1, n)) or any(made >= s for s in range(n) for made in reads[s]):
        return 0.0  # no path
    first_made = [min(mine, default=n) for mine in reads]  # the earliest that each op reads
    joints = [s for s in range(n) if min(first_made[s + 1 :], default=n) >= s]
    kinds: list[list[int]] = []  # two of each are enough
    for d in range(problem.num_devices):
        alike = next((kind for kind in kinds if _twins(problem, kind[0], d)), None)
        if alike is None:
            kinds.append([d])
        elif len(alike) == 1:
            alike.append(d)
    devices = [d for kind in kinds for d in kind]

    def takes(s: int, d: int) -> float:
        return float(problem.seconds[path[s], d]) if d in fits[path[s]] else math.inf

    def moves(size: float, a: int, b: int) -> float:
        return float(cluster.latency[a, b] + size * cluster.seconds_per_byte[a, b]) if a != b else 0.0

    def apart(low: int, high: int, home_of_low: int) -> float:
        """From the end of a joint on a device to that of the next one, if an op between or the next is elsewhere."""
        ready = {(low, d): 0.0 if d == home_of_low else math.inf for d in devices}
        for s in range(low + 1, high + 1):
            for d in devices:
                ready[s, d] = takes(s, d) + max(
                    min(ready[made, a] + moves(size, a, d) for a in devices
                        if a == d or home[path[made]] != home[path[s]])
                    for made, size in reads[s].items())  # fmt: skip
        rest = {(s, d): 0.0 if s < high or d == home_of_low else math.inf
                for s in range(low, high + 1) for d in devices}  # fmt: skip
        for s in range(high, low, -1):
            for made, size in reads[s].items():
                for a in devices:
                    least = min(moves(size, a, d) + takes(s, d) + rest[s, d] for d in devices
                                if a == d or home[path[made]] != home[path[s]])  # fmt: skip
                    rest[made, a] = max(rest[made, a], least)
        others = [d for d in devices if d != home_of_low]
        back = min((ready[s, d] + rest[s, d] for s in range(low + 1, high) for d in others), default=math.inf)
        return min([max(ready[high, home_of_low], back), *(ready[high, d] for d in others)])

    passes, least = _beside(problem, path, [kind[0] for kind in kinds], devices, fits, moves)
    floors = {(low, k): apart(low, high, kind[0]) for low, high in pairwise(joints) for k, kind in enumerate(kinds)}
    starts = [[math.inf] * len(kinds) for _ in path]
    later = [math.inf] * n
    ends, best = [[math.inf] * len(kinds) for _ in path], math.inf
    starts[0] = [takes(0, kind[0]) for kind in kinds]
    for s in range(n):
        if s and home[path[s]] != home[path[s - 1]]:
            for k, kind in enumerate(kinds):
                ways = [(ends[s - 1][j], other[0], kind[0] if j != k else kind[-1]) for j, other in enumerate(kinds)
                        if j != k or len(kind) > 1]  # fmt: skip
                starts[s][k] = min((at + moves(reads[s][s - 1], a, d) + takes(s, d) for at, a, d in ways),
                                   default=math.inf)  # fmt: skip
                if s in joints:
                    starts[s][k] = max(starts[s][k], later[s])
        for k, kind in enumerate(kinds):
            at, floor, units, most = starts[s][k], None if s in joints else later[s], set[int](), 0.0
            last, passed = s, math.nan
            for e in range(s, n):
                at += takes(e, kind[0]) if e > s else 0.0
                units.add(home[path[e]])
                most = max(most, _held(problem)[path[e]] if problem.seconds[path[e], kind[0]] > 0 else 0.0)
                room = problem.capacity[kind[0]] * (1 + _SAME)
                if not math.isfinite(at) or fsum(need[u] for u in units) + most > room:
                    break
                if e in joints:
                    at, floor, last = max(at, floor or 0.0), None, e
                if e in passes:
                    at = at if math.isnan(passed) else max(at, passed + least.get((e, k), 0.0))
                    passed = at
                if e in joints:
                    reached = at
                if e == n - 1:
                    best = min(best, at)
                    break
                ends[e][k] = min(ends[e][k], at)
                later[e + 1] = min(later[e + 1], reached + floors[last, k] if floor is None else floor)
    return best


def _beside(
    problem: Problem, path: list[int], homes: list[int], devices: list[int], fits: dict[int, list[int]],
    moves: Callable[[float, int, int], float],
) -> tuple[list[int], dict[tuple[int, int], float]]:  # fmt: skip
    """(places on a path of ops that all others come before or after, seconds from the end of the one before to the end
    of each on the same home, by place and home): of what lies between both ends of the path.
    """
    graph, order = problem.graph, problem.graph.topological_order.tolist()
    group = {op: i for i, unit in enumerate(_units(problem)) for op in unit}
    reads: dict[int, dict[int, float]] = {op: {} for op in order}  # bytes, by who makes them
    for t, op in zip(graph.edge_tensor.tolist(), graph.consumers.tolist(), strict=True):
        made = int(graph.tensor_producer[t])
        reads[op][made] = max(reads[op].get(made, 0.0), float(graph.tensor_bytes[t]))
    sources: dict[int, set[int]] = {}  # all that an op comes after
    for op in order:
        sources[op] = set(reads[op]).union(*(sources[made] for made in reads[op]))
    part = [op for op in order if op == path[0] or path[0] in sources[op]]
    part = [op for op in part if op == path[-1] or op in sources[path[-1]]]
    passes = [s for s, op in enumerate(path) if all(x in sources[op] or op in sources[x] for x in part if x != op)]
    least = {}
    for low, high in pairwise(passes):
        first, last = path[low], path[high]
        block = [op for op in part if first in sources[op] and (op in sources[last] or op == last)]
        others = set(block) - set(path)
        for k, home in enumerate(homes if others else []):

            def takes(op: int, d: int, home: int = home, last: int = last) -> float:
                return float(problem.seconds[op, d]) if d in fits[op] and (op != last or d == home) else math.inf

            ends = {(first, d): 0.0 if d == home else math.inf for d in devices}
            for op in block:
                for d in devices:
                    ends[op, d] = takes(op, d) + max(
                        min(ends[made, a] + moves(size, a, d) for a in devices if a == d or group[made] != group[op])
                        for made, size in reads[op].items() if (made, d) in ends)  # fmt: skip
            rest = {(op, d): 0.0 for op in (first, *block) for d in devices}
            for op in block[::-1]:
                for made, size in reads[op].items():
                    for a in devices if (made, devices[0]) in rest else ():
                        there = min(moves(size, a, d) + takes(op, d) + rest[op, d] for d in devices
                                    if a == d or group[made] != group[op])  # fmt: skip
                        rest[made, a] = max(rest[made, a], there)
            back = {op: min((ends[op, d] + rest[op, d] for d in devices if d != home), default=math.inf)
                    for op in others}  # fmt: skip
            least[high, k] = min(  # by the last one to come back from elsewhere, if any
                max(last_back, fsum(takes(op, home) for op in block if back.get(op, math.inf) > last_back))
                for last_back in [0.0, *back.values()])  # fmt: skip
    return passes, least


# ---- turns -----------------------------------------------------------------------------------------------------------


def _turns(problem: Problem, said: Turns, end: float) -> float:
    """What heads and tails prove, if each follows from those before it; up to `end`.

    An op cannot start on a device by a time if its inputs cannot be there. Nor can it if what it waits for does not
    fit into what is left of the devices: each of these ops runs after its head, on a device from which it is in time,
    and on each device they take turns. At any prices they cost no less than where each is cheapest, and no more than
    the time of all devices between the least of their heads and the last of their ends.
    """
    graph, every = problem.graph, range(problem.num_devices)
    fits = {op: set(_fits(problem, unit)) for unit in _units(problem) for op in unit}
    group = {op: i for i, unit in enumerate(_units(problem)) for op in unit}
    takes = np.array([[float(problem.costs.seconds[op, d]) * (not graph.is_stored[op]) if d in fits[op] else math.inf
                       for d in every] for op in range(problem.num_ops)])  # fmt: skip
    edges = list(zip(graph.edge_tensor.tolist(), graph.consumers.tolist(), strict=True))
    order = graph.topological_order.tolist()
    prices = [said.price.tolist(), [1.0] * len(every)]
    if min(prices[0]) < 0.0 or (said.head < 0.0).any() or (said.tail < 0.0).any():
        return 0.0
    for claimed, back in ((said.head, False), (said.tail, True)):
        inputs: dict[int, list[tuple[int, Any]]] = {op: [] for op in order}  # what comes before, seconds from there
        for t, reader in edges:
            made = int(graph.tensor_producer[t])
            way = problem.cluster.latency + graph.tensor_bytes[t] * problem.cluster.seconds_per_byte
            way = np.where(np.eye(len(every), dtype=bool), 0.0, way.T if back else way)
            if group[made] == group[reader]:
                way = np.where(np.eye(len(every), dtype=bool), 0.0, math.inf)
            inputs[made if back else reader].append((reader if back else made, way))
        for op in reversed(order) if back else order:
            done: dict[float, list[int]] = {}
            for d in every:
                twins = done.setdefault(float(claimed[op, d]), [])
                comes = max((float((claimed[made] + takes[made] + way[:, d]).min()) for made, way in inputs[op]),
                            default=0.0)  # fmt: skip
                if d not in fits[op] or claimed[op, d] <= comes * (1 + _SAME):
                    continue
                if not any(_twins(problem, d, e) for e in twins):
                    if not _too_much(op, d, float(claimed[op, d]), inputs, claimed, takes, prices):
                        return 0.0
                    twins.append(d)
    whole = float((said.head + takes + said.tail).min(axis=1).max())
    runs = [op for op in order if not graph.is_stored[op]]
    by_head, by_tail = (sorted(runs, key=lambda op: (-times[op].min(), op)) for times in (said.head, said.tail))
    rows = [[(said.head[op], takes[op], said.tail[op]) for op in later] for later in (by_head, by_tail)]
    refuted = any(_overflow(end * (1 - _SAME), ops, price) for ops in rows for price in prices)
    return max(whole, end) if refuted else whole


def _too_much(
    op: int, home: int, start: float, inputs: dict[int, list[tuple[int, Any]]], head: Any, takes: Any,
    prices: list[list[float]],
) -> bool:  # fmt: skip
    """Whether what an op waits for refutes that it starts on a device before a time."""
    near: list[int] = []
    looked = -1
    while looked < len(near) < _NEAR:
        at = op if looked < 0 else near[looked]
        near += [made for made in dict.fromkeys(made for made, _ in inputs[at]) if made not in near]
        looked += 1
    near = near[:_NEAR]
    rest = {made: np.zeros(len(takes[op])) for made in near}  # from the end of each until the op may start
    left = {made: sum(made == m for at in [op, *near] for m, _ in inputs[at]) for made in near}
    ready = [op]
    while ready:
        at = ready.pop()
        for made, way in inputs[at]:
            if made in rest:
                then = way[:, home] if at == op else (way + takes[at] + rest[at]).min(axis=1)
                rest[made] = np.maximum(rest[made], then)
                left[made] -= 1
                if not left[made]:
                    ready.append(made)
    alone = [float(d == home) for d in range(len(takes[op]))]
    orders = near, sorted(near, key=lambda made: -head[made].min())
    rows = [[(head[made], takes[made], rest[made]) for made in order] for order in orders]
    return any(_overflow(start * (1 - _SAME), ops, price) for ops in rows for price in [*prices, alone])


def _overflow(end: float, ops: list[tuple[Any, Any, Any]], price: list[float]) -> bool:
    """Whether some of the first ops cost more than there is, if all are over early enough: (head, seconds, rest)."""
    cost, prices = 0.0, np.array(price)
    begins, leaves = np.full(len(price), math.inf), np.full(len(price), math.inf)
    for head, takes, rest in ops:
        able = head + takes + rest <= end
        if not able.any():
            return True
        least = float((prices[able] * takes[able]).min())
        if least > 0.0:
            cost += least
            begins[able] = np.minimum(begins[able], head[able])
            leaves[able] = np.minimum(leaves[able], rest[able])
            used = np.isfinite(begins)
            if cost > fsum(prices[used] * np.maximum(0.0, end - begins[used] - leaves[used])):
                return True
    return False
