"""Sessions as Harbor's tools read them: sources, tool results, images, branches."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.conversation import Document, Image, Message, Text, Thinking, ToolCall, ToolResult
from gangline.domain.session import SessionResult
from gangline.domain.tokens import encode_json
from gangline.rows.atif.document import AtifReference
from gangline.rows.atif.export import atif_of, write_atif
from support.requirements import need_module
from support.strategies import Sample, session_result, user

PIXEL = base64.b64encode(b"\x89PNG fake").decode()


def result_of(*talk: Message, response: Message | None = None) -> SessionResult:
    """A session of one call."""
    sample = Sample()
    completion = sample.add(prompt=[1, 4], sampled=[10, 2], messages=talk)
    if response is not None:
        completion = msgspec.structs.replace(completion, response=response)
    return session_result(trajectory=None, completions=(completion,))


def steps_of(result: SessionResult, images: dict[str, bytes] | None = None) -> list[dict[str, Any]]:
    document = atif_of(result, {} if images is None else images)
    return json.loads(encode_json(document))["steps"]


def asks(*calls: ToolCall) -> Message:
    return Message("assistant", (Thinking("hm"), Text("Let me see."), *calls))


def test_the_main_conversation_is_the_document_and_the_others_are_inside() -> None:
    document = atif_of(session_result(), {})
    assert document is not None
    assert [step.message for step in document.steps] == [
        *("go", "reply 0", "output", "reply 1", "more", "reply 3", "last", "reply 4")
    ]
    title, aborted = document.subagent_trajectories or []
    assert [step.message for step in title.steps] == ["title", "reply 2"]
    assert title.extra["role"] == "side"
    assert aborted.extra["origin_completion"] == "c0003"
    assert aborted.extra["origin_trajectory"] == document.trajectory_id
    assert [step.is_copied_context for step in aborted.steps] == [True] * 6 + [None, None]
    assert aborted.steps[-1].metrics is not None
    assert aborted.steps[-1].metrics.extra["status"] == "aborted"
    assert (document.extra["reward"], document.extra["outcome"]) == (0.5, "completed")


def test_a_turn_whose_context_diverged_goes_on_in_its_conversation_and_says_so() -> None:
    document = atif_of(session_result(), {})
    assert document is not None
    metrics = document.steps[-1].metrics
    assert metrics is not None
    assert metrics.extra["certificate"]["cause"] == "bpe_merge"


def test_tool_results_stand_with_the_step_that_asked_for_them() -> None:
    calls = (ToolCall("a", "bash", '{"command": "ls"}'), ToolCall("b", "patch", "*** Begin"))
    results = (
        ToolResult("b", (Text("bad patch"),), is_error=True),
        ToolResult("a", (Text("x"),)),
        Text("Go on."),
    )
    asked, more, _ = steps_of(result_of(asks(*calls), Message("user", results)))
    assert asked["reasoning_content"] == "hm"
    assert [call["arguments"] for call in asked["tool_calls"]] == [{"command": "ls"}, {"input": "*** Begin"}]
    assert asked["observation"]["results"] == [
        {"source_call_id": "b", "content": "bad patch", "extra": {"is_error": True}},
        {"source_call_id": "a", "content": "x"},
    ]
    assert (more["source"], more["message"]) == ("user", "Go on.")


def test_a_tool_result_that_nobody_asked_for_is_kept() -> None:
    step, _ = steps_of(result_of(Message("tool", (ToolResult("lost", (Text("x"),)),))))
    assert (step["source"], step["message"]) == ("system", "")
    assert step["observation"]["results"] == [{"content": "x", "extra": {"call_id": "lost"}}]


def test_what_an_assistant_said_before_the_first_call_is_copied_context() -> None:
    system, example, _ = steps_of(result_of(Message("developer", (Text("Be brief."),)), asks()))
    assert system["source"] == "system"
    assert example["is_copied_context"]
    assert "metrics" not in example


def test_inline_images_become_files_beside_the_document(tmp_path: Path) -> None:
    need_module("harbor", "make .venv/.dev")
    from harbor.utils.trajectory_validator import TrajectoryValidator

    shown = Message(
        "user",
        (
            Text("Look:"),
            Image(f"data:image/png;base64,{PIXEL}"),
            Image("https://example.org/a.webp?size=2"),
            Image("https://example.org/a.svg"),
            Image("data:image/png;base64,%%%"),
            Document("data:application/pdf;base64,AAAA", name="a.pdf"),
        ),
    )
    result = result_of(shown)
    assert write_atif([result], tmp_path, agent_of=lambda task_id: f"agent of {task_id}") == 1
    path = tmp_path / "session-1.json"
    validator = TrajectoryValidator()
    assert validator.validate(path), validator.get_errors()
    assert json.loads(path.read_text())["agent"]["name"] == "agent of task-1"
    text, inline, remote, *named = json.loads(path.read_text())["steps"][0]["message"]
    assert text == {"type": "text", "text": "Look:"}
    assert (tmp_path / inline["source"]["path"]).read_bytes() == b"\x89PNG fake"
    assert remote["source"] == {"media_type": "image/webp", "path": "https://example.org/a.webp?size=2"}
    assert [part["text"] for part in named] == [
        "[image: https://example.org/a.svg]",
        "[image: data:image/png;base64]",
        "[document: a.pdf]",
    ]


def test_a_sub_agent_is_named_with_the_result_of_the_call_that_began_it() -> None:
    need_module("harbor", "make .venv/.dev")
    from harbor.utils.trajectory_validator import TrajectoryValidator

    prompt = "Find out who wrote the parser, and when."
    sample = Sample()
    call = sample.add(prompt=[1, 4], sampled=[10] * 9, messages=(user("Ask somebody."),))
    call = msgspec.structs.replace(call, response=asks(ToolCall("a", "agent", json.dumps({"prompt": prompt}))))
    sample.add(prompt=[1, 9], sampled=[11, 2], messages=(user(prompt),))
    result = session_result(completions=(call, *list(sample.tree)[1:]), trajectory=None)
    document = atif_of(result, {})
    assert document is not None
    (sub_agent,) = document.subagent_trajectories or []
    assert (sub_agent.extra["role"], sub_agent.extra["origin_completion"]) == ("sub_agent", "c0000")
    observation = document.steps[-1].observation
    assert observation is not None
    assert [(one.source_call_id, one.subagent_trajectory_ref) for one in observation.results] == [
        ("a", [AtifReference(trajectory_id=sub_agent.trajectory_id)])
    ]
    validator = TrajectoryValidator()
    assert validator.validate(json.loads(encode_json(document))), validator.get_errors()


def test_logprobs_that_are_no_numbers_are_left_out() -> None:
    result = session_result()
    first = result.completions[0]
    broken = msgspec.structs.replace(first, logprobs=first.logprobs * float("nan"))
    step = steps_of(session_result(completions=(broken,), trajectory=None))[-1]
    assert "logprobs" not in step["metrics"]
    assert step["metrics"]["completion_token_ids"] == [10, 11, 2]


def test_calls_in_tokens_are_one_conversation_without_words() -> None:
    sample = Sample()
    sample.add(prompt=[1, 4], sampled=[10, 2], messages=())
    sample.add(prompt=[1, 4, 10, 2, 7], sampled=[11, 2], messages=(), parent_id="c0000")
    steps = steps_of(session_result(completions=tuple(sample.tree), trajectory=None))
    assert [step["metrics"]["prompt_token_ids"] for step in steps] == [[1, 4], [1, 4, 10, 2, 7]]


def test_a_session_that_called_no_model_has_no_document(tmp_path: Path) -> None:
    assert write_atif([session_result(completions=(), trajectory=None)], tmp_path, agent_of=str) == 0


@pytest.mark.parametrize("status", ["complete", "aborted"])
def test_of_two_calls_that_go_on_the_one_with_more_after_it_is_the_conversation(status: str) -> None:
    sample = Sample()
    first = sample.add(prompt=[1], sampled=[10, 2], messages=(user("go"),))
    talk = (user("go"), first.response, user("on"))
    sample.add(prompt=[1, 10, 2, 3], sampled=[11, 2], messages=talk, parent_id="c0000", status=status)
    second = sample.add(prompt=[1, 10, 2, 3], sampled=[12, 2], messages=talk, parent_id="c0000")
    sample.add(
        prompt=[1, 10, 2, 3, 12, 2, 4],
        sampled=[13, 2],
        messages=(*talk, second.response, user("end")),
        parent_id="c0002",
    )
    document = atif_of(session_result(completions=tuple(sample.tree), trajectory=None), {})
    assert document is not None
    assert [step.message for step in document.steps if step.source == "agent"] == ["reply 0", "reply 2", "reply 3"]
    assert [one.trajectory_id for one in document.subagent_trajectories or []] == ["session-1.c0001"]
