"""A forward proxy that forwards anything to anywhere: the missing wall of network `list`.

An address outside loopback stands for one of a cloud, and is answered by a stand-in with `INSIDE`: no packet leaves
this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from urllib.parse import urlsplit

__all__ = ["INSIDE", "OpenForwarding"]

INSIDE = b"credentials of this machine"


class OpenForwarding:
    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self.env: dict[str, str] = {}

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self.env = {"HTTP_PROXY": url, "HTTPS_PROXY": url, "http_proxy": url, "https_proxy": url}

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError, IndexError, UnicodeError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, target = head.split(b" ")[:2]
                tunnel = method.upper() == b"CONNECT"
                url = urlsplit(f"//{target.decode()}" if tunnel else target.decode())
                if tunnel:
                    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                    await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._fetched(url.hostname or "", url.port or 80))
                await writer.drain()
        writer.close()

    async def _fetched(self, host: str, port: int) -> bytes:
        address = str(socket.getaddrinfo(host.rstrip("."), port, type=socket.SOCK_STREAM)[0][4][0])
        mapped = getattr(ipaddress.ip_address(address), "ipv4_mapped", None)
        if not (mapped or ipaddress.ip_address(address)).is_loopback and address != "0.0.0.0":
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(INSIDE) + INSIDE
        there, back = await asyncio.open_connection(address, port)
        back.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await back.drain()
        answer = await there.read()
        back.close()
        return answer
