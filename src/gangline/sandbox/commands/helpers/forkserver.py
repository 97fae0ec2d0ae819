"""The process that forks all helpers: an interpreter started once, with only their code loaded.

Invariants:
- It never held a secret, a file or an environment of the process that started it, so neither do its forks.
- It has no threads, forks only helpers, and lives outside all sandboxes.
- It ends when its control socket closes, and so with the process that started it, even if that one crashed.
- Each helper carries its sandbox's label, so helpers can be identified like processes started directly.

Usage: `main(control_fd)`. Each message is marshalled: a helper's name, a label, arguments. Its descriptors are passed
to the helper; the first one is a socket where the helper answers, or reports `lost WHY`.
"""

from __future__ import annotations

import _socket
import ctypes
import gc
import marshal
import os

from gangline.sandbox.commands.helpers import listener, new_root, shared_memory, spawner
from gangline.sandbox.commands.helpers.descriptors import received
from gangline.sandbox.commands.helpers.namespaces import become_subreaper

TYPE_CHECKING = False  # `typing` and `signal`, with its enums, would double the memory of every fork
if TYPE_CHECKING:
    import signal as _signal
    from typing import Any, NoReturn
else:
    import _signal

_HELPERS = {
    "spawner": spawner.main,
    "listener": listener.main,
    "new_root": new_root.main,
    "shared_memory": shared_memory.main,
}
_ENV_START, _ENV_END = 47, 48
"""Fields of /proc/<pid>/stat after the name: where the environment lies in memory."""


def main(control_fd: int) -> NoReturn:
    os.closerange(3, control_fd)
    os.closerange(control_fd + 1, 1 << 16)
    _deafen()
    become_subreaper()
    control = _socket.socket(fileno=control_fd)
    gc.collect()
    gc.disable()
    gc.freeze()
    while True:
        order, fds = received(control)
        if not order:
            os._exit(0)
        try:
            is_helper = os.fork() == 0
        except OSError as error:
            os.write(fds[0], f"lost {error}".encode())
        else:
            if is_helper:
                control.close()
                _help(order, fds)
        for fd in fds:
            os.close(fd)


def _deafen() -> None:
    """Ignore all signals except uncatchable ones and those of our own faults. Ended children then need no reaping."""
    faults = {_signal.SIGSEGV, _signal.SIGBUS, _signal.SIGFPE, _signal.SIGILL, _signal.SIGABRT, _signal.SIGSYS}
    for number in _signal.valid_signals() - {_signal.SIGKILL, _signal.SIGSTOP} - faults:
        _signal.signal(number, _signal.SIG_IGN)


def _help(order: bytes, fds: list[int]) -> NoReturn:
    request: Any = marshal.loads(order)
    name, label, arguments = request
    try:
        _wear(label)
        _HELPERS[name](fds, *arguments)
    except Exception as error:  # last resort of this process
        os.write(fds[0], f"lost {error or type(error).__name__}".encode())
    os._exit(0)


def _wear(label: str) -> None:
    """Show the label as the whole environment, in the memory of the original environment."""
    with open("/proc/self/stat", "rb", buffering=0) as file:
        fields = file.read(4096).rpartition(b")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    text = label.encode()
    if len(text) >= end - start:
        raise OSError(f"no room for the label {label!r}")
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))
