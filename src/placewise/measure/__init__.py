"""Measures ops and whole models on this machine, into profiles that models share.

A *target* is a model made ready to run by one library on one device; each library has a file of its own here. What a
profile already holds is not measured again, so that work goes on where it was interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from placewise import zoo
from placewise.errors import InvalidInput, PlacewiseError, Unsupported
from placewise.files import existing, known_profiles, load_profile, profile_folder, save_profile
from placewise.graph import Graph
from placewise.kinds import NEVER_FREE, family
from placewise.machine import cpu_title, usable_cores
from placewise.profiles import ModelTime, OpTime, Profile

_SAVE_EVERY = 10.0  # seconds
_ROUNDS = 2  # through all ops, so that a disturbance is not taken for a slow op
_UNSTEADY = 0.3  # an op whose quartiles are this far apart is measured again by the next run
_SAMPLE = 2e-3  # seconds that a clock reading should span at least
#: The files that each library takes, beside the models of the zoo.
_FILES: Final = {
    "torch": (".pt2",),
    "openvino": (".xml", ".onnx", ".pt2"),
    "onnxruntime": (".onnx", ".pt2"),
}


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


def summary(graph: Graph, found: Profile) -> dict[str, Any]:
    """What a profile says of a model; seconds."""
    works = (graph.flops > 0) | (graph.bytes_accessed > 0)
    all_ops = [graph.op_signatures[i] for i in np.flatnonzero(works)]
    known = {signature: found.ops[signature] for signature in dict.fromkeys(all_ops) if signature in found.ops}
    timed = [time for time in known.values() if time.seconds > 0]
    columns = zip(*((time.kind, time.dtype, time.flops, time.bytes_accessed) for time in timed), strict=True)
    fitted = found.predict(*map(list, columns)) if timed else np.zeros(0)
    errors = np.abs(fitted / [time.seconds for time in timed] - 1)
    whole = found.models.get(graph.name)
    return {
        "model": graph.name, "profile": found.name, "device": found.device, "hardware": found.hardware,
        "library": found.library, "date": found.date, "ops": len(all_ops), "wanted": len(set(all_ops)),
        "measured": len(known), "spread": float(np.median([time.spread for time in timed])) if timed else None,
        "sum_of_ops": sum(known[signature].seconds for signature in all_ops if signature in known),
        "whole": whole.seconds if whole else None, "error": float(np.median(errors)) if timed else None,
    }  # fmt: skip


def profile_name(target: Target) -> str:
    """Of the profile that a target's times go into: the hardware and the library, with its version."""
    return slug(f"{target.hardware} {target.library}")


def slug(text: str) -> str:
    """A text as the name of a file."""
    return "-".join("".join(c if c.isalnum() or c == "." else " " for c in text.lower()).split())


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
    check_store(place.parent)
    about = (name, target.device, target.hardware, target.library, date.today().isoformat())
    source = place if place.exists() else known_profiles().get(name)
    try:
        found = load_profile(source) if source else Profile(*about)
    except InvalidInput as error:
        raise InvalidInput(f"{error}; delete this profile to measure all anew") from None
    ops, models = dict(found.ops), dict(found.models)

    graph = target.graph
    index = {signature: i for i, signature in enumerate(graph.op_signatures)}
    works = (graph.flops > 0) | (graph.bytes_accessed > 0)
    wanted = {signature for signature, i in index.items() if signature and works[i]}
    missing = {signature for signature in wanted if signature not in ops or ops[signature].spread > _UNSTEADY}
    fresh: dict[str, Timing] = {}
    began = saved = time.perf_counter()
    try:
        rounds = chain.from_iterable(target.measure(missing) for _ in range(_ROUNDS))
        for done, (signature, timing) in enumerate(rounds, 1):
            if signature not in fresh or timing.seconds < fresh[signature].seconds:  # what disturbs only adds
                i, fresh[signature] = index[signature], timing
                ops[signature] = OpTime(
                    graph.op_kinds[i], graph.op_dtypes[i], float(graph.flops[i]), float(graph.bytes_accessed[i]),
                    *timing,
                )  # fmt: skip
            on_progress(Progress(done, _ROUNDS * len(missing), signature))
            if time.perf_counter() - began >= seconds:
                break
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


