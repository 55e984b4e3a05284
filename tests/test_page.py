"""The page: what Python writes into it, and what it does in a browser (Debian's Chromium, driven by Playwright)."""

import base64
import contextlib
import gzip
import hashlib
import html
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placewise.cluster import Device, full_mesh
from placewise.costs import Costs
from placewise.driver import Budget, plan
from placewise.files import load_problem
from placewise.graph import Graph, GraphBuilder
from placewise.plans import Plan, format_gap
from placewise.problem import Execution, Problem
from placewise.quantities import format_change
from placewise.report import page
from placewise.report.explain import explain
from placewise.report.page import to_page
from placewise.report.table import device_table
from placewise.simulator import simulate
from placewise.terminal import printable
from problems import random_problem

ROOT = Path(__file__).parent.parent
MARKUP = '</script><img src=x onerror="window.hurt=1">{{data}}'


def planned(problem, placement, **about):
    timeline = simulate(problem, np.array(placement))
    return Plan(problem, np.array(placement), None, timeline.value, timeline.value / 2, "by-hand", "0", **about)


def layers(count=6, name="net"):
    """A chain of layers, each a module with two ops; the first op's name holds markup."""
    build = GraphBuilder(name)
    x = build.op(MARKUP, kind="input", outputs=[4e6])
    for i in range(count):
        x = build.op(f"layers.{i}.mul", kind="matmul", op_modules=f"layers.{i}", inputs=x, outputs=[4e6], resident=1e6)
        x = build.op(f"layers.{i}.add", kind="add", op_modules=f"layers.{i}", inputs=x, outputs=[4e6])
    devices = [Device("fast", memory=12e6), Device("slow", memory=1e9), Device("idle")]
    graph = build.graph()
    seconds = np.tile([1e-3, 2e-3, 4e-3], (graph.num_ops, 1))
    return Problem(graph, full_mesh(devices, 1e9, 1e-5, MARKUP), Costs.create(seconds, "modelled"))


def unpacked(text):
    """The data of a page, read as the page reads it."""
    packed = text.split('id="data">')[1].split("</script>")[0]
    raw = gzip.decompress(base64.b64decode(packed))
    size = int.from_bytes(raw[:8], "little")

    def arrays(value):
        if isinstance(value, dict) and "$" in value:
            return np.frombuffer(raw, f"<{value['$']}", value["n"], 8 + size + value["at"])
        if isinstance(value, dict):
            return {key: arrays(one) for key, one in value.items()}
        return [arrays(one) for one in value] if isinstance(value, list) else value

    return arrays(json.loads(raw[8 : 8 + size]))


@pytest.fixture(scope="module")
def both():
    """Two plans of one problem: all that fits on the fast device first, and all on the slow one."""
    problem = layers()
    history, bounds = ((0.0, 1, 0.03), (0.1, 5, 0.02)), ((0.0, 0.01), (0.05, 0.0125))
    return planned(problem, [0] * 5 + [1] * 8, history=history, bounds=bounds), planned(problem, [1] * 13)


# ---- what is written -------------------------------------------------------------------------------------------------


def test_the_bundle_is_made_from_the_sources():
    """Otherwise: cd page && npm ci && npm run build."""
    folder = ROOT / "page"
    names = ["build.mjs", "package-lock.json", "tsconfig.json", *(f"src/{f.name}" for f in (folder / "src").iterdir())]
    digest = hashlib.sha256(b"".join((folder / name).read_bytes() for name in sorted(names))).hexdigest()
    bundle = (ROOT / "src/placewise/report/html/page.js").read_text(encoding="utf-8")
    assert bundle.startswith(f"/* sources {digest} */"), "page/ has changed: cd page && npm ci && npm run build"
    assert "Permission is hereby granted" in bundle  # who passes on the page passes on the licences
    assert (ROOT / "src/placewise/report/html/template.html").read_text() == (folder / "src/template.html").read_text()


# Machado, Oliveira and Fernandes (2009): what is left of linear light where one kind of cone is missing.
SEEN = {
    "all": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


@pytest.mark.parametrize(("eyes", "least"), [("all", 26), ("protan", 20), ("deutan", 16), ("tritan", 16)])
def test_colours_can_be_told_apart(eyes, least):
    """By distance in CIELAB, of which 2 is just seen."""
    source = (ROOT / "page/src/colours.ts").read_text(encoding="utf-8")
    colours = re.findall(r"#[0-9a-f]{6}", source.split("const COLOURS")[1].split("]")[0])
    assert len(colours) == 8
    light = np.array([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in colours])
    light = np.where(light <= 0.04045, light / 12.92, ((light + 0.055) / 1.055) ** 2.4)
    light = np.clip(light @ np.array(SEEN[eyes]).T, 0, 1)
    xyz = light @ np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]).T
    x, y, z = (np.where(v > 0.008856, np.cbrt(v), 7.787 * v + 16 / 116) for v in (xyz / [0.9505, 1, 1.089]).T)
    lab = np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)
    apart = np.linalg.norm(lab[:, None] - lab[None], axis=2)[np.triu_indices(8, 1)]
    assert apart.min() >= least


def test_names_never_meet_the_markup():
    text = to_page([planned(layers(name=MARKUP), [0] * 7 + [1] * 6)])
    assert text.count("</script>") == 2
    assert "<img" not in text
    assert "&lt;/script&gt;&lt;img" in text  # the title
    assert unpacked(text)["graphs"][0]["names"][0] == MARKUP


STEERING = "in\u202eput\u2066\x07\n\x1b[31m"  # turned around, isolated, a bell, a new line, red
HEBREW = "\u05e9\u05dc\u05d5\u05dd"


def steered():
    """Two plans of a problem all of whose names try to steer what is around them."""
    build = GraphBuilder(STEERING)
    x = build.op(STEERING, kind=STEERING, op_modules=f"{HEBREW}.0", outputs=[4e6])
    build.op(f"{HEBREW}.0.add", kind=HEBREW, op_modules=f"{HEBREW}.0", inputs=x, outputs=[4e6])
    devices = [Device(name + STEERING, memory=1e9) for name in "ab"]
    problem = Problem(build.graph(), full_mesh(devices, 1e9, 0.0, STEERING), Costs.create(np.ones((2, 2)), "modelled"))
    return planned(problem, [0, 0]), planned(problem, [0, 1])


def texts_of(data):
    """All texts, but those that say what an array is."""
    if isinstance(data, str):
        return [data]
    within = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [text for one in within for text in texts_of(one)]


def test_names_do_not_steer_the_text_around_them():
    text = to_page(steered(), ["one" + STEERING, "other"])
    assert re.search("<title>(.*)</title>", text)[1] == html.escape(f"{printable(STEERING)} on {printable(STEERING)}")
    data = unpacked(text)
    apart = f"\u2068{HEBREW}\u2069"
    assert data["graphs"][0]["names"] == [printable(STEERING), f"{apart}.0.add"]
    assert data["graphs"][0]["labels"][1:] == [apart, "0"]
    assert data["plans"][0]["title"] == "one" + printable(STEERING)
    texts = texts_of(data)
    assert len(texts) > 50
    assert all(re.sub("[\u2068\u2069]", "", one).isprintable() for one in texts)


def test_names_that_are_too_long_stay_different():
    """They lose their middles, and get a number for it where these are all that differs."""
    build = GraphBuilder("net")
    ends = [f"{'a' * 1000}{middle}{'b' * 1000}" for middle in "xyz"]
    for name in ends:
        build.op(name, kind="k")
    devices = [Device(name) for name in ends]
    problem = Problem(build.graph(), full_mesh(devices, 1e9), Costs.create(np.ones((3, 3)), "modelled"))
    data = unpacked(to_page([planned(problem, [0, 0, 0])]))
    names = data["graphs"][0]["names"]
    assert names == [f"{'a' * 60}…{middle}{'b' * 30}" for middle in ("", "2…", "3…")]
    assert [device["name"] for device in data["plans"][0]["devices"]] == names
    assert f"is {names[0]}, 100% of the run" in data["plans"][0]["verdict"]


