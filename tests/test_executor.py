from __future__ import annotations

import copy
import json
import os
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from placewise import Budget, Problem, engines, plan, zoo  # noqa: E402
from placewise.cluster import Device, full_mesh  # noqa: E402
from placewise.errors import InvalidInput, PlacewiseError, Unsupported  # noqa: E402
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

    for script in placed._form.scripts:
        for name, op in list(script._names.items()):
            if name[0] == "f" and name[1:].isdigit():
                script.function.__globals__[name] = record((id(script), name), op)
    with torch.no_grad():
        placed(*args, **kwargs)
    threads = {
        script: {thread for (owner, _), thread in seen.items() if owner == id(script)}
        for script in placed._form.scripts
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


class Writes(nn.Module):
    def forward(self, x):
        y = x + 1
        view = y[:2]
        y.add_(2)
        return view * 3, y


def test_what_writes_to_a_tensor_stays_with_what_shares_it():
    module, args = Writes(), (torch.randn(4),)
    together = plan_of(module, args, {}, 1).apply(module, args)
    equal(together(*args), module(*args))
    graph = from_torch(module, args).collapse_parameters().graph
    apart = np.array([int("mul" in name) for name in graph.op_names], np.int32)
    with pytest.raises(Unsupported, match=r"writes to a tensor that .* shares on d1: pin both"):
        Plan(Problem(graph, logical(2)), apart, None, 1.0, 0.0, "hand", "0").apply(module, args)


def test_the_order_of_a_plan_is_kept():
    module, args, kwargs = Branches().eval(), (torch.randn(3, 16),), {"bias": torch.randn(16)}
    free = plan_of(module, args, kwargs, 2, seed=0)
    rng = np.random.default_rng(0)
    graph, order = free.problem.graph, []
    left = np.bincount(graph.consumers, minlength=graph.num_ops)
    while len(order) < graph.num_ops:  # any topological order
        order.append(int(rng.choice([op for op in np.flatnonzero(left == 0) if op not in order])))
        for edge in np.flatnonzero(graph.edge_producer == order[-1]):
            left[graph.consumers[edge]] -= 1
    ordered = Plan(free.problem, free.placement, np.array(order), 1.0, 0.0, "hand", "0")
    with ordered.apply(module, args, kwargs) as placed, torch.no_grad():
        equal(placed(*args, **kwargs), module(*args, **kwargs))
        for d, name in enumerate(("d0", "d1")):
            wanted = [graph.op_names[op] for op in order if free.placement[op] == d]
            assert [op for op in placed.ran_on[name] if op in wanted] == [
                op for op in wanted if op in placed.ran_on[name]
            ]


def test_weights_that_live_elsewhere_are_fetched_ahead():
    module, args = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))).eval(), (torch.randn(2, 8),)
    graph = from_torch(module, args)  # weights are ops
    placement = np.where(graph.is_stored, 1, 0).astype(np.int32)
    found = Plan(Problem(graph, logical(2)), placement, None, 1.0, 0.0, "hand", "0")
    with found.apply(module, args) as placed, torch.no_grad():
        equal(placed(*args), module(*args))
        (script,) = placed._form.scripts
        fetches = script._fetches(placed._form.layout.calls(0))[1]
    early = {after: [reader for reader, _ in weights] for after, weights in fetches.items()}
    # Weight and bias of two layers at once; those of one more when a layer is through, with the next one under way.
    assert early == {-1: [-1] * 4, 1: [0] * 2, 2: [1] * 2, 3: [2] * 2}


