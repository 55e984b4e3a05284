"""Tables for people: at most 80 columns, in Markdown, so that they read well in a terminal and in an issue."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby, takewhile
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.cells import cell_len

from placewise.certificate import NO_CLAIM, TRUST, Finding
from placewise.cluster import Cluster
from placewise.driver import Outcome
from placewise.engines import Engine, written_for
from placewise.machine import Figure, Machine
from placewise.planners import PlannerInfo
from placewise.plans import Plan, format_gap
from placewise.quantities import format_bytes, format_change, format_seconds, format_share
from placewise.report.explain import (
    KINDS,
    NEARLY_FULL,
    SAME,
    Explanation,
    Move,
    in_a_row,
    in_words,
    occupied,
    replicas,
    what_fills,
)
from placewise.report.plots import ratios_to_best
from placewise.simulator import Timeline
from placewise.simulator.bounds import INGREDIENTS, lower_bound, made_of
from placewise.terminal import printable

if TYPE_CHECKING:
    from placewise.report.what_if import WhatIf
    from placewise.verify import Verification

WIDTH = 80
LEAST = 8  # columns of what is cut
SHOWN = 12  # rows of a table that could be long
LARGEST = 6  # rows of a table of examples
#: What each bound means, in a few words; docs/execution-model.md says more.
BOUNDS = {
    "path": "ops that wait for one another, each where it is fastest, and its moves",
    "path under memory": "a path whose ops do not all fit where they are fastest",
    "path in stretches": "a path that must move on, since no device holds all of it",
    "blocks in stretches": "all between ops that all data passes, in each way that fits",
    "streaming": "weights at home where they are read, copied there, or read elsewhere",
    "turns": "what an op waits for takes turns on the devices that are near enough",
    "area": "all work spread over all devices, as if ops could be cut up",
    "unit": "the longest op, or ops that must share a device",
    "alone": "each model by itself",
    "queue": "models that finish one after another share the area",
}
#: What a planner's search has shown about the time that it proves; docs/exact.md says more.
PROOFS = {
    "ideals": "no stages in a row, each within that time, do all the work",
    "pipeline-dp": "no stages in a row, each within that time, do all the work",
    "milp": "what the devices can take on within that time, with its transfers, is not all the work",
    "slot-milp": "its integer programme has no solution below, whatever is in the slots",
    "cpsat": "no order of ops and transfers, wherever they are, ends earlier",
    "series": "the blocks between ops that everything passes through take no less in sum",
    "min-cut": "no cut of the graph costs less, at what memory is worth",
}
_GOALS = {
    "latency": "latency",
    "throughput": "time per sample (throughput)",
    "completion": "sum of completion times",
}


def table(header: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> str:
    """Rows under a header; `align` has one letter per column ("l" or "r"). Text is cut where a line gets too long.

    Where cutting is not enough, as on a narrow terminal, each row is a paragraph.
    """
    lines = [[_shown_in_cell(cell) for cell in row] for row in (header, *rows)]
    widths = [max(cell_len("".join(line[c])) for line in lines) for c in range(len(header))]
    while (wide := 3 * len(widths) + 1 + sum(widths)) > _room():
        texts = [c for c in range(len(widths)) if align[c] == "l" and widths[c] > LEAST]
        if not texts:
            break
        widths[max(texts, key=lambda c: widths[c])] -= 1
    if wide > _room():
        return "\n".join(wrapped(_in_words(header, row), "  ") for row in rows)
    rule = ["-" * width if a == "l" else "-" * (width - 1) + ":" for a, width in zip(align, widths, strict=True)]
    cells = [list(map(_fit, line, widths, align)) for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in (cells[0], rule, *cells[1:]))


def _under(title: str, header: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> str:
    return f"{wrapped(title)}\n\n{table(header, align, rows)}"


def _in_words(header: Sequence[str], row: Sequence[str]) -> str:
    """A row without columns."""
    first, *others = row
    said = [f"{name} {cell}".strip() for name, cell in zip(header[1:], others, strict=True) if cell not in ("", "-")]
    return f"{first}: {', '.join(said)}" if said else first


def _shown_in_cell(text: str) -> list[str]:
    """What each character is shown as; a bar would end the cell."""
    return ["\\|" if c == "|" else printable(c) for c in text]


def _room() -> int:
    """Columns of a line; a narrow terminal has fewer."""
    return min(WIDTH, get_terminal_size((WIDTH, 0)).columns) if sys.stdout.isatty() else WIDTH


def wrapped(text: str, indent: str = "", first: str = "") -> str:
    """Lines that fit. Only a word that is longer than a line is broken, and no escape is."""
    lines, line = list[str](), first
    for word in filter(None, text.split(" ")):
        if line.strip() and cell_len(line) + 1 + cell_len(printable(word)) > _room():
            lines, line = [*lines, line], indent
        line += " " * bool(line.strip())
        for piece in map(printable, word):
            if cell_len(line + piece) > _room():
                lines, line = [*lines, line], indent
            line += piece
    return "\n".join([*lines, line])


def _short(name: str) -> str:
    """A name within a sentence."""
    shown = list(map(printable, name))
    return _fit(shown, min(60, cell_len("".join(shown))), "l")


def _fit(shown: list[str], width: int, align: str) -> str:
    """Text in exactly `width` columns; of what is too long the middle is left out, for the end of a name tells most.

    It is given by what each character is shown as, so that none is cut in two.
    """
    text = "".join(shown)
    if cell_len(text) > width:
        head = _first(shown, (width - 1) // 8)
        tail = _first(shown[::-1], width - 1 - cell_len("".join(head)))
        text = "".join([*head, "…", *tail[::-1]])
    padding = " " * (width - cell_len(text))
    return text + padding if align == "l" else padding + text


def _first(shown: list[str], width: int) -> list[str]:
    """As many as fit."""
    count = len(list(takewhile(lambda end: end <= width, accumulate(map(cell_len, shown)))))
    return shown[:count]


# ---- plans and timelines ---------------------------------------------------------------------------------------------


def describe_plan(plan: Plan) -> str:
    """What `placewise plan` prints."""
    shares = plan.cost_shares
    sources = list(shares) if len(shares) == 1 else [f"{format_share(part)} {label}" for label, part in shares.items()]
    costs = "\n\n" + wrapped(f"The times of the ops are {in_a_row(sources)}.") if sources else ""
    return f"{headline(plan)}\n\n{device_table(plan.timeline)}{costs}"


def headline(plan: Plan) -> str:
    """What it is, what it is worth, and how far from the best."""
    problem = plan.problem
    title = f"{_short(problem.graph.name)} on {_short(problem.cluster.name)}"
    bound = format_seconds(plan.lower_bound)
    best = (
        "This is optimal."
        if plan.is_optimal
        else f"No plan is below {bound}, so the gap is at most {format_share(plan.gap)}."
    )
    value = f"{_GOALS[problem.objective]} {format_seconds(plan.value)}"
    value += f" = {1 / plan.value:.3g} samples/s" if problem.objective == "throughput" and plan.value > 0 else ""
    finder = f" ({_short(plan.found_by)})" if plan.found_by not in ("", plan.planner) else ""
    return wrapped(f"{title}: {value} by {_short(plan.planner)}{finder}. {best}")


def device_table(timeline: Timeline) -> str:
    """What each device does and holds; busy as a share of the run, or of the time per sample in a pipeline.

    Devices that repeat the work of another have no ops of their own; their number is said where the ops are.
    """
    repeated = timeline.problem.objective == "throughput" and timeline.problem.execution.replicate
    count = replicas(timeline) if repeated else [1] * timeline.problem.num_devices
    seconds, _, whole = occupied(timeline)
    rows = []
    for d, device in enumerate(timeline.problem.cluster.devices):
        memory, peak, busy = device.memory, float(timeline.peak[d]), float(seconds[d])
        rows.append([
            device.name, *[str(count[d])] * repeated, f"{(timeline.placement == d).sum():,}", format_seconds(busy),
            _share(busy, whole), format_bytes(peak), format_bytes(memory), _share(peak, memory),
        ])  # fmt: skip
    header = ["device", *["replicas"] * repeated, "ops", "busy", "busy share", "peak memory", "memory", "used"]
    return table(header, "l" + "r" * (len(header) - 1), rows)


def describe_simulation(plan: Plan) -> str:
    """What `placewise simulate` prints."""
    timeline = plan.timeline
    moved = f"{len(timeline.transfers)} transfers move {format_bytes(timeline.bytes_moved)}."
    _, busy, whole = occupied(timeline)
    rows = [
        [name, format_seconds(seconds), _share(seconds, whole)]
        for name, seconds in zip(timeline.problem.cluster.channels, busy.tolist(), strict=True)
        if seconds > 0
    ]
    parts = [headline(plan) + "\nFeasible: every constraint holds.", device_table(timeline), moved]
    if rows:
        parts.append(table(["channel", "busy", "busy share"], "lrr", rows))
    return "\n\n".join(parts)


# ---- comparison ------------------------------------------------------------------------------------------------------


def describe_comparison(outcomes: Sequence[Outcome], one_device: float) -> str:
    """What `placewise compare` prints: a plan, or the reason why there is none, for each planner."""
    plans = [outcome.plan for outcome in outcomes if outcome.plan]
    parts, rows, notes = [], [], []
    if plans:
        problem, best = plans[0].problem, plans[0].value
        title = f"{_short(problem.graph.name)} on {_short(problem.cluster.name)}: {_GOALS[problem.objective]}"
        title += f" of {problem.num_ops:,} ops, {problem.num_devices} devices."
        parts.append(wrapped(f"{title} No plan is below {format_seconds(plans[0].lower_bound)}."))
        notes.append("> the best")
        if sum(_is_best(plan, best) for plan in plans) > 1:
            notes.append("= as good as the best")
        if plans[-1].value > one_device:
            notes.append(f"* one device alone is better: {format_seconds(one_device)}")
    for i, plan in enumerate(plans):
        mark = ">" if i == 0 else "=" if _is_best(plan, best) else "*" if plan.value > one_device else " "
        rows.append([
            f"{mark} {plan.planner}", format_seconds(plan.value), format_gap(plan.gap).removeprefix("gap "),
            fullest_device(plan.timeline), f"{plan.seconds:.1f}", f"{plan.evaluations:,}",
        ])  # fmt: skip
    for outcome in outcomes:
        if outcome.plan is None:
            rows.append([f"- {outcome.planner}", "-", "-", "-", "-", "-"])
            notes.append(f"- {outcome.planner}: {outcome.reason}")
    parts.append(table(["planner", "value", "gap", "fullest", "seconds", "evaluations"], "lrrlrr", rows))
    parts.append("\n".join(wrapped(note, "  ") for note in notes))
    return "\n\n".join(parts)


def _is_best(plan: Plan, best: float) -> bool:
    return plan.value <= best * (1 + SAME)


def describe_comparisons(comparisons: Sequence[Sequence[Outcome]]) -> str:
    """Several comparisons in one table: how far each planner's values are from the best of each problem."""
    rows = []
    for name, ratios in ratios_to_best(comparisons).items():
        able = [ratio for ratio in ratios if math.isfinite(ratio)]
        mean = math.exp(sum(map(math.log, able)) / len(able)) if able else math.inf
        best = sum(ratio <= 1.0 + SAME for ratio in able)
        shown = [f"{mean:.3f}", f"{max(able):.3f}"] if able else ["-", "-"]
        rows.append((-len(able), mean, [name, *shown, str(best), str(len(ratios) - len(able))]))
    title = f"Over {len(comparisons)} problems, as multiples of the best value of each:"
    cells = [row for _, _, row in sorted(rows)]
    return _under(title, ["planner", "mean", "worst", "the best", "no plan"], "lrrrr", cells)


