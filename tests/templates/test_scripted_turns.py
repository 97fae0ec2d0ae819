"""The scripted engine writes its replies as each family's model does, so the family's parsers read them back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gangline.models.language.parsing.events import CallEvent, TextEvent, ThinkingEvent
from gangline.models.language.parsing.parser import ReplyParser
from gangline.models.language.tokenizer import load_tokenizer
from gangline.serving.scripted.script import CallTool, Reply
from gangline.serving.scripted.tokens import ReplyEncoder
from support.templates.check import FAMILIES, write_tokenizer
from support.templates.engine import Writer
from support.templates.files import templates

SCHEMA = {"type": "object", "properties": {"command": {"type": "string", "description": "c"}}}
TOOL = {"type": "function", "function": {"name": "bash", "description": "b", "parameters": SCHEMA}}
CALL = CallTool(name="bash", arguments={"command": 'ls "a b"\n'})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_scripted_turn_is_read_back_by_its_familys_parsers(family: str, tmp_path: Path) -> None:
    write_tokenizer(templates()[FAMILIES[family]], tmp_path / "tokenizer")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    encoder = ReplyEncoder(tokenizer)
    prompt = tokenizer.render([{"role": "user", "content": "hello"}], tools=[TOOL])
    opens = tokenizer.decode(prompt[-4:]).rstrip().endswith("<think>")
    for text, calls in (("I look.", [CALL]), ("", [CALL]), ("Done.", [])):
        *ids, end = encoder.encode(Reply(text=text), calls, prompt)
        assert end in tokenizer.eos_ids
        parser = ReplyParser(encoder.parsers, in_thinking=opens, schemas={"bash": SCHEMA})
        events = parser.feed(tokenizer.decode(ids)) + parser.finish()
        found = [(event.name, json.loads(event.arguments)) for event in events if isinstance(event, CallEvent)]
        assert (found, parser.status) == ([(call.name, call.arguments) for call in calls], "ok")
        said = "".join(event.text for event in events if isinstance(event, TextEvent | ThinkingEvent))
        # Mistral's template writes no text alongside a call.
        assert said.strip() == text or (calls and family == "Mistral")
        short = encoder.encode(Reply(text=text, finish="length"), calls, prompt)
        assert short == ids


@pytest.mark.parametrize("name", ["trl/idefics3", "trl/smolvlm"])
def test_a_template_that_reads_parts_alone_is_given_parts(name: str) -> None:
    """A text dropped out of their prompts, or was refused."""
    tokenizer = Writer(templates()[name]).tokenizer
    texts = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
    parts = [{**text, "content": [{"type": "text", "text": text["content"]}]} for text in texts]
    assert tokenizer.render(texts) == tokenizer.render(parts)
    shown = tokenizer.decode(tokenizer.render(texts))
    assert "One?" in shown
    assert "Two." in shown
