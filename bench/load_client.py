"""A load generator that costs as little as Python allows: pre-encoded requests over bare keep-alive connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Load:
    """What one run of calls showed."""

    wall_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return len(self.latencies_s) / self.wall_s

    def percentile_ms(self, q: float) -> float:
        ordered = sorted(self.latencies_s)
        return 1000 * ordered[int(q * (len(ordered) - 1))]


class HttpClient(asyncio.Protocol):
    """One connection, one request at a time. Answers with a Content-Length, or chunked (the chunk frames are kept)."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._needed = 0
        self._chunked = False
        self._answered: asyncio.Future[bytes] | None = None

    @classmethod
    async def connect(cls, port: int) -> HttpClient:
        _, client = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def send(self, *request: bytes) -> bytes:
        """The answer's body. Raises: RuntimeError for any status but 200."""
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.writelines(request)
        return await self._answered

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._needed == 0:
            self._read_head()
        if self._chunked:
            if self._received.endswith(b"\r\n0\r\n\r\n"):
                self._finish(len(self._received))
        elif self._needed and len(self._received) >= self._needed:
            self._finish(self._needed)

    def _read_head(self) -> None:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._received[:end]).lower()
        self._chunked = b"\r\ntransfer-encoding: chunked" in head
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)
        self._needed = end + 4 + length

    def _finish(self, end: int) -> None:
        answer = bytes(self._received[:end])
        del self._received[:end]
        self._needed = 0
        assert self._answered is not None
        if self._answered.done():
            return
        if answer[9:12] != b"200":
            self._answered.set_exception(RuntimeError(answer[:600].decode("utf-8", "replace")))
        else:
            self._answered.set_result(answer.partition(b"\r\n\r\n")[2])

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(RuntimeError(f"the connection was closed: {exc}"))

    def close(self) -> None:
        self._transport.close()


def post(path: str, body: bytes, key: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


async def drive(port: int, concurrency: int, num_calls: int, request: Callable[[int, int], tuple[bytes, ...]]) -> Load:
    """Calls over `concurrency` connections. `request(worker, number)`: the pieces of one, made off the clock."""
    numbers = iter(range(num_calls))
    load = Load()
    clients = [await HttpClient.connect(port) for _ in range(concurrency)]

    async def work(worker: int, client: HttpClient) -> None:
        for number in numbers:
            message = request(worker, number)
            started_at_s = time.perf_counter()
            await client.send(*message)
            load.latencies_s.append(time.perf_counter() - started_at_s)

    started_at_s = time.perf_counter()
    try:
        await asyncio.gather(*(work(worker, client) for worker, client in enumerate(clients)))
        load.wall_s = time.perf_counter() - started_at_s
    finally:
        for client in clients:
            client.close()
    return load
