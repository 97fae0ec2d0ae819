"""Keeps engines at the newest weights of a run: retries pushes, and reloads weights into engines that lost them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol, TypeVar

from gangline.domain.errors import EngineError, GanglineError, NodeError, ServerUnavailable
from gangline.train.runs.records import UpdateProfile
from gangline.train.weights.update import Save, WeightUpdater

_log = logging.getLogger("gangline.trainer")

T = TypeVar("T")

_AGAIN_S = 2.0
_LOOK_S = 5.0


class Weights(WeightUpdater, Protocol):
    """The destination of new weights, such as `ServiceWeights`. save: writes the weights into a folder; called in a
    thread.
    """

    async def latest_version(self) -> int | None:
        """The highest policy version ever set; None if none was set."""
        ...

    async def ensure(self, version: int, save: Save) -> UpdateProfile | None:
        """Reload the weights into engines that lost them, for example after a restart; None if no engine had."""
        ...


class WeightsUpkeep:
    """save: writes the learner's current weights. patience_s: how long engines, nodes and server may be unreachable."""

    def __init__(self, weights: Weights, save: Save, *, patience_s: float) -> None:
        self._weights = weights
        self._save = save
        self._patience_s = patience_s
        self._pushed = 0
        self.folder = ""
        """Folder of the last pushed weights; empty if unknown."""
        self._engines_change = asyncio.Lock()

    async def latest_version(self) -> int | None:
        """The highest policy version ever set. Raises: the error of the last attempt."""
        return await self._patiently(self._weights.latest_version)

    async def push(self, version: int) -> UpdateProfile:
        """Push until every engine has the weights. Raises: the error of the last attempt."""

        async def push() -> UpdateProfile:
            async with self._engines_change:
                profile = await self._weights.push(self._save, version)
                self._pushed, self.folder = version, profile.folder
                return profile

        return await self._patiently(push)

    @contextlib.asynccontextmanager
    async def mending(self) -> AsyncGenerator[None]:
        """Reloads lost weights into restarted engines inside the block. Enter it after the first push."""
        mending = asyncio.create_task(self._mend())
        try:
            yield
        finally:
            mending.cancel()
            await asyncio.gather(mending, return_exceptions=True)

    async def _mend(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                async with self._engines_change:
                    mended = await self._weights.ensure(self._pushed, self._save)
                if mended is not None:
                    _log.warning("trainer.weights_given_again version=%d", mended.version)
            except GanglineError as error:
                _log.warning("trainer.engines_not_asked error=%s", error)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        ends_at = time.monotonic() + self._patience_s
        while True:
            try:
                return await call()
            except (EngineError, NodeError, ServerUnavailable) as error:
                if time.monotonic() > ends_at:
                    raise
                _log.warning("trainer.waits error=%s; trying again", error)
                await asyncio.sleep(_AGAIN_S)
