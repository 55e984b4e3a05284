"""Exact planners beside published programs and solvers: what is proved, and at what cost. Every table of docs/exact.md.

    PLACEWISE_DATA=... python bench/exact.py --section all
    PLACEWISE_DATA=... python bench/exact.py --section contiguous
    PLACEWISE_DATA=... python bench/exact.py --section noncontiguous --inputs bert24_inference --seconds 20

Inputs are those of github.com/msr-fiddle/dnn-partitioning: L for layer graphs, O for operator graphs. Times are
milliseconds per sample, or of one sample. Start-up and compiling are left out. All methods use one thread, but `auto`
two where it evaluates many plans at once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np

import noncontiguous as parts_noncontiguous
import slots as parts_slots
from harness import cpu_so_far, main, progress
from placewise import Budget, Device, Plan, Problem, full_mesh, plan, zoo
from placewise.colocation import colocate_backward
from placewise.costs import Costs
from placewise.errors import NoFeasiblePlan
from placewise.graph import GraphBuilder
from placewise.importers import dnn_partitioning
from placewise.importers.training import mirrored
from placewise.problem import Execution
from placewise.sharding import plan_sharded
from placewise.simulator import evaluate

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
    "LayerGraphs/bert24_inference": 20.59, "LayerGraphs/bert24_training": 46.61, "LayerGraphs/gnmt_inference": 44.78,
    "LayerGraphs/gnmt_training": 120.02, "LayerGraphs/inceptionv3_inference": 158.50,
    "LayerGraphs/resnet50_inference": 181.90, "LayerGraphs/resnet50_training": 479.04,
}  # fmt: skip


def contiguous(options: argparse.Namespace) -> Iterator[Row]:
    """Optimal contiguous throughput, beside the authors' program."""
    ours = theirs = 0.0
    for name, title in chosen(options, AUTHORS).items():
        value, cpu = AUTHORS[name]
        row = solved(name, options)
        given = {"given ms": f"{value:g}", "given CPU s": "> 467" if cpu is None else f"{cpu:.2f}"}
        yield {"input": title} | given | row
        if cpu is not None:
            ours, theirs = ours + float(row["CPU s"]), theirs + cpu
    yield {"input": "all that theirs ends", "given CPU s": f"{theirs:.2f}", "CPU s": f"{ours:.2f}"}


def linear(options: argparse.Namespace) -> Iterator[Row]:
    """The best cuts of a few orders of the same inputs (planner ideals-linear)."""
    for name, title in chosen(options, AUTHORS).items():
        yield {"input": title, "optimum ms": f"{AUTHORS[name][0]:g}"} | solved(name, options, "ideals-linear")


def training(options: argparse.Namespace) -> Iterator[Row]:
    """Training, contiguous: the busiest device of both phases (1f1b), and of each phase, added up (gpipe)."""
    for name, title in chosen(options, AUTHORS).items():
        for pipeline in ("1f1b", "gpipe") if name.endswith("training") else ():
            yield {"input": title, "pipeline": pipeline} | solved(name, options, pipeline=pipeline)


def noncontiguous(options: argparse.Namespace) -> Iterator[Row]:
    """Throughput without intervals: HiGHS or CP-SAT alone in 120 s, and milp."""
    yield from parts_noncontiguous.rows(options, published, chosen(options, parts_noncontiguous.ALONE))


def latency(options: argparse.Namespace) -> Iterator[Row]:
    """Latency in slots: what is known, and slot-milp."""
    yield from parts_slots.rows(options, inputs(), chosen(options, parts_slots.KNOWN))


def own_latency(options: argparse.Namespace) -> Iterator[Row]:
    """Latency of the same inputs under our own execution model: auto."""
    yield from parts_slots.own_model(options, inputs(), chosen(options, parts_slots.KNOWN))


def corrected(options: argparse.Namespace) -> Iterator[Row]:
    """Contiguous layer graphs with transfers 1000 times as long, as the sizes in the files say.

    `kept` is what the best plan for the files as they are takes then, `stages` how many devices both plans use.
    """
    for name, title in chosen(options, CORRECTED).items():
        for pipeline in ("1f1b", "gpipe") if name.endswith("training") else ("1f1b",):
            row = measured(_corrected, (name, pipeline, options.seconds))
            given = f"{CORRECTED[name]:.2f}" if pipeline == "1f1b" else "-"
            title = title.replace("inference", "inf").replace("training", "train")
            yield {"input": title + " gpipe" * (pipeline == "gpipe"), "given": given} | row


def corrected_noncontiguous(options: argparse.Namespace) -> Iterator[Row]:
    """The same without intervals: milp."""
    load = partial(published, scale=1000.0)
    yield from parts_noncontiguous.rows(options, load, chosen(options, CORRECTED), alone=False)


