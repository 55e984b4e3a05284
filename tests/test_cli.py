"""The command line, as a newcomer and as a hostile user see it."""

import contextlib
import ctypes
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from commands import COMMANDS, ROOT, assert_80_columns, without_compiling
from placewise import cli, options, planners, terminal, zoo
from placewise.cluster import Cluster, Device, full_mesh
from placewise.costs import Costs
from placewise.driver import DEFAULT_PLANNER, Context, Outcome, Progress
from placewise.files import bundled_boxes, load_plan, save_problem, save_profile
from placewise.graph import GraphBuilder
from placewise.plans import Plan
from placewise.problem import OBJECTIVES, Execution, Problem
from placewise.profiles import OpTime, Profile
from placewise.quantities import LARGEST
from placewise.report.explain import Move
from placewise.report.table import (
    describe_comparison,
    describe_import,
    describe_moves,
    describe_profile,
    describe_what_if,
    fullest_device,
)
from placewise.report.what_if import WhatIf
from placewise.simulator import simulate

ODD = "a|b\n\x1b[31m = ζ名前" + "x" * 100


def diamond(**settings) -> Problem:
    """`a` feeds `b` and an op with an odd name, which feed `d=e`; 1 s each on gpu, 3 s on cpu; 0.1 s a transfer."""
    build = GraphBuilder("diamond")
    (a,) = build.op("a", kind="op", outputs=[1.0], resident=4.0)
    (b,) = build.op("b", kind="op", inputs=[a], outputs=[1.0], resident=4.0)
    (c,) = build.op(ODD, kind="op", inputs=[a], outputs=[1.0], resident=4.0)
    build.op("d=e", kind="op", inputs=[b, c], resident=4.0)
    cluster = full_mesh([Device("gpu", memory=100.0), Device("cpu", memory=100.0)], bandwidth=10.0, name="box")
    return Problem(build.graph(), cluster, Costs.create([[1.0, 3.0]] * 4), **settings)


@pytest.fixture
def problem(tmp_path) -> Path:
    save_problem(diamond(), tmp_path / "diamond.json")
    return tmp_path / "diamond.json"


@pytest.fixture
def plan(run, problem) -> Path:
    assert run("plan", problem, "--planner", "heft").code == 0
    return problem.parent / "plan.json"


# ---- help ------------------------------------------------------------------------------------------------------------


def test_help_names_every_command(run):
    help_text = run("--help").out
    assert all(f"\n  {command} " in help_text for command in COMMANDS)
    assert run("--version").out == "placewise 0.1.0\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command):
    result = run(command, "--help")
    assert result.code == 0
    assert result.out.startswith(f"Usage: placewise {command}")
    assert_80_columns(result.out)


def test_choices_are_those_of_the_library():
    assert cli.Goal.__origin__.__args__[0].__args__ == OBJECTIVES