def test_no_more_weights_are_on_their_way_than_are_prefetched():
    """A device that lets the host run ahead, as GPUs do: the host must wait for it before it fetches more."""
    module, args = nn.Sequential(*(nn.Linear(8, 8) for _ in range(9))).eval(), (torch.randn(2, 8),)
    graph = from_torch(module, args)
    placement = np.where(graph.is_stored, 1, 0).astype(np.int32)
    with Plan(Problem(graph, logical(2)), placement, None, 1.0, 0.0, "hand", "0").apply(module, args) as placed:
        (script,) = placed._form.scripts
        names, run = script._names, {"made": 0, "through": 0, "weights": 0}
        most = 0

        def mark():
            run["made"] += 1
            return run["made"]

        def begin(value):
            nonlocal most
            run["weights"] += isinstance(value, nn.Parameter)
            most = max(most, run["weights"] // 2 - run["through"])
            return value

        kept = {name: names[name] for name in ("mark", "passed", "begin")}
        names |= {"mark": mark, "begin": begin, "passed": lambda mark: run.update(through=max(run["through"], mark))}
        with torch.no_grad():
            equal(placed(*args), module(*args))
        names |= kept
    assert run["weights"] == 2 * 9
    assert most == placed._form.layout.prefetch == 2


def test_what_all_have_read_is_let_go():
    module, args, kwargs = Branches().eval(), (torch.randn(3, 16),), {"bias": torch.randn(16)}
    found = plan_of(module, args, kwargs, 3, seed=2)
    with found.apply(module, args, kwargs) as placed, torch.no_grad():
        _, run = placed._run(placed._form, placed._form.scripts, args, kwargs)
        assert placed._form.layout.crossing
        assert all(run.slots[slot] is None for slot in placed._form.layout.crossing)


def test_a_device_is_no_faster_for_another_that_has_no_work():
    module, args = nn.Linear(4, 4), (torch.randn(2, 4),)
    graph = from_torch(module, args).collapse_parameters().graph
    alone = Plan(Problem(graph, logical(2)), np.zeros(graph.num_ops, np.int32), None, 1.0, 0.0, "hand", "0")
    with alone.apply(module, args) as placed:
        (worker,) = placed._form.workers
        assert worker._threads == max(1, len(os.sched_getaffinity(0)) // 2)


def test_what_each_device_holds_is_counted():
    """Four layers of 1,000 x 1,000 by turns on two devices; 10 x 1,000 between them."""
    module, args = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(4))).eval(), (torch.randn(10, 1000),)
    graph = from_torch(module, args).collapse_parameters().graph
    where = np.arange(graph.num_ops) % 2  # the input, then the layers
    found = Plan(Problem(graph, logical(2)), where.astype(np.int32), None, 1.0, 0.0, "hand", "0")
    layer, between = 4 * 1001 * 1000, 4 * 10 * 1000
    with found.apply(module, args) as placed, torch.no_grad():
        for _ in range(2):
            held = placed.counted(*args)
            assert held == {"d0": 2 * layer + 2 * between, "d1": 2 * layer + 2 * between}
    np.testing.assert_allclose(found.timeline.peak, list(held.values()))


def test_a_clock_at_each_op_says_what_ran_where():
    module, args, kwargs = Branches().eval(), (torch.randn(3, 16),), {"bias": torch.randn(16)}
    found = plan_of(module, args, kwargs, 2, seed=0)
    with found.apply(module, args, kwargs) as placed, torch.no_grad():
        result, notes = placed.timed(*args, **kwargs)
        equal(result, module(*args, **kwargs))
    ops = {note.op: note.device for note in notes}
    assert ops == {op: found.devices[op] for op in ops}
    assert set(ops) == {op for op, kind in zip(found.problem.graph.op_names, found.problem.graph.op_kinds, strict=True)
                        if kind not in ("input", "parameter")}  # fmt: skip
    assert all(note.seconds >= 0 and note.on in ("cpu", "") for note in notes)


class Attends(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x, keep):
        turn = torch.arange(x.shape[-2])
        mask = {
            "all": turn[:, None] >= 0 * turn[None],
            "before": turn[:, None] >= turn[None],
            "near": (turn[:, None] - turn[None]).abs() < 2,
            "given": (turn[:, None] >= turn[None]) & keep[None],
        }[self.kind]
        return nn.functional.scaled_dot_product_attention(x, x.flip(-1), x + 1, attn_mask=mask, scale=0.5)


@pytest.mark.parametrize("kind", ["all", "before", "near", "given"])
def test_attention_is_told_in_short_what_a_mask_says(kind):
    module, args = Attends(kind), (torch.randn(2, 3, 5, 8), torch.tensor([True, True, False, True, True]))
    with plan_of(module, args, {}, 2, seed=0).apply(module, args) as placed, torch.no_grad():
        equal(placed(*args), module(*args))
        equal(placed(args[0], ~args[1] | True), module(args[0], ~args[1] | True))
        (node,) = [node for node in placed._form.layout.slot if "scaled_dot_product" in str(node.target)]
    if kind in ("all", "before"):
        assert node.kwargs == {"attn_mask": None, "is_causal": kind == "before", "scale": 0.5}
        assert len(node.args) == 3
    else:
        assert "attn_mask" not in node.kwargs
        assert len(node.args) == 4


