"""Seconds to build, validate, save and load a graph of 100,000 ops and 200,000 edges."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from harness import main, random_problem, wall_seconds
from placewise.files import load_graph, load_problem_file, save_graph, save_problem


def measure(options: Any) -> list[dict[str, Any]]:
    rows = []
    problem = random_problem(options.ops, 8)
    build = wall_seconds(lambda: random_problem(options.ops, 8), 2)
    rows.append({"step": "build and validate a graph and problem", "seconds": build})
    with tempfile.TemporaryDirectory() as folder:
        for name in ("graph.json", "graph.json.gz"):
            path = Path(folder) / name
            save = wall_seconds(lambda p=path: save_graph(problem.graph, p), 2)
            load = wall_seconds(lambda p=path: load_graph(p), 2)
            rows += [{"step": f"save {name}", "seconds": save}, {"step": f"load and validate {name}", "seconds": load}]
            rows[-1]["MiB"] = path.stat().st_size / 2**20
        path = Path(folder) / "problem.json"
        rows.append({"step": "save problem.json", "seconds": wall_seconds(lambda: save_problem(problem, path), 2)})
        rows.append({"step": "load problem.json", "seconds": wall_seconds(lambda: load_problem_file(path), 2)})
        rows[-1]["MiB"] = path.stat().st_size / 2**20
    return rows


if __name__ == "__main__":
    main("Files: a graph of 100,000 ops", measure, ops={"type": int, "default": 100_000})
