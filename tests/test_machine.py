"""What `placewise devices` finds: on this machine, and on machines made of files and fakes."""

import json
import platform
import subprocess
import sys
from dataclasses import replace
from itertools import chain, repeat
from types import SimpleNamespace

import pytest

from placewise import cli, files, machine
from placewise.errors import Unsupported
from placewise.machine import Figure, FoundDevice, FoundLink, Machine

MiB, GiB = 1024**2, 1024**3


@pytest.fixture
def hasty(monkeypatch):
    """Small ops and few samples: numbers are rough, the way to them is the same."""
    for name, value in {"BUDGET": 0.005, "STRETCH": 0.0005, "SMALLEST": 256, "LONG_ENOUGH": 0.0005}.items():
        monkeypatch.setattr(machine, name, value)
    monkeypatch.setattr(machine, "ARRAY_BYTES", 4 * MiB)


# ---- this machine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_this_machine(hasty, monkeypatch, tmp_path, library):
    if library == "torch":
        pytest.importorskip("torch")
    else:
        monkeypatch.setattr(machine, "_torch", lambda: None)
    monkeypatch.setattr(machine, "_gpus_by_torch", lambda *_: ([], [], []))  # whatever this machine has
    monkeypatch.setattr(machine, "gpus_by_nvidia_smi", lambda: ([], [], []))
    said = []
    found = machine.describe_machine(said.append)
    (cpu,) = found.devices
    assert 0 < cpu.free <= cpu.total
    assert 1 <= cpu.cores <= 4096
    assert 1e7 < cpu.flops["float32"].median < 1e15  # however busy it is
    assert 1e7 < cpu.bandwidth.median < 1e14
    assert 1e-8 < cpu.launch.median < 1e-2
    for figure in (*cpu.flops.values(), cpu.bandwidth, cpu.launch):
        assert figure.samples >= 3
        assert figure.spread >= 0
    assert ("torch" in found.versions) == (library == "torch")
    assert said[0] == "cpu: float32 products"
    path = tmp_path / "box.yaml"
    path.write_text(machine.to_yaml(found, "box"))
    (device,) = files.load_cluster(path).devices
    assert device.memory == pytest.approx(cpu.free, abs=1)
    assert device.peak("float32") == pytest.approx(cpu.flops["float32"].median, rel=1e-3)
    assert device.bandwidth == pytest.approx(cpu.bandwidth.median, rel=1e-3)
    assert device.launch == pytest.approx(cpu.launch.median, rel=1e-3)


