"""Graphs of medium size, where brute force ends: dynamic programming, HiGHS and CP-SAT come to the same optimum."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from ortools.math_opt.python import mathopt

from oracles import brute_force
from placewise import plan
from placewise.driver import Budget
from placewise.problem import Execution
from problems import problem_of

EQUAL = 3  # devices
WHOLE = 12  # a time per sample, shared by up to so many devices or by four samples, is whole in this many parts

#: (training, each node reads the one before, execution)
SETTINGS = {
    "inference": (False, False, {}),
    "training": (True, False, {}),
    "gpipe": (True, False, {"pipeline": "gpipe"}),
    "replicas": (False, False, {"replicate": True}),
    "replicas, training": (True, False, {"replicate": True, "microbatches": 4}),
    "replicas, gpipe": (True, False, {"replicate": True, "microbatches": 4, "pipeline": "gpipe"}),
    "in flight": (True, True, {"in_flight": "pipeline", "memory": "live"}),
    "all": (True, True, {"in_flight": "pipeline", "memory": "live", "replicate": True, "microbatches": 4}),
    "all, gpipe": (
        True, False,
        {"in_flight": "pipeline", "memory": "live", "replicate": True, "microbatches": 4, "pipeline": "gpipe"},
    ),
}  # fmt: skip


def medium(seed, name):
    """16 nodes with branches on three equal devices; in training 12, each with a backward op on the same device."""
    training, in_a_row, execution = SETTINGS[name]
    rng, n = np.random.default_rng(seed), 16 if not training else 12
    edges = [(int(rng.integers(max(0, i - 4), i)), i) for i in range(1, n)]
    edges += [(i, int(rng.integers(i + 1, min(n, i + 5)))) for i in range(n - 1) if rng.random() < 0.4]
    edges += [(i, i + 1) for i in range(n - 1) if in_a_row]
    seconds, phase, group = rng.integers(1, 20, n), [0] * n, list(range(n))
    if training:
        edges += [(n + b, n + a) for a, b in edges] + [(n - 1, 2 * n - 1)] + [(i, n + i) for i in range(n) if in_a_row]
        seconds, phase, group = np.append(seconds, rng.integers(1, 40, n)), [0] * n + [1] * n, group * 2
    live = execution.get("memory") == "live"
    return problem_of(
        np.repeat(seconds[:, None], EQUAL, axis=1).astype(float), sorted(set(edges)), phase=phase, group=group,
        sizes=rng.integers(0, 6, len(seconds)).astype(float), resident=rng.integers(0, 5, len(seconds)).astype(float),
        memory=(3.5 if live else 1.6) * len(seconds), objective="throughput", contiguous=True,
        execution=Execution(**{"contention": "none", "overlap": False, "staged": True, "memory": "static"} | execution),
    )  # fmt: skip


def by_programme(problem, solver, shares):
    """The least time per sample of stages, so many equal devices on each, whose numbers forward data only raises."""
    graph, execution, stages = problem.graph, problem.execution, range(len(shares))
    back, step = (graph.phase > 0).astype(int).tolist(), execution.microbatches
    drains = execution.pipeline == "gpipe"
    model = mathopt.Model()
    busiest = [model.add_integer_variable(lb=0.0, ub=1e5) for _ in range(1 + drains)]
    on = [[model.add_binary_variable() for _ in stages] for _ in range(problem.num_units)]
    load = [[[] for _ in stages] for _ in busiest]
    held = [[] for _ in stages]
    for row in on:
        model.add_linear_constraint(mathopt.fast_sum(row) == 1.0)
    for op, unit in enumerate(problem.unit.tolist()):
        size = float(graph.resident_bytes[op])
        for s, r in enumerate(shares):
            load[back[op] * drains][s].append(float(problem.seconds[op, 0]) * on[unit][s])
            load[-1][s].append(any(back) * (r - 1) * 2 * size / step * on[unit][s])
            held[s].append(size * on[unit][s])
    number = [mathopt.fast_sum([s * row[s] for s in stages]) for row in on]
    edges = list(zip(graph.edge_tensor.tolist(), graph.edge_producer.tolist(), graph.consumers.tolist(), strict=True))
    for _, u, v in edges:
        if not back[u] and not back[v]:
            model.add_linear_constraint(number[problem.unit[v]] - number[problem.unit[u]] >= 0.0)
    for t in range(graph.num_tensors):
        size, maker, readers = float(graph.tensor_bytes[t]), t, [v for e, _, v in edges if e == t]
        kept = execution.in_flight == "pipeline" and not back[maker] and any(back[v] for v in readers)
        for s, r in enumerate(shares):
            sends, receives = model.add_binary_variable(), model.add_binary_variable()
            here = on[problem.unit[maker]][s]
            for there in (on[problem.unit[v]][s] for v in readers):
                model.add_linear_constraint(sends - here + there >= 0.0)
                model.add_linear_constraint(receives - there + here >= 0.0)
            load[back[maker] * drains][s].append(size * (sends + receives))
            if execution.memory == "live":
                in_all = step if drains else min(step if step > 1 else 99, sum(shares[s:]))
                held[s].append(size * (math.ceil(in_all / r) if kept else 1) * (here + receives))
    for s, r in enumerate(shares):
        for most, mine in zip(busiest, load, strict=True):
            model.add_linear_constraint(WHOLE * mathopt.fast_sum(mine[s]) <= r * most)
        model.add_linear_constraint(mathopt.fast_sum(held[s]) <= float(np.floor(problem.capacity[0])))
    model.minimize(mathopt.fast_sum(busiest))
    one_thread = 1 if solver == mathopt.SolverType.CP_SAT else None
    exactly = mathopt.SolveParameters(threads=one_thread, relative_gap_tolerance=1e-9)
    result = mathopt.solve(model, solver, params=exactly)
    if result.termination.reason == mathopt.TerminationReason.INFEASIBLE:
        return math.inf
    assert result.termination.reason == mathopt.TerminationReason.OPTIMAL
    return result.objective_value() / WHOLE


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_three_methods_have_one_optimum(seed, name):
    problem = medium(seed, name)
    found = plan(problem, "ideals", budget=Budget(seconds=60))
    assert found.gap < 2e-9
    every = range(1, EQUAL + 1)
    ways = [shares for k in every for shares in itertools.product(every, repeat=k) if sum(shares) <= EQUAL]
    if not problem.execution.replicate:
        ways = [shares for shares in ways if set(shares) == {1}]
    for solver in (mathopt.SolverType.HIGHS, mathopt.SolverType.CP_SAT):
        best = min(by_programme(problem, solver, shares) for shares in ways)
        assert best == pytest.approx(found.value, rel=1e-6), solver


@pytest.mark.parametrize(("seed", "slots"), [(0, 1), (1, 1), (2, 1), (1, 2), (1, 3)])
def test_slots_of_ten_ops_on_three_devices(seed, slots):
    """Every placement, HiGHS and CP-SAT. The programme may leave pieces apart that a device runs as one."""
    problem = in_slots(seed, slots)
    best = brute_force(problem)[0]
    for solver in ("highs", "cpsat"):
        found = plan(problem, "slot-milp", budget=Budget(evaluations=2_000), options={"solver": solver})
        assert found.lower_bound <= best * (1 + 1e-9), solver
        assert found.value >= best * (1 - 1e-12), solver
        if slots == 1:
            assert found.value == pytest.approx(best, rel=1e-5), solver
            assert found.gap < 1e-4


def in_slots(seed, slots):
    rng = np.random.default_rng(seed)
    edges = [(int(rng.integers(max(0, i - 3), i)), i) for i in range(1, 10)]
    edges += [(i, int(rng.integers(i + 1, 10))) for i in range(9) if rng.random() < 0.4]
    return problem_of(
        rng.integers(1, 20, (10, 1)) * np.array([1.0, 1.0, 2.0]), sorted(set(edges)),
        sizes=rng.integers(0, 6, 10).astype(float), resident=rng.integers(1, 5, 10).astype(float), memory=14.0,
        execution=Execution(concurrency="slots", slots=slots, memory="static"),
    )  # fmt: skip
