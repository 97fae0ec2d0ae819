"""A process that has imported the modules of some work, and forks a child per job. `python -c`, one thread.

Laws
- Only children read jobs, so no child inherits the memory of another job. A child keeps no descriptor except its job's
  socket.
- A child lives as long as its caller waits: it is killed when the other end of its socket is closed, and all children
  are killed when the control socket is closed.

Wire: one byte on the control socket per job, with the job's socket attached. On that socket the request is sent, up to
end of file. The reply is `PREPARED`, the result as JSON or the text of an error, and a last line with the child's exit
code.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
from types import FrameType
from typing import Any, NoReturn

from gangline.domain.child_work import Limits

PREPARED = b"prepared\n"
OUT_OF_MEMORY = 77
"""Exit code of a child that ran out of memory."""

_JOB = 3
"""Descriptor of a child's job."""


def main(control: int, module: str) -> None:
    """Serve until the control socket is closed. control: its descriptor. module: see `child_work`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(Exception):  # each child meets the same failure and reports it
        warm = getattr(importlib.import_module(module), "warm", None)
        if warm is not None:
            warm()
    gc.freeze()
    with socket.socket(fileno=control) as jobs:
        _Server(jobs, module).serve()


class _Server:
    def __init__(self, control: socket.socket, module: str) -> None:
        self._control = control
        self._module = module
        self._children: dict[int, int] = {}
        """Descriptor of a job's socket -> pid."""
        self._poll = select.poll()

    def serve(self) -> None:
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, _note)
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(woken, select.POLLIN)
        try:
            while True:
                for descriptor, _ in self._poll.poll():
                    if descriptor == self._control.fileno():
                        if not self._accept():
                            return
                    elif descriptor == woken:
                        os.read(woken, 4096)
                        self._reap()
                    elif descriptor in self._children:  # its caller has hung up
                        self._poll.unregister(descriptor)
                        os.kill(self._children[descriptor], signal.SIGKILL)
        finally:
            for pid in self._children.values():
                os.kill(pid, signal.SIGKILL)

    def _accept(self) -> bool:
        """Accept a job. Returns False if the control socket was closed."""
        byte, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not byte:
            return False
        for job in descriptors:
            pid = os.fork()
            if pid == 0:
                _child(job, self._module)
            self._children[job] = pid
            self._poll.register(job, 0)  # hang-ups only: the child reads the request
        return True

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            job = next(job for job, child in self._children.items() if child == pid)
            del self._children[job]
            with contextlib.suppress(KeyError):
                self._poll.unregister(job)
            with socket.socket(fileno=job) as answer, contextlib.suppress(OSError):
                answer.sendall(b"\n%d" % os.waitstatus_to_exitcode(status))


def _note(_number: int, _frame: FrameType | None) -> None:
    """Does nothing: the signal's wakeup descriptor wakes the server."""


def _child(job: int, module: str) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(job, _JOB)
        os.closerange(_JOB + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        _work(module)
        code = 0
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(_JOB, f"{type(error).__name__}: {error}".encode(errors="replace"))
    finally:
        os._exit(code)


def _work(name: str) -> None:
    with open(_JOB, "rb", closefd=False) as pipe:
        request = json.load(pipe)
    module: Any = importlib.import_module(name)
    prepared = module.prepare(request["job"])
    os.write(_JOB, PREPARED)
    _hold_to(Limits(*request["limits"]))
    data = json.dumps(module.work(prepared)).encode()
    with open(_JOB, "wb", closefd=False) as pipe:
        pipe.write(data)


def _hold_to(limits: Limits) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(used.ru_utime + used.ru_stime) + 1 + limits.cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    with open("/proc/self/statm", encoding="ascii") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + limits.memory_bytes, taken + limits.memory_bytes))
