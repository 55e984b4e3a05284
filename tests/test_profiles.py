"""Profiles: files, fitted rates, costs that use them, and times shared out among fused ops."""

from dataclasses import replace

import numpy as np
import pytest

from placewise import Costs, Device, GraphBuilder, InvalidInput, Problem, Unsupported, files, full_mesh, measure, zoo
from placewise.kinds import Op, TensorType
from placewise.plans import Plan
from placewise.profiles import ModelTime, OpTime, Profile, fit


def op_time(flops, size, seconds, kind="matmul", dtype="float32"):
    return OpTime(kind, dtype, flops, size, seconds, 0.01, 0.0)


def profile_of(ops, models=None, name="p"):
    return Profile(name, "cpu", "a CPU, 2 cores", "torch 2.13.0", "2026-11-16", ops, models or {})


def linear(count=20, noise=0.0, seed=0, kind="matmul", rates=(1e-5, 1e-12, 1e-10, 3e-10)):
    rng = np.random.default_rng(seed)
    work = 10 ** rng.uniform([5, 4], [10, 8], (count, 2))
    seconds = rates[0] + work @ rates[1:3] + np.maximum(work[:, 1] - 32e6, 0) * rates[3]
    seconds *= rng.lognormal(0, noise, count)
    return {f"{kind}{i}": op_time(f, b, s, kind) for i, ((f, b), s) in enumerate(zip(work, seconds, strict=True))}


# ---- rates -----------------------------------------------------------------------------------------------------------


def test_rates_that_made_the_times_are_found_again():
    assert fit(list(linear().values())) == pytest.approx((1e-5, 1e-12, 1e-10, 3e-10), rel=1e-6)


def test_an_outlier_does_not_pull():
    times = list(linear(40).values())
    times[7] = times[7]._replace(seconds=times[7].seconds * 1000)
    assert fit(times) == pytest.approx((1e-5, 1e-12, 1e-10, 3e-10), rel=0.05)


def test_no_rate_is_negative():
    for seed in range(20):
        assert min(fit(list(linear(10, noise=1.0, seed=seed).values()))) >= 0


def test_ops_that_only_move_bytes_have_no_rate_for_flops():
    times = [op_time(0.0, size, 2e-6 + size * 1e-10, "copy") for size in np.geomspace(1e3, 1e8, 12)]
    assert fit(times) == pytest.approx((2e-6, 0.0, 1e-10, 0.0), rel=1e-6, abs=1e-16)


def test_nothing_measured_predicts_nothing():
    assert fit([]) == (0.0, 0.0, 0.0, 0.0)
    assert profile_of({}).predict(["matmul"], ["float32"], [1.0], [1.0]).tolist() == [0.0]


def test_each_family_has_its_rates_and_a_strange_kind_those_of_all():
    slow = linear(kind="conv", rates=(0.0, 1e-9, 0.0, 0.0))
    profile = profile_of(linear() | slow)
    fast, far, strange = profile.predict(["matmul", "conv", "aten.strange"], ["float32"] * 3, [1e9] * 3, [0.0] * 3)
    assert (fast, far) == pytest.approx((1e-3 + 1e-5, 1.0), rel=1e-3)
    assert fast < strange < far


def test_few_measurements_of_a_dtype_leave_it_to_the_family():
    few = {f"half{i}": op_time(1e9, 1.0, 5.0, dtype="float16") for i in range(3)}
    profile = profile_of(linear(100) | few)
    assert profile.predict(["matmul"], ["float16"], [1e9], [0.0])[0] == pytest.approx(1e-3, rel=0.1)


def test_what_a_whole_model_takes_over_its_ops():
    models = {"a": ModelTime(1.1, 0.0, 1.0), "b": ModelTime(1.2, 0.0, 1.0), "c": ModelTime(9.0, 0.0, 1.0)}
    profile = profile_of(linear(), models)
    assert [profile.overhead(name) for name in ("a", "c", "unknown")] == [1.1, 9.0, 1.2]
    assert profile.without([], ["c"]).overhead("c") == pytest.approx(1.15)
    assert profile.without(["matmul3"]).ops.keys() == profile.ops.keys() - {"matmul3"}
    assert profile_of({}).overhead("a") == 1.0


