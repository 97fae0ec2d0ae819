"""Inspects a terminal's processes through /proc: which are in the foreground, and whether they wait for input.

A program waits for input if a foreground process is blocked in a read from the terminal, or waits for several
descriptors after switching off the terminal's line editing or echo, as editors, pagers and REPLs do. If the kernel does
not show a process's system call (another user's program, such as `sudo`), only that switch counts.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # `typing` takes as long to import as all the rest: see `gangline.agents.tools.in_sandbox`
if TYPE_CHECKING:
    import signal as _signal
    from typing import Iterator

    from .terminal import Terminal
else:
    import _signal

_READS = {"x86_64": {0}, "aarch64": {63}}
_WAITS = {"x86_64": {7, 23, 232, 270, 271, 281}, "aarch64": {22, 72, 73}}
"""poll, select, epoll_wait and similar calls, by machine."""
_MACHINE = os.uname().machine
_TERMINALS = range(136, 144)
"""Major device numbers of pseudo-terminals; 5:0 is /dev/tty."""
_MAX_PROCESSES = 8
_MAX_WORDS = 200


def _processes() -> Iterator[tuple[int, int, int]]:
    """Pid, process group and session of every visible living process."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] != b"Z":
                yield int(name), int(fields[2]), int(fields[3])


def command_lines(group: int, but: int) -> list[str]:
    """The command lines of a process group, shortened, excluding the process `but`."""
    found: list[str] = []
    for pid, its_group, _session in _processes():
        if its_group == group and pid != but and len(found) < _MAX_PROCESSES:
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    words = file.read(_MAX_WORDS).replace(b"\0", b" ").strip()
            except OSError:
                continue
            if words:
                found.append(words.decode(errors="replace"))
    return found


def is_reading(terminal: Terminal) -> bool:
    """Whether a foreground process of the terminal waits for input."""
    group = terminal.foreground()
    at_once = terminal.takes_keys_at_once()
    return group > 0 and any(_waits(pid, at_once) for pid, its_group, _ in _processes() if its_group == group)


def _waits(pid: int, at_once: bool) -> bool:
    try:
        with open(f"/proc/{pid}/syscall") as file:
            words = file.read().split()
    except OSError:
        return at_once
    if not words or not words[0].isdigit():
        return False
    number = int(words[0])
    if number in _WAITS.get(_MACHINE, ()):
        return at_once
    return number in _READS.get(_MACHINE, ()) and _is_terminal(pid, int(words[1], 16))


def _is_terminal(pid: int, fd: int) -> bool:
    try:
        device = os.stat(f"/proc/{pid}/fd/{fd}").st_rdev
    except OSError:
        return False
    return os.major(device) in _TERMINALS or (os.major(device), os.minor(device)) == (5, 0)


def kill_session(leader: int) -> None:
    """Kill every process of a session, including new ones that it starts meanwhile."""
    for _ in range(20):
        found = [pid for pid, _group, session in _processes() if session == leader]
        alive = False
        for pid in found:
            try:
                os.kill(pid, _signal.SIGKILL)
            except OSError:
                continue
            alive = alive or pid != leader
        if not alive:
            return
