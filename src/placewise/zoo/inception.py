"""Inception-V3 (Szegedy et al. 2015, arXiv:1512.00567), op by op, with the module paths of torchvision's `Inception3`.

Inference in float32 without the auxiliary head. A multiply-add is two FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass

from placewise.graph import Graph, Tensor
from placewise.zoo.builder import ModelBuilder


@dataclass(frozen=True)
class _Image:
    """A feature map that some op put out."""

    tensor: Tensor
    channels: int
    side: int


def inception_v3(*, batch: int = 32) -> Graph:
    """The forward pass over a batch of 299 x 299 images."""
    return _Inception("inception-v3", batch).build()


class _Inception(ModelBuilder):
    def __init__(self, name: str, batch: int) -> None:
        super().__init__(name, "float32")
        self.batch = batch

    def build(self) -> Graph:
        (images,) = self.op("images", kind="input", outputs=[self.batch * 3 * 299 * 299 * self.item_bytes])
        x = _Image(images, 3, 299)
        x = self.conv("Conv2d_1a_3x3", x, 32, (3, 3), stride=2)
        x = self.conv("Conv2d_2a_3x3", x, 32, (3, 3), padded=False)
        x = self.conv("Conv2d_2b_3x3", x, 64, (3, 3))
        x = self.max_pool("maxpool1", x, module="maxpool1")
        x = self.conv("Conv2d_3b_1x1", x, 80)
        x = self.conv("Conv2d_4a_3x3", x, 192, (3, 3), padded=False)
        x = self.max_pool("maxpool2", x, module="maxpool2")
        x = self.mixed_35("Mixed_5b", x, pool_channels=32)
        x = self.mixed_35("Mixed_5c", x, pool_channels=64)
        x = self.mixed_35("Mixed_5d", x, pool_channels=64)
        x = self.reduce_to_17("Mixed_6a", x)
        x = self.mixed_17("Mixed_6b", x, inner=128)
        x = self.mixed_17("Mixed_6c", x, inner=160)
        x = self.mixed_17("Mixed_6d", x, inner=160)
        x = self.mixed_17("Mixed_6e", x, inner=192)
        x = self.reduce_to_8("Mixed_7a", x)
        x = self.mixed_8("Mixed_7b", x)
        x = self.mixed_8("Mixed_7c", x)
        x = self.pool("avgpool", "avg_pool", x, window=x.side, side=1, module="avgpool")
        self.classifier("fc", x, classes=1000)
        return self.graph()

    # ---- blocks, named after the side of the feature maps that they work on ---------------------------------------

    def mixed_35(self, path: str, x: _Image, pool_channels: int) -> _Image:
        narrow = self.conv(f"{path}.branch1x1", x, 64)
        five = self.conv(f"{path}.branch5x5_1", x, 48)
        five = self.conv(f"{path}.branch5x5_2", five, 64, (5, 5))
        twice = self.conv(f"{path}.branch3x3dbl_1", x, 64)
        twice = self.conv(f"{path}.branch3x3dbl_2", twice, 96, (3, 3))
        twice = self.conv(f"{path}.branch3x3dbl_3", twice, 96, (3, 3))
        return self.concat(
            f"{path}.concat", [narrow, five, twice, self.pool_branch(path, x, pool_channels)], module=path
        )

    def reduce_to_17(self, path: str, x: _Image) -> _Image:
        three = self.conv(f"{path}.branch3x3", x, 384, (3, 3), stride=2)
        twice = self.conv(f"{path}.branch3x3dbl_1", x, 64)
        twice = self.conv(f"{path}.branch3x3dbl_2", twice, 96, (3, 3))
        twice = self.conv(f"{path}.branch3x3dbl_3", twice, 96, (3, 3), stride=2)
        return self.concat(
            f"{path}.concat", [three, twice, self.max_pool(f"{path}.max_pool", x, module=path)], module=path
        )

    def mixed_17(self, path: str, x: _Image, inner: int) -> _Image:
        narrow = self.conv(f"{path}.branch1x1", x, 192)
        seven = self.conv(f"{path}.branch7x7_1", x, inner)
        seven = self.conv(f"{path}.branch7x7_2", seven, inner, (1, 7))
        seven = self.conv(f"{path}.branch7x7_3", seven, 192, (7, 1))
        twice = self.conv(f"{path}.branch7x7dbl_1", x, inner)
        twice = self.conv(f"{path}.branch7x7dbl_2", twice, inner, (7, 1))
        twice = self.conv(f"{path}.branch7x7dbl_3", twice, inner, (1, 7))
        twice = self.conv(f"{path}.branch7x7dbl_4", twice, inner, (7, 1))
        twice = self.conv(f"{path}.branch7x7dbl_5", twice, 192, (1, 7))
        return self.concat(f"{path}.concat", [narrow, seven, twice, self.pool_branch(path, x, 192)], module=path)

    def reduce_to_8(self, path: str, x: _Image) -> _Image:
        three = self.conv(f"{path}.branch3x3_1", x, 192)
        three = self.conv(f"{path}.branch3x3_2", three, 320, (3, 3), stride=2)
        seven = self.conv(f"{path}.branch7x7x3_1", x, 192)
        seven = self.conv(f"{path}.branch7x7x3_2", seven, 192, (1, 7))
        seven = self.conv(f"{path}.branch7x7x3_3", seven, 192, (7, 1))
        seven = self.conv(f"{path}.branch7x7x3_4", seven, 192, (3, 3), stride=2)
        return self.concat(
            f"{path}.concat", [three, seven, self.max_pool(f"{path}.max_pool", x, module=path)], module=path
        )

    def mixed_8(self, path: str, x: _Image) -> _Image:
        narrow = self.conv(f"{path}.branch1x1", x, 320)
        three = self.conv(f"{path}.branch3x3_1", x, 384)
        three = self.fork(f"{path}.branch3x3_2", three, module=path)
        twice = self.conv(f"{path}.branch3x3dbl_1", x, 448)
        twice = self.conv(f"{path}.branch3x3dbl_2", twice, 384, (3, 3))
        twice = self.fork(f"{path}.branch3x3dbl_3", twice, module=path)
        return self.concat(f"{path}.concat", [narrow, three, twice, self.pool_branch(path, x, 192)], module=path)

    def fork(self, path: str, x: _Image, *, module: str) -> _Image:
        wide = self.conv(f"{path}a", x, 384, (1, 3))
        tall = self.conv(f"{path}b", x, 384, (3, 1))
        return self.concat(f"{path}_concat", [wide, tall], module=module)

    def pool_branch(self, path: str, x: _Image, channels: int) -> _Image:
        pooled = self.pool(f"{path}.avg_pool", "avg_pool", x, window=3, side=x.side, module=path)
        return self.conv(f"{path}.branch_pool", pooled, channels)

    # ---- ops -------------------------------------------------------------------------------------------------------

    def conv(
        self,
        path: str,
        x: _Image,
        channels: int,
        window: tuple[int, int] = (1, 1),
        *,
        stride: int = 1,
        padded: bool = True,
    ) -> _Image:
        """Convolution, batch norm, ReLU. Convolutions with stride 2 are never padded, as the paper has them."""
        side = x.side if padded and stride == 1 else (x.side - window[0]) // stride + 1
        size = self.batch * channels * side * side
        depth = x.channels * window[0] * window[1]
        weight = self.stored(f"{path}.conv.weight", channels * depth)
        y = self.compute(f"{path}.conv", "conv2d", [x.tensor, weight], size, flops=2 * size * depth)
        affine = [self.stored(f"{path}.bn.{part}", channels) for part in ("weight", "bias")]
        # The running mean and variance are not trained, so they are the op's own bytes and no parameters.
        statistics = 2 * channels * self.item_bytes
        y = self.compute(f"{path}.bn", "batch_norm", [y, *affine], size, flops=2 * size, resident=statistics)
        y = self.compute(f"{path}.relu", "relu", [y], size, flops=size, module=path)
        return _Image(y, channels, side)

    def max_pool(self, name: str, x: _Image, *, module: str) -> _Image:
        return self.pool(name, "max_pool", x, window=3, side=(x.side - 3) // 2 + 1, module=module)

    def pool(self, name: str, kind: str, x: _Image, *, window: int, side: int, module: str) -> _Image:
        size = self.batch * x.channels * side * side
        y = self.compute(name, kind, [x.tensor], size, flops=size * window * window, module=module)
        return _Image(y, x.channels, side)

    def concat(self, name: str, parts: list[_Image], *, module: str) -> _Image:
        channels, side = sum(part.channels for part in parts), parts[0].side
        size = self.batch * channels * side * side
        y = self.compute(name, "concat", [part.tensor for part in parts], size, module=module)
        return _Image(y, channels, side)

    def classifier(self, path: str, x: _Image, classes: int) -> None:
        weight = self.stored(f"{path}.weight", x.channels * classes)
        bias = self.stored(f"{path}.bias", classes)
        flops = 2 * self.batch * x.channels * classes
        self.compute(path, "linear", [x.tensor, weight, bias], self.batch * classes, flops=flops)
