"""What was measured on a device: the time of each op by its signature, and of whole models beside the sum of their ops.

A profile also predicts ops that were not measured, by rates fitted to those that were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placewise.kinds import family

Floats = NDArray[np.float64]
#: Fewer measurements than this say too little about four rates.
_ENOUGH: Final = 8
#: Bytes of an op beyond which caches no longer help, and memory comes from the system anew for each tensor.
_FAR: Final = 32e6


class OpTime(NamedTuple):
    """One op, alone and warmed up."""

    kind: str
    dtype: str
    flops: float
    bytes_accessed: float
    seconds: float  # the median
    spread: float  # between the quartiles, as a share of the median
    scratch: float  # bytes held beyond inputs and outputs, at most


class ModelTime(NamedTuple):
    """A whole model, run as its framework runs it."""

    seconds: float  # the median
    spread: float
    sum_of_ops: float  # seconds


class Rates(NamedTuple):
    """Seconds of an op: so many in any case, per FLOP, per byte, and again per byte beyond `_FAR`."""

    launch: float
    per_flop: float
    per_byte: float
    per_far_byte: float


@dataclass(frozen=True, eq=False)
class Profile:
    """Times on one device, in one library. Times of different libraries are different profiles."""

    name: str
    device: str  # as the library calls it: "cpu", "cuda:0", "openvino:CPU"
    hardware: str
    library: str  # with its version
    date: str
    ops: Mapping[str, OpTime] = field(default_factory=dict)  # by signature
    models: Mapping[str, ModelTime] = field(default_factory=dict)  # by name
    file: Path | None = None  # that it was read from

    def __repr__(self) -> str:
        return f"<Profile {self.name!r}: {len(self.ops)} ops, {len(self.models)} models>"

    def overhead(self, model: str) -> float:
        """A whole model's time over the sum of its ops'; of a model that was not measured, the median."""
        known = {name: time.seconds / time.sum_of_ops for name, time in self.models.items() if time.sum_of_ops > 0}
        return known[model] if model in known else float(np.median(list(known.values()))) if known else 1.0

    def without(self, signatures: Iterable[str], models: Iterable[str] = ()) -> Profile:
        """The profile as if these had not been measured: for judging predictions."""
        ops, wholes = set(signatures), set(models)
        return Profile(
            self.name, self.device, self.hardware, self.library, self.date,
            {signature: time for signature, time in self.ops.items() if signature not in ops},
            {name: time for name, time in self.models.items() if name not in wholes},
        )  # fmt: skip

    def predict(
        self, kinds: Sequence[str], dtypes: Sequence[str], flops: ArrayLike, bytes_accessed: ArrayLike
    ) -> Floats:
        """Seconds of ops by the fitted rates; none is faster than the fastest that was measured."""
        rates = [self._rates_for(kind, dtype) for kind, dtype in zip(kinds, dtypes, strict=True)]
        work = _work(flops, bytes_accessed)
        seconds = (np.array(rates).reshape(work.shape) * work).sum(axis=1)
        least = np.array([self._fastest.get(dtype, 0.0) for dtype in dtypes]) * work[:, 1]
        floor = np.maximum(least, self._fastest[""] * work[:, 2])
        slower: Floats = np.maximum(seconds, floor)
        return slower

    def _rates_for(self, kind: str, dtype: str) -> Rates:
        """By family and dtype, or family alone, or all ops, whichever is the narrowest with enough measurements."""
        for key in ((family(kind), dtype), (family(kind), ""), ("", dtype)):
            if key in self.rates:
                return self.rates[key]
        return self.rates["", ""]

    @cached_property
    def _fastest(self) -> Mapping[str, float]:
        """The least seconds per FLOP, by dtype, and as "" per byte among ops that are large."""
        per_flop: dict[str, list[float]] = {}
        for time in self._timed:
            if time.flops > 0:
                per_flop.setdefault(time.dtype, []).append(time.seconds / time.flops)
        per_byte = [time.seconds / time.bytes_accessed for time in self._timed if time.bytes_accessed > _FAR]
        least = {dtype: min(rates) for dtype, rates in per_flop.items() if len(rates) >= _ENOUGH}
        return least | {"": min(per_byte, default=0.0)}

    @cached_property
    def _timed(self) -> list[OpTime]:
        return [time for time in self.ops.values() if time.seconds > 0]

    @cached_property
    def rates(self) -> Mapping[tuple[str, str], Rates]:
        """Fitted rates by (family, dtype); "" stands for all."""
        groups: dict[tuple[str, str], list[OpTime]] = {("", ""): []}
        for time in self._timed:
            of_kind = family(time.kind)
            for key in ((of_kind, time.dtype), (of_kind, ""), ("", time.dtype), ("", "")):
                groups.setdefault(key, []).append(time)
        return {key: fit(times) for key, times in groups.items() if len(times) >= _ENOUGH or key == ("", "")}


def fit(times: Sequence[OpTime]) -> Rates:
    """Rates, none negative, with small relative errors in the median sense: outliers do not pull."""
    from scipy.optimize import nnls

    if not times:
        return Rates(0.0, 0.0, 0.0, 0.0)
    work = _work([time.flops for time in times], [time.bytes_accessed for time in times])
    seconds = np.array([time.seconds for time in times])
    relative = work / seconds[:, None]
    scale = relative.max(axis=0)
    scale[scale == 0] = 1.0  # none of these ops computes, say
    relative /= scale
    weight, rates = np.ones(len(seconds)), np.zeros(4)
    for _ in range(20):  # least squares with weights that turn them into least absolute errors
        rates = nnls(relative * weight[:, None], weight)[0]
        weight = 1 / np.sqrt(np.maximum(np.abs(relative @ rates - 1), 0.02))
    return Rates(*(rates / scale).tolist())


def _work(flops: ArrayLike, bytes_accessed: ArrayLike) -> Floats:
    """[N, 4] what the rates are multiplied by."""
    size = np.asarray(bytes_accessed, np.float64)
    return np.stack([np.ones(len(size)), np.asarray(flops, np.float64), size, np.maximum(size - _FAR, 0.0)], axis=1)
