"""What is printed for people: names that fit and steer no terminal, narrow terminals, plans of nothing."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from os import terminal_size

import numpy as np
import pytest
from rich.cells import cell_len

from placewise import plan
from placewise.certificate import check
from placewise.graph import Graph
from placewise.planners import available
from placewise.report import table as report
from placewise.report.explain import explain
from placewise.report.table import PROOFS, describe_explanation, describe_findings, describe_plan, table, wrapped
from problems import problem_of

STEERS = "\x1b[2J\u202e\u2066\x07\n"  # clears the screen, turns text around, rings, ends the line


def test_long_names_keep_their_ends():
    (row,) = table(["name", "time"], "lr", [["model.layers.31." + "x" * 80 + ".down_proj", "1 s"]]).splitlines()[2:]
    assert len(row) == 80
    assert row.startswith("| model.la")
    assert "…" in row
    assert ".down_proj |" in row


@pytest.mark.parametrize("length", range(60, 90))
def test_no_escape_is_cut_in_two(length):
    """Wherever the cut is, what is left is whole escapes."""
    name = STEERS * length + "|" * (length - 59)
    shown = [line for text in (table(["name"], "l", [[name]]), wrapped(f"It is {name}.")) for line in text.split("\n")]
    for line in shown:
        assert line.isprintable()
        assert cell_len(line) <= 80
        left = re.sub(r"\\x1b|\\u202e|\\u2066|\\x07|\\n|\\\\\\|", "", line)
        assert "\\" not in left.replace("\\|", "")


def test_a_bar_is_escaped_where_it_would_end_a_cell():
    assert table(["name"], "l", [["a|b"]]).splitlines()[-1] == "| a\\|b |"
    assert wrapped("a|b") == "a|b"


def test_words_are_broken_where_they_are_longer_than_a_line_only():
    assert wrapped("two-gpus " * 12) == "\n".join(" ".join(["two-gpus"] * n) for n in (9, 3))
    assert [len(line) for line in wrapped("x" * 100 + " y", "  ").splitlines()] == [80, 24]
    assert max(map(cell_len, wrapped("名" * 100).splitlines())) == 80


@pytest.mark.parametrize("columns", [20, 40, 72])
def test_a_narrow_terminal_has_shorter_lines(monkeypatch, columns):
    """A table that cannot get so narrow is one paragraph for each row, without what is empty."""
    monkeypatch.setattr(sys, "stdout", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr(report, "get_terminal_size", lambda _: terminal_size((columns, 24)))
    made = plan(problem_of([[1.0, 2.0], [3.0, 1.0]], [(0, 1)]), "single")
    for text in (describe_plan(made), describe_explanation(made, explain(made.timeline))):
        assert max(map(cell_len, text.splitlines())) <= columns
    rows = table(["name", "a", "b"], "lrr", [["x" * 9, "1" * 9, "-"], ["y", "2", "3"]])
    assert rows == ("x" * 9 + ": a\n  111111111\ny: a 2, b 3" if columns == 20 else rows)
    assert ("|" in rows) == (columns > 20)


@pytest.mark.parametrize("objective", ["latency", "throughput", "completion"])
def test_where_there_is_nothing_nothing_is_told(objective):
    """No op; and two that take no time and hold no byte: no memory is the fullest, no table is empty."""
    nothing = replace(problem_of([[0.0, 0.0]] * 2, [(0, 1)], sizes=[0.0] * 2), objective=objective)
    empty = replace(nothing, graph=Graph.create(op_names=[]), costs=problem_of(np.zeros((0, 2))).costs)
    for problem in (nothing, empty):
        made = plan(problem, "single")
        told = describe_explanation(made, explain(made.timeline))
        assert "Nothing that it runs takes time." in told
        assert "fullest" not in told
        assert "bound" not in told
        assert ("first op" in told) == (problem is nothing)
        assert not re.search(r"-{3,}:? \|(\n\n|$)", told)  # a header without rows


def test_what_a_search_proves_is_told_beside_the_arguments():
    """Three ops of 1 s for two devices: as if they could be cut up 1.5 s, as they cannot 2 s."""
    problem = replace(problem_of([[1.0, 1.0]] * 3), objective="throughput", contiguous=True)
    made = plan(problem, "ideals")
    told = describe_explanation(made, explain(made.timeline))
    assert (
        "No plan can beat 2.00 s, by search (ideals): no stages in a row, each within that time, do all the work. "
        "Arguments alone prove 1.50 s; broken down by what they count:"
    ) in " ".join(told.split())
    checked = describe_findings(made, check(made))
    assert "| bound: by ideals | " in checked
    assert checked.endswith("\n\non trust: what proves it is too long to be gone over here")
    assert set(available()) >= set(PROOFS)
