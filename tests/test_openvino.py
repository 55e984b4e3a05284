"""OpenVINO IR as graphs: work and sizes counted by hand, compressed weights, dynamic shapes, fusion."""

import numpy as np
import pytest

ov = pytest.importorskip("openvino")
from openvino import opset13 as ops  # noqa: E402

from placewise import load_problem  # noqa: E402
from placewise.errors import InvalidInput, Unsupported  # noqa: E402
from placewise.importers import openvino as reader  # noqa: E402
from placewise.importers.assembly import kinds_without_formula  # noqa: E402
from problems import work  # noqa: E402


def x(*shape, name="x", dtype=np.float32):
    node = ops.parameter(list(shape), dtype, name=name)
    node.set_friendly_name(name)
    return node


def weight(*shape, name="w", dtype=np.float32):
    values = np.random.default_rng(0).normal(size=shape)  # equal constants would share their place in the file
    return ops.constant(values.astype(dtype), name=name)


def named(node, name):
    node.set_friendly_name(name)
    return node


@pytest.fixture
def save(tmp_path):
    def write(node, *inputs, compress=False):
        path = tmp_path / "m.xml"
        ov.save_model(ov.Model([node], list(inputs), "m"), path, compress_to_fp16=compress)
        return path

    return write


@pytest.fixture
def load(save):
    return lambda node, *inputs, **options: reader.load(save(node, *inputs), **options)


def kinds(graph):
    return [kind for kind in graph.op_kinds if kind not in ("input", "parameter")]


def conv(data, filters, grouped=False, **changes):
    given = {"strides": [1, 1], "pads_begin": [0, 0], "pads_end": [0, 0], "dilations": [1, 1]} | changes
    return (ops.group_convolution if grouped else ops.convolution)(data, filters, **given)


def test_a_convolution_by_hand(load):
    data = x(2, 3, 8, 8)
    made = named(conv(data, weight(5, 3, 3, 3), strides=[2, 2], pads_begin=[1, 1], pads_end=[1, 1]), "c")
    graph = load(named(ops.relu(made), "y"), data)
    assert work(graph) == {"c": ("conv", 160 * 2 * 27, 4 * (384 + 135 + 160)), "y": ("relu", 160, 4 * 320)}
    assert graph.op_signatures[graph.op_index("c")] == (
        'conv(float32[2,3,8,8], float32[5,3,3,3]; {"padding":[1,1],"stride":[2,2]}) -> float32[2,5,4,4]'
    )
    assert graph.resident_bytes.sum() == 4 * 135
    assert graph.op_names == ("x", "w", "c", "y")


def test_groups_divide_the_work_of_a_convolution(load):
    data = x(1, 8, 5, 5)
    graph = load(named(conv(data, weight(4, 2, 2, 3, 3), grouped=True), "c"), data)
    assert work(graph)["c"][:2] == ("conv", 8 * 9 * 2 * 18)
    assert 'float32[8,2,3,3]; {"groups":4}' in graph.op_signatures[graph.op_index("c")]


def test_transposed_convolutions_spread_each_input(load):
    data = x(1, 4, 5, 5)
    common = {"strides": [2, 2], "pads_begin": [0, 0], "pads_end": [0, 0], "dilations": [1, 1]}
    graph = load(ops.convolution_backprop_data(data, weight(4, 3, 2, 2), **common), data)
    assert [graph.flops.sum(), *kinds(graph)] == [2 * 100 * 12, "conv_transposed"]
    graph = load(ops.group_convolution_backprop_data(data, weight(2, 2, 3, 2, 2), **common), data)
    assert [graph.flops.sum(), *kinds(graph)] == [2 * 100 * 12, "conv_transposed"]


@pytest.mark.parametrize(("a", "b", "flags"), [
    ((4, 6), (6, 5), (False, False)), ((6, 4), (6, 5), (True, False)), ((4, 6), (5, 6), (False, True)),
])  # fmt: skip
def test_a_product_in_any_layout(load, a, b, flags):
    data = x(*a)
    graph = load(named(ops.matmul(data, weight(*b), *flags), "y"), data)
    assert work(graph) == {"y": ("matmul", 2 * 20 * 6, 4 * (24 + 30 + 20))}


