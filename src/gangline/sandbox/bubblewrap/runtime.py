"""The `sandbox` runtime: namespaces made by bubblewrap, as root or as an ordinary user, without a daemon.

Invariants:
- The agent is never root, inside or outside. Started by root, each sandbox has a separate numeric user, which owns no
  files on the host. Started by a user, it runs as that user in a user namespace without privileges.
- It sees the host's programs read-only, its own HOME, workdir, /tmp and `RuntimeSpec.folders`, its own processes, and
  (network `proxy`) one TCP port: the node's proxy; under `list` a second one: its own forward proxy. The folders are
  under `RuntimeStart.folder`.
- Its system calls are filtered (`system_calls`), and it has a new session keyring, not that of the user who started the
  node.
- `kill` ends the namespaces and keeps the folders; the next `exec` makes new namespaces over them.
- Nothing outlives the process that started it (see `holder`), the node's keeper (see `keeper`).

See `namespaced` for how sandboxes are kept alive and entered.

`obstacle` explains why this machine cannot run a sandbox, and names the command that fixes it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from gangline.domain.errors import GanglineError, RuntimeUnavailable
from gangline.domain.sandbox import Checkpoint, Runtime, RuntimeStart, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.bubblewrap.command_line import (
    HOST_NAME,
    RESERVED,
    BubblewrapLaunch,
    View,
    arguments,
    private_files,
)
from gangline.sandbox.commands.holder import PATH, Launch
from gangline.sandbox.confinement.cgroups import remove_owned
from gangline.sandbox.confinement.masks import FirstLife
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
    inner_uid,
    try_out,
)
from gangline.sandbox.shared.environment import PythonEnvironment, clean_environment, exposed_folders
from gangline.sandbox.shared.leftovers import reap
from gangline.sandbox.shared.mounts import granted
from gangline.sandbox.shared.threads import run_to_end
from gangline.sandbox.shared.users import HeldUser
from gangline.settings.machine import Settings

_SYSCTLS = (
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
)


def obstacle(complaint: str, proc_sys: Path = Path("/proc/sys"), path: str | None = None) -> str:
    """Error message for people. `complaint`: error output of the attempt; `path`: where programs are searched."""
    if shutil.which("bwrap", path=path) is None:
        return "bubblewrap is not installed. Run, as root: apt-get install -y bubblewrap"
    for name, closed, line in _SYSCTLS:
        file = proc_sys / name
        if file.exists() and file.read_text().strip() == closed:
            return f"this kernel forbids user namespaces to ordinary users ({complaint}). Run, as root: {line}"
    if "proc" in complaint and "mount" in complaint.lower():
        return (
            f"a sandbox cannot have its own /proc here ({complaint}). This container hides parts of /proc: start it "
            "with `--security-opt systempaths=unconfined`, or run as root with CAP_SYS_ADMIN."
        )
    if "namespace" in complaint or "not permitted" in complaint or "uid map" in complaint:
        return (
            f"namespaces cannot be made here ({complaint}). In a container, start it with `--security-opt "
            "seccomp=unconfined --security-opt apparmor=unconfined`."
        )
    return f"a sandbox does not start: {complaint}"


class BubblewrapRuntime(Runtime):
    """Starts sandboxes with `bwrap`."""

    name: ClassVar[str] = "sandbox"
    is_keepable: ClassVar[bool] = True

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings.from_environ()
        self._expose = exposed_folders(self._settings.expose)
        self._privileged = can_give_users()

    def missing(self) -> str | None:
        return None if shutil.which("bwrap", path=PATH) else obstacle("", path=PATH)

    async def images(self) -> Mapping[str, Collection[str]]:
        return await images_in(self._settings)

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        """Raises: InvalidRequest."""
        check_spec(spec, RESERVED)

    async def check(self) -> None:
        """Start a sandbox and run `true` in it. Raises: RuntimeUnavailable, with the command that fixes it."""
        try:
            result = await try_out(self)
        except GanglineError as error:
            raise RuntimeUnavailable(obstacle(error.message)) from error
        if not result.ok:
            raise RuntimeUnavailable(obstacle(result.stderr.decode(errors="replace")))

    async def start(self, start: RuntimeStart) -> Sandbox:
        """Raises: RuntimeFailed, InvalidRequest."""
        self.check_start(start)
        shared = checked_folders(start, RESERVED) | grader_folder(start, has_users=self._privileged)
        python = PythonEnvironment(start.spec.python)
        user = held_user(start) if self._privileged else None
        mounts = granted(start.spec, self._settings.expose)
        return await _BubblewrapSandbox(start, shared, user, self._expose, mounts, python).begun()

    async def release(self, checkpoint: Checkpoint) -> None:
        await run_to_end(release, checkpoint)

    async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
        removed = await asyncio.to_thread(reap, self.name, owner, root, keep)
        await remove_owned(owner, keep)
        return len(removed)


class _BubblewrapSandbox(NamespacedSandbox):
    has_private_mounts = True

    def __init__(
        self,
        start: RuntimeStart,
        shared: Mapping[str, Path],
        user: HeldUser | None,
        expose: Sequence[Path],
        mounts: Mapping[str, Path],
        python: PythonEnvironment,
    ) -> None:
        self._python = python
        self._expose = python.beside(expose)
        self._mounts = mounts
        self._reading = FirstLife(start)
        super().__init__(start, BubblewrapRuntime.name, shared, user)

    def _make_more(self) -> None:
        known = Path(self._start.spec.image or "/", "etc/hosts")
        others = known.read_text(errors="replace") if known.is_file() and not known.is_symlink() else ""
        (self._start.folder / "hosts").write_text(f"127.0.0.1 localhost {HOST_NAME}\n{others}")

    def _launch(self, entering: Sequence[str]) -> Launch:
        spec = self._start.spec
        seen, hidden = self._reading.next()
        as_root = os.geteuid() == 0 and self._uid is None
        view = View(
            image=Path(spec.image) if spec.image is not None else None,
            shared=self._shared,
            expose=[*self._expose, *seen],
            mounts=self._mounts,
            masked=private_files() if as_root and spec.image is None else (),
            hidden=hidden,
            passwd=self._start.folder / "passwd",
            group=self._start.folder / "group",
            hosts=self._start.folder / "hosts",
            host_network=spec.network == "full",
            user_namespace=self._uid is None,
        )
        uid = str(inner_uid(self._uid))
        return BubblewrapLaunch([*arguments(view), *(["--uid", uid, "--gid", uid] if as_root else [])], entering)

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        return self._python.first_in(clean_environment(self._expose, HOME, extra))
