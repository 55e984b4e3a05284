"""Moves: units go from one device to another, and perhaps others come back; a batch at a time, in compiled code."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placewise.graph import Ints
from placewise.problem import Problem

Rows = NDArray[np.int32]

_FOCUSED: Final = 0.5  # share of moves that begin with an op that holds the plan up
_NEAR: Final = 0.5  # share of moves of units that go to the device of a neighbour
_NEAR_GROUPS: Final = 0.75  # the same for groups
_ONE_WAY: Final = 0.75  # share of moves of groups for which nothing comes back
_KICK: Final = 4  # moves of groups in a disturbance


class Moves(Protocol):
    """Proposes changes to a placement."""

    def batch(self, placement: Ints, count: int) -> Rows:
        """Up to `count` changed placements [B, N]."""

    def kicked(self, placement: Ints) -> Ints:
        """A placement some changes away."""

    def focus(self, ops: NDArray[np.bool_]) -> None:
        """Change these ops [N] more often than others."""


def compile_moves(problem: Problem) -> None:
    """Compile the kernels."""
    rng, placement = np.random.default_rng(0), np.zeros(problem.num_ops, np.int32)
    for moves in (UnitMoves(problem, rng), GroupMoves(problem, [], rng)):
        moves.batch(placement, 1)


class _Units:
    """What moves of any kind know of a problem. They keep colocation, pins, allowed devices and (resident) memory."""

    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        graph = problem.graph
        self._problem, self._rng = problem, rng
        self._first = problem.first_of_unit
        ends = problem.unit[graph.edge_producer], problem.unit[graph.consumers]
        self._ends = np.concatenate(ends), np.concatenate(ends[::-1])
        order, near_ptr = _by_owner(self._ends[0], problem.num_units)
        self._resident, self._allowed = np.array(problem.per_unit(graph.resident_bytes)), np.array(problem.unit_allowed)
        self._movable = np.flatnonzero(self._allowed.sum(axis=1) > 1)
        self._focus = self._movable[:0]
        self._given = (  # to the kernels
            self._resident, self._allowed, near_ptr, self._ends[1][order].astype(np.int64),
            *_by_owner(problem.unit, problem.num_units)[::-1],
        )  # fmt: skip

    def focus(self, ops: NDArray[np.bool_]) -> None:
        """Change these ops [N] more often than others."""
        held = np.zeros(self._problem.num_units, np.bool_)
        held[self._problem.unit[ops]] = True
        self._focus = self._movable[held[self._movable]]

    def _seed(self) -> int:
        return int(self._rng.integers(2**31))

    def _used(self, device: Ints) -> NDArray[np.float64]:
        return np.bincount(device, self._resident, self._problem.num_devices).astype(np.float64)


class UnitMoves(_Units):
    """Single units, pairs that change places, and connected pieces of what is on one device."""

    def __init__(self, problem: Problem, rng: np.random.Generator, kick: int = 4) -> None:
        super().__init__(problem, rng)
        self._kick = kick

    def batch(self, placement: Ints, count: int) -> Rows:
        """Up to `count` changed placements [B, N]."""
        used = self._used(placement[self._first])
        return self._propose(placement, count, used, np.array(self._problem.capacity), pieces=False)

    def kicked(self, placement: Ints) -> Ints:
        """A placement some moves of pieces away, whether or not they fit."""
        nothing, room = np.zeros(self._problem.num_devices), np.full(self._problem.num_devices, np.inf)
        for _ in range(min(self._kick, self._problem.num_units)):
            rows = self._propose(placement, 1, nothing, room, pieces=True)
            placement = rows[0] if len(rows) else placement
        return placement

    def _propose(
        self, placement: Ints, count: int, used: NDArray[np.float64], capacity: NDArray[np.float64], *, pieces: bool
    ) -> Rows:
        rows = np.repeat(placement[None].astype(np.int32), count if len(self._movable) else 0, axis=0)
        device = placement[self._first].astype(np.int32)
        made = _unit_moves(self._seed(), pieces, rows, device, self._movable, self._focus, used, capacity, *self._given)
        return rows[:made]


class GroupMoves(_Units):
    """Groups of all levels of coarseness, of units at a boundary between devices; or two that change places."""

    def __init__(self, problem: Problem, labels: Sequence[Ints], rng: np.random.Generator) -> None:
        """`labels` are the groups of each op, those of each coarser level by the groups of the level before."""
        super().__init__(problem, rng)
        # A unit goes with its first op. Groups of all levels are numbered through.
        label: NDArray[np.integer] = self._first
        owner = [np.arange(problem.num_units)]
        for finer in labels:
            label = finer[label]
            owner.append(label + owner[-1].max(initial=-1) + 1)
        self._owner = np.array(owner, np.int64).reshape(len(owner), problem.num_units)
        members, self._group_ptr = _by_owner(self._owner.ravel(), int(self._owner.max(initial=-1)) + 1)
        self._members = members % max(1, problem.num_units)
        self._seen: Ints | None = None

    def batch(self, placement: Ints, count: int) -> Rows:
        """Up to `count` changed placements [B, N]."""
        self._look_at(placement)
        rows = np.repeat(placement[None].astype(np.int32), count if len(self._seeds) else 0, axis=0)
        made = _group_moves(
            self._seed(), rows, self._device, self._seeds, self._focus, self._load, np.array(self._problem.capacity),
            *self._given, self._owner, self._group_ptr, self._members,
        )  # fmt: skip
        return rows[:made]

    def kicked(self, placement: Ints) -> Ints:
        """A placement some moves away."""
        for _ in range(_KICK):
            rows = self.batch(placement, 1)
            placement = rows[0] if len(rows) else placement
        return placement

    def _look_at(self, placement: Ints) -> None:
        """The units at a boundary are the seeds of moves, or all where there is none."""
        if self._seen is not placement:
            self._seen, self._device = placement, placement[self._first].astype(np.int32)
            self._load = self._used(self._device)
            here, there = self._ends
            at_boundary = np.zeros(self._problem.num_units, np.bool_)
            at_boundary[here[self._device[here] != self._device[there]]] = True
            seeds = self._movable[at_boundary[self._movable]]
            self._seeds = seeds if len(seeds) else self._movable


def _by_owner(owner: NDArray[np.integer], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(positions sorted by their owner, where each of `count` owners starts among them)."""
    return np.argsort(owner, kind="stable"), np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=count))])


