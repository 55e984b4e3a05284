"""What devices and channels carry in a full pipeline, by unit and by message, and a compiled search over it.

The simulator is the judge; here the same charges (simulator/throughput.py) are laid out for methods that reason about
one unit at a time. Units that no good plan can separate are fused into one item.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from placewise.graph import Floats, Ints
from placewise.planners.repair import bytes_needed
from placewise.problem import Problem
from placewise.simulator.arrays import channels_of_links
from placewise.simulator.throughput import held_bytes, sent_share

Whole = NDArray[np.int64]
Flags = NDArray[np.bool_]

_SWAPS: Final = 0.3  # share of moves that exchange two items
_NEAR: Final = 0.7  # share of moves to the device of a neighbour
_TRIES: Final = 8  # to find an item to swap with
_LARGEST: Final = 6  # pieces have fewer items than 2 to this power
_TIDY: Final = 0.05  # of each second of load counts even where the target is kept


@dataclass(frozen=True, eq=False)
class Loads:
    """Items and the messages between them. Item `reader[i]` reads message `message[i]`.

    Messages of one sender to the same readers are one, where that charges the same.
    """

    problem: Problem
    item: Whole  # [units] the item of each unit
    seconds: Floats  # [phases, items, D] zero where the item may not run; one phase where phases are added up
    may: Flags  # [items, D]
    need: Floats  # [items] bytes
    scratch: Floats  # [items] bytes; the largest on a device counts
    sender: Whole  # [M] items
    phase: Whole  # [M]
    number: Floats  # [M] of transfers in the message, each with the link's latency
    bytes: Floats  # [M] of all of them
    copy: Floats  # [M] bytes that whoever receives it holds
    receives: Flags  # [M] whether whoever reads it is charged, and whoever sends it for each of them
    sends: Flags  # [M] whether the sender is charged for the longest, once
    message: Whole  # [R] rising
    reader: Whole  # [R] items

    @property
    def items(self) -> int:
        """How many decisions there are."""
        return len(self.may)

    @cached_property
    def times(self) -> Floats:
        """[M, D, D] seconds of each message over each link."""
        cluster = self.problem.cluster
        return self.number[:, None, None] * cluster.latency + self.bytes[:, None, None] * cluster.seconds_per_byte

    @cached_property
    def starts(self) -> Whole:
        """[M + 1] where each message's readers begin."""
        return np.searchsorted(self.message, np.arange(len(self.sender) + 1))

    @cached_property
    def pays(self) -> Flags:
        """[D] whether a device is charged for transfers."""
        return np.array([device.copies for device in self.problem.cluster.devices])

    def placement(self, device: NDArray[Any]) -> Ints:
        """The device of each op, from the device of each item."""
        row: Ints = device[self.item][self.problem.unit].astype(np.int32)
        return row

    @cached_property
    def usable(self) -> Whole:
        """Devices on which some item may run."""
        return np.flatnonzero(self.may.any(axis=0))

    def devices(self, placement: Ints) -> Ints:
        """The device of each item, from the device of each op."""
        device = np.zeros(self.items, np.int32)
        device[self.item] = placement[self.problem.first_of_unit]
        return device


