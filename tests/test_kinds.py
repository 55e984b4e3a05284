"""Work and bytes of every family of kinds, counted by hand."""

import json

import pytest

from placewise.errors import InvalidInput
from placewise.kinds import KINDS, Op, TensorType, family


def tensor(text: str) -> TensorType:
    """ "2,3" is float32[2,3]; another dtype stands before it: "int64:2,3"."""
    dtype, _, shape = text.rpartition(":")
    return TensorType(dtype or "float32", tuple(int(size) for size in shape.split(",") if size))


def op(kind: str, inputs: str, outputs: str, **attributes) -> Op:
    return Op(kind, [tensor(t) for t in inputs.split()], [tensor(t) for t in outputs.split()], attributes)


TABLE = [
    # Nothing is computed or moved.
    (op("parameter", "", "4,5"), 0, 0),
    (op("view", "4,5", "2,5"), 0, 0),
    # 12 products of length 5; a bias for each; in another layout; in half precision.
    (op("matmul", "3,5 5,4", "3,4"), 12 * 10, 4 * (15 + 20 + 12)),
    (op("matmul", "3,5 5,4 4", "3,4"), 12 * 11, 4 * (15 + 20 + 4 + 12)),
    (op("matmul", "5,3 5,4", "3,4", k=5), 12 * 10, 4 * (15 + 20 + 12)),
    (op("matmul", "float16:3,5 float16:5,4", "float16:3,4"), 12 * 10, 2 * (15 + 20 + 12)),
    # x [2,3] by 4 matrices 3 x 5, then 5 by 5; a bias.
    (op("bilinear", "2,3 2,5 4,3,5 4", "2,4"), 8 * (2 * 15 + 2 * 5 + 1), 4 * (6 + 10 + 60 + 4 + 8)),
    # 6 rows over 2 experts, and 1 row over 4, of which three are not read.
    (op("grouped_matmul", "6,5 2,5,4 int32:2", "6,4"), 6 * 4 * 10, 4 * (30 + 40 + 24) + 8),
    (op("grouped_matmul", "1,5 4,5,4 int32:4", "1,4"), 4 * 10, 4 * (5 + 20 + 4) + 16),
    # 2 x 8 x 4 x 4 results of 3 x 3 x 3 each; of two groups half of that; transposed, each input is spread.
    (op("conv", "2,3,4,4 8,3,3,3 8", "2,8,4,4", padding=1), 256 * 55, 4 * (96 + 216 + 8 + 256)),
    (op("conv", "2,4,4,4 8,2,3,3", "2,8,2,2", groups=2), 64 * 36, 4 * (128 + 144 + 64)),
    (op("conv_transposed", "1,4,5 4,3,2", "1,3,10"), 20 * 2 * 6, 4 * (20 + 24 + 30)),
    # The gradients of x and of the weight, and of the bias by adding up.
    (op("conv_backward", "2,8,4,4 2,3,4,4 8,3,3,3", "2,3,4,4 8,3,3,3 8"), 2 * 256 * 54 + 256,
     4 * (256 + 96 + 216 + 96 + 216 + 8)),
    # 6 queries, 5 keys each: dot products of 4, a softmax, sums of 7; 9 keys with those of a cache.
    (op("attention", "2,3,4 2,5,4 2,5,7", "2,3,7"), 30 * (8 + 5 + 14), 4 * (24 + 40 + 70 + 42)),
    (op("attention", "2,3,4 2,5,4 2,5,7", "2,3,7", keys=9), 54 * (8 + 5 + 14), 4 * (24 + 40 + 70 + 42)),
    (op("attention_backward", "2,3,4 2,3,4 2,5,4 2,5,4", "2,3,4"), 2.5 * 30 * (16 + 5), 4 * (24 * 3 + 40 * 2)),
    # 6 steps in all: gates of 8 from 4 + 8, and 8 to apply each.
    (op("lstm", "3,2,4 32,4 32,8", "3,2,8", hidden=8), 6 * 32 * 32, 4 * (24 + 128 + 256 + 48)),
    (op("gru", "2,4 24,4 24,8", "2,8", hidden=8), 2 * 24 * 32, 4 * (8 + 96 + 192 + 16)),
    (op("rnn", "3,2,4 8,4 8,8", "3,2,16", hidden=8, layers=2, directions=2), 2 * 6 * 8 * (32 + 56),
     4 * (24 + 32 + 64 + 96)),
    (op("lstm", "3,2,4 32,4 32,3 3,8", "3,2,3", hidden=8, projected=3), 6 * (32 * (2 * 7 + 8) + 48),
     4 * (24 + 128 + 96 + 24 + 18)),
    (op("softmax", "2,6", "2,6"), 5 * 12, 4 * 24),
    (op("batch_norm", "2,3,4 3 3 3 3", "2,3,4"), 4 * 24, 4 * (24 + 12 + 24)),
    (op("layer_norm", "2,6 6 6", "2,6"), 8 * 12, 4 * (12 + 12 + 12)),
    (op("rms_norm", "2,6 6", "2,6"), 5 * 12, 4 * (12 + 6 + 12)),
    (op("cross_entropy", "2,10 int64:2", ""), 6 * 20, 4 * 20 + 16),
    (op("reduce", "4,5", "4", of="sum"), 20, 4 * 24),
    (op("cumsum", "4,5", "4,5"), 20, 4 * 40),
    (op("sort", "3,8", "3,8 int64:3,8"), 24 * 3, 4 * 48 + 8 * 24),
    (op("max_pool", "1,2,4,4", "1,2,2,2", window=4), 8 * 4, 4 * (32 + 8)),
    (op("pool_backward", "1,2,2,2 1,2,4,4", "1,2,4,4"), 2 * 32, 4 * (8 + 32 + 32)),
    (op("resize", "1,1,2,2", "1,1,4,4", mode="linear"), 7 * 16, 4 * 20),
    # Of a table only what is picked is read: 3 rows of 4, or 6 rows that become 2 sums.
    (op("embedding", "100,4 int64:3", "3,4"), 0, 2 * 4 * 12 + 3 * 8),
    (op("embedding_bag", "100,4 int64:6 int64:2", "2,4"), 24, 4 * 24 + 8 * 8 + 4 * 8),
    (op("gather", "100,4 int64:3", "3,4", axis=0), 0, 2 * 4 * 12 + 3 * 8),
    (op("scatter", "100,4 int64:3 3,4", "100,4"), 0, 2 * (24 + 48)),
    (op("embedding_backward", "3,4 int64:3", "100,4"), 12, 4 * 12 + 24 + 4 * 400),
    (op("concat", "2,3 2,5", "2,8"), 0, 4 * 32),
    (op("cast", "2,3", "float16:2,3"), 0, 6 * 4 + 6 * 2),
    (op("fill", "", "2,3"), 0, 24),
    (op("add", "2,3 3", "2,3"), 6, 4 * (6 + 3 + 6)),
    (op("silu", "2,3", "2,3"), 5 * 6, 4 * 12),
    (op("gelu", "2,3", "2,3"), 8 * 6, 4 * 12),
    (op("mish", "2,3", "2,3"), 10 * 6, 4 * 12),
    # Parameter and gradient are read, the parameter is written; momentum has one more to read and write, Adam two.
    (op("sgd", "10 10", ""), 20, 4 * 30),
    (op("momentum", "10 10 10", ""), 40, 4 * 50),
    (op("adam", "10 10 10 10", ""), 120, 4 * 70),
    # What is not known moves what it reads and makes.
    (op("aten.special_i0", "2,3", "2,3"), 0, 4 * 12),
]  # fmt: skip


