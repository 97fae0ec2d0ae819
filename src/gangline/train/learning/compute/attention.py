"""Causal attention along the rows and trees of one sequence, without a mask over the whole sequence.

A sequence [L] consists of segments: consecutive places, and earlier places that they also attend to, their prefix. A
packed row is a segment without a prefix; the prefix of a tree's branch is its path. Segments are computed one by one
with PyTorch's causal attention, in blocks of queries if there is a prefix. On a GPU in half precision, one call of
variable-length FlashAttention computes all segments.

The GPU path passes arguments as PyTorch documents them; it was not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations import sdpa_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from gangline.domain.errors import InvalidRequest
from gangline.train.learning.packing import Segment

IMPLEMENTATION = "gangline_rows"
"""Name of this attention in `transformers`."""

_CARD = "cuda"
"""Where no fused kernel takes a mask together with grouped heads."""
_WIDEST_HEAD = 256

BLOCK = 256
"""Queries of a segment with a prefix that are computed at a time; their mask is [BLOCK, keys], shared by all blocks."""


class Rows:
    """Segments that cover one sequence in order, and data shared by its layers. One object per forward pass."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        """segments: at least one."""
        self.segments = segments
        self.was_used = False
        """Whether a layer used these rows."""
        self._device = device
        self._mask: Tensor | None = None

    @property
    def no_mask(self) -> Tensor:
        """An empty mask [1, 1, 0, 0]: `transformers` passes on four-dimensional masks and does not create one."""
        return torch.empty(1, 1, 0, 0, device=self._device)

    @cached_property
    def keys(self) -> list[Tensor | None]:
        """Places that each segment attends to, [P + its length]; None if it has no prefix."""
        return [
            torch.from_numpy(np.concatenate([segment.prefix, np.arange(segment.start, segment.end)])).to(self._device)
            if len(segment.prefix)
            else None
            for segment in self.segments
        ]

    @cached_property
    def key_lengths(self) -> list[int]:
        return [len(segment.prefix) + segment.end - segment.start for segment in self.segments]

    @property
    def longest(self) -> int:
        """Places of the longest path."""
        return max(self.key_lengths)

    def block_mask(self, dtype: torch.dtype) -> Tensor:
        """[BLOCK, longest + BLOCK], added to scores. The last columns belong to the block's own places."""
        if self._mask is None or self._mask.dtype != dtype:
            later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=self._device).triu(1)
            mask = torch.zeros(BLOCK, self.longest + BLOCK, dtype=dtype, device=self._device)
            mask[:, self.longest :].masked_fill_(later, float("-inf"))
            self._mask = mask
        return self._mask

    @cached_property
    def flash(self) -> _Lengths:
        """The same for FlashAttention, which aligns a segment's last query with its last key."""
        lengths = [segment.end - segment.start for segment in self.segments]
        return _Lengths(
            places=torch.cat(
                [
                    torch.arange(one.start, one.end, device=self._device) if keys is None else keys
                    for one, keys in zip(self.segments, self.keys, strict=True)
                ]
            ),
            queries=self._cumulative(lengths),
            keys=self._cumulative(self.key_lengths),
            most_queries=max(lengths),
        )

    def _cumulative(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=self._device)


class _Lengths(NamedTuple):
    places: Tensor
    """[sum of key lengths]"""
    queries: Tensor
    """[segments + 1] int32, cumulative."""
    keys: Tensor
    most_queries: int


def require_used(rows: Rows, model: PreTrainedModel) -> None:
    """Raises: InvalidRequest if no layer of a forward pass used the rows."""
    if not rows.was_used:
        raise InvalidRequest(f"{_OTHER_LAYOUT} {type(model).__name__} does not pass `rows` on to its attention.")


