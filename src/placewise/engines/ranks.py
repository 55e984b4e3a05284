"""Engines that are told how many layers each rank of a pipeline has.

What comes before the layers (embeddings, masks) is on the first rank, what comes after (norm, head) on the last. A rank
is one accelerator; ranks without layers are left out.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from placewise.cluster import Cluster
from placewise.engines.pieces import Pieces, device_of_pieces, pieces, together
from placewise.errors import InvalidInput, Unsupported
from placewise.plans import Plan
from placewise.problem import Problem
from placewise.terminal import note


class Rank(NamedTuple):
    """A stage of the pipeline."""

    device: int
    layers: tuple[int, ...]  # numbers, from the first to the last


def whole_layers(problem: Problem) -> Problem:
    """Each accelerator gets consecutive layers; CPUs get nothing."""
    found = _layered(problem)
    first, last = found.layers[0], found.layers[-1]
    # Where the program is before its first layer, between layers, or after its last.
    position = np.empty(problem.num_ops, np.int64)
    position[problem.graph.topological_order] = np.arange(problem.num_ops)
    number = {piece: i for i, piece in enumerate(found.layers)}
    layer = np.array([number.get(piece, -1) for piece in found.of_op.tolist()], np.int64)
    ends = position[(layer == len(found.layers) - 1) & ~problem.graph.is_stored].max(initial=-1)
    after = (layer < 0) & (position > ends) & ~problem.graph.is_stored
    label = np.where(after, number[last], np.where(layer < 0, number[first], layer))
    for op in np.flatnonzero(problem.graph.is_stored & (layer < 0)).tolist():  # weights go with their first reader
        start, edges = problem.graph.out_edges
        readers = problem.graph.consumers[edges[start[op] : start[op + 1]]]
        if len(readers):
            label[op] = label[readers[np.argmin(position[readers])]]
    hosts = tuple(device.name for device in problem.cluster.devices if device.kind != "gpu")
    if len(hosts) == problem.num_devices:
        raise Unsupported("a pipeline of layers needs a GPU, and the cluster has none")
    forbidden = tuple(dict.fromkeys((*problem.forbidden, *hosts)))
    return replace(together(problem, label), forbidden=forbidden, contiguous=True)


def ranks(plan: Plan, engine: str) -> list[Rank]:
    """The stages of a plan, in the order of the layers."""
    found = _layered(plan.problem)
    device = device_of_pieces(plan, found, engine)
    stages: list[Rank] = []
    for number, piece in enumerate(found.layers):
        if stages and stages[-1].device == device[piece]:
            stages[-1] = Rank(device[piece], (*stages[-1].layers, number))
        else:
            stages.append(Rank(device[piece], (number,)))
    if len({stage.device for stage in stages}) < len(stages):
        raise InvalidInput(f"the plan comes back to a device after others: plan with `--engine {engine}`")
    return stages


def counts(stages: list[Rank]) -> str:
    """Layers of each rank, with commas."""
    return ",".join(str(len(stage.layers)) for stage in stages)


def accelerator_number(cluster: Cluster, device: int) -> int:
    """What CUDA calls a GPU: the number in its name, or its place among the GPUs."""
    return accelerator_numbers(cluster, device)[0]


def accelerator_numbers(cluster: Cluster, device: int) -> list[int]:
    """The same of all that a device is made of."""
    name, kind, shards = cluster.device_names[device], cluster.devices[device].kind, cluster.devices[device].shards
    named = [int(number) for number in re.findall(r":(\d+)(?:\+|$)", name)]
    if len(named) == shards:
        return named
    if kind != "gpu":
        raise InvalidInput(f"the plan uses {name}, a {kind}, where the engine has GPUs alone: plan with `--engine`")
    first = sum(other.shards for other in cluster.devices[:device] if other.kind == "gpu")
    return list(range(first, first + shards))


def cuda_number(place: str) -> int | None:
    """The number of the GPU that "cuda:1" or "cuda" is; None if the text says something else."""
    found = re.fullmatch(r"cuda(?::(\d{1,4}))?", place, re.ASCII)
    return found and int(found[1] or 0)


def shards_of_each(plan: Plan, stages: list[Rank], engine: str) -> int:
    """How many GPUs each stage has, where all have as many."""
    found = [plan.problem.cluster.devices[stage.device].shards for stage in stages]
    if len(set(found)) > 1:
        several = ", ".join(map(str, found))
        raise InvalidInput(f"the stages have {several} GPUs, and {engine} has as many for each: plan with --uniform")
    return found[0]


def visible(plan: Plan, stages: list[Rank]) -> str:
    """The setting that makes CUDA number the accelerators as the ranks are; the shards of a stage follow each other."""
    return f"CUDA_VISIBLE_DEVICES={','.join(map(str, _numbers(plan, stages)))}"


def note_visible(plan: Plan, stages: list[Rank]) -> None:
    """Say it, where what is exported has no place for it."""
    numbers = _numbers(plan, stages)
    if numbers != list(range(len(numbers))):
        note(f"ranks are numbered along the layers: start it with {visible(plan, stages)}")


def _numbers(plan: Plan, stages: list[Rank]) -> list[int]:
    return [number for stage in stages for number in accelerator_numbers(plan.problem.cluster, stage.device)]


def _layered(problem: Problem) -> Pieces:
    found = pieces(problem.graph)
    if not found.layers:
        raise Unsupported(f"{problem.graph.name!r:.60} has no list of layers that a pipeline could be cut between")
    check_language_model(problem)
    return found


def check_language_model(problem: Problem) -> None:
    """Engines that know layers by number have them from a language model: it begins with an embedding of tokens."""
    if "embedding" not in problem.graph.op_kinds:
        raise Unsupported(f"{problem.graph.name!r:.60} has no embedding, and this engine runs language models alone")
