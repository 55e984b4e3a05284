"""What the levels of `multilevel` bring: beside the same search without plans for coarser levels, and without levels.

`groups` begins at the best simple plan and moves groups of all levels, but plans no coarse level first. `ops` moves
single ops only. All three have the same budget in evaluations. Values are over that of the simple plan that all begin
with, so lower is better, and 1 means that the search brought nothing. Problems are drawn by the seed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from harness import main, progress, random_problem
from placewise import Budget, Context, Problem, plan, planner
from placewise.errors import NoFeasiblePlan
from placewise.planners.multilevel import hierarchy, refine, simple_start
from portfolio import drawn


@planner("simple")
def simple(problem: Problem, ctx: Context) -> None:
    """The best simple plan."""
    simple_start(ctx)


@planner("groups")
def groups(problem: Problem, ctx: Context, *, patience: int = 4, kicks: int = 10) -> None:
    """Moves of groups of all levels."""
    start = simple_start(ctx)
    for _ in refine(ctx, hierarchy(problem, ctx, 200), start, patience, kicks):
        pass


@planner("ops")
def ops(problem: Problem, ctx: Context, *, patience: int = 4, kicks: int = 10) -> None:
    """Moves of single ops."""
    start = simple_start(ctx)
    for _ in refine(ctx, hierarchy(problem, ctx, 200)[:1], start, patience, kicks):
        pass


def measure(options: Any) -> list[dict[str, Any]]:
    rows = []
    for size in options.ops:
        found: dict[str, list[float]] = {}
        for i in range(options.problems):
            name, problem = _problem(options.seed + i, size)
            progress(name)
            try:
                start = plan(problem, "simple", seed=options.seed).value
            except NoFeasiblePlan:
                progress("  no simple plan fits in memory: left out")
                continue
            for method in ("multilevel", "groups", "ops"):
                best = plan(problem, method, budget=Budget(evaluations=options.evaluations), seed=options.seed + i)
                found.setdefault(method, []).append(best.value / start)
        full = np.array(found["multilevel"])
        row = {"size": size or "40 to 800", "problems": len(full)}
        row |= {method: f"{math.exp(np.log(values).mean()):.4f}" for method, values in found.items()}
        for method in ("groups", "ops"):
            row[f"{method} better"] = int((np.array(found[method]) < full * (1 - 1e-3)).sum())
            row[f"{method} worse"] = int((np.array(found[method]) > full * (1 + 1e-3)).sum())
        rows.append(row)
    return rows


def _problem(seed: int, size: int) -> tuple[str, Problem]:
    """One of the portfolio's random problems, or a graph of so many ops."""
    if not size:
        return drawn(seed)
    ccr = (0.1, 1.0, 5.0)[seed % 3]
    return f"{size} ops, ccr {ccr}", random_problem(size, (4, 8)[seed % 2], ccr=ccr, seed=seed)


if __name__ == "__main__":
    settings = {
        "ops": {"type": int, "nargs": "*", "default": (0, 2_000, 20_000), "help": "sizes; 0: drawn, 40 to 800"},
        "problems": {"type": int, "default": 12, "help": "of each size"},
        "evaluations": {"type": int, "default": 10_000, "help": "the budget of each run"},
        "seed": {"type": int, "default": 2000},
    }
    main("Multilevel: what its levels bring", measure, **settings)
