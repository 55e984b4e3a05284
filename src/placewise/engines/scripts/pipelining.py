"""A model as a pipeline over processes, with torch.distributed.pipelining (PyTorch 2.7 or later). Start it with

    torchrun --nproc-per-node PROCESSES this_file.py mymodel:build --check

`build()` in mymodel.py returns (module, args): a model, the same in each process, and a batch for it, as a tuple or,
for a model that is cut by its layers, by name. For a training step it returns (module, args, target, loss), where
loss(output, target) is a mean over the batch. Each process first runs the model on one microbatch and compares what its
stages make of it, unless it is told `--unchecked`. `--check` compares outputs and gradients of the whole batch.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
    pipeline,
)

# What the plan says: `placewise export --to pipelining` fills it in.
STAGES: list[list[str]] = []  # the modules of each stage
RANKS: list[int] = []  # the process that runs each stage
DEVICES: list[str] = []  # of each process
LAYERS = ""  # the list of layers, if the model has one
SCHEDULE = "1f1b"
MICROBATCHES = 1


class Skipped(nn.Module):
    """Stands for a module of another stage, whose work nobody reads: what it returns has the shape of what it takes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What comes in as numbers goes out; where only ids or positions come in, there is nothing to add."""
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        return next((value for value in given if value.is_floating_point()), torch.zeros(()))


class Stage(nn.Module):
    """Part of a model of transformers: hidden states enter its first layer, and leave its last.

    Whatever the model does before its layers and after them is done around these, but counts only at its ends: some
    models scale what they embed, or cap what the head makes.
    """

    def __init__(self, module: nn.Module, layers: nn.ModuleList, number: int, names: dict[int, str]) -> None:
        super().__init__()
        self.module, self.first, self.last = module, number == 0, number == len(STAGES) - 1
        self.names = names  # that weights have in the whole model, by id
        self.hidden: Any = None
        if not self.first:
            layers[0].register_forward_pre_hook(self._enter, with_kwargs=True)
        if not self.last:
            layers[-1].register_forward_hook(self._leave)

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        """The batch comes into the first stage, hidden states into others; what else is given, into all."""
        self.hidden = x
        made = output_of(self.module(x, **others) if self.first else self.module(inputs_embeds=x, **others))
        if not self.last:
            made = self.hidden
        self.hidden = None
        return made

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return ((self.hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": self.hidden})

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], made: Any) -> None:
        self.hidden = output_of(made)


def output_of(found: Any) -> Tensor:
    """The tensor that a model returns, or the first of several."""
    tensor: Tensor = found if isinstance(found, Tensor) else found[0]
    return tensor


def layers_of(number: int) -> list[int]:
    """Of a stage."""
    return [int(name.removeprefix(f"{LAYERS}.")) for name in STAGES[number] if name.startswith(f"{LAYERS}.")]


def kept(module: nn.Module, number: int) -> Stage:
    """A stage by its layers: the others are taken out, and so are the modules before or after them."""
    names = {id(weight): name for name, weight in module.named_parameters()}
    path, holder = LAYERS.split("."), module
    for part in path:
        children = list(holder.named_children())
        inner = next(i for i, (name, _) in enumerate(children) if name == part)
        for i, (name, child) in enumerate(children):
            here = i == inner or number == (0 if i < inner else len(STAGES) - 1)
            # What has no weights is needed everywhere: rotary positions, say.
            if not here and any(True for _ in child.parameters()):
                setattr(holder, name, Skipped())
        if part != path[-1]:
            holder = getattr(holder, part)
    layers, mine = getattr(holder, path[-1]), layers_of(number)
    configs = {id(config): config for part in module.modules() if (config := getattr(part, "config", None))}
    for config in configs.values():
        if hasattr(config, "use_cache"):
            config.use_cache = False
        for key, value in list(vars(config).items()):
            if isinstance(value, (list, tuple)) and len(value) == len(layers):  # an entry for each layer: its kind, say
                setattr(config, key, type(value)(value[i] for i in mine or [0]))
    setattr(holder, path[-1], nn.ModuleList([layers[i] for i in mine] or [Skipped()]))
    return Stage(module, getattr(holder, path[-1]), number, names)


def builder(told: str) -> Any:
    """The function that makes the model, told as MODULE:FUNCTION."""
    file, _, function = told.partition(":")
    try:
        found = getattr(importlib.import_module(file), function, None)
    except (ImportError, ValueError) as error:
        sys.exit(f"{told!r} is to be MODULE:FUNCTION: {error}")
    if not callable(found):
        sys.exit(f"{told!r} is to be MODULE:FUNCTION: {file} has no function {function!r}")
    return found


def check_model(module: nn.Module) -> None:
    """Refuse a model that the plan was not made for."""
    known = dict(module.named_modules())
    for name in (name for stage in STAGES for name in stage):
        if name not in known:
            sys.exit(f"not the model of this plan: it has no module {name!r}")
    if LAYERS:
        listed: Any = known[LAYERS]
        planned = sum(name.startswith(f"{LAYERS}.") for stage in STAGES for name in stage)
        if len(listed) != planned:
            sys.exit(f"not the model of this plan: {LAYERS} has {len(listed)} layers, not {planned}")


def by_layers(module: nn.Module) -> bool:
    """Whether the model is cut by its list of layers: torch's tracer fails on models of transformers."""
    return bool(LAYERS) and "inputs_embeds" in inspect.signature(module.forward).parameters


