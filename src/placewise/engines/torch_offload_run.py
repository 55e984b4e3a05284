"""A plan of `--engine torch-offload` run for `placewise verify`: one token after a prompt, or the prompt itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from placewise.engines import Counted, Run
from placewise.engines.phase import Phase, phase
from placewise.engines.torch import Output, tested_links
from placewise.engines.torch_offload import modes, parts_and_weights
from placewise.errors import Unsupported
from placewise.plans import Plan
from placewise.problem import Problem

if TYPE_CHECKING:
    from placewise.offload import Took

#: Runs with a clock at each part, of which the median counts.
_ROUNDS = 3


@contextmanager
def ready(plan: Plan, model: str, devices: Mapping[str, str]) -> Iterator[OffloadRun]:
    """The model with random weights, once on the CPU and once as the plan says."""
    import torch

    from placewise.importers.transformers import random_inputs, with_weights
    from placewise.machine import check_host_memory
    from placewise.measure import told
    from placewise.ports import torch_devices

    modes(plan)  # refuses plans of ops
    found = phase(plan.problem.graph)
    if found is None:
        raise Unsupported("verify runs models that read tokens, and this plan does not tell how many")
    _check_model(plan, model, found)
    homes = torch_devices(plan, devices)
    check_host_memory(2.0 * float(plan.problem.graph.resident_bytes.sum()), f"{model}, with and without a plan,")
    with told(f"{model}: cannot be run as the plan says"), torch.no_grad():
        torch.manual_seed(0)
        module = with_weights(model)
        inputs = random_inputs(module, found.sequences, found.cached or found.tokens)
        plain = copy.deepcopy(module)
        with plan.apply(module, devices=devices) as placed:
            yield OffloadRun(plan, homes, plain, placed, inputs, found.cached > 0)


def _check_model(plan: Plan, model: str, found: Phase) -> None:
    """In the phase of the plan, the model has the plan's parts."""
    from placewise.importers.transformers import from_transformers

    prompt = found.cached or found.tokens
    theirs = from_transformers(model, batch=found.sequences, prompt=prompt, decode=found.cached > 0)
    plan.check_model(parts_and_weights(Problem(theirs, plan.problem.cluster)).graph)


class OffloadRun(Run):
    """A model of transformers, plain on the CPU and as a plan places its parts.

    It has no times of ops for profiles, as what is timed here is parts: `offload.measured` is for these.
    """

    given = "random weights and tokens, and without a plan on the CPU"

    def __init__(
        self, plan: Plan, homes: Sequence[Any], plain: Any, placed: Any, inputs: Mapping[str, Any], decode: bool
    ) -> None:
        import torch
        import transformers

        self.library = f"torch {torch.__version__}, transformers {transformers.__version__}"
        self._plan, self._homes, self._plain, self._placed = plan, homes, plain, placed
        self._inputs = dict(inputs)
        self._caches = [self._read(called) for called in (plain, placed)] if decode else [None, None]
        self._timed: list[list[Took]] = []

    def _read(self, called: Any) -> Any:
        """The cache of the prompt."""
        return called(**self._inputs | {"use_cache": True}).past_key_values

    def _called(self, called: Any, cache: Any) -> Sequence[ArrayLike]:
        import torch

        with torch.no_grad():
            if cache is None:
                made = called(**self._inputs)[0]
            else:
                last = self._inputs["input_ids"][:, :1]
                made = called(input_ids=last, past_key_values=cache, use_cache=True)[0]
                cache.crop(-1)  # for the next run
        for home in {home for home in self._homes if home.type == "cuda"}:
            torch.cuda.synchronize(home)
        return [Output(made)]

    def plain(self) -> Sequence[ArrayLike]:
        """On the CPU."""
        return self._called(self._plain, self._caches[0])

    def placed(self) -> Sequence[ArrayLike]:
        """As the plan says."""
        return self._called(self._placed, self._caches[1])

    def ran_on(self) -> Mapping[str, str]:
        """By where the weights of each part are when they are read."""
        names, weights = self._plan.problem.cluster.device_names, self._placed.weights_on
        found = {}
        for path, mode in modes(self._plan).items():
            home = str(self._homes[names.index(mode["compute"])])
            astray = weights[path] - {home}
            found[path] = f"{', '.join(sorted(astray))}, and not {home}" if astray else mode["compute"]
        return found

    def _measured(self) -> list[list[Took]]:
        if not self._timed:
            self._timed = [list(self._placed.timed(self.placed)) for _ in range(_ROUNDS)]
        return self._timed

    def busy(self) -> Mapping[str, float]:
        """The sum over a device's parts, each clocked; the median of some runs."""
        sums: dict[str, list[float]] = {}
        for turn, each in enumerate(self._measured()):
            for took in each:
                sums.setdefault(took.device, [0.0] * _ROUNDS)[turn] += took.seconds
        return {device: float(np.median(values)) for device, values in sums.items()}

    def peak(self) -> Mapping[str, float]:
        """Of GPUs, as PyTorch tells; on a CPU, weights and buffers are counted."""
        import torch

        names = self._plan.problem.cluster.device_names
        gpus = {name: home for name, home in zip(names, self._homes, strict=True) if home.type == "cuda"}
        for home in gpus.values():
            torch.cuda.reset_peak_memory_stats(home)
        self.placed()
        counted = {name: Counted(held) for name, held in self._placed.held.items() if name not in gpus and held}
        return {name: float(torch.cuda.max_memory_allocated(home)) for name, home in gpus.items()} | counted

    def links(self) -> Mapping[tuple[str, str], bool]:
        """Each link that the plan sends over."""
        return tested_links(self._plan, self._homes)
