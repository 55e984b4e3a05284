"""REINFORCE, or PPO over a few epochs, for policies that place a whole graph at once.

A policy samples actions, tells the placements that they stand for, and scores the very actions that were evaluated:
the gradient is that of their probability and of no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from placewise.driver import Context
from placewise.errors import InvalidInput
from placewise.graph import Floats
from placewise.learned.episodes import FAILING
from placewise.problem import Problem
from placewise.terminal import say

#: What the width and the depth of a network may be.
LARGEST: Final = 1024
_COUNTERS: Final = ("baseline", "updates", "evaluations", "mean", "best")
Reward = Callable[[Floats], Floats]  # of times, as shares of `scale_of`
Actions = tuple[Tensor, ...]  # each with one row per sample


class Policy(Protocol):
    """A distribution over placements of one problem."""

    def sample(self, count: int, generator: torch.Generator) -> Actions:
        """Draw so many."""

    def score(self, actions: Actions) -> tuple[Tensor, Tensor]:
        """(log-probability [B], entropy [B]) of what was drawn."""

    def placements(self, actions: Actions) -> NDArray[np.int32]:
        """[B, N]."""


@dataclass(frozen=True)
class Settings:
    """How a policy is trained."""

    rate: float = 1e-3  # of Adam
    last_rate: float | None = None  # reached in a straight line after `horizon` updates; None = the rate stays
    samples: int = 16  # per update
    entropy: float = 0.01  # weight of the bonus
    last_entropy: float | None = None  # likewise
    horizon: int = 1000
    norm: float = 1.0  # gradients are scaled down to it
    baseline: Literal["moving", "batch"] = "moving"  # a moving average of rewards, or the mean of the other samples
    momentum: float = 0.9  # of the moving average
    normalise: bool = False  # advantages have the spread one
    epochs: int = 1  # more than one: PPO
    ratio: float = 0.2  # PPO's limit
    failures_until: float = np.inf  # share of the horizon after which samples that break a constraint teach nothing
    paces: Mapping[str, float] = field(default_factory=dict)  # rates of parts of the network, as multiples of `rate`

    def __post_init__(self) -> None:
        check(vars(self), samples=(1, 100_000), epochs=(1, LARGEST), rate=(0, 1e6), entropy=(0, 1e6))


def check(options: Mapping[str, Any], **limits: tuple[float, float]) -> None:
    """Refuse options outside of these limits, the least and the most; no machine has room for every network."""
    for name, (least, most) in limits.items():
        if not least <= options[name] <= most:
            bounds = f"{least:,} or more" if most == np.inf else f"from {least:,} to {most:,.0f}"
            raise InvalidInput(f"option {name} = {options[name]}: it must be {bounds}")


def scale_of(problem: Problem) -> float:
    """Seconds of all ops one by one, each where it is fastest: rewards are relative to it."""
    return max(float(problem.seconds.min(axis=1, initial=np.inf).sum()) if problem.num_ops else 1.0, 1e-300)


def costs_of(problem: Problem, placements: NDArray[np.int32], values: Floats) -> Floats:
    """Times as shares of `scale_of`; what breaks a constraint costs the more, the more of what is kept has no room."""
    count, devices = len(placements), problem.num_devices
    kept = problem.graph.resident_bytes
    flat = (np.arange(count)[:, None] * devices + placements).ravel()
    held = np.bincount(flat, np.tile(kept, count), count * devices).reshape(count, devices)
    over = np.maximum(held - problem.capacity, 0.0).sum(axis=1) / max(kept.sum(), 1e-300)
    found: Floats = np.where(
        np.isfinite(values), np.minimum(values / scale_of(problem), FAILING), FAILING * (1.0 + over)
    )
    return found


def minus_root(times: Floats) -> Floats:
    """The Hierarchical Planner's and ColocRL's: minus the square root of the time."""
    return -np.sqrt(times)


def inverse(times: Floats) -> Floats:
    """HSDAG's: one over the time."""
    return 1.0 / np.maximum(times, 1.0 / FAILING)


def diverged(when: str) -> InvalidInput:
    """What to say where a network gives what is no number."""
    return InvalidInput(f"the training diverged {when}: a smaller option rate may help")


