"""Placeto: gradients by enumeration, symmetry, toys, learning that is real, and graphs never seen before."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from learning import known_optimum, options_of
from placewise import Budget, plan
from placewise.errors import InvalidInput
from placewise.learned import checkpoint, families
from placewise.learned.episodes import Episodes
from placewise.learned.grouping import Groups, units
from placewise.learned.placeto import (
    SHIPPED,
    Architecture,
    PlacetoLearner,
    Record,
    States,
    log_probabilities,
    network_of,
    returns,
    run,
    view_of,
)  # fmt: skip
from placewise.learned.reinforce import Settings
from placewise.planners.random_search import sample
from placewise.simulator import evaluate
from problems import problem_of, random_problem, renumbered

KINDS = ["devices", "paper"]


def made(groups, kind="devices", seed=0, **settings):
    view = view_of(kind, groups)
    network = network_of(Architecture(kind, 8, 3), view, seed)
    return PlacetoLearner(network, Settings(**{"entropy": 0.0} | settings), seed), view


def episodes_of(groups, count, score=None, **settings):
    score = score or (lambda rows: evaluate(groups.problem, rows).score)
    return Episodes(groups, count, score, np.random.default_rng(0), **settings)


def replay(groups, actions):
    """The record of one episode with given actions."""
    episodes, rows = episodes_of(groups, 1), []
    costs, values = [episodes.cost], [episodes.value.copy()]
    for action in actions:
        rows.append(States(episodes.placement.copy(), episodes.node.copy(), episodes.visits.copy(), episodes.mask))
        episodes.step(np.array([action]))
        costs.append(episodes.cost)
        values.append(episodes.value.copy())
    states = States(*(np.concatenate(parts) for parts in zip(*rows, strict=True)))
    return Record(states, np.array(actions), np.array(costs), np.array(values), np.zeros(len(actions)))


def flat(learner, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(learner.network.parameters()))])


# ---- the gradient ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_the_expected_reward(kind):
    problem = problem_of([[1.0, 3.0], [2.0, 1.0], [1.0, 1.5]], [(0, 1), (0, 2)], sizes=0.5)
    groups = units(problem)
    learner, view = made(groups, kind)
    records = [replay(groups, actions) for actions in itertools.product(range(2), repeat=3)]
    expected, estimated, total = 0.0, 0.0, 0.0
    for record in records:
        logs = log_probabilities(learner.network, view, record.states)
        probability = logs.gather(1, torch.from_numpy(record.actions)[:, None]).sum().exp()
        expected = expected - probability * (record.costs[0] - record.costs[-1]).item()
        advantage = returns(record.costs, 1.0, final=False).ravel()
        (loss,) = learner._losses(view, record, advantage)
        estimated = estimated + probability.item() * flat(learner, loss) * len(record.actions)
        total += probability.item()
    assert total == pytest.approx(1.0, abs=1e-5)
    exact = flat(learner, expected)
    assert exact.abs().max() > 1e-3
    torch.testing.assert_close(estimated, exact, atol=1e-5, rtol=1e-3)


def test_the_mean_over_samples_with_the_baseline_points_the_same_way():
    problem = problem_of([[1.0, 3.0], [2.0, 1.0], [1.0, 1.5]], [(0, 1), (0, 2)], sizes=0.5)
    groups = units(problem)
    learner, view = made(groups)
    expected = 0.0
    for actions in itertools.product(range(2), repeat=3):
        record = replay(groups, actions)
        logs = log_probabilities(learner.network, view, record.states)
        probability = logs.gather(1, torch.from_numpy(record.actions)[:, None]).sum().exp()
        expected = expected - probability * (record.costs[0] - record.costs[-1]).item()
    exact, found = flat(learner, expected), []
    learner.descend = lambda losses: found.append(sum(flat(learner, loss) for loss in losses))
    learner.learn(view, run(learner.network, view, episodes_of(groups, 3000), learner.generator))
    assert torch.nn.functional.cosine_similarity(found[0], exact, dim=0) > 0.97
    assert 3 * found[0].norm() == pytest.approx(exact.norm().item(), rel=0.2)


def test_what_follows_a_step():
    costs = np.array([5.0, 4.0, 6.0, 3.0])[:, None]
    assert returns(costs, 1.0, final=False)[:, 0].tolist() == [2.0, 1.0, 3.0]
    assert returns(costs, 0.5, final=False)[:, 0].tolist() == [1.0 - 1.0 + 0.75, -2.0 + 1.5, 3.0]
    assert returns(costs, 1.0, final=True)[:, 0].tolist() == [-3.0, -3.0, -3.0]


def test_the_baseline_is_the_mean_over_other_recent_episodes_of_the_same_step():
    groups = units(problem_of(np.ones((2, 2))))
    learner, view = made(groups)
    seen = []
    learner._losses = lambda view, record, advantage: seen.append(advantage.reshape(2, 2)) or iter(())
    state = replay(groups, [0, 0]).states

    def learn(costs, problem):
        record = Record(
            States(*(np.repeat(part, 2, axis=0) for part in state)), np.zeros(4), np.array(costs), None, None
        )
        learner.learn(view, record, problem)
        return seen[-1].tolist()

    first = [[0.0, 0.0], [-1.0, -3.0], [-1.0, -5.0]]  # returns: 1 and 5, 0 and 2
    assert learn(first, "a") == [[-4.0, 4.0], [-2.0, 2.0]]
    assert learn(first, "b") == [[-4.0, 4.0], [-2.0, 2.0]]  # another problem
    again = learn([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], "a")
    assert again == [[-2.0, -2.0], [pytest.approx(-2 / 3)] * 2]


def test_the_actions_that_are_trained_are_those_that_were_evaluated():
    problem, _ = known_optimum()
    groups, evaluated = units(problem), []

    def score(rows):
        evaluated.extend(rows.tolist())
        return evaluate(problem, rows).score

    learner, view = made(groups)
    record = run(learner.network, view, episodes_of(groups, 4, score, start="random"), learner.generator)
    for row, node, action in zip(record.states.placement, record.states.node, record.actions, strict=True):
        row[node] = action
        assert groups.expand(row).tolist() in evaluated


# ---- symmetry --------------------------------------------------------------------------------------------------------


def test_ops_and_devices_in_another_order_get_the_same_probabilities():
    checked = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, max_ops=9, max_devices=4, stored=0.0, integers=False)
        if problem.num_ops < 3 or problem.num_devices < 2:
            continue
        ops, devices = rng.permutation(problem.num_ops), rng.permutation(problem.num_devices)
        other = renumbered(problem, ops, devices)
        first, second = (Groups(p, np.arange(p.num_ops, dtype=np.int32)) for p in (problem, other))
        network = network_of(Architecture("devices", 8, 4), view_of("devices", first), seed)
        placed = sample(problem, rng, 3)
        current, visited = rng.integers(0, problem.num_ops, 3), rng.integers(0, 2, (3, problem.num_ops))
        moved = np.argsort(devices)[placed[:, ops]]

        def logs(groups, placement, op, visits, mask):
            table = np.zeros((3, groups.count), np.int64)
            turns = table.copy()
            table[:, groups.label], turns[:, groups.label] = placement, visits
            states = States(table, groups.label[op].astype(np.int64), turns, mask)
            return log_probabilities(network, view_of("devices", groups), states).detach().numpy()  # noqa: B023

        mask = rng.random((3, problem.num_devices)) < 0.8
        mask[:, 0] = True
        one = logs(first, placed, current, visited, mask)
        two = logs(second, moved, np.argsort(ops)[current], visited[:, ops], mask[:, devices])
        np.testing.assert_allclose(np.exp(one)[:, devices], np.exp(two), atol=2e-5)
        checked += np.abs(np.diff(np.exp(one), axis=1)).max() > 1e-3
    assert checked > 5


def test_seconds_and_bytes_may_have_any_unit():
    problem = families.draw("layered", np.random.default_rng(0))
    cluster = replace(
        problem.cluster, links=tuple(replace(link, bandwidth=link.bandwidth * 2) for link in problem.cluster.links)
    )
    graph = replace(problem.graph, tensor_bytes=problem.graph.tensor_bytes * 2)
    same = replace(problem, graph=graph, cluster=cluster)
    groups = units(problem)
    states = replay(groups, [0] * groups.count).states
    for one, two in zip(
        view_of("devices", groups).look(states), view_of("devices", units(same)).look(states), strict=True
    ):
        torch.testing.assert_close(one, two)


# ---- learning is real ------------------------------------------------------------------------------------------------


def toy(problem, kind, score, *, rate, updates=60):
    """The mean runtime of episodes from random starts after a training, and the evaluations that it took."""
    groups, spent = units(problem), [0]

    def counted(rows):
        spent[0] += len(rows)
        return score(rows)

    learner, view = made(groups, kind, rate=rate, entropy=0.02, last_entropy=0.0, horizon=updates, normalise=True)
    episodes = episodes_of(groups, 8, counted, start="random")
    for _ in range(updates):
        episodes.reset()
        learner.learn(view, run(learner.network, view, episodes, learner.generator), "toy")
    trained = spent[0]
    episodes.reset()
    return run(learner.network, view, episodes, learner.generator).values[-1].mean(), trained


def chain(devices):
    return problem_of(np.ones((8, devices)), [(i, i + 1) for i in range(7)])


def test_toy_one_device_is_right():
    """The release's own: the runtime is the number of ops that are not on the last device."""

    def score(rows):
        return (rows != 2).sum(axis=1).astype(float)

    learned, spent = toy(chain(3), "paper", score, rate=1e-2)
    assert learned < 0.5
    assert spent < 3500
    assert toy(chain(3), "paper", score, rate=0.0)[0] > 4.0


