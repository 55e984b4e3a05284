"""Plans run by OpenVINO's HETERO on logical devices: outputs, where ops ran, what is refused."""

import json

import numpy as np
import pytest

ov = pytest.importorskip("openvino")
from openvino import opset13 as ops  # noqa: E402

from placewise import engines  # noqa: E402
from placewise.cluster import Device, full_mesh  # noqa: E402
from placewise.engines.openvino import set_affinities  # noqa: E402
from placewise.errors import InvalidInput  # noqa: E402
from placewise.importers import openvino as reader  # noqa: E402
from placewise.plans import Plan  # noqa: E402
from placewise.problem import Problem  # noqa: E402

LOGICAL = {"big": "CPU:2", "little": "CPU:1"}


def layer(x, number, width=16):
    rng = np.random.default_rng(number)
    kernel = ops.constant(rng.normal(size=(width, x.shape[1], 3, 3)).astype(np.float32), name=f"weight{number}")
    one = [1, 1]
    made = ops.convolution(x, kernel, one, one, one, one, name=f"conv{number}")
    return ops.relu(made, name=f"relu{number}")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Three convolutions and a second branch, whose pieces a reshape and two outputs follow."""
    x = ops.parameter([1, 3, 8, 8], np.float32, name="x")
    first = layer(x, 1)
    both = ops.add(layer(first, 2), layer(first, 3), name="both")
    flat = ops.reshape(both, ops.constant(np.array([1, -1], np.int64)), False, name="flat")
    end = ops.tanh(flat, name="end")
    file = tmp_path_factory.mktemp("model") / "net.xml"
    ov.save_model(ov.Model([end, ops.sigmoid(first, name="side")], [x], "net"), file, compress_to_fp16=False)
    return file


def problem(path, *names):
    devices = [Device(name, kind="cpu", flops={"default": 1e11}, bandwidth=1e10) for name in names or LOGICAL]
    graph = reader.load(path).collapse_parameters().graph
    return engines.get("openvino").fit(Problem(graph, full_mesh(devices, 1e10)))


def placed(path, device_of):
    question = problem(path)
    place = np.array([device_of(i, name) for i, name in enumerate(question.graph.op_names)], np.int32)
    return Plan(question, place, None, 1.0, 0.0, "hand", "0")


def run(plan, path, devices=LOGICAL):
    return engines.get("openvino").run(plan, str(path), devices)


@pytest.mark.parametrize("seed", range(6))
def test_outputs_are_those_of_the_model_wherever_its_ops_are(path, seed):
    rng = np.random.default_rng(seed)
    plan = placed(path, lambda i, name: rng.integers(2))
    with run(plan, path) as ready:
        plain, found = ready.plain(), ready.placed()
        assert len(plain) == len(found) == 2
        for a, b in zip(plain, found, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
            assert np.abs(a).max() > 0
        wanted = dict(zip(plan.problem.graph.op_names, plan.placement.tolist(), strict=True))
        told = ready.ran_on()
        assert len(told) >= 5
        assert {name: ["big", "little"].index(device) for name, device in told.items()} == {n: wanted[n] for n in told}


def test_subgraphs_are_counted_and_their_links_tested(path):
    plan = placed(path, lambda i, name: int(name in ("both", "end")))
    with run(plan, path) as ready:
        assert ready.subgraphs() == ["big", "little"]  # the reshape between goes along
        assert ready.given == "random inputs, in 2 subgraphs"  # which `verify` prints
        assert ready.links() == {("big", "little"): True}
        busy = ready.busy()
        assert set(busy) == {"big", "little"}
        assert busy["big"] > 0  # counters are in microseconds, of which the other may need less than one
        assert ready.library.startswith("openvino 2")


def test_one_device_alone_is_one_subgraph(path):
    with run(placed(path, lambda i, name: 1), path) as ready:
        assert ready.subgraphs() == ["little"]
        assert ready.links() == {}
        assert set(ready.ran_on().values()) == {"little"}


def test_times_are_of_the_ops_of_each_device(path):
    plan = placed(path, lambda i, name: int(name in ("conv2", "relu2")))
    graph = plan.problem.graph
    signature = dict(zip(graph.op_names, graph.op_signatures, strict=True))
    with run(plan, path) as ready:
        found: dict = {}
        for device, key, timing in ready.times():
            found.setdefault(device, {})[key] = timing.seconds
    assert set(found) == {"big", "little"}
    assert set(found["little"]) == {signature["conv2"], signature["relu2"]}
    assert signature["conv1"] in found["big"]
    assert all(0 <= seconds < 1 for times in found.values() for seconds in times.values())


def test_every_op_has_an_affinity_constants_and_results_too(path):
    model = ov.Core().read_model(path)
    set_affinities(model, {"conv1": "A", "both": "B", "end": "B", "x": "B"})
    found = {op.get_friendly_name(): op.get_rt_info()["affinity"].value for op in model.get_ops()}
    assert len(found) == len(model.get_ops())
    assert (found["x"], found["weight1"], found["relu1"], found["flat"]) == ("A", "A", "A", "B")
    assert [place for name, place in found.items() if name.startswith("Result")] in (["A", "B"], ["B", "A"])


def test_the_exported_file_is_what_hetero_takes(path):
    plan = placed(path, lambda i, name: 0)
    told = json.loads(engines.get("openvino").export(plan))
    core = ov.Core()
    model = core.read_model(path)
    set_affinities(model, told["affinity"])
    assert core.compile_model(model, told["device"]).get_property("EXECUTION_DEVICES") == ["CPU"]


def test_two_cpus_are_one_plugin_twice(path, capsys):
    """Named as the export says, and registered as it says on stderr, they run."""
    for names, plugin in ((("a", "b"), "CPU2"), (("cpu0", "cpu1"), "CPU1"), (("CPU", "CPUB"), "CPUB")):
        question = problem(path, *names)
        place = np.array([int(name in ("both", "end")) for name in question.graph.op_names], np.int32)
        plan = Plan(question, place, None, 1.0, 0.0, "hand", "0")
        told = json.loads(engines.get("openvino").export(plan))
        assert (told["device"], told["register"]) == (f"HETERO:CPU,{plugin}", [plugin])
        assert capsys.readouterr().err.endswith(f"core.get_versions('CPU')['CPU'].description, '{plugin}')\n")
        core = ov.Core()
        core.register_plugin(core.get_versions("CPU")["CPU"].description, plugin)
        model = core.read_model(path)
        set_affinities(model, told["affinity"])
        assert core.compile_model(model, told["device"]).get_property("EXECUTION_DEVICES") == ["CPU", plugin]
        with run(plan, path, {}) as ready:
            assert ready.subgraphs() == list(names)


def test_two_devices_of_one_name_are_refused(path):
    question = problem(path, "a", "b", "CPU2")
    place = np.arange(question.num_ops, dtype=np.int32) % 3
    with pytest.raises(InvalidInput, match="two devices for one"):
        engines.get("openvino").export(Plan(question, place, None, 1.0, 0.0, "hand", "0"))


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_device_that_is_not_here_is_told(path):
    with (
        pytest.raises(InvalidInput, match=r"uses little as NPU, and OpenVINO has CPU here; .*little=CPU:1"),
        run(placed(path, lambda i, name: 1), path, {"little": "NPU"}),
    ):
        pass


def test_devices_are_those_of_the_cluster_and_threads_a_number(path):
    plan = placed(path, lambda i, name: 1)
    with pytest.raises(InvalidInput, match="no device 'tiny'; there are big, little"), run(plan, path, {"tiny": "CPU"}):
        pass
    with pytest.raises(InvalidInput, match="number of threads"), run(plan, path, {"little": "CPU:many"}):
        pass
    with pytest.raises(InvalidInput, match="only a CPU has"), run(plan, path, {"little": "GPU:1"}):
        pass


def test_the_model_of_another_plan_is_refused(path, tmp_path):
    x = ops.parameter([1, 3, 8, 8], np.float32, name="x")
    other = tmp_path / "other.xml"
    ov.save_model(ov.Model([layer(x, 1)], [x], "other"), other, compress_to_fp16=False)
    plan = placed(path, lambda i, name: i % 2)
    with pytest.raises(InvalidInput, match=r"not the model of this plan: it has no op .* plan the \.xml"):
        run(plan, other).__enter__()
    wider = tmp_path / "wider.xml"
    x = ops.parameter([2, 3, 8, 8], np.float32, name="x")
    ov.save_model(ov.Model([layer(x, 1)], [x], "wider"), wider)
    alone = Problem(reader.load(other).collapse_parameters().graph, plan.problem.cluster)
    with pytest.raises(InvalidInput, match=r"not the model of this plan: op 'x' is .*\[2,3,8,8\]"):
        run(Plan(alone, np.zeros(alone.num_ops, np.int32), None, 1.0, 0.0, "hand", "0"), wider).__enter__()


def test_a_file_that_is_no_model_is_told(path, tmp_path):
    plan = placed(path, lambda i, name: 0)
    with pytest.raises(InvalidInput, match="neither a file nor"):
        run(plan, tmp_path / "none.xml").__enter__()
    (tmp_path / "text.txt").touch()
    with pytest.raises(InvalidInput, match="openvino takes bundled models"):
        run(plan, tmp_path / "text.txt").__enter__()
    (tmp_path / "alone.xml").write_bytes(path.read_bytes())
    with pytest.raises(InvalidInput, match=r"alone\.xml: its weights are missing"):
        run(plan, tmp_path / "alone.xml").__enter__()
