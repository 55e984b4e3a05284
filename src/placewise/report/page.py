"""Plans as one HTML file that opens from disk and asks no one for anything.

The page itself is made from the sources in `page/` and lies, ready, in `html/`. Here its data is written: numbers as
typed arrays behind a JSON header, compressed, in base64. A name that holds markup therefore never meets the markup
around it. What is too much to look at is joined first: an *item* is an op, or many that share a module and their
devices; a *slice* is what a device or channel does for a while.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from placewise.costs import LABELS
from placewise.graph import Graph, Ints, module_parts
from placewise.plans import Plan
from placewise.report.explain import KINDS, Step, explain, occupied
from placewise.simulator import Timeline
from placewise.terminal import printable

#: More ops or slices than these are joined; a page with as many opens in a moment.
MAX_ITEMS: Final = 120_000
MAX_SLICES: Final = 250_000
MAX_POINTS: Final = 4_000  # of the memory of a device
MAX_STEPS: Final = 20_000  # of the chain that ends last
FAN: Final = 48  # what one click unfolds
FEW: Final = 4  # ops between two modules that need no node of their own
MOST: Final = 0.8  # of the ops of a node without a module: their kind is its name
LONGEST: Final = 120  # characters: no one reads a name that fills the screen

_LEFTWARD: Final = "[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\U00010800-\U00010fff\U0001e800-\U0001efff]+"
_LEFTWARDS: Final = re.compile(f"{_LEFTWARD}(?: {_LEFTWARD})*")

Array = NDArray[Any]


def to_page(
    plans: Sequence[Plan],
    titles: Sequence[str] | None = None,
    verifications: Sequence[Mapping[str, Any] | None] = (),
) -> str:
    """The page as text. `verifications` are the facts of `verify.Verification`, one for each plan in turn."""
    named = titles or [plan.planner for plan in plans]
    seen = [*verifications, *[None] * len(plans)]
    graphs: dict[str, list[int]] = {}
    for i, plan in enumerate(plans):
        graphs.setdefault(plan.problem.graph.digest, []).append(i)
    tables: list[dict[str, Any]] = []
    shown: dict[int, dict[str, Any]] = {}
    for alike in graphs.values():
        items = _Items(plans[alike[0]].problem.graph, [plans[i].placement for i in alike])
        for i in alike:
            shown[i] = {"title": named[i], "graph": len(tables), **_plan(plans[i], items), "verified": seen[i]}
        tables.append(items.table())
    data = {"graphs": tables, "plans": [shown[i] for i in range(len(plans))], "labels": [*LABELS, "several"]}
    first = plans[0].problem
    readable = _Readable()
    parts = {
        "title": html.escape(f"{readable(first.graph.name)} on {readable(first.cluster.name)}"),
        "style": _bundled("page.css"),
        "script": _bundled("page.js"),
        "data": _packed(readable(data)),
    }
    # In one pass, for a title may hold what looks like the place of another part.
    return re.sub(r"\{\{(title|style|script|data)\}\}", lambda place: parts[place[1]], _bundled("template.html"))


class _Readable:
    """Texts as they can be shown, which differ where names do.

    A name may hold any characters, but not steer what is around it: what cannot be seen is written out, as in the
    terminal, and what is read from right to left is kept apart, lest the numbers beside it change places.
    """

    def __init__(self) -> None:
        self._short: dict[str, str] = {}
        self._alike: Counter[str] = Counter()

    def __call__(self, value: Any) -> Any:
        """A text, or all texts within."""
        if isinstance(value, str):
            return self._text(self._cut(value))
        if isinstance(value, dict):
            return {key: self._prose(one) if key == "verdict" else self(one) for key, one in value.items()}
        return [self(one) for one in value] if isinstance(value, (list, tuple)) else value

    def _text(self, text: str) -> str:
        if text.isascii() and text.isprintable():
            return text
        return _LEFTWARDS.sub("\N{FIRST STRONG ISOLATE}\\g<0>\N{POP DIRECTIONAL ISOLATE}", printable(text))

    def _cut(self, name: str) -> str:
        """Without its middle, if it is long; of names that are alike but for their middles, each has a number there."""
        if len(name) <= LONGEST:
            return name
        if name not in self._short:
            head, tail = name[: LONGEST // 2], name[-LONGEST // 4 :]
            self._alike[head + tail] += 1
            number = self._alike[head + tail]
            self._short[name] = f"{head}…{tail}" if number == 1 else f"{head}…{number}…{tail}"
        return self._short[name]

    def _prose(self, text: str) -> str:
        """Names within sentences, without the stop that may follow them."""
        return self._text(re.sub(rf"\S{{{LONGEST},}}?(?=[.,;:)]?(?:\s|$))", lambda name: self._cut(name[0]), text))


def _bundled(name: str) -> str:
    return (resources.files("placewise.report") / "html" / name).read_text(encoding="utf-8")


def _packed(data: Any) -> str:
    """Length of the header, the header, the arrays; each begins at a multiple of eight bytes."""
    body: list[bytes] = []
    size = 0

    def place(array: Array) -> dict[str, Any]:
        nonlocal size
        raw = array.astype(array.dtype.newbyteorder("<")).tobytes()
        found = {"$": array.dtype.str[1:], "at": size, "n": len(array)}
        body.append(raw + b"\0" * (-len(raw) % 8))
        size += len(body[-1])
        return found

    header = json.dumps(data, default=place, allow_nan=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    whole = len(header).to_bytes(8, "little") + header + b"".join(body)
    return base64.b64encode(gzip.compress(whole, compresslevel=6, mtime=0)).decode()


# ---- what is shown of a graph ----------------------------------------------------------------------------------------


class _Items:
    """The ops of a graph as items, and the tree of modules that they are folded into; one for all plans of a graph."""

    def __init__(self, graph: Graph, placements: list[Ints]) -> None:
        self.graph = graph
        few = graph.num_ops <= MAX_ITEMS
        grain = 1 if few else 16 * math.ceil(graph.num_ops / MAX_ITEMS)
        self.rank = _flow(graph)
        self.tree = _Tree(graph, self.rank, grain)
        self.of_op = np.arange(graph.num_ops) if few else self._joined(placements)
        self.count = np.bincount(self.of_op, minlength=1 if graph.num_ops else 0)
        self.first = np.full(len(self.count), graph.num_ops)  # an op of each item
        np.minimum.at(self.first, self.of_op, np.arange(graph.num_ops))

    def _joined(self, placements: list[Ints]) -> NDArray[np.int64]:
        """Ops of one leaf of the tree that share a device in every plan are one item."""
        key = self.tree.leaf.astype(np.int64)
        for placement in placements:
            key = np.unique(key * (int(placement.max()) + 1) + placement, return_inverse=True)[1]
        return np.asarray(np.unique(key, return_inverse=True)[1])

    def sum(self, values: Array) -> Array:
        """Per op to per item."""
        return np.bincount(self.of_op, values, len(self.count))

    def table(self) -> dict[str, Any]:
        """For the page."""
        graph, names = self.graph, self.graph.op_names
        kinds = list(dict.fromkeys(graph.op_kinds))
        index = {kind: i for i, kind in enumerate(kinds)}
        made = np.bincount(graph.tensor_producer, graph.tensor_bytes, graph.num_ops)
        source, target = self.of_op[graph.edge_producer], self.of_op[graph.consumers]
        size = graph.tensor_bytes[graph.edge_tensor]
        fresh = np.diff(graph.edge_tensor, prepend=-1) != 0
        if len(self.count) < graph.num_ops:
            pair, inverse = np.unique(source * len(self.count) + target, return_inverse=True)
            size = np.bincount(inverse, size, len(pair)).astype(np.float64)
            source, target = np.divmod(pair, len(self.count))
            fresh = np.ones(len(pair), bool)  # many tensors at once
        apart = source != target
        counts = self.count.tolist()
        return {
            "name": graph.name,
            "ops": graph.num_ops,
            "names": [
                names[op] if n == 1 else f"{names[op]} and {n - 1:,} more"
                for op, n in zip(self.first.tolist(), counts, strict=True)
            ],
            "count": self.count.astype(np.uint32),
            "kinds": kinds,
            "kind": np.array([index[graph.op_kinds[op]] for op in self.first.tolist()], np.uint16),
            "stored": graph.is_stored[self.first].astype(np.uint8),
            "bytes": self.sum(made).astype(np.float32),
            "resident": self.sum(graph.resident_bytes).astype(np.float32),
            "rank": self.rank[self.first].astype(np.uint32),
            "node": self.tree.leaf[self.first].astype(np.uint32),
            "source": source[apart].astype(np.uint32),
            "target": target[apart].astype(np.uint32),
            "size": size[apart].astype(np.float32),
            "fresh": np.diff(np.cumsum(fresh)[apart], prepend=0).astype(bool).astype(np.uint8),
            "parent": np.array(self.tree.parent, np.int32),
            "labels": self.tree.labels,
            "paths": self.tree.paths,
        }


def _flow(graph: Graph) -> NDArray[np.int64]:
    """[N] the place of each op in the dataflow; weights, which come before all else, go where they are first read."""
    ops = np.arange(graph.num_ops)
    place = np.empty(graph.num_ops, np.int64)
    place[graph.topological_order] = ops
    read = np.full(graph.num_ops, graph.num_ops)
    np.minimum.at(read, graph.edge_producer, place[graph.consumers])
    place[np.lexsort((place, ~graph.is_stored, np.where(graph.is_stored, read, place)))] = ops
    return place


class _Tree:
    """Modules within modules, the whole first. Where one would unfold into too many, neighbours share a node."""

    def __init__(self, graph: Graph, rank: NDArray[np.int64], grain: int) -> None:
        self.parent: list[int] = []
        self.labels: list[str] = []
        self.paths: list[str] = []  # the module; "" where the node is none
        self.leaf = np.zeros(graph.num_ops, np.int64)  # [N] the node right above each op
        self._names, self._kinds, self._grain = graph.op_names, graph.op_kinds, grain
        self._prefixes, self._paths, self._ends = _module_prefixes(graph)
        self._unfold(self._node(-1, graph.name, ""), np.argsort(rank), 0)

    def _node(self, parent: int, label: str, path: str) -> int:
        self.parent.append(parent)
        self.labels.append(label)
        self.paths.append(path)
        return len(self.parent) - 1

    def _unfold(self, node: int, ops: NDArray[np.int64], depth: int) -> None:
        """The ops of a module, by dataflow: its own are children each, others belong to the module below."""
        below = self._prefixes[ops, depth] if depth < self._prefixes.shape[1] else np.full(len(ops), -1)
        key = np.where(below < 0, -1 - np.arange(len(ops)), below)
        _, first, child = np.unique(key, return_index=True, return_inverse=True)
        order = np.argsort(first[child], kind="stable")  # children as they first run, and so are the ops of each
        starts = np.flatnonzero(np.diff(first[child][order], prepend=-1))
        self._share(node, ops[order], starts, below[order][starts], depth)

    def _share(self, node: int, ops: NDArray[np.int64], starts: Array, module: Array, depth: int) -> None:
        """Children begin at `starts`; each is an op, or a `module` that is not -1."""
        n = len(starts)
        if len(ops) <= self._grain:
            self.leaf[ops] = node
            return
        if not (module >= 0).any() and n <= FAN:
            self.leaf[ops] = node
            return
        ends = np.append(starts[1:], len(ops)).tolist()
        units = self._units(module)
        if len(units) > max(FAN, self._grain):
            levels = math.ceil(math.log(len(units) / self._grain, FAN))
            parts = math.ceil((len(units) / self._grain) ** (1 / levels))
            for some in np.array_split(np.arange(len(units)), min(parts, len(units))):
                i, last = units[some[0]][0], units[some[-1]][1] - 1
                a, b = starts[i], ends[last]
                label = self._span(ops[a], module[i], ops[b - 1], module[last])
                self._share(
                    self._node(node, label, ""), ops[a:b], starts[i : last + 1] - a, module[i : last + 1], depth
                )
            return
        for i, after in units:
            inside = ops[starts[i] : ends[after - 1]]
            if module[i] >= 0:
                within = [m for m in self._prefixes[inside[0], depth:].tolist() if m >= 0]
                within = within if len(inside) == 1 else within[:1]  # around a single op, all modules are one node
                label = ".".join(self._ends[m] for m in within)
                self._unfold(self._node(node, label, self._paths[within[-1]]), inside, depth + len(within))
            elif after - i > FEW:
                self._share(
                    self._node(node, self._between(inside), ""),
                    inside,
                    starts[i:after] - starts[i],
                    module[i:after],
                    depth,
                )
            else:
                self.leaf[inside] = node

    @staticmethod
    def _units(module: Array) -> list[tuple[int, int]]:
        """Children that stay together: each module, and what lies between two, so that modules are seen first."""
        own = module < 0
        if own.all():
            return [(i, i + 1) for i in range(len(module))]
        runs = np.append(np.flatnonzero(~own | np.append(True, ~own[:-1])), len(module)).tolist()
        found: list[tuple[int, int]] = []
        for i, after in pairwise(runs):
            found += [(i, after)] if after - i > FEW else [(k, k + 1) for k in range(i, after)]
        return found

    def _between(self, ops: Array) -> str:
        """Where nearly all are of one kind, as sums of gradients are, this tells more than the first and the last."""
        kinds = Counter(self._kinds[op] for op in ops.tolist())
        [(kind, most)] = kinds.most_common(1)
        return f"{kind} ops" if most > MOST * len(ops) else self._span(ops[0], -1, ops[-1], -1)

    def _span(self, op: int, module: int, last_op: int, last_module: int) -> str:
        ends = ((op, module), (last_op, last_module))
        return " … ".join(self._names[o] if m < 0 else self._ends[m] for o, m in ends)


def _module_prefixes(graph: Graph) -> tuple[Array, list[str], list[str]]:
    """([N, depth] the modules around each op, the outermost first, then -1; the path of each; its last name)."""
    known: dict[tuple[str, ...], int] = {}
    rows: dict[tuple[str, int], list[int]] = {}
    several = len(graph.models) > 1
    of_op = np.empty(graph.num_ops, np.int64)
    for op, key in enumerate(zip(graph.op_modules, graph.model.tolist(), strict=True)):
        if key not in rows:
            parts = (*(graph.models[key[1]],) * several, *module_parts(key[0]))
            rows[key] = [known.setdefault(parts[: i + 1], len(known)) for i in range(len(parts))]
        of_op[op] = rows[key][-1] if rows[key] else -1
    depth = max(map(len, rows.values()), default=0)
    table = np.full((len(known) + 1, depth), -1)  # the last row is that of no module
    for row in rows.values():
        if row:
            table[row[-1], : len(row)] = row
    return table[of_op], [".".join(parts) for parts in known], [parts[-1] for parts in known]


# ---- what is shown of a plan -----------------------------------------------------------------------------------------


def _plan(plan: Plan, items: _Items) -> dict[str, Any]:
    problem, timeline = plan.problem, plan.timeline
    why = explain(timeline)
    ops = np.arange(problem.num_ops)
    label = problem.costs.label[ops, plan.placement][items.first]
    mixed = items.sum(problem.costs.label[ops, plan.placement]) != label.astype(np.int64) * items.count
    lanes = _Lanes(timeline)
    return {
        **{name: getattr(plan, name) for name in ("value", "gap", "planner", "found_by", "proved_by", "stopped")},
        **{name: getattr(plan, name) for name in ("seconds", "evaluations", "version", "seed")},
        "bound": plan.lower_bound,
        "cluster": problem.cluster.name,
        "objective": problem.objective,
        "execution": asdict(problem.execution),
        "makespan": timeline.makespan,
        "whole": occupied(timeline)[2],
        "ends": _ends(timeline),
        "bytes_moved": timeline.bytes_moved,
        "transfers": len(timeline.transfers),
        "cost_shares": plan.cost_shares,
        "history": [list(point) for point in plan.history],
        "bounds": [list(point) for point in plan.bounds],
        "verdict": why.verdict,
        "by_kind": why.by_kind,
        "by_module": [{"module": name, "seconds": list(split.values())} for name, split in why.by_module.items()],
        "loads": [asdict(load) for load in why.loads],
        "pace_modules": list(why.pace_modules.items()),
        "devices": _devices(timeline),
        "channels": lanes.channels(),
        "memory": [_memory(timeline, d) for d in range(problem.num_devices)],
        "device": plan.placement[items.first].astype(np.uint16),
        "label": np.where(mixed, len(LABELS), label).astype(np.uint8),
        "time": _short(items.sum(timeline.finish - timeline.start)),
        "slices": lanes.slices(items),
        "chain": lanes.chain(why.chain, items),
        "kinds": list(KINDS),
    }


def _short(numbers: Array) -> Array:
    """In four bytes each, unless these are too few to tell a number from none."""
    few = numbers.astype(np.float32)
    return few if np.array_equal(few > 0, numbers > 0) else numbers


def _ends(timeline: Timeline) -> list[list[Any]]:
    """When each model ends, where it is their sum that counts."""
    graph = timeline.problem.graph
    if timeline.problem.objective != "completion":
        return []
    ends = np.zeros(len(graph.models))
    np.maximum.at(ends, graph.model, timeline.finish)
    return [list(pair) for pair in zip(graph.models, ends.tolist(), strict=True)]


def _devices(timeline: Timeline) -> list[dict[str, Any]]:
    problem, moving = timeline.problem, timeline.transfers
    size = problem.graph.tensor_bytes[moving.tensor]
    n = problem.num_devices
    ops = np.bincount(timeline.placement, minlength=n)
    resident = np.bincount(timeline.placement, problem.graph.resident_bytes, n)
    busy = occupied(timeline)[0]
    sent, received = (np.bincount(ends, size, n) for ends in (moving.source, moving.target))
    return [
        {
            "name": device.name,
            "kind": device.kind,
            "memory": device.memory if math.isfinite(device.memory) else None,
            "ops": int(ops[d]),
            "busy": float(busy[d]),
            "peak": float(timeline.peak[d]),
            "resident": float(resident[d]),
            "sent": float(sent[d]),
            "received": float(received[d]),
        }
        for d, device in enumerate(problem.cluster.devices)
    ]


def _memory(timeline: Timeline, device: int) -> dict[str, Array]:
    """What a device holds over time; where there are many moments, the most that it holds in a few of them."""
    times, held = timeline.memory_profile(device)
    first = np.arange(0, len(times), math.ceil(len(times) / MAX_POINTS))
    return {"times": times[first], "bytes": np.maximum.reduceat(held, first).astype(np.float32)}


class _Lanes:
    """What happens where: a lane for each device, then one for each channel that carries something."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.used = np.unique(timeline.bookings[1])
        self._devices = timeline.problem.num_devices

    def channels(self) -> list[dict[str, Any]]:
        """For the page."""
        timeline, names = self.timeline, self.timeline.problem.cluster.channels
        transfer, channel = timeline.bookings
        size = timeline.problem.graph.tensor_bytes[timeline.transfers.tensor[transfer]]
        count, moved = np.bincount(channel, minlength=len(names)), np.bincount(channel, size, len(names))
        facts = zip(occupied(timeline)[1][self.used], moved[self.used], count[self.used], strict=True)
        return [
            {"name": names[c], "busy": float(busy), "bytes": float(total), "transfers": int(n)}
            for c, (busy, total, n) in zip(self.used.tolist(), facts, strict=True)
        ]

    def slices(self, items: _Items) -> dict[str, Any]:
        """By lane, then by start. `item` runs, or its output moves for `reader`; `count` of them are one slice."""
        timeline, graph, moving = self.timeline, self.timeline.problem.graph, self.timeline.transfers
        runs = np.flatnonzero(~graph.is_stored)
        transfer, channel = timeline.bookings
        lane = np.concatenate([timeline.placement[runs], self._devices + np.searchsorted(self.used, channel)])
        start = np.concatenate([timeline.start[runs], moving.start[transfer]])
        finish = np.concatenate([timeline.finish[runs], moving.finish[transfer]])
        item = items.of_op[np.concatenate([runs, graph.tensor_producer[moving.tensor[transfer]]])]
        reader = items.of_op[np.concatenate([runs, moving.reader[transfer]])]
        size = np.concatenate([np.zeros(len(runs)), graph.tensor_bytes[moving.tensor[transfer]]])
        target = np.concatenate([timeline.placement[runs], moving.target[transfer]])
        order = np.lexsort((start, lane))
        lane, start, finish, size = lane[order], start[order], finish[order], size[order]
        step = max(1, math.ceil(len(order) / MAX_SLICES))
        # Every `step` slices of a lane become one.
        begins = np.flatnonzero(np.diff(lane, prepend=-1))
        place = np.arange(len(lane)) - np.repeat(begins, np.diff(begins, append=len(lane)))
        first = np.flatnonzero(place % step == 0)

        def joined(values: Array, how: np.ufunc) -> Array:
            return how.reduceat(values, first) if len(first) else values

        return {
            "lane": lane[first].astype(np.uint32),
            "start": start[first],
            "length": _short(joined(finish, np.maximum) - start[first]),
            "busy": _short(joined(finish - start, np.add)),
            "count": np.diff(first, append=len(lane)).astype(np.uint32),
            "item": item[order][first].astype(np.uint32),
            "reader": reader[order][first].astype(np.uint32),
            "target": target[order][first].astype(np.uint16),
            "bytes": joined(size, np.add).astype(np.float32),
        }

    def chain(self, steps: Sequence[Step], items: _Items) -> dict[str, Array]:
        """The steps that end last, the longest of them where they are many."""
        cluster = self.timeline.problem.cluster
        names = cluster.device_names
        lane_of = {name: d for d, name in enumerate(names)}
        for (a, b), channels in cluster.channels_of.items():
            at = int(np.searchsorted(self.used, channels[0]))
            if at < len(self.used) and self.used[at] == channels[0]:
                lane_of[f"{names[a]}->{names[b]}"] = self._devices + at
        if len(steps) > MAX_STEPS:
            steps = sorted(sorted(steps, key=lambda step: -step.seconds)[:MAX_STEPS], key=lambda step: step.start)
        return {
            "kind": np.array([KINDS.index(step.kind) for step in steps], np.uint8),
            "lane": np.array([lane_of[step.where] for step in steps], np.uint32),
            "start": np.array([step.start for step in steps], np.float64),
            "length": _short(np.array([step.seconds for step in steps], np.float64)),
            "item": items.of_op[np.array([step.op for step in steps], np.int64)].astype(np.uint32),
        }
