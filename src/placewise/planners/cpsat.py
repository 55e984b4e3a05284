"""The execution model as intervals in time, for CP-SAT: placement and order, with a proof of how good they are."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from placewise.apart import stream
from placewise.driver import Context
from placewise.graph import Ints
from placewise.planners import planner
from placewise.planners.heft import schedule
from placewise.problem import Problem
from placewise.simulator import simulate
from placewise.simulator.alike import alike

_LARGE: Final = 20_000  # edges x devices x devices
_TICKS: Final = 2.0**40  # in the incumbent's value: rounding then costs a path of a hundred ops a ten-billionth
_BYTES: Final = 2.0**20  # units of memory in a device
_ROUNDING: Final = 1e-12
_EVALUATIONS: Final = 50_000  # that a unit of the solver's effort, about a second, counts as
_BEYOND: Final = 2.0**60  # ticks
_JUDGED: Final = 8  # solutions, the last ones, that are simulated


def _supports(problem: Problem) -> bool | str:
    if problem.execution.concurrency != "parallel":
        return "orders devices that work at the same time, one op after another; this engine does not"
    if problem.contiguous:
        return "ignores contiguity"
    if problem.graph.num_edges * problem.num_devices**2 > _LARGE or problem.num_ops * problem.num_devices > _LARGE:
        return "takes small problems only, as every transfer that is possible is modelled: use series or auto"
    return True


def _load(_: Problem) -> None:
    """The solver takes a second to import, which is not the plan's fault."""
    import ortools.sat.python.cp_model  # noqa: F401


@planner("cpsat", objectives={"latency", "completion"}, supports=_supports, compile=_load)
def cpsat(problem: Problem, ctx: Context, *, goal: float = 0.0) -> None:
    """The best placement and order by constraint programming over intervals, with proof (OR-tools CP-SAT).

    Ops are intervals on the device that has them, transfers on the channels that they occupy, tensors in memory. The
    solver may send transfers in any order and start them at any time, fetch parameters as early as it likes, and knows
    times rounded down. The simulator serves queues first come, first served. So what the solver proves holds for every
    plan, and the plan that it makes is judged by the simulator, where it may take a little longer than the solver says.

    It starts from the best plan so far, else from HEFT's. Of devices that are alike, one is not used before another.
    With a `goal` in seconds it looks for plans below that alone, or proves that there is none.
    """
    if ctx.best is None and not problem.max_devices:
        ctx.evaluate(*schedule(problem))
    if ctx.best is None:
        ctx.delegate("fit", share=0.3)
    if ctx.should_stop() or not problem.num_units:
        return
    bound, plans = _solve(ctx, _Model(problem, ctx.best, ctx.best_value, ctx.lower_bound, goal or math.inf))
    for placement, order in plans[: -1 - _JUDGED : -1]:
        for sequence in (order, None):  # queues may make another order better
            if ctx.evaluations_left:
                ctx.evaluate(placement, sequence)
    if bound <= ctx.best_value * (1 + _ROUNDING):  # else the solver is wrong
        ctx.bound(bound * (1 - _ROUNDING))


