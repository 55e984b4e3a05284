"""Small changes to a placement, scored without simulating everything again.

A placement is simulated once with checkpoints. A changed placement starts at the last checkpoint before anything that
the change touches, and is dropped as soon as it provably cannot beat the incumbent: an op's ready time plus the longest
path from it to the end, or a device's clock plus the work that it has yet to do, reaches the incumbent's value.
Values are exact: equal to `evaluate` bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from placewise.graph import Ints
from placewise.problem import Problem
from placewise.simulator.arrays import arrays_for

_U = np.uint64
_CHECKPOINTS = 64


class Incremental:
    """A placement that changes step by step, for the objectives `latency` and `completion` of a parallel engine."""

    def __init__(self, problem: Problem, placement: Ints, threads: int = 1) -> None:
        from placewise.simulator import kernel

        self.problem = problem
        self._kernel = kernel
        self._arrays = arrays_for(problem)
        given = self._arrays._asdict()
        del given["tensor"]
        n, d = problem.num_ops, problem.num_devices
        models = len(problem.graph.models) if problem.objective == "completion" else 1
        channels = self._arrays.num_channels
        self._problem_arguments = (*given.values(), _U(d), _U(channels), _U(models))
        self._number = np.empty(n, np.int64)
        self._number[self._arrays.op] = np.arange(n)
        # Streamed parameters make the past depend on the future (fetches are windows over what is to come).
        self._resumes = not len(self._arrays.stored)
        self._spacing = max(1, -(-n // _CHECKPOINTS))
        words = (n + 63) // 64
        saved = -(-n // self._spacing) + 1 if self._resumes else 0
        self._checkpoints = (
            np.zeros((saved, 2 * n + d + channels + models)),
            np.zeros((saved, 2 * n + 2 * d + 1), np.int32),
            np.zeros((saved, d * words + d * ((words + 63) // 64 + 1)), np.uint64),
        )
        self._sequence = np.zeros(n, np.uint32)  # completions before each op's, by the kernel's numbers
        self._tails = np.zeros(n)
        self._bounded = models == 1  # a sum over models cannot be cut off by one path
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._threads = threads
        self.placement = placement.copy()
        self.value = self._accept(placement, -1)

    def probe(self, placements: NDArray[np.int32], changed: Sequence[NDArray[np.int64]], cutoff: float) -> NDArray[np.float64]:
        """[B] values of placements that differ from the current one in the given ops; infinite if >= cutoff."""
        resume = np.array([self._last_checkpoint_before(ops) for ops in changed], np.int64)
        trusted = np.array([self._number[ops].max(initial=-1) + 1 for ops in changed], np.uint64)
        values = np.empty(len(placements))
        limit = cutoff if self._bounded else np.inf

        def run(rows: slice) -> None:
            self._run(placements[rows], values[rows], limit, trusted[rows], resume[rows], 0)

        if self._pool is None:
            run(slice(None))
        else:
            list(self._pool.map(run, [slice(i, None, self._threads) for i in range(self._threads)]))
        values[values >= cutoff] = np.inf
        return values

    def accept(self, placement: NDArray[np.int32]) -> float:
        """Make a placement the current one; returns its value."""
        ops = np.flatnonzero(placement != self.placement)
        self.placement = placement.copy()
        self.value = self._accept(self.placement, self._last_checkpoint_before(ops))
        return self.value

    def _accept(self, placement: Ints, checkpoint: int) -> float:
        value = np.empty(1)
        trusted, resume = np.zeros(1, np.uint64), np.array([checkpoint], np.int64)
        rows = np.ascontiguousarray(placement[None], np.int32)
        self._run(rows, value, np.inf, trusted, resume, self._spacing if self._resumes else 0)
        a = self._arrays
        self._tails = self._kernel.tails(
            a.op, a.seconds, a.tensor_ptr, a.bytes, a.consumer_ptr, a.consumer, a.latency, a.per_byte,
            _U(self.problem.num_devices), rows[0],
        )  # fmt: skip
        return float(value[0])

    def _run(
        self,
        rows: NDArray[np.int32],
        values: NDArray[np.float64],
        cutoff: float,
        trusted: NDArray[np.uint64],
        resume: NDArray[np.int64],
        spacing: int,
    ) -> None:
        execution = self.problem.execution
        how = (False, execution.sends == "edge", _U(execution.prefetch))
        out = np.empty(len(rows))
        self._kernel.run(
            *self._problem_arguments, np.ascontiguousarray(rows), *how, out, *(None,) * 10,
            cutoff, self._tails, np.ascontiguousarray(trusted), np.ascontiguousarray(resume),
            _U(spacing), *self._checkpoints, self._sequence,
        )  # fmt: skip
        values[:] = out

    def _last_checkpoint_before(self, ops: NDArray[np.int64]) -> int:
        """The last checkpoint at which none of the ops had an input booked; -1 = none."""
        if not self._resumes or not len(ops):
            return -1
        a, first = self._arrays, self.problem.num_ops
        for i in self._number[ops].tolist():
            inputs = a.input[a.input_ptr[i] : a.input_ptr[i + 1]]
            if not len(inputs):
                return -1
            first = min(first, int(self._sequence[a.producer[inputs]].min()))
        return first // self._spacing
