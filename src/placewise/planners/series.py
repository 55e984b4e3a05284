"""Graphs in series: blocks between ops that everything passes through, each solved by itself and put together exactly.

An op is a *joint* if every other op that runs comes before it or after it in the dataflow, and if what crosses from
before to after is made by the joint alone. When it ends, all that comes before has ended, no transfer is under way and
nothing that comes after has begun. So latency is a sum over the blocks between joints, and what a block adds depends on
the rest of the plan through two devices alone: that of the joint where it begins, and that of the joint where it ends.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from placewise.costs import Costs
from placewise.driver import Context
from placewise.errors import NoFeasiblePlan
from placewise.graph import Floats, Ints
from placewise.planners import get, planner
from placewise.planners.cpsat import first_twins
from placewise.planners.heft import schedule
from placewise.planners.order_search import strict_only
from placewise.planners.repair import settled
from placewise.problem import Problem
from placewise.simulator import evaluate, simulate
from placewise.simulator.bounds import lower_bound
from placewise.transforms import subgraph

Pair = tuple[int, int]  # devices at both ends of a block
Item = TypeVar("Item")

_SEARCHES: Final = ("order-search", "list-search", "local-search")
_EXACT: Final = "cpsat"
_ENUMERATED: Final = 4096  # placements of a block whose ops run in one order only
#: Of the budget left: to search for every pair, then for promising ones; to prove blocks, then what is in the way.
_FIRST, _SECOND, _THIRD, _PART = 0.2, 0.1, 0.6, 0.7
_OVERFLOW: Final = (0.1, 0.1, 0.2)  # of the budget left, for searches where the best sum does not fit
_TRIES: Final = 4  # to close a pair; what the simulator's queues cost cannot be closed
_CLOSED: Final = 1e-9  # a gap that is none
_MORE: Final = 0.1  # of a block's time: what a better plan for it may well save
_ROUNDING: Final = 1e-12  # of a sum


def _supports(problem: Problem) -> bool | str:
    strict = strict_only(problem)
    if strict is not True:
        return strict
    inner = [place for place in joints(problem)[1] if 0 < place < (~problem.graph.is_stored).sum() - 1]
    return bool(inner) or "needs ops that everything passes through, where the graph can be cut; here is none inside"


def _compile(problem: Problem) -> None:
    for info in map(get, (*_SEARCHES, _EXACT)):
        if info.compile:
            info.compile(problem)


@planner("series", objectives={"latency"}, supports=_supports, compile=_compile)
def series(problem: Problem, ctx: Context) -> None:
    """Blocks between ops that everything passes through, each solved alone; the best sum by dynamic programming.

    After the decomposition of pipelines and series-parallel graphs in the literature (Tarnawski et al. 2020,
    arXiv:2006.16423, contract what has one way in and out; Valdes et al. 1982, doi:10.1137/0211023), made exact for
    unequal devices: a block is a problem of its own for each pair of devices at its ends. Blocks that are equal are
    solved once, as are pairs of devices that are alike. Searches come first. Then CP-SAT proves, or improves, what the
    cheapest way through the blocks would use by what is proved so far, until that way is the plan itself.

    Parameters that are ops go where they are read, so they never wait; without them, and without what other blocks hold
    in memory, no block is slower, so what is proved holds in any case. Where memory is too small for the best sum, the
    plan is repaired, and searches and CP-SAT go on with the whole graph. If that is too large for CP-SAT, what is
    proved may be out of reach.
    """
    ctx.evaluate(*schedule(problem))
    row = Row(problem)
    row.search(ctx)
    if row.overflows(ctx):
        for name, share in zip(_SEARCHES, _OVERFLOW, strict=True):
            ctx.delegate(name, share=share)
    row.prove(ctx)
    if row.overflows(ctx) or ctx.best is None:  # what fits by itself need not fit together
        for name in ("fit", _EXACT) if ctx.best is None else (_EXACT,):
            ctx.delegate(name, share=_PART)
    row.improve(ctx, 1.0)


def joints(problem: Problem) -> tuple[NDArray[np.int64], list[int]]:
    """(the ops that run in a topological order, the places of joints in it).

    What comes before a joint in one topological order comes before it in all. Ops that must share a device may not lie
    on both sides of a joint, unless it is one of them.
    """
    graph = problem.graph
    order = graph.topological_order.astype(np.int64)
    order = order[~graph.is_stored[order]]
    n = len(order)
    place = np.full(problem.num_ops, n)
    place[order] = np.arange(n)
    edge = ~graph.is_stored[graph.edge_producer]
    source, reader = place[graph.edge_producer[edge]], place[graph.consumers[edge]]
    reach = np.full(n, -1)  # the last place that each one's outputs go to
    np.maximum.at(reach, source, reader)
    reach[reach < 0] = n  # nothing can come after a result, unless that is a joint
    fed = np.zeros(n, np.bool_)
    fed[reader] = True
    last_source = int(np.flatnonzero(~fed).max(initial=-1))
    unit = problem.unit[order]
    last_of_unit, first_of_unit = np.full(problem.num_units, -1), np.full(problem.num_units, n)
    np.maximum.at(last_of_unit, unit, np.arange(n))
    np.minimum.at(first_of_unit, unit, np.arange(n))
    several = last_of_unit > first_of_unit
    change = np.zeros(n + 1, np.int64)
    np.add.at(change, first_of_unit[several] + 1, 1)
    np.add.at(change, last_of_unit[several], -1)
    spanning = np.cumsum(change)  # units that have ops both before and after a place
    found, furthest = [], -1
    for at in range(n):
        own = first_of_unit[unit[at]] < at < last_of_unit[unit[at]]
        if furthest <= at and last_source <= at and spanning[at] == own:
            found.append(at)
        furthest = max(furthest, int(reach[at]))
    return order, found


@dataclass(eq=False)
class Block:
    """A part of the graph with its first and last op on given devices: what is found and proved for each pair.

    Where a block has no joint at an end, that end has one state only.
    """

    problem: Problem
    entry: int | None  # the joint at which it begins; it takes no time here, as it belongs to the block before
    exit: int | None  # the joint at which it ends
    count: int = 0  # how many blocks of the graph are equal to this one
    found: Floats = field(init=False)  # [states of entry, states of exit] seconds
    proved: Floats = field(init=False)
    plans: dict[Pair, tuple[Ints, Ints]] = field(default_factory=dict)
    tries: dict[Pair, int] = field(default_factory=dict)  # of proofs

    def __post_init__(self) -> None:
        d, allowed, unit = self.problem.num_devices, self.problem.allowed, self.problem.unit
        starts = np.ones(1, np.bool_) if self.entry is None else allowed[self.entry]
        ends = np.ones(1, np.bool_) if self.exit is None else allowed[self.exit]
        possible = starts[:, None] & ends
        if self.entry is not None and self.exit is not None and unit[self.entry] == unit[self.exit]:
            possible &= np.eye(d, dtype=np.bool_)
        self.found, self.proved = np.full(possible.shape, np.inf), np.where(possible, 0.0, np.inf)

    @property
    def pairs(self) -> list[Pair]:
        """Those that are possible."""
        return [(int(a), int(b)) for a, b in np.argwhere(np.isfinite(self.proved))]

    def is_closed(self, pair: Pair | None) -> bool:
        """Whether what is found for a pair, or for any, is proved to be the best."""
        proved, found = (x.min() if pair is None else x[pair] for x in (self.proved, self.found))
        return bool(proved >= found * (1 - _CLOSED))

    def pinned(self, pair: Pair | None) -> Problem:
        """The block with its ends on a pair of devices, or anywhere."""
        if pair is None:
            return self.problem
        seconds = self.problem.seconds.copy()
        for op, device in zip((self.entry, self.exit), pair, strict=True):
            if op is not None:
                seconds[op, np.arange(self.problem.num_devices) != device] = np.inf
        return replace(self.problem, costs=Costs.create(seconds))

    def pair_of(self, placement: Ints) -> Pair:
        """Where a plan has the ends."""
        a, b = (0 if op is None else int(placement[op]) for op in (self.entry, self.exit))
        return a, b

    def best_plan(self, pair: Pair | None) -> tuple[Ints, Ints] | None:
        """That is known for a pair, or for any."""
        if pair is None:
            a, b = np.unravel_index(self.found.argmin(), self.found.shape)
            pair = int(a), int(b)
        return self.plans.get(pair)

    @property
    def only_order(self) -> Ints | None:
        """The one order in which the ops can run, if there is no other."""
        graph = self.problem.graph
        order = graph.topological_order
        place = np.argsort(order)
        source, reader = place[graph.edge_producer], place[graph.consumers]
        follows = np.zeros(len(order), np.bool_)
        follows[source[reader == source + 1]] = True
        return order if follows[:-1].all() else None

    def enumerate(self, ctx: Context) -> bool:
        """Solve every pair at once, where there are few placements and one order; says whether it did."""
        problem, order = self.problem, self.only_order
        allowed = problem.allowed[problem.first_of_unit]
        if order is None or not 0 < math.prod(allowed.sum(axis=1).tolist()) <= _ENUMERATED:
            return False
        choices = np.meshgrid(*(np.flatnonzero(row) for row in allowed), indexing="ij")
        rows = np.stack([choice.ravel() for choice in choices], axis=1).astype(np.int32)[:, problem.unit]
        if len(rows) >= ctx.evaluations_left:
            return False
        with ctx.aside(problem, 1.0) as inner:
            values = inner.evaluate_batch(rows)
            a, b = (0 * rows[:, 0] if op is None else rows[:, op] for op in (self.entry, self.exit))
            self.proved[:] = np.inf
            for i in np.argsort(-values, kind="stable").tolist():  # the best comes last, and stays
                if np.isfinite(values[i]):
                    self.found[a[i], b[i]] = self.proved[a[i], b[i]] = values[i]
                    self.plans[int(a[i]), int(b[i])] = rows[i], order
            return True
        return False

    def learn(self, pair: Pair | None, inner: Context) -> None:
        """Take over what is found and proved for a pair, or for all of them."""
        if inner.best is not None:
            placement, order = inner.best
            order = _as_run(inner.problem, placement) if order is None else order
            value, its = float(evaluate(inner.problem, placement, order, threads=1).score[0]), self.pair_of(placement)
            if value < self.found[its]:
                self.found[its], self.plans[its] = value, (placement, order)
        at = pair or slice(None)
        self.proved[at] = np.maximum(self.proved[at], inner.lower_bound)
        possible = np.isfinite(self.proved)
        self.proved[possible] = np.minimum(self.proved, self.found)[possible]


def _as_run(problem: Problem, placement: Ints) -> Ints:
    """The order in which a placement without one runs, so that it can be part of a larger order."""
    timeline = simulate(problem, placement)
    place = np.argsort(problem.graph.topological_order)
    return np.lexsort((place, timeline.finish, timeline.start)).astype(np.int32)


class Row:
    """The blocks of a graph, one after another."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._twins = _Twins(problem)
        self._judged = math.inf  # the least sum that was simulated
        order, places = joints(problem)
        end = len(order) - 1
        cuts = [-1, *places, *([end] if places[-1] < end else [])]
        self.blocks: list[Block] = []  # those that differ
        self.which: list[int] = []  # for each block of the graph
        self.ops: list[NDArray[np.int64]] = []  # of each block of the graph, in its own order
        known: dict[bytes, int] = {}
        for low, high in pairwise(cuts):
            inside = order[max(low, 0) : high + 1]
            ops = np.sort(inside)
            entry = int(np.searchsorted(ops, inside[0])) if low >= 0 else None
            exit = int(np.searchsorted(ops, inside[-1])) if high <= places[-1] else None
            part = _part(problem, ops, entry)
            key = _key(part, entry, exit)
            if key not in known:
                known[key] = len(self.blocks)
                self.blocks.append(Block(part, entry, exit))
            self.which.append(known[key])
            self.blocks[known[key]].count += 1
            self.ops.append(ops)

    def search(self, ctx: Context) -> None:
        """Find a plan for every pair of every block; then better ones for those that matter."""
        pairs = [
            (block, pair) for block in self.blocks if not block.enumerate(ctx) for pair in self._twins.pairs(block)
        ]
        for block in dict.fromkeys(block for block, _ in pairs):
            block.proved = np.maximum(block.proved, lower_bound(block.problem).value)
        for (block, pair), share in _dealt(ctx, pairs, ctx.spent + _FIRST * (1.0 - ctx.spent)):
            self._work_on(ctx, block, pair, share, _SEARCHES[:1])
        self._judge(ctx)
        self.improve(ctx, _SECOND)

    def improve(self, ctx: Context, share: float) -> None:
        """Search longer where it promises something, within a share of the budget, until that brings nothing."""
        until, before = ctx.spent + share * (1.0 - ctx.spent), math.inf
        while not ctx.should_stop() and ctx.spent < until and ctx.best_value < before:
            before = ctx.best_value
            for (block, pair), part in _dealt(ctx, self._promising(), (ctx.spent + until) / 2):
                self._work_on(ctx, block, pair, part, _SEARCHES)
            self._judge(ctx)

    def _promising(self) -> list[tuple[Block, Pair]]:
        """Pairs that are not closed, and whose use would not make the best way much longer; the best first."""
        tables = [self.blocks[k].found for k in self.which]
        before, after = _ways(tables), _ways([table.T for table in tables[::-1]])[::-1]
        best = float(before[-1].min())
        if not math.isfinite(best):
            return []
        more: dict[tuple[int, Pair], float] = {}
        for k, table, way_in, way_out in zip(self.which, tables, before[:-1], after[1:], strict=True):
            block = self.blocks[k]
            extra = way_in[:, None] + table + way_out - best
            for pair in self._twins.pairs(block):
                if not block.is_closed(pair) and extra[pair] < _MORE * table[pair]:
                    more[k, pair] = min(more.get((k, pair), np.inf), float(extra[pair]))
        return [(self.blocks[k], pair) for k, pair in sorted(more, key=more.__getitem__)]

    def _work_on(
        self, ctx: Context, block: Block, pair: Pair | None, share: float, planners: Sequence[str], goal: float = 0.0
    ) -> None:
        known, proved = block.best_plan(pair), float(block.proved.min() if pair is None else block.proved[pair])
        if not math.isfinite(proved):
            return
        with ctx.aside(block.pinned(pair), max(share, 0.0)) as inner:
            inner.bound(proved)
            try:
                if known:
                    inner.evaluate(*known)
                for i, name in enumerate(planners):
                    options = {"goal": goal} if name == _EXACT and math.isfinite(goal) else {}
                    inner.delegate(name, share=1.0 / (len(planners) - i), options=options)
            except NoFeasiblePlan:  # proved: the block does not fit, with these ends at least
                if pair is not None:
                    block.proved[pair] = np.inf
            finally:
                block.learn(pair, inner)
                self._twins.spread(block)

    def _judge(self, ctx: Context) -> None:
        """Put together the best plan and the best bound that the blocks give."""
        total, way = _cheapest([self.blocks[k].found for k in self.which])
        if total < min(self._judged, ctx.best_value) and ctx.evaluations_left:
            self._judged = total
            placement, order = self._whole(way)
            if not math.isfinite(ctx.evaluate(placement, order)):
                settled(self._problem, ctx, placement[self._problem.first_of_unit])
        proved = _cheapest([self.blocks[k].proved for k in self.which])[0]
        if math.isfinite(proved):  # else nothing fits, which is not for a bound to say
            ctx.bound(proved * (1 - _ROUNDING * len(self.which)))

    def overflows(self, ctx: Context) -> bool:
        """Whether a sum that is better than the best plan has turned out not to fit."""
        return self._judged < ctx.best_value * (1 - _CLOSED)

    def _whole(self, way: list[Pair]) -> tuple[Ints, Ints]:
        problem, graph = self._problem, self._problem.graph
        placement = np.full(problem.num_ops, -1, np.int32)
        order: list[NDArray[Any]] = [np.flatnonzero(graph.is_stored)]
        for k, ops, pair in zip(self.which, self.ops, way, strict=True):
            block = self.blocks[k]
            placement[ops], sequence = block.plans[pair]
            order.append(ops[sequence if block.entry is None else sequence[sequence != block.entry]])
        _house(problem, placement)
        return placement, np.concatenate(order).astype(np.int32)

    def prove(self, ctx: Context) -> None:
        """Bounds, and what is found on the way.

        A block is first solved with its ends anywhere, which says something about all its pairs.
        """
        wide = [block for block in self.blocks if not block.is_closed(None) and _is_exact(block)]
        for block, share in _dealt(ctx, sorted(wide, key=lambda block: block.problem.num_ops), _THIRD):
            self._work_on(ctx, block, None, share, (_EXACT,))
            self._judge(ctx)
        while not ctx.should_stop():
            work = self._in_the_way(ctx)
            if not work:
                return
            (block, pair), (tries, _, goal) = min(work.items(), key=lambda entry: entry[1])
            block.tries[pair] = tries + 1
            share = _PART / sum(other[0] == tries for other in work.values())
            self._work_on(ctx, block, pair, share, (_EXACT,) if _is_exact(block) else _SEARCHES, goal)
            self._judge(ctx)

    def _in_the_way(self, ctx: Context) -> dict[tuple[Block, Pair], tuple[int, float, float]]:
        """What the way that is cheapest by what is proved uses and is not closed: (tries, less the gap, goal) of each.

        Until that way is the way of the plan, it is what stands between the plan and a proof. A pair is done with once
        it is proved that no way which uses it can be better than the plan: its goal.
        """
        while True:
            total, way = _cheapest([self.blocks[k].proved for k in self.which])
            uses: dict[tuple[Block, Pair], int] = {}
            for block, pair in zip((self.blocks[k] for k in self.which), way, strict=True):
                its = block, self._twins.canonical(block, pair)
                uses[its] = uses.get(its, 0) + 1
            new = [(block, pair) for block, pair in uses if pair not in block.tries and not block.is_closed(pair)]
            for block, pair in new:  # a quick bound may do
                block.tries[pair] = 0
                block.proved[pair] = max(block.proved[pair], lower_bound(block.pinned(pair)).value)
                self._twins.spread(block)
            if not new:
                break
        return {
            (block, pair): (
                block.tries[pair],
                (block.proved[pair] - min(block.found[pair], ctx.best_value)) * times,
                float(block.proved[pair] + (ctx.best_value - total) / times),
            )
            for (block, pair), times in uses.items()
            if not block.is_closed(pair) and block.tries[pair] < _TRIES
        }


