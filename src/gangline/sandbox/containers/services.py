"""The services of one sandbox: other containers, which start before its first command and end with it.

Each is in the network namespace of a waiting container that was linked to the others before, so a program finds its
network at its start, as with an engine's own networks. Names are lines of `/etc/hosts`.

Laws
- Nothing is published or mounted, and a service's container has only the options written here.
- Services see neither the node's proxy nor the hosts of network `list`. Under `full` they have the engine's network.
- They have no pipe that ends them, as the agent's container has: after a crash they lose their network when it ends,
  and are removed by their labels.

The network between a session's containers consists of links between their network namespaces, which we make.

Laws
- It uses no engine network: no address of this machine, name server or firewall rule. None of it is in this machine's
  own network, and it disappears with its namespaces.
- All sessions use the same addresses, which no other session's containers can reach.
- The bridge is in the namespace of the first service, which lasts as long as the session: links between services stay
  when the agent's container begins another life.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence
from pathlib import Path

from gangline.domain.errors import RuntimeFailed, RuntimeUnavailable
from gangline.domain.sandbox import RuntimeStart
from gangline.domain.services import ServiceHealthcheck, ServiceSpec
from gangline.machine.event_loop import to_end
from gangline.machine.programs import program
from gangline.sandbox.containers.engine import Engine, checked_image, container_name

_AGENT = "main"
"""Name of the agent's container for services, as in Harbor's compose files."""
_WAITING = ("sleep", "2147483647")
_TRY_S = 1.0
_UNPRIVILEGED = ("--security-opt", "no-new-privileges", "--no-healthcheck")
_WAITS = (*_UNPRIVILEGED, "--user", "65534:65534", "--cap-drop", "ALL", "--pids-limit", "16", "--log-driver", "none")
_SERVES = (
    *(*_UNPRIVILEGED, "--cap-drop", "NET_RAW", "--cap-drop", "MKNOD"),
    *("--log-driver", "json-file", "--log-opt", "max-size=1m"),
)

_ADDRESSES = "198.18.0.{}"
"""Part of the benchmark block (RFC 2544), which is not routed on the internet, so it hides no real host."""
_LINK = "services"
"""The network's name in each container."""
_AGENT_HARDWARE = "02:00:c6:12:00:01"
"""The agent's container keeps it in all its lives, so that frames are not sent to an earlier one."""
_PATIENCE_S = 30.0


def address(number: int) -> str:
    """IPv4 address of a container: 0 is the agent's, N is the Nth service's."""
    return _ADDRESSES.format(number + 1)


class Wiring:
    """One session's network."""

    def __init__(self, entering: Sequence[str]) -> None:
        """entering: start of a command line with the privileges for `nsenter`."""
        self._entering = tuple(entering)
        self._hub: int | None = None
        self._num_lives = 0

    async def join_services(self, pids: Sequence[int]) -> None:
        """Link the services' namespaces; `pids`: a process in each. Raises: RuntimeFailed, RuntimeUnavailable."""
        hub, *others = pids
        lines = [f"link add {_LINK} type bridge", *_given(1)]
        for number, pid in enumerate(others, 2):
            lines += _plug(f"s{number}", pid)
        await self._ip(hub, lines)
        for number, pid in enumerate(others, 2):
            await self._ip(pid, _given(number))
        self._hub = hub

    async def join_agent(self, pid: int) -> None:
        """Link the agent's container, once in each of its lives. Raises: like `join_services`."""
        assert self._hub is not None
        self._num_lives += 1  # the link of an ended life may outlast it briefly
        await self._ip(self._hub, _plug(f"main{self._num_lives}", pid, f"address {_AGENT_HARDWARE}"))
        await self._ip(pid, _given(0))

    async def _ip(self, pid: int, lines: Sequence[str]) -> None:
        """Run commands of `ip` in the network namespace of a process."""
        if not (shutil.which("ip") and shutil.which("nsenter")):
            raise RuntimeUnavailable("services need `ip` and `nsenter`. Run: apt-get install -y iproute2 util-linux")
        await asyncio.to_thread(_refuse_own, pid)
        argv = (*self._entering, "nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-")
        async with program(*argv, stdin=PIPE, stdout=DEVNULL, stderr=PIPE) as process:
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    _, complaint = await process.communicate("\n".join(lines).encode() + b"\n")
            except TimeoutError:
                raise RuntimeFailed(f"the network of services was not there after {_PATIENCE_S:.0f} s.") from None
        if process.returncode != 0:
            raise RuntimeFailed(f"the network of services was not made: {complaint.decode(errors='replace').strip()}")


def _plug(name: str, pid: int, hardware: str = "") -> list[str]:
    """Commands in the bridge's namespace that link it to a process's namespace."""
    return [
        f"link add {name} type veth peer name {_LINK} {hardware} netns {pid}",
        f"link set {name} master {_LINK} up",
    ]


def _given(number: int) -> list[str]:
    """Commands in a container's namespace that set its address."""
    return [f"addr add {address(number)}/24 dev {_LINK}", f"link set {_LINK} up"]


def _refuse_own(pid: int) -> None:
    """Raises: RuntimeFailed when the process is in this machine's network, or gone. Blocking."""
    try:
        ours, theirs = os.stat("/proc/self/ns/net"), Path(f"/proc/{pid}/ns/net").stat()
    except OSError as error:
        raise RuntimeFailed(f"the network of services was not made: a container has ended ({error}).") from error
    if (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino):
        raise RuntimeFailed(
            "services need containers with a network of their own, and one is in this machine's: see "
            "GANGLINE_CONTAINER_OPTIONS."
        )


