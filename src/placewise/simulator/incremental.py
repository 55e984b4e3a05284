"""Small changes to a placement, scored without simulating everything again.

The current placement is simulated in full, with checkpoints. A changed one starts at the last checkpoint before
anything that the change touches, and is dropped as soon as it cannot beat the incumbent: when the time at which an op
is ready plus the longest path from it to the end, or a device's clock plus the work that it has left, reaches the
incumbent's value. Values are exact, equal to those of `evaluate` bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from placewise.graph import Ints
from placewise.problem import Problem
from placewise.simulator.arrays import arrays_for
from placewise.simulator.evaluation import NO_LOG, Log, num_models

_U = np.uint64
_CHECKPOINTS = 64


class Incremental:
    """A placement that changes step by step, for the objectives `latency` and `completion` of a parallel engine."""

    def __init__(self, problem: Problem, placement: Ints) -> None:
        from placewise.simulator import kernel

        self.problem = problem
        self._kernel = kernel
        self._arrays = arrays = arrays_for(problem)
        given = arrays._asdict()
        del given["tensor"]
        n, d, channels = problem.num_ops, problem.num_devices, arrays.num_channels
        models = num_models(problem)
        self._problem_arguments = (*given.values(), _U(d), _U(channels), _U(models))
        self._room = {track: kernel.workspace(arrays, d, models, track) for track in (False, True)}
        self._number = np.empty(n, np.int64)
        self._number[arrays.op] = np.arange(n)
        # Streamed parameters make the past depend on the future: fetches are windows over what is to come.
        self._resumes = not len(arrays.stored)
        self._spacing = max(1, -(-n // _CHECKPOINTS))
        words = (n + 63) // 64
        saved = -(-n // self._spacing) + 1
        self._checkpoints = (
            np.zeros((saved, 2 * n + d + channels + models)),
            np.zeros((saved, 2 * n + 2 * d + 1), np.int32),
            np.zeros((saved, d * words + d * ((words + 63) // 64 + 1)), np.uint64),
        )
        self._sequence = np.zeros(n, np.uint32)  # completions before each op's, by the kernel's numbers
        self._log = Log.create(problem)
        self._tail = np.zeros(n)
        self.accept(placement)

    def accept(self, placement: Ints) -> float:
        """Make a placement the current one; returns its value. `peak` then holds its memory [D]."""
        self.placement = np.array(placement, np.int32)
        value, peak = np.empty(1), np.zeros((1, self.problem.num_devices))
        record = (peak, *self._log)
        self._run(self.placement[None], value, record, np.inf, np.zeros(1, np.uint64), np.full(1, -1), self._spacing)
        self.value, self.peak = float(value[0]), peak[0]
        a = self._arrays
        self._tail = self._kernel.tails(
            a.op, a.seconds, a.tensor_ptr, a.bytes, a.consumer_ptr, a.consumer, a.latency, a.per_byte,
            _U(self.problem.num_devices), self.placement,
        )  # fmt: skip
        return self.value

    def probe(
        self, placements: NDArray[np.int32], changed: Sequence[Sequence[int]], cutoff: float
    ) -> NDArray[np.float64]:
        """[B] values of placements that differ from the current one in the given ops; infinite if not below the cutoff
        by more than rounding.
        """
        resume, first = np.empty(len(changed), np.int64), np.empty(len(changed), np.uint64)
        for b, ops in enumerate(changed):
            numbers = self._number[np.asarray(ops, np.int64)]
            resume[b] = self._last_checkpoint_before(numbers)
            first[b] = numbers.max(initial=-1) + 1
        values = np.empty(len(placements))
        limit = cutoff * (1 - 1e-12)  # a device that is never idle meets the cutoff only up to rounding
        self._run(placements, values, (None, *NO_LOG), limit, first, resume, 0)
        values[values >= limit] = np.inf
        return values

    def _run(
        self,
        rows: NDArray[np.int32],
        values: NDArray[np.float64],
        record: tuple[object, ...],
        cutoff: float,
        first: NDArray[np.uint64],
        resume: NDArray[np.int64],
        spacing: int,
    ) -> None:
        execution = self.problem.execution
        how = (False, execution.sends == "edge", _U(execution.prefetch))
        self._kernel.run(
            *self._problem_arguments, *self._room[record[0] is not None], rows, *how, values, *record,
            cutoff, self._tail, first, resume, _U(spacing), *self._checkpoints, self._sequence,
        )  # fmt: skip

    def _last_checkpoint_before(self, numbers: NDArray[np.int64]) -> int:
        """The last checkpoint at which none of the ops had an input booked; -1 = none."""
        if not self._resumes or not len(numbers):
            return -1
        a, first = self._arrays, self.problem.num_ops
        for i in numbers.tolist():
            inputs = a.input[a.input_ptr[i] : a.input_ptr[i + 1]]
            if not len(inputs):
                return -1
            first = min(first, int(self._sequence[a.producer[inputs]].min()))
        return first // self._spacing
