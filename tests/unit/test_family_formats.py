"""What model families write, with the slips that they are known for."""

from __future__ import annotations

import json
import time
from typing import Any, get_args

import pytest

from gangline.domain.conversation import Message, ModelCall, Text, ToolDefinition
from gangline.models.language.parsing.events import CallEvent, TextEvent, ThinkingEvent
from gangline.models.language.parsing.families import SECTIONS
from gangline.models.language.parsing.parser import Parsers, ReplyParser, ThinkingFormat, ToolFormat
from gangline.models.language.parsing.replies import ReplyText
from gangline.models.language.parsing.thinking import THINK_TAGS

SCHEMAS: dict[str, Any] = {
    "look": {"properties": {"at": {"type": "string"}, "n": {"type": "integer"}, "refs": {"type": "array"}}}
}
Read = tuple[str, str, list[tuple[str, dict[str, Any]]], str]


def read(names: dict[str, str], text: str, *, in_thinking: bool = False) -> Read:
    """Thinking, text, calls, status."""
    parser = ReplyParser(Parsers.named(names), schemas=SCHEMAS, in_thinking=in_thinking)
    events = [event for char in text for event in parser.feed(char)] + parser.finish()
    return (
        "".join(event.text for event in events if isinstance(event, ThinkingEvent)),
        "".join(event.text for event in events if isinstance(event, TextEvent)),
        [(event.name, json.loads(event.arguments)) for event in events if isinstance(event, CallEvent)],
        parser.status,
    )


LOOK = ("look", {"at": "a", "n": 2})
KIMI = '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"at": "a", "n": 2}<|tool_call_end|>'
DEEPSEEK = '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at": "a", "n": 2}<｜tool▁call▁end｜>'
DSML = (
    '<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="at" string="true">a</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
)
PARAMETERS = '<parameter name="at">a</parameter>\n<parameter name="n">2</parameter>'


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("kimi_k2", f"<|tool_calls_section_begin|>{KIMI}<|tool_calls_section_end|>"),
        ("kimi_k2", f"<|tool_call_section_begin|>{KIMI}<|tool_call_section_end|>"),
        ("kimi_k2", KIMI),
        ("kimi_k2", KIMI.removesuffix("<|tool_call_end|>")),
        ("kimi_k2", KIMI.replace("functions.look:0", "functions_look_0")),
        ("kimi_k2", KIMI.replace("functions.look:0", "look:0")),
        ("kimi_k2", KIMI.replace("functions.look:0", " look ")),
        ("deepseek_v3", f"<｜tool▁calls▁begin｜>{DEEPSEEK}"),
        ("deepseek_v3", f"{DEEPSEEK}<｜tool▁calls▁end｜>"),
        ("deepseek_v4", f"<｜DSML｜function_calls>\n{DSML}</｜DSML｜function_calls>"),
        ("deepseek_v4", f"<｜DSML｜tool_calls>\n{DSML}</｜DSML｜tool_calls>"),
        ("deepseek_v4", f"{DSML}</｜DSML｜tool_calls>"),
        ("mistral", '[TOOL_CALLS]look[ARGS]{"at": "a", "n": 2}'),
        ("mistral", '[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{"at": "a", "n": 2}'),
        ("mistral", '[TOOL_CALLS]look{"at": "a", "n": 2}'),
        ("mistral", '[TOOL_CALLS] [{"name": "look", "arguments": {"at": "a", "n": 2}, "id": "abcdefghi"}]'),
        ("gemma4", '<|tool_call>call:look{at:<|"|>a<|"|>,n:2}<tool_call|>'),
        ("gemma4", '<|tool_call>call:look{"at": "a", \'n\': 2}<tool_call|>'),
        ("gemma4", '<|tool_call>call:look{<|"|>at<|"|>:<|"|>a<|"|>,<|"|>n<|"|>:2}'),
        ("cohere", '<|START_ACTION|>[\n{"tool_name": "look", "parameters": {"at": "a", "n": 2}}\n]<|END_ACTION|>'),
        ("nemotron_v2", '<TOOLCALL>[{"name": "look", "arguments": "{\\"at\\": \\"a\\", \\"n\\": 2}"}]</TOOLCALL>'),
        ("minimax_m2", f'<minimax:tool_call>\n<invoke name="look">\n{PARAMETERS}\n</invoke>\n</minimax:tool_call>'),
        ("lfm2", '<|tool_call_start|>[look(at="a", n=2)]<|tool_call_end|>'),
    ],
)
def test_a_call_is_read_in_each_form_that_models_give_it(tools: str, text: str) -> None:
    assert read({"tools": tools}, text) == ("", "", [LOOK], "ok")


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("kimi_k2", KIMI.replace("2}", "2")),
        ("kimi_k2", KIMI.replace("{", "{{")),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>look{}<｜tool▁calls▁end｜>"),
        ("deepseek_v4", f"<｜DSML｜tool_calls>{DSML.replace('</｜DSML｜parameter>', '', 1)}</｜DSML｜tool_calls>"),
        ("mistral", '[TOOL_CALLS]look[ARGS]{"at": "a"'),
        ("mistral", "[TOOL_CALLS][]"),
        ("gemma4", '<|tool_call>call:look{at:<|"|>a<|"|>}b<|"|>}<tool_call|>'),
        ("gemma4", "<|tool_call>call:look{at:a}<tool_call|>"),
        ("minimax_m2", f'<minimax:tool_call><invoke name="look">{PARAMETERS}{PARAMETERS}</invoke></minimax:tool_call>'),
        ("minimax_m3", ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="look">]<]minimax[>[<at>a</at>'),
        ("lfm2", "<|tool_call_start|>[look(at=open('x'))]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[look('a')]<|tool_call_end|>"),
        ("nemotron_v2", '<TOOLCALL>[{"name": "look"}]</TOOLCALL>'),
        ("nemotron_v2", "never opened</TOOLCALL>"),
        ("apertus", '<|tools_prefix|>[{"look": {"at": "a"}, "other": {}}]<|tools_suffix|>'),
    ],
)
def test_what_looks_like_a_call_and_is_none_stays_text_and_failed(tools: str, text: str) -> None:
    assert read({"tools": tools}, text) == ("", text, [], "failed")


