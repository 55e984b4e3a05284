"""Runs planners: time, budget, Ctrl-C, the incumbent, validation, the lower bound, provenance and the `Plan`."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

import placewise
from placewise import apart
from placewise.apart import Apart
from placewise.cluster import Device, full_mesh
from placewise.costs import Costs
from placewise.errors import InvalidInput, NoFeasiblePlan, PlacewiseError, Unsupported, check_type
from placewise.graph import GraphBuilder, Ints, to_ints
from placewise.planners import PlannerInfo, available, get
from placewise.plans import Plan, gap_of
from placewise.problem import Problem
from placewise.quantities import format_bytes
from placewise.simulator import evaluate, simulate, violations
from placewise.simulator.bounds import lower_bound
from placewise.simulator.evaluation import cores
from placewise.simulator.incremental import Incremental
from placewise.simulator.working import takes_time, working_set

DEFAULT_PLANNER = "auto"
_COMPILING = "preparing the simulator (the first time, compiling it takes about 15 s)..."
_REPORT_EVERY = 0.2  # seconds
_EARLIER = 0.98  # of what is left: a search elsewhere ends before this one does


@dataclass(frozen=True)
class Budget:
    """When a planner must stop; None = when it is done."""

    seconds: float | None = None
    evaluations: int | None = None

    def __post_init__(self) -> None:
        for what, limit, kind in (("seconds", self.seconds, Real), ("evaluations", self.evaluations, Integral)):
            if limit is not None and (not isinstance(limit, kind) or isinstance(limit, bool)):
                needed = "a number" if kind is Real else "a whole number"
                raise InvalidInput(f"budget: {what} = {limit!r}: it must be {needed}, such as Budget({what}=10)")
            if limit is not None and not limit > 0:
                raise InvalidInput(f"budget: {what} = {limit}: it must be above zero")


DEFAULT_BUDGET = Budget(seconds=10.0)


@dataclass(frozen=True)
class Progress:
    """How planning stands, a few times a second."""

    planner: str
    seconds: float
    evaluations: int
    value: float  # of the incumbent; infinite while there is none
    lower_bound: float
    detail: str = ""  # what else the planner has to say

    @property
    def gap(self) -> float:
        """As that of a plan; 1 while there is none."""
        return gap_of(self.value, self.lower_bound)


class _Stop(BaseException):
    """Ends a planner that asks for more than its budget. Not an Exception, so that no planner swallows it."""


@dataclass
class _Elsewhere:
    """A search in another process."""

    name: str
    process: Apart
    spent: int = 0  # evaluations that count here already


class Context:
    """What a planner has besides the problem: random numbers, the simulator, the incumbent, and when to stop."""

    def __init__(
        self,
        problem: Problem,
        budget: Budget,
        seed: int,
        bound: float,
        on_progress: Callable[[Progress], None] | None,
        planner: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.problem = problem
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.evaluations = 0
        self.best_value = math.inf
        self.best: tuple[Ints, Ints | None] | None = None
        self.below = math.inf  # plans that are no better than this are of no use
        self.rejected: tuple[Ints, Ints | None] | None = None  # the last that broke a constraint
        self.lower_bound = bound
        self.history: list[tuple[float, int, float]] = []
        self.bounds = [(0.0, bound)]  # as it rose
        self.stopped = "finished"
        self.took: float | None = None  # seconds, once the planner is done
        self.planner = planner
        self.detail = ""  # for those who watch
        self.found_by = planner  # who found the best; see `delegate`
        self.proved_by = ""  # who proved the bound, where it is above what holds for any planner
        self._parent: Context | None = None
        self._within: Context | None = None  # where what this one spends counts too
        self._elsewhere: list[_Elsewhere] = []
        self._budget = budget
        self._on_progress = on_progress
        self._clock, self._began, self._reported = clock, clock(), time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the planner began."""
        return self._clock() - self._began

    @property
    def evaluations_left(self) -> int:
        """How many the budget still allows."""
        limit = self._budget.evaluations
        left = sys.maxsize if limit is None else max(0, limit - self.evaluations)
        return min(left, self._within.evaluations_left) if self._within else left

    @property
    def seconds_left(self) -> float:
        """How many the budget still allows; infinite where it sets no limit."""
        limit = self._budget.seconds
        return math.inf if limit is None else max(0.0, limit - self.seconds)

    @property
    def spent(self) -> float:
        """The share of the budget that is used up, from 0 to 1; 0 where there is no limit."""
        limit = self._budget
        of_time = 0.0 if limit.seconds is None else self.seconds / limit.seconds
        of_evaluations = 0.0 if limit.evaluations is None else self.evaluations / limit.evaluations
        return min(1.0, max(of_time, of_evaluations))

    @property
    def ceiling(self) -> float:
        """What a plan must be below to be of use."""
        return min(self.best_value, self.below)

    def evaluate(self, placement: ArrayLike, order: ArrayLike | None = None) -> float:
        """The value of a placement, infinite if it breaks a constraint. The best is remembered."""
        self._check()
        self.spend(1)
        return self._judge(placement, order)

    def evaluate_batch(self, placements: ArrayLike) -> NDArray[np.float64]:
        """The values of many placements [B, N], on all cores. A batch that exceeds the budget is cut short."""
        self._check()
        rows = np.asarray(placements)
        if rows.ndim != 2:
            raise InvalidInput("a batch is an array [placements, ops]; evaluate takes one")
        rows = rows[: self.evaluations_left]
        values = evaluate(self.problem, rows, peaks=False).score
        self.spend(len(rows))
        if len(rows):
            self._remember(float(values.min()), rows[values.argmin()], None)
        return values

    def bound(self, value: float) -> None:
        """A proof that no plan is better than this."""
        by, ctx = self.planner.rpartition(": ")[2], cast("Context | None", self)
        while ctx is not None and ctx.problem is self.problem:
            if value > ctx.lower_bound:
                ctx.lower_bound, ctx.proved_by = value, by
                ctx.bounds.append((ctx.seconds, value))
            ctx = ctx._within

    def spend(self, evaluations: int, by: Context | None = None) -> None:
        """Count simulations that a planner ran by itself, in compiled code."""
        by = by or self
        self.evaluations += evaluations
        if self._within:
            self._within.spend(evaluations, by)
        now = time.perf_counter()
        if self._on_progress and now - self._reported > _REPORT_EVERY:  # how the whole stands, whoever is at work
            self._reported = now
            standing = self.seconds, self.evaluations, self.best_value, self.lower_bound
            self._on_progress(Progress(by.planner, *standing, by.detail))

    def should_stop(self) -> bool:
        """Whether the budget is spent, the user pressed Ctrl-C, or it is proved that no plan is better."""
        return self._is_over() or self.ceiling <= self.lower_bound * (1 + 1e-9)

    def _is_over(self) -> bool:
        self._hear()
        if self._parent and self._parent.stopped == "interrupted":
            self.stopped = "interrupted"
        if self.stopped == "finished" and (
            (self._budget.seconds is not None and self.seconds >= self._budget.seconds)
            or not self.evaluations_left
            or (self._within and self._within._is_over())
        ):
            self.stopped = "budget"
        return self.stopped != "finished"

    def delegate(
        self, name: str, *, share: float = 1.0, afresh: bool = False, options: Mapping[str, Any] | None = None
    ) -> tuple[Ints, Ints | None] | None:
        """Let another planner go on from here, for a share of the budget that is left; returns the best that it has.

        It has the incumbent (unless it is to begin `afresh`, as it does by itself with this seed) and the bound of this
        context, and this context has what it finds and proves. A planner that does not apply is passed over.
        """
        info = get(name)
        if info.why_not(self.problem) is not None or self.should_stop():
            return None
        seconds, evaluations = self._budget.seconds, self._budget.evaluations
        budget = Budget(
            seconds=None if seconds is None else max(share * (seconds - self.seconds), 1e-3),
            evaluations=None if evaluations is None else max(1, int(share * self.evaluations_left)),
        )
        seed, title = self.seed if afresh else int(self.rng.integers(2**31)), f"{self.planner}: {name}"
        member = Context(self.problem, budget, seed, self.lower_bound, None, title, self._clock)
        member._parent = member._within = self
        member.found_by, member.below = name, self.below
        if not afresh:
            member.best, member.best_value = self.best, self.best_value
        known = self.best_value
        try:
            answer = info.function(self.problem, member, **info.settings(options or {}))
            if answer is not None:
                member._judge(*_placement_and_order(answer))
        except _Stop:
            pass
        except PlacewiseError:
            raise
        except Exception as error:  # its own failure, and no reason to lose what the others found
            if self.best is None:
                raise
            warnings.warn(f"planner {name!r} failed: {error!r:.200}", RuntimeWarning, stacklevel=2)
        finally:  # a second Ctrl-C may end the member anywhere
            if member.best_value <= self.best_value < known:
                self.found_by = member.found_by
            if member.stopped != "finished":
                self._is_over()  # it may have been all that was left
        return member.best

    @contextmanager
    def aside(self, problem: Problem, share: float) -> Iterator[Context]:
        """A context for another problem on the way to this one's plan, for a share of the budget that is left.

        Its incumbent is its own. When its share is spent, the block ends and the planner goes on after it.
        """
        seconds, evaluations = self._budget.seconds, self._budget.evaluations
        budget = Budget(
            seconds=None if seconds is None else max(share * (seconds - self.seconds), 1e-3),
            evaluations=None if evaluations is None else max(1, int(share * self.evaluations_left)),
        )
        inner = Context(problem, budget, int(self.rng.integers(2**31)), 0.0, None, self.planner, self._clock)
        inner._parent = inner._within = self
        with suppress(_Stop):
            yield inner

    def beside(self, name: str, clock: Callable[[], float], *, share: float = 1.0, seed: int | None = None) -> Context:
        """A context for a search that takes turns with others, in which it does what it does by itself with this seed.

        Its random numbers, its budget (a share of the whole), its clock and its incumbent are its own. What it spends,
        finds and proves counts here at once.
        """
        seconds, evaluations = self._budget.seconds, self._budget.evaluations
        budget = Budget(
            seconds=None if seconds is None else share * seconds,
            evaluations=None if evaluations is None else max(1, int(share * evaluations)),
        )
        own, title = self.seed if seed is None else seed, f"{self.planner}: {name}"
        member = Context(self.problem, budget, own, self.lower_bound, None, title, clock)
        member._parent = member._within = self
        return member

    @contextmanager
    def elsewhere(self, name: str, search: Callable[[Context], Iterable[float]]) -> Iterator[Apart | None]:
        """Let a search run on another core, if there is one to spare, beside what happens in the block.

        It does there what it does by itself with this seed; what it finds counts here soon after.
        """
        if not self.cores_to_spare:
            yield None
            return
        budget = Budget(seconds=max(_EARLIER * self.seconds_left, 1e-3))

        def work(send: Callable[[Any], None]) -> None:
            member, sent = Context(self.problem, budget, self.seed, self.lower_bound, None, name, self._clock), 0.0
            with suppress(_Stop):
                for _ in search(member):
                    if member.history and member.seconds > sent + _REPORT_EVERY:
                        sent = member.seconds
                        send((member.best, member.best_value, member.evaluations, member.found_by))
            send((member.best, member.best_value, member.evaluations, member.found_by))

        with Apart(work) as process:
            self._elsewhere.append(_Elsewhere(name, process))
            try:
                yield process
            finally:
                self._hear()
                self._elsewhere = [other for other in self._elsewhere if other.process is not process]

    @property
    def cores_to_spare(self) -> int:
        """On how many more a search may run elsewhere.

        A budget in evaluations is spent in one process, as else the same seed would not give the same plan.
        """
        if math.isinf(self.seconds_left) or self.evaluations_left < sys.maxsize or not apart.POSSIBLE:
            return 0
        return max(0, cores() - 1 - len(self._elsewhere))

    def _hear(self) -> None:
        """Take over what searches elsewhere have found."""
        for other in self._elsewhere:
            for news in other.process.received():
                if isinstance(news, Exception):
                    warnings.warn(f"planner {other.name!r} failed: {news}", RuntimeWarning, stacklevel=2)
                    continue
                best, value, spent, found_by = news
                self.spend(spent - other.spent)
                other.spent = spent
                if value < self.best_value:
                    self._remember(value, *best)
                    self.found_by = found_by

    def interrupt(self) -> None:
        """Ask the planner to stop (Ctrl-C)."""
        self.stopped = "interrupted"

    def _check(self) -> None:
        if self.should_stop() and self.stopped != "finished" and self.evaluations > 0:
            raise _Stop
        if not self.evaluations_left:
            raise _Stop

    def _judge(self, placement: ArrayLike, order: ArrayLike | None) -> float:
        row = np.asarray(placement)
        if row.shape != (self.problem.num_ops,):
            raise InvalidInput(
                f"a placement is one device for each of the {self.problem.num_ops} ops, this one is an array of shape "
                f"{row.shape}; evaluate_batch takes many at once"
            )
        sequence = None if order is None else to_ints(order, self.problem.num_ops, "order")
        value = float(evaluate(self.problem, row, sequence, peaks=False, threads=1).score[0])
        self._remember(value, row, sequence)
        return value

    def _remember(self, value: float, placement: ArrayLike, order: Ints | None) -> None:
        if self._within and self._within.problem is self.problem:
            self._within._remember(value, placement, order)
        if value < self.best_value:
            self.best_value = value
            self.best = (np.array(placement, np.int32), order)
            self.history.append((self.seconds, self.evaluations, value))
        elif self.best is None:
            self.rejected = (np.array(placement, np.int32), order)


