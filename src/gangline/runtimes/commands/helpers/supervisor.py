"""Run one command, watch it, and kill its whole process tree on request.

Laws:
- The command's descendants never escape: this process is their subreaper, so that a daemonised grandchild becomes our
  child, and killing goes on until we have no child left.
- The node's end of the control socket closing (the node died) is an order to kill. A byte on it is an order to end:
  SIGTERM first, and the grace that the order grants.
- Once inside the sandbox nothing is imported: its files are the agent's.
- A process left behind by a command that ended by itself lives on, as a child of the sandbox's first process.
- Each command has a supervisor and a session keyring of its own: trees of different commands never mix.

The order comes marshalled, from our own node, on the control socket. The answer is `started`, and then two lines:
the processor time, memory and output of the processes that have ended here, and before them
`exit N`, `signal N`, `killed`, or `stuck` (processes multiply faster than we kill them; the node must end the whole
sandbox). `lost WHY` says that the command could not be started.
"""

from __future__ import annotations

import errno
import marshal
import os
import resource
import select
import time

from gangline.runtimes.commands.helpers.namespaces import (
    become_subreaper,
    become_user,
    enter_user,
    filter_system_calls,
    forbid_new_privileges,
    leave_session_keyring,
    make_user_namespace,
)

TYPE_CHECKING = False  # see `zygote`
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Sequence
    from typing import Any, NoReturn
else:
    import _signal

__all__ = ["supervise"]

_MAX_SWEEPS = 200


def supervise(control_fd: int, files: Sequence[int], cgroup_fds: Sequence[int], user_fd: int | None) -> NoReturn:
    """files: the command's descriptors, from number 0 on: three streams, and the end of a channel if it has one.

    cgroup_fds: open `cgroup.procs` files to join. user_fd: the namespace of users where the command lives.
    """
    try:
        leave_session_keyring()
        order = _read_order(control_fd)
        os.write(control_fd, b"started\n")
        answer = _supervised(control_fd, order, files, cgroup_fds, user_fd)
    except OSError as error:
        answer = f"lost {error}"
    try:
        os.write(control_fd, f"{answer}\n{_spent()}".encode())
    except OSError:
        os._exit(1)  # nobody is left to hear it
    os._exit(0)


def _read_order(control_fd: int) -> dict[str, Any]:
    size = int.from_bytes(_read_exactly(control_fd, 4), "big")
    return marshal.loads(_read_exactly(control_fd, size))