@pytest.mark.parametrize("kind", KINDS)
def test_toy_neighbours_together(kind):
    """The release's own: the runtime is the number of edges between devices."""

    def score(rows):
        return (rows[:, 1:] != rows[:, :-1]).sum(axis=1).astype(float)

    learned, spent = toy(chain(3), kind, score, rate=1e-2, updates=80)
    assert learned < 0.5
    assert spent < 5000
    assert toy(chain(3), kind, score, rate=0.0)[0] > 3.0


def test_it_reaches_the_optimum_of_a_small_graph():
    problem, optimum = known_optimum()

    def mean(planner, **options):
        runs = [plan(problem, planner, budget=Budget(evaluations=1000), seed=s, options=options) for s in range(3)]
        return np.mean([found.value for found in runs]) / optimum

    assert mean("placeto", policy="none") <= 1.01
    assert mean("placeto", policy="none", rate=0.0) > 1.04
    assert mean("random", samples=1000) > 1.04


def test_the_shipped_policy_places_graphs_that_it_has_not_seen():
    """Latency where memory does not bind: it is ahead of as many placements by chance, and of many more."""
    ours, chance, more = [], [], []
    for seed in range(24):
        problem = families.draw(families.NAMES[seed % 5], np.random.default_rng([123, seed]), least=16)
        if problem.objective != "latency" or problem.execution.concurrency != "parallel" or problem.capacity[0] < 1e300:
            continue
        found = plan(problem, "placeto")
        few, many = (plan(problem, "random", options={"samples": n}).value for n in (found.evaluations, 2000))
        assert found.evaluations < 1500
        ours.append(found.value)
        chance.append(few)
        more.append(many)
    assert len(ours) >= 6
    assert np.mean(np.array(ours) / chance) < 0.85
    assert np.mean(np.array(ours) / more) < 0.9