def plan(
    problem: Problem,
    planner: str = DEFAULT_PLANNER,
    *,
    budget: Budget = DEFAULT_BUDGET,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    below: float = math.inf,
) -> Plan:
    """Plan a problem with one method, by default for at most ten seconds.

    The same seed gives the same plan if the planner ends by itself or with a budget in evaluations. It may end as soon
    as it is proved that no plan is `below` a value; what is found by then need not be.
    """
    _check_request(problem, budget, seed)
    check_type(options or {}, Mapping, "options")
    info = get(planner)
    why_not = info.why_not(problem)
    if why_not:
        raise Unsupported(f"planner {planner!r} {why_not}")
    settings = info.settings(options or {})
    compile_for(problem, info)
    if math.isinf(lower_bound(problem).value):
        raise NoFeasiblePlan(_why_impossible(problem), math.inf)

    ctx = Context(problem, budget, int(seed), lower_bound(problem).value, on_progress, planner)
    ctx.below = below
    with _interruptible(ctx), _blaming(planner):
        try:
            answer = info.function(problem, ctx, **settings)
        except _Stop:
            answer = None
        except KeyboardInterrupt:
            ctx.interrupt()
            answer = None
        ctx.took = ctx.seconds
        if answer is not None:
            ctx._judge(*_placement_and_order(answer))
        broken = violations(problem, *ctx.best) if ctx.best else []  # the last word, with every peak measured
    if ctx.best is None and ctx.stopped == "interrupted":
        raise KeyboardInterrupt
    if ctx.best is None or broken:
        raise NoFeasiblePlan(_why_none_found(ctx, broken), ctx.lower_bound)
    if _is_false(ctx.lower_bound, ctx.best_value):
        raise PlacewiseError(f"planner {planner!r}: {_refuted(ctx.lower_bound, ctx.best_value, 'it')}")
    return Plan(
        problem=problem, placement=ctx.best[0], order=ctx.best[1], value=ctx.best_value,
        lower_bound=min(ctx.lower_bound, ctx.best_value), planner=planner, version=placewise.__version__,
        found_by=ctx.found_by, proved_by=ctx.proved_by, seed=int(seed), options=settings, seconds=ctx.took,
        evaluations=ctx.evaluations, stopped=ctx.stopped, history=tuple(ctx.history),
        bounds=tuple(ctx.bounds),
    )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What a comparison says about one planner: its plan, or the reason why there is none."""

    planner: str
    plan: Plan | None = None
    reason: str = ""


def compare(
    problem: Problem,
    planners: Iterable[str] | None = None,
    *,
    budget: Budget = DEFAULT_BUDGET,
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
) -> list[Outcome]:
    """Run planners, by default all, with the same budget each; the best plan comes first.

    Every plan gets the best lower bound that any of them proved, so that their gaps can be compared. Ctrl-C ends the
    planner that is running and leaves out those after it.
    """
    _check_request(problem, budget, seed)
    if isinstance(planners, str) or not (planners is None or isinstance(planners, Iterable)):
        raise InvalidInput(f"planners = {planners!r}: it must be a list of names, such as ['heft']")
    chosen = {info.name: info for info in map(get, available() if planners is None else planners)}
    outcomes: list[Outcome] = []
    interrupted = False
    for info in chosen.values():
        found, reason = None, info.why_not(problem) or ("interrupted" if interrupted else "")
        if not reason:
            try:
                found = plan(problem, info.name, budget=budget, seed=seed, on_progress=on_progress)
                interrupted = found.stopped == "interrupted"
            except PlacewiseError as error:
                reason = str(error)
            except Exception as error:  # its own failure, and no reason to lose what the others found
                reason = f"failed: {error!r:.200}"
            except KeyboardInterrupt:  # before there was a plan
                reason, interrupted = "interrupted", True
        outcomes.append(Outcome(info.name, found, reason))
    best = min((outcome.plan for outcome in outcomes if outcome.plan), key=lambda plan: plan.value, default=None)
    if best:
        for i, (name, claims) in enumerate([(outcome.planner, outcome.plan) for outcome in outcomes]):
            if claims and _is_false(claims.lower_bound, best.value):
                reason = _refuted(claims.lower_bound, best.value, best.planner)
                outcomes[i] = Outcome(name, reason=f"planner {name!r}: {reason}")
    most = max((outcome.plan for outcome in outcomes if outcome.plan), key=lambda plan: plan.lower_bound, default=None)
    for i, (outcome, mine) in enumerate([(outcome, outcome.plan) for outcome in outcomes]):
        if mine and most:
            shared = replace(mine, lower_bound=min(most.lower_bound, mine.value), proved_by=most.proved_by)
            outcomes[i] = replace(outcome, plan=shared)
    return sorted(outcomes, key=lambda outcome: outcome.plan.value if outcome.plan else math.inf)


def _is_false(bound: float, value: float) -> bool:
    """Whether a plan of this value refutes the bound; what rounding explains does not."""
    return bound > value * (1 + 1e-9)


def _refuted(bound: float, value: float, finder: str) -> str:
    return f"it claims that no plan is below {bound:.9g} s, but {finder} found one of {value:.9g} s, so it is wrong"


def _check_request(problem: Any, budget: Any, seed: Any) -> None:
    check_type(problem, Problem, "problem")
    if not isinstance(budget, Budget):
        raise InvalidInput(f"budget = {budget!r}: write it like Budget(seconds=10) or Budget(evaluations=1000)")
    if not isinstance(seed, Integral) or isinstance(seed, bool) or seed < 0:
        raise InvalidInput(f"seed = {seed!r}: it must be a whole number, zero or more")


def one_device_value(problem: Problem) -> float:
    """The value of the best plan that uses one device alone; infinite where none fits."""
    rows = np.repeat(np.arange(problem.num_devices, dtype=np.int32)[:, None], problem.num_ops, axis=1)
    return float(evaluate(problem, rows).score.min())


@contextmanager
def compiling(announce: Callable[[str], None] | None) -> Iterator[None]:
    """Tell the user what is going on if it takes longer than a moment."""
    timer = threading.Timer(2.0, announce or (lambda _: None), [_COMPILING])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_compiled: set[tuple[str, str, bool, str]] = set()


def compile_for(problem: Problem, info: PlannerInfo, announce: Callable[[str], None] | None = None) -> None:
    """Compile, or load from the disk cache, what planner and problem need, before the planner's clock starts.

    Where the planner does not apply, there is nothing to do: a package that it needs may be missing.
    """
    kind = (problem.objective, problem.execution.concurrency, problem.contiguous, info.name)
    if kind in _compiled or info.why_not(problem) is not None:
        return
    build = GraphBuilder("two ops")
    build.op("second", kind="op", inputs=build.op("first", kind="op", outputs=[1.0]))
    cluster = full_mesh([Device("a", memory=8.0), Device("b")], 1.0)
    small = Problem(
        build.graph(), cluster, Costs.create(np.ones((2, 2))), problem.objective, problem.execution,
        contiguous=problem.contiguous,
    )  # fmt: skip
    with compiling(announce):
        simulate(small, [0, 1])
        evaluate(small, [0, 1], peaks=False)
        lower_bound(small)
        if problem.objective != "throughput" and problem.execution.concurrency == "parallel":
            Incremental(small, np.zeros(2, np.int32)).probe(np.ones((1, 2), np.int32), 1.0)
        if info.compile:
            info.compile(small)
    _compiled.add(kind)


@contextmanager
def _blaming(planner: str) -> Iterator[None]:
    """What is wrong with a planner's answer, or inside it, is said with its name."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"planner {planner!r}: {error}") from None
    except MemoryError as error:
        raise PlacewiseError(f"planner {planner!r}: this machine has too little memory for it: {error}") from None
    except Exception as error:
        error.add_note(f"This happened in planner {planner!r}.")
        raise