# ---- the kernels -----------------------------------------------------------------------------------------------------
# Each fills rows, which hold the placement as it is, and returns how many it has changed.


@njit(cache=True, nogil=True)
def _unit_moves(
    seed, pieces, rows, device, movable, focus, used, capacity,
    resident, allowed, near_ptr, near, op_ptr, ops,
):  # fmt: skip
    np.random.seed(seed)
    made = 0
    going, coming = np.empty(32, np.int64), np.empty(1, np.int64)
    taken = np.full(len(device), -1, np.int64)  # the last piece that each unit was part of
    for trial in range(len(rows)):
        kind = 3 if pieces else np.random.randint(4)
        unit = _seed_of(movable, focus)
        source = device[unit]
        gone, back = 1, 0
        going[0] = unit
        if kind == 2:
            other = movable[np.random.randint(len(movable))]
            target = device[other]
            if not (allowed[unit, target] and allowed[other, source]):
                continue
            coming[0] = other
            back = 1
        else:
            target = np.int32(-1)
            if near_ptr[unit] < near_ptr[unit + 1] and np.random.random() < _NEAR:
                target = device[near[np.random.randint(near_ptr[unit], near_ptr[unit + 1])]]
            if target < 0 or not allowed[unit, target]:
                target = _any_device(allowed, unit)
        if target == source:
            continue
        if kind == 3:  # what is connected to the unit on its device, nearest first
            size = 2 ** np.random.randint(1, 6)
            taken[unit] = trial
            at = 0
            while at < gone and gone < size:
                for i in range(near_ptr[going[at]], near_ptr[going[at] + 1]):
                    other = near[i]
                    if gone < size and taken[other] != trial and device[other] == source and allowed[other, target]:
                        taken[other] = trial
                        going[gone] = other
                        gone += 1
                at += 1
        if _fits(going, gone, coming, back, source, target, resident, used, capacity):
            _change(rows[made], going, gone, target, op_ptr, ops)
            _change(rows[made], coming, back, source, op_ptr, ops)
            made += 1
    return made


