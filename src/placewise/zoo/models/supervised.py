"""What is minimised in training."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional


class Supervised(nn.Module):
    """A model and labels to the mean cross entropy of its logits; those of an auxiliary head count 0.4 times."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs_and_labels: Any) -> Tensor:
        *inputs, labels = inputs_and_labels
        outputs = self.model(*inputs)
        if isinstance(outputs, tuple):
            logits, auxiliary = outputs
            return _cross_entropy(logits, labels) + 0.4 * _cross_entropy(auxiliary, labels)
        return _cross_entropy(getattr(outputs, "logits", outputs), labels)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
