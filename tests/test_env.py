"""The environment: its rewards, its mask, its twin for many episodes, and what gymnasium says of it."""

from __future__ import annotations

import importlib
import math
import runpy
import sys
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import placewise as pw
from placewise.errors import InvalidInput, PlacewiseError
from placewise.learned.episodes import FAILING, Episodes, packed
from placewise.learned.grouping import Groups, units
from placewise.simulator import evaluate
from problems import problem_of, random_problem

WEIGHTS = {"resident": [3.0, 1.0, 2.0, 1.0, 3.0, 2.0]}


def net(**options):
    """A fork and a join with a skip on three devices of falling speed."""
    seconds = np.array([2.0, 3.0, 5.0, 1.0, 4.0, 2.0])[:, None] * [1.0, 2.0, 4.0]
    edges = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (2, 5), (4, 5)]
    return problem_of(seconds, edges, sizes=[1.0, 2.0, 1.0, 3.0, 1.0, 1.0], latency=0.25, **options)


def play(problem, actions, **settings):
    """(episodes, rewards [T, B], values [T + 1, B]) of given actions [T, B]."""
    actions = np.array(actions)
    score = lambda rows: evaluate(problem, rows).score  # noqa: E731
    episodes = Episodes(units(problem), actions.shape[1], score, np.random.default_rng(0), **settings)
    rewards, values = [], [episodes.value.copy()]
    for row in actions:
        rewards.append(episodes.step(row))
        values.append(episodes.value.copy())
    return episodes, np.array(rewards), np.array(values)


def test_a_reward_is_positive_if_and_only_if_it_became_faster():
    problem = problem_of([[4.0, 1.0], [1.0, 1.0]], [(0, 1)], sizes=0.0)
    episodes = Episodes(units(problem), 1, lambda rows: evaluate(problem, rows).score, np.random.default_rng(0))
    episodes.reset(np.array([0, 0]))
    assert episodes.value[0] == 5.0
    assert episodes.step(np.array([1]))[0] == (5.0 - 2.0) / 2.0  # two seconds is all ops one by one, where fastest
    assert episodes.step(np.array([0]))[0] == 0.0
    episodes.reset(np.array([1, 1]))
    assert episodes.step(np.array([0]))[0] == (2.0 - 5.0) / 2.0


@pytest.mark.parametrize("log", [False, True])
def test_improvements_add_up_to_that_of_the_episode(log):
    actions = np.random.default_rng(1).integers(0, 3, (12, 5))
    episodes, rewards, values = play(net(), actions, start="random", passes=2, log=log)
    assert episodes.done
    cost = np.log(values / episodes.scale) if log else values / episodes.scale
    assert rewards.sum(axis=0) == pytest.approx(cost[0] - cost[-1])
    assert (np.sign(rewards) == np.sign(values[:-1] - values[1:])).all()
    assert len(np.unique(np.sign(rewards))) == 3
    assert (episodes.best_value == values.min(axis=0)).all()
    _, final, _ = play(net(), actions, start="random", passes=2, log=log, reward="final")
    assert (final[:-1] == 0).all()
    assert final[-1] == pytest.approx(-cost[-1])


def test_every_group_is_placed_once_in_a_pass_and_the_last_one_too():
    actions = np.full((6, 1), 2)
    episodes, _, values = play(net(), actions)
    assert episodes.placement.tolist() == [[2] * 6]
    assert values[-1, 0] == 17.0 * 4.0
    assert (episodes.visits == 1).all()
    heavy, _, _ = play(net(), actions[:1], order="heaviest")
    assert heavy.visits.tolist() == [[0, 0, 1, 0, 0, 0]]


def test_a_step_simulates_what_has_changed_in_one_batch():
    problem, batches = net(), []

    def score(rows):
        batches.append(len(rows))
        return evaluate(problem, rows).score

    episodes = Episodes(units(problem), 4, score, np.random.default_rng(0))
    assert batches == [1]  # they all begin alike
    episodes.step(np.array([0, 1, 2, 0]))
    episodes.step(np.array([0, 0, 0, 0]))
    assert batches == [1, 2]
    assert episodes.value[0] == episodes.value[3] == evaluate(problem, np.zeros(6, int)).value[0]


def test_what_does_not_fit_costs_much_but_not_endlessly_and_the_less_the_better():
    problem = net(memory=[7.0, 4.0, 4.0], execution=pw.Execution(memory="static"), **WEIGHTS)
    episodes = Episodes(units(problem), 2, lambda rows: evaluate(problem, rows).score, np.random.default_rng(0))
    episodes.reset(np.array([[0] * 6, [0, 1, 0, 1, 0, 1]]))
    assert np.isinf(episodes.value).all()
    assert episodes.cost.tolist() == [FAILING * (1 + 5 / 12), FAILING * (1 + 1 / 12)]
    rewards = episodes.step(np.array([1, 2]))  # op0 keeps 3: beside nothing on d1 it fits, beside 4 it does not
    assert episodes.placement[0].tolist() == [1, 0, 0, 0, 0, 0]
    assert (rewards > 0).all()
    assert np.isfinite(rewards).all()