@njit(cache=True, nogil=True)
def _group_moves(
    seed, rows, device, seeds, focus, used, capacity,
    resident, allowed, near_ptr, near, op_ptr, ops, owner, group_ptr, members,
):  # fmt: skip
    np.random.seed(seed)
    made = 0
    going, coming = np.empty(len(device), np.int64), np.empty(len(device), np.int64)
    for _ in range(len(rows)):
        unit = _seed_of(seeds, focus)
        level = np.random.randint(len(owner))
        source, target = device[unit], np.int32(-1)
        if near_ptr[unit] < near_ptr[unit + 1] and np.random.random() < _NEAR_GROUPS:
            target = device[near[np.random.randint(near_ptr[unit], near_ptr[unit + 1])]]
        if target < 0 or target == source or not allowed[unit, target]:
            target = _any_device(allowed, unit)
        if target == source:
            continue
        gone, back = _part(going, owner[level, unit], source, target, device, allowed, group_ptr, members), 0
        one_way = np.random.random() < _ONE_WAY
        if not (one_way and _fits(going, gone, coming, back, source, target, resident, used, capacity)):
            other = seeds[np.random.randint(len(seeds))]
            if device[other] != target or not allowed[other, source]:
                continue
            back = _part(coming, owner[level, other], target, source, device, allowed, group_ptr, members)
            if not _fits(going, gone, coming, back, source, target, resident, used, capacity):
                continue
        _change(rows[made], going, gone, target, op_ptr, ops)
        _change(rows[made], coming, back, source, op_ptr, ops)
        made += 1
    return made


@njit(cache=True, nogil=True)
def _seed_of(seeds, focus):
    """The unit that a move begins with."""
    if len(focus) > 0 and np.random.random() < _FOCUSED:
        return focus[np.random.randint(len(focus))]
    return seeds[np.random.randint(len(seeds))]


@njit(cache=True, nogil=True)
def _any_device(allowed, unit):
    """One of those that a unit may run on."""
    choices = 0
    for d in range(allowed.shape[1]):
        choices += allowed[unit, d]
    left = np.random.randint(choices)
    for d in range(allowed.shape[1]):
        left -= allowed[unit, d]
        if left < 0:
            return np.int32(d)
    return np.int32(-1)


@njit(cache=True, nogil=True)
def _part(units, group, source, target, device, allowed, group_ptr, members):
    """How many units of a group are on one device and may be on the other; lists them."""
    count = 0
    for i in range(group_ptr[group], group_ptr[group + 1]):
        if device[members[i]] == source and allowed[members[i], target]:
            units[count] = members[i]
            count += 1
    return count


@njit(cache=True, nogil=True)
def _fits(going, gone, coming, back, source, target, resident, used, capacity):
    """Whether the device that gains bytes has room for them; one that loses some may still have too many."""
    gain = 0.0
    for i in range(gone):
        gain += resident[going[i]]
    for i in range(back):
        gain -= resident[coming[i]]
    if gain > 0.0:
        return used[target] + gain <= capacity[target]
    return gain == 0.0 or used[source] - gain <= capacity[source]


@njit(cache=True, nogil=True)
def _change(row, units, count, target, op_ptr, ops):
    for i in range(count):
        for j in range(op_ptr[units[i]], op_ptr[units[i] + 1]):
            row[ops[j]] = target
