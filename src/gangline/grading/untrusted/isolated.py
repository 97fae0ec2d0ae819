"""Runs work on untrusted text in child processes of a fork server that has imported the needed modules.

Parsers and computer algebra can run forever on crafted text, hold the interpreter meanwhile, and cannot be stopped:
inside the node one answer could stall every session. Importing them also takes longer than comparing an answer: forking
a process with SymPy takes milliseconds, starting one most of a second.

Neither the server nor its children inherit the node's environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from gangline.domain.child_work import Limits, OverLimit
from gangline.domain.errors import EvaluatorError
from gangline.grading.untrusted import fork_server
from gangline.grading.untrusted.fork_server import OUT_OF_MEMORY, PREPARED

ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8"}
"""The whole environment of these processes."""

_MAX_SHOWN_CHARS = 500
_OURS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals with an external cause: an operator, or a machine that is out of memory."""
_FULL_S = 0.01


class ForkServers:
    """Implements `ChildWork`: one server per module, started at its first job. Call `close` at the end; idempotent."""

    def __init__(self) -> None:
        self._servers: dict[str, _ForkServer] = {}

    async def __call__(self, module: str, job: Any, limits: Limits) -> Any:
        """See `ChildWork`."""
        server = self._running(module)
        try:
            async with asyncio.timeout(limits.timeout_s):
                answer = await server.answer(json.dumps({"job": job, "limits": limits}).encode())
        except TimeoutError:
            raise EvaluatorError(
                f"{module} was not done in {limits.timeout_s:g} s; the machine may be overloaded"
            ) from None
        return _result(module, answer, limits)

    def _running(self, module: str) -> _ForkServer:
        server = self._servers.get(module)
        if server is not None and not server.is_running:
            server.close()
            server = None
        if server is None:
            server = self._servers[module] = _ForkServer(module)
        return server

    async def close(self) -> None:
        servers, self._servers = list(self._servers.values()), {}
        await asyncio.gather(*(asyncio.to_thread(server.close) for server in servers))


async def in_child(module: str, job: Any, limits: Limits) -> Any:
    """Runs one job with a temporary server. See `ChildWork`."""
    servers = ForkServers()
    try:
        return await servers(module, job, limits)
    finally:
        await servers.close()


class _ForkServer:
    """The caller's side of `fork_server`."""

    def __init__(self, module: str) -> None:
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with theirs:
            call = f"from {fork_server.__name__} import main; main({theirs.fileno()}, {module!r})"
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", call],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=ENVIRONMENT,
                cwd="/",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    async def answer(self, request: bytes) -> bytes:
        """Everything that a child and the server wrote about the job. Cancelling the call kills the child.

        Raises: EvaluatorError if the server has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                await self._send(theirs)
                theirs.close()
                writer.write(request)
                writer.write_eof()
                return await reader.read()
            except OSError as error:
                raise EvaluatorError(f"the process that grades answers has ended: {error}") from error
            finally:
                writer.close()

    async def _send(self, job: socket.socket) -> None:
        while True:
            try:
                socket.send_fds(self._control, [b"j"], [job.fileno()])
            except BlockingIOError:  # the socket's queue of jobs is full
                await asyncio.sleep(_FULL_S)
            else:
                return

    def close(self) -> None:
        """Close the server and kill its children."""
        self._control.close()
        self._process.wait()


def _result(module: str, answer: bytes, limits: Limits) -> Any:
    """Raises: OverLimit, EvaluatorError."""
    printed, _, code_text = answer.rpartition(b"\n")
    code = int(code_text) if code_text.removeprefix(b"-").isdigit() else None
    if code is None:
        raise EvaluatorError(f"{module} gave no answer: the process that grades answers has ended")
    body = printed.removeprefix(PREPARED)
    if code == 0:
        return json.loads(body)
    why = "" if code < 0 else body.decode(errors="replace").strip()[:_MAX_SHOWN_CHARS]
    if printed.startswith(PREPARED) and -code not in _OURS:
        raise OverLimit(_end_of(code, why, limits))
    raise EvaluatorError(f"{module} ended with {code}: {why or 'no message'}")


def _end_of(code: int, why: str, limits: Limits) -> str:
    if -code == signal.SIGXCPU:
        return f"it took more than {limits.cpu_s} s of processor time"
    if code == OUT_OF_MEMORY:
        return f"it took more than {limits.memory_bytes >> 20} MiB of memory"
    return f"it crashed ({'signal ' + str(-code) if code < 0 else 'exit code ' + str(code)}): {why[-200:]}"
