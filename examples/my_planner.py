"""A planner in one file. Run it: `python examples/my_planner.py`."""

import numpy as np

import placewise as pw


@pw.planner("sweep")
def sweep(problem: pw.Problem, ctx: pw.Context, *, shares: int = 20) -> None:
    """One op after the other onto the fastest device, until a share of its memory is full; then onto the next."""
    seconds = problem.unit_seconds  # a unit: ops that must share a device; infinite where it may not run
    size = problem.per_unit(problem.graph.resident_bytes)
    fastest_first = np.argsort(np.where(np.isfinite(seconds), seconds, 0.0).sum(axis=0))
    for share in np.linspace(1.0, 0.0, shares, endpoint=False):
        if ctx.should_stop():
            break
        room, left = share * problem.capacity, fastest_first.tolist()
        device = np.zeros(problem.num_units, np.int32)
        for unit in range(problem.num_units):
            while len(left) > 1 and room[left[0]] < size[unit]:
                left.pop(0)
            device[unit] = left[0] if np.isfinite(seconds[unit, left[0]]) else seconds[unit].argmin()
            room[device[unit]] -= size[unit]
        ctx.evaluate(device[problem.unit])  # the best that keeps every constraint becomes the plan


if __name__ == "__main__":
    problem = pw.load_problem("llama-3-8b", "two-gpus-one-host")
    for outcome in pw.compare(problem, ["sweep", "random"]):
        print(outcome.plan.summary())
