"""`placewise train`: a training that is killed and goes on equals one that was not; logs, signals, errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from placewise import Budget, Execution, driver, plan
from placewise.driver import Context
from placewise.errors import InvalidInput, Unsupported
from placewise.learned import checkpoint, one_graph, training
from placewise.learned.reinforce import update
from placewise.planners import get
from placewise.report.table import describe_training
from problems import problem_of

SMALL = {
    "placeto": {"width": 4, "rounds": 2, "batch": 2},
    "colocrl": {"hidden": 8, "samples": 4},
    "hierarchical": {"hidden": 8, "samples": 2, "placements": 2},
    "hsdag": {"hidden": 8, "samples": 4},
}


def small(ops=5):
    seconds = np.random.default_rng(ops).uniform(1.0, 3.0, (ops, 2))
    return problem_of(seconds, [(i, i + 1) for i in range(ops - 1)] + [(0, i) for i in range(2, ops)])


def problems_of(method):
    return [small(5), small(6)] if method == "placeto" else [small()]


def train(method, out, evaluations=150, **given):
    given = {"options": SMALL[method], "seed": 4} | given
    return training.train(method, given.pop("problems", problems_of(method)), out, evaluations=evaluations, **given)


CODE = """
import os, signal, sys
import test_learned_training as t
from placewise.learned import training
training._SAVE_EVERY = training._REPORT_EVERY = 0.0
method, out, end = sys.argv[1:]
def watch(now):
    if now.updates == 4:
        os.kill(os.getpid(), getattr(signal, end))
