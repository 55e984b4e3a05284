"""A part of bench/exact.py: throughput without intervals, beside what HiGHS and CP-SAT do alone.

Times are milliseconds per sample. What the solvers do alone was measured before, with one thread each, on one model: a
binary per colour class and device, a variable per message and device, classes numbered by weight. `alone` is the better
value, `gap` that of the better bound and `s` the shorter time of the two.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, Final

from harness import cpu_so_far
from placewise import Budget, Problem, plan

#: Input: (value, bound, seconds) of HiGHS and of CP-SAT, alone, in at most 120 s; None where nobody tried.
ALONE: Final[dict[str, tuple[tuple[float, float, float], tuple[float, float, float]] | None]] = {
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


def rows(
    options: argparse.Namespace, load: Callable[[str], Problem], names: dict[str, str], alone: bool = True
) -> Iterator[dict[str, Any]]:
    """One for each input: its name in the table, by its name on disk."""
    for name, title in names.items():
        problem = load(name)
        plan(problem, "milp", budget=Budget(evaluations=1))  # imports and compiles
        began = cpu_so_far()
        found = plan(problem, "milp", budget=Budget(seconds=options.seconds), options={"solver": options.solver})
        spent = cpu_so_far() - began
        row = {"input": title} | (_alone(name) if alone else {})
        yield row | {
            "milp": f"{1e3 * found.value:.4f}",
            "bound": f"{1e3 * found.lower_bound:.4f}",
            "gap ": f"{found.gap:.3%}" if found.gap > 1e-5 else "proved",
            "s ": f"{found.seconds:.1f}",
            "CPU s": f"{spent:.1f}",
        }


def _alone(name: str) -> dict[str, str]:
    both = ALONE[name]
    if both is None:
        return {"alone": "-", "gap": "-", "s": "-"}
    value, bound = min(value for value, _, _ in both), max(bound for _, bound, _ in both)
    return {
        "alone": f"{value:.3f}",
        "gap": f"{1 - bound / value:.2%}",
        "s": f"{min(seconds for _, _, seconds in both):.0f}",
    }
