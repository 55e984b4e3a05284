"""Counts of layers: the best is found where it is known, whatever stands in the way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oracles import brute_force
from placewise.driver import Budget, plan
from placewise.errors import Unsupported
from placewise.simulator.bounds import lower_bound
from problems import layers, problem_of


def found(problem, **budget):
    return plan(problem, "offload", budget=Budget(**(budget or {"evaluations": 3000})))


@pytest.mark.parametrize(
    ("room", "weight", "cpu"), [(16.0, 8.0, 3.0), (16.0, 2.0, 3.0), (20.0, 8.0, 12.0), (9.0, 3.0, 5.0)]
)
def test_few_layers_are_placed_as_well_as_can_be(room, weight, cpu):
    problem = layers(4, room=room, weight=weight, cpu=cpu)
    assert found(problem).value == pytest.approx(brute_force(problem)[0])


def test_streams_are_hidden_behind_slow_layers():
    """25 of 60 layers fit; computing the others slowly takes 35 * 6 + 25 * 0.1. A copy takes 8, a slow layer 6."""
    problem = layers(60, room=200.0, weight=8.0, gpu=0.1, cpu=6.0)
    best = found(problem)
    assert (best.placement[60:] != best.placement[:60]).sum() > 5
    assert lower_bound(problem).value <= best.value < 0.8 * 212.5


def test_layers_that_pins_tear_apart_stay_so():
    problem = replace(layers(4, room=100.0), pins={"op0": "d1", "op4": "d0", "op5": "d1"})
    best = found(problem)
    assert [best.devices[op] for op in ("op0", "op4", "op5")] == ["d1", "d0", "d1"]
    assert best.value == pytest.approx(brute_force(problem)[0])


def test_what_reads_no_weights_goes_with_the_layer_before_it():
    """op1 and op2 read weights; op3, after them, and op4, before op1, do not. Copies are dear."""
    problem = problem_of(
        np.array([[0.0, 0.0], [1.0, 9.0], [1.0, 9.0], [1.0, 1.0], [1.0, 1.0]]),
        [(4, 1), (0, 1), (0, 2), (1, 2), (2, 3)],
        sizes=50.0,
        op_kinds=["parameter", "op", "op", "op", "op"],
    )
    assert found(problem, evaluations=50).value == pytest.approx(4.0)


def test_it_says_where_it_does_not_apply():
    with pytest.raises(Unsupported, match="weights that are placed by themselves"):
        found(problem_of(np.ones((2, 2)), [(0, 1)]))