def test_slices_tile_what_devices_and_channels_do():
    problem = layers()
    found = planned(problem, [0] * 5 + [1] * 8)
    shown = unpacked(to_page([found]))["plans"][0]
    lane, length = shown["slices"]["lane"], shown["slices"]["length"]
    busy = np.bincount(lane, length)
    assert busy[:2] == pytest.approx(found.timeline.busy[:2])
    assert [channel["name"] for channel in shown["channels"]] == ["fast->slow"]
    assert busy[3] == pytest.approx(0.004 + 1e-5)
    assert (np.diff(shown["slices"]["start"][lane == 0]) > 0).all()
    chain = shown["chain"]
    assert sum(chain["length"]) == pytest.approx(found.value)
    assert set(chain["lane"]) == {0, 1, 3}
    assert [device["memory"] for device in shown["devices"]] == [12e6, 1e9, None]
    assert max(shown["memory"][0]["bytes"]) == pytest.approx(found.timeline.peak[0])


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_what_is_joined_adds_up_to_what_it_was(seed):
    """Ops as items, slices and moments of memory: few of them hold the same ops, seconds and peaks as all."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, max_ops=60, objective="latency")
    plans = []
    for _ in range(2):
        allowed = [rng.choice(np.flatnonzero(may)) for may in problem.unit_allowed]
        placement = np.array(allowed, np.int32)[problem.unit]
        plans.append(planned(problem, placement))
    whole = unpacked(to_page(plans))
    with pytest.MonkeyPatch.context() as limits:
        for name, value in (("MAX_ITEMS", 20), ("MAX_SLICES", 15), ("MAX_POINTS", 5)):
            limits.setattr(page, name, value)
        joined = unpacked(to_page(plans))
    (all_ops,), (items,) = whole["graphs"], joined["graphs"]
    assert items["count"].sum() == len(all_ops["names"]) == problem.num_ops
    for i, one in enumerate(plans):
        few, many = joined["plans"][i], whole["plans"][i]
        assert few["slices"]["busy"].sum() == pytest.approx(many["slices"]["busy"].sum(), rel=1e-5, abs=1e-9)
        assert few["slices"]["count"].sum() == many["slices"]["count"].sum()
        assert few["time"].sum() == pytest.approx(many["time"].sum(), rel=1e-5, abs=1e-9)
        assert many["device"].tolist() == one.placement.tolist()
        ops_on = np.bincount(few["device"], items["count"], problem.num_devices)
        assert ops_on.tolist() == np.bincount(one.placement, minlength=problem.num_devices).tolist()
        for a, b in zip(few["memory"], many["memory"], strict=True):
            assert a["bytes"].max() == b["bytes"].max()
    moved = plans[0].placement != plans[1].placement
    devices = [joined["plans"][i]["device"] for i in (0, 1)]
    assert items["count"][devices[0] != devices[1]].sum() == moved.sum()


def test_modules_fold_into_few():
    problem = layers(200)
    shown = unpacked(to_page([planned(problem, [1] * problem.num_ops)]))["graphs"][0]
    children = (
        np.bincount(shown["parent"][1:])
        + np.bincount(shown["node"], minlength=len(shown["parent"]))[: shown["parent"].max() + 1]
    )
    assert children.max() <= page.FAN
    assert (shown["parent"][1:] < np.arange(1, len(shown["parent"]))).all()  # the page relies on it
    of_op = [shown["paths"][node] for node in shown["node"]]
    assert of_op == list(problem.graph.op_modules)


#: Text with dots in it, which is no path.
NO_PATHS = [MARKUP.replace("hurt", "a.b"), "v1.5 final", "Hello world. This is text.", "a..b", ".a", "a.", "...."]


def test_a_name_that_is_no_path_is_one_module():
    build = GraphBuilder("net")
    for i, name in enumerate([*NO_PATHS, "model.layers.0.mlp", "model.layers.0.mlp", "model.layers.1.mlp"]):
        build.op(f"op{i}", kind="k", op_modules=name)
    problem = Problem(build.graph(), full_mesh([Device("a")]), Costs.create(np.ones((10, 1))))
    shown = unpacked(to_page([planned(problem, [0] * 10)]))["graphs"][0]
    assert shown["labels"][1:] == [*NO_PATHS, "model", "layers", "0", "mlp", "1.mlp"]
    assert [shown["paths"][node] for node in shown["node"]] == list(problem.graph.op_modules)


def test_a_page_proves_nothing():
    """The plan brings its bound along; to prove it again may take longer than all else."""
    problem = layers(3)
    to_page([planned(problem, [1] * 7)])
    assert "bound" not in problem.derived


def test_plans_of_different_graphs_share_a_page():
    shown = unpacked(to_page([planned(layers(n), [1] * (2 * n + 1)) for n in (2, 3)]))
    assert [one["graph"] for one in shown["plans"]] == [0, 1]
    assert [graph["ops"] for graph in shown["graphs"]] == [5, 7]


def test_the_command_and_the_method_write_pages(run, both):
    both[0].save("a.json")
    both[1].save("b.json.gz")
    facts = {
        "plan": both[0].digest,
        "engine": "torch",
        "library": "torch",
        "holds": True,
        "predicted": 1.0,
        "placed": 1.0,
        "plain": 1.0,
    }
    facts |= {"placed_spread": 0.0, "plain_spread": 0.0, "findings": [], "more": 1}
    Path("seen.json").write_text(json.dumps(facts))
    result = run("report", "a.json", "b.json.gz", "-o", "page.html", "--verified", "seen.json", "--json")
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert told["bytes"] == Path("page.html").stat().st_size
    assert [one["title"] for one in told["plans"]] == ["a", "b"]
    other = run("report", "b.json.gz", "--verified", "seen.json")
    assert (other.code, other.err) == (2, "error: --verified seen.json: this is of another plan; verify this one\n")
    shown = unpacked(Path("page.html").read_text(encoding="utf-8"))["plans"]
    assert [one["verified"] and one["verified"]["placed"] for one in shown] == [1.0, None]
    both[0].report("own.html", both[1])
    assert [one["value"] for one in unpacked(Path("own.html").read_text())["plans"]] == [one.value for one in both]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("{}", "plan"), ("[]", "must be an object"), ('{"plan": 1}', "plan"), ("{", "seen.json"), ("", "seen.json")],
)
def test_a_verification_that_is_none_is_refused(run, both, content, complaint):
    both[0].save("a.json")
    Path("seen.json").write_text(content)
    result = run("report", "a.json", "--verified", "seen.json")
    assert result.code == 2
    assert complaint in result.err
    assert not Path("page.html").exists()
    assert (
        "more of these (2) than plans (1)" in run("report", "a.json", "--verified", "seen.json", "--verified", "x").err
    )


# ---- in a browser ----------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser():
    if not CHROMIUM:
        pytest.skip("there is no chromium; apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def plain(found):
    """No-break spaces, which units have, as spaces."""
    return [plain(one) for one in found] if isinstance(found, list) else found and found.replace("\xa0", " ")


@pytest.fixture(autouse=True)
def plainly(monkeypatch):
    with contextlib.suppress(ImportError):
        from playwright.sync_api import Locator

        for name in ("inner_text", "all_inner_texts", "text_content", "all_text_contents", "get_attribute"):
            read = getattr(Locator, name)
            monkeypatch.setattr(Locator, name, lambda self, *args, read=read: plain(read(self, *args)))


@pytest.fixture
def opened(browser, tmp_path):
    """Opens plans as a page; whatever it complains of, or asks the world for, fails the test."""
    heard = []
    contexts = []

    def open_page(*plans, titles=None, verified=(), **settings):
        file = tmp_path / "page.html"
        file.write_text(to_page(plans, titles, verified), encoding="utf-8")
        context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce", **settings)
        contexts.append(context)
        view = context.new_page()
        view.on("console", lambda message: heard.append(message.text))
        view.on("pageerror", lambda error: heard.append(str(error)))
        view.on("request", lambda request: request.url.startswith(("file:", "data:")) or heard.append(request.url))
        view.goto(file.as_uri())
        view.wait_for_selector("html[data-ready]")
        return view

    yield open_page
    for context in contexts:
        context.close()
    assert heard == []


def box_names(view):
    return view.locator(".box .name span:first-child").all_inner_texts()


def lane_middle(view, row):
    """Where to point to: the lanes of devices come first, 36 pixels each."""
    view.locator("#timeline canvas").scroll_into_view_if_needed()
    area = view.locator("#timeline canvas").bounding_box()
    return area["x"], area["y"] + 30 + 36 * row + 16, area["width"]


def test_the_verdict_comes_first(opened, both):
    view = opened(both[0])
    cards = view.locator("#verdict .card").all_inner_texts()
    assert "25.0 ms" in cards[0]  # 5 ms, a transfer of 4 ms, 16 ms
    told = view.locator("#verdict .path").get_attribute("aria-label")
    assert told == "Critical path: fast 20.0%, slow 64.0%, transfers 16.0%"
    assert "50.0%" in cards[1]  # as the terminal says it
    assert "on fast, the fullest" in cards[2]
    assert "83.3%" in cards[2]
    assert "critical path" in cards[3]
    assert view.title() == f"net on {MARKUP}"


def test_a_name_with_markup_is_text(opened, both):
    view = opened(both[0])
    assert view.evaluate("window.hurt") is None
    assert view.locator("img").count() == 0
    assert MARKUP in view.locator("h1").inner_text()
    assert MARKUP in box_names(view)


def test_names_keep_their_place_on_the_screen(opened):
    """What is read from the right stays where it is, and the numbers after it; nothing that steers is drawn or told."""
    view = opened(*steered(), titles=["one" + STEERING, "other"])
    drawn = listened(view)
    view.get_by_label("Show the whole run").click()
    name = view.locator("#ops tbody button").get_by_text("add")
    places = name.evaluate(
        """(one) => {
          const walker = document.createTreeWalker(one, NodeFilter.SHOW_TEXT), texts = [];
          while (walker.nextNode()) texts.push(walker.currentNode);
          return ["\u05e9", "0", "add"].map((part) => {
            const text = texts.find((node) => node.data.includes(part));
            const range = new Range();
            range.setStart(text, text.data.indexOf(part));
            range.setEnd(text, text.data.indexOf(part) + 1);
            return range.getBoundingClientRect().left;
          });
        }"""
    )
    assert places == sorted(places)
    attributes = view.evaluate(
        "[...document.querySelectorAll('*')].flatMap((one) => [...one.attributes].map(({ value }) => value))"
    )
    for text in [view.title(), *attributes, *drawn(), *view.evaluate("document.body.innerText").split("\n")]:
        assert re.sub("[\u2068\u2069\xa0\t\n]", "", text).isprintable()


def test_one_filters_by_what_one_can_type(opened):
    build = GraphBuilder("net")
    for i in range(5):
        build.op(f"{HEBREW}.{i}", kind="k", op_modules=HEBREW)
    view = opened(planned(odd(build), [0] * 5))
    view.get_by_label("Filter Ops").fill(f"{HEBREW}.3")
    assert view.locator("#ops tbody tr").count() == 1


def test_a_module_is_called_as_in_the_terminal(opened):
    """Whole, where there is room; no part of a name is taken for one, wherever it is shown."""
    build = GraphBuilder("net")
    x = ()
    for name in [*NO_PATHS[:3], *(f"model.layers.{i}.mlp" for i in range(2))]:
        x = build.op(f"{name}/op", kind="k", op_modules=name, inputs=x, outputs=[4e6])
    found = planned(odd(build), [0] * 5)
    view = opened(found, planned(found.problem, [1] * 5), titles=["one", "other"])
    told = [*explain(found.timeline).by_module]
    assert set(told) == {*NO_PATHS[:3], "model.layers.*.mlp"}
    assert sorted(view.locator("#verdict .row .name").all_inner_texts()) == sorted(told)
    modules = view.locator("#compare .table").nth(1).locator("tbody td:first-child").all_inner_texts()
    assert modules == [*NO_PATHS[:3], "model.layers.0.mlp", "model.layers.1.mlp"]
    drawn = listened(view)
    view.get_by_label("Show the whole run").click()
    parts = {"5 final", " This is text", "b=1>", "final"}
    assert not parts & set(drawn())
    assert not parts & set(box_names(view))
    boxes = view.locator(".box").evaluate_all("all => all.map((one) => one.title)")
    assert boxes[:3] == [f"{name}/op" for name in NO_PATHS[:3]]


def test_hovering_tells_of_op_and_transfer(opened, both):
    view = opened(both[0])
    left, y, width = lane_middle(view, 0)
    view.mouse.move(left + 140, y)
    tip = view.locator(".tip")
    told = dict(row.split("\n") for row in tip.locator("div").all_inner_texts())
    assert told["op"] == MARKUP
    assert (told["device"], told["takes"], told["cost"]) == ("fast", "1.00 ms", "modelled")
    assert told["bytes"] == "3.81 MiB made"
    view.mouse.move(left + width - 20, lane_middle(view, 1)[1])
    told = dict(row.split("\n") for row in tip.locator("div").all_inner_texts())
    assert told["op"] == "layers.5.add"
    assert told["module"] == "layers.5"
    view.mouse.move(left + 140, 5)
    assert tip.is_hidden()


def listened(view):
    """A function that gives the texts that were drawn on a canvas since it was last called."""
    view.evaluate(
        """() => {
          const write = CanvasRenderingContext2D.prototype.fillText;
          window.written = [];
          CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
            window.written.push(text);
            return write.call(this, text, ...at);
          };
        }"""
    )
    next_frame = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    return lambda: plain(view.evaluate(f"{next_frame}.then(() => written.splice(0))"))


def test_what_a_device_holds_is_told_where_one_points(opened, both):
    view = opened(both[0])
    drawn = listened(view)
    view.locator("#memory canvas").scroll_into_view_if_needed()
    area = view.locator("#memory canvas").bounding_box()
    view.mouse.move(area["x"] + 140, area["y"] + 40)  # during the first op
    during = drawn()
    assert "5.72 MiB" in during  # two weights of a megabyte and the input of four
    view.mouse.move(area["x"] + 40, area["y"] + 40)
    after = drawn()
    assert after
    assert "5.72 MiB" not in after


def odd(build, memory=1e9, seconds=1e-3, name="box"):
    graph = build.graph()
    devices = [Device(name, memory=memory), Device("b" + name)]
    costs = Costs.create(np.full((graph.num_ops, 2), seconds), "modelled")
    return Problem(graph, full_mesh(devices, 1e9, 0.0, "odd"), costs)


def test_an_empty_graph_has_a_page(opened):
    view = opened(planned(odd(GraphBuilder("empty")), []))
    cards = view.locator("#verdict .card").all_inner_texts()
    assert [card.split("\n")[0] for card in cards] == ["Time", "Gap", "What limits it"]
    assert "Nothing runs." in cards[2]
    assert view.locator(".box").count() == 0


@pytest.mark.parametrize("objective", ["latency", "throughput", "completion"])
@pytest.mark.parametrize(
    ("seconds", "size", "absent"),
    [
        (0.0, 0.0, {"timeline", "memory"}),
        (1e-3, 0.0, {"memory"}),
        (1e-3, 1e6, set()),
    ],
)
def test_what_says_nothing_is_absent(opened, objective, seconds, size, absent):
    """No time, no size, no module: and a number for none of them."""
    build = GraphBuilder("small")
    build.op("y", kind="k", inputs=build.op("x", kind="k", outputs=[size]))
    problem = replace(odd(build, seconds=seconds), objective=objective)
    plans = planned(problem, [0, 1]), planned(problem, [0, 0])
    for shown in (plans[:1], plans):
        view = opened(*shown, titles=["one", "other"][: len(shown)])
        seen = view.locator("section:visible").evaluate_all("all => all.map((one) => one.id)")
        beside = ["compare"] * (len(shown) - 1)
        wanted = [*beside, "timeline", "memory", "graph", "devices", "ops"]
        assert seen == [one for one in wanted if one not in absent]
        assert view.locator("nav a").count() == len(seen)
        assert ("Memory left" in view.locator("#verdict").inner_text()) == (size > 0)
        text = view.evaluate("document.body.innerText + document.querySelector('main').innerHTML")
        assert not re.search("NaN|undefined|Infinity", text)


def test_the_page_says_it_as_the_terminal_does(opened, both):
    """Gaps, shares and differences in the same words, wherever they are."""
    problem = both[0].problem
    plans = [
        replace(planned(problem, placement), lower_bound=bound, history=both[0].history, bounds=both[0].bounds)
        for placement, bound in (([0] * 5 + [1] * 8, 0.025010), ([1] * 13, 0.01), ([0] * 4 + [1] * 9, 0.02602))
    ]
    plans = [replace(one, lower_bound=one.value) if one.gap < 1e-2 else one for one in plans]
    view = opened(*plans, titles=["one", "two", "three"])
    best = min(plans, key=lambda one: one.value)
    rows = [row.split("\t") for row in view.locator("#compare .table").first.locator("tbody tr").all_inner_texts()]
    for row in rows:
        one = plans[["one", "two", "three"].index(row[0])]
        assert row[3] == format_gap(one.gap).removeprefix("gap ")
        if one is not best:
            assert f"({format_change(one.value, best.value)})" in row[2]
    assert view.locator("#verdict .value").nth(1).inner_text() == "optimal"
    assert view.locator("#progress .about").inner_text().endswith("and the plan is optimal.")
    told = device_table(best.timeline)
    for row in view.locator("#devices .table").first.locator("tbody tr").all_inner_texts():
        for share in re.findall(r"[<\d.]+%", row):
            assert share in told
    assert view.locator("#devices .about").first.inner_text() == "Busy shares are relative to the run."
    paced = opened(planned(replace(problem, objective="throughput"), [1] * 13))
    about = paced.locator("#devices .about").first.inner_text()
    assert about == "Busy shares are relative to the time per sample, in a full pipeline."


@pytest.mark.parametrize(
    ("name", "content"), [("page.html", "<!doctype html>"), ("other.htm", None)], ids=["a page", "a page to be"]
)
def test_a_page_is_no_plan(run, both, name, content):
    both[0].save("a.json")
    if content is not None:
        Path(name).write_text(content)
    result = run("report", "a.json", name)
    assert result.code == 2
    assert not Path("page.html").exists() or Path("page.html").read_text() == content
    assert result.err.strip() == (
        f"error: {name}: a page, not a plan; name the plan that it is made from (a page to write goes after -o)"
    )


@pytest.mark.parametrize("width", [360, 1280])
def test_names_of_thousands_of_characters_fit(opened, width):
    build = GraphBuilder("n" * 3000)
    tensor = build.op("o" * 5000, kind="k" * 900, op_modules="m" * 2000 + "." + "l" * 2000, outputs=[1e6])
    build.op("p" * 5000, kind="k", op_modules="m" * 2000, inputs=tensor)
    problem = odd(build, name="d" * 3000)
    view = opened(planned(problem, [0, 0]), planned(problem, [0, 1]), titles=["t" * 999, "u" * 999])
    view.set_viewport_size({"width": width, "height": 800})
    assert view.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize(("seconds", "shown"), [(1e-300, "2e-291 ns"), (1e12, "2e+12 s"), (0.0, "0 s")])
def test_times_beyond_all_units(opened, seconds, shown):
    build = GraphBuilder("odd")
    build.op("y", kind="k", inputs=build.op("x", kind="k", outputs=[0.0]))
    view = opened(planned(odd(build, seconds=seconds), [0, 1]))
    assert shown in view.locator("#verdict .card").first.inner_text()
    assert (view.evaluate("document.body.innerText").count("000000")) == 0


def test_zoom_pan_and_the_whole(opened, both):
    view = opened(both[0])
    seen = []

    def first_op():
        left, y, _ = lane_middle(view, 0)
        view.mouse.move(left + 140, 5)
        view.mouse.move(left + 140, y)
        tip = view.locator(".tip")
        seen.append(tip.locator("div span").first.inner_text() if tip.is_visible() else "")

    first_op()
    canvas = view.locator("#timeline canvas")
    canvas.focus()
    for _ in range(4):
        view.keyboard.press("+")
    view.keyboard.press("Shift+ArrowRight")
    first_op()  # far from the first op now, which has left the screen
    view.get_by_label("Show the whole run").click()
    first_op()
    left, y, _ = lane_middle(view, 0)
    view.get_by_label("Zoom in").click()
    view.mouse.move(left + 900, y)
    view.mouse.down()
    view.mouse.move(left + 400, y, steps=4)
    view.mouse.up()
    first_op()
    assert seen[0] == seen[2] == MARKUP
    assert seen[1] != MARKUP
    assert seen[3] != MARKUP
    assert view.locator(".box.now").count() == 0  # a drag is no click


def test_ops_of_a_module_carry_its_name(opened, both):
    """Across what runs without a break; each op its own, once it is as wide as that."""
    view = opened(both[0])
    drawn = listened(view)
    view.get_by_label("Show the whole run").click()
    few = [text for text in drawn() if text.startswith("layers")]
    assert few == ["layers.0", "layers.1", "layers.2", "layers.3", "layers.4", "layers.5"]
    view.get_by_label("Zoom in").click()
    many = [text for text in drawn() if text.startswith("layers")]
    assert {"layers.2.add", "layers.3.mul"} <= set(many)
    assert "layers.3" not in many


def test_many_layers_in_a_lane_carry_their_numbers(opened):
    """Ops too thin for names are one: from which layer to which; where that has no room, its numbers alone."""
    problem = layers(200)
    view = opened(planned(problem, [0] + [1] * 400))
    drawn = listened(view)
    view.get_by_label("Show the whole run").click()
    assert [text for text in drawn() if text.startswith("layers")] == ["layers.0–199"]
    view = opened(planned(problem, [0] + [1] * 8 + [0] * 392))  # four layers, and little room
    drawn = listened(view)
    view.get_by_label("Show the whole run").click()
    assert "…0–3" in drawn()


def test_a_click_in_the_timeline_unfolds_the_graph(opened, both):
    view = opened(both[0])
    before = box_names(view)
    assert "layers.0.mul" not in before
    left, y, width = lane_middle(view, 1)
    view.mouse.click(left + width - 20, y)
    assert "add" in box_names(view)
    assert view.locator(".box.now").get_attribute("aria-label").startswith("add: add · 2.00 ms, on slow")
    view.get_by_role("button", name="Show it in the timeline").click()
    said = view.locator("#timeline [aria-live]").text_content()
    assert said.startswith("op layers.5.add, module layers.5")  # the cursor is on it, and it is told
    assert view.locator("#timeline .tip").is_visible()
    assert view.evaluate("document.activeElement.tagName") == "CANVAS"


def test_the_graph_folds_and_unfolds(opened, both):
    view = opened(both[0])
    view.get_by_label("Fold everything").click()
    assert sorted(box_names(view)) == sorted([MARKUP, "layers"])
    folded = view.locator(".box.folded")
    assert "12 ops" in folded.inner_text()
    assert "fast + slow" in folded.inner_text()
    folded.click()
    unfolded = [MARKUP, *(f"layers.{i}" for i in range(6))]
    assert box_names(view) == unfolded  # along the dataflow, as Tab goes
    assert view.locator(".sheet .line").count() == 6
    crosses = view.locator(".sheet .line.crosses title").all_text_contents()
    assert crosses == ["layers.1 → layers.2: 3.81 MiB, of which 3.81 MiB move to another device"]
    view.locator(".box.folded").first.press("Enter")
    assert {"mul", "add"} <= set(box_names(view))
    view.locator(".box.now").press("Backspace")
    assert box_names(view) == unfolded


def test_what_moves_between_boxes_is_what_changes_devices(opened):
    """Two modules with an op on either device each, which give to ops on their own device only: nothing moves."""
    build = GraphBuilder("mixed")
    for name in "xy":
        tensor = build.op(f"{name}0", kind="k", op_modules="first", outputs=[1e6])
        build.op(f"{name}1", kind="k", op_modules="second", inputs=tensor)
    problem = odd(build)
    seen = []
    for placement in ([0, 0, 1, 1], [0, 1, 1, 1]):
        view = opened(planned(problem, placement))
        view.get_by_label("Fold everything").click()
        assert box_names(view) == ["first", "second"]
        assert view.locator(".box .where").first.inner_text() == "box + bbox"
        seen.append([view.locator(f".sheet .line{one}").count() for one in ("", ".crosses")])
    assert seen == [[1, 0], [1, 1]]


def test_long_chains_lie_in_rows_without_tangles(opened):
    """Forty layers, each of which reads a mask too: seen at first, across the screen, and the mask's lines if asked."""
    build = GraphBuilder("deep")
    mask = build.op("mask", kind="input", outputs=[1e3])
    x = build.op("x", kind="input", outputs=[1e6])
    for i in range(40):
        for name in ("mul", "add"):
            x = build.op(f"{name}{i}", kind="k", op_modules=f"net.layers.{i}", inputs=x + mask, outputs=[1e6])
    view = opened(planned(odd(build), [0] * 41 + [1] * 41))
    assert box_names(view) == ["mask", "x", *(f"layers.{i}" for i in range(40))]
    chips = view.get_by_role("group", name="Unfolded modules").get_by_role("button")
    assert chips.all_inner_texts() == ["Fold all", "net ×", "layers ×"]
    assert view.locator("#graph .scroll").evaluate("one => one.scrollWidth <= one.clientWidth")
    tops = view.locator(".box").evaluate_all("all => all.map((one) => one.offsetTop)")
    assert len(set(tops)) >= 4
    lines = view.locator(".sheet .line")
    assert lines.count() == 40
    view.get_by_role("button", name="Show the lines to 40 boxes of mask").click()
    assert lines.count() == 80
    assert view.locator(".sheet .line.now").count() == 40
    assert view.locator(".box.now .name").inner_text() == "mask"
    view.locator(".box", has_text="layers.7").focus()
    assert view.locator(".sheet .line.now").count() == 3  # the one before, the one after, and the mask's
    assert lines.count() == 41
    view.set_viewport_size({"width": 390, "height": 800})
    expect = pytest.importorskip("playwright.sync_api").expect
    expect(view.locator(".sheet")).to_have_css("width", re.compile(r"^(2|3)\d\d"))  # downwards