@pytest.mark.parametrize(("made", "flops", "moved"), TABLE, ids=[made.signature for made, _, _ in TABLE])
def test_work_and_bytes(made, flops, moved):
    assert (made.flops, made.bytes_accessed) == (flops, moved)


def test_the_table_has_every_family():
    assert {family(made.kind) for made, _, _ in TABLE} == {kind.family for kind in KINDS.values()} | {"other"}


def test_what_is_mirrored_is_of_the_family_of_its_forward():
    assert family("matmul_backward") == family("bilinear_backward") == "matmul"
    assert family("lstm_backward") == "recurrent"
    assert family("conv_backward") == "conv"
    assert family("view_backward") == "view"
    assert family("aten.special_i0_backward") == family("aten.special_i0") == "other"


def test_a_signature_says_all_in_one_line():
    made = op("conv", "1,2,3 int8:4,2,1", "1,4,3", stride=[2], groups=1)
    assert made.signature == 'conv(float32[1,2,3], int8[4,2,1]; {"groups":1,"stride":[2]}) -> float32[1,4,3]'
    assert json.loads(made.signature.partition("; ")[2].partition(")")[0]) == made.attributes
    assert op("fill", "", "2").signature == "fill() -> float32[2]"


def test_small_numbers_are_packed():
    assert tensor("int4:3,5").bytes == 7.5
    assert tensor("uint1:16").bytes == 2
    with pytest.raises(InvalidInput, match="float7"):
        _ = tensor("float7:2").bytes


@pytest.mark.parametrize(
    "wrong",
    [
        op("matmul", "", "2"),
        op("matmul", "3,0 0,4", "3,4"),
        op("conv", "1,2,3", "1,2,3"),
        op("lstm", "3,2,4", "3,2,8"),
        op("max_pool", "4", "2"),
    ],
    ids=lambda made: made.signature,
)
def test_what_cannot_be_is_told(wrong):
    with pytest.raises(InvalidInput, match=wrong.kind):
        _ = wrong.flops
