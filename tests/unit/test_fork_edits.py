"""Where the edit of a fork goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.conversation import Image, Message, Text, ToolResult
from gangline.node.replay.replay import edited

EDIT = "edited"


def user(*parts: Text | Image | ToolResult) -> Message:
    return Message("user", parts)


ANSWER = Message("assistant", (Text("answer"),))
PICTURE = Image("data:image/png;base64,cG5n")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((user(Text("old")),), (user(Text(EDIT)),)),
        ((user(Text("first")), user(Text("second"))), (user(Text("first")), user(Text(EDIT)))),
        (
            (Message("tool", (ToolResult("a", (Text("x"), PICTURE), is_error=True),)),),
            (Message("tool", (ToolResult("a", (Text(EDIT),), is_error=True),)),),
        ),
        (
            (user(ToolResult("a", (Text("x"),)), ToolResult("b", ()), PICTURE),),
            (user(ToolResult("a", (Text("x"),)), ToolResult("b", (Text(EDIT),)), PICTURE),),
        ),
        (
            (user(ToolResult("a", (Text("x"),)), Text("a reminder")), user(Text("another"))),
            (user(ToolResult("a", (Text(EDIT),)), Text("a reminder")), user(Text("another"))),
        ),
        ((user(Text("kept by"), PICTURE), user(PICTURE)), (user(Text(EDIT), PICTURE), user(PICTURE))),
        ((user(PICTURE),), (user(PICTURE),)),
        ((), ()),
    ],
)
def test_the_newest_text_behind_the_answer_is_replaced(before: tuple[Message, ...], after: tuple[Message, ...]) -> None:
    assert edited((user(Text("ask")), ANSWER, *before), 1, EDIT) == (user(Text("ask")), ANSWER, *after)


@given(
    st.lists(st.text(max_size=3), min_size=1, max_size=3), st.lists(st.sampled_from(["user", "assistant"]), max_size=6)
)
def test_later_turns_do_not_move_it(new: list[str], later: list[str]) -> None:
    head = (user(Text("ask")), ANSWER, *(user(Text(text)) for text in new))
    rest = (ANSWER, *(Message(role, (Text("later"),)) for role in later))  # type: ignore[arg-type]
    first = edited(head, 1, EDIT)
    assert edited((*head, *rest), 1, EDIT) == (*first, *rest)
    assert edited(first, 1, EDIT) == first
