"""Policies as files: weights, and of a training that can go on also the optimiser, random numbers and counters.

A safetensors file whose header says what it is. Nothing in it is code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from placewise.errors import InvalidInput
from placewise.files import write_bytes
from placewise.learned.reinforce import Learner
from placewise.planners import get

_KEY: Final = "placewise"
_VERSION: Final = 1
_MAX_BYTES: Final = 1024**3


class Checkpoint(NamedTuple):
    """What a file holds."""

    method: str
    facts: dict[str, Any]  # JSON: how the network is built, and what the training says of itself
    tensors: dict[str, Tensor]


def save(path: str | Path, method: str, learner: Learner, facts: dict[str, Any], *, weights_only: bool = False) -> None:
    """Write a policy; the file is the old one or the new one, whatever happens."""
    from safetensors.torch import save as to_bytes

    tensors, counters = learner.state()
    if weights_only:
        tensors = {key: value for key, value in tensors.items() if key.startswith("network.")}
    header = {"version": _VERSION, "method": method, **facts, "learner": counters}
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    write_bytes(path, to_bytes(tensors, {_KEY: json.dumps(header, sort_keys=True)}))


def load(path: str | Path, method: str) -> Checkpoint:
    """Read a policy of a method; anything else is an error that says what is wrong."""
    from safetensors import SafetensorError, safe_open

    try:
        if Path(path).is_dir():
            raise InvalidInput(f"{path}: is a folder; name the file of a policy")
        if Path(path).stat().st_size > _MAX_BYTES:
            raise InvalidInput(f"{path}: larger than any policy")
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get(_KEY, "null"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror or error}") from None
    except (SafetensorError, ValueError, RecursionError):
        raise InvalidInput(f"{path}: not a policy, or damaged; `placewise train` writes policies") from None
    if not isinstance(header, dict) or header.get("version") != _VERSION:
        raise InvalidInput(f"{path}: not a policy of Placewise, or of another version")
    if header.get("method") != method:
        raise InvalidInput(f"{path}: a policy of {header.get('method')!r:.60}, not of {method}")
    return Checkpoint(method, header, tensors)


def options_of(method: str, given: Mapping[str, Any], built: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """The options with those that a file was built with; one that is neither theirs nor the default is refused."""
    defaults = get(method).settings({})
    for name, value in built.items():
        if given[name] not in (value, defaults[name]):
            raise InvalidInput(f"option {name} = {given[name]}: {path} was trained with {value}; leave the option out")
    return {**given, **built}


def refuse_idle(method: str, options: Mapping[str, Any], names: Iterable[str], why: str) -> None:
    """Refuse options that would change nothing, unless they are the default."""
    defaults = get(method).settings({})
    for name in names:
        if name in options and options[name] != defaults.get(name):
            raise InvalidInput(f"option {name} = {options[name]} changes nothing here: {why}")


def begin_with(learner: Learner, checkpoint: Checkpoint, path: str | Path) -> None:
    """Take the weights alone: a training of its own begins with them."""
    weights = {key: value for key, value in checkpoint.tensors.items() if key.startswith("network.")}
    restore(learner, checkpoint._replace(tensors=weights), path)


def restore(learner: Learner, checkpoint: Checkpoint, path: str | Path) -> None:
    """Put what was read into a learner whose network has the same shape."""
    tensors, counters = checkpoint.tensors, checkpoint.facts.get("learner", {})
    weights = [value for key, value in tensors.items() if key.startswith("network.")]
    if not all(value.is_floating_point() and bool(value.isfinite().all()) for value in weights):
        raise InvalidInput(f"{path}: its weights are not finite: the file is damaged, or its training diverged")
    wrong = _wrong_counter(counters) or _wrong_moment(learner, tensors) or _wrong_return(tensors)
    if wrong is not None:
        raise InvalidInput(f"{path}: {wrong:.80} is not what a training writes: the file is damaged")
    try:
        learner.restore(tensors, counters)
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise InvalidInput(
            f"{path}: is of another network; the options must be those that it was trained with, and but for placeto "
            f"also the model and the box ({lines[-1] if lines else error!r:.160})"
        ) from None


def _wrong_counter(counters: Any) -> str | None:
    """A file may say anything of its training."""
    if not isinstance(counters, dict):
        return "learner"
    for name, value in counters.items():
        is_count = type(value) is int and 0 <= value < 2**53
        is_number = type(value) in (int, float) and value == value
        good = {"updates": is_count, "evaluations": is_count, "mean": is_number, "best": is_number}
        if not good.get(name, value is None or (is_number and abs(value) < np.inf)):
            return f"learner.{name}"
    return None


def _wrong_moment(learner: Learner, tensors: Mapping[str, Tensor]) -> str | None:
    """Each parameter has all of what Adam remembers of it, or nothing."""
    shapes = [parameter.shape for group in learner.optimiser.param_groups for parameter in group["params"]]
    known = {key for key in tensors if key.startswith("optimiser.")}
    for index, shape in enumerate(shapes):
        expected = {f"optimiser.{index}.{name}": shape for name in ("exp_avg", "exp_avg_sq")}
        expected[f"optimiser.{index}.step"] = torch.Size()
        if not known.isdisjoint(expected):
            for key, size in expected.items():
                if key not in tensors or not _numbers(tensors[key]) or tensors[key].shape != size:
                    return key
            known -= set(expected)
    return min(known, default=None)


def _wrong_return(tensors: Mapping[str, Tensor]) -> str | None:
    for key, value in tensors.items():
        if key.startswith("recent.") and not (value.ndim == 2 and _numbers(value)):
            return key
    return None


def _numbers(value: Tensor) -> bool:
    return value.is_floating_point() and bool(value.isfinite().all())
