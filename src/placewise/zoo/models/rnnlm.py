"""RNNLM: a language model of stacked LSTM layers (Zaremba et al. 2014, arXiv:1409.2329), unrolled."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from placewise.zoo.models.lstm import LSTMCell


class RNNLM(nn.Module):
    """Tokens [steps, batch] to the logits of each next token [steps, batch, words]."""

    def __init__(self, words: int = 10_000, units: int = 2048, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, units)
        self.layers = nn.ModuleList(LSTMCell(units, units) for _ in range(layers))
        self.softmax = nn.Linear(units, words)

    def forward(self, tokens: Tensor) -> Tensor:
        steps = list(self.embedding(tokens).unbind(0))
        for layer in self.layers:
            steps = layer.unroll(steps)
        return self.softmax(torch.stack(steps))
