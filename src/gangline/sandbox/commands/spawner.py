"""The spawner of a sandbox, from outside: see `helpers.spawner`."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from gangline.domain.errors import RuntimeFailed
from gangline.sandbox.commands.forkserver import fork_helper
from gangline.sandbox.commands.supervisor import Supervisor

_READY_S = 30.0
_END_S = 10.0


class Spawner:
    """One spawner, which enters the sandbox as soon as it is made; `ready` waits until it is inside."""

    def __init__(self, label: str, proc_fd: int | None = None, supervisor_uid: int | None = None) -> None:
        """
        label: its sandbox's, for the reaper.
        proc_fd: an open `/proc/<pid>` folder of the sandbox to enter; None stays on the host.
        supervisor_uid: user of that sandbox to become, so that commands cannot kill it; None keeps the current one.
        Raises: RuntimeFailed.
        """
        self._resting: Supervisor | None = None
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)
        try:
            with theirs:
                fds = [theirs.fileno(), *([] if proc_fd is None else [proc_fd])]
                fork_helper("spawner", label, fds, supervisor_uid)
        except BaseException:
            self._orders.close()
            raise

    async def ready(self) -> None:
        """Raises: RuntimeFailed."""
        try:
            async with asyncio.timeout(_READY_S):
                answer = await asyncio.get_running_loop().sock_recv(self._orders, 4096)
        except TimeoutError:
            raise RuntimeFailed(f"the sandbox's spawner was not ready after {_READY_S:.0f} s.") from None
        except OSError:
            answer = b""
        if answer != b"ready":
            why = answer.decode(errors="replace").removeprefix("lost ")
            raise RuntimeFailed(f"the sandbox is gone: {why or 'its spawner was killed'}.")

    @property
    def alive(self) -> bool:
        """Whether it may take orders. True also while it is stopped by a signal."""
        if self._orders.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._orders, select.POLLIN)
        return not poll.poll(0)

    def supervisor(self, groups: Sequence[str]) -> Supervisor:
        """A supervisor without a command: the idle one, or a new one.

        groups: paths of the `cgroup.procs` files that its commands join. Raises: OSError.
        """
        resting, self._resting = self._resting, None
        if resting is not None:
            if resting.groups == tuple(groups) and resting.is_ready:
                return resting
            resting.close()
        return self._another(groups)

    def _another(self, groups: Sequence[str]) -> Supervisor:
        with ExitStack() as on_failure, ExitStack() as given:
            ours, theirs = socket.socketpair()
            on_failure.enter_context(ours)
            given.enter_context(theirs)
            fds = [theirs.fileno()]
            for path in groups:
                fds.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
                given.callback(os.close, fds[-1])
            socket.send_fds(self._orders, [b"s"], fds)
            on_failure.pop_all()
        return Supervisor(ours, groups)

    def rest(self, supervisor: Supervisor) -> None:
        """Keep it for the next command. At most one is kept."""
        if self._resting is not None or self._orders.fileno() < 0:
            supervisor.close()
        else:
            supervisor.rest()
            self._resting = supervisor

    async def end(self) -> None:
        """Close it and wait until it has ended. Idempotent."""
        self._dismiss_resting()
        if self._orders.fileno() < 0:
            return
        try:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(_END_S):  # a stopped one is left to the reaper
                    self._orders.shutdown(socket.SHUT_WR)
                    while await asyncio.get_running_loop().sock_recv(self._orders, 4096):
                        pass
        finally:
            self._orders.close()
            self._dismiss_resting()  # a command may have ended meanwhile

    def _dismiss_resting(self) -> None:
        if self._resting is not None:
            self._resting.close()
            self._resting = None
