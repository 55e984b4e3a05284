"""What a pipeline is made of, for methods that cut it into stages: nodes, the messages between them, kinds of devices.

A node is what must stay together: a unit, or units among which forward data flows in circles. What a stage costs its
device is then a matter of the set of its nodes alone, if a message costs its sender and its reader the same wherever
the other end is. Where links differ, the cheapest end counts, or the dearest of readers that are elsewhere for sure;
where a sender pays for each device that reads, one does; shared channels are left out. So a stage never costs more than
the simulator says, and what is proved with these costs holds. They are exact for equal links, if sends are staged or a
message has one reader. They are those of a stage on one device; replicas divide them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from placewise.graph import Floats
from placewise.planners.pipeline import dataflow_order, program
from placewise.problem import Problem
from placewise.simulator.alike import kinds as devices_by_kind
from placewise.simulator.alike import most_replicas
from placewise.simulator.throughput import (
    Flight,
    exchange,
    flight,
    held_bytes,
    in_flight,
    kept_bytes,
    sent_share,
    trains,
)

Whole = NDArray[np.int64]

_ROUNDING: Final = 1e-13  # relative; of a sum over the messages of a node
_LITTLE: Final = 1e-3  # of the smallest memory


@dataclass(frozen=True, eq=False)
class Kinds:
    """Devices that can change places and nothing changes are of one kind."""

    devices: tuple[tuple[int, ...], ...]  # [K]
    pool: Whole  # [K] whose devices may repeat the stage; kinds of one pool differ in what may be there to begin with
    pools: Whole  # [pools] devices, among them those where nothing may be to begin with
    room: Floats  # [K] bytes
    tariff: Whole  # [K] which column of transfer times holds; kinds of equal links share one
    most: Whole  # [K] how many devices may have the same stage and share its load
    per_byte: Floats  # [K] seconds, for r devices (r - 1) / r of it per byte of weight
    latency: Floats  # [K] seconds, for r devices r - 1 times


@dataclass(frozen=True, eq=False)
class Stages:
    """Nodes are numbered in the order of the program, as far as fusing leaves one."""

    node: Whole  # [units] the node of each unit; -1 where it was left out (`without_free`)
    compute: Floats  # [n, K, P] seconds by phase, one where phases are added up; infinite where it may not run
    need: Floats  # [n] bytes
    scratch: Floats  # [n] bytes; the largest of a stage counts
    weight: Floats  # [n] bytes that replicas exchange
    keep: Floats  # [n] bytes, for each more sample in flight
    tail: Whole  # [F] forward data flows from node tail[i] to node head[i]; each pair once
    head: Whole  # [F]
    sender: Whole  # [M]
    phase: Whole  # [M]
    send: Floats  # [M, tariffs] seconds, if some reader is elsewhere
    receive: Floats  # [M, tariffs] seconds, if the sender is elsewhere
    copy: Floats  # [M] bytes, if the sender is elsewhere
    keep_copy: Floats  # [M] bytes, if the sender is elsewhere, for each more sample in flight
    message: Whole  # [R] node reader[i] reads message message[i]; rising
    reader: Whole  # [R]
    kinds: Kinds
    flight: Flight
    after: Whole | None  # [K] devices that come after a stage for sure; all that do are counted where this is None
    overlap: bool
    roomy: bool  # whether everything fits on any one device

    @property
    def num_nodes(self) -> int:
        """n."""
        return len(self.need)

    @property
    def num_messages(self) -> int:
        """M."""
        return len(self.sender)

    @property
    def keeps(self) -> bool:
        """Whether a stage needs the more memory the more samples it has in flight."""
        return bool(self.keep.any() or self.keep_copy.any())

    @property
    def chained(self) -> bool:
        """Whether these are the more the more devices come after it, which are counted."""
        return self.keeps and not self.flight.drains and self.after is None

    @property
    def most_samples(self) -> int:
        """In flight at one device."""
        return self.flight.step if self.flight.drains else sum(map(len, self.kinds.devices))

    @property
    def in_a_row(self) -> bool:
        """Whether forward data flows from each node to the next, so that stages can only be one after another."""
        row = np.argsort(dataflow_order(self.tail, self.head, np.arange(self.num_nodes)))
        return bool(np.isin(row[:-1] * self.num_nodes + row[1:], self.tail * self.num_nodes + self.head).all())

    def unchained(self, after: Whole | None = None) -> Stages:
        """A relaxation: each stage has the memory that it would have as the last, or with those `after` it only."""
        if not self.chained:
            return self
        if after is None or not after.any():
            return replace(self, keep=0 * self.keep, keep_copy=0 * self.keep_copy)
        return replace(self, after=after)

    def fused(self, label: Whole) -> Stages:
        """The same with nodes of one label fused, numbered by label, and those that forward data then circles among."""
        count = int(label.max(initial=-1)) + 1
        tail, head = label[self.tail], label[self.head]
        circles, circle = connected_components(
            coo_array((np.ones(len(tail)), (tail, head)), (count, count)), connection="strong"
        )
        if circles < count:
            first = np.unique(circle, return_index=True)[1]
            label = np.argsort(np.argsort(first))[circle][label]
        n = circles

        def added(values: Floats) -> Floats:
            total = np.zeros((n, *values.shape[1:]))
            np.add.at(total, label, values)
            return total

        scratch = np.zeros(n)
        np.maximum.at(scratch, label, self.scratch)
        pair = np.unique(label[self.tail] * n + label[self.head])
        pair = pair[pair // n != pair % n]
        return replace(
            self, node=np.where(self.node < 0, -1, label[self.node]), compute=added(self.compute),
            need=added(self.need), scratch=scratch, weight=added(self.weight), keep=added(self.keep),
            tail=pair // n, head=pair % n, **self._joined(label),
        )  # fmt: skip

    def _joined(self, label: Whole) -> dict[str, Any]:
        """The messages that still go from node to node; those of one sender, phase and set of readers are one."""
        n = int(label.max(initial=0)) + 1
        sender, away = label[self.sender], label[self.sender][self.message] != label[self.reader]
        pair = np.unique(self.message[away] * n + label[self.reader[away]])
        message, reader = pair // n, pair % n
        start = np.searchsorted(message, np.arange(self.num_messages + 1)).tolist()
        text, size = reader.tobytes(), reader.itemsize
        ends, phases = sender.tolist(), self.phase.tolist()
        known: dict[tuple[int, int, bytes], int] = {}
        into, kept = np.full(self.num_messages, -1, np.int64), list[int]()
        for m in range(self.num_messages):
            if start[m] < start[m + 1]:
                key = (ends[m], phases[m], text[start[m] * size : start[m + 1] * size])
                if key not in known:
                    known[key] = len(kept)
                    kept.append(m)
                into[m] = known[key]
        joins = into >= 0

        def added(values: Floats) -> Floats:
            total = np.zeros((len(kept), *values.shape[1:]))
            np.add.at(total, into[joins], values[joins])
            return total

        first = np.zeros(self.num_messages, np.bool_)
        first[kept] = True
        return {
            "sender": sender[kept], "phase": self.phase[kept], "send": added(self.send), "copy": added(self.copy),
            "receive": added(self.receive), "keep_copy": added(self.keep_copy),
            "message": into[message[first[message]]], "reader": reader[first[message]],
        }  # fmt: skip


def stages_of(problem: Problem) -> Stages:
    """The nodes of a problem, fused as far as no plan gets worse by it; made once."""
    if "stages" not in problem.derived:
        problem.derived["stages"] = without_detours(_plain(problem, problem))
    found: Stages = problem.derived["stages"]
    return found


def stages_of_part(part: Problem, problem: Problem) -> Stages:
    """The same of a problem some of whose units must, or must not, be on some device, which tells devices apart.

    That is where they are put; any device that is alike in the whole problem may repeat their stage.
    """
    return without_detours(_plain(part, problem))


def _plain(problem: Problem, original: Problem) -> Stages:
    graph, execution, unit = problem.graph, problem.execution, problem.unit.astype(np.int64)
    place = np.empty(problem.num_units, np.int64)
    place[program(problem)[0]] = np.arange(problem.num_units)
    original = original if execution.replicate else problem  # without replicas it is no matter who was alike
    pools = devices_by_kind(original)
    pool_of = {d: p for p, devices in enumerate(pools) for d in devices}
    groups: dict[tuple[int, int], list[int]] = {}  # those that are alike now as they were then
    for k, devices in enumerate(devices_by_kind(problem)):
        for d in devices:
            groups.setdefault((k, pool_of[d]), []).append(d)
    kinds, of = tuple(map(tuple, groups.values())), np.array([p for _, p in groups])
    used, pool = np.unique(of, return_inverse=True)
    one = [group[0] for group in kinds]
    back = (graph.phase > 0).astype(np.int64)
    phases = 2 if execution.pipeline == "gpipe" and back.any() else 1
    seconds = np.zeros((problem.num_ops, len(one), phases))
    seconds[np.arange(problem.num_ops), :, back if phases > 1 else 0] = problem.seconds[:, one]
    if execution.recompute and back.any():
        seconds[:, :, -1] += np.where(back[:, None] == 0, problem.seconds[:, one], 0.0)
    seconds[~problem.allowed[:, one]] = np.inf  # in both phases
    live = execution.memory == "live"
    need, (at_home, copied), often = graph.resident_bytes.copy(), held_bytes(problem), sent_share(problem)
    np.add.at(need, graph.tensor_producer, at_home)
    kept, (keep_at_home, keep_copied) = np.zeros(problem.num_ops), kept_bytes(problem)
    several = in_flight(problem)
    np.add.at(kept, graph.tensor_producer, several * keep_at_home)

    # One message per tensor, or per edge; a staged send pays once per tensor in any case.
    edge, tensor = np.arange(graph.num_edges), graph.edge_tensor.astype(np.int64)
    if execution.sends == "tensor":
        parts = [(tensor, True, True)]
    elif execution.staged:
        parts = [(tensor, True, False), (graph.num_tensors + edge, False, True)]
    else:
        parts = [(edge, True, True)]
    columns: dict[str, list[NDArray[Any]]] = {}
    for message, sends, receives in parts:
        ids, first, inverse = np.unique(message, return_index=True, return_inverse=True)
        producer, size = graph.edge_producer[first].astype(np.int64), graph.tensor_bytes[tensor[first]]
        to, by = _transfer_times(problem, kinds, producer, size, inverse)
        share = often[tensor[first], None]
        column_of: dict[str, NDArray[Any]] = {
            "sender": unit[producer], "phase": back[producer] if phases > 1 else np.zeros(len(ids), np.int64),
            "send": to * share * sends, "receive": by * share * receives, "copy": copied[tensor[first]] * receives,
            "keep_copy": several * keep_copied[tensor[first]] * receives,
            "message": inverse + sum(map(len, columns.get("sender", ()))), "reader": unit[graph.consumers],
        }  # fmt: skip
        for name, column in column_of.items():
            columns.setdefault(name, []).append(column)
    whole: dict[str, Any] = {name: np.concatenate(column) for name, column in columns.items()}
    both = np.concatenate([whole["send"], whole["receive"], np.zeros((1, len(one)))])
    tariff = np.unique(both, axis=1, return_index=True, return_inverse=True)[1:]
    whole["send"], whole["receive"] = whole["send"][:, tariff[0]], whole["receive"][:, tariff[0]]

    forward = (back[graph.edge_producer] == 0) & (back[graph.consumers] == 0) & ~graph.is_stored[graph.edge_producer]
    most = need.sum() + graph.scratch.max(initial=0.0) + whole["copy"].sum()
    many = flight(problem)
    most += (many.step if many.drains else problem.num_devices) * (kept.sum() + whole["keep_copy"].sum())
    cost, most_of = exchange(original), np.array(most_replicas(original), np.int64)
    plain = Stages(
        node=place, overlap=execution.overlap, flight=many, after=None, kinds=Kinds(
            kinds, pool, np.array([len(pools[p]) for p in used]), problem.capacity[one], tariff[1].reshape(-1),
            most_of[of], cost.per_byte[of], cost.latency[of],
        ),
        compute=np.empty((0, len(one), phases)), need=np.empty(0), scratch=np.empty(0), weight=np.empty(0),
        keep=np.empty(0),
        tail=unit[graph.edge_producer[forward]], head=unit[graph.consumers[forward]],
        roomy=bool(most <= problem.capacity[one].min()), **whole,
    )  # fmt: skip
    plain = replace(
        plain, node=np.arange(problem.num_units), compute=problem.per_unit(seconds), need=problem.per_unit(need),
        scratch=problem.per_unit(graph.scratch * live, np.maximum), keep=problem.per_unit(kept),
        weight=problem.per_unit(graph.resident_bytes * (execution.replicate and trains(problem))),
    )  # fmt: skip
    return plain.fused(place)


def _transfer_times(
    problem: Problem, kinds: tuple[tuple[int, ...], ...], producer: Whole, size: Floats, message: Whole
) -> tuple[Floats, Floats]:
    """[M, K] the least that a message costs its sender, and its reader, on each kind of device."""
    cluster, sent_from, readers = problem.cluster, problem.allowed[producer], problem.allowed[problem.graph.consumers]
    send, receive = np.full((2, len(producer), len(kinds)), np.inf)
    for k, (d, *_) in enumerate(kinds):
        to_reader = np.full(len(message), np.inf)
        for other in range(problem.num_devices):
            if other != d:
                there, back = (
                    cluster.latency[a, b] + size * cluster.seconds_per_byte[a, b] for a, b in ((d, other), (other, d))
                )
                to_reader = np.where(readers[:, other], np.minimum(to_reader, there[message]), to_reader)
                receive[:, k] = np.where(sent_from[:, other], np.minimum(receive[:, k], back), receive[:, k])
        np.minimum.at(send[:, k], message, to_reader)
        away = ~readers[:, d]  # wherever the sender's stage ends
        np.maximum.at(send[:, k], message[away], to_reader[away])
        if not cluster.devices[d].copies:
            send[:, k] = receive[:, k] = 0.0
    # Where the other end can be nowhere else, the message never leaves the device.
    return np.where(np.isfinite(send), send, 0.0), np.where(np.isfinite(receive), receive, 0.0)


# ---- fusing that makes no plan worse ---------------------------------------------------------------------------------


def without_detours(stages: Stages) -> Stages:
    """Fuse each node that only makes a detour with the neighbour that it detours from.

    A node v that is elsewhere than w can move to w's device, and no device is worse off, if

    - the intervals stay: w is the only one that v reads forward, or the only one that reads v, or v has no such ties;
    - w's device saves as much by not exchanging with v as it pays for v's work and v's other messages;
    - v's old device saves as much by having lost v as it pays for exchanging with v over there;
    - memory is no matter, or v needs none. It may also be so little that it is better left out of account;
    - v has no weights that replicas of w's device would have to exchange.

    Ops that take no time and hand on what they read are of this sort. Where copies overlap with work, only they are.
    """
    while True:
        detours = _Detours(stages)
        label = detours.label()
        if label is None:
            return stages
        stages = detours.forgetting(label).fused(np.unique(label, return_inverse=True)[1])


def free_nodes(stages: Stages) -> Whole:
    """The nodes that no forward data ties to others, so that they may be anywhere: they run backward, or are stored."""
    tied = np.zeros(stages.num_nodes, np.bool_)
    tied[stages.tail] = tied[stages.head] = True
    return np.flatnonzero(~tied)


def without(stages: Stages, nodes: Whole) -> Stages:
    """A relaxation: some nodes are left out, and their ties join their neighbours. `node` is -1 for them.

    Free nodes may be anywhere, and ideals have to tell all sets of them apart; small ones make many ideals and decide
    little. Let f be such a node, and look at those that it exchanges messages with which nobody else reads. A stage
    that has some of these and lacks some pays for one of the messages at least: with the nodes that it has if f is
    elsewhere, else with those that it lacks. One that has them all also has f's work, or else pays for all messages.
    So f can become a message among them. What f reads still comes before what reads f.
    """
    start = np.searchsorted(stages.message, np.arange(stages.num_messages + 1))
    readers = [stages.reader[start[m] : start[m + 1]].tolist() for m in range(stages.num_messages)]
    sender, phase, copy = stages.sender.tolist(), stages.phase.tolist(), stages.copy.tolist()
    keep_copy = stages.keep_copy.tolist()
    send, receive = list(stages.send), list(stages.receive)
    compute = np.where(np.isfinite(stages.compute), stages.compute, 0.0)
    extra = np.zeros_like(compute)
    of_node: dict[int, list[int]] = {v: [] for v in nodes.tolist()}
    for m, s in enumerate(sender):
        for v in (s, *readers[m]):
            if v in of_node:
                of_node[v].append(m)
    for f in nodes.tolist():
        mine = [m for m in of_node[f] if f == sender[m] or f in readers[m]]
        main = max((phase[m] for m in mine), default=0)
        apart: dict[int, Floats] = {}  # what a neighbour costs: its own side if f is elsewhere, and f's side
        alone = all(sender[m] != f or len(readers[m]) == 1 for m in mine)
        for m in mine:
            if sender[m] != f and readers[m] != [f]:  # others read it too: it goes on without f
                readers[m].remove(f)
                continue
            for v in (readers[m] if sender[m] == f else [sender[m]]) if phase[m] == main else ():
                both = np.stack([receive[m], send[m]] if sender[m] == f else [send[m], receive[m]])
                apart[v] = apart[v] + both if v in apart else both
            sender[m], readers[m] = -1, []
        cost = {v: both.min(axis=0) for v, both in apart.items()}
        pins = sorted(cost, key=lambda v: (-cost[v].max(), v))
        if not pins:
            continue
        worth = [cost[v].max() * (i + 0.5) for i, v in enumerate(pins)]  # a few that cost much, or many that cost less
        pins = sorted(pins[: int(np.argmax(worth)) + 1])
        least: Floats = np.min([cost[v] for v in pins], axis=0)
        # f's work goes to one of them, as far as the messages would cost as much. It is taken back where one message
        # may be all that is paid for: without the other of two in the middle or, if f sends both the same, any other.
        fixed = [v for v in pins if v not in of_node] if alone else []
        one, *other = fixed[(len(fixed) - 1) // 2 :][:2] or pins[:1]
        work = np.zeros(len(least))
        if not stages.overlap:
            work[:] = np.inf
            np.minimum.at(work, stages.kinds.tariff, (compute[f] + extra[f])[:, main])
            work = np.minimum(work, least)
            extra[one, :, main] += work[stages.kinds.tariff]
        joint = [v for v in pins if v != one]
        for to, there, here in ((joint, least if other else least - work, least), (other, -work, 0 * work)):
            for v in [one, *to] if to else ():
                if v in of_node:
                    of_node[v].append(len(sender))
            if to:
                sender.append(one)
                readers.append(to)
                phase.append(main)
                send.append(there)
                receive.append(here)
                copy.append(0.0)
                keep_copy.append(0.0)
    stays = np.ones(stages.num_nodes, np.bool_)
    stays[nodes] = False
    tail, head = _short_cut(stages, nodes.tolist())
    kept = np.where(stays, np.cumsum(stays) - 1, -1)
    alive = [m for m, s in enumerate(sender) if s >= 0 and readers[m]]
    return replace(
        stages, node=kept[stages.node], compute=(stages.compute + extra)[stays], need=stages.need[stays],
        scratch=stages.scratch[stays], weight=stages.weight[stays], keep=stages.keep[stays],
        tail=kept[tail], head=kept[head],
        sender=kept[[sender[m] for m in alive]], phase=np.array([phase[m] for m in alive], np.int64),
        send=np.array([send[m] for m in alive]).reshape(-1, stages.send.shape[1]),
        receive=np.array([receive[m] for m in alive]).reshape(-1, stages.send.shape[1]),
        copy=np.array([copy[m] for m in alive], np.float64),
        keep_copy=np.array([keep_copy[m] for m in alive], np.float64),
        message=np.repeat(np.arange(len(alive)), [len(readers[m]) for m in alive]),
        reader=kept[[r for m in alive for r in readers[m]]],
    )  # fmt: skip


def _short_cut(stages: Stages, nodes: list[int]) -> tuple[Whole, Whole]:
    """The flow of forward data past nodes that are left out."""
    after: list[dict[int, None]] = [{} for _ in range(stages.num_nodes)]
    before: list[dict[int, None]] = [{} for _ in range(stages.num_nodes)]
    for a, b in zip(stages.tail.tolist(), stages.head.tolist(), strict=True):
        after[a][b] = before[b][a] = None
    for f in nodes:
        for a in before[f]:
            del after[a][f]
            after[a].update(after[f])
        for b in after[f]:
            del before[b][f]
            before[b].update(before[f])
        after[f], before[f] = {}, {}
    pairs = np.array([(a, b) for a, those in enumerate(after) for b in those], np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def below(stages: Stages, limit: float) -> Stages:
    """The same for plans below a limit: each two nodes that, apart, cost one of their devices more are fused.

    A node may not run on a kind of device where its work alone is more.
    """
    if not math.isfinite(limit):
        return stages
    while True:
        too_long = stages.compute.sum(axis=2) > limit * stages.kinds.most
        stages = replace(stages, compute=np.where(too_long[:, :, None], np.inf, stages.compute))
        label = _too_far_apart(stages, limit)
        if label is None:
            return without_detours(stages)
        stages = stages.fused(label)


class _Detours:
    def __init__(self, stages: Stages) -> None:
        n, self._stages = stages.num_nodes, stages
        self._after: list[list[int]] = [[] for _ in range(n)]
        self._before: list[list[int]] = [[] for _ in range(n)]
        for a, b in zip(stages.tail.tolist(), stages.head.tolist(), strict=True):
            self._after[a].append(b)
            self._before[b].append(a)
        self._sent: list[list[int]] = [[] for _ in range(n)]
        self._read: list[list[int]] = [[] for _ in range(n)]
        self._readers: list[list[int]] = [[] for _ in range(stages.num_messages)]
        for m, r in zip(stages.message.tolist(), stages.reader.tolist(), strict=True):
            self._readers[m].append(r)
            self._read[r].append(m)
        for m, s in enumerate(stages.sender.tolist()):
            self._sent[s].append(m)
        self._sender = stages.sender.tolist()
        columns = stages.compute.shape[1:]
        self._compute = stages.compute.reshape(n, columns[0] * columns[1])
        self._able = np.isfinite(self._compute)
        # [M, K * P] in the same columns as the times
        here = (stages.phase[:, None] == np.arange(columns[1]))[:, None, :]
        self._send, self._receive = (
            (cost[:, stages.kinds.tariff, None] * here).reshape(len(cost), columns[0] * columns[1])
            for cost in (stages.send, stages.receive)
        )

    def label(self) -> Whole | None:
        """[n] with whom each node is to be fused, in pairs; None if there is nothing to fuse."""
        n, label, found = self._stages.num_nodes, np.arange(self._stages.num_nodes), False
        taken, fits = [False] * n, self._fits().tolist()
        for v in range(n):
            if taken[v] or not fits[v]:
                continue
            for w in self._neighbours(v):
                if not taken[w] and self._is_detour(v, w):
                    label[v] = w
                    taken[v] = taken[w] = found = True
                    break
        return label if found else None

    def _fits(self) -> NDArray[np.bool_]:
        """[n] whether a node's bytes can be on any device, for all that matters."""
        stages = self._stages
        most = stages.most_samples
        held = stages.need + stages.scratch + most * stages.keep
        np.add.at(held, stages.reader, (stages.copy + most * stages.keep_copy)[stages.message])
        little = held <= _LITTLE * stages.kinds.room.min(initial=np.inf)
        fits: NDArray[np.bool_] = (stages.roomy | little) & (stages.weight == 0)
        return fits

    def forgetting(self, label: Whole) -> Stages:
        """The stages without the bytes of the nodes that move, unless everything fits anywhere."""
        stages, moves = self._stages, label != np.arange(self._stages.num_nodes)
        if stages.roomy:
            return stages
        copy, keep_copy = stages.copy.copy(), stages.keep_copy.copy()
        copy[stages.message[moves[stages.reader]]] = keep_copy[stages.message[moves[stages.reader]]] = 0.0
        return replace(
            stages, need=np.where(moves, 0.0, stages.need), scratch=np.where(moves, 0.0, stages.scratch),
            keep=np.where(moves, 0.0, stages.keep), copy=copy, keep_copy=keep_copy,
        )  # fmt: skip

    def _neighbours(self, v: int) -> list[int]:
        """Whom v may join without breaking an interval."""
        before, after = self._before[v], self._after[v]
        if before or after:
            return (before if len(before) == 1 else []) + (after if len(after) == 1 else [])
        others = [self._sender[m] for m in self._read[v]] + [r for m in self._sent[v] for r in self._readers[m]]
        return sorted(set(others))

    def _is_detour(self, v: int, w: int) -> bool:
        able_v, able_w, work = self._able[v], self._able[w], self._compute[v]
        if (able_w & ~able_v).any():
            return False
        work = np.where(able_v, work, 0.0)
        if self._stages.overlap and work[able_w].any():
            return False
        theirs, mine = np.zeros(len(work)), np.zeros(len(work))  # what the move costs w's device, and v's old one
        for m in self._sent[v]:
            readers = self._readers[m]
            if w in readers:
                theirs -= self._receive[m]
                mine -= self._send[m]
            if len(readers) > 1 or readers[0] != w:
                theirs += np.maximum(self._send[m], 0.0)
                mine += self._receive[m]
        for m in self._read[v]:
            if self._sender[m] == w:
                if len(self._readers[m]) == 1:
                    theirs -= self._send[m]
                    mine -= self._receive[m]
            elif w not in self._readers[m]:
                theirs += self._receive[m]
                mine += np.maximum(self._send[m], 0.0)
        slack = _ROUNDING * (np.abs(self._send[self._sent[v] + self._read[v]]).sum(axis=0) + work)
        if not self._stages.overlap:
            theirs, mine = theirs + work, mine - work
        return bool((theirs <= slack)[able_w].all() and (mine <= slack)[able_v].all())


