"""A grader whose clean runtime is another one than the agent's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gangline.domain.session import SessionResult
from gangline.domain.task import EvaluatorSpec
from gangline.node.sessions.attempt import Attempt
from support.node.attempt import lease_of, node_parts

RUNTIME = {
    "backend": "process",
    "env": {"PLACE": "grader's"},
    "prepare": [{"type": "write", "path": "tests/grade.sh", "content": "echo $(cat answer) > reward.txt"}],
}


async def ended(tmp_path: Path, command: str, grade: str) -> SessionResult:
    config: dict[str, Any] = {"command": grade, "collect": ["answer", "broken"]}
    evaluator = {"strategy": "script", "config": config, "refresh_runtime": True, "runtime": RUNTIME}
    agent = {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True}
    prepare = [{"type": "write", "path": "answer", "content": "0"}]
    runtime = {"backend": "process", "env": {"PLACE": "agent's"}, "prepare": prepare}
    async with node_parts(tmp_path) as parts:
        return await Attempt(lease_of(runtime=runtime, agent=agent, evaluator=evaluator), parts).live()


async def test_the_grader_works_in_its_own_runtime_with_what_was_collected(tmp_path: Path) -> None:
    grade = '[ "$PLACE" = "grader\'s" ] && sh tests/grade.sh'
    result = await ended(tmp_path, '[ "$PLACE" = "agent\'s" ] && [ ! -e tests ] && echo 0.5 > answer', grade)
    assert (result.outcome, result.reward) == ("completed", 0.5), result.failure


async def test_a_control_begins_with_the_files_that_the_agent_began_with(tmp_path: Path) -> None:
    """Without them this grader would fail in the control too, and the failure would count as ours."""
    result = await ended(tmp_path, "touch broken", "[ ! -e broken ] && sh tests/grade.sh")
    assert (result.outcome, result.reward) == ("agent_error", None)
    assert "without what the agent left, grading works" in result.reward_details["grading_failed"]


def test_a_runtime_of_its_own_is_a_clean_one() -> None:
    with pytest.raises(ValidationError, match="set refresh_runtime"):
        EvaluatorSpec.model_validate({"strategy": "script", "runtime": RUNTIME})
