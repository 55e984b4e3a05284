"""Groups of devices that are one: their problem by hand, and the best of all groups, stages and replicas."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

import test_replication as replication
from oracles import brute_force
from placewise import driver
from placewise.certificate import check
from placewise.cluster import Cluster, Device, Link, full_mesh
from placewise.driver import Budget
from placewise.errors import InvalidInput, NoFeasiblePlan, Unsupported
from placewise.files import load_plan, save_problem
from placewise.importers import dnn_partitioning
from placewise.problem import Execution
from placewise.sharding import plan_sharded, sharded, ways
from placewise.simulator.alike import alike
from problems import problem_of, shared_bus

# ---- by hand ---------------------------------------------------------------------------------------------------------


def layers(devices, **options):
    """Three ops in a row, of 4 s each: one with weights; one with none; one that shares a device with another's."""
    settings = {"resident": [8.0, 0.0, 0.0, 8.0], "group": [-1, -1, 0, 0], "latency": 0.25, "bandwidth": 2.0} | options
    found = problem_of(np.full((4, devices), 4.0), [(0, 1), (1, 2), (2, 3)], sizes=[6.0, 6.0, 6.0, 6.0], **settings)
    quick = tuple(replace(device, launch=0.5) for device in found.cluster.devices)
    return replace(found, cluster=Cluster(quick, found.cluster.links))


def test_work_is_divided_and_what_weights_make_is_summed():
    """0.5 s of launch, 3.5 s of work; shares of 3 bytes at 2 bytes/s and 0.25 s are sent twice by each of two."""
    problem = layers(4)
    pairs = sharded(problem, ((0, 1), (2, 3)))
    assert pairs.costs.seconds.tolist() == [
        [0.5 + 3.5 / 2 + 2 * (1.5 + 0.25)] * 2,
        [0.5 + 3.5 / 2] * 2,
        [0.5 + 3.5 / 2] * 2,  # read by one that it shares a device with, where it stays in parts
        [0.5 + 3.5 / 2] * 2,  # read by none
    ]
    assert pairs.costs.shares() == {"modelled": 1.0}
    four = sharded(problem, ((0, 1, 2, 3),))
    assert four.costs.seconds[:2, 0].tolist() == [0.5 + 3.5 / 4 + 6 * (0.75 + 0.25), 0.5 + 3.5 / 4]
    apart = replace(
        problem, graph=replace(problem.graph, group=np.full(4, -1, np.int32), consumers=np.array([1, 3, 2]))
    )
    assert (sharded(apart, ((0, 1), (2, 3))).costs.seconds[:, 0] > 3).tolist() == [True, False, False, False]


def test_weights_that_are_placed_apart_are_weights_too():
    problem = problem_of([[0.0] * 2, [4.0] * 2, [4.0] * 2], [(0, 1), (1, 2)], op_kinds=["parameter", "op", "op"])
    assert sharded(problem, ((0, 1),)).costs.seconds[:, 0].tolist() == [0.0, 2.0 + 2 * 0.5, 2.0]


def test_shares_on_one_bus_wait_for_each_other():
    """Two shares of 3 bytes, one after the other at 2 bytes/s, twice; but not where transfers never wait."""
    problem = replace(layers(4), cluster=shared_bus(4, 2.0, 0.25))
    pairs = sharded(problem, ((0, 1), (2, 3)))
    assert pairs.costs.seconds[0, 0] == 4.0 / 2 + 2 * (3.0 + 0.5)
    assert pairs.cluster.links[0] == Link("d0+d1", "d2+d3", 2.0, 0.5, ("bus",))
    free = sharded(replace(problem, execution=Execution(contention="none")), ((0, 1), (2, 3)))
    assert free.cluster.links[0] == Link("d0+d1", "d2+d3", 4.0, 0.25, ("bus",))


def test_a_group_has_the_memory_and_the_links_of_all():
    rates = {"memory": 10.0, "flops": {"default": 3.0}, "bandwidth": 5.0}
    problem = problem_of([[4.0] * 4], cluster=full_mesh([Device(f"d{d}", **rates) for d in range(4)], 2.0, 0.25))
    found = sharded(problem, ((0,), (1,), (2, 3)))
    one, _, two = found.cluster.devices
    assert one == problem.cluster.devices[0]
    assert two == Device("d2+d3", memory=20.0, flops={"default": 6.0}, bandwidth=10.0, shards=2)
    assert found.cluster.link(0, 1) == problem.cluster.link(0, 1)
    assert found.cluster.link(0, 2) == Link("d0", "d2+d3", 2.0, 0.25)
    pairs = sharded(problem, ((0, 1), (2, 3)))
    assert pairs.cluster.link(0, 1) == Link("d0+d1", "d2+d3", 4.0, 0.25)
    assert alike(pairs, 0, 1)
    assert sharded(problem, ((0, 1, 2, 3),)).cluster.device_names == ("d0..d3",)
    named = Cluster(tuple(replace(d, name=f"cuda:{d.name[1]}") for d in problem.cluster.devices),
                    tuple(replace(x, source=f"cuda:{x.source[1]}", target=f"cuda:{x.target[1]}")
                          for x in problem.cluster.links))  # fmt: skip
    assert sharded(replace(problem, cluster=named), ((0, 1, 2, 3),)).cluster.device_names == (
        "cuda:0+cuda:1+cuda:2+cuda:3",
    )