def test_attention(load):
    q, k, v = x(2, 3, 4, 8, name="q"), x(2, 3, 6, 8, name="k"), x(2, 3, 6, 8, name="v")
    graph = load(named(ops.scaled_dot_product_attention(q, k, v), "y"), q, k, v)
    assert work(graph)["y"][:2] == ("attention", 2 * 3 * 4 * 6 * (2 * 16 + 5))


def test_an_lstm(load):
    data = x(2, 7, 5)
    state = [weight(2, 2, 8, name=name) for name in ("h", "c")]
    weights = [weight(2, 32, 5, name="wx"), weight(2, 32, 8, name="wh"), weight(2, 32, name="b")]
    lengths = ops.constant(np.array([7, 7], np.int32))
    made = ops.lstm_sequence(data, *state, lengths, *weights, 8, "bidirectional")
    graph = load(named(ops.relu(made.output(0)), "y"), data)
    assert kinds(graph) == ["lstm", "relu"]
    # both ways, 7 steps, 2 samples: 4 gates of 8, each 5 + 8 products, and 8 to apply a gate
    assert graph.flops.sum() == 2 * 14 * 32 * (2 * 13 + 8) + 2 * 14 * 8


@pytest.mark.parametrize(
    ("does", "extra"),
    [
        (lambda data: ops.gelu(data, "erf"), ""),
        (lambda data: ops.gelu(data, "tanh"), '; {"approximate":"tanh"}'),
        (ops.acos, '; {"of":"Acos"}'),
    ],
)
def test_what_takes_another_time_has_another_signature(load, does, extra):
    data = x(2, 3)
    signature = load(named(does(data), "y"), data).op_signatures[-1]
    assert signature.partition("(")[2] == f"float32[2,3]{extra}) -> float32[2,3]"


def test_pools_look_at_windows(load):
    data = x(1, 3, 8, 8)
    pooled = ops.max_pool(data, [2, 2], [1, 1], [0, 0], [0, 0], [2, 2])
    graph = load(ops.reduce_mean(pooled.output(0), ops.constant(np.array([2, 3]))), data)
    assert kinds(graph) == ["max_pool", "reduce"]
    assert graph.flops.sum() == 48 * 4 + 48
    assert graph.num_tensors == 3  # nobody reads the indices, so they are not made


def test_views_and_shape_arithmetic_are_no_ops(load):
    data = x(2, 3, 4)
    batch = ops.gather(ops.shape_of(data), ops.constant([0]), ops.constant(0))
    target = ops.concat([batch, ops.constant(np.array([-1], np.int64))], 0)
    flat = ops.transpose(ops.reshape(data, target, False), ops.constant([1, 0]))
    graph = load(named(ops.relu(flat), "y"), data)
    assert graph.op_names == ("x", "y")
    assert graph.op_signatures[1] == "relu(float32[12,2]) -> float32[12,2]"


def test_compressed_weights_are_read_as_they_are_stored(save):
    data = x(2, 4)
    path = save(named(ops.matmul(data, weight(3, 4), False, True), "y"), data, compress=True)
    assert 'type="Convert"' in path.read_text()
    graph = reader.load(path)
    assert work(graph) == {"y": ("matmul", 2 * 6 * 4, 4 * 8 + 2 * 12 + 4 * 6)}


def test_whole_numbers_as_weights_keep_their_scales(load):
    data = x(2, 8)
    packed = ops.convert(weight(3, 2, 4, name="packed", dtype=np.int8), "f32")
    scaled = ops.multiply(packed, weight(3, 2, 1, name="scale"))
    full = ops.reshape(scaled, ops.constant(np.array([3, 8])), False)
    graph = load(named(ops.matmul(data, full, False, True), "y"), data)
    assert kinds(graph) == ["matmul"]
    assert graph.resident_bytes.sum() == 24 + 4 * 6
    assert work(graph)["y"][2] == 4 * 16 + (24 + 4 * 6) + 4 * 6


