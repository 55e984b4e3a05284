from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placewise.costs import Costs
from placewise.errors import InvalidInput
from placewise.graph import Graph, GraphBuilder
from placewise.simulator import simulate
from placewise.transforms import collapse_parameters, contract, subgraph, with_backward
from problems import random_graph, random_problem


def network(tied=False, groups=(-1, -1)):
    """x -> one (weights w1) -> two (weights w2, and w1 if tied) -> result."""
    build = GraphBuilder("net")
    (x,) = build.op("x", kind="input", outputs=[8])
    (w1,) = build.op("w1", kind="parameter", outputs=[100])
    (h,) = build.op("one", kind="matmul", inputs=[x, w1], outputs=[16], flops=5.0, scratch=3.0, group=groups[0])
    (w2,) = build.op("w2", kind="parameter", outputs=[200], resident=1.0)
    second = [h, w2, w1] if tied else [h, w2]
    build.op("two", kind="relu", inputs=second, outputs=[4], flops=7.0, scratch=2.0, group=groups[1])
    return build.graph()


def edges(graph):
    return {
        (graph.op_names[p], graph.op_names[c], graph.tensor_bytes[t])
        for p, c, t in zip(graph.edge_producer, graph.consumers, graph.edge_tensor, strict=True)
    }


# ---- contract ------------------------------------------------------------------------------------------------------


def test_contract_fuses_ops():
    fused = contract(network(), [0, 1, 2, 3, 2])
    graph = fused.graph
    assert graph.op_names == ("x", "w1", "one", "w2")
    assert graph.op_kinds == ("input", "parameter", "fused", "parameter")
    assert graph.flops.tolist() == [0.0, 0.0, 12.0, 0.0]
    assert graph.scratch.tolist() == [0.0, 0.0, 3.0, 0.0]
    assert edges(graph) == {("x", "one", 8), ("w1", "one", 100), ("w2", "one", 200)}
    assert sorted(graph.tensor_bytes) == [4, 8, 100, 200]  # the inner 16 bytes are gone, the result is not


def test_expand_reads_a_placement_for_the_larger_graph():
    fused = contract(network(), [0, 1, 2, 3, 2])
    assert fused.expand([5, 6, 7, 8]).tolist() == [5, 6, 7, 8, 7]


@pytest.mark.parametrize("seed", range(10))
def test_contracting_nothing_changes_nothing(seed):
    graph = random_graph(np.random.default_rng(seed), 12)
    assert contract(graph, np.arange(graph.num_ops)).graph.digest == graph.digest


def test_stored_ops_fuse_into_a_stored_op():
    graph = contract(network(tied=True), [0, 1, 2, 1, 3]).graph
    assert graph.op_names == ("x", "w1", "one", "two")
    assert graph.op_kinds == ("input", "parameter", "matmul", "relu")
    assert graph.resident_bytes.tolist() == [0.0, 301.0, 0.0, 0.0]
    assert edges(graph) == {
        ("x", "one", 8), ("w1", "one", 100), ("w1", "two", 100), ("w1", "two", 200), ("one", "two", 16),
    }  # fmt: skip


def test_colocation_groups_that_meet_become_one():
    graph = Graph.create(op_names=list("abcde"), group=[0, 0, 1, 1, 7])
    merged = contract(graph, [0, 1, 1, 2, 3]).graph.group.tolist()
    assert merged[0] == merged[1] == merged[2] != merged[3]
    assert min(merged) >= 0


def test_a_cyclic_quotient_is_an_error():
    chain = GraphBuilder("chain")
    (a,) = chain.op("a", kind="op", outputs=[1])
    (b,) = chain.op("b", kind="op", inputs=[a], outputs=[1])
    chain.op("c", kind="op", inputs=[b])
    with pytest.raises(InvalidInput, match=r"graph 'chain' has a cycle: (a -> b -> a|b -> a -> b)"):
        contract(chain.graph(), [0, 1, 0])


@pytest.mark.parametrize("label", [[0, 1, 3, 3, 3], [-1, 0, 0, 0, 0]])
def test_labels_have_no_gap(label):
    with pytest.raises(InvalidInput, match=r"0\.\.K-1"):
        contract(network(), label)


def test_labels_are_as_many_as_ops():
    with pytest.raises(InvalidInput, match="labels: must have 5 entries, found 2"):
        contract(network(), [0, 1])