def leaning(view, x, y, size):
    """Whether the stripes there rise to the right: pixels along them are more alike than those across."""
    image = pytest.importorskip("PIL.Image")
    clip = {"x": x, "y": y, "width": size, "height": size}
    pixels = np.asarray(image.open(io.BytesIO(view.screenshot(clip=clip))).convert("L"), float)
    rising = np.abs(pixels[:-1, 1:] - pixels[1:, :-1]).sum()
    falling = np.abs(pixels[:-1, :-1] - pixels[1:, 1:]).sum()
    assert max(rising, falling) > 1.5 * min(rising, falling)
    return rising < falling


def test_the_stripes_of_a_swatch_are_those_of_the_timeline(opened):
    """The ninth device has stripes one way, the seventeenth the other way."""
    build = GraphBuilder("wide")
    build.op("x", kind="k")
    build.op("y", kind="k")
    problem = Problem(
        build.graph(), full_mesh([Device(f"d{i}") for i in range(20)], 1e9), Costs.create(np.ones((2, 20)))
    )
    seen = []
    for device in (8, 16):
        view = opened(planned(problem, [device, device]))
        view.add_style_tag(content=".device i { width: 40px !important; height: 40px !important }")
        swatch = view.locator("#devices .device", has_text=re.compile(f"^d{device}$")).locator("i")
        swatch.scroll_into_view_if_needed()
        area = swatch.bounding_box()
        in_table = leaning(view, area["x"] + 8, area["y"] + 8, 24)
        left, middle, _ = lane_middle(view, 0)
        seen.append((in_table, leaning(view, left + 300, middle - 12, 24)))
    assert seen == [(True, True), (False, False)]


