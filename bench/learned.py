"""Whether learning is real: learned planners on small graphs whose optimum is known, beside chance and no learning."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from harness import main, progress
from placewise import Budget, Costs, Device, Execution, Graph, Problem, full_mesh, plan
from placewise.planners import available
from placewise.simulator import evaluate

#: How each method is trained on the one graph, from nothing; and what makes it learn nothing.
METHODS: Mapping[str, dict[str, Any]] = {"colocrl": {}, "hierarchical": {}, "placeto": {"policy": "none"}, "hsdag": {}}
ENDLESS = {"updates": 10**9, "patience": 10**9}
NEAR = 1.02
SERIAL = Execution(concurrency="sequential")


@cache
def problems() -> dict[str, tuple[Problem, float]]:
    """Name to (problem, optimum). Ops are read by several others, so that co-location groups lose little."""
    rng = np.random.default_rng(7)
    layers = [(i, j) for i in range(12) for j in range(4 * (i // 4) + 4, min(4 * (i // 4) + 8, 12))]
    found = {
        "ladder, 12 ops, 3 devices": problem(ladder(12), rng.uniform(1.0, 6.0, (12, 3)), rng),
        "layers, 12 ops, 3 devices": problem(layers, rng.uniform(1.0, 6.0, (12, 3)), rng),
        "ladder, 24 ops, 2 devices, one op at a time": problem(ladder(24), rng.uniform(1.0, 6.0, (24, 2)), rng, SERIAL),
    }
    return {name: (made, optimum(made)) for name, made in found.items()}


def ladder(ops: int) -> list[tuple[int, int]]:
    """Each op is read by the next two."""
    return [(i, j) for i in range(ops) for j in (i + 1, i + 2) if j < ops]


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
    """A table per graph."""
    tables = {}
    for name, (given, best) in problems().items():
        rows = []
        for method in [m for m in METHODS if m in available()]:
            progress(f"{name}: {method}")
            known = {
                key: value for key, value in (METHODS[method] | ENDLESS).items() if key in available()[method].options
            }
            rows.append(row(method, given, best, options, known))
            rows.append(row(method, given, best, options, known | {"rate": 0.0}, " untrained"))
        rows.append(row("random", given, best, options, {"samples": options.evaluations}))
        tables[f"{name}: the optimum is one of {given.num_devices**given.num_ops:.2g} placements"] = rows
    return tables


def row(
    method: str, given: Problem, best: float, options: argparse.Namespace, settings: dict[str, Any], note: str = ""
) -> dict[str, Any]:
    budget = Budget(evaluations=options.evaluations)
    plans = [plan(given, method, budget=budget, seed=seed, options=settings) for seed in range(options.seeds)]
    excess = 100 * (np.array([found.value for found in plans]) / best - 1)
    needed = [next((n for _, n, value in found.history if value <= NEAR * best), None) for found in plans]
    reached = sorted(n for n in needed if n is not None)
    return {
        "method": method + note,
        "within 2%": f"{len(reached)} of {len(plans)}",
        "after evaluations": " to ".join(f"{n:,}" for n in dict.fromkeys([*reached[:1], *reached[-1:]])) or "-",
        "above the optimum": f"{excess.mean():.1f}% ({excess.min():.1f} to {excess.max():.1f})",
    }


if __name__ == "__main__":
    main(
        "Learned planners on graphs whose optimum is known: mean (and range) over the seeds",
        measure,
        evaluations={"type": int, "default": 3000, "help": "budget of each; default: %(default)s"},
        seeds={"type": int, "default": 3, "help": "how many; default: %(default)s"},
    )
