"""Gates: where stages may as well end, against all sets of nodes and against the search without them."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

import numpy as np
import pytest

from placewise.planners import ideals_search
from placewise.planners.gates import Column, Net, no_gates, without_idle_copies
from placewise.planners.ideals_search import Search
from placewise.planners.stages import stages_of
from test_ideals import pipeline, with_equal_links


def random_net(rng):
    """Nodes in a row of blocks, messages with several readers, some of them backward."""
    n = int(rng.integers(2, 9))
    pairs = {(a, b) for a in range(n) for b in range(a + 1, min(n, a + 4)) if rng.random() < 0.6}
    tail, head = np.array(sorted(pairs), np.int64).reshape(-1, 2).T
    sender, message, reader = [], [], []
    for m in range(int(rng.integers(1, 2 * n))):
        s = int(rng.integers(n))
        others = [v for v in range(n) if v != s]
        readers = sorted(rng.choice(others, int(rng.integers(1, min(3, n - 1) + 1)), replace=False).tolist())
        forward = [r for r in readers if (s, r) in pairs]
        sender.append(s)
        for r in forward if forward and rng.random() < 0.8 else readers:
            message.append(m)
            reader.append(r)
    count = len(sender)
    columns = [
        Column(*(rng.integers(0, 4, size).tolist() for size in (n, count, count)))
        for _ in range(int(rng.integers(1, 3)))
    ]
    return n, tail, head, np.array(sender), np.array(message), np.array(reader), columns


def all_ideals(n, tail, head):
    for mask in range(1 << n):
        if all(mask >> a & 1 or not mask >> b & 1 for a, b in zip(tail.tolist(), head.tolist(), strict=True)):
            yield {v for v in range(n) if mask >> v & 1}


def cost(part, nodes, sender, readers, column):
    """What a stage costs, from the definition."""
    total = sum(column.own[v] for v in part)
    for m, s in enumerate(sender.tolist()):
        if s in part:
            total += column.send[m] if readers[m] - part else 0
        elif readers[m] & part:
            total += column.receive[m]
    return total


def test_no_stage_is_worse_off_without_what_a_gate_has():
    held = 0
    for seed in range(150):
        n, tail, head, sender, message, reader, columns = random_net(np.random.default_rng(seed))
        gates = Net(tail, head, sender, message, reader, columns, n).gates()
        readers = [set(reader[message == m].tolist()) for m in range(len(sender))]
        below = list(all_ideals(n, tail, head))
        within = [set(np.flatnonzero(gates.of <= j).tolist()) for j in range(len(gates.since))]
        assert within[-1] == set(range(n))
        for j, gate in enumerate(within):
            assert gate in below
            forced = set(np.flatnonzero(gates.forced <= j).tolist())
            assert all(forced <= ideal for ideal in below if not ideal <= gate)
            since = int(gates.since[j])
            for ideal in below:
                if not ideal <= gate or ideal == gate or (since >= 0 and ideal <= within[since]) or since == j:
                    continue
                held += len(gate) < n
                # any later stage: some of what is not in the ideal, in two ideals' difference
                rest = sorted(set(range(n)) - ideal)
                for part in chain.from_iterable(combinations(rest, size) for size in range(1, len(rest) + 1)):
                    stage = set(part)
                    for column in columns:
                        assert cost(stage - gate, n, sender, readers, column) <= cost(
                            stage, n, sender, readers, column
                        ), (seed, j, ideal, stage)
    assert held > 500


def without_gates(search, n):
    """The same search as if there were no gates."""
    search._saves[:] = -ideals_search._NO_LIMIT
    none = no_gates(n)
    rest = np.zeros((len(search._supply), 0), np.int64)
    search._gates = (none.of, none.forced, none.since, rest, np.zeros(1, np.int64), np.arange(n))
    return search


@pytest.mark.parametrize("overlap", [False, True])
def test_the_search_decides_the_same_without_gates(overlap):
    decided = {True: 0, False: 0}
    for seed in range(120):
        rng = np.random.default_rng(seed)
        problem = with_equal_links(rng, pipeline(rng, max_ops=16, max_devices=4, constrained=seed % 3 == 0))
        if not problem.num_ops:
            continue
        problem = replace(problem, execution=replace(problem.execution, overlap=overlap, pipeline="1f1b"))
        stages = stages_of(problem).unchained()
        if stages.num_nodes < 3:
            continue
        whole = Search(stages, float("inf"), None).decide(float("inf"))
        if whole is None:
            continue
        for share in rng.uniform(0.2, 1.0, 4):
            limit = share * whole[0]
            found = Search(stages, whole[0], None).decide(limit)
            plain = without_gates(Search(stages, whole[0], None), stages.num_nodes).decide(limit)
            assert (found is None) == (plain is None), (seed, share)
            if found is not None:
                assert found[0] <= limit
            decided[found is not None] += 1
    assert min(decided.values()) > 40


def test_copies_are_left_out_only_where_they_never_count():
    left_out = 0
    for seed in range(120):
        rng = np.random.default_rng(seed)
        problem = with_equal_links(rng, pipeline(rng, max_ops=10, constrained=False))
        if not problem.num_ops:
            continue
        execution = replace(problem.execution, overlap=True, pipeline="1f1b", memory="static")
        stages = stages_of(replace(problem, execution=execution)).unchained()
        cheap = replace(stages, send=stages.send / 16, receive=stages.receive / 16)
        for given in (stages, cheap):
            best = Search(given, float("inf"), None).decide(float("inf"))
            limit = 0.0
            while best is not None and best[0] > 0.0:  # down to the optimum
                limit = best[0]
                best = Search(given, limit, None).decide(limit * (1 - 1e-9))
            if best is not None:
                continue
            less = without_idle_copies(given, limit)
            left_out += less is not given
            assert limit == 0.0 or Search(less, limit, None).decide(limit * (1 - 1e-9)) is None
    assert left_out > 20