def replication(options: argparse.Namespace) -> Iterator[Row]:
    """Layer graphs whose spare devices repeat others; training exchanges gradients after 16 samples."""
    for name, title in chosen(options, CORRECTED).items():
        for pipeline in ("1f1b", "gpipe") if name.endswith("training") else ("1f1b",):
            apart = pipeline == "gpipe"
            given = {"input": title + " gpipe" * apart, "alone ms": "" if apart else f"{AUTHORS[name][0]:g}"}
            yield given | solved(name, options, pipeline=pipeline, replicate=True, microbatches=16)


def sharded(options: argparse.Namespace) -> Iterator[Row]:
    """Corrected layer graphs, whose 6 devices repeat others, or cut up each op among up to 4, or both: ms per sample.

    Links are those of the files, or 25 times as fast; memory is 16 GiB, a quarter of what the model keeps, or 9/10 of
    what its largest layer does. Training adds up gradients after 16 samples. `to` is a gap; `s` is of all four plans.
    """
    names = [name for name in CORRECTED if "bert24" in name or "gnmt" in name]
    for name, title in chosen(options, names).items():
        for faster, memory in ((1, "16 GiB"), (25, "16 GiB"), (25, "quarter"), (25, "9/10 layer")):
            row = measured(_sharded, (name, faster, memory, options.seconds))
            yield {"input": title, "GiB/s": 2 * faster, "memory": memory} | row


def in_flight(options: argparse.Namespace) -> Iterator[Row]:
    """All ops of a training step of GPT-2, 8 samples, on 6 equal devices: with samples in flight in memory or not."""
    flight: Row = {"in_flight": "pipeline"}
    cases: dict[str, Row] = {"one": {}, "in flight": flight, "recomputed": flight | {"recompute": True}}
    for gibibytes in (4.0, 1.0):
        for pipeline in ("1f1b", "gpipe"):
            for replicate in (False, True):
                for title, settings in cases.items():
                    given: Row = {"pipeline": pipeline, "replicate": replicate, "microbatches": 8} | settings
                    row = measured(_on_equal, (gibibytes, given, options.seconds))
                    shown = {"GiB": f"{gibibytes:g}", "pipeline": pipeline, "replicas": "yes" if replicate else "no"}
                    yield shown | {"samples": title} | row


def models(options: argparse.Namespace) -> Iterator[Row]:
    """All ops of large models on 8 devices, no two alike, with links of 25 GB/s; training in steps of 16 samples."""
    rows = (
        ("llama-3-8b", False, False), ("llama-3-8b", True, False),
        ("nmt-8", False, False), ("nmt-8-train", False, True), ("nmt-8-train", False, False),
    )  # fmt: skip
    for model, overlap, together in rows:
        if options.inputs and model not in options.inputs:
            continue
        row = measured(_on_unequal, (model, overlap, together, options.seconds))
        where = ("with forward" if together else "anywhere") if model.endswith("train") else "-"
        yield {"model": model, "copies": "overlap" if overlap else "add up", "backward": where} | row


SECTIONS: Final[dict[str, Callable[[argparse.Namespace], Iterator[Row]]]] = {
    "contiguous": contiguous, "linear": linear, "training": training, "noncontiguous": noncontiguous,
    "latency": latency, "own-latency": own_latency, "corrected": corrected,
    "corrected-noncontiguous": corrected_noncontiguous, "replication": replication, "sharded": sharded,
    "in-flight": in_flight, "models": models,
}  # fmt: skip


def chosen(options: argparse.Namespace, names: Iterable[str]) -> dict[str, str]:
    """The inputs that were asked for, with L or O for the kind of graph."""
    return {
        name: f"{name[0]} {Path(name).name}"
        for name in names
        if not options.inputs or any(part in name for part in options.inputs)
    }


def inputs() -> Path:
    """The folder of the published inputs."""
    return Path(os.environ["PLACEWISE_DATA"], "dnn-partitioning")


def published(name: str, scale: float = 1.0) -> Problem:
    """An input for throughput."""
    data = json.loads((inputs() / "throughput-inputs" / f"{name}.json").read_text())
    return dnn_partitioning.load(data, name, transfer_scale=scale)


# ---- running one -----------------------------------------------------------------------------------------------------


def solved(name: str, options: argparse.Namespace, planner: str = "ideals", **execution: Any) -> Row:
    return measured(_solved, (name, planner, execution, options.seconds))


