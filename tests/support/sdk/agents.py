"""One small agent on each provider's official SDK: it asks, runs the tools it is told to, continues.

Each knows its own history and nothing of Gangline; what it sends back is what its SDK gave it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
from google import genai
from google.genai import types

__all__ = ["AGENTS", "Agent", "Turn"]

MAX_TOKENS = 200
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


class Turn:
    """What the agent saw of one reply."""

    def __init__(self, text: str, thinking: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
        self.text, self.thinking, self.calls = text, thinking, calls


class Agent:
    """`say` something, then `step`: one model call, whose tool calls are answered with `tool_output`."""

    def __init__(self, client: Any, *, stream: bool, tools: bool = True) -> None:
        self.client, self.stream, self.tools = client, stream, tools
        self.history: list[Any] = []

    def say(self, text: str) -> None:
        raise NotImplementedError

    async def step(self, tool_output: str) -> Turn:
        raise NotImplementedError

    async def converse(self, tool_outputs: Iterable[str], is_enough: Callable[[list[Turn]], bool]) -> list[Turn]:
        """One conversation, a model call for each tool output; whenever the model has answered, it is asked again."""
        turns: list[Turn] = []
        self.say("Which word is in a.txt?")
        for output in tool_outputs:
            turns.append(await self.step(output))
            if is_enough(turns):
                break
            if not turns[-1].calls:
                self.say("Which word is in b.txt?")
        return turns


def _arguments(text: str) -> dict[str, Any]:
    """Empty where the model wrote no JSON: an agent's tool would answer with an error, not crash."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


