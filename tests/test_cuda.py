"""What runs on a GPU, on a machine that has one."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA GPU", allow_module_level=True)
from torch import nn  # noqa: E402

from placewise import Problem, engines, zoo  # noqa: E402
from placewise.cluster import Device, full_mesh  # noqa: E402
from placewise.errors import PlacewiseError  # noqa: E402
from placewise.importers.torch_export import from_torch  # noqa: E402
from placewise.measure.pytorch import materialised  # noqa: E402
from placewise.plans import Plan  # noqa: E402
from placewise.verify import difference, verify  # noqa: E402

GPU, CPU = (
    Device("gpu0", memory=2**36, flops={"default": 1e13}, bandwidth=1e12),
    Device("cpu", kind="cpu", flops={"default": 1e12}, bandwidth=1e11),
)
BOX = full_mesh([GPU, CPU], 2e10, 1e-5)


@pytest.fixture(autouse=True)
def float32_all_through():
    kept = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = kept


def of(graph, placement):
    problem = engines.get("torch").fit(Problem(graph, BOX))
    return Plan(problem, np.asarray(placement, np.int32), None, 1.0, 0.0, "hand", "0")


def small(name):
    module, args = zoo.module(name)
    fewer = tuple(arg[:1] if arg.dim() == 4 else arg[:3, :2] for arg in args)
    return materialised(module, fewer, torch.device("cpu"))


@pytest.mark.parametrize("name", ["squeezenet", "googlenet", "resnet-50", "rnnlm", "bert-base", "gpt-2"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_outputs_are_those_of_the_module(name, seed):
    torch.manual_seed(0)
    module, args = small(name)
    with torch.no_grad():
        expected = [t for t in torch.utils._pytree.tree_leaves(module(*args)) if isinstance(t, torch.Tensor)]
    graph = from_torch(module, args).collapse_parameters().graph
    where = np.zeros(graph.num_ops) if seed is None else np.random.default_rng(seed).integers(0, 2, graph.num_ops)
    with of(graph, where).apply(module, args) as placed, torch.no_grad():
        for _ in range(3):
            found = [t for t in torch.utils._pytree.tree_leaves(placed(*args)) if isinstance(t, torch.Tensor)]
            for a, b in zip(expected, found, strict=True):
                assert difference(a.numpy(), b.cpu().numpy()) < 1e-4


def test_arguments_are_brought_to_where_the_plan_has_them():
    module, args = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), (torch.randn(2, 8),)
    graph = from_torch(module, args).collapse_parameters().graph
    for where, home in ((0, "cuda:0"), (1, "cpu")):
        with of(graph, np.full(graph.num_ops, where)).apply(module, args) as placed:
            assert str(placed.brought(args, {})[0][0].device) == home


@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_those_of_the_module(seed):
    torch.manual_seed(0)
    module, args = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)), nn.Tanh()), (torch.randn(8, 64),)
    graph = from_torch(module, args).collapse_parameters().graph
    module(*args).square().sum().backward()
    expected = [weight.grad.clone() for weight in module.parameters()]
    module.zero_grad()
    placement = np.random.default_rng(seed).integers(0, 2, graph.num_ops)
    with of(graph, placement).apply(module, args) as placed:
        placed(*args).square().sum().backward()
        for weight, grad in zip(module.parameters(), expected, strict=True):
            assert difference(grad.numpy(), weight.grad.cpu().numpy()) < 1e-4


def test_weights_at_home_on_the_host_are_fetched():
    torch.manual_seed(0)
    module, args = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12))).eval(), (torch.randn(8, 2048),)
    with torch.no_grad():
        expected = module(*args)
    graph = from_torch(module, args)
    with of(graph, graph.is_stored).apply(module, args) as placed, torch.no_grad():
        placed(*args)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        assert difference(expected.numpy(), placed(*args).cpu().numpy()) < 1e-4
        at_most = torch.cuda.max_memory_allocated() - before
    one = 4 * 2048 * 2048
    assert 2 * one <= at_most <= 4.5 * one  # two ahead and one that is read, of twelve


@pytest.mark.parametrize("seed", [0, 1])
def test_verify_reads_back_where_ops_ran(seed):
    graph = zoo.load("squeezenet").collapse_parameters().graph
    where = np.random.default_rng(seed).integers(0, 2, graph.num_ops)
    seen = {finding.claim: finding for finding in verify(of(graph, where), "squeezenet", seconds=1.0).findings}
    for claim in ("outputs", "placement", "link gpu0 to cpu", "link cpu to gpu0", "memory of gpu0"):
        assert not seen[claim].is_wrong, seen[claim]
    assert seen["placement"].found > 50
    assert seen["memory of gpu0"].found > 0


def test_a_gpu_without_room_is_said():
    module, args = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(4))).eval(), (torch.randn(8, 8192),)
    graph = from_torch(module, args).collapse_parameters().graph
    torch.cuda.empty_cache()
    room = (torch.cuda.memory_reserved() + 5e8) / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(room)
    try:
        with pytest.raises(PlacewiseError, match="memory"), torch.no_grad():
            of(graph, np.zeros(graph.num_ops)).apply(module, args)(*args)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        module.to("cpu")
        torch.cuda.empty_cache()
    with of(graph, np.zeros(graph.num_ops)).apply(module, args) as placed, torch.no_grad():
        assert placed(*args).shape == (8, 8192)


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("seed", range(3))
def test_models_that_do_not_fit_compute_the_same(kind, seed):
    pytest.importorskip("transformers")
    from test_offload import by_hand, model_of, problem_of, random_modes

    model, text = model_of(kind), torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = model(text).logits
    problem = problem_of(kind, share=9.0, prefetch=2 + seed % 2)
    with by_hand(problem, random_modes(seed)).apply(model), torch.no_grad():
        for _ in range(3):
            assert difference(expected.numpy(), model(text).logits.cpu().numpy()) < 1e-4
        assert model.generate(text, max_new_tokens=4, do_sample=False).shape == (1, 12)
