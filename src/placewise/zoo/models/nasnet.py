"""NASNet-A (Zoph et al. 2017, arXiv:1707.07012): cells that a search found, stacked by hand.

As TF-Slim releases it, without the auxiliary head. Windows are padded evenly, where TensorFlow pads an even side more
at its end: the sizes are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Shape(NamedTuple):
    """What a cell puts out."""

    channels: int
    halvings: int  # how often the image's side was halved


class ReluConvNorm(nn.Sequential):
    """ReLU, 1 x 1 convolution, batch norm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.ReLU(), nn.Conv2d(inputs, outputs, 1, bias=False), _norm(outputs))


class Separable(nn.Sequential):
    """Twice: ReLU, one window per channel, 1 x 1 over all channels, batch norm."""

    def __init__(self, inputs: int, outputs: int, window: int, stride: int = 1) -> None:
        super().__init__(
            nn.ReLU(), _per_channel(inputs, window, stride), nn.Conv2d(inputs, outputs, 1, bias=False), _norm(outputs),
            nn.ReLU(), _per_channel(outputs, window), nn.Conv2d(outputs, outputs, 1, bias=False), _norm(outputs),
        )  # fmt: skip


class HalfSize(nn.Module):
    """A quarter of the pixels, from two grids that are one pixel apart."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, bias=False)
        self.norm = _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(x)
        shifted = functional.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        even, odd = (functional.avg_pool2d(grid, 1, stride=2) for grid in (x, shifted))
        return self.norm(torch.cat([self.even(even), self.odd(odd)], 1))


class Normal(nn.Module):
    """The cell that keeps the size. It reads the outputs of the last two cells and makes 6 x `channels`."""

    def __init__(self, before: Shape, last: Shape, channels: int) -> None:
        super().__init__()
        self.before = _fit(before, last, channels)
        self.last = ReluConvNorm(last.channels, channels)
        self.last_5x5 = Separable(channels, channels, 5)
        self.last_3x3 = Separable(channels, channels, 3)
        self.before_3x3_a = Separable(channels, channels, 3)
        self.before_3x3_b = Separable(channels, channels, 3)
        self.before_5x5 = Separable(channels, channels, 5)

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        b, h = self.before(before), self.last(last)
        parts = [
            b,
            self.last_5x5(h) + self.before_3x3_a(b),
            self.before_5x5(b) + self.before_3x3_b(b),
            _average(h) + b,
            _average(b) + _average(b),
            self.last_3x3(h) + h,
        ]
        return torch.cat(parts, 1)


class Reduction(nn.Module):
    """The cell that halves each side. It reads the outputs of the last two cells and makes 4 x `channels`."""

    def __init__(self, before: Shape | None, last: Shape, channels: int) -> None:
        super().__init__()
        # The first cell of all has only one before it: it reads that twice, the second time as it is.
        self.before = nn.Identity() if before is None else _fit(before, last, channels)
        inputs = last.channels if before is None else channels
        self.last = ReluConvNorm(last.channels, channels)
        self.last_5x5 = Separable(channels, channels, 5, 2)
        self.before_7x7_a = Separable(inputs, channels, 7, 2)
        self.before_7x7_b = Separable(inputs, channels, 7, 2)
        self.before_5x5 = Separable(inputs, channels, 5, 2)
        self.inner_3x3 = Separable(channels, channels, 3)

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        b, h = self.before(before), self.last(last)
        inner = self.last_5x5(h) + self.before_7x7_a(b)
        largest = functional.max_pool2d(h, 3, stride=2, padding=1)
        second = largest + self.before_7x7_b(b)
        parts = [
            second,
            _average(h, stride=2) + self.before_5x5(b),
            _average(inner) + second,
            self.inner_3x3(inner) + largest,
        ]
        return torch.cat(parts, 1)


class NASNet(nn.Module):
    """A stem of one convolution and two reductions; three stages of normal cells with reductions between them.

    `skips_reductions`: the first cell after a reduction reads, besides it, not what the reduction read but the cell
    before that.
    """

    def __init__(self, cells: int, channels: int, stem: int, *, skips_reductions: bool, classes: int = 1000) -> None:
        super().__init__()
        self.skips_reductions = skips_reductions
        self.conv0 = nn.Sequential(nn.Conv2d(3, stem, 3, stride=2, bias=False), _norm(stem))
        first = Shape(stem, 1)
        self.stem_1, second = _reduction(None, first, channels // 4)
        self.stem_2, third = _reduction(first, second, channels // 2)
        before, last = second, third
        self.stages = nn.ModuleList()
        self.reductions = nn.ModuleList()
        for stage in range(3):
            if stage:
                reduction, reduced = _reduction(before, last, channels << stage)
                self.reductions.append(reduction)
                before, last = before if skips_reductions else last, reduced
            self.stages.append(nn.ModuleList())
            for _ in range(cells):
                self.stages[-1].append(Normal(before, last, channels << stage))
                before, last = last, Shape(6 * (channels << stage), last.halvings)
        self.relu = nn.ReLU()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout()
        self.fc = nn.Linear(last.channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        first = self.conv0(images)
        before = self.stem_1(first, first)
        last = self.stem_2(first, before)
        for stage, cells in enumerate(self.stages):
            if stage:
                reduced = self.reductions[stage - 1](before, last)
                before, last = before if self.skips_reductions else last, reduced
            for cell in cells:
                before, last = last, cell(before, last)
        return self.fc(self.dropout(torch.flatten(self.avgpool(self.relu(last)), 1)))


def nasnet_a_large() -> NASNet:
    """NASNet-A (6 @ 4032), for 331 x 331 images."""
    return NASNet(cells=6, channels=168, stem=96, skips_reductions=True)


def nasnet_a_mobile() -> NASNet:
    """NASNet-A (4 @ 1056), for 224 x 224 images."""
    return NASNet(cells=4, channels=44, stem=32, skips_reductions=False)


def _reduction(before: Shape | None, last: Shape, channels: int) -> tuple[Reduction, Shape]:
    return Reduction(before, last, channels), Shape(4 * channels, last.halvings + 1)


def _fit(before: Shape, last: Shape, channels: int) -> nn.Module:
    """Bring the older output to the size of the newer one."""
    if before.halvings < last.halvings:
        return HalfSize(before.channels, channels)
    return ReluConvNorm(before.channels, channels)


def _per_channel(channels: int, window: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, window, stride, window // 2, groups=channels, bias=False)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


def _average(x: Tensor, stride: int = 1) -> Tensor:
    return functional.avg_pool2d(x, 3, stride=stride, padding=1, count_include_pad=False)
