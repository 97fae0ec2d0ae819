"""Sandboxes made of namespaces that a launcher makes, and that our foremen enter from outside.

The common part of `sandbox` and `apptainer`: the folders, the commands, the proxies, the limits, the end. Their
difference is an `Enclosure`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Protocol

from gangline.domain.errors import InvalidRequest
from gangline.domain.ids import new_id
from gangline.domain.sandbox import ExecRequest, ExecResult, Runtime, RuntimeStart, RuntimeUser
from gangline.domain.task import LimitsSpec, RuntimeSpec, WriteAction
from gangline.sandbox.commands.execution import Order
from gangline.sandbox.commands.foreman import Foreman
from gangline.sandbox.commands.holder import Holder, Launch
from gangline.sandbox.commands.sandbox import Entry, Life
from gangline.sandbox.confinement.cgroups import Cgroups, group_name, make_groups
from gangline.sandbox.confinement.freezing import Freezer
from gangline.sandbox.confinement.limits import NOT_ENFORCED, enforcement, grader_enforcement, refuse_grader
from gangline.sandbox.confinement.system_calls import enforced, filter_for, may_use_keys
from gangline.sandbox.layers.stack import Layers
from gangline.sandbox.network.listeners import NetworkListeners
from gangline.sandbox.shared.accounts import Traffic
from gangline.sandbox.shared.disk import MEASURED, root_inside
from gangline.sandbox.shared.environment import argv_of
from gangline.sandbox.shared.files import SharedFolders
from gangline.sandbox.shared.handle import SandboxFacts
from gangline.sandbox.shared.leftovers import Mark, remove_folder, write_mark
from gangline.sandbox.shared.mounts import refuse_own
from gangline.sandbox.shared.threads import run_to_end
from gangline.sandbox.shared.users import FIRST_UID, NUM_UIDS, HeldUser, grader_uid

__all__ = [
    "GRADER_HOME",
    "HOME",
    "Enclosure",
    "can_give_users",
    "check_image_path",
    "check_spec",
    "check_written",
    "checked_folders",
    "grader_folder",
    "held_user",
    "inner_uid",
    "namespaced",
    "try_out",
]

HOME = "/home/agent"
GRADER_HOME = "/home/grader"
_CAP_SYS_ADMIN = 21


class Enclosure(Protocol):
    """How one sandbox's namespaces are made. `make_folders` and `launch` block, and are called from a thread."""

    agent_is_root: bool
    """Whether commands are root of the sandbox's user namespace: they can then take over its first process, which has
    no filter of system calls."""

    def make_folders(self) -> None:
        """Make its own folders in the sandbox's folder, once, beside the shared folders and the files of users."""
        ...

    def reset_others(self) -> None:
        """Remove what the sandbox wrote beside its shared folders. None of its processes lives. Raises: OSError."""
        ...

    has_private_mounts: bool
    """Whether it can show mounts that only one namespace has: `launch` takes the way to them."""

    def launch(self, entering: Sequence[str]) -> Launch:
        """Another start. `entering`: the beginning of its command line. Raises: InvalidRequest, RuntimeFailed."""
        ...

    async def entered(self, proc_fd: int) -> None:
        """Inspect the started sandbox. `proc_fd`: the open `/proc/<pid>` folder of its first process."""
        ...

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of a command."""
        ...

    def close(self) -> None:
        """Release its resources; nothing lives in it any more."""
        ...


def check_spec(spec: RuntimeSpec, reserved: Sequence[str]) -> None:
    """reserved: where no folder of the session's can be. Raises: InvalidRequest."""
    own = ["/tmp", HOME, _checked_folder(spec.workdir, "runtime.workdir", reserved)]
    own += [_checked_folder(path, "runtime.folders", reserved) for path in spec.folders]
    closed = [path for path in reserved if path != "/opt"]  # a folder in it may be shown, and nobody writes there
    for inside in spec.mounts:
        _checked_folder(inside, "runtime.mounts", closed)
    refuse_own(spec, own)
    check_image_path(spec.image)
    check_written(spec, own)


def check_image_path(image: str | None) -> None:
    """Raises: InvalidRequest."""
    if image is not None and not PurePosixPath(image).is_absolute():
        raise InvalidRequest(
            f"runtime.image must be an absolute path on the node's machine, got {image!r}; names of images, such as "
            "debian:12, are for `docker` and `podman`."
        )


