"""HEFT equals a plain twin, written from its docstring with lists and sorting."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from placewise.planners import heft
from placewise.planners.blocks import headroom
from placewise.problem import Execution
from placewise.simulator import simulate
from placewise.simulator.arrays import checked_order, priority_order, upward_rank
from problems import problem_of, random_problem

# ---- the twin --------------------------------------------------------------------------------------------------------


def plain_rank(problem, *, self_links=False):
    """[N] longest path to the end. Each pair of devices is a link; `self_links` adds a free one for each device."""
    graph, cluster, devices = problem.graph, problem.cluster, range(problem.num_devices)
    pairs = [(a, b) for a in devices for b in devices if a < b]
    links = len(pairs) + (problem.num_devices if self_links else 0)

    def mean_over_links(matrix):
        return sum((matrix[a, b] + matrix[b, a]) / 2 for a, b in pairs) / links if pairs else 0.0

    latency, per_byte = mean_over_links(cluster.latency), mean_over_links(cluster.seconds_per_byte)
    rank = [0.0] * graph.num_ops
    for op in reversed(graph.topological_order.tolist()):
        able = [time for time in problem.seconds[op].tolist() if time < math.inf]
        mine = graph.edge_producer == op
        onwards = [
            latency + graph.tensor_bytes[t] * per_byte + rank[reader]
            for t, reader in zip(graph.edge_tensor[mine], graph.consumers[mine], strict=True)
        ]
        rank[op] = sum(able) / len(able) + max(onwards, default=0.0)
    return rank


class PlainHeft:
    """Where each op goes and when it starts."""

    def __init__(self, problem, *, self_links=False):
        graph, self.problem = problem.graph, problem
        self.home = {}  # unit -> device
        self.start, self.finish = [0.0] * graph.num_ops, [0.0] * graph.num_ops
        self.bytes = problem.per_unit(graph.resident_bytes).tolist()
        self.room = (problem.capacity - headroom(problem)).tolist()
        self.busy = [[] for _ in range(problem.num_devices)]  # (start, finish), sorted
        self.most_gaps = self.removed = self.split = 0
        order = priority_order(problem, self_links=self_links).tolist()
        for op in order:
            if not graph.is_stored[op]:
                self._place(op)
        for op in range(graph.num_ops):  # parameters that nobody reads
            self._settle(op, None)
        self.placement = [self.home[unit] for unit in problem.unit.tolist()]
        position = {op: i for i, op in enumerate(order)}
        self.order = sorted(order, key=lambda op: (self.start[op], position[op]))

    def _place(self, op):
        unit = self.problem.unit.tolist()
        sources = self._sources(op)
        homeless = {unit[source] for _, source in sources if unit[source] not in self.home} - {unit[op]}
        own = 0.0 if unit[op] in self.home else self.bytes[unit[op]]
        choices = self._choices(op, own + sum(self.bytes[u] for u in homeless)) or self._choices(op, own)
        if choices:
            finish, device, start = min(choices)
        else:  # no room anywhere: after everything else on the fastest device
            device = self.home.get(unit[op], int(np.argmin(self.problem.seconds[op])))
            start = max([self.idle(device)[-1][0], *(self.finish[source] for _, source in sources)])
            finish = start + float(self.problem.seconds[op, device])
        self._settle(op, device)
        for _, source in sources:
            self._settle(source, device)
        before = self.idle(device)
        self.busy[device] = sorted([*self.busy[device], (start, finish)])
        after = self.idle(device)
        self.start[op], self.finish[op] = start, finish
        self.most_gaps = max(self.most_gaps, len(after))
        self.removed += len(after) < len(before)
        self.split += after[-2:] == before[-2:] and len(after) > len(before)

    def _choices(self, op, need):
        """(finish, device, start) on each device that may take the op and has room for so many bytes."""
        cluster, found = self.problem.cluster, []
        for d in range(self.problem.num_devices):
            time = float(self.problem.seconds[op, d])
            if time == math.inf or self.home.get(self.problem.unit[op], d) != d or need > self.room[d]:
                continue
            ready = 0.0
            for t, source in self._sources(op):
                a = self.home.get(self.problem.unit[source], d)
                size = float(self.problem.graph.tensor_bytes[t])
                transfer = cluster.latency[a, d] + size * cluster.seconds_per_byte[a, d] if a != d else 0.0
                ready = max(ready, self.finish[source] + float(transfer))
            starts = [max(ready, begin) for begin, end in self.idle(d) if max(ready, begin) + time <= end > ready]
            found.append((starts[0] + time, d, starts[0]))
        return found

    def idle(self, device):
        """(start, end) of every gap on a device; the last one never ends."""
        edges = [(0.0, 0.0), *self.busy[device], (math.inf, math.inf)]
        return [(end, begin) for (_, end), (begin, _) in pairwise(edges) if begin > end]

    def _sources(self, op):
        graph = self.problem.graph
        mine = graph.edge_tensor[graph.consumers == op].tolist()
        return [(t, int(graph.tensor_producer[t])) for t in mine]

    def _settle(self, op, device):
        """Give an op's unit a home: the device if that is its own or has room, else the one with the most."""
        unit = int(self.problem.unit[op])
        if unit in self.home:
            return
        if device is None or (self.problem.graph.is_stored[op] and not self._may_live(op, device)):
            able = np.flatnonzero(self.problem.allowed[op]).tolist()
            device = max(able, key=lambda d: self.room[d])
        self.home[unit] = device
        self.room[device] -= self.bytes[unit]

    def _may_live(self, op, device):
        return self.problem.allowed[op, device] and self.bytes[self.problem.unit[op]] <= self.room[device]


