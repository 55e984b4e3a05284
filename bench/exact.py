"""Exact contiguous pipelines beside the authors' program: what is proved, and at what cost.

PLACEWISE_DATA=... python bench/exact.py --section contiguous
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np

from harness import main, progress
from placewise import Budget, Device, Problem, full_mesh, plan, zoo
from placewise.costs import Costs
from placewise.graph import GraphBuilder
from placewise.importers import dnn_partitioning
from placewise.problem import Execution

Row = dict[str, Any]

#: As given: the optimum that the authors' program prints (ms) and its CPU seconds on a 2-core VM, `g++ -O3`; None where
#: it was stopped after 467 s, needing 18.5 GB.
AUTHORS: Final[dict[str, tuple[float, float | None]]] = {
    "LayerGraphs/bert24_inference": (17.7899, 0.0), "LayerGraphs/bert24_training": (41.7458, 0.0),
    "LayerGraphs/gnmt_inference": (32.9107, 13.1), "LayerGraphs/gnmt_training": (107.0044, 22.7),
    "LayerGraphs/inceptionv3_inference": (51.5519, None), "LayerGraphs/resnet50_inference": (33.7747, 0.09),
    "LayerGraphs/resnet50_training": (78.6318, 0.14), "OperatorGraphs/bert_l-3_inference": (27.9186, 0.73),
    "OperatorGraphs/bert_l-3_training": (65.3031, 4.0), "OperatorGraphs/bert_l-12_inference": (147.478, 12.4),
    "OperatorGraphs/bert_L-12_training": (437.998, 29.3), "OperatorGraphs/resnet50_inference": (124.349, 0.10),
    "OperatorGraphs/resnet50_training": (255.194, 0.23),
}  # fmt: skip
#: As given: optima with communication at its physical cost, ms.
CORRECTED: Final = {
    "bert24_inference": 20.59, "bert24_training": 46.61, "gnmt_inference": 44.78, "gnmt_training": 120.02,
    "inceptionv3_inference": 158.50, "resnet50_inference": 181.90, "resnet50_training": 479.04,
}  # fmt: skip


def contiguous(options: argparse.Namespace) -> Iterator[Row]:
    """Optimal contiguous throughput of the published inputs, beside the authors' program."""
    ours = theirs = 0.0
    for name, (value, cpu) in AUTHORS.items():
        row = solved(name, options)
        given = {"given ms": f"{value:g}", "given CPU s": "> 467" if cpu is None else f"{cpu:.2f}"}
        yield {"input": short(name)} | given | row
        if cpu is not None:
            ours, theirs = ours + float(row["CPU s"]), theirs + cpu
    yield {"input": "all that theirs ends", "given CPU s": f"{theirs:.2f}", "CPU s": f"{ours:.2f}"}


def linear(options: argparse.Namespace) -> Iterator[Row]:
    """The best cuts of a few orders of the same inputs (planner ideals-linear)."""
    for name, (value, _) in AUTHORS.items():
        yield {"input": short(name), "optimum ms": f"{value:g}"} | solved(name, options, "ideals-linear")


def gpipe(options: argparse.Namespace) -> Iterator[Row]:
    """Training where the busiest forward and the busiest backward add up."""
    for name in AUTHORS:
        if name.endswith("training"):
            yield {"input": short(name)} | solved(name, options, pipeline="gpipe")


def corrected(options: argparse.Namespace) -> Iterator[Row]:
    """Layer graphs with transfers 1000 times as long, as the sizes in the files say."""
    for name, value in CORRECTED.items():
        yield {"input": short(f"LayerGraphs/{name}"), "given ms": f"{value:g}"} | solved(
            f"LayerGraphs/{name}", options, scale=1000.0
        )


def replication(options: argparse.Namespace) -> Iterator[Row]:
    """Layer graphs whose spare devices repeat others; training exchanges gradients after 16 samples."""
    for name, (value, _) in AUTHORS.items():
        for pipeline in ("1f1b", "gpipe") if name.endswith("training") else ("1f1b",):
            if name.startswith("LayerGraphs"):
                apart = pipeline == "gpipe"
                given = {"input": short(name) + " gpipe" * apart, "alone ms": "" if apart else f"{value:g}"}
                yield given | solved(name, options, pipeline=pipeline, replicate=True, microbatches=16)


