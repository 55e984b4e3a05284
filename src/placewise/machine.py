"""The machine that this runs on: what it has, what is free, and what it reaches (`placewise devices`).

Rates, copies and overheads are measured, each within a fraction of a second; every figure is a median and says how far
its samples lie apart. Torch measures CPU and GPUs where it is installed; without it NumPy measures the CPU, and a GPU
that nvidia-smi names is described by the catalogue.
"""

from __future__ import annotations

import csv
import ctypes
import math
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import permutations
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Protocol

import numpy as np

from placewise import __version__, catalogue
from placewise.errors import Unsupported
from placewise.quantities import format_bytes

#: Seconds for each figure, and for one timed stretch, which the clock and a synchronisation must not disturb.
BUDGET, STRETCH = 0.3, 0.005
#: Sides of the multiplied matrices: doubled until one product takes long enough.
SMALLEST, LARGEST, LONG_ENOUGH = 512, 8192, 0.02
#: Arrays well beyond the caches, and at most this share of the free memory.
ARRAY_BYTES, ARRAY_SHARE = 256 * 1024**2, 1 / 8
#: A spread, or a load of each core, above this says that others use the machine, too.
BUSY: Final = 0.25

#: For glibc's mallopt (malloc.h). Threads share one arena: the heaps of others are too small for large tensors.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_KEEPING: Final = ((_M_TRIM_THRESHOLD, -1), (_M_MMAP_MAX, 0), (_M_ARENA_MAX, 1))

Run = Callable[[], Any]
Say = Callable[[str], Any]


@dataclass(frozen=True)
class Figure:
    """A median in SI units; the middle half of the samples spans `spread`, as a share of it."""

    median: float
    spread: float
    samples: int


@dataclass(frozen=True)
class FoundDevice:
    """One device; with `like`, what is not measured is as the catalogue has it."""

    name: str
    kind: str
    title: str
    free: float  # bytes
    total: float
    cores: int | None = None
    like: str | None = None
    flops: Mapping[str, Figure] = field(default_factory=dict)  # by dtype, of large matrix products
    bandwidth: Figure | None = None  # of its memory
    launch: Figure | None = None  # seconds per small op


@dataclass(frozen=True)
class FoundLink:
    """Copies in one direction, by pinned or pageable host memory; between GPUs there is only `direct`."""

    source: str
    target: str
    bandwidth: Mapping[str, Figure] = field(default_factory=dict)
    latency: Figure | None = None  # seconds from the call until a small copy has arrived
    like: str | None = None
    via: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """What was found, when, by which libraries; `notes` say what was left out and why."""

    devices: tuple[FoundDevice, ...]
    links: tuple[FoundLink, ...]
    date: str
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()


def describe_machine(say: Say = lambda _: None) -> Machine:
    """Look and measure; takes a few seconds per device, and tells `say` what it is at."""
    torch = _torch()
    free, total = host_memory()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # before this adds to it
    engine: _Engine = _Torch(torch, "cpu") if torch else _NumPy(usable_cores())
    host = FoundDevice("cpu", "cpu", cpu_title(), free, total, usable_cores(), **_measured(engine, "cpu", free, say))
    if torch and torch.cuda.is_available():
        gpus, links, notes = _gpus_by_torch(torch, say)
    else:
        gpus, links, notes = gpus_by_nvidia_smi()
    spread = max(_spreads([host, *gpus], links))
    if spread > BUSY or load > BUSY * usable_cores():
        busy = f"others kept {load:.1f} cores busy, and figures vary by up to +-{spread / 2:.0%}"
        notes.append(f"{busy}; repeat this when the machine is idle")
    versions = {"Python": platform.python_version(), "NumPy": np.__version__}
    if torch:
        versions["torch"] = str(torch.__version__)
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Machine((host, *gpus), tuple(links), date, versions, tuple(notes))


def _spreads(devices: Sequence[FoundDevice], links: Sequence[FoundLink]) -> list[float]:
    figures = [x for device in devices for x in (*device.flops.values(), device.bandwidth, device.launch)]
    figures += [x for link in links for x in (*link.bandwidth.values(), link.latency)]
    return [figure.spread for figure in figures if figure]


