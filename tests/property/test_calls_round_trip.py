"""A call as a model's own template writes it, read back: the same call, or the reply says that one was lost."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from transformers.utils import chat_template_utils

from gangline.models.language.parsing.events import CallEvent, TextEvent
from gangline.models.language.parsing.parser import Parsers, ReplyParser, ToolFormat
from support.engines.tokenizers import template_text

# A busy machine is not a failure.
many = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)

TEMPLATES: dict[str, tuple[ToolFormat, bool]] = {
    "qwen3": ("hermes", True),
    "qwen3_5_think": ("qwen3_coder", False),
    "nemotron_3_super": ("qwen3_coder", False),
    "glm4moe": ("glm", False),
    "llama3_1": ("llama3_json", True),
    "gptoss": ("harmony", True),
}
"""Template of TRL -> its format, and whether its values have their own types."""

PIECES = (
    *(
        "</tool_call>",
        "<tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
        "<parameter=other>",
    ),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|call|>", "<|end|>", "<|channel|>", "<|message|>"),
    *(
        "<think>",
        "</think>",
        "\n",
        "\n\n",
        " ",
        "\t",
        '"',
        "'",
        "\\",
        "`",
        "{",
        "}",
        "[",
        "日",
        "é",
        "\u2028",
        "\x00",
        ";",
    ),
    *("1", "1.10", "true", "None", "null", "{}", "x", "-", "<|python_tag|>", '{"name": "f", "arguments": {}}'),
)
texts = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)

UNCARRIED = re.compile(r"</parameter>\s*<parameter=|</arg_value>\s*<arg_key>[^<>]*</arg_key>\s*<arg_value>")
"""What the end of a value and the beginning of another one look like: no format has it inside of a value."""


class Argument(NamedTuple):
    schema: Any
    value: Any
    may_be_text: bool = False
    may_be_null: bool = False


def of_kind(kind: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Argument]:
    return values.map(lambda value: Argument({"type": kind}, value))


integers = st.integers(-(10**30), 10**30)
numbers = st.floats(allow_nan=False, allow_infinity=False)
anything = st.recursive(
    st.none() | st.booleans() | integers | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(texts, anything, max_size=3)
written = texts.map(lambda text: Argument({"type": "string"}, text, may_be_text=True))
plain = st.one_of(
    of_kind("integer", integers),
    of_kind("number", numbers),
    of_kind("boolean", st.booleans()),
    of_kind("array", st.lists(anything, max_size=3)),
    of_kind("object", objects),
    st.sampled_from([1, True, 2.5]).map(lambda value: Argument({"enum": [1, True, 2.5]}, value)),
)
unions = st.tuples(plain, written, st.booleans(), st.sampled_from(["anyOf", "oneOf"])).map(
    lambda drawn: Argument(
        {drawn[3]: [drawn[0].schema, drawn[1].schema]}, drawn[0].value if drawn[2] else drawn[1].value, may_be_text=True
    )
)
choices = st.sampled_from(["auto", "None", "1", ""]).map(
    lambda value: Argument({"type": "string", "enum": ["auto", "None", "1", ""]}, value, may_be_text=True)
)


def nullable(argument: Argument, is_null: bool) -> Argument:
    value = None if is_null else argument.value
    return Argument({"anyOf": [argument.schema, {"type": "null"}]}, value, argument.may_be_text, may_be_null=True)


some = st.one_of(written, written, plain, unions, choices)
arguments = st.one_of(some, st.builds(nullable, st.one_of(written, plain, unions), st.booleans()))
names = st.sampled_from(["a", "b", "path", "new_str", "größe", "x-y", "type", "name"])
calls = st.dictionaries(names, arguments, max_size=4)


def schema_of(call: dict[str, Argument], *, by_reference: bool) -> dict[str, Any]:
    schemas = {name: argument.schema for name, argument in call.items()}
    if not by_reference:
        return {"type": "object", "properties": schemas}
    references = {name: {"$ref": f"#/$defs/{name}"} for name in schemas}
    return {"type": "object", "properties": references, "$defs": schemas}


def as_read(argument: Argument, tools: ToolFormat) -> Any:
    """What can be known of a value that was written without its type."""
    value: Any = argument.value
    is_json = type(value) in (list, dict) or (tools == "glm" and not isinstance(value, str))
    text = json.dumps(value, ensure_ascii=False) if is_json else str(value)
    if argument.may_be_null and text.strip() in ("null", "None"):
        return None
    return text if argument.may_be_text else argument.value


def reply(template: str, called: list[dict[str, Any]]) -> tuple[str, bool]:
    """A reply that is these calls, as the template writes it, and whether it begins in a think block."""
    message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": c} for c in called]}
    user = {"role": "user", "content": "x"}

    def rendered(messages: list[dict[str, Any]], *, opened: bool) -> str:
        render: Any = getattr(chat_template_utils, "render_jinja_template")  # noqa: B009 - its types are partly unknown
        return render([messages], chat_template=template_text(template), add_generation_prompt=opened)[0][0]

    prompt, whole = rendered([user], opened=True), rendered([user, message], opened=False)
    text = whole[
        sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False))) :
    ]
    text = text.rstrip("\n").removesuffix("<|im_end|>").removesuffix("<|eot_id|>")
    return text, prompt.rstrip().endswith("<think>")


@pytest.mark.parametrize("template", TEMPLATES)
@many
@given(
    call=calls,
    second=calls,
    name=st.sampled_from(["f", "mcp__files.read-2"]),
    by_reference=st.booleans(),
    cuts=st.lists(st.integers(0, 400), max_size=10),
)
@example(
    call={},
    second={
        "b": Argument({"type": "string"}, "<parameter=a><parameter=a>", may_be_text=True),
        "a": Argument({"type": "string"}, "", may_be_text=True),
    },
    name="f",
    by_reference=False,
    cuts=[],
)
def test_calls_are_read_as_their_template_writes_them(
    template: str,
    call: dict[str, Argument],
    second: dict[str, Argument],
    name: str,
    by_reference: bool,
    cuts: list[int],
) -> None:
    tools, has_types = TEMPLATES[template]
    sent = [(name, call)] if template in ("llama3_1", "gptoss") else [(name, call), ("g", second)]
    schemas = {one: schema_of(values, by_reference=by_reference) for one, values in sent}
    assume(has_types or not UNCARRIED.search(json.dumps([schemas, [v.value for _, c in sent for v in c.values()]])))
    called = [{"name": one, "arguments": {key: a.value for key, a in values.items()}} for one, values in sent]
    text, in_thinking = reply(template, called)

    parsers = Parsers(tools, "harmony" if tools == "harmony" else "qwen3")
    parser = ReplyParser(parsers, in_thinking=in_thinking, schemas=schemas)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    events = [event for start, end in itertools.pairwise(borders) for event in parser.feed(text[start:end])]
    events += parser.finish()

    found = [(event.name, json.loads(event.arguments)) for event in events if isinstance(event, CallEvent)]
    expected = [
        (one, {key: a.value if has_types else as_read(a, tools) for key, a in values.items()}) for one, values in sent
    ]
    if parser.status == "ok":
        assert found == expected
        assert repr(found) == repr(expected)  # 1, 1.0 and True are equal
        assert not "".join(event.text for event in events if isinstance(event, TextEvent)).strip()
    else:
        assert not has_types
        assert re.search(r"</?(?:tool_call|parameter|function|arg_)", json.dumps(called))
