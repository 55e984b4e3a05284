"""Seconds per (op, device), each number labelled with where it came from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placewise.errors import InvalidInput

LABELS: Final = ("given", "modelled", "measured")


@dataclass(frozen=True, eq=False)
class Costs:
    """`seconds[op, device]`; infinity where the device cannot run the op. `label[op, device]` indexes LABELS."""

    seconds: NDArray[np.float64]
    label: NDArray[np.int8]

    @classmethod
    def create(cls, seconds: ArrayLike, label: str | ArrayLike = "given") -> Costs:
        """Validate and freeze."""
        table = np.array(seconds, np.float64, order="C")
        if table.ndim != 2:
            raise InvalidInput(f"costs must be a table of ops by devices, not of shape {table.shape}")
        bad = np.argwhere(np.isnan(table) | (table < 0))
        if len(bad):
            op, device = bad[0]
            raise InvalidInput(f"costs.seconds[{op}][{device}] = {table[op, device]}: a time must be zero or more")
        if isinstance(label, str):
            if label not in LABELS:
                raise InvalidInput(f"costs.label = {label!r}: it must be one of {', '.join(LABELS)}")
            label = np.full(table.shape, LABELS.index(label))
        known = np.array(label)
        if known.shape != table.shape or not np.isin(known, range(len(LABELS))).all():
            raise InvalidInput("costs.label must have the shape of costs.seconds and hold known labels")
        labels = known.astype(np.int8)
        table.flags.writeable = labels.flags.writeable = False
        return cls(table, labels)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the content."""
        shape = f"{self.seconds.shape}".encode()
        return hashlib.sha256(shape + self.seconds.tobytes() + self.label.tobytes()).hexdigest()

    def shares(self) -> dict[str, float]:
        """What share of the table's entries carries each label."""
        counts = np.bincount(self.label.ravel(), minlength=len(LABELS))
        return {name: float(count) / self.label.size for name, count in zip(LABELS, counts, strict=True) if count}
