"""Exact contiguous pipelines by dynamic programming over ideals, decided limit by limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from placewise.driver import Context
from placewise.graph import Floats, Ints
from placewise.planners import get, planner
from placewise.planners.gates import Column, Gates, Net, no_gates, without_idle_copies
from placewise.planners.pipeline import dataflow_order
from placewise.planners.stages import Stages, Whole, below, free_nodes, stages_of, without
from placewise.problem import Problem
from placewise.simulator.throughput import throughput_loads

_BITS: Final = 46  # times and bytes are whole numbers below two to this power, so that sums are exact
_NEVER: Final = 1 << (_BITS + 1)  # above every limit; a few thousand of them still can be added up
_NO_LIMIT: Final = 1 << 62
_ROUNDING: Final = 1e-12  # relative; in the sums of the simulator
_CLOSE: Final = 5e-10  # relative; what is nearer is the same
_ROUGHLY: Final = 0.4  # relative; how close a bound is worth while before free nodes are added
_NEARLY: Final = 1e-3  # relative; from here on, the next limit is just below the best rather than halfway
_MOST_NODES: Final = 512  # that are looked at to begin with; only the heaviest, if there are more
_MORE_NODES: Final = 2048  # that are, if briefly
_FEW: Final = 64  # nodes whose places are tried out
_MOST_UNITS: Final = 1 << 15  # so that sums of whole numbers stay below two to the power of 63
_MOST_SETS: Final = 4096  # sets of devices, up to kind
_MOST_BYTES: Final = 1 << 28  # of ideals
_STEPS: Final = 1_000_000  # between two looks at the clock
_MOST_LOOKS: Final = 4_000  # at the clock, for all limits
_FEW_LOOKS: Final = 200  # the same, where there is something else to try

Stage = tuple[NDArray[np.bool_], int]  # the nodes, the kind of device; how many devices have it is the simulator's


class TooManyIdeals(Exception):
    """There is no memory, or no time, for more."""


def why_not(problem: Problem) -> bool | str:
    """Whether ideals apply."""
    if not problem.contiguous:
        return "plans contiguous pipelines only (contiguous = true)"
    if problem.num_units > _MOST_UNITS:
        return f"takes {_MOST_UNITS} units at most, and there are {problem.num_units}"
    sets = math.prod(n + 1 for n in _digits(stages_of(problem))) if problem.num_ops else 1
    return sets <= _MOST_SETS or f"tells {_MOST_SETS} sets of devices apart at most, and there are {sets}"


def _digits(stages: Stages) -> list[int]:
    """The most of everything that partial pipelines are told apart by: devices of each kind in use, and stages.

    Stages count where they need memory by what comes after; without replicas there are as many as devices in use.
    """
    count = [len(devices) for devices in stages.kinds.devices]
    return [*count, sum(count)] if stages.chained and (stages.kinds.most > 1).any() else count


def _compile(problem: Problem) -> None:
    Search(stages_of(problem), 1.0, None).reach([math.inf])
    _Table(1, 1).double()
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
    to pay (stages.py), which is a bound, and often the value too. Shared channels count in the value alone.

    With replicas, a stage may take several devices of a kind. With samples in flight (1f1b) the search runs from the
    last stage to the first, and its k-th stage holds k samples. That is exact where nodes are in a row; where
    branches may be stages side by side, it is too many for some: plans are found so, but the bound is for one sample.

    The paper ties units that only run backward to where their twins would run forward. Here they may be anywhere, as
    the simulator allows. Such free units, and of many nodes the lightest, are left out at first (`stages.without`) and
    added, the most doubtful first, until the bound meets the best plan. With all of them it is exact.
    """
    if not problem.num_units:
        return np.zeros(0, np.int32)
    if problem.num_units > _MOST_NODES:  # a first limit, soon
        ctx.delegate("pipeline-dp", share=0.2)
    ctx.delegate("ideals-linear", share=0.3, options={"orders": 2})
    every = below(stages_of(problem), ctx.best_value)
    brief = every.num_nodes > _MOST_NODES  # a first try with more nodes, which gates may leave few ideals of
    first = out = _left_out(every, _MORE_NODES)
    while not ctx.should_stop():
        stages = without_idle_copies(below(without(every, out), ctx.best_value), ctx.lower_bound)
        many = len(out) > _FEW
        within = _NEARLY if many else _ROUGHLY if len(out) else _CLOSE
        if stages.chained and not stages.in_a_row:
            settle(problem, ctx, every, stages, proves=False, within=within, halving=many)
            stages = stages.unchained()
        looks = _FEW_LOOKS if brief else _MOST_LOOKS
        found = settle(problem, ctx, every, stages, proves=True, within=within, halving=many, looks=looks)
        if ctx.should_stop():
            return None
        if brief and (found is None or not len(out)):
            brief, first = False, _left_out(every, _MOST_NODES)
            out = first
            continue
        if not len(out):
            return None
        if found is None:  # too many ideals: let it be the bound without those nodes
            settle(problem, ctx, every, below(without(every, first), ctx.best_value).unchained(), proves=True)
            return None
        out = np.delete(out, _most_doubtful(problem, every, out, found))
    return None


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
    proves: bool, within: float = _CLOSE, halving: bool = False, looks: int = _MOST_LOOKS,
) -> Ints | None:  # fmt: skip
    """Find the best pipeline, among those that cut an order of the nodes where one is given; returns the last found.

    `every` are the stages with what was left out. With `halving`, limits close in on the bound; else every other one is
    just below the best, which is the proof if it cannot be kept.

    `reached` is the least value that a pipeline was found to have at these costs, which may be less than what the
    simulator says (see stages.py). The search ends when no pipeline is below it, or when it is that close to the bound.
    """
    low, reached, unknown, halfway, last = ctx.lower_bound, math.inf, math.inf, False, None
    search = Search(stages, ctx.best_value, order, problem.max_devices, ctx, looks)
    limit = (low + ctx.best_value) / 2 if halving else ctx.best_value * (1 - _CLOSE)
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
        top = min(reached, ctx.best_value) * (1 - _CLOSE)
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
    after_ptr, after = _lists(every.tail, every.head, n)
    before_ptr, before = _lists(every.head, every.tail, n)
    one, other = every.sender[every.message], every.reader
    near_ptr, near = _lists(np.concatenate([one, other]), np.concatenate([other, one]), n)
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