def test_a_table_of_weights_is_an_embedding(load):
    data = x(5, dtype=np.int64)
    graph = load(named(ops.gather(weight(100, 8), data, ops.constant(0)), "y"), data)
    assert work(graph) == {"y": ("embedding", 0, 2 * 5 * 8 * 4 + 5 * 8)}


def test_a_large_weight_that_is_used_twice_is_one(load):
    data = x(2, 200)
    shared = [weight(200, 200, name=name) for name in ("one", "two")]  # equal, so at one place in the file
    graph = load(ops.add(ops.matmul(data, shared[0], False, False), ops.matmul(data, shared[1], False, False)), data)
    assert graph.resident_bytes.sum() == 4 * 200 * 200


def test_what_is_kept_between_runs_is_state(tmp_path):
    data = x(2, 4)
    variable_info = ov.op.util.VariableInfo()
    variable_info.data_shape, variable_info.data_type = ov.PartialShape([2, 4]), ov.Type.f32
    variable_info.variable_id = "cache"
    variable = ov.op.util.Variable(variable_info)
    kept = ops.read_value(ops.constant(np.zeros((2, 4), np.float32)), variable)
    total = named(ops.add(kept, data), "sum")
    assign = ops.assign(total, variable)
    path = tmp_path / "m.xml"
    ov.save_model(ov.Model([total.output(0)], [assign], [data], "m"), path, compress_to_fp16=False)
    graph = reader.load(path)
    assert sorted(graph.op_kinds) == ["add", "input", "state"]
    assert graph.resident_bytes.sum() == 32


def test_a_loop_is_one_op_that_holds_the_weights_of_its_body(tmp_path):
    port = '<port id="{}" precision="FP32"><dim>4</dim></port>'.format
    body = (
        '<body><layers><layer id="0" name="inner" type="Const"><data offset="0" size="16"/>'
        f"<output>{port(0)}</output></layer></layers>"
        '<edges><edge from-layer="0" from-port="0" to-layer="9" to-port="0"/></edges></body>'
    )
    path = tmp_path / "m.xml"
    path.write_text(
        f'<net name="m" version="11"><layers><layer id="0" name="x" type="Parameter"><output>{port(0)}</output></layer>'
        f'<layer id="1" name="loop" type="Loop"><input>{port(0)}</input><output>{port(1)}</output>{body}</layer>'
        '</layers><edges><edge from-layer="0" from-port="0" to-layer="1" to-port="0"/></edges></net>'
    )
    graph = reader.load(path)
    assert graph.op_names == ("x", "inner", "loop")
    assert kinds_without_formula(graph) == {"openvino.Loop": 1}
    assert graph.bytes_accessed[2] == 3 * 16


def test_a_product_in_a_loop_is_an_error(load):
    step, data = x(1, 4, name="step"), x(5, 4)
    body = ov.Model([named(ops.matmul(step, weight(4, 4), False, False), "inner")], [step], "body")
    loop = ops.tensor_iterator()
    loop.set_body(body)
    loop.set_sliced_input(step, data.output(0), 0, 1, 1, -1, 0)
    out = loop.get_concatenated_slices(body.get_results()[0].output(0), 0, 1, 1, -1, 0)
    with pytest.raises(Unsupported, match=r"TensorIterator.*MatMul 'inner'"):
        load(named(ops.relu(out), "y"), data)


def test_what_is_not_known_is_costed_by_its_bytes(load):
    data = x(1, 4, 4, 4)
    graph = load(named(ops.reorg_yolo(data, [2]), "y"), data)
    assert kinds_without_formula(graph) == {"openvino.ReorgYolo": 1}
    assert work(graph)["y"] == ("openvino.ReorgYolo", 0, 4 * 128)


