"""The search for one limit: can stages within it reach the whole graph? A "no" is a proof."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from placewise.driver import Context
from placewise.graph import Floats
from placewise.planners.gates import Column, Gates, Net, no_gates
from placewise.planners.ideals_kernel import (
    BITS,
    DONE,
    FULL,
    KIND,
    NEVER,
    REACHED,
    SHIFT,
    Table,
    TooManyIdeals,
    grow,
    last_stage,
    packed,
    unpacked,
)  # fmt: skip
from placewise.planners.stages import Kinds, Stages, Whole

CLOSE: Final = 5e-10  # relative; what is nearer is the same
_NO_LIMIT: Final = 1 << 62
_STEPS: Final = 1_000_000  # between two looks at the clock
MOST_LOOKS: Final = 4_000  # at the clock, for all limits

Stage = tuple[NDArray[np.bool_], int]  # the nodes, the kind of device; how many devices have it is the simulator's


def digits(stages: Stages) -> list[int]:
    """The most of everything that partial pipelines are told apart by: devices in use of each pool, then stages.

    Stages are counted where a kind has only some devices of a pool to begin with.
    """
    kinds = stages.kinds
    return [*kinds.pools.tolist(), *(len(kinds.devices[k]) for k in _counted(kinds))]


def _counted(kinds: Kinds) -> list[int]:
    return [k for k, devices in enumerate(kinds.devices) if len(devices) < kinds.pools[kinds.pool[k]]]


class Search:
    """Ideals that can be reached within limits."""

    def __init__(
        self, stages: Stages, scale: float, order: Whole | None, most_devices: int | None = None,
        ctx: Context | None = None, looks: int = MOST_LOOKS,
    ) -> None:  # fmt: skip
        self._stages, self._ctx, self._looks = stages, ctx, looks
        n, kinds, phases = stages.num_nodes, len(stages.kinds.devices), stages.compute.shape[2]
        self._phases = phases
        if not math.isfinite(scale):
            scale = float(np.where(np.isfinite(stages.compute), stages.compute, 0.0).max(axis=1).sum())
            scale += float(stages.send.sum() + stages.receive.sum())
        self._second = _quantum(scale * int(stages.kinds.most.max(initial=1)))
        total = stages.need.sum() + stages.copy.sum() + stages.scratch.max(initial=0.0)
        byte = _quantum(float(total + (stages.keep.sum() + stages.keep_copy.sum()) * stages.most_samples))

        tail, head = (stages.tail, stages.head) if order is None else (order[:-1], order[1:])
        if stages.chained:  # from the last stage to the first
            tail, head = head, tail
        after_ptr, after = lists(tail, head, n)
        sent_ptr, sent = lists(stages.sender, np.arange(stages.num_messages), n)
        read_ptr, read = lists(stages.reader, stages.message, n)
        reader_ptr = np.searchsorted(stages.message, np.arange(stages.num_messages + 1))
        self._flow = (np.bincount(head, minlength=n), after_ptr, after)
        self._graph = (sent_ptr, sent, read_ptr, read, stages.sender, reader_ptr, stages.phase)
        self._reader = stages.reader
        # Columns of what messages cost, where they cost anything: by tariff, then bytes.
        costs = (stages.send != 0).any(axis=0) | (stages.receive != 0).any(axis=0)
        self._tariff = np.where(costs, np.cumsum(costs) - 1, -1)[stages.kinds.tariff]
        held = [stages.copy] * bool(stages.copy.any() or stages.keeps) + [stages.keep_copy] * stages.keeps
        bytes_held = np.array(held).reshape(len(held), stages.num_messages).T
        paid = [[_floor(stages.send[:, costs], self._second), _floor(0 * bytes_held, byte)]]
        paid += [[_floor(stages.receive[:, costs], self._second), _floor(bytes_held, byte)]]
        self._send, self._receive = (np.ascontiguousarray(np.hstack(columns)) for columns in paid)
        compute, need = _floor(stages.compute, self._second), _floor(stages.need[:, None], byte)
        self._columns = phases * self._send.shape[1]
        self._room = _floor(stages.kinds.room, byte, _NO_LIMIT)
        self._scratch = _floor(stages.scratch, byte)

        most = np.array(digits(stages))
        step = np.concatenate([[1], np.cumprod(most + 1)[:-1]]).astype(np.int64)
        self._sets = sets = int((most + 1).prod())
        self._words = -(-sets // 64)
        in_use = np.arange(sets)[:, None] // step % (most + 1)  # [sets, digits]
        pool, pools = stages.kinds.pool, len(stages.kinds.pools)
        devices = in_use[:, :pools].sum(axis=1)
        free = most - in_use
        free[:, :pools] = np.minimum(free[:, :pools], np.maximum((most_devices or sets) - devices, 0)[:, None])
        self._options, self._may_add = self._ways(step, free, devices)
        free = free[:, :pools]
        # What is left to do must fit into the time, and the memory, of the devices that are left.
        weights, self._supply = [], []
        for p in range(phases + (phases > 1)):
            work = np.full((n, pools), NEVER)
            for k, seconds in enumerate((compute[:, :, p] if p < phases else compute.sum(axis=2)).T):
                work[:, pool[k]] = np.minimum(work[:, pool[k]], seconds)
            price = prices(work)
            weights.append(np.floor((work * price).min(axis=1)).astype(np.int64))
            self._supply.append((p, (free * price).sum(axis=1)))
        if (self._room < _NO_LIMIT).all():
            # All that a step holds, shared by replicas, each of which needs the rest too: at least as much as on one.
            more = (stages.flight.step - 1) * stages.flight.drains
            weights.append(need[:, 0] + more * _floor(stages.keep, byte))
            room = np.zeros(pools, np.int64)
            room[pool] = self._room
            self._supply.append((-1, (free * room).sum(axis=1)))
        columns = [compute.reshape(n, kinds * phases), need]
        self._layout = np.array([int(costs.sum()) if held else -1, -1, -1])
        if stages.weight.any():
            self._layout[1] = sum(column.shape[1] for column in columns)
            columns.append(np.minimum(_floor(stages.weight[:, None] * stages.kinds.per_byte, self._second), NEVER))
        if stages.keeps:
            self._layout[2] = sum(column.shape[1] for column in columns)
            columns.append(_floor(stages.keep[:, None], byte))
        self._own = np.ascontiguousarray(np.hstack([*columns, *(weight[:, None] for weight in weights)]))
        self._zobrist = np.random.default_rng(0).integers(1, 2**63, n, np.uint64)
        # What a later stage saves by losing a node, by columns of messages, without the messages; see gates.py.
        simple = not stages.keeps and phases == 1 and not (stages.kinds.most > 1).any()
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

    def _ways(self, step: Whole, free: Whole, in_use: Whole) -> tuple[Whole, NDArray[np.uint64]]:
        """What devices a stage may get, [W, 5] (see KIND), and after which sets of devices, as bits."""
        stages, kinds, ways, after = self._stages, self._stages.kinds, [], []
        counter = {k: len(kinds.pools) + i for i, k in enumerate(_counted(kinds))}
        for k, (pool, most) in enumerate(zip(kinds.pool.tolist(), kinds.most.tolist(), strict=True)):
            begins, one = (free[:, counter[k]] > 0, step[counter[k]]) if k in counter else (True, 0)
            later = in_use if stages.after is None else np.full_like(in_use, stages.after[k])
            for r in range(1, most + 1):
                latency = int(_floor(np.array((r - 1) * kinds.latency[k]), self._second))
                samples = stages.flight.samples(later + r, r) if stages.keeps else np.ones_like(in_use)
                for s in np.unique(samples).tolist():
                    ways.append((k, r, s, r * int(step[pool]) + int(one), min(latency, NEVER)))
                    after.append(packed((free[:, pool] >= r) & begins & (samples == s), self._words))
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
            if found[0] <= limit or b - a <= CLOSE / 4 * limit:
                return found
            intervals += [(a, (a + b) / 2), ((a + b) / 2, b)]
        return None

    def reach(self, limits: Sequence[float], in_all: float = math.inf) -> tuple[float, list[Stage]] | None:
        """(value, stages) of a pipeline whose loads keep a limit in each phase, and in all phases, or None."""
        stages, n = self._stages, self._stages.num_nodes
        cap = np.floor(np.minimum(np.array([*limits, in_all]) / self._second, NEVER - 1)).astype(np.int64)  # [P + 1]
        left = np.empty((len(self._supply), self._sets), np.int64)
        for j, (p, supply) in enumerate(self._supply):
            total = supply if p < 0 else cap[p] * supply
            left[j] = np.minimum(np.ceil(total * (1 + 1e-12)) + 1, _NO_LIMIT)
        table = Table(n, self._words)
        sizes = stages.num_messages, self._columns, self._own.shape[1], len(self._options), len(self._supply)
        given = (
            *self._flow, *self._graph, self._send, self._receive, self._own, self._scratch, self._tariff, self._layout,
            self._room, self._options, self._may_add, cap, left, stages.overlap, self._zobrist, self._saves,
            self._reader, *self._gates,
        )  # fmt: skip
        while self._looks > 0:
            verdict = grow(*given, *table.arrays, *table.work(*sizes), _STEPS)
            if verdict == DONE:
                return None
            if verdict == REACHED:
                return self._chain(table, cap)
            if verdict == FULL:
                table.double()
            else:
                self._looks -= 1
                if self._ctx and self._ctx.should_stop():
                    break
        raise TooManyIdeals

    def _chain(self, table: Table, cap: Whole) -> tuple[float, list[Stage]]:
        """Back from the whole to nothing, each time by the stage with the least load."""
        stages, words = self._stages, self._words
        at, chain = table.whole, []
        in_use = int(unpacked(table.used[at * words : (at + 1) * words]).argmax())
        loads = np.zeros(self._phases, np.int64)
        n, m = stages.num_nodes, stages.num_messages
        work = [np.zeros(size, np.int64) for size in (n, max(n, m), m)]
        work += [np.zeros(size, np.int64) for size in (self._columns, self._columns, self._own.shape[1], self._phases)]
        while table.size(at):
            best, way = last_stage(
                *self._graph, self._send, self._receive, self._own, self._scratch, self._tariff, self._layout,
                self._room, self._options, self._may_add, cap, stages.overlap, table.member, table.used, table.count,
                at, in_use, *work,
            )  # fmt: skip
            loads = np.maximum(loads, work[-1])
            chain.append((table.nodes(at) & ~table.nodes(best), int(self._options[way, KIND])))
            at, in_use = best, in_use - int(self._options[way, SHIFT])
        return float(loads.sum()) * self._second, chain if stages.chained else chain[::-1]


def _quantum(total: float) -> float:
    """The power of two that is one when the total is below two to the power of BITS."""
    return 2.0 ** (math.frexp(total)[1] - BITS) if total > 0 else 1.0


def _floor(values: Floats, quantum: float, endless: int = NEVER) -> Whole:
    """Rounded down, so that no stage costs more than it does."""
    finite = np.isfinite(values)
    return np.where(finite, np.floor(np.where(finite, values, 0.0) / quantum), endless).astype(np.int64)


def prices(compute: Whole) -> Floats:
    """[K] what a second is worth: such that the work, each node where it costs least, costs most.

    That is the dual of sharing the work out in any fractions. Any prices give a valid bound.
    """
    able = compute < NEVER
    total = np.where(able, compute, compute.min(axis=1, keepdims=True)).sum(axis=0).astype(np.float64)
    price: Floats = np.minimum(1.0, max(total.min(initial=np.inf), 1.0) / np.maximum(total, 1.0))
    if len(price) == 1:
        return price
    rows, count = np.unique(np.where(able, compute, NEVER), axis=0, return_counts=True)
    n, (row, kind) = len(rows), np.nonzero(rows < NEVER)
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


def lists(owner: Whole, item: Whole, count: int) -> tuple[Whole, Whole]:
    """(start [count + 1], items by owner)."""
    by_owner = np.argsort(owner, kind="stable")
    return np.searchsorted(owner[by_owner], np.arange(count + 1)), item[by_owner].astype(np.int64)
