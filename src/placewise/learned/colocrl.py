"""ColocRL: a sequence-to-sequence network places co-location groups, trained by REINFORCE.

The paper (Mirhoseini et al. 2017, arXiv:1706.04972) also has rules for its models, such as one group for each step of
an LSTM; here all graphs have the same rules, and beyond 256 groups the heaviest edges are merged. Advantages are
divided by their spread, and there is a falling bonus for entropy. The network is smaller: what a CPU can do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from placewise.learned import features
from placewise.learned.grouping import Groups, at_most, coplace
from placewise.learned.reinforce import Actions, Learner, Settings, check, compute_device, seeded
from placewise.learned.seq2seq import Memory, Seq2Seq
from placewise.problem import Problem


class GroupPolicy:
    """A network that reads a fixed sequence of groups once, and places all samples together."""

    def __init__(self, groups: Groups, network: Seq2Seq, seen: NDArray[np.float64]) -> None:
        device = next(network.parameters()).device
        self.groups, self.network = groups, network
        self.seen = torch.as_tensor(seen, dtype=torch.float32, device=device)[None]
        self.may = torch.as_tensor(groups.allowed, device=device)
        self.memory = Memory.of(groups, device)

    def sample(self, count: int, generator: torch.Generator) -> Actions:
        """Devices of groups."""
        may = self.may.expand(count, -1, -1)
        return (self.network.sample(self._encoded(count), may, generator, self.memory),)

    def score(self, actions: Actions) -> tuple[Tensor, Tensor]:
        """Of these devices."""
        (devices,) = actions
        count = len(devices)
        return self.network.score(self._encoded(count), self.may.expand(count, -1, -1), devices, self.memory)

    def placements(self, actions: Actions) -> NDArray[np.int32]:
        """Devices of ops."""
        return self.groups.expand(actions[0].cpu().numpy())

    def _encoded(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of all samples. cuDNN refuses first states of an LSTM that are one row seen many times."""
        states, hidden, cell = self.network.encode(self.seen)
        return states.expand(count, -1, -1), hidden.repeat(count, 1), cell.repeat(count, 1)


def embedding(groups: Groups) -> NDArray[np.float64]:
    """[G, F] what the paper's network reads of a group: kinds of ops, shapes of outputs, neighbours."""
    return np.concatenate([features.kinds(groups), features.shapes(groups), features.adjacency(groups)], axis=1)


def learner(problem: Problem, seed: int, options: Mapping[str, Any]) -> tuple[Learner, GroupPolicy]:
    """A network that has learned nothing yet, and how to train it; the options are the planner's."""
    check(options, groups=(1, np.inf))
    groups = at_most(coplace(problem), options["groups"])
    seen = embedding(groups)
    with seeded(seed):
        network = Seq2Seq(
            seen.shape[1], problem.num_devices, options["hidden"], options["constant"], options["temperature"]
        )
    settings = Settings(
        rate=options["rate"], samples=options["samples"], entropy=options["entropy"] / groups.count, last_entropy=0.0,
        horizon=options["horizon"], baseline="moving", normalise=True, failures_until=0.75,
    )  # fmt: skip
    network.to(compute_device())
    return Learner(network, settings, seed), GroupPolicy(groups, network, seen)
