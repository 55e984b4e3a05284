"""The models of the zoo, as code, have the published sizes and shapes. Large ones exist on the meta device only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

from placewise import zoo  # noqa: E402
from placewise.zoo.models import (  # noqa: E402
    alexnet,
    gnmt,
    googlenet,
    inception,
    lstm,
    nasnet,
    nmt,
    resnet,
    rnnlm,
    squeezenet,
    transformer,
    vgg,
)


def inception_v3_with_both_heads() -> nn.Module:
    return inception.InceptionV3(auxiliary=True)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build().eval()


def parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def layers(model: nn.Module) -> Counter[type]:
    return Counter(type(module) for module in model.modules())


# ---- image classifiers -----------------------------------------------------------------------------------------------


# Parameters and multiply-adds as torchvision's documentation gives them for its weights; those of NASNet-A are in
# tables 2 and 3 of the paper, to three digits, and exact in the releases of Keras ("trainable").
@pytest.mark.parametrize(
    ("build", "weights", "side", "multiply_adds"),
    [
        (alexnet.AlexNet, 61_100_840, 224, 0.71e9),
        (vgg.VGG19, 143_667_240, 224, 19.63e9),
        (squeezenet.SqueezeNet, 1_235_496, 224, 0.35e9),
        (resnet.resnet_50, 25_557_032, 224, 4.09e9),
        (resnet.resnet_152, 60_192_808, 224, 11.51e9),
        (googlenet.GoogLeNet, 6_624_904, 224, 1.50e9),
        (inception.InceptionV3, 23_834_568, 299, 5.71e9),
        (inception_v3_with_both_heads, 27_161_264, 299, 5.71e9),
        (nasnet.nasnet_a_large, 88_753_150, 331, 23.8e9),
        (nasnet.nasnet_a_mobile, 5_289_978, 224, 0.564e9),
    ],
)
def test_an_image_classifier_has_the_published_size(
    build: Callable[[], nn.Module], weights: int, side: int, multiply_adds: float
) -> None:
    model = on_meta(build)
    assert parameters(model) == weights
    with FlopCounterMode(display=False) as counter:
        logits = model(torch.empty(2, 3, side, side, device="meta"))
    assert {tuple(head.shape) for head in (logits if isinstance(logits, tuple) else [logits])} == {(2, 1000)}
    assert counter.get_total_flops() / 2 / 2 == pytest.approx(multiply_adds, rel=0.01)


@pytest.mark.parametrize(
    ("build", "convolutions", "matrices", "norms"),
    [
        (alexnet.AlexNet, 5, 3, 0),
        (vgg.VGG19, 16, 3, 0),
        (squeezenet.SqueezeNet, 1 + 8 * 3 + 1, 0, 0),
        (resnet.resnet_50, 49 + 4, 1, 53),  # the four at shortcuts do not count among the 50 layers
        (resnet.resnet_152, 151 + 4, 1, 155),
        (googlenet.GoogLeNet, 3 + 9 * 6, 1, 57),
        (inception.InceptionV3, 94, 1, 94),
        (inception_v3_with_both_heads, 96, 2, 96),
    ],
)
def test_an_image_classifier_has_the_published_layers(
    build: Callable[[], nn.Module], convolutions: int, matrices: int, norms: int
) -> None:
    count = layers(on_meta(build))
    assert (count[nn.Conv2d], count[nn.Linear], count[nn.BatchNorm2d]) == (convolutions, matrices, norms)


def test_inception_blocks_have_the_published_shapes() -> None:
    """Table 1 of the paper."""
    model = on_meta(inception.InceptionV3)
    seen = {}
    for name in ("Conv2d_2b_3x3", "maxpool2", "Mixed_5d", "Mixed_6e", "Mixed_7c"):
        model.get_submodule(name).register_forward_hook(
            lambda _, __, out, name=name: seen.update({name: tuple(out.shape[1:])})
        )
    model(torch.empty(1, 3, 299, 299, device="meta"))
    assert seen == {
        "Conv2d_2b_3x3": (64, 147, 147), "maxpool2": (192, 35, 35), "Mixed_5d": (288, 35, 35),
        "Mixed_6e": (768, 17, 17), "Mixed_7c": (2048, 8, 8),
    }  # fmt: skip


def test_nasnet_cells_have_the_published_shapes() -> None:
    """6 @ 4032: six normal cells a stage, 4032 channels at the end, for which 331 pixels became 11."""
    model = on_meta(nasnet.nasnet_a_large)
    assert layers(model)[nasnet.Normal] == 18
    assert layers(model)[nasnet.Reduction] == 4
    assert model.fc.in_features == 4032
    seen = []
    for stage in model.stages:
        stage[-1].register_forward_hook(lambda _, __, out: seen.append(tuple(out.shape[1:])))
    model(torch.empty(1, 3, 331, 331, device="meta"))
    assert seen == [(1008, 42, 42), (2016, 21, 21), (4032, 11, 11)]


def test_nasnet_runs_for_images_of_any_side() -> None:
    model = nasnet.NASNet(cells=1, channels=8, stem=4, skips_reductions=True, classes=3).eval()
    for side in (64, 65, 79):
        assert model(torch.randn(1, 3, side, side)).isfinite().all()


# ---- recurrent models ------------------------------------------------------------------------------------------------


def lstm_weights(inputs: int, units: int) -> int:
    return 4 * units * (inputs + units + 1)


def test_a_cell_computes_what_torch_computes() -> None:
    ours, theirs = lstm.LSTMCell(3, 5), nn.LSTMCell(3, 5)
    order = torch.arange(20).reshape(4, 5)[[0, 2, 1, 3]].flatten()  # torch: input, forget, candidate, output
    with torch.no_grad():
        theirs.weight_ih.copy_(ours.gates.weight[order, :3])
        theirs.weight_hh.copy_(ours.gates.weight[order, 3:])
        theirs.bias_ih.copy_(ours.gates.bias[order])
        theirs.bias_hh.zero_()
    x, state = torch.randn(2, 3), (torch.randn(2, 5), torch.randn(2, 5))
    for mine, other in zip(ours(x, state), theirs(x, state), strict=True):
        torch.testing.assert_close(mine, other)


def test_rnnlm_has_the_size_of_its_layers() -> None:
    model = on_meta(rnnlm.RNNLM)
    assert parameters(model) == 10_000 * 2048 + 2 * lstm_weights(2048, 2048) + (2048 + 1) * 10_000
    zaremba = on_meta(lambda: rnnlm.RNNLM(10_000, units=1500))
    assert parameters(zaremba) == pytest.approx(66e6, abs=0.5e6)  # "large" in the paper


@pytest.mark.parametrize("depth", [2, 4, 8])
def test_nmt_has_the_size_of_its_layers(depth: int) -> None:
    tables, attention = 3 * 32_000 * 1024, 3 * 1024 * 1024
    first = lstm_weights(2048, 1024)
    assert parameters(on_meta(lambda: nmt.NMT(depth))) == (
        tables + attention + first + (2 * depth - 1) * lstm_weights(1024, 1024)
    )


def test_gnmt_has_the_size_of_its_layers() -> None:
    tables, attention = 3 * 32_000 * 1024 + 32_000, 2 * 1024 * 1024 + 1024
    encoder = 2 * lstm_weights(1024, 1024) + lstm_weights(2048, 1024) + 6 * lstm_weights(1024, 1024)
    assert parameters(on_meta(gnmt.GNMT)) == tables + attention + encoder + 8 * lstm_weights(2048, 1024)


@pytest.mark.parametrize("build", [lambda: nmt.NMT(2, 20, 8), lambda: gnmt.GNMT(3, 20, 8)])
def test_a_translation_depends_on_the_whole_source_and_the_words_before(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = build().eval()
    source, target = torch.randint(20, (5, 3)), torch.randint(20, (4, 3))
    logits = model(source, target)
    assert logits.shape == (4, 3, 20)
    for word in range(5):
        other = source.clone()
        other[word] = (other[word] + 1) % 20
        assert not torch.equal(model(other, target)[0], logits[0])
    target[2] = (target[2] + 1) % 20
    changed = model(source, target)
    assert torch.equal(changed[:2], logits[:2])
    assert not torch.equal(changed[2], logits[2])
    assert not torch.equal(changed[3], logits[3])


# ---- transformers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "weights"),
    [
        (transformer.bert_base, 109_482_240),
        (transformer.bert_base_for_classification, 109_482_240 + 2 * 769),
        (transformer.gpt_2, 124_439_808),  # the matrix of words, which is used twice, counts once
        (transformer.llama_3_8b, 8_030_261_248),
        (transformer.qwen3_30b_a3b, 30_532_122_624),
    ],
)
def test_a_transformer_has_the_size_of_its_release(build: Callable[[], nn.Module], weights: int) -> None:
    assert parameters(on_meta(build)) == weights


def test_a_token_is_written_as_if_all_were_read() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    writer = transformer.Decoding(transformer._built("LlamaForCausalLM", config)).eval()
    tokens = torch.randint(50, (3, 6))
    assert [tuple(part.shape) for part in writer.cache(3, 5)] == [(3, 2, 5, 4)] * 4
    with torch.no_grad():
        layers = writer.model(tokens[:, :5], use_cache=True).past_key_values.layers
        cache = [part for layer in layers for part in (layer.keys, layer.values)]
        for _ in range(2):  # the cache that is handed in stays what it is
            torch.testing.assert_close(writer(tokens[:, 5:], *cache)[:, 0], writer.model(tokens).logits[:, 5])


# ---- docs ------------------------------------------------------------------------------------------------------------


def test_the_docs_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs/zoo.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    exec(code, {})
    stored = 161 + 2 * 53  # weights, and what each batch norm keeps
    assert f"'resnet-50-of-one': {stored + 175} ops" in capsys.readouterr().out


def test_the_docs_name_every_model() -> None:
    page = (Path(__file__).parents[1] / "docs/zoo.md").read_text()
    assert {name for name in zoo.names() if f"`{name.removesuffix('-train')}`" not in page} == set()
