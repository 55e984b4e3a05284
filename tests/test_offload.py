from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from placewise import Budget, Problem, engines, plan  # noqa: E402
from placewise import offload as offloading  # noqa: E402
from placewise.cluster import Device, full_mesh  # noqa: E402
from placewise.engines.torch_offload import AFTER, WEIGHTS, modes  # noqa: E402
from placewise.errors import InvalidInput, PlacewiseError, Unsupported  # noqa: E402
from placewise.importers.transformers import from_transformers  # noqa: E402
from placewise.plans import Plan  # noqa: E402
from placewise.simulator import evaluate, violations  # noqa: E402
from placewise.verify import verify  # noqa: E402

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "dtype": "float32",
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "dense": transformers.LlamaConfig(**SIZES),
    "experts": transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "norms after": transformers.Gemma2Config(**SIZES, head_dim=8),
}
#: What the "GPU" and the "CPU" of the tests are to torch.
BOTH_ON_CPU = {"gpu": "cpu"}


def model_of(kind):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32).eval()
    for weight in model.parameters():
        weight.data.normal_(0, 0.3)
    return model


@cache
def graph_of(kind, batch=1, prompt=16, decode=True):
    """Traced once."""
    return from_transformers(CONFIGS[kind], batch=batch, prompt=prompt, decode=decode)


def problem_of(kind, share=0.5, *, decode=True, link=2e9, prefetch=2, gpu=2e11):
    """A GPU with so much of the weights as memory, and a host."""
    graph = graph_of(kind, decode=decode)
    memory = share * graph.resident_bytes.sum()
    cluster = full_mesh(
        [Device("gpu", memory=memory, flops={"default": gpu}, bandwidth=2e10, launch=1e-7),
         Device("cpu", kind="cpu", flops={"default": 1e10}, bandwidth=1e9, launch=1e-7)], link, 1e-7,
    )  # fmt: skip
    problem = Problem(graph, cluster)
    fitted = engines.get("torch-offload").fit(problem)
    return replace(fitted, execution=replace(fitted.execution, prefetch=prefetch))


def by_hand(problem, mode):
    """mode: module -> (device that computes, device of the weights)."""
    graph, placement = problem.graph, np.zeros(problem.num_ops, np.int32)
    for op, (name, module) in enumerate(zip(graph.op_names, graph.op_modules, strict=True)):
        compute, home = mode(module) if module else mode("model.embed_tokens")
        placement[op] = home if name.endswith(WEIGHTS) else compute
    return Plan(problem, placement, None, float(evaluate(problem, placement).value[0]), 0.0, "hand", "0")


def random_modes(seed, gpus=(0,)):
    rng = np.random.default_rng(seed)
    chosen = {}

    def mode(module):
        if module == "lm_head":
            module = "model.embed_tokens"  # tied, in one of the models
        if module not in chosen:
            kind, gpu = rng.integers(0, 3), int(rng.choice(gpus))
            chosen[module] = [(gpu, gpu), (1, 1), (gpu, 1)][kind]
            if module == "model.embed_tokens":
                chosen[module] = (chosen[module][0],) * 2
        return chosen[module]

    return mode


def tokens(model):
    prompt = torch.arange(1, 8)[None] % 100
    return model.generate(prompt, max_new_tokens=6, do_sample=False)


# ---- problems --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("decode", [False, True])
def test_parts_keep_the_work_and_the_weights(kind, decode):
    whole = graph_of(kind, decode=decode)
    fitted = problem_of(kind, decode=decode)
    graph = fitted.graph
    assert graph.flops.sum() == pytest.approx(whole.flops.sum())
    assert graph.resident_bytes.sum() == pytest.approx(whole.resident_bytes.sum())
    streamable = [name for name in graph.op_names if name.endswith(WEIGHTS)]
    assert len(streamable) == 12 + 2 * (kind in ("dense", "experts"))  # of tied pieces, none
    for i in range(6):
        names = [f"model.layers.{i}{end}" for end in ("", AFTER)]
        units = {int(fitted.unit[graph.op_index(name)]) for name in names}
        assert len(units) == 1
    assert fitted.num_ops < 0.5 * whole.num_ops


