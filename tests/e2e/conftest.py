"""Shared by the tests of whole commands."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from support.service.cli_process import Start, UpProcess


@pytest.fixture
def start(tmp_path: Path) -> Generator[Start]:
    """Start an `up` with options; all are ended afterwards."""
    started: list[UpProcess] = []

    def go(*options: object, **settings: Any) -> UpProcess:
        started.append(UpProcess(tmp_path / f"up{len(started)}", *options, **settings))
        return started[-1]

    yield go
    for one in started:
        one.close()