def test_the_keyboard_keeps_its_place_in_the_graph(opened):
    """Also when the graph is drawn again for the room that its boxes take, some milliseconds later."""
    problem = load_problem("llama-3-8b", "two-gpus-one-host")
    ops = np.arange(problem.num_ops)
    view = opened(planned(problem, (ops * 2 // problem.num_ops).astype(np.int32)))
    held = "document.activeElement.dataset.box === document.querySelector('.box.now').dataset.box"
    view.locator("#timeline canvas").focus()
    for key in ["ArrowRight"] * 4 + ["Enter"]:
        view.keyboard.press(key)
    view.wait_for_timeout(100)
    assert view.evaluate(held)
    before = len(box_names(view))
    view.keyboard.press("Backspace")
    view.wait_for_timeout(100)
    assert view.evaluate(held)
    assert len(box_names(view)) < before
    view.set_viewport_size({"width": 1000, "height": 800})
    view.wait_for_timeout(100)
    assert view.evaluate(held)
    view.keyboard.press("Enter")
    view.wait_for_timeout(100)
    assert view.evaluate(held)
    assert len(box_names(view)) == before


def test_a_training_step_is_seen_at_first(opened):
    """Layers in rows; gradients flow back on the lines between them; sums of gradients are one box, at the end."""
    problem = load_problem("bert-base-train", "four-gpus")
    view = opened(planned(problem, np.zeros(problem.num_ops, np.int32)))
    names = box_names(view)
    assert [name for name in names if name.startswith("layer")] == [f"layer.{i}" for i in range(12)]
    assert names[-1] == "add ops"
    assert view.locator("#graph .scroll").evaluate("one => one.scrollWidth <= one.clientWidth")
    assert view.get_by_role("button", name=re.compile(r"^Show the lines from \d+ boxes of add ops")).count() == 1
    lefts = view.locator(".box", has_text="layer.").evaluate_all("all => all.map((one) => one.offsetLeft)")
    assert max(lefts.count(left) for left in lefts) >= 2  # below each other
    view = opened(planned(load_problem("resnet-50-train", "four-gpus"), [0] * 733))
    names = box_names(view)
    assert [name for name in names if name in ("conv1", "bn1", "maxpool", "layer1", "layer4", "avgpool", "fc")] == [
        "conv1", "bn1", "maxpool", "layer1", "layer4", "avgpool", "fc",
    ]  # fmt: skip
    both_ways = view.locator(".sheet .line", has=view.locator("[marker-start]"))
    assert any(
        re.match("conv1 → bn1: .*; bn1 → conv1: ", title) for title in both_ways.locator("title").all_text_contents()
    )
    assert view.locator(".sheet .line.far").count() > 0
    one = view.locator(".box", has_text="threshold_backward")
    before = view.locator(".sheet .line.only").count()
    one.focus()
    assert (before, view.locator(".sheet .line.only").count()) == (0, 1)


def test_a_table_shows_the_few_rows_that_are_left(opened):
    for count, hidden in ((5, True), (6, False)):  # 11 and 13 ops; at first 8 rows, and at most 4 more
        view = opened(planned(layers(count), [1] * (2 * count + 1)))
        assert view.get_by_label("Show more rows of Ops").is_hidden() == hidden
        assert view.locator("#ops tbody tr").count() == (11 if hidden else 8)


def test_on_a_phone_tables_keep_their_first_column_and_the_page_speaks_of_fingers(opened, both):
    view = opened(both[0], has_touch=True, is_mobile=True)
    view.set_viewport_size({"width": 390, "height": 800})
    assert "pinch to zoom, tap an op twice" in view.locator("#timeline .about").inner_text()
    assert "Tap a module to unfold it." in view.locator("#graph").inner_text()
    drawn = listened(view)
    view.get_by_label("Show the whole run").click()
    assert {"0 ms", "10 ms", "20 ms"} <= set(drawn())
    panel = view.locator("#modules .wide")
    panel.evaluate("one => one.scrollTo({ left: 100, behavior: 'instant' })")
    assert panel.evaluate("one => one.scrollLeft") == 100
    cell = panel.locator("tbody td").first
    assert cell.bounding_box()["x"] == pytest.approx(panel.bounding_box()["x"], abs=1.5)
    swatches = panel.locator("tbody tr").first.locator(".device")
    assert swatches.all_text_contents() == ["fast", "slow"]
    assert min(one.locator("span").bounding_box()["width"] for one in swatches.all()) > 20  # not their colours alone
    assert cell.locator("xpath=..").bounding_box()["height"] < 50


def test_names_that_are_too_long_lose_their_beginning(opened):
    build = GraphBuilder("net")
    x = build.op("x", kind="k", op_modules="net.a", outputs=[0.0])
    end = "a_very_long_name_of_a_module_that_no_phone_has_room_for"
    build.op("y", kind="k", op_modules=f"net.b.{end}", inputs=x)
    view = opened(planned(odd(build), [0, 0]))
    view.set_viewport_size({"width": 390, "height": 800})
    name = view.locator("#verdict .row .link", has_text=end)
    style = name.evaluate("one => [getComputedStyle(one).textOverflow, getComputedStyle(one).direction]")
    assert style == ["ellipsis", "rtl"]
    assert name.evaluate("one => one.scrollWidth > one.clientWidth")
    inner, outer = name.locator("bdi").bounding_box(), name.bounding_box()
    assert inner["x"] + inner["width"] == pytest.approx(outer["x"] + outer["width"], abs=1)  # its end is seen
    assert view.locator("#verdict .words b").count() == 1


@pytest.mark.parametrize("width", [390, 1280])
def test_names_that_differ_at_their_ends_can_be_told_apart(opened, width):
    """Of devices and ops, wherever there is too little room for the whole of them."""
    build = GraphBuilder("net")
    x = build.op("a", kind="k", outputs=[1e6])
    for i in range(2):
        x = build.op(f"a_long_name_of_an_op_in_the_first_layer:{i}", kind="k", inputs=x, outputs=[1e6])
    devices = [Device(f"a-device-with-quite-a-long-name-{i}", memory=1e9) for i in range(2)]
    costs = Costs.create(np.full((3, 2), 1e-3), "modelled")
    view = opened(planned(Problem(build.graph(), full_mesh(devices, 1e9), costs), [0, 1, 0]))
    view.set_viewport_size({"width": width, "height": 800})
    names = view.locator(".meters .name, #devices .device .tail, .box .name .tail, .box .where .tail")
    places = names.evaluate_all(
        """all => all.map((one) => {
          const [inner, outer] = [one.firstChild, one].map((part) => part.getBoundingClientRect());
          return [one.innerText, inner.width - outer.width, inner.right - outer.right];
        })"""
    )
    cut = [text for text, over, _ in places if over > 1]
    assert {text[-1] for text in cut} == {"0", "1"}
    assert len(cut) >= 2 + 2 + 3  # ops in boxes, and where they are
    assert all(past < 1 for _, over, past in places if over > 1)  # their ends are seen


def test_a_stretch_of_ops_is_named_within_its_module(opened):
    build = GraphBuilder("net")
    x = ()
    for i in range(100):
        x = build.op(f"top.op{i}", kind=f"k{i % 3}", op_modules="top", inputs=x, outputs=[0.0])
    view = opened(planned(odd(build), [0] * 100))
    names = box_names(view)
    assert (names[0].split()[0], names[-1].split()[-1]) == ("op0", "op99")
    assert view.locator(".box").first.get_attribute("title").startswith("top.op0 … ")


def test_memory_far_below_its_limits_has_one_scale(opened):
    """Both plans are drawn, and limits named where they are; on one scale."""
    build = GraphBuilder("net")
    x = build.op("x", kind="k", outputs=[1e8])
    build.op("y", kind="k", inputs=x, outputs=[1e7])
    graph, costs = build.graph(), Costs.create(np.full((2, 2), 1e-3), "modelled")

    def limited(memory, objective="latency"):
        devices = [Device("box", memory=memory), Device("bbox", memory=memory)]
        return Problem(graph, full_mesh(devices, 1e9), costs, objective=objective)

    problem = limited(1e10)
    plans = [planned(problem, [0, 0]), planned(problem, [1, 0])]
    paced = planned(limited(1e10, "throughput"), [0, 1])
    dashes = """() => {
      const set = CanvasRenderingContext2D.prototype.setLineDash;
      window.dashes = [];
      CanvasRenderingContext2D.prototype.setLineDash = function (one) {
        window.dashes.push(String(one));
        set.call(this, one);
      };
    }"""
    seen = []
    for shown in (plans, [paced], [planned(limited(3e8), [0, 1])]):
        view = opened(*shown, titles=["one", "other"][: len(shown)])
        view.evaluate(dashes)
        drawn = listened(view)
        view.get_by_label("Show the whole run").click()
        seen.append((set(drawn()), view.evaluate("dashes"), view.locator("#memory .about").first.inner_text()))
    for texts, _, about in seen[:2]:
        assert "limit 9.31 GiB" in texts
        assert "All devices share one scale" in about
    assert "pipeline full" not in seen[0][0]
    assert "1.5,2.5" in seen[0][1]
    assert "The dotted line is other." in seen[0][2]
    assert "pipeline full" in seen[1][0]
    assert "1.5,2.5" not in seen[1][1]
    assert not any(text.startswith("limit ") for text in seen[2][0])
    assert "The line at the top is its limit" in seen[2][2]
    view = opened(paced, planned(paced.problem, [1, 0]), titles=["one", "paced"])
    drawn = listened(view)
    view.get_by_label("Show the whole run").click()
    assert any(re.match("paced · .* per sample; one sample's way is shown", text) for text in drawn())


def heights(view):
    """Of the coloured pixels in the lanes of memory, in the middle of the run."""
    return view.evaluate(
        """() => {
          const canvas = document.querySelector("#memory canvas");
          const ratio = canvas.width / canvas.clientWidth;
          const middle = Math.round(((126 + canvas.clientWidth) / 2) * ratio);
          const { data } = canvas.getContext("2d").getImageData(middle, 0, 1, canvas.height);
          const lanes = [0, 0];
          for (let y = 0; y < canvas.height; y++) {
            const pixel = data.slice(4 * y, 4 * y + 3);
            const coloured = pixel.length && data[4 * y + 3] && Math.max(...pixel) - Math.min(...pixel) > 30;
            if (coloured) lanes[Math.floor((y / ratio - 32) / 78)] += 1 / ratio;
          }
          return lanes;
        }"""
    )


def test_heights_of_memory_compare_across_devices(opened):
    build = GraphBuilder("net")
    for name, size in (("x", 4e7), ("y", 1e7)):
        build.op(f"{name}2", kind="k", inputs=build.op(name, kind="k", outputs=[size]))
    devices = [Device("a", memory=1e10), Device("b", memory=1e9)]
    costs = Costs.create(np.full((4, 2), 1e-3), "modelled")
    view = opened(planned(Problem(build.graph(), full_mesh(devices, 1e9), costs), [0, 0, 1, 1]))
    first, second = heights(view)
    assert first == pytest.approx(0.55 * 58, abs=3)
    assert second == pytest.approx(first / 4, abs=3)


def test_what_moved_is_told_by_layer(opened):
    """A module that holds nearly all that moved is unfolded; each row says how many went which way."""
    problem = layers(30)
    old = [0] + [0, 1] * 30
    new = [1] + [1, 0] * 29 + [0, 1]
    view = opened(planned(problem, new), planned(problem, old), titles=["new", "old"])
    table = view.locator("#compare .table").nth(1)
    shown = view.locator("#compare h3").all_inner_texts()
    assert shown == ["59 of 61 ops moved, by module", "Op by op"]
    assert table.get_by_role("status").inner_text() == "6 of 30 rows"
    row = table.locator("tbody tr").first.inner_text().split("\t")
    first, second = ("fast", "slow") if view.locator("#compare b").inner_text() == "new" else ("slow", "fast")
    assert [" ".join(cell.split()) for cell in row[:3]] == [
        "layers.0", "2", f"{first} → {second} 1 {second} → {first} 1",
    ]  # fmt: skip
    assert view.locator(".box .where", has_text="2 moved").first.locator("span").first.inner_text() == "2 devices"


def test_tables_sort_and_filter(opened, both):
    view = opened(both[0])

    def column(i):
        return view.locator(f"#ops tbody td:nth-child({i})").all_inner_texts()

    assert column(5) == ["2.00 ms"] * 8
    head = view.locator("#ops th").nth(0)
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert column(1)[:2] == [MARKUP, "layers.0.add"]
    view.get_by_label("Filter Ops").fill("layers.3")
    assert column(1) == ["layers.3.add", "layers.3.mul"]
    assert "2 rows" in view.locator("#ops").inner_text()
    view.get_by_label("Filter Ops").fill("")
    view.get_by_label("Show more rows of Ops").click()
    assert len(column(1)) == 13
    modules = view.locator("#modules tbody td:first-child").all_inner_texts()
    assert modules[0] == "layers"
    view.locator("#ops").get_by_role("button", name="Show layers.3.add in the graph").click()
    assert view.locator(".box.now .name").inner_text() == "add"


def test_plans_are_compared(opened, both):
    view = opened(*both, titles=["old", "new"])
    time = view.locator("#verdict .card").first
    assert "25.0 ms" in time.inner_text()  # the better one is shown
    assert "3.8% less than new; 5 of 13 ops moved" in time.inner_text()
    modules = view.locator("#compare .table").nth(1)
    row = modules.locator("tbody tr", has_text="layers.0").inner_text().split("\t")
    assert [" ".join(cell.split()) for cell in row] == ["layers.0", "2", "slow → fast 2", "4.00 ms", "2.00 ms"]
    moved = view.locator("#compare .table").nth(2)
    assert moved.locator("tbody tr").count() == 5
    row = moved.locator("tbody tr", has_text="layers.1.add").inner_text().split("\t")
    assert [cell.strip() for cell in row[1:]] == ["slow", "fast", "2.00 ms", "1.00 ms", "layers.1"]
    view.get_by_role("button", name="Swap the two plans").click()
    assert "4.0% more than old" in time.inner_text()
    assert view.locator(".box.moved").count() > 0
    view.get_by_role("button", name="Show layers.0 in the graph").click()
    assert view.locator(".box.now").get_attribute("title") == "layers.0.mul"
    view.locator("#compare").get_by_role("button", name="Show layers.1.add in the graph").click()
    assert view.locator(".box.now").get_attribute("title") == "layers.1.add"
    view.get_by_label("Beside").select_option("none")
    assert "ops moved" not in view.locator("body").inner_text()


def test_what_cannot_be_compared_is_not_ranked(opened, both):
    """A time per sample is no better than a time of one run, nor that of another graph; the first is shown first."""
    problem = replace(both[0].problem, objective="throughput")
    paces = [
        planned(problem, [1] * 13),
        planned(replace(problem, execution=Execution(overlap=False)), [0] * 5 + [1] * 8),
    ]
    small = planned(layers(2), [1] * 5)
    for plans, differ in (
        ([both[0], small], ["Model"]),
        ([both[0], paces[0]], ["Objective"]),
        (paces, ["Execution"]),
        (
            [
                both[0],
                both[1],
                planned(replace(layers(2), objective="throughput", execution=Execution(overlap=False)), [1] * 5),
            ],
            ["Model", "Objective", "Execution"],
        ),
    ):
        view = opened(*plans, titles=["first", "second", "third"][: len(plans)])
        heads = view.locator("#compare th").all_inner_texts()
        assert heads[2 : 2 + len(differ)] == differ
        assert "Against shown" not in heads
        shown = view.locator("#compare").inner_text()
        assert f"Not ranked: the plans differ in {' and '.join(differ).lower()}" in shown
        rows = view.locator("#compare .table").first.locator("tbody tr").all_inner_texts()
        assert [row.split()[0] for row in rows] == ["first", "second", "third"][: len(plans)]
        assert view.locator("#compare b").inner_text() == "first"
    assert "overlap true" in opened(*paces).locator("#compare").inner_text()
    time = opened(both[0], paces[0], titles=["one", "other"]).locator("#verdict .card").first.inner_text()
    assert "not compared with other: another objective, so the times cannot be compared" in time
    assert "less" not in time


def test_what_cannot_be_compared_shares_no_axis(opened, both):
    """Only one is drawn, to its own end, and the page says why; ops of the same graph are still found elsewhere."""
    paced = planned(replace(both[0].problem, objective="throughput"), [1] * 13)
    for other, why, moved in (
        (paced, "objective", True),
        (planned(layers(40), [0] + [1] * 80), "model", False),
    ):
        view = opened(both[0], other, titles=["one", "other"])
        drawn = listened(view)
        view.get_by_label("Show the whole run").click()
        texts = drawn()
        assert "ends 25.0 ms" in texts
        assert not any("other" in text for text in texts)
        assert texts.count("fast") == 2  # in the timeline, and in memory
        about = view.locator("#timeline .about").inner_text()
        assert f"other is not shown with it: another {why}, so the times cannot be compared." in about
        assert "dotted" not in view.locator("#memory .about").inner_text()
        assert view.locator("#timeline .key.moved").count() == moved
        view.get_by_role("button", name="Swap the two plans").click()
        said = view.locator("#timeline .about").inner_text()
        assert "one is not shown with it" in said
        assert ("It follows one sample through the pipeline." in said) == (other is paced)


def test_predicted_beside_measured(opened, both):
    findings = [
        {"claim": "time", "claimed": 0.022, "found": 0.03, "verdict": "+36%"},
        {"claim": "outputs", "claimed": 1e-4, "found": 0.0, "verdict": "holds"},
        {"claim": "busy fast", "claimed": 0.02, "found": 0.03, "verdict": "holds"},
        {"claim": "memory of idle", "claimed": None, "found": None, "verdict": "holds"},
    ]
    seen = {
        "plan": "",
        "engine": "torch",
        "library": MARKUP,
        "holds": False,
        "within": 0.15,
        "predicted": 0.022,
        "placed": 0.03,
        "plain": 0.05,
    }
    seen |= {"placed_spread": 0.001, "plain_spread": 0.002, "findings": findings}
    view = opened(both[0], verified=[seen])
    shown = view.locator("#verified").inner_text()
    assert "Not every claim of the plan held (the time may be 15% off). It was run with" in shown
    assert "36.4% more than predicted" in shown
    assert "30.0 ms ± 1.00 ms" in shown
    assert view.locator("#verified tbody .bad").inner_text() == "+36%"
    assert view.locator("#verified tbody tr", has_text="outputs").inner_text().split()[-2:] == ["equal", "holds"]
    assert view.locator("#verified tbody tr", has_text="busy").inner_text().split()[-1] == "+50.0%"
    assert view.locator("#verdict .bad").inner_text() == "measured 30.0 ms, 36.4% more than predicted"
    order = []
    for _ in range(2):  # what has no number is last, whichever way one sorts
        view.locator("#verified th").nth(2).get_by_role("button").click()
        order.append([row.split()[0] for row in view.locator("#verified tbody tr").all_inner_texts()])
    assert order == [["time", "busy", "outputs", "memory"], ["outputs", "time", "busy", "memory"]]
    assert view.locator("nav a").first.inner_text() == "Predicted and measured"
    rows = view.locator("#verified tbody tr")
    assert "≤ 1e-4" in rows.filter(has_text="outputs").inner_text()
    loose = opened(both[0], verified=[{**seen, "placed_spread": 0.02}])
    told = "36.4% more than predicted, which is within the spread of its runs, ± 20.0 ms"
    assert told in loose.locator("#verified").inner_text()
    assert loose.locator("#verdict .gain:not(.bad)").inner_text() == f"measured 30.0 ms, {told}"
    assert [row.split()[0] for row in opened(both[0], verified=[seen]).locator("#verified tbody tr").all_inner_texts()][
        -1
    ] == "busy"
    assert opened(both[0]).locator("nav a").first.inner_text() == "Timeline"
    assert opened(both[0]).locator("#verified").is_hidden()
    wide = opened(both[0], verified=[{**seen, "holds": True, "within": 1000.0}]).locator("#verified").inner_text()
    assert "Every claim of the plan held (the time may be 100000% off)." in wide
    old = opened(both[0], verified=[{**seen, "within": None}]).locator("#verified").inner_text()
    assert "Not every claim of the plan held. It was run with" in old


def test_planning_is_drawn(opened, both):
    view = opened(both[0])
    told = view.locator("#progress svg").get_attribute("aria-label")
    assert "from 30.0 ms to 20.0 ms in 2 steps" in told
    assert "bound rose from 10.0 ms to 12.5 ms, and the gap fell from 66.7% to 50.0%" in told
    assert view.locator("#progress path.bound").count() == 1
    assert opened(both[1]).locator("#progress").is_hidden()
    assert "The axis starts at 9.60 ms." in view.locator("#progress").inner_text()
    chart, panel = (view.locator(f"#progress {one}").bounding_box()["width"] for one in ("svg", ".panel"))
    assert panel - chart < 40
    steps = tuple((i * 1e-3, i, 0.03 - i * 1e-5) for i in range(500))
    many = opened(replace(both[0], history=steps)).locator("#progress circle")
    places = np.array(many.evaluate_all("all => all.map((one) => [one.cx.baseVal.value, one.cy.baseVal.value])"))
    assert 20 < len(places) < 250
    assert np.hypot(*np.diff(places, axis=0).T).min() >= 6


def drawn_in(view, *colours):
    """For each colour of the page [pixels, 2]: x and y of it in the timeline below its axis; x from 0 to 1."""
    found = view.evaluate(
        """(colours) => {
          const canvas = document.querySelector("#timeline canvas"), ratio = canvas.width / canvas.clientWidth;
          const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const one = document.createElement("i");
          document.body.append(one);
          return colours.map((colour) => {
            one.style.color = `var(--${colour})`;
            const wanted = [...getComputedStyle(one).color.match(/\\d+/g).map(Number), 255];
            const places = [];
            for (let i = 0; i < data.length / 4; i++) {
              if (wanted.every((part, k) => Math.abs(part - data[4 * i + k]) < 3)) places.push([i % width, i / width]);
            }
            return places.map(([x, y]) => [(x / ratio - 126) / (canvas.clientWidth - 126), Math.floor(y / ratio)]);
          });
        }""",
        colours,
    )
    return [np.array([place for place in places if place[0] > 0 and place[1] > 28]) for places in found]


def test_the_bound_and_the_chain_are_drawn_into_the_timeline(opened, both):
    """A dashed line where half of the run is over; a dark one below each step in turn, the transfer, too."""
    view = opened(both[0])
    drawn = listened(view)
    view.get_by_label("Show the whole run").click()
    assert {"bound 12.5 ms", "ends 25.0 ms"} <= set(drawn())
    assert "lower bound" in view.locator("#timeline .legend").inner_text()
    end = 0.02501 * 1.01  # of the axis
    bound, chain = drawn_in(view, "bound", "ink")
    x, y = bound.T
    x, y = x[y < 130], y[y < 130]  # above what it says
    assert np.median(x) == pytest.approx(0.0125 / end, abs=2e-3)
    assert np.ptp(x) < 4e-3
    assert np.ptp(y) > 80
    assert 0.4 < len(set(y)) / np.ptp(y) < 0.9  # six of ten pixels
    x, y = chain.T
    for row, begins, ends in ((0, 0.0, 0.005), (1, 0.00901, 0.02501)):
        step = np.unique(x[(y == 30 + 36 * row + 32 - 1) & (x < 0.98)])  # before the line at the end
        assert (step[0], step[-1]) == pytest.approx((begins / end, min(ends / end, 0.98)), abs=3e-3)
        assert np.diff(step).max() < 6e-3  # but where the bound crosses it
    paced = opened(planned(replace(both[0].problem, objective="throughput"), [1] * 13))
    assert paced.locator("#timeline .key.bound").count() == 0
    assert paced.locator("#verdict .row .line").count() >= 1


def test_what_moved_is_marked_in_the_timeline(opened, both):
    """In both plans: the first five ops, which take 5 ms on the fast device and 10 ms on the slow one."""
    view = opened(*both, titles=["old", "new"])
    view.get_by_label("Show the whole run").click()
    x, y = drawn_in(view, "moved")[0].T
    end = both[1].value * 1.01  # of the axis
    above, below = x[y < 100], x[y > 200]
    assert (above.max(), below.max()) == pytest.approx((0.005 / end, 0.01 / end), abs=3e-3)
    assert len(above) + len(below) == len(x)
    assert max(np.ptp(y[y < 100]), np.ptp(y[y > 200])) < 5  # one lane of each


def test_the_keyboard_reaches_everything(opened, both):
    view = opened(both[0])
    view.locator("#timeline canvas").focus()
    view.keyboard.press("ArrowRight")
    said = view.locator("#timeline [aria-live]")
    assert f"op {MARKUP}" in said.text_content()
    view.keyboard.press("ArrowRight")
    assert "op layers.0.mul" in said.text_content()
    view.keyboard.press("ArrowDown")
    assert "device slow" in said.text_content()
    view.keyboard.press("Enter")
    assert view.evaluate("document.activeElement.classList.contains('box')")


@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_in_either_light(opened, both, width):
    for scheme in ("light", "dark"):
        view = opened(*both, color_scheme=scheme)
        view.set_viewport_size({"width": width, "height": 800})
        assert view.evaluate("document.documentElement.scrollWidth") == width
        shade = "getComputedStyle(document.body).backgroundColor"
        before = view.evaluate(shade)
        view.get_by_label("Switch between dark and light").click()
        after = view.evaluate(shade)
        dark, light = "rgb(20, 21, 23)", "rgb(246, 246, 244)"
        assert (before, after) == ((light, dark) if scheme == "light" else (dark, light))


def test_modules_of_the_chain_are_few_and_lead_to_the_graph(opened):
    """Ten modules: six have a row, the others one together, and a click on a name unfolds it."""
    build = GraphBuilder("net")
    tensor = ()
    for i in range(10):
        tensor = build.op(f"op{i}", kind="k", inputs=tensor, outputs=[0.0], op_modules=f"part{'abcdefghij'[i]}.inner")
    view = opened(planned(odd(build), [0] * 10))
    card = view.locator("#verdict .card.why")
    names = card.locator(".row .name").all_inner_texts()
    assert (len(names), names[-1]) == (7, "4 others")
    assert card.locator(".row .number").last.inner_text() == "4.00 ms · 40.0%"
    view.get_by_label("Fold everything").click()
    card.get_by_role("button", name=f"Show {names[2]} in the graph").click()
    assert view.locator(".box.now").get_attribute("title") == f"op{'abcdefghij'.index(names[2][4])}"


def test_pipelines_show_loads(opened):
    problem = load_problem("alexnet", "two-gpus-one-host", objective="throughput")
    found = plan(problem, "blocks-by-load", budget=Budget(evaluations=100))
    view = opened(found)
    loads = view.locator("#verdict .row.pace .number").all_inner_texts()
    assert loads
    assert loads[0].split(" ·")[0] in view.locator("#verdict .card").first.inner_text()
    assert view.locator("#verdict .row .line").count() >= 1
    spent = view.locator("#verdict .card.why").nth(1)
    assert "spends it on" in spent.inner_text()
    name = spent.locator("button.link").first
    module = name.inner_text()
    name.click()
    assert view.locator(".box.now").get_attribute("title").startswith(module.replace("*", ""))


def test_busy_shares_of_a_pipeline_are_of_the_time_per_sample(opened):
    """5 ms on one device, 16 ms on the next, 4.01 ms between them: the slow one never rests, as the terminal says."""
    found = planned(replace(layers(), objective="throughput"), [0] * 5 + [1] * 8)
    rows = opened(found).locator("#devices tbody tr").all_inner_texts()
    shares = {row.split()[0]: next(cell for cell in row.split() if cell.endswith("%")) for row in rows}
    assert shares == {"fast": "31.3%", "slow": "100%", "idle": "0%", "fast→slow": "25.1%"}
    told = [line for line in device_table(found.timeline).splitlines() if "ms" in line]
    assert [line.split("|")[4].strip() for line in told] == [shares["fast"], shares["slow"]]


def test_the_end_of_each_model_is_marked(opened):
    """Two models on one device: the sum of their ends counts, and is 2 + 3 seconds, since the longer op goes first."""
    graph = Graph.create(op_names=["x", "y"], models=["first", "second"], model=[0, 1])
    problem = Problem(graph, full_mesh([Device("a")]), Costs.create([[1.0], [2.0]]), objective="completion")
    found = planned(problem, [0, 0])
    assert unpacked(to_page([found]))["plans"][0]["ends"] == [["first", 3.0], ["second", 2.0]]
    assert list(explain(found.timeline).by_module) == ["second.op", "first.op"]  # which the first waits for
    view = opened(found)
    shown = view.locator("#verdict").inner_text()
    assert "the sum of completion times" in shown
    assert "on average, no plan ends before 1.25 s" in shown  # half of the bound, which is half of the value
    assert view.locator("#verdict .row.pace .number").inner_text() == "2.50 s"
    assert view.locator("#memory canvas").is_hidden()  # nothing has a size


def test_idle_devices_of_many_have_no_lane(opened):
    build = GraphBuilder("small")
    build.op("x", kind="k")
    devices = [Device(f"d{i}") for i in range(8)]
    problem = Problem(build.graph(), full_mesh(devices, 1e9), Costs.create(np.full((1, 8), 1e-3), "modelled"))
    view = opened(planned(problem, [3]))
    drawn = listened(view)
    view.get_by_label("Show the whole run").click()
    assert {"d3", "7 idle devices"} <= set(drawn())
    assert view.locator("#timeline canvas").bounding_box()["height"] < 150


def test_it_prints(opened, both):
    view = opened(both[0], color_scheme="dark")
    pdf = view.pdf()
    assert pdf.startswith(b"%PDF")
    width, height = re.search(rb"/MediaBox \[0 0 (\d+)[.\d]* (\d+)", view.pdf(prefer_css_page_size=True)).groups()
    assert int(width) > int(height)  # the time axis is long
    build = GraphBuilder("wide")
    for i in range(30):
        build.op(f"x{i}", kind="k", outputs=[1e6])
    devices = [Device(f"d{i}", memory=1e9) for i in range(30)]
    problem = Problem(build.graph(), full_mesh(devices, 1e9), Costs.create(np.full((30, 30), 1e-3), "modelled"))
    many = opened(planned(problem, np.arange(30, dtype=np.int32)))
    tall = "[...document.querySelectorAll('canvas')].map((one) => one.height / one.width)"
    before = many.evaluate(tall)
    many.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert min(before) > 0.7 > 0.66 > max(many.evaluate(tall))  # lanes are lower: all are seen on one page
    many.emulate_media(media="print")
    room = "(one) => one.parentElement.clientWidth - one.clientWidth"
    assert max(many.locator("canvas").evaluate_all(f"all => all.map({room})")) <= 20
    phone = opened(both[0])
    phone.set_viewport_size({"width": 390, "height": 800})
    places = "[...document.querySelectorAll('.box')].map((one) => one.offsetLeft)"
    for _ in range(200):  # the page's own policy forbids what `wait_for_function` does
        if len(set(phone.evaluate(places))) < 3:
            break
        phone.wait_for_timeout(25)
    before = phone.evaluate(places)
    phone.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert len(set(phone.evaluate(places))) == 4 > 2 >= len(set(before))  # across the paper, not down
    phone.evaluate("dispatchEvent(new Event('afterprint'))")
    assert phone.evaluate(places) == before
    view.set_viewport_size({"width": 1000, "height": 700})
    view.emulate_media(media="print")
    assert view.evaluate("document.documentElement.scrollWidth") <= 1000  # the graph and the tables fit on paper
    assert view.locator("nav").is_hidden()
    assert view.locator("#timeline .about").inner_text() == "What each device and channel does over time."
    assert view.locator("#timeline canvas").is_visible()
