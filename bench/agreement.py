"""Exact planners beside brute force: random small problems of each objective and option, every one tried out in full.

    python bench/agreement.py --count 1000
    python bench/agreement.py --only milp

A problem has 5 to 7 ops on 2 to 4 devices, and some of everything: groups, pins, limits of memory, links that differ,
several outputs and readers. `able` counts problems that have a plan, and `same` plans whose value is the best of all
placements (and orders, for cpsat and series). `true` counts bounds that are not above the best, `proved` those that
meet the plan's value, and `checked` plans of which placewise.certificate refutes nothing. Brute force judges placements
with the simulator, which tests/reference.py equals bit for bit. Problems are drawn as in the tests, with other seeds.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from harness import main, progress
from placewise import Budget, NoFeasiblePlan, Problem, Unsupported, plan
from placewise.certificate import check
from placewise.sharding import plan_sharded, sharded, ways

sys.path.append(str(Path(__file__).parent.parent / "tests"))
import test_cpsat
import test_ideals
import test_milp
import test_min_cut
import test_replication
import test_series
import test_slots
from oracles import brute_force

Draw = Callable[[int], Problem | None]
FIRST = 1_000_000  # seed of the first problem; above all that tests use


def intervals(seed: int, *, equal: bool) -> Problem:
    rng = np.random.default_rng(seed)
    problem = test_ideals.pipeline(rng)
    return test_ideals.with_equal_links(rng, problem) if equal else problem


def in_stages(seed: int, *, option: str, branches: bool = False, boxes: bool = False) -> Problem:
    rng = np.random.default_rng(seed)
    problem = test_replication.step(rng, branches=branches, **test_replication.OPTIONS[option])
    return test_replication.in_boxes(problem) if boxes else problem


def anything(seed: int) -> Problem:
    settings = test_milp.SETTINGS[seed % len(test_milp.SETTINGS)]
    return test_milp.small(seed, settings, constrained=seed % 3 == 0, integers=seed % 5 > 0)


def in_slots(seed: int, *, most: int) -> Problem | None:
    problem, _ = test_slots.random_slots(seed, max_ops=6, max_devices=3, constrained=True, most_slots=most)
    return None if problem.contiguous or problem.max_devices else problem


def in_time(seed: int, *, objective: str) -> Problem:
    return test_cpsat.drawn(2 * seed + (objective == "completion"))


def blocks(seed: int) -> Problem | None:
    problem = test_series.in_series(np.random.default_rng(seed), blocks=2, width=2, devices=2, groups=seed % 4 == 0)
    return problem if problem.num_ops <= 6 else None


def one_by_one(seed: int, *, memory: bool, devices: int = 2) -> Problem | None:
    return test_min_cut.sequential(seed, devices=devices, memory=memory)


#: What is asked, of whom, with which options.
CASES: list[tuple[str, str, dict[str, Any], Draw]] = [
    ("intervals, equal", "ideals", {}, partial(intervals, equal=True)),
    ("intervals, any", "ideals", {}, partial(intervals, equal=False)),
    *((f"stages, {option}", "ideals", {}, partial(in_stages, option=option)) for option in test_replication.OPTIONS),
    ("stages, all, in boxes", "ideals", {}, partial(in_stages, option="all", boxes=True)),
    ("branches, all", "ideals", {}, partial(in_stages, option="all", branches=True)),
    ("branches, all, in boxes", "ideals", {}, partial(in_stages, option="all", branches=True, boxes=True)),
    ("stages, replicate, shards", "ideals", {}, partial(in_stages, option="replicate")),
    ("throughput", "milp", {"solver": "highs"}, anything),
    ("throughput", "milp", {"solver": "cpsat"}, anything),
    ("one slot", "slot-milp", {"solver": "highs"}, partial(in_slots, most=1)),
    ("one slot", "slot-milp", {"solver": "cpsat"}, partial(in_slots, most=1)),
    ("up to 3 slots", "slot-milp", {"solver": "highs"}, partial(in_slots, most=3)),
    ("latency", "cpsat", {}, partial(in_time, objective="latency")),
    ("completion", "cpsat", {}, partial(in_time, objective="completion")),
    ("latency, in series", "series", {}, blocks),
    ("the same, memory", "series", {}, test_series.short_of_memory),
    ("sequential", "min-cut", {}, partial(one_by_one, memory=False)),
    ("sequential, memory", "min-cut", {}, partial(one_by_one, memory=True)),
    ("sequential, 3 devices", "min-cut", {}, partial(one_by_one, memory=True, devices=3)),
    ("latency", "auto", {}, partial(in_time, objective="latency")),
    ("completion", "auto", {}, partial(in_time, objective="completion")),
    ("throughput", "auto", {}, anything),
]
#: Evaluations, for planners that go on as long as they may.
BUDGETS = {"milp": 20_000, "slot-milp": 100, "cpsat": 200_000, "series": 400_000, "auto": 100_000}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for asked, planner, settings, draw in CASES:
        title = f"{planner} {settings['solver']}" if settings else planner
        if options.only in f"{asked}: {title}":
            shards = 4 if asked.endswith("shards") else 1
            rows.append({"problem": asked, "planner": title} | tally(draw, planner, settings, options, shards))
            progress(" ".join(map(str, rows[-1].values())))
    return rows


def tally(
    draw: Draw, planner: str, settings: dict[str, Any], options: argparse.Namespace, shards: int
) -> dict[str, int]:
    met = dict.fromkeys(("drawn", "able", "same", "true", "proved", "checked"), 0)
    budget = Budget(evaluations=BUDGETS.get(planner))
    for problem in problems(draw, options.first, options.count):
        timed = planner in ("cpsat", "series") or (planner == "auto" and problem.objective != "throughput")
        best = test_cpsat.the_best(problem) if timed else brute_force(problem)[0] if problem.num_ops else 0.0
        met["drawn"] += 1
        ask = plan
        if shards > 1:
            best = min(brute_force(sharded(problem, way))[0] for way in ways(problem, shards))
            ask = partial(plan_sharded, most=shards)
        try:
            found = ask(problem, planner=planner, budget=budget, options=settings)
        except NoFeasiblePlan:
            met["able"] += math.isfinite(best)
            continue
        except Unsupported:
            met["drawn"] -= 1
            continue
        met["able"] += 1
        met["same"] += math.isclose(found.value, best, rel_tol=1e-5 if settings else 1e-9, abs_tol=1e-12) or (
            planner == "min-cut" and found.value < best  # with an order that makes room, which was not tried out
        )
        met["true"] += found.lower_bound <= best * (1 + 1e-9)
        met["proved"] += found.gap <= (1e-4 if settings else 2e-9)
        met["checked"] += not any(finding.is_wrong for finding in check(found))
    return met


def problems(draw: Draw, seed: int, count: int) -> Iterator[Problem]:
    """So many that are of the kind, by seeds from one on."""
    while count:
        problem = draw(seed)
        seed += 1
        if problem is not None:
            count -= 1
            yield replace(problem)  # nothing is known of it yet


if __name__ == "__main__":
    main(
        "Exact planners beside brute force",
        measure,
        count={"type": int, "default": 1000, "help": "problems of each kind"},
        first={"type": int, "default": FIRST, "help": "seed of the first problem"},
        only={"default": "", "help": "cases whose text has this in it"},
    )