def test_nothing_is_predicted_faster_than_the_fastest_that_was_measured():
    """Small copies alone say nothing of large ones: those take as long per byte as the fastest large op."""
    small = {f"copy{i}": op_time(0.0, 1e3, 1e-5, "copy") for i in range(10)}
    large = {"add": op_time(1e8, 1e9, 0.1, "add"), **{f"fast{i}": op_time(1e12, 1e3, 0.5) for i in range(8)}}
    copy, product = profile_of(small | large).predict(["copy", "copy"], ["float32"] * 2, [0.0, 1e15], [1e9, 1e3])
    assert (copy, product) == (0.1, 500.0)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_profile_is_what_was_saved(tmp_path):
    profile = profile_of(linear(), {"net": ModelTime(1.0, 0.1, 0.9)})
    files.save_profile(profile, tmp_path / "p.json.gz")
    again = files.load_profile(tmp_path / "p.json.gz")
    assert (again.ops, again.models) == (profile.ops, profile.models)
    assert vars(again).keys() == vars(profile).keys()
    assert (again.name, again.hardware, again.date) == (profile.name, profile.hardware, profile.date)


def test_profiles_of_this_machine_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACEWISE_PROFILES", str(tmp_path))
    files.save_profile(profile_of(linear(), name="mine"), tmp_path / "mine.json.gz")
    assert files.load_profile("mine").name == "mine"
    with pytest.raises(InvalidInput, match="did you mean 'mine'"):
        files.load_profile("mina")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "a profile is expected"),
        ('{"format": "placewise-profile/2"}', "upgrade"),
        ('{"format": "placewise-profile/1"}', "name: is missing"),
        (
            '{"format": "placewise-profile/1", "name": "", "device": "", "hardware": "", "library": "", "date": "",'
            ' "ops": {"signature": ["a"]}}',
            r"ops.kind: must have 1 entries, found 0",
        ),
    ],
)
def test_a_bad_profile_is_told_in_one_line(tmp_path, text, message):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(InvalidInput, match=rf"p\.json: .*{message}"):
        files.load_profile(tmp_path / "p.json")


