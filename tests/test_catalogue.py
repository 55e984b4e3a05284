"""Known devices and links, what cluster files make of them, and the boxes made of them."""

import re
from pathlib import Path

import pytest

from placewise import catalogue, files
from placewise.driver import Budget, plan
from placewise.errors import InvalidInput
from placewise.graph import GraphBuilder
from placewise.problem import Problem

ROOT = Path(__file__).parent.parent
GiB = 1024**3
DEVICES, LINKS = catalogue.devices(), catalogue.links()


# ---- entries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_is_complete_sourced_and_plausible(name):
    device = DEVICES[name]
    assert re.search(r"\b(whitepaper|datasheet|specifications?|guide|product page|instance types)\b", device.source)
    assert device.title.split()[0] in ("NVIDIA", "Intel", "AMD", "Two", "16")
    assert device.kind in ("gpu", "igpu", "npu", "cpu")
    assert (device.memory is None) == (device.kind != "gpu")  # the others use the host's
    assert device.memory is None or 8 * GiB <= device.memory <= 141 * GiB
    low, high = {"gpu": (240e9, 4800e9), "cpu": (50e9, 620e9)}.get(device.kind, (70e9, 140e9))
    assert low <= device.bandwidth <= high
    assert 1e-6 <= device.launch <= 30e-6
    assert device.driver is None or device.title.startswith("NVIDIA")


@pytest.mark.parametrize("name", DEVICES)
def test_narrower_arithmetic_is_no_slower(name):
    flops = DEVICES[name].flops
    assert set(flops) <= {"default", "float64", "float16", "bfloat16", "float8", "int8"}
    rates = [flops[dtype] for dtype in ("float64", "default", "float16", "float8", "int8") if dtype in flops]
    assert rates == sorted(rates)
    assert 0.5e12 <= flops["default"] <= 100e12
    if "bfloat16" in flops:
        assert flops["default"] <= flops["bfloat16"] <= flops["int8"]
    if "float16" in flops and "bfloat16" in flops:
        assert flops["float16"] == flops["bfloat16"]


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("tesla-k40", 2880 * 2 * 0.745e9),
        ("tesla-k80", 2496 * 2 * 0.875e9),
        ("rtx-2080-ti", 4352 * 2 * 1.545e9),
        ("rtx-2070", 2304 * 2 * 1.62e9),
        ("rtx-3060", 3584 * 2 * 1.777e9),
        ("rtx-3090", 10496 * 2 * 1.695e9),
        ("rtx-4090", 16384 * 2 * 2.52e9),
        ("a100-80gb", 6912 * 2 * 1.41e9),
        ("h100-sxm", 16896 * 2 * 1.98e9),
        ("l4", 7424 * 2 * 2.04e9),
        ("flex-170", 32 * 256 * 1.95e9),
        ("uhd-770", 32 * 16 * 1.55e9),
        ("arc-140v", 8 * 256 * 1.95e9),
        ("xeon-e5-2699-v3", 18 * 2.3e9 * 32),
        ("core-i9-10900x", 10 * 3.7e9 * 64),
        ("core-i9-12900k", 8 * 3.2e9 * 32 + 8 * 2.4e9 * 16),
        ("epyc-9654", 96 * 2.4e9 * 32),
        ("xeon-8480", 56 * 2.0e9 * 64),
        ("xeon-8480-dual", 2 * 56 * 2.0e9 * 64),
        ("xeon-8480-16-cores", 16 * 2.0e9 * 64),
        ("core-ultra-7-258v", 8 * 2.2e9 * 32),
    ],
)
def test_float32_is_lanes_by_clock(name, rate):
    assert DEVICES[name].flops["default"] == pytest.approx(rate, rel=0.025)


