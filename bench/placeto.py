"""Placeto: graphs that the shipped policy has not seen, training on the very graph, and ColocRL's evaluations.

Values are modelled times, as ratios to the best that any method here has found. Held-out graphs come from the same
generators as the training, with other seeds; held-out models and boxes are bundled ones that no training sees. Settings
were chosen on draws 77 and 2026; what is quoted comes from others.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import harness
from placewise import Budget, NoFeasiblePlan, Problem, Unsupported, load_problem, plan
from placewise.learned import families

SEEDS = (0, 1, 2)
MODELS = (
    ("nasnet-a", "placeto-4"), ("nmt-2", "placeto-2"), ("bert-base", "gpu-cpu-npu"), ("inception-v3", "gpu-cpu-npu"),
    ("nmt-4-train", "hierarchical-4"), ("resnet-152", "colocrl-2"),
)  # fmt: skip
SECTIONS = ("zero-shot", "models", "trained")


def value(
    problem: Problem, planner: str, evaluations: int, seed: int = 0, options: dict[str, Any] | None = None
) -> float:
    """Of a plan within so many evaluations; infinite where there is none."""
    try:
        return plan(problem, planner, budget=Budget(evaluations=evaluations), seed=seed, options=options).value
    except (NoFeasiblePlan, Unsupported):
        return np.inf


class Known(NamedTuple):
    """A problem, and the best that is known of it."""

    problem: Problem
    best: float


def best_known(problem: Problem) -> float:
    """By planners that search."""
    return min(value(problem, "local-search", 6000), value(problem, "heft", 6000), value(problem, "list-search", 2000))


def held_out(family: str, count: int, draw: int) -> list[Known]:
    """Graphs that have a plan, drawn with seeds that no training uses."""
    found: list[Known] = []
    seeds = itertools.count()
    while len(found) < count:
        problem = families.draw(family, np.random.default_rng([draw, families.NAMES.index(family), next(seeds)]))
        if np.isfinite(best := best_known(problem)):
            found.append(Known(problem, best))
    return found


def spread(found: list[float]) -> str:
    """Mean and range over seeds."""
    return f"{np.mean(found):.3f} ({min(found):.3f}-{max(found):.3f})"


def zero_shot(options: argparse.Namespace) -> tuple[list[dict[str, Any]], ...]:
    """(by family, by what is asked for)."""
    policies = {Path(policy).stem: policy for policy in options.policies}
    drawn = harness.each(held_out, [(name, options.graphs, options.draw) for name in families.NAMES], options.workers)
    by_family: dict[str, list[Known]] = dict(zip(families.NAMES, drawn, strict=True))
    every = [known for part in drawn for known in part]
    harness.progress(f"{len(every)} graphs")
    by_kind: dict[str, list[Known]] = {}
    for known in sorted(every, key=lambda known: _kind(known.problem)):
        by_kind.setdefault(_kind(known.problem), []).append(known)

    def ratios(planner: str, evaluations: int, seeds: tuple[int, ...], **given: Any) -> np.ndarray:
        """[seeds, graphs] values over the best known."""
        cases = [(known.problem, planner, evaluations, seed, given) for seed in seeds for known in every]
        found = np.array(harness.each(value, cases, options.workers)).reshape(len(seeds), len(every))
        return found / np.array([known.best for known in every])

    tried = {
        "random": ratios("random", 1000, (0,)),
        "heft": ratios("heft", 1000, (0,)),
        "auto": ratios("auto", 1000, (0,)),
        "trained": ratios("placeto", options.evaluations, (0,), policy="none"),
    }
    tried |= {name: ratios("placeto", 10**6, SEEDS, policy=policy) for name, policy in policies.items()}
    return tuple(
        _rows(title, parts, every, tried, list(policies))
        for title, parts in (("family", by_family), ("asked for", by_kind))
    )


def _kind(problem: Problem) -> str:
    if problem.objective == "throughput":
        return "throughput"
    engine = ", sequential" if problem.execution.concurrency == "sequential" else ""
    return f"latency{engine}{', tight memory' if np.isfinite(problem.capacity).any() else ''}"


def _rows(
    title: str, parts: dict[str, list[Known]], every: list[Known], tried: dict[str, np.ndarray], policies: list[str]
) -> list[dict[str, Any]]:
    rows = []
    for name, part in {**parts, "all": every}.items():
        mine = [i for i, known in enumerate(every) if any(known is one for one in part)]
        ours = {policy: tried[policy][:, mine] for policy in policies}
        fit = np.all([np.isfinite(found).all(axis=0) for found in ours.values()], axis=0)
        quantiles = np.quantile(ours[policies[0]][:, fit], [0.1, 0.5, 0.9]) if fit.any() else [np.nan] * 3
        listed = np.isfinite(tried["heft"][0, mine])
        rows.append(
            {title: name, "fit": f"{fit.sum()}/{len(mine)}"}
            | {name: _mean(found[:, mine]) for name, found in tried.items() if name not in policies}
            | {"there": _mean(ours[policies[0]][:, listed])}
            | {policy: spread([_mean(row) for row in found[:, fit]]) for policy, found in ours.items()}
            | dict(zip(("10%", "50%", "90%"), quantiles, strict=True))
        )  # fmt: skip
    return rows


def _mean(found: np.ndarray) -> float:
    """Over those that have a plan."""
    return float(found[np.isfinite(found)].mean()) if np.isfinite(found).any() else np.nan


class Run(NamedTuple):
    """What a table needs of a plan."""

    value: float
    history: list[tuple[int, float]]  # (evaluations, value)
    evaluations: int
    seconds: float


def run(problem: Problem, planner: str, evaluations: int, seed: int, options: dict[str, Any]) -> Run:
    found = plan(problem, planner, budget=Budget(evaluations=evaluations), seed=seed, options=options)
    harness.progress(f"{problem.graph.name}, {planner} {options}, seed {seed}: {found.value:.4g}")
    history = [(count, value) for _, count, value in found.history]
    return Run(found.value, history, found.evaluations, found.seconds)


def trained(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(final values, evaluations until a method has what ColocRL reaches within one percent)."""
    policy = {"policy": options.policies[0]}
    methods: dict[str, tuple[str, dict[str, Any]]] = {
        "random": ("random", {"samples": options.evaluations}),
        "untrained": ("placeto", {"policy": "none", "rate": 0.0, "epochs": 1}),
        "colocrl": ("colocrl", {"groups": 100}),
        "placeto": ("placeto", {"policy": "none"}),
        "shipped": ("placeto", policy),
        "shipped+": ("placeto", policy | {"train": True, "rate": 1e-3}),
    }
    drawn = harness.each(held_out, [(name, 1, options.draw) for name in families.NAMES], options.workers)
    graphs = {name: one for name, (one,) in zip(families.NAMES, drawn, strict=True)}
    inception = load_problem("inception-v3", "placeto-2")
    graphs["inception-v3"] = Known(inception, best_known(inception))
    runs = [(graph, name, seed) for graph in graphs for name in methods for seed in SEEDS]
    cases = [
        (graphs[graph].problem, methods[name][0], options.evaluations, seed, methods[name][1])
        for graph, name, seed in runs
    ]
    found: dict[str, dict[str, list[Run]]] = {graph: {name: [] for name in methods} for graph in graphs}
    for (graph, name, _), result in zip(runs, harness.each(run, cases, options.workers), strict=True):
        found[graph][name].append(result)
    ends, counts = [], []
    for graph, of_graph in found.items():
        best = min(graphs[graph].best, *(one.value for each in of_graph.values() for one in each))
        ends.append(
            {"graph": graph} | {name: _brief([x.value / best for x in each]) for name, each in of_graph.items()}
        )
        targets = [1.01 * one.value for one in of_graph["colocrl"]]
        counts.append(
            {"graph": graph}
            | {
                name: _counts([_first(one, target) for one, target in zip(of_graph[name], targets, strict=True)])
                for name in ("random", "colocrl", "placeto", "shipped", "shipped+")
            }
        )
    return ends, counts


