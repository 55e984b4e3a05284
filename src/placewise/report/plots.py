"""Pictures of a comparison, for papers and pages: as SVG or PNG, by the file's ending."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from placewise.driver import Outcome
from placewise.errors import InvalidInput
from placewise.files import write_bytes
from placewise.importers import require
from placewise.plans import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS: Final = (".svg", ".png")
#: Told apart by readers who do not see all colours (Okabe, Ito 2008); dashes tell apart those beyond.
_COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#F0E442")
_DASHES: Final = ("-", "--", ":", "-.")
_END: Final = 1e9  # off any picture
_WORST: Final = 2.0  # times the best: what is beyond is off the picture, where it would dwarf the rest


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

    with rc_context({"svg.hashsalt": "placewise", "svg.fonttype": "none"}):  # the same picture, the same file
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.add_subplot()
        if len(comparisons) == 1:
            _quality_over_time(axes, [outcome.plan for outcome in comparisons[0] if outcome.plan])
        else:
            _performance_profiles(axes, comparisons)
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside right upper", frameon=False, fontsize="small")
        drawn = io.BytesIO()
        no_date: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {}
        figure.savefig(drawn, format=path.suffix.lower()[1:], dpi=150, metadata=no_date)
    write_bytes(path, drawn.getvalue())


def _quality_over_time(axes: Axes, plans: Sequence[Plan]) -> None:
    """The value of the best plan so far, as a share of the best in the end, by the seconds that it took."""
    best = min((plan.value for plan in plans), default=1.0)
    last = max((plan.seconds for plan in plans), default=1.0)
    for i, plan in enumerate(plans):
        steps = [(seconds, value / best) for seconds, _, value in plan.history]
        steps = [*steps, (max(plan.seconds, steps[-1][0] if steps else 0.0), plan.value / best)]
        seconds, values = zip(*steps, strict=True)
        ends = plan.value / best
        name = plan.planner if ends <= _WORST else f"{plan.planner} ({ends:.1f})"
        axes.step(seconds, values, where="post", label=name, **_style(i))
        axes.plot(seconds[-1:], values[-1:], marker="o", markersize=4, color=_style(i)["color"])
    if plans:
        bound = plans[0].lower_bound / best
        worst = max(plan.value / best for plan in plans if plan.value <= _WORST * best)
        axes.axhline(bound, color="0.5", linewidth=1, label="lower bound")
        axes.set_ylim(max(bound, 0.5) - 0.02, worst + 0.02)
        problem = plans[0].problem
        axes.set_title(f"{problem.graph.name} on {problem.cluster.name}, {problem.objective}", fontsize="medium")
    axes.set_xscale("symlog", linthresh=max(last / 100, 1e-3))
    axes.set_xlim(left=0.0)
    axes.set_xlabel("seconds of planning")
    axes.set_ylabel("value, as a multiple of the best")


def _performance_profiles(axes: Axes, comparisons: Sequence[Sequence[Outcome]]) -> None:
    """For each planner, the share of the problems on which it is within a factor of the best (Dolan, Moré 2002)."""
    rows = sorted(ratios_to_best(comparisons).items(), key=lambda row: sum(min(ratio, _WORST) for ratio in row[1]))
    for i, (name, ratios) in enumerate(rows):
        factors = sorted(ratio for ratio in ratios if math.isfinite(ratio))
        shares = [k / len(ratios) for k in range(len(factors) + 1)]
        axes.step([1.0, *factors, _END], [*shares, shares[-1]], where="post", label=name, **_style(i))
    axes.set_xlim(1.0, _WORST)
    axes.set_ylim(0.0, 1.02)
    axes.set_xlabel("factor of the best value")
    axes.set_ylabel(f"share of {len(comparisons)} problems within it")


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


def _style(i: int) -> dict[str, Any]:
    return {"color": _COLOURS[i % len(_COLOURS)], "linestyle": _DASHES[i // len(_COLOURS) % len(_DASHES)]}
