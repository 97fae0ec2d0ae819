"""Folders of the node's machine at paths of a task's own, in containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from containers.engines import IMAGE
from support.node.mounts import check_mounts


async def test_a_container_sees_what_the_operator_exposed(
    container_runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check_mounts(container_runtime, IMAGE, tmp_path, monkeypatch)
