"""The agent's complete patch of a `swe_bench` session in a container, from submit to the artifact that is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from containers.engines import IMAGE
from containers.test_container_images import engine
from containers.test_container_sessions import run, service
from integration.test_agent_patch import EDITS, HOSTILE, PREPARE, ROW, untampered
from support.service.cli_process import UpProcess


def task(name: str, command: str) -> dict[str, Any]:
    return {
        "instruction": "whatever",
        "max_attempts": 1,
        "runtime": {"backend": name, "image": IMAGE, "prepare": [{"type": "exec", "command": PREPARE}]},
        "agent": {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True},
        "evaluator": {"strategy": "swe_bench", "refresh_runtime": True, "config": ROW},
    }


@pytest.mark.parametrize(
    ("then", "reward"),
    [("", 1.0), (HOSTILE.format(ran="~/ran"), 1.0), ("cd .. && rm -rf repo/.git", 1.0), ("git checkout a.txt", 0.0)],
    ids=["untouched", "hostile git", "no git", "unresolved"],
)
async def test_a_session_keeps_all_that_its_agent_changed(
    container_runtime: str, tmp_path: Path, then: str, reward: float
) -> None:
    up: UpProcess = service(tmp_path)
    try:
        (result,) = await run(up, task(container_runtime, f"{EDITS} {then}"))
    finally:
        up.close()
    assert (result.outcome, result.failure, result.reward) == ("completed", None, reward), result.artifacts
    patch = result.artifacts["patch.diff"]
    whole = untampered(tmp_path / "clone")
    if reward:
        assert patch == whole
    else:  # all of it but the file that the agent put back
        assert b"a/a.txt b/a.txt" in whole
        assert b"a/a.txt b/a.txt" not in patch
        assert patch.count(b"diff --git") == whole.count(b"diff --git") - 1
    assert result.reward_details["patch_bytes"] == len(patch)
    assert engine(container_runtime, "ps", "--all", "--quiet") == ""
