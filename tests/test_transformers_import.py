"""Models of transformers from their configuration: work by hand, caches as state, nothing that leaves the machine."""

import json
import socket

import numpy as np
import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import placewise as pw  # noqa: E402
from placewise.cli import app  # noqa: E402
from placewise.errors import InvalidInput, Unsupported  # noqa: E402
from placewise.graph import Graph  # noqa: E402
from placewise.importers.assembly import kinds_without_formula  # noqa: E402

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64,
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def llama(**changes) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**SMALL | {"dtype": "bfloat16"} | changes)


def work_of(graph: Graph, *kinds: str) -> float:
    return float(sum(f for f, kind in zip(graph.flops.tolist(), graph.op_kinds, strict=True) if kind in kinds))


def stored(graph: Graph, kind: str) -> dict[str, float]:
    return {name: size for name, k, size in zip(graph.op_names, graph.op_kinds, graph.resident_bytes, strict=True)
            if k == kind}  # fmt: skip


def num_parameters(config) -> int:
    import torch

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(weight.numel() for weight in model.parameters())


def test_a_llama_reads_a_prompt():
    graph = pw.from_transformers(llama(), batch=2, prompt=10)
    rows, hidden, kv, mlp = 2 * 10, 64, 32, 96
    per_layer = 2 * rows * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * mlp)
    assert work_of(graph, "matmul") == 2 * per_layer + 2 * rows * hidden * 100 + rope(10)
    scores = 2 * 4 * 10 * 10
    assert work_of(graph, "attention") == 2 * (2 * scores * 32 + 5 * scores)
    weights = stored(graph, "parameter")
    assert weights.pop("model.rotary_emb.inv_freq") == 8 * 4
    assert sum(weights.values()) == 2 * num_parameters(llama())
    where = graph.op_index("model.layers.1.self_attn.q_proj.linear")
    assert graph.op_modules[where] == "model.layers.1.self_attn.q_proj"
    assert graph.op_dtypes[where] == "bfloat16"
    assert not kinds_without_formula(graph)
    assert not stored(graph, "state")
    assert graph.name == "llama"


def rope(tokens: int) -> float:
    """Where angles are made by a product with one column, that counts as a product too."""
    graph = pw.from_transformers(llama(num_hidden_layers=0), prompt=tokens)
    return work_of(graph, "matmul") - 2 * tokens * 64 * 100


def test_a_llama_writes_a_token():
    graph = pw.from_transformers(llama(), batch=3, prompt=20, decode=True)
    caches = stored(graph, "state")
    assert caches == {
        f"model.layers.{layer}.self_attn.{part}_cache": 3 * 2 * 20 * 16 * 2
        for layer in range(2) for part in ("key", "value")
    }  # fmt: skip
    assert graph.op_modules[graph.op_index("model.layers.1.self_attn.key_cache")] == "model.layers.1.self_attn"
    scores = 3 * 4 * 1 * 21
    assert work_of(graph, "attention") == 2 * (2 * scores * 32 + 5 * scores)
    readers = graph.consumers[np.isin(graph.edge_producer, np.flatnonzero([k == "state" for k in graph.op_kinds]))]
    assert {graph.op_kinds[op] for op in readers} == {"concat"}
    assert graph.name == "llama-decode"


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (transformers.Qwen3MoeConfig(**SMALL, **MOE), 2 * 2 * (2 * 64 * 32 + 32 * 64)),
        (transformers.MixtralConfig(**SMALL, num_local_experts=4), 2 * 2 * (2 * 64 * 96 + 96 * 64)),
        (transformers.Qwen3MoeConfig(**SMALL, **MOE, dtype="bfloat16"), 2 * 2 * (2 * 64 * 32 + 32 * 64)),
    ],
    ids=["qwen3-moe", "mixtral", "qwen3-moe-bfloat16"],
)
def test_experts_have_flops(config, experts, decode):
    """Each token is seen by two experts, of three products each, in two layers."""
    graph = pw.from_transformers(config, prompt=12, decode=decode)
    assert work_of(graph, "grouped_matmul") == 2 * experts * (1 if decode else 12)
    assert not kinds_without_formula(graph)
    assert len(stored(graph, "state")) == (4 if decode else 0)


