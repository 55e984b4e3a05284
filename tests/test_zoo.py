"""The models of the zoo have the published sizes, and the bundled boxes are worth planning for."""

from __future__ import annotations

import numpy as np
import pytest

from placewise import zoo
from placewise.errors import InvalidInput
from placewise.files import load_cluster
from placewise.graph import Graph
from placewise.problem import Problem
from placewise.simulator import evaluate

BOXES = ("two-gpus-one-host", "gpu-cpu-npu", "four-gpus")


def bytes_of_kind(graph: Graph, kind: str) -> float:
    of_kind = np.array([name == kind for name in graph.op_kinds])
    return float(graph.resident_bytes[of_kind].sum())


def flops_of_kinds(graph: Graph, *kinds: str) -> float:
    return float(sum(flops for kind, flops in zip(graph.op_kinds, graph.flops, strict=True) if kind in kinds))


# ---- every model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.names())
def test_a_model_loads_and_says_what_it_is(name: str) -> None:
    graph = zoo.load(name)
    assert graph.name == name
    assert zoo.describe(name)
    assert all(graph.op_modules[i] or kind == "input" for i, kind in enumerate(graph.op_kinds))
    assert graph.digest == zoo.load(name).digest


@pytest.mark.parametrize("name", zoo.names())
def test_an_op_moves_what_it_reads_and_writes(name: str) -> None:
    graph = zoo.load(name)
    moved = graph.resident.copy()
    np.add.at(moved, graph.consumers, graph.tensor_bytes[graph.edge_tensor])
    np.add.at(moved, graph.tensor_producer, graph.tensor_bytes)
    for i, kind in enumerate(graph.op_kinds):
        if kind in ("parameter", "state", "input"):
            assert graph.flops[i] == graph.bytes_accessed[i] == 0
        elif kind == "embedding":
            assert graph.bytes_accessed[i] < moved[i] / 10  # it reads rows, not the table
        else:
            assert graph.bytes_accessed[i] == moved[i]


@pytest.mark.parametrize("name", zoo.names())
def test_the_collapsed_view_keeps_work_and_bytes(name: str) -> None:
    graph = zoo.load(name)
    small = graph.collapse_parameters().graph
    assert not small.is_stored.any()
    assert small.flops.sum() == pytest.approx(graph.flops.sum())
    assert small.resident_bytes.sum() == pytest.approx(graph.resident_bytes.sum())


def test_wrong_requests_are_explained() -> None:
    with pytest.raises(InvalidInput, match=r"no model 'llama-9'.*llama-3-8b"):
        zoo.load("llama-9")
    with pytest.raises(InvalidInput, match="no option 'tokens'; it has batch"):
        zoo.load("inception-v3", tokens=3)
    for wrong in (0, -1, True, 1.5, "8"):
        with pytest.raises(InvalidInput, match="batch"):
            zoo.load("inception-v3", batch=wrong)


# ---- Llama ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-8b-decode"])
def test_llama_has_the_published_parameter_count(name: str) -> None:
    assert zoo.num_parameters(zoo.load(name)) == 8_030_261_248  # safetensors index of Meta-Llama-3-8B


def test_llama_does_two_flops_per_weight_and_token() -> None:
    graph = zoo.load("llama-3-8b", tokens=64, batch=2)
    in_products = 8_030_261_248 - 128256 * 4096 - 65 * 4096  # all but the look-up table and the norms
    assert flops_of_kinds(graph, "linear") == 2 * 128 * in_products


def test_llama_attention_counts_what_the_mask_leaves() -> None:
    prefill, decode = zoo.load("llama-3-8b"), zoo.load("llama-3-8b-decode")
    per_pair = 32 * 32 * (4 * 128 + 5)  # layers x heads x (scores and values, softmax)
    assert flops_of_kinds(prefill, "attention") == per_pair * 512 * 513 / 2
    assert flops_of_kinds(decode, "attention") == per_pair * 513


def test_llama_decode_keeps_its_cache_as_state() -> None:
    graph = zoo.load("llama-3-8b-decode")
    assert bytes_of_kind(graph, "state") == 32 * 2 * 512 * 8 * 128 * 2
    assert bytes_of_kind(zoo.load("llama-3-8b"), "state") == 0


def test_llama_modules_are_those_of_transformers() -> None:
    graph = zoo.load("llama-3-8b")
    modules = set(graph.op_modules)
    assert {
        "model.embed_tokens",
        "model.layers.3.self_attn.q_proj",
        "model.layers.31.mlp.down_proj",
        "lm_head",
    } <= modules
    weight = graph.op_index("model.layers.3.self_attn.q_proj.weight")
    assert graph.op_modules[weight] == "model.layers.3.self_attn.q_proj"
    assert graph.resident_bytes[weight] == 4096 * 4096 * 2


