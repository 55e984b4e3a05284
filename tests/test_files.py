import gzip
import json
import math
import os
import stat
import tracemalloc
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from placewise import files, zoo
from placewise._schemas import ExecutionData
from placewise.cluster import MAX_DEVICES, Cluster, Device, Link, full_mesh
from placewise.costs import Costs
from placewise.driver import plan
from placewise.errors import InvalidInput, PlacewiseError
from placewise.graph import Graph
from placewise.plans import Plan
from placewise.problem import Execution, Problem
from placewise.profiles import Profile
from placewise.quantities import LARGEST
from placewise.simulator import simulate
from problems import problem_of, random_problem

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
AMOUNT = st.floats(0, LARGEST)


def small_graph(**changes):
    """w -> one -> two, where `two` also reads `one` through an empty tensor; `alone` stands apart."""
    given = {
        "name": "small",
        "op_names": ["w", "one", "two", "alone"],
        "op_kinds": ["parameter", "matmul", "relu", "noise"],
        "flops": [0, 5e9, 1 / 3, 0.1],
        "phase": [0, 0, 1, 2],
        "tensor_producer": [0, 1, 1, 2],
        "tensor_bytes": [100, 8, 0, 4],
        "edge_tensor": [0, 1, 2],
        "edge_consumer": [1, 2, 2],
    }
    return Graph.create(**{**given, **changes})


def small_cluster():
    devices = (
        Device("gpu", "gpu", 24 * 2.0**30, {"float32": 1e13, "float16": math.inf}, 9e11, 5e-6),
        Device("cpu", "cpu", flops={"default": 1e12}, copies=False),
    )
    return Cluster(devices, (Link("gpu", "cpu", 1.2e10, 1e-5, ("pcie",)), Link("cpu", "gpu")), "small-box")


def small_problem(**changes):
    given = {"pins": {"one": "gpu"}, "forbidden": (), "contiguous": True, "max_devices": 2}
    return Problem(small_graph(), small_cluster(), **{**given, **changes})


def small_plan(**changes):
    problem = changes.pop("problem", None) or small_problem()
    placement = changes.get("placement", np.array([0, 0, 1, 1], np.int32))
    order = changes.get("order", np.array([0, 1, 3, 2], np.int32))
    given = {
        "problem": problem,
        "placement": placement,
        "order": order,
        "value": simulate(problem, placement, order).value,
        "lower_bound": 1e-7,
        "planner": "by-hand",
        "version": "0.1.0",
        "seed": 2**40,
        "options": {"width": 8, "names": ["a", None], "share": 0.1},
        "seconds": 0.25,
        "evaluations": 12,
        "stopped": "budget",
        "history": ((0.1, 1, 0.5), (0.2, 7, 1 / 3)),
        "bounds": ((0.0, 1e-8), (0.15, 1e-7)),
    }
    return Plan(**{**given, **changes})


def edited(path, *steps, to=None, drop=False):
    """The JSON file with the value at `steps` replaced or dropped."""
    data = json.loads(Path(path).read_text())
    where = data
    for step in steps[:-1]:
        where = where[step]
    if drop:
        del where[steps[-1]]
    else:
        where[steps[-1]] = to
    Path(path).write_text(json.dumps(data))
    return path


@pytest.fixture
def graph_file(tmp_path):
    files.save_graph(small_graph(), tmp_path / "g.json")
    return tmp_path / "g.json"


@pytest.fixture
def problem_file(tmp_path):
    files.save_problem(small_problem(), tmp_path / "p.json")
    return tmp_path / "p.json"


@pytest.fixture
def plan_file(tmp_path):
    files.save_plan(small_plan(), tmp_path / "plan.json")
    return tmp_path / "plan.json"


# ---- round trips ---------------------------------------------------------------------------------------------------


@st.composite
def graphs(draw):
    names = draw(st.lists(TEXT, max_size=8, unique=True))
    n = len(names)
    tensors = draw(st.lists(st.tuples(st.integers(0, n - 1), AMOUNT), max_size=8)) if n else []
    later = [list(range(producer + 1, n)) for producer, _ in tensors]
    readers = [draw(st.lists(st.sampled_from(ops), max_size=3)) if ops else [] for ops in later]

    def column(values, default):
        return draw(st.one_of(st.just([default] * n), st.lists(values, min_size=n, max_size=n)))

    models = draw(st.lists(TEXT, min_size=1, max_size=3))
    return Graph.create(
        name=draw(TEXT),
        op_names=names,
        op_kinds=column(TEXT.filter(lambda kind: kind not in ("parameter", "state")), "op"),
        op_dtypes=column(TEXT, "float32"),
        op_modules=column(TEXT, ""),
        op_signatures=column(TEXT, ""),
        flops=column(AMOUNT, 0.0),
        bytes_accessed=column(AMOUNT, 0.0),
        scratch=column(AMOUNT, 0.0),
        resident=column(AMOUNT, 0.0),
        phase=column(st.integers(0, 2), 0),
        model=column(st.integers(0, len(models) - 1), 0),
        group=column(st.integers(-1, 2**31 - 2), -1),
        models=models,
        tensor_producer=[producer for producer, _ in tensors],
        tensor_bytes=[size for _, size in tensors],
        edge_tensor=[t for t, ops in enumerate(readers) for _ in ops],
        edge_consumer=[op for ops in readers for op in ops],
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graphs())
def test_graph_round_trip(tmp_path, graph):
    files.save_graph(graph, tmp_path / "g.json")
    assert files.load_graph(tmp_path / "g.json").digest == graph.digest


@pytest.mark.parametrize(
    "graph",
    [Graph.create(op_names=[]), Graph.create(op_names=[""]), Graph.create(op_names=list("abc")), small_graph()],
    ids=["empty", "one op", "disconnected", "several outputs"],
)
@pytest.mark.parametrize("name", ["g.json", "g.json.gz"])
def test_graph_round_trip_of_simple_graphs(tmp_path, graph, name):
    files.save_graph(graph, tmp_path / name)
    assert files.load_graph(tmp_path / name).digest == graph.digest


