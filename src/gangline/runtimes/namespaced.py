"""Sandboxes made of namespaces that a launcher makes, and that our supervisors enter from outside.

The common part of `sandbox` and `apptainer`: the folders, the commands, the proxies, the limits, the end. Their
difference is an `Enclosure`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

from gangline.domain.contracts import ExecResult, OutputSink, RuntimeHandle, RuntimeStart, RuntimeUser, Usage
from gangline.domain.errors import InvalidRequest, RuntimeFailed
from gangline.domain.ids import validated_id
from gangline.runtimes.commands.execution import Executions, Order
from gangline.runtimes.commands.holder import Holder, Launch
from gangline.runtimes.confinement.cgroups import Cgroups, group_name, make_groups
from gangline.runtimes.confinement.limits import NOT_ENFORCED, enforcement, grader_enforcement, refuse_grader
from gangline.runtimes.confinement.system_calls import enforced, filter_for
from gangline.runtimes.network.openings import Openings
from gangline.runtimes.network.relay import ListenerHelper
from gangline.runtimes.shared.disk import MEASURED, DiskWatch, root_inside
from gangline.runtimes.shared.environment import argv_of
from gangline.runtimes.shared.files import SharedFolders
from gangline.runtimes.shared.leftovers import Mark, remove_folder, write_mark
from gangline.runtimes.shared.threads import run_to_end
from gangline.runtimes.shared.users import FIRST_UID, NUM_UIDS, HeldUser, grader_uid

__all__ = [
    "GRADER_HOME",
    "HOME",
    "Enclosure",
    "NamespacedHandle",
    "begun",
    "can_give_users",
    "checked_folders",
    "grader_folder",
    "inner_uid",
]

HOME = "/home/agent"
GRADER_HOME = "/home/grader"
_CAP_SYS_ADMIN = 21


class Enclosure(Protocol):
    """How one sandbox's namespaces are made. All but `environment` and `close` block, and are called from a thread."""

    agent_is_root: bool
    """Whether commands are root of the sandbox's user namespace: they can then take over its first process, which has
    no filter of system calls."""

    def make_folders(self) -> None:
        """Make its own folders in the sandbox's folder, once, beside the shared folders and the files of users."""
        ...

    def launch(self) -> Launch:
        """Another start. Raises: InvalidRequest, RuntimeFailed."""
        ...

    def entered(self, proc_fd: int) -> None:
        """Inspect the started sandbox. `proc_fd`: the open `/proc/<pid>` folder of its first process."""
        ...

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of a command."""
        ...

    def close(self) -> None:
        """Release its resources; nothing lives in it any more."""
        ...


def checked_folders(start: RuntimeStart, reserved: Sequence[str]) -> dict[str, Path]:
    """Folders that the sandbox writes and the host reads: path inside -> host folder.

    reserved: where none of them can be. Raises: InvalidRequest, also when `start` is wrong elsewhere.
    """
    validated_id(start.runtime_id, "runtime_id")
    validated_id(start.owner, "owner")
    spec, folder = start.spec, start.folder
    if spec.network in ("proxy", "list") and start.proxy_port is None:
        raise InvalidRequest(f"network `{spec.network}` needs the port of the node's proxy.")
    workdir = _checked_folder(spec.workdir, "runtime.workdir", reserved)
    more = [_checked_folder(path, "runtime.folders", reserved) for path in spec.folders]
    return {
        **{path: folder / "folders" / str(number) for number, path in enumerate(more)},
        "/tmp": folder / "tmp",
        HOME: folder / "home",
        workdir: folder / "work",
    }


def grader_folder(start: RuntimeStart, *, has_users: bool) -> dict[str, Path]:
    """The private folder of the user `grader`, where there can be one."""
    return {GRADER_HOME: start.folder / "grader"} if has_users else {}


def _checked_folder(named: str, field: str, reserved: Sequence[str]) -> str:
    path = PurePosixPath(named)
    inside = [str(parent) for parent in (path, *path.parents)]
    reserved = (*reserved, GRADER_HOME)
    if not path.is_absolute() or ".." in path.parts or str(path) == "/" or any(name in reserved for name in inside):
        raise InvalidRequest(f"{field} must be an absolute folder outside the system's, got {named!r}.")
    return str(path)


async def begun(
    start: RuntimeStart, runtime: str, enclosure: Enclosure, shared: Mapping[str, Path], user: HeldUser | None
) -> RuntimeHandle:
    """A started sandbox. `user`: the one that its commands become; None stays who we are. Raises: RuntimeFailed."""
    mark = Mark(owner=start.owner, runtime=runtime, runtime_id=start.runtime_id)
    groups = make_groups(group_name(start.owner, start.runtime_id), start.spec.limits)
    handle = NamespacedHandle(start, mark, enclosure, shared, user, groups)
    try:
        await handle.begin()
    except BaseException:
        await asyncio.shield(handle.stop())
        raise
    return handle


class NamespacedHandle:
    """One sandbox: folders that last, and namespaces that come and go."""

    def __init__(
        self,
        start: RuntimeStart,
        mark: Mark,
        enclosure: Enclosure,
        shared: Mapping[str, Path],
        user: HeldUser | None,
        groups: Cgroups,
    ) -> None:
        self.runtime_id = start.runtime_id
        self.workdir = str(PurePosixPath(start.spec.workdir))
        self.home = HOME
        self.grader_home = None if user is None else GRADER_HOME
        self.proxy_url = None if start.spec.network == "none" else _proxy_url(start.proxy_port)
        self._start = start
        self._mark = mark
        self._label = mark.label
        self._enclosure = enclosure
        self._user = user
        uid = self._uid = None if user is None else user.uid
        self._groups = groups
        self._limits = enforcement(start.spec.limits, {**groups.enforced, **MEASURED}, own_user=True)
        self._disk = DiskWatch(start.spec.limits, lambda: [start.folder], self.kill, root=self._root)
        self._shared = shared
        owners = {} if uid is None else {GRADER_HOME: grader_uid(uid)}
        self._files = SharedFolders(shared, self.workdir, uid=uid, owners=owners)
        program = filter_for(start.spec.system_calls_allow)
        self._filters = () if program is None else (program,)
        self._executions = Executions(self._label)
        self._holder: Holder | None = None
        self._openings = Openings()
        self._lock = asyncio.Lock()
        self._stopped = False

    async def begin(self) -> None:
        await run_to_end(self._make_folders)
        async with self._lock:
            await self._started()
        self._disk.begin()

    def _make_folders(self) -> None:
        write_mark(self._start.folder, self._mark)
        for path, folder in self._shared.items():
            folder.mkdir(parents=True, exist_ok=True)
            if self._uid is not None:
                owner = grader_uid(self._uid) if path == GRADER_HOME else self._uid
                os.chown(folder, owner, owner)
            if path == GRADER_HOME:
                folder.chmod(0o700)
        users = [("agent", inner_uid(self._uid), HOME)]
        if self._uid is not None:
            users.append(("grader", grader_uid(self._uid), GRADER_HOME))
        passwd = [f"{name}:x:{uid}:{uid}:{name}:{home}:/bin/sh" for name, uid, home in users]
        group = [f"{name}:x:{uid}:" for name, uid, _home in users]
        last = "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin"
        _write_lines(self._start.folder / "passwd", ["root:x:0:0:root:/root:/bin/sh", *passwd, last])
        _write_lines(self._start.folder / "group", ["root:x:0:", *group, "nogroup:x:65534:"])
        self._enclosure.make_folders()

    async def _started(self) -> Holder:
        """The living holder; a new one when the namespaces are gone. The lock is held."""
        if self._stopped:
            raise RuntimeFailed(f"sandbox {self.runtime_id} was stopped.")
        if self._holder is not None and self._holder.alive:
            return self._holder
        await self._end()
        relayed = self._start.spec.network in ("proxy", "list")
        helper = ListenerHelper(self._label) if relayed else None
        try:
            self._holder = await Holder.start(await run_to_end(self._enclosure.launch), self._label)
            await asyncio.to_thread(self._enclosure.entered, self._holder.proc_fd)
            if helper is not None:
                await self._openings.open(helper, self._holder.proc_fd, self._start)
        except BaseException:
            await asyncio.shield(self._end())
            raise
        finally:
            if helper is not None:
                helper.close()
        return self._holder

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
        argv = argv_of(command)
        uid, own = self._becoming(user)
        async with self._lock:
            holder = await self._started()
        order = Order(
            argv=argv,
            cwd=str(PurePosixPath(self.workdir) / (cwd or "")),
            env=self._enclosure.environment({**self._openings.env, **self._start.spec.env, **own, **(env or {})}),
            proc_fd=holder.proc_fd,
            uid=uid,
            own_namespace=self._uid is None and not self._enclosure.agent_is_root,
            filters=self._filters,
            cgroup_procs=self._groups.procs,
            rlimits=self._limits.rlimits,
        )
        return await self._executions.run(
            order,
            end_all=holder.kill_all,
            stdin=stdin,
            timeout_s=timeout_s,
            on_output=on_output,
            max_output_bytes=max_output_bytes,
        )

    def _becoming(self, user: RuntimeUser) -> tuple[int | None, dict[str, str]]:
        """Whom a command becomes, and the environment that goes with it. Raises: RuntimeUnavailable."""
        if user == "agent":
            return self._uid, {}
        if self._uid is None:
            raise refuse_grader(self._mark.runtime)
        return grader_uid(self._uid), {"HOME": GRADER_HOME}

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
            raise RuntimeFailed(f"sandbox {self.runtime_id} was stopped.")

    async def kill(self) -> None:
        async with self._lock:
            await self._end()

    def _root(self) -> Path | None:
        return None if self._holder is None else root_inside(self._holder.proc_fd)

    async def _end(self) -> None:
        """End the namespaces. The lock is held."""
        if self._holder is not None:
            self._holder.kill()
        await self._executions.close()
        await self._openings.close()
        if self._holder is not None:
            await self._holder.end()
            self._holder = None

    async def stop(self) -> None:
        await self._disk.close()
        async with self._lock:
            if self._stopped:
                return
            await self._end()
            self._enclosure.close()
            await self._groups.remove()
            await run_to_end(remove_folder, self._start.folder)
            if self._user is not None:
                self._user.release()
            self._stopped = True

    async def usage(self) -> Usage:
        self._check_not_stopped()
        return self._disk.usage

    def limits(self) -> dict[str, str]:
        network = NOT_ENFORCED if self._start.spec.network == "full" else "network namespace"
        allowed = self._start.spec.system_calls_allow
        is_filtered = self._filters and not self._enclosure.agent_is_root
        filtered = enforced(allowed) if is_filtered else NOT_ENFORCED
        own = grader_enforcement(self.grader_home)
        return {**self._limits.told, **own, "network": network, "system_calls": filtered}


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
