"""HSDAG's policy: a graph network scores edges, the edges that are kept make groups, and each group gets a device.

The paper keeps the best edge of every node again and again. On a connected graph that ends in one group, so its number
of groups is not learned. Here the score of an edge is the probability that it is kept, and the groups are what kept
edges connect. How a graph was parsed is part of the action then, and the gradient is that of parsing and placement.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from placewise.errors import InvalidInput
from placewise.graph import Floats
from placewise.learned import features, grouping
from placewise.learned.grouping import Groups
from placewise.learned.reinforce import Actions, Learner, Settings, compute_device, inverse, seeded
from placewise.problem import Problem

REWARD: Final = inverse


def learner(problem: Problem, seed: int, options: Mapping[str, Any]) -> tuple[Learner, Parsing]:
    """A network for a problem, and the policy that it stands for; `options` are the planner's."""
    for name in ("hidden", "nodes"):
        if options[name] < 1:
            raise InvalidInput(f"option {name} = {options[name]}: it must be 1 or more")
    if not 0 < options["keep"] < 1:
        raise InvalidInput(f"option keep = {options['keep']}: it must be between 0 and 1")
    groups = grouping.at_most((grouping.chains if options["colocate"] else grouping.units)(problem), options["nodes"])
    seen = describe(groups, shape=options["shape"], node_id=options["node_id"], structure=options["structure"])
    with seeded(seed):
        network = Network(seen.shape[1], problem.num_devices, options["hidden"], options["keep"])
    policy = Parsing(network.to(compute_device()), groups, seen)
    # What one decision of many can gain shrinks with their number, and so must what its entropy is worth.
    decisions = groups.count + len(groups.edges[0])
    settings = Settings(
        rate=options["rate"], samples=options["samples"], entropy=options["entropy"] / decisions, last_entropy=0.0,
        horizon=options["updates"], baseline="batch",
    )  # fmt: skip
    return Learner(network, settings, seed), policy


def describe(groups: Groups, *, shape: bool = True, node_id: bool = True, structure: bool = True) -> Floats:
    """[G, F] what the network sees of each node: kinds of ops and, unless left out, what the paper's ablations name."""
    columns = [features.kinds(groups)]
    if structure:
        columns += [features.degrees(groups), features.fractal_dimension(groups)]
    if node_id:
        columns += [features.position(groups)]
    if shape:
        columns += [features.shapes(groups)]
    return np.concatenate(columns, axis=1)


class Network(nn.Module):
    """Embeds nodes, scores pairs of them, and chooses devices for groups."""

    def __init__(self, width: int, devices: int, hidden: int, keep: float) -> None:
        super().__init__()
        self.encode = nn.Sequential(_mlp(width, hidden, hidden), nn.LayerNorm(hidden))
        self.spread = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.norm = nn.LayerNorm(hidden)
        self.edge = _mlp(hidden, hidden, 1)
        self.inner = _mlp(hidden, hidden, hidden)
        self.outer = _mlp(hidden, hidden, devices)
        # At first all edges are kept, and all devices chosen, with nearly the same probability.
        for scores, logit in ((self.edge, float(np.log(keep / (1 - keep)))), (self.outer, 0.0)):
            last = scores[-1]
            assert isinstance(last, nn.Linear)
            nn.init.constant_(last.bias, logit)
            nn.init.uniform_(last.weight, -0.1 * hidden**-0.5, 0.1 * hidden**-0.5)

    def embed(self, seen: Tensor, near: Tensor) -> Tensor:
        """[G, H] from features and the normalised adjacency: graph convolutions with a residual."""
        start: Tensor = self.encode(seen)
        h = start
        for layer in self.spread:
            h = torch.relu(torch.sparse.mm(near, layer(h)))
        found: Tensor = self.norm(start + h)
        return found


def _mlp(width: int, hidden: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, out))