def test_empty_graph():
    empty = Graph.create(op_names=[])
    assert contract(empty, []).graph.num_ops == 0
    assert collapse_parameters(empty).graph.num_ops == 0
    assert subgraph(empty, []).num_ops == 0
    assert with_backward(empty).num_ops == 0


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_contraction_conserves_work_and_residency(seed):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, int(rng.integers(1, 12)))
    position = np.empty(graph.num_ops, int)
    position[graph.topological_order] = np.arange(graph.num_ops)
    cuts = np.sort(rng.integers(0, graph.num_ops, 3))  # intervals of a topological order have an acyclic quotient
    label = np.unique(np.searchsorted(cuts, position), return_inverse=True)[1]
    for smaller in (contract(graph, label), collapse_parameters(graph)):
        per_op = np.bincount(smaller.label, graph.resident_bytes, smaller.graph.num_ops)
        np.testing.assert_array_equal(smaller.graph.resident_bytes, per_op)
        assert smaller.graph.flops.sum() == graph.flops.sum()
        assert smaller.graph.bytes_accessed.sum() == graph.bytes_accessed.sum()
        assert smaller.graph.scratch.max(initial=0) == graph.scratch.max(initial=0)
        assert set(smaller.graph.op_names) <= set(graph.op_names)


# ---- collapse_parameters -------------------------------------------------------------------------------------------


def test_parameters_collapse_into_their_consumers():
    collapsed = network().collapse_parameters()
    graph = collapsed.graph
    assert graph.op_names == ("x", "one", "two")
    assert graph.op_kinds == ("input", "matmul", "relu")
    assert graph.resident.tolist() == [0.0, 100.0, 201.0]
    assert edges(graph) == {("x", "one", 8), ("one", "two", 16)}
    assert collapsed.expand([0, 1, 2]).tolist() == [0, 1, 1, 2, 2]


def test_tied_weights_stay():
    graph = network(tied=True).collapse_parameters().graph
    assert graph.op_names == ("x", "w1", "one", "two")
    assert graph.is_stored.tolist() == [False, True, False, False]
    assert graph.resident_bytes.tolist() == [0.0, 100.0, 0.0, 201.0]
    assert edges(graph) == {("x", "one", 8), ("w1", "one", 100), ("w1", "two", 100), ("one", "two", 16)}


def test_weights_of_ops_that_share_a_device_collapse_and_nobody_waits():
    graph = network(tied=True, groups=(4, 4)).collapse_parameters().graph
    assert graph.op_names == ("x", "one", "two")
    assert graph.resident.tolist() == [0.0, 100.0, 201.0]
    assert edges(graph) == {("x", "one", 8), ("one", "two", 16)}
    assert graph.group[1] == graph.group[2] >= 0


def test_readers_that_share_a_device_may_come_in_any_order():
    # "late" reads what "early" makes, but has the lower number; w must not make early wait for late.
    graph = Graph.create(
        op_names=["w", "late", "early"],
        op_kinds=["parameter", "op", "op"],
        group=[-1, 0, 0],
        tensor_producer=[0, 2],
        tensor_bytes=[100, 5],
        edge_tensor=[0, 0, 1],
        edge_consumer=[1, 2, 1],
    )
    collapsed = graph.collapse_parameters().graph
    assert collapsed.op_names == ("late", "early")
    assert edges(collapsed) == {("early", "late", 5)}


@pytest.mark.parametrize("readers", ["ABB", "BAB", "BBA", "ABA"])
def test_outputs_of_one_parameter_with_different_readers_keep_it_in_place(readers):
    build = GraphBuilder("net")
    outputs = build.op("w", kind="state", outputs=[1, 2, 3])
    for name in "AB":
        build.op(name, kind="op", inputs=[t for t, reader in zip(outputs, readers, strict=True) if reader == name])
    assert build.graph().collapse_parameters().graph.op_names == ("w", "A", "B")


def test_outputs_of_one_parameter_with_one_reader_move():
    build = GraphBuilder("net")
    first, second, _unread = build.op("w", kind="state", outputs=[1, 2, 4])
    build.op("A", kind="op", inputs=[first, second])
    graph = build.graph().collapse_parameters().graph
    assert graph.op_names == ("A",)
    assert graph.resident.tolist() == [7.0]


