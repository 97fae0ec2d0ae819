"""An engine as a session of a node sees it: the only backend of its pool."""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager, nullcontext

from gangline.models.engines.contract import Engine
from gangline.node.backends.engine import Assignment, Backend, BackendSpec, PooledEngine
from gangline.node.backends.gate import GateMeter

__all__ = ["pooled"]


class _OneBackend:
    """Implements `Backends`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def backend_of(self, assignment: Assignment) -> Backend:
        return self._backend

    def turn(self, assignment: Assignment, meter: GateMeter) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def is_lost(self, backend: Backend) -> bool:
        return False


async def pooled(engine: Engine, *, is_traced: bool = False) -> PooledEngine:
    backend = Backend(
        backend_id="b",
        number=0,
        spec=BackendSpec("http://engine"),
        engine=engine,
        capabilities=await engine.probe(),
        identity={},
        is_near=True,
        state="healthy",
        since=time.time(),
    )
    return PooledEngine(_OneBackend(backend), Assignment("s", "t", backend), is_traced=is_traced)
