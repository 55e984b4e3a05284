"""HEFT: seconds at scale, and its makespans beside SAGA's on the shared instances (set PLACEWISE_DATA or --data)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from harness import cpu_seconds, main, progress, random_problem
from placewise import plan
from placewise.driver import Budget, Context
from placewise.importers import instances
from placewise.planners.heft import heft


def measure(options: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for ops in (1_000, 10_000, 100_000):
        progress(f"{ops} ops on 8 devices")
        problem = random_problem(ops, 8)
        context = Context(problem, Budget(), 0, 0.0, None)
        heft(problem, context)
        seconds = cpu_seconds(lambda p=problem, c=context: heft(p, c), 3)
        rows.append({"problem": f"random, {ops:,} ops, 8 devices", "CPU s": seconds})
    folder = Path(options.data) / "instances" if options.data else None
    if folder is None or not folder.is_dir():
        progress("no shared instances: set PLACEWISE_DATA to compare with SAGA")
        return rows
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        problem = instances.load(data, path.stem)
        saga = instances.load_baselines(data)["saga-2.1.0/HEFT"]
        ours = plan(problem, "heft", options={"self_links": True})
        context = Context(problem, Budget(), 0, 0.0, None)
        seconds = cpu_seconds(lambda p=problem, c=context: heft(p, c, self_links=True), 3)
        rows.append(
            {
                "problem": path.stem,
                "CPU s": seconds,
                "makespan us": round(ours.value * 1e6, 1),
                "SAGA us": round(saga.makespan * 1e6, 1),
                "ours/SAGA": f"{ours.value / saga.makespan:.4f}",
                "SAGA CPU s": data["baselines"]["saga-2.1.0"]["HEFT"]["cpu_seconds"],
            }
        )
    return rows


if __name__ == "__main__":
    data = {"default": os.environ.get("PLACEWISE_DATA"), "help": "folder that holds instances/"}
    main("HEFT: time, and makespan beside SAGA 2.1.0 under its semantics", measure, data=data)
