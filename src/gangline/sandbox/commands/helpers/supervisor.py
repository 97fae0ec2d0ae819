"""Run one command after another, watch each, and kill its whole process tree on request.

Invariants:
- The command's descendants never escape: this process is their subreaper, so that a daemonised grandchild becomes our
  child, and killing continues until we have no child left.
- The node's end of the control socket closing (the node died) is an order to kill. A byte on it is an order to end:
  SIGTERM first, and the grace that the order grants.
- Once inside the sandbox nothing is imported: its files are the agent's.
- A process left behind by a command that ended by itself lives on, as a child of the sandbox's first process: this
  supervisor ends then. Only one without any child takes another command, so trees of different commands never mix.
- A fork waits to become the next command (see `command`), so that a command costs its caller no fork. It takes the
  order off the control socket itself. Nobody replaces a killed one before an order comes: that would be work without
  end for an agent that kills it again and again.

`command` answers `started`. Our answer is two lines: `exit N`, `signal N`, `killed`, or `stuck` (processes multiply
faster than we kill them, the node must end the whole sandbox), then the processor time, memory and output of the
processes that have ended here. A third one, `free`, says that another order may come. `lost WHY` says that no command
could be started.
"""

from __future__ import annotations

import _socket
import os
import resource
import select
import time

from gangline.sandbox.commands.helpers.command import become_command
from gangline.sandbox.commands.helpers.namespaces import become_subreaper

TYPE_CHECKING = False  # see `forkserver`
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Iterable, Sequence
    from typing import NoReturn
else:
    import _signal

_MAX_SWEEPS = 200
_TAKEN = b"t"
_GRACE_BYTES = 4
"""Milliseconds, after the byte that orders to end."""
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


def supervise(control_fd: int, cgroup_fds: Sequence[int], user_fd: int | None) -> NoReturn:
    """cgroup_fds: open `cgroup.procs` files that commands join. user_fd: the namespace of users where they live."""
    control = _socket.socket(fileno=control_fd)
    try:
        become_subreaper()
        wakes = _Wakes(control_fd)
        before, is_free = resource.getrusage(resource.RUSAGE_CHILDREN), True
        while is_free:
            end = _supervised(control, wakes, cgroup_fds, user_fd)
            is_free = end not in ("killed", "stuck") and not _have_children()
            spent = resource.getrusage(resource.RUSAGE_CHILDREN)
            control.send(f"{end}\n{_difference(before, spent)}\n{'free' if is_free else 'last'}\n".encode())
            before = spent
    except BrokenPipeError:
        pass  # nobody is left to hear it
    except OSError as error:
        os.write(control_fd, f"lost {error}\n\nlast\n".encode())
    os._exit(0)


class _Wakes:
    """Waits for the end of a child, for an order that was taken, and for the node."""

    def __init__(self, control_fd: int) -> None:
        self._control_fd = control_fd
        self._fd, self._told_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        _signal.set_wakeup_fd(self._told_fd)
        _signal.signal(_signal.SIGCHLD, _noted)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self.is_taken = False
        """Whether the waiting child has its order."""

    def wait(self, *, hears: bool, timeout_ms: float | None = None) -> int:
        """The events of the control socket: what the node says only where `hears`, and that it is gone."""
        self._poll.register(self._control_fd, select.POLLRDHUP | (select.POLLIN if hears else 0))
        events = dict(self._poll.poll(timeout_ms))
        if self._fd in events:
            self.look()
        return events.get(self._control_fd, 0)

    def left_to_child(self) -> int:
        """In a child: where it tells that it has its order, which fails once nobody waits."""
        _signal.set_wakeup_fd(-1)
        os.close(self._fd)
        return self._told_fd

    def look(self) -> None:
        """Whether it is taken by now."""
        try:
            data = os.read(self._fd, 4096)
        except BlockingIOError:
            return
        self.is_taken = self.is_taken or _TAKEN in data


def _noted(_number: int, _frame: object) -> None:
    """The wakeup descriptor has reported it already; without a handler there would be no wakeup."""


def _supervised(control: _socket.socket, wakes: _Wakes, cgroup_fds: Sequence[int], user_fd: int | None) -> str:
    """The first line of the answer to the next order."""
    wakes.is_taken = False
    command = _forked(control, wakes, cgroup_fds, user_fd)
    while True:
        events = wakes.wait(hears=wakes.is_taken or not command)
        while (ended := _reap()) is not None:
            if ended[0] != command:
                continue
            wakes.look()
            if wakes.is_taken:
                return _told(ended[1])
            command = 0
        if events & _GONE:
            return kill_tree() if wakes.is_taken else _dismissed(command)
        if events and not command:
            command = _forked(control, wakes, cgroup_fds, user_fd)
        elif events:
            _ask_to_end(control, wakes)
            return kill_tree()


def _forked(control: _socket.socket, wakes: _Wakes, cgroup_fds: Sequence[int], user_fd: int | None) -> int:
    """A child that waits to become the command."""
    command = os.fork()
    if command == 0:
        become_command(control, (wakes.left_to_child(), _TAKEN), cgroup_fds, user_fd)
    return command


def _dismissed(command: int) -> str:
    """Kill a child that waits, or has just taken its order."""
    if command:
        os.kill(command, _signal.SIGKILL)
        os.waitpid(command, 0)
    return kill_tree() if _have_children() else "killed"


def _difference(before: resource.struct_rusage, now: resource.struct_rusage) -> str:
    """Accounts of the processes that have ended here: see `shared.accounts.Spent`. The kernel tells of all of them
    together which was the largest one."""
    cpu_s = now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime
    return f"{cpu_s:.6f} {now.ru_maxrss * 1024} {(now.ru_oublock - before.ru_oublock) * 512}"


def _told(status: int) -> str:
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"


def _ask_to_end(control: _socket.socket, wakes: _Wakes) -> None:
    """SIGTERM for the whole tree. Returns when none is left, the grace has passed, or the node wants it killed."""
    grace_s = int.from_bytes(control.recv(1 + _GRACE_BYTES)[1:], "big") / 1000
    _signal_all(_descendants(), _signal.SIGTERM)
    end_at = time.monotonic() + grace_s
    while _have_children() and (left_s := end_at - time.monotonic()) > 0:
        if wakes.wait(hears=True, timeout_ms=1000 * left_s):
            return


def _reap() -> tuple[int, int] | None:
    """(pid, status) of one ended child; None when all that are left still run."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def kill_tree() -> str:
    """Stop every descendant, so that none can fork during the search for the next; then kill; until no child is
    left."""
    for _sweep in range(_MAX_SWEEPS):
        seen: set[int] = set()
        while new := set(_descendants()) - seen:
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


def _signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def _descendants() -> list[int]:
    """Parents before their children. A shell whose child ends first takes it for the end of a step, and continues."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := _parent(name)) is not None:
            children.setdefault(parent, []).append(int(name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


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
