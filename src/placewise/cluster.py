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
from itertools import chain, permutations
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from placewise.errors import InvalidInput, check_text, check_type, listed
from placewise.profiles import Profile
from placewise.quantities import LARGEST, parse_quantity

#: Links grow with the square of the devices; at this number, building or reading them takes seconds.
MAX_DEVICES: Final = 512


@dataclass(frozen=True)
class Device:
    """One place that runs one op at a time. Rates are what a well-fed kernel reaches.

    Quantities are in SI units, or texts with a unit such as "24GiB".
    """

    name: str
    kind: str = "gpu"
    memory: float = math.inf  # bytes
    flops: Mapping[str, float] = field(default_factory=dict)  # FLOP/s per dtype; "default" covers the others
    bandwidth: float = math.inf  # bytes/s of its own memory
    launch: float = 0.0  # seconds added to each op
    copies: bool = True  # whether copies cost the device's own time where compute and transfers do not overlap
    shards: int = 1  # how many devices it is made of, each of which has a part of every op (`sharding`)
    profile: Profile | None = field(default=None, compare=False)  # what was measured on it

    def __post_init__(self) -> None:
        check_text(self.name, "the name of a device")
        try:
            check_text(self.kind, "kind")
            if not isinstance(self.flops, Mapping):
                raise InvalidInput(f"flops: must give a rate by dtype, found {self.flops!r:.60}")
            for dtype in self.flops:
                check_text(dtype, "flops")
            if not isinstance(self.copies, bool):
                raise InvalidInput(f"copies: must be True or False, found {self.copies!r:.60}")
            if isinstance(self.shards, bool) or not isinstance(self.shards, int) or not 1 <= self.shards <= MAX_DEVICES:
                raise InvalidInput(f"shards: must be a whole number from 1 to {MAX_DEVICES}, found {self.shards!r:.60}")
            rates = {dtype: _rate(rate, "FLOP per second", f"flops.{dtype:.60}") for dtype, rate in self.flops.items()}
            object.__setattr__(self, "memory", _quantity(self.memory, "bytes", "memory"))
            object.__setattr__(self, "flops", rates)
            object.__setattr__(self, "bandwidth", _rate(self.bandwidth, "bytes per second", "bandwidth"))
            object.__setattr__(self, "launch", _seconds(self.launch, "launch"))
        except InvalidInput as error:
            raise InvalidInput(f"device {self.name!r:.60}: {error}") from None

    def peak(self, dtype: str) -> float:
        """FLOP/s for arithmetic in this dtype."""
        rate = self.flops.get(dtype, self.flops.get("default"))
        if rate is None:
            known = listed(list(self.flops)) or "none"
            raise InvalidInput(
                f"device {self.name!r:.60} gives no FLOP rate for {dtype!r:.60} (it has: {known}); "
                "add one to its flops, or a default"
            )
        return rate


@dataclass(frozen=True)
class Link:
    """A directed way from one device to another. Transfers queue on each channel in `via`."""

    source: str
    target: str
    bandwidth: float = math.inf  # bytes/s
    latency: float = 0.0  # seconds
    via: tuple[str, ...] = ()  # serial channels that it shares with other links; none = a channel of its own

    def __post_init__(self) -> None:
        try:
            if not isinstance(self.via, tuple):
                raise InvalidInput(f"via: must be a tuple of channel names, found {self.via!r:.60}")
            for name in (self.source, self.target, *self.via):
                check_text(name, "a name")
            if len(set(self.via)) < len(self.via):
                raise InvalidInput("via: names a channel twice")
            object.__setattr__(self, "bandwidth", _rate(self.bandwidth, "bytes per second", "bandwidth"))
            object.__setattr__(self, "latency", _seconds(self.latency, "latency"))
        except InvalidInput as error:
            raise InvalidInput(f"{self}: {error}") from None

    def __str__(self) -> str:
        return f"link {self.source!s:.60} -> {self.target!s:.60}"


