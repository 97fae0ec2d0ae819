"""The runtime `harbor`: Docker, Kubernetes, Daytona, Modal, E2B and every other environment that Harbor supports.

Harbor creates and removes an environment, runs commands in it to completion, and uploads files. Everything else is done
by the daemon, our program that runs inside as root; it needs Python 3.8, `sh` and coreutils there.

Invariants:
- The agent is never root inside.
- The node's proxy is reached over the link to the daemon, as a listener on the sandbox's own loopback. So the node
  needs no address that the sandbox can reach, and a sandbox needs no network.
- A network policy that Harbor's class cannot enforce is refused, with Harbor's message.
- The node's operator chooses the environment class and its options; a task names an image.

A sandbox's tunnels lead to the node's proxy and to its listed hosts. Each is a listener on the sandbox's own loopback,
whose connections go over the link.
"""

from __future__ import annotations

import asyncio
import os
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, ClassVar

from gangline.domain.errors import InvalidRequest, RuntimeFailed
from gangline.domain.sandbox import ExecRequest, Runtime, RuntimeStart, Sandbox
from gangline.domain.task import LimitsSpec, RuntimeSpec
from gangline.interop.harbor.runtime.bridge import INSTALL, Bridge, Bridges
from gangline.interop.harbor.runtime.link import Link
from gangline.interop.harbor.runtime.streams import RemoteSpawner, SocketStream, Wire
from gangline.machine.event_loop import to_end
from gangline.sandbox.commands.execution import EndAll, Order
from gangline.sandbox.confinement.limits import (
    NOT_ENFORCED,
    Enforcement,
    enforcement,
)
from gangline.sandbox.confinement.system_calls import enforced, filter_for
from gangline.sandbox.containers.runtime import check_spec, checked_folder
from gangline.sandbox.namespaced import HOME
from gangline.sandbox.network.forwarding import Forwarder, proxy_variables
from gangline.sandbox.network.relay import MAX_CONNECTIONS
from gangline.sandbox.shared.accounts import Traffic
from gangline.sandbox.shared.environment import image_environment
from gangline.sandbox.shared.files import SharedFolders
from gangline.sandbox.shared.leftovers import marked, reap
from gangline.sandbox.shared.mounts import refuse_mounts
from gangline.sandbox.shared.threads import run_to_end
from gangline.sandbox.shared.users import FIRST_UID, NUM_UIDS, HeldUser
from gangline.sandbox.supervised import SupervisedSandbox
from gangline.settings.machine import Settings

_NOT_THE_IMAGE_S = ("HOME", "HOSTNAME", "LS_COLORS", "OLDPWD", "PWD", "SHLVL", "TERM", "USER", "LOGNAME", "_")


class Tunnels:
    """The tunnels of one sandbox, over all runs of its daemon."""

    def __init__(self, start: RuntimeStart) -> None:
        self.env: Mapping[str, str] = {}
        """Variables that point programs to the listed hosts."""
        self.traffic = {"proxy": Traffic(), "list": Traffic()}
        self._start = start
        self._open: set[SocketStream] = set()
        self._forwarder: Forwarder | None = None

    @property
    def ports(self) -> list[int]:
        """Ports of the listeners in the sandbox: the proxy's, and 0 (any) if there is a list of hosts."""
        start = self._start
        if start.spec.network == "none" or start.proxy_port is None:
            return []
        return [start.proxy_port, 0] if start.spec.network_rules else [start.proxy_port]

    def connected(self, wire: Wire, index: int, number: int) -> None:
        """A program in the sandbox has connected to listener `index`."""
        self._open = {stream for stream in self._open if stream.is_open}
        if len(self._open) >= MAX_CONNECTIONS:
            wire.say(number, b"R")
        elif index == 0:
            self._open.add(SocketStream(wire, number, self._dial, self.traffic["proxy"]))
        else:
            self._open.add(SocketStream(wire, number, self._forwarded))

    async def _dial(self) -> socket.socket:
        """Raises: OSError."""
        outwards = socket.socket()
        outwards.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(outwards, ("127.0.0.1", self._start.proxy_port))
        except BaseException:
            outwards.close()
            raise
        return outwards

    async def _forwarded(self) -> socket.socket:
        if self._forwarder is None:
            rules, traffic = self._start.spec.network_rules, self.traffic["list"]
            self._forwarder = Forwarder(rules, self._start.runtime_id, traffic=traffic)
        ours, theirs = socket.socketpair()
        await self._forwarder.take(theirs)
        return ours

    async def close(self) -> None:
        """Idempotent."""
        for stream in self._open:
            await stream.close()
        self._open.clear()
        if self._forwarder is not None:
            await self._forwarder.close()
            self._forwarder = None


