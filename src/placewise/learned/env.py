"""Placement as a gymnasium environment, for any learner that knows gymnasium.

An action is a device for the group whose turn it is. The observation has all that the policy may look at; where a group
may go is its `mask` (and `action_masks`, as sb3-contrib wants it).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from placewise.errors import InvalidInput, Unsupported
from placewise.graph import Floats
from placewise.learned import features
from placewise.learned.episodes import Episodes, Order, Reward, Start
from placewise.learned.grouping import Groups, few
from placewise.problem import Problem
from placewise.simulator import evaluate

try:
    import gymnasium
    from gymnasium import spaces
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
except ImportError:
    raise Unsupported("the environment needs gymnasium: pip install 'placewise[learned]'") from None

Observation = dict[str, Any]


class _Placing:
    """What the environment and its vectorised twin share: spaces, observations, and the episodes themselves."""

    def __init__(
        self, problem: Problem, count: int, groups: Groups | None, most: int, rng: np.random.Generator, **settings: Any
    ) -> None:
        if not problem.num_ops:
            raise InvalidInput("an environment needs ops to place")
        self.groups = groups or few(problem, most)
        self.peak = np.full((count, problem.num_devices), np.nan)
        self.episodes = Episodes(self.groups, count, self._score, rng, **settings)
        source, target, _ = self.groups.edges
        self.edges = np.stack([source, target])
        self.nodes = node_features(self.groups)
        size, devices = self.groups.count, problem.num_devices
        self.action_space = spaces.Discrete(devices)
        self.observation_space = spaces.Dict(
            {
                "nodes": spaces.Box(-1.0, 1.0, self.nodes.shape, np.float32),
                "edges": spaces.Box(0, max(size - 1, 1), self.edges.shape, np.int64),
                "current": spaces.Discrete(size),
                "placement": spaces.MultiDiscrete(np.full(size, devices)),
                "mask": spaces.MultiBinary(devices),
            }
        )

    def _score(self, placements: NDArray[np.int32]) -> Floats:
        found = evaluate(self.groups.problem, placements, peaks=len(placements) == 1)
        if found.peak is not None and len(found.peak) == 1:
            self.peak = found.peak
        return found.score

    def observe(self) -> Observation:
        """Of all episodes. What never changes is not copied, and cannot be written to."""
        now, count = self.episodes, self.episodes.count
        return {
            "nodes": np.broadcast_to(self.nodes, (count, *self.nodes.shape)),
            "edges": np.broadcast_to(self.edges, (count, *self.edges.shape)),
            "current": now.node.astype(np.int64),
            "placement": now.placement.copy(),
            "mask": now.mask.astype(np.int8),
        }


def node_features(groups: Groups) -> NDArray[np.float32]:
    """[G, F] time on each device, bytes, numbers of neighbours, place in the program, kinds of ops; from -1 to 1."""
    where = np.arange(groups.count)[:, None] / max(groups.count - 1, 1)
    columns = [features.costs(groups), features.degrees(groups), where, features.families(groups)]
    return np.concatenate(columns, axis=1).astype(np.float32)


class PlacementEnv(gymnasium.Env[Observation, np.int64]):
    """One group at a time. `reward` is the improvement of each step (the sum is that of the episode) or the final cost.

    `info` tells the runtime, the peak memory of each device, whether that is too much, and the best placement so far.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - as gymnasium has it

    def __init__(
        self,
        problem: Problem,
        *,
        groups: Groups | None = None,
        most: int = 100,
        reward: Reward = "improvement",
        start: Start = "packed",
        order: Order = "program",
        passes: int = 1,
    ) -> None:
        """Place these groups, or else units, merged until there are `most` at most; each group has `passes` turns."""
        self._placing = _Placing(
            problem, 1, groups, most, np.random.default_rng(0), reward=reward, start=start, order=order, passes=passes
        )
        self.groups = self._placing.groups
        self.observation_space, self.action_space = self._placing.observation_space, self._placing.action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin anew; `options={"placement": [...]}` begins with a placement of the groups."""
        super().reset(seed=seed)
        self._placing.episodes.rng = self.np_random
        self._placing.episodes.reset((options or {}).get("placement"))
        return self._observation(), self._info()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Put the current group onto a device; what the mask forbids leaves it where it is."""
        reward = self._placing.episodes.step(np.array([action]))
        return self._observation(), float(reward[0]), self._placing.episodes.done, False, self._info()

    def action_masks(self) -> NDArray[np.bool_]:
        """[D] where the current group may go."""
        mask: NDArray[np.bool_] = self._placing.episodes.mask[0]
        return mask

    def _observation(self) -> Observation:
        return {key: value[0].copy() for key, value in self._placing.observe().items()}

    def _info(self) -> dict[str, Any]:
        now, peak = self._placing.episodes, self._placing.peak[0]
        return {
            "runtime": float(now.value[0]),
            "peak_memory": peak.copy(),
            "oom": bool((peak > self.groups.problem.capacity).any()),
            "best_runtime": float(now.best_value[0]),
            "best_placement": self.groups.expand(now.best[0]),
        }


class PlacementVectorEnv(VectorEnv[Observation, NDArray[np.int64], NDArray[Any]]):
    """Many episodes at once, one batch of the simulator for each step of all of them.

    All episodes end together; the step after that begins new ones, whatever its actions.
    """

    def __init__(
        self,
        problem: Problem,
        num_envs: int,
        *,
        groups: Groups | None = None,
        most: int = 100,
        reward: Reward = "improvement",
        start: Start = "packed",
        order: Order = "program",
        passes: int = 1,
    ) -> None:
        """As `PlacementEnv`."""
        self._placing = _Placing(
            problem, num_envs, groups, most, np.random.default_rng(0),
            reward=reward, start=start, order=order, passes=passes,
        )  # fmt: skip
        self.num_envs, self.groups = num_envs, self._placing.groups
        self.single_observation_space = self._placing.observation_space
        self.single_action_space = self._placing.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin all anew."""
        super().reset(seed=seed[0] if isinstance(seed, list) else seed)
        self._placing.episodes.rng = self.np_random
        self._placing.episodes.reset((options or {}).get("placement"))
        return self._placing.observe(), self._info()

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Observation, Floats, NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """One step of every episode."""
        episodes, none = self._placing.episodes, np.zeros(self.num_envs, np.bool_)
        if episodes.done:
            episodes.reset()
            return self._placing.observe(), np.zeros(self.num_envs), none, none, self._info()
        reward = episodes.step(np.asarray(actions))
        return self._placing.observe(), reward, none | episodes.done, none, self._info()

    def action_masks(self) -> NDArray[np.bool_]:
        """[B, D] where the current groups may go."""
        return self._placing.episodes.mask

    def _info(self) -> dict[str, Any]:
        now = self._placing.episodes
        return {"runtime": now.value.copy(), "best_runtime": now.best_value.copy()}
