"""The runtime `unshare`: processes in their own namespaces, by `unshare` of util-linux, over this machine's files.

A sandbox's processes see only each other, and none outlives it, not even one that hides. Files and network are the
machine's, and the user is the node's: use it for agents that you trust.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ClassVar

import msgspec

from gangline.domain.errors import InvalidRequest, RuntimeFailed, RuntimeUnavailable
from gangline.domain.sandbox import Checkpoint, ExecRequest, Runtime, RuntimeStart, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.commands.execution import EndAll, Order
from gangline.sandbox.commands.holder import PATH, Holder
from gangline.sandbox.commands.spawner import Spawner
from gangline.sandbox.layers.records import release
from gangline.sandbox.layers.stack import Layers
from gangline.sandbox.namespaced import try_out
from gangline.sandbox.shared.environment import PythonEnvironment, clean_environment, exposed_folders
from gangline.sandbox.shared.files import SharedFolders
from gangline.sandbox.shared.leftovers import LABEL, reap
from gangline.sandbox.supervised import SupervisedSandbox
from gangline.settings.machine import Settings

_FIRST = "echo ready; read _ <&3 & exec 3<&-; wait $!"
"""Process 1: it reaps orphans, and ends with its input, which only the process that started it holds."""


class UnshareRuntime(Runtime):
    """Starts sandboxes with `unshare`."""

    name: ClassVar[str] = "unshare"

    def __init__(self) -> None:
        self._expose = exposed_folders(Settings.from_environ().expose)

    def missing(self) -> str | None:
        return None if shutil.which("unshare", path=PATH) else "unshare is missing: apt-get install -y util-linux"

    async def check(self) -> None:
        await super().check()
        try:
            await try_out(self)
        except RuntimeFailed as error:
            raise RuntimeUnavailable(f"namespaces cannot be made here: {error.message}") from error

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        for field, value in (("image", spec.image), ("folders", spec.folders), ("mounts", spec.mounts)):
            if value:
                raise InvalidRequest(f"runtime.{field}: runtime `unshare` has this machine's files; use `sandbox`.")

    async def start(self, start: RuntimeStart) -> Sandbox:
        self.check_start(start)
        self.check_spec(start.spec)
        return await UnshareSandbox(start, self._expose).begun()

    async def release(self, checkpoint: Checkpoint) -> None:
        await asyncio.to_thread(release, checkpoint)

    async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
        return len(await asyncio.to_thread(reap, self.name, owner, root, keep))


class UnshareSandbox(SupervisedSandbox):
    """A folder, which lasts, and namespaces, which come and go."""

    def __init__(self, start: RuntimeStart, expose: Sequence[Path]) -> None:
        start = msgspec.structs.replace(start, folder=start.folder.resolve())
        work, home = start.folder / "work", start.folder / "home"
        super().__init__(start, UnshareRuntime.name, workdir=str(work), home=str(home))
        self._expose = expose
        self._python = PythonEnvironment(start.spec.python)
        self._own = {str(work): work, str(home): home}
        self.layers = Layers(start, UnshareRuntime.name, self._own)
        self._holder: Holder | None = None

    def _make_folders(self) -> None:
        for folder in self._own.values():
            folder.mkdir(parents=True)

    def _files(self) -> AbstractContextManager[SharedFolders]:
        return nullcontext(SharedFolders(self._own, self.workdir))

    async def _begin(self) -> None:
        self._holder = await Holder.start(_Unshare(), self._mark.label)
        self._spawner = Spawner(self._mark.label, self._holder.proc_fd)
        await self._spawner.ready()

    def _is_up(self) -> bool:
        return self._holder is not None and self._holder.alive

    def _order(self, request: ExecRequest) -> Order:
        env = clean_environment(self._expose, self.home, {**self._start.spec.env, **request.env})
        return self._ordered(request, env=self._python.first_in(env), own_namespace=os.geteuid() != 0)

    def _killer(self) -> EndAll:
        assert self._holder is not None
        return self._holder.kill_all

    def _kill_nowait(self) -> None:
        if self._holder is not None:
            self._holder.kill()

    async def _end(self, *, is_last: bool) -> None:
        if self._holder is not None:
            await self._holder.end()
            self._holder = None


class _Unshare:
    """See `holder.Launch`."""

    def spawn(self, label: str) -> subprocess.Popen[bytes]:
        user = [] if os.geteuid() == 0 else ["--map-current-user"]
        argv = ["unshare", *user, "--pid", "--ipc", "--uts", "--mount-proc", "--kill-child", "sh", "-c"]
        try:
            return subprocess.Popen(
                [*argv, f"exec 3<&0; {_FIRST}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"PATH": PATH, LABEL: label},
                cwd="/",
            )
        except OSError as error:
            raise RuntimeFailed(f"unshare could not be started: {error}.") from error

    async def first_pid(self, process: subprocess.Popen[bytes]) -> int:
        return _only_child(process.pid)

    def close(self) -> None:
        """Nothing is held."""


def _only_child(pid: int) -> int:
    """The shell's, of `unshare`."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