def draw(chances: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[rows, count] choices by the probabilities in each row, on the CPU."""
    if not chances.isfinite().all():
        raise diverged("until here")
    return torch.multinomial(chances.cpu(), count, replacement=True, generator=generator)


class Learner:
    """A network, its optimiser, its random numbers and its baseline: all that a checkpoint holds."""

    def __init__(self, network: nn.Module, settings: Settings, seed: int) -> None:
        self.network, self.settings = network, settings
        parts = [{"params": part.parameters(), "name": name} for name, part in network.named_children()]
        self.optimiser = torch.optim.Adam(parts, lr=settings.rate)
        self.generator = torch.Generator().manual_seed(seed)
        self.baseline: float | None = None
        self.updates = self.evaluations = 0
        self.mean = self.best = np.inf  # of the last update, and of all

    def towards(self, first: float, last: float | None) -> float:
        """A setting that changes in a straight line over the horizon."""
        if last is None:
            return first
        return first + (last - first) * min(1.0, self.updates / max(1, self.settings.horizon))

    @property
    def entropy_weight(self) -> float:
        """Of the bonus, now."""
        return self.towards(self.settings.entropy, self.settings.last_entropy)

    def descend(self, loss: Tensor | Iterator[Tensor]) -> None:
        """One step of the optimiser; the parts of a loss are added up one by one."""
        rate = self.towards(self.settings.rate, self.settings.last_rate)
        for group in self.optimiser.param_groups:
            group["lr"] = rate * self.settings.paces.get(group["name"], 1.0)
        self.optimiser.zero_grad(set_to_none=True)
        for part in (loss,) if isinstance(loss, Tensor) else loss:
            part.backward()  # type: ignore[no-untyped-call]
        if not nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.norm).isfinite():
            raise diverged(f"after {self.updates} updates with rate {self.settings.rate:g}")
        self.optimiser.step()

    def advantages(self, rewards: Floats) -> Floats:
        """Rewards less what was to be expected; the moving average takes them in."""
        settings = self.settings
        if settings.baseline == "batch" and len(rewards) > 1:
            others = (rewards.sum() - rewards) / (len(rewards) - 1)
            found: Floats = rewards - others
        else:
            expected = float(rewards.mean()) if self.baseline is None else self.baseline
            found = rewards - expected
            self.baseline = settings.momentum * expected + (1 - settings.momentum) * float(rewards.mean())
        if settings.normalise:
            spread = float(found.std()) or float(np.abs(found).mean())  # all samples may be the same
            found = found / (spread + 1e-8)
        return found

    def gain(self, log_probability: Tensor, before: Tensor, advantage: Tensor) -> Tensor:
        """What to raise; of several epochs (PPO), only while no action is much likelier or less so than `before`."""
        if self.settings.epochs == 1:
            return advantage * log_probability
        ratio = (log_probability - before).exp()
        near = ratio.clamp(1 - self.settings.ratio, 1 + self.settings.ratio)
        return torch.minimum(ratio * advantage, near * advantage)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, facts) from which `restore` goes on as if nothing had happened."""
        tensors = {f"network.{key}": value for key, value in self.network.state_dict().items()}
        for index, moments in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{index}.{key}": torch.as_tensor(value) for key, value in moments.items()}
        tensors["generator"] = self.generator.get_state()
        facts = {key: getattr(self, key) for key in _COUNTERS}
        return {key: value.detach().cpu().clone() for key, value in tensors.items()}, facts

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Go on from a state. Weights alone (a shipped policy) begin a training of their own."""
        network = {key.removeprefix("network."): value for key, value in tensors.items() if key.startswith("network.")}
        self.network.load_state_dict(network)
        if "generator" not in tensors:
            return
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            if key.startswith("optimiser."):
                _, index, name = key.split(".")
                moments.setdefault(int(index), {})[name] = value
        whole = self.optimiser.state_dict()
        whole["state"] = moments
        self.optimiser.load_state_dict(whole)
        self.generator.set_state(tensors["generator"])
        for key in _COUNTERS:
            setattr(self, key, facts.get(key, getattr(self, key)))


def update(
    ctx: Context,
    learner: Learner,
    policy: Policy,
    reward: Callable[[Floats], Floats] = minus_root,
    *,
    learn: bool = True,
    most: int | None = None,
) -> Floats:
    """Sample (`most` at most), evaluate, learn; returns the values (infinite where one breaks a constraint)."""
    settings = learner.settings
    count = settings.samples if most is None else min(settings.samples, most)
    with torch.no_grad():
        actions = policy.sample(count, learner.generator)
    placements = policy.placements(actions)
    values = ctx.evaluate_batch(placements)
    actions = tuple(part[: len(values)] for part in actions)  # the budget may cut a batch short
    valid = np.isfinite(values)
    ctx.detail = f"mean {values[valid].mean():.3g} s, {valid.mean():.0%} fit" if valid.any() else "none fits"
    learner.evaluations += len(values)
    if not learn:
        learner.updates += 1
        return values
    rewards = reward(costs_of(ctx.problem, placements[: len(values)], values))
    # Where nothing fits there is nothing else to learn from.
    if valid.any() and learner.updates >= settings.failures_until * settings.horizon:
        keep = torch.from_numpy(np.flatnonzero(valid))
        actions, rewards = tuple(part[keep] for part in actions), rewards[valid]
    device = next(learner.network.parameters()).device
    advantage = torch.as_tensor(learner.advantages(rewards), dtype=torch.float32, device=device)
    before: Tensor | None = None
    for _ in range(settings.epochs):
        log_probability, entropy = policy.score(actions)
        before = log_probability.detach() if before is None else before
        gain = learner.gain(log_probability, before, advantage)
        learner.descend(-(gain + learner.entropy_weight * entropy).mean())
    learner.updates += 1
    return values


def train(
    ctx: Context, learner: Learner, policy: Policy, reward: Reward = minus_root, *,
    updates: int, patience: int, learn: bool = True,
) -> None:  # fmt: skip
    """Update until the budget is spent, so many updates are done, or nothing better comes.

    That is: neither the best nor the median of an update has been better for `patience` updates, and for as many as
    that took; or all samples were the same for a tenth of that. What is to end after `horizon` updates ends when the
    budget does, if that is earlier.
    """
    best = typical = np.inf
    found = same = 0
    longest = learner.settings.horizon
    while learner.updates < updates and not ctx.should_stop():
        values = update(ctx, learner, policy, reward, learn=learn)
        if ctx.spent:
            horizon = max(1, min(longest, round(learner.updates / ctx.spent)))
            learner.settings = replace(learner.settings, horizon=horizon)
        if ctx.best_value < best or np.median(values) < typical:
            best, typical, found = ctx.best_value, min(typical, float(np.median(values))), learner.updates
        same = same + 1 if (values == values[0]).all() else 0
        if learner.updates - found > max(patience, found) or same > patience / 10:
            break


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Networks that are made inside have the same weights whenever the seed is the same; nothing else is disturbed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def single_threaded() -> Iterator[None]:
    """On a CPU, kernels as small as ours lose more than they gain by a second core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def compute_device() -> torch.device:
    """CUDA where there is one, and then it is said, once."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    say(f"the policy runs on {torch.cuda.get_device_name()}")
    return torch.device("cuda")