def loads(problem: Problem, item: Whole | None = None) -> Loads:
    """The loads of a problem, units or what they are fused into."""
    graph, execution = problem.graph, problem.execution
    item = np.arange(problem.num_units) if item is None else item
    items = int(item.max(initial=-1)) + 1
    phases = 2 if execution.pipeline == "gpipe" and (graph.phase > 0).any() else 1
    phase_of_op = np.minimum(graph.phase, phases - 1).astype(np.int64)
    of_op = item[problem.unit]

    seconds = np.zeros((phases, items, problem.num_devices))
    np.add.at(seconds, (phase_of_op, of_op), np.where(problem.allowed, problem.seconds, 0.0))
    may = np.ones((items, problem.num_devices), np.bool_)
    np.logical_and.at(may, of_op, problem.allowed)
    scratch = np.zeros(items)
    if execution.memory == "live":
        np.maximum.at(scratch, of_op, graph.scratch)

    # A transfer is a tensor and its readers; one edge of it, where each edge is a transfer. Where sends are staged, the
    # sender still pays once for the tensor.
    tensor, sender = graph.edge_tensor.astype(np.int64), of_op[graph.edge_producer]
    reader = of_op[graph.consumers]
    away = sender != reader
    tensor, reader = tensor[away], reader[away]
    per_edge = execution.sends == "edge"
    families = [(tensor, not per_edge, True)] if not per_edge or execution.staged else []
    families += [(graph.num_tensors + np.arange(len(tensor)), True, not execution.staged)] if per_edge else []
    found: dict[tuple[Any, ...], list[float]] = {}
    often, copied = sent_share(problem), held_bytes(problem)[1]
    for transfer, receives, sends in families:
        for one in np.split(np.arange(len(tensor)), np.flatnonzero(np.diff(transfer)) + 1) if len(tensor) else ():
            t = tensor[one[0]]
            producer, size = graph.tensor_producer[t], float(often[t] * graph.tensor_bytes[t])
            # The longest of sums is not the sum of the longest: where that matters, only equal sizes are added up.
            mark = (float(often[t]), size) if execution.staged and sends else ()
            readers = tuple(np.unique(reader[one]).tolist())
            key = (int(of_op[producer]), int(phase_of_op[producer]), receives, sends, mark, readers)
            total = found.setdefault(key, [0.0, 0.0, 0.0])
            total[0] += float(often[t])
            total[1] += size
            total[2] += float(copied[t]) * receives
    keys, totals = list(found), np.array(list(found.values())).reshape(-1, 3)
    return Loads(
        problem=problem, item=item, seconds=seconds, may=may, scratch=scratch,
        need=np.bincount(item, bytes_needed(problem), items).astype(np.float64),
        sender=np.array([key[0] for key in keys], np.int64), phase=np.array([key[1] for key in keys], np.int64),
        number=totals[:, 0], bytes=totals[:, 1], copy=totals[:, 2],
        receives=np.array([key[2] for key in keys], np.bool_), sends=np.array([key[3] for key in keys], np.bool_),
        message=np.repeat(np.arange(len(keys)), [len(key[5]) for key in keys]),
        reader=np.array([unit for key in keys for unit in key[5]], np.int64),
    )  # fmt: skip


def fused(given: Loads, value: float) -> Loads:
    """The same with what no plan below this value can separate in one item, and items kept off where they alone exceed.

    A link is out of the question if a message and its end, where that pays, or a channel, take longer than the value.
    """
    value *= 1 + 1e-9  # more than rounding amounts to
    while True:
        problem, links = given.problem, ~np.eye(given.problem.num_devices, dtype=np.bool_)
        may = given.may & (given.seconds.sum(axis=0) <= value)
        if not may.any(axis=1).all():
            return given
        given = given if (may == given.may).all() else replace(given, may=may)
        # What either end carries besides, where that is added up.
        alone = np.where(problem.execution.overlap, 0.0, given.seconds.sum(axis=0))
        ends, times = (given.sender[given.message], given.reader), given.times[given.message]
        blocked = given.pays[:, None] & (times + alone[ends[0]][:, :, None] > value)
        blocked |= given.pays[None, :] & (times + alone[ends[1]][:, None, :] > value)
        if problem.execution.contention == "channel":
            blocked |= times > value
        possible = may[ends[0]][:, :, None] & may[ends[1]][:, None, :] & links
        together = given.receives[given.message] & ~(possible & ~blocked).any(axis=(1, 2))
        if not together.any():
            return given
        pairs = coo_array((np.ones(int(together.sum())), (ends[0][together], ends[1][together])), (given.items,) * 2)
        label = connected_components(pairs, directed=False)[1].astype(np.int64)
        given = loads(problem, label[given.item])


# ---- a search --------------------------------------------------------------------------------------------------------


