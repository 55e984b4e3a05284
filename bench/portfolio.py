"""The portfolio beside its members, each alone with the same budget; and beside SAGA's schedulers (PLACEWISE_DATA).

python bench/portfolio.py                           # 10 s each: SAGA's instances, models of the zoo
python bench/portfolio.py --random 28 --seed 1000 --evaluations 30000 --members
python bench/portfolio.py --training --seconds 8 --members multilevel,local-search

With `--random`, problems are drawn instead: shapes, sizes, devices, objectives and memory, all by chance and the seed,
so that what was chosen on some seeds can be judged on others. A summary of all pairs of problem and member follows.
With a budget in evaluations, throughput is left out: the exact methods for it mind the clock alone. With `--training`,
they are training steps of the zoo. With `--cpu`, seconds are of CPU time, as where the machine has other work: each
process has so many, and `auto` may use two.

`found by` is who found the portfolio's plan; "> heft" means local search from heft's plan. `best` is the best member by
itself, and `to best` what the portfolio makes of it: at most 1 is the aim. On the shared instances, `to SAGA` is the
portfolio's value over that of the best of SAGA's four schedulers over all hash seeds: below 1 where ours is better.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from harness import main, progress, random_problem
from placewise import Costs, Device, Graph, Problem, full_mesh, plan, zoo
from placewise.driver import Budget, Context
from placewise.errors import NoFeasiblePlan, PlacewiseError
from placewise.files import load_cluster
from placewise.importers import instances
from placewise.planners import get
from placewise.planners.auto import MEMBERS

#: Model, box, objective. A bit of everything: chains, branches, loops unrolled, training; fits on one, fits barely.
CASES = (
    ("inception-v3", "placeto-4", "latency"),
    ("resnet-50-train", "placeto-4", "latency"),
    ("nmt-2", "hierarchical-4", "latency"),
    ("nmt-2-train", "hierarchical-8", "latency"),
    ("inception-v3", "hsdag", "latency"),
    ("bert-base", "hsdag", "latency"),
    ("llama-3-8b", "two-gpus-one-host", "latency"),
    ("llama-3-8b", "unequal-cards", "latency"),
    ("qwen3-30b-a3b-decode", "pc-24gib", "latency"),
    ("llama-3-8b", "unequal-cards", "throughput"),
    ("inception-v3", "placeto-4", "throughput"),
    ("bert-base-train", "four-gpus", "throughput"),
)
#: Training steps, most of them unrolled, on which quick methods are far from the best.
TRAINING = (
    ("nmt-2-train", "colocrl-4"),
    ("nasnet-a-train", "colocrl-4"),
    ("nasnet-a-train", "dgx-h100"),
    ("rnnlm-train", "colocrl-4"),
    ("inception-v3-train", "colocrl-4"),
    ("nmt-2-train", "hierarchical-8"),
    ("resnet-50-train", "placeto-4"),
    ("bert-base-train", "four-gpus"),
)


def problems(folder: Path | None) -> Iterator[tuple[str, Problem, float | None]]:
    """Name, problem, and SAGA's best makespan in seconds where it has one."""
    for path in sorted(folder.glob("*.json")) if folder else []:
        data = json.loads(path.read_text())
        found = data["baselines"]["saga-2.1.0"].values()
        theirs = [x for run in found for x in [run["makespan"], *(run["makespan_hashseed_0_3"] or [])]]
        yield path.stem, instances.load(data, path.stem), min(theirs) * 1e-6
    for model, box, objective in CASES:
        name = f"{model}, {box}" + (", throughput" if objective == "throughput" else "")
        yield name, Problem(zoo.load(model), load_cluster(box), objective=objective), None
    yield "random, 10,000 ops", random_problem(10_000, 8), None
    tight = random_problem(1_000, 4, ccr=5)
    yield "random, 1,000 ops, completion", replace(tight, objective="completion"), None


def _chosen(options: Any) -> Iterator[tuple[str, Problem, float | None, int]]:
    """Name, problem, SAGA's best, and the seed of the planners."""
    if options.random:
        for seed in range(options.seed, options.seed + options.random):
            name, problem = drawn(seed)
            if not (options.evaluations and problem.objective == "throughput"):
                yield name, problem, None, seed
        return
    if options.training:
        for model, box in TRAINING:
            yield f"{model}, {box}", Problem(zoo.load(model), load_cluster(box)), None, options.seed
        return
    folder = Path(options.data) / "instances" if options.data else None
    if folder is None or not folder.is_dir():
        progress("no shared instances: set PLACEWISE_DATA to compare with SAGA")
        folder = None
    for name, problem, saga in problems(folder):
        if not options.only or options.only in name:
            yield name, problem, saga, options.seed


