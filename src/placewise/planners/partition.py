"""Graph partitioning by METIS, Scotch and KaHIP: little traffic between parts whose sizes follow the devices' speeds.

All three see an undirected graph: a vertex per unit, which weighs its mean time, and an edge between units that
exchange tensors, which weighs their bytes. They know neither the direction of time nor memory, pins or devices that
cannot run an op: units that may not be where their part goes move where they are fastest, then units move until memory
suffices (`repair.fitted`; where no plan fits even so, `repair.settled`, which measures what is alive at a time). Parts
change places between devices for as long as the simulator says that it helps.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array

from placewise.apart import answer
from placewise.driver import Context
from placewise.graph import Floats, Ints
from placewise.planners import planner
from placewise.planners.blocks import blocks_by_memory
from placewise.planners.repair import fitted, messages, settled
from placewise.problem import Problem
from placewise.stdout import quiet

_HEAVY = 2.0**28  # what all vertices, and all edges, weigh together: the packages count in 32 bits
_FINEST = 8  # parts per device, where a package only makes equal ones
_BATCH = 2_000_000  # entries of placements that are evaluated at once


def _needs(package: str) -> Callable[[Problem], bool | str]:
    def supports(problem: Problem) -> bool | str:
        if find_spec(package) is None:
            return f"needs the package {package}: pip install 'placewise[partition]'"
        return "ignores contiguity and device counts" if problem.contiguous or problem.max_devices else True

    return supports


@planner("metis", supports=_needs("pymetis"))
def metis(problem: Problem, ctx: Context, *, imbalance: float = 0.03) -> None:
    """Partition by METIS, part sizes by device speed (Karypis, Kumar 1998, doi:10.1137/S1064827595287997)."""

    def parts(graph: _Weighted, share: Floats, seed: int) -> Ints:
        import pymetis

        options = pymetis.Options(seed=seed, ufactor=max(1, round(1000 * imbalance)))
        adjacency = pymetis.CSRAdjacency(graph.start, graph.neighbour)
        with quiet():  # METIS prints what it thinks of small graphs
            found = pymetis.part_graph(
                len(share), adjacency, vweights=graph.vertex, eweights=graph.edge, tpwgts=share.tolist(),
                options=options,
            )  # fmt: skip
        return np.array(found.vertex_part, np.int32)

    _plan(problem, ctx, parts)


@planner("kahip", supports=_needs("kahip"))
def kahip(
    problem: Problem, ctx: Context, *, imbalance: float = 0.03, effort: Literal["fast", "eco", "strong"] = "eco"
) -> None:
    """Partition by KaHIP, parts dealt out by device speed (Sanders, Schulz 2013, doi:10.1007/978-3-642-38527-8_16).

    KaHIP makes parts of equal size. Where devices differ, it makes more of them, and each device in turn takes as many
    as its speed says, next to those that it has. Where time runs out first, the plan is that of `blocks-by-memory`.
    """

    def parts(graph: _Weighted, share: Floats, seed: int) -> Ints | None:
        import kahip

        count = _deal(share)
        mode = {"fast": kahip.FAST, "eco": kahip.ECO, "strong": kahip.STRONG}[effort]
        table = [x.tolist() for x in (graph.vertex, graph.start, graph.edge, graph.neighbour)]

        def pieces() -> Ints:
            return np.array(kahip.kaffpa(*table, int(count.sum()), imbalance, True, seed, mode)[1], np.int32)

        piece = answer(pieces, lambda: not ctx.should_stop())
        return None if piece is None else _merged(graph, piece, count)

    _plan(problem, ctx, parts)


@planner("scotch", supports=_needs("pyscotch"))
def scotch(problem: Problem, ctx: Context, *, imbalance: float = 0.03) -> None:
    """Static mapping by Scotch onto the devices and links (Pellegrini, Roman 1996, doi:10.1007/3-540-61142-8_588).

    The machine is given to Scotch as a table: what each device weighs, and how long a mean message takes between each
    two.
    """

    def parts(graph: _Weighted, share: Floats, seed: int) -> Ints:
        os.environ.setdefault("SCOTCH_DETERMINISTIC", "1")  # else its threads race, and a seed means nothing
        with contextlib.redirect_stderr(io.StringIO()):  # it tells where its library is
            import pyscotch

            machine, work, strategy = pyscotch.Architecture(), pyscotch.Graph(), pyscotch.Strategy()
        with machine, work, tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "machine.tgt")
            file.write_text(_machine(share, _distances(problem)))
            machine.load(file)
            work.build(graph.start, graph.neighbour, graph.vertex, graph.edge)
            strategy.request_mapping(balance=imbalance)
            pyscotch.random_seed(seed)
            pyscotch.random_reset()
            found: Ints = work.map(machine, strategy).astype(np.int32)
        return found

    _plan(problem, ctx, parts)


def _plan(problem: Problem, ctx: Context, parts: Callable[[_Weighted, Floats, int], Ints | None]) -> None:
    usable = np.flatnonzero(problem.allowed.any(axis=0)).astype(np.int32)
    if not problem.num_units or len(usable) == 1:
        ctx.evaluate(np.full(problem.num_ops, usable[0] if problem.num_units else 0, np.int32))
        return
    part: Ints | None = np.arange(problem.num_units, dtype=np.int32)  # no more units than devices: nothing to divide
    if problem.num_units > len(usable):
        part = parts(_weighted(problem), _shares(problem)[usable], int(ctx.rng.integers(2**31 - 1)))
    if part is None:
        ctx.evaluate(blocks_by_memory(problem, ctx))
    else:
        _assign(problem, ctx, part, usable)


def _assign(problem: Problem, ctx: Context, part: Ints, device: Ints) -> None:
    """Part p goes to device[p]; two parts change places where that helps, until none does."""

    def home(device: Ints) -> Ints:
        found: Ints = np.where(allowed[every, device[part]], device[part], fastest).astype(np.int32)
        return found

    def placement(device: Ints) -> Ints:
        row: Ints = fitted(problem, home(device))[problem.unit]
        return row

    every, seconds = np.arange(problem.num_units), problem.unit_seconds
    allowed, fastest = np.isfinite(seconds), seconds.argmin(axis=1)
    best = ctx.evaluate(placement(device))
    swaps, improved = list(combinations(range(len(device)), 2)), True
    size = max(1, min(64, _BATCH // problem.num_ops))
    while improved and not ctx.should_stop():
        improved = False
        for low in range(0, len(swaps), size):
            if ctx.should_stop():
                return
            tried = [device.copy() for _ in swaps[low : low + size]]
            for other, (a, b) in zip(tried, swaps[low : low + size], strict=True):
                other[[a, b]] = device[[b, a]]
            values = ctx.evaluate_batch([placement(other) for other in tried])
            if len(values) and values.min() < best * (1 - 1e-9):
                best, device, improved = float(values.min()), tried[int(values.argmin())], True
    if ctx.best is None:  # what is alive at a time is too much, not what stays
        settled(problem, ctx, home(device))


# ---- what the packages are told --------------------------------------------------------------------------------------


class _Weighted(NamedTuple):
    """An undirected graph of units; vertex u has neighbour[start[u]:start[u + 1]]."""

    start: NDArray[np.int64]
    neighbour: NDArray[np.int64]
    vertex: NDArray[np.int64]  # weights, 1 or more
    edge: NDArray[np.int64]


def _weighted(problem: Problem) -> _Weighted:
    n, seconds, sent = problem.num_units, problem.unit_seconds, messages(problem)
    runs = np.isfinite(seconds)
    mean = np.where(runs, seconds, 0.0).sum(axis=1) / np.maximum(runs.sum(axis=1), 1)
    ends, size = (sent.sender[sent.message], sent.reader), sent.bytes[sent.message]
    both = np.concatenate(ends), np.concatenate(ends[::-1])
    table = coo_array((np.concatenate([size, size]) + 1.0, both), (n, n)).tocsr()  # adds up parallel edges
    table.sort_indices()
    start, neighbour = table.indptr.astype(np.int64), table.indices.astype(np.int64)
    return _Weighted(start, neighbour, _whole(mean), _whole(table.data))


def _whole(weight: Floats) -> NDArray[np.int64]:
    scaled: NDArray[np.int64] = np.rint(weight * (_HEAVY / max(float(weight.sum()), 1e-200))).astype(np.int64)
    return np.maximum(scaled, 1)


def _shares(problem: Problem) -> Floats:
    """[D] of the work that each device should get: its speed over that of all; zero where nothing may run.

    An op that may not run on a device counts as long as where it is slowest.
    """
    slowest = np.where(problem.allowed, problem.seconds, 0.0).max(axis=1, keepdims=True)
    total = np.where(problem.allowed, problem.seconds, slowest).sum(axis=0)
    speed = np.where(problem.allowed.any(axis=0), 1.0 / np.maximum(total, max(float(total.max()), 1e-200) * 1e-6), 0.0)
    shares: Floats = speed / speed.sum()
    return shares


def _distances(problem: Problem) -> NDArray[np.int64]:
    """[D, D] how long a mean message takes between the usable devices, both ways, in units of the fastest link."""
    usable = np.flatnonzero(problem.allowed.any(axis=0))
    size = float(problem.graph.tensor_bytes.mean()) if problem.graph.num_tensors else 0.0
    seconds = problem.cluster.latency + size * problem.cluster.seconds_per_byte
    seconds = (seconds + seconds.T)[np.ix_(usable, usable)]
    links = seconds[seconds > 0]
    fastest = float(links.min()) if len(links) else 1.0
    distance: NDArray[np.int64] = np.clip(np.rint(10 * seconds / fastest), 1, 10_000).astype(np.int64)
    return distance


def _machine(share: Floats, distance: NDArray[np.int64]) -> str:
    """A machine in Scotch's format `deco 0`: weights, places in a binary tree of halves, distances."""
    place: dict[int, int] = {}

    def halve(devices: list[int], node: int) -> None:
        if len(devices) == 1:
            place[devices[0]] = node
            return
        near = sorted(devices, key=lambda d: (distance[devices[0], d] * (d != devices[0]), d))  # the first one's half
        halve(near[: (len(near) + 1) // 2], 2 * node)
        halve(near[(len(near) + 1) // 2 :], 2 * node + 1)

    halve(list(range(len(share))), 1)
    weight = np.maximum(np.rint(share * 10_000), 1).astype(int)
    lines = ["deco 0", f"{len(share)} {max(place.values())}"]
    lines += [f"{d} {weight[d]} {place[d]}" for d in range(len(share))]
    lines += [" ".join(map(str, distance[d, :d].tolist())) for d in range(1, len(share))]
    return "\n".join(lines) + "\n"


# ---- unequal parts from equal ones -----------------------------------------------------------------------------------


def _deal(share: Floats) -> NDArray[np.int64]:
    """[D] how many of how many equal parts each device takes: the fewest parts that come closest to the shares."""
    best, least = np.ones(len(share), np.int64), np.inf
    for total in range(len(share), _FINEST * len(share) + 1):
        count = np.floor(share * total).astype(np.int64)
        rest = share * total - count
        count[np.argsort(-rest, kind="stable")[: total - int(count.sum())]] += 1
        error = float(np.abs(count / total - share).max())
        if error < least - 0.01:
            best, least = count, error
    return best


def _merged(graph: _Weighted, piece: Ints, count: NDArray[np.int64]) -> Ints:
    """The part of each unit, where part p is made of count[p] pieces, each the most connected to those before it."""
    pieces = int(count.sum())
    source = np.repeat(np.arange(len(piece)), np.diff(graph.start))
    traffic = np.zeros((pieces, pieces))
    np.add.at(traffic, (piece[source], piece[graph.neighbour]), graph.edge.astype(np.float64))
    part_of, free = np.zeros(pieces, np.int32), list(range(pieces))
    for part in np.argsort(-count, kind="stable").tolist():
        mine: list[int] = []
        for _ in range(int(count[part])):
            # Next to its own pieces; the first one where little else is left around it.
            score = traffic[free][:, mine].sum(axis=1) if mine else -traffic[free][:, free].sum(axis=1)
            mine.append(free.pop(int(np.argmax(score))))
        part_of[mine] = part
    merged: Ints = part_of[piece]
    return merged
