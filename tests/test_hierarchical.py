"""The Hierarchical Planner: grouping and placement are one action, trained as it was evaluated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learning import all_of, evaluated_and_trained, exact_gradient, known_optimum, options_of, sampled_gradient
from placewise import Budget, plan
from placewise.driver import Context
from placewise.errors import InvalidInput
from placewise.learned import checkpoint, one_graph
from placewise.learned.hierarchical import learner
from placewise.learned.reinforce import costs_of, update
from placewise.simulator import violations
from problems import problem_of

GROUPINGS = ("learned", "merged", "random", "none")


def small(devices=2, **options):
    """Three ops, the first read by the others."""
    seconds = np.array([3.0, 1.0, 2.0])[:, None] * np.linspace(1.0, 2.0, devices)
    return problem_of(seconds, [(0, 1), (0, 2)], **options)


def actions_of(policy, grouping="learned", devices=2):
    """Every action: two groups of three ops, or the devices of the three."""
    if grouping == "none":
        return (all_of(devices, 3),)
    groupings = all_of(2, 3) if grouping == "learned" else policy.fixed
    placed = all_of(devices, 2)
    return groupings.repeat_interleave(len(placed), dim=0), placed.repeat(len(groupings), 1)


def make(problem, seed=1, **options):
    return learner(problem, seed, options_of("hierarchical", **{"groups": 2} | options))


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_the_probabilities_of_all_actions_sum_to_one(grouping):
    _, policy = make(small(), grouping=grouping)
    log_probability, _ = policy.score(actions_of(policy, grouping))
    assert log_probability.exp().sum().item() == pytest.approx(1.0, abs=1e-5)


def test_with_little_memory_groups_go_where_others_left_room():
    """Five ops of 3 bytes on devices of 6 and 9: all ways that fill neither, and those only."""
    problem = problem_of(np.ones((5, 2)), [(i, i + 1) for i in range(4)], resident=3.0, memory=[6.0, 9.0])
    for method in ("colocrl", "hierarchical"):
        options = {"groups": 5} | ({"grouping": "merged"} if method == "hierarchical" else {})
        _, policy = one_graph.pupil(method, problem, 0, options_of(method, **options))[:2]
        devices = all_of(2, 5)
        grouping = (policy.fixed.expand(32, -1),) if method == "hierarchical" else ()
        with torch.no_grad():
            chances = policy.score((*grouping, devices))[0].exp()
            drawn = policy.sample(200, torch.Generator().manual_seed(0))[-1]
        assert chances.sum().item() == pytest.approx(1.0, abs=1e-5)
        assert devices[chances > 0].sum(dim=1).tolist() == [3] * 10
        assert drawn.sum(dim=1).tolist() == [3] * 200


def test_what_breaks_a_constraint_costs_more_the_more_it_overflows():
    problem = problem_of(np.ones((4, 2)), resident=3.0, memory=[6.0, 6.0])
    rows = np.array([[0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]], np.int32)
    assert costs_of(problem, rows, np.array([2.0, np.inf, np.inf])).tolist() == [0.5, 125.0, 150.0]


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_samples_come_as_often_as_their_score_says(grouping):
    _, policy = make(small(), grouping=grouping, temperature=0.5)
    actions = actions_of(policy, grouping)
    with torch.no_grad():
        chances = policy.score(actions)[0].exp().numpy()
        drawn = policy.sample(20_000, torch.Generator().manual_seed(0))
    rows, counts = torch.unique(torch.cat(drawn, dim=1), dim=0, return_counts=True)
    found = {tuple(row.tolist()): count / 20_000 for row, count in zip(rows, counts.tolist(), strict=True)}
    shares = [found.get(tuple(row.tolist()), 0.0) for row in torch.cat(actions, dim=1)]
    assert sum(shares) == pytest.approx(1.0)
    assert shares == pytest.approx(chances.tolist(), abs=0.02)


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_the_gradient_is_that_of_the_expected_reward(grouping):
    problem = small()
    fresh = lambda: make(problem, grouping=grouping, entropy=0.0, samples=20_000, placements=1)  # noqa: E731
    exact = exact_gradient(problem, fresh, actions_of(fresh()[1], grouping))
    assert np.linalg.norm(exact) > 1e-4
    assert np.linalg.norm(sampled_gradient(problem, fresh) - exact) < 0.15 * np.linalg.norm(exact)


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_what_was_evaluated_is_trained_on(grouping):
    problem, _ = known_optimum()
    evaluated, trained = evaluated_and_trained(problem, make(problem, grouping=grouping, groups=4))
    assert len(evaluated) == 5 * 16
    assert (evaluated == trained).all()


def test_groupings_are_placed_several_times_each():
    problem, _ = known_optimum()
    _, policy = make(problem, groups=4, together=0.0)
    with torch.no_grad():
        grouping, devices = policy.sample(16, torch.Generator().manual_seed(0))
    assert [len(torch.unique(part, dim=0)) for part in grouping.split(4)] == [1, 1, 1, 1]
    assert len(torch.unique(grouping, dim=0)) == 4
    assert len(torch.unique(devices, dim=0)) > 4


def test_the_placer_sees_the_grouping():
    problem, _ = known_optimum()
    _, policy = make(problem, groups=3)
    one, other = torch.tensor([[0] * 5 + [1] * 5]), torch.tensor([[0, 1] * 5])
    seen, changed = policy._described(one)[0][0], policy._described(other)[0][0]
    assert seen.abs().sum() > 0
    assert not torch.equal(seen, changed)
    # Three groups, one kind of op, five numbers for shapes: then edges to the groups, and from them. 0 -> 1 has three.
    kinds, shapes, to, back = seen.split([1, 5, 3, 3], dim=1)
    assert kinds[:, 0].tolist() == pytest.approx([5 / 6, 5 / 6, 0.0])
    assert to[0].tolist() == pytest.approx([7 / 8, 3 / 8, 0.0])
    assert back[1].tolist() == pytest.approx([3 / 8, 7 / 8, 0.0])
    assert shapes[2].tolist() == [0.0] * 5


def test_with_one_device_only_the_grouping_has_a_probability():
    problem = problem_of([[3.0], [1.0], [2.0]], [(0, 1), (0, 2)])
    _, policy = make(problem)
    actions = actions_of(policy, devices=1)
    encoded, may = policy._encoded(actions[0])
    assert policy.network.placer.score(encoded, may, actions[1])[0].tolist() == [0.0] * 8
    assert policy.score(actions)[0].exp().sum().item() == pytest.approx(1.0, abs=1e-5)


def test_an_empty_group_is_no_choice():
    _, policy = make(small())
    score, _ = policy.score((torch.zeros(2, 3, dtype=torch.long), torch.tensor([[1, 0], [1, 1]])))
    assert score[0].exp() > 0
    assert score[1].exp() == 0


def test_an_op_that_may_not_follow_its_group_runs_where_it_is_fastest():
    problem = small(3, pins={"op1": "d2"})
    _, policy = make(problem)
    rows = policy.placements((torch.tensor([[0, 0, 1], [1, 1, 1]]), torch.tensor([[0, 1], [0, 2]])))
    assert rows.tolist() == [[0, 2, 1], [2, 2, 2]]
    with torch.no_grad():
        rows = policy.placements(policy.sample(100, torch.Generator().manual_seed(0)))
    assert all(violations(problem, row) == [] for row in rows)


@pytest.mark.parametrize("grouping", ["learned", "none"])
def test_it_learns(grouping):
    """An optimum among 59,049 placements; chance and the untrained network come less near."""
    problem, optimum = known_optimum()
    options = {"grouping": grouping, "patience": 10_000}
    found, untrained, by_chance = [], [], []
    for seed in range(3):
        budget = Budget(evaluations=2000)
        found.append(plan(problem, "hierarchical", seed=seed, budget=budget, options=options).value)
        untrained.append(plan(problem, "hierarchical", seed=seed, budget=budget, options=options | {"rate": 0.0}).value)
        by_chance.append(plan(problem, "random", seed=seed, budget=budget, options={"samples": 2000}).value)
    assert max(found) <= 1.02 * optimum
    assert np.mean(found) < min(np.mean(untrained), np.mean(by_chance))


def test_the_grouper_learns_where_what_was_merged_is_wrong():
    """A chain whose ops are fast on one device or the other: what they exchange, by which they are merged, is cheap."""
    fast = np.array([0, 1, 1, 0, 1, 0, 0, 1, 0, 1])
    seconds = np.where(fast[:, None] == np.arange(2), 1.0, 4.0)
    problem = problem_of(seconds, [(i, i + 1) for i in range(9)], bandwidth=100.0)
    merged = make(problem, grouping="merged", pieces=5)[1].fixed[0]
    kept = [float(seconds[merged == group].sum(axis=0).min()) for group in range(2)]
    assert sum(kept) == 22.0  # of 10, were each op where it is fast; all that any devices of these groups give
    for pace, learns in ((2.0, True), (0.0, False)):
        student, policy = make(problem, pieces=5, together=0.8, pace=pace, samples=64)
        for _ in range(150):
            values = update(Context(problem, Budget(), 0, 0.0, None), student, policy)
        moved = policy._log_chances().argmax(dim=1) != merged
        assert (moved.sum() >= 2) == learns
        assert (np.median(values) < 20.0) == learns  # with five seeds, 13 to 16 and 23 to 25


def test_at_first_pieces_are_at_home_or_in_a_group_that_they_exchange_data_with():
    # 0 -> 1 (9 bytes), 1 -> 2 and 1 -> 3 (1 byte each): the first two are merged, and two pieces each are left.
    problem = problem_of(np.ones((4, 2)), [(0, 1), (1, 2), (1, 3)], sizes=[9.0, 1.0, 1.0, 1.0])
    _, policy = make(problem, groups=3, together=0.9)
    chances = policy.at_first.softmax(dim=1)
    assert chances.argmax(dim=1).tolist() == [0, 0, 1, 2]
    assert chances.max(dim=1).values.tolist() == pytest.approx([0.9] * 4, abs=1e-4)
    assert chances[1].tolist() == pytest.approx([0.9, 0.05, 0.05], abs=1e-4)
    assert chances[2].tolist() == pytest.approx([0.1, 0.9, 0.0], abs=1e-4)
    assert chances[0].tolist() == pytest.approx([0.9, 0.05, 0.05], abs=1e-4)  # it exchanges nothing with others
    _, policy = make(problem, groups=3, together=0.0)
    assert policy.at_first.tolist() == [[0.0] * 3] * 4


def test_an_op_that_is_a_group_pays_for_leaving_it():
    problem = problem_of(np.ones((4, 2)), [(0, 1), (1, 2), (2, 3)])
    student, policy = make(problem, groups=2, together=0.9)
    assert policy.at_first.argmax(dim=1).tolist() == [0, 0, 0, 1]
    outer = student.network.grouper.outer
    actions = policy.sample(1, torch.Generator().manual_seed(0))
    with torch.no_grad():
        outer.weight.zero_()
        outer.bias.zero_()
        bonus = policy.score(actions)[1].item()
        outer.bias[:] = torch.tensor([np.log(9.0), 0.0])  # the last op, 0.9 to 0.1 at home, goes as often as it stays
        paid = bonus - policy.score(actions)[1].item()
    assert bonus == pytest.approx(2 * np.log(2), abs=0.01)  # two groups, two devices, next to nothing preferred
    assert paid == pytest.approx(0.5 * np.log(0.5 / 0.1) + 0.5 * np.log(0.5 / 0.9), abs=1e-4)


def test_the_same_seed_gives_the_same_plan():
    problem, _ = known_optimum()
    found = [plan(problem, "hierarchical", seed=seed, budget=Budget(evaluations=300)) for seed in (4, 4, 5)]
    assert [x[1:] for x in found[0].history] == [x[1:] for x in found[1].history]
    assert found[0].placement.tolist() == found[1].placement.tolist()
    assert [x[1:] for x in found[0].history] != [x[1:] for x in found[2].history]


def test_a_training_goes_on_from_a_file_as_if_nothing_had_happened(tmp_path):
    problem, _ = known_optimum()
    straight, interrupted = (train(problem, make(problem, groups=4), 4) for _ in range(2))
    train(problem, straight, 4)
    checkpoint.save(tmp_path / "half", "hierarchical", interrupted[0], {})
    resumed = make(problem, seed=99, groups=4)
    checkpoint.restore(resumed[0], checkpoint.load(tmp_path / "half", "hierarchical"), tmp_path / "half")
    train(problem, resumed, 4)
    for name, weights in straight[0].network.state_dict().items():
        assert torch.equal(weights, resumed[0].network.state_dict()[name]), name


def train(problem, pair, updates):
    for _ in range(updates):
        update(Context(problem, Budget(), 0, 0.0, None), *pair)
    return pair


def test_how_many_groups():
    problem = small()
    for options, count in (({"groups": 1}, 1), ({"groups": 2}, 2), ({"groups": 99}, 3), ({"groups": 0}, 3)):
        _, policy = make(problem, **options)
        assert policy.groups == count
    chain = problem_of(np.ones((20, 2)), [(i, i + 1) for i in range(19)])
    for pieces, count in ((1, 16), (2, 20)):  # 16 of many ops; as many as there are, where each is a piece
        _, policy = make(chain, groups=0, pieces=pieces)
        assert (policy.groups, policy.at_first.argmax(dim=1).unique().numel()) == (count, count)
    for wrong in ({"groups": -1}, {"pieces": 0}, {"together": 1.0}, {"hidden": 5}, {"placements": 0}, {"pace": -1.0}):
        with pytest.raises(InvalidInput, match=next(iter(wrong))):
            make(problem, **wrong)
