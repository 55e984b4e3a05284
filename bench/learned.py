"""Whether learning is real: learned planners on small graphs whose optimum is known, beside chance and no learning."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from harness import main, progress
from placewise import Budget, Costs, Device, Graph, Problem, full_mesh, plan
from placewise.planners import available
from placewise.simulator import evaluate

#: How each method is trained on the one graph, from nothing; and what makes it learn nothing.
METHODS: Mapping[str, dict[str, Any]] = {"colocrl": {}, "hierarchical": {}, "placeto": {"policy": "none"}, "hsdag": {}}
ENDLESS = {"updates": 10**9, "patience": 10**9}
NEAR = 1.02


@cache
def problems() -> dict[str, tuple[Problem, float]]:
    """Name to (problem, optimum); each is small enough to try every placement."""
    rng = np.random.default_rng(7)
    ladder = [(i, j) for i in range(10) for j in (i + 1, i + 2) if j < 10]
    branches = [(0, b) for b in range(1, 5)] + [(b, b + 4) for b in range(1, 5)] + [(b + 4, 9) for b in range(1, 5)]
    layers = [
        (i, j)
        for layer in range(3)
        for i in range(4 * layer, 4 * layer + 4)
        for j in range(4 * layer + 4, 4 * layer + 8)
    ]
    found = {
        "ladder, 10 ops, 3 devices": problem(ladder, rng.uniform(1.0, 6.0, (10, 3)), rng),
        "branches, 10 ops, 3 devices": problem(branches, rng.uniform(1.0, 4.0, (10, 1)) * [1.0, 1.2, 1.5], rng),
        "layers, 16 ops, 2 devices": problem(layers, rng.uniform(1.0, 4.0, (16, 1)) * [1.0, 1.3], rng),
    }
    return {name: (made, optimum(made)) for name, made in found.items()}


def problem(edges: list[tuple[int, int]], seconds: Any, rng: np.random.Generator) -> Problem:
    ops, devices = seconds.shape
    graph = Graph.create(
        op_names=[f"op{i}" for i in range(ops)], tensor_producer=np.arange(ops),
        tensor_bytes=rng.uniform(0.2, 0.8, ops), edge_tensor=[a for a, _ in edges],
        edge_consumer=[b for _, b in edges],
    )  # fmt: skip
    return Problem(graph, full_mesh([Device(f"d{i}") for i in range(devices)], 1.0), Costs.create(seconds))


def optimum(problem: Problem) -> float:
    """By trying every placement."""
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
        tables[f"{name}: the optimum is one of {given.num_devices**given.num_ops:,} placements"] = rows
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
