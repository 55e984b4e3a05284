"""Ops measured by OpenVINO's own counters, within runs of the whole model as it fuses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from placewise.errors import InvalidInput
from placewise.importers import naming, onnx, require
from placewise.importers import openvino as importer
from placewise.measure import Timing, clocked, hardware_name, pytorch, shared_out, told

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


class OpenvinoTarget:
    """An IR file on one of OpenVINO's devices. Arithmetic is that of the file: no silent 16 bits."""

    def __init__(self, path: str | Path, name: str, device: str, dims: Mapping[str, int] | None = None) -> None:
        openvino = require("openvino", "openvino")
        self._core, self._type = openvino.Core(), openvino.Type
        if device not in self._core.available_devices:
            raise InvalidInput(f"openvino:{device}: there is {', '.join(self._core.available_devices)} here")
        self.device, self._openvino_device = f"openvino:{device}", device
        self.hardware = hardware_name() if device == "CPU" else self._core.get_property(device, "FULL_DEVICE_NAME")
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
        inputs = self._random_inputs(compiled)
        times: dict[str, list[float]] = {}
        for _ in range(_RUNS):
            request.infer(inputs)
            for kernel in request.profiling_info:
                times.setdefault(kernel.node_name, []).append(kernel.real_time.total_seconds())
        kernels = []
        for kernel in compiled.get_runtime_model().get_ordered_ops():
            name = kernel.get_friendly_name()
            if name in times:
                about = kernel.get_rt_info()
                sources = about["originalLayersNames"].value if "originalLayersNames" in about else ""
                kernels.append(([source for source in sources.split(",") if source] or [name], times[name][2:]))
        yield from shared_out(self.graph, kernels, wanted)

    def whole(self) -> Timing:
        """Without counters."""
        compiled = self._compiled(counters=False)
        request, inputs = compiled.create_infer_request(), self._random_inputs(compiled)
        return clocked(lambda count: [request.infer(inputs) for _ in range(count)][:0], _PER_MODEL)

    def _compiled(self, *, counters: bool) -> Any:
        settings = {"PERF_COUNT": counters, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        with told(f"{self.graph.name}: OpenVINO cannot compile it for {self._openvino_device}"):
            return self._core.compile_model(self._model, self._openvino_device, settings)

    def _random_inputs(self, compiled: Any) -> list[Any]:
        import numpy as np

        rng = np.random.default_rng(0)
        return [
            rng.random(given.shape).astype(given.element_type.to_dtype())
            if given.element_type.is_real()
            else np.ones(given.shape, given.element_type.to_dtype())
            for given in compiled.inputs
        ]
