"""Ops measured by ONNX Runtime's own profiler, within runs of the whole model as it optimises it."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from placewise.errors import Unsupported
from placewise.importers import onnx as importer
from placewise.importers import onnx_model, require
from placewise.importers.torch_export import quiet
from placewise.measure import Timing, clocked, hardware_name, pytorch, shared_out, told

_PER_MODEL = 5.0  # seconds
_RUNS = 7  # with the profiler on, of which the first two warm up


def written(model: str, folder: Path, dims: Mapping[str, int] | None = None) -> tuple[Path, str]:
    """(file, name) of an ONNX model; one of the zoo is exported, with random weights."""
    if Path(model).suffix.lower() == ".onnx":
        return _named(Path(model), folder, dims), Path(model).stem
    torch = require("torch", "torch")
    if find_spec("onnxscript") is None:
        raise Unsupported("onnxscript is not installed, and torch writes ONNX files with it: pip install onnxscript")
    module, args, _, name = pytorch.runnable(model)
    module, (args, _) = pytorch.materialised(module, (args, {}), "cpu")
    with told(f"{model}: torch cannot write it as an ONNX file"), quiet():
        torch.onnx.export(module, args, folder / "model.onnx", dynamo=True, external_data=True, verbose=False)
    return folder / "model.onnx", name


def _named(path: Path, folder: Path, dims: Mapping[str, int] | None) -> Path:
    """The file, or a copy in which every node has the name that its op has: the runtime reports times by name."""
    onnx = require("onnx", "onnx")
    importer.load(path, dims=dims)  # refuses what is damaged, before the runtime sees it
    model = onnx.load(str(path), load_external_data=False)
    names = onnx_model.node_names(model.graph)
    if [node.name for node in model.graph.node] == names:
        return path
    with told(f"{path}: its weights cannot be read"):
        onnx.load_external_data_for_model(model, str(path.parent))
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name
    onnx.save(model, str(folder / "model.onnx"), save_as_external_data=True, location="weights")
    return folder / "model.onnx"


class OnnxruntimeTarget:
    """An ONNX file on the CPU."""

    def __init__(
        self, path: str | Path, name: str, dims: Mapping[str, int] | None = None, threads: int | None = None
    ) -> None:
        runtime = require("onnxruntime", "onnx")
        self.device, self.hardware = f"onnxruntime:{threads}" if threads else "onnxruntime", hardware_name(threads)
        self._threads = threads or 0  # as many as there are cores
        self.library = f"onnxruntime {runtime.__version__}"
        self.graph = importer.load(path, name, dims=dims)
        self._runtime, self._path, self._dims = runtime, str(path), dims or {}

    def measure(self, wanted: set[str]) -> Iterator[tuple[str, Timing]]:
        """From the times of the nodes that the runtime made of the ops."""
        if wanted:
            yield from shared_out(self.graph, kernels(self._path, self._session, self._dims), wanted)

    def whole(self) -> Timing:
        """Without the profiler."""
        session = self._session(self._runtime.SessionOptions())
        inputs = random_inputs(session, self._dims)
        return clocked(lambda count: [session.run(None, inputs) for _ in range(count)], _PER_MODEL)

    def _session(self, options: Any) -> Any:
        options.log_severity_level = 4  # what fails is raised as well
        options.intra_op_num_threads = self._threads
        with told(f"{self._path}: ONNX Runtime cannot load it"):
            return self._runtime.InferenceSession(self._path, options, providers=["CPUExecutionProvider"])


def kernels(
    path: str, open_session: Callable[[Any], Any], dims: Mapping[str, int], inputs: Mapping[str, Any] | None = None
) -> list[tuple[list[str], list[float]]]:
    """Of each kernel that the runtime made of a file, the op that it is called after, and its times."""
    onnx, runtime = require("onnx", "onnx"), require("onnxruntime", "onnx")
    with tempfile.TemporaryDirectory() as folder:
        options = runtime.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "times")
        session = open_session(options)
        with told(f"{path}: ONNX Runtime cannot run it"):
            given = random_inputs(session, dims) if inputs is None else inputs
            for _ in range(_RUNS):
                session.run(None, given)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    runs: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            runs.setdefault(event["name"].removesuffix("_kernel_time"), []).append(event["dur"] * 1e-6)
    nodes = onnx.load(path, load_external_data=False).graph.node
    made_by = {output: node.name for node in nodes for output in node.output}
    return [([_source(node, made_by)], times[2:] or times) for node, times in runs.items()]


def _source(node: str, made_by: Mapping[str, str]) -> str:
    """The op that a node is called after: by its name, or by that of its output where the layout was changed."""
    plain = re.sub(r"/\w+Fusion/$", "", node.removeprefix("fused "))
    return made_by.get(plain.removesuffix("_nchwc"), plain)


def random_inputs(session: Any, dims: Mapping[str, int]) -> dict[str, Any]:
    """Arrays that a session takes; the same each time."""
    import numpy as np

    kinds = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}
    rng, made = np.random.default_rng(0), {}
    for given in session.get_inputs():
        shape = [
            size if isinstance(size, int) else dims.get(size) or dims[f"{given.name}.{axis}"]
            for axis, size in enumerate(given.shape)
        ]
        if given.type in kinds:
            made[given.name] = rng.random(shape).astype(kinds[given.type])
        else:
            whole = {"tensor(bool)": np.bool_, "tensor(int32)": np.int32}.get(given.type, np.int64)
            made[given.name] = np.ones(shape, whole)
    return made
