"""However a reply's text is cut, it says the same, and nothing of it is lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gangline.models.language.parsing.events import CallEvent, TextEvent, ThinkingEvent
from gangline.models.language.parsing.parser import Parsers, ReplyParser

# A busy machine is not a failure.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SCHEMAS: dict[str, dict[str, Any]] = {"f": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}}
HERMES = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
CODER = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
LLAMA = '{"name": "f", "parameters": {"a": 1}}'
ANALYSIS = "<|channel|>analysis<|message|>x<|end|><|start|>assistant"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"

FORMATS: dict[str, tuple[Parsers, list[str]]] = {
    "hermes": (Parsers("hermes", "qwen3"), [HERMES, '{"name": "f", "arguments": {"a": 1}}', '{"name": 1}']),
    "qwen3_coder": (Parsers("qwen3_coder", "qwen3"), [CODER, "<function=f>", "</function>", "<parameter=s>"]),
    "glm": (Parsers("glm", "qwen3"), [GLM, "f\n", "<arg_key>", "s</arg_key>", "<arg_value>", "</arg_value>"]),
    "llama3_json": (Parsers("llama3_json", None), [LLAMA, "; ", "<|python_tag|>", "{", "}"]),
    "deepseek_r1": (Parsers(None, "deepseek_r1"), []),
    "harmony": (
        Parsers("harmony", "harmony"),
        [ANALYSIS, TO_F, '{"a": 1}', "<|call|>", "<|end|>", "<|channel|>final", "<|message|>", "<|start|>assistant"],
    ),
}
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "\n", "x", " ", "日"]
cuts = st.lists(st.integers(0, 200), max_size=12)


def replies(words: Sequence[str]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from([*words, *TAGS]), max_size=12).map("".join)


def pieces(text: str, at: Sequence[int]) -> list[str]:
    borders = [0, *sorted(min(cut, len(text)) for cut in at), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


def parsed(parsers: Parsers, chunks: Sequence[str], *, inside: bool) -> tuple[str, str, list[CallEvent], str]:
    parser = ReplyParser(parsers, in_thinking=inside, schemas=SCHEMAS)
    events = [event for chunk in chunks for event in parser.feed(chunk)] + parser.finish()
    return (
        "".join(e.text for e in events if isinstance(e, TextEvent)),
        "".join(e.text for e in events if isinstance(e, ThinkingEvent)),
        [e for e in events if isinstance(e, CallEvent)],
        parser.status,
    )


@pytest.mark.parametrize("name", FORMATS)
@patient
@given(data=st.data(), at=cuts, inside=st.booleans())
def test_a_reply_parses_alike_however_it_is_cut(name: str, data: st.DataObject, at: list[int], inside: bool) -> None:
    parsers, words = FORMATS[name]
    text = data.draw(replies(words))
    whole = parsed(parsers, [text], inside=inside)
    assert parsed(parsers, pieces(text, at), inside=inside) == whole
    assert parsed(parsers, list(text), inside=inside) == whole


@patient
@given(at=cuts)
@example(at=[len(HERMES) + 1])
def test_white_space_after_a_call_is_told_from_text_after_it(at: list[int]) -> None:
    text, _, calls, status = parsed(FORMATS["hermes"][0], pieces(f"{HERMES}\nx", at), inside=False)
    assert (text, len(calls), status) == ("\nx", 1, "ok")


@pytest.mark.parametrize("name", FORMATS)
@patient
@given(data=st.data(), at=cuts)
def test_arguments_are_always_a_json_object(name: str, data: st.DataObject, at: list[int]) -> None:
    parsers, words = FORMATS[name]
    _, _, calls, _ = parsed(parsers, pieces(data.draw(replies(words)), at), inside=False)
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


@pytest.mark.parametrize("name", FORMATS)
@patient
@given(data=st.data(), at=cuts)
def test_parsing_loses_no_letter(name: str, data: st.DataObject, at: list[int]) -> None:
    parsers, words = FORMATS[name]
    text = data.draw(replies(words))
    content, thinking, calls, _ = parsed(parsers, pieces(text, at), inside=False)
    kept = (
        content + thinking + "".join(json.dumps([c.name, json.loads(c.arguments)], ensure_ascii=False) for c in calls)
    )
    letters = text.replace("<|constrain|>", "").replace("final", "")
    assert kept.count("日") == text.count("日")
    if name != "harmony":  # whose tags are words
        assert kept.count("x") == letters.count("x")


@patient
@given(text=st.text(max_size=40), at=cuts)
def test_without_formats_every_text_is_text(text: str, at: list[int]) -> None:
    assert parsed(Parsers(), pieces(text, at), inside=False) == (text, "", [], "ok")
