"""What belongs together: a backward op with the forward op whose gradient it computes, a parameter with its reader."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placewise.problem import Problem

_MOST_READERS: Final = 64  # that are looked at, of one op


def colocate_backward(problem: Problem) -> Problem:
    """The problem in which what belongs together must share a device: what is left to decide is the forward graph.

    Published pipelines of training steps are planned so (Tarnawski et al. 2020), and engines run them so.
    """
    if not problem.graph.phase.any():
        return problem
    group = np.unique(attached(problem), return_inverse=True)[1].astype(problem.graph.group.dtype)
    return replace(problem, graph=replace(problem.graph, group=group))


def attached(problem: Problem) -> NDArray[np.int64]:
    """[N] the op that stands for each op: itself, or the forward op that it belongs to; ops of a unit have the same."""
    graph = problem.graph
    position = np.empty(problem.num_ops, np.int64)
    position[graph.topological_order] = np.arange(problem.num_ops)
    modules = np.unique(np.array(graph.op_modules, dtype=object), return_inverse=True)[1].astype(np.int64)
    in_start, in_edges = graph.in_edges
    out_start, out_edges = graph.out_edges
    root: NDArray[np.int64] = _attach(
        graph.topological_order.astype(np.int64), position, graph.phase, graph.is_stored, modules,
        problem.unit.astype(np.int64), problem.num_units,
        in_start, graph.edge_producer[in_edges], out_start, graph.consumers[out_edges], _MOST_READERS,
    )  # fmt: skip
    # Pins and missing support may rule out what the rules ask for; these ops then stay by themselves.
    alone = problem.first_of_unit[problem.unit]
    while True:
        may = np.ones(problem.allowed.shape, np.bool_)
        np.logical_and.at(may, root, problem.allowed)
        torn = ~np.any(may[root], axis=1) & (root != alone)
        if not torn.any():
            return root
        root[torn] = alone[torn]


@njit(cache=True, nogil=True)
def _attach(
    order, position, phase, stored, module, unit, num_units, in_start, producer, out_start, reader, most_readers
):
    n = len(order)
    # Of ops that must share a device one decides: if possible, the first that computes forward.
    lead, rank = np.full(num_units, -1, np.int64), np.zeros(num_units, np.int64)
    for i in order:
        mine = 3 - phase[i] if not stored[i] else 1
        if mine > rank[unit[i]]:
            lead[unit[i]], rank[unit[i]] = i, mine
    root = lead[unit]
    for i in lead:  # parameters: the first op that computes with them
        best = -1
        if stored[i]:
            for e in range(out_start[i], out_start[i + 1]):
                op = reader[e]
                if phase[op] == 0 and (best < 0 or position[op] < position[best]):
                    best = op
        if best >= 0:
            root[i] = lead[unit[best]]
    # Counters and the like, which exchange nothing: the first op of their module that does.
    first = np.full(n, -1, np.int64)
    for alone in (False, True):
        for i in order:
            idle = in_start[i + 1] == in_start[i] and out_start[i + 1] == out_start[i]
            if stored[i] or phase[i] != 0 or idle != alone:
                continue
            if not alone and first[module[i]] < 0:
                first[module[i]] = i
            elif alone and first[module[i]] >= 0 and lead[unit[i]] == i:
                root[i] = lead[unit[first[module[i]]]]
    for i in order:
        if stored[i] or phase[i] == 0 or lead[unit[i]] != i:
            continue
        # A forward op of the same module that it reads, or that alone there reads what it reads; a backward op; any
        # forward input.
        own = fellow = back = other = -1
        for e in range(in_start[i], in_start[i + 1]):
            op = producer[e]
            if phase[op] != 0:
                if back < 0 or position[op] > position[back]:
                    back = op
                continue
            if not stored[op] and module[op] == module[i]:
                if own < 0 or position[op] > position[own]:
                    own = op
            elif other < 0 or position[op] > position[other]:
                other = op
            like = -1
            for f in range(out_start[op], min(out_start[op + 1], out_start[op] + most_readers)):
                if phase[reader[f]] == 0 and not stored[reader[f]] and module[reader[f]] == module[i]:
                    like = reader[f] if like < 0 or like == reader[f] else n
            if 0 <= like < n and (fellow < 0 or position[like] > position[fellow]):
                fellow = like
        chosen = own if own >= 0 else fellow if fellow >= 0 else back if back >= 0 else other
        if chosen >= 0:
            root[i] = root[lead[unit[chosen]]]
    for i in order:
        root[i] = root[root[lead[unit[i]]]]  # a parameter's reader may be attached to another op itself
    return root