class HarborRuntime(Runtime):
    """Runs Harbor environments of the class that the operator chose."""

    name: ClassVar[str] = "harbor"

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings.from_environ()
        self._bridges = Bridges(self._settings.harbor_python)

    def missing(self) -> str | None:
        python = self._settings.harbor_python
        if python is not None and python.exists():
            return None
        return f"{python} does not exist. {INSTALL}" if python else INSTALL

    async def check(self) -> None:
        """Start a bridge. Raises: RuntimeUnavailable, with the command to run."""
        async with self._bridges.bridge():
            pass

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        """Raises: InvalidRequest."""
        check_spec(spec, cls.name)
        refuse_mounts(spec, cls.name)

    async def start(self, start: RuntimeStart) -> Sandbox:
        """Raises: RuntimeFailed, RuntimeUnavailable, InvalidRequest."""
        self.check_start(start)
        spec = start.spec
        if spec.network != "none" and start.proxy_port is None:
            raise InvalidRequest(f"network `{spec.network}` needs the port of the node's proxy.")
        if spec.network == "full" and self._settings.harbor_network == "closed":
            raise InvalidRequest(
                "network `full` is refused: the operator of this node has closed the network of Harbor's environments "
                "(`harbor_network`)."
            )
        self.check_spec(spec)
        return await HarborSandbox(start, self._bridges, self._settings).begun()

    async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
        """Asks Harbor only if a folder shows that it was used."""
        lost = [
            (folder, mark)
            for folder, mark in await asyncio.to_thread(lambda: list(marked(root)))
            if (mark.owner, mark.runtime) == (owner, self.name) and mark.runtime_id not in keep
        ]
        if lost:
            async with self._bridges.bridge() as bridge:
                for folder, mark in lost:
                    await bridge.ask("stop", **_asked(self._settings, mark.runtime_id, folder))
        await asyncio.to_thread(reap, self.name, owner, root, keep)
        return len(lost)


