"""Small changes to a placement, scored without simulating everything again.

The current placement is simulated in full, with checkpoints. A changed one starts at the last checkpoint before
anything that the change touches, and is dropped as soon as it cannot beat the incumbent: when the time at which an op
is ready plus the longest path from it to the end, or a device's clock plus the work that it has left, reaches the
incumbent's value. Values are exact, equal to those of `evaluate` bit for bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placewise.graph import Ints
from placewise.problem import Problem
from placewise.simulator.arrays import arrays_for
from placewise.simulator.engine import Engine, Part, num_models

_CHECKPOINTS = 64


class Incremental:
    """A placement that changes step by step, for the objectives `latency` and `completion` of a parallel engine."""

    def __init__(self, problem: Problem, placement: Ints) -> None:
        self.problem = problem
        self._arrays = arrays = arrays_for(problem)
        self._recorder, self._prober = (Engine(problem, arrays, record=record) for record in (True, False))
        n, d, channels, models = problem.num_ops, problem.num_devices, arrays.num_channels, num_models(problem)
        self._number = np.empty(n, np.int64)
        self._number[arrays.op] = np.arange(n)
        # Streamed parameters make the past depend on the future: fetches are windows over what is to come.
        self._resumes = not len(arrays.stored)
        self._spacing = max(1, -(-n // _CHECKPOINTS))
        words = (n + 63) // 64
        saved = -(-n // self._spacing) + 1
        self._part = Part(
            save_float=np.zeros((saved, 2 * n + d + channels + models)),
            save_int=np.zeros((saved, 2 * n + 2 * d + 1), np.int32),
            save_word=np.zeros((saved, d * words + d * ((words + 63) // 64 + 1)), np.uint64),
            sequence=np.zeros(n, np.uint32),  # completions before each op's, by the kernel's numbers
        )
        self.accept(placement)

    def accept(self, placement: Ints) -> float:
        """Make a placement the current one; returns its value. `peak` then holds its memory [D]."""
        from placewise.simulator import kernel

        self.placement = np.array(placement, np.int32)
        value, peak = np.empty(1), np.zeros((1, self.problem.num_devices))
        self._recorder.run(self.placement[None], value, peak, self._part._replace(save_every=self._spacing))
        self.value, self.peak = float(value[0]), peak[0]
        a = self._arrays
        self._tail = kernel.tails(
            a.op, a.seconds, a.tensor_ptr, a.bytes, a.consumer_ptr, a.consumer, a.latency, a.per_byte,
            np.uint64(self.problem.num_devices), self.placement,
        )  # fmt: skip
        return self.value

    def probe(self, placements: NDArray[np.int32], cutoff: float) -> NDArray[np.float64]:
        """[B] values of placements, best of those that differ little from the current one; infinite if not below the
        cutoff by more than rounding.
        """
        from placewise.simulator import kernel

        resume, first = np.full(len(placements), -1), np.zeros(len(placements), np.uint64)
        a = self._arrays
        kernel.where_to_resume(
            placements, self.placement, self._number, a.input_ptr, a.input, a.producer, self._part.sequence,
            self._spacing if self._resumes else 0, resume, first,
        )  # fmt: skip
        values = np.empty(len(placements))
        limit = cutoff * (1 - 1e-12)  # a device that is never idle meets the cutoff only up to rounding
        part = self._part._replace(cutoff=limit, tail=self._tail, tail_from=first, resume=resume)
        self._prober.run(placements, values, part=part)
        values[values >= limit] = np.inf
        return values
