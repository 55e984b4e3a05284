"""Where work can run: devices, their memory and rates, and the links between them.

A `Cluster` is written by people, in YAML (see `files.load_cluster`); it knows nothing of models.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from placewise.errors import InvalidInput


@dataclass(frozen=True)
class Device:
    """One place that runs one op at a time. Rates are what a well-fed kernel reaches, in SI units."""

    name: str
    kind: str = "gpu"
    memory: float = math.inf  # bytes
    flops: Mapping[str, float] = field(default_factory=dict)  # FLOP/s per dtype; "default" covers the others
    bandwidth: float = math.inf  # bytes/s of its own memory
    launch: float = 0.0  # seconds added to each op
    copies: bool = True  # whether copies cost the device's own time where compute and transfers do not overlap

    def peak(self, dtype: str) -> float:
        """FLOP/s for arithmetic in this dtype."""
        rate = self.flops.get(dtype, self.flops.get("default", math.nan))
        if math.isnan(rate):
            known = ", ".join(self.flops) or "none"
            raise InvalidInput(f"device {self.name!r} gives no FLOP rate for {dtype!r} (it has: {known})")
        return rate


@dataclass(frozen=True)
class Link:
    """A directed way from one device to another. Transfers queue on each channel in `via`."""

    source: str
    target: str
    bandwidth: float = math.inf  # bytes/s
    latency: float = 0.0  # seconds
    via: tuple[str, ...] = ()  # serial channels that it shares with other links; none = a channel of its own


@dataclass(frozen=True, eq=False)
class Cluster:
    """Devices and a link for every ordered pair of them."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    name: str = "cluster"

    def __post_init__(self) -> None:
        names = [device.name for device in self.devices]
        if not names:
            raise InvalidInput(f"cluster {self.name!r} has no device")
        for name in names:
            if names.count(name) > 1:
                raise InvalidInput(f"cluster {self.name!r}: two devices are named {name!r}")
        for device in self.devices:
            for what, value in (("memory", device.memory), ("bandwidth", device.bandwidth), ("launch", device.launch)):
                if not value >= 0:
                    raise InvalidInput(f"device {device.name!r}: {what} = {value}: it must be zero or more")
            if math.isinf(device.launch):
                raise InvalidInput(f"device {device.name!r}: launch = {device.launch}: it must be finite")
            if not device.bandwidth > 0 or any(not rate > 0 for rate in device.flops.values()):
                raise InvalidInput(f"device {device.name!r}: bandwidth and FLOP rates must be above zero")
        self._link_of, self.channels  # noqa: B018 - raise on an unknown device, a missing link, an unclear name

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a YAML file (or the name of a bundled box)."""
        from placewise.files import load_cluster

        return load_cluster(path)

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self.devices)

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """In the order in which a placement numbers them."""
        return tuple(device.name for device in self.devices)

    def device_index(self, name: str) -> int:
        """By name, or by number where no device has that name."""
        if name in self.device_names:
            return self.device_names.index(name)
        numbers = [str(i) for i in range(self.num_devices)]
        if name in numbers:
            return numbers.index(name)
        raise InvalidInput(f"cluster {self.name!r} has no device {name!r}; it has {', '.join(self.device_names)}")

    @cached_property
    def _link_of(self) -> dict[tuple[int, int], Link]:
        position = {name: i for i, name in enumerate(self.device_names)}
        found: dict[tuple[int, int], Link] = {}
        for link in self.links:
            for end in (link.source, link.target):
                if end not in position:
                    raise InvalidInput(f"cluster {self.name!r}: a link names the unknown device {end!r}")
            pair = (position[link.source], position[link.target])
            where = f"cluster {self.name!r}: link {link.source} -> {link.target}"
            if pair[0] == pair[1]:
                raise InvalidInput(f"{where} joins a device to itself")
            if pair in found:
                raise InvalidInput(f"{where} is given twice")
            if not link.bandwidth > 0 or not 0 <= link.latency < math.inf:
                raise InvalidInput(f"{where}: bandwidth must be above zero and latency zero or more")
            if len(set(link.via)) < len(link.via):
                raise InvalidInput(f"{where}: via names a channel twice")
            found[pair] = link
        for a, source in enumerate(self.device_names):
            for b, target in enumerate(self.device_names):
                if a != b and (a, b) not in found:
                    raise InvalidInput(f"cluster {self.name!r} has no link from {source!r} to {target!r}; add one")
        return found

    # ---- arrays for the simulator ----------------------------------------------------------------------------------

    @cached_property
    def latency(self) -> NDArray[np.float64]:
        """[D, D] seconds; zero from a device to itself."""
        return self._matrix({pair: link.latency for pair, link in self._link_of.items()})

    @cached_property
    def seconds_per_byte(self) -> NDArray[np.float64]:
        """[D, D] the inverse of bandwidth; zero from a device to itself."""
        return self._matrix({pair: 1.0 / link.bandwidth for pair, link in self._link_of.items()})

    @cached_property
    def memory(self) -> NDArray[np.float64]:
        """[D] bytes."""
        return np.array([device.memory for device in self.devices], np.float64)

    @cached_property
    def channels(self) -> tuple[str, ...]:
        """Every serial channel: the named ones, then one per link that has its own."""
        named = [name for link in self.links for name in link.via]
        own = [f"{link.source}->{link.target}" for link in self.links if not link.via]
        if len(set(own)) < len(own):  # only if device names hold arrows themselves
            twice = next(name for i, name in enumerate(own) if name in own[:i])
            raise InvalidInput(f"cluster {self.name!r}: two links are called {twice!r}; rename a device")
        return tuple(dict.fromkeys([*named, *own]))

    @cached_property
    def channels_of(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The channels that a transfer between two devices occupies, as indices into `channels`."""
        index = {name: i for i, name in enumerate(self.channels)}
        return {
            pair: tuple(index[name] for name in (link.via or (f"{link.source}->{link.target}",)))
            for pair, link in self._link_of.items()
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the content."""
        devices = [
            (d.name, d.kind, float(d.memory), sorted((dtype, float(rate)) for dtype, rate in d.flops.items()),
             float(d.bandwidth), float(d.launch), bool(d.copies))
            for d in self.devices
        ]  # fmt: skip
        links = sorted(
            (link.source, link.target, float(link.bandwidth), float(link.latency), link.via) for link in self.links
        )
        return hashlib.sha256(json.dumps([self.name, devices, links]).encode()).hexdigest()

    def with_memory(self, limits: Mapping[str, float]) -> Cluster:
        """The same cluster with some devices' memory set (`--max-memory`)."""
        by_index = {self.device_index(name): limit for name, limit in limits.items()}
        return replace(
            self,
            devices=tuple(replace(d, memory=by_index.get(i, d.memory)) for i, d in enumerate(self.devices)),
        )

    def _matrix(self, entries: Mapping[tuple[int, int], float]) -> NDArray[np.float64]:
        matrix = np.zeros((self.num_devices, self.num_devices))
        for pair, value in entries.items():
            matrix[pair] = value
        matrix.flags.writeable = False
        return matrix


def full_mesh(
    devices: Sequence[Device], bandwidth: float = math.inf, latency: float = 0.0, name: str = "cluster"
) -> Cluster:
    """A cluster where every ordered pair of devices has a dedicated link of the same kind."""
    names = [device.name for device in devices]
    links = tuple(Link(a, b, bandwidth, latency) for a in names for b in names if a != b)
    return Cluster(tuple(devices), links, name)
