"""Draws the pictures of the pages on unequal GPUs, on pipelines, and on models that do not fit.

`make pictures` draws these and all others. Plans are found with a budget in evaluations, so that they are the same
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import placewise as pw
from placewise import engines
from placewise.engines.pieces import pieces
from placewise.engines.torch_offload import WEIGHTS
from placewise.files import import_model, save_graph
from placewise.graph import Ints
from placewise.quantities import format_seconds
from placewise.report.explain import occupied
from placewise.simulator import Timeline, simulate
from placewise.simulator.timeline import Floats

DOCS = Path(__file__).parent
#: Told apart by readers who do not see all colours (Okabe, Ito 2008).
BLUE, ORANGE = "#0072B2", "#E69F00"
BUDGET = pw.Budget(evaluations=20_000)


def draw(name: str, titles: list[str], picture: Callable[[list[Axes]], None], height: float) -> None:
    """A column of pictures on one scale, as an SVG that is the same each time."""
    with rc_context({"svg.hashsalt": "placewise", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7.2, height), layout="constrained")
        rows = figure.subplots(len(titles), 1, sharex=True, squeeze=False)[:, 0].tolist()
        for axes, title in zip(rows, titles, strict=True):
            axes.set_title(title, fontsize="medium", loc="left")
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="x", alpha=0.25)
            axes.set_axisbelow(True)
        picture(rows)
        rows[0].set_xlim(left=0.0)
        figure.savefig(DOCS / name, metadata={"Date": None})


def lanes(axes: Axes, timeline: Timeline, names: list[str], scale: float) -> None:
    """What devices and channels do over time; what is too close to be told apart is one bar."""
    cluster, work = timeline.problem.cluster, ~timeline.problem.graph.is_stored
    transfer, channel = timeline.bookings
    for y, name in enumerate(names):
        if name in cluster.device_names:
            mine = work & (timeline.placement == cluster.device_index(name))
            spans, colour = (timeline.start[mine], timeline.finish[mine]), BLUE
        else:
            mine = transfer[channel == cluster.channels.index(name)]
            spans, colour = (timeline.transfers.start[mine], timeline.transfers.finish[mine]), ORANGE
        axes.broken_barh(merged(*spans, timeline.makespan / 1500, scale), (y - 0.36, 0.72), facecolor=colour)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)


def merged(start: Floats, finish: Floats, least: float, scale: float) -> list[tuple[float, float]]:
    """(from, how long) of stretches without a gap that one could see."""
    spans: list[list[float]] = []
    for a, b in sorted(zip(start.tolist(), finish.tolist(), strict=True)):
        if spans and a <= spans[-1][1] + least:
            spans[-1][1] = max(b, spans[-1][1])
        else:
            spans.append([a, b])
    return [(scale * a, scale * max(b - a, least)) for a, b in spans]


def unequal_gpus() -> None:
    """One prompt through two cards: shares by memory, shares by load, and what `auto` finds."""
    problem = pw.load_problem("llama-3-8b", "two-gpus-one-host", forbidden=("cpu",))
    plans = [pw.plan(problem, name, budget=BUDGET) for name in ("blocks-by-memory", "blocks-by-load", "auto")]

    def picture(rows: list[Axes]) -> None:
        for axes, plan in zip(rows, plans, strict=True):
            lanes(axes, plan.timeline, ["gpu0", "gpu1", "pcie0"], 1.0)
        rows[-1].set_xlabel("seconds")

    draw("unequal-gpus.svg", [f"{plan.planner}: {format_seconds(plan.value)}" for plan in plans], picture, 4.6)


def pipelines() -> None:
    """What each card does for one sample: equal numbers of layers, whole layers as planned, ops as planned."""
    problem = pw.load_problem("bert-base", "four-gpus", forbidden=("cpu",), objective="throughput", contiguous=True)
    layered = engines.get("pipelining").fit(problem)
    timelines = {
        "three layers on each card": simulate(layered, equal_layers(layered, 4)),
        "whole layers, planned": pw.plan(layered, budget=BUDGET).timeline,
        "op by op, planned": pw.plan(problem, budget=BUDGET).timeline,
    }

    def picture(rows: list[Axes]) -> None:
        for axes, timeline in zip(rows, timelines.values(), strict=True):
            busy, names = 1e3 * occupied(timeline)[0][:4], problem.cluster.device_names[:4]
            axes.barh(range(4), busy, 0.72, color=[ORANGE if load > 0.999 * busy.max() else BLUE for load in busy])
            axes.set_yticks(range(4), names)
            axes.invert_yaxis()
        rows[-1].set_xlabel("milliseconds of work for a sample; the longest (orange) sets the pace")

    titles = [f"{name}: {format_seconds(found.value)} per sample" for name, found in timelines.items()]
    draw("pipelines.svg", titles, picture, 5.0)


def equal_layers(problem: pw.Problem, cards: int) -> Ints:
    """As many layers on each card: what stands before the first is with it, what comes after the last with that."""
    found = pieces(problem.graph)
    number = {piece: i for i, piece in enumerate(found.layers)}
    layer = [number.get(piece, -1 if piece < found.layers[0] else len(number) - 1) for piece in found.of_op.tolist()]
    of_unit = np.zeros(problem.num_units, np.int32)
    np.maximum.at(of_unit, problem.unit, layer)
    return of_unit[problem.unit] * cards // len(number)


def does_not_fit() -> None:
    """One token of a model that is twice as large as the memory that it may use: the page's own example."""
    blocks = (DOCS / "does-not-fit.md").read_text("utf-8").split("```")
    with TemporaryDirectory() as folder:
        config, model = Path(folder) / "config.json", Path(folder) / "model.json"
        config.write_text(next(block for block in blocks if block.startswith("json")).removeprefix("json"))
        save_graph(import_model(str(config), decode=True, prompt=128), model)
        problem = pw.load_problem(
            model, "two-gpus-one-host", forbidden=("gpu1",), max_memory={"gpu0": 70e6}, place_parameters=True
        )
    problem = engines.get("torch-offload").fit(problem)
    cluster = problem.cluster
    gpu, cpu = (cluster.device_index(name) for name in ("gpu0", "cpu"))
    alone = np.array([cpu] * problem.num_ops, np.int32)
    weights = np.array([name.endswith(WEIGHTS) for name in problem.graph.op_names])
    timelines = {
        "all on the CPU": simulate(problem, alone),
        "all weights streamed": simulate(problem, np.where(weights, cpu, gpu).astype(np.int32)),
        "planned": pw.plan(problem, budget=BUDGET).timeline,
    }

    def picture(rows: list[Axes]) -> None:
        for axes, timeline in zip(rows, timelines.values(), strict=True):
            lanes(axes, timeline, ["gpu0", "cpu", "pcie0"], 1e3)
        rows[-1].set_xlabel("milliseconds")

    titles = [f"{name}: {format_seconds(found.value)} for a token" for name, found in timelines.items()]
    draw("does-not-fit.svg", titles, picture, 4.6)


if __name__ == "__main__":
    unequal_gpus()
    pipelines()
    does_not_fit()
