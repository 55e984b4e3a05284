"""Groups in, a device for each out: the network of ColocRL, and the placer of the Hierarchical Planner."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from placewise.errors import InvalidInput
from placewise.learned.grouping import Groups
from placewise.learned.reinforce import LARGEST, check

_NEVER = -1e9  # a logit that stands for probability zero, and whose entropy is a number


class Memory(NamedTuple):
    """What groups keep and what devices have room for, in whole parts, whose sums depend on no order."""

    kept: Tensor  # [G]
    room: Tensor  # [D]

    @classmethod
    def of(cls, groups: Groups, device: torch.device) -> Memory | None:
        """None where any device has room for everything."""
        kept, capacity = groups.resident, groups.problem.capacity
        if kept.sum() <= capacity.min(initial=np.inf):
            return None
        parts = 2.0**40 / kept.sum()
        room = np.minimum(capacity * parts, 2.0**50) + groups.count  # what rounding may add
        return cls(*(torch.from_numpy(x.round().astype(np.int64)).to(device) for x in (kept * parts, room)))


def with_room(may: Tensor, kept: Tensor, room: Tensor) -> Tensor:
    """[..., D] where a group may go and has room; where it may go, if it has room nowhere."""
    both = may & (kept[..., None] <= room)
    return torch.where(both.any(dim=-1, keepdim=True), both, may)


class Seq2Seq(nn.Module):
    """A bidirectional LSTM reads the groups; an LSTM that pays attention to them names a device for each in turn.

    Each device has an embedding, which the decoder reads after it has named it; the first step reads a go token. As in
    the papers (arXiv:1706.04972; Hierarchical Planner, ICLR 2018), except that

    - attention compares by a dot product. Theirs, a small network for each pair of groups, costs a hyperbolic tangent
      per pair and unit: most of a sample's time with 256 groups;
    - each step of the decoder also reads the encoder's state of the group that it places. There, attention alone has
      to find out which one that is.

    Logits are `constant * tanh(logits / temperature)`, so that no device becomes certain early. Where memory is short,
    a group goes where what was placed before it left room, if there is such a device.
    """

    def __init__(self, features: int, devices: int, hidden: int, constant: float, temperature: float) -> None:
        super().__init__()
        check({"hidden": hidden}, hidden=(2, LARGEST))
        if hidden % 2:
            raise InvalidInput(f"option hidden = {hidden}: it must be even, half for each way of reading")
        if not temperature > 0:
            raise InvalidInput(f"option temperature = {temperature}: it must be above zero")
        self.constant, self.temperature, self.go = constant, temperature, devices
        self.encoder = nn.LSTM(features, hidden // 2, bidirectional=True, batch_first=True)
        self.device = nn.Embedding(devices + 1, hidden)
        self.decoder = nn.LSTM(2 * hidden, hidden, batch_first=True)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.head = nn.Linear(2 * hidden, devices)

    def encode(self, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the decoder has of sequences [M, G, F]: states [M, G, H], and its own first state, twice [M, H]."""
        states, (hidden, cell) = self.encoder(groups)
        return states, torch.cat(list(hidden), dim=1), torch.cat(list(cell), dim=1)

    def sample(
        self,
        encoded: tuple[Tensor, Tensor, Tensor],
        may: Tensor,
        generator: torch.Generator,
        memory: Memory | None = None,
    ) -> Tensor:
        """[B, G] devices, of those that each group may use [B, G, D]. What groups keep may differ by row [B, G]."""
        states, hidden, cell = encoded
        # Adding Gumbel noise and taking the largest draws from a softmax; all noise at once saves a call per step.
        noise = -torch.empty(may.shape).exponential_(generator=generator).log()
        noise = noise.to(states.device)
        if memory is None:
            noise = noise.masked_fill(~may, _NEVER)
        else:
            kept, room = memory.kept.expand(may.shape[:2]), memory.room.repeat(len(may), 1)
        weights = [getattr(self.decoder, name) for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")]
        last = torch.full((len(states),), self.go, device=states.device)
        chosen = []
        for group, (state, extra) in enumerate(zip(states.unbind(1), noise.unbind(1), strict=True)):
            hidden, cell = torch.lstm_cell(torch.cat([state, self.device(last)], dim=1), (hidden, cell), *weights)
            if memory is not None:
                extra = extra.masked_fill(~with_room(may[:, group], kept[:, group], room), _NEVER)
            last = (self._logits(hidden[:, None], states)[:, 0] + extra).argmax(dim=1)
            if memory is not None:
                room = room.scatter_add(1, last[:, None], -kept[:, group, None])
            chosen.append(last)
        return torch.stack(chosen, dim=1)

    def score(
        self, encoded: tuple[Tensor, Tensor, Tensor], may: Tensor, devices: Tensor, memory: Memory | None = None
    ) -> tuple[Tensor, Tensor]:
        """(log-probability [B], entropy [B]) of devices [B, G]: every step at once, as what was named is known."""
        states, hidden, cell = encoded
        if memory is not None:
            kept = memory.kept.expand(devices.shape)
            taken = one_hot(devices, may.shape[2]) * kept[:, :, None]
            may = with_room(may, kept, memory.room - (taken.cumsum(dim=1) - taken))
        before = torch.cat([torch.full_like(devices[:, :1], self.go), devices[:, :-1]], dim=1)
        steps, _ = self.decoder(torch.cat([states, self.device(before)], dim=2), (hidden[None], cell[None]))
        return score_devices(self._logits(steps, states), may, devices)

    def _logits(self, steps: Tensor, states: Tensor) -> Tensor:
        """[B, S, D] from the decoder's states [B, S, H]."""
        attention = (self.query(steps) @ states.mT).softmax(dim=2)
        logits: Tensor = self.head(torch.cat([steps, attention @ states], dim=2))
        return self.constant * torch.tanh(logits / self.temperature)


def score_devices(logits: Tensor, may: Tensor, devices: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability [B], entropy [B]), summed over the groups, of devices [B, G] under logits [B, G, D]."""
    log_probability = logits.masked_fill(~may, _NEVER).log_softmax(dim=2)
    entropy = -(log_probability.exp() * log_probability).sum(dim=(1, 2))
    return log_probability.gather(2, devices[:, :, None]).sum(dim=(1, 2)), entropy