def test_the_workspace_of_a_part_is_counted():
    """Two tensors of 100 and 60 bytes live at once inside a part; a third of 30 comes when the first is gone."""
    from placewise.engines.torch_offload import _workspace
    from placewise.graph import Graph
    from placewise.transforms import contract

    graph = Graph.create(
        op_names=list("abcd"), tensor_producer=[0, 1, 2, 3], tensor_bytes=[100.0, 60.0, 30.0, 7.0],
        edge_tensor=[0, 1, 2], edge_consumer=[1, 2, 3],
    )  # fmt: skip
    label = np.zeros(4, np.int64)
    assert _workspace(graph, label, contract(graph, label).graph).tolist() == [160.0]


def test_throughput_and_other_models_are_refused():
    fit = engines.get("torch-offload").fit
    problem = problem_of("dense")
    with pytest.raises(Unsupported, match="one request at a time"):
        fit(replace(problem, objective="throughput"))
    assert fit(problem) is problem
    from placewise import zoo

    with pytest.raises(Unsupported, match="no list of layers"):
        fit(Problem(zoo.load("inception-v3"), problem.cluster))


def test_planners_mix_modes_as_the_link_has_it():
    """A fast link: what does not fit is streamed. A slow one: it is computed where it is."""
    used = {}
    for link in (1e8, 1e12):
        found = plan(problem_of("dense", link=link), "auto", budget=Budget(evaluations=3000))
        assert violations(found.problem, found.placement) == []
        used[link] = {tuple(entry.values()) for entry in modes(found).values()}
    assert ("gpu", "cpu") in used[1e12]
    assert ("gpu", "cpu") not in used[1e8]
    assert used[1e8] >= {("gpu", "gpu"), ("cpu", "cpu")}


def test_a_mix_of_phases_takes_the_plan_with_the_least_sum():
    """Many tokens want parts on the CPU, a prompt wants them streamed."""
    from placewise.engines.torch_offload import best_for_mix

    phases = [problem_of("dense", decode=decode, link=3e8) for decode in (False, True)]
    prompt, token = (by_hand(p, lambda m, mode=mode: mode if ".layers." in m else (0, 0))
                     for p, mode in zip(phases, ((0, 1), (1, 1)), strict=True))  # fmt: skip
    times = np.array([
        [float(evaluate(p, by_hand(p, lambda m, mode=mode: mode if ".layers." in m else (0, 0)).placement).value[0])
         for p in phases] for mode in ((0, 1), (1, 1))
    ])  # fmt: skip
    assert times[0, 0] < times[1, 0]
    assert times[0, 1] > times[1, 1]
    for count in (0.01, 1, 100):
        wanted = (prompt, token)[int((times @ [1, count]).argmin())]
        assert best_for_mix([(prompt, 1), (token, count)]) is wanted


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("seed", range(3))
def test_outputs_and_tokens_are_those_of_the_model(kind, seed):
    model = model_of(kind)
    prompt = torch.arange(1, 8)[None]
    with torch.no_grad():
        wanted, written = model(prompt).logits, tokens(model)
    found = by_hand(problem_of(kind, share=9.0, prefetch=2 + seed), random_modes(seed))
    with found.apply(model, devices=BOTH_ON_CPU) as placed:
        with torch.no_grad():
            torch.testing.assert_close(placed(prompt).logits, wanted)
            torch.testing.assert_close(model(prompt).logits, wanted)  # again, with what was fetched ahead
        assert torch.equal(tokens(model), written)
    with torch.no_grad():  # and when it is over
        torch.testing.assert_close(model(prompt).logits, wanted)
    assert not any(weight.is_pinned() for weight in model.parameters())


def test_a_planned_mix_runs():
    model = model_of("experts")
    written = tokens(model)
    found = plan(problem_of("experts", share=0.55, link=2e10), "auto", budget=Budget(evaluations=2000))
    told = {tuple(entry.values()) for entry in modes(found).values()}
    assert ("gpu", "gpu") in told
    assert len(told) > 1
    with found.apply(model, devices=BOTH_ON_CPU) as placed:
        assert torch.equal(tokens(model), written)
        assert placed.held["gpu"] <= found.problem.capacity[0]


