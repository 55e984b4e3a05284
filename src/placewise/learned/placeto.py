"""Placeto (Addanki et al. 2019, arXiv:1906.08879): a policy that improves a placement one group at a time.

Messages travel along the graph of groups and against it; what has gathered at the ancestors, descendants and peers of
the group whose turn it is decides where it goes. The paper's network has one output per device. Here the network looks
at the graph once per device, with the same weights, and says how good that device would be: so one policy serves any
number of devices, whatever their order. `PaperView` is the paper's own.

Where it departs from the paper otherwise:

- What a group hears from others is the mean of what they say, not the sum, so that large graphs are like small ones.
- Rewards are differences of logarithms of times, discounted by 0.9: a move is to answer for what soon follows from it.
- The actions of an update are trained on several times, as PPO does, with advantages of root mean square one.
- The baseline of a step is the mean over the other recent episodes of the same graph; the code's takes in its own.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor, nn

from placewise.driver import Budget, Context
from placewise.errors import InvalidInput
from placewise.graph import Floats
from placewise.learned import checkpoint
from placewise.learned.episodes import Devices, Episodes
from placewise.learned.grouping import Groups, few
from placewise.learned.reinforce import LARGEST, Learner, Settings, check, compute_device, draw, seeded, single_threaded
from placewise.planners import get
from placewise.problem import Problem

Kind = Literal["devices", "paper"]
#: Trained on generated families and bundled models; see docs/policies.md.
SHIPPED: Final = Path(__file__).with_name("policies") / "placeto.safetensors"
_LEARNING: Final = ("batch", "epochs", "reward", "discount", "rate", "entropy", "updates")  # options
_PATIENCE: Final = 20  # updates without any choice left, after which there is nothing to learn
_CHUNK: Final = 400_000  # numbers that the network holds per layer at a time


# ---- what the network sees -------------------------------------------------------------------------------------------


class States(NamedTuple):
    """Moments of episodes over one problem."""

    placement: Devices  # [S, G]
    node: Devices  # [S] the group whose turn it is
    visits: Devices  # [S, G]
    mask: NDArray[np.bool_]  # [S, D]


class Shape(NamedTuple):
    """The graph of groups as matrices of shares: each row sums to one, or to zero where there is nothing."""

    parents: Tensor  # [G, G]
    children: Tensor
    ancestors: Tensor
    descendants: Tensor
    peers: Tensor  # neither


def shape_of(groups: Groups) -> Shape:
    """For groups of any graph; transitive ancestors and descendants."""
    source, target, _ = groups.edges
    near = np.zeros((groups.count, groups.count), np.bool_)
    near[target, source] = True
    above = groups.reachable.T
    peers = ~(above | above.T | np.eye(groups.count, dtype=np.bool_))
    return Shape(*(_shares(table) for table in (near, near.T, above, above.T, peers)))


def _shares(table: NDArray[np.bool_]) -> Tensor:
    return torch.from_numpy((table / np.maximum(table.sum(axis=1, keepdims=True), 1)).astype(np.float32))


class DeviceView:
    """The graph as seen from each device: `NODE` numbers for each group, `WHOLE` for the device and the current group.

    All are relative to the problem's own times, so that seconds and sizes play no part.
    """

    NODE: Final = 12
    WHOLE: Final = 8
    OUTPUTS: Final = 1

    def __init__(self, groups: Groups) -> None:
        problem, devices = groups.problem, groups.problem.num_devices
        self.groups, self.shape, self.copies = groups, shape_of(groups), devices
        source, target, size = groups.edges
        order = _order(groups)
        place = np.argsort(order)
        along = np.argsort(place[source], kind="stable")  # edges in dataflow order of their sources
        ahead = place[source] < place[target]  # others close a cycle, and are on no path
        self._edges = (source[along], target[along], size[along], ahead[along])
        self._order = order
        self._seconds = np.where(groups.allowed, groups.seconds, -1.0)
        self._best = groups.seconds.min(axis=1)
        self._links = (problem.cluster.latency, problem.cluster.seconds_per_byte)
        self._share = groups.resident[:, None] / np.maximum(problem.capacity, 1e-300)  # zero where it is unlimited
        above = groups.reachable.T
        self._peers = ~(above | above.T | np.eye(groups.count, dtype=np.bool_))
        self._flags = np.array(
            [problem.objective == "throughput", problem.execution.concurrency == "sequential"], np.float32
        )

    def look(self, states: States) -> tuple[Tensor, Tensor]:
        """([G, S * D, NODE], [S * D, WHOLE])."""
        count, groups = len(states.node), self.groups
        node = np.zeros((groups.count, count, self.copies, self.NODE), np.float32)
        whole = np.zeros((count, self.copies, self.WHOLE), np.float32)
        whole[:, :, -2:] = self._flags
        _see(
            states.placement, states.node, states.visits, *self._edges, self._order, self._seconds, self._best,
            *self._links, self._share, self._peers, node, whole,
        )  # fmt: skip
        return torch.from_numpy(node).flatten(1, 2), torch.from_numpy(whole).flatten(0, 1)


class PaperView:
    """The paper's: time, bytes out, memory, visits, whose turn it is, and the device one-hot. One graph per state."""

    WHOLE: Final = 0

    def __init__(self, groups: Groups) -> None:
        self.groups, self.shape, self.copies = groups, shape_of(groups), 1
        columns = [groups.seconds.min(axis=1), groups.sent, groups.resident]
        self._fixed = np.stack([x / max(float(x.max(initial=0.0)), 1e-300) for x in columns], axis=1)
        self.NODE, self.OUTPUTS = 5 + groups.problem.num_devices, groups.problem.num_devices

    def look(self, states: States) -> tuple[Tensor, Tensor]:
        """([G, S, NODE], [S, 0])."""
        count, size = len(states.node), self.groups.count
        node = np.zeros((size, count, self.NODE), np.float32)
        node[:, :, :3] = self._fixed[:, None]
        node[:, :, 3] = states.visits.T
        node[states.node, np.arange(count), 4] = 1.0
        node[np.arange(size)[:, None], np.arange(count), 5 + states.placement.T] = 1.0
        return torch.from_numpy(node), torch.zeros(count, 0)