def test_a_dimension_without_a_value_is_asked_for(save):
    data = x(-1, 4)
    path = save(named(ops.relu(ops.matmul(data, weight(4, 5), False, False)), "y"), data)
    with pytest.raises(InvalidInput, match=r"m\.xml: the size of x\.0 is not fixed.*dims=.'x\.0': 1"):
        reader.load(path)
    assert reader.load(path, dims={"x.0": 3}).flops.sum() == 2 * 15 * 4 + 15
    with pytest.raises(InvalidInput, match=r"no input has a dimension 'z\.0'"):
        reader.load(path, dims={"x.0": 3, "z.0": 3})
    for bad in (0, -1, True, 2.0, "3"):
        with pytest.raises(InvalidInput, match=r"'x\.0' must be a whole number above zero"):
            reader.load(path, dims={"x.0": bad})


def test_weights_are_not_needed_unless_openvino_is_asked(save):
    data = x(1, 4)
    path = save(ops.matmul(data, weight(4, 5), False, False), data)
    before = reader.load(path).digest
    path.with_suffix(".bin").unlink()
    assert reader.load(path).digest == before
    with pytest.raises(InvalidInput, match=r"m\.xml: its weights are missing"):
        reader.load(path, fuse=True)


def test_ops_that_run_as_one_kernel_share_a_group(save):
    data = x(1, 16, 32, 32)
    first = named(conv(data, weight(16, 16, 3, 3)), "conv")
    path = save(named(ops.softmax(named(ops.relu(first), "relu"), 1), "softmax"), data)
    graph = reader.load(path, fuse=True)
    found = dict(zip(graph.op_names, graph.group.tolist(), strict=True))
    assert found["conv"] == found["relu"] >= 0 > found["softmax"] == found["x"]
    assert (reader.load(path).group == -1).all()


def test_names_say_which_module():
    assert reader._module("__module.layer1.0.conv1/aten::_convolution/Convolution") == "layer1.0.conv1"
    assert reader._module("self.fc.weight") == "fc"
    assert reader._module("Multiply_3010") == reader._module("aten::relu/Relu") == ""


def test_a_file_is_a_model_of_a_problem(save):
    data = x(2, 4)
    problem = load_problem(save(named(ops.matmul(data, weight(4, 5), False, False), "y"), data), "two-gpus-one-host")
    assert problem.graph.op_names == ("x", "y")
    assert problem.graph.resident.tolist() == [0, 80]


def test_layers_in_any_order_are_read(save):
    data = x(2, 4)
    path = save(named(ops.relu(named(ops.exp(data), "e")), "y"), data)
    head, *layers = path.read_text().partition("</layers>")[0].split("<layer ")
    tail = path.read_text().partition("</layers>")[2]
    path.write_text("<layer ".join([head, *reversed(layers)]) + "</layers>" + tail)
    assert reader.load(path).op_names == ("x", "e", "y")


def test_a_network_from_torch(tmp_path):
    torch = pytest.importorskip("torch")
    from placewise.importers.torch_export import from_torch

    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.ReLU(), torch.nn.Flatten(),
                              torch.nn.Linear(512, 10)).eval()  # fmt: skip
    images = torch.zeros(2, 3, 10, 10)
    path = tmp_path / "net.xml"
    ov.save_model(ov.convert_model(net, example_input=images, input=[2, 3, 10, 10]), path, compress_to_fp16=False)
    graph, direct = reader.load(path), from_torch(net, (images,))
    assert graph.flops.sum() == direct.flops.sum() == 1024 * (2 * 27 + 1) + 20 * (2 * 512 + 1)
    assert graph.resident_bytes.sum() == direct.resident_bytes.sum() == 4 * (216 + 5130)
    assert graph.op_modules[graph.op_kinds.index("conv")] == "0"
    assert len({g.op_signatures[g.op_kinds.index("conv")] for g in (graph, direct)}) == 1


def test_a_missing_extra_is_told_in_one_line(save, monkeypatch):
    from placewise import importers
    from placewise.errors import Unsupported

    data = x(2, 4)
    path = save(ops.relu(data), data)

    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importers, "import_module", missing)
    assert reader.load(path).num_ops == 2  # which needs none
    with pytest.raises(Unsupported, match=r"openvino is not installed: pip install 'placewise\[openvino\]'"):
        reader.load(path, fuse=True)
