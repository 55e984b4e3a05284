"""Multilevel: plan a small graph of fused ops, then go back to the ops level by level and improve the plan at each."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placewise.costs import Costs
from placewise.driver import Context
from placewise.errors import InvalidInput
from placewise.graph import Ints
from placewise.planners import planner
from placewise.planners.blocks import Blocks, blocks_by_load, blocks_by_memory, fastest_first
from placewise.planners.heft import ignores_shape, place_in_order, schedule
from placewise.planners.local_search import climb, explore
from placewise.planners.moves import GroupMoves, compile_moves
from placewise.planners.random_search import sample
from placewise.planners.single import all_on
from placewise.problem import Problem
from placewise.simulator.arrays import arrays_for
from placewise.transforms import contract

_FUSE: Final = 4  # ops at most that become one from level to level
_HEAVIEST: Final = 2.0  # the weight of a fused op, in shares of all that there is among the coarsest ops
_COARSEST_SHARE: Final = 0.15  # of the budget, for the coarsest level
_COARSER_SHARE: Final = 0.25  # of what is then left, for all others but the ops themselves
_ROUNDS: Final = 8  # of HEFT by its own paths; those after bring a ten thousandth
_LUCK: Final = 2_000  # random placements to try where no simple plan keeps every constraint


def _compile(problem: Problem) -> None:
    if problem.objective != "throughput":
        schedule(problem)
    Blocks(problem).fill([0, 1], 1.0)
    compile_moves(problem)
    coarser(problem, 1, connected=True)


@planner("multilevel", compile=_compile)
def multilevel(problem: Problem, ctx: Context, *, coarsest: int = 200, patience: int = 4, kicks: int = 10) -> None:
    """Fuses ops level by level, plans the few that are left, refines on the way back: for large graphs.

    After Herrmann et al. 2019 (doi:10.1137/18M1176865), who partition acyclic graphs so. Here an op is fused with its
    neighbours in a depth-first order of the dataflow: pieces of a topological order never form a cycle. Plans are
    judged by the simulator at each level, not by the edges that they cut. `coarsest` is how many ops to plan first,
    `patience` how many times as many moves as there are units may fail in a row before a level is done. The search ends
    when `kicks` disturbances of the finest level in a row bring nothing.
    """
    if coarsest < 1:
        raise InvalidInput(f"option coarsest of multilevel = {coarsest}: it must be 1 or more")
    for _ in descend(ctx, coarsest, patience, kicks):
        pass


def descend(ctx: Context, coarsest: int = 200, patience: int = 4, kicks: int = 10) -> Iterator[float]:
    """The search, a batch of moves at a time, from the coarsest level to the ops; yields the best value."""
    placement = simple_start(ctx)  # first of all, so that there is a plan however soon the budget ends
    levels = hierarchy(ctx.problem, ctx, coarsest)
    if len(levels) > 1:
        coarse = yield from _plan_coarse(ctx, levels, patience)
        placement = min(placement, coarse[levels[1].label], key=ctx.evaluate)
    yield from refine(ctx, levels, placement, patience, kicks)


def _plan_coarse(ctx: Context, levels: list[Level], patience: int) -> Generator[float, None, Ints]:
    """A plan for the first level of fused ops, by way of all others."""
    with ctx.aside(levels[-1].problem, _COARSEST_SHARE) as inner:
        for _ in explore(inner):
            yield ctx.best_value
    placement = inner.best[0] if inner.best else blocks_by_memory(inner.problem, inner)
    for depth in range(len(levels) - 2, 0, -1):
        placement = placement[levels[depth + 1].label]
        with ctx.aside(levels[depth].problem, _COARSER_SHARE / depth) as inner:
            start = min(placement, simple_start(inner), key=inner.evaluate)
            for _ in refine(inner, levels[depth:], start, patience):
                yield ctx.best_value
        placement = inner.best[0] if inner.best else placement
    return placement


def simple_start(ctx: Context) -> Ints:
    """The best simple plan without an order of its own; any, where none keeps every constraint."""
    problem = ctx.problem
    blocks = blocks_by_memory(problem, ctx)
    ctx.evaluate(blocks)
    ctx.evaluate(all_on(problem, fastest_first(problem)[0]))
    blocks_by_load(problem, ctx)
    while ctx.best is None and not ctx.should_stop() and ctx.evaluations < _LUCK:
        ctx.evaluate_batch(sample(problem, ctx.rng, 64))
    placement = ctx.best[0] if ctx.best else blocks
    if problem.objective == "throughput" or ignores_shape(problem) is not True:
        return placement
    by_mean_times, order = schedule(problem)
    placement = min(placement, by_mean_times, key=ctx.evaluate)
    _schedule_again(ctx, by_mean_times, order)
    return placement


def _schedule_again(ctx: Context, placement: Ints, order: Ints) -> None:
    """HEFT by the longest paths that its own placement leaves instead of mean times, again and again while it helps."""
    best, fruitless = np.inf, 0
    for _ in range(_ROUNDS):
        if fruitless >= 3 or ctx.should_stop():
            break
        value = ctx.evaluate(placement, order)
        best, fruitless = (value, 0) if value < best else (best, fruitless + 1)
        placement, order = place_in_order(ctx.problem, by_longest_path(ctx.problem, placement))


def by_longest_path(problem: Problem, placement: Ints) -> Ints:
    """Ops by the time from their start to the end if nothing had to wait: a topological order."""
    from placewise.simulator import kernel

    a = arrays_for(problem)
    length = kernel.tails(
        a.op, a.seconds, a.tensor_ptr, a.bytes, a.consumer_ptr, a.consumer, a.latency, a.per_byte,
        np.uint64(problem.num_devices), placement,
    )  # fmt: skip
    return a.op[np.argsort(-length, kind="stable")].astype(np.int32)


def refine(ctx: Context, levels: list[Level], placement: Ints, patience: int, kicks: int = 0) -> Iterator[float]:
    """Move groups of this level and of all coarser ones until nothing helps any more; and again after a kick."""
    if ctx.best is not None and ctx.problem.num_units and ctx.problem.num_devices > 1 and not ctx.should_stop():
        yield from climb(ctx, placement, [group_moves(levels, ctx.rng)], patience, kicks)


# ---- levels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Level:
    """A problem and, for each op of the finer one, the op that it became part of."""

    problem: Problem
    label: Ints


def group_moves(levels: list[Level], rng: np.random.Generator) -> GroupMoves:
    """Moves of the groups that the ops of the first level form in all coarser ones."""
    return GroupMoves(levels[0].problem, [level.label for level in levels[1:]], rng)


def hierarchy(problem: Problem, ctx: Context, coarsest: int) -> list[Level]:
    """The problem, finest first, down to about so many ops."""
    levels = [Level(problem, np.arange(problem.num_ops, dtype=np.int32))]
    while levels[-1].problem.num_ops > coarsest and not ctx.should_stop():
        finer = levels[-1].problem
        for connected in (True, False):
            level = coarser(finer, coarsest, connected=connected)
            if level.problem.num_ops < 0.8 * finer.num_ops:
                levels.append(level)
                break
        else:
            break
    return levels


def coarser(problem: Problem, coarsest: int, *, connected: bool) -> Level:
    """Fuse up to four ops in a row, of those that may be: same devices, model and phase; not too heavy together."""
    graph = problem.graph
    seconds = problem.seconds.min(axis=1, initial=np.inf)
    weight = np.stack([seconds, graph.resident_bytes], axis=1)
    limit = np.maximum(weight.sum(axis=0) / coarsest * _HEAVIEST, 1e-300)
    start, edges = graph.in_edges
    # The heaviest input comes last, so that it is right before its reader.
    size = graph.tensor_bytes[graph.edge_tensor[edges]]
    edges = edges[np.lexsort((size, graph.consumers[edges]))]
    readers = np.diff(graph.out_edges[0])
    label, order = _fuse(
        start, graph.edge_producer[edges], readers, _kinds(problem), problem.unit, problem.per_unit(weight / limit),
        np.int64(_FUSE), connected,
    )  # fmt: skip
    first = np.flatnonzero(np.diff(label[order], prepend=-1))
    table = np.add.reduceat(problem.seconds[order], first, axis=0) if len(order) else problem.seconds
    fused = replace(
        problem, graph=contract(graph, label).graph, costs=Costs.create(table), pins={}, forbidden=()
    )  # pins and forbidden devices are in the costs
    return Level(fused, label)


def _kinds(problem: Problem) -> NDArray[np.int64]:
    """[N] ops of different kinds are never fused: what may run where, whose it is, and parameters that many read."""
    graph = problem.graph
    shared = graph.is_stored & (np.diff(graph.out_edges[0]) > 1)
    columns = [graph.phase, graph.model, shared]
    if not problem.allowed.all():
        columns += list(np.packbits(problem.allowed, axis=1).T)
    kind = np.zeros(problem.num_ops, np.int64)
    for column in columns:
        both = kind * (int(column.max(initial=0)) + 1) + column.astype(np.int64)
        kind = np.unique(both, return_inverse=True)[1].astype(np.int64)
    return kind


@njit(cache=True, nogil=True)
def _fuse(start, producer, readers, kind, unit, weight, most, connected):  # type: ignore[no-untyped-def]
    """(label [N], order [N]): pieces of the order in which a depth-first walk back from the results leaves the ops.

    A piece has at most `most` ops of one kind, each of which (where `connected`) reads from the one before or another
    of the piece. Units that meet in a piece become one; no unit made so weighs more than 1 in any respect.
    """
    n = len(readers)
    label, order = np.full(n, -1, np.int32), np.empty(n, np.int64)
    at = start[:-1].copy()  # the next input to walk to
    seen = np.zeros(n, np.bool_)
    stack = np.empty(n + 1, np.int64)
    root, total = np.arange(len(weight)), weight.copy()
    pieces, length, done = 0, 0, 0
    for sink in range(n):
        if readers[sink] > 0:
            continue
        depth = 1
        stack[0] = sink
        seen[sink] = True
        while depth > 0:
            op = stack[depth - 1]
            if at[op] < start[op + 1]:
                source = producer[at[op]]
                at[op] += 1
                if not seen[source]:
                    seen[source] = True
                    stack[depth] = source
                    depth += 1
                continue
            depth -= 1
            fits = 0 < length < most and kind[order[done - 1]] == kind[op]
            if fits and connected:
                fits = False
                for e in range(start[op], start[op + 1]):
                    fits |= label[producer[e]] == pieces - 1
            if fits:
                a, b = unit[order[done - 1]], unit[op]
                while root[a] != a:
                    root[a] = root[root[a]]
                    a = root[a]
                while root[b] != b:
                    root[b] = root[root[b]]
                    b = root[b]
                if a != b:
                    for w in range(weight.shape[1]):
                        fits &= total[a, w] + total[b, w] <= 1.0
                    if fits:
                        root[b] = a
                        for w in range(weight.shape[1]):
                            total[a, w] += total[b, w]
            if not fits:
                pieces += 1
                length = 0
            length += 1
            label[op] = pieces - 1
            order[done] = op
            done += 1
    return label, order
