"""A bound for contiguous pipelines that have too many ideals to look at one by one: boxes of ideals.

A box is all ideals that have some nodes and lack some others; the rest are open. Each ideal is in some box, so stages
lead from box to box. A stage is sure to have what the second box has and the first lacks, and never has what the first
has or the second lacks. Whatever of the open nodes it has besides, its transfers cost no less than a minimum cut (a
message costs once, however many read it: a hyperedge, Lawler 1973).

Nodes are worth what they cost where they are cheapest, at prices of devices, so a second of a device never makes more
than its price. A stage within a limit makes at most

- all that it may have;
- what it is sure to have, and the price of what is left of the limit after that and after its transfers;
- by Lagrange, for any lower price of a second: that price times the limit, and the most by which nodes can be worth
  more than they and their transfers cost at that price. That again is a minimum cut.

If no chain of boxes, each stage on devices of its own, makes as much as all nodes are worth, no pipeline keeps the
limit. Cuts are computed only where a chain may pass, and boxes that the best chain passes are divided, until there is
none. Then the limit is raised.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placewise.driver import Context
from placewise.graph import Floats
from placewise.planners.ideals_kernel import BITS, NEVER
from placewise.planners.ideals_search import lists, prices
from placewise.planners.stages import Stages, Whole

Flags = NDArray[np.bool_]

_MOST_BOXES: Final = 384
_CANDIDATES: Final = 1024  # nodes that may divide a box: those with most work
_SLACK: Final = 1e-9  # relative; more than rounding amounts to
_STEP: Final = 0.005  # relative; by which the limit is raised
_FINEST: Final = 5e-4  # relative; of the bound
_LOOKS: Final = 3  # at what two boxes make on a kind of device, each at another price
_FIRST: Final = 0.75  # of the price of a second, where they begin,
_STEP_OF_PRICE: Final = 1 / 8  # and the first step from there; each is half as large as the one before
_MOST_CUTS: Final = 50  # between two looks at the clock
_WORTH: Final = 100  # evaluations, that a look at chains and boxes is about as long as
_LITTLE: Final = 0.005  # of a limit; boxes with less in them are not divided
_NEVER: Final = 1e30  # seconds of what may not run


def raise_bound(stages: Stages, ctx: Context, most_devices: int | None, share: float) -> None:
    """Raise the bound of a problem as far as boxes prove it, for a share of the time that is left."""
    until, spare = ctx.seconds + share * ctx.seconds_left, (1 - share) * ctx.evaluations_left
    boxes = Boxes(stages, most_devices)
    low, limit = ctx.lower_bound, ctx.lower_bound * (1 + _STEP)
    while low > 0.0 and limit < ctx.best_value and ctx.seconds < until and ctx.evaluations_left >= spare:
        if ctx.should_stop():
            break
        ctx.spend(min(_WORTH, ctx.evaluations_left))
        if not boxes.reach(limit):
            low, limit = limit, limit * (1 + _STEP)
            ctx.bound(low * (1 - _SLACK))
        elif not boxes.refine():
            break
    top = min(limit, ctx.best_value)
    while low > 0.0 and top - low > _FINEST * low:
        middle = (low + top) / 2
        if boxes.reach(middle):
            top = middle
        else:
            low = middle
            ctx.bound(low * (1 - _SLACK))


class Boxes:
    """Boxes of ideals, and the most that stages between them can make."""

    def __init__(self, stages: Stages, most_devices: int | None = None) -> None:
        n, m, kinds = stages.num_nodes, stages.num_messages, len(stages.kinds.devices)
        self._stages, work = stages, stages.compute.sum(axis=2)
        able = np.isfinite(work)
        scale = float(np.where(able, work, 0.0).max(axis=1).sum() + stages.send.sum() + stages.receive.sum())
        self._unit = max(scale, 1e-300) / 2.0**BITS
        self._work = np.where(able, work, _NEVER)  # [n, K]
        self._price = prices(np.where(able, self._whole(np.where(able, work, 0.0)), NEVER))
        self._worth = (self._work * self._price).min(axis=1)
        self._total = float(self._worth.sum())
        start = np.searchsorted(stages.message, np.arange(m + 1))
        self._messages = stages.sender, start, stages.reader
        self._above, self._below, self._candidates = self._reach()

        count = np.array([len(devices) for devices in stages.kinds.devices])
        step = np.concatenate([[1], np.cumprod(count + 1)[:-1]]).astype(np.int64)
        self._in_use = np.arange(int((count + 1).prod()))[:, None] // step % (count + 1)
        self._spare = np.minimum(
            count - self._in_use, ((most_devices or 1 << 30) - self._in_use.sum(axis=1))[:, None]
        ).astype(np.int64)
        self._ways = np.array(
            [(k, r, r * step[k]) for k, most in enumerate(stages.kinds.most.tolist()) for r in range(1, most + 1)]
        ).astype(np.int64)
        self._tariff = stages.kinds.tariff

        size, tariffs = _MOST_BOXES, stages.send.shape[1]
        self.count = 3  # nothing, everything, and any ideal
        self._has, self._lacks = np.zeros((2, size, n), np.bool_)
        self._lacks[0], self._has[1] = True, True
        self._possible = np.zeros((size, size), np.bool_)
        self._sure = np.zeros((size, size, kinds))
        self._sure_worth = np.zeros((size, size))
        self._transfers, self._cut = np.zeros((size, size, tariffs)), np.zeros((size, size), np.bool_)
        # by Lagrange: base + slope * limit
        self._base, self._slope = np.full((size, size, kinds), np.inf), np.zeros((size, size, kinds))
        self._looks = np.zeros((size, size, kinds), np.int64)  # so far, and the price of the next
        self._next = np.tile(_FIRST * self._price, (size, size, 1))
        self._step = np.tile(_STEP_OF_PRICE * self._price, (size, size, 1))
        self._passes = np.zeros((size, size, kinds), np.bool_)
        self._chain = np.zeros((int(count.sum()), 3), np.int64)  # one that may keep the limit: from, to, kind
        self._limit = 0.0
        for box in range(self.count):
            self._measure(box)

    def _reach(self) -> tuple[Flags, Flags, Whole]:
        """Candidates [C, n] and what is above and below each, itself included."""
        stages, n = self._stages, self._stages.num_nodes
        tied = np.zeros(n, np.bool_)
        tied[stages.tail] = tied[stages.head] = True
        heaviest = np.argsort(-np.where(tied, self._worth, -1.0), kind="stable")[: min(_CANDIDATES, int(tied.sum()))]
        candidates = np.sort(heaviest)
        own = np.zeros((n, len(candidates)), np.bool_)
        own[candidates, np.arange(len(candidates))] = True
        found = []
        for one, other in ((stages.tail, stages.head), (stages.head, stages.tail)):
            bits = np.packbits(own, axis=1)
            _propagate(bits, *lists(one, other, n), *lists(other, one, n))
            found.append(np.ascontiguousarray(np.unpackbits(bits, axis=1, count=len(candidates)).T.astype(np.bool_)))
        return found[0], found[1], candidates

    def _measure(self, box: int) -> None:
        """What stages from and to a box are sure to have."""
        n, has, lacks = self.count, self._has[: self.count], self._lacks[: self.count]
        mine, others = has[box], lacks[box]
        columns = np.hstack([self._work, self._worth[:, None]])
        into, out = lacks[:, mine] @ columns[mine], has[:, others] @ columns[others]
        self._sure[:n, box], self._sure_worth[:n, box] = into[:, :-1], into[:, -1]
        self._sure[box, :n], self._sure_worth[box, :n] = out[:, :-1], out[:, -1]
        self._possible[:n, box] = ~(has[:, others]).any(axis=1)
        self._possible[box, :n] = ~(lacks[:, mine]).any(axis=1)

    # ---- chains ----

    def reach(self, limit: float) -> bool:
        """Whether a chain of boxes may keep the limit, for all that is known."""
        n = self.count
        forced, most = self._sure_worth[0, :n].copy(), self._total - self._sure_worth[:n, 1]
        self._limit = limit
        self._passes[:], self._chain[:] = False, -1
        found: bool = _chains(
            n, limit, self._possible, self._sure, self._sure_worth, self._transfers, self._base, self._slope, forced,
            most, self._total, self._price, self._tariff, self._spare, self._ways, self._stages.overlap,
            _SLACK * self._total, self._passes, self._chain,
        )  # fmt: skip
        return found

    def refine(self) -> bool:
        """Look closer at where chains pass; False if there is nothing to look at."""
        n = self.count
        pairs = np.argwhere(self._passes[:n, :n].any(axis=2) & ~self._cut[:n, :n])[:_MOST_CUTS]
        for a, b in pairs.tolist():
            self._cut[a, b] = True
            for t in range(self._transfers.shape[2]):
                cost, _ = self._least(a, b, t, None, 1.0)
                self._transfers[a, b, t] = max(self._transfers[a, b, t], cost)
        if len(pairs):
            return True
        chain = [(a, b, k) for a, b, k in self._chain.tolist() if a >= 0]
        ways = [way for way in chain if self._looks[way] < _LOOKS]
        for a, b, k in ways:
            self._line(a, b, k)
        return bool(ways) or self._divide([b for _, b, _ in chain])

    def _divide(self, boxes: list[int]) -> bool:
        """Divide some of the boxes by a node each, which has about as much open work above as below."""
        open_worth = {b: float(self._worth[~self._has[b] & ~self._lacks[b]].sum()) for b in boxes}
        divided = False
        for box in sorted(open_worth, key=lambda b: -open_worth[b]):
            if self.count >= _MOST_BOXES:
                break
            free = np.where(~self._has[box] & ~self._lacks[box], self._worth, 0.0)
            may = free[self._candidates] > 0
            halves = np.minimum(self._above[may] @ free, self._below[may] @ free)
            if not len(halves) or open_worth[box] < _LITTLE * self._limit:
                continue
            which = np.flatnonzero(may)[int(halves.argmax())]
            fresh, at = self.count, slice(0, self.count + 1)
            self.count += 1
            for table in (self._transfers, self._base, self._slope, self._next):
                table[fresh, at] = table[box, at]
                table[at, fresh] = table[at, box]
                table[fresh, fresh] = table[box, fresh] = table[fresh, box] = table[box, box]
            for half in (box, fresh):
                for looked in (self._cut, self._looks):
                    looked[half, at] = looked[at, half] = 0
                self._step[half, at] = self._step[at, half] = _STEP_OF_PRICE / 2 * self._price
            self._has[fresh], self._lacks[fresh] = self._has[box], self._lacks[box] | self._below[which]
            self._has[box] |= self._above[which]
            self._measure(box)
            self._measure(fresh)
            divided = True
        return divided

    # ---- stages ----

    def _least(self, a: int, b: int, tariff: int, weight: Floats | None, scale: float) -> tuple[float, Flags]:
        """The least that a stage's nodes weigh and its transfers cost, and the nodes."""
        stages, n = self._stages, self._stages.num_nodes
        label = np.where(self._has[b] & self._lacks[a], 1, np.where(self._has[a] | self._lacks[b], -1, 0))
        whole = np.zeros(n, np.int64) if weight is None else self._whole(weight)
        inside = np.zeros(n, np.bool_)
        value = _cut(
            label.astype(np.int8), whole, *self._messages, self._whole(scale * stages.send[:, tariff]),
            self._whole(scale * stages.receive[:, tariff]), inside,
        )  # fmt: skip
        return value * self._unit, inside

    def _whole(self, seconds: Floats) -> Whole:
        """In units, never more than they are."""
        return np.floor(seconds / self._unit).astype(np.int64)

    def _line(self, a: int, b: int, k: int) -> None:
        """Look at what a stage makes at most by Lagrange, at one price; the next is nearer to where the best nodes just
        keep the limit.
        """
        price, limit = float(self._next[a, b, k]), self._limit * float(self._stages.kinds.most[k])
        work = np.minimum(self._work[:, k], self._unit * NEVER)
        scale = 0.0 if self._stages.overlap else price
        gain, inside = self._least(a, b, int(self._tariff[k]), price * work - self._worth, scale)
        if price * limit - gain < self._base[a, b, k] + self._slope[a, b, k] * limit:
            self._base[a, b, k], self._slope[a, b, k] = -gain, price
        step = float(self._step[a, b, k]) * (1 if self._loads_more(inside, k, limit) else -1)
        self._next[a, b, k], self._step[a, b, k] = max(0.0, price + step), abs(step) / 2
        self._looks[a, b, k] += 1

    def _loads_more(self, inside: Flags, k: int, limit: float) -> bool:
        """Whether a stage exceeds a limit."""
        stages, (sender, start, reader) = self._stages, self._messages
        readers = np.add.reduceat(np.append(inside[reader], False).astype(np.int64), start[:-1]) if len(sender) else 0
        t = int(self._tariff[k])
        sends, receives = inside[sender] & (readers < np.diff(start)), ~inside[sender] & (readers > 0)
        load = float(self._work[inside, k].sum())
        if not stages.overlap:
            load += float(stages.send[sends, t].sum() + stages.receive[receives, t].sum())
        return load > limit


