"""Seeds that a task's own is spread into: stable for ever, and none like another."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gangline.domain.seeds import derived_seed
from gangline.domain.task import CaptureSpec, TaskRequest

TASK: dict[str, Any] = {"instruction": "x", "agent": {"harness": "shell"}, "num_samples": 2}


def test_a_seed_is_the_same_in_every_process_and_version() -> None:
    assert derived_seed(5, 0) == 3146671360287862740
    assert CaptureSpec(seed=5).session_seed(0) == 3146671360287862740


@given(st.sets(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3).map(tuple), max_size=50))
def test_each_path_has_a_seed_of_its_own_that_fits_63_bits(paths: set[tuple[int, ...]]) -> None:
    seeds = {derived_seed(*path) for path in paths}
    assert len(seeds) == len(paths)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_sessions_of_a_group_have_seeds_of_their_own_and_none_without_one() -> None:
    assert len({CaptureSpec(seed=1).session_seed(index) for index in range(4096)}) == 4096
    assert CaptureSpec().session_seed(0) is None


@pytest.mark.parametrize("rule", [{"override": 1}, {"default": 1}])
def test_one_seed_for_a_whole_group_is_refused_and_the_way_out_named(rule: dict[str, float]) -> None:
    capture = {"sampling": {"seed": rule}}
    with pytest.raises(ValidationError, match=r"write capture\.seed instead"):
        TaskRequest.model_validate(TASK | {"capture": capture})
    TaskRequest.model_validate(TASK | {"capture": capture, "num_samples": 1})