@dataclass(frozen=True, eq=False)
class Cluster:
    """Devices and a link for every ordered pair of them."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    name: str = "cluster"

    def __post_init__(self) -> None:
        check_text(self.name, "the cluster's name")
        for what, kind in (("devices", Device), ("links", Link)):
            given = getattr(self, what)
            if not isinstance(given, Sequence) or not all(isinstance(one, kind) for one in given):
                raise InvalidInput(f"cluster {self.name!r:.60}: {what}: must be {kind.__name__} objects")
            object.__setattr__(self, what, tuple(given))
        if not self.devices:
            raise InvalidInput(f"cluster {self.name!r:.60} has no device")
        check_device_count(self.num_devices)
        seen: set[str] = set()
        for name in self.device_names:
            if not name.strip():
                raise InvalidInput(f"cluster {self.name!r:.60}: a device has no name")
            if name in seen:
                raise InvalidInput(f"cluster {self.name!r:.60}: two devices are named {name!r:.60}")
            seen.add(name)
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
        raise InvalidInput(f"cluster {self.name!r:.60} has no device {name!r:.60}; it has {listed(self.device_names)}")

    def link(self, source: int, target: int) -> Link:
        """The way from one device to another."""
        return self._link_of[source, target]

    @cached_property
    def _link_of(self) -> dict[tuple[int, int], Link]:
        position = {name: i for i, name in enumerate(self.device_names)}
        found: dict[tuple[int, int], Link] = {}
        for link in self.links:
            for end in (link.source, link.target):
                if end not in position:
                    raise InvalidInput(f"cluster {self.name!r:.60}: a link names the unknown device {end!r:.60}")
            pair = (position[link.source], position[link.target])
            if pair[0] == pair[1] or pair in found:
                what = "joins a device to itself" if pair[0] == pair[1] else "is given twice"
                raise InvalidInput(f"cluster {self.name!r:.60}: {link} {what}")
            found[pair] = link
        for a, b in permutations(range(self.num_devices), 2):
            if (a, b) not in found:
                source, target = self.device_names[a], self.device_names[b]
                raise InvalidInput(
                    f"cluster {self.name!r:.60} has no link from {source!r:.60} to {target!r:.60}; add one"
                )
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
        return _frozen(np.array([device.memory for device in self.devices], np.float64))

    @cached_property
    def channels(self) -> tuple[str, ...]:
        """Every serial channel: the named ones, then one per link that has its own."""
        named = [name for link in self.links for name in link.via]
        own = [f"{link.source}->{link.target}" for link in self.links if not link.via]
        if len(set(own)) < len(own):  # only if device names hold arrows themselves
            twice = next(name for i, name in enumerate(own) if name in own[:i])
            raise InvalidInput(f"cluster {self.name!r:.60}: two links are called {twice!r:.60}; rename a device")
        return tuple(dict.fromkeys([*named, *own]))

    @property
    def has_shared_channels(self) -> bool:
        """Whether some link names channels; if none does, each has one of its own."""
        return any(link.via for link in self.links)

    @cached_property
    def channels_of(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The channels that a transfer between two devices occupies, as indices into `channels`."""
        index = {name: i for i, name in enumerate(self.channels)}
        return {
            pair: tuple(index[name] for name in (link.via or (f"{link.source}->{link.target}",)))
            for pair, link in self._link_of.items()
        }

    @cached_property
    def link_channels(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """`channels_of` as (start [D * D + 1], channels): from a to b they begin at start[a * D + b]."""
        every = [self.channels_of.get((a, b), ()) for a in range(self.num_devices) for b in range(self.num_devices)]
        start = np.cumsum([0, *map(len, every)]).astype(np.int32)
        return _frozen(start), _frozen(np.array(list(chain.from_iterable(every)), np.int32))

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the content."""
        devices = [
            (d.name, d.kind, d.memory, sorted(d.flops.items()), d.bandwidth, d.launch, d.copies)
            + ((d.shards,) if d.shards > 1 else ())
            for d in self.devices
        ]
        links = sorted((link.source, link.target, link.bandwidth, link.latency, link.via) for link in self.links)
        return hashlib.sha256(json.dumps([self.name, devices, links]).encode()).hexdigest()

    def with_memory(self, limits: Mapping[str, float]) -> Cluster:
        """The same cluster with some devices' memory set (`--max-memory`)."""
        check_type(limits, Mapping, "max_memory")
        by_index = {self.device_index(name): limit for name, limit in limits.items()}
        if len(by_index) < len(limits):
            raise InvalidInput(f"max_memory: names a device twice, by name and by number: {listed(list(limits))}")
        return replace(
            self,
            devices=tuple(replace(d, memory=by_index.get(i, d.memory)) for i, d in enumerate(self.devices)),
        )

    def _matrix(self, entries: Mapping[tuple[int, int], float]) -> NDArray[np.float64]:
        matrix = np.zeros((self.num_devices, self.num_devices))
        for pair, value in entries.items():
            matrix[pair] = value
        return _frozen(matrix)


def full_mesh(
    devices: Sequence[Device], bandwidth: float = math.inf, latency: float = 0.0, name: str = "cluster"
) -> Cluster:
    """A cluster where every ordered pair of devices has a dedicated link of the same kind."""
    check_type(devices, Sequence, "devices")
    for device in devices:
        check_type(device, Device, "devices")
    check_device_count(len(devices))
    links = tuple(Link(a.name, b.name, bandwidth, latency) for a, b in permutations(devices, 2))
    return Cluster(tuple(devices), links, name)


def check_device_count(count: int) -> None:
    """To be asked before links are made for so many devices."""
    if count > MAX_DEVICES:
        raise InvalidInput(f"devices: must be at most {MAX_DEVICES}, found {count}")


def _quantity(value: float, dimension: str, where: str) -> float:
    if type(value) is float and 0.0 <= value <= LARGEST:  # the usual case, and there can be a million links
        return value
    try:
        return parse_quantity(value, dimension)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None


def _rate(value: float, dimension: str, where: str) -> float:
    rate = _quantity(value, dimension, where)
    if rate < 1.0 / LARGEST:
        raise InvalidInput(f"{where}: must be at least {1.0 / LARGEST:g} and not zero, found {rate:g}")
    return rate


def _seconds(value: float, where: str) -> float:
    seconds = _quantity(value, "seconds", where)
    if math.isinf(seconds):
        raise InvalidInput(f"{where}: must be finite, found inf")
    return seconds


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array
