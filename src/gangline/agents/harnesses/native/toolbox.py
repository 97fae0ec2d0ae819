"""The tools of one session: their definitions for the model, and the execution of its calls.

A call is not executed if it is malformed: an unknown tool, arguments that are not a JSON object or lack a required one,
a missing or reused id. Its result explains why and lists the alternatives. Arguments are passed to the tool as the
model wrote them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self, cast

import msgspec

from gangline.agents.harnesses.native.model import CalledTool, Message
from gangline.agents.tools.calls import observe
from gangline.agents.tools.contract import Tool, ToolContext

_NOT_DONE = "not done: the task was submitted before"


class Acted(msgspec.Struct, kw_only=True):
    """The results of one reply's calls."""

    results: list[Message] = msgspec.field(default_factory=list[Message])
    """One per call, in order."""
    num_done: int = 0
    num_unreadable: int = 0
    answer: str | None = None
    """Set if a call submitted it."""


class _Unreadable(Exception):
    """A malformed call. The message is for the model."""


class Toolbox:
    """Use as a context manager."""

    def __init__(self, tools: Sequence[Tool], context: ToolContext) -> None:
        """tools: must have distinct names."""
        self._tools = {tool.name: tool for tool in tools}
        self._context = context
        self._used_ids: set[str] = set()
        self._opened = AsyncExitStack()

    @property
    def names(self) -> Collection[str]:
        return self._tools.keys()

    @property
    def offered(self) -> list[Message]:
        """See `offered`."""
        return offered(self._tools.values())

    async def __aenter__(self) -> Self:
        """Raises: HarnessError if a tool cannot be used in this session."""
        async with AsyncExitStack() as opening:
            for tool in self._tools.values():
                opening.push_async_callback(tool.close)
                await tool.open(self._context)
            self._opened = opening.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def act(self, calls: Sequence[CalledTool]) -> Acted:
        """Execute the calls in sequence, stopping after one that submits.

        Raises: RuntimeFailed if the sandbox is gone; HarnessError if a tool no longer works.
        """
        acted = Acted()
        for call in calls:
            content = _NOT_DONE if acted.answer is not None else await self._result(call, acted)
            acted.results.append({"role": "tool", "tool_call_id": call.call_id, "content": content})
        return acted

    async def _result(self, call: CalledTool, acted: Acted) -> str:
        try:
            tool, arguments = self._read(call)
        except _Unreadable as error:
            acted.num_unreadable += 1
            return f"error: this call was not done: {error}"
        seen = await observe(tool, arguments, self._context)
        acted.num_done += 1
        acted.answer = seen.answer
        return seen.content

    def _read(self, call: CalledTool) -> tuple[Tool, dict[str, Any]]:
        """Raises: _Unreadable."""
        if not call.call_id:
            raise _Unreadable("it has no id")
        if call.call_id in self._used_ids:
            raise _Unreadable(f"its id, {call.call_id!r}, was used by an earlier call")
        self._used_ids.add(call.call_id)
        tool = self._tools.get(call.name)
        if tool is None:
            raise _Unreadable(f"there is no tool {call.name!r}; there are: {', '.join(self._tools)}")
        return tool, _arguments(call, tool.parameters)


def offered(tools: Iterable[Tool]) -> list[Message]:
    """The tools in the form of the Chat API."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in tools
    ]


def _arguments(call: CalledTool, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Raises: _Unreadable."""
    try:
        arguments: object = msgspec.json.decode(call.arguments.encode(errors="surrogatepass") or b"{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _Unreadable(f"its arguments are not JSON ({error}). {_described(call.name, schema)}") from None
    if not isinstance(arguments, dict):
        raise _Unreadable(f"its arguments are not a JSON object. {_described(call.name, schema)}")
    missing = [name for name in schema.get("required", ()) if name not in arguments]
    if missing:
        raise _Unreadable(f"it lacks {', '.join(missing)}. {_described(call.name, schema)}")
    return cast("dict[str, Any]", arguments)


def _described(name: str, schema: Mapping[str, Any]) -> str:
    """A sentence that lists the tool's arguments."""
    required = schema.get("required", ())
    known = [f"{one} (required)" if one in required else one for one in schema.get("properties", {})]
    return f"The arguments of {name}: {', '.join(known) or 'none'}."
