from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from placewise import Budget, plan
from placewise.cluster import Device, full_mesh
from placewise.driver import Progress
from placewise.report.what_if import GIB, what_if
from problems import problem_of


def found(problem):
    return {row.change: row for row in what_if(plan(problem, "auto"), budget=Budget(evaluations=300))}


def test_memory_that_binds_is_worth_more():
    """Two ops of 1 GiB on a fast device with room for one; the other is ten times slower."""
    problem = problem_of([[1.0, 10.0], [1.0, 10.0]], resident=[GIB, GIB], memory=[1.5 * GIB, 4 * GIB], sizes=0.0)
    rows = found(problem)
    assert rows["nothing"].planned == 10.0
    assert rows["1 GiB more: d0"] == ("1 GiB more: d0", 10.0, 2.0)
    assert rows["one more like d0"].planned == 1.0
    assert rows["1 GiB more: d1"].planned == 10.0
    assert rows["links twice as fast"].planned == 10.0


def test_more_is_never_worse(monkeypatch):
    """What planning once more finds on this box counts on the others too, where the search may have less luck."""
    problem = problem_of([[1.0, 3.0], [1.0, 3.0]], resident=[GIB, GIB], memory=[1.5 * GIB, 4 * GIB], sizes=0.0)
    apart = plan(problem, "auto", budget=Budget(evaluations=300))
    together = replace(apart, placement=np.array([1, 1], np.int32), value=6.0)
    answers = iter([apart])
    monkeypatch.setattr("placewise.driver.plan", lambda *_, **__: next(answers, together))
    rows = list(what_if(together))
    assert rows[0].planned == apart.value == 3.0
    assert {row.same for row in rows} == {6.0}
    assert {row.planned for row in rows} == {3.0}


def test_links_that_limit_are_worth_more():
    """A chain whose ends are bound to different devices: its transfer takes half as long."""
    problem = problem_of([[1.0, 1.0], [1.0, 1.0]], [(0, 1)], sizes=4.0, pins={"op0": "d0", "op1": "d1"})
    rows = found(problem)
    assert rows["nothing"].same == rows["nothing"].planned == 6.0
    assert rows["links twice as fast"][1:] == (4.0, 4.0)
    assert "1 GiB more: d0 to d1 each" not in rows  # there is no limit


def test_one_more_device_takes_its_share():
    problem = problem_of([[1.0], [1.0]])
    rows = found(problem)
    assert rows["one more like d0"][1:] == (2.0, 1.0)
    assert "links twice as fast" not in rows


def test_a_limit_of_devices_stays():
    """Two of three devices may be used, so a fourth is worth nothing."""
    problem = problem_of([[1.0, 1.0, 9.0]] * 3, max_devices=2, sizes=0.0)
    assert found(problem)["one more like d0"][1:] == (2.0, 2.0)


def test_forbidden_devices_are_not_wished_for():
    rows = found(problem_of([[1.0, 2.0]], memory=[GIB, 2 * GIB], forbidden=("d1",), resident=[1.0]))
    assert [row for row in rows if "d1" in row] == []


def test_progress_tells_the_change(monkeypatch):
    """And how many there are, in place of the planner."""
    made = plan(problem_of([[1.0, 1.0]]), "single")

    def planned(*_, on_progress, **__):
        on_progress(Progress("auto: heft", 1.0, 7, 3.0, 2.0))
        return made

    monkeypatch.setattr("placewise.driver.plan", planned)
    told = []
    rows = list(what_if(made, on_progress=told.append))
    assert [now.planner for now in told] == [f"{i}/{len(rows)} {row.change}" for i, row in enumerate(rows, start=1)]
    assert {(now.value, now.lower_bound, now.evaluations) for now in told} == {(3.0, 2.0, 7)}


@pytest.mark.parametrize("done", [0, 1, 2])
def test_ctrl_c_ends_it_and_what_was_found_is_told(run, monkeypatch, done):
    """The first change is none, which alone says nothing."""
    made = plan(problem_of([[1.0, 2.0], [1.0, 2.0]], memory=[GIB, GIB]), "single")
    made.save("plan.json")
    answers = iter([made] * done)
    monkeypatch.setattr("placewise.driver.plan", lambda *_, **__: next(answers, replace(made, stopped="interrupted")))
    with pytest.raises(KeyboardInterrupt):
        list(what_if(made))
    answers = iter([made] * done)
    result = run("explain", "plan.json", "--what-if", "--json")
    said = "these are the changes so far" if done > 1 else "there is no result yet"
    assert (result.code, result.err.splitlines()[-1]) == (130, f"interrupted: {said}")
    rows = json.loads(result.out)["what_if"] if result.out else []
    assert [row["change"] for row in rows] == ["nothing", "1 GiB more: d0 to d1 each"][: done * (done > 1)]


def test_the_name_of_the_twin_is_free():
    cluster = full_mesh([Device("d0"), Device("d0 (2)")])
    assert found(problem_of([[1.0, 1.0]] * 3, sizes=0.0, cluster=cluster))["one more like d0"].planned == 1.0
