"""OpenVINO's HETERO plugin: a device for every op, by its friendly name."""

from __future__ import annotations

import json
from dataclasses import replace

from placewise.cluster import Cluster
from placewise.engines import engine
from placewise.errors import InvalidInput
from placewise.plans import Plan
from placewise.problem import Problem


def one_after_another(problem: Problem) -> Problem:
    """HETERO runs its subgraphs one after the other, so devices never overlap in one inference."""
    return replace(problem, execution=replace(problem.execution, concurrency="sequential"))


@engine("openvino", fit=one_after_another)
def openvino(plan: Plan) -> str:
    """JSON of friendly names to OpenVINO's devices; affinities are lost when a model is saved, so keep this file.

    Read the model, set `op.get_rt_info()["affinity"]` of *every* op by its friendly name, constants and results too,
    and compile for "HETERO:" and the devices. Names are the ops of the graph: import the model from its .xml file.
    """
    cluster = plan.problem.cluster
    names = [device_name(cluster, d) for d in range(plan.problem.num_devices)]
    used_names = [names[d] for d in sorted(set(plan.placement.tolist()))]
    if len(set(used_names)) < len(used_names):
        raise InvalidInput(f"OpenVINO would take two devices for one: {', '.join(used_names)}; name them as it does")
    places = {op: names[d] for op, d in zip(plan.problem.graph.op_names, plan.placement.tolist(), strict=True)}
    used = dict.fromkeys(sorted(places.values(), key=lambda name: (name == "CPU", name)))  # the CPU takes what is left
    return json.dumps({"device": f"HETERO:{','.join(used)}", "affinity": places}, indent=1) + "\n"


def device_name(cluster: Cluster, device: int) -> str:
    """What OpenVINO calls a device: its name in the cluster if it is one of OpenVINO's, else by kind and number."""
    kind, known = cluster.devices[device].kind, cluster.device_names[device].upper()
    if known in ("CPU", "GPU", "NPU") or known.partition(".")[0] == "GPU":
        return known
    if kind in ("cpu", "npu"):
        return kind.upper()
    gpus = [d for d, other in enumerate(cluster.devices) if other.kind == kind]
    return f"GPU.{gpus.index(device)}" if len(gpus) > 1 else "GPU"
