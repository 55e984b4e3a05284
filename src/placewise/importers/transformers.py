"""Models of Hugging Face transformers as graphs, from their configuration alone: no weights, no network, no other code.

Two graphs matter for a language model: it reads a prompt at once (prefill), or writes one token after it (decode), with
the keys and values of all tokens before as state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from placewise.errors import InvalidInput, PlacewiseError, Unsupported, naming
from placewise.graph import Graph
from placewise.importers import require
from placewise.importers.torch_export import export, first_line, quiet, read
from placewise.importers.training import training_step

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

MAX_CONFIG_BYTES = 4 * 1024**2
#: Each layer is built and traced; what has more is no model but an attempt to keep us busy. So are so many modules, as
#: layers may have experts, and these layers again.
MAX_LAYERS = 2000
MAX_MODULES = 200_000
MAX_LABELS = 200_000
#: Fields that say how often something is built, or written into the configuration itself.
_COUNTS: Final = re.compile(r"(layers?|blocks?|depths?|experts|stages|groups?|repeats?|group_num|num_labels)$")
#: In all prompts together; with more, torch cannot count the bytes of what a layer makes.
MAX_TOKENS = 2**31
_CACHE = "past_key_values"


def from_transformers(
    model: str | Path | PretrainedConfig,
    *,
    batch: int = 1,
    prompt: int = 512,
    decode: bool = False,
    training: str | None = None,
    name: str | None = None,
) -> Graph:
    """The graph of a model: a configuration, its file (config.json), or the directory that holds it.

    It is the graph of `batch` prompts of `prompt` tokens each being read or, with `decode`, of one more token being
    written after them. With `training` the name of an optimizer, it is a training step on the prompts. Models of images
    see `batch` of them, of the size in the configuration.
    """
    if decode and training:
        raise InvalidInput("a model is trained on whole prompts: decode and training exclude each other")
    for what, count in (("batch", batch), ("prompt", prompt)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InvalidInput(f"{what} (--{what}): must be a whole number, 1 or more, found {count!r:.60}")
    tokens = batch * prompt
    if tokens > MAX_TOKENS:
        raise InvalidInput(f"--batch, --prompt: these are {tokens:.3g} tokens, at most {MAX_TOKENS:,} are possible")
    require("torch", "transformers")
    require("transformers", "transformers")
    with naming(model) if isinstance(model, (str, Path)) else nullcontext(), _alone():
        with quiet():
            config, usual = _config(model)
            _check(config, prompt + decode)
            built = _built(config)
        if decode:
            return _decoding(built, name or f"{usual}-decode", batch, prompt)
        inputs = _inputs(built, batch, prompt)
        if training:
            return training_step(built, (), inputs | _labels(built, inputs), optimizer=training, name=name or usual)
        return read(export(built, (), inputs), name or usual).graph


def with_weights(model: str | Path) -> PreTrainedModel:
    """The model of a configuration's file on the CPU, with the random weights that it begins with."""
    require("torch", "transformers")
    require("transformers", "transformers")
    with naming(model), _alone(), quiet():
        return _built(_config(model)[0], "cpu")


def random_inputs(model: PreTrainedModel, batch: int, tokens: int) -> dict[str, Any]:
    """What a model of text is called with: so many tokens, any of its vocabulary."""
    import torch

    shown = _inputs(model, batch, tokens)
    ids = torch.randint(model.config.get_text_config().vocab_size, (batch, tokens))
    return {name: ids if isinstance(value, torch.Tensor) else value for name, value in shown.items()}


# ---- the model -------------------------------------------------------------------------------------------------------


def _config(model: str | Path | PretrainedConfig) -> tuple[PretrainedConfig, str]:
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(model, PretrainedConfig):
        _check_counts(model.to_dict())
        return model, str(model.model_type) or type(model).__name__
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InvalidInput("there is no config.json in this folder" if path.is_dir() else "there is no such file")
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise InvalidInput("too large for a configuration")
        data = json.loads(file.read_bytes())
        _check_counts(data)  # before anything is made of them
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"not a configuration in JSON: {first_line(error)}") from None
    if not isinstance(data, dict) or "model_type" not in data:
        raise InvalidInput('not a configuration of transformers: it has no "model_type"')
    if "auto_map" in data:
        raise Unsupported("its model is code that comes with it, which is not run")
    try:
        config = AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except PlacewiseError:
        raise
    except Exception as error:  # whatever a wrong value leads to
        raise InvalidInput(f"{first_line(error)}") from None
    return config, file.absolute().parent.name or str(config.model_type)


def _check(config: PretrainedConfig, tokens: int) -> None:
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < tokens:
        raise InvalidInput(
            f"the model reads at most {longest} tokens, but is given {tokens}; `placewise import --prompt {longest}` "
            "makes a graph of fewer"
        )


def _check_counts(data: Any, where: str = "") -> None:
    """In configurations within configurations too, and in lists, where each stage of a model has its own."""
    if isinstance(data, dict):
        for key, value in data.items():
            _check_counts(value, f"{where}.{key}" if where else str(key))
    elif isinstance(data, list):
        for value in data:
            _check_counts(value, where)
    elif isinstance(data, (int, float)) and _COUNTS.search(where):
        limit = MAX_LABELS if where.endswith("num_labels") else MAX_LAYERS
        if data > limit:
            raise InvalidInput(f"{where:.100}: must be at most {limit}, found {data}")
        if data < 0 and re.search(r"(^|\.)(n|num|encoder|decoder)_\w*$|depths$", where):  # others count from the end
            raise InvalidInput(f"{where:.100}: must be zero or more, found {data}")


