"""The cell that the recurrent models unroll."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

State = tuple[Tensor, Tensor]


class LSTMCell(nn.Module):
    """One step of an LSTM: one matrix product makes all four gates from the input and the last output."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.units = units
        self.gates = nn.Linear(inputs + units, 4 * units)

    def forward(self, x: Tensor, state: State) -> State:
        output, memory = state
        add, candidate, keep, show = self.gates(torch.cat([x, output], 1)).chunk(4, 1)
        memory = torch.sigmoid(keep) * memory + torch.sigmoid(add) * torch.tanh(candidate)
        return torch.sigmoid(show) * torch.tanh(memory), memory

    def start(self, x: Tensor) -> State:
        """The state before the first step, for inputs like `x` [batch, inputs]."""
        zeros = x.new_zeros(len(x), self.units)
        return zeros, zeros

    def unroll(self, steps: Sequence[Tensor]) -> list[Tensor]:
        """The output of each step."""
        state, outputs = self.start(steps[0]), []
        for x in steps:
            state = self(x, state)
            outputs.append(state[0])
        return outputs
