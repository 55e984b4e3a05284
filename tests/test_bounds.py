"""No feasible plan beats the bound, and where the best is known, the bound meets it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from oracles import brute_force, brute_force_orders
from placewise.costs import Costs
from placewise.driver import plan
from placewise.errors import NoFeasiblePlan
from placewise.problem import Execution, Problem
from placewise.simulator import bounds, evaluate
from placewise.simulator.bounds import lower_bound, made_of
from problems import problem_of, random_placement, random_problem, renumbered

SETTINGS = [
    ("latency", "parallel"), ("latency", "sequential"), ("throughput", "parallel"),
    ("completion", "parallel"), ("completion", "sequential"),
]  # fmt: skip


def small_problem(rng, *, max_ops=7, max_devices=3, integers=False, objective=None) -> Problem:
    return random_problem(
        rng, max_ops=max_ops, max_devices=max_devices, integers=integers, objective=objective, constrained=True
    )


# ---- never above the best --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("objective", "concurrency"), SETTINGS)
def test_no_placement_beats_the_bound(objective, concurrency):
    feasible = met = 0
    for seed in range(120):
        rng = np.random.default_rng(seed)
        problem = small_problem(rng, objective=objective, integers=seed % 2 == 0)
        execution = replace(problem.execution, concurrency=concurrency)
        problem = replace(problem, execution=execution)
        best, _ = brute_force(problem)
        bound = lower_bound(problem).value
        assert bound <= best, seed
        feasible += math.isfinite(best)
        met += bound >= best * (1 - 1e-9)
    assert feasible > 60
    assert met > 40  # so that a bound that is a little too high would have been noticed


@pytest.mark.parametrize("objective", ["latency", "completion"])
def test_no_order_beats_the_bound(objective):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        problem = small_problem(rng, objective=objective, max_ops=5, max_devices=2, integers=seed % 2 == 0)
        assert lower_bound(problem).value <= brute_force_orders(problem)[0], seed


@pytest.mark.parametrize("concurrency", ["parallel", "sequential", "slots"])
def test_no_placement_beats_the_bound_where_memory_just_suffices(concurrency):
    """Each device has what some placement holds there, to the byte; times may be next to nothing beside transfers."""
    feasible = 0
    for seed in range(50):
        rng = np.random.default_rng(seed)
        problem = small_problem(rng, objective="latency", max_ops=6, integers=seed % 2 == 0)
        memory = "static" if concurrency == "slots" else problem.execution.memory
        problem = replace(
            problem, execution=replace(problem.execution, concurrency=concurrency, memory=memory), contiguous=False,
            costs=Costs.create(problem.costs.seconds * float(rng.choice([1.0, 1e-9]))), max_devices=None,
        )  # fmt: skip
        peak = evaluate(problem, random_placement(rng, problem)).peak[0]
        names = problem.cluster.device_names
        problem = replace(problem, cluster=problem.cluster.with_memory(dict(zip(names, peak.tolist(), strict=True))))
        best = brute_force(problem)[0]
        assert lower_bound(problem).value <= best, seed
        feasible += math.isfinite(best)
    assert feasible > 35


# ---- where the best is known -----------------------------------------------------------------------------------------


def test_nothing_to_do_takes_no_time():
    for objective in ("latency", "throughput", "completion"):
        assert lower_bound(problem_of(np.zeros((0, 2)), objective=objective)).value == 0.0


def test_a_chain_on_one_device_takes_its_sum():
    bound = lower_bound(problem_of([[1.0], [2.0], [4.0]], [(0, 1), (1, 2)]))
    assert bound.parts == pytest.approx({"unit": 4.0, "area": 7.0, "path": 7.0})
    assert bound.value == pytest.approx(7.0)


def test_equal_ops_share_devices_by_speed():
    seconds = np.ones((14, 1)) / [1.0, 2.0, 4.0]
    for objective in ("latency", "throughput"):
        problem = problem_of(seconds, objective=objective)
        assert lower_bound(problem).parts["area"] == pytest.approx(14 / 7)


def test_a_path_pays_for_each_change_of_device():
    """The change happens after op1, whose output is the smaller."""
    pins = {"op0": "d0", "op2": "d1"}
    problem = problem_of(np.ones((3, 2)), [(0, 1), (1, 2)], sizes=[5.0, 3.0, 0.0], pins=pins)
    assert lower_bound(problem).parts["path"] == pytest.approx(3 + 3)
    assert lower_bound(problem).value == pytest.approx(brute_force(problem)[0])


def test_a_path_does_not_part_ops_that_must_share_a_device():
    """Each is fast where the other is slow, and moving between the devices is free."""
    apart = problem_of([[1.0, 10.0], [10.0, 1.0]], [(0, 1)], sizes=0.0)
    together = problem_of([[1.0, 10.0], [10.0, 1.0]], [(0, 1)], sizes=0.0, group=[0, 0])
    assert lower_bound(apart).parts["path"] == pytest.approx(2.0)
    assert lower_bound(together).parts["path"] == pytest.approx(11.0)


def test_a_fork_waits_for_its_slower_side():
    """op1 and op2 are pinned apart, so op0 is far from one of them wherever it runs: only paths *through* op0 tell."""
    problem = problem_of(np.ones((3, 2)), [(0, 1), (0, 2)], sizes=5.0, pins={"op1": "d0", "op2": "d1"})
    assert lower_bound(problem).parts["path"] == pytest.approx(1 + 5 + 1)
    assert lower_bound(problem).value == pytest.approx(brute_force(problem)[0])


def test_a_parameter_at_home_elsewhere_is_streamed():
    columns = {"op_kinds": ["parameter", "op"], "sizes": [5.0, 0.0]}
    free = problem_of([[0.0, 0.0], [1.0, 1.0]], [(0, 1)], **columns)
    assert lower_bound(free).value == pytest.approx(1.0)
    streamed = replace(free, pins={"op0": "d0", "op1": "d1"})
    assert lower_bound(streamed).value == pytest.approx(6.0) == brute_force(streamed)[0]


def test_ops_that_must_share_a_device_take_turns():
    problem = problem_of([[2.0, 3.0], [2.0, 3.0], [2.0, 1.0]], group=[0, 0, 0])
    assert lower_bound(problem).parts["unit"] == pytest.approx(6.0)
    assert lower_bound(problem).value == pytest.approx(brute_force(problem)[0])


def test_weights_that_do_not_fit_the_fast_device_cost_time():
    seconds = np.ones((8, 1)) * [1.0, 10.0]
    roomy = problem_of(seconds, resident=1.0)
    tight = problem_of(seconds, resident=1.0, sizes=0.0, memory=[4.0, math.inf])
    assert lower_bound(roomy).parts["area"] == pytest.approx(80 / 11)
    assert lower_bound(tight).value == pytest.approx(40.0) == brute_force(tight)[0]
    one_by_one = replace(tight, execution=Execution(concurrency="sequential"))
    assert lower_bound(one_by_one).value == pytest.approx(44.0) == brute_force(one_by_one)[0]


def test_a_path_whose_ops_do_not_all_fit_where_they_are_fastest():
    """A chain: half of it is off the fast device, and all of it runs one after the other."""
    chain = [(i, i + 1) for i in range(7)]
    tight = problem_of(np.ones((8, 1)) * [1.0, 10.0], chain, resident=1.0, sizes=0.0, memory=[4.0, math.inf])
    expected = {"unit": 1.0, "area": 40.0, "path": 8.0, "path under memory": 4 * 1.0 + 4 * 10.0}
    expected["path in stretches"] = 4 * 1.0 + 10.0 + 3 * 1.0  # it may come back to the fast device
    expected["blocks in stretches"] = expected["path in stretches"]
    assert lower_bound(tight).parts == pytest.approx(expected)
    assert lower_bound(tight).value == pytest.approx(brute_force(tight)[0])
    roomy = replace(tight, cluster=tight.cluster.with_memory({"d0": 8.0}))
    assert "path under memory" not in lower_bound(roomy).parts


def test_the_heaviest_path_competes_with_everything_else_for_memory():
    """op0 and op1 are the heavy path, op2 to op5 the long one. The fast device has room for one of the heavy ops."""
    seconds = [[10.0, 90.0]] * 2 + [[1.0, 1.0]] * 4
    edges = [(0, 1), (2, 3), (3, 4), (4, 5)]
    columns = {"resident": [4.0, 4.0, 0.0, 0.0, 0.0, 0.0], "sizes": 0.0, "memory": [4.0, math.inf]}
    problem = problem_of(seconds, edges, **columns)
    assert lower_bound(problem).parts["path under memory"] == pytest.approx(10 + 90)
    assert lower_bound(problem).value == pytest.approx(brute_force(problem)[0])
    # Beside the path, an op that may run on the fast device only takes the room of both.
    seconds[2] = [1.0, math.inf]
    crowded = problem_of(seconds, edges, **columns | {"resident": [4.0, 4.0, 1.0, 0.0, 0.0, 0.0]})
    assert brute_force(crowded)[0] == 180.0
    assert lower_bound(crowded).parts["path under memory"] == pytest.approx(3 / 4 * 10 + 5 / 4 * 90)  # cut up
    # A fork: the heavier of its branches goes on the path.
    fork = problem_of([[10.0, 90.0], [1.0, 1.0], [10.0, 90.0]], [(0, 1), (0, 2)],
                      resident=[4.0, 0.0, 4.0], sizes=0.0, memory=[4.0, math.inf])  # fmt: skip
    assert lower_bound(fork).parts["path under memory"] == pytest.approx(100.0)


def test_a_unit_that_does_not_fit_the_fast_device_runs_elsewhere():
    problem = problem_of([[1.0, 10.0]], resident=3.0, memory=[2.0, 4.0])
    assert lower_bound(problem).parts["unit"] == pytest.approx(10.0)


def test_each_phase_of_gpipe_has_its_own_busiest_device():
    """Ops that are fast forward on one device and backward on the other, so that no device serves both phases well."""
    seconds = [[1.0, 3.0], [1.0, 3.0], [3.0, 1.0], [3.0, 1.0]]
    problem = problem_of(seconds, phase=[0, 0, 1, 1], objective="throughput")
    together = lower_bound(problem).value
    apart = lower_bound(replace(problem, execution=Execution(pipeline="gpipe"))).value
    assert together == pytest.approx(2.0)
    assert apart == pytest.approx(1.5 + 1.5)


def test_models_queue_for_one_device():
    columns = {"model": [0, 1, 2], "models": ["a", "b", "c"]}
    problem = problem_of([[3.0], [1.0], [2.0]], objective="completion", **columns)
    bound = lower_bound(problem)
    assert bound.parts == pytest.approx({"alone": 1 + 2 + 3, "area": 1 + 3 + 6, "queue": 1 + 3 + 6})


def test_models_on_their_own_devices_do_not_queue():
    columns = {"model": [0, 1], "models": ["a", "b"]}
    problem = problem_of([[3.0, 9.0], [9.0, 2.0]], objective="completion", **columns)
    assert lower_bound(problem).value == pytest.approx(5.0) == brute_force(problem)[0]


def test_a_small_model_beside_a_large_one_is_bounded_by_its_own_area():
    """The large model gives all the price to d0's time; alone, the small one still needs both devices."""
    seconds = [[1.0, 1.0]] * 4 + [[100.0, math.inf]]
    columns = {"model": [0, 0, 0, 0, 1], "models": ["small", "large"]}
    problem = problem_of(seconds, objective="completion", **columns)
    assert lower_bound(problem).parts["alone"] == pytest.approx(2 + 100)


