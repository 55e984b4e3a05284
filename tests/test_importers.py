"""Readers of published files: what they hold is checked, and published numbers come out again.

The published files are not part of the project. Set PLACEWISE_DATA to the folder that holds `dnn-partitioning/` (from
github.com/msr-fiddle/dnn-partitioning) and `instances/`; without it the tests that need them are skipped.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placewise.errors import InvalidInput
from placewise.importers import dnn_partitioning, instances
from placewise.problem import Problem
from placewise.simulator import evaluate, simulate

LAYERS = "dnn-partitioning/throughput-inputs/LayerGraphs"
OPERATORS = "dnn-partitioning/throughput-inputs/OperatorGraphs"
INSTANCES = (
    "dnn-inception-d4", "dnn-transformer-d4", "layered-n100-d4", "layered-n1000-d4", "layered-n1000-d8",
    "layered-n1000-d8-ccr0.1", "layered-n5000-d8", "narrow-n1000-d8",
)  # fmt: skip


def published(path: str) -> Any:
    root = os.environ.get("PLACEWISE_DATA")
    if not root:
        pytest.skip("PLACEWISE_DATA is not set")
    file = Path(root) / path
    if not file.is_file():
        pytest.skip(f"PLACEWISE_DATA has no {path}")
    return json.loads(file.read_text())


def layer_graph(name: str, **options: Any) -> Problem:
    return dnn_partitioning.load(published(f"{LAYERS}/{name}.json"), name, **options)


# ---- dnn-partitioning ----------------------------------------------------------------------------------------------


def small_input() -> dict[str, Any]:
    """Two layers forward and back, with sparse ids; costs imply 2 MB per ms."""
    times = {"supportedOnFpga": 1, "cpuLatency": 10.0, "fpgaLatency": 1.0}
    return {
        "maxSizePerFPGA": 1000.0,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "nodes": [
            {"id": 7, "name": "a", "size": 600.0, "colorClass": 70, **times},
            {"id": 3, "name": "b:c", "size": 500.0, "colorClass": -5, **times},
            {"id": 9, "isBackwardNode": True, "colorClass": -5, **times},
            {"id": 1, "isBackwardNode": 1, "colorClass": 70, **times, "supportedOnFpga": True},
            {"id": 2, **times, "supportedOnFpga": False},
        ],
        "edges": [
            {"sourceId": 7, "destId": 3, "cost": 0.25, "size": 5e5},
            {"sourceId": 7, "destId": 1, "cost": 0.25, "size": 99e5},
            {"sourceId": 3, "destId": 9, "cost": 0.5, "size": 1e6},
            {"sourceId": 9, "destId": 1, "cost": 0.125, "size": 25e4},
        ],
    }


def test_fields_become_graph_cluster_and_costs() -> None:
    problem = dnn_partitioning.load(small_input(), "small")
    graph, cluster = problem.graph, problem.cluster
    assert graph.op_names == ("7:a", "3:b:c", "9", "1", "2")
    assert graph.group.tolist() == [0, 1, 1, 0, -1]
    assert graph.phase.tolist() == [0, 0, 1, 1, 0]
    assert graph.resident.tolist() == [600, 500, 0, 0, 0]
    assert [device.name for device in cluster.devices] == ["fpga0", "fpga1", "cpu0"]
    assert cluster.memory.tolist() == [1000, 1000, math.inf]
    assert problem.seconds[0] == pytest.approx([1e-3, 1e-3, 10e-3])
    assert problem.seconds[4] == pytest.approx([math.inf, math.inf, 10e-3])
    assert graph.tensor_producer.tolist() == [0, 1, 2]
    assert graph.tensor_bytes * cluster.seconds_per_byte[0, 1] == pytest.approx([0.25e-3, 0.5e-3, 0.125e-3], rel=1e-15)
    assert cluster.links[0].bandwidth == pytest.approx(2e9)
    assert (problem.objective, problem.contiguous) == ("throughput", False)
    assert dnn_partitioning.load(small_input(), "small", objective="latency").objective == "latency"


def test_bandwidth_is_nominal_where_edges_have_no_size() -> None:
    data = small_input()
    for edge in data["edges"]:
        del edge["size"]
    problem = dnn_partitioning.load(data, "small")
    assert problem.cluster.links[0].bandwidth == 2**31
    assert problem.graph.tensor_bytes[0] == pytest.approx(0.25e-3 * 2**31)


def test_transfer_scale_makes_links_slower_and_leaves_sizes() -> None:
    plain, scaled = (dnn_partitioning.load(small_input(), "small", transfer_scale=scale) for scale in (1.0, 1000.0))
    assert scaled.graph.tensor_bytes == pytest.approx(plain.graph.tensor_bytes)
    assert scaled.cluster.seconds_per_byte == pytest.approx(plain.cluster.seconds_per_byte * 1000)
    with pytest.raises(InvalidInput, match="transfer_scale"):
        dnn_partitioning.load(small_input(), "small", transfer_scale=math.nan)


def test_transfers_are_charged_once_per_producer_and_to_accelerators_only() -> None:
    data = small_input() | {"maxCPUs": 2}
    for node in data["nodes"]:
        node["cpuLatency"] = 0.0
    problem = dnn_partitioning.load(data, "small")
    assert problem.cluster.seconds_per_byte[2, 3] == 0
    # In ms: fpga0 computes 2, sends 0.25 and receives 0.125, whoever is at the other end.
    assert evaluate(problem, [[0, 2, 2, 0, 3], [0, 1, 1, 0, 3]]).value == pytest.approx([2.375e-3, 2.375e-3])
    # Two ops on fpga1 read what op 7 sends, once.
    assert evaluate(problem, [0, 1, 1, 1, 3]).value == pytest.approx([3.25e-3])


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("nodes", 3, "fpgaLatency"), math.nan, r"nodes\[3\]\.fpgaLatency: must be finite"),
        (("nodes", 3, "fpgaLatency"), math.inf, r"nodes\[3\]\.fpgaLatency: must be finite"),
        (("nodes", 3, "fpgaLatency"), -1.0, r"nodes\[3\]\.fpgaLatency: must be 0 or more, found -1\.0"),
        (("nodes", 3, "fpgaLatency"), "1", r"nodes\[3\]\.fpgaLatency: must be a number"),
        (("nodes", 3, "fpgaLatency"), True, r"nodes\[3\]\.fpgaLatency: must be a number"),
        (("nodes", 1, "supportedOnFpga"), 2, r"nodes\[1\]\.supportedOnFpga: must be true or false"),
        (("nodes", 1, "supportedOnFpga"), "yes", r"nodes\[1\]\.supportedOnFpga: must be true or false"),
        (("nodes", 1, "colorClass"), 1.5, r"nodes\[1\]\.colorClass: must be a whole number"),
        (("nodes", 1, "id"), 7, r"nodes\[1\]\.id: nodes\[0\] has the same id, 7"),
        (("nodes", 1, "size"), -1, r"nodes\[1\]\.size: must be 0 or more"),
        (("nodes", 1), None, r"nodes\[1\]: must be an object"),
        (("nodes",), {}, r"nodes: must be a list"),
        (("edges", 2, "destId"), 99, r"edges\[2\]\.destId: no node has the id 99"),
        (("edges", 2, "sourceId"), "7", r"edges\[2\]\.sourceId: must be a whole number"),
        (("edges", 1, "cost"), 0.3, r"edges\[1\]\.cost: must be 0\.25, as on another edge out of node 7, found 0\.3"),
        (("edges", 1, "cost"), 10**400, r"edges\[1\]\.cost"),
        (("maxFPGAs",), 10**9, r"maxFPGAs: must be at most 512, found 1000000000"),
        (("maxFPGAs",), 512, r"devices: must be at most 512, found 513"),
        (("nodes", 3, "fpgaLatency"), 1e300, r"nodes\[3\]\.fpgaLatency: must be at most 1e\+24, found 1e\+300"),
        (("maxFPGAs",), -1, r"maxFPGAs: must be 0 or more"),
        (("maxSizePerFPGA",), math.nan, r"maxSizePerFPGA: must be finite"),
        (("edges", 3, "destId"), 3, r"cycle"),
    ],
)
def test_a_wrong_field_is_named(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        dnn_partitioning.load(changed(small_input(), path, value), "small")


@pytest.mark.parametrize("key", ["maxSizePerFPGA", "maxFPGAs", "maxCPUs", "nodes", "edges"])
def test_a_missing_key_is_named(key: str) -> None:
    data = small_input()
    del data[key]
    with pytest.raises(InvalidInput, match=f"^{key}: is missing"):
        dnn_partitioning.load(data, "small")


@pytest.mark.parametrize("junk", [None, 3, "text", [], {}])
def test_other_json_is_refused(junk: Any) -> None:
    with pytest.raises(InvalidInput):
        dnn_partitioning.load(junk, "junk")
    with pytest.raises(InvalidInput):
        instances.load(junk, "junk")


def test_no_device_for_an_op_is_said() -> None:
    with pytest.raises(InvalidInput, match="'2' may run on no device"):
        dnn_partitioning.load(small_input() | {"maxCPUs": 0}, "small")
    with pytest.raises(InvalidInput, match="no device"):
        dnn_partitioning.load(small_input() | {"maxCPUs": 0, "maxFPGAs": 0}, "small")


def test_a_file_may_be_empty() -> None:
    assert dnn_partitioning.load(small_input() | {"nodes": [], "edges": []}, "small").num_ops == 0
    assert instances.load(small_instance() | {"nodes": [], "edges": []}, "small").num_ops == 0


def test_edge_costs_may_differ_by_rounding() -> None:
    dnn_partitioning.load(changed(small_input(), ("edges", 1, "cost"), 0.25 + 5e-7), "small")


def test_split_finds_nodes_by_id_and_backward_nodes_by_colour() -> None:
    problem = dnn_partitioning.load(small_input(), "small")
    split = {"maxLoad": -1, "fpgas": [{"load": -1, "nodes": [3]}, {"nodes": [7, 1]}], "cpus": [{"nodes": [2]}]}
    assert dnn_partitioning.load_split(split, problem).tolist() == [1, 0, 0, 1, 2]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"fpgas": [{"nodes": [7, 3]}]}, "node 2 is on no device"),
        ({"fpgas": [{"nodes": [7, 5]}]}, r"fpgas\[0\]\.nodes\[1\] = 5: the problem has no node"),
        ({"fpgas": [{"nodes": [7]}, {"nodes": [7]}]}, r"fpgas\[1\]\.nodes\[0\] = 7: this node was placed before"),
        ({"fpgas": [{"nodes": [7]}, {"nodes": [1]}]}, "not on the device of its colour class"),
        ({"fpgas": [{"nodes": []}, {"nodes": []}, {"nodes": [7]}]}, r"fpgas\[2\] has nodes, but the problem has 2"),
        ({"fpgas": [{"nodes": ["7"]}]}, r"fpgas\[0\]\.nodes\[0\]: must be a whole number"),
        ({"cpus": []}, "fpgas: is missing"),
    ],
)
def test_a_wrong_split_is_refused(split: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        dnn_partitioning.load_split(split, dnn_partitioning.load(small_input(), "small"))


# The human experts' loads in ms, with the files as they are and with transfers 1000 times slower. The programs of
# Tarnawski et al. print six digits, which were rounded once more: 46.20845 became 46.2085 and then 46.209.
@pytest.mark.parametrize(
    ("name", "expert", "as_published", "in_one_unit"),
    [
        ("bert24_inference", "bert24_inference", 20.084, 22.04),
        ("bert24_training", "bert24_training", 49.405, 53.31),
        ("gnmt_inference", "gnmt_inference", 46.209, 58.65),
        ("gnmt_training", "gnmt_training", 137.154, 162.03),
        ("inceptionv3_inference", "inceptionv3_inference", 102.482, 197.31),
        ("resnet50_inference", "resnet50_inference", 43.918, 329.29),
        ("resnet50_training", "resnet50_inference", 112.108, 682.19),
    ],
)
def test_expert_splits_have_their_published_loads(
    name: str, expert: str, as_published: float, in_one_unit: float
) -> None:
    split = published(f"dnn-partitioning/human-experts/{expert}_expert.json")
    for scale, milliseconds, digits in ((1.0, as_published, 3), (1000.0, in_one_unit, 2)):
        problem = layer_graph(name, transfer_scale=scale)
        result = evaluate(problem, dnn_partitioning.load_split(split, problem))
        assert result.feasible[0]
        assert result.value[0] * 1e3 == pytest.approx(milliseconds, abs=0.56 * 10**-digits)


@pytest.mark.parametrize(
    ("name", "milliseconds"),
    [
        ("bert24_inference", 92.41),
        ("gnmt_training", 520.45),
        ("inceptionv3_inference", 310.97),
        ("resnet50_training", 462.38),
    ],
)
def test_one_accelerator_has_its_published_load(name: str, milliseconds: float) -> None:
    problem = layer_graph(name)
    value = evaluate(problem, np.zeros(problem.num_ops, int)).value[0]
    assert value * 1e3 == pytest.approx(milliseconds, abs=0.005001)


def max_load(data: dict[str, Any], place: dict[int, int]) -> float:
    """The paper's definition in ms, straight from the file: compute, plus each producer once in and once out."""
    accelerators = data["maxFPGAs"]
    load = [0.0] * (accelerators + data["maxCPUs"])
    for node in data["nodes"]:
        load[place[node["id"]]] += node["fpgaLatency" if place[node["id"]] < accelerators else "cpuLatency"]
    crossings = set()
    for edge in data["edges"]:
        a, b = place[edge["sourceId"]], place[edge["destId"]]
        if a != b:
            crossings |= {(edge["sourceId"], a, edge["cost"]), (edge["sourceId"], b, edge["cost"])}
    for _, device, cost in crossings:
        if device < accelerators:
            load[device] += cost
    return max(load)


