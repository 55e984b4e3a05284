"""ONNX Runtime: nodes to execution providers, by name, within one session."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placewise.engines import Run, check_devices, engine
from placewise.engines.names import check_ops
from placewise.engines.ranks import accelerator_number, cuda_number
from placewise.errors import InvalidInput, Unsupported
from placewise.importers.onnx_model import MADE_UP
from placewise.plans import Plan
from placewise.problem import Problem

if TYPE_CHECKING:
    from placewise.measure import Timing

_DESIGNATOR: Final = {"cpu": "cpu", "npu": "npu"}
_RESERVED: Final = frozenset("(),;=")
_RULES: Final = "session.name_based_layer_assignment"
_RULES_SINCE: Final = (1, 28)  # the libraries of 1.27.0 and before do not hold the name of the option, 1.28.0 does
ADVICE: Final = "; for ONNX Runtime, plan the .onnx file itself"
_RECORD: Final = "session.record_ep_graph_assignment_info"


def one_gpu(problem: Problem) -> Problem:
    """A session runs its nodes one after the other, on the CPU and at most one other device."""
    usable = [device for device in problem.cluster.devices if device.name not in problem.forbidden]
    for what, of_kind in (("CPU", ("cpu",)), ("accelerator", ("gpu", "npu"))):
        names = [device.name for device in usable if device.kind in of_kind]
        if len(names) > 1:
            raise Unsupported(
                f"a session of ONNX Runtime has one {what}, and there are {', '.join(names)}: "
                f"forbid all but one, as with --forbid {names[-1]}, or plan for onnxruntime-split"
            )
    return replace(problem, execution=replace(problem.execution, concurrency="sequential"))


@contextmanager
def run(plan: Plan, model: str, devices: Mapping[str, str]) -> Iterator[Session]:
    """An .onnx file, or a model of the zoo, in one session."""
    from placewise.importers import onnx as importer

    with readable(plan, model, devices) as path:
        plan.check_model(importer.load(path, plan.problem.graph.name), ADVICE)
        yield Session(plan, path, devices)


def write(plan: Plan, model: str, folder: Path) -> None:
    """The model with a name for each node, and the session options with rules for these, in options.json."""
    from placewise.files import write_text
    from placewise.importers import onnx as importer
    from placewise.importers import onnx_model, require

    onnx = require("onnx", "onnx")
    with readable(plan, model, {}) as path:
        plan.check_model(importer.load(path, plan.problem.graph.name), ADVICE)
        options, copied = _options(plan), onnx_model.whole(path)[0]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.weights").unlink(missing_ok=True)  # it would be written to, not anew
        onnx.save_model(copied, str(folder / "model.onnx"), save_as_external_data=True, location="model.weights")
        write_text(folder / "options.json", options)


@engine("onnxruntime", fit=one_gpu, versions="onnxruntime>=1.28", run=run, write=write)
def onnxruntime(plan: Plan) -> str:
    """JSON of session options with session.name_based_layer_assignment.

    Rules match parts of node names and the longest wins, so whole names are safe. Versions before ignore the option
    without a word: set session.record_ep_graph_assignment_info and read back where nodes are.
    """
    if unnamed := next((name for name in plan.problem.graph.op_names if name.startswith(MADE_UP)), ""):
        raise InvalidInput(
            f"rules are for names, and the file has none for the node of {unnamed!r:.60}: with --model and --out, a "
            "copy of it that has names is written beside the rules"
        )
    return _options(plan)


def _options(plan: Plan) -> str:
    check_ops(plan, "onnxruntime")
    graph, cluster = plan.problem.graph, plan.problem.cluster
    used = [cluster.devices[d] for d in sorted(set(plan.placement.tolist()))]
    for what, count in (
        ("CPUs", sum(device.kind == "cpu" for device in used)),
        ("accelerators", sum(device.kind != "cpu" for device in used)),
    ):
        if count > 1:
            raise InvalidInput(f"the plan uses two {what}, and a session has one: plan with `--engine onnxruntime`, or "
                               "for onnxruntime-split")  # fmt: skip
    rules = []
    for device in np.unique(plan.placement).tolist():
        ops = np.flatnonzero((plan.placement == device) & ~graph.is_stored).tolist()
        names = [graph.op_names[op] for op in ops if graph.op_kinds[op] != "input"]
        for name in names:
            if _RESERVED & set(name):
                raise InvalidInput(f"the name of node {name!r:.60} has a sign that the rules use; rename it")
        if names:
            rules.append(f"{_DESIGNATOR.get(cluster.devices[device].kind, 'gpu')}({', '.join(names)})")
    return json.dumps({_RULES: "; ".join(rules), _RECORD: "1"}, indent=1) + "\n"


# ---- runs ------------------------------------------------------------------------------------------------------------


class Provider(NamedTuple):
    """A device of the cluster in ONNX Runtime."""

    name: str  # of the execution provider
    options: dict[str, Any]
    threads: int = 0  # of a CPU; 0: as many as there are cores


@contextmanager
def readable(plan: Plan, model: str, devices: Mapping[str, str]) -> Iterator[Path]:
    """The ONNX file of a model, in which every node has a name."""
    from placewise.measure import check_readable
    from placewise.measure.onnxruntime import written

    check_readable(model, "onnxruntime")
    check_devices(plan, devices)
    with TemporaryDirectory() as folder:
        yield written(model, Path(folder))[0]


def provider(plan: Plan, device: int, given: Mapping[str, str]) -> Provider:
    """What a device is to ONNX Runtime: `given` may say cpu, cpu:2 (two threads) or cuda:0."""
    from placewise.importers import require
    from placewise.measure import thread_count

    cluster = plan.problem.cluster
    name, kind = cluster.device_names[device], cluster.devices[device].kind
    text = given.get(name, "cpu" if kind == "cpu" else f"cuda:{accelerator_number(cluster, device)}")
    base, _, threads = text.partition(":")
    if base == "cpu":
        return Provider("CPUExecutionProvider", {}, thread_count(threads, f"{name}={text}") if threads else 0)
    number = cuda_number(text)
    if number is None:
        raise InvalidInput(f"{name}={text:.60}: must be cpu, cpu:2 (two threads) or cuda:0")
    here = require("onnxruntime", "onnx").get_available_providers()
    if "CUDAExecutionProvider" not in here:
        raise InvalidInput(
            f"the plan uses {name} as {text}, and this ONNX Runtime has {', '.join(here)}; say what it is, as in "
            f"{name}=cpu:1"
        )
    return Provider("CUDAExecutionProvider", {"device_id": number})


def open_session(path: str | Path, where: Provider, options: Any = None) -> Any:
    """A session on a device; what that cannot run falls to the CPU, and is told by `assigned`."""
    from placewise.importers import require
    from placewise.measure import told

    runtime = require("onnxruntime", "onnx")
    options = options or runtime.SessionOptions()
    options.log_severity_level = 4  # what fails is raised as well
    options.intra_op_num_threads = where.threads
    options.add_session_config_entry(_RECORD, "1")
    providers = list(dict.fromkeys([where.name, "CPUExecutionProvider"]))
    with told(f"{path}: ONNX Runtime cannot load it"):
        found = runtime.InferenceSession(
            str(path), options, providers=[(name, where.options if name == where.name else {}) for name in providers]
        )
    if where.name not in found.get_providers():  # it goes on without a provider that cannot start
        raise InvalidInput(f"{path}: {where.name} did not start here (its library or its device is missing)")
    return found


def assigned(session: Any) -> dict[str, str]:
    """Node to execution provider, as the session tells it; nothing where the version cannot."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return {}
    return {
        node.name: part.ep_name for part in session.get_provider_graph_assignment_info() for node in part.get_nodes()
    }


