"""Chooses the tool that fits the script's action, among all tools that a request offers.

Tools are recognised by their parameters: a command is a text (or list of texts) parameter named `command`, `cmd` or
similar; a file tool has a path, and a content if it writes. Other required parameters get harmless values.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.serving.scripted.script import CallTool, ReadFile, RunCommand, ToolUse, WriteFile

_COMMAND = ("command", "cmd", "script", "bash_command", "shell_command")
_PATH = ("path", "file_path", "filePath", "filepath", "absolute_path", "target_file", "filename", "file")
_CONTENT = ("content", "contents", "file_text", "file_content", "text")
_RUNS = ("bash", "shell", "exec", "run", "terminal", "command")
_WRITES = ("write", "create", "save")
_READS = ("read", "view", "cat", "open")


class _Function(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _Function

    @property
    def name(self) -> str:
        return self.function.name

    def parameters(self) -> dict[str, dict[str, Any]]:
        found: object = (self.function.parameters or {}).get("properties")
        return cast("dict[str, dict[str, Any]]", found) if isinstance(found, dict) else {}

    def required(self) -> list[str]:
        found: object = (self.function.parameters or {}).get("required")
        return cast("list[str]", found) if isinstance(found, list) else []

    def find(self, names: Sequence[str], *kinds: str) -> str | None:
        """The first of `names` that is a free parameter (not an enumeration) of one of the `kinds`."""
        parameters = self.parameters()
        for name in names:
            schema = parameters.get(name)
            if schema is not None and "enum" not in schema and _kinds(schema) & set(kinds):
                return name
        return None

    def fill(self, given: dict[str, Any], verbs: Sequence[str]) -> CallTool:
        parameters = self.parameters()
        rest = {name: _harmless(parameters.get(name, {}), verbs) for name in self.required()}
        return CallTool(name=self.name, arguments={**rest, **given})


def choose_tool(use: ToolUse, tools: Sequence[dict[str, Any]] | None) -> CallTool:
    """The call that carries out `use`.

    Raises:
        InvalidRequest: no offered tool can do it; the message lists the offered ones.
    """
    offered = [msgspec.convert(tool, _Tool) for tool in tools or ()]
    match use:
        case CallTool():
            return use
        case RunCommand(run=command):
            call = _run(command, offered)
        case WriteFile(write=file):
            by_shell = (
                f"mkdir -p -- {shlex.quote(file.path.rpartition('/')[0] or '.')} && "
                f"printf %s {shlex.quote(file.content)} > {shlex.quote(file.path)}"
            )
            call = _write(file.path, file.content, offered) or _run(by_shell, offered)
        case ReadFile(read=path):
            call = _read(path, offered) or _run(f"cat -- {shlex.quote(path)}", offered)
    if call is None:
        names = ", ".join(tool.name for tool in offered) or "none"
        raise InvalidRequest(f"the script wants {use!r}, and no offered tool can do it; offered: {names}.")
    return call


def _run(command: str, offered: Sequence[_Tool]) -> CallTool | None:
    for tool in _likeliest_first(offered, _RUNS):
        parameter = tool.find(_COMMAND, "string", "array")
        if parameter is not None:
            as_text = "string" in _kinds(tool.parameters()[parameter])
            value = command if as_text else ["bash", "-lc", command]
            return tool.fill({parameter: value}, _RUNS)
    return None


def _write(path: str, content: str, offered: Sequence[_Tool]) -> CallTool | None:
    for tool in _likeliest_first(offered, _WRITES):
        path_parameter, content_parameter = tool.find(_PATH, "string"), tool.find(_CONTENT, "string")
        if path_parameter is not None and content_parameter is not None:
            return tool.fill({path_parameter: path, content_parameter: content}, _WRITES)
    return None


def _read(path: str, offered: Sequence[_Tool]) -> CallTool | None:
    for tool in offered:
        parameter = tool.find(_PATH, "string")
        named_so = any(verb in tool.name.lower() for verb in _READS) or _enumerates(tool, _READS)
        if parameter is not None and named_so:
            return tool.fill({parameter: path}, _READS)
    return None


def _likeliest_first(offered: Sequence[_Tool], verbs: Sequence[str]) -> list[_Tool]:
    """Tools with a matching name first, otherwise in the order offered."""
    return sorted(offered, key=lambda tool: not any(verb in tool.name.lower() for verb in verbs))


def _enumerates(tool: _Tool, verbs: Sequence[str]) -> bool:
    """Whether a tool for several actions includes one of `verbs`."""
    return any(set(schema.get("enum", ())) & set(verbs) for schema in tool.parameters().values())


def _kinds(schema: dict[str, Any]) -> set[str]:
    options = [schema, *cast("list[dict[str, Any]]", schema.get("anyOf") or [])]
    kinds: set[str] = set()
    for option in options:
        kind: object = option.get("type")
        kinds.update(cast("list[str]", kind) if isinstance(kind, list) else [str(kind)])
    return kinds


def _harmless(schema: dict[str, Any], verbs: Sequence[str]) -> object:
    """A value that fits `schema`; for an enumeration, the intended verb if it is included."""
    options: list[object] = list(schema.get("enum", ()))
    if options:
        return next((option for option in options if option in verbs), options[0])
    values: dict[str, object] = {
        "boolean": False,
        "integer": schema.get("minimum", 1),
        "number": schema.get("minimum", 1),
        "array": [],
        "object": {},
    }
    kinds = _kinds(schema)
    return next((value for kind, value in values.items() if kind in kinds), "scripted")