def test_the_shell_completes_names(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert options.complete_planner("he") == ["heft"]
    assert "llama-3-8b" in options.complete_model("lla")
    assert "LICENSE" in options.complete_model("LIC")
    assert "two-gpus-one-host" in options.complete_cluster("two")
    assert str(ROOT / "LICENSE") in options.complete_model(str(ROOT / "LIC"))
    assert "docs/file-formats.md" in options.complete_cluster("docs/fi")
    assert options.complete_model("**") == options.complete_cluster("[") == []


# ---- plan ------------------------------------------------------------------------------------------------------------


def test_plan_prints_a_table_and_writes_the_plan(run, problem):
    result = run("plan", problem, "--planner", "heft")
    assert result.code == 0
    assert result.out.startswith("diamond on box: latency ")
    assert result.out.count("\n| ") == 4  # header, rule, two devices
    assert result.err == "wrote plan.json\n"
    assert load_plan("plan.json").planner == "heft"


def test_plan_as_json(run, problem, tmp_path):
    result = run(
        "plan", problem, "--planner", "random", "-o", "samples=50", "--seed", "3", "--out", "p.json.gz", "--json"
    )
    facts = json.loads(result.out)
    found = load_plan(tmp_path / "p.json.gz")
    assert facts["value"] == found.value
    assert facts["options"] == {"samples": 50}
    assert facts["seed"] == 3
    assert facts["plan"] == "p.json.gz"
    assert facts["devices"]["gpu"]["memory"] == 100.0


def test_a_budget_of_evaluations(run, problem):
    facts = json.loads(run("plan", problem, "--planner", "random", "--evaluations", "40", "--json").out)
    assert (facts["evaluations"], facts["stopped"]) == (40, "budget")


def test_the_default_planner(run, problem):
    facts = json.loads(run("plan", problem, "--budget", "1s", "--json").out)
    assert facts["planner"] == DEFAULT_PLANNER
    assert facts["value"] <= 4.0  # all on the gpu


@pytest.mark.parametrize(
    ("options", "expect"),
    [
        (["--objective", "throughput"], lambda p: p.objective == "throughput"),
        (["--objective", "completion"], lambda p: p.objective == "completion"),
        (["--max-memory", "gpu=90B,cpu=1KiB"], lambda p: p.capacity.tolist() == [90.0, 1024.0]),
        (["--pin", "d=e=cpu", "--pin", "a=gpu"], lambda p: p.pins == {"d=e": "cpu", "a": "gpu"}),
        (["--forbid", "gpu"], lambda p: p.forbidden == ("gpu",)),
        (["--contiguous", "--max-devices", "1"], lambda p: p.contiguous and p.max_devices == 1),
        (["--execution", "contention=none"], lambda p: p.execution.contention == "none"),
        (
            ["--execution", "concurrency=sequential,prefetch=3", "--execution", "overlap=no"],
            lambda p: (p.execution.concurrency, p.execution.prefetch, p.execution.overlap) == ("sequential", 3, False),
        ),
    ],
)
def test_options_reach_the_problem(run, problem, options, expect):
    assert run("plan", problem, "--planner", "random", *options).code == 0
    found = load_plan("plan.json")
    assert expect(found.problem)
    for op, device in found.problem.pins.items():
        assert found.devices[op] == device


def test_options_leave_the_rest_of_the_file_alone(run, tmp_path):
    save_problem(diamond(execution=Execution(sends="edge"), contiguous=True, pins={"a": "cpu"}), tmp_path / "p.json")
    assert run("plan", "p.json", "--planner", "random", "--execution", "contention=none").code == 0
    found = load_plan("plan.json").problem
    assert (found.execution.sends, found.execution.contention) == ("edge", "none")
    assert found.contiguous
    assert found.pins == {"a": "cpu"}


def test_parameters_may_be_placed(run):
    args = ("plan", "llama-3-8b", "--cluster", "two-gpus-one-host", "--planner", "single", "--json")
    ops = [
        sum(d["ops"] for d in json.loads(run(*args, *more).out)["devices"].values())
        for more in ([], ["--place-parameters"])
    ]
    assert ops[0] < ops[1]


def test_backward_ops_may_be_kept_with_their_forward_ops(run):
    args = ("plan", "resnet-50-train", "--cluster", "colocrl-4", "--planner", "random", "--evaluations", "1")
    with_forward = []
    for more in ((), ("--colocate-backward",)):
        assert run(*args, *more).code == 0
        found = load_plan("plan.json")
        graph, edge = found.problem.graph, np.arange(found.problem.graph.num_edges)
        ends = graph.edge_producer[edge], graph.consumers[edge]
        module = np.array(graph.op_modules)
        own = (graph.phase[ends[1]] == 1) & (graph.phase[ends[0]] == 0) & (module[ends[0]] == module[ends[1]])
        together = found.placement[ends[0]] == found.placement[ends[1]]
        with_forward.append(np.isin(np.unique(ends[1][own]), ends[1][own & together]).mean())
    assert with_forward[0] < 0.6
    assert with_forward[1] == 1.0


def test_weights_that_are_placed_are_not_kept_with_their_ops(run):
    given = ("resnet-50-train", "--cluster", "colocrl-4", "--place-parameters", "--colocate-backward")
    refused = run("plan", *given)
    assert refused.code == 2
    assert "--colocate-backward puts weights with the ops that read them" in refused.err


def test_explain_takes_a_budget_for_planning_alone(run, problem):
    assert run("plan", problem, "--planner", "single").code == 0
    refused = run("explain", "plan.json", "--budget", "1s")
    assert refused.code == 2
    assert "--budget is for --what-if" in refused.err


def test_the_same_seed_gives_the_same_plan(run, problem, tmp_path):
    for name in ("one.json", "two.json"):
        run("plan", problem, "--planner", "random", "--seed", "5", "--out", name)
    one, two = (load_plan(tmp_path / name) for name in ("one.json", "two.json"))
    assert np.array_equal(one.placement, two.placement)


# ---- compare ---------------------------------------------------------------------------------------------------------


def test_compare_prints_one_row_per_planner(run, problem):
    Path("deep").mkdir()
    result = run("compare", problem, "--budget", "1s", "--out", "deep/out")
    assert result.code == 0
    rows = result.out.splitlines()
    assert all(any(name in row for row in rows) for name in planners.available())
    assert any(row.startswith("| > ") for row in rows)
    assert_80_columns(result.out)
    assert "wrote deep/out/plan.json and deep/out/trace.json" in result.err
    assert load_plan("deep/out/plan.json").value <= 4.0
    assert json.loads(Path("deep/out/trace.json").read_text())["traceEvents"]


def test_compare_several_models(run, problem, tmp_path):
    args = ("compare", problem, problem, "--planners", "single,heft", "--evaluations", "5")
    result = run(*args, "--plot", tmp_path / "a.svg")
    assert result.code == 0
    assert result.out.count("No plan is below") == 2
    assert "Over 2 problems" in result.out
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    facts = json.loads(run(*args, "--json").out)
    assert [entry["best"] for entry in facts["comparisons"]] == ["single", "single"]
    refused = run(*args, "--out", tmp_path / "new")
    assert refused.code == 2
    assert "name one model" in refused.err
    assert not (tmp_path / "new").exists()


def test_compare_marks_what_one_device_beats(run, tmp_path):
    """A slow link: splitting the work at random never pays."""
    build = GraphBuilder("wide")
    tensors = [build.op(f"op{i}", kind="op", outputs=[1e9])[0] for i in range(8)]
    build.op("sum", kind="op", inputs=tensors)
    cluster = full_mesh([Device("a"), Device("b")], bandwidth=1e6)
    save_problem(Problem(build.graph(), cluster, Costs.create(np.ones((9, 2)))), tmp_path / "wide.json")
    result = run("compare", "wide.json", "--planners", "random,single", "--evaluations", "3")
    assert "| * random " in result.out
    assert "| > single " in result.out
    assert "* one device alone is better: 9.00 s" in result.out
    facts = json.loads(run("compare", "wide.json", "--planners", "random,single", "--evaluations", "3", "--json").out)
    assert facts["best"] == "single"
    assert facts["one_device"] == 9.0
    assert [(row["planner"], row["beaten_by_one_device"]) for row in facts["planners"]] == [
        ("single", False),
        ("random", True),
    ]


def test_the_rows_of_a_comparison(run, tmp_path):
    """Three ops of 1 s on two devices: 2 s at best, 1.5 s by the bound, 3 s on one device, 4 s with a slow one."""
    build = GraphBuilder("three")
    for name in "xyz":
        build.op(name, kind="op", resident=10.0)
    cluster = full_mesh([Device("a", memory=40.0), Device("b")], bandwidth=1.0)
    problem = Problem(build.graph(), cluster, Costs.create([[1.0, 1.0]] * 3))
    plans = [
        Plan(problem, np.array(row, np.int32), None, value, 1.5, name, "0", seconds=0.25, evaluations=1234)
        for row, value, name in [([0, 0, 1], 2.0, "split"), ([0, 0, 0], 3.0, "one"), ([1, 1, 1], 4.0, "slow")]
    ]
    outcomes = [Outcome(plan.planner, plan) for plan in plans] + [Outcome("shy", reason="does not apply")]
    lines = describe_comparison(outcomes, one_device=3.0).splitlines()
    assert lines[0] == "three on cluster: latency of 3 ops, 2 devices. No plan is below 1.50 s."
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")][2:]
    assert rows == [
        ["> split", "2.00 s", "25.0%", "a 50.0%", "0.2", "1,234"],
        ["one", "3.00 s", "50.0%", "a 75.0%", "0.2", "1,234"],
        ["* slow", "4.00 s", "62.5%", "a 0%", "0.2", "1,234"],
        ["- shy", "-", "-", "-", "-", "-"],
    ]
    assert lines[-3:] == ["> the best", "* one device alone is better: 3.00 s", "- shy: does not apply"]


def test_what_is_as_good_as_the_best_is_told_from_it():
    """Two of the three are tied."""
    graph = GraphBuilder("one")
    graph.op("x", kind="op")
    problem = Problem(graph.graph(), full_mesh([Device("a"), Device("b")], 1.0), Costs.create([[1.0, 2.0]]))
    plans = [Plan(problem, np.array([0], np.int32), None, value, 1.0, name, "0") for value, name in
             [(1.0, "first"), (1.0, "second"), (1.0004, "third")]]  # fmt: skip
    told = describe_comparison([Outcome(plan.planner, plan) for plan in plans], one_device=9.0)
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in told.splitlines() if line.startswith("|")][2:]
    assert rows == [["> first", "1.00 s", "optimal"], ["= second", "1.00 s", "optimal"], ["third", "1.00 s", "<0.1%"]]
    assert told.endswith("\n\n> the best\n= as good as the best")


