"""Small problems for tests: written down, or drawn at random with some of everything that a problem can have."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from placewise.cluster import Cluster, Device, Link, full_mesh
from placewise.costs import Costs
from placewise.graph import Graph
from placewise.problem import OBJECTIVES, Execution, Problem

# ---- written down ----------------------------------------------------------------------------------------------------


def problem_of(seconds, edges=(), *, sizes=1.0, memory=math.inf, bandwidth=1.0, latency=0.0, cluster=None, **options):
    """Ops with one output each; `edges` are (producer, consumer); per-op columns of the graph are passed on."""
    seconds = np.array(seconds, float)
    n, devices = seconds.shape
    columns = {key: options.pop(key) for key in list(options) if key in Graph.__dataclass_fields__}
    graph = Graph.create(
        op_names=columns.pop("op_names", [f"op{i}" for i in range(n)]),
        tensor_producer=columns.pop("tensor_producer", np.arange(n)),
        tensor_bytes=columns.pop("tensor_bytes", np.broadcast_to(sizes, n)),
        edge_tensor=[tensor for tensor, _ in edges],
        edge_consumer=[consumer for _, consumer in edges],
        **columns,
    )
    limits = np.broadcast_to(memory, devices)
    mesh = full_mesh([Device(f"d{d}", memory=limits[d]) for d in range(devices)], bandwidth, latency)
    return Problem(graph, cluster or mesh, Costs.create(seconds), **options)


def layers(count, *, room, weight=8.0, gpu=1.0, cpu=3.0, **execution):
    """A row of layers, each with a weight of its own, on a GPU with some room and a CPU with plenty."""
    kinds = ["parameter"] * count + ["op"] * count
    edges = [(i, count + i) for i in range(count)] + [(count + i, count + i + 1) for i in range(count - 1)]
    return problem_of(
        [[0.0, 0.0]] * count + [[gpu, cpu]] * count, edges, sizes=[weight] * count + [0.0] * count, op_kinds=kinds,
        memory=[room, math.inf], execution=Execution(**execution),
    )  # fmt: skip


def shared_bus(devices, bandwidth=1.0, latency=0.0, *, memory=math.inf):
    """A cluster whose links all share one channel."""
    names = [f"d{d}" for d in range(devices)]
    links = [Link(a, b, bandwidth, latency, ("bus",)) for a in names for b in names if a != b]
    return Cluster(tuple(Device(name, memory=memory) for name in names), tuple(links))


def renumbered(problem, ops, devices):
    """The same problem with its ops (and, among different producers, its tensors) and devices in another order."""
    graph, cluster = problem.graph, problem.cluster
    number = np.argsort(ops)
    tensors = np.argsort(number[graph.tensor_producer], kind="stable")  # outputs of one op keep their positions
    per_op = ("flops", "bytes_accessed", "scratch", "resident", "phase", "model", "group")
    shuffled = Graph.create(
        op_names=[graph.op_names[op] for op in ops],
        op_kinds=[graph.op_kinds[op] for op in ops],
        tensor_producer=number[graph.tensor_producer[tensors]],
        tensor_bytes=graph.tensor_bytes[tensors],
        edge_tensor=np.argsort(tensors)[graph.edge_tensor],
        edge_consumer=number[graph.consumers],
        models=graph.models,
        **{name: getattr(graph, name)[ops] for name in per_op},
    )
    moved = Cluster(tuple(cluster.devices[d] for d in devices), cluster.links)
    return replace(problem, graph=shuffled, cluster=moved, costs=Costs.create(problem.seconds[ops][:, devices]))


# ---- drawn at random -------------------------------------------------------------------------------------------------


def random_problem(
    rng, *, max_ops=9, max_devices=4, objective=None, execution=None, integers=True, stored=0.2, constrained=False
):
    """Zero times, sizes and latencies, several outputs and models, groups, parameters, shared channels: all happen.

    With `integers`, times and sizes are small integers (transfer times are multiples of a quarter): ties are frequent
    and sums exact. `stored` is the share of parameters. `constrained` adds limits of memory, devices that cannot run an
    op, pins, forbidden devices, contiguity and device counts; there may then be no feasible placement.
    """
    objective = objective or str(rng.choice(OBJECTIVES))
    execution = execution or random_execution(rng, objective)
    n, devices = int(rng.integers(0, max_ops + 1)), int(rng.integers(1, max_devices + 1))
    graph = random_graph(rng, n, integers=integers, stored=stored, models=int(rng.integers(1, 4)))
    cluster = random_cluster(rng, devices, integers=integers)
    seconds = _amounts(rng, (n, devices), 9, integers)
    seconds[graph.is_stored] = 0.0
    constraints = {}
    if constrained:
        cluster, constraints = _constraints(rng, graph, cluster, execution, seconds)
    return Problem(graph, cluster, Costs.create(seconds), objective=objective, execution=execution, **constraints)


def random_graph(rng, n, *, integers=True, stored=0.2, models=1):
    """Ops in random positions; up to three outputs each, any number of readers."""
    position = rng.permutation(n)  # of the i-th op in dataflow order
    number = np.argsort(position)
    is_stored = rng.random(n) < stored
    producers = np.repeat(np.arange(n), rng.choice(4, n, p=[0.1, 0.6, 0.2, 0.1]))
    density = rng.uniform(0.1, 0.9) if rng.random() < 0.5 else 1.5 / max(n, 2)
    edges = [
        (tensor, consumer)
        for tensor, producer in enumerate(producers)
        for consumer in range(producer + 1, n)
        if not is_stored[consumer] and rng.random() < density
    ]
    return Graph.create(
        name="random",
        op_names=[f"op{i}" for i in range(n)],
        op_kinds=[("state" if i % 3 == 2 else "parameter") if is_stored[i] else "op" for i in number],
        tensor_producer=position[producers].astype(int),
        tensor_bytes=_amounts(rng, len(producers), 9, integers),
        edge_tensor=[tensor for tensor, _ in edges],
        edge_consumer=[int(position[consumer]) for _, consumer in edges],
        scratch=_amounts(rng, n, 3, integers),
        resident=np.where(rng.random(n) < 0.5, _amounts(rng, n, 9, integers), 0.0),
        phase=np.sort(rng.integers(0, 3, n))[number] if rng.random() < 0.5 else 0,
        model=rng.integers(0, models, n),
        models=[f"model{m}" for m in range(models)],
        group=np.where(rng.random(n) < 0.3, rng.integers(0, 2, n), -1),
    )


def random_cluster(rng, devices, *, integers=True):
    """Links that differ; some of no latency or unlimited bandwidth; some that share one bus or two."""
    names = [f"device{d}" for d in range(devices)]
    buses = ("bus0", "bus1") if rng.random() < 0.5 else ()
    latency = _amounts(rng, (devices, devices), 2, integers) * (rng.random() < 0.5)
    bandwidth = (
        rng.choice([0.5, 1.0, 2.0, 4.0], (devices, devices)) if integers else rng.uniform(0.5, 5.0, (devices,) * 2)
    )
    bandwidth[rng.random((devices, devices)) < 0.2] = math.inf
    links = [
        Link(a, b, bandwidth[i, j], latency[i, j], tuple(bus for bus in buses if rng.random() < 0.5))
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if i != j
    ]
    return Cluster(tuple(Device(name, copies=bool(rng.random() < 0.8)) for name in names), tuple(links))


def random_execution(rng, objective="latency"):
    """Any settings that the objective allows."""

    def either(*choices):
        return str(rng.choice(choices))

    return Execution(
        concurrency="parallel" if objective == "throughput" else either("parallel", "parallel", "sequential"),
        contention=either("channel", "channel", "none"),
        sends=either("tensor", "tensor", "edge"),
        memory=either("live", "live", "static"),
        prefetch=int(rng.integers(1, 4)),
        overlap=bool(rng.integers(2)),
        staged=bool(rng.integers(2)),
        pipeline=either("1f1b", "gpipe"),
    )


def random_placement(rng, problem):
    """Keeps groups, pins and supported devices; not memory, contiguity or device counts."""
    draw = rng.random((problem.num_units, problem.num_devices))[problem.unit] * problem.allowed
    return draw.argmax(axis=1).astype(np.int32)


def random_order(rng, problem):
    """A topological order, as a plan may give one."""
    graph = problem.graph
    waiting = np.bincount(graph.consumers, minlength=graph.num_ops)
    able, order = np.flatnonzero(waiting == 0).tolist(), []
    while able:
        order.append(able.pop(int(rng.integers(len(able)))))
        for reader in graph.consumers[graph.edge_producer == order[-1]].tolist():
            waiting[reader] -= 1
            if waiting[reader] == 0:
                able.append(reader)
    return np.array(order, np.int32)


def _amounts(rng, size, most, integers):
    return rng.integers(0, most + 1, size).astype(float) if integers else rng.exponential(most / 2, size)


def _constraints(rng, graph, cluster, execution, seconds):
    """(cluster with limits of memory, constraints); makes some of `seconds` infinite."""
    n, devices, names = graph.num_ops, cluster.num_devices, cluster.device_names
    if rng.random() < 0.5:
        held = float(graph.resident_bytes.sum() + (graph.tensor_bytes.sum() if execution.memory == "live" else 0.0))
        limits = np.where(rng.random(devices) < 0.3, math.inf, held * rng.uniform(0.2, 1.2, devices))
        cluster = cluster.with_memory(dict(zip(names, limits.tolist(), strict=True)))
    # Each group has a home where all its ops may run; elsewhere, some may not.
    forbidden = (names[-1],) if devices > 1 and rng.random() < 0.1 else ()
    group_home = rng.integers(0, devices - len(forbidden), n + 1)
    home = np.where(graph.group >= 0, group_home[graph.group], rng.integers(0, devices - len(forbidden), n))
    seconds[(rng.random((n, devices)) < 0.15) & (np.arange(devices) != home[:, None])] = math.inf
    pinned = np.flatnonzero(rng.random(n) < 0.1)
    return cluster, {
        "pins": {graph.op_names[op]: names[home[op]] for op in pinned},
        "forbidden": forbidden,
        "contiguous": bool(rng.random() < 0.1),
        "max_devices": int(rng.integers(1, devices + 1)) if rng.random() < 0.1 else None,
    }


# ---- looked at -------------------------------------------------------------------------------------------------------


def work(graph):
    """name: (kind, FLOPs, bytes) of what computes."""
    return {
        name: (kind, flops, moved)
        for name, kind, flops, moved in zip(
            graph.op_names, graph.op_kinds, graph.flops.tolist(), graph.bytes_accessed.tolist(), strict=True
        )
        if kind not in ("input", "parameter")
    }
