"""The pools of a node's stages, and their sizes."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["PoolSizes", "Pools"]


class PoolSizes(BaseModel):
    """How many sessions of a node may be in each stage at once."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    init_workers: int = Field(default=4, ge=1)
    ready_slots: int = Field(default=8, ge=1)
    """Sessions before RUN (in INIT or READY): the buffer of prepared runtimes. A node leases into its free places."""
    run_slots: int = Field(default=16, ge=1)
    postrun_workers: int = Field(default=4, ge=1)

    @property
    def capacity(self) -> int:
        return self.ready_slots + self.run_slots + self.postrun_workers


class Pools:
    """One semaphore a stage, so that the stages of different sessions overlap and none blocks another."""

    def __init__(self, sizes: PoolSizes) -> None:
        self.sizes = sizes
        self.init = asyncio.Semaphore(sizes.init_workers)
        self.run = asyncio.Semaphore(sizes.run_slots)
        self.postrun = asyncio.Semaphore(sizes.postrun_workers)
