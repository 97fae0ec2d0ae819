"""Tool calls with the slips that models are known for: read as engines read them, or said to be lost; never `ok`."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gangline.domain.conversation import Message, ModelCall, Part, Text, Thinking, ToolCall, ToolDefinition
from gangline.models.engines.contract import EngineChoice
from gangline.models.language.parsing.events import CallEvent, TextEvent, ThinkingEvent
from gangline.models.language.parsing.parser import Parsers, ReplyParser, ToolFormat
from gangline.node.capture.capture import parse_status

SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}},
    "g": {"properties": {}},
}
F: tuple[str, Any] = ("f", {"a": "x", "b": 1})
G: tuple[str, Any] = ("g", {})
Read = tuple[str, str, list[tuple[str, Any]], str]


def read(tools: ToolFormat | None, text: str, *, inside: bool = False) -> Read:
    """Text, thinking, calls and status, which are the same however the text is cut."""
    thinking = "harmony" if tools == "harmony" else "qwen3"
    results: list[Read] = []
    for size in (len(text), 1, 2, 3, 7):
        parser = ReplyParser(Parsers(tools, thinking), schemas=SCHEMAS, in_thinking=inside)
        events = [event for at in range(0, len(text), size or 1) for event in parser.feed(text[at : at + size])]
        events += parser.finish()
        results.append(
            (
                "".join(event.text for event in events if isinstance(event, TextEvent)),
                "".join(event.text for event in events if isinstance(event, ThinkingEvent)),
                [(event.name, json.loads(event.arguments)) for event in events if isinstance(event, CallEvent)],
                parser.status,
            )
        )
    assert all(result == results[0] for result in results)
    return results[0]


def hermes(arguments: str = '{"a": "x", "b": 1}', name: str = "f", key: str = "arguments") -> str:
    return f'<tool_call>\n{{"name": "{name}", "{key}": {arguments}}}\n</tool_call>'


def body(a: str = "x", b: str = "1") -> str:
    return f"<function=f>\n<parameter=a>\n{a}\n</parameter>\n<parameter=b>\n{b}\n</parameter>\n</function>"


def coder(a: str = "x", b: str = "1") -> str:
    return f"<tool_call>\n{body(a, b)}\n</tool_call>"


def glm(a: str = "x", b: str = "1") -> str:
    pairs = f"<arg_key>a</arg_key>\n<arg_value>{a}</arg_value>\n<arg_key>b</arg_key>\n<arg_value>{b}</arg_value>\n"
    return f"<tool_call>f\n{pairs}</tool_call>"


BODY_G = "<function=g>\n</function>"
QUOTED = 'a "</tool_call>" b <tool_call> c </tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
LAST = "<function=f>\n<parameter=b>\n1\n</parameter>\n<parameter=a>\nx\n"

READ: dict[str, tuple[ToolFormat, str, list[tuple[str, Any]]]] = {
    # -- the tags ------------------------------------------------------------------------------------------------------
    "coder without the opening tag": ("qwen3_coder", f"{body()}\n</tool_call>", [F]),
    "coder without the opening tag, after text": ("qwen3_coder", f"I do.\n\n{body()}</tool_call>", [F]),
    "coder without tags": ("qwen3_coder", body(), [F]),
    "two without tags": ("qwen3_coder", f"{body()}\n{BODY_G}\n", [F, G]),
    "two without opening tags": ("qwen3_coder", f"{body()}\n</tool_call>\n{BODY_G}\n</tool_call>", [F, G]),
    "one without tags, one with": ("qwen3_coder", f"{body()}\n<tool_call>\n{BODY_G}\n</tool_call>", [F, G]),
    "coder without the closing tag": ("qwen3_coder", f"<tool_call>\n{body()}\n", [F]),
    "coder without the first closing tag": ("qwen3_coder", f"<tool_call>\n{body()}\n<tool_call>\n{BODY_G}", [F, G]),
    "hermes without the closing tag": ("hermes", hermes().removesuffix("</tool_call>"), [F]),
    "hermes without the first closing tag": (
        "hermes",
        hermes().removesuffix("</tool_call>") + hermes("{}", "g"),
        [F, G],
    ),
    "two in one tag": ("qwen3_coder", f"<tool_call>\n{body()}\n{BODY_G}\n</tool_call>", [F, G]),
    "two of hermes in one tag": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "x", "b": 1}}\n{"name": "g", "arguments": {}}</tool_call>',
        [F, G],
    ),
    "a list in one tag": (
        "hermes",
        '<tool_call>[{"name": "f", "arguments": {"a": "x", "b": 1}}, {"name": "g", "arguments": {}}]</tool_call>',
        [F, G],
    ),
    "a fence in the tag": ("hermes", '<tool_call>\n```json\n{"name": "g", "arguments": {}}\n```\n</tool_call>', [G]),
    "in the middle of a line": ("hermes", f"I call {hermes()}", [F]),
    "after a tag that a sentence speaks of": ("hermes", f"I use `<tool_call>` now: {hermes()}", [F]),
    "after inline code": ("hermes", f"I run `ls`{hermes()}", [F]),
    "after a closing tag in prose": ("hermes", f"It ends with `</tool_call>`.\n{hermes()}", [F]),
    # -- tags in values ------------------------------------------------------------------------------------------------
    "hermes with tags in a string": (
        "hermes",
        hermes(json.dumps({"a": QUOTED, "b": 1})) + "\n" + hermes("{}", "g"),
        [("f", {"a": QUOTED, "b": 1}), G],
    ),
    "coder with a closing tag in a value": (
        "qwen3_coder",
        coder("a </tool_call> b") + coder(),
        [("f", {"a": "a </tool_call> b", "b": 1}), F],
    ),
    "coder with an opening tag in a value": (
        "qwen3_coder",
        coder("a <tool_call> b") + coder(),
        [("f", {"a": "a <tool_call> b", "b": 1}), F],
    ),
    "coder with its own tags in a value": (
        "qwen3_coder",
        coder("</parameter> </function> x"),
        [("f", {"a": "</parameter> </function> x", "b": 1})],
    ),
    "coder with a call in a value": (
        "qwen3_coder",
        coder(f"<tool_call>\n{BODY_G}\n</tool_call>\n"),
        [("f", {"a": f"<tool_call>\n{BODY_G}\n</tool_call>\n", "b": 1})],
    ),
    "coder with calls in its last value": (
        "qwen3_coder",
        f"<tool_call>\n{LAST}{coder()}\n{coder()}\ny\n</parameter>\n</function>\n</tool_call>\n{coder()}",
        [("f", {"b": 1, "a": f"x\n{coder()}\n{coder()}\ny"}), F],
    ),
    "glm with tags in a value": (
        "glm",
        glm("a <tool_call> </tool_call> </tool_call> </arg_value> b") + glm(),
        [("f", {"a": "a <tool_call> </tool_call> </tool_call> </arg_value> b", "b": 1}), F],
    ),
    "harmony with a marker in a string": (
        "harmony",
        '<|channel|>commentary to=functions.f<|message|>{"a": "<|call|> <|end|>", "b": 1}<|call|>',
        [("f", {"a": "<|call|> <|end|>", "b": 1})],
    ),
    "opening tags in values of two calls": (
        "qwen3_coder",
        coder("<tool_call><parameter=z>") + coder("</tool_call>"),
        [("f", {"a": "<tool_call><parameter=z>", "b": 1}), ("f", {"a": "</tool_call>", "b": 1})],
    ),
    # -- the rest of the form ------------------------------------------------------------------------------------------
    "without </parameter>, another following": (
        "qwen3_coder",
        coder().replace("\n</parameter>\n<parameter=b>", "\n<parameter=b>"),
        [F],
    ),
    "without the last </parameter>": (
        "qwen3_coder",
        coder().replace("\n</parameter>\n</function>", "\n</function>"),
        [F],
    ),
    "without </parameter> at all": ("qwen3_coder", coder().replace("\n</parameter>", "") + coder(), [F, F]),
    "without line breaks": ("qwen3_coder", coder().replace("\n", ""), [F]),
    "arguments as JSON in JSON": ("hermes", hermes(json.dumps('{"a": "x", "b": 1}')), [F]),
    "parameters for arguments": ("hermes", hermes(key="parameters"), [F]),
    "arguments for parameters": ("llama3_json", '{"name": "f", "arguments": {"a": "x", "b": 1}}', [F]),
    "parameters as JSON in JSON": ("llama3_json", '{"name": "f", "parameters": "{\\"a\\": \\"x\\", \\"b\\": 1}"}', [F]),
    "with a type": ("llama3_json", '{"type": "function", "name": "g", "parameters": {}}', [G]),
    "no arguments at all": ("glm", "<tool_call>g</tool_call>", [G]),
    "harmony, another word for JSON": (
        "harmony",
        "<|channel|>commentary to=functions.g <|constrain|>JSON<|message|>{}<|call|>",
        [G],
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_slip_that_can_be_read_is_read(name: str) -> None:
    tools, text, calls = READ[name]
    _, _, found, status = read(tools, text)
    assert (found, status) == (calls, "ok")


NOT_READ: dict[str, tuple[ToolFormat | None, str, int]] = {
    "no tag before it": ("hermes", '{"name": "f", "arguments": {"a": "x"}}\n</tool_call>', 0),
    "no tags, in a fence": ("hermes", '```json\n{"name": "f", "arguments": {"a": "x"}}\n```', 0),
    "no tags": ("hermes", 'I call {"name": "f", "arguments": {"a": "x"}} now.', 0),
    "Python for JSON": ("hermes", "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>", 0),
    "a wrong case": ("hermes", hermes().replace("tool_call", "Tool_Call"), 0),
    "a wrong case of a function": ("qwen3_coder", coder().replace("function", "Function"), 0),
    "a wrong tag": ("hermes", hermes().replace("tool_call", "function_call"), 0),
    "cut off": ("hermes", hermes()[:40], 0),
    "cut off after a call": ("hermes", hermes() + hermes()[:40], 1),
    "cut off in a value": ("qwen3_coder", coder()[:50], 0),
    "a string that never ends, and another call": ("hermes", '<tool_call>{"name": "</tool_call>\n' + hermes(), 1),
    "words for a call": ("hermes", "<tool_call>\nls -la\n</tool_call>", 0),
    "words for a call, after one": ("hermes", f"{hermes()}\n<tool_call>\nls -la\n</tool_call>", 1),
    "text between parameters": ("qwen3_coder", coder().replace("<parameter=b>", "so <parameter=b>"), 0),
    "a parameter twice": ("qwen3_coder", coder().replace("<parameter=b>", "<parameter=a>"), 0),
    "an argument twice": ("glm", glm().replace(">b<", ">a<"), 0),
    "a value that closes its call": ("qwen3_coder", coder("x\n</parameter>\n</function>\n</tool_call>\ny"), 1),
    "a value that begins another function": ("qwen3_coder", coder("</parameter> </function> <function=f> x"), 0),
    "a value that closes its call, of glm": ("glm", glm("x</arg_value>\n</tool_call>\ny"), 1),
    "quoted, and whole": ("hermes", f"`{hermes()}`", 0),
    "text after a call without tags": ("qwen3_coder", f"{body()}\nDone.", 0),
    "another family's call": ("hermes", coder(), 0),
    "another family's call, without tags": ("hermes", body(), 0),
    "json for qwen3_coder": ("qwen3_coder", hermes(), 0),
    "a family without a format": (None, hermes(), 0),
    "Mistral": (None, '[TOOL_CALLS]f[ARGS]{"a": "x"}', 0),
    "Mistral of old": (None, '[TOOL_CALLS][{"name": "f", "arguments": {}}]', 0),
    "Kimi": (None, "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}", 0),
    "DeepSeek": (None, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", 0),
    "DeepSeek 3.2": (None, '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>', 0),
    "MiniMax": (None, '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>', 0),
    "MiniMax of old": (None, '<tool_calls>\n{"name": "f", "arguments": {}}\n</tool_calls>', 0),
    "Gemma 4": (None, '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>', 0),
    "LFM2": (None, '<|tool_call_start|>[f(a="x")]<|tool_call_end|>', 0),
    "Granite": (None, '<|tool_call|>[{"name": "f", "arguments": {}}]', 0),
    "Seed-OSS": (None, "<seed:tool_call>\n<function=f>\n</function>\n</seed:tool_call>", 0),
    "Nemotron": (None, '<TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>', 0),
    "FunctionGemma": (None, "<start_function_call>call:f{}<end_function_call>", 0),
    "Llama": (None, '{"name": "f", "parameters": {}}', 0),
    "Llama with words before": ("llama3_json", 'Sure: {"name": "f", "parameters": {}}', 0),
    "Llama in a fence": ("llama3_json", '```json\n{"name": "f", "parameters": {}}\n```', 0),
    "Llama with words behind": ("llama3_json", '{"name": "f", "parameters": {}} Done.', 0),
    "Llama's own tools": ("llama3_json", '<|python_tag|>brave_search.call(query="x")', 0),
    "harmony without a body": ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json", 0),
    "harmony to another tool": ("harmony", "<|channel|>commentary to=browser.search<|message|>{}", 0),
    "harmony that was decoded without its markers": ("harmony", 'commentary to=functions.f json{"a": 1}', 0),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_a_call_that_was_lost_is_never_ok(name: str) -> None:
    tools, text, num_calls = NOT_READ[name]
    shown, _, calls, status = read(tools, text)
    assert (len(calls), status) == (num_calls, "partial" if num_calls else "failed")
    if not num_calls:
        assert shown == text


PROSE = [
    "Write `<tool_call>` and `</tool_call>` around the JSON.",
    "The <tool_call> tag and the </tool_call> tag are special tokens.",
    'It needs "<tool_call>" first.',
    "`<function=NAME>` opens a call, `</function>` closes it.",
    "Mistral writes `[TOOL_CALLS]`, Kimi `<|tool_calls_section_begin|>`.",
    'The JSON is {"name": "Ada", "arguments": {}}.',
    '{"answer": 3, "name": "f"}',
    "a < b and b > c, [x] to=y",
    "<b>bold</b> <a href='x'>text</a>",
    "`to=functions.NAME` is a header.",
    "Done.<|tool_response>",
    "<think>",
    "",
]


@pytest.mark.parametrize("text", PROSE)
@pytest.mark.parametrize("tools", ["hermes", "qwen3_coder", "glm", None])
def test_prose_that_speaks_of_a_call_is_prose(tools: ToolFormat | None, text: str) -> None:
    shown, thinking, calls, status = read(tools, text)
    assert (shown + thinking.strip(), calls, status) == (text if text != "<think>" else "", [], "ok")


# -- calls in thoughts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tools", "text"), [("hermes", hermes()), ("qwen3_coder", coder()), ("glm", glm())])
def test_a_call_ends_a_thought_that_nobody_closed(tools: ToolFormat, text: str) -> None:
    assert read(tools, f"I should look.\n{text}\n", inside=True) == ("", "I should look.\n", [F], "ok")
    assert read(tools, f"<think>so {text}") == ("", "so ", [F], "ok")


def test_a_call_that_was_only_thought_of_is_thinking() -> None:
    thought = f"I could {hermes()}"
    assert read("hermes", f"{thought}</think>No.", inside=True) == ("No.", thought, [], "ok")
    assert read("hermes", f"{thought}</think>{hermes()}", inside=True) == ("", thought, [F], "ok")


def test_a_reply_that_is_only_a_thought_of_a_call_has_lost_it() -> None:
    thought = f"I do {hermes()} and then"
    assert read("hermes", thought, inside=True) == ("", thought, [], "failed")
    assert read("hermes", f"{thought}</think>\n", inside=True) == ("\n", thought, [], "failed")


def test_a_caller_who_wants_no_calls_has_lost_none() -> None:
    parser = ReplyParser(Parsers("hermes"), reads_calls=False)
    assert parser.feed(hermes()) + parser.finish() == [TextEvent(hermes())]
    assert parser.status == "ok"


# -- engines that parse by themselves ----------------------------------------------------------------------------------


def status_of(*parts: Part, offered: bool = True, parse: Any = None) -> str:
    tools = tuple(ToolDefinition(name, None, {"type": "object"}) for name in "fg") if offered else ()
    call = ModelCall(dialect="d", model="m", messages=(), tools=tools)
    message = Message("assistant", parts)
    choice = EngineChoice(index=0, message=message, finish_reason="stop", sampled_ids=None, logprobs=None, parse=parse)
    return parse_status(call, choice)


READ_CALL = ToolCall("c", "f", "{}")


@pytest.mark.parametrize("name", [name for name in NOT_READ if NOT_READ[name][2] == 0])
def test_what_an_engine_left_in_the_text_is_a_lost_call(name: str) -> None:
    text = NOT_READ[name][1]
    assert status_of(Text(text)) == "failed"
    assert status_of(Text(text), READ_CALL) == "partial"
    assert status_of(Text(text), offered=False) == "ok"
    assert status_of(Text(text), parse="ok") == "ok"


@pytest.mark.parametrize("text", PROSE)
def test_prose_beside_an_engine_s_calls_is_prose(text: str) -> None:
    assert status_of(Text(text)) == status_of(Text(text), READ_CALL) == "ok"


def test_a_call_that_an_engine_left_in_the_thinking_is_lost_where_there_is_nothing_else() -> None:
    assert status_of(Thinking(hermes())) == "failed"
    assert status_of(Thinking(hermes()), Text("No.")) == status_of(Thinking(hermes()), READ_CALL) == "ok"


def test_arguments_of_an_engine_that_are_not_an_object_are_partly_read() -> None:
    assert (
        status_of(ToolCall("c", "f", '{"a": '))
        == status_of(msgspec.structs.replace(READ_CALL, arguments="[]"))
        == "partial"
    )
    assert status_of(ToolCall("c", "f", "")) == "ok"
