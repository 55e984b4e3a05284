"""What policies see of a graph: numbers that can be counted by hand, and that depend on no name."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from placewise.learned import features, grouping
from problems import problem_of

FEATURES = (
    "kinds",
    "families",
    "degrees",
    "neighbours",
    "adjacency",
    "position",
    "shapes",
    "costs",
    "fractal_dimension",
)


def groups_of(count, edges, **options):
    """Each op a group."""
    return grouping.units(problem_of(np.ones((count, 2)), edges, **options))


def slope(*within):
    """Of log(nodes within r hops) on log(r), as numpy fits it."""
    radii = np.arange(1, len(within) + 1)
    return np.polyfit(np.log(radii), np.log(within), 1)[0]


def test_the_fractal_dimension_of_a_path():
    found = features.fractal_dimension(groups_of(5, [(0, 1), (1, 2), (2, 3), (3, 4)]))[:, 0]
    # From an end 2, 3, 4, 5 nodes are within 1, 2, 3, 4 hops; against the edges' direction too.
    assert found == pytest.approx([slope(2, 3, 4, 5), slope(3, 4, 5), slope(3, 5), slope(3, 4, 5), slope(2, 3, 4, 5)])


def test_the_fractal_dimension_of_a_star():
    found = features.fractal_dimension(groups_of(6, [(0, leaf) for leaf in range(1, 6)]))[:, 0]
    assert found[0] == 0.0  # one radius is no slope
    assert found[1:] == pytest.approx([math.log2(6 / 2)] * 5)


def test_the_fractal_dimension_of_a_grid():
    edges = [(3 * i + j, 3 * i + j + step) for i in range(3) for j in range(3) for step in (1, 3)
             if (step == 1 and j < 2) or (step == 3 and i < 2)]  # fmt: skip
    found = features.fractal_dimension(groups_of(9, edges))[:, 0]
    corner, side, centre = slope(3, 6, 8, 9), slope(4, 7, 9), slope(5, 9)
    assert found == pytest.approx([corner, side, corner, side, centre, side, corner, side, corner])


def test_parts_of_a_graph_do_not_see_each_other():
    found = features.fractal_dimension(groups_of(5, [(0, 1), (1, 2), (3, 4)]))[:, 0]
    by_op = found[groups_of(5, [(0, 1), (1, 2), (3, 4)]).label]
    assert by_op == pytest.approx([slope(2, 3), 0.0, slope(2, 3), 0.0, 0.0])


def test_degrees_and_positions_by_hand():
    groups = groups_of(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    degrees = features.degrees(groups, most=1)  # one-hot [reads 0, 1 or more; is read by 0, 1 or more]
    assert degrees.tolist() == [[1, 0, 0, 1], [0, 1, 0, 1], [0, 1, 0, 1], [0, 1, 1, 0]]
    position = features.position(groups, width=4)
    angle = 2 / np.array([1.0, 1000**0.5])
    assert position[2] == pytest.approx(
        [math.sin(angle[0]), math.cos(angle[0]), math.sin(angle[1]), math.cos(angle[1])]
    )


def test_kinds_are_shares_of_a_group():
    groups = groups_of(4, [(0, 1), (1, 2), (2, 3)], op_kinds=["relu", "conv", "relu", "add"], group=[0, 0, 0, -1])
    # Columns: add, conv, relu.
    assert features.kinds(groups) == pytest.approx(np.array([[0, 1 / 3, 2 / 3], [1, 0, 0]]))


def test_shapes_are_those_of_the_largest_output():
    signatures = ["conv(float32[1,3,8,8]) -> float32[1,16,4,4]", "relu(float32[2]) -> float32[2]"]
    groups = groups_of(2, [(0, 1)], op_signatures=signatures, sizes=[1024.0, 8.0], group=[0, 0])
    assert features.shapes(groups) == pytest.approx(np.array([[0, 0.4, 0.2, 0.2, math.log2(1025) / 30]]))


def test_standardised_columns_have_mean_zero_and_spread_one():
    found = features.standardised(np.array([[1.0, 5.0, 0.1], [3.0, 5.0, 0.1], [2.0, 5.0, 0.1]]))
    assert found[:, 0] == pytest.approx([-(1.5**0.5), 1.5**0.5, 0.0])
    assert found[:, 1:] == pytest.approx(np.zeros((3, 2)))  # what all have in common tells nothing


def sample_groups():
    edges = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (2, 5), (4, 5)]
    kinds = ["input", "conv", "conv", "add", "relu", "matmul"]
    return groups_of(6, edges, op_kinds=kinds, sizes=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def everything(groups):
    return {name: getattr(features, name)(groups).tolist() for name in FEATURES}


def test_names_do_not_enter():
    groups = sample_groups()
    problem = groups.problem
    renamed = replace(problem, graph=replace(problem.graph, op_names=tuple("zyxwvu")))
    assert everything(grouping.units(renamed)) == everything(groups)


def test_the_hash_seed_does_not_enter():
    here = Path(__file__).parent
    code = "import json, test_features as t; print(json.dumps(t.everything(t.sample_groups())))"
    paths = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONHASHSEED": "54321", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == everything(sample_groups())


@pytest.mark.parametrize(("count", "edges"), [(1, []), (3, []), (2, [(0, 1)])])
def test_small_graphs_have_finite_features(count, edges):
    for name, table in everything(groups_of(count, edges)).items():
        assert np.isfinite(table).all(), name
        assert len(table) == count, name
