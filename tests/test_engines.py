from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placewise import Budget, Graph, Problem, engines, plan, zoo
from placewise.cluster import Device, full_mesh
from placewise.engines.cut import cut, describe_cut
from placewise.engines.phase import phase
from placewise.engines.pieces import feed_forward, pieces
from placewise.engines.ranks import accelerator_numbers, ranks
from placewise.errors import InvalidInput, Unsupported
from placewise.plans import Plan
from placewise.sharding import sharded
from placewise.simulator import evaluate, violations

RANKED = ("vllm", "sglang", "tensorrt-llm", "megatron", "torchtitan", "deepspeed")


def box(*memory, speed=None, host=64):
    """GPUs with so many GiB each and a host."""
    speed = speed or [1.0] * len(memory)
    gpus = [
        Device(f"gpu{i}", memory=m * 2**30, flops={"default": s * 1e14}, bandwidth=s * 1e12)
        for i, (m, s) in enumerate(zip(memory, speed, strict=True))
    ]
    cpu = Device("cpu", kind="cpu", memory=host * 2**30, flops={"default": 1e12}, bandwidth=5e10)
    return full_mesh([*gpus, cpu], 20e9, 10e-6)


def problem(model, cluster, objective="latency"):
    return Problem(zoo.load(model).collapse_parameters().graph, cluster, objective=objective)


def of_a_file(model, cluster):
    """As a problem of a file, whose ops have names of their own."""
    found = problem(model, cluster)
    return replace(found, graph=replace(found.graph, op_modules=("",) * found.num_ops))


def planned(name, model, cluster, objective="latency"):
    fitted = engines.get(name).fit(problem(model, cluster, objective))
    return plan(fitted, "auto", budget=Budget(evaluations=300))


def by_hand(name, model, cluster, device_of):
    """A plan that puts each op where `device_of` (piece -> device) says; ops of no piece go with the first piece."""
    fitted = engines.get(name).fit(problem(model, cluster, "throughput" if name in RANKED else "latency"))
    found = pieces(fitted.graph)
    placement = np.array([device_of(found.names[p] if p >= 0 else found.names[0]) for p in found.of_op], np.int32)
    value = float(evaluate(fitted, placement).value[0])
    return Plan(fitted, placement, None, value, 0.0, "hand", "0")


def layer_split(last_of_first):
    def device(piece):
        number = piece.rpartition(".")[2]
        if number.isdigit():
            return int(int(number) > last_of_first)
        return int(piece in ("model.norm", "lm_head"))

    return device


# ---- pieces ----------------------------------------------------------------------------------------------------------


def test_pieces_of_a_language_model():
    found = pieces(zoo.load("llama-3-8b"))
    assert found.names[0] == "model.embed_tokens"
    assert found.names[-2:] == ("model.norm", "lm_head")
    assert [found.names[piece] for piece in found.layers] == [f"model.layers.{i}" for i in range(32)]


def test_pieces_of_two_lists_and_of_none():
    assert [name for name in pieces(zoo.load("nmt-2")).names if name[-1].isdigit()] == [
        "encoder.0", "encoder.1", "decoder.0", "decoder.1",
    ]  # fmt: skip
    inception = pieces(zoo.load("inception-v3"))
    assert inception.layers == ()
    assert "Mixed_6a" in inception.names


def test_what_looks_like_a_number_and_is_none_names_no_layer():
    graph = Graph.create(op_names=list("abcd"), op_modules=["h.0", "h.1", "h.²", f"h.{'9' * 5000}"], flops=1.0)
    found = pieces(graph)
    assert [found.names[piece] for piece in found.layers] == ["h.0", "h.1"]


def test_a_signature_with_too_long_a_number_tells_no_phase():
    graph = Graph.create(op_names=["a"], op_signatures=f"embedding(f[9,9], int64[1,{'9' * 5000}]) -> f[1]")
    assert phase(graph) is None


@pytest.mark.parametrize("model", ["llama-3-8b", "gpt-2", "qwen3-30b-a3b-decode"])
def test_every_weight_is_in_a_piece(model):
    graph = zoo.load(model)
    assert (pieces(graph).of_op[graph.is_stored] >= 0).all()


# ---- pipelines of layers ---------------------------------------------------------------------------------------------


def test_what_pipelines_are_told():
    found = by_hand("vllm", "llama-3-8b", box(24, 24), layer_split(19))
    assert violations(found.problem, found.placement) == []
    text = {name: engines.get(name).export(found) for name in RANKED}
    assert text["vllm"] == (
        'CUDA_VISIBLE_DEVICES=0,1 VLLM_PP_LAYER_PARTITION=20,12 vllm serve "$MODEL" --pipeline-parallel-size 2\n'
    )
    assert "SGLANG_PP_LAYER_PARTITION=20,12 " in text["sglang"]
    assert text["sglang"].endswith("--pp-size 2\n")
    assert text["tensorrt-llm"] == "pipeline_parallel_size: 2\npp_partition: [20, 12]\n"
    assert shlex.split(text["megatron"])[-1] == "Et*20|t*12,L"


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_their_own_code_reads_the_partition(name, monkeypatch):
    module = {"vllm": "vllm.distributed.utils", "sglang": "sglang.srt.distributed.utils"}[name]
    indices = pytest.importorskip(module).get_pp_indices
    found = by_hand(name, "llama-3-8b", box(24, 24), layer_split(19))
    for setting in shlex.split(engines.get(name).export(found)):
        if "LAYER_PARTITION" in setting:
            monkeypatch.setenv(*setting.split("="))
    assert [indices(32, rank, 2) for rank in range(2)] == [(0, 20), (20, 32)]