def test_a_graph_file_is_columnar_and_leaves_defaults_out(graph_file):
    assert json.loads(graph_file.read_text()) == {
        "format": "placewise-graph/1",
        "name": "small",
        "models": ["small"],
        "ops": {
            "name": ["w", "one", "two", "alone"],
            "kind": ["parameter", "matmul", "relu", "noise"],
            "flops": [0, 5e9, 1 / 3, 0.1],
            "phase": ["forward", "forward", "backward", "update"],
        },
        "tensors": {"producer": [0, 1, 1, 2], "bytes": [100, 8, 0, 4], "consumers": [[1], [2], [2], []]},
    }


def test_a_graph_file_by_hand_needs_only_names(tmp_path):
    (tmp_path / "g.json").write_text('{"format": "placewise-graph/1", "ops": {"name": ["a", "b"]}}')
    assert files.load_graph(tmp_path / "g.json").digest == Graph.create(op_names=["a", "b"]).digest


NAME = TEXT.filter(bool)
RATE = st.one_of(st.just(math.inf), st.floats(1 / LARGEST, LARGEST))


@st.composite
def clusters(draw):
    names = draw(st.lists(NAME.filter(str.strip), min_size=1, max_size=3, unique=True))
    devices = tuple(
        Device(
            name,
            draw(TEXT),
            draw(st.one_of(st.just(math.inf), AMOUNT)),
            draw(st.dictionaries(TEXT, RATE, max_size=2)),
            draw(RATE),
            draw(AMOUNT),
            draw(st.booleans()),
        )
        for name in names
    )
    links = tuple(
        Link(a, b, draw(RATE), draw(AMOUNT), tuple(draw(st.lists(NAME, max_size=2, unique=True))))
        for a in names
        for b in names
        if a != b
    )
    return Cluster(devices, links, draw(TEXT))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(clusters())
def test_cluster_round_trip(tmp_path, cluster):
    files.save_cluster(cluster, tmp_path / "c.yaml")
    again = files.load_cluster(tmp_path / "c.yaml")
    assert (again.name, again.devices, again.links) == (cluster.name, cluster.devices, cluster.links)
    problem = Problem(Graph.create(op_names=[]), cluster)
    files.save_problem(problem, tmp_path / "p.json")
    assert files.load_problem_file(tmp_path / "p.json").digest == problem.digest


