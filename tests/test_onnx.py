"""ONNX models as graphs: work and sizes counted by hand, names and modules, placements in files."""

import os
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from placewise import (  # noqa: E402
    cli,
    files,
    load_problem,
    measure,
)
from placewise.errors import InvalidInput, Unsupported  # noqa: E402
from placewise.importers import onnx as reader  # noqa: E402
from placewise.importers.assembly import kinds_without_formula  # noqa: E402
from problems import work  # noqa: E402

F32, I64 = TensorProto.FLOAT, TensorProto.INT64
OTHERS = (("com.microsoft", 1), ("mine", 1))


def tensor(name, *shape, dtype=F32):
    return numpy_helper.from_array(np.zeros(shape, helper.tensor_dtype_to_np_dtype(dtype)), name)


def ints(name, *values):
    return numpy_helper.from_array(np.array(values, np.int64), name)


def model(nodes, inputs, outputs=(("y", None),), stored=(), opset=21, **options):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, F32, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, F32, shape) for name, shape in outputs],
        list(stored),
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in (("", opset), *OTHERS)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, **options)


@pytest.fixture
def load(tmp_path):
    def read(*args, dims=None, **options):
        path = tmp_path / "m.onnx"
        onnx.save(model(*args, **options), path)
        return reader.load(path, dims=dims)

    return read


def node(op, inputs, outputs="y", **attributes):
    outputs = outputs.split()
    return helper.make_node(op, inputs.split(" "), outputs, name=attributes.pop("name", outputs[0]), **attributes)


def test_a_convolution_by_hand(load):
    graph = load(
        [node("Conv", "x w b", "c", strides=[2, 2], pads=[1, 1, 1, 1]), node("Relu", "c")],
        {"x": (2, 3, 8, 8)},
        stored=[tensor("w", 5, 3, 3, 3), tensor("b", 5)],
    )
    # 2 x 5 x 4 x 4 outputs, each 27 multiplications and additions and a bias
    assert work(graph) == {
        "c": ("conv", 160 * (2 * 27 + 1), 4 * (384 + 135 + 5 + 160)),
        "y": ("relu", 160, 4 * 320),
    }
    signature = graph.op_signatures[graph.op_index("c")]
    assert signature.endswith('{"padding":[1,1],"stride":[2,2]}) -> float32[2,5,4,4]')
    assert graph.resident_bytes.sum() == 4 * (135 + 5)
    assert [graph.op_names[i] for i in np.flatnonzero(graph.is_stored)] == ["w", "b"]


def test_groups_divide_the_work_of_a_convolution(load):
    graph = load([node("Conv", "x w", group=4)], {"x": (1, 8, 5, 5)}, stored=[tensor("w", 8, 2, 3, 3)])
    assert work(graph)["y"][1] == 8 * 9 * 2 * 18


def test_a_transposed_convolution_spreads_each_input(load):
    graph = load([node("ConvTranspose", "x w", strides=[2])], {"x": (1, 4, 5)}, stored=[tensor("w", 4, 3, 2)])
    assert work(graph)["y"][:2] == ("conv_transposed", 2 * 20 * 3 * 2)


@pytest.mark.parametrize(("a", "b", "flags"), [
    ((4, 6), (6, 5), {}), ((6, 4), (6, 5), {"transA": 1}), ((4, 6), (5, 6), {"transB": 1}),
])  # fmt: skip
def test_a_product_and_its_bias(load, a, b, flags):
    graph = load([node("Gemm", "x w b", **flags)], {"x": a}, stored=[tensor("w", *b), tensor("b", 5)])
    assert work(graph) == {"y": ("matmul", 20 * (2 * 6 + 1), 4 * (24 + 30 + 5 + 20))}


def test_a_batch_of_products(load):
    graph = load([node("MatMul", "a b")], {"a": (3, 4, 6), "b": (3, 6, 5)})
    assert work(graph)["y"][:2] == ("matmul", 2 * 60 * 6)


def test_einsum_of_two_is_a_product(load):
    graph = load([node("Einsum", "a b", equation="bij,bkj->bik")], {"a": (2, 3, 4), "b": (2, 5, 4)})
    assert work(graph)["y"][:2] == ("matmul", 2 * 30 * 4)
    graph = load([node("Einsum", "a b", equation="ij,jk")], {"a": (2, 3), "b": (3, 5)})
    assert work(graph)["y"][:2] == ("matmul", 2 * 10 * 3)


