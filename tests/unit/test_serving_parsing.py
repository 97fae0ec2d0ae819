from __future__ import annotations

import pytest

from gangline.engines.serving.parsing import (
    CallEvent,
    ContentEvent,
    Event,
    Parsers,
    ReasoningEvent,
    ReplyParser,
    opens_reasoning,
)
from gangline.testing.tiny_tokenizer import TinyTokenizer

BOTH = Parsers("hermes", "qwen3")
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command":  "ls \\u00e9"}}\n</tool_call>'


def parse(text: str, parsers: Parsers = BOTH, *, in_reasoning: bool = False) -> list[Event]:
    parser = ReplyParser(parsers, in_reasoning=in_reasoning)
    return parser.feed(text) + parser.finish()


def test_a_reply_is_split_into_thought_text_and_call() -> None:
    assert parse(f"<think>\nhm\n</think>\n\nI look.\n{CALL}") == [
        ReasoningEvent("\nhm\n"),
        ContentEvent("\n\nI look.\n"),
        CallEvent("bash", '{"command":  "ls \\u00e9"}'),
    ]


def test_arguments_keep_the_spelling_that_was_sampled() -> None:
    (call,) = parse('<tool_call>{"arguments": {"b":1,   "a":1.0e2}, "name": "f"}</tool_call>')
    assert call == CallEvent("f", '{"b":1,   "a":1.0e2}')


def test_white_space_between_calls_is_dropped_and_text_is_not() -> None:
    call = CallEvent("bash", '{"command":  "ls \\u00e9"}')
    assert parse(f"{CALL}\n{CALL}\nthen\n{CALL}\n") == [call, call, ContentEvent("\nthen\n"), call]


@pytest.mark.parametrize(
    "body",
    ["not json", '{"name": "f"}', '{"name": "f", "arguments": "x"}', '{"name": 3, "arguments": {}}', "[" * 100_000],
)
def test_a_malformed_call_stays_text(body: str) -> None:
    text = f"<tool_call>{body}</tool_call> after"
    assert "".join(e.text for e in parse(text) if isinstance(e, ContentEvent)) == text


def test_a_call_whose_tag_never_closes_is_still_a_call_when_its_json_is_whole() -> None:
    assert parse('<tool_call>\n{"name": "f", "arguments": {}}') == [CallEvent("f", "{}")]
    assert parse('<tool_call>\n{"name": "f", "arg') == [ContentEvent('<tool_call>\n{"name": "f", "arg')]


def test_a_thought_that_never_closes_is_all_thought() -> None:
    assert parse("<think>\nso") == [ReasoningEvent("\nso")]


def test_a_thought_that_the_prompt_opened_needs_no_opening_tag() -> None:
    assert parse("so</think>yes", in_reasoning=True) == [ReasoningEvent("so"), ContentEvent("yes")]


def test_a_think_tag_in_the_middle_of_a_text_is_text() -> None:
    assert parse("say <think> aloud") == [ContentEvent("say <think> aloud")]


def test_without_parsers_everything_is_text() -> None:
    text = f"<think>x</think>{CALL}"
    assert parse(text, Parsers(None, None)) == [ContentEvent(text)]


def test_a_possible_tag_is_held_back_until_it_is_decided() -> None:
    parser = ReplyParser(Parsers("hermes", None))
    assert parser.feed("a<tool") == [ContentEvent("a")]
    assert parser.feed("box") == [ContentEvent("<toolbox")]


def test_parsers_are_chosen_by_what_the_template_writes() -> None:
    assert Parsers.detect(TinyTokenizer()) == BOTH


def test_an_open_think_tag_at_the_end_of_the_prompt_is_seen() -> None:
    tokenizer = TinyTokenizer()
    assert opens_reasoning(tokenizer, tokenizer.encode("<|im_start|>assistant\n<think>\n"))
    assert not opens_reasoning(tokenizer, tokenizer.encode("<|im_start|>assistant\n<think>\n\n</think>\n\n"))
