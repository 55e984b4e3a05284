"""Tensor parallelism: like devices that cut up each op among them are one device, which is faster and has more room.

Each way to have devices in such groups is a problem like any other, for any planner; all ways are tried.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, permutations, product
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from placewise import driver, planners
from placewise.cluster import Cluster, Device, Link
from placewise.costs import LABELS, Costs
from placewise.driver import DEFAULT_BUDGET, DEFAULT_PLANNER, Budget, Progress
from placewise.errors import InvalidInput, NoFeasiblePlan, PlacewiseError, Unsupported, check_type
from placewise.graph import Floats
from placewise.plans import Plan
from placewise.problem import Problem
from placewise.simulator.alike import kinds
from placewise.simulator.bounds import lower_bound

_MOST_WAYS: Final = 200  # each has its bound, which takes a moment, even where there is no need to plan it

Groups = tuple[tuple[int, ...], ...]  # of devices, each of which is in one


def plan_sharded(
    problem: Problem,
    most: int,
    planner: str = DEFAULT_PLANNER,
    *,
    uniform: bool = False,
    seconds: Mapping[int, ArrayLike] | None = None,
    budget: Budget = DEFAULT_BUDGET,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """The best plan with devices in groups of up to `most`, and a bound that holds for all `ways` to group them.

    The plan's problem has groups as devices. With `execution.replicate`, a stage has any number of replicas of any
    number of shards, as in Piper (Tarnawski et al. 2021). `seconds` is for `sharded`; the budget is for all ways.
    """
    check_type(problem, Problem, "problem")
    check_type(budget, Budget, "budget")
    driver.compile_for(problem, planners.get(planner))
    began, spent, over, stopped = time.perf_counter(), 0, False, "finished"
    every = sorted((sharded(problem, groups, seconds) for groups in ways(problem, most, uniform)), key=_bound)
    proved = [(_bound(way), "") for way in every]
    at_first, left = proved[0][0], list(range(len(every)))
    best: Plan | None = None
    none: PlacewiseError | None = None
    try:
        while left and not over:  # those that had too little time have what others leave
            again: list[int] = []
            for turn, i in enumerate(left):
                now, rest, goal = time.perf_counter() - began, len(left) - turn, best.value if best else math.inf
                over = now >= (budget.seconds or math.inf) or spent >= (budget.evaluations or math.inf)
                if best and proved[i][0] >= goal:
                    continue
                if best and over:
                    again += left[turn:]
                    break
                share = Budget(
                    budget.seconds and max((budget.seconds - now) / rest, 1e-3),
                    budget.evaluations and max((budget.evaluations - spent) // rest, 1),
                )
                told = on_progress and partial(_tell, on_progress, f" {i + 1}/{len(every)}", best, min(proved)[0])
                try:
                    found = driver.plan(
                        every[i], planner, budget=share, seed=seed, options=options, on_progress=told, below=goal
                    )
                except NoFeasiblePlan as error:
                    proved[i], none = max(proved[i], (error.lower_bound, planner)), error
                    spent += share.evaluations or 0
                    continue
                except Unsupported as error:  # of one device, say, where it wants several
                    none = none or error
                    continue
                proved[i] = max(proved[i], (found.lower_bound, found.proved_by))
                if best is None or found.value < best.value:
                    history = tuple((now + at, spent + count, value) for at, count, value in found.history)
                    best = replace(found, history=history)
                spent += found.evaluations
                if found.stopped == "interrupted":
                    raise KeyboardInterrupt
                again += [i] if found.stopped == "budget" else []
            left = again
        stopped = "budget" if best and any(proved[i][0] < best.value for i in left) else "finished"
    except KeyboardInterrupt:
        if best is None:
            raise
        stopped = "interrupted"
    if best is None:
        raise none if isinstance(none, Unsupported) else NoFeasiblePlan(f"however devices are grouped: {none}")
    took = time.perf_counter() - began
    bound, by = min((best.lower_bound, best.proved_by), *proved, key=lambda one: one[0])
    return replace(
        best, lower_bound=bound, proved_by=by, bounds=((0.0, at_first), (took, bound)), stopped=stopped, seconds=took,
        evaluations=spent,
    )  # fmt: skip


def _bound(problem: Problem) -> float:
    return lower_bound(problem).value


def _tell(on_progress: Callable[[Progress], None], which: str, best: Plan | None, bound: float, now: Progress) -> None:
    value = min(now.value, best.value) if best else now.value
    on_progress(replace(now, planner=now.planner + which, value=value, lower_bound=bound))


# ---- groups ----------------------------------------------------------------------------------------------------------


def ways(problem: Problem, most: int, uniform: bool = False) -> list[Groups]:
    """All ways to have devices in groups of 1, 2, 4, ... up to `most`, of one size only if `uniform`.

    In a group are devices that are alike and follow one another in the cluster. As they are alike, it does not matter
    which of them are in which group.
    """
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise InvalidInput(f"shards: must be a whole number, 1 or more, found {most!r:.60}")
    sizes = [2**i for i in range(min(most, problem.num_devices).bit_length())]
    runs = [tuple(run.tolist()) for devices in kinds(problem)
            for run in np.split(devices, np.flatnonzero(np.diff(devices) != 1) + 1)]  # fmt: skip
    idle = [(d,) for d in range(problem.num_devices) if not any(d in run for run in runs)]
    found = [
        tuple(sorted(sum(way, idle)))
        for given in ([[size] for size in sizes] if uniform else [sizes])
        for way in islice(product(*(list(islice(_cuts(run, given), _MOST_WAYS + 1)) for run in runs)), _MOST_WAYS + 1)
    ]
    if len(found) > _MOST_WAYS:
        raise InvalidInput(
            f"shards: there are over {_MOST_WAYS} ways to have these devices in groups of up to {most}: "
            "ask for smaller groups, or for groups of one size"
        )
    return found


def _cuts(devices: tuple[int, ...], sizes: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Parts of these sizes, the larger first, in all numbers of each that come to all devices."""
    if not devices:
        yield []
    for i, size in enumerate(sizes):
        if size <= len(devices):
            yield from ([devices[:size], *rest] for rest in _cuts(devices[size:], sizes[: i + 1]))


