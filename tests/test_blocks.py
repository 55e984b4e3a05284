"""Blocks between ops that everything passes through, laid out in every way: no plan beats that, and some meet it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest

from oracles import brute_force, brute_force_orders
from placewise.certificate import TRUST, check
from placewise.driver import Budget, plan
from placewise.learned import families
from placewise.problem import Execution
from placewise.simulator import blocks
from placewise.simulator.alike import kinds
from placewise.simulator.bounds import lower_bound, made_of
from placewise.simulator.pieces import Part
from placewise.simulator.working import takes_time, working_set
from problems import problem_of
from test_stretches import row

NAME = "blocks in stretches"


# ---- by hand ---------------------------------------------------------------------------------------------------------


def residual(**options):
    """op1 and op2 are beside what goes straight from op0 to op3. No three of them fit on one device with op2."""
    settings = {"sizes": [6.0, 1.0, 9.0, 0.0], "resident": [1.0, 1.0, 3.0, 2.0], "memory": 5.0,
                "execution": Execution(memory="static")} | options  # fmt: skip
    return problem_of(np.ones((4, 2)), [(0, 1), (0, 3), (1, 2), (2, 3)], **settings)


def test_what_crosses_at_once_takes_turns_on_the_channel():
    """op0's 6 bytes and op1's one go one after the other, in 7 s, before op2 or op3; one by one they would take 6."""
    problem = residual()
    found = lower_bound(problem).parts
    assert found[NAME] == pytest.approx(1 + 6 + 1 + 1 + 1) == brute_force(problem)[0]
    assert found["path in stretches"] == pytest.approx(1 + 6 + 1)
    assert made_of(problem)[NAME] == pytest.approx({"compute": 4.0, "transfer": 0.0, "memory": 6.0})


def test_channels_that_never_wait_are_not_counted():
    problem = residual(execution=Execution(memory="static", contention="none"))
    assert lower_bound(problem).parts[NAME] == pytest.approx(1 + 6 + 1) == brute_force(problem)[0]


def test_a_plan_that_meets_it_is_the_best_and_check_takes_that_on_trust():
    found = plan(residual(), "local-search", budget=Budget(evaluations=2000))
    assert found.gap < 1e-9
    findings = check(found)
    assert not any(finding.is_wrong for finding in findings)
    assert [finding.verdict for finding in findings if finding.claim == f"bound: {NAME}"] == [TRUST]


# ---- beside all plans ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("live", "sequential", "unlike", "each"), [
    (True, False, 2, 2), (False, False, 2, 2), (True, True, 2, 1), (True, False, 3, 1), (False, False, 1, 3),
])  # fmt: skip
def test_no_placement_beats_it(live, sequential, unlike, each):
    said = met = more = 0
    for seed in range(1000, 1150):
        problem = row(np.random.default_rng(seed), ops=6, kinds=unlike, each=each, live=live, sequential=sequential)
        best, _ = brute_force(problem)
        parts = lower_bound(problem).parts
        assert parts.get(NAME, 0.0) <= best, seed
        said += NAME in parts and math.isfinite(best)
        met += parts.get(NAME, 0.0) >= best * (1 - 1e-9)
        more += parts.get(NAME, 0.0) > parts.get("path in stretches", 0.0) * (1 + 1e-9)
    assert said > 10
    assert met > 5
    assert more > 1


@cache
def some():
    """Problems that have the bound, with several ops between joints."""
    drawn = (row(np.random.default_rng(seed), ops=8, live=seed % 3 > 0) for seed in range(2000, 2150))
    return [problem for problem in drawn if NAME in lower_bound(problem).parts]


@pytest.mark.parametrize(("effort", "grains"), [(20, (0.0, 0.3)), (0, (0.0,)), (10**9, (0.3,))])
def test_less_effort_leaves_a_bound(monkeypatch, effort, grains):
    whole = [lower_bound(problem).parts[NAME] for problem in some()]
    monkeypatch.setattr(blocks, "_EFFORT", effort)
    monkeypatch.setattr(blocks, "_GRAINS", grains)
    rough = [lower_bound(problem).parts.get(NAME, 0.0) for problem in map(replace, some())]
    assert all(less <= most * (1 + 1e-9) for less, most in zip(rough, whole, strict=True))
    assert sum(less < most * (1 - 1e-9) for less, most in zip(rough, whole, strict=True)) > 5


def test_no_order_beats_it():
    said = 0
    for seed in range(1000, 1040):
        problem = row(np.random.default_rng(seed), ops=5, each=1)
        parts = lower_bound(problem).parts
        assert parts.get(NAME, 0.0) <= brute_force_orders(problem)[0], seed
        said += NAME in parts
    assert said > 5


# ---- the kernel's twin -----------------------------------------------------------------------------------------------


def test_every_layout_tried_out_says_the_same():
    assert len(some()) > 20
    for problem in some():
        bound = lower_bound(problem)
        assert bound.parts[NAME] == pytest.approx(tried_out(problem, list(bound.path)), abs=1e-9)


def tried_out(problem, path):
    """The least time by plain enumeration: where the joints are, and of each block where the other ops are."""
    graph, part = problem.graph, Part(problem, path)
    inside = part.edges(0, len(part.order) - 1)
    joints = [j for j in part.joints if all(not made < j < reader for _, made, reader in inside)]
    resident, held = problem.per_unit(graph.resident_bytes), np.zeros_like(problem.seconds)
    if problem.execution.memory == "live":
        held = np.where(takes_time(problem), working_set(problem)[:, None], 0.0)
    alone = np.where(held + resident[problem.unit][:, None] <= problem.capacity, problem.seconds, math.inf)
    for unit in range(problem.num_units):  # what shares a device fits only together
        mine = problem.unit == unit
        alone[np.ix_(mine, np.isinf(alone[mine]).any(axis=0))] = math.inf
    groups, counted = kinds(problem), {int(problem.unit[path[0]])}
    ways = {
        (k, float(resident[problem.unit[path[0]]]), float(held[path[0], group[0]])): float(alone[path[0], group[0]])
        for k, group in enumerate(groups)
    }
    for a, b in pairwise(joints):
        ops, edges = part.order[a : b + 1], [(t, made - a, reader - a) for t, made, reader in part.edges(a, b)]
        units = list(dict.fromkeys(problem.unit[ops].tolist()))
        fresh = {u: 0.0 if u in counted else float(resident[u]) for u in units}
        counted |= set(units)
        following = {}
        for (k, used, most), time in ways.items():
            for target in [(k, groups[k][0])] + [
                (e, next(d for d in group if d != groups[k][0])) for e, group in enumerate(groups)
                if set(group) - {groups[k][0]}
            ]:  # fmt: skip
                ends = [groups[k][0], target[1]]
                for where in product(["here", "there", "elsewhere"], repeat=len(units)):
                    place = dict(zip(units, where, strict=True))
                    last = "here" if ends[0] == ends[1] else "there"
                    if place[problem.unit[ops[0]]] != "here" or place[problem.unit[ops[-1]]] != last:
                        continue
                    if last == "here" and "there" in where:
                        continue
                    on = [place[problem.unit[op]] for op in ops]
                    lasts = block_time(problem, ops, edges, on, ends, alone)
                    room = [sum(fresh[u] for u in units if place[u] == side) for side in ("here", "there")]
                    peak = [max([0.0, *(held[op, ends[i]] for op, side in zip(ops, on, strict=True) if side == name)])
                            for i, name in enumerate(("here", "there"))]  # fmt: skip
                    first = used + room[0], max(most, peak[0])
                    if math.isinf(lasts) or sum(first) > problem.capacity[ends[0]]:
                        continue
                    if room[1] + peak[1] > problem.capacity[ends[1]]:
                        continue
                    state = (k, *first) if last == "here" else (target[0], room[1], peak[1])
                    following[state] = min(following.get(state, math.inf), time + lasts)
        ways = following
    return min(ways.values(), default=math.inf)


def block_time(problem, ops, edges, on, ends, alone):
    """The longest path of one layout, or what a device or a channel does in turn."""
    others = [d for d in range(problem.num_devices) if d not in ends]
    sides = {"here": ends[:1], "there": ends[1:], "elsewhere": others}

    def takes(i):
        return 0.0 if i == 0 else min((alone[ops[i], d] for d in sides[on[i]]), default=math.inf)

    def way(t, a, d):
        cluster, size = problem.cluster, problem.graph.tensor_bytes[t]
        pairs = [(x, y) for x in sides[a] for y in sides[d]]
        return 0.0 if a == d else min((cluster.latency[p] + size * cluster.seconds_per_byte[p] for p in pairs),
                                      default=math.inf)  # fmt: skip

    finish, rest = [takes(0)], [0.0] * len(ops)
    for i in range(1, len(ops)):
        finish.append(max(finish[made] + way(t, on[made], on[i]) for t, made, r in edges if r == i) + takes(i))
    for i in reversed(range(len(ops))):
        rest[i] = max((way(t, on[i], on[r]) + takes(r) + rest[r] for t, made, r in edges if made == i), default=0.0)
    if math.isinf(finish[-1]):
        return math.inf
    work = {}
    for i, side in enumerate(on):
        if side != "elsewhere" and takes(i) > 0:
            work.setdefault(side, {})[i] = (finish[i] - takes(i), takes(i), rest[i])
    for t, made, r in edges if problem.execution.contention == "channel" else ():
        a, d = on[made], on[r]
        if a != d and "elsewhere" not in (a, d) and way(t, a, d) > 0:
            tail = max(takes(x) + rest[x] for u, _, x in edges if u == t and on[x] == d)
            work.setdefault((a, d), {})[t, d] = (finish[made], way(t, a, d), tail)
    return max([finish[-1], *(in_turn(list(jobs.values())) for jobs in work.values())])


def in_turn(jobs):
    """Of all jobs with heads above some time and tails above another: the least head, all lengths, the least tail."""
    best = 0.0
    for head, tail in product({h for h, _, _ in jobs}, {q for _, _, q in jobs}):  # what interrupted work comes to
        some = [length for h, length, q in jobs if h >= head and q >= tail]
        best = max(best, head + sum(some) + tail) if some else best
    for one, two in product(jobs, repeat=2):
        if one is not two:
            best = max(best, min(after(one, two), after(two, one)))
    return best


def after(first, second):
    """When both and what follows them have ended, if the first goes first."""
    ended = first[0] + first[1]
    return max(ended + first[2], max(ended, second[0]) + second[1] + second[2])


def test_layouts_are_counted_with_the_rows_that_they_are_compared_with(monkeypatch):
    """Or else a block of 18 of these ops takes minutes; it ends, and its longest path is what counts."""
    spent, lay_out = [], blocks._lay_out

    def counted(*arrays):
        rows, effort = lay_out(*arrays)
        spent.append((effort > arrays[-1], len(rows)))
        return rows, effort

    monkeypatch.setattr(blocks, "_lay_out", counted)
    bound = lower_bound(families.draw("recurrent", np.random.default_rng([77, 2, 4]))).value
    assert (True, 1) in spent
    assert 0.0 < bound < math.inf
