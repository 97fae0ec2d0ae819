"""Google's function declarations, tool choice, calls and responses -> canonical tools, calls and results.

Law: a call without an id gets one, and so does the response that answers it: the first open call of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gangline.domain.conversation import Document, Image, Text, ToolCall, ToolChoice, ToolDefinition, ToolResult
from gangline.wire.dialects.google.fields import Fields, invalid
from gangline.wire.dialects.google.schema import json_schema

MALFORMED_ARGUMENTS = "_malformed_arguments"
"""The single argument that carries arguments that are not a JSON object: Google's `args` must be an object."""


class ToolCalls:
    """Reads the function calls of a conversation and their responses, in order."""

    def __init__(self, dropped: list[str]) -> None:
        """dropped: receives the names of fields without meaning here."""
        self._dropped = dropped
        self._open_calls: list[tuple[str, str]] = []
        """(id, name) of calls without a response so far."""
        self._num_unnamed = 0

    def call(self, fields: Fields) -> ToolCall:
        """Read a `functionCall`. Raises: InvalidRequest."""
        name = _name(fields)
        call_id = _bare_id(fields.text("id"), name)
        if not call_id:
            call_id = f"call_{self._num_unnamed}_{name}"
            self._num_unnamed += 1
        self._open_calls.append((call_id, name))
        arguments = _arguments(fields.raw_object("args") or {})
        self._dropped += fields.left()
        return ToolCall(call_id, name, arguments)

    def result(self, fields: Fields, media: Sequence[Image | Document]) -> ToolResult:
        """Read a `functionResponse`, whose `parts` are `media`. Raises: InvalidRequest."""
        name = _name(fields)
        call_id = _bare_id(fields.text("id"), name) or self._open_call(name, fields.where)
        self._open_calls = [call for call in self._open_calls if call[0] != call_id]
        response = fields.raw_object("response") or {}
        self._dropped += fields.left()
        return ToolResult(call_id, (*_result_texts(response), *media), is_error=_is_error(response))

    def _open_call(self, name: str, where: str) -> str:
        for call_id, called in self._open_calls:
            if called == name:
                return call_id
        raise invalid(where, f"There is no function call of the name {name!r} before it that is not answered yet.")


def _name(fields: Fields) -> str:
    name = fields.text("name")
    if not name:
        raise invalid(fields.at("name"), "Name cannot be empty.")
    return name


def _bare_id(call_id: str | None, name: str) -> str:
    """Gemini CLI adds the prefix `NAME__` to every id that it receives."""
    return (call_id or "").removeprefix(f"{name.strip() or 'generic_tool'}__")


def _arguments(args: dict[str, Any]) -> str:
    """JSON text; if the arguments were not a JSON object when sent, the model's own text."""
    text = args.get(MALFORMED_ARGUMENTS)
    if len(args) == 1 and isinstance(text, str):
        return text
    return msgspec.json.encode(args).decode()


def _result_texts(response: dict[str, Any]) -> tuple[Text, ...]:
    """As in Google's API: `output` is the output and `error` the error; with neither, the whole response is the
    output.
    """
    if not response:
        return ()
    value: Any = next(iter(response.values())) if len(response) == 1 else None
    if isinstance(value, str) and next(iter(response)) in ("output", "error", "result"):
        return (Text(value),)
    return (Text(msgspec.json.encode(response).decode()),)


def _is_error(response: dict[str, Any]) -> bool:
    return response.get("error") not in (None, "", False)


def read_tools(body: Fields) -> tuple[tuple[ToolDefinition, ...], list[str]]:
    """The functions, and the names of the other tools."""
    tools: dict[str, ToolDefinition] = {}
    dropped: list[str] = []
    for entry, where in body.items("tools"):
        fields = Fields(entry, where)
        for declaration, at in fields.items("functionDeclarations"):
            tool = _function(Fields(declaration, at), dropped)
            if tool.name in tools:
                raise invalid(f"{at}.name", f"Duplicate function declaration found: {tool.name}")
            tools[tool.name] = tool
        dropped += [f"{where}: {path.removeprefix(where + '.')}" for path in fields.left()]
    return tuple(tools.values()), dropped


def _function(fields: Fields, dropped: list[str]) -> ToolDefinition:
    name = fields.text("name")
    if not name:
        raise invalid(fields.at("name"), "Invalid function name. It must not be empty.")
    parameters, schema = fields.raw_object("parametersJsonSchema"), fields.take("parameters")
    if parameters is None and schema is not None:
        parameters = json_schema(schema, fields.at("parameters"))
    tool = ToolDefinition(name, fields.text("description"), parameters)
    dropped += fields.left()
    return tool


def read_tool_choice(
    body: Fields, tools: tuple[ToolDefinition, ...]
) -> tuple[tuple[ToolDefinition, ...], ToolChoice | None, list[str]]:
    """The allowed tools, the choice among them, and the names of the dropped fields."""
    config = body.object("toolConfig")
    calling = config.object("functionCallingConfig") if config else None
    if config is None or calling is None:
        return tools, None, config.left() if config else []
    mode, names = (calling.text("mode") or "AUTO").upper(), set(calling.texts("allowedFunctionNames"))
    dropped = [*config.left(), *calling.left()]
    unknown = names - {tool.name for tool in tools}
    if unknown:
        raise invalid(calling.at("allowedFunctionNames"), f"No such function is declared: {sorted(unknown)}.")
    allowed = tuple(tool for tool in tools if not names or tool.name in names)
    match mode:
        case "AUTO" | "MODE_UNSPECIFIED" | "VALIDATED":
            # VALIDATED also constrains the arguments, which only an engine could do.
            validated = [f"{calling.at('mode')}: VALIDATED"] if mode == "VALIDATED" else []
            return allowed, ToolChoice("auto"), dropped + validated
        case "NONE":
            return tools, ToolChoice("none"), dropped
        case "ANY" if not tools:
            raise invalid(calling.at("mode"), "Function calling config is set without function_declarations.")
        case "ANY" if len(names) == 1:
            return tools, ToolChoice("named", names.pop()), dropped
        case "ANY":
            return allowed, ToolChoice("required"), dropped
        case _:
            raise invalid(calling.at("mode"), f"Invalid value {mode!r}; it is AUTO, ANY, NONE or VALIDATED.")
