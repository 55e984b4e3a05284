from __future__ import annotations

import json
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from placewise import Problem, engines, plan
from placewise.engines import Counted, Engine, Run
from placewise.errors import InvalidInput, Unsupported
from placewise.files import load_problem, load_profile
from placewise.measure import Timing
from placewise.report.table import describe_verification
from placewise.verify import _tolerance, difference, engine_for, verify
from problems import problem_of

OP = 0.01  # seconds


class Scripted(Run):
    """An engine that does what the plan says, but for what a test makes it do."""

    library = "script 1.0"

    def __init__(self, plan):
        self.plan = plan
        self.seconds = plan.timeline.makespan
        self.outputs = [np.array([1.0, 2.0], np.float32)]
        self.places = dict(plan.devices)
        self.held = {"d0": 1.0}
        self.links_work = True

    def plain(self):
        return [np.array([1.0, 2.0], np.float32)]

    def placed(self):
        time.sleep(self.seconds)
        return self.outputs

    def ran_on(self):
        return self.places

    def busy(self):
        return {"d0": 0.5}

    def peak(self):
        return self.held

    def links(self):
        return {("d0", "d1"): self.links_work}

    def times(self):
        yield "d0", "relu[8]", Timing(0.25, 0.1)


@pytest.fixture
def made():
    problem = problem_of([[OP, 2 * OP], [OP, 2 * OP]], [(0, 1)], memory=100.0, bytes_accessed=[8.0, 8.0])
    graph = replace(problem.graph, op_signatures=("relu[8]", "relu[8]"), op_dtypes=("float32",) * 2)
    problem = replace(problem, graph=graph)
    return plan(problem, "single")


@pytest.fixture
def run(made, monkeypatch):
    """Verify with an engine that a test can lead astray."""

    def verified(change=lambda run: None, **given):
        @contextmanager
        def ready(plan, model, devices):
            engines.check_devices(plan, devices)
            run = Scripted(plan)
            change(run)
            yield run

        known = engines.available() | {"script": Engine("script", "", lambda _: "", lambda p: p, ready)}
        monkeypatch.setattr(engines, "available", lambda: known)
        return verify(made, "model", engine="script", seconds=0.0, within=0.5, **given)

    return verified


def verdicts(seen):
    return {finding.claim: finding.verdict for finding in seen.findings}


def test_a_run_as_predicted_holds(run, made):
    seen = run()
    assert seen.holds
    assert set(verdicts(seen)) == {"outputs", "placement", "link d0 to d1", "time", "busy d0", "memory of d0"}
    assert seen.predicted == made.value
    assert seen.placed.seconds >= made.value
    assert seen.plain.seconds < OP


@pytest.mark.parametrize(
    ("claim", "change", "verdict"),
    [
        ("outputs", lambda run: run.outputs[0].__iadd__(1e-3), "they differ (float32)"),
        ("outputs", lambda run: run.outputs.append(run.outputs[0]), "they have other shapes or dtypes"),
        ("outputs", lambda run: run.outputs[0].fill(np.nan), "they differ (float32)"),
        ("placement", lambda run: run.places.update(op1="d1"), "op1 ran on d1"),
        ("placement", lambda run: run.places.clear(), "the engine tells of none"),
        ("link d0 to d1", lambda run: setattr(run, "links_work", False), "bytes change on the way"),
        ("memory of d0", lambda run: run.held.update(d0=101.0), "more than there is"),
    ],
)
def test_what_is_not_as_planned_is_told(run, claim, change, verdict):
    seen = run(change)
    assert not seen.holds
    assert verdicts(seen)[claim] == verdict
    assert [f.claim for f in seen.findings if f.is_wrong] == [claim]


def test_a_time_that_is_off_is_told(run):
    seen = run(lambda run: setattr(run, "seconds", 3 * run.seconds))
    assert verdicts(seen)["time"].startswith("+2")
    assert not seen.holds


def test_small_differences_are_rounding(run):
    seen = run(lambda run: run.outputs[0].__iadd__(np.float32(1e-5)))
    assert verdicts(seen)["outputs"] == "holds"


def of_dtypes(made, *dtypes, flops):
    graph = replace(made.problem.graph, op_dtypes=dtypes, flops=np.array(flops))
    return replace(made, problem=replace(made.problem, graph=graph))


def test_the_tolerance_is_that_of_the_output_and_of_most_of_the_work(made):
    assert _tolerance(made, "float32") == 1e-4
    assert _tolerance(made, "int64") == _tolerance(made, "bool") == 0.0
    one_op = of_dtypes(made, "float32", "bfloat16", flops=[9.0, 1.0])
    assert [_tolerance(one_op, dtype) for dtype in ("float32", "bfloat16", "int32")] == [1e-4, 5e-2, 0.0]
    most = of_dtypes(made, "float32", "bfloat16", flops=[1.0, 9.0])
    assert _tolerance(most, "float32") == 5e-2