def _solve(ctx: Context, model: _Model) -> tuple[float, list[tuple[Ints, Ints]]]:
    """(what is proved, plans, the best last) when the budget is spent or the proof complete.

    In a process of its own, as now and then CP-SAT finds a flaw of its own and ends the process that it is in. What it
    has proved and found by then holds.
    """
    evaluations, seconds, seed = ctx.evaluations_left, ctx.seconds_left, int(ctx.rng.integers(2**31))

    def work(send: Callable[[tuple[str, Any]], None]) -> None:
        from ortools.sat.python import cp_model

        class Listing(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
            def on_solution_callback(self) -> None:
                send(("plan", model.plan(self)))

        solver = cp_model.CpSolver()
        solver.best_bound_callback = lambda bound: send(("bound", bound * model.tick))
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        # With presolve, OR-tools 9.15 calls models impossible that are not (its issue 5274): no basis for a proof.
        solver.parameters.cp_model_presolve = False
        # Conflicts teach more here than linear programmes do: what took them minutes is proved in a second.
        solver.parameters.linearization_level = 0
        solver.parameters.use_precedences_in_disjunctive_constraint = True
        solver.parameters.use_strong_propagation_in_disjunctive = True
        solver.parameters.use_dynamic_precedence_in_disjunctive = True
        solver.parameters.catch_sigint_signal = False  # which is for the driver
        if evaluations < sys.maxsize:
            solver.parameters.max_deterministic_time = evaluations / _EVALUATIONS
        if math.isfinite(seconds):
            solver.parameters.max_time_in_seconds = max(seconds, 1e-3)
        status = solver.solve(model.model, Listing())
        bound = solver.best_objective_bound * model.tick if status != cp_model.MODEL_INVALID else 0.0
        if status == cp_model.INFEASIBLE:
            bound = model.goal if math.isfinite(model.goal) else 0.0
        send(("bound", bound))
        send(("used", solver.response_proto.deterministic_time))

    proved, used = 0.0, 0.0
    plans: list[tuple[Ints, Ints]] = []
    for what, value in stream(work, lambda: not ctx.should_stop()):
        if what == "plan":
            plans.append(value)
        elif what == "bound":
            proved = value
        else:
            used = value
    ctx.spend(min(int(used * _EVALUATIONS), max(0, ctx.evaluations_left - 1)))
    return proved, plans


# ---- devices that are alike ------------------------------------------------------------------------------------------


def first_twins(problem: Problem) -> list[int]:
    """[D] the first device that can change places with each one, and nothing changes."""
    first: list[int] = []
    for b in range(problem.num_devices):
        first.append(next((a for a in range(b) if first[a] == a and _interchangeable(problem, a, b)), b))
    return first


def _interchangeable(problem: Problem, a: int, b: int) -> bool:
    """Whether two devices are alike, and so are the channels of their links."""
    if not alike(problem, a, b):
        return False
    swap = list(range(problem.num_devices))
    swap[a], swap[b] = b, a
    links: dict[int, list[tuple[int, int]]] = {}
    for link, channels in problem.cluster.channels_of.items():
        for channel in channels:
            links.setdefault(channel, []).append(link)
    before = sorted(sorted(used) for used in links.values())
    after = sorted(sorted((swap[x], swap[y]) for x, y in used) for used in links.values())
    return before == after


# ---- the model -------------------------------------------------------------------------------------------------------


class _Model:
    """Variables, constraints and hints. Every time is in ticks.

    What any plan does, with all its times rounded down, is a solution: rounded times keep their order, and a sum
    rounded down is no less than its parts rounded down.
    """

    def __init__(
        self, problem: Problem, plan: tuple[Ints, Ints | None] | None, value: float, bound: float, goal: float
    ) -> None:  # fmt: skip
        from ortools.sat.python import cp_model

        self.model = cp_model.CpModel()
        self._problem = problem
        longest = _one_by_one(problem) if plan is None else value
        self.tick = longest / _TICKS if longest > 0 else 1.0
        self._horizon = int(longest / self.tick) + problem.num_ops + problem.graph.num_edges
        self.goal = goal
        self._known = None if plan is None else _Known(problem, *plan, first_twins(problem))
        self._pairs: dict[tuple[int, int], dict[tuple[int, int], Any]] = {}
        self._held: list[list[tuple[Any, int]]] = [[] for _ in range(problem.num_devices)]  # (interval, bytes)
        graph = problem.graph
        most = graph.resident_bytes.sum() + graph.tensor_bytes.sum() + graph.tensor_bytes[graph.edge_tensor].sum()
        tight = bool(most + graph.scratch.max(initial=0.0) > problem.capacity.min())
        self._live = tight and problem.execution.memory == "live"

        self._place()
        self._run()
        self._send()
        if tight:
            self._fit()
        self._aim(bound)

    # Hints: what the plan at hand does.

    def _whether(self, hint: bool) -> Any:
        flag = self.model.new_bool_var("")
        if self._known:
            self.model.add_hint(flag, hint)
        return flag

    def _when(self, hint: float) -> Any:
        time = self.model.new_int_var(0, self._horizon, "")
        if self._known:
            self.model.add_hint(time, min(int(hint / self.tick), self._horizon))
        return time

    def _ticks(self, seconds: float) -> int:
        """Rounded down; whatever takes longer than the plan at hand is too long, no matter by how much."""
        return int(min(seconds / self.tick * (1 - 1e-15), self._horizon + 1.0))

    # Where.

    def _place(self) -> None:
        """One device for each unit; of devices that are alike, one is used by a unit only after all before it."""
        model, problem, known = self.model, self._problem, self._known
        allowed = problem.allowed[problem.first_of_unit]
        self._on = [
            {d: self._whether(bool(known and known.placement[problem.first_of_unit[u]] == d)) for d in devices}
            for u, devices in enumerate(np.flatnonzero(row).tolist() for row in allowed)
        ]
        for choices in self._on:
            model.add_exactly_one(choices.values())
        first = first_twins(problem)
        for b in range(problem.num_devices):
            a = next((a for a in range(b - 1, -1, -1) if first[a] == first[b]), None)
            for u, choices in enumerate(self._on if a is not None else []):
                if b in choices:  # devices that are alike are allowed alike
                    model.add_bool_or([~choices[b], *(other[a] for other in self._on[:u] if a in other)])
        if problem.max_devices is not None:
            used = [self._whether(bool(known and (known.placement == d).any())) for d in range(problem.num_devices)]
            for choices in self._on:
                for d, x in choices.items():
                    model.add_implication(x, used[d])
            model.add(sum(used) <= problem.max_devices)

    def _both(self, p: int, r: int) -> dict[tuple[int, int], Any]:
        """For two units: whether one is on device a and the other on d, by (a, d)."""
        if (p, r) not in self._pairs:
            known, first = self._known, self._problem.first_of_unit
            at = (int(known.placement[first[p]]), int(known.placement[first[r]])) if known else None
            both = {(a, d): self._whether(at == (a, d)) for a in self._on[p] for d in self._on[r]}
            for a, x in self._on[p].items():
                self.model.add(sum(both[a, d] for d in self._on[r]) == x)
            for d, x in self._on[r].items():
                self.model.add(sum(both[a, d] for a in self._on[p]) == x)
            self._pairs[p, r] = both
        return self._pairs[p, r]

    # When.

    def _run(self) -> None:
        """Ops: one at a time on each device."""
        model, problem, known = self.model, self._problem, self._known
        self._start: list[Any] = []
        self._finish: list[Any] = []
        runs: list[list[Any]] = [[] for _ in range(problem.num_devices)]
        for op in range(problem.num_ops):
            if problem.graph.is_stored[op]:
                self._start.append(0)
                self._finish.append(0)
                continue
            start = self._when(known.start[op] if known else 0.0)
            on = self._on[problem.unit[op]]
            length = {d: self._ticks(float(problem.seconds[op, d])) for d in on}
            lasts = sum(length[d] * x for d, x in on.items())
            finish = self._when(self.tick * (int(known.start[op] / self.tick) + length[known.device(op)] + 0.5)
                                if known else 0.0)  # fmt: skip
            model.add(finish == start + lasts)
            for d, x in on.items():
                run = model.new_optional_interval_var(start, length[d], finish, x, "")
                runs[d].append(run)
                self._hold(d, run, float(problem.graph.scratch[op]))
            self._start.append(start)
            self._finish.append(finish)
        for intervals in runs:
            model.add_no_overlap(intervals)

    def _send(self) -> None:
        """Transfers: no reader starts before its inputs are there; one at a time on each channel."""
        problem, graph = self._problem, self._problem.graph
        self._queue: dict[int, list[Any]] = {}
        per_edge = problem.execution.sends == "edge"
        for t in range(graph.num_tensors):
            readers = graph.consumers[graph.consumer_ptr[t] : graph.consumer_ptr[t + 1]].tolist()
            source = int(graph.tensor_producer[t])
            gone = None
            if self._live and readers and not graph.is_stored[source]:
                gone = self._when(self._known.gone[t] if self._known else 0.0)
                self.model.add(gone >= self._finish[source])
            for group in [[r] for r in readers] if per_edge else [readers] if readers else []:
                self._message(t, source, group, gone)
            if self._live and not graph.is_stored[source]:
                for d, x in self._on[problem.unit[source]].items():
                    self._hold_between(d, self._start[source], self._horizon if gone is None else gone, x,
                                       float(graph.tensor_bytes[t]))  # fmt: skip
        for intervals in self._queue.values():
            self.model.add_no_overlap(intervals)

    def _message(self, t: int, source: int, readers: list[int], gone: Any) -> None:
        """A tensor for some readers: sent once to each device where some of them are."""
        model, problem, unit = self.model, self._problem, self._problem.unit
        queues = problem.execution.contention == "channel"
        size, home = float(problem.graph.tensor_bytes[t]), int(unit[source])
        units = list(dict.fromkeys(int(unit[r]) for r in readers if unit[r] != home))
        lasts = {
            (a, d): self._ticks(float(problem.cluster.latency[a, d] + size * problem.cluster.seconds_per_byte[a, d]))
            for a in self._on[home] for d in dict.fromkeys(d for u in units for d in self._on[u]) if a != d
        }  # fmt: skip
        for r in readers:  # at the earliest, right after the op that makes it
            both = self._both(home, int(unit[r])) if unit[r] != home else {}
            way = sum(lasts[link] * x for link, x in both.items() if link in lasts)
            model.add(self._start[r] >= self._finish[source] + way)
            if gone is not None:
                here = [x for (a, d), x in both.items() if a == d]
                for x in here:
                    model.add(gone >= self._finish[r]).only_enforce_if(x)
                if unit[r] == home:
                    model.add(gone >= self._finish[r])
        if not lasts or not (queues or self._live):
            return
        # One start for each device where it may go; for one reading unit, one start is enough.
        crossing: dict[tuple[int, int], Any] = {}
        for u in units:
            for link, x in self._both(home, u).items():
                if link in lasts:
                    crossing.setdefault(link, []).append(x)
        for link, flags in crossing.items():
            crossing[link] = flags[0] if len(flags) == 1 else self._either(flags, link, home, units)
        begins: dict[int, Any] = {}
        for d in dict.fromkeys(d for _, d in crossing):
            if len(units) == 1 and begins:
                begins[d] = next(iter(begins.values()))
            elif queues:
                begins[d] = self._when(self._known.sent(t, readers, d if len(units) > 1 else None, source)
                                       if self._known else 0.0)  # fmt: skip
                model.add(begins[d] >= self._finish[source])
            else:
                begins[d] = self._finish[source]
        for (a, d), x in crossing.items():
            if queues and lasts[a, d] > 0:
                interval = model.new_optional_fixed_size_interval_var(begins[d], lasts[a, d], x, "")
                for channel in problem.cluster.channels_of[a, d]:
                    self._queue.setdefault(channel, []).append(interval)
            if gone is not None:
                model.add(gone >= begins[d] + lasts[a, d]).only_enforce_if(x)
        for r in readers if queues else []:
            if unit[r] != home and len(units) == 1:
                way = sum(lasts[link] * x for link, x in crossing.items())
                model.add(self._start[r] >= next(iter(begins.values())) + way)
            elif unit[r] != home:
                for (a, d), x in self._both(home, int(unit[r])).items():
                    if a != d:
                        model.add(self._start[r] >= begins[d] + lasts[a, d]).only_enforce_if(x)
        if self._live:
            for d in begins:
                local = [r for r in readers if d in self._on[unit[r]] and unit[r] != home]
                last = self._when(self._known.read(t, readers, d, source) if self._known else 0.0)
                model.add(last >= begins[d])
                for r in local:
                    model.add(last >= self._finish[r]).only_enforce_if(self._on[unit[r]][d])
                for (_, to), x in crossing.items():
                    if to == d:
                        self._hold_between(d, begins[d], last, x, size)

    def _either(self, flags: list[Any], link: tuple[int, int], home: int, units: list[int]) -> Any:
        known, first = self._known, self._problem.first_of_unit
        goes = known is not None and link[0] == known.placement[first[home]] and any(
            known.placement[first[u]] == link[1] for u in units
        )  # fmt: skip
        either = self._whether(bool(goes))
        for flag in flags:
            self.model.add_implication(flag, either)
        return either

    # Memory.

    def _hold(self, d: int, interval: Any, size: float) -> None:
        if self._live and size > 0 and math.isfinite(self._problem.capacity[d]):
            self._held[d].append((interval, self._units(size, d)))

    def _hold_between(self, d: int, since: Any, until: Any, x: Any, size: float) -> None:
        if size > 0 and math.isfinite(self._problem.capacity[d]):
            lasts = self.model.new_int_var(0, self._horizon, "")
            self._hold(d, self.model.new_optional_interval_var(since, lasts, until, x, ""), size)

    def _units(self, size: float, d: int) -> int:
        share = min(size / max(self._problem.capacity[d], 1e-300), 2.0)  # two are as much too many as any number
        return int(share * _BYTES * (1 - 1e-15))

    def _fit(self) -> None:
        """What is held at any moment beside what is resident fits."""
        problem = self._problem
        resident = problem.per_unit(problem.graph.resident_bytes)
        for d in np.flatnonzero(np.isfinite(problem.capacity)).tolist():
            stays = sum(self._units(float(resident[u]), d) * on[d] for u, on in enumerate(self._on) if d in on)
            room = self.model.new_int_var(0, int(_BYTES), "")
            self.model.add(room + stays == int(_BYTES))
            if self._known:
                self.model.add_hint(room, int(_BYTES) - sum(
                    self._units(float(resident[u]), d) for u in range(len(resident))
                    if self._known.placement[problem.first_of_unit[u]] == d
                ))  # fmt: skip
            if self._held[d]:
                self.model.add_cumulative([h for h, _ in self._held[d]], [n for _, n in self._held[d]], room)

    # What for.

    def _aim(self, bound: float) -> None:
        model, problem, graph = self.model, self._problem, self._problem.graph
        models = graph.model if problem.objective == "completion" else np.zeros(problem.num_ops, np.int32)
        ends = []
        for m in np.unique(models).tolist():
            ops = np.flatnonzero((models == m) & ~graph.is_stored).tolist()
            end = self._when(max((float(self._known.finish[op]) for op in ops), default=0.0) if self._known else 0.0)
            for op in ops:
                model.add(end >= self._finish[op])
            for d in range(problem.num_devices):
                work = [self._ticks(float(problem.seconds[op, d])) * self._on[problem.unit[op]][d]
                        for op in ops if d in self._on[problem.unit[op]]]  # fmt: skip
                model.add(end >= sum(work))
            ends.append(end)
        model.add_linear_constraint(sum(ends), self._ticks(bound), math.floor(min(self.goal / self.tick, _BEYOND)))
        model.minimize(sum(ends))

    def plan(self, solution: Any) -> tuple[Ints, Ints]:
        """(placement, order) of a solution."""
        problem = self._problem
        device = [next(d for d, x in on.items() if solution.boolean_value(x)) for on in self._on]
        start = np.array([solution.value(s) for s in self._start])
        finish = np.array([solution.value(f) for f in self._finish])
        order = np.lexsort((np.argsort(problem.graph.topological_order), finish, start))
        return np.array(device, np.int32)[problem.unit], order.astype(np.int32)


class _Known:
    """The times of a plan, with devices that are alike renamed such that they are used in turn."""

    def __init__(self, problem: Problem, placement: Ints, order: Ints | None, first: list[int]) -> None:
        rename: dict[int, int] = {}
        for d in placement[problem.first_of_unit].tolist():
            if d not in rename:
                taken = rename.values()
                rename[d] = next(e for e in range(len(first)) if first[e] == first[d] and e not in taken)
        self.placement = np.array([rename[d] for d in placement.tolist()], np.int32)
        timeline = simulate(problem, self.placement, order)
        self.start, self.finish = timeline.start, timeline.finish
        moving, graph = timeline.transfers, problem.graph
        self._per_edge = problem.execution.sends == "edge"
        keys = moving.reader if self._per_edge else moving.target
        rows = zip(moving.tensor.tolist(), keys.tolist(), moving.start.tolist(), strict=True)
        self._sent: dict[tuple[int, int], float] = {(tensor, key): start for tensor, key, start in rows}
        self.gone = np.zeros(graph.num_tensors)
        here = self.placement[graph.edge_producer] == self.placement[graph.consumers]
        np.maximum.at(self.gone, graph.edge_tensor[here], self.finish[graph.consumers[here]])
        np.maximum.at(self.gone, moving.tensor, moving.finish)

    def device(self, op: int) -> int:
        """Where an op is."""
        return int(self.placement[op])

    def sent(self, t: int, readers: list[int], device: int | None, source: int) -> float:
        """When a message is sent to a device, or to the one where its readers are."""
        to = self.device(readers[0]) if device is None else device
        return self._sent.get((t, readers[0] if self._per_edge else to), float(self.finish[source]))

    def read(self, t: int, readers: list[int], device: int, source: int) -> float:
        """When a copy on a device is last read."""
        ends = [float(self.finish[r]) for r in readers if self.device(r) == device]
        return max([*ends, self.sent(t, readers, device, source)])


def _one_by_one(problem: Problem) -> float:
    """More than any sensible plan takes: all ops where they are slowest, and all transfers, one after another."""
    slowest = np.where(np.isfinite(problem.seconds), problem.seconds, 0.0).max(axis=1, initial=0.0).sum()
    graph, cluster = problem.graph, problem.cluster
    sizes = graph.tensor_bytes[graph.edge_tensor]
    return float(slowest + (cluster.latency.max() + sizes * cluster.seconds_per_byte.max()).sum())
