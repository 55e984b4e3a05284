"""Plans as pipelines of processes: the script that is written for torchrun, run with two processes on the CPU."""

import copy
import re
import signal
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from placewise import Budget, engines, plan, zoo  # noqa: E402
from placewise.cluster import Device, full_mesh  # noqa: E402
from placewise.engines.pieces import pieces  # noqa: E402
from placewise.errors import InvalidInput, Unsupported  # noqa: E402
from placewise.importers.torch_export import from_torch  # noqa: E402
from placewise.plans import Plan  # noqa: E402
from placewise.problem import Execution, Problem  # noqa: E402

MODELS = """
import os, signal, time
import torch
from torch import nn
from torch.nn import functional as F

SMALL = dict(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.begin = nn.Linear(8, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.end = nn.Linear(16, 4)

    def forward(self, x):
        x = self.begin(x)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.end(x)


def words(out, want):
    return F.cross_entropy(out.flatten(0, 1), want.flatten())


def net():
    return Net(), (torch.randn(16, 8),)


def net_step():
    return *net(), torch.randn(16, 4), F.mse_loss


def killing():  # the second process kills whom the test names
    with open(f"{os.environ['RANK']}.pid", "w") as file:
        file.write(str(os.getpid()))

    def loss(out, want):
        os.kill({"torchrun": os.getppid(), "process": os.getpid()}[os.environ["VICTIM"]], signal.SIGKILL)
        time.sleep(60)

    return *net(), torch.randn(16, 4), loss


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=False)
    return LlamaForCausalLM(config), (torch.randint(50, (16, 6)),)


def llama_step():
    return *llama(), torch.randint(50, (16, 6)), words


def bert():
    from transformers import BertConfig, BertModel

    still = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertModel(BertConfig(**SMALL, **still), add_pooling_layer=False), (torch.randint(50, (16, 6)),)


def bert_step():
    return *bert(), torch.randn(16, 6, 16), F.mse_loss


def padded():
    mask = torch.ones(16, 6, dtype=torch.long)
    mask[:8, :2] = 0
    return (model := llama())[0], {"input_ids": model[1][0], "attention_mask": mask}


def padded_step():
    return *padded(), torch.randint(50, (16, 6)), words


def gemma2():  # scales what it embeds, and caps what its head makes
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=4, tie_word_embeddings=False)
    return Gemma2ForCausalLM(config), (torch.randint(50, (16, 6)),)


def gemma3():  # layers of two kinds, by their number
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        **SMALL, num_key_value_heads=2, head_dim=4, tie_word_embeddings=False, sliding_window=4, layer_types=kinds
    )
    return Gemma3ForCausalLM(config), (torch.randint(50, (16, 6)),)


def t5():  # the first layer makes a bias that all read
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=32, num_layers=4, num_heads=4)
    return T5EncoderModel(config), (torch.randint(50, (16, 6)),)
"""