def test_the_first_model_to_finish_may_have_the_scarce_memory_to_itself():
    """Half of the weights fit the fast device: together the models need 40 s, but the first might run as if all did."""
    columns = {"model": [0] * 4 + [1] * 4, "models": ["a", "b"], "resident": 1.0, "sizes": 0.0}
    problem = problem_of(np.ones((8, 1)) * [1.0, 10.0], memory=[4.0, math.inf], objective="completion", **columns)
    assert lower_bound(problem).parts["area"] == pytest.approx(40 / 11 + 40)


# ---- memory that cannot suffice --------------------------------------------------------------------------------------


def test_too_much_for_all_devices_together_is_proved():
    bound = lower_bound(problem_of(np.ones((3, 2)), resident=1.0, memory=[1.5, 1.4]))
    assert bound.value == math.inf
    assert bound.parts == {"memory": math.inf}
    assert lower_bound(problem_of(np.ones((3, 2)), resident=1.0, sizes=0.0, memory=[1.5, 1.5])).value < math.inf


def test_an_op_that_nowhere_has_room_for_what_it_makes_is_proved():
    """1 byte of its own and 1 that it makes. What takes no time holds nothing, and `static` counts only its own."""
    seconds = np.ones((3, 2))
    assert lower_bound(problem_of(seconds, resident=1.0, memory=1.5)).parts == {"memory": math.inf}
    assert lower_bound(problem_of(0 * seconds, resident=1.0, memory=1.5)).value == 0.0
    static = problem_of(seconds, resident=1.0, memory=1.5, execution=Execution(memory="static"))
    assert lower_bound(static).value < math.inf
    with pytest.raises(NoFeasiblePlan, match="op 'op0' needs 2 B in memory while it runs"):
        plan(problem_of(seconds, resident=1.0, memory=1.5), "random")


