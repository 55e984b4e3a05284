"""GNMT (Wu et al. 2016, arXiv:1609.08144): eight layers each side, the first encoder layer in both directions, residual
connections from the third layer on, attention from the bottom of the decoder to all its layers. Unrolled.

The decoder is given the translation so far and scores each next word, as in training.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from placewise.zoo.models.lstm import LSTMCell


class Attention(nn.Module):
    """Additive attention (Bahdanau et al. 2014): a small network scores each encoded word."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.key = nn.Linear(units, units, bias=False)
        self.query = nn.Linear(units, units, bias=False)
        self.score = nn.Linear(units, 1, bias=False)

    def forward(self, query: Tensor, keys: Tensor, encoded: Tensor) -> Tensor:
        scores = torch.softmax(self.score(torch.tanh(keys + self.query(query).unsqueeze(1))), 1)  # [batch, source, 1]
        return torch.bmm(scores.transpose(1, 2), encoded).squeeze(1)


class GNMT(nn.Module):
    """Sources [steps, batch] and targets [steps, batch] to logits [steps, batch, words]."""

    def __init__(self, layers: int = 8, words: int = 32_000, units: int = 1024) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(words, units)
        self.target_embedding = nn.Embedding(words, units)
        self.forwards = LSTMCell(units, units)
        self.backwards = LSTMCell(units, units)
        self.encoder = nn.ModuleList(LSTMCell(units if i else 2 * units, units) for i in range(layers - 1))
        self.decoder = nn.ModuleList(LSTMCell(2 * units, units) for _ in range(layers))
        self.attention = Attention(units)
        self.softmax = nn.Linear(units, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        encoded = self.encode(source)
        keys = self.attention.key(encoded)

        words = self.target_embedding(target).unbind(0)
        states = [layer.start(words[0]) for layer in self.decoder]
        context, outputs = torch.zeros_like(words[0]), []
        for word in words:
            states[0] = self.decoder[0](torch.cat([word, context], 1), states[0])
            x = states[0][0]
            context = self.attention(x, keys, encoded)
            for i, layer in enumerate(self.decoder[1:], 1):
                states[i] = layer(torch.cat([x, context], 1), states[i])
                x = states[i][0] if i < 2 else x + states[i][0]
            outputs.append(self.softmax(x))
        return torch.stack(outputs)

    def encode(self, source: Tensor) -> Tensor:
        """[batch, steps, units]."""
        words = list(self.source_embedding(source).unbind(0))
        left, right = self.forwards.unroll(words), self.backwards.unroll(words[::-1])[::-1]
        steps = self.encoder[0].unroll([torch.cat(both, 1) for both in zip(left, right, strict=True)])
        for layer in self.encoder[1:]:
            steps = [x + y for x, y in zip(steps, layer.unroll(steps), strict=True)]
        return torch.stack(steps, 1)