def _dealt(ctx: Context, items: Sequence[Item], until: float) -> Iterator[tuple[Item, float]]:
    """The items, each with its share of the budget left, such that all of them end when so much of it is spent."""
    for i, item in enumerate(items):
        spent = ctx.spent  # once, as the clock goes on
        if ctx.should_stop() or spent >= 1.0:
            return
        yield item, max(0.0, until - spent) / (1.0 - spent) / (len(items) - i)


def _is_exact(block: Block) -> bool:
    return get(_EXACT).why_not(block.problem) is None


class _Twins:
    """Devices that can change places and nothing changes, so that fewer pairs need be solved."""

    def __init__(self, problem: Problem) -> None:
        self._first, self._devices = first_twins(problem), problem.num_devices

    def _map(self, pair: Pair, block: Block) -> tuple[Pair, NDArray[np.int32]]:
        """(the pair that stands for this one, what turns its devices into those of this one)."""
        (a, b), to, swapped = pair, np.arange(self._devices, dtype=np.int32), np.arange(self._devices)
        if block.entry is not None:
            first = self._first[a]
            to[[first, a]] = a, first
        if block.exit is not None:
            b_before = int(np.flatnonzero(to == b)[0])  # what becomes b
            taken = self._first[a] if block.entry is not None else -1
            if b_before == taken:
                return (taken, taken), to
            chosen = next(d for d in range(self._devices) if d != taken and self._first[d] == self._first[b_before])
            swapped[[chosen, b_before]] = b_before, chosen
            return (max(taken, 0), chosen), to[swapped]
        return (self._first[a] if block.entry is not None else 0, 0), to

    def canonical(self, block: Block, pair: Pair) -> Pair:
        """The pair that stands for this one."""
        return self._map(pair, block)[0]

    def pairs(self, block: Block) -> list[Pair]:
        """Those to solve."""
        return [pair for pair in block.pairs if self.canonical(block, pair) == pair]

    def spread(self, block: Block) -> None:
        """What is known of a pair is known of all that it stands for."""
        for pair in block.pairs:
            source, to = self._map(pair, block)
            if source != pair:
                block.found[pair], block.proved[pair] = block.found[source], block.proved[source]
                if source in block.plans:
                    placement, order = block.plans[source]
                    block.plans[pair] = to[placement], order