class Parsing:
    """The policy. An action is (kept [B, E], device [B, G]): the edges that are kept, and the device of each node."""

    def __init__(self, network: Network, groups: Groups, seen: Floats) -> None:
        self.network, self.groups = network, groups
        device = next(network.parameters()).device
        self._ends = torch.from_numpy(np.stack(groups.edges[:2]).astype(np.int64)).to(device)
        self._seen = torch.from_numpy(seen.astype(np.float32)).to(device)
        self._near = _normalised(groups).to(device)

    def sample(self, count: int, generator: torch.Generator) -> Actions:
        """Keep each edge by its score; then draw a device for each group."""
        z, score = self._embedded()
        draw = torch.rand(count, len(score), generator=generator).to(z.device)
        shape = count * self.groups.count, self.groups.problem.num_devices
        noise = torch.rand(shape, generator=generator, dtype=torch.float64).to(z.device)
        kept = draw < score.sigmoid()
        parsed = self.parse(kept)
        # The largest of log-probability plus Gumbel noise is a draw; of a group's nodes, the first one's noise counts.
        chosen = (self._logits(z, parsed) - (-noise[parsed.first].log()).log()).argmax(dim=1)
        return kept, chosen[parsed.group]

    def score(self, actions: Actions) -> tuple[Tensor, Tensor]:
        """Of parsing and placement together."""
        kept, device = actions
        z, score = self._embedded()
        log_keep, log_cut = logsigmoid(score), logsigmoid(-score)
        parsed = self.parse(kept)
        chances = self._logits(z, parsed).log_softmax(dim=1)
        placed = chances.gather(1, device.flatten()[parsed.first][:, None])[:, 0]
        surprise = -(chances.exp() * chances.clamp(min=-1e4)).sum(dim=1)  # the clamp: never times minus infinity
        of_parsing = -(score.sigmoid() * log_keep + (-score).sigmoid() * log_cut).sum()
        log_probability = torch.where(kept, log_keep, log_cut).sum(dim=1).index_add(0, parsed.sample, placed)
        return log_probability, of_parsing.repeat(len(kept)).index_add(0, parsed.sample, surprise)

    def placements(self, actions: Actions) -> NDArray[np.int32]:
        """[B, N]."""
        return self.groups.expand(actions[1].cpu().numpy())

    def parse(self, kept: Tensor) -> Parsed:
        """The groups that kept edges make."""
        groups, capacity = self.groups, self.groups.problem.capacity
        source, target = self._ends.cpu().numpy()
        found = _parse(kept.cpu().numpy(), source, target, groups.allowed, groups.resident, capacity)
        group, first, may = (torch.from_numpy(array).to(kept.device) for array in found)
        return Parsed(group, first, first // groups.count, may)

    def _embedded(self) -> tuple[Tensor, Tensor]:
        """([G, H] embeddings, [E] logits of keeping)."""
        z = self.network.embed(self._seen, self._near)
        return z, self.network.edge(z[self._ends[0]] * z[self._ends[1]])[:, 0]

    def _logits(self, z: Tensor, parsed: Parsed) -> Tensor:
        """[K, D] from the mean over each group's nodes; minus infinity where the group may not run."""
        group, total = parsed.group.flatten(), len(parsed.first)
        size = torch.bincount(group, minlength=total)[:, None]
        members = self.network.inner(z).repeat(len(parsed.group), 1)
        pooled = torch.zeros(total, z.shape[1], device=z.device).index_add(0, group, members) / size
        logits: Tensor = self.network.outer(pooled)
        return logits.masked_fill(~parsed.may, -torch.inf)


class Parsed(NamedTuple):
    """The K groups of all samples, numbered through."""

    group: Tensor  # [B, G] of each node
    first: Tensor  # [K] a group's first node, among all nodes of all samples
    sample: Tensor  # [K] to which sample a group belongs
    may: Tensor  # [K, D] where a group may run


def _normalised(groups: Groups) -> Tensor:
    """The adjacency with loops, both ways, over the roots of both degrees (Kipf and Welling 2017, arXiv:1609.02907)."""
    source, target, _ = groups.edges
    own = np.arange(groups.count)
    rows, columns = np.concatenate([source, target, own]), np.concatenate([target, source, own])
    places = np.unique(np.stack([rows, columns]), axis=1)
    degree = np.bincount(places[0], minlength=groups.count)
    values = (degree[places[0]] * degree[places[1]]) ** -0.5
    return torch.sparse_coo_tensor(
        torch.from_numpy(places),
        torch.from_numpy(values.astype(np.float32)),
        (groups.count,) * 2,
        check_invariants=True,
    )


@njit(cache=True, nogil=True)
def _parse(kept, source, target, allowed, resident, capacity):
    """(group [B, G], first [K], may [K, D]). A kept edge does not join groups that no device could hold together."""
    samples, (nodes, devices) = len(kept), allowed.shape
    group, first = np.empty((samples, nodes), np.int64), np.empty(samples * nodes, np.int64)
    where = np.empty((samples * nodes, devices), np.bool_)
    count = 0
    for b in range(samples):
        parent, held, may = np.arange(nodes), resident.copy(), allowed.copy()
        for e in range(len(source)):
            i, j = source[e], target[e]
            while parent[i] != i:
                parent[i] = parent[parent[i]]
                i = parent[i]
            while parent[j] != j:
                parent[j] = parent[parent[j]]
                j = parent[j]
            if not kept[b, e] or i == j:
                continue
            together = may[i] & may[j] & (held[i] + held[j] <= capacity)
            if together.any():
                i, j = min(i, j), max(i, j)
                parent[j] = i
                held[i] += held[j]
                may[i] = together
        for i in range(nodes):
            if parent[i] == i:
                fits = may[i] & (held[i] <= capacity)
                where[count] = fits if fits.any() else may[i]
                first[count] = b * nodes + i
                group[b, i] = count
                count += 1
            else:
                parent[i] = parent[parent[i]]
                group[b, i] = group[b, parent[i]]
    return group, first[:count], where[:count]