def test_the_mask_follows_permission_and_room():
    seconds = np.ones((3, 3))
    seconds[0, 1] = math.inf
    problem = problem_of(
        seconds, memory=[4.0, 4.0, 1.0], resident=[2.0, 3.0, 2.0], execution=pw.Execution(memory="static")
    )
    episodes = Episodes(units(problem), 2, lambda rows: evaluate(problem, rows).score, np.random.default_rng(0))
    episodes.reset(np.array([[0, 1, 0], [2, 0, 1]]))
    assert episodes.mask.tolist() == [[True, False, False], [True, False, True]]  # no room anywhere: what is permitted
    episodes.step(np.array([1, 1]))  # forbidden: it stays
    assert episodes.placement[:, 0].tolist() == [0, 2]
    assert packed(units(problem)).tolist() == [0, 1, 0]


def test_random_episodes_keep_to_what_is_allowed():
    for seed in range(30):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, constrained=True)
        groups = units(problem)
        if not groups.count or not groups.allowed.any(axis=1).all():
            continue
        episodes = Episodes(groups, 3, lambda rows: evaluate(problem, rows).score, rng, start="random")  # noqa: B023
        while not episodes.done:
            episodes.step(rng.integers(0, problem.num_devices, 3))
            assert np.isfinite(episodes.cost).all()
            assert groups.allowed[np.arange(groups.count), episodes.placement].all()


@pytest.mark.parametrize("settings", [{}, {"reward": "final", "start": "random", "order": "random", "passes": 2}])
def test_gymnasium_accepts_it(settings):
    gymnasium.register("Placement-v0", entry_point=pw.PlacementEnv)  # so that the checker can make another
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = gymnasium.make("Placement-v0", problem=net(memory=12.0, **WEIGHTS), **settings)
        check_env(made.unwrapped)


def test_what_an_environment_tells():
    problem = net(memory=[12.0, 9.0, 9.0], **WEIGHTS)
    env = pw.PlacementEnv(problem, groups=units(problem))
    seen, info = env.reset(seed=0)
    assert seen["nodes"].shape[0] == 6
    assert seen["edges"].T.tolist() == [[0, 1], [0, 2], [1, 3], [2, 3], [2, 5], [3, 4], [4, 5]]
    assert seen["current"] == 0
    assert seen["placement"].tolist() == packed(units(problem)).tolist()
    assert env.action_masks().tolist() == seen["mask"].astype(bool).tolist()
    found = []
    for action in (1, 0, 2, 1, 0, 0):
        seen, _, done, cut, info = env.step(action)
        timeline = evaluate(problem, seen["placement"])
        assert info["peak_memory"].tolist() == timeline.peak[0].tolist()
        assert info["oom"] == (not timeline.feasible[0])
        assert info["runtime"] == timeline.score[0]
        found.append(info["runtime"])
        assert not cut
    assert done
    assert info["best_runtime"] == evaluate(problem, info["best_placement"]).score[0] <= min(found)
    seen, _ = env.reset(options={"placement": [2] * 6})
    assert seen["placement"].tolist() == [2] * 6


def test_groups_of_ops_move_together():
    problem = net()
    groups = Groups(problem, np.array([0, 1, 1, 2, 2, 2], np.int32))
    env = pw.PlacementEnv(problem, groups=groups)
    env.reset()
    for action in (2, 1, 0):
        seen, _, done, _, info = env.step(action)
    assert done
    assert seen["placement"].tolist() == [2, 1, 0]
    assert info["runtime"] == evaluate(problem, [2, 1, 1, 0, 0, 0]).value[0]


def test_many_at_once_are_like_one_by_one():
    problem = net(memory=[12.0, 9.0, 9.0], **WEIGHTS)
    actions = np.random.default_rng(2).integers(0, 3, (6, 4))
    many = pw.PlacementVectorEnv(problem, 4, groups=units(problem))
    seen, _ = many.reset(seed=0)
    assert many.observation_space.contains({key: np.array(value) for key, value in seen.items()})
    rewards = []
    for row in actions:
        seen, reward, done, cut, info = many.step(row)
        rewards.append(reward)
    assert done.all()
    assert not cut.any()
    for b in range(4):
        one = pw.PlacementEnv(problem, groups=units(problem))
        one.reset(seed=0)
        for t in range(6):
            alone, reward, _, _, facts = one.step(actions[t, b])
            assert reward == rewards[t][b]
        assert alone["placement"].tolist() == seen["placement"][b].tolist()
        assert facts["best_runtime"] == info["best_runtime"][b]
    seen, reward, done, _, _ = many.step(actions[0])  # begins anew
    assert (reward == 0).all()
    assert not done.any()
    assert (seen["placement"] == packed(units(problem))).all()


def test_no_ops_no_environment():
    with pytest.raises(InvalidInput, match="needs ops"):
        pw.PlacementEnv(problem_of(np.zeros((0, 2))))


def test_a_learner_of_another_library_learns(capsys):
    pytest.importorskip("stable_baselines3")
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples/train_with_stable_baselines.py"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        example["main"](3072)
    lines = capsys.readouterr().out.splitlines()
    chance, learned, best, best_by_chance, optimum = (float(line[29:].split()[0]) for line in lines)
    assert optimum <= best <= best_by_chance
    assert learned < (chance + optimum) / 2  # 38.3 and 26.2; without learning, near chance


def test_without_gymnasium_it_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "placewise.learned.env")
    with pytest.raises(PlacewiseError, match=r"pip install 'placewise\[learned\]'"):
        importlib.import_module("placewise.learned.env")
