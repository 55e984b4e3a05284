from dataclasses import replace

import numpy as np
import pytest

from placewise.errors import InvalidInput
from placewise.graph import Graph, GraphBuilder


def diamond(**changes):
    """a -> (b, c) -> d: one tensor from a to both, two tensors into d."""
    given = {
        "op_names": ["a", "b", "c", "d"],
        "tensor_producer": [0, 1, 2],
        "tensor_bytes": [10, 20, 30],
        "edge_tensor": [0, 0, 1, 2],
        "edge_consumer": [1, 2, 3, 3],
    }
    return Graph.create(**{**given, **changes})


def test_sizes_and_views():
    graph = diamond()
    assert (graph.num_ops, graph.num_tensors, graph.num_edges) == (4, 3, 4)
    assert graph.edge_tensor.tolist() == [0, 0, 1, 2]
    assert graph.edge_producer.tolist() == [0, 0, 1, 2]
    assert graph.consumers.tolist() == [1, 2, 3, 3]
    assert graph.op_index("c") == 2
    assert graph.models == ("graph",)


def test_what_each_op_makes_and_reads():
    graph = diamond(tensor_producer=[3, 1, 2], edge_consumer=[1, 2, 0, 0])
    for (start, items), owner in (
        (graph.outputs, graph.tensor_producer),
        (graph.in_edges, graph.consumers),
        (graph.out_edges, graph.edge_producer),
    ):
        lists = [items[start[op] : start[op + 1]].tolist() for op in range(4)]
        assert lists == [np.flatnonzero(owner == op).tolist() for op in range(4)]


def test_derived_arrays_cannot_be_written():
    graph = diamond()
    views = (graph.edge_tensor, graph.edge_producer, graph.resident_bytes, graph.is_stored, graph.topological_order)
    for array in (*views, *graph.outputs, *graph.in_edges):
        assert not array.flags.writeable


def test_one_value_stands_for_all_ops():
    graph = diamond(flops=5, op_kinds="relu", group=3)
    assert graph.flops.tolist() == [5.0] * 4
    assert graph.op_kinds == ("relu",) * 4
    assert graph.group.tolist() == [3] * 4


def test_arrays_are_copies_that_cannot_be_written():
    flops = np.ones(4)
    graph = diamond(flops=flops)
    flops[0] = 7
    assert graph.flops[0] == 1
    with pytest.raises(ValueError, match="read-only"):
        graph.flops[0] = 2


def test_an_op_that_reads_a_tensor_twice_has_one_edge():
    graph = diamond(edge_tensor=[2, 0, 1, 0, 2], edge_consumer=[3, 2, 3, 1, 3])
    assert graph.digest == diamond().digest


def test_empty_graph():
    graph = Graph.create(op_names=[])
    assert (graph.num_ops, graph.num_tensors, graph.num_edges) == (0, 0, 0)
    assert graph.topological_order.tolist() == []
    assert graph.resident_bytes.tolist() == []


def test_topological_order_is_the_given_one_where_that_is_one():
    assert diamond().topological_order.tolist() == [0, 1, 2, 3]


def test_topological_order_of_a_shuffled_graph():
    graph = diamond(tensor_producer=[3, 1, 2], edge_consumer=[1, 2, 0, 0])
    order = graph.topological_order.tolist()
    assert sorted(order) == [0, 1, 2, 3]
    assert all(order.index(p) < order.index(c) for p, c in zip(graph.edge_producer, graph.consumers, strict=True))


def test_stored_ops_keep_their_outputs():
    graph = Graph.create(
        op_names=["w", "op"],
        op_kinds=["parameter", "matmul"],
        resident=[1, 2],
        tensor_producer=[0, 0, 1],
        tensor_bytes=[100, 50, 7],
        edge_tensor=[0],
        edge_consumer=[1],
    )
    assert graph.is_stored.tolist() == [True, False]
    assert graph.resident_bytes.tolist() == [151.0, 2.0]


