"""How many sessions a node takes where few files may be open."""

from __future__ import annotations

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.node.sessions.stages import PoolSizes

MANY = PoolSizes(run_slots=512, ready_slots=64, postrun_workers=4)


def test_slots_stay_as_they_are_where_files_suffice() -> None:
    assert MANY.fitted(1 << 20) == MANY


@pytest.mark.parametrize("max_files", [256, 1024, 4096, 9000])
def test_slots_fit_to_the_files_that_may_be_open_and_agents_go_before_prepared_sandboxes(max_files: int) -> None:
    fitted = MANY.fitted(max_files)
    assert 1 <= fitted.run_slots < MANY.run_slots or fitted.run_slots == 512
    assert fitted.capacity * 16 <= max_files
    assert fitted.ready_slots == 0 or fitted.run_slots == MANY.run_slots


def test_too_few_files_for_one_session_are_refused_and_named() -> None:
    with pytest.raises(InvalidRequest, match="LimitNOFILE"):
        MANY.fitted(128)