class Annealer:
    """Simulated annealing over items: how far loads exceed a target is what it minimises.

    Kirkpatrick, Gelatt, Vecchi 1983, doi:10.1126/science.220.4598.671. Moves are those of local search: an item, a
    connected piece, two items that swap.
    """

    def __init__(self, given: Loads) -> None:
        problem, cluster, execution = given.problem, given.problem.cluster, given.problem.execution
        via_ptr, via = channels_of_links(problem)
        # What is received is counted; for scratch space, as much as any item needs is set aside.
        self._tables = walk_tables(
            given, given.seconds, given.may, given.times, given.phase,
            np.maximum(problem.capacity - given.scratch.max(initial=0.0), 1e-9), given.pays,
            (via_ptr.astype(np.int64), via.astype(np.int64), len(cluster.channels) * (len(via) > 0)),
            execution.staged, problem.max_devices or problem.num_devices,
        )  # fmt: skip

    def walk(self, device: Ints, target: float, hot: float, cold: float, steps: int, seed: int) -> tuple[Ints, float]:
        """(devices, value) of the best on a walk whose temperature falls from hot to cold, in seconds.

        `device` is where the walk begins, and then where it ends.
        """
        return walk(self._tables, device, target, hot, cold, steps, seed)


def walk(
    tables: tuple[Any, ...], device: Ints, target: float, hot: float, cold: float, steps: int, seed: int
) -> tuple[Ints, float]:
    """See `Annealer.walk`; tables are those of `walk_tables`."""
    best = device.copy()
    value = _anneal(*tables, device, best, target, hot, cold, steps, seed)
    return best, float(value)


def walk_tables(
    given: Loads, seconds: Floats, may: Flags, times: Floats, phase: Whole, room: Floats, pays: Flags,
    channels: tuple[Whole, Whole, int], staged: bool, most_devices: int,
) -> tuple[Any, ...]:  # fmt: skip
    """What the walk reads: the items and messages of `given`, on devices that may be other than the problem's."""
    touches = np.concatenate([given.sender, given.reader])
    touched = np.concatenate([np.arange(len(given.sender)), given.message])
    order = np.lexsort((touched, touches))
    execution = given.problem.execution
    return (
        seconds, may, given.need, given.sender, phase, times, given.copy, given.receives, given.sends,
        given.starts, given.reader, np.searchsorted(touches[order], np.arange(given.items + 1)), touched[order],
        *channels, pays, room, execution.overlap, staged, most_devices,
    )  # fmt: skip


@njit(cache=True, nogil=True, forceinline=True)
def _move(  # type: ignore[no-untyped-def]
    w, y, device, seconds, need, sender, phase, times, size, receives, sends, touch_ptr, touched, via_ptr, via, pays,
    overlap, staged, count, load, used, held,
):  # fmt: skip
    """Put item w, where it is on no device yet (-1), on device y; or take it from device y, where it is."""
    devices = len(used)
    shift = devices if overlap else 0  # transfers have rows of their own
    arrives = device[w] < 0
    if arrives:
        device[w] = y
    for j in range(touch_ptr[w], touch_ptr[w + 1]):
        m = touched[j]
        row, a = phase[m], device[sender[m]]
        # What the message costs after the change, less before it. Whoever is on no device costs nothing.
        for present in range(2):
            if sender[m] != w and present == 1:
                count[m, y] += 1 if arrives else -1
            if a < 0 or (sender[m] == w and present == (0 if arrives else 1)):
                continue
            sign, longest = (1.0 if present == 1 else -1.0), 0.0
            for d in range(devices):
                if d == a or count[m, d] == 0:
                    continue
                time = times[m, a, d]
                longest = max(longest, time)
                if not receives[m]:
                    continue
                if pays[d]:
                    load[row, shift + d] += sign * time
                if pays[a] and not staged:
                    load[row, shift + a] += sign * time
                used[d] += sign * size[m]
                link = a * devices + d
                for v in range(via_ptr[link], via_ptr[link + 1]):
                    load[row, shift + devices + via[v]] += sign * time
            if staged and sends[m] and pays[a]:
                load[row, shift + a] += sign * longest
    change = 1.0 if arrives else -1.0
    for p in range(seconds.shape[0]):
        load[p, y] += change * seconds[p, w, y]
    used[y] += change * need[w]
    held[y] += 1 if arrives else -1
    if not arrives:
        device[w] = -1


