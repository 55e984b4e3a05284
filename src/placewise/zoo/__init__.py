"""Published models: as graphs, which need no framework to be planned, and as code, to be run and exported anew.

`models` holds the code; `bundle` writes the graphs.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from placewise.errors import InvalidInput

if TYPE_CHECKING:
    from torch import nn

    from placewise.graph import Graph


class Model(NamedTuple):
    """What is run: which code, on inputs of which shapes, and how."""

    summary: str
    code: str  # file and function in `models`
    inputs: tuple[tuple[int, ...], ...]  # four axes are images; fewer are tokens or, at the end in training, labels
    task: str = "inference"  # "training": a whole step; "decode": one token after a cache of these


def _images(side: int) -> tuple[int, ...]:
    return (32, 3, side, side)


_LABELS: Final = (32,)
_WORDS: Final = (35, 64)  # steps x texts
_SENTENCES: Final = (30, 64)
_TEXTS: Final = (32, 128)  # texts x tokens
_PROMPT: Final = (1, 512)

_INFERENCE: Final = {
    "alexnet": Model("image classifier; 32 images, float32", "alexnet.AlexNet", (_images(224),)),
    "vgg-19": Model("image classifier; 32 images, float32", "vgg.VGG19", (_images(224),)),
    "squeezenet": Model("image classifier, 1.1; 32 images, float32", "squeezenet.SqueezeNet", (_images(224),)),
    "googlenet": Model("image classifier; 32 images, float32", "googlenet.GoogLeNet", (_images(224),)),
    "inception-v3": Model("image classifier; 32 images, float32", "inception.InceptionV3", (_images(299),)),
    "resnet-50": Model("image classifier; 32 images, float32", "resnet.resnet_50", (_images(224),)),
    "resnet-152": Model("image classifier; 32 images, float32", "resnet.resnet_152", (_images(224),)),
    "nasnet-a": Model("image classifier, large; 32 images, float32", "nasnet.nasnet_a_large", (_images(331),)),
    "rnnlm": Model("language model, 2 LSTM layers; 64 texts of 35 words, float32", "rnnlm.RNNLM", (_WORDS,)),
    "nmt-2": Model("translation, 2 + 2 LSTM layers; 64 pairs of 30 words, float32", "nmt.nmt_2", (_SENTENCES,) * 2),
    "nmt-4": Model("translation, 4 + 4 LSTM layers; 64 pairs of 30 words, float32", "nmt.nmt_4", (_SENTENCES,) * 2),
    "nmt-8": Model("translation, 8 + 8 LSTM layers; 64 pairs of 30 words, float32", "nmt.nmt_8", (_SENTENCES,) * 2),
    "gnmt": Model("translation, 8 + 8 LSTM layers; 64 pairs of 30 words, float32", "gnmt.GNMT", (_SENTENCES,) * 2),
    "bert-base": Model("text encoder; 32 texts of 128 tokens, float32", "transformer.bert_base", (_TEXTS,)),
    "gpt-2": Model("language model; reads 512 tokens, float32", "transformer.gpt_2", (_PROMPT,)),
    "llama-3-8b": Model("language model; reads 512 tokens, bfloat16", "transformer.llama_3_8b", (_PROMPT,)),
    "qwen3-30b-a3b": Model("mixture of experts; reads 512 tokens, bfloat16", "transformer.qwen3_30b_a3b", (_PROMPT,)),
}


def _writing(name: str) -> Model:
    reading = _INFERENCE[name]
    return reading._replace(
        summary=reading.summary.replace("reads 512 tokens", "writes a token after 512"), task="decode"
    )


def _training(name: str, labels: tuple[int, ...], code: str | None = None) -> Model:
    model = _INFERENCE[name]
    sizes = model.summary.partition("; ")[2]
    return Model(f"training step; {sizes}", code or model.code, (*model.inputs, labels), "training")


MODELS: Final[dict[str, Model]] = {
    **_INFERENCE,
    "gpt-2-decode": _writing("gpt-2"),
    "llama-3-8b-decode": _writing("llama-3-8b"),
    "qwen3-30b-a3b-decode": _writing("qwen3-30b-a3b"),
    "inception-v3-train": _training("inception-v3", _LABELS, "inception.inception_v3_for_training"),
    "resnet-50-train": _training("resnet-50", _LABELS),
    "resnet-152-train": _training("resnet-152", _LABELS),
    "nasnet-a-train": _training("nasnet-a", _LABELS),
    "rnnlm-train": _training("rnnlm", _WORDS),
    "nmt-2-train": _training("nmt-2", _SENTENCES),
    "nmt-4-train": _training("nmt-4", _SENTENCES),
    "nmt-8-train": _training("nmt-8", _SENTENCES),
    "gnmt-train": _training("gnmt", _SENTENCES),
    "bert-base-train": _training("bert-base", _LABELS, "transformer.bert_base_for_classification"),
}

GRAPHS: Final = Path(__file__).parent / "graphs"
#: Every model knows as many tokens, and every classifier as many classes.
_TOKENS: Final = 10_000
_CLASSES: Final = 2


def names() -> list[str]:
    """The models that `load` knows."""
    return list(MODELS)


def describe(name: str) -> str:
    """One line about a model."""
    return _entry(name).summary


def facts(name: str) -> dict[str, float]:
    """How many ops and parameters a model has, its FLOPs, and the bytes of its weights and state."""
    _entry(name)
    return dict(_index()[name])


def load(name: str) -> Graph:
    """The graph of a model."""
    from placewise.files import load_graph

    _entry(name)
    return load_graph(GRAPHS / f"{name}.json.gz")


def module(name: str, *, device: str = "meta") -> tuple[nn.Module, tuple[Any, ...]]:
    """The code of a model and arguments to call it with; on the meta device they have shapes and no values.

    For training it returns the loss, and the last argument holds the labels. For decoding, the arguments after the
    first are the keys and values of the tokens before.
    """
    from placewise.importers import require

    torch = require("torch", "torch")
    model = _entry(name)
    file, _, function = model.code.partition(".")
    if file == "transformer":
        require("transformers", "transformers")
    with torch.device(device):
        code: nn.Module = getattr(import_module(f"placewise.zoo.models.{file}"), function)()
        args = [torch.randn(shape) if len(shape) == 4 else torch.randint(_TOKENS, shape) for shape in model.inputs]
        if model.task == "training":
            from placewise.zoo.models.supervised import Supervised

            return Supervised(code).train(), (*args[:-1], args[-1] % _CLASSES)
        if model.task == "decode":
            from placewise.zoo.models.transformer import Decoding

            writer = Decoding(code)
            return writer.eval(), (args[0][:, :1], *writer.cache(*model.inputs[0]))
    return code.eval(), tuple(args)


@cache
def _index() -> dict[str, dict[str, float]]:
    return cast("dict[str, dict[str, float]]", json.loads((GRAPHS / "index.json").read_text()))


def _entry(name: str) -> Model:
    if name not in names():
        raise InvalidInput(f"there is no model {name!r:.60} in the zoo; it has {', '.join(MODELS)}")
    return MODELS[name]
