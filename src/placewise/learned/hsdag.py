"""HSDAG's policy: a graph network scores edges, nodes join each other along them, and each group gets a device.

The paper lets every node join the neighbour with the best score, again and again. On a connected graph that ends in one
group, so its number of groups is not learned. Here a node joins a neighbour, or none, with the probability that the
scores give: whoever joins none begins a group of its own. How a graph was parsed is part of the action then, and the
gradient is that of parsing and placement. (To keep each edge by chance is no good: on a dense graph, nearly every way
to do so connects everything.)

An episode is one step: the paper adds what it knows of a group to the features of its nodes and parses again, 20 times,
but all of these steps are trained on the same graph. An update has two epochs instead of four: with four the policy is
certain too early, and takes twice as long. The bonus for entropy is that of the devices alone: that of parsing would
have nodes join however little is gained.
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

from placewise.errors import InvalidInput
from placewise.graph import Floats
from placewise.learned import features, grouping
from placewise.learned.grouping import Groups
from placewise.learned.reinforce import LARGEST, Actions, Learner, Settings, check, compute_device, inverse, seeded
from placewise.problem import Problem

REWARD: Final = inverse


def learner(problem: Problem, seed: int, options: Mapping[str, Any]) -> tuple[Learner, Parsing]:
    """A network for a problem, and the policy that it stands for; `options` are the planner's."""
    check(options, hidden=(1, LARGEST), nodes=(1, np.inf), epochs=(1, LARGEST), pace=(0, 1e6))
    if not 0 < options["keep"] < 1:
        raise InvalidInput(f"option keep = {options['keep']}: it must be between 0 and 1")
    groups = grouping.at_most((grouping.chains if options["colocate"] else grouping.units)(problem), options["nodes"])
    seen = describe(groups, shape=options["shape"], node_id=options["node_id"], structure=options["structure"])
    with seeded(seed):
        network = Network(seen.shape[1], problem.num_devices, options["hidden"])
    policy = Parsing(network.to(compute_device()), groups, seen, options["keep"])
    # What one decision of many can gain shrinks with their number, and so must what its entropy is worth.
    settings = Settings(
        rate=options["rate"], samples=options["samples"], entropy=options["entropy"] / groups.count, last_entropy=0.0,
        horizon=options["horizon"], baseline="batch", normalise=True, epochs=options["epochs"],
        paces={"pair": options["pace"]},
    )  # fmt: skip
    return Learner(network, settings, seed), policy


def describe(groups: Groups, *, shape: bool = True, node_id: bool = True, structure: bool = True) -> Floats:
    """[G, F] what the network sees of each node: kinds of ops and, unless left out, what the paper's ablations name.

    Columns are standardised, which the paper does not say. Where nodes have much in common, it learns more so.
    """
    columns = [features.kinds(groups)]
    if structure:
        columns += [features.degrees(groups), features.fractal_dimension(groups)]
    if node_id:
        columns += [features.position(groups)]
    if shape:
        columns += [features.shapes(groups)]
    return features.standardised(np.concatenate(columns, axis=1))


