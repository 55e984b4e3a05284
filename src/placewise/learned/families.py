"""Families of small problems to learn from: a policy that has seen many graphs and boxes can place one that it has not.

Each family draws graphs of one kind. Devices, links, memory and objectives are drawn alike for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from placewise.cluster import Cluster, Device, Link
from placewise.costs import Costs
from placewise.graph import Graph
from placewise.problem import Execution, Problem

_LEAST, _MOST = 8, 40  # ops


@dataclass
class _Sketch:
    """A graph in the making: ops in dataflow order, one tensor each."""

    reads: list[list[int]] = field(default_factory=list)

    def op(self, *inputs: int) -> int:
        self.reads.append(sorted({i for i in inputs if i >= 0}))
        return len(self.reads) - 1


def layered(rng: np.random.Generator, size: int) -> _Sketch:
    """Layers of some width; an op reads a few of the layer before, seldom of the one before that."""
    sketch, layers = _Sketch(), [[-1]]
    width = int(rng.integers(2, 7))
    while len(sketch.reads) < size:
        new = []
        for _ in range(min(int(rng.integers(1, width + 1)), size - len(sketch.reads))):
            above = [i for layer in layers[-1 - int(rng.random() < 0.2) :] for i in layer]
            new.append(sketch.op(*rng.choice(above, min(len(above), int(rng.integers(1, 4))), replace=False).tolist()))
        layers.append(new)
    return sketch


def branches(rng: np.random.Generator, size: int) -> _Sketch:
    """Blocks in a row, each of parallel chains that are joined again: Inception and its like."""
    sketch = _Sketch()
    last = sketch.op()
    while len(sketch.reads) < size:
        ends = []
        for _ in range(int(rng.integers(2, 6))):
            end = last
            for _ in range(int(rng.integers(1, 5))):
                end = sketch.op(end)
            ends.append(end)
        if rng.random() < 0.3:
            ends.append(last)  # a shortcut
        last = sketch.op(*ends)
    return sketch


def recurrent(rng: np.random.Generator, size: int) -> _Sketch:
    """Layers over time steps: each op reads the layer below and the step before; sometimes attention at the end."""
    sketch, depth = _Sketch(), int(rng.integers(2, 6))
    steps = max(2, size // depth)
    before = [-1] * depth
    for _ in range(steps):
        below = sketch.op() if rng.random() < 0.5 else -1
        now = []
        for layer in range(depth):
            below = sketch.op(below, before[layer])
            now.append(below)
        before = now
    if rng.random() < 0.5:
        sketch.op(*before)
    return sketch


def scattered(rng: np.random.Generator, size: int) -> _Sketch:
    """Each op reads one to three of the ops not long before it."""
    sketch, window = _Sketch(), int(rng.integers(3, 15))
    for i in range(size):
        far = max(0, i - window)
        sketch.op(*(rng.integers(far, i, int(rng.integers(1, 4))).tolist() if i else ()))
    return sketch


#: What is drawn from; "training" is one of the others with its backward pass.
FAMILIES: Final[dict[str, Callable[[np.random.Generator, int], _Sketch]]] = {
    "layered": layered, "branches": branches, "recurrent": recurrent, "scattered": scattered,
}  # fmt: skip
NAMES: Final = (*FAMILIES, "training")


def draw(family: str, rng: np.random.Generator, *, least: int = _LEAST, most: int = _MOST) -> Problem:
    """A problem of a family (one of `NAMES`), of so many ops forward."""
    training = family == "training"
    kind = str(rng.choice(list(FAMILIES))) if training else family
    size = int(rng.integers(least, most + 1))
    sketch = FAMILIES[kind](rng, size)
    forward = len(sketch.reads)
    times, sizes = rng.lognormal(0.0, rng.uniform(0.1, 1.0), forward), rng.lognormal(0.0, 0.7, forward)
    weights = rng.lognormal(0.0, 1.0, forward)
    phase, module = [0] * forward, list(range(forward))
    if training:
        readers: list[list[int]] = [[] for _ in range(forward)]
        for op, inputs in enumerate(sketch.reads):
            for i in inputs:
                readers[i].append(op)
        back: dict[int, int] = {}
        for op in range(forward - 1, -1, -1):
            back[op] = sketch.op(op, *(back[reader] for reader in readers[op]))
            phase.append(1)
            module.append(op)
        mirrored = np.arange(forward - 1, -1, -1)
        times = np.concatenate([times, rng.uniform(1.0, 2.0) * times[mirrored]])
        sizes = np.concatenate([sizes, sizes[mirrored]])
        weights = np.concatenate([3.0 * weights, np.zeros(forward)])
    edges = [(i, op) for op, inputs in enumerate(sketch.reads) for i in inputs]
    count = len(sketch.reads)
    memory = _memory(rng, float(weights.sum()), float(sizes.sum()))
    graph = Graph.create(
        name=family,
        op_names=[f"op{i}" for i in range(count)],
        op_kinds="op",
        op_modules=[f"m{m}" for m in module],
        tensor_producer=np.arange(count),
        tensor_bytes=sizes,
        edge_tensor=[a for a, _ in edges],
        edge_consumer=[b for _, b in edges],
        resident=weights,
        phase=phase,
    )
    seconds, cluster = _box(rng, times, float(sizes.mean()), memory)
    objective, execution = _goal(rng)
    return Problem(graph, cluster, Costs.create(seconds), objective=objective, execution=execution)


def _memory(rng: np.random.Generator, weights: float, tensors: float) -> float | None:
    """Bytes of all devices together; None for unlimited."""
    return (weights + 0.5 * tensors) * float(rng.uniform(1.3, 3.0)) if rng.random() < 0.35 else None


def _box(
    rng: np.random.Generator, times: np.ndarray, size: float, memory: float | None
) -> tuple[np.ndarray, Cluster]:  # fmt: skip
    """(seconds [N, D], cluster): two to eight devices, alike or not, with links of one kind, of several, or one bus."""
    count = int(rng.choice([2, 3, 4, 5, 6, 8], p=[0.3, 0.2, 0.25, 0.05, 0.1, 0.1]))
    unequal = rng.random()
    speed = np.ones(count)
    if unequal > 0.3:
        speed = rng.lognormal(0.0, 0.5, count)
    if unequal > 0.7:
        speed[-1] = 0.1  # a CPU
    affinity = rng.lognormal(0.0, rng.uniform(0.1, 0.6), (len(times), count)) if rng.random() < 0.4 else 1.0
    seconds = times[:, None] / speed * affinity
    ratio = float(np.exp(rng.uniform(np.log(0.03), np.log(3.0))))  # a transfer, in times of an op
    spread = 0.5 if rng.random() < 0.3 else 0.0
    bandwidth = size / ratio * rng.lognormal(0.0, spread, (count, count))
    latency = float(rng.choice([0.0, 0.05, 0.3])) * ratio
    via = ("bus",) if rng.random() < 0.25 else ()
    names = [f"d{d}" for d in range(count)]
    links = [
        Link(a, b, float(bandwidth[i, j]), latency, via)
        for i, a in enumerate(names) for j, b in enumerate(names) if i != j
    ]  # fmt: skip
    share = rng.dirichlet(np.full(count, 5.0))
    limits = np.full(count, np.inf) if memory is None else memory * share
    devices = [Device(name, memory=float(limit)) for name, limit in zip(names, limits, strict=True)]
    return seconds, Cluster(tuple(devices), tuple(links), "drawn")


def _goal(rng: np.random.Generator) -> tuple[str, Execution]:
    draw = rng.random()
    if draw < 0.65:
        return "latency", Execution(memory="live" if rng.random() < 0.7 else "static")
    if draw < 0.78:
        return "latency", Execution(concurrency="sequential")
    return "throughput", Execution()