def test_good_calls_before_a_broken_one_are_kept() -> None:
    broken = KIMI.replace("2}", "2")
    text = f"So.<|tool_calls_section_begin|>{KIMI}{broken}<|tool_calls_section_end|> Done."
    assert read({"tools": "kimi_k2"}, text) == ("", f"So.{broken}<|tool_calls_section_end|> Done.", [LOOK], "partial")


def test_a_closing_tag_in_a_text_of_json_is_part_of_that_text() -> None:
    inside = KIMI.replace('"a"', '"<|tool_call_end|><|tool_calls_section_end|>"')
    text = f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>\n"
    value = "<|tool_call_end|><|tool_calls_section_end|>"
    assert read({"tools": "kimi_k2"}, text)[2:] == ([("look", {"at": value, "n": 2})], "ok")


def test_a_section_whose_json_never_ends_leaves_the_next_one_readable() -> None:
    broken = '<TOOLCALL>[{"name": "look</TOOLCALL> then '
    good = '<TOOLCALL>[{"name": "look", "arguments": {"at": "a", "n": 2}}]</TOOLCALL>'
    assert read({"tools": "nemotron_v2"}, broken + good) == ("", broken, [LOOK], "partial")


@pytest.mark.parametrize("closed", ["</think>", ""])
def test_a_call_ends_a_thought_that_the_model_forgot_to_close(closed: str) -> None:
    text = f"<think>Hm.{closed}<|tool_calls_section_begin|>{KIMI}<|tool_calls_section_end|>"
    assert read({"tools": "kimi_k2", "thinking": "qwen3"}, text) == ("Hm.", "", [LOOK], "ok")


@pytest.mark.parametrize(
    ("names", "text", "in_thinking"),
    [
        (("cohere", "cohere"), "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>So.<|END_RESPONSE|>", False),
        (
            ("kimi_k3", "kimi_k3"),
            "Hm.<|close|>think<|sep|><|open|>response<|sep|>So.<|close|>response<|sep|><|close|>message<|sep|>",
            True,
        ),
        (("solar", "solar"), "<|think|>Hm.<|end|><|begin|>assistant<|content|>So.", False),
        (("muse", "muse"), " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>So.", False),
        (("gemma4", "gemma4"), "<|channel>thought\nHm.<channel|>So.", False),
        (("mistral", "mistral"), "[THINK]Hm.[/THINK]So.", False),
        (("minimax_m1", "apriel"), "Hm.[BEGIN FINAL RESPONSE]So.", True),
    ],
)
def test_thoughts_and_text_come_without_the_familys_tags(names: tuple[str, str], text: str, in_thinking: bool) -> None:
    tools, thinking = names
    assert read({"tools": tools, "thinking": thinking}, text, in_thinking=in_thinking) == ("Hm.", "So.", [], "ok")


@pytest.mark.parametrize(
    ("tools", "text", "call_id"),
    [
        ("kimi_k2", KIMI, "functions.look:0"),
        ("mistral", '[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{"at": "a"}', "abcdefghi"),
        ("mistral", '[TOOL_CALLS]look[ARGS]{"at": "a"}', "call_0"),
    ],
)
def test_an_id_that_the_text_shows_is_the_calls(tools: ToolFormat, text: str, call_id: str) -> None:
    tool = ToolDefinition(name="look", description="Look.", parameters=SCHEMAS["look"])
    call = ModelCall(dialect="test", model="", messages=(Message("user", (Text("Where?"),)),), tools=(tool,))
    reply = ReplyText(Parsers(tools), call)
    deltas = [reply.feed(text), reply.finish()]
    assert [piece.call_id for delta in deltas for piece in delta.tool_calls] == [call_id]


@pytest.mark.parametrize("tools", SECTIONS)
def test_a_model_that_loops_is_read_in_time(tools: str) -> None:
    section = SECTIONS[tools]
    opened = (*section.opens, *section.starts)[0]
    closed = section.closes[0] if section.closes else "\n"
    for body in ('[{"name": "', '<parameter name="a">', 'call:f{a:<|"|>', "[f(a='", ']<]minimax[>[<invoke name="f">'):
        parser = ReplyParser(Parsers.named({"tools": tools}), schemas=SCHEMAS)
        started = time.process_time()
        for piece in [opened, body, closed] * 500:
            parser.feed(piece)
        parser.finish()
        assert time.process_time() - started < 5


def test_every_format_has_its_name() -> None:
    assert set(SECTIONS) < set(get_args(ToolFormat))
    assert set(THINK_TAGS) | {"harmony"} == set(get_args(ThinkingFormat))


def test_no_tag_begins_another_one_of_its_format() -> None:
    for section in SECTIONS.values():
        tags = (*section.opens, *section.starts, *section.frame, *section.closes)
        assert not [(a, b) for a in tags for b in tags if a != b and b.startswith(a)]