def test_copies_that_are_late_are_waited_for(monkeypatch):
    copied = offloading._Copier._copied

    def slow(source, target):
        time.sleep(0.01)
        copied(source, target)

    monkeypatch.setattr(offloading._Copier, "_copied", staticmethod(slow))
    model = model_of("dense")
    written = tokens(model)
    found = by_hand(problem_of("dense", share=9.0), lambda module: (0, 1 if "layers" in module else 0))
    with found.apply(model, devices=BOTH_ON_CPU):
        assert torch.equal(tokens(model), written)


def test_modules_out_of_turn_are_fetched_when_they_come():
    model = model_of("dense")
    found = by_hand(problem_of("dense", share=9.0), lambda module: (0, 1 if "layers" in module else 0))
    block, x = model.model.layers[4].mlp, torch.randn(1, 3, 32)
    with torch.no_grad():
        wanted = block(x)
        with found.apply(model, devices=BOTH_ON_CPU):
            torch.testing.assert_close(block(x), wanted)
            torch.testing.assert_close(block(x), wanted)
            tokens(model)
            torch.testing.assert_close(model.model.layers[2].mlp(x), model.model.layers[2].mlp(x))


def test_only_the_ring_and_the_residents_are_on_the_device():
    """Memory is counted: what is resident, and room for any two parts in a row that stream."""
    model = model_of("dense")
    found = by_hand(
        problem_of("dense", share=9.0),
        lambda module: (0, 1 if module.startswith("model.layers.") and "0" not in module else 0),
    )
    size = {name: sum(w.numel() * 4 for w in part.parameters()) for name, part in model.named_modules()}
    layer, block = size["model.layers.0"], size["model.layers.0.mlp"]
    with found.apply(model, devices=BOTH_ON_CPU) as placed:
        rest = size["model.embed_tokens"] + size["lm_head"] + size["model.norm"] + layer
        assert placed.held["gpu"] == pytest.approx(rest + (layer - block) + block, rel=1e-2)  # weights are aligned
        assert placed.held["cpu"] == pytest.approx(5 * layer, rel=1e-2)
        (ring,) = placed._rings.values()
        homes = {weight.untyped_storage().data_ptr() for weight in model.model.layers[3].parameters()}
        assert homes == {ring._memory.data_ptr()}
        assert ring.bytes == len(ring._memory) == pytest.approx(layer, rel=1e-2)


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("seed", range(20))
def test_parts_that_are_near_lie_side_by_side(seed, window, around):
    rng = np.random.default_rng(seed)
    sizes = rng.choice([1, 10, 25], rng.integers(1, 12)).tolist()
    places, count = offloading._side_by_side(sizes, window, around), len(sizes)
    for a in range(count):
        for b in range(count):
            apart = min((a - b) % count, (b - a) % count) if around else abs(a - b)
            if a != b and apart < window:
                assert places[a] + sizes[a] <= places[b] or places[b] + sizes[b] <= places[a]
    rows = sizes + sizes if around else sizes
    together = max(sum(rows[k : k + min(window, count)]) for k in range(count))
    total = offloading._end(places, sizes)
    assert together <= total <= 2 * together
    if window == 2 and not around:
        assert total == together


def test_parts_of_two_sizes_in_turn_take_no_more_than_two():
    for sizes in ([3, 10] * 8, [3, 10, 3, 10, 10, 3, 3, 10]):
        for around in (True, False):
            both = max(a + b for a, b in zip(sizes, [*sizes[1:], sizes[0] if around else 0], strict=True))
            assert offloading._end(offloading._side_by_side(sizes, 2, around), sizes) == both
    assert offloading._end(offloading._side_by_side([10] * 5, 2, True), [10] * 5) == 30  # an odd number, in a circle
    assert offloading._end(offloading._side_by_side([10] * 5, 2, False), [10] * 5) == 20


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("share", [0.3, 0.6])
@pytest.mark.parametrize("link", [1e8, 1e10])
@pytest.mark.parametrize("prefetch", [2, 3])
def test_what_is_planned_has_room(kind, share, link, prefetch):
    """Up to the last byte that the plan may use."""
    problem = problem_of(kind, share=share, link=link, prefetch=prefetch)
    found = plan(problem, "offload", budget=Budget(evaluations=300))
    model = model_of(kind)
    written = tokens(model)
    with found.apply(model, devices=BOTH_ON_CPU):
        assert torch.equal(tokens(model), written)


