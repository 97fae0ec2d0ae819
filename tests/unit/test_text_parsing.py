from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.models.language.parsing.detect import detect_parsers, opens_thinking
from gangline.models.language.parsing.events import CallEvent, Event, TextEvent, ThinkingEvent
from gangline.models.language.parsing.parser import Parsers, ReplyParser, ToolFormat
from gangline.models.language.tokenizer import load_tokenizer
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from support.engines.tokenizers import qwen3_folder, smollm2_name

BOTH = Parsers("hermes", "qwen3")
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command":  "ls \\u00e9"}}\n</tool_call>'


def parse(text: str, parsers: Parsers = BOTH, *, in_thinking: bool = False) -> list[Event]:
    parser = ReplyParser(parsers, in_thinking=in_thinking)
    return joined(parser.feed(text) + parser.finish())


def joined(events: list[Event]) -> list[Event]:
    """Neighbouring texts as one."""
    found: list[Event] = []
    for event in events:
        if isinstance(event, TextEvent) and found and isinstance(found[-1], TextEvent):
            found[-1] = TextEvent(found[-1].text + event.text)
        else:
            found.append(event)
    return found


def test_a_reply_is_split_into_thought_text_and_call() -> None:
    assert parse(f"<think>\nhm\n</think>\n\nI look.\n{CALL}") == [
        ThinkingEvent("\nhm\n"),
        TextEvent("\n\nI look.\n"),
        CallEvent("bash", '{"command":  "ls \\u00e9"}'),
    ]


def test_arguments_keep_the_spelling_that_was_sampled() -> None:
    (call,) = parse('<tool_call>{"arguments": {"b":1,   "a":1.0e2}, "name": "f"}</tool_call>')
    assert call == CallEvent("f", '{"b":1,   "a":1.0e2}')


def test_white_space_between_calls_is_dropped_and_text_is_not() -> None:
    call = CallEvent("bash", '{"command":  "ls \\u00e9"}')
    assert parse(f"{CALL}\n{CALL}\nthen\n{CALL}\n") == [call, call, TextEvent("\nthen\n"), call]


@pytest.mark.parametrize(
    "body",
    ["not json", '{"name": "f"}', '{"name": "f", "arguments": "x"}', '{"name": 3, "arguments": {}}', "[" * 100_000],
)
def test_a_malformed_call_stays_text(body: str) -> None:
    text = f"<tool_call>{body}</tool_call> after"
    assert "".join(e.text for e in parse(text) if isinstance(e, TextEvent)) == text


def test_a_call_whose_tag_never_closes_is_still_a_call_when_its_json_is_whole() -> None:
    assert parse('<tool_call>\n{"name": "f", "arguments": {}}') == [CallEvent("f", "{}")]
    assert parse('<tool_call>\n{"name": "f", "arg') == [TextEvent('<tool_call>\n{"name": "f", "arg')]


def test_a_thought_that_never_closes_is_all_thought() -> None:
    assert parse("<think>\nso") == [ThinkingEvent("\nso")]


def test_a_thought_that_the_prompt_opened_needs_no_opening_tag() -> None:
    assert parse("so</think>yes", in_thinking=True) == [ThinkingEvent("so"), TextEvent("yes")]


def test_a_think_tag_in_the_middle_of_a_text_is_text() -> None:
    assert parse("say <think> aloud") == [TextEvent("say <think> aloud")]


def test_without_parsers_everything_is_text() -> None:
    text = f"<think>x</think>{CALL}"
    assert parse(text, Parsers(None, None)) == [TextEvent(text)]


def test_a_possible_tag_is_held_back_until_it_is_decided() -> None:
    parser = ReplyParser(Parsers("hermes", None))
    assert parser.feed("a<tool") == [TextEvent("a")]
    assert parser.feed("box") == [TextEvent("<toolbox")]


def test_parsers_are_chosen_by_what_the_template_writes() -> None:
    assert detect_parsers(TinyTokenizer()) == BOTH


def test_an_open_think_tag_at_the_end_of_the_prompt_is_seen() -> None:
    tokenizer = TinyTokenizer()
    assert opens_thinking(tokenizer, tokenizer.encode("<|im_start|>assistant\n<think>\n"))
    assert not opens_thinking(tokenizer, tokenizer.encode("<|im_start|>assistant\n<think>\n\n</think>\n\n"))


SCHEMAS: dict[str, dict[str, Any]] = {
    "edit": {"properties": {"path": {"type": "string"}, "line": {"type": "integer"}, "force": {"type": "boolean"}}}
}


