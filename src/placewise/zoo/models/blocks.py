"""What several image classifiers are made of."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional


class ConvNorm(nn.Module):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, window: int | tuple[int, int], **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, window, bias=False, **options)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.bn(self.conv(x)))
