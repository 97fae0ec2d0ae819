"""The agent's working folder as an artifact: archived when RUN has ended, restored to grade the session again.

The archive is the agent's claim. It is made, read and unpacked only inside sandboxes.
"""

from __future__ import annotations

from typing import NoReturn

from gangline.domain.errors import FilesNotKept, GanglineError, RuntimeFailed
from gangline.domain.sandbox import Channel, Checkpoint, ExecRequest, ExecResult, OutputSink, Sandbox
from gangline.domain.usage import Usage, unmeasured
from gangline.node.sessions.evaluation import MAX_ARTIFACT_BYTES

FILES = "files.tar"
"""The artifact. If it could not be made, there is `files.tar.missing` with the reason instead."""

_TAR_TIMEOUT_S = 120.0


async def keep_files(runtime: Sandbox) -> dict[str, bytes]:
    """Returns the archived files of the working folder, or why they are not kept."""
    try:
        taken = await runtime.exec(
            ["tar", "-cf", "-", "."],
            cwd=runtime.workdir,
            timeout_s=_TAR_TIMEOUT_S,
            max_output_bytes=MAX_ARTIFACT_BYTES,
        )
    except GanglineError as error:
        return _missing(error.message)
    if taken.truncated:
        return _missing(f"the files of the working folder take more than {MAX_ARTIFACT_BYTES} bytes")
    return {FILES: taken.stdout} if taken.ok else _missing(_said(taken))


async def bring_back(runtime: Sandbox, archive: bytes) -> None:
    """Replace the content of a prepared sandbox's working folder. Raises: RuntimeFailed."""
    await runtime.clear(runtime.workdir)
    unpacked = await runtime.exec(["tar", "-xpf", "-"], cwd=runtime.workdir, stdin=archive, timeout_s=_TAR_TIMEOUT_S)
    if not unpacked.ok:
        raise RuntimeFailed(f"the recorded files could not be brought back: {_said(unpacked)}")


def _missing(why: str) -> dict[str, bytes]:
    return {f"{FILES}.missing": f"{why}.\n".encode()}


def _said(result: ExecResult) -> str:
    errors = result.stderr[-500:].decode(errors="replace").strip()
    return f"tar exited with {result.exit_code}: {errors}"


class AbsentFiles(Sandbox):
    """The agent's sandbox of a recorded session without files. Nothing runs in it; reading it raises FilesNotKept."""

    def __init__(self, session_id: str, workdir: str, why: str) -> None:
        """why: the files are missing."""
        super().__init__(runtime_id=f"{session_id}.absent", workdir=workdir, home=workdir)
        self._why = why

    def _refuse(self) -> NoReturn:
        raise FilesNotKept(
            f"this evaluator reads the agent's files, and they were not kept: {self._why}. "
            "`keep_files` in the task's evaluator keeps them."
        )

    async def run(self, request: ExecRequest, on_output: OutputSink | None = None) -> ExecResult:
        self._refuse()

    async def open_channel(self, request: ExecRequest) -> Channel:
        self._refuse()

    async def upload(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self._refuse()

    async def download(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        self._refuse()

    async def clear(self, path: str) -> None:
        self._refuse()

    async def checkpoint(self, name: str = "") -> Checkpoint:
        self._refuse()

    async def reset(self, checkpoint: Checkpoint | None = None) -> None:
        self._refuse()

    async def kill(self, *, grace_s: float = 0.0) -> None:
        """Does nothing: nothing runs."""

    async def stop(self) -> None:
        """Does nothing: there is no sandbox."""

    def limits(self) -> dict[str, str]:
        return {}

    async def usage(self) -> Usage:
        return unmeasured("there is no sandbox")