class Search:
    """Ideals that can be reached within limits."""

    def __init__(
        self, stages: Stages, scale: float, order: Whole | None, most_devices: int | None = None,
        ctx: Context | None = None, looks: int = _MOST_LOOKS,
    ) -> None:  # fmt: skip
        self._stages, self._ctx, self._looks = stages, ctx, looks
        n, kinds, phases = stages.num_nodes, len(stages.kinds.devices), stages.compute.shape[2]
        self._phases = phases
        if not math.isfinite(scale):
            scale = float(np.where(np.isfinite(stages.compute), stages.compute, 0.0).max(axis=1).sum())
            scale += float(stages.send.sum() + stages.receive.sum())
        self._second = _quantum(scale * int(stages.kinds.most.max(initial=1)))
        total = stages.need.sum() + stages.copy.sum() + stages.scratch.max(initial=0.0)
        byte = _quantum(float(total + (stages.keep.sum() + stages.keep_copy.sum()) * sum(_digits(stages))))

        tail, head = (stages.tail, stages.head) if order is None else (order[:-1], order[1:])
        if stages.chained:  # from the last stage to the first
            tail, head = head, tail
        after_ptr, after = _lists(tail, head, n)
        sent_ptr, sent = _lists(stages.sender, np.arange(stages.num_messages), n)
        read_ptr, read = _lists(stages.reader, stages.message, n)
        reader_ptr = np.searchsorted(stages.message, np.arange(stages.num_messages + 1))
        self._flow = (np.bincount(head, minlength=n), after_ptr, after)
        self._graph = (sent_ptr, sent, read_ptr, read, stages.sender, reader_ptr, stages.phase)
        self._reader = stages.reader
        # Columns of what messages cost, where they cost anything: by tariff, then bytes.
        costs = (stages.send != 0).any(axis=0) | (stages.receive != 0).any(axis=0)
        self._tariff = np.where(costs, np.cumsum(costs) - 1, -1)[stages.kinds.tariff]
        held = [stages.copy] * bool(stages.copy.any() or stages.chained) + [stages.keep_copy] * stages.chained
        bytes_held = np.array(held).reshape(len(held), stages.num_messages).T
        paid = [[_floor(stages.send[:, costs], self._second), _floor(0 * bytes_held, byte)]]
        paid += [[_floor(stages.receive[:, costs], self._second), _floor(bytes_held, byte)]]
        self._send, self._receive = (np.ascontiguousarray(np.hstack(columns)) for columns in paid)
        compute, need = _floor(stages.compute, self._second), _floor(stages.need[:, None], byte)
        self._columns = phases * self._send.shape[1]
        self._room = _floor(stages.kinds.room, byte, _NO_LIMIT)
        self._scratch = _floor(stages.scratch, byte)

        digits = np.array(_digits(stages))
        step = np.concatenate([[1], np.cumprod(digits + 1)[:-1]]).astype(np.int64)
        self._sets = sets = int((digits + 1).prod())
        self._words = -(-sets // 64)
        in_use = np.arange(sets)[:, None] // step % (digits + 1)  # [sets, K], and stages
        so_far = in_use[:, :kinds].sum(axis=1)
        spare = np.maximum((most_devices or sets) - so_far, 0)
        free = np.minimum(digits[:kinds] - in_use[:, :kinds], spare[:, None])
        self._options, self._may_add = self._ways(step, free, in_use[:, kinds] if len(digits) > kinds else so_far)
        # What is left to do must fit into the time, and the memory, of the devices that are left.
        weights, self._supply = [], []
        for p in range(phases + (phases > 1)):
            work = np.minimum(compute[:, :, p] if p < phases else compute.sum(axis=2), _NEVER)
            price = _prices(work)
            weights.append(np.floor((work * price).min(axis=1)).astype(np.int64))
            self._supply.append((p, (free * price).sum(axis=1)))
        if (self._room < _NO_LIMIT).all():
            weights.append(need[:, 0])
            self._supply.append((-1, (free * self._room).sum(axis=1)))
        columns = [compute.reshape(n, kinds * phases), need]
        self._layout = np.array([int(costs.sum()) if held else -1, -1, -1])
        if stages.weight.any():
            self._layout[1] = sum(column.shape[1] for column in columns)
            columns.append(np.minimum(_floor(stages.weight[:, None] * stages.kinds.per_byte, self._second), _NEVER))
        if stages.chained:
            self._layout[2] = sum(column.shape[1] for column in columns)
            columns.append(_floor(stages.keep[:, None], byte))
        self._own = np.ascontiguousarray(np.hstack([*columns, *(weight[:, None] for weight in weights)]))
        self._zobrist = np.random.default_rng(0).integers(1, 2**63, n, np.uint64)
        # What a later stage saves by losing a node, by columns of messages, without the messages; see gates.py.
        simple = not stages.chained and phases == 1 and not (stages.kinds.most > 1).any()
        self._saves = np.full((n, self._send.shape[1]), _NO_LIMIT if simple else -_NO_LIMIT)
        for c in sorted(set(self._tariff.tolist()) - {-1}) if simple else ():
            self._saves[:, c] = compute[:, self._tariff == c, 0].min(axis=1) * (not stages.overlap)
        if held and simple and not stages.roomy:
            self._saves[:, -1] = need[:, 0]
        found = self._find_gates(tail, head) if order is None and simple else no_gates(n)
        rest = np.zeros((len(found.since), len(weights)), np.int64)  # what is left beyond each gate
        if len(rest):
            np.add.at(rest, found.of, self._own[:, self._own.shape[1] - len(weights) :])
        rest = np.ascontiguousarray((rest.sum(axis=0) - rest.cumsum(axis=0)).T)
        by_gate = np.argsort(found.of, kind="stable")
        gate_ptr = np.searchsorted(found.of[by_gate], np.arange(len(found.since) + 1))
        self._gates = (found.of, found.forced, found.since, rest, gate_ptr, by_gate)

    def _find_gates(self, tail: Whole, head: Whole) -> Gates:
        stages, columns = self._stages, []
        for c in np.flatnonzero((self._saves < _NO_LIMIT).any(axis=0)).tolist():
            columns.append(Column(*(of[:, c].tolist() for of in (self._saves, self._send, self._receive))))
        return Net(tail, head, stages.sender, stages.message, stages.reader, columns, stages.num_nodes).gates()

    def _ways(self, step: Whole, free: Whole, stages_so_far: Whole) -> tuple[Whole, NDArray[np.uint64]]:
        """What devices a stage may get, [W, 5] (see _KIND), and after which sets of devices, as bits."""
        stages, ways, after = self._stages, [], []
        for k, most in enumerate(stages.kinds.most.tolist()):
            for r in range(1, most + 1):
                shift = r * int(step[k]) + (int(step[-1]) if len(step) > free.shape[1] else 0)
                latency = int(_floor(np.array((r - 1) * stages.kinds.latency[k]), self._second))
                for samples in range(1, int(stages_so_far.max()) + 1) if stages.chained else (1,):
                    ways.append((k, r, samples, shift, min(latency, _NEVER)))
                    able = (free[:, k] >= r) & ((stages_so_far == samples - 1) | (not stages.chained))
                    after.append(_packed(able, self._words))
        return np.array(ways, np.int64), np.concatenate(after)

    @property
    def exhausted(self) -> bool:
        """Whether there is no time for another limit."""
        return self._looks <= 0

    def decide(self, limit: float) -> tuple[float, list[Stage]] | None:
        """(value, stages) of a pipeline within the limit; None if there is none, which is a proof.

        Where forward and backward have a busiest device each, their sum counts. Then any share that forward may have is
        tried: all between two shares at once, by giving forward the larger and backward what the smaller leaves. No
        stage may have more than the limit in all.
        """
        if self._phases == 1 or math.isinf(limit):
            return self.reach([limit] * self._phases)
        intervals = [(0.0, limit)]
        while intervals:
            a, b = intervals.pop()
            found = self.reach([b, limit - a], limit)
            if found is None:
                continue
            if found[0] <= limit or b - a <= _CLOSE / 4 * limit:
                return found
            intervals += [(a, (a + b) / 2), ((a + b) / 2, b)]
        return None

    def reach(self, limits: Sequence[float], in_all: float = math.inf) -> tuple[float, list[Stage]] | None:
        """(value, stages) of a pipeline whose loads keep a limit in each phase, and in all phases, or None."""
        stages, n = self._stages, self._stages.num_nodes
        cap = np.floor(np.minimum(np.array([*limits, in_all]) / self._second, _NEVER - 1)).astype(np.int64)  # [P + 1]
        left = np.empty((len(self._supply), self._sets), np.int64)
        for j, (p, supply) in enumerate(self._supply):
            total = supply if p < 0 else cap[p] * supply
            left[j] = np.minimum(np.ceil(total * (1 + 1e-12)) + 1, _NO_LIMIT)
        table = _Table(n, self._words)
        given = (
            *self._flow, *self._graph, self._send, self._receive, self._own, self._scratch, self._tariff, self._layout,
            self._room, self._options, self._may_add, cap, left, stages.overlap, self._zobrist, self._saves,
            self._reader, *self._gates,
        )  # fmt: skip
        while self._looks > 0:
            verdict = _grow(*given, *table.arrays, *table.work(self), _STEPS)
            if verdict == _DONE:
                return None
            if verdict == _REACHED:
                return self._chain(table, cap)
            if verdict == _FULL:
                table.double()
            else:
                self._looks -= 1
                if self._ctx and self._ctx.should_stop():
                    break
        raise TooManyIdeals

    def _chain(self, table: _Table, cap: Whole) -> tuple[float, list[Stage]]:
        """Back from the whole to nothing, each time by the stage with the least load."""
        stages, words = self._stages, self._words
        at, chain = table.whole, []
        in_use = int(_unpacked(table.used[at * words : (at + 1) * words]).argmax())
        loads = np.zeros(self._phases, np.int64)
        n, m = stages.num_nodes, stages.num_messages
        work = [np.zeros(size, np.int64) for size in (n, max(n, m), m)]
        work += [np.zeros(size, np.int64) for size in (self._columns, self._columns, self._own.shape[1], self._phases)]
        while table.size(at):
            best, way = _last_stage(
                *self._graph, self._send, self._receive, self._own, self._scratch, self._tariff, self._layout,
                self._room, self._options, self._may_add, cap, stages.overlap, table.member, table.used, table.count,
                at, in_use, *work,
            )  # fmt: skip
            loads = np.maximum(loads, work[-1])
            chain.append((table.nodes(at) & ~table.nodes(best), int(self._options[way, _KIND])))
            at, in_use = best, in_use - int(self._options[way, _SHIFT])
        return float(loads.sum()) * self._second, chain if stages.chained else chain[::-1]


def _quantum(total: float) -> float:
    """The power of two that is one when the total is below two to the power of _BITS."""
    return 2.0 ** (math.frexp(total)[1] - _BITS) if total > 0 else 1.0


def _floor(values: Floats, quantum: float, endless: int = _NEVER) -> Whole:
    """Rounded down, so that no stage costs more than it does."""
    finite = np.isfinite(values)
    return np.where(finite, np.floor(np.where(finite, values, 0.0) / quantum), endless).astype(np.int64)


def _prices(compute: Whole) -> Floats:
    """[K] what a second is worth: such that the work, each node where it costs least, costs most.

    That is the dual of sharing the work out in any fractions. Any prices give a valid bound.
    """
    able = compute < _NEVER
    total = np.where(able, compute, compute.min(axis=1, keepdims=True)).sum(axis=0).astype(np.float64)
    price: Floats = np.minimum(1.0, max(total.min(initial=np.inf), 1.0) / np.maximum(total, 1.0))
    if len(price) == 1:
        return price
    rows, count = np.unique(np.where(able, compute, _NEVER), axis=0, return_counts=True)
    n, (row, kind) = len(rows), np.nonzero(rows < _NEVER)
    at, unit = np.arange(len(row)), max(float(total.min()), 1.0)
    less = coo_array(
        (
            np.concatenate([1.0 / count[row], -rows[row, kind] / unit]),
            (np.tile(at, 2), np.concatenate([row, n + kind])),
        ),
        (len(row), n + len(price)),
    )
    found = linprog(
        np.repeat([-1.0, 0.0], [n, len(price)]), A_ub=less.tocsr(), b_ub=np.zeros(len(row)),
        A_eq=np.repeat([0.0, 1.0], [n, len(price)])[None], b_eq=[1.0],
    )  # fmt: skip
    return np.maximum(found.x[n:], 0.0) / found.x[n:].max() if found.success else price


def _lists(owner: Whole, item: Whole, count: int) -> tuple[Whole, Whole]:
    """(start [count + 1], items by owner)."""
    by_owner = np.argsort(owner, kind="stable")
    return np.searchsorted(owner[by_owner], np.arange(count + 1)), item[by_owner].astype(np.int64)


def _packed(flags: NDArray[np.bool_], words: int) -> NDArray[np.uint64]:
    bits = np.zeros(words * 64, np.bool_)
    bits[: len(flags)] = flags
    return np.packbits(bits, bitorder="little").view(np.uint64)


def _unpacked(words: NDArray[np.uint64]) -> NDArray[np.bool_]:
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little").astype(np.bool_)


class _Table:
    """The ideals so far, found by hash; those of one size are a list."""

    def __init__(self, n: int, words: int) -> None:
        self._row = -(-n // 64)
        self._words, self._n = words, n
        self.slot, self.key = np.full(4096, -1, np.int32), np.zeros(1024, np.uint64)
        self.member, self.used = np.zeros(1024 * self._row, np.uint64), np.zeros(1024 * words, np.uint64)
        self.following, self.first = np.full(1024, -1, np.int32), np.full(n + 1, -1, np.int32)
        self.state = np.zeros(_STATE, np.int64)
        self.state[[_COUNT, _LEVEL, _IDEAL, _PART]] = 1, -1, -1, _BEYOND
        self.used[0], self.first[0], self.slot[0] = 1, 0, 0  # nothing done, no device used
        self._work: tuple[NDArray[np.int64], ...] | None = None
        self.hash = np.zeros(1, np.uint64)
        self.now = np.zeros(self._row, np.uint64)
        self.moved = np.zeros(0, np.uint64)

    @property
    def arrays(self) -> tuple[NDArray[np.uint64] | NDArray[np.int32] | Whole, ...]:
        return (
            self.slot, self.key, self.member, self.used, self.following, self.first, self.state, self.hash, self.now,
        )  # fmt: skip

    @property
    def count(self) -> int:
        return int(self.state[_COUNT])

    @property
    def whole(self) -> int:
        return int(self.first[self._n])

    def work(self, search: Search) -> tuple[NDArray[np.int64] | NDArray[np.uint64], ...]:
        """Where the kernel keeps what it is in the middle of."""
        if self._work is None:
            n, m, columns = self._n, len(search._send), search._send.shape[1] * search._phases
            ways = len(search._options)
            self._work = tuple(np.zeros(size, np.int64) for size in (n, n, n, m, m, n + 1, n + 1, n + 1, n + 1, n + 1))
            self._work += tuple(np.zeros(size, np.int64) for size in (columns, columns, search._own.shape[1]))
            self._work += (np.zeros(len(search._supply), np.int64), *(np.zeros(ways, np.int64) for _ in range(4)))
            self._work += (np.zeros((ways, len(search._supply)), np.int64), np.zeros(n + 1, np.int64))
            self.moved = np.zeros((ways + 1) * self._words, np.uint64)
        return (*self._work, self.moved)

    def double(self) -> None:
        if 2 * (self.key.nbytes + self.member.nbytes + self.used.nbytes + self.slot.nbytes) > _MOST_BYTES:
            raise TooManyIdeals
        for name in ("key", "member", "used", "following"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self.slot = np.full(2 * len(self.slot), -1, np.int32)
        _fill_slots(self.slot, self.key, self.count)

    def nodes(self, ideal: int) -> NDArray[np.bool_]:
        return _unpacked(self.member[ideal * self._row : (ideal + 1) * self._row])[: self._n]

    def size(self, ideal: int) -> int:
        return int(self.nodes(ideal).sum())


# ---- the kernels -----------------------------------------------------------------------------------------------------

_DONE, _REACHED, _FULL, _PAUSED = range(4)
_COUNT, _SIZE, _IDEAL, _LEVEL, _PENDING, _PART, _GATE, _STATE = range(8)
_WALK, _BEYOND = range(2)  # parts of what is done with an ideal: stages that end at gates, and those that go beyond
_KIND, _REPLICAS, _SAMPLES, _SHIFT, _LATENCY = range(5)  # of devices that a stage may get; the shift is of sets in use
_HELD, _WEIGHT, _KEEP = range(3)  # columns, -1 where there is none: of messages (bytes, then what is kept); of nodes


@njit(cache=True, nogil=True)
def _fill_slots(slot, key, count):  # type: ignore[no-untyped-def]
    mask = np.uint64(len(slot) - 1)
    for i in range(count):
        at = key[i] & mask
        while slot[at] >= 0:
            at = (at + np.uint64(1)) & mask
        slot[at] = i


# The loop below calls these for each node: inlined, as passing their arrays would take longer than what they do.


@njit(inline="always")
def _enter(  # type: ignore[no-untyped-def]
    v, sign, sent_ptr, sent, read_ptr, read, sender, reader_ptr, phase, send, receive, own, inside, fate, inner, gone,
    full, sure, done,
):  # fmt: skip
    """Node v joins the stage (sign 1), or leaves it again (-1).

    `full` is what the stage exchanges as it is, `sure` what it does however it grows: with nodes that never join. What
    a message gives back (`stages.without`) counts as long as it may.
    """
    columns = send.shape[1]
    if sign < 0:
        inside[v] = 0
    for c in range(own.shape[1]):
        done[c] += sign * own[v, c]
    for x in range(sent_ptr[v], sent_ptr[v + 1]):
        m = sent[x]
        base = phase[m] * columns
        if inner[m] < reader_ptr[m + 1] - reader_ptr[m]:
            for c in range(columns):
                full[base + c] += sign * send[m, c]
                if send[m, c] < 0:
                    sure[base + c] += sign * send[m, c]
        if inner[m] > 0:
            for c in range(columns):
                full[base + c] -= sign * receive[m, c]
        if gone[m] > 0:
            for c in range(columns):
                sure[base + c] += sign * max(send[m, c], 0)
    for x in range(read_ptr[v], read_ptr[v + 1]):
        m = read[x]
        base = phase[m] * columns
        if sign < 0:
            inner[m] -= 1
        if inside[sender[m]]:
            if inner[m] + 1 == reader_ptr[m + 1] - reader_ptr[m]:
                for c in range(columns):
                    full[base + c] -= sign * send[m, c]
                    if send[m, c] < 0:
                        sure[base + c] -= sign * send[m, c]
        elif inner[m] == 0:
            for c in range(columns):
                full[base + c] += sign * receive[m, c]
            if fate[sender[m]]:
                for c in range(columns):
                    sure[base + c] += sign * receive[m, c]
        if sign > 0:
            inner[m] += 1
    if sign > 0:
        inside[v] = 1


@njit(inline="always")
def _rule_out(  # type: ignore[no-untyped-def]
    v, sign, sent_ptr, sent, read_ptr, read, sender, phase, send, receive, inside, fate, inner, gone, sure
):  # fmt: skip
    """Node v is never to join the stage (sign 1), or may again (-1): what it exchanges with the stage is then sure."""
    columns = send.shape[1]
    fate[v] = 1 if sign > 0 else 0
    for x in range(read_ptr[v], read_ptr[v + 1]):
        m = read[x]
        if sign < 0:
            gone[m] -= 1
        if gone[m] == 0 and inside[sender[m]]:
            for c in range(columns):
                sure[phase[m] * columns + c] += sign * max(send[m, c], 0)
        if sign > 0:
            gone[m] += 1
    for x in range(sent_ptr[v], sent_ptr[v + 1]):
        m = sent[x]
        if inner[m] > 0:
            for c in range(columns):
                sure[phase[m] * columns + c] += sign * receive[m, c]


@njit(inline="always")
def _is_gate(  # type: ignore[no-untyped-def]
    v, sent_ptr, sent, read_ptr, read, sender, reader_ptr, reader, send, receive, saves, now
):  # fmt: skip
    """Whether a later stage is no worse off without node v, if that joins an ideal; see gates.py."""
    one, good = np.uint64(1), True
    for c in range(send.shape[1]):
        saved = saves[v, c]
        for x in range(sent_ptr[v], sent_ptr[v + 1]):
            saved += min(send[sent[x], c], 0) - receive[sent[x], c]
        for x in range(read_ptr[v], read_ptr[v + 1]):
            m = read[x]
            if now[sender[m] >> 6] >> np.uint64(sender[m] & 63) & one == 0:
                saved -= max(send[m, c], 0)
            elif saved < 0:
                alone = True
                for y in range(reader_ptr[m], reader_ptr[m + 1]):
                    r = reader[y]
                    if r != v and now[r >> 6] >> np.uint64(r & 63) & one == 0:
                        alone = False
                        break
                if alone:
                    saved += receive[m, c]
        good = good and saved >= 0
    return good


@njit(inline="always")
def _load(way, options, p, moved, done, tariff, layout, phases, columns, overlap):  # type: ignore[no-untyped-def]
    """What a stage with these sums takes in a phase; the last phase has what replicas exchange."""
    kind, replicas = options[way, _KIND], options[way, _REPLICAS]
    work, copies = done[kind * phases + p], np.int64(0)
    if tariff[kind] >= 0:
        copies = moved[p * columns + tariff[kind]]
    load = max(work, copies) if overlap else work + copies
    if replicas > 1 and load < _NEVER:
        if p == phases - 1:
            if layout[_WEIGHT] >= 0:
                load += (replicas - 1) * min(done[layout[_WEIGHT] + kind], 4 * _NEVER)
            load += replicas * options[way, _LATENCY]
        load //= replicas
    return load


@njit(inline="always")
def _fits(way, options, moved, done, scratch, tariff, columns, layout, room, cap, overlap):  # type: ignore[no-untyped-def]
    """Whether a stage with these sums keeps the limits on some devices."""
    phases, kinds, in_all, more = len(cap) - 1, len(tariff), np.int64(0), options[way, _SAMPLES] - 1
    held = done[kinds * phases] + scratch
    if layout[_KEEP] >= 0:
        held += more * done[layout[_KEEP]]
    for p in range(phases):
        load = _load(way, options, p, moved, done, tariff, layout, phases, columns, overlap)
        in_all += load
        if load > cap[p] or in_all > cap[phases]:
            return False
        if layout[_HELD] >= 0:
            held += moved[p * columns + layout[_HELD]]
            if layout[_KEEP] >= 0:
                held += more * moved[p * columns + layout[_HELD] + 1]
    return held <= room[options[way, _KIND]]


@njit(cache=True, nogil=True)
def _grow(  # type: ignore[no-untyped-def]
    inputs, after_ptr, after, sent_ptr, sent, read_ptr, read, sender, reader_ptr, phase, send, receive, own,
    scratch, tariff, layout, room, options, may_add, cap, left, overlap, zobrist, saves, reader,
    gate_of, forced, since, rest_of, gate_ptr, by_gate,
    slot, key, member, used, following, first, state, hash_now, now,
    waiting, inside, fate, inner, gone, queue, begin, at, end, most_scratch, full, sure, done, remaining, usable,
    active, passed, fitting, most_left, highest, moved, steps,
):  # fmt: skip
    """Goes on with the search: from each ideal, smallest first, to all that one more stage can reach.

    First, to all gates (gates.py). `passed` is the last gate, by devices, up to which stages need not end elsewhere.
    Then, for devices with the same such gate, to what is beyond it, by way of what all that has in common.

    A stage grows node by node: each level of the search takes a node from the queue of those whose inputs are there,
    and those that it passed over never join in the levels above. So every set is met once.
    """
    n, ways, row, words = len(inputs), len(options), len(now), len(may_add) // len(options)
    own_columns, potentials, columns = own.shape[1], len(remaining), send.shape[1]
    one, mask = np.uint64(1), np.uint64(len(slot) - 1)
    level = state[_LEVEL]
    for _ in range(steps):
        if state[_PENDING]:
            # ---- a new stage: which devices can have it, and where that leads
            target, hit, top = -1, False, most_scratch[max(level, 0)]
            for k in range(ways):
                fitting[k] = active[k]
                for j in range(potentials):
                    if remaining[j] - done[own_columns - potentials + j] > most_left[k, j]:
                        fitting[k] = 0
                if fitting[k]:
                    fitting[k] = _fits(k, options, full, done, top, tariff, columns, layout, room, cap, overlap)
                    hit = hit or fitting[k]
            for x in range(end[level] if hit and level >= 0 else 0):
                # another node may as well be in the stage too, where it fits: a gate of one
                v = queue[x]
                if not inside[v] and _is_gate(
                    v, sent_ptr, sent, read_ptr, read, sender, reader_ptr, reader, send, receive, saves, now
                ):  # fmt: skip
                    _enter(
                        v, 1, sent_ptr, sent, read_ptr, read, sender, reader_ptr, phase, send, receive, own, inside,
                        fate, inner, gone, full, sure, done,
                    )  # fmt: skip
                    for k in range(ways):
                        if fitting[k] and _fits(
                            k, options, full, done, max(top, scratch[v]), tariff, columns, layout, room, cap, overlap
                        ):  # fmt: skip
                            fitting[k] = 0
                    _enter(
                        v, -1, sent_ptr, sent, read_ptr, read, sender, reader_ptr, phase, send, receive, own, inside,
                        fate, inner, gone, full, sure, done,
                    )  # fmt: skip
            hit = False
            for k in range(ways):
                if fitting[k]:
                    if not hit:
                        hit = True
                        for w in range(words):
                            moved[ways * words + w] = 0
                    for w in range(words):
                        moved[ways * words + w] |= moved[k * words + w]
            if hit:
                spot = hash_now[0] & mask
                while slot[spot] >= 0:
                    target = slot[spot]
                    same = key[target] == hash_now[0]
                    for w in range(row):
                        same = same and member[target * row + w] == now[w]
                    if same:
                        break
                    target = -1
                    spot = (spot + one) & mask
                fresh = False
                for w in range(words):
                    bits = moved[ways * words + w]
                    if target >= 0:
                        bits &= ~used[target * words + w]
                    keep = np.uint64(0)
                    if bits != 0:
                        for b in range(min(64, left.shape[1] - w * 64)):
                            if bits >> np.uint64(b) & one:
                                fits = True
                                for j in range(potentials):
                                    rest = remaining[j] - done[own_columns - potentials + j]
                                    fits = fits and rest <= left[j, w * 64 + b]
                                if fits:
                                    keep |= one << np.uint64(b)
                    moved[ways * words + w] = keep
                    fresh = fresh or keep != 0
                if fresh:
                    if target < 0:
                        target = state[_COUNT]
                        if target == len(key):
                            state[_LEVEL] = level
                            return _FULL
                        state[_COUNT] += 1
                        slot[spot] = target
                        key[target] = hash_now[0]
                        size = np.int64(0)
                        for w in range(row):
                            member[target * row + w] = now[w]
                        for v in range(n):
                            size += np.int64(now[v >> 6] >> np.uint64(v & 63) & one)
                        for w in range(words):
                            used[target * words + w] = 0
                        following[target] = first[size]
                        first[size] = target
                    for w in range(words):
                        used[target * words + w] |= moved[ways * words + w]
                    if first[n] == target:
                        return _REACHED
            state[_PENDING] = 0
        elif level < 0:
            # ---- what comes next: a larger gate, devices that were not yet looked at, or the next ideal
            gate = np.int64(_NEVER)
            if state[_PART] == _WALK and state[_GATE] + 1 < len(since):
                for k in range(ways):
                    if usable[k] and _fits(
                        k, options, sure, done, most_scratch[0], tariff, columns, layout, room, cap, overlap
                    ):  # fmt: skip
                        gate = state[_GATE] + 1
            walks = gate < _NEVER
            if not walks:
                if state[_PART] == _WALK:
                    state[_PART], state[_GATE] = _BEYOND, -2
                    for k in range(ways):
                        # what is left after a smaller gate is too much, whatever the devices are by then
                        for j in range(potentials if usable[k] else 0):
                            while passed[k] + 1 < len(since) and rest_of[j, passed[k] + 1] > most_left[k, j]:
                                passed[k] += 1
                for k in range(ways):
                    if usable[k] and passed[k] > state[_GATE]:
                        gate = min(gate, passed[k])
            if gate == _NEVER:
                ideal = following[state[_IDEAL]] if state[_IDEAL] >= 0 else first[0]
                while ideal < 0:
                    state[_SIZE] += 1
                    if state[_SIZE] >= n:
                        state[_LEVEL] = -1
                        return _DONE
                    ideal = first[state[_SIZE]]
                state[_IDEAL] = ideal
                for k in range(ways):
                    usable[k] = 0
                    words_off, bits_off = options[k, _SHIFT] // 64, np.uint64(options[k, _SHIFT] % 64)
                    for w in range(words):
                        bits = np.uint64(0)
                        if w - words_off >= 0:
                            x = w - words_off
                            bits = (used[ideal * words + x] & may_add[k * words + x]) << bits_off
                            if bits_off > 0 and x > 0:
                                bits |= (used[ideal * words + x - 1] & may_add[k * words + x - 1]) >> (
                                    np.uint64(64) - bits_off
                                )
                        moved[k * words + w] = bits
                        if bits != 0:
                            usable[k] = 1
                    for j in range(potentials):
                        most_left[k, j] = -1
                        for b in range(left.shape[1] if usable[k] else 0):
                            if moved[k * words + (b >> 6)] >> np.uint64(b & 63) & one:
                                most_left[k, j] = max(most_left[k, j], left[j, b])
            ideal = state[_IDEAL]
            if not walks:
                # the ideal as it is
                for w in range(row):
                    now[w] = member[ideal * row + w]
                hash_now[0] = key[ideal]
                for j in range(potentials):
                    remaining[j] = 0
                for m in range(len(sender)):
                    inner[m] = gone[m] = 0
                for v in range(n):
                    inside[v] = 0
                    waiting[v] = inputs[v]
                for c in range(own_columns):
                    done[c] = 0
                for c in range(len(full)):
                    full[c] = sure[c] = 0
                begin[0] = most_scratch[0] = 0
                highest[0] = -1
                for v in range(n):
                    fate[v] = np.int64(now[v >> 6] >> np.uint64(v & 63) & one)
                    if fate[v]:
                        if len(since) > 0:
                            highest[0] = max(highest[0], gate_of[v])
                        for x in range(after_ptr[v], after_ptr[v + 1]):
                            waiting[after[x]] -= 1
                        for x in range(read_ptr[v], read_ptr[v + 1]):
                            gone[read[x]] += 1
                    else:
                        for j in range(potentials):
                            remaining[j] += own[v, own_columns - potentials + j]
            if gate == _NEVER:
                state[_PART], state[_GATE] = _WALK, max(highest[0] - 1, -1)
                for k in range(ways):
                    passed[k] = state[_GATE]
                    active[k] = usable[k]
                continue
            # all of the gate joins; or all that is in every ideal beyond it
            state[_GATE], grows, last = gate, False, np.int64(0)
            for x in range(begin[0] if walks else 0, gate_ptr[gate + 1] if walks else n):
                v = by_gate[x]
                if not fate[v] and (walks or forced[v] <= gate):
                    _enter(
                        v, 1, sent_ptr, sent, read_ptr, read, sender, reader_ptr, phase, send, receive, own, inside,
                        fate, inner, gone, full, sure, done,
                    )  # fmt: skip
                    now[v >> 6] ^= one << np.uint64(v & 63)
                    hash_now[0] ^= zobrist[v]
                    most_scratch[0] = max(most_scratch[0], scratch[v])
                    highest[0] = max(highest[0], gate_of[v])
                    for y in range(after_ptr[v], after_ptr[v + 1]):
                        waiting[after[y]] -= 1
                    grows = True
            state[_PENDING] = grows
            if walks:
                begin[0] = gate_ptr[gate + 1]
                for k in range(ways):
                    if not grows or (usable[k] and since[gate] <= passed[k] and _fits(
                        k, options, full, done, most_scratch[0], tariff, columns, layout, room, cap, overlap
                    )):  # fmt: skip
                        passed[k] = gate
                continue
            fits = not grows
            for k in range(ways):
                active[k] = usable[k] and passed[k] == gate
                if active[k] and not fits:
                    fits = _fits(
                        k, options, sure, done, most_scratch[0], tariff, columns, layout, room, cap, overlap
                    )  # fmt: skip
            for v in range(n):
                if fits and not fate[v] and not inside[v] and waiting[v] == 0:
                    queue[last] = v
                    last += 1
            level = begin[0] = at[0] = 0
            end[0] = last
            state[_PENDING] = grows and fits and highest[0] > gate
        else:
            # ---- the next node joins; or, where none is left, the last one leaves and is ruled out for those before
            joins = at[level] < end[level]
            if not joins:
                for x in range(begin[level], end[level]):
                    _rule_out(
                        queue[x], -1, sent_ptr, sent, read_ptr, read, sender, phase, send, receive, inside, fate, inner,
                        gone, sure,
                    )  # fmt: skip
                level -= 1
                if level < 0:
                    continue
            v, sign = queue[at[level]], 1 if joins else -1
            _enter(
                v, sign, sent_ptr, sent, read_ptr, read, sender, reader_ptr, phase, send, receive, own, inside, fate,
                inner, gone, full, sure, done,
            )  # fmt: skip
            now[v >> 6] ^= one << np.uint64(v & 63)
            hash_now[0] ^= zobrist[v]
            last = end[level]
            for x in range(after_ptr[v], after_ptr[v + 1]):
                waiting[after[x]] -= sign
                if waiting[after[x]] == 0:
                    queue[last] = after[x]
                    last += 1
            if joins:
                top, fits = max(most_scratch[level], scratch[v]), False
                for k in range(ways):
                    if active[k] and not fits:
                        fits = _fits(k, options, sure, done, top, tariff, columns, layout, room, cap, overlap)
                begin[level + 1] = at[level + 1] = at[level] + 1 if fits else last
                end[level + 1], most_scratch[level + 1] = last, top
                highest[level + 1] = max(highest[level], gate_of[v])
                level += 1
                state[_PENDING] = fits and highest[level] > state[_GATE]
            else:
                _rule_out(
                    v, 1, sent_ptr, sent, read_ptr, read, sender, phase, send, receive, inside, fate, inner, gone, sure
                )
                at[level] += 1
    state[_LEVEL] = level
    return _PAUSED


@njit(cache=True, nogil=True)
def _last_stage(  # type: ignore[no-untyped-def]
    sent_ptr, sent, read_ptr, read, sender, reader_ptr, phase, send, receive, own, scratch, tariff, layout, room,
    options, may_add, cap, overlap, member, used, count, target, in_use, inside, never, inner, full, sure, done, load,
):  # fmt: skip
    """(the ideal before, which devices) of a stage with the least load that leads to an ideal; `load` is set."""
    n, ways, phases, one, words = len(inside), len(options), len(load), np.uint64(1), len(may_add) // len(options)
    row, columns = (n + 63) // 64, send.shape[1]
    best, best_way, least = -1, -1, np.int64(0)
    for ideal in range(count):
        below = ideal != target
        for w in range(row):
            below = below and member[ideal * row + w] & ~member[target * row + w] == 0
        if not below:
            continue
        top, summed = np.int64(0), False
        for k in range(ways):
            u = in_use - options[k, _SHIFT]
            if u < 0:
                continue
            w, bit = u >> 6, np.uint64(u & 63)
            if (used[ideal * words + w] & may_add[k * words + w]) >> bit & one == 0:
                continue
            if not summed:
                summed = True
                for m in range(len(inner)):
                    inner[m] = 0
                for c in range(len(full)):
                    full[c] = 0
                for c in range(len(done)):
                    done[c] = 0
                for v in range(n):
                    inside[v] = 0
                for v in range(n):
                    if (member[target * row + (v >> 6)] ^ member[ideal * row + (v >> 6)]) >> np.uint64(v & 63) & one:
                        top = max(top, scratch[v])
                        _enter(
                            v, 1, sent_ptr, sent, read_ptr, read, sender, reader_ptr, phase, send, receive, own, inside,
                            never, inner, never, full, sure, done,
                        )  # fmt: skip
            if _fits(k, options, full, done, top, tariff, columns, layout, room, cap, overlap):
                total = np.int64(0)
                for p in range(phases):
                    total += _load(k, options, p, full, done, tariff, layout, phases, columns, overlap)
                if best < 0 or total < least:
                    best, best_way, least = ideal, k, total
                    for p in range(phases):
                        load[p] = _load(k, options, p, full, done, tariff, layout, phases, columns, overlap)
    return best, best_way
