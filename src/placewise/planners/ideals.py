"""Exact contiguous pipelines by dynamic programming over ideals, decided limit by limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from placewise.colocation import colocate_backward
from placewise.costs import Costs
from placewise.driver import Context
from placewise.graph import Ints
from placewise.planners import get, planner
from placewise.planners.gates import without_idle_copies
from placewise.planners.ideals_bound import Boxes, raise_bound
from placewise.planners.ideals_kernel import Table, TooManyIdeals
from placewise.planners.ideals_search import CLOSE, MOST_LOOKS, Search, Stage, digits, lists
from placewise.planners.ideals_walk import anneal, tables, walk
from placewise.planners.pipeline import dataflow_order
from placewise.planners.stages import Stages, Whole, below, free_nodes, stages_of, stages_of_part, without
from placewise.problem import Problem
from placewise.simulator.throughput import throughput_loads

_ROUNDING: Final = 1e-12  # relative; in the sums of the simulator
_ROUGHLY: Final = 0.4  # relative; how close a bound is worth while before free nodes are added
_NEARLY: Final = 1e-3  # relative; from here on, the next limit is just below the best rather than halfway
_MOST_NODES: Final = 512  # that are looked at to begin with; only the heaviest, if there are more
_MORE_NODES: Final = 2048  # that are, if briefly
_BY_BOXES: Final = 0.8  # share of the time that is left
_ALONE: Final = 0.2  # the same, for plans without replicas
_FEW: Final = 64  # nodes whose places are tried out
_MOST_UNITS: Final = 1 << 15  # so that sums of whole numbers stay below two to the power of 63
_MOST_PARTS: Final = 5_000  # of a problem
_MOST_SETS: Final = 4096  # sets of devices, up to kind
_FEW_LOOKS: Final = 200  # the same, where there is something else to try


def why_not(problem: Problem) -> bool | str:
    """Whether ideals apply."""
    if not problem.contiguous:
        return "plans contiguous pipelines only (contiguous = true)"
    if problem.num_units > _MOST_UNITS:
        return f"takes {_MOST_UNITS} units at most, and there are {problem.num_units}"
    sets = math.prod(n + 1 for n in digits(stages_of(problem))) if problem.num_ops else 1
    return sets <= _MOST_SETS or f"tells {_MOST_SETS} sets of devices apart at most, and there are {sets}"


def _compile(problem: Problem) -> None:
    Search(stages_of(problem), 1.0, None).reach([math.inf])
    Table(1, 1).double()
    boxes = Boxes(stages_of(problem))
    boxes.reach(1e9)
    boxes.refine()
    stages = stages_of(problem)
    stage, kind = np.zeros(stages.num_nodes, np.int64), np.zeros(1, np.int64)
    anneal(*tables(stages), stage, kind, stage.copy(), kind.copy(), math.inf, 1.0, 1.0, 1.0, 1, 0)
    first = get("pipeline-dp")
    if first.compile:
        first.compile(problem)


@planner("ideals", objectives={"throughput"}, supports=why_not, compile=_compile)
def ideals(problem: Problem, ctx: Context) -> Ints | None:
    """The best contiguous pipeline, with proof, by dynamic programming over ideals (Tarnawski 2020, arXiv:2006.16423).

    An ideal is a set of nodes with all that they read; a contiguous plan is a chain of ideals, and each stage what one
    adds to the one before. For a limit of the load, the ideals are found that stages within the limit lead to, each
    with the sets of devices that it takes; if all nodes are never reached, no plan keeps the limit. So the best plan is
    closed in from both sides, and when time or memory is out, the last limit that no plan keeps is the bound.

    Beyond the paper: devices of any number of kinds, forward and backward counted apart, copies that overlap, live
    memory, pins, and no table of pairs. A plan's value is what the simulator says. It is proved best where links are
    equal and sends are staged, per edge, or have one reader; elsewhere stages are charged the least that they may have
    to pay (stages.py), which is a bound, and often the value too. What is left then is closed part by part, each with
    some units fixed. Shared channels count in the value alone, and so in parts.

    With replicas, a stage may take several devices of a kind. With samples in flight (1f1b) the search runs from the
    last stage to the first, so that it knows how many devices come after a stage, and what it has to hold. That is
    exact where nodes are in a row; where branches may be stages side by side, it is too much for some: plans are found
    so, but the bound is for the samples that a stage holds for sure, and parts close the rest.

    The paper ties units that only run backward to where their twins would run forward. Here they may be anywhere, as
    the simulator allows. Such free units, and of many nodes the lightest, are left out at first (`stages.without`) and
    added, the most doubtful first, until the bound meets the best plan. With all of them it is exact. Where nodes are
    many, boxes of ideals (ideals_bound.py) come first: what they prove is there soon, and holds where the rest is left.
    """
    if not problem.num_units:
        return np.zeros(0, np.int32)
    tied = problem
    if problem.num_units > _MOST_NODES:  # a first limit, soon
        ctx.delegate("pipeline-dp", share=0.2)
        tied = _tied(problem)
    if tied is problem:
        ctx.delegate("ideals-linear", share=0.3, options={"orders": 2})
    elif not ctx.should_stop():
        with ctx.aside(tied, share=0.3) as inner:
            inner.below = ctx.ceiling
            inner.delegate("ideals-linear", options={"orders": 2})
        if inner.best is not None:
            ctx.evaluate(inner.best[0])
    if problem.execution.replicate and not ctx.should_stop():  # without replicas there is less to try
        alone = replace(problem, execution=replace(problem.execution, replicate=False))
        with ctx.aside(alone, _ALONE) as inner:
            ideals(alone, inner)
        if inner.best is not None:
            ctx.evaluate(inner.best[0])
    every = below(stages_of(problem), ctx.ceiling)
    brief = every.num_nodes > _MOST_NODES  # a first try with more nodes, which gates may leave few ideals of
    if brief:
        walk(tied, ctx, below(stages_of(tied), ctx.ceiling))
        every = below(stages_of(problem), ctx.ceiling)
        raise_bound(every, ctx, problem.max_devices, share=_BY_BOXES)
    first = out = _left_out(every, _MORE_NODES)
    while not ctx.should_stop():
        stages = without_idle_copies(below(without(every, out), ctx.ceiling), ctx.lower_bound)
        many = len(out) > _FEW
        within = _NEARLY if many else _ROUGHLY if len(out) else CLOSE
        if stages.chained and not stages.in_a_row:
            settle(problem, ctx, every, stages, proves=False, within=within, halving=many)
            stages = stages.unchained()
        looks = _FEW_LOOKS if brief else MOST_LOOKS
        found = settle(problem, ctx, every, stages, proves=True, within=within, halving=many, looks=looks)
        if ctx.should_stop():
            return None
        if brief and (found is None or not len(out)):
            brief, first = False, _left_out(every, _MOST_NODES)
            out = first
            continue
        if not len(out):
            _part_by_part(problem, ctx)
            return None
        if found is None:  # too many ideals: let it be the bound without those nodes
            settle(problem, ctx, every, below(without(every, first), ctx.ceiling).unchained(), proves=True)
            return None
        out = np.delete(out, _most_doubtful(problem, every, out, found))
    return None


def _tied(problem: Problem) -> Problem:
    """The problem with backward ops where their forward ops are, if that leaves much less to try; else itself."""
    together = colocate_backward(problem)
    return together if 2 * together.num_units < problem.num_units else problem


def _part_by_part(problem: Problem, ctx: Context) -> None:
    """Find the best plan where stages cost more than they are charged at least: by fixing units, as long as it takes.

    A part is the problem with units that must, or must not, be on some device. If it has no pipeline that is charged
    less than the best plan costs, it is done with; else that pipeline is tried, and the part divided where it was
    charged too little: a unit is there, or on none of the devices that are alike, as these can change places. So all
    parts end, with all units fixed if need be. If none is left, the best is proved.
    """
    left, looked, every = [problem], 0, np.arange(problem.num_devices)
    shared = problem.cluster.has_shared_channels and problem.execution.contention == "channel"  # by some that are alike
    while left and ctx.lower_bound < ctx.ceiling * (1 - CLOSE):
        part, looked = left[-1], looked + 1
        stages = below(stages_of_part(part, problem), ctx.ceiling)
        if not stages.in_a_row:
            stages = stages.unchained(_after(stages))
        if looked > _MOST_PARTS or ctx.should_stop() or math.prod(n + 1 for n in digits(stages)) > _MOST_SETS:
            return
        ctx.spend(min(stages.num_nodes, ctx.evaluations_left))  # about as long
        try:
            search = Search(stages, ctx.ceiling, None, problem.max_devices, ctx, _FEW_LOOKS)
            found = search.decide(ctx.ceiling * (1 - CLOSE))
        except TooManyIdeals:
            return
        if found is None:
            left.pop()
            continue
        before = ctx.best_value
        placement = _evaluate(problem, ctx, stages, stages, found[1])
        if ctx.best_value < before:
            continue
        left.pop()
        choice = part.per_unit(part.allowed, np.logical_and)
        open_units = np.flatnonzero(choice.sum(axis=1) > 1)
        if len(open_units):
            unit = open_units[_undercharged(problem, placement)[open_units].argmax()]
            here = placement[problem.first_of_unit[unit]]
            alike = next(devices for devices in stages.kinds.devices if here in devices)
            for may in (~np.isin(every, [here] if shared else alike), every == here):
                if choice[unit, may].any():
                    seconds = np.where((problem.unit == unit)[:, None] & ~may, np.inf, part.costs.seconds)
                    left.append(replace(part, costs=Costs.create(seconds)))
    if not left and ctx.ceiling < math.inf:
        ctx.bound(ctx.ceiling * (1 - CLOSE))


def _after(stages: Stages) -> Whole:
    """[K] how many devices surely come after a stage, where a kind is one device, as far as nodes can only be there."""
    able: NDArray[np.bool_] = np.isfinite(stages.compute[:, :, 0])
    alone = np.array([len(devices) == 1 for devices in stages.kinds.devices])
    fixed = able & alone & (able.sum(axis=1) == 1)[:, None]
    beyond = np.zeros_like(fixed)
    order = np.argsort(dataflow_order(stages.tail, stages.head, np.arange(stages.num_nodes)))
    after_ptr, after = lists(stages.tail, stages.head, stages.num_nodes)
    for v in order[::-1].tolist():
        following = after[after_ptr[v] : after_ptr[v + 1]]
        beyond[v] = (beyond[following] | fixed[following]).any(axis=0)
    flows = np.array([beyond[mine].any(axis=0) for mine in fixed.T])
    np.fill_diagonal(flows, False)
    total = np.zeros(len(flows), np.int64)
    for _ in range(len(flows) - 1):
        total = np.where(flows, total + 1, 0).max(axis=1)
    return total


def _undercharged(problem: Problem, placement: Ints) -> NDArray[np.float64]:
    """[units] how much longer a unit's messages take than over the fastest links of their ends."""
    graph, cluster = problem.graph, problem.cluster
    a, b = placement[graph.edge_producer], placement[graph.consumers]
    size, edge = graph.tensor_bytes[graph.edge_tensor][:, None], np.arange(graph.num_edges)
    latency = np.where(np.eye(problem.num_devices, dtype=np.bool_), np.inf, cluster.latency)
    per_byte = cluster.seconds_per_byte
    sent, received = latency[a] + size * per_byte[a], latency.T[b] + size * per_byte.T[b]
    more = sent[edge, b] - sent.min(axis=1) + received[edge, a] - received.min(axis=1)
    total = np.zeros(problem.num_units)
    for end in (graph.edge_producer, graph.consumers):
        np.add.at(total, problem.unit[end], np.where(a != b, more, 0.0))
    return total


