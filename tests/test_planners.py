"""What every planner promises, on the same small problems; and the exact answers of each where they are known."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import placewise
from oracles import brute_force
from placewise import Device, full_mesh, planners
from placewise.driver import Budget, Context, compare, plan
from placewise.errors import InvalidInput, NoFeasiblePlan, PlacewiseError, Unsupported
from placewise.planners import local_search
from placewise.planners.blocks import Blocks
from placewise.planners.local_search import BATCH, Current
from placewise.planners.moves import UnitMoves
from placewise.planners.random_search import sample
from placewise.problem import Execution
from placewise.simulator import evaluate, simulate, violations
from placewise.simulator.arrays import upward_rank
from problems import problem_of, random_problem

# ---- the problems ----------------------------------------------------------------------------------------------------


def net(**options):
    """A fork and a join with a skip, on a fast device, one half as fast, and one that is good at op4 only."""
    speed = np.array([1.0, 2.0, 4.0])
    seconds = np.array([2.0, 3.0, 5.0, 1.0, 4.0, 2.0])[:, None] * speed
    seconds[4, 2] = 1.0
    options = {"sizes": [1.0, 2.0, 1.0, 3.0, 1.0, 1.0], "latency": 0.25} | options
    return problem_of(
        options.pop("seconds", seconds), [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (2, 5), (4, 5)], **options
    )


def layers(**options):
    """Three layers in a row, each with a parameter of its own, on a small fast device and a large slow one."""
    seconds = np.array([[0.0, 0.0]] * 3 + [[1.0, 6.0]] * 3)
    columns = {"op_kinds": ["parameter"] * 3 + ["op"] * 3, "sizes": [4.0] * 3 + [1.0] * 3}
    edges = [(0, 3), (1, 4), (2, 5), (3, 4), (4, 5)]
    return problem_of(seconds, edges, memory=[15.0, math.inf], bandwidth=2.0, **columns, **options)


def without(problem, *banned):
    seconds = problem.seconds.copy()
    for op, device in banned:
        seconds[op, device] = math.inf
    return replace(problem, costs=placewise.Costs.create(seconds))


def language_model():
    """For planners that know models by name, or want a CPU."""
    cluster = full_mesh([Device("cpu", "cpu"), Device("gpu0"), Device("gpu1")], 1.0)
    modules = ["embedding", "layers.0", "layers.1", "softmax"]
    seconds = [[5.0, 1.0, 2.0]] * 4
    return problem_of(seconds, [(0, 1), (1, 2), (2, 3)], cluster=cluster, name="rnnlm", op_modules=modules)


def the_problems():
    """By name; all but those that say so have a feasible placement."""
    two_models = {"model": [0, 0, 1, 0, 1, 1], "models": ["a", "b"]}
    weights = {"resident": [3.0, 1.0, 2.0, 1.0, 3.0, 2.0]}
    found = {
        "latency": net(),
        "throughput": net(objective="throughput"),
        "throughput, gpipe": net(
            objective="throughput", phase=[0, 0, 0, 1, 1, 1], execution=Execution(pipeline="gpipe", overlap=False)
        ),
        "completion": net(objective="completion", **two_models),
        "sequential": net(execution=Execution(concurrency="sequential")),
        "sequential completion": net(
            objective="completion", execution=Execution(concurrency="sequential"), **two_models
        ),
        "slots": net(execution=Execution(concurrency="slots", slots=2, memory="static")),
        "literature": net(execution=Execution(contention="none", sends="edge", memory="static")),
        "static memory": net(memory=[5.0, 4.0, 4.0], execution=Execution(memory="static"), **weights),
        "live memory": net(memory=[12.0, 9.0, 9.0], **weights),
        "pipeline memory": net(memory=[14.0, 12.0, 12.0], objective="throughput", **weights),
        "pins": net(pins={"op1": "d2", "op3": "d1"}),
        "forbidden": net(forbidden=("d0",)),
        "groups": net(group=[0, -1, 0, 1, -1, 1]),
        "unsupported": without(net(), (0, 0), (2, 1), (3, 0), (3, 1)),
        "pins and groups and memory": net(group=[0, -1, 0, -1, 0, -1], pins={"op2": "d1"}, memory=18.0, **weights),
        "parameters": layers(),
        "parameters, throughput": layers(objective="throughput"),
        "parameters, sequential": layers(execution=Execution(concurrency="sequential")),
        "contiguous": net(contiguous=True),
        "contiguous throughput": net(contiguous=True, objective="throughput"),
        "two devices": net(max_devices=2, objective="throughput"),
        "a model of the zoo": language_model(),
        "one op": problem_of([[3.0, 2.0]]),
        "no op": problem_of(np.zeros((0, 2))),
        "no op, throughput": problem_of(np.zeros((0, 2)), objective="throughput"),
        "no time": problem_of(np.zeros((3, 2)), [(0, 1)], sizes=0.0),
        "one device": problem_of([[1.0], [2.0], [3.0]], [(0, 1), (0, 2)]),
        "nothing fits": net(memory=[7.0, 1.0, 4.0], execution=Execution(memory="static"), **weights),
        "activations do not fit": net(memory=2.0),
    }
    for seed in range(12):
        rng = np.random.default_rng(seed)
        found[f"random {seed}"] = random_problem(
            rng, max_ops=7, max_devices=3, constrained=True, integers=seed % 2 == 0
        )
    return found


PROBLEMS = the_problems()
PLANNERS = sorted(planners.available())


def answer(planner, name, **options):
    """The plan, or the error that says why there is none."""
    try:
        return plan(PROBLEMS[name], planner, **{"budget": Budget(evaluations=1_000)} | options)
    except (NoFeasiblePlan, Unsupported) as error:
        return error


def key(found):
    """What must be the same whenever the same question is asked."""
    if isinstance(found, Exception):
        return str(found)
    order = None if found.order is None else found.order.tolist()
    return [found.placement.tolist(), order, found.value, found.lower_bound, found.evaluations, found.stopped]


# ---- what every planner promises -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("planner", PLANNERS)
def test_a_plan_keeps_every_constraint_and_tells_its_value(planner, name):
    problem, found = PROBLEMS[name], answer(planner, name, seed=3)
    best, _ = brute_force(problem)
    if isinstance(found, Exception):
        assert len(str(found)) > 30  # says why
        assert planner in str(found) or "does not fit" in str(found)
        return
    assert violations(problem, found.placement, found.order) == []
    assert found.problem is problem
    assert found.placement.dtype == np.int32
    assert found.value == simulate(problem, found.placement, found.order).value == found.timeline.value
    assert found.lower_bound <= found.value
    assert found.lower_bound <= best
    at_least, _ = brute_force(problem, found.order)  # no placement is better in the order that the plan gives
    assert found.value >= at_least

    assert (found.planner, found.seed, found.version) == (planner, 3, placewise.__version__)
    assert found.stopped in ("finished", "budget")
    assert found.seconds >= 0
    assert set(found.options) == set(planners.get(planner).options)
    seconds, evaluations, values = zip(*found.history, strict=True)
    assert list(seconds) == sorted(seconds)
    assert list(evaluations) == sorted(evaluations)
    assert list(values) == sorted(set(values), reverse=True)
    assert values[-1] == found.value


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_planner_finds_plans(planner):
    """On most of the problems that it supports and that have one."""
    answers = [answer(planner, name) for name in PROBLEMS if math.isfinite(brute_force(PROBLEMS[name])[0])]
    supported = [found for found in answers if not isinstance(found, Unsupported)]
    plans = [found for found in supported if not isinstance(found, NoFeasiblePlan)]
    assert len(supported) >= 1
    assert len(plans) >= 0.6 * len(supported)


@pytest.mark.parametrize("planner", ["random", "local-search"])
def test_a_search_finds_a_plan_wherever_there_is_one(planner):
    for name, problem in PROBLEMS.items():
        assert isinstance(answer(planner, name), Exception) is math.isinf(brute_force(problem)[0]), name


def test_the_same_seed_gives_the_same_plan():
    """Also with another hash seed, and whatever was planned before in the same process."""
    code = "import json, test_planners as t; print(json.dumps(t.everything(-1)))"
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == json.loads(json.dumps(everything(1)))


def everything(step):
    """In this order, or backwards."""
    asked = [(planner, name) for planner in PLANNERS for name in PROBLEMS][::step]
    return {f"{p}: {name}": key(answer(p, name, seed=5, budget=Budget(evaluations=200))) for p, name in asked}


@pytest.mark.parametrize("evaluations", [1, 7, 50])
@pytest.mark.parametrize("planner", PLANNERS)
def test_a_budget_of_evaluations_is_kept(planner, evaluations):
    for name in PROBLEMS:
        found = answer(planner, name, budget=Budget(evaluations=evaluations))
        if not isinstance(found, Exception):
            assert found.evaluations <= evaluations, name


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_budget_of_seconds_ends_in_a_plan(planner):
    big = random_problem(np.random.default_rng(1), max_ops=120, objective="latency", execution=Execution(), stored=0.0)
    if planners.get(planner).why_not(big):
        pytest.skip(f"{planner} {planners.get(planner).why_not(big)}")
    found = plan(big, planner, budget=Budget(seconds=0.05))
    assert violations(big, found.placement, found.order) == []
    if planner in ("random", "local-search"):
        endless = {"samples": 10**9} if planner == "random" else {"patience": 10**9}
        found = plan(big, planner, budget=Budget(seconds=0.05), options=endless)
        assert found.stopped == "budget"
        assert found.options | endless == found.options


# ---- single ----------------------------------------------------------------------------------------------------------


def test_single_picks_the_fastest_device_that_fits():
    seconds = [[1.0, 5.0, 3.0], [1.0, 5.0, 3.0]]
    assert plan(problem_of(seconds), "single").placement.tolist() == [0, 0]
    tight = problem_of(seconds, sizes=0.0, resident=2.0, memory=[3.0, 4.0, 4.0])
    assert plan(tight, "single").placement.tolist() == [2, 2]
    assert plan(tight, "single").value == 6.0
    with pytest.raises(NoFeasiblePlan, match="'single' found no plan"):
        plan(problem_of(seconds, sizes=0.0, resident=2.0, memory=3.0), "single")


def test_single_sends_what_cannot_run_there_where_it_is_fastest():
    problem = problem_of([[1.0, 9.0, 9.0], [math.inf, 5.0, 4.0]], [(0, 1)], sizes=0.0, pins={})
    assert plan(problem, "single").placement.tolist() == [0, 2]
    pinned = replace(problem, pins={"op1": "d1"})
    assert plan(pinned, "single").placement.tolist() == [0, 1]


# ---- blocks ----------------------------------------------------------------------------------------------------------

STATIC = Execution(memory="static")


def test_blocks_by_memory_fill_the_fastest_device_first():
    # Resident bytes 4 4 4 4 4; devices of 10, 9 and 100 bytes, from fast to slow: two ops, two ops, the rest.
    problem = problem_of(np.ones((5, 1)) * [3.0, 1.0, 2.0], [(i, i + 1) for i in range(4)], resident=4.0,
                         memory=[100.0, 10.0, 9.0], execution=STATIC)  # fmt: skip
    assert plan(problem, "blocks-by-memory").placement.tolist() == [1, 1, 2, 2, 0]
    roomy = replace(problem, cluster=problem.cluster.with_memory({"d1": 20.0}))
    assert plan(roomy, "blocks-by-memory").placement.tolist() == [1] * 5


def test_blocks_by_memory_leave_room_for_activations():
    # Resident bytes 4 4 4; each op reads 1 byte and writes 1 byte, so 2 * 2 bytes stay free: 8 bytes hold one op.
    problem = problem_of(np.ones((3, 1)) * [1.0, 2.0], [(0, 1), (1, 2)], resident=4.0, memory=[8.0, math.inf])
    assert plan(problem, "blocks-by-memory").placement.tolist() == [0, 1, 1]


def test_blocks_by_memory_follow_the_program_and_not_the_numbering():
    problem = problem_of(np.ones((4, 1)) * [1.0, 2.0], [(3, 2), (2, 1), (1, 0)], resident=1.0, memory=[2.0, 2.0],
                         execution=STATIC)  # fmt: skip
    assert plan(problem, "blocks-by-memory").placement.tolist() == [1, 1, 0, 0]


def test_a_pinned_op_does_not_end_a_block():
    problem = problem_of(np.ones((4, 1)) * [1.0, 2.0], [(0, 1), (1, 2), (2, 3)], pins={"op1": "d1"})
    assert plan(problem, "blocks-by-memory").placement.tolist() == [0, 1, 0, 0]


def test_a_group_goes_where_its_first_op_goes():
    # Resident bytes 1 1 1 1 in groups a a - a: the group takes 3 bytes, the other goes on.
    problem = problem_of(np.ones((4, 1)) * [1.0, 2.0], resident=1.0, group=[0, 0, -1, 0], memory=[3.0, 2.0],
                         execution=STATIC)  # fmt: skip
    assert plan(problem, "blocks-by-memory").placement.tolist() == [0, 0, 1, 0]


def test_blocks_by_load_balance_by_speed():
    # Nine ops of 1 s or 2 s: six on the fast device and three on the slow one take 6 s each.
    problem = problem_of(np.ones((9, 1)) * [2.0, 1.0], objective="throughput")
    found = plan(problem, "blocks-by-load")
    assert found.placement.tolist() == [1] * 6 + [0] * 3
    assert found.value == 6.0
    # Ops of 3 1 1 1 s on equal devices: 3 and 1 + 1 + 1.
    uneven = problem_of(np.array([[3.0], [1.0], [1.0], [1.0]]).repeat(2, axis=1), objective="throughput")
    assert plan(uneven, "blocks-by-load").placement.tolist() == [0, 1, 1, 1]


def test_blocks_by_load_respect_memory():
    # By load six ops would go to the fast device; its memory holds four.
    problem = problem_of(np.ones((9, 1)) * [2.0, 1.0], sizes=0.0, resident=1.0, memory=[math.inf, 4.0])
    assert plan(problem, "blocks-by-load").placement.tolist() == [1] * 4 + [0] * 5


def test_fill_says_whether_everything_was_within_the_limits():
    problem = problem_of(np.ones((4, 2)))
    assert Blocks(problem).fill([0, 1], 2.0)[1]
    assert not Blocks(problem).fill([0, 1], 1.5)[1]


def test_blocks_leave_a_forbidden_device_out_and_go_on_past_it():
    # 4 ops of 4 bytes; the fastest device is forbidden, the next one has room for 2 of them.
    chain = [(0, 1), (1, 2), (2, 3)]
    static = Execution(memory="static")
    problem = problem_of(
        np.ones((4, 1)) * [1.0, 2.0, 3.0],
        chain,
        resident=4.0,
        memory=[100, 8, 100],
        forbidden=("d0",),
        execution=static,
    )
    assert plan(problem, "blocks-by-memory").placement.tolist() == [1, 1, 2, 2]
    assert not (plan(problem, "blocks-by-load").placement == 0).any()


def test_blocks_count_every_tensor_of_a_sample_for_throughput():
    # Each op holds 1 byte of weights and makes 3 bytes: 4 ops would need 16 bytes on one device of 15 (4 of headroom).
    problem = problem_of(
        np.ones((4, 2)), [(0, 1), (1, 2), (2, 3)], sizes=3.0, resident=1.0, memory=27.0, objective="throughput"
    )
    assert plan(problem, "blocks-by-memory").placement.tolist() == [0, 0, 0, 1]


# ---- random ----------------------------------------------------------------------------------------------------------


def test_random_draws_from_all_allowed_devices_and_no_other():
    problem = without(net(pins={"op1": "d2"}, group=[0, -1, 0, -1, -1, -1]), (0, 1), (3, 0))
    rows = sample(problem, np.random.default_rng(0), 300)
    assert rows.shape == (300, 6)
    assert [sorted(set(column.tolist())) for column in rows.T] == [[0, 2], [2], [0, 2], [1, 2], [0, 1, 2], [0, 1, 2]]
    assert (rows[:, 0] == rows[:, 2]).all()


def test_random_tries_as_many_as_it_is_told():
    for samples in (1, 64, 100, 130):
        assert plan(net(), "random", options={"samples": samples}).evaluations == samples


# ---- HEFT ------------------------------------------------------------------------------------------------------------

TOPCUOGLU_TIMES = [
    [14, 16, 9], [13, 19, 18], [11, 13, 19], [13, 8, 17], [12, 13, 10],
    [13, 16, 9], [7, 15, 11], [5, 11, 14], [18, 12, 20], [21, 7, 16],
]  # fmt: skip
TOPCUOGLU_EDGES = [
    (1, 2, 18), (1, 3, 12), (1, 4, 9), (1, 5, 11), (1, 6, 14), (2, 8, 19), (2, 9, 16), (3, 7, 23),
    (4, 8, 27), (4, 9, 23), (5, 9, 13), (6, 8, 15), (7, 10, 17), (8, 10, 11), (9, 10, 13),
]  # fmt: skip


def topcuoglu():
    """The example of the HEFT paper (figure 2): ten tasks on three processors, a transfer per edge, no contention."""
    columns = {
        "tensor_producer": [a - 1 for a, _, _ in TOPCUOGLU_EDGES],
        "tensor_bytes": [size for _, _, size in TOPCUOGLU_EDGES],
    }
    edges = [(i, b - 1) for i, (_, b, _) in enumerate(TOPCUOGLU_EDGES)]
    return problem_of(TOPCUOGLU_TIMES, edges, execution=Execution(contention="none", sends="edge"), **columns)


def test_heft_gives_the_schedule_of_its_paper():
    problem = topcuoglu()
    ranks = [108.000, 77.000, 80.000, 80.000, 69.000, 63.333, 42.667, 35.667, 44.333, 14.667]
    assert upward_rank(problem) == pytest.approx(ranks, abs=5e-4)
    found = plan(problem, "heft")
    assert found.value == 80
    assert found.placement.tolist() == [2, 0, 2, 1, 2, 1, 2, 0, 1, 1]


def test_heft_fills_gaps():
    """d0 idles from 1 to 6, while op1 runs on d1; op3 (3 s) has the lowest rank and fits there."""
    seconds = np.array([[1.0], [5.0], [4.0], [3.0]]).repeat(2, axis=1)
    pins = {"op0": "d0", "op1": "d1", "op2": "d0", "op3": "d0"}
    problem = problem_of(seconds, [(0, 1), (1, 2)], sizes=0.0, pins=pins)
    found = plan(problem, "heft")
    assert found.timeline.start.tolist() == [0, 1, 6, 1]
    assert found.value == 10
    # A gap of 1 s, from 1 to 2, is too small for it.
    shorter = replace(problem, costs=placewise.Costs.create(np.where(seconds == 5.0, 1.0, seconds)))
    assert plan(shorter, "heft").timeline.start.tolist() == [0, 1, 2, 6]


def test_heft_passes_over_a_device_that_is_full():
    # Both ops are fastest on d0, which holds one of them.
    problem = problem_of([[1.0, 5.0], [1.0, 5.0]], sizes=0.0, resident=2.0, memory=[3.0, 9.0])
    found = plan(problem, "heft")
    assert sorted(found.placement.tolist()) == [0, 1]


def test_heft_keeps_groups_together_and_parameters_with_their_reader():
    problem = problem_of(np.ones((4, 2)), sizes=0.0, group=[0, -1, 0, -1])
    place = plan(problem, "heft").placement
    assert place[0] == place[2]
    assert plan(problem, "heft").value == 2.0
    # 15 bytes on d0 hold two of the parameters (4 bytes each) beside the headroom of 2 * 2 bytes.
    assert plan(layers(), "heft").placement.tolist() == [0, 0, 1, 0, 0, 1]
    assert plan(layers(pins={"op5": "d0"}), "heft").placement.tolist() == [0, 0, 1, 0, 0, 0]


def test_heft_does_not_apply_to_constraints_that_it_ignores():
    for problem in (net(contiguous=True), net(max_devices=2), net(objective="throughput")):
        with pytest.raises(Unsupported, match="planner 'heft'"):
            plan(problem, "heft")


# ---- local search ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "concurrency"),
    [("latency", "parallel"), ("throughput", "parallel"), ("completion", "parallel"), ("latency", "sequential")],
)
def test_local_search_finds_nearly_every_optimum_of_tiny_problems(objective, concurrency):
    reached = tried = 0
    for seed in range(200):
        problem = random_problem(
            np.random.default_rng(seed), max_ops=8, max_devices=3, objective=objective, constrained=True
        )
        problem = replace(problem, execution=replace(problem.execution, concurrency=concurrency))
        best, _ = brute_force(problem)
        if math.isinf(best) or problem.num_units < 4 or tried == 30:
            continue
        tried += 1
        reached += plan(problem, "local-search").value <= best * (1 + 1e-9)
    assert tried == 30
    assert reached >= 27


@pytest.mark.parametrize("objective", ["latency", "throughput", "completion"])
def test_local_search_is_never_worse_than_the_simple_planners(objective):
    for seed in range(15):
        problem = random_problem(np.random.default_rng(seed), max_ops=30, objective=objective, constrained=True)
        values = {}
        for planner in ("local-search", "single", "blocks-by-memory", "blocks-by-load", "heft"):
            try:
                values[planner] = plan(problem, planner).value
            except (NoFeasiblePlan, Unsupported):
                values[planner] = math.inf
        assert values["local-search"] == min(values.values()), seed


def test_local_search_improves_on_where_it_starts():
    """Two chains that cross devices at a bad place unless ops move together."""
    problem = random_problem(
        np.random.default_rng(8), max_ops=60, objective="latency", execution=Execution(), stored=0.0
    )
    found = plan(problem, "local-search", budget=Budget(evaluations=3000))
    assert len(found.history) > 3
    assert found.value < found.history[0][2]


def test_local_search_moves_connected_pieces():
    """A chain of eight on d0, and one of two that is not connected to it, on d1."""
    problem = problem_of(np.ones((10, 3)), [(i, i + 1) for i in range(7)] + [(8, 9)])
    placement = np.array([0] * 8 + [1] * 2, np.int32)
    sizes = set()
    for row in UnitMoves(problem, np.random.default_rng(0)).batch(placement, 400):
        ops = np.flatnonzero(row != placement).tolist()
        if len(ops) > 2:  # else it may be a swap
            assert ops == list(range(min(ops), max(ops) + 1))
            assert max(ops) < 8
            assert len(set(row[ops].tolist())) == 1
        sizes.add(len(ops))
    assert sizes >= {1, 2, 4, 8}


def neighbours(problem, placement, count=400):
    """Distinct placements that a search would try next."""
    rows = UnitMoves(problem, np.random.default_rng(0)).batch(np.array(placement, np.int32), count)
    return set(map(tuple, rows.tolist()))


def test_local_search_swaps_what_it_cannot_move():
    """Each device holds one of the ops; a third op may run anywhere but weighs too much to move."""
    problem = problem_of(np.ones((3, 3)), resident=[4.0, 4.0, 9.0], memory=[4.0, 4.0, 9.0], execution=STATIC)
    assert neighbours(problem, [0, 1, 2]) == {(1, 0, 2)}
    assert neighbours(without(problem, (0, 1)), [0, 1, 2]) == set()
    assert neighbours(without(problem, (1, 0)), [0, 1, 2]) == set()


def test_local_search_keeps_resident_memory_or_makes_it_better():
    """d0 has room for two of the ops, d1 for one."""
    problem = problem_of(np.ones((3, 2)), resident=2.0, memory=[4.0, 2.0], execution=STATIC)
    assert neighbours(problem, [0, 0, 1]) == {(1, 0, 0), (0, 1, 0)}  # a full device is not over-full
    # From a placement that does not fit, what relieves the over-full device is tried even if it is still over-full.
    assert neighbours(problem, [1, 1, 1]) == {(0, 1, 1), (1, 0, 1), (1, 1, 0)}
    # Both are over-full: moving from one to the other would make the other worse.
    tight = problem_of(np.ones((4, 2)), resident=2.0, memory=[3.0, 3.0], execution=STATIC)
    assert neighbours(tight, [0, 0, 1, 1]) == {(1, 0, 0, 1), (1, 0, 1, 0), (0, 1, 0, 1), (0, 1, 1, 0)}


def test_local_search_moves_groups_as_one_and_to_allowed_devices_only():
    problem = problem_of(np.ones((4, 2)), [(0, 2), (2, 3)], group=[0, 0, -1, -1], pins={"op3": "d1"})
    found = neighbours(problem, [0, 0, 0, 1])
    assert found == {(1, 1, 0, 1), (0, 0, 1, 1), (1, 1, 1, 1)}  # the group, op2, both
    assert neighbours(replace(problem, pins={f"op{i}": "d0" for i in range(4)}), [0, 0, 0, 0]) == set()


def test_a_kick_moves_connected_pieces():
    """Three chains of 50 ops; a piece has up to 32 ops of one chain."""
    chains = [(50 * c + i, 50 * c + i + 1) for c in range(3) for i in range(49)]
    problem = problem_of(np.ones((150, 3)), chains)
    home = np.repeat(np.array([0, 1, 2], np.int32), 50)
    assert UnitMoves(problem, np.random.default_rng(0), 0).kicked(home).tolist() == home.tolist()
    moves = UnitMoves(problem, np.random.default_rng(0), 1)
    sizes = []
    for _ in range(200):
        kicked = moves.kicked(home)
        (changed,) = np.nonzero(kicked != home)
        sizes.append(len(changed))
        assert len(set(kicked[changed].tolist())) <= 1
        assert (np.diff(changed) == 1).all()
        assert len(set((changed // 50).tolist())) <= 1
    assert set(sizes) == {0, 2, 4, 8, 16, 32}  # 0: the device that it chose was its own
    moves = UnitMoves(problem, np.random.default_rng(0), 4)
    assert max((moves.kicked(home) != home).sum() for _ in range(50)) > 32
    assert home.tolist() == [0] * 50 + [1] * 50 + [2] * 50


def context(problem, **budget):
    """As the driver hands it to a planner, but with a bound that proves nothing, so that the search goes on."""
    limits = Budget(**budget)
    return Context(problem=problem, planner="local-search", budget=limits, seed=0, bound=-1.0, on_progress=None)


class Listening:
    """Moves whose calls are written down."""

    def __init__(self, monkeypatch):
        self.batches, self.homes = 0, []

        def batch(moves, placement, count, batch=UnitMoves.batch):
            self.batches += 1
            return batch(moves, placement, count)

        def kicked(moves, placement, kicked=UnitMoves.kicked):
            self.homes.append(placement.copy())
            return kicked(moves, placement)

        monkeypatch.setattr(UnitMoves, "batch", batch)
        monkeypatch.setattr(UnitMoves, "kicked", kicked)


@pytest.mark.parametrize(("patience", "units", "batches"), [(1, 7, 1), (20, 8, 5), (20, 9, 6), (3, 64, 6)])
def test_local_search_is_patient_and_gives_up_after_three_kicks(monkeypatch, patience, units, batches):
    """Nothing takes any time, so nothing ever helps."""
    heard = Listening(monkeypatch)
    ctx = context(problem_of(np.zeros((units, 2))))
    local_search.local_search(ctx.problem, ctx, patience=patience, kick=3)
    assert len(heard.homes) == 3
    assert heard.batches == 4 * batches
    assert batches * BATCH >= patience * units > (batches - 1) * BATCH
    assert ctx.stopped == "finished"


def test_local_search_kicks_from_the_best_place_that_it_knows(monkeypatch):
    heard, improved = Listening(monkeypatch), 0
    for seed in range(24):
        heard.homes.clear()
        problem = random_problem(np.random.default_rng(seed), max_ops=40, objective="throughput")
        ctx = context(problem, evaluations=20_000)
        local_search.local_search(problem, ctx, patience=1)
        if not heard.homes:
            continue
        values = evaluate(problem, np.array(heard.homes)).value.tolist()
        assert values == sorted(values, reverse=True)
        assert values[-1] == pytest.approx(ctx.best_value, rel=1e-9)
        assert len(set(values)) == 1 or len(values) > 3  # luck is followed by three more kicks
        improved += len(set(values)) > 1
    assert improved > 2


class Given:
    """Moves that always lead to the same placements."""

    def __init__(self, *candidates):
        self._rows = np.array(candidates, np.int32)

    def batch(self, placement, count):
        return self._rows[:count]


@pytest.mark.parametrize("execution", [Execution(), Execution(concurrency="sequential")])
def test_local_search_takes_the_best_of_a_batch_that_fits(execution):
    """d0 is fast, but has no room for the scratch space of op0, which only a full evaluation knows."""
    seconds = np.array([[1.0, 10.0, 5.0], [2.0, 10.0, 5.0]])
    columns = {"scratch": [3.0, 1.0], "memory": [2.0, 9.0, 9.0], "sizes": 0.0}
    problem = problem_of(seconds, [(0, 1)], execution=execution, **columns)
    ctx = context(problem)
    start = np.array([1, 1], np.int32)
    current = Current(problem, ctx, start)
    assert current.value == 20.0
    assert not current.improve(Given([1, 1], [1, 1]))
    assert not current.improve(Given([0, 1], [0, 0]))  # 11 s and 3 s, if op0 had room for its scratch space
    assert current.improve(Given([2, 1], [0, 0], [1, 0], [1, 2]))  # 15, 3 (no room), 12 and 15 s
    assert (current.placement.tolist(), current.value) == ([1, 0], 12.0)
    current.move_to(np.array([0, 1], np.int32))  # no room: it stays
    assert current.placement.tolist() == [1, 0]
    current.move_to(np.array([2, 2], np.int32))
    assert (current.placement.tolist(), current.value) == ([2, 2], 10.0)
    assert current.improve(Given([2, 0]))
    assert current.value == 7.0 == ctx.best_value


def test_local_search_leaves_the_other_devices_less_to_do_where_the_busiest_stays_as_it_is():
    """d0 is the busiest, with op0 of 9 s. op1 takes 5 s on d1, or 4 s on d2, and sends nothing there."""
    seconds = np.array([[9.0, 9.0, 9.0], [1.0, 5.0, 4.0], [8.0, 8.0, 3.0]])
    problem = problem_of(seconds, [(1, 2)], sizes=1.0, objective="throughput")
    ctx = context(problem)
    current = Current(problem, ctx, np.array([0, 1, 2], np.int32))
    assert current.value == 9.0
    assert current.improve(Given([0, 1, 1], [0, 0, 2], [0, 2, 2]))  # 13, 11 and 9 s
    assert (current.placement.tolist(), current.value) == ([0, 2, 2], 9.0)
    assert not current.improve(Given([0, 1, 2], [0, 2, 2]))  # as little or more


# ---- what a plan says of itself --------------------------------------------------------------------------------------


def test_a_bound_above_a_plan_is_right_up_to_rounding_or_wrong(monkeypatch):
    monkeypatch.setattr(planners, "_registered", dict(planners._registered))

    @planners.planner("boastful")
    def boastful(problem, ctx, *, claim: float = 0.0):
        """One placement, and a claim that none is better than so many seconds."""
        ctx.evaluate([0, 1, 1])
        ctx.bound(claim)

    problem = problem_of(np.ones((3, 2)))
    for claim, bound, optimal in [
        (1.75, 1.75, False),
        (2.0, 2.0, True),
        (2.0 * (1 + 1e-12), 2.0, True),
    ]:
        found = plan(problem, "boastful", options={"claim": claim})
        assert (found.value, found.lower_bound, found.is_optimal) == (2.0, bound, optimal)
        assert found.gap == max(0.0, 1 - bound / 2.0)
    with pytest.raises(
        PlacewiseError, match="'boastful': it claims that no plan is below 3 s, but it found one of 2 s"
    ):
        plan(problem, "boastful", options={"claim": 3.0})

    @planners.planner("mistaken")
    def mistaken(problem, ctx):
        """A bad plan, and a claim that none is better."""
        ctx.evaluate([0, 0, 0])
        ctx.bound(3.0)

    best, wrong = compare(problem, ["mistaken", "boastful"])
    assert (best.planner, best.plan.lower_bound) == ("boastful", pytest.approx(1.5))
    assert wrong.plan is None
    assert "it claims that no plan is below 3 s, but boastful found one of 2 s" in wrong.reason


def test_a_plan_is_optimal_if_only_rounding_is_above_the_bound():
    found = plan(problem_of(np.ones((3, 2))), "single")
    assert replace(found, lower_bound=found.value * (1 - 1e-10)).is_optimal
    assert not replace(found, lower_bound=found.value * (1 - 1e-8)).is_optimal


def test_a_stored_value_may_differ_from_the_simulated_one_by_rounding_only(tmp_path):
    found = plan(net(), "single")
    for factor, fits in ((1 + 1e-10, True), (1 - 1e-10, True), (1 + 1e-8, False), (1 - 1e-8, False)):
        replace(found, value=found.value * factor).save(tmp_path / "plan.json")
        if fits:
            assert placewise.Plan.load(tmp_path / "plan.json").placement.tolist() == found.placement.tolist()
        else:
            with pytest.raises(InvalidInput, match="was stored with value"):
                placewise.Plan.load(tmp_path / "plan.json")


def test_every_planner_is_in_the_docs():
    page = (Path(__file__).parents[1] / "docs" / "planners.md").read_text(encoding="utf-8")
    assert [name for name in planners.available() if f"`{name}`" not in page] == []


def test_searches_end_where_nothing_can_move():
    problem = problem_of(np.ones((3, 2)), [(0, 1), (1, 2)], pins={"op0": "d0", "op1": "d1", "op2": "d0"})
    for name in ("local-search", "multilevel", "annealing", "auto", "list-search", "order-search", "min-cut"):
        assert plan(problem, name, budget=Budget(evaluations=500)).placement.tolist() == [0, 1, 0]
