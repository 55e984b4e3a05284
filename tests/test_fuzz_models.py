"""Model files that are damaged or hostile: one clear error that names the file; no crash, no hang, nothing opened."""

import random
import re
import time
from functools import partial

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from placewise import Graph  # noqa: E402
from placewise.errors import InvalidInput, PlacewiseError  # noqa: E402
from placewise.importers import onnx as onnx_reader  # noqa: E402
from placewise.importers import onnx_model  # noqa: E402
from placewise.importers import openvino as ir_reader  # noqa: E402

HUGE = 2**62


def node(op, inputs, outputs="y", **attributes):
    return helper.make_node(op, inputs.split(" "), outputs.split(), name=outputs, **attributes)


def ints(name, *values):
    return numpy_helper.from_array(np.array(values, np.int64), name)


def scalar(name, value):
    return helper.make_tensor(name, TensorProto.INT64, (), [value])


def floats(name, *shape):
    return numpy_helper.from_array(np.ones(shape, np.float32), name)


def model(nodes, inputs, stored=(), functions=()):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)],
        list(stored),
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("mine", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions))


def outcome(load, path, seconds=30.0):
    """The graph, or the error, which must be one of ours and begin with the name of the file."""
    began = time.monotonic()
    try:
        found = load(path)
    except PlacewiseError as error:
        found = error
    assert time.monotonic() - began < seconds
    assert isinstance(found, (Graph, dict)) or str(found).startswith(f"{path}: ")
    assert len(str(found)) < 1000
    return found


@pytest.fixture
def read_onnx(tmp_path):
    def read(content, **options):
        path = tmp_path / "m.onnx"
        path.write_bytes(content if isinstance(content, bytes) else content.SerializeToString())
        return outcome(onnx_reader.load, path, **options)

    return read


@pytest.fixture
def read_ir(tmp_path):
    def read(content):
        path = tmp_path / "m.xml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return outcome(ir_reader.load, path)

    return read


# ---- damaged ---------------------------------------------------------------------------------------------------------


def sound_onnx():
    nodes = [
        node("Conv", "x w b", "c", pads=[1, 1, 1, 1]),
        node("Shape", "c", "s"),
        node("Gather", "s zero", "n"),
        node("Unsqueeze", "n first", "n1"),
        node("Concat", "n1 rest", "t", axis=0),
        node("Reshape", "c t", "f"),
        node("Gemm", "f v", "g", transB=1),
        node("LSTM", "l lw lr", "o", hidden_size=4),
        node("Slice", "g first two", "q"),
        node("Softmax", "q"),
    ]
    stored = [floats("w", 2, 1, 3, 3), floats("b", 2), scalar("zero", 0), ints("first", 0), ints("two", 2),
              ints("rest", -1), floats("v", 5, 32), floats("lw", 1, 16, 5), floats("lr", 1, 16, 4)]  # fmt: skip
    return model(nodes, {"x": (2, 1, 4, 4), "l": (3, 1, 5)}, stored).SerializeToString()


def test_bits_of_an_onnx_file_may_flip(read_onnx):
    raw = sound_onnx()
    assert isinstance(read_onnx(raw), Graph)
    ones = np.float32(1).tobytes() * 3  # within weights, whose values do not matter
    places = [i for i in range(len(raw)) if ones not in raw[max(0, i - 12) : i + 12]]
    refused = 0
    for seed in range(200):
        rng = random.Random(seed)
        flipped = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            flipped[rng.choice(places)] ^= 1 << rng.randrange(8)
        refused += isinstance(read_onnx(bytes(flipped)), InvalidInput)
    assert refused > 150


def test_an_onnx_file_may_end_anywhere(read_onnx):
    raw = sound_onnx()
    ends = random.Random(0).sample(range(len(raw)), 40)
    assert all(isinstance(read_onnx(raw[:end]), InvalidInput) for end in ends)
    assert "it holds no graph" in str(read_onnx(b""))
    assert "damaged or ends too early" in str(read_onnx(b"\xff" * 100))


PORT = '<port id="{}" precision="FP32"><dim>{}</dim><dim>{}</dim></port>'
EDGES = (("0", "0", "2", "0"), ("1", "0", "2", "1"), ("2", "2", "3", "0"))


