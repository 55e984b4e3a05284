"""A planner in one file. Run it: `python examples/my_planner.py`."""

import numpy as np

import placewise as pw


@pw.planner("noisy-greedy")
def noisy_greedy(problem: pw.Problem, ctx: pw.Context, *, rounds: int = 100, noise: float = 0.5) -> None:
    """Each op to the device that would be done with it first, many times over with ever noisier times."""
    times = problem.per_unit(np.where(problem.allowed, problem.seconds, np.inf))  # a unit: ops that must share a device
    for level in np.linspace(0, noise, rounds):
        if ctx.should_stop():
            break
        busy, device = np.zeros(problem.num_devices), np.zeros(problem.num_units, np.int32)
        for unit, time in enumerate(times * (1 + level * ctx.rng.random(times.shape))):
            device[unit] = np.argmin(busy + time)
            busy[device[unit]] += time[device[unit]]
        ctx.evaluate(device[problem.unit])  # the best that keeps every constraint becomes the plan


if __name__ == "__main__":
    problem = pw.load_problem("inception-v3", "two-gpus-one-host")
    print(pw.plan(problem, "noisy-greedy", options={"rounds": 20}).summary())