def test_the_fullest_device_of_unlimited_ones_is_told_in_bytes():
    graph = GraphBuilder("one")
    graph.op("x", kind="op", resident=2048.0)
    problem = Problem(graph.graph(), full_mesh([Device("a"), Device("b")], 1.0), Costs.create([[1.0, 1.0]]))
    assert fullest_device(simulate(problem, [1])) == "b 2.00 KiB"


def test_what_is_read_is_not_overwritten(run, plan, problem):
    for args in (
        ["plan", problem, "--out", problem],
        ["compare", problem, "--plot", problem],
        ["report", plan, "-o", plan],
        ["export", plan, "--to", "trace", "--out", plan],
        ["verify", plan, "alexnet", "--update", plan],
    ):
        before = Path(args[1]).read_bytes()
        result = run(*args)
        assert result.code == 2
        assert "this is what is read, which would be overwritten" in result.err
        assert Path(args[1]).read_bytes() == before


def test_what_a_folder_would_get_is_not_read(run, problem, tmp_path):
    (tmp_path / "best").mkdir()
    read = problem.rename(tmp_path / "best" / "plan.json")
    before = read.read_bytes()
    result = run("compare", read, "--planners", "heft", "--out", "best")
    assert result.code == 2
    assert "--out best/plan.json: this is what is read" in result.err
    assert read.read_bytes() == before


def test_a_profile_that_a_cluster_names_is_not_overwritten(run, tmp_path):
    time = OpTime("op", "float32", 1e9, 1e6, 1e-3, 0.0, 0.0)
    save_profile(Profile("mine", "cpu", "hardware", "library", "2026-11-18", {"s": time}), tmp_path / "mine.json")
    (tmp_path / "box.yaml").write_text(
        "name: box\ndevices: [{name: cpu, kind: cpu, flops: {default: 1TFLOPS}, profile: mine.json}]\n"
    )
    before = (tmp_path / "mine.json").read_bytes()
    result = run("plan", "squeezenet", "--cluster", "box.yaml", "--planner", "single", "--out", "mine.json")
    assert result.code == 2
    assert "--out mine.json: this is what is read" in result.err
    assert (tmp_path / "mine.json").read_bytes() == before


def test_compare_makes_no_folder_for_a_wrong_request(run, problem, tmp_path):
    for wrong in (["--planners", "magic"], ["--budget", "soon"], ["--evaluations", "0"]):
        assert run("compare", problem, "--out", "new", *wrong).code == 2
        assert not (tmp_path / "new").exists()


def test_compare_says_why_a_planner_does_not_apply(run, problem):
    result = run("compare", problem, "--planners", "heft,random", "--objective", "throughput", "--budget", "1s")
    assert "- heft: plans for " in result.out
    assert result.code == 0


def test_compare_without_any_feasible_plan(run, problem):
    """A device holds one op, and there are four: memory is enough in sum only for two."""
    result = run("compare", problem, "--max-memory", "gpu=5,cpu=5", "--planners", "single,random", "--budget", "1s")
    assert result.code == 3
    assert result.err.startswith("error: ")


