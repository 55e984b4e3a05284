"""What limits a plan: small cases by hand, and on random ones the chain must tile the run without a gap."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from placewise.cluster import Cluster, Device, Link, full_mesh
from placewise.costs import Costs
from placewise.graph import Graph, GraphBuilder
from placewise.problem import Execution, Problem
from placewise.report.explain import (
    Fullest,
    Moved,
    Run,
    critical_chain,
    explain,
    in_a_row,
    moves_of,
    occupied,
    pipeline_loads,
)
from placewise.report.table import BOUNDS
from placewise.simulator import simulate, violations
from placewise.simulator.arrays import priority_order


def a_problem(graph: Graph, seconds, cluster: Cluster, **settings) -> Problem:
    return Problem(graph, cluster, Costs.create(seconds), **settings)


def two_devices(**device) -> Cluster:
    return full_mesh([Device("a", **device), Device("b", **device)], bandwidth=1.0)


def test_a_chain_over_two_devices_is_compute_and_transfer():
    build = GraphBuilder("chain")
    (x,) = build.op("x", kind="op", outputs=[3.0], op_modules="net.0")
    build.op("y", kind="op", inputs=[x], op_modules="net.1")
    problem = a_problem(build.graph(), [[1, 1], [2, 2]], two_devices())
    chain = critical_chain(simulate(problem, [0, 1]))
    assert [(s.kind, s.where, s.start, s.finish, s.op) for s in chain] == [
        ("compute", "a", 0.0, 1.0, 0),
        ("transfer", "a->b", 1.0, 4.0, 0),
        ("compute", "b", 4.0, 6.0, 1),
    ]
    why = explain(simulate(problem, [0, 1]))
    assert why.by_kind == {"compute": 3.0, "transfer": 3.0, "waiting for device": 0.0, "waiting for channel": 0.0}
    assert list(why.by_module) == ["net.*"]
    assert why.verdict == (
        "Compute takes 50.0% of the critical path: b 33.3% and a 16.7%. The rest: transfers 50.0%. "
        "The busiest device is b, 33.3% of the run; the busiest channel is a->b, 50.0%."
    )
    assert why.runs == (Run("a", 1, "x", "x"), Run("b", 1, "y", "y"))
    assert why.transfers == (Moved("x", "y", "a->b", 3.0, 3.0),)
    assert [(s.first, s.last, s.seconds) for s in why.stretches] == [("x", "x", 1.0), ("x", "x", 3.0), ("y", "y", 2.0)]
    assert not why.loads


def test_runs_and_transfers_are_named():
    """Three ops here, two there, one here again; the first output is the largest that moves."""
    build = GraphBuilder("line")
    tensor = ()
    for i, size in enumerate([1.0, 1.0, 8.0, 1.0, 2.0, 0.0]):
        tensor = build.op(f"op{i}", kind="op", inputs=tensor, outputs=[size])
    cluster = full_mesh([Device("a", memory=100.0), Device("b", memory=10.0)], bandwidth=1.0)
    why = explain(simulate(a_problem(build.graph(), np.ones((6, 2)), cluster), [0, 0, 0, 1, 1, 0]))
    assert why.runs == (Run("a", 3, "op0", "op2"), Run("b", 2, "op3", "op4"), Run("a", 1, "op5", "op5"))
    assert [(moved.tensor, moved.reader, moved.bytes) for moved in why.transfers] == [
        ("op2", "op3", 8.0),
        ("op4", "op5", 2.0),
    ]
    assert why.verdict.startswith("Transfers take 62.5% of the critical path: ")


def test_a_contiguous_plan_is_told_stage_by_stage():
    """Two branches: by the order of ops, the second device comes in between; training goes back through the stages."""
    build = GraphBuilder("branches")
    (x,) = build.op("x", kind="op", outputs=[1.0])
    ends = []
    for i in "12":
        (a,) = build.op(f"a{i}", kind="op", inputs=[x], outputs=[1.0])
        ends += build.op(f"b{i}", kind="op", inputs=[a], outputs=[1.0])
    (back,) = build.op("back-b", kind="op", inputs=ends, outputs=[1.0], phase=1)
    build.op("back-a", kind="op", inputs=[back], phase=1)
    places = [1, 1, 0, 1, 0, 0, 1]
    problem = a_problem(build.graph(), np.ones((7, 2)), two_devices(), objective="throughput")
    assert len(explain(simulate(problem, places)).runs) > 3
    runs = explain(simulate(replace(problem, contiguous=True), places)).runs
    assert runs == (Run("b", 3, "x", "a2"), Run("a", 3, "b1", "back-b"), Run("b", 1, "back-a", "back-a"))


def test_shares_are_of_the_run_or_of_the_time_per_sample():
    """Two stages of 1 s and 2 s, and 3 s between them, as one run and in a pipeline; then dealt out to replicas."""
    build = GraphBuilder("chain")
    (x,) = build.op("x", kind="op", outputs=[3.0])
    build.op("y", kind="op", inputs=[x])
    problem = a_problem(build.graph(), [[1.0] * 4, [2.0] * 4], full_mesh([Device(n) for n in "abcd"], bandwidth=1.0))
    shared = Execution(replicate=True)
    for settings, busy, whole in (
        ({}, [1, 2, 0, 0], 6),
        ({"objective": "throughput"}, [1, 2, 0, 0], 3),
        ({"objective": "throughput", "execution": shared}, [1, 2, 0, 0], 3),
    ):
        seconds, channels, of = occupied(simulate(replace(problem, **settings), [0, 1]))
        assert seconds.tolist() == busy
        assert (channels.max(), of) == (3, whole)
    alone = simulate(replace(problem, objective="throughput", execution=shared), [0, 0])
    assert [part.tolist() if np.ndim(part) else part for part in occupied(alone)[::2]] == [[0.75, 0, 0, 0], 0.75]


def test_a_wait_for_the_device_names_who_had_it():
    graph = Graph.create(op_names=["first", "second"])
    chain = critical_chain(simulate(a_problem(graph, [[5], [1]], full_mesh([Device("a")])), [0, 0]))
    # Equal claims: the longer op has the higher priority, so the shorter one waits.
    assert [(s.kind, s.seconds, s.op, s.behind) for s in chain] == [
        ("waiting for device", 5.0, 1, 0),
        ("compute", 1.0, 1, None),
    ]


def test_a_wait_for_the_channel_names_who_had_it():
    """Two producers finish together; their outputs share the bus, so one waits for the other."""
    build = GraphBuilder("bus")
    (x,) = build.op("x", kind="op", outputs=[4.0])
    (y,) = build.op("y", kind="op", outputs=[4.0])
    build.op("z", kind="op", inputs=[x, y])
    names = "abc"
    links = tuple(Link(s, t, 1.0, via=("bus",)) for s in names for t in names if s != t)
    cluster = Cluster(tuple(Device(n) for n in names), links)
    timeline = simulate(a_problem(build.graph(), np.ones((3, 3)), cluster), [0, 1, 2])
    chain = critical_chain(timeline)
    assert [(s.kind, s.seconds) for s in chain] == [
        ("compute", 1.0),
        ("waiting for channel", 4.0),
        ("transfer", 4.0),
        ("compute", 1.0),
    ]
    wait = chain[1]
    assert {wait.op, wait.behind} == {0, 1}


def test_a_streamed_parameter_waits_for_room_to_be_fetched():
    """Four layers stream their weights, one ahead: each fetch begins when the layer before the last is done."""
    build = GraphBuilder("offload")
    (x,) = build.op("x", kind="input", outputs=[0.0])
    for i in range(4):
        (weight,) = build.op(f"w{i}", kind="parameter", outputs=[10.0])
        (x,) = build.op(f"layer{i}", kind="op", inputs=[x, weight], outputs=[0.0])
    graph = build.graph()
    seconds = np.where(np.array(graph.op_kinds) == "op", 1.0, 0.0)[:, None] * np.ones((1, 2))
    problem = a_problem(graph, seconds, two_devices(), execution=Execution(prefetch=1))
    placement = graph.is_stored.astype(np.int32)
    timeline = simulate(problem, placement)
    assert timeline.value == 44.0
    assert [s.kind for s in critical_chain(timeline)] == ["transfer", "compute"] * 4


SETTINGS = [
    Execution(),
    Execution(contention="none"),
    Execution(sends="edge"),
    Execution(concurrency="sequential"),
    Execution(prefetch=1),
    Execution(memory="static"),
]


def random_case(seed: int, execution: Execution, objective: str = "latency") -> tuple[Problem, np.ndarray]:
    rng = np.random.default_rng(seed)
    ops, devices = int(rng.integers(1, 25)), int(rng.integers(1, 4))
    build = GraphBuilder("random")
    tensors = []
    stored = []
    for i in range(ops):
        is_stored = rng.random() < 0.2
        readable = [t for t in tensors if rng.random() < 0.2]
        outputs = rng.integers(0, 9, int(rng.integers(1, 3))).astype(float)
        kind = "parameter" if is_stored else "op"
        tensors += build.op(
            f"op{i}", kind=kind, inputs=[] if is_stored else readable, outputs=list(outputs),
            op_modules=f"layer.{i % 5}.{'ab'[i % 2]}", phase=int(objective == "throughput" and i > ops / 2),
        )  # fmt: skip
        stored.append(is_stored)
    names = [f"d{d}" for d in range(devices)]
    links = [
        Link(s, t, float(rng.integers(1, 4)), float(rng.integers(0, 2)), ("bus",) if rng.random() < 0.5 else ())
        for s in names
        for t in names
        if s != t
    ]
    seconds = rng.integers(0, 5, (ops, devices)) * ~np.array(stored)[:, None]
    cluster = Cluster(tuple(Device(n) for n in names), tuple(links))
    problem = a_problem(build.graph(), seconds, cluster, execution=execution, objective=objective)
    return problem, rng.integers(0, devices, ops).astype(np.int32)


@pytest.mark.parametrize("execution", SETTINGS, ids=lambda e: repr(e)[10:60])
@pytest.mark.parametrize("strict", [False, True])
def test_the_chain_tiles_the_run(execution: Execution, strict: bool):
    for seed in range(200):
        problem, placement = random_case(seed, execution)
        timeline = simulate(problem, placement, priority_order(problem) if strict else None)
        chain = critical_chain(timeline)
        times = [0.0, *(step.finish for step in chain)]
        assert times[:-1] == [step.start for step in chain], f"seed {seed}"
        assert times[-1] == timeline.makespan, f"seed {seed}"
        assert all(step.behind is not None for step in chain if step.kind.startswith("waiting")), (
            f"seed {seed}: a wait for nobody"
        )


@pytest.mark.parametrize("execution", SETTINGS, ids=lambda e: repr(e)[10:60])
def test_a_wait_is_for_who_was_there_until_its_end(execution: Execution):
    """Of the device: among those that left it just then, one that came first. Of a channel: one that shares it."""
    waits = 0
    for seed in range(100):
        problem, placement = random_case(seed, execution)
        timeline = simulate(problem, placement)
        moving, channels = timeline.transfers, problem.cluster.channels_of
        ends = list(zip(moving.source.tolist(), moving.target.tolist(), strict=True))
        for step in critical_chain(timeline):
            if step.kind == "waiting for device":
                left = (placement == placement[step.op]) & (timeline.finish == step.finish)
                left[step.op] = False
                assert left[step.behind], f"seed {seed}"
                assert timeline.start[step.behind] == timeline.start[left].min(), f"seed {seed}"
            elif step.kind == "waiting for channel":
                source, target = map(problem.cluster.device_names.index, step.where.split("->"))
                assert any(
                    problem.graph.tensor_producer[moving.tensor[i]] == step.behind
                    and set(channels[ends[i]]) & set(channels[source, target])
                    for i in np.flatnonzero(moving.finish == step.finish)
                ), f"seed {seed}"
            else:
                continue
            waits += 1
    assert waits > 0 or execution.concurrency == "sequential"


def test_sums_agree_with_the_chain():
    problem, placement = random_case(3, Execution())
    timeline = simulate(problem, placement)
    why = explain(timeline)
    assert sum(why.by_kind.values()) == pytest.approx(timeline.makespan)
    assert sum(sum(split.values()) for split in why.by_module.values()) == pytest.approx(timeline.makespan)
    assert sum(s.seconds for s in why.stretches) == pytest.approx(timeline.makespan)
    assert sum(s.steps for s in why.stretches) == len(why.chain)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe"])
def test_the_load_that_sets_the_pace_is_the_value(overlap: bool, pipeline: str):
    for seed in range(50):
        problem, placement = random_case(seed, Execution(overlap=overlap, pipeline=pipeline), "throughput")
        timeline = simulate(problem, placement)
        pace = [load for load in pipeline_loads(timeline) if load.sets_pace]
        distinct = {load.where.partition(" ")[2]: load.total for load in pace}
        assert sum(distinct.values()) == pytest.approx(timeline.value), f"seed {seed}"


def test_a_pipeline_is_explained_by_loads_alone():
    problem, placement = random_case(7, Execution(), "throughput")
    why = explain(simulate(problem, placement))
    assert why.loads
    assert not why.chain
    assert not why.by_module


def test_moves_are_simulated_with_the_whole_unit():
    build = GraphBuilder("unit")
    (x,) = build.op("x", kind="op", outputs=[3.0], group=0)
    build.op("y", kind="op", inputs=[x], group=0)
    problem = a_problem(build.graph(), [[1, 4], [2, 4]], two_devices())
    here, there = moves_of(simulate(problem, [0, 0]), 1)
    assert (here.device, here.value, here.is_current, here.ops) == ("a", 3.0, True, 2)
    assert (there.device, there.value, there.is_current, there.problem) == ("b", 8.0, False, "")


def test_a_move_that_breaks_a_constraint_says_which():
    graph = Graph.create(op_names=["x", "y"], resident=[6.0, 6.0])
    problem = a_problem(graph, [[1, 1], [1, 1]], two_devices(memory=10.0), pins={"x": "a"})
    timeline = simulate(problem, [0, 1])
    crowded, current = moves_of(timeline, 1)
    assert crowded.value is None
    assert crowded.problem == violations(problem, [0, 0])[0]
    assert current.value == 1.0
    assert "may not run on b" in moves_of(timeline, 0)[1].problem


def test_a_full_memory_is_told():
    graph = Graph.create(op_names=["x", "y"], resident=[6.0, 6.0])
    why = explain(simulate(a_problem(graph, np.ones((2, 2)), two_devices(memory=12.0)), [0, 0]))
    assert why.verdict.endswith("The memory of a is full: 0 B left of 12 B. Weights take 12 B.")
    why = explain(simulate(a_problem(graph, np.ones((2, 2)), two_devices(memory=6.0)), [0, 1]))
    assert why.verdict.endswith("The memory of a and b is full. Weights take 6 B of a's 6 B.")


def test_what_fills_a_memory_is_told():
    """Two weights of 2 B; `big` holds its input of 4 B, its output of 8 B and 3 B to work in."""
    build = GraphBuilder("line")
    (x,) = build.op("x", kind="op", outputs=[4.0], resident=2.0)
    (y,) = build.op("big", kind="op", inputs=[x], outputs=[8.0], scratch=3.0, resident=2.0)
    build.op("y", kind="op", inputs=[y], outputs=[1.0])
    problem = a_problem(build.graph(), np.ones((3, 2)), full_mesh([Device("a", memory=40.0), Device("b")], 1.0))
    why = explain(simulate(problem, [0, 0, 0]))
    assert why.fullest == Fullest("a", 40.0, 19.0, 4.0, "big")
    assert "full" not in why.verdict
    tight = explain(simulate(replace(problem, cluster=two_devices(memory=19.0)), [0, 0, 0]))
    assert tight.verdict.endswith("Weights take 4 B and tensors up to 15 B, during big.")
    assert explain(simulate(replace(problem, cluster=two_devices()), [0, 0, 0])).fullest is None


def test_what_sets_the_pace_is_told():
    """Two stages of 3 s in equal halves, and one of 2 s; layers of one kind are added up."""
    build = GraphBuilder("net")
    tensor = ()
    for i in range(8):
        kind = "mlp" if i % 2 else "attention"
        tensor = build.op(f"op{i}", kind="op", inputs=tensor, outputs=[0.0], op_modules=f"layers.{i // 2}.{kind}")
    problem = a_problem(
        build.graph(), np.array([[1, 1, 1]] * 8), full_mesh([Device(n) for n in "abc"], 1.0), objective="throughput"
    )
    why = explain(simulate(problem, [0, 0, 0, 1, 1, 1, 2, 2]))
    assert [load.where for load in why.loads if load.sets_pace] == ["a", "b"]
    assert why.pace_modules == {"layers.*.attention": 2.0, "layers.*.mlp": 1.0}
    assert why.verdict == (
        "a and b set the pace, mostly by computing; next comes c, with 2.00 s, 33.3% less. "
        "Most time on a goes to layers.*.attention (2.00 s) and layers.*.mlp (1.00 s)."
    )
    replicated = replace(problem, execution=Execution(replicate=True))
    alone = explain(simulate(replicated, [0] * 8))
    assert sum(alone.pace_modules.values()) == pytest.approx(simulate(replicated, [0] * 8).value)


@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe"])
def test_modules_of_the_pace_add_up_to_its_work(pipeline: str):
    for seed in range(30):
        problem, placement = random_case(seed, Execution(pipeline=pipeline), "throughput")
        timeline = simulate(problem, placement)
        why = explain(timeline)
        pace = next(load for load in why.loads if load.sets_pace)
        device = pace.where.split()[0] in problem.cluster.device_names
        spent = (pace.compute if device else pace.transfer) / pace.replicas
        assert sum(why.pace_modules.values()) == pytest.approx(spent), f"seed {seed}"


def test_a_chain_over_many_places_is_told_by_what_it_does():
    """Twenty ops on a device each: each transfer takes 4 s, each op 1 s; none of them alone says much."""
    build = GraphBuilder("line")
    tensor = ()
    for i in range(20):
        tensor = build.op(f"op{i}", kind="op", inputs=tensor, outputs=[4.0])
    problem = a_problem(build.graph(), np.ones((20, 20)), full_mesh([Device(f"d{i}") for i in range(20)], 1.0))
    assert explain(simulate(problem, range(20))).verdict.startswith(
        "Transfers take 79.2% of the critical path: d0->d1 4.2%, d1->d2 4.2%, d2->d3 4.2% and 16 others. "
        "The rest: compute 20.8%. "
    )


def test_waits_name_what_is_waited_for():
    """Of three ops on `a`, the last waits for two of other modules; then two outputs share a bus, not the way to it."""
    build = GraphBuilder("waits")
    build.op("long", kind="op", op_modules="net.big")
    build.op("short", kind="op", op_modules="net.small")
    (x,) = build.op("x", kind="op", outputs=[4.0], op_modules="net.tiny")
    build.op("y", kind="op", inputs=[x], op_modules="net.end")
    links = tuple(Link(s, t, 1.0, via=(f"{s} out", "bus")) for s in "abc" for t in "abc" if s != t)
    cluster = Cluster(tuple(Device(n) for n in "abc"), links)
    seconds = np.array([5, 3, 1, 1, 1, 1])[:, None] * np.ones((1, 3))
    why = explain(simulate(a_problem(build.graph(), seconds[:4], cluster), [0, 0, 0, 1], range(4)))
    assert why.waited_for == {"net.big": 5.0, "net.small": 3.0}
    waits = {module: split["waiting for device"] for module, split in why.by_module.items()}
    assert waits == {"net.big": 5.0, "net.small": 3.0, "net.tiny": 0.0, "net.end": 0.0}  # theirs, not the waiter's
    assert why.verdict.startswith(
        "Waits take 57.1% of the critical path, all for a. It is held up by net.big 62.5% and net.small 37.5%. "
        "The rest: compute 14.3% and transfers 28.6%. "
    )
    build.op("z", kind="op", inputs=build.op("w", kind="op", outputs=[40.0], op_modules="net.wide"))
    why = explain(simulate(a_problem(build.graph(), seconds, cluster), [1, 1, 0, 1, 2, 1], [4, 2, 0, 1, 5, 3]))
    assert why.waited_for == {"net.wide": 40.0}  # from c, over the bus, while what is on a has its own way out
    assert "all for bus. It is held up by net.wide. " in why.verdict


def test_a_device_that_keeps_the_order_may_have_nothing_to_do():
    """`late` comes before `ready` in the order, and its input arrives after 10 s."""
    build = GraphBuilder("order")
    (x,) = build.op("x", kind="op", outputs=[9.0])
    build.op("late", kind="op", inputs=[x])
    build.op("ready", kind="op")
    problem = a_problem(build.graph(), [[1, 1], [1, 1], [5, 5]], two_devices())
    why = explain(simulate(problem, [0, 1, 1], [0, 1, 2]))
    assert why.verdict.startswith("Waits take 68.8% of the critical path, all for b. ")
    assert "For 62.5% the device is idle: its next op in the order waits, too. The rest: compute 31.3%. " in why.verdict


def test_what_is_waited_for_is_as_long_as_the_waits():
    for seed in range(100):
        problem, placement = random_case(seed, Execution())
        why = explain(simulate(problem, placement))
        waits = why.by_kind["waiting for device"] + why.by_kind["waiting for channel"]
        assert sum(why.waited_for.values()) == pytest.approx(waits), f"seed {seed}"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (
            [1.0, 0.9995, 0.6, 0.5],
            "d0 sets the pace, mostly by computing; d1 is within 0.1% of it; next comes d2, with 600 ms, ",
        ),
        (
            [1.0, 0.9995, 0.998, 0.999],
            "d0 sets the pace, mostly by computing; d1 to d3 are within 0.2% of it, so the load is balanced.",
        ),
        ([1.0, 1.0, 1.0, 1.0], "d0 to d3 set the pace, mostly by computing."),
    ],
)
def test_level_loads_are_balanced(seconds, said):
    graph = Graph.create(op_names=list("wxyz"))
    cluster = full_mesh([Device(f"d{i}") for i in range(4)])
    problem = a_problem(graph, np.array(seconds)[:, None] * np.ones((1, 4)), cluster, objective="throughput")
    assert explain(simulate(problem, range(4))).verdict.startswith(said)


def test_a_channel_with_little_to_do_upsets_no_balance():
    build = GraphBuilder("pair")
    build.op("y", kind="op", inputs=build.op("x", kind="op", outputs=[0.1]))
    bus = tuple(Link(s, t, 1.0, via=("bus",)) for s in "ab" for t in "ab" if s != t)
    cluster = Cluster((Device("a"), Device("b")), bus)
    problem = a_problem(build.graph(), [[1, 1], [0.99, 0.99]], cluster, objective="throughput")
    why = explain(simulate(problem, [0, 1]))
    assert [load.where for load in why.loads] == ["a", "b", "bus"]
    assert why.verdict == "a sets the pace, mostly by computing; b is within 1.0% of it, so the load is balanced."


def test_names_that_count_up_are_one():
    assert in_a_row([*(f"gpu{i}" for i in range(8)), "cpu"]) == "gpu0 to gpu7 and cpu"
    assert in_a_row(["gpu0", "gpu1", "gpu3"]) == "gpu0, gpu1 and gpu3"
    assert in_a_row(["gpu7 forward", "gpu8 forward"]) == "gpu7 forward and gpu8 forward"


def test_many_names_in_a_row():
    assert [in_a_row(list("abcdef")[:n]) for n in (1, 2, 4, 6)] == [
        "a",
        "a and b",
        "a, b, c and d",
        "a, b, c and 3 others",
    ]


def test_modules_unfold_until_none_has_nearly_all():
    """Thirty blocks within one module are more rows than fit, but the one module says nothing."""
    build = GraphBuilder("deep")
    tensor = ()
    for i in range(30):
        tensor = build.op(f"op{i}", kind="op", inputs=tensor, outputs=[1.0], op_modules=f"model.block{i}x.mul")
    build.op("head", kind="op", inputs=tensor, op_modules="head")
    timeline = simulate(a_problem(build.graph(), np.ones((31, 1)), full_mesh([Device("a")])), [0] * 31)
    assert list(explain(timeline).by_module)[:2] == ["model.block0x", "model.block1x"]


def test_nothing_to_do():
    problem = a_problem(Graph.create(op_names=[]), np.zeros((0, 2)), two_devices())
    why = explain(simulate(problem, np.zeros(0, np.int32)))
    assert why.chain == ()
    assert sum(why.by_kind.values()) == 0


def test_each_bound_is_explained():
    """In a few words below the table, and in the docs."""
    text = (Path(__file__).parent.parent / "docs/execution-model.md").read_text().split("## Lower bounds")[1]
    named = {name.lower() for name in re.findall(r"\*([a-z ]+)\*", text)}
    assert set(BOUNDS) == named
    assert all(len(f"{name}: {words}") <= 80 for name, words in BOUNDS.items())