@pytest.mark.parametrize("seed", range(20))
def test_problem_round_trip(tmp_path, seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    seconds = problem.costs.seconds * rng.random(problem.costs.seconds.shape)
    label = rng.integers(0, 1 + seed % 3, seconds.shape)
    if problem.num_devices > 1:
        seconds[: problem.num_ops // 2, 0] = np.where(problem.graph.group[: problem.num_ops // 2] < 0, math.inf, 1.0)
    problem = replace(problem, costs=Costs.create(seconds, label), max_devices=1 + seed if seed % 2 else None)
    files.save_problem(problem, tmp_path / "p.json")
    again = files.load_problem_file(tmp_path / "p.json")
    assert again.digest == problem.digest
    assert again.execution == problem.execution


def test_constraints_round_trip(tmp_path):
    problem = small_problem(pins={"two": "cpu", "w": "0"}, forbidden=(), objective="throughput")
    files.save_problem(problem, tmp_path / "p.json")
    again = files.load_problem_file(tmp_path / "p.json")
    assert (again.pins, again.forbidden, again.contiguous, again.max_devices) == (problem.pins, (), True, 2)
    assert again.digest == problem.digest


def test_a_problem_file_without_costs_has_modelled_ones(problem_file):
    again = files.load_problem_file(edited(problem_file, "costs", drop=True))
    assert again.digest == small_problem().digest
    assert again.costs.shares() == {"modelled": 1.0}


@pytest.mark.parametrize("order", [None, np.array([3, 0, 1, 2], np.int32)])
@pytest.mark.parametrize("name", ["plan.json", "plan.json.gz"])
def test_plan_round_trip(tmp_path, order, name):
    plan = small_plan(order=order)
    plan.save(tmp_path / name)
    again = Plan.load(tmp_path / name)
    assert again.problem.digest == plan.problem.digest
    assert again.devices == {"w": "gpu", "one": "gpu", "two": "cpu", "alone": "cpu"}
    for part in fields(Plan):
        if part.name != "problem":
            np.testing.assert_equal(getattr(again, part.name), getattr(plan, part.name))


def test_a_plan_file_without_bounds_is_read(tmp_path):
    small_plan().save(tmp_path / "plan.json")
    assert Plan.load(edited(tmp_path / "plan.json", "bounds", drop=True)).bounds == ()


def test_a_plan_may_take_longer_than_any_of_its_ops(tmp_path):
    """No time in a problem exceeds LARGEST; their sum does, and what was written must be read again."""
    problem = problem_of(np.full((2, 1), LARGEST), [(0, 1)])
    plan(problem, "single").save(tmp_path / "plan.json")
    assert files.load_plan(tmp_path / "plan.json").value == 2 * LARGEST


def test_plan_of_an_empty_graph(tmp_path):
    problem = Problem(Graph.create(op_names=[]), small_cluster())
    none = np.array([], np.int32)
    files.save_plan(small_plan(problem=problem, placement=none, order=none, lower_bound=0.0), tmp_path / "plan.json")
    assert files.load_plan(tmp_path / "plan.json").devices == {}


def test_the_file_has_every_setting_of_the_execution():
    assert {f.name: f.default for f in fields(Execution)} == ExecutionData().model_dump()


def test_equal_content_gives_equal_files(tmp_path):
    for name in ("a.json.gz", "b.json.gz"):
        files.save_graph(small_graph(), tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_gzip_is_recognised_by_content(graph_file):
    graph_file.write_bytes(gzip.compress(graph_file.read_bytes()))
    assert files.load_graph(graph_file).digest == small_graph().digest


def test_a_byte_order_mark_does_not_matter(graph_file):
    graph_file.write_bytes(b"\xef\xbb\xbf" + graph_file.read_bytes())
    assert files.load_graph(graph_file).digest == small_graph().digest


# ---- files that cannot be read -------------------------------------------------------------------------------------


def refused(load, path, message):
    with pytest.raises(InvalidInput, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_missing_file(tmp_path):
    refused(files.load_graph, tmp_path / "none.json", "cannot be read: No such file")


def test_folder(tmp_path):
    refused(files.load_graph, tmp_path, "cannot be read: Is a directory")
    refused(files.load_cluster, tmp_path, "cannot be read: Is a directory")


def test_no_permission(graph_file, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(
        files, "open", refuse, raising=False
    )  # whoever runs the tests may be allowed to read everything
    refused(files.load_graph, graph_file, "cannot be read: Permission denied")


def test_impossible_path():
    with pytest.raises(InvalidInput, match="cannot be read: embedded null"):
        files.load_graph("a\0b")


def test_not_utf_8(graph_file):
    graph_file.write_bytes(b'{"format": "\xff"}')
    refused(files.load_graph, graph_file, "not UTF-8 text: byte 12 is 0xff")


@pytest.mark.parametrize("length", [0, 1, 30, 100, -1])
def test_truncated_json(graph_file, length):
    graph_file.write_bytes(graph_file.read_bytes()[:length])
    refused(files.load_graph, graph_file, r"not JSON at line 1, column \d+: .* \(the file ends too early\)")


def test_wrong_json_says_where(graph_file):
    graph_file.write_text('{"format":\n "placewise-graph/1" "ops"}')
    refused(files.load_graph, graph_file, r"not JSON at line 2, column 22: Expecting ',' delimiter$")


@pytest.mark.parametrize("length", [3, 20, 60, -1])
def test_truncated_gzip(tmp_path, length):
    path = tmp_path / "g.json.gz"
    files.save_graph(small_graph(), path)
    path.write_bytes(path.read_bytes()[:length])
    refused(files.load_graph, path, "gzip data is damaged or ends too early")


@pytest.mark.parametrize("position", [2, 12, 40, -6, -1])
def test_damaged_gzip(tmp_path, position):
    path = tmp_path / "g.json.gz"
    files.save_graph(small_graph(), path)
    raw = bytearray(path.read_bytes())
    raw[position] ^= 0xFF
    path.write_bytes(raw)
    refused(files.load_graph, path, "gzip data is damaged or ends too early|not JSON|not UTF-8")


@pytest.mark.parametrize(
    ("start", "item", "end", "message"),
    [
        (
            b'{"format":"placewise-graph/1","ops":{"name":[],"flops":[-1',
            b",-1",
            b"]}}",
            r"flops\[0\]: must be 0 or more",
        ),
        (
            b'{"format":"placewise-graph/1","ops":{"name":[],"flops":[[]',
            b",[]",
            b"]}}",
            r"flops\[0\]: must be a number",
        ),
        (b'{"format":"placewise-graph/1","ops":{"name":["a"]},"tensors":{"consumers":[[]', b",[]", b"]}}", "entries"),
    ],
)
def test_millions_of_wrong_entries(graph_file, start, item, end, message):
    graph_file.write_bytes(gzip.compress(start + item * 3_000_000 + end, compresslevel=1))
    refused(files.load_graph, graph_file, message)


@pytest.mark.parametrize("where", ["the content", "ops", "pins", "seconds"])
def test_thousands_of_wrong_keys(problem_file, where):
    junk = {f"key{i}": i for i in range(300_000)}
    steps = {
        "the content": (),
        "ops": ("graph", "ops"),
        "pins": ("constraints", "pins"),
        "seconds": ("costs", "seconds"),
    }
    data = here = json.loads(problem_file.read_text())
    for step in steps[where]:
        here = here[step]
    here |= junk
    problem_file.write_text(json.dumps(data))
    tracemalloc.start()
    refused(files.load_problem_file, problem_file, "must have at most|must be text in quotes")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150 * 1024**2


@pytest.mark.parametrize("item", ["[],", "{},", "0,", "[[", "{"])
def test_more_values_than_a_file_may_hold(graph_file, monkeypatch, item):
    monkeypatch.setattr(files, "MAX_VALUES", 1000)
    graph_file.write_text("[" + item * 1000)
    refused(files.load_graph, graph_file, "holds more than 1,000 values$")
    with pytest.raises(InvalidInput, match=r"g\.json: holds more than 1,000 values$"):
        files.save_graph(Graph.create(op_names=[str(i) for i in range(1001)]), graph_file)


def test_no_memory_left(graph_file, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(files.json, "loads", fail)
    refused(files.load_graph, graph_file, "too large or nested too deep for this machine")


def test_a_key_given_twice_among_many(graph_file):
    keys = ",".join(f'"k{i}":0' for i in range(100_000))
    graph_file.write_text("{" + keys + ',"k99999":0}')
    refused(files.load_graph, graph_file, "the key 'k99999' is given twice")


def test_nested_too_deep(graph_file):
    graph_file.write_text("[" * 100_000)
    refused(files.load_graph, graph_file, "nested too deep")


def test_number_of_many_digits(graph_file):
    graph_file.write_text("1" * 10_000)
    refused(files.load_graph, graph_file, "too many digits")


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_no_number(graph_file, literal):
    graph_file.write_text(graph_file.read_text().replace("5000000000.0", literal))
    refused(files.load_graph, graph_file, f"{literal} is not a number in JSON; unlimited is written as null")


def test_key_given_twice(graph_file):
    graph_file.write_text('{"format": "placewise-graph/1", "ops": {"name": [], "kind": [], "name": []}}')
    refused(files.load_graph, graph_file, "the key 'name' is given twice")


def test_large_file_is_refused_unread(graph_file, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 100)
    refused(files.load_graph, graph_file, "larger than 100 B$")


def test_gzip_bomb_stops_at_the_limit(graph_file, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 4 * 1024**2)
    graph_file.write_bytes(gzip.compress(b" " * 200 * 1024**2, compresslevel=1))
    tracemalloc.start()
    refused(files.load_graph, graph_file, "larger than 4.00 MiB when decompressed")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 1024**2


# ---- files that hold something else --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["[]", "3", "null", '"text"', "{}", '{"format": 1}'])
def test_no_format(graph_file, text):
    graph_file.write_text(text)
    refused(files.load_graph, graph_file, 'a graph is expected: an object with "format": "placewise-graph/1"')


def test_another_version(graph_file):
    edited(graph_file, "format", to="placewise-graph/2")
    refused(files.load_graph, graph_file, "placewise-graph/2: this version reads /1; upgrade placewise")


def test_another_format(graph_file):
    edited(graph_file, "format", to="onnx")
    refused(files.load_graph, graph_file, "the format 'onnx' is unknown; a graph is expected")


def test_another_kind_of_file(graph_file, problem_file, plan_file):
    refused(files.load_graph, plan_file, "this is a plan, a graph is expected")
    refused(files.load_problem_file, graph_file, "this is a graph, a problem is expected")
    refused(files.load_plan, problem_file, "this is a problem, a plan is expected")
    refused(files.load_problem, plan_file, "this is a plan, a graph or a problem is expected")


@pytest.mark.parametrize(
    ("steps", "value", "message"),
    [
        (("ops", "flops", 1), -3, r"ops\.flops\[1\]: must be 0 or more, found -3$"),
        (("ops", "flops", 1), "3", r'ops\.flops\[1\]: must be a number, found "3"$'),
        (("ops", "flops", 1), True, r"ops\.flops\[1\]: must be a number, found true$"),
        (("ops", "flops", 1), None, r"ops\.flops\[1\]: must be a number, found null$"),
        (("ops", "flops", 1), [1, 2], r"ops\.flops\[1\]: must be a number, found a list of 2$"),
        (("ops", "flops", 1), 10**400, r"ops\.flops\[1\]: must be a number, found 1000"),
        (("ops", "flops"), [-1] * 5, r"ops\.flops\[0\]: must be 0 or more, found -1$"),
        (("ops", "flops"), 7, r"ops\.flops: must be a list, found 7$"),
        (("ops", "flops"), {}, r"ops\.flops: must be a list, found an object$"),
        (("ops", "flops"), [1, 2, 3], r"ops\.flops: must have 4 entries, found 3$"),
        (("ops", "flops", 1), 1e300, r"ops\.flops\[1\]: must be at most 1e\+24, found 1e\+300$"),
        (("ops", "f\n"), [1], r"ops\.f\\n: is not a known key$"),
        (("ops", "f\ud800"), [1], r"ops: must be text without half characters"),
        (("ops", "f" * 10**6), [1], r"ops\.f{60}: is not a known key$"),
        (("ops", "name", 0), "\ud800", r"ops\.name\[0\]: '\\ud800' holds half a character"),
        (("ops", "phase", 0), "\ud800", r'found "\\ud800"$'),
        (("ops", "flop"), [1], r"ops\.flop: is not a known key$"),
        (("ops", "name", 0), 3, r"ops\.name\[0\]: must be text in quotes, found 3$"),
        (("ops", "name", 0), "x" * 10**6, r"ops\.name\[0\]: must have at most 100000 characters, found 1000000$"),
        (("ops", "name", 0), "one", "two ops are named 'one'"),
        (
            ("ops", "phase", 0),
            "sideways",
            r"ops\.phase\[0\]: must be 'forward', 'backward' or 'update', found \"sideways\"$",
        ),
        (("ops", "model"), [0, 0, 0, 1], r"ops\.model\[3\]"),
        (("ops", "group"), [0, 0, 0, 2**31], r"ops\.group\[3\]: must be below 2147483647, found 2147483648$"),
        (("ops", "group"), [0, 0, 0, 1.5], r"ops\.group\[3\]: must be a whole number, found 1\.5$"),
        (("ops",), "many", r"ops: must be an object with keys, found \"many\"$"),
        (("tensors", "producer", 0), 4, r"tensors\.producer\[0\]: there is no op 4: there are 4 ops"),
        (("tensors", "producer", 0), False, r"tensors\.producer\[0\]: must be a whole number, found false$"),
        (("tensors", "bytes"), [1], r"tensors\.bytes: must have 4 entries, found 1"),
        (("tensors", "consumers", 2), [0, 2, 9], r"tensors\.consumers\[2\]: there is no op 9: there are 4 ops$"),
        (("tensors", "consumers", 2, 0), -1, r"tensors\.consumers\[2\]\[0\]: must be 0 or more, found -1$"),
        (("tensors", "consumers"), [[]], r"tensors\.consumers: must have 4 entries, found 1"),
        (("tensors", "consumers", 3), [1], "has a cycle: (one -> two -> one|two -> one -> two)"),
        (("tensors", "consumers", 3), [0], "parameter 'w' cannot have inputs"),
    ],
)
def test_wrong_graph(graph_file, steps, value, message):
    edited(graph_file, *steps, to=value)
    refused(files.load_graph, graph_file, message)


def test_missing_key(graph_file):
    refused(files.load_graph, edited(graph_file, "ops", "name", drop=True), r"ops\.name: is missing$")


def test_number_beyond_the_largest(graph_file):
    graph_file.write_text(graph_file.read_text().replace("5000000000.0", "1e999"))
    refused(files.load_graph, graph_file, r"ops\.flops\[1\]: must be finite, found Infinity$")


@pytest.mark.parametrize(
    ("steps", "value", "message"),
    [
        (("graph", "ops", "flops", 1), -3, r"graph\.ops\.flops\[1\]: must be 0 or more, found -3$"),
        (
            ("cluster", "devices", 0, "memory"),
            "lots",
            r"cluster\.devices\[0\]\.memory: 'lots' is not a number of bytes",
        ),
        (("cluster", "devices"), [], "cluster 'small-box' has no device"),
        (("costs", "seconds", "gpu", 2), -1, r"costs\.seconds\.gpu\[2\]: must be 0 or more, found -1$"),
        (("costs", "seconds", "gpu"), [1], r"costs\.seconds\.gpu: must have 4 entries, found 1"),
        (("costs", "seconds", "npu"), [1], r"costs\.seconds: must have a list for each device: gpu, cpu"),
        (("costs", "label"), "guessed", r"costs\.label: must be 'given', 'modelled' or 'measured', found \"guessed\"$"),
        (("costs", "labels"), {"gpu": []}, r"costs\.labels: must have a list for each device: gpu, cpu"),
        (("objective",), "beauty", "objective: must be one of latency, .*, found 'beauty'$"),
        (("execution", "concurrency"), "some", r"execution\.concurrency: must be one of parallel, .*, found 'some'$"),
        (("execution", "prefetch"), 0, r"execution\.prefetch: must be a whole number from 1 to 2147483647, found 0$"),
        (("execution", "overlap"), 1, r"execution\.overlap: must be true or false, found 1$"),
        (("execution", "speed"), 1, r"execution\.speed: is not a known key$"),
        (("constraints", "pins"), {"three": "gpu"}, "has no op named 'three'"),
        (("constraints", "pins"), {"one": "npu"}, "has no device 'npu'"),
        (("constraints", "forbidden"), ["npu"], "has no device 'npu'"),
        (("constraints", "forbidden"), ["gpu", "cpu"], "may run on no device"),
        (("constraints", "pins"), {"one": 3}, r'constraints\.pins: "one" must be text in quotes, found 3$'),
        (("constraints", "max_devices"), 0, "max_devices: must be a whole number from 1 to 2147483647, found 0$"),
    ],
)
def test_wrong_problem(problem_file, steps, value, message):
    refused(files.load_problem_file, edited(problem_file, *steps, to=value), message)


# ---- plans that do not hold ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "value", "message"),
    [
        (("problem", "graph", "ops", "flops", 1), -3, r"problem\.graph\.ops\.flops\[1\]: must be 0 or more, found -3$"),
        (("problem", "graph", "ops", "flops", 1), 4e9, r"problem\.graph was edited after the plan was made"),
        (("problem", "cluster", "devices", 0, "memory"), 1e9, r"problem\.cluster was edited"),
        (("problem", "costs", "seconds", "gpu", 1), 1.0, r"problem\.costs was edited"),
        (("problem", "constraints", "max_devices"), 1, "its problem was edited"),
        (("problem", "constraints", "pins"), {"one": "cpu"}, "its problem was edited"),
        (("digests", "costs"), "0", r"problem\.costs was edited"),
        (("devices", 3), "npu", r"devices\[3\]: the cluster has no device 'npu'; it has gpu, cpu"),
        (("devices", 3), 0, r"devices\[3\]: must be text in quotes, found 0$"),
        (("devices",), ["gpu"], "devices: must have 4 entries, found 1$"),
        (("order",), [0, 1, 2], "order: must hold every op once"),
        (("order",), [0, 1, 2, 2], "order: must hold every op once"),
        (("order",), [0, 1, 2, 4], "order: must hold every op once"),
        (("order",), [0, 1, 2, -1], r"order\[3\]: must be 0 or more, found -1$"),
        (("value",), 1e-9, r"stored with value 1e-09, but simulates to .*version of Placewise \(0\.1\.0\)"),
        (("value",), None, "value: must be a number, found null"),
        (("lower_bound",), 1e-8, "devices, order, value or lower_bound were edited"),
        (("lower_bound",), 1e9, r"lower_bound: must be at most the value, .*, found 1000000000\.0$"),
        (("lower_bound",), 1e300, r"lower_bound: must be at most the value, .*, found 1e\+300$"),
        (("digests", "answer"), "0", "devices, order, value or lower_bound were edited"),
        (("history", 0), [1.0, 2], r"history\[0\]\[2\]: is missing$"),
        (("history", 0, 1), 1.5, r"history\[0\]\[1\]: must be a whole number, found 1\.5$"),
        (("options",), [], "options: must be an object with keys, found a list of 0$"),
    ],
)
def test_wrong_plan(plan_file, steps, value, message):
    refused(files.load_plan, edited(plan_file, *steps, to=value), message)


def test_a_plan_is_simulated_once(plan_file, monkeypatch):
    from placewise.simulator.engine import Engine

    runs = []
    run = Engine.run
    monkeypatch.setattr(Engine, "run", lambda *given: runs.append(1) or run(*given))
    files.load_plan(plan_file)
    assert len(runs) == 1


def test_a_plan_must_fit_into_memory(tmp_path):
    problem = small_problem()
    problem = replace(problem, cluster=problem.cluster.with_memory({"gpu": 50.0}))
    files.save_plan(small_plan(problem=problem), tmp_path / "plan.json")
    refused(files.load_plan, tmp_path / "plan.json", "breaks its problem's constraints: .*gpu")


# ---- clusters by hand ----------------------------------------------------------------------------------------------

BOX = """
name: pc-unequal
devices:
  - {name: gpu0, kind: gpu, memory: 24GiB, flops: {float32: 35TFLOPS, int8: 140TFLOPS}, bandwidth: 9e11, launch: 5us}
  - {name: gpu1, memory: 1e9}
  - {name: cpu, kind: cpu, memory: null, flops: {default: 1TFLOPS}, bandwidth: 60GB/s, copies: false}
links:
  - {between: all, bandwidth: 6GB/s, latency: 20us}
  - {between: [gpu0, cpu], bandwidth: 12GB/s, latency: 10us, via: [pcie]}
  - {from: gpu0, to: gpu1, bandwidth: 1e9}
"""


@pytest.fixture
def box(tmp_path):
    path = tmp_path / "box.yaml"
    path.write_text(BOX)
    return path


def test_cluster_by_hand(box):
    cluster = files.load_cluster(box)
    assert cluster.name == "pc-unequal"
    assert cluster.devices == (
        Device("gpu0", "gpu", 24 * 2.0**30, {"float32": 35e12, "int8": 140e12}, 900e9, 5 * 1e-6),
        Device("gpu1", "gpu", 1e9),
        Device("cpu", "cpu", math.inf, {"default": 1e12}, 60e9, 0.0, copies=False),
    )
    assert cluster.links == (
        Link("gpu0", "cpu", 12e9, 10 * 1e-6, ("pcie",)),
        Link("cpu", "gpu0", 12e9, 10 * 1e-6, ("pcie",)),
        Link("gpu0", "gpu1", 1e9),
        Link("gpu1", "gpu0", 6e9, 20 * 1e-6),
        Link("gpu1", "cpu", 6e9, 20 * 1e-6),
        Link("cpu", "gpu1", 6e9, 20 * 1e-6),
    )


def test_both_directions_have_their_own_channel(tmp_path):
    (tmp_path / "box.yaml").write_text("devices: [{name: a}, {name: b}]\nlinks: [{between: [a, b]}]")
    assert files.load_cluster(tmp_path / "box.yaml").channels == ("a->b", "b->a")


def test_bundled_boxes():
    assert "two-gpus-one-host" in files.bundled_boxes()
    for name in files.bundled_boxes():
        assert files.load_cluster(name).name == name


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("24GiB", "24GiX", r"devices\[0\]\.memory: '24GiX' is not a number of bytes; write it like '24GiB'$"),
        ("24GiB", "-1", r"devices\[0\]\.memory: .* must be zero or more$"),
        ("24GiB", ".nan", r"devices\[0\]\.memory: .* must be zero or more$"),
        ("24GiB", "true", r"devices\[0\]\.memory: True is not a number of bytes$"),
        ("24GiB", "[1]", r"devices\[0\]\.memory: \[1\] is not a number of bytes$"),
        ("35TFLOPS", "35us", r"devices\[0\]\.flops\.float32: '35us' is not a number of FLOP per second"),
        ("5us", "null", r"devices\[0\]\.launch: None is not a number of seconds$"),
        ("name: gpu1", "name: 1", r"devices\[1\]\.name: must be text in quotes, found 1$"),
        ("name: gpu1", "name: 2020-01-01", r"devices\[1\]\.name: must be text in quotes, found \"2020-01-01\"$"),
        ("kind: cpu", "colour: red", r"devices\[2\]\.colour: is not a known key$"),
        ("name: gpu1, ", "", r"devices\[1\]\.name: is missing$"),
        ("copies: false", "copies: 0", r"devices\[2\]\.copies: must be true or false, found 0$"),
        (
            "between: all",
            "between: [cpu]",
            r"links\[0\]\.between: must be 'all' or a list of two or more device names, found a list",
        ),
        ("between: all, ", "", r"links\[0\]: give either 'between', or 'from' and 'to'$"),
        ("to: gpu1, ", "", r"links\[2\]: give either 'between', or 'from' and 'to'$"),
        ("from: gpu0", "between: all, from: gpu0", r"links\[2\]: give either 'between', or 'from' and 'to'$"),
        ("from: gpu0, to: gpu1", "between: all", "only one entry can be between all"),
        ("to: gpu1", "to: npu", "a link names the unknown device 'npu'"),
        ("to: gpu1", "to: cpu", "link gpu0 -> cpu is given twice"),
        ("[pcie]", "pcie", r'links\[1\]\.via: must be a list, found "pcie"$'),
        ("  - {between: all, bandwidth: 6GB/s, latency: 20us}\n", "", "has no link from 'gpu1' to 'gpu0'; add one"),
        ("name: gpu1", "name: gpu0", "two devices are named 'gpu0'"),
        ("name: pc-unequal", "name: one\nname: two", "at line 3, column 1: the key 'name' is given twice"),
        ("kind: cpu", "name: two", "the key 'name' is given twice"),
        ("name: pc-unequal", "name: &x one", "at line 2, column 7: anchors and aliases are not allowed"),
        ("name: pc-unequal", "name: *x", "anchors and aliases are not allowed"),
        ("name: pc-unequal", "name: !!python/name:os.system x", "could not determine a constructor"),
        ("name: pc-unequal", "name: " + "[" * 200_000, "nested too deep"),
        ("kind: cpu", "<<: {name: two}", "at line 6, column 17: merge keys are not allowed"),
        ("name: pc-unequal", 'name: "\\ud800"', "not a cluster in YAML|half a character"),
        ("name: pc-unequal", "name: [", "not a cluster in YAML at line"),
        ("name: pc-unequal", "name: 2020-99-99", "not a cluster in YAML: month must be in"),
        ("name: pc-unequal", "name: '\x01'", "not a cluster in YAML: .*(not allowed|control characters)"),
        ("name: pc-unequal", "name: " + "1" * 5000, "not a cluster in YAML: .*digits"),
        ("name: pc-unequal", "name: " + "[" * 5000, "nested too deep"),
        ("name: pc-unequal", "? [a]\n: b", "unhashable key"),
        ("name: pc-unequal", "---\nname: x\n---", r"expected a single document .*, but found another"),
        (BOX, "", "the content: must be an object with keys, found null$"),
        (BOX, "- 1", "the content: must be an object with keys, found a list of 1$"),
    ],
)
def test_wrong_cluster(box, old, new, message):
    assert BOX.count(old) >= 1
    box.write_text(BOX.replace(old, new, 1))
    refused(files.load_cluster, box, message)


def test_yaml_bomb(box):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    box.write_text("\n".join(lines))
    refused(files.load_cluster, box, "anchors and aliases are not allowed")


def test_too_many_devices(box):
    box.write_text(
        "devices: [" + ", ".join(f"{{name: d{i}}}" for i in range(MAX_DEVICES + 1)) + "]\nlinks: [{between: all}]"
    )
    refused(files.load_cluster, box, "devices: must have at most 512 entries, found a list of 513$")


def test_large_yaml(box):
    box.write_text("#" * (files.MAX_YAML_BYTES + 1))
    refused(files.load_cluster, box, "larger than 1.00 MiB$")


def test_unknown_cluster():
    with pytest.raises(
        InvalidInput, match=r"neither a file nor a bundled cluster \(did you mean 'four-gpus'\?\); bundled are"
    ):
        files.load_cluster("four-gpu")


# ---- writing -------------------------------------------------------------------------------------------------------


def test_a_file_has_the_usual_mode_and_nothing_else_is_left(tmp_path):
    (tmp_path / "usual").touch()
    files.save_graph(small_graph(), tmp_path / "g.json")
    assert sorted(os.listdir(tmp_path)) == ["g.json", "usual"]
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("g.json", "usual")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_keeps_its_mode(graph_file, mode):
    graph_file.chmod(mode)
    files.save_graph(small_graph(), graph_file)
    assert stat.S_IMODE(graph_file.stat().st_mode) == mode


def test_a_cluster_too_large_for_its_file_is_not_written(tmp_path):
    with pytest.raises(InvalidInput, match=r"c\.yaml: the cluster is too large for a cluster file"):
        files.save_cluster(full_mesh([Device(f"d{i}") for i in range(150)]), tmp_path / "c.yaml")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_the_old_file(graph_file, monkeypatch, step, failure):
    def fail(*_):
        raise failure

    monkeypatch.setattr(files.os, step, fail)
    expected = pytest.raises(PlacewiseError, match=r"g\.json: cannot be written: No space left on device")
    with expected if isinstance(failure, OSError) else pytest.raises(KeyboardInterrupt):
        files.save_graph(Graph.create(op_names=["new"]), graph_file)
    monkeypatch.undo()
    assert files.load_graph(graph_file).digest == small_graph().digest
    assert os.listdir(graph_file.parent) == ["g.json"]


def test_a_link_stays_a_link(graph_file):
    link = graph_file.with_name("link.json")
    link.symlink_to(graph_file)
    files.save_graph(Graph.create(op_names=["new"]), link)
    assert link.is_symlink()
    assert files.load_graph(graph_file).op_names == ("new",)


@pytest.mark.parametrize(
    ("path", "reason"),
    [("none/g.json", "No such file"), ("", "Is a directory"), ("a\0b", "null"), ("x" * 300, ""), (3.5, "not float")],
)
def test_places_that_cannot_be_written(tmp_path, monkeypatch, path, reason):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InvalidInput, match=f"^{path}: cannot be written: .*{reason}"):
        files.save_graph(small_graph(), path)
    assert os.listdir(tmp_path) == ["here"]
    assert os.listdir(tmp_path / "here") == []


@pytest.mark.parametrize("value", [object(), math.nan, {1j: 2}, "\ud800"])
def test_what_json_cannot_hold(tmp_path, value):
    with pytest.raises(InvalidInput, match="cannot be written"):
        files.save_plan(small_plan(options={"x": value}), tmp_path / "plan.json")
    assert os.listdir(tmp_path) == []


def test_text_beyond_ascii_takes_four_times_the_memory(graph_file, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 4000)
    for name, fits in (("x" * 1500, True), ("😀" + "x" * 300, True), ("😀" + "x" * 1500, False)):
        graph = Graph.create(op_names=["op"], name=name)
        if fits:
            files.save_graph(graph, graph_file)
            assert files.load_graph(graph_file).name == name
        else:
            with pytest.raises(InvalidInput, match=r"larger than 0\.977 KiB"):
                files.save_graph(graph, graph_file)
            graph_file.write_text(json.dumps({"format": "placewise-graph/1", "name": name}, ensure_ascii=False))
            refused(files.load_graph, graph_file, "larger than 0.977 KiB")


# ---- whatever the user names as a model ----------------------------------------------------------------------------


def test_load_problem_from_a_graph_file(graph_file, box):
    cluster = full_mesh([Device("a", flops={"default": 1.0}), Device("b", flops={"default": 1.0})])
    problem = files.load_problem(graph_file, cluster)
    assert problem.graph.op_names == ("one", "two", "alone")
    assert problem.cluster is cluster
    assert problem.costs.shares() == {"modelled": 1.0}
    assert files.load_problem(str(graph_file), cluster, place_parameters=True).graph.digest == small_graph().digest
    by_hand = box.read_text().replace("{name: gpu1, memory: 1e9}", "{name: gpu1, flops: {default: 1}}")
    box.write_text(by_hand)
    assert files.load_problem(graph_file, box).cluster.name == "pc-unequal"
    assert files.load_problem(graph_file, "four-gpus").cluster.name == "four-gpus"


def test_a_rate_that_is_missing_is_said_with_the_file(graph_file, box):
    refused(lambda path: files.load_problem(graph_file, path), box, "device 'gpu1' gives no FLOP rate for 'float32'")


@pytest.mark.parametrize("model", [None, 3, 1.5])
def test_what_is_no_name(model):
    with pytest.raises(InvalidInput, match="must be the name of a file or of a bundled"):
        files.load_problem(model, "four-gpus")
    with pytest.raises(InvalidInput, match="must be the name of a file or of a bundled"):
        files.load_cluster(model)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pins": ["one"]}, "pins: must be a Mapping"),
        ({"max_memory": 5}, "max_memory: must be a Mapping"),
        ({"forbidden": "gpu0"}, "forbidden: must be a tuple of device names, found 'gpu0'"),
        ({"forbidden": 5}, "forbidden: must be a tuple of device names, found 5"),
    ],
)
def test_what_is_no_option(problem_file, wrong, message):
    with pytest.raises(InvalidInput, match=message):
        files.load_problem(problem_file, **wrong)


