"""How planning grows with the graph: seconds, memory, value and gap from a thousand ops to a million.

Each size runs in a process of its own, so that the peak of its memory is its own (with that of processes that it
starts; what they share counts twice). The default budget is a number of evaluations, which says what planning costs per
op, in CPU time, which other work disturbs less than the seconds; with `--seconds` the planner uses what it is given.
Both count everything from the problem to the checked plan: the bound, levels, search.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import main, progress, random_problem


def measure(options: Any) -> list[dict[str, Any]]:
    if options.one:
        return [_measure_one(options)]
    rows = []
    for planner in options.planners:
        for ops in options.ops or (1_000, 10_000, 100_000, 1_000_000):
            progress(f"{planner}: {ops:,} ops on {options.devices} devices")
            rows.append(_in_a_process(planner, ops, options))
    if options.plot:
        _plot(rows, Path(options.plot))
    return rows


def _in_a_process(planner: str, ops: int, options: Any) -> dict[str, Any]:
    import json

    command = [sys.executable, __file__, "--json", "--one", "--ops", str(ops), "--devices", str(options.devices)]
    command += ["--planners", planner, "--evaluations", str(options.evaluations)]
    command += ["--seconds", str(options.seconds)] if options.seconds else []
    row: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)[
        "rows"
    ][0]
    return row


def _measure_one(options: Any) -> dict[str, Any]:
    from placewise import plan
    from placewise.driver import Budget

    ops, planner = options.ops[0], options.planners[0]
    plan(random_problem(300, 2), planner, budget=Budget(evaluations=2_000))  # compiles
    problem = random_problem(ops, options.devices)
    budget = Budget(seconds=options.seconds) if options.seconds else Budget(evaluations=options.evaluations)
    began, cpu = time.perf_counter(), time.process_time()
    found = plan(problem, planner, budget=budget)
    whole, cpu = time.perf_counter() - began, time.process_time() - cpu
    peak = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "planner": planner,
        "ops": ops,
        "devices": options.devices,
        "seconds": round(whole, 1),
        "evaluations": found.evaluations,
        "CPU us per op": round(1e6 * cpu / ops, 1),
        "peak GiB": round(peak / 2**20, 2),
        "value": f"{found.value:.5g} s",
        "bound": f"{found.lower_bound:.5g} s",
        "gap": f"{found.gap:.1%}",
    }


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time per op against ops, both by powers of ten, a line for each planner, as an SVG."""
    from itertools import groupby
    from math import log10

    def x(ops: float) -> float:
        return 80 + 130 * (log10(ops) - 3)

    def y(cost: float) -> float:
        return 320 - 70 * log10(max(cost, 1.0))

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="560" height="380" font-family="sans-serif" font-size="13">'
    ]
    for power in range(5):
        parts.append(f'<line x1="80" x2="480" y1="{y(10**power)}" y2="{y(10**power)}" stroke="#ddd"/>')
        parts.append(f'<text x="70" y="{y(10**power) + 4}" text-anchor="end">{10**power:,} us</text>')
    for power in range(4):
        parts.append(f'<text x="{x(10 ** (power + 3))}" y="345" text-anchor="middle">{10 ** (power + 3):,}</text>')
    parts.append('<text x="290" y="370" text-anchor="middle">ops</text><text x="80" y="30">CPU time per op</text>')
    for planner, found in groupby(rows, key=lambda row: row["planner"]):
        points = [(x(row["ops"]), y(row["CPU us per op"])) for row in found]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="#2563eb"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="#2563eb"/>' for a, b in points]
        parts.append(f'<text x="{points[-1][0] + 10:.1f}" y="{points[-1][1] + 4:.1f}">{planner}</text>')
    path.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")


if __name__ == "__main__":
    settings = {
        "ops": {"type": int, "nargs": "*", "help": "sizes; 1,000 to 1,000,000 unless given"},
        "devices": {"type": int, "default": 8},
        "planners": {"nargs": "+", "default": ["multilevel"]},
        "evaluations": {"type": int, "default": 300, "help": "the budget of each size"},
        "seconds": {"type": float, "help": "the budget of each size, instead"},
        "plot": {"help": "write an SVG here"},
        "one": {"action": "store_true", "help": "one size, in this process"},
    }
    main("Scale: planning random graphs (about two edges per op)", measure, **settings)
