"""The semantics of network `list`. A runtime that rejects it, or reports its network as `not enforced`, is not checked.

All hosts are on this machine's loopback, and listed by that address.
"""

from __future__ import annotations

import asyncio
import contextlib
import unittest
from collections.abc import AsyncGenerator

from gangline.domain.errors import InvalidRequest
from gangline.domain.sandbox import ExecResult, Sandbox
from gangline.testing.runtime_conformance.bench import Bench, Checks, dial, promised

CHECKS = Checks()

_FETCH = (
    "import sys, urllib.request\n"
    "try:\n  print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())\n"
    "except urllib.error.HTTPError as error:\n  print(error.code, error.read().decode()); sys.exit(3)"
)
_TUNNEL = (
    "import http.client, os, sys, urllib.parse\n"
    "proxy = urllib.parse.urlsplit(os.environ['HTTPS_PROXY'])\n"
    "connection = http.client.HTTPConnection(proxy.hostname, proxy.port, timeout=20)\n"
    "connection.set_tunnel('localhost', int(sys.argv[1])); connection.request('GET', '/'); "
    "print(connection.getresponse().read().decode())"
)


async def _listed(bench: Bench, *allow: str) -> Sandbox:
    """Raises: unittest.SkipTest."""
    try:
        sandbox = await bench.start(network="list", allow=allow)
    except InvalidRequest as error:
        raise unittest.SkipTest(f"does not apply: {error.message}") from error
    promised(sandbox, "network")
    return sandbox


@contextlib.asynccontextmanager
async def _host(name: str) -> AsyncGenerator[int]:
    """Answers every request with its name."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(name)}\r\n\r\n{name}".encode())
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def _fetch(sandbox: Sandbox, url: str, **env: str) -> ExecResult:
    """Fetch like a program that uses the proxy variables even for local-looking hosts."""
    return await sandbox.exec(["python3", "-c", _FETCH, url], env={"NO_PROXY": "", "no_proxy": "", **env})


@CHECKS.isolation
async def what_is_listed_is_reached_and_nothing_else(bench: Bench) -> None:
    async with _host("open") as port, _host("shut") as other:
        sandbox = await _listed(bench, f"localhost:{port}", f"127.0.0.1:{port}")
        result = await _fetch(sandbox, f"http://localhost:{port}/")
        assert result.stdout == b"open\n", result
        result = await _fetch(sandbox, f"http://localhost:{other}/")
        assert result.exit_code == 3, result
        assert b"403" in result.stdout, result
        assert b"runtime.network_allow" in result.stdout, "a refusal says what to write"


@CHECKS.isolation
async def a_tunnel_is_opened_to_what_is_listed(bench: Bench) -> None:
    async with _host("open") as port:
        sandbox = await _listed(bench, f"localhost:{port}", f"127.0.0.1:{port}")
        result = await sandbox.exec(["python3", "-c", _TUNNEL, str(port)])
        assert result.stdout == b"open\n", result


@CHECKS.isolation
async def nothing_is_reached_past_the_forward_proxy(bench: Bench) -> None:
    async with _host("open") as port:
        sandbox = await _listed(bench, f"localhost:{port}", f"127.0.0.1:{port}")
        dial = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
        assert not (await sandbox.exec(["python3", "-c", dial, "127.0.0.1", str(port)])).ok
        assert not (await sandbox.exec(["python3", "-c", dial, "1.1.1.1", "443"])).ok


@CHECKS.isolation
async def a_name_that_means_this_machine_is_not_enough(bench: Bench) -> None:
    async with _host("inside") as port:
        sandbox = await _listed(bench, f"localhost:{port}")
        result = await _fetch(sandbox, f"http://localhost:{port}/")
        assert result.exit_code == 3, result
        assert b"not public" in result.stdout, result


@CHECKS.isolation
async def the_model_proxy_is_reached_directly_under_list(bench: Bench) -> None:
    sandbox = await _listed(bench, "example.org")
    assert (await sandbox.exec(dial(sandbox.proxy_url))).stdout == b"proxy:hello\n"
    env = (await sandbox.exec("env")).stdout.decode()
    assert "NO_PROXY=127.0.0.1" in env, "SDKs must not ask the forward proxy for the model"


@CHECKS.isolation
async def a_list_still_holds_after_kill(bench: Bench) -> None:
    async with _host("open") as port:
        sandbox = await _listed(bench, f"localhost:{port}", f"127.0.0.1:{port}")
        await sandbox.kill()
        assert (await _fetch(sandbox, f"http://localhost:{port}/")).stdout == b"open\n"
        assert (await _fetch(sandbox, "http://127.0.0.2:80/")).exit_code == 3
