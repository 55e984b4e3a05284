"""Groups of ops that a policy places as one, and the graph of these groups.

Every rule begins the same way: parameters go with the first op that reads them, and a backward op with the forward op
whose gradient it computes (ColocRL's first rule), where memory has room for both. What is left to decide is the forward
graph.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

from placewise.colocation import attached
from placewise.graph import Floats, Ints
from placewise.problem import Problem

#: A group holds at most this share of the smallest device that it may use, so that memory can still be dealt out.
_FULLEST: Final = 0.25


@dataclass(frozen=True, eq=False)
class Groups:
    """`count` groups, numbered along the program, and the forward graph between them."""

    problem: Problem
    label: Ints  # [N] the group of each op

    @cached_property
    def count(self) -> int:
        """G."""
        return int(self.label.max(initial=-1)) + 1

    def expand(self, devices: ArrayLike) -> NDArray[np.int32]:
        """[..., N] a placement of ops from one of groups [..., G]."""
        return np.asarray(devices, np.int32)[..., self.label]

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """[G, D] where each group may run."""
        may = np.ones((self.count, self.problem.num_devices), np.bool_)
        np.logical_and.at(may, self.label, self.problem.allowed)
        return may

    @cached_property
    def seconds(self) -> Floats:
        """[G, D] time of all ops of a group, backward too; infinite where it may not run."""
        return self._summed(self.problem.seconds)

    @cached_property
    def resident(self) -> Floats:
        """[G] bytes that a group keeps for the whole run."""
        return self._summed(self.problem.graph.resident_bytes)

    @cached_property
    def sent(self) -> Floats:
        """[G] bytes of the tensors that some other group reads."""
        graph = self.problem.graph
        leaves = self.label[graph.edge_producer] != self.label[graph.consumers]
        tensors = np.unique(graph.edge_tensor[leaves])
        total = np.zeros(self.count)
        np.add.at(total, self.label[graph.tensor_producer[tensors]], graph.tensor_bytes[tensors])
        return total

    @cached_property
    def edges(self) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
        """(source, target, bytes): forward edges between different groups, each pair once, in order."""
        graph = self.problem.graph
        edge = np.flatnonzero(_is_forward_edge(self.problem))
        source, target = self.label[graph.edge_producer[edge]], self.label[graph.consumers[edge]]
        edge, source, target = (x[source != target] for x in (edge, source, target))
        pair = source.astype(np.int64) * max(self.count, 1) + target
        # A tensor crosses once however many ops of the other group read it.
        once = np.unique(np.stack([pair, graph.edge_tensor[edge].astype(np.int64)]), axis=1)
        pairs, inverse = np.unique(once[0], return_inverse=True)
        size = np.bincount(inverse, graph.tensor_bytes[once[1]], len(pairs)).astype(np.float64)
        return pairs // max(self.count, 1), pairs % max(self.count, 1), size

    @cached_property
    def reachable(self) -> NDArray[np.bool_]:
        """[G, G] whether a path leads from one group to the other."""
        reach = np.zeros((self.count, self.count), np.float32)
        reach[self.edges[0], self.edges[1]] = 1.0
        hops = 1
        while hops < self.count:
            longer = np.minimum(reach + reach @ reach, 1.0)
            if (longer == reach).all():
                break
            reach, hops = longer, 2 * hops
        return reach > 0

    def _summed(self, values: Floats) -> Floats:
        total = np.zeros((self.count, *values.shape[1:]))
        np.add.at(total, self.label, values)
        return total


def units(problem: Problem) -> Groups:
    """Nothing is grouped beyond what must be, and what belongs together and has room."""
    return _numbered(problem, _with_room(problem, attached(problem)))


def coplace(problem: Problem) -> Groups:
    """An op that one other reads goes with it (ColocRL; Mirhoseini et al. 2017, arXiv:1706.04972)."""
    return _merge_by_degree(problem, mutual=False)


def chains(problem: Problem) -> Groups:
    """An op that one other reads, and which reads nothing else, goes with it (HSDAG's appendix G)."""
    return _merge_by_degree(problem, mutual=True)


def at_most(groups: Groups, most: int, within: Groups | None = None) -> Groups:
    """Merge along the edge with the most bytes, unless that closes a cycle, until there are at most so many groups.

    Where edges do not suffice, groups that follow each other in the program are merged. `within` groups of another
    kind: what is not in the same one is not merged.
    """
    if groups.count <= most:
        return groups
    problem = groups.problem
    fit, share = _Fit(groups), groups.seconds.min(axis=1)
    source, target, size = groups.edges
    order = np.lexsort((target, source, -size))
    share = np.where(np.isfinite(share), share, 0.0)  # what may run nowhere
    weight = share / max(float(share.sum()), 1e-300) * most
    root, mask = np.arange(groups.count), fit.mask
    if within is not None:
        mask = np.zeros((groups.count, within.count), np.bool_)
        mask[groups.label, within.label] = True
    for heaviest in (2.0, np.inf):
        root = _contract(root, source[order], target[order], weight, groups.resident, fit.limit, mask, most, heaviest)
    return _numbered(problem, root[groups.label])


def few(problem: Problem, most: int) -> Groups:
    """At most so many groups, and none where there are no more units than that: chains go together first."""
    groups = units(problem)
    return groups if groups.count <= most else at_most(chains(problem), most)


class _Fit:
    """What decides whether groups may become one: devices in common, and memory."""

    def __init__(self, groups: Groups) -> None:
        self.mask = np.ascontiguousarray(groups.allowed)
        self.limit = _limit(groups.problem)


def _limit(problem: Problem) -> float:
    """Bytes that a group may hold for the whole run."""
    usable = problem.capacity[problem.allowed.any(axis=0)] if problem.num_ops else problem.capacity
    return float(usable.min(initial=np.inf)) * _FULLEST


def _with_room(problem: Problem, root: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N] roots; what would fill a group stays by itself. Of what is attached to an op, the least comes first."""
    limit, alone = _limit(problem), problem.first_of_unit
    if not problem.num_ops or np.isinf(limit):
        return root
    size, home = np.bincount(problem.unit, problem.graph.resident_bytes, problem.num_units), root[alone]
    attaches = problem.unit[home] != np.arange(problem.num_units)
    order = np.lexsort((size, attaches, home))
    first = np.flatnonzero(np.diff(home[order], prepend=-1))
    held = size[order].cumsum()
    before = np.repeat(held[first] - size[order[first]], np.diff(np.append(first, len(order))))
    full = np.zeros(problem.num_units, np.bool_)
    full[order] = held - before > limit
    torn = full & attaches & (size > 0)
    found: NDArray[np.int64] = np.where(torn, alone, home)[problem.unit]
    return found


# ---- rules -----------------------------------------------------------------------------------------------------------


def _is_forward_edge(problem: Problem) -> NDArray[np.bool_]:
    """[E] edges between ops that compute forward (between all, where none is called forward)."""
    graph = problem.graph
    forward = (graph.phase == 0) & ~graph.is_stored
    if not forward.any():
        return np.ones(graph.num_edges, np.bool_)
    found: NDArray[np.bool_] = forward[graph.edge_producer] & forward[graph.consumers]
    return found


@njit(cache=True, nogil=True)
def _find(parent, i):
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


def _merge_by_degree(problem: Problem, *, mutual: bool) -> Groups:
    """Merge along edges from ops that one other reads (`mutual`: which reads nothing else)."""
    groups = units(problem)
    source, target, _ = groups.edges
    sole = np.bincount(source, minlength=groups.count)[source] == 1
    if mutual:
        sole &= np.bincount(target, minlength=groups.count)[target] == 1
    fit = _Fit(groups)
    root = _contract_all(groups.count, source[sole], target[sole], groups.resident, fit.limit, fit.mask)
    return _numbered(problem, root[groups.label])


@njit(cache=True, nogil=True)
def _contract_all(count, source, target, resident, limit, mask):
    """[G] roots after merging along all these edges that memory and devices allow."""
    parent, held, may = np.arange(count), resident.copy(), mask.copy()
    for e in range(len(source)):
        a, b = _find(parent, source[e]), _find(parent, target[e])
        if a != b and held[a] + held[b] <= limit and (may[a] & may[b]).any():
            parent[a] = b
            held[b] += held[a]
            may[b] &= may[a]
    for i in range(count):
        parent[i] = _find(parent, i)
    return parent


@njit(cache=True, nogil=True)
def _contract(root, source, target, weight, resident, limit, mask, most, heaviest):
    """[G] roots after merging, heaviest edge first, what closes no cycle; then neighbours in the program."""
    n = len(root)
    parent, total, held, may = root.copy(), np.zeros(n), np.zeros(n), mask.copy()
    for i in range(n):
        r = _find(parent, i)
        total[r] += weight[i]
        held[r] += resident[i]
        may[r] &= mask[i]
    after = np.arange(n)  # the members of a group, as a ring
    last = np.full(n, -1)
    for i in range(n):
        r = _find(parent, i)
        if last[r] >= 0:
            after[i], after[last[r]] = after[last[r]], i
        last[r] = i
    count = 0
    for i in range(n):
        count += parent[i] == i
    start = np.zeros(n + 1, np.int64)
    for e in range(len(source)):
        start[source[e] + 1] += 1
    for i in range(n):
        start[i + 1] += start[i]
    at, child = start[:-1].copy(), np.empty(len(source), np.int64)
    for e in range(len(source)):
        child[at[source[e]]] = target[e]
        at[source[e]] += 1
    rank, place = _ranks(parent, source, target, after, start, child)
    seen, stack, kept = np.full(n, -1), np.empty(n, np.int64), np.empty(n, np.int64)
    for e in range(len(source) + n - 1):
        if count <= most:
            break
        along = e < len(source)
        first, second = (source[e], target[e]) if along else (e - len(source), e - len(source) + 1)
        a, b = _find(parent, first), _find(parent, second)
        if a == b or total[a] + total[b] > heaviest or held[a] + held[b] > limit or not (may[a] & may[b]).any():
            continue
        early, late = (a, b) if rank[a] <= rank[b] else (b, a)
        if _leads_around(early, late, parent, after, start, child, seen, stack, e, rank):
            continue
        # Where groups wait for each other there are no ranks, and paths may lead either way.
        again = not along and rank[a] == rank[b]
        if again and _leads_around(b, a, parent, after, start, child, seen, stack, e + len(source) + n, rank):
            continue
        _join(a, early, late, rank, place, seen, e, kept)
        parent[b] = a
        total[a] += total[b]
        held[a] += held[b]
        may[a] &= may[b]
        after[a], after[b] = after[b], after[a]
        count -= 1
    for i in range(n):
        parent[i] = _find(parent, i)
    return parent


@njit(cache=True, nogil=True)
def _ranks(parent, source, target, after, start, child):
    """(rank [G] of roots in a topological order, root [G] at each rank); all ranks are zero if there is a cycle."""
    n = len(parent)
    waits, rank, place = np.zeros(n, np.int64), np.zeros(n, np.int64), np.full(n, -1)
    for e in range(len(source)):
        a, b = _find(parent, source[e]), _find(parent, target[e])
        waits[b] += a != b
    done = groups = 0
    for i in range(n):
        if parent[i] == i:
            groups += 1
            if waits[i] == 0:
                place[done] = i
                done += 1
    at = 0
    while at < done:
        group = i = place[at]
        rank[group] = at
        at += 1
        while True:
            for c in range(start[i], start[i + 1]):
                r = _find(parent, child[c])
                if r != group:
                    waits[r] -= 1
                    if waits[r] == 0:
                        place[done] = r
                        done += 1
            i = after[i]
            if i == group:
                break
    if done < groups:
        rank[:] = 0
    return rank, place


@njit(cache=True, nogil=True)
def _leads_around(a, b, parent, after, start, child, seen, stack, stamp, rank):
    """Whether a path leads from group a to group b by way of another group; no later group than b can be on it."""
    stack[0] = a
    seen[a] = stamp
    depth = 1
    while depth:
        depth -= 1
        group = stack[depth]
        i = group
        while True:
            for c in range(start[i], start[i + 1]):
                r = _find(parent, child[c])
                if r == b:
                    if group != a:
                        return True
                elif seen[r] != stamp and rank[r] <= rank[b]:
                    seen[r] = stamp
                    stack[depth] = r
                    depth += 1
            i = after[i]
            if i == group:
                break
    return False


@njit(cache=True, nogil=True)
def _join(root, early, late, rank, place, seen, stamp, kept):
    """Ranks after these two became one: between them, what the first leads to comes after it, all else before."""
    low, high = rank[early], rank[late]
    if low == high:
        return
    at, later = low, 0
    for index in range(low, high + 1):
        r = place[index]
        if r < 0 or r in (early, late):
            continue
        if seen[r] == stamp:
            kept[later] = r
            later += 1
        else:
            place[at] = r
            rank[r] = at
            at += 1
    place[at] = root
    rank[root] = at
    at += 1
    for index in range(later):
        place[at] = kept[index]
        rank[kept[index]] = at
        at += 1
    for index in range(at, high + 1):
        place[index] = -1


def _numbered(problem: Problem, root: NDArray[np.int64]) -> Groups:
    """Groups numbered in the order in which the program first comes to them, forward ops first."""
    graph = problem.graph
    order = graph.topological_order
    late = (graph.phase[order] != 0) | graph.is_stored[order]
    seen = root[order[np.argsort(late, kind="stable")]]
    roots, first = np.unique(seen, return_index=True)
    number = np.empty(problem.num_ops, np.int64)
    number[roots[np.argsort(first)]] = np.arange(len(roots))
    label = number[root].astype(np.int32)
    label.flags.writeable = False
    return Groups(problem, label)