def test_fetches_keep_to_the_window():
    """The k-th part is fetched when the one two before it has been released, and not before."""
    order = []
    model = model_of("dense")
    found = by_hand(problem_of("dense", share=9.0), lambda module: (0, 1 if "layers" in module else 0))
    with found.apply(model, devices=BOTH_ON_CPU) as placed:
        (ring,) = placed._rings.values()
        fetch, release = ring._fetch, ring.release
        ring._fetch = lambda number: (order.append(("fetch", number)), fetch(number))
        ring.release = lambda part: (order.append(("release", part.number)), release(part))
        with torch.no_grad():
            model(torch.arange(4)[None])
    fetched = [number for what, number in order if what == "fetch"]
    assert fetched == [*range(2, 12), 0, 1]
    for at, (what, number) in enumerate(order):
        if what == "fetch":
            assert ("release", (number - 2) % 12) in order[:at]


def test_a_plan_over_the_memory_is_refused():
    found = by_hand(problem_of("dense", share=0.5), lambda module: (0, 0))
    with pytest.raises(InvalidInput, match=r"gpu would hold .*, and has .*: plan with less memory"):
        found.apply(model_of("dense"), devices=BOTH_ON_CPU)


@pytest.mark.parametrize("prefetch", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 3, 5])
def test_a_call_that_fails_leaves_nothing_for_the_next(monkeypatch, prefetch, at):
    model, prompt = model_of("dense"), torch.arange(1, 8)[None]
    with torch.no_grad():
        wanted = model(prompt).logits
    found = by_hand(problem_of("dense", share=9.0, prefetch=prefetch), lambda m: (0, 1 if "layers" in m else 0))
    with found.apply(model, devices=BOTH_ON_CPU) as placed, torch.no_grad():
        for error in (RuntimeError("boom"), KeyboardInterrupt(), None):
            if error is None:
                with pytest.raises(IndexError):
                    placed(torch.full((1, 4), 9999))  # there is no such token
            else:
                with monkeypatch.context() as patch:
                    patch.setattr(model.model.layers[at].mlp.down_proj, "forward", raiser(error))
                    with pytest.raises(type(error)):
                        placed.timed(lambda: placed(prompt))
            for _ in range(2):
                assert torch.equal(placed(prompt).logits, wanted)
            assert len(placed.timed(lambda: placed(prompt))) == len(placed._parts)


def raiser(error):
    def forward(*_, **__):
        raise error

    return forward


def test_a_call_without_memory_is_said(monkeypatch):
    model, prompt = model_of("dense"), torch.arange(1, 8)[None]
    found = by_hand(problem_of("dense", share=9.0), lambda m: (0, 1 if "layers" in m else 0))
    with found.apply(model, devices=BOTH_ON_CPU) as placed, torch.no_grad():
        monkeypatch.setattr(model.model.layers[2].mlp, "forward", raiser(torch.OutOfMemoryError("CUDA out of memory")))
        with pytest.raises(PlacewiseError, match="not enough memory for this call: CUDA out of memory"):
            placed(prompt)


def test_weights_get_gradients_again_when_it_is_over():
    model = model_of("dense")
    model.model.norm.weight.requires_grad_(False)
    with by_hand(problem_of("dense", share=9.0), lambda m: (0, 1 if "layers" in m else 0)).apply(
        model, devices=BOTH_ON_CPU
    ):
        assert not any(weight.requires_grad for weight in model.parameters())
    assert [name for name, weight in model.named_parameters() if not weight.requires_grad] == ["model.norm.weight"]
    model(torch.arange(4)[None]).logits.square().mean().backward()


def test_other_models_and_plans_are_refused():
    found = by_hand(problem_of("dense", share=9.0), lambda module: (0, 0))
    with pytest.raises(InvalidInput, match=r"the plan has no module 'model\.layers\.6'"):
        found.apply(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 8})),
                    devices=BOTH_ON_CPU)  # fmt: skip
    with pytest.raises(InvalidInput, match=r"it has no module 'model\.layers\.5"):
        found.apply(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 5})),
                    devices=BOTH_ON_CPU)  # fmt: skip
    with pytest.raises(InvalidInput, match="has weights of"):
        found.apply(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"intermediate_size": 48})),
                    devices=BOTH_ON_CPU)  # fmt: skip
    with torch.device("meta"), pytest.raises(InvalidInput, match="meta device"):
        found.apply(transformers.LlamaForCausalLM(CONFIGS["dense"]), devices=BOTH_ON_CPU)
    graph = graph_of("dense", prompt=8, decode=False)
    ops = Plan(Problem(graph, found.problem.cluster), np.zeros(graph.num_ops, np.int32), None, 1.0, 0.0, "hand", "0")
    with pytest.raises(InvalidInput, match="plan with `--engine torch-offload`"):
        ops.apply(model_of("dense"), devices=BOTH_ON_CPU)
    if not torch.cuda.is_available():
        with pytest.raises(InvalidInput, match="torch sees 0 CUDA devices"):
            found.apply(model_of("dense"))


