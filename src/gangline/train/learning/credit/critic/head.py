"""The value head: maps a hidden state to one number, with [H] weights and a bias, stored outside the model.

Engines never receive it. It starts at 0, so the advantages of the first step are the returns.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from gangline.train.learning.credit.critic.settings import CriticSettings


class ValueHead(torch.nn.Module):
    """width: H. trunk: factor of its gradient into the hidden states."""

    def __init__(self, width: int, *, trunk: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, width))
        self.bias = torch.nn.Parameter(torch.zeros(1))
        self._trunk = trunk

    def forward(self, hidden: Tensor, places: Tensor) -> Tensor:
        """Values [N] in float32, before the tokens that the hidden states at `places` [N] predict. hidden: [P, H].

        Does not copy the hidden states: apart from the model's own tensors, only [P] values are allocated.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.to(self.weight.dtype)
            values = functional.linear(hidden.detach(), self.weight, self.bias)
            if self._trunk > 0:
                shared = functional.linear(hidden, self.weight.detach())
                values = values + self._trunk * (shared - shared.detach())
        return values[places, 0]


def value_head_of(model: PreTrainedModel, settings: CriticSettings) -> ValueHead:
    """A new head for the model, on its device."""
    head = ValueHead(cast("Any", model.config).get_text_config().hidden_size, trunk=settings.trunk)
    return head.to(model.device)
