"""Caches of keys and values, and the search for shared prefixes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gangline.serving.embedded.kv_cache import KvCache, PrefixStore, common_length


def filled(*ids: int) -> KvCache:
    cache = KvCache(num_layers=2, num_kv_heads=1, head_dim=4)
    cache.reserve(len(ids))
    for position, token_id in enumerate(ids):
        cache.keys[:, :, position] = token_id
        cache.values[:, :, position] = -token_id
    cache.commit(ids)
    return cache


@pytest.mark.parametrize(
    ("left", "right", "length"), [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2), ([1, 5, 3], [1, 2, 3], 1)]
)
def test_common_length_counts_equal_leading_ids(left: list[int], right: list[int], length: int):
    assert common_length(np.array(left, dtype=np.int64), np.array(right, dtype=np.int64)) == length


def test_growing_keeps_what_was_computed():
    cache = filled(1, 2, 3)
    cache.reserve(1000)
    assert cache.ids.tolist() == [1, 2, 3]
    assert cache.keys[0, 0, :3, 0].tolist() == [1, 2, 3]
    assert cache.values[1, 0, :3, 3].tolist() == [-1, -2, -3]


def test_a_copied_prefix_is_the_sources_and_its_own():
    source, target = filled(1, 2, 3, 4), filled(1)
    target.copy_prefix(source, 3)
    assert target.ids.tolist() == [1, 2, 3]
    assert target.keys[0, 0, :3, 0].tolist() == [1, 2, 3]
    source.keys.zero_()
    assert target.keys[0, 0, :3, 0].tolist() == [1, 2, 3]


def test_the_longest_prefix_is_found_not_the_latest():
    store = PrefixStore(1 << 20)
    long, short = filled(1, 2, 3, 4), filled(1, 2, 9)
    store.keep(long)
    store.keep(short)
    assert store.longest_prefix(np.array([1, 2, 3, 7])) == (long, 3)
    assert store.longest_prefix(np.array([8])) == (None, 0)


def test_a_cache_that_another_one_continues_is_dropped():
    store = PrefixStore(1 << 20)
    store.keep(filled(1, 2))
    store.keep(filled(1, 2, 3))
    assert len(store) == 1


def test_the_least_recently_used_cache_goes_first():
    a, b, c = filled(1, 1), filled(2, 2), filled(3, 3)
    store = PrefixStore(2 * a.num_bytes)
    store.keep(a)
    store.keep(b)
    store.longest_prefix(np.array([1, 1]))
    store.keep(c)
    assert store.longest_prefix(np.array([1, 1])) == (a, 2)
    assert store.longest_prefix(np.array([2, 2])) == (None, 0)


def test_an_emptied_cache_matches_nothing():
    cache = filled(1, 2)
    cache.clear()
    store = PrefixStore(1 << 20)
    store.keep(cache)
    assert store.longest_prefix(np.array([1, 2])) == (None, 0)
    assert torch.equal(torch.from_numpy(cache.ids), torch.empty(0, dtype=torch.long))