def test_values_without_limits_are_null(run, tmp_path):
    build = GraphBuilder("one")
    build.op("x", kind="op")
    save_problem(Problem(build.graph(), Cluster((Device("a"),)), Costs.create([[0.0]])), tmp_path / "one.json")
    facts = json.loads(run("compare", "one.json", "--budget", "1s", "--json").out, parse_constant=pytest.fail)
    assert facts["planners"][0]["devices"]["a"]["memory"] is None
    for command in ("simulate", "explain"):
        run("plan", "one.json", "--planner", "single")
        assert run(command, "plan.json").code == 0


# ---- simulate, explain, export ---------------------------------------------------------------------------------------


def test_simulate(run, plan):
    result = run("simulate", plan)
    assert "Feasible" in result.out
    assert_80_columns(result.out)
    facts = json.loads(run("simulate", plan, "--json").out)
    assert facts["feasible"] is True
    assert facts["value"] == facts["makespan"] == load_plan(plan).value
    one_by_one = json.loads(run("simulate", plan, "--execution", "concurrency=sequential", "--json").out)
    assert one_by_one["value"] == sum(device["busy"] for device in one_by_one["devices"].values()) == 4.0
    assert one_by_one["lower_bound"] <= 4.0


def test_simulate_says_what_other_settings_break(run, tmp_path):
    """A tensor of 90 bytes beside 20 resident ones: too much for a live run, not for a static count."""
    build = GraphBuilder("big")
    build.op("y", kind="op", inputs=build.op("x", kind="op", outputs=[90.0], resident=20.0))
    problem = Problem(
        build.graph(),
        Cluster((Device("a", memory=100.0),)),
        Costs.create([[1.0]] * 2),
        execution=Execution(memory="static"),
    )
    save_problem(problem, tmp_path / "big.json")
    assert run("plan", "big.json", "--planner", "single").code == 0
    result = run("simulate", "plan.json", "--execution", "memory=live")
    assert (result.code, result.out) == (3, "")
    assert "a needs 110 B of memory and has 100 B" in result.err


def test_explain(run, plan):
    result = run("explain", plan)
    assert result.code == 0
    assert "| compute " in result.out
    assert_80_columns(result.out)
    facts = json.loads(run("explain", plan, "--json").out)
    assert sum(facts["by_kind"].values()) == pytest.approx(facts["value"])
    assert facts["chain"][0]["op"] == "a"
    assert facts["runs"][0]["first"] == "a"
    assert "What limits it: Compute takes " in result.out
    assert max(facts["bound_parts"].values()) <= facts["value"]
    assert facts["bound_made_of"].keys() == facts["bound_parts"].keys()
    assert "| bound " in result.out


