"""Replicas, samples in flight and recomputation: the simulator by hand and against its twin, and exact plans."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import reference
from oracles import brute_force
from placewise import plan
from placewise.cluster import Cluster, Link
from placewise.costs import Costs
from placewise.driver import Budget
from placewise.errors import InvalidInput, NoFeasiblePlan, Unsupported
from placewise.planners import ideals, stages
from placewise.problem import Execution
from placewise.report.explain import pipeline_loads
from placewise.report.table import device_table
from placewise.simulator import evaluate, simulate
from problems import problem_of, random_execution, random_placement, random_problem


def chain(seconds, devices, *, training=False, sizes=0.0, **options):
    """Layers one after another on equal devices; in training each has a backward op as long, on the same device."""
    n = len(seconds)
    edges, group, phase = [(i, i + 1) for i in range(n - 1)], None, 0
    if training:
        seconds, group, phase = [*seconds, *seconds], [*range(n), *range(n)], [0] * n + [1] * n
        edges += [(n - 1, 2 * n - 1)] + [(n + i + 1, n + i) for i in range(n - 1)] + [(i, n + i) for i in range(n - 1)]
        options["group"] = group
    settings = {"objective": "throughput", "contiguous": True, "phase": phase} | options
    return problem_of(np.repeat(np.array(seconds, float)[:, None], devices, axis=1), edges, sizes=sizes, **settings)


def several(rng, **execution):
    """A contiguous problem with some of everything, where devices are often alike."""
    given = replace(random_execution(rng, "throughput"), microbatches=int(rng.integers(1, 5)))
    if execution.get("in_flight"):
        given = replace(given, memory="live")
    problem = random_problem(
        rng, objective="throughput", execution=given, max_ops=6, max_devices=4, constrained=True, stored=0.1,
        integers=rng.random() < 0.5,
    )  # fmt: skip
    cluster, seconds = problem.cluster, problem.costs.seconds.copy()
    devices, names = list(cluster.devices), cluster.device_names
    for d in range(1, len(devices)):
        if not problem.pins and rng.random() < 0.7:
            devices[d] = replace(devices[0], name=names[d])
            seconds[:, d] = seconds[:, 0]
    bandwidth, latency = float(rng.choice([0.5, 1.0, 2.0, 8.0])), float(rng.integers(0, 2)) / 2
    links = tuple(Link(a, b, bandwidth, latency) for a in names for b in names if a != b)
    options = {"execution": replace(given, **execution), "contiguous": True, "forbidden": ()}
    try:
        return replace(problem, cluster=Cluster(devices, links), costs=Costs.create(seconds), **options)
    except InvalidInput:  # an op that no device can run any more
        return replace(problem, cluster=Cluster(cluster.devices, links), **options)


def known(problem):
    """The same with transfers whose costs ideals know exactly."""
    execution = replace(problem.execution, contention="none", staged=True)
    return replace(problem, execution=execution)


OPTIONS = {
    "replicate": {"replicate": True},
    "in flight": {"in_flight": "pipeline"},
    "recompute": {"in_flight": "pipeline", "recompute": True},
    "replicate, in flight": {"replicate": True, "in_flight": "pipeline"},
    "all": {"replicate": True, "in_flight": "pipeline", "recompute": True},
}


# ---- the simulator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", OPTIONS.values(), ids=OPTIONS)
def test_the_simulator_equals_its_twin(execution):
    spread = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        problem = several(rng, **execution) if seed % 2 else step(rng, **execution)
        found = random_placement(rng, problem)
        if rng.random() < 0.5 and problem.num_ops:  # leave devices over
            unit = np.isin(problem.unit, problem.unit[~problem.allowed[:, 0]])
            found[~unit] = 0
        result = evaluate(problem, found)
        plain = simulate(replace(problem, execution=replace(problem.execution, replicate=False)), found)
        try:
            value, peaks = reference.per_sample(problem, found)
        except RecursionError:  # no intervals, so that stages have no end
            assert not result.feasible[0]
            continue
        assert result.value[0] == pytest.approx(value, rel=1e-12), seed
        assert result.peak is not None
        assert any(result.peak[0] == pytest.approx(peak, rel=1e-12) for peak in peaks), seed
        spread += result.value[0] < plain.value
    assert (spread > 20) == ("replicate" in execution)


def test_two_devices_share_the_longer_layer():
    """Layers of 2 s and 1 s on three equal devices (PipeDream 2019, figure 8): 1 s per sample."""
    problem = chain([2.0, 1.0], 3, execution=Execution(replicate=True))
    assert simulate(problem, [0, 1]).value == 1.0
    assert simulate(problem, [0, 0]).value == 1.0  # all three have both layers
    assert simulate(replace(problem, max_devices=2), [0, 1]).value == 2.0
    assert simulate(replace(problem, execution=Execution()), [0, 1]).value == 2.0
    assert [load.replicas for load in pipeline_loads(simulate(problem, [0, 1]))] == [2, 1]
    assert "replicas" in device_table(simulate(problem, [0, 1]))


def test_transfers_are_shared_too_and_copies_overlap():
    """2 s of work, 3 s of sending on d0; 1 s of work, 3 s of receiving on d1. Two spare devices: one for each."""
    problem = chain([2.0, 1.0], 4, sizes=[3.0, 0.0], execution=Execution(replicate=True, contention="none"))
    assert simulate(problem, [0, 1]).value == 1.5
    added = replace(problem, execution=replace(problem.execution, overlap=False))
    assert simulate(added, [0, 1]).value == 2.5
    one_link = replace(problem, execution=replace(problem.execution, contention="channel"))
    assert simulate(one_link, [0, 1]).value == 3.0


def test_training_exchanges_gradients_once_a_step():
    """4 s of work and 6 bytes on two devices: 2 s, and 2 * 1/2 * 6 bytes at 2 bytes/s plus 2 latencies of 0.5 s."""
    settings = {"training": True, "resident": [6.0, 0.0], "bandwidth": 2.0, "latency": 0.5}
    problem = chain([2.0], 2, execution=Execution(replicate=True, microbatches=8), **settings)
    assert simulate(problem, [0, 0]).value == 2.0 + (3.0 + 1.0) / 8
    every_sample = replace(problem, execution=Execution(replicate=True))
    assert simulate(every_sample, [0, 0]).value == 4.0  # 6 s with a replica: it stays alone
    gpipe = replace(problem, execution=Execution(replicate=True, microbatches=8, pipeline="gpipe"))
    assert simulate(gpipe, [0, 0]).value == 1.0 + 1.0 + (3.0 + 1.0) / 8


def test_replicas_serve_the_phase_where_they_help_most():
    """Forward 6 and 4 s, backward 1 and 5 s, one spare: 4 + 5 if d0 gets it, 6 + 2.5 if d1 does."""
    problem = problem_of(
        np.repeat([[6.0], [4.0], [1.0], [5.0]], 3, axis=1), [(0, 1), (1, 3), (3, 2)], sizes=0.0, phase=[0, 0, 1, 1],
        objective="throughput", execution=Execution(pipeline="gpipe", replicate=True),
    )  # fmt: skip
    assert simulate(problem, [0, 1, 0, 1]).value == 6 + 2.5


def test_stages_hold_a_sample_for_each_stage_to_come():
    """Three layers, outputs of 8, 4 and 2 bytes that the backward reads; gradients take none."""
    problem = chain([1.0] * 3, 3, training=True, sizes=[8.0, 4.0, 2.0, 0.0, 0.0, 0.0])

    def peak(**execution):
        return simulate(replace(problem, execution=Execution(**execution)), [0, 1, 2, 0, 1, 2]).peak.tolist()

    assert peak() == [8, 8 + 4, 4 + 2]
    assert peak(in_flight="pipeline") == [3 * 8, 2 * (8 + 4), 4 + 2]
    assert peak(in_flight="pipeline", pipeline="gpipe", microbatches=5) == [5 * 8, 5 * (8 + 4), 5 * (4 + 2)]
    assert peak(in_flight="pipeline", memory="static") == [0, 0, 0]
    assert peak(in_flight="pipeline", recompute=True) == [8, 8 + 4 + 8, 4 + 2]


def test_replicas_keep_a_sample_each():
    """0.5 + 0.5 s, then 2 + 2 s on four of five devices: a sample a second, each of which a replica has for four."""
    problem = chain(
        [0.5, 2.0], 5, training=True, sizes=[10.0, 0.0, 0.0, 0.0], resident=[60.0, 60.0, 0.0, 0.0],
        execution=Execution(replicate=True, in_flight="pipeline", contention="none"), bandwidth=1e9,
    )  # fmt: skip

    def first(**execution):
        found = simulate(replace(problem, execution=replace(problem.execution, **execution)), [0, 1, 0, 1])
        return round(found.value, 6), found.peak[0]

    assert first() == (1.0, 60 + 5 * 10)
    assert first(microbatches=3) == (1.0, 60 + 3 * 10)
    assert first(microbatches=16, pipeline="gpipe") == (1.0, 60 + 16 * 10)
    # With the long layer first, its four replicas have the five samples among them, or the 16 of a step.
    turned = replace(problem, costs=Costs.create(problem.costs.seconds[[1, 0, 3, 2]]))
    for execution, samples in (({}, 2), ({"microbatches": 16, "pipeline": "gpipe"}, 4), ({"microbatches": 4}, 1)):
        found = simulate(replace(turned, execution=replace(turned.execution, **execution)), [0, 1, 0, 1])
        assert found.peak[0] == 60 + samples * 10, execution


def test_only_so_many_replicas_as_memory_has_room_for_samples():
    """The same: 100 bytes have room for four samples, so for three replicas to come; 90 for three of five in two."""
    problem = chain(
        [0.5, 2.0], 5, training=True, sizes=[10.0, 0.0, 0.0, 0.0], resident=[60.0, 60.0, 0.0, 0.0], bandwidth=1e9,
        execution=Execution(replicate=True, in_flight="pipeline", contention="none"),
    )  # fmt: skip
    names = problem.cluster.device_names
    for memory, replicas in ((110.0, [1, 4]), (100.0, [1, 3]), (90.0, [2, 3]), (80.0, [2, 2])):
        tight = replace(problem, cluster=problem.cluster.with_memory(dict.fromkeys(names, memory)))
        found = simulate(tight, [0, 1, 0, 1])
        assert found.value == pytest.approx(4 / replicas[1]), memory
        assert found.peak[0] == memory
        assert [load.replicas for load in pipeline_loads(found)] == replicas
        best = plan(tight, "ideals")
        assert best.value == pytest.approx(brute_force(tight)[0])
        assert best.lower_bound == pytest.approx(best.value, rel=2e-9)
    none = replace(problem, cluster=problem.cluster.with_memory(dict.fromkeys(names, 75.0)))
    assert simulate(none, [0, 1, 0, 1]).peak[0] == 60 + 5 * 10  # as fast as can be, but it does not fit


def test_replicas_for_the_memory_that_they_save():
    """A step of eight samples drains: 60 + 8 * 10 bytes on one device, 60 + 4 * 10 on each of two."""
    problem = chain(
        [1.0, 9.0], 3, training=True, sizes=[10.0, 0.0, 0.0, 0.0], resident=[60.0, 0.0, 0.0, 0.0], bandwidth=1e9,
        memory=105.0, execution=Execution(
            replicate=True, in_flight="pipeline", pipeline="gpipe", microbatches=8, contention="none",
        ),
    )  # fmt: skip
    found = simulate(problem, [0, 1, 0, 1])
    assert [found.value, found.peak[0]] == [pytest.approx(18.0), 60 + 4 * 10]
    assert max(load.replicas for load in pipeline_loads(found)) == 2


def test_what_is_computed_again_is_paid_again():
    problem = chain([1.0, 3.0], 2, training=True)
    again = replace(problem, execution=Execution(in_flight="pipeline", recompute=True))
    assert simulate(problem, [0, 1, 0, 1]).value == 6.0
    assert simulate(again, [0, 1, 0, 1]).value == 9.0


def test_settings_that_make_no_sense():
    with pytest.raises(InvalidInput, match="recompute: needs in_flight"):
        Execution(recompute=True)
    with pytest.raises(InvalidInput, match="must be contiguous"):
        chain([1.0], 2, contiguous=False, execution=Execution(in_flight="pipeline"))
    with pytest.raises(InvalidInput, match="in_flight: must be one of one, pipeline"):
        Execution(in_flight="two")
    with pytest.raises(InvalidInput, match="microbatches: must be a whole number"):
        Execution(microbatches=0)
    with pytest.raises(Unsupported, match="replicas"):
        plan(chain([1.0], 2, contiguous=False, execution=Execution(replicate=True)), "milp")


# ---- exact plans -----------------------------------------------------------------------------------------------------


def planned(problem, planner="ideals"):
    """(value, bound) or infinities where there is no plan."""
    try:
        found = plan(problem, planner, budget=Budget(seconds=60))
    except NoFeasiblePlan:
        return math.inf, math.inf
    assert found.stopped == "finished"
    return found.value, found.lower_bound


@pytest.mark.parametrize("trained", [False, True], ids=["any", "training"])
def test_the_best_replicas_with_proof(trained):
    some = spread = 0
    for seed in range(150):
        rng = np.random.default_rng(3000 + seed)
        problem = known(step(rng, replicate=True) if trained else several(rng, replicate=True))
        best = brute_force(problem)[0] if problem.num_ops else 0.0
        value, bound = planned(problem)
        assert value == pytest.approx(best, rel=1e-12), seed
        assert math.isinf(best) or bound >= value * (1 - 2e-9), seed
        some += math.isfinite(best)
        alone = replace(problem, execution=replace(problem.execution, replicate=False))
        spread += math.isfinite(best) and best < brute_force(alone)[0] if problem.num_ops else 0
    assert some > 100
    assert spread > 20


def step(rng, layers=4, *, branches=False, **execution):
    """Layers in a row, or with branches, each with a backward op; equal devices, whose memory is scarce."""
    n = int(rng.integers(2, layers + 1))
    edges = [(i, i + 1) for i in range(n - 1)]
    if branches:
        edges = [(i, j) for i in range(n) for j in range(i + 1, n) if rng.random() < 0.5]
    edges += [(n - 1, 2 * n - 1)] + [(n + j, n + i) for i, j in edges]
    edges += [(i, n + i) for i in range(n) if rng.random() < 0.7]
    devices = int(rng.integers(2, 5))
    speed = np.where(rng.random(devices) < 0.3, 2.0, 1.0)
    given = Execution(
        contention="none", staged=True, overlap=bool(rng.integers(2)), pipeline=str(rng.choice(["1f1b", "gpipe"])),
        microbatches=int(rng.integers(1, 5)), **execution,
    )  # fmt: skip
    return problem_of(
        rng.integers(1, 9, (2 * n, 1)) * speed, list(dict.fromkeys(edges)), phase=[0] * n + [1] * n,
        sizes=rng.integers(0, 5, 2 * n).astype(float), resident=rng.integers(0, 3, 2 * n).astype(float),
        group=[*range(n), *range(n)], memory=float(rng.choice([12.0, 20.0, 30.0, 60.0])), execution=given,
        bandwidth=float(rng.choice([0.5, 2.0, 8.0])), latency=float(rng.integers(0, 2)) / 4,
        objective="throughput", contiguous=True,
    )  # fmt: skip


@pytest.mark.parametrize("execution", list(OPTIONS.values())[1:], ids=list(OPTIONS)[1:])
def test_the_best_of_layers_in_a_row_with_samples_in_flight(execution):
    some = matters = 0
    for seed in range(150):
        problem = step(np.random.default_rng(seed), **execution)
        best = brute_force(problem)[0]
        value, bound = planned(problem)
        assert value == pytest.approx(best, rel=1e-12), seed
        assert math.isinf(best) or bound >= value * (1 - 2e-9), seed
        some += math.isfinite(best)
        one = replace(problem.execution, in_flight="one", recompute=False)
        matters += best > brute_force(replace(problem, execution=one))[0]
    assert some > 70
    assert matters > 10


def in_boxes(problem):
    """The same with devices two by two, and links four times as fast between the two."""
    cluster = problem.cluster
    box = {name: d // 2 for d, name in enumerate(cluster.device_names)}
    links = [replace(link, bandwidth=link.bandwidth * (4 if box[link.source] == box[link.target] else 1))
             for link in cluster.links]  # fmt: skip
    return replace(problem, cluster=Cluster(cluster.devices, tuple(links)))


@pytest.mark.parametrize("boxes", [False, True], ids=["", "in boxes"])
@pytest.mark.parametrize("execution", OPTIONS.values(), ids=OPTIONS)
def test_the_best_of_branches_with_proof_whatever_links_cost(execution, boxes, monkeypatch):
    """What stages are charged too little for, in time or in samples that they hold, is closed part by part."""
    some, divided, undercharged = 0, list[int](), ideals._undercharged
    monkeypatch.setattr(ideals, "_undercharged", lambda *given: (divided.append(seed), undercharged(*given))[1])
    for seed in range(150):
        rng = np.random.default_rng(seed)
        problem = several(rng, **execution) if seed % 3 == 0 else step(rng, branches=seed % 3 == 1, **execution)
        problem = in_boxes(problem) if boxes else problem
        best = brute_force(problem)[0] if problem.num_ops else 0.0
        value, bound = planned(problem)
        assert value == pytest.approx(best, rel=1e-12), seed
        assert math.isinf(best) or best * (1 + 1e-9) >= bound >= value * (1 - 2e-9), seed
        some += math.isfinite(best)
    assert some > 70
    assert divided or not boxes


def test_who_has_a_stage_in_a_part_may_be_repeated_by_all_that_are_alike():
    """Three equal devices, of which op0 must be on d0 and op1 not: two may repeat op0, and one op1."""
    problem = chain([4.0, 1.0], 3, sizes=0.0, execution=Execution(replicate=True, contention="none"))
    seconds = np.array([[4.0, math.inf, math.inf], [math.inf, 1.0, 1.0]])
    part = stages.stages_of_part(replace(problem, costs=Costs.create(seconds)), problem)
    assert part.kinds.devices == ((0,), (1, 2))
    assert (part.kinds.pool.tolist(), part.kinds.pools.tolist(), part.kinds.most.tolist()) == ([0, 0], [3], [3, 3])
    search = ideals.Search(part, 5.0, None)
    assert search.reach([1.9]) is None
    found = search.reach([2.0])
    assert found
    assert found[0] == pytest.approx(2.0, rel=1e-9)  # op0 on two of them
    assert ideals.Search(part, 5.0, None, most_devices=2).reach([3.9]) is None


def test_who_comes_after_a_stage_for_sure():
    """op0 before op1 and op2, which are beside each other: on three devices op0 holds samples for one more of them."""
    edges = [(0, 1), (0, 2), (4, 3), (5, 3), (1, 4), (2, 5), (0, 3)]
    problem = problem_of(
        np.where(np.tile(np.eye(3, dtype=bool), (2, 1)), 1.0, math.inf), edges, phase=[0] * 3 + [1] * 3,
        group=[*range(3)] * 2, objective="throughput", contiguous=True,
        execution=Execution(in_flight="pipeline", recompute=True),
    )  # fmt: skip
    assert ideals._after(stages.stages_of_part(problem, problem)).tolist() == [1, 0, 0]


@pytest.mark.parametrize("name", ["pipeline-dp", "ideals-linear", "local-search", "single"])
def test_no_planner_claims_a_bound_that_replicas_beat(name):
    for seed in range(20):
        problem = step(np.random.default_rng(seed), replicate=True)
        try:
            found = plan(problem, name, budget=Budget(evaluations=50))
        except NoFeasiblePlan:
            continue
        assert found.lower_bound <= brute_force(problem)[0] * (1 + 1e-9), seed
