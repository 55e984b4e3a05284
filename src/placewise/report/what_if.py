"""What more hardware would gain: the plan simulated on a larger box, and that box planned anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from placewise import driver
from placewise.cluster import Cluster, Device, Link
from placewise.costs import Costs
from placewise.plans import Plan
from placewise.problem import Problem
from placewise.simulator import evaluate

GIB: Final = 2.0**30


class WhatIf(NamedTuple):
    """One change, and what it would make of the plan."""

    change: str
    same: float  # seconds: every op stays where it is
    planned: float  # seconds: the better of that and a new plan


def what_if(
    plan: Plan,
    *,
    budget: driver.Budget = driver.DEFAULT_BUDGET,
    on_progress: Callable[[driver.Progress], None] | None = None,
) -> Iterator[WhatIf]:
    """Change one thing at a time; `auto` has the budget for each.

    The first row changes nothing: it is what planning once more finds, and what the others are to be compared with.
    `on_progress` is told the change, and how many there are, in place of the planner. Ctrl-C ends it.
    """
    known = [plan]  # what is good on this box fits on a larger one, too
    changes = list(_changes(plan.problem))
    for i, (change, problem) in enumerate(changes, start=1):
        values = [float(evaluate(problem, old.placement, old.order).score[0]) for old in known]
        told = on_progress and partial(_tell, on_progress, f"{i}/{len(changes)} {change}")
        anew = driver.plan(problem, budget=budget, seed=plan.seed, on_progress=told)
        if anew.stopped == "interrupted":
            raise KeyboardInterrupt
        yield WhatIf(change, values[0], min(*values, anew.value))
        if len(known) == 1:
            known.append(anew)


def _tell(on_progress: Callable[[driver.Progress], None], change: str, now: driver.Progress) -> None:
    on_progress(replace(now, planner=change))


def _changes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    yield "nothing", problem
    cluster = problem.cluster
    for alike in _alike(cluster):
        members = [device for device in alike if device.name not in problem.forbidden]
        if not members:
            continue
        which = members[0].name if len(members) == 1 else f"{members[0].name} to {members[-1].name} each"
        if np.isfinite(members[0].memory):
            larger = cluster.with_memory({device.name: device.memory + GIB for device in members})
            yield f"1 GiB more: {which}", replace(problem, cluster=larger)
        yield f"one more like {members[0].name}", _one_more(problem, members[0])
    if cluster.links:
        faster = replace(cluster, links=tuple(replace(link, bandwidth=2 * link.bandwidth) for link in cluster.links))
        yield "links twice as fast", replace(problem, cluster=faster)


def _alike(cluster: Cluster) -> list[list[Device]]:
    """Devices that differ in nothing but their names."""
    classes: dict[str, list[Device]] = {}
    for device in cluster.devices:
        classes.setdefault(repr(replace(device, name="", profile=None)), []).append(device)
    return list(classes.values())


def _one_more(problem: Problem, device: Device) -> Problem:
    """A twin of a device: the same costs, links of the same kind, over the same shared channels."""
    cluster = problem.cluster
    known, d = set(cluster.device_names), cluster.device_index(device.name)
    twin = replace(device, name=next(name for i in range(2, 10**6) if (name := f"{device.name} ({i})") not in known))
    links = [
        replace(link, source=twin.name if link.source == device.name else link.source,
                target=twin.name if link.target == device.name else link.target)
        for link in cluster.links if device.name in (link.source, link.target)
    ]  # fmt: skip
    between = _between(cluster, d)
    links += [replace(between, source=a, target=b) for a, b in ((device.name, twin.name), (twin.name, device.name))]
    columns = [*range(problem.num_devices), d]
    costs = Costs.create(problem.costs.seconds[:, columns], problem.costs.label[:, columns])
    wider = replace(cluster, devices=(*cluster.devices, twin), links=(*cluster.links, *links))
    return replace(problem, cluster=wider, costs=costs)


def _between(cluster: Cluster, d: int) -> Link:
    """How a device would be linked to its twin: as to one like it, if there is one, else as to the nearest other."""
    name, kind = cluster.device_names[d], cluster.devices[d].kind
    kinds = {device.name: device.kind for device in cluster.devices}
    outgoing = [link for link in cluster.links if link.source == name]
    like = [link for link in outgoing if kinds[link.target] == kind]
    return max(like or outgoing, key=lambda link: link.bandwidth, default=Link(name, name))