def test_a_log_is_told_now_and_then(capsys, monkeypatch):
    """Where stderr is no terminal: a line every half minute, and none of what takes less."""
    clock = iter([0.0, 10.0, 31.0, 31.0, 60.0, 62.0, 62.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with terminal.planning() as show:
        for seconds in (10.0, 31.0, 60.0, 62.0):
            show(Progress("auto", seconds, 5, 0.4, 0.1))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    for line, when in zip(lines, ("31.0 s", "62.0 s"), strict=True):
        assert all(part in line for part in ("auto", when, "best 400 ms", "bound 100 ms", "gap 75.0%"))


def test_what_gains_most_is_said():
    """In a sentence below the table: what gains a hundredth or more, and that the rest does not."""
    timeline = simulate(diamond(), np.zeros(4, np.int32))
    made = Plan(diamond(), np.zeros(4, np.int32), None, timeline.value, 1.0, "by-hand", "0")
    rows = [("nothing", 4.0), ("1 GiB more: gpu", 4.0), ("one more like gpu", 3.0), ("links twice as fast", 3.8)]
    told = describe_what_if(made, [WhatIf(change, 4.0, value) for change, value in rows])
    last = " ".join(told.split("\n\n")[-1].split())
    assert last == (
        "What gains most: one more like gpu (25.0% less) and links twice as fast (5.0% less); "
        "all else gains less than 1%."
    )
    many = [*rows, ("1 GiB more: cpu", 3.7), ("one more like cpu", 3.6), ("two more", 2.0)]
    told = " ".join(describe_what_if(made, [WhatIf(change, 4.0, value) for change, value in many]).split())
    assert all(f"({share} less)" in told for share in ("50.0%", "25.0%", "10.0%", "7.5%", "5.0%"))
    assert "others" not in told
    told = describe_what_if(made, [WhatIf(change, 4.0, 4.0) for change, _ in rows])
    assert told.endswith("None of these changes gains 1%: what limits the plan is elsewhere.")


def test_one_reason_for_several_devices_is_said_once():
    timeline = simulate(diamond(), np.zeros(4, np.int32))
    made = Plan(diamond(), np.zeros(4, np.int32), None, timeline.value, 1.0, "by-hand", "0")
    moves = [Move(name, 1, 1.0, None, "it is pinned", False) for name in "abc"]
    moves.append(Move("gpu", 1, 1.0, 4.0, "", True))
    assert describe_moves(made, "x", moves).endswith("\n\nNot on a, b and c: it is pinned.")


def test_explain_what_if(run, plan):
    result = run("explain", plan, "--what-if", "--budget", "0.1s")
    assert result.code == 0
    assert_80_columns(result.out)
    assert "links twice as fast" in result.out
    facts = json.loads(run("explain", plan, "--what-if", "--budget", "0.1s", "--json").out)
    rows = {row["change"]: row for row in facts["what_if"]}
    assert rows["links twice as fast"]["planned"] <= rows["links twice as fast"]["same"] <= rows["nothing"]["same"]


def test_check(run, plan):
    result = run("check", plan)
    assert result.code == 0
    assert_80_columns(result.out)
    facts = json.loads(run("check", plan, "--json").out)
    assert {finding["verdict"] for finding in facts["findings"]} <= {"holds", "on trust"}
    assert {"placement", "value"} <= {finding["claim"] for finding in facts["findings"]}
    assert re.search(r"\| memory of gpu +\| +limit 100 B \| +[\d.]+ B \| holds ", result.out)


def test_explain_a_pipeline(run, problem):
    run("plan", problem, "--planner", "random", "--objective", "throughput")
    shown = run("explain", "plan.json").out
    assert "sets the pace" in shown
    value = load_plan("plan.json").value
    assert f"time per sample (throughput) {value:.2f} s = {1 / value:.3g} samples/s" in " ".join(shown.split())


def test_zoo(run):
    result = run("zoo")
    assert_80_columns(result.out)
    assert "| llama-3-8b           |  1,544 |     8.03 G | 7.83 TFLOP |          15.0 GiB |" in result.out
    assert "\ndgx-h100: gpu0 to gpu7 each 73.6 GiB, cpu 1.86 TiB.\n" in result.out
    facts = json.loads(run("zoo", "--json").out)
    assert [row["model"] for row in facts["models"]] == zoo.names()
    assert {row["model"]: row["parameters"] for row in facts["models"]}["inception-v3"] == 23_834_568
    assert {row["box"] for row in facts["boxes"]} == set(bundled_boxes())


def test_a_model_is_not_overwritten_by_its_graph(run, tmp_path):
    (tmp_path / "m.xml").write_text("<net/>")
    result = run("import", "m.xml", "--out", tmp_path / "." / "m.xml")
    assert (result.code, (tmp_path / "m.xml").read_text()) == (2, "<net/>")
    assert "this is what is read" in result.err


@pytest.mark.parametrize("size", ["0", "-1", "x", "1.5", "2147483648", "9" * 5000, "²"])
def test_sizes_of_dimensions_are_whole_numbers(run, size):
    result = run("import", "m.onnx", "--out", "g.json", "--dim", f"batch={size}")
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert "must be a whole number above zero, and below 2^31" in result.err


def test_only_files_that_leave_sizes_open_take_them(run, tmp_path):
    (tmp_path / "m.pt2").touch()
    for command in (["import", "m.pt2", "--out", "g.json"], ["profile", "m.pt2"], ["profile", "alexnet"]):
        result = run(*command, "--dim", "batch=1")
        assert result.code == 2
        assert "only .onnx and .xml files have sizes that are left open" in result.err


def test_a_profile_without_any_op_says_so():
    facts = {"model": "m", "profile": "p", "hardware": "h", "library": "l", "ops": 3, "wanted": 2, "measured": 0}
    text = describe_profile(facts | {"spread": None, "sum_of_ops": 0, "whole": None, "error": None})
    assert "Nothing was measured" in text
    assert "Kept" not in text


def test_few_parameters_are_counted_without_a_gap():
    facts = {"model": "m", "ops": 5, "parameters": 314, "flops": 1.0, "bytes": 8.0, "state_bytes": 0.0}
    assert "314 parameters" in describe_import(facts)


@pytest.mark.parametrize("op", ["a", "d=e", ODD])
def test_explain_one_op(run, plan, op):
    result = run("explain", plan, "--op", op)
    assert "as planned" in result.out
    assert_80_columns(result.out)
    assert "\x1b" not in result.out
    moves = json.loads(run("explain", plan, "--op", op, "--json").out)["moves"]
    assert [move["device"] for move in moves] == ["gpu", "cpu"]
    assert sum(move["is_current"] for move in moves) == 1


def test_export_writes_nothing_but_the_trace_to_stdout(run, plan):
    result = run("export", plan, "--to", "trace")
    assert json.loads(result.out)["traceEvents"]
    assert result.err == ""
    assert run("export", plan, "--to", "trace", "--out", "trace.json").err == "wrote trace.json\n"
    assert Path("trace.json").read_text() == result.out
    result = run("export", plan, "--to", "trace", "--out", "no/folder.json")
    assert (result.code, result.err) == (2, "error: --out no/folder.json: there is no folder no\n")


# ---- planners --------------------------------------------------------------------------------------------------------


def test_planners(run, problem):
    result = run("planners")
    assert all(f"{name}\n" in result.out for name in planners.available())
    assert_80_columns(result.out)
    assert "Applies." in run("planners", problem).out
    assert "Does not apply: plans for" in run("planners", problem, "--objective", "throughput").out
    rows = json.loads(run("planners", problem, "--json").out)["planners"]
    assert {row["planner"] for row in rows} == set(planners.available())
    assert all(row["applies"] for row in rows if row["planner"] in ("single", "heft"))


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_absurd_names_times_and_sizes_keep_to_80_columns(run, objective):
    build = GraphBuilder("ネット" * 60 + " of words")
    names = ["a" * 500, "名前" * 50, "e\u0301" * 90, "|" * 60, ""]
    (tensor,) = build.op(names[0], kind="op", outputs=[LARGEST], resident=LARGEST, op_modules="模" * 90)
    for name in names[1:]:
        (tensor,) = build.op(name, kind="op", inputs=[tensor], outputs=[LARGEST], scratch=LARGEST)
    cluster = full_mesh([Device(f"{'設備' * 40}{i}") for i in range(3)], bandwidth=1 / LARGEST, name="箱" * 100)
    pins = {names[0]: cluster.device_names[1]}
    problem = Problem(build.graph(), cluster, Costs.create(np.full((5, 3), LARGEST)), objective, pins=pins)
    save_problem(problem, "absurd.json")
    for command in (
        ["plan", "absurd.json", "--planner", "single"],
        ["compare", "absurd.json", "--planners", "single,random", "--evaluations", "9"],
        ["simulate", "plan.json"],
        ["explain", "plan.json"],
        ["explain", "plan.json", "--op", ""],
    ):
        result = run(*command)
        assert result.code == 0, result.err
        assert_80_columns(result.out)
        assert re.search(r"e\+\d\d s", result.out)


# ---- what is wrong ---------------------------------------------------------------------------------------------------

WRONG = [
    (["plan", "nothing-like-it"], 2, "neither a file nor a bundled model"),
    (["plan", "llama-3-8b"], 2, "needs a cluster"),
    (["plan", "llama-3-8b", "--cluster", "nowhere"], 2, "nowhere"),
    (["plan", "diamond.json", "--cluster", "two-gpus-one-host"], 2, "already has a cluster"),
    (["plan", "diamond.json", "--budget", "5 bananas"], 2, "--budget: '5 bananas'"),
    (["plan", "diamond.json", "--budget", "0s"], 2, "--budget: it must be above zero"),
    (["plan", "diamond.json", "--budget", "-3s"], 2, "zero or more"),
    (["plan", "diamond.json", "--evaluations", "0"], 2, "--evaluations: it must be above zero"),
    (["plan", "diamond.json", "--planner", "magic"], 2, "magic"),
    (["plan", "diamond.json", "--planner", "heft", "--objective", "throughput"], 4, "not throughput"),
    (["plan", "diamond.json", "--planner", "random", "-o", "samples=many"], 2, "samples"),
    (["plan", "diamond.json", "--planner", "random", "-o", "samples"], 2, "key=value"),
    (["plan", "diamond.json", "--planner", "random", "-o", "depth=2"], 2, "no option 'depth'"),
    (["plan", "diamond.json", "--planner", "random", "-o", "samples=-5"], 2, "zero or more"),
    (["plan", "diamond.json", "--pin", "a"], 2, "NAME=VALUE"),
    (["plan", "diamond.json", "--pin", "=gpu"], 2, "no op named ''"),
    (["plan", "diamond.json", "--pin", "a=gpu", "--pin", "a=cpu"], 2, "--pin: 'a' is given twice: gpu and cpu"),
    (["plan", "diamond.json", "--max-memory", "gpu=1KiB,gpu=2KiB"], 2, "--max-memory: 'gpu' is given twice"),
    (["plan", "diamond.json", "--execution", "speed=high"], 2, "there is no such setting; there are concurrency"),
    (["plan", "diamond.json", "--execution", "prefetch=many"], 2, "--execution prefetch = 'many'"),
    (["plan", "diamond.json", "--execution", "prefetch=3,"], 2, "--execution '': write it like NAME=VALUE"),
    (["plan", "diamond.json", "--execution", "prefetch=3,prefetch=4"], 2, "'prefetch' is given twice: 3 and 4"),
    (["plan", "diamond.json", "--execution", "sends=letters"], 2, "sends: must be one of tensor, edge"),
    (["plan", "diamond.json", "--pin", "z=gpu"], 2, "no op named 'z'"),
    (["plan", "diamond.json", "--pin", "a=tpu"], 2, "tpu"),
    (["plan", "diamond.json", "--forbid", "tpu"], 2, "tpu"),
    (["plan", "diamond.json", "--forbid", "gpu", "--forbid", "cpu"], 2, "may run on no device"),
    (["plan", "diamond.json", "--max-memory", "gpu"], 2, "NAME=VALUE"),
    (["plan", "diamond.json", "--max-memory", "gpu=lots"], 2, "--max-memory gpu=lots"),
    (["plan", "diamond.json", "--max-memory", "gpu=1,cpu=1", "--planner", "heft"], 3, "fit"),
    (["plan", "diamond.json", "--max-devices", "0"], 2, "from 1 to"),
    (["plan", "diamond.json", "--out", "no/such/folder/plan.json"], 2, "no folder"),
    (["plan", "diamond.json", "--execution", "concurrency=sequential", "--objective", "throughput"], 2, "sequential"),
    (["compare", "diamond.json", "--planners", "heft,magic"], 2, "magic"),
    (["compare", "diamond.json", "--planners", ""], 2, "there is no planner ''"),
    (["plan", "diamond.json", "--planner", ""], 2, "there is no planner ''"),
    (["compare", "diamond.json", "--out", "diamond.json"], 2, "would be overwritten"),
    (["compare", "diamond.json", "--out", "taken"], 2, "plan.json: it is a folder"),
    (["plan", "diamond.json", "--out", "."], 2, "it is a folder"),
    (["plan", "diamond.json", "--out", "/dev/null"], 2, "it is no regular file"),
    (["plan", "diamond.json", "--planner", "random", "-o", "samples=1", "-o", "samples=2"], 2, "given twice"),
    (["plan", "diamond.json", "--max-memory", "gpu=1KiB,0=2KiB"], 2, "names a device twice"),
    (["plan", "diamond.json", "--seed", "-1"], 2, "zero or more"),
    (["simulate", "missing.json"], 2, "missing.json"),
    (["simulate", "."], 2, "directory"),
    (["simulate", "diamond.json"], 2, "diamond.json"),
    (["plan", "diamond.json", "--out", "-"], 2, "--out -: name a file"),
    (["compare", "diamond.json", "--out", "no/where"], 2, "there is no folder no"),
    (["compare", "diamond.json", "--out", "best.json"], 2, "--out best.json: name a folder"),
    (["compare", "diamond.json", "--out", "-"], 2, "--out -: name a folder"),
    (["explain", "plan.json", "--op", "a", "--what-if"], 2, "ask one at a time"),
    (["explain", "noise"], 2, "noise"),
    (["export", "noise", "--to", "trace"], 2, "noise"),
    (["simulate", "two\nlines\x1b[2J"], 2, r"two\nlines\x1b[2J: cannot be read"),
    (["planners", "noise"], 2, "noise"),
]


@pytest.mark.parametrize(
    ("args", "code", "message"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_an_error_is_one_line_with_an_exit_code(run, problem, args, code, message):
    Path("noise").write_bytes(b"\xff\x00 not a file of ours")
    Path("taken/plan.json").mkdir(parents=True)
    result = run(*args)
    assert result.code == code
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert message in result.err
    assert not Path("plan.json").exists()


@pytest.mark.parametrize(
    "args",
    [
        ["fly"],
        ["plan"],
        ["plan", "x", "--objective", "joy"],
        ["plan", "x", "--seed", "one"],
        ["export", "x"],
        ["export", "x", "--to", "cake"],
    ],
)
def test_wrong_usage_exits_with_2(run, args):
    result = run(*args)
    assert result.code == 2
    assert result.out == ""
    assert "rror" in result.err


def test_an_unknown_op_is_named(run, plan):
    result = run("explain", plan, "--op", "nope")
    assert (result.code, result.err) == (2, "error: graph 'diamond' has no op named 'nope'\n")


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def endless(request, monkeypatch) -> None:
    """A planner during which the user presses Ctrl-C, or the system asks the process to end."""
    monkeypatch.setattr(planners, "_registered", planners.available())

    @planners.planner("endless")
    def endless(problem: Problem, ctx: Context) -> None:
        """Never done."""
        ctx.evaluate(np.zeros(problem.num_ops, np.int32))
        if problem.graph.name == "diamond":
            os.kill(os.getpid(), request.param)
            while not ctx.should_stop():
                pass


def test_ctrl_c_keeps_the_best_plan_so_far(run, problem, endless):
    result = run("plan", problem, "--planner", "endless", "--budget", "5min")
    assert result.code == 130
    assert result.out.startswith("diamond on box: latency 4.00 s by endless.")
    assert result.err == "wrote plan.json\ninterrupted: this is the best plan so far\n"
    assert load_plan("plan.json").stopped == "interrupted"


def test_ctrl_c_ends_a_comparison_with_what_there_is(run, problem, endless):
    result = run("compare", problem, "--planners", "endless,single", "--budget", "5min", "--out", ".")
    assert result.code == 130
    assert "| > endless " in result.out
    assert "- single: interrupted" in result.out
    assert load_plan("plan.json").planner == "endless"


def test_ctrl_c_at_any_other_time_is_told_too(run, monkeypatch):
    def pressed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("placewise.files.load_problem", pressed)
    result = run("plan", "inception-v3", "--cluster", "four-gpus")
    assert (result.code, result.out, result.err) == (130, "", "interrupted: there is no result yet\n")


def test_ctrl_c_within_a_callback_is_not_lost(run, monkeypatch):
    """Compiled code that calls back, as LLVM does, swallows what is raised there."""

    def pressed(*_, **__):
        ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGINT))()
        time.sleep(20)

    monkeypatch.setattr("placewise.files.load_problem", pressed)
    result = run("plan", "inception-v3", "--cluster", "four-gpus")
    assert (result.code, result.out, result.err) == (130, "", "interrupted: there is no result yet\n")


@pytest.mark.parametrize(
    ("called", "command"),
    [
        ("placewise.files.import_model", ["import", "m", "--out", "g.json"]),
        ("placewise.files.load_problem", ["plan", "m"]),
        ("placewise.machine.describe_machine", ["devices"]),
        ("placewise.measure.opened", ["profile", "m"]),
    ],
)
@pytest.mark.parametrize("ends", [RuntimeError("torch says: report this"), None])
def test_ctrl_c_that_a_library_swallows_is_not_lost(run, monkeypatch, called, command, ends):
    def pressed(*_, **__):
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(20)
        if ends:
            raise ends
        return contextlib.nullcontext(SimpleNamespace(graph=None))

    monkeypatch.setattr(called, pressed)
    monkeypatch.setattr("placewise.measure.profile", lambda *_, **__: None)
    monkeypatch.setattr("placewise.measure.summary", lambda *_: None)
    result = run(*command)
    said = "what was measured is kept; run it again to go on" if command[0] == "profile" else "there is no result yet"
    assert (result.code, result.out, result.err) == (130, "", f"interrupted: {said}\n")


def test_ctrl_c_before_there_is_a_plan_is_told(run, problem, monkeypatch):
    monkeypatch.setattr(planners, "_registered", planners.available())

    @planners.planner("idle")
    def idle(problem: Problem, ctx: Context) -> None:
        """Evaluates nothing."""
        os.kill(os.getpid(), signal.SIGINT)

    result = run("plan", problem, "--planner", "idle")
    assert (result.code, result.out, result.err) == (130, "", "interrupted: there is no result yet\n")
    result = run("compare", problem, "--planners", "idle,single")
    assert (result.code, result.err) == (130, "interrupted: there is no plan yet\n")
    assert "- idle: interrupted" in result.out


def test_what_a_planner_prints_is_talk(run, problem, monkeypatch):
    monkeypatch.setattr(planners, "_registered", planners.available())

    @planners.planner("chatty")
    def chatty(problem: Problem, ctx: Context) -> list[int]:
        """Prints."""
        print("thinking")
        return [0] * problem.num_ops

    result = run("plan", problem, "--planner", "chatty", "--json")
    assert json.loads(result.out)["value"] == 4.0
    assert "thinking" in result.err
    assert json.loads(run("compare", problem, "--planners", "chatty", "--json").out)["best"] == "chatty"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_impatient_user_still_gets_the_plan(run, problem, monkeypatch, number):
    """A signal while the plan is being written waits until it is."""
    save = Plan.save

    def pressed(plan, path):
        os.kill(os.getpid(), number)
        save(plan, path)

    monkeypatch.setattr(Plan, "save", pressed)
    result = run("plan", problem, "--planner", "single")
    assert (result.code, result.err) == (130, "wrote plan.json\ninterrupted: but all is written\n")
    assert load_plan("plan.json").stopped == "finished"
    result = run("compare", problem, "--planners", "single", "--out", ".")
    assert result.code == 130
    assert "| > single " in result.out


# ---- as a process ----------------------------------------------------------------------------------------------------


def placewise(*args: str | Path, **settings) -> subprocess.Popen:
    command = [sys.executable, "-c", "from placewise.cli import main; main()", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings)


def test_a_reader_that_goes_away_is_no_error(plan):
    process = placewise("export", plan, "--to", "trace")
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert without_compiling(err.decode()) == ""


@pytest.mark.parametrize("args", [["zoo"], ["engines"], ["simulate", "plan.json"], ["--help"], ["--version"]])
def test_results_that_find_no_room_are_told_in_one_line(plan, args):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "placewise", *args]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment, check=False)
    assert done.returncode == 1
    assert without_compiling(done.stderr.decode()) == "error: No space left on device\n"


