"""Calls of which a test wants only the status: the answer is read and let go of, so that no connection stays open."""

from __future__ import annotations

from typing import Any

import aiohttp

__all__ = ["status_of"]


async def status_of(http: aiohttp.ClientSession, method: str, path: str, **call: Any) -> int:
    """Of the answer."""
    async with http.request(method, path, **call) as response:
        await response.read()
        return response.status
