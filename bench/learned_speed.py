"""Environment steps per second of CPU time: many episodes at once over a graph of 500 groups.

A step is one group of one episode put onto a device by chance, with the whole placement simulated again.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import harness
import placewise as pw
from placewise.learned.grouping import units


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for ops, memory in ((500, False), (500, True), (2000, False)):
        problem = harness.random_problem(ops, 4)
        if memory:  # so that the simulator tracks it
            held = problem.graph.resident_bytes.sum() + problem.graph.tensor_bytes.sum()
            problem = pw.Problem(
                problem.graph, problem.cluster.with_memory({f"d{d}": held * 0.9 for d in range(4)}), problem.costs
            )
        groups = units(problem)
        for count in (1, 16, 64):
            env = pw.PlacementVectorEnv(problem, count, groups=groups, start="random")
            rng = np.random.default_rng(0)
            speeds = []
            for seed in range(3):
                env.reset(seed=seed)
                steps, began = 0, time.process_time()
                while time.process_time() - began < options.seconds:
                    env.step(rng.integers(0, 4, count))
                    steps += count
                speeds.append(steps / (time.process_time() - began))
            rows.append(
                {
                    "groups": groups.count,
                    "memory": "tracked" if memory else "never binds",
                    "episodes": count,
                    "steps/CPU s": float(np.median(speeds)),
                    "least": min(speeds),
                    "most": max(speeds),
                }
            )
    return rows


if __name__ == "__main__":
    harness.main(__doc__.split("\n")[0], measure, seconds={"type": float, "default": 1.0, "help": "per measurement"})
