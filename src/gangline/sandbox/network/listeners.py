"""The hosts that a sandbox with its own network can reach: the node's proxy, and the hosts of its list."""

from __future__ import annotations

from gangline.domain.sandbox import RuntimeStart
from gangline.sandbox.network.forwarding import Forwarder, proxy_variables
from gangline.sandbox.network.relay import Relay, listening_inside
from gangline.sandbox.shared.accounts import Traffic


class NetworkListeners:
    """Listeners inside a sandbox's network, reopened for each life and served from outside."""

    def __init__(self) -> None:
        self.env: dict[str, str] = {}
        """Variables that point programs to the listed hosts."""
        self.traffic = {"proxy": Traffic(), "list": Traffic()}
        """Over all lives."""
        self._relay: Relay | None = None
        self._forwarder: Forwarder | None = None

    async def open(self, label: str, proc_fd: int, start: RuntimeStart) -> None:
        """label: the sandbox's. proc_fd: the /proc folder of a process in the network. Raises: RuntimeFailed."""
        assert start.proxy_port is not None
        listening = await listening_inside(label, proc_fd, start.proxy_port)
        self._relay = Relay(start.proxy_port, self.traffic["proxy"])
        await self._relay.serve(listening)
        if rules := start.spec.network_rules:
            listening = await listening_inside(label, proc_fd, 0)
            self.env = proxy_variables(int(listening.getsockname()[1]))
            self._forwarder = Forwarder(rules, start.runtime_id, traffic=self.traffic["list"])
            await self._forwarder.serve(listening)

    async def close(self) -> None:
        """Idempotent."""
        relay, self._relay = self._relay, None
        forwarder, self._forwarder = self._forwarder, None
        if relay is not None:
            await relay.close()
        if forwarder is not None:
            await forwarder.close()
