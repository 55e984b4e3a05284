"""The portfolio beside its members, each alone with the same budget; and beside SAGA's schedulers (PLACEWISE_DATA).

`found by` is who found the portfolio's plan; "> heft" means local search from heft's plan. `best` is the best member by
itself, and `to best` what the portfolio makes of it: at most 1 is the aim. On the shared instances, `to SAGA` is the
portfolio's value over that of the best of SAGA's four schedulers over all hash seeds: below 1 where ours is better.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import main, progress, random_problem
from placewise import Problem, plan, zoo
from placewise.driver import Budget
from placewise.errors import PlacewiseError
from placewise.files import load_cluster
from placewise.importers import instances
from placewise.planners import get
from placewise.planners.auto import MEMBERS

#: Model, box, objective. A bit of everything: chains, branches, loops unrolled, training; fits on one, fits barely.
CASES = (
    ("inception-v3", "placeto-4", "latency"),
    ("resnet-50-train", "placeto-4", "latency"),
    ("nmt-2", "hierarchical-4", "latency"),
    ("nmt-2-train", "hierarchical-8", "latency"),
    ("inception-v3", "hsdag", "latency"),
    ("bert-base", "hsdag", "latency"),
    ("llama-3-8b", "two-gpus-one-host", "latency"),
    ("llama-3-8b", "unequal-cards", "latency"),
    ("qwen3-30b-a3b-decode", "pc-24gib", "latency"),
    ("llama-3-8b", "unequal-cards", "throughput"),
    ("inception-v3", "placeto-4", "throughput"),
    ("bert-base-train", "four-gpus", "throughput"),
)


def problems(folder: Path | None) -> Iterator[tuple[str, Problem, float | None]]:
    """Name, problem, and SAGA's best makespan in seconds where it has one."""
    for path in sorted(folder.glob("*.json")) if folder else []:
        data = json.loads(path.read_text())
        found = data["baselines"]["saga-2.1.0"].values()
        theirs = [x for run in found for x in [run["makespan"], *(run["makespan_hashseed_0_3"] or [])]]
        yield path.stem, instances.load(data, path.stem), min(theirs) * 1e-6
    for model, box, objective in CASES:
        name = f"{model}, {box}" + (", throughput" if objective == "throughput" else "")
        yield name, Problem(zoo.load(model), load_cluster(box), objective=objective), None
    yield "random, 10,000 ops", random_problem(10_000, 8), None
    tight = random_problem(1_000, 4, ccr=5)
    yield "random, 1,000 ops, completion", replace(tight, objective="completion"), None


def measure(options: Any) -> list[dict[str, Any]]:
    folder = Path(options.data) / "instances" if options.data else None
    if folder is None or not folder.is_dir():
        progress("no shared instances: set PLACEWISE_DATA to compare with SAGA")
        folder = None
    budget = Budget(evaluations=options.evaluations) if options.evaluations else Budget(seconds=options.seconds)
    rows = []
    for name, problem, saga in problems(folder):
        if options.only and options.only not in name:
            continue
        progress(name)
        auto = plan(problem, "auto", budget=budget, seed=options.seed)
        row: dict[str, Any] = {"problem": name, "ms": f"{auto.value * 1e3:.5g}", "gap": f"{auto.gap:.1%}"}
        row["found by"] = auto.found_by.replace("local search from ", "> ")
        if saga:
            row["to SAGA"] = f"{auto.value / saga:.4f}"
        alone = {}
        for member in (*MEMBERS, "local-search") if options.members else ():
            if get(member).why_not(problem) is None:
                try:
                    alone[member] = plan(problem, member, budget=budget, seed=options.seed).value
                except PlacewiseError as error:
                    progress(f"  {member}: {error}")
        if alone:
            best = min(alone, key=lambda member: alone[member])
            row |= {"best": best, "to best": f"{auto.value / alone[best]:.4f}"}
            progress(
                "  " + ", ".join(f"{m} {v / auto.value:.3f}" for m, v in sorted(alone.items(), key=lambda x: x[1]))
            )
        rows.append(row)
    return rows


if __name__ == "__main__":
    settings = {
        "data": {"default": os.environ.get("PLACEWISE_DATA"), "help": "folder that holds instances/"},
        "seconds": {"type": float, "default": 10.0, "help": "the budget of each run"},
        "evaluations": {"type": int, "help": "the budget of each run, instead"},
        "seed": {"type": int, "default": 0},
        "members": {"action": "store_true", "help": "also run each member alone"},
        "only": {"help": "problems whose name has this in it"},
    }
    main("The portfolio, its members alone, and SAGA 2.1.0", measure, **settings)
