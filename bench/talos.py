"""Talos: the ten pairs of packed chains beside the exact optima and the paper's figures (set PLACEWISE_DATA or --data);
with --affinity, the paper's table of affinities as printed, as its authors made it, and as its formulas give it.
"""

from __future__ import annotations

import csv
import json
import os
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from harness import main, progress
from placewise import Budget, plan
from placewise.importers import packed_chains
from placewise.planners.talos import affinity, distance, hellinger

#: Reduction in % beside the first model on the GPU and the second on the CPU: the paper's bars, at tv = 20 ms where it
#: shows them (figure 10), else at 10 ms (figure 9). The others are not shown.
PAPER = {
    "resnet+squeezenet": "20.8",
    "googlenet+alexnet": "48.4",
    "resnet+alexnet": "30.6",
    "bert+googlenet": "67.7 (10 ms)",
    "bert+squeezenet": "30.0 (10 ms)",
    "resnet+bert": "69.0 (10 ms)",
    "bert+alexnet": "19.9 (10 ms)",
}
#: Table III as printed; the distance in the authors' sheet; the divisor in their script; the op names in common.
#: The distance is what `hellinger` gives for the speedups in their tables, but for one cell: there it gives 0.18.
AFFINITY = {
    "BERT+GoogleNet": (0.14, 0.13, 0.90, 0.55),
    "BERT+SqueezeNet": (0.17, 0.21, 0.90, 0.45),
    "ResNet50+BERT": (0.20, 0.27, 0.90, 0.52),
    "AlexNet+SqueezeNet": (0.29, 0.13, 0.80, 0.88),
    "ResNet50+GoogleNet": (0.21, 0.23, 0.80, 0.91),
    "GoogleNet+SqueezeNet": (0.32, 0.15, 0.65, 0.84),
    "BERT+AlexNet": (0.37, 0.24, 0.65, 0.51),
    "ResNet50+SqueezeNet": (0.46, 0.30, 0.65, 0.85),
    "GoogleNet+AlexNet": (0.53, 0.35, 0.65, 0.84),
    "ResNet50+AlexNet": (0.56, 0.37, 0.65, 0.89),
}
RECOMPUTED = {"GoogleNet+AlexNet": 0.18}


def measure(options: Any) -> Any:
    folder = Path(options.data) / "talos" if options.data else None
    if options.affinity:
        return affinities(folder)
    if folder is None or not folder.is_dir():
        progress("no packed chains: set PLACEWISE_DATA")
        return [{"pair": "none"}]
    data = json.loads((folder / "packed_tv20.json").read_text())
    optima = data["exact_optimal_toct_ms"].items()
    return [pair(data, name, exact, float(options.seconds), options.seed) for name, exact in optima]


def pair(data: Any, name: str, exact: float, seconds: float, seed: int) -> dict[str, Any]:
    progress(name)
    problem = packed_chains.load(data, name.split("+"))
    first = np.where(problem.graph.model == 0, 0, 1)
    apart = float(problem.seconds[np.arange(problem.num_ops), first].sum()) * 1e3
    budget = Budget(seconds=seconds)
    found = {planner: plan(problem, planner, budget=budget).value * 1e3 for planner in ("tsam", "heft", "spt")}
    found["Talos"] = plan(problem, "talos", budget=budget, options={"moves": 0}).value * 1e3
    reassigned = plan(problem, "talos", budget=budget, seed=seed)
    found["reassigned"] = reassigned.value * 1e3
    cells = {key.upper() if key.islower() and key != "reassigned" else key: f"{v:.1f}" for key, v in found.items()}
    return {
        "pair, ms": name,
        "G+C": f"{apart:.1f}",
        **cells,
        "optimum": f"{exact:.1f}",
        "above": f"{found['reassigned'] / exact - 1:z.2%}",
        "s": f"{reassigned.seconds:.1f}",
        "reduced %": f"{100 * (1 - found['reassigned'] / apart):.1f}",
        "paper %": PAPER.get(name, "-"),
    }


def affinities(folder: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Table III as printed and from what the authors published; and by Eq. 2 and 3 from the forward traces at hand."""
    rows: list[dict[str, Any]] = []
    for name, (printed, sheet, divisor, overlap) in AFFINITY.items():
        apart = RECOMPUTED.get(name, sheet)
        real = round(affinity(apart, overlap, 1.0), 2)
        rows.append({
            "pair": name, "printed": printed, "sheet": sheet, "divisor": divisor, "quotient": round(sheet / divisor, 2),
            "Hellinger": apart, "overlap": overlap, "H / overlap": real,
            "above 0.4": f"{'yes' if printed > 0.4 else 'no'} / {'yes' if real > 0.4 else 'no'}",
        })  # fmt: skip
    traces = sorted(folder.glob("*_forward.csv")) if folder else []
    speedups = {path.stem.removesuffix("_forward"): speedup_by_name(path) for path in traces}
    formula: list[dict[str, Any]] = []
    for (a, of_a), (b, of_b) in combinations(speedups.items(), 2):
        x, y = (np.array(list(of.values())) for of in (of_a, of_b))
        common, total = len(of_a.keys() & of_b.keys()), max(len(of_a), len(of_b))
        apart, by_sheet = distance(x, y), hellinger(x, y)
        formula.append({
            "pair": f"{a}+{b}", "op names": f"{len(of_a)}, {len(of_b)}", "overlap": round(common / total, 2),
            "Eq. 2": round(apart, 2), "Eq. 3": round(affinity(apart, common, total), 2),
            "Eq. 3, sorted": round(affinity(distance(np.sort(x), np.sort(y)), common, total), 2),
            "Hellinger": round(by_sheet, 2), "H / overlap": round(affinity(by_sheet, common, total), 2),
        })  # fmt: skip
    return {"": rows, "The forward traces, by the formulas: speedups by op name": formula}


def speedup_by_name(path: Path) -> dict[str, float]:
    """Time on the CPU over time on the GPU, of all ops of a name together."""
    cpu: dict[str, float] = {}
    gpu: dict[str, float] = {}
    with path.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            cpu[row["op"]] = cpu.get(row["op"], 0.0) + float(row["cpu_us_median"])
            gpu[row["op"]] = gpu.get(row["op"], 0.0) + float(row["gpu_us_median"])
    return {name: cpu[name] / gpu[name] for name in cpu}


if __name__ == "__main__":
    main(
        "Talos: sum of two models' completion times on a GPU and a CPU, and affinities",
        measure,
        data={"default": os.environ.get("PLACEWISE_DATA"), "help": "folder that holds talos/"},
        seconds={"default": "5", "help": "budget of each planner"},
        seed={"type": int, "default": 0, "help": "of the reassignment"},
        affinity={"action": "store_true", "help": "the table of affinities instead"},
    )