def test_a_full_device_leaves_a_plain_model(monkeypatch):
    model = model_of("dense")
    written = tokens(model)
    found = by_hand(problem_of("dense", share=9.0), lambda module: (0, 1 if "layers.3" in module else 0))

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(offloading._Ring, "add", full)
    with pytest.raises(PlacewiseError, match="not enough memory"):
        found.apply(model, devices=BOTH_ON_CPU)
    assert torch.equal(tokens(model), written)


# ---- the same plan for others ----------------------------------------------------------------------------------------


def test_a_plan_exports_as_a_device_map_and_as_flags(capsys):
    """accelerate and llama.cpp are told where weights are; accelerate computes what is on "cpu" on the GPU."""
    import json

    def mode(module):
        layer = module.split(".")[2] if ".layers." in module else ""
        return {"1": (0, 1), "2": (1, 1), "3": (0, 1 if module.endswith("mlp") else 0)}.get(layer, (0, 0))

    found = by_hand(problem_of("dense", share=9.0), mode)
    places = json.loads(engines.get("accelerate").export(found))
    assert [places[f"model.layers.{i}"] for i in range(6)] == [0, "cpu", "cpu", "cpu", 0, 0]
    assert places["lm_head"] == 0
    assert "computes it on the GPU" in capsys.readouterr().err
    assert engines.get("llama.cpp").export(found) == (
        "-c 17 -ngl 7 -ot 'blk\\.(3)\\.ffn_(up|down|gate).*=CPU,blk\\.(1|2)\\.=CPU'\n"
    )
    assert "and llama.cpp computes there" in capsys.readouterr().err


@pytest.mark.parametrize("kind", CONFIGS)
def test_llama_cpp_takes_the_parts_of_every_model(kind):
    """Also where an embedding does more than look up."""
    found = by_hand(problem_of(kind, 9.0), lambda _: (0, 0))
    assert engines.get("llama.cpp").export(found) == "-c 17 -ngl 7\n"


@pytest.mark.parametrize(("computed", "streamed", "flag"), [(1, 2, False), (2, 1, True), (1, 0, True)])
def test_llama_cpp_copies_weights_for_a_prompt_where_the_plan_streams_more_than_it_computes(computed, streamed, flag):
    graph = graph_of("dense", prompt=64, decode=False)
    fitted = engines.get("torch-offload").fit(Problem(graph, problem_of("dense", 9.0).cluster))
    modes = dict(enumerate([(1, 1)] * computed + [(0, 1)] * streamed))
    found = by_hand(fitted, lambda module: modes.get(int(module.split(".")[2]) if ".layers." in module else -1, (0, 0)))
    assert ("-c 64 --no-op-offload -ngl" in engines.get("llama.cpp").export(found)) is flag


def test_accelerate_runs_the_map():
    accelerate = pytest.importorskip("accelerate")
    import json

    model = model_of("dense")
    written = tokens(model)
    found = by_hand(problem_of("dense", share=9.0), lambda module: (0, 1) if ".layers.2" in module else (0, 0))
    places = json.loads(engines.get("accelerate").export(found))
    on_cpu = dict.fromkeys(places, "cpu")
    on_cpu["model.layers.2"] = "disk"
    accelerate.utils.check_device_map(model, places)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        placed = accelerate.dispatch_model(model, on_cpu, main_device="cpu", offload_dir=folder)
        assert torch.equal(tokens(placed), written)


