"""Small random problems with everything in them, for tests."""

from __future__ import annotations

import numpy as np

from placewise.cluster import Cluster, Device, Link
from placewise.costs import Costs
from placewise.graph import Graph
from placewise.problem import Execution, Problem


def random_graph(rng, n, *, integer=True, stored=0.3, groups=True, models=1):
    """A DAG whose ops come in random order; sizes are small integers so that ties and equal times happen."""
    hidden = rng.permutation(n)  # hidden topological position of each op
    is_stored = rng.random(n) < stored
    producer, size, edge_tensor, edge_consumer = [], [], [], []
    for op in range(n):
        for _ in range(int(rng.integers(0, 3)) + (1 if rng.random() < 0.7 else 0)):
            tensor = len(producer)
            producer.append(op)
            size.append(float(rng.integers(0, 6)) if integer else float(rng.random() * 5))
            later = [other for other in range(n) if hidden[other] > hidden[op] and not is_stored[other]]
            for other in later:
                if rng.random() < 1.5 / max(len(later), 1):
                    edge_tensor.append(tensor)
                    edge_consumer.append(other)
    return Graph.create(
        name="random",
        op_names=[f"op{i}" for i in range(n)],
        op_kinds=["parameter" if s else "op" for s in is_stored],
        scratch=rng.integers(0, 4, n),
        resident=rng.integers(0, 4, n),
        phase=rng.integers(0, 2, n) if rng.random() < 0.3 else 0,
        model=rng.integers(0, models, n),
        models=[f"m{i}" for i in range(models)],
        group=np.where(rng.random(n) < 0.3, rng.integers(0, 3, n), -1) if groups else -1,
        tensor_producer=producer,
        tensor_bytes=size,
        edge_tensor=edge_tensor,
        edge_consumer=edge_consumer,
    )


def random_cluster(rng, devices, *, memory=np.inf):
    names = [f"d{i}" for i in range(devices)]
    buses = ["bus0", "bus1"]
    links = [
        Link(a, b, float(rng.integers(1, 5)), float(rng.integers(0, 3)),
             tuple(x for x in buses if rng.random() < 0.4) if rng.random() < 0.5 else ())
        for a in names for b in names if a != b
    ]  # fmt: skip
    return Cluster(tuple(Device(name, memory=memory, copies=bool(rng.random() < 0.8)) for name in names), tuple(links))


def random_execution(rng):
    return Execution(
        concurrency="sequential" if rng.random() < 0.2 else "parallel",
        contention="none" if rng.random() < 0.25 else "channel",
        sends="edge" if rng.random() < 0.25 else "tensor",
        prefetch=int(rng.integers(1, 4)),
        overlap=bool(rng.random() < 0.5),
        staged=bool(rng.random() < 0.3),
        pipeline="gpipe" if rng.random() < 0.3 else "1f1b",
    )


def random_problem(rng, *, max_ops=9, max_devices=4, objective=None, execution=None, memory=np.inf, **graph_options):
    n, devices = int(rng.integers(0, max_ops + 1)), int(rng.integers(1, max_devices + 1))
    models = int(rng.integers(1, 3))
    graph = random_graph(rng, n, models=models, **graph_options)
    seconds = rng.integers(0, 6, (n, devices)).astype(float)
    seconds[graph.is_stored] = 0.0
    execution = execution or random_execution(rng)
    objective = objective or str(rng.choice(["latency", "completion"]))
    return Problem(graph, random_cluster(rng, devices, memory=memory), Costs.create(seconds), objective, execution)


def random_placement(rng, problem):
    """Respects colocation; not memory."""
    return rng.integers(0, problem.num_devices, max(problem.num_units, 1))[problem.unit].astype(np.int32)
