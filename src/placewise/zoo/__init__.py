"""Well-known models as code: right shapes, no weights, no framework. One module per family, imported when needed."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Final

from placewise.errors import InvalidInput

if TYPE_CHECKING:
    from placewise.graph import Graph

#: Name: (module, function, what it is).
_MODELS: Final = {
    "inception-v3": ("inception", "inception_v3", "image classifier with parallel branches: 32 images, float32"),
    "llama-3-8b": ("llama", "llama_3_8b", "language model reading a prompt: 512 tokens, bfloat16"),
    "llama-3-8b-decode": ("llama", "llama_3_8b_decode", "language model writing one token after 512, bfloat16"),
}


def names() -> list[str]:
    """The models that `load` knows."""
    return list(_MODELS)


def describe(name: str) -> str:
    """One line about a model."""
    return _entry(name)[2]


def load(name: str, **options: int) -> Graph:
    """Build a model. Options are counts, such as `batch`; each model has its own."""
    module, function, _ = _entry(name)
    build = getattr(importlib.import_module(f"placewise.zoo.{module}"), function)
    known = inspect.signature(build).parameters
    for option, value in options.items():
        if option not in known:
            raise InvalidInput(f"model {name!r} has no option {option!r}; it has {', '.join(known)}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidInput(f"model {name!r}: {option} = {value!r}: it must be a whole number, 1 or more")
    graph: Graph = build(**options)
    return graph


def num_parameters(graph: Graph) -> int:
    """How many weights a model has. In the zoo, weights have the dtype of the arithmetic; elsewhere they need not."""
    from placewise.zoo.builder import ITEM_BYTES

    held = zip(graph.op_kinds, graph.op_dtypes, graph.resident_bytes.tolist(), strict=True)
    return round(sum(size / ITEM_BYTES[dtype] for kind, dtype, size in held if kind == "parameter"))


def _entry(name: str) -> tuple[str, str, str]:
    if name not in _MODELS:
        raise InvalidInput(f"there is no model {name!r} in the zoo; it has {', '.join(_MODELS)}")
    return _MODELS[name]
