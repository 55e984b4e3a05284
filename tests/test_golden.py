"""A file of each published format, small enough to be worked out by hand: what is read has the numbers that it should.

Loads and times are written as sums, in the unit of the file.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oracles import brute_force
from placewise import Problem, load_problem, plan
from placewise.graph import Ints
from placewise.importers import dnn_partitioning, instances
from placewise.simulator import evaluate, simulate, violations
from placewise.simulator.arrays import upward_rank
from placewise.simulator.throughput import throughput_loads

Pair = tuple[float, float]

# ---- dnn-partitioning: milliseconds ----------------------------------------------------------------------------------

TRAINING = """{
  "maxSizePerFPGA": 1000.0, "maxFPGAs": 2, "maxCPUs": 1,
  "nodes": [
    {"id": 1, "name": "a", "supportedOnFpga": 1, "fpgaLatency": 3.0, "cpuLatency": 30.0, "size": 400.0,
     "isBackwardNode": 0, "colorClass": 1},
    {"id": 2, "name": "b", "supportedOnFpga": 1, "fpgaLatency": 5.0, "cpuLatency": 50.0, "size": 500.0,
     "isBackwardNode": 0, "colorClass": 2},
    {"id": 3, "name": "c", "supportedOnFpga": 1, "fpgaLatency": 2.0, "cpuLatency": 20.0, "size": 300.0,
     "isBackwardNode": 0, "colorClass": 3},
    {"id": 4, "name": "loss", "supportedOnFpga": 0, "fpgaLatency": 1.0, "cpuLatency": 1.0, "size": 0.0,
     "isBackwardNode": 0},
    {"id": 13, "name": "c'", "supportedOnFpga": 1, "fpgaLatency": 4.0, "cpuLatency": 40.0, "size": 0.0,
     "isBackwardNode": 1, "colorClass": 3},
    {"id": 12, "name": "b'", "supportedOnFpga": 1, "fpgaLatency": 10.0, "cpuLatency": 100.0, "size": 0.0,
     "isBackwardNode": 1, "colorClass": 2},
    {"id": 11, "name": "a'", "supportedOnFpga": 1, "fpgaLatency": 6.0, "cpuLatency": 60.0, "size": 0.0,
     "isBackwardNode": 1, "colorClass": 1}
  ],
  "edges": [
    {"sourceId": 1, "destId": 2, "cost": 0.5}, {"sourceId": 1, "destId": 3, "cost": 0.5},
    {"sourceId": 2, "destId": 3, "cost": 0.25}, {"sourceId": 3, "destId": 4, "cost": 0.125},
    {"sourceId": 4, "destId": 13, "cost": 0.125}, {"sourceId": 13, "destId": 12, "cost": 0.25},
    {"sourceId": 12, "destId": 11, "cost": 0.5}
  ]
}"""


@pytest.fixture
def training(tmp_path: Path) -> Problem:
    """Three layers forward and back, the first of which skips to the third; the loss is for the CPU."""
    file = tmp_path / "training.json"
    file.write_text(TRAINING)
    return load_problem(file)


def split(problem: Problem, first: list[int], second: list[int] | None = None, cpu: list[int] | None = None) -> Ints:
    """Forward nodes by device, the loss on the CPU in any case; backward nodes follow their colours."""
    fpgas = [{"nodes": first}, {"nodes": second or []}]
    return dnn_partitioning.load_split({"fpgas": fpgas, "cpus": [{"nodes": [4, *(cpu or [])]}]}, problem)


@pytest.mark.parametrize(
    ("shares", "computed", "sent", "received"),
    [
        # b and c both read what a sends: it is received once where they share a device, and sent once in any case
        (([1], [2, 3]), (3 + 6, 5 + 2 + 4 + 10), (0.5, 0.125 + 0.5), (0.5, 0.5 + 0.125)),
        (([1], [2], [3]), (3 + 6, 5 + 10), (0.5, 0.25 + 0.5), (0.5, 0.5 + 0.25)),
        (([1, 2], [3]), (3 + 5 + 10 + 6, 2 + 4), (0.5 + 0.25, 0.125 + 0.25), (0.25, 0.5 + 0.25 + 0.125)),
        (([1, 3], [2]), (3 + 2 + 4 + 6, 5 + 10), (0.5 + 0.125 + 0.25, 0.25 + 0.5), (0.25 + 0.125 + 0.5, 0.5 + 0.25)),
    ],
)  # fmt: skip
def test_loads_of_a_pipeline(
    training: Problem, shares: tuple[list[int], ...], computed: Pair, sent: Pair, received: Pair
) -> None:
    placement = split(training, *shares)
    compute, transfer, _, _ = throughput_loads(training, placement[None])
    moved = [a + b for a, b in zip(sent, received, strict=True)]
    on_cpu = 1.0 + (20 + 40 if len(shares) == 3 else 0)
    assert compute[0].sum(axis=0) == pytest.approx(np.array([*computed, on_cpu]) * 1e-3)
    assert transfer[0].sum(axis=0) == pytest.approx(np.array([*moved, 0.0]) * 1e-3)
    busiest = max(computed[0] + moved[0], computed[1] + moved[1], on_cpu)
    assert simulate(training, placement).value == pytest.approx(busiest * 1e-3)
    assert violations(training, placement) == []


def test_the_best_pipeline(training: Problem) -> None:
    """The layers weigh 1200 together, so two accelerators share them: b apart, or, in one piece each, a apart."""
    assert violations(training, split(training, [1, 2, 3])) == ["fpga0 needs 1.17 KiB of memory and has 0.977 KiB"]
    assert brute_force(training)[0] == pytest.approx(16.75e-3)
    assert plan(training, "local-search").value == pytest.approx(16.75e-3)
    assert brute_force(replace(training, contiguous=True))[0] == pytest.approx(22.25e-3)


def test_the_phases_of_a_pipeline_one_after_the_other() -> None:
    """a and b on fpga0, busiest forward; c on fpga1, busiest backward once c' takes 40 ms."""
    data = json.loads(TRAINING.replace('"fpgaLatency": 4.0', '"fpgaLatency": 40.0'))
    together = dnn_partitioning.load(data, "training")
    placement = split(together, [1, 2], [3])
    assert evaluate(together, placement).value == pytest.approx([(2 + 40 + 1.25) * 1e-3])
    apart = replace(together, execution=replace(together.execution, pipeline="gpipe"))
    forward, backward = 3 + 5 + 0.5 + 0.25, 40 + 0.25
    assert evaluate(apart, placement).value == pytest.approx([(forward + backward) * 1e-3])


