"""What every benchmark shares: the machine, random work of a stated shape, CPU time, and a table or JSON at the end."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from placewise import Budget, Cluster, Costs, Device, Graph, Problem, full_mesh, plan
from placewise import machine as here
from placewise.files import load_cluster
from placewise.planners import get
from placewise.plans import Plan
from placewise.problem import Execution


def random_problem(ops: int, devices: int, *, ccr: float = 1.0, seed: int = 0, window: int = 50) -> Problem:
    """Op i reads 1 to 3 of the previous `window` ops (about two edges per op); 10 to 200 us per op on devices of
    falling speed; `ccr` is the mean transfer time over the mean op time.
    """
    rng = np.random.default_rng(seed)
    degree = np.minimum(rng.integers(1, 4, ops), np.arange(ops))
    consumer = np.repeat(np.arange(ops), degree)
    back = np.minimum(rng.integers(1, window + 1, len(consumer)), consumer)
    seconds = rng.uniform(10e-6, 200e-6, ops)
    graph = Graph.create(
        op_names=[f"op{i}" for i in range(ops)],
        tensor_producer=np.arange(ops),
        tensor_bytes=rng.uniform(0.1, 1.9, ops) * 1e6 * ccr,
        edge_tensor=consumer - back,
        edge_consumer=consumer,
        resident=rng.integers(1, 1000, ops),
        scratch=rng.integers(1, 1000, ops),
    )
    cluster = full_mesh([Device(f"d{i}", memory=1e15) for i in range(devices)], 10e9, 5e-6)
    table = seconds[:, None] / np.linspace(1.0, 0.5, devices)
    return Problem(graph, cluster, Costs.create(table), execution=Execution())


def this_machine() -> Cluster:
    """The CPU and the first GPU of this machine, measured."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "box.yaml"
        file.write_text(here.to_yaml(here.describe_machine(progress), "this machine"), encoding="utf-8")
        box = load_cluster(file)
    first = next(device.name for device in box.devices if device.kind == "gpu")
    kept = tuple(device for device in box.devices if device.kind == "cpu" or device.name == first)
    names = {device.name for device in kept}
    return Cluster(kept, tuple(link for link in box.links if {link.source, link.target} <= names), box.name)


def best_planned(problem: Problem, budget: Budget) -> Plan:
    """What the portfolio finds; without ortools, as on borrowed machines, the best of searches that need none."""
    searches = [name for name in ("offload", "local-search", "genetic") if get(name).why_not(problem) is None]
    names = ["auto"] if importlib.util.find_spec("ortools") else searches
    return min((plan(problem, name, budget=budget) for name in names), key=lambda made: made.value)


def cpu_seconds(work: Callable[[], Any], repeat: int = 5) -> float:
    """The least CPU time of several runs: what the work costs when the machine is quiet."""
    return _least(time.process_time, work, repeat)


def wall_seconds(work: Callable[[], Any], repeat: int = 5) -> float:
    """The least wall time of several runs."""
    return _least(time.perf_counter, work, repeat)


def cpu_so_far() -> float:
    """Of this process, and of those that it has waited for, as solvers have their own."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _least(clock: Callable[[], float], work: Callable[[], Any], repeat: int) -> float:
    best = float("inf")
    for _ in range(repeat):
        began = clock()
        work()
        best = min(best, clock() - began)
    return best


#: The argument of benchmarks whose figures no clock is in.
WORKERS: dict[str, Any] = {"type": int, "default": 1, "help": "processes; the figures do not depend on it"}


def each(work: Callable[..., Any], cases: Iterable[tuple[Any, ...]], workers: int) -> list[Any]:
    """What `work` makes of each case, in their order, in so many processes."""
    if workers == 1:
        return [work(*case) for case in cases]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        return [found.result() for found in [pool.submit(work, *case) for case in cases]]


def main(title: str, measure: Callable[[argparse.Namespace], Any], **arguments: Any) -> None:
    """Run a benchmark from the command line.

    `measure` returns rows, each a dict of column to value; or several tables, each as rows under its title.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    for name, settings in arguments.items():
        parser.add_argument(f"--{name}", **settings)
    options = parser.parse_args()
    found = measure(options)
    if options.json:
        what = "rows" if isinstance(found, list) else "tables"
        print(json.dumps({"title": title, "machine": machine(), what: found}, indent=1))
        return
    print(f"{title}\n{machine()}")
    for name, rows in {"": found}.items() if isinstance(found, list) else found.items():
        print(f"\n{textwrap.fill(name, 80)}\n" if name else "")
        _print_table(rows)


def _print_table(rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_text(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    for first, *rest in [columns, ["-" * width for width in widths], *cells]:
        print("  ".join([first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True))]))


def machine() -> str:
    """Where and when figures were made."""
    return f"{os.cpu_count()} cores, {_cpu()}, Python {platform.python_version()}, {date.today().isoformat()}"


def progress(text: str) -> None:
    """Talk, on stderr."""
    print(text, file=sys.stderr, flush=True)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown CPU"