@pytest.mark.parametrize(
    "path",
    [
        f"{LAYERS}/bert24_training.json",
        f"{LAYERS}/gnmt_training.json",
        f"{LAYERS}/inceptionv3_inference.json",
        f"{OPERATORS}/bert_l-3_training.json",
        f"{OPERATORS}/bert_L-12_training.json",
        f"{OPERATORS}/resnet50_inference.json",
        "dnn-partitioning/latency-inputs/OperatorGraphs/bert_l-12_inference.json",
    ],
)
def test_throughput_is_the_papers_max_load(path: str) -> None:
    data = published(path)
    problem = dnn_partitioning.load(data, "input")
    rng = np.random.default_rng(0)
    placements = rng.integers(problem.num_devices, size=(20, problem.num_units))[:, problem.unit]
    placements[:10] = np.minimum(placements[:10], data["maxFPGAs"] - 1)  # without the slow CPUs, transfers decide
    ids = [node["id"] for node in data["nodes"]]
    expected = [max_load(data, dict(zip(ids, row.tolist(), strict=True))) * 1e-3 for row in placements]
    assert evaluate(problem, placements).value == pytest.approx(expected, rel=1e-9)


# ---- placement instances -------------------------------------------------------------------------------------------


def small_instance() -> dict[str, Any]:
    return {
        "format": "placement-instance/1",
        "name": "small",
        "units": {"time": "us", "size": "bytes", "bandwidth": "bytes/us"},
        "devices": [{"name": "d0", "speed": 1.0}, {"name": "d1", "speed": 0.5}],
        "links": {
            "bandwidth": [[None, 100.0], [100.0, None]],
            "latency": [[0.0, 0.0], [0.0, 0.0]],
            "contention": "none",
        },
        "nodes": [{"name": f"op{i}", "cost": 4.0, "times": [4.0, 8.0]} for i in range(3)],
        "edges": [[0, 1, 100], [0, 2, 300]],
        "baselines": {
            "tool": {
                "HEFT": {
                    "makespan": 12.0,
                    "makespan_hashseed_0_3": [12.0, 13.0],
                    "placement": [0, 0, 0],
                    "start": [0.0, 4.0, 8.0],
                },
                "ETF": {
                    "makespan": 15.0,
                    "makespan_hashseed_0_3": None,
                    "placement": [0, 0, 1],
                    "start": [0.0, 4.0, 7.0],
                },
            }
        },
    }