# ---- kernels ---------------------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _propagate(bits, after_ptr, after, before_ptr, before):  # type: ignore[no-untyped-def]
    """bits[v] |= bits[w] for all w that come after v, the last ones first."""
    n = len(bits)
    waiting, stack, top = np.empty(n, np.int64), np.empty(n, np.int64), 0
    for v in range(n):
        waiting[v] = after_ptr[v + 1] - after_ptr[v]
        if waiting[v] == 0:
            stack[top] = v
            top += 1
    while top:
        top -= 1
        w = stack[top]
        for x in range(before_ptr[w], before_ptr[w + 1]):
            v = before[x]
            bits[v] |= bits[w]
            waiting[v] -= 1
            if waiting[v] == 0:
                stack[top] = v
                top += 1


@njit(inline="always")
def _makes(  # type: ignore[no-untyped-def]
    a, b, k, limit, sure, sure_worth, transfers, base, slope, open_worth, price, tariff, overlap
):  # fmt: skip
    """The most that a stage can make; negative if there is none."""
    moved = transfers[a, b, tariff[k]]
    room = limit - sure[a, b, k]
    if overlap:
        if moved > limit:
            room = -1.0
    else:
        room -= moved
    if room < 0.0:
        return -1.0
    return min(open_worth, sure_worth[a, b] + price[k] * room, base[a, b, k] + slope[a, b, k] * limit)


