"""GoogLeNet (Szegedy et al. 2014, arXiv:1409.4842) with batch norm, without auxiliary heads, as torchvision has it: its
"5 x 5" branch uses a 3 x 3 window. The module paths are torchvision's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from placewise.zoo.models.blocks import ConvNorm


class Inception(nn.Module):
    """Four branches side by side: 1 x 1; two narrowed 3 x 3; a pool."""

    def __init__(self, inputs: int, direct: int, first: tuple[int, int], second: tuple[int, int], pooled: int) -> None:
        super().__init__()
        self.branch1 = ConvNorm(inputs, direct, 1)
        self.branch2 = nn.Sequential(ConvNorm(inputs, first[0], 1), ConvNorm(*first, 3, padding=1))
        self.branch3 = nn.Sequential(ConvNorm(inputs, second[0], 1), ConvNorm(*second, 3, padding=1))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), ConvNorm(inputs, pooled, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class GoogLeNet(nn.Module):
    """Nine inception blocks, for 224 x 224 images."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = ConvNorm(3, 64, 7, stride=2, padding=3)
        self.maxpool1 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.conv2 = ConvNorm(64, 64, 1)
        self.conv3 = ConvNorm(64, 192, 3, padding=1)
        self.maxpool2 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.inception3a = Inception(192, 64, (96, 128), (16, 32), 32)
        self.inception3b = Inception(256, 128, (128, 192), (32, 96), 64)
        self.maxpool3 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.inception4a = Inception(480, 192, (96, 208), (16, 48), 64)
        self.inception4b = Inception(512, 160, (112, 224), (24, 64), 64)
        self.inception4c = Inception(512, 128, (128, 256), (24, 64), 64)
        self.inception4d = Inception(512, 112, (144, 288), (32, 64), 64)
        self.inception4e = Inception(528, 256, (160, 320), (32, 128), 128)
        self.maxpool4 = nn.MaxPool2d(2, stride=2, ceil_mode=True)
        self.inception5a = Inception(832, 256, (160, 320), (32, 128), 128)
        self.inception5b = Inception(832, 384, (192, 384), (48, 128), 128)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(1024, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool1(self.conv1(images))
        x = self.maxpool2(self.conv3(self.conv2(x)))
        x = self.maxpool3(self.inception3b(self.inception3a(x)))
        x = self.inception4e(self.inception4d(self.inception4c(self.inception4b(self.inception4a(x)))))
        x = self.inception5b(self.inception5a(self.maxpool4(x)))
        return self.fc(self.dropout(torch.flatten(self.avgpool(x), 1)))
