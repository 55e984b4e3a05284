"""Runs a planner: time, budget, Ctrl-C, the incumbent, validation, the lower bound, provenance and the `Plan`."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import placewise
from placewise import planners
from placewise.cluster import Device, full_mesh
from placewise.costs import Costs
from placewise.errors import InvalidInput, NoFeasiblePlan, Unsupported
from placewise.graph import GraphBuilder, Ints
from placewise.plans import Plan
from placewise.problem import Problem
from placewise.quantities import format_bytes
from placewise.simulator import evaluate, simulate, violations
from placewise.simulator.bounds import lower_bound
from placewise.simulator.evaluation import announced
from placewise.simulator.incremental import Incremental

DEFAULT_PLANNER = "local-search"
_REPORT_EVERY = 0.2  # seconds


@dataclass(frozen=True)
class Budget:
    """When a planner must stop; None = when it is done."""

    seconds: float | None = None
    evaluations: int | None = None

    def __post_init__(self) -> None:
        for what, limit in (("seconds", self.seconds), ("evaluations", self.evaluations)):
            if limit is not None and not limit > 0:
                raise InvalidInput(f"budget: {what} = {limit}: it must be above zero")


DEFAULT_BUDGET = Budget(seconds=10.0)


@dataclass(frozen=True)
class Progress:
    """How planning stands, a few times a second."""

    seconds: float
    evaluations: int
    value: float  # of the incumbent; infinite while there is none
    lower_bound: float


class _Stop(BaseException):
    """Ends a planner that asks for more than its budget. Not an Exception, so that no planner swallows it."""


class Context:
    """What a planner has besides the problem: random numbers, the simulator, the incumbent, and when to stop."""

    def __init__(
        self, problem: Problem, budget: Budget, seed: int, bound: float, on_progress: Callable[[Progress], None] | None
    ) -> None:
        self.problem = problem
        self.rng = np.random.default_rng(seed)
        self.evaluations = 0
        self.best_value = math.inf
        self.best: tuple[Ints, Ints | None] | None = None
        self.lower_bound = bound
        self.history: list[tuple[float, int, float]] = []
        self.stopped = "finished"
        self._budget = budget
        self._on_progress = on_progress
        self._began = self._reported = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the planner began."""
        return time.perf_counter() - self._began

    @property
    def evaluations_left(self) -> int:
        """How many the budget still allows."""
        limit = self._budget.evaluations
        return sys.maxsize if limit is None else max(0, limit - self.evaluations)

    def evaluate(self, placement: ArrayLike, order: ArrayLike | None = None) -> float:
        """The value of a placement, infinite if it breaks a constraint. The best is remembered."""
        self._check()
        sequence = None if order is None else np.asarray(order, np.int32)
        value = float(evaluate(self.problem, placement, sequence, peaks=False, threads=1).score[0])
        self.spend(1)
        self._offer(value, placement, sequence)
        return value

    def evaluate_batch(self, placements: ArrayLike) -> NDArray[np.float64]:
        """The values of many placements [B, N], on all cores. A batch that exceeds the budget is cut short."""
        self._check()
        rows = np.asarray(placements)[: self.evaluations_left]
        values = evaluate(self.problem, rows, peaks=False).score
        self.spend(len(rows))
        if len(rows):
            self._offer(float(values.min()), rows[values.argmin()], None)
        return values

    def bound(self, value: float) -> None:
        """A proof that no plan is better than this."""
        self.lower_bound = max(self.lower_bound, value)

    def spend(self, evaluations: int) -> None:
        """Count simulations that a planner ran by itself, in compiled code."""
        self.evaluations += evaluations
        now = time.perf_counter()
        if self._on_progress and now - self._reported > _REPORT_EVERY:
            self._reported = now
            self._on_progress(Progress(self.seconds, self.evaluations, self.best_value, self.lower_bound))

    def should_stop(self) -> bool:
        """Whether the budget is spent, the user pressed Ctrl-C, or the incumbent is proved optimal."""
        if self.stopped == "finished" and (
            (self._budget.seconds is not None and self.seconds >= self._budget.seconds) or not self.evaluations_left
        ):
            self.stopped = "budget"
        return self.stopped != "finished" or self.best_value <= self.lower_bound * (1 + 1e-9)

    def interrupt(self) -> None:
        """Ask the planner to stop (Ctrl-C)."""
        self.stopped = "interrupted"

    def _check(self) -> None:
        if self.should_stop() and self.stopped != "finished" and self.evaluations > 0:
            raise _Stop
        if not self.evaluations_left:
            raise _Stop

    def _offer(self, value: float, placement: ArrayLike, order: Ints | None) -> None:
        if value < self.best_value:
            self.best_value = value
            self.best = (np.array(placement, np.int32).reshape(-1), None if order is None else order.copy())
            self.history.append((self.seconds, self.evaluations, value))


