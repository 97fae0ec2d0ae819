"""A shell on a pseudo-terminal that receives its commands outside the terminal.

The shell runs a loop, the driver, which is typed once: it reports the last status on a private descriptor, waits on a
second one, and evaluates an in-memory file, its third. So commands are never typed, echoed or parsed from a screen, and
they inherit none of the three descriptors. Ctrl-C in a shell built-in also ends the driver: the shell then shows its
prompt, which reports that over the first descriptor, and the driver is typed again. A command that it had not started
by then is not evaluated.
"""

from __future__ import annotations

import fcntl
import os
import sys
import termios

from .loop import Loop
from .refusal import Refused

TYPE_CHECKING = False  # `typing` takes as long to import as all the rest: see `gangline.agents.tools.in_sandbox`
if TYPE_CHECKING:
    import signal as _signal
    from typing import Callable
else:
    import _signal

_DRIVER = (
    "while {{"
    ' printf \'%s %s %s\\0\' "$?" "$-" "${{PWD-}}" >&{marks};'
    " set +xv; unset HISTFILE; PS1='$(printf \"prompt\\0\" >&{marks})'; read -r _ <&{wake} && jobs >/dev/null;"
    " }} 2>/dev/null; do . /proc/self/fd/{script}; done\n"
)


class _Kind:
    """A shell, and its numbers for the three descriptors, in order. Commands do not inherit them."""

    def __init__(self, argv: list[str], wake: int, marks: int, script: int) -> None:
        self.argv = argv
        self.wake = wake
        self.marks = marks
        self.script = script


_BASH = _Kind(["bash", "--norc", "--noprofile", "--noediting", "-i"], 61, 62, 63)
_SH = _Kind(["sh", "-i"], 7, 8, 9)
"""Single digits only, so they may collide with a command that keeps such a descriptor open with `exec`."""
_PIECE_BYTES = 1 << 16
_MAX_DRAINED_BYTES = 1 << 20


