"""Run one command after another, watch each, and kill its whole process tree on request.

Invariants:
- The command's descendants never escape: this process is their subreaper, so a daemonised grandchild becomes our child,
  and killing continues until we have no children left.
- When the node's end of the control socket closes (the node died), the tree is killed. A byte on the socket asks the
  tree to end: SIGTERM first, then SIGKILL after the grace given with the byte.
- Nothing is imported inside the sandbox: its files are the agent's.
- A process left behind by a command that ended by itself lives on as a child of the sandbox's first process; this
  supervisor then ends. Only a supervisor without children takes another command, so trees of different commands never
  mix.
- A fork waits to become the next command (see `command`), so starting a command costs its caller no fork. The fork
  reads the order from the control socket itself. A waiting fork that is killed is replaced only when an order comes;
  otherwise an agent could kill it again and again and cause endless work.

`command` answers `started`. Our answer is two lines: `exit N`, `signal N`, `killed`, or `stuck` (processes multiply
faster than we kill them; the node must kill the whole sandbox), then the processor time, memory and output of the
processes that ended here. A third line, `free`, says that another order may come. `lost WHY` says that no command could
be started.
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

_MAX_SWEEPS, _MAX_LOOKS = 200, 50
_TAKEN = b"t"
_GRACE_BYTES = 4
"""Milliseconds, after the byte that asks the tree to end."""
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


def supervise(control_fd: int, cgroup_fds: Sequence[int], user_fd: int | None) -> NoReturn:
    """cgroup_fds: open `cgroup.procs` files that commands join. user_fd: the user namespace where they run."""
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
        pass  # the node is gone
    except OSError as error:
        os.write(control_fd, f"lost {error}\n\nlast\n".encode())
    os._exit(0)


class _Wakes:
    """Waits for a child to end, for an order to be received, and for the node."""

    def __init__(self, control_fd: int) -> None:
        self._control_fd = control_fd
        self._fd, self._told_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        _signal.set_wakeup_fd(self._told_fd)
        _signal.signal(_signal.SIGCHLD, _noted)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self.is_taken = False
        """Whether the waiting child has received its order."""

    def wait(self, *, hears: bool, timeout_ms: float | None = None) -> int:
        """The events of the control socket: the node's bytes only where `hears`, and always its end."""
        self._poll.register(self._control_fd, select.POLLRDHUP | (select.POLLIN if hears else 0))
        events = dict(self._poll.poll(timeout_ms))
        if self._fd in events:
            self.look()
        return events.get(self._control_fd, 0)

    def left_to_child(self) -> int:
        """In a child: the descriptor for reporting that it has its order. Writing fails once the supervisor is gone."""
        _signal.set_wakeup_fd(-1)
        os.close(self._fd)
        return self._told_fd

    def look(self) -> None:
        """Check whether the order has been received."""
        try:
            data = os.read(self._fd, 4096)
        except BlockingIOError:
            return
        self.is_taken = self.is_taken or _TAKEN in data


def _noted(_number: int, _frame: object) -> None:
    """Does nothing: the wakeup descriptor reports the signal, but only signals with a handler cause a wakeup."""


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
                return _end_text(ended[1])
            command = 0
        if events & _GONE:
            return kill_tree() if wakes.is_taken else _dismissed(command)
        if events and not command:
            command = _forked(control, wakes, cgroup_fds, user_fd)
        elif events:
            _ask_to_end(control, wakes)
            return kill_tree()


def _forked(control: _socket.socket, wakes: _Wakes, cgroup_fds: Sequence[int], user_fd: int | None) -> int:
    """Fork a child that waits to become the command."""
    command = os.fork()
    if command == 0:
        become_command(control, (wakes.left_to_child(), _TAKEN), cgroup_fds, user_fd)
    return command


def _dismissed(command: int) -> str:
    """Kill a child that waits, or has just received its order."""
    if command:
        os.kill(command, _signal.SIGKILL)
        os.waitpid(command, 0)
    return kill_tree() if _have_children() else "killed"


def _difference(before: resource.struct_rusage, now: resource.struct_rusage) -> str:
    """Resource use of the processes that ended here: see `shared.accounts.Spent`. The kernel reports the largest one
    only over all of them."""
    cpu_s = now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime
    return f"{cpu_s:.6f} {now.ru_maxrss * 1024} {(now.ru_oublock - before.ru_oublock) * 512}"


def _end_text(status: int) -> str:
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"


def _ask_to_end(control: _socket.socket, wakes: _Wakes) -> None:
    """Send SIGTERM to the whole tree. Returns when it has ended, the grace has passed, or the node orders a kill."""
    grace_s = int.from_bytes(control.recv(1 + _GRACE_BYTES)[1:], "big") / 1000
    _signal_all(_descendants(), _signal.SIGTERM)
    end_at = time.monotonic() + grace_s
    while _have_children() and (left_s := end_at - time.monotonic()) > 0:
        if wakes.wait(hears=True, timeout_ms=1000 * left_s):
            return


def _reap() -> tuple[int, int] | None:
    """(pid, status) of one ended child; None when all remaining children still run."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def kill_tree() -> str:
    """Stop every descendant, so that none can fork during the search for the next, then kill them. Repeats until there
    are no children left.

    A process that forks and ends faster than all processes are listed is never in the list. Its child is ours then.
    """
    for _sweep in range(_MAX_SWEEPS):
        seen: set[int] = set()
        while new := set(_descendants()) - seen:
            seen |= new
            _signal_all(new, _signal.SIGSTOP)
            if len(seen) > 100_000:
                return "stuck"
        _signal_all(seen, _signal.SIGKILL)
        for _look in range(_MAX_LOOKS):
            if not _have_children():
                return "killed"
            _signal_all(_children(), _signal.SIGKILL)
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
    """Parents before their children: a shell whose child ends first would continue with its next step."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := _parent(name)) is not None:
            children.setdefault(parent, []).append(int(name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def _children() -> list[int]:
    """Our own, as the kernel lists them, if it was built to."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb", buffering=0) as file:
            return [int(pid) for pid in file.read(4096).rpartition(b" ")[0].split()]
    except OSError:
        return []


def _parent(pid: str) -> int | None:
    """Parent of a living process; None if the process is gone or a zombie.

    A process whose first thread has ended looks like a zombie while its other threads run. The kernel counts a zombie
    as one thread.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            fields = file.read(4096).rpartition(b")")[2].split()
        state, parent, threads = fields[0], int(fields[1]), int(fields[17])
    except (OSError, ValueError, IndexError):
        return None
    return None if state == b"Z" and threads <= 1 else parent
