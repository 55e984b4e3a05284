"""What policies see of a graph: an array [G, F] for each kind of feature, with values around one.

All are structural: names do not enter, and kinds of ops are listed in sorted order, so the same graph gives the same
numbers in every process.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placewise.graph import Floats
from placewise.kinds import KINDS, family
from placewise.learned.grouping import Groups

#: What an op can be, for policies that see more than one graph.
FAMILIES: Final = (*sorted({kind.family for kind in KINDS.values()} - {"other"}), "other")
_SHAPE: Final = re.compile(r"\[([\d,]*)\]")
_AXES: Final = 4


def kinds(groups: Groups) -> Floats:
    """The share of each kind of op in a group; a column for each kind of the graph."""
    graph = groups.problem.graph
    return _shares(groups, np.unique(np.array(graph.op_kinds, dtype=object).astype(str), return_inverse=True)[1])


def families(groups: Groups) -> Floats:
    """The share of each family of ops in a group; a column for each of `FAMILIES`, whatever the graph."""
    of_op = [FAMILIES.index(family(kind)) for kind in groups.problem.graph.op_kinds]
    return _shares(groups, np.array(of_op, np.int64), len(FAMILIES))


def degrees(groups: Groups, most: int = 6) -> Floats:
    """One-hot numbers of groups that a group reads and is read by, up to `most`."""
    source, target, _ = groups.edges
    counts = (np.bincount(ends, minlength=groups.count) for ends in (target, source))
    return np.concatenate([np.eye(most + 1)[np.minimum(count, most)] for count in counts], axis=1)


def neighbours(groups: Groups, most: int = 6) -> Floats:
    """How far away in the program, as shares of it, the first groups are that a group reads and is read by."""
    source, target, _ = groups.edges
    columns = np.zeros((2, groups.count, most))
    for side, (ends, others) in enumerate(((target, source), (source, target))):
        order = np.argsort(ends, kind="stable")
        own, rank = ends[order], np.zeros(len(ends), np.int64)
        start = np.searchsorted(own, np.arange(groups.count))
        rank = np.arange(len(own)) - start[own]
        near = rank < most
        columns[side, own[near], rank[near]] = (others[order] - own)[near] / max(groups.count, 1)
    return np.concatenate(list(columns), axis=1)


def adjacency(groups: Groups) -> Floats:
    """[G, 2 G] bytes to and from each other group, as shares of the largest."""
    source, target, size = groups.edges
    table = np.zeros((groups.count, groups.count))
    table[source, target] = size / max(float(size.max(initial=0.0)), 1e-300)
    return np.concatenate([table, table.T], axis=1)


def position(groups: Groups, width: int = 16) -> Floats:
    """Sines and cosines of a group's number along the program (HSDAG's equation 5, with base 1000 as printed)."""
    angle = np.arange(groups.count)[:, None] / 1000.0 ** (np.arange(0, width, 2) / width)
    return np.stack([np.sin(angle), np.cos(angle)], axis=2).reshape(groups.count, -1)[:, :width]


def shapes(groups: Groups) -> Floats:
    """Logarithms of the axes of the largest output, padded; of its bytes where the shape is not known."""
    graph = groups.problem.graph
    size = np.zeros(groups.problem.num_ops)
    np.add.at(size, graph.tensor_producer, graph.tensor_bytes)
    largest = np.full(groups.count, -1, np.int64)
    for op in np.argsort(size, kind="stable"):
        largest[groups.label[op]] = op
    table = np.zeros((groups.count, _AXES + 1))
    for group, op in enumerate(largest.tolist()):
        found = _SHAPE.findall(graph.op_signatures[op].rpartition(" -> ")[2])
        axes = [int(axis) for axis in found[0].split(",") if axis][:_AXES] if found else []
        table[group, : len(axes)] = np.log2(np.maximum(axes, 1)) / 10
        table[group, _AXES] = np.log2(1 + size[op]) / 30
    return table


def costs(groups: Groups) -> Floats:
    """Time on each device, bytes sent and kept, as shares of the largest; minus one where it may not run."""
    seconds = np.where(np.isfinite(groups.seconds), groups.seconds, -np.inf)
    scaled = seconds / max(float(seconds.max(initial=0.0)), 1e-300)
    columns = [np.where(np.isfinite(scaled), scaled, -1.0)]
    for values in (groups.sent, groups.resident):
        columns.append((values / max(float(values.max(initial=0.0)), 1e-300))[:, None])
    return np.concatenate(columns, axis=1)


def standardised(table: Floats) -> Floats:
    """Each column with mean zero and spread one, so that what tells groups apart outweighs what they have in common."""
    spread = table.std(axis=0)
    found: Floats = (table - table.mean(axis=0)) / np.where(spread > 1e-9, spread, 1.0)
    return found


def fractal_dimension(groups: Groups) -> Floats:
    """The slope of log(groups within r hops) on log(r), over the undirected graph (HSDAG's equation 4).

    A group stops counting at its own radius: beyond, the ball is the whole component and the slope would be zero.
    """
    source, target, _ = groups.edges
    ends, others = np.concatenate([source, target]), np.concatenate([target, source])
    start = np.concatenate([[0], np.cumsum(np.bincount(ends, minlength=groups.count))])
    slope: Floats = _slopes(start, others[np.argsort(ends, kind="stable")])
    return slope[:, None]


@njit(cache=True, nogil=True)
def _slopes(start, near):  # type: ignore[no-untyped-def]
    nodes = len(start) - 1
    slope, seen, queue = np.zeros(nodes), np.full(nodes, -1), np.empty(nodes, np.int64)
    for i in range(nodes):
        queue[0], seen[i] = i, i
        begin, end, radius = 0, 1, 0
        x = y = xx = xy = 0.0
        while True:
            size = end
            for k in range(begin, size):
                for e in range(start[queue[k]], start[queue[k] + 1]):
                    if seen[near[e]] != i:
                        seen[near[e]] = i
                        queue[end] = near[e]
                        end += 1
            if end == size:
                break
            begin, radius = size, radius + 1
            log_radius, log_size = np.log(radius), np.log(end)
            x += log_radius
            y += log_size
            xx += log_radius**2
            xy += log_radius * log_size
        if radius >= 2:
            slope[i] = (radius * xy - x * y) / (radius * xx - x * x)
    return slope


def _shares(groups: Groups, of_op: NDArray[np.int64], width: int | None = None) -> Floats:
    table = np.zeros((groups.count, width or int(of_op.max(initial=-1)) + 1))
    np.add.at(table, (groups.label, of_op), 1.0)
    shares: Floats = table / np.maximum(table.sum(axis=1, keepdims=True), 1.0)
    return shares