def test_load_problem_from_a_problem_file(problem_file):
    assert files.load_problem(problem_file).digest == small_problem().digest
    with pytest.raises(InvalidInput, match=r"p\.json: already has a cluster: leave the other one out"):
        files.load_problem(problem_file, "four-gpus")


def test_a_problem_file_may_have_weights_apart(problem_file, tmp_path):
    assert files.load_problem(problem_file, place_parameters=True).digest == small_problem().digest
    files.save_problem(files.load_problem("alexnet", "pc-24gib"), tmp_path / "together.json")
    with pytest.raises(InvalidInput, match=r"together\.json: is a problem without ops for weights"):
        files.load_problem(tmp_path / "together.json", place_parameters=True)


def test_load_problem_from_the_zoo():
    name = zoo.names()[0]
    problem = files.load_problem(name, "two-gpus-one-host")
    assert problem.graph.digest == zoo.load(name).collapse_parameters().graph.digest
    assert files.load_problem(name, "two-gpus-one-host", place_parameters=True).graph.digest == zoo.load(name).digest


def test_options_replace_what_the_file_says(problem_file):
    problem = files.load_problem(
        problem_file,
        objective="completion",
        execution=Execution(contention="none"),
        pins={"two": "cpu"},
        forbidden=["gpu"],
        contiguous=False,
        max_devices=1,
        max_memory={"gpu": 7.0},
    )
    assert (problem.objective, problem.execution.contention, problem.pins) == ("completion", "none", {"two": "cpu"})
    assert (problem.forbidden, problem.contiguous, problem.max_devices) == (("gpu",), False, 1)
    assert problem.cluster.memory.tolist() == [7.0, math.inf]
    assert problem.costs.digest == small_problem().costs.digest


