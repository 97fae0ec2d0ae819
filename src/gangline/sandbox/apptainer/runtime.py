"""The `apptainer` runtime: containers without a daemon and without root, for clusters.

Invariants:
- A container is one child process, `apptainer exec` with a waiting shell. No daemon or Apptainer instance is involved
  that could outlive the node. Commands enter it from outside, each under a supervisor: see `namespaced`.
- Started by root, each container's commands run as a separate numeric user. Started by a user, they run as that user
  or, where the operator allows it (`GANGLINE_APPTAINER_FAKEROOT`), as root of a user namespace, which may install
  packages.
- The image never changes: files written outside the shared folders go to an overlay, which is removed with the sandbox
  or at a reset. In a container started by an ordinary user, the agent owns that overlay and may overwrite any file of
  the image there.
- Without an image it sees the host's programs, as `sandbox` does.
- Networks `none`, `proxy` and `list` are a network namespace with only `lo`. Under `full` the container uses the host's
  network, with a separate loopback address as its `localhost`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import ClassVar

from gangline.domain.errors import GanglineError, RuntimeFailed, RuntimeUnavailable
from gangline.domain.sandbox import Checkpoint, Runtime, RuntimeStart, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.apptainer.command_line import (
    ApptainerLaunch,
    View,
    checked_image,
    container_environment,
    exec_arguments,
    make_host_root,
)
from gangline.sandbox.bubblewrap.command_line import SHM_BYTES
from gangline.sandbox.commands.forkserver import run_helper
from gangline.sandbox.commands.holder import PATH, Launch
from gangline.sandbox.confinement.cgroups import remove_owned
from gangline.sandbox.confinement.masks import FirstLife, refuse_hidden
from gangline.sandbox.images.listing import images_in
from gangline.sandbox.layers.records import release
from gangline.sandbox.namespaced import (
    HOME,
    NamespacedSandbox,
    can_give_users,
    check_spec,
    checked_folders,
    grader_folder,
    held_user,
    try_out,
)
from gangline.sandbox.network.loopback import LoopbackAddress
from gangline.sandbox.shared.environment import PythonEnvironment, exposed_folders, image_environment
from gangline.sandbox.shared.leftovers import kill_mounted, reap
from gangline.sandbox.shared.mounts import granted
from gangline.sandbox.shared.removal import remove_tree
from gangline.sandbox.shared.threads import run_to_end
from gangline.sandbox.shared.users import HeldUser
from gangline.settings.machine import Settings

_RESERVED = ("/proc", "/dev", "/sys", "/etc", "/.singularity.d")


class ApptainerRuntime(Runtime):
    """Starts containers with `apptainer`, or the command in `GANGLINE_APPTAINER`."""

    name: ClassVar[str] = "apptainer"
    is_keepable: ClassVar[bool] = True

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings = settings or Settings.from_environ()
        self._program = settings.apptainer
        self._fakeroot = settings.apptainer_fakeroot
        self._expose = exposed_folders(settings.expose)
        self._privileged = can_give_users()

    def missing(self) -> str | None:
        try:
            self._check_program()
        except RuntimeUnavailable as error:
            return error.message
        return None

    async def images(self) -> Mapping[str, Collection[str]]:
        return await images_in(self._settings)

    async def check(self) -> None:
        """Start a container with the host's programs and run `true` in it. Raises: RuntimeUnavailable."""
        self._check_program()
        try:
            result = await try_out(self)
        except GanglineError as error:
            raise RuntimeUnavailable(f"a container does not start: {error.message}") from error
        if not result.ok:
            raise RuntimeUnavailable(f"`true` fails in a container: {result.stderr.decode(errors='replace')}")

    def _check_program(self) -> None:
        if shutil.which(self._program[0], path=PATH) is None:
            raise RuntimeUnavailable(
                f"{self._program[0]} is not installed. Install Apptainer 1.4 or newer (apptainer.org), or name another "
                "program with GANGLINE_APPTAINER."
            )
        if self._fakeroot and os.geteuid() == 0:
            raise RuntimeUnavailable(
                "GANGLINE_APPTAINER_FAKEROOT is for nodes of ordinary users: a root node's would be root indeed."
            )

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        """Raises: InvalidRequest."""
        check_spec(spec, _RESERVED)

    async def start(self, start: RuntimeStart) -> Sandbox:
        """Raises: RuntimeFailed, RuntimeUnavailable, InvalidRequest."""
        self.check_start(start)
        self._check_program()
        image = checked_image(start.spec.image)
        shared = checked_folders(start, _RESERVED) | grader_folder(start, has_users=self._privileged)
        mounts = granted(start.spec, self._settings.expose)
        python = PythonEnvironment(start.spec.python)
        refuse_hidden(start, python.beside(()))
        loopback = LoopbackAddress(start.runtime_id) if start.spec.network == "full" else None
        user = held_user(start) if self._privileged else None
        return await _ApptainerSandbox(
            start, shared, user, image, self._expose, mounts, python, loopback, self._program, self._fakeroot
        ).begun()

    async def release(self, checkpoint: Checkpoint) -> None:
        await run_to_end(release, checkpoint)

    async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
        await asyncio.to_thread(kill_mounted, self.name, owner, root, keep)
        removed = await asyncio.to_thread(reap, self.name, owner, root, keep)
        await remove_owned(owner, keep)
        return len(removed)