def check_written(spec: RuntimeSpec, folders: Sequence[str]) -> None:
    """Raises: InvalidRequest where an action writes a file outside the session's own folders."""
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

    reserved: where none of them can be. Raises: InvalidRequest, also when `start` is wrong elsewhere.
    """
    spec, folder = start.spec, start.folder
    if spec.network in ("proxy", "list") and start.proxy_port is None:
        raise InvalidRequest(f"network `{spec.network}` needs the port of the node's proxy.")
    workdir = _checked_folder(spec.workdir, "runtime.workdir", reserved)
    more = [_checked_folder(path, "runtime.folders", reserved) for path in spec.folders]
    own = {path: folder / "folders" / str(number) for number, path in enumerate(more)}
    if any(path in map(str, PurePosixPath(workdir).parents) for path in more):
        return own | {"/tmp": folder / "tmp", HOME: folder / "home"}  # a part of that folder: an agent may remove it
    return own | {"/tmp": folder / "tmp", HOME: folder / "home", workdir: folder / "work"}


def grader_folder(start: RuntimeStart, *, has_users: bool) -> dict[str, Path]:
    """The private folder of the user `grader`, where there can be one."""
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


def namespaced(
    start: RuntimeStart, runtime: str, enclosure: Enclosure, shared: Mapping[str, Path], user: HeldUser | None
) -> Life:
    """A sandbox to begin. `user`: the one that its commands become; None stays who we are."""
    mark = Mark(owner=start.owner, runtime=runtime, runtime_id=start.runtime_id)
    groups = make_groups(group_name(start.owner, start.runtime_id), start.spec.limits)
    return _Namespaces(start, mark, enclosure, shared, user, groups)


class _Namespaces:
    """See `Life`: folders that last, and namespaces that come and go."""

    moves_files_alive = False

    def __init__(
        self,
        start: RuntimeStart,
        mark: Mark,
        enclosure: Enclosure,
        shared: Mapping[str, Path],
        user: HeldUser | None,
        groups: Cgroups,
    ) -> None:
        self.facts = SandboxFacts(
            runtime_id=start.runtime_id,
            workdir=str(PurePosixPath(start.spec.workdir)),
            home=HOME,
            grader_home=None if user is None else GRADER_HOME,
            proxy_url=None if start.spec.network == "none" else _proxy_url(start.proxy_port),
        )
        self.asked_limits = start.spec.limits
        self._start = start
        self._mark = mark
        self._enclosure = enclosure
        self._user = user
        self._groups = groups
        self._limits = enforcement(start.spec.limits, {**groups.enforced, **MEASURED}, own_user=True)
        self._shared = shared
        program = filter_for(start.spec.system_calls_allow)
        self._filters = () if program is None else (program,)
        self._holder: Holder | None = None
        self._foreman: Foreman | None = None
        self._listeners = NetworkListeners()
        grader = shared.get(GRADER_HOME)
        lasting = {path: folder for path, folder in shared.items() if path != GRADER_HOME}
        users = () if user is None else (user.uid, grader_uid(user.uid))
        self.layers = Layers(
            start,
            mark.runtime,
            lasting,
            uid=self._uid,
            mounts=enclosure.has_private_mounts,
            private=grader,
            processes=Freezer(groups, group_name(start.owner, start.runtime_id), users),
            reset_others=enclosure.reset_others,
        )

    @property
    def _uid(self) -> int | None:
        return None if self._user is None else self._user.uid

    async def make(self) -> None:
        await run_to_end(self._make_folders)

    def _make_folders(self) -> None:
        uid, folder = self._uid, self._start.folder
        write_mark(folder, self._mark)
        for path, shared in self._shared.items():
            shared.mkdir(parents=True, exist_ok=True)
            if uid is not None:
                owner = grader_uid(uid) if path == GRADER_HOME else uid
                os.chown(shared, owner, owner)
            if path == GRADER_HOME:
                shared.chmod(0o700)
        self._make_workdir()
        users = [("agent", inner_uid(uid), HOME)]
        if uid is not None:
            users.append(("grader", grader_uid(uid), GRADER_HOME))
        passwd = [f"{name}:x:{uid}:{uid}:{name}:{home}:/bin/sh" for name, uid, home in users]
        group = [f"{name}:x:{uid}:" for name, uid, _home in users]
        last = "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin"
        _write_lines(folder / "passwd", ["root:x:0:0:root:/root:/bin/sh", *passwd, last])
        _write_lines(folder / "group", ["root:x:0:", *group, "nogroup:x:65534:"])
        self._enclosure.make_folders()
        self.layers.begin()

    def _make_workdir(self) -> None:
        """Where it lies in another folder of the session's."""
        inside = PurePosixPath(self.facts.workdir)
        outer = next((path for path in inside.parents if str(path) in self._shared), None)
        if str(inside) in self._shared or outer is None:
            return
        shared = self._shared[str(outer)]
        for part in inside.relative_to(outer).parts:
            shared /= part
            shared.mkdir(exist_ok=True)
            if self._uid is not None:
                os.chown(shared, self._uid, self._uid)

    @property
    def is_alive(self) -> bool:
        holder, foreman = self._holder, self._foreman
        return holder is not None and foreman is not None and holder.alive and foreman.alive

    async def start(self) -> None:
        holder = self._holder = await Holder.start(
            await run_to_end(self._enclosure.launch, self.layers.entering), self._mark.label
        )
        self._foreman = Foreman(self._mark.label, holder.proc_fd)
        await self._enclosure.entered(holder.proc_fd)
        if self._start.spec.network in ("proxy", "list"):
            await self._listeners.open(self._mark.label, holder.proc_fd, self._start)
        await self._foreman.ready()

    def entry(self, request: ExecRequest) -> Entry:
        assert self._holder is not None
        assert self._foreman is not None
        uid, own = self._becoming(request.user)
        extra = {**self._listeners.env, **self._start.spec.env, **own, **request.env}
        order = Order(
            argv=argv_of(request.command),
            cwd=str(PurePosixPath(self.facts.workdir) / (request.cwd or "")),
            env=self._enclosure.environment(extra),
            uid=uid,
            own_namespace=self._uid is None and not self._enclosure.agent_is_root,
            filters=self._filters,
            cgroup_procs=self._groups.procs,
            rlimits=self._limits.rlimits,
            grace_s=request.grace_s,
        )
        return Entry(self._foreman, order, self._holder.kill_all)

    def _becoming(self, user: RuntimeUser) -> tuple[int | None, dict[str, str]]:
        """The user that a command becomes, and the environment that goes with it. Raises: RuntimeUnavailable."""
        if user == "agent":
            return self._uid, {}
        if self._uid is None:
            raise refuse_grader(self._mark.runtime)
        return grader_uid(self._uid), {"HOME": GRADER_HOME}

    def doom(self) -> None:
        if self._holder is not None:
            self._holder.kill()

    async def end(self, *, is_last: bool) -> None:
        await self._listeners.close()
        if self._holder is not None:
            await self._holder.end()
            self._holder = None
        if self._foreman is not None:
            await self._foreman.end()
            self._foreman = None

    async def remove(self) -> None:
        self._enclosure.close()
        await self._groups.remove()
        await run_to_end(self._remove_folder)
        if self._user is not None:
            self._user.release()

    def _remove_folder(self) -> None:
        self.layers.close()
        remove_folder(self._start.folder)

    def files(self) -> AbstractContextManager[SharedFolders]:
        uid = self._uid
        owners = {} if uid is None else {GRADER_HOME: grader_uid(uid)}
        folders = {**self._shared, **self.layers.folders()}
        return nullcontext(SharedFolders(folders, self.facts.workdir, uid=uid, owners=owners))

    def written(self) -> Sequence[Path]:
        merged = self.layers.written()
        if merged is None:
            return [self._start.folder]
        return [*merged, *(folder for path, folder in self._shared.items() if path == GRADER_HOME)]

    def root(self) -> Path | None:
        return None if self._holder is None else root_inside(self._holder.proc_fd)

    def group_folders(self) -> Sequence[Path]:
        return self._groups.folders

    def traffic(self) -> Mapping[str, Traffic] | str:
        is_shared = self._start.spec.network == "full"
        return "network `full` is the machine's own: nobody counts" if is_shared else self._listeners.traffic

    def limits(self) -> dict[str, str]:
        network = NOT_ENFORCED if self._start.spec.network == "full" else "network namespace"
        allowed = self._start.spec.system_calls_allow
        is_filtered = self._filters and not self._enclosure.agent_is_root
        filtered = enforced(allowed) if is_filtered else NOT_ENFORCED
        own = grader_enforcement(self.facts.grader_home)
        return {
            **self._limits.told,
            **own,
            "network": network,
            "system_calls": filtered,
            "checkpoints": self.layers.method,
        }