class Session(Run):
    """A model in one session that is told the plan, and in one that is told nothing.

    It has one clock, which does not tell devices apart, and links are within it.
    """

    def __init__(self, plan: Plan, path: Path, devices: Mapping[str, str]) -> None:
        from placewise.importers import require

        self._runtime = require("onnxruntime", "onnx")
        self.library = f"onnxruntime {self._runtime.__version__}"
        self._plan, self._path = plan, path
        used = sorted(set(plan.placement.tolist()))
        self._where = {plan.problem.cluster.device_names[d]: provider(plan, d, devices) for d in used}
        if sum(where.name == "CPUExecutionProvider" for where in self._where.values()) > 1:
            raise InvalidInput("a session has one CPU, and the plan uses several: plan for onnxruntime-split")
        if len(used) > 1 and tuple(map(int, self._runtime.__version__.split(".")[:2])) < _RULES_SINCE:
            raise Unsupported(f"{self.library} takes no rules for nodes: it must be 1.28 or later")

    def plain(self) -> list[NDArray[Any]]:
        """Without rules."""
        return self._outputs(self._plain)

    def placed(self) -> list[NDArray[Any]]:
        """With them."""
        return self._outputs(self._placed)

    def ran_on(self) -> dict[str, str]:
        """As the session tells it: rules are not trusted. Nodes that were fused have lost their names."""
        known = set(self._plan.problem.graph.op_names)
        device = {where.name: name for name, where in self._where.items()}
        return {node: device.get(ep, ep) for node, ep in assigned(self._placed).items() if node in known}

    def times(self) -> Iterator[tuple[str, str, Timing]]:
        """By the profiler, of a plan with one device: it does not tell devices apart."""
        from placewise.measure import shared_out
        from placewise.measure.onnxruntime import kernels

        ((name, where), *others), graph = self._where.items(), self._plan.problem.graph
        if not others:
            found = kernels(str(self._path), partial(open_session, self._path, where), {})
            for signature, timing in shared_out(graph, found, set(graph.op_signatures) - {""}):
                yield name, signature, timing

    @cached_property
    def _accelerator(self) -> Provider:
        return min(self._where.values(), key=lambda where: where.name == "CPUExecutionProvider")

    @cached_property
    def _plain(self) -> Any:
        return open_session(self._path, self._accelerator)

    @cached_property
    def _placed(self) -> Any:
        options = self._runtime.SessionOptions()
        for key, value in json.loads(_options(self._plan)).items() if len(self._where) > 1 else ():
            options.add_session_config_entry(key, value)
        return open_session(self._path, self._accelerator, options)

    def _outputs(self, session: Any) -> list[NDArray[Any]]:
        from placewise.measure import told
        from placewise.measure.onnxruntime import random_inputs

        with told(f"{self._path}: ONNX Runtime cannot run it"):
            return list(session.run(None, random_inputs(session, {})))
