"""The bundled graphs have the published sizes, equal what their code exports to, and are worth planning."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from placewise import cli, zoo
from placewise.errors import InvalidInput
from placewise.files import bundled_boxes, load_cluster
from placewise.graph import PHASES, Graph
from placewise.importers.assembly import kinds_without_formula
from placewise.problem import Problem
from placewise.simulator import evaluate

#: Stored with the weights, but not trained: the statistics of batch norms, positions and their frequencies.
BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq", "position_ids", "token_type_ids")


def elements(graph: Graph, kind: str) -> int:
    """Of all tensors that ops of this kind hold, without buffers."""
    held = zip(graph.op_names, graph.op_kinds, graph.op_signatures, strict=True)
    shapes = [text for name, found, text in held if found == kind and not name.endswith(BUFFERS)]
    return sum(math.prod(map(int, re.findall(r"\d+", text.rpartition("[")[2]))) for text in shapes)


def bytes_of_kind(graph: Graph, kind: str) -> float:
    return float(graph.resident_bytes[np.array([found == kind for found in graph.op_kinds])].sum())


def flops_of_kinds(graph: Graph, *kinds: str) -> float:
    return float(graph.flops[np.array([found in kinds for found in graph.op_kinds])].sum())


# ---- every model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.names())
def test_a_model_is_what_the_list_says(name: str) -> None:
    graph = zoo.load(name)
    assert graph.name == name
    assert graph.models == (name,)
    assert zoo.facts(name) == {
        "ops": int((~graph.is_stored).sum()),
        "parameters": elements(graph, "parameter"),
        "flops": graph.flops.sum(),
        "bytes": graph.resident_bytes.sum(),
    }
    assert not kinds_without_formula(graph)


@pytest.mark.parametrize("name", zoo.names())
def test_the_collapsed_view_keeps_work_and_bytes(name: str) -> None:
    graph = zoo.load(name)
    small = graph.collapse_parameters().graph
    assert small.num_ops < graph.num_ops
    assert small.flops.sum() == pytest.approx(graph.flops.sum())
    assert small.resident_bytes.sum() == pytest.approx(graph.resident_bytes.sum())


def test_all_the_papers_models_are_there() -> None:
    assert {
        "inception-v3", "resnet-50", "resnet-152", "alexnet", "googlenet", "squeezenet", "vgg-19", "nasnet-a", "rnnlm",
        "nmt-2", "nmt-4", "nmt-8", "gnmt", "bert-base", "gpt-2", "llama-3-8b", "qwen3-30b-a3b", "inception-v3-train",
        "nasnet-a-train", "rnnlm-train", "nmt-2-train", "nmt-4-train", "nmt-8-train", "gnmt-train", "resnet-50-train",
        "bert-base-train",
    } <= set(zoo.names())  # fmt: skip
    assert sorted(path.name for path in zoo.GRAPHS.iterdir()) == sorted(
        ["index.json", *(f"{name}.json.gz" for name in zoo.names())]
    )


def test_the_data_is_small() -> None:
    assert sum(path.stat().st_size for path in zoo.GRAPHS.iterdir()) < 6e6


def test_wrong_requests_are_explained() -> None:
    for call in (zoo.load, zoo.describe, zoo.facts, zoo.module):
        with pytest.raises(InvalidInput, match=r"no model 'llama-9'.*llama-3-8b"):
            call("llama-9")


def test_graphs_are_read_without_torch() -> None:
    code = "import sys; from placewise import zoo; zoo.load('gpt-2'); print({'torch', 'transformers'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"set()\n"


def test_listing_reads_no_graph(monkeypatch, capsys) -> None:
    monkeypatch.setattr("placewise.files.load_graph", None)
    with pytest.raises(SystemExit):
        cli.app(["zoo"])
    assert "| gnmt-train           | 19," in capsys.readouterr().out


# ---- against the code ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["alexnet", "googlenet", "gpt-2", "gpt-2-decode", "rnnlm-train", "bert-base-train"])
def test_the_code_exports_to_the_bundled_graph(name: str) -> None:
    pytest.importorskip("transformers")
    from placewise.zoo import bundle

    graph = bundle.export(name)
    assert graph.digest == zoo.load(name).digest
    assert bundle.facts(name, graph) == zoo.facts(name)


def test_writing_again_changes_nothing(tmp_path, monkeypatch) -> None:
    pytest.importorskip("torch")
    from placewise.zoo import bundle

    before = {name: (zoo.GRAPHS / name).read_bytes() for name in ("index.json", "squeezenet.json.gz")}
    monkeypatch.setattr(zoo, "GRAPHS", tmp_path)
    (tmp_path / "index.json").write_bytes(before["index.json"])
    bundle.main(["squeezenet"])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_code_runs_on_request() -> None:
    torch = pytest.importorskip("torch")
    model, (images,) = zoo.module("squeezenet", device="cpu")
    assert not model.training
    assert images.shape == (32, 3, 224, 224)
    with torch.no_grad():
        assert model(images[:2]).isfinite().all()
    model, args = zoo.module("llama-3-8b-decode")
    assert {weight.device.type for weight in (*model.parameters(), *args)} == {"meta"}
    assert model(*args).shape == (1, 1, 128_256)


# ---- published sizes -------------------------------------------------------------------------------------------------


# Parameters and multiply-adds per image: torchvision's documentation of its weights; NASNet-A's paper, table 2.
@pytest.mark.parametrize(
    ("name", "weights", "multiply_adds"),
    [
        ("alexnet", 61_100_840, 0.71e9),
        ("vgg-19", 143_667_240, 19.63e9),
        ("squeezenet", 1_235_496, 0.35e9),
        ("googlenet", 6_624_904, 1.50e9),
        ("inception-v3", 23_834_568, 5.71e9),
        ("resnet-50", 25_557_032, 4.09e9),
        ("resnet-152", 60_192_808, 11.51e9),
        ("nasnet-a", 88_753_150, 23.8e9),
    ],
)
def test_an_image_classifier_has_the_published_size(name: str, weights: int, multiply_adds: float) -> None:
    graph = zoo.load(name)
    assert zoo.facts(name)["parameters"] == weights
    products = flops_of_kinds(graph, "conv", "matmul")
    assert products / 2 / 32 == pytest.approx(multiply_adds, rel=0.01)
    assert products > 0.95 * graph.flops.sum()


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("bert-base", 109_482_240),
        ("gpt-2", 124_439_808),
        ("llama-3-8b", 8_030_261_248),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_a_transformer_has_the_published_size(name: str, weights: int) -> None:
    assert {zoo.facts(each)["parameters"] for each in (name, f"{name}-decode") if each in zoo.names()} == {weights}


@pytest.mark.parametrize(
    ("name", "cells", "kind", "count"),
    [
        ("rnnlm", 35 * 2, "matmul", 70 + 1),
        # A product for each cell; for each word two for attention, one to mix and one for the words; one for the keys.
        ("nmt-2", 30 * 4, "matmul", 120 + 30 * 4 + 1),
        ("nmt-8", 30 * 16, "matmul", 480 + 30 * 4 + 1),
        # The first layer of the encoder twice; attention has a product for the query, the scores and the sum.
        ("gnmt", 30 * 17, "matmul", 510 + 30 * 4 + 1),
    ],
)
def test_a_recurrent_model_is_unrolled(name: str, cells: int, kind: str, count: int) -> None:
    kinds = Counter(zoo.load(name).op_kinds)
    assert kinds["sigmoid"] == 3 * cells
    assert kinds[kind] == count


# ---- Inception -------------------------------------------------------------------------------------------------------


def test_inception_branches_are_parallel() -> None:
    graph = zoo.load("inception-v3").collapse_parameters().graph
    kinds = Counter(graph.op_kinds)
    assert kinds["conv"] == kinds["batch_norm"] == kinds["relu"] == 94
    reads = [graph.edge_producer[graph.consumers == op].tolist() for op in range(graph.num_ops)]
    heads = ("branch1x1.conv.conv2d", "branch5x5_1.conv.conv2d", "branch3x3dbl_1.conv.conv2d", "avg_pool2d")
    inputs = {tuple(reads[graph.op_index(f"Mixed_5c.{head}")]) for head in heads}
    assert inputs == {(graph.op_index("Mixed_5b.cat"),)}
    assert len(reads[graph.op_index("Mixed_5c.cat")]) == 4
    shapes = {"Mixed_5d.cat": 288 * 35 * 35, "Mixed_6e.cat": 768 * 17 * 17, "Mixed_7c.cat:2": 2048 * 8 * 8}
    for joined, elements in shapes.items():
        produced = graph.tensor_producer == graph.op_index(joined)
        assert graph.tensor_bytes[produced].tolist() == [32 * elements * 4]


# ---- language models -------------------------------------------------------------------------------------------------


def test_llama_does_two_flops_per_weight_and_token() -> None:
    in_products = 8_030_261_248 - 128256 * 4096 - 65 * 4096  # all but the look-up table and the norms
    assert flops_of_kinds(zoo.load("llama-3-8b"), "matmul") == 2 * 512 * in_products
    assert flops_of_kinds(zoo.load("llama-3-8b-decode"), "matmul") == 2 * in_products


def test_llama_attention_counts_all_pairs() -> None:
    per_pair = 32 * 32 * (4 * 128 + 5)  # layers x heads x (scores and values, softmax)
    assert flops_of_kinds(zoo.load("llama-3-8b"), "attention") == per_pair * 512 * 512
    assert flops_of_kinds(zoo.load("llama-3-8b-decode"), "attention") == per_pair * 513


def test_decoding_keeps_keys_and_values_as_state() -> None:
    for name, layers, heads, width, item in (
        ("gpt-2", 12, 12, 64, 4), ("llama-3-8b", 32, 8, 128, 2), ("qwen3-30b-a3b", 48, 4, 128, 2)
    ):  # fmt: skip
        assert bytes_of_kind(zoo.load(f"{name}-decode"), "state") == layers * 2 * 512 * heads * width * item
        assert bytes_of_kind(zoo.load(name), "state") == 0


def test_modules_are_those_of_transformers() -> None:
    graph = zoo.load("llama-3-8b")
    assert {"model.embed_tokens", "model.layers.3.self_attn.q_proj", "lm_head"} <= set(graph.op_modules)
    weight = graph.op_index("model.layers.3.self_attn.q_proj.weight")
    assert graph.op_modules[weight] == "model.layers.3.self_attn.q_proj"
    assert graph.resident_bytes[weight] == 4096 * 4096 * 2


def test_each_token_sees_eight_of_the_experts() -> None:
    """3.3 G of 30.5 G parameters take part, says the model card; those of the look-up table do no work."""
    layer = 2048 * (2 * 32 + 2 * 4) * 128 + 2048 * 128 + 8 * 3 * 2048 * 768
    products = flops_of_kinds(zoo.load("qwen3-30b-a3b"), "matmul", "grouped_matmul") / 2 / 512
    assert products == 48 * layer + 2048 * 151_936
    assert products + 151_936 * 2048 == pytest.approx(3.3e9, rel=0.02)


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in zoo.names() if name.endswith("-train")])
def test_a_training_step_updates_every_parameter(name: str) -> None:
    graph = zoo.load(name)
    held = elements(graph, "parameter")
    weights = [i for i, kind in enumerate(graph.op_kinds) if kind == "parameter"]
    weights = [i for i in weights if not graph.op_names[i].endswith(BUFFERS)]
    updates = [i for i, kind in enumerate(graph.op_kinds) if kind == "adam"]
    assert {PHASES[graph.phase[i]] for i in updates} == {"update"}
    assert sorted(graph.group[updates]) == sorted(graph.group[weights])  # where the weight is, each its own
    assert len(set(graph.group[updates].tolist())) == len(weights)
    assert elements(graph, "state") == 2 * held  # Adam's two moments
    forward, backward = (graph.flops[graph.phase == phase].sum() for phase in (0, 1))
    assert backward == pytest.approx(2 * forward, rel=0.06)


def test_backward_convolutions_cost_twice_the_forward_ones() -> None:
    """All but the first, as nobody asks for the gradient of the images."""
    graph = zoo.load("resnet-50-train")
    first = 2 * 3 * 7 * 7 * 32 * 64 * 112 * 112
    assert flops_of_kinds(graph, "conv_backward") == 2 * flops_of_kinds(graph, "conv") - first
    assert flops_of_kinds(graph, "conv") == flops_of_kinds(zoo.load("resnet-50"), "conv")


def test_the_auxiliary_head_is_there_in_training_alone() -> None:
    assert zoo.facts("inception-v3")["parameters"] == 23_834_568
    assert zoo.facts("inception-v3-train")["parameters"] == 27_161_264


# ---- boxes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("box", bundled_boxes())
def test_every_box_runs_the_models(box: str) -> None:
    cluster = load_cluster(box)
    assert cluster.name == box
    for name in ("inception-v3", "llama-3-8b"):
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