def _read_exactly(fd: int, size: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < size:
        piece = os.read(fd, size - len(pieces))
        if not piece:
            os._exit(0)  # the node went away before it said what to run
        pieces += piece
    return bytes(pieces)


def _supervised(
    control_fd: int, order: dict[str, Any], files: Sequence[int], cgroup_fds: Sequence[int], user_fd: int | None
) -> str:
    """The last line of the answer."""
    become_subreaper()
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    _signal.set_wakeup_fd(wake_write)
    _signal.signal(_signal.SIGCHLD, _noted)
    command = os.fork()
    if command == 0:
        _run_command(order, files, cgroup_fds, user_fd)
    for fd in files:
        os.close(fd)  # they must end when the command's own processes do
    status = _wait(command, control_fd, wake_read)
    if status is not None:
        return _told(status)
    if os.read(control_fd, 1):
        _ask_to_end(order["grace_s"], control_fd, wake_read)
    return _kill_tree()


def _spent() -> str:
    """Accounts of the processes that have ended here: see `shared.accounts.Spent`."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return f"{spent.ru_utime + spent.ru_stime:.6f} {spent.ru_maxrss * 1024} {spent.ru_oublock * 512}"


def _noted(_number: int, _frame: object) -> None:
    """The wakeup descriptor has reported it already; without a handler there would be no wakeup."""


def _told(status: int) -> str:
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"


def _wait(command: int, control_fd: int, wake_fd: int) -> int | None:
    """The command's wait status, or None when the node wants it killed."""
    poll = select.poll()
    poll.register(control_fd, select.POLLIN)
    poll.register(wake_fd, select.POLLIN)
    while True:
        while (ended := _reap()) is not None:
            if ended[0] == command:
                return ended[1]
        ready = {fd for fd, _events in poll.poll()}
        if control_fd in ready:
            return None
        if wake_fd in ready:
            os.read(wake_fd, 4096)


def _ask_to_end(grace_s: float, control_fd: int, wake_fd: int) -> None:
    """SIGTERM for the whole tree. Returns when none is left, the grace has passed, or the node wants it killed."""
    _signal_all(_descendants(), _signal.SIGTERM)
    poll = select.poll()
    poll.register(control_fd, select.POLLIN)
    poll.register(wake_fd, select.POLLIN)
    end_at = time.monotonic() + grace_s
    while _have_children() and (left_s := end_at - time.monotonic()) > 0:
        ready = {fd for fd, _events in poll.poll(1000 * left_s)}
        if control_fd in ready:
            return
        if wake_fd in ready:
            os.read(wake_fd, 4096)


def _reap() -> tuple[int, int] | None:
    """(pid, status) of one ended child; None when all that are left still run."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _kill_tree() -> str:
    """Stop every descendant, so that none can fork during the search for the next; then kill; until no child is
    left."""
    for _sweep in range(_MAX_SWEEPS):
        seen: set[int] = set()
        while new := _descendants() - seen:
            seen |= new
            _signal_all(new, _signal.SIGSTOP)
            if len(seen) > 100_000:
                return "stuck"
        _signal_all(seen, _signal.SIGKILL)
        if not _have_children():
            return "killed"
        select.select([], [], [], 0.002)
    return "stuck"


def _have_children() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _signal_all(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def _descendants() -> set[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := _parent(name)) is not None:
            children.setdefault(parent, []).append(int(name))
    found: set[int] = set()
    queue = [os.getpid()]
    while queue:
        new = [pid for pid in children.get(queue.pop(), []) if pid not in found]
        found.update(new)
        queue += new
    return found


def _parent(pid: str) -> int | None:
    """Parent of a living process; None for one that is gone or a zombie.

    A process whose first thread has ended looks like a zombie while its other threads run. The kernel counts a zombie
    itself as one thread.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            fields = file.read(4096).rpartition(b")")[2].split()
        state, parent, threads = fields[0], int(fields[1]), int(fields[17])
    except (OSError, ValueError, IndexError):
        return None
    return None if state == b"Z" and threads <= 1 else parent


def _run_command(
    order: dict[str, Any], files: Sequence[int], cgroup_fds: Sequence[int], user_fd: int | None
) -> NoReturn:
    """In the child: become the command. Like a shell's, 127 is 'not found' and 126 'cannot be run'."""
    for number, fd in enumerate(files[:3]):
        os.dup2(fd, number)
    argv: list[str] = order["argv"]
    doing = argv[0]
    try:
        _signal.set_wakeup_fd(-1)
        _restore_signals()
        _join(cgroup_fds, user_fd)
        for number, fd in enumerate(files[3:], start=3):
            os.dup2(fd, number)
            os.set_inheritable(number, True)  # also where it had this number before
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


def _restore_signals() -> None:
    """Python ignores some, and whoever started the node may have made it ignore others."""
    for number in _signal.valid_signals() - {_signal.SIGKILL, _signal.SIGSTOP}:
        _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())


def _become(argv: list[str], env: dict[str, str]) -> NoReturn:
    """Like `os.execvpe`, which imports a module on its way."""
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


def _join(cgroup_fds: Sequence[int], user_fd: int | None) -> None:
    for fd in cgroup_fds:
        os.write(fd, b"0")
    if user_fd is not None:
        enter_user(user_fd)
        forbid_new_privileges()


def _confine(order: dict[str, Any]) -> None:
    os.setsid()
    os.umask(0o022)
    if order["uid"] is not None:
        become_user(order["uid"])
    for kind, value in order["rlimits"].items():
        resource.setrlimit(kind, (value, value))
    if order["own_namespace"]:
        make_user_namespace()  # the limit on processes set above holds for the sandbox as a whole
    for program in order["filters"]:
        filter_system_calls(program)
