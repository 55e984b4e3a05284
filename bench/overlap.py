"""Two branches on two logical devices of one CPU, one core each, beside both on one: does the second core pay off?

Also what the executor costs beside the plain module, per op, on one device.

python bench/overlap.py
python bench/overlap.py --gpu     BERT-base on the CUDA GPU of this machine, beside the plain module there
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from harness import main
from placewise import Device, Problem, full_mesh, zoo
from placewise.importers.torch_export import from_torch
from placewise.measure.pytorch import materialised
from placewise.plans import Plan


class Branches(nn.Module):
    """Two stacks of layers over the same input."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both."""
        return self.left(x) + self.right(x)


def placed(module: nn.Module, args: tuple[Any, ...], device: Callable[[str], int], devices: int) -> Any:
    graph = from_torch(module, args).collapse_parameters().graph
    cpus = [Device(f"cpu{i}", kind="cpu", flops={"default": 1e11}, bandwidth=1e10) for i in range(devices)]
    placement = np.array([device(name) for name in graph.op_names], np.int32)
    made = Plan(Problem(graph, full_mesh(cpus, 1e10)), placement, None, 1.0, 0.0, "hand", "0")
    return made.apply(module, args, threads=1), graph.num_ops


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each, measured in turns, so that whatever else happens happens to all."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 3):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            if turn >= 3:
                taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in taken.items()}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    with torch.inference_mode():
        return [_on_a_gpu(batch, options.rounds) for batch in (1, 32)] if options.gpu else _on_the_cpu(options)


def _on_the_cpu(options: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    rows = []
    for width, depth, batch in ((512, 8, 256), (1024, 8, 256), (1024, 4, 64)):
        module, args = Branches(width, depth).eval(), (torch.randn(batch, width),)
        one, _ = placed(module, args, lambda name: 0, 1)
        two, _ = placed(module, args, lambda name: int(name.startswith("right")), 2)
        found = in_turns({"one": partial(one, *args), "two": partial(two, *args)}, options.rounds)
        rows.append(
            {"model": f"two branches, {depth} x {width}, batch {batch}", "one ms": 1e3 * found["one"],
             "two ms": 1e3 * found["two"], "times": found["one"] / found["two"]}
        )  # fmt: skip
    for name in ("bert-base", "squeezenet", "resnet-50"):
        module, args = zoo.module(name)
        module, args = materialised(module, tuple(arg[:1] for arg in args), torch.device("cpu"))
        one, ops = placed(module, args, lambda name: 0, 1)
        found = in_turns({"plain": partial(module, *args), "one": partial(one, *args)}, options.rounds)
        rows.append(
            {"model": f"{name}, batch 1", "plain ms": 1e3 * found["plain"], "one ms": 1e3 * found["one"],
             "us more per op": 1e6 * (found["one"] - found["plain"]) / ops,
             "% more": 100 * (found["one"] / found["plain"] - 1)}
        )  # fmt: skip
    return rows


def _on_a_gpu(batch: int, rounds: int) -> dict[str, Any]:
    module, args = zoo.module("bert-base")
    module, args = materialised(module, tuple(arg[:batch] for arg in args), torch.device("cpu"))
    graph = from_torch(module, args).collapse_parameters().graph
    box = full_mesh([Device("cuda:0", flops={"default": 1e14}, bandwidth=1e12)], 1e10)
    nowhere_else = Plan(Problem(graph, box), np.zeros(graph.num_ops, np.int32), None, 1.0, 0.0, "hand", "0")
    with nowhere_else.apply(module, args) as one:  # which moves the weights of the module itself
        args = tuple(arg.cuda() for arg in args)
        module.cuda()

        def until_done(call: Callable[..., Any]) -> None:
            call(*args)
            torch.cuda.synchronize()

        found = in_turns({"plain": partial(until_done, module), "one": partial(until_done, one)}, rounds)
    return {"model": f"bert-base, batch {batch}, GPU", "plain ms": 1e3 * found["plain"], "one ms": 1e3 * found["one"],
            "us more per op": 1e6 * (found["one"] - found["plain"]) / graph.num_ops,
            "% more": 100 * (found["one"] / found["plain"] - 1)}  # fmt: skip


if __name__ == "__main__":
    main(
        "The executor on logical devices",
        measure,
        gpu={"action": "store_true", "help": "on the CUDA GPU of this machine"},
        rounds={"type": int, "default": 30, "help": "medians of so many"},
    )
