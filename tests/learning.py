"""What the tests of learned planners share: a problem with a known optimum, gradients by enumeration, and a spy."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import torch

from oracles import brute_force
from placewise import Budget
from placewise.driver import Context
from placewise.learned.reinforce import minus_root, scale_of, update
from placewise.planners import get
from problems import problem_of


def options_of(method, **changed):
    """All options of a planner."""
    return get(method).settings(changed)


@cache
def known_optimum():
    """(problem, optimum): ten ops, each read by the next two, on three devices that are good at different ops."""
    rng = np.random.default_rng(7)
    seconds = rng.uniform(1.0, 6.0, (10, 3))
    edges = [(i, j) for i in range(10) for j in (i + 1, i + 2) if j < 10]
    problem = problem_of(seconds, edges, sizes=rng.uniform(0.5, 1.5, 10))
    return problem, brute_force(problem)[0]


def all_of(choices, length):
    """[choices ** length, length] every sequence."""
    return torch.tensor(list(itertools.product(range(choices), repeat=length)))


def exact_gradient(problem, make, actions):
    """Of the loss, minus the expected reward, by enumeration of every action."""
    student, policy = make()
    values = Context(problem, Budget(), 0, 0.0, None).evaluate_batch(policy.placements(actions))
    rewards = torch.tensor(minus_root(values / scale_of(problem)), dtype=torch.float32)
    log_probability, _ = policy.score(actions)
    assert abs(log_probability.exp().sum().item() - 1) < 1e-5
    return _flat(student.network, -(log_probability.exp() * rewards).sum())


def sampled_gradient(problem, make):
    """The one that an update takes, from as many samples as the learner takes."""
    student, policy = make()
    found = []
    student.descend = lambda loss: found.append(_flat(student.network, loss))
    student.advantages = lambda rewards: rewards - rewards.mean()  # without the spread, which only scales it
    update(Context(problem, Budget(), 0, 0.0, None), student, policy)
    return found[0]


def evaluated_and_trained(problem, pair, updates=5):
    """(placements that were simulated, placements of the actions whose probability was trained)."""
    student, policy = pair
    ctx = Context(problem, Budget(), 0, 0.0, None)
    evaluated, trained = [], []
    simulate, score = ctx.evaluate_batch, policy.score
    ctx.evaluate_batch = lambda rows: evaluated.append(rows) or simulate(rows)
    policy.score = lambda actions: trained.append(policy.placements(actions)) or score(actions)
    for _ in range(updates):
        update(ctx, student, policy)
    return np.concatenate(evaluated), np.concatenate(trained)


def _flat(network, loss):
    parameters = list(network.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    return torch.cat([part.flatten() for part in parts]).numpy()
