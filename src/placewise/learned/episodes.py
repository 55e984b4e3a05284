"""Placing one group after another: many episodes over one problem at once, on arrays.

An episode begins with a whole placement. Each step moves one group, or leaves it, and the whole placement is simulated
again. Every state on the way is a placement, so the best of all of them counts, not the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from placewise.graph import Floats
from placewise.learned.grouping import Groups

#: The cost of a placement that breaks a constraint: as if it took this many times as long as all groups one by one.
FAILING: Final = 100.0
_LEAST: Final = 1e-6  # the logarithm of a cost stays finite too

Devices = NDArray[np.int64]
Score = Callable[[NDArray[np.int32]], Floats]  # placements of ops [B, N] to values [B], infinite where not allowed
Order = Literal["program", "random", "heaviest"]
Start = Literal["packed", "random"]
Reward = Literal["improvement", "final"]


class Episodes:
    """`count` episodes. A cost is the value of a placement over the time of all groups one by one; it is finite."""

    def __init__(
        self,
        groups: Groups,
        count: int,
        score: Score,
        rng: np.random.Generator,
        *,
        start: Start = "packed",
        order: Order = "program",
        reward: Reward = "improvement",
        passes: int = 1,
        log: bool = False,
    ) -> None:
        self.groups, self.count, self.start, self.order, self.reward, self.log = (
            groups, count, start, order, reward, log
        )  # fmt: skip
        self.length = passes * groups.count
        self.scale = max(float(groups.seconds.min(axis=1).sum()), 1e-300)
        self._score, self.rng, self._rows = score, rng, np.arange(count)
        self.best_value = np.full(count, np.inf)  # over all states since the object was made
        self.best = np.zeros((count, groups.count), np.int64)
        self.reset()

    def reset(self, placement: NDArray[np.integer] | None = None) -> None:
        """Begin anew, from this placement [G] or [B, G] if one is given."""
        groups, shape = self.groups, (self.count, self.groups.count)
        if placement is None:
            placement = packed(groups) if self.start == "packed" else drawn(groups, self.rng, self.count)
        self.placement = np.broadcast_to(placement, shape).astype(np.int64)
        self.visits = np.zeros(shape, np.int64)
        self.time = 0
        if self.order == "random":
            self._order = self.rng.permuted(np.tile(np.arange(groups.count), (self.count, 1)), axis=1)
        else:
            first = np.arange(groups.count)
            if self.order == "heaviest":
                first = np.argsort(-groups.seconds.min(axis=1), kind="stable")
            self._order = np.broadcast_to(first, shape)
        self.value = np.empty(self.count)
        same = (self.placement == self.placement[:1]).all()
        self._measure(self._rows[:1] if same else self._rows)
        self.value[:] = self.value[0] if same else self.value
        self._look()

    def step(self, actions: NDArray[np.integer]) -> Floats:
        """Put the current group of each episode onto a device; returns rewards [B], positive where it is faster.

        What the mask forbids is not done: the group stays where it is.
        """
        rows, before = self._rows, self.cost
        now = self.placement[rows, self.node]
        chosen = np.where(self.mask[rows, actions], actions, now)
        self.placement[rows, self.node] = chosen
        self.visits[rows, self.node] += 1
        self.time += 1
        self._measure(np.flatnonzero(chosen != now))  # what has not changed takes as long as before
        self._look()
        if self.reward == "improvement":
            return before - self.cost
        return -self.cost if self.done else np.zeros(self.count)

    @property
    def done(self) -> bool:
        """Whether every group has had its turns. All episodes end together."""
        return self.time >= self.length

    def _measure(self, rows: NDArray[np.int64]) -> None:
        if not len(rows):
            return
        values = self._score(self.groups.expand(self.placement[rows]))
        self.value[rows] = np.inf  # a budget may cut a batch short
        self.value[rows[: len(values)]] = values
        better = rows[self.value[rows] < self.best_value[rows]]
        self.best_value[better], self.best[better] = self.value[better], self.placement[better]

    def _look(self) -> None:
        """What follows from the placement: the cost, the group whose turn it is, and where it may go."""
        groups, rows = self.groups, self._rows
        devices = groups.problem.num_devices
        flat = (rows[:, None] * devices + self.placement).ravel()
        held = np.bincount(flat, np.tile(groups.resident, self.count), self.count * devices)
        self.held = held.reshape(self.count, devices)  # [B, D] resident bytes
        over = np.maximum(self.held - groups.problem.capacity, 0.0).sum(axis=1) / max(groups.resident.sum(), 1e-300)
        fits = np.isfinite(self.value)
        cost = np.minimum(np.where(fits, self.value, 0.0) / self.scale, FAILING)
        cost = np.where(fits, cost, FAILING * (1.0 + over))  # the less it overflows, the better
        self.cost = np.log(np.maximum(cost, _LEAST)) if self.log else cost
        self.node = self._order[:, min(self.time, self.length - 1) % groups.count]
        here, size = self.placement[rows, self.node], groups.resident[self.node]
        room = groups.problem.capacity - self.held
        room[rows, here] += size
        allowed = groups.allowed[self.node]
        both = allowed & (size[:, None] <= room)
        self.mask: NDArray[np.bool_] = np.where(both.any(axis=1, keepdims=True), both, allowed)


def packed(groups: Groups) -> Devices:
    """[G] the fastest device until it is full, then the next."""
    seconds = np.where(groups.allowed, groups.seconds, 0.0)
    usable = groups.allowed.mean(axis=0)
    fastest = np.lexsort((seconds.sum(axis=0), -usable))  # first those that may run the most
    room, placement = groups.problem.capacity.copy(), np.zeros(groups.count, np.int64)
    for group in range(groups.count):
        may = [d for d in fastest.tolist() if groups.allowed[group, d]] or [0]
        device = next((d for d in may if groups.resident[group] <= room[d]), max(may, key=lambda d: room[d]))
        placement[group] = device
        room[device] -= groups.resident[group]
    return placement


def drawn(groups: Groups, rng: np.random.Generator, count: int) -> Devices:
    """[count, G] devices by chance, of those that a group may use."""
    draw = rng.random((count, groups.count, groups.problem.num_devices)) * groups.allowed
    found: Devices = draw.argmax(axis=2)
    return found
