"""Seconds from the shell: --help, a cached plan of a small graph, and the first run with nothing compiled."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import main, progress
from placewise import Graph
from placewise.files import save_graph


def measure(options: Any) -> list[dict[str, Any]]:
    command = [str(Path(sys.executable).parent / "placewise")]
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "graph.json"
        chain = range(300)
        save_graph(
            Graph.create(
                op_names=[f"op{i}" for i in chain],
                flops=1e9,
                bytes_accessed=1e6,
                tensor_producer=list(chain),
                tensor_bytes=[1e6] * 300,
                edge_tensor=[i for i in chain if i + 1 < 300] + [i for i in chain if i + 3 < 300],
                edge_consumer=[i + 1 for i in chain if i + 1 < 300] + [i + 3 for i in chain if i + 3 < 300],
            ),
            graph,
        )
        base = [
            *command,
            "plan",
            str(graph),
            "--cluster",
            "two-gpus-one-host",
            "--out",
            str(Path(folder) / "plan.json"),
        ]
        plan = [*base, "--planner", "heft"]
        search = [*base, "--planner", "local-search", "--budget", "0.1s"]
        fresh = os.environ | {"NUMBA_CACHE_DIR": str(Path(folder) / "cache")}
        progress("cold compile")
        cold = _seconds(plan, fresh, 1)
        progress("cached")
        return [
            {"command": "placewise --help", "seconds": _seconds([*command, "--help"], os.environ, 5)},
            {"command": "placewise plan, 300 ops, cached", "seconds": _seconds(plan, fresh, 5)},
            {"command": "placewise plan, 300 ops, nothing compiled", "seconds": cold},
            {"command": "the same with 0.1 s of local search, cached", "seconds": _seconds(search, fresh, 5)},
        ]


def _seconds(command: list[str], environment: Any, repeat: int) -> float:
    best = float("inf")
    for _ in range(repeat):
        began = time.perf_counter()
        subprocess.run(command, env=environment, check=True, capture_output=True)
        best = min(best, time.perf_counter() - began)
    return best


if __name__ == "__main__":
    main("Start-up: wall seconds of whole commands", measure)
