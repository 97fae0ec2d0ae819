"""Evaluators made of evaluators, in a node: clean runtimes, controls and artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gangline.domain.session import SessionResult
from gangline.node.sessions.attempt import Attempt
from support.node.attempt import lease_of, node_parts


async def graded(tmp_path: Path, evaluator: dict[str, Any], command: str = "true") -> SessionResult:
    agent = {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True}
    async with node_parts(tmp_path) as parts:
        return await Attempt(lease_of(agent=agent, evaluator=evaluator), parts).live()


def part(name: str, command: str, **config: Any) -> dict[str, Any]:
    return {"strategy": "script", "name": name, "config": {"command": command, **config}}


async def test_each_part_that_grades_clean_has_a_clean_runtime_of_its_own(tmp_path: Path) -> None:
    command = "test ! -e trap && touch trap && echo 1 > reward.txt"
    parts = [part(name, command, collect=["answer"]) for name in ("first", "second", "third")]
    evaluator = {"strategy": "composite", "config": {"parts": parts}, "refresh_runtime": True}
    result = await graded(tmp_path, evaluator, "touch trap answer")
    assert (result.outcome, result.reward) == ("completed", 3.0), result.failure
    assert not list((tmp_path / "runtimes").iterdir())


async def test_a_part_that_the_agent_spoiled_is_the_agents_failure(tmp_path: Path) -> None:
    parts = [part("spoiled", "test ! -e trap && echo 1 > reward.txt"), {"strategy": "session_completed"}]
    evaluator = {"strategy": "composite", "config": {"parts": parts}, "on_failure": -1.0}
    result = await graded(tmp_path, evaluator, "touch trap")
    assert (result.outcome, result.reward) == ("agent_error", -1.0)
    assert result.failure is not None
    assert (result.failure.code, "spoiled: the grading command" in result.failure.message) == ("grading_spoiled", True)
