"""The kernels index arrays unchecked, so this runs them once with Numba's bounds checks on, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import numpy as np
from placewise.planners.heft import schedule
from placewise.simulator import evaluate, simulate
from placewise.simulator.bounds import lower_bound
from placewise.simulator.incremental import Incremental
from problems import problem_of, random_placement, random_problem
from test_heft import weaving

for seed in range(300):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, constrained=seed % 2 == 0)
    schedule(problem)
    if seed < 50:
        lower_bound(problem)
    placement = random_placement(rng, problem)
    simulate(problem, placement)
    evaluate(problem, np.stack([placement] * 3), peaks=False)
    if problem.objective != "throughput" and problem.execution.concurrency == "parallel" and problem.num_ops:
        current = Incremental(problem, placement)
        other = random_placement(rng, problem)
        current.probe(other[None], current.value)
        current.accept(other)
for seed in range(3):
    schedule(weaving(np.random.default_rng(seed), 300, 250))
wide = problem_of(np.ones((5000, 2)))
simulate(wide, np.arange(5000) % 2)
print("within bounds")
"""


def test_kernels_stay_within_their_arrays(tmp_path):
    tests = str(Path(__file__).parent)
    environment = os.environ | {
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_OPT": "0",  # to compile is most of the work
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "within bounds", done.stderr[-2000:]
