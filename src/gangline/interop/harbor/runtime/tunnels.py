"""The ways out of a sandbox: to the node's proxy, and to the hosts of its list. Each is a listener on the sandbox's own
loopback, whose connections come over the link."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping

from gangline.domain.contracts import RuntimeStart
from gangline.interop.harbor.runtime.streams import SocketStream, Wire
from gangline.sandbox.network.forwarding import Forwarder
from gangline.sandbox.network.relay import MAX_CONNECTIONS
from gangline.sandbox.shared.accounts import Traffic

__all__ = ["Tunnels"]


class Tunnels:
    """Those of one sandbox, over all its lives."""

    def __init__(self, start: RuntimeStart) -> None:
        self.env: Mapping[str, str] = {}
        """Variables by which programs find the way to the list's hosts."""
        self.traffic = {"proxy": Traffic(), "list": Traffic()}
        self._start = start
        self._open: set[SocketStream] = set()
        self._forwarder: Forwarder | None = None

    @property
    def ports(self) -> list[int]:
        """Ports of the listeners in the sandbox: that of the proxy, and 0 for any where there is a list."""
        start = self._start
        if start.spec.network == "none" or start.proxy_port is None:
            return []
        return [start.proxy_port, 0] if start.spec.network_rules else [start.proxy_port]

    def connected(self, wire: Wire, index: int, number: int) -> None:
        """A program in the sandbox has dialled the listener `index`."""
        self._open = {stream for stream in self._open if stream.is_open}
        if len(self._open) >= MAX_CONNECTIONS:
            wire.say(number, b"R")
        elif index == 0:
            self._open.add(SocketStream(wire, number, self._dial, self.traffic["proxy"]))
        else:
            self._open.add(SocketStream(wire, number, self._forwarded))

    async def _dial(self) -> socket.socket:
        """Raises: OSError."""
        outwards = socket.socket()
        outwards.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(outwards, ("127.0.0.1", self._start.proxy_port))
        except BaseException:
            outwards.close()
            raise
        return outwards

    async def _forwarded(self) -> socket.socket:
        if self._forwarder is None:
            rules, traffic = self._start.spec.network_rules, self.traffic["list"]
            self._forwarder = Forwarder(rules, self._start.runtime_id, traffic=traffic)
        ours, theirs = socket.socketpair()
        await self._forwarder.take(theirs)
        return ours

    async def close(self) -> None:
        """Idempotent."""
        for stream in self._open:
            await stream.close()
        self._open.clear()
        if self._forwarder is not None:
            await self._forwarder.close()
            self._forwarder = None
