"""Measures ops and whole models on this machine, into profiles that models share.

A *target* is a model made ready to run by one library on one device; each library has a file of its own here. What a
profile already holds is not measured again, so that work goes on where it was interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import date
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from placewise.errors import InvalidInput
from placewise.files import known_profiles, load_profile, profile_folder, save_profile
from placewise.graph import Graph
from placewise.profiles import ModelTime, OpTime, Profile

_SAVE_EVERY = 10.0  # seconds
_SAMPLE = 2e-3  # seconds that a clock reading should span at least


class Target(Protocol):
    """A model, made ready to run by a library on a device."""

    device: str
    hardware: str
    library: str
    graph: Graph

    def measure(self, wanted: set[str]) -> Iterator[tuple[str, Timing]]:
        """Times of ops by signature, one after another; those that cannot be run alone are left out."""

    def whole(self) -> Timing:
        """The time of the whole model."""


class Timing(NamedTuple):
    """What was read off the clock."""

    seconds: float  # the median
    spread: float  # between the quartiles, as a share of the median
    scratch: float = 0.0  # bytes


class Progress(NamedTuple):
    """How measuring stands."""

    done: int
    wanted: int
    signature: str


def profile_name(target: Target) -> str:
    """Of the profile that a target's times go into: the hardware and the library, with its version."""
    text = f"{target.hardware} {target.library}".lower()
    return "-".join("".join(c if c.isalnum() or c == "." else " " for c in text).split())


def profile(
    target: Target,
    *,
    seconds: float = np.inf,
    folder: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Profile:
    """Measure what the profile of this device and library lacks, then the whole model; returns the profile, saved.

    Stops after `seconds`, or at Ctrl-C, with what it has.
    """
    name = profile_name(target)
    place = (folder or profile_folder()) / f"{name}.json.gz"
    place.parent.mkdir(parents=True, exist_ok=True)
    about = (name, target.device, target.hardware, target.library, date.today().isoformat())
    source = place if place.exists() else known_profiles().get(name)
    found = load_profile(source) if source else Profile(*about)
    ops, models = dict(found.ops), dict(found.models)

    graph = target.graph
    index = {signature: i for i, signature in enumerate(graph.op_signatures)}
    works = (graph.flops > 0) | (graph.bytes_accessed > 0)
    wanted = {signature for signature, i in index.items() if signature and works[i]}
    missing = wanted - ops.keys()
    began = saved = time.perf_counter()
    try:
        measured = takewhile(lambda _: time.perf_counter() - began < seconds, target.measure(missing))
        for signature, timing in measured:
            i = index[signature]
            ops[signature] = OpTime(
                graph.op_kinds[i], graph.op_dtypes[i], float(graph.flops[i]), float(graph.bytes_accessed[i]),
                timing.seconds, timing.spread, timing.scratch,
            )  # fmt: skip
            on_progress(Progress(len(wanted & ops.keys()), len(wanted), signature))
            if time.perf_counter() - saved > _SAVE_EVERY:
                save_profile(Profile(*about, ops, models), place)
                saved = time.perf_counter()
        if time.perf_counter() - began < seconds:
            whole = target.whole()
            parts = sum(ops[s].seconds for s in graph.op_signatures if s in ops and s in wanted)
            models[graph.name] = ModelTime(whole.seconds, whole.spread, parts)
    finally:
        if ops or models:
            save_profile(Profile(*about, ops, models), place)
    return Profile(*about, ops, models)


def open_target(model: str, device: str) -> Target:
    """A model (a name of the zoo or a file) on a device: cpu, cuda:0, openvino:CPU, onnxruntime."""
    library, _, part = device.partition(":")
    if library in ("cpu", "cuda"):
        from placewise.costs.measure.pytorch import TorchTarget

        return TorchTarget(model, device)
    if library == "openvino":
        from placewise.costs.measure.openvino import OpenvinoTarget

        return OpenvinoTarget(model, part or "CPU")
    if library == "onnxruntime":
        from placewise.costs.measure.onnxruntime import OnnxruntimeTarget

        return OnnxruntimeTarget(model)
    raise InvalidInput(f"device {device!r:.60}: must be cpu, cuda:0, openvino:CPU or onnxruntime")


def clocked(run: Callable[[int], Any], budget: float) -> Timing:
    """The median time of one of the calls that `run(count)` makes, warmed up, within about `budget` seconds."""
    run(1)
    began = time.perf_counter()
    run(1)
    once = max(time.perf_counter() - began, 1e-7)
    count = max(1, int(_SAMPLE / once))
    samples: list[float] = []
    stop = time.perf_counter() + budget
    while len(samples) < 3 or (len(samples) < 15 and time.perf_counter() < stop):
        began = time.perf_counter()
        run(count)
        samples.append((time.perf_counter() - began) / count)
        if len(samples) >= 3 and once > budget:
            break
    low, median, high = np.percentile(samples, [25, 50, 75]).tolist()
    return Timing(median, (high - low) / median)


def hardware_name() -> str:
    """This machine's CPU and how many of its cores may be used."""
    import os
    import platform

    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{name}, {cores} cores"