def test_too_much_for_the_devices_that_some_ops_need_is_proved():
    seconds = np.ones((4, 3))
    seconds[:3, 2] = math.inf  # three of the ops cannot use the large device
    assert lower_bound(problem_of(seconds, resident=1.0, sizes=0.0, memory=[1.0, 1.5, 9.0])).value == math.inf
    assert lower_bound(problem_of(seconds, resident=1.0, sizes=0.0, memory=[1.0, 2.0, 9.0])).value < math.inf
    assert lower_bound(problem_of(seconds, resident=1.0, sizes=0.0, memory=[1.0, 1.5, math.inf])).value == math.inf


def test_an_exact_fit_is_not_called_too_much():
    """A third is not a binary number: sums may land on either side of the capacity."""
    thirds = np.full(9, 1 / 3)
    memory = float(np.bincount(np.zeros(9, int), thirds)[0])
    problem = problem_of(np.ones((9, 1)), resident=thirds, sizes=0.0, memory=memory)
    assert lower_bound(problem).value == pytest.approx(9.0) == brute_force(problem)[0]


# ---- what must not matter --------------------------------------------------------------------------------------------


def random_problems(count: int = 60):
    return [small_problem(np.random.default_rng(1000 + seed)) for seed in range(count)]


def test_the_unit_of_time_does_not_matter():
    for problem in random_problems():
        links = tuple(
            replace(link, latency=link.latency * 1e-6, bandwidth=link.bandwidth * 1e6) for link in problem.cluster.links
        )
        micro = replace(
            problem,
            cluster=replace(problem.cluster, links=links),
            costs=Costs.create(problem.seconds * 1e-6),
        )
        assert lower_bound(micro).value == pytest.approx(lower_bound(problem).value * 1e-6, rel=1e-9)


