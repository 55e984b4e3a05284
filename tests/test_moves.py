"""Moves: the compiled kernels equal plain twins, written from what they say they do, with lists and sets."""

from __future__ import annotations

import numpy as np

from placewise.planners.moves import GroupMoves, UnitMoves
from problems import random_placement, random_problem


class Plain:
    """The units of a placed problem: their ops, neighbours and bytes, and what may go where."""

    def __init__(self, problem, placement, seed, focus):
        graph = problem.graph
        self.placement, self.draw = placement.tolist(), np.random.RandomState(seed)
        self.ops = [np.flatnonzero(problem.unit == unit).tolist() for unit in range(problem.num_units)]
        self.device = [self.placement[ops[0]] for ops in self.ops]
        self.may = [np.flatnonzero(problem.allowed[ops[0]]).tolist() for ops in self.ops]
        self.bytes = [sum(graph.resident_bytes[ops].tolist()) for ops in self.ops]
        edges = list(
            zip(problem.unit[graph.edge_producer].tolist(), problem.unit[graph.consumers].tolist(), strict=True)
        )
        self.near = [
            [b for a, b in edges if a == unit] + [a for a, b in edges if b == unit] for unit in range(len(self.ops))
        ]
        self.movable = [unit for unit, may in enumerate(self.may) if len(may) > 1]
        self.focus = [unit for unit in self.movable if focus[self.ops[unit]].any()]
        self.room = problem.capacity.tolist()

    def first(self, seeds):
        return self.one_of(self.focus if self.focus and self.draw.random_sample() < 0.5 else seeds)

    def one_of(self, choices):
        return choices[self.draw.randint(len(choices))]

    def near_device(self, unit, share):
        """That of a neighbour, at times."""
        return (
            self.device[self.one_of(self.near[unit])] if self.near[unit] and self.draw.random_sample() < share else None
        )

    def fits(self, going, coming, source, target):
        """Nobody may end with too much who gains: bytes go one way only."""
        gain = sum(self.bytes[unit] for unit in going) - sum(self.bytes[unit] for unit in coming)
        taker = target if gain > 0 else source
        used = sum(size for size, device in zip(self.bytes, self.device, strict=True) if device == taker)
        return gain == 0 or used + abs(gain) <= self.room[taker]

    def row(self, going, coming, source, target):
        row = list(self.placement)
        for units, device in ((going, target), (coming, source)):
            for unit in units:
                for op in self.ops[unit]:
                    row[op] = device
        return row


def plain_unit_moves(problem, placement, seed, focus, count, *, only_pieces=False):
    plain, rows = Plain(problem, placement, seed, focus), []
    for _ in range(count if plain.movable else 0):
        kind = "piece" if only_pieces else ("unit", "unit", "swap", "piece")[plain.draw.randint(4)]
        unit = plain.first(plain.movable)
        source, going, coming = plain.device[unit], [unit], []
        if kind == "swap":
            coming = [plain.one_of(plain.movable)]
            target = plain.device[coming[0]]
            if target not in plain.may[unit] or source not in plain.may[coming[0]]:
                continue
        else:
            target = plain.near_device(unit, 0.5)
            if target not in plain.may[unit]:
                target = plain.one_of(plain.may[unit])
        if target == source:
            continue
        if kind == "piece":  # breadth first
            size = 2 ** plain.draw.randint(1, 6)
            for member in going:
                for other in plain.near[member]:
                    fit = plain.device[other] == source and target in plain.may[other]
                    if len(going) < size and other not in going and fit:
                        going.append(other)
        if only_pieces or plain.fits(going, coming, source, target):
            rows.append(plain.row(going, coming, source, target))
    return rows


def plain_group_moves(problem, labels, placement, seed, focus, count):
    plain, rows = Plain(problem, placement, seed, focus), []
    levels = [list(range(len(plain.ops)))]
    label = [ops[0] for ops in plain.ops]
    for finer in labels:
        label = [int(finer[group]) for group in label]
        levels.append(label)
    seeds = [unit for unit in plain.movable if any(plain.device[a] != plain.device[unit] for a in plain.near[unit])]
    seeds = seeds or plain.movable

    def part(unit, level, source, target):
        group = [other for other in range(len(level)) if level[other] == level[unit]]
        return [other for other in group if plain.device[other] == source and target in plain.may[other]]

    for _ in range(count if seeds else 0):
        unit = plain.first(seeds)
        level = plain.one_of(levels)
        source, target = plain.device[unit], plain.near_device(unit, 0.75)
        if target == source or target not in plain.may[unit]:
            target = plain.one_of(plain.may[unit])
        if target == source:
            continue
        going, coming = part(unit, level, source, target), []
        one_way = plain.draw.random_sample() < 0.75
        if not (one_way and plain.fits(going, [], source, target)):
            other = plain.one_of(seeds)
            if plain.device[other] != target or source not in plain.may[other]:
                continue
            coming = part(other, level, target, source)
            if not plain.fits(going, coming, source, target):
                continue
        rows.append(plain.row(going, coming, source, target))
    return rows


def placed(seed):
    """A problem, a placement of it, the ops to change more often (none, at times) and the moves' random numbers."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, max_ops=40, constrained=seed % 3 > 0)
    focus = rng.random(problem.num_ops) < 0.2 * (seed % 2)
    return problem, random_placement(rng, problem), focus, rng


def given_to_kernels(seed):
    """The seed that the first call of a kernel gets."""
    return int(np.random.default_rng(seed).integers(2**31))


SEEDS = range(60)


def test_moves_of_units_equal_their_twin():
    made = 0
    for seed in SEEDS:
        problem, placement, focus, _ = placed(seed)
        moves = UnitMoves(problem, np.random.default_rng(seed))
        moves.focus(focus)
        rows = moves.batch(placement, 50).tolist()
        assert rows == plain_unit_moves(problem, placement, given_to_kernels(seed), focus, 50), seed
        made += len(rows)
    assert made > 500


def test_kicks_equal_their_twin():
    changed = 0
    for seed in SEEDS:
        problem, placement, focus, _ = placed(seed)
        moves = UnitMoves(problem, np.random.default_rng(seed), kick=1)
        moves.focus(focus)
        kicked = moves.kicked(placement).tolist()
        rows = plain_unit_moves(problem, placement, given_to_kernels(seed), focus, 1, only_pieces=True)
        assert kicked == (rows[0] if rows else placement.tolist()), seed
        changed += kicked != placement.tolist()
    assert changed > 20


def test_moves_of_groups_equal_their_twin():
    """Groups by chance: they need not hang together here."""
    made = 0
    for seed in SEEDS:
        problem, placement, focus, rng = placed(seed)
        labels = [rng.integers(0, 8, problem.num_ops), rng.integers(0, 3, 8)]
        moves = GroupMoves(problem, labels, np.random.default_rng(seed))
        moves.focus(focus)
        rows = moves.batch(placement, 50).tolist()
        assert rows == plain_group_moves(problem, labels, placement, given_to_kernels(seed), focus, 50), seed
        made += len(rows)
    assert made > 500
