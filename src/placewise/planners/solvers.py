"""What solvers (OR-tools' MathOpt) may use of a budget, what that counts as, and how Ctrl-C ends them."""

from __future__ import annotations

import math
import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Literal

from placewise.driver import Context
from placewise.stdout import quiet

Solver = Literal["highs", "cpsat"]

_EVALUATIONS: Final = 50_000  # that a second of a solver counts as
_GLANCE: Final = 0.1  # seconds from one look at whether to go on to the next
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

    answer = _in_child(ctx, work) if hasattr(os, "fork") else work()
    if answer is None:
        return None
    if ctx.evaluations_left < sys.maxsize:
        built = model.get_num_variables() + model.get_num_linear_constraints()  # each as long as an evaluation
        ctx.spend(max(0, min(int(answer[0] * _EVALUATIONS) + built, ctx.evaluations_left - 1)))
    return result.parse_solve_result(result_pb2.SolveResultProto.FromString(answer[1]), model, validate=False)


def _in_child(ctx: Context, work: Callable[[], Any]) -> Any:
    """What the work comes to, in another process; None if Ctrl-C ended it.

    Signals are heard only outside compiled code, and HiGHS, once begun, cannot be asked to end.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: they are idle, and stay behind
        child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to both
            try:
                answer = pickle.dumps(work())
            except Exception as error:
                answer = pickle.dumps(RuntimeError(f"{error!r:.200}"))
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)
    os.close(writing)
    parts: list[bytes] = []
    try:
        while not parts or parts[-1]:
            if select.select([reading], [], [], _GLANCE)[0]:
                parts.append(os.read(reading, 1 << 16))
            elif ctx.should_stop() and ctx.stopped == "interrupted":
                return None
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)  # done, most often
        os.waitpid(child, 0)
    found = pickle.loads(b"".join(parts)) if parts[0] else RuntimeError("the solver ended without an answer")
    if isinstance(found, Exception):
        raise found
    return found
