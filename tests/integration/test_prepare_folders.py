"""Folders for prepare actions: seen by the sandbox's first life, and by nothing that an agent or a grader runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.domain.ids import new_id
from gangline.domain.sandbox import RuntimeStart
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from gangline.settings.machine import Settings
from support.requirements import need_command


@pytest.fixture
def clones() -> Iterator[Path]:
    """Outside of pytest's folders, which the agent's user may not enter."""
    need_command("bwrap", "apt-get install bubblewrap")
    with tempfile.TemporaryDirectory(prefix="gangline-clones-") as name:
        folder = Path(name) / "clones"
        folder.mkdir()
        folder.parent.chmod(0o755)
        (folder / "fix").write_text("a + b")
        yield folder


def started(tmp_path: Path, folder: Path) -> RuntimeStart:
    spec = RuntimeSpec(backend="sandbox", network="none")
    return RuntimeStart(
        runtime_id=new_id("prepared"),
        owner=new_id("owner"),
        spec=spec,
        folder=tmp_path / "sandbox",
        prepare_folders=(folder,),
    )


@pytest.mark.parametrize("exposed", [False, True])
async def test_the_first_kill_takes_the_folder_and_whoever_had_it_open(
    clones: Path, tmp_path: Path, exposed: bool
) -> None:
    environ = {"GANGLINE_EXPOSE": str(clones.parent)} if exposed else {}
    runtime = BubblewrapRuntime(Settings.from_environ({**environ, "HOME": str(tmp_path)}))
    handle = await runtime.start(started(tmp_path, clones))
    try:
        assert (await handle.exec(f"cat {clones}/fix > copied; touch {clones}/new")).exit_code == 1
        held = await handle.exec(f"sh -c 'cd {clones}; exec 9< fix; sleep 600' > /dev/null 2>&1 & echo $!")
        assert held.ok
        await handle.kill()
        assert await handle.download("copied") == b"a + b"
        for look in (f"cat {clones}/fix", f"ls {clones} | grep fix", "cat /proc/*/cwd/fix /proc/[0-9]*/fd/9"):
            assert not (await handle.exec(look)).ok, look
    finally:
        await handle.stop()


async def test_a_missing_folder_is_named(clones: Path, tmp_path: Path) -> None:
    runtime = BubblewrapRuntime(Settings.from_environ({"HOME": str(tmp_path)}))
    with pytest.raises(InvalidRequest, match="absent"):
        await runtime.start(started(tmp_path, clones / "absent"))