class Services:
    """The side containers of an agent's container."""

    def __init__(
        self, engine: Engine, start: RuntimeStart, image: str, labels: Sequence[str], limits: Sequence[str]
    ) -> None:
        """
        image: must have `sleep`, as the agent's does.
        labels, limits: options for each container.
        """
        self._engine = engine
        self._start = start
        self._image = image
        self._labels = tuple(labels)
        self._limits = tuple(limits)
        self._wiring = Wiring(engine.entering)
        self._were_made = False
        self._pids: dict[str, int] = {}
        """Service -> first process of the container whose network it uses."""
        self._numbers = {name: number for number, name in enumerate(start.spec.services, 1)}

    @property
    def _specs(self) -> Mapping[str, ServiceSpec]:
        return self._start.spec.services

    @property
    def names_options(self) -> list[str]:
        """Options that give a container the others' names."""
        numbers = {_AGENT: 0, **self._numbers} if self._numbers else {}
        return [piece for name, number in numbers.items() for piece in ("--add-host", f"{name}:{address(number)}")]

    async def join(self, pid: int) -> None:
        """Start all services once, and link the agent's container, whose first process is `pid`.

        Raises: InvalidRequest when an image is missing, RuntimeFailed when a service does not start.
        """
        if not self._specs:
            return
        if not self._were_made:
            await self._make_networks()
        await to_end(self._wiring.join_agent(pid))
        if not self._were_made:
            await self._begin_all()
            self._were_made = True

    async def remove(self) -> None:
        """Remove all services with their files and volumes. Raises: RuntimeFailed."""
        for kind in ("service", "network"):
            for name in self._specs:
                await self._engine.remove(self._container(name, kind))

    async def _make_networks(self) -> None:
        network = [] if self._start.spec.network == "full" else ["--network", "none"]
        program, *words = _WAITING
        for name in self._specs:
            waiting = self._container(name, "network")
            options = [*_WAITS, *network, *self._names_of(name), *self._labels, "--entrypoint", program]
            await to_end(self._engine.run(waiting, options, self._image, words, self._start.folder))
            self._pids[name] = (await self._engine.inspect(waiting)).pid
        await to_end(self._wiring.join_services(tuple(self._pids.values())))

    def _names_of(self, name: str) -> list[str]:
        """Options that give a service's container its own name and the others'."""
        return ["--hostname", name, *self.names_options]

    async def _begin_all(self) -> None:
        turns = {name: _Turn() for name in self._specs}
        try:
            async with asyncio.TaskGroup() as tasks:
                for name in self._specs:
                    tasks.create_task(self._begin_in_turn(name, turns))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        for name, spec in self._specs.items():
            if not spec.completes:
                await self._refuse_ended(name)

    async def _begin_in_turn(self, name: str, turns: Mapping[str, _Turn]) -> None:
        """Start a service once its dependencies meet their conditions, and wait until it is ready."""
        spec = self._specs[name]
        for other, condition in spec.depends_on.items():
            await (turns[other].ready if condition == "ready" else turns[other].started).wait()
        options, argv = _run_of(spec)
        network = self._engine.network_of(self._container(name, "network"), self._pids[name], self._names_of(name))
        options = [*_SERVES, *network, *self._limits, *self._labels, *options]
        image = checked_image(spec.image, self._engine.name)
        await to_end(self._engine.run(self._container(name), options, image, argv, self._start.folder))
        turns[name].started.set()
        if spec.healthcheck is not None:
            await self._until_healthy(name, spec.healthcheck)
        if spec.completes:
            await self._until_completed(name)
        turns[name].ready.set()

    async def _until_healthy(self, name: str, check: ServiceHealthcheck) -> None:
        command = ("sh", "-c", check.command) if isinstance(check.command, str) else check.command
        try:
            async with asyncio.timeout(check.within_seconds):
                while not await self._engine.succeeds(self._container(name), command, check.timeout_seconds):
                    await self._refuse_ended(name)
                    await asyncio.sleep(_TRY_S)
        except TimeoutError:
            raise await self._failure(name, f"was not healthy within {check.within_seconds:g} s") from None

    async def _until_completed(self, name: str) -> None:
        code = await self._engine.exit_code(self._container(name))
        while code is None:
            await asyncio.sleep(_TRY_S)
            code = await self._engine.exit_code(self._container(name))
        if code != 0:
            raise await self._failure(name, f"ended with exit code {code}")

    async def _refuse_ended(self, name: str) -> None:
        code = await self._engine.exit_code(self._container(name))
        if code is not None:
            raise await self._failure(name, f"ended with exit code {code}")

    async def _failure(self, name: str, what: str) -> RuntimeFailed:
        words = await self._engine.last_words(self._container(name))
        return RuntimeFailed(f"service {name!r} {what}. The end of its output: {words or 'none'}")

    def _container(self, name: str, kind: str = "service") -> str:
        return container_name(self._start.runtime_id, f"{kind}-{self._numbers[name]}")


class _Turn:
    """Events of one service, awaited by services that depend on it."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.ready = asyncio.Event()


def _run_of(spec: ServiceSpec) -> tuple[list[str], Sequence[str]]:
    """Options and arguments of a service's container."""
    options = [piece for name, value in spec.env.items() for piece in ("--env", f"{name}={value}")]
    if spec.user is not None:
        options += ["--user", spec.user]
    if spec.workdir is not None:
        options += ["--workdir", spec.workdir]
    if spec.entrypoint is None:
        return options, spec.command or ()
    program, *words = spec.entrypoint
    return [*options, "--entrypoint", program], [*words, *(spec.command or ())]