@njit(cache=True, nogil=True)
def _chains(  # type: ignore[no-untyped-def]
    n, limit, possible, sure, sure_worth, transfers, base, slope, forced, most, total, price, tariff, spare, ways,
    overlap, slack, passes, chain,
):  # fmt: skip
    """Whether a chain from box 0 to box 1 makes all; `passes` is set where one does, and `chain` is the best."""
    sets, limit = len(spare), limit * (1 + 1e-9)
    ahead, back = np.full((sets, n), -1.0), np.full((sets, n), -1.0)
    came = np.full((sets, n, 2), -1)
    makes = np.full((len(ways), n, n), -np.inf)  # whatever devices are left
    most_later = np.zeros(len(price))  # that a device makes in any stage but the first
    for w in range(len(ways)):
        k, r = ways[w, 0], ways[w, 1]
        for a in range(n):
            for b in range(n):
                if possible[a, b]:
                    made = _makes(a, b, k, r * limit, sure, sure_worth, transfers, base, slope,
                                  most[b] - forced[a], price, tariff, overlap)  # fmt: skip
                    makes[w, a, b] = made if made >= 0.0 else -np.inf
                    if a != 0:
                        most_later[k] = max(most_later[k], made / r)
    ahead[0, 0] = 0.0
    for s in range(sets):
        rest = 0.0
        for k in range(len(price)):
            rest += spare[s, k] * most_later[k]
        for a in range(n):
            so_far = ahead[s, a]
            if so_far < 0.0:
                continue
            if a != 0 and so_far + rest < total - slack:  # nothing passes here
                ahead[s, a] = -1.0
                continue
            for w in range(len(ways)):
                k, r, then = ways[w, 0], ways[w, 1], s + ways[w, 2]
                if spare[s, k] < r:
                    continue
                for b in range(n):
                    by_then = min(so_far + makes[w, a, b], most[b])
                    if by_then >= forced[b] - slack and by_then > ahead[then, b]:
                        ahead[then, b] = by_then
                        came[then, b, 0], came[then, b, 1] = a, w
    last = 0
    for s in range(sets):
        if ahead[s, 1] > ahead[last, 1]:
            last = s
    if ahead[last, 1] < total - slack:
        return False
    s, b, i = last, 1, 0
    while came[s, b, 0] >= 0:
        a, w = int(came[s, b, 0]), int(came[s, b, 1])
        chain[i, 0], chain[i, 1], chain[i, 2] = a, b, ways[w, 0]
        s, b, i = s - ways[w, 2], a, i + 1
    for s in range(sets - 1, -1, -1):
        back[s, 1] = 0.0
        for a in range(n):
            if ahead[s, a] < 0.0:
                continue
            for w in range(len(ways)):
                k, r, then = ways[w, 0], ways[w, 1], s + ways[w, 2]
                if spare[s, k] < r:
                    continue
                for b in range(n):
                    if makes[w, a, b] >= 0.0 and back[then, b] >= 0.0:
                        left = min(makes[w, a, b] + back[then, b], total - forced[a])
                        if ahead[s, a] + left >= total - slack:
                            passes[a, b, k] = True
                            back[s, a] = max(back[s, a], left)
    return True


