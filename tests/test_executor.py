from __future__ import annotations

import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from placewise import Budget, Problem, plan, zoo  # noqa: E402
from placewise.cluster import Device, full_mesh  # noqa: E402
from placewise.errors import InvalidInput, Unsupported  # noqa: E402
from placewise.importers.torch_export import from_torch  # noqa: E402
from placewise.plans import Plan  # noqa: E402


class Branches(nn.Module):
    """Two branches of a few layers, with a tuple and a keyword among inputs and outputs."""

    def __init__(self, width=16):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.right = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width))

    def forward(self, x, *, bias):
        a, b = self.left(x), self.right(x + bias).chunk(2, dim=-1)
        return {"sum": a + torch.cat(b, dim=-1), "parts": (b[0], a)}


def logical(count):
    devices = [Device(f"d{i}", kind="cpu", flops={"default": 1e11}, bandwidth=1e10) for i in range(count)]
    return full_mesh(devices, 1e10, 1e-6)


def plan_of(module, args, kwargs, count, seed=None):
    graph = from_torch(module, args, kwargs).collapse_parameters().graph
    problem = Problem(graph, logical(count))
    if seed is None:
        return plan(problem, "heft", budget=Budget(evaluations=1))
    placement = np.random.default_rng(seed).integers(0, count, problem.num_units)[problem.unit]
    return Plan(problem, placement, None, 1.0, 0.0, "random", "0")


def equal(a, b):
    flat_a, spec_a = torch.utils._pytree.tree_flatten(a)
    flat_b, spec_b = torch.utils._pytree.tree_flatten(b)
    assert spec_a == spec_b
    for one, other in zip(flat_a, flat_b, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_outputs_are_those_of_the_module(count, seed):
    module, args, kwargs = Branches().eval(), (torch.randn(3, 16),), {"bias": torch.randn(16)}
    placed = plan_of(module, args, kwargs, count, seed).apply(module, args, kwargs)
    with torch.no_grad():
        equal(placed(*args, **kwargs), module(*args, **kwargs))
        other = torch.randn(3, 16)  # other values, and again
        equal(placed(other, **kwargs), module(other, **kwargs))
    placed.close()


def test_gradients_are_those_of_the_module():
    module, args, kwargs = Branches(), (torch.randn(3, 16),), {"bias": torch.randn(16)}
    placed = plan_of(module, args, kwargs, 3, seed=2).apply(module, args, kwargs)
    found = []
    for called in (module, placed):
        module.zero_grad()
        called(*args, **kwargs)["sum"].square().sum().backward()
        found.append([parameter.grad.clone() for parameter in module.parameters()])
    equal(*found)
    placed.close()


@pytest.mark.parametrize("model", ["alexnet", "squeezenet", "googlenet", "resnet-50", "rnnlm"])
def test_models_of_the_zoo_run_as_placed(model):
    module, args = zoo.module(model)
    module, args = small(module, args)
    placed = plan_of(module, args, {}, 2, seed=0).apply(module, args)
    with torch.no_grad():
        equal(placed(*args), module(*args))
    assert all(placed.ran_on.values())
    placed.close()


def small(module, args):
    """The same model with values, one image or text instead of many."""
    from placewise.measure.pytorch import materialised

    fewer = [arg[:1] if arg.dim() == 4 else arg[:3, :2] for arg in args]
    return materialised(module, tuple(fewer), torch.device("cpu"))


def test_every_op_runs_where_the_plan_has_it():
    module, args, kwargs = Branches().eval(), (torch.randn(3, 16),), {"bias": torch.randn(16)}
    found = plan_of(module, args, kwargs, 2, seed=0)
    placed = found.apply(module, args, kwargs)
    seen = {}

    def record(name, op):
        def call(*given, **named):
            seen.setdefault(name, threading.current_thread().name)
            return op(*given, **named)

        return call

    for script in placed._scripts:
        for name, op in list(script._names.items()):
            if name[0] == "f" and name[1:].isdigit():
                script.function.__globals__[name] = record((id(script), name), op)
    with torch.no_grad():
        placed(*args, **kwargs)
    threads = {
        script: {thread for (owner, _), thread in seen.items() if owner == id(script)} for script in placed._scripts
    }
    assert all(len(names) == 1 for names in threads.values())
    assert len(set().union(*threads.values())) == 2
    placed.close()


def test_another_model_is_refused():
    module, args, kwargs = Branches().eval(), (torch.randn(3, 16),), {"bias": torch.randn(16)}
    found = plan_of(module, args, kwargs, 2)
    with pytest.raises(InvalidInput, match="not the model of this plan"):
        found.apply(Branches(8), (torch.randn(3, 8),), {"bias": torch.randn(8)})
    with pytest.raises(InvalidInput, match="not the model of this plan"):
        found.apply(nn.Linear(16, 16), args)


def test_a_device_that_is_not_there_is_said():
    module, args = nn.Linear(4, 4), (torch.randn(2, 4),)
    graph = from_torch(module, args).collapse_parameters().graph
    problem = Problem(
        graph,
        full_mesh([Device("gpu9", flops={"default": 1e12}), Device("cpu", kind="cpu", flops={"default": 1e12})], 1e9),
    )
    found = Plan(problem, np.zeros(graph.num_ops, np.int32), None, 1.0, 0.0, "hand", "0")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidInput, match=r"torch sees 0 CUDA devices; say what it is, as in devices=\{'gpu9'"):
            found.apply(module, args)
    with pytest.raises(InvalidInput, match="there is no device 'nope'; there are gpu9, cpu"):
        found.apply(module, args, devices={"nope": "cpu"})
    with pytest.raises(InvalidInput, match="devices: gpu9 = 'wat'"):
        found.apply(module, args, devices={"gpu9": "wat"})
    placed = found.apply(module, args, devices={"gpu9": "cpu"})
    equal(placed(*args), module(*args))


def test_a_worker_that_fails_ends_the_call_and_not_the_next():
    module, args, kwargs = Branches().eval(), (torch.randn(3, 16),), {"bias": torch.randn(16)}
    placed = plan_of(module, args, kwargs, 2, seed=0).apply(module, args, kwargs)
    with pytest.raises(RuntimeError):
        placed(torch.randn(3, 5), **kwargs)  # no layer takes this
    with torch.no_grad():
        equal(placed(*args, **kwargs), module(*args, **kwargs))
    with pytest.raises(InvalidInput, match="not of the form"):
        placed(*args)
    placed.close()


def test_what_writes_to_a_tensor_is_refused():
    class Writes(nn.Module):
        def forward(self, x):
            y = x + 1
            y.add_(2)
            return y

    module, args = Writes(), (torch.randn(2),)
    with pytest.raises(Unsupported, match="writes to a tensor"):
        plan_of(module, args, {}, 2).apply(module, args)


def test_the_example_of_the_docs_runs():
    import re
    from pathlib import Path

    page = (Path(__file__).parents[1] / "docs" / "engines.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    exec(code, {})
