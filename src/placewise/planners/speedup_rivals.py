"""What Talos is compared with: whole models by average speedup, ops by transient speedup, the shortest model first."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placewise.driver import Context
from placewise.graph import Floats, Ints
from placewise.planners import planner
from placewise.planners.blocks import fastest_first
from placewise.planners.heft import schedule
from placewise.planners.order_search import strict_only
from placewise.planners.talos import Homes
from placewise.problem import Problem


@planner("aswm", objectives={"latency", "completion"}, supports=strict_only)
def average_speedup(problem: Problem, ctx: Context) -> tuple[Ints, Ints]:
    """Whole models by average speedup: the highest on the fastest device (ASWM; Salus, Allox, Gavel, as Talos says).

    The average is the time of all ops on the slowest device over that on the fastest. The second model goes to the
    second fastest device and so on; the slowest gets the rest. What does not fit goes to the fastest device with room.
    """
    devices, total = fastest_first(problem), _model_seconds(problem)
    with np.errstate(divide="ignore", invalid="ignore"):
        speedup = np.nan_to_num(total[:, devices[-1]] / total[:, devices[0]], nan=1.0)
    rank = np.argsort(-speedup, kind="stable")
    device = np.empty(len(rank), np.int64)
    device[rank] = np.array(devices)[np.minimum(np.arange(len(rank)), len(devices) - 1)]
    return _whole_models(problem, rank, device)


@planner("spt", objectives={"latency", "completion"}, supports=strict_only)
def shortest_model_first(problem: Problem, ctx: Context) -> tuple[Ints, Ints]:
    """The shortest model first, each where it ends first as a whole (SPT; Smith 1956, doi:10.1002/nav.3800030106)."""
    total = _model_seconds(problem)
    rank = np.argsort(total.min(axis=1), kind="stable")
    load, device = np.zeros(problem.num_devices), np.zeros(len(rank), np.int64)
    for model in rank.tolist():
        device[model] = (load + total[model]).argmin()
        load[device[model]] += total[model, device[model]]
    return _whole_models(problem, rank, device)


@planner("tsam", objectives={"latency", "completion"}, supports=strict_only, compile=schedule)
def transient_speedup(problem: Problem, ctx: Context) -> tuple[Ints, Ints]:
    """Free devices take the ready op with the largest speedup, and never wait (TSAM; Baechi, FastT, as Talos says).

    The speedup of an op on a device is its mean time on the others over its time there. Where time runs out before all
    ops are placed, the answer is HEFT's.
    """
    graph, homes = problem.graph, Homes(problem)
    speedup = _speedup_over_others(problem)
    position = np.empty(graph.num_ops, np.int64)
    position[graph.topological_order] = np.arange(graph.num_ops)
    start, out = graph.out_edges
    waiting = np.bincount(graph.consumers[~graph.is_stored[graph.edge_producer]], minlength=graph.num_ops)
    queues: list[list[tuple[float, int, int]]] = [[] for _ in range(problem.num_devices)]

    def offer(op: int) -> None:
        for d in np.flatnonzero(homes.may([op])).tolist():
            heapq.heappush(queues[d], (-speedup[op, d], int(position[op]), op))

    for op in np.flatnonzero((waiting == 0) & ~graph.is_stored).tolist():
        offer(op)
    finish, started = np.zeros(graph.num_ops), graph.is_stored.copy()
    order: list[int] = np.flatnonzero(started).tolist()
    running: list[tuple[float, int, int, int]] = []
    idle, now = [True] * problem.num_devices, 0.0
    while not ctx.should_stop():
        while True:  # the best pair of a free device and a ready op
            for queue in queues:
                while queue and started[queue[0][2]]:
                    heapq.heappop(queue)
            pairs = [(*queue[0], d) for d, queue in enumerate(queues) if queue and idle[d]]
            if not pairs:
                break
            _, _, op, d = min(pairs)
            if not homes.may([op])[d]:  # there is less room by now, or one of its group has a home
                heapq.heappop(queues[d])
                offer(op)
                continue
            finish[op] = max(now, homes.arrival([op], finish)[d]) + problem.seconds[op, d]
            homes.settle([op], d)
            started[op], idle[d] = True, False
            order.append(op)
            heapq.heappush(running, (finish[op], int(position[op]), op, d))
        if not running:
            return homes.placement(), np.array(order, np.int32)
        now = running[0][0]
        while running and running[0][0] == now:
            _, _, op, d = heapq.heappop(running)
            idle[d] = True
            for reader in graph.consumers[out[start[op] : start[op + 1]]].tolist():
                waiting[reader] -= 1
                if waiting[reader] == 0:
                    offer(reader)
    return schedule(problem)


def _model_seconds(problem: Problem) -> Floats:
    """[models, D] the time of each model on each device; an op that may not run there counts where it is slowest."""
    finite = np.where(problem.allowed, problem.seconds, 0.0)
    counted = np.where(problem.allowed, finite, finite.max(axis=1, keepdims=True, initial=0.0))
    total = np.zeros((len(problem.graph.models), problem.num_devices))
    np.add.at(total, problem.graph.model, counted)
    return total


def _speedup_over_others(problem: Problem) -> Floats:
    """[N, D] mean time on the other devices that may run the op over its time on each; 1 where there is no other."""
    finite = np.where(problem.allowed, problem.seconds, 0.0)
    others = problem.allowed.sum(axis=1, keepdims=True) - 1
    mean = (finite.sum(axis=1, keepdims=True) - finite) / np.maximum(others, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((others > 0) & (mean != finite), mean / finite, 1.0)


def _whole_models(problem: Problem, rank: NDArray[Any], device: NDArray[Any]) -> tuple[Ints, Ints]:
    """(placement, order): models one after another in this rank, each on its device as far as it fits there."""
    graph, homes, devices = problem.graph, Homes(problem), fastest_first(problem)
    turn = np.empty(len(rank), np.int64)
    turn[rank] = np.arange(len(rank))
    position = np.empty(graph.num_ops, np.int64)
    position[graph.topological_order] = np.arange(graph.num_ops)
    start, out = graph.out_edges
    waiting = np.bincount(graph.consumers, minlength=graph.num_ops)
    order: list[int] = []
    # Models may read each other: an op whose turn has come may still have to wait for another model's.
    ready = [(int(turn[graph.model[op]]), int(position[op]), op) for op in np.flatnonzero(waiting == 0).tolist()]
    heapq.heapify(ready)
    while ready:
        op = heapq.heappop(ready)[2]
        order.append(op)
        if not graph.is_stored[op]:
            may, wanted = homes.may([op]), int(device[graph.model[op]])
            homes.settle([op], wanted if may[wanted] else next(d for d in devices if may[d]))
        for reader in graph.consumers[out[start[op] : start[op + 1]]].tolist():
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, (int(turn[graph.model[reader]]), int(position[reader]), reader))
    return homes.placement(), np.array(order, np.int32)