def _part(problem: Problem, ops: NDArray[np.int64], entry: int | None) -> Problem:
    """Some of the ops as a problem of their own."""
    keep = np.zeros(problem.num_ops, np.bool_)
    keep[ops] = True
    seconds = problem.seconds[ops]
    if entry is not None:
        seconds[entry, problem.allowed[ops[entry]]] = 0.0
    graph, costs = subgraph(problem.graph, keep), Costs.create(seconds)
    return replace(problem, graph=graph, costs=costs, pins={}, forbidden=())  # which are in the costs


def _key(part: Problem, entry: int | None, exit: int | None) -> bytes:
    """Equal for blocks that differ in nothing but names."""
    graph, sha = part.graph, hashlib.sha256(f"{entry} {exit}".encode())
    arrays = (
        part.seconds, part.unit, graph.tensor_producer, graph.tensor_bytes, graph.consumer_ptr, graph.consumers,
        graph.resident, graph.scratch,
    )  # fmt: skip
    for array in arrays:
        sha.update(str(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    return sha.digest()


def _ways(tables: list[Floats]) -> list[Floats]:
    """The least sum over the blocks before each joint, by the joint's state."""
    ways = [np.zeros(len(tables[0]))]
    for table in tables:
        ways.append((ways[-1][:, None] + table).min(axis=0))
    return ways


def _cheapest(tables: list[Floats]) -> tuple[float, list[Pair]]:
    """(the least sum, the states at both ends of each block) of a way through the blocks."""
    ways = _ways(tables)
    state = int(ways[-1].argmin())
    total, states = float(ways[-1][state]), []
    for way, table in zip(ways[-2::-1], tables[::-1], strict=True):
        came_from = int((way + table[:, state]).argmin())
        states.append((came_from, state))
        state = came_from
    return total, states[::-1]


def _house(problem: Problem, placement: Ints) -> None:
    """Stored ops go to the device where most of their readers are, of those that are allowed."""
    graph = problem.graph
    home = np.full(problem.num_units, -1, np.int32)
    runs = ~graph.is_stored
    home[problem.unit[runs]] = placement[runs]
    reads = np.zeros((problem.num_units, problem.num_devices))
    edge = graph.is_stored[graph.edge_producer]
    np.add.at(reads, (problem.unit[graph.edge_producer[edge]], placement[graph.consumers[edge]]), 1.0)
    allowed = problem.allowed[problem.first_of_unit]
    homeless = home < 0
    home[homeless] = np.where(allowed, reads, -1.0)[homeless].argmax(axis=1)
    placement[:] = home[problem.unit]
