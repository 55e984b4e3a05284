"""Plans run by ONNX Runtime: models cut into segments, and rules within one session."""

import json
import threading
from itertools import pairwise

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from placewise import engines  # noqa: E402
from placewise.cluster import Device, full_mesh  # noqa: E402
from placewise.engines.onnxruntime import Provider  # noqa: E402
from placewise.engines.onnxruntime_split import Sessions, in_turn  # noqa: E402
from placewise.errors import InvalidInput, Unsupported  # noqa: E402
from placewise.importers import onnx as reader  # noqa: E402
from placewise.importers import onnx_model  # noqa: E402
from placewise.plans import Plan  # noqa: E402
from placewise.problem import Problem  # noqa: E402
from placewise.simulator import evaluate  # noqa: E402

LOGICAL = {"big": "cpu:2", "little": "cpu:1"}


def model(rows=2):
    """Two branches that meet; a reshape, a constant that both read, a branch on data, and two outputs."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.normal(size=(32, 32)).astype(np.float32), f"w{i}") for i in range(2)]
    half = helper.make_node("Constant", [], ["half"], "half", value=helper.make_tensor("h", 1, [], [0.5]))
    wide = helper.make_tensor("wide", TensorProto.INT64, [2], [-1, 4])

    def body(name, scale):
        made = helper.make_node("Mul", ["d", scale], [f"{name}_out"], name=f"{name}_mul")
        end = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)
        return helper.make_graph([made], name, [], [end])

    branches = {"then_branch": body("then", "half"), "else_branch": body("else", "d")}
    nodes = [
        half,
        helper.make_node("MatMul", ["x", "w0"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"], "left"),
        helper.make_node("MatMul", ["a", "w1"], ["c"], "right"),
        helper.make_node("Mul", ["c", "half"], ["e"], "scaled"),
        helper.make_node("Add", ["b", "e"], ["d"], "meet"),
        helper.make_node("ReduceMax", ["d"], ["top"], "top", keepdims=0),
        helper.make_node("Greater", ["top", "half"], ["large"], "large"),
        helper.make_node("If", ["large"], ["f"], "choice", **branches),
        helper.make_node("Reshape", ["f", "wide"], ["g"], "flat"),
        helper.make_node("Tanh", ["g"], ["y"], "end"),
    ]  # fmt: skip
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "b")]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, 32])
    graph = helper.make_graph(nodes, "net", [x], ends, [*weights, wide])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("model") / "net.onnx"
    onnx.save(model(), str(file))
    return file


def placed(path, device_of, engine="onnxruntime-split", kinds=("cpu", "cpu")):
    rates = {"flops": {"default": 1e11}, "bandwidth": 1e10}
    devices = [Device(name, kind=kind, **rates) for name, kind in zip(LOGICAL, kinds, strict=True)]
    graph = reader.load(path).collapse_parameters().graph
    spare = ("little",) if engine == "onnxruntime" and kinds == ("cpu", "cpu") else ()
    question = engines.get(engine).fit(Problem(graph, full_mesh(devices, 1e10), forbidden=spare))
    place = np.array([device_of(name) for name in graph.op_names], np.int32)
    return Plan(question, place, None, float(evaluate(question, place).value[0]), 0.0, "hand", "0")


def run(plan, path, devices=LOGICAL, engine="onnxruntime-split"):
    return engines.get(engine).run(plan, str(path), devices)


# ---- segments --------------------------------------------------------------------------------------------------------


@given(st.data())
def test_segments_can_run_one_after_the_other(data):
    count = data.draw(st.integers(1, 12))
    reads = [sorted(data.draw(st.sets(st.integers(0, node - 1)))) if node else [] for node in range(count)]
    device = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    found = in_turn(range(count), reads, device)
    done: set = set()
    for where, nodes in found:
        for node in nodes:
            assert device[node] == where
            assert set(reads[node]) <= done
            done.add(node)
    assert sorted(node for _, nodes in found for node in nodes) == list(range(count))
    assert all(a[0] != b[0] for a, b in pairwise(found))


@given(st.data())
def test_on_two_devices_there_are_no_fewer_segments(data):
    """Against all orders: the fewest runs of equal devices in any of them."""
    count = data.draw(st.integers(1, 6))
    reads = [sorted(data.draw(st.sets(st.integers(0, node - 1)))) if node else [] for node in range(count)]
    device = data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))

    def fewest(done, last):
        if len(done) == count:
            return 0
        free = [node for node in range(count) if node not in done and set(reads[node]) <= done]
        return min(fewest(done | {node}, device[node]) + (device[node] != last) for node in free)

    assert len(in_turn(range(count), reads, device)) == fewest(frozenset(), -1)


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_outputs_are_those_of_the_model_wherever_its_nodes_are(path, seed):
    rng = np.random.default_rng(seed)
    plan = placed(path, lambda name: int(rng.integers(2)))
    with run(plan, path) as ready:
        for a, b in zip(ready.plain(), ready.placed(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
            assert np.abs(a).max() > 0
        wanted = plan.devices
        told = ready.ran_on()
        assert len(told) >= 4
        assert told == {node: wanted[node] for node in told}
        assert set(ready.busy()) == {row["device"] for row in ready.sessions.manifest["segments"]}


def test_a_model_is_cut_where_devices_change(path, tmp_path):
    plan = placed(path, lambda name: int(name in ("right", "scaled")))
    engines.get("onnxruntime-split").write(plan, str(path), tmp_path / "parts")
    told = json.loads((tmp_path / "parts" / "manifest.json").read_text())
    assert [(row["device"], row["inputs"], row["outputs"]) for row in told["segments"]] == [
        ("big", ["x"], ["a", "b"]), ("little", ["a"], ["e"]), ("big", ["b", "e"], ["y"]),
    ]  # fmt: skip
    middle = onnx.load(str(tmp_path / "parts" / "segment-1.onnx"))
    onnx.checker.check_model(middle)
    assert [tensor.name for tensor in middle.graph.initializer] == ["w1"]
    assert [node.name for node in middle.graph.node] == ["half", "right", "scaled"]  # constants are copied
    exported = json.loads(engines.get("onnxruntime-split").export(plan))["segments"]
    assert [row["device"] for row in exported] == ["big", "little", "big"]
    assert exported[1]["nodes"] == ["right", "scaled"]


def test_weights_beside_the_file_are_found_and_large_ones_put_beside(path, tmp_path, monkeypatch):
    from placewise.engines import onnxruntime_split

    (tmp_path / "in").mkdir()
    onnx.save(model(), str(tmp_path / "in" / "net.onnx"), save_as_external_data=True, location="w", size_threshold=0)
    monkeypatch.setattr(onnxruntime_split, "_LARGE", 1)
    plan = placed(tmp_path / "in" / "net.onnx", lambda name: int(name == "right"))
    engines.get("onnxruntime-split").write(plan, str(tmp_path / "in" / "net.onnx"), tmp_path / "out")
    assert (tmp_path / "out" / "segment-1.weights").stat().st_size == 4 * 32 * 32
    with run(plan, tmp_path / "in" / "net.onnx") as ready, run(plan, path) as other:
        for a, b in zip(ready.placed(), other.plain(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_samples_overlap_and_come_back_in_order(path, tmp_path):
    plan = placed(path, lambda name: int(name in ("right", "scaled")))
    engines.get("onnxruntime-split").write(plan, str(path), tmp_path)
    sessions = Sessions(tmp_path, {name: Provider("CPUExecutionProvider", {}, 1) for name in LOGICAL})
    samples = [{"x": np.full((2, 32), i, np.float32)} for i in range(12)]
    threads = threading.active_count()
    for found, sample in zip(sessions.stream(samples), samples, strict=True):
        for a, b in zip(found, sessions(sample), strict=True):
            np.testing.assert_array_equal(a, b)
    assert threading.active_count() == threads


def test_times_are_of_the_ops_of_each_device(path):
    plan = placed(path, lambda name: int(name in ("right", "scaled")))
    graph = plan.problem.graph
    signature = dict(zip(graph.op_names, graph.op_signatures, strict=True))
    with run(plan, path) as ready:
        found = {(device, key) for device, key, timing in ready.times() if timing.seconds >= 0}
    assert ("little", signature["right"]) in found
    assert ("big", signature["end"]) in found
    assert ("little", signature["end"]) not in found


def test_one_session_tells_where_its_nodes_are(path):
    plan = placed(path, lambda name: 0, "onnxruntime")
    with run(plan, path, {}, "onnxruntime") as ready:
        np.testing.assert_array_equal(ready.plain()[0], ready.placed()[0])
        assert set(ready.ran_on().values()) == {"big"}
        assert "right" in ready.ran_on()
        assert {device for device, _, _ in ready.times()} == {"big"}


def test_the_command_writes_a_folder(path, tmp_path, monkeypatch, capsys):
    import sys

    from placewise.cli import main

    placed(path, lambda name: int(name == "right")).save(tmp_path / "plan.json")

    def export(*options):
        monkeypatch.setattr(sys, "argv", ["placewise", "export", str(tmp_path / "plan.json"), *options])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr()

    folder = tmp_path / "parts"
    code, told = export("--to", "onnxruntime-split", "--model", str(path), "--out", str(folder))
    assert (code, told.out) == (0, "")
    assert sorted(file.name for file in folder.iterdir()) == [
        "manifest.json", "segment-0.onnx", "segment-1.onnx", "segment-2.onnx",
    ]  # fmt: skip
    code, told = export("--to", "vllm", "--model", str(path))
    assert code == 2
    assert "onnxruntime-split" in told.err
    assert export("--to", "onnxruntime-split", "--model", str(path))[0] == 2
    before = path.read_bytes()
    code, told = export("--to", "onnxruntime-split", "--model", str(path), "--out", str(path.parent))
    assert (code, path.read_bytes()) == (2, before)
    assert "this holds what is read" in told.err


def test_rules_for_a_file_without_names_come_with_a_copy_that_has_them(tmp_path):
    made = model()
    for node in made.graph.node:
        node.name = ""
    onnx.save(made, str(tmp_path / "bare.onnx"))
    plan = placed(tmp_path / "bare.onnx", lambda name: int(name == "%c"), "onnxruntime", ("cpu", "gpu"))
    with pytest.raises(InvalidInput, match="the file has none for the node of '%a': with --model"):
        engines.get("onnxruntime").export(plan)
    engines.get("onnxruntime").write(plan, str(tmp_path / "bare.onnx"), tmp_path / "out")
    copied = onnx.load(str(tmp_path / "out" / "model.onnx"))
    rules = json.loads((tmp_path / "out" / "options.json").read_text())["session.name_based_layer_assignment"]
    assert "gpu(%c)" in rules
    assert {node.name for node in copied.graph.node} >= {"%a", "%c", "%y"}
    x = {"x": np.ones((2, 32), np.float32)}
    outputs = [
        runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, x)
        for file in (tmp_path / "bare.onnx", tmp_path / "out" / "model.onnx")
    ]
    np.testing.assert_array_equal(outputs[0][0], outputs[1][0])


def test_names_that_nodes_share_are_made_up():
    made = model()
    for node in made.graph.node[1:3]:
        node.name = "twice"
    assert onnx_model.node_names(made.graph)[:4] == ["half", "twice", "%b", "right"]


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_provider_that_is_not_here_is_told(path):
    if "CUDAExecutionProvider" in runtime.get_available_providers():
        pytest.skip("there is a GPU")
    for engine in ("onnxruntime", "onnxruntime-split"):
        plan = placed(path, lambda name: int(name == "end"), engine, ("cpu", "gpu"))
        with pytest.raises(InvalidInput, match=r"uses little as cuda:0, and this ONNX Runtime has .*little=cpu:1"):
            run(plan, path, {}, engine).__enter__()
    for place in ("tpu", "cuda:²", "cuda:-1"):
        with pytest.raises(InvalidInput, match="must be cpu, cpu:2"):
            run(plan, path, {"little": place}).__enter__()
    with pytest.raises(InvalidInput, match="number of threads"):
        run(plan, path, {"little": "cpu:x"}).__enter__()


def test_one_session_has_one_cpu_and_rules_need_a_version(path, monkeypatch):
    with pytest.raises(InvalidInput, match="plan for onnxruntime-split"):
        run(placed(path, lambda name: int(name == "end")), path, {}, "onnxruntime").__enter__()
    with pytest.raises(InvalidInput, match=r"two CPUs, and a session has one: .* onnxruntime-split"):
        engines.get("onnxruntime").export(placed(path, lambda name: int(name == "end")))
    with pytest.raises(Unsupported, match=r"has one CPU, and there are big, little: .* --forbid little"):
        engines.get("onnxruntime").fit(placed(path, lambda name: 0).problem)
    monkeypatch.setattr(runtime, "__version__", "1.27.0")
    monkeypatch.setattr(runtime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    plan = placed(path, lambda name: int(name == "end"), "onnxruntime", ("cpu", "gpu"))
    with pytest.raises(Unsupported, match=r"onnxruntime 1\.27\.0 takes no rules .* 1\.28 or later"):
        run(plan, path, {}, "onnxruntime").__enter__()


def test_the_model_of_another_plan_is_refused(path, tmp_path):
    onnx.save(model(rows=3), str(tmp_path / "net.onnx"))
    plan = placed(path, lambda name: 0)
    with pytest.raises(InvalidInput, match=r"not the model of this plan: op .*\[3,32\]"):
        run(plan, tmp_path / "net.onnx").__enter__()


MANIFEST = (
    '{"format": "placewise-onnxruntime-split/1", "model": "m", "inputs": [], "outputs": [], "segments": [{"file": %s}]}'
)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "must be an object"), ('{"format": "x"}', "must be 'placewise-onnxruntime-split/1'"),
     (MANIFEST % '"x.onnx"', r"segments\[0\].device: is missing"), (MANIFEST % "1", r"\[0\].file: must be text"),
     (MANIFEST % '"../x.onnx", "device": "d", "inputs": [], "outputs": [], "nodes": []', "outside of the folder")],
)  # fmt: skip
def test_a_manifest_that_was_tampered_with_is_refused(tmp_path, text, message):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(InvalidInput, match=f"manifest.json: .*{message}"):
        Sessions(tmp_path, {})
