"""Blocking work off the event loop that a cancelled caller does not leave running behind its back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from gangline.machine.event_loop import to_end

P = ParamSpec("P")
T = TypeVar("T")


async def run_to_end(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` in a thread. Cancelled meanwhile, wait for its end before passing the cancellation on."""
    return await to_end(asyncio.to_thread(function, *args, **kwargs))
