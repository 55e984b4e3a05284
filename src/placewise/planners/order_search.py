"""Search over placement and order together: where several models share devices, who goes first matters most."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numba import njit

from placewise.driver import Context
from placewise.graph import Ints
from placewise.planners import planner
from placewise.planners.blocks import headroom
from placewise.planners.heft import schedule
from placewise.problem import Problem

_STEPS = 40  # temperatures from hot to cold
_HOT, _COLD = 2e-2, 1e-4  # of the value
_WORK = 4_000_000  # ops to look at between two glances at the clock
_GIVE_UP = 6  # rounds in a row that bring nothing


def strict_only(problem: Problem) -> bool | str:
    """Whether a planner applies that gives each device an order."""
    if problem.execution.concurrency != "parallel":
        return "orders devices that work at the same time, one op after another; this engine does not"
    return "ignores contiguity and device counts" if problem.contiguous or problem.max_devices else True


def compile_search(problem: Problem) -> None:
    """Compile the kernel."""
    placement, order = schedule(problem)
    Annealing(problem, placement, order).run(1.0, 1, 0)


@planner("order-search", objectives={"latency", "completion"}, supports=strict_only, compile=compile_search)
def order_search(problem: Problem, ctx: Context, *, moves: int = 500) -> None:
    """Annealing over placement and order, from HEFT (Kirkpatrick et al. 1983, doi:10.1126/science.220.4598.671).

    `moves` is the number of changes that a round, from hot to cold, tries per op.
    """
    for _ in improve(ctx, *ordered_start(ctx), moves):
        pass


def ordered_start(ctx: Context) -> tuple[Ints, Ints]:
    """(placement, order) of the best plan so far, if it has an order; else HEFT's."""
    placement, order = schedule(ctx.problem)
    ctx.evaluate(placement, order)
    return (ctx.best[0], ctx.best[1]) if ctx.best and ctx.best[1] is not None else (placement, order)


