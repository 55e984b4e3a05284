from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from placewise import Budget, plan
from placewise.driver import Outcome, compare
from placewise.errors import InvalidInput
from placewise.report.plots import _Apart, _quality_over_time, _styles, plot, ratios_to_best
from placewise.terminal import printable
from problems import problem_of

Figure = pytest.importorskip("matplotlib.figure").Figure
NAMES = ("single", "random", "local-search")


def compared(*scales):
    problems = [problem_of([[scale, 2.0], [3.0, scale], [1.0, 1.0]], [(0, 2), (1, 2)]) for scale in scales]
    return [compare(problem, NAMES, budget=Budget(evaluations=50)) for problem in problems]


def texts(path):
    return {node.text.strip() for node in ElementTree.parse(path).iter() if node.text and node.text.strip()}


def test_ratios_are_to_the_best_of_each_problem():
    first, second = compared(1.0, 2.0)
    first = [Outcome("lost", None, "no plan"), *first]
    found = ratios_to_best([first, second])
    assert found["lost"] == [math.inf]
    assert found["local-search"] == [1.0, 1.0]
    single = next(row.plan for row in first if row.planner == "single")
    best = min(row.plan.value for row in first if row.plan)
    assert found["single"][0] == single.value / best > 1.0


def test_one_comparison_is_drawn_against_time_and_several_as_profiles(tmp_path):
    plot(compared(1.0), tmp_path / "one.svg")
    plot(compared(1.0, 2.0), tmp_path / "two.svg")
    assert {*NAMES, "lower bound", "seconds of planning"} <= texts(tmp_path / "one.svg")
    assert {*NAMES, "factor of the best value", "share of 2 problems within it"} <= texts(tmp_path / "two.svg")


def test_what_is_off_the_picture_is_told(tmp_path):
    """One op on a device a hundred times slower than the other."""
    problem = problem_of([[1.0, 100.0]])
    bad, good = (replace(plan(problem, "single"), planner=name) for name in ("bad", "good"))
    bad = replace(bad, value=100.0, history=())
    found = [Outcome("good", good), Outcome("bad", bad), Outcome("lost", None, "no plan")]
    plot([found], tmp_path / "one.svg")
    assert {"bad", "(100.0x best, off the picture)"} <= texts(tmp_path / "one.svg")
    plot([found] * 2, tmp_path / "two.svg")
    assert {"bad", "(on none within 2x, off the picture)", "lost", "(no plan)"} <= texts(tmp_path / "two.svg")


def test_curves_that_end_level_are_drawn_apart_and_said(tmp_path):
    """Two of three."""
    (found,) = compared(1.0)
    best = next(row.plan for row in found if row.plan)
    values = {"first": best.value, "second": best.value, "third": 1.5 * best.value}
    rows = [Outcome(name, replace(best, planner=name, value=value, history=())) for name, value in values.items()]
    plot([rows], tmp_path / "one.svg")
    plot([rows] * 2, tmp_path / "two.svg")
    assert {"2 end level,", "each drawn above the last:"} <= texts(tmp_path / "one.svg")
    assert {"2 have one curve,", "each drawn above the last:"} <= texts(tmp_path / "two.svg")
    figure = Figure()
    axes = figure.add_subplot()
    apart = _Apart(axes, [1.0, 1.0, 1.0 + 1e-12, 1.1], "end level")
    moved = [apart.next("a")["transform"].transform((0.0, 0.0))[1] - axes.transData.transform((0.0, 0.0))[1]
             for _ in range(4)]  # fmt: skip
    assert np.diff(moved[:3]) == pytest.approx([2.5 / 72 * figure.dpi] * 2)
    assert moved[0] == moved[3] == 0.0


@pytest.mark.parametrize("last", [0.004, 0.03, 0.2, 7.0, 300.0])
def test_times_on_the_axis_are_apart(tmp_path, last):
    (found,) = compared(1.0)
    plans = [replace(row.plan, seconds=last, history=()) for row in found if row.plan]
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    _quality_over_time(axes, plans)
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    inside = [box for box in boxes if 0 <= box.x0 <= figure.bbox.width]
    assert len(inside) > 2
    assert all(a.x1 + 10 < b.x0 for a, b in pairwise(inside))


def test_a_long_legend_is_whole(tmp_path):
    (found,) = compared(1.0)
    best = next(row.plan for row in found if row.plan)
    many = [Outcome(f"p{i}", replace(best, planner=f"p{i}")) for i in range(45)]
    plot([many], tmp_path / "many.svg")
    root = ElementTree.parse(tmp_path / "many.svg").getroot()
    height = float(root.get("viewBox").split()[3])
    assert {"p0", "p44", "lower bound"} <= texts(tmp_path / "many.svg")
    assert max(float(node.get("y")) for node in root.iter() if node.tag.endswith("text") and node.get("y")) < height


def test_titles_say_what_was_planned(tmp_path):
    found = compared(1.0, 2.0)
    problem = found[0][0].plan.problem
    where = f"{problem.cluster.name}, latency"
    for name, rows, what in (("one", found[:1], problem.graph.name), ("two", found, "2 problems")):
        plot(rows, tmp_path / f"{name}.svg")
        assert f"{what} on {where}" in texts(tmp_path / f"{name}.svg")


@pytest.mark.parametrize("name", ["$\\frac{1}$ of <b>&", "\u202e\x07\x1b[31m\n", "x" * 900 + "end"])
def test_names_are_drawn_as_they_are(tmp_path, name):
    """None is a formula, and none breaks the file, steers the text or leaves the picture."""
    found = compared(1.0, 2.0)
    named = [
        [Outcome(f"{name} {row.planner}", replace(row.plan, planner=f"{name} {row.planner}")) for row in rows]
        for rows in found
    ]
    graph = replace(found[0][0].plan.problem.graph, name=name)
    first = replace(named[0][0].plan, problem=replace(found[0][0].plan.problem, graph=graph))
    for rows in ([[replace(named[0][0], plan=first), *named[0][1:]]], named):
        plot(rows, tmp_path / "odd.svg")
        plot(rows, tmp_path / "odd.png")
        drawn = texts(tmp_path / "odd.svg")
        assert all(text.isprintable() and len(text) < 60 for text in drawn)
        if len(rows) == 1 and "x" not in name:
            assert any(text.startswith(printable(name)) for text in drawn)


def test_curves_differ_by_more_than_colour():
    """So do the first: each has dashes or markers that no other has, and the best is thin and above the rest."""
    styles = _styles(12)
    assert len({(repr(style["linestyle"]), style["marker"]) for style in styles}) == 12
    assert [style["linewidth"] for style in styles] == sorted(style["linewidth"] for style in styles)
    assert [style["zorder"] for style in styles] == sorted((style["zorder"] for style in styles), reverse=True)


def test_the_same_comparison_gives_the_same_file(tmp_path):
    found = compared(1.0)
    for name in ("a.svg", "b.svg"):
        plot(found, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_pictures_may_be_png(tmp_path):
    plot(compared(1.0), tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes()[:4] == b"\x89PNG"


def test_no_plan_at_all_is_a_picture_too(tmp_path):
    plot([[Outcome("lost", None, "no plan")]], tmp_path / "none.svg")
    plot([[Outcome("lost", None, "no plan")]] * 2, tmp_path / "none.svg")


def test_other_formats_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"must end in \.svg or \.png"):
        plot([], tmp_path / "a.pdf")