@pytest.mark.parametrize(
    ("name", "channels", "transfers", "width"),
    [
        ("tesla-k40", 384, 6.0e9, 1), ("tesla-k80", 384, 5.0e9, 1), ("rtx-3060", 192, 15e9, 1),
        ("rtx-3090", 384, 19.5e9, 1), ("rtx-4090", 384, 21e9, 1), ("flex-170", 256, 18e9, 1),
        ("xeon-e5-2699-v3", 4, 2133e6, 64), ("core-i9-10900x", 4, 2933e6, 64), ("core-i9-12900k", 2, 4800e6, 64),
        ("uhd-770", 2, 4800e6, 64), ("epyc-7402", 8, 3200e6, 64), ("epyc-9654", 12, 4800e6, 64),
        ("xeon-8480", 8, 4800e6, 64), ("arc-140v", 8, 8533e6, 16),
    ],
)  # fmt: skip
def test_bandwidth_is_bits_by_transfers(name, channels, transfers, width):
    assert DEVICES[name].bandwidth == pytest.approx(channels * width * transfers / 8, rel=0.002)


@pytest.mark.parametrize("name", [name for name in LINKS if name.startswith("pcie")])
def test_pcie_is_lanes_by_transfers(name):
    generation, lanes = map(float, re.fullmatch(r"pcie-(\d)\.0-x(\d+)", name).groups())
    assert LINKS[name].bandwidth == pytest.approx(lanes * 2**generation * 1e9 * 128 / 130 / 8, rel=0.001)
    assert "PCI Express" in LINKS[name].source


def test_nvlink_is_half_of_what_both_directions_have():
    assert LINKS["nvlink-3-bridge"].bandwidth == 112.5e9 / 2
    assert LINKS["nvlink-4"].bandwidth == 900e9 / 2


def test_the_docs_show_the_catalogue():
    def tera(rate):
        return "" if rate is None else f"{rate / 1e12:g}"

    def gib(size):
        return "" if size is None else f"{size / GiB:g} GiB"

    rows = [
        f"| `{name}` | {d.title} | {gib(d.memory)} | {tera(d.flops['default'])} "
        f"| {tera(d.flops.get('float16', d.flops.get('bfloat16')))} | {tera(d.flops.get('int8'))} "
        f"| {d.bandwidth / 1e9:g} GB/s |"
        for name, d in DEVICES.items()
    ]
    rows += [f"| `{name}` | {link.bandwidth / 1e9:g} GB/s |" for name, link in LINKS.items()]
    text = (ROOT / "docs" / "devices.md").read_text()
    assert [row for row in rows if row not in text] == []
    listed = set(re.findall(r"^\| `([^`]+)`", text, re.MULTILINE))
    assert listed == {*DEVICES, *LINKS, *files.bundled_boxes()}
    reached = catalogue.shares()
    assert (reached.flops, reached.bandwidth, reached.memory, reached.link) == (0.70, 0.85, 0.92, 0.80)
    shares = "70 % of the FLOP rate, 85 % of the bandwidth, 92 % of the memory and 80 % of a link"
    assert shares in " ".join(text.split())


def test_the_box_in_the_docs_loads(load):
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "devices.md").read_text(), re.DOTALL)
    assert load(text).device_names == ("gpu0", "gpu1", "cpu")


# ---- like ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def load(tmp_path):
    def load(text: str):
        path = tmp_path / "box.yaml"
        path.write_text(text)
        return files.load_cluster(path)

    return load


def test_like_stands_for_what_is_reached(load):
    (gpu,) = load("devices: [{name: a, like: rtx-3090}]").devices
    assert (gpu.name, gpu.kind, gpu.launch) == ("a", "gpu", pytest.approx(5e-6))
    assert gpu.memory == pytest.approx(0.92 * 24 * GiB)
    assert gpu.bandwidth == pytest.approx(0.85 * 936e9)
    assert gpu.peak("float32") == pytest.approx(0.70 * 35.6e12)
    assert gpu.peak("float16") == pytest.approx(0.70 * 71e12)