def fullest_device(timeline: Timeline) -> str:
    """The device with the least room left, as a share of its memory."""
    capacity = timeline.problem.capacity
    limited = [d for d in range(len(capacity)) if math.isfinite(capacity[d])]
    if not limited:
        d = int(timeline.peak.argmax())
        return f"{timeline.problem.cluster.device_names[d]} {format_bytes(float(timeline.peak[d]))}"
    d = max(limited, key=lambda d: timeline.peak[d] / capacity[d] if capacity[d] else 0.0)
    return f"{timeline.problem.cluster.device_names[d]} {_share(float(timeline.peak[d]), float(capacity[d]))}"


# ---- certificate -----------------------------------------------------------------------------------------------------


def describe_findings(plan: Plan, findings: Sequence[Finding]) -> str:
    """What `placewise check` prints."""

    def shown(finding: Finding) -> list[str]:
        memory = finding.claim.startswith("memory of ")
        form = format_bytes if memory else format_seconds
        said, found = ("-" if x is None else form(x) for x in (finding.claimed, finding.found))
        limit = "no limit" if finding.claimed == math.inf else f"limit {said}"
        return [limit if memory else said, found]

    rows = [[finding.claim, *shown(finding), finding.verdict] for finding in findings]
    parts = [headline(plan), table(["what", "by the file", "worked out", "verdict"], "lrrl", rows)]
    if any(finding.verdict.startswith(TRUST) for finding in findings):
        parts.append(wrapped("on trust: what proves it is too long to be gone over here"))
    return "\n\n".join(parts)


