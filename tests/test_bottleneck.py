"""Which ops hold a plan up."""

import numpy as np
import pytest

from placewise.problem import Execution
from placewise.simulator.bottleneck import bottleneck
from problems import problem_of, random_placement, random_problem, shared_bus


def held(problem, placement):
    return np.flatnonzero(bottleneck(problem, np.array(placement, np.int32))).tolist()


def test_the_longer_of_two_chains():
    problem = problem_of([[2.0, 2.0], [2.0, 2.0], [1.0, 1.0], [1.0, 1.0]], [(0, 1), (2, 3)])
    assert held(problem, [0, 0, 1, 1]) == [0, 1]


def test_who_had_the_device_before():
    """Op 1 is ready at 1 s but its device is busy until 5 s."""
    problem = problem_of([[5.0, 9.0], [2.0, 9.0], [9.0, 1.0]], [(2, 1)], sizes=0.0)
    assert held(problem, [0, 0, 1]) == [0, 1]


def test_who_sent_the_last_input_and_whose_transfer_was_in_the_way():
    """Ops 0 and 1 send 4 bytes each over one bus to op 2."""
    problem = problem_of(
        [[1.0, 1.0, 9.0], [1.0, 1.0, 9.0], [9.0, 9.0, 1.0]], [(0, 2), (1, 2)], sizes=4.0, cluster=shared_bus(3)
    )
    assert held(problem, [0, 1, 2]) == [0, 1, 2]


def test_the_busiest_device_of_a_pipeline():
    problem = problem_of(np.ones((4, 2)), [(0, 1), (1, 2), (2, 3)], sizes=0.1, objective="throughput")
    assert held(problem, [0, 0, 0, 1]) == [0, 1, 2]


def test_the_busiest_channel_of_a_pipeline():
    problem = problem_of(
        np.ones((4, 2)), [(0, 1), (1, 2), (2, 3)], sizes=[0.1, 9.0, 0.1, 0.1], cluster=shared_bus(2),
        objective="throughput",
    )  # fmt: skip
    assert held(problem, [0, 0, 1, 1]) == [1, 2]


def test_everything_where_one_thing_happens_at_a_time():
    problem = problem_of(np.ones((3, 2)), execution=Execution(concurrency="sequential"))
    assert held(problem, [0, 1, 0]) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(60))
def test_always_holds_the_op_that_ends_last(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, max_ops=12)
    found = bottleneck(problem, random_placement(rng, problem))
    assert found.shape == (problem.num_ops,)
    assert found.any() or not problem.num_ops