def test_each_edge_of_an_instance_is_sent_by_itself() -> None:
    problem = instances.load(small_instance(), "small")
    assert problem.graph.tensor_bytes.tolist() == [100, 300]
    assert problem.seconds[0] == pytest.approx([4e-6, 8e-6])
    assert problem.cluster.links[0].bandwidth == pytest.approx(1e8)
    assert problem.cluster.memory.tolist() == [math.inf, math.inf]
    # Both transfers leave at 4 us without waiting for each other: 1 us and 3 us; d1 then runs both for 8 us each.
    timeline = simulate(problem, [0, 1, 1])
    assert timeline.makespan == pytest.approx(21e-6)
    assert sorted(timeline.transfers.finish) == pytest.approx([5e-6, 7e-6])


def test_baselines_are_in_seconds() -> None:
    found = instances.load_baselines(small_instance())
    assert list(found) == ["tool/HEFT", "tool/ETF"]
    assert found["tool/HEFT"].makespan == pytest.approx(12e-6)
    assert found["tool/HEFT"].makespans == pytest.approx((12e-6, 13e-6))
    assert found["tool/ETF"].makespans == ()
    assert found["tool/ETF"].placement.tolist() == [0, 0, 1]
    assert found["tool/ETF"].start == pytest.approx([0, 4e-6, 7e-6])


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "placement-instance/2", "format"),
        (("units", "time"), "ms", r"units\.time: must be 'us'"),
        (("nodes", 1, "times"), [1.0], r"nodes\[1\]\.times: must have 2 entries, found 1"),
        (("nodes", 1, "times", 0), math.nan, r"nodes\[1\]\.times\[0\]: must be finite"),
        (("nodes", 1, "name"), "op0", "two ops are named 'op0'"),
        (("edges", 1, 1), 3, r"edges\[1\]: there is no node 3: there are 3 nodes"),
        (("edges", 1, 2), -5, r"edges\[1\]\[2\]: must be 0 or more"),
        (("edges", 1), [0, 2], r"edges\[1\]\[2\]: is missing"),
        (("edges", 1, 1), 0, "cycle"),
        (("links", "bandwidth", 0, 1), None, r"links\.bandwidth\[0\]\[1\]: must be a number, found null"),
        (("links", "bandwidth", 0, 1), 0.0, r"links\.bandwidth\[0\]\[1\]: "),
        (("links", "bandwidth", 0), [None], r"links\.bandwidth\[0\]: must have 2 entries, found 1"),
        (("links", "latency"), [], r"links\.latency: must have 2 entries, found 0"),
        (("links", "contention"), "fair", r"links\.contention: must be 'none'"),
        (("devices",), [], r"times: must have 0 entries, found 2"),
    ],
)
def test_a_wrong_field_of_an_instance_is_named(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        instances.load(changed(small_instance(), path, value), "small")


def test_a_baseline_must_fit_itself() -> None:
    data = changed(small_instance(), ("baselines", "tool", "HEFT", "start"), [0.0])
    with pytest.raises(InvalidInput, match=r"baselines\.tool\.HEFT\.start: must have 3 entries, found 1"):
        instances.load_baselines(data)


@pytest.mark.parametrize("name", INSTANCES)
def test_stored_schedules_replay_to_their_makespans(name: str) -> None:
    data = published(f"instances/{name}.json")
    problem = instances.load(data, name)
    position = np.empty(problem.num_ops)
    position[problem.graph.topological_order] = np.arange(problem.num_ops)
    baselines = instances.load_baselines(data)
    assert {"saga-2.1.0/HEFT", "saga-2.1.0/CPoP", "saga-2.1.0/ETF", "saga-2.1.0/PEFT"} == set(baselines)
    for baseline in baselines.values():
        order = np.lexsort((position, baseline.start)).astype(np.int32)
        timeline = simulate(problem, baseline.placement, order)
        assert timeline.makespan == pytest.approx(baseline.makespan, rel=1e-9)
        assert evaluate(problem, baseline.placement, order).value[0] == pytest.approx(baseline.makespan, rel=1e-9)
        # Each op starts as soon as the same order allows, which is never later than stored.
        assert (timeline.start <= baseline.start + 1e-9 * baseline.makespan).all()


# ---- anything at all -----------------------------------------------------------------------------------------------


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    data = copy.deepcopy(data)
    holder = data
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    return data


def places(data: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in inside for place in [(*here, key), *places(value, (*here, key))]]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400) | st.just(5e-324),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.sampled_from(places(small_input())), JSON)
def test_a_corrupt_input_is_read_or_refused(place: tuple[Any, ...], junk: Any) -> None:
    with contextlib.suppress(InvalidInput):
        dnn_partitioning.load(changed(small_input(), place, junk), "small")


@settings(deadline=None)
@given(st.sampled_from(places(small_instance())), JSON)
def test_a_corrupt_instance_is_read_or_refused(place: tuple[Any, ...], junk: Any) -> None:
    data = changed(small_instance(), place, junk)
    with contextlib.suppress(InvalidInput):
        instances.load(data, "small")
    with contextlib.suppress(InvalidInput):
        instances.load_baselines(data)