def describe_verification(plan: Plan, seen: Verification) -> str:
    """What `placewise verify` prints."""

    def shown(claim: str, amount: float | None) -> str:
        if amount is None:
            return "-"
        if claim == "outputs":
            return f"{amount:.1e} off" if amount else "equal"
        if claim == "placement":
            return f"{amount:.0f} ops"
        return format_bytes(amount) if claim.startswith("memory of ") else format_seconds(amount)

    def verdict(f: Finding) -> str:
        return _off(f) if f.verdict == NO_CLAIM else f.verdict

    rows = [[f.claim, shown(f.claim, f.claimed), shown(f.claim, f.found), verdict(f)] for f in seen.findings]
    planned, plain = (f"{format_seconds(t.seconds)} (+- {format_share(t.spread)})" for t in (seen.placed, seen.plain))
    runs = f"With {seen.library}, one run takes {planned} as planned and {plain} without a plan."
    runs += f" The time may be {100 * seen.within:g}% off."
    exact = ", ".join(f"{dtype} within {far:.0e}" if far else f"{dtype} equal" for dtype, far in seen.tolerance.items())
    runs += f" Outputs must be alike: {exact}." if exact else ""
    runs += f" It was run with {seen.given}." if seen.given else ""
    claims = table(["claim", "predicted", "measured", "verdict"], "lrrl", rows)
    return "\n\n".join([headline(plan), claims, wrapped(runs)])