def test_a_module_whose_weights_are_elsewhere_is_exported_all_the_same():
    """As after an earlier plan. (On the meta device, as no other is at hand.)"""
    from placewise import layout

    module, args, kwargs = Branches().eval(), (torch.randn(3, 16),), {"bias": torch.randn(16)}
    found = plan_of(module, args, kwargs, 2, seed=0)
    module.left.to("meta")
    program, nodes, index = layout.exported(found, module, args, kwargs)
    assert len(index) == found.problem.num_ops
    assert set(index) <= {*nodes, "x", "bias"}
    assert {tensor.device.type for tensor in program.state_dict.values()} == {"cpu"}


def test_arguments_are_brought_to_where_the_plan_has_them():
    module, args, kwargs = Branches().eval(), (torch.randn(3, 16),), {"bias": torch.randn(16)}
    found = plan_of(module, args, kwargs, 2, seed=0)
    with found.apply(module, args, kwargs) as placed, torch.no_grad():
        assert [placed._form.layout.where[placed._form.layout.inputs[name]] for name in ("x", "bias")] == [
            found.placement[found.problem.graph.op_index(name)] for name in ("x", "bias")
        ]
        there = placed.brought(args, kwargs)
        equal(there, (args, kwargs))
        equal(placed(*there[0], **there[1]), module(*args, **kwargs))


# ---- training --------------------------------------------------------------------------------------------------------


class Drops(nn.Module):
    """Norms with running statistics, and dropout in two branches, of which the first takes longer to come to it."""

    def __init__(self, width=64):
        super().__init__()
        self.left = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)), nn.BatchNorm1d(width), nn.Dropout())
        self.right = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2))
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        return self.last(nn.functional.dropout(self.left(x) + self.right(x), 0.1, self.training))


def by_branch(module, args, device):
    graph = from_torch(module, args).collapse_parameters().graph
    placement = np.array([device(name) for name in graph.op_names], np.int32)
    return Plan(Problem(graph, logical(2)), placement, None, 1.0, 0.0, "hand", "0")


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_few_steps_of_training_are_those_of_the_module(seed):
    """Outputs, gradients, weights and running statistics, to the last bit, with the same seeds of dropout."""
    torch.manual_seed(0)
    module, x = Drops(), torch.randn(128, 64)
    plain = copy.deepcopy(module)
    found = (
        by_branch(module, (x,), lambda name: int(name.startswith("left")))
        if seed is None else plan_of(module, (x,), {}, 2, seed)
    )  # fmt: skip
    with found.apply(module, (x,), threads=1) as placed:
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, module)]
        for step in range(4):
            results = []
            for called, optimizer in zip((plain, placed), optimizers, strict=True):
                torch.manual_seed(step)
                optimizer.zero_grad()
                results.append(called(x))
                results[-1].square().mean().backward()
                optimizer.step()
            assert torch.equal(*results)
            for one, other in zip(plain.parameters(), module.parameters(), strict=True):
                assert torch.equal(one.grad, other.grad)
            for one, other in zip(plain.state_dict().values(), module.state_dict().values(), strict=True):
                assert torch.equal(one, other)
    assert module.left[6].num_batches_tracked == 4


def test_train_and_eval_do_what_they_do_to_the_module():
    torch.manual_seed(0)
    module, x = Drops().eval(), torch.randn(16, 64)
    plain = copy.deepcopy(module)
    with plan_of(module, (x,), {}, 2, seed=0).apply(module, (x,), threads=1) as placed:
        assert not placed.training
        for mode in (False, True, False, True):
            placed.train(mode)
            plain.train(mode)
            found = []
            for called in (plain, placed):
                torch.manual_seed(7)
                found.append(called(x))
            assert torch.equal(*found)
            assert torch.equal(plain.left[6].running_var, module.left[6].running_var)
        module.right.eval()  # a part of it only
        plain.right.eval()
        assert torch.equal(plain.right[1](x), module.right[1](x))
        found = []
        for called in (plain, placed):
            torch.manual_seed(7)
            found.append(called(x))
        assert torch.equal(*found)


