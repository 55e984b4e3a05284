"""List schedulers: makespan and CPU time beside SAGA's on the shared instances (PLACEWISE_DATA, --data), and scale."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from harness import cpu_seconds, main, progress, random_problem
from placewise import Problem, plan
from placewise.driver import Budget, Context
from placewise.importers import instances
from placewise.planners import get

#: Ours, the options that match SAGA's variant, and SAGA's name. Lookahead has no counterpart: it is set beside HEFT.
METHODS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("heft", {"self_links": True}, "HEFT"),
    ("cpop", {}, "CPoP"),
    ("peft", {"real_links": True}, "PEFT"),
    ("etf", {}, "ETF"),
    ("lookahead", {}, "HEFT"),
)
SCALE = ("heft", "cpop", "peft", "etf", "lookahead", "m-topo", "m-etf", "m-sct")


def seconds_of(name: str, problem: Problem, options: dict[str, Any], repeat: int) -> float:
    """CPU time of the method by itself; `plan` has compiled it."""
    method = get(name).function
    return cpu_seconds(lambda: method(problem, Context(problem, Budget(), 0, 0.0, None), **options), repeat)


def measure(options: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    folder = Path(options.data) / "instances" if options.data else None
    if folder is None or not folder.is_dir():
        progress("no shared instances: set PLACEWISE_DATA to compare with SAGA")
    for path in sorted(folder.glob("*.json")) if folder else []:
        progress(path.stem)
        data = json.loads(path.read_text())
        problem = instances.load(data, path.stem)
        for name, given, saga in METHODS:
            theirs = data["baselines"]["saga-2.1.0"][saga]
            ours = plan(problem, name, options=given).value * 1e6
            seconds = seconds_of(name, problem, given, 5)
            rows.append(
                {
                    "problem": path.stem,
                    "method": name,
                    "makespan us": round(ours, 1),
                    "SAGA": saga,
                    "SAGA us": round(theirs["makespan"], 1),
                    "ours/SAGA": f"{ours / theirs['makespan']:.4f}",
                    "CPU ms": seconds * 1e3,
                    "SAGA CPU ms": theirs["cpu_seconds"] * 1e3,
                    "times faster": round(theirs["cpu_seconds"] / seconds),
                }
            )
    for ops in (1_000, 10_000, 100_000):
        problem = random_problem(ops, 8)
        for name in SCALE:
            if get(name).why_not(problem):
                continue
            progress(f"{ops} ops on 8 devices: {name}")
            value = plan(problem, name).value * 1e6
            seconds = seconds_of(name, problem, {}, 3 if ops < 100_000 else 1)
            rows.append(
                {
                    "problem": f"random, {ops:,} ops, 8 devices",
                    "method": name,
                    "makespan us": round(value, 1),
                    "CPU ms": seconds * 1e3,
                }
            )
    return rows


if __name__ == "__main__":
    data = {"default": os.environ.get("PLACEWISE_DATA"), "help": "folder that holds instances/"}
    main("List schedulers beside SAGA 2.1.0 under its semantics, and at scale", measure, data=data)
