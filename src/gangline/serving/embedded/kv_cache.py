"""Keys and values of one token sequence, and the search for a prefix already computed by another sequence.

Every sequence has its own cache, without slots or padding. `ids` are the tokens whose keys and values it contains.
Every reuse compares ids, so a cache is never used for a different text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_GROWTH = 64
Ids = NDArray[np.int64]


def common_length(left: Ids, right: Ids) -> int:
    """Number of equal leading ids."""
    n = min(len(left), len(right))
    differ = left[:n] != right[:n]
    return int(differ.argmax()) if differ.any() else n


class KvCache:
    """keys, values: [layer, kv head, position, head_dim], float32, of which the first `length` positions are filled."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | None = None,
        grow: Callable[[KvCache, int], None] | None = None,
    ) -> None:
        """device: None is the CPU. grow: replaces `keys` and `values` by larger tensors with the same content; None
        allocates new memory.
        """
        self._device = device
        self._shape = (num_layers, num_kv_heads, head_dim)
        self._grow = grow
        self.length = 0
        self._ids: Ids = np.empty(0, dtype=np.int64)
        self.keys, self.values = self._allocate(0)

    @property
    def ids(self) -> Ids:
        return self._ids[: self.length]

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` positions."""
        if capacity > len(self._ids):
            ids = np.empty(_grown(capacity, len(self._ids)), dtype=np.int64)
            ids[: self.length] = self.ids
            self._ids = ids
        if capacity <= self.keys.shape[2]:
            return
        if self._grow is not None:
            self._grow(self, capacity)
            return
        old_keys, old_values, n = self.keys, self.values, self.length
        self.keys, self.values = self._allocate(_grown(capacity, self.keys.shape[2]))
        self.keys[:, :, :n], self.values[:, :, :n] = old_keys[:, :, :n], old_values[:, :, :n]

    def commit(self, ids: Sequence[int] | Ids) -> None:
        """Append `ids`, whose keys and values a forward pass has written after the filled positions."""
        end = self.length + len(ids)
        self._ids[self.length : end] = ids
        self.length = end

    @torch.inference_mode()
    def copy_prefix(self, source: KvCache, length: int) -> None:
        """Copy positions `self.length` to `length` of `source`; earlier ids are equal."""
        self.reserve(length)
        part = slice(self.length, length)
        self.keys[:, :, part] = source.keys[:, :, part]
        self.values[:, :, part] = source.values[:, :, part]
        self.commit(source.ids[part])

    def clear(self) -> None:
        self.length = 0

    def _allocate(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        layers, heads, dim = self._shape
        shape = (layers, heads, capacity, dim)
        return torch.empty(shape, device=self._device), torch.empty(shape, device=self._device)


def _grown(wanted: int, old: int) -> int:
    """At least one and a half times the old capacity, so copying is linear in the length and the waste is bounded."""
    return -(-max(wanted, old * 3 // 2) // _GROWTH) * _GROWTH


class PrefixStore:
    """Caches of finished sequences, at most `max_bytes` in total; the least recently used are evicted first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._caches: OrderedDict[int, KvCache] = OrderedDict()

    def __len__(self) -> int:
        return len(self._caches)

    def keep(self, cache: KvCache) -> None:
        for key, other in list(self._caches.items()):
            if common_length(other.ids, cache.ids) == other.length:
                del self._caches[key]
        self._caches[id(cache)] = cache
        while sum(kept.num_bytes for kept in self._caches.values()) > self._max_bytes:
            self._caches.popitem(last=False)

    def longest_prefix(self, ids: Ids) -> tuple[KvCache | None, int]:
        """The cache that shares the longest prefix with `ids`, and its length in tokens."""
        best, length = None, 0
        for cache in self._caches.values():
            common = common_length(cache.ids, ids)
            if common > length:
                best, length = cache, common
        if best is not None:
            self._caches.move_to_end(id(best))
        return best, length

    def clear(self) -> None:
        self._caches.clear()
