"""The tables of the papers: what our planners give on their machines, by modelled costs, beside what was published.

python bench/results.py                      prints the tables (half an hour; PLACEWISE_DATA names the public data)
python bench/results.py --json > run.json    everything, with every planner's value
python bench/results.py --run run.json --markdown     writes that run's tables into docs/results.md, at their marks

Budgets are in evaluations, so that the tables are the same however busy a machine is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from harness import machine, progress
from placewise import Budget, Execution, Graph, Problem, catalogue, compare, load_problem, simulate, zoo
from placewise.files import load_cluster
from placewise.importers import dnn_partitioning
from placewise.planners import available
from placewise.planners.single import all_on

DOCS = Path(__file__).parent.parent / "docs" / "results.md"
OOM = "OOM"
LEARNED = ("colocrl", "hierarchical", "hsdag", "placeto")
PLACEMENTS = Budget(evaluations=2_000)  # of whatever learns, and of its rivals where it is judged
JUDGED = ("cpu-only", "gpu-only", "expert", "scotch", "colocrl", "hierarchical", "auto")
COMPLETION = ("gpu-only", "aswm", "tsam", "spt", "talos", "order-search", "auto")
PIPELINES = ("scotch", "local-search", "multilevel", "pipeline-dp", "auto")
Cells = dict[str, Any]  # a number, a word (such as OOM), or nothing


@dataclass(frozen=True)
class Row:
    """One problem of a paper, and the numbers that the paper has for it."""

    label: str
    measure: Callable[[Budget], Cells]  # given the budget of each planner; planner to value
    published: dict[str, str]  # column to a number as it is printed
    instead: dict[str, str] = field(default_factory=dict)  # column to planner, where this row's is not the table's


@dataclass(frozen=True)
class Table:
    """One paper. The columns that no planner of ours stands for are learned or of another program."""

    title: str
    source: str
    unit: str
    columns: dict[str, str]  # column to planner; "" where we have none
    rows: list[Row]
    scale: float = 1.0  # from what is measured to what is shown
    decimals: int | None = None  # as many significant digits as it takes
    best: bool = True  # whether to show the best of all planners
    evaluations: int = 10_000  # of each planner that does not learn


# ---- problems --------------------------------------------------------------------------------------------------------


def step(model: str, box: str, batch: str = "") -> Callable[[Budget], Cells]:
    """All planners on a training step of the zoo; the same problem is measured once."""
    learners = ("colocrl",) if box.startswith("colocrl") else ()
    return lambda budget: everything(model, box, batch, budget, learners=learners)


def judged(model: str, box: str) -> Callable[[Budget], Cells]:
    """The Hierarchical Planner and its rivals, all with as many placements."""
    return lambda _: everything(model, box, "", PLACEMENTS, JUDGED)


@cache
def everything(
    model: str, box: str, batch: str, budget: Budget, planners: Sequence[str] = (), learners: Sequence[str] = ()
) -> Cells:
    problem = training(model, box, batch)
    gpus = replace(problem, forbidden=("cpu",))  # what we take the papers' MinCut for: the partition without the CPU
    found = values(problem, budget, planners, learners)
    return found | {"scotch, GPUs": values(gpus, budget, ["scotch"])["scotch"]}


@cache
def training(model: str, box: str, batch: str) -> Problem:
    """As bundled, or exported anew with another batch."""
    name = f"{model}-train"
    if not batch:
        return load_problem(name, box)
    from placewise.importers.training import training_step

    module, inputs = zoo.module(name)
    graph = training_step(module, tuple(x[: int(batch)] for x in inputs))
    return Problem(replace(graph, name=name).collapse_parameters().graph, load_cluster(box))


def values(problem: Problem, budget: Budget, planners: Sequence[str] = (), learners: Sequence[str] = ()) -> Cells:
    """What each planner reaches, or OOM; the best of all, who found it, and the lower bound."""
    progress(f"{problem.graph.name} on {problem.cluster.name}")
    quick = planners or [name for name in available() if name not in LEARNED]
    outcomes = compare(problem, quick, budget=budget) + compare(problem, learners, budget=PLACEMENTS)
    outcomes.sort(key=lambda row: row.plan.value if row.plan else math.inf)
    found: Cells = {
        row.planner: row.plan.value if row.plan else OOM if re.search("memory|needs .* GPU", row.reason) else None
        for row in outcomes
    }
    best = outcomes[0].plan
    bound = max((row.plan.lower_bound for row in outcomes if row.plan), default=None)
    return found | {"best": best and best.value, "by": best and best.planner, "bound": bound}


def one_image(model: str) -> Callable[[Budget], Cells]:
    """A model with a batch of one, run as OpenVINO does: one device after the other."""

    def measure(budget: Budget) -> Cells:
        from placewise.importers.torch_export import from_torch

        module, inputs = zoo.module(model)
        graph = from_torch(module, tuple(x[:1] for x in inputs), name=model).collapse_parameters().graph
        engine = Execution(concurrency="sequential")
        problem = Problem(graph, load_cluster("hsdag"), execution=engine, forbidden=("igpu",))
        return values(problem, budget)

    return measure


def pair(first: str, second: str) -> Callable[[Budget], Cells]:
    """Two models on one GPU and the CPU: the reduction, in %, beside the first on the GPU and the second on the CPU."""

    def measure(budget: Budget) -> Cells:
        graphs = [zoo.load(name).collapse_parameters().graph for name in (first, second)]
        problem = Problem(side_by_side(graphs), load_cluster("talos"), objective="completion", forbidden=("gpu1",))
        found = values(problem, budget, COMPLETION)
        gpu, cpu = ([problem.seconds[problem.graph.model == m, d].sum() for m in (0, 1)] for d in (0, 2))
        apart, in_turn = gpu[0] + cpu[1], 2 * gpu[0] + gpu[1]
        reduced = {name: 100 * (1 - x / apart) if isinstance(x, float) else x for name, x in found.items()}
        return reduced | {"in turn": 100 * (1 - in_turn / apart), "apart": 1e3 * apart}

    return measure


def side_by_side(graphs: list[Graph]) -> Graph:
    """Several models as one graph."""
    ops = np.cumsum([0, *(graph.num_ops for graph in graphs)])
    tensors = np.cumsum([0, *(graph.num_tensors for graph in graphs)])

    def joined(column: str) -> Any:
        return np.concatenate([getattr(graph, column) for graph in graphs])

    def shifted(column: str, by: Any) -> Any:
        return np.concatenate([getattr(graph, column) + start for graph, start in zip(graphs, by, strict=False)])

    return Graph.create(
        name="+".join(graph.name for graph in graphs),
        op_names=[f"{graph.name}/{name}" for graph in graphs for name in graph.op_names],
        op_kinds=[kind for graph in graphs for kind in graph.op_kinds],
        op_dtypes=[dtype for graph in graphs for dtype in graph.op_dtypes],
        flops=joined("flops"), bytes_accessed=joined("bytes_accessed"),
        scratch=joined("scratch"), resident=joined("resident"),
        tensor_producer=shifted("tensor_producer", ops), tensor_bytes=joined("tensor_bytes"),
        edge_tensor=shifted("edge_tensor", tensors), edge_consumer=shifted("consumers", ops),
        model=np.repeat(np.arange(len(graphs)), np.diff(ops)), models=[graph.name for graph in graphs],
    )  # fmt: skip


def pipeline(name: str) -> Callable[[Budget], Cells]:
    """A public input, under its own semantics; the dynamic program gives each device an interval."""

    def measure(budget: Budget) -> Cells:
        folder = Path(os.environ["PLACEWISE_DATA"], "dnn-partitioning")
        problem = load_problem(folder / "throughput-inputs" / f"{name}.json")
        found = values(problem, budget, PIPELINES)
        chain = values(replace(problem, contiguous=True), budget, ["pipeline-dp"])["pipeline-dp"]
        return found | {"pipeline-dp": chain, "expert": expert_split(folder / "human-experts", name, problem)}

    return measure


def expert_split(folder: Path, name: str, problem: Problem) -> float | None:
    """What the released split of a person gives; in training, ops that run backward follow their colours."""
    graphs, _, model = name.partition("/")
    for file in (folder / f"{model}_expert.json", folder / f"{model.replace('training', 'inference')}_expert.json"):
        if graphs == "LayerGraphs" and file.exists():
            placement = dnn_partitioning.load_split(json.loads(file.read_text(encoding="utf-8")), problem)
            return simulate(problem, placement).value
    return None


# ---- papers ----------------------------------------------------------------------------------------------------------


def rows(problem: Callable[..., Callable[[Budget], Cells]], columns: str, table: str) -> Iterator[Row]:
    """From a table as text: a label, what `problem` takes, and a number or word per column; "." where there is none."""
    names = columns.split()
    for line in table.strip().splitlines():
        label, arguments, numbers = (part.strip() for part in line.split("|"))
        given = zip(names, numbers.split(), strict=True)
        yield Row(label, problem(*arguments.split()), {column: x for column, x in given if x != "."})


def colocrl() -> Table:
    found = rows(step, "CPU GPU Scotch MinCut expert ColocRL", """
        RNNLM, 2        | rnnlm colocrl-2        |  6.89 1.57 13.43 11.94  3.81 1.57
        RNNLM, 4        | rnnlm colocrl-4        |  6.89 1.57 11.52 10.44  4.46 1.57
        NMT, 2          | nmt-2 colocrl-2        | 10.72 OOM  14.19 11.54  4.99 4.04
        NMT, 4          | nmt-2 colocrl-4        | 10.72 OOM  11.23 11.78  4.73 3.92
        Inception, 2    | inception-v3 colocrl-2 | 26.21 4.60 25.24 22.88 11.22 4.60
        Inception, 4    | inception-v3 colocrl-4 | 26.21 4.60 23.41 24.52 10.65 3.85
    """)  # fmt: skip
    columns = {"CPU": "cpu-only", "GPU": "gpu-only", "expert": "expert", "Scotch": "scotch", "MinCut": "scotch, GPUs"}
    return Table(
        "ColocRL: seconds per training step", "Mirhoseini et al., ICML 2017", "model, GPUs",
        columns | {"ColocRL": "colocrl"}, list(found),
    )  # fmt: skip


def hierarchical() -> Table:
    """Its expert leaves the first three models on one GPU: the published times are the same."""
    found = rows(judged, "CPU GPU expert Scotch MinCut HP", """
        Inception, 2    | inception-v3 hierarchical-2 | 0.61  0.15 0.15  0.93  0.82 0.13
        ResNet-152, 2   | resnet-152 hierarchical-2   | .     1.18 1.18  6.27  2.92 1.18
        RNNLM, 2        | rnnlm hierarchical-2        | 6.89  1.57 1.57  5.62  5.21 1.57
        NMT-2, 2        | nmt-2 hierarchical-2        | 6.46  OOM  2.13  3.21  5.34 0.84
        NMT-4, 4        | nmt-4 hierarchical-4        | 10.68 OOM  3.64 11.18 11.63 1.69
        NMT-8, 8        | nmt-8 hierarchical-8        | 11.52 OOM  3.88 17.85 19.01 4.07
    """)  # fmt: skip
    columns = {"CPU": "cpu-only", "GPU": "gpu-only", "expert": "expert", "Scotch": "scotch", "MinCut": "scotch, GPUs"}
    return Table(
        "Hierarchical Planner (HP): seconds per training step", "Mirhoseini et al., ICLR 2018", "model, GPUs",
        columns | {"ColocRL": "colocrl", "HP": "hierarchical", "auto": "auto", "bound": "bound"},
        [replace(row, instead={"expert": "gpu-only"}) if row.published["expert"] == row.published["GPU"] else row
         for row in found], best=False,
    )  # fmt: skip


def placeto() -> Table:
    found = rows(step, "CPU GPU expert Scotch Placeto RNN", """
        Inception, 2    | inception-v3 placeto-2 | 12.54 1.56 1.28 1.54 1.18 1.17
        Inception, 4    | inception-v3 placeto-4 | 12.54 1.56 1.15 1.74 1.13 1.19
        NMT, 2          | nmt-2 placeto-2        | 33.5  OOM  OOM  OOM  2.32 2.35
        NMT, 4          | nmt-2 placeto-4        | 33.5  OOM  OOM  OOM  2.63 3.15
        NASNet of 8, 2  | nasnet-a placeto-2 8   | 37.5  1.28 0.86 1.28 0.86 0.89
        NASNet of 8, 4  | nasnet-a placeto-4 8   | 37.5  1.28 0.84 1.22 0.74 0.76
    """)  # fmt: skip
    columns = {"CPU": "cpu-only", "GPU": "gpu-only", "expert": "expert", "Scotch": "scotch", "Placeto": "", "RNN": ""}
    return Table(
        "Placeto: seconds per training step", "Addanki et al., NeurIPS 2019", "model, GPUs", columns, list(found)
    )


def baechi() -> Table:
    found = rows(step, "expert", """
        Inception, 2    | inception-v3 placeto-2 | .
        Inception, 4    | inception-v3 placeto-4 | .
        GNMT, 4         | gnmt placeto-4         | .
    """)  # fmt: skip
    columns = {"GPU": "gpu-only", "expert": "expert"} | {name: name.lower() for name in ("m-TOPO", "m-ETF", "m-SCT")}
    return Table(
        "Baechi: seconds per training step, on Placeto's machine", "Jeon et al., SoCC 2020", "model, GPUs", columns,
        list(found),
    )  # fmt: skip


def hsdag() -> Table:
    found = rows(one_image, "CPU GPU OV-CPU OV-GPU Placeto RNN HSDAG", """
        Inception-V3 | inception-v3 | 12.8 12.0 12.8 13.8 11.6 12.8 10.5
        ResNet-50    | resnet-50    | 16.0 7.81 23.4 8.76 9.32 8.75 7.66
        BERT-base    | bert-base    | 6.38 2.77 6.57 2.84 6.51 OOM  2.67
    """)  # fmt: skip
    learned = dict.fromkeys(("OV-CPU", "OV-GPU", "Placeto", "RNN", "HSDAG"), "")
    columns = {"CPU": "cpu-only", "GPU": "gpu-only", "min cut": "min-cut"} | learned
    return Table(
        "HSDAG: milliseconds per inference, a batch of one", "Duan et al., NeurIPS 2024, table 2", "model", columns,
        list(found), 1e3, best=False,
    )  # fmt: skip


def talos() -> Table:
    found = rows(pair, "ASWM TSAM Talos", """
        ResNet+SqueezeNet | resnet-50 squeezenet | 10.1 16.5 20.6
        GoogLeNet+AlexNet | googlenet alexnet    | 35.3 38.2 47.9
        ResNet+AlexNet    | resnet-50 alexnet    |  2.6  7.5 30.6
        BERT+GoogLeNet    | bert-base googlenet  | 67.5 67.7 67.7
        BERT+SqueezeNet   | bert-base squeezenet | 27.7 30.0 30.0
        ResNet+BERT       | resnet-50 bert-base  | 66.8 68.3 69.0
        BERT+AlexNet      | bert-base alexnet    | 17.6 18.6 19.9
    """)  # fmt: skip
    columns = {"G+C, ms": "apart", "ASWM": "in turn", "TSAM": "tsam", "Talos": "talos", "SPT": "spt"}
    return Table(
        "Talos: reduction of the sum of completion times beside G+C, %", "ASAP 2021, figure 9", "models", columns,
        list(found), decimals=1, evaluations=1_000_000,  # what anneals needs many, and does many in a second
    )  # fmt: skip


def tarnawski() -> Table:
    found = rows(pipeline, "expert DP DPL local", """
        BERT-24 layers     | LayerGraphs/bert24_inference       | 20.08  17.79  17.79  17.78
        BERT-24 layers, t. | LayerGraphs/bert24_training        | 49.41  41.75  41.75  39.94
        GNMT layers        | LayerGraphs/gnmt_inference         | 46.21  32.91  33.03  31.78
        GNMT layers, t.    | LayerGraphs/gnmt_training          | 137.15 107.00 107.00 90.95
        Inception layers   | LayerGraphs/inceptionv3_inference  | 102.48 51.55  51.55  54.04
        ResNet layers      | LayerGraphs/resnet50_inference     | 43.92  33.77  33.77  35.89
        ResNet layers, t.  | LayerGraphs/resnet50_training      | 112.11 78.63  78.65  81.61
        BERT-3             | OperatorGraphs/bert_l-3_inference  | .      27.92  27.92  27.57
        BERT-3, t.         | OperatorGraphs/bert_l-3_training   | .      65.30  65.30  .
        BERT-12            | OperatorGraphs/bert_l-12_inference | .      147.48 147.48 .
        BERT-12, t.        | OperatorGraphs/bert_L-12_training  | .      438.00 438.00 .
        ResNet-50          | OperatorGraphs/resnet50_inference  | .      124.35 124.35 .
        ResNet-50, t.      | OperatorGraphs/resnet50_training   | .      255.19 255.19 .
    """)  # fmt: skip
    columns = {"expert": "expert", "DP": "pipeline-dp", "DPL": "", "local": "local-search", "Scotch": "scotch"}
    return Table(
        "Tarnawski et al.: milliseconds per sample in a pipeline (t.: training)",
        "NeurIPS 2020; what the released program prints", "input", columns, list(found), 1e3, decimals=2,
        evaluations=100_000,
    )  # fmt: skip


def sizes() -> Table:
    """Whether a published step can be ours: what its work takes at the GPU's peak rate, and what its memory allows."""
    found = rows(one_gpu, "GPU", """
        Inception-V3, ColocRL | inception-v3 colocrl-2      | 4.60
        Inception-V3, HP      | inception-v3 hierarchical-2 | 0.15
        Inception-V3, Placeto | inception-v3 placeto-2      | 1.56
        ResNet-152, HP        | resnet-152 hierarchical-2   | 1.18
        NASNet, Placeto       | nasnet-a placeto-2          | 1.28
        NASNet of 8, Placeto  | nasnet-a placeto-2 8        | 1.28
        RNNLM, ColocRL        | rnnlm colocrl-2             | 1.57
        RNNLM, HP             | rnnlm hierarchical-2        | 1.57
        NMT, ColocRL          | nmt-2 colocrl-2             | OOM
        NMT-2, HP             | nmt-2 hierarchical-2        | OOM
        NMT-4, HP             | nmt-4 hierarchical-4        | OOM
        NMT-8, HP             | nmt-8 hierarchical-8        | OOM
    """)  # fmt: skip
    columns = {name: name for name in ("TFLOP", "at peak", "GPU", "GiB", "of GiB", "fits")}
    return Table(
        "A training step on one GPU: seconds, memory", "published times: as below", "model, paper", columns,
        list(found), best=False,
    )  # fmt: skip


