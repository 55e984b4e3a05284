"""Quantities for people: "24GiB", "16 GB/s", "5us" in; "22.4 GiB", "3.18 ms", "+28.9%" out. Inside, all is SI."""

from __future__ import annotations

import math
import re
from decimal import ROUND_HALF_UP, Context
from numbers import Real
from typing import Any, Final

from placewise.errors import InvalidInput

#: No time, size, amount of work or rate may be larger (infinite memory and rates are), and no rate may be below
#: 1 / LARGEST, so that no sum or quotient ever overflows.
LARGEST: Final = 1e24

_BYTES = {"": 1.0, "B": 1.0}
_BYTES |= {f"{p}B": 1000.0 ** (i + 1) for i, p in enumerate("KMGTP")}
_BYTES |= {f"{p}iB": 1024.0 ** (i + 1) for i, p in enumerate("KMGTP")}
_FLOPS = {"": 1.0} | {f"{p}FLOPS": 1000.0**i for i, p in enumerate(["", "K", "M", "G", "T", "P"])}
_SECONDS = {
    "": 1.0, "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0,
}  # fmt: skip
_UNITS = {
    "bytes": _BYTES,
    "bytes per second": _BYTES | {f"{unit or 'B'}/s": factor for unit, factor in _BYTES.items()},
    "FLOP per second": _FLOPS | {unit.replace("FLOPS", "FLOP/s"): factor for unit, factor in _FLOPS.items()},
    "seconds": _SECONDS,
}
_SAME: Final = 1e-9  # relative; what rounding may amount to
_THREE = Context(prec=3, rounding=ROUND_HALF_UP)  # as a browser rounds, which shows the same numbers
_NUMBER = re.compile(r"^\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|inf)\s*([^\d\s]*)\s*$")


def parse_quantity(text: Any, dimension: str) -> float:
    """Read a number with an optional unit, from 0 to `LARGEST` or infinite; a bare number is in SI units."""
    units = _UNITS[dimension]
    if isinstance(text, bool) or not isinstance(text, (str, Real)):
        raise InvalidInput(f"{text!r:.60} is not a number of {dimension}")
    if isinstance(text, str):
        by_case = {unit.lower(): factor for unit, factor in units.items()}
        match = _NUMBER.match(text)
        factor = by_case.get(match[2].lower()) if match else None
        if match is None or factor is None:
            example = {"bytes": "24GiB", "bytes per second": "16GB/s", "seconds": "30s"}.get(dimension, "10TFLOPS")
            raise InvalidInput(f"{text!r:.60} is not a number of {dimension}; write it like {example!r}")
        value = float(match[1]) * factor
        unlimited = match[1] == "inf"
    else:
        try:
            value = float(text)
        except OverflowError:  # and so large that not even the message can hold it
            raise InvalidInput(f"a number of {dimension} is too large: it must be at most {LARGEST:g}") from None
        unlimited = math.isinf(value)
    if math.isnan(value) or value < 0:
        raise InvalidInput(f"{text!r:.60} is not a number of {dimension}: it must be zero or more")
    if value > LARGEST and not unlimited:
        raise InvalidInput(f"{text!r:.60} is too large for a number of {dimension}: it must be at most {LARGEST:g}")
    return value


def format_bytes(count: float) -> str:
    """Three significant digits in binary units."""
    if math.isinf(count):
        return "unlimited"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1000 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{_three_digits(count)} {unit}"


def format_seconds(seconds: float) -> str:
    """Three significant digits in the unit that suits."""
    if math.isinf(seconds) or math.isnan(seconds):
        return "-"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns")):
        if abs(seconds) * factor >= 0.9995 or unit == "ns":
            break
    return "0 s" if seconds == 0 else f"{_three_digits(seconds * factor)} {unit}"


def format_share(share: float) -> str:
    """Percent with one decimal; only nothing is "0%", and "<0.1%" is nearly so."""
    if not math.isfinite(share):
        return "-"
    if 0 < abs(share) < 5e-4:
        return "<0.1%"
    tenths = math.floor(1000 * share + 0.5)  # as a browser rounds
    return f"{tenths / 1000:.0%}" if tenths in (0, 1000) else f"{tenths / 10:.1f}%"


def format_change(value: float, before: float) -> str:
    """How much more or less it is than before, as a share of that; many times as much as a factor."""
    change = value / before - 1 if before else 0.0
    if change >= 100:
        return f"x {change + 1:.3g}"
    share = format_share(abs(change) if abs(change) > _SAME else 0.0)
    return share if share in ("0%", "<0.1%", "-") else f"{'-' if change < 0 else '+'}{share}"


def _three_digits(value: float) -> str:
    rounded = float(_THREE.create_decimal(float(value)))  # first, so that 9.999 is 10.0 and not 10.00
    if not 1e-3 <= abs(rounded) < 1e7:  # zero, or beyond the units
        return f"{rounded:.3g}"
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"