@contextmanager
def _few_modules() -> Iterator[None]:
    """Counts the modules that become part of others."""
    from torch.nn.modules.module import register_module_module_registration_hook

    count = 0

    def one_more(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > MAX_MODULES:
            raise InvalidInput(f"the model has more than {MAX_MODULES:,} modules")

    hook = register_module_module_registration_hook(one_more)
    try:
        yield
    finally:
        hook.remove()


def _built(config: PretrainedConfig, device: str = "meta") -> PreTrainedModel:
    """The model on a device, in the dtype of its configuration, with implementations that come with torch."""
    import torch

    kind = _kind(config)
    dtype = getattr(config, "dtype", None) or torch.float32
    try:
        with torch.device(device), _few_modules():
            try:
                model = kind._from_config(config, dtype=dtype, attn_implementation="sdpa")
            except ValueError as error:
                if "scaled_dot_product_attention" not in str(error):
                    raise
                model = kind._from_config(config, dtype=dtype, attn_implementation="eager")
    except PlacewiseError:
        raise
    except Exception as error:  # whatever a wrong value leads to
        raise InvalidInput(f"{kind.__name__} cannot be built: {first_line(error)}") from None
    built: PreTrainedModel = model.eval()
    return built


def _kind(config: PretrainedConfig) -> Any:
    """The class that the configuration names; else one that writes text or, if it cannot, whatever there is."""
    import transformers
    from transformers.models.auto import modeling_auto as known

    named = getattr(config, "architectures", None) or []
    if not isinstance(named, (list, tuple)):
        raise InvalidInput(f"architectures: must be a list of names, found {named!r:.60}")
    for name in named:
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    masked, causal = known.MODEL_FOR_MASKED_LM_MAPPING, known.MODEL_FOR_CAUSAL_LM_MAPPING
    for mapping in (masked, causal, known.MODEL_MAPPING):
        if type(config) in mapping and not (mapping is masked and getattr(config, "is_decoder", False)):
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise Unsupported(f"transformers has no model for {type(config).__name__}")


# ---- what it is called with ------------------------------------------------------------------------------------------


def _inputs(model: PreTrainedModel, batch: int, tokens: int) -> dict[str, Any]:
    import inspect

    import torch

    config = model.config
    takes = inspect.signature(model.forward).parameters
    ids = torch.zeros(batch, tokens, dtype=torch.long, device="meta")
    if model.main_input_name == "input_ids":
        inputs: dict[str, Any] = {"input_ids": ids}
    elif model.main_input_name == "pixel_values":
        side, channels = getattr(config, "image_size", 224), getattr(config, "num_channels", 3)
        size = tuple(side) if isinstance(side, (list, tuple)) else (side, side)
        try:
            images = torch.zeros(batch, channels, *size, dtype=model.dtype, device="meta")
        except (RuntimeError, TypeError):
            wrong = f"image_size {side!r:.60}, num_channels {channels!r:.60}, batch {batch}"
            raise InvalidInput(f"{wrong}: images cannot be of this size") from None
        inputs = {"pixel_values": images}
    else:
        raise Unsupported(f"{type(model).__name__} reads {model.main_input_name}; only text and images are known")
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    return inputs | ({"use_cache": False} if "use_cache" in takes else {})


def _labels(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Any]:
    """Models of text are trained to say what they read, and then return their loss."""
    import inspect

    takes = "labels" in inspect.signature(model.forward).parameters and "input_ids" in inputs
    return {"labels": inputs["input_ids"]} if takes else {}


def _decoding(model: PreTrainedModel, name: str, batch: int, prompt: int) -> Graph:
    import torch
    from transformers import DynamicCache

    what = type(model).__name__
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise Unsupported(f"{what} does not write token after token: leave decode out")
    try:
        with quiet(), torch.no_grad(), _experts_of_any_dtype(model):
            cache = model(**_inputs(model, batch, prompt) | {"use_cache": True}).past_key_values
    except Exception as error:
        raise Unsupported(f"{what} cannot be run on the meta device: {first_line(error)}") from error
    if type(cache) is not DynamicCache:
        raise Unsupported(f"{what} keeps its state in a {type(cache).__name__}; only a DynamicCache is known")
    step = _inputs(model, batch, 1) | {"use_cache": True, _CACHE: cache}
    return _with_caches_at_home(read(export(model, (), step), name, state=[_CACHE]).graph)


@contextmanager
def _experts_of_any_dtype(model: PreTrainedModel) -> Iterator[None]:
    """On the meta device, the usual implementation takes bfloat16 only. The cache is the same with another one."""
    usual = getattr(model.config, "_experts_implementation", None)
    if usual is None:
        yield
        return
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(usual)


def _with_caches_at_home(graph: Graph) -> Graph:
    """A cache belongs to the module that reads it, and is named after it."""
    names, modules = list(graph.op_names), list(graph.op_modules)
    start, edges = graph.out_edges
    for op, kind in enumerate(graph.op_kinds):
        readers = graph.consumers[edges[start[op] : start[op + 1]]]
        if kind == "state" and names[op].startswith(_CACHE) and len(readers):
            modules[op] = modules[readers[0]]
            part = "key_cache" if "key_cache" in names[op] else "value_cache"
            names[op] = f"{modules[op]}.{part}"
    return replace(graph, op_names=tuple(names), op_modules=tuple(modules))


@contextmanager
def _alone() -> Iterator[None]:
    """No network, whatever a configuration names."""
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
