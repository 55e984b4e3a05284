"""ColocRL, and the sequence-to-sequence network: exact gradients, and learning that is real."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from learning import all_of, evaluated_and_trained, exact_gradient, known_optimum, options_of, sampled_gradient
from placewise import Budget, Execution, plan
from placewise.driver import Context
from placewise.errors import InvalidInput
from placewise.learned import checkpoint, colocrl, grouping, one_graph, placeto, reinforce
from placewise.learned.colocrl import learner
from placewise.learned.reinforce import update
from problems import problem_of


def small(devices=2, **options):
    """Three ops that are three groups: each is read by two others or by none."""
    seconds = np.array([3.0, 1.0, 2.0])[:, None] * np.linspace(1.0, 2.0, devices)
    return problem_of(seconds, [(0, 1), (0, 2)], **options)


def actions_of(problem):
    """Every action: devices of three groups."""
    return (torch.tensor(list(itertools.product(range(problem.num_devices), repeat=3))),)


def test_the_probabilities_of_all_actions_sum_to_one():
    problem = small(3)
    assert grouping.coplace(problem).count == 3
    _, policy = learner(problem, 1, options_of("colocrl"))
    log_probability, entropy = policy.score(actions_of(problem))
    assert log_probability.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    # Averaged over all actions, the sum of the steps' entropies is that of the whole.
    whole = -(log_probability.exp() * log_probability).sum().item()
    assert (log_probability.exp() * entropy).sum().item() == pytest.approx(whole, rel=1e-4)


def test_samples_come_as_often_as_their_score_says():
    problem = small(2)
    _, policy = learner(problem, 1, options_of("colocrl", constant=5.0, temperature=0.5))
    actions = actions_of(problem)
    with torch.no_grad():
        chances = policy.score(actions)[0].exp().numpy()
        (drawn,) = policy.sample(20_000, torch.Generator().manual_seed(0))
    counts = np.bincount((drawn.numpy() * [4, 2, 1]).sum(axis=1), minlength=8)
    assert chances.max() > 2 * chances.min()  # far from uniform
    assert counts / 20_000 == pytest.approx(chances, abs=0.015)


def test_the_gradient_is_that_of_the_expected_reward():
    problem = small(2)
    make = lambda: learner(problem, 3, options_of("colocrl", entropy=0.0, samples=20_000))  # noqa: E731
    exact = exact_gradient(problem, make, actions_of(problem))
    sampled = sampled_gradient(problem, make)
    assert np.linalg.norm(exact) > 1e-4
    assert np.linalg.norm(sampled - exact) < 0.1 * np.linalg.norm(exact)


def test_what_was_evaluated_is_trained_on():
    problem = small(3)
    evaluated, trained = evaluated_and_trained(problem, learner(problem, 0, options_of("colocrl")))
    assert len(evaluated) == 5 * 16
    assert (evaluated == trained).all()


def test_it_learns():
    """An optimum among 59,049 placements; chance and the untrained network come less near."""
    problem, optimum = known_optimum()
    found, untrained, by_chance = [], [], []
    for seed in range(3):
        budget = Budget(evaluations=2000)
        rest = {"seed": seed, "budget": budget}
        found.append(plan(problem, "colocrl", **rest).value)
        untrained.append(plan(problem, "colocrl", options={"rate": 0.0, "patience": 10_000}, **rest).value)
        by_chance.append(plan(problem, "random", options={"samples": 2000}, **rest).value)
    assert max(found) <= 1.02 * optimum
    assert np.mean(found) < min(np.mean(untrained), np.mean(by_chance))


def test_the_same_seed_gives_the_same_weights():
    problem, _ = known_optimum()
    found = [plan(problem, "colocrl", seed=seed, budget=Budget(evaluations=300)) for seed in (4, 4, 5)]
    assert found[0].history[-1][1:] == found[1].history[-1][1:]
    assert found[0].placement.tolist() == found[1].placement.tolist()
    assert [x[1:] for x in found[0].history] != [x[1:] for x in found[2].history]


def test_a_training_goes_on_from_a_file_as_if_nothing_had_happened(tmp_path):
    problem, _ = known_optimum()
    straight, interrupted = (train(problem, learner(problem, 0, options_of("colocrl")), 4) for _ in range(2))
    train(problem, straight, 4)
    checkpoint.save(tmp_path / "half", "colocrl", interrupted[0], {})
    resumed = learner(problem, 99, options_of("colocrl"))
    checkpoint.restore(resumed[0], checkpoint.load(tmp_path / "half", "colocrl"), tmp_path / "half")
    train(problem, resumed, 4)
    for name, weights in straight[0].network.state_dict().items():
        assert torch.equal(weights, resumed[0].network.state_dict()[name]), name
    assert straight[0].baseline == resumed[0].baseline


def train(problem, pair, updates):
    for _ in range(updates):
        update(Context(problem, Budget(), 0, 0.0, None), *pair)
    return pair


def test_a_device_that_is_not_allowed_is_never_drawn():
    problem = replace(small(3), pins={"op1": "d2"}, forbidden=("d0",))
    _, policy = learner(problem, 0, options_of("colocrl"))
    with torch.no_grad():
        rows = policy.placements(policy.sample(200, torch.Generator().manual_seed(0)))
    assert set(rows[:, 1]) == {2}
    assert set(rows[:, 0]) == {1, 2}
    log_probability, _ = policy.score((all_of(3, 3),))
    assert log_probability.exp().sum().item() == pytest.approx(1.0, abs=1e-5)


def test_after_a_while_only_valid_samples_are_trained_on():
    # Two ops of one byte each; one device holds one of them, the other both.
    problem = problem_of([[1.0, 2.0]] * 2, resident=1.0, memory=[1.0, 2.0], execution=Execution(memory="static"))
    student, policy = learner(problem, 0, options_of("colocrl", horizon=1, samples=32, groups=2))
    policy.memory = None  # else no sample overflows
    ctx = Context(problem, Budget(), 0, 0.0, None)
    scored = []
    inner = policy.score
    policy.score = lambda actions: scored.append(actions) or inner(actions)
    values = [update(ctx, student, policy) for _ in range(2)]
    assert len(scored[0][0]) == 32
    assert len(scored[1][0]) == np.isfinite(values[1]).sum() < 32


def test_samples_that_are_all_the_same_weigh_no_more_than_others():
    student, _ = learner(small(2), 0, options_of("colocrl"))
    assert student.advantages(np.array([1.0, 3.0])).tolist() == pytest.approx([-1.0, 1.0])
    assert student.advantages(np.array([5.0, 5.0])).tolist() == pytest.approx([1.0, 1.0])  # 2 was expected
    assert student.advantages(np.array([0.0, 0.0])).tolist() == pytest.approx([-1.0, -1.0])


def test_wrong_options_are_refused():
    for wrong in ({"hidden": 3}, {"hidden": 0}, {"temperature": 0.0}, {"samples": 0}, {"groups": 0}):
        with pytest.raises(InvalidInput, match=next(iter(wrong))):
            plan(small(), "colocrl", options=wrong)


def test_it_ends_by_itself():
    problem, _ = known_optimum()
    found = plan(problem, "colocrl", budget=Budget(), options={"updates": 7})
    assert (found.evaluations, found.stopped) == (7 * 16, "finished")
    one = plan(problem_of([[3.0], [2.0]]), "colocrl", budget=Budget())
    assert math.isfinite(one.value)


def test_a_cuda_device_is_used_and_named(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    assert reinforce.compute_device.__wrapped__() == torch.device("cuda")
    assert capsys.readouterr().err == "the policy runs on a card\n"


def test_the_first_states_of_an_lstm_lie_in_one_piece(monkeypatch):
    """As cuDNN wants them, for both networks that score with one."""
    problem, _ = known_optimum()
    inner, seen = torch.nn.LSTM.forward, []

    def spied(self, steps, first=None):
        seen.extend(first or ())
        assert steps.is_contiguous()
        return inner(self, steps, first)

    monkeypatch.setattr(torch.nn.LSTM, "forward", spied)
    for method in ("colocrl", "hierarchical"):
        policy = one_graph.pupil(method, problem, 0, options_of(method)).policy
        policy.score(policy.sample(5, torch.Generator().manual_seed(0)))[0].mean().backward()
    assert len(seen) == 4
    assert all(state.is_contiguous() for state in seen)


def test_all_that_a_network_works_on_is_where_the_network_is(monkeypatch):
    """On the device `meta`, which refuses what lies elsewhere, as CUDA does."""
    problem, _ = known_optimum()
    monkeypatch.setattr(colocrl, "compute_device", lambda: torch.device("meta"))
    _, policy = learner(problem, 0, options_of("colocrl"))
    assert policy.network.sample(policy._encoded(3), policy.may.expand(3, -1, -1), torch.Generator()).is_meta
    drawn = torch.zeros(3, policy.groups.count, dtype=torch.long, device="meta")
    log_probability, _ = policy.score((drawn,))
    assert log_probability.is_meta
    log_probability.sum().backward()
    view = placeto.view_of("devices", grouping.units(problem))
    network = placeto.network_of(placeto.Architecture(), view, 0).to("meta")
    states = placeto.States(*(np.zeros(shape, np.int64) for shape in ((3, 10), 3, (3, 10))), np.ones((3, 3), np.bool_))
    assert placeto.log_probabilities(network, view, states).is_meta
