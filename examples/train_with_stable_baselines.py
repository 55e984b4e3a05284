"""PPO of stable-baselines3 learns to place a small graph. Run it: `python examples/train_with_stable_baselines.py`.

It wants `pip install 'placewise[learned]' stable-baselines3`.
"""

import itertools
import warnings

import numpy as np
from gymnasium.wrappers import FilterObservation, FlattenObservation
from stable_baselines3 import PPO

import placewise as pw


def forks() -> pw.Problem:
    """Ten ops, each read by the next two, on three devices that are good at different ops."""
    rng = np.random.default_rng(7)
    build = pw.GraphBuilder("forks")
    outputs: list = []
    for i in range(10):
        outputs += build.op(f"op{i}", kind="op", inputs=outputs[-2:], outputs=[rng.uniform(0.5, 1.5)])
    cluster = pw.full_mesh([pw.Device(name) for name in ("a", "b", "c")], bandwidth=1.0)
    return pw.Problem(build.graph(), cluster, pw.Costs.create(rng.uniform(1.0, 6.0, (10, 3))))


def main(steps: int = 12_000) -> None:
    """Train, and compare with as many placements by chance and with the best there is."""
    problem = forks()
    env = pw.PlacementEnv(problem, start="random")
    # What never changes teaches nothing: a policy for one graph looks at the placement and at whose turn it is.
    watched = FlattenObservation(FilterObservation(env, ["current", "placement", "mask"]))
    learner = PPO("MlpPolicy", watched, n_steps=256, learning_rate=1e-3, gamma=0.9, seed=0, device="cpu")
    learner.learn(steps)
    runtimes = []
    for seed in range(20):
        seen, _ = watched.reset(seed=seed)
        done = False
        while not done:
            action, _ = learner.predict(seen, deterministic=True)
            seen, _, done, _, info = watched.step(int(action))
        runtimes.append(info["runtime"])

    groups = env.groups
    every = np.array(list(itertools.product(range(3), repeat=groups.count)))
    optimum = pw.evaluate(problem, groups.expand(every)).value.min()
    chance = pw.evaluate(problem, groups.expand(np.random.default_rng(0).integers(0, 3, (steps, groups.count)))).value
    print(f"a placement by chance          {chance.mean():6.2f} s")
    print(f"PPO after {steps:6,} steps         {np.mean(runtimes):6.2f} s, from 20 random starts")
    print(f"PPO, the best on the way       {info['best_runtime']:6.2f} s")
    print(f"the best of {steps:6,} by chance    {chance.min():6.2f} s")
    print(f"the optimum                    {optimum:6.2f} s")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    main()
