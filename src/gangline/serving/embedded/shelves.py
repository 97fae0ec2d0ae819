"""Shared memory for the caches of sequences that decode together, so that one call attends for all of them.

A shelf holds caches of up to one capacity, one in each slot, without holes: the caches of a shelf are one tensor. So
a step's attention is one call a shelf, whatever the number of sequences. Capacities are powers of two, so a long
sequence neither takes the memory of many nor the time of the short ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gangline.serving.embedded.kv_cache import KvCache

__all__ = ["Decoding", "Shelves"]

_LEAST = 64
_ROUND = 16


class Shelf:
    """keys, values: [layer, slot, kv head, position, head_dim]. Positions that no sequence has filled are masked, and
    must be finite all the same: 0 times what memory happens to hold need not be 0."""

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
        """The cache's content must have been copied; the last one takes its slot."""
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
    # Memory that the system zeroes once it is used. PyTorch writes the zeros, which takes longer than a prompt.
    return torch.from_numpy(np.zeros(shape, dtype=np.float32))


class Shelves:
    """Where the running batch's caches are. A cache that is on no shelf has memory of its own."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, device: torch.device | None = None) -> None:
        """device: None is the CPU."""
        self._shape = (num_layers, num_kv_heads, head_dim)
        self._device = device
        self._shelves: dict[int, Shelf] = {}
        self._where: dict[KvCache, Shelf] = {}

    @property
    def num_bytes(self) -> int:
        return sum(shelf.keys.nbytes + shelf.values.nbytes for shelf in self._shelves.values())

    @torch.inference_mode()
    def place(self, cache: KvCache, capacity: int) -> None:
        """Put the cache where there is room for `capacity` positions; what it holds moves along."""
        shelf = self._where.get(cache)
        wanted = max(_LEAST, 1 << (capacity - 1).bit_length())
        if wanted not in self._shelves:
            self._shelves[wanted] = Shelf(self._shape, wanted, self._device)
        self._shelves[wanted].add(cache)
        if shelf is not None:
            shelf.remove(cache)
        self._where[cache] = self._shelves[wanted]

    @torch.inference_mode()
    def take_off(self, cache: KvCache) -> None:
        """Give the cache memory of its own again, as much as it fills. Nothing where it is on no shelf."""
        shelf = self._where.pop(cache, None)
        if shelf is None:
            return
        cache.keys, cache.values = cache.keys[:, :, : cache.length].clone(), cache.values[:, :, : cache.length].clone()
        shelf.remove(cache)

    @torch.inference_mode()
    def wipe(self) -> None:
        """Forget what weights that are gone computed, which may not have been finite."""
        for shelf in self._shelves.values():
            shelf.keys.zero_()
            shelf.values.zero_()

    def decoding(self, caches: Sequence[tuple[int, KvCache]]) -> list[Decoding]:
        """caches: with each the row of its one new token."""
        by_shelf: dict[int, list[tuple[int, KvCache]]] = {}
        for row, cache in caches:
            by_shelf.setdefault(self._where[cache].capacity, []).append((row, cache))
        return [Decoding(self._shelves[capacity], found) for capacity, found in sorted(by_shelf.items())]


class Decoding:
    """The attention of one new token of each of a shelf's sequences, or of some of them."""

    def __init__(self, shelf: Shelf, found: Sequence[tuple[int, KvCache]]) -> None:
        self._shelf = shelf
        device = shelf.keys.device
        slot_of = {id(cache): slot for slot, cache in enumerate(shelf.caches)}
        slots = [slot_of[id(cache)] for _, cache in found]
        lengths = np.zeros(len(shelf.caches), dtype=np.int64)
        lengths[slots] = [cache.length for _, cache in found]
        self._end = min(shelf.capacity, -(-int(lengths.max() + 1) // _ROUND) * _ROUND)
        self.rows = torch.tensor([row for row, _ in found], device=device)
        """Rows of the step's tokens: [n]."""
        self._slots = torch.tensor(slots, device=device)
        self._positions = torch.from_numpy(lengths[slots]).to(device)
        visible = np.arange(self._end) <= lengths[:, None]
        self._mask = torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf)))[:, None, None].to(device)
        self._is_whole = slots == list(range(len(shelf.caches)))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """query: [n, head, head_dim]; key, value: [n, kv head, head_dim]. Returns [n, head, head_dim]."""
        keys, values = self._shelf.keys[layer], self._shelf.values[layer]
        keys[self._slots, :, self._positions] = key
        values[self._slots, :, self._positions] = value
        used, num_kv_heads = len(self._shelf.caches), key.shape[1]
        # The query heads that share a key head go together, as if they were positions.
        grouped = query.reshape(len(query), num_kv_heads, -1, query.shape[-1])
        if not self._is_whole:
            # Slots whose sequence reads its prompt attend to their first position, and nobody reads what comes of it.
            every = grouped.new_zeros(used, *grouped.shape[1:])
            every[self._slots] = grouped
            grouped = every
        out = scaled_dot_product_attention(
            grouped, keys[:used, :, : self._end], values[:used, :, : self._end], self._mask, scale=scaling
        )
        return (out if self._is_whole else out[self._slots]).reshape(query.shape)
