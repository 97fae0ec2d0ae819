"""Samples ids from logits, with log-probs under exactly the distribution that was sampled from.

Each row has its own parameters and its own random number, so a row's draw does not depend on its neighbours. The draw
inverts the cumulative distribution in float64. Float32 rounding noise changes the result only if the random number is
within that rounding of a boundary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch


class RowParameters(NamedTuple):
    temperature: float
    """0 is greedy, with the log-prob of the untempered distribution."""
    top_p: float = 1.0
    top_k: int = 0
    banned_ids: frozenset[int] = frozenset()
    num_top_logprobs: int = 0
    penalties: Mapping[int, float] = {}
    """id -> amount subtracted from its logit"""
    with_mask: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether top-k or top-p removes ids."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


class Draw(NamedTuple):
    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    """Most probable first. Excluded ids are omitted, so it may be shorter than requested."""
    kept_ids: tuple[int, ...] | None = None
    """Ids with a probability above 0, in ascending order, if the row requests them and some were removed."""


def draw(logits: torch.Tensor, rows: Sequence[RowParameters], uniforms: Sequence[float]) -> list[Draw]:
    """Sample one id per row, on the logits' device. logits: [B, vocab]; uniforms: [B], each in [0, 1)."""
    logprobs = processed_logprobs(logits, rows)
    ids = _invert(logprobs, torch.tensor(uniforms, dtype=torch.float64, device=logits.device))
    greedy = torch.tensor([row.temperature == 0 for row in rows], device=logits.device)
    ids = torch.where(greedy, logprobs.argmax(-1), ids)
    token_ids = cast("list[int]", ids.tolist())
    chosen = cast("list[float]", logprobs.gather(1, ids[:, None])[:, 0].tolist())
    return [
        Draw(token_id, logprob, _top(logprobs[i], row.num_top_logprobs), _kept(logprobs[i], row))
        for i, (row, token_id, logprob) in enumerate(zip(rows, token_ids, chosen, strict=True))
    ]


def processed_logprobs(logits: torch.Tensor, rows: Sequence[RowParameters]) -> torch.Tensor:
    """Log-probs after penalties, banned ids, temperature, top-k, top-p, in vLLM's order: [B, vocab].

    -inf where an id is excluded.
    """
    scale = torch.tensor([row.temperature or 1.0 for row in rows], dtype=torch.float32, device=logits.device)
    scaled = logits.float() / scale[:, None]
    for i, row in enumerate(rows):
        if row.penalties:
            amounts = torch.tensor(list(row.penalties.values()), device=logits.device)
            scaled[i, list(row.penalties)] -= amounts / scale[i]
        if row.banned_ids:
            scaled[i, list(row.banned_ids)] = -math.inf
        if row.is_cut:
            scaled[i] = _truncated(scaled[i], row.top_k, row.top_p)
    return scaled.log_softmax(-1)


def _truncated(scaled: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Keep the `top_k` most probable ids, then the fewest of them whose probabilities sum to `top_p`. scaled:
    [vocab].
    """
    limit = min(top_k, len(scaled)) if top_k > 0 else len(scaled)
    values, ids = scaled.topk(limit)
    probabilities = values.double().softmax(-1)
    kept = probabilities.cumsum(-1) - probabilities < top_p
    kept[0] = True
    return torch.full_like(scaled, -math.inf).index_copy(0, ids[kept], values[kept])


def _invert(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first id at which the cumulative probability exceeds the row's share of the total. [B]."""
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    # `right` skips ids of probability zero, which do not raise the sum.
    ids = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]
    return ids.clamp(max=logprobs.shape[-1] - 1)


def _kept(logprobs: torch.Tensor, row: RowParameters) -> tuple[int, ...] | None:
    if not (row.with_mask and row.is_cut):
        return None
    return tuple(cast("list[int]", (logprobs > -math.inf).nonzero()[:, 0].tolist()))


def _top(logprobs: torch.Tensor, number: int) -> tuple[tuple[int, float], ...]:
    if number == 0:
        return ()
    values, ids = logprobs.topk(min(number, len(logprobs)))
    token_ids = cast("list[int]", ids.tolist())
    top = cast("list[float]", values.tolist())
    return tuple(pair for pair in zip(token_ids, top, strict=True) if pair[1] > -math.inf)
