"""Two sandboxes of one node: one whose agent does harm, and its neighbour."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.sandbox import Sandbox
from gangline.settings.plugins import make_runtime
from gangline.testing.runtime_conformance.bench import Bench, proxies
from support.requirements import need

__all__ = ["Pair", "pair", "worst_while"]


class Pair(NamedTuple):
    """Both started, and the bench that they are on."""

    own: Sandbox
    victim: Sandbox
    bench: Bench


@pytest_asyncio.fixture(params=["sandbox", "process"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Pair]:
    runtime = make_runtime(request.param)
    try:
        await runtime.check()
    except RuntimeUnavailable as error:
        need(False, error.message)
    async with proxies() as proxy:
        bench = Bench(runtime, tmp_path, proxy, isolated=request.param == "sandbox", image=None)
        try:
            yield Pair(await bench.start(), await bench.start(), bench)
        finally:
            await bench.stop_all()


async def worst_while(harm: asyncio.Task[Any], act: Callable[[], Awaitable[None]]) -> float:
    """Seconds of the slowest of the victim's actions until the harm is done."""
    worst_s = 0.0
    while not harm.done():
        began_at = time.monotonic()
        await act()
        worst_s = max(worst_s, time.monotonic() - began_at)
        await asyncio.sleep(0.01)
    return worst_s
