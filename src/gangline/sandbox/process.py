"""The `process` runtime: commands on this machine, as this user, without isolation. Only by name, never by default.

It gives a folder, a HOME, a clean environment and whole-tree kill. It cannot keep an agent from reading this user's
files, from dialling anything, or from hiding a process that clears its own label: `limits` says so.
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
from gangline.sandbox.commands.execution import Order
from gangline.sandbox.commands.foreman import Foreman
from gangline.sandbox.commands.sandbox import Entry, begun
from gangline.sandbox.confinement.limits import NOT_ENFORCED, enforcement, grader_enforcement, refuse_grader
from gangline.sandbox.confinement.system_calls import enforced, filter_for
from gangline.sandbox.layers.records import release
from gangline.sandbox.layers.stack import Layers
from gangline.sandbox.shared.disk import MEASURED
from gangline.sandbox.shared.environment import PythonEnvironment, argv_of, clean_environment, exposed_folders
from gangline.sandbox.shared.files import SharedFolders
from gangline.sandbox.shared.handle import SandboxFacts
from gangline.sandbox.shared.leftovers import LABEL, Mark, kill_labelled, reap, remove_folder, write_mark
from gangline.sandbox.shared.mounts import refuse_mounts
from gangline.sandbox.shared.threads import run_to_end
from gangline.settings.machine import Settings

__all__ = ["ProcessRuntime"]


class ProcessRuntime(Runtime):
    """Runs commands as plain processes, each sandbox in a folder of its own."""

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
        mark = Mark(owner=start.owner, runtime=self.name, runtime_id=start.runtime_id)
        return await begun(_ProcessLife(start, mark, self._expose))

    async def release(self, checkpoint: Checkpoint) -> None:
        await run_to_end(release, checkpoint)

    async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
        return len(await asyncio.to_thread(reap, self.name, owner, root, keep))


class _ProcessLife:
    """See `Life`: a folder, and processes that are known by their label."""

    moves_files_alive = False

    def __init__(self, start: RuntimeStart, mark: Mark, expose: Sequence[Path]) -> None:
        folder, port = start.folder.resolve(), start.proxy_port
        self.facts = SandboxFacts(
            runtime_id=start.runtime_id,
            workdir=str(folder / "work"),
            home=str(folder / "home"),
            grader_home=None,
            proxy_url=None if port is None or start.spec.network == "none" else f"http://127.0.0.1:{port}",
        )
        self.asked_limits = start.spec.limits
        self._folder = folder
        self._tmp = str(folder / "tmp")
        self._spec = start.spec
        self._expose = expose
        self._python = PythonEnvironment(start.spec.python)
        self._mark = mark
        self._label = mark.label
        self._foreman: Foreman | None = None
        self._limits = enforcement(start.spec.limits, MEASURED, own_user=False)
        program = filter_for(start.spec.system_calls_allow)
        self._filters = () if program is None else (program,)
        paths = {path: Path(path) for path in self._paths()}
        self.layers = Layers(msgspec.structs.replace(start, folder=folder), mark.runtime, paths)
        self._files = SharedFolders(paths, self.facts.workdir)

    def _paths(self) -> tuple[str, str, str]:
        return self.facts.workdir, self.facts.home, self._tmp

    async def make(self) -> None:
        await run_to_end(self._make_folders)

    def _make_folders(self) -> None:
        write_mark(self._folder, self._mark)
        for path in self._paths():
            Path(path).mkdir(exist_ok=True)
        self.layers.begin()

    @property
    def is_alive(self) -> bool:
        return self._foreman is not None and self._foreman.alive

    async def start(self) -> None:
        self._foreman = Foreman(self._label)
        await self._foreman.ready()

    def entry(self, request: ExecRequest) -> Entry:
        assert self._foreman is not None
        if request.user == "grader":
            raise refuse_grader(ProcessRuntime.name)
        extra = {"TMPDIR": self._tmp, **self._spec.env, **request.env, LABEL: self._label}
        order = Order(
            argv=argv_of(request.command),
            cwd=str(Path(self.facts.workdir) / (request.cwd or "")),
            env=self._python.first_in(clean_environment(self._expose, self.facts.home, extra)),
            filters=self._filters,
            rlimits=self._limits.rlimits,
            grace_s=request.grace_s,
        )
        return Entry(self._foreman, order, self._kill_all)

    def _kill_labelled(self) -> None:
        """The foreman among them."""
        kill_labelled(self._label.__eq__)

    async def _kill_all(self) -> None:
        await run_to_end(self._kill_labelled)

    def doom(self) -> None:
        """Supervisors end their own trees, labelled or not; `end` kills what was left behind earlier."""

    async def end(self, *, is_last: bool) -> None:
        await self._kill_all()
        if self._foreman is not None:
            await self._foreman.end()
            self._foreman = None

    async def remove(self) -> None:
        await run_to_end(self._remove_folder)

    def _remove_folder(self) -> None:
        self.layers.close()
        remove_folder(self._folder)

    def files(self) -> AbstractContextManager[SharedFolders]:
        return nullcontext(self._files)

    def written(self) -> Sequence[Path]:
        return [self._folder]

    def root(self) -> Path | None:
        return None

    def group_folders(self) -> Sequence[Path]:
        return ()

    def traffic(self) -> str:
        return "runtime `process` is in the machine's own network: nobody counts"

    def limits(self) -> dict[str, str]:
        filtered = enforced(self._spec.system_calls_allow) if self._filters else NOT_ENFORCED
        network = {"network": NOT_ENFORCED, "system_calls": filtered, "checkpoints": self.layers.method}
        return {**self._limits.told, **grader_enforcement(None), **network}
