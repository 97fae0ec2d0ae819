"""What combining evaluators found, as a step's record shows it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.lifecycle import Outcome
from gangline.settings.plugins import make_evaluator
from gangline.train.run.trainer import mean_reward_parts
from support.node.folder_runtime import FolderRuntime
from support.training.evaluation_samples import a_context
from support.training.samples import session

COMPLETED: dict[str, Any] = {"strategy": "session_completed", "name": "completed"}
SAID: dict[str, Any] = {
    "strategy": "test_on_output",
    "name": "said",
    "config": {"checks": [{"kind": "equals", "value": "yes"}]},
}


def found_by(folder: Path, evaluator: dict[str, Any], *ends: tuple[Outcome, bytes]) -> dict[str, float]:
    """ends: outcome and output of each session."""

    async def all_details() -> list[dict[str, Any]]:
        made = make_evaluator(evaluator["strategy"], evaluator["config"])
        runtime = FolderRuntime(folder / evaluator["strategy"])
        contexts = (a_context(runtime, outcome=outcome, stdout=said) for outcome, said in ends)
        return [(await made.evaluate(context)).details for context in contexts]

    details = asyncio.run(all_details())
    return mean_reward_parts(session(f"s{index}", 0.0, reward_details=one) for index, one in enumerate(details))


def test_parts_are_means_and_gates_shares_also_where_they_are_nested(tmp_path: Path) -> None:
    staged = {"strategy": "staged", "name": "steps", "config": {"stages": [COMPLETED, SAID]}}
    composite = {"strategy": "composite", "config": {"parts": [staged, {**SAID, "weight": 0.5}]}}
    ends: list[tuple[Outcome, bytes]] = [("completed", b"yes"), ("completed", b"no"), ("agent_error", b"yes")]
    assert found_by(tmp_path, composite, *ends) == pytest.approx(
        {"steps": 2 / 3, "said": 2 / 3, "steps.completed": 2 / 3, "steps.said": 1 / 3}
    )
    found = found_by(tmp_path, staged, *ends)
    assert found == pytest.approx({"completed": 2 / 3, "said": 1 / 3})


@pytest.mark.parametrize(
    "details",
    [{}, {"parts": 3}, {"parts": {"a": 1}}, {"parts": {"a": {"reward": "much"}}}, {"stages": [1]}],
    ids=str,
)
def test_details_of_another_kind_are_no_parts(details: dict[str, Any]) -> None:
    assert mean_reward_parts([session("s0", 1.0, reward_details=details)]) == {}
