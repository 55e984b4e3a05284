"""Methods that learn one graph and place all of it at once: ColocRL, the Hierarchical Planner and HSDAG."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple

from placewise.driver import Context
from placewise.errors import InvalidInput
from placewise.learned import checkpoint
from placewise.learned.reinforce import Learner, Policy, Reward, minus_root, single_threaded, train
from placewise.planners import get
from placewise.problem import Problem

METHODS: Final = ("colocrl", "hierarchical", "hsdag")
#: Options on how to go on; all others say what a network is.
_LEARNING: Final = ("epochs", "rate", "pace", "entropy", "horizon")
_HOW: Final = (*_LEARNING, "policy", "train", "samples", "updates", "patience")


class Pupil(NamedTuple):
    """A method at work on a problem."""

    learner: Learner
    policy: Policy
    reward: Reward


def pupil(method: str, problem: Problem, seed: int, options: Mapping[str, Any]) -> Pupil:
    """One that has learned nothing yet: each method has `learner` in a file of its name, and may have `REWARD`."""
    module = import_module(f"placewise.learned.{method}")
    learner, policy = module.learner(problem, seed, options)
    return Pupil(learner, policy, getattr(module, "REWARD", minus_root))


def place(method: str, problem: Problem, ctx: Context, options: Mapping[str, Any]) -> None:
    """Learn from this graph, or plan with what was learned from it."""
    path, known = options["policy"], None
    if path != "none":
        known = checkpoint.load(path, method)
        if not options["train"]:
            checkpoint.refuse_idle(method, options, _LEARNING, "without train=true, the policy learns nothing")
        options = checkpoint.options_of(method, options, _built(method, problem, known, path), path)
    with single_threaded():
        learner, policy, reward = pupil(method, problem, int(ctx.rng.integers(2**31)), options)
        if known:
            checkpoint.begin_with(learner, known, path)
        learns = options["train"] or not known
        train(ctx, learner, policy, reward, updates=options["updates"], patience=options["patience"], learn=learns)


def _built(method: str, problem: Problem, known: checkpoint.Checkpoint, path: str) -> dict[str, Any]:
    """The options that say what the network of a file is; the file may say anything."""
    if known.facts.get("problem") != problem.digest:
        raise InvalidInput(
            f"{path}: a policy of {method} serves the one problem that it was trained on: the same model, box and "
            "objective. Train one for this, or take placeto, whose policies serve any"
        )
    options = known.facts.get("options")
    if not isinstance(options, dict):
        raise InvalidInput(f"{path}: does not say how its network is built")
    try:
        return {name: value for name, value in get(method).settings(options).items() if name not in _HOW}
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None
