"""What an agent program wrote of its run is kept, bounded, whatever the agent made of those files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gangline.domain.errors import RuntimeFailed
from gangline.domain.sandbox import ExecResult
from gangline.node.sessions.harness.run import MAX_FILE_BYTES, MAX_FILES, collect_logs
from support.node.folder_runtime import FolderRuntime


@pytest.fixture
def runtime(tmp_path: Path) -> FolderRuntime:
    return FolderRuntime(tmp_path / "r1")


def written(runtime: FolderRuntime, name: str, content: bytes = b"x") -> Path:
    path = Path(runtime.home) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


async def test_files_that_match_are_kept_by_their_path_in_home(runtime: FolderRuntime) -> None:
    written(runtime, ".agent/logs/a b.log", b"\x00one")
    written(runtime, ".agent/logs/$(touch x).log", b"two")
    written(runtime, ".agent/other.txt")
    found = await collect_logs(runtime, [".agent/logs/*.log", ".agent/none/*"])
    assert found == {
        "harness.logs/.agent/logs/a b.log": b"\x00one",
        "harness.logs/.agent/logs/$(touch x).log": b"two",
    }
    assert list(Path(runtime.workdir).iterdir()) == []


async def test_of_a_long_file_the_end_is_kept(runtime: FolderRuntime) -> None:
    written(runtime, "a.log", b"begin" + b"." * MAX_FILE_BYTES + b"end")
    (content,) = (await collect_logs(runtime, ["*.log"])).values()
    assert len(content) == MAX_FILE_BYTES
    assert content.endswith(b".end")


async def test_links_folders_and_pipes_are_left_out(runtime: FolderRuntime, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (Path(runtime.home) / "link.log").symlink_to(tmp_path / "secret")
    (Path(runtime.home) / "folder.log").mkdir()
    os.mkfifo(Path(runtime.home) / "pipe.log")
    assert await collect_logs(runtime, ["*.log"]) == {}


async def test_only_so_many_files_are_kept(runtime: FolderRuntime) -> None:
    for number in range(MAX_FILES + 5):
        written(runtime, f"{number}.log")
    assert len(await collect_logs(runtime, ["*.log"])) == MAX_FILES


async def test_a_runtime_that_is_gone_has_no_logs_and_fails_nothing() -> None:
    class Gone:
        runtime_id = "gone"
        home = "/home"

        async def exec(self, *_: object, **__: object) -> ExecResult:
            raise RuntimeFailed("the sandbox is gone")

    assert await collect_logs(Gone(), ["*.log"]) == {}  # type: ignore[arg-type]