def test_the_command(hasty, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine, "_torch", lambda: None)
    monkeypatch.setattr(machine, "gpus_by_nvidia_smi", lambda: ([], [], ["a card is left out"]))
    out = tmp_path / "mine.yaml"

    def run(*args) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["placewise", "devices", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return SimpleNamespace(code=stopped.value.code, **capsys.readouterr()._asdict())

    result = run("--out", out, "--json")
    assert result.code == 0
    facts = json.loads(result.out)
    assert facts["devices"][0]["free"] <= facts["devices"][0]["total"]
    assert facts["devices"][0]["flops"]["float32"]["median"] > 0
    assert "note: a card is left out\n" in result.err
    assert f"wrote {out}\n" in result.err
    assert files.load_cluster(out).name == "mine"
    result = run()
    assert result.code == 0
    assert "| cpu   | float32 products  |" in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    assert run("--out", tmp_path).code == 2
    assert run("--out", tmp_path / "no" / "box.yaml").code == 2


# ---- memory and cores, from files ------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path):
    """A machine with 8 GiB, of which 5 are available, without control groups."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {8 * MiB} kB\nMemFree: {MiB} kB\nMemAvailable: {5 * MiB} kB\n")
    return tmp_path


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(str(text))


def test_memory_without_control_groups(root):
    assert machine.host_memory(root) == (5 * GiB, 8 * GiB)


def test_memory_in_a_group_of_version_2(root):
    write(root, "proc/self/cgroup", "0::/a/b\n")
    write(root, "sys/fs/cgroup/a/b/memory.max", "max\n")
    write(root, "sys/fs/cgroup/a/memory.max", 4 * GiB)  # the one above binds
    write(root, "sys/fs/cgroup/a/memory.current", 3 * GiB)
    assert machine.host_memory(root) == (1 * GiB, 4 * GiB)
    write(root, "sys/fs/cgroup/a/memory.stat", f"anon {GiB}\ninactive_file {2 * GiB}\n")  # files that give way
    assert machine.host_memory(root) == (3 * GiB, 4 * GiB)
    write(root, "sys/fs/cgroup/a/b/memory.max", 2 * GiB)
    write(root, "sys/fs/cgroup/a/b/memory.current", GiB // 2)
    assert machine.host_memory(root) == (1.5 * GiB, 2 * GiB)


def test_memory_in_a_group_of_version_1(root):
    write(root, "proc/self/cgroup", "9:cpu,cpuacct:/x\n4:memory:/jobs/7\n0::/\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)  # no limit
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", 7 * GiB)
    assert machine.host_memory(root) == (5 * GiB, 8 * GiB)
    write(root, "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes", 3 * GiB)
    write(root, "sys/fs/cgroup/memory/jobs/7/memory.usage_in_bytes", GiB)
    assert machine.host_memory(root) == (2 * GiB, 3 * GiB)


def test_memory_in_a_container_that_sees_only_its_own_group(root):
    write(root, "proc/self/cgroup", "0::/docker/0123\n")  # the path outside
    write(root, "sys/fs/cgroup/memory.max", 2 * GiB)  # the file inside
    write(root, "sys/fs/cgroup/memory.current", 3 * GiB)  # above its limit, for a moment
    assert machine.host_memory(root) == (0, 2 * GiB)


@pytest.mark.parametrize("text", ["", "MemTotal: 5 kB\n", "MemTotal:\nMemAvailable: x kB\n"])
def test_memory_of_an_unknown_system(root, text):
    write(root, "proc/meminfo", text)
    with pytest.raises(Unsupported, match="/proc/meminfo, which Linux has"):
        machine.host_memory(root)


def test_cores_within_quotas(root, monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert machine.usable_cores(root) == 16
    write(root, "proc/self/cgroup", "0::/a\n2:cpu,cpuacct:/b\n")
    write(root, "sys/fs/cgroup/a/cpu.max", "max 100000\n")
    assert machine.usable_cores(root) == 16
    write(root, "sys/fs/cgroup/a/cpu.max", "400000 100000\n")
    assert machine.usable_cores(root) == 4
    write(root, "sys/fs/cgroup/cpu,cpuacct/b/cpu.cfs_quota_us", -1)
    write(root, "sys/fs/cgroup/cpu,cpuacct/b/cpu.cfs_period_us", 100000)
    assert machine.usable_cores(root) == 4
    write(root, "sys/fs/cgroup/cpu,cpuacct/b/cpu.cfs_quota_us", 150000)
    assert machine.usable_cores(root) == 2
    write(root, "sys/fs/cgroup/cpu,cpuacct/b/cpu.cfs_quota_us", 10000)
    assert machine.usable_cores(root) == 1


def test_the_processors_name(root):
    write(root, "proc/cpuinfo", "processor: 0\nmodel name\t: Some CPU @ 3 GHz\nmodel name: other\n")
    assert machine.cpu_title(root) == "Some CPU @ 3 GHz"
    write(root, "proc/cpuinfo", "")
    assert machine.cpu_title(root)


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_median_and_spread(monkeypatch):
    """Two stretches to warm up, then samples of 2, 4, 6, 8 and 10 s: quartiles 4, 6 and 8."""
    monkeypatch.setattr(machine, "BUDGET", 30.0)
    lengths = chain([100.0, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0], repeat(1.0))
    now, waits = [0.0], []

    def run() -> None:
        now[0] += next(lengths)

    figure = machine.sampled(run, lambda: waits.append(now[0]), lambda: now[0])
    assert figure == Figure(6.0, 4.0 / 6.0, 5)
    assert len(waits) == 2 * 7  # before and after each


def test_short_runs_are_timed_together():
    now, runs = [0.0], []

    def run() -> None:
        runs.append(1)
        now[0] += 1e-6

    figure = machine.sampled(run, lambda: None, lambda: now[0])
    assert figure.median == pytest.approx(1e-6)
    assert figure.spread == pytest.approx(0.0, abs=1e-6)
    assert len(runs) == pytest.approx(2 + figure.samples * machine.STRETCH / 1e-6, rel=0.01)


class FakeEngine:
    """10 TFLOP/s, except that one dtype is missing."""

    dtypes = ("float32", "int8")

    def __init__(self, missing: str) -> None:
        self.missing, self.sides = missing, []

    def gemm(self, dtype, side):
        if dtype == self.missing:
            raise RuntimeError("not implemented")
        self.sides.append(side)
        return lambda: None

    def stream(self, count):
        return lambda: None, 3.0 * count

    def small(self):
        return lambda: None

    def wait(self):
        pass


def test_a_dtype_without_arithmetic_is_left_out(hasty):
    figures = machine._measured(FakeEngine("int8"), "x", 8 * GiB, lambda _: None)
    assert list(figures["flops"]) == ["float32"]
    with pytest.raises(RuntimeError, match="not implemented"):
        machine._measured(FakeEngine("float32"), "x", 8 * GiB, lambda _: None)


def test_products_grow_until_they_no_longer_fit(hasty, monkeypatch):
    monkeypatch.setattr(machine, "LONG_ENOUGH", 1e9)
    engine = FakeEngine("")
    machine._gemm_rate(engine, "float32", 1e15)
    assert engine.sides == [256, 512, 1024, 2048, 4096, 8192]
    engine.sides.clear()
    machine._gemm_rate(engine, "float32", 8 * 3 * 8 * 1024**2)  # an eighth for three matrices of side 1024
    assert engine.sides == [256, 512, 1024]


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def fake_torch(cards: int, peers: bool, broken: int | None = None) -> SimpleNamespace:
    """Torch with GPUs that are the CPU; one may be broken."""
    torch = pytest.importorskip("torch")
    synchronised = []

    def on_cpu(make):
        def made(*args, device="cpu", pin_memory=False, **others):
            assert device == "cpu" or not pin_memory
            return make(*args, **others)

        return made

    def mem_get_info(index):
        if index == broken:
            raise RuntimeError("CUDA error: out of memory\nCompile with ...")
        return 20 * GiB, 24 * GiB

    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: cards,
        mem_get_info=mem_get_info,
        get_device_name=lambda index: f"Card {index}",
        can_device_access_peer=lambda a, b: peers,
        synchronize=synchronised.append,
        empty_cache=lambda: None,
    )
    names = ("uint8", "int8", "float32", "float64", "bfloat16", "float16", "matmul", "add", "_int_mm", "__version__")
    made = {name: on_cpu(getattr(torch, name)) for name in ("zeros", "ones", "randn", "randint")}
    return SimpleNamespace(
        cuda=cuda, synchronised=synchronised, **made, **{name: getattr(torch, name) for name in names}
    )


def test_gpus_by_torch(hasty, monkeypatch, tmp_path):
    torch = fake_torch(2, peers=True)
    monkeypatch.setattr(machine, "_torch", lambda: torch)
    found = machine.describe_machine()
    assert [device.name for device in found.devices] == ["cpu", "cuda:0", "cuda:1"]
    assert (found.devices[1].title, found.devices[1].free, found.devices[1].total) == ("Card 0", 20 * GiB, 24 * GiB)
    ways = [(link.source, link.target) for link in found.links]
    assert ways == [
        ("cpu", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:1"), ("cuda:1", "cpu"),
        ("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"),
    ]  # fmt: skip
    assert [list(link.bandwidth) for link in found.links] == [["pinned", "pageable"]] * 4 + [["direct"]] * 2
    assert all(figure.median > 1e6 for link in found.links for figure in link.bandwidth.values())
    assert not any(link.via for link in found.links)
    assert {"cuda:0", "cuda:1"} == set(torch.synchronised)  # nothing is timed that is still running
    path = tmp_path / "box.yaml"
    path.write_text(machine.to_yaml(found, "box"))
    box = files.load_cluster(path)
    assert box.device_names == ("cpu", "cuda:0", "cuda:1")
    assert box.links[0].bandwidth == pytest.approx(found.links[0].bandwidth["pinned"].median, rel=1e-3)
    assert box.links[0].latency == pytest.approx(found.links[0].latency.median, rel=1e-3)
    assert box.links[4].bandwidth == pytest.approx(found.links[4].bandwidth["direct"].median, rel=1e-3)


def test_gpus_that_do_not_reach_each_other_share_the_way_by_the_host(hasty):
    links = machine._measured_links(fake_torch(2, peers=False), ["cuda:0", "cuda:1"], lambda _: None)
    via = {(link.source, link.target): link.via for link in links}
    assert via["cuda:0", "cuda:1"] == ("cuda:0 out", "cuda:1 in")
    assert via["cpu", "cuda:1"] == ("cuda:1 in",)
    assert via["cuda:0", "cpu"] == ("cuda:0 out",)


def test_a_gpu_that_cannot_be_measured_is_left_out(hasty):
    gpus, links, notes = machine._gpus_by_torch(fake_torch(2, peers=True, broken=0), lambda _: None)
    assert [gpu.name for gpu in gpus] == ["cuda:1"]
    assert {name for link in links for name in (link.source, link.target)} == {"cpu", "cuda:1"}
    assert notes == ["cuda:0 is left out, it cannot be measured: CUDA error: out of memory"]


def smi(text: str):
    return lambda command, **_: SimpleNamespace(stdout=text)


def test_gpus_by_nvidia_smi(tmp_path):
    text = "NVIDIA GeForce RTX 3090, 20480, 24576, 4, 16\nTesla K80, 11000, 11441, 3, 8\nOdd Card, 1, 2, 3, 4\n"
    gpus, links, notes = machine.gpus_by_nvidia_smi(smi(text))
    assert [(gpu.name, gpu.like, gpu.free, gpu.total) for gpu in gpus] == [
        ("cuda:0", "rtx-3090", 20 * GiB, 24 * GiB),
        ("cuda:1", "tesla-k80", 11000 * MiB, 11441 * MiB),
    ]
    like = {(link.source, link.target): link.like for link in links}
    assert like["cpu", "cuda:0"] == like["cuda:0", "cpu"] == "pcie-4.0-x16"
    assert like["cpu", "cuda:1"] == like["cuda:0", "cuda:1"] == "pcie-3.0-x8"  # at the pace of the slower
    assert len(notes) == 3
    assert notes[2].startswith("cuda:2, Odd Card, is left out, for the catalogue does not have it; to have it measured")
    host = FoundDevice("cpu", "cpu", "A", 4 * GiB, 8 * GiB, 2, flops={"float32": Figure(1e12, 0.1, 3)})
    path = tmp_path / "box.yaml"
    path.write_text(machine.to_yaml(Machine((host, *gpus), tuple(links), "today", {}, tuple(notes)), "box"))
    box = files.load_cluster(path)
    assert box.devices[1].memory == 20 * GiB
    assert box.devices[1].peak("float16") == pytest.approx(0.70 * 71e12)
    assert box.links[0].bandwidth == pytest.approx(0.8 * 31.5e9)


@pytest.mark.parametrize("text", ["", "\n", "No devices were found\n", "a, b, c, d, e\n"])
def test_nvidia_smi_that_finds_nothing(text):
    assert machine.gpus_by_nvidia_smi(smi(text)) == ([], [], [])


def test_an_unknown_bus_is_taken_for_the_slowest():
    (_, links, _) = machine.gpus_by_nvidia_smi(smi("NVIDIA L4, 100, 200, [N/A], [N/A]\n"))
    assert links[0].like == "pcie-3.0-x8"


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(), PermissionError(), subprocess.TimeoutExpired("x", 1), subprocess.CalledProcessError(9, "x")],
)
def test_nvidia_smi_that_fails(error):
    def run(*_, **__):
        raise error

    assert machine.gpus_by_nvidia_smi(run) == ([], [], [])


# ---- the file --------------------------------------------------------------------------------------------------------


def test_the_file_says_what_when_and_with_what(tmp_path):
    host = FoundDevice(
        "cpu", "cpu", "Odd\nCPU: #1", 4 * GiB, 8 * GiB, 2,
        flops={"float32": Figure(1.5e12, 0.02, 9), "bfloat16": Figure(3e15, 0.0, 9)},
        bandwidth=Figure(50e9, 0.1, 9), launch=Figure(1.25e-6, 0.3, 9),
    )  # fmt: skip
    gpu = replace(host, name='g"\\0', kind="gpu", cores=None)
    link = FoundLink("cpu", gpu.name, {"pinned": Figure(25e9, 0, 3), "pageable": Figure(9e9, 0, 3)}, Figure(9e-6, 0, 3))
    back = FoundLink(gpu.name, "cpu", like="pcie-3.0-x16", via=("a b",))
    found = Machine((host, gpu), (link, back), "2026-01-02 03:04 UTC", {"torch": "2.13"}, ("one\nnote",))
    text = machine.to_yaml(found, "my: box")
    assert "on 2026-01-02 03:04 UTC.\n# Libraries: torch 2.13.\n" in text
    assert "# Note: one note.\n" in text
    assert "  # Odd CPU: #1, 2 cores\n" in text
    assert "    memory: 4294967296  # 4.00 GiB of 8.00 GiB\n" in text
    assert "      default: 1.5TFLOPS  # +-1.0%\n      bfloat16: 3PFLOPS  # +-0.0%\n" in text
    assert "    bandwidth: 50GB/s  # +-5.0%\n    launch: 1.25us  # +-15.0%\n" in text
    assert "    bandwidth: 25GB/s  # +-0.0%, pinned\n    # bandwidth: 9GB/s  # +-0.0%, pageable\n" in text
    path = tmp_path / "box.yaml"
    path.write_text(text)
    box = files.load_cluster(path)
    assert (box.name, box.device_names) == ("my: box", ("cpu", 'g"\\0'))
    assert box.devices[0].flops == {"default": 1.5e12, "bfloat16": 3e15}
    assert (box.links[0].bandwidth, box.links[0].latency) == (25e9, pytest.approx(9e-6))
    assert box.links[1].via == ("a b",)


# ---- memory that is kept ---------------------------------------------------------------------------------------------

AGAIN = """
import resource, sys, threading
import numpy as np
from placewise.machine import keep_memory
if sys.argv[1] == "kept":
    keep_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(96 * 2**20, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def work():
    faults()
    print(faults())
worker = threading.Thread(target=work)
worker.start()
worker.join()
work()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_memory_that_is_freed_is_kept_for_large_tensors_of_all_threads():
    found = {}
    for way in ("kept", "usual"):
        ran = subprocess.run([sys.executable, "-c", AGAIN, way], capture_output=True, text=True, check=True)
        found[way] = [int(line) for line in ran.stdout.split()]
    assert max(found["kept"]) < 100  # page faults
    assert min(found["usual"]) > 10 * max(*found["kept"], 1)
