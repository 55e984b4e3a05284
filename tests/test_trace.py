"""Traces: valid JSON that Perfetto reads, and the numbers of the timeline."""

import json
from collections import Counter

import numpy as np
import pytest

from placewise.cluster import Cluster, Device, Link
from placewise.costs import Costs
from placewise.graph import GraphBuilder
from placewise.plans import Plan
from placewise.problem import Execution, Problem
from placewise.report.trace import to_trace
from test_explain import SETTINGS, random_case


def a_plan(problem: Problem, placement: np.ndarray) -> Plan:
    return Plan(problem, np.asarray(placement, np.int32), None, 1.0, 0.5, "by hand", "0")


def events_of(plan: Plan, phase: str) -> list[dict]:
    return [event for event in json.loads(to_trace(plan))["traceEvents"] if event["ph"] == phase]


def fork_on_a_bus(execution: Execution = Execution()) -> Plan:  # noqa: B008 - frozen
    """`x` on a; `y` and `z` on b and c read it over one bus, 4 s per transfer; ops take 1 s."""
    build = GraphBuilder('a "model"\n')
    (x,) = build.op("x", kind="matmul", outputs=[4.0], op_modules="net.x")
    build.op("y", kind="op", inputs=[x])
    build.op("ζ\n", kind="op", inputs=[x])
    names = "abc"
    links = tuple(Link(s, t, 1.0, via=("bus", "root")) for s in names for t in names if s != t)
    cluster = Cluster(tuple(Device(n) for n in names), links)
    return a_plan(Problem(build.graph(), cluster, Costs.create(np.ones((3, 3))), execution=execution), [0, 1, 2])


def test_devices_are_processes_and_ops_are_slices():
    trace = json.loads(to_trace(fork_on_a_bus()))
    assert trace["otherData"]["model"] == 'a "model"\n'
    named = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert named == {0: "a", 1: "b", 2: "c", 3: "channels"}
    ops = {e["name"]: e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] < 3}
    assert (ops["x"]["ts"], ops["x"]["dur"], ops["x"]["pid"]) == (0.0, 1e6, 0)
    assert ops["x"]["args"] == {"kind": "matmul", "module": "net.x", "phase": "forward", "bytes": 4.0}
    assert {ops["y"]["ts"], ops["ζ\n"]["ts"]} == {5e6, 9e6}


def test_a_transfer_is_on_each_of_its_channels():
    moved = [e for e in events_of(fork_on_a_bus(), "X") if e["pid"] == 3]
    assert sorted((e["tid"], e["ts"], e["dur"]) for e in moved) == [
        (0, 1e6, 4e6), (0, 5e6, 4e6), (1, 1e6, 4e6), (1, 5e6, 4e6),
    ]  # fmt: skip
    threads = {e["tid"]: e["args"]["name"] for e in events_of(fork_on_a_bus(), "M") if e["name"] == "thread_name"}
    assert threads == {0: "bus", 1: "root"}


def test_arrows_lead_from_the_producer_over_the_transfer_to_the_reader():
    plan = fork_on_a_bus()
    arrows = [events_of(plan, phase) for phase in "stf"]
    for start, step, end in zip(*(sorted(found, key=lambda e: e["id"]) for found in arrows), strict=True):
        assert (start["pid"], step["pid"]) == (0, 3)
        assert end["pid"] in (1, 2)
        assert start["ts"] < step["ts"] < end["ts"]


def test_transfers_that_do_not_queue_get_a_thread_each():
    moved = [e for e in events_of(fork_on_a_bus(Execution(contention="none")), "X") if e["pid"] == 3]
    assert len({e["tid"] for e in moved}) == 4


@pytest.mark.parametrize("execution", SETTINGS, ids=lambda e: repr(e)[10:60])
def test_any_timeline_gives_a_sound_trace(execution: Execution):
    for seed in range(60):
        problem, placement = random_case(seed, execution)
        plan = a_plan(problem, placement)
        timeline = plan.timeline
        events = json.loads(to_trace(plan))["traceEvents"]
        assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
        slices = [e for e in events if e["ph"] == "X"]
        assert len([e for e in slices if e["pid"] < problem.num_devices]) == int((~problem.graph.is_stored).sum())
        assert max((e["ts"] + e["dur"] for e in slices), default=0.0) == pytest.approx(timeline.makespan * 1e6)

        lanes: dict[tuple[int, int], float] = {}
        for e in slices:  # by start: no two slices of one thread overlap
            lane = (e["pid"], e["tid"])
            assert lanes.get(lane, 0.0) <= e["ts"] + 1e-6
            lanes[lane] = e["ts"] + e["dur"]

        arrows = [e for e in events if e["ph"] in "stf"]
        assert Counter(e["ph"] for e in arrows)["s"] == len(timeline.transfers)
        for e in arrows:
            inside = [
                s
                for s in slices
                if (s["pid"], s["tid"]) == (e["pid"], e["tid"]) and s["ts"] <= e["ts"] <= s["ts"] + s["dur"]
            ]
            assert inside, "an arrow must touch a slice"

        if execution.memory == "live":
            for d in range(problem.num_devices):
                held = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == d]
                assert max(held) == pytest.approx(timeline.peak[d])


def test_an_empty_graph_has_a_trace():
    problem = Problem(GraphBuilder("none").graph(), Cluster((Device("a"),)), Costs.create(np.zeros((0, 1))))
    assert {e["ph"] for e in json.loads(to_trace(a_plan(problem, np.zeros(0))))["traceEvents"]} == {"M", "C"}
