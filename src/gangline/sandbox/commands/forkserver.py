"""Forks helper processes from the forkserver: see `helpers.forkserver`.

Each process that uses runtimes has one, started when first needed. A killed forkserver is reaped at once and replaced
when the next helper is needed. Its forks survive, since each has its own socket to us.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import gangline
from gangline.domain.errors import RuntimeFailed
from gangline.sandbox.shared.leftovers import LABEL

_SOURCE = str(Path(gangline.__file__).parents[1])
_SEND_S = 10.0
_ANSWER_S = 30.0
_MAX_LABEL_BYTES = 512


def helper_argv(name: str, argument: int | str) -> list[str]:
    """Command line of `gangline.sandbox.commands.helpers.<name>`. `argument`: Python literal for its `main`."""
    program = f"import sys; sys.path.append({_SOURCE!r}); from gangline.sandbox.commands.helpers.{name} import main; "
    return [sys.executable, "-I", "-S", "-c", f"{program}main({argument})"]


def launcher_argv(argv: Sequence[str]) -> list[str]:
    """The same command, started with an empty session keyring."""
    return [*helper_argv("launcher", "sys.argv[1:]"), *argv]


class _Forkserver(NamedTuple):
    pid_fd: int
    owner_pid: int
    """The process that started it. Forks of that process do not share it."""
    control_fd: int


_lock = threading.Lock()
_current: _Forkserver | None = None


def fork_helper(name: str, label: str, fds: Sequence[int], *arguments: object) -> None:
    """Run `helpers.<name>.main(fds, *arguments)` in a fork of the forkserver. Returns at once.

    label: its sandbox's, for the reaper. fds: the first one is a socket for its answer or `lost WHY`. The caller closes
    its own copies. Raises: RuntimeFailed.
    """
    message = marshal.dumps((name, f"{LABEL}={label}", list(arguments)))
    with _lock:
        for is_last in (False, True):
            try:
                _send(_living(), message, fds)
            except OSError as error:
                _lose()
                if is_last:
                    raise RuntimeFailed(f"no helper process could be started for a sandbox: {error}.") from error
            else:
                return


def _send(forkserver: _Forkserver, message: bytes, fds: Sequence[int]) -> None:
    control = socket.socket(fileno=forkserver.control_fd)
    try:
        control.settimeout(_SEND_S)
        socket.send_fds(control, [message], list(fds))
    finally:
        control.detach()  # stays open for the life of this process


def _living() -> _Forkserver:
    """Call with the lock held. Raises: OSError."""
    global _current
    if _current is not None and _current.owner_pid != os.getpid():
        _forget(_current)
    if _current is None:
        _current = _started()
    return _current


def _lose() -> None:
    """Call with the lock held."""
    if _current is not None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(_current.pid_fd, signal.SIGKILL)  # it may just have been slow
        _forget(_current)


def _forget(forkserver: _Forkserver) -> None:
    """Call with the lock held."""
    global _current
    os.close(forkserver.control_fd)
    os.close(forkserver.pid_fd)
    _current = None


def _started() -> _Forkserver:
    """Raises: OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        argv = helper_argv("forkserver", theirs.fileno())
        null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0)
        # It has its own session, so that terminal signals do not reach it.
        pid = os.posix_spawn(
            sys.executable,
            argv,
            {LABEL: "-" * _MAX_LABEL_BYTES},
            file_actions=[
                null,
                *((os.POSIX_SPAWN_DUP2, 0, number) for number in (1, 2)),
                (os.POSIX_SPAWN_DUP2, theirs.fileno(), theirs.fileno()),
            ],
            setsid=True,
        )
    pid_fd = os.pidfd_open(pid)
    # Reaped as soon as it ends, so that a killed one does not stay a zombie.
    threading.Thread(target=os.waitpid, args=(pid, 0), name="forkserver", daemon=True).start()
    return _Forkserver(pid_fd, os.getpid(), ours.detach())


def run_helper(name: str, label: str, fds: Sequence[int], *arguments: object) -> None:
    """Run a helper that performs one action, and wait for it. Blocking. Raises: RuntimeFailed with its error."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            fork_helper(name, label, [theirs.fileno(), *fds], *arguments)
        ours.settimeout(_ANSWER_S)
        try:
            answer = ours.recv(4096)
        except TimeoutError:
            answer = b"lost no answer"
    if answer != b"ok":
        raise RuntimeFailed(answer.decode(errors="replace").removeprefix("lost ") or "a helper ended without a word")