def one_gpu(model: str, box: str, batch: str = "") -> Callable[[Budget], Cells]:
    def measure(budget: Budget) -> Cells:
        problem = training(model, box, batch)
        alone = simulate(problem, all_on(problem, 0))
        room, kept, peak = problem.capacity[0], problem.graph.resident_bytes.sum(), alone.peak[0]
        work = float(problem.graph.flops.sum())
        fastest = problem.cluster.devices[0].peak("float32") / catalogue.shares().flops
        return {
            "TFLOP": work / 1e12, "at peak": work / fastest, "GPU": alone.makespan if peak <= room else OOM,
            "GiB": peak / 2**30, "of GiB": room / 2**30, "fits": (room - kept) / (peak - kept),
        }  # fmt: skip

    return measure


PAPERS: dict[str, Callable[[], Table]] = {
    "sizes": sizes,
    "colocrl": colocrl,
    "hierarchical": hierarchical,
    "placeto": placeto,
    "baechi": baechi,
    "hsdag": hsdag,
    "talos": talos,
    "tarnawski": tarnawski,
}


# ---- what is said about them -----------------------------------------------------------------------------------------


def measured(table: Table) -> list[dict[str, Any]]:
    budget = Budget(evaluations=table.evaluations)
    return [{"label": row.label, "published": row.published, "found": row.measure(budget)} for row in table.rows]


