"""How tensors enter and leave a device while it works, in PyTorch.

A worker has a port. On the CPU it has little to do: logical devices share its memory, and what a GPU reads is put into
pinned memory. On a GPU, copies run on streams of their own, beside the work: out, to pinned host memory, as soon as a
tensor is made; in, as soon as it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from placewise.engines import check_devices, check_whole_ops
from placewise.engines.ranks import accelerator_number
from placewise.errors import InvalidInput
from placewise.importers.torch_export import first_line
from placewise.plans import Plan


def torch_devices(plan: Plan, given: Mapping[str, str]) -> list[torch.device]:
    """What each device of the plan's cluster is to torch: as it is given, else "cpu", or "cuda" and a number.

    Other devices that the plan does not use are "meta".
    """
    cluster, homes = plan.problem.cluster, []
    check_devices(plan, given)
    check_whole_ops(plan, "torch")
    used = set(plan.placement.tolist())
    for d, device in enumerate(cluster.devices):
        name = given.get(device.name)
        if name is None:
            name = "cpu" if device.kind == "cpu" else f"cuda:{accelerator_number(cluster, d)}" if d in used else "meta"
        try:
            homes.append(torch.device(name))
        except RuntimeError as error:
            raise InvalidInput(f"devices: {device.name} = {name!r:.60}: {first_line(error)}") from None
        if d in used:
            _check_present(device.name, homes[d])
            if homes[d].type == "cuda":  # tensors say which, so this does, too
                homes[d] = torch.device("cuda", homes[d].index or 0)
    return homes


def _check_present(name: str, home: torch.device) -> None:
    count = torch.cuda.device_count()
    if home.type not in ("cpu", "cuda"):
        raise InvalidInput(f"devices: {name} = {str(home)!r}: must be cpu or cuda")
    if home.type == "cuda" and (home.index or 0) >= count:
        raise InvalidInput(
            f"the plan uses {name} as {home}, and torch sees {count} CUDA devices; say what it is, as in "
            f"devices={{{name!r}: 'cpu'}} or --device {name}=cpu"
        )


def stream(device: torch.device) -> torch.cuda.Stream:
    """A stream beside the one that computes."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def event() -> torch.cuda.Event:
    """A mark in a stream."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def pinned(value: torch.Tensor) -> torch.Tensor:
    """A tensor of the host, where a GPU fetches it from at full speed."""
    # What is expanded has one value in many places, which no pinned copy can have.
    return value if value.is_pinned() else value.contiguous().pin_memory()


class Port:
    """Of a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def give(self, value: Any, to_other: bool) -> Any:
        """What others `begin` with, of a value that this device has just made; a device of another type may be among
        them.
        """
        if not to_other or torch.is_grad_enabled():
            return value
        if isinstance(value, (list, tuple)):
            return [self.give(part, to_other) for part in value]
        return pinned(value) if isinstance(value, torch.Tensor) else value

    def begin(self, given: Any) -> Any:
        """Have what another device gave, or what the caller has, brought here; `end` waits for it."""
        if isinstance(given, _Given):
            if given.host is None or torch.is_grad_enabled():
                given.made.synchronize()
                return given.value.to(self.device)
            given.arrived.synchronize()  # the host itself reads it, so the host waits
            return given.host
        if isinstance(given, torch.Tensor) and given.device != self.device:
            return given.to(self.device)
        return [self.begin(part) for part in given] if isinstance(given, list) else given

    def end(self, coming: Any) -> Any:
        """The value, for the work that follows."""
        return coming

    def mark(self) -> Any:
        """A mark behind the work so far."""

    def passed(self, mark: Any) -> None:
        """Wait until the work before a mark is done."""

    def finish(self) -> None:
        """Wait for all work of this device."""


@dataclass(frozen=True)
class _Given:
    """A tensor of a GPU, for others."""

    value: torch.Tensor
    made: torch.cuda.Event
    out: torch.cuda.Stream  # of the same GPU, for copies
    host: torch.Tensor | None  # a pinned copy on its way
    arrived: torch.cuda.Event


@dataclass(frozen=True)
class _Coming:
    """A tensor on its way to a GPU."""

    value: torch.Tensor
    arrived: torch.cuda.Event


class CudaPort(Port):
    """Of a GPU. Gradients need copies that autograd knows, so with them copies are plain ones."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._in, self._out = stream(device), stream(device)

    def give(self, value: Any, to_other: bool) -> Any:
        """With a copy on its way to the host, if a CPU reads it."""
        if isinstance(value, (list, tuple)):
            return [self.give(part, to_other) for part in value]
        if not isinstance(value, torch.Tensor) or value.device.type != "cuda":
            return value
        made, arrived, host = event(), event(), None
        made.record(torch.cuda.current_stream(self.device))
        if to_other and not torch.is_grad_enabled():
            host = torch.empty_like(value, device="cpu", pin_memory=True)
            with torch.cuda.stream(self._out):
                self._out.wait_event(made)
                host.copy_(value, non_blocking=True)
                arrived.record(self._out)
            value.record_stream(self._out)  # its memory is not used anew before the copy is through
        return _Given(value, made, self._out, host, arrived)

    def begin(self, given: Any) -> Any:
        """On the stream for what comes in."""
        if isinstance(given, list):
            return [self.begin(part) for part in given]
        made = given.made if isinstance(given, _Given) else None
        value = given.value if isinstance(given, _Given) else given
        if not isinstance(value, torch.Tensor) or value.device == self.device:
            return value
        if torch.is_grad_enabled():
            if made is not None:
                made.synchronize()
            return value.to(self.device)
        arrived = event()
        if isinstance(given, _Given):  # from another GPU: torch copies on the current stream of the source
            with torch.cuda.stream(self._in), torch.cuda.stream(given.out):
                given.out.wait_event(given.made)
                copy = value.to(self.device, non_blocking=True)
                value.record_stream(given.out)
            arrived.record(self._in)
        else:
            source = pinned(value) if value.device.type == "cpu" else value
            with torch.cuda.stream(self._in):
                copy = source.to(self.device, non_blocking=True)
                arrived.record(self._in)
        return _Coming(copy, arrived)

    def end(self, coming: Any) -> Any:
        """The stream that computes waits; the host does not."""
        if isinstance(coming, list):
            return [self.end(part) for part in coming]
        if not isinstance(coming, _Coming):
            return coming
        computes = torch.cuda.current_stream(self.device)
        computes.wait_event(coming.arrived)
        coming.value.record_stream(computes)  # it was made on the other stream
        return coming.value

    def mark(self) -> torch.cuda.Event:
        """In the stream that computes."""
        made = event()
        made.record(torch.cuda.current_stream(self.device))
        return made

    def passed(self, mark: torch.cuda.Event) -> None:
        """The host waits."""
        mark.synchronize()

    def finish(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.device)


def port(device: torch.device) -> Port:
    """The port of a device."""
    return CudaPort(device) if device.type == "cuda" else Port(device)
