"""Runs work with a service, either a running one or one that is started for it and stopped afterwards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from gangline.cli.service.bring_up import Plan, run_service
from gangline.cli.terminal.output import notes

if TYPE_CHECKING:
    from gangline.wire.client.running import Running, Service
    from gangline.wire.client.server import ServerClient

T = TypeVar("T")


async def with_running(address: Service, body: Callable[[ServerClient, str | None], Awaitable[T]]) -> T:
    """Run `body` with a client of the running service and its token. Raises: the errors of `body`."""
    from gangline.wire.client.server import ServerClient

    async with ServerClient(address.server_url, address.control_token) as client:
        return await body(client, address.control_token)


async def with_own(plan: Plan, body: Callable[[ServerClient, str | None], Awaitable[T]]) -> T:
    """Run `body` with a service started for it. Raises: errors of `body` and of the service."""
    from gangline.wire.client.server import ServerClient

    notes().print(f"[bold]Starting[/] engine ({plan.engine}), server and node; logs in {plan.data_dir / 'logs'}")

    async def with_live(live: Running) -> T:
        async with ServerClient(live.server_url, live.control_token) as client:
            return await body(client, live.control_token)

    return await run_service(plan, with_live)
