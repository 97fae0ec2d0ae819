"""A service that this machine cannot serve well says so at its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.cli.service.bring_up import Plan, run_service
from gangline.domain.errors import InvalidRequest
from gangline.settings.node import NodeSettings
from gangline.wire.client.running import Running


async def _nothing(_live: Running) -> None:
    return None


@pytest.mark.parametrize("reserve_gib", [0.0, 1e9])
async def test_a_disk_below_its_reserve_is_told_before_anything_starts(
    reserve_gib: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(data_dir=tmp_path, engine="none of ours", node=NodeSettings(disk_reserve_gib=reserve_gib))
    with pytest.raises(InvalidRequest, match="unknown engine"):
        await run_service(plan, _nothing)
    told = capsys.readouterr().err
    assert ("No session begins yet" in told) == (reserve_gib > 0)
