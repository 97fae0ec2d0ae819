"""Caches on kv_batches: whoever joins, grows and leaves, each keeps what was computed, and no memory is left over."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gangline.serving.embedded.batched_kv import KvBatches
from gangline.serving.embedded.kv_cache import KvCache

LAYERS, HEADS, DIM = 2, 3, 4
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["fill", "fill", "fill", "take_off", "clear"]), st.integers(0, 5), st.sampled_from([1, 7, 130])
    ),
    max_size=40,
)


class Room:
    """Caches by number, each filled with its own marks, and what each must hold."""

    def __init__(self) -> None:
        self.kv_batches = KvBatches(LAYERS, HEADS, DIM)
        self.caches: dict[int, KvCache] = {}
        self.marks: dict[int, list[float]] = {}
        self._next = 0.0

    @torch.inference_mode()
    def fill(self, number: int, amount: int) -> None:
        cache = self.caches.get(number)
        if cache is None:
            cache = self.caches[number] = KvCache(LAYERS, HEADS, DIM, grow=self.kv_batches.place)
            self.marks[number] = []
        marks = [self._next + step for step in range(amount)]
        self._next += amount
        end = cache.length + amount
        cache.reserve(end)
        cache.keys[:, :, cache.length : end] = torch.tensor(marks)[None, None, :, None]
        cache.values[:, :, cache.length : end] = -torch.tensor(marks)[None, None, :, None]
        cache.commit([int(mark) for mark in marks])
        self.marks[number] += marks

    def take_off(self, number: int, _: int) -> None:
        if (cache := self.caches.pop(number, None)) is not None:
            self.kv_batches.take_off(cache)
            assert_holds(cache, self.marks.pop(number))
            assert cache.keys.shape[2] == cache.length, "it takes no more memory than it fills"

    def clear(self, number: int, _: int) -> None:
        if number in self.caches:
            self.caches[number].clear()
            self.marks[number] = []


def assert_holds(cache: KvCache, marks: list[float]) -> None:
    wanted = torch.tensor(marks)[None, None, :, None].expand(LAYERS, HEADS, len(marks), DIM)
    assert torch.equal(cache.keys[:, :, : cache.length], wanted)
    assert torch.equal(cache.values[:, :, : cache.length], -wanted)
    assert cache.ids.tolist() == [int(mark) for mark in marks]


@given(STEPS)
def test_a_cache_keeps_its_content_whatever_others_do(steps: list[tuple[str, int, int]]) -> None:
    room = Room()
    for what, number, amount in steps:
        getattr(room, what)(number, amount)
        for each, marks in room.marks.items():
            assert_holds(room.caches[each], marks)
    for number in list(room.caches):
        room.take_off(number, 0)
    assert room.kv_batches.num_bytes == 0


@given(st.lists(st.integers(1, 90), min_size=1, max_size=6), st.data())
@torch.inference_mode()
def test_attention_of_all_is_that_of_each(lengths: list[int], data: st.DataObject) -> None:
    """Some of the sequences decode while the others' prompts are read, with two query heads for each key head."""
    generator = torch.Generator().manual_seed(0)
    kv_batches = KvBatches(LAYERS, HEADS, DIM)
    caches = [KvCache(LAYERS, HEADS, DIM, grow=kv_batches.place) for _ in lengths]
    for cache, length in zip(caches, lengths, strict=True):
        cache.reserve(length + 1)
        cache.keys[:, :, :length] = torch.randn(LAYERS, HEADS, length, DIM, generator=generator)
        cache.values[:, :, :length] = torch.randn(LAYERS, HEADS, length, DIM, generator=generator)
        cache.commit(list(range(length)))
    chosen = data.draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, unique=True))
    query = torch.randn(len(chosen), 2 * HEADS, DIM, generator=generator)
    key, value = torch.randn(2, len(chosen), HEADS, DIM, generator=generator).unbind()
    wanted = torch.stack([alone(caches[number], query[row], key[row], value[row]) for row, number in enumerate(chosen)])
    got = torch.full_like(query, torch.nan)
    for part in kv_batches.decoding([(row, caches[number]) for row, number in enumerate(chosen)]):
        got[part.rows] = part.attend(1, query[part.rows], key[part.rows], value[part.rows], None)
    assert torch.allclose(got, wanted, atol=1e-5)


def alone(cache: KvCache, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention by its definition, in float64. query: [2 * head, dim]; key, value: [head, dim]."""
    keys = torch.cat([cache.keys[1, :, : cache.length], key[:, None]], 1).double()
    values = torch.cat([cache.values[1, :, : cache.length], value[:, None]], 1).double()
    keys, values = keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0)
    weights = (torch.einsum("hd,hnd->hn", query.double(), keys) / np.sqrt(DIM)).softmax(-1)
    return torch.einsum("hn,hnd->hd", weights, values).float()


@torch.inference_mode()
def test_what_broken_weights_computed_reaches_no_later_sequence() -> None:
    kv_batches = KvBatches(LAYERS, HEADS, DIM)
    cache = KvCache(LAYERS, HEADS, DIM, grow=kv_batches.place)
    cache.reserve(50)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    cache.clear()
    kv_batches.wipe()
    cache.commit([1, 2])
    (part,) = kv_batches.decoding([(0, cache)])
    one = torch.ones(1, HEADS, DIM)
    assert torch.isfinite(part.attend(0, one, one, one, None)).all()
