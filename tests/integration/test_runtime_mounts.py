"""Folders of the node's machine at paths of a task's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.process import ProcessRuntime
from support.node.mounts import check_mounts
from support.requirements import need_command


async def test_a_sandbox_sees_what_the_operator_exposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_command("bwrap", "apt-get install bubblewrap")
    await check_mounts("sandbox", None, tmp_path, monkeypatch)


def test_a_runtime_without_mounts_refuses_them() -> None:
    with pytest.raises(InvalidRequest, match="runtime `process` cannot show a folder at another path"):
        ProcessRuntime.check_spec(RuntimeSpec(backend="process", mounts={"/opt/tools": "/usr"}))
