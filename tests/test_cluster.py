import math

import numpy as np
import pytest

from placewise.cluster import MAX_DEVICES, Cluster, Device, Link, full_mesh
from placewise.errors import InvalidInput


def pair(device=None, link=None):
    """Two devices; `device` and `link` change the first of each."""
    devices = (
        Device(**{"name": "gpu", "memory": 10, "flops": {"float32": 4.0}, **(device or {})}),
        Device("cpu", "cpu"),
    )
    links = (
        Link(**{"source": "gpu", "target": "cpu", "bandwidth": 2.0, "latency": 0.5, **(link or {})}),
        Link("cpu", "gpu"),
    )
    return Cluster(devices, links, "pair")


def test_arrays():
    cluster = pair({"memory": 10}, {"via": ("bus",)})
    assert cluster.device_names == ("gpu", "cpu")
    assert cluster.latency.tolist() == [[0.0, 0.5], [0.0, 0.0]]
    assert cluster.seconds_per_byte.tolist() == [[0.0, 0.5], [0.0, 0.0]]
    assert cluster.memory.tolist() == [10.0, math.inf]
    assert cluster.channels == ("bus", "cpu->gpu")
    assert cluster.channels_of == {(0, 1): (0,), (1, 0): (1,)}


def test_memory_is_floating_point_even_if_given_in_whole_numbers():
    assert full_mesh([Device("a", memory=1)]).memory.dtype == np.float64


def test_a_link_may_share_the_channel_of_another_link():
    cluster = pair(link={"via": ("cpu->gpu",)})
    assert cluster.channels == ("cpu->gpu",)
    assert cluster.channels_of == {(0, 1): (0,), (1, 0): (0,)}


def test_channels_of_links_as_arrays():
    start, channels = pair({"memory": 10}, {"via": ("bus", "root")}).link_channels
    assert (start.tolist(), channels.tolist()) == ([0, 0, 2, 3, 3], [0, 1, 2])
    assert pair(link={"via": ("bus",)}).has_shared_channels
    assert not pair().has_shared_channels


def test_quantities_may_be_texts():
    cluster = pair({"memory": "5GiB", "flops": {"default": "2TFLOPS"}, "launch": "5us"}, {"bandwidth": "16GB/s"})
    device = cluster.devices[0]
    assert (device.memory, device.flops, device.launch) == (5 * 2.0**30, {"default": 2e12}, 5 * 1e-6)
    assert cluster.links[0].bandwidth == 16e9
    assert cluster.with_memory({"gpu": "1KiB"}).memory[0] == 1024.0


def test_a_device_keeps_its_own_rates():
    rates = {"default": 1.0}
    device = Device("d", flops=rates)
    rates["default"] = 2.0
    assert device.peak("int8") == 1.0


def test_derived_arrays_cannot_be_written():
    cluster = pair()
    for array in (cluster.memory, cluster.latency, cluster.seconds_per_byte, *cluster.link_channels):
        assert not array.flags.writeable


def test_what_is_no_device_is_refused():
    with pytest.raises(InvalidInput, match="devices: must be Device objects"):
        Cluster(["gpu"])
    with pytest.raises(InvalidInput, match="links: must be Link objects"):
        Cluster((Device("a"),), "ab")


def test_too_many_devices():
    devices = [Device(f"d{i}") for i in range(MAX_DEVICES + 1)]
    with pytest.raises(InvalidInput, match=f"devices: must be at most {MAX_DEVICES}, found {MAX_DEVICES + 1}"):
        full_mesh(devices)
    with pytest.raises(InvalidInput, match="devices: must be at most"):
        Cluster(tuple(devices))


def test_full_mesh():
    cluster = full_mesh([Device(name) for name in "abc"], 3.0, 0.1, "mesh")
    assert cluster.name == "mesh"
    assert len(cluster.links) == 6
    assert len(cluster.channels) == 6
    assert (cluster.latency == 0.1 * (1 - np.eye(3))).all()


def test_one_device_needs_no_link():
    assert Cluster((Device("only"),)).channels == ()


def test_devices_by_name_or_number():
    cluster = pair()
    assert cluster.device_index("cpu") == 1
    assert cluster.device_index("1") == 1
    for name in ("2", "-1", "²", "9" * 5000):
        with pytest.raises(InvalidInput, match=r"has no device .*; it has gpu, cpu"):
            cluster.device_index(name)


def test_a_name_goes_before_a_number():
    assert full_mesh([Device("1"), Device("0")]).device_index("1") == 0


def test_with_memory():
    limited = pair().with_memory({"cpu": 5.0, "0": 7.0})
    assert limited.memory.tolist() == [7.0, 5.0]
    assert limited.digest != pair().digest
    with pytest.raises(InvalidInput, match="no device 'npu'"):
        pair().with_memory({"npu": 1.0})


