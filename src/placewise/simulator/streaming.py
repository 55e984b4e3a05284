"""Weights that may be at home elsewhere: what room for them, the links and the devices together prove.

A unit computes where it is, and each stored tensor that it reads is at home there or fetched in every run. No run ends
before any of its *loads*: the ops of a path one after another, the ops of each device, the copies on each channel
(where one thing runs at a time: all of them in a row). How small the largest load can be, if everything could be cut
up, is a linear programme. Units that look alike are one in it, so that a model of many layers has a small one.

As for the area, the solver is only asked for prices: of each load (they sum to one), of a byte on each device, and of
having a tensor at a device where a unit reads it. Any prices prove a bound: each unit is put where it costs least, each
tensor is fetched where that costs less than it is worth, and what is left, less the worth of the memory, no plan beats.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from placewise.graph import Floats, Ints
from placewise.problem import Problem

_LARGEST: Final = 20_000  # variables of the programme
_ROUNDS: Final = 3  # of telling units apart by what they read, or who reads them


@dataclass(frozen=True, eq=False)
class Streaming:
    """What stands behind the bound, so that it can be worked out again. Prices are of what the text above says."""

    seconds: float  # that no plan beats
    path: tuple[int, ...]  # ops
    load: Floats  # [loads] the path, each device, each channel; or one of everything
    byte: Floats  # [D] seconds
    tensor: Ints  # [E] a stored tensor
    reader: Ints  # [E] and a unit that reads it
    having: Floats  # [E, D] the one where the other is


def streaming(problem: Problem, path: list[int], may: NDArray[np.bool_], slack: float) -> Streaming | None:
    """The bound by one path of ops; `may` [units, D] says where a unit is allowed and fits. None if it has no say."""
    asked = _question(problem, path, may)
    prices = _prices(asked) if len(asked.reader) else None
    if prices is None:
        return None
    load, byte, having = prices
    seconds = _proved(asked, load, byte, having, slack)
    tensor = np.flatnonzero(problem.graph.is_stored[problem.graph.tensor_producer])[asked.tensor].astype(np.int32)
    return Streaming(seconds, tuple(path), load, byte, tensor, asked.reader, having)


@dataclass(frozen=True, eq=False)
class _Question:
    """Loads are numbered: the path, then each device, then each channel; or there is one alone, of everything."""

    seconds: Floats  # [U, D] zero where a unit may not run
    along: Floats  # [U, D] of its ops on the path
    resident: Floats  # [U] bytes
    may: NDArray[np.bool_]  # [U, D]
    room: Floats  # [D] bytes
    tensor: Ints  # [E] for each unit that reads a stored tensor of another: which
    reader: Ints  # [E] and the unit
    owner: Ints  # [S] the unit that a stored tensor is at home with
    copy: Floats  # [S, D, D] seconds from device to device
    busy: Floats  # [loads, D, D] 1 where a copy from device to device is part of the load
    sequential: bool

    def cost(self, load: Floats) -> Floats:
        """[U, D] seconds of units on devices, at these prices of loads."""
        of_devices = load[1 : 1 + len(self.room)]
        priced: Floats = self.seconds * load[0] if self.sequential else self.along * load[0] + self.seconds * of_devices
        return priced


def _question(problem: Problem, path: list[int], may: NDArray[np.bool_]) -> _Question:
    graph, cluster, unit, devices = problem.graph, problem.cluster, problem.unit, problem.num_devices
    sequential = problem.execution.concurrency == "sequential"
    seconds = np.where(problem.allowed, np.where(graph.is_stored[:, None], 0.0, problem.seconds), 0.0)
    on_path = np.zeros((problem.num_ops, 1))
    on_path[path] = 1.0
    stored = np.flatnonzero(graph.is_stored[graph.tensor_producer])
    number = np.full(graph.num_tensors, -1)
    number[stored] = np.arange(len(stored))
    reads = np.flatnonzero(
        (number[graph.edge_tensor] >= 0) & (unit[graph.edge_producer] != unit[graph.consumers])
    )  # fmt: skip
    pairs = np.unique(np.stack([number[graph.edge_tensor[reads]], unit[graph.consumers[reads]]]), axis=1)
    busy = np.ones((1, devices, devices))
    if not sequential:
        busy = np.zeros((1 + devices + len(cluster.channels), devices, devices))
        for (a, b), channels in cluster.channels_of.items() if problem.execution.contention == "channel" else ():
            busy[[1 + devices + c for c in channels], a, b] = 1.0
    return _Question(
        seconds=problem.per_unit(seconds), along=problem.per_unit(seconds * on_path),
        resident=problem.per_unit(graph.resident_bytes), may=may, room=problem.capacity,
        tensor=pairs[0].astype(np.int32), reader=pairs[1].astype(np.int32), owner=unit[graph.tensor_producer[stored]],
        copy=cluster.latency + graph.tensor_bytes[stored][:, None, None] * cluster.seconds_per_byte,
        busy=busy, sequential=sequential,
    )  # fmt: skip


def _proved(asked: _Question, load: Floats, byte: Floats, having: Floats, slack: float) -> float:
    """Seconds that no plan beats, by these prices."""
    cost = asked.cost(load) + byte * asked.resident[:, None]
    np.add.at(cost, asked.reader, having)
    worth = np.zeros((len(asked.owner), len(asked.room)))  # of having a tensor somewhere, for all that read it there
    np.add.at(worth, asked.tensor, having)
    fetched = np.minimum(0.0, asked.copy * np.tensordot(load, asked.busy, 1) - worth[:, None, :])
    fetched[:, np.arange(len(asked.room)), np.arange(len(asked.room))] = -worth  # at home it is there for nothing
    np.add.at(cost, asked.owner, fetched.sum(axis=2))
    limited = np.isfinite(asked.room)
    memory = float((byte[limited] * asked.room[limited]).sum())
    least = np.where(asked.may, cost, np.inf).min(axis=1)
    rounding = slack * float(np.abs(least).sum() + memory + 2.0 * worth.sum())
    return max(0.0, float(least.sum()) - memory - rounding)


def _prices(asked: _Question) -> tuple[Floats, Floats, Floats] | None:
    """Prices (of loads, bytes, having) that prove much, from the programme over classes of units.

    None where that is too large or unsolved.
    """
    from scipy import sparse
    from scipy.optimize import linprog

    devices, loads = len(asked.room), len(asked.busy)
    kind, unit_of, units_of = _alike(_looks(asked))
    sort, tensor_of, tensors_of = _alike(np.stack([kind[asked.owner], asked.copy.max(axis=(1, 2))], axis=1))
    pair, pair_of, pairs_of = _alike(np.stack([sort[asked.tensor], kind[asked.reader]], axis=1))
    here = np.arange(len(unit_of) * devices).reshape(-1, devices)  # variables: the share of a class that is on a device
    fetch = here.size + np.arange(len(tensor_of) * devices**2).reshape(-1, devices, devices)  # and fetched, from and to
    last = here.size + fetch.size  # and the largest load
    if last > _LARGEST:
        return None
    whole = float(asked.seconds.max(axis=1).sum()) or 1.0  # for numbers that suit the solver
    stored = float(asked.resident.sum()) or 1.0
    limited = np.flatnonzero(np.isfinite(asked.room))
    first = loads + len(limited)  # row of the tensors that are read
    unit_load = np.array([asked.cost(one)[unit_of] * units_of[:, None] for one in np.eye(loads)]) / whole
    copy_load = asked.copy[tensor_of] * tensors_of[:, None, None] / whole
    block = partial(_block, columns=last + 1)
    load = np.concatenate([unit_load.reshape(loads, -1), (asked.busy[:, None] * copy_load).reshape(loads, -1)], axis=1)
    memory = np.zeros((len(limited), len(unit_of), devices))
    memory[np.arange(len(limited)), :, limited] = asked.resident[unit_of] * units_of / stored
    owner, reader = kind[asked.owner[asked.tensor[pair_of]]], kind[asked.reader[pair_of]]
    wanted = fetch[sort[asked.tensor[pair_of]]]
    off = ~np.eye(devices, dtype=np.bool_)
    away = fetch[:, off]
    source = here[kind[asked.owner[tensor_of]]][:, np.nonzero(off)[0]]
    rows = sparse.vstack([
        sparse.hstack([sparse.csr_array(load), np.full((loads, 1), -1.0)]),
        sparse.csr_array(np.pad(memory.reshape(len(limited), -1), ((0, 0), (0, last + 1 - here.size)))),
        block([(here[reader], 1.0), (here[owner], -1.0), *((wanted[:, a], -1.0) for a in range(devices))]),
        block([(away, 1.0), (source, -1.0)]),
    ])  # fmt: skip
    most = np.concatenate([asked.may[unit_of].ravel(), np.tile(off.ravel(), len(tensor_of)), [np.inf]])
    solution: Any = linprog(
        c=np.append(np.zeros(last), 1.0),
        A_ub=rows,
        b_ub=np.concatenate(
            [np.zeros(loads), asked.room[limited] / stored, np.zeros(rows.shape[0] - loads - len(limited))]
        ),
        A_eq=block([(here[:, d : d + 1], 1.0) for d in range(devices)]),
        b_eq=np.ones(len(here)),
        bounds=np.stack([np.zeros(last + 1), most], axis=1),
        method="highs",
    )
    if solution.status != 0:
        return None
    price = np.maximum(0.0, -np.asarray(solution.ineqlin.marginals))
    if not price[:loads].any():  # nothing takes time
        return None
    byte = np.zeros(devices)
    byte[limited] = price[loads:first] * whole / stored
    having = price[first:][: len(pair_of) * devices].reshape(-1, devices) * whole
    return price[:loads] / price[:loads].sum(), byte, (having / pairs_of[:, None])[pair]


def _block(terms: list[tuple[NDArray[Any], float]], columns: int) -> Any:
    """A row for each element of the arrays of variables, with these factors."""
    from scipy import sparse

    count = terms[0][0].size
    every = np.tile(np.arange(count), len(terms))
    factors = np.repeat([factor for _, factor in terms], count)
    variables = np.concatenate([np.broadcast_to(which, terms[0][0].shape).ravel() for which, _ in terms])
    return sparse.csr_array((factors, (every, variables)), (count, columns))


def _looks(asked: _Question) -> Floats:
    """[U, ...] what a unit is like: by itself, by tensors that it has or reads, and by who is at their other end."""
    units = len(asked.resident)
    table = np.concatenate([asked.seconds, asked.along, asked.may, asked.resident[:, None]], axis=1)
    size, owner = asked.copy.max(axis=(1, 2)), asked.owner[asked.tensor]
    for _ in range(_ROUNDS):
        kind = _alike(table)[0]
        mark = np.random.default_rng(0).random(units)  # a sum of marks tells the ends apart, but for rare accidents
        table = np.stack([
            kind,
            np.bincount(asked.owner, size, units),
            np.bincount(asked.reader, mark[kind[owner]] * size[asked.tensor], units),
            np.bincount(owner, mark[kind[asked.reader]] * size[asked.tensor], units),
        ], axis=1)  # fmt: skip
    return table


def _alike(table: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """(class of each row, a row of each class, how many there are of each)."""
    first, kind, many = np.unique(table, axis=0, return_index=True, return_inverse=True, return_counts=True)[1:]
    return kind.reshape(-1), first, many
