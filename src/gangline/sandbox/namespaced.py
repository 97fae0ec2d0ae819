"""Sandboxes made of namespaces that a launcher makes, and that our spawners enter from outside.

The common part of `sandbox` and `apptainer`: folders, commands, proxies, limits, and the end.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import ClassVar

from gangline.domain.errors import InvalidRequest
from gangline.domain.ids import new_id
from gangline.domain.image_names import is_image_name
from gangline.domain.sandbox import ExecRequest, ExecResult, Runtime, RuntimeStart
from gangline.domain.task import LimitsSpec, RuntimeSpec, WriteAction
from gangline.sandbox.commands.execution import EndAll, Order
from gangline.sandbox.commands.holder import Holder, Launch
from gangline.sandbox.commands.spawner import Spawner
from gangline.sandbox.confinement.cgroups import group_name, make_groups
from gangline.sandbox.confinement.freezing import Freezer
from gangline.sandbox.confinement.limits import NOT_ENFORCED, enforcement
from gangline.sandbox.confinement.system_calls import may_use_keys
from gangline.sandbox.layers.stack import Layers
from gangline.sandbox.network.listeners import NetworkListeners
from gangline.sandbox.shared.accounts import Traffic
from gangline.sandbox.shared.disk import MEASURED, root_inside
from gangline.sandbox.shared.files import SharedFolders
from gangline.sandbox.shared.mounts import refuse_own
from gangline.sandbox.shared.threads import run_to_end
from gangline.sandbox.shared.users import FIRST_UID, NUM_UIDS, HeldUser, grader_uid
from gangline.sandbox.supervised import SupervisedSandbox

HOME = "/home/agent"
GRADER_HOME = "/home/grader"
_CAP_SYS_ADMIN = 21


def check_spec(spec: RuntimeSpec, reserved: Sequence[str], *, has_names: bool = False) -> None:
    """reserved: paths that the session's folders may not use. has_names: whether images may be names. Raises:
    InvalidRequest."""
    own = ["/tmp", HOME, _checked_folder(spec.workdir, "runtime.workdir", reserved)]
    own += [_checked_folder(path, "runtime.folders", reserved) for path in spec.folders]
    closed = [path for path in reserved if path != "/opt"]  # a folder in it may be shown, since it is read-only
    for inside in spec.mounts:
        _checked_folder(inside, "runtime.mounts", closed)
    refuse_own(spec, own)
    check_image(spec.image, has_names=has_names)
    check_written(spec, own)


def check_image(image: str | None, *, has_names: bool) -> None:
    """Raises: InvalidRequest."""
    if image is not None and has_names and not image.startswith("/") and not is_image_name(image):
        raise InvalidRequest(
            f"runtime.image must be the name of an image, such as debian:12, or an absolute path on the node's "
            f"machine, got {image[:200]!r}."
        )
    if image is not None and not has_names and not PurePosixPath(image).is_absolute():
        raise InvalidRequest(
            f"runtime.image must be an absolute path on the node's machine, got {image!r}; names of images, such as "
            "debian:12, are for `sandbox`, `docker` and `podman`."
        )


def check_written(spec: RuntimeSpec, folders: Sequence[str]) -> None:
    """Raises: InvalidRequest when an action writes a file outside the session's folders."""
    for number, action in enumerate(spec.prepare):
        if isinstance(action, WriteAction):
            path = PurePosixPath(spec.workdir) / action.path
            if not any(path.is_relative_to(folder) for folder in folders):
                raise InvalidRequest(
                    f"runtime.prepare.{number}.path: {action.path!r} is outside the session's own folders, which are "
                    f"{', '.join(sorted(set(folders)))}: add its folder to runtime.folders."
                )


def checked_folders(start: RuntimeStart, reserved: Sequence[str]) -> dict[str, Path]:
    """Folders that the sandbox writes and the host reads: path inside -> host folder.

    reserved: paths that they may not use. Raises: InvalidRequest, also for other errors in `start`.
    """
    spec, folder = start.spec, start.folder
    if spec.network in ("proxy", "list") and start.proxy_port is None:
        raise InvalidRequest(f"network `{spec.network}` needs the port of the node's proxy.")
    workdir = _checked_folder(spec.workdir, "runtime.workdir", reserved)
    more = [_checked_folder(path, "runtime.folders", reserved) for path in spec.folders]
    own = {path: folder / "folders" / str(number) for number, path in enumerate(more)}
    if any(path in map(str, PurePosixPath(workdir).parents) for path in more):
        return own | {"/tmp": folder / "tmp", HOME: folder / "home"}  # inside that folder: an agent may remove it
    return own | {"/tmp": folder / "tmp", HOME: folder / "home", workdir: folder / "work"}