#: Runs several scripts in one group of processes: to start one takes most of the time.
ALL = """
import importlib, sys
import torch
import torch.distributed as dist

torch.set_num_threads(1)
for case in sys.argv[1:]:
    script, _, model = case.partition(":")
    if importlib.import_module(script).main([f"models:{model}", "--check", "--steps", "0"]):
        sys.exit(f"{case}: differs")
    if dist.get_rank() == 1:
        print("equal", case, flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def models():
    found = types.ModuleType("models")
    exec(MODELS, found.__dict__)
    return found


def placed(module, args, device_of_layer, **execution):
    """A plan by hand; what is beside the layers goes with the first or the last of them."""
    cpus = [Device(f"cpu{i}", kind="cpu", flops={"default": 1e11}, bandwidth=1e10) for i in range(2)]
    args, kwargs = ((), args) if isinstance(args, dict) else (args, {})
    graph = from_torch(module.eval(), args, kwargs).collapse_parameters().graph
    question = Problem(graph, full_mesh(cpus, 1e10), objective="throughput", execution=Execution(**execution))
    fitted = engines.get("pipelining").fit(question)
    found = pieces(graph)
    first, last = found.layers[0], found.layers[-1]
    layer = np.where(found.of_op < 0, -1, found.of_op - first)
    place = np.array([device_of_layer(number) for number in range(-1, last - first + 2)], np.int32)
    place = place[np.clip(layer + 1, 0, last - first + 2)]
    return Plan(fitted, place, None, 1.0, 0.0, "hand", "0")


def written(plan):
    return engines.get("pipelining").export(plan)


def launch(folder, *arguments, timeout=120):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout)


def test_results_are_those_of_one_process(tmp_path, models):
    """Traced and by layers, inference and training, 1F1B, GPipe and interleaved."""
    torch.manual_seed(0)
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "all.py").write_text(ALL)
    halves, in_turn = (lambda layer: int(layer >= 2)), (lambda layer: layer % 2)
    for name in ("net", "llama", "bert", "padded", "gemma2", "gemma3"):
        (tmp_path / f"{name}_halves.py").write_text(written(placed(*getattr(models, name)(), halves)))
    (tmp_path / "net_gpipe.py").write_text(written(placed(*models.net(), halves, pipeline="gpipe", microbatches=2)))
    for name in ("net", "llama"):
        (tmp_path / f"{name}_in_turn.py").write_text(written(placed(*getattr(models, name)(), in_turn, microbatches=4)))
    cases = [
        "net_halves:net", "net_halves:net_step", "net_gpipe:net_step", "net_in_turn:net", "net_in_turn:net_step",
        "llama_halves:llama", "llama_halves:llama_step", "llama_in_turn:llama_step",
        "bert_halves:bert", "bert_halves:bert_step", "padded_halves:padded_step", "gemma2_halves:gemma2",
        "gemma3_halves:gemma3",
    ]  # fmt: skip
    done = launch(tmp_path, "all.py", *cases)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("equal")] == cases
    assert done.stdout.count("outputs and gradients differ from those of one process by at most") == 7


def checked(found, module, args):
    """The differences of all stages of a script, which `check_parts` refuses where they are not small."""
    first, others = found.batch_of(module, args)
    parts = {number: found.kept(copy.deepcopy(module), number) for number in range(len(found.STAGES))}
    found.check_parts(parts, module, first, others)


@pytest.mark.parametrize("after", [-1, 0, 1, 3])  # the first stage ends here: before all layers, or after all
@pytest.mark.parametrize("name", ["llama", "padded", "gemma2", "gemma3"])
def test_stages_make_what_the_whole_model_makes(models, name, after):
    torch.manual_seed(0)
    module, args = getattr(models, name)()
    found = script(written(placed(module, args, lambda layer: int(layer > after))))
    assert [len(found.layers_of(number)) for number in range(2)] == [after + 1, 3 - after]
    checked(found, module, args)


def test_layers_that_read_more_than_hidden_states_are_refused(models):
    torch.manual_seed(0)
    module, args = models.t5()
    found = script(written(placed(module, args, lambda layer: int(layer > 1))))
    with pytest.raises(SystemExit, match="cannot be cut as the plan says: what stage 1 makes differs"):
        checked(found, module, args)


def test_a_batch_by_name_is_for_models_that_are_cut_by_their_layers(models):
    found = script(written(placed(*models.net(), lambda layer: int(layer > 1))))
    with pytest.raises(SystemExit, match="return a tuple"):
        found.batch_of(models.net()[0], {"x": torch.ones(16, 8)})


def test_looking_at_a_model_leaves_it_as_it_was(models):
    found = script(written(placed(*models.net(), lambda layer: int(layer > 1))))
    module = torch.nn.BatchNorm1d(4)
    state = torch.random.get_rng_state()
    with found.undisturbed(module):
        module(torch.randn(8, 4))
    assert torch.equal(module.running_mean, torch.zeros(4))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_command_of_the_docs_runs(tmp_path, models):
    page = (Path(__file__).parents[1] / "docs/engines/pipelining.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^torchrun --nproc-per-node 2 (.*)$", page, re.M)
    (tmp_path / "mymodel.py").write_text(f"{MODELS}\nbuild = net_step\n")
    (tmp_path / "pipeline.py").write_text(written(placed(*models.net(), lambda layer: int(layer >= 2))))
    done = launch(tmp_path, *line.split())
    assert done.returncode == 0, done.stderr[-2000:]
    assert "outputs and gradients differ from those of one process by at most" in done.stdout


@pytest.mark.parametrize("victim", ["process", "torchrun"])
def test_nobody_is_left_when_one_is_killed(tmp_path, models, monkeypatch, victim):
    """The first process waits for the second, for a minute at most; torchrun looks after both."""
    monkeypatch.setenv("VICTIM", victim)
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "pipeline.py").write_text(written(placed(*models.net(), lambda layer: int(layer >= 2))))
    done = launch(tmp_path, "pipeline.py", "models:killing", timeout=55)
    assert done.returncode == {"process": 1, "torchrun": -signal.SIGKILL}[victim]
    if victim == "process":
        assert "Signal 9 (SIGKILL) received" in done.stderr
    pids = ",".join((tmp_path / f"{rank}.pid").read_text() for rank in range(2))
    deadline = time.monotonic() + 10
    while states := subprocess.run(["ps", "-o", "stat=", "-p", pids], capture_output=True, text=True).stdout.split():
        if all(state.startswith("Z") for state in states):
            break  # ended, and nobody has asked
        assert time.monotonic() < deadline, states
        time.sleep(0.2)


def script(text):
    found = types.ModuleType("script")
    exec(compile(text, "pipeline.py", "exec"), found.__dict__)
    return found


def test_what_the_script_says(models):
    found = script(written(placed(*models.llama(), lambda layer: int(layer >= 3))))
    assert found.STAGES[1] == ["model.layers.3", "model.norm", "lm_head"]
    assert (found.RANKS, found.DEVICES, found.LAYERS) == ([0, 1], ["cpu", "cpu"], "model.layers")
    assert (found.SCHEDULE, found.MICROBATCHES) == ("1f1b", 8)


def test_wrong_models_and_wrong_numbers_of_processes_are_told(models, monkeypatch):
    found = script(written(placed(*models.net(), lambda layer: int(layer >= 2))))
    with pytest.raises(SystemExit, match="not the model of this plan: it has no module 'begin'"):
        found.check_model(models.llama()[0])
    longer = models.Net()
    longer.layers.append(torch.nn.Linear(16, 16))
    with pytest.raises(SystemExit, match="layers has 5 layers, not 4"):
        found.check_model(longer)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="the plan has 2 processes, and there are 1: torchrun --nproc-per-node 2"):
        found.main(["models:net"])
    for told, message in (
        ("", "MODULE:FUNCTION: Empty module name"),
        ("nowhere:net", "MODULE:FUNCTION: No module named 'nowhere'"),
        ("nowhere.models:net", "No module named 'nowhere'"),
        ("json", "json has no function ''"),
        ("json:decoder", "json has no function 'decoder'"),
    ):
        with pytest.raises(SystemExit, match=message):
            found.builder(told)
    tied = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50))
    with pytest.raises(SystemExit, match="tied"):
        found.check_ties(tied)


def test_a_plan_that_is_no_pipeline_is_refused(models):
    with pytest.raises(InvalidInput, match="comes back to a device before it was on all"):
        written(placed(*models.net(), lambda layer: int(layer == 1)))
    box = placed(*models.net(), lambda layer: 0).problem.cluster
    graph = from_torch(torch.nn.Linear(4, 4), (torch.ones(1, 4),)).collapse_parameters().graph
    with pytest.raises(Unsupported, match="no modules"):
        engines.get("pipelining").fit(Problem(graph, box))


def test_processes_are_on_gpus_alone_or_on_cpus_alone(models):
    by_hand = placed(*models.net(), lambda layer: int(layer > 1))
    first, second = by_hand.problem.cluster.devices
    mixed = [replace(first, kind="gpu"), second]
    problem = replace(by_hand.problem, cluster=replace(by_hand.problem.cluster, devices=mixed))
    assert engines.get("pipelining").fit(problem).forbidden == ("cpu1",)
    with pytest.raises(InvalidInput, match="stages on CPUs and on GPUs"):
        written(replace(by_hand, problem=problem))


@pytest.mark.parametrize("model", ["bert-base", "inception-v3", "resnet-50"])
def test_plans_for_throughput_are_pipelines(model):
    gpus = [Device(f"gpu{i}", memory=2**35, flops={"default": 1e13}, bandwidth=1e12) for i in range(3)]
    graph = zoo.load(model).collapse_parameters().graph
    fitted = engines.get("pipelining").fit(Problem(graph, full_mesh(gpus, 1e11), objective="throughput"))
    found = script(written(plan(fitted, "auto", budget=Budget(evaluations=200))))
    assert sorted(found.DEVICES) == ["cuda:0", "cuda:1", "cuda:2"]
    assert [name for stage in found.STAGES for name in stage] == list(pieces(graph).names)


def test_the_script_needs_torch_alone():
    from placewise.engines.pipelining import _SCRIPT

    lines = _SCRIPT.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if "import" in line and "placewise" in line] == []
