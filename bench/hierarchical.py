"""The Hierarchical Planner's models on its machines: with and without its groups, beside ColocRL, expert and `auto`.

Every learned method has the same number of simulated placements; the least and the most over the seeds. Settings were
chosen on small graphs (`bench/learned.py`) and looked at on Inception-V3 and NMT-4; the number of groups and of pieces,
and how they move, were chosen on NMT-2, BERT, Inception-V3 and RNNLM on machines of other papers.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

import numpy as np

from harness import WORKERS, each, main, progress
from placewise import Budget, NoFeasiblePlan, Problem, Unsupported, load_problem, plan
from placewise.learned.grouping import at_most, units
from placewise.learned.hierarchical import GROUPS

MODELS = {
    "inception-v3": ("inception-v3-train", "hierarchical-2"),
    "resnet-152": ("resnet-152-train", "hierarchical-2"),
    "rnnlm": ("rnnlm-train", "hierarchical-2"),
    "nmt-2": ("nmt-2-train", "hierarchical-2"),
    "nmt-4": ("nmt-4-train", "hierarchical-4"),
    "nmt-8": ("nmt-8-train", "hierarchical-8"),
    "bert-base": ("bert-base-train", "hierarchical-4"),
}
#: Planner and options. By chance at first and random groups are of ops, not of pieces, as in the paper.
LEARNED: dict[str, tuple[str, dict[str, Any]]] = {
    "HP": ("hierarchical", {}),
    "HP, merged groups": ("hierarchical", {"grouping": "merged"}),
    "ColocRL": ("colocrl", {}),
    "HP, grouper untrained": ("hierarchical", {"pace": 0.0}),
    "HP, untrained": ("hierarchical", {"rate": 0.0}),
    "HP, groups by chance at first": ("hierarchical", {"together": 0.0, "pieces": 1_000_000}),
    "HP, random groups": ("hierarchical", {"grouping": "random"}),
    "HP, no groups": ("hierarchical", {"grouping": "none"}),
}
IN_GROUPS = "local search, HP's first groups"
OTHERS = {"GPU": "gpu-only", "expert": "expert", "auto": "auto"}


def in_first_groups(problem: Problem) -> Problem:
    """With the groups that HP begins with as ops that may not be torn apart."""
    groups = at_most(units(problem), GROUPS)
    return replace(problem, graph=replace(problem.graph, group=groups.label))


def value(problem: Problem, planner: str, evaluations: int, seed: int, options: dict[str, Any]) -> tuple[float, float]:
    """Seconds, infinite where there is no plan, and the lower bound."""
    try:
        found = plan(problem, planner, budget=Budget(evaluations=evaluations), seed=seed, options=options)
    except (NoFeasiblePlan, Unsupported):
        return np.inf, 0.0
    progress(f"{problem.graph.name}, {planner} {options}, seed {seed}: {found.value:.3g} s")
    return found.value, found.lower_bound


def measure(options: Namespace) -> dict[str, list[dict[str, Any]]]:
    endless = {"patience": options.evaluations, "updates": options.evaluations}
    alone: dict[str, tuple[str, dict[str, Any]]] = {name: (planner, {}) for name, planner in OTHERS.items()}
    searches = {IN_GROUPS: ("local-search", {})} | {
        name: (planner, endless | changed) for name, (planner, changed) in LEARNED.items() if name in options.methods
    }
    problems = {model: load_problem(*MODELS[model]) for model in options.models}
    runs = [
        (name, model, seed, planner, changed)
        for model in problems for name, (planner, changed) in (alone | searches).items()
        for seed in range(1 if name in alone else options.seeds)
    ]  # fmt: skip
    cases = [
        (
            in_first_groups(problems[model]) if name == IN_GROUPS else problems[model],
            planner,
            options.evaluations,
            seed,
            changed,
        )
        for name, model, seed, planner, changed in runs
    ]
    found: dict[tuple[str, str], list[float]] = {}
    for (name, model, *_), (seconds, bound) in zip(runs, each(value, cases, options.workers), strict=True):
        found.setdefault((name, model), []).append(seconds)
        if name == "auto":
            found["bound", model] = [bound]
    names = (*alone, "bound", *searches)
    rows = [{"method": name} | {model: text(found[name, model], options.json) for model in problems} for name in names]
    return {f"Seconds, {options.evaluations:,} placements, {options.seeds} seeds": rows}


def text(found: list[float], plainly: bool) -> Any:
    """From the least to the most, of those that have a plan."""
    found = [x for x in found if np.isfinite(x)]
    if plainly:
        return found
    ends = [f"{x:.3g}" for x in (min(found), max(found))] if found else ["none"]
    return "-".join(dict.fromkeys(ends))


if __name__ == "__main__":
    main(
        "The Hierarchical Planner, and what its groups are worth",
        measure,
        models={"nargs": "+", "choices": list(MODELS), "default": list(MODELS), "help": "which"},
        methods={"nargs": "+", "choices": list(LEARNED), "default": list(LEARNED), "help": "of those that learn"},
        evaluations={"type": int, "default": 2000, "help": "placements of each run; default: %(default)s"},
        seeds={"type": int, "default": 3, "help": "how many; default: %(default)s"},
        workers=WORKERS,
    )
