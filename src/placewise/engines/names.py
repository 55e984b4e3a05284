"""Engines that know ops by their names in a model file."""

from __future__ import annotations

from typing import Final

from placewise.engines.torch_offload import AFTER, WEIGHTS
from placewise.errors import InvalidInput
from placewise.plans import Plan

#: The files whose ops an engine knows.
_FILES: Final = {"openvino": ".xml", "onnxruntime": ".onnx", "onnxruntime-split": ".onnx"}


def check_ops(plan: Plan, engine: str) -> None:
    """Refuse a plan whose ops the engine does not have: parts of modules, or ops with the names that torch gives."""
    graph = plan.problem.graph
    if any(name.endswith((AFTER, WEIGHTS)) for name in graph.op_names):
        raise InvalidInput(f"the plan is of parts of modules, for torch-offload, and not of ops: plan with `--engine "
                           f"{engine}`")  # fmt: skip
    named = zip(graph.op_names, graph.op_modules, graph.is_stored.tolist(), strict=True)
    for name, module, stored in named if engine in _FILES else ():
        if module and not stored and name.startswith(f"{module}."):
            raise InvalidInput(f"{name!r:.60} is an op of PyTorch's, and {engine} knows those of a file alone: plan "
                               f"the {_FILES[engine]} file itself")  # fmt: skip