def test_gpt2_ties_its_words():
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=32)
    graph = pw.from_transformers(config, prompt=8)
    assert sum(stored(graph, "parameter").values()) == 4 * num_parameters(config)
    assert "lm_head.weight" not in graph.op_names
    # Per layer and token: 64 x (192 + 64 + 256 + 256) and the biases; then the words.
    biases = 192 + 64 + 256 + 64
    assert work_of(graph, "matmul") == 8 * (2 * (2 * 64 * 768 + biases) + 2 * 64 * 100)
    assert len(stored(pw.from_transformers(config, prompt=8, decode=True), "state")) == 4


def test_bert_does_not_decode():
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=100
    )
    graph = pw.from_transformers(config, prompt=8)
    assert work_of(graph, "attention") == 2 * (4 * 64) * 32 + 5 * (4 * 64)
    with pytest.raises(Unsupported, match="leave decode out"):
        pw.from_transformers(config, prompt=8, decode=True)


def test_images_are_of_the_size_in_the_configuration():
    config = transformers.ViTConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=16
    )
    graph = pw.from_transformers(config, batch=3)
    assert "input() -> float32[3,3,32,32]" in graph.op_signatures
    assert work_of(graph, "conv") == 3 * (2 * 3 * 256 * 64 * 4 + 64 * 4)


def test_training_returns_the_loss_of_the_model():
    graph = pw.from_transformers(llama(), prompt=8, training="sgd")
    assert graph.name == "llama-training"
    assert "cross_entropy" in graph.op_kinds or "nll_loss" in graph.op_kinds
    assert graph.op_kinds.count("sgd") == 2 * 9 + 3
    forward = pw.from_transformers(llama(), prompt=8)
    assert work_of(graph, "matmul") == pytest.approx(3 * work_of(forward, "matmul"), rel=0.01)


def test_llama_3_8b_in_full():
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, dtype="bfloat16",
    )  # fmt: skip
    graph = pw.from_transformers(config, prompt=512)
    assert sum(stored(graph, "parameter").values()) == 2 * 8_030_261_248 + 64 * 4
    products = 2 * 512 * (8_030_261_248 - 128256 * 4096 - 65 * 4096)
    assert work_of(graph, "matmul") == pytest.approx(products, rel=1e-6)


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tiny-llama").mkdir()
    content = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", **SMALL}
    (tmp_path / "tiny-llama" / "config.json").write_text(json.dumps(content))
    return tmp_path / "tiny-llama"


def test_a_folder_its_file_and_its_configuration_are_the_same(folder):
    graph = pw.from_transformers(folder, prompt=8)
    assert graph.name == "tiny-llama"
    assert pw.from_transformers(str(folder / "config.json"), prompt=8).digest == graph.digest
    same = pw.from_transformers(transformers.AutoConfig.from_pretrained(folder), prompt=8, name="tiny-llama")
    assert same.digest == graph.digest


def test_a_folder_is_a_model_for_every_command(folder, monkeypatch):
    with pytest.raises(InvalidInput, match="at most 64 tokens"):  # 512 by default
        pw.load_problem(folder, "two-gpus-one-host")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    assert pw.plan(pw.load_problem(folder, "two-gpus-one-host"), "single").problem.graph.name == "tiny-llama"


def test_the_command_writes_a_graph_file(folder, capsys):
    from placewise.files import load_graph

    out = folder / "graph.json.gz"
    arguments = ["import", str(folder), "--out", str(out), "--prompt", "20", "--batch", "3", "--decode", "--name", "x"]
    with pytest.raises(SystemExit) as done:
        app(arguments)
    assert done.value.code == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("x: ")
    assert "15.0 KiB of state" in shown.out
    assert f"wrote {out}" in shown.err
    assert load_graph(out).digest == pw.from_transformers(folder, batch=3, prompt=20, decode=True, name="x").digest


def test_the_command_says_why_a_backward_pass_is_mirrored(folder, capsys, monkeypatch):
    from placewise import cli
    from placewise.importers import training

    def fails(*_):
        raise RuntimeError("not today")

    monkeypatch.setattr(training, "_traced", fails)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["placewise", "import", str(folder), "--prompt", "8", "--training", "sgd",
                                     "--out", str(folder / "g.json")])  # fmt: skip
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert "warning: tiny-llama: the backward pass is mirrored from the forward pass: " in capsys.readouterr().err


