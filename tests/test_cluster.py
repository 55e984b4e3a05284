import math

import numpy as np
import pytest

from placewise.cluster import Cluster, Device, Link, full_mesh
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
        ({"device": {"memory": -1}}, "device 'gpu': memory = -1: it must be zero or more"),
        ({"device": {"memory": math.nan}}, "memory = nan"),
        ({"device": {"launch": math.inf}}, "launch = inf: it must be finite"),
        ({"device": {"bandwidth": 0}}, "bandwidth and FLOP rates must be above zero"),
        ({"device": {"flops": {"float32": 0}}}, "bandwidth and FLOP rates must be above zero"),
        ({"link": {"target": "npu"}}, "a link names the unknown device 'npu'"),
        ({"link": {"target": "gpu"}}, "link gpu -> gpu joins a device to itself"),
        ({"link": {"source": "cpu", "target": "gpu"}}, "link cpu -> gpu is given twice"),
        ({"link": {"bandwidth": 0}}, "link gpu -> cpu: bandwidth must be above zero"),
        ({"link": {"latency": math.inf}}, "latency zero or more"),
        ({"link": {"via": ("bus", "bus")}}, "via names a channel twice"),
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