def grader_folder(start: RuntimeStart, *, has_users: bool) -> dict[str, Path]:
    """The private folder of the user `grader`, if the sandbox can have that user."""
    return {GRADER_HOME: start.folder / "grader"} if has_users else {}


def held_user(start: RuntimeStart) -> HeldUser:
    """A user for the sandbox. Blocking. Raises: RuntimeFailed when none is free."""
    return HeldUser(start.runtime_id, has_keys=may_use_keys(start.spec.system_calls_allow))


def _checked_folder(named: str, field: str, reserved: Sequence[str]) -> str:
    path = PurePosixPath(named)
    inside = [str(parent) for parent in (path, *path.parents)]
    reserved = (*reserved, GRADER_HOME)
    if not path.is_absolute() or ".." in path.parts or str(path) == "/" or any(name in reserved for name in inside):
        raise InvalidRequest(f"{field} must be an absolute folder outside the system's, got {named!r}.")
    return str(path)


class NamespacedSandbox(SupervisedSandbox):
    """Folders that last, and namespaces that come and go. Subclasses define how the namespaces are made: `_launch` and
    `_environment`."""

    agent_is_root: bool = False
    """Whether commands run as root of the sandbox's user namespace. They can then take over its first process, which
    has no system call filter."""
    has_private_mounts: ClassVar[bool] = False
    """Whether it can show mounts of a single namespace; `_launch` receives the way into it."""

    def __init__(
        self,
        start: RuntimeStart,
        runtime: str,
        shared: Mapping[str, Path],
        user: HeldUser | None,
        content: Mapping[str, Path] | None = None,
    ) -> None:
        """user: runs its commands; None keeps the current one. content: see `Layers`."""
        super().__init__(
            start,
            runtime,
            workdir=str(PurePosixPath(start.spec.workdir)),
            home=HOME,
            grader_home=None if user is None else GRADER_HOME,
            user=user,
        )
        group = group_name(start.owner, start.runtime_id)
        self._groups = make_groups(group, start.spec.limits)
        self._limits = enforcement(start.spec.limits, {**self._groups.enforced, **MEASURED}, own_user=True)
        self._shared = shared
        self._holder: Holder | None = None
        self._listeners = NetworkListeners()
        lasting = {path: folder for path, folder in shared.items() if path != GRADER_HOME}
        users = () if user is None else (user.uid, grader_uid(user.uid))
        self.layers = self._layers = Layers(
            start,
            runtime,
            lasting,
            uid=self._uid,
            mounts=self.has_private_mounts,
            private=shared.get(GRADER_HOME),
            processes=Freezer(self._groups, group, users),
            content=content,
        )

    # -- how its namespaces are made -----------------------------------------------------------------------------

    def _make_more(self) -> None:
        """Make further files in the sandbox's folder, once, in addition to the shared folders. Blocking."""

    @abstractmethod
    def _launch(self, entering: Sequence[str]) -> Launch:
        """The next start. `entering`: beginning of its command line. Blocking.

        Raises: InvalidRequest, RuntimeFailed.
        """

    async def _entered(self, proc_fd: int) -> None:
        """Complete the started sandbox. `proc_fd`: the open `/proc/<pid>` folder of its first process."""

    @abstractmethod
    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of a command."""

    # -- its folders ---------------------------------------------------------------------------------------------

    @property
    def _uid(self) -> int | None:
        return None if self._user is None else self._user.uid

    def _make_folders(self) -> None:
        uid = self._uid
        for path, shared in self._shared.items():
            shared.mkdir(parents=True, exist_ok=True)
            if uid is not None:
                owner = grader_uid(uid) if path == GRADER_HOME else uid
                os.chown(shared, owner, owner)
            if path == GRADER_HOME:
                shared.chmod(0o700)
        self._make_workdir()
        self._make_more()

    def _user_files(self) -> dict[str, str]:
        """Name of a file in /etc -> its content, for the users inside."""
        users = [("agent", inner_uid(self._uid), HOME)]
        if self._uid is not None:
            users.append(("grader", grader_uid(self._uid), GRADER_HOME))
        passwd = [f"{name}:x:{uid}:{uid}:{name}:{home}:/bin/sh" for name, uid, home in users]
        group = [f"{name}:x:{uid}:" for name, uid, _home in users]
        last = "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin"
        return {
            "passwd": _lines("root:x:0:0:root:/root:/bin/sh", *passwd, last),
            "group": _lines("root:x:0:", *group, "nogroup:x:65534:"),
        }

    def _make_workdir(self) -> None:
        """Needed when it lies in another folder of the session's."""
        inside = PurePosixPath(self.workdir)
        outer = next((path for path in inside.parents if str(path) in self._shared), None)
        if str(inside) in self._shared or outer is None:
            return
        shared = self._shared[str(outer)]
        for part in inside.relative_to(outer).parts:
            shared /= part
            shared.mkdir(exist_ok=True)
            if self._uid is not None:
                os.chown(shared, self._uid, self._uid)

    async def _remove(self) -> None:
        await self._groups.remove()
        await super()._remove()

    def _files(self) -> AbstractContextManager[SharedFolders]:
        uid = self._uid
        owners = {} if uid is None else {GRADER_HOME: grader_uid(uid)}
        folders = {**self._shared, **self._layers.folders()}
        return nullcontext(SharedFolders(folders, self.workdir, uid=uid, owners=owners))

    # -- its processes -------------------------------------------------------------------------------------------

    def _is_up(self) -> bool:
        return self._holder is not None and self._holder.alive

    async def _begin(self) -> None:
        holder = self._holder = await Holder.start(
            await run_to_end(self._launch, self._layers.entering), self._mark.label
        )
        await self._entered(holder.proc_fd)
        self._spawner = Spawner(self._mark.label, holder.proc_fd)
        if self._start.spec.network in ("proxy", "list"):
            await self._listeners.open(self._mark.label, holder.proc_fd, self._start)
        await self._spawner.ready()

    def _order(self, request: ExecRequest) -> Order:
        uid, own = self._uid, dict[str, str]()
        if request.user == "grader" and uid is not None:
            uid, own = grader_uid(uid), {"HOME": GRADER_HOME}
        return self._ordered(
            request,
            env=self._environment({**self._listeners.env, **self._start.spec.env, **own, **request.env}),
            uid=uid,
            own_namespace=self._uid is None and not self.agent_is_root,
            cgroup_procs=self._groups.procs,
        )

    def _killer(self) -> EndAll:
        assert self._holder is not None
        return self._holder.kill_all

    def _kill_nowait(self) -> None:
        if self._holder is not None:
            self._holder.kill()

    async def _end(self, *, is_last: bool) -> None:
        await self._listeners.close()
        if self._holder is not None:
            await self._holder.end()
            self._holder = None

    # -- what is known of it -------------------------------------------------------------------------------------

    def _written(self) -> Sequence[Path]:
        merged = self._layers.written()
        if merged is None:
            return [self._start.folder]
        return [*merged, *(folder for path, folder in self._shared.items() if path == GRADER_HOME)]

    def _root(self) -> Path | None:
        return None if self._holder is None else root_inside(self._holder.proc_fd)

    def _group_folders(self) -> Sequence[Path]:
        return self._groups.folders

    def _traffic(self) -> Mapping[str, Traffic] | str:
        is_shared = self._start.spec.network == "full"
        return "network `full` is the machine's own: nobody counts" if is_shared else self._listeners.traffic

    def _network(self) -> str:
        return NOT_ENFORCED if self._start.spec.network == "full" else "network namespace"

    def _system_calls(self) -> str:
        return NOT_ENFORCED if self.agent_is_root else super()._system_calls()