def test_the_layout_of_megatron_has_every_layer_once():
    parser = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    found = by_hand("megatron", "llama-3-8b", box(24, 24), layer_split(19))
    layout = parser.PipelineParallelLayerLayout(shlex.split(engines.get("megatron").export(found))[-1], 2)
    layout.validate_layer_layout(32, None)
    assert [len(stages[0]) for stages in layout.layout] == [21, 13]


def test_the_modules_of_torchtitan(monkeypatch):
    """Run what it is given, with torchtitan's dataclass or, without torchtitan, a stand-in (0.3.0)."""
    import sys
    import types

    if importlib.util.find_spec("torchtitan") is None:
        config = types.ModuleType("torchtitan.config")
        config.ParallelismConfig = types.SimpleNamespace
        monkeypatch.setitem(sys.modules, "torchtitan", types.ModuleType("torchtitan"))
        monkeypatch.setitem(sys.modules, "torchtitan.config", config)
    found = by_hand("torchtitan", "llama-3-8b", box(24, 24), layer_split(19))
    space: dict = {}
    exec(engines.get("torchtitan").export(found), space)
    assert space["parallelism"].pipeline_parallel_degree == 2
    assert space["parallelism"].module_fqns_per_model_part == [
        ["tok_embeddings", *(f"layers.{i}" for i in range(20))],
        [*(f"layers.{i}" for i in range(20, 32)), "norm", "lm_head"],
    ]


def test_torchtitan_has_the_same_names_for_them():
    own = pytest.importorskip("torchtitan.distributed.pipeline_parallel")
    found = by_hand("torchtitan", "llama-3-8b", box(24, 24), layer_split(19))
    names = re.findall(r'"([^"]+)"', engines.get("torchtitan").export(found))
    assert names == [name for stage in own._generate_llm_fqn_per_model_part(2, 32, 1, 1) for name in stage]


def test_the_stages_of_deepspeed(monkeypatch):
    """Run the code that it is given, with a stand-in that partitions as DeepSpeed 0.19.8 does."""
    import sys
    import types

    class PipelineModule:
        def __init__(self, layers, num_stages):
            self._layer_specs, self.num_stages = layers, num_stages
            self._partition_layers("parameters")

        def _partition_layers(self, method):
            assert method == "uniform"
            self.parts = utils.partition_uniform(num_items=len(self._layer_specs), num_parts=self.num_stages)

    utils = types.ModuleType("deepspeed.runtime.utils")
    utils.partition_uniform = lambda num_items, num_parts: "uniform"
    runtime, pipe = types.ModuleType("deepspeed.runtime"), types.ModuleType("deepspeed.pipe")
    runtime.utils, pipe.PipelineModule = utils, PipelineModule
    for name, module in (("", types.ModuleType("deepspeed")), (".runtime", runtime), (".pipe", pipe)):
        monkeypatch.setitem(sys.modules, f"deepspeed{name}", module)
    found = by_hand("deepspeed", "llama-3-8b", box(24, 24), layer_split(19))
    space: dict = {}
    exec(engines.get("deepspeed").export(found), space)
    assert space["PlacedPipeline"](["layer"] * 34, 2).parts == [0, 21, 34]
    assert utils.partition_uniform(1, 1) == "uniform"
    with pytest.raises(AssertionError, match="not the model"):
        space["PlacedPipeline"](["layer"] * 33, 2)


_TWO_STAGES = """
import deepspeed
import torch.distributed as dist
from torch import nn
from placed import PlacedPipeline

dist.init_process_group("gloo")
deepspeed.init_distributed("gloo")
found = PlacedPipeline(layers=[nn.Linear(2, 2, bias=False) for _ in range(34)], num_stages=2, loss_fn=nn.MSELoss())
print(f"rank {dist.get_rank()} of {found.parts}: {len(list(found.parameters()))}", flush=True)
dist.destroy_process_group()
"""


def test_deepspeed_itself_makes_the_stages(tmp_path):
    """Two processes, each with its part of the layers."""
    import subprocess
    import sys

    pytest.importorskip("deepspeed")
    found = by_hand("deepspeed", "llama-3-8b", box(24, 24), layer_split(19))
    (tmp_path / "placed.py").write_text(engines.get("deepspeed").export(found))
    (tmp_path / "main.py").write_text(_TWO_STAGES)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "main.py"],
        cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(re.findall(r"rank \d of .*: \d+", done.stdout)) == [
        "rank 0 of [0, 21, 34]: 21",
        "rank 1 of [0, 21, 34]: 13",
    ]