View = DeviceView | PaperView


def _order(groups: Groups) -> NDArray[np.int64]:
    """[G] a topological order; where groups wait for each other in a circle, the first of them comes first."""
    source, target, _ = groups.edges
    waiting = np.bincount(target, minlength=groups.count)
    children: list[list[int]] = [[] for _ in range(groups.count)]
    for a, b in zip(source.tolist(), target.tolist(), strict=True):
        children[a].append(b)
    left, order = list(range(groups.count)), []
    while left:
        group = next((g for g in left if waiting[g] <= 0), left[0])
        left.remove(group)
        order.append(group)
        for child in children[group]:
            waiting[child] -= 1
    return np.array(order, np.int64)


@njit(cache=True, nogil=True)
def _see(
    placement, current, visits, source, target, size, ahead, order, seconds, best, latency, per_byte, share, peers,
    node, whole,
):  # fmt: skip
    """Fill in `node` [G, S, D, NODE] and `whole` [S, D, WHOLE]."""
    count, groups, devices = len(current), len(order), seconds.shape[1]
    unit = max(best.sum() / groups, 1e-300)
    took, top, bottom = np.empty(groups), np.empty(groups), np.empty(groups)
    into, out = np.empty((groups, devices)), np.empty((groups, devices))
    load, held, near = np.empty(devices), np.empty(devices), np.empty(devices)
    for s in range(count):
        v, where = current[s], placement[s]
        top[:], bottom[:], into[:], out[:], load[:], held[:], near[:] = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for u in range(groups):
            took[u] = max(seconds[u, where[u]], 0.0)
            if u != v:
                load[where[u]] += took[u]
                held[where[u]] += share[u, where[u]]
                if peers[v, u]:
                    near[where[u]] += took[u]
        for e in range(len(source)):
            a, b = source[e], target[e]
            for d in range(devices):
                if d != where[a]:
                    into[b, d] += latency[where[a], d] + size[e] * per_byte[where[a], d]
                if d != where[b]:
                    out[a, d] += latency[d, where[b]] + size[e] * per_byte[d, where[b]]
        # The longest path through each group, as it is placed now, if no device or link were busy.
        for e in range(len(source)):
            a, b = source[e], target[e]
            if ahead[e]:
                sent = 0.0
                if where[a] != where[b]:
                    sent = latency[where[a], where[b]] + size[e] * per_byte[where[a], where[b]]
                top[b] = max(top[b], top[a] + took[a] + sent)
        for e in range(len(source) - 1, -1, -1):
            a, b = source[e], target[e]
            if ahead[e]:
                sent = 0.0
                if where[a] != where[b]:
                    sent = latency[where[a], where[b]] + size[e] * per_byte[where[a], where[b]]
                bottom[a] = max(bottom[a], bottom[b] + took[b] + sent)
        longest = 1e-300
        for u in range(groups):
            longest = max(longest, top[u] + took[u] + bottom[u])
        for u in range(groups):
            for d in range(devices):
                x = node[u, s, d]
                x[0] = where[u] == d
                x[1] = u == v
                x[2] = visits[s, u] > 0
                if seconds[u, d] >= 0.0:
                    x[3] = np.log1p(min(seconds[u, d] / unit, 1e6))
                    x[4] = min(np.log((seconds[u, d] + 1e-3 * unit) / (best[u] + 1e-3 * unit)), 6.0) / 2
                    x[5] = 1.0
                x[6] = np.log1p(min(took[u] / unit, 1e6))
                x[7] = np.log1p(min(into[u, d] / unit, 1e6))
                x[8] = np.log1p(min(out[u, d] / unit, 1e6))
                x[9] = (top[u] + took[u] + bottom[u]) / longest
                x[10] = (top[u] - top[v]) / longest
                x[11] = min(share[u, d], 1.0)
        total = max(load.sum() + took[v], 1e-300)
        for d in range(devices):
            mine = max(seconds[v, d], 0.0)
            before, after = 0.0, 0.0
            for e in range(len(source)):
                a, b = source[e], target[e]
                if ahead[e] and b == v:
                    sent = 0.0 if where[a] == d else latency[where[a], d] + size[e] * per_byte[where[a], d]
                    before = max(before, top[a] + took[a] + sent)
                if ahead[e] and a == v:
                    sent = 0.0 if where[b] == d else latency[d, where[b]] + size[e] * per_byte[d, where[b]]
                    after = max(after, bottom[b] + took[b] + sent)
            others = 0.0
            for other in range(devices):
                if other != d:
                    others = max(others, load[other])
            x = whole[s, d]
            x[0] = min((load[d] + mine) / total, 1e3)
            x[1] = min(max(np.log((load[d] + mine + 1e-3 * total) / (others + 1e-3 * total)), -4.0), 4.0) / 2
            x[2] = np.log1p(min(near[d] / unit, 1e6))
            x[3] = min(max(np.log((before + mine + after + 1e-3 * longest) / longest), -4.0), 4.0)
            x[4] = min(held[d] + share[v, d], 2.0)
            x[5] = np.log1p(min((load[d] + mine) / unit, 1e6))


