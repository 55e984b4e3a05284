"""HSDAG's table: its graphs on its machine, by modelled costs and by costs that meet the published totals.

The graphs are OpenVINO's, of models of the zoo with a batch of one; the engine runs one device after the other. By
datasheets (modelled), the GPU is so much faster that nothing is to be gained. *Calibrated* costs multiply each device's
column of modelled seconds such that all ops on it take what the paper's table 2 has for it alone; transfers stay. Every
method has the same number of simulated placements. Settings were looked at on Inception-V3 and ResNet-50. GoogLeNet is
not in the paper: it is calibrated to the totals of Inception-V3. Of all settings, only the number of epochs was looked
at on it.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import WORKERS, each, main, progress
from placewise import Budget, Costs, Execution, Graph, Problem, plan, zoo
from placewise.files import load_cluster
from placewise.importers import openvino as ir
from placewise.learned import grouping
from placewise.measure.pytorch import materialised
from placewise.planners import available

#: Milliseconds of table 2 (Duan et al., NeurIPS 2024). The paper's RNN is what ColocRL is.
PUBLISHED = {
    "inception-v3": {"CPU": 12.8, "GPU": 12.0, "Placeto": 11.6, "ColocRL": 12.8, "HSDAG": 10.5},
    "resnet-50": {"CPU": 16.0, "GPU": 7.81, "Placeto": 9.32, "ColocRL": 8.75, "HSDAG": 7.66},
    "bert-base": {"CPU": 6.38, "GPU": 2.77, "Placeto": 6.51, "HSDAG": 2.67},
}
OTHERS = {"googlenet": "inception-v3"}  # no model of the paper, and whose totals it gets
Methods = dict[str, tuple[str, dict[str, Any]]]
#: Planner and options. Placeto is trained on this very graph, as in the paper.
METHODS: Methods = {
    "CPU": ("cpu-only", {}),
    "GPU": ("gpu-only", {}),
    "random": ("random", {}),
    "Placeto": ("placeto", {"policy": "none"}),
    "ColocRL": ("colocrl", {}),
    "HSDAG, untrained": ("hsdag", {"rate": 0.0}),
    "HSDAG": ("hsdag", {}),
    "HSDAG from ops": ("hsdag", {"colocate": False}),
}
ABLATIONS: dict[str, dict[str, Any]] = {
    "all features": {},
    "no shape": {"shape": False},
    "no node id": {"node_id": False},
    "no structure": {"structure": False},
    "none of the three": {"shape": False, "node_id": False, "structure": False},
    "scores of neighbours untrained": {"pace": 0.0},
    "no joining": {"pace": 0.0, "keep": 1e-9},
    "untrained": {"rate": 0.0},
}
COSTS = ("modelled", "calibrated")
Runs = list[float]  # milliseconds, one for each seed


def converted(model: str) -> Graph:
    """A model of the zoo, with a batch of one, as OpenVINO's importer makes it."""
    import openvino

    module, inputs = zoo.module(model)
    module, (one, _) = materialised(module, (tuple(x[:1] for x in inputs), {}), "cpu")
    made = openvino.convert_model(module, example_input=one, input=[list(x.shape) for x in one])
    with tempfile.TemporaryDirectory() as folder:
        openvino.save_model(made, Path(folder) / "model.xml", compress_to_fp16=False)
        return ir.load(Path(folder) / "model.xml", model).collapse_parameters().graph


def modelled(model: str) -> Problem:
    """On the paper's machine without its UHD 770, which the paper leaves out too."""
    box = load_cluster("hsdag")
    devices = tuple(device for device in box.devices if device.name != "igpu")
    links = tuple(link for link in box.links if "igpu" not in (link.source, link.target))
    box = replace(box, devices=devices, links=links)
    return Problem(converted(model), box, execution=Execution(concurrency="sequential"))


def calibrated(problem: Problem) -> Problem:
    """The same problem, whose devices alone take what was published."""
    seconds = problem.seconds.copy()
    for name in ("CPU", "GPU"):
        column = problem.cluster.device_names.index(name.lower())
        totals = PUBLISHED[OTHERS.get(problem.graph.name, problem.graph.name)]
        seconds[:, column] *= totals[name] / 1e3 / seconds[:, column].sum()
    return replace(problem, costs=Costs.create(seconds))


