"""Models of the zoo over 2 and 4 logical devices: are outputs and gradients those of the plain module?

Each with a random placement and with what `auto` finds in a few evaluations. Weights are random, as the modules make
them; inputs are two images or texts (one for GPT-2), of the zoo's lengths. Each device has one thread, and so has the
plain module: sums are added up in the same order, and equal can mean to the last bit. "outputs" is the largest
difference of any output, as `verify` has it: as a share of the largest value; "gradients" the same of the weights'
gradients of the mean square of the outputs. What float32 is worth is known from the plain module with float64: of
gradients that its float32 has wrong by more than 1e-4, placed and plain are compared apart ("lost"), with how many they
are and how wrong ("float32"). They are sums in which all but nothing cancels out. Models whose weights take more than
`--gib` are left out.

python bench/equal_outputs.py --models squeezenet bert-base
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils import _pytree

from harness import main, progress
from placewise import Budget, Device, Problem, engines, full_mesh, plan, zoo
from placewise.importers.torch_export import from_torch
from placewise.plans import Plan
from placewise.simulator import simulate
from placewise.verify import difference

Arrays = Sequence[NDArray[Any]]
#: How wrong a gradient of the plain module may be in float32 to be compared with the others.
_WRONG = 1e-4


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    wanted = options.models or [name for name, model in zoo.MODELS.items() if model.task != "training"]
    rows: list[dict[str, Any]] = []
    for name in wanted:
        gib = zoo.facts(name)["bytes"] / 2**30
        if gib > options.gib:
            progress(f"{name}: left out, its weights take {gib:.0f} GiB")
        else:
            rows += _compared(name, options.evaluations)
    return rows


def _compared(name: str, evaluations: int) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    module, args = zoo.module(name, device="cpu")
    steps_first = zoo.MODELS[name].code.partition(".")[0] in ("rnnlm", "nmt", "gnmt")
    args = tuple(arg[:, :2] if steps_first else arg[:2] for arg in args)
    graph = from_torch(module, args).collapse_parameters().graph
    expected = _results(module, module, args)
    with_doubles = copy.deepcopy(module).double()
    doubled = _pytree.tree_map(lambda arg: arg.double() if arg.is_floating_point() else arg, args)
    wrong = _differences(_results(with_doubles, with_doubles, doubled)[1], expected[1])
    lost = [error > _WRONG for error in wrong]
    del with_doubles
    for count in (2, 4):
        cpus = [Device(f"cpu{i}", "cpu", 16 * 2**30, {"default": 5e10}, 1e10) for i in range(count)]
        problem = engines.get("torch").fit(Problem(graph, full_mesh(cpus, 1e12, 5e-6)))
        for made in (_random(problem), plan(problem, "auto", budget=Budget(evaluations=evaluations))):
            began = time.perf_counter()
            with made.apply(module, args, threads=1) as placed:
                found = _results(placed, module, args)
            progress(f"{name}, {count} devices, {made.planner}: {time.perf_counter() - began:.0f} s")
            differences = _differences(expected[1], found[1])
            yield {
                "model": name, "ops": graph.num_ops, "devices": f"{len(set(made.placement.tolist()))} of {count}",
                "placement": made.planner, "outputs": max(_differences(expected[0], found[0])),
                "gradients": max(d for d, is_lost in zip(differences, lost, strict=True) if not is_lost),
                "lost": max((d for d, is_lost in zip(differences, lost, strict=True) if is_lost), default=0.0),
                "float32": f"{sum(lost)}: {max(wrong):.1g}" if any(lost) else "",
            }  # fmt: skip


def _random(problem: Problem) -> Plan:
    of_unit = np.random.default_rng(0).integers(0, problem.num_devices, problem.num_units)
    placement = of_unit.astype(np.int32)[problem.unit]
    return Plan(problem, placement, None, simulate(problem, placement).value, 0.0, "random", "0")


def _results(called: nn.Module, module: nn.Module, args: tuple[Any, ...]) -> tuple[Arrays, Arrays]:
    """Outputs, and the gradients of the weights."""
    outputs = [leaf for leaf in _pytree.tree_leaves(called(*args)) if isinstance(leaf, torch.Tensor)]
    loss = torch.stack([output.square().mean() for output in outputs if output.requires_grad]).sum()
    gradients = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    read = [gradient for gradient in gradients if gradient is not None]
    return [output.detach().numpy() for output in outputs], [gradient.numpy() for gradient in read]


def _differences(expected: Arrays, found: Arrays) -> list[float]:
    return [difference(one, other) for one, other in zip(expected, found, strict=True)]


if __name__ == "__main__":
    settings = {
        "models": {"nargs": "*", "help": "of the zoo"},
        "gib": {"type": float, "default": 10.0, "help": "of weights, at most"},
        "evaluations": {"type": int, "default": 200, "help": "that `auto` is given"},
    }
    main("Placed beside plain", measure, **settings)
