"""Resources that a sandbox reports: those that it used, over all its lives; an unknown one has a reason."""

from __future__ import annotations

import asyncio
import contextlib
import unittest
from collections.abc import AsyncGenerator

from gangline.domain.errors import InvalidRequest
from gangline.domain.sandbox import Sandbox
from gangline.domain.usage import AMOUNTS, Amount, Usage
from gangline.testing.runtime_conformance.bench import Bench, Checks, dial

CHECKS = Checks()

_CPU_S = 0.4
_MEMORY_BYTES = 96 << 20
_WORKS = (
    f"import time\nx = bytearray({_MEMORY_BYTES}); x[::4096] = b'1' * len(x[::4096])\n"
    f"while time.process_time() < {_CPU_S}: pass\n"
)
_FETCH = (
    "import os, sys, urllib.request\n"
    "data = b'x' * int(sys.argv[2])\n"
    "assert len(urllib.request.urlopen(sys.argv[1], data, timeout=20).read()) == int(sys.argv[3])"
)
_TUNNEL = (
    "import os, socket, sys, urllib.parse\n"
    "proxy = urllib.parse.urlsplit(os.environ['HTTPS_PROXY'])\n"
    "s = socket.create_connection((proxy.hostname, proxy.port), 20); f = s.makefile('rb')\n"
    "s.sendall(f'CONNECT localhost:{sys.argv[1]} HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n'.encode())\n"
    "assert b' 200 ' in f.readline() and f.readline() == b'\\r\\n'\n"
    "s.sendall(b'POST / HTTP/1.1\\r\\nContent-Length: 70000\\r\\n\\r\\n' + b'y' * 70000)\n"
    "assert len(f.read()) > 100000"
)
_HEADS = {"NO_PROXY": "", "no_proxy": ""}


async def _known(handle: Sandbox, *names: Amount) -> Usage:
    """Raises: unittest.SkipTest with the runtime's reason when it does not measure one of them."""
    usage = await handle.usage()
    for name in names:
        if getattr(usage, name) is None:
            raise unittest.SkipTest(f"does not apply: {name} is not known: {usage.measured.get(name)}")
    return usage


@CHECKS.add
async def each_amount_is_known_or_has_a_reason(bench: Bench) -> None:
    handle = await bench.start()
    for _ in range(2):
        usage = await handle.usage()
        unexplained = [name for name in AMOUNTS if getattr(usage, name) is None and not usage.measured.get(name)]
        assert unexplained == []
        await handle.exec("true")


@CHECKS.add
async def processor_time_and_memory_are_counted_over_all_lives(bench: Bench) -> None:
    handle = await bench.start()
    assert (await handle.exec(["python3", "-c", _WORKS])).ok
    first = await _known(handle, "cpu_s", "peak_memory_bytes")
    assert _CPU_S <= (first.cpu_s or 0) < 20 * _CPU_S
    assert (first.peak_memory_bytes or 0) >= _MEMORY_BYTES
    await handle.kill()
    after = await handle.usage()
    assert (after.cpu_s or 0) >= (first.cpu_s or 0), "a killed sandbox forgot what it had used"
    assert (await handle.exec(["sh", "-c", 'python3 -c "$0"', _WORKS])).ok, "the child of a command counts too"
    second = await handle.usage()
    assert (second.cpu_s or 0) >= (first.cpu_s or 0) + _CPU_S
    assert (second.peak_memory_bytes or 0) >= _MEMORY_BYTES


@CHECKS.add
async def a_command_that_is_killed_counts_too(bench: Bench) -> None:
    handle = await bench.start()
    await handle.exec(["python3", "-c", "while True: pass"], timeout_s=4.0)
    assert ((await _known(handle, "cpu_s")).cpu_s or 0) >= _CPU_S / 2


@CHECKS.add
async def bytes_over_the_proxy_are_counted_exactly(bench: Bench) -> None:
    handle = await bench.start()
    before = await _known(handle, "proxy_sent_bytes", "proxy_received_bytes")
    assert (before.proxy_sent_bytes, before.proxy_received_bytes) == (0, 0)
    sent = received = 0
    for line in ("hello", "x" * 200_000):
        assert (await handle.exec(dial(handle.proxy_url, line) if len(line) < 100 else _long(handle, len(line)))).ok
        sent, received = sent + len(line) + 1, received + len("proxy:") + len(line) + 1
        await handle.kill()
    usage = await handle.usage()
    assert (usage.proxy_sent_bytes, usage.proxy_received_bytes) == (sent, received)
    assert (usage.list_sent_bytes, usage.list_received_bytes) == (0, 0)


def _long(handle: Sandbox, length: int) -> list[str]:
    """As `dial`, with a line longer than an argument may be."""
    program = dial(handle.proxy_url, "LINE")[-1].replace("'LINE'", f"('x' * {length})")
    return ["python3", "-c", program]


class _Counting:
    """An HTTP server that counts every byte."""

    def __init__(self, answer_bytes: int) -> None:
        self.num_sent = self.num_received = self.port = 0
        self._body = b"z" * answer_bytes

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        self.num_received += len(head) + len(await reader.readexactly(length))
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(self._body) + self._body
        writer.write(answer)
        self.num_sent += len(answer)
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def _counting(answer_bytes: int) -> AsyncGenerator[_Counting]:
    host = _Counting(answer_bytes)
    server = await asyncio.start_server(host.answer, "127.0.0.1", 0, limit=1 << 24)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()


@CHECKS.isolation
async def bytes_of_listed_hosts_are_counted_exactly_at_both_ends(bench: Bench) -> None:
    """Requests that are passed on, and tunnels; a refused host counts nothing."""
    async with _counting(300_000) as host:
        try:
            handle = await bench.start(network="list", allow=(f"localhost:{host.port}", f"127.0.0.1:{host.port}"))
        except InvalidRequest as error:
            raise unittest.SkipTest(f"does not apply: {error.message}") from error
        await _known(handle, "list_sent_bytes", "list_received_bytes")
        url = f"http://localhost:{host.port}/"
        for command in (["python3", "-c", _FETCH, url, "50000", "300000"], ["python3", "-c", _TUNNEL, str(host.port)]):
            result = await handle.exec(command, env=_HEADS)
            assert result.ok, result.stderr.decode(errors="replace")
            await handle.kill()
        assert not (await handle.exec(["python3", "-c", _FETCH, "http://localhost:1/", "9", "9"], env=_HEADS)).ok
        usage = await handle.usage()
        assert (usage.list_sent_bytes, usage.list_received_bytes) == (host.num_received, host.num_sent)
        assert host.num_received > 120_000
        assert (usage.proxy_sent_bytes, usage.proxy_received_bytes) == (0, 0)
