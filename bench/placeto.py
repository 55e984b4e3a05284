"""Placeto: graphs that the shipped policy has not seen, training on the very graph, and ColocRL's evaluations.

Values are modelled times, as ratios to the best that any method here has found. Held-out graphs come from the same
generators as the training, with other seeds; held-out models and boxes are bundled ones that no training sees. Settings
were chosen on draws 77 and 2026; what is quoted comes from others.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

import harness
from placewise import Budget, NoFeasiblePlan, Plan, Problem, Unsupported, load_problem, plan
from placewise.learned import families

SEEDS = (0, 1, 2)
MODELS = (
    ("nasnet-a", "placeto-4"), ("nmt-2", "placeto-2"), ("bert-base", "gpu-cpu-npu"), ("inception-v3", "gpu-cpu-npu"),
    ("nmt-4-train", "hierarchical-4"), ("resnet-152", "colocrl-2"),
)  # fmt: skip
SECTIONS = ("zero-shot", "models", "trained")


def value(problem: Problem, planner: str, evaluations: int, seed: int = 0, **options: Any) -> float:
    """Of a plan within so many evaluations; infinite where there is none."""
    try:
        return plan(problem, planner, budget=Budget(evaluations=evaluations), seed=seed, options=options).value
    except (NoFeasiblePlan, Unsupported):
        return np.inf


@cache
def best_known(problem: Problem) -> float:
    """By planners that search."""
    return min(value(problem, "local-search", 6000), value(problem, "heft", 6000), value(problem, "list-search", 2000))


def held_out(family: str, count: int, draw: int) -> Iterator[Problem]:
    """Graphs that have a plan, drawn with seeds that no training uses."""
    seed = 0
    while count:
        problem = families.draw(family, np.random.default_rng([draw, families.NAMES.index(family), seed]))
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


def zero_shot(graphs: int, draw: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(by family, by what is asked for)."""
    by_family: dict[str, list[Problem]] = {family: list(held_out(family, graphs, draw)) for family in families.NAMES}
    every = [problem for problems in by_family.values() for problem in problems]
    harness.progress(f"{len(every)} graphs")
    by_kind: dict[str, list[Problem]] = {}
    for problem in sorted(every, key=_kind):
        by_kind.setdefault(_kind(problem), []).append(problem)
    tried = {
        "random": ratios(every, (0,), "random", 1000),
        "heft": ratios(every, (0,), "heft", 1000),
        "auto": ratios(every, (0,), "auto", 1000),
        "shipped": ratios(every, SEEDS, "placeto", 10**6),
    }
    return _rows("family", by_family, every, tried), _rows("asked for", by_kind, every, tried)


def _kind(problem: Problem) -> str:
    if problem.objective == "throughput":
        return "throughput"
    engine = ", sequential" if problem.execution.concurrency == "sequential" else ""
    return f"latency{engine}{', tight memory' if np.isfinite(problem.capacity).any() else ''}"


def _rows(
    title: str, parts: dict[str, list[Problem]], every: list[Problem], tried: dict[str, np.ndarray]
) -> list[dict[str, Any]]:  # fmt: skip
    rows = []
    for name, problems in parts.items():
        mine = [i for i, problem in enumerate(every) if any(problem is one for one in problems)]
        ours = tried["shipped"][:, mine]
        ours = ours[:, np.isfinite(ours).all(axis=0)]
        low, middle, high = np.quantile(ours, [0.1, 0.5, 0.9])
        rows.append(
            {
                title: name,
                "fit": f"{ours.shape[1]}/{len(mine)}",
                **{name: _mean(tried[name][:, mine]) for name in ("random", "heft", "auto")},
                "shipped": spread([_mean(row) for row in ours]),
                "10%": low, "50%": middle, "90%": high,
            }
        )  # fmt: skip
    return rows


def _mean(found: np.ndarray) -> float:
    """Over those that have a plan."""
    return float(found[np.isfinite(found)].mean()) if np.isfinite(found).any() else np.nan


def trained(evaluations: int, draw: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(final values, evaluations until a method has what ColocRL reaches within one percent)."""
    runs: dict[str, tuple[str, dict[str, Any]]] = {
        "random": ("random", {"samples": evaluations}),
        "untrained": ("placeto", {"policy": "none", "rate": 0.0, "epochs": 1}),
        "colocrl": ("colocrl", {"groups": 100}),
        "placeto": ("placeto", {"policy": "none"}),
        "shipped": ("placeto", {}),
        "shipped+": ("placeto", {"train": True, "rate": 1e-3}),
    }
    graphs = {family: next(held_out(family, 1, draw)) for family in families.NAMES}
    graphs["inception-v3"] = load_problem("inception-v3", "placeto-2")
    ends, counts = [], []
    for graph, problem in graphs.items():
        harness.progress(graph)
        found: dict[str, list[Plan]] = {
            name: [
                plan(problem, planner, budget=Budget(evaluations=evaluations), seed=seed, options=options)
                for seed in SEEDS
            ]
            for name, (planner, options) in runs.items()
        }
        best = min(best_known(problem), *(one.value for each in found.values() for one in each))
        ends.append({"graph": graph} | {name: _brief([x.value / best for x in each]) for name, each in found.items()})
        targets = [1.01 * one.value for one in found["colocrl"]]
        counts.append(
            {"graph": graph}
            | {
                name: _counts([_first(one, target) for one, target in zip(found[name], targets, strict=True)])
                for name in ("random", "colocrl", "placeto", "shipped", "shipped+")
            }
        )
    return ends, counts


def _brief(found: list[float]) -> str:
    """Mean and range."""
    return f"{np.mean(found):.2f} {min(found):.2f}-{max(found):.2f}"


def _first(found: Plan, target: float) -> float:
    """Evaluations until the target."""
    return next((count for _, count, x in found.history if x <= target), np.inf)


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


def _counts(found: list[float]) -> str:
    """The middle one of three, and how many got there."""
    reached = sum(np.isfinite(found))
    middle = sorted(found)[len(found) // 2]
    return f"{middle:,.0f} ({reached}/{len(found)})" if np.isfinite(middle) else f"- ({reached}/{len(found)})"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    tables = {}
    if "zero-shot" in options.sections:
        title = "Held-out graphs: mean ratio to the best known; three seeds; quantiles over graphs and seeds"
        tables[title], tables["The same graphs by what is asked for"] = zero_shot(options.graphs, options.draw)
    if "models" in options.sections:
        tables["Held-out models or boxes: ratio to the best known"] = models()
    if "trained" in options.sections:
        ends, counts = trained(options.evaluations, options.draw)
        title = f"One held-out graph of each family, {options.evaluations} evaluations: ratio to the best known"
        tables[f"{title}, mean and range of three seeds"] = ends
        title = "Evaluations until a method has what ColocRL reaches with all of them, within 1%"
        tables[f"{title}: the middle of three seeds, and how many got there"] = counts
    return tables


if __name__ == "__main__":
    harness.main(
        __doc__.split("\n")[0],
        measure,
        sections={"nargs": "+", "choices": SECTIONS, "default": list(SECTIONS), "help": "which tables"},
        graphs={"type": int, "default": 8, "help": "of each family"},
        evaluations={"type": int, "default": 2000, "help": "of a training"},
        draw={"type": int, "default": 2027, "help": "the number that graphs are drawn by; default: %(default)s"},
    )
