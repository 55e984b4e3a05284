"""llama.cpp: layers to devices, feed-forward weights to devices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from placewise.engines import engine
from placewise.engines.pieces import Pieces, feed_forward, pieces, tied, together
from placewise.engines.ranks import accelerator_number, check_language_model
from placewise.engines.torch_offload import at_homes
from placewise.errors import InvalidInput, Unsupported
from placewise.plans import Plan
from placewise.problem import Problem


def layers_and_feed_forward(problem: Problem) -> Problem:
    """Of each layer, the feed-forward part and the rest each have a device, and run where their weights are.

    Ops run one after the other. The embedding stays on the CPU.
    """
    found = pieces(problem.graph)
    check_layers(problem, found)
    feed = feed_forward(problem.graph, found) != ""
    label = np.where(feed, len(found.names) + found.of_op, tied(problem.graph, found))
    others = (device.name for device in problem.cluster.devices if device.kind not in ("cpu", "gpu"))
    forbidden = tuple(dict.fromkeys((*problem.forbidden, *others)))
    execution = replace(problem.execution, concurrency="sequential")
    return replace(together(problem, label), execution=execution, forbidden=forbidden)


@engine("llama.cpp", fit=layers_and_feed_forward)
def llama_cpp(plan: Plan) -> str:
    """Flags: -ngl, -dev, -ts, -ot, for llama-server and llama-cli.

    A layer slot i (the output is the last) is on the first device whose cumulative share of `-ts` exceeds
    (i - first slot on a GPU) / slots on GPUs, and slots before are on the CPU (src/llama-model.cpp, `load_tensors`).
    What deviates from that is set by `-ot`: a pattern of tensor names and a buffer. KV caches stay with the slot.
    """
    plan = at_homes(plan)
    problem, found = plan.problem, pieces(plan.problem.graph)
    check_layers(problem, found)
    feed = feed_forward(problem.graph, found) != ""
    cluster = problem.cluster
    host = [device.kind == "cpu" for device in cluster.devices]
    rest = [_device(plan, (found.of_op == piece) & ~feed, found.names[piece]) for piece in found.layers]
    sparse = [_device(plan, (found.of_op == piece) & feed, found.names[piece]) for piece in found.layers]
    after = [piece for piece in range(len(found.names)) if piece > found.layers[-1]]
    head = _device(plan, found.of_op == after[-1], found.names[after[-1]]) if after else rest[-1]
    slots = [device if device is not None else rest[0] for device in [*rest, head]]
    numbers = sorted(
        {d for d in [*slots, *(s for s in sparse if s is not None)] if d is not None and not host[d]},
        key=lambda d: accelerator_number(cluster, d),
    )
    if not numbers:
        return "-ngl 0\n"
    # Slots in runs: first the CPU's, then each GPU's in the order of their numbers; others are overrides.
    first = next((i for i, device in enumerate(slots) if device is not None and not host[device]), len(slots))
    share, base, at = [0] * len(numbers), list(slots), 0
    for i in range(first, len(slots)):
        device = slots[i]
        if device is not None and not host[device] and numbers.index(device) >= at:
            at = numbers.index(device)
        share[at] += 1
        base[i] = numbers[at]
    patterns = []
    buffers = {d: f"CUDA{accelerator_number(cluster, d)}" if not host[d] else "CPU" for d in range(len(host))}
    for part, wanted in (("", rest), (r"ffn_(up|down|gate).*", sparse)):
        for target in sorted({d for d in wanted if d is not None}):
            moved = [
                str(i) for i, d in enumerate(wanted)
                if d == target and d != (base[i] if not part or rest[i] == base[i] else rest[i])
            ]  # fmt: skip
            if moved:
                patterns.append(rf"blk\.({'|'.join(moved)})\.{part}={buffers[target]}")
    split = f" -ts {','.join(map(str, share))}" if len(numbers) > 1 else ""
    devices = f" -dev {','.join(buffers[d] for d in numbers)}" if len(numbers) < sum(not h for h in host) else ""
    # The first pattern that matches decides, so the narrower ones come first.
    override = f" -ot '{','.join(sorted(patterns, key=len, reverse=True))}'" if patterns else ""
    return f"-ngl {len(slots) - first}{devices}{split}{override}\n"


def check_layers(problem: Problem, found: Pieces) -> None:
    """What llama.cpp runs is a language model with a list of layers."""
    if not found.layers:
        raise Unsupported(f"{problem.graph.name!r:.60} has no list of layers that llama.cpp could place")
    check_language_model(problem)


def _device(plan: Plan, ops: np.ndarray[tuple[int], np.dtype[np.bool_]], name: str) -> int | None:
    used = np.unique(plan.placement[ops])
    if len(used) > 1:
        raise InvalidInput(f"the plan splits {name!r:.60} in a way that llama.cpp cannot: plan with --engine llama.cpp")
    return int(used[0]) if len(used) else None
