"""Which ideals stages within a limit lead to: the table of ideals, and the compiled search that fills it."""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

Whole = NDArray[np.int64]

BITS: Final = 46  # times and bytes are whole numbers below two to this power, so that sums are exact
NEVER: Final = 1 << (BITS + 1)  # above every limit; a few thousand of them still can be added up
_MOST_BYTES: Final = 1 << 28  # of ideals

DONE, REACHED, FULL, PAUSED = range(4)
_COUNT, _SIZE, _IDEAL, _LEVEL, _PENDING, _PART, _GATE, _STATE = range(8)
_WALK, _BEYOND = range(2)  # parts of what is done with an ideal: stages that end at gates, and those that go beyond
KIND, _REPLICAS, _SAMPLES, SHIFT, _LATENCY = range(5)  # of devices that a stage may get; the shift is of sets in use
_HELD, _WEIGHT, _KEEP = range(3)  # columns, -1 where there is none: of messages (bytes, then what is kept); of nodes


class TooManyIdeals(Exception):
    """There is no memory, or no time, for more."""


class Table:
    """The ideals so far, found by hash; those of one size are a list."""

    def __init__(self, n: int, words: int) -> None:
        self._row = -(-n // 64)
        self._words, self._n = words, n
        self.slot, self.key = np.full(4096, -1, np.int32), np.zeros(1024, np.uint64)
        self.member, self.used = np.zeros(1024 * self._row, np.uint64), np.zeros(1024 * words, np.uint64)
        self.following, self.first = np.full(1024, -1, np.int32), np.full(n + 1, -1, np.int32)
        self.state = np.zeros(_STATE, np.int64)
        self.state[[_COUNT, _LEVEL, _IDEAL, _PART]] = 1, -1, -1, _BEYOND
        self.used[0], self.first[0], self.slot[0] = 1, 0, 0  # nothing done, no device used
        self._work: tuple[NDArray[np.int64], ...] | None = None
        self.hash = np.zeros(1, np.uint64)
        self.now = np.zeros(self._row, np.uint64)
        self.moved = np.zeros(0, np.uint64)

    @property
    def arrays(self) -> tuple[NDArray[np.uint64] | NDArray[np.int32] | Whole, ...]:
        """What the kernel fills."""
        return (
            self.slot, self.key, self.member, self.used, self.following, self.first, self.state, self.hash, self.now,
        )  # fmt: skip

    @property
    def count(self) -> int:
        """How many ideals there are."""
        return int(self.state[_COUNT])

    @property
    def whole(self) -> int:
        """The ideal of all nodes."""
        return int(self.first[self._n])

    def work(
        self, messages: int, columns: int, own: int, ways: int, supplies: int
    ) -> tuple[NDArray[np.int64] | NDArray[np.uint64], ...]:
        """Where the kernel keeps what it is in the middle of."""
        if self._work is None:
            n, m = self._n, messages
            self._work = tuple(np.zeros(size, np.int64) for size in (n, n, n, m, m, n + 1, n + 1, n + 1, n + 1, n + 1))
            self._work += tuple(np.zeros(size, np.int64) for size in (columns, columns, own))
            self._work += (np.zeros(supplies, np.int64), *(np.zeros(ways, np.int64) for _ in range(4)))
            self._work += (np.zeros((ways, supplies), np.int64), np.zeros(n + 1, np.int64))
            self.moved = np.zeros((ways + 1) * self._words, np.uint64)
        return (*self._work, self.moved)

    def double(self) -> None:
        """Make room for as many ideals again."""
        if 2 * (self.key.nbytes + self.member.nbytes + self.used.nbytes + self.slot.nbytes) > _MOST_BYTES:
            raise TooManyIdeals
        for name in ("key", "member", "used", "following"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self.slot = np.full(2 * len(self.slot), -1, np.int32)
        _fill_slots(self.slot, self.key, self.count)

    def nodes(self, ideal: int) -> NDArray[np.bool_]:
        """[n] whether each node is in the ideal."""
        return unpacked(self.member[ideal * self._row : (ideal + 1) * self._row])[: self._n]

    def size(self, ideal: int) -> int:
        """How many nodes are in the ideal."""
        return int(self.nodes(ideal).sum())


def packed(flags: NDArray[np.bool_], words: int) -> NDArray[np.uint64]:
    """Flags as bits, in so many words."""
    bits = np.zeros(words * 64, np.bool_)
    bits[: len(flags)] = flags
    return np.packbits(bits, bitorder="little").view(np.uint64)


def unpacked(words: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Bits as flags."""
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little").astype(np.bool_)


# ---- the kernels -----------------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _fill_slots(slot, key, count):  # type: ignore[no-untyped-def]
    mask = np.uint64(len(slot) - 1)
    for i in range(count):
        at = key[i] & mask
        while slot[at] >= 0:
            at = (at + np.uint64(1)) & mask
        slot[at] = i


# The loop below calls these for each node: inlined, as passing their arrays would take longer than what they do.


@njit(inline="always")
def _enter(  # type: ignore[no-untyped-def]
    v, sign, sent_ptr, sent, read_ptr, read, sender, reader_ptr, phase, send, receive, own, inside, fate, inner, gone,
    full, sure, done,
):  # fmt: skip
    """Node v joins the stage (sign 1), or leaves it again (-1).

    `full` is what the stage exchanges as it is, `sure` what it does however it grows: with nodes that never join. What
    a message gives back (`stages.without`) counts as long as it may.
    """
    columns = send.shape[1]
    if sign < 0:
        inside[v] = 0
    for c in range(own.shape[1]):
        done[c] += sign * own[v, c]
    for x in range(sent_ptr[v], sent_ptr[v + 1]):
        m = sent[x]
        base = phase[m] * columns
        if inner[m] < reader_ptr[m + 1] - reader_ptr[m]:
            for c in range(columns):
                full[base + c] += sign * send[m, c]
                if send[m, c] < 0:
                    sure[base + c] += sign * send[m, c]
        if inner[m] > 0:
            for c in range(columns):
                full[base + c] -= sign * receive[m, c]
        if gone[m] > 0:
            for c in range(columns):
                sure[base + c] += sign * max(send[m, c], 0)
    for x in range(read_ptr[v], read_ptr[v + 1]):
        m = read[x]
        base = phase[m] * columns
        if sign < 0:
            inner[m] -= 1
        if inside[sender[m]]:
            if inner[m] + 1 == reader_ptr[m + 1] - reader_ptr[m]:
                for c in range(columns):
                    full[base + c] -= sign * send[m, c]
                    if send[m, c] < 0:
                        sure[base + c] -= sign * send[m, c]
        elif inner[m] == 0:
            for c in range(columns):
                full[base + c] += sign * receive[m, c]
            if fate[sender[m]]:
                for c in range(columns):
                    sure[base + c] += sign * receive[m, c]
        if sign > 0:
            inner[m] += 1
    if sign > 0:
        inside[v] = 1


@njit(inline="always")
def _rule_out(  # type: ignore[no-untyped-def]
    v, sign, sent_ptr, sent, read_ptr, read, sender, phase, send, receive, inside, fate, inner, gone, sure
):  # fmt: skip
    """Node v is never to join the stage (sign 1), or may again (-1): what it exchanges with the stage is then sure."""
    columns = send.shape[1]
    fate[v] = 1 if sign > 0 else 0
    for x in range(read_ptr[v], read_ptr[v + 1]):
        m = read[x]
        if sign < 0:
            gone[m] -= 1
        if gone[m] == 0 and inside[sender[m]]:
            for c in range(columns):
                sure[phase[m] * columns + c] += sign * max(send[m, c], 0)
        if sign > 0:
            gone[m] += 1
    for x in range(sent_ptr[v], sent_ptr[v + 1]):
        m = sent[x]
        if inner[m] > 0:
            for c in range(columns):
                sure[phase[m] * columns + c] += sign * receive[m, c]


@njit(inline="always")
def _is_gate(  # type: ignore[no-untyped-def]
    v, sent_ptr, sent, read_ptr, read, sender, reader_ptr, reader, send, receive, saves, now
):  # fmt: skip
    """Whether a later stage is no worse off without node v, if that joins an ideal; see gates.py."""
    one, good = np.uint64(1), True
    for c in range(send.shape[1]):
        saved = saves[v, c]
        for x in range(sent_ptr[v], sent_ptr[v + 1]):
            saved += min(send[sent[x], c], 0) - receive[sent[x], c]
        for x in range(read_ptr[v], read_ptr[v + 1]):
            m = read[x]
            if now[sender[m] >> 6] >> np.uint64(sender[m] & 63) & one == 0:
                saved -= max(send[m, c], 0)
            elif saved < 0:
                alone = True
                for y in range(reader_ptr[m], reader_ptr[m + 1]):
                    r = reader[y]
                    if r != v and now[r >> 6] >> np.uint64(r & 63) & one == 0:
                        alone = False
                        break
                if alone:
                    saved += receive[m, c]
        good = good and saved >= 0
    return good


@njit(inline="always")
def _load(way, options, p, moved, done, tariff, layout, phases, columns, overlap):  # type: ignore[no-untyped-def]
    """What a stage with these sums takes in a phase; the last phase has what replicas exchange."""
    kind, replicas = options[way, KIND], options[way, _REPLICAS]
    work, copies = done[kind * phases + p], np.int64(0)
    if tariff[kind] >= 0:
        copies = moved[p * columns + tariff[kind]]
    load = max(work, copies) if overlap else work + copies
    if replicas > 1 and load < NEVER:
        if p == phases - 1:
            if layout[_WEIGHT] >= 0:
                load += (replicas - 1) * min(done[layout[_WEIGHT] + kind], 4 * NEVER)
            load += replicas * options[way, _LATENCY]
        load //= replicas
    return load


@njit(inline="always")
def _fits(way, options, moved, done, scratch, tariff, columns, layout, room, cap, overlap):  # type: ignore[no-untyped-def]
    """Whether a stage with these sums keeps the limits on some devices."""
    phases, kinds, in_all, more = len(cap) - 1, len(tariff), np.int64(0), options[way, _SAMPLES] - 1
    held = done[kinds * phases] + scratch
    if layout[_KEEP] >= 0:
        held += more * done[layout[_KEEP]]
    for p in range(phases):
        load = _load(way, options, p, moved, done, tariff, layout, phases, columns, overlap)
        in_all += load
        if load > cap[p] or in_all > cap[phases]:
            return False
        if layout[_HELD] >= 0:
            held += moved[p * columns + layout[_HELD]]
            if layout[_KEEP] >= 0:
                held += more * moved[p * columns + layout[_HELD] + 1]
    return held <= room[options[way, KIND]]


@njit(cache=True, nogil=True)
def grow(  # type: ignore[no-untyped-def]
    inputs, after_ptr, after, sent_ptr, sent, read_ptr, read, sender, reader_ptr, phase, send, receive, own,
    scratch, tariff, layout, room, options, may_add, cap, left, overlap, zobrist, saves, reader,
    gate_of, forced, since, rest_of, gate_ptr, by_gate,
    slot, key, member, used, following, first, state, hash_now, now,
    waiting, inside, fate, inner, gone, queue, begin, at, end, most_scratch, full, sure, done, remaining, usable,
    active, passed, fitting, most_left, highest, moved, steps,
):  # fmt: skip
    """Goes on with the search: from each ideal, smallest first, to all that one more stage can reach.

    First, to all gates (gates.py). `passed` is the last gate, by devices, up to which stages need not end elsewhere.
    Then, for devices with the same such gate, to what is beyond it, by way of what all that has in common.

    A stage grows node by node: each level of the search takes a node from the queue of those whose inputs are there,
    and those that it passed over never join in the levels above. So every set is met once.
    """
    n, ways, row, words = len(inputs), len(options), len(now), len(may_add) // len(options)
    own_columns, potentials, columns = own.shape[1], len(remaining), send.shape[1]
    one, mask = np.uint64(1), np.uint64(len(slot) - 1)
    level = state[_LEVEL]
    for _ in range(steps):
        if state[_PENDING]:
            # ---- a new stage: which devices can have it, and where that leads
            target, hit, top = -1, False, most_scratch[max(level, 0)]
            for k in range(ways):
                fitting[k] = active[k]
                for j in range(potentials):
                    if remaining[j] - done[own_columns - potentials + j] > most_left[k, j]:
                        fitting[k] = 0
                if fitting[k]:
                    fitting[k] = _fits(k, options, full, done, top, tariff, columns, layout, room, cap, overlap)
                    hit = hit or fitting[k]
            for x in range(end[level] if hit and level >= 0 else 0):
                # another node may as well be in the stage too, where it fits: a gate of one
                v = queue[x]
                if not inside[v] and _is_gate(
                    v, sent_ptr, sent, read_ptr, read, sender, reader_ptr, reader, send, receive, saves, now
                ):  # fmt: skip
                    _enter(
                        v, 1, sent_ptr, sent, read_ptr, read, sender, reader_ptr, phase, send, receive, own, inside,
                        fate, inner, gone, full, sure, done,
                    )  # fmt: skip
                    for k in range(ways):
                        if fitting[k] and _fits(
                            k, options, full, done, max(top, scratch[v]), tariff, columns, layout, room, cap, overlap
                        ):  # fmt: skip
                            fitting[k] = 0
                    _enter(
                        v, -1, sent_ptr, sent, read_ptr, read, sender, reader_ptr, phase, send, receive, own, inside,
                        fate, inner, gone, full, sure, done,
                    )  # fmt: skip
            hit = False
            for k in range(ways):
                if fitting[k]:
                    if not hit:
                        hit = True
                        for w in range(words):
                            moved[ways * words + w] = 0
                    for w in range(words):
                        moved[ways * words + w] |= moved[k * words + w]
            if hit:
                spot = hash_now[0] & mask
                while slot[spot] >= 0:
                    target = slot[spot]
                    same = key[target] == hash_now[0]
                    for w in range(row):
                        same = same and member[target * row + w] == now[w]
                    if same:
                        break
                    target = -1
                    spot = (spot + one) & mask
                fresh = False
                for w in range(words):
                    bits = moved[ways * words + w]
                    if target >= 0:
                        bits &= ~used[target * words + w]
                    keep = np.uint64(0)
                    if bits != 0:
                        for b in range(min(64, left.shape[1] - w * 64)):
                            if bits >> np.uint64(b) & one:
                                fits = True
                                for j in range(potentials):
                                    rest = remaining[j] - done[own_columns - potentials + j]
                                    fits = fits and rest <= left[j, w * 64 + b]
                                if fits:
                                    keep |= one << np.uint64(b)
                    moved[ways * words + w] = keep
                    fresh = fresh or keep != 0
                if fresh:
                    if target < 0:
                        target = state[_COUNT]
                        if target == len(key):
                            state[_LEVEL] = level
                            return FULL
                        state[_COUNT] += 1
                        slot[spot] = target
                        key[target] = hash_now[0]
                        size = np.int64(0)
                        for w in range(row):
                            member[target * row + w] = now[w]
                        for v in range(n):
                            size += np.int64(now[v >> 6] >> np.uint64(v & 63) & one)
                        for w in range(words):
                            used[target * words + w] = 0
                        following[target] = first[size]
                        first[size] = target
                    for w in range(words):
                        used[target * words + w] |= moved[ways * words + w]
                    if first[n] == target:
                        return REACHED
            state[_PENDING] = 0
        elif level < 0:
            # ---- what comes next: a larger gate, devices that were not yet looked at, or the next ideal
            gate = np.int64(NEVER)
            if state[_PART] == _WALK and state[_GATE] + 1 < len(since):
                for k in range(ways):
                    if usable[k] and _fits(
                        k, options, sure, done, most_scratch[0], tariff, columns, layout, room, cap, overlap
                    ):  # fmt: skip
                        gate = state[_GATE] + 1
            walks = gate < NEVER
            if not walks:
                if state[_PART] == _WALK:
                    state[_PART], state[_GATE] = _BEYOND, -2
                    for k in range(ways):
                        # what is left after a smaller gate is too much, whatever the devices are by then
                        for j in range(potentials if usable[k] else 0):
                            while passed[k] + 1 < len(since) and rest_of[j, passed[k] + 1] > most_left[k, j]:
                                passed[k] += 1
                for k in range(ways):
                    if usable[k] and passed[k] > state[_GATE]:
                        gate = min(gate, passed[k])
            if gate == NEVER:
                ideal = following[state[_IDEAL]] if state[_IDEAL] >= 0 else first[0]
                while ideal < 0:
                    state[_SIZE] += 1
                    if state[_SIZE] >= n:
                        state[_LEVEL] = -1
                        return DONE
                    ideal = first[state[_SIZE]]
                state[_IDEAL] = ideal
                for k in range(ways):
                    usable[k] = 0
                    words_off, bits_off = options[k, SHIFT] // 64, np.uint64(options[k, SHIFT] % 64)
                    for w in range(words):
                        bits = np.uint64(0)
                        if w - words_off >= 0:
                            x = w - words_off
                            bits = (used[ideal * words + x] & may_add[k * words + x]) << bits_off
                            if bits_off > 0 and x > 0:
                                bits |= (used[ideal * words + x - 1] & may_add[k * words + x - 1]) >> (
                                    np.uint64(64) - bits_off
                                )
                        moved[k * words + w] = bits
                        if bits != 0:
                            usable[k] = 1
                    for j in range(potentials):
                        most_left[k, j] = -1
                        for b in range(left.shape[1] if usable[k] else 0):
                            if moved[k * words + (b >> 6)] >> np.uint64(b & 63) & one:
                                most_left[k, j] = max(most_left[k, j], left[j, b])
            ideal = state[_IDEAL]
            if not walks:
                # the ideal as it is
                for w in range(row):
                    now[w] = member[ideal * row + w]
                hash_now[0] = key[ideal]
                for j in range(potentials):
                    remaining[j] = 0
                for m in range(len(sender)):
                    inner[m] = gone[m] = 0
                for v in range(n):
                    inside[v] = 0
                    waiting[v] = inputs[v]
                for c in range(own_columns):
                    done[c] = 0
                for c in range(len(full)):
                    full[c] = sure[c] = 0
                begin[0] = most_scratch[0] = 0
                highest[0] = -1
                for v in range(n):
                    fate[v] = np.int64(now[v >> 6] >> np.uint64(v & 63) & one)
                    if fate[v]:
                        if len(since) > 0:
                            highest[0] = max(highest[0], gate_of[v])
                        for x in range(after_ptr[v], after_ptr[v + 1]):
                            waiting[after[x]] -= 1
                        for x in range(read_ptr[v], read_ptr[v + 1]):
                            gone[read[x]] += 1
                    else:
                        for j in range(potentials):
                            remaining[j] += own[v, own_columns - potentials + j]
            if gate == NEVER:
                state[_PART], state[_GATE] = _WALK, max(highest[0] - 1, -1)
                for k in range(ways):
                    passed[k] = state[_GATE]
                    active[k] = usable[k]
                continue
            # all of the gate joins; or all that is in every ideal beyond it
            state[_GATE], grows, last = gate, False, np.int64(0)
            for x in range(begin[0] if walks else 0, gate_ptr[gate + 1] if walks else n):
                v = by_gate[x]
                if not fate[v] and (walks or forced[v] <= gate):
                    _enter(
                        v, 1, sent_ptr, sent, read_ptr, read, sender, reader_ptr, phase, send, receive, own, inside,
                        fate, inner, gone, full, sure, done,
                    )  # fmt: skip
                    now[v >> 6] ^= one << np.uint64(v & 63)
                    hash_now[0] ^= zobrist[v]
                    most_scratch[0] = max(most_scratch[0], scratch[v])
                    highest[0] = max(highest[0], gate_of[v])
                    for y in range(after_ptr[v], after_ptr[v + 1]):
                        waiting[after[y]] -= 1
                    grows = True
            state[_PENDING] = grows
            if walks:
                begin[0] = gate_ptr[gate + 1]
                for k in range(ways):
                    if not grows or (usable[k] and since[gate] <= passed[k] and _fits(
                        k, options, full, done, most_scratch[0], tariff, columns, layout, room, cap, overlap
                    )):  # fmt: skip
                        passed[k] = gate
                continue
            fits = not grows
            for k in range(ways):
                active[k] = usable[k] and passed[k] == gate
                if active[k] and not fits:
                    fits = _fits(
                        k, options, sure, done, most_scratch[0], tariff, columns, layout, room, cap, overlap
                    )  # fmt: skip
            for v in range(n):
                if fits and not fate[v] and not inside[v] and waiting[v] == 0:
                    queue[last] = v
                    last += 1
            level = begin[0] = at[0] = 0
            end[0] = last
            state[_PENDING] = grows and fits and highest[0] > gate
        else:
            # ---- the next node joins; or, where none is left, the last one leaves and is ruled out for those before
            joins = at[level] < end[level]
            if not joins:
                for x in range(begin[level], end[level]):
                    _rule_out(
                        queue[x], -1, sent_ptr, sent, read_ptr, read, sender, phase, send, receive, inside, fate, inner,
                        gone, sure,
                    )  # fmt: skip
                level -= 1
                if level < 0:
                    continue
            v, sign = queue[at[level]], 1 if joins else -1
            _enter(
                v, sign, sent_ptr, sent, read_ptr, read, sender, reader_ptr, phase, send, receive, own, inside, fate,
                inner, gone, full, sure, done,
            )  # fmt: skip
            now[v >> 6] ^= one << np.uint64(v & 63)
            hash_now[0] ^= zobrist[v]
            last = end[level]
            for x in range(after_ptr[v], after_ptr[v + 1]):
                waiting[after[x]] -= sign
                if waiting[after[x]] == 0:
                    queue[last] = after[x]
                    last += 1
            if joins:
                top, fits = max(most_scratch[level], scratch[v]), False
                for k in range(ways):
                    if active[k] and not fits:
                        fits = _fits(k, options, sure, done, top, tariff, columns, layout, room, cap, overlap)
                begin[level + 1] = at[level + 1] = at[level] + 1 if fits else last
                end[level + 1], most_scratch[level + 1] = last, top
                highest[level + 1] = max(highest[level], gate_of[v])
                level += 1
                state[_PENDING] = fits and highest[level] > state[_GATE]
            else:
                _rule_out(
                    v, 1, sent_ptr, sent, read_ptr, read, sender, phase, send, receive, inside, fate, inner, gone, sure
                )
                at[level] += 1
    state[_LEVEL] = level
    return PAUSED


@njit(cache=True, nogil=True)
def last_stage(  # type: ignore[no-untyped-def]
    sent_ptr, sent, read_ptr, read, sender, reader_ptr, phase, send, receive, own, scratch, tariff, layout, room,
    options, may_add, cap, overlap, member, used, count, target, in_use, inside, never, inner, full, sure, done, load,
):  # fmt: skip
    """(the ideal before, which devices) of a stage with the least load that leads to an ideal; `load` is set."""
    n, ways, phases, one, words = len(inside), len(options), len(load), np.uint64(1), len(may_add) // len(options)
    row, columns = (n + 63) // 64, send.shape[1]
    best, best_way, least = -1, -1, np.int64(0)
    for ideal in range(count):
        below = ideal != target
        for w in range(row):
            below = below and member[ideal * row + w] & ~member[target * row + w] == 0
        if not below:
            continue
        top, summed = np.int64(0), False
        for k in range(ways):
            u = in_use - options[k, SHIFT]
            if u < 0:
                continue
            w, bit = u >> 6, np.uint64(u & 63)
            if (used[ideal * words + w] & may_add[k * words + w]) >> bit & one == 0:
                continue
            if not summed:
                summed = True
                for m in range(len(inner)):
                    inner[m] = 0
                for c in range(len(full)):
                    full[c] = 0
                for c in range(len(done)):
                    done[c] = 0
                for v in range(n):
                    inside[v] = 0
                for v in range(n):
                    if (member[target * row + (v >> 6)] ^ member[ideal * row + (v >> 6)]) >> np.uint64(v & 63) & one:
                        top = max(top, scratch[v])
                        _enter(
                            v, 1, sent_ptr, sent, read_ptr, read, sender, reader_ptr, phase, send, receive, own, inside,
                            never, inner, never, full, sure, done,
                        )  # fmt: skip
            if _fits(k, options, full, done, top, tariff, columns, layout, room, cap, overlap):
                total = np.int64(0)
                for p in range(phases):
                    total += _load(k, options, p, full, done, tariff, layout, phases, columns, overlap)
                if best < 0 or total < least:
                    best, best_way, least = ideal, k, total
                    for p in range(phases):
                        load[p] = _load(k, options, p, full, done, tariff, layout, phases, columns, overlap)
    return best, best_way
