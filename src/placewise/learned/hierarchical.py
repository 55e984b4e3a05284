"""The Hierarchical Planner: one network groups ops, another places the groups; REINFORCE trains both together.

What is evaluated is what is trained on: a sample is a grouping and the devices of its groups, and its probability is
that of both. (The code that TensorFlow once shipped draws new actions when it trains, so that nothing is learned.)

Where it departs from the paper (Mirhoseini et al., ICLR 2018), and from that code, which differs from the paper:

- Backward ops and parameters go with their forward ops, so that the grouper decides on the forward graph.
- Groups begin as what merging along the heaviest edges gives. With groups by chance, as in the paper, every placement
  but that on one device moves all data, and one device is what the placer then learns.
- The grouper does not decide on ops but on `pieces`, a few of each of these groups, and moves a piece at first seldom,
  to a group that it exchanges data with. What a few thousand placements say about each of a thousand ops that go
  anywhere is nothing: the groups would stay as they are.
- The grouper reads distances to an op's neighbours and its position; raw numbers of neighbours are unnormalised. Its
  nonlinearity is the paper's; the code has none.
- 16 groups instead of 256: what one number per placement says about each group is little, and with more groups the
  placer is still undecided when a few thousand placements are spent. A graph of so few ops that each is a piece begins
  without groups: merging would only lose. 64 hidden units instead of 256 each way, which cost a CPU less.
- Adam at 0.004, and twice that for the grouper: at the published 0.1 nothing is learned. Advantages are divided
  by their spread.
- A falling bonus for entropy instead of noise on the logits: what was drawn then has the probability that is trained.
  For the grouper it would dissolve the groups. There, instead, a piece that is a group by itself pays for leaving it:
  else it soon joins another by chance, and no later sample parts them.
- 4 groupings, each placed 4 times, per update; in the paper 1 and 4.
- An empty group is no choice. An op that may not run where its group goes runs where it is fastest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from placewise.errors import InvalidInput
from placewise.learned import features
from placewise.learned.grouping import Groups, at_most, units
from placewise.learned.reinforce import Actions, Learner, Policy, Settings, check, compute_device, draw, seeded
from placewise.learned.seq2seq import Memory, Seq2Seq, score_devices
from placewise.problem import Problem

GROUPS: Final = 16  # of a large graph, unless told
_KIND = 20  # the width of a kind's embedding
_GROUPER = 64  # hidden units
_FAR = 1e-3  # how seldom a piece that leaves its group goes where it exchanges nothing


class Ops:
    """What the networks know of ops: of units, as backward ops go with their forward ops, or of pieces made of them."""

    def __init__(self, found: Groups) -> None:
        self.groups = found
        rest = [features.shapes(found), features.neighbours(found), features.position(found)]
        to = compute_device()
        self.kinds = torch.as_tensor(features.kinds(found), dtype=torch.float32, device=to)
        self.rest = torch.as_tensor(np.concatenate(rest, axis=1), dtype=torch.float32, device=to)
        self.may = torch.as_tensor(found.allowed, device=to)
        self.memory = Memory.of(found, to)
        self.source, self.target = (torch.as_tensor(ends, device=to) for ends in found.edges[:2])
        content = [self.kinds, self.rest[:, : rest[0].shape[1]], self.may.float()]  # what groups have the sums of
        self.content, self.widths = torch.cat(content, dim=1), [part.shape[1] for part in content]
        self.fastest = found.seconds.argmin(axis=1)

    @property
    def count(self) -> int:
        """U."""
        return self.groups.count

    def expand(self, devices: NDArray[np.int64]) -> NDArray[np.int32]:
        """[B, N] from devices of units [B, U]; a unit that may not run there runs where it is fastest."""
        may = self.groups.allowed[np.arange(self.count), devices]
        return self.groups.expand(np.where(may, devices, self.fastest))


class FeedForward(nn.Module):
    """A choice for each op by itself: of a group, or of a device."""

    def __init__(self, ops: Ops, choices: int) -> None:
        super().__init__()
        self.kind = nn.Linear(ops.kinds.shape[1], _KIND, bias=False)  # the mean of the embeddings of a unit's kinds
        self.inner = nn.Linear(_KIND + ops.rest.shape[1], _GROUPER)
        self.outer = nn.Linear(_GROUPER, choices)

    def forward(self, ops: Ops) -> Tensor:
        """[U, choices] logits."""
        logits: Tensor = self.outer(torch.relu(self.inner(torch.cat([self.kind(ops.kinds), ops.rest], dim=1))))
        return logits


class Hierarchy(nn.Module):
    """Both networks: what a checkpoint holds."""

    def __init__(self, ops: Ops, groups: int, placer: Seq2Seq) -> None:
        super().__init__()
        self.grouper, self.placer = FeedForward(ops, groups), placer


class HierarchicalPolicy:
    """Groupings, each placed several times. Where one is `fixed`, it is the only one.

    `at_first` [U, G] is added to the logits of the grouper.
    """

    def __init__(self, ops: Ops, network: Hierarchy, at_first: Tensor, placements: int, fixed: Tensor | None) -> None:
        self.ops, self.network, self.at_first, self.each, self.fixed = ops, network, at_first, placements, fixed
        self.groups, home = at_first.shape[1], at_first.argmax(dim=1)
        self.alone = torch.bincount(home)[home] == 1

    def sample(self, count: int, generator: torch.Generator) -> Actions:
        """(group of each unit [B, U], device of each group [B, G]); rows with the same grouping are neighbours."""
        if self.fixed is None:
            drawn = draw(self._log_chances().exp(), -(-count // self.each), generator)
            grouping = drawn.T.to(self.ops.may.device).repeat_interleave(self.each, dim=0)[:count]
        else:
            grouping = self.fixed.expand(count, -1)
        encoded, may = self._encoded(grouping)
        return grouping, self.network.placer.sample(encoded, may, generator, self._memory(grouping))

    def score(self, actions: Actions) -> tuple[Tensor, Tensor]:
        """Of these groupings and devices together; the entropy of devices, less what leaving groups of one costs."""
        grouping, devices = actions
        encoded, may = self._encoded(grouping)
        placed, entropy = self.network.placer.score(encoded, may, devices, self._memory(grouping))
        if self.fixed is not None:
            return placed, entropy
        chances = self._log_chances()
        gone = (chances.exp() * (chances - self.at_first.log_softmax(dim=1))).sum(dim=1)  # how far from what it was
        return chances.gather(1, grouping.T).sum(dim=0) + placed, entropy - gone[self.alone].sum()

    def placements(self, actions: Actions) -> NDArray[np.int32]:
        """Each op goes where its group goes."""
        grouping, devices = actions
        return self.ops.expand(devices.gather(1, grouping).cpu().numpy())

    def _log_chances(self) -> Tensor:
        """[U, G] of each op to be in each group."""
        logits: Tensor = self.network.grouper(self.ops) + self.at_first
        return logits.log_softmax(dim=1)

    def _memory(self, grouping: Tensor) -> Memory | None:
        """What the groups of each row keep [B, G]."""
        if self.ops.memory is None:
            return None
        kept = torch.zeros(len(grouping), self.groups, dtype=torch.int64, device=grouping.device)
        every = self.ops.memory.kept.expand(grouping.shape)
        return self.ops.memory._replace(kept=kept.scatter_add(1, grouping, every))

    def _encoded(self, grouping: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """What the placer sees of each row, read once per grouping; and where each group may go [B, G, D]."""
        different, row = torch.unique_consecutive(grouping, dim=0, return_inverse=True)
        embedded, may = self._described(different)
        states, hidden, cell = self.network.placer.encode(embedded)
        return (states[row], hidden[row], cell[row]), may[row]

    def _described(self, grouping: Tensor) -> tuple[Tensor, Tensor]:
        """Of each of M groupings: what the placer reads [M, G, F], and where each group may go [M, G, D].

        It reads the kinds in a group, the sum of their shapes, and the edges to and from each group, each divided by
        one more than its largest. A group may go where some op of it may; one without ops is no choice: it is on the
        first device.
        """
        ops, count, groups = self.ops, len(grouping), self.groups
        row = torch.arange(count, device=grouping.device)[:, None]
        total = torch.zeros(count * groups, ops.content.shape[1], device=grouping.device)
        total.index_add_(0, (grouping + row * groups).flatten(), ops.content.repeat(count, 1))
        kinds, shapes, members = torch.split(total.view(count, groups, -1), ops.widths, dim=2)
        pair = (row * groups + grouping[:, ops.source]) * groups + grouping[:, ops.target]
        between = torch.bincount(pair.flatten(), minlength=count * groups**2).float().view(count, groups, groups)
        parts = [part / (part.amax(dim=2, keepdim=True) + 1) for part in (kinds, shapes, between, between.mT)]
        may = members > 0
        may[:, :, 0] |= ~may.any(dim=2)
        return torch.cat(parts, dim=2), may


class SeparatePolicy:
    """Without groups: a device for each op by itself."""

    def __init__(self, ops: Ops, network: FeedForward) -> None:
        self.ops, self.network = ops, network

    def sample(self, count: int, generator: torch.Generator) -> Actions:
        """Devices of units."""
        chances = self.network(self.ops).masked_fill(~self.ops.may, -torch.inf).softmax(dim=1)
        return (draw(chances, count, generator).T.to(self.ops.may.device),)

    def score(self, actions: Actions) -> tuple[Tensor, Tensor]:
        """Of these devices."""
        size = (len(actions[0]), -1, -1)
        return score_devices(self.network(self.ops).expand(size), self.ops.may.expand(size), actions[0])

    def placements(self, actions: Actions) -> NDArray[np.int32]:
        """Devices of ops."""
        return self.ops.groups.expand(actions[0].cpu().numpy())


def at_first(ops: Ops, home: NDArray[np.int64], groups: int, together: float) -> Tensor:
    """[U, G] logits: with this probability each is at home, else in a group that it exchanges bytes with, if there is.

    By chance, if that is zero.
    """
    if not 0 <= together < 1:
        raise InvalidInput(f"option together = {together}: it must be from 0 to below 1; grouping=merged keeps groups")
    if not together or groups == 1:
        return torch.zeros(ops.count, groups)
    source, target, size = ops.groups.edges
    near = np.zeros((ops.count, groups))
    np.add.at(near, (source, home[target]), size)
    np.add.at(near, (target, home[source]), size)
    own = np.arange(ops.count), home
    near[own] = 0.0
    near += _FAR * near.sum(axis=1, keepdims=True) / groups + 1e-300
    near[own] = 0.0
    near *= (1 - together) / near.sum(axis=1, keepdims=True)
    near[own] = together
    return torch.from_numpy(np.log(near)).float()


def learner(problem: Problem, seed: int, options: Mapping[str, Any]) -> tuple[Learner, Policy]:
    """Networks that have learned nothing yet, and how to train them; the options are the planner's."""
    check(options, groups=(0, np.inf), pieces=(1, np.inf), placements=(1, np.inf), pace=(0, 1e6))
    grouping, found = options["grouping"], units(problem)
    few = found.count <= GROUPS * options["pieces"]
    count = min(found.count, options["groups"] or (found.count if few else GROUPS))
    if grouping in ("learned", "merged"):
        whole = at_most(found, count)
        found = at_most(found, count * options["pieces"], within=whole)
        home = np.zeros(found.count, np.int64)
        home[found.label] = whole.label % count  # memory may not allow so few
    ops, devices = Ops(found), problem.num_devices
    width = ops.widths[0] + ops.widths[1] + 2 * count
    policy: Policy
    network: nn.Module
    with seeded(seed):
        if grouping == "none":
            network = FeedForward(ops, devices).to(compute_device())
            policy = SeparatePolicy(ops, network)
        else:
            placer = Seq2Seq(width, devices, options["hidden"], options["constant"], options["temperature"])
            network = Hierarchy(ops, count, placer).to(compute_device())
            fixed, logits = None, torch.zeros(ops.count, count)
            if grouping == "random":
                fixed = torch.randint(count, (1, ops.count)).to(compute_device())
            elif grouping == "merged":
                fixed = torch.from_numpy(home)[None].to(compute_device())
            else:
                logits = at_first(ops, home, count, options["together"])
            policy = HierarchicalPolicy(ops, network, logits.to(compute_device()), options["placements"], fixed)
    decisions = count if grouping in ("random", "merged") else ops.count
    settings = Settings(
        rate=options["rate"], samples=options["samples"], entropy=options["entropy"] / decisions, last_entropy=0.0,
        horizon=options["horizon"], baseline="moving", failures_until=0.75, normalise=True,
        paces={"grouper": options["pace"]},
    )  # fmt: skip
    return Learner(network, settings, seed), policy
