"""Latency in our own execution model: what exact methods find and prove beside the portfolio, each with one budget.

python bench/latency.py --seconds 60

The shared instances need PLACEWISE_DATA; models come from the zoo, with their parameters folded into the ops that read
them. `blocks` counts the parts between ops that everything passes through (those that differ in brackets) and `ops` the
largest of them. A method that ends early has proved its plan, or cannot do more.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import main, progress
from placewise import Budget, Problem, plan, zoo
from placewise.files import load_cluster
from placewise.importers import instances
from placewise.planners import get
from placewise.planners.series import Row, joints

INSTANCES = ("dnn-inception-d4", "dnn-transformer-d4", "narrow-n1000-d8")
#: Model and box.
MODELS = (
    ("alexnet", "gpu-cpu-npu"), ("squeezenet", "gpu-cpu-npu"), ("googlenet", "gpu-cpu-npu"), ("googlenet", "placeto-4"),
    ("resnet-50", "placeto-4"), ("resnet-50", "hsdag"), ("resnet-152", "placeto-4"),
    ("inception-v3", "placeto-4"), ("inception-v3", "placeto-2"), ("inception-v3", "hsdag"),
)  # fmt: skip
PLANNERS = ("series", "cpsat", "auto")


def problems(folder: Path | None, only: str) -> Iterator[tuple[str, Problem]]:
    for name in INSTANCES if folder else ():
        if only in name:
            yield name, instances.load(json.loads((folder / f"{name}.json").read_text()), name)  # type: ignore[operator]
    for model, box in MODELS:
        if only in f"{model}, {box}":
            yield f"{model}, {box}", Problem(zoo.load(model).collapse_parameters().graph, load_cluster(box))


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    data = os.environ.get("PLACEWISE_DATA")
    if not data:
        progress("no shared instances: set PLACEWISE_DATA")
    rows = []
    for name, problem in problems(Path(data) / "instances" if data else None, options.only):
        row = Row(problem) if joints(problem)[1] else None
        parts = f"{len(row.which)} ({len(row.blocks)})" if row else "1 (1)"
        largest = max(block.problem.num_ops for block in row.blocks) if row else problem.num_ops
        for method in options.planners.split(","):
            why_not = get(method).why_not(problem)
            if why_not:
                progress(f"{name}: {method} {why_not}")
                continue
            found = plan(problem, method, budget=Budget(seconds=options.seconds))
            rows.append(
                {
                    "problem": name, "blocks": parts, "ops": largest, "planner": method,
                    "value (ms)": f"{found.value * 1e3:.4f}", "bound": f"{found.lower_bound * 1e3:.4f}",
                    "gap": "proved" if found.is_optimal else f"{found.gap:.2%}", "s": round(found.seconds, 1),
                }
            )  # fmt: skip
            progress(" ".join(map(str, rows[-1].values())))
    return rows


if __name__ == "__main__":
    main(
        "Latency, exact methods and the portfolio",
        measure,
        seconds={"type": float, "default": 60.0, "help": "budget of each"},
        planners={"default": ",".join(PLANNERS)},
        only={"default": "", "help": "problems whose name has this in it"},
    )