def modelled(table: Table, row: Row, found: Cells) -> Cells:
    """Column to what is shown, ours."""
    chosen = table.columns | row.instead
    shown = {column: found.get(chosen[column]) for column in table.columns}
    return {column: scaled(x, table.scale) for column, x in shown.items()}


def scaled(value: Any, by: float) -> Any:
    return value * by if isinstance(value, (int, float)) else value


def verdict(table: Table, rows: list[tuple[Row, Cells]]) -> list[str]:
    """How many pairs of methods come in the published order, and how far from one GPU methods are, here and there."""
    agree = pairs = 0
    logs: dict[str, list[tuple[float, float]]] = {}
    for row, ours in rows:
        both = {
            column: (size(ours[column]), size(row.published[column]))
            for column in table.columns
            if ours[column] is not None and column in row.published
        }
        for (a, x), (b, y) in combinations(both.values(), 2):
            if max(x, y) > min(x, y) * 1.01:  # else published as equal
                pairs, agree = pairs + 1, agree + ((a < b) == (x < y) and a != b)
        mine, theirs = both.get("GPU", (math.inf, math.inf))
        if math.isfinite(mine) and math.isfinite(theirs):
            for column, (a, x) in both.items():
                if column != "GPU" and math.isfinite(a) and math.isfinite(x):
                    logs.setdefault(column, []).append((math.log(a / mine), math.log(x / theirs)))
    lines = [f"In the published order: {agree} of {pairs} pairs of methods."] if pairs else []
    if logs:
        means = {column: np.exp(np.mean(both, axis=0)) for column, both in logs.items()}
        texts = [f"{column} {a:.2f} [{x:.2f}]" for column, (a, x) in means.items()]
        lines.append(f"Times one GPU, geometric mean where both ran: {', '.join(texts)}.")
    return lines