@pytest.mark.parametrize("collapsed", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_of_a_training_step_places_the_forward_pass(seed, collapsed):
    torch.manual_seed(0)
    module, x = Drops(), torch.randn(32, 64)
    plain = copy.deepcopy(module)
    graph = from_torch(module, (x,), training="sgd")
    graph = graph.collapse_parameters().graph if collapsed else graph
    problem = Problem(graph, logical(2))
    placement = np.random.default_rng(seed).integers(0, 2, problem.num_units).astype(np.int32)[problem.unit]
    found = Plan(problem, placement, None, 1.0, 0.0, "hand", "0")
    with found.apply(module, (x,), threads=1) as placed:
        for called in (plain, placed):
            torch.manual_seed(3)
            called(x).square().mean().backward()
        for one, other in zip(plain.parameters(), module.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
        where = {op: device for device, ops in placed.ran_on.items() for op in ops}
    devices = found.devices
    linear = [name for name in devices if name.endswith("addmm")]
    assert len(linear) == 7
    assert {name: where[name] for name in linear} == {name: devices[name] for name in linear}
    with pytest.raises(InvalidInput, match=r"not the model of this plan: it has no module 'left"):
        found.apply(nn.Linear(64, 3), (x,))


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def threads_of_placewise():
    return [thread for thread in threading.enumerate() if thread.name.startswith("placewise ")]


def test_nothing_is_left_running():
    module, args, kwargs = Branches().eval(), (torch.randn(3, 16),), {"bias": torch.randn(16)}
    before = len(threads_of_placewise())
    found = plan_of(module, args, kwargs, 2, seed=0)
    placed = found.apply(module, args, kwargs)
    placed(*args, **kwargs)
    assert len(threads_of_placewise()) == before + 1  # the other device's work is done by the caller
    placed.close()
    assert len(threads_of_placewise()) == before
    with pytest.raises(InvalidInput, match="closed"):
        placed(*args, **kwargs)
    placed = found.apply(module, args, kwargs)
    placed(*args, **kwargs)
    del placed
    assert len(threads_of_placewise()) == before


def test_a_worker_that_is_gone_is_said(monkeypatch):
    """Its thread ends without having done, or said, anything."""
    from placewise import executor

    module, args, kwargs = Branches().eval(), (torch.randn(3, 16),), {"bias": torch.randn(16)}
    monkeypatch.setattr(executor, "_LOOK", 0.05)
    placed = plan_of(module, args, kwargs, 2, seed=0).apply(module, args, kwargs)
    serve = executor._Worker._serve
    monkeypatch.setattr(executor._Worker, "_serve", lambda self: None)
    with pytest.raises(PlacewiseError, match="the worker of d1 has ended"):
        placed(*args, **kwargs)
    monkeypatch.setattr(executor._Worker, "_serve", serve)
    with torch.no_grad():
        equal(placed(*args, **kwargs), module(*args, **kwargs))  # a new one takes its place
    placed.close()


@pytest.mark.parametrize("where", ["start", "run_here", "join"])
def test_a_call_that_is_interrupted_leaves_nothing_for_the_next(monkeypatch, where):
    from placewise import executor

    module, args, kwargs = Branches().eval(), (torch.randn(3, 16),), {"bias": torch.randn(16)}
    owner = executor._Job if where == "join" else executor._Worker
    with plan_of(module, args, kwargs, 3, seed=2).apply(module, args, kwargs) as placed, torch.no_grad():
        placed(*args, **kwargs)
        done, calls = getattr(owner, where), []

        def interrupted(self, *given):
            calls.append(self)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return done(self, *given)

        for _ in range(3):
            calls.clear()
            monkeypatch.setattr(owner, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                placed(*args, **kwargs)
            monkeypatch.setattr(owner, where, done)
            for _ in range(2):
                other = torch.randn(3, 16)
                equal(placed(other, **kwargs), module(other, **kwargs))


def test_calls_of_several_threads_take_turns():
    module, args, kwargs = Branches(64).eval(), (torch.randn(32, 64),), {"bias": torch.randn(64)}
    wrong = []
    with plan_of(module, args, kwargs, 2, seed=0).apply(module, args, kwargs, threads=1) as placed:

        def call():
            with torch.no_grad():
                for _ in range(40):
                    x = torch.randn(32, 64)
                    try:
                        equal(placed(x, **kwargs), module(x, **kwargs))
                    except BaseException as error:
                        wrong.append(error)

        callers = [threading.Thread(target=call) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert wrong == []


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), MemoryError(),
              RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")],
)  # fmt: skip
def test_a_device_without_memory_is_said(error):
    module, args, kwargs = Branches().eval(), (torch.randn(3, 16),), {"bias": torch.randn(16)}
    placed = plan_of(module, args, kwargs, 2, seed=0).apply(module, args, kwargs)
    script = placed._form.scripts[0]

    def full(*_, **__):
        raise error

    name = next(name for name in script._names if name[0] == "f" and name[1:].isdigit())
    kept, script.function.__globals__[name] = script.function.__globals__[name], full
    with pytest.raises(PlacewiseError, match="d0 has not enough memory"):
        placed(*args, **kwargs)
    script.function.__globals__[name] = kept
    with torch.no_grad():
        equal(placed(*args, **kwargs), module(*args, **kwargs))
    placed.close()


def test_a_module_without_values_is_refused():
    module, args = nn.Linear(4, 4), (torch.randn(2, 4),)
    found = plan_of(module, args, {}, 2)
    with pytest.raises(InvalidInput, match=r"weight is on the meta device"):
        found.apply(nn.Linear(4, 4, device="meta"), args)


# ---- the engine ------------------------------------------------------------------------------------------------------


def test_a_run_for_verify(tmp_path):
    module, args = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), (torch.randn(2, 8),)
    torch.export.save(torch.export.export(module, args), tmp_path / "m.pt2")
    engine = engines.get("torch")
    from placewise.importers import pt2

    graph = pt2.load(tmp_path / "m.pt2", "m").collapse_parameters().graph
    problem = engine.fit(Problem(graph, logical(2)))
    found = Plan(problem, np.arange(graph.num_ops, dtype=np.int32) % 2, None, 1.0, 0.0, "hand", "0")
    with engine.run(found, str(tmp_path / "m.pt2"), {}) as run:
        (plain,), (placed,) = run.plain(), run.placed()
        np.testing.assert_allclose(plain, placed)
        assert np.std(plain) > 0
        told = run.ran_on()
        assert told == {op: found.devices[op] for op in told}
        assert len(told) == 3
        assert set(run.busy()) == {"d0", "d1"}
        # d0: what comes to relu, and what it makes; d1: the weights, x, and what comes from or goes to d0.
        assert run.peak() == {"d0": 4 * 2 * (2 * 16), "d1": 4 * (8 * 16 + 16 + 16 * 4 + 4 + 2 * 8 + 2 * 16)}
        assert run.given == "the file's weights and its example inputs"
        np.testing.assert_allclose(plain, module(*args).detach())
        assert run.links() == {("d0", "d1"): True, ("d1", "d0"): True}
        signatures = {s for s, k in zip(graph.op_signatures, graph.op_kinds, strict=True) if k != "input"}
        seen = {(device, signature) for device, signature, _ in run.times()}
        assert seen == {(device, s) for device in ("d0", "d1") for s in signatures}  # both are the same hardware
    assert not threads_of_placewise()
    told = json.loads(engine.export(found))
    assert told["devices"] == {"d0": "cpu", "d1": "cpu"}
    assert list(told["ops"]) != []


def test_what_is_made_of_nothing_is_made_on_its_device(tmp_path, monkeypatch):
    """Files do not say where. (The meta device stands in for a GPU.)"""

    class Model(nn.Module):
        def forward(self, x):
            return x + 1, torch.arange(3) * 2, torch.zeros(2, 2) + 1

    args = (torch.randn(4),)
    torch.export.save(torch.export.export(Model(), args), tmp_path / "m.pt2")
    from placewise import executor
    from placewise.importers import pt2
    from placewise.ports import Port

    problem = Problem(pt2.load(tmp_path / "m.pt2", "m").collapse_parameters().graph, logical(1))
    found = Plan(problem, np.zeros(problem.num_ops, np.int32), None, 1.0, 0.0, "hand", "0")
    monkeypatch.setattr(executor, "port", lambda home: Port(torch.device("meta")))
    with found.apply(pt2.as_module(tmp_path / "m.pt2")[0], args) as placed:
        assert [made.device.type for made in placed(*args)] == ["meta"] * 3


def test_what_verify_cannot_run_is_told_before_its_devices(tmp_path):
    gpus = full_mesh([Device(f"gpu{i}", memory=2**34, flops={"default": 1e13}, bandwidth=1e12) for i in range(2)], 1e10)
    graph = zoo.load("alexnet")
    run = engines.get("torch").run

    def of(problem):
        return Plan(problem, np.zeros(problem.num_ops, np.int32), None, 1.0, 0.0, "hand", "0")

    found = of(Problem(graph.collapse_parameters().graph, gpus))
    (tmp_path / "m.json").write_text("{}")
    for model, message in (("m.pt2", "m.pt2: neither a file"), (str(tmp_path / "m.json"), r"files that end in \.pt2")):
        with pytest.raises(InvalidInput, match=message), run(found, model, {}):
            pass
    parts = of(engines.get("torch-offload").fit(Problem(graph, gpus)))
    with pytest.raises(InvalidInput, match=r"with the config\.json"), run(parts, "alexnet", {}):
        pass
    with pytest.raises(InvalidInput, match="CUDA devices; say what it is"), run(found, "alexnet", {"gpu0": "cuda:99"}):
        pass


def test_a_model_that_the_host_has_no_room_for_is_refused(monkeypatch):
    """Alexnet has 61.1 million weights: 233 MiB."""
    from placewise import machine

    graph = zoo.load("alexnet").collapse_parameters().graph
    found = Plan(Problem(graph, logical(2)), np.zeros(graph.num_ops, np.int32), None, 1.0, 0.0, "hand", "0")
    monkeypatch.setattr(machine, "host_memory", lambda: (232 * 2.0**20, 2.0**40))
    message = "alexnet with and without a plan takes 233 MiB of host memory, and 232 MiB is free"
    with pytest.raises(Unsupported, match=message), engines.get("torch").run(found, "alexnet", {}):
        pass


def test_times_of_ops_add_up_to_the_usual_run():
    """Each of two ops is slow in runs of its own, which medians would not see; one run of five is no usual one."""
    from placewise.engines.torch import TorchRun
    from placewise.executor import Ran

    module, args = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.randn(2, 4),)
    found = plan_of(module, args, {}, 1)
    run = TorchRun(found, [torch.device("cpu")], module, torch.device("cpu"), None, (args, {}))
    run.rounds = [[Ran("0.linear", "d0", a, "cpu"), Ran("1.relu", "d0", b, "cpu")]
                  for a, b in ((3.0, 1.0), (1.0, 3.0), (3.0, 1.0), (1.0, 3.0), (100.0, 1.0))]  # fmt: skip
    signature = dict(zip(found.problem.graph.op_signatures, found.problem.graph.op_names, strict=True))
    times = {signature[op]: timing.seconds for _, op, timing in run.times()}
    assert sum(times.values()) == 4.0
    assert run.busy() == {"d0": 4.0}


