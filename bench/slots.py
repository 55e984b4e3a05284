"""Latency in slots: the published inputs of Tarnawski et al. 2020, what is known of them, and `slot-milp` in 60 s.

    PLACEWISE_DATA=... python bench/slots.py
    PLACEWISE_DATA=... python bench/slots.py --inputs gnmt bert24 --seconds 120

Inputs are those of github.com/msr-fiddle/dnn-partitioning, with one slot per accelerator; times are milliseconds.
`greedy` is what their greedy method gives, `known` the best of all plans that it, their dynamic programme, HiGHS and
CP-SAT (120 s each, one thread) were seen to give. `expert` is evaluated here: those marked * exceed the memory, and **
takes more accelerators than there are. `auto` plans the same input for a parallel engine, where outputs leave an
accelerator one by one and CPUs are no pool: the answer to another question, not a better one.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import main, progress
from placewise import Budget, Problem, plan
from placewise.importers import dnn_partitioning
from placewise.simulator import evaluate

#: Input: (greedy, best known).
KNOWN = {
    "LayerGraphs/bert24": (100.219, 100.2185),
    "LayerGraphs/gnmt": (268.500, 225.648),
    "LayerGraphs/inceptionv3": (2485.24, 1442.91),
    "OperatorGraphs/bert_l-3": (416.204, 408.474),
    "OperatorGraphs/bert_l-12": (867.839, 867.839),
    "OperatorGraphs/resnet50": (839.536, 839.536),
}


def load(folder: Path, name: str, accelerators: int = 0) -> Problem:
    data = json.loads((folder / "latency-inputs" / f"{name}_inference.json").read_text())
    data["maxFPGAs"] = max(accelerators, data["maxFPGAs"])
    return dnn_partitioning.load(data, name, objective="latency")


def expert(folder: Path, name: str, problem: Problem) -> str:
    file = folder / "human-experts" / f"{Path(name).name}_inference_expert.json"
    if "Operator" in name or not file.exists():
        return "-"
    split = json.loads(file.read_text())
    wider = load(folder, name, len(split["fpgas"]))
    found = evaluate(wider, dnn_partitioning.load_split(split, wider))
    mark = "**" if wider.num_devices > problem.num_devices else "" if found.feasible[0] else "*"
    return f"{1e3 * found.value[0]:.1f}{mark}"


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    folder = Path(os.environ["PLACEWISE_DATA"], "dnn-partitioning")
    rows = []
    for name, (greedy, known) in KNOWN.items():
        if options.inputs and not any(part in name for part in options.inputs):
            continue
        problem = load(folder, name)
        found = plan(problem, "slot-milp", budget=Budget(seconds=options.seconds), options={"solver": options.solver})
        parallel = replace(problem, execution=replace(problem.execution, concurrency="parallel"))
        other = plan(parallel, "auto", budget=Budget(seconds=options.seconds))
        rows.append(
            {
                "input": Path(name).name,
                "greedy": f"{greedy:.1f}",
                "expert": expert(folder, name, problem),
                "known": f"{known:.2f}",
                "ours": f"{1e3 * found.value:.3f}",
                "bound": f"{1e3 * found.lower_bound:.2f}",
                "gap": f"{found.gap:.1%}" if found.gap > 1e-5 else "proved",
                "auto": f"{1e3 * other.value:.1f}",
                "gap ": f"{other.gap:.1%}",
            }
        )
        progress(str(rows[-1]))
    return rows


if __name__ == "__main__":
    main(
        "Latency in slots, in ms: what is known, and slot-milp",
        measure,
        seconds={"type": float, "default": 60.0, "help": "budget of each"},
        inputs={"nargs": "*", "help": "parts of names; all by default"},
        solver={"choices": ["highs", "cpsat"], "default": "highs"},
    )
