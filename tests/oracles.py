"""Answers that are right because they try everything, and small random problems to try it on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from placewise.cluster import Cluster, Device, Link
from placewise.costs import Costs
from placewise.graph import Graph
from placewise.problem import OBJECTIVES, Execution, Problem
from placewise.simulator import evaluate

Placement = NDArray[np.int32]


def all_placements(problem: Problem) -> Placement:
    """[B, N] every placement that keeps pins, groups and supported devices."""
    first_of_unit = np.unique(problem.unit, return_index=True)[1]
    choices = [np.flatnonzero(problem.allowed[op]).tolist() for op in first_of_unit]
    by_unit = np.array(list(itertools.product(*choices)), np.int32)
    return by_unit[:, problem.unit]


def all_orders(problem: Problem) -> Iterator[Placement]:
    """Every topological order of the graph."""
    edges = list(zip(problem.graph.edge_producer.tolist(), problem.graph.consumers.tolist(), strict=True))
    for order in itertools.permutations(range(problem.num_ops)):
        position = {op: i for i, op in enumerate(order)}
        if all(position[producer] < position[consumer] for producer, consumer in edges):
            yield np.array(order, np.int32)


def brute_force(problem: Problem, order: Placement | None = None) -> tuple[float, Placement | None]:
    """(value, placement) of the best feasible placement; infinity and None if there is none."""
    placements = all_placements(problem)
    score = evaluate(problem, placements, order).score
    best = int(np.argmin(score))
    return (float(score[best]), placements[best]) if np.isfinite(score[best]) else (math.inf, None)


def brute_force_orders(problem: Problem) -> tuple[float, Placement | None, Placement | None]:
    """(value, placement, order) of the best over every order too: up to about 5 ops on 2 devices."""
    found = [(*brute_force(problem, order), order) for order in all_orders(problem)]
    value, placement, order = min(found, key=lambda case: case[0])
    return value, placement, order if placement is not None else None


def random_problem(
    rng: np.random.Generator,
    *,
    max_ops: int = 7,
    max_devices: int = 3,
    objective: str | None = None,
    execution: Execution | None = None,
    memory: bool = True,
    integer_times: bool = False,
) -> Problem:
    """A small problem with some of everything that a problem can have.

    `memory=False` gives devices that hold anything. `integer_times` makes all times and sizes small integers, so that
    sums are exact and ties are frequent.
    """

    def amounts(size: int | tuple[int, ...], most: int = 9) -> NDArray[np.float64]:
        return rng.integers(0, most + 1, size).astype(float) if integer_times else rng.exponential(most / 2, size)

    def chance(probability: float) -> bool:
        return bool(rng.random() < probability)

    objective = objective or str(rng.choice(OBJECTIVES))
    execution = execution or random_execution(rng, objective)
    graph = _random_graph(rng, int(rng.integers(0, max_ops + 1)), amounts)
    cluster = _random_cluster(rng, int(rng.integers(1, max_devices + 1)), amounts, integer_times)
    n, devices, names = graph.num_ops, cluster.num_devices, cluster.device_names

    if memory and chance(0.5):
        held = float(graph.resident_bytes.sum() + (graph.tensor_bytes.sum() if execution.memory == "live" else 0.0))
        limits = np.where(rng.random(devices) < 0.3, math.inf, held * rng.uniform(0.2, 1.2, devices))
        cluster = cluster.with_memory(dict(zip(names, limits.tolist(), strict=True)))

    # Each group has a home where all its ops may run; elsewhere, some may not.
    forbidden = (names[-1],) if devices > 1 and chance(0.1) else ()
    group_home = rng.integers(0, devices - len(forbidden), n + 1)
    home = np.where(graph.group >= 0, group_home[graph.group], rng.integers(0, devices - len(forbidden), n))
    seconds = amounts((n, devices))
    seconds[graph.is_stored] = 0.0
    seconds[(rng.random((n, devices)) < 0.15) & (np.arange(devices) != home[:, None])] = math.inf
    pinned = np.flatnonzero(rng.random(n) < 0.1)
    return Problem(
        graph,
        cluster,
        Costs.create(seconds),
        objective=objective,
        execution=execution,
        pins={graph.op_names[op]: names[home[op]] for op in pinned},
        forbidden=forbidden,
        contiguous=chance(0.1),
        max_devices=int(rng.integers(1, devices + 1)) if chance(0.1) else None,
    )


def random_execution(rng: np.random.Generator, objective: str) -> Execution:
    """Any settings that the objective allows."""

    def either(*choices: str) -> str:
        return str(rng.choice(choices))

    return Execution(
        concurrency="parallel" if objective == "throughput" else either("parallel", "parallel", "sequential"),
        contention=either("channel", "none"),
        sends=either("tensor", "edge"),
        memory=either("live", "static"),
        prefetch=int(rng.integers(1, 4)),
        overlap=bool(rng.integers(2)),
        staged=bool(rng.integers(2)),
        pipeline=either("1f1b", "gpipe"),
    )


def _random_graph(rng, n, amounts) -> Graph:
    """Ops in random positions; up to two outputs each, any number of readers; a few parameters, groups and models."""
    position = rng.permutation(n)  # of the i-th op in dataflow order
    stored = rng.random(n) < 0.2
    producers = np.flatnonzero(rng.random(n) < 0.9)
    producers = np.concatenate([producers, producers[rng.random(len(producers)) < 0.3]])
    density = rng.uniform(0.1, 0.9)
    edges = [
        (tensor, consumer)
        for tensor, producer in enumerate(producers)
        for consumer in range(producer + 1, n)
        if not stored[consumer] and rng.random() < density
    ]
    models = int(rng.integers(1, 4))
    number = np.argsort(position)

    def column(by_dataflow):
        return np.asarray(by_dataflow)[number]

    return Graph.create(
        op_names=[f"op{i}" for i in range(n)],
        op_kinds=[("parameter" if stored[i] else "op") for i in number],
        tensor_producer=position[producers].astype(int),
        tensor_bytes=amounts(len(producers)),
        edge_tensor=[tensor for tensor, _ in edges],
        edge_consumer=[int(position[consumer]) for _, consumer in edges],
        scratch=amounts(n, 2),
        resident=np.where(rng.random(n) < 0.5, amounts(n), 0.0),
        phase=column(np.sort(rng.integers(0, 3, n))) if rng.random() < 0.5 else 0,
        model=rng.integers(0, models, n),
        models=[f"model{m}" for m in range(models)],
        group=np.where(rng.random(n) < 0.3, rng.integers(0, 2, n), -1),
    )


def _random_cluster(rng, devices, amounts, integer_times) -> Cluster:
    """Links that differ; some of no latency or unlimited bandwidth; some that share a bus."""
    names = [f"device{d}" for d in range(devices)]
    bus = ("bus",) if rng.random() < 0.3 else ()
    latency = amounts((devices, devices), 2) * (rng.random() < 0.5)
    bandwidth = np.full((devices, devices), 1.0) if integer_times else rng.uniform(0.5, 5.0, (devices, devices))
    bandwidth[rng.random((devices, devices)) < 0.2] = math.inf
    links = [
        Link(a, b, bandwidth[i, j], latency[i, j], via=bus if rng.random() < 0.7 else ())
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if i != j
    ]
    return Cluster(tuple(Device(name, copies=bool(rng.random() < 0.8)) for name in names), tuple(links))
