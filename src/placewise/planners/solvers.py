"""What solvers (OR-tools' MathOpt) may use of a budget, what that counts as, and how Ctrl-C ends them."""

from __future__ import annotations

import math
import sys
import time
from datetime import timedelta
from typing import Any, Final, Literal

from placewise.apart import answer
from placewise.driver import Context
from placewise.stdout import quiet

Solver = Literal["highs", "cpsat"]

_EVALUATIONS: Final = 50_000  # that a second of a solver counts as
_DETERMINISTIC: Final = "deterministic_time:"  # in CP-SAT's log, which alone says so


def countable(ctx: Context, solver: Solver) -> Solver:
    """A solver whose work can be counted, where the budget is in evaluations alone: then it is CP-SAT.

    What HiGHS has done when it ends can be told, but not in advance: the first node may take minutes.
    """
    counts = math.isinf(ctx.seconds_left) and ctx.evaluations_left < sys.maxsize
    return "cpsat" if counts else solver


def effort(ctx: Context) -> float:
    """Seconds that are spent; without a clock, what the evaluations amount to."""
    return ctx.seconds if math.isfinite(ctx.seconds_left) else ctx.evaluations / _EVALUATIONS


def effort_left(ctx: Context) -> float:
    """How many seconds the budget allows, by clock and by evaluations; infinite without either."""
    counted = ctx.evaluations_left / _EVALUATIONS if ctx.evaluations_left < sys.maxsize else math.inf
    return min(ctx.seconds_left, counted)


def solve(ctx: Context, model: Any, solver: Solver, seconds: float, nodes: int, asked: Any, **arguments: Any) -> Any:
    """What MathOpt finds within so much effort. None where Ctrl-C ended it.

    Without a clock, HiGHS has so many nodes instead; CP-SAT, if nothing else ends it, a hundredth of them in units of
    about a second.

    Counts as the evaluations that would have taken as long; one is left for the plan that it finds.
    """
    from ortools.math_opt import result_pb2
    from ortools.math_opt.python import mathopt, result

    log: list[str] = []
    timed = math.isfinite(ctx.seconds_left)
    if timed:
        asked.time_limit = timedelta(seconds=max(seconds, 0.01))
    if solver == "highs":
        kind = mathopt.SolverType.HIGHS
        asked.highs.int_options["threads"] = 1
        if not timed:
            asked.highs.int_options["mip_max_nodes"] = nodes
    else:
        kind, asked.threads = mathopt.SolverType.CP_SAT, 1
        asked.cp_sat.mip_max_bound = 2.0**50  # else it cuts off what is above 1e7, and calls the rest infeasible
        if not timed:
            asked.cp_sat.max_deterministic_time = seconds if math.isfinite(seconds) else nodes / 100
            arguments["msg_cb"] = log.extend

    def work() -> tuple[float, bytes]:
        began = time.perf_counter()
        with quiet():
            proto = mathopt.solve(model, kind, params=asked, **arguments).to_proto()
        used = time.perf_counter() - began
        if "msg_cb" in arguments:
            used = next((float(line.split()[-1]) for line in log if line.startswith(_DETERMINISTIC)), seconds)
        return used, proto.SerializeToString()

    found = answer(work, lambda: not (ctx.should_stop() and ctx.stopped == "interrupted"))
    if found is None:
        return None
    if ctx.evaluations_left < sys.maxsize:
        built = model.get_num_variables() + model.get_num_linear_constraints()  # each as long as an evaluation
        ctx.spend(max(0, min(int(found[0] * _EVALUATIONS) + built, ctx.evaluations_left - 1)))
    return result.parse_solve_result(result_pb2.SolveResultProto.FromString(found[1]), model, validate=False)
