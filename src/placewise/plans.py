"""The answer: a device for every op, what it is worth, how far from the best it can be, and how it was found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np

from placewise.costs import LABELS
from placewise.errors import InvalidInput
from placewise.graph import Graph, Ints
from placewise.problem import Problem
from placewise.quantities import format_bytes, format_seconds, format_share

if TYPE_CHECKING:
    from torch import nn

    from placewise.executor import PlacedModule
    from placewise.offload import Offload
    from placewise.simulator.timeline import Timeline

_OPTIMAL: Final = 1e-9  # a gap that is rounding


def gap_of(value: float, lower_bound: float) -> float:
    """How far above the lower bound a value is, as a share of the value."""
    return max(0.0, 1.0 - lower_bound / value) if value > 0 else 0.0


def format_gap(gap: float) -> str:
    """For people: "gap 42.0%", or "optimal"."""
    return "optimal" if gap <= _OPTIMAL else f"gap {format_share(gap)}"


@dataclass(frozen=True, eq=False)
class Plan:
    """A placement that keeps every constraint of its problem, and its provenance."""

    problem: Problem
    placement: Ints  # [N] device of each op
    order: Ints | None  # the ops in the order in which each device must run its own; None = by priority
    value: float  # seconds: the objective, by simulation
    lower_bound: float  # seconds: no plan of this problem has a smaller value
    planner: str
    version: str  # of Placewise
    found_by: str = ""  # the planner that found it, where `planner` asked several
    proved_by: str = ""  # the planner that proved the bound; none where it is one that holds for any plan (`explain`)
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0  # wall time that planning took
    evaluations: int = 0  # placements that were simulated for it
    stopped: str = "finished"  # or "budget", "interrupted"
    history: tuple[tuple[float, int, float], ...] = ()  # (seconds, evaluations, value) at each improvement
    bounds: tuple[tuple[float, float], ...] = ()  # (seconds, lower bound) at first, and each time that it rose

    def __post_init__(self) -> None:
        for name in ("placement", "order"):
            if getattr(self, name) is not None:
                array = np.array(getattr(self, name), np.int32)
                array.flags.writeable = False
                object.__setattr__(self, name, array)

    def __repr__(self) -> str:
        return f"<Plan of {self.problem!r} by {self.planner}: {self.value} s, {format_gap(self.gap)}>"

    @property
    def gap(self) -> float:
        """How far above the lower bound the value is, as a share of the value; 0 = proven optimal."""
        return gap_of(self.value, self.lower_bound)

    @property
    def is_optimal(self) -> bool:
        """Whether no plan can be better."""
        return self.gap <= _OPTIMAL

    @cached_property
    def timeline(self) -> Timeline:
        """The plan, simulated."""
        from placewise.simulator import simulate

        return simulate(self.problem, self.placement, self.order)

    @property
    def cost_shares(self) -> dict[str, float]:
        """Where the ops' times come from: the share of each label (see `costs.LABELS`) in their sum, largest first."""
        ops = np.arange(self.problem.num_ops)
        seconds = self.problem.seconds[ops, self.placement]
        sums = np.bincount(self.problem.costs.label[ops, self.placement], seconds, len(LABELS))
        shares = {LABELS[i]: float(sums[i] / sums.sum()) for i in np.argsort(-sums) if sums[i] > 0}
        return shares

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the problem and the answer."""
        order = b"" if self.order is None else self.order.tobytes()
        return sha256(self.problem.digest.encode() + self.placement.tobytes() + order).hexdigest()

    @cached_property
    def devices(self) -> dict[str, str]:
        """Op name to device name."""
        names = self.problem.cluster.device_names
        return dict(zip(self.problem.graph.op_names, (names[d] for d in self.placement.tolist()), strict=True))

    def check_model(self, graph: Graph, advice: str = "") -> None:
        """Refuse a model, given by its graph, that lacks an op of this plan, or has it with other shapes."""
        theirs = dict(zip(graph.op_names, graph.op_signatures, strict=True))
        for name, signature in zip(self.problem.graph.op_names, self.problem.graph.op_signatures, strict=True):
            if name not in theirs:
                raise InvalidInput(f"not the model of this plan: it has no op {name!r:.80}{advice}")
            if signature and theirs[name] != signature:
                raise InvalidInput(
                    f"not the model of this plan: op {name!r:.80} is {theirs[name]:.120}, not {signature:.120}"
                )

    @overload
    def apply(self, module: nn.Module, *, devices: Mapping[str, str] | None = None) -> Offload: ...

    @overload
    def apply(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        devices: Mapping[str, str] | None = None,
        threads: int | None = None,
    ) -> PlacedModule: ...

    def apply(
        self,
        module: nn.Module,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        devices: Mapping[str, str] | None = None,
        threads: int | None = None,
    ) -> PlacedModule | Offload:
        """The PyTorch module, called as before, run over the plan's devices.

        With arguments such as it is called with, each of its ops runs where the plan has it (`executor.placed`).
        Without, the plan is one of `--engine torch-offload`, and the module itself runs so (`offload.offloaded`).
        """
        from placewise.importers import require

        require("torch", "torch")
        if args is None and kwargs is None:
            from placewise.offload import offloaded

            return offloaded(self, module, devices=devices)
        from placewise.executor import placed

        return placed(self, module, args or (), kwargs, devices=devices, threads=threads)

    def save(self, path: str | Path) -> None:
        """Write a self-contained JSON file (gzip if the name ends in .gz); see `Plan.load`."""
        from placewise.files import save_plan

        save_plan(self, path)

    def report(self, path: str | Path, *others: Plan) -> None:
        """Write a page for a browser, with other plans beside this one (`placewise report`)."""
        from placewise.files import write_text
        from placewise.report.page import to_page

        write_text(path, to_page([self, *others]))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file, check the plan against its problem, and simulate it anew."""
        from placewise.files import load_plan

        return load_plan(path)

    def summary(self) -> str:
        """A few lines for people."""
        peak = self.timeline.peak
        lines = [
            f"{self.problem.graph.name} on {self.problem.cluster.name}, {self.problem.objective}, by {self.planner}",
            f"  {format_seconds(self.value)}; "
            f"no plan takes less than {format_seconds(self.lower_bound)} ({format_gap(self.gap)})",
        ]
        for d, device in enumerate(self.problem.cluster.devices):
            ops = int((self.placement == d).sum())
            share = f" of {format_bytes(device.memory)}" if math.isfinite(device.memory) else ""
            lines.append(f"  {device.name}: {ops} ops, busy {format_seconds(self.timeline.busy[d])}, "
                         f"peak {format_bytes(peak[d])}{share}")  # fmt: skip
        return "\n".join(lines)