def _torch() -> Any:
    """The module, or None."""
    try:
        import torch
    except (ImportError, OSError):  # not installed, or its libraries are not
        return None
    return torch


# ---- what there is ---------------------------------------------------------------------------------------------------


def host_memory(root: Path = Path("/")) -> tuple[float, float]:
    """Free and total bytes: what the kernel can give without swapping, within the limits of the control groups."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        facts = {name: float(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
        free, total = facts["MemAvailable"], facts["MemTotal"]
    except (OSError, ValueError, IndexError, KeyError):
        raise Unsupported("free memory is read from /proc/meminfo, which Linux has; write the box by hand") from None
    for folder in _control_groups(root, "memory"):
        for limit_name, used_name, dropped in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None:
                cached = _numbers(folder / "memory.stat").get(dropped, 0.0)  # counts as used, but gives way
                free = min(free, max(0.0, limit - max(0.0, (used or 0.0) - cached)))
                total = min(total, limit)
    return min(free, total), total


def check_host_memory(needed: float, what: str) -> None:
    """Refuse what the host has no room for: the kernel would end this process, or others, without a word."""
    free, _ = host_memory()
    if needed > free:
        raise Unsupported(f"{what} takes {format_bytes(needed)} of host memory, and {format_bytes(free)} is free")


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use, within the quotas of the control groups."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for folder in _control_groups(root, "cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        with suppress(OSError, ValueError):  # the other version of control groups, or "max"
            quota, period = map(float, (folder / "cpu.max").read_text().split())
        if quota and period and quota > 0:
            cores = min(cores, quota / period)
    return max(1, round(cores))


def _control_groups(root: Path, controller: str) -> list[Path]:
    """The folders whose limits bind this process: its own group and every one above it, of both versions."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in names.split(","):
            mounts = [root / "sys/fs/cgroup" / names, root / "sys/fs/cgroup" / controller]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        found += [mount.joinpath(*parts[:depth]) for mount in mounts for depth in range(len(parts), -1, -1)]
    return list(dict.fromkeys(found))


def _number(path: Path) -> float | None:
    """The number in a file; None where there is none, or it says "max"."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def _numbers(path: Path) -> dict[str, float]:
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
        return {name: float(value) for name, value in pairs}
    except (OSError, ValueError):
        return {}


def keep_memory() -> None:
    """Have this process keep the memory that it frees, for what it allocates next, where the C library can (glibc).

    A large tensor is a mapping of its own otherwise: mapped, faulted in page by page and unmapped, in each run anew,
    which takes up to half of the time of an image classifier.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for setting, value in _KEEPING:
            mallopt(setting, value)


