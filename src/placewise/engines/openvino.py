"""OpenVINO's HETERO plugin: a device for every op, by its friendly name."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from placewise.engines import Run, along, check_devices, engine
from placewise.engines.names import check_ops
from placewise.errors import InvalidInput, naming
from placewise.plans import Plan
from placewise.problem import Problem
from placewise.terminal import note
from placewise.transforms import subgraph

if TYPE_CHECKING:
    from placewise.measure import Timing

#: What OpenVINO calls accelerators, and what a CPU may be called that is its plugin once more.
_THEIR_NAMES: Final = re.compile(r"(GPU|NPU)(\.\w+)*", re.ASCII)
_ONE_MORE: Final = re.compile(r"CPU\w*", re.ASCII)
_WARM_UP: Final = 2
_RUNS: Final = 5  # with counters, after those that warm up


def one_after_another(problem: Problem) -> Problem:
    """HETERO runs its subgraphs one after the other, so devices never overlap in one inference."""
    return replace(problem, execution=replace(problem.execution, concurrency="sequential"))


@contextmanager
def run(plan: Plan, model: str, devices: Mapping[str, str]) -> Iterator[Hetero]:
    """A .xml or .onnx file, or a model of the zoo, compiled for HETERO.

    `devices` may name a device twice, and CPUs with a number of threads: {"big": "CPU:2", "little": "CPU:1"} are two
    logical devices on one CPU.
    """
    from placewise.importers import openvino as importer
    from placewise.measure import check_readable
    from placewise.measure.openvino import written

    check_readable(model, "openvino")
    check_devices(plan, devices)
    with TemporaryDirectory() as folder:
        path, name = written(model, Path(folder))
        graph = importer.load(path, name)
        plan.check_model(graph, "; for OpenVINO, plan the .xml file itself")
        with naming(path):
            read = importer.read_model(path)
        yield Hetero(plan, read, devices)


@engine("openvino", fit=one_after_another, versions="openvino>=2025.0", run=run)
def openvino(plan: Plan) -> str:
    """JSON of friendly names to OpenVINO's devices; affinities are lost when a model is saved, so keep this file.

    `set_affinities` puts them on a model. Names are the ops of the graph: import the model from its .xml file.
    """
    check_ops(plan, "openvino")
    names = device_names(plan)
    if len(set(names.values())) < len(names):
        raise InvalidInput(
            f"OpenVINO would take two devices for one: {', '.join(names.values())}; name them as it does"
        )
    places = {op: names[d] for op, d in zip(plan.problem.graph.op_names, plan.placement.tolist(), strict=True)}
    told: dict[str, Any] = {"device": hetero(places.values())}
    if more := [name for name in names.values() if name.startswith("CPU") and name != "CPU"]:
        told["register"] = more
        note(f"OpenVINO has one CPU. For {', '.join(more)}: core.register_plugin(core.get_versions('CPU')['CPU']"
             f".description, {more[0]!r})")  # fmt: skip
    return json.dumps(told | {"affinity": places}, indent=1) + "\n"


def hetero(devices: Any) -> str:
    """What to compile a model for; the CPU takes what is left."""
    return f"HETERO:{','.join(sorted(set(devices), key=lambda name: (name.startswith('CPU'), name)))}"


def device_names(plan: Plan) -> dict[int, str]:
    """What OpenVINO calls each device that a plan uses: its name if it is one of OpenVINO's, else by kind and number.

    CPUs after the first are its plugin once more, under another name: their own, if that begins with CPU.
    """
    cluster = plan.problem.cluster
    used = sorted(set(plan.placement.tolist()))
    own = {d: cluster.device_names[d].upper() for d in used}
    cpus = sorted((d for d in used if cluster.devices[d].kind == "cpu"), key=lambda d: own[d] != "CPU")
    gpus = [d for d, device in enumerate(cluster.devices) if device.kind == "gpu"]
    found = {}
    for d in used:
        if d in cpus:
            found[d] = "CPU" if d == cpus[0] else own[d] if _ONE_MORE.fullmatch(own[d]) else f"CPU{cpus.index(d) + 1}"
        elif _THEIR_NAMES.fullmatch(own[d]):
            found[d] = own[d]
        elif d in gpus:
            found[d] = f"GPU.{gpus.index(d)}" if len(gpus) > 1 else "GPU"
        else:
            found[d] = "NPU"
    return found


def set_affinities(model: Any, places: Mapping[str, str]) -> None:
    """Give every op of an `openvino.Model` a device: HETERO refuses a model in which some have one and others none.

    Ops that `places` does not name (reshapes, say) go with what they read. Constants and inputs go with who reads them,
    whatever `places` says: an input elsewhere would be a subgraph of its own that only hands it on.
    """
    ordered = model.get_ordered_ops()
    names = [op.get_friendly_name() for op in ordered]
    number = {name: i for i, name in enumerate(names)}
    makers = [[value.get_source_output().get_node() for value in op.inputs()] for op in ordered]
    reads = [[number[maker.get_friendly_name()] for maker in each] for each in makers]
    known = {i: places[name] for i, name in enumerate(names) if reads[i] and name in places}
    for op, place in zip(ordered, along(reads, known), strict=True):
        op.get_rt_info()["affinity"] = place


# ---- runs ------------------------------------------------------------------------------------------------------------


class Logical(NamedTuple):
    """A device of the cluster in OpenVINO."""

    plugin: str  # what HETERO knows it by
    properties: dict[str, Any]


class Ready(NamedTuple):
    """A compiled model, and what to run it with."""

    compiled: Any
    request: Any
    inputs: list[Any]


class Hetero(Run):
    """A model compiled for HETERO as a plan says, and for the plan's best device alone."""

    def __init__(self, plan: Plan, model: Any, devices: Mapping[str, str]) -> None:
        from placewise.importers import require

        self._openvino = require("openvino", "openvino")
        self.library = f"openvino {self._openvino.__version__.split('-')[0]}"
        self._core, self._plan, self._model = self._openvino.Core(), plan, model
        self._logical = _logical_devices(self._core, plan, devices)
        self._named = {logical.plugin: plan.problem.cluster.device_names[d] for d, logical in self._logical.items()}

    @property
    def given(self) -> str:
        """What it was run with, and in how many pieces."""
        count = len(self.subgraphs())
        return f"random inputs, in {count} subgraph{'s' * (count > 1)}"

    def plain(self) -> list[NDArray[Any]]:
        """On the device that the plan's costs say is the fastest for the whole, among those that it uses."""
        return self._outputs(self._plain)

    def placed(self) -> list[NDArray[Any]]:
        """By HETERO."""
        return self._outputs(self._placed)

    def subgraphs(self) -> list[str]:
        """The cluster's device of each subgraph that HETERO made, as it says in what it would write to a file."""
        header = _Header()
        self._placed.compiled.export_model(header)
        told = ElementTree.fromstring(header.getvalue().partition(b"\n")[0])
        return [self._named[part.attrib["device"]] for part in told.iter("compiled_submodel")]

    def ran_on(self) -> dict[str, str]:
        """From the kernels of each subgraph, and the ops that these were made of. Inputs run nowhere."""
        graph = self._plan.problem.graph
        known = {name for name, kind in zip(graph.op_names, graph.op_kinds, strict=True) if kind != "input"}
        sources = [(op, device) for device, kernels in self._kernels.items() for names, _ in kernels for op in names]
        return {op: device for op, device in sources if op in known}

    def busy(self) -> dict[str, float]:
        """By the counters of the kernels."""
        return {
            device: float(sum(np.median(times) for _, times in kernels)) for device, kernels in self._kernels.items()
        }

    def links(self) -> dict[tuple[str, str], bool]:
        """Numbers that go from one device to the other, negated on both."""
        graph, place = self._plan.problem.graph, self._plan.placement
        ends = np.stack([place[graph.edge_producer], place[graph.consumers]])
        pairs = np.unique(ends[:, ends[0] != ends[1]], axis=1).T.tolist()
        names = self._plan.problem.cluster.device_names
        return {(names[a], names[b]): self._arrives(self._logical[a], self._logical[b]) for a, b in pairs}

    def times(self) -> Iterator[tuple[str, str, Timing]]:
        """By the counters of the kernels, shared out among the ops that each was made of."""
        from placewise.measure import shared_out

        for d in self._logical:
            name = self._plan.problem.cluster.device_names[d]
            here = subgraph(self._plan.problem.graph, self._plan.placement == d)
            for signature, timing in shared_out(here, self._kernels[name], set(here.op_signatures) - {""}):
                yield name, signature, timing

    @cached_property
    def _placed(self) -> Ready:
        return self._hetero(counters=False)

    @cached_property
    def _plain(self) -> Ready:
        seconds = self._plan.problem.costs.seconds.sum(axis=0)
        logical = self._logical[min(self._logical, key=lambda d: float(seconds[d]))]
        return self._compiled(self._model, logical.plugin, logical.properties)

    def _hetero(self, *, counters: bool) -> Ready:
        places = zip(self._plan.problem.graph.op_names, self._plan.placement.tolist(), strict=True)
        model = self._model.clone()
        set_affinities(model, {op: self._logical[d].plugin for op, d in places})
        return self._compiled(model, *self._mixed([*self._logical.values()], counters))

    @staticmethod
    def _mixed(parts: list[Logical], counters: bool) -> tuple[str, dict[str, Any]]:
        each = {logical.plugin: logical.properties | {"PERF_COUNT": counters} for logical in parts}
        return hetero(each), {"DEVICE_PROPERTIES": each, "PERF_COUNT": counters}

    def _compiled(self, model: Any, device: str, properties: dict[str, Any]) -> Ready:
        from placewise.measure import told
        from placewise.measure.openvino import random_inputs

        with told(f"{self._plan.problem.graph.name}: OpenVINO cannot compile it for {device}"):
            compiled = self._core.compile_model(model, device, properties)
            return Ready(compiled, compiled.create_infer_request(), random_inputs(compiled))

    def _outputs(self, ready: Ready) -> list[NDArray[Any]]:
        from placewise.measure import told

        with told(f"{self._plan.problem.graph.name}: OpenVINO cannot run it"):
            found = ready.request.infer(ready.inputs, share_inputs=True)
            return [np.array(found[output]) for output in ready.compiled.outputs]

    @cached_property
    def _kernels(self) -> dict[str, list[tuple[list[str], list[float]]]]:
        """By device of the cluster: the names of the ops that each kernel was made of, and its times.

        What was fused into another kernel is listed with no time.
        """
        from placewise.measure.openvino import sources

        compiled, request, inputs = self._hetero(counters=True)
        try:
            made_of = sources(compiled)
        except RuntimeError:  # HETERO cannot put the graphs of some splits together; kernels still have names
            made_of = {}
        times: dict[str, list[float]] = {}
        for turn in range(_WARM_UP + _RUNS):
            request.infer(inputs, share_inputs=True)
            for kernel in request.profiling_info if turn >= _WARM_UP else []:
                times.setdefault(kernel.node_name, []).append(kernel.real_time.total_seconds())
        device = self.subgraphs()
        found: dict[str, list[tuple[list[str], list[float]]]] = {name: [] for name in self._named.values()}
        for label, taken in times.items():  # "subgraph3: conv1"
            part, _, name = label.removeprefix("subgraph").partition(": ")
            found[device[int(part)]].append((made_of.get(name, [name]), taken))
        return found

    def _arrives(self, source: Logical, target: Logical) -> bool:
        from placewise.importers import require

        ops = require("openvino.opset13", "openvino")
        sent = np.random.default_rng(0).random(2**16, np.float32)
        given = ops.parameter([sent.size], np.float32)
        first = ops.negative(given, name="first")
        model = self._openvino.Model([ops.negative(first, name="second")], [given], "link")
        set_affinities(model, {"first": source.plugin, "second": target.plugin})
        ready = self._compiled(model, *self._mixed([source, target], counters=False))
        return bool(np.array_equal(next(iter(ready.request.infer([sent]).values())), sent))


