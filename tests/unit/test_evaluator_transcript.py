"""What graders are told was said."""

from __future__ import annotations

from gangline.domain.conversation import Document, Image, Message, Text, ToolResult
from gangline.evaluators.transcript import chat_messages


def test_text_alone_is_one_string() -> None:
    said = Message("user", (Text("mush "), Text("on")))
    assert chat_messages([said]) == [{"role": "user", "content": "mush on"}]


def test_images_and_documents_stay_in_their_place() -> None:
    said = Message(
        "user", (Text("see"), Image("data:image/png;base64,aa", "low"), Document("data:text/plain;base64,bb"))
    )
    assert chat_messages([said])[0]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa", "detail": "low"}},
        {"type": "file", "file": {"file_data": "data:text/plain;base64,bb"}},
    ]


def test_a_tool_that_answers_with_an_image_is_told_so() -> None:
    said = Message("tool", (ToolResult("c1", (Text("shot"), Image("data:image/png;base64,aa"))),))
    (item,) = chat_messages([said])
    assert (item["role"], item["tool_call_id"]) == ("tool", "c1")
    assert [part["type"] for part in item["content"]] == ["text", "image_url"]
