"""Ops measured by OpenVINO's own counters, within runs of the whole model as it fuses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from placewise.errors import InvalidInput, naming
from placewise.importers import onnx, require
from placewise.importers import openvino as importer
from placewise.measure import Timing, clocked, hardware_name, pytorch, shared_out, thread_count, told

_PER_MODEL = 5.0  # seconds
_RUNS = 7  # with counters on, of which the first two warm up


def written(model: str, folder: Path, dims: Mapping[str, int] | None = None) -> tuple[Path, str]:
    """(file, name) of a model that OpenVINO reads; one of the zoo is converted, with random weights."""
    suffix = Path(model).suffix.lower()
    if suffix == ".xml":
        return Path(model), Path(model).stem
    openvino = require("openvino", "openvino")
    given: dict[str, Any] = {"input_model": model}
    name = Path(model).stem
    if suffix == ".onnx":
        onnx.load(model, dims=dims)  # refuses what is damaged, before OpenVINO sees it
    else:
        module, args, _, name = pytorch.runnable(model)
        module, (args, _) = pytorch.materialised(module, (args, {}), "cpu")
        given = {"input_model": module, "example_input": args, "input": [list(arg.shape) for arg in args]}
    with told(f"{model}: OpenVINO cannot convert it"):
        openvino.save_model(openvino.convert_model(**given), folder / "model.xml", compress_to_fp16=False)
    return folder / "model.xml", name


def settings(device: str, *, counters: bool) -> tuple[str, dict[str, Any]]:
    """(device, properties) of a device that may be written with a number of threads, as in CPU:2.

    Arithmetic is that of the model: no silent 16 bits.
    """
    base, colon, threads = device.partition(":")
    found = {"PERF_COUNT": counters, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    if colon and base != "CPU":
        raise InvalidInput(f"openvino:{device}: only a CPU has a number of threads")
    return base, found | ({"INFERENCE_NUM_THREADS": thread_count(threads, f"openvino:{device}")} if colon else {})


def has_device(core: Any, device: str) -> bool:
    """Whether OpenVINO finds this device; where there are several GPUs, GPU is the first."""
    return bool({device, f"{device}.0"} & set(core.available_devices))


class OpenvinoTarget:
    """An IR file on one of OpenVINO's devices."""

    def __init__(self, path: str | Path, name: str, device: str, dims: Mapping[str, int] | None = None) -> None:
        openvino = require("openvino", "openvino")
        self._core, self._type = openvino.Core(), openvino.Type
        self.device = f"openvino:{device}"
        self._openvino_device, properties = settings(device, counters=False)
        if not has_device(self._core, self._openvino_device):
            raise InvalidInput(f"openvino:{device}: there is {', '.join(self._core.available_devices)} here")
        self._properties = properties
        on_cpu, title = self._openvino_device == "CPU", "FULL_DEVICE_NAME"
        threads = properties.get("INFERENCE_NUM_THREADS")
        self.hardware = hardware_name(threads) if on_cpu else self._core.get_property(self._openvino_device, title)
        self.library = f"openvino {openvino.__version__.split('-')[0]}"
        self.graph = importer.load(path, name, dims=dims)
        with naming(path):
            self._model = importer.read_model(path, dims)

    def measure(self, wanted: set[str]) -> Iterator[tuple[str, Timing]]:
        """From the times of the kernels that the plugin made of the ops."""
        if not wanted:
            return
        compiled = self._compiled(counters=True)
        request = compiled.create_infer_request()
        inputs = random_inputs(compiled)
        times: dict[str, list[float]] = {}
        for _ in range(_RUNS):
            request.infer(inputs)
            for kernel in request.profiling_info:
                times.setdefault(kernel.node_name, []).append(kernel.real_time.total_seconds())
        made_of = sources(compiled)
        kernels = [(made_of[name], taken[2:]) for name, taken in times.items() if name in made_of]
        yield from shared_out(self.graph, kernels, wanted)

    def whole(self) -> Timing:
        """Without counters."""
        compiled = self._compiled(counters=False)
        request, inputs = compiled.create_infer_request(), random_inputs(compiled)
        return clocked(lambda count: [request.infer(inputs) for _ in range(count)][:0], _PER_MODEL)

    def _compiled(self, *, counters: bool) -> Any:
        with told(f"{self.graph.name}: OpenVINO cannot compile it for {self._openvino_device}"):
            return self._core.compile_model(
                self._model, self._openvino_device, self._properties | {"PERF_COUNT": counters}
            )


def sources(compiled: Any) -> dict[str, list[str]]:
    """Of each kernel of a compiled model, the ops that it was made of."""
    found = {}
    for kernel in compiled.get_runtime_model().get_ordered_ops():
        name, about = kernel.get_friendly_name(), kernel.get_rt_info()
        names = about["originalLayersNames"].value.split(",") if "originalLayersNames" in about else []
        found[name] = [source for source in names if source] or [name]
    return found


def random_inputs(compiled: Any) -> list[Any]:
    """Arrays that a compiled model takes; the same each time."""
    import numpy as np

    rng = np.random.default_rng(0)
    return [
        rng.random(given.shape).astype(given.element_type.to_dtype())
        if given.element_type.is_real()
        else np.ones(given.shape, given.element_type.to_dtype())
        for given in compiled.inputs
    ]