def _placement_and_order(answer: Any) -> tuple[Any, Any]:
    if not isinstance(answer, tuple):
        return answer, None
    if len(answer) != 2:
        raise InvalidInput("it must return a placement, (placement, order) or None")
    return answer


def _why_impossible(problem: Problem) -> str:
    """Which memory is too small; times are finite wherever an op may run, so nothing else makes the bound infinite."""
    graph, capacity, devices = problem.graph, problem.capacity, problem.cluster.device_names
    resident, allowed = problem.per_unit(graph.resident_bytes), problem.allowed[problem.first_of_unit]
    room = np.where(allowed, capacity, 0.0).max(axis=1)
    need, when = resident, "keeps {} in memory"
    if (resident <= room).all() and problem.execution.memory == "live":
        working = np.where(takes_time(problem).any(axis=1), working_set(problem), 0.0)
        need, when = resident + problem.per_unit(working, np.maximum), "needs {} in memory while it runs"
    unit = int((need - room).argmax())
    if need[unit] > room[unit]:
        others = int((problem.unit == unit).sum()) - 1
        op = f"op {graph.op_names[problem.first_of_unit[unit]]!r}"
        op += f" with {others} others that must share its device" if others else ""
        return (
            f"the model does not fit: {op} {when.format(format_bytes(float(need[unit])))}, "
            f"and no device that it may use has more than {format_bytes(float(room[unit]))}"
        )
    rooms = ", ".join(f"{devices[d]} {format_bytes(float(capacity[d]))}" for d in np.flatnonzero(allowed.any(axis=0)))
    return (
        f"the model does not fit: it keeps {format_bytes(float(resident.sum()))} in memory, "
        f"more than fits where its ops may run ({rooms})"
    )


def _why_none_found(ctx: Context, broken: list[str]) -> str:
    text = f"planner {ctx.planner!r} found no plan that keeps every constraint"
    text += " within its budget" if ctx.stopped == "budget" else ""
    if not broken and ctx.rejected:
        broken = violations(ctx.problem, *ctx.rejected)
    return f"{text}; in the last one that it tried, {'; '.join(broken)}" if broken else text


@contextmanager
def _interruptible(ctx: Context) -> Iterator[None]:
    """The first Ctrl-C asks the planner to stop; the second stops it where it is. Neither costs the incumbent.

    So does any other signal that means the same, as SIGTERM does on the command line. A caller who handles signals in
    another way keeps doing so.
    """

    def on_interrupt(number: int, frame: Any) -> None:
        again = ctx.stopped == "interrupted"
        ctx.interrupt()
        if again and ctx.took is None:
            raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    ours = [n for n in (signal.SIGINT, signal.SIGTERM) if in_main and signal.getsignal(n) is signal.default_int_handler]
    for number in ours:
        signal.signal(number, on_interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.default_int_handler)