def test_op_index_follows_a_change_of_names():
    graph = diamond()
    assert graph.op_index("a") == 0
    renamed = replace(graph, op_names=("z", "b", "c", "d"))
    assert renamed.op_index("z") == 0
    with pytest.raises(InvalidInput, match="'graph' has no op named 'a'"):
        renamed.op_index("a")


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"op_names": ["a", "b", "c", "e"]},
        {"op_kinds": "relu"},
        {"op_dtypes": "float16"},
        {"op_modules": "m"},
        {"op_signatures": "relu(float32[1]) -> float32[1]"},
        {"flops": [0, 0, 0, 1]},
        {"bytes_accessed": 1},
        {"scratch": 1},
        {"resident": 1},
        {"phase": [0, 0, 0, 1]},
        {"model": [0, 0, 0, 1], "models": ["graph", "two"]},
        {"group": [0, 0, -1, -1]},
        {"models": ["other"]},
        {"tensor_bytes": [10, 20, 31]},
        {"tensor_producer": [0, 1, 1]},
        {"edge_tensor": [0, 0, 1], "edge_consumer": [1, 2, 3]},
    ],
)
def test_every_field_counts_in_the_digest(change):
    assert diamond(**change).digest != diamond().digest


def test_equal_graphs_have_equal_digests():
    plain = diamond(flops=[0.0, 1.0, 2.0, 3.0])
    other = diamond(flops=np.array([-0.0, 1, 2, 3], np.float32), op_names=np.array(["a", "b", "c", "d"]), model=[0] * 4)
    assert plain.digest == other.digest


def test_the_digest_is_the_same_everywhere():
    graph = diamond(op_names=["a", "ä\n", "\u0378", '"'])  # U+0378 is unassigned: Python versions show it differently
    assert graph.digest == "a76a924700fc3c08db40daac09eb381f55deedb39df267975f1fa045ca9d791e"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op_names": ["a", "b", "a", "d"]}, "two ops are named 'a'"),
        ({"op_modules": ["", ".".join("m" * 101), "", ""]}, r"ops.module\[1\]: must have at most 100 parts"),
        ({"flops": [1, 2]}, r"^ops.flops: must have 4 entries, found 2$"),
        ({"flops": [1, -2, 3, 4]}, r"^ops.flops\[1\]: must be from 0 to 1e\+24, found -2.0$"),
        ({"scratch": [1, 2, np.nan, 4]}, r"^ops.scratch\[2\]: must be .*, found nan$"),
        ({"resident": np.inf}, r"^ops.resident\[0\]: must be .*, found inf$"),
        ({"bytes_accessed": "many"}, r"^ops.bytes_accessed: must be a list of numbers$"),
        ({"bytes_accessed": 10**500}, r"^ops.bytes_accessed: must be a list of numbers$"),
        ({"op_kinds": ["x"]}, "ops.kind: must have 4 entries, found 1"),
        ({"phase": [0, 1, 2, 3]}, r"ops.phase\[3\]: must be from 0 to 2, found 3 \(op 'd'\)"),
        ({"model": 1}, r"ops.model\[0\]: must be from 0 to 0, found 1 \(op 'a'\)"),
        ({"group": -2}, r"ops.group\[0\]: must be from -1 to .*, found -2 \(op 'a'\)"),
        ({"group": [0.5, 1, 1, 1]}, "ops.group: must be a list of whole numbers"),
        ({"group": 2**31}, "ops.group: must be a list of whole numbers"),
        ({"group": -(2**63)}, "ops.group: must be a list of whole numbers"),
        ({"group": 10**30}, "ops.group: must be a list of whole numbers"),
        ({"group": [[1], [2, 3], [4], [5]]}, "ops.group: must be a list of whole numbers"),
        ({"flops": [[1], [2], [3], [4]]}, "ops.flops: must be a list of numbers"),
        ({"flops": [[1], [2, 3], 4, 5]}, "ops.flops: must be a list of numbers"),
        ({"flops": ["1", "2", "3", "4"]}, "ops.flops: must be a list of numbers"),
        ({"flops": [0, 1e300, 0, 0]}, r"ops.flops\[1\]: must be from 0 to 1e\+24, found 1e\+300"),
        ({"group": [[1, 2, 3, 4]]}, "ops.group: must be a list of whole numbers"),
        ({"op_names": "abcd"}, "ops.name: must be a list of texts, found 'abcd'"),
        ({"op_names": 4}, "ops.name: must be a list of texts, found 4"),
        ({"op_names": ["a", "b", 3, "d"]}, r"ops.name\[2\]: must be text, found 3"),
        ({"op_names": ["a", "b\ud800", "c", "d"]}, r"ops.name\[1\]: 'b\\ud800' holds half a character"),
        ({"op_modules": ["", "", None, ""]}, r"ops.module\[2\]: must be text, found None"),
        ({"models": ["\udfff"]}, r"models\[0\]: .* holds half a character"),
        ({"name": 5}, "the graph's name: must be text, found 5"),
        ({"tensor_bytes": [1, 2]}, "tensors.bytes: must have 3 entries, found 2"),
        ({"tensor_bytes": [1, 2, -3]}, r"tensors.bytes\[2\]: must be .*, found -3.0"),
        ({"tensor_producer": [0, 1, 4]}, r"tensors.producer\[2\]: there is no op 4: there are 4 ops"),
        ({"tensor_producer": [0, -1, 2]}, r"tensors.producer\[1\]: there is no op -1"),
        ({"edge_tensor": [0, 0, 1, 3]}, r"edges.tensor\[3\]: there is no tensor 3: there are 3 tensors"),
        ({"edge_consumer": [1, 2, 3, -1]}, r"edges.consumer\[3\]: there is no op -1: there are 4 ops"),
        ({"edge_consumer": [1, 2, 3]}, "edges.consumer: must have 4 entries, found 3"),
        ({"op_kinds": ["op", "op", "op", "parameter"]}, "parameter 'd' cannot have inputs"),
        ({"edge_consumer": [0, 1, 2, 3]}, "has a cycle: a -> a"),
        (
            {"tensor_producer": [0, 1, 3], "edge_consumer": [1, 2, 3, 0]},
            "has a cycle: d -> a -> b -> d",
        ),
    ],
)
def test_what_is_wrong_is_said(change, message):
    with pytest.raises(InvalidInput, match=message):
        diamond(**change)


