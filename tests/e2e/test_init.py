"""`gangline init`: each folder runs at once, by the commands that it prints, over a service and a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from support.engines.tokenizers import qwen3_folder
from support.requirements import need_command, need_module, need_tool
from support.service.cli_process import UpProcess, gangline
from support.service.first_agents import make_folder, next_steps, replies, run_steps


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Generator[UpProcess]:
    need_command("bwrap", "apt-get install bubblewrap")
    service = UpProcess(tmp_path_factory.mktemp("up"), script=replies("base", "math", "swe"))
    assert "server_url" in service.ready()
    yield service
    service.close()


def started(steps: list[str]) -> list[str]:
    """The steps without the start of the service, which runs already."""
    (start,) = [step for step in steps if step.startswith("gangline up")]
    return [step for step in steps if step != start]


@pytest.mark.parametrize("template", ["openai", "math", "swe"])
def test_the_next_steps_give_full_rewards_and_rows(up: UpProcess, tmp_path: Path, template: str) -> None:
    need_module("openai", "make .venv/.demo")
    steps = next_steps(make_folder(tmp_path / "mine", template))
    printed = run_steps(started(steps), tmp_path, up.data)
    assert "experiment.yaml is valid: 64 tasks and 32 held-out ones" in printed
    shown = json.loads(gangline("status", f"{template}-1", "--json", "--data", up.data).stdout)
    assert shown["rewards"] == [1.0] * 4
    rows = [path for path in (tmp_path / "mine").rglob("*.jsonl") if path.name not in ("tasks.jsonl", "held_out.jsonl")]
    assert sum(len(path.read_text().splitlines()) for path in rows) == 4


def test_claude_code_uses_an_mcp_server_and_earns_its_reward(tmp_path: Path) -> None:
    need_command("bwrap", "apt-get install bubblewrap")
    need_tool("claude")
    need_module("mcp", "make .venv/.dev")
    service = UpProcess(
        tmp_path,
        "--engine",
        f"scripted:{tmp_path / 'replies.json'}",
        "--tokenizer",
        qwen3_folder(),
        script=None,
    )
    (tmp_path / "replies.json").write_text(json.dumps(replies("claude-code")))
    try:
        assert service.ready(), "the service did not start"
        steps = next_steps(make_folder(tmp_path / "mine", "claude-code"))
        wanted = [step for step in started(steps) if not step.startswith("gangline harness install")]
        assert len(started(steps)) == len(wanted) + 1
        run_steps(wanted, tmp_path, service.data)
        task = json.loads(gangline("status", "claude-code-1", "--json", "--data", service.data).stdout)
        assert task["rewards"] == [1.0] * 4
    finally:
        service.close()


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("mine")
    refused = gangline("init", tmp_path)
    assert refused.returncode == 5
    assert "reward.py" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["reward.py"]
    assert (tmp_path / "reward.py").read_text() == "mine"


def test_an_unknown_template_brings_the_nearest_one(tmp_path: Path) -> None:
    refused = gangline("init", tmp_path / "mine", "--template", "langgrap")
    assert refused.returncode == 2
    assert "Did you mean 'langgraph'?" in refused.stderr
    assert not (tmp_path / "mine").exists()
