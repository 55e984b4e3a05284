"""A part of bench/exact.py: the latency of one sample in slots, and under our own execution model.

The inputs have one slot per accelerator; times are milliseconds. `greedy` is what the authors' greedy method gives,
`known` the best of all plans that it, their dynamic programme, HiGHS and CP-SAT (120 s each, one thread) were seen to
give. `expert` is evaluated here: those marked * exceed the memory, and ** takes more accelerators than there are.
`auto` plans the same input for a parallel engine, where outputs leave an accelerator one by one, CPUs are no pool and
memory is live: the answer to another question, not a better one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from placewise import Budget, Problem, plan
from placewise.importers import dnn_partitioning
from placewise.problem import Execution
from placewise.simulator import evaluate

#: Input: (greedy, best known).
KNOWN: Final = {
    "LayerGraphs/bert24": (100.219, 100.2185),
    "LayerGraphs/gnmt": (268.500, 225.648),
    "LayerGraphs/inceptionv3": (2485.24, 1442.91),
    "OperatorGraphs/bert_l-3": (416.204, 408.474),
    "OperatorGraphs/bert_l-12": (867.839, 867.839),
    "OperatorGraphs/resnet50": (839.536, 839.536),
}


def rows(options: argparse.Namespace, folder: Path, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """In slots: one for each input: its name in the table, by its name on disk."""
    for name, title in names.items():
        greedy, known = KNOWN[name]
        problem = _load(folder, name)
        found = plan(problem, "slot-milp", budget=Budget(seconds=options.seconds), options={"solver": options.solver})
        yield {
            "input": title,
            "greedy": f"{greedy:.1f}",
            "expert": _expert(folder, name, problem),
            "known": f"{known:.2f}",
            "ours": f"{1e3 * found.value:.3f}",
            "bound": f"{1e3 * found.lower_bound:.2f}",
            "gap": f"{found.gap:.1%}" if found.gap > 1e-5 else "proved",
            "s": f"{found.seconds:.1f}",
        }


def own_model(options: argparse.Namespace, folder: Path, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The same inputs where devices run op by op, transfers queue and memory is what is live."""
    for name, title in names.items():
        problem = _load(folder, name)
        found = plan(replace(problem, execution=Execution()), "auto", budget=Budget(seconds=options.seconds))
        yield {
            "input": title,
            "auto": f"{1e3 * found.value:.3f}",
            "found by": found.found_by,
            "bound": f"{1e3 * found.lower_bound:.2f}",
            "gap": f"{found.gap:.1%}" if found.gap > 1e-5 else "proved",
            "s": f"{found.seconds:.1f}",
        }


def _load(folder: Path, name: str, accelerators: int = 0) -> Problem:
    data = json.loads((folder / "latency-inputs" / f"{name}_inference.json").read_text())
    data["maxFPGAs"] = max(accelerators, data["maxFPGAs"])
    return dnn_partitioning.load(data, name, objective="latency")


def _expert(folder: Path, name: str, problem: Problem) -> str:
    file = folder / "human-experts" / f"{Path(name).name}_inference_expert.json"
    if "Operator" in name or not file.exists():
        return "-"
    split = json.loads(file.read_text())
    wider = _load(folder, name, len(split["fpgas"]))
    found = evaluate(wider, dnn_partitioning.load_split(split, wider))
    mark = "**" if wider.num_devices > problem.num_devices else "" if found.feasible[0] else "*"
    return f"{1e3 * found.value[0]:.1f}{mark}"