def test_the_page_of_the_docs_runs(run):
    """Its commands with few evaluations instead of seconds, then its Python on the logical devices of a CPU."""
    import json
    import re
    from pathlib import Path

    page = (Path(__file__).parents[1] / "docs" / "does-not-fit.md").read_text(encoding="utf-8")
    (config,) = re.findall(r"^```json\n(.*?)^```", page, re.M | re.S)
    (commands,) = re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S)
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    Path("config.json").write_text(config, encoding="utf-8")
    for line in commands.splitlines():
        words = line.replace("--budget 20s", "--evaluations 300").split()
        done = run(*words[1:])
        assert done.code == 0, done.err
    parts = json.loads(Path("modes.json").read_text()).values()
    assert {part["compute"] for part in parts} == {"cpu", "gpu0"}
    exec(code.replace("plan.apply(model)", "plan.apply(model, devices={'gpu0': 'cpu'})"), {})


# ---- verify ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "prompt", "decode"), [(1, 16, True), (2, 12, True), (1, 16, False), (3, 5, False)])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_verify_runs_the_phase_of_the_plan(tmp_path, kind, batch, prompt, decode):
    from placewise.engines.phase import phase

    CONFIGS[kind].to_json_file(tmp_path / "config.json")
    graph = graph_of(kind, batch, prompt, decode)
    fitted = engines.get("torch-offload").fit(Problem(graph, problem_of(kind, 9.0).cluster))
    found = by_hand(fitted, random_modes(batch + prompt))
    assert phase(graph) == phase(fitted.graph) == ((batch, 1, prompt) if decode else (batch, prompt, 0))
    seen = verify(found, str(tmp_path), devices=BOTH_ON_CPU, seconds=0.0, within=1e9)
    assert seen.engine == "torch-offload"
    assert seen.holds, seen.findings
    told = {finding.claim: finding for finding in seen.findings}
    assert told["outputs"].found < 1e-5
    assert told["placement"].found == len(modes(found))
    assert {"memory of gpu (counted)", "memory of cpu (counted)"} <= set(told)
    assert {claim for claim in told if claim.startswith("busy ")} == {
        f"busy {mode['compute']}" for mode in modes(found).values()
    }


def test_verify_refuses_another_model(tmp_path):
    transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 5}).to_json_file(tmp_path / "config.json")
    found = by_hand(problem_of("dense", 9.0), lambda module: (0, 0))
    with pytest.raises(InvalidInput, match="not the model of this plan"):
        verify(found, str(tmp_path / "config.json"), devices=BOTH_ON_CPU)
    CONFIGS["dense"].to_json_file(tmp_path / "config.json")
    graph = graph_of("dense", prompt=8, decode=False)
    ops = Plan(Problem(graph, found.problem.cluster), np.zeros(graph.num_ops, np.int32), None, 1.0, 0.0, "hand", "0")
    with pytest.raises(InvalidInput, match="plan with `--engine torch-offload`"):
        verify(ops, str(tmp_path / "config.json"), devices=BOTH_ON_CPU)


def test_verify_refuses_a_model_that_the_host_has_no_room_for_twice(tmp_path, monkeypatch):
    from placewise import machine

    CONFIGS["dense"].to_json_file(tmp_path / "config.json")
    found = by_hand(problem_of("dense", 9.0), lambda module: (0, 0))
    weights = float(found.problem.graph.resident_bytes.sum())
    monkeypatch.setattr(machine, "host_memory", lambda: (1.9 * weights, 2.0**40))
    with pytest.raises(Unsupported, match=r"with and without a plan, takes .* of host memory, and .* is free"):
        verify(found, str(tmp_path), devices=BOTH_ON_CPU, seconds=0.0)


# ---- measured --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_measured_times_replace_modelled_ones(kind):
    model = model_of(kind)
    problem = problem_of(kind, share=0.6)
    with torch.no_grad():
        found = offloading.measured(
            problem, model, lambda _: model(torch.arange(4)[None]), devices=BOTH_ON_CPU, rounds=2
        )
    graph = found.graph
    parts = [op for op, module in enumerate(graph.op_modules)
             if module and not graph.is_stored[op] and not graph.op_names[op].endswith(AFTER)]  # fmt: skip
    assert (found.costs.label[parts] == 2).all()
    assert (found.costs.seconds[parts] > 0).all()
    alike = [graph.op_index(f"model.layers.{i}.mlp") for i in range(6)]
    assert len({tuple(found.costs.seconds[op]) for op in alike}) == 1
