"""Profile, plan, verify, plan again: predicted beside measured on two logical devices of this CPU, round by round.

In round 1 the times are guesses; each later one has what the rounds before it measured. "off" is how far the measured
time is from the predicted one, in each round; the other figures are of the last. "alone" puts
all ops on one device, "split" is what `auto` finds, "random" a placement by chance. Each device has one thread. A round
in which other processes took more than 3 % of the machine is done again, up to `--tries` times; "others" is what they
took in the last round.

python bench/verify.py --batch 8
python bench/verify.py --machine     on the CPU and the GPU of a machine that has one

With `--machine`, "gpu" and "cpu" put all ops on one device, "half" the first half of them on the CPU, and "split" is
what `auto` finds where the GPU has 0.6 of the memory that "gpu" needs. What was measured for one placement counts for
the next.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from harness import main, progress, this_machine
from placewise import Budget, Cluster, Device, Problem, engines, full_mesh, plan, zoo
from placewise.importers import pt2
from placewise.measure.pytorch import materialised
from placewise.plans import Plan
from placewise.simulator import simulate
from placewise.verify import verify

_CALM = 0.03
_SHARE = 0.6
MODELS = ("alexnet", "squeezenet", "googlenet", "resnet-50", "inception-v3", "bert-base", "gpt-2", "rnnlm")
BOX = full_mesh(
    [Device(f"half{i}", "cpu", 8 * 2**30, {"default": 5e10}, 1e10) for i in range(2)], 1e12, 5e-6, name="halves"
)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        os.environ["PLACEWISE_PROFILES"] = folder
        box = this_machine() if args.machine else BOX
        return [row for name in args.models or MODELS for row in _loop(name, box, Path(folder), args)]


def _loop(name: str, box: Cluster, folder: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = str(_exported(name, args.batch, folder)) if args.batch else name
    graph = (pt2.load(model, name) if args.batch else zoo.load(name)).collapse_parameters().graph
    clusters = [box]
    for way in ("gpu", "cpu", "half", "split") if args.machine else ("alone", "split", "random"):
        offs = []
        if not args.machine:
            clusters = [box]
        for _ in range(args.rounds):
            made = _planned(engines.get(args.engine).fit(Problem(graph, clusters[-1])), way)
            for _ in range(args.tries):
                clock, before = time.perf_counter(), _others()
                seen = verify(made, model, engine=args.engine, seconds=args.seconds, keep=clusters.append)
                others = (_others() - before) / (time.perf_counter() - clock) / (os.cpu_count() or 1)
                progress(f"{name}, {way}: {seen.placed.seconds / seen.predicted - 1:+.0%}, others {others:.0%}")
                if others < _CALM:
                    break
            offs.append(seen.placed.seconds / seen.predicted - 1)
        row = {
            "model": name, "placement": way, "predicted ms": round(1e3 * seen.predicted, 1),
            "measured ms": round(1e3 * seen.placed.seconds, 1), "plain ms": round(1e3 * seen.plain.seconds, 1),
        } | {f"off {i}": f"{off:+.0%}" for i, off in enumerate(offs, 1)} | {"others": f"{others:.0%}"}  # fmt: skip
        progress(str(row))
        yield row


def _others() -> float:
    """Seconds for which the cores have worked for other processes."""
    with open("/proc/stat", encoding="utf-8") as lines:
        user, nice, system, _, _, *interrupts = (int(field) for field in next(lines).split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def _exported(name: str, batch: int, folder: Path) -> Path:
    """A model of the zoo with fewer images or texts."""
    module, args = zoo.module(name)
    steps_first = zoo.MODELS[name].code.partition(".")[0] in ("rnnlm", "nmt", "gnmt")
    module, args = materialised(module, tuple(arg[:, :batch] if steps_first else arg[:batch] for arg in args), "cpu")
    torch.export.save(torch.export.export(module, args), folder / f"{name}.pt2")
    return folder / f"{name}.pt2"


def _planned(problem: Problem, way: str) -> Plan:
    names, kinds = problem.cluster.device_names, [device.kind for device in problem.cluster.devices]
    if way == "split":
        if "gpu" in kinds:
            gpu = kinds.index("gpu")
            peak = simulate(problem, np.full(problem.num_ops, gpu, np.int32)).peak[gpu]
            problem = replace(problem, cluster=problem.cluster.with_memory({names[gpu]: _SHARE * float(peak)}))
        return plan(problem, "auto", budget=Budget(evaluations=2000))
    of_unit = np.zeros(problem.num_units, np.int32)
    if way == "random":
        of_unit[:] = np.random.default_rng(0).integers(0, 2, problem.num_units)
    elif way != "alone":
        of_unit[:] = kinds.index("cpu" if way == "cpu" else "gpu")
        if way == "half":
            turn = problem.per_unit(np.argsort(problem.graph.topological_order), np.minimum)
            of_unit[turn < np.median(turn)] = kinds.index("cpu")
    placement = of_unit[problem.unit]
    return Plan(problem, placement, None, simulate(problem, placement).value, 0.0, way, "0")


if __name__ == "__main__":
    settings = {
        "models": {"nargs": "*", "help": "of the zoo"},
        "batch": {"type": int, "default": 0, "help": "images or texts; 0 = as many as in the zoo"},
        "engine": {"default": "torch"},
        "machine": {"action": "store_true", "help": "the CPU and the GPU of this machine"},
        "rounds": {"type": int, "default": 3},
        "tries": {"type": int, "default": 3, "help": "of a round, if other processes disturb it"},
        "seconds": {"type": float, "default": 3.0, "help": "of measuring, for each verification"},
    }
    main("Predicted beside measured", measure, **settings)
