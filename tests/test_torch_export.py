"""PyTorch modules and .pt2 files: work and sizes by hand, module paths, order of writes, files that want to do harm."""

import contextlib
import io
import json
import pickle
import random
import re
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import placewise as pw  # noqa: E402
from placewise import files, measure  # noqa: E402
from placewise.errors import InvalidInput, PlacewiseError, Unsupported  # noqa: E402
from placewise.graph import Graph  # noqa: E402
from placewise.importers import pt2, torch_export  # noqa: E402
from placewise.importers.assembly import kinds_without_formula  # noqa: E402
from placewise.importers.aten import Laid, _fits  # noqa: E402
from placewise.importers.einsum import einsum  # noqa: E402
from placewise.kinds import TensorType  # noqa: E402
from placewise.measure.pytorch import TorchTarget  # noqa: E402


def work(graph: Graph) -> dict[str, float]:
    """FLOPs of the ops that compute."""
    return {name: flops for name, flops in zip(graph.op_names, graph.flops.tolist(), strict=True) if flops}


def inputs_of(graph: Graph, name: str) -> list[str]:
    edges = np.flatnonzero(graph.consumers == graph.op_index(name))
    return [graph.op_names[graph.tensor_producer[graph.edge_tensor[e]]] for e in edges]


def signature(graph: Graph, name: str) -> str:
    return graph.op_signatures[graph.op_index(name)]


class Block(nn.Module):
    """Attention of four heads over 6 tokens of width 8."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(2, 6, 4, 2).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(2, 6, 8))


class Writer(nn.Module):
    """Writes to a buffer, and to a part of a tensor that is read again as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("cache", torch.zeros(3, 4))
        self.register_buffer("unused", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x))
        self.cache.add_(1.0)
        part = y[:, :2]
        part.mul_(2.0)
        return y.sum() + self.cache.sum()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pt2") / "model.pt2"
    program = torch.export.export(Block().eval(), (torch.zeros(2, 6, 8),), strict=False)
    torch.export.save(program, path)
    return path


# ---- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_perceptron(device):
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8, bias=False)).to(device)
    graph = pw.from_torch(module, (torch.zeros(4, 16),), name="mlp")
    # 2 * 4 * 16 * 32 and the bias; one per element; 2 * 4 * 32 * 8.
    assert work(graph) == {"0.linear": 4096 + 128, "1.relu": 128, "2.linear": 2048}
    moved = dict(zip(graph.op_names, graph.bytes_accessed.tolist(), strict=True))
    assert moved["0.linear"] == 4 * (4 * 16 + 16 * 32 + 32 + 4 * 32)
    assert moved["1.relu"] == 4 * 2 * 4 * 32
    assert graph.resident_bytes.sum() == 4 * (16 * 32 + 32 + 32 * 8)
    assert graph.op_modules[graph.op_index("2.linear")] == graph.op_modules[graph.op_index("2.weight")] == "2"
    assert inputs_of(graph, "0.linear") == ["0.weight", "0.bias", "input"]
    assert graph.name == "mlp"
    assert len(set(graph.op_names)) == graph.num_ops


def test_a_convolutional_net():
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 6, 3, stride=2, groups=2, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    graph = pw.from_torch(module, (torch.zeros(2, 3, 8, 8),))
    maps = 2 * 8 * 8 * 8
    assert work(graph) == {
        "0.conv2d": 2 * 27 * maps + maps,
        "1.batch_norm": 4 * maps,
        "2.relu": maps,
        "3.max_pool2d": 4 * maps / 4,
        "4.conv2d": 2 * (4 * 9) * (2 * 6 * 1 * 1),
        "5.adaptive_avg_pool2d": 2 * 6,
    }
    assert signature(graph, "4.conv2d") == (
        'conv(float32[2,8,4,4], float32[6,4,3,3]; {"groups":2,"stride":[2,2]}) -> float32[2,6,1,1]'
    )
    assert "num_batches_tracked" not in " ".join(graph.op_names)


