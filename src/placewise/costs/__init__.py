"""Seconds per (op, device), each number labelled with where it came from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placewise.errors import InvalidInput
from placewise.quantities import LARGEST

LABELS: Final = ("given", "modelled", "measured")
#: Ops times devices. A small file can name many of both; this many times fit into memory and into a file.
MAX_PAIRS: Final = 16_000_000


@dataclass(frozen=True, eq=False)
class Costs:
    """`seconds[op, device]`, up to `quantities.LARGEST`; infinity where the device cannot run the op.

    `label[op, device]` indexes LABELS.
    """

    seconds: NDArray[np.float64]
    label: NDArray[np.int8]

    @classmethod
    def create(cls, seconds: ArrayLike, label: str | ArrayLike = "given") -> Costs:
        """Validate and freeze."""
        try:
            given = np.asarray(seconds)
            if given.ndim != 2 or given.dtype.kind not in "iufO":  # a text is no time, though NumPy would read it
                raise ValueError
            table = np.array(given, np.float64, order="C")
        except (OverflowError, TypeError, ValueError):
            raise InvalidInput("costs.seconds: must be a table of numbers, ops by devices") from None
        bad = np.argwhere(~((table >= 0) & ((table <= LARGEST) | np.isinf(table))))
        if len(bad):
            op, device = bad[0]
            found = table[op, device]
            raise InvalidInput(f"costs.seconds[{op}][{device}]: must be from 0 to {LARGEST:g} or inf, found {found}")
        if isinstance(label, str):
            if label not in LABELS:
                raise InvalidInput(f"costs.label: must be one of {', '.join(LABELS)}, found {label!r:.60}")
            label = np.full(table.shape, LABELS.index(label))
        try:
            known = np.asarray(label)
        except ValueError:
            known = np.empty(0)
        if known.shape != table.shape or not np.isin(known, range(len(LABELS))).all():
            raise InvalidInput("costs.label: must have the shape of costs.seconds and hold known labels")
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


def check_table_size(ops: int, devices: int) -> None:
    """To be asked before a table is made for so many."""
    if ops * devices > MAX_PAIRS:
        raise InvalidInput(f"{ops} ops on {devices} devices: must be at most {MAX_PAIRS:,} pairs")