class HarborSandbox(SupervisedSandbox):
    """An environment that lasts, and stewards that come and go. The daemon moves files, not this machine."""

    def __init__(self, start: RuntimeStart, bridges: Bridges, settings: Settings) -> None:
        spec = start.spec
        workdir = checked_folder(spec.workdir, "runtime.workdir")
        folders = [checked_folder(path, "runtime.folders") for path in spec.folders]
        self._own = list(dict.fromkeys([HOME, workdir, *folders]))
        user = HeldUser(start.runtime_id) if os.geteuid() == 0 else None
        super().__init__(start, HarborRuntime.name, workdir=workdir, home=HOME, user=user)
        self._environment = _Environment(start, bridges, settings)
        self._settings = settings
        self._tunnels = Tunnels(start)
        self._link: Link | None = None
        self._is_made = False
        self._told: Mapping[str, Any] = {}
        """The daemon's report on the sandbox: its variables, and its machine if that filters system calls."""

    async def upload(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await (await self._linked()).file("write", path, data, mode)

    async def download(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        return await (await self._linked()).file("read", path, max_bytes)

    async def clear(self, path: str) -> None:
        await (await self._linked()).file("clear", path)

    async def _linked(self) -> Link:
        async with self._lock:
            await self._ensure_alive()
            assert self._link is not None
            return self._link

    @property
    def _uid(self) -> int:
        """The agent's uid. Without permission to allocate one here, other sandboxes on a shared kernel may have the
        same.
        """
        return FIRST_UID + zlib.crc32(self.runtime_id.encode()) % NUM_UIDS if self._user is None else self._user.uid

    # -- life ----------------------------------------------------------------------------------------------------

    async def _make(self) -> None:
        await super()._make()
        promised = await self._environment.make()
        self._limits = _enforced(self._start.spec.limits, promised, self._settings.harbor_environment)

    async def _begin(self) -> None:
        link = self._link = Link(self._environment, self._tunnels.connected)
        given = {"uid": self._uid, "home": HOME, "workdir": self.workdir, "own": self._own}
        self._told = await link.begin({**given, "ports": self._tunnels.ports}, is_first=not self._is_made)
        self._is_made = True
        if len(self._tunnels.ports) > 1:
            self._tunnels.env = proxy_variables(self._told["ports"][1])
        self._spawner = RemoteSpawner(link)

    def _order(self, request: ExecRequest) -> Order:
        image = {name: value for name, value in self._told["env"].items() if name not in _NOT_THE_IMAGE_S}
        extra = {**self._tunnels.env, **self._start.spec.env, **request.env}
        program = self._filter()
        return self._ordered(
            request,
            env=image_environment((), HOME, image, extra),
            uid=self._uid,
            filters=() if program is None else (program,),
        )

    def _filter(self) -> bytes | None:
        machine = self._told.get("machine")
        return filter_for(self._start.spec.system_calls_allow, machine) if machine else None

    def _killer(self) -> EndAll:
        return self._kill_all

    async def _kill_all(self) -> None:
        if self._link is not None:
            with suppress(RuntimeFailed):
                await self._link.kill()

    async def _end(self, *, is_last: bool) -> None:
        """Each command's own supervisor was told; this kills what was left behind earlier."""
        link = self._link
        if link is not None and link.is_alive and not is_last:
            await self._kill_all()
        if link is not None and (is_last or not link.is_alive):
            self._link = None
            await self._tunnels.close()
            await link.close()

    async def _remove(self) -> None:
        await self._environment.remove()
        await super()._remove()

    # -- what is known of it -------------------------------------------------------------------------------------

    def _files(self) -> AbstractContextManager[SharedFolders]:
        raise NotImplementedError("its files are not this machine's")

    def _written(self) -> Sequence[Path]:
        return ()

    def _traffic(self) -> Mapping[str, Traffic]:
        return self._tunnels.traffic

    def _network(self) -> str:
        closed = {
            "policy": f"policy no-network of Harbor's {self._settings.harbor_environment}",
            "closed": "closed by the node's operator",
        }[self._settings.harbor_network]
        return NOT_ENFORCED if self._start.spec.network == "full" else closed

    def _system_calls(self) -> str:
        filtered = enforced(self._start.spec.system_calls_allow) if self._filter() else NOT_ENFORCED
        return f"{filtered}; what the environment's engine refuses itself is not known"


class _Environment:
    """See `link.Environment`: one of Harbor's, over its bridge."""

    def __init__(self, start: RuntimeStart, bridges: Bridges, settings: Settings) -> None:
        self._start, self._bridges, self._settings = start, bridges, settings
        self._bridge: Bridge | None = None

    async def make(self) -> Mapping[str, bool]:
        """Returns which limits Harbor enforces."""
        self._bridge = await to_end(self._bridges.take(), self._bridges.give_back)
        start = self._start
        return await self._bridge.ask("start", **_asked(self._settings, start.runtime_id, start.folder, start.spec))

    async def remove(self) -> None:
        """Idempotent."""
        if self._bridge is not None:
            await to_end(self._removed(self._bridge))

    async def _removed(self, bridge: Bridge) -> None:
        """A new bridge finds an environment of a dead one if Harbor's class finds it by name."""
        asked = _asked(self._settings, self._start.runtime_id, self._start.folder)
        with suppress(InvalidRequest):  # it was never made
            if bridge.is_alive:
                await bridge.ask("stop", **asked)
            else:
                async with self._bridges.bridge() as another:
                    await another.ask("stop", **asked)
        self._bridge = None
        await self._bridges.give_back(bridge)

    async def exec(self, command: str, timeout_s: int, on_part: Callable[[str], None] | None = None) -> str:
        assert self._bridge is not None
        name = _name(self._start.runtime_id)
        answer = await self._bridge.ask("exec", name=name, on_part=on_part, command=command, timeout_s=timeout_s)
        if answer["code"] != 0:
            output = f"{answer['output']}{answer['complaint']}".strip()
            raise RuntimeFailed(
                f"a command in an environment of Harbor's ended with {answer['code']}: {output[-2000:]}"
            )
        return answer["output"]

    async def upload(self, data: bytes, path: str) -> None:
        assert self._bridge is not None
        file = self._start.folder / "message"
        await run_to_end(file.write_bytes, data)
        name = _name(self._start.runtime_id)
        await self._bridge.ask("upload", name=name, source=str(file.resolve()), target=path)


def _name(runtime_id: str) -> str:
    return f"gangline-{runtime_id}"


def _asked(settings: Settings, runtime_id: str, folder: Path, spec: RuntimeSpec | None = None) -> dict[str, Any]:
    """Arguments with which the bridge creates or finds an environment. spec: None to find one."""
    is_open = spec is None or spec.network == "full" or settings.harbor_network == "closed"
    memory_bytes = None if spec is None else spec.limits.memory_bytes
    return {
        "name": _name(runtime_id),
        "environment": settings.harbor_environment,
        "options": settings.harbor_options,
        "folder": str(folder.resolve()),
        "image": "unknown" if spec is None else spec.image,
        "cpus": None if spec is None else spec.limits.cpus,
        "memory_mb": None if memory_bytes is None else max(memory_bytes >> 20, 1),
        "network": "public" if is_open else "no-network",
    }


def _enforced(limits: LimitsSpec, promised: Mapping[str, bool], environment: str) -> Enforcement:
    """Harbor does not report out-of-memory kills, so each process's own limit must be reached before the common one."""
    by = f"limit of Harbor's {environment}"
    held = {"cpus": by} if promised["limits_cpus"] else {}
    found = enforcement(limits, held, own_user=True)
    if promised["limits_memory"] and limits.memory_bytes is not None:
        found.enforced["memory_bytes"] += f"; together, {by}"
    return found
