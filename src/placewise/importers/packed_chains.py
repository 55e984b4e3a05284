"""Reads the packed chains of Talos (ASAP 2021): per model, the time of each segment on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from placewise._schemas import List, validated
from placewise.cluster import Device, full_mesh
from placewise.costs import Costs
from placewise.errors import InvalidInput, check_length
from placewise.graph import Graph
from placewise.importers.fields import Amount, Record
from placewise.problem import Execution, Problem

_MICROSECOND = 1e-6


class _Chain(Record):
    cpu: List[Amount]
    gpu: List[Amount]


class _Chains(Record):
    unit: Literal["us"]
    models: dict[str, _Chain]


def load(data: Any, models: Sequence[str]) -> Problem:
    """The named models side by side on one GPU and one CPU; the sum of their completion times counts.

    Segments hand over nothing, as in the source: it knows neither sizes nor transfer times.
    """
    chains = validated(_Chains, data).models
    for name in models:
        if name not in chains:
            raise InvalidInput(f"models: there is no {name!r:.60}; there are {', '.join(chains)}")
        check_length(chains[name].cpu, len(chains[name].gpu), f"models.{name}.cpu")
    lengths = [len(chains[name].gpu) for name in models]
    model = np.repeat(np.arange(len(models)), lengths)
    follows = np.flatnonzero(np.diff(model) == 0)  # the next segment is one of the same model
    graph = Graph.create(
        name="+".join(models),
        op_names=[f"{name}/{i}" for name, length in zip(models, lengths, strict=True) for i in range(length)],
        tensor_producer=follows,
        tensor_bytes=np.zeros(len(follows)),
        edge_tensor=np.arange(len(follows)),
        edge_consumer=follows + 1,
        model=model,
        models=list(models),
    )
    times = [(gpu, cpu) for name in models for gpu, cpu in zip(chains[name].gpu, chains[name].cpu, strict=True)]
    seconds = np.array(times).reshape(-1, 2) * _MICROSECOND
    cluster = full_mesh([Device("gpu", "gpu"), Device("cpu", "cpu")], np.inf, name="gpu-and-cpu")
    return Problem(graph, cluster, Costs.create(seconds), "completion", Execution(contention="none"))
