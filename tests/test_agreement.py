"""Graphs of medium size, where brute force ends: dynamic programming, HiGHS and CP-SAT come to the same optimum."""

from __future__ import annotations

import numpy as np
import pytest
from ortools.math_opt.python import mathopt

from placewise import plan
from placewise.driver import Budget
from placewise.problem import Execution
from problems import problem_of


def medium(seed, *, training):
    """20 nodes with branches on three equal devices; in training, each has a backward op on the same device."""
    rng, n = np.random.default_rng(seed), 20 if not training else 12
    edges = [(int(rng.integers(max(0, i - 4), i)), i) for i in range(1, n)]
    edges += [(i, int(rng.integers(i + 1, min(n, i + 5)))) for i in range(n - 1) if rng.random() < 0.4]
    seconds, phase, group = rng.integers(1, 20, n), [0] * n, list(range(n))
    if training:
        edges += [(n + b, n + a) for a, b in edges] + [(n - 1, 2 * n - 1)]
        seconds, phase, group = np.append(seconds, rng.integers(1, 40, n)), [0] * n + [1] * n, group * 2
    return problem_of(
        np.repeat(seconds[:, None], 3, axis=1).astype(float), sorted(set(edges)), phase=phase, group=group,
        sizes=rng.integers(0, 6, len(seconds)).astype(float), resident=rng.integers(0, 5, len(seconds)).astype(float),
        memory=1.2 * rng.integers(4, 5) * len(seconds) / 3, objective="throughput", contiguous=True,
        execution=Execution(contention="none", overlap=False, staged=True, memory="static"),
    )  # fmt: skip


def by_programme(problem, solver):
    """The least load of the busiest of equal devices whose numbers forward data only raises, as a programme."""
    graph, stages = problem.graph, range(problem.num_devices)
    model = mathopt.Model()
    busiest = model.add_integer_variable(lb=0.0, ub=1e4)
    on = [[model.add_binary_variable() for _ in stages] for _ in range(problem.num_units)]
    load = [[] for _ in stages]
    for row in on:
        model.add_linear_constraint(mathopt.fast_sum(row) == 1.0)
    for op, unit in enumerate(problem.unit.tolist()):
        for s in stages:
            load[s].append(float(problem.seconds[op, 0]) * on[unit][s])
    number = [mathopt.fast_sum([s * row[s] for s in stages]) for row in on]
    edges = list(zip(graph.edge_tensor.tolist(), graph.edge_producer.tolist(), graph.consumers.tolist(), strict=True))
    for _, u, v in edges:
        if not graph.phase[u] and not graph.phase[v]:
            model.add_linear_constraint(number[problem.unit[v]] - number[problem.unit[u]] >= 0.0)
    for t in range(graph.num_tensors):
        for s in stages:
            crosses = model.add_binary_variable()  # sent from here, or received
            for _, u, v in [edge for edge in edges if edge[0] == t]:
                here, there = on[problem.unit[u]][s], on[problem.unit[v]][s]
                model.add_linear_constraint(crosses - here + there >= 0.0)
                model.add_linear_constraint(crosses - there + here >= 0.0)
            load[s].append(float(graph.tensor_bytes[t]) * crosses)
    size = problem.per_unit(graph.resident_bytes)
    for s in stages:
        model.add_linear_constraint(mathopt.fast_sum(load[s]) <= busiest)
        held = [float(size[u]) * on[u][s] for u in range(problem.num_units)]
        model.add_linear_constraint(mathopt.fast_sum(held) <= float(np.floor(problem.capacity[0])))
    model.minimize(busiest)
    one_thread = mathopt.SolveParameters(threads=1) if solver == mathopt.SolverType.CP_SAT else None
    result = mathopt.solve(model, solver, params=one_thread)
    assert result.termination.reason == mathopt.TerminationReason.OPTIMAL
    return result.objective_value()


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("seed", range(8))
def test_three_methods_have_one_optimum(seed, training):
    problem = medium(seed, training=training)
    found = plan(problem, "ideals", budget=Budget(seconds=60))
    assert found.gap < 2e-9
    for solver in (mathopt.SolverType.HIGHS, mathopt.SolverType.CP_SAT):
        assert by_programme(problem, solver) == pytest.approx(found.value, rel=1e-6), solver
