"""A revoked token's open streams end soon, though nothing happens on the service."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from integration.test_server_callbacks import served


@pytest.mark.parametrize("role", ["read", "submit", "operate", "admin"])
async def test_a_quiet_event_stream_ends_with_its_token(tmp_path: Path, role: str) -> None:
    async with served(tmp_path) as admin:
        made = await admin.create_token(role=role, tenant="alpha")  # type: ignore[arg-type]
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {made.token}"}) as http,
            http.get(f"{admin.url}/v1/events") as stream,
        ):
            await stream.content.readline()
            await admin.revoke_token(made.view.token_id)
            async with asyncio.timeout(8):  # its keep-alive is 15 s
                await stream.read()