def _off(finding: Finding) -> str:
    return format_change(finding.found, finding.claimed) if finding.claimed and finding.found is not None else "-"


# ---- explanation -----------------------------------------------------------------------------------------------------


def describe_explanation(plan: Plan, why: Explanation) -> str:
    """What `placewise explain` prints: what decides first, then what the plan is."""
    parts = [headline(plan)]
    parts.append(wrapped(f"What limits it: {why.verdict}" if why.verdict else "Nothing that it runs takes time."))
    parts += [_loads(why)] if why.loads else _chain(plan, why) if why.chain else []
    parts.append(device_table(plan.timeline))
    if why.fullest and why.fullest.peak <= NEARLY_FULL * why.fullest.memory:  # else it is among what limits the plan
        parts.append(wrapped(f"The fullest is {why.fullest.device}. {what_fills(plan.timeline, why.fullest)}"))
    if not why.loads and len(plan.timeline.transfers):
        parts.append(_channels(plan.timeline))
    if why.runs:
        parts.append(_runs(why))
    if why.transfers:
        parts.append(_transfers(why, len(plan.timeline.transfers)))
    if plan.lower_bound > 0:
        parts.append(_bounds(plan))
    return "\n\n".join(parts)


def _bounds(plan: Plan) -> str:
    """What proves the bound: arguments that hold for any plan, by what each is owed to, and a planner's search."""
    known, owed_to = lower_bound(plan.problem).parts, made_of(plan.problem)
    rows = []
    for name, seconds in sorted(known.items(), key=lambda part: -part[1]):
        owed = owed_to[name]
        shares = [format_seconds(owed[what]) if owed.get(what) else "-" for what in INGREDIENTS]
        rows.append([name, format_seconds(seconds), _share(seconds, plan.value), *shares])
    title = "No plan can beat the largest of these bounds, broken down by what they count:"
    if plan.proved_by:
        title = f"No plan can beat {format_seconds(plan.lower_bound)}, by search ({_short(plan.proved_by)})"
        title += f": {PROOFS[plan.proved_by]}." if plan.proved_by in PROOFS else "."
        title += f" Arguments alone prove {rows[0][1]}; broken down by what they count:"
    bounds = _under(title, ["bound", "time", "of value", *INGREDIENTS], "lrrrrr", rows)
    meant = [wrapped(f"{name}: {text}", "  ") for name, text in BOUNDS.items() if name in known]
    return "\n".join([f"{bounds}\n", *meant])


