"""A Ray of this process, and verl's transfer queue in it."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])  # Ray's workers find `support` by it


@pytest.fixture(scope="session")
def queue() -> Generator[Any]:
    """The package `transfer_queue`, running."""
    import ray
    import transfer_queue
    from omegaconf import OmegaConf

    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000)
    storage = {"SimpleStorage": {"num_data_storage_units": 1}}
    transfer_queue.init(OmegaConf.create({"backend": storage}))
    yield transfer_queue
    transfer_queue.close()
    ray.shutdown()
