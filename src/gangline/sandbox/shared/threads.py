"""Blocking work off the event loop that does not keep running after its caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from gangline.machine.event_loop import to_end

P = ParamSpec("P")
T = TypeVar("T")


async def run_to_end(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` in a thread. When cancelled, wait for it to end before re-raising."""
    return await to_end(asyncio.to_thread(function, *args, **kwargs))
