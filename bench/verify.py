"""Predicted beside measured, of several placements of models of the zoo, on two logical devices of this CPU.

"alone" puts all ops on one device, "split" is what `auto` finds, "random" a placement by chance. Each device has one
thread; run it with OMP_NUM_THREADS=1, so that the plain model has one, too. The placements of a model are measured in
turns, each time once as it is and once with a clock at each op, so that what disturbs the machine disturbs all alike;
turns in which other processes took more than 3 % of the machine are not counted, as long as five others are left.

"first off" is how far the measured time is from what was predicted when the plan was made, with the ops' times from
clocked runs of "alone"; "off" is that from what is predicted with the ops' times of the placement's own clocked runs,
as `placewise verify --update` keeps them for the next plan. What it takes to hand a tensor to another device is
measured first. "others" is what other processes took of the machine in the turns that count.

OMP_NUM_THREADS=1 python bench/verify.py
python bench/verify.py --machine     on the CPU and the GPU of a machine that has one

With `--machine`, "gpu" and "cpu" put all ops on one device, "half" the first half of them on the CPU, and "split" is
what `auto` finds where the GPU has 0.6 of the memory that "gpu" needs; the first one is planned with guesses.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from harness import best_planned, main, progress, this_machine
from placewise import Budget, Cluster, Device, Problem, engines, full_mesh, zoo
from placewise.importers import pt2
from placewise.importers.torch_export import from_torch
from placewise.measure.pytorch import materialised
from placewise.plans import Plan
from placewise.simulator import simulate
from placewise.verify import with_profiles

_CALM = 0.03
_LEAST = 5  # turns that count
_SHARE = 0.6
#: Images or texts of each: as many as take a tenth of a second or so.
MODELS = {
    "alexnet": 8, "squeezenet": 4, "googlenet": 4, "resnet-50": 2, "inception-v3": 2, "vgg-19": 1, "bert-base": 1,
    "gpt-2": 1, "rnnlm": 2,
}  # fmt: skip


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        os.environ["PLACEWISE_PROFILES"] = folder
        latency = 0.0 if args.machine else handed_over()
        progress(f"a tensor is handed over in {1e6 * latency:.0f} us")
        box = this_machine() if args.machine else halves(latency)
        return [row for name in args.models or MODELS for row in _measured(name, box, Path(folder), args)]


def halves(latency: float) -> Cluster:
    halves = [Device(f"half{i}", "cpu", 8 * 2**30, {"default": 5e10}, 1e10) for i in range(2)]
    return full_mesh(halves, 1e12, latency, name="halves")


@dataclass
class _Way:
    """A placement, at work."""

    plan: Plan
    run: Any
    seconds: list[float] = field(default_factory=list)

    def turn(self) -> None:
        began = time.perf_counter()
        self.run.placed()
        self.seconds.append(time.perf_counter() - began)
        self.run.clocked()


def _measured(name: str, box: Cluster, folder: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = str(exported(name, args.batch or MODELS.get(name, 1), folder))
    engine = engines.get("torch")
    graph = pt2.load(model, name).collapse_parameters().graph
    ways: dict[str, _Way] = {}
    with ExitStack() as stack:
        cluster = box
        for way in ("gpu", "cpu", "half", "split") if args.machine else ("alone", "split", "random"):
            progress(f"{name}: {way}")
            made = _planned(engine.fit(Problem(graph, cluster)), way)
            assert engine.run is not None
            ways[way] = _Way(made, stack.enter_context(engine.run(made, model, {})))
            ways[way].run.placed()
            if way in ("alone", "gpu", "cpu"):
                cluster = with_profiles(made, ways[way].run)
                ways[way].plan = replace(made, problem=replace(made.problem, cluster=cluster))
                ways[way].run.rounds.clear()
        others = _turns(list(ways.values()), args.seconds)
    for way, each in ways.items():
        after = engine.fit(Problem(graph, with_profiles(each.plan, each.run)))
        first = simulate(engine.fit(Problem(graph, each.plan.problem.cluster)), each.plan.placement).value
        predicted = simulate(after, each.plan.placement).value
        took = statistics.median(each.seconds)
        row = {
            "model": name, "placement": way, "ops": graph.num_ops, "predicted ms": 1e3 * predicted,
            "measured ms": 1e3 * took, "first off": f"{took / first - 1:+.0%}", "off": f"{took / predicted - 1:+.0%}",
            "turns": len(each.seconds), "others": f"{max(others, 0.0):.0%}",
        }  # fmt: skip
        progress(str(row))
        yield row


def _turns(ways: list[_Way], seconds: float) -> float:
    """All of them in turn, for so long, or twice that if too few turns are calm; what others took of the machine."""
    began, shares = time.perf_counter(), list[float]()
    while (taken := time.perf_counter() - began) < seconds or (taken < 2 * seconds and _calm(shares) < _LEAST):
        clock, before = time.perf_counter(), _others()
        for way in ways:
            way.turn()
        shares.append((_others() - before) / (time.perf_counter() - clock) / (os.cpu_count() or 1))
    kept = [i for i, share in enumerate(shares) if share < _CALM or _calm(shares) < _LEAST]
    for way in ways:
        way.seconds = [way.seconds[i] for i in kept]
        way.run.rounds = [way.run.rounds[i] for i in kept]
    return statistics.mean(shares[i] for i in kept)


def _calm(shares: list[float]) -> int:
    return sum(share < _CALM for share in shares)


def _others() -> float:
    """Seconds for which the cores have worked for other processes."""
    with open("/proc/stat", encoding="utf-8") as lines:
        user, nice, system, _, _, *interrupts = (int(field) for field in next(lines).split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def handed_over() -> float:
    """Seconds until what one logical device made is with the other: a chain of layers, by turns and on one.

    A layer takes long enough for the other thread to fall asleep.
    """
    module, args = nn.Sequential(*(nn.Linear(512, 512) for _ in range(50))), (torch.randn(32, 512),)
    graph = from_torch(module, args).collapse_parameters().graph
    found = []
    for placement in (np.zeros(graph.num_ops, np.int32), (np.arange(graph.num_ops) % 2).astype(np.int32)):
        made = Plan(Problem(graph, halves(0.0)), placement, None, 1.0, 0.0, "hand", "0")
        with made.apply(module, args, threads=1) as placed, torch.no_grad():
            taken = []
            for _ in range(50):
                began = time.perf_counter()
                placed(*args)
                taken.append(time.perf_counter() - began)
        found.append(statistics.median(taken))
    return max(0.0, found[1] - found[0]) / (graph.num_ops - 1)


def exported(name: str, batch: int, folder: Path) -> Path:
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
        return best_planned(problem, Budget(evaluations=2000))
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
        "batch": {"type": int, "default": 0, "help": "images or texts; 0 = a few, depending on the model"},
        "machine": {"action": "store_true", "help": "the CPU and the GPU of this machine"},
        "seconds": {"type": float, "default": 12.0, "help": "of measuring, for each model"},
    }
    main("Predicted beside measured", measure, **settings)