def batch_of(module: nn.Module, args: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(what enters the first stage, what every stage is given by name)."""
    if not by_layers(module):
        if isinstance(args, dict):
            sys.exit("a batch by name is for models that are cut by their layers: return a tuple of the arguments")
        return tuple(args), {}
    named = args if isinstance(args, dict) else inspect.signature(module.forward).bind(*args).arguments
    return (next(iter(named.values())),), dict(list(named.items())[1:])


def one_microbatch(value: Any) -> Any:
    """Of a batch."""
    return value.chunk(MICROBATCHES)[0] if isinstance(value, Tensor) else value


def stages_of(
    module: nn.Module, args: tuple[Any, ...], others: dict[str, Any], rank: int, device: torch.device, checked: bool
) -> list[Any]:
    """This process's stages, each with a copy of its part of the model."""
    check_model(module)
    mine = [number for number, owner in enumerate(RANKS) if owner == rank]
    chunk, rest = tuple(map(one_microbatch, args)), {name: one_microbatch(value) for name, value in others.items()}
    if by_layers(module):
        parts = {number: kept(copy.deepcopy(module), number) for number in mine}
        if checked:
            check_parts(parts, module, chunk, rest)
        return [PipelineStage(part.to(device), number, len(STAGES), device) for number, part in parts.items()]
    cuts = {stage[0]: SplitPoint.BEGINNING for stage in STAGES[1:]}
    pipe = pipeline(copy.deepcopy(module), mb_args=chunk, split_spec=cuts)  # it changes the module
    if pipe.num_stages != len(STAGES):
        sys.exit(f"the model was cut into {pipe.num_stages} stages, not {len(STAGES)}")
    if checked:
        with undisturbed(pipe):
            made = output_of(pipe(*chunk))
        with undisturbed(module):
            refuse_if_off("the stages make", made, output_of(module(*chunk)))
    return [pipe.build_stage(number, device) for number in mine]


REFUSED = "the model cannot be cut as the plan says"


def check_parts(parts: dict[int, Stage], module: nn.Module, chunk: tuple[Any, ...], rest: dict[str, Any]) -> None:
    """Does each stage make of what the whole model has there what the whole model makes?"""
    layers: Any = module.get_submodule(LAYERS)
    states: list[Tensor] = []  # what enters the first layer, and what each makes

    def enters(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])

    def leaves(_: nn.Module, args: tuple[Any, ...], made: Any) -> None:
        states.append(output_of(made))

    hooks = [layers[0].register_forward_pre_hook(enters, with_kwargs=True)]
    hooks += [layer.register_forward_hook(leaves) for layer in layers]
    training = module.training
    with undisturbed(module):
        whole = output_of(module.eval()(*chunk, **rest))
        for hook in hooks:
            hook.remove()
        module.train(training)
        if len(states) != len(layers) + 1:
            sys.exit(f"{REFUSED}: its layers do not run once each, one after the other")
        for number, part in parts.items():
            before = sum(len(layers_of(stage)) for stage in range(number))
            expected = whole if part.last else states[before + len(layers_of(number))]
            try:
                made = part.eval()(chunk[0] if part.first else states[before], **rest)
            except Exception as error:
                sys.exit(f"{REFUSED}: stage {number} fails by itself: {type(error).__name__}: {error}")
            refuse_if_off(f"stage {number} makes", made, expected)
            part.train(training)


def refuse_if_off(what: str, made: Tensor, expected: Tensor) -> None:
    """The same ops on the same machine: nothing may differ but the order of sums."""
    if made.shape != expected.shape:
        sys.exit(f"{REFUSED}: {what} {list(made.shape)}, and the whole model {list(expected.shape)}")
    wrong = off(made, expected, float(expected.abs().max()))
    if not wrong < 1e-4:
        sys.exit(
            f"{REFUSED}: what {what} differs from what the whole model does by {wrong:.1e} of the largest value. Its "
            "layers read more than hidden states and what the model is given (a bias that the first layer makes, say)"
        )


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Run it without gradients; random numbers and averages that it keeps are as before."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        yield
        for buffer, value in before:
            buffer.copy_(value)


def schedule_of(stages: list[Any], loss: Any) -> Any:
    """What the plan says; without a loss, forward passes alone."""
    if len(STAGES) > len(DEVICES):
        return ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss)
    form = Schedule1F1B if SCHEDULE == "1f1b" and loss else ScheduleGPipe
    return form(stages[0], MICROBATCHES, loss_fn=loss)


