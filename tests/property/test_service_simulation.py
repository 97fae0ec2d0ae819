"""Ten thousand ways in which a service can go wrong, each from a seed, each to its good end.

`GANGLINE_SCHEDULES=10000` runs that many, over PostgreSQL a tenth; `GANGLINE_SCHEDULE=SEED` replays one that failed.
The decisions alone are quick, and run through many more schedules than the SQL store; the same seed is the same
schedule for all. SQLite is in memory where the machine has a folder there: a power cut is not one of the ways.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from support.chaos.simulated_servers import PureServer, Server, SqlServer
from support.chaos.simulation import LEASE_S, World
from support.store.postgres import Cluster

PURE_SCHEDULES = 2000
IN_MEMORY = Path("/dev/shm")
SQLITE_SCHEDULES = 40
POSTGRESQL_SCHEDULES = 8


def seeds(num_by_default: int, *, share: int = 1) -> range:
    """What the environment asks for, or its `share`-th part."""
    if (one := os.environ.get("GANGLINE_SCHEDULE")) is not None:
        return range(int(one), int(one) + 1)
    asked = os.environ.get("GANGLINE_SCHEDULES")
    return range(num_by_default if asked is None else int(asked) // share)


def live_through(seed: int, make_server: Callable[[Callable[[], float]], Server]) -> None:
    world = World(seed, make_server)
    with closing(world.server):
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"GANGLINE_SCHEDULE={seed} at {world.now:.2f} s: {error!r}") from error


@pytest.mark.timeout(7200)
def test_the_decisions_bring_every_schedule_to_its_good_end() -> None:
    for seed in seeds(PURE_SCHEDULES):
        live_through(seed, lambda clock: PureServer(clock, LEASE_S))


@pytest.mark.timeout(7200)
def test_the_store_over_sqlite_brings_every_schedule_to_its_good_end() -> None:
    place = IN_MEMORY if IN_MEMORY.is_dir() else None
    for seed in seeds(SQLITE_SCHEDULES):
        with tempfile.TemporaryDirectory(dir=place) as folder:
            live_through(seed, lambda clock: SqlServer(Path(folder) / "gangline.db", clock, LEASE_S))


@pytest.mark.timeout(7200)
def test_the_store_over_postgresql_brings_every_schedule_to_its_good_end(postgres: Cluster) -> None:
    for seed in seeds(POSTGRESQL_SCHEDULES, share=10):
        live_through(seed, lambda clock: SqlServer(postgres.new_database(), clock, LEASE_S))
