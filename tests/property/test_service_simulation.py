"""Ten thousand ways in which a service can go wrong, each from a seed, each to its good end.

`GANGLINE_SCHEDULES=10000` runs that many; `GANGLINE_SCHEDULE=SEED` replays the one that failed. The decisions alone are
quick, and run through many more schedules than the SQL store; the same seed is the same schedule for both.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from simulated_servers import PureServer, Server, SqlServer
from simulation import LEASE_S, World

PURE_SCHEDULES = 2000
SQL_SCHEDULES = 40


def seeds(num_by_default: int) -> range:
    """What the environment asks for."""
    if (one := os.environ.get("GANGLINE_SCHEDULE")) is not None:
        return range(int(one), int(one) + 1)
    return range(int(os.environ.get("GANGLINE_SCHEDULES", num_by_default)))


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
def test_the_sql_store_brings_every_schedule_to_its_good_end() -> None:
    for seed in seeds(SQL_SCHEDULES):
        with tempfile.TemporaryDirectory() as folder:
            live_through(seed, lambda clock: SqlServer(Path(folder) / "gangline.db", clock, LEASE_S))
