"""Messages that are fitted to a template: whatever a client sends, and whatever a template does not take."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.domain.conversation import Image, Message, Part, Text, Thinking, ToolCall, ToolResult
from gangline.domain.node_views import TemplateFacts
from gangline.models.engines.templates.fitting import fit

FLAGS = (
    "takes_system",
    "takes_system_alone",
    "takes_several_system",
    "takes_late_system",
    "takes_system_after_results",
    "takes_neighbours",
    "takes_reply_first",
    "takes_empty_replies",
    "takes_user_after_results",
    "takes_results_without_calls",
    "takes_calls_without_results",
    "takes_text_and_thinking_with_calls",
)
taken = st.sampled_from([True, False, None])


@st.composite
def facts(draw: st.DrawFn) -> TemplateFacts:
    values: dict[str, Any] = {name: draw(taken) for name in FLAGS}
    return TemplateFacts(**values, call_ids=draw(st.sampled_from(["any", "nine", None])), prints_call_ids=True)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    """Each text is its own word."""
    kinds = draw(st.lists(st.sampled_from(["system", "developer", "user", "picture", "reply", "call", "results"])))
    messages: list[Message] = []
    open_calls: list[str] = []
    for number, kind in enumerate(kinds):
        word = Text(f"w{number}.")
        match kind:
            case "reply":
                said: tuple[Part, ...] = (word,) if draw(st.booleans()) else ()
                messages.append(Message("assistant", said))
                open_calls = []
            case "call":
                open_calls = [f"call_{number}_{each}" for each in range(draw(st.integers(1, 3)))]
                said = (Thinking(f"t{number}."), word) if draw(st.booleans()) else ()
                calls = tuple(ToolCall(call_id, "look", "{}") for call_id in open_calls)
                messages.append(Message("assistant", (*said, *calls)))
            case "results":
                ids = [*open_calls, *draw(st.lists(st.just("of_nobody"), max_size=1))]
                results = [ToolResult(one, (Text(f"r{number}_{at}."),)) for at, one in enumerate(ids)]
                if draw(st.booleans()):
                    messages.append(Message("user", (*results, word)))
                else:
                    messages += [Message("tool", (result,)) for result in results]
            case "picture":
                messages.append(Message("user", (Image("https://x/y.png"), word)))
            case _:
                messages.append(Message(kind, (word,)))  # pyright: ignore[reportArgumentType]
    return tuple(messages)


def words(messages: tuple[Message, ...]) -> list[str]:
    """As they stand in a prompt: a message's results come before its other parts."""
    found: list[str] = []
    for message in messages:
        results = [part for part in message.parts if isinstance(part, ToolResult)]
        pieces = [piece for part in results for piece in part.content]
        for part in (*pieces, *message.parts):
            if isinstance(part, (Text, Thinking)):
                found += part.text.split()
            elif isinstance(part, Image):
                found.append(part.url)
    return found


@given(conversations(), facts())
@settings(max_examples=200, deadline=None)
def test_every_text_stays_once_and_in_its_order(messages: tuple[Message, ...], template: TemplateFacts) -> None:
    fitted, _ = fit(messages, template)
    assert words(fitted) == words(messages)


@given(conversations(), facts())
@settings(max_examples=200, deadline=None)
def test_what_was_fitted_is_the_front_of_what_is_fitted_later(
    messages: tuple[Message, ...], template: TemplateFacts
) -> None:
    whole, _ = fit(messages, template)
    for number, message in enumerate(messages):
        if message.role == "assistant":
            front, _ = fit(messages[: number + 1], template)
            assert _apart(whole)[: len(_apart(front))] == _apart(front)


def _apart(messages: tuple[Message, ...]) -> list[tuple[str, Part]]:
    """Messages without a change stay whole, else they are taken apart: to an engine it is the same."""
    apart: list[tuple[str, Part]] = []
    for message in messages:
        results = [part for part in message.parts if isinstance(part, ToolResult)]
        apart += [("tool", part) for part in results]
        apart += [(message.role, part) for part in message.parts if not isinstance(part, ToolResult)]
    return apart


@given(conversations(), facts())
@settings(max_examples=200, deadline=None)
def test_fitted_messages_need_no_other_change(messages: tuple[Message, ...], template: TemplateFacts) -> None:
    fitted, _ = fit(messages, template)
    again, changes = fit(fitted, template)
    assert again == fitted
    assert changes == {}


@given(conversations())
def test_a_template_that_takes_everything_or_is_unknown_is_sent_the_same_object(messages: tuple[Message, ...]) -> None:
    flags: dict[str, Any] = dict.fromkeys(FLAGS, True)
    everything = TemplateFacts(**flags, takes_parallel_calls=True, call_ids="any")
    for template in (everything, TemplateFacts()):
        fitted, changes = fit(messages, template)
        assert fitted is messages
        assert changes == {}


@given(conversations(), facts())
def test_messages_without_a_named_change_are_the_same_object(
    messages: tuple[Message, ...], template: TemplateFacts
) -> None:
    fitted, changes = fit(messages, template)
    assert (fitted is messages) == (not changes)


@given(conversations())
def test_calls_and_their_results_keep_one_id(messages: tuple[Message, ...]) -> None:
    fitted, _ = fit(messages, TemplateFacts(call_ids="nine"))
    pairs: Counter[tuple[str, str]] = Counter()
    for before, after in zip(messages, fitted, strict=True):
        for one, other in zip(before.parts, after.parts, strict=True):
            if isinstance(one, (ToolCall, ToolResult)) and isinstance(other, (ToolCall, ToolResult)):
                assert re.fullmatch("[a-zA-Z0-9]{9}", other.call_id)
                pairs[one.call_id, other.call_id] += 1
    assert len({before for before, _ in pairs}) == len({after for _, after in pairs}) == len(pairs)