def size(value: Any) -> float:
    return math.inf if value == OOM else float(value)


def text(value: Any, decimals: int | None) -> str:
    if isinstance(value, (int, float)):
        return f"{value:.{decimals}f}" if decimals is not None else f"{value:.3g}" if value < 10 else f"{value:.4g}"
    return value or "-"


def lines_of(name: str, results: list[dict[str, Any]]) -> tuple[Table, list[list[tuple[str, str]]], list[str]]:
    """The cells of a table, each with ours and theirs, and what is said below."""
    table = PAPERS[name]()
    known = [(row, modelled(table, row, result["found"])) for row, result in zip(table.rows, results, strict=True)]
    cells = []
    for (row, ours), result in zip(known, results, strict=True):
        line = [(row.label, "")]
        for column, planner in table.columns.items():
            mine = text(ours[column], table.decimals) if planner else ""
            line.append((mine, f"[{row.published[column]}]" if column in row.published else ""))
        if table.best:
            best = scaled(result["found"]["best"], table.scale)
            line.append((text(best, table.decimals), result["found"]["by"] or ""))
        cells.append(line)
    return table, cells, verdict(table, known)


def as_text(name: str, results: list[dict[str, Any]]) -> str:
    """For a terminal: the published numbers in brackets, under ours."""
    table, cells, said = lines_of(name, results)
    header = [table.unit, *table.columns, *["best"] * table.best]
    printed = [[part[i] for part in line] for line in cells for i in (0, 1)]
    printed = [line for line in printed if any(line)]
    widths = [max(map(len, column)) for column in zip(header, *printed, strict=True)]
    gap = "  " if sum(widths) + 2 * len(widths) <= 82 else " "
    body = [
        gap.join([first.ljust(widths[0]), *(x.rjust(w) for x, w in zip(rest, widths[1:], strict=True))]).rstrip()
        for first, *rest in [header, ["-" * width for width in widths], *printed]
    ]
    title = f"{table.title} ({table.source}); {table.evaluations:,} evaluations"
    return "\n".join([fill(title, 80), "", *body, "", *(fill(x, 80) for x in said)]).rstrip()