def test_what_is_given_replaces_what_is_known(load):
    (gpu,) = load("devices: [{name: a, like: l4, kind: card, memory: 5GiB, bandwidth: 1GB/s, launch: 9us}]").devices
    assert (gpu.kind, gpu.memory, gpu.bandwidth, gpu.launch) == ("card", 5 * GiB, 1e9, pytest.approx(9e-6))
    (gpu,) = load("devices: [{name: a, like: l4, flops: {int8: 7TFLOPS}}]").devices  # dtype by dtype
    assert gpu.peak("int8") == 7e12
    assert gpu.peak("float16") == pytest.approx(0.70 * 121e12)
    (gpu,) = load("devices: [{name: a, like: l4, memory: null}]").devices
    assert gpu.memory == float("inf")


def test_links_may_be_like_known_ones(load):
    two = "devices: [{name: a}, {name: b}]\nlinks: "
    link, back = load(two + "[{between: [a, b], like: pcie-4.0-x16}]").links
    assert (link.bandwidth, link.latency) == (pytest.approx(0.8 * 31.5e9), pytest.approx(10e-6))
    assert (back.source, back.target) == ("b", "a")
    link, back = load(two + "[{from: a, to: b, like: nvlink-4, latency: 1us}, {from: b, to: a}]").links
    assert (link.bandwidth, link.latency) == (pytest.approx(0.8 * 450e9), pytest.approx(1e-6))
    assert back.bandwidth == float("inf")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "devices: [{name: a, like: rtx-3070}]",
            r"devices\[0\]: like: there is no known device 'rtx-3070'; did you mean rtx-3090, rtx-3060, rtx-2070\?",
        ),
        ("devices: [{name: a, like: RTX 309}]", "did you mean rtx-3090"),
        ("devices: [{name: a, like: '?!'}]", r"there is no known device '\?!'; known are tesla-k40, "),
        ("devices: [{name: a, like: 7}]", r"devices\[0\]\.like: must be text in quotes, found 7"),
        (
            "devices: [{name: a, like: core-i9-12900k}]",
            r"devices\[0\]: give its memory: 'core-i9-12900k' has none of its own",
        ),
        (
            "devices: [{name: a}, {name: b}]\nlinks: [{between: all, like: pcie-4-x16}]",
            r"links\[0\]: like: there is no known link 'pcie-4-x16'; did you mean pcie-4.0-x16",
        ),
        ("devices: [{name: a, like: l4, memory: 5 apples}]", r"devices\[0\]\.memory: '5 apples' is not a number"),
        (
            "devices: [{name: a}]\nlinks: [{like: nvlink-4}]",
            r"links\[0\]: give either 'between', or 'from' and 'to'",
        ),
    ],
)
def test_wrong_likes(load, text, complaint):
    with pytest.raises(InvalidInput, match=f"box.yaml: .*{complaint}"):
        load(text)


def test_a_saved_cluster_has_plain_numbers(tmp_path):
    box = files.load_cluster("unequal-cards")
    files.save_cluster(box, tmp_path / "saved.yaml")
    text = (tmp_path / "saved.yaml").read_text()
    assert "like" not in text
    assert "rtx" not in text
    assert files.load_cluster(tmp_path / "saved.yaml").digest == box.digest


# ---- many links in one entry -----------------------------------------------------------------------------------------

THREE = "devices: [{name: a}, {name: b}, {name: c}]\nlinks: "


def test_between_some_devices_means_every_pair(load):
    box = load(THREE + '[{between: [a, b, c], bandwidth: 1GB/s, via: ["{from} out", "{to} in", bus]}]')
    ways = {(link.source, link.target): link.via for link in box.links}
    assert len(ways) == 6
    assert ways["a", "c"] == ("a out", "c in", "bus")
    assert ways["c", "a"] == ("c out", "a in", "bus")


def test_one_direction_keeps_its_braces(load):
    """A cluster whose channel has such a name is saved link by link, and comes back as it was."""
    box = load('devices: [{name: a}, {name: b}]\nlinks: [{from: a, to: b, via: ["{to}"]}, {from: b, to: a}]')
    assert box.links[0].via == ("{to}",)


