"""Runs a grader's commands as the solution's user, which isolates code under test from its grader.

The grader runs as the user `grader`, which cannot switch to another user. So a server, started as `agent`, runs
commands for it: the grader calls `$GANGLINE_SOLUTION COMMAND...`, a client that passes on its streams and returns the
exit code. That command can neither enter the grader's HOME, nor signal or read the grader. It can end or imitate the
server, but then the grader only reads output chosen by the solution, as it does from any solution.

Both programs need `python3` inside.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from gangline.domain.errors import EvaluatorError
from gangline.domain.sandbox import ExecResult, Sandbox

_SOCKET = ".gangline/solution"
"""Relative to the working folder, because the name of a socket must be short."""
_CLIENT = ".gangline/solution"
"""Relative to the grader's HOME."""
_READY_S = 30.0

_SERVER = r"""
import array, json, os, signal, socket, subprocess, sys

def serve(connection):
    data, fds, _flags, _address = socket.recv_fds(connection, 1 << 20, 3)
    command = subprocess.Popen(json.loads(data), stdin=fds[0], stdout=fds[1], stderr=fds[2], start_new_session=True)
    for fd in fds:
        os.close(fd)
    if os.fork() == 0:  # ends the command when the client has gone
        connection.recv(1)
        try:
            os.killpg(command.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os._exit(0)
    code = command.wait()
    connection.sendall(str(128 - code if code < 0 else code).encode())
    connection.shutdown(socket.SHUT_RDWR)

listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listening.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
listening.listen(128)
print("ready", flush=True)
while True:
    connection, _address = listening.accept()
    if os.fork() == 0:
        listening.close()
        try:
            serve(connection)
        except OSError as error:
            connection.sendall(f"127 {error}".encode())
        os._exit(0)
    connection.close()
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""

_CLIENT_PROGRAM = r"""#!/usr/bin/env python3
import json, os, socket, sys
os.chdir(os.environ["GANGLINE_WORKDIR"])
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    connection.connect(".gangline/solution")
    socket.send_fds(connection, [json.dumps(sys.argv[1:]).encode()], [0, 1, 2])
    code, _, why = connection.recv(4096).decode().partition(" ")
except OSError as error:
    code, why = "", str(error)
if why or not code:
    print(f"the solution's command did not run: {why}", file=sys.stderr)
sys.exit(int(code or 127))
"""


@asynccontextmanager
async def serving_solution(runtime: Sandbox) -> AsyncGenerator[dict[str, str]]:
    """Yields the grader's environment while commands can run as the solution's user. The working folder must have a
    `.gangline` folder. Raises: EvaluatorError if that is not possible.
    """
    assert runtime.grader_home is not None
    client = f"{runtime.grader_home}/{_CLIENT}"
    await runtime.upload(client, _CLIENT_PROGRAM.encode(), mode=0o755)
    ready = asyncio.Event()
    server = asyncio.create_task(
        runtime.exec(["python3", "-I", "-S", "-c", _SERVER, _SOCKET], on_output=lambda _stream, _data: ready.set())
    )
    listening = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({listening, server}, timeout=_READY_S, return_when=asyncio.FIRST_COMPLETED)
        if server.done() or not listening.done():
            raise EvaluatorError(f"commands cannot be run as the solution's user: {await _why_not(server)}")
        yield {"GANGLINE_SOLUTION": client, "GANGLINE_WORKDIR": runtime.workdir}
    finally:
        for task in (listening, server):
            task.cancel()
        await asyncio.wait({listening, server})


async def _why_not(server: asyncio.Task[ExecResult]) -> str:
    if not server.done():
        return f"their server was not ready after {_READY_S:g} s."
    result = await server
    return result.stderr.decode(errors="replace").strip()[-500:] or f"their server ended with {result.exit_code}."