def test_a_pipeline_follows_speed_and_memory():
    found = planned("vllm", "llama-3-8b", box(24, 24, speed=[3.0, 1.0]), "throughput")
    stages = ranks(found, "vllm")
    layers = {stage.device: len(stage.layers) for stage in stages}
    assert sum(layers.values()) == 32
    assert layers[0] > 2 * layers[1] > 0
    assert 2 not in layers  # the host
    assert [number for stage in stages for number in stage.layers] == list(range(32))
    assert found.is_optimal


def test_ranks_are_numbered_as_the_plan_has_them(capsys):
    found = by_hand("vllm", "llama-3-8b", box(24, 24), lambda piece: 1 - layer_split(9)(piece))
    assert engines.get("vllm").export(found).startswith("CUDA_VISIBLE_DEVICES=1,0 VLLM_PP_LAYER_PARTITION=10,22 ")
    assert capsys.readouterr().err == ""
    second = by_hand("vllm", "llama-3-8b", box(24, 24), lambda piece: 1)
    for plan_of, wanted in ((found, "1,0"), (second, "1")):
        for name in ("tensorrt-llm", "megatron", "torchtitan", "deepspeed"):  # their formats have no place for it
            engines.get(name).export(plan_of)
            assert capsys.readouterr().err.endswith(f"start it with CUDA_VISIBLE_DEVICES={wanted}\n")
    engines.get("megatron").export(by_hand("vllm", "llama-3-8b", box(24, 24), layer_split(9)))
    assert capsys.readouterr().err == ""


def of_shards(groups, device_of):
    """A plan of Llama by hand on groups of four GPUs and a host."""
    fitted = sharded(engines.get("vllm").fit(problem("llama-3-8b", box(24, 24, 24, 24), "throughput")), groups)
    found = pieces(fitted.graph)
    placement = np.array([device_of(found.names[p] if p >= 0 else found.names[0]) for p in found.of_op], np.int32)
    return Plan(fitted, placement, None, float(evaluate(fitted, placement).value[0]), 0.0, "hand", "0")


def test_what_pipelines_of_shards_are_told(capsys):
    found = of_shards(((0, 1), (2, 3), (4,)), lambda piece: 1 - layer_split(19)(piece))
    text = {name: engines.get(name).export(found) for name in RANKED if name != "deepspeed"}
    assert text["vllm"] == (
        "CUDA_VISIBLE_DEVICES=2,3,0,1 VLLM_PP_LAYER_PARTITION=20,12 "
        'vllm serve "$MODEL" --pipeline-parallel-size 2 --tensor-parallel-size 2\n'
    )
    assert text["sglang"].endswith("--pp-size 2 --tp-size 2\n")
    assert text["tensorrt-llm"] == "tensor_parallel_size: 2\npipeline_parallel_size: 2\npp_partition: [20, 12]\n"
    assert text["megatron"].startswith("--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel")
    assert "(\n    tensor_parallel_degree=2,\n    pipeline_parallel_degree=2,\n" in text["torchtitan"]
    assert capsys.readouterr().err.count("start it with CUDA_VISIBLE_DEVICES=2,3,0,1\n") == 3
    mixed = of_shards(((0, 1), (2,), (3,), (4,)), layer_split(19))
    for name in text:
        with pytest.raises(
            InvalidInput, match=f"the stages have 2, 1 GPUs, and {name} has as many for each: .*uniform"
        ):
            engines.get(name).export(mixed)
    for name, engine in engines.available().items():
        if name not in text:
            with pytest.raises(
                Unsupported, match=rf"gpu2\+gpu3 is cut up among 2 devices, of which {name} cannot be told"
            ):
                engine.export(of_shards(((0,), (1,), (2, 3), (4,)), lambda _: 2))


def test_shards_are_numbered_as_their_names_are():
    gpus = [replace(device, name=f"cuda:{7 - d}") for d, device in enumerate(box(24, 24, 24).devices[:3])]
    free = problem("gpt-2", full_mesh(gpus, 20e9))
    assert accelerator_numbers(sharded(free, ((0, 1), (2,))).cluster, 0) == [7, 6]
    assert accelerator_numbers(sharded(free, ((0, 1), (2,))).cluster, 1) == [5]
    assert accelerator_numbers(sharded(problem("gpt-2", box(24, 24, 24)), ((0, 1), (2,), (3,))).cluster, 1) == [2]


def test_a_plan_that_an_engine_cannot_run_is_refused():
    free = problem("llama-3-8b", box(24, 24))
    scattered = Plan(free, np.arange(free.num_ops) % 2, None, 1.0, 0.0, "hand", "0")
    for name in (*RANKED, "accelerate", "llama.cpp"):
        with pytest.raises(InvalidInput, match=f"plan with `?--engine {name}"):
            engines.get(name).export(scattered)
    back = by_hand("vllm", "llama-3-8b", box(24, 24), lambda piece: int(piece == "model.layers.7"))
    with pytest.raises(InvalidInput, match="comes back"):
        engines.get("vllm").export(back)


