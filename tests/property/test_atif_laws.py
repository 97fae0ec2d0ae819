"""Harbor's own validator accepts every session as a document, and the document holds every call once, exactly."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings

from gangline.domain.session import SessionResult
from gangline.domain.tokens import encode_json
from gangline.rows.atif.export import atif_of
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder
from support.requirements import need_module
from support.strategies import Sample, completion_trees

few = settings(max_examples=60, deadline=None)


def document_of(sample: Sample) -> dict[str, Any]:
    result = SessionResult(
        session_id="session-1",
        task_id="task-1",
        node_id="node-1",
        attempt=1,
        fence=1,
        outcome="completed",
        reward=0.5,
        trajectory=PrefixMergingBuilder().build(sample.tree, session_id="session-1", task_id="task-1"),
        completions=tuple(sample.tree),
    )
    document = atif_of(result, {})
    return {} if document is None else json.loads(encode_json(document))


def conversations(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [document, *document.get("subagent_trajectories", [])]


@pytest.fixture(scope="module")
def validator() -> Any:
    need_module("harbor", "make .venv/.dev")
    from harbor.utils.trajectory_validator import TrajectoryValidator

    return TrajectoryValidator()


@few
@given(sample=completion_trees().filter(lambda sample: len(sample.tree) > 0))
def test_harbor_accepts_every_session(validator: Any, sample: Sample) -> None:
    assert validator.validate(document_of(sample)), validator.get_errors()


@few
@given(sample=completion_trees().filter(lambda sample: len(sample.tree) > 0))
def test_every_call_is_one_step_with_its_exact_ids(sample: Sample) -> None:
    steps = [step for one in conversations(document_of(sample)) for step in one["steps"]]
    calls = {step["metrics"]["extra"]["completion_id"]: step for step in steps if "metrics" in step}
    counted = Counter(step["metrics"]["extra"]["completion_id"] for step in steps if "metrics" in step)
    assert counted == Counter({completion.completion_id: 1 for completion in sample.tree})
    for completion in sample.tree:
        metrics = calls[completion.completion_id]["metrics"]
        assert metrics["prompt_token_ids"] == sample.prompts[completion.completion_id]
        assert metrics["completion_token_ids"] == completion.sampled_ids.tolist()
        assert metrics["logprobs"] == completion.logprobs.tolist()
        assert metrics["extra"]["trainable"] == completion.trainable


@few
@given(sample=completion_trees().filter(lambda sample: len(sample.tree) > 0))
def test_a_conversation_says_all_that_its_last_call_was_told(sample: Sample) -> None:
    """Texts of the steps, in order; each call's reply stands where the next call's messages have it."""
    for one in conversations(document_of(sample)):
        *before, last = one["steps"]
        completion_id = last["metrics"]["extra"]["completion_id"]
        told = [part.text for message in sample.messages[completion_id] for part in message.parts]
        assert [step["message"] for step in before] == told
        assert all(step.get("is_copied_context") or "metrics" in step for step in before if step["source"] == "agent")
