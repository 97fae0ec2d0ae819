"""A format that is recognised in a template reads the calls that the template writes."""

from __future__ import annotations

import json

import pytest

from gangline.domain.conversation import Message, Text, ToolCall, ToolDefinition
from gangline.domain.errors import EngineRefused
from gangline.models.language.parsing.detect import detect_parsers, opens_thinking
from gangline.models.language.parsing.events import CallEvent
from gangline.models.language.parsing.parser import ReplyParser
from support.requirements import DOES_NOT_APPLY
from support.templates.engine import Writer
from support.templates.files import templates

TOOL = ToolDefinition(
    "read_file",
    "Read a file.",
    {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}, "required": ["path"]},
)
ARGUMENTS = {"path": "a b.txt", "lines": 3}
ASKED = Message("user", (Text("Which word is in a.txt?"),))
CALL = ToolCall("aaaaaaaa1", "read_file", json.dumps(ARGUMENTS))


@pytest.mark.parametrize("name", list(templates()))
def test_a_recognised_format_reads_a_call_of_its_template(name: str) -> None:
    writer = Writer(templates()[name])
    parsers = detect_parsers(writer.tokenizer)
    if parsers.tools is None:
        pytest.skip(f"{DOES_NOT_APPLY} no format is recognised")
    try:
        prompt = writer.ids((ASKED,), (TOOL,))
        _, sampled = writer.turn((ASKED,), (TOOL,), {}, Message("assistant", (CALL,)))
    except EngineRefused as refused:
        pytest.skip(f"{DOES_NOT_APPLY} {refused.message}")
    if writer.unwritten:
        pytest.skip(f"{DOES_NOT_APPLY} {writer.unwritten}")
    in_thinking = opens_thinking(writer.tokenizer, prompt.tolist())
    schemas = {TOOL.name: TOOL.parameters or {}}
    parser = ReplyParser(parsers, in_thinking=in_thinking, schemas=schemas)
    text = writer.tokenizer.decode(sampled.tolist()[:-1])
    events = [event for char in text for event in parser.feed(char)] + parser.finish()
    calls = [(event.name, json.loads(event.arguments)) for event in events if isinstance(event, CallEvent)]
    assert calls == [(TOOL.name, ARGUMENTS)], f"{parsers.tools} of {text!r}"
    assert parser.status == "ok"