def parse_as(tools: ToolFormat, text: str) -> tuple[list[Event], str]:
    parser = ReplyParser(Parsers(tools, "harmony" if tools == "harmony" else None), schemas=SCHEMAS)
    events = joined(parser.feed(text) + parser.finish())
    return events, parser.status


def test_qwen3_coder_values_have_the_types_of_the_schema() -> None:
    text = (
        "I edit.\n<tool_call>\n<function=edit>\n<parameter=path>\n12\n</parameter>\n<parameter=line>\n7\n</parameter>\n"
        "<parameter=force>\ntrue\n</parameter>\n</function>\n</tool_call>"
    )
    expected = CallEvent("edit", '{"path":"12","line":7,"force":true}')
    assert parse_as("qwen3_coder", text) == ([TextEvent("I edit.\n"), expected], "ok")


def test_qwen3_coder_keeps_the_line_breaks_inside_a_value() -> None:
    text = "<tool_call><function=edit><parameter=path>\n\na\n b\n\n</parameter></function></tool_call>"
    assert parse_as("qwen3_coder", text)[0] == [CallEvent("edit", '{"path":"\\na\\n b\\n"}')]


def test_glm_values_have_the_types_of_the_schema() -> None:
    text = (
        "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>a b</arg_value>\n"
        "<arg_key>line</arg_key>\n<arg_value>7</arg_value>\n</tool_call>"
    )
    assert parse_as("glm", text) == ([CallEvent("edit", '{"path":"a b","line":7}')], "ok")


@pytest.mark.parametrize(
    ("tools", "body"),
    [
        ("qwen3_coder", "<function=edit><parameter=path>x"),
        ("qwen3_coder", "<function=edit>stray<parameter=path>x</parameter></function>"),
        ("qwen3_coder", "<function=>x</function>"),
        ("glm", "edit<arg_key>path</arg_key>stray<arg_value>x</arg_value>"),
        ("glm", ""),
        ("hermes", '{"name": "edit"}'),
    ],
)
def test_a_call_that_is_none_stays_text_and_is_told(tools: ToolFormat, body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert parse_as(tools, text) == ([TextEvent(text)], "failed")


@pytest.mark.parametrize(
    ("tools", "body", "status"),
    [
        ("glm", "edit<arg_key>path</arg_key><arg_value>a</arg_value>", "failed"),
        ("hermes", '{"name": "edit", "arguments": {"path": "a"}}', "ok"),
        ("qwen3_coder", "<function=edit><parameter=path>a</parameter></function>", "ok"),
        ("qwen3_coder", "<function=edit><parameter=path>a</parameter>", "failed"),
    ],
)
def test_a_call_that_was_cut_off_is_none_unless_its_form_shows_that_all_is_there(
    tools: ToolFormat, body: str, status: str
) -> None:
    """After a pair of GLM's, another one could have come."""
    assert parse_as(tools, f"<tool_call>{body}")[1] == status


def test_one_good_call_of_two_is_partial() -> None:
    assert parse_as("hermes", f"{CALL}<tool_call>no</tool_call>")[1] == "partial"


def test_llama_calls_are_a_reply_of_json() -> None:
    text = '<|python_tag|>{"name": "f", "parameters": {"a":  1}}; {"name": "g", "parameters": {}}'
    assert parse_as("llama3_json", text) == ([CallEvent("f", '{"a":  1}'), CallEvent("g", "{}")], "ok")


@pytest.mark.parametrize(
    ("text", "status"),
    [('{"answer": 3}', "ok"), ('{"name": "edit", "parameters": ', "failed"), ("<|python_tag|>print(1)", "failed")],
)
def test_llama_json_that_is_no_call_is_text(text: str, status: str) -> None:
    assert parse_as("llama3_json", text) == ([TextEvent(text)], status)


def test_llama_text_is_not_held_back() -> None:
    parser = ReplyParser(Parsers("llama3_json", None))
    assert parser.feed("So") == [TextEvent("So")]


def test_harmony_channels_are_thinking_text_and_calls() -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.edit <|constrain|>json<|message|>{"path": "a"}<|call|>'
    )
    expected = [ThinkingEvent("hm"), TextEvent("I look."), CallEvent("edit", '{"path": "a"}')]
    assert parse_as("harmony", text) == (expected, "ok")
    assert parse_as("harmony", text.removesuffix("<|call|>")) == (expected, "ok")