def test_a_parameter_that_nobody_reads_stays():
    build = GraphBuilder("net")
    build.op("w", kind="parameter", outputs=[9])
    assert build.graph().collapse_parameters().graph.digest == build.graph().digest


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_collapsing_is_exactly_the_restriction_to_resident_where_used(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    graph = replace(problem.graph, scratch=np.where(problem.graph.is_stored, 0.0, problem.graph.scratch))
    problem = replace(problem, graph=graph)
    collapsed = graph.collapse_parameters()
    seconds = np.zeros((collapsed.graph.num_ops, problem.num_devices))
    np.add.at(seconds, collapsed.label, problem.seconds)
    smaller = replace(problem, graph=collapsed.graph, costs=Costs.create(seconds))

    placement = rng.integers(0, problem.num_devices, smaller.num_units)[smaller.unit]
    order = smaller.graph.topological_order
    kept = [graph.op_index(name) for name in smaller.graph.op_names]
    full_order = np.concatenate([np.setdiff1d(np.arange(graph.num_ops), kept), np.array(kept, int)[order]])
    small = simulate(smaller, placement, order)
    full = simulate(problem, collapsed.expand(placement), full_order.astype(np.int32))
    assert small.value == pytest.approx(full.value)
    assert small.peak == pytest.approx(full.peak)


# ---- subgraph ------------------------------------------------------------------------------------------------------


def test_subgraph():
    part = subgraph(network(), [False, True, True, False, True])
    assert part.op_names == ("w1", "one", "two")
    assert part.op_kinds == ("parameter", "matmul", "relu")
    assert part.flops.tolist() == [0.0, 5.0, 7.0]
    assert part.scratch.tolist() == [0.0, 3.0, 2.0]
    assert edges(part) == {("w1", "one", 100), ("one", "two", 16)}
    assert part.tensor_bytes.tolist() == [100, 16, 4]


def test_subgraph_of_everything_is_the_graph():
    graph = network(tied=True, groups=(3, -1))
    assert subgraph(graph, np.ones(graph.num_ops, bool)).digest == graph.digest


def test_what_does_not_fit_the_graph_is_said():
    with pytest.raises(InvalidInput, match="labels: must be a list of whole numbers"):
        contract(network(), [0.5] * 5)
    with pytest.raises(InvalidInput, match="with no gap"):
        contract(network(), [0, 1, 2, 3, 2**31 - 1])
    with pytest.raises(InvalidInput, match="keep: must be 5 flags"):
        subgraph(network(), [0, 2])
    with pytest.raises(InvalidInput, match="placement: must have 4 entries"):
        contract(network(), [0, 1, 2, 3, 2]).expand([0])


# ---- with_backward -------------------------------------------------------------------------------------------------


def test_backward_of_three_ops():
    build = GraphBuilder("net")
    (x,) = build.op("x", kind="input", outputs=[8])
    (w,) = build.op("w", kind="parameter", outputs=[100])
    build.op("y", kind="matmul", inputs=[x, w], outputs=[4], flops=5.0, bytes_accessed=112.0, scratch=3.0)
    graph = with_backward(build.graph(), optimizer_bytes_per_parameter_byte=3.0)

    assert graph.name == "net-training"
    assert graph.op_names == ("x", "w", "y", "x:backward", "w:update", "y:backward")
    assert graph.op_kinds == ("input", "parameter", "matmul", "input_backward", "update", "matmul_backward")
    assert graph.phase.tolist() == [0, 0, 0, 1, 2, 1]
    assert graph.group.tolist() == [0, 1, 2, 0, 1, 2]
    assert graph.flops.tolist() == [0, 0, 5, 0, 0, 10]
    assert graph.bytes_accessed.tolist() == [0, 0, 112, 0, 0, 224]
    assert graph.scratch.tolist() == [0, 0, 3, 0, 0, 3]
    assert graph.resident_bytes.tolist() == [0, 100, 0, 0, 300, 0]
    assert edges(graph) == {
        ("x", "y", 8),
        ("w", "y", 100),
        ("x", "y:backward", 8),  # the activation
        ("w", "y:backward", 100),  # the weight
        ("y", "y:backward", 4),  # the result, where the backward pass begins
        ("y:backward", "x:backward", 8),  # gradients
        ("y:backward", "w:update", 100),
    }


def test_backward_of_an_op_without_outputs_waits_for_it():
    build = GraphBuilder("net")
    (x,) = build.op("x", kind="input", outputs=[8])
    build.op("loss", kind="loss", inputs=[x])
    assert edges(with_backward(build.graph())) == {
        ("x", "loss", 8),
        ("x", "loss:backward", 8),
        ("loss", "loss:backward", 0),
        ("loss:backward", "x:backward", 8),
    }


def test_backward_keeps_colocation():
    groups = with_backward(network(groups=(7, 7))).group.reshape(2, -1)
    assert groups[0].tolist() == groups[1].tolist()
    assert groups[0, 2] == groups[0, 4] == 7
    assert len(set(groups[0].tolist())) == 4


def test_backward_of_a_training_graph_is_an_error():
    with pytest.raises(InvalidInput, match="already has ops that are not forward"):
        with_backward(with_backward(network()))
