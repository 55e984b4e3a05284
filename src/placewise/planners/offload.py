"""Layers by the dozen: so many are resident, so many computed where their weights are, so many streamed."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph

from placewise.driver import Context
from placewise.graph import Ints
from placewise.planners import planner
from placewise.problem import Problem

_WARM, _COLD = 0.02, 2e-4  # shares of its value by which a plan may be worse than the one before, at first and at last
_SHIFTS: Final = 0.2  # of all changes
_ALL: Final = 0.3  # of all changes, of layers of every kind
_NEVER: Final = 1e9  # seconds where something may not run
_AT_ONCE: Final = 3  # changes, at most, that are tried together: for one more to be streamed, others must make room


def _streams(problem: Problem) -> bool | str:
    return bool(len(_reads(problem)[0]) and problem.num_devices > 1) or "wants weights that are placed by themselves"


@planner("offload", objectives={"latency"}, supports=_streams)
def offload(problem: Problem, ctx: Context, *, steps: int = 6_000) -> None:
    """How many layers of each kind are resident, computed at home or streamed, by annealing over counts.

    A layer is what reads the same weights, and those weights. Layers that are alike change places for little, so what
    is searched is small however many there are. A change moves a few layers from one mode (where they compute, where
    their weights are) to another, or changes their order: modes take turns, so that copies have time, or each has one
    run, so that little crosses. What reads no weights goes with the layer before it.
    """
    layers = _Layers(problem)
    rows = [layers.shared_out(share) for share in (*np.eye(problem.num_devices), _by_room(problem))]
    value, current = min(((ctx.evaluate(layers.placement(row)), row) for row in rows), key=lambda found: found[0])
    for step in range(steps):
        if ctx.should_stop():
            break
        warmth = _WARM * (_COLD / _WARM) ** max(step / steps, ctx.spent)
        changed = layers.changed(current, ctx.rng)
        tried = ctx.evaluate(layers.placement(changed))
        if tried <= value * (1.0 + warmth * ctx.rng.standard_exponential()):
            value, current = tried, changed


def _reads(problem: Problem) -> tuple[Ints, Ints]:
    """(unit that reads, unit where it is at home) for stored tensors that are placed by themselves."""
    graph, unit = problem.graph, problem.unit
    edges = np.flatnonzero(graph.is_stored[graph.edge_producer])
    reader, owner = unit[graph.consumers[edges]], unit[graph.edge_producer[edges]]
    return reader[reader != owner], owner[reader != owner]


class _Counts(NamedTuple):
    """Of the layers of a kind, how many are in each mode, where in the row each mode begins, and whether in one run."""

    many: NDArray[np.int64]
    begins: NDArray[np.float64]  # 0 to 1
    runs: bool


_Row = list[_Counts]


def _by_room(problem: Problem) -> NDArray[np.float64]:
    """[D] the share of all memory that each device has."""
    room = np.minimum(problem.capacity, problem.graph.resident_bytes.sum())
    share: NDArray[np.float64] = room / max(float(room.sum()), 1e-300)
    return share


class _Layers:
    """Layers, those that are alike in one kind, and the modes (computes at, has its weights at) that they may be in."""

    def __init__(self, problem: Problem) -> None:
        graph, units = problem.graph, problem.num_units
        self._problem = problem
        reader, owner = _reads(problem)
        joined = sparse.coo_array((np.ones(len(reader)), (reader, owner)), (units, units))
        layer = csgraph.connected_components(joined, directed=False)[1]
        self._computes, self._keeps = np.isin(np.arange(units), reader), np.isin(np.arange(units), owner)
        position = np.empty(graph.num_ops, np.int64)
        position[graph.topological_order] = np.arange(graph.num_ops)
        start = np.full(layer.max() + 1, graph.num_ops)
        np.minimum.at(start, layer[self._computes], problem.per_unit(position, np.minimum)[self._computes])
        looks = [np.bincount(layer, self._keeps * problem.per_unit(graph.resident_bytes))]
        for where in (self._computes, self._keeps):
            looks += [
                np.bincount(layer, np.where(where, np.minimum(time, _NEVER), 0.0)) for time in problem.unit_seconds.T
            ]
        kind = np.unique(np.stack(looks, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
        may = np.ones((2, len(start), problem.num_devices), np.bool_)
        for which, where in enumerate((self._computes, self._keeps)):
            np.logical_and.at(may[which], layer[where], problem.unit_allowed[where])
        real = np.flatnonzero((np.bincount(layer, self._keeps) > 0) & may.any(axis=2).all(axis=0))  # pins may tear one
        real = real[np.argsort(start[real], kind="stable")]
        self._kinds = [real[kind[real] == k] for k in np.unique(kind[real])]
        self._modes: list[NDArray[Any]] = [np.argwhere(may[0, k[0]][:, None] & may[1, k[0]]) for k in self._kinds]
        self._layer, self._follows = layer, self._leaders(position)

    def _leaders(self, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """[units] the unit that each goes with: of those that compute layers, the one before it, else the first."""
        graph, unit = self._problem.graph, self._problem.unit
        leader = np.where(self._computes, np.arange(len(self._computes)), -1)
        for edge in np.lexsort((position[graph.edge_producer], position[graph.consumers])).tolist():
            before, after = unit[graph.edge_producer[edge]], unit[graph.consumers[edge]]
            if not self._computes[after] and leader[before] >= 0:
                leader[after] = leader[before]
        first = int(np.flatnonzero(self._computes)[position[self._problem.first_of_unit[self._computes]].argmin()])
        return np.where(leader < 0, first, leader)

    def shared_out(self, share: NDArray[np.float64]) -> _Row:
        """Each device computes and keeps this share of the layers of each kind."""
        row = []
        for layers, modes in zip(self._kinds, self._modes, strict=True):
            wanted = np.where(modes[:, 0] == modes[:, 1], share[modes[:, 0]], 0.0)
            exact = np.cumsum(wanted / (wanted.sum() or 1.0)) * len(layers)
            count = np.diff(np.rint(exact).astype(np.int64), prepend=0)
            count[0] += len(layers) - count.sum()
            row.append(_Counts(count, np.full(len(modes), 0.5), False))
        return row

    def changed(self, row: _Row, rng: np.random.Generator) -> _Row:
        """A few layers, of a kind or of all, in other modes or in another order."""
        row = [_Counts(kind.many.copy(), kind.begins.copy(), kind.runs) for kind in row]
        free = [k for k, modes in enumerate(self._modes) if len(modes) > 1]
        for _ in range(int(rng.integers(1, _AT_ONCE + 1)) if free else 0):
            chosen = free if rng.random() < _ALL else [free[int(rng.integers(len(free)))]]
            modes = len(self._modes[chosen[0]])
            source, target, size = int(rng.integers(modes)), int(rng.integers(modes)), rng.random()
            where, shifts, turns = rng.random(), rng.random() < _SHIFTS, rng.random() < _SHIFTS
            for k in chosen:
                count, begins, runs = row[k]
                if source < len(count) and target < len(count) and not shifts:
                    many = math.ceil(count[source] ** size)  # a few more often than many
                    count[source] -= many
                    count[target] += many
                if source < len(count) and shifts:
                    begins[source] = where
                    row[k] = _Counts(count, begins, runs != turns)
        return row

    def placement(self, row: _Row) -> Ints:
        """Layers of a kind take their modes in turn, each as evenly as it goes, or one mode after the other."""
        mode = np.zeros((len(self._layer), 2), np.int32)
        for layers, modes, (count, begins, runs) in zip(self._kinds, self._modes, row, strict=True):
            which = np.repeat(np.arange(len(count)), count)
            rank = np.concatenate([np.arange(many) for many in count])
            even = (rank + begins[which]) / np.maximum(count[which], 1)
            turn = np.argsort(begins[which] if runs else even, kind="stable")
            mode[layers] = modes[which[turn]]
        device = mode[self._layer, np.where(self._computes, 0, 1)]
        device = np.where(self._computes | self._keeps, device, device[self._follows])
        allowed = self._problem.unit_allowed
        device = np.where(allowed[np.arange(len(device)), device], device, allowed.argmax(axis=1))
        found: Ints = device.astype(np.int32)[self._problem.unit]
        return found