class _Header(io.BytesIO):
    """Keeps the first line of what is written to it: weights come after."""

    def write(self, data: Any) -> int:
        """Let go of all that follows."""
        if b"\n" not in self.getvalue():
            super().write(data)
        return len(data)


def _logical_devices(core: Any, plan: Plan, given: Mapping[str, str]) -> dict[int, Logical]:
    """What each device that the plan uses is to OpenVINO. A CPU that is taken already becomes one more plugin."""
    from placewise.measure.openvino import has_device, settings

    cluster, found = plan.problem.cluster, dict[int, Logical]()
    for d, own in device_names(plan).items():
        name = cluster.device_names[d]
        plugin, properties = settings(given.get(name, "CPU" if own.startswith("CPU") else own), counters=False)
        if not has_device(core, plugin):
            here = ", ".join(core.available_devices)
            raise InvalidInput(
                f"the plan uses {name} as {plugin}, and OpenVINO has {here} here; say what it is, as in {name}=CPU:1"
            )
        taken = [logical.plugin for logical in found.values()]
        if plugin in taken and plugin != "CPU":
            raise InvalidInput(f"the plan uses {name} as {plugin}, and so it does another device: say what each is")
        if plugin in taken:
            plugin = own if own.startswith("CPU") and own not in taken else f"CPU{len(taken) + 1}"
            core.register_plugin(core.get_versions("CPU")["CPU"].description, plugin)
        found[d] = Logical(plugin, properties)
    return found