def test_models_and_boxes_without_a_pipeline_are_refused():
    with pytest.raises(Unsupported, match="no list of layers"):
        engines.get("vllm").fit(problem("inception-v3", box(24)))
    with pytest.raises(Unsupported, match="needs a GPU"):
        engines.get("vllm").fit(problem("llama-3-8b", box()))


def test_engines_of_language_models_refuse_others():
    for name in (*RANKED, "llama.cpp"):
        with pytest.raises(Unsupported, match="language models alone"):
            engines.get(name).fit(problem("resnet-50", box(24)))


def test_an_npu_is_no_gpu():
    gpu, cpu = box(24).devices
    npu = Device("npu", kind="npu", memory=gpu.memory, flops={"default": 1e15}, bandwidth=1e13)
    fitted = engines.get("vllm").fit(problem("gpt-2", full_mesh([npu, gpu, cpu], 1e9), "throughput"))
    assert set(fitted.forbidden) == {"npu", "cpu"}
    found = plan(fitted, "auto", budget=Budget(evaluations=50))
    assert engines.get("vllm").export(found).startswith("CUDA_VISIBLE_DEVICES=0 VLLM_PP_LAYER_PARTITION=12 ")


# ---- accelerate ------------------------------------------------------------------------------------------------------


def device_map(*arguments):
    return json.loads(engines.get("accelerate").export(planned("accelerate", *arguments)))


def test_a_model_that_fits_one_gpu_stays_on_it_whatever_the_order():
    assert set(device_map("llama-3-8b", box(24, 8)).values()) == {0}
    assert set(device_map("llama-3-8b", box(8, 24)).values()) == {1}


@pytest.mark.parametrize("memory", [(12, 8), (8, 12)])
def test_the_head_is_never_on_the_cpu(memory):
    places = device_map("llama-3-8b", box(*memory))
    assert set(places.values()) == {0, 1}
    layers = [places[f"model.layers.{i}"] for i in range(32)]
    assert sum(a != b for a, b in pairwise(layers)) == 1  # one hop


def test_the_order_of_gpus_does_not_change_the_value():
    one, other = (planned("accelerate", "llama-3-8b", box(*memory)).value for memory in ((12, 8), (8, 12)))
    assert one == pytest.approx(other, rel=1e-9)