def test_the_numbering_of_ops_and_devices_does_not_matter():
    for i, problem in enumerate(random_problems()):
        rng = np.random.default_rng(i)
        ops, devices = rng.permutation(problem.num_ops), rng.permutation(problem.num_devices)
        bound = lower_bound(renumbered(problem, ops, devices))
        assert bound.value == pytest.approx(lower_bound(problem).value, rel=1e-9)


# ---- large problems --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tight", [False, True])
def test_pricing_in_groups_comes_close_to_pricing_each_unit(monkeypatch, tight):
    rng = np.random.default_rng(7)
    n, devices = 1500, 4
    seconds = rng.lognormal(0, 1, (n, devices))
    seconds[rng.random((n, devices)) < 0.1] = math.inf
    seconds[:, 0] = 3.0
    resident = rng.lognormal(0, 1, n)
    memory = resident.sum() * np.array([0.6, 0.2, 0.1, 0.2]) if tight else math.inf
    problem = problem_of(seconds, resident=resident, memory=memory, objective="throughput")
    in_groups = lower_bound(problem).value
    monkeypatch.setattr(bounds, "_EXACT", n)
    exactly = lower_bound(replace(problem)).value
    assert exactly * (1 - 1e-3) < in_groups <= exactly * (1 + 1e-7)


# ---- what it is owed to ----------------------------------------------------------------------------------------------


def test_a_path_is_owed_to_compute_and_transfers_and_an_area_to_memory():
    """Pinned apart, two ops of 1 s exchange 5 bytes. Four ops of 1 s or 10 s, of which the fast device holds two."""
    path = problem_of(np.ones((2, 2)), [(0, 1)], sizes=5.0, pins={"op0": "d0", "op1": "d1"})
    assert made_of(path)["path"] == pytest.approx({"compute": 2.0, "transfer": 5.0, "memory": 0.0})
    seconds, sequential = np.ones((4, 1)) * [1.0, 10.0], Execution(concurrency="sequential")
    area = problem_of(seconds, resident=1.0, sizes=0.0, memory=[2.0, math.inf], execution=sequential)
    assert made_of(area)["area"] == pytest.approx({"compute": 4.0, "transfer": 0.0, "memory": 18.0})


def test_what_a_bound_is_owed_to_adds_up():
    owed = dict.fromkeys(bounds.INGREDIENTS, 0)
    for problem in random_problems(120):
        parts, shares = lower_bound(problem).parts, made_of(problem)
        assert list(shares) == list(parts)
        for name, seconds in parts.items():
            assert sum(shares[name].values()) == pytest.approx(seconds, rel=1e-3, abs=1e-9), name
            for what, share in shares[name].items():
                owed[what] += 1e-6 < share < math.inf
    assert owed["transfer"] > 20
    assert owed["memory"] > 0


def test_the_bound_is_computed_once():
    problem = problem_of(np.ones((2, 2)))
    assert lower_bound(problem) is lower_bound(problem)
