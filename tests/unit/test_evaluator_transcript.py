"""What graders are told was said."""

from __future__ import annotations

import pytest

from gangline.domain.conversation import Document, Image, Message, Part, Text, ToolCall, ToolResult
from gangline.domain.trajectory import Trajectory
from gangline.grading.transcript import chat_messages, last_answer
from support.training.evaluation_samples import a_trace, said


def test_text_alone_is_one_string() -> None:
    message = Message("user", (Text("mush "), Text("on")))
    assert chat_messages([message]) == [{"role": "user", "content": "mush on"}]


def test_images_and_documents_stay_in_their_place() -> None:
    message = Message(
        "user", (Text("see"), Image("data:image/png;base64,aa", "low"), Document("data:text/plain;base64,bb"))
    )
    assert chat_messages([message])[0]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa", "detail": "low"}},
        {"type": "file", "file": {"file_data": "data:text/plain;base64,bb"}},
    ]


def test_a_tool_that_answers_with_an_image_is_told_so() -> None:
    message = Message("tool", (ToolResult("c1", (Text("shot"), Image("data:image/png;base64,aa"))),))
    (item,) = chat_messages([message])
    assert (item["role"], item["tool_call_id"]) == ("tool", "c1")
    assert [part["type"] for part in item["content"]] == ["text", "image_url"]


@pytest.mark.parametrize(
    ("parts", "answer"),
    [
        ((Text("41"),), "41"),
        ((Text("41"), ToolCall("c1", "submit", '{"answer": "42"}')), "42"),
        ((Text("41"), ToolCall("c1", "run", "{}"), ToolCall("c2", "submit", '{"answer": "42"}')), "42"),
        ((Text("41"), ToolCall("c1", "submit", "{}")), "41"),
        ((Text("41"), ToolCall("c1", "submit", "[")), "41"),
        ((Text("41"), ToolCall("c1", "hand_in", '{"answer": "42"}')), "41"),
    ],
)
def test_the_last_answer_is_what_was_submitted_else_what_was_said(parts: tuple[Part, ...], answer: str) -> None:
    trace = a_trace(said("assistant", "first"), said("user", "more"), Message("assistant", parts))
    whole = Trajectory(session_id="s1", task_id="t1", builder="b", traces=(trace,), num_completions=2)
    assert last_answer(whole) == answer
