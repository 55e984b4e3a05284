"""Slots by an integer programme: which unit goes into which slot, with a proof of how good that is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from placewise.driver import Context
from placewise.graph import Floats, Ints
from placewise.planners import get, planner
from placewise.planners.slot_search import slots_only
from placewise.planners.solvers import Solver, countable, effort_left, solve
from placewise.problem import Problem
from placewise.simulator.bounds import lower_bound
from placewise.simulator.slots import measure_slots, slot_arrays

_START: Final = 0.5  # of the budget, for a plan to start from
_LARGEST: Final = 3_000  # items times places that a programme may have; with more, it proves nothing in a minute
_WHOLE: Final = 10_000_000  # what the value of that plan is in whole numbers, for CP-SAT
_REAL: Final = 1_000.0  # and in real ones, for HiGHS
_TOLERANCE: Final = 1e-6  # relative; above what the solvers let pass
_NODES: Final = 2_000  # of a solve, where there is no clock


def _compile(problem: Problem) -> None:
    get("slot-search").compile(problem)  # type: ignore[misc]  # it has one


@planner("slot-milp", objectives={"latency", "completion"}, supports=slots_only, compile=_compile)
def slot_milp(problem: Problem, ctx: Context, *, solver: Solver = "highs") -> None:
    """The integer programme of Tarnawski et al. 2020 (arXiv:2006.16423) for latency in slots, with a bound.

    It starts from the best plan so far, or else from `slot-search`; what is large is left to that. Beyond the paper:
    one variable per unit and slot instead of per op (where devices have one slot); no time above that of the best plan,
    which one variable stands for as a whole, so that a solver has it from the start; and along every path of the graph,
    times and transfers add up, whatever is in the pieces, without which next to nothing is proved. Equal devices are
    left to the solvers, which see them: two rules that tell them apart made HiGHS slower on BERT-24 and GNMT. With
    several slots, ops may be cut in other ways than into the fewest pieces, so the programme is only a relaxation.
    With a budget in evaluations alone the solver is CP-SAT, whose effort can be counted.
    """
    accelerators = sum(device.copies for device in problem.cluster.devices)
    items = problem.num_units if problem.execution.slots == 1 else problem.num_ops
    large = items * (accelerators * problem.execution.slots + 1) > _LARGEST
    if ctx.best is None or large:
        ctx.delegate("slot-search", share=1.0 if large else _START)
    if ctx.best is None or large or ctx.should_stop() or not problem.num_ops:
        return
    # How HiGHS branches depends on this bound, not always for the better: with the longest path it proved GNMT in
    # 15 s of processor time, with none or with a higher one it did not in 25 s. That is one input, and no rule.
    implied = lower_bound(problem).parts.get("path", 0.0)
    solver = countable(ctx, solver)
    programme = _Programme(problem, ctx.best[0], ctx.best_value, implied, whole=solver == "cpsat")
    proved, answer = _solve(ctx, programme.rows, programme.value, solver)
    ctx.bound(min(proved * programme.unit, ctx.best_value))
    placement = programme.placement(answer) if answer is not None else None
    if placement is not None and not ctx.should_stop():
        ctx.evaluate(placement)


@dataclass
class _Rows:
    """A linear programme, as lists. Every variable is zero or more."""

    high: list[float] = field(default_factory=list)  # of each variable
    low: list[float] = field(default_factory=list)
    hint: list[float] = field(default_factory=list)
    integral: list[bool] = field(default_factory=list)
    least: list[float] = field(default_factory=list)  # of each row
    most: list[float] = field(default_factory=list)
    row: list[int] = field(default_factory=list)  # of each factor
    column: list[int] = field(default_factory=list)
    factor: list[float] = field(default_factory=list)

    def variable(self, hint: float, high: float = 1.0, low: float = 0.0, *, integral: bool) -> int:
        """A new one's number; `hint` is its value in the plan at hand."""
        self.low.append(low)
        self.high.append(high)
        self.hint.append(hint)
        self.integral.append(integral)
        return len(self.high) - 1

    def add(self, terms: Iterable[tuple[int, float]], least: float = 0.0, most: float = math.inf) -> None:
        """Terms, (variable, factor), that add up to no less and no more."""
        for variable, factor in terms:
            if factor:
                self.row.append(len(self.least))
                self.column.append(variable)
                self.factor.append(factor)
        self.least.append(least)
        self.most.append(most)


