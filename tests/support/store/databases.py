"""Databases for tests of the store: SQLite in a folder, and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.store.postgres import Cluster, running_cluster

__all__ = ["any_database", "postgres"]


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(params=["sqlite", "postgresql"])
def any_database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """What `TaskStore` opens; empty."""
    if request.param == "sqlite":
        return str(tmp_path / "gangline.db")
    return request.getfixturevalue("postgres").new_database()