def test_groups_of_one_change_nothing():
    problem = replace(layers(3), cluster=shared_bus(3, 2.0, 0.25))
    assert sharded(problem, ((0,), (1,), (2,)), {2: np.ones((4, 3))}).digest == problem.digest
    assert plan_sharded(problem, 1, "heft").digest == driver.plan(problem, "heft").digest


def test_times_that_are_given_replace_modelled_ones():
    problem = layers(4)
    found = sharded(problem, ((0, 1), (2,), (3,)), {2: np.full((4, 4), 3.0), 4: np.full((4, 4), 9.0)})
    assert found.costs.seconds.tolist() == [[3.0, 4.0, 4.0]] * 4
    assert found.costs.shares() == {"given": 1.0}


def test_ways():
    assert ways(layers(3), 1) == [((0,), (1,), (2,))]
    assert ways(layers(4), 4) == [
        ((0,), (1,), (2,), (3,)), ((0, 1), (2,), (3,)), ((0, 1), (2, 3)), ((0, 1, 2, 3),),
    ]  # fmt: skip
    assert ways(layers(4), 3) == ways(layers(4), 4)[:3]
    assert ways(layers(4), 4, uniform=True) == [ways(layers(4), 4)[i] for i in (0, 2, 3)]
    assert ways(layers(3), 2, uniform=True) == [((0,), (1,), (2,))]


def test_who_is_not_like_its_neighbour_is_not_in_its_group():
    forbidden = replace(layers(4), forbidden=("d1",))
    assert ways(forbidden, 4) == [((0,), (1,), (2,), (3,)), ((0,), (1,), (2, 3))]
    pinned = replace(layers(3), pins={"op0": "d2"})
    assert ways(pinned, 4) == [((0,), (1,), (2,)), ((0, 1), (2,))]


# ---- the best --------------------------------------------------------------------------------------------------------


def every_way(problem, most, devices=None):
    """All ways that put like devices together that none between them is unlike."""
    devices = range(problem.num_devices) if devices is None else devices
    if not devices:
        yield ()
        return
    first, *rest = devices
    for size in range(min(most, len(devices))):
        for mates in combinations(rest, size) if size + 1 in (1, 2, 4) else ():
            if all(alike(problem, first, d) for d in range(first, max((first, *mates)) + 1)):
                left = [d for d in rest if d not in mates]
                yield from (((first, *mates), *others) for others in every_way(problem, most, left))


@pytest.mark.parametrize("uniform", [False, True], ids=["any", "uniform"])
def test_the_best_of_all_groups_stages_and_replicas_with_proof(uniform):
    some = gained = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        execution = {} if seed % 3 == 0 else list(replication.OPTIONS.values())[seed % 5]
        problem = replication.step(rng, **execution) if seed % 2 else replication.several(rng, **execution)
        problem = replication.known(replace(problem, max_devices=None))
        problem = replication.in_boxes(problem) if seed % 7 == 0 else problem
        groups = [way for way in every_way(problem, 4) if not uniform or len({len(group) for group in way}) == 1]
        best = min(brute_force(sharded(problem, way))[0] for way in groups) if problem.num_ops else 0.0
        try:
            found = plan_sharded(problem, 4, "ideals", uniform=uniform, budget=Budget(seconds=60))
        except NoFeasiblePlan:
            assert math.isinf(best), seed
            continue
        assert found.value == pytest.approx(best, rel=1e-12), seed
        assert best * (1 + 1e-9) >= found.lower_bound >= found.value * (1 - 2e-9), seed
        assert not any(finding.is_wrong for finding in check(found)), seed
        some += 1
        gained += problem.num_ops > 0 and best < brute_force(problem)[0]
    assert some > 40
    assert gained > 5