def test_an_lstm(load):
    graph = load(
        [node("LSTM", "x w r b", hidden_size=8, direction="bidirectional")],
        {"x": (7, 2, 5)},
        stored=[tensor("w", 2, 32, 5), tensor("r", 2, 32, 8), tensor("b", 2, 64)],
    )
    # both ways, 7 steps, 2 samples: 4 gates of 8, each 5 + 8 products, and 8 to apply a gate
    assert work(graph)["y"][:2] == ("lstm", 2 * 14 * 32 * (2 * 13 + 8))


def test_attention_in_either_layout(load):
    heads = {"num_heads": 3, "domain": "com.microsoft"}
    three = load([node("MultiHeadAttention", "q k v", **heads)], {"q": (2, 4, 24), "k": (2, 6, 24), "v": (2, 6, 24)})
    assert work(three)["y"][:2] == ("attention", 2 * 3 * 4 * 6 * (2 * 16 + 5))
    shapes = {"q": (2, 3, 4, 8), "k": (2, 3, 6, 8), "v": (2, 3, 6, 8)}
    four = load([node("Attention", "q k v")], shapes, opset=23)
    assert work(four)["y"] == work(three)["y"]


def test_attention_counts_keys_from_a_cache(load):
    shapes = {"q": (1, 2, 1, 8), "k": (1, 2, 1, 8), "v": (1, 2, 1, 8), "old_k": (1, 2, 9, 8), "old_v": (1, 2, 9, 8)}
    graph = load([node("Attention", "q k v  old_k old_v", "y new_k new_v")], shapes, opset=23)
    assert work(graph)["y"][:2] == ("attention", 2 * 10 * (2 * 16 + 5))


def test_attention_with_its_weights_is_two_kernels_of_one_place(load):
    graph = load(
        [node("Attention", "x w b", num_heads=2, domain="com.microsoft", name="att")],
        {"x": (1, 4, 6)},
        stored=[tensor("w", 6, 24), tensor("b", 24)],
    )
    found = work(graph)
    assert found["att/qkv"][:2] == ("matmul", 4 * 24 * (2 * 6 + 1))
    assert found["att"][:2] == ("attention", 2 * 4 * 4 * (2 * 8 + 5))
    assert graph.group[graph.op_index("att")] == graph.group[graph.op_index("att/qkv")] >= 0


def test_attention_with_its_weights_looks_at_the_past_and_has_widths_of_its_own(load):
    options = {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 4], "domain": "com.microsoft", "name": "att"}
    graph = load(
        [node("Attention", "x w b  past", "y present", **options)],
        {"x": (1, 4, 6), "past": (2, 1, 2, 3, 4)},
        stored=[tensor("w", 6, 20), tensor("b", 20)],
    )
    found = work(graph)
    assert found["att/qkv"][:2] == ("matmul", 4 * 20 * (2 * 6 + 1))
    # 2 heads and 4 queries of width 4, 3 + 4 keys, values of width 2
    assert found["att"][:2] == ("attention", 2 * 4 * 7 * (2 * (4 + 2) + 5))
    assert graph.op_signatures[graph.op_index("att")].endswith("float32[1,4,4], float32[2,1,2,7,4]")


@pytest.mark.parametrize(("opset", "extra"), [(12, '; {"axis":1,"flattened":true}'), (13, "")])
def test_softmax_had_another_axis_once(load, opset, extra):
    graph = load([node("Softmax", "x")], {"x": (2, 3, 4)}, opset=opset)
    assert graph.op_signatures[graph.op_index("y")] == f"softmax(float32[2,3,4]{extra}) -> float32[2,3,4]"


def test_pools_look_at_windows(load):
    graph = load(
        [node("MaxPool", "x", "m", kernel_shape=[2, 2], strides=[2, 2]), node("GlobalAveragePool", "m")],
        {"x": (1, 3, 8, 8)},
    )
    assert {name: found[:2] for name, found in work(graph).items()} == {
        "m": ("max_pool", 48 * 4),
        "y": ("avg_pool", 3 * 16),
    }