def drawn(seed: int) -> tuple[str, Problem]:
    """A problem by chance: layers, branches that join again, or a few long strands with edges across."""
    rng = np.random.default_rng(seed)
    shape = str(rng.choice(["layers", "branches", "strands"]))
    ops, devices = int(np.exp(rng.uniform(np.log(40), np.log(800)))), int(rng.choice([2, 3, 4, 8]))
    ccr, unrelated = float(rng.choice([0.1, 0.5, 2.0, 5.0])), bool(rng.random() < 0.3)
    objective = str(rng.choice(["latency", "latency", "latency", "completion", "throughput"]))
    edges = {"layers": _layers, "branches": _branches, "strands": _strands}[shape](ops, rng)
    seconds = rng.lognormal(0.0, 1.0, ops) * 50e-6
    speed = rng.uniform(0.3, 1.0, (ops if unrelated else 1, devices))
    size = rng.lognormal(0.0, 1.0, ops)
    size *= ccr * seconds.mean() * 10e9 / size.mean()
    resident = rng.lognormal(0.0, 1.0, ops) * 1e6
    tight = float(rng.choice([0.0, 1.3, 2.0]))  # times what all devices must have together; 0 = no limit
    memory = tight * (resident.sum() / devices + 3 * size.sum() / ops) if tight else 1e15
    models = 3 if objective == "completion" else 1
    model = np.arange(ops) * models // ops
    edges = [(producer, consumer) for producer, consumer in edges if model[producer] == model[consumer]]
    graph = Graph.create(
        op_names=[f"op{i}" for i in range(ops)],
        tensor_producer=np.arange(ops),
        tensor_bytes=size,
        edge_tensor=[producer for producer, _ in edges],
        edge_consumer=[consumer for _, consumer in edges],
        resident=resident,
        model=model,
        models=[f"model{i}" for i in range(models)],
    )
    cluster = full_mesh([Device(f"d{i}", memory=memory) for i in range(devices)], 10e9, 5e-6)
    name = f"{seed}: {shape} {ops}x{devices} ccr {ccr:g}{' tight' if tight else ''} {objective}"
    return name, Problem(graph, cluster, Costs.create(seconds[:, None] / speed), objective=objective)


def _layers(ops: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Each op reads one to three of the layer before."""
    width = int(rng.integers(2, 16))
    return [
        (int(before), op)
        for op in range(width, ops)
        for before in np.unique((op // width - 1) * width + rng.integers(0, width, rng.integers(1, 4)))
    ]


def _branches(ops: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Blocks in series: one op, some branches of some ops each, one op that joins them."""
    edges, last = [], 0
    while last + 1 < ops:
        ends, op = [], last + 1
        for _ in range(int(rng.integers(1, 6))):
            before = last
            for _ in range(int(rng.integers(1, 6))):
                if op + 1 < ops:
                    edges.append((before, op))
                    before, op = op, op + 1
            ends.append(before)
        edges += [(end, op) for end in dict.fromkeys(ends)]
        last = op
    return edges


def _strands(ops: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Recurrent networks look so: op i follows op i - strands, and at times reads from a neighbour."""
    strands = int(rng.integers(2, 9))
    edges = [(op - strands, op) for op in range(strands, ops)]
    return edges + [(op - 1, op) for op in range(1, ops) if rng.random() < 0.4]


def measure(options: Any) -> dict[str, list[dict[str, Any]]]:
    budget = Budget(evaluations=options.evaluations) if options.evaluations else Budget(seconds=options.seconds)
    if options.cpu:
        Context.__init__.__defaults__ = ("", time.process_time)  # planner and clock
    rows, pairs = [], []
    for name, problem, saga, seed in _chosen(options):
        progress(name)
        try:
            auto = plan(problem, "auto", budget=budget, seed=seed)
        except NoFeasiblePlan as error:
            progress(f"  {error}")
            continue
        row: dict[str, Any] = {"problem": name, "ms": f"{auto.value * 1e3:.5g}", "gap": f"{auto.gap:.1%}"}
        row["found by"] = auto.found_by.replace("local search from ", "> ")
        if saga:
            row["to SAGA"] = f"{auto.value / saga:.4f}"
        alone = {}
        for member in options.members.split(",") if options.members else ():
            if get(member).why_not(problem) is None:
                try:
                    alone[member] = plan(problem, member, budget=budget, seed=seed).value
                except PlacewiseError as error:
                    progress(f"  {member}: {error}")
        if alone:
            best = min(alone, key=lambda member: alone[member])
            row |= {"best": best, "to best": f"{auto.value / alone[best]:.4f}"}
            ratios = {member: auto.value / value for member, value in sorted(alone.items(), key=lambda x: x[1])}
            progress("  " + ", ".join(f"{member} {1 / ratio:.3f}" for member, ratio in ratios.items()))
            pairs.append(ratios)
        rows.append(row)
    tables = {"": rows}
    if pairs:
        tables["Pairs of problem and member; a member wins where it is better by more than 0.1 %"] = _summary(pairs)
    return tables


def _summary(pairs: list[dict[str, float]]) -> list[dict[str, Any]]:
    """By member: how often it beats the portfolio, and by how much at worst; those that never do in one row."""
    rows, never = [], np.zeros(0)
    for member in MEMBERS:
        ratio = np.array([of[member] for of in pairs if member in of])
        if (ratio > 1.001).any():
            rows.append(_row(member, ratio))
        else:
            never = np.concatenate([never, ratio])
    everyone = np.array([ratio for of in pairs for ratio in of.values()])
    return [*rows, _row("the others", never), _row("all", everyone)]


def _row(name: str, ratio: Any) -> dict[str, Any]:
    wins = int((ratio > 1.001).sum())
    share = f"{wins / max(1, len(ratio)):.1%}"
    return {"member": name, "pairs": len(ratio), "wins": wins, "share": share, "worst": f"{ratio.max(initial=0):.4f}"}


if __name__ == "__main__":
    settings = {
        "data": {"default": os.environ.get("PLACEWISE_DATA"), "help": "folder that holds instances/"},
        "seconds": {"type": float, "default": 10.0, "help": "the budget of each run"},
        "cpu": {"action": "store_true", "help": "seconds are of CPU time"},
        "evaluations": {"type": int, "help": "the budget of each run, instead"},
        "seed": {"type": int, "default": 0},
        "random": {"type": int, "help": "so many random problems instead, from this seed on"},
        "training": {"action": "store_true", "help": "training steps of the zoo instead"},
        "members": {"nargs": "?", "const": ",".join(MEMBERS), "help": "also run each member alone, or those named"},
        "only": {"help": "problems whose name has this in it"},
    }
    main("The portfolio, its members alone, and SAGA 2.1.0", measure, **settings)