def as_markdown(name: str, results: list[dict[str, Any]]) -> str:
    table, cells, said = lines_of(name, results)
    lines = [[table.unit, *table.columns, *["best"] * table.best], ["---", *["--:"] * (len(cells[0]) - 1)]]
    lines += [[" ".join(filter(None, part)) for part in line] for line in cells]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *(fill(x, 120) for x in said)]).rstrip()


def write(document: Path, tables: dict[str, list[dict[str, Any]]]) -> None:
    """Replace each table between its marks."""
    content = document.read_text(encoding="utf-8")
    for name, results in tables.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, after = content.partition(begin)[0], content.partition(end)[2]
        content = before + begin + as_markdown(name, results) + end + after
    document.write_text(content, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--markdown", action="store_true", help="write the tables into docs/results.md")
    parser.add_argument("--run", type=Path, metavar="FILE", help="what --json printed, instead of running anew")
    parser.add_argument("--papers", default=",".join(PAPERS), metavar="A,B", help="only these; default: %(default)s")
    options = parser.parse_args()
    names = [name for name in options.papers.split(",") if name != "tarnawski" or "PLACEWISE_DATA" in os.environ]
    if options.run:
        done = json.loads(options.run.read_text(encoding="utf-8"))
    else:
        done = {"title": (__doc__ or "").partition("\n")[0], "machine": machine()}
        done["papers"] = {name: measured(PAPERS[name]()) for name in names}
    if options.json:
        print(json.dumps(done, indent=1))
    elif options.markdown:
        write(DOCS, done["papers"])
    else:
        print(fill(done["title"], 80), f"{done['machine']}\n", sep="\n")
        print("\n\n".join(as_text(name, results) for name, results in done["papers"].items()))


if __name__ == "__main__":
    main()