class _Programme:
    """The rows of a problem. Times are counted in units, so that the plan at hand takes a round number of them."""

    def __init__(self, problem: Problem, placement: Ints, value: float, bound: float, *, whole: bool) -> None:
        self._problem, self._arrays, self._whole = problem, slot_arrays(problem), whole
        self._most = float(_WHOLE) if whole else _REAL
        self.unit = (value or 1.0) / self._most
        self.rows = _Rows()
        # A place is a slot of an accelerator, or a pool. Of pools that are alike and never full, one is enough.
        pools = np.flatnonzero(self._arrays.pool).tolist()
        pools = [d for i, d in enumerate(pools) if not any(self._alike(d, e) for e in pools[:i])]
        slots = range(problem.execution.slots)
        self._slots = [(d, j) for d in np.flatnonzero(~self._arrays.pool).tolist() for j in slots]
        self._places = self._slots + [(d, 0) for d in pools]
        # What is placed as a whole: where a device has several slots, the ops of a unit may be in different ones.
        item = problem.unit if len(slots) == 1 else np.arange(problem.num_ops)
        self._item: list[int] = item.tolist()
        self._first: list[int] = np.unique(item, return_index=True)[1].tolist()
        self._begin, self._end, self._done = self._plan_at_hand(placement)
        # All items as in the plan at hand, and nothing more to decide: so a solver that takes no hints has it too.
        self._as_before = self.rows.variable(0.0, integral=True)
        self._x = self._assignment()
        self._memory()
        self._into, self._out = self._transfers()
        self.value = self._times(bound)

    def _alike(self, a: int, b: int) -> bool:
        capacity, seconds = self._problem.capacity, self._problem.seconds
        return math.isinf(capacity[a]) and math.isinf(capacity[b]) and bool((seconds[:, a] == seconds[:, b]).all())

    def _amount(self, seconds: float, unit: float | None = None) -> float:
        """In units; whole ones are rounded down, so that what they prove is true."""
        amount = float(seconds) / (unit or self.unit)
        return float(math.floor(amount)) if self._whole else amount

    def _plan_at_hand(self, placement: Ints) -> tuple[list[float], list[float], list[float]]:
        """When slots begin and end and when ops are done; sets the place of each op."""
        last = measure_slots(self._problem, placement[None].astype(np.int32), np.empty(1))
        device, piece = placement.tolist(), last.piece.tolist()
        first_piece: dict[int, int] = {}
        for d, p in zip(device, piece, strict=True):
            if p >= 0:
                first_piece[d] = min(first_piece.get(d, p), p)
        begin, end = [0.0] * len(self._slots), [0.0] * len(self._slots)
        done, self._where = [0.0] * len(device), [0] * len(device)
        for op, d in enumerate(device):
            if self._arrays.pool[d]:
                same = next(p for p, _ in self._places[len(self._slots) :] if p == d or self._alike(p, d))
                self._where[op] = self._places.index((same, 0))
            else:
                self._where[op] = self._places.index((d, max(0, piece[op] - first_piece.get(d, 0))))
            if piece[op] >= 0:
                done[op] = self._amount(last.finish[piece[op]])
                if not self._arrays.pool[d]:
                    begin[self._where[op]] = self._amount(last.start[piece[op]])
                    end[self._where[op]] = done[op]
        for s, (_, j) in enumerate(self._slots):
            if j and not end[s]:  # not used
                begin[s] = end[s] = end[s - 1]
        return begin, end, done

    def _assignment(self) -> list[dict[int, int]]:
        """[items] the variables by place: each item is in one; ops of a unit share a device."""
        problem, rows = self._problem, self.rows
        need = problem.per_unit(problem.graph.resident_bytes)
        found = []
        for op in self._first:
            may = [
                place
                for place, (d, j) in enumerate(self._places)
                if problem.allowed[op, d] and need[problem.unit[op]] <= problem.capacity[d]
                and not (j and self._arrays.stored[op])
            ]  # fmt: skip
            found.append({place: rows.variable(float(self._where[op] == place), integral=True) for place in may})
            rows.add(((x, 1.0) for x in (*found[-1].values(), self._as_before)), 1.0, 1.0)
        for op, variables in zip(self._first, found, strict=True):
            leader = found[self._item[int(problem.first_of_unit[problem.unit[op]])]]
            for d in dict.fromkeys(d for d, _ in self._places) if leader is not variables else ():
                mine = [(x, 1.0) for place, x in variables.items() if self._places[place][0] == d]
                rows.add(mine + [(x, -1.0) for place, x in leader.items() if self._places[place][0] == d], 0.0, 0.0)
        return found

    def _memory(self) -> None:
        need = np.bincount(self._item, self._problem.graph.resident_bytes, len(self._first))
        for d in dict.fromkeys(d for d, _ in self._places):
            room = float(self._problem.capacity[d])
            if need.sum() > room:
                unit = (room or 1.0) / self._most
                self.rows.add(
                    (
                        (x, self._amount(need[i], unit))
                        for i, item in enumerate(self._x)
                        for place, x in item.items()
                        if self._places[place][0] == d
                    ),
                    -math.inf,
                    self._amount(room, unit),
                )

    def _transfers(self) -> tuple[list[dict[int, int]], list[dict[int, int]]]:
        """([tensors] by slot, whether it is received; the same, sent). Those between the same items are as one."""
        graph, stored = self._problem.graph, self._arrays.stored
        known: dict[tuple[int, bool, tuple[int, ...]], tuple[dict[int, int], dict[int, int]]] = {}
        into, out = [], []
        self._into_reader: dict[tuple[int, int], dict[int, int]] = {}  # (tensor, item) where several items read
        readers_of: dict[tuple[int, bool, tuple[int, ...]], dict[int, dict[int, int]]] = {}
        for t, op in enumerate(graph.tensor_producer.tolist()):
            source = self._item[op]
            readers = sorted({self._item[r] for r in self._readers(t)} - {source})
            key = (source, bool(stored[op]), tuple(readers))
            if key not in known:
                known[key], readers_of[key] = ({}, {}), {}
                for s in range(len(self._slots)):
                    self._cross(key, s, *known[key], readers_of[key])
            into.append(known[key][0])
            out.append(known[key][1])
            for reader, received in readers_of[key].items():
                self._into_reader[t, reader] = received
        return into, out

    def _cross(
        self, key: tuple[int, bool, tuple[int, ...]], s: int, into: dict[int, int], out: dict[int, int],
        by_reader: dict[int, dict[int, int]],
    ) -> None:  # fmt: skip
        """What a message from one item to others means for a slot."""
        source, stored, readers = key
        rows, d = self.rows, self._slots[s][0]
        home = [x for place, x in self._x[source].items() if (self._places[place][0] == d if stored else place == s)]
        here = sum(rows.hint[x] for x in home)
        reads = {r: self._x[r][s] for r in readers if s in self._x[r]}
        if reads:
            into[s] = rows.variable(float(max(rows.hint[x] for x in reads.values()) > here), integral=self._whole)
        for reader, x in reads.items():
            received = into[s]
            if len(reads) > 1:
                received = rows.variable(float(rows.hint[x] > here), integral=self._whole)
                rows.add([(into[s], 1.0), (received, -1.0)])
            by_reader.setdefault(reader, {})[s] = received
            rows.add([(received, 1.0), (x, -1.0), *((y, 1.0) for y in home)])
        if home and readers and not stored:
            away = min((rows.hint[self._x[r][s]] if s in self._x[r] else 0.0) for r in readers)
            out[s] = rows.variable(float(here > away), integral=self._whole)
            for r in readers:
                there = [(self._x[r][s], 1.0)] if s in self._x[r] else []
                rows.add([(out[s], 1.0), (home[0], -1.0), *there])

    def _readers(self, t: int) -> list[int]:
        arrays = self._arrays
        readers: list[int] = arrays.consumer[arrays.consumer_ptr[t] : arrays.consumer_ptr[t + 1]].tolist()
        return readers

    def _times(self, bound: float) -> list[int]:
        """The variables whose sum is the value: the end of each model."""
        rows, arrays, graph, most = self.rows, self._arrays, self._problem.graph, self._most

        def time(hint: float, low: float = 0.0) -> int:
            return rows.variable(min(hint, most), most, low, integral=self._whole)

        begin, end = [time(at) for at in self._begin], [time(at) for at in self._end]
        done = [time(at) for at in self._done]
        runs = [op for op in arrays.order.tolist() if not arrays.stored[op]]

        # Pieces: wait for what comes in, take their time, and show what they made at the end.
        seconds = np.zeros((len(self._first), self._problem.num_devices))
        np.add.at(seconds, self._item, arrays.seconds)
        for s, (d, j) in enumerate(self._slots):
            length = [(item[s], -self._amount(seconds[i, d])) for i, item in enumerate(self._x) if s in item]
            for t in range(graph.num_tensors):
                length += [(self._into[t][s], -self._amount(arrays.into[t, d]))] if s in self._into[t] else []
                length += [(self._out[t][s], -self._amount(arrays.out[t, d]))] if s in self._out[t] else []
            rows.add([(end[s], 1.0), (begin[s], -1.0), *length])
            if j:
                rows.add([(begin[s], 1.0), (end[s - 1], -1.0)])
            for op in runs:
                if s in self._x[self._item[op]]:
                    rows.add([(done[op], 1.0), (end[s], -1.0), (self._x[self._item[op]][s], -most)], -most)
        for t, op in enumerate(graph.tensor_producer.tolist()):
            for s, received in self._into[t].items() if not arrays.stored[op] else ():
                rows.add([(begin[s], 1.0), (done[op], -1.0), (received, -most)], -most)

        # Paths: along one, the times of its ops add up, and what they alone receive, and all that they send.
        models = int(arrays.model.max(initial=0)) + 1
        latest = [max((self._done[op] for op in runs if arrays.model[op] == m), default=0.0) for m in range(models)]
        ends = [time(at, self._amount(bound * (1 - 1e-9)) if models == 1 else 0.0) for at in latest]
        along: dict[int, int] = {}
        start, edges = graph.in_edges
        for op in runs:
            own, on_pool = self._own_time(op)
            inputs = [int(graph.edge_tensor[e]) for e in edges[start[op] : start[op + 1]]]
            ways = [t for t in inputs if not arrays.stored[graph.tensor_producer[t]]]
            hint = 0.0
            steps = []
            for t in ways:
                step = own + ([] if self._is_alone(t) else self._received(t, op))
                source = int(graph.tensor_producer[t])
                steps.append([*step, (along[source], -1.0)])
                rows.add([(done[op], 1.0), (done[source], -1.0), *on_pool])
            for step in steps or [own]:
                hint = max(hint, -sum(rows.hint[x] * factor for x, factor in step))
            along[op] = time(hint)
            for step in steps or [own]:
                rows.add([(along[op], 1.0), *step])
            rows.add([(done[op], 1.0), *on_pool])
            model = int(arrays.model[op])
            rows.add([(ends[model], 1.0), (along[op], -1.0), (self._as_before, -latest[model])])
            rows.add([(ends[model], 1.0), (done[op], -1.0)])
        return ends

    def _own_time(self, op: int) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Less the time of an op on a path, with its transfers; and of that, only what it takes on pools."""
        arrays, graph = self._arrays, self._problem.graph
        item = self._x[self._item[op]]
        terms = [(x, -self._amount(arrays.seconds[op, self._places[place][0]])) for place, x in item.items()]
        on_pool = [term for term, place in zip(terms, item, strict=True) if place >= len(self._slots)]
        for t in graph.outputs[1][graph.outputs[0][op] : graph.outputs[0][op + 1]].tolist():
            terms += [(x, -self._amount(arrays.out[t, self._slots[s][0]])) for s, x in self._out[t].items()]
        start, edges = graph.in_edges
        for t in graph.edge_tensor[edges[start[op] : start[op + 1]]].tolist():
            terms += self._received(t, op) if self._is_alone(t) else []
        return terms, on_pool

    def _is_alone(self, t: int) -> bool:
        """Whether one op alone reads a tensor: then it is received for that op, whatever the path."""
        return len(self._readers(t)) == 1

    def _received(self, t: int, op: int) -> list[tuple[int, float]]:
        found = self._into_reader.get((t, self._item[op]), {})
        return [(x, -self._amount(self._arrays.into[t, self._slots[s][0]])) for s, x in found.items()]

    def placement(self, answer: Floats) -> Ints | None:
        """The devices in a solution; None if it is the plan at hand."""
        if answer[self._as_before] > 0.5:
            return None
        best = [max(item, key=lambda place: float(answer[item[place]])) for item in self._x]
        return np.array([self._places[best[item]][0] for item in self._item], np.int32)


# ---- the solvers -----------------------------------------------------------------------------------------------------


def _solve(ctx: Context, rows: _Rows, value: list[int], solver: Solver) -> tuple[float, Floats | None]:
    """(what is proved, a solution if there is one) with what is left of the budget."""
    from ortools.math_opt.python import mathopt

    model = mathopt.Model()
    x = [
        model.add_variable(lb=low, ub=high, is_integer=integral)
        for low, high, integral in zip(rows.low, rows.high, rows.integral, strict=True)
    ]
    limits = [model.add_linear_constraint(lb=a, ub=b) for a, b in zip(rows.least, rows.most, strict=True)]
    for row, column, factor in zip(rows.row, rows.column, rows.factor, strict=True):
        limits[row].set_coefficient(x[column], limits[row].get_coefficient(x[column]) + factor)
    model.minimize(mathopt.fast_sum([x[end] for end in value]))
    asked = mathopt.SolveParameters(relative_gap_tolerance=_TOLERANCE / 10 if solver == "highs" else None)
    hint = mathopt.SolutionHint(variable_values=dict(zip(x, rows.hint, strict=True)))
    hints = mathopt.ModelSolveParameters(solution_hints=[hint])
    result = solve(ctx, model, solver, effort_left(ctx), _NODES, asked, model_params=hints)
    if result is None:
        return 0.0, None
    proved = result.termination.objective_bounds.dual_bound
    proved = proved * (1 - _TOLERANCE) if math.isfinite(proved) else 0.0
    if not result.has_primal_feasible_solution():
        return proved, None
    found = result.variable_values()
    return proved, np.array([found[variable] for variable in x])
