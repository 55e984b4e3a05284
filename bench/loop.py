"""Plan, verify, plan again with what was measured: how soon is the time predicted, and does the plan come to rest?

The first plan of a model rests on guessed rates. Each is run by `placewise verify`, which keeps the times of the ops as
they ran for the next. "off" is how far the measured time is from the predicted one, "moved" how many ops are elsewhere
than in the plan before.

OMP_NUM_THREADS=1 python bench/loop.py     two logical devices of this CPU, each with one thread
python bench/loop.py --machine             the CPU and the GPU of a machine that has one
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness import best_planned, main, progress, this_machine
from placewise import Budget, Cluster, Problem, engines
from placewise.importers import pt2
from placewise.verify import verify
from verify import MODELS, exported, halves, handed_over


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        os.environ["PLACEWISE_PROFILES"] = folder
        box = this_machine() if options.machine else halves(handed_over())
        return [row for name in options.models for row in _rounds(name, box, Path(folder), options)]


def _rounds(name: str, cluster: Cluster, folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = str(exported(name, options.batch or MODELS.get(name, 1), folder))
    graph = pt2.load(model, name).collapse_parameters().graph
    before = None
    for turn in range(options.rounds):
        made = best_planned(engines.get("torch").fit(Problem(graph, cluster)), Budget(evaluations=options.evaluations))
        kept: list[Cluster] = []
        seen = verify(made, model, seconds=options.seconds, within=math.inf, keep=kept.append)
        cluster = kept[0]
        moved = "" if before is None else int((made.placement != before.placement).sum())
        before = made
        row = {
            "model": name, "round": turn + 1, "ops": graph.num_ops, "moved": moved,
            "predicted ms": 1e3 * seen.predicted, "measured ms": 1e3 * seen.placed.seconds,
            "off": f"{seen.placed.seconds / seen.predicted - 1:+.0%}", "spread": f"{seen.placed.spread:.0%}",
            "claims": "hold" if seen.holds else "do not hold",
        }  # fmt: skip
        progress(str(row))
        yield row


if __name__ == "__main__":
    main(
        "Plan, verify, plan again",
        measure,
        models={"nargs": "*", "default": ["squeezenet", "inception-v3", "rnnlm"], "help": "of the zoo"},
        batch={"type": int, "default": 0, "help": "images or texts; 0 = a few, depending on the model"},
        machine={"action": "store_true", "help": "the CPU and the GPU of this machine"},
        rounds={"type": int, "default": 4, "help": "of planning and verifying"},
        evaluations={"type": int, "default": 1000, "help": "for each plan"},
        seconds={"type": float, "default": 8.0, "help": "of measuring, for each plan"},
    )
