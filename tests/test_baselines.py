"""CPU only, GPU only, round robin and the expert."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from placewise import zoo
from placewise.cluster import Device, full_mesh
from placewise.costs import Costs
from placewise.driver import plan
from placewise.errors import NoFeasiblePlan, Unsupported
from placewise.planners import baselines
from placewise.problem import Execution, Problem
from placewise.simulator import violations
from problems import problem_of

STATIC = Execution(memory="static")


def host_and_gpus(gpus=2, memory=math.inf):
    return full_mesh([Device("cpu", kind="cpu"), *(Device(f"gpu{i}", memory=memory) for i in range(gpus))], 1e9)


# ---- one device ------------------------------------------------------------------------------------------------------


def test_cpu_only_and_gpu_only_take_the_best_of_their_kind():
    problem = problem_of(np.ones((3, 1)) * [9.0, 3.0, 2.0], cluster=host_and_gpus())
    assert plan(problem, "cpu-only").placement.tolist() == [0, 0, 0]
    assert plan(problem, "gpu-only").placement.tolist() == [2, 2, 2]
    assert (plan(problem, "cpu-only").value, plan(problem, "gpu-only").value) == (27.0, 6.0)
    chain = [(0, 1), (1, 2)]
    pinned = problem_of(np.ones((3, 1)) * [9.0, 3.0, 2.0], chain, cluster=host_and_gpus(), pins={"op1": "cpu"})
    assert plan(pinned, "gpu-only").placement.tolist() == [2, 0, 2]


def test_they_say_why_not():
    with pytest.raises(Unsupported, match="'cpu-only' needs a CPU, and the cluster has none"):
        plan(problem_of(np.ones((2, 2))), "cpu-only")
    with pytest.raises(Unsupported, match="'gpu-only' needs a GPU, and the cluster has none"):
        plan(problem_of(np.ones((2, 1)), cluster=host_and_gpus(0)), "gpu-only")
    with pytest.raises(Unsupported, match="'gpu-only' needs 8 B on one GPU, which has 7 B"):
        plan(problem_of(np.ones((2, 3)), resident=4.0, cluster=host_and_gpus(memory=7.0)), "gpu-only")
    with pytest.raises(NoFeasiblePlan, match="'gpu-only' found no plan"):  # weights fit, activations do not
        plan(problem_of(np.ones((2, 3)), resident=4.0, sizes=5.0, cluster=host_and_gpus(memory=9.0)), "gpu-only")


# ---- round robin -----------------------------------------------------------------------------------------------------


def test_round_robin_deals_in_turn():
    assert plan(problem_of(np.ones((5, 3))), "round-robin").placement.tolist() == [0, 1, 2, 0, 1]
    pinned = problem_of(np.ones((5, 3)), pins={"op1": "d0"}, group=[-1, -1, 0, -1, 0])
    assert plan(pinned, "round-robin").placement.tolist() == [0, 0, 1, 2, 1]
    full = problem_of(np.ones((5, 3)), resident=1.0, memory=[1.0, 9.0, 9.0], execution=STATIC)
    assert plan(full, "round-robin").placement.tolist() == [0, 1, 2, 1, 2]
    assert plan(problem_of(np.zeros((0, 2))), "round-robin").placement.tolist() == []


# ---- the expert ------------------------------------------------------------------------------------------------------


def on_gpus(name, gpus=4):
    graph = zoo.load(name).collapse_parameters().graph
    return Problem(graph, host_and_gpus(gpus), Costs.create(np.ones((graph.num_ops, gpus + 1))))


def devices_of(problem, pattern):
    """The devices of the ops in modules like this."""
    placement = plan(problem, "expert").placement
    here = [op for op, module in enumerate(problem.graph.op_modules) if re.search(pattern, module)]
    assert here
    return sorted(set(placement[here].tolist()))


@pytest.mark.parametrize("name", ["nmt-2", "nmt-2-train"])
def test_lstm_layers_go_over_the_gpus_in_turn(name):
    problem = on_gpus(name, 3)
    for layer in range(2):
        assert devices_of(problem, rf"encoder\.{layer}(\.|$)") == [1 + layer]
        assert devices_of(problem, rf"decoder\.{layer}(\.|$)") == [1 + layer]
    assert devices_of(problem, "attention|softmax") == [2]
    assert devices_of(problem, "embedding") == [1]
    assert not (plan(problem, "expert").placement == 0).any()  # the CPU gets nothing


def test_more_layers_than_gpus_begin_again():
    problem = on_gpus("gnmt", 4)
    assert devices_of(problem, "^forwards") == [1]
    assert devices_of(problem, "^backwards") == [2]
    assert devices_of(problem, r"^encoder\.2(\.|$)") == [1]
    assert devices_of(problem, r"^decoder\.5(\.|$)") == [2]


def test_embeddings_keep_their_gradients():
    """Though two layers read them, on two devices: a gradient is as large as the embedding."""
    problem = on_gpus("gnmt-train", 2)
    assert devices_of(problem, "embedding") == [1]
    assert devices_of(problem, "attention|softmax") == [2]


def test_branches_stay_together_and_parts_are_contiguous():
    problem = on_gpus("inception-v3")
    names = sorted({m.split(".")[0] for m in problem.graph.op_modules if m.startswith(("Conv2d", "Mixed"))})
    devices = [devices_of(problem, rf"^{name}\.") for name in names]
    assert len(names) == 16
    assert devices == [[1]] * 4 + [[2]] * 4 + [[3]] * 4 + [[4]] * 4


@pytest.mark.parametrize("name", sorted(baselines._RULES))
def test_every_rule_finds_the_layers_of_its_model(name):
    """Each GPU gets something, and each module of a layer is on one device."""
    problem = on_gpus(name, 2)
    found = plan(problem, "expert")
    assert violations(problem, found.placement, found.order) == []
    assert sorted(set(found.placement.tolist())) == [1, 2]


def test_rules_are_for_models_of_the_zoo():
    assert set(baselines._RULES) <= set(zoo.names())
    with pytest.raises(Unsupported, match="'expert' knows no human rule for a model 'graph'"):
        plan(problem_of(np.ones((2, 2))), "expert")


def test_the_expert_keeps_pins_and_groups_and_needs_no_gpu():
    layers = ["embedding", "layers.0", "layers.1", "softmax", ""]
    chain = [(0, 1), (1, 2), (2, 3), (3, 4)]
    columns = {"name": "rnnlm", "op_modules": layers}
    assert plan(problem_of(np.ones((5, 2)), chain, **columns), "expert").placement.tolist() == [0, 0, 1, 1, 1]
    pinned = problem_of(np.ones((5, 2)), chain, pins={"op1": "d1"}, group=[0, -1, 0, -1, -1], **columns)
    assert plan(pinned, "expert").placement.tolist() == [0, 1, 0, 1, 1]  # a group goes where its first op goes
    cpus = full_mesh([Device("a", kind="cpu"), Device("b", kind="cpu")], 1.0)
    assert plan(problem_of(np.ones((5, 2)), chain, cluster=cpus, **columns), "expert").placement.tolist() == [
        0,
        0,
        1,
        1,
        1,
    ]
    assert plan(problem_of(np.zeros((0, 2)), name="rnnlm"), "expert").placement.tolist() == []