def plan(
    problem: Problem,
    planner: str = DEFAULT_PLANNER,
    *,
    budget: Budget = DEFAULT_BUDGET,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Plan a problem with one method, by default for at most ten seconds.

    The same seed gives the same plan if the planner ends by itself or with a budget in evaluations.
    """
    if not isinstance(budget, Budget):
        raise InvalidInput(f"budget = {budget!r}: write it like Budget(seconds=10) or Budget(evaluations=1000)")
    if seed < 0:
        raise InvalidInput(f"seed = {seed}: it must be zero or more")
    info = planners.get(planner)
    why_not = info.why_not(problem)
    if why_not:
        raise Unsupported(f"planner {planner!r} {why_not}")
    unknown = set(options or {}) - set(info.options)
    if unknown:
        raise InvalidInput(f"planner {planner!r} has no option {sorted(unknown)[0]!r}")
    compile_for(problem, info)
    bound = lower_bound(problem).value
    if math.isinf(bound):
        needed = format_bytes(float(problem.graph.resident_bytes.sum()))
        raise NoFeasiblePlan(
            f"the model does not fit: its resident bytes exceed the memory of the devices it may use ({needed} in all)"
        )

    ctx = Context(problem, budget, seed, bound, on_progress)
    with _interruptible(ctx):
        try:
            answer = info.function(problem, ctx, **(options or {}))
        except _Stop:
            answer = None
    seconds = ctx.seconds
    if answer is not None:
        placement, order = answer if isinstance(answer, tuple) else (answer, None)
        sequence = None if order is None else np.asarray(order, np.int32)
        value = float(evaluate(problem, placement, sequence, peaks=False).score[0])
        ctx._offer(value, placement, sequence)
    if ctx.best is None:
        if ctx.stopped == "interrupted":
            raise KeyboardInterrupt
        raise NoFeasiblePlan(_explain_failure(problem, planner, ctx, answer))
    broken = violations(problem, *ctx.best)  # the last word, with every peak measured
    if broken:
        raise NoFeasiblePlan(f"planner {planner!r} found no plan that keeps every constraint: {'; '.join(broken)}")
    settings = {name: default for name, (_, default) in info.options.items()} | dict(options or {})
    return Plan(
        problem=problem, placement=ctx.best[0], order=ctx.best[1], value=ctx.best_value,
        lower_bound=min(ctx.lower_bound, ctx.best_value), planner=planner, version=placewise.__version__, seed=seed,
        options=settings, seconds=seconds, evaluations=ctx.evaluations, stopped=ctx.stopped, history=tuple(ctx.history),
    )  # fmt: skip


_compiled: set[tuple[str, str, str]] = set()


def compile_for(problem: Problem, info: planners.PlannerInfo, announce: Callable[[str], None] | None = None) -> None:
    """Compile, or load from the disk cache, what planner and problem need, before the planner's clock starts."""
    kind = (problem.objective, problem.execution.concurrency, info.name)
    if kind in _compiled:
        return
    build = GraphBuilder("two ops")
    build.op("second", kind="op", inputs=build.op("first", kind="op", outputs=[1.0]))
    cluster = full_mesh([Device("a", memory=8.0), Device("b")], 1.0)
    small = Problem(build.graph(), cluster, Costs.create(np.ones((2, 2))), problem.objective, problem.execution)
    with announced("compiling the simulator (once per installation)", announce):
        simulate(small, [0, 1])
        evaluate(small, [0, 1], peaks=False)
        lower_bound(small)
        if problem.objective != "throughput" and problem.execution.concurrency == "parallel":
            Incremental(small, np.zeros(2, np.int32)).probe(np.ones((1, 2), np.int32), [[0, 1]], 1.0)
        if info.compile:
            info.compile(small)
    _compiled.add(kind)


def _explain_failure(problem: Problem, planner: str, ctx: Context, answer: Any) -> str:
    text = f"planner {planner!r} found no plan that keeps every constraint"
    text += " within its budget" if ctx.stopped == "budget" else ""
    if answer is not None:
        placement, order = answer if isinstance(answer, tuple) else (answer, None)
        text += ": " + "; ".join(violations(problem, placement, order))
    return text


@contextmanager
def _interruptible(ctx: Context) -> Iterator[None]:
    """The first Ctrl-C asks the planner to stop; the second stops it where it is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_interrupt(number: int, frame: Any) -> None:
        ctx.interrupt()
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
