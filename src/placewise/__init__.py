"""Placewise decides which device runs each operation of a neural network, and says how far from the best that is.

>>> import placewise as pw
>>> problem = pw.load_problem("inception-v3", "two-gpus-one-host")
>>> plan = pw.plan(problem, "heft")
>>> plan.value > plan.lower_bound
True
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from placewise.cluster import Cluster, Device, Link, full_mesh
    from placewise.costs import Costs
    from placewise.driver import Budget, Context, Outcome, compare, plan
    from placewise.errors import InvalidInput, NoFeasiblePlan, PlacewiseError, Unsupported
    from placewise.files import load_problem
    from placewise.graph import Graph, GraphBuilder
    from placewise.importers.torch_export import from_torch
    from placewise.importers.transformers import from_transformers
    from placewise.learned.env import PlacementEnv, PlacementVectorEnv
    from placewise.planners import planner
    from placewise.plans import Plan
    from placewise.problem import Execution, Problem
    from placewise.sharding import plan_sharded
    from placewise.simulator import Timeline, evaluate, simulate

_HOME = {
    "Cluster": "cluster", "Device": "cluster", "Link": "cluster", "full_mesh": "cluster", "Costs": "costs",
    "Budget": "driver", "Context": "driver", "Outcome": "driver", "compare": "driver", "plan": "driver",
    "InvalidInput": "errors", "NoFeasiblePlan": "errors", "PlacewiseError": "errors", "Unsupported": "errors",
    "load_problem": "files", "Graph": "graph", "GraphBuilder": "graph", "Plan": "plans", "planner": "planners",
    "Execution": "problem", "Problem": "problem", "plan_sharded": "sharding",
    "from_torch": "importers.torch_export", "from_transformers": "importers.transformers",
    "PlacementEnv": "learned.env", "PlacementVectorEnv": "learned.env",
    "Timeline": "simulator", "evaluate": "simulator", "simulate": "simulator",
}  # fmt: skip
__all__ = [
    "Budget",
    "Cluster",
    "Context",
    "Costs",
    "Device",
    "Execution",
    "Graph",
    "GraphBuilder",
    "InvalidInput",
    "Link",
    "NoFeasiblePlan",
    "Outcome",
    "PlacementEnv",
    "PlacementVectorEnv",
    "PlacewiseError",
    "Plan",
    "Problem",
    "Timeline",
    "Unsupported",
    "compare",
    "evaluate",
    "from_torch",
    "from_transformers",
    "full_mesh",
    "load_problem",
    "plan",
    "plan_sharded",
    "planner",
    "simulate",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import what is asked for and no more, so that `import placewise` costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'placewise' has no attribute {name!r}")
    return getattr(importlib.import_module(f"placewise.{_HOME[name]}"), name)