def test_attention_has_flops_on_the_cpu_too():
    graph = pw.from_torch(Block(), (torch.zeros(2, 6, 8),))
    scores = 2 * 4 * 6 * 6
    assert work(graph) == {
        "qkv.linear": 2 * 2 * 6 * 8 * 24,
        "scaled_dot_product_attention": 2 * scores * (2 + 2) + 5 * scores,
        "out.linear": 2 * 2 * 6 * 8 * 8,
    }
    assert '"causal":true' in signature(graph, "scaled_dot_product_attention")
    assert inputs_of(graph, "scaled_dot_product_attention") == ["chunk"] * 3
    assert graph.op_kinds[graph.op_index("chunk")] == "view"


def test_a_view_of_nothing_is_a_view():
    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x[:, :0].chunk(2, 0)

    graph = pw.from_torch(Nothing(), (torch.zeros(4, 2),))
    assert graph.op_kinds[graph.op_index("chunk")] == "view"
    assert inputs_of(graph, "chunk") == []


def test_a_reshape_is_an_op_only_where_it_copies():
    class Shapes(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.reshape(12) + 1, x.t().reshape(12) + 1, x.t().contiguous() + 1, x.contiguous() + 1

    graph = pw.from_torch(Shapes(), (torch.zeros(3, 4),))
    assert [name for name, kind in zip(graph.op_names, graph.op_kinds, strict=True) if kind == "copy"] == [
        "reshape", "contiguous",
    ]  # fmt: skip
    assert signature(graph, "reshape") == 'copy(float32[4,3]; {"strided":{"0":[1,0]}}) -> float32[12]'
    assert inputs_of(graph, "add") == ["x"]


def test_recurrent_nets():
    graph = pw.from_torch(nn.LSTM(4, 8, 2, bidirectional=True), (torch.zeros(3, 2, 4),))
    steps = 3 * 2
    per_layer = [2 * steps * 4 * 8 * (2 * (width + 8) + 8) for width in (4, 16)]
    assert work(graph) == {"lstm": sum(per_layer)}
    graph = pw.from_torch(nn.GRU(4, 8), (torch.zeros(3, 2, 4),))
    assert work(graph) == {"gru": steps * 3 * 8 * (2 * (4 + 8) + 8)}


def test_a_projected_lstm():
    graph = pw.from_torch(nn.LSTM(4, 8, 2, proj_size=3, bidirectional=True), (torch.zeros(5, 2, 4),))
    # Per step, direction and layer: four gates of 8 from the input and the 3 of the step before, then 8 to 3.
    per_layer = [2 * 10 * (4 * 8 * (2 * (width + 3) + 8) + 2 * 8 * 3) for width in (4, 6)]
    assert work(graph) == {"lstm": sum(per_layer)}


@pytest.mark.parametrize(
    ("cell", "name", "gates"),
    [(nn.LSTMCell, "lstm_cell", 4), (nn.GRUCell, "gru_cell", 3), (nn.RNNCell, "rnn_tanh_cell", 1)],
)
def test_a_cell_is_one_step(cell, name, gates):
    graph = pw.from_torch(cell(4, 8), (torch.zeros(2, 4),))
    assert work(graph) == {name: 2 * gates * 8 * (2 * (4 + 8) + 8)}


def test_a_bilinear_layer():
    graph = pw.from_torch(nn.Bilinear(4, 5, 6), (torch.zeros(2, 4), torch.zeros(2, 5)))
    assert work(graph) == {"bilinear": 2 * 6 * (2 * (4 * 5 + 5) + 1)}


def test_an_embedding_reads_only_its_rows():
    graph = pw.from_torch(nn.Embedding(1000, 8), (torch.zeros(3, 5, dtype=torch.long),))
    assert graph.bytes_accessed[graph.op_index("embedding")] == 2 * 15 * 8 * 4 + 15 * 8


def test_a_bag_reads_a_row_for_every_index():
    graph = pw.from_torch(nn.EmbeddingBag(1000, 8), (torch.zeros(3, 5, dtype=torch.long),))
    op = graph.op_index("embedding_bag")
    # 15 rows of 8 and as many indices; 3 offsets; 3 sums, and for each index and bag what torch keeps of it.
    assert graph.bytes_accessed[op] == 15 * 8 * 4 + 15 * 8 + 3 * 8 + 3 * 8 * 4 + (15 + 3 + 3) * 8
    assert graph.flops[op] == 15 * 8


def test_experts_have_flops():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(4, 16, 32, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(x, self.weights, offs=ends)

    args = (torch.zeros(10, 16, dtype=torch.bfloat16), torch.tensor([2, 4, 7, 10], dtype=torch.int32))
    graph = pw.from_torch(Experts().to("meta"), args)
    assert work(graph) == {"_grouped_mm": 2 * 10 * 16 * 32}


@pytest.mark.parametrize(
    ("function", "flops"),
    [
        (lambda a, b: torch.einsum("bij,bjk->bik", a, b), 2 * 3 * 4 * 5 * 6),
        (lambda a, b: torch.einsum("bij,bjk->ik", a, b), 2 * 3 * 4 * 5 * 6),
        (lambda a, b: torch.einsum("bij,bjk", a, b), 2 * 3 * 4 * 5 * 6),
        (lambda a, b: torch.einsum("...ij,...jk->...ik", a, b), 2 * 3 * 4 * 5 * 6),
        (lambda a, b: torch.einsum("...ij,...jk", a, b), 2 * 3 * 4 * 5 * 6),
        (lambda a, b: a @ b, 2 * 3 * 4 * 5 * 6),
        (lambda a, b: torch.inner(a, b.transpose(1, 2)), 2 * (3 * 4) * (3 * 6) * 5),
        (lambda a, b: torch.linalg.vecdot(a, b[:, :4, :5]), 2 * 3 * 4 * 5),
        (lambda a, b: torch.linalg.vecdot(a, b[:, :4, :5], dim=1), 2 * 3 * 4 * 5),
        (lambda a, b: torch.cdist(a, b.transpose(1, 2)), 2 * 3 * 4 * 6 * 5),
        (lambda a, b: nn.functional.bilinear(a[0], b[0, :4], torch.zeros(7, 5, 6)), 2 * 4 * 7 * (5 * 6 + 6)),
        (lambda a, b: torch.baddbmm(torch.zeros(3, 4, 6), a, b), 2 * 3 * 4 * 5 * 6 + 3 * 4 * 6),
        (lambda a, b: torch.tensordot(a, b, dims=([2], [1])), 2 * 3 * 4 * 3 * 6 * 5),
    ],
)
def test_products(function, flops):
    class Product(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return function(a, b)

    assert sum(work(pw.from_torch(Product(), (torch.zeros(3, 4, 5), torch.zeros(3, 5, 6)))).values()) == flops


def test_a_summation_without_an_arrow_keeps_what_occurs_once():
    assert einsum("ij,jk", [(2, 3), (3, 5)]) == {"equation": "ij,jk", "k": 3}
    assert einsum("...ij,jk", [(7, 2, 3), (3, 5)])["k"] == 3
    assert einsum("...i,...i->i", [(7, 2, 3), (2, 3)])["k"] == 7 * 2
    assert einsum("i,j", [(2,), (3,)])["k"] == 1
    with pytest.raises(InvalidInput, match="does not fit"):
        einsum("ij,jk", [(2, 3, 4), (3, 5)])


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("einsum", lambda a: torch.einsum("ij,jk,kl->il", a, a, a)),
        ("linalg_multi_dot", lambda a: torch.linalg.multi_dot([a, a, a])),
        ("linalg_matrix_power", lambda a: torch.linalg.matrix_power(a, 5)),
        ("linalg_solve", lambda a: torch.linalg.solve(a, a)),
        ("linalg_inv", torch.linalg.inv),
        ("linalg_matrix_norm", lambda a: torch.linalg.matrix_norm(a, 2)),
    ],
)
def test_a_product_without_a_formula_is_an_error(name, function):
    class Odd(nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return function(a)

    with pytest.raises(Unsupported, match=name):
        pw.from_torch(Odd(), (torch.zeros(3, 3),))


def test_norms_are_reductions():
    class Norms(nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return torch.linalg.norm(a, ord=2, dim=-1).sum() + torch.linalg.matrix_norm(a)

    graph = pw.from_torch(Norms(), (torch.zeros(3, 4),))
    assert sum(f for f, kind in zip(graph.flops, graph.op_kinds, strict=True) if kind == "reduce") == 12 + 3 + 12


@pytest.mark.parametrize(
    ("one", "other", "attribute"),
    [
        (nn.functional.gelu, lambda x: nn.functional.gelu(x, approximate="tanh"), '{"approximate":"tanh"}'),
        (torch.clone, lambda x: x.flip(0), '{"of":"flip"}'),
        (lambda x: x.cumsum(0), lambda x: x.cumprod(0), '{"of":"cumprod"}'),
        (torch.nan_to_num, torch.bernoulli, '{"of":"bernoulli"}'),
        (
            lambda x: nn.functional.interpolate(x[None], scale_factor=2, mode="bilinear"),
            lambda x: nn.functional.interpolate(x[None], scale_factor=2, mode="bicubic"),
            '{"of":"upsample_bicubic2d"}',
        ),
    ],
)
def test_what_takes_another_time_has_another_signature(one, other, attribute):
    class Does(nn.Module):
        def __init__(self, function) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.function(x)

    first, second = (
        pw.from_torch(Does(function), (torch.zeros(2, 4, 4),)).op_signatures[-1] for function in (one, other)
    )
    assert attribute in second
    assert first.partition("(")[0] == second.partition("(")[0]
    assert first != second


def test_what_has_no_formula_keeps_its_name_and_its_bytes():
    class Odd(nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return torch.special.i0(a)

    graph = pw.from_torch(Odd(), (torch.zeros(3, 4),))
    assert kinds_without_formula(graph) == {"aten.special_i0": 1}
    assert graph.bytes_accessed[graph.op_index("special_i0")] == 2 * 12 * 4


# ---- structure -------------------------------------------------------------------------------------------------------


def test_tied_weights_are_one_and_writes_are_waited_for():
    graph = pw.from_torch(Writer(), (torch.zeros(3, 4),))
    stored = {name: graph.op_kinds[i] for i, name in enumerate(graph.op_names) if graph.is_stored[i]}
    assert stored == {"first.weight": "parameter", "cache": "state"}
    assert inputs_of(graph, "second.linear") == ["first.weight", "first.linear"]
    assert inputs_of(graph, "sum") == ["mul"]
    assert inputs_of(graph, "mul") == ["slice"]
    assert inputs_of(graph, "sum:1") == ["add"]


def test_every_op_knows_its_call():
    reading = torch_export.read(torch_export.export(Block(), (torch.zeros(2, 6, 8),)), "block")
    computing = [name for name, kind in zip(reading.graph.op_names, reading.graph.op_kinds, strict=True)
                 if kind not in ("parameter", "state", "input")]  # fmt: skip
    assert list(reading.nodes) == computing
    assert reading.nodes["qkv.linear"].target is torch.ops.aten.linear.default


def test_modules_keep_their_mode_and_dropout_is_no_work():
    module = nn.Sequential(nn.Dropout(), nn.Linear(2, 2))
    module[1].eval()
    graph = pw.from_torch(module, (torch.zeros(1, 2),))
    assert list(work(graph)) == ["1.linear"]
    assert [module.training, module[0].training, module[1].training] == [True, True, False]


def test_fake_weights_and_regions_without_gradients():
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(1000, 1000, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                y = self.part(x)
            return y + 1

    with FakeTensorMode():
        module, x = Region(), torch.zeros(2, 1000)
    assert work(pw.from_torch(module, (x,))) == {"part.linear": 2 * 2 * 1000 * 1000, "add": 2000}


def test_control_flow_is_told():
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x + x, (x,))

    with pytest.raises(Unsupported, match="branch or a loop"):
        pw.from_torch(Branch(), (torch.zeros(3, 3),))


def test_what_cannot_be_exported_is_told():
    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if float(x.sum()) > 0 else x

    with pytest.raises(Unsupported, match="torch cannot export Looks"):
        pw.from_torch(Looks(), (torch.zeros(3),))
    with pytest.raises(InvalidInput, match=r"torch\.nn\.Module"):
        pw.from_torch(3, ())  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(50))
def test_reshapes_that_copy_are_those_of_torch(seed):
    rng = random.Random(seed)
    tensor = torch.zeros([rng.choice([1, 2, 3, 4]) for _ in range(rng.randint(1, 4))])
    for _ in range(3):
        if rng.random() < 0.5:
            tensor = tensor.permute(rng.sample(range(tensor.dim()), tensor.dim()))
        elif rng.random() < 0.5:
            axis = rng.randrange(tensor.dim())
            tensor = tensor.narrow(axis, 0, max(1, tensor.shape[axis] - 1))
        else:
            tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
    left, shape = tensor.numel(), []
    while left > 1:
        size = rng.choice([d for d in range(2, left + 1) if left % d == 0])
        shape.append(size)
        left //= size
    try:
        tensor.view(shape)
        fits = True
    except RuntimeError:
        fits = False
    laid = Laid(TensorType("float32", tuple(tensor.shape)), tensor.stride())
    assert _fits(laid, tuple(shape)) == fits


def test_the_page_about_importing_runs():
    page = (Path(__file__).parents[1] / "docs/importing.md").read_text()
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    assert sum(work(names["graph"]).values()) == 2 * (2 * 8 * 512 * 2048) + 8 * (2048 + 512) + 8 * 2048
    assert names["step"].name == "Sequential-training"
    assert names["problem"].num_ops == 4


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [Block(), Writer()], ids=["block", "writer"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_saved_program_gives_the_graph_of_the_module(module, strict, tmp_path):
    args = (torch.zeros(2, 6, 8),) if isinstance(module, Block) else (torch.zeros(3, 4),)
    with torch.no_grad():
        program = torch.export.export(module.eval(), args, strict=strict)
    torch.export.save(program, tmp_path / "model.pt2")
    graph = pt2.load(tmp_path / "model.pt2", "x")
    assert graph.digest == torch_export.read(program, "x").graph.digest


def test_symbolic_sizes_are_those_of_the_example(tmp_path):
    module, args = nn.Linear(4, 5).eval(), (torch.zeros(3, 4),)
    shapes = ({0: torch.export.Dim("rows", min=2, max=64)},)
    torch.export.save(torch.export.export(module, args, dynamic_shapes=shapes, strict=False), tmp_path / "m.pt2")
    assert work(pt2.load(tmp_path / "m.pt2")) == {"linear": 2 * 3 * 4 * 5 + 15}


def test_a_saved_program_can_be_planned(saved):
    plan = pw.plan(pw.load_problem(saved, "two-gpus-one-host"), "single")
    assert plan.problem.graph.name == "model"
    assert plan.value > 0


def test_a_saved_program_can_be_run(saved):
    program = torch_export.load_program(saved)
    args, kwargs = program.example_inputs
    assert program.module()(*args, **kwargs)[0].shape == (2, 6, 8)
    assert sum(work(torch_export.read(program, "x").graph).values()) == sum(work(pt2.load(saved)).values())


@pytest.mark.parametrize("device", ["cpu", "onnxruntime", "openvino:CPU"])
def test_a_saved_program_can_be_measured(saved, tmp_path, device):
    if device != "cpu":
        pytest.importorskip(device.partition(":")[0])
    with measure.opened(str(saved), device) as target:
        found = measure.profile(target, folder=tmp_path / "profiles")
    assert found.models["model"].seconds > 0
    assert measure.summary(target.graph, found)["measured"] == measure.summary(target.graph, found)["wanted"]


def test_a_whole_model_that_does_not_fit_is_told_and_its_ops_are_kept(tmp_path):
    class Huge(torch.nn.Module):
        def forward(self, x):
            return torch.relu(x), torch.ones(2**50)

    target = TorchTarget(Huge(), (torch.ones(4),), {}, "huge", "cpu")
    with pytest.raises(Unsupported, match="huge: the whole model cannot be run on cpu"):
        measure.profile(target, folder=tmp_path)
    (kept,) = tmp_path.glob("*.json.gz")
    assert [time.kind for time in files.load_profile(kept).ops.values()] == ["relu"]


def test_a_gpu_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InvalidInput, match="'cuda:7': there are 2, counted from cuda:0"):
        TorchTarget(torch.nn.ReLU(), (torch.ones(4),), {}, "m", "cuda:7")


def rewritten(source: Path, target: Path, change) -> Path:
    """A copy of an archive with entries changed: `change` maps a name and its bytes to new bytes."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.namelist():
            new.writestr(entry, change(entry, old.read(entry)))
    return target


class Odd(nn.Module):
    """Weights that are tied, of several dtypes, views of others, buffers, and a constant that is no part of a state."""

    def __init__(self):
        super().__init__()
        whole = torch.randn(3, 8, 8)
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.turned, self.part = nn.Parameter(torch.randn(8, 8).t()), nn.Parameter(whole[1])
        self.short = nn.Parameter(torch.randn(8).to(torch.bfloat16))
        self.register_buffer("offset", torch.randn(8))
        self.register_buffer("apart", torch.randn(8), persistent=False)

    def forward(self, ids, x):
        y = self.b(self.a(x)) @ self.turned @ self.part * self.short + self.offset + self.apart
        return y[ids] + torch.tensor([1.0, 2.0]).sum()


def test_a_saved_program_has_its_own_weights_and_inputs(tmp_path):
    torch.manual_seed(0)
    module, args = Odd().eval(), (torch.tensor([2, 0]), torch.randn(3, 8))
    torch.export.save(torch.export.export(module, args), tmp_path / "m.pt2")
    program, given = pt2.as_module(tmp_path / "m.pt2")
    for tensor in program.buffers():
        tensor.zero_()
    assert pt2.own_values(tmp_path / "m.pt2", program, given) == []
    with torch.no_grad():
        assert torch.equal(given[0], args[0])
        assert torch.equal(program(*given)[0], module(*args))


def test_values_that_are_pickles_are_left_alone(tmp_path):
    touched, buffer = tmp_path / "touched", io.BytesIO()
    torch.save(Payload(touched), buffer)
    module, args = nn.Linear(4, 4), (torch.randn(2, 4),)
    torch.export.save(torch.export.export(module, args), tmp_path / "m.pt2")

    def change(entry: str, raw: bytes) -> bytes:
        if entry.endswith("model_weights_config.json"):
            return raw.replace(b'"use_pickle": false', b'"use_pickle": true', 1)
        return buffer.getvalue() if entry.endswith("sample_inputs/model.pt") else raw

    evil = rewritten(tmp_path / "m.pt2", tmp_path / "evil.pt2", change)
    program, given = pt2.as_module(evil)
    assert pt2.own_values(evil, program, given) == ["weight", "inputs"]
    assert not touched.exists()
    assert torch.equal(next(held for held in program.buffers() if held.dim() == 1), module.bias)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda about: about.update(dtype=5), "with another type than the weights"),
        (lambda about: about.update(storage_offset={"as_int": 10**6}), "its bytes are not all there"),
    ],
)
def test_weights_that_are_not_as_the_file_says_are_refused(tmp_path, change, complaint):
    torch.export.save(torch.export.export(nn.Linear(4, 4), (torch.randn(2, 4),)), tmp_path / "m.pt2")

    def wrong(entry: str, raw: bytes) -> bytes:
        if not entry.endswith("model_weights_config.json"):
            return raw
        data = json.loads(raw)
        change(data["config"]["weight"]["tensor_meta"])
        return json.dumps(data).encode()

    evil = rewritten(tmp_path / "m.pt2", tmp_path / "evil.pt2", wrong)
    with pytest.raises(InvalidInput, match=f"evil.*{complaint}"):
        pt2.own_values(evil, *pt2.as_module(evil))


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickles_are_not_run(saved, tmp_path):
    """torch.export.load runs this one: the file it leaves shows that it would do harm."""
    touched = tmp_path / "touched"
    buffer = io.BytesIO()
    torch.save(Payload(touched), buffer)

    def change(entry: str, raw: bytes) -> bytes:
        return buffer.getvalue() if entry.endswith("sample_inputs/model.pt") else raw

    evil = rewritten(saved, tmp_path / "evil.pt2", change)
    assert pt2.load(evil, "x").digest == pt2.load(saved, "x").digest
    torch_export.load_program(evil)
    assert not touched.exists()
    with contextlib.suppress(Exception):
        torch.export.load(evil)
    assert touched.exists()


def test_weights_as_pickles_and_sizes_as_code_are_not_run(saved, tmp_path):
    touched = tmp_path / "touched"
    code = f"open({str(touched)!r}, 'w')"

    def change(entry: str, raw: bytes) -> bytes:
        if entry.endswith("model_weights_config.json"):
            return raw.replace(b'"use_pickle": false', b'"use_pickle": true')
        if "/weights/weight_" in entry:
            return pickle.dumps(Payload(touched))
        if entry.endswith("models/model.json"):
            data = json.loads(raw)
            for held in data["graph_module"]["graph"]["tensor_values"].values():
                held["sizes"] = [{"as_expr": {"expr_str": code, "hint": size}} for size in held["sizes"]]
            return json.dumps(data).encode()
        return raw

    evil = rewritten(saved, tmp_path / "evil.pt2", change)
    assert pt2.load(evil, "x").digest == pt2.load(saved, "x").digest
    torch_export.load_program(evil)
    assert not touched.exists()


@pytest.mark.parametrize(
    ("name", "arg"),
    [
        ("z=1)\rimport os;os.mkdir({!r})\rdef g():\r    return dict(x", {"as_int": 1}),
        ("input", {"as_int": {"__import__('os').mkdir({!r})": 1}}),
        ("unheard_of", {"as_int": 1}),
    ],
)
def test_what_torch_writes_into_source_text_is_checked(saved, tmp_path, name, arg):
    """It executes that text, with the names of arguments in it as they are."""
    touched = tmp_path / "touched"

    def change(entry: str, raw: bytes) -> bytes:
        if not entry.endswith("model.json"):
            return raw
        data = json.loads(raw)
        given = data["graph_module"]["graph"]["nodes"][0]["inputs"]
        added = {"name": name.replace("{!r}", repr(str(touched))), "arg": arg, "kind": 1}
        data["graph_module"]["graph"]["nodes"][0]["inputs"] = [g for g in given if g["name"] != name] + [added]
        return json.dumps(data).replace("{!r}", str(touched)).encode()

    with pytest.raises(InvalidInput, match=r"evil\.pt2: .*takes no"):
        torch_export.load_program(rewritten(saved, tmp_path / "evil.pt2", change))
    assert not touched.exists()


@pytest.mark.parametrize("overload", ["__class__", "overloads", "no_such"])
def test_only_overloads_of_operators_are_run(saved, tmp_path, overload):
    def change(entry: str, raw: bytes) -> bytes:
        return raw.replace(b"linear.default", b"linear." + overload.encode()) if entry.endswith("model.json") else raw

    with pytest.raises(InvalidInput, match=r"evil\.pt2"):
        torch_export.load_program(rewritten(saved, tmp_path / "evil.pt2", change))


@pytest.mark.parametrize("target", ["torch.ops.aten.from_file.default", "torch.hub.load", "os.system"])
def test_only_what_computes_is_run(saved, tmp_path, target):
    def change(entry: str, raw: bytes) -> bytes:
        return raw.replace(b"torch.ops.aten.linear.default", target.encode()) if entry.endswith("model.json") else raw

    evil = rewritten(saved, tmp_path / "evil.pt2", change)
    with pytest.raises(Unsupported, match=r"evil\.pt2"):
        torch_export.load_program(evil)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda data: data["graph_module"]["graph"]["nodes"][0].pop("target"), "target"),
        (lambda data: data["schema_version"].update(major=9), "version 9"),
        (lambda data: data["graph_module"]["graph"]["tensor_values"]["x"].update(dtype=99), "no dtype 99"),
        (lambda data: data["graph_module"]["graph"]["tensor_values"]["x"].update(sizes=[{"as_int": -1}] * 3), "size"),
        (
            lambda data: data["graph_module"]["graph"]["tensor_values"]["x"].update(sizes=[{"as_int": 2**62}] * 3),
            "",
        ),
        (lambda data: data["graph_module"]["graph"]["nodes"].reverse(), "not as torch"),
        (lambda data: data["graph_module"]["graph"]["tensor_values"].clear(), ""),
    ],
)
def test_wrong_programs_are_told(saved, tmp_path, change, complaint):
    def edited(entry: str, raw: bytes) -> bytes:
        if not entry.endswith("models/model.json"):
            return raw
        data = json.loads(raw)
        change(data)
        return json.dumps(data).encode()

    with pytest.raises(PlacewiseError, match=rf"wrong\.pt2: .*{complaint}"):
        pt2.load(rewritten(saved, tmp_path / "wrong.pt2", edited))


def test_a_small_file_that_unpacks_to_a_huge_one_is_refused(saved, tmp_path, monkeypatch):
    bomb = tmp_path / "bomb.pt2"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/models/model.json", b"[" + b" " * 3_000_000 + b"]")
    monkeypatch.setattr(pt2, "MAX_BYTES", 1_000_000)
    with pytest.raises(InvalidInput, match="larger than"):
        pt2.load(bomb)
    monkeypatch.setattr(pt2, "MAX_BYTES", 10_000_000)
    monkeypatch.setattr(pt2, "MAX_VALUES", 10)
    with pytest.raises(InvalidInput, match="more than 10 values"):
        pt2.load(saved)


def test_deep_nesting_is_refused(tmp_path):
    deep = tmp_path / "deep.pt2"
    with zipfile.ZipFile(deep, "w") as archive:
        archive.writestr("m/models/model.json", b"[" * 1_000_000)
    with pytest.raises(InvalidInput, match="deep"):
        pt2.load(deep)


def is_refused(path: Path) -> bool:
    """With an error that names the file; any other exception ends the test."""
    try:
        pt2.load(path)
    except PlacewiseError as error:
        return str(error).startswith(str(path))
    return False


def test_damaged_files_are_told_and_nothing_else_happens(saved, tmp_path):
    whole, path = saved.read_bytes(), tmp_path / "damaged.pt2"
    with zipfile.ZipFile(saved) as archive:
        info = archive.getinfo(next(name for name in archive.namelist() if name.endswith("models/model.json")))
    start, size = info.header_offset, info.file_size
    rng, refused = random.Random(0), 0
    for attempt in range(300):
        raw = bytearray(whole)
        if attempt % 3 == 0:
            raw = raw[: rng.randrange(len(raw))]
        else:  # mostly in the program, which is the part that is read; its checksum is made to fit
            for _ in range(rng.choice([1, 1, 3])):
                where = rng.randrange(start + 100, start + 100 + size) if attempt % 3 == 1 else rng.randrange(len(raw))
                raw[where] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
        refused += is_refused(path)
    assert refused > 100


def test_changed_programs_are_told_and_nothing_else_happens(saved, tmp_path):
    """As above, past the checksums of the archive."""
    with zipfile.ZipFile(saved) as archive:
        entry = next(name for name in archive.namelist() if name.endswith("models/model.json"))
        whole = archive.read(entry)
    path, rng, refused = tmp_path / "changed.pt2", random.Random(1), 0
    for _ in range(300):
        raw = bytearray(whole)
        for _ in range(rng.choice([1, 2, 5])):
            raw[rng.randrange(len(raw))] = rng.choice(b'0129{}[]",:-etn' + struct.pack("B", rng.randrange(256)))
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(entry, bytes(raw))
        refused += is_refused(path)
    assert refused > 100
