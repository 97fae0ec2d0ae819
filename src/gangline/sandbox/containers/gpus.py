"""GPUs that sandboxes have to themselves.

Laws
- A GPU is held by one process of this machine, for sandboxes of one name (`RuntimeStart.sharing`), from the first one's
  start until the last one's end. Other nodes of the machine are other processes.
- The holder is a socket's abstract name, which dies with the process; so do its containers (see `life`). Nothing is to
  be removed after a crash.
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
"""How long a sandbox waits for GPUs that another one still has: the server counts them, and a node's last session may
yet be ending."""
_LOOK_S = 0.1


class _Held:
    def __init__(self) -> None:
        self.gpus: dict[str, socket.socket] = {}
        """By name, in the order in which they were taken."""
        self.users: set[str] = set()
        """Ids of the sandboxes."""

    def take(self, gpu: str) -> None:
        """Nothing happens where it is taken. Raises: OSError."""
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # A digest, for such names are short.
            name.bind(f"\0gangline/gpu/{hashlib.sha256(gpu.encode()).hexdigest()}")
        except OSError as error:
            name.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            self.gpus[gpu] = name


_held: dict[str, _Held] = {}
"""By the name that sandboxes share them under. Of the process: docker and podman share them too."""


async def hold(gpus: Sequence[str], number: int, *, sharing: str, runtime_id: str) -> tuple[str, ...]:
    """Take that many of the machine's GPUs for a sandbox, those first that its name has already. `release` them, also
    where this fails or is cancelled.

    Raises: RuntimeFailed where they do not become free.
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
    """Give them back with the name's last sandbox. Idempotent."""
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
        """machines: all of the machine, as the operator named them."""
        self._number = start.spec.gpus
        self._sharing = start.sharing or start.runtime_id
        self._runtime_id = start.runtime_id
        self._machines = machines
        self._taken: tuple[str, ...] = ()

    async def take(self) -> None:
        """As many as its specification asks for. Raises: RuntimeFailed."""
        if self._number:
            self._taken = await hold(self._machines, self._number, sharing=self._sharing, runtime_id=self._runtime_id)

    @property
    def options(self) -> list[str]:
        """What `docker run` and `podman run` are given."""
        return [word for gpu in self._taken for word in ("--device", gpu)]

    def release(self) -> None:
        """Idempotent."""
        if self._number:
            release(sharing=self._sharing, runtime_id=self._runtime_id)