def test_contrib_ops_have_shapes_and_work(load):
    nodes = [
        node("FusedConv", "x w", "c", activation="Relu", domain="com.microsoft"),
        node("Reshape", "c shape", "r"),
        node("SkipLayerNormalization", "r r g", "n", domain="com.microsoft"),
        node("FusedMatMul", "n n", "f", transB=1, domain="com.microsoft"),
        node("FastGelu", "f", domain="com.microsoft"),
    ]
    stored = [tensor("w", 6, 3, 1, 1), ints("shape", 1, 4, 6), tensor("g", 6)]
    found = work(load(nodes, {"x": (1, 3, 2, 2)}, stored=stored))
    assert {name: what[:2] for name, what in found.items()} == {
        "c": ("conv", 24 * 6),
        "n": ("layer_norm", 24 * 8),
        "f": ("matmul", 16 * 12),
        "y": ("gelu", 16 * 8),
    }


@pytest.mark.parametrize(
    ("made", "extra"),
    [
        (node("Gelu", "x"), ""),
        (node("Gelu", "x", approximate="tanh"), '; {"approximate":"tanh"}'),
        (node("Tan", "x"), '; {"of":"Tan"}'),
        (node("Sin", "x"), ""),
    ],
)
def test_what_takes_another_time_has_another_signature(load, made, extra):
    signature = load([made], {"x": (2, 3)}).op_signatures[-1]
    assert signature.partition("(")[2] == f"float32[2,3]{extra}) -> float32[2,3]"


def test_views_and_shape_arithmetic_are_no_ops(load):
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "batch"),
        node("Unsqueeze", "batch zero1", "batch1"),
        node("Concat", "batch1 rest", "target", axis=0),
        node("Reshape", "x target", "flat"),
        node("Transpose", "flat", "turned", perm=[1, 0]),
        node("Relu", "turned"),
    ]
    stored = [helper.make_tensor("zero", I64, (), [0]), ints("zero1", 0), ints("rest", -1)]
    graph = load(nodes, {"x": (2, 3, 4)}, stored=stored)
    assert graph.op_names == ("x", "y")
    assert graph.op_signatures[1] == "relu(float32[12,2]) -> float32[12,2]"


def test_shape_arithmetic_that_onnx_does_not_follow_is_computed(load):
    nodes = [  # how PyTorch's older exporter writes x.expand(-1, 3, -1)
        node("ConstantOfShape", "three", "ones", value=ints("one", 1)),
        node("Mul", "ones minus", "negative"),
        node("Equal", "wanted negative", "kept"),
        node("Where", "kept ones wanted", "target"),
        node("Expand", "x target", "wide"),
        node("Relu", "wide"),
    ]
    stored = [ints("three", 3), helper.make_tensor("minus", I64, (), [-1]), ints("wanted", -1, 3, -1)]
    graph = load(nodes, {"x": ("batch", 1, 4)}, stored=stored, dims={"batch": 2})
    assert work(graph) == {"wide": ("view", 0, 0), "y": ("relu", 24, 4 * 48)}


def test_a_slice_is_a_view_and_a_table_of_weights_an_embedding(tmp_path):
    nodes = [node("Slice", "ids zero two", "part"), node("Gather", "table part")]
    made = model(nodes, {}, stored=[ints("zero", 0), ints("two", 2), tensor("table", 100, 8)])
    made.graph.input.append(helper.make_tensor_value_info("ids", I64, (5,)))
    onnx.save(made, tmp_path / "e.onnx")
    found = work(reader.load(tmp_path / "e.onnx"))
    assert found == {"part": ("view", 0, 0), "y": ("embedding", 0, 2 * 2 * 8 * 4 + 16)}


def test_weights_are_turned_and_cast_once_before_any_run(load):
    nodes = [node("Cast", "w", "w32", to=F32), node("Transpose", "w32", "wt", perm=[1, 0]), node("MatMul", "x wt")]
    graph = load(nodes, {"x": (2, 4)}, stored=[tensor("w", 3, 4, dtype=TensorProto.FLOAT16)])
    assert work(graph) == {"y": ("matmul", 2 * 6 * 4, 4 * 8 + 2 * 12 + 4 * 6)}  # read as they are stored