@njit(cache=True, nogil=True)
def _anneal(  # type: ignore[no-untyped-def]
    seconds, may, need, sender, phase, times, size, receives, sends, starts, reader, touch_ptr, touched,
    via_ptr, via, channels, pays, room, overlap, staged, most_devices,
    start, best, target, hot, cold, steps, seed,
):  # fmt: skip
    """The least value met; see `Annealer.walk`."""
    phases, items, devices = seconds.shape
    rows = devices * (2 if overlap else 1) + channels
    np.random.seed(seed)
    count = np.zeros((len(sender), devices), np.int64)
    load, used, held = np.zeros((phases, rows)), np.zeros(devices), np.zeros(devices, np.int64)
    device = np.full(items, -1)
    piece, origin, stamp = np.zeros(items + 1, np.int64), np.zeros(items + 1, np.int64), np.zeros(items, np.int64)
    highest, share = np.zeros(phases), np.ones(phases)
    energy, least, temperature = np.inf, np.inf, hot
    fall = (cold / hot) ** (1.0 / max(1, steps))
    for step in range(steps + 1):
        # Which items go where: at first all to where they start, then a connected piece, or two items that swap.
        moved, b, swap = 0, 0, -1
        if step == 0:
            moved = items
            for w in range(items):
                piece[w], origin[w] = w, -1
        else:
            temperature *= fall
            u, b = np.random.randint(items), np.random.randint(devices)
            a = device[u]
            if touch_ptr[u + 1] > touch_ptr[u] and np.random.random() < _NEAR:
                m = touched[np.random.randint(touch_ptr[u], touch_ptr[u + 1])]
                other = np.random.randint(starts[m] - 1, starts[m + 1])
                b = device[sender[m]] if other < starts[m] else device[reader[other]]
            if a == b or not may[u, b]:
                continue
            piece[0], stamp[u], moved = u, step, 1
            if np.random.random() < _SWAPS:
                for _ in range(_TRIES):
                    w = np.random.randint(items)
                    if device[w] == b and may[w, a]:
                        piece[1], swap, moved = w, 1, 2
                        break
            else:
                most = 1 << np.random.randint(_LARGEST)
                at = 0
                while at < moved and moved < most:
                    for j in range(touch_ptr[piece[at]], touch_ptr[piece[at] + 1]):
                        m = touched[j]
                        for r in range(starts[m] - 1, starts[m + 1]):
                            w = sender[m] if r < starts[m] else reader[r]
                            if stamp[w] != step and device[w] == a and may[w, b] and moved < most:
                                piece[moved], stamp[w] = w, step
                                moved += 1
                    at += 1
                if most_devices < devices and held[b] == 0 and held[a] > moved and (held > 0).sum() >= most_devices:
                    continue
        # Go there; and back, if it is not accepted.
        for attempt in range(2):
            for i in range(moved):
                w = piece[i]
                if attempt == 0 and step > 0:
                    origin[i] = device[w]
                y = origin[i] if attempt == 1 else (start[w] if step == 0 else (origin[0] if i == swap else b))
                for leaves in range(2):
                    if (leaves == 0 and device[w] >= 0) or leaves == 1:
                        _move(w, device[w] if leaves == 0 else y, device, seconds, need, sender, phase, times, size,
                              receives, sends, touch_ptr, touched, via_ptr, via, pays, overlap, staged, count,
                              load, used, held)  # fmt: skip
            if attempt == 1:
                break
            if step == 0:
                for p in range(phases):
                    highest[p] = load[p].max()
                if highest.sum() > 0.0:
                    share = highest / highest.sum()  # of each phase in the target
            found, value, fits = 0.0, 0.0, True
            for p in range(phases):
                top = 0.0
                for r in range(rows):
                    top = max(top, load[p, r])
                    found += max(0.0, load[p, r] - share[p] * target) + _TIDY * load[p, r]
                value += top
            for d in range(devices):
                if used[d] > room[d]:
                    found += target * (used[d] / room[d] - 1.0 + 1e-3)
                    fits = False
            if fits and value < least:
                least = value
                for w in range(items):
                    best[w] = device[w]
            if found <= energy or np.random.random() < np.exp((energy - found) / temperature):
                energy = found
                break
    for w in range(items):
        start[w] = device[w]
    return least
