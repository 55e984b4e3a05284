"""Planners that learn: groups and features of a graph, the environment, REINFORCE, and a file for each method.

Only this file is imported before a method is used: PyTorch is not.
"""

from importlib.util import find_spec

from placewise.problem import Problem


def supports(problem: Problem) -> bool | str:
    """Whether a learned planner applies."""
    if find_spec("torch") is None or find_spec("safetensors") is None:
        return "needs PyTorch: pip install 'placewise[learned]'"
    if problem.contiguous or problem.max_devices:
        return "ignores contiguity and device counts"
    return True if problem.num_ops else "needs ops to place"
