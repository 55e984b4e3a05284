"""Evaluations per second of the four methods that learn one graph, on the CPU and on a CUDA device.

A whole run counts: samples, their simulation (on the CPU either way), and what is learned from them. The CPU has one
thread, as always. An update has 16 samples, as by default, or `--samples`; Placeto's has an eighth as many episodes.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from harness import main, progress
from placewise import Budget, Problem, load_problem, plan
from placewise.learned import colocrl, hierarchical, hsdag, placeto
from placewise.planners import available

MODULES = {"colocrl": colocrl, "hierarchical": hierarchical, "hsdag": hsdag, "placeto": placeto}


def measure(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """A table per number of samples."""
    problem = load_problem(options.model, options.box)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices[::-1]:  # so that nothing starts or is compiled while the clock runs
        for method in options.methods:
            per_second(problem, method, device, 16, 0.1)
    tables = {}
    for samples in options.samples:
        rows = []
        for method in options.methods:
            progress(f"{method}: {samples} samples")
            rows.append({"method": method} | {
                device: per_second(problem, method, device, samples, options.seconds) for device in devices
            })  # fmt: skip
            if len(devices) == 2:
                rows[-1]["cuda / cpu"] = rows[-1]["cuda"] / rows[-1]["cpu"]
        card = torch.cuda.get_device_name() if len(devices) == 2 else "no CUDA device here"
        tables[f"{options.model}, {problem.num_ops} ops, {samples} samples per update; {card}"] = rows
    return tables


def per_second(problem: Problem, method: str, device: str, samples: int, seconds: float) -> float:
    """Evaluations per second of a run that has so many."""
    changed = {"policy": "none", "batch": max(1, samples // 8)} if method == "placeto" else {"samples": samples}
    endless = {name: 10**9 for name in ("updates", "patience") if name in available()[method].options}
    with ExitStack() as stack:
        for module in MODULES.values():
            stack.enter_context(patch.object(module, "compute_device", lambda: torch.device(device)))
        found = plan(problem, method, budget=Budget(seconds=seconds), options=changed | endless)
    return found.evaluations / found.seconds


if __name__ == "__main__":
    main(
        "Evaluations per second of methods that learn, on a CPU and on a CUDA device",
        measure,
        model={"default": "inception-v3", "help": "of the zoo; default: %(default)s"},
        box={"default": "placeto-4", "help": "default: %(default)s"},
        methods={"nargs": "+", "choices": list(MODULES), "default": list(MODULES), "help": "which"},
        samples={"nargs": "+", "type": int, "default": [16, 128], "help": "per update; default: 16 128"},
        seconds={"type": float, "default": 3.0, "help": "per measurement; default: %(default)s"},
    )