def _left_out(stages: Stages, most: int) -> Whole:
    """What to leave out at first: free nodes and, of many, those with the least work."""
    work = np.where(np.isfinite(stages.compute), stages.compute, np.inf).min(axis=1).sum(axis=1)
    rank = np.argsort(np.argsort(-work, kind="stable"))
    rank[free_nodes(stages)] = most
    out = np.flatnonzero(rank >= most)
    return out if len(out) < stages.num_nodes else out[:0]


def _most_doubtful(problem: Problem, stages: Stages, out: Whole, placement: Ints) -> NDArray[np.intp]:
    """Which few of the nodes that were left out are likely to cost the busiest device most beyond what is counted.

    That is one message where the device has some of its neighbours and lacks some, and its work where it has all.
    """
    device = np.zeros(stages.num_nodes, np.int32)
    device[stages.node] = placement[problem.first_of_unit]
    compute, transfer, _, _ = throughput_loads(problem, placement[None])
    there = device == int((compute + transfer)[0].sum(axis=0).argmax())
    ends = [stages.sender[stages.message], stages.reader]
    cost = np.maximum(stages.send, stages.receive).max(axis=1, initial=0.0)[stages.message]
    crosses = np.where(there[ends[0]] != there[ends[1]], cost, 0.0)
    every, paid, counted = np.zeros((3, stages.num_nodes))
    for end in ends:
        np.add.at(every, end, cost)
        np.add.at(paid, end, crosses)
        np.maximum.at(counted, end, crosses)
    work = np.where(np.isfinite(stages.compute), stages.compute, np.inf).min(axis=1).sum(axis=1)
    doubt = paid - counted + np.where(there & ((paid > 0) | (every < work)), work, 0.0)
    return np.argsort(-(doubt + 1e-6 * (every + work))[out], kind="stable")[: 1 + len(out) // 16]


def settle(
    problem: Problem, ctx: Context, every: Stages, stages: Stages, order: Whole | None = None, *,
    proves: bool, within: float = CLOSE, halving: bool = False, looks: int = MOST_LOOKS,
) -> Ints | None:  # fmt: skip
    """Find the best pipeline, among those that cut an order of the nodes where one is given; returns the last found.

    `every` are the stages with what was left out. With `halving`, limits close in on the bound; else every other one is
    just below the best, which is the proof if it cannot be kept.

    `reached` is the least value that a pipeline was found to have at these costs, which may be less than what the
    simulator says (see stages.py). The search ends when no pipeline is below it, or when it is that close to the bound.
    """
    low, reached, unknown, halfway, last = ctx.lower_bound, math.inf, math.inf, False, None
    search = Search(stages, ctx.ceiling, order, problem.max_devices, ctx, looks)
    limit = (low + ctx.ceiling) / 2 if halving else ctx.ceiling * (1 - CLOSE)
    while not ctx.should_stop():
        try:
            found = search.decide(limit)
        except TooManyIdeals:
            if search.exhausted:
                return None
            unknown = limit
        else:
            if found is None:
                low = limit
                if proves:
                    ctx.bound(limit * (1 - _ROUNDING))
            else:
                reached = min(reached, found[0])
                last = _evaluate(problem, ctx, every, stages, found[1])
        top = min(reached, ctx.ceiling) * (1 - CLOSE)
        if low >= top or (low >= top * (1 - within) and last is not None):
            break
        halfway = (halving or not halfway) and top - low > _NEARLY * top
        limit = (low + top) / 2 if halfway else top
        if limit >= unknown:
            if unknown - low < _NEARLY * unknown:
                break
            limit = (low + unknown) / 2
    return last


def _evaluate(problem: Problem, ctx: Context, every: Stages, stages: Stages, chain: Sequence[Stage]) -> Ints:
    """The placement of a chain of stages. Devices of a kind are alike, so they are used in turn.

    Nodes that were left out go where they exchange most; then, if they are few, one by one where they do best.
    """
    stage_of, left = np.zeros(stages.num_nodes, np.int64), [list(devices) for devices in stages.kinds.devices]
    device = np.array([left[kind].pop(0) for _, kind in chain], np.int32)
    for i, (nodes, _) in enumerate(chain):
        stage_of[nodes] = i
    place = np.zeros(every.num_nodes, np.int64)
    place[every.node] = np.where(stages.node < 0, -1, stage_of[stages.node])
    out = np.flatnonzero(place < 0)
    if len(out):
        _fill_in(every, [kind for _, kind in chain], place)
    home = device[place]
    value = ctx.evaluate(home[every.node[problem.unit]])
    able: NDArray[np.bool_] = np.isfinite(every.compute[:, :, 0])  # in one phase as in the other
    kind_of = {d: k for k, devices in enumerate(every.kinds.devices) for d in devices}
    moves = [(v, d) for v in out.tolist() for d, k in kind_of.items() if able[v, k]] if len(out) <= _FEW else []
    while moves and not ctx.should_stop():
        rows = np.tile(home, (len(moves), 1))
        rows[np.arange(len(moves)), [v for v, _ in moves]] = [d for _, d in moves]
        values = ctx.evaluate_batch(rows[:, every.node[problem.unit]])
        if not (len(values) and values.min() < value):
            break
        home, value = rows[values.argmin()], float(values.min())
    return home[every.node[problem.unit]]


def _fill_in(every: Stages, kinds: list[int], place: Whole) -> None:
    """Give each node whose place is -1 a stage that keeps the flow of data, with those that it exchanges most with."""
    n, able = every.num_nodes, np.isfinite(every.compute[:, :, 0])
    after_ptr, after = lists(every.tail, every.head, n)
    before_ptr, before = lists(every.head, every.tail, n)
    one, other = every.sender[every.message], every.reader
    near_ptr, near = lists(np.concatenate([one, other]), np.concatenate([other, one]), n)
    cost = np.maximum(every.send, every.receive).max(axis=1, initial=0.0)[every.message] + 1e-12
    weight = np.concatenate([cost, cost])[np.argsort(np.concatenate([one, other]), kind="stable")]
    order = np.argsort(dataflow_order(every.tail, every.head, np.arange(n))).tolist()
    latest = np.where(place < 0, len(kinds) - 1, place)
    for v in reversed(order):
        latest[v] = min([latest[v], *latest[after[after_ptr[v] : after_ptr[v + 1]]].tolist()])
    for v in order:
        if place[v] < 0:
            low = max([0, *place[before[before_ptr[v] : before_ptr[v + 1]]].tolist()])
            drawn, mine = np.zeros(len(kinds)), slice(near_ptr[v], near_ptr[v + 1])
            known = place[near[mine]] >= 0
            np.add.at(drawn, place[near[mine]][known], weight[mine][known])
            fit = [i for i in range(low, max(low, int(latest[v])) + 1) if able[v, kinds[i]]] or [low]
            place[v] = max(fit, key=lambda i: drawn[i])