def test_harmony_takes_the_recipient_before_the_channel_too() -> None:
    text = "<|start|>assistant to=functions.edit<|channel|>commentary json<|message|>{}<|call|>"
    assert parse_as("harmony", text) == ([CallEvent("edit", "{}")], "ok")


def test_harmony_streams_its_text() -> None:
    parser = ReplyParser(Parsers("harmony", "harmony"))
    assert parser.feed("<|channel|>final<|mess") == []
    assert parser.feed("age|>Hel") == [TextEvent("Hel")]
    assert parser.feed("lo<|ret") == [TextEvent("lo")]


@pytest.mark.parametrize(
    ("text", "status"),
    [("no header", "ok"), ("stray<|channel|>final<|message|>x", "ok"), ("a<|message|>b", "ok")],
)
def test_harmony_without_a_header_is_text(text: str, status: str) -> None:
    events, found = parse_as("harmony", text)
    assert "".join(event.text for event in events if isinstance(event, TextEvent)) == text
    assert found == status


def test_a_harmony_call_that_is_no_json_stays_text_and_is_told() -> None:
    text = "<|channel|>commentary to=functions.edit<|message|>{"
    assert parse_as("harmony", text) == ([TextEvent(text)], "failed")


def test_a_caller_who_wants_no_calls_gets_their_text() -> None:
    parser = ReplyParser(BOTH, reads_calls=False)
    assert parser.feed(CALL) + parser.finish() == [TextEvent(CALL)]


def test_deepseek_begins_inside_its_thinking() -> None:
    for text in ("so</think>yes", "<think>so</think>yes"):
        assert parse(text, Parsers(None, "deepseek_r1")) == [ThinkingEvent("so"), TextEvent("yes")]


@pytest.mark.parametrize("names", [{"tools": "x"}, {"thinking": 3}, {"reasoning": "qwen3"}, {"tools": "harmony"}])
def test_unknown_formats_are_refused(names: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="parsers"):
        Parsers.named(names)


def test_none_is_no_format() -> None:
    assert not Parsers.named({"thinking": "none"})
    assert Parsers.named({"thinking": "qwen3", "tools": "hermes"}) == BOTH


def test_qwen3_writes_hermes_calls_and_think_tags() -> None:
    assert detect_parsers(load_tokenizer(qwen3_folder())) == BOTH


def test_smollm2_writes_no_tags() -> None:
    assert not detect_parsers(load_tokenizer(smollm2_name()))


PROBED = "value\\n'of'_probe"
"""The value of `detect`'s call."""


class Writes:
    """A tokenizer whose template writes calls as `call` says."""

    eos_ids: frozenset[int] = frozenset()

    def __init__(self, call: str) -> None:
        self._call = call
        self._texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self._texts.append(text)
        return [len(self._texts) - 1]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._texts[i] for i in ids)

    def render(self, messages: Sequence[dict[str, Any]], *, tools: Any = None, **options: Any) -> list[int]:
        told = "Write <tool_call>{}</tool_call>." if tools else ""
        return self.encode(told + "".join(self._call if m.get("tool_calls") else m["content"] for m in messages))

    def is_special(self, token_id: int) -> bool:
        return False


@pytest.mark.parametrize(
    ("call", "parsers"),
    [
        (
            f"<tool_call>\n<function=probe>\n<parameter=key_of_probe>\n{PROBED}\n</parameter>\n</function>\n</tool_call>",
            Parsers("qwen3_coder"),
        ),
        (
            f"<tool_call>probe\n<arg_key>key_of_probe</arg_key>\n<arg_value>{PROBED}</arg_value>\n</tool_call>",
            Parsers("glm"),
        ),
        (
            '<tool_call>\n{"name": "probe", "arguments": {"key_of_probe": PROBED}}\n</tool_call>'.replace(
                "PROBED", json.dumps(PROBED)
            ),
            Parsers("hermes"),
        ),
        ("<tool_call>\nprobe\n</tool_call>", Parsers()),
        ('{"name": "probe", "parameters": {"key_of_probe": "value_of_probe"}}', Parsers("llama3_json")),
        ("<|start|>assistant to=functions.probe<|channel|>commentary json<|message|>{}", Parsers("harmony", "harmony")),
        ("probe()", Parsers()),
    ],
)
def test_the_format_is_the_one_that_the_template_writes_not_the_one_it_tells_of(call: str, parsers: Parsers) -> None:
    assert detect_parsers(Writes(call)) == parsers