def test_whole_numbers_must_be_equal(run, made):
    """Off by one, of values up to 30,000."""
    words = np.arange(30_000)

    def change(run):
        run.outputs = [run.outputs[0], np.where(words == 7, 8, words)]
        run.plain = lambda: [np.array([1.0, 2.0], np.float32), words]

    seen = run(change)
    assert verdicts(seen)["outputs"] == "they differ (int64)"
    assert seen.tolerance == {"float32": 1e-4, "int64": 0.0}
    assert "Outputs must be alike: float32 within 1e-04, int64 equal." in " ".join(
        describe_verification(made, seen).split()
    )


def test_one_large_value_hides_no_other():
    plain = np.full(1000, 2.0, np.float32)
    plain[0] = 1e30
    placed = plain.copy()
    assert difference(plain, placed) == 0.0
    placed[1] = 2.5
    assert difference(plain, placed) == 0.25
    placed = plain.copy()
    placed[0] *= 1.5
    assert difference(plain, placed) == pytest.approx(0.5)


def test_values_of_many_sizes_are_as_exact_as_the_largest():
    """A heavy tail is no outlier: sums of the small ones are no more exact than what they were sums of."""
    plain = np.logspace(-12, 0, 100)
    assert difference(plain, plain + 1e-6) == pytest.approx(1e-6)


def test_small_values_are_as_exact_as_the_large_ones_beside_them():
    plain = np.array([0.0, 1e-6, 1.0, -4.0])
    assert difference(plain, plain + 1e-3) == pytest.approx(1e-3 / 4)
    assert difference(np.zeros(3), np.array([0.0, 0.5, 0.0])) == 0.5


def test_a_model_that_makes_no_numbers_is_told(run):
    def change(run):
        run.outputs[0][1] = np.nan
        run.plain = lambda: [np.array([1.0, np.nan], np.float32)]

    assert verdicts(run(change))["outputs"] == "NaN without a plan, too"


def test_runs_with_clocks_take_turns_with_the_others(run):
    """So what they tell of ops is of the same minutes."""
    turns = []

    def change(run):
        plain, placed = run.plain, run.placed
        run.plain = lambda: turns.append("plain") or plain()
        run.placed = lambda: turns.append("placed") or placed()
        run.clocked = lambda: turns.append("clocked")

    run(change)
    assert turns[4:] == ["plain", "placed", "clocked"] * 3
    assert "clocked" not in turns[:4]


def test_bytes_that_were_counted_are_called_that(run):
    seen = run(lambda run: run.held.update(d0=Counted(101.0)))
    assert verdicts(seen)["memory of d0 (counted)"] == "more than there is"


def test_what_was_measured_is_kept_and_used(run, made, monkeypatch, tmp_path):
    monkeypatch.setenv("PLACEWISE_PROFILES", str(tmp_path))
    kept = []
    run(keep=kept.append)
    (cluster,) = kept
    first, second = cluster.devices
    assert second.profile is None
    assert load_profile(first.profile.name).ops["relu[8]"].seconds == 0.25
    again = Problem(made.problem.graph, cluster)
    assert again.seconds[:, 0].tolist() == [0.25, 0.25]


def test_times_of_a_stand_in_are_not_kept(run):
    with pytest.raises(InvalidInput, match="d0 is a gpu, and cpu stands in for it"):
        run(keep=lambda cluster: None, devices={"d0": "cpu"})


def test_requests_that_make_no_sense(run, made):
    with pytest.raises(InvalidInput, match="no device 'd7'; there are d0, d1"):
        run(devices={"d7": "cpu"})
    with pytest.raises(Unsupported, match="vllm cannot be run from here"):
        verify(made, "model", engine="vllm")
    assert [engine_for(name) for name in ("a.xml", "a.onnx", "a.pt2", "bert-base", "config.json")] == [
        "openvino", "onnxruntime", "torch", "torch", "torch-offload",
    ]  # fmt: skip


def test_the_model_is_checked_before_the_devices():
    """A wrong name is more likely than a machine without the plan's devices."""
    pytest.importorskip("torch")
    made = plan(load_problem("alexnet", "two-gpus-one-host"), "single")
    for model, message in (
        ("alexnett", "alexnett: neither a file nor a bundled model"),
        ("squeezenet", "not the model of this plan: op .features.0.conv2d. is conv"),
        ("alexnet", "no device 'gpu7'; there are gpu0, gpu1, cpu"),
    ):
        with pytest.raises(InvalidInput, match=message):
            verify(made, model, devices={"gpu7": "cpu"})


def test_what_is_allowed_is_said_beside_what_holds(run, made):
    assert "The time may be 50% off." in describe_verification(made, run())


def test_facts_are_json(run):
    facts = json.loads(json.dumps(run().facts()))
    assert facts["holds"]
    assert facts["within"] == 0.5
    assert facts["engine"] == "script"
