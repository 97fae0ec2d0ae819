"""Agents of `gangline init` on frameworks from PyPI: the printed steps, the installation included, as they stand."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from support.requirements import need_command
from support.service.cli_process import UpProcess, gangline
from support.service.first_agents import make_folder, next_steps, replies, run_steps


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Generator[UpProcess]:
    need_command("bwrap", "apt-get install bubblewrap")
    service = UpProcess(tmp_path_factory.mktemp("up"), script=replies("smolagents", "base"))
    assert "server_url" in service.ready()
    yield service
    service.close()


@pytest.mark.parametrize("template", ["langgraph", "pydantic-ai", "openai-agents", "smolagents"])
def test_the_framework_runs_from_its_own_environment(up: UpProcess, tmp_path: Path, template: str) -> None:
    steps = next_steps(make_folder(tmp_path / "mine", template))
    assert "python3 -m venv .venv" in steps
    run_steps([step for step in steps if not step.startswith("gangline up")], tmp_path, up.data)
    task = json.loads(gangline("status", f"{template}-1", "--json", "--data", up.data).stdout)
    assert task["rewards"] == [1.0] * 4
