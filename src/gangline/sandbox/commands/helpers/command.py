"""Become a command: the code of a supervisor's child, forked before the command is known.

Invariants:
- Work that is the same for all commands of a sandbox is done before the order comes: joining a control group alone can
  take ten milliseconds. The process is then in the agent's groups but does not yet run as the agent's user, and cannot
  be traced.
- The order comes from our own node on the control socket, marshalled, with the command's descriptors. This process
  receives it, notifies its supervisor, and answers `started`.
- None of our descriptors is open when the command begins, nor once other processes of its user may trace this one.
"""

from __future__ import annotations

import _socket
import errno
import marshal
import os
import resource

from gangline.sandbox.commands.helpers.descriptors import received
from gangline.sandbox.commands.helpers.namespaces import (
    become_user,
    enter_user,
    filter_system_calls,
    forbid_new_privileges,
    leave_session_keyring,
    make_user_namespace,
)

TYPE_CHECKING = False  # see `forkserver`
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Sequence
    from typing import Any, NoReturn
else:
    import _signal

_LENGTH_BYTES = 4


def become_command(
    control: _socket.socket, report_to: tuple[int, bytes], cgroup_fds: Sequence[int], user_fd: int | None
) -> NoReturn:
    """Wait for the order and execute its command. As in a shell, 127 is 'not found' and 126 'cannot be run'.

    report_to: a descriptor, and the bytes to write to it once the order is received.
    cgroup_fds, user_fd: see `supervisor.supervise`.
    """
    failure = _prepared(cgroup_fds, user_fd)
    order, files = _received_order(control)
    try:
        os.write(*report_to)
        control.send(b"started\n")
    except OSError:
        os._exit(126)  # the supervisor is gone
    for number, fd in enumerate(files[:3]):
        os.dup2(fd, number)
    argv: list[str] = order["argv"]
    doing = argv[0]
    try:
        if failure is not None:
            raise failure
        leave_session_keyring()
        for number, fd in enumerate(files[3:], start=3):
            os.dup2(fd, number)
            os.set_inheritable(number, True)  # even if it already had this number
        os.closerange(len(files), 1 << 16)
        _confine(order)
        doing = order["cwd"]
        os.chdir(order["cwd"])
        doing = argv[0]
        _become(argv, order["env"])
    except OSError as error:
        os.write(2, f"gangline: {doing}: {error.strerror}\n".encode())
        os._exit(127 if error.errno == errno.ENOENT else 126)
    except BaseException as error:
        os.write(2, f"gangline: {doing}: {error}\n".encode())
    os._exit(126)


def _prepared(cgroup_fds: Sequence[int], user_fd: int | None) -> OSError | None:
    """The error that keeps commands from starting here, or None."""
    _restore_signals()
    os.setsid()
    os.umask(0o022)
    try:
        for fd in cgroup_fds:
            os.write(fd, b"0")
        if user_fd is not None:
            enter_user(user_fd)
            forbid_new_privileges()
    except OSError as error:
        return error
    return None


def _restore_signals() -> None:
    """Restore default handlers: Python ignores some signals, and the node's parent may have ignored others."""
    for number in _signal.valid_signals() - {_signal.SIGKILL, _signal.SIGSTOP}:
        _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())


def _received_order(control: _socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The order, and the command's descriptors from number 0 on: three streams, and its end of a channel, if any."""
    message, files = received(control)
    order = bytearray(message)
    size = _LENGTH_BYTES + int.from_bytes(order[:_LENGTH_BYTES], "big")
    while len(order) < size and (piece := control.recv(size - len(order))):
        order += piece
    if len(order) < max(size, _LENGTH_BYTES + 1):
        os._exit(0)  # the node went away before it sent an order
    return marshal.loads(memoryview(order)[_LENGTH_BYTES:]), files


def _confine(order: dict[str, Any]) -> None:
    if order["uid"] is not None:
        become_user(order["uid"])
    for kind, value in order["rlimits"].items():
        hard = resource.getrlimit(kind)[1]
        kept = value if hard == resource.RLIM_INFINITY else min(value, hard)  # the machine's own limit may be lower
        resource.setrlimit(kind, (kept, kept))
    if order["own_namespace"]:
        make_user_namespace()  # the limit on processes set above holds for the sandbox as a whole
    for program in order["filters"]:
        filter_system_calls(program)


def _become(argv: list[str], env: dict[str, str]) -> NoReturn:
    """Like `os.execvpe`, which would import a module."""
    if "/" in argv[0]:
        os.execve(argv[0], argv, env)
    missing: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for folder in env.get("PATH", os.defpath).split(":"):
        try:
            os.execve(f"{folder or '.'}/{argv[0]}", argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            missing = error
    raise missing
