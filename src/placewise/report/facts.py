"""What `--json` says of graphs, plans and comparisons, in seconds and bytes."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line imports this, and nothing heavy
    from placewise.driver import Outcome
    from placewise.graph import Graph
    from placewise.plans import Plan


def graph_facts(graph: Graph) -> dict[str, Any]:
    """What there is to say about a graph before it is planned."""
    from placewise.kinds import TensorType

    held = dict.fromkeys(("parameter", "state"), 0.0)
    parameters = 0.0
    for op, size in zip(graph.tensor_producer.tolist(), graph.tensor_bytes.tolist(), strict=True):
        kind = graph.op_kinds[op]
        if kind in held:
            held[kind] += size
        if kind == "parameter":
            parameters += size / TensorType(graph.op_dtypes[op], ()).bytes
    return {
        "model": graph.name, "ops": int((~graph.is_stored).sum()), "parameters": round(parameters),
        "flops": float(graph.flops.sum()), "bytes": held["parameter"], "state_bytes": held["state"],
    }  # fmt: skip


def comparison_facts(outcomes: list[Outcome], one_device: float) -> dict[str, Any]:
    """What `compare` says, row by row."""
    best = outcomes[0].plan
    rows = [
        {"planner": row.planner, "reason": row.reason}
        if row.plan is None
        else plan_facts(row.plan) | {"beaten_by_one_device": row.plan.value > one_device}
        for row in outcomes
    ]
    facts = {"best": best and best.planner, "lower_bound": best and best.lower_bound, "one_device": one_device}
    return facts | {"planners": rows}


def plan_facts(found: Plan) -> dict[str, Any]:
    """What every command says about a plan in JSON; seconds and bytes."""
    problem, timeline = found.problem, found.timeline
    devices = {
        device.name: {
            "ops": int((found.placement == d).sum()),
            "busy": float(timeline.busy[d]),
            "peak_memory": float(timeline.peak[d]),
            "memory": device.memory,
        }
        for d, device in enumerate(problem.cluster.devices)
    }
    return {
        "model": problem.graph.name, "cluster": problem.cluster.name, "objective": problem.objective,
        "planner": found.planner, "found_by": found.found_by, "proved_by": found.proved_by,
        "options": dict(found.options), "seed": found.seed,
        "value": found.value, "lower_bound": found.lower_bound, "gap": found.gap,
        "seconds": found.seconds, "evaluations": found.evaluations, "stopped": found.stopped,
        "cost_shares": found.cost_shares, "devices": devices,
    }  # fmt: skip


def to_json(value: Any) -> str:
    """As text."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    """JSON has no infinity: what is unlimited or unknown is null."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