def test_a_single_number_is_no_parameter_but_a_vector_is(load):
    nodes = [node("Mul", "x scale", "m"), node("Add", "m shift")]
    graph = load(nodes, {"x": (2, 4)}, stored=[tensor("scale"), tensor("shift", 1)])
    assert [name for name, kind in zip(graph.op_names, graph.op_kinds, strict=True) if kind == "parameter"] == ["shift"]


def test_a_branch_is_one_op_that_reads_what_its_graphs_read(load):
    branches = {
        key: helper.make_graph(
            [node("Add", "x bias", key)], key, [], [helper.make_tensor_value_info(key, F32, (2,))], [tensor("bias", 2)]
        )
        for key in ("then_branch", "else_branch")
    }
    branches["else_branch"].node[0].input[1] = "outer"
    made = [node("ReduceMax", "x", "top", keepdims=0), node("Cast", "top", "c", to=TensorProto.BOOL)]
    graph = load([*made, node("If", "c", **branches)], {"x": (2,)}, stored=[tensor("outer", 2)])
    assert graph.op_kinds[graph.op_index("y")] == "onnx.If"
    assert kinds_without_formula(graph) == {"onnx.If": 1}
    reads = {graph.op_names[p] for p, c in zip(graph.edge_producer, graph.consumers, strict=True)
             if graph.op_names[c] == "y"}  # fmt: skip
    assert reads == {"c", "x", "bias", "bias:1", "outer"}


@pytest.mark.parametrize("kind", ["If", "Loop"])
def test_a_product_in_a_branch_or_a_loop_is_an_error(load, kind):
    made = [helper.make_tensor_value_info("h", F32, (2, 2))]
    if kind == "If":
        branch = helper.make_graph([node("MatMul", "x x", "h", name="inner")], "b", [], made)
        nodes = [
            node("ReduceMax", "x", "top", keepdims=0),
            node("Cast", "top", "c", to=TensorProto.BOOL),
            node("If", "c", then_branch=branch, else_branch=branch),
        ]
    else:
        given = [
            helper.make_tensor_value_info("i", I64, ()),
            helper.make_tensor_value_info("go", TensorProto.BOOL, ()),
            helper.make_tensor_value_info("old", F32, (2, 2)),
        ]
        going = helper.make_tensor_value_info("go", TensorProto.BOOL, ())
        body = helper.make_graph([node("MatMul", "old x", "h", name="inner")], "b", given, [going, *made])
        nodes = [node("Loop", "times  x", body=body)]
    with pytest.raises(Unsupported, match=rf"node y \({kind}\).*MatMul 'inner'"):
        load(nodes, {"x": (2, 2)}, [("y", (2, 2))], stored=[ints("times", 3)])


def test_functions_are_inlined(tmp_path):
    inner = helper.make_function(
        "mine", "Twice", ["a"], ["b"], [node("Add", "a a", "b")], [helper.make_opsetid("", 21)]
    )
    made = model([node("Twice", "x", domain="mine")], {"x": (4,)}, functions=[inner])
    onnx.save(made, tmp_path / "f.onnx")
    graph = reader.load(tmp_path / "f.onnx")
    assert graph.op_kinds == ("input", "add")
    assert graph.flops.sum() == 4


def test_an_unknown_op_is_costed_by_its_bytes_where_its_shape_is_given(tmp_path):
    made = model([node("Odd", "x", domain="mine")], {"x": (4,)})
    path = tmp_path / "odd.onnx"
    onnx.save(made, path)
    with pytest.raises(InvalidInput, match=r"odd.onnx: node y \(Odd\): the shape of 'y' depends on data"):
        reader.load(path)
    made.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", F32, (3,)))
    onnx.save(made, path)
    graph = reader.load(path)
    assert kinds_without_formula(graph) == {"onnx.mine.Odd": 1}
    assert graph.bytes_accessed.tolist() == [0, 28]


