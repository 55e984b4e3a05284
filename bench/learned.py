"""Whether learning is real: learned planners on small graphs whose optimum is known, beside chance and no learning.

The graphs are drawn. The planners' settings were chosen on draws 1 to 12; what is quoted comes from others.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np

from harness import WORKERS, each, main, progress
from placewise import Budget, Costs, Device, Execution, Graph, Problem, full_mesh, plan
from placewise.planners import available
from placewise.simulator import evaluate

#: How each method is trained on the one graph, from nothing; and what makes it learn nothing.
METHODS: Mapping[str, dict[str, Any]] = {"colocrl": {}, "hierarchical": {}, "placeto": {"policy": "none"}, "hsdag": {}}
ENDLESS = {"updates": 10**9, "patience": 10**9}
NEAR = 1.02
SERIAL = Execution(concurrency="sequential")


def problems(draw: int, count: int) -> dict[str, list[Problem]]:
    """So many of each kind. No op has one reader, so that rules of co-location join none and lose nothing."""
    layers = [(i, j) for i in range(12) for j in range(4 * (i // 4) + 4, min(4 * (i // 4) + 8, 12))]
    kinds: dict[str, tuple[list[tuple[int, int]], tuple[int, int], Execution | None]] = {
        "ladder, 12 ops, 3 devices": (ladder(12), (12, 3), None),
        "layers, 12 ops, 3 devices": (layers, (12, 3), None),
        "ladder, 24 ops, 2 devices, one op at a time": (ladder(24), (24, 2), SERIAL),
    }
    rngs = [np.random.default_rng([draw + index, 77]) for index in range(count)]
    drawn: dict[str, list[Problem]] = {kind: [] for kind in kinds}
    for rng in rngs:
        for kind, (edges, shape, execution) in kinds.items():
            drawn[kind].append(problem(edges, rng.uniform(1.0, 6.0, shape), rng, execution))
    return drawn


def ladder(ops: int) -> list[tuple[int, int]]:
    """Each op is read by the next two, the last two by none."""
    return [(i, j) for i in range(ops - 2) for j in (i + 1, i + 2)]


def problem(
    edges: list[tuple[int, int]], seconds: Any, rng: np.random.Generator, execution: Execution | None = None
) -> Problem:
    """Devices that are good at different ops; what passes between them takes about a fifth of an op's time."""
    ops, devices = seconds.shape
    graph = Graph.create(
        op_names=[f"op{i}" for i in range(ops)], tensor_producer=np.arange(ops),
        tensor_bytes=rng.uniform(0.2, 1.2, ops), edge_tensor=[a for a, _ in edges],
        edge_consumer=[b for _, b in edges],
    )  # fmt: skip
    cluster = full_mesh([Device(f"d{i}") for i in range(devices)], 1.0)
    return Problem(graph, cluster, Costs.create(seconds), execution=execution or Execution())


def optimum(problem: Problem) -> float:
    """By trying every placement; of one op at a time on two devices, by a minimum cut."""
    if problem.execution == SERIAL:
        found = plan(problem, "min-cut")
        assert found.value <= found.lower_bound * (1 + 1e-9)
        return found.value
    shape = (problem.num_devices,) * problem.num_ops
    rows = np.stack(np.unravel_index(np.arange(np.prod(shape)), shape), axis=1).astype(np.int32)
    return float(min(evaluate(problem, part, peaks=False).score.min() for part in np.array_split(rows, 16)))


def measure(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """A table per kind of graph."""
    rows: dict[str, tuple[str, dict[str, Any]]] = {}
    for method in options.methods:
        known = METHODS[method] | {k: v for k, v in ENDLESS.items() if k in available()[method].options}
        rows |= {method: (method, known), f"{method}, untrained": (method, known | {"rate": 0.0})}
    rows["random"] = ("random", {"samples": options.evaluations})

    drawn = problems(options.draw, options.graphs)
    cases = [(kind, one) for kind, ones in drawn.items() for one in ones]
    optima = each(optimum, [(one,) for _, one in cases], options.workers)
    runs = [
        (f"{kind}: {row}", one, best, method, settings, options.evaluations, seed)
        for row, (method, settings) in rows.items()
        for (kind, one), best in zip(cases, optima, strict=True) for seed in range(options.seeds)
    ]  # fmt: skip
    found: dict[str, list[tuple[float, int | None]]] = {}
    for (title, *_), result in zip(runs, each(run, runs, options.workers), strict=True):
        found.setdefault(title, []).append(result)
    tables = {}
    for kind, ones in drawn.items():
        size = f"{ones[0].num_devices ** ones[0].num_ops:.2g}"
        title = f"{kind}: the optimum is one of {size} placements; {len(ones)} graphs, {options.seeds} seeds each"
        tables[title] = [summary(row, found[f"{kind}: {row}"]) for row in rows]
    return tables


def run(
    title: str, given: Problem, best: float, method: str, settings: dict[str, Any], evaluations: int, seed: int
) -> tuple[float, int | None]:
    """(percent above the optimum, evaluations until it is near)."""
    found = plan(given, method, budget=Budget(evaluations=evaluations), seed=seed, options=settings)
    excess = 100 * (found.value / best - 1)
    progress(f"{title}, seed {seed}: {excess:.1f}%")
    return excess, next((n for _, n, value in found.history if value <= NEAR * best), None)


def summary(row: str, found: list[tuple[float, int | None]]) -> dict[str, Any]:
    excess, reached = [one for one, _ in found], [n for _, n in found if n is not None]
    return {
        "method": row,
        "within 2%": f"{len(reached)} of {len(excess)}",
        "evaluations": f"{np.median(reached):,.0f} ({min(reached):,} to {max(reached):,})" if reached else "-",
        "above the optimum": f"{np.mean(excess):.1f}% ({min(excess):.1f} to {max(excess):.1f})",
    }


if __name__ == "__main__":
    main(
        "Learned planners on graphs whose optimum is known: median or mean (and range) over graphs and seeds",
        measure,
        methods={"nargs": "+", "choices": list(METHODS), "default": list(METHODS), "help": "which"},
        evaluations={"type": int, "default": 6000, "help": "budget of each; default: %(default)s"},
        seeds={"type": int, "default": 3, "help": "how many; default: %(default)s"},
        graphs={"type": int, "default": 2, "help": "of each kind; default: %(default)s"},
        draw={"type": int, "default": 2026, "help": "the first number that graphs are drawn by; default: %(default)s"},
        workers=WORKERS,
    )