def test_llama_layers_scale() -> None:
    short, long = (zoo.load("llama-3-8b", layers=n).num_ops for n in (1, 3))
    assert (zoo.load("llama-3-8b").num_ops - long) == (long - short) // 2 * 29


# ---- Inception -----------------------------------------------------------------------------------------------------


def test_inception_has_the_published_size() -> None:
    graph = zoo.load("inception-v3")
    assert bytes_of_kind(graph, "parameter") / 4 == 23_834_568  # torchvision's Inception3 without its auxiliary head
    multiply_adds = flops_of_kinds(graph, "conv2d", "linear") / 2 / 32
    assert multiply_adds == pytest.approx(5.713e9, abs=0.5e6)  # per image; torchvision's weights page gives 5.71 G
    assert graph.op_kinds.count("conv2d") == graph.op_kinds.count("batch_norm") == graph.op_kinds.count("relu") == 94


def test_inception_work_follows_the_batch() -> None:
    one, eight = zoo.load("inception-v3", batch=1), zoo.load("inception-v3", batch=8)
    assert eight.flops.sum() == 8 * one.flops.sum()
    assert bytes_of_kind(eight, "parameter") == bytes_of_kind(one, "parameter")


def test_inception_branches_are_parallel() -> None:
    graph = zoo.load("inception-v3").collapse_parameters().graph
    reads = [graph.edge_producer[graph.consumers == op].tolist() for op in range(graph.num_ops)]
    heads = ("branch1x1.conv", "branch5x5_1.conv", "branch3x3dbl_1.conv", "avg_pool")
    inputs = {tuple(reads[graph.op_index(f"Mixed_5c.{head}")]) for head in heads}
    assert inputs == {(graph.op_index("Mixed_5b.concat"),)}
    assert len(reads[graph.op_index("Mixed_5c.concat")]) == 4
    shapes = {"Mixed_5d": 288 * 35 * 35, "Mixed_6e": 768 * 17 * 17, "Mixed_7c": 2048 * 8 * 8}
    for block, elements in shapes.items():
        produced = graph.tensor_producer == graph.op_index(f"{block}.concat")
        assert graph.tensor_bytes[produced].tolist() == [32 * elements * 4]


# ---- boxes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("box", BOXES)
def test_every_box_runs_every_model(box: str) -> None:
    cluster = load_cluster(box)
    assert cluster.name == box
    for name in zoo.names():
        assert np.isfinite(Problem(zoo.load(name), cluster).seconds).all()


def split_layers(graph: Graph, first: int, second: int, boundary: int) -> list[int]:
    """Layers below the boundary (and the embedding) on one device, the others on another."""
    after = [name.startswith("lm_head") or name.startswith("model.norm") for name in graph.op_names]
    for i, name in enumerate(graph.op_names):
        parts = name.split(".")
        after[i] |= parts[:2] == ["model", "layers"] and int(parts[2]) >= boundary
    return [second if late else first for late in after]


def test_the_demo_needs_both_gpus_and_the_fast_one_matters() -> None:
    graph = zoo.load("llama-3-8b").collapse_parameters().graph
    problem = Problem(graph, load_cluster("two-gpus-one-host"))
    gpu0, gpu1, cpu = (problem.cluster.device_index(name) for name in ("gpu0", "gpu1", "cpu"))
    one_device = evaluate(problem, [[device] * graph.num_ops for device in (gpu0, gpu1, cpu)])
    assert one_device.feasible.tolist() == [False, False, True]
    mostly_fast, half = split_layers(graph, gpu0, gpu1, 20), split_layers(graph, gpu0, gpu1, 18)
    both = evaluate(problem, [mostly_fast, half])
    assert both.feasible.all()
    assert both.value[0] < both.value[1] < one_device.value[cpu] / 5


def test_gpus_of_the_demo_share_their_slots() -> None:
    cluster = load_cluster("two-gpus-one-host")
    gpu0, gpu1, cpu = (cluster.device_index(name) for name in ("gpu0", "gpu1", "cpu"))
    slots = {*cluster.channels_of[gpu0, cpu], *cluster.channels_of[cpu, gpu1]}
    assert set(cluster.channels_of[gpu0, gpu1]) == set(cluster.channels_of[gpu1, gpu0]) == slots
    assert len(cluster.channels) == 2