def test_a_cluster_file_names_the_profile_of_a_device(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACEWISE_PROFILES", str(tmp_path))
    files.save_profile(profile_of(linear(), name="mine"), tmp_path / "mine.json.gz")
    (tmp_path / "box.yaml").write_text("devices: [{name: cpu, kind: cpu, profile: mine}]")
    cluster = files.load_cluster(tmp_path / "box.yaml")
    assert cluster.devices[0].profile.ops.keys() == linear().keys()
    files.save_cluster(cluster, tmp_path / "again.yaml")
    assert files.load_cluster(tmp_path / "again.yaml").devices[0].profile.name == "mine"


def test_the_path_of_a_profile_is_from_the_folder_of_the_cluster_file(tmp_path, monkeypatch):
    (tmp_path / "times").mkdir()
    files.save_profile(profile_of(linear(), name="mine"), tmp_path / "times" / "p.json.gz")
    (tmp_path / "box.yaml").write_text("devices: [{name: cpu, kind: cpu, profile: times/p.json.gz}]")
    monkeypatch.chdir("/")
    assert files.load_cluster(tmp_path / "box.yaml").devices[0].profile.name == "mine"


# ---- costs -----------------------------------------------------------------------------------------------------------


def small_graph():
    """A matmul that was measured, one that was not, and a parameter."""
    build = GraphBuilder("net")
    (w,) = build.op("w", kind="parameter", outputs=[4.0], op_signatures="known")
    (x,) = build.op("a", kind="matmul", inputs=[w], outputs=[4.0], flops=1e9, bytes_accessed=1.0, op_signatures="known")
    build.op("b", kind="matmul", inputs=[x], outputs=[4.0], flops=1e9, op_signatures="unknown")
    build.op("c", kind="view", inputs=[x], outputs=[4.0], op_signatures="known")
    return build.graph()


def test_costs_are_measured_where_the_profile_knows_the_op_and_fitted_elsewhere():
    profile = profile_of(linear() | {"known": op_time(1e9, 1.0, 7.0)})
    cluster = full_mesh([Device("cpu", profile=profile), Device("npu", "npu", flops={"default": 1e9}, launch=1.0)], 1.0)
    problem = Problem(small_graph(), cluster)
    assert problem.costs.seconds[1].tolist() == [7.0, 2.0]
    assert problem.costs.seconds[2] == pytest.approx([1e-3 + 1e-5, 2.0], rel=1e-3)
    assert problem.costs.seconds[[0, 3]].tolist() == [[0.0, 0.0]] * 2
    assert problem.costs.label[:, 0].tolist() == [1, 2, 1, 1]
    slower = replace(cluster.devices[0], profile=replace(profile, models={"net": ModelTime(3.0, 0.0, 2.0)}))
    calibrated = Problem(small_graph(), full_mesh([slower, cluster.devices[1]], 1.0)).costs.seconds
    assert calibrated == pytest.approx(problem.costs.seconds * [1.5, 1.0])
    shares = Plan(problem, [0, 0, 1, 0], None, 0.0, 0.0, "", "").cost_shares
    assert shares == pytest.approx({"measured": 7 / 9, "modelled": 2 / 9})
    assert list(shares) == ["measured", "modelled"]


def test_a_roofline_knows_what_each_family_of_ops_reaches():
    build = GraphBuilder("net")
    for kind in ("matmul", "conv", "aten.strange"):
        build.op(f"{kind} computes", kind=kind, flops=21e9)
        build.op(f"{kind} moves", kind=kind, bytes_accessed=21.0)
    devices = [
        Device(kind, kind, flops={"default": 21e9}, bandwidth=21.0, launch=0.5) for kind in ("gpu", "cpu", "fpga")
    ]
    seconds = Problem(build.graph(), full_mesh(devices)).costs.seconds
    assert seconds[:2] == pytest.approx(np.array([[0.5 + 4 / 3, 0.5 + 10 / 7, 1.5]] * 2))
    assert seconds[2:4].tolist() == [[1.5, 2.5, 1.5]] * 2
    assert (seconds[4:] == 1.5).all()


def test_given_costs_are_given():
    problem = Problem(small_graph(), full_mesh([Device("a")]), Costs.create(np.ones((4, 1))))
    assert Plan(problem, np.zeros(4), None, 0.0, 0.0, "", "").cost_shares == {"given": 1.0}


# ---- measuring -------------------------------------------------------------------------------------------------------


class FakeTarget:
    """Runs nothing: an op takes as many seconds as its name is long, the whole takes 10."""

    device, hardware, library = "cpu", "Some CPU (R) @ 2.00GHz, 2 cores", "torch 2.13.0+cpu"

    def __init__(self, names=("a", "bb", "ccc"), fails_at=None):
        build = GraphBuilder("net")
        for name in names:
            build.op(name, kind="copy", outputs=[8.0], bytes_accessed=8.0, op_signatures=name.strip("'"))
        build.op("free", kind="view", op_signatures="free")
        self.graph, self.asked, self._fails_at = build.graph(), [], fails_at

    def measure(self, wanted):
        self.asked.append(set(wanted))
        for signature in sorted(wanted):
            if signature == self._fails_at:
                raise KeyboardInterrupt
            yield signature, measure.Timing(float(len(signature)), 0.1)

    def whole(self):
        return measure.Timing(10.0, 0.0)


def test_identical_ops_are_measured_once_and_the_whole_beside_them(tmp_path):
    target, seen = FakeTarget(("a", "bb", "bb'")), []
    found = measure.profile(target, folder=tmp_path, on_progress=seen.append)
    assert target.asked == [{"a", "bb"}] * 2
    assert {signature: time.seconds for signature, time in found.ops.items()} == {"a": 1.0, "bb": 2.0}
    assert found.models == {"net": ModelTime(10.0, 0.0, 5.0)}
    assert found.name == "some-cpu-r-2.00ghz-2-cores-torch-2.13.0-cpu"
    assert [(now.done, now.wanted) for now in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    facts = measure.summary(target.graph, found)
    assert (facts["ops"], facts["wanted"], facts["measured"], facts["sum_of_ops"]) == (3, 2, 2, 5.0)


def test_models_share_what_was_measured(tmp_path):
    measure.profile(FakeTarget(("a", "bb")), folder=tmp_path)
    target = FakeTarget(("bb", "ccc"))
    found = measure.profile(target, folder=tmp_path)
    assert target.asked == [{"ccc"}] * 2
    assert found.ops.keys() == {"a", "bb", "ccc"}


def test_what_was_measured_before_an_interruption_is_kept(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        measure.profile(FakeTarget(fails_at="bb"), folder=tmp_path)
    target = FakeTarget()
    assert measure.profile(target, folder=tmp_path).ops.keys() == {"a", "bb", "ccc"}
    assert target.asked == [{"bb", "ccc"}] * 2


class DisturbedTarget(FakeTarget):
    """Whatever is measured in the first round takes twice as long; `a` is unsteady."""

    def measure(self, wanted):
        for signature, timing in super().measure(wanted):
            factor = 2.0 if len(self.asked) == 1 else 1.0
            yield signature, measure.Timing(timing.seconds * factor, 0.5 if signature == "a" else 0.1)


def test_a_disturbance_is_not_taken_for_a_slow_op(tmp_path):
    found = measure.profile(DisturbedTarget(), folder=tmp_path)
    assert [time.seconds for time in found.ops.values()] == [1.0, 2.0, 3.0]


def test_an_unsteady_op_is_measured_again_by_the_next_run(tmp_path):
    measure.profile(DisturbedTarget(), folder=tmp_path)
    target = FakeTarget()
    found = measure.profile(target, folder=tmp_path)
    assert target.asked == [{"a"}] * 2
    assert found.ops["a"].spread == 0.1  # the steadier one counts, though it is not faster


def test_measuring_stops_in_time_and_gets_on_each_time(tmp_path):
    for count in (1, 2, 3):
        found = measure.profile(FakeTarget(), folder=tmp_path, seconds=0.0)
        assert (len(found.ops), dict(found.models)) == (count, {})


def chain(*ops):
    """(name, kind, flops, bytes) one after another."""
    build, last = GraphBuilder("net"), []
    for name, kind, flops, size in ops:
        columns = {"flops": flops, "bytes_accessed": size, "op_signatures": name}
        last = build.op(name, kind=kind, inputs=last, outputs=[1.0], **columns)
    return build.graph()


def shared(graph, kernels, wanted=None):
    timings = measure.shared_out(graph, kernels, set(wanted or graph.op_names))
    return {name: timing.seconds for name, timing in timings}


def test_a_fused_kernel_is_shared_out_among_its_ops_by_their_work():
    graph = chain(("conv", "conv", 800.0, 20.0), ("relu", "relu", 0.0, 20.0))
    assert shared(graph, [(["conv", "relu"], [6.0, 6.0, 60.0])]) == {"conv": 5.0, "relu": 1.0}
    assert shared(graph, [(["conv", "relu"], [6.0])], {"relu"}) == {"relu": 1.0}


def test_what_no_kernel_names_was_fused_into_a_neighbour():
    """A product into the op behind it, after which the kernel is called; what is cheap into the op before."""
    graph = chain(
        ("product", "matmul", 800.0, 20.0), ("bias", "add", 0.0, 20.0), ("gelu", "gelu", 0.0, 20.0),
        ("next", "matmul", 0.0, 20.0),
    )  # fmt: skip
    found = shared(graph, [(["bias"], [14.0]), (["next"], [3.0])])  # 100, 20 and 20 parts of 14 s
    assert found == {"product": 10.0, "bias": 2.0, "gelu": 2.0, "next": 3.0}


def test_an_op_that_cannot_be_told_from_others_has_no_time():
    build = GraphBuilder("net")
    for name in ("a", "b"):
        build.op(name, kind="copy", bytes_accessed=1.0, op_signatures=name)
    assert shared(build.graph(), [(["a"], [2.0])]) == {"a": 2.0}
    with pytest.raises(InvalidInput, match="called after an op"):
        shared(build.graph(), [(["elsewhere"], [2.0])])


def test_the_clock_reads_the_median_of_one_call(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    calls = []

    def run(count):
        calls.append(count)
        now[0] += count * (100.0 if len(calls) == 1 else 5.0 if len(calls) == 4 else 1e-3)

    timing = measure.clocked(run, budget=0.05)
    assert timing.seconds == pytest.approx(1e-3)  # neither the warm-up nor the outlier counts
    assert calls[:3] == [1, 1, 2]


@pytest.mark.parametrize("device", ["tpu", "", "cuda0", "cpu:7"])
def test_a_device_that_cannot_be_measured_is_told(device):
    with pytest.raises(InvalidInput, match="must be cpu, cuda:0"), measure.opened("net", device):
        pass


@pytest.mark.parametrize("device", ["onnxruntime:gpu", "onnxruntime:0", "openvino:CPU:", "openvino:CPU:-1"])
def test_a_number_of_threads_is_a_number(tmp_path, device):
    pytest.importorskip(device.partition(":")[0])
    pytest.importorskip("onnxscript")
    with pytest.raises(InvalidInput, match="the number of threads must be"), measure.opened("squeezenet", device):
        pass


@pytest.mark.parametrize(("name", "device"), [("m.xml", "cpu"), ("m.json", "openvino:CPU"), ("m", "onnxruntime")])
def test_a_file_that_a_library_does_not_read_is_told(tmp_path, name, device):
    (tmp_path / name).touch()
    with (
        pytest.raises(InvalidInput, match="takes bundled models, and files"),
        measure.opened(str(tmp_path / name), device),
    ):
        pass


def test_a_model_that_is_not_there_is_told():
    with pytest.raises(InvalidInput, match="did you mean 'alexnet'"), measure.opened("alexnat", "cpu"):
        pass


def test_a_damaged_profile_is_told_with_what_to_do(tmp_path):
    (tmp_path / f"{measure.profile_name(FakeTarget())}.json.gz").write_text("hi")
    with pytest.raises(InvalidInput, match=r"json\.gz: .*; delete this profile to measure all anew"):
        measure.profile(FakeTarget(), folder=tmp_path)


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_to_is_told_before_anything_is_measured(tmp_path, name):
    (tmp_path / "file").touch()
    target = FakeTarget()
    with pytest.raises(OSError, match="let PLACEWISE_PROFILES name a folder"):
        measure.profile(target, folder=tmp_path / name)
    assert target.asked == []


def test_nothing_measured_has_no_spread_and_no_error():
    facts = measure.summary(FakeTarget().graph, profile_of({}))
    assert (facts["measured"], facts["spread"], facts["error"]) == (0, None, None)


def test_the_signature_is_the_key():
    op = Op("relu", [TensorType("float32", (2, 3))], [TensorType("float32", (2, 3))], {"b": 1, "a": [2]})
    assert op.signature == 'relu(float32[2,3]; {"a":[2],"b":1}) -> float32[2,3]'


# ---- real libraries --------------------------------------------------------------------------------------------------


def small_net():
    import torch
    from torch import nn

    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 16), nn.GELU()
    return nn.Sequential(*layers).eval(), torch.rand(2, 3, 32, 32)


def assert_timed(target, tmp_path):
    """Every op that computes has a time, and so has the whole."""
    found = measure.profile(target, folder=tmp_path)
    graph = target.graph
    for kind, signature in zip(graph.op_kinds, graph.op_signatures, strict=True):
        if kind in ("conv", "matmul"):
            assert found.ops[signature].seconds > 0
    whole = found.models[graph.name]
    assert whole.seconds > 0
    assert whole.sum_of_ops == sum(found.ops[s].seconds for s in graph.op_signatures if s in found.ops)
    facts = measure.summary(graph, found)
    assert facts["measured"] == facts["wanted"] == len(found.ops) > 2


def test_pytorch_times_each_op_and_leaves_the_weights_alone(tmp_path):
    from placewise.measure.pytorch import TorchTarget

    net, x = small_net()
    before = net[0].weight.clone()
    assert_timed(TorchTarget(net, (x,), {}, "net", "cpu"), tmp_path)
    assert (net[0].weight == before).all()


def test_weights_that_are_tied_stay_tied_when_they_get_values():
    torch = pytest.importorskip("torch")
    from placewise.measure.pytorch import materialised

    with torch.device("meta"):
        net = torch.nn.ModuleDict({"words": torch.nn.Embedding(5, 4), "head": torch.nn.Linear(4, 5, bias=False)})
        net["head"].weight = net["words"].weight
        net["cells"] = torch.nn.LSTM(4, 4)  # which lists its weights once more
    made, _ = materialised(net, (), "cpu")
    assert made["head"].weight is made["words"].weight
    assert not any(weight.is_meta for weight in (*made.parameters(), *made["cells"]._flat_weights))
    assert len(list(made.parameters())) == 5
    outputs, _ = made["cells"](made["words"](torch.tensor([1, 3])))
    assert outputs.std() > 0


def test_onnxruntime_times_ops_by_its_nodes_even_if_they_have_no_names(tmp_path):
    import onnx
    import torch

    from placewise.importers.torch_export import quiet
    from placewise.measure.onnxruntime import OnnxruntimeTarget, written

    net, x = small_net()
    with quiet():
        torch.onnx.export(net, (x,), tmp_path / "net.onnx", dynamo=True, verbose=False)
    model = onnx.load(str(tmp_path / "net.onnx"))
    for node in model.graph.node:
        node.name = ""
    onnx.save(model, str(tmp_path / "anonymous.onnx"))
    (tmp_path / "copy").mkdir()
    path, name = written(str(tmp_path / "anonymous.onnx"), tmp_path / "copy")
    assert_timed(OnnxruntimeTarget(path, name), tmp_path)


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_openvino_times_ops_by_its_kernels(tmp_path, form):
    import openvino
    import torch

    from placewise.importers.torch_export import quiet
    from placewise.measure.openvino import OpenvinoTarget, written

    net, x = small_net()
    with quiet():
        if form == "torch":
            converted = openvino.convert_model(net, example_input=x, input=[2, 3, 32, 32])
            openvino.save_model(converted, tmp_path / "net.xml", compress_to_fp16=False)
            path, name = written(str(tmp_path / "net.xml"), tmp_path)
        else:
            torch.onnx.export(net, (x,), tmp_path / "net.onnx", dynamo=True, verbose=False)
            path, name = written(str(tmp_path / "net.onnx"), tmp_path)
    assert_timed(OpenvinoTarget(path, name, "CPU"), tmp_path)


def test_a_training_step_is_not_measured_as_if_it_were_its_forward_pass():
    with pytest.raises(Unsupported, match=r"profile resnet-50$"), measure.opened("resnet-50-train", "cpu"):
        pass


# ---- what comes with the package -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["nvidia-h200-torch-2.11.0-cu130", "intel-r-xeon-r-processor-16-cores-torch-2.11.0-cu130"]
)
def test_shipped_profiles_know_the_zoo_and_predict_it(name):
    """Whole models by rates fitted without their ops: 25 % off at most in the median."""
    profile, errors = files.load_profile(name), []
    for model, whole in profile.models.items():
        graph = zoo.load(model)
        works = [i for i in range(graph.num_ops) if not graph.is_stored[i] and graph.bytes_accessed[i] > 0]
        assert np.mean([graph.op_signatures[i] in profile.ops for i in works]) > 0.9
        fitted = profile.without(graph.op_signatures, [model])
        kinds, dtypes = [graph.op_kinds[i] for i in works], [graph.op_dtypes[i] for i in works]
        seconds = fitted.predict(kinds, dtypes, graph.flops[works], graph.bytes_accessed[works]).sum()
        errors.append(abs(seconds * fitted.overhead(model) / whole.seconds - 1))
    assert np.median(errors) < 0.25
    assert sum(abs(model.sum_of_ops / model.seconds - 1) < 0.15 for model in profile.models.values()) >= 6
