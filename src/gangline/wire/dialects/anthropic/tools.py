"""Anthropic Messages: tools and tool choice -> canonical.

There are three kinds of tools: the client's own, with a schema; hosted ones, which the provider would run (omitted and
reported); and client-run ones whose schema only the provider's models know (rejected).

A tool with `defer_loading` is shown where the conversation first refers to it, as the provider does: the tools before
the conversation stay the same, so every call continues the previous one. If deferred tools could only be found by the
provider's search, they are offered from the start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from gangline.domain.conversation import ToolChoice, ToolDefinition
from gangline.domain.errors import InvalidRequest
from gangline.wire.dialects.anthropic.wire import ToolChoiceParam, ToolParam

_HOSTED = ("web_search", "web_fetch", "code_execution", "tool_search_tool", "mcp_toolset", "advisor")

_DATE = re.compile(r"_\d{8}$")


class Toolbox(msgspec.Struct):
    """The tools that a request offers."""

    offered: tuple[ToolDefinition, ...]
    """The tools before the conversation."""
    known: dict[str, ToolDefinition]
    """All tools by name, including deferred ones."""
    dropped: tuple[str, ...]
    held_by_thread: bool = False
    """Whether the request continues a thread, whose tools are unknown when it is parsed."""

    def shown(self, names: Iterable[str]) -> str:
        """Definitions for use inside the conversation, in the format that tool search promises to the model.

        Raises: InvalidRequest for a name without a definition in the request.
        """
        lines = [f"<function>{self._fields(name)}</function>" for name in names]
        return "\n".join(["<functions>", *lines, "</functions>"])

    def _fields(self, name: str) -> str:
        if self.held_by_thread and name not in self.known:
            raise InvalidRequest(
                f"thread: the definition of {name!r} is not kept with the thread; send the whole conversation",
                param="thread",
                error_code="thread_unsupported_request",
            )
        tool = self.known.get(name, ToolDefinition(name))
        fields = {"description": tool.description, "name": name, "parameters": tool.parameters}
        return msgspec.json.encode({key: value for key, value in fields.items() if value is not None}).decode()


def read_tools(params: Sequence[ToolParam], *, held_by_thread: bool = False) -> Toolbox:
    """Raises: InvalidRequest."""
    offered: list[ToolDefinition] = []
    known: dict[str, ToolDefinition] = {}
    dropped: list[str] = []
    searched_by_provider = any((param.type or "").startswith("tool_search_tool") for param in params)
    for i, param in enumerate(params):
        if param.type is not None and param.type.startswith(_HOSTED):
            dropped.append(f"tools[{i}]: {_DATE.sub('', param.type)}")
            continue
        tool = tool_definition(param, f"tools.{i}")
        if tool.name in known:
            raise InvalidRequest("tools: Tool names must be unique.", param="tools")
        known[tool.name] = tool
        if searched_by_provider or not param.defer_loading:
            offered.append(tool)
            dropped += [f"tools[{i}].defer_loading"] if param.defer_loading else []
        dropped += [f"tools[{i}].input_examples"] if param.input_examples else []
    return Toolbox(tuple(offered), known, tuple(dropped), held_by_thread)


def tool_definition(param: ToolParam, where: str) -> ToolDefinition:
    """Raises: InvalidRequest."""
    if param.type not in (None, "custom"):
        raise InvalidRequest(
            f"{where}.type: {param.type!r} is known to the provider's models only; "
            "send it as a tool with a name, a description and an input_schema",
            param=f"{where}.type",
        )
    if not param.name:
        raise InvalidRequest(f"{where}.name: Field required", param=f"{where}.name")
    if param.input_schema is None:
        raise InvalidRequest(f"{where}.input_schema: Field required", param=f"{where}.input_schema")
    return ToolDefinition(param.name, param.description, param.input_schema, param.strict)


def tool_choice(param: ToolChoiceParam | None, toolbox: Toolbox) -> tuple[ToolChoice | None, bool | None]:
    """(choice, whether calls may be parallel). For a continued thread the tools are checked later, once they are known.

    Raises: InvalidRequest if it names a missing tool.
    """
    if param is None:
        return None, None
    tools, held = toolbox.offered, toolbox.held_by_thread
    parallel = None if param.disable_parallel_tool_use is None else not param.disable_parallel_tool_use
    match param.type:
        case "tool":
            if not held and param.name not in {tool.name for tool in tools}:
                raise InvalidRequest(
                    f"tool_choice.name: Tool {param.name!r} is not offered; hosted and deferred tools are not",
                    param="tool_choice.name",
                )
            return ToolChoice("named", param.name), parallel
        case "any":
            if not tools and not held:
                raise InvalidRequest("tool_choice: 'any' needs a tool that is not hosted", param="tool_choice")
            return ToolChoice("required"), parallel
        case "auto" | "none":
            has_tools = bool(tools) or held
            return ToolChoice(param.type) if has_tools else None, parallel if has_tools else None
