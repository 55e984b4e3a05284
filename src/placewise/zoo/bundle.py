"""Writes the graphs that come with the package: `python -m placewise.zoo.bundle [NAME...]`, all if none is named.

The graphs are what the importers make of the code in `models`; the index is what `placewise zoo` lists. The same
versions of torch and transformers write the same bytes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from placewise import zoo
from placewise.errors import Unsupported
from placewise.files import save_graph, write_text
from placewise.graph import Graph

if TYPE_CHECKING:
    from placewise.zoo.models.transformer import Decoding


def export(name: str) -> Graph:
    """The graph of a model, from its code."""
    from placewise.importers.torch_export import from_torch
    from placewise.importers.training import training_step
    from placewise.importers.transformers import from_transformers

    module, args = zoo.module(name)
    task, (first, *_) = zoo.MODELS[name].task, zoo.MODELS[name].inputs
    match task:
        case "training":
            graph = training_step(module, args, name=name)
            if graph.name != f"{name}-training":
                raise Unsupported(f"{name}: torch cannot trace its backward pass")
        case "decode":
            config = cast("Decoding", module).model.config
            graph = from_transformers(config, batch=first[0], prompt=first[1], decode=True)
        case _:
            graph = from_torch(module, args)
    return replace(graph, name=name, models=(name,))


def facts(name: str, graph: Graph) -> dict[str, float]:
    """What is said of a model without reading its graph."""
    weights = zoo.module(name)[0].parameters()
    return {
        "ops": int((~graph.is_stored).sum()),
        "parameters": sum(weight.numel() for weight in weights),
        "flops": float(graph.flops.sum()),
        "bytes": float(graph.resident_bytes.sum()),
    }


def main(chosen: list[str]) -> None:
    """Write the graphs of these models, and the index."""
    index = zoo.GRAPHS / "index.json"
    known = json.loads(index.read_text()) if index.exists() else {}
    for name in chosen or zoo.names():
        print(name, file=sys.stderr)
        graph = export(name)
        save_graph(graph, zoo.GRAPHS / f"{name}.json.gz")
        known[name] = facts(name, graph)
    write_text(index, json.dumps({name: known[name] for name in zoo.names() if name in known}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