def test_ctrl_c_during_imports_is_told_in_one_line():
    code = """if True:
        import runpy, sys
        class Pressed:
            def find_spec(self, name, *_):
                if name == "typer":
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Pressed())
        runpy.run_module("placewise", run_name="__main__")"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"interrupted: there is no result yet\n")


@pytest.mark.parametrize(
    "args",
    [
        ["plan", "squeezenet", "--cluster", "two-gpus-one-host", "--planner", "placeto"],
        ["train", "placeto", "squeezenet", "--cluster", "two-gpus-one-host", "--evaluations", "10"],
        ["verify", "plan.json", "squeezenet"],
    ],
    ids=lambda args: args[0],
)
def test_without_torch_a_command_says_what_to_install(plan, args):
    code = """if True:
        import sys
        class Hidden:
            def find_spec(self, name, *_):
                if name == "torch":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Hidden())
        import importlib.util
        usual = importlib.util.find_spec
        importlib.util.find_spec = lambda name, package=None: None if name == "torch" else usual(name, package)
        from placewise.cli import main
        main()"""
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    assert re.fullmatch(r"error: .*pip install 'placewise\[(learned|torch)\]'\n", without_compiling(done.stderr))


def test_a_torch_that_cannot_be_imported_is_no_crash(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no libtorch')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    task = ["alexnet", "--cluster", "placeto-2"]
    for planner in ("placeto", "colocrl"):
        command = placewise("plan", *task, "--planner", planner, cwd=tmp_path, env=environment)
        assert "error: torch cannot be imported (no libtorch): pip" in command.communicate(timeout=60)[1].decode()
        assert command.returncode == 4
    command = placewise("compare", *task, "--planners", "placeto,heft", cwd=tmp_path, env=environment)
    assert "- placeto: torch cannot be imported (no libtorch)" in command.communicate(timeout=60)[0].decode()
    assert command.returncode == 0


def test_a_terminal_without_unicode_is_no_error(plan):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    out, err = placewise("explain", plan, "--op", ODD, env=environment).communicate(timeout=60)
    assert without_compiling(err.decode()) == ""
    assert b"as planned" in out


def test_signals_without_end_do_not_change_the_exit_code(problem, tmp_path):
    """Even while the interpreter is ending, when signals have their usual effect again."""
    process = placewise("plan", problem, "--planner", "random", "-o", "samples=1000000000", cwd=tmp_path)
    began = time.monotonic()
    while process.poll() is None and time.monotonic() < began + 60:
        if time.monotonic() > began + 3:
            process.send_signal(signal.SIGINT)
        time.sleep(0.002)
    err = process.communicate()[1].decode()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert without_compiling(err).count("interrupted: ") == 1


@pytest.mark.parametrize("closed", ["2>&-", ">&-", ">&- 2>&-"])
def test_closed_streams_are_no_error(problem, tmp_path, closed):
    code = "from placewise.cli import main; main()"
    command = f"{sys.executable} -c '{code}' plan {problem} --planner single {closed}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"wrote" not in done.stdout
    assert load_plan(tmp_path / "plan.json").planner == "single"


def test_a_damaged_cache_is_told_in_one_line(problem, tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    args = ("plan", problem, "--planner", "single", "--objective", "throughput")
    placewise(*args, env=environment, cwd=tmp_path).communicate(timeout=120)
    for file in (tmp_path / "cache").rglob("*.nb?"):
        file.write_bytes(file.read_bytes()[:20])
    process = placewise(*args, env=environment, cwd=tmp_path)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" not in err.decode()
    assert without_compiling(err.decode()).startswith("error: compiled code cannot be kept on disk, or what is kept")


def test_progress_is_shown_on_a_terminal_and_stays_off_stdout(problem, tmp_path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from placewise.cli import main; main()", "plan", problem, "--planner", "random"]
    command += ["-o", "samples=1000000000", "--budget", "2s", "--json"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "50"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, cwd=tmp_path, env=environment) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 1024)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
        out = process.stdout.read()
    os.close(ours)
    assert json.loads(out)["planner"] == "random"
    assert "…".encode() in shown  # what has no room is cut off at the end,
    assert shown.count(b"\x1b[1A") == 1  # so that there is one line, above which the cursor goes only in the end
    plain = b" ".join(re.sub(rb"\x1b\[[\d;?]*[A-Za-z]", b"", shown).split())  # no colours, no line breaks
    assert re.search(rb"best \S+ \S+ bound \S+ \S+ gap <?[\d.]+%", plain)
    assert b"wrote plan.json" in shown