def cpu_title(root: Path = Path("/")) -> str:
    """As the processor calls itself."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def gpus_by_nvidia_smi(
    run: Callable[..., Any] = subprocess.run,
) -> tuple[list[FoundDevice], list[FoundLink], list[str]]:
    """GPUs, links and notes. Nothing here can measure them, so they are as the catalogue has them, or left out."""
    wanted = "name,memory.free,memory.total,pcie.link.gen.max,pcie.link.width.max"
    try:
        command = ["nvidia-smi", f"--query-gpu={wanted}", "--format=csv,noheader,nounits"]
        text = str(run(command, capture_output=True, text=True, timeout=30, check=True).stdout)
    except (OSError, subprocess.SubprocessError):
        return [], [], []
    names = {known.driver: name for name, known in catalogue.devices().items() if known.driver}
    gpus, buses, notes = [], [], []
    for index, row in enumerate(csv.reader(text.splitlines(), skipinitialspace=True)):
        try:
            title, free, total, generation, width = row
            memory = float(free) * 1024**2, float(total) * 1024**2
        except ValueError:
            continue
        name, like, bus = f"cuda:{index}", names.get(title), f"pcie-{generation}.0-x{width}"
        remedy = "to have it measured, pip install 'placewise[torch]' with CUDA"
        if like is None:
            notes.append(f"{name}, {title:.60}, is left out, for the catalogue does not have it; {remedy}")
            continue
        notes.append(f"{name} is as the catalogue has {like}; {remedy}")
        gpus.append(FoundDevice(name, "gpu", title, *memory, like=like))
        buses.append(bus if bus in catalogue.links() else "pcie-3.0-x8")  # the slowest, not a guess that is too good
    links = []
    for gpu, bus in zip(gpus, buses, strict=True):
        links.append(FoundLink("cpu", gpu.name, like=bus, via=(f"{gpu.name} in",)))
        links.append(FoundLink(gpu.name, "cpu", like=bus, via=(f"{gpu.name} out",)))
    for (a, bus_a), (b, bus_b) in permutations(zip(gpus, buses, strict=True), 2):  # through the host
        slower = min(bus_a, bus_b, key=lambda bus: catalogue.links()[bus].bandwidth)
        links.append(FoundLink(a.name, b.name, like=slower, via=(f"{a.name} out", f"{b.name} in")))
    return gpus, links, notes


# ---- what it reaches -------------------------------------------------------------------------------------------------


class _Engine(Protocol):
    """What runs on a device: each method prepares an op and returns what runs it once."""

    dtypes: tuple[str, ...]

    def gemm(self, dtype: str, side: int) -> Run:
        """A product of two square matrices."""

    def stream(self, count: int) -> tuple[Run, float]:
        """An op on arrays of `count` bytes, and the bytes that it reads and writes."""

    def small(self) -> Run:
        """An op on one number."""

    def wait(self) -> None:
        """Until all that was started is done."""


class _NumPy:
    """The CPU, without torch. NumPy has no fast arithmetic in 16 bits, so that is left to the default rate."""

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.dtypes: tuple[str, ...] = ("float32", "float64")

    def gemm(self, dtype: str, side: int) -> Run:
        a, b = np.random.default_rng(0).standard_normal((2, side, side)).astype(dtype)
        out = np.empty_like(a)
        return lambda: np.matmul(a, b, out=out)

    def stream(self, count: int) -> tuple[Run, float]:
        """A copy, by as many threads as there are cores: one alone does not saturate the memory."""
        source, target = np.ones(count, np.uint8), np.zeros(count, np.uint8)
        parts = list(zip(np.array_split(target, self.cores), np.array_split(source, self.cores), strict=True))
        pool = ThreadPoolExecutor(self.cores)
        return lambda: list(pool.map(lambda pair: np.copyto(*pair), parts)), 2.0 * count

    def small(self) -> Run:
        x = np.zeros(1, np.float32)
        return lambda: np.add(x, x, out=x)

    def wait(self) -> None:
        pass


class _Torch:
    """A CPU or a GPU, by torch."""

    def __init__(self, torch: Any, device: str) -> None:
        self.torch, self.device = torch, device
        self.dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16", "float16", "int8")

    def gemm(self, dtype: str, side: int) -> Run:
        torch = self.torch
        if dtype == "int8":
            a, b = torch.randint(-9, 9, (2, side, side), dtype=torch.int8, device=self.device)
            return lambda: torch._int_mm(a, b.t())
        # Random, for a GPU that multiplies zeros draws less power and is faster than with any model.
        a, b = torch.randn(2, side, side, device=self.device).to(getattr(torch, dtype))
        return lambda: torch.matmul(a, b)

    def stream(self, count: int) -> tuple[Run, float]:
        """The triad c = a + s b."""
        torch = self.torch
        a, b, c = (torch.ones(count // 4, device=self.device) for _ in range(3))
        return lambda: torch.add(a, b, alpha=0.5, out=c), 3.0 * count

    def small(self) -> Run:
        x = self.torch.zeros(1, device=self.device)
        return lambda: x.add_(1)

    def wait(self) -> None:
        if self.device != "cpu":
            self.torch.cuda.synchronize(self.device)


def sampled(run: Run, wait: Run, clock: Callable[[], float] = perf_counter) -> Figure:
    """Seconds of one run: the median of stretches of runs, as many as the budget allows."""

    def stretch(runs: int) -> float:
        wait()
        begin = clock()
        for _ in range(runs):
            run()
        wait()
        return (clock() - begin) / runs

    stretch(1)  # what happens only once: libraries are loaded, buffers made, clocks raised
    runs = min(10_000, max(1, math.ceil(STRETCH / max(stretch(1), 1e-9))))
    end, samples = clock() + BUDGET, [stretch(runs) for _ in range(3)]
    while clock() < end and len(samples) < 100:
        samples.append(stretch(runs))
    low, median, high = np.quantile(samples, [0.25, 0.5, 0.75]).tolist()
    return Figure(median, (high - low) / median if median else 0.0, len(samples))


def _rate(work: float, time: Figure) -> Figure:
    return Figure(work / max(time.median, 1e-12), time.spread, time.samples)


def _measured(engine: _Engine, name: str, free: float, say: Say) -> dict[str, Any]:
    """Rates, bandwidth and overhead of a device, as the fields of `FoundDevice`."""
    flops = {}
    for dtype in engine.dtypes:
        say(f"{name}: {dtype} products")
        try:
            flops[dtype] = _gemm_rate(engine, dtype, free)
        except (RuntimeError, TypeError, AttributeError):  # it has no such arithmetic
            if dtype == "float32":
                raise
    say(f"{name}: memory bandwidth")
    run, traffic = engine.stream(_array_bytes(free))
    bandwidth = _rate(traffic, sampled(run, engine.wait))
    say(f"{name}: overhead of an op")
    return {"flops": flops, "bandwidth": bandwidth, "launch": sampled(engine.small(), engine.wait)}


def _gemm_rate(engine: _Engine, dtype: str, free: float) -> Figure:
    side = SMALLEST
    while True:
        run = engine.gemm(dtype, side)
        fits = 3 * 8 * (2 * side) ** 2 <= free * ARRAY_SHARE
        if 2 * side > LARGEST or not fits or min(_once(run, engine.wait) for _ in range(2)) >= LONG_ENOUGH:
            return _rate(2.0 * side**3, sampled(run, engine.wait))
        side *= 2


def _once(run: Run, wait: Run) -> float:
    begin = perf_counter()
    run()
    wait()
    return perf_counter() - begin


def _array_bytes(free: float) -> int:
    return max(4096, int(min(ARRAY_BYTES, free * ARRAY_SHARE)) // 4096 * 4096)


# ---- GPUs by torch ---------------------------------------------------------------------------------------------------


def _gpus_by_torch(torch: Any, say: Say) -> tuple[list[FoundDevice], list[FoundLink], list[str]]:
    """GPUs, links and notes; a GPU that cannot be used is left out."""
    gpus, notes = [], []
    for index in range(torch.cuda.device_count()):
        try:
            gpus.append(_measured_gpu(torch, index, say))
        except RuntimeError as error:  # no memory is free, or the driver does not serve it
            notes.append(f"cuda:{index} is left out, it cannot be measured: {_reason(error)}")
    try:
        return gpus, _measured_links(torch, [gpu.name for gpu in gpus], say), notes
    except RuntimeError as error:
        raise Unsupported(f"copies from and to the GPUs cannot be measured: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return f"{next(iter(str(error).splitlines()), type(error).__name__):.200}"


def _measured_gpu(torch: Any, index: int, say: Say) -> FoundDevice:
    name = f"cuda:{index}"
    torch.zeros(1, device=name)  # whoever uses the GPU needs a context, too: what that takes is not free
    free, total = torch.cuda.mem_get_info(index)
    figures = _measured(_Torch(torch, name), name, float(free), say)
    torch.cuda.empty_cache()
    return FoundDevice(name, "gpu", str(torch.cuda.get_device_name(index)), float(free), float(total), **figures)


def _measured_links(torch: Any, gpus: Sequence[str], say: Say) -> list[FoundLink]:
    """Both directions between the host and each GPU, and between GPUs."""

    def wait() -> None:
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    def index(gpu: str) -> int:
        return int(gpu.partition(":")[2])

    def buffer(device: str, pinned: bool = False) -> Any:
        return torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pinned)

    def rate(source: Any, target: Any) -> Figure:
        return _rate(float(size), sampled(lambda: target.copy_(source, non_blocking=True), wait))

    def latency(source: Any, target: Any) -> Figure:
        few, there = source[:4], target[:4]

        def arrive() -> None:
            there.copy_(few, non_blocking=True)
            wait()

        return sampled(arrive, wait)

    size = min([ARRAY_BYTES, *(_array_bytes(torch.cuda.mem_get_info(index(gpu))[0]) for gpu in gpus)])
    pairs = list(permutations(gpus, 2))
    staged = {pair for pair in pairs if not torch.cuda.can_device_access_peer(*map(index, pair))}
    links = []
    for gpu in gpus:
        say(f"{gpu}: copies from and to the host")
        device, host = buffer(gpu), {"pinned": buffer("cpu", pinned=True), "pageable": buffer("cpu")}
        # Copies between GPUs that do not reach each other pass through the host, and wait for those from and to it.
        way_in, way_out = ((f"{gpu} in",), (f"{gpu} out",)) if staged else ((), ())
        pinned = host["pinned"]
        links += [
            FoundLink("cpu", gpu, {k: rate(x, device) for k, x in host.items()}, latency(pinned, device), via=way_in),
            FoundLink(gpu, "cpu", {k: rate(device, x) for k, x in host.items()}, latency(device, pinned), via=way_out),
        ]
    for a, b in pairs:
        say(f"{a}: copies to {b}")
        source, target = buffer(a), buffer(b)
        via = (f"{a} out", f"{b} in") if (a, b) in staged else ()
        links.append(FoundLink(a, b, {"direct": rate(source, target)}, latency(source, target), via=via))
    torch.cuda.empty_cache()
    return links


# ---- as a cluster file -----------------------------------------------------------------------------------------------


def to_yaml(machine: Machine, name: str) -> str:
    """A cluster file that says what was measured, when and with what."""
    libraries = ", ".join(f"{library} {version}" for library, version in machine.versions.items())
    lines = [
        f"# Found by `placewise devices` of placewise {__version__} on {machine.date}.",
        f"# Libraries: {libraries}.",
        "#",
        "# Memory is what was free then. FLOP rates are those of large matrix products, bandwidth that of a triad or a",
        "# copy, launch the time of an op on one number, latency that of a copy of 4 bytes. All are medians; the",
        "# middle half of the samples spans the +- around them.",
        *(f"# Note: {_line(note)}." for note in machine.notes),
        f"name: {_quoted(name)}",
        "devices:",
    ]
    for device in machine.devices:
        cores = f", {device.cores} cores" if device.cores else ""
        lines += [
            f"  # {_line(device.title)}{cores}",
            f"  - name: {_quoted(device.name)}",
            f"    kind: {device.kind}",
            f"    memory: {device.free:.0f}  # {format_bytes(device.free)} of {format_bytes(device.total)}",
        ]
        lines += [f"    like: {device.like}"] if device.like else []
        lines += ["    flops:"] if device.flops else []
        for dtype, figure in device.flops.items():
            lines.append(f"      {'default' if dtype == 'float32' else dtype}: {_written(figure, 'FLOPS')}")
        lines += [f"    bandwidth: {_written(device.bandwidth, 'B/s')}"] if device.bandwidth else []
        lines += [f"    launch: {_written(device.launch, 's')}"] if device.launch else []
    lines += ["links:"] if machine.links else []
    for link in machine.links:
        lines += [f"  - from: {_quoted(link.source)}", f"    to: {_quoted(link.target)}"]
        lines += [f"    like: {link.like}"] if link.like else []
        for kind, figure in link.bandwidth.items():
            # An engine that cares for speed copies from pinned memory; the other is for comparison.
            lines.append(f"    {'# ' if kind == 'pageable' else ''}bandwidth: {_written(figure, 'B/s')}, {kind}")
        lines += [f"    latency: {_written(link.latency, 's')}"] if link.latency else []
        lines += [f"    via: [{', '.join(map(_quoted, link.via))}]"] if link.via else []
    return "\n".join(lines) + "\n"


def _written(figure: Figure, unit: str) -> str:
    """Four digits, in a unit that suits."""
    spread = f"  # +-{figure.spread / 2:.1%}"
    if unit == "s":
        return f"{figure.median * 1e6:.4g}us{spread}"
    power = min(5, max(0, math.floor(math.log10(figure.median) / 3)))
    return f"{figure.median / 1000**power:.4g}{['', 'K', 'M', 'G', 'T', 'P'][power]}{unit}{spread}"


def _quoted(text: str) -> str:
    return '"' + _line(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