def ir(edges=EDGES, rows=2, inner=4, columns=5, head='<?xml version="1.0"?>'):
    def port(number, *sizes):
        return PORT.format(number, *sizes)

    layers = [
        f'<layer id="0" name="x" type="Parameter" version="opset1"><data shape="{rows},{inner}" element_type="f32"/>'
        f"<output>{port(0, rows, inner)}</output></layer>",
        f'<layer id="1" name="w" type="Const" version="opset1"><data element_type="f32" shape="{inner}, {columns}" '
        f'offset="0" size="80"/><output>{port(0, inner, columns)}</output></layer>',
        f'<layer id="2" name="y" type="MatMul" version="opset1"><data transpose_a="false" transpose_b="false"/><input>'
        f"{port(0, rows, inner)}{port(1, inner, columns)}</input><output>{port(2, rows, columns)}</output></layer>",
        f'<layer id="3" name="r" type="Result" version="opset1"><input>{port(0, rows, columns)}</input></layer>',
    ]
    lines = [f'<edge from-layer="{a}" from-port="{b}" to-layer="{c}" to-port="{d}"/>' for a, b, c, d in edges]
    return f'{head}<net name="m" version="11"><layers>{"".join(layers)}</layers><edges>{"".join(lines)}</edges></net>'


def test_bytes_of_an_ir_may_change(read_ir):
    raw = ir().encode()
    assert read_ir(raw).flops.sum() == 2 * 10 * 4
    numbers = [match.span() for match in re.finditer(rb'(?<=[>"])\d+(?=[<"])', raw)]
    refused = 0
    for seed in range(1000):
        rng = random.Random(seed)
        changed = bytearray(raw)
        if seed % 2:
            for _ in range(rng.randint(1, 3)):
                changed[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        else:
            start, end = rng.choice(numbers)
            changed[start:end] = rng.choice([b"-1", b"0", b"7", b"%d" % HUGE, b"9" * 30, b"9" * 5000, b"", b"1e9"])
        refused += isinstance(read_ir(bytes(changed)), InvalidInput)
    assert refused > 600


def test_an_ir_may_end_anywhere(read_ir):
    raw = ir().encode()
    assert all(isinstance(read_ir(raw[:end]), InvalidInput) for end in range(len(raw) - 1))
    assert "not XML at line 1" in str(read_ir(b""))


# ---- hostile ONNX ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "inputs", "stored", "why"), [
    ([node("Relu", "x")], {"x": (HUGE, HUGE)}, [], "too large"),
    ([node("Relu", "x")], {"x": (HUGE,) * 40}, [], "too large"),
    ([node("Relu", "x")], {"x": (-3,)}, [], "negative"),
    ([node("Expand", "x s")], {"x": (1,)}, [ints("s", -5)], "negative"),
    ([node("ConstantOfShape", "s")], {"x": (1,)}, [ints("s", HUGE, HUGE)], "too large"),
    ([node("Tile", "x s")], {"x": (2, 2)}, [ints("s", HUGE // 2, HUGE // 2)], "node y"),
    ([node("Pad", "x s")], {"x": (4,)}, [ints("s", -HUGE, HUGE, 1)], "node y"),
    ([node("Relu", "b", "a"), node("Relu", "a", "b")], {"x": (4,)}, [], "reads 'b', which nothing before it makes"),
    ([node("Relu", "x", "x")], {"x": (4,)}, [], "makes 'x', which exists already"),
    ([node("Relu", "q")], {"x": (4,)}, [], "reads 'q'"),
    ([node("MaxPool", "x", kernel_shape=[2], strides=[0])], {"x": (1, 1, 4)}, [], "node y"),
    ([node("Split", "x", "y z", num_outputs=0)], {"x": (4,)}, [], "node y"),
    ([node("DepthToSpace", "x", blocksize=0)], {"x": (1, 4, 2, 2)}, [], "node y"),
    ([node("Slice", "x a b c d")], {"x": (4,)}, [ints(name, 0) for name in "abcd"], "node y"),
    ([node("LSTM", "x w w", hidden_size=1.5)], {"x": (1, 1, 4)}, [floats("w", 1, 16, 4)], "node y"),
    ([node("Einsum", "x x", equation="ijk,jk->i")], {"x": (4, 4)}, [], "node y"),
])  # fmt: skip
def test_a_graph_that_cannot_be_is_refused(read_onnx, nodes, inputs, stored, why):
    found = read_onnx(model(nodes, inputs, stored))
    assert isinstance(found, InvalidInput)
    assert why in str(found)


@pytest.mark.parametrize("nodes", [
    [node("Range", "zero end one", "r"), node("Cast", "r", to=TensorProto.FLOAT)],
    [node("Shape", "x", "s0"), *(node("Concat", f"s{i} s{i}", f"s{i + 1}", axis=0) for i in range(34)),
     node("Reshape", "x s34")],
])  # fmt: skip
def test_shapes_that_would_fill_the_memory_stop_at_a_limit(read_onnx, nodes, monkeypatch):
    monkeypatch.setattr(onnx_model, "_INFERENCE_BYTES", 400 * 1024**2)
    stored = [scalar("zero", 0), scalar("end", 10**11), scalar("one", 1)]
    assert "its shapes cannot be inferred" in str(read_onnx(model(nodes, {"x": (4,)}, stored)))


@pytest.fixture
def instead_of_python(tmp_path, monkeypatch):
    def run(command):
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\n{command}\n")
        script.chmod(0o755)
        monkeypatch.setattr(onnx_model.sys, "executable", str(script))

    return run


def test_shapes_that_take_forever_stop_at_a_limit(read_onnx, instead_of_python, monkeypatch):
    instead_of_python("exec sleep 60")
    monkeypatch.setattr(onnx_model, "_INFERENCE_SECONDS", 0.2)
    assert "cannot be inferred within 0.2 s" in str(read_onnx(sound_onnx()))


def test_a_crash_of_the_library_is_an_error(read_onnx, instead_of_python):
    instead_of_python("kill -SEGV $$")
    assert "its shapes cannot be inferred: the library crashed" in str(read_onnx(sound_onnx()))
    instead_of_python("head -c 100 /dev/zero")
    assert isinstance(read_onnx(sound_onnx()), InvalidInput)


@pytest.mark.parametrize("location", ["/etc/passwd", "../../../etc/passwd"])
def test_external_data_is_never_opened(read_onnx, location, monkeypatch):
    def elsewhere(name, *shape, dtype):
        tensor = TensorProto(name=name, dims=shape, data_type=dtype, data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value=location)
        return tensor

    weight, shape = elsewhere("w", 4, 5, dtype=1), elsewhere("s", 2, dtype=7)
    opened = []
    real = open

    def spy(path, *rest, **options):
        opened.append(str(path))
        return real(path, *rest, **options)

    monkeypatch.setattr("builtins.open", spy)
    assert read_onnx(model([node("MatMul", "x w")], {"x": (2, 4)}, [weight])).resident_bytes.sum() == 80
    assert isinstance(read_onnx(model([node("Reshape", "x s")], {"x": (2, 4)}, [shape])), InvalidInput)
    split = [node("SplitToSequence", "x s", "q"), node("SequenceAt", "q zero")]
    assert isinstance(read_onnx(model(split, {"x": (2, 4)}, [shape, scalar("zero", 0)])), InvalidInput)
    assert opened
    assert not [path for path in opened if "passwd" in path]


def test_functions_that_multiply_or_call_themselves_are_refused(read_onnx):
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("mine", 1)]

    def function(name, *calls):
        values = ["a", *(f"t{i}" for i in range(len(calls) - 1)), "b"]
        nodes = [
            helper.make_node(call, [values[i]], [values[i + 1]], domain="" if call == "Relu" else "mine")
            for i, call in enumerate(calls)
        ]
        return helper.make_function("mine", name, ["a"], ["b"], nodes, opsets)

    call = [node("F0", "x", domain="mine")]
    doubling = [function(f"F{i}", *[f"F{i + 1}"] * 2) for i in range(40)] + [function("F40", "Relu")]
    assert "more than 2,000,000 ops" in str(read_onnx(model(call, {"x": (4,)}, functions=doubling)))
    loop = [function("F0", "F1"), function("F1", "F0")]
    assert "'F0' calls itself" in str(read_onnx(model(call, {"x": (4,)}, functions=loop)))
    deep = [function(f"F{i}", f"F{i + 1}") for i in range(2000)] + [function("F2000", "Relu")]
    assert "nested too deep" in str(read_onnx(model(call, {"x": (4,)}, functions=deep)))


def test_a_placement_in_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "m.onnx"
    raw = sound_onnx()
    path.write_bytes(raw)
    onnx_reader.write_placement(path, path, ["cpu", "gpu"], {"c": ("gpu", 1)})
    made = onnx.load(path)
    made.graph.node[0].device_configurations[0].sharding_spec[0].device[0] = 7
    path.write_bytes(made.SerializeToString())
    assert "there is no device 7" in str(outcome(onnx_reader.read_placement, path))
    made.graph.node[0].device_configurations[0].configuration_id = "other"
    path.write_bytes(made.SerializeToString())
    assert "there is no configuration 'other'" in str(outcome(onnx_reader.read_placement, path))
    path.write_bytes(raw[:200])
    assert isinstance(outcome(onnx_reader.read_placement, path), InvalidInput)


# ---- hostile IR ------------------------------------------------------------------------------------------------------

LAUGHS = "".join(f'<!ENTITY l{i + 1} "{f"&l{i};" * 10}">' for i in range(12))


@pytest.mark.parametrize(("content", "why"), [
    (f'<?xml version="1.0"?><!DOCTYPE net [<!ENTITY l0 "ha">{LAUGHS}]><net version="11">&l12;</net>', "document type"),
    ('<!DOCTYPE net [<!ENTITY f SYSTEM "file:///etc/passwd">]><net version="11">&f;</net>', "document type"),
    ('<net version="11">&unknown;</net>', "not XML at line 1"),
    ('<net version="11">' + "<layer id='0' name='a' type='b'>" * 1000, "nested too deep"),
    ("<html></html>", "not an OpenVINO model"),
    ('<net version="7"></net>', "not an OpenVINO model"),
    ('<net version="11"></net>', "it has no layers"),
    ('<net version="11"><layers><layer id="0"/></layers></net>', "line 1: name is missing"),
    (ir(edges=[*EDGES[:1], ("2", "2", "2", "1")]), "the layers form a cycle; 'y'"),
    (ir(edges=EDGES[:1]), "layer y (MatMul): nothing leads to its port 1"),
    (ir(edges=[("9", "0", "2", "0")]), "from port 0 of layer 9, which does not exist"),
    (ir(edges=[("0", "0", "2", "9")]), "to port 9 of layer 2, which does not exist"),
    (ir(inner=HUGE, columns=HUGE), "too large"),
    (ir(rows=-1), "the size of x.0 is not fixed"),
    (ir(inner=-4), "m.xml"),
    (ir(rows="9" * 5000), "a whole number is expected"),
    (ir().replace("FP32", "FP99"), "there is no precision 'FP99'"),
    (ir().replace('id="1"', 'id="0"'), "two layers have the same id"),
])  # fmt: skip
def test_an_ir_that_cannot_be_is_refused(read_ir, content, why):
    found = read_ir(content)
    assert isinstance(found, InvalidInput)
    assert why in str(found)


def test_openvino_is_not_asked_about_a_file_that_is_no_ir(tmp_path):
    pytest.importorskip("openvino")
    path = tmp_path / "m.xml"
    path.write_text(ir())
    fused = partial(ir_reader.load, fuse=True)
    assert "there is no .bin file beside it" in str(outcome(fused, path))
    path.with_suffix(".bin").write_bytes(b"\0" * 8)  # of 80
    assert "OpenVINO refuses it" in str(outcome(fused, path))
    path.with_suffix(".bin").write_bytes(b"\0" * 80)
    assert (outcome(fused, path).group == -1).all()
    path.write_text("<html></html>")
    assert "not an OpenVINO model" in str(outcome(fused, path))


@pytest.mark.parametrize("load", [onnx_reader.load, ir_reader.load])
def test_what_is_no_file_is_refused(tmp_path, load):
    import os

    os.mkfifo(tmp_path / "pipe")  # to open it would wait for ever
    for path in (tmp_path / "missing", tmp_path, tmp_path / "pipe"):
        assert "is not a file" in str(outcome(load, path, seconds=5))