class Terminal:
    """One shell. When its status descriptor closes, the shell has ended, or another program was started in its place by
    `exec`.
    """

    def __init__(
        self,
        loop: Loop,
        size: tuple[int, int],
        on_output: Callable[[bytes], None],
        on_status: Callable[[int, str, str], None],
        on_end: Callable[[Terminal], None],
    ) -> None:
        """size: rows and columns. on_status: exit code, options of the shell, folder."""
        self._loop = loop
        self._on_output = on_output
        self._on_status = on_status
        self._on_end = on_end
        self._script = os.memfd_create("script")
        self._marked = b""
        self._options = ""
        self._kind = _SH if _program("bash") is None else _BASH
        self._woken, self._wake = os.pipe()
        self._marks, marks_theirs = os.pipe()
        self.pid, self.master = _spawn(size, self._kind, (self._woken, marks_theirs, self._script))
        os.close(marks_theirs)
        self._modes = termios.tcgetattr(self.master)
        os.set_blocking(self.master, False)
        loop.read(self.master, self._readable)
        loop.read(self._marks, self._marked_now)
        self._type_driver()

    def evaluate(self, command: bytes) -> None:
        """Let the shell evaluate a command; it must be waiting for one."""
        self.forget_keys()  # before they could be echoed
        termios.tcsetattr(self.master, termios.TCSANOW, self._modes)
        options = b"".join(b"set -%c; " % flag for flag in b"xv" if chr(flag) in self._options)
        quoted = (options + command).replace(b"'", b"'\\''")
        script = b"eval '%s' %d<&- %d>&- %d<&-\n" % (quoted, self._kind.wake, self._kind.marks, self._kind.script)
        os.ftruncate(self._script, 0)
        written = 0
        while written < len(script):
            written += os.pwrite(self._script, script[written:], written)
        os.write(self._wake, b"\n")

    def type(self, keys: bytes) -> None:
        """Type keys. Raises: Refused if the foreground program has left too many unread."""
        try:
            num_typed = os.write(self.master, keys)
        except BlockingIOError:
            num_typed = 0
        if num_typed < len(keys):
            raise Refused("unread", f"the program read only {num_typed} of {len(keys)} bytes: wait, and send the rest")

    def forget_keys(self) -> None:
        """Drop keys that were typed but not read."""
        termios.tcflush(self.master, termios.TCOFLUSH)

    def resize(self, rows: int, columns: int) -> None:
        _set_size(self.master, rows, columns)

    def foreground(self) -> int:
        """The process group in the terminal's foreground."""
        try:
            return os.tcgetpgrp(self.master)
        except OSError:
            return 0

    @property
    def is_driven(self) -> bool:
        """Whether the shell runs its driver. After Ctrl-C it reads its terminal for a moment, at its prompt."""
        return self._is_driven and _num_unread(self._marks) == 0

    def takes_keys_at_once(self) -> bool:
        """Whether a program has switched off the terminal's line editing or echo."""
        both = termios.ICANON | termios.ECHO
        try:
            return termios.tcgetattr(self.master)[3] & both != both
        except termios.error:
            return False

    def drain(self) -> None:
        """Read the available output. A read flushes the terminal's queue, so it includes everything written before
        now.
        """
        drained = 0
        while self.master >= 0 and drained < _MAX_DRAINED_BYTES:
            num_read = self._read()
            if num_read == 0:
                return
            drained += num_read

    def exit_status(self) -> int | None:
        """After a signal, 128 plus its number; None while the process lives."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return None
        return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def close(self) -> None:
        """Release the shell and close its descriptors."""
        for fd in (self.master, self._marks):
            if fd >= 0:
                self._loop.read(fd, None)
        for fd in (self.master, self._marks, self._woken, self._wake, self._script):
            if fd >= 0:
                os.close(fd)
        self.master = self._marks = self._woken = self._wake = self._script = -1

    def _readable(self) -> None:
        self._read()

    def _read(self) -> int:
        try:
            piece = os.read(self.master, _PIECE_BYTES)
        except BlockingIOError:
            return 0
        except OSError:  # no process has the terminal open any more
            self._loop.read(self.master, None)
            return 0
        if piece:
            self._on_output(piece)
        return len(piece)

    def _marked_now(self) -> None:
        piece = os.read(self._marks, _PIECE_BYTES)
        if not piece:
            self._loop.read(self._marks, None)
            self._on_end(self)
            return
        *marks, self._marked = (self._marked + piece).split(b"\0")
        for mark in marks:
            if mark == b"prompt":
                self._forget_command()
                self._type_driver()
                continue
            self._is_driven = True
            status, _, rest = mark.partition(b" ")
            options, _, folder = rest.partition(b" ")
            self._options = options.decode(errors="replace")
            code = int(status) if status.isdigit() else 0
            self._on_status(code, self._options, folder.decode(errors="replace"))

    def _forget_command(self) -> None:
        """Drop a command that the driver has not started: at its prompt the shell reads only its terminal."""
        if size := _num_unread(self._woken):
            os.read(self._woken, size)

    def _type_driver(self) -> None:
        self._is_driven = False
        modes = [*self._modes]
        modes[3] = (modes[3] | termios.ICANON) & ~termios.ECHO
        termios.tcsetattr(self.master, termios.TCSANOW, modes)
        self.forget_keys()
        kind = self._kind
        os.write(self.master, _DRIVER.format(wake=kind.wake, marks=kind.marks, script=kind.script).encode())


def _num_unread(fd: int) -> int:
    num_bytes = bytearray(4)
    fcntl.ioctl(fd, termios.FIONREAD, num_bytes)
    return int.from_bytes(num_bytes, sys.byteorder)


def _spawn(size: tuple[int, int], kind: _Kind, descriptors: tuple[int, int, int]) -> tuple[int, int]:
    """Start a shell on a new terminal. Returns its pid and the terminal's other end."""
    try:
        master, slave = os.openpty()
    except OSError as error:
        raise Refused("no_terminal", f"the sandbox gives no pseudo-terminal: {error}") from error
    _set_size(slave, *size)
    modes = termios.tcgetattr(slave)
    modes[1] &= ~termios.OPOST
    termios.tcsetattr(slave, termios.TCSANOW, modes)  # before the shell starts: bash restores them after a signal
    pid = os.fork()
    if pid == 0:
        try:
            _become_shell(slave, kind, descriptors)
        finally:
            os._exit(127)
    os.close(slave)
    return pid, master


def _set_size(fd: int, rows: int, columns: int) -> None:
    """The kernel's `struct winsize`: four short integers. Avoids importing the module `struct`."""
    size = b"".join(number.to_bytes(2, sys.byteorder) for number in (rows, columns, 0, 0))
    fcntl.ioctl(fd, termios.TIOCSWINSZ, size)


def _become_shell(slave: int, kind: _Kind, descriptors: tuple[int, int, int]) -> None:
    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for fd in (0, 1, 2):
        os.dup2(slave, fd)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in descriptors]
    for number, fd in zip((kind.wake, kind.marks, kind.script), high):
        os.dup2(fd, number)
    os.closerange(3, kind.wake)
    os.closerange(kind.script + 1, 1024)
    for number in range(1, _signal.NSIG):
        if number not in (_signal.SIGKILL, _signal.SIGSTOP, 32, 33):
            _signal.signal(number, _signal.SIG_DFL)
    shell = _program(kind.argv[0])
    if shell is None:
        os.write(2, b"the sandbox has neither bash nor sh\n")
    else:
        os.execv(shell, kind.argv)


def _program(name: str) -> str | None:
    """A program's path, found as by `shutil.which`, which takes 10 ms to import."""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None
