"""CPU time of a sample of the Hierarchical Planner and of ColocRL beyond its simulation, on the paper's models."""

from __future__ import annotations

import argparse
import time
from typing import Any

from harness import main, progress
from placewise import Budget, load_problem
from placewise.driver import Context
from placewise.learned import colocrl, hierarchical
from placewise.learned.reinforce import Policy, single_threaded, update
from placewise.planners import get

STEPS = {"inception-v3": 2, "resnet-152": 2, "rnnlm": 2, "nmt-2": 2, "nmt-4": 4, "nmt-8": 8}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds per sample, of the quickest update."""
    found = []
    for model in options.models:
        problem = load_problem(f"{model}-train", f"hierarchical-{STEPS[model]}")
        for method in (hierarchical, colocrl):
            name = method.__name__.rpartition(".")[2]
            progress(f"{name}: {model}")
            settings = get(name).settings({"samples": options.samples})
            with single_threaded():
                learner, policy = method.learner(problem, 0, settings)
                ctx = Timed(problem, Budget(), 0, 0.0, None)
                beyond, inside = min(one_update(ctx, learner, policy) for _ in range(options.updates))
            found.append({
                "model": model, "method": name, "ops": problem.num_ops, "groups": groups_of(policy),
                "beyond, ms": 1e3 * beyond / options.samples, "simulation, ms": 1e3 * inside / options.samples,
            })  # fmt: skip
    return found


class Timed(Context):
    """Knows how long the simulator took."""

    simulating = 0.0

    def evaluate_batch(self, placements: Any) -> Any:
        """As ever."""
        began = time.process_time()
        values = super().evaluate_batch(placements)
        self.simulating += time.process_time() - began
        return values


def one_update(ctx: Timed, learner: Any, policy: Policy) -> tuple[float, float]:
    """(seconds outside the simulator, seconds inside): sampling, scoring, the gradient and the step."""
    began, before = time.process_time(), ctx.simulating
    update(ctx, learner, policy)
    inside = ctx.simulating - before
    return time.process_time() - began - inside, inside


def groups_of(policy: Any) -> int:
    return int(policy.groups if isinstance(policy.groups, int) else policy.groups.count)


if __name__ == "__main__":
    main(
        "A sample of a policy beyond its simulation: milliseconds of CPU time",
        measure,
        models={"nargs": "+", "choices": list(STEPS), "default": list(STEPS), "help": "which"},
        samples={"type": int, "default": 16, "help": "per update; default: %(default)s"},
        updates={"type": int, "default": 6, "help": "of which the quickest counts; default: %(default)s"},
    )
