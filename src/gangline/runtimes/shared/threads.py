"""Blocking work off the event loop that a cancelled caller does not leave running behind its back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["run_to_end"]

P = ParamSpec("P")
T = TypeVar("T")


async def run_to_end(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` in a thread. Cancelled meanwhile, wait for its end before passing the cancellation on."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