class _ApptainerSandbox(NamespacedSandbox):
    def __init__(
        self,
        start: RuntimeStart,
        shared: Mapping[str, Path],
        user: HeldUser | None,
        image: str | None,
        expose: Sequence[Path],
        mounts: Mapping[str, Path],
        python: PythonEnvironment,
        loopback: LoopbackAddress | None,
        program: Sequence[str],
        fakeroot: bool,
    ) -> None:
        self._folder = start.folder
        self._reading = FirstLife(start)
        self._prepare_folders = start.prepare_folders
        self._image = image
        self._host_root: list[Path] = []
        self._python = python
        self._expose = python.beside(expose)
        self._mounts = mounts
        self._program = program
        self.agent_is_root = fakeroot
        self._loopback = loopback
        self._image_env: Mapping[str, str] = {}
        super().__init__(start, ApptainerRuntime.name, shared, user)

    @property
    def _localhost(self) -> str:
        return "127.0.0.1" if self._loopback is None else self._loopback.address

    def _make_more(self) -> None:
        (self._folder / "apptainer").mkdir(exist_ok=True)
        (self._folder / "empty").mkdir(exist_ok=True)
        if self._image is None:
            self._host_root = make_host_root(self._folder / "root")
        files = {**self._user_files(), "hosts": f"{self._localhost} localhost gangline\n"}
        for name, text in files.items():
            (self._folder / name).write_text(text)
        self._make_overlay()

    def _reset_others(self) -> None:
        remove_tree(self._folder / "overlay")
        self._make_overlay()

    def _make_overlay(self) -> None:
        upper = self._folder / "overlay" / "upper"
        for inside in (*self._shared, *self._mounts, *map(str, (*self._expose, *self._prepare_folders))):
            self._make_way(upper, PurePosixPath(inside))

    @staticmethod
    def _make_way(upper: Path, inside: PurePosixPath) -> None:
        """Make every folder above a mount point accessible to all: an image may close /root, for example, to the
        agent."""
        for parent in reversed(inside.parents):
            folder = upper / parent.relative_to("/")
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o755)

    def _launch(self, entering: Sequence[str]) -> Launch:
        assert not entering, "no private mounts here"
        seen, hidden = self._reading.next()
        names = ("passwd", "group", "hosts")
        view = View(
            image=self._image or str(self._folder / "root"),
            overlay=self._folder / "overlay",
            shared=self._shared,
            expose=[*self._host_root, *self._expose, *seen],
            mounts=self._mounts,
            empty=self._folder / "empty",
            hidden=hidden,
            files={f"/etc/{name}": self._folder / name for name in names},
            host_network=self._loopback is not None,
            user_namespace=os.geteuid() != 0,
            fakeroot=self.agent_is_root,
        )
        return ApptainerLaunch(exec_arguments(self._program, view), self._folder / "apptainer")

    async def _entered(self, proc_fd: int) -> None:
        await asyncio.to_thread(self._look_inside, proc_fd)

    def _look_inside(self, proc_fd: int) -> None:
        """Raises: RuntimeFailed."""
        try:
            run_helper("shared_memory", self._mark.label, [proc_fd], SHM_BYTES)
        except RuntimeFailed as error:
            raise RuntimeFailed(f"/dev/shm of a container could not be limited: {error.message}") from error
        self._image_env = container_environment(int(os.readlink(f"/proc/self/fd/{proc_fd}").rpartition("/")[2]))

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        own = {"GANGLINE_LOOPBACK": self._localhost, **extra}
        return self._python.first_in(image_environment(self._expose, HOME, self._image_env, own))

    async def _remove(self) -> None:
        if self._loopback is not None:
            self._loopback.release()
        await super()._remove()
