"""How many placements the simulator evaluates per second: distinct random placements, with contention."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness import cpu_seconds, main, progress, random_problem, wall_seconds
from placewise import evaluate


def measure(options: Any) -> list[dict[str, Any]]:
    rows = []
    for ops, batch in ((1_000, 4_000), (10_000, 400)):
        for ccr in (0.1, 1.0, 5.0):
            progress(f"{ops} ops, transfers {ccr} times the compute")
            problem = random_problem(ops, options.devices, ccr=ccr)
            places = np.random.default_rng(1).integers(0, options.devices, (batch, ops)).astype(np.int32)
            evaluate(problem, places[:1], peaks=True)
            evaluate(problem, places[:1], peaks=False)
            plain = cpu_seconds(lambda p=problem, x=places: evaluate(p, x, peaks=False, threads=1)) / batch
            memory = cpu_seconds(lambda p=problem, x=places: evaluate(p, x, peaks=True, threads=1)) / batch
            one = wall_seconds(lambda p=problem, x=places: evaluate(p, x, peaks=False, threads=1))
            two = wall_seconds(lambda p=problem, x=places: evaluate(p, x, peaks=False, threads=2))
            rows.append(
                {
                    "ops": ops,
                    "edges": problem.graph.num_edges,
                    "ccr": ccr,
                    "evals/CPU s": 1 / plain,
                    "ns/op": plain / ops * 1e9,
                    "with memory": 1 / memory,
                    "dearer": memory / plain,
                    "2 threads": one / two,
                }
            )
    return rows


if __name__ == "__main__":
    main("Simulator: full evaluations of distinct random placements", measure, devices={"type": int, "default": 4})