def test_a_long_cycle_is_found_fast_and_told_in_short():
    n = 50_000
    ring = {"tensor_producer": range(n), "edge_tensor": range(n), "edge_consumer": [*range(1, n), 0]}
    with pytest.raises(InvalidInput, match=r"cycle: .* -> \.\.\. -> ") as caught:
        Graph.create(op_names=[str(i) for i in range(n)], tensor_bytes=np.ones(n), **ring)
    assert len(str(caught.value)) < 120


def test_builder():
    build = GraphBuilder("net")
    (x,) = build.op("x", kind="input", outputs=[8])
    left, right = build.op("split", kind="split", inputs=[x], outputs=[4, 4], flops=2.0, op_dtypes="int8")
    build.op("add", kind="add", inputs=[left, right, left], phase=1, model=1)
    graph = build.graph()
    assert build.size(x) == 8.0
    assert graph.op_names == ("x", "split", "add")
    assert graph.op_kinds == ("input", "split", "add")
    assert graph.op_dtypes == ("float32", "int8", "float32")
    assert graph.flops.tolist() == [0.0, 2.0, 0.0]
    assert graph.phase.tolist() == [0, 0, 1]
    assert graph.models == ("net/0", "net/1")
    assert graph.tensor_producer.tolist() == [0, 1, 1]
    assert graph.consumers.tolist() == [1, 2, 2]


def test_builder_without_ops():
    graph = GraphBuilder("empty").graph()
    assert graph.num_ops == 0
    assert graph.models == ("empty",)


def test_builder_refuses_a_misspelt_column():
    with pytest.raises(InvalidInput, match=r"op 'x': 'flop' is not one of op_kinds, .*flops"):
        GraphBuilder("net").op("x", kind="op", flop=3.0)


def test_an_error_is_short_however_long_the_names():
    with pytest.raises(InvalidInput, match="two ops are named") as caught:
        Graph.create(op_names=["x" * 10**5] * 2, name="y" * 10**5)
    assert len(str(caught.value)) < 300
    with pytest.raises(InvalidInput, match=r"^ops\.name\[1\]: must have at most 100000 characters, found 1000000$"):
        Graph.create(op_names=["x", "y" * 10**6])
    with pytest.raises(InvalidInput, match=r"^the graph's name: must have at most 100000 characters"):
        Graph.create(op_names=["x"], name="y" * 10**6)


def test_builder_refuses_what_is_no_tensor():
    with pytest.raises(InvalidInput, match="op 'x': inputs must be tensors"):
        GraphBuilder("net").op("x", kind="op", inputs=[3])
    for column in ("inputs", "outputs"):
        with pytest.raises(InvalidInput, match=f"op 'x': {column} must be a list, found 3"):
            GraphBuilder("net").op("x", kind="op", **{column: 3})
    build = GraphBuilder("net")
    build.op("x", kind="op", outputs=["many"])
    with pytest.raises(InvalidInput, match=r"tensors.bytes: must be a list of numbers"):
        build.graph()
    build = GraphBuilder("net")
    build.op("x", kind="op", model=10**9)
    with pytest.raises(InvalidInput, match=r"ops.model\[0\]: must be from 0 to 0"):
        build.graph()
