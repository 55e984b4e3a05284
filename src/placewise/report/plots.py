"""Pictures of a comparison, for papers and pages: as SVG or PNG, by the file's ending."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from placewise.driver import Outcome
from placewise.errors import InvalidInput
from placewise.files import write_bytes
from placewise.importers import require
from placewise.plans import Plan
from placewise.problem import Problem
from placewise.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS: Final = (".svg", ".png")
#: Told apart by readers who do not see all colours (Okabe, Ito 2008), and by their markers and dashes without any.
_COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#B8A800")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_DASHES: Final = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)), (0, (9, 2)))
_THIN, _THICK = 1.3, 2.6  # of the best, which is drawn last, and of the last: what is nearly equal shines through
_APART, _WIDEST = 2.5, 30.0  # points: between curves that end level, and of all of these together
_INDENT: Final = "\u2002"  # a space that no reader of SVG drops
_MOMENT: Final = 1e-3  # seconds; less is no matter
_END: Final = 1e9  # off any picture
_WORST: Final = 2.0  # times the best: what is beyond is off the picture, where it would dwarf the rest
_LINE: Final = 0.19  # inches of a legend
_LONGEST: Final = 30  # characters of a name


def check_format(path: Path) -> None:
    """Told before there is anything to draw."""
    if path.suffix.lower() not in FORMATS:
        raise InvalidInput(f"--plot {path}: must end in {' or '.join(FORMATS)}")
    require("matplotlib", "plot")


def plot(comparisons: Sequence[Sequence[Outcome]], path: Path) -> None:
    """One comparison: quality against time. Several: performance profiles over their problems."""
    check_format(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # The same picture is the same file, and a name may hold dollars.
    with rc_context({"svg.hashsalt": "placewise", "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.add_subplot()
        if len(comparisons) == 1:
            _quality_over_time(axes, [outcome.plan for outcome in comparisons[0] if outcome.plan])
        else:
            _performance_profiles(axes, comparisons)
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if labels := axes.get_legend_handles_labels()[1]:
            lines = sum(label.count("\n") + 1 for label in labels)
            figure.set_figheight(max(figure.get_figheight(), _LINE * (lines + 1)))  # else what is below is cut off
            figure.legend(loc="outside right upper", frameon=False, fontsize="small", handlelength=3)
        drawn = io.BytesIO()
        no_date: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {}
        figure.savefig(drawn, format=path.suffix.lower()[1:], dpi=150, metadata=no_date)
    write_bytes(path, drawn.getvalue())


def _quality_over_time(axes: Axes, plans: Sequence[Plan]) -> None:
    """The value of the best plan so far, as a share of the best in the end, by the seconds that it took."""
    best = min((plan.value for plan in plans), default=1.0)
    last = max((plan.seconds for plan in plans), default=1.0)
    apart = _Apart(axes, [plan.value / best for plan in plans], "end level")
    for plan, style in zip(plans, _styles(len(plans)), strict=True):
        steps = [(seconds, value / best) for seconds, _, value in plan.history]
        steps = [*steps, (max(plan.seconds, steps[-1][0] if steps else 0.0), plan.value / best)]
        seconds, values = zip(*steps, strict=True)
        ends = plan.value / best
        name = _named(plan.planner)
        if ends > _WORST:
            name += f"\n({ends:.1f}x best, off the picture)"
        axes.step(seconds, values, where="post", markevery=[-1], **apart.next(name), **style)
    if plans:
        bound = plans[0].lower_bound / best
        worst = max(plan.value / best for plan in plans if plan.value <= _WORST * best)
        axes.axhline(bound, color="0.5", linewidth=1, label="lower bound")
        axes.set_ylim(max(bound, 0.5) - 0.02, worst + 0.02)
        problem = plans[0].problem
        _title(axes, _named(problem.graph.name), problem)
    if last > 10 * _MOMENT:  # from there on by powers of ten, two or three of them
        first = max(math.floor(math.log10(last)) - 2, round(math.log10(_MOMENT)))
        powers = [10.0**k for k in range(first, math.ceil(math.log10(last)) + 1)]
        axes.set_xscale("symlog", linthresh=powers[0])
        axes.set_xticks([0.0, *powers], [f"{tick:g}" for tick in (0.0, *powers)])
    axes.set_xlim(0.0, 1.1 * last)
    axes.set_xlabel("seconds of planning")
    axes.set_ylabel("value, as a multiple of the best")


def _performance_profiles(axes: Axes, comparisons: Sequence[Sequence[Outcome]]) -> None:
    """For each planner, the share of the problems on which it is within a factor of the best (Dolan, Moré 2002)."""
    rows = sorted(ratios_to_best(comparisons).items(), key=lambda row: sum(min(ratio, _WORST) for ratio in row[1]))
    apart = _Apart(axes, [sorted(ratios) for _, ratios in rows], "have one curve")
    for (name, ratios), style in zip(rows, _styles(len(rows)), strict=True):
        factors = sorted(ratio for ratio in ratios if math.isfinite(ratio))
        shares = [k / len(ratios) for k in range(len(factors) + 1)]
        name = _named(name)
        if not factors or factors[0] > _WORST:
            name += f"\n(on none within {_WORST:g}x, off the picture)" if factors else "\n(no plan)"
        axes.step([1.0, *factors, _END], [*shares, shares[-1]], where="post", **apart.next(name), **style)
    planned = [outcome.plan.problem for outcomes in comparisons for outcome in outcomes[:1] if outcome.plan]
    if planned:
        _title(axes, f"{len(comparisons)} problems", *planned)
    axes.set_xlim(1.0, _WORST)
    axes.set_ylim(0.0, 1.02)
    axes.set_xlabel("factor of the best value")
    axes.set_ylabel(f"share of {len(comparisons)} problems within it")


class _Apart:
    """Curves that would hide one another are moved up, each above the one before, which the legend says."""

    def __init__(self, axes: Axes, ends: Sequence[Any], alike: str) -> None:
        self._axes = axes
        groups = [list(group) for _, group in groupby(ends, key=lambda end: np.round(end, 9).tolist())]
        self._places = iter([(i, len(group)) for group in groups for i in range(len(group))])
        self._alike = alike

    def next(self, name: str) -> dict[str, Any]:
        """How to draw the next curve, and what to call it."""
        from matplotlib.transforms import ScaledTranslation

        i, count = next(self._places)
        if i == 0 and count > 1:
            self._axes.plot([], [], linestyle="none", label=f"{count} {self._alike},\neach drawn above the last:")
        figure = self._axes.get_figure(root=True)
        assert figure is not None
        up = ScaledTranslation(0.0, i * min(_APART, _WIDEST / count) / 72, figure.dpi_scale_trans)
        return {"transform": self._axes.transData + up, "label": _INDENT * (count > 1) + name}


def _title(axes: Axes, what: str, *problems: Problem) -> None:
    """What was planned, on which box, and for what; of many boxes only how many."""
    boxes = list(dict.fromkeys(problem.cluster.name for problem in problems))
    goals = list(dict.fromkeys(problem.objective for problem in problems))
    box = _named(boxes[0]) if len(boxes) == 1 else f"{len(boxes)} boxes"
    axes.set_title(f"{what} on {box}, {' and '.join(goals)}", fontsize="medium")


def _named(name: str) -> str:
    """As it can be drawn; what is too long loses its middle."""
    text, head = printable(name), _LONGEST // 3
    return text if len(text) <= _LONGEST else f"{text[:head]}…{text[head + 1 - _LONGEST :]}"


def ratios_to_best(comparisons: Sequence[Sequence[Outcome]]) -> dict[str, list[float]]:
    """For each planner its values over the best of each problem; infinite where it has no plan."""
    found: dict[str, list[float]] = {}
    for outcomes in comparisons:
        best = min((outcome.plan.value for outcome in outcomes if outcome.plan), default=math.inf)
        for outcome in outcomes:
            value = outcome.plan.value if outcome.plan else math.inf
            ratio = 1.0 if value == best < math.inf else value / best if best > 0 else math.inf
            found.setdefault(outcome.planner, []).append(ratio if math.isfinite(value) else math.inf)
    return found


def _styles(count: int) -> list[dict[str, Any]]:
    """Of curves from the best to the worst. The better lies above, and is thinner."""
    return [
        {
            "color": _COLOURS[i % len(_COLOURS)],
            "linestyle": _DASHES[i % len(_DASHES)],
            "marker": _MARKERS[i % len(_MARKERS)],
            "markersize": 4.5,
            "linewidth": _THIN + (_THICK - _THIN) * i / max(1, count - 1),
            "zorder": 3 - i / count,
        }
        for i in range(count)
    ]
