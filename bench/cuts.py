"""Minimum cuts, partitions and pipelines: how long they take and how far from the bound they end, by size.

python bench/cuts.py --ops 10000 --devices 2
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from harness import main, random_problem
from placewise import Budget, plan
from placewise.problem import Execution, Problem


def asked(problem: Problem) -> list[tuple[str, Problem]]:
    sequential = replace(problem, execution=Execution(concurrency="sequential"))
    pipelined = replace(problem, objective="throughput")
    return [
        ("min-cut", sequential), ("pipeline-dp", pipelined), ("metis", pipelined), ("scotch", pipelined),
        ("kahip", pipelined), ("prefix-sweep", problem),
    ]  # fmt: skip


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for method, problem in asked(random_problem(options.ops, options.devices)):
        plan(random_problem(10, 2), method, budget=Budget(evaluations=10))  # imports and compiles
        found = plan(problem, method, budget=Budget(seconds=options.seconds))
        rows.append(
            {
                "planner": method, "objective": problem.objective, "engine": problem.execution.concurrency,
                "value (s)": found.value, "gap": f"{found.gap:.2%}", "seconds": found.seconds,
                "evaluations": found.evaluations,
            }
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    main(
        "Cuts, partitions and pipelines",
        measure,
        ops={"type": int, "default": 10_000},
        devices={"type": int, "default": 4},
        seconds={"type": float, "default": 20.0, "help": "budget of each"},
    )