@pytest.mark.parametrize("train", [False, True])
def test_the_clock_begins_when_all_is_imported(train):
    code = f"""if True:
        import sys
        from placewise import driver, load_problem
        from placewise.planners import get
        problem = load_problem("squeezenet", "placeto-2")
        driver.compile_for(problem, get("placeto"))
        before = set(sys.modules)
        driver.plan(problem, "placeto", budget=driver.Budget(evaluations=300), options={{"train": {train}}})
        print(sorted(set(sys.modules) - before))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stdout[:300] + done.stderr


def test_ppo_goes_no_further_than_the_ratio():
    """The gradient of the first epoch is that of REINFORCE; an action that has become likely enough has none."""
    problem = problem_of([[1.0, 3.0], [2.0, 1.0], [1.0, 1.5]], [(0, 1), (0, 2)], sizes=0.5)
    groups = units(problem)
    plain, view = made(groups)
    clipped, _ = made(groups, epochs=4)
    record = run(plain.network, view, episodes_of(groups, 4), plain.generator)
    weight = np.ones(len(record.actions))
    one, two = (sum(flat(x, loss) for loss in x._losses(view, record, weight)) for x in (plain, clipped))
    torch.testing.assert_close(one, two)
    far = replace(record, logs=record.logs - 1.0)  # since then, e times as likely
    assert sum(flat(clipped, loss) for loss in clipped._losses(view, far, weight)).abs().max() == 0.0
    assert sum(flat(clipped, loss) for loss in clipped._losses(view, far, -weight)).abs().max() > 0.0


# ---- files and options -----------------------------------------------------------------------------------------------


def test_the_shipped_policy_is_small_and_says_how_it_is_built():
    assert SHIPPED.stat().st_size < 500_000
    facts = checkpoint.load(SHIPPED, "placeto").facts
    assert facts["build"]["view"] == "devices"


def test_a_policy_of_ones_own_and_more_training(tmp_path):
    problem, _ = known_optimum()
    groups = units(problem)
    learner, _ = made(groups)
    build = Architecture("devices", 8, 3)
    path = tmp_path / "mine.safetensors"
    checkpoint.save(path, "placeto", learner, {"build": build._asdict()}, weights_only=True)
    budget = Budget(evaluations=600)
    as_it_is = plan(problem, "placeto", budget=budget, options={"policy": str(path)})
    trained = plan(problem, "placeto", budget=budget, options={"policy": str(path), "train": True})
    assert as_it_is.stopped == "finished"
    assert trained.evaluations > as_it_is.evaluations
    for facts in ({}, {"build": {"view": "x"}}, {"build": build._asdict() | {"width": 10**6}}, {"build": 3}):
        checkpoint.save(path, "placeto", learner, facts, weights_only=True)
        with pytest.raises(InvalidInput, match="does not say how its network is built"):
            plan(problem, "placeto", options={"policy": str(path)})
    checkpoint.save(path, "placeto", learner, {"build": build._asdict() | {"width": 9}}, weights_only=True)
    with pytest.raises(InvalidInput, match="is of another network"):
        plan(problem, "placeto", options={"policy": str(path)})
    with pytest.raises(InvalidInput, match="cannot be read"):
        plan(problem, "placeto", options={"policy": str(tmp_path / "none.safetensors")})


@pytest.mark.parametrize("options", [{"rate": 1.0}, {"policy": "none", "passes": 9}, {"train": True, "episodes": 9}])
def test_options_that_would_change_nothing(options):
    with pytest.raises(InvalidInput, match=f"option {list(options)[-1]} = .* changes nothing here"):
        plan(chain(2), "placeto", options=options)


@pytest.mark.parametrize("name", ["groups", "episodes", "passes", "batch", "epochs", "width", "rounds"])
def test_options_that_must_be_above_zero(name):
    with pytest.raises(InvalidInput, match=f"option {name} = 0"):
        plan(chain(2), "placeto", options={name: 0})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["program", "random", "heaviest"])
def test_training_from_nothing_ends_by_itself_and_keeps_to_its_budget(kind, order):
    options = {"policy": "none", "view": kind, "order": order, "updates": 3, "width": 4, "rounds": 2, "reward": "final"}
    free = plan(chain(2), "placeto", budget=Budget(evaluations=10_000), options=options)
    assert free.stopped == "finished"
    tight = plan(chain(2), "placeto", budget=Budget(evaluations=11), options=options)
    assert tight.evaluations <= 11
    assert options_of("placeto", **options)["view"] == kind


def test_groups_that_wait_for_each_other_in_a_circle():
    problem = problem_of(np.ones((3, 2)), [(0, 1), (1, 2)], group=[0, -1, 0])
    assert plan(problem, "placeto").value == 3.0


def test_families_are_what_they_say():
    for family in families.NAMES:
        for seed in range(6):
            problem = families.draw(family, np.random.default_rng(seed))
            again = families.draw(family, np.random.default_rng(seed))
            assert problem.digest == again.digest
            assert (family == "training") == bool(problem.graph.phase.any())
            assert units(problem).count >= 8  # backward ops go with forward ones
            assert problem.num_devices >= 2
