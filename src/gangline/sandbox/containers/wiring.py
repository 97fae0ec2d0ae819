"""The network between a session's containers: links between their network namespaces, of our own making.

Laws
- No engine's network takes part: no address of this machine, no name server, no rule of a firewall. Nothing of it is in
  this machine's own network, and it ends with the namespaces that it is in.
- All sessions have the same addresses, which no other session's containers can reach.
- The bridge is in the namespace of the first service, which lasts as long as the session: links between services last
  when the agent's container begins another life.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from pathlib import Path

from gangline.domain.errors import RuntimeFailed, RuntimeUnavailable
from gangline.machine.programs import program

__all__ = ["Wiring", "address"]

_ADDRESSES = "198.18.0.{}"
"""Part of the block for benchmarks (RFC 2544), which the internet does not route: it hides no host from anyone."""
_LINK = "services"
"""The network's name in each container."""
_AGENT_HARDWARE = "02:00:c6:12:00:01"
"""The agent's container keeps it in all its lives, so that nobody sends to an earlier one."""
_PATIENCE_S = 30.0


def address(number: int) -> str:
    """IPv4 address of a container: 0 is the agent's, N is the Nth service's."""
    return _ADDRESSES.format(number + 1)


class Wiring:
    """One session's network."""

    def __init__(self, entering: Sequence[str]) -> None:
        """entering: command line before `nsenter` that has the privileges for it."""
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
        """Link the agent's container, once in each of its lives. Raises: as `join_services`."""
        assert self._hub is not None
        self._num_lives += 1  # the link of an ended life may last a little longer than it
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
    """Commands in the bridge's namespace: a link from it to a process's namespace."""
    return [
        f"link add {name} type veth peer name {_LINK} {hardware} netns {pid}",
        f"link set {name} master {_LINK} up",
    ]


def _given(number: int) -> list[str]:
    """Commands in a container's namespace."""
    return [f"addr add {address(number)}/24 dev {_LINK}", f"link set {_LINK} up"]


def _refuse_own(pid: int) -> None:
    """Raises: RuntimeFailed where the process is in this machine's network, or gone. Blocking."""
    try:
        ours, theirs = os.stat("/proc/self/ns/net"), Path(f"/proc/{pid}/ns/net").stat()
    except OSError as error:
        raise RuntimeFailed(f"the network of services was not made: a container has ended ({error}).") from error
    if (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino):
        raise RuntimeFailed(
            "services need containers with a network of their own, and one is in this machine's: see "
            "GANGLINE_CONTAINER_OPTIONS."
        )
