"""The Hierarchical Planner's models on its machines: with and without its groups, beside ColocRL, expert and `auto`.

Every learned method has the same number of simulated placements; the least and the most over the seeds. Settings were
chosen on small graphs (`bench/learned.py`) and looked at on Inception-V3 and NMT-4; the number of groups and of pieces,
and how they move, were chosen on NMT-2, BERT, Inception-V3 and RNNLM on machines of other papers.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

from harness import main, progress
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
OTHERS = {"GPU": "gpu-only", "expert": "expert"}


def in_first_groups(problem: Problem) -> Problem:
    """With the groups that HP begins with as ops that may not be torn apart."""
    groups = at_most(units(problem), GROUPS)
    return replace(problem, graph=replace(problem.graph, group=groups.label))


def values(problem: Problem, planner: str, evaluations: int, seeds: int, options: dict[str, Any]) -> list[float]:
    """Seconds, one for each seed that has a plan."""
    found = []
    for seed in range(seeds):
        try:
            budget = Budget(evaluations=evaluations)
            found.append(plan(problem, planner, budget=budget, seed=seed, options=options).value)
        except (NoFeasiblePlan, Unsupported):
            continue
    return found


def measure(options: Namespace) -> dict[str, list[dict[str, Any]]]:
    chosen = {name: run for name, run in LEARNED.items() if name in options.methods}
    names = (*OTHERS, "auto", "bound", IN_GROUPS, *chosen)
    rows: dict[str, dict[str, Any]] = {name: {"method": name} for name in names}
    for model in options.models:
        problem = load_problem(*MODELS[model])
        progress(f"{model}: {problem.num_ops} ops")
        for name, planner in OTHERS.items():
            rows[name][model] = text(values(problem, planner, options.evaluations, 1, {}), options.json)
        auto = plan(problem, "auto", budget=Budget(evaluations=options.evaluations))
        rows["auto"][model], rows["bound"][model] = (text([x], options.json) for x in (auto.value, auto.lower_bound))
        progress("  " + ", ".join(f"{name} {rows[name][model]}" for name in (*OTHERS, "auto", "bound")))
        grouped = values(in_first_groups(problem), "local-search", options.evaluations, options.seeds, {})
        rows[IN_GROUPS][model] = text(grouped, options.json)
        for name, (planner, changed) in chosen.items():
            endless = {"patience": options.evaluations, "updates": options.evaluations}
            found = values(problem, planner, options.evaluations, options.seeds, endless | changed)
            rows[name][model] = text(found, options.json)
            progress(f"  {name}: {rows[name][model]}")
    return {f"Seconds, {options.evaluations:,} placements, {options.seeds} seeds": list(rows.values())}


def text(found: list[float], plainly: bool) -> Any:
    """From the least to the most."""
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
    )
