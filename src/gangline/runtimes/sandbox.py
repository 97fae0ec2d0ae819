"""The `sandbox` runtime: namespaces made by bubblewrap, as root or as an ordinary user, without a daemon.

Laws:
- The agent is never root, inside or outside. Started by root, each sandbox has a numeric user of its own, which owns
  nothing on the host; started by a user, it is that user in a user namespace without privileges.
- It sees the host's programs read-only, its own HOME, workdir, /tmp and `RuntimeSpec.folders`, its own processes, and
  (network `proxy`) one TCP port: the node's proxy; under `list` one more, of a forward proxy of its own. The folders
  lie under `RuntimeStart.folder`.
- `kill` ends the namespaces and keeps the folders; the next `exec` makes new namespaces over them.
- Nothing outlives the process that started it: see `holder`. That is the node's keeper: see `keeper`.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import ClassVar

from gangline.domain.contracts import ExecResult, OutputSink, RuntimeHandle, RuntimeStart
from gangline.domain.errors import GanglineError, InvalidRequest, RuntimeFailed, RuntimeUnavailable
from gangline.domain.ids import new_id, validated_id
from gangline.domain.task import LimitsSpec, RuntimeSpec
from gangline.runtimes.bubblewrap import RESERVED, View, arguments, private_files
from gangline.runtimes.cgroups import Cgroups, make_groups, remove_owned
from gangline.runtimes.cgroups import group_name as cgroup_name
from gangline.runtimes.environment import argv_of, clean_environment, exposed_folders
from gangline.runtimes.execution import Executions, Order
from gangline.runtimes.files import SharedFolders
from gangline.runtimes.forwarding import Forwarder, proxy_variables
from gangline.runtimes.holder import Holder
from gangline.runtimes.leftovers import Mark, reap, remove_folder, write_mark
from gangline.runtimes.limits import NOT_ENFORCED, enforcement
from gangline.runtimes.obstacles import obstacle
from gangline.runtimes.relay import ListenerHelper, Relay
from gangline.runtimes.threads import run_to_end
from gangline.settings import Settings

__all__ = ["SandboxRuntime"]

HOME = "/home/agent"
_FIRST_UID = 0x70000000
_NUM_UIDS = 1 << 16
_CAP_SYS_ADMIN = 21


class SandboxRuntime:
    """Starts sandboxes with `bwrap`."""

    name: ClassVar[str] = "sandbox"
    is_keepable: ClassVar[bool] = True

    def __init__(self, settings: Settings | None = None) -> None:
        self._expose = exposed_folders((settings or Settings.from_environ()).expose)
        self._privileged = _can_give_users()

    async def check(self) -> None:
        """Start a sandbox and run `true` in it. Raises: RuntimeUnavailable, with the line to run."""
        with TemporaryDirectory(prefix="gangline-check-") as folder:
            start = RuntimeStart(
                runtime_id=new_id("check"),
                owner=new_id("check"),
                spec=RuntimeSpec(network="none", limits=LimitsSpec(max_pids=None)),
                folder=Path(folder) / "sandbox",
            )
            try:
                handle = await self.start(start)
                try:
                    result = await handle.exec(["true"])
                finally:
                    await handle.stop()
            except GanglineError as error:
                raise RuntimeUnavailable(obstacle(error.message)) from error
        if not result.ok:
            raise RuntimeUnavailable(obstacle(result.stderr.decode(errors="replace")))

    async def start(self, start: RuntimeStart) -> RuntimeHandle:
        """Raises: RuntimeFailed, InvalidRequest."""
        validated_id(start.runtime_id, "runtime_id")
        validated_id(start.owner, "owner")
        workdir = _checked_folder(start.spec.workdir, "runtime.workdir")
        folders = [_checked_folder(path, "runtime.folders") for path in start.spec.folders]
        if start.spec.network in ("proxy", "list") and start.proxy_port is None:
            raise InvalidRequest(f"network `{start.spec.network}` needs the port of the node's proxy.")
        mark = Mark(owner=start.owner, runtime=self.name, runtime_id=start.runtime_id)
        uid = _uid_for(start.runtime_id) if self._privileged else None
        groups = make_groups(cgroup_name(start.owner, start.runtime_id), start.spec.limits)
        handle = _SandboxHandle(start, mark, workdir, folders, self._expose, uid, groups)
        try:
            await handle.begin()
        except BaseException:
            await asyncio.shield(handle.stop())
            raise
        return handle

    async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
        removed = await asyncio.to_thread(reap, self.name, owner, root, keep)
        await remove_owned(owner, keep)
        return removed


class _SandboxHandle:
    """One sandbox: folders that last, and namespaces that come and go."""

    def __init__(
        self,
        start: RuntimeStart,
        mark: Mark,
        workdir: str,
        folders: Sequence[str],
        expose: Sequence[Path],
        uid: int | None,
        groups: Cgroups,
    ) -> None:
        self.runtime_id = start.runtime_id
        self.workdir = workdir
        self.home = HOME
        self.proxy_url = None if start.spec.network == "none" else _proxy_url(start.proxy_port)
        self._start = start
        self._mark = mark
        self._label = mark.label
        self._expose = expose
        self._uid = uid
        self._groups = groups
        self._limits = enforcement(start.spec.limits, groups.enforced, own_user=True)
        self._shared = {
            **{path: start.folder / "folders" / str(number) for number, path in enumerate(folders)},
            "/tmp": start.folder / "tmp",
            HOME: start.folder / "home",
            workdir: start.folder / "work",
        }
        self._files = SharedFolders(self._shared, workdir, uid=uid)
        self._executions = Executions(self._label)
        self._holder: Holder | None = None
        self._relay: Relay | None = None
        self._forwarder: Forwarder | None = None
        self._forward_env: dict[str, str] = {}
        self._lock = asyncio.Lock()
        self._stopped = False

    async def begin(self) -> None:
        await run_to_end(self._make_folders)
        async with self._lock:
            await self._started()

    def _make_folders(self) -> None:
        write_mark(self._start.folder, self._mark)
        for folder in self._shared.values():
            folder.mkdir(parents=True, exist_ok=True)
            if self._uid is not None:
                os.chown(folder, self._uid, self._uid)
        uid = self._inner_uid()
        (self._start.folder / "passwd").write_text(
            f"root:x:0:0:root:/root:/bin/sh\nagent:x:{uid}:{uid}:agent:{HOME}:/bin/sh\n"
            "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
        )
        (self._start.folder / "group").write_text(f"root:x:0:\nagent:x:{uid}:\nnogroup:x:65534:\n")

    def _inner_uid(self) -> int:
        """The agent's user as it sees itself. Root that cannot give users shows it as an ordinary one."""
        return self._uid if self._uid is not None else os.getuid() or 1000

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
            self._holder = await Holder.start(await asyncio.to_thread(self._arguments), self._label)
            if helper is not None:
                await self._open_relay(helper, self._holder)
        except BaseException:
            await asyncio.shield(self._end())
            raise
        finally:
            if helper is not None:
                helper.close()
        return self._holder

    async def _open_relay(self, helper: ListenerHelper, holder: Holder) -> None:
        port = self._start.proxy_port
        assert port is not None
        listening = await helper.listen(holder.proc_fd, port)
        self._relay = Relay(port)
        await self._relay.serve(listening)
        if rules := self._start.spec.network_rules:
            listening = await helper.listen(holder.proc_fd, 0)
            self._forward_env = proxy_variables(int(listening.getsockname()[1]))
            self._forwarder = Forwarder(rules, self.runtime_id)
            await self._forwarder.serve(listening)

    def _arguments(self) -> list[str]:
        spec = self._start.spec
        as_root = os.geteuid() == 0 and self._uid is None
        view = View(
            image=Path(spec.image) if spec.image is not None else None,
            shared=self._shared,
            expose=self._expose,
            masked=private_files() if as_root and spec.image is None else (),
            passwd=self._start.folder / "passwd",
            group=self._start.folder / "group",
            host_network=spec.network == "full",
            user_namespace=self._uid is None,
        )
        uid = str(self._inner_uid())
        return [*arguments(view), *(["--uid", uid, "--gid", uid] if as_root else [])]

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
    ) -> ExecResult:
        argv = argv_of(command)
        async with self._lock:
            holder = await self._started()
        order = Order(
            argv=argv,
            cwd=str(PurePosixPath(self.workdir) / (cwd or "")),
            env=clean_environment(self._expose, HOME, {**self._forward_env, **self._start.spec.env, **(env or {})}),
            proc_fd=holder.proc_fd,
            uid=self._uid,
            cgroup_procs=self._groups.procs,
            rlimits=self._limits.rlimits,
        )
        return await self._executions.run(
            order,
            end_all=holder.kill,
            stdin=stdin,
            timeout_s=timeout_s,
            on_output=on_output,
            max_output_bytes=max_output_bytes,
        )

    async def upload(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self._check_not_stopped()
        await run_to_end(self._files.write, path, data, mode)

    async def download(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        self._check_not_stopped()
        return await asyncio.to_thread(self._files.read, path, max_bytes)

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise RuntimeFailed(f"sandbox {self.runtime_id} was stopped.")

    async def kill(self) -> None:
        async with self._lock:
            await self._end()

    async def _end(self) -> None:
        """End the namespaces. The lock is held."""
        if self._holder is not None:
            self._holder.kill()
        await self._executions.close()
        if self._relay is not None:
            await self._relay.close()
            self._relay = None
        if self._forwarder is not None:
            await self._forwarder.close()
            self._forwarder = None
        if self._holder is not None:
            await self._holder.end()
            self._holder = None

    async def stop(self) -> None:
        async with self._lock:
            if self._stopped:
                return
            await self._end()
            await self._groups.remove()
            await run_to_end(remove_folder, self._start.folder)
            self._stopped = True

    def limits(self) -> dict[str, str]:
        network = NOT_ENFORCED if self._start.spec.network == "full" else "network namespace"
        return {**self._limits.told, "network": network}


def _proxy_url(port: int | None) -> str | None:
    return None if port is None else f"http://127.0.0.1:{port}"


def _checked_folder(named: str, field: str) -> str:
    path = PurePosixPath(named)
    inside = [str(parent) for parent in (path, *path.parents)]
    if not path.is_absolute() or ".." in path.parts or str(path) == "/" or any(name in RESERVED for name in inside):
        raise InvalidRequest(f"{field} must be an absolute folder outside the system's, got {named!r}.")
    return str(path)


def _uid_for(runtime_id: str) -> int:
    return _FIRST_UID + zlib.crc32(runtime_id.encode()) % _NUM_UIDS


def _can_give_users() -> bool:
    """Whether we are root enough to mount without a user namespace and to become users that own nothing."""
    if os.geteuid() != 0:
        return False
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    first, _outside, count = map(int, Path("/proc/self/uid_map").read_text().split()[:3])
    has_uids = first <= _FIRST_UID and first + count >= _FIRST_UID + _NUM_UIDS
    return bool(int(status["CapEff"], 16) >> _CAP_SYS_ADMIN & 1) and has_uids
