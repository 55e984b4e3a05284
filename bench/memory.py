"""Tight memory: which planners find a plan where there is one?

python bench/memory.py                 # 1,000 small random problems, every planner
python bench/memory.py --table models  # models of the zoo with just enough memory for one plan, `fit` and `auto`

The small problems are those of tests/test_memory.py: every placement of each is tried, so it is known which have one
that fits. All objectives and settings; about half of them have none, and a quarter have one to four. `applies` counts
the problems that the planner takes, `can` those of them where a placement fits in the default order; there it `found` a
plan or `missed` it. `by order` counts plans that only an order of their own makes fit. An error is anything but a plan
that keeps every constraint, checked by `violations`, or word that none was found.

The models have as much memory on each device as a random split of the program into blocks needs, times a factor, so
there is a plan; at 1.00 there may be no other.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from harness import WORKERS, each, main, progress
from placewise import Budget, Problem, plan, zoo
from placewise.errors import NoFeasiblePlan
from placewise.files import load_cluster
from placewise.planners import available
from placewise.simulator import evaluate, violations

MODELS = ("inception-v3", "bert-base-train", "resnet-50-train", "llama-3-8b", "nmt-2", "nasnet-a")
BOX = "placeto-4"
FACTORS = (1.0, 1.02, 1.1, 1.3)


COUNTED = ("applies", "can", "found", "missed", "by order", "errors", "seconds")


def small(options: argparse.Namespace) -> list[dict[str, Any]]:
    names = options.planners.split(",") if options.planners else list(available())
    rows = {name: dict.fromkeys(COUNTED, 0) for name in names}
    cases = [(seed, names, options.evaluations) for seed in range(options.problems)]
    for counted in each(one_small, cases, options.workers):
        for name, counts in counted.items():
            for what, count in counts.items():
                rows[name][what] += count
    return [{"planner": name, **row} for name, row in rows.items() if row["applies"]]


def one_small(seed: int, names: list[str], evaluations: int) -> dict[str, dict[str, Any]]:
    """What counts for each planner that takes the problem."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from test_memory import fitting_placements, tight_problem

    problem = tight_problem(np.random.default_rng(seed))
    exists = fitting_placements(problem) > 0
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        if available()[name].why_not(problem) is not None:
            continue
        began, errors = time.perf_counter(), 0
        try:
            found = plan(problem, name, budget=Budget(evaluations=evaluations))
            fits = not violations(problem, found.placement, found.order)
            errors += not fits
        except NoFeasiblePlan:
            fits = False
        except Exception as error:
            progress(f"{name}, problem {seed}: {error!r}")
            errors, fits = 1, False
        if exists and not fits and name in ("auto", "fit"):
            progress(f"{name} missed problem {seed}")
        seconds = time.perf_counter() - began
        counts = (1, exists, fits and exists, exists and not fits, fits and not exists, errors, seconds)
        rows[name] = dict(zip(COUNTED, counts, strict=True))
    if seed % 50 == 49:
        progress(f"problem {seed + 1}")
    return rows


def planted(options: argparse.Namespace) -> Iterator[tuple[str, float, Problem]]:
    """Model and objective, factor, problem."""
    for model in options.models.split(",") if options.models else MODELS:
        for objective in ("latency", "throughput"):
            rng = np.random.default_rng(options.seed)
            cluster = load_cluster(BOX)
            endless = cluster.with_memory(dict.fromkeys(cluster.device_names, np.inf))
            problem = Problem(zoo.load(model).collapse_parameters().graph, endless, objective=objective)
            row = _split(problem, rng)
            peak = evaluate(problem, row).peak
            assert peak is not None
            for factor in FACTORS:
                limits = dict(zip(cluster.device_names, (peak[0] * factor).tolist(), strict=True))
                tight = replace(problem, cluster=endless.with_memory(limits))
                assert not violations(tight, row)
                yield f"{model}, {objective}", factor, tight


def _split(problem: Problem, rng: np.random.Generator) -> Any:
    """Blocks of the program by bytes and number of ops, of random size, on devices in random order."""
    graph, devices = problem.graph, problem.num_devices
    order = graph.topological_order
    weight = graph.resident_bytes / graph.resident_bytes.sum() + 1 / problem.num_ops
    ends = np.cumsum(rng.dirichlet(np.full(devices, 3.0)))
    block = np.minimum(np.searchsorted(ends, np.cumsum(weight[order]) / 2), devices - 1)
    row = np.empty(problem.num_ops, np.int32)
    row[order] = rng.permutation(devices)[block]
    return row[problem.first_of_unit][problem.unit]


def models(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for title, factor, problem in planted(options):
        for name in options.planners.split(",") if options.planners else ("local-search", "fit", "auto"):
            row = rows.setdefault((title, name), {"model (seconds)": title, "planner": name})
            try:
                found = plan(problem, name, budget=Budget(seconds=options.seconds))
                assert not violations(problem, found.placement, found.order)
                row[f"{factor:.2f}"] = f"{found.value:.3g}"
            except NoFeasiblePlan:
                row[f"{factor:.2f}"] = "none"
        progress(f"{title}, {factor}")
    return list(rows.values())


if __name__ == "__main__":
    main(
        "Tight memory",
        lambda options: {"random": small, "models": models}[options.table](options),
        table={"choices": ("random", "models"), "default": "random"},
        problems={"type": int, "default": 1000, "help": "random ones"},
        evaluations={"type": int, "default": 5000, "help": "budget of each planner on a random problem"},
        seconds={"type": float, "default": 10.0, "help": "budget of each planner on a model"},
        models={"help": "names, with commas"},
        planners={"help": "names, with commas"},
        seed={"type": int, "default": 0},
        workers=WORKERS,
    )
