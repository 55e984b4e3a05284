"""Any plan that fits: for memory so tight that methods which look at time find none."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placewise.driver import Context
from placewise.errors import NoFeasiblePlan
from placewise.graph import Floats, Ints
from placewise.planners import planner
from placewise.planners.blocks import Blocks, fastest_first, headroom
from placewise.planners.local_search import BATCH
from placewise.planners.moves import UnitMoves, compile_moves
from placewise.planners.repair import bytes_at_peak, settled
from placewise.planners.single import all_on
from placewise.problem import Problem
from placewise.simulator import evaluate
from placewise.simulator.throughput import held_bytes
from placewise.simulator.working import takes_time

_LARGE: Final = 40_000  # ops and edges, times devices, beyond which nothing is modelled
_EFFORT: Final = 0.1  # of the solver: about some seconds, but the same on every machine
_LISTED: Final = 200_000  # ops in solutions of the model to simulate
_SHUFFLES: Final = 20  # orders of the devices
_REFILLS: Final = 4  # of blocks
_PATIENCE: Final = 10  # moves per unit that may fail in a row before a descent ends
_FAILURES: Final = 4000  # moves at most that may
_KICK, _KICKS = 4, 20  # random moves between two descents, and how often to make them in vain
_PROMISING: Final = 64  # placements, those that overflow least, to try again in other orders

Rows = NDArray[np.int32]


def _compile(problem: Problem) -> None:
    Blocks(problem).fill([0, 1], 1.0)
    compile_moves(problem)
    saving_order(problem)


@planner("fit", compile=_compile)
def fit(problem: Problem, ctx: Context, *, orders: int = 200) -> tuple[Ints, Ints | None] | None:
    """Any plan that fits in memory, by repair, constraint programming and descent; proves it where there is none.

    First blocks of the program and single devices, repaired; then moves from what overflows least, after which less
    does. Then CP-SAT (OR-tools) lists placements that keep what every plan that fits must keep: on each device there is
    room for what is resident together with any one op's tensors and scratch space, and together with the results. Where
    it lists none, there is no plan. What it lists is simulated. Then an order that frees memory early is tried, and
    `orders` more or less like it; at last more moves, with random ones in between. It ends with the first plan that
    fits, and does nothing where there is one already.
    """
    search = _Search(problem, ctx)
    search.fill_blocks()
    for start in (all_on(problem, d) for d in range(problem.num_devices)):
        if not search.done:
            search.judge(settled(problem, ctx, start[problem.first_of_unit])[None, problem.unit])
    search.descend(None)
    if (problem.num_ops + problem.graph.num_edges) * problem.num_devices <= _LARGE and not search.done:
        search.judge_solutions()
        search.descend(None)
    if problem.objective != "throughput" and problem.execution.memory == "live":  # else no order changes what is held
        search.try_orders(orders)
    search.descend(None, kicks=_KICKS)
    return search.found


class _Search:
    """The plan that fits, once it is found, and the placements that overflow least until then."""

    def __init__(self, problem: Problem, ctx: Context) -> None:
        self._problem, self._ctx = problem, ctx
        # Nothing that the search tries breaks a rule of one device; the others are looked at as if memory were endless.
        ruled = problem.contiguous or problem.max_devices is not None or problem.execution.concurrency == "slots"
        endless = dict.fromkeys(problem.cluster.device_names, np.inf)
        self._roomy = replace(problem, cluster=problem.cluster.with_memory(endless)) if ruled else None
        self._promising: dict[bytes, float] = {}  # placements, and how many bytes overflow
        self.found: tuple[Ints, Ints | None] | None = None

    @property
    def done(self) -> bool:
        """Whether there is a plan, or no budget."""
        return self.found is not None or self._ctx.best is not None or self._ctx.should_stop()

    def fill_blocks(self) -> None:
        """Blocks of the program, in many orders of the devices, again with the room that they turned out to need."""
        problem, need = self._problem, bytes_at_peak(self._problem)
        fastest, largest = fastest_first(problem), np.argsort(-problem.capacity, kind="stable").tolist()
        orders = [fastest, fastest[::-1], largest, largest[::-1]]
        orders += [self._ctx.rng.permutation(problem.num_devices).tolist() for _ in range(_SHUFFLES)]
        for devices in dict.fromkeys(map(tuple, orders)):
            beyond = headroom(problem) / 2
            for _ in range(_REFILLS):
                if self.done:
                    return
                row = Blocks(problem, need, problem.capacity - beyond).fill(devices, np.inf)[0]
                self.judge(row[None])
                beyond = np.maximum(beyond, self.peak - np.bincount(row[problem.first_of_unit], need, len(beyond)))

    def judge(self, rows: Rows, order: Ints | None = None) -> Floats:
        """[B] how many bytes overflow; infinite where another rule is broken."""
        problem = self._problem
        rows = rows[: max(1, self._ctx.evaluations_left)]
        self._ctx.spend(len(rows))
        peak = evaluate(problem, rows, order).peak
        assert peak is not None
        self.peak, self.full = peak[0], peak > problem.capacity
        over: Floats = np.maximum(peak - problem.capacity, 0.0).sum(axis=1)
        if self._roomy is not None:
            over[~evaluate(self._roomy, rows, peaks=False).feasible] = np.inf
        if not over.all() and self.found is None:
            self.found = rows[over.argmin()].copy(), order
        for row, much in zip(rows, over.tolist(), strict=True):
            key = row.tobytes()
            self._promising[key] = min(much, self._promising.get(key, np.inf))
        least = sorted(self._promising.items(), key=lambda entry: entry[1])[:_PROMISING]
        self._promising = dict(least)
        return over

    def judge_solutions(self) -> None:
        """What the necessary conditions leave, in the default order."""
        left, unit = _LISTED // max(self._problem.num_ops, 1), self._problem.unit

        def visit(solutions: list[list[int]]) -> bool:
            nonlocal left
            left -= len(solutions)
            self.judge(np.array(solutions, np.int32)[:, unit])
            return left > 0 and not self.done

        if not _list_solutions(self._problem, int(self._ctx.rng.integers(2**31)), visit):
            raise NoFeasiblePlan(_PROVED)

    def descend(self, order: Ints | None, kicks: int = 0) -> None:
        """Moves after which less overflows, or as much, from where the least does; again from random places near it."""
        if self.done or not (self._problem.allowed.sum(axis=1) > 1).any():
            return
        moves, rows = _Aimed(self._problem, self._ctx.rng), self._best()
        over = self.judge(rows, order)
        home, least = rows[over.argmin()], float(over.min())
        home, least = self._walk(moves, home, least, order)
        fruitless = 0
        while fruitless < kicks and not self.done:
            start = home
            for _ in range(_KICK):
                candidates = moves.batch(start, 1)
                start = candidates[0] if len(candidates) else start
            found, much = self._walk(moves, start, float(self.judge(start[None], order)[0]), order)
            fruitless = 0 if much < least else fruitless + 1
            home, least = (found, much) if much <= least else (home, least)

    def _walk(self, moves: _Aimed, current: Ints, least: float, order: Ints | None) -> tuple[Ints, float]:
        failed, patience = 0, min(_PATIENCE * self._problem.num_units, _FAILURES)
        full = np.ones(self._problem.num_devices, np.bool_)
        while failed < patience and not self.done:
            moves.aim(current, full | (failed // BATCH % 2 == 1))
            failed += BATCH
            candidates = moves.batch(current, BATCH)
            if len(candidates):
                over = self.judge(candidates, order)
                best = int(over.argmin())
                failed = 0 if over[best] < least else failed
                if over[best] <= least:
                    current, least, full = candidates[best], float(over[best]), self.full[best]
        return current, least

    def try_orders(self, count: int) -> None:
        """An order that saves memory, with moves; then some with chance in them, from nearly that one to nearly any."""
        problem, rng = self._problem, self._ctx.rng
        most = problem.graph.tensor_bytes.max(initial=1.0)
        if not self.done:
            self.descend(saving_order(problem))
        for chance in np.geomspace(0.01, 100.0, count):
            if self.done:
                return
            self.judge(self._best(), saving_order(problem, most * chance * rng.random(problem.num_ops)))

    def _best(self) -> Rows:
        """[B, N] the placements that overflow least."""
        return np.array([np.frombuffer(key, np.int32) for key in self._promising])


class _Aimed(UnitMoves):
    """Moves of what is on some of the devices."""

    def aim(self, placement: Ints, at: NDArray[np.bool_]) -> None:
        """Choose among units on these devices from now on."""
        may = np.flatnonzero(self._allowed.sum(axis=1) > 1)
        units = may[at[placement[self._first[may]]]]
        self._movable = units if len(units) else may


# ---- what every plan that fits must keep -----------------------------------------------------------------------------

_PROVED: Final = (
    "the model does not fit: no placement leaves room on each device for what stays there together with what any one "
    "op there needs (proved by constraint programming)"
)


def _list_solutions(problem: Problem, seed: int, visit: Callable[[list[list[int]]], bool]) -> bool:
    """Hand over placements [B, units] that keep the necessary conditions, for as long as `visit` wants more.

    False: it is proved that there is none. True: there is one, or the effort was not enough to tell.
    """
    from ortools.sat.python import cp_model

    conditions = Necessary(problem)

    class Listing(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.waiting: list[list[int]] = []
            self.size = 1

        def on_solution_callback(self) -> None:
            self.waiting.append([
                next(d for d, x in enumerate(choices) if x is not None and self.boolean_value(x))
                for choices in conditions.on
            ])  # fmt: skip
            if len(self.waiting) >= self.size:
                self.size = min(2 * self.size, 256)
                self.hand_over()

        def hand_over(self) -> None:
            solutions, self.waiting = self.waiting, []
            if solutions and not visit(solutions):
                self.stop_search()

    solver, listing = cp_model.CpSolver(), Listing()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.enumerate_all_solutions = True
    # With presolve, OR-tools 9.15 calls models impossible that are not (its issue 5274): no basis for a proof.
    solver.parameters.cp_model_presolve = False
    solver.parameters.max_deterministic_time = _EFFORT
    status = solver.solve(conditions.model, listing)
    listing.hand_over()
    return bool(status != cp_model.INFEASIBLE)


class Necessary:
    """What every plan that fits must keep, as a model for CP-SAT.

    Bytes become whole numbers, rounded so that nothing that fits is excluded.
    """

    def __init__(self, problem: Problem) -> None:
        from ortools.sat.python import cp_model

        self.model = model = cp_model.CpModel()
        self._problem = problem
        allowed = problem.allowed[problem.first_of_unit]
        #: [units][D] whether a unit is on a device; None where it may not be.
        self.on: list[list[Any]] = [[model.new_bool_var("") if may else None for may in row] for row in allowed]
        for choices in self.on:
            model.add_exactly_one(x for x in choices if x is not None)
        self._scale, room = _whole(problem)
        live = problem.execution.memory == "live"
        for d in np.flatnonzero(np.isfinite(problem.capacity)).tolist():
            held = self._bytes(problem.per_unit(problem.graph.resident_bytes), d)
            if problem.objective == "throughput":
                held = held + self._pipelined(d)
            total = model.new_int_var(0, room[d], "")
            model.add(total == held)
            if live and problem.objective == "throughput":
                for unit, most in enumerate(self._scaled(problem.per_unit(problem.graph.scratch, np.maximum))):
                    if most and self.on[unit][d] is not None:
                        model.add(total + most * self.on[unit][d] <= room[d])
            elif live:
                self._while_running(d, total, room[d])
        if problem.contiguous:
            self._intervals()
        if problem.max_devices is not None:
            used = [model.new_bool_var("") for _ in range(problem.num_devices)]
            for choices in self.on:
                for x, flag in zip(choices, used, strict=True):
                    if x is not None:
                        model.add_implication(x, flag)
            model.add(sum(used) <= problem.max_devices)

    def _scaled(self, sizes: Floats) -> list[int]:
        whole: list[int] = np.floor(sizes * self._scale).astype(np.int64).tolist()
        return whole

    def _bytes(self, per_unit: Floats, d: int) -> Any:
        from ortools.sat.python import cp_model

        pairs = [(x[d], n) for x, n in zip(self.on, self._scaled(per_unit), strict=True) if n and x[d] is not None]
        return cp_model.LinearExpr.weighted_sum([x for x, _ in pairs], [n for _, n in pairs])

    def _op(self, op: int, d: int) -> Any:
        x = self.on[self._problem.unit[op]][d]
        return 0 if x is None else x

    def _while_running(self, d: int, resident: Any, room: int) -> None:
        """Beside what is resident: what an op reads, makes and needs besides; and in the end, the results."""
        problem, graph = self._problem, self._problem.graph
        size = self._scaled(graph.tensor_bytes)
        own = np.array(self._scaled(graph.scratch))
        made = ~graph.is_stored[graph.tensor_producer]
        np.add.at(own, graph.tensor_producer[made], np.array(size, np.int64)[made])
        read = made[graph.edge_tensor]
        np.add.at(own, graph.consumers[read], np.array(size, np.int64)[graph.edge_tensor[read]])
        fetched: dict[int, list[int]] = {}
        for e in np.flatnonzero(~read).tolist():
            fetched.setdefault(int(graph.consumers[e]), []).append(int(graph.edge_tensor[e]))
        runs = takes_time(problem)[:, d]
        for op in np.flatnonzero(runs & ((own > 0) | np.isin(np.arange(problem.num_ops), list(fetched)))).tolist():
            here = self._op(op, d)
            copies = [size[t] * (here - self._op(int(graph.tensor_producer[t]), d)) for t in fetched.get(op, ())]
            self.model.add(resident + int(own[op]) * here + sum(copies) <= room)
        results = np.zeros(problem.num_ops)
        kept = made & (np.diff(graph.consumer_ptr) == 0)
        np.add.at(results, graph.tensor_producer[kept], graph.tensor_bytes[kept])
        if results.any():
            self.model.add(resident + self._bytes(problem.per_unit(results), d) <= room)

    def _pipelined(self, d: int) -> Any:
        """A full pipeline: every tensor that the device makes or receives, or only copies of parameters; exact."""
        problem, graph, model = self._problem, self._problem.graph, self.model
        made, (at_home, copied) = np.zeros(problem.num_ops), held_bytes(problem)
        np.add.at(made, graph.tensor_producer, at_home)
        size = self._scaled(copied)
        copies: list[Any] = []
        readers: dict[tuple[int, int], list[int]] = {}
        for e, (tensor, reader) in enumerate(zip(graph.edge_tensor.tolist(), graph.consumers.tolist(), strict=True)):
            each = e if problem.execution.sends == "edge" else 0
            if size[tensor] and problem.unit[graph.tensor_producer[tensor]] != problem.unit[reader]:
                readers.setdefault((tensor, each), []).append(reader)
        for (tensor, _), ops in readers.items():
            sender = self._op(int(graph.tensor_producer[tensor]), d)
            there = [x for x in (self._op(op, d) for op in ops) if not isinstance(x, int)]
            if there:
                copy = model.new_bool_var("")
                for x in there:
                    model.add(copy >= x - sender)
                model.add(copy <= sum(there))
                model.add(copy <= 1 - sender)
                copies.append(size[tensor] * copy)
        return self._bytes(problem.per_unit(made), d) + sum(copies)

    def _intervals(self) -> None:
        """Devices have different ranks, and forward data never goes down in rank."""
        problem, graph, model = self._problem, self._problem.graph, self.model
        top = problem.num_devices - 1
        rank = [model.new_int_var(0, top, "") for _ in range(problem.num_devices)]
        model.add_all_different(rank)
        level = [model.new_int_var(0, top, "") for _ in self.on]
        for choices, mine in zip(self.on, level, strict=True):
            for x, there in zip(choices, rank, strict=True):
                if x is not None:
                    model.add(mine == there).only_enforce_if(x)
        forward = (graph.phase[graph.edge_producer] == 0) & (graph.phase[graph.consumers] == 0)
        forward &= ~graph.is_stored[graph.edge_producer]
        for a, b in np.unique(problem.unit[np.stack([graph.edge_producer, graph.consumers])[:, forward]], axis=1).T:
            model.add(level[a] <= level[b])


def _whole(problem: Problem) -> tuple[float, list[int]]:
    """(whole numbers per byte, room on each device in them). Sizes are rounded down, room up."""
    graph = problem.graph
    sizes = np.concatenate([graph.resident_bytes, graph.tensor_bytes, graph.scratch])
    each_copy = graph.tensor_bytes[graph.edge_tensor]
    most = float(sizes.sum() + graph.tensor_bytes.sum() + each_copy.sum())  # more than a device can ever hold
    capacity = np.minimum(np.where(np.isfinite(problem.capacity), problem.capacity, 0.0), most + 1.0)
    if most < 2.0**50 and not (sizes % 1).any():
        return 1.0, np.floor(capacity).astype(np.int64).tolist()
    scale = 2.0**40 / most
    return scale, np.ceil(capacity * (1 + 1e-9) * scale).astype(np.int64).tolist()


# ---- orders ----------------------------------------------------------------------------------------------------------


def saving_order(problem: Problem, handicap: Floats | None = None) -> Ints:
    """A topological order that frees memory early: always the op that adds least, of equals the one ready last.

    `handicap` [N] is added to what the ops add.
    """
    graph = problem.graph
    live = ~graph.is_stored[graph.tensor_producer]
    order = np.empty(problem.num_ops, np.int32)
    _save(
        np.where(live, graph.tensor_bytes, 0.0), graph.tensor_producer.astype(np.int64),
        np.diff(graph.consumer_ptr).astype(np.int64), graph.in_edges[0].astype(np.int64),
        graph.edge_tensor[graph.in_edges[1]].astype(np.int64), graph.out_edges[0].astype(np.int64),
        graph.consumers[graph.out_edges[1]].astype(np.int64),
        np.zeros(problem.num_ops) if handicap is None else handicap.copy(), order,
    )  # fmt: skip
    return order


@njit(cache=True, nogil=True)
def _save(size, producer, unread, input_ptr, inputs, out_ptr, readers, made, order):
    n = len(order)
    waiting, ready = np.empty(n, np.int64), np.empty(n, np.int64)
    for t in range(len(size)):
        made[producer[t]] += size[t]
    count = 0
    for op in range(n):
        waiting[op] = input_ptr[op + 1] - input_ptr[op]
        if waiting[op] == 0:
            ready[count] = op
            count += 1
    for position in range(n):
        best, least = 0, np.inf
        for i in range(count):
            op = ready[i]
            added = made[op]
            for j in range(input_ptr[op], input_ptr[op + 1]):
                if unread[inputs[j]] == 1:
                    added -= size[inputs[j]]
            if added <= least:
                best, least = i, added
        op = ready[best]
        count -= 1
        for i in range(best, count):
            ready[i] = ready[i + 1]
        order[position] = op
        for j in range(input_ptr[op], input_ptr[op + 1]):
            unread[inputs[j]] -= 1
        for j in range(out_ptr[op], out_ptr[op + 1]):
            reader = readers[j]
            waiting[reader] -= 1
            if waiting[reader] == 0:
                ready[count] = reader
                count += 1
