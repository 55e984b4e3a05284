"""What engines place: modules of the model, not ops.

A piece is a module that an engine treats as one: an entry of a list of layers (`model.layers.7`), or a module beside
such a list (`lm_head`). Ops of a module that only holds pieces belong to none: masks and positions, which each device
makes where it needs them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from placewise.errors import InvalidInput
from placewise.graph import Graph, Ints
from placewise.plans import Plan
from placewise.problem import Problem

_ENTRY: Final = re.compile(r"((?:[^.]+\.)*?[^.]+)\.(\d{1,9})(?:\.|$)", re.ASCII)
_FEED_FORWARD: Final = re.compile(r"(.*?\.(?:mlp|feed_forward|ffn|block_sparse_moe))(?:\.|$)")


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of a graph, in the order in which the program comes to them."""

    names: tuple[str, ...]
    of_op: Ints  # [N] the piece of each op; -1 = of none
    layers: tuple[int, ...]  # the pieces that are the model's layers, in order: the list that holds most


def pieces(graph: Graph) -> Pieces:
    """Cut a graph along its modules."""
    entries = [_ENTRY.match(module) for module in graph.op_modules]
    lists = {match[1] for match in entries if match}
    holders = {path for name in lists for path in _ancestors(name)} | lists
    names = [
        f"{match[1]}.{int(match[2])}" if match else _beside(module, holders)
        for match, module in zip(entries, graph.op_modules, strict=True)
    ]
    order: dict[str, int] = {}
    computing_first = np.argsort(graph.is_stored[graph.topological_order], kind="stable")
    for op in graph.topological_order[computing_first].tolist():
        if names[op]:
            order.setdefault(names[op], len(order))
    of_op = np.array([order.get(name, -1) for name in names], np.int32)
    return Pieces(tuple(order), of_op, _layers(graph, tuple(order), of_op))


def _ancestors(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _beside(module: str, holders: set[str]) -> str:
    """The outermost module around this one that does not hold lists of layers; none if it does itself."""
    return next((path for path in [*_ancestors(module), module] if path and path not in holders), "")


def _layers(graph: Graph, names: tuple[str, ...], of_op: Ints) -> tuple[int, ...]:
    """The list whose entries keep (or, without weights, compute) most."""
    member = of_op >= 0
    weight = graph.resident_bytes if graph.resident_bytes[member].any() else graph.flops
    total = np.bincount(of_op[member], weight[member], len(names))
    lists: dict[str, list[tuple[int, int]]] = {}
    for piece, name in enumerate(names):
        if entry := _ENTRY.match(name):
            lists.setdefault(entry[1], []).append((int(entry[2]), piece))
    heaviest = max(lists.values(), key=lambda entries: total[[piece for _, piece in entries]].sum(), default=[])
    return tuple(piece for _, piece in sorted(heaviest))


def feed_forward(graph: Graph, found: Pieces) -> NDArray[Any]:
    """[N] of ops in the feed-forward block of a layer (its experts are part of it): the path of the block; else ""."""
    layers = set(found.layers)
    blocks = [
        match[1] if piece in layers and (match := _FEED_FORWARD.match(module)) else ""
        for piece, module in zip(found.of_op.tolist(), graph.op_modules, strict=True)
    ]
    return np.array(blocks, object)


# ---- problems of pieces ----------------------------------------------------------------------------------------------


def together(problem: Problem, label: NDArray[Any]) -> Problem:
    """The problem in which, besides what already must, ops with the same label (0 or more) share a device."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = problem.num_ops
    marked = np.flatnonzero(label >= 0)
    total = problem.num_units + int(label.max(initial=-1)) + 1
    ends = problem.unit[marked], problem.num_units + label[marked]
    links = coo_array((np.ones(len(marked)), ends), shape=(total, total))
    group = connected_components(links, directed=False)[1][problem.unit].astype(np.int32) if n else problem.unit
    alone = np.bincount(group, minlength=1)[group] == 1 if n else np.zeros(0, np.bool_)
    group = np.where(alone, -1, group).astype(np.int32)
    group.flags.writeable = False
    return replace(problem, graph=replace(problem.graph, group=group))


def tied(graph: Graph, found: Pieces) -> NDArray[np.int64]:
    """[N] a label for each op: its piece, where pieces that read the same weights count as one; -1 = free."""
    root = np.arange(len(found.names))
    shared = graph.is_stored[graph.edge_producer]
    pairs = found.of_op[graph.edge_producer[shared]], found.of_op[graph.consumers[shared]]
    for a, b in zip(*(pair.tolist() for pair in pairs), strict=True):
        if a >= 0 and b >= 0 and root[a] != root[b]:
            root[root == root[b]] = root[a]
    return np.where(found.of_op >= 0, root[found.of_op], -1)


def device_of_pieces(plan: Plan, found: Pieces, engine: str) -> list[int]:
    """The device of each piece; an error where a plan splits one."""
    devices = []
    for piece, name in enumerate(found.names):
        used = np.unique(plan.placement[found.of_op == piece])
        if len(used) > 1:
            where = ", ".join(plan.problem.cluster.device_names[d] for d in used)
            raise InvalidInput(
                f"the plan splits {name!r:.60} over {where}, and {engine} places whole modules: "
                f"plan with `--engine {engine}`"
            )
        devices.append(int(used[0]))
    return devices
