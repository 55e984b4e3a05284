"""Placements of whole models run by OpenVINO's HETERO on two logical CPUs, one with all cores and one with one thread.

Each device is profiled with the model, the cost of a cut is measured, and the exact plan is run beside each device
alone and other placements, in turns. Is it ever above the better single device? Is the predicted order the measured?
Where the machine is busy, the least of the times says more than their median: what disturbs only adds. "other threads"
is the share of the work that was not done by the busiest thread: none, if all is on `little` and it keeps to its one.

python bench/openvino_placements.py
python bench/openvino_placements.py --seconds 20 --placements 1  # six minutes on a machine that is busy six times over
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import openvino
from openvino import opset13 as ops
from scipy.stats import spearmanr

import placewise as pw
from harness import main, progress
from placewise import Device, Problem, engines, full_mesh, measure, zoo
from placewise.cluster import Cluster
from placewise.importers import openvino as importer
from placewise.machine import usable_cores
from placewise.measure.openvino import OpenvinoTarget
from placewise.measure.pytorch import materialised
from placewise.plans import Plan
from placewise.simulator import evaluate

LEAST = 5  # turns
DEVICES = {"big": f"CPU:{usable_cores()}", "little": "CPU:1"}


def converted(name: str, folder: Path) -> Path:
    """A model of the zoo with a batch of one."""
    module, args = zoo.module(name)
    module, args = materialised(module, tuple(arg[:1] for arg in args), "cpu")
    made = openvino.convert_model(module, example_input=args, input=[list(arg.shape) for arg in args])
    openvino.save_model(made, folder / f"{name}.xml", compress_to_fp16=False)
    return folder / f"{name}.xml"


def in_turns(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Seconds of each, measured in turns, so that whatever else happens happens to all."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    stop = time.perf_counter() + seconds
    while min(map(len, taken.values())) < LEAST or time.perf_counter() < stop:
        for name, call in calls.items():
            call()  # what ran before has left its threads and caches
            began = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - began)
    return {name: times[1:] for name, times in taken.items()}


def of_other_threads(call: Callable[[], Any], calls: int = 20) -> float:
    """Of the processor time of some calls, the share that all threads but the busiest one had."""

    def so_far() -> dict[str, int]:  # nanoseconds
        threads = Path("/proc/self/task").iterdir()
        return {thread.name: int((thread / "schedstat").read_text().split()[0]) for thread in threads}

    before = so_far()
    for _ in range(calls):
        call()
    worked = [after - before.get(thread, 0) for thread, after in so_far().items()]
    return 1.0 - max(worked) / sum(worked)


def by_hand(problem: Problem, placement: Any) -> Plan:
    placement = np.asarray(placement, np.int32)[problem.first_of_unit][problem.unit]
    value = float(evaluate(problem, placement).value[0])
    return Plan(problem, placement, None, value, 0.0, "hand", "0")


def cost_of_a_cut(folder: Path, seconds: float) -> tuple[float, float]:
    """(seconds, seconds per byte) that a cut adds to a chain of convolutions that goes to and fro."""
    depth, found = 16, []
    for side in (4, 64):
        x = given = ops.parameter([1, 64, side, side], np.float32, name="x")
        for i in range(depth):
            weight = np.random.default_rng(i).normal(size=(64, 64, 1, 1)).astype(np.float32)
            x = ops.convolution(x, ops.constant(weight), [1, 1], [0, 0], [0, 0], [1, 1], name=f"conv{i}")
        path = folder / f"chain{side}.xml"
        openvino.save_model(openvino.Model([x], [given], "chain"), path, compress_to_fp16=False)
        box = full_mesh([Device(name, kind="cpu", flops={"default": 1e11}, bandwidth=1e10) for name in DEVICES], 1e10)
        chain = Problem(importer.load(path).collapse_parameters().graph, box)
        order = np.argsort(chain.graph.topological_order)
        with ExitStack() as stack:
            ways = {"big": 0 * order, "little": 0 * order + 1, "both": order % 2}
            runs = {
                name: stack.enter_context(engines.get("openvino").run(by_hand(chain, way), str(path), DEVICES))
                for name, way in ways.items()
            }
            taken = in_turns({name: run.placed for name, run in runs.items()}, seconds)
        took = {name: min(times) for name, times in taken.items()}  # what disturbs only adds
        found.append((4 * 64 * side**2, (took["both"] - (took["big"] + took["little"]) / 2) / (depth - 1)))
    (small, low), (large, high) = found
    slope = max((high - low) / (large - small), 0.0)
    return max(low - slope * small, 1e-6), slope


def other_placements(problem: Problem, count: int) -> dict[str, Any]:
    """Prefixes of the program on one device and the rest on the other; blocks of it in turns; each op by chance."""
    rng, n = np.random.default_rng(0), problem.num_ops
    order = np.argsort(problem.graph.topological_order)
    found: dict[str, Any] = {}
    for i in range(count):
        cut = int(rng.integers(1, n))
        found[f"prefix of {100 * cut // n} % on {'big' if i % 2 else 'little'}"] = (order >= cut) ^ (i % 2 == 0)
    for blocks in np.geomspace(3, n / 4, count).astype(int).tolist():
        found[f"{blocks} blocks in turns"] = (order * blocks // n) % 2
    for share in np.linspace(0.1, 0.9, count).tolist():
        found[f"{100 * share:.0f} % of all ops on little"] = rng.random(n) < share
    return found


def measure_model(name: str, cut: tuple[float, float], folder: Path, options: argparse.Namespace) -> tuple[Any, Any]:
    path = converted(name, folder)
    profiles = {}
    for device, text in DEVICES.items():
        progress(f"{name}: profile on {text}")
        target = OpenvinoTarget(path, name, text)
        profiles[device] = measure.profile(target, folder=folder)
    devices = [Device(device, kind="cpu", profile=profile) for device, profile in profiles.items()]
    box: Cluster = full_mesh(devices, 1 / cut[1] if cut[1] else np.inf, cut[0])
    graph = importer.load(path, name, fuse=True).collapse_parameters().graph
    problem = engines.get("openvino").fit(Problem(graph, box))
    exact = pw.plan(problem, "min-cut")
    plans = {"exact": exact}
    others = other_placements(problem, options.placements)
    zeros = np.zeros(problem.num_ops, np.int32)
    plans |= {way: by_hand(problem, place) for way, place in {"big": zeros, "little": zeros + 1, **others}.items()}
    rows, calls, subgraphs = [], {}, {}
    with ExitStack() as stack:
        for way, plan in plans.items():
            progress(f"{name}: compile {way}")
            run = stack.enter_context(engines.get("openvino").run(plan, str(path), DEVICES))
            calls[way], subgraphs[way] = run.placed, len(run.subgraphs())
            for a, b in zip(calls["exact"](), run.placed(), strict=True):
                if np.abs(a - b).max() > 1e-4 * np.abs(a).max():
                    raise SystemExit(f"{name}: {way}: outputs differ by {np.abs(a - b).max()} of {np.abs(a).max()}")
        progress(f"{name}: measure")
        taken = in_turns(calls, options.seconds)
        helped = {way: of_other_threads(call) for way, call in calls.items()}
    for way, times in taken.items():
        least, low, median, high = np.percentile(times, [0, 25, 50, 75]).tolist()
        rows.append({"placement": way, "subgraphs": subgraphs[way], "predicted ms": 1e3 * plans[way].value,
                     "measured ms": 1e3 * median, "quartiles": f"{1e3 * low:.3g} to {1e3 * high:.3g}",
                     "least ms": 1e3 * least, "other threads": f"{helped[way]:.0%}"})  # fmt: skip
    value = {row["placement"]: row["measured ms"] for row in rows}
    better = min(("big", "little"), key=lambda device: value[device])
    ratio = np.array(taken["exact"]) / np.array(taken[better])
    summary = {
        "model": name, "exact plan": f"{int((exact.placement == 1).sum())} of {problem.num_ops} ops on little",
        "big ms": value["big"], "little ms": value["little"], "exact ms": value["exact"],
        "exact / better": float(np.median(ratio)),
        "quartiles": "{:.2f} to {:.2f}".format(*np.percentile(ratio, [25, 75])),
        "of the least": min(taken["exact"]) / min(min(taken[device]) for device in ("big", "little")),
        "rank correlation": correlation(rows, "measured ms"), "by the least": correlation(rows, "least ms"),
        "placements": len(rows), "turns": len(taken["exact"]),
    }  # fmt: skip
    return summary, rows


def correlation(rows: list[dict[str, Any]], measured: str) -> float:
    """Of the predicted order with the measured one."""
    return float(spearmanr([row["predicted ms"] for row in rows], [row[measured] for row in rows])[0])


def measure_all(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    tables: dict[str, list[dict[str, Any]]] = {}
    with TemporaryDirectory() as made:
        progress("what a cut costs")
        cut = cost_of_a_cut(Path(made), options.seconds / 10)
        summaries, load = [], [os.getloadavg()[0]]
        for name in options.models.split(","):
            summary, rows = measure_model(name, cut, Path(made), options)
            load.append(os.getloadavg()[0])
            summaries.append(summary)
            tables[name] = sorted(rows, key=lambda row: row["predicted ms"])
    busy = f"load {min(load):.1f} to {max(load):.1f} on {os.cpu_count()} cores"
    return {f"a cut costs {1e6 * cut[0]:.0f} us and {1e9 * cut[1]:.3f} ns per byte; {busy}": summaries, **tables}


if __name__ == "__main__":
    main(
        f"OpenVINO HETERO on logical devices: {', '.join(f'{name} {text}' for name, text in DEVICES.items())}",
        measure_all,
        models={"default": "inception-v3,resnet-50,bert-base", "help": "of the zoo"},
        seconds={"type": float, "default": 60, "help": "to measure each model's placements for"},
        placements={"type": int, "default": 5, "help": "of each of three kinds beside exact, big, little"},
    )
