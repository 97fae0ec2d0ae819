"""Values of tool calls whose format has no types, by schemas as tools publish them: text stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gangline.models.language.parsing.events import CallEvent
from gangline.models.language.parsing.parser import Parsers, ReplyParser, ToolFormat

TEXT, NULL, INTEGER = {"type": "string"}, {"type": "null"}, {"type": "integer"}

DEFINITIONS: dict[str, Any] = {
    "Text": TEXT,
    "Count": INTEGER,
    "Again": {"$ref": "#/$defs/Text"},
    "Either": {"anyOf": [{"$ref": "#/$defs/Text"}, NULL]},
    "Tree": {"anyOf": [INTEGER, {"type": "array", "items": {"$ref": "#/$defs/Tree"}}, {"$ref": "#/$defs/Tree"}]},
    "Circle": {"$ref": "#/$defs/Circle"},
    "a/b c": TEXT,
}

MAY_BE_TEXT: dict[str, Any] = {
    "text": TEXT,
    "optional, as pydantic writes it": {"anyOf": [TEXT, NULL], "default": None, "title": "X"},
    "the other way round": {"anyOf": [NULL, TEXT]},
    "a number or text": {"anyOf": [INTEGER, TEXT]},
    "a list of types": {"type": ["string", "null"]},
    "a list of types, a number first": {"type": ["integer", "string"]},
    "oneOf": {"oneOf": [{"type": "object"}, TEXT]},
    "allOf": {"allOf": [TEXT, {"minLength": 1}]},
    "allOf around a union": {"allOf": [{"anyOf": [INTEGER, TEXT]}]},
    "a union in a union": {"anyOf": [{"anyOf": [{"oneOf": [INTEGER, TEXT]}]}, NULL]},
    "a reference": {"$ref": "#/$defs/Text"},
    "a reference to a reference": {"$ref": "#/$defs/Again", "description": "x"},
    "a reference to a union": {"$ref": "#/$defs/Either"},
    "a reference in a union": {"anyOf": [{"$ref": "#/$defs/Count"}, {"$ref": "#/$defs/Text"}]},
    "a reference with signs": {"$ref": "#/$defs/a~1b%20c"},
    "a reference that leads nowhere": {"$ref": "#/$defs/Gone"},
    "a reference to another place": {"$ref": "https://example.test/schema.json"},
    "nullable": {"type": "string", "nullable": True},
    "Google's spelling": {"type": "STRING", "nullable": True},
    "a word for text": {"type": "str"},
    "any": {"type": "any"},
    "no type": {"description": "x"},
    "nothing": {},
    "true": True,
    "a format": {"type": "string", "format": "date"},
    "a pattern": {"type": "string", "pattern": "^x"},
    "an enum of texts that it misses": {"type": "string", "enum": ["a", "b"]},
    "an enum of texts without a type": {"enum": ["a", "b"]},
    "broken": {"type": 3},
    "a broken union": {"anyOf": "x"},
}

TEXTS = ["12345", "1.10", '{"a": 1}', "[1]", "true", "True", "007", "1e5", '"x"', "", " x ", "-0", "NaN", "'a'", "日\n"]


def call(tools: ToolFormat, properties: Any, **values: str) -> dict[str, Any]:
    """What a client is given for a call of `f` with these values."""
    if tools == "glm":
        pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items())
        text = f"<tool_call>f\n{pairs}</tool_call>"
    else:
        pairs = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
        text = f"<tool_call>\n<function=f>\n{pairs}</function>\n</tool_call>"
    schema = properties if "schema" in properties else {"schema": {"type": "object", "properties": properties}}
    parser = ReplyParser(Parsers(tools), schemas={"f": schema["schema"] | {"$defs": DEFINITIONS}})
    (event,) = parser.feed(text) + parser.finish()
    assert isinstance(event, CallEvent)
    assert parser.status == "ok"
    return json.loads(event.arguments)


FORMATS: tuple[ToolFormat, ...] = ("qwen3_coder", "glm")


@pytest.mark.parametrize("name", MAY_BE_TEXT)
@pytest.mark.parametrize("tools", FORMATS)
def test_a_value_is_text_wherever_the_schema_allows_text(tools: ToolFormat, name: str) -> None:
    for text in TEXTS:
        assert call(tools, {"x": MAY_BE_TEXT[name]}, x=text) == {"x": text}


OTHERS: list[tuple[Any, str, Any]] = [
    (INTEGER, "12345", 12345),
    (INTEGER, " 7 ", 7),
    (INTEGER, "1_000", 1000),
    (INTEGER, "123456789012345678901234567890", 123456789012345678901234567890),
    (INTEGER, "x", "x"),
    (INTEGER, "", ""),
    (INTEGER, "007", "007"),
    (INTEGER, "1.5", 1.5),
    (INTEGER, "1,000", "1,000"),
    (INTEGER, '"5"', 5),
    ({"type": "number"}, "1.10", 1.1),
    ({"type": "number"}, "3", 3),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "INTEGER"}, "3", 3),
    ({"type": "float"}, "3.5", 3.5),
    ({"type": "boolean"}, "true", True),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "FALSE", False),
    ({"type": "boolean"}, "yes", "yes"),
    ({"type": "boolean"}, "1", 1),
    ({"type": "object"}, '{"a": "1"}', {"a": "1"}),
    ({"type": "object"}, "{'a': True, 'b': None, 'c': 'it is'}", {"a": True, "b": None, "c": "it is"}),
    ({"type": "object"}, '"{\\"a\\": 1}"', {"a": 1}),
    ({"type": "object"}, "{1: 2}", "{1: 2}"),
    ({"type": "object"}, "{1, 2}", "{1, 2}"),
    ({"type": "object"}, '{"a": 1', '{"a": 1'),
    ({"type": "dict"}, '{"a": 1}', {"a": 1}),
    ({"type": "array", "items": TEXT}, '["1", 2]', ["1", 2]),
    ({"type": "array"}, "['a', 'b',]", ["a", "b"]),
    ({"type": "array"}, "('a', 'b')", "('a', 'b')"),
    ({"type": "array"}, "[b'a']", "[b'a']"),
    ({"type": "array"}, "[" * 9999, "[" * 9999),
    ({"type": "array"}, "[1e999]", "[1e999]"),
    ({"type": "array"}, "['\\d']", ["\\d"]),
    ({"items": TEXT}, "[1]", [1]),
    ({"properties": {"a": TEXT}}, '{"a": 1}', {"a": 1}),
    ({"anyOf": [INTEGER, NULL]}, "3", 3),
    ({"anyOf": [INTEGER, NULL]}, "null", None),
    ({"anyOf": [INTEGER, NULL]}, "None", None),
    ({"anyOf": [TEXT, NULL]}, "null", None),
    ({"anyOf": [TEXT, NULL]}, "None", None),
    ({"anyOf": [TEXT, NULL]}, "none", "none"),
    ({"anyOf": [TEXT, NULL]}, "NULL", "NULL"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": "string", "nullable": True}, "null", None),
    ({"$ref": "#/$defs/Either"}, "null", None),
    ({"enum": ["a", None]}, "null", None),
    ({"enum": ["None", None]}, "None", "None"),
    ({"anyOf": [{"enum": ["None"]}, NULL]}, "None", "None"),
    (TEXT, "null", "null"),
    (TEXT, "None", "None"),
    (INTEGER, "null", None),
    ({"anyOf": [{"enum": ["auto"]}, INTEGER]}, "auto", "auto"),
    ({"anyOf": [{"type": "string", "enum": ["auto"]}, INTEGER]}, "5", 5),
    ({"anyOf": [{"const": "auto"}, {"type": "boolean"}]}, "True", True),
    ({"enum": [1, 2, "3"]}, "1", 1),
    ({"enum": [1, 2, "3"]}, "3", "3"),
    ({"enum": [1, 2]}, "2", 2),
    ({"const": 1}, "1", 1),
    ({"const": "1"}, "1", "1"),
    ({"enum": [True, False]}, "1", 1),
    ({"$ref": "#/$defs/Count"}, "5", 5),
    ({"$ref": "#/$defs/Tree"}, "[1, [2]]", [1, [2]]),
    ({"$ref": "#/$defs/Circle"}, "5", 5),
    ({"allOf": [{"$ref": "#/$defs/Count"}], "description": "x"}, "5", 5),
    ({"allOf": [{"type": ["integer", "string"]}, INTEGER]}, "5", 5),
    (False, "5", 5),
    (False, "x", "x"),
]


@pytest.mark.parametrize(("schema", "text", "value"), OTHERS)
@pytest.mark.parametrize("tools", FORMATS)
def test_a_value_that_may_not_be_text_is_json(tools: ToolFormat, schema: Any, text: str, value: Any) -> None:
    read = call(tools, {"x": schema}, x=text)["x"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"x": TEXT}}, "5"),
        ({"properties": {"y": TEXT}}, "5"),
        ({"additionalProperties": INTEGER}, 5),
        ({"properties": {"y": TEXT}, "additionalProperties": INTEGER}, 5),
        ({"additionalProperties": True}, "5"),
        ({"additionalProperties": False}, "5"),
        ({"patternProperties": {"^x": INTEGER}}, 5),
        ({"patternProperties": {"^y": INTEGER}}, "5"),
        ({"patternProperties": {"(": INTEGER}}, "5"),
        ({"$ref": "#/$defs/Arguments"}, 5),
        ({"allOf": [{"properties": {"x": INTEGER}}, {"properties": {"y": TEXT}}]}, 5),
        ({"allOf": [{"properties": {"x": {}}}, {"properties": {"x": INTEGER}}]}, 5),
        ({"anyOf": [{"properties": {"x": INTEGER}}, {"properties": {"y": TEXT}}]}, 5),
        ({"oneOf": [{"properties": {"x": INTEGER}}, {"properties": {"x": TEXT}}]}, "5"),
        ({"properties": None}, "5"),
        ({"properties": []}, "5"),
    ],
)
@pytest.mark.parametrize("tools", FORMATS)
def test_a_property_is_found_wherever_the_schema_describes_it(tools: ToolFormat, schema: Any, expected: Any) -> None:
    DEFINITIONS["Arguments"] = {"properties": {"x": INTEGER}}
    assert call(tools, {"schema": schema}, x="5") == {"x": expected}


def test_a_number_keeps_its_spelling() -> None:
    """Not 1.1 for 1.10: nothing of a value changes without a word."""
    schema = {"properties": {"x": {"type": "number"}, "y": {"type": "object"}}}
    parser = ReplyParser(Parsers("glm"), schemas={"f": schema})
    pairs = [("x", "1.10"), ("y", '{"a":  1e2}')]
    body = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in pairs)
    assert parser.feed(f"<tool_call>f{body}</tool_call>") == [CallEvent("f", '{"x":1.10,"y":{"a":  1e2}}')]


def test_the_values_of_a_tool_that_nobody_offered_are_text() -> None:
    parser = ReplyParser(Parsers("glm"), schemas={})
    text = "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"
    assert parser.feed(text) == [CallEvent("f", '{"x":"1"}')]
