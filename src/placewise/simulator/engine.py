"""The compiled event loop with what it needs: a problem's arrays, room to work in, and room for what it records."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placewise.problem import Problem
from placewise.simulator.arrays import Arrays
from placewise.simulator.timeline import Floats

_U = np.uint64
#: Arrays that a sequential run has no use for.
_ONLY_PARALLEL = ("num_inputs", "sources", "edge_ptr", "edge_tensor", "via_ptr", "via")


class Log(NamedTuple):
    """Times of ops and transfers in the order in which the kernels take them; ops and tensors by `Arrays`' numbers."""

    start: Floats  # [N]
    finish: Floats  # [N]
    tensor: NDArray[np.uint32]  # [E] and so on: at most one transfer per edge
    reader: NDArray[np.uint32]
    sent: Floats
    arrived: Floats


class Part(NamedTuple):
    """Which part of each run to simulate; `kernel.run` says what the fields mean. By default all of it."""

    cutoff: float = np.inf
    tail: Floats = np.empty(0)
    tail_from: NDArray[np.uint64] = np.empty(0, np.uint64)
    resume: NDArray[np.int64] | None = None  # None: every row begins at time zero
    save_every: int = 0
    save_float: Floats = np.empty((0, 0))
    save_int: NDArray[np.int32] = np.empty((0, 0), np.int32)
    save_word: NDArray[np.uint64] = np.empty((0, 0), np.uint64)
    sequence: NDArray[np.uint32] = np.empty(0, np.uint32)


_WHOLE = Part()


class Engine:
    """For one thread at a time. One that records also measures memory, and keeps the `log` of the last row."""

    def __init__(self, problem: Problem, arrays: Arrays, *, strict: bool = False, record: bool) -> None:
        from placewise.simulator import kernel

        n, edges, d = problem.num_ops, problem.graph.num_edges, problem.num_devices
        self._kernel, self._problem, self._strict, self.arrays = kernel, problem, strict, arrays
        self._models = num_models(problem)
        self._sequential = problem.execution.concurrency == "sequential"
        self._record = record or self._sequential
        self.log = Log(
            np.zeros(n), np.zeros(n), np.empty(edges, np.uint32), np.empty(edges, np.uint32),
            np.empty(edges), np.empty(edges),
        )  # fmt: skip
        given = arrays._asdict()
        for unread in ("tensor", *(_ONLY_PARALLEL if self._sequential else ())):
            del given[unread]
        self._given = tuple(given.values())
        if self._sequential:
            self._room = (kernel.memory_workspace(n, len(arrays.bytes), edges, d),)
        else:
            self._room = kernel.workspace(arrays, d, self._models, record)

    def run(self, rows: NDArray[np.int32], value: Floats, peak: Floats | None = None, part: Part = _WHOLE) -> int:
        """Simulate each row into value [B] and, where it records, peak [B, D]; returns the last row's transfers."""
        execution, d = self._problem.execution, self._problem.num_devices
        per_edge = execution.sends == "edge"
        if peak is None:
            peak = np.empty((len(rows) if self._record else 0, d))
        if self._sequential:
            return int(
                self._kernel.run_sequential(
                    *self._given, _U(d), _U(self._models), *self._room, rows, per_edge, value, peak, *self.log
                )
            )
        begin = np.full(len(rows), -1) if part.resume is None else part.resume
        return int(
            self._kernel.run(
                *self._given, _U(d), _U(self.arrays.num_channels), _U(self._models), *self._room,
                rows, self._strict, per_edge, _U(execution.prefetch), value, self._record, peak, *self.log,
                part.cutoff, part.tail, part.tail_from, begin,
                _U(part.save_every), part.save_float, part.save_int, part.save_word, part.sequence,
            )
        )  # fmt: skip


def num_models(problem: Problem) -> int:
    """How many completion times the value adds up."""
    return len(problem.graph.models) if problem.objective == "completion" else 1