def assert_equals_twin(problem, monkeypatch, *, self_links=False):
    starts = []

    def recorded(*arguments):
        place, start = kernel(*arguments)
        starts.append(start.tolist())
        return place, start

    kernel = heft._schedule
    with monkeypatch.context() as patch:
        patch.setattr(heft, "_schedule", recorded)
        placement, order = heft.schedule(problem, self_links)
    twin = PlainHeft(problem, self_links=self_links)
    assert placement.tolist() == twin.placement
    assert starts == [twin.start]
    assert order.tolist() == twin.order
    checked_order(problem, order)
    return twin


# ---- random graphs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(4))
def test_equals_its_twin_on_small_problems(block, monkeypatch):
    """With parameters, groups, pins, limited memory, zero times, latencies, links that differ."""
    seen = 0
    for seed in range(150 * block, 150 * (block + 1)):
        rng = np.random.default_rng(seed)
        problem = random_problem(
            rng, max_ops=16, objective="latency", integers=seed % 3 > 0, stored=0.3, constrained=seed % 2 == 0
        )
        if not reads_a_parameter_twice(problem):
            assert_equals_twin(problem, monkeypatch, self_links=seed % 5 == 0)
            seen += 1
    assert seen > 75


def reads_a_parameter_twice(problem):
    graph = problem.graph
    stored = graph.is_stored[graph.edge_producer]
    reads = zip(graph.consumers[stored], problem.unit[graph.edge_producer[stored]], strict=True)
    return len(set(reads)) < stored.sum()


def weaving(rng, rounds, fillers):
    """A chain that alternates between two devices, so that each idles every other step; small ops fill the gaps.

    Some of them read from the chain, and what they read arrives in the middle of a gap.
    """
    n = rounds + fillers
    seconds = np.repeat([[8.0, 8.0]], n, axis=0)
    seconds[rounds:] = rng.choice([1.0, 2.0, 3.0, 10.0], (fillers, 1))
    readers = rounds + np.flatnonzero(rng.random(fillers) < 0.7)
    producers = [*range(rounds - 1), *rng.integers(0, rounds, len(readers)).tolist()]
    sizes = [*[1.0] * (rounds - 1), *rng.integers(0, 20, len(readers)).astype(float)]
    consumers = [*range(1, rounds), *readers.tolist()]
    pins = {f"op{i}": f"d{i % 2}" for i in range(rounds)}
    pins |= {f"op{reader}": f"d{1 - a % 2}" for a, reader in zip(producers[rounds - 1 :], readers, strict=True)}
    columns = {"tensor_producer": producers, "tensor_bytes": sizes, "pins": pins}
    return problem_of(seconds, list(enumerate(consumers)), latency=1.0, **columns)


def test_equals_its_twin_on_devices_with_hundreds_of_gaps(monkeypatch):
    gaps = removed = split = 0
    for seed in range(6):
        problem = weaving(np.random.default_rng(seed), 300, 250)
        twin = assert_equals_twin(problem, monkeypatch)
        gaps, removed, split = max(gaps, twin.most_gaps), removed + twin.removed, split + twin.split
    assert gaps > 2 * 64  # the table has grown twice
    assert min(removed, split) > 100  # gaps have been filled to the brim, and cut in two


def test_equals_its_twin_while_one_device_has_many_more_gaps_than_the_others(monkeypatch):
    """The table is as wide as the device with the most gaps needs."""
    rng = np.random.default_rng(0)
    n = 260
    seconds = np.full((n, 3), 4.0)
    seconds[200:] = rng.choice([1.0, 2.0, 5.0], (60, 1))
    pins = {f"op{i}": "d0" if i % 2 else "d1" if i % 40 else "d2" for i in range(200)}
    problem = problem_of(seconds, [(i, i + 1) for i in range(199)], sizes=0.0, pins=pins)
    assert assert_equals_twin(problem, monkeypatch).most_gaps > 64


# ---- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("self_links", [False, True])
def test_ranks_are_longest_paths_of_means(self_links):
    for seed in range(150):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, max_ops=12, objective="latency", integers=False, constrained=True)
        rank = upward_rank(problem, self_links=self_links)
        assert rank == pytest.approx(plain_rank(problem, self_links=self_links), rel=1e-12)
        assert (np.diff(rank[priority_order(problem, self_links=self_links)]) <= 0).all()


def test_a_free_link_to_itself_lowers_the_mean():
    """Two devices, 6 s apart: one link of 6 s, or that and two free ones."""
    problem = problem_of(np.ones((2, 2)), [(0, 1)], sizes=4.0, latency=2.0)
    assert upward_rank(problem).tolist() == [1 + 6 + 1, 1]
    assert upward_rank(problem, self_links=True).tolist() == [1 + 2 + 1, 1]
    alone = problem_of(np.ones((2, 1)), [(0, 1)], sizes=4.0)
    assert upward_rank(alone).tolist() == upward_rank(alone, self_links=True).tolist() == [2, 1]


# ---- what it makes of them -------------------------------------------------------------------------------------------


def test_its_estimate_comes_true_where_transfers_do_not_wait():
    """The paper's model: no contention, a transfer per edge, memory for everything."""
    free = Execution(contention="none", sends="edge", memory="static")
    for seed in range(200):
        rng = np.random.default_rng(seed)
        problem = random_problem(
            rng, max_ops=20, objective="latency", execution=free, integers=seed % 2 == 0, stored=0.0
        )
        twin = PlainHeft(problem)
        timeline = simulate(problem, twin.placement, np.array(twin.order, np.int32))
        assert timeline.start.tolist() == twin.start
