"""Hugging Face accelerate and transformers: a device for each module."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from placewise.costs import Costs
from placewise.engines import Run, check_devices, engine
from placewise.engines.pieces import Pieces, device_of_pieces, pieces, tied, together
from placewise.engines.ranks import accelerator_number, cuda_number
from placewise.engines.torch import Output
from placewise.engines.torch_offload import at_homes
from placewise.errors import InvalidInput, Unsupported
from placewise.plans import Plan
from placewise.problem import Problem
from placewise.terminal import note

#: What the weights of a model may take of all accelerators before some are left in host memory.
_FULL = 0.95


def whole_modules(problem: Problem) -> Problem:
    """Modules run one after the other, each where its weights are; on a CPU only if there is no accelerator.

    accelerate keeps layers whole and tied weights together. What it calls "cpu" is kept in host memory and computed on
    an accelerator, so a plan has no op on the CPU; a model whose weights do not fit is not for this export.
    """
    found = pieces(problem.graph)
    if not found.names:
        raise Unsupported(f"{problem.graph.name!r:.60} has no modules that accelerate could place")
    devices = problem.cluster.devices
    hosts = [device.kind != "gpu" for device in devices]
    if not all(hosts):
        room = sum(device.memory for device, host in zip(devices, hosts, strict=True) if not host)
        if problem.graph.resident_bytes.sum() > _FULL * room:
            raise Unsupported(
                f"the weights of {problem.graph.name!r:.60} do not fit the accelerators, and what accelerate leaves in "
                "host memory it copies for each use: plan with --engine torch-offload (whose plans this export takes "
                "too), with --engine llama.cpp, or with more accelerators"
            )
        seconds = np.where(np.array(hosts)[None, :] & ~problem.graph.is_stored[:, None], np.inf, problem.costs.seconds)
        problem = replace(problem, costs=Costs.create(seconds, problem.costs.label))
    labels = tied(problem.graph, found)
    execution = replace(problem.execution, concurrency="sequential")
    return replace(together(problem, labels), execution=execution)


@contextmanager
def run(plan: Plan, model: str, devices: Mapping[str, str]) -> Iterator[Dispatched]:
    """A model of the zoo, with small random values, dispatched.

    `devices` may say cpu or disk where there is no GPU: hooks do there what they do on one, and a module that has none
    is found out, but times mean nothing.
    """
    from placewise import zoo
    from placewise.importers import require
    from placewise.measure import told

    if find_spec("accelerate") is None:
        raise Unsupported("accelerate is not installed: pip install accelerate")
    check_devices(plan, devices)
    if model not in zoo.names():
        raise Unsupported(f"{model}: accelerate dispatches modules: only bundled models can be verified with it")
    plan.check_model(zoo.load(model))
    torch = require("torch", "torch")
    from placewise.measure.pytorch import materialised, runnable

    dispatch_model = import_module("accelerate").dispatch_model
    homes = {name: _home(plan, device, devices) for name, device in _places(plan).items()}
    main = next((home for home in homes.values() if home.startswith("cuda")), "cpu")
    module, args, kwargs, name = runnable(model)
    with told(f"{name}: accelerate cannot run it"), torch.no_grad(), TemporaryDirectory() as folder:
        torch.manual_seed(0)
        module, (args, kwargs) = materialised(module, (args, kwargs), torch.device("cpu"))
        placed = dispatch_model(copy.deepcopy(module), homes, main, offload_dir=folder, force_hooks=True)
        yield Dispatched(plan, module.to(main), placed, args, kwargs)


@engine("accelerate", fit=whole_modules, versions="accelerate>=1.0", run=run)
def accelerate(plan: Plan) -> str:
    """JSON for `device_map` of `from_pretrained`, or of `accelerate.dispatch_model`.

    A module that holds lists of layers may have weights of its own: it has an entry, too, and those of its layers,
    which are longer, count for these.
    """
    cluster = plan.problem.cluster
    places = {
        name: "cpu" if cluster.devices[device].kind == "cpu" else accelerator_number(cluster, device)
        for name, device in _places(plan).items()
    }
    return json.dumps(places, indent=1) + "\n"


def _places(plan: Plan) -> dict[str, int]:
    """The device of each module that has an entry."""
    found = pieces(plan.problem.graph)
    if not found.names:
        raise Unsupported(f"{plan.problem.graph.name!r:.60} has no modules that accelerate could place")
    at_home = at_homes(plan)
    devices = device_of_pieces(plan, found, "accelerate") if at_home is plan else _whole_layers(at_home, found)
    graph = plan.problem.graph
    holds = np.flatnonzero((found.of_op < 0) & (graph.resident_bytes > 0)).tolist()
    own = {graph.op_modules[op]: int(at_home.placement[op]) for op in reversed(holds)}
    return dict(sorted(own.items())) | dict(zip(found.names, devices, strict=True))


def _whole_layers(plan: Plan, found: Pieces) -> list[int]:
    """Where the weights of each piece are; of a layer that is split, in host memory."""
    note(
        'accelerate copies what is on "cpu" for each use and computes it on the GPU; the plan may compute it on '
        "the CPU, or stream it ahead of time, which Plan.apply does"
    )
    host = [device.kind == "cpu" for device in plan.problem.cluster.devices]
    used = [np.unique(plan.placement[found.of_op == piece]).tolist() for piece in range(len(found.names))]
    return [next((d for d in devices if host[d]), devices[0]) for devices in used]


# ---- runs ------------------------------------------------------------------------------------------------------------


def _home(plan: Plan, device: int, given: Mapping[str, str]) -> str:
    """What a device is to accelerate."""
    import torch

    cluster = plan.problem.cluster
    name, host = cluster.device_names[device], cluster.devices[device].kind == "cpu"
    home = given.get(name, "cpu" if host else f"cuda:{accelerator_number(cluster, device)}")
    number = cuda_number(home)
    if home not in ("cpu", "disk") and number is None:
        raise InvalidInput(f"{name}={home:.60}: must be cpu, disk or cuda:0")
    if number is not None and number >= torch.cuda.device_count():
        raise InvalidInput(
            f"the plan uses {name} as {home}, and torch sees {torch.cuda.device_count()} CUDA devices; say what stands "
            f"in for it, as in {name}=cpu or {name}=disk"
        )
    return home


class Dispatched(Run):
    """A module with accelerate's hooks, and one without. Links, and times of ops, are torch's: verify with that."""

    given = "random weights and inputs"

    def __init__(self, plan: Plan, plain: Any, placed: Any, args: Any, kwargs: Any) -> None:
        from importlib.metadata import version

        self.library = f"accelerate {version('accelerate')}"
        self._plan, self._plain, self._placed, self._args, self._kwargs = plan, plain, placed, args, kwargs

    def plain(self) -> list[Output]:
        """Without hooks, on one device."""
        return self._outputs(self._plain)

    def placed(self) -> list[Output]:
        """With them."""
        return self._outputs(self._placed)

    def ran_on(self) -> dict[str, str]:
        """From the map that accelerate notes on the module; devices that stand in for several are not told apart."""
        wanted, names = _places(self._plan), self._plan.problem.cluster.device_names
        noted: dict[str, str] = self._placed.hf_device_map
        devices = {
            home: {names[wanted[name]] for name, where in noted.items() if where == home} for home in noted.values()
        }
        graph, found = self._plan.problem.graph, pieces(self._plan.problem.graph)
        return {
            graph.op_names[op]: next(iter(devices[noted[found.names[piece]]]))
            for op, piece in enumerate(found.of_op.tolist())
            if piece >= 0 and len(devices[noted[found.names[piece]]]) == 1
        }

    def _outputs(self, module: Any) -> list[Output]:
        from torch import Tensor
        from torch.utils._pytree import tree_leaves

        return [Output(out) for out in tree_leaves(module(*self._args, **self._kwargs)) if isinstance(out, Tensor)]
