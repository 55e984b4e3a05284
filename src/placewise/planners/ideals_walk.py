"""From a pipeline to better ones: nodes at the border of two stages change sides, and stages change devices.

Where there are too many ideals to look at, a search within a limit does not end, and the best cuts of a few orders are
not the best pipeline. Simulated annealing (Kirkpatrick, Gelatt, Vecchi 1983, doi:10.1126/science.220.4598.671) goes on
from them. Stages stay in a row, and data flows forward along it, so every step is a contiguous pipeline.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numba import njit

from placewise.driver import Context
from placewise.graph import Ints
from placewise.planners.ideals_search import lists
from placewise.planners.pipeline import dataflow_order
from placewise.planners.stages import Stages, Whole
from placewise.problem import Problem

_WALKS: Final = 10
_PATIENCE: Final = 4  # walks in a row that bring nothing
_STEPS: Final = 4_000  # of a walk, for each node
_SHARE: Final = 0.2  # of the time that is left
_POWERS: Final = (60.0, 200.0)  # of loads: the higher, the more the busiest alone counts
_HOT: Final = (3e-4, 2e-3)  # of the busiest load: where the temperature begins
_COLD: Final = 1e-6
_LEG: Final = 1_000_000  # steps between two looks at the clock
_SWAPS: Final = 0.003  # share of steps at which two stages change devices
_MUCH: Final = 10.0  # times the busiest load to begin with: what may not run, or does not fit


def walk(problem: Problem, ctx: Context, stages: Stages) -> None:
    """Look for better pipelines from the best so far, for a share of the time that is left."""
    if stages.compute.shape[2] > 1 or (stages.kinds.most > 1).any() or stages.keeps:
        return
    until, kinds, of = ctx.seconds + _SHARE * ctx.seconds_left, stages.kinds, np.full(problem.num_devices, -1)
    for k, devices in enumerate(kinds.devices):
        of[list(devices)] = k
    graph = tables(stages)
    failed = 0
    for i in range(_WALKS):
        if failed == _PATIENCE or ctx.best is None or ctx.should_stop() or ctx.seconds >= until:
            return
        stage, device = _in_a_row(problem, stages, ctx.best[0])
        kind = of[device[of[device] >= 0][: problem.max_devices]]
        hot, power = _HOT[0] * (_HOT[1] / _HOT[0]) ** ctx.rng.random(), _POWERS[i % len(_POWERS)]
        stage, kind = _cooled(ctx, until, graph, stage, kind, hot, power, int(ctx.rng.integers(1 << 31)))
        left = [list(devices) for devices in kinds.devices]
        device = np.array([left[k].pop(0) for k in kind.tolist()], np.int32)
        ctx.spend(min(len(stage), ctx.evaluations_left))  # about as long
        before = ctx.best_value
        ctx.evaluate(device[stage[stages.node]][problem.unit])
        failed = 0 if ctx.best_value < before else failed + 1


def _cooled(
    ctx: Context, until: float, graph: tuple[Any, ...], stage: Whole, kind: Whole, hot: float, power: float, seed: int
) -> tuple[Whole, Whole]:
    """The best that one walk meets. It falls faster where steps take so long that it would not be cold in time."""
    steps, done, share, began, value = _STEPS * len(stage), 0, 0.0, ctx.seconds, math.inf
    stages, kinds = stage.copy(), kind.copy()
    while share < 1.0 and not ctx.should_stop():
        leg = min(_LEG, steps - done)
        ends = (hot * (_COLD / hot) ** min(1.0, at) for at in (share, share + leg / steps))
        value = anneal(*graph, stage, kind, stages, kinds, value, *ends, power, leg, (seed + done) % (1 << 31))
        done += leg
        share = max(done / steps, (ctx.seconds - began) / max(until - began, 1e-9))
    return stages, kinds


def tables(stages: Stages) -> tuple[Any, ...]:
    """What a walk reads."""
    n, m, kinds, compute = stages.num_nodes, stages.num_messages, stages.kinds, stages.compute[:, :, 0]
    able = np.isfinite(compute)
    endless = _MUCH * (np.where(able, compute, 0.0).max(axis=1).sum() + stages.send.sum() + stages.receive.sum())
    return (
        np.where(able, compute, endless), stages.need, *lists(stages.tail, stages.head, n),
        *lists(stages.head, stages.tail, n), *lists(stages.reader, stages.message, n),
        *lists(stages.sender, np.arange(m), n), np.searchsorted(stages.message, np.arange(m + 1)), stages.reader,
        stages.sender, np.ascontiguousarray(stages.send[:, kinds.tariff]),
        np.ascontiguousarray(stages.receive[:, kinds.tariff]), stages.copy,
        kinds.room - stages.scratch.max(initial=0.0), stages.overlap,
    )  # fmt: skip


def _in_a_row(problem: Problem, stages: Stages, placement: Ints) -> tuple[Whole, Whole]:
    """(the place of each node's stage, the devices in that order) of a placement; devices without nodes come last.

    A node whose units are apart goes where the last of them is, or after that if data has to flow there.
    """
    n, device = stages.num_nodes, np.zeros(stages.num_nodes, np.int64)
    device[stages.node] = placement[problem.first_of_unit]
    of_unit, graph = placement[problem.first_of_unit].astype(np.int64), problem.graph
    edge = (graph.phase[graph.edge_producer] == 0) & (graph.phase[graph.consumers] == 0)
    edge &= ~graph.is_stored[graph.edge_producer]
    a, b = (of_unit[problem.unit[end[edge]]] for end in (graph.edge_producer, graph.consumers))
    position = dataflow_order(stages.tail, stages.head, np.arange(n))
    first = np.full(problem.num_devices, n)
    np.minimum.at(first, device, position)
    place = dataflow_order(a, b, first)
    stage = place[device]
    before_ptr, before = lists(stages.head, stages.tail, n)
    for v in np.argsort(position).tolist():
        stage[v] = max([stage[v], *stage[before[before_ptr[v] : before_ptr[v + 1]]].tolist()])
    return stage, np.argsort(place)


@njit(cache=True, nogil=True)
def anneal(  # type: ignore[no-untyped-def]
    compute, need, after_ptr, after, before_ptr, before, read_ptr, read, sent_ptr, sent, start, reader, sender,
    send, receive, copy, room, overlap, stage, kind, stages, devices, best, hot, cold, power, steps, seed,
):  # fmt: skip
    """Goes on from `stage` and `kind`, which change; `stages` and `devices` are the best so far, with load `best`."""
    np.random.seed(seed)
    n, count, kinds = len(stage), len(kind), compute.shape[1]
    inside = np.zeros((len(sender), count), np.int64)  # readers
    work, moved = np.zeros((count, kinds)), np.zeros((count, kinds))  # on any kind of device
    used = np.zeros(count)
    for v in range(n):
        work[stage[v]] += compute[v]
        used[stage[v]] += need[v]
    for m in range(len(sender)):
        s, all_of = stage[sender[m]], start[m + 1] - start[m]
        for e in range(start[m], start[m + 1]):
            inside[m, stage[reader[e]]] += 1
        if inside[m, s] < all_of:
            moved[s] += send[m]
        for r in range(count):
            if r != s and inside[m, r] > 0:
                moved[r] += receive[m]
                used[r] += copy[m]
    load, scale, energy = np.zeros(count), 1e-300, 0.0
    for s in range(count):
        scale = max(scale, _load(work, moved, used, room, overlap, s, kind[s], 0.0))
    for s in range(count):
        load[s] = _load(work, moved, used, room, overlap, s, kind[s], scale)
        energy += (load[s] / scale) ** power
    if load.max() < best:
        best = load.max()
        stages[:], devices[:] = stage, kind
    temperature, fall = hot, (cold / hot) ** (1.0 / max(1, steps))
    fresh, of = np.zeros(2), np.zeros(2, np.int64)
    for _ in range(steps):
        temperature *= fall
        swaps = np.random.random() < _SWAPS
        v = np.random.randint(n)
        a, b = stage[v], stage[v] + (1 if np.random.random() < 0.5 else -1)
        if swaps:
            a, b = np.random.randint(count), np.random.randint(count)
            if kind[a] == kind[b]:
                continue
            of[0], of[1] = kind[b], kind[a]
        else:
            legal = 0 <= b < count
            if b > a:
                for x in range(after_ptr[v], after_ptr[v + 1]):
                    legal = legal and stage[after[x]] >= b
            else:
                for x in range(before_ptr[v], before_ptr[v + 1]):
                    legal = legal and stage[before[x]] <= b
            if not legal:
                continue
            of[0], of[1] = kind[a], kind[b]
            _cross(v, a, b, stage, compute, need, read_ptr, read, sent_ptr, sent, start, sender, send, receive, copy,
                   inside, work, moved, used)  # fmt: skip
        fresh[0] = _load(work, moved, used, room, overlap, a, of[0], scale)
        fresh[1] = _load(work, moved, used, room, overlap, b, of[1], scale)
        found = energy + (fresh[0] / scale) ** power + (fresh[1] / scale) ** power
        found = max(found - (load[a] / scale) ** power - (load[b] / scale) ** power, 1e-300)
        worse = found ** (1.0 / power) - energy ** (1.0 / power)
        if worse <= 0.0 or np.random.random() < np.exp(-worse / temperature):
            energy, load[a], load[b], kind[a], kind[b] = found, fresh[0], fresh[1], of[0], of[1]
            if load.max() < best:
                best = load.max()
                stages[:], devices[:] = stage, kind
        elif not swaps:
            _cross(v, b, a, stage, compute, need, read_ptr, read, sent_ptr, sent, start, sender, send, receive, copy,
                   inside, work, moved, used)  # fmt: skip
    return best


@njit(inline="always")
def _load(work, moved, used, room, overlap, s, k, scale):  # type: ignore[no-untyped-def]
    """The load of a stage on a kind of device; more where it does not fit."""
    load = max(work[s, k], moved[s, k]) if overlap else work[s, k] + moved[s, k]
    return load + scale * min(used[s] / max(room[k], 1e-9), _MUCH) if used[s] > room[k] else load


@njit(cache=True, nogil=True)
def _cross(  # type: ignore[no-untyped-def]
    v, a, b, stage, compute, need, read_ptr, read, sent_ptr, sent, start, sender, send, receive, copy,
    inside, work, moved, used,
):  # fmt: skip
    """Node v goes from stage a to stage b."""
    work[a] -= compute[v]
    work[b] += compute[v]
    used[a] -= need[v]
    used[b] += need[v]
    for x in range(read_ptr[v], read_ptr[v + 1]):
        m = read[x]
        s, all_of = stage[sender[m]], start[m + 1] - start[m]
        if inside[m, a] == (all_of if s == a else 1):
            if s == a:
                moved[a] += send[m]
            else:
                moved[a] -= receive[m]
                used[a] -= copy[m]
        if inside[m, b] == (all_of - 1 if s == b else 0):
            if s == b:
                moved[b] -= send[m]
            else:
                moved[b] += receive[m]
                used[b] += copy[m]
        inside[m, a] -= 1
        inside[m, b] += 1
    for x in range(sent_ptr[v], sent_ptr[v + 1]):
        m = sent[x]
        all_of = start[m + 1] - start[m]
        if inside[m, a] < all_of:
            moved[a] -= send[m]
        if inside[m, b] < all_of:
            moved[b] += send[m]
        if inside[m, a] > 0:
            moved[a] += receive[m]
            used[a] += copy[m]
        if inside[m, b] > 0:
            moved[b] -= receive[m]
            used[b] -= copy[m]
    stage[v] = b