def test_load_problem_from_benchmark_files(tmp_path):
    node = {
        "id": 1,
        "name": "a",
        "supportedOnFpga": 1,
        "cpuLatency": 2.0,
        "fpgaLatency": 1.0,
        "isBackwardNode": 0,
        "size": 1,
    }
    data = {"maxSizePerFPGA": 100, "maxFPGAs": 1, "maxCPUs": 1, "nodes": [node], "edges": []}
    path = tmp_path / "bert.json"
    path.write_text(json.dumps(data))
    problem = files.load_problem(path)
    assert (problem.graph.name, problem.num_ops, problem.num_devices) == ("bert", 1, 2)
    with pytest.raises(InvalidInput, match="already has a cluster"):
        files.load_problem(path, "four-gpus")
    refused(
        files.load_problem, edited(path, "nodes", 0, "size", to=-1), r"nodes\[0\]\.size: must be 0 or more, found -1$"
    )
    edited(path, "nodes", 0, "size", to=1)
    edited(path, "maxFPGAs", to=500)
    refused(files.load_problem, edited(path, "maxCPUs", to=500), "devices: must be at most 512, found 1000$")


def test_instances_go_to_their_reader(tmp_path, monkeypatch):
    from placewise.importers import instances

    seen = []
    monkeypatch.setattr(instances, "load", lambda data, name: seen.append((data, name)) or small_problem())
    path = tmp_path / "chain.json.gz"
    path.write_bytes(gzip.compress(b'{"format": "placement-instance/1"}'))
    assert files.load_problem(path).digest == small_problem().digest
    assert seen == [({"format": "placement-instance/1"}, "chain")]


