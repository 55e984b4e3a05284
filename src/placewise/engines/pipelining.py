"""torch.distributed.pipelining: a stage for each process, over one machine or several."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Final

from placewise.engines import engine
from placewise.engines.pieces import device_of_pieces, pieces, together
from placewise.engines.ranks import accelerator_number
from placewise.errors import InvalidInput, Unsupported
from placewise.plans import Plan
from placewise.problem import Problem

_SCRIPT: Final = Path(__file__).parent / "scripts" / "pipelining.py"
_FEWEST: Final = 4  # microbatches for each stage where the plan does not say: bubbles are then at most a fifth

_SETTINGS: Final = """\
STAGES = [  # the modules of each stage
{stages}]
RANKS = {ranks}  # the process that runs each stage
DEVICES = {devices}  # of each process
LAYERS = {layers}  # the list of layers, if the model has one
SCHEDULE = {schedule}
MICROBATCHES = {microbatches}
"""


def whole_modules(problem: Problem) -> Problem:
    """Modules stay whole (layers, and what stands beside them), and each device has consecutive ones.

    Processes send to each other by one backend, NCCL or gloo, so stages are on GPUs alone, or on CPUs where there is
    none.
    """
    found = pieces(problem.graph)
    if len(found.names) < 2:
        raise Unsupported(f"{problem.graph.name!r:.60} has no modules that a pipeline could be cut between")
    devices = problem.cluster.devices
    kind = "gpu" if any(device.kind == "gpu" for device in devices) else "cpu"
    others = (device.name for device in devices if device.kind != kind)
    forbidden = tuple(dict.fromkeys((*problem.forbidden, *others)))
    return replace(together(problem, found.of_op), contiguous=True, forbidden=forbidden)


@engine("pipelining", fit=whole_modules, versions="torch>=2.7")
def pipelining(plan: Plan) -> str:
    """A Python script for torchrun: stages, microbatches and schedule, for inference and training.

    Models of transformers are cut by their list of layers, for tracing them fails; others by torch's tracer. A device
    that the plan comes back to, each time after all others, is one whose stages are interleaved.
    """
    found = pieces(plan.problem.graph)
    if len(found.names) < 2:
        raise Unsupported(f"{plan.problem.graph.name!r:.60} has no modules that a pipeline could be cut between")
    device = device_of_pieces(plan, found, "pipelining")
    stages: list[list[str]] = []
    places: list[int] = []
    for name, place in zip(found.names, device, strict=True):
        if not places or places[-1] != place:
            stages.append([])
            places.append(place)
        stages[-1].append(name)
    order = list(dict.fromkeys(places))
    rounds, rest = divmod(len(places), len(order))
    if rest or places != order * rounds:
        raise InvalidInput("the plan comes back to a device before it was on all: plan with `--engine pipelining`")
    cluster, execution = plan.problem.cluster, plan.problem.execution
    if len({cluster.devices[d].kind for d in order}) > 1:
        raise InvalidInput("the plan has stages on CPUs and on GPUs, which no backend connects: "
                           "plan with `--engine pipelining`")  # fmt: skip
    homes = ["cpu" if cluster.devices[d].kind == "cpu" else f"cuda:{accelerator_number(cluster, d)}" for d in order]
    settings = _SETTINGS.format(
        stages="".join(f"    {json.dumps(stage)},\n" for stage in stages),
        ranks=[order.index(place) for place in places],
        devices=json.dumps(homes),
        layers=json.dumps(found.names[found.layers[0]].rpartition(".")[0] if found.layers else ""),
        schedule=json.dumps(execution.pipeline),
        microbatches=execution.microbatches if execution.microbatches > 1 else _FEWEST * len(order),
    )
    before, _, after = _SCRIPT.read_text(encoding="utf-8").partition("STAGES: ")
    return before + settings + after.partition("MICROBATCHES = 1\n")[2]
