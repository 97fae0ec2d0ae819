"""An episode: one session of a task in which an external client takes the place of the model.

Laws
- The session is ordinary: prepared, limited, graded and removed like any other. Its agent is `native`.
- Each model call waits for the client's next action. The next call carries the result.
- The reward is the evaluator's. Without an evaluator, `reward` is None, never 0.
- A session is tried once. A second attempt would start over in the middle of the client's episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from gangline.domain.errors import Conflict, InvalidRequest, NotFound
from gangline.domain.ids import new_id, new_secret
from gangline.domain.session import SessionResult
from gangline.wire.client.server import ServerClient

_SUBMIT = "submit"
_MAX_IN_VAIN = 1_000_000
"""Unreadable calls in a row. A client is bounded by the task's `max_turns`, not by this limit, which is for models."""


class Tool(msgspec.Struct, frozen=True):
    """A tool that the client may call, with OpenEnv's field names."""

    name: str
    description: str
    input_schema: dict[str, Any]


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The client's observation."""

    text: str = ""
    """The instruction at first, then the last call's result."""
    done: bool = False
    reward: float | None = None
    """The whole episode's reward, at its end; None before, and if the task could not be graded."""
    metadata: dict[str, Any] = {}
    """At the end: `session_id`, `outcome`, `reward_details`, and `failure` if there was one."""


class WaitingCall:
    """A model call of the session that waits for the client's action."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
        """messages, tools: in the Chat API's form."""
        self.messages = messages
        self.tools = [_tool(tool.get("function", {})) for tool in tools]
        self.reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        """The assistant's message."""

    @property
    def news(self) -> str:
        """The text after the last assistant message; for the first call, the instruction."""
        new: list[str] = []
        for message in reversed(self.messages):
            if message.get("role") in ("assistant", "system"):
                break
            new.append(_text(message.get("content")))
        return "\n".join(reversed(new))


class Episode:
    """Call `begin` once, then `act` until the end; call `close` in every case."""

    def __init__(self, client: ServerClient, task: Mapping[str, Any], name: str) -> None:
        """task: as returned by `played_task`, without an id. name: the task's."""
        self.key = new_secret("episode")
        """Identifies the episode in its session's model calls."""
        self.episode_id = new_id("episode")
        self.name = name
        self.num_steps = 0
        self.tools: list[Tool] = []
        self._client = client
        self._task = task
        self._calls: asyncio.Queue[WaitingCall] = asyncio.Queue()
        self._waiting: WaitingCall | None = None
        self._is_begun = False
        self._end: asyncio.Task[Seen] | None = None
        self._acting = asyncio.Lock()

    def ask(self, call: WaitingCall) -> None:
        """Accept a model call of the session."""
        self._calls.put_nowait(call)

    async def begin(self) -> Seen:
        """Start the session. Returns the instruction. Raises: errors of the service, such as InvalidRequest."""
        agent = self._task["agent"]
        settings = {**agent["settings"], "system_prompt": self.key}
        task_id = self.episode_id
        self._is_begun = True  # from now on there may be a session, even if the answer is lost
        await self._client.submit({**self._task, "task_id": task_id, "agent": {**agent, "settings": settings}})
        self._end = asyncio.create_task(self._ended(task_id), name=task_id)
        return await self._next()

    async def act(self, tool: str, arguments: Mapping[str, Any]) -> Seen:
        """Call a tool. Returns its result, or the end. Raises: Conflict after the end; errors of the service."""
        async with self._acting:
            if self._waiting is None:
                raise Conflict("the episode is over: reset begins another one.")
            waiting, self._waiting = self._waiting, None
            if not waiting.reply.done():  # the session may have ended meanwhile
                waiting.reply.set_result(_called(tool, arguments, self.num_steps))
            self.num_steps += 1
            return await self._next()

    async def close(self) -> None:
        """End the session if it is running, and forget it. Idempotent."""
        if not self._is_begun:
            return
        end, self._end, self._waiting, self._is_begun = self._end, None, None, False
        if end is None or not end.done():
            with suppress(NotFound):  # the submit was refused or interrupted
                await self._client.cancel(self.episode_id)
        if end is not None:
            end.cancel()
            await asyncio.gather(end, return_exceptions=True)

    async def _next(self) -> Seen:
        """The next model call's new text, or the end."""
        assert self._end is not None
        asked = asyncio.ensure_future(self._calls.get())
        try:
            await asyncio.wait({asked, self._end}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                return await asyncio.shield(self._end)
            self._waiting = asked.result()
            self.tools = self._waiting.tools
            return Seen(text=self._waiting.news)
        finally:
            asked.cancel()

    async def _ended(self, task_id: str) -> Seen:
        await self._client.wait(task_id)
        (result,) = await self._client.result(task_id)
        return _last(result)


def played_task(task: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The task with agent `native`, including the task's own tools if that is already its agent.

    Raises: InvalidRequest if the task has skills, which clients cannot receive.
    """
    agent: Mapping[str, Any] = task.get("agent") or {}
    if agent.get("skills"):
        raise InvalidRequest(f"{where}: agent.skills are for agent programs, and a client over OpenEnv is none.")
    own: Mapping[str, Any] = agent.get("settings", {}) if agent.get("harness") == "native" else {}
    settings: dict[str, Any] = {**own, "finish": _SUBMIT, "max_reminders": _MAX_IN_VAIN}
    kept = {name: agent[name] for name in ("env", "max_turns", "mcp_servers") if name in agent}
    played: dict[str, Any] = {**kept, "harness": "native", "settings": settings, "allow_unrendered_tools": True}
    body = {name: value for name, value in task.items() if name != "task_id"}
    return {**body, "agent": played, "num_samples": 1, "max_attempts": 1}


def _last(result: SessionResult) -> Seen:
    about: dict[str, Any] = {"session_id": result.session_id, "outcome": result.outcome}
    if result.reward_details:
        about["reward_details"] = msgspec.to_builtins(result.reward_details)
    if result.failure is not None:
        about["failure"] = {"code": result.failure.code, "message": result.failure.message}
    return Seen(done=True, reward=result.reward, metadata=about, text=f"The episode is over: {result.outcome}.")


def _called(tool: str, arguments: Mapping[str, Any], number: int) -> dict[str, Any]:
    function = {"name": tool, "arguments": msgspec.json.encode(arguments).decode()}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }


def _tool(function: Mapping[str, Any]) -> Tool:
    return Tool(function.get("name", ""), function.get("description", ""), function.get("parameters", {}))


def _text(content: Any) -> str:
    """Text of a message's content, which is a string or a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))  # pyright: ignore
    return content if isinstance(content, str) else ""