def check_store(folder: Path) -> None:
    """Better told now than after hours of measuring."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        advice = "profiles cannot be kept here; let PLACEWISE_PROFILES name a folder that you may write to"
        raise OSError(error.errno, f"{error.strerror}: {advice}", str(folder)) from None


@contextmanager
def opened(model: str, device: str, dims: Mapping[str, int] | None = None) -> Iterator[Target]:
    """A model (of the zoo, or a file that the library reads) on a device: cpu, cuda:0, openvino:CPU, onnxruntime.

    openvino:CPU:2 and onnxruntime:2 are CPUs with two threads. `dims` gives the sizes that a file leaves open.
    """
    library, colon, part = device.partition(":")
    library = {"cpu": "" if colon else "torch", "cuda": "torch", "torch": ""}.get(library, library)
    if library not in _FILES:
        raise InvalidInput(f"device {device!r:.60}: must be cpu, cuda:0, openvino:CPU or onnxruntime")
    check_readable(model, library)
    if dims and Path(model).suffix.lower() not in (".onnx", ".xml"):
        raise InvalidInput(f"{model}: only .onnx and .xml files have sizes that are left open")
    if library == "torch":
        from placewise.measure import pytorch

        yield pytorch.TorchTarget(*pytorch.runnable(model), device)
        return
    with TemporaryDirectory() as folder:
        if library == "openvino":
            from placewise.measure import openvino

            openvino.settings(part or "CPU", counters=False)  # refuses a wrong one before the model is converted
            path, name = openvino.written(model, Path(folder), dims)
            yield openvino.OpenvinoTarget(path, name, part or "CPU", dims)
        else:
            from placewise.measure import onnxruntime

            threads = thread_count(part, device) if colon else None
            path, name = onnxruntime.written(model, Path(folder), dims)
            yield onnxruntime.OnnxruntimeTarget(path, name, dims, threads)


def check_readable(model: str, library: str) -> None:
    """Refuse what is neither a model of the zoo nor a file that the library reads."""
    if model in zoo.names():
        return
    suffix = existing(model, "model", zoo.names()).suffix.lower()
    if suffix not in _FILES[library]:
        raise InvalidInput(
            f"{model}: {library} takes bundled models, and files that end in {', '.join(_FILES[library])}"
        )


def thread_count(text: str, where: str) -> int:
    """How many threads a CPU is to have."""
    if not (text.isascii() and text.isdigit() and 0 < int(text[:9]) <= 4096):
        raise InvalidInput(f"{where!r:.60}: the number of threads must be a whole number from 1 to 4096")
    return int(text)


@contextmanager
def told(what: str) -> Iterator[None]:
    """What a library refuses is told in a line."""
    try:
        yield
    except PlacewiseError:
        raise
    except Exception as error:  # each library has kinds of its own
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise Unsupported(f"{what}: {lines[0] if lines else type(error).__name__:.300}") from error


def shared_out(
    graph: Graph, kernels: Sequence[tuple[Sequence[str], Sequence[float]]], wanted: set[str]
) -> Iterator[tuple[str, Timing]]:
    """Times of ops from those of kernels, each with the names of the ops that it was made of and its times.

    A fused kernel's time is shared out among its ops by the bytes that each would move and the FLOPs that it does, a
    byte counting as much as ten FLOPs. Of ops with the same signature, the median counts.
    """
    work = graph.bytes_accessed + graph.flops / 10
    position = {name: i for i, name in enumerate(graph.op_names)}
    kernel_of = {position[name]: k for k, (names, _) in enumerate(kernels) for name in names if name in position}
    if kernels and not kernel_of:
        raise InvalidInput(f"{graph.name}: no kernel that the library reports is called after an op of the model")
    _absorb(graph, kernel_of)
    members: dict[int, list[int]] = {}
    for op, kernel in kernel_of.items():
        if work[op] > 0:
            members.setdefault(kernel, []).append(op)
    found: dict[str, list[Timing]] = {}
    for kernel, ops in members.items():
        timing = timing_of(kernels[kernel][1])
        total = sum(work[op] for op in ops)
        for op in ops:
            share = timing._replace(seconds=timing.seconds * float(work[op] / total))
            found.setdefault(graph.op_signatures[op], []).append(share)
    for signature in sorted(wanted & found.keys()):
        yield signature, Timing(*np.median([(t.seconds, t.spread, 0.0) for t in found[signature]], axis=0).tolist())


def _absorb(graph: Graph, kernel_of: dict[int, int]) -> None:
    """Ops that no kernel is called after were fused: cheap ones into the op before, others into the one behind."""
    start, edges = graph.out_edges
    first, in_edges = graph.in_edges
    left = [op for op in graph.topological_order.tolist() if op not in kernel_of and not graph.is_stored[op]]
    grown = True
    while grown:
        grown = False
        for op in left:
            readers = graph.consumers[edges[start[op] : start[op + 1]]].tolist()
            makers = graph.edge_producer[in_edges[first[op] : first[op + 1]]].tolist()
            behind = readers if len(set(readers)) == 1 else []
            nearest = (*behind, *makers) if family(graph.op_kinds[op]) in NEVER_FREE else (*makers, *behind)
            home = next((kernel_of[other] for other in nearest if other in kernel_of), None)
            if home is not None:
                kernel_of[op] = home
                grown = True
        left = [op for op in left if op not in kernel_of]


def clocked(run: Callable[[int], Any], budget: float) -> Timing:
    """The median time of one of the calls that `run(count)` makes, warmed up, within about `budget` seconds."""
    run(1)
    began = time.perf_counter()
    run(1)
    once = max(time.perf_counter() - began, 1e-7)
    count = max(1, round(_SAMPLE / once))
    samples: list[float] = []
    stop = time.perf_counter() + budget
    while len(samples) < 3 or (len(samples) < 15 and time.perf_counter() < stop):
        began = time.perf_counter()
        run(count)
        samples.append((time.perf_counter() - began) / count)
        if len(samples) >= 3 and once > budget:
            break
    return timing_of(samples)


def timing_of(samples: Sequence[float]) -> Timing:
    """The median and the spread of what the clock showed."""
    low, median, high = np.percentile(samples, [25, 50, 75]).tolist()
    return Timing(median, (high - low) / max(median, 1e-12))


def hardware_name(threads: int | None = None) -> str:
    """This machine's CPU and how many of its cores may be used, or how many threads are."""
    return f"{cpu_title()}, {usable_cores()} cores" + (f", {threads} threads" if threads else "")
