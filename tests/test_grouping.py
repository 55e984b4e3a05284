"""Groups of ops: the rules on graphs that can be written down, and what they keep on any graph."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from placewise import load_problem
from placewise.learned import grouping
from placewise.simulator import evaluate
from placewise.transforms import with_backward
from problems import problem_of, random_problem
from test_memory import fitting_placements, tight_problem

DIAMOND = [(0, 1), (0, 2), (1, 3), (2, 3)]
CHAIN = [(0, 1), (1, 2), (2, 3)]


def labels(rule, count, edges, devices=2, **options):
    return rule(problem_of(np.ones((count, devices)), edges, **options)).label.tolist()


def test_chains_merge_only_children_with_only_parents():
    assert labels(grouping.chains, 4, CHAIN) == [0, 0, 0, 0]
    assert labels(grouping.chains, 4, DIAMOND) == [0, 1, 2, 3]
    # A fork whose branches are two ops long each: a branch is a chain.
    assert labels(grouping.chains, 5, [(0, 1), (1, 2), (0, 3), (3, 4)]) == [0, 1, 1, 2, 2]


def test_coplacing_merges_what_one_other_reads():
    assert labels(grouping.coplace, 4, CHAIN) == [0, 0, 0, 0]
    assert labels(grouping.coplace, 4, DIAMOND) == [0, 1, 1, 1]  # both branches go with the join
    assert labels(grouping.coplace, 4, [(0, 1), (0, 2), (0, 3)]) == [0, 1, 2, 3]


def test_groups_are_numbered_along_the_program():
    assert labels(grouping.units, 4, [(3, 2), (2, 1), (1, 0)]) == [3, 2, 1, 0]


def test_what_must_share_a_device_is_a_group_and_what_cannot_is_none():
    assert labels(grouping.units, 4, CHAIN, group=[0, -1, 0, -1]) == [0, 1, 0, 2]
    apart = {"op1": "d0", "op2": "d1"}
    assert labels(grouping.chains, 4, CHAIN, pins=apart) == [0, 0, 1, 1]


def test_a_parameter_that_is_pinned_elsewhere_stays_by_itself():
    kinds, pins = ["parameter", "op", "op"], {"op0": "d1", "op1": "d0"}
    groups = grouping.units(problem_of(np.ones((3, 2)), [(0, 1), (1, 2)], op_kinds=kinds, pins=pins))
    assert groups.label.tolist() == [2, 0, 1]
    assert groups.allowed.tolist() == [[True, False], [True, True], [False, True]]


def test_a_group_leaves_memory_to_deal_out():
    # 10 bytes each on devices of 80: a group holds at most a quarter, two ops.
    assert labels(grouping.chains, 4, CHAIN, resident=10.0, memory=80.0) == [0, 0, 1, 1]


def test_what_would_fill_a_group_is_not_attached():
    kinds, edges = ["parameter", "op", "parameter", "parameter"], [(0, 1), (2, 1), (3, 1)]
    resident = [6.0, 0.0, 3.0, 4.0]  # and a byte of output each
    of = {memory: labels(grouping.units, 4, edges, op_kinds=kinds, resident=resident, memory=memory)
          for memory in (64.0, 63.0, 35.0, 15.0)}  # fmt: skip
    # A quarter of a device has room for all, for the two least, for the least, or for none.
    assert of == {64.0: [0, 0, 0, 0], 63.0: [1, 0, 0, 0], 35.0: [1, 0, 0, 2], 15.0: [1, 0, 2, 3]}


def test_tight_memory_leaves_plans_to_be_found():
    found = []
    for seed in range(50):
        problem = tight_problem(np.random.default_rng(seed), most=2000)
        groups = grouping.units(problem)
        if fitting_placements(problem):
            rows = np.array(list(itertools.product(range(problem.num_devices), repeat=groups.count)))
            found.append(evaluate(problem, groups.expand(rows)).feasible.any())
    assert (sum(found), len(found)) == (25, 29)  # 20, if whatever belongs together were put together


def test_parameters_go_with_their_first_reader():
    kinds = ["parameter", "op", "op", "parameter"]
    assert labels(grouping.units, 4, [(0, 1), (1, 2), (3, 2), (0, 2)], op_kinds=kinds) == [0, 0, 1, 1]


def test_backward_ops_go_with_forward_ops():
    forward = load_problem("alexnet", "two-gpus-one-host")
    graph = with_backward(forward.graph)
    training = replace(forward, graph=graph, costs=None)
    groups, alone = grouping.units(training), grouping.units(forward)
    assert training.num_ops > 1.5 * forward.num_ops
    assert groups.count == alone.count  # nothing but the forward graph is left to decide
    is_forward = (graph.phase == 0) & ~graph.is_stored
    assert set(groups.label[is_forward]) == set(range(groups.count))
    # Each backward op shares its group with a forward op of its own module.
    for op in np.flatnonzero(graph.phase == 1):
        modules = {graph.op_modules[i] for i in np.flatnonzero(is_forward & (groups.label == groups.label[op]))}
        assert graph.op_modules[op] in modules, graph.op_names[op]


def test_expanding_gives_each_op_the_device_of_its_group():
    groups = grouping.chains(problem_of(np.ones((5, 3)), [(0, 1), (1, 2), (0, 3), (3, 4)]))
    assert groups.expand([2, 0, 1]).tolist() == [2, 0, 0, 1, 1]
    assert groups.expand([[2, 0, 1], [0, 0, 2]]).tolist() == [[2, 0, 0, 1, 1], [0, 0, 0, 2, 2]]
    assert groups.expand([0, 0, 0]).dtype == np.int32


def test_sums_and_edges_of_groups_by_hand():
    problem = problem_of(
        [[1.0, 2.0], [3.0, math.inf], [5.0, 6.0], [7.0, 8.0]], DIAMOND, sizes=[4.0, 5.0, 6.0, 7.0],
        resident=[1.0, 2.0, 3.0, 4.0], group=[-1, 0, 0, -1],
    )  # fmt: skip
    groups = grouping.units(problem)
    assert groups.label.tolist() == [0, 1, 1, 2]
    assert groups.seconds.tolist() == [[1.0, 2.0], [8.0, math.inf], [7.0, 8.0]]
    assert groups.allowed.tolist() == [[True, True], [True, False], [True, True]]
    assert groups.resident.tolist() == [1.0, 5.0, 4.0]
    assert groups.sent.tolist() == [4.0, 11.0, 0.0]
    source, target, size = groups.edges
    assert (source.tolist(), target.tolist()) == ([0, 1], [1, 2])
    assert size.tolist() == [4.0, 11.0]  # op0's tensor crosses once for both readers
    assert groups.reachable.tolist() == [[False, True, True], [False, False, True], [False, False, False]]


def test_at_most_merges_along_the_heaviest_edge_that_closes_no_cycle():
    # Bytes of ops 0 to 3: 1, 9, 1, 1: op 1 and op 3 become one; op 0 with op 3 would close a cycle by way of op 2.
    groups = grouping.units(problem_of(np.ones((4, 2)), DIAMOND, sizes=[1.0, 9.0, 1.0, 1.0]))
    assert grouping.at_most(groups, 3).label.tolist() == [0, 1, 2, 1]
    assert grouping.at_most(groups, 4) is groups
    assert grouping.at_most(groups, 1).count == 1


@settings(max_examples=150, deadline=None)
@example(2830, 1, True)  # torn from what it was attached to, and still another's root
@given(st.integers(0, 10**6), st.integers(1, 12), st.booleans())
def test_merging_keeps_what_must_be_kept(seed, most, constrained):
    problem = random_problem(np.random.default_rng(seed), max_ops=20, max_devices=3, constrained=constrained)
    start = grouping.units(problem)
    merged = grouping.at_most(start, most)
    # Groups of before stay together, so units do too; ops may run where all of their group may.
    for before in range(start.count):
        assert len(set(merged.label[start.label == before])) == 1
    assert all(len(set(merged.label[problem.unit == unit])) == 1 for unit in range(problem.num_units))
    assert merged.allowed.any(axis=1).all()
    # What was merged holds a quarter of the smallest device at most.
    usable = problem.capacity[problem.allowed.any(axis=0)] if problem.num_ops else problem.capacity
    grown = [g for g in range(merged.count) if len(set(start.label[merged.label == g])) > 1]
    assert (merged.resident[grown] <= usable.min(initial=math.inf) / 4).all()
    if is_acyclic(start):
        assert is_acyclic(merged)
    if not constrained and np.isinf(problem.capacity).all() and start.allowed.all() and is_acyclic(start):
        assert merged.count <= most


def is_acyclic(groups):
    return not groups.reachable.diagonal().any()


@pytest.mark.parametrize("rule", [grouping.units, grouping.coplace, grouping.chains])
def test_a_graph_without_edges_stays_as_it_is(rule):
    assert labels(rule, 3, []) == [0, 1, 2]
    assert labels(rule, 1, []) == [0]