def _channels(timeline: Timeline) -> str:
    """The busiest channels."""
    names = timeline.problem.cluster.channels
    transfer, channel = timeline.bookings
    sizes = timeline.problem.graph.tensor_bytes[timeline.transfers.tensor[transfer]]
    count, moved = (np.bincount(channel, weights, len(names)) for weights in (None, sizes))
    busy = timeline.channel_busy
    rows = [
        [names[c], f"{count[c]:,}", format_bytes(moved[c]), format_seconds(busy[c]), _share(busy[c], timeline.makespan)]
        for c in np.argsort(-busy, kind="stable")[:LARGEST].tolist()
        if count[c]
    ]
    used = int((count > 0).sum())
    header = ["channel" if used <= LARGEST else f"the busiest {LARGEST} of {used} channels"]
    return table([*header, "transfers", "bytes", "busy", "busy share"], "lrrrr", rows)


def _runs(why: Explanation) -> str:
    if len(why.runs) > SHOWN:
        return wrapped(f"Along the dataflow, the plan goes from one device to another {len(why.runs) - 1:,} times.")
    rows = [[run.device, str(run.ops), run.first, run.last] for run in why.runs]
    return _under("Where the ops are, in order:", ["device", "ops", "first op", "last op"], "lrll", rows)


def _transfers(why: Explanation, count: int) -> str:
    rows = [
        [moved.tensor, moved.where, format_bytes(moved.bytes), format_seconds(moved.seconds)]
        for moved in why.transfers[:LARGEST]
    ]
    title = _title("Transfers", len(rows), count, "transfers", "largest")
    return _under(f"{title}:", ["output of", "from and to", "size", "time"], "llrr", rows)


def _title(all_of_them: str, shown: int, count: int, things: str, which: str = "longest") -> str:
    return all_of_them if shown == count else f"The {shown} {which} of {count:,} {things}"


