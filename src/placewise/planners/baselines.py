"""What papers compare with: the CPU alone, one GPU alone, round robin, and what a human expert would do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from placewise.driver import Context
from placewise.graph import Ints
from placewise.planners import planner
from placewise.planners.heft import ignores_shape
from placewise.planners.single import all_on
from placewise.problem import Problem
from placewise.quantities import format_bytes


def accelerators(problem: Problem) -> list[int]:
    """The devices that papers place on: all but CPUs and those that may run nothing; where that leaves none, all."""
    used = np.flatnonzero(problem.allowed.any(axis=0)).tolist()
    found = [d for d in used if problem.cluster.devices[d].kind != "cpu"]
    return found or list(range(problem.num_devices))


# ---- one device ------------------------------------------------------------------------------------------------------


def _of_kind(problem: Problem, kind: str) -> list[int]:
    return [d for d, device in enumerate(problem.cluster.devices) if device.kind == kind]


def _has_room(kind: str) -> Callable[[Problem], bool | str]:
    def supports(problem: Problem) -> bool | str:
        found = _of_kind(problem, kind)
        if not found:
            return f"needs a {kind.upper()}, and the cluster has none"
        kept = np.where(problem.allowed, problem.graph.resident_bytes[:, None], 0.0).sum(axis=0)
        if (kept[found] > problem.capacity[found]).all():
            needed, most = float(kept[found].min()), float(problem.capacity[found].max())
            return f"needs {format_bytes(needed)} on one {kind.upper()}, which has {format_bytes(most)}"
        return True

    return supports


@planner("cpu-only", supports=_has_room("cpu"))
def cpu_only(problem: Problem, ctx: Context) -> None:
    """Everything on the best CPU; ops that may not run there go where they are fastest."""
    for device in _of_kind(problem, "cpu"):
        ctx.evaluate(all_on(problem, device))


@planner("gpu-only", supports=_has_room("gpu"))
def gpu_only(problem: Problem, ctx: Context) -> None:
    """Everything on the best single GPU; ops that may not run there go where they are fastest."""
    for device in _of_kind(problem, "gpu"):
        ctx.evaluate(all_on(problem, device))


# ---- round robin -----------------------------------------------------------------------------------------------------


@planner("round-robin", supports=ignores_shape)
def round_robin(problem: Problem, ctx: Context) -> Ints:
    """The ops of the program dealt to the devices in turn, as far as their memory goes."""
    need = problem.per_unit(problem.graph.resident_bytes).tolist()
    may = problem.unit_allowed
    room, turn = problem.capacity.copy(), 0
    chosen = np.full(problem.num_units, -1, np.int32)
    for unit in problem.unit[problem.graph.topological_order].tolist():
        if chosen[unit] >= 0:
            continue
        ahead = np.roll(np.arange(problem.num_devices), -turn)
        able = ahead[may[unit, ahead]]
        fits = able[room[able] >= need[unit]]
        device = int(fits[0] if len(fits) else able[room[able].argmax()])
        chosen[unit] = device
        room[device] -= need[unit]
        turn = device + 1
    placement: Ints = chosen[problem.unit]
    return placement


# ---- the expert ------------------------------------------------------------------------------------------------------


class _Rule(NamedTuple):
    """How people place a model: by the module paths of its layers."""

    stacks: tuple[str, ...]  # a pattern for the layers of each stack; layers are numbered by their first op
    turns: bool = False  # layer by layer in turn over the devices; else in contiguous parts of as many layers each
    first: str = ""  # what goes with the first layer
    last: str = ""  # what goes with the last layer


def _lstm(*stacks: str) -> _Rule:
    return _Rule(stacks, turns=True, first=r"\w*embedding", last="attention|softmax")


_RULES: Final = {
    "rnnlm": _lstm(r"layers\.\d+"),
    "nmt-2": _lstm(r"encoder\.\d+", r"decoder\.\d+"),
    "nmt-4": _lstm(r"encoder\.\d+", r"decoder\.\d+"),
    "nmt-8": _lstm(r"encoder\.\d+", r"decoder\.\d+"),
    "gnmt": _lstm(r"forwards|backwards|encoder\.\d+", r"decoder\.\d+"),
    "inception-v3": _Rule((r"Conv2d_\w+|Mixed_\w+",)),
    "googlenet": _Rule((r"conv\d|inception\w+",)),
    "resnet-50": _Rule((r"layer\d\.\d+",)),
    "resnet-152": _Rule((r"layer\d\.\d+",)),
    "nasnet-a": _Rule((r"stem_\d|stages\.\d+\.\d+|reductions\.\d+",)),
    "alexnet": _Rule((r"features\.\d+|classifier\.\d+",)),
    "vgg-19": _Rule((r"features\.\d+|classifier\.\d+",)),
    "squeezenet": _Rule((r"features\.\d+|classifier\.\d+",)),
    "bert-base": _Rule((r"encoder\.layer\.\d+",)),
    "gpt-2": _Rule((r"h\.\d+",)),
    "llama-3-8b": _Rule((r"layers\.\d+",)),
    "qwen3-30b-a3b": _Rule((r"layers\.\d+",)),
}


def _rule_for(problem: Problem) -> _Rule | None:
    return _RULES.get(re.sub("-(train|decode)$", "", problem.graph.name))


def _knows(problem: Problem) -> bool | str:
    return _rule_for(problem) is not None or f"knows no human rule for a model {problem.graph.name!r:.60}"


@planner("expert", supports=_knows)
def expert(problem: Problem, ctx: Context) -> Ints:
    """What people do by hand with a model of the zoo: LSTM layers in turn over the GPUs, other networks in equal parts.

    As in Mirhoseini et al. 2017 (arXiv:1706.04972): each layer of a recurrent network has a device, attention and
    softmax go with the last layer and embeddings with the first; a convolutional network is cut into contiguous parts
    of as many layers each, with the branches of a module on one device. Transformers are cut like the latter. What has
    no layer goes with the op that it reads first, else with its first reader. Memory is not looked at.
    """
    rule = _rule_for(problem)
    assert rule is not None  # else `supports` said no
    devices = accelerators(problem)
    wish = _follow(problem, _devices_of_layers(problem, rule, devices), devices[0])
    wish = wish[problem.first_of_unit][problem.unit]
    fastest = problem.unit_seconds[problem.unit].argmin(axis=1) if problem.num_ops else wish
    return np.where(problem.allowed[np.arange(problem.num_ops), wish], wish, fastest).astype(np.int32)


def _devices_of_layers(problem: Problem, rule: _Rule, devices: list[int]) -> Ints:
    """[N] the device of each op that belongs to a layer, else -1."""
    graph = problem.graph
    wish = np.full(graph.num_ops, -1, np.int32)
    runs = [op for op in graph.topological_order.tolist() if not graph.is_stored[op]]
    final = devices[0]
    for stack in rule.stacks:
        layer = [_found(stack, module) for module in graph.op_modules]
        names = list(dict.fromkeys(layer[op] for op in runs if layer[op]))
        device = {
            name: devices[i % len(devices) if rule.turns else i * len(devices) // len(names)]
            for i, name in enumerate(names)
        }
        final = device[names[-1]] if names else final
        for op, name in enumerate(layer):
            wish[op] = device.get(name, wish[op])
    for part, device_of_part in ((rule.first, devices[0]), (rule.last, final)):
        for op, module in enumerate(graph.op_modules if part else ()):
            wish[op] = device_of_part if _found(part, module) else wish[op]
    return wish


def _found(pattern: str, module: str) -> str:
    """The part of a module's path that matches whole names."""
    match = re.search(rf"(?:^|\.)({pattern})(?:\.|$)", module)
    return match[1] if match else ""


def _follow(problem: Problem, wish: Ints, first: int) -> Ints:
    """Ops without a wish go with the first op that they read, else that reads them, else to the first device."""
    graph, wish = problem.graph, wish.copy()
    order = graph.topological_order.tolist()
    for sequence, (start, edges), neighbour in (
        (order, graph.in_edges, graph.edge_producer),
        (order[::-1], graph.out_edges, graph.consumers),
    ):
        for op in sequence:
            if wish[op] < 0:
                near = wish[neighbour[edges[start[op] : start[op + 1]]]]
                wish[op] = next((device for device in near.tolist() if device >= 0), -1)
    return np.where(wish < 0, first, wish)