def _lines(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def inner_uid(uid: int | None) -> int:
    """The agent's user as seen inside. Root that cannot assign users appears as an ordinary user."""
    return uid if uid is not None else os.getuid() or 1000


def can_give_users() -> bool:
    """Whether we are root with enough rights to mount without a user namespace, and to become users that own no
    files."""
    if os.geteuid() != 0:
        return False
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    first, _outside, count = map(int, Path("/proc/self/uid_map").read_text().split()[:3])
    has_uids = first <= FIRST_UID and first + count >= FIRST_UID + 2 * NUM_UIDS
    return bool(int(status["CapEff"], 16) >> _CAP_SYS_ADMIN & 1) and has_uids


async def try_out(runtime: Runtime) -> ExecResult:
    """Run `true` in a sandbox without network and limits. Raises: the errors of `start` and `exec`."""
    with TemporaryDirectory(prefix="gangline-check-") as folder:
        start = RuntimeStart(
            runtime_id=new_id("check"),
            owner=new_id("check"),
            spec=RuntimeSpec(
                backend=runtime.name, network="none", limits=LimitsSpec(**dict.fromkeys(LimitsSpec.model_fields))
            ),
            folder=Path(folder) / "sandbox",
        )
        sandbox = await runtime.start(start)
        try:
            return await sandbox.exec(["true"])
        finally:
            await sandbox.stop()