def run(problem: Problem, planner: str, changed: dict[str, Any], evaluations: int, seed: int) -> float:
    """Milliseconds; none gives up before the budget ends."""
    endless = {"patience": evaluations, "updates": evaluations, "samples": evaluations}
    names = ("samples",) if planner == "random" else ("patience", "updates")
    options = {name: endless[name] for name in names if name in available()[planner].options}
    found = plan(problem, planner, budget=Budget(evaluations=evaluations), seed=seed, options=options | changed)
    progress(f"{problem.graph.name}, {planner} {changed}, seed {seed}: {1e3 * found.value:.2f} ms")
    return 1e3 * found.value


def exact(problem: Problem) -> Runs:
    found = plan(problem, "min-cut")
    assert found.gap < 1e-6, "two devices of a sequential engine: the cut is proved"
    return [1e3 * found.value]


def table(problems: dict[str, Problem], methods: Methods, options: Namespace) -> dict[str, dict[str, Runs]]:
    """Method to model to milliseconds."""
    runs = [
        (name, model, planner, changed, seed)
        for name, (planner, changed) in methods.items() for model in problems
        for seed in range(1 if planner.endswith("-only") else options.seeds)
    ]  # fmt: skip
    cases = [
        (problems[model], planner, changed, options.evaluations, seed) for _, model, planner, changed, seed in runs
    ]
    found: dict[str, dict[str, Runs]] = {name: {model: [] for model in problems} for name in methods}
    for (name, model, *_), value in zip(runs, each(run, cases, options.workers), strict=True):
        found[name][model].append(value)
    return found


def text(values: Runs, published: float | None = None) -> str:
    """From the least to the most; in brackets what was published."""
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return (low if low == high else f"{low} to {high}") + (f" [{published:g}]" if published else "")


def measure(options: Namespace) -> dict[str, list[dict[str, Any]]]:
    problems = {model: modelled(model) for model in options.models}
    real = {model: calibrated(problem) for model, problem in problems.items()}
    tables: dict[str, list[dict[str, Any]]] = {}

    def add(title: str, found: dict[str, dict[str, Runs]]) -> None:
        tables[title] = [
            {"method": method} | {
                model: values if options.json else text(values, PUBLISHED.get(model, {}).get(method))
                for model, values in of_method.items()
            } for method, of_method in found.items()
        ]  # fmt: skip

    for costs, chosen in (("modelled", problems), ("calibrated", real)):
        if costs not in options.costs:
            continue
        found = table(chosen, METHODS, options)
        chains = {
            model: replace(x, graph=replace(x.graph, group=grouping.chains(x).label)) for model, x in chosen.items()
        }
        for name, ones in (("minimum cut of chains", chains), ("minimum cut", chosen)):
            found[name] = {model: exact(problem) for model, problem in ones.items()}
        add(
            f"Milliseconds, {costs} costs, {options.evaluations:,} placements, {options.seeds} seeds [published]", found
        )
    if "calibrated" in options.costs:
        methods: Methods = {name: ("hsdag", {"colocate": False} | changed) for name, changed in ABLATIONS.items()}
        title = f"Ablations from ops, calibrated costs, milliseconds, {options.evaluations:,} placements"
        add(title, table(real, methods, options))
    return tables


if __name__ == "__main__":
    main(
        "HSDAG beside its rivals and the minimum cut",
        measure,
        evaluations={"type": int, "default": 2000, "help": "placements per run; default: %(default)s, as in the paper"},
        costs={
            "nargs": "+",
            "choices": COSTS,
            "default": list(COSTS),
            "help": "which",
        },
        models={"nargs": "+", "choices": (*PUBLISHED, *OTHERS), "default": [*PUBLISHED, *OTHERS], "help": "which"},
        seeds={"type": int, "default": 3, "help": "runs per method; default: %(default)s"},
        workers=WORKERS,
    )