@pytest.mark.parametrize(
    ("links", "complaint"),
    [
        ("[{between: [a, b, c]}, {between: [b, c]}]", "link b -> c is given twice"),
        ("[{between: [a, b, b]}]", "link a -> b is given twice"),
        ("[{between: [a, b, d]}]", "a link names the unknown device 'd'"),
        ("[{between: [a]}]", "must be 'all' or a list of two or more device names"),
        (f"[{{between: [{', '.join(f'x{i}' for i in range(513))}]}}]", "must be 'all' or a list of two or more"),
        (f"[{{between: [{', '.join(f'x{i}' for i in range(500))}]}}]", "a link names the unknown device 'x0'"),
    ],
)
def test_wrong_groups(load, links, complaint):
    with pytest.raises(InvalidInput, match=complaint):
        load(THREE + links)


# ---- boxes -----------------------------------------------------------------------------------------------------------


def small_problem(box: str) -> Problem:
    """Eight products of 100 MFLOP with weights, one after the other, in four dtypes."""
    build, tensor = GraphBuilder("small"), None
    for i, dtype in enumerate(["float32", "float16", "bfloat16", "int8"] * 2):
        (tensor,) = build.op(
            f"op{i}", kind="matmul", inputs=[tensor] if tensor is not None else [], outputs=[1e6],
            flops=1e8, bytes_accessed=5e6, resident=4e6, op_dtypes=dtype,
        )  # fmt: skip
    return Problem(build.graph(), files.load_cluster(box))


@pytest.mark.parametrize("box", files.bundled_boxes())
def test_a_box_plans(box):
    problem = small_problem(box)
    assert problem.cluster.name == box
    found = plan(problem, "heft", budget=Budget(evaluations=10))
    # 8 ops of 100 MFLOP: not below the fastest device's arithmetic, nor above a second.
    assert 8 * 1e8 / 2e15 < found.value < 1.0
    memory = problem.cluster.memory
    assert (memory >= 4 * GiB).all()
    assert (memory <= 2048 * GiB).all()


@pytest.mark.parametrize(
    ("box", "kinds"),
    [
        ("hierarchical-2", "gpu gpu cpu"), ("hierarchical-4", "gpu gpu gpu gpu cpu"),
        ("hierarchical-8", "gpu gpu gpu gpu gpu gpu gpu gpu cpu"), ("colocrl-2", "gpu gpu cpu"),
        ("colocrl-4", "gpu gpu gpu gpu cpu"), ("placeto-2", "gpu gpu cpu"), ("placeto-4", "gpu gpu gpu gpu cpu"),
        ("hsdag", "cpu igpu gpu"), ("talos", "gpu gpu cpu"), ("pc-24gib", "gpu cpu"),
        ("dgx-h100", "gpu gpu gpu gpu gpu gpu gpu gpu cpu"), ("h200-16-cores", "gpu cpu"),
    ],
)  # fmt: skip
def test_a_box_has_the_devices_of_its_machine(box, kinds):
    assert [device.kind for device in files.load_cluster(box).devices] == kinds.split()


def test_channels_say_what_is_shared():
    dgx = files.load_cluster("dgx-h100")
    shared = {
        (a, b): set(dgx.channels_of[dgx.device_index(a), dgx.device_index(b)])
        for a, b in [("gpu0", "gpu1"), ("gpu2", "gpu3"), ("gpu0", "gpu3"), ("gpu1", "gpu0"), ("gpu0", "cpu")]
    }
    assert not shared["gpu0", "gpu1"] & shared["gpu2", "gpu3"]  # the switches do not block
    assert shared["gpu0", "gpu1"] & shared["gpu0", "gpu3"]  # one way out of a GPU
    assert shared["gpu2", "gpu3"] & shared["gpu0", "gpu3"]  # one way in
    assert not shared["gpu0", "gpu1"] & shared["gpu1", "gpu0"]  # both directions at once
    assert not shared["gpu0", "cpu"] & shared["gpu0", "gpu1"]
    box = files.load_cluster("hierarchical-8")

    def way(a: int, b: int) -> set[str]:
        return {box.channels[c] for c in box.channels_of[a, b]}

    assert way(0, 8) == way(8, 3) == {"host0"}
    assert way(0, 7) == {"host0", "host1"}
    assert way(4, 5) == {"gpu4 out", "gpu5 in"}
