"""Hugging Face accelerate and transformers: a device for each module."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np

from placewise.costs import Costs
from placewise.engines import engine
from placewise.engines.pieces import Pieces, device_of_pieces, pieces, tied, together
from placewise.engines.ranks import accelerator_number
from placewise.engines.torch_offload import at_homes
from placewise.errors import Unsupported
from placewise.plans import Plan
from placewise.problem import Problem

#: What the weights of a model may take of all accelerators before some are left in host memory.
_FULL = 0.95


def whole_modules(problem: Problem) -> Problem:
    """Modules run one after the other, each where its weights are; on a CPU only if there is no accelerator.

    accelerate keeps layers whole and tied weights together. What it calls "cpu" is kept in host memory and computed on
    an accelerator, so a plan has no op on the CPU; a model whose weights do not fit is not for this export.
    """
    found = pieces(problem.graph)
    if not found.names:
        raise Unsupported(f"{problem.graph.name!r:.60} has no modules that accelerate could place")
    devices = problem.cluster.devices
    hosts = [device.kind != "gpu" for device in devices]
    if not all(hosts):
        room = sum(device.memory for device, host in zip(devices, hosts, strict=True) if not host)
        if problem.graph.resident_bytes.sum() > _FULL * room:
            raise Unsupported(
                f"the weights of {problem.graph.name!r:.60} do not fit the accelerators, and what accelerate leaves in "
                "host memory it copies for each use: plan with --engine torch-offload (whose plans this export takes "
                "too), with --engine llama.cpp, or with more accelerators"
            )
        seconds = np.where(np.array(hosts)[None, :] & ~problem.graph.is_stored[:, None], np.inf, problem.costs.seconds)
        problem = replace(problem, costs=Costs.create(seconds, problem.costs.label))
    labels = tied(problem.graph, found)
    execution = replace(problem.execution, concurrency="sequential")
    return replace(together(problem, labels), execution=execution)


@engine("accelerate", fit=whole_modules, versions="accelerate>=1.0")
def accelerate(plan: Plan) -> str:
    """JSON for `device_map` of `from_pretrained`, or of `accelerate.dispatch_model`.

    A module that holds lists of layers may have weights of its own: it has an entry, too, and those of its layers,
    which are longer, count for these.
    """
    cluster, found = plan.problem.cluster, pieces(plan.problem.graph)
    if not found.names:
        raise Unsupported(f"{plan.problem.graph.name!r:.60} has no modules that accelerate could place")
    at_home = at_homes(plan)
    devices = device_of_pieces(plan, found, "accelerate") if at_home is plan else _whole_layers(at_home, found)
    graph, places = plan.problem.graph, dict[str, int | str]()
    holds = np.flatnonzero((found.of_op < 0) & (graph.resident_bytes > 0)).tolist()
    own = {graph.op_modules[op]: int(at_home.placement[op]) for op in reversed(holds)}
    for name, device in [*sorted(own.items()), *zip(found.names, devices, strict=True)]:
        host = cluster.devices[device].kind == "cpu"
        places[name] = "cpu" if host else accelerator_number(cluster, device)
    return json.dumps(places, indent=1) + "\n"


def _whole_layers(plan: Plan, found: Pieces) -> list[int]:
    """Where the weights of each piece are; of a layer that is split, in host memory."""
    print(
        'note: accelerate copies what is on "cpu" for each use and computes it on the GPU; the plan may compute it on '
        "the CPU, or stream it ahead of time, which Plan.apply does",
        file=sys.stderr,
    )
    host = [device.kind == "cpu" for device in plan.problem.cluster.devices]
    used = [np.unique(plan.placement[found.of_op == piece]).tolist() for piece in range(len(found.names))]
    return [next((d for d in devices if host[d]), devices[0]) for devices in used]
