"""Training steps: work by hand, phases, sizes of gradients and optimizer state, what shares a device."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import placewise as pw  # noqa: E402
from placewise.errors import InvalidInput  # noqa: E402
from placewise.graph import Graph  # noqa: E402
from placewise.importers.training import mirrored, training_step  # noqa: E402
from placewise.kinds import family  # noqa: E402

FORWARD, BACKWARD, UPDATE = range(3)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8, bias=False))


def column(graph: Graph, values, phase: int) -> dict[str, float]:
    return {name: value for name, value, p in zip(graph.op_names, values.tolist(), graph.phase, strict=True)
            if p == phase and value}  # fmt: skip


def inputs_of(graph: Graph, name: str) -> dict[str, float]:
    edges = np.flatnonzero(graph.consumers == graph.op_index(name))
    tensors = graph.edge_tensor[edges]
    return {graph.op_names[graph.tensor_producer[t]]: float(graph.tensor_bytes[t]) for t in tensors}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_step_of_a_perceptron(device):
    graph = training_step(perceptron().to(device), (torch.zeros(4, 16),), name="mlp")
    assert graph.name == "mlp-training"
    # Forward: x A + a, ReLU, y B, and their sum for want of a loss.
    assert column(graph, graph.flops, FORWARD) == {"0.addmm": 4096 + 128, "1.relu": 128, "2.mm": 2048, "sum": 32}
    # Backward: a product for the gradient of B, one for y, one for A (x needs none), and the sum for a.
    assert column(graph, graph.flops, BACKWARD) == {
        "2.mm:1": 2048, "2.mm:2": 2048, "1.threshold_backward": 128, "0.mm": 4096, "0.sum": 128,
    }  # fmt: skip
    elements = {"0.weight": 512, "0.bias": 32, "2.weight": 256}
    assert column(graph, graph.flops, UPDATE) == {f"{name}.adam": 12 * n for name, n in elements.items()}
    assert column(graph, graph.bytes_accessed, UPDATE) == {f"{name}.adam": 7 * 4 * n for name, n in elements.items()}


def test_an_update_reads_parameter_gradient_and_state_where_the_parameter_is():
    graph = training_step(perceptron(), (torch.zeros(4, 16),))
    size = 16 * 32 * 4
    assert inputs_of(graph, "0.weight.adam") == {
        "0.weight": size, "0.mm": size, "0.weight.exp_avg": size, "0.weight.exp_avg_sq": size,
    }  # fmt: skip
    home = graph.group[graph.op_index("0.weight")]
    together = {name for name, group in zip(graph.op_names, graph.group, strict=True) if group == home}
    assert together == {"0.weight", "0.weight.exp_avg", "0.weight.exp_avg_sq", "0.weight.adam"}
    assert graph.op_modules[graph.op_index("0.mm")] == "0"
    assert graph.group[graph.op_index("0.mm")] == -1


@pytest.mark.parametrize(("optimizer", "copies"), [("sgd", 0), ("momentum", 1), ("adam", 2)])
def test_optimizers_keep_what_they_keep(optimizer, copies):
    graph = pw.from_torch(perceptron(), (torch.zeros(4, 16),), training=optimizer)
    weights = 4 * (512 + 32 + 256)
    assert graph.resident_bytes.sum() == weights * (1 + copies)
    by_mirror = mirrored(pw.from_torch(perceptron(), (torch.zeros(4, 16),)), optimizer)
    assert by_mirror.resident_bytes.sum() == weights * (1 + copies)
    for values in ("flops", "bytes_accessed"):
        work = [float(getattr(g, values)[g.phase == UPDATE].sum()) for g in (graph, by_mirror)]
        assert work[0] == work[1] > 0


def test_forward_and_backward_of_an_op_share_a_device_on_request():
    graph = training_step(perceptron(), (torch.zeros(4, 16),), colocate=True)
    group = dict(zip(graph.op_names, graph.group.tolist(), strict=True))
    assert group["0.addmm"] == group["0.mm"] == group["0.sum"] == group["0.weight"] == group["0.bias.adam"]
    assert group["1.relu"] == group["1.threshold_backward"]
    assert group["2.mm"] == group["2.mm:1"] == group["2.mm:2"] == group["2.weight"]
    assert len({group["0.addmm"], group["1.relu"], group["2.mm"]}) == 3
    # Then a parameter has a home, and planners that place no parameters need not.
    assert not graph.collapse_parameters().graph.is_stored.any()


def test_tied_weights_are_updated_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.out.weight = self.words.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.words(x))

    graph = training_step(Tied(), (torch.zeros(3, dtype=torch.long),), optimizer="sgd", colocate=True)
    assert [name for name, kind in zip(graph.op_names, graph.op_kinds, strict=True) if kind == "sgd"] == [
        "words.weight.sgd"
    ]
    assert graph.resident_bytes.sum() == 10 * 4 * 4
    assert list(inputs_of(graph, "words.weight.sgd")) == ["words.weight", "words.weight.add"]
    assert len(inputs_of(graph, "words.weight.add")) == 2


def test_a_convolution_costs_three_times_its_forward():
    module = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False))
    graph = training_step(module, (torch.zeros(2, 4, 6, 6),), optimizer="sgd", loss=lambda y: y.square().mean())
    first, second = 2 * 4 * 9 * 2 * 8 * 36, 2 * 8 * 9 * 2 * 8 * 36
    work = dict(zip(graph.op_names, graph.flops.tolist(), strict=True))
    assert work["0.convolution"] == work["0.convolution_backward"] == first  # images need no gradient
    assert work["1.convolution"] == second
    assert work["1.convolution_backward"] == 2 * second


def test_batch_norm_keeps_its_statistics_and_the_loss_of_the_module_is_used():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(self.norm(x)), y)

    graph = training_step(Net(), (torch.zeros(5, 6), torch.zeros(5, dtype=torch.long)), optimizer="sgd")
    kinds = dict(zip(graph.op_names, graph.op_kinds, strict=True))
    assert kinds["norm.running_mean"] == kinds["norm.running_var"] == "state"
    assert "sum" not in kinds
    assert {"batch_norm", "batch_norm_backward", "softmax_backward"} <= set(kinds.values())


def test_frozen_weights_have_no_update():
    module = perceptron()
    module[0].requires_grad_(False)
    graph = training_step(module, (torch.zeros(4, 16),))
    assert [name for name in graph.op_names if name.endswith(".adam")] == ["2.weight.adam"]


def test_attention_has_a_backward():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    graph = training_step(layer, (torch.zeros(2, 8, 16),))
    work = {kind: float(graph.flops[[k == kind for k in graph.op_kinds]].sum())
            for kind in ("attention", "attention_backward")}  # fmt: skip
    scores = 2 * 2 * 8 * 8
    assert work["attention"] == 2 * scores * (8 + 8) + 5 * scores
    assert work["attention_backward"] == 2.5 * work["attention"]


@pytest.fixture
def _untraceable(monkeypatch):
    from placewise.importers import training

    def fails(*_):
        raise RuntimeError("not today")

    monkeypatch.setattr(training, "_traced", fails)


@pytest.mark.usefixtures("_untraceable")
def test_what_autograd_cannot_trace_is_mirrored_and_says_so():
    with pytest.warns(UserWarning, match=r"mlp: the backward pass is mirrored.*not today"):
        graph = training_step(perceptron(), (torch.zeros(4, 16),), name="mlp")
    assert graph.name == "mlp-training-mirrored"
    assert graph.flops[graph.phase == BACKWARD].sum() == 2 * graph.flops[graph.phase == FORWARD].sum()
    assert [kind for kind, phase in zip(graph.op_kinds, graph.phase, strict=True) if phase == UPDATE] == ["adam"] * 3


@pytest.mark.usefixtures("_untraceable")
@pytest.mark.filterwarnings("ignore:.*mirrored")
def test_what_is_mirrored_shares_devices_as_what_is_traced():
    apart, together = (
        dict(zip(graph.op_names, graph.group.tolist(), strict=True))
        for graph in (training_step(perceptron(), (torch.zeros(4, 16),), colocate=flag) for flag in (False, True))
    )
    assert apart["0.linear"] == apart["0.linear:backward"] == apart["1.relu"] == -1
    assert apart["0.weight"] == apart["0.weight:update"] != apart["0.bias"] == apart["0.bias:update"]
    assert together["0.linear"] == together["0.linear:backward"] == together["0.weight"] == together["0.bias:update"]
    assert together["1.relu"] == together["1.relu:backward"]
    assert len({together[name] for name in ("0.linear", "1.relu", "2.linear")}) == 3


def test_an_lstm_is_mirrored():
    with pytest.warns(UserWarning, match=r"mirrored.*mkldnn_rnn_layer"):
        graph = training_step(nn.LSTM(4, 8), (torch.zeros(3, 2, 4),))
    forward = 3 * 2 * 4 * 8 * (2 * (4 + 8) + 8)
    work = dict(zip(graph.op_names, graph.flops.tolist(), strict=True))
    assert (work["lstm"], work["lstm:backward"]) == (forward, 2 * forward)
    assert family(graph.op_kinds[graph.op_index("lstm:backward")]) == "recurrent"


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        (lambda out: out["logits"].sum(), "loss: "),
        (lambda out: out @ torch.zeros(3, 3), "loss: RuntimeError"),
        (lambda out: 0.0, r"loss: must return one number.*found 0\.0"),
        (lambda out: out, r"loss: must return one number.*\[4, 8\]"),
        (lambda out: out.argmax(), r"loss: must return one number.*int64"),
    ],
)
def test_a_wrong_loss_is_told(loss, complaint):
    with pytest.raises(InvalidInput, match=complaint):
        training_step(perceptron(), (torch.zeros(4, 16),), loss=loss)


def test_a_training_step_can_be_planned(tmp_path):
    from placewise.files import save_graph

    save_graph(training_step(perceptron(), (torch.zeros(4, 16),), colocate=True), tmp_path / "step.json")
    plan = pw.plan(pw.load_problem(tmp_path / "step.json", "two-gpus-one-host"), "heft")
    assert plan.value > 0


def test_wrong_requests_are_told():
    with pytest.raises(InvalidInput, match="sgd, momentum, adam"):
        training_step(perceptron(), (torch.zeros(4, 16),), optimizer="lion")
    with pytest.raises(InvalidInput, match=r"torch\.nn\.Module"):
        training_step("mlp", ())  # type: ignore[arg-type]

    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x).argmax()

    with pytest.raises(InvalidInput, match="pass a loss"):
        training_step(Silent(), (torch.zeros(1, 2),), loss=lambda out: training_loss(out))


def training_loss(output):
    from placewise.importers.training import _found_loss

    return _found_loss((output,))