def attend_by_rows(model: PreTrainedModel) -> None:
    """Make a model attend by the `rows` of its calls. Calls without `rows` use `sdpa` as usual.

    Raises: InvalidRequest if its attention cannot be replaced.
    """
    if cast("Any", model.config)._attn_implementation == IMPLEMENTATION:
        return
    try:
        model.set_attn_implementation(IMPLEMENTATION)
    except ValueError as error:
        raise InvalidRequest(f"{_OTHER_LAYOUT} {type(model).__name__}: {error}") from error


_OTHER_LAYOUT = "set learner.layout: padded, because packed and tree rows do not fit this model."


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    rows: Rows | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As called by `transformers`. query: [1, heads, L, D]; key and value may have fewer heads. Returns: [1, L, heads,
    D].

    Raises: InvalidRequest if the model's attention is not plain causal attention.
    """
    if rows is None:
        return cast("Any", sdpa_attention).sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **others
        )
    _require_plain(module, rows, others)
    rows.was_used = True
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast, RoPE makes them float32
    if query.dtype in (torch.float16, torch.bfloat16) and dropout == 0.0 and _has_flash(query):
        return _by_flash(query, key, value, rows, scaling), None
    found = [
        part
        for one, seen in zip(rows.segments, rows.keys, strict=True)
        for part in _of_segment(query, key, value, one, seen, rows, {"dropout_p": dropout, "scale": scaling})
    ]
    return torch.cat(found, dim=2).transpose(1, 2).contiguous(), None


def _has_flash(query: Tensor) -> bool:
    """Whether FlashAttention 2 computes heads of this width on this device: on cards from Ampere on."""
    is_new = query.is_cuda and torch.cuda.get_device_capability(query.device) >= (8, 0)
    return is_new and query.shape[-1] <= _WIDEST_HEAD


def _require_plain(module: torch.nn.Module, rows: Rows, others: dict[str, Any]) -> None:
    """Raises: InvalidRequest."""
    window = others.get("sliding_window")
    if window is not None and rows.longest > window:
        raise InvalidRequest(f"{_OTHER_LAYOUT} {type(module).__name__} has a sliding window of {window} tokens.")
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if unknown:
        raise InvalidRequest(f"{_OTHER_LAYOUT} {type(module).__name__} attends with {', '.join(unknown)}.")


def _of_segment(
    query: Tensor, key: Tensor, value: Tensor, one: Segment, seen: Tensor | None, rows: Rows, options: dict[str, Any]
) -> list[Tensor]:
    """[1, heads, places, D] for each block of the segment."""
    own = slice(one.start, one.end)
    if seen is None:
        row = (query[:, :, own], key[:, :, own], value[:, :, own])
        return [scaled_dot_product_attention(*row, is_causal=True, enable_gqa=True, **options)]
    key, value, query = key[:, :, seen], value[:, :, seen], query[:, :, own]
    if query.device.type == _CARD and key.shape[1] != query.shape[1]:  # else heads x BLOCK x keys scores in memory
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
    mask, found = rows.block_mask(query.dtype), list[Tensor]()
    for start in range(0, query.shape[2], BLOCK):
        block = query[:, :, start : start + BLOCK]
        num_queries = block.shape[2]
        num_keys = len(one.prefix) + start + num_queries
        last = mask.shape[1] - BLOCK + num_queries
        found.append(
            scaled_dot_product_attention(
                block,
                key[:, :, :num_keys],
                value[:, :, :num_keys],
                attn_mask=mask[:num_queries, last - num_keys : last],
                enable_gqa=True,
                **options,
            )
        )
    return found


def _by_flash(query: Tensor, key: Tensor, value: Tensor, rows: Rows, scaling: float | None) -> Tensor:
    lengths = rows.flash
    key, value = (one[0].transpose(0, 1)[lengths.places] for one in (key, value))
    found = varlen_attn(
        query[0].transpose(0, 1).contiguous(),
        key,
        value,
        lengths.queries,
        lengths.keys,
        lengths.most_queries,
        rows.longest,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return cast("Tensor", found)[None]


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, cast("Any", ALL_MASK_ATTENTION_FUNCTIONS)["sdpa"])
