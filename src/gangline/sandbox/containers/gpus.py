"""Exclusive GPUs for sandboxes.

Laws
- A GPU is held by one process of this machine, for sandboxes that share a name (`RuntimeStart.sharing`), from the start
  of the first until the end of the last. Other nodes of the machine are other processes.
- The lock is an abstract socket name, which is released when the process ends, as its containers are (see `life`). So a
  crash leaves nothing to remove.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import socket
from collections.abc import Sequence

from gangline.domain.errors import RuntimeFailed
from gangline.domain.sandbox import RuntimeStart

_PATIENCE_S = 60.0
"""How long a sandbox waits for GPUs in use: the server counts them, and a node's last session may still be ending."""
_LOOK_S = 0.1


class _Held:
    def __init__(self) -> None:
        self.gpus: dict[str, socket.socket] = {}
        """By name, in the order in which they were taken."""
        self.users: set[str] = set()
        """Ids of the sandboxes."""

    def take(self, gpu: str) -> None:
        """Does nothing if it is taken already. Raises: OSError."""
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # A digest, since such names must be short.
            name.bind(f"\0gangline/gpu/{hashlib.sha256(gpu.encode()).hexdigest()}")
        except OSError as error:
            name.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            self.gpus[gpu] = name


_held: dict[str, _Held] = {}
"""By the shared name. Per process: docker and podman use the same table."""


async def hold(gpus: Sequence[str], number: int, *, sharing: str, runtime_id: str) -> tuple[str, ...]:
    """Take that many of the machine's GPUs for a sandbox, first the ones that its name already holds. Call `release`
    even if this fails or is cancelled.

    Raises: RuntimeFailed when they do not become free.
    """
    held = _held.setdefault(sharing, _Held())
    held.users.add(runtime_id)
    waited_s = 0.0
    while len(held.gpus) < number:
        for gpu in gpus:
            if gpu not in held.gpus and len(held.gpus) < number:
                held.take(gpu)
        if len(held.gpus) < number:
            if waited_s >= _PATIENCE_S:
                raise RuntimeFailed(
                    f"{number} GPUs were asked for, and {len(gpus) - len(held.gpus)} of this machine's {len(gpus)} are "
                    f"still taken by other sandboxes after {_PATIENCE_S:g} s."
                )
            await asyncio.sleep(_LOOK_S)
            waited_s += _LOOK_S
    return tuple(held.gpus)[:number]


def release(*, sharing: str, runtime_id: str) -> None:
    """Return them when the last sandbox of the name ends. Idempotent."""
    held = _held.get(sharing)
    if held is None:
        return
    held.users.discard(runtime_id)
    if not held.users:
        for name in _held.pop(sharing).gpus.values():
            name.close()


class Gpus:
    """The GPUs of one sandbox."""

    def __init__(self, start: RuntimeStart, machines: Sequence[str]) -> None:
        """machines: all GPUs of the machine, as the operator named them."""
        self._number = start.spec.gpus
        self._sharing = start.sharing or start.runtime_id
        self._runtime_id = start.runtime_id
        self._machines = machines
        self._taken: tuple[str, ...] = ()

    async def take(self) -> None:
        """Take as many as its specification requests. Raises: RuntimeFailed."""
        if self._number:
            self._taken = await hold(self._machines, self._number, sharing=self._sharing, runtime_id=self._runtime_id)

    @property
    def options(self) -> list[str]:
        """Options for `docker run` and `podman run`."""
        return [word for gpu in self._taken for word in ("--device", gpu)]

    def release(self) -> None:
        """Idempotent."""
        if self._number:
            release(sharing=self._sharing, runtime_id=self._runtime_id)
