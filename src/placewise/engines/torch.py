"""PyTorch itself: each op on a device, by `Plan.apply`."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placewise.engines import Counted, Run, engine
from placewise.engines.names import check_ops
from placewise.engines.ranks import accelerator_number
from placewise.engines.torch_offload import WEIGHTS
from placewise.errors import InvalidInput, Unsupported
from placewise.plans import Plan
from placewise.problem import Problem

if TYPE_CHECKING:
    from placewise.executor import Ran
    from placewise.measure import Timing

#: Runs with a clock at each op, if none were asked for.
_ROUNDS = 5
#: Other floating types of torch are read as float32.
_NUMPY_HAS = ("torch.float16", "torch.float32", "torch.float64")
#: Bytes that are sent over a link to see whether they arrive.
_PATTERN = 2**20


def any_op(problem: Problem) -> Problem:
    """Each op on any CPU or GPU; devices work at the same time, and copies beside them."""
    others = (device.name for device in problem.cluster.devices if device.kind not in ("cpu", "gpu"))
    execution = replace(problem.execution, concurrency="parallel", contention="channel", sends="tensor")
    return replace(problem, execution=execution, forbidden=tuple(dict.fromkeys((*problem.forbidden, *others))))


@contextmanager
def run(plan: Plan, model: str, devices: Mapping[str, str]) -> Iterator[TorchRun]:
    """A model of the zoo, with small random values, or a `.pt2` file, with its own weights and example inputs."""
    from placewise.importers import require

    torch = require("torch", "torch")
    from placewise import zoo
    from placewise.importers import pt2
    from placewise.machine import check_host_memory
    from placewise.measure import check_readable, told
    from placewise.measure.pytorch import materialised, runnable
    from placewise.ports import torch_devices

    check_readable(model, "torch")
    if any(op.endswith(WEIGHTS) for op in plan.problem.graph.op_names):
        raise InvalidInput("a plan of --engine torch-offload is verified with the config.json of its model")
    if (plan.problem.graph.phase != 0).any():
        raise Unsupported("this plan is of a training step, and verify runs inference; Plan.apply(module, args) trains")
    module, args, kwargs, name = runnable(model)
    plan.check_model(zoo.load(model) if model in zoo.names() else pt2.load(model))
    homes = torch_devices(plan, devices)
    # The plan moves the weights of the module itself, which the plain one keeps if nothing moves.
    moves = any(homes[d].type == "cuda" for d in plan.placement.tolist())
    check_host_memory((1 + moves) * float(plan.problem.graph.resident_bytes.sum()), f"{name} with and without a plan")
    given = "random weights and inputs"
    with told(f"{name}: cannot be run as the plan says"), torch.no_grad():
        torch.manual_seed(0)
        module, (args, kwargs) = materialised(module, (args, kwargs), torch.device("cpu"))
        if model.endswith(".pt2"):
            given = _own_values(model, module, args)
        alone = beside(plan, homes, lambda home: float(torch.cuda.mem_get_info(home)[0]))
        plain = copy.deepcopy(module).to(alone) if moves else module
        if moves and alone.type == "cpu":
            given += ", and without a plan on the CPU, as the GPU has no room for both"
        with plan.apply(module, args, kwargs, devices=devices) as placed:
            yield TorchRun(plan, homes, plain, alone, placed, placed.brought(args, kwargs), given)


def _own_values(path: str, module: Any, args: Sequence[Any]) -> str:
    """Give a program of a `.pt2` file its own values, and say what they are."""
    from placewise.importers import pt2

    for tensor in (*module.parameters(), *module.buffers(), *args):  # they are whatever memory held
        tensor.uniform_(0.0, 0.02) if tensor.dtype.is_floating_point else tensor.zero_()
    without = pt2.own_values(path, module, args)
    invented = [name for name in without if name != "inputs"]
    weights = "the file's weights" if not invented else f"small random values for {len(invented)} weights"
    return f"{weights} and {'small random inputs, or zeros' if 'inputs' in without else 'its example inputs'}"


def beside(plan: Plan, homes: Sequence[Any], free: Callable[[Any], float]) -> Any:
    """Where the model runs without a plan: on the plan's first GPU, if it has room for both; else on the CPU.

    `free` tells the bytes that a GPU has left.
    """
    import torch

    from placewise.simulator import simulate

    first = next((d for d in sorted(set(plan.placement.tolist())) if homes[d].type == "cuda"), None)
    if first is not None:
        alone = simulate(plan.problem, np.full(plan.problem.num_ops, first, np.int32)).peak[first]
        placed = sum(peak for home, peak in zip(homes, plan.timeline.peak, strict=True) if home == homes[first])
        if alone + placed <= free(homes[first]):
            return homes[first]
    return torch.device("cpu")


@engine("torch", fit=any_op, versions="torch>=2.7", run=run)
def torch_(plan: Plan) -> str:
    """JSON of op names to torch's devices, in the order in which they run; `Plan.apply` runs it.

    A script of one's own reads this; with Placewise at hand, `Plan.load(file).apply(module, args)` does all of it.
    """
    check_ops(plan, "torch")
    cluster = plan.problem.cluster
    names = {
        d: "cpu" if cluster.devices[d].kind == "cpu" else f"cuda:{accelerator_number(cluster, d)}"
        for d in sorted(set(plan.placement.tolist()))
    }
    order = np.argsort(plan.timeline.start, kind="stable") if plan.order is None else plan.order
    ops = {plan.problem.graph.op_names[i]: names[int(plan.placement[i])] for i in order.tolist()}
    return json.dumps({"devices": {cluster.device_names[d]: name for d, name in names.items()}, "ops": ops},
                      indent=1) + "\n"  # fmt: skip


class TorchRun(Run):
    """A module with its inputs, plain on one device and as a plan places it."""

    given: str = ""

    def __init__(
        self,
        plan: Plan,
        homes: Sequence[Any],
        plain: Any,
        alone: Any,
        placed: Any,
        inputs: tuple[Any, Any],
        given: str = "",
    ) -> None:
        import torch
        from torch.utils import _pytree

        self.library, self.given = f"torch {torch.__version__}", given
        self._plan, self._homes = plan, homes
        self._plain, self._placed, self._inputs = plain, placed, inputs
        self._plain_inputs = _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(alone), inputs)
        self.rounds: list[list[Ran]] = []  # of runs with a clock at each op

    def plain(self) -> Sequence[ArrayLike]:
        """On one device: the first GPU that the plan's cluster has, or the CPU."""
        return self._outputs(self._plain, self._plain_inputs)

    def placed(self) -> Sequence[ArrayLike]:
        """As the plan says."""
        return self._outputs(self._placed, self._inputs)

    def clocked(self) -> None:
        """As the plan says, with a clock at each op."""
        import torch

        args, kwargs = self._inputs
        with torch.no_grad():
            self.rounds.append(self._placed.timed(*args, **kwargs)[1])

    def ran_on(self) -> Mapping[str, str]:
        """By the worker that ran each op, if torch has the result on that worker's device."""
        names, found = self._plan.problem.cluster.device_names, {}
        for ran in self._measured()[-1]:
            home = self._homes[names.index(ran.device)]
            found[ran.op] = ran.device if not ran.on or ran.on == str(home) else f"{ran.device}, but on {ran.on}"
        return found

    def busy(self) -> Mapping[str, float]:
        """The sum over a device's ops, each clocked; the median of some runs."""
        rounds = self._measured()
        devices = dict.fromkeys(ran.device for ran in rounds[0])
        sums = {d: [sum(ran.seconds for ran in each if ran.device == d) for each in rounds] for d in devices}
        return {device: float(np.median(values)) for device, values in sums.items()}

    def peak(self) -> Mapping[str, float]:
        """Of GPUs, as PyTorch tells; on a CPU, where it does not, weights and tensors are counted."""
        import torch

        names = self._plan.problem.cluster.device_names
        used = {names[d]: self._homes[d] for d in sorted(set(self._plan.placement.tolist()))}
        gpus = {name: home for name, home in used.items() if home.type == "cuda"}
        for home in gpus.values():
            torch.cuda.reset_peak_memory_stats(home)
        before = {name: self._held_by_plain(home) for name, home in gpus.items()}
        self.placed()
        found = {name: torch.cuda.max_memory_allocated(home) - before[name] for name, home in gpus.items()}
        args, kwargs = self._inputs
        with torch.no_grad():
            counted = self._placed.counted(*args, **kwargs) if len(gpus) < len(used) else {}
        return found | {name: Counted(held) for name, held in counted.items() if name not in gpus}

    def links(self) -> Mapping[tuple[str, str], bool]:
        """Each link that the plan sends over."""
        return tested_links(self._plan, self._homes)

    def times(self) -> Iterable[tuple[str, str, Timing]]:
        """Of each op, the mean over the usual runs, over ops with the same signature and over devices of one hardware.

        Usual is the half of the runs whose sums are in the middle: means of ops add up to what such a run takes, which
        medians of ops do not.
        """
        from placewise.measure import timing_of

        graph, names = self._plan.problem.graph, self._plan.problem.cluster.device_names
        signature = dict(zip(graph.op_names, graph.op_signatures, strict=True))
        hardware = dict(zip(names, map(_hardware, self._homes), strict=True))
        rounds = sorted(self._measured(), key=lambda each: sum(ran.seconds for ran in each))
        usual = rounds[len(rounds) // 4 : max(1, len(rounds) - len(rounds) // 4)]
        seen: dict[tuple[str, str], list[float]] = {}
        for ran in (ran for each in usual for ran in each if signature.get(ran.op)):
            seen.setdefault((hardware[ran.device], signature[ran.op]), []).append(ran.seconds)
        for (alike, of_op), seconds in seen.items():
            for device in (name for name in names if hardware[name] == alike):
                yield device, of_op, timing_of(seconds)._replace(seconds=float(np.mean(seconds)))

    def _measured(self) -> list[list[Ran]]:
        if not self.rounds:
            self.placed()
            for _ in range(_ROUNDS):
                self.clocked()
        return self.rounds

    def _held_by_plain(self, home: Any) -> float:
        """Bytes of the plain module on a GPU, which are no part of the plan."""
        held = {tensor.data_ptr(): tensor for tensor in (*self._plain.parameters(), *self._plain.buffers())}
        return float(sum(t.numel() * t.element_size() for t in held.values() if t.device == home))

    def _outputs(self, module: Any, inputs: tuple[Any, Any]) -> Sequence[ArrayLike]:
        import torch
        from torch.utils import _pytree

        args, kwargs = inputs
        with torch.no_grad():
            flat = _pytree.tree_leaves(module(*args, **kwargs))
        for home in {leaf.device for leaf in flat if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda"}:
            torch.cuda.synchronize(home)
        return [Output(leaf) for leaf in flat if isinstance(leaf, torch.Tensor)]


def tested_links(plan: Plan, homes: Sequence[Any]) -> dict[tuple[str, str], bool]:
    """Whether a pattern arrives over each link that the plan sends over, sent as the executor sends tensors."""
    import torch

    from placewise.ports import port

    names, moving = plan.problem.cluster.device_names, plan.timeline.transfers
    pairs = sorted(set(zip(moving.source.tolist(), moving.target.tolist(), strict=True)))
    pattern = (torch.arange(_PATTERN, dtype=torch.int64) * 2654435761 % 251).to(torch.uint8)
    found = {}
    for a, b in pairs:
        with torch.no_grad():
            source, target = port(homes[a]), port(homes[b])
            given = source.give(pattern.to(homes[a], copy=True), homes[b].type != homes[a].type)
            arrived = target.end(target.begin(given))
            target.finish()
            found[names[a], names[b]] = bool(torch.equal(arrived.cpu(), pattern))
    return found


class Output:
    """A tensor that NumPy reads, wherever it is."""

    def __init__(self, tensor: Any) -> None:
        self._tensor, self.shape = tensor, tuple(tensor.shape)
        self.dtype = str(tensor.dtype).removeprefix("torch.")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        tensor = self._tensor.detach().cpu()
        if tensor.dtype.is_floating_point and str(tensor.dtype) not in _NUMPY_HAS:
            tensor = tensor.float()
        found: NDArray[Any] = np.asarray(tensor.numpy(), dtype)
        return found


def _hardware(home: Any) -> str:
    """What a device of torch is: logical devices of one CPU have equal shares of it."""
    import torch

    return torch.cuda.get_device_name(home) if home.type == "cuda" else str(home)