def _loads(why: Explanation) -> str:
    rows = [
        [
            load.where,
            *map(format_seconds, (load.compute, load.transfer, load.total)),
            ", ".join(
                ["sets the pace"] * load.sets_pace + [f"{load.replicas} replicas share it"] * (load.replicas > 1)
            ),
        ]
        for load in sorted(why.loads, key=lambda load: -load.total)
    ]
    header = ["per sample", "compute", "transfers", "load", "note"]
    said = _under("In a full pipeline the busiest device or channel sets the pace:", header, "lrrrl", rows)
    if len(why.pace_modules) < 2:
        return said
    pace, total = next(load.where for load in why.loads if load.sets_pace), sum(why.pace_modules.values())
    modules = list(why.pace_modules.items())
    if len(modules) > SHOWN:
        modules = [*modules[:SHOWN], (f"({len(modules) - SHOWN} others)", sum(s for _, s in modules[SHOWN:]))]
    spent = [[name, format_seconds(seconds), _share(seconds, total)] for name, seconds in modules]
    return "\n\n".join([said, _under(f"What {_short(pace)} spends it on:", ["module", "time", "share"], "lrr", spent)])


def _chain(plan: Plan, why: Explanation) -> list[str]:
    """The last finish, explained: in which modules, what kind of time, in which order."""
    total = sum(why.by_kind.values())
    modules = [
        [name, *(format_seconds(split[kind]) for kind in KINDS), _share(sum(split.values()), total)]
        for name, split in ({"all": why.by_kind} | _largest(why.by_module)).items()
    ]
    steps = [
        [
            plan.problem.graph.op_names[s.op],
            in_words(s.kind, s.where),
            format_seconds(s.seconds),
            _share(s.seconds, total),
        ]
        for s in sorted(why.chain, key=lambda step: -step.seconds)[:LARGEST]
    ]
    header = ["module", "compute", "transfer", "device", "channel", "share"]
    star = "*: the number of a layer; " if any("*" in name for name in why.by_module) else ""
    title = f"The critical path by module ({star}device, channel: waits behind it):"
    said = [_under(title, header, "lrrrrr", modules)]
    if len(why.stretches) <= SHOWN:
        rows = [[in_words(s.kind, s.where), s.first, s.last, format_seconds(s.seconds)] for s in why.stretches]
        said.append(_under("In order:", ["step", "first op", "last op", "time"], "lllr", rows))
    longest = _title("Its steps", len(steps), len(why.chain), "steps")
    return [*said, _under(f"{longest}:", ["op", "step", "time", "share"], "llrr", steps)]