def test_with_memory_does_not_choose_between_two_limits():
    cluster = full_mesh([Device("a"), Device("b")])
    with pytest.raises(InvalidInput, match="max_memory: names a device twice, by name and by number: a, 0"):
        cluster.with_memory({"a": 1.0, "0": 2.0})
    with pytest.raises(InvalidInput, match="max_memory: must be a Mapping, found 5"):
        cluster.with_memory(5)


@pytest.mark.parametrize("devices", [5, [Device("a"), "b"]])
def test_a_mesh_is_of_devices(devices):
    with pytest.raises(InvalidInput, match="devices: must be a"):
        full_mesh(devices)


def test_peak():
    device = Device("d", flops={"float16": 8.0, "default": 2.0})
    assert (device.peak("float16"), device.peak("int8")) == (8.0, 2.0)
    with pytest.raises(InvalidInput, match=r"'gpu' gives no FLOP rate for 'int8' \(it has: float32\)"):
        pair().devices[0].peak("int8")


def test_equal_clusters_have_equal_digests():
    flops = {"a": 1, "b": 2}
    one = full_mesh([Device("x", memory=24, flops=flops), Device("y")], 8)
    two = full_mesh([Device("x", memory=24.0, flops=dict(reversed(flops.items()))), Device("y")], np.float64(8))
    assert one.digest == two.digest
    assert Cluster(one.devices, one.links[::-1]).digest == one.digest


@pytest.mark.parametrize(
    "change",
    [
        {"device": {"kind": "npu"}},
        {"device": {"memory": 11}},
        {"device": {"flops": {"float32": 5.0}}},
        {"device": {"bandwidth": 1.0}},
        {"device": {"launch": 1.0}},
        {"device": {"copies": False}},
        {"link": {"bandwidth": 3.0}},
        {"link": {"latency": 0.0}},
        {"link": {"via": ("bus",)}},
    ],
)
def test_every_field_counts_in_the_digest(change):
    assert pair(**change).digest != pair().digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": {"name": "cpu"}}, "two devices are named 'cpu'"),
        ({"device": {"memory": -1}}, "device 'gpu': memory: -1 is not a number of bytes: it must be zero or more"),
        ({"device": {"memory": math.nan}}, "device 'gpu': memory: nan is not"),
        ({"device": {"launch": math.inf}}, "device 'gpu': launch: must be finite, found inf"),
        ({"device": {"bandwidth": 0}}, "device 'gpu': bandwidth: must be at least 1e-24 and not zero, found 0"),
        ({"device": {"flops": {"float32": 0}}}, r"device 'gpu': flops\.float32: must be at least 1e-24"),
        ({"device": {"flops": 5}}, "device 'gpu': flops: must give a rate by dtype, found 5"),
        ({"device": {"flops": {3: 5}}}, "device 'gpu': flops: must be text, found 3"),
        ({"device": {"memory": "5GiX"}}, "device 'gpu': memory: '5GiX' is not a number of bytes"),
        ({"device": {"memory": 1e300}}, "device 'gpu': memory: 1e\\+300 is too large"),
        ({"device": {"launch": 1e300}}, "device 'gpu': launch: 1e\\+300 is too large"),
        ({"device": {"copies": 1}}, "device 'gpu': copies: must be True or False, found 1"),
        ({"device": {"name": 3}}, "the name of a device: must be text, found 3"),
        ({"device": {"name": "\ud800"}}, "holds half a character"),
        ({"link": {"via": "pcie"}}, "link gpu -> cpu: via: must be a tuple of channel names, found 'pcie'"),
        ({"link": {"via": (3,)}}, "link gpu -> cpu: a name: must be text, found 3"),
        ({"link": {"bandwidth": 1e-300}}, "link gpu -> cpu: bandwidth: must be at least 1e-24"),
        ({"link": {"target": "npu"}}, "a link names the unknown device 'npu'"),
        ({"link": {"target": "gpu"}}, "link gpu -> gpu joins a device to itself"),
        ({"link": {"source": "cpu", "target": "gpu"}}, "link cpu -> gpu is given twice"),
        ({"link": {"bandwidth": 0}}, "link gpu -> cpu: bandwidth: must be at least 1e-24"),
        ({"link": {"latency": math.inf}}, "link gpu -> cpu: latency: must be finite"),
        ({"link": {"via": ("bus", "bus")}}, "link gpu -> cpu: via: names a channel twice"),
    ],
)
def test_what_is_wrong_is_said(change, message):
    with pytest.raises(InvalidInput, match=message):
        pair(**change)


def test_every_pair_needs_a_link():
    with pytest.raises(InvalidInput, match="cluster 'c' has no link from 'b' to 'a'; add one"):
        Cluster((Device("a"), Device("b")), (Link("a", "b"),), "c")


def test_a_cluster_has_a_device():
    with pytest.raises(InvalidInput, match="has no device"):
        Cluster(())


@pytest.mark.parametrize("name", ["", " "])
def test_a_device_has_a_name(name):
    with pytest.raises(InvalidInput, match="cluster 'box': a device has no name"):
        Cluster((Device(name),), name="box")