class ChatAgent(Agent):
    def say(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    async def step(self, tool_output: str) -> Turn:
        function = {"name": "read_file", "description": "Read a file.", "parameters": PARAMETERS}
        request: dict[str, Any] = {"model": "tiny", "messages": self.history, "max_tokens": MAX_TOKENS}
        if self.tools:
            request["tools"] = [{"type": "function", "function": function}]
        message = await self._ask(request)
        self.history.append(message)
        calls = message.get("tool_calls") or []
        self.history += [{"role": "tool", "tool_call_id": call["id"], "content": tool_output} for call in calls]
        called = [(call["function"]["name"], _arguments(call["function"]["arguments"])) for call in calls]
        return Turn(message.get("content") or "", message.get("reasoning_content") or "", called)

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if not self.stream:
            whole = await self.client.chat.completions.create(**request)
            return whole.choices[0].message.to_dict(exclude_none=True)
        message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
        calls: dict[int, dict[str, Any]] = {}
        async for chunk in await self.client.chat.completions.create(**request, stream=True):
            for delta in [choice.delta.to_dict() for choice in chunk.choices]:
                for name in ("content", "reasoning_content"):
                    message[name] += delta.get(name) or ""
                for piece in delta.get("tool_calls") or []:
                    call = calls.setdefault(piece["index"], {"type": "function", "function": {"arguments": ""}})
                    call["id"] = piece.get("id") or call["id"]
                    function = piece["function"]
                    call["function"]["name"] = function.get("name") or call["function"]["name"]
                    call["function"]["arguments"] += function.get("arguments") or ""
        return message | ({"tool_calls": list(calls.values())} if calls else {})


class ResponsesAgent(Agent):
    def say(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    async def step(self, tool_output: str) -> Turn:
        tool = {"type": "function", "name": "read_file", "description": "Read a file.", "parameters": PARAMETERS}
        request: dict[str, Any] = {"model": "tiny", "input": self.history, "max_output_tokens": MAX_TOKENS}
        request |= {"tools": [tool | {"strict": False}] if self.tools else [], "reasoning": {"summary": "auto"}}
        if self.stream:
            async with self.client.responses.stream(**request) as events:
                reply = await events.get_final_response()
        else:
            reply = await self.client.responses.create(**request)
        # The parsing helpers of a streamed reply carry fields of their own.
        items = [item.to_dict(exclude_none=True) for item in reply.output]
        self.history += [{k: v for k, v in item.items() if k not in ("parsed_arguments", "status")} for item in items]
        calls = [item for item in items if item["type"] == "function_call"]
        self.history += [
            {"type": "function_call_output", "call_id": call["call_id"], "output": tool_output} for call in calls
        ]
        thinking = "".join(part["text"] for i in items if i["type"] == "reasoning" for part in i["summary"])
        return Turn(reply.output_text, thinking, [(call["name"], _arguments(call["arguments"])) for call in calls])


class AnthropicAgent(Agent):
    def say(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    async def step(self, tool_output: str) -> Turn:
        tool = {"name": "read_file", "description": "Read a file.", "input_schema": PARAMETERS}
        request: dict[str, Any] = {"model": "tiny", "messages": self.history, "max_tokens": MAX_TOKENS}
        request |= {"tools": [tool]} if self.tools else {}
        if self.stream:
            async with self.client.messages.stream(**request) as events:
                reply = await events.get_final_message()
        else:
            reply = await self.client.messages.create(**request)
        blocks = [block.to_dict() for block in reply.content]
        self.history.append({"role": "assistant", "content": blocks})
        calls = [block for block in blocks if block["type"] == "tool_use"]
        if calls:
            results = [{"type": "tool_result", "tool_use_id": c["id"], "content": tool_output} for c in calls]
            self.history.append({"role": "user", "content": results})
        texts = ["".join(b.get(kind, "") for b in blocks if b["type"] == kind) for kind in ("text", "thinking")]
        return Turn(texts[0], texts[1], [(call["name"], call["input"]) for call in calls])


class GoogleAgent(Agent):
    def say(self, text: str) -> None:
        self.history.append(types.Content(role="user", parts=[types.Part(text=text)]))

    async def step(self, tool_output: str) -> Turn:
        declaration = types.FunctionDeclaration(
            name="read_file", description="Read a file.", parameters_json_schema=PARAMETERS
        )
        config = types.GenerateContentConfig(
            tools=[types.Tool(function_declarations=[declaration])] if self.tools else None,
            max_output_tokens=MAX_TOKENS,
            thinking_config=types.ThinkingConfig(include_thoughts=True),
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        )
        request: dict[str, Any] = {"model": "tiny", "contents": self.history, "config": config}
        models = self.client.models
        if self.stream:
            replies = [chunk async for chunk in await models.generate_content_stream(**request)]
        else:
            replies = [await models.generate_content(**request)]
        parts = [part for reply in replies for part in reply.candidates[0].content.parts or []]
        self.history.append(types.Content(role="model", parts=parts))
        calls = [part.function_call for part in parts if part.function_call]
        results = [
            types.Part(
                function_response=types.FunctionResponse(id=call.id, name=call.name, response={"output": tool_output})
            )
            for call in calls
        ]
        if results:
            self.history.append(types.Content(role="user", parts=results))
        texts = ["".join(p.text for p in parts if p.text and bool(p.thought) == thought) for thought in (False, True)]
        return Turn(texts[0], texts[1], [(call.name, dict(call.args or {})) for call in calls])


@asynccontextmanager
async def _openai(url: str, key: str) -> AsyncGenerator[Any]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        yield client


@asynccontextmanager
async def _anthropic(url: str, key: str) -> AsyncGenerator[Any]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        yield client


@asynccontextmanager
async def _google(url: str, key: str) -> AsyncGenerator[Any]:
    client = genai.Client(api_key=key, http_options=types.HttpOptions(base_url=url, timeout=60_000))
    async with client.aio as aio:
        yield aio
    client.close()


AGENTS: dict[str, tuple[type[Agent], Callable[[str, str], Any]]] = {
    "anthropic": (AnthropicAgent, _anthropic),
    "google": (GoogleAgent, _google),
    "openai_chat": (ChatAgent, _openai),
    "openai_responses": (ResponsesAgent, _openai),
}
"""dialect -> the agent, and its client of (session URL, key)"""
