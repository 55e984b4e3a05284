"""What the searches that `auto` races do in a second of CPU time, and how much of it is outside compiled code.

Only there a search holds Python's lock: two of them in two threads would do at most 1 / `outside` times as much as one.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

from harness import main, progress, random_problem
from placewise.driver import Budget, Context, compile_for
from placewise.planners import get, heft, list_scheduling, moves, order_search
from placewise.planners.auto import SEARCHES
from placewise.simulator import kernel
from placewise.simulator.bounds import lower_bound

KERNELS: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (kernel, ("run", "where_to_resume", "renumber", "tails")),
    (moves, ("_unit_moves", "_group_moves")),
    (heft, ("_schedule",)),
    (list_scheduling, ("_ready_queue",)),
    (order_search, ("_anneal",)),
)
compiled = 0.0  # seconds of CPU time


def _timed(function: Any) -> Any:
    def call(*arguments: Any) -> Any:
        global compiled
        began = time.thread_time()
        result = function(*arguments)
        compiled += time.thread_time() - began
        return result

    return call


def measure(options: Any) -> list[dict[str, Any]]:
    global compiled
    compile_for(random_problem(50, options.devices), get("auto"))
    for module, names in KERNELS:
        for name in names:
            setattr(module, name, _timed(getattr(module, name)))
    rows = []
    for ops in (100, 300, 1_000, 5_000):
        problem = random_problem(ops, options.devices)
        bound = lower_bound(problem).value
        for name, search in SEARCHES.items():
            progress(f"{ops} ops, {name}")
            ctx = Context(problem, Budget(), 0, bound, None, name, time.thread_time)
            compiled = 0.0
            for _ in search(ctx):
                if ctx.seconds >= options.seconds:
                    break
            row = {"ops": ops, "search": name, "evaluations/CPU s": ctx.evaluations / ctx.seconds}
            rows.append(row | {"outside": f"{1 - compiled / ctx.seconds:.0%}"})
    return rows


if __name__ == "__main__":
    settings = {
        "devices": {"type": int, "default": 4},
        "seconds": {"type": float, "default": 1.0, "help": "CPU time of each search"},
    }
    main("The searches: evaluations, and time outside compiled code", measure, **settings)
