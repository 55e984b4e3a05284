"""How many moves local search judges per second: from checkpoints with cut-offs, against full re-simulation.

Both judge the same moves of single ops from the same placement (HEFT's); improving moves must agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness import cpu_seconds, main, progress, random_problem
from placewise import evaluate, plan
from placewise.simulator.incremental import Incremental


def measure(options: Any) -> list[dict[str, Any]]:
    rows = []
    for ops in (1_000, 10_000):
        for ccr in (0.1, 1.0, 5.0):
            progress(f"{ops} ops, transfers {ccr} times the compute")
            problem = random_problem(ops, options.devices, ccr=ccr)
            base = plan(problem, "heft").placement
            current = Incremental(problem, base)
            rng = np.random.default_rng(0)
            moved = rng.integers(0, ops, options.moves)
            places = np.repeat(base[None], options.moves, axis=0)
            places[np.arange(options.moves), moved] = rng.integers(0, options.devices, options.moves)
            full = evaluate(problem, places, peaks=False).value
            partial = current.probe(places, current.value)
            better = full < current.value * (1 - 1e-12)
            assert np.array_equal(partial[better], full[better])
            assert np.isinf(partial[~better]).all()
            slow = cpu_seconds(lambda p=problem, x=places: evaluate(p, x, peaks=False, threads=1), 3) / len(places)
            fast = cpu_seconds(lambda c=current, x=places: c.probe(x, c.value), 3) / len(places)
            rows.append(
                {
                    "ops": ops,
                    "ccr": ccr,
                    "full moves/CPU s": 1 / slow,
                    "incremental": 1 / fast,
                    "times faster": slow / fast,
                    "improving": f"{better.mean():.0%}",
                }
            )
    return rows


if __name__ == "__main__":
    settings = {"devices": {"type": int, "default": 4}, "moves": {"type": int, "default": 512}}
    main("Local search: moves judged per CPU second, from HEFT's placement", measure, **settings)