@njit(cache=True, nogil=True)
def _cut(label, weight, sender, start, reader, send, receive, inside):  # type: ignore[no-untyped-def]
    """The least of the weights of a set of nodes and the costs of messages that cross its border; `inside` is the set.

    Nodes with label 1 are in it, those with -1 are not. By maximum flow (Dinic 1970).
    """
    n, m = len(label), len(sender)
    vertex, vertices, arcs, value = np.empty(n, np.int64), 2, 0, np.int64(0)
    for v in range(n):
        inside[v] = label[v] == 1
        vertex[v] = vertices if label[v] == 0 else 0 if label[v] == 1 else 1
        vertices += label[v] == 0
    cost_in, cost_out = np.zeros(vertices, np.int64), np.zeros(vertices, np.int64)  # of being in the set, or not
    for v in range(n):
        if weight[v] > 0:
            cost_in[vertex[v]] += weight[v]
        else:
            value += weight[v]
            cost_out[vertex[v]] -= weight[v]
    most = 2 * (vertices + 2 * m + 2 * len(reader))
    first, to = np.full(vertices + 2 * m, -1), np.empty(most, np.int64)
    then, room = np.empty(most, np.int64), np.empty(most, np.int64)
    endless = np.int64(1) << 60
    for i in range(m):
        x, last = vertex[sender[i]], np.int64(-1)
        others, any_in, any_out = 0, False, False
        for e in range(start[i], start[i + 1]):
            y = vertex[reader[e]]
            any_in, any_out = any_in or y == 0, any_out or y == 1
            if y > 1:
                others, last = others + 1, y
        # it is sent if the sender is in the set and a reader is not; received if the sender is not, and a reader is
        sends, receives = send[i] > 0 and x != 1, receive[i] > 0 and x != 0
        if any_out and sends:
            cost_in[x] += send[i]
        if any_in and receives:
            cost_out[x] += receive[i]
        sends, receives = sends and not any_out and others > 0, receives and not any_in and others > 0
        if others == 1 and x < 2:
            cost_out[last] += send[i] * sends
            cost_in[last] += receive[i] * receives
        elif others == 1 and (sends or receives):
            to[arcs], then[arcs], room[arcs], first[x] = last, first[x], send[i] * sends, arcs
            arcs += 1
            to[arcs], then[arcs], room[arcs], first[last] = x, first[last], receive[i] * receives, arcs
            arcs += 1
        elif others > 1:
            for side in range(2):
                if not (sends if side == 0 else receives):
                    continue
                z, cost = vertices, send[i] if side == 0 else receive[i]
                vertices += 1
                to[arcs], then[arcs], room[arcs], first[x] = z, first[x], cost * (side == 0), arcs
                arcs += 1
                to[arcs], then[arcs], room[arcs], first[z] = x, first[z], cost * (side == 1), arcs
                arcs += 1
                for e in range(start[i], start[i + 1]):
                    y = vertex[reader[e]]
                    if y > 1:
                        to[arcs], then[arcs], room[arcs], first[z] = y, first[z], endless * (side == 0), arcs
                        arcs += 1
                        to[arcs], then[arcs], room[arcs], first[y] = z, first[y], endless * (side == 1), arcs
                        arcs += 1
    value += cost_in[0] + cost_out[1]
    for v in range(2, len(cost_in)):
        least = min(cost_in[v], cost_out[v])
        value += least
        if cost_in[v] != cost_out[v]:
            x, y = (v, 1) if cost_in[v] > least else (0, v)
            to[arcs], then[arcs], room[arcs], first[x] = y, first[x], cost_in[v] + cost_out[v] - 2 * least, arcs
            arcs += 1
            to[arcs], then[arcs], room[arcs], first[y] = x, first[y], 0, arcs
            arcs += 1
    # ---- the flow
    level, queue = np.empty(vertices, np.int64), np.empty(vertices, np.int64)
    at, path = np.empty(vertices, np.int64), np.empty(vertices, np.int64)
    while True:
        level[:] = -1
        level[0], queue[0], a, b = 0, 0, 0, 1
        while a < b and level[1] < 0:
            u = queue[a]
            a += 1
            e = first[u]
            while e >= 0:
                if room[e] > 0 and level[to[e]] < 0:
                    level[to[e]] = level[u] + 1
                    queue[b] = to[e]
                    b += 1
                e = then[e]
        if level[1] < 0:
            break
        at[:] = first[:vertices]
        u, depth = np.int64(0), 0
        while True:
            if u == 1:
                amount = endless
                for i in range(depth):
                    amount = min(amount, room[path[i]])
                value += amount
                back = 0
                for i in range(depth - 1, -1, -1):
                    room[path[i]] -= amount
                    room[path[i] ^ 1] += amount
                    if room[path[i]] == 0:
                        back = i
                depth = back
                u = to[path[back] ^ 1]
                continue
            e = at[u]
            while e >= 0 and not (room[e] > 0 and level[to[e]] == level[u] + 1):
                e = then[e]
            at[u] = e
            if e >= 0:
                path[depth] = e
                depth += 1
                u = to[e]
            elif u == 0:
                break
            else:
                level[u] = -1
                depth -= 1
                u = to[path[depth] ^ 1]
    for v in range(n):
        if label[v] == 0:
            inside[v] = level[vertex[v]] >= 0
    return value
