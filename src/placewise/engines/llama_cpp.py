"""llama.cpp: layers to devices, feed-forward weights to devices."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from placewise.cluster import Cluster
from placewise.engines import engine
from placewise.engines.phase import phase
from placewise.engines.pieces import Pieces, feed_forward, pieces, tied, together
from placewise.engines.ranks import accelerator_number, check_language_model
from placewise.engines.torch_offload import at_homes
from placewise.errors import InvalidInput, Unsupported
from placewise.graph import Graph
from placewise.plans import Plan
from placewise.problem import Problem
from placewise.terminal import note

#: What weights and caches may take of a GPU before there is too little left to work in.
_FULL: Final = 0.9
#: Tokens at once from which on a GPU computes with weights of the CPU, copied each time, unless it is told not to
#: (`min_batch_size` in ggml/src/ggml-cuda/ggml-cuda.cu, `offload_op`).
_LARGE_BATCH: Final = 32
_FEED_FORWARD: Final = "ffn_(up|down|gate).*"
#: Devices whose buffers have their names, and those of servers, whose buffers are called so: device d of host:port.
_THEIR_NAMES: Final = re.compile(r"(CUDA|ROCm|MUSA|MTL|Vulkan|SYCL|CANN|OPENVINO)(\d{1,4})", re.ASCII)
_ON_SERVERS: Final = re.compile(r"RPC(\d{1,4})\[(.+)\]", re.ASCII)


def layers_and_feed_forward(problem: Problem) -> Problem:
    """Of each layer, the feed-forward part and the rest each have a device, and run where their weights are.

    Ops run one after the other. The embedding stays on the CPU, unless it is the head, too. The rest of a layer has its
    KV cache with it, and caches are where the slots are: the first on the CPU, then an interval on each GPU. Several
    GPUs that hold the model have whole layers, as many as is best. Else feed-forward parts and the head are anywhere,
    the rest on GPUs, by what these hold, but for the first layers if even that is too much.
    """
    graph, cluster = problem.graph, problem.cluster
    found = pieces(graph)
    check_layers(problem, found)
    feed, label = feed_forward(graph, found) != "", tied(graph, found)
    usable = [d for d, device in enumerate(cluster.devices) if device.name not in problem.forbidden]
    gpus = [d for d in usable if cluster.devices[d].kind == "gpu"]
    hosts = [d for d in usable if cluster.devices[d].kind == "cpu"]
    needed = float(graph.resident_bytes.sum())
    room = [min(_FULL * cluster.devices[d].memory, needed) for d in gpus]
    whole = len(gpus) > 1 and needed <= sum(room)
    if not whole:
        label = np.where(feed, len(found.names) + found.of_op, label)
    output = found.of_op > found.layers[-1]
    if output.any():
        label[output] = label[found.of_op == found.of_op.max()][0]  # norm and head
    layer = _layer_numbers(found)
    stays = (layer >= 0) & ~feed
    place = np.full(problem.num_ops, -1)
    embedding = (label >= 0) & (label == label[graph.op_kinds.index("embedding")])
    if hosts and not (stays | output)[embedding].any():
        place[embedding] = hosts[0]
    if gpus and not whole:
        held, kept = (np.bincount(layer[ops], graph.resident_bytes[ops]) for ops in (layer >= 0, stays))
        place[stays] = _devices_of_slots(held, kept, hosts[:1], gpus, room)[layer[stays]]
    place[np.isin(label, [label[graph.op_index(op)] for op in problem.pins])] = -1  # what is pinned stays so
    pins = {graph.op_names[op]: cluster.device_names[place[op]] for op in np.flatnonzero(place >= 0).tolist()}
    others = (device.name for device in cluster.devices if device.kind not in ("cpu", "gpu"))
    return replace(
        together(problem, label),
        execution=replace(problem.execution, concurrency="sequential"),
        forbidden=tuple(dict.fromkeys((*problem.forbidden, *others))),
        contiguous=problem.contiguous or whole,
        pins=pins | dict(problem.pins),
    )


def _layer_numbers(found: Pieces) -> NDArray[np.int64]:
    """[N] the number of the layer that an op is of, or -1."""
    number = np.full(len(found.names) + 1, -1)  # the last is that of no piece
    number[list(found.layers)] = np.arange(len(found.layers))
    of_op: NDArray[np.int64] = number[found.of_op]
    return of_op


def _devices_of_slots(
    held: NDArray[Any], kept: NDArray[Any], hosts: Sequence[int], gpus: Sequence[int],
    room: Sequence[float],
) -> NDArray[np.int64]:  # fmt: skip
    """Of each layer: GPUs, by what they have room for and layers hold; the first on the host, if too much is kept.

    `kept` is what has to be with the slot. Where shares leave no room for that, each GPU has as many layers as it can.
    """
    for first in range(len(held) if hosts else 1):
        rest, keeps = held[first:], kept[first:]
        middle = (np.cumsum(rest) - rest / 2) / (rest.sum() or 1.0)
        shared = np.searchsorted(np.cumsum(room)[:-1] / (sum(room) or 1.0), middle)
        for turn in (shared, _filled(keeps, room)):
            if (np.bincount(turn, keeps, len(room))[: len(room)] <= room).all() and (turn < len(room)).all():
                return np.concatenate([np.full(first, hosts[0] if hosts else 0), np.array(gpus)[turn]])
    return np.full(len(held), hosts[0]) if hosts else np.array(gpus)[shared]


def _filled(sizes: NDArray[Any], room: Sequence[float]) -> NDArray[np.int64]:
    """One after the other into the first of these, then into the next; what has no room is beyond the last."""
    turn, left, found = 0, list(room), []
    for size in sizes.tolist():
        while turn < len(left) and size > left[turn]:
            turn += 1
        if turn < len(left):
            left[turn] -= size
        found.append(turn)
    return np.array(found)


@engine("llama.cpp", fit=layers_and_feed_forward, versions="llama.cpp of May 2025 and later")
def llama_cpp(plan: Plan) -> str:
    """Flags: -c, -ngl, --rpc, -dev, -ts, -ot, for llama-server and llama-cli.

    A layer slot i (the output is the last) is on the first device whose cumulative share of `-ts` exceeds
    (i - first slot on a GPU) / slots on GPUs, and slots before are on the CPU (src/llama-model.cpp, `load_tensors`).
    What deviates from that is set by `-ot`: patterns, of which the first that a tensor's name matches says its buffer
    (src/llama-model-loader.cpp). KV caches stay with the slot.
    """
    asked, plan = plan, at_homes(plan)
    problem, found = plan.problem, pieces(plan.problem.graph)
    check_layers(problem, found)
    feed = feed_forward(problem.graph, found) != ""
    cluster = problem.cluster
    host = [device.kind == "cpu" for device in cluster.devices]
    rest = [_device(plan, (found.of_op == piece) & ~feed, found.names[piece]) for piece in found.layers]
    sparse = [_device(plan, (found.of_op == piece) & feed, found.names[piece]) for piece in found.layers]
    after = [piece for piece in range(len(found.names)) if piece > found.layers[-1]]
    head = _device(plan, found.of_op == after[-1], found.names[after[-1]]) if after else rest[-1]
    wanted = [device if device is not None else rest[0] for device in [*rest, head]]
    # Slots in runs: first the CPU's, then each GPU's, in the order in which the layers come to it.
    names, buffers, servers = _names(cluster, set(plan.placement.tolist()))
    usual = sorted(names, key=lambda d: int(re.sub(r"\D", "", names[d])))
    order = list(dict.fromkeys(d for d in wanted if d is not None and not host[d]))
    order += [d for d in usual if d in sparse and d not in order]
    first = next((i for i, device in enumerate(wanted) if device in order), len(wanted))
    share, base, at = [0] * len(order), list(wanted), 0
    for i in range(first, len(wanted)):
        device = wanted[i]
        if device in order and order.index(device) >= at:
            at = order.index(device)
        share[at] += 1
        base[i] = order[at]
    patterns = _patterns([(rf"blk\.({{}})\.{_FEED_FORWARD}", sparse, rest), (r"blk\.({})\.", rest, base[:-1])], buffers)
    if wanted[-1] is not None and wanted[-1] != base[-1]:
        embedding = problem.unit[problem.graph.op_kinds.index("embedding")]
        tied_to_it = bool((problem.unit[found.of_op == after[-1]] == embedding).any()) if after else False
        patterns.append(f"{'^(output|token_embd)' if tied_to_it else '^output'}={buffers[wanted[-1]]}")
    flags = [f"-ngl {len(wanted) - first}"]
    if order and servers:
        flags.append(f"--rpc {shlex.quote(','.join(servers))}")  # before what names their devices
    if order and (order != usual or servers):
        flags.append(f"-dev {','.join(names[d] for d in order)}")
    if len(order) > 1:
        flags.append(f"-ts {','.join(map(str, share))}")
    if patterns:
        flags.append(f"-ot {shlex.quote(','.join(patterns))}")
    if any(moved := [a != b for a, b in zip(rest, base, strict=False)]):
        note(f"the KV caches of {sum(moved)} layers stay in the slots of these, elsewhere than the plan has them: "
             "memory and time are not the plan's; plan with --engine llama.cpp")  # fmt: skip
    if any(name.startswith("CUDA") for text in flags[1:] for name in re.findall(r"CUDA\d", text)):
        note("GPUs are taken to be CUDA0 and so on: where `llama-server --list-devices` prints other names, name the "
             "devices of the cluster so")  # fmt: skip
    layers = np.isin(found.of_op, found.layers) & ~problem.graph.is_stored
    computed, kept = (int((np.array(host)[p.placement] & layers).sum()) for p in (asked, plan))
    if kept > computed:
        note("what the plan streams to a GPU is in host memory, and llama.cpp computes there; it copies weights only "
             f"for {_LARGE_BATCH} tokens at once and more, and not ahead of time")  # fmt: skip
    return " ".join([*_context(problem.graph, computed, kept - computed), *flags]) + "\n"


def _patterns(
    parts: Sequence[tuple[str, Sequence[int | None], Sequence[int | None]]], buffers: Mapping[int, str]
) -> list[str]:
    """For each (pattern, where its tensors are to be, where they are without it), in this order: the first decides."""
    found = []
    for pattern, wanted, otherwise in parts:
        for target in sorted({d for d in wanted if d is not None}):
            layers = [i for i, (d, now) in enumerate(zip(wanted, otherwise, strict=True)) if d == target != now]
            if layers:
                found.append(f"{pattern.format('|'.join(map(str, layers)))}={buffers[target]}")
    return found


def _context(graph: Graph, computed: int, streamed: int) -> list[str]:
    """How many tokens there are room for, as the graph has them, and flags that depend on how many come at once.

    Of ops whose weights are in the CPU's memory, so many are computed there and so many on a GPU.
    """
    found = phase(graph)
    if found is None or found.tokens + found.cached < 2:
        note("the plan does not tell its context: add -c, without which there is room for all that the model can read")
        return []
    flags = [f"-c {found.sequences * (found.tokens + found.cached)}"]
    flags += [f"-np {found.sequences}"] if found.sequences > 1 else []
    if found.sequences * found.tokens >= _LARGE_BATCH and computed > streamed:
        flags.append("--no-op-offload")
        note("the plan has the CPU compute where weights are in its memory, which takes --no-op-offload; without it "
             "llama.cpp copies them to a GPU for each large batch")  # fmt: skip
    return flags


def _names(cluster: Cluster, used: set[int]) -> tuple[dict[int, str], dict[int, str], list[str]]:
    """What llama.cpp calls GPUs, what it calls the buffers of all devices, and the servers that some are on.

    Names in the cluster may be llama.cpp's; others are CUDA's, by number. Devices of servers are numbered along these.
    """
    gpus = [d for d, device in enumerate(cluster.devices)
            if device.kind == "gpu" or (device.kind != "cpu" and d in used)]  # fmt: skip
    remote = {d: (int(found[1]), found[2]) for d in gpus if (found := _ON_SERVERS.fullmatch(cluster.device_names[d]))}
    servers: dict[str, int] = {}  # and how many devices they have
    for number, server in remote.values():
        servers[server] = max(servers.get(server, 0), number + 1)
    before = dict(zip(servers, np.cumsum([0, *servers.values()]).tolist(), strict=False))
    names = {}
    for d in gpus:
        name = cluster.device_names[d]
        if d in remote:
            names[d] = f"RPC{before[remote[d][1]] + remote[d][0]}"
        else:
            names[d] = name if _THEIR_NAMES.fullmatch(name) else f"CUDA{accelerator_number(cluster, d)}"
    hosts = {d: "CPU" for d, device in enumerate(cluster.devices) if device.kind == "cpu"}
    return names, hosts | names | {d: cluster.device_names[d] for d in remote}, list(servers)


def check_layers(problem: Problem, found: Pieces) -> None:
    """What llama.cpp runs is a language model with a list of layers."""
    if not found.layers:
        raise Unsupported(f"{problem.graph.name!r:.60} has no list of layers that llama.cpp could place")
    check_language_model(problem)


def _device(plan: Plan, ops: NDArray[np.bool_], name: str) -> int | None:
    used = np.unique(plan.placement[ops])
    if len(used) > 1:
        raise InvalidInput(f"the plan splits {name!r:.60} in a way that llama.cpp cannot: plan with --engine llama.cpp")
    return int(used[0]) if len(used) else None