def test_a_small_model_is_on_the_larger_gpu():
    """About 90 MiB on {80, 40} MiB: accelerate's `balanced` leaves the larger empty and most layers on the CPU."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig

    from placewise.importers.transformers import from_transformers

    toy = LlamaConfig(
        vocab_size=8000, hidden_size=512, intermediate_size=1376, num_hidden_layers=12, num_attention_heads=8,
        max_position_embeddings=128, dtype="bfloat16",
    )  # fmt: skip
    graph = from_transformers(toy, prompt=8).collapse_parameters().graph
    assert graph.resident_bytes.sum() / 2**20 == pytest.approx(88, abs=8)
    fitted = engines.get("accelerate").fit(Problem(graph, box(80 / 1024, 40 / 1024)))
    places = json.loads(engines.get("accelerate").export(plan(fitted, "auto", budget=Budget(evaluations=300))))
    layers = [places[f"model.layers.{i}"] for i in range(12)]
    assert "cpu" not in places.values()
    assert layers.count(0) > layers.count(1)


def test_tied_weights_stay_together():
    places = device_map("gpt-2", box(0.5, 0.5))
    assert places["transformer.wte"] == places["lm_head"]
    assert len(set(places.values())) == 2


def test_a_map_covers_every_parameter():
    graph = zoo.load("llama-3-8b")
    places = device_map("llama-3-8b", box(12, 8))
    for op in np.flatnonzero(graph.is_stored):
        assert any(graph.op_names[op].startswith(f"{module}.") for module in places)


@pytest.mark.parametrize("inside", [True, False])
def test_what_holds_layers_may_have_weights_of_its_own(inside, tmp_path):
    """A parameter and a buffer beside a list of layers, in a module or in the model itself."""
    torch, accelerate = pytest.importorskip("torch"), pytest.importorskip("accelerate")
    from placewise.importers.torch_export import from_torch

    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = torch.nn.Parameter(torch.randn(16))
            self.register_buffer("scale", torch.randn(16))
            self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(4)])

        def forward(self, x):
            x = x * self.scale + self.shift
            for layer in self.layers:
                x = x + layer(x).relu()
            return x

    module = (torch.nn.Sequential(Holder(), torch.nn.Linear(16, 4)) if inside else Holder()).eval()
    args = (torch.randn(2, 16),)
    expected = module(*args)
    fitted = engines.get("accelerate").fit(Problem(from_torch(module, args).collapse_parameters().graph, box(1, 1)))
    found = pieces(fitted.graph)
    placement = np.clip(found.of_op, 0, 2).astype(np.int32) % 2  # of no piece: on the first
    made = Plan(fitted, placement, None, 1.0, 0.0, "hand", "0")
    places = json.loads(engines.get("accelerate").export(made))
    assert places["0" if inside else ""] == 0
    accelerate.utils.check_device_map(module, places)
    stand_ins = {name: ["cpu", "disk"][place] for name, place in places.items()}
    placed = accelerate.dispatch_model(module, stand_ins, "cpu", offload_dir=tmp_path, force_hooks=True)
    assert torch.equal(placed(*args), expected)


def test_accelerate_runs_a_plan_on_what_stands_in():
    """Hooks do on a CPU and a disk what they do on two GPUs; a module that the map lacks would be found out."""
    pytest.importorskip("accelerate")
    fitted = engines.get("accelerate").fit(problem("squeezenet", box(1, 1)))
    found = pieces(fitted.graph)
    made = Plan(fitted, np.where(found.of_op < 4, 0, 1).astype(np.int32), None, 1.0, 0.0, "hand", "0")
    runner = engines.get("accelerate").run
    with runner(made, "squeezenet", {"gpu0": "cpu", "gpu1": "disk"}) as ready:
        for a, b in zip(ready.plain(), ready.placed(), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        told = ready.ran_on()
        assert set(told.values()) == {"gpu0", "gpu1"}
        assert all(device == made.devices[op] for op, device in told.items())
    with runner(made, "squeezenet", {"gpu0": "cpu", "gpu1": "cpu"}) as ready:
        assert ready.ran_on() == {}
    for devices, message in (
        ({}, "gpu0=cpu or gpu0=disk"),
        ({"gpu0": "tpu"}, "must be cpu, disk or cuda:0"),
        ({"gpu0": "cuda:²"}, "must be cpu, disk or cuda:0"),
    ):
        with pytest.raises(InvalidInput, match=message):
            runner(made, "squeezenet", devices).__enter__()
    with pytest.raises(Unsupported, match="only bundled models"):
        runner(made, "model.pt2", {}).__enter__()


def test_accelerate_takes_the_map():
    utils, accelerate = pytest.importorskip("accelerate.utils"), pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, GPT2Config

    with accelerate.init_empty_weights():
        model = AutoModelForCausalLM.from_config(GPT2Config())
    places = device_map("gpt-2", box(0.5, 0.5))
    utils.check_device_map(model, places)
    del places["transformer.h.3"]
    with pytest.raises(ValueError, match=r"transformer\.h\.3"):
        utils.check_device_map(model, places)


def test_weights_that_do_not_fit_are_not_for_accelerate():
    with pytest.raises(Unsupported, match="do not fit the accelerators"):
        engines.get("accelerate").fit(problem("llama-3-8b", box(8)))


# ---- llama.cpp -------------------------------------------------------------------------------------------------------


def slots_of(flags, layers):
    """The device of each layer and of the output, as `load_tensors` of llama.cpp assigns them."""
    given = shlex.split(flags.replace(" --no-op-offload", ""))
    values = dict(zip(given[::2], given[1::2], strict=True))
    on_gpu = int(values["-ngl"])
    shares = [float(x) for x in values.get("-ts", "1").split(",")]
    ends = np.cumsum(shares, dtype=np.float32) / np.float32(sum(shares))
    first, active = max(layers + 1 - on_gpu, 0), min(on_gpu, layers + 1)
    order = [int(name.removeprefix("CUDA")) for name in values.get("-dev", "CUDA0,CUDA1,CUDA2").split(",")]
    return [
        "CPU"
        if i < first
        else order[int(np.searchsorted(ends, np.float32(i - first) / np.float32(active), side="right"))]
        for i in range(layers + 1)
    ], values.get("-ot", "")


def buffer_of(tensor, slots, overrides):
    """Where llama.cpp puts a tensor: the first pattern that is found in its name decides, else its slot."""
    for override in filter(None, overrides.split(",")):
        pattern, _, target = override.rpartition("=")
        if re.search(pattern, tensor):
            return target if target == "CPU" else int(target.removeprefix("CUDA"))
    return slots[int(tensor.split(".")[1]) if tensor.startswith("blk.") else -1]


@pytest.mark.parametrize("last_of_first", [0, 9, 19, 30])
def test_llama_cpp_puts_layers_where_the_plan_does(last_of_first):
    found = by_hand("llama.cpp", "llama-3-8b", box(24, 24), layer_split(last_of_first))
    slots, overrides = slots_of(engines.get("llama.cpp").export(found), 32)
    assert slots == [0] * (last_of_first + 1) + [1] * (32 - last_of_first)
    assert overrides == ""


def test_an_output_that_is_the_embedding_takes_it_along():
    """It has the embedding's name, so llama.cpp is told of both; here it is where the first layer is, not the last."""
    fitted = engines.get("llama.cpp").fit(problem("gpt-2", box(24, 24)))
    found = pieces(fitted.graph)
    placement = np.isin(found.of_op, found.layers[1:]).astype(np.int32)
    placement = placement[fitted.first_of_unit][fitted.unit]
    placement[fitted.unit == fitted.unit[fitted.graph.op_index("transformer.wte.embedding")]] = 0
    flags = engines.get("llama.cpp").export(Plan(fitted, placement, None, 1.0, 0.0, "hand", "0"))
    assert flags.endswith("-ot '^(output|token_embd)=CUDA0'\n")


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=65, max_size=65), st.sampled_from([1, 6, 32]))
def test_llama_cpp_puts_every_tensor_where_the_plan_does(places, runs):
    """Whatever the plan: `runs` makes them longer, down to one device for all attention."""
    fitted = engines.get("llama.cpp").fit(problem("llama-3-8b", box(24, 24, 24)))
    found = pieces(fitted.graph)
    feed = feed_forward(fitted.graph, found) != ""
    placement = np.full(fitted.num_ops, 3, np.int32)
    rest = [places[i * runs // 32] for i in range(32)]
    for i, piece in enumerate(found.layers):
        placement[(found.of_op == piece) & ~feed] = rest[i]
        placement[(found.of_op == piece) & feed] = places[32 + i]
    placement[found.of_op > found.layers[-1]] = places[64]
    slots, overrides = slots_of(engines.get("llama.cpp").export(Plan(fitted, placement, None, 1.0, 0.0, "x", "0")), 32)
    name = [0, 1, 2, "CPU"]
    for i in range(32):
        for part in ("attn_q", "attn_output", "attn_norm", "ffn_norm"):
            assert buffer_of(f"blk.{i}.{part}.weight", slots, overrides) == name[rest[i]]
        for part in ("ffn_up", "ffn_down_exps", "ffn_gate_inp"):
            assert buffer_of(f"blk.{i}.{part}.weight", slots, overrides) == name[places[32 + i]]
    for tensor in ("output.weight", "output_norm.weight"):
        assert buffer_of(tensor, slots, overrides) == name[places[64]]


@pytest.mark.parametrize(
    ("model", "memory", "host"),
    [("llama-3-8b", (24, 24), 64), ("llama-3-8b", (6, 4, 3), 64), ("qwen3-30b-a3b-decode", (8, 8), 96),
     ("qwen3-30b-a3b-decode", (24,), 96), ("qwen3-30b-a3b-decode", (2, 0.5), 96)],
)  # fmt: skip
def test_caches_of_llama_cpp_are_where_the_plan_has_them(model, memory, host):
    """Attention is in its slot in every plan that the fit allows: they are on the CPU first, then on each GPU."""
    fitted = engines.get("llama.cpp").fit(problem(model, box(*memory, host=host)))
    found = pieces(fitted.graph)
    feed = feed_forward(fitted.graph, found) != ""
    for method in ("auto", "local-search"):
        made = plan(fitted, method, budget=Budget(evaluations=50))
        assert violations(fitted, made.placement) == []
        slots, overrides = slots_of(engines.get("llama.cpp").export(made), len(found.layers))
        name = [*range(len(memory)), "CPU"]
        rest = [name[made.placement[(found.of_op == piece) & ~feed][0]] for piece in found.layers]
        assert slots[:-1] == rest
        assert rest == sorted(rest, key=["CPU", *dict.fromkeys(d for d in rest if d != "CPU")].index)
        assert ".=" not in overrides
        embedding = fitted.graph.op_kinds.index("embedding")
        assert made.placement[embedding] == len(memory)


def test_a_card_too_small_for_the_head_has_layers_all_the_same():
    """The output has no cache, so it may be elsewhere than its slot; with GPT-2 it is the embedding."""
    for model, card, names in (("llama-3-8b-decode", 1, "^output"), ("gpt-2", 0.14, "^(output|token_embd)")):
        fitted = engines.get("llama.cpp").fit(problem(model, box(card)))
        found = pieces(fitted.graph)
        made = plan(fitted, "auto", budget=Budget(evaluations=50))
        slots, overrides = slots_of(engines.get("llama.cpp").export(made), len(found.layers))
        assert slots.count(0) > 10
        assert overrides.endswith(f"{names}=CPU")
        assert buffer_of("output.weight", slots, overrides) == "CPU"


def test_llama_cpp_keeps_the_first_layers_on_the_cpu(capsys):
    def device(piece):
        number = piece.rpartition(".")[2]
        return 1 if (number.isdigit() and int(number) < 12) or piece == "model.embed_tokens" else 0

    found = by_hand("llama.cpp", "llama-3-8b", box(24), device)
    assert engines.get("llama.cpp").export(found) == "-c 512 --no-op-offload -ngl 21\n"
    assert "the CPU compute where weights are in its memory" in capsys.readouterr().err


def test_llama_cpp_overrides_what_is_out_of_order(capsys):
    found = by_hand(
        "llama.cpp", "llama-3-8b", box(24), lambda piece: int(piece in ("model.layers.5", "model.layers.7"))
    )
    assert engines.get("llama.cpp").export(found) == "-c 512 --no-op-offload -ngl 33 -ot 'blk\\.(5|7)\\.=CPU'\n"
    assert "the KV caches of 2 layers stay in the slots" in capsys.readouterr().err


def test_llama_cpp_takes_gpus_in_the_order_of_the_layers_and_by_its_own_names(capsys):
    found = by_hand("llama.cpp", "llama-3-8b", box(24, 24), lambda piece: 1 - layer_split(19)(piece))
    assert engines.get("llama.cpp").export(found) == "-c 512 -ngl 33 -dev CUDA1,CUDA0 -ts 20,13\n"
    assert "are taken to be CUDA0" in capsys.readouterr().err
    gpus = [replace(device, name=f"Vulkan{1 - i}") for i, device in enumerate(found.problem.cluster.devices[:2])]
    cluster = full_mesh([*gpus, found.problem.cluster.devices[2]], 20e9)
    found = by_hand("llama.cpp", "llama-3-8b", cluster, lambda piece: 1 - layer_split(19)(piece))
    assert engines.get("llama.cpp").export(found) == "-c 512 -ngl 33 -ts 20,13\n"  # in the order that it has itself
    found = by_hand("llama.cpp", "llama-3-8b", cluster, layer_split(19))
    assert engines.get("llama.cpp").export(found) == "-c 512 -ngl 33 -dev Vulkan1,Vulkan0 -ts 20,13\n"
    assert capsys.readouterr().err == ""


def test_llama_cpp_is_told_the_servers_whose_devices_a_plan_uses():
    """Devices are numbered along the servers; their buffers have the number that the server knows."""
    names = ["RPC1[one:50052]", "RPC0[two:50052]"]
    gpus = [replace(device, name=name) for device, name in zip(box(24, 24).devices, names, strict=False)]
    cluster = full_mesh([*gpus, box(24, 24).devices[2]], 20e9)
    found = by_hand("llama.cpp", "llama-3-8b", cluster, lambda piece: layer_split(19)(piece) ^ (piece == "lm_head"))
    assert engines.get("llama.cpp").export(found) == (
        "-c 512 -ngl 33 --rpc one:50052,two:50052 -dev RPC1,RPC2 -ts 20,13 -ot '^output=RPC1[one:50052]'\n"
    )


def test_names_of_servers_are_no_commands_of_the_shell():
    names = ["RPC0[h:1;touch${IFS}x;']", "RPC1[two:50052]"]
    gpus = [replace(device, name=name) for device, name in zip(box(24, 24).devices, names, strict=False)]
    cluster = full_mesh([*gpus, box(24, 24).devices[2]], 20e9)
    found = by_hand("llama.cpp", "llama-3-8b", cluster, lambda piece: layer_split(19)(piece) ^ (piece == "lm_head"))
    words = shlex.split(engines.get("llama.cpp").export(found))
    assert words[words.index("--rpc") + 1] == "h:1;touch${IFS}x;',two:50052"
    assert words[words.index("-ot") + 1] == f"^output={names[0]}"


def test_the_context_of_llama_cpp_is_that_of_the_plan(capsys):
    found = by_hand("llama.cpp", "qwen3-30b-a3b-decode", box(80), lambda piece: 0)
    assert engines.get("llama.cpp").export(found) == "-c 513 -ngl 49\n"  # 512 in the cache, and one more
    fitted = engines.get("torch-offload").fit(Problem(zoo.load("llama-3-8b-decode"), box(24)))
    parts = Plan(fitted, np.zeros(fitted.num_ops, np.int32), None, 1.0, 0.0, "hand", "0")
    assert engines.get("llama.cpp").export(parts) == "-c 513 -ngl 33\n"
    capsys.readouterr()
    untold = replace(parts, problem=replace(fitted, graph=replace(fitted.graph, op_signatures=("",) * fitted.num_ops)))
    assert engines.get("llama.cpp").export(untold) == "-ngl 33\n"
    assert "does not tell its context" in capsys.readouterr().err


def test_llama_cpp_leaves_experts_in_host_memory():
    fitted = engines.get("llama.cpp").fit(problem("qwen3-30b-a3b-decode", box(24)))
    found = plan(fitted, "auto", budget=Budget(evaluations=300))
    flags = engines.get("llama.cpp").export(found)
    overrides = slots_of(flags, 48)[1]
    assert "ffn_(up|down|gate)" in overrides
    assert overrides.endswith("=CPU")


def test_patterns_match_the_names_that_gguf_gives():
    """Names as in gguf 0.19.0 (constants.py, TENSOR_NAMES), or of the package itself where it is installed."""
    names = ["attn_q", "attn_output", "attn_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down", "ffn_gate_inp"]
    names += ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"]
    with contextlib.suppress(ImportError):
        import gguf

        known = set(gguf.TENSOR_NAMES.values())
        assert {f"blk.{{bid}}.{name}" for name in names} <= known
    fitted = engines.get("llama.cpp").fit(problem("qwen3-30b-a3b-decode", box(24)))
    found = pieces(fitted.graph)
    experts = np.array([".mlp" in module for module in fitted.graph.op_modules])
    placement = np.where(experts & (found.of_op >= 0), 1, 0).astype(np.int32)[fitted.first_of_unit][fitted.unit]
    made = Plan(fitted, placement, None, 1.0, 0.0, "hand", "0")
    overrides = slots_of(engines.get("llama.cpp").export(made), 48)[1]
    pattern, _, target = overrides.rpartition("=")
    moved = [name for name in names if re.search(pattern, f"blk.7.{name}.weight")]
    assert target == "CPU"
    assert moved == [name for name in names if name.startswith("ffn_") and name != "ffn_norm"]


# ---- OpenVINO and ONNX Runtime ---------------------------------------------------------------------------------------


def test_openvino_has_every_op_by_name():
    fitted = engines.get("openvino").fit(of_a_file("alexnet", box(24)))
    assert fitted.execution.concurrency == "sequential"
    found = plan(fitted, "min-cut")
    told = json.loads(engines.get("openvino").export(found))
    assert set(told["affinity"]) == set(fitted.graph.op_names)
    assert told["device"].removeprefix("HETERO:").split(",") == list(
        dict.fromkeys(sorted(set(told["affinity"].values()), key=lambda name: name == "CPU"))
    )


def test_openvino_tells_two_gpus_apart():
    two = of_a_file("alexnet", box(24, 24))
    halves = (np.arange(two.num_ops) < two.num_ops // 2).astype(np.int32)[two.first_of_unit][two.unit]
    made = Plan(two, halves, None, 1.0, 0.0, "hand", "0")
    told = json.loads(engines.get("openvino").export(made))
    assert told["device"] == "HETERO:GPU.0,GPU.1"
    with pytest.raises(InvalidInput, match="two accelerators"):
        engines.get("onnxruntime").export(made)


def test_openvino_takes_no_list_for_a_name():
    kinds = {"GPU.0,CPU": "gpu", "GPU.1": "gpu", "CPU": "cpu", "CPU\x1b[31m,GPU": "cpu"}
    cluster = full_mesh([Device(name, kind, flops={"default": 1e12}) for name, kind in kinds.items()], 1e9)
    four = of_a_file("alexnet", cluster)
    made = Plan(four, np.arange(four.num_ops, dtype=np.int32) % 4, None, 1.0, 0.0, "hand", "0")
    assert json.loads(engines.get("openvino").export(made))["device"] == "HETERO:GPU.0,GPU.1,CPU,CPU2"


def test_graphs_without_modules_are_refused():
    from problems import problem_of

    bare = problem_of(np.ones((3, 2)), [(0, 1), (1, 2)])
    made = Plan(bare, np.zeros(3, np.int32), None, 1.0, 0.0, "hand", "0")
    for name in (*RANKED, "llama.cpp", "accelerate"):
        with pytest.raises(Unsupported):
            engines.get(name).export(made)


def test_onnx_runtime_has_one_accelerator():
    with pytest.raises(Unsupported, match="forbid all but one"):
        engines.get("onnxruntime").fit(problem("alexnet", box(24, 24)))
    fitted = engines.get("onnxruntime").fit(of_a_file("alexnet", box(24)))
    found = plan(fitted, "min-cut")
    told = json.loads(engines.get("onnxruntime").export(found))
    rules = told["session.name_based_layer_assignment"]
    assert rules.startswith("gpu(")
    assert rules.count(",") + 1 == sum(kind not in ("input", "parameter") for kind in fitted.graph.op_kinds)


def test_engines_that_know_ops_by_name_refuse_those_of_others():
    ops = problem("alexnet", box(24))
    parts = engines.get("torch-offload").fit(Problem(zoo.load("llama-3-8b-decode"), box(24)))
    for name in ("openvino", "onnxruntime", "onnxruntime-split"):
        for question, message in ((ops, "is an op of PyTorch's"), (parts, "parts of modules")):
            made = Plan(question, np.zeros(question.num_ops, np.int32), None, 1.0, 0.0, "hand", "0")
            with pytest.raises(InvalidInput, match=message):
                engines.get(name).export(made)
    with pytest.raises(InvalidInput, match="plan with `--engine torch`"):
        engines.get("torch").export(made)


# ---- what crosses ----------------------------------------------------------------------------------------------------


def test_what_crosses_is_counted_once_per_device():
    from problems import problem_of

    three = problem_of(np.ones((3, 3)), [(0, 1), (0, 2)], sizes=8.0, op_kinds=["view", "add", "add"])
    made = Plan(three, np.array([0, 1, 2]), None, 1.0, 0.0, "hand", "0")
    found = cut(made)
    assert (found.tensors, found.copies, found.bytes) == (1, 2, 16.0)
    assert found.views == ("op0",)
    assert "views cross" in describe_cut(made)
    assert describe_cut(replace(made, placement=np.zeros(3, np.int32))) == "nothing crosses between devices"


def test_the_command_of_the_docs_prints_what_they_say(run):
    """The plan is made as on the page, with a budget in evaluations."""
    plan_it = "plan llama-3-8b --cluster unequal-cards --engine vllm --objective throughput --evaluations 300"
    assert run(*plan_it.split(), "--out", "plan.json").code == 0
    told = run("export", "plan.json", "--to", "vllm")
    page = (Path(__file__).parents[1] / "docs" / "engines.md").read_text(encoding="utf-8")
    assert f"```\n{told.out}```" in page
    assert "cross" in told.err
    assert told.err.startswith("for vllm>=0.5.4\n")
