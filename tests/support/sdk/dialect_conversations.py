"""Two turns with one tool, spoken by each provider's own client."""

from __future__ import annotations

from typing import Any

import anthropic
from google import genai
from google.genai import types

from gangline.domain.completion import Completion
from support.node.proxy import Proxied

QUESTION, RESULT = "Where is it?", "found it at 7"
NAME, ABOUT = "look", "Look somewhere."
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"at": {"type": "string"}}}


async def two_turns(running: Proxied, dialect: str, *, stream: bool) -> tuple[Completion, Completion]:
    """Ask, run the one tool that is called, send its result. The session's two completions."""
    await _CLIENTS[dialect](running, stream)
    first, second = running.journal.completions
    return first, second


async def _chat(running: Proxied, stream: bool) -> None:
    function = {"name": NAME, "description": ABOUT, "parameters": SCHEMA}
    tools: Any = [{"type": "function", "function": function}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with running.client() as client:
        if stream:
            async with client.chat.completions.stream(model="scripted", messages=messages, tools=tools) as events:
                reply = await events.get_final_completion()
        else:
            reply = await client.chat.completions.create(model="scripted", messages=messages, tools=tools)
        (called,) = reply.choices[0].message.tool_calls or ()
        assert reply.choices[0].finish_reason == "tool_calls"
        messages += [
            reply.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": called.id, "content": RESULT},
        ]
        await client.chat.completions.create(model="scripted", messages=messages, tools=tools)


async def _responses(running: Proxied, stream: bool) -> None:
    tools: Any = [{"type": "function", "name": NAME, "description": ABOUT, "parameters": SCHEMA, "strict": False}]
    asked: list[Any] = [{"role": "user", "content": QUESTION}]
    async with running.client() as client:
        if stream:
            async with client.responses.stream(model="scripted", input=asked, tools=tools) as events:
                reply: Any = await events.get_final_response()
        else:
            reply = await client.responses.create(model="scripted", input=asked, tools=tools)
        (called,) = [item for item in reply.output if item.type == "function_call"]
        result = {"type": "function_call_output", "call_id": called.call_id, "output": RESULT}
        said = [item.model_dump(exclude_none=True) for item in reply.output]
        await client.responses.create(model="scripted", input=[*asked, *said, result], tools=tools)


async def _messages(running: Proxied, stream: bool) -> None:
    request: dict[str, Any] = {
        "model": "scripted",
        "max_tokens": 500,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": NAME, "description": ABOUT, "input_schema": SCHEMA}],
        "messages": [{"role": "user", "content": QUESTION}],
    }
    base_url = f"{running.url}/s/{running.session.session_id}"
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=running.session.key, max_retries=0) as client:
        if stream:
            async with client.messages.stream(**request) as events:
                reply = await events.get_final_message()
        else:
            reply = await client.messages.create(**request)
        assert reply.stop_reason == "tool_use"
        (called,) = [block for block in reply.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": called.id, "content": RESULT}
        request["messages"] += [
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": [result]},
        ]
        await client.messages.create(**request)


async def _google(running: Proxied, stream: bool) -> None:
    function = types.FunctionDeclaration(name=NAME, description=ABOUT, parameters_json_schema=SCHEMA)
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[function])],
        thinking_config=types.ThinkingConfig(include_thoughts=True),
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )
    history: list[Any] = [types.Content(role="user", parts=[types.Part(text=QUESTION)])]
    base = f"{running.url}/s/{running.session.session_id}"
    client = genai.Client(api_key=running.session.key, http_options=types.HttpOptions(base_url=base, timeout=20_000))
    async with client.aio as aio:
        asked: dict[str, Any] = {"model": "scripted", "contents": history, "config": config}
        if stream:
            chunks = [chunk async for chunk in await aio.models.generate_content_stream(**asked)]
        else:
            chunks = [await aio.models.generate_content(**asked)]
        said = [chunk.candidates[0].content for chunk in chunks if chunk.candidates]
        (called,) = [part.function_call for content in said for part in content.parts or () if part.function_call]
        response = types.FunctionResponse(id=called.id, name=called.name, response={"output": RESULT})
        result = types.Content(role="user", parts=[types.Part(function_response=response)])
        await aio.models.generate_content(model="scripted", contents=[*history, *said, result], config=config)
    client.close()


_CLIENTS = {"openai_chat": _chat, "openai_responses": _responses, "anthropic": _messages, "google": _google}
DIALECTS = sorted(_CLIENTS)
