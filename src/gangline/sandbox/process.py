"""The `process` runtime: commands on this machine, as this user, without isolation. Used only when named, never by
default.

It gives a folder, a HOME, a clean environment and whole-tree kill. It cannot keep an agent from reading this user's
files, from opening connections, or from hiding a process that clears its own label; `limits` reports that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ClassVar

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.domain.sandbox import Checkpoint, ExecRequest, Runtime, RuntimeStart, Sandbox
from gangline.domain.task import RuntimeSpec, WriteAction
from gangline.sandbox.commands.execution import EndAll, Order
from gangline.sandbox.commands.spawner import Spawner
from gangline.sandbox.layers.records import release
from gangline.sandbox.layers.stack import Layers
from gangline.sandbox.shared.environment import PythonEnvironment, clean_environment, exposed_folders
from gangline.sandbox.shared.files import SharedFolders
from gangline.sandbox.shared.leftovers import LABEL, kill_labelled, reap
from gangline.sandbox.shared.mounts import refuse_mounts
from gangline.sandbox.shared.threads import run_to_end
from gangline.sandbox.supervised import SupervisedSandbox
from gangline.settings.machine import Settings


class ProcessRuntime(Runtime):
    """Runs commands as plain processes, each sandbox in its own folder."""

    name: ClassVar[str] = "process"

    def __init__(self, settings: Settings | None = None) -> None:
        self._expose = exposed_folders((settings or Settings.from_environ()).expose)

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        """Raises: InvalidRequest."""
        if spec.image is not None:
            raise InvalidRequest("runtime.image: runtime `process` has no images; use `sandbox`.")
        if spec.folders:
            raise InvalidRequest("runtime.folders: runtime `process` cannot give them at their paths; use `sandbox`.")
        refuse_mounts(spec, cls.name)
        for number, action in enumerate(spec.prepare):
            if isinstance(action, WriteAction) and action.path.startswith("/"):
                raise InvalidRequest(
                    f"runtime.prepare.{number}.path: runtime `process` writes into its working folder alone, and "
                    f"{action.path!r} is absolute; make it relative, or use `sandbox`."
                )

    async def start(self, start: RuntimeStart) -> Sandbox:
        """Raises: InvalidRequest."""
        self.check_start(start)
        self.check_spec(start.spec)
        return await _ProcessSandbox(start, self._expose).begun()

    async def release(self, checkpoint: Checkpoint) -> None:
        await run_to_end(release, checkpoint)

    async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
        return len(await asyncio.to_thread(reap, self.name, owner, root, keep))


class _ProcessSandbox(SupervisedSandbox):
    """A folder, and processes identified by their label."""

    def __init__(self, start: RuntimeStart, expose: Sequence[Path]) -> None:
        folder = start.folder.resolve()
        start = msgspec.structs.replace(start, folder=folder)
        super().__init__(start, ProcessRuntime.name, workdir=str(folder / "work"), home=str(folder / "home"))
        self._tmp = str(folder / "tmp")
        self._expose = expose
        self._python = PythonEnvironment(start.spec.python)
        paths = {path: Path(path) for path in (self.workdir, self.home, self._tmp)}
        self.layers = Layers(start, ProcessRuntime.name, paths)
        self._shared = SharedFolders(paths, self.workdir)

    def _make_folders(self) -> None:
        for path in (self.workdir, self.home, self._tmp):
            Path(path).mkdir(exist_ok=True)

    async def _begin(self) -> None:
        self._spawner = Spawner(self._mark.label)
        await self._spawner.ready()

    def _order(self, request: ExecRequest) -> Order:
        extra = {"TMPDIR": self._tmp, **self._start.spec.env, **request.env, LABEL: self._mark.label}
        return self._ordered(request, env=self._python.first_in(clean_environment(self._expose, self.home, extra)))

    def _killer(self) -> EndAll:
        return self._kill_all

    async def _kill_all(self) -> None:
        """Kill all processes with the label, including the spawner."""
        await run_to_end(kill_labelled, lambda label: label == self._mark.label)

    async def _end(self, *, is_last: bool) -> None:
        """Kill processes left behind earlier. Supervisors have already ended their own trees, labelled or not."""
        await self._kill_all()

    def _files(self) -> AbstractContextManager[SharedFolders]:
        return nullcontext(self._shared)