def test_a_dimension_without_a_value_is_asked_for(load):
    nodes = [node("MatMul", "x w")]
    with pytest.raises(InvalidInput, match=r"m.onnx: the size of batch, x.1 is not fixed.*dims=.'batch': 1, 'x.1': 1"):
        load(nodes, {"x": ("batch", None)}, stored=[tensor("w", 4, 5)])
    graph = load(nodes, {"x": ("batch", None)}, stored=[tensor("w", 4, 5)], dims={"batch": 3, "x.1": 4})
    assert work(graph)["y"][1] == 2 * 15 * 4
    with pytest.raises(InvalidInput, match="no dimension 'butch': it has batch"):
        load(nodes, {"x": ("batch", 4)}, stored=[tensor("w", 4, 5)], dims={"batch": 3, "butch": 3})
    for bad in (0, -1, True, 2.0, "3"):
        with pytest.raises(InvalidInput, match="'batch' must be a whole number above zero"):
            load(nodes, {"x": ("batch", 4)}, stored=[tensor("w", 4, 5)], dims={"batch": bad})


def test_a_size_that_depends_on_data_may_be_given(load):
    nodes = [node("NonZero", "x", "at"), node("Cast", "at", to=F32)]
    with pytest.raises(InvalidInput, match="the shape of 'at' depends on data"):
        load(nodes, {"x": (4, 5)})
    assert work(load(nodes, {"x": (4, 5)}, dims={"at.1": 6}))["y"] == ("cast", 0, 2 * 6 * (8 + 4))


def test_names_of_scopes_are_modules():
    def module(name):
        return reader._module(helper.make_node("Conv", ["x"], ["y"]), name)

    assert module("/layer1/layer1.0/conv1/Conv") == "layer1.0.conv1"
    assert module("/encoder/layer/layer.11/attention/self/query/MatMul") == "encoder.layer.11.attention.self.query"
    assert module("/Add") == module("Conv_3") == ""


def test_external_data_is_not_needed(tmp_path):
    made = model([node("MatMul", "x w")], {"x": (2, 400)}, stored=[tensor("w", 400, 500)])
    path = tmp_path / "big.onnx"
    onnx.save(made, path, save_as_external_data=True, location="big.data", size_threshold=0)
    os.unlink(tmp_path / "big.data")
    graph = reader.load(path)
    assert graph.resident_bytes.sum() == 400 * 500 * 4
    assert graph.name == "big"


def test_a_file_is_a_model_of_a_problem(tmp_path):
    onnx.save(model([node("MatMul", "x w")], {"x": (2, 4)}, stored=[tensor("w", 4, 5)]), tmp_path / "m.onnx")
    problem = load_problem(tmp_path / "m.onnx", "two-gpus-one-host")
    assert problem.graph.op_names == ("x", "y")
    assert problem.graph.resident.tolist() == [0, 80]


def test_a_placement_survives_in_the_file(tmp_path):
    path, placed = tmp_path / "m.onnx", tmp_path / "placed.onnx"
    onnx.save(
        model([node("Relu", "x", "a"), node("Relu", "a", "b"), node("Relu", "b")], {"x": (4,)}, [("y", (4,))]), path
    )
    placement = {"a": ("cuda:0", 0), "b": ("cpu", None), "y": ("cuda:1", 1)}
    assert reader.read_placement(path) == {}
    reader.write_placement(path, placed, ["cpu", "cuda:0", "cuda:1"], placement)
    assert reader.read_placement(placed) == placement
    onnx.checker.check_model(str(placed))
    written = onnx.load(placed)
    assert [(c.name, c.num_devices, list(c.device)) for c in written.configuration] == [
        ("placewise", 3, ["cpu", "cuda:0", "cuda:1"])
    ]
    assert written.ir_version == 11
    reader.write_placement(placed, placed, ["cpu"], {"b": ("cpu", None)})
    assert reader.read_placement(placed) == {"b": ("cpu", None)}
    assert reader.load(placed).digest == reader.load(path, "placed").digest


