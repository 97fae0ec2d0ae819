"""The `process` runtime: commands on this machine, as this user, without isolation. Only by name, never by default.

It gives a folder, a HOME, a clean environment and whole-tree kill. It cannot keep an agent from reading this user's
files, from dialling anything, or from hiding a process that clears its own label: `limits` says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from gangline.domain.contracts import ExecResult, OutputSink, RuntimeHandle, RuntimeStart, RuntimeUser, Usage
from gangline.domain.errors import InvalidRequest, RuntimeFailed
from gangline.domain.ids import validated_id
from gangline.runtimes.commands.execution import Executions, Order
from gangline.runtimes.confinement.limits import NOT_ENFORCED, enforcement, grader_enforcement, refuse_grader
from gangline.runtimes.confinement.system_calls import enforced, filter_for
from gangline.runtimes.shared.disk import MEASURED, DiskWatch
from gangline.runtimes.shared.environment import argv_of, clean_environment, exposed_folders
from gangline.runtimes.shared.files import SharedFolders
from gangline.runtimes.shared.leftovers import LABEL, Mark, kill_labelled, reap, remove_folder, write_mark
from gangline.runtimes.shared.threads import run_to_end
from gangline.settings import Settings

__all__ = ["ProcessRuntime"]


class ProcessRuntime:
    """Runs commands as plain processes, each sandbox in a folder of its own."""

    name: ClassVar[str] = "process"

    def __init__(self, settings: Settings | None = None) -> None:
        self._expose = exposed_folders((settings or Settings.from_environ()).expose)

    async def check(self) -> None:
        """Always possible."""

    async def start(self, start: RuntimeStart) -> RuntimeHandle:
        """Raises: InvalidRequest."""
        validated_id(start.runtime_id, "runtime_id")
        validated_id(start.owner, "owner")
        if start.spec.image is not None:
            raise InvalidRequest("runtime `process` has no images; use `sandbox`.")
        if start.spec.folders:
            raise InvalidRequest("runtime `process` cannot give folders at paths of their own; use `sandbox`.")
        mark = Mark(owner=start.owner, runtime=self.name, runtime_id=start.runtime_id)
        handle = _ProcessHandle(start, mark, self._expose)
        try:
            await run_to_end(handle.make_folders)
        except BaseException:
            await asyncio.shield(handle.stop())
            raise
        handle.watch()
        return handle

    async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
        return len(await asyncio.to_thread(reap, self.name, owner, root, keep))


class _ProcessHandle:
    def __init__(self, start: RuntimeStart, mark: Mark, expose: Sequence[Path]) -> None:
        folder = start.folder.resolve()
        port = start.proxy_port
        self.runtime_id = start.runtime_id
        self.workdir = str(folder / "work")
        self.home = str(folder / "home")
        self.grader_home: str | None = None
        self.proxy_url = None if port is None or start.spec.network == "none" else f"http://127.0.0.1:{port}"
        self._folder = folder
        self._tmp = str(folder / "tmp")
        self._env = dict(start.spec.env)
        self._expose = expose
        self._mark = mark
        self._label = mark.label
        self._limits = enforcement(start.spec.limits, MEASURED, own_user=False)
        self._disk = DiskWatch(start.spec.limits, lambda: [folder], self.kill)
        self._allowed = start.spec.system_calls_allow
        program = filter_for(self._allowed)
        self._filters = () if program is None else (program,)
        self._files = SharedFolders({path: Path(path) for path in self._paths()}, self.workdir)
        self._executions = Executions(self._label)
        self._lock = asyncio.Lock()
        self._stopped = False
        self._removed = False

    def _paths(self) -> tuple[str, str, str]:
        return self.workdir, self.home, self._tmp

    def make_folders(self) -> None:
        write_mark(self._folder, self._mark)
        for path in self._paths():
            Path(path).mkdir(exist_ok=True)

    def watch(self) -> None:
        self._disk.begin()

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        on_output: OutputSink | None = None,
        max_output_bytes: int = 1 << 20,
        user: RuntimeUser = "agent",
    ) -> ExecResult:
        async with self._lock:  # a kill that has begun would end this one too
            self._check_not_stopped()
        if user == "grader":
            raise refuse_grader(ProcessRuntime.name)
        extra = {"TMPDIR": self._tmp, **self._env, **(env or {}), LABEL: self._label}
        order = Order(
            argv=argv_of(command),
            cwd=str(Path(self.workdir) / (cwd or "")),
            env=clean_environment(self._expose, self.home, extra),
            filters=self._filters,
            rlimits=self._limits.rlimits,
        )
        return await self._executions.run(
            order,
            end_all=self._kill_all,
            stdin=stdin,
            timeout_s=timeout_s,
            on_output=on_output,
            max_output_bytes=max_output_bytes,
        )

    def _kill_labelled(self) -> None:
        kill_labelled(self._label.__eq__)

    async def _kill_all(self) -> None:
        await run_to_end(self._kill_labelled)

    async def upload(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self._check_not_stopped()
        await run_to_end(self._files.write, path, data, mode)

    async def download(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        self._check_not_stopped()
        return await asyncio.to_thread(self._files.read, path, max_bytes)

    async def clear(self, path: str) -> None:
        self._check_not_stopped()
        await run_to_end(self._files.clear, path)

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise RuntimeFailed(f"runtime {self.runtime_id} was stopped.")

    async def kill(self) -> None:
        """Supervisors first: each ends its own tree, labelled or not; then processes left behind earlier."""
        async with self._lock:
            await self._executions.close()
            await asyncio.to_thread(self._kill_labelled)

    async def stop(self) -> None:
        await self._disk.close()
        async with self._lock:
            if self._removed:
                return
            self._stopped = True
            await self._executions.close()
            await run_to_end(self._kill_labelled)
            await run_to_end(remove_folder, self._folder)
            self._removed = True

    async def usage(self) -> Usage:
        self._check_not_stopped()
        return self._disk.usage

    def limits(self) -> dict[str, str]:
        filtered = enforced(self._allowed) if self._filters else NOT_ENFORCED
        network = {"network": NOT_ENFORCED, "system_calls": filtered}
        return {**self._limits.told, **grader_enforcement(None), **network}
