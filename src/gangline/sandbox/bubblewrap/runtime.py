"""The `sandbox` runtime: namespaces made by bubblewrap, as root or as an ordinary user, without a daemon.

Invariants:
- The agent is never root, inside or outside. Started by root, each sandbox has a separate numeric user, which owns no
  files on the host. Started by a user, it runs as that user in a user namespace without privileges.
- It sees the host's programs, or an image, read-only, its own HOME, workdir, /tmp and `RuntimeSpec.folders`, its own
  processes, and (network `proxy`) one TCP port: the node's proxy; under `list` a second one: its own forward proxy. The
  folders are under `RuntimeStart.folder`.
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
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, NamedTuple

from gangline.domain.errors import GanglineError, RuntimeUnavailable
from gangline.domain.sandbox import Checkpoint, Runtime, RuntimeStart, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.bubblewrap.command_line import (
    HOST_NAME,
    IMAGE_RESERVED,
    IMAGE_ROOT,
    RESERVED,
    BubblewrapLaunch,
    View,
    arguments,
    content_of,
    private_files,
)
from gangline.sandbox.commands.forkserver import run_helper
from gangline.sandbox.commands.holder import PATH, Launch
from gangline.sandbox.confinement.cgroups import remove_owned
from gangline.sandbox.confinement.masks import FirstLife, refuse_hidden
from gangline.sandbox.images.listing import images_in
from gangline.sandbox.images.unpacked import UnpackedImages
from gangline.sandbox.layers.records import release
from gangline.sandbox.namespaced import (
    GRADER_HOME,
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
from gangline.sandbox.shared.environment import (
    PythonEnvironment,
    clean_environment,
    exposed_folders,
    image_environment,
)
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


class _Root(NamedTuple):
    """The root file system of a sandbox."""

    folder: Path | None = None
    """None: the host's own."""
    env: Mapping[str, str] = {}
    """Variables that its image sets."""
    content: Mapping[str, Path] = {}
    """The session's folders that it has: path inside -> host folder."""


def _reserved(spec: RuntimeSpec) -> Sequence[str]:
    """Paths that the session's folders may not use: an image's programs may be anywhere."""
    return RESERVED if spec.image is None else IMAGE_RESERVED


class BubblewrapRuntime(Runtime):
    """Starts sandboxes with `bwrap`."""

    name: ClassVar[str] = "sandbox"
    is_keepable: ClassVar[bool] = True

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings.from_environ()
        self._expose = exposed_folders(self._settings.expose)
        self._privileged = can_give_users()
        self._unpacked = UnpackedImages(self._settings.cache_dir / "unpacked")

    def missing(self) -> str | None:
        return None if shutil.which("bwrap", path=PATH) else obstacle("", path=PATH)

    async def images(self) -> Mapping[str, Collection[str]]:
        """Raises: RuntimeFailed."""
        return {**await images_in(self._settings), "": await run_to_end(self._unpacked.names)}

    @property
    def image_store(self) -> UnpackedImages | None:
        return self._unpacked if self._unpacked.is_usable else None

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        """Raises: InvalidRequest."""
        check_spec(spec, _reserved(spec), has_names=True)

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
        shared = checked_folders(start, _reserved(start.spec)) | grader_folder(start, has_users=self._privileged)
        python = PythonEnvironment(start.spec.python)
        refuse_hidden(start, python.beside(()))
        mounts = granted(start.spec, self._settings.expose)
        with ExitStack() as held:
            image = start.spec.image
            root = _Root() if image is None else await run_to_end(self._root, image, start, shared, held)
            user = held_user(start) if self._privileged else None
            sandbox = _BubblewrapSandbox(start, shared, user, self._expose, mounts, python, root, held.pop_all())
        return await sandbox.begun()

    def _root(self, image: str, start: RuntimeStart, shared: Mapping[str, Path], held: ExitStack) -> _Root:
        """held: keeps it. Blocking. Raises: InvalidRequest, RuntimeFailed."""
        if image.startswith("/"):
            root, env = Path(image), dict[str, str]()
        else:
            root, described = held.enter_context(self._unpacked.used(image))
            env = described.env
        own = {path: found for path in shared if path != GRADER_HOME and (found := content_of(root, path))}
        return _Root(root, env, own)

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
        root: _Root,
        held: ExitStack,
    ) -> None:
        """held: closed when nothing needs the root any more."""
        self._image = root
        self._held = held
        self._python = python
        self._expose = python.beside(expose)
        self._mounts = mounts
        self._reading = FirstLife(start)
        super().__init__(start, BubblewrapRuntime.name, shared, user, root.content)

    def _hosts(self) -> str:
        known = Path("/etc/hosts")
        is_ours = self._image.folder is None and known.is_file() and not known.is_symlink()
        others = known.read_text(errors="replace") if is_ours else ""
        return f"127.0.0.1 localhost {HOST_NAME}\n{others}"

    def _launch(self, entering: Sequence[str]) -> Launch:
        spec = self._start.spec
        seen, hidden = self._reading.next()
        as_root = os.geteuid() == 0 and self._uid is None
        uid = str(inner_uid(self._uid))
        files = {**self._user_files(), "hosts": self._hosts()}
        view = View(
            image=self._image.folder,
            shared=self._shared,
            expose=[*self._expose, *seen],
            mounts=self._mounts,
            masked=private_files() if as_root and spec.image is None else (),
            hidden=hidden,
            files=files,
            host_network=spec.network == "full",
            user_namespace=self._uid is None,
        )
        words = [*arguments(view), *(["--uid", uid, "--gid", uid] if as_root else [])]
        return BubblewrapLaunch(words, entering, files)

    async def _entered(self, proc_fd: int) -> None:
        if self._image.folder is not None:
            await asyncio.to_thread(run_helper, "new_root", self._mark.label, [proc_fd], IMAGE_ROOT)

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        if self._image.folder is None:
            return self._python.first_in(clean_environment(self._expose, HOME, extra))
        return self._python.first_in(image_environment(self._expose, HOME, self._image.env, extra))

    async def _remove(self) -> None:
        await super()._remove()
        self._held.close()
