"""ResNet-50 and ResNet-152 (He et al. 2015, arXiv:1512.03385), with the module paths of torchvision's.

The stride sits in the 3 x 3 convolution of a block, as in all current releases ("v1.5").
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Bottleneck(nn.Module):
    """1 x 1 to fewer channels, 3 x 3, 1 x 1 to four times as many; around it a shortcut."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.conv1, self.bn1 = nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.downsample.append(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False))
            self.downsample.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return functional.relu(y + self.downsample(x))


class ResNet(nn.Module):
    """A stem, four stages of bottlenecks, a classifier, for 224 x 224 images."""

    def __init__(self, blocks: tuple[int, int, int, int], classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(64, 64, blocks[0], stride=1)
        self.layer2 = _stage(256, 128, blocks[1], stride=2)
        self.layer3 = _stage(512, 256, blocks[2], stride=2)
        self.layer4 = _stage(1024, 512, blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2048, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(functional.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet_50() -> ResNet:
    """50 weighted layers."""
    return ResNet((3, 4, 6, 3))


def resnet_152() -> ResNet:
    """152 weighted layers."""
    return ResNet((3, 8, 36, 3))


def _stage(inputs: int, inner: int, blocks: int, stride: int) -> nn.Sequential:
    first = Bottleneck(inputs, inner, stride)
    return nn.Sequential(first, *(Bottleneck(4 * inner, inner, stride=1) for _ in range(blocks - 1)))
