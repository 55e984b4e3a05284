"""Learned planners on a GPU, on a machine that has one."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA GPU", allow_module_level=True)

from learning import evaluated_and_trained, known_optimum, options_of  # noqa: E402
from placewise import Budget, plan  # noqa: E402
from placewise.driver import Context  # noqa: E402
from placewise.learned import checkpoint, colocrl, hierarchical, hsdag, one_graph, placeto, reinforce  # noqa: E402
from placewise.learned.training import METHODS, train  # noqa: E402

BUILT = {  # how else the networks of a method can be made
    "colocrl": [{}],
    "hierarchical": [{}, {"grouping": "random"}, {"grouping": "none"}],
    "hsdag": [{}, {"colocate": False}],
}
PUPILS = [(method, changed) for method, ways in BUILT.items() for changed in ways]


@pytest.mark.parametrize(("method", "changed"), PUPILS)
def test_a_few_updates(method, changed):
    problem, _ = known_optimum()
    options = options_of(method, **changed) | {"epochs": 1}  # each placement is trained on once
    learner, policy, reward = one_graph.pupil(method, problem, 0, options)
    before = [weights.detach().clone() for weights in learner.network.parameters()]
    for _ in range(5):
        reinforce.update(Context(problem, Budget(), 0, 0.0, None), learner, policy, reward)
    after = list(learner.network.parameters())
    assert all(weights.is_cuda and weights.isfinite().all() for weights in after)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    evaluated, trained = evaluated_and_trained(problem, (learner, policy))
    assert (evaluated == trained).all()


@pytest.mark.parametrize(("method", "changed"), PUPILS)
def test_the_same_probabilities_as_on_the_cpu(method, changed, monkeypatch):
    problem, _ = known_optimum()
    there = one_graph.pupil(method, problem, 0, options_of(method, **changed)).policy
    for module in (colocrl, hierarchical, hsdag):
        monkeypatch.setattr(module, "compute_device", lambda: torch.device("cpu"))
    here = one_graph.pupil(method, problem, 0, options_of(method, **changed)).policy
    actions = here.sample(64, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for mine, other in zip(here.score(actions), there.score(tuple(x.cuda() for x in actions)), strict=True):
            assert other.is_cuda
            assert np.abs(mine.numpy() - other.cpu().numpy()).max() < 0.05  # sums of ten logarithms, in TF32


@pytest.mark.parametrize("method", METHODS)
def test_it_learns(method):
    """An optimum among 59,049 placements."""
    problem, optimum = known_optimum()
    changed = {"policy": "none"} if method == "placeto" else {}
    found = plan(problem, method, budget=Budget(evaluations=3000), options=changed)
    assert found.value <= 1.05 * optimum


def test_the_shipped_policy_plans():
    problem, optimum = known_optimum()
    assert plan(problem, "placeto").value <= 1.3 * optimum


@pytest.mark.parametrize("method", METHODS)
def test_a_training_is_saved_and_goes_on(method, tmp_path):
    """To the last bit it does so on a CPU only: on a GPU, sums come in any order."""
    problem, _ = known_optimum()
    file = tmp_path / "policy.safetensors"
    train(method, [problem], file, evaluations=100)
    half = checkpoint.load(file, method)
    found = train(method, [problem], file, evaluations=200, resume=True)
    whole = checkpoint.load(file, method)
    assert half.facts["learner"]["updates"] < whole.facts["learner"]["updates"] == found.updates
    assert half.facts["learner"]["evaluations"] < 200 <= whole.facts["learner"]["evaluations"] == found.evaluations
    moments = [name for name in whole.tensors if name.startswith("optimiser.")]
    assert moments
    for name, numbers in whole.tensors.items():
        assert numbers.device.type == "cpu", name  # as a machine without a GPU reads it
    for name, weights in half.tensors.items():
        if name.startswith("network."):
            assert whole.tensors[name].shape == weights.shape
            assert whole.tensors[name].isfinite().all()
    value = plan(problem, method, budget=Budget(evaluations=64), options={"policy": str(file)}).value
    assert np.isfinite(value)


def test_the_device_is_named_once(capsys):
    reinforce.compute_device.cache_clear()
    problem, _ = known_optimum()
    for _ in range(2):
        colocrl.learner(problem, 0, options_of("colocrl"))
    assert capsys.readouterr().err == f"the policy runs on {torch.cuda.get_device_name()}\n"


def test_what_an_lstm_reads_is_on_the_gpu_in_groups_too():
    """A view of one problem's groups, for Placeto."""
    problem, _ = known_optimum()
    from placewise.learned.grouping import units

    view = placeto.view_of("devices", units(problem))
    network = placeto.network_of(placeto.Architecture(), view, 0)
    shapes = (3, 10), 3, (3, 10)
    states = placeto.States(*(np.zeros(shape, np.int64) for shape in shapes), np.ones((3, 3), np.bool_))
    with torch.no_grad():
        here = placeto.log_probabilities(network, view, states)
        there = placeto.log_probabilities(network.cuda(), view, states)
    assert there.is_cuda
    assert (here - there.cpu()).abs().max() < 0.05
