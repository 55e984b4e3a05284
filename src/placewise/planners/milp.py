"""Throughput without intervals: any item on any device, by mixed-integer programming with a search and a bound."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Final

import numpy as np

from placewise.driver import Context
from placewise.graph import Ints
from placewise.planners import planner
from placewise.planners.cover import Cover
from placewise.planners.linear import TOLERANCE, Programme, SolverFailed, tariff
from placewise.planners.loads import Annealer, Loads, fused, loads
from placewise.planners.solvers import Solver, countable, effort, effort_left
from placewise.problem import Problem
from placewise.simulator.throughput import throughput_loads

_CLOSE: Final = 3 * TOLERANCE  # relative gap that the tolerances of the solvers leave
_FIRST: Final = 0.05  # share of the budget in which a solver may show that the problem is easy
_SLICE: Final = 0.04  # share of the budget of the first slice of each method
_LONGEST: Final = 0.2  # share of the last; slices grow, as what a solver did in one is lost in the next
_PART: Final = 0.03  # share of the budget that two or three devices may take
_FINE: Final = 2e-4  # relative gap at which that is good enough
_SWEEPS: Final = 2500  # steps of an annealing, for each item
_MOST: Final = 4_000_000  # of them in all
_STEPS: Final = 200_000  # of an annealing, between looks at the clock
_LARGEST: Final = 30_000  # items times devices that a programme may have
_NODES: Final = 1_000  # of a solve where the budget has no end; on the whole problem, each has twice as many


def _compile(problem: Problem) -> None:
    import ortools.math_opt.python.mathopt  # noqa: F401

    given = loads(problem)
    Annealer(given).walk(np.zeros(given.items, np.int32), 1.0, 1.0, 1.0, 1, 0)


def _applies(problem: Problem) -> bool | str:
    if problem.execution.replicate:
        return "has no replicas: `ideals` does, in contiguous pipelines"
    return "does not make intervals: `ideals` and `pipeline-dp` do" if problem.contiguous else True


@planner("milp", objectives={"throughput"}, supports=_applies, compile=_compile)
def milp(problem: Problem, ctx: Context, *, solver: Solver = "highs") -> None:
    """The least load of the busiest device by mixed-integer programming (Tarnawski et al. 2020, arXiv:2006.16423).

    Devices may get any units, not only intervals. Unlike there: one binary per unit and device; devices that are alike
    are told apart by their heaviest unit; units that no better plan can separate are fused; plans come from annealing,
    and the solver only has to find better ones or prove that there are none; the bound comes from covers (see
    cover.py), which is where most proofs come from. A proof allows for the tolerances of the solvers, so a plan that is
    called optimal to within 0.0003 % is as good as they can tell. With a budget in evaluations alone the solver is
    CP-SAT, whose effort can be counted.
    """
    if not problem.num_units or problem.num_devices == 1:
        ctx.evaluate(np.zeros(problem.num_ops, np.int32))
        return
    _warm_start(ctx)
    solver = countable(ctx, solver)
    others: list[Solver] = ["highs", "cpsat"]
    for able in dict.fromkeys([solver, *others]):
        if ctx.should_stop():
            return
        with suppress(SolverFailed):  # the other solver takes over
            return _search(problem, ctx, able)


def _search(problem: Problem, ctx: Context, solver: Solver) -> None:
    state = _State(problem, ctx, solver)
    state.anneal_once()  # what it finds is often soon proved
    state.solve(_FIRST, heuristics=True)
    share, by_covers, effort = _SLICE, False, 0.5
    while not state.done():
        before = ctx.best_value
        state.anneal(effort * share)
        state.polish(effort * share)
        effort = 0.5 if ctx.best_value < before else effort / 2  # the rest is for proofs
        by_covers = state.covers_pay or (state.covers_may and not by_covers)
        (state.cover if by_covers else state.solve)(share)
        share = min(1.5 * share, _LONGEST)


def _warm_start(ctx: Context) -> None:
    ctx.delegate("pipeline-dp", share=0.1)
    if ctx.best is None:
        ctx.delegate("local-search", share=0.2)


class _State:
    """The problem as it is fused for the best value so far, and the methods that work on it."""

    def __init__(self, problem: Problem, ctx: Context, solver: Solver) -> None:
        self._problem, self._ctx, self._solver = problem, ctx, solver
        self._budget = effort_left(ctx)
        self._finished = False
        self._nodes = _NODES
        self._solved = 0.0  # what the solver proved by itself
        self._groups: list[tuple[int, ...]] = []  # of devices to deal out anew, the next one last
        self._take(fused(loads(problem), ctx.best_value), None)
        if ctx.best is not None:
            self._regroup()

    def done(self) -> bool:
        """Whether the best is proved, as far as solvers can tell, or the budget is spent."""
        close = self._ctx.best_value <= self._ctx.lower_bound * (1 + _CLOSE)
        return self._finished or close or self._ctx.should_stop() or self._ctx.evaluations_left < 2

    @property
    def _large(self) -> bool:
        """Whether there is too much for a programme."""
        return self._given.items * len(self._given.usable) > _LARGEST

    def _take(self, given: Loads, known: Cover | None) -> None:
        self._given, self._costs, self._annealer = given, tariff(given), Annealer(given)
        self._cover = Cover(given, self._costs, self._solver, self._ctx.rng, known)

    def _try(self, device: Ints) -> None:
        """Evaluate what is found, and go on from it if it is better."""
        before = self._ctx.best_value
        if self._ctx.evaluate(self._given.placement(device)) < before:
            given = fused(self._given, self._ctx.best_value)
            if given is not self._given:
                self._take(given, self._cover)
            self._regroup()

    def _regroup(self) -> None:
        """The busiest device with each other one, the least busy first; then with two others."""
        assert self._ctx.best is not None
        compute, transfer, _, _ = throughput_loads(self._problem, self._ctx.best[0][None])
        load = np.maximum(compute, transfer) if self._problem.execution.overlap else compute + transfer
        devices = self._given.usable[np.argsort(load[0].sum(axis=0)[self._given.usable], kind="stable")].tolist()
        ones, twos = [list(combinations(devices[:-1], size)) for size in (1, 2)]
        self._groups = [(devices[-1], *others) for others in [*reversed(twos), *reversed(ones)]]

    def anneal(self, share: float) -> None:
        """Anneal for a share of the budget, each time from the best plan to a target between it and the bound."""
        ctx, until = self._ctx, effort(self._ctx) + share * self._budget
        while ctx.best is not None and not self.done():
            self.anneal_once()
            if not effort(ctx) < until < math.inf:  # no share of an endless time is a number
                return

    def anneal_once(self) -> None:
        """Anneal from the best plan, if there is one."""
        ctx, rng, given = self._ctx, self._ctx.rng, self._given
        if ctx.best is None:
            return
        device, value = given.devices(ctx.best[0]), ctx.best_value
        target = value - rng.uniform(0.3, 0.9) * (value - ctx.lower_bound)
        hot, fall = value * 10 ** rng.uniform(-2.0, -0.9), 10 ** rng.uniform(-3.0, -2.0)
        steps = min(_SWEEPS * given.items, _MOST, ctx.evaluations_left // 2)
        walks = -(-steps // _STEPS)
        found = None
        for i in range(walks):
            if ctx.should_stop():
                break
            heat = hot * fall ** (i / walks)
            cold, seed = heat * fall ** (1 / walks), int(rng.integers(2**31))
            best, least = self._annealer.walk(device, target, heat, cold, steps // walks, seed)
            ctx.spend(steps // walks)
            if least < value * (1 - 1e-9):
                found, value = best, least
        if found is not None:
            self._try(found)

    def polish(self, share: float) -> None:
        """For a share of the budget, deal out anew what the busiest device and one or two others have."""
        ctx, until, every = self._ctx, effort(self._ctx) + share * self._budget, np.arange(self._problem.num_devices)
        while self._groups and not self._large and not self.done():
            assert ctx.best is not None
            given, device, group = self._given, self._given.devices(ctx.best[0]), np.array(self._groups.pop())
            where = np.where(np.isin(device, group)[:, None], np.isin(every, group), every == device[:, None])
            part, value = replace(given, may=given.may & where), ctx.best_value * (1 - TOLERANCE)
            ctx.spend(1)
            programme = Programme(part, self._costs, self._solver, value, 0.0, only=group)
            answer = programme.solve(ctx, min(_PART * self._budget, effort_left(ctx)), _NODES, gap=_FINE)
            if answer.device is not None:
                self._try(answer.device)
            if effort(ctx) >= until:
                return

    @property
    def covers_may(self) -> bool:
        """Whether covers might prove more than they do."""
        return self._ctx.best is not None and not self._large and not self._cover.exhausted

    @property
    def covers_pay(self) -> bool:
        """Whether they prove more than the solver by itself."""
        return self.covers_may and self._cover.bound >= self._solved

    def cover(self, share: float) -> None:
        """Raise the bound by covers, for a share of the budget."""
        ctx, cover = self._ctx, self._cover
        if ctx.best is not None and not self.done():
            cover.learn(self._given.devices(ctx.best[0]))
            cover.prove(ctx, ctx.best_value * (1 - TOLERANCE), min(share * self._budget, effort_left(ctx)))

    def solve(self, share: float, *, heuristics: bool = False) -> None:
        """Let the solver work on the whole problem for a share of the budget."""
        ctx, given = self._ctx, self._given
        if self.done():
            return
        if self._large:
            self._finished = math.isinf(self._budget)  # without a clock there is no other end
            return
        best = ctx.best_value if ctx.best is not None else _ceiling(given)
        ctx.spend(1)
        programme = Programme(given, self._costs, self._solver, best * (1 - TOLERANCE), ctx.lower_bound)
        answer = programme.solve(
            ctx, min(share * self._budget, effort_left(ctx)), self._nodes, heuristics=heuristics or ctx.best is None
        )
        self._nodes *= 2
        if answer.done and answer.device is None and ctx.best is None:
            self._finished = True  # there is no plan
            return
        self._solved = max(self._solved, answer.bound)
        ctx.bound(answer.bound)
        if answer.device is not None:
            self._try(answer.device)
        self._finished = answer.done


def _ceiling(given: Loads) -> float:
    """More than any plan takes."""
    readers = np.diff(given.starts) + 1
    return 1e-6 + 2.0 * float(given.seconds.max(axis=2).sum() + (given.times.max(axis=(1, 2)) * readers).sum())
