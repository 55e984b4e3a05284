"""Throughput without intervals: what HiGHS and CP-SAT alone do in 120 s on the published inputs, beside `milp` in 60 s.

    PLACEWISE_DATA=... python bench/noncontiguous.py
    PLACEWISE_DATA=... python bench/noncontiguous.py --inputs bert24_inference --clock cpu

Inputs are those of github.com/msr-fiddle/dnn-partitioning, times are milliseconds per sample. What the solvers do alone
was measured before, with one thread each, on one model: a binary per colour class and device, a variable per message
and device, classes numbered by weight; `alone` is the better value and the better bound of the two. Where the machine
is shared, `--clock cpu` counts the planner's own processor time instead of what the clock on the wall says.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from harness import main, progress
from placewise import Budget, load_problem, plan

#: Input: (value, bound, seconds) of HiGHS and of CP-SAT, alone, in at most 120 s; None where nobody tried.
ALONE: dict[str, tuple[tuple[float, float, float], tuple[float, float, float]] | None] = {
    "LayerGraphs/bert24_inference": ((17.7147, 17.713, 8.4), (17.7147, 15.401, 118)),
    "LayerGraphs/bert24_training": None,
    "LayerGraphs/gnmt_inference": ((31.6893, 31.686, 34), (31.6873, 31.687, 33)),
    "LayerGraphs/gnmt_training": None,
    "LayerGraphs/inceptionv3_inference": ((51.260, 51.039, 120), (51.757, 51.010, 120)),
    "LayerGraphs/resnet50_inference": None,
    "LayerGraphs/resnet50_training": None,
    "OperatorGraphs/bert_l-3_inference": ((21.9084, 21.908, 0.3), (21.9084, 21.908, 5.3)),
    "OperatorGraphs/bert_l-3_training": None,
    "OperatorGraphs/bert_l-12_inference": ((131.217, 110.46, 120), (130.038, 109.60, 120)),
    "OperatorGraphs/bert_L-12_training": ((401.200, 320.71, 120), (423.589, 319.46, 120)),
    "OperatorGraphs/resnet50_inference": ((124.349, 124.338, 109), (136.424, 91.92, 118)),
    "OperatorGraphs/resnet50_training": None,
}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    folder = Path(os.environ["PLACEWISE_DATA"], "dnn-partitioning", "throughput-inputs")
    if options.clock == "cpu":
        time.perf_counter = time.process_time  # the driver's clock; a solver's own limits stay on the wall
    rows = []
    for name, alone in ALONE.items():
        if options.inputs and not any(part in name for part in options.inputs):
            continue
        problem = load_problem(folder / f"{name}.json")
        plan(problem, "milp", budget=Budget(evaluations=1))  # imports and compiles
        began = time.process_time()
        found = plan(problem, "milp", budget=Budget(seconds=options.seconds), options={"solver": options.solver})
        spent = time.process_time() - began
        value = min((value for value, _, _ in alone), default=0.0) if alone else None
        bound = max((bound for _, bound, _ in alone), default=0.0) if alone else None
        rows.append(
            {
                "input": name.replace("LayerGraphs", "L").replace("OperatorGraphs", "O").replace("inference", "inf"),
                "alone": f"{value:.3f}" if value else "-",
                "gap": f"{1 - bound / value:.2%}" if value and bound else "-",
                "s": f"{min(seconds for _, _, seconds in alone):.0f}" if alone else "-",
                "milp": f"{1e3 * found.value:.4f}",
                "bound": f"{1e3 * found.lower_bound:.4f}",
                "gap ": f"{found.gap:.4%}" if found.gap > 1e-5 else "proved",
                "s ": f"{found.seconds:.1f}",
                "CPU s": f"{spent:.1f}",
            }
        )
        progress(str(rows[-1]))
    return rows


if __name__ == "__main__":
    main(
        "Throughput without intervals, in ms per sample: HiGHS or CP-SAT alone in 120 s, and milp",
        measure,
        seconds={"type": float, "default": 60.0, "help": "budget of each"},
        inputs={"nargs": "*", "help": "parts of names; all by default"},
        solver={"choices": ["highs", "cpsat"], "default": "highs"},
        clock={"choices": ["wall", "cpu"], "default": "wall"},
    )