class Network(nn.Module):
    """Embeds nodes, scores pairs of them, and chooses devices for groups."""

    def __init__(self, width: int, devices: int, hidden: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(_mlp(width, hidden, hidden), nn.LayerNorm(hidden))
        self.spread = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.norm = nn.LayerNorm(hidden)
        self.pair = _mlp(hidden, hidden, 1)
        self.inner = _mlp(hidden, hidden, hidden)
        self.outer = _mlp(hidden, hidden, devices)
        for scores in (self.pair, self.outer):  # at first all neighbours and all devices have nearly the same
            last = scores[-1]
            assert isinstance(last, nn.Linear)
            nn.init.zeros_(last.bias)
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
    """The policy. An action is (joined [B, G], device [B, G]): a pair for each node, and the device of each node.

    A pair is a node and a neighbour of it, or itself: then it joins none, at first with probability 1 - `keep`.
    """

    def __init__(self, network: Network, groups: Groups, seen: Floats, keep: float) -> None:
        self.network, self.groups = network, groups
        to = next(network.parameters()).device
        self._pairs = node, other = _pairs(groups)  # [2, P]
        first, degree = np.searchsorted(node, np.arange(groups.count)), np.bincount(node) - 1
        at_first = np.where(node == other, 1 - keep * (degree > 0)[node], keep / np.maximum(degree, 1)[node])
        self._node, self._other, self._first, self._last = (
            torch.from_numpy(numbers).to(to) for numbers in (node, other, first, first + degree)
        )
        self._at_first = torch.from_numpy(np.log(at_first).astype(np.float32)).to(to)
        self._seen = torch.from_numpy(seen.astype(np.float32)).to(to)
        self._near = _normalised(node, other).to(to)

    def sample(self, count: int, generator: torch.Generator) -> Actions:
        """A pair for each node; then a device for each group."""
        z, log_chance = self._embedded()
        draw = torch.rand(count, self.groups.count, generator=generator, dtype=torch.float64).to(z.device)
        shape = count * self.groups.count, self.groups.problem.num_devices
        noise = torch.rand(shape, generator=generator, dtype=torch.float64).to(z.device)
        # The chances of each node add up to one, so in their running sum those of the n-th end at n.
        reached = torch.searchsorted(log_chance.double().exp().cumsum(0), draw + torch.arange(draw.shape[1]).to(draw))
        joined = torch.minimum(torch.maximum(reached, self._first), self._last)  # whatever the rounding
        parsed = self.parse(joined)
        # The largest of log-probability plus Gumbel noise is a draw; of a group's nodes, the first one's noise counts.
        chosen = (self._logits(z, parsed) - (-noise[parsed.first].log()).log()).argmax(dim=1)
        return joined, chosen[parsed.group]

    def score(self, actions: Actions) -> tuple[Tensor, Tensor]:
        """(log-probability of parsing and placement together, entropy of the placement)."""
        joined, device = actions
        z, log_chance = self._embedded()
        parsed = self.parse(joined)
        chances = self._logits(z, parsed).log_softmax(dim=1)
        placed = chances.gather(1, device.flatten()[parsed.first][:, None])[:, 0]
        surprise = -(chances.exp() * chances.clamp(min=-1e4)).sum(dim=1)  # the clamp: never times minus infinity
        log_probability = log_chance[joined].sum(dim=1).index_add(0, parsed.sample, placed)
        return log_probability, torch.zeros_like(log_probability).index_add(0, parsed.sample, surprise)

    def placements(self, actions: Actions) -> NDArray[np.int32]:
        """[B, N]."""
        return self.groups.expand(actions[1].cpu().numpy())

    def parse(self, joined: Tensor) -> Parsed:
        """The groups that these pairs make."""
        groups, capacity = self.groups, self.groups.problem.capacity
        found = _parse(self._pairs[1][joined.cpu().numpy()], groups.allowed, groups.resident, capacity)
        group, first, may = (torch.from_numpy(array).to(joined.device) for array in found)
        return Parsed(group, first, first // groups.count, may)

    def _embedded(self) -> tuple[Tensor, Tensor]:
        """([G, H] embeddings, [P] log-probabilities of pairs, of all of one node)."""
        z = self.network.embed(self._seen, self._near)
        logits = self.network.pair(z[self._node] * z[self._other])[:, 0] + self._at_first
        nothing = torch.zeros(len(z), device=z.device)
        most = (nothing - torch.inf).scatter_reduce(0, self._node, logits.detach(), "amax")
        total = nothing.index_add(0, self._node, (logits - most[self._node]).exp())
        return z, logits - (most + total.log())[self._node]

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


def _pairs(groups: Groups) -> NDArray[np.int64]:
    """[2, P] each node with each neighbour, whichever reads the other, and with itself; by node."""
    source, target, _ = groups.edges
    own = np.arange(groups.count)
    both = np.stack([np.concatenate([source, target, own]), np.concatenate([target, source, own])])
    return np.unique(both.astype(np.int64), axis=1)


def _normalised(node: NDArray[np.int64], other: NDArray[np.int64]) -> Tensor:
    """The adjacency with loops over the roots of both degrees (Kipf and Welling 2017, arXiv:1609.02907)."""
    degree = np.bincount(node)
    values = torch.from_numpy(((degree[node] * degree[other]) ** -0.5).astype(np.float32))
    places = torch.from_numpy(np.stack([node, other]))
    return torch.sparse_coo_tensor(places, values, (len(degree),) * 2, check_invariants=True)


@njit(cache=True, nogil=True)
def _parse(joined, allowed, resident, capacity):
    """(group [B, G], first [K], may [K, D]). A node does not join where no device could hold all of them."""
    samples, (nodes, devices) = len(joined), allowed.shape
    group, first = np.empty((samples, nodes), np.int64), np.empty(samples * nodes, np.int64)
    where = np.empty((samples * nodes, devices), np.bool_)
    count = 0
    for b in range(samples):
        parent, held, may = np.arange(nodes), resident.copy(), allowed.copy()
        for v in range(nodes):
            i, j = v, joined[b, v]
            while parent[i] != i:
                parent[i] = parent[parent[i]]
                i = parent[i]
            while parent[j] != j:
                parent[j] = parent[parent[j]]
                j = parent[j]
            if i == j:
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