def _too_far_apart(stages: Stages, limit: float) -> Whole | None:
    n, kinds = stages.num_nodes, stages.kinds
    one, other = stages.sender[stages.message], stages.reader
    pair, at = np.unique(np.minimum(one, other) * n + np.maximum(one, other), return_inverse=True)
    low, high = pair // n, pair % n
    paid = np.zeros((2, len(pair), stages.send.shape[1]))  # by the lower, by the higher
    up = (one < other)[:, None]
    for end, cost_up, cost_down in ((0, stages.send, stages.receive), (1, stages.receive, stages.send)):
        np.add.at(paid[end], at, np.where(up, cost_up[stages.message], cost_down[stages.message]))
    work, together = stages.compute.sum(axis=2), np.maximum if stages.overlap else np.add
    np.add.at(work, stages.sender, np.minimum(stages.send, 0.0)[:, kinds.tariff])  # what may be taken back
    load = [together(work[ends], paid[i][:, kinds.tariff]) for i, ends in enumerate((low, high))]
    apart = np.zeros(len(pair), np.bool_)  # whether some two devices can have them
    for a, devices in enumerate(kinds.devices):
        for b in range(len(kinds.devices)):
            if a != b or len(devices) > 1:
                apart |= (load[0][:, a] <= limit * kinds.most[a]) & (load[1][:, b] <= limit * kinds.most[b])
    if apart.all():
        return None
    joined = coo_array((np.ones(int((~apart).sum())), (low[~apart], high[~apart])), (n, n))
    label: Whole = connected_components(joined, directed=False)[1].astype(np.int64)
    return label
