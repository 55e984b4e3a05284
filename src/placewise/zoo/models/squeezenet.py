"""SqueezeNet 1.1 (Iandola et al. 2016, arXiv:1602.07360; 1.1 is its authors' release with less work), with the module
paths of torchvision's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Fire(nn.Module):
    """Squeeze to few channels, then expand by 1 x 1 and 3 x 3 windows side by side."""

    def __init__(self, inputs: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.squeeze(x))
        return torch.cat([functional.relu(self.expand1x1(x)), functional.relu(self.expand3x3(x))], 1)


class SqueezeNet(nn.Module):
    """Eight fire modules between two convolutions, for 224 x 224 images."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, stride=2), nn.ReLU(),
            _halve(), Fire(64, 16, 64), Fire(128, 16, 64),
            _halve(), Fire(128, 32, 128), Fire(256, 32, 128),
            _halve(), Fire(256, 48, 192), Fire(384, 48, 192), Fire(384, 64, 256), Fire(512, 64, 256),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Dropout(), nn.Conv2d(512, classes, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))

    def forward(self, images: Tensor) -> Tensor:
        return torch.flatten(self.classifier(self.features(images)), 1)


def _halve() -> nn.Module:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)
