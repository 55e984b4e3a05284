"""Translation with attention: LSTM encoder and decoder (Luong et al. 2015, arXiv:1508.04025), unrolled.

The decoder is given the translation so far and scores each next word, as in training.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from placewise.zoo.models.lstm import LSTMCell


class Attention(nn.Module):
    """What the encoder said about the words that matter now, mixed with the decoder's output."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.key = nn.Linear(units, units, bias=False)
        self.mix = nn.Linear(2 * units, units, bias=False)

    def forward(self, query: Tensor, keys: Tensor, encoded: Tensor) -> Tensor:
        scores = torch.softmax(torch.bmm(keys, query.unsqueeze(2)), 1)  # [batch, source, 1]
        context = torch.bmm(scores.transpose(1, 2), encoded).squeeze(1)
        return torch.tanh(self.mix(torch.cat([context, query], 1)))


class NMT(nn.Module):
    """Sources [steps, batch] and targets [steps, batch] to logits [steps, batch, words]."""

    def __init__(self, layers: int, words: int = 32_000, units: int = 1024) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(words, units)
        self.target_embedding = nn.Embedding(words, units)
        self.encoder = nn.ModuleList(LSTMCell(units, units) for _ in range(layers))
        # The first layer also reads what attention said at the step before ("input feeding").
        self.decoder = nn.ModuleList(LSTMCell(units if i else 2 * units, units) for i in range(layers))
        self.attention = Attention(units)
        self.softmax = nn.Linear(units, words, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        steps = list(self.source_embedding(source).unbind(0))
        for layer in self.encoder:
            steps = layer.unroll(steps)
        encoded = torch.stack(steps, 1)
        keys = self.attention.key(encoded)

        words = self.target_embedding(target).unbind(0)
        states = [layer.start(words[0]) for layer in self.decoder]
        attended, outputs = torch.zeros_like(words[0]), []
        for word in words:
            x = torch.cat([word, attended], 1)
            for i, layer in enumerate(self.decoder):
                states[i] = layer(x, states[i])
                x = states[i][0]
            attended = self.attention(x, keys, encoded)
            outputs.append(self.softmax(attended))
        return torch.stack(outputs)


def nmt_2() -> NMT:
    """Two layers on each side."""
    return NMT(2)


def nmt_4() -> NMT:
    """Four layers on each side."""
    return NMT(4)


def nmt_8() -> NMT:
    """Eight layers on each side."""
    return NMT(8)