def test_latency_of_one_sample() -> None:
    """a and b on fpga0, c on fpga1: each crossing is paid for, and a's copy for c is there long before b's."""
    problem = dnn_partitioning.load(json.loads(TRAINING), "training", objective="latency")
    timeline = simulate(problem, split(problem, [1, 2], [3]))
    starts = [0, 3, 8 + 0.25, 10.25 + 0.125, 11.375 + 0.125, 15.5 + 0.25, 25.75]  # a, b, c, loss, c', b', a'
    assert timeline.start == pytest.approx(np.array(starts) * 1e-3)
    assert timeline.value == pytest.approx((25.75 + 6) * 1e-3)


# ---- placement-instance/1: microseconds ------------------------------------------------------------------------------

DIAMOND = """{
  "format": "placement-instance/1",
  "units": {"time": "us", "size": "bytes", "bandwidth": "bytes/us"},
  "devices": [{"name": "d0"}, {"name": "d1"}],
  "links": {"bandwidth": [[null, 100.0], [50.0, null]], "latency": [[0.0, 0.5], [1.0, 0.0]], "contention": "none"},
  "nodes": [
    {"name": "A", "times": [2.0, 3.0]}, {"name": "B", "times": [4.0, 2.0]},
    {"name": "C", "times": [3.0, 6.0]}, {"name": "D", "times": [1.0, 1.0]}
  ],
  "edges": [[0, 1, 100], [0, 2, 200], [1, 3, 50], [2, 3, 100]],
  "baselines": {"tool": {"HEFT": {
    "makespan": 7.5, "makespan_hashseed_0_3": null, "placement": [0, 1, 0, 1], "start": [0.0, 3.5, 2.0, 6.5]
  }}}
}"""


@pytest.fixture
def diamond(tmp_path: Path) -> Problem:
    """A before B and C, both before D. There are 100 bytes/us and 0.5 us from d0 to d1, half as much and 1 us back."""
    file = tmp_path / "diamond.json"
    file.write_text(DIAMOND)
    return load_problem(file)


@pytest.mark.parametrize(
    ("placement", "starts", "makespan"),
    [
        ([0, 0, 0, 0], [0, 2 + 3, 2, 9], 10),  # C has the longer way to go, so it goes before B
        ([0, 1, 0, 0], [0, 2 + 0.5 + 1, 2, 5.5 + 1 + 1], 8.5),  # B's output comes back the slow way
        ([0, 1, 0, 1], [0, 2 + 0.5 + 1, 2, 5 + 0.5 + 1], 7.5),
        ([1, 0, 1, 1], [0, 3 + 1 + 2, 3, 10 + 0.5 + 0.5], 12),
    ],
)
def test_times_of_an_instance(diamond: Problem, placement: list[int], starts: list[float], makespan: float) -> None:
    timeline = simulate(diamond, placement)
    assert timeline.start == pytest.approx(np.array(starts) * 1e-6)
    assert timeline.value == pytest.approx(makespan * 1e-6)


def test_a_stored_schedule_is_the_best_and_heft_finds_it(diamond: Problem) -> None:
    """Ranks are 14, 5.5, 7.75 and 1 us, with a mean of 0.75 us and 0.015 us per byte for a transfer."""
    stored = instances.load_baselines(json.loads(DIAMOND))["tool/HEFT"]
    assert upward_rank(diamond) == pytest.approx([14e-6, 5.5e-6, 7.75e-6, 1e-6])
    assert brute_force(diamond)[0] == pytest.approx(stored.makespan)
    found = plan(diamond, "heft")
    assert found.value == pytest.approx(stored.makespan)
    assert found.placement.tolist() == stored.placement.tolist()
    assert found.timeline.start == pytest.approx(stored.start)
