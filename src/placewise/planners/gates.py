"""Where a stage may as well end: gates, ideals that are no worse to stop at than anything smaller.

Let a pipeline keep a limit, and let one of its stages end at the ideal I. Let G be an ideal above I. If the stage could
have all of G too, and every later stage is no worse off without the nodes X of G that it had, then there is a pipeline
that keeps the limit and whose stage ends at G instead: later stages lose what G has, wherever they had it. A pipeline
whose first stages are as large as possible never ends a stage at such an I. So a search for any pipeline within a limit
can leave I out, as long as it has G.

A later stage that loses X, its part of G, saves

- the work of X;
- what X receives from the rest of G, of messages that nobody beyond G reads;
- what X sends to the rest of G;

and pays, at most,

- to receive the messages of X that someone beyond G reads;
- to send to X what is made beyond G (backward).

The difference is the value of a cut, and the worst X is a minimum cut (hyperedges as in Lawler 1973). That no X is
worse than the empty one is the same as that all that is paid can flow to where it is saved. G is a gate if so.

Gates are looked for in a row: a node v that all nodes left depend on gives the ideal of all that do not depend on v,
and the same with v. An ideal that is not within these has v and all that v depends on: they are `forced`. What is in
the ideal already needs no saving, so that a message from far back, that every stage reads, does not spoil all gates
after it: gate j may hold only for ideals that are not within gate `since[j]`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from placewise.planners.stages import Stages, Whole

_MOST_VISITS: Final = 400_000  # of vertices, in all flows
_ENDLESS: Final = 1 << 62


@dataclass(frozen=True, eq=False)
class Gates:
    """Gates are numbered from the smallest; the last is everything."""

    of: Whole  # [n] the first gate that has the node
    forced: Whole  # [n] the first gate such that all ideals that are not within it have the node
    since: Whole  # [gates] the gate holds for ideals that are not within this one; -1 if for all


def no_gates(n: int) -> Gates:
    """Nothing is left out."""
    return Gates(np.zeros(n, np.int64), np.full(n, n), np.zeros(0, np.int64))


def without_idle_copies(stages: Stages, least: float) -> Stages:
    """The same without times of messages, if copies overlap with work and never take longer than any plan does.

    A stage exchanges what crosses the ideal that it begins with or the one that it ends at. An ideal within gate h, and
    not within the one before, is crossed only by messages with an end in gate h and one that is not forced before it.
    """
    if not stages.overlap or stages.compute.shape[2] > 1 or not stages.num_messages:
        return stages
    gates = Net(stages.tail, stages.head, stages.sender, stages.message, stages.reader, [], stages.num_nodes).gates()
    first, last = gates.of[stages.sender], gates.forced[stages.sender]
    np.minimum.at(first, stages.message, gates.of[stages.reader])
    np.maximum.at(last, stages.message, gates.forced[stages.reader])
    change = np.zeros((len(gates.since) + 2, stages.send.shape[1]))
    longest = np.maximum(np.maximum(stages.send, stages.receive), 0.0)
    np.add.at(change, first, longest)
    np.add.at(change, np.minimum(last, len(gates.since)) + 1, -longest)
    if 2 * change.cumsum(axis=0).max() * (1 + 1e-9) > least:
        return stages
    return replace(stages, send=0 * stages.send, receive=0 * stages.receive)


@dataclass(frozen=True, eq=False)
class Column:
    """A cost that stages have a limit of."""

    own: list[int]  # [n] of a node, at least
    send: list[int]  # [M]
    receive: list[int]  # [M]


class Net:
    """Nodes and messages as lists."""

    def __init__(
        self, tail: Whole, head: Whole, sender: Whole, message: Whole, reader: Whole, columns: list[Column], n: int
    ) -> None:
        self._n, self._sender, self._columns = n, sender.tolist(), columns
        self._after: list[list[int]] = [[] for _ in range(n)]
        self._before: list[list[int]] = [[] for _ in range(n)]
        for a, b in zip(tail.tolist(), head.tolist(), strict=True):
            self._after[a].append(b)
            self._before[b].append(a)
        self._readers: list[list[int]] = [[] for _ in self._sender]
        self._read: list[list[int]] = [[] for _ in range(n)]
        self._sent: list[list[int]] = [[] for _ in range(n)]
        for m, r in zip(message.tolist(), reader.tolist(), strict=True):
            self._readers[m].append(r)
            self._read[r].append(m)
        for m, s in enumerate(self._sender):
            self._sent[s].append(m)
        self._inside = [False] * n
        self._beyond = [len(readers) for readers in self._readers]  # how many are beyond the ideal
        self._pays: dict[int, None] = {}  # nodes of the ideal that later stages pay for
        self._visits = 0

    def gates(self) -> Gates:
        """All gates of the row. Nodes join an ideal one by one, those first that least comes after."""
        n, inputs = self._n, [len(before) for before in self._before]
        height = self._heights()
        ready = [(height[v], v) for v in range(n) if not inputs[v]]
        heapq.heapify(ready)
        of, forced, since = np.zeros(n, np.int64), np.full(n, n), list[int]()
        fresh = list[int]()  # what joined since the last gate
        spoils: dict[int, int] = {}  # nodes that have to be there already, and since which gate they are

        def close() -> None:
            for v in [v for v in spoils if v not in self._pays]:
                del spoils[v]
            while (bad := self._unpaid(forced, last := max(spoils.values(), default=-1))) is not None:
                if forced[bad] >= len(since):
                    last = len(since)
                    break
                spoils[bad] = int(forced[bad])
            of[fresh] = len(since)
            fresh.clear()
            since.append(last)

        while ready:
            single = len(ready) == 1
            v = heapq.heappop(ready)[1]
            if single:
                if fresh:
                    close()
                # An ideal that is not within what joined so far, nor within a later gate, has v.
                gate, stack = max(len(since) - (not fresh), 0), [v]
                while stack:
                    w = stack.pop()
                    if forced[w] == n:
                        forced[w] = gate
                        stack += self._before[w]
            self._join(v)
            fresh.append(v)
            if single:
                close()
            for w in self._after[v]:
                inputs[w] -= 1
                if not inputs[w]:
                    heapq.heappush(ready, (height[w], w))
        if fresh:  # everything is a gate: no one is beyond it
            of[fresh] = len(since)
            since.append(-1)
        since[-1] = -1
        return Gates(of, forced, np.array(since, np.int64))

    def _heights(self) -> list[int]:
        height, outputs = [0] * self._n, [len(after) for after in self._after]
        stack = [v for v in range(self._n) if not outputs[v]]
        while stack:
            w = stack.pop()
            for v in self._before[w]:
                height[v] = max(height[v], height[w] + 1)
                outputs[v] -= 1
                if not outputs[v]:
                    stack.append(v)
        return height

    def _join(self, v: int) -> None:
        self._inside[v] = True
        for m in self._read[v]:
            self._beyond[m] -= 1
        for w in (v, *(self._sender[m] for m in self._read[v]), *(r for m in self._sent[v] for r in self._readers[m])):
            if self._inside[w] and any(self._paid(w, column) for column in self._columns):
                self._pays[w] = None
            else:
                self._pays.pop(w, None)

    def _paid(self, v: int, column: Column) -> int:
        """What a later stage may have to pay without v."""
        paid = sum(column.receive[m] for m in self._sent[v] if self._beyond[m])
        paid -= sum(min(column.send[m], 0) for m in self._sent[v])  # what was given back (`stages.without`)
        return paid + sum(max(column.send[m], 0) for m in self._read[v] if not self._inside[self._sender[m]])

    def _unpaid(self, forced: Whole, since: int) -> int | None:
        """A node that pays more than can be saved, or None; those that are there since a gate do not pay."""
        sources = [v for v in self._pays if forced[v] > since]
        for column in self._columns:
            spare = {v: column.own[v] - self._paid(v, column) for v in sources}
            flow: dict[tuple[int, int], int] = {}  # as much the other way round is negative
            for v in sources:
                while spare[v] < 0:
                    came, end = self._path(v, column, forced, since, spare, flow)
                    self._visits += len(came)
                    if end is None:
                        return v
                    amount, path = -spare[v], [end]
                    while path[-1] != v:
                        path.append(came[path[-1]])
                    for b, a in pairwise(path):
                        amount = min(amount, self._capacity(a, b, column) - flow.get((a, b), 0))
                    if forced[end] > since:
                        amount = min(amount, spare.get(end, column.own[end]))
                        spare[end] = spare.get(end, column.own[end]) - amount
                    spare[v] += amount
                    for b, a in pairwise(path):
                        flow[a, b] = flow.get((a, b), 0) + amount
                        flow[b, a] = -flow[a, b]
        return None

    def _path(
        self, source: int, column: Column, forced: Whole, since: int, spare: dict[int, int],
        flow: dict[tuple[int, int], int],
    ) -> tuple[dict[int, int], int | None]:  # fmt: skip
        """(where each vertex was reached from, a node that can save more) of a search by breadth."""
        came, queue, n = {source: source}, [source], self._n
        for a in queue:
            if a < n and a != source and (forced[a] <= since or spare.get(a, column.own[a]) > 0):
                return came, a
            if len(came) + self._visits > _MOST_VISITS:
                break
            for b in self._neighbours(a):
                if b not in came and self._capacity(a, b, column) > flow.get((a, b), 0):
                    came[b] = a
                    queue.append(b)
        return came, None

    def _neighbours(self, a: int) -> list[int]:
        """Vertices are nodes n, then messages as their readers save them, then messages as their senders do."""
        n, count = self._n, len(self._sender)
        if a < n:
            return [m + base for m in (*self._read[a], *self._sent[a]) for base in (n, n + count)]
        m = (a - n) % count
        return [w for w in (self._sender[m], *self._readers[m]) if self._inside[w]]

    def _capacity(self, a: int, b: int, column: Column) -> int:
        n, count = self._n, len(self._sender)
        node, vertex = min(a, b), max(a, b) - n
        m, leaves = vertex % count, a < b
        is_sender = self._sender[m] == node
        if vertex >= count:  # from the sender to any reader
            return (max(column.send[m], 0) if is_sender else 0) if leaves else 0 if is_sender else _ENDLESS
        if self._beyond[m] or not self._inside[self._sender[m]]:
            return 0
        return (0 if is_sender else _ENDLESS) if leaves else column.receive[m] if is_sender else 0
