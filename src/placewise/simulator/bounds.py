"""How good any plan could be: lower bounds on the objective, so that a plan can say how far from the best it is.

Eight arguments, each valid for every feasible plan:

- *path*: along a chain of ops, each on its best device and each change of device paid for, time only adds up;
- *path under memory*: the same for one heavy path, when not all of its ops fit where they are fastest;
- *path in stretches*: the same, when not all of them fit on one device, so that the path must move on (`stretches.py`);
- *blocks in stretches*: the same, of all that lies between ops that everything passes through (`blocks.py`);
- *streaming*: the same for one path, the devices and the channels together, when weights may be at home elsewhere and
  not all fit where they are read (`streaming.py`);
- *turns*: what an op waits for, and what is too far away elsewhere, takes turns on the devices near it (`turns.py`);
- *unit*: ops that must share a device run there one after another;
- *area*: spread the work over the devices as thinly as their speeds and memories allow, as if ops could be cut up.

The area is a linear programme. Its dual has one price per device for a second of its time and one for a byte of its
memory, however many ops there are, and *any* prices prove a bound: at least what the ops cost where each is cheapest,
less what the memory is worth. So the solver is only asked for good prices; what they prove is then added up over all
ops, and neither its tolerances nor stopping early can make the bound wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placewise.graph import Floats, Ints
from placewise.problem import Problem
from placewise.simulator.alike import kinds, most_replicas
from placewise.simulator.blocks import in_blocks
from placewise.simulator.pieces import in_pieces
from placewise.simulator.streaming import Streaming, streaming
from placewise.simulator.stretches import stretched
from placewise.simulator.turns import Turns, turns
from placewise.simulator.working import takes_time, working_set

Flags = NDArray[np.bool_]

INGREDIENTS: Final = ("compute", "transfer", "memory")
_MIXED: Final = ("streaming", "turns")  # arguments of paths and devices together
_EXACT: Final = 512  # up to so many units, the area is solved in one go
_GROUPS: Final = 64  # more are priced in so many groups, by cutting planes
_ROUNDS: Final = 20  # of cutting planes
_CLOSE: Final = 1e-4  # relative gap at which prices are good enough
_LONGEST: Final = 5_000  # ops of a path that is cut up
_WITNESSED: Final = 2_000  # ops whose heads and tails are kept
_HIGHEST: Final = 1e6  # price of all bytes, in units of all work: keeps the solver's numbers sane


@dataclass(frozen=True)
class Bound:
    """No feasible plan has a smaller objective than `value`, the largest of the parts (seconds).

    An infinite part named "memory" proves that there is no feasible plan.
    """

    value: float
    parts: dict[str, float]
    prices: tuple[Floats, Floats] | None = None  # behind the area: of time [phases, D], seconds per byte [D]
    path: tuple[int, ...] = ()  # the ops behind the path in stretches
    streaming: Streaming | None = None  # what stands behind it
    turns: Turns | None = None  # what stands behind them


def lower_bound(problem: Problem) -> Bound:
    """The bound of a problem, computed once."""
    if "bound" not in problem.derived:
        problem.derived["bound"] = _bound(problem) if problem.num_ops else Bound(0.0, {})
    found: Bound = problem.derived["bound"]
    return found


def made_of(problem: Problem) -> dict[str, dict[str, float]]:
    """What each part of the bound owes to compute, to transfers and to limits of memory, in seconds.

    Compute is what the part comes to if transfers are free and memory has no end. Transfers are what they add while
    memory has no end, and memory what is then missing to the part.
    """
    cluster, parts = problem.cluster, lower_bound(problem).parts
    roomy = cluster.with_memory(dict.fromkeys(cluster.device_names, np.inf))
    links = tuple(replace(link, bandwidth=np.inf, latency=0.0) for link in cluster.links)
    free, paid = (
        lower_bound(replace(problem, cluster=relaxed)).parts for relaxed in (replace(roomy, links=links), roomy)
    )
    found = {}
    for name, seconds in parts.items():
        same = ["path"] if name.startswith(("path", "blocks")) else ["path", "area", name] if name in _MIXED else [name]
        steps = [0.0, *(max(parts.get(part, 0.0) for part in same) for parts in (free, paid)), seconds]
        found[name] = {what: max(0.0, b - a) for what, a, b in zip(INGREDIENTS, steps, steps[1:], strict=False)}
    return found


def _bound(problem: Problem) -> Bound:
    """What each argument proves, and what stands behind it."""
    work = _work(problem)
    if _overflows(work):
        return Bound(np.inf, {"memory": np.inf})
    if problem.objective == "completion":
        parts = _completion_parts(problem, work)
        return Bound(max(parts.values()), parts)
    area, prices = _priced_area(work)
    fetched: Streaming | None = None
    queues: Turns | None = None
    parts, path = {"unit": float(work.alone().max()), "area": area}, tuple[int, ...]()
    if problem.objective == "latency":
        parts["path"] = float(_longest_path_through(problem, work, np.zeros_like(problem.graph.model)).max())
        queues = _turns(problem, work, np.zeros_like(problem.graph.model), prices[0][0])
        under_memory, path = _paths_under_memory(problem, work)
        fetched = _streaming(problem, work)
        if fetched:
            under_memory["streaming"] = fetched.seconds
        if queues:
            under_memory["turns"] = float(queues.seconds[0])
        parts |= {name: seconds for name, seconds in under_memory.items() if seconds > parts["path"]}
    return Bound(max(parts.values()), parts, prices, path, fetched, queues if problem.num_ops <= _WITNESSED else None)


def _completion_parts(problem: Problem, work: _Work) -> dict[str, float]:
    """The k-th model to finish takes no less than the k-th shortest alone, nor than the k least shares of the area."""
    models = len(problem.graph.models)
    alone, queue = np.zeros(models), np.zeros(models)
    np.maximum.at(alone, work.model, work.alone())
    np.maximum.at(alone, problem.graph.model, _longest_path_through(problem, work, problem.graph.model))
    queues = _turns(problem, work, problem.graph.model, _market(work).best_price()[0])
    if queues:
        alone[: len(queues.seconds)] = np.maximum(alone[: len(queues.seconds)], queues.seconds)
    for m in np.unique(work.model) if models > 1 else ():
        alone[m] = max(alone[m], _area(work.of_model(m)))
    # Prices of memory are worth their while only once enough models share it; the first to finish do without.
    for view in (work, replace(work, capacity=None)):
        market = _market(view)
        price = market.best_price()
        share = np.bincount(work.model, market.cheapest(price)[1], models)
        queue = np.maximum(queue, market.proved(price, np.cumsum(np.sort(share))))
    alone.sort()
    sums = {"alone": alone, "area": queue, "queue": np.maximum(alone, queue)}
    return {name: float(ends.sum()) * (1.0 - work.slack) for name, ends in sums.items()}


# ---- the work --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Work:
    """What is placed as a whole. An item is a unit; for `completion`, the ops of a unit that belong to one model."""

    item: Ints  # [N] the item of each op
    model: Ints  # [U]
    seconds: Floats  # [phases, U, D] zero where the item may not run; two phases where each has its own busiest device
    resident: Floats  # [U] bytes
    working: Floats  # [N] bytes that each op holds besides while it runs; zero where only resident ones count
    may: Flags  # [U, D] where the item is allowed and its unit fits, with what any one of its ops holds
    capacity: Floats | None  # [D] bytes; None where memory is left out of account
    sequential: bool
    copies: Ints  # [D] devices that may share the work of a device
    slack: float  # relative; above what rounding can amount to in sums over all ops, here and in the simulator

    def alone(self) -> Floats:
        """[U] seconds of each item on its fastest device, or on as many like it as may share the work."""
        fastest: Floats = np.where(self.may, self.seconds.sum(axis=0) / self.copies, np.inf).min(axis=1)
        return fastest * (1.0 - self.slack)

    def of_model(self, model: int) -> _Work:
        mine = self.model == model
        return replace(
            self,
            model=self.model[mine],
            seconds=self.seconds[:, mine],
            resident=self.resident[mine],
            may=self.may[mine],
        )


def _work(problem: Problem) -> _Work:
    graph, unit = problem.graph, problem.unit
    slack = 1e-12 + 4.0 * float(np.finfo(np.float64).eps) * (graph.num_ops + graph.num_edges)
    model = graph.model if problem.objective == "completion" else np.zeros_like(graph.model)
    key = unit.astype(np.int64) * len(graph.models) + model
    first, item = np.unique(key, return_index=True, return_inverse=True)[1:]
    seconds = np.where(problem.allowed & ~graph.is_stored[:, None], problem.seconds, 0.0)
    if problem.execution.concurrency == "slots":
        seconds[:, [not device.copies for device in problem.cluster.devices]] = 0.0  # pools run all at once
    two_phases = problem.objective == "throughput" and problem.execution.pipeline == "gpipe"
    phases = [graph.phase == 0, graph.phase > 0] if two_phases else [graph.phase >= 0]
    copies = np.ones(problem.num_devices, np.int32)
    if problem.objective == "throughput" and problem.execution.replicate:
        for devices, most in zip(kinds(problem), most_replicas(problem), strict=True):
            copies[list(devices)] = most
    working = working_set(problem) if problem.execution.memory == "live" else np.zeros(graph.num_ops)
    held = np.where(takes_time(problem), working[:, None], 0.0) + problem.per_unit(graph.resident_bytes)[unit][:, None]
    fits = problem.per_unit(held, np.maximum) * (1.0 - slack) <= problem.capacity
    return _Work(
        item=item.astype(np.int32),
        model=model[first],
        seconds=np.stack([_sums(item, seconds * phase[:, None], len(first)) for phase in phases]),
        resident=_sums(item, graph.resident_bytes[:, None], len(first))[:, 0],
        working=working,
        may=(problem.allowed & fits[unit])[first],
        capacity=problem.capacity,
        sequential=problem.execution.concurrency == "sequential",
        copies=copies,
        slack=slack,
    )


def _sums(owner: NDArray[Any], values: Floats, count: int) -> Floats:
    """[count, D] the rows of `values`, added up by owner."""
    return np.stack([np.bincount(owner, column, count) for column in values.T], axis=1)


# ---- path ------------------------------------------------------------------------------------------------------------


def _longest_path_through(problem: Problem, work: _Work, model: Ints) -> Floats:
    """[N] seconds that any plan needs from time zero, through each op, to the end of its model."""
    graph, cluster = problem.graph, problem.cluster
    position = np.empty(graph.num_ops, np.int32)
    position[graph.topological_order] = np.arange(graph.num_ops, dtype=np.int32)
    tensors = np.argsort(position[graph.tensor_producer], kind="stable")
    seconds = np.where(graph.is_stored[:, None], 0.0, problem.seconds)
    seconds = np.where(work.may[work.item], seconds, np.inf)
    latency, per_byte = cluster.latency, cluster.seconds_per_byte
    if problem.execution.concurrency == "slots":  # each accelerator pays for its end; parameters are only received
        copies = np.array([int(device.copies) for device in cluster.devices])
        latency, per_byte = (copies[:, None] + copies) * latency, (copies[:, None] + copies) * per_byte
        tensors = tensors[~graph.is_stored[graph.tensor_producer[tensors]]]
    before, after = _path_kernel(
        tensors, seconds, problem.unit, model, graph.tensor_producer, graph.tensor_bytes, graph.consumer_ptr,
        graph.consumers, latency, per_byte,
    )  # fmt: skip
    through: Floats = (before + seconds + after).min(axis=1)
    return through * (1.0 - work.slack)


def _paths_under_memory(problem: Problem, work: _Work) -> tuple[dict[str, float], tuple[int, ...]]:
    """What single paths prove where not everything fits on one device, and the path that proves most in stretches."""
    found, chosen = {"path under memory": 0.0, "path in stretches": 0.0}, tuple[int, ...]()
    if work.resident.sum() + float(work.working.max(initial=0.0)) <= problem.capacity.min():
        return found, ()
    if not work.sequential and work.resident.sum() > problem.capacity.min():
        found["path under memory"] = _path_under_memory(problem, work)
    if problem.execution.concurrency == "slots":
        fast, may = np.where(work.may[work.item], problem.seconds, np.inf).min(axis=1), work.may[work.item]
        for through in dict.fromkeys(map(tuple, _heavy_paths(problem, fast))):
            value = in_pieces(problem, list(through), may, work.slack)
            found["path under memory"] = max(found["path under memory"], value)
        return found, ()
    seconds = np.where(work.may[work.item], problem.seconds, np.inf)
    for path in _heavy_paths(problem, seconds.min(axis=1)):
        value = stretched(problem, path, seconds, work.slack)
        if value > found["path in stretches"]:
            found["path in stretches"], chosen = value, tuple(path)
    if chosen:
        found["blocks in stretches"] = in_blocks(problem, list(chosen), seconds, work.slack)
    return found, chosen


def _heavy_paths(problem: Problem, least: Floats) -> Iterator[list[int]]:
    """Paths of ops that run, heavy in time and more and more in bytes."""
    resident = problem.per_unit(problem.graph.resident_bytes)
    share = resident[problem.unit] / max(float(resident.sum()), 1e-300) * least.sum()
    for weight in (0.0, 1.0, 4.0):
        path = _heaviest_path(problem, least + weight * share)
        path = path[int(problem.graph.is_stored[path[0]]) :]
        if 0 < len(path) <= _LONGEST:
            yield path


def _path_under_memory(problem: Problem, work: _Work) -> float:
    """A path, whose ops run one after another, if memory keeps some of them off their fastest device.

    To the path, the cluster is a sequential one; the other ops take no time but want their bytes.
    """
    seconds = np.where(problem.allowed & ~problem.graph.is_stored[:, None], problem.seconds, 0.0)
    on_path = np.zeros(problem.num_ops, np.bool_)
    on_path[_usual_path(problem)] = True
    along = _sums(work.item, seconds * on_path[:, None], len(work.resident))[None]
    return _area(replace(work, seconds=along, sequential=True))


def _streaming(problem: Problem, work: _Work) -> Streaming | None:
    """What is proved where weights may be fetched, if memory is short of them."""
    if problem.execution.concurrency == "slots" or work.resident.sum() <= problem.capacity.min():
        return None
    return streaming(problem, _usual_path(problem), work.may, work.slack)


def _turns(problem: Problem, work: _Work, model: Ints, price: Floats) -> Turns | None:
    """What is proved by ops that an op waits for, where devices work at the same time."""
    if problem.execution.concurrency != "parallel":
        return None
    seconds = np.where(problem.graph.is_stored[:, None], 0.0, problem.seconds)
    found = turns(problem, np.where(work.may[work.item], seconds, np.inf), model, price)
    return replace(found, seconds=found.seconds * (1.0 - work.slack))


def _usual_path(problem: Problem) -> list[int]:
    """The heaviest path if each op takes the mean of its times."""
    seconds = np.where(problem.allowed & ~problem.graph.is_stored[:, None], problem.seconds, 0.0)
    return _heaviest_path(problem, seconds.sum(axis=1) / np.maximum(problem.allowed.sum(axis=1), 1))


def _heaviest_path(problem: Problem, weight: Floats) -> list[int]:
    graph = problem.graph
    rest = weight.copy()  # heaviest path from each op to the end, and the reader that it goes on with
    following = np.full(graph.num_ops, -1)
    first, edges = graph.out_edges
    readers = graph.consumers[edges]
    for op in reversed(graph.topological_order.tolist()):
        mine = readers[first[op] : first[op + 1]]
        if len(mine):
            following[op] = mine[rest[mine].argmax()]
            rest[op] += rest[following[op]]
    path = [int(rest.argmax())]
    while following[path[-1]] >= 0:
        path.append(int(following[path[-1]]))
    return path


@njit(cache=True, nogil=True)
def _path_kernel(tensors, seconds, unit, model, producer, size, consumer_ptr, consumers, latency, per_byte):  # type: ignore[no-untyped-def]
    """(before, after) [N, D]: least time from zero to an op's start, and from its end to its model's, on that device.

    Every op chooses its best device for each neighbour separately, so no plan can be faster. Neighbours that must share
    a device do. `tensors` are in the dataflow's order; an op's time is infinite where it may not run.
    """
    num_ops, num_devices = seconds.shape
    before = np.zeros((num_ops, num_devices))
    after = np.zeros((num_ops, num_devices))
    transfer = np.empty((num_devices, num_devices))
    arrival = np.empty(num_devices)

    for i in range(len(tensors)):
        t = tensors[i]
        op = producer[t]
        for d in range(num_devices):
            arrival[d] = np.inf
            for a in range(num_devices):
                there = before[op, a] + seconds[op, a] + (latency[a, d] + size[t] * per_byte[a, d])
                arrival[d] = min(arrival[d], there)
        for e in range(consumer_ptr[t], consumer_ptr[t + 1]):
            reader = consumers[e]
            together = unit[reader] == unit[op]
            for d in range(num_devices):
                there = before[op, d] + seconds[op, d] if together else arrival[d]
                before[reader, d] = max(before[reader, d], there)

    for i in range(len(tensors) - 1, -1, -1):
        t = tensors[i]
        op = producer[t]
        for a in range(num_devices):
            for d in range(num_devices):
                transfer[a, d] = latency[a, d] + size[t] * per_byte[a, d]
        for e in range(consumer_ptr[t], consumer_ptr[t + 1]):
            reader = consumers[e]
            if model[reader] != model[op]:
                continue
            together = unit[reader] == unit[op]
            for a in range(num_devices):
                least = after[reader, a] + seconds[reader, a]
                if not together:
                    for d in range(num_devices):
                        least = min(least, transfer[a, d] + seconds[reader, d] + after[reader, d])
                after[op, a] = max(after[op, a], least)
    return before, after


# ---- area ------------------------------------------------------------------------------------------------------------


def _area(work: _Work) -> float:
    return _priced_area(work)[0]


def _priced_area(work: _Work) -> tuple[float, tuple[Floats, Floats]]:
    """What is proved, and the prices that prove it: of time, and in seconds per byte."""
    market, phases = _market(work), len(work.seconds)
    price = market.best_price()
    byte = price[phases:].sum(axis=0) * market.seconds / max(float(work.resident.sum()), 1e-300)
    return float(market.proved(price, market.cheapest(price)[1].sum())), (price[:phases], byte)


def _overflows(work: _Work) -> bool:
    """Whether the resident bytes cannot fit even cut up: at some prices they cost more than all memory is worth."""
    if not work.may.any(axis=1).all():
        return True
    market = _market(work)
    if len(market.amount) == len(work.seconds):  # memory cannot bind
        return False
    bytes_only = replace(
        market, amount=market.amount[-1:], supply=market.supply[-1:], low=market.low[-1:],
        high=np.minimum(market.high[-1:], 1.0), sums_to_one=market.sums_to_one[-1:],
    )  # fmt: skip
    price = bytes_only.best_price()
    return bool(bytes_only.proved(price, bytes_only.cheapest(price)[1].sum()) > 0.0)


@dataclass(frozen=True, eq=False)
class _Market:
    """The area's dual: prices [R, D] of resources on devices, and what they prove. Amounts are shares of a whole."""

    amount: Floats  # [R, U, D] what an item takes of a resource on a device: its time in each phase, its bytes
    supply: Floats  # [R, D] what there is of it; zero for time, which is what is minimised
    low: Floats  # [R, D] the least price
    high: Floats  # [R, D] the highest price
    sums_to_one: Flags  # [R] whether prices do over the devices: the busiest has at least the weighted mean load
    may: Flags  # [U, D]
    seconds: float  # that a cost of one stands for
    slack: float

    def cheapest(self, price: Floats) -> tuple[NDArray[np.intp], Floats]:
        """(device [U], cost [U]) where each item costs least."""
        cost = np.where(self.may, np.einsum("rud,rd->ud", self.amount, price), np.inf)
        device = cost.argmin(axis=1)
        return device, cost[np.arange(len(cost)), device]

    def proved(self, price: Floats, cost: Any) -> Any:
        """Seconds that no plan of items with this total cost can beat."""
        worth = (price * self.supply).sum()
        return np.maximum(0.0, cost - worth - self.slack * (cost + worth)) * self.seconds

    def best_price(self) -> Floats:
        """Prices that prove nearly as much as any, by Kelley's cutting planes.

        What a group of items costs is at most what it costs under any one assignment, which is linear in the prices.
        The solver finds the best prices for the assignments seen so far; the cheapest assignment at these prices is
        seen next. An item in a group of its own has all its assignments seen at the start: one round is exact.
        """
        devices = self.may.shape[1]
        group = self._groups()
        best = np.where(self.sums_to_one[:, None], 1.0 / devices, self.low)
        device, cost = self.cheapest(best)
        most = cost.sum() - (best * self.supply).sum()
        seen = [self._assigned(np.where(self.may[:, d], d, device), group) for d in range(devices)]
        for _ in range(_ROUNDS):
            found = self._solve(np.concatenate(seen), np.tile(np.arange(seen[0].shape[0]), len(seen)))
            if found is None:
                break
            price, promised = found
            device, cost = self.cheapest(price)
            value = cost.sum() - (price * self.supply).sum()
            if value > most:
                best, most = price, value
            if promised - most <= _CLOSE * abs(promised):
                break
            seen.append(self._assigned(device, group))
        return best

    def _groups(self) -> NDArray[np.int64]:
        """[U] items with the same choice of devices and similar tastes are priced together."""
        items, devices = self.may.shape
        if items <= _EXACT:
            return np.arange(items)
        time = np.where(self.may, self.amount[0], np.inf)
        taste = self.amount[-1].max(axis=1) / (time.min(axis=1) + np.finfo(np.float64).tiny)
        order = np.lexsort((taste, time.argmin(axis=1), self.may @ np.exp2(np.arange(devices))))
        group = np.empty(items, np.int64)
        group[order] = np.arange(items) * _GROUPS // items
        return group

    def _assigned(self, device: NDArray[np.intp], group: NDArray[np.int64]) -> Floats:
        """[groups, R * D] what each group takes of each resource on each device, if its items are placed so."""
        items, devices = self.may.shape
        groups = int(group.max()) + 1
        taken = self.amount[:, np.arange(items), device]
        key = group * devices + device
        tables = [np.bincount(key, row, groups * devices).reshape(groups, devices) for row in taken]
        return np.concatenate(tables, axis=1)

    def _solve(self, taken: Floats, group: NDArray[np.int64]) -> tuple[Floats, float] | None:
        """(prices, what they promise) if the groups had no choice but what was seen; None where the solver gives up."""
        from scipy import sparse
        from scipy.optimize import linprog

        resources, devices = self.low.shape
        groups = int(group.max()) + 1
        own = sparse.csr_array((np.ones(len(group)), (np.arange(len(group)), group)))
        shared = np.flatnonzero(self.sums_to_one)
        sums = np.repeat(np.eye(resources)[shared], devices, axis=1)
        free = np.full(groups, np.inf)
        limits: Any = np.stack([np.append(self.low, -free), np.append(self.high, free)], axis=1)
        rows: Any = sparse.hstack([sparse.csr_array(-taken), own])
        solution: Any = linprog(
            c=np.concatenate([self.supply.ravel(), -np.ones(groups)]),
            A_ub=rows,
            b_ub=np.zeros(len(taken)),
            A_eq=np.pad(sums, ((0, 0), (0, groups))),
            b_eq=np.ones(len(shared)),
            bounds=limits,
            method="highs",
        )
        if solution.status != 0:
            return None
        price = np.clip(solution.x[: self.low.size].reshape(self.low.shape), self.low, self.high)
        price[shared] /= price[shared].sum(axis=1, keepdims=True)
        return price, -float(solution.fun)


def _market(work: _Work) -> _Market:
    """Time on every device has a price, or costs its own length where all devices take turns; so have scarce bytes."""
    phases, items, devices = work.seconds.shape
    total = float(work.alone().sum()) or float(work.seconds.sum()) or 1.0
    amount, supply = work.seconds / total, np.zeros((phases, devices))
    low, high = np.full_like(supply, work.sequential), np.ones_like(supply)
    sums_to_one = np.full(phases, not work.sequential)
    stored = float(work.resident.sum())
    if work.capacity is not None and stored > work.capacity.min():
        limited = np.isfinite(work.capacity)
        amount = np.append(amount, np.broadcast_to(work.resident[:, None] / stored, (1, items, devices)), axis=0)
        supply = np.append(supply, [np.where(limited, work.capacity, 0.0) / stored], axis=0)
        low = np.append(low, np.zeros((1, devices)), axis=0)
        high = np.append(high, [np.where(limited, _HIGHEST, 0.0)], axis=0)
        sums_to_one = np.append(sums_to_one, False)
    return _Market(amount, supply, low, high, sums_to_one, work.may, total, work.slack)
