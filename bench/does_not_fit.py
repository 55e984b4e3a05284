"""Language models whose weights are twice the memory of the GPU: what one token, and a prompt, take.

For each model and phase: accelerate's own map, the CPU alone, the first half of the layers on the GPU and the rest on
the CPU, the plan of `--engine torch-offload`, from rates that are measured here first, and, without the limit, all on
the GPU. Weights are random.

python bench/does_not_fit.py           on a machine with a CUDA GPU
python bench/does_not_fit.py --tiny    small models on logical devices of a CPU: shows that it works, not how fast
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers

import placewise as pw
from harness import best_planned, main, progress, this_machine
from placewise import engines
from placewise.engines.torch_offload import modes
from placewise.importers.transformers import from_transformers
from placewise.offload import measured
from placewise.plans import Plan
from placewise.simulator import evaluate

_HEADS = {"num_attention_heads": 24, "num_key_value_heads": 8}
CONFIGS = {
    "28-layer dense, 3.2B": transformers.LlamaConfig(
        vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, **_HEADS,
        max_position_embeddings=4096, tie_word_embeddings=True, dtype="bfloat16",
    ),
    "16-layer experts, 3.9B": transformers.MixtralConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=4608, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=8, num_local_experts=8, max_position_embeddings=4096, dtype="bfloat16",
    ),
}  # fmt: skip
_SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
          "num_key_value_heads": 2, "num_hidden_layers": 4, "dtype": "float32"}  # fmt: skip


class Case:
    """A model in a phase, on this machine."""

    def __init__(self, config: Any, box: pw.Cluster, devices: dict[str, str], prompt: int, rounds: int) -> None:
        self.config, self.box, self.devices, self.prompt, self.rounds = config, box, devices, prompt, rounds
        cuda = torch.cuda.is_available()
        torch.manual_seed(0)
        with torch.device("cuda" if cuda else "cpu"):
            built = transformers.AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, str(config.dtype).split(".")[-1])
            )
        self.model = built.eval().to("cpu")
        # cuDNN makes a plan for each length of the cache, which takes longer than to write the token.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.text = torch.arange(prompt)[None] % config.vocab_size
        self.weights = sum(weight.numel() * weight.element_size() for weight in self.model.parameters())

    def problem(self, decode: bool) -> pw.Problem:
        """Its parts and their weights, on this machine."""
        graph = from_transformers(self.config, prompt=self.prompt, decode=decode)
        return engines.get("torch-offload").fit(pw.Problem(graph, self.box))

    def prepare(self, decode: bool) -> Any:
        """The cache of the prompt, where one more token is written."""
        return self.model(self.text, use_cache=True).past_key_values if decode else None

    def call(self, decode: bool, cache: Any) -> None:
        """What is measured."""
        if decode:
            self.model(self.text[:, :1], past_key_values=cache, use_cache=True)
        else:
            self.model(self.text, use_cache=False, logits_to_keep=1)

    def seconds(self, decode: bool) -> tuple[dict[str, float], float]:
        """The median and the least of one call, and the most memory of the GPU."""
        with torch.no_grad():
            cache = self.prepare(decode)
            taken = []
            for turn in range(self.rounds + 2):
                if turn == 2 and torch.cuda.is_available():
                    torch.cuda.reset_peak_memory_stats()
                began = time.perf_counter()
                self.call(decode, cache)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                taken.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else float("nan")
        return {"ms": 1e3 * statistics.median(taken[2:]), "least ms": 1e3 * min(taken[2:])}, float(peak)


def with_plan(case: Case, decode: bool, plan: Plan) -> dict[str, Any]:
    with plan.apply(case.model, devices=case.devices) as placed:
        seconds, peak = case.seconds(decode)
        held = placed.held[next(device.name for device in case.box.devices if device.kind == "gpu")]
    kinds = Counter("GPU" if mode["compute"] == mode["weights"] != "cpu" else "CPU" if mode["compute"] == "cpu"
                    else "streamed" for path, mode in modes(plan).items() if ".layers." in path)  # fmt: skip
    text = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return {**seconds, "predicted ms": 1e3 * plan.value, "weights GiB": held / 2**30,
            "peak GiB": peak / 2**30, "parts of layers": text}  # fmt: skip


def by_hand(problem: pw.Problem, gpu_layers: int) -> Plan:
    """So many layers, and the modules beside them, on the GPU; none: all on the CPU."""
    graph, cluster = problem.graph, problem.cluster
    gpu = _gpu(problem)
    host = next(d for d, device in enumerate(cluster.devices) if device.kind == "cpu")
    layers = [module.split(".layers.") for module in graph.op_modules]
    here = [gpu_layers > 0 and (len(part) == 1 or int(part[1].split(".")[0]) < gpu_layers) for part in layers]
    placement = np.where(here, gpu, host).astype(np.int32)
    return Plan(problem, placement, None, float(evaluate(problem, placement).value[0]), 0.0, "hand", "0")


def planned(problem: pw.Problem, seconds: float) -> Plan:
    """The better of two windows of streaming."""
    windows = [replace(problem, execution=replace(problem.execution, prefetch=ahead)) for ahead in (2, 3)]
    # cuBLAS takes some memory for itself, which no plan counts: a little room is left.
    snug = [capped(window, 0.97 * window.capacity[_gpu(window)]) for window in windows]
    plans = [replace(best_planned(tight, pw.Budget(seconds=seconds)), problem=window)
             for window, tight in zip(windows, snug, strict=True)]  # fmt: skip
    return min(plans, key=lambda plan: plan.value)


def with_accelerate(case: Case, decode: bool, limit: float) -> dict[str, Any]:
    import accelerate

    room = {0: int(limit), "cpu": 10**12}
    places = accelerate.infer_auto_device_map(
        case.model, max_memory=room, no_split_module_classes=case.model._no_split_modules
    )
    accelerate.dispatch_model(case.model, device_map=places, main_device=0)
    try:
        seconds, peak = case.seconds(decode)
    finally:
        accelerate.hooks.remove_hook_from_submodules(case.model)
        case.model.to("cpu")
    count = Counter("GPU" if device == 0 else "streamed" for path, device in places.items() if ".layers." in path)
    return {**seconds, "peak GiB": peak / 2**30,
            "parts of layers": ", ".join(f"{n} {kind}" for kind, n in sorted(count.items()))}  # fmt: skip


def _gpu(problem: pw.Problem) -> int:
    return next(d for d, device in enumerate(problem.cluster.devices) if device.kind == "gpu")


def capped(problem: pw.Problem, limit: float) -> pw.Problem:
    name = problem.cluster.device_names[_gpu(problem)]
    return replace(problem, cluster=problem.cluster.with_memory({name: float(limit)}))


def box_of(tiny: bool) -> tuple[pw.Cluster, dict[str, str]]:
    if tiny:
        gpu = pw.Device("gpu", memory=1e9, flops={"default": 1e11}, bandwidth=1e10)
        return pw.full_mesh([gpu, pw.Device("cpu", kind="cpu", flops={"default": 1e10}, bandwidth=5e9)], 5e9), {
            "gpu": "cpu"
        }
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA GPU here: try --tiny")
    return this_machine(), {}


def measure(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    box, devices = box_of(options.tiny)
    configs = CONFIGS
    if options.tiny:
        configs = {"dense": transformers.LlamaConfig(**_SMALL), "experts": transformers.MixtralConfig(**_SMALL)}
    tables: dict[str, list[dict[str, Any]]] = {}
    prompt = 32 if options.tiny else 512
    phases = {True: "one token after the prompt", False: f"a prompt of {prompt} tokens"}
    for name, config in configs.items():
        wanted = {decode: phase for decode, phase in phases.items() if options.only in f"{name}: {phase}"}
        if not wanted:
            continue
        case = Case(config, box, devices, prompt, options.rounds)
        limit = case.weights / 2
        for decode, phase in wanted.items():
            progress(f"{name}, {phase}: measuring its parts")
            problem = case.problem(decode)

            def call(cache: Any, decode: bool = decode, case: Case = case) -> None:
                case.call(decode, cache)

            def prepare(decode: bool = decode, case: Case = case) -> Any:
                return case.prepare(decode)

            free = measured(problem, case.model, call, prepare=prepare, devices=devices)
            for signature in dict.fromkeys(free.graph.op_signatures):
                op = free.graph.op_signatures.index(signature)
                progress(f"{free.graph.op_names[op]}: {1e3 * free.costs.seconds[op]} ms")
            tight = capped(free, limit)
            half = config.num_hidden_layers // 2
            ways: dict[str, Callable[[], dict[str, Any]]] = {
                "CPU only": lambda c=case, d=decode, p=free: with_plan(c, d, by_hand(p, 0)),
                "first half on the GPU": lambda c=case, d=decode, p=free, h=half: with_plan(c, d, by_hand(p, h)),
                "all on the GPU (no limit)": lambda c=case, d=decode, p=free: with_plan(c, d, by_hand(p, 10**6)),
                "placewise": lambda c=case, d=decode, p=tight: with_plan(c, d, planned(p, options.budget)),
            }
            if torch.cuda.is_available():
                ways["accelerate auto"] = lambda c=case, d=decode, m=limit: with_accelerate(c, d, m)
            rows = []
            for way, run in ways.items():
                progress(f"{name}, {phase}: {way}")
                try:
                    rows.append({"way": way, **run()})
                except pw.PlacewiseError as error:
                    rows.append({"way": way, "parts of layers": str(error)})
                progress(str(rows[-1]))
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            tables[f"{name}: {phase}; GPU {limit / 2**30:.2f} GiB of {case.weights / 2**30:.2f} GiB of weights"] = rows
        del case
    return tables


if __name__ == "__main__":
    main(
        "Models that do not fit",
        measure,
        tiny={"action": "store_true", "help": "small models on logical devices"},
        rounds={"type": int, "default": 15, "help": "medians of so many calls"},
        only={"default": "", "help": "cases whose name has this in it, such as 'experts, 3.9B: one token'"},
        budget={"type": float, "default": 10.0, "help": "seconds for each plan"},
    )