def test_times_of_each_degree_decide_between_shards_and_replicas():
    """8 s of work on four devices: 2 s with four replicas, or as given: 3 s on two, 1.9 s on four, or 2.5 s on both."""
    problem = problem_of(
        np.full((1, 4), 8.0), objective="throughput", contiguous=True, execution=Execution(replicate=True)
    )
    for pair, four, value, names in (
        (3.0, 1.9, 1.5, ("d0+d1", "d2+d3")), (5.0, 1.9, 1.9, ("d0..d3",)), (5.0, 2.5, 2.0, ("d0", "d1", "d2", "d3")),
    ):  # fmt: skip
        given = {2: np.full((1, 4), pair), 4: np.full((1, 4), four)}
        found = plan_sharded(problem, 4, "ideals", seconds=given)
        assert (found.value, found.problem.cluster.device_names) == (value, names)
        assert found.is_optimal
        assert found.cost_shares == {"given": 1.0}


def test_a_model_that_fits_no_device_fits_a_group():
    problem = replace(pipeline(memory=10.0, resident=[15.0, 0.0, 0.0, 8.0]), execution=Execution(memory="static"))
    with pytest.raises(NoFeasiblePlan):
        driver.plan(problem, "ideals")
    found = plan_sharded(problem, 2, "ideals")
    assert found.problem.cluster.devices[found.placement[0]].shards == 2
    assert found.is_optimal
    with pytest.raises(NoFeasiblePlan, match=r"^however devices are grouped: the model does not fit: .* keeps 50"):
        plan_sharded(layers(4, memory=10.0, resident=[50.0, 0.0, 0.0, 8.0]), 4)


def test_groups_serve_latency_too():
    """4 ops in a row: on four devices 4 times 0.5 + 3.5 / 4 s, and one sum."""
    found = plan_sharded(layers(4), 4, "cpsat", budget=Budget(seconds=20))
    best = min(brute_force(sharded(layers(4), way))[0] for way in ways(layers(4), 4))
    assert found.value == pytest.approx(best)
    assert found.is_optimal


@pytest.mark.skipif("PLACEWISE_DATA" not in os.environ, reason="PLACEWISE_DATA is not set")
def test_plans_with_replicas_are_no_worse_than_those_without():
    """Where the search with replicas does not come to its end, that without does."""
    file = Path(os.environ["PLACEWISE_DATA"], "dnn-partitioning/throughput-inputs/LayerGraphs/gnmt_inference.json")
    problem = dnn_partitioning.load(json.loads(file.read_text()), "gnmt", transfer_scale=40.0)
    room = 0.9 * problem.per_unit(problem.graph.resident_bytes).max()
    cluster = problem.cluster.with_memory({f"fpga{i}": room for i in range(6)})
    problem = replace(problem, cluster=cluster, contiguous=True)
    grouped = sharded(problem, ways(problem, 2)[1])
    alone = driver.plan(grouped, "ideals")
    assert alone.is_optimal
    assert 1e3 * alone.value == pytest.approx(33.632, abs=5e-4)
    repeated = replace(grouped, execution=replace(grouped.execution, replicate=True))
    assert driver.plan(repeated, "ideals", budget=Budget(seconds=2)).value <= alone.value


# ---- budget, Ctrl-C, bad input ---------------------------------------------------------------------------------------


def pipeline(devices=4, **options):
    return layers(devices, objective="throughput", contiguous=True, bandwidth=100.0, **options)


def test_the_same_seed_gives_the_same_plan_within_the_evaluations():
    first, second = (plan_sharded(pipeline(), 4, "local-search", budget=Budget(evaluations=200), seed=3) for _ in "12")
    assert first.digest == second.digest
    assert (first.value, first.lower_bound, first.evaluations) == (second.value, second.lower_bound, second.evaluations)
    assert first.evaluations <= 200
    assert first.history[-1][2] == first.value
    assert first.bounds[-1] == (first.seconds, first.lower_bound)


def test_progress_is_that_of_all_ways(monkeypatch):
    monkeypatch.setattr(driver, "_REPORT_EVERY", 0.0)
    seen = []
    slow = replace(pipeline(), execution=Execution(overlap=False, contention="none"), cluster=layers(4).cluster)
    limit, endless = Budget(seconds=1.0), {"samples": 10**9}
    best = plan_sharded(slow, 4, "random", budget=limit, options=endless, on_progress=seen.append)
    assert seen[0].planner == "random 1/4"
    assert all(now.lower_bound <= best.value for now in seen)
    assert all(now.value <= before.value for before, now in pairwise(seen))
    assert best.stopped == "budget"
    assert 0.2 < best.seconds < 3


