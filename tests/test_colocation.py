import math
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from placewise import Costs, GraphBuilder, Problem
from placewise.cluster import Device, full_mesh
from placewise.colocation import colocate_backward
from problems import random_problem


def training_step(seconds=None, **constraints):
    """Two layers and their backward ops, of which nothing but modules and edges tells whose they are."""
    build = GraphBuilder("step")
    first = build.op("first", kind="op", op_modules="a", outputs=[1.0])
    second = build.op("second", kind="op", op_modules="b", inputs=first, outputs=[1.0])
    grad = build.op("second.grad", kind="op", op_modules="b", inputs=[*second, *first], outputs=[1.0], phase=1)
    build.op("first.grad", kind="op", op_modules="a", inputs=[*grad, *first], outputs=[1.0], phase=1)
    seconds = np.ones((4, 2)) if seconds is None else np.array(seconds)
    return Problem(build.graph(), full_mesh([Device("x"), Device("y")], 1.0), Costs.create(seconds), **constraints)


def test_a_backward_op_is_with_its_forward_op():
    together = colocate_backward(training_step())
    assert together.unit.tolist() == [0, 1, 1, 0]
    assert together.graph.num_ops == 4


def test_what_may_not_be_together_stays_apart():
    together = colocate_backward(training_step([[1, math.inf], [1, 1], [1, 1], [math.inf, 1]]))
    assert together.unit.tolist() == [0, 1, 1, 2]
    pinned = colocate_backward(training_step(pins={"second": "x", "second.grad": "y"}))
    assert pinned.unit.tolist() == [0, 1, 2, 0]


def test_nothing_changes_without_backward_ops():
    problem = training_step()
    forward = replace(problem, graph=replace(problem.graph, phase=np.zeros_like(problem.graph.phase)))
    assert colocate_backward(forward) is forward


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_units_only_grow_and_may_run_somewhere(seed):
    problem = random_problem(np.random.default_rng(seed), max_ops=20, constrained=True)
    together = colocate_backward(problem)
    for unit in range(problem.num_units):
        assert len(set(together.unit[problem.unit == unit])) == 1
    assert together.unit_allowed.any(axis=1).all()
    again = colocate_backward(together)
    assert again.num_units <= together.num_units
