"""The loads of a pipeline as a mixed-integer programme, for HiGHS or CP-SAT (both through MathOpt).

One binary for each item and device. What a set of items costs its device is linear in these and in one variable per
message and device: whether the message crosses the border of the set. Where links differ, channels are shared, or a
sender pays for each of several receivers, a message has one variable per link instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from placewise.driver import Context
from placewise.graph import Floats, Ints
from placewise.planners.loads import Flags, Loads, Whole
from placewise.planners.solvers import Solver, solve
from placewise.simulator.alike import alike

_SCALE: Final = {"highs": 1e3, "cpsat": 1e7}  # what the incumbent is in the solver's units
_MEMORY: Final = {"highs": 1e3, "cpsat": 2.0**30}  # what a device's memory is
#: Relative; above what the solver's tolerances (1e-6 of a unit, on numbers up to 1e3) and rounding can amount to.
TOLERANCE: Final = 1e-6


@dataclass(frozen=True, eq=False)
class Tariff:
    """What a message costs a device at least, wherever its other end is."""

    receive: Floats  # [M, D] if a reader is on the device and the sender is not
    send: Floats  # [M, D] if the sender is on the device and a reader is not
    exact: bool  # whether it costs just that, and no channel can be busier than a device


def tariff(given: Loads) -> Tariff:
    """The least that each message costs each device."""
    problem, times, usable = given.problem, given.times, given.usable
    devices, staged = problem.num_devices, problem.execution.staged
    pays_to_send = (given.sends if staged else given.receives)[:, None] & given.pays[None, :]
    pays_to_receive = given.receives[:, None] & given.pays[None, :]
    links = ~np.eye(devices, dtype=np.bool_) & np.isin(np.arange(devices), usable)
    links &= links.T
    low, high = np.where(links, times, np.inf), np.where(links, times, -np.inf)
    least = [np.where(np.isfinite(low.min(axis=axis)), low.min(axis=axis), 0.0) for axis in (1, 2)]
    spread = [np.maximum(high.max(axis=axis) - low.min(axis=axis), 0.0) for axis in (1, 2)]
    rounding = 1e-12 * times.max(initial=0.0)
    exact = not ((spread[0] > rounding) & pays_to_receive).any() and not ((spread[1] > rounding) & pays_to_send).any()
    exact &= staged or len(usable) <= 2 or bool((np.diff(given.starts) <= 1).all())
    exact &= all(_dominated(given, ends) for ends in _channels(given))
    return Tariff(np.where(pays_to_receive, least[0], 0.0), np.where(pays_to_send, least[1], 0.0), bool(exact))


def _channels(given: Loads) -> list[list[tuple[int, int]]]:
    """The links between usable devices that each channel carries."""
    problem = given.problem
    links: dict[int, list[tuple[int, int]]] = {}
    if problem.execution.contention == "channel":
        usable = given.usable.tolist()
        for (a, b), channels in problem.cluster.channels_of.items():
            for channel in channels if a in usable and b in usable else ():
                links.setdefault(channel, []).append((a, b))
    return [links[channel] for channel in sorted(links)]


def _dominated(given: Loads, links: list[tuple[int, int]]) -> bool:
    """Whether some device pays for all that a channel carries."""
    into, out = {b for _, b in links}, {a for a, _ in links}
    paid = [into] if given.problem.execution.staged else [into, out]
    return any(len(ends) == 1 and bool(given.pays[min(ends)]) for ends in paid)


class SolverFailed(Exception):
    """The solver gave up on a programme with an error of its own, as HiGHS does on one small one of a thousand."""


@dataclass(frozen=True, eq=False)
class Answer:
    """What a solver says."""

    device: Ints | None  # [items] the best that it found; -1 for what is on none of the model's devices
    bound: float  # seconds; no plan within the limits of the model is better
    done: bool  # whether it stopped by itself


class Programme:
    """Items on devices, to minimise the busiest; with `only`, the busiest of some, while the others keep the value.

    All devices; or, to prove a bound, one of each kind, with as many `copies`, which together must take items worth
    `prices.sum()`, and leave the rest.
    """

    def __init__(
        self, given: Loads, costs: Tariff, solver: Solver, value: float, bound: float, *,
        cover: tuple[Whole, Whole, Floats] | None = None, only: Whole | None = None,
    ) -> None:  # fmt: skip
        from ortools.math_opt.python import mathopt

        self._mathopt, self._given, self._costs, self._solver = mathopt, given, costs, solver
        self._unit, self._whole = value / _SCALE[solver], solver == "cpsat"
        self._devices = given.usable if cover is None else cover[0]
        self._model = mathopt.Model()
        self._rows: dict[tuple[str, int, int], list[Any]] = {}
        self._held: dict[int, list[Any]] = {int(d): [] for d in self._devices}
        top = float(np.floor(value / self._unit)) if self._whole else value / self._unit
        self._value, self._top = value, top
        self._busiest = [
            self._model.add_variable(lb=0.0, ub=top, is_integer=self._whole) for _ in range(len(given.seconds))
        ]
        total = mathopt.fast_sum(self._busiest)
        low = bound * (1 - TOLERANCE) / self._unit
        self._model.add_linear_constraint(total >= (float(np.floor(low)) if self._whole else low))
        self._model.add_linear_constraint(total <= top)
        self._model.minimize(total)
        self._place(partial=cover is not None)
        if cover is None and not costs.exact:
            self._messages_by_link()
        else:
            self._messages_by_device()
        self._limits(cover, given.usable if only is None else only)
        if cover is None:
            self._break_symmetry()
            self._count_devices()

    def _amount(self, seconds: float) -> float:
        """Seconds in the solver's units; never more than they are."""
        return float(np.floor(seconds / self._unit)) if self._whole else seconds / self._unit

    def _flag(self, most: float = 1.0) -> Any:
        """Whether a message crosses, or how much of something. For HiGHS, what follows from the items may be real."""
        return self._model.add_variable(lb=0.0, ub=most, is_integer=self._whole)

    def _charge(self, what: str, phase: int, place: int, seconds: float, variable: Any) -> None:
        if seconds > 0.0:
            self._rows.setdefault((what, phase, place), []).append(self._amount(seconds) * variable)

    def _place(self, *, partial: bool) -> None:
        given, model = self._given, self._model
        self._on = [
            {int(d): model.add_binary_variable() for d in self._devices if given.may[u, d]} for u in range(given.items)
        ]
        for u, on in enumerate(self._on):
            chosen = self._mathopt.fast_sum(on.values())
            model.add_linear_constraint(chosen <= 1.0 if partial else chosen == 1.0)
            for d, x in on.items():
                for phase in range(len(given.seconds)):
                    self._charge("compute", phase, d, float(given.seconds[phase, u, d]), x)
                self._held[d].append((float(given.need[u]), x))

    def _readers(self, m: int) -> list[int]:
        found: list[int] = self._given.reader[self._given.starts[m] : self._given.starts[m + 1]].tolist()
        return found

    def _messages_by_device(self) -> None:
        given, costs, model = self._given, self._costs, self._model
        for m, (s, phase) in enumerate(zip(given.sender.tolist(), given.phase.tolist(), strict=True)):
            for d in self._held:
                receive, send, size = float(costs.receive[m, d]), float(costs.send[m, d]), self._copy(m, d)
                if not receive + send + size > 0.0:
                    continue
                # Receiving and sending exclude each other: where both cost the same, one variable does for both.
                shared = receive == send and size == 0.0
                comes = self._flag()
                goes = comes if shared else self._flag()
                here = self._on[s].get(d, 0.0)
                for reader in self._readers(m):
                    there = self._on[reader].get(d, 0.0)
                    if (shared or receive + size > 0.0) and d in self._on[reader]:
                        model.add_linear_constraint(comes - there + here >= 0.0)
                    if send > 0.0 and d in self._on[s]:
                        model.add_linear_constraint(goes - here + there >= 0.0)
                self._charge("transfer", phase, d, receive, comes)
                if not shared:
                    self._charge("transfer", phase, d, send, goes)
                self._held[d].append((size, comes))

    def _messages_by_link(self) -> None:
        given, model, staged = self._given, self._model, self._given.problem.execution.staged
        channels_of: dict[tuple[int, int], list[int]] = {}
        for channel, links in enumerate(_channels(given)):
            for link in links:
                channels_of.setdefault(link, []).append(channel)
        for m, (s, phase) in enumerate(zip(given.sender.tolist(), given.phase.tolist(), strict=True)):
            readers = self._readers(m)
            pays = [a for a in self._on[s] if staged and given.sends[m] and given.pays[a]]
            sent = {a: self._flag(self._top) for a in pays}
            for d in self._held:
                there = [self._on[reader][d] for reader in readers if d in self._on[reader]]
                arrives = {a: self._flag() for a in self._on[s] if a != d and there}
                for a, flag in arrives.items():
                    model.add_linear_constraint(flag - self._on[s][a] <= 0.0)
                    seconds = float(given.times[m, a, d])
                    if a in sent:
                        model.add_linear_constraint(sent[a] - self._amount(seconds) * flag >= 0.0)
                    if given.receives[m]:
                        self._charge("transfer", phase, d, seconds * given.pays[d], flag)
                        self._charge("transfer", phase, a, seconds * (given.pays[a] and not staged), flag)
                        for channel in channels_of.get((a, d), ()):
                            self._charge("channel", phase, channel, seconds, flag)
                        self._held[d].append((self._copy(m, d), flag))
                for x in there:
                    total = self._mathopt.fast_sum(arrives.values())
                    model.add_linear_constraint(total - x + self._on[s].get(d, 0.0) >= 0.0)
            for a, seconds_sent in sent.items():
                self._rows.setdefault(("transfer", phase, a), []).append(seconds_sent)

    def _copy(self, m: int, d: int) -> float:
        """Bytes that a received copy takes, where that matters."""
        return float(self._given.copy[m]) if self._scarce[d] else 0.0

    @cached_property
    def _scarce(self) -> Flags:
        """[D] whether not everything fits on a device."""
        given = self._given
        most = given.need.sum() + given.copy.sum() + given.scratch.max(initial=0.0)
        scarce: Flags = most > given.problem.capacity
        return scarce

    def _limits(self, cover: tuple[Whole, Whole, Floats] | None, only: Whole) -> None:
        given, model, fast_sum = self._given, self._model, self._mathopt.fast_sum
        overlap = given.problem.execution.overlap
        for phase, busiest in enumerate(self._busiest):
            rows: dict[tuple[str, int], list[Any]] = {}
            for (what, p, place), terms in self._rows.items():
                if p == phase:
                    kind = what if overlap or what == "channel" else "device"
                    rows.setdefault((kind, place), []).extend(terms)
            for (kind, place), terms in rows.items():
                counts = kind == "channel" or place in only
                model.add_linear_constraint(fast_sum(terms) <= (busiest if counts else self._top))
        for d, terms in self._held.items():
            if self._scarce[d]:
                room = float(given.problem.capacity[d])
                share = _MEMORY[self._solver] / max(room, 1e-9)
                scratch = self._flag(_MEMORY[self._solver])
                for u in np.flatnonzero(given.scratch > 0).tolist():
                    if d in self._on[u]:
                        own = self._share(float(given.scratch[u]), share)
                        model.add_linear_constraint(scratch - own * self._on[u][d] >= 0.0)
                held = [self._share(size, share) * variable for size, variable in terms if size > 0.0]
                model.add_linear_constraint(fast_sum([*held, scratch]) <= _MEMORY[self._solver] * (1 + 1e-12))
        if cover is not None and cover[2].sum() > 0.0:
            _, copies, prices = cover
            whole = float(prices.sum()) / 1e6
            worth = [
                (float(np.ceil(n * prices[u] / whole)) if self._whole else n * prices[u] / whole) * self._on[u][d]
                for d, n in zip(self._held, copies.tolist(), strict=True)
                for u in range(given.items)
                if d in self._on[u] and prices[u] > 0.0
            ]
            model.add_linear_constraint(fast_sum(worth) >= 1e6 * (1 - 1e-9) - 1.0 * self._whole)

    def _share(self, size: float, share: float) -> float:
        return float(np.floor(size * share)) if self._whole else float(size * share)

    def _break_symmetry(self) -> None:
        """Devices that are alike are numbered by the heaviest item that they have: the k-th uses one of the first k."""
        given, problem = self._given, self._given.problem
        if problem.execution.contention == "channel" and problem.cluster.has_shared_channels:
            return
        weight = np.where(given.may, given.seconds.sum(axis=0), 0.0).max(axis=1)
        order, left = np.argsort(-weight, kind="stable"), self._devices.tolist()
        while left:
            kind = [d for d in left if d == left[0] or _interchangeable(given, left[0], d)]
            left = [d for d in left if d not in kind]
            for k, u in enumerate(order[: len(kind) - 1].tolist()):
                for d in kind[k + 1 :]:
                    if d in self._on[u]:
                        self._on[u][d].upper_bound = 0.0

    def _count_devices(self) -> None:
        most = self._given.problem.max_devices
        if most is None or most >= len(self._devices):
            return
        used = {d: self._model.add_binary_variable() for d in self._held}
        for on in self._on:
            for d, x in on.items():
                self._model.add_linear_constraint(x - used[d] <= 0.0)
        self._model.add_linear_constraint(self._mathopt.fast_sum(used.values()) <= float(most))

    def solve(
        self, ctx: Context, seconds: float, nodes: int, *, heuristics: bool = True, gap: float = TOLERANCE / 10
    ) -> Answer:
        """Solve for so long (see `solvers.solve`)."""
        mathopt = self._mathopt
        asked = mathopt.SolveParameters(relative_gap_tolerance=gap)
        if self._solver == "highs" and not heuristics:
            asked.highs.double_options["mip_heuristic_effort"] = 0.0
        try:
            result = solve(ctx, self._model, self._solver, seconds, nodes, asked)
        except Exception as error:  # MathOpt has no class for it
            raise SolverFailed(f"{self._solver}: {error!r:.200}") from error
        if result is None:
            return Answer(None, 0.0, False)
        reason, limits = result.termination.reason, result.termination.objective_bounds
        if reason == mathopt.TerminationReason.INFEASIBLE:
            return Answer(None, self._value * (1 - TOLERANCE), True)
        proved = limits.dual_bound if np.isfinite(limits.dual_bound) else 0.0
        if self._whole:
            proved = float(np.ceil(proved - 0.5))
        bound = min(proved * self._unit, self._value) * (1 - TOLERANCE)
        if not result.has_primal_feasible_solution():
            return Answer(None, bound, False)
        values = result.variable_values()
        device = np.full(self._given.items, -1, np.int32)
        for u, on in enumerate(self._on):
            chosen = max(on, key=lambda d: values[on[d]], default=-1)
            if chosen >= 0 and values[on[chosen]] > 0.5:
                device[u] = chosen
        return Answer(device, bound, reason == mathopt.TerminationReason.OPTIMAL)


def _interchangeable(given: Loads, a: int, b: int) -> bool:
    """Whether two devices are alike, to items as they are fused too."""
    return np.array_equal(given.may[:, a], given.may[:, b]) and alike(given.problem, a, b)