def test_a_placed_model_still_runs(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    path = tmp_path / "m.onnx"
    weight = numpy_helper.from_array(np.arange(8, dtype=np.float32).reshape(4, 2), "w")
    onnx.save(model([node("MatMul", "x w")], {"x": (1, 4)}, stored=[weight]), path)
    reader.write_placement(path, path, ["cpu"], {"y": ("cpu", 0)})
    (found,) = runtime.InferenceSession(path).run(None, {"x": np.ones((1, 4), np.float32)})
    assert found.tolist() == [[12, 16]]


def test_a_placement_must_fit_the_model(tmp_path):
    path = tmp_path / "m.onnx"
    made = model([node("MatMul", "x w")], {"x": (2, 4)}, [("y", (2, 5))], [tensor("w", 4, 5)])
    onnx.save(made, path, save_as_external_data=True, location="m.data", size_threshold=0)
    before = (tmp_path / "m.data").read_bytes()
    with pytest.raises(InvalidInput, match=r"m\.onnx: has no node named 'z'"):
        reader.write_placement(path, path, ["cpu"], {"z": ("cpu", 0)})
    with pytest.raises(InvalidInput, match="node y: 'gpu' is not one of the devices cpu"):
        reader.write_placement(path, path, ["cpu"], {"y": ("gpu", 0)})
    with pytest.raises(InvalidInput, match="a stage must be a whole number or None, found -1"):
        reader.write_placement(path, path, ["cpu"], {"y": ("cpu", -1)})
    (tmp_path / "other").mkdir()
    with pytest.raises(InvalidInput, match="external data"):
        reader.write_placement(path, tmp_path / "other" / "m.onnx", ["cpu"], {"y": ("cpu", 0)})
    reader.write_placement(path, tmp_path / "placed.onnx", ["cpu"], {"y": ("cpu", 0)})
    onnx.checker.check_model(str(tmp_path / "placed.onnx"))
    assert (tmp_path / "m.data").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.data", "m.onnx", "other", "placed.onnx"]


def test_a_network_from_torch(tmp_path):
    torch = pytest.importorskip("torch")
    from placewise.importers.torch_export import from_torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8))
            self.head = torch.nn.Linear(8, 10)

        def forward(self, x):
            return self.head(self.body(x).relu().mean((2, 3)))

    net, x = Net().eval(), torch.zeros(2, 3, 10, 10)
    path = Path(tmp_path, "net.onnx")
    torch.onnx.export(net, (x,), path, dynamo=True, optimize=False, verbose=False)
    graph, direct = reader.load(path), from_torch(net, (x,))
    assert graph.flops.sum() == direct.flops.sum() == 1024 * (2 * 27 + 4 + 1 + 1) + 20 * 17
    assert graph.resident_bytes.sum() == direct.resident_bytes.sum() == 4 * (216 + 4 * 8 + 90)
    assert graph.op_modules[graph.op_kinds.index("conv")] == "body.0"
    conv = {g.op_signatures[g.op_kinds.index("conv")] for g in (graph, direct)}
    assert len(conv) == 1  # one measurement serves both


def saved(tmp_path, *args, **options) -> str:
    onnx.save(model(*args, **options), tmp_path / "m.onnx")
    return str(tmp_path / "m.onnx")


def test_the_command_line_gives_the_sizes_of_dimensions(tmp_path):
    path = saved(tmp_path, [node("MatMul", "x w")], {"x": ("batch", None)}, stored=[tensor("w", 4, 5)])
    out = tmp_path / "g.json.gz"
    cli.import_model(path, out, dim=["batch=3", "x.1=4"])
    assert files.load_graph(out).flops.sum() == 2 * 15 * 4
    with pytest.raises(InvalidInput, match=r"or `--dim batch=1` of the commands import and profile"):
        cli.import_model(path, out)


@pytest.mark.parametrize(
    ("device", "dims"), [("onnxruntime", {"batch": 3, "x.1": 4}), ("openvino:CPU", {"x.0": 3, "x.1": 4})]
)
def test_a_file_is_measured_in_the_sizes_that_are_given(tmp_path, device, dims):
    pytest.importorskip(device.partition(":")[0])
    path = saved(tmp_path, [node("MatMul", "x w")], {"x": ("batch", None)}, stored=[tensor("w", 4, 5)])
    with measure.opened(path, device, dims) as target:
        found = measure.profile(target, folder=tmp_path / "profiles")
    assert [time.flops for time in found.ops.values() if time.kind == "matmul"] == [2 * 15 * 4]
    assert found.models["m"].seconds > 0


def test_what_a_runtime_refuses_is_told(tmp_path):
    pytest.importorskip("onnxruntime")
    path = saved(tmp_path, [node("Odd", "x", domain="mine")], {"x": (2,)}, outputs=[("y", (2,))])
    with measure.opened(path, "onnxruntime") as target, pytest.raises(Unsupported, match="ONNX Runtime cannot load it"):
        measure.profile(target, folder=tmp_path / "profiles")