def _largest(by_module: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The first rows, and all others as one."""
    rows, rest = list(by_module.items())[:SHOWN], list(by_module.values())[SHOWN:]
    if rest:
        rows.append((f"({len(rest)} others)", {kind: sum(split[kind] for split in rest) for kind in KINDS}))
    return dict(rows)


def describe_moves(plan: Plan, op: str, moves: Sequence[Move]) -> str:
    """What `placewise explain --op` prints: the op's time and the plan's value with this op elsewhere."""
    together = max(move.ops for move in moves)
    title = f"{_short(op)} is on {_short(next(move.device for move in moves if move.is_current))}"
    title += f"; the {together} ops that share its device would move with it." if together > 1 else "."
    rows: list[list[str]] = []
    broken: dict[str, list[str]] = {}  # devices by why the op cannot be there
    for move in moves:
        change = (
            "as planned" if move.is_current else "-" if move.value is None else format_change(move.value, plan.value)
        )
        value = "-" if move.value is None else format_seconds(move.value)
        rows.append([move.device, format_seconds(move.seconds), value, change])
        if move.problem:
            broken.setdefault(move.problem, []).append(_short(move.device))
    said = table(["device", "it takes", "the plan takes", "change"], "lrrr", rows)
    notes = [wrapped(f"Not on {in_a_row(devices)}: {problem}.", "  ") for problem, devices in broken.items()]
    return "\n\n".join([wrapped(title), said, *["\n".join(notes)] * bool(notes)])


def describe_what_if(plan: Plan, rows: Sequence[WhatIf]) -> str:
    """What `placewise explain --what-if` prints; differences are to planning once more without a change."""
    base = rows[0].planned
    cells = [
        [row.change, format_seconds(row.same), format_seconds(row.planned), format_change(row.planned, base)]
        for row in rows
    ]
    parts = [headline(plan), table(["change", "the same plan", "planned anew", "difference"], "lrrr", cells)]
    parts.append(wrapped(_what_gains(rows[1:], base)))
    if base < plan.value * (1 - 1e-3):
        again = f"{format_seconds(base)}: before hardware, give it more time"
        parts.append(wrapped(f"Without any change, planning once more finds {again}."))
    return "\n\n".join(parts)


def _what_gains(rows: Sequence[WhatIf], base: float) -> str:
    """In a sentence: which change makes the plan faster, and which do not."""
    gains = sorted(((1 - row.planned / base, row.change) for row in rows if base > 0), reverse=True)
    worth = [f"{_short(change)} ({format_share(gain)} less)" for gain, change in gains if gain >= 0.01]
    if not worth:
        return "None of these changes gains 1%: what limits the plan is elsewhere."
    rest = len(rows) - len(worth)
    return f"What gains most: {in_a_row(worth, len(worth))}{'; all else gains less than 1%' if rest else ''}."


def _share(part: float, whole: float) -> str:
    return "-" if not math.isfinite(whole) or whole == 0 else format_share(part / whole)


# ---- planners --------------------------------------------------------------------------------------------------------


def describe_planners(infos: Mapping[str, PlannerInfo], why_not: Mapping[str, str | None]) -> str:
    """What `placewise planners` prints; with `why_not`, whether each applies to a problem."""
    blocks = []
    for name, info in infos.items():
        options = ", ".join(f"{key}={default}" for key, (_, default) in info.options.items())
        lines = [info.summary, f"Minimises {', '.join(sorted(info.objectives))}."]
        lines += [f"Options: {options}."] if options else []
        if why_not:
            lines.append("Applies." if why_not[name] is None else f"Does not apply: {why_not[name]}.")
        blocks.append("\n".join([name, *(wrapped(line, "  ", "  ") for line in lines)]))
    return "\n".join(blocks)


def describe_engines(known: Mapping[str, Engine]) -> str:
    """What `placewise engines` prints."""
    blocks = (
        "\n".join([name, wrapped(found.summary, "  ", "  "), wrapped(written_for(found), "  ", "  ")])
        for name, found in known.items()
    )
    return "\n".join(blocks)


# ---- what is bundled -------------------------------------------------------------------------------------------------


def describe_profile(facts: Mapping[str, Any]) -> str:
    """What was measured, and how far the parts are from the whole."""
    rows = [
        ("different ops that take time", f"{facts['wanted']} ({facts['ops']} ops in all)"),
        ("measured", f"{facts['measured']}"),
    ]
    if facts["spread"] is not None:
        rows += [
            ("spread between quartiles", f"{format_share(facts['spread'])} in the median"),
            ("sum of the ops", format_seconds(facts["sum_of_ops"])),
            ("rates fitted to them", f"{format_share(facts['error'])} off, op by op, in the median"),
        ]
    if facts["whole"] is not None:
        ratio = facts["whole"] / facts["sum_of_ops"] if facts["sum_of_ops"] else math.nan
        rows.insert(-1, ("the whole model", f"{format_seconds(facts['whole'])} ({ratio:.2f} times the sum)"))
    title = f"{facts['model']} on {facts['hardware']} ({facts['library']})"
    hint = f"Kept as {facts['profile']}. A device of a cluster file uses it by `profile: {facts['profile']}`."
    if not facts["measured"]:
        hint = "Nothing was measured: no op of it can be run alone, or there are none."
    return f"{wrapped(title)}\n\n{table(('', ''), 'lr', rows)}\n\n{wrapped(hint)}"


def describe_zoo(models: Sequence[Mapping[str, Any]], boxes: Sequence[Cluster]) -> str:
    """What `placewise zoo` prints."""
    rows = [
        [m["model"], f"{m['ops']:,}", _count(m["parameters"]), f"{_count(m['flops'])}FLOP", format_bytes(m["bytes"])]
        for m in models
    ]
    alike: dict[str, list[str]] = {}
    for m in models:
        alike.setdefault(m["summary"], []).append(m["model"])
    return "\n\n".join([
        table(["model", "ops", "parameters", "work", "weights and state"], "lrrrr", rows),
        "\n".join(wrapped(f"{', '.join(named)}: {summary}.", "  ") for summary, named in alike.items()),
        "\n".join(wrapped(f"{box.name}: {', '.join(_equal_devices(box))}.", "  ") for box in boxes),
    ])  # fmt: skip


def describe_import(facts: Mapping[str, Any]) -> str:
    """What `placewise import` prints."""
    state = f", {format_bytes(facts['state_bytes'])} of state" if facts["state_bytes"] else ""
    return wrapped(
        f"{facts['model']}: {facts['ops']:,} ops, {_count(facts['parameters']).rstrip()} parameters, "
        f"{_count(facts['flops'])}FLOP, {format_bytes(facts['bytes'])} of weights{state}."
    )


def describe_training(facts: Mapping[str, Any]) -> str:
    """What `placewise train` prints."""
    updates, evaluations = facts["updates"], facts["evaluations"]
    if not updates:
        return wrapped(
            f"{facts['method']}: nothing is learned yet; {evaluations:,} evaluations are too few for one update."
        )
    best, mean = (f"{x:.3f}" if facts["relative"] else format_seconds(x) for x in (facts["best"], facts["mean"]))
    of = ", as shares of the time at the start of an episode" if facts["relative"] else ""
    return wrapped(
        f"{facts['method']}: {updates:,} update{'s' * (updates != 1)}, {evaluations:,} evaluations, "
        f"{facts['per_second']:,.0f} per second; best {best}, mean of the last update {mean}{of}."
    )


def _equal_devices(box: Cluster) -> list[str]:
    """Each device with its memory; those that follow each other with the same memory as one."""
    runs = [list(run) for _, run in groupby(box.devices, lambda device: (device.kind, device.memory))]
    return [
        (run[0].name if len(run) == 1 else f"{run[0].name} to {run[-1].name} each") + f" {format_bytes(run[0].memory)}"
        for run in runs
    ]


# ---- this machine ----------------------------------------------------------------------------------------------------


def describe_devices(machine: Machine) -> str:
    """What `placewise devices` prints."""
    present = [
        [d.name, d.title, "-" if d.cores is None else str(d.cores), format_bytes(d.free), format_bytes(d.total)]
        for d in machine.devices
    ]
    parts = [table(["device", "hardware", "cores", "free memory", "of"], "llrrr", present)]
    reached = [
        [device.name, what, *_measured(figure, unit)]
        for device in machine.devices
        for what, figure, unit in (
            *((f"{dtype} products", rate, "FLOP/s") for dtype, rate in device.flops.items()),
            ("memory bandwidth", device.bandwidth, "B/s"),
            ("overhead of an op", device.launch, "s"),
        )
        if figure
    ]
    copies = [
        [f"{link.source} -> {link.target}", what, *_measured(figure, unit)]
        for link in machine.links
        for what, figure, unit in (
            *((f"{kind} copies", rate, "B/s") for kind, rate in link.bandwidth.items()),
            ("latency", link.latency, "s"),
        )
        if figure
    ]
    parts.append(table(["where", "measured", "median", "+-", "samples"], "llrrr", reached + copies))
    libraries = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return "\n\n".join([*parts, wrapped(f"{machine.date}, {libraries}")])


def _measured(figure: Figure, unit: str) -> list[str]:
    median = format_seconds(figure.median) if unit == "s" else f"{_count(figure.median)}{unit}"
    return [median, format_share(figure.spread / 2), str(figure.samples)]


def _count(value: float) -> str:
    """Three significant digits with a prefix."""
    power = min(5, int(math.log10(value) // 3)) if value >= 1 else 0
    return f"{value / 1000**power:.3g} {['', 'K', 'M', 'G', 'T', 'P'][power]}"
