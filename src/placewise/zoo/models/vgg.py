"""VGG-19 (Simonyan and Zisserman 2014, arXiv:1409.1556, configuration E), with the module paths of torchvision's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

#: Channels of each convolution; after each group the image is halved.
_GROUPS = ((64, 64), (128, 128), (256, 256, 256, 256), (512, 512, 512, 512), (512, 512, 512, 512))


class VGG19(nn.Module):
    """Sixteen convolutions and three large matrices, for 224 x 224 images."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(*_features())
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout(),
            nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(),
            nn.Linear(4096, classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(images), 1))


def _features() -> Iterator[nn.Module]:
    inputs = 3
    for group in _GROUPS:
        for outputs in group:
            yield nn.Conv2d(inputs, outputs, 3, padding=1)
            yield nn.ReLU()
            inputs = outputs
        yield nn.MaxPool2d(2)
