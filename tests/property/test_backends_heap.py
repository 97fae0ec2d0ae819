"""The heap of backends against the plainest model of it: a dictionary and `min`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gangline.node.backends.pool import LeastAssigned

_KEYS = st.sampled_from("abcdef")
_RANKS = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 99))


@given(st.lists(st.one_of(st.tuples(_KEYS, _RANKS), _KEYS), max_size=400))
def test_the_least_is_always_that_of_the_last_ranks(steps: list[tuple[str, tuple[int, int, int]] | str]) -> None:
    heap, model = LeastAssigned(), dict[str, tuple[int, int, int]]()
    for step in steps:
        if isinstance(step, str):
            heap.drop(step)
            model.pop(step, None)
        else:
            heap.put(*step)
            model[step[0]] = step[1]
        assert heap.least() == min(model, key=lambda key: (model[key], key), default=None)