def improve(ctx: Context, placement: Ints, order: Ints, moves: int) -> Iterator[float]:
    """Anneal from a plan, in rounds from hot to cold, until some rounds in a row bring nothing; yields the best value.

    Rounds begin in turn at the best plan and at the first one, which leads away from where the best is stuck.
    Changes are judged by start and finish times without contention, as HEFT's are; what they lead to, by the simulator.
    """
    problem = ctx.problem
    if problem.num_units == 0 or not moves:
        return
    best, search = ctx.evaluate(placement, order), Annealing(problem, placement, order)
    rounds = fruitless = 0
    while fruitless < _GIVE_UP:
        before = search.best_value
        hot = _HOT if rounds else _COLD  # the first round makes sure of what is near
        for temperature in np.geomspace(hot, _COLD, _STEPS) * before:
            left = -(-moves * problem.num_ops // _STEPS)
            while left > 0:
                yield best
                if ctx.should_stop():
                    return
                # One evaluation is kept for the plan that is found.
                count = min(left, max(1, _WORK // problem.num_ops), ctx.evaluations_left - 1)
                if count < 1:
                    return
                improved = search.run(temperature, count, int(ctx.rng.integers(2**31)))
                ctx.spend(count)
                left -= count
                if improved:
                    best = min(best, ctx.evaluate(*search.best))
        rounds += 1
        search.stand_on(placement, order) if rounds % 2 else search.stand_on(*search.best)
        fruitless = 0 if search.best_value < before * (1 - 1e-9) else fruitless + 1


class Annealing:
    """The plan that the search stands on, and the best that it has seen."""

    def __init__(self, problem: Problem, placement: Ints, order: Ints) -> None:
        graph = problem.graph
        self._unit, self._first = problem.unit, problem.first_of_unit
        sum_models = problem.objective == "completion"
        input_ptr, in_edges = graph.in_edges
        output_ptr, out_edges = graph.out_edges
        used = np.bincount(placement, graph.resident_bytes, problem.num_devices)
        free = problem.capacity - headroom(problem)
        given = (
            problem.seconds,
            graph.model * sum_models,
            input_ptr, graph.edge_producer[in_edges], graph.tensor_bytes[graph.edge_tensor[in_edges]],
            output_ptr, graph.consumers[out_edges],
            problem.cluster.latency, problem.cluster.seconds_per_byte,
            problem.unit, problem.unit_allowed,
            problem.per_unit(graph.resident_bytes), np.maximum(free, used), graph.is_stored,
        )  # fmt: skip
        self._given = tuple(np.array(array) for array in given)  # writeable, all of them: compiled once
        models = len(graph.models) if sum_models else 1
        n = problem.num_ops
        self._order, self._device = order.astype(np.int32), placement[self._first].astype(np.int32)
        self._best_order, self._best_device = self._order.copy(), self._device.copy()
        # After each position of the order: when each device is free and when each model has ended.
        self._clock = np.zeros((2, n + 1, problem.num_devices + models))
        self._finish = np.zeros((2, n))
        self._value = np.full(2, np.inf)  # of the current plan and of the best
        self.run(0.0, 0, 0)

    @property
    def best_value(self) -> float:
        """What the best plan is estimated at."""
        return float(self._value[1])

    @property
    def best(self) -> tuple[Ints, Ints]:
        """(placement, order) of the best plan."""
        return self._best_device[self._unit], self._best_order.copy()

    def run(self, temperature: float, count: int, seed: int) -> bool:
        """Try so many changes; says whether there is a new best plan."""
        before = self.best_value
        _anneal(
            *self._given, self._order, self._device, self._best_order, self._best_device, self._clock, self._finish,
            self._value, temperature, count, seed,
        )  # fmt: skip
        return self.best_value < before

    def stand_on(self, placement: Ints, order: Ints) -> None:
        """Go on from another plan."""
        self._order[:], self._device[:] = order, placement[self._first]
        self._value[0] = np.inf
        self.run(0.0, 0, 0)


# ---- the kernel ------------------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _value_from(
    first, limit, order, device, clock, finish,
    seconds, model, input_ptr, producer, size, latency, per_byte, unit, stored,
):  # fmt: skip
    """The value of a plan, infinite if above the limit, where `clock` and `finish` are right before a position."""
    n, devices = seconds.shape
    clocks = clock.shape[1]
    value = 0.0
    for m in range(devices, clocks):
        value += clock[first, m]
    for at in range(first, n):
        op = order[at]
        for c in range(clocks):
            clock[at + 1, c] = clock[at, c]
        finish[op] = 0.0
        if stored[op]:
            continue
        d = device[unit[op]]
        time = clock[at, d]
        for i in range(input_ptr[op], input_ptr[op + 1]):
            source = producer[i]
            a = device[unit[source]]
            time = max(time, finish[source] + (0.0 if a == d else latency[a, d] + size[i] * per_byte[a, d]))
        time += seconds[op, d]
        finish[op] = time
        clock[at + 1, d] = time
        m = devices + model[op]
        if time > clock[at, m]:
            clock[at + 1, m] = time
            value = 0.0
            for c in range(devices, clocks):
                value += clock[at + 1, c]
            if value > limit:
                return np.inf
    return value


@njit(cache=True, nogil=True)
def _anneal(
    seconds, model, input_ptr, producer, size, output_ptr, consumer, latency, per_byte, unit, allowed, resident, room,
    stored, order, device, best_order, best_device, clock, finish, value, temperature, count, seed,
):  # fmt: skip
    """Try `count` changes. `clock` and `finish` have two rows: of the current plan, and room for the next."""
    n, devices = seconds.shape
    np.random.seed(seed)
    if value[0] == np.inf:  # the current plan is new
        value[0] = _value_from(
            0, np.inf, order, device, clock[0], finish[0],
            seconds, model, input_ptr, producer, size, latency, per_byte, unit, stored,
        )  # fmt: skip
        for i in range(n):
            finish[1, i] = finish[0, i]
            for c in range(clock.shape[2]):
                clock[1, i + 1, c] = clock[0, i + 1, c]
        value[1] = min(value[1], value[0])
    used = np.zeros(devices)
    for u in range(len(device)):
        used[device[u]] += resident[u]
    mark = np.full(n, -1, np.int64)
    old_order = order.copy()
    moved, moved_from = np.empty(2 * n, np.int64), np.empty(2 * n, np.int64)
    bits = int(np.log2(n)) + 1  # runs and ways are as long as powers of two
    for trial in range(count):
        at = np.random.randint(n)
        kind = np.random.randint(3)
        first = last = n  # the positions that change

        changed = 0
        if kind != 0:  # the next ops of a model on one device go to another; and perhaps some go the other way
            source, target = device[unit[order[at]]], np.random.randint(devices)
            begin = at
            for _ in range(np.random.randint(1, 3) if target != source else 0):
                most = changed + (1 << np.random.randint(bits))
                start = changed
                i = begin
                while i < n and changed < most:
                    op = order[i]
                    u = unit[op]
                    i += 1
                    if device[u] != source or model[op] != model[order[begin]]:
                        continue
                    if not allowed[u, target] or used[target] + resident[u] > room[target]:
                        break
                    moved[changed], moved_from[changed] = u, source
                    changed += 1
                    device[u] = target
                    used[source] -= resident[u]
                    used[target] += resident[u]
                if changed > start:
                    first = min(first, begin if len(device) == n else 0)  # a unit may have ops further ahead
                source, target = target, source
                begin = min(max(at + np.random.randint(-8, 9), 0), n - 1)

        if kind != 1:  # an op goes ahead, with what it needs, or back, with what needs it
            reach = 1 << np.random.randint(1, bits + 1)
            to = min(max(at + np.random.randint(-reach, reach + 1), 0), n - 1)
            begin, end = min(at, to), max(at, to)
            mark[order[at]] = trial
            follows = 0
            if to < at:
                for i in range(at - 1, to - 1, -1):
                    op = order[i]
                    for j in range(output_ptr[op], output_ptr[op + 1]):
                        if mark[consumer[j]] == trial:
                            mark[op] = trial
                            follows += 1
                            break
            else:
                for i in range(at + 1, to + 1):
                    op = order[i]
                    for j in range(input_ptr[op], input_ptr[op + 1]):
                        if mark[producer[j]] == trial:
                            mark[op] = trial
                            follows += 1
                            break
            if follows < end - begin:  # else nothing changes place
                first, last = min(first, begin), end
                left = begin if to < at else end - follows  # where the marked ops go
                right = begin + follows + 1 if to < at else begin  # and the others
                for i in range(begin, end + 1):
                    op = old_order[i]
                    if mark[op] == trial:
                        order[left] = op
                        left += 1
                    else:
                        order[right] = op
                        right += 1
        if first == n:
            continue

        limit = value[0] - temperature * np.log(1.0 - np.random.random())
        found = _value_from(
            first, limit, order, device, clock[1], finish[1],
            seconds, model, input_ptr, producer, size, latency, per_byte, unit, stored,
        )  # fmt: skip
        accepted = found <= limit
        new, old = (1, 0) if accepted else (0, 1)
        for i in range(first, n):
            finish[old, order[i]] = finish[new, order[i]]
            for c in range(clock.shape[2]):
                clock[old, i + 1, c] = clock[new, i + 1, c]
        if accepted:
            value[0] = found
            if last < n:
                for i in range(first, last + 1):
                    old_order[i] = order[i]
            if found < value[1]:
                value[1] = found
                for i in range(n):
                    best_order[i] = order[i]
                for u in range(len(device)):
                    best_device[u] = device[u]
        else:
            if last < n:
                for i in range(first, last + 1):
                    order[i] = old_order[i]
            for i in range(changed - 1, -1, -1):
                u = moved[i]
                used[device[u]] -= resident[u]
                used[moved_from[i]] += resident[u]
                device[u] = moved_from[i]