def _brief(found: list[float]) -> str:
    """Mean and range."""
    return f"{np.mean(found):.2f} {min(found):.2f}-{max(found):.2f}"


def _first(found: Run, target: float) -> float:
    """Evaluations until the target."""
    return next((count for count, x in found.history if x <= target), np.inf)


def models(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    problems = [load_problem(model, box) for model, box in MODELS]
    cases = [
        (problem, "placeto", 10**6, seed, {"policy": options.policies[0]}) for problem in problems for seed in SEEDS
    ]
    found = iter(harness.each(run, cases, options.workers))
    others = [("single", 1000), ("random", 1000), ("heft", 1000), ("local-search", 4000)]
    values = iter(harness.each(value, [(problem, *one) for problem in problems for one in others], options.workers))
    for model, box in MODELS:
        ours = [next(found) for _ in SEEDS]
        theirs = {name: next(values) for name, _ in others}
        best = min(*theirs.values(), *(one.value for one in ours))
        del theirs["local-search"]
        rows.append(
            {
                "model": model, "box": box,
                **{name: x / best if np.isfinite(x) else "none" for name, x in theirs.items()},
                "shipped": spread([one.value / best for one in ours]),
                "evals": int(np.mean([one.evaluations for one in ours])),
                "seconds": float(np.mean([one.seconds for one in ours])),
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
        title += f"; trained: on this very graph, {options.evaluations} evaluations"
        title += f"; there: {Path(options.policies[0]).stem} on the graphs for which heft has a plan"
        tables[title], tables["The same graphs by what is asked for"] = zero_shot(options)
    if "models" in options.sections:
        tables["Held-out models or boxes: ratio to the best known"] = models(options)
    if "trained" in options.sections:
        ends, counts = trained(options)
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
        policies={"nargs": "+", "default": ["shipped"], "help": "files; quantiles are of the first; default: shipped"},
        workers=harness.WORKERS,
    )