def _write_lines(file: Path, lines: Sequence[str]) -> None:
    file.write_text("".join(f"{line}\n" for line in lines))


def _proxy_url(port: int | None) -> str | None:
    return None if port is None else f"http://127.0.0.1:{port}"


def inner_uid(uid: int | None) -> int:
    """The agent's user as it sees itself. Root that cannot give users shows it as an ordinary one."""
    return uid if uid is not None else os.getuid() or 1000


def can_give_users() -> bool:
    """Whether we are root enough to mount without a user namespace and to become users that own nothing."""
    if os.geteuid() != 0:
        return False
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    first, _outside, count = map(int, Path("/proc/self/uid_map").read_text().split()[:3])
    has_uids = first <= FIRST_UID and first + count >= FIRST_UID + 2 * NUM_UIDS
    return bool(int(status["CapEff"], 16) >> _CAP_SYS_ADMIN & 1) and has_uids


async def try_out(runtime: Runtime) -> ExecResult:
    """Run `true` in a sandbox without network and limits. Raises: errors of `start` and `exec`."""
    with TemporaryDirectory(prefix="gangline-check-") as folder:
        start = RuntimeStart(
            runtime_id=new_id("check"),
            owner=new_id("check"),
            spec=RuntimeSpec(
                backend=runtime.name, network="none", limits=LimitsSpec(**dict.fromkeys(LimitsSpec.model_fields))
            ),
            folder=Path(folder) / "sandbox",
        )
        handle = await runtime.start(start)
        try:
            return await handle.exec(["true"])
        finally:
            await handle.stop()
