"""Planners that learn: groups and features of a graph, the environment, REINFORCE, and a file for each method.

Only this file is imported before a method is used: PyTorch is not.
"""

from collections.abc import Callable
from importlib.util import find_spec

from placewise import importers
from placewise.problem import Problem


def supports(problem: Problem) -> bool | str:
    """Whether a learned planner applies."""
    if find_spec("torch") is None or find_spec("safetensors") is None:
        return "needs PyTorch: pip install 'placewise[learned]'"
    if problem.contiguous or problem.max_devices:
        return "ignores contiguity and device counts"
    return True if problem.num_ops else "needs ops to place"


def require() -> None:
    """Import what learning needs, or say what to install: a package may be there and not work."""
    for module in ("torch", "safetensors"):
        importers.require(module, "learned")


def warm_up(method: str) -> Callable[[Problem], None]:
    """What a method that learns one graph does before the clock starts: PyTorch is imported, and kernels compiled."""

    def compile(problem: Problem) -> None:
        require()
        from placewise.learned.grouping import at_most, units
        from placewise.learned.one_graph import pupil
        from placewise.planners import get

        at_most(units(problem), 1)
        learner, policy, _ = pupil(method, problem, 0, get(method).settings({}))
        learner.descend(-policy.score(policy.sample(1, learner.generator))[0].mean())

    return compile