# ---- the problem of groups -------------------------------------------------------------------------------------------


def sharded(problem: Problem, groups: Groups, seconds: Mapping[int, ArrayLike] | None = None) -> Problem:
    """The problem with each group of like devices as one device.

    Weights, activations and work are cut into as many parts as a group has devices: it has the memory of all, and what
    is sent from group to group goes in shares, over as many links as the smaller has devices. What an op takes is
    given, `seconds[size][op, device]` for such a device in a group of that size, or modelled (`_modelled`).
    """
    if problem.max_devices:
        raise Unsupported("max_devices would count a group as one device: forbid devices instead")
    given = {size: _checked(problem, size, table) for size, table in (seconds or {}).items()}
    first = [group[0] for group in groups]
    table, label = problem.costs.seconds[:, first], problem.costs.label[:, first]
    for g, group in enumerate(groups):
        if len(group) in given:
            table[:, g], label[:, g] = given[len(group)][:, group[0]], LABELS.index("given")
        elif len(group) > 1:
            table[:, g], label[:, g] = _modelled(problem, group), LABELS.index("modelled")
    devices = tuple(_as_one(problem.cluster, group) for group in groups)
    links = tuple(_link(problem, a, b) for a, b in permutations(groups, 2))
    return replace(problem, cluster=Cluster(devices, links, problem.cluster.name), costs=Costs.create(table, label))


def _checked(problem: Problem, size: int, table: ArrayLike) -> Floats:
    """Seconds that are given for groups of one size."""
    try:
        found = Costs.create(table).seconds
    except InvalidInput as error:
        raise InvalidInput(f"seconds[{size!r:.60}]: {error}") from None
    alone = problem.costs.seconds
    if found.shape != alone.shape or not np.array_equal(np.isinf(found), np.isinf(alone)):
        raise InvalidInput(
            f"seconds[{size!r:.60}]: must have a time for each op on each device of the problem that can run it, "
            f"{alone.shape} in all"
        )
    return found


def _as_one(cluster: Cluster, group: tuple[int, ...]) -> Device:
    one, size = cluster.devices[group[0]], len(group)
    if size == 1:
        return one
    return replace(
        one, name=_name(cluster, group), shards=size * one.shards, memory=size * one.memory, profile=None,
        bandwidth=size * one.bandwidth, flops={dtype: size * rate for dtype, rate in one.flops.items()},
    )  # fmt: skip


def _modelled(problem: Problem, group: tuple[int, ...]) -> Floats:
    """[N] what ops take on a group: their work is divided, their launch is not, and then they add up.

    As a shard has a part of the weights, what ops with weights make is a sum over the shards, in a ring: each sends a
    share 2 (size - 1) times. So it is with ops that must be with some that have weights; what is read there alone stays
    in parts.
    """
    graph, size, alone = problem.graph, len(group), problem.costs.seconds[:, group[0]]
    launch = np.minimum(problem.cluster.devices[group[0]].launch, alone)
    weights = np.zeros(problem.num_units, np.bool_)
    weights[problem.unit[graph.resident_bytes > 0]] = True
    weights[problem.unit[graph.consumers[graph.is_parameter[graph.edge_producer]]]] = True
    leaves = np.zeros(graph.num_tensors, np.bool_)
    leaves[graph.edge_tensor[problem.unit[graph.edge_producer] != problem.unit[graph.consumers]]] = True
    producer = graph.tensor_producer
    summed = leaves & weights[problem.unit[producer]] & ~graph.is_stored[producer]
    hop = _link(problem, group, (*group[1:], group[0]))
    ring = 2 * (size - 1) * (graph.tensor_bytes[summed] / hop.bandwidth + hop.latency)
    return launch + (alone - launch) / size + np.bincount(producer[summed], ring, problem.num_ops)


def _link(problem: Problem, a: tuple[int, ...], b: tuple[int, ...]) -> Link:
    """Pairs of devices each send a share; those that have a channel in common do so one after the other."""
    cluster, queues = problem.cluster, problem.execution.contention == "channel"
    pairs = list(zip(a, b, strict=False))
    lanes = [cluster.link(*pair) for pair in pairs]
    source, target = _name(cluster, a), _name(cluster, b)
    if len(lanes) == 1:
        return replace(lanes[0], source=source, target=target)
    busy: dict[Any, list[Link]] = {}
    for pair, lane in zip(pairs, lanes, strict=True):
        for channel in lane.via if lane.via and queues else (pair,):
            busy.setdefault(channel, []).append(lane)
    share = max(sum(1.0 / lane.bandwidth for lane in those) for those in busy.values()) / len(lanes)
    latency = max(sum(lane.latency for lane in those) for those in busy.values())
    via = tuple(dict.fromkeys(channel for lane in lanes for channel in lane.via))
    return Link(source, target, 1.0 / share if share else math.inf, latency, via)


def _name(cluster: Cluster, group: tuple[int, ...]) -> str:
    """The first and the last of many, but for names such as cuda:0, by whose numbers engines know them."""
    names = [cluster.device_names[d] for d in group]
    return "+".join(names) if len(names) < 3 or ":" in names[0] else f"{names[0]}..{names[-1]}"
