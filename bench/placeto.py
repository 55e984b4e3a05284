"""Placeto: graphs that the shipped policy has not seen, training on the very graph, and ColocRL's evaluations.

Values are modelled times, as ratios to the best that any method here has found. Held-out graphs come from the same
generators as the training, with other seeds; held-out models and boxes are bundled ones that no training sees.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

import harness
from placewise import Budget, NoFeasiblePlan, Problem, load_problem, plan
from placewise.learned import families

SEEDS = (0, 1, 2)
MODELS = (
    ("nasnet-a", "placeto-4"), ("nmt-2", "placeto-2"), ("bert-base", "gpu-cpu-npu"), ("inception-v3", "gpu-cpu-npu"),
    ("nmt-4-train", "hierarchical-4"), ("resnet-152", "colocrl-2"),
)  # fmt: skip
SECTIONS = ("zero-shot", "trained", "models", "colocrl")


def value(problem: Problem, planner: str, evaluations: int, seed: int = 0, **options: Any) -> float:
    """Of a plan within so many evaluations; infinite where there is none."""
    try:
        return plan(problem, planner, budget=Budget(evaluations=evaluations), seed=seed, options=options).value
    except NoFeasiblePlan:
        return np.inf


@cache
def best_known(problem: Problem) -> float:
    """By planners that search."""
    return min(value(problem, "local-search", 6000), value(problem, "heft", 6000), value(problem, "list-search", 2000))


def held_out(family: str, count: int) -> Iterator[Problem]:
    """Graphs that have a plan, drawn with seeds that no training uses."""
    seed = 0
    while count:
        problem = families.draw(family, np.random.default_rng([2026, families.NAMES.index(family), seed]))
        seed += 1
        if np.isfinite(best_known(problem)):
            count -= 1
            yield problem


def spread(found: list[float]) -> str:
    """Mean and range over seeds."""
    return f"{np.mean(found):.3f} ({min(found):.3f}-{max(found):.3f})"


def ratios(problems: list[Problem], seeds: tuple[int, ...], *run: Any, **options: Any) -> np.ndarray:
    """[seeds, problems] values over the best known."""
    return np.array([[value(p, *run, seed=s, **options) / best_known(p) for p in problems] for s in seeds])


def zero_shot(graphs: int) -> list[dict[str, Any]]:
    rows = []
    for family in families.NAMES:
        problems = list(held_out(family, graphs))
        harness.progress(family)
        ours = ratios(problems, SEEDS, "placeto", 10**6)
        fits = np.isfinite(ours).all(axis=0)
        low, middle, high = np.quantile(ours[:, fits], [0.1, 0.5, 0.9])
        rows.append(
            {
                "family": family,
                "fit": f"{fits.sum()}/{len(problems)}",
                "random": _mean(ratios(problems, (0,), "random", 1000)),
                "heft": _mean(ratios(problems, (0,), "heft", 1000)),
                "shipped": spread([_mean(row) for row in ours[:, fits]]),
                "10%": low, "50%": middle, "90%": high,
            }
        )  # fmt: skip
    return rows


def _mean(found: np.ndarray) -> float:
    return float(found[np.isfinite(found)].mean())


def trained(evaluations: int) -> list[dict[str, Any]]:
    rows = []
    for family in families.NAMES:
        (problem,) = held_out(family, 1)
        harness.progress(family)
        runs = {
            "random": ("random", evaluations, {"samples": evaluations}),
            "shipped": ("placeto", evaluations, {}),
            "trained here": ("placeto", evaluations, {"policy": "none"}),
            "shipped, trained on": ("placeto", evaluations, {"train": True, "rate": 1e-3}),
            "untrained": ("placeto", evaluations, {"policy": "none", "rate": 0.0}),
        }
        found = {
            name: [value(problem, planner, count, seed, **options) for seed in SEEDS]
            for name, (planner, count, options) in runs.items()
        }
        best = min(best_known(problem), *(x for xs in found.values() for x in xs))
        rows.append({"graph": family} | {name: spread([x / best for x in xs]) for name, xs in found.items()})
    return rows


def models() -> list[dict[str, Any]]:
    rows = []
    for model, box in MODELS:
        problem = load_problem(model, box)
        harness.progress(model)
        ours = [plan(problem, "placeto", budget=Budget(evaluations=10**6), seed=seed) for seed in SEEDS]
        others = {name: value(problem, name, 1000) for name in ("single", "random", "heft")}
        best = min(value(problem, "local-search", 4000), *others.values(), *(found.value for found in ours))
        rows.append(
            {
                "model": model, "box": box,
                **{name: x / best if np.isfinite(x) else "none" for name, x in others.items()},
                "shipped": spread([found.value / best for found in ours]),
                "evals": int(np.mean([found.evaluations for found in ours])),
                "seconds": float(np.mean([found.seconds for found in ours])),
            }
        )  # fmt: skip
    return rows


def colocrl(evaluations: int) -> list[dict[str, Any]]:
    """Evaluations until each has what both reach in the end."""
    rows = []
    graphs = {family: next(held_out(family, 1)) for family in families.NAMES}
    graphs["inception-v3, placeto-2"] = load_problem("inception-v3", "placeto-2")
    for name, problem in graphs.items():
        harness.progress(name)
        factors, reached = [], []
        for seed in SEEDS:
            budget = Budget(evaluations=evaluations)
            both = [
                plan(problem, "placeto", budget=budget, seed=seed, options={"policy": "none", "groups": 40}),
                plan(problem, "colocrl", budget=budget, seed=seed, options={"groups": 40}),
            ]
            target = max(found.value for found in both)
            needed = [next(n for _, n, x in found.history if x <= target) for found in both]
            factors.append(needed[1] / needed[0])
            reached.append((both[0].value / both[1].value, *needed))
        rows.append(
            {
                "graph": name,
                "placeto": float(np.mean([x[1] for x in reached])),
                "colocrl": float(np.mean([x[2] for x in reached])),
                "times fewer": spread(factors),
                "final value, placeto/colocrl": spread([x[0] for x in reached]),
            }
        )
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    tables = {}
    if "zero-shot" in options.sections:
        title = "Held-out graphs: mean ratio to the best known; three seeds; quantiles over graphs and seeds"
        tables[title] = zero_shot(options.graphs)
    if "trained" in options.sections:
        title = f"One held-out graph of each family, {options.evaluations} evaluations; mean and range of three seeds"
        tables[title] = trained(options.evaluations)
    if "models" in options.sections:
        tables["Held-out models or boxes: ratio to the best known"] = models()
    if "colocrl" in options.sections:
        title = "Both trained on the graph alone: evaluations until each has what both reach in the end"
        tables[title] = colocrl(options.evaluations)
    return tables


if __name__ == "__main__":
    harness.main(
        __doc__.split("\n")[0],
        measure,
        sections={"nargs": "+", "choices": SECTIONS, "default": list(SECTIONS), "help": "which tables"},
        graphs={"type": int, "default": 8, "help": "of each family"},
        evaluations={"type": int, "default": 3000, "help": "of a training"},
    )