def measured(work: Callable[..., Row], arguments: tuple[Any, ...]) -> Row:
    """In a process of its own, so that its peak of memory is its own."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def _solved(name: str, planner: str, settings: dict[str, Any], seconds: float) -> Row:
    return _plan(_intervals(published(name), **settings), planner, seconds)[1]


def _intervals(problem: Problem, **settings: Any) -> Problem:
    return replace(problem, contiguous=True, execution=replace(problem.execution, **settings))


def _corrected(name: str, pipeline: str, seconds: float) -> Row:
    shipped, physical = (_intervals(published(name, scale), pipeline=pipeline) for scale in (1.0, 1000.0))
    before, _ = _plan(shipped, "ideals", seconds)
    after, row = _plan(physical, "ideals", seconds)
    kept = evaluate(physical, before.placement).value[0]
    stages = " -> ".join(str(len(np.unique(found.placement))) for found in (before, after))
    asked = {"shipped": f"{1e3 * before.value:.3f}", "kept": f"{1e3 * kept:.3f}"}
    return asked | {key: row[key] for key in ("ms", "proved")} | {"stages": stages}


def _sharded(name: str, faster: float, memory: str, seconds: float) -> Row:
    problem = _intervals(published(name, 1000.0 / faster), microbatches=16)
    kept = problem.graph.resident_bytes
    room = {"16 GiB": 2.0**34, "quarter": kept.sum() / 4, "9/10 layer": 0.9 * problem.per_unit(kept).max()}[memory]
    devices = [device.name for device in problem.cluster.devices if device.kind == "fpga"]
    problem = replace(problem, cluster=problem.cluster.with_memory(dict.fromkeys(devices, room)))
    plan(_tiny(problem), "ideals")  # imports and compiles
    row, began = dict[str, Any](), time.perf_counter()
    cases = {"alone": (False, 1), "replicas": (True, 1), "shards": (False, 4), "both": (True, 4)}
    for title, (replicate, most) in cases.items():
        asked = replace(problem, execution=replace(problem.execution, replicate=replicate))
        found = plan_sharded(asked, most, "ideals", budget=Budget(seconds=seconds))
        row[title] = f"{1e3 * found.value:.3f}" + (f" to {found.gap:.1%}" if found.gap > 1e-8 else "")
    used = {found.problem.cluster.devices[d].shards for d in found.placement.tolist()}
    return row | {"degrees": ", ".join(map(str, sorted(used))), "s": f"{time.perf_counter() - began:.1f}"}


def _on_unequal(model: str, overlap: bool, together: bool, seconds: float) -> Row:
    graph = zoo.load(model).collapse_parameters().graph
    rates = [(140, 930), (120, 930), (100, 760), (90, 760), (70, 600), (60, 450), (50, 360), (40, 320)]
    devices = [
        Device(f"gpu{i}", memory=24 * 2**30, flops={"default": tera * 1e12}, bandwidth=giga * 1e9, launch=5e-6)
        for i, (tera, giga) in enumerate(rates)
    ]
    execution = Execution(contention="none", overlap=overlap, staged=True, microbatches=16)
    cluster = full_mesh(devices, 25e9, 10e-6)
    problem = Problem(graph, cluster, objective="throughput", contiguous=True, execution=execution)
    return _plan(colocate_backward(problem) if together else problem, "ideals", seconds)[1]


def _on_equal(gibibytes: float, settings: dict[str, Any], seconds: float) -> Row:
    graph = mirrored(zoo.load("gpt-2"), "adam", colocate=True).collapse_parameters().graph
    rates: dict[str, Any] = {"flops": {"default": 50e12}, "bandwidth": 900e9, "launch": 5e-6}
    cluster = full_mesh([Device(f"gpu{i}", memory=gibibytes * 2**30, **rates) for i in range(6)], 25e9, 10e-6)
    execution = Execution(contention="none", overlap=False, staged=True, **settings)
    problem = Problem(graph, cluster, objective="throughput", contiguous=True, execution=execution)
    try:
        found, row = _plan(problem, "ideals", seconds)
    except NoFeasiblePlan:
        return {"ms": "-", "proved": "none found"}
    return {key: row[key] for key in ("ms", "proved")} | {
        "stages": len(np.unique(found.placement)),
        "CPU s": row["CPU s"],
    }


def _plan(problem: Problem, planner: str, seconds: float) -> tuple[Plan, Row]:
    plan(_tiny(problem), planner)  # imports and compiles
    began, cpu = time.perf_counter(), cpu_so_far()
    found = plan(problem, planner, budget=Budget(seconds=seconds))
    cpu, wall = cpu_so_far() - cpu, time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    proved = "yes" if found.gap < 1e-8 else f"to {found.gap:.2%}"
    return found, {
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


def measure(options: argparse.Namespace) -> dict[str, list[Row]]:
    if options.section not in ("models", "in-flight") and "PLACEWISE_DATA" not in os.environ:
        sys.exit("set PLACEWISE_DATA to the folder that holds dnn-partitioning/")
    tables: dict[str, list[Row]] = {}
    for section in SECTIONS if options.section == "all" else (options.section,):
        rows = tables.setdefault(f"{section}: {' '.join((SECTIONS[section].__doc__ or '').split())}", [])
        for row in SECTIONS[section](options):
            progress(" ".join(f"{key}={value}" for key, value in row.items()))
            rows.append(row)
    return tables


if __name__ == "__main__":
    main(
        "Exact planners",
        measure,
        section={"choices": ["all", *SECTIONS], "default": "all"},
        seconds={"type": float, "default": 60.0, "help": "budget of each"},
        inputs={"nargs": "*", "help": "parts of names; all by default"},
        solver={"choices": ["highs", "cpsat"], "default": "highs", "help": "behind milp and slot-milp"},
    )