def models(options: argparse.Namespace) -> Iterator[Row]:
    """All ops of large models on 8 devices, no two alike, with links of 25 GB/s."""
    for model, overlap in (("llama-3-8b", False), ("llama-3-8b", True), ("nmt-8", False), ("nmt-8-train", False)):
        row = measured(_on_unequal, (model, overlap, options.seconds))
        yield {"model": model, "copies": "overlap" if overlap else "add up"} | row


SECTIONS: Final[dict[str, Callable[[argparse.Namespace], Iterator[Row]]]] = {
    "contiguous": contiguous, "linear": linear, "gpipe": gpipe, "corrected": corrected, "models": models,
    "replication": replication,
}  # fmt: skip


def short(name: str) -> str:
    """L for layer graphs, O for operator graphs."""
    folder, _, model = name.partition("/")
    return f"{folder[0]} {model}"


# ---- running one -----------------------------------------------------------------------------------------------------


def solved(
    name: str, options: argparse.Namespace, planner: str = "ideals", *, scale: float = 1.0, **execution: Any
) -> Row:
    return measured(_published, (name, planner, scale, execution, options.seconds))


def measured(work: Callable[..., Row], arguments: tuple[Any, ...]) -> Row:
    """In a process of its own, so that its peak of memory is its own."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def _published(name: str, planner: str, scale: float, settings: dict[str, Any], seconds: float) -> Row:
    file = Path(os.environ["PLACEWISE_DATA"], "dnn-partitioning", "throughput-inputs", f"{name}.json")
    problem = dnn_partitioning.load(json.loads(file.read_text()), name, transfer_scale=scale)
    execution = replace(problem.execution, **settings)
    return _plan(replace(problem, contiguous=True, execution=execution), planner, seconds)


def _on_unequal(model: str, overlap: bool, seconds: float) -> Row:
    graph = zoo.load(model).collapse_parameters().graph
    rates = [(140, 930), (120, 930), (100, 760), (90, 760), (70, 600), (60, 450), (50, 360), (40, 320)]
    devices = [
        Device(f"gpu{i}", memory=24 * 2**30, flops={"default": tera * 1e12}, bandwidth=giga * 1e9, launch=5e-6)
        for i, (tera, giga) in enumerate(rates)
    ]
    execution = Execution(contention="none", overlap=overlap, staged=True)
    cluster = full_mesh(devices, 25e9, 10e-6)
    problem = Problem(graph, cluster, objective="throughput", contiguous=True, execution=execution)
    return _plan(problem, "ideals", seconds)


def _plan(problem: Problem, planner: str, seconds: float) -> Row:
    plan(_tiny(problem), planner)  # imports and compiles
    began, cpu = time.perf_counter(), time.process_time()
    found = plan(problem, planner, budget=Budget(seconds=seconds))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    proved = "yes" if found.gap < 1e-8 else f"to {found.gap:.2%}"
    return {
        "ms": f"{1e3 * found.value:.4f}", "proved": proved, "CPU s": f"{cpu:.2f}", "wall s": f"{wall:.1f}",
        "MB": peak // 1024,
    }  # fmt: skip


def _tiny(problem: Problem) -> Problem:
    """One op of the same kind of problem."""
    build = GraphBuilder("one op")
    build.op("op", kind="op")
    cluster = full_mesh([Device("a"), Device("b")], 1.0)
    return Problem(
        build.graph(), cluster, Costs.create(np.ones((1, 2))), "throughput", problem.execution, contiguous=True
    )


def measure(options: argparse.Namespace) -> list[Row]:
    if options.section != "models" and "PLACEWISE_DATA" not in os.environ:
        sys.exit("set PLACEWISE_DATA to the folder that holds dnn-partitioning/")
    rows = []
    for row in SECTIONS[options.section](options):
        progress(" ".join(f"{key}={value}" for key, value in row.items()))
        rows.append(row)
    return rows


if __name__ == "__main__":
    main(
        "Exact contiguous pipelines",
        measure,
        section={"choices": list(SECTIONS), "default": "contiguous"},
        seconds={"type": float, "default": 60.0, "help": "budget of each"},
    )
