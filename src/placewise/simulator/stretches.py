"""A path under memory, cut into stretches: weights that do not fit on one device force the path to move on.

The ops of a path run one after another. Those that follow each other on one device are a *stretch*: their units must
fit there together with what any one of them holds while it runs, and the path pays for the tensor with which it moves
on. Which devices come back later is not asked, so the cheapest row of stretches that fit is a bound for every plan.

Tensors may jump over ops of the path (a residual connection). Where all of it passes through one op, a *joint*, time is
added up anew. If not all ops up to the next joint are on the device of the first, the next joint is elsewhere, or an op
between them is: the longest way there, or there and back, jumps included, is a second bound on when it ends.

Ops beside the path, between two ops of it that all others come before or after, run on the device of both as well, in
turn with the path, or elsewhere: then it takes the longest way there and back. Which are elsewhere is free, so those
that are back soonest are; the rest take turns.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import numpy as np
from numba import njit

from placewise.graph import Floats, Ints
from placewise.problem import Problem
from placewise.simulator.alike import kinds
from placewise.simulator.pieces import Part
from placewise.simulator.working import takes_time, working_set

_EFFORT: Final = 500_000_000  # pairs of ops, times kinds of devices, that are looked at
_MOST: Final = 200_000  # ops and edges, times pairs of devices, of graphs that are looked at beside the path


def stretched(problem: Problem, path: list[int], seconds: Floats, slack: float) -> float:
    """Seconds that no plan beats, by one path of ops that run; `seconds` [N, D] is infinite where one does not fit."""
    graph, groups = problem.graph, kinds(problem)
    if len(path) ** 2 * len(groups) > _EFFORT:
        return 0.0
    devices = sorted({d for group in groups for d in group[:2]})  # a third of a kind is no better than the second
    index = {d: i for i, d in enumerate(devices)}
    first = np.array([index[group[0]] for group in groups])
    second = np.array([index[group[1]] if len(group) > 1 else -1 for group in groups])
    place = np.full(problem.num_ops, -1)
    place[path] = np.arange(len(path))
    inside = np.flatnonzero((place[graph.edge_producer] >= 0) & (place[graph.consumers] >= 0))
    source, reader = place[graph.edge_producer[inside]], place[graph.consumers[inside]]
    by_reader = np.lexsort((source, reader))
    source, reader, tensor = source[by_reader], reader[by_reader], graph.edge_tensor[inside][by_reader]
    furthest = np.zeros(len(path), np.int64)
    np.maximum.at(furthest, source, reader)
    reached = np.maximum.accumulate(np.append(0, furthest[:-1]))  # by what comes before each op
    working: Any = np.zeros((len(path), len(groups)))
    if problem.execution.memory == "live":
        held, runs = working_set(problem)[path], takes_time(problem)[path]
        working = np.where(runs[:, [group[0] for group in groups]], held[:, None], 0.0)
    value = _cheapest(
        seconds[np.ix_(path, devices)], first, second, reached <= np.arange(len(path)), source,
        np.searchsorted(reader, np.arange(len(path) + 1)), graph.tensor_bytes[tensor],
        problem.unit[path].astype(np.int64), problem.per_unit(graph.resident_bytes), working,
        problem.capacity[[group[0] for group in groups]] * (1.0 + slack),
        problem.cluster.latency[np.ix_(devices, devices)], problem.cluster.seconds_per_byte[np.ix_(devices, devices)],
        _beside(problem, path, np.array(devices), first, seconds),
    )  # fmt: skip
    return float(value) * (1.0 - slack)


def _beside(problem: Problem, path: list[int], devices: Ints, first: Ints, seconds: Floats) -> Floats:
    """[n, kinds] least time from the end of an op of the path to the end of a later one on the same device, whatever is
    beside the path; by the later one, which all others come before or after, as they do the earlier one. Else -1.
    """
    graph, cluster, unit = problem.graph, problem.cluster, problem.unit
    found, place = np.full((len(path), len(first)), -1.0), {op: i for i, op in enumerate(path)}
    if (graph.num_ops + graph.num_edges) * len(devices) ** 2 > _MOST:
        return found
    part = Part(problem, path)
    found[[place[part.order[joint]] for joint in part.joints]] = 0.0
    for a, b in pairwise(part.joints):
        others = [i for i in range(a + 1, b) if part.order[i] not in place]
        edges = part.edges(a, b) if others else []
        for k, home in enumerate(first.tolist() if others else []):
            before, after = np.full((2, b - a + 1, len(devices)), 0.0)  # least time from the one end, and to the other
            before[0] = np.where(np.arange(len(devices)) == home, 0.0, np.inf)
            runs = seconds[part.order[a : b + 1]][:, devices]
            runs[0] = 0.0
            runs[-1, np.arange(len(devices)) != home] = np.inf
            moves = {
                t: cluster.latency[np.ix_(devices, devices)]
                + graph.tensor_bytes[t] * cluster.seconds_per_byte[np.ix_(devices, devices)]
                for t in dict.fromkeys(t for t, _, _ in edges)
            }
            apart = np.where(np.eye(len(devices), dtype=np.bool_), 0.0, np.inf)
            ways = [
                (made - a, i - a, apart if unit[part.order[made]] == unit[part.order[i]] else moves[t])
                for t, made, i in edges
            ]
            for made, i, way in ways:
                before[i] = np.maximum(before[i], (before[made] + runs[made] + way.T).min(axis=1))
            for made, i, way in sorted(ways, key=lambda edge: -edge[1]):
                after[made] = np.maximum(after[made], (way + runs[i] + after[i]).min(axis=1))
            away = before + runs + after
            away[:, home] = np.inf
            beside = np.array([i - a for i in others])
            backs = away[beside].min(axis=1)
            by_back = beside[np.argsort(backs)]
            here = np.ones(b - a + 1, np.bool_)
            here[by_back] = False
            home_after = np.cumsum(np.append(runs[here, home].sum(), runs[by_back[::-1], home]))[::-1]
            found[place[part.order[b]], k] = np.maximum(home_after, np.append(0.0, np.sort(backs))).min()
    return found


@njit(cache=True, nogil=True)
def _cheapest(  # type: ignore[no-untyped-def]
    seconds, first, second, joint, source, in_ptr, size, unit, resident, working, capacity, latency, per_byte, beside
):
    """The least time of a path in stretches that fit. Kinds are numbered; `first` and `second` are devices of each."""
    n, num_kinds = len(seconds), len(first)
    apart = _apart(seconds, first, joint, source, in_ptr, size, unit, latency, per_byte)
    best = np.inf
    starts = np.full((n, num_kinds), np.inf)  # least time to the end of an op that begins a stretch
    later = np.full((n, num_kinds), np.inf)  # when the next joint ends at the earliest, given what came before
    ends = np.full((n, num_kinds), np.inf)  # least time to the end of an op, the path about to move on
    after = np.full((n, num_kinds), np.inf)  # when the next joint ends at the earliest if it does
    seen = np.full(len(resident), -1, np.int64)  # the last stretch that counted a unit
    for s in range(n):
        if s == 0:
            for k in range(num_kinds):
                starts[0, k] = seconds[0, first[k]]
        elif unit[s] != unit[s - 1]:
            moved = 0.0
            for e in range(in_ptr[s], in_ptr[s + 1]):
                if source[e] == s - 1:
                    moved = max(moved, size[e])
            waits = after[s - 1].min()
            for k in range(num_kinds):
                for before in range(num_kinds):
                    a, d = first[before], second[k] if k == before else first[k]
                    if d >= 0:
                        there = ends[s - 1, before] + (latency[a, d] + moved * per_byte[a, d]) + seconds[s, d]
                        starts[s, k] = min(starts[s, k], there)
                if joint[s]:
                    starts[s, k] = max(starts[s, k], waits)
                later[s, k] = waits
        for k in range(num_kinds):
            time, floor, used, most = starts[s, k], later[s, k], 0.0, 0.0
            if time == np.inf:
                continue
            if joint[s]:
                floor = -1.0  # none: all ops since the last joint are on this device
            passed = time if beside[s, k] >= 0 else -1.0  # the end of the last op that all others come before or after
            for e in range(s, n):
                if e > s:
                    time += seconds[e, first[k]]
                if seen[unit[e]] != s * num_kinds + k:
                    seen[unit[e]] = s * num_kinds + k
                    used += resident[unit[e]]
                most = max(most, working[e, k])
                if time == np.inf or used + most > capacity[k]:
                    break
                if joint[e] and e > s:
                    time, floor = max(time, floor), -1.0
                if beside[e, k] >= 0:
                    if passed >= 0 and e > s:
                        time = max(time, passed + beside[e, k])
                    passed = time
                if e == n - 1:
                    best = min(best, time)
                    break
                ends[e, k] = min(ends[e, k], time)
                if joint[e]:
                    since = time
                after[e, k] = min(after[e, k], since + apart[e + 1, k] if floor < 0 else floor)
    return best


@njit(cache=True, nogil=True)
def _apart(seconds, first, joint, source, in_ptr, size, unit, latency, per_byte):  # type: ignore[no-untyped-def]
    """[n, kinds] least time from the end of the joint before an op to that of the next one, if not all are together.

    That is, if the joint before is on a device of this kind and some op after it, up to the next one, is elsewhere: the
    next one itself, or else one between, from which the way leads back.
    """
    n, devices = seconds.shape
    found = np.full((n, len(first)), np.inf)
    before = np.empty((n, devices))
    for k in range(len(first)):
        home = first[k]
        after = np.zeros((n, devices))  # from the end of an op to the end of the next joint at home
        for op in range(n - 1, 0, -1):
            for e in range(in_ptr[op], in_ptr[op + 1]):
                p = source[e]
                for a in range(devices):
                    least = np.inf
                    for d in range(devices):
                        if (a == d or unit[p] != unit[op]) and (d == home or not joint[op]):
                            rest = 0.0 if joint[op] else after[op, d]
                            least = min(least, (latency[a, d] + size[e] * per_byte[a, d]) + seconds[op, d] + rest)
                    after[p, a] = max(after[p, a], least)
        block, there_and_back = 1, np.inf  # where the block begins, and the least for its ops so far
        for op in range(1, n):
            before[op] = 0.0
            for e in range(in_ptr[op], in_ptr[op + 1]):
                p = source[e]
                for d in range(devices):
                    arrival = np.inf
                    for a in range(devices):
                        if a == d or unit[p] != unit[op]:
                            ready = before[p, a] + seconds[p, a]
                            if joint[p]:
                                ready = 0.0 if a == home else np.inf
                            arrival = min(arrival, ready + (latency[a, d] + size[e] * per_byte[a, d]))
                    before[op, d] = max(before[op, d], arrival)
            least = np.inf
            for d in range(devices):
                if d != home:
                    least = min(least, before[op, d] + seconds[op, d] + (0.0 if joint[op] else after[op, d]))
            if joint[op]:
                least = min(least, max(before[op, home] + seconds[op, home], there_and_back))
                for i in range(block, op + 1):
                    found[i, k] = least
                block, there_and_back = op + 1, np.inf
            else:
                there_and_back = min(there_and_back, least)
    return found
