"""The same model by every route: total FLOPs within 2 %, elements of weights exactly."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from harness import main, progress
from placewise import Graph, zoo
from placewise.importers import onnx, openvino, torch_export


def by_onnx(program: Any) -> Graph:
    """Unoptimised: an exporter that folds batch norms or constants writes another model."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        torch.onnx.export(program, (), path, dynamo=True, optimize=False, verbose=False, external_data=True)
        return onnx.load(path)


def by_openvino(program: Any) -> Graph:
    """`ov.convert_model` without its optimisations, which fold batch norms into convolutions."""
    import openvino as ov
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    frontend = FrontEndManager().load_by_framework("pytorch")
    decoder = TorchFXPythonDecoder.from_exported_program(program)  # must outlive the conversion
    model = frontend.convert(frontend.load(decoder))
    inputs = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    nodes = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    shapes = {value: list(nodes[name].shape) for value, name in zip(model.inputs, inputs, strict=True)}
    model.reshape(shapes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.xml")
        ov.save_model(model, path, compress_to_fp16=False)
        return openvino.load(path)


def weights(graph: Graph) -> int:
    """Elements of float tensors that are stored."""
    total = 0
    for kind, signature in zip(graph.op_kinds, graph.op_signatures, strict=True):
        if kind == "parameter" and "float" in signature:
            sizes = signature.partition("[")[2].rstrip("]")
            total += int(np.prod([int(size) for size in sizes.split(",") if size], dtype=object))
    return total


ROUTES: dict[str, Callable[[Any], Graph]] = {
    "torch": lambda program: torch_export.read(program, "model").graph,
    "onnx": by_onnx,
    "openvino": by_openvino,
}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    rows = []
    for name in options.models.split(",") if options.models else _all():
        progress(name)
        module, args = zoo.module(name, device="cpu")
        program = torch_export.export(module, args)
        row: dict[str, Any] = {"model": name}
        counted = {}
        for route, read in ROUTES.items():
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    graph = read(program)
            except Exception as error:
                progress(f"  {route}: {error!s:.300}")
                row[f"{route} GFLOP"] = "-"
                continue
            row[f"{route} GFLOP"] = graph.flops.sum() / 1e9
            counted[route] = weights(graph)
            gc.collect()
        reference = row["torch GFLOP"]
        found = [row[f"{route} GFLOP"] for route in counted]
        row["widest %"] = max(abs(flops / reference - 1) for flops in found) * 100
        row["weights"] = counted["torch"]
        row["equal"] = "yes" if len(set(counted.values())) == 1 else str(counted)
        rows.append(row)
    return rows


def _all() -> list[str]:
    """Those for inference whose weights fit on a small machine: the exporters want them."""
    names = [name for name, model in zoo.MODELS.items() if model.task == "inference"]
    return [name for name in names if zoo.facts(name)["parameters"] < 1e9]


if __name__ == "__main__":
    main("FLOPs and weights by import route", measure, models={"default": "", "help": "names, separated by commas"})