def test_kinds_without_a_formula_are_listed(tmp_path, capsys):
    import torch

    class Odd(torch.nn.Module):
        def forward(self, x):
            return torch.special.i0(x)

    torch.export.save(torch.export.export(Odd(), (torch.zeros(3),), strict=False), tmp_path / "odd.pt2")
    with pytest.raises(SystemExit):
        app(["import", str(tmp_path / "odd.pt2"), "--out", str(tmp_path / "g.json"), "--json"])
    shown = capsys.readouterr()
    assert "aten.special_i0 (1)" in shown.err
    assert json.loads(shown.out)["ops"] == 2


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"auto_map": {"AutoModel": "evil.Model"}}, "not run"),
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"num_hidden_layers": 10**9}, "at most 2000"),
        ({"num_attention_heads": 0}, ""),
        ({"hidden_size": "wide"}, ""),
        ({"vocab_size": -5}, ""),
        ({"architectures": 2}, "must be a list of names, found 2"),
    ],
)
def test_wrong_configurations_are_told(folder, change, complaint):
    content = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises((InvalidInput, Unsupported), match=rf"tiny-llama.*{complaint}"):
        pw.from_transformers(folder, prompt=8)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"model_type": "t5", "num_decoder_layers": 200_000}, "num_decoder_layers"),
        ({"model_type": "qwen2", "num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"model_type": "gpt2", "n_layer": 10**9}, "n_layer"),
        ({"model_type": "bart", "encoder_layers": 10**9}, "encoder_layers"),
        ({"model_type": "mixtral", "num_local_experts": 10**9}, "num_local_experts"),
        ({"model_type": "swin", "depths": [2, 10**9]}, "depths"),
        ({"model_type": "albert", "inner_group_num": 10**9}, "inner_group_num"),
        ({"model_type": "bert", "num_labels": 10**9}, "num_labels"),
        ({"model_type": "llava", "text_config": {"num_hidden_layers": 10**9}}, r"text_config\.num_hidden_layers"),
        ({"model_type": "bert", "num_hidden_layers": 1e9}, "num_hidden_layers"),
    ],
)
def test_models_without_end_are_refused_at_once(tmp_path, config, field):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match=f"{field}: must be at most"):
        pw.from_transformers(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "num_hidden_layers": -1},
        {"model_type": "gpt2", "n_layer": -1},
        {"model_type": "bart", "encoder_layers": -1},
        {"model_type": "llava", "text_config": {"num_hidden_layers": -1}},
    ],
)
def test_less_than_no_layers_are_refused(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match=r"layers?: must be zero or more, found -1"):
        pw.from_transformers(tmp_path)


def test_layers_may_be_counted_from_the_end():
    from placewise.importers import transformers as reader

    reader._check_counts({"vision_feature_layer": -2, "vision_feature_layers": [-2, -5]})


def test_the_reason_of_a_wrong_value_is_told(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "many"}))
    with pytest.raises(InvalidInput, match=r"field 'hidden_size': \w+.*many"):
        pw.from_transformers(tmp_path)


def test_modules_are_counted(monkeypatch):
    from placewise.importers import transformers as reader

    monkeypatch.setattr(reader, "MAX_MODULES", 10)
    with pytest.raises(InvalidInput, match="more than 10 modules"):
        pw.from_transformers(llama(), prompt=8)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[" * 100_000, "[" * 900 + "]" * 900, '{"model_type": 3}'])
def test_what_is_no_configuration_is_told(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(InvalidInput, match="tiny-llama"):
        pw.from_transformers(folder)


def test_what_is_not_there_is_not_looked_for_elsewhere(tmp_path):
    for missing in ("meta-llama/Meta-Llama-3-8B", tmp_path):
        with pytest.raises(InvalidInput, match=r"there is no (such file|config.json in this folder)"):
            pw.from_transformers(missing)


def test_wrong_requests_are_told():
    for wrong in ({"prompt": 0}, {"batch": True}, {"prompt": "8"}):
        with pytest.raises(InvalidInput, match="whole number, 1 or more"):
            pw.from_transformers(llama(), **wrong)
    with pytest.raises(InvalidInput, match=r"5\.12e\+20 tokens, at most 2,147,483,648"):
        pw.from_transformers(llama(), batch=10**18)
    for size in (-5, 10**15):
        with pytest.raises(InvalidInput, match=r"images cannot be of this size|cannot be built"):
            pw.from_transformers(transformers.ViTConfig(num_hidden_layers=1, image_size=size))
    with pytest.raises(InvalidInput, match="exclude each other"):
        pw.from_transformers(llama(), decode=True, training="adam")
