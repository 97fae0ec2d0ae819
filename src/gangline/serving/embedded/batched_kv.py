"""Shared memory for the caches of sequences that decode together, so that one call computes attention for all of them.

A kv_batch holds caches of up to one capacity, one per slot, without gaps, so the caches of a kv_batch form one tensor.
A step's attention is then one call per kv_batch, however many sequences there are. Capacities are powers of two, so
long sequences do not increase the memory or time of short ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gangline.serving.embedded.kv_cache import KvCache

_LEAST = 64
_ROUND = 16


class KvBatch:
    """keys, values: [layer, slot, kv head, position, head_dim]. Unfilled positions are masked, but must be finite: 0
    times uninitialised memory need not be 0.
    """

    def __init__(self, shape: tuple[int, int, int], capacity: int, device: torch.device | None) -> None:
        self._shape = shape
        self._device = device
        self.capacity = capacity
        self.caches: list[KvCache] = []
        """By slot."""
        self.keys, self.values = self._allocate(0)

    def add(self, cache: KvCache) -> None:
        slot = len(self.caches)
        if slot == self.keys.shape[1]:
            self._resize(max(1, 2 * slot))
        self.caches.append(cache)
        self._move(cache, slot)

    def remove(self, cache: KvCache) -> None:
        """The cache's content must have been copied. The last cache takes over its slot."""
        slot = next(at for at, one in enumerate(self.caches) if one is cache)
        last = self.caches.pop()
        if last is not cache:
            self.caches[slot] = last
            self._move(last, slot)
        if 4 * len(self.caches) <= self.keys.shape[1]:
            self._resize(2 * len(self.caches))

    def _move(self, cache: KvCache, slot: int) -> None:
        keys, values = self.keys[:, slot], self.values[:, slot]
        keys[:, :, : cache.length] = cache.keys[:, :, : cache.length]
        values[:, :, : cache.length] = cache.values[:, :, : cache.length]
        cache.keys, cache.values = keys, values

    def _resize(self, slots: int) -> None:
        self.keys, self.values = self._allocate(slots)
        for slot, cache in enumerate(self.caches):
            self._move(cache, slot)

    def _allocate(self, slots: int) -> tuple[Tensor, Tensor]:
        layers, heads, dim = self._shape
        shape = (layers, slots, heads, self.capacity, dim)
        return _zeros(shape, self._device), _zeros(shape, self._device)


def _zeros(shape: tuple[int, ...], device: torch.device | None) -> Tensor:
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, device=device)
    # Memory that the system zeroes on first use. PyTorch would write the zeros, which takes longer than a prompt.
    return torch.from_numpy(np.zeros(shape, dtype=np.float32))


class KvBatches:
    """Assigns the running batch's caches to kv_batches. A cache that is on no kv_batch has separate memory."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, device: torch.device | None = None) -> None:
        """device: None is the CPU."""
        self._shape = (num_layers, num_kv_heads, head_dim)
        self._device = device
        self._kv_batches: dict[int, KvBatch] = {}
        self._where: dict[KvCache, KvBatch] = {}

    @property
    def num_bytes(self) -> int:
        return sum(kv_batch.keys.nbytes + kv_batch.values.nbytes for kv_batch in self._kv_batches.values())

    @torch.inference_mode()
    def place(self, cache: KvCache, capacity: int) -> None:
        """Move the cache, with its content, to a kv_batch with room for `capacity` positions."""
        kv_batch = self._where.get(cache)
        wanted = max(_LEAST, 1 << (capacity - 1).bit_length())
        if wanted not in self._kv_batches:
            self._kv_batches[wanted] = KvBatch(self._shape, wanted, self._device)
        self._kv_batches[wanted].add(cache)
        if kv_batch is not None:
            kv_batch.remove(cache)
        self._where[cache] = self._kv_batches[wanted]

    @torch.inference_mode()
    def take_off(self, cache: KvCache) -> None:
        """Move the cache to separate memory of the size it fills. Does nothing if it is on no kv_batch."""
        kv_batch = self._where.pop(cache, None)
        if kv_batch is None:
            return
        cache.keys, cache.values = cache.keys[:, :, : cache.length].clone(), cache.values[:, :, : cache.length].clone()
        kv_batch.remove(cache)

    @torch.inference_mode()
    def wipe(self) -> None:
        """Erase values computed by earlier weights, which may not be finite."""
        for kv_batch in self._kv_batches.values():
            kv_batch.keys.zero_()
            kv_batch.values.zero_()

    def decoding(self, caches: Sequence[tuple[int, KvCache]]) -> list[Decoding]:
        """caches: each with the row of its single new token."""
        by_kv_batch: dict[int, list[tuple[int, KvCache]]] = {}
        for row, cache in caches:
            by_kv_batch.setdefault(self._where[cache].capacity, []).append((row, cache))
        return [Decoding(self._kv_batches[capacity], found) for capacity, found in sorted(by_kv_batch.items())]


class Decoding:
    """The attention of one new token for each of a kv_batch's sequences, or for some of them."""

    def __init__(self, kv_batch: KvBatch, found: Sequence[tuple[int, KvCache]]) -> None:
        self._kv_batch = kv_batch
        device = kv_batch.keys.device
        slot_of = {id(cache): slot for slot, cache in enumerate(kv_batch.caches)}
        slots = [slot_of[id(cache)] for _, cache in found]
        lengths = np.zeros(len(kv_batch.caches), dtype=np.int64)
        lengths[slots] = [cache.length for _, cache in found]
        self._end = min(kv_batch.capacity, -(-int(lengths.max() + 1) // _ROUND) * _ROUND)
        self.rows = torch.tensor([row for row, _ in found], device=device)
        """Rows of the step's tokens: [n]."""
        self._slots = torch.tensor(slots, device=device)
        self._positions = torch.from_numpy(lengths[slots]).to(device)
        visible = np.arange(self._end) <= lengths[:, None]
        self._mask = torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf)))[:, None, None].to(device)
        self._is_whole = slots == list(range(len(kv_batch.caches)))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """query: [n, head, head_dim]; key, value: [n, kv head, head_dim]. Returns [n, head, head_dim]."""
        keys, values = self._kv_batch.keys[layer], self._kv_batch.values[layer]
        keys[self._slots, :, self._positions] = key
        values[self._slots, :, self._positions] = value
        used, num_kv_heads = len(self._kv_batch.caches), key.shape[1]
        # Query heads that share a key head are grouped, as if they were positions.
        grouped = query.reshape(len(query), num_kv_heads, -1, query.shape[-1])
        if not self._is_whole:
            # Slots whose sequence is still reading its prompt attend to their first position, and the result is
            # ignored.
            every = grouped.new_zeros(used, *grouped.shape[1:])
            every[self._slots] = grouped
            grouped = every
        out = scaled_dot_product_attention(
            grouped, keys[:used, :, : self._end], values[:used, :, : self._end], self._mask, scale=scaling
        )
        return (out if self._is_whole else out[self._slots]).reshape(query.shape)