def check_ties(module: nn.Module) -> None:
    """Weights that two stages share would get half of their gradient in each."""
    counts: dict[int, int] = {}
    for _, weight in module.named_parameters(remove_duplicate=False):
        counts[id(weight)] = counts.get(id(weight), 0) + 1
    tied = [name for name, weight in module.named_parameters() if counts[id(weight)] > 1]
    if tied and len(STAGES) > 1:
        sys.exit(f"{tied[0]} is tied to another weight, and a pipeline would train them apart: untie them first")


def off(found: Tensor, wanted: Tensor, scale: float) -> float:
    """The largest difference, as a share of `scale`."""
    return float((found.detach().cpu() - wanted.detach().cpu()).abs().max()) / (scale or 1.0)


def gradients_off(stages: list[Any], module: nn.Module) -> float:
    """Of this process's weights, beside those of the whole model; infinite where one is missing."""
    wanted = {name: weight.grad for name, weight in module.named_parameters()}
    scale = max(float(grad.abs().max()) for grad in wanted.values() if grad is not None)
    worst = 0.0
    for stage in stages:
        names = getattr(stage.submod, "names", {})
        for name, weight in stage.submod.named_parameters():
            expected = wanted[names.get(id(weight), name)]
            if expected is None or weight.grad is None:
                worst = max(worst, 0.0 if expected is weight.grad else float("inf"))
            else:
                worst = max(worst, off(weight.grad, expected, scale))
    return worst


def placed(value: Any, device: torch.device) -> Any:
    """A tensor on the device; anything else as it is."""
    return value.to(device) if isinstance(value, Tensor) else value


def largest(value: float, device: torch.device) -> float:
    """Of all processes."""
    found = torch.tensor([value], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def end_with(parent: int) -> None:
    """torchrun that is killed ends nobody, so whom it started ends when it is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main(arguments: list[str] | None = None) -> int:
    """Run some steps; 1 where `--check` finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="MODULE:FUNCTION that returns the model and a batch")
    parser.add_argument("--device", help="for all processes, such as cpu, in place of the plan's")
    parser.add_argument("--check", action="store_true", help="compare with the whole model in one process")
    parser.add_argument("--unchecked", action="store_true", help="do not run the whole model on one microbatch first")
    parser.add_argument("--steps", type=int, default=1, help="after a first one")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for another process")
    options = parser.parse_args(arguments)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world != len(DEVICES):
        sys.exit(
            f"the plan has {len(DEVICES)} processes, and there are {world}: torchrun --nproc-per-node {len(DEVICES)}"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    device = torch.device(options.device or DEVICES[rank])
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        sys.exit(f"process {rank} is to use {device}, and there are {torch.cuda.device_count()} here: see --device")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else NCCL and all contexts are on the first
    sys.path.insert(0, os.getcwd())
    build = builder(options.model)
    torch.manual_seed(0)
    module, args, *training = build()
    args, others = batch_of(module, args)
    if any(isinstance(arg, Tensor) and len(arg) % MICROBATCHES for arg in (*args, *others.values())):
        sys.exit(f"the batch cannot be cut into {MICROBATCHES} equal parts")
    target: Any
    loss: Any
    target, loss = training or (None, None)
    module.train(bool(training))
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout))
    first, last = rank == RANKS[0], rank == RANKS[-1]
    stages = stages_of(module, args, others, rank, device, not options.unchecked)
    if training:
        check_ties(module)
        if last and any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()):
            print("note: batch norm averages over a microbatch, not over the batch", file=sys.stderr)
    schedule = schedule_of(stages, (lambda out, want: loss(output_of(out), want)) if training else None)
    given = tuple(placed(arg, device) for arg in args) if first else ()
    named = {name: placed(value, device) for name, value in others.items()}
    times, found = [], None
    for _ in range(1 + options.steps):
        for stage in stages:
            stage.submod.zero_grad()
        began = time.perf_counter()
        if training:
            found = schedule.step(*given, **named, **({"target": target.to(device)} if last else {}))
        else:
            with torch.no_grad():
                found = schedule.eval(*given, **named)
        times.append(time.perf_counter() - began)
    if last:
        print(f"{1e3 * statistics.median(times[1:] or times):.3f} ms a step")
    if not options.check:
        return 0
    with torch.set_grad_enabled(bool(training)):
        expected = output_of(module(*args, **others))
    wrong = off(output_of(found), expected, float(expected.detach().abs().max())) if last else 0.0
    if training:
        loss(expected, target).backward()
        wrong = max(wrong, gradients_off(stages, module))
    wrong = largest(wrong, device)
    if last:
        what = "outputs and gradients" if training else "outputs"
        print(f"{what} differ from those of one process by at most {wrong:.1e} of the largest value")
    return int(not wrong < 1e-4)


if __name__ == "__main__":
    code = main()
    dist.destroy_process_group()
    sys.exit(code)
