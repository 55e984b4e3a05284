"""Flags of llama.cpp, given to llama.cpp itself: its log has layers, caches and tensors where the plan has them.

PLACEWISE_LLAMA_CPP is the folder of its programs, built with `cmake -DGGML_RPC=ON` and `--target llama-completion
ggml-rpc-server`. Two servers on this machine are its GPUs.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from placewise import Budget, Problem, engines, plan
from placewise.cluster import Device, full_mesh
from placewise.engines.pieces import feed_forward, pieces
from placewise.plans import Plan

FOLDER = os.environ.get("PLACEWISE_LLAMA_CPP", "")
if not FOLDER:
    pytest.skip("PLACEWISE_LLAMA_CPP names no folder with llama.cpp's programs", allow_module_level=True)
gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
from placewise.importers.transformers import from_transformers  # noqa: E402

LAYERS, HIDDEN, FEED, HEADS, VOCABULARY, EXPERTS = 6, 128, 256, 4, 260, 4
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": FEED, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 128, "dtype": "float32",
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "dense": transformers.LlamaConfig(**SIZES),
    "tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "experts": transformers.MixtralConfig(**SIZES, num_local_experts=EXPERTS),
}


def tensors_of(kind):
    """Name to shape, as llama.cpp has them."""
    found = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,)}
    if kind != "tied":
        found["output"] = (VOCABULARY, HIDDEN)
    many, gate = ((EXPERTS,), "_exps") if kind == "experts" else ((), "")
    for i in range(LAYERS):
        found |= {f"blk.{i}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        found |= {f"blk.{i}.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
        found |= {f"blk.{i}.ffn_{name}{gate}": (*many, FEED, HIDDEN) for name in ("gate", "up")}
        found[f"blk.{i}.ffn_down{gate}"] = (*many, HIDDEN, FEED)
        if kind == "experts":
            found[f"blk.{i}.ffn_gate_inp"] = (EXPERTS, HIDDEN)
    return {f"{name}.weight": shape for name, shape in found.items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Kind to a file with random weights."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("models")
    for kind in CONFIGS:
        out = gguf.GGUFWriter(folder / f"{kind}.gguf", "llama")
        out.add_block_count(LAYERS)
        out.add_context_length(128)
        out.add_embedding_length(HIDDEN)
        out.add_feed_forward_length(FEED)
        out.add_head_count(HEADS)
        out.add_head_count_kv(HEADS)
        out.add_layer_norm_rms_eps(1e-6)
        out.add_rope_dimension_count(HIDDEN // HEADS)
        if kind == "experts":
            out.add_expert_count(EXPERTS)
            out.add_expert_used_count(2)
        out.add_tokenizer_model("llama")
        out.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a"])
        out.add_token_scores([0.0] * VOCABULARY)
        out.add_token_types([2, 3, 3, *[6] * 256, 1])
        for name, shape in tensors_of(kind).items():
            out.add_tensor(name, rng.normal(0, 0.1, shape).astype(np.float32))
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_tensors_to_file()
        out.close()
    return lambda kind: folder / f"{kind}.gguf"


@pytest.fixture(scope="module")
def cluster():
    """Two servers and a host."""
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    servers = [
        subprocess.Popen([Path(FOLDER) / "ggml-rpc-server", "-p", str(port)], stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL) for port in ports
    ]  # fmt: skip
    try:
        for port in ports:
            reached(port)
        devices = [Device(f"RPC0[127.0.0.1:{port}]", memory=2**30, flops={"default": 1e12}, bandwidth=1e11)
                   for port in ports]  # fmt: skip
        host = Device("cpu", kind="cpu", memory=2**36, flops={"default": 1e11}, bandwidth=1e10)
        yield lambda *memory: full_mesh(
            [*(Device(d.name, memory=m, flops=d.flops, bandwidth=d.bandwidth)
               for d, m in zip(devices, memory, strict=False)), host], 1e9, 1e-5,
        )  # fmt: skip
    finally:
        for server in servers:
            server.kill()
            server.wait()


def reached(port):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as asking:
            if asking.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("the server does not answer")


def told(kind, made, models):
    """What llama.cpp says: the device of each slot and of each cache, the buffer of each tensor, MiB of each buffer."""
    flags = shlex.split(engines.get("llama.cpp").export(made))
    program = [Path(FOLDER) / "llama-completion", "-m", models(kind), "-p", "a", "-n", "2", "-no-cnv", "-v", "-t", "1"]
    done = subprocess.run(  # a file that is mapped is told as a whole, not what is read of it
        [*program, "--no-warmup", "-lm", "none", *flags], stdin=subprocess.DEVNULL, capture_output=True, timeout=120,
        check=False, encoding="utf8", errors="replace",
    )  # fmt: skip
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-3000:]
    names = [device.name for device in made.problem.cluster.devices]
    names = {"CPU": "CPU"} | {f"RPC{i}": name for i, name in enumerate(n for n in names if n.startswith("RPC"))}
    slots = dict(re.findall(r"layer +(\d+) assigned to device (\w+)", log))
    caches = dict(re.findall(r"llama_kv_cache: layer +(\d+): dev = (\w+)", log))
    moved = dict(re.findall(r"tensor (\S+) \(.*buffer type overridden to (\S+)", log))
    sizes = {name: float(size) for name, size in re.findall(r"(\S+) model buffer size = +([\d.]+) MiB", log)}
    return (
        [names[slots[str(i)]] for i in range(LAYERS + 1)],
        [names[caches[str(i)]] for i in range(LAYERS)],
        {name: buffer.replace("CPU_REPACK", "CPU") for name, buffer in moved.items()},
        sizes,
    )


def agrees(kind, made, models):
    """Every tensor and cache is where the plan has it."""
    slots, caches, moved, sizes = told(kind, made, models)
    problem, found = made.problem, pieces(made.problem.graph)
    feed = feed_forward(problem.graph, found) != ""
    names = ["CPU" if device.kind == "cpu" else device.name for device in problem.cluster.devices]
    rest = [names[made.placement[(found.of_op == piece) & ~feed][0]] for piece in found.layers]
    sparse = [names[made.placement[(found.of_op == piece) & feed][0]] for piece in found.layers]
    head = names[made.placement[found.of_op == found.of_op.max()][0]]
    held = dict.fromkeys(names, 0.0)
    for name, shape in tensors_of(kind).items():
        layer = int(name.split(".")[1]) if name.startswith("blk.") else -1
        block = sparse if ".ffn_" in name and "norm" not in name else rest
        wanted = "CPU" if name == "token_embd.weight" else block[layer] if layer >= 0 else head
        if name != "token_embd.weight":  # where it is told by what the CPU holds
            assert moved.get(name, slots[layer]) == wanted, name
        held[wanted] += 4 * np.prod(shape) / 2**20
    if kind == "tied" and head != "CPU":
        held[head] += 4 * VOCABULARY * HIDDEN / 2**20  # a copy, or the only one
        held["CPU"] -= 4 * VOCABULARY * HIDDEN / 2**20 if "token_embd.weight" in moved else 0.0
    got = {name: sum(size for key, size in sizes.items() if key.startswith(name.removesuffix("]"))) for name in names}
    assert got == pytest.approx(held, abs=0.05)
    return caches, rest


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("share", [2.0, 0.6, 0.3])
def test_llama_cpp_does_as_planned(kind, share, models, cluster):
    graph = from_transformers(CONFIGS[kind], prompt=16, decode=True)
    memory = share * graph.resident_bytes.sum()
    fitted = engines.get("llama.cpp").fit(Problem(graph, cluster(0.6 * memory, 0.4 * memory)))
    caches, rest = agrees(kind, plan(fitted, "auto", budget=Budget(evaluations=200)), models)
    assert caches == rest


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("seed", range(4))
def test_llama_cpp_has_tensors_where_any_plan_has_them(kind, seed, models, cluster):
    """Whatever the plan: only caches stay with their slots. (Of 40 tokens, some plans say --no-op-offload.)"""
    fitted = engines.get("llama.cpp").fit(Problem(from_transformers(CONFIGS[kind], prompt=40), cluster(1e9, 1e9)))
    found, rng = pieces(fitted.graph), np.random.default_rng(seed)
    feed = feed_forward(fitted.graph, found) != ""
    placement = np.full(fitted.num_ops, 2, np.int32)
    for piece in found.layers:
        placement[(found.of_op == piece) & ~feed], placement[(found.of_op == piece) & feed] = rng.integers(0, 3, 2)
    placement[found.of_op > found.layers[-1]] = rng.integers(0, 3)
    agrees(kind, Plan(fitted, placement, None, 1.0, 0.0, "hand", "0"), models)
