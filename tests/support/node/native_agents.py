"""A model and tools for the loop of a native agent, without an engine and without a sandbox."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel

from gangline.agents.harnesses.native.config import Finish
from gangline.agents.harnesses.native.loop import converse
from gangline.agents.harnesses.native.model import CalledTool, Message, ModelReply
from gangline.agents.harnesses.native.toolbox import Toolbox
from gangline.agents.tools.action_server import ActionServer
from gangline.agents.tools.contract import NoConfig, Observation, Tool, ToolContext, ToolFailed
from gangline.domain.errors import HarnessError

__all__ = ["Conversed", "EchoTool", "FailingTool", "SayTool", "called", "conversed", "said"]


class EchoTool(Tool):
    """Answers with its arguments, as JSON, and keeps them."""

    Config: ClassVar[type[BaseModel]] = NoConfig
    name = "echo"
    description = "Repeat a text."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "times": {"type": "integer"}},
        "required": ["text"],
    }

    def __init__(self) -> None:
        self.given: list[Mapping[str, Any]] = []
        self.num_opened = self.num_closed = 0

    async def open(self, context: ToolContext) -> None:
        self.num_opened += 1

    async def run(self, arguments: Mapping[str, Any], context: ToolContext) -> Observation:
        self.given.append(arguments)
        return Observation(content=json.dumps(arguments))

    async def close(self) -> None:
        self.num_closed += 1


class SayTool(EchoTool):
    """Submits `text`."""

    name = "submit"

    async def run(self, arguments: Mapping[str, Any], context: ToolContext) -> Observation:
        return Observation(content="submitted", answer=arguments["text"])


class FailingTool(EchoTool):
    """Raises `error`."""

    name = "fail"

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error or ToolFailed("no such thing")

    async def run(self, arguments: Mapping[str, Any], context: ToolContext) -> Observation:
        raise self.error


def called(call_id: str, name: str = "echo", arguments: object = None) -> CalledTool:
    """A call; arguments that are not text are written as JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps({"text": "x"} if arguments is None else arguments)
    return CalledTool(call_id, name, text)


def said(text: str = "", *calls: CalledTool, cut_off: bool = False, unread: bool = False) -> ModelReply:
    message: Message = {"role": "assistant", "content": text or None}
    if calls:
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": function}
            for call, function in zip(calls, functions, strict=True)
        ]
    return ModelReply(message, text, calls, is_cut_off=cut_off, has_unread_calls=unread)


class _Model:
    """Says what it is to say, then that the call is refused."""

    def __init__(self, replies: Sequence[ModelReply]) -> None:
        self._replies = iter(replies)
        self.sent: list[list[Message]] = []

    async def ask(self, messages: Sequence[Message]) -> ModelReply:
        self.sent.append(copy.deepcopy(list(messages)))
        reply = next(self._replies, None)
        if reply is None:
            raise HarnessError("the model call was refused with 403")
        return reply


class Conversed(msgspec.Struct, kw_only=True):
    """The end of a loop."""

    answer: str | None
    error: str | None
    """Why there is no answer."""
    sent: list[list[Message]]
    """The messages of each model call."""

    @property
    def last(self) -> list[Message]:
        return self.sent[-1]

    @property
    def reports(self) -> list[str]:
        """Words of the user after the first ones."""
        return [message["content"] for message in self.last if message["role"] == "user"][1:]

    @property
    def results(self) -> list[str]:
        return [message["content"] for message in self.last if message["role"] == "tool"]


async def conversed(
    replies: Sequence[ModelReply],
    tools: Sequence[Tool] = (),
    *,
    finish: Finish = "answer",
    max_reminders: int = 3,
) -> Conversed:
    """tools: alongside `EchoTool`, or another one of its name instead. They have no sandbox."""

    async def no_server() -> ActionServer:
        raise AssertionError("no tool here needs one")

    no_runtime: Any = None
    context = ToolContext(
        runtime=no_runtime, env={}, action_server=no_server, command_timeout_s=1.0, max_output_bytes=1000
    )
    offered: dict[str, Tool] = {tool.name: tool for tool in (EchoTool(), *tools)}
    model = _Model(replies)
    answer, failure = None, None
    async with Toolbox(list(offered.values()), context) as toolbox:
        try:
            opening: list[Message] = [{"role": "user", "content": "Do it."}]
            answer = await converse(model, toolbox, opening, finish=finish, max_reminders=max_reminders)
        except HarnessError as error:
            failure = error.message
    return Conversed(answer=answer, error=failure, sent=model.sent)
