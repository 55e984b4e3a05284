"""Ops measured one at a time with PyTorch, eager, as `module(*inputs)` runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from placewise.errors import InvalidInput, Unsupported
from placewise.importers import torch_export
from placewise.machine import keep_memory
from placewise.measure import Timing, clocked, hardware_name, told

_PER_OP = 0.05  # seconds
_PER_MODEL = 3.0
#: In a model, an op's weights were last read a whole run ago: calls take turns with copies of them, of so many bytes in
#: all but of eight at most.
_TURNS = 256 * 1024**2


class TorchTarget:
    """A module with the arguments that it is called with, on the CPU or a CUDA device. Weights may be meta tensors."""

    def __init__(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, device: str) -> None:
        import torch

        try:
            self._device = torch.device(device)
        except RuntimeError as error:
            raise InvalidInput(f"device {device!r:.60}: {str(error).splitlines()[0]}") from None
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise InvalidInput(f"device {device!r:.60}: this PyTorch ({torch.__version__}) sees no CUDA device")
        if self._device.type == "cuda" and (self._device.index or 0) >= torch.cuda.device_count():
            raise InvalidInput(f"device {device!r:.60}: there are {torch.cuda.device_count()}, counted from cuda:0")
        self.device = device
        on_gpu = self._device.type == "cuda"
        if not on_gpu:
            keep_memory()
        self.hardware = torch.cuda.get_device_name(self._device) if on_gpu else hardware_name()
        self.library = f"torch {torch.__version__}"
        self._module, self._inputs = module, (tuple(args), dict(kwargs))
        self._program = torch_export.export(module, args, kwargs)
        reading = torch_export.read(self._program, name)
        self.graph, self._nodes = reading.graph, reading.nodes

    def measure(self, wanted: set[str]) -> Iterator[tuple[str, Timing]]:
        """Each op on random inputs of its own."""
        import torch

        left = set(wanted)
        signature = self._program.graph_signature
        weights = {*signature.inputs_to_parameters, *signature.inputs_to_buffers}
        for name, key in zip(self.graph.op_names, self.graph.op_signatures, strict=True):
            node = self._nodes.get(name)
            if key not in left or node is None or not isinstance(node.target, torch._ops.OpOverload):
                continue
            left.remove(key)
            with torch.inference_mode():
                try:
                    run = partial(_run, node.target, self._calls(node, weights))
                    timing = self._clocked(run, _PER_OP)
                    yield key, timing._replace(scratch=self._scratch(run))
                except RuntimeError:  # an op that random inputs cannot feed, or that does not fit: it stays modelled
                    continue

    def whole(self) -> Timing:
        """The module as it is called."""
        import torch

        with told(f"{self.graph.name}: the whole model cannot be run on {self.device}"), torch.inference_mode():
            module, inputs = materialised(self._module, self._inputs, self._device)
            return self._clocked(partial(_run, module, [inputs]), _PER_MODEL)

    def _clocked(self, run: Callable[[int], Any], budget: float) -> Timing:
        import torch

        if self._device.type != "cuda":
            return clocked(run, budget)

        def synchronised(count: int) -> None:
            run(count)
            torch.cuda.synchronize(self._device)

        return clocked(synchronised, budget)

    def _calls(self, node: Any, weights: set[str]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Arguments for the op, several times over where it reads weights."""
        import torch
        from torch.utils._pytree import tree_map

        held = sum(_bytes(arg.meta["val"]) for arg in node.all_input_nodes if arg.name in weights)
        copies = min(8, max(1, _TURNS // held)) if held > 2**16 else 1
        shared: dict[str, Any] = {}

        def fed(arg: Any) -> Any:
            if isinstance(arg, torch.device):
                return self._device
            if not isinstance(arg, torch.fx.Node):
                return arg
            if arg.name in weights:
                return self._random(arg.meta["val"], node)
            if arg.name not in shared:
                shared[arg.name] = self._random(arg.meta["val"], node)
            return shared[arg.name]

        return [
            tree_map(fed, (tuple(node.args), dict(node.kwargs)), is_leaf=lambda x: isinstance(x, torch.fx.Node))
            for _ in range(copies)
        ]

    def _random(self, like: Any, node: Any) -> Any:
        """A tensor of the type; whole numbers are such that any op can take them as indices."""
        import torch
        from torch.utils._pytree import tree_map

        if not isinstance(like, torch.Tensor):
            return tree_map(lambda each: self._random(each, node), like) if isinstance(like, (list, tuple)) else like
        made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=self._device)
        if like.dtype.is_floating_point or like.dtype.is_complex:
            return made.uniform_(0.1, 1.0) if like.dtype.itemsize > 1 else made.zero_()
        if "grouped_mm" in str(node.target):  # ends of the experts' shares of the tokens
            tokens = node.args[0].meta["val"].shape[-2]
            return made.copy_(torch.linspace(tokens / max(1, len(made)), tokens, len(made)).to(like.dtype))
        if "embedding" in str(node.target):
            return made.random_(0, node.args[0].meta["val"].shape[0])
        return made.fill_(True) if like.dtype is torch.bool else made.zero_()

    def _scratch(self, run: Callable[[int], Any]) -> float:
        """Bytes that an op holds beyond inputs and outputs, at most; on the CPU, PyTorch does not tell."""
        import torch

        if self._device.type != "cuda":
            return 0.0
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        kept = run(1)
        made = torch.cuda.memory_allocated(self._device) - before
        del kept
        return float(max(0, torch.cuda.max_memory_allocated(self._device) - before - made))


def _run(op: Any, calls: list[tuple[tuple[Any, ...], dict[str, Any]]], count: int) -> Any:
    """Call an op so many times, with each of the arguments in turn."""
    result = None
    for i in range(count):
        args, kwargs = calls[i % len(calls)]
        result = op(*args, **kwargs)
    return result


def _bytes(value: Any) -> int:
    return int(value.numel() * value.dtype.itemsize) if hasattr(value, "numel") else 0


def materialised(module: Any, inputs: Any, device: Any) -> tuple[Any, Any]:
    """A module and its inputs on a device; what has no values gets small random ones, so that nothing overflows."""
    import torch
    from torch.utils._pytree import tree_map

    held = [*module.parameters(), *module.buffers()]
    if not any(tensor.is_meta for tensor in held):
        module = module.to(device)
    else:
        first: dict[int, str] = {}
        weights = module.named_parameters(remove_duplicate=False)
        tied = {path: first.setdefault(id(tensor), path) for path, tensor in weights}
        module = module.to_empty(device=device)  # which gives each path a tensor of its own
        for path, same in tied.items():
            owner, _, name = path.rpartition(".")
            setattr(module.get_submodule(owner), name, module.get_parameter(same))
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.dtype.is_floating_point:
                    tensor.uniform_(0.0, 0.02)  # variances are among them
                else:
                    tensor.zero_()

    def filled(given: Any) -> Any:
        if not isinstance(given, torch.Tensor):
            return given
        if not given.is_meta:
            return given.to(device)
        made = torch.rand(given.shape) if given.dtype.is_floating_point else torch.randint(100, given.shape)
        return made.to(device, given.dtype)

    return module.eval(), tree_map(filled, inputs)


def runnable(model: str) -> tuple[Any, tuple[Any, ...], dict[str, Any], str]:
    """(module, args, kwargs, name) of a model of the zoo or a `.pt2` file."""
    from placewise import zoo
    from placewise.importers import pt2

    if Path(model).suffix.lower() == ".pt2":
        program, example = pt2.as_module(model)
        return program, example, {}, Path(model).stem
    if model in zoo.MODELS and zoo.MODELS[model].task == "training":
        raise Unsupported(f"{model}: only inference is measured; profile {model.removesuffix('-train')}")
    module, args = zoo.module(model)
    return module, args, {}, model