def test_a_graph_needs_a_cluster(graph_file):
    with pytest.raises(InvalidInput, match=r"g.json: needs a cluster: a YAML file, or one of .*four-gpus"):
        files.load_problem(graph_file)


def test_unknown_model():
    name = zoo.names()[0]
    with pytest.raises(
        InvalidInput, match=rf"neither a file nor a bundled model \(did you mean '{name}'\?\); bundled are"
    ):
        files.load_problem(f"{name}x", "four-gpus")
    with pytest.raises(
        InvalidInput, match=rf"^some/where.json: neither a file nor a bundled model; bundled are .*{name}"
    ):
        files.load_problem("some/where.json")


def test_reading_says_what_it_imports_only_when_needed():
    import subprocess
    import sys

    code = "import placewise.files, sys; assert not {'pydantic', 'yaml', 'numba', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_not_a_regular_file_is_left_alone(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidInput, match="not a regular file"):
        files.write_text(tmp_path / "pipe", "text")
    assert (tmp_path / "pipe").is_fifo()


def test_profiles_are_named_in_a_cluster_file_that_keeps_its_comments(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACEWISE_PROFILES", str(tmp_path))
    text = (
        "# my box\nname: box\ndevices:\n"
        "  - name: a  # the left one\n    kind: cpu\n    flops: {default: 1GFLOPS}\n    bandwidth: 1GB/s\n"
        "  - {name: b, kind: cpu, flops: {default: 1GFLOPS}, bandwidth: 1GB/s}\n"
        "  - {kind: cpu, name: c, profile: old-c, flops: {default: 1GFLOPS}, bandwidth: 1GB/s}\n"
        "links:\n  - {between: all, bandwidth: 10GB/s, latency: 5us}  # by hand\n"
    )
    for name in ("old-c", "of-a", "of-b", "of-c"):
        files.save_profile(Profile(name, "cpu", "hardware", "library", "2026-11-18"), tmp_path / f"{name}.json.gz")
    path = tmp_path / "box.yaml"
    path.write_text(text)
    cluster = files.load_cluster(path)
    found = [files.load_profile(f"of-{device.name}") for device in cluster.devices]
    named = replace(cluster, devices=[replace(d, profile=p) for d, p in zip(cluster.devices, found, strict=True)])
    files.save_profiles(named, path)
    wanted = text.replace("one\n", "one\n    profile: of-a\n").replace("{name: b,", "{name: b, profile: of-b,")
    assert path.read_text() == wanted.replace("old-c", "of-c")
    assert [device.profile.name for device in files.load_cluster(path).devices] == ["of-a", "of-b", "of-c"]
    files.save_profiles(named, path)
    assert path.read_text() == wanted.replace("old-c", "of-c")  # nothing changes
    other = replace(named, name="another")
    files.save_profiles(other, path)
    assert files.load_cluster(path).name == "another"
