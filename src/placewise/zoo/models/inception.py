"""Inception-V3 (Szegedy et al. 2015, arXiv:1512.00567), with the module paths of torchvision's `Inception3`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from placewise.zoo.models.blocks import ConvNorm


class Mixed35(nn.Module):
    """On 35 x 35 images: 1 x 1; 5 x 5; 3 x 3 twice; a pool."""

    def __init__(self, inputs: int, pooled: int) -> None:
        super().__init__()
        self.branch1x1 = ConvNorm(inputs, 64, 1)
        self.branch5x5_1 = ConvNorm(inputs, 48, 1)
        self.branch5x5_2 = ConvNorm(48, 64, 5, padding=2)
        self.branch3x3dbl_1 = ConvNorm(inputs, 64, 1)
        self.branch3x3dbl_2 = ConvNorm(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = ConvNorm(96, 96, 3, padding=1)
        self.branch_pool = ConvNorm(inputs, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        five = self.branch5x5_2(self.branch5x5_1(x))
        twice = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch1x1(x), five, twice, self.branch_pool(_blur(x))], 1)


class ReduceTo17(nn.Module):
    """35 x 35 to 17 x 17."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch3x3 = ConvNorm(inputs, 384, 3, stride=2)
        self.branch3x3dbl_1 = ConvNorm(inputs, 64, 1)
        self.branch3x3dbl_2 = ConvNorm(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = ConvNorm(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        twice = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), twice, _halve(x)], 1)


class Mixed17(nn.Module):
    """On 17 x 17 images: 1 x 1; 7 x 7 in two strips; the same twice; a pool."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.branch1x1 = ConvNorm(768, 192, 1)
        self.branch7x7_1 = ConvNorm(768, inner, 1)
        self.branch7x7_2 = ConvNorm(inner, inner, (1, 7), padding=(0, 3))
        self.branch7x7_3 = ConvNorm(inner, 192, (7, 1), padding=(3, 0))
        self.branch7x7dbl_1 = ConvNorm(768, inner, 1)
        self.branch7x7dbl_2 = ConvNorm(inner, inner, (7, 1), padding=(3, 0))
        self.branch7x7dbl_3 = ConvNorm(inner, inner, (1, 7), padding=(0, 3))
        self.branch7x7dbl_4 = ConvNorm(inner, inner, (7, 1), padding=(3, 0))
        self.branch7x7dbl_5 = ConvNorm(inner, 192, (1, 7), padding=(0, 3))
        self.branch_pool = ConvNorm(768, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        seven = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        twice = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        twice = self.branch7x7dbl_5(self.branch7x7dbl_4(twice))
        return torch.cat([self.branch1x1(x), seven, twice, self.branch_pool(_blur(x))], 1)


class ReduceTo8(nn.Module):
    """17 x 17 to 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.branch3x3_1 = ConvNorm(768, 192, 1)
        self.branch3x3_2 = ConvNorm(192, 320, 3, stride=2)
        self.branch7x7x3_1 = ConvNorm(768, 192, 1)
        self.branch7x7x3_2 = ConvNorm(192, 192, (1, 7), padding=(0, 3))
        self.branch7x7x3_3 = ConvNorm(192, 192, (7, 1), padding=(3, 0))
        self.branch7x7x3_4 = ConvNorm(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_2(self.branch3x3_1(x))
        seven = self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x))))
        return torch.cat([three, seven, _halve(x)], 1)


class Mixed8(nn.Module):
    """On 8 x 8 images: 1 x 1; two branches that fork into 1 x 3 and 3 x 1; a pool."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch1x1 = ConvNorm(inputs, 320, 1)
        self.branch3x3_1 = ConvNorm(inputs, 384, 1)
        self.branch3x3_2a = ConvNorm(384, 384, (1, 3), padding=(0, 1))
        self.branch3x3_2b = ConvNorm(384, 384, (3, 1), padding=(1, 0))
        self.branch3x3dbl_1 = ConvNorm(inputs, 448, 1)
        self.branch3x3dbl_2 = ConvNorm(448, 384, 3, padding=1)
        self.branch3x3dbl_3a = ConvNorm(384, 384, (1, 3), padding=(0, 1))
        self.branch3x3dbl_3b = ConvNorm(384, 384, (3, 1), padding=(1, 0))
        self.branch_pool = ConvNorm(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_1(x)
        three = torch.cat([self.branch3x3_2a(three), self.branch3x3_2b(three)], 1)
        twice = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        twice = torch.cat([self.branch3x3dbl_3a(twice), self.branch3x3dbl_3b(twice)], 1)
        return torch.cat([self.branch1x1(x), three, twice, self.branch_pool(_blur(x))], 1)


class Auxiliary(nn.Module):
    """A second classifier on the 17 x 17 images, for training."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv0 = ConvNorm(768, 128, 1)
        self.conv1 = ConvNorm(128, 768, 5)
        self.fc = nn.Linear(768, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(self.conv0(functional.avg_pool2d(x, 5, stride=3)))
        return self.fc(torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1))


class InceptionV3(nn.Module):
    """Eleven blocks of parallel branches, for 299 x 299 images; with `auxiliary`, it returns both heads' logits."""

    def __init__(self, classes: int = 1000, *, auxiliary: bool = False) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = ConvNorm(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = ConvNorm(32, 32, 3)
        self.Conv2d_2b_3x3 = ConvNorm(32, 64, 3, padding=1)
        self.maxpool1 = nn.MaxPool2d(3, stride=2)
        self.Conv2d_3b_1x1 = ConvNorm(64, 80, 1)
        self.Conv2d_4a_3x3 = ConvNorm(80, 192, 3)
        self.maxpool2 = nn.MaxPool2d(3, stride=2)
        self.Mixed_5b = Mixed35(192, pooled=32)
        self.Mixed_5c = Mixed35(256, pooled=64)
        self.Mixed_5d = Mixed35(288, pooled=64)
        self.Mixed_6a = ReduceTo17(288)
        self.Mixed_6b = Mixed17(inner=128)
        self.Mixed_6c = Mixed17(inner=160)
        self.Mixed_6d = Mixed17(inner=160)
        self.Mixed_6e = Mixed17(inner=192)
        self.AuxLogits = Auxiliary(classes) if auxiliary else None
        self.Mixed_7a = ReduceTo8()
        self.Mixed_7b = Mixed8(1280)
        self.Mixed_7c = Mixed8(2048)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout()
        self.fc = nn.Linear(2048, classes)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(images)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(self.maxpool1(x)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(self.maxpool2(x))))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        y = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        logits = self.fc(self.dropout(torch.flatten(self.avgpool(y), 1)))
        return logits if self.AuxLogits is None else (logits, self.AuxLogits(x))


def inception_v3_for_training() -> InceptionV3:
    """With its auxiliary head."""
    return InceptionV3(auxiliary=True)


def _blur(x: Tensor) -> Tensor:
    return functional.avg_pool2d(x, 3, stride=1, padding=1)


def _halve(x: Tensor) -> Tensor:
    return functional.max_pool2d(x, 3, stride=2)
