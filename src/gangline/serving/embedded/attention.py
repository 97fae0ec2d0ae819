"""Attention over sequences of different lengths in one forward pass, for any transformers model with full attention.

The tokens of all sequences are concatenated in one row: [1, N]. All layers except attention work token by token.
Attention of prompts runs sequence by sequence: new keys and values are written to the sequence's own cache, and its
queries attend only to that cache. Sequences that decode run together, with one call per kv_batch (`kv_batches.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

from gangline.domain.errors import EngineIncapable
from gangline.serving.embedded.batched_kv import Decoding
from gangline.serving.embedded.kv_cache import KvCache

ATTENTION = "gangline_ragged"


class Span(NamedTuple):
    """`num_tokens` tokens of the row, starting at `start`, belong to the sequence of `cache`."""

    cache: KvCache
    start: int
    num_tokens: int


class Spans(NamedTuple):
    """The sequences whose tokens make up a row."""

    prompts: Sequence[Span]
    decoding: Sequence[Decoding]


def check_attention(config: PretrainedConfig) -> None:
    """Refuse models whose attention is not plain full attention: their results would be silently wrong.

    Raises:
        EngineIncapable: sliding windows, linear attention, or state-space layers.
    """
    text = config.get_text_config()
    kinds: set[str] = set(getattr(text, "layer_types", None) or ())
    windowed = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    if kinds - {"full_attention"} or (windowed and not kinds):
        raise EngineIncapable(
            f"the embedded engine runs full attention only, and {text.model_type} has "
            f"{', '.join(sorted(kinds)) or 'a sliding window'}; serve it with vLLM and give its URL"
        )


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    spans: Spans | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """query: [1, head, N, head_dim]; key, value: [1, kv head, N, head_dim]. Returns [1, N, head, head_dim]."""
    unknown = [name for name in ("s_aux", "softcap") if extras.get(name) is not None]
    if unknown:
        raise EngineIncapable(f"the embedded engine does not know this model's attention: {', '.join(unknown)}")
    if spans is None:
        return _causal(query, key, value, scaling).transpose(1, 2), None
    layer: Any = module.layer_idx
    _, num_heads, num_tokens, head_dim = query.shape
    out = query.new_empty(1, num_tokens, num_heads, head_dim)
    for cache, start, n in spans.prompts:
        rows = slice(start, start + n)
        filled, end = cache.length, cache.length + n
        cache.keys[layer, :, filled:end] = key[0, :, rows]
        cache.values[layer, :, filled:end] = value[0, :, rows]
        keys, values = cache.keys[layer : layer + 1, :, :end], cache.values[layer : layer + 1, :, :end]
        out[:, rows] = _causal(query[:, :, rows], keys, values, scaling).transpose(1, 2)
    for part in spans.decoding:
        queries, keys, values = (tensor[0, :, part.rows].transpose(0, 1) for tensor in (query, key, value))
        out[0, part.rows] = part.attend(layer, queries, keys, values, scaling)
    return out, None


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Causal attention of the last queries of a sequence: [batch, head, n, head_dim] over `end` >= n positions."""
    num_heads, n = query.shape[1:3]
    num_kv_heads, end = key.shape[1:3]
    visible = None if n == end else torch.ones(n, end, dtype=torch.bool, device=query.device).tril(end - n)
    return scaled_dot_product_attention(
        query, key, value, visible, is_causal=visible is None, scale=scaling, enable_gqa=num_heads != num_kv_heads
    )


AttentionInterface.register(ATTENTION, _attend)