found = t.train(method, out, on_progress=watch)
print(found.finished, found.updates)
"""


def in_a_process(method, out, end):
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", CODE, method, str(out), end]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)


def contents(path):
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return header["__metadata__"], {key: value.tolist() for key, value in load_file(path).items()}


@pytest.mark.parametrize("method", training.METHODS)
def test_killed_and_gone_on_is_the_same_as_straight_through(method, tmp_path):
    killed, straight = tmp_path / "killed.safetensors", tmp_path / "straight.safetensors"
    assert in_a_process(method, killed, "SIGKILL").returncode == -signal.SIGKILL
    assert checkpoint.load(killed, method).facts["learner"]["updates"] == 4
    gone_on, whole = train(method, killed, resume=True), train(method, straight)
    for what in ("updates", "evaluations", "mean", "best"):
        assert getattr(gone_on, what) == getattr(whole, what)
    again = train(method, killed, resume=True)  # there is nothing left to do
    assert (again.updates, again.mean, again.best) == (whole.updates, whole.mean, whole.best)
    assert whole.updates > 6
    assert whole.evaluations == 150
    assert contents(killed) == contents(straight)


def test_ctrl_c_keeps_what_was_learned(tmp_path):
    out = tmp_path / "policy.safetensors"
    done = in_a_process("placeto", out, "SIGINT")
    assert done.stdout.split() == ["False", "4"]
    assert checkpoint.load(out, "placeto").facts["learner"]["updates"] == 4
    assert train("placeto", out, resume=True).finished


def test_a_trained_policy_can_be_planned_with(tmp_path):
    out = tmp_path / "policy.safetensors"
    train("placeto", out)
    assert plan(small(7), "placeto", options={"policy": str(out)}).value > 0
    more = tmp_path / "more.safetensors"
    train("placeto", more, policy=out, problems=[small(7)])
    assert checkpoint.load(more, "placeto").facts["problems"] == [small(7).digest]


def test_without_problems_it_learns_from_families(tmp_path):
    found = train("placeto", tmp_path / "policy.safetensors", problems=[], evaluations=60)
    assert found.relative
    assert found.best < 2.0
    tasks = [training.Family([], 4, {**_options()}, 60).task(update) for update in (3, 3, 4)]
    assert tasks[0].groups.problem.digest == tasks[1].groups.problem.digest != tasks[2].groups.problem.digest


def test_too_few_evaluations_for_an_update_are_told(tmp_path):
    for evaluations, told in ((2, "placeto: nothing is learned yet; 2 evaluations are"), (12, "placeto: 1 update, ")):
        found = train("placeto", tmp_path / f"{evaluations}.safetensors", evaluations=evaluations, problems=[small()])
        assert describe_training(asdict(found) | {"method": "placeto"}).startswith(told)


@pytest.mark.filterwarnings("error")
def test_progress_is_a_number_where_episodes_begin_with_what_does_not_fit(tmp_path):
    kept = [1.0, 1.0, 2.0, 2.0]  # by turns, the last finds no room; one and two on each device fit
    problem = problem_of(np.ones((4, 2)), memory=3.0, resident=kept, execution=Execution(memory="static"))
    seen = []
    out = tmp_path / "policy.safetensors"
    train("placeto", out, problems=[problem, replace(problem, objective="throughput")], on_progress=seen.append)
    assert all(now.mean > 0 and now.best >= 0.5 for now in seen)
    assert any(np.isfinite(now.best) for now in seen)


def _options():
    return get("placeto").settings(SMALL["placeto"])


@pytest.mark.parametrize("method", training.METHODS)
@pytest.mark.parametrize("most", [1, 7, 61])
def test_no_more_is_evaluated_than_asked_for(method, most, tmp_path, monkeypatch):
    counted = []
    for where in (training, driver):
        real = where.evaluate
        count = lambda problem, rows, real=real, **how: counted.append(len(rows)) or real(problem, rows, **how)  # noqa: E731
        monkeypatch.setattr(where, "evaluate", count)
    problems = [small(5), small(6)] if method == "placeto" else [small()]
    found = train(method, tmp_path / "policy", most, problems=problems)
    assert found.evaluations == sum(counted) == most


HOSTILE = {
    "learner": lambda header, _: header.update(learner=[1, 2]),
    "learner.updates": lambda header, _: header["learner"].update(updates=-3.5),
    "learner.evaluations": lambda header, _: header["learner"].update(evaluations=float("nan")),
    "learner.baseline": lambda header, _: header["learner"].update(baseline="x"),
    "learner.best": lambda header, _: header["learner"].update(best=[1]),
    "optimiser.0.exp_avg is": lambda _, tensors: tensors.update({"optimiser.0.exp_avg": torch.zeros(3)}),
    "optimiser.0.exp_avg_sq": lambda _, tensors: tensors.pop("optimiser.0.exp_avg_sq"),
    "optimiser.999.exp_avg": lambda _, tensors: tensors.update({"optimiser.999.exp_avg": torch.zeros(3)}),
    "optimiser.0.step": lambda _, tensors: tensors.update({"optimiser.0.step": torch.tensor(float("nan"))}),
    "recent.x": lambda _, tensors: tensors.update({"recent.x": torch.zeros(4)}),
    "weights": lambda _, tensors: tensors.update(
        {key: value.to(torch.complex64) for key, value in tensors.items() if key.startswith("network.")}
    ),
    "is of another network": lambda _, tensors: tensors.update({"generator": torch.zeros(3)}),
}


@pytest.mark.parametrize("method", ["placeto", "hsdag"])
def test_a_file_that_no_training_wrote_is_refused(method, tmp_path):
    train(method, tmp_path / "good", 60)
    header = json.loads(contents(tmp_path / "good")[0]["placewise"])
    for what, spoil in HOSTILE.items():
        about, tensors = json.loads(json.dumps(header)), load_file(tmp_path / "good")
        spoil(about, tensors)
        save_file(tensors, tmp_path / "bad", {"placewise": json.dumps(about)})
        with pytest.raises(InvalidInput, match=re.escape(what)):
            train(method, tmp_path / "bad", 120, resume=True)
    save_file({}, tmp_path / "bad", {"placewise": "[" * 200_000})
    with pytest.raises(InvalidInput, match="not a policy, or damaged"):
        train(method, tmp_path / "bad", 120, resume=True)


def test_logs_need_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="--logs needs a folder"):
        train("placeto", tmp_path / "policy", 20, logs=tmp_path / "file")


def test_logs_that_tensorboard_reads(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, logs = tmp_path / "policy.safetensors", tmp_path / "logs"
    first = train("placeto", out, evaluations=60, logs=logs)
    second = train("placeto", out, evaluations=120, logs=logs, resume=True)
    read = EventAccumulator(str(logs))
    read.Reload()
    steps = [event.step for event in read.Scalars("mean")]
    assert steps == list(range(1, second.updates + 1))
    assert read.Scalars("evaluations")[first.updates - 1].value == first.evaluations
    assert set(read.Tags()["scalars"]) == {"mean", "best", "per_second", "evaluations"}


def test_what_is_wrong_is_said(tmp_path):
    out = tmp_path / "policy.safetensors"
    train("placeto", out, evaluations=20)
    with pytest.raises(InvalidInput, match="there is a file already; --resume"):
        train("placeto", out)
    with pytest.raises(InvalidInput, match="was trained with seed 4, not 5"):
        train("placeto", out, resume=True, seed=5)
    with pytest.raises(InvalidInput, match="was trained with other problems: give the models"):
        train("placeto", out, resume=True, problems=[small(4)])
    with pytest.raises(InvalidInput, match="a policy of 'placeto', not of colocrl"):
        train("colocrl", out, resume=True)
    other = tmp_path / "one-graph.safetensors"
    train("colocrl", other, evaluations=4)
    with pytest.raises(InvalidInput, match="was trained with other problems"):
        train("colocrl", other, resume=True, problems=[small(4)])
    with pytest.raises(InvalidInput, match="no method 'heft' to train; there are placeto"):
        training.train("heft", [], out, evaluations=1)
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"no policy at all")
    with pytest.raises(InvalidInput, match="not a policy, or damaged; `placewise train` writes"):
        plan(small(), "placeto", options={"policy": str(other)})
    other.unlink()
    with pytest.raises(InvalidInput, match=r"option width = 5: .* was trained with 4; leave the option out"):
        plan(small(), "placeto", options={"policy": str(out), "width": 5})
    with pytest.raises(InvalidInput, match="one graph at a time"):
        train("colocrl", other, problems=[])
    with pytest.raises(Unsupported, match="placeto ignores contiguity"):
        train("placeto", other, problems=[problem_of(np.ones((2, 2)), contiguous=True)])
    three = problem_of(np.ones((3, 3)), [(0, 1)])
    with pytest.raises(InvalidInput, match="same number of devices"):
        train("placeto", other, problems=[small(), three], options=SMALL["placeto"] | {"view": "paper"})


def test_a_policy_lends_its_weights_alone(tmp_path):
    """A training that begins with them counts its own evaluations."""
    train("placeto", tmp_path / "first")
    again = train("placeto", tmp_path / "second", 60, policy=tmp_path / "first", seed=5)
    assert 0 < again.evaluations < 150
    before, after = (load_file(tmp_path / name)["network.head.0.weight"] for name in ("first", "second"))
    assert (before != after).any()


def test_a_policy_of_one_graph_begins_no_training_of_another(tmp_path):
    other = replace(small(), objective="throughput")  # a network for it has the same shape
    train("colocrl", tmp_path / "first", 20)
    train("colocrl", tmp_path / "again", 20, policy=tmp_path / "first")
    with pytest.raises(InvalidInput, match="serves the one problem that it was trained on, not this one"):
        train("colocrl", tmp_path / "second", 20, policy=tmp_path / "first", problems=[other])


def test_the_shipped_policy_can_be_trained_on(tmp_path):
    train("placeto", tmp_path / "policy", 1, policy="shipped", options={"batch": 1})
    ours, shipped = (load_file(path) for path in (tmp_path / "policy", training.SHIPPED))
    assert torch.equal(ours["network.head.0.weight"], shipped["network.head.0.weight"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": -1}, "seed = -1"),
        ({"seed": 2**63}, "it must be below"),
        ({"evaluations": -5}, "evaluations = -5"),
        ({"options": {"batch": 0}}, "batch = 0"),
        ({"options": {"width": 100_000}}, "width = 100000"),
        ({"options": {"discount": 2.0}}, "discount = 2"),
        ({"resume": True, "policy": "x"}, "no place beside it"),
        ({"options": {"passes": 9}}, "passes = 9 changes nothing here: a training goes on until"),
        ({"options": {"policy": "x"}}, "policy = x changes nothing here: .* --policy"),
    ],
)
def test_requests_that_make_no_sense_are_refused(tmp_path, given, message):
    with pytest.raises(InvalidInput, match=message):
        train("placeto", tmp_path / "policy", **given)
    assert not (tmp_path / "policy").exists()


def test_weights_that_are_not_finite_are_refused(tmp_path):
    from safetensors import safe_open

    train("placeto", tmp_path / "policy")
    with safe_open(tmp_path / "policy", "pt") as file:
        about = file.metadata()
    tensors = load_file(tmp_path / "policy")
    tensors["network.head.0.weight"].fill_(float("nan"))
    save_file(tensors, tmp_path / "broken", about)
    with pytest.raises(InvalidInput, match="not finite"):
        plan(small(), "placeto", options={"policy": str(tmp_path / "broken")})
    with pytest.raises(InvalidInput, match="is a folder"):
        plan(small(), "placeto", options={"policy": str(tmp_path)})


@pytest.mark.parametrize("method", ["colocrl", "hierarchical", "hsdag"])
def test_a_policy_of_one_graph_plans_that_graph(method, tmp_path):
    out = tmp_path / "policy.safetensors"
    train(method, out, 600, problems=[small(9)])
    ours = {"samples": 4, "patience": 1000, "policy": str(out)}  # the network is what the file says

    def planned(**options):
        return plan(small(9), method, budget=Budget(evaluations=100), options=ours | options)

    as_it_is, gone_on = planned(), planned(train=True)
    assert as_it_is.value <= planned(policy="none", rate=0.0).value
    assert as_it_is.history[0][1:] == gone_on.history[0][1:]  # the same weights at first
    with pytest.raises(InvalidInput, match="serves the one problem that it was trained on"):
        plan(small(6), method, options=ours)
    with pytest.raises(InvalidInput, match=r"option hidden = 16: .* was trained with 8; leave the option out"):
        planned(hidden=16)
    with pytest.raises(InvalidInput, match=r"option rate = 1.0 changes nothing here: without train"):
        planned(rate=1.0)
    with pytest.raises(InvalidInput, match="cannot be read"):
        plan(small(), method, options={"policy": str(tmp_path / "nothing")})


@pytest.mark.parametrize("method", ["colocrl", "hierarchical", "hsdag"])
def test_a_training_that_diverges_says_so(method):
    learner, policy, reward = one_graph.pupil(method, small(), 0, get(method).settings(SMALL[method]))
    for weights in learner.network.parameters():
        torch.nn.init.constant_(weights, float("nan"))
    with pytest.raises(InvalidInput, match=r"diverged .* smaller option rate"):
        update(Context(small(), Budget(), 0, 0.0, None), learner, policy, reward)


def test_a_placeto_that_diverges_says_so():
    with pytest.raises(InvalidInput, match=r"diverged .* smaller option rate"):
        plan(small(9), "placeto", budget=Budget(evaluations=3000), options={"policy": "none", "rate": 1e6})


@pytest.mark.parametrize(("method", "option"), [("colocrl", "hidden"), ("hierarchical", "hidden"), ("hsdag", "hidden"),
    ("placeto", "width"), ("colocrl", "samples"), ("hsdag", "epochs")])  # fmt: skip
def test_networks_that_no_machine_has_room_for_are_refused(method, option):
    with pytest.raises(InvalidInput, match=f"option {option} = 1000000000"):
        plan(small(), method, options={option: 10**9})