# ---- the network -----------------------------------------------------------------------------------------------------


def _layers(*widths: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for wide, next_wide in pairwise(widths):
        parts += [nn.Linear(wide, next_wide), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


class Gather(nn.Module):
    """What comes from some groups: each says something, the mean of it is made into something."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.say, self.make = _layers(width, width, width), _layers(width, width, width)

    def along(self, x: Tensor, shares: Tensor) -> Tensor:
        """[G, C, W] for every group, from the groups that its row of `shares` names."""
        said = torch.relu(self.say(x))
        return torch.relu(self.make((shares @ said.flatten(1)).view_as(said)))

    def at(self, x: Tensor, shares: Tensor) -> Tensor:
        """[C, W] for one group of each copy, with a row of `shares` [C, G] each."""
        said = torch.relu(self.say(x))
        return torch.relu(self.make(torch.einsum("cg,gcw->cw", shares, said)))


class Network(nn.Module):
    """Messages both ways for some rounds, then ancestors, descendants and peers, then one number per output."""

    def __init__(self, node: int, whole: int, outputs: int, width: int = 16, rounds: int = 8) -> None:
        super().__init__()
        self.rounds = rounds
        self.embed = _layers(node, width, width)
        self.down, self.up = Gather(width), Gather(width)
        self.ancestors, self.descendants, self.peers = Gather(2 * width), Gather(2 * width), Gather(2 * width)
        self.head = _layers(8 * width + whole, 4 * width, 2 * width, outputs)
        nn.init.zeros_(self.head[-1].bias)  # type: ignore[arg-type]

    def forward(self, node: Tensor, whole: Tensor, shape: Shape, current: Tensor) -> Tensor:
        """[C, outputs] from [G, C, F], [C, F'] and the current group [C] of each copy."""
        first = self.embed(node)
        x = y = first
        has_parents, has_children = (
            (table.sum(dim=1) > 0).to(first.dtype)[:, None, None] for table in (shape.parents, shape.children)
        )
        for _ in range(self.rounds):
            x = first + has_parents * self.down.along(x, shape.parents)
            y = first + has_children * self.up.along(y, shape.children)
        both = torch.cat([x, y], dim=2)
        pools = ((self.ancestors, shape.ancestors), (self.descendants, shape.descendants), (self.peers, shape.peers))
        seen = [pool.at(both, table[current]) for pool, table in pools]
        own = both[current, torch.arange(len(current), device=current.device)]
        found: Tensor = self.head(torch.cat([*seen, own, whole], dim=1))
        return found


class Architecture(NamedTuple):
    """How a network is built; a policy's file says it."""

    view: Kind = "devices"
    width: int = 16
    rounds: int = 8


def view_of(kind: Kind, groups: Groups) -> View:
    """What a network of this kind sees."""
    return DeviceView(groups) if kind == "devices" else PaperView(groups)


def network_of(build: Architecture, view: View, seed: int) -> Network:
    """A network with weights by chance; no other random numbers are used up."""
    with seeded(seed):
        return Network(view.NODE, view.WHOLE, view.OUTPUTS, build.width, build.rounds)


def log_probabilities(network: nn.Module, view: View, states: States) -> Tensor:
    """[S, D] of the device for the current group; minus infinity where the mask forbids it."""
    device = next(network.parameters()).device
    node, whole = (part.to(device) for part in view.look(states))
    current = torch.from_numpy(states.node).to(device).repeat_interleave(view.copies)
    shape = Shape(*(table.to(device) for table in view.shape))
    found: Tensor = network(node, whole, shape, current).view(len(states.node), -1)
    return found.masked_fill(~torch.from_numpy(states.mask).to(device), -torch.inf).log_softmax(dim=1)


# ---- episodes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """What happened in a batch of episodes: B of them, T steps long."""

    states: States  # T * B rows, step by step
    actions: Devices  # [T * B]
    costs: Floats  # [T + 1, B]
    values: Floats  # [T + 1, B] infinite where a constraint is broken
    logs: Floats  # [T * B] log-probabilities of the actions when they were taken


@torch.no_grad()
def run(
    network: nn.Module,
    view: View,
    episodes: Episodes,
    generator: torch.Generator,
    *,
    greedy: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> Record:
    """Episodes from where they are to their end; the first so many take what is most likely, others by chance."""
    rows: list[States] = []
    chosen, likely, costs, values = [], [], [episodes.cost], [episodes.value.copy()]
    while not episodes.done:
        now = States(episodes.placement.copy(), episodes.node.copy(), episodes.visits.copy(), episodes.mask)
        logs = log_probabilities(network, view, now).cpu()
        drawn = draw(logs.exp(), 1, generator)[:, 0].numpy()
        actions = np.where(np.arange(episodes.count) < greedy, logs.argmax(dim=1).numpy(), drawn)
        episodes.step(actions)
        rows.append(now)
        chosen.append(actions)
        likely.append(logs.numpy()[np.arange(episodes.count), actions])
        costs.append(episodes.cost)
        values.append(episodes.value.copy())
        if should_stop():
            break
    states = States(*(np.concatenate(parts) for parts in zip(*rows, strict=True)))
    return Record(states, np.concatenate(chosen), np.array(costs), np.array(values), np.concatenate(likely))


def returns(costs: Floats, discount: float, *, final: bool) -> Floats:
    """[T, B] what follows each step: improvements to come, or minus the final cost."""
    if final:
        return np.broadcast_to(-costs[-1], costs[1:].shape).copy()
    total, found = np.zeros(costs.shape[1]), np.empty_like(costs[1:])
    for t in range(len(found) - 1, -1, -1):
        total = costs[t] - costs[t + 1] + discount * total
        found[t] = total
    return found


def _part(states: States, rows: slice) -> States:
    return States(states.placement[rows], states.node[rows], states.visits[rows], states.mask[rows])


class PlacetoLearner(Learner):
    """REINFORCE, or PPO over a few epochs; the baseline of a step is its mean over other recent episodes."""

    REMEMBERED: Final = 16  # episodes of a problem

    def __init__(
        self, network: Network, settings: Settings, seed: int, *, discount: float = 1.0, final: bool = False
    ) -> None:
        super().__init__(network, settings, seed)
        self.discount, self.final = discount, final
        self._recent: dict[str, Floats] = {}  # problem to returns [episodes, T]

    def learn(self, view: View, record: Record, problem: str | None = None) -> None:
        """One step along the gradient of the very actions that were taken; `problem` names one that comes again."""
        found = returns(record.costs, self.discount, final=self.final)
        recent = np.zeros((0, len(found)))
        if problem is not None and problem in self._recent and self._recent[problem].shape[1] == len(found):
            recent = self._recent[problem]
        others = recent.shape[0] + found.shape[1] - 1
        baseline = (recent.sum(axis=0)[:, None] + found.sum(axis=1, keepdims=True) - found) / max(others, 1)
        advantage = found - baseline
        if problem is not None:
            self._recent[problem] = np.concatenate([recent, found.T])[-self.REMEMBERED :]
        if self.settings.normalise:
            advantage = advantage / (float(np.sqrt((advantage**2).mean())) + 1e-8)
        for _ in range(self.settings.epochs):
            self.descend(self._losses(view, record, advantage.ravel()))
        self.updates += 1

    def _losses(self, view: View, record: Record, advantage: Floats) -> Iterator[Tensor]:
        """Parts of the loss, such that each fits in memory."""
        network, states = self.network, record.states
        device, total = next(network.parameters()).device, len(record.actions)
        chunk = max(1, _CHUNK // max(1, view.groups.count * view.copies * 32))
        for start in range(0, total, chunk):
            part = slice(start, start + chunk)
            logs = log_probabilities(network, view, _part(states, part))
            taken = logs.gather(1, torch.from_numpy(record.actions[part]).to(device)[:, None])[:, 0]
            entropy = -(logs.exp() * logs.masked_fill(logs == -torch.inf, 0.0)).sum(dim=1)
            weight = torch.as_tensor(advantage[part], dtype=torch.float32, device=device)
            gain = self.gain(taken, torch.as_tensor(record.logs[part], device=device), weight)
            yield -(gain + self.entropy_weight * entropy).sum() / total

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """With the recent returns."""
        tensors, facts = super().state()
        return tensors | {f"recent.{name}": torch.from_numpy(rows) for name, rows in self._recent.items()}, facts

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """With the recent returns."""
        super().restore(tensors, facts)
        self._recent = {
            key.removeprefix("recent."): rows.numpy().copy() for key, rows in tensors.items() if key[:7] == "recent."
        }


# ---- planning --------------------------------------------------------------------------------------------------------


def settings_of(options: Mapping[str, Any], horizon: int) -> Settings:
    """How the planner's options say that a policy is trained."""
    return Settings(
        rate=options["rate"], last_rate=options["rate"] / 10, samples=options["batch"], entropy=options["entropy"],
        last_entropy=0.0, horizon=max(1, horizon), normalise=True, epochs=options["epochs"],
    )  # fmt: skip


def warm_up(problem: Problem) -> None:
    """One update of the shipped policy: all that is compiled, and all that PyTorch imports only when it is used."""
    options = get("placeto").settings({"train": True, "updates": 1})
    place(problem, Context(problem, Budget(), 0, 0.0, None, "placeto"), options)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse what no policy can be built or trained with."""
    check(
        options, groups=(1, np.inf), episodes=(1, 100_000), passes=(1, np.inf), batch=(1, 100_000),
        epochs=(1, LARGEST), width=(1, LARGEST), rounds=(1, LARGEST), discount=(0, 1),
    )  # fmt: skip


def place(problem: Problem, ctx: Context, options: Mapping[str, Any]) -> None:
    """Plan with a policy that has been trained, with one that is trained here, or with both."""
    check_options(options)
    groups, seed = few(problem, options["groups"]), int(ctx.rng.integers(2**31))
    known = None
    path = SHIPPED if options["policy"] == "shipped" else Path(options["policy"])
    if options["policy"] != "none":
        known = checkpoint.load(path, "placeto")
    if known:
        build = _build(known.facts.get("build"), path)
        checkpoint.options_of("placeto", options, build._asdict(), path)
    else:
        build = Architecture(options["view"], options["width"], options["rounds"])
    view = view_of(build.view, groups)
    learner = PlacetoLearner(
        network_of(build, view, seed).to(compute_device()), settings_of(options, options["updates"]), seed,
        discount=options["discount"], final=options["reward"] == "final",
    )  # fmt: skip
    if known:
        checkpoint.begin_with(learner, known, path)
    learns = options["train"] or not known
    if learns:
        checkpoint.refuse_idle("placeto", options, ("episodes", "passes"), "they are for a policy that does not learn")
    else:
        why = "without train=true or policy=none, the policy learns nothing"
        checkpoint.refuse_idle("placeto", options, _LEARNING, why)
    episodes = Episodes(
        groups,
        options["batch" if learns else "episodes"],
        ctx.evaluate_batch,
        np.random.default_rng(seed),
        order=options["order"],
        log=True,
    )
    with single_threaded():
        if learns:
            _learn(ctx, learner, view, episodes, options["updates"])
        else:
            _improve(ctx, learner, view, episodes, options["passes"])


def _improve(ctx: Context, learner: PlacetoLearner, view: View, episodes: Episodes, passes: int) -> None:
    """Episodes without learning: from one device, from random placements, then from the best so far."""
    for index in range(passes):
        before = episodes.best_value.min()
        run(learner.network, view, episodes, learner.generator, greedy=1, should_stop=ctx.should_stop)
        if ctx.should_stop() or (index > 1 and not episodes.best_value.min() < before):
            break
        episodes.start = "random"
        episodes.reset(None if index == 0 else episodes.best[episodes.best_value.argmin()])


def _learn(ctx: Context, learner: PlacetoLearner, view: View, episodes: Episodes, updates: int) -> None:
    """Until the budget is spent, the policy has made up its mind, or all updates are done."""
    settled = 0
    while learner.updates < updates and settled < _PATIENCE and not ctx.should_stop():
        record = run(learner.network, view, episodes, learner.generator, should_stop=ctx.should_stop)
        if ctx.should_stop():
            break
        learner.learn(view, record, "it")
        rows = record.actions.reshape(-1, episodes.count)
        settled = settled + 1 if (rows == rows[:, :1]).all() else 0
        last = record.values[-1]
        ctx.detail = f"mean {last[np.isfinite(last)].mean():.3g} s" if np.isfinite(last).any() else "none fits"
        if ctx.spent:  # exploration ends when the budget does
            horizon = min(updates, round(learner.updates / ctx.spent))
            learner.settings = replace(learner.settings, horizon=max(1, horizon))
        episodes.start = "random"  # whoever always begins at the same place learns little about others
        episodes.reset()


def _build(given: Any, path: Path) -> Architecture:
    """How the network of a file is built; the file may say anything."""
    try:
        build = Architecture(**given)
        if build.view not in ("devices", "paper") or not all(
            type(size) is int and 1 <= size <= LARGEST for size in (build.width, build.rounds)
        ):
            raise ValueError
    except (TypeError, ValueError):
        raise InvalidInput(f"{path}: does not say how its network is built") from None
    return build
