"""Models that do not fit a GPU, in PyTorch: each layer's parts are resident, computed on the CPU, or streamed.

What is planned is a part: of each layer the feed-forward block (experts are one block) and the rest, and the modules
beside the layers. A part is one op, and its weights are another: where both share a device they are resident there,
else they are streamed to where the part computes. So planners choose, and the simulator says what it takes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from placewise.costs import LABELS, Costs
from placewise.engines import Run, engine
from placewise.engines.phase import telling
from placewise.engines.pieces import Pieces, feed_forward, pieces, tied
from placewise.errors import InvalidInput, Unsupported
from placewise.graph import Graph
from placewise.plans import Plan
from placewise.problem import Problem
from placewise.transforms import contract

#: Behind the name of a part: its weights, and what it does after its feed-forward block.
WEIGHTS: Final = ":weights"
AFTER: Final = ":after"
#: Weights below this share of the largest part's stay with their part: nobody streams a norm.
_SMALL: Final = 1e-2


def parts_and_weights(problem: Problem) -> Problem:
    """One op for each part, one for its weights. Caches stay with their part, which counts what it needs to work."""
    graph = problem.graph
    if problem.objective != "latency":
        raise Unsupported("torch-offload serves one request at a time: plan it for latency")
    if any(name.endswith(WEIGHTS) for name in graph.op_names):
        return problem
    found = pieces(graph)
    if not found.layers or not graph.is_stored.any():
        raise Unsupported(f"{graph.name!r:.60} has no list of layers with weights of their own: plan the model, or its "
                          "graph file")  # fmt: skip
    names, label = _labels(graph, found)
    try:
        small = contract(graph, label).graph
    except InvalidInput:
        raise Unsupported(f"{graph.name!r:.60} does not run its modules one after the other") from None
    free = {graph.op_names[op] for op in np.flatnonzero(found.of_op < 0)}
    seconds = np.zeros((small.num_ops, problem.num_devices))
    np.add.at(seconds, label[~graph.is_stored], problem.costs.seconds[~graph.is_stored])
    known = np.full(seconds.shape, LABELS.index("measured"))
    works = ~graph.is_stored & ((graph.flops > 0) | (graph.bytes_accessed > 0))
    np.minimum.at(known, label[works], problem.costs.label[works])
    looked_up = {int(label[op]) for op, kind in enumerate(graph.op_kinds) if kind == "embedding"}
    small = replace(
        small,
        op_names=tuple(names),
        op_kinds=tuple("embedding" if op in looked_up else kind for op, kind in enumerate(small.op_kinds)),
        op_modules=tuple("" if name in free else name.removesuffix(WEIGHTS).removesuffix(AFTER) for name in names),
        op_signatures=_signatures(graph, label, small.num_ops),
        scratch=_workspace(graph, label, small),
        group=_groups(graph, found, names, label),
    )
    pins = {names[label[graph.op_index(op)]]: device for op, device in problem.pins.items()}
    execution = replace(problem.execution, concurrency="parallel", contention="channel", sends="tensor", memory="live")
    return replace(problem, graph=small, costs=Costs.create(seconds, known), pins=pins, execution=execution)


@contextmanager
def run(plan: Plan, model: str, devices: Mapping[str, str]) -> Iterator[Run]:
    """A model of transformers, by its config.json, in the phase of the plan."""
    from placewise.importers import require

    require("torch", "torch")
    from placewise.engines.torch_offload_run import ready

    with ready(plan, model, devices) as made:
        yield made


@engine("torch-offload", fit=parts_and_weights, versions="torch>=2.7", run=run, places_parameters=True)
def torch_offload(plan: Plan) -> str:
    """JSON: where each module computes, and where its weights are; `Plan.apply(model)` runs it."""
    return json.dumps(modes(plan), indent=1) + "\n"


def modes(plan: Plan) -> dict[str, dict[str, str]]:
    """Module to the device that computes it, and the one that keeps its weights."""
    if not any(name.endswith(WEIGHTS) for name in plan.problem.graph.op_names):
        raise InvalidInput("the plan is of ops, not of modules: plan with `--engine torch-offload`")
    graph, found = plan.problem.graph, dict[str, dict[str, str]]()
    for name, module in zip(graph.op_names, graph.op_modules, strict=True):
        if module and not name.endswith(AFTER):
            entry = found.setdefault(module, {"compute": "", "weights": ""})
            for key in ("weights",) if name.endswith(WEIGHTS) else ("compute", "weights"):
                entry[key] = entry[key] if name == module and entry[key] else plan.devices[name]
    return found


def best_for_mix(plans: Sequence[tuple[Plan, float]]) -> Plan:
    """Of plans of one model's phases, each with how often its phase comes, the one that serves all of them best.

    Every plan is simulated in the problem of every phase; the least sum counts, and a plan must be feasible in each.
    """
    from placewise.simulator import evaluate, violations

    best, least = None, np.inf
    for plan, _ in plans:
        total = 0.0
        for other, weight in plans:
            placement = _carried_over(plan, other.problem)
            allowed = not violations(other.problem, placement)
            total += weight * float(evaluate(other.problem, placement).value[0]) if allowed else np.inf
        if total < least:
            best, least = plan, total
    if best is None:
        raise InvalidInput("none of the plans is feasible in every phase: plan each with less memory")
    return best


def _carried_over(plan: Plan, problem: Problem) -> NDArray[np.int32]:
    """The placement of a plan in another phase of the same model: by module; what has none goes with the first."""
    found, cluster = modes(plan), problem.cluster
    first = next(iter(found.values()))
    placement = np.zeros(problem.num_ops, np.int32)
    for op, (name, module) in enumerate(zip(problem.graph.op_names, problem.graph.op_modules, strict=True)):
        if module and module not in found:
            raise InvalidInput(f"the plans are of different models: one has no {module!r:.60}")
        mode = found[module] if module else first
        placement[op] = cluster.device_index(mode["weights" if name.endswith(WEIGHTS) else "compute"])
    return placement


def at_homes(plan: Plan) -> Plan:
    """For engines that are told where weights are: each part where its weights are. Other plans stay as is."""
    graph = plan.problem.graph
    if not any(name.endswith(WEIGHTS) for name in graph.op_names):
        return plan
    found, cluster = modes(plan), plan.problem.cluster
    home = [cluster.device_index(found[m]["weights"]) if m else d
            for m, d in zip(graph.op_modules, plan.placement.tolist(), strict=True)]  # fmt: skip
    return replace(plan, placement=np.array(home, np.int32))


# ---- parts -----------------------------------------------------------------------------------------------------------


def _labels(graph: Graph, found: Pieces) -> tuple[list[str], NDArray[np.int64]]:
    """The name of each part, and the part of each op."""
    block = feed_forward(graph, found)
    stored, of_op = graph.is_stored, found.of_op
    after = np.zeros(graph.num_ops, np.bool_)
    first, edges = graph.in_edges
    for op in graph.topological_order.tolist():
        makers = graph.edge_producer[edges[first[op] : first[op + 1]]]
        makers = makers[(of_op[makers] == of_op[op]) & ~stored[makers]]
        after[op] = of_op[op] >= 0 and not block[op] and bool((after[makers] | (block[makers] != "")).any())
    start, leaving = graph.out_edges
    for op in graph.topological_order[::-1].tolist():  # what is made of weights alone is made when it is read
        makers = graph.edge_producer[edges[first[op] : first[op + 1]]]
        readers = graph.consumers[leaving[start[op] : start[op + 1]]]
        if len(makers) and stored[makers].all() and len(readers) and of_op[op] >= 0 and not block[op]:
            after[op] |= bool((after[readers] & (of_op[readers] == of_op[op])).all())
    own = [
        "" if piece < 0 else block[op] or found.names[piece] + (AFTER if after[op] else "")
        for op, piece in enumerate(of_op.tolist())
    ]
    size = dict.fromkeys(own, 0.0)
    kept = stored & (np.array(graph.op_kinds) == "parameter")
    for op in np.flatnonzero(kept).tolist():
        size[own[op]] += float(graph.resident_bytes[op])
    shared = _tied_names(graph, found, own)
    least = _SMALL * max(size.values())
    index: dict[str, int] = {}
    label = np.zeros(graph.num_ops, np.int64)
    for op in range(graph.num_ops):
        name = own[op] or graph.op_names[op]
        if own[op] and kept[op] and size[own[op]] >= least and own[op] not in shared:
            name = own[op] + WEIGHTS
        label[op] = index.setdefault(name, len(index))
    return list(index), label


def _tied_names(graph: Graph, found: Pieces, own: list[str]) -> set[str]:
    """Parts whose weights another piece reads too; these are not streamed."""
    stored = graph.is_stored[graph.edge_producer]
    pairs = zip(graph.edge_producer[stored].tolist(), graph.consumers[stored].tolist(), strict=True)
    return {own[a] for a, b in pairs if found.of_op[a] != found.of_op[b]}


def _groups(graph: Graph, found: Pieces, names: list[str], label: NDArray[np.int64]) -> NDArray[np.int32]:
    """What a layer does before and after its feed-forward block is on one device; so is what reads the same weights,
    and what belongs to no module is where the first one is."""
    roots = tied(graph, found)
    start = int(np.flatnonzero(roots >= 0)[0]) if (roots >= 0).any() else 0
    block = feed_forward(graph, found)
    group = np.full(len(names), -1, np.int32)
    for op in range(graph.num_ops):
        if not names[label[op]].endswith(WEIGHTS):
            root = int(roots[op]) if roots[op] >= 0 else int(roots[start])
            group[label[op]] = root + (len(found.names) if block[op] else 0)
    return group


def _signatures(graph: Graph, label: NDArray[np.int64], count: int) -> tuple[str, ...]:
    """Parts that do the same have the same. What tells the phase stays to be read."""
    members: list[list[str]] = [[] for _ in range(count)]
    for op in np.flatnonzero(~graph.is_stored).tolist():
        members[label[op]].append(graph.op_signatures[op])
    digests = [hashlib.sha256("; ".join(m).encode()).hexdigest()[:16] for m in members]
    return tuple(
        f"part({'; '.join([digest, *telling(m)])})" if any(m) else ""
        for digest, m in zip(digests, members, strict=True)
    )


def _workspace(graph: Graph, label: NDArray[np.int64], small: Graph) -> NDArray[np.float64]:
    """Bytes that parts hold at most beyond their weights and what they hand on: their own tensors while these are read.

    The memory is kept from part to part, so each counts what the largest needs.
    """
    turn = np.empty(graph.num_ops, np.int64)
    turn[graph.topological_order] = np.arange(graph.num_ops)
    inside = np.ones(graph.num_tensors, np.bool_)
    last = turn[graph.tensor_producer].copy()
    leaves = label[graph.edge_producer] != label[graph.consumers]
    inside[graph.edge_tensor[leaves]] = False
    inside &= ~graph.is_stored[graph.tensor_producer] & (np.diff(graph.consumer_ptr) > 0)
    np.maximum.at(last, graph.edge_tensor, turn[graph.consumers])
    events: list[list[tuple[int, int, float]]] = [[] for _ in range(small.num_ops)]
    for tensor in np.flatnonzero(inside).tolist():
        maker = graph.tensor_producer[tensor]
        size = float(graph.tensor_bytes[tensor])
        events[label[maker]] += [(int(turn[maker]), 0, size), (int(last[tensor]), 1, -size)]
    peak = small.scratch.copy()
    for part, found in enumerate(events):
        held = np.cumsum([size for _, _, size in sorted(found)])
        peak[part] += held.max(initial=0.0)
    works = np.array([bool(found) for found in events])
    return np.where(works, peak.max(initial=0.0), peak)