def interrupting(monkeypatch, after, how):
    calls, plan = [], driver.plan

    def pressed(*given, **settings):
        calls.append(given)
        if len(calls) <= after:
            return plan(*given, **settings)
        if how == "before a plan":
            raise KeyboardInterrupt
        return replace(plan(*given, **settings), stopped="interrupted", lower_bound=0.0)

    monkeypatch.setattr(driver, "plan", pressed)
    return calls


@pytest.mark.parametrize("how", ["before a plan", "after one"])
def test_ctrl_c_gives_the_best_so_far(monkeypatch, how):
    best = plan_sharded(pipeline(), 4, "ideals").value
    calls = interrupting(monkeypatch, 1, how)
    found = plan_sharded(pipeline(), 4, "single")  # far from optimal, so that all ways are worth a try
    assert len(calls) == 2
    assert found.stopped == "interrupted"
    assert found.lower_bound <= best <= found.value


def test_ctrl_c_before_there_is_a_plan_is_passed_on(monkeypatch):
    interrupting(monkeypatch, 0, "before a plan")
    with pytest.raises(KeyboardInterrupt):
        plan_sharded(pipeline(), 4, "single")


@pytest.mark.parametrize("most", [0, -1, True, 2.0, "2"])
def test_how_many_must_be_a_number(most):
    with pytest.raises(InvalidInput, match="shards: must be a whole number, 1 or more"):
        plan_sharded(pipeline(), most)


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(Unsupported, match="max_devices would count a group as one device"):
        plan_sharded(replace(pipeline(), max_devices=2), 2)
    with pytest.raises(InvalidInput, match="over 200 ways to have these devices in groups of up to 64: ask"):
        plan_sharded(pipeline(64), 64)
    assert len(ways(pipeline(64), 64, uniform=True)) == 7
    with pytest.raises(Unsupported, match="planner 'cpsat'"):
        plan_sharded(pipeline(), 2, "cpsat")
    with pytest.raises(InvalidInput, match="budget"):
        plan_sharded(pipeline(), 2, budget=5)


def test_times_that_are_given_must_be_of_all_ops_and_devices():
    problem, infinite = pipeline(), np.full((4, 4), 1.0)
    infinite[2, 1] = math.inf
    for table in (np.ones((4, 2)), np.ones(4), infinite):
        with pytest.raises(InvalidInput, match=r"^seconds\[2\]: (must have a time for each op|costs.seconds: must be)"):
            plan_sharded(problem, 2, seconds={2: table})
    with pytest.raises(InvalidInput, match=r"^seconds\[4\]: costs.seconds\[0\]\[0\]: must be from 0"):
        plan_sharded(problem, 4, seconds={4: -np.ones((4, 4))})


@pytest.mark.parametrize("shards", [0, True, 1.0, 513])
def test_a_device_is_a_number_of_devices(shards):
    with pytest.raises(InvalidInput, match="shards: must be a whole number from 1 to 512"):
        Device("d", shards=shards)


# ---- commands --------------------------------------------------------------------------------------------------------


def test_a_plan_of_groups_is_a_plan_like_any_other(run):
    problem = pipeline(memory=20.0, resident=[32.0, 0.0, 0.0, 8.0])
    save_problem(problem, "problem.json")
    told = run("plan", "problem.json", "--planner", "ideals", "--shards", "2")
    assert told.code == 0
    assert "| d0+d1  |" in told.out
    found = load_plan("plan.json")
    assert [device.shards for device in found.problem.cluster.devices] == [2, 2]
    assert found.digest == plan_sharded(problem, 2, "ideals").digest
    assert found.is_optimal
    for command in ("simulate", "check", "explain"):
        assert "d0+d1" in run(command, "plan.json").out
        assert run(command, "plan.json", "--json").code == 0
    assert run("report", "plan.json", "--out", "page.html").code == 0
    assert run("export", "plan.json", "--to", "trace", "--out", "trace.json").code == 0
    refused = run("export", "plan.json", "--to", "openvino")
    assert refused.code != 0
    assert refused.err.startswith("error: each op on d0+d1 is cut up among 2 devices, of which openvino cannot be told")
    path = Path("plan.json")
    edited = json.loads(path.read_text())
    edited["problem"]["cluster"]["devices"][0]["shards"] = 4
    path.write_text(json.dumps(edited))
    assert "problem.cluster was edited" in run("simulate", "plan.json").err


def test_commands_that_make_no_sense(run):
    save_problem(pipeline(), "problem.json")
    assert run("plan", "problem.json", "--uniform").err == "error: --uniform: this is for --shards\n"
    assert "shards: must be a whole number, 1 or more, found 0" in run("plan", "problem.json", "--shards", "0").err
