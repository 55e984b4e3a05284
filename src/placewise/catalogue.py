"""Known devices and links, by name: what `like: rtx-3090` stands for in a cluster file.

`catalogue.yaml` holds peaks, as datasheets have them, with their source. Large kernels and copies reach a share of a
peak; the shares are in that file too, and are applied here and nowhere else.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from placewise.errors import InvalidInput
from placewise.quantities import parse_quantity


@dataclass(frozen=True)
class Shares:
    """What is reached, as a share of the peak."""

    flops: float
    bandwidth: float
    memory: float
    link: float


@dataclass(frozen=True)
class KnownDevice:
    """Peaks, in SI units; memory is None where the device has none of its own."""

    title: str
    driver: str | None  # what nvidia-smi calls it
    kind: str
    memory: float | None
    flops: Mapping[str, float]
    bandwidth: float
    launch: float
    source: str


@dataclass(frozen=True)
class KnownLink:
    """The peak of one direction, in SI units."""

    bandwidth: float
    latency: float
    source: str


def devices() -> Mapping[str, KnownDevice]:
    """Every known device, by name."""
    return _catalogue()[1]


def links() -> Mapping[str, KnownLink]:
    """Every known link, by name."""
    return _catalogue()[2]


def shares() -> Shares:
    """What large kernels and copies reach of the peaks."""
    return _catalogue()[0]


def device_like(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Device` like the known one; what is given replaces them, FLOP rates by dtype."""
    known, reached = _known(name, devices(), "device"), shares()
    if known.memory is None and "memory" not in given:
        raise InvalidInput(f"give its memory: {name!r} has none of its own")
    own = {"kind": known.kind, "bandwidth": known.bandwidth * reached.bandwidth, "launch": known.launch}
    if known.memory is not None:
        own["memory"] = known.memory * reached.memory
    flops = {dtype: rate * reached.flops for dtype, rate in known.flops.items()}
    return own | dict(given) | {"flops": flops | dict(given.get("flops", {}))}


def link_like(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Bandwidth and latency of a `Link` like the known one; what is given replaces them."""
    known = _known(name, links(), "link")
    return {"bandwidth": known.bandwidth * shares().link, "latency": known.latency} | dict(given)


def _known(name: str, entries: Mapping[str, Any], what: str) -> Any:
    if name in entries:
        return entries[name]
    near = difflib.get_close_matches(name.lower().replace(" ", "-"), entries, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"known are {', '.join(entries)}"
    raise InvalidInput(f"like: there is no known {what} {name!r:.60}; {hint}")


@cache
def _catalogue() -> tuple[Shares, Mapping[str, KnownDevice], Mapping[str, KnownLink]]:
    import yaml

    text = (resources.files("placewise") / "catalogue.yaml").read_text(encoding="utf-8")
    data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    found = {
        name: KnownDevice(
            title=entry["title"],
            driver=entry.get("driver"),
            kind=entry["kind"],
            memory=parse_quantity(entry["memory"], "bytes") if "memory" in entry else None,
            flops={dtype: parse_quantity(rate, "FLOP per second") for dtype, rate in entry["flops"].items()},
            bandwidth=parse_quantity(entry["bandwidth"], "bytes per second"),
            launch=parse_quantity(entry["launch"], "seconds"),
            source=entry["source"],
        )
        for name, entry in data["devices"].items()
    }
    ways = {
        name: KnownLink(
            bandwidth=parse_quantity(entry["bandwidth"], "bytes per second"),
            latency=parse_quantity(entry["latency"], "seconds"),
            source=entry["source"],
        )
        for name, entry in data["links"].items()
    }
    return Shares(**data["reached"]), MappingProxyType(found), MappingProxyType(ways)