def test_a_plan_of_a_training_step_is_not_verified():
    graph = from_torch(nn.Linear(8, 8), (torch.randn(2, 8),), training="sgd")
    found = Plan(Problem(graph, logical(2)), np.zeros(graph.num_ops, np.int32), None, 1.0, 0.0, "hand", "0")
    with (
        pytest.raises(Unsupported, match=r"of a training step, and verify runs inference"),
        engines.get("torch").run(found, "alexnet", {}),
    ):
        pass


def test_the_model_without_a_plan_is_where_there_is_room_for_both():
    """10 layers of 4 MiB, half of them on the GPU: 40 MiB for all of it, and 20 for the placed half."""
    from placewise.engines.torch import beside

    module, args = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(10))), (torch.randn(1, 1024),)
    graph = from_torch(module, args).collapse_parameters().graph
    where = (np.arange(graph.num_ops) > 5).astype(np.int32)
    found = Plan(Problem(graph, logical(2)), where, None, 1.0, 0.0, "hand", "0")
    homes = [torch.device("cuda", 0), torch.device("cpu")]
    assert beside(found, homes, lambda home: 61 * 2**20) == homes[0]
    assert beside(found, homes, lambda home: 59 * 2**20).type == "cpu"
    assert beside(found, [homes[0]] * 2, lambda home: 79 * 2**20).type == "cpu"  # both of its devices are that GPU
    assert beside(found, [homes[0]] * 2, lambda home: 81 * 2**20) == homes[0]
    assert beside(found, [homes[1]] * 2, lambda home: 0).type == "cpu"


def test_decoding_runs_as_placed():
    """The bundled graph is of another export than the module that is run: with caches, and on the meta device."""
    problem = Problem(zoo.load("gpt-2-decode").collapse_parameters().graph, logical(2))
    placement = np.random.default_rng(0).integers(0, 2, problem.num_units)[problem.unit]
    found = Plan(problem, placement, None, 1.0, 0.0, "random", "0")
    with engines.get("torch").run(found, "gpt-2-decode", {}) as run:
        for one, other in zip(run.plain(), run.placed(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        assert {op: found.devices[op] for op in run.ran_on()} == run.ran_on()


def test_the_example_of_the_docs_runs():
    import re
    from pathlib import Path

    page = (Path(__file__).parents[1] / "docs/engines/torch.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    exec(code, {})
