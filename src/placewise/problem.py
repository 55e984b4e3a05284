"""The question that a planner answers: graph + cluster + costs + objective + constraints, frozen and array-backed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from placewise.cluster import Cluster
from placewise.costs import Costs
from placewise.errors import InvalidInput, check_text, check_type
from placewise.graph import Graph, Ints

OBJECTIVES: Final = ("latency", "throughput", "completion")

_CHOICES: Final = {
    "concurrency": ("parallel", "sequential", "slots"),
    "contention": ("channel", "none"),
    "sends": ("tensor", "edge"),
    "memory": ("live", "static"),
    "pipeline": ("1f1b", "gpipe"),
    "in_flight": ("one", "pipeline"),
}


def _check_flag(value: Any, where: str) -> None:
    if not isinstance(value, bool):
        raise InvalidInput(f"{where}: must be True or False, found {value!r:.60}")


def _check_count(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise InvalidInput(f"{where}: must be a whole number from 1 to {2**31 - 1}, found {value!r:.60}")


@dataclass(frozen=True)
class Execution:
    """How the engine executes a plan; the simulator obeys these settings.

    The defaults describe a runtime with one queue per device and asynchronous copies. Others describe engines
    (`concurrency="sequential"`) or match the literature (`concurrency="slots"`, `contention="none"`, `sends="edge"`,
    `memory="static"`).
    """

    concurrency: str = "parallel"  # "sequential": one op or transfer at a time over the whole cluster
    slots: int = 1  # with concurrency "slots": pieces, each run as a whole, that a device's ops may be cut into
    contention: str = "channel"  # "none": transfers never wait for each other
    sends: str = "tensor"  # "edge": one transfer per consumer instead of one per destination device
    memory: str = "live"  # "static": only resident bytes count
    prefetch: int = 2  # how many streamed consumers ahead a device may fetch parameters
    overlap: bool = True  # throughput: whether a device computes while it copies
    staged: bool = False  # throughput: sends go through host memory, so a sender pays once however many receive
    pipeline: str = "1f1b"  # throughput of training: busiest device; "gpipe": busiest forward plus busiest backward
    replicate: bool = False  # throughput: devices without ops repeat the work of devices like them, sample by sample
    microbatches: int = 1  # throughput of training: samples of a step, after which replicas exchange their gradients
    in_flight: str = "one"  # samples whose activations a device holds; "pipeline": as many as a training pipeline needs
    recompute: bool = False  # of samples in flight, only what a device receives is kept; the rest is computed again

    def __post_init__(self) -> None:
        for setting, choices in _CHOICES.items():
            given = getattr(self, setting)
            if given not in choices:
                raise InvalidInput(f"execution.{setting}: must be one of {', '.join(choices)}, found {given!r:.60}")
        if self.concurrency == "slots" and self.memory != "static":
            raise InvalidInput('execution.memory: must be "static" where concurrency is "slots"')
        _check_count(self.slots, "execution.slots")
        _check_count(self.prefetch, "execution.prefetch")
        _check_flag(self.overlap, "execution.overlap")
        _check_flag(self.staged, "execution.staged")
        _check_flag(self.replicate, "execution.replicate")
        _check_count(self.microbatches, "execution.microbatches")
        _check_flag(self.recompute, "execution.recompute")
        if self.recompute and self.in_flight == "one":
            raise InvalidInput('execution.recompute: needs in_flight "pipeline": one sample is never computed again')


@dataclass(frozen=True, eq=False)
class Problem:
    """What to plan. Costs default to what the cluster's profiles and rates say (`costs.estimate`)."""

    graph: Graph
    cluster: Cluster
    costs: Costs = field(default=None)  # type: ignore[assignment]  # filled in below
    objective: str = "latency"
    execution: Execution = Execution()
    pins: Mapping[str, str] = field(default_factory=dict)  # op name -> device name
    forbidden: tuple[str, ...] = ()  # devices that get no op
    contiguous: bool = False  # each device gets an interval of the forward dataflow order
    max_devices: int | None = None

    #: Arrays that later stages derive from this problem, so that they are derived once.
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_type(self.graph, Graph, "graph")
        check_type(self.cluster, Cluster, "cluster")
        check_type(self.execution, Execution, "execution")
        if self.costs is None:
            from placewise.costs.estimate import estimate

            object.__setattr__(self, "costs", estimate(self.graph, self.cluster))
        check_type(self.costs, Costs, "costs")
        if self.objective not in OBJECTIVES:
            raise InvalidInput(f"objective: must be one of {', '.join(OBJECTIVES)}, found {self.objective!r:.60}")
        shape = (self.graph.num_ops, self.cluster.num_devices)
        if self.costs.seconds.shape != shape:
            raise InvalidInput(f"costs are for {self.costs.seconds.shape} (ops, devices), the problem has {shape}")
        check_type(self.pins, Mapping, "pins")
        if not isinstance(self.forbidden, (tuple, list)):
            raise InvalidInput(f"forbidden: must be a tuple of device names, found {self.forbidden!r:.60}")
        for name in (*self.pins, *self.pins.values(), *self.forbidden):
            check_text(name, "a name in pins or forbidden")
        object.__setattr__(self, "pins", MappingProxyType(dict(self.pins)))
        object.__setattr__(self, "forbidden", tuple(self.forbidden))
        _check_flag(self.contiguous, "contiguous")
        if self.max_devices is not None:
            _check_count(self.max_devices, "max_devices")
        if self.execution.concurrency != "parallel" and self.objective == "throughput":
            engine = "a sequential engine" if self.execution.concurrency == "sequential" else "an engine with slots"
            raise InvalidInput(f"{engine} has no pipeline: plan it for latency")
        if self.execution.in_flight == "pipeline" and self.objective == "throughput" and not self.contiguous:
            raise InvalidInput('execution.in_flight: "pipeline" counts stages, so the plan must be contiguous')
        stuck = np.flatnonzero(~self.allowed.any(axis=1))
        if len(stuck):
            name = self.graph.op_names[stuck[0]]
            raise InvalidInput(
                f"op {name!r:.60} may run on no device: check its costs, pins, group and forbidden devices"
            )

    def __repr__(self) -> str:
        return f"<Problem {self.graph.name!r} on {self.cluster.name!r}, {self.objective}>"

    def __reduce__(self) -> tuple[Any, ...]:
        given = [getattr(self, part.name) for part in fields(self) if part.init]
        return Problem, tuple(dict(x) if isinstance(x, MappingProxyType) else x for x in given)

    @property
    def num_ops(self) -> int:
        """N."""
        return self.graph.num_ops

    @property
    def num_devices(self) -> int:
        """D."""
        return self.cluster.num_devices

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """[N, D] time of each op on each device; infinite where it may not run, zero for parameters and state."""
        table = np.where(self.allowed, np.where(self.graph.is_stored[:, None], 0.0, self.costs.seconds), np.inf)
        table.flags.writeable = False
        return table

    @cached_property
    def unit(self) -> Ints:
        """[N] ops that must share a device have the same unit; units are numbered by their first op."""
        group = self.graph.group
        key = np.where(group >= 0, group.astype(np.int64) + self.num_ops, np.arange(self.num_ops))
        first, inverse = np.unique(key, return_index=True, return_inverse=True)[1:]
        rank = np.argsort(np.argsort(first))
        unit = rank[inverse].astype(np.int32)
        unit.flags.writeable = False
        return unit

    @cached_property
    def num_units(self) -> int:
        """How many placement decisions there are."""
        return int(self.unit.max(initial=-1)) + 1

    @cached_property
    def first_of_unit(self) -> NDArray[np.int64]:
        """[units] the first op of each unit."""
        first = np.unique(self.unit, return_index=True)[1]
        first.flags.writeable = False
        return first

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """[N, D] where each op may run: its costs are finite, pins and forbidden devices hold, its group agrees."""
        may = np.isfinite(self.costs.seconds)
        for device in self.forbidden:
            may[:, self.cluster.device_index(device)] = False
        for op, device in self.pins.items():
            row = may[self.graph.op_index(op)]
            pinned = self.cluster.device_index(device)
            row[:] = (np.arange(self.num_devices) == pinned) & row[pinned]
        may = self.per_unit(may, np.logical_and)[self.unit]
        may.flags.writeable = False
        return may

    def per_unit(self, values: NDArray[Any], combine: np.ufunc = np.add) -> NDArray[Any]:
        """[units, ...] a per-op array combined over the ops of each unit."""
        if self.num_units == self.num_ops:  # each op is its own unit
            return values.copy()
        order = np.argsort(self.unit, kind="stable")
        starts = np.searchsorted(self.unit[order], np.arange(self.num_units))
        return combine.reduceat(values[order], starts, axis=0)

    @cached_property
    def unit_seconds(self) -> NDArray[np.float64]:
        """[units, D] time of all ops of a unit on each device; infinite where it may not run."""
        table: NDArray[np.float64] = self.per_unit(self.seconds)
        table.flags.writeable = False
        return table

    @cached_property
    def unit_allowed(self) -> NDArray[np.bool_]:
        """[units, D] where each unit may run."""
        may = self.allowed[self.first_of_unit]
        may.flags.writeable = False
        return may

    @cached_property
    def capacity(self) -> NDArray[np.float64]:
        """[D] bytes of memory on each device."""
        return self.cluster.memory

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything that decides a plan's value."""
        parts = (
            self.graph.digest, self.cluster.digest, self.costs.digest, self.objective, asdict(self.execution),
            sorted(self.pins.items()), sorted(self.forbidden), self.contiguous, self.max_devices,
        )  # fmt: skip
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
