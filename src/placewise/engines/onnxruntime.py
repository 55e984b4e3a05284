"""ONNX Runtime: nodes to execution providers, by name."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from placewise.engines import engine
from placewise.errors import InvalidInput, Unsupported
from placewise.plans import Plan
from placewise.problem import Problem

_DESIGNATOR = {"cpu": "cpu", "npu": "npu"}
_RESERVED = frozenset("(),;=")


def one_gpu(problem: Problem) -> Problem:
    """A session runs its nodes one after the other, on the CPU and at most one other device."""
    others = [device.name for device in problem.cluster.devices if device.kind != "cpu"]
    usable = [name for name in others if name not in problem.forbidden]
    if len(usable) > 1:
        raise Unsupported(
            f"a session of ONNX Runtime has one accelerator, and there are {', '.join(usable)}: "
            f"forbid all but one, as with --forbid {usable[-1]}"
        )
    return replace(problem, execution=replace(problem.execution, concurrency="sequential"))


@engine("onnxruntime", fit=one_gpu)
def onnxruntime(plan: Plan) -> str:
    """JSON of session options with session.name_based_layer_assignment (ONNX Runtime 1.28 and later).

    Rules match parts of node names and the longest wins, so whole names are safe. Versions before ignore the option
    without a word: set session.record_ep_graph_assignment_info and read back where nodes are.
    """
    graph, cluster = plan.problem.graph, plan.problem.cluster
    used = [cluster.devices[d] for d in sorted(set(plan.placement.tolist()))]
    if sum(device.kind != "cpu" for device in used) > 1:
        raise InvalidInput("the plan uses two accelerators, and a session has one: plan with `--engine onnxruntime`")
    rules = []
    for device in np.unique(plan.placement).tolist():
        ops = np.flatnonzero((plan.placement == device) & ~graph.is_stored).tolist()
        names = [graph.op_names[op] for op in ops if graph.op_kinds[op] != "input"]
        for name in names:
            if _RESERVED & set(name):
                raise InvalidInput(f"the name of node {name!r:.60} has a sign that the rules use; rename it")
        if names:
            rules.append(f"{_DESIGNATOR.get(cluster.devices[device].kind, 'gpu')}({', '.join(names)})")
    options = {"session.name_based_layer_assignment": "; ".join(rules), "session.record_ep_graph_assignment_info": "1"}
    return json.dumps(options, indent=1) + "\n"
