"""Imported by Harbor's server: an agent in Harbor's process that asks its model a few questions, in the dialect of its
model's provider, and writes down what it heard. Its clients try again, as providers' SDKs do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, override

import httpx
from harbor.agents.agent_auth_resolution import ModelConnectionSpec, ProviderAccess
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.environments.base import BaseEnvironment
from harbor.llms.chat import Chat
from harbor.llms.lite_llm import LiteLLM
from harbor.models.agent.context import AgentContext
from harbor.models.model_api_format import ModelApiFormat

_MAX_TRIES = 60


class TalkingAgent(BaseAgent):
    """kwargs: num_calls; streams: whether it asks for streams."""

    MODEL_CONNECTION = ModelConnectionSpec(
        base_url_destination_names={"default": None},
        default_api_format_by_provider={"gemini": ModelApiFormat.GOOGLE_GENERATE_CONTENT},
        agent_provider_access=ProviderAccess(
            api_key_candidate_names=["OPENAI_API_KEY"], base_url_candidate_names=["OPENAI_BASE_URL"]
        ),
        supported_api_formats=[
            ModelApiFormat.OPENAI_CHAT_COMPLETIONS,
            ModelApiFormat.OPENAI_RESPONSES,
            ModelApiFormat.ANTHROPIC_MESSAGES,
            ModelApiFormat.GOOGLE_GENERATE_CONTENT,
        ],
    )
    capabilities = AgentCapabilities(base_url=True)

    def __init__(self, *args: Any, num_calls: int = 3, streams: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_calls = num_calls
        self._streams = streams

    @staticmethod
    @override
    def name() -> str:
        return "talking"

    @override
    def version(self) -> str | None:
        return "1.0"

    @override
    async def setup(self, environment: BaseEnvironment) -> None: ...

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        connection = self.model_connection
        base = str(connection.execution_base_url or connection.candidate_base_url).rstrip("/")
        heard: list[str] = []
        async with httpx.AsyncClient(timeout=None, headers={"Authorization": f"Bearer {connection.api_key}"}) as http:
            for _ in range(self._num_calls):
                path, body = _request(str(connection.model_api_format), instruction, heard, self._streams)
                heard.append(await _asked(http, base + path, body))
                (self.logs_dir / "heard.json").write_text(json.dumps(heard))
        await environment.exec("echo done > /app/answer")


class RecordingAgent(TalkingAgent):
    """Talks through Harbor's own client, as terminus-2 does, which collects rollout details."""

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        connection = self.model_connection
        base = str(connection.execution_base_url or connection.candidate_base_url)
        model = LiteLLM(str(self.model_name), api_base=base, collect_rollout_details=True, api_key=connection.api_key)
        chat = Chat(model)
        for _ in range(self._num_calls):
            await chat.chat(instruction)
        context.rollout_details = chat.rollout_details
        await environment.exec("echo done > /app/answer")


async def _asked(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> str:
    why: Exception | None = None
    for _ in range(_MAX_TRIES):
        try:
            async with http.stream("POST", url, json=body) as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
                return await _text(response)
        except httpx.HTTPError as error:
            why = error
            await asyncio.sleep(0.5)
    raise RuntimeError(f"no answer: {why}")


async def _text(response: httpx.Response) -> str:
    if "event-stream" not in response.headers.get("content-type", ""):
        return _words(json.loads(await response.aread()))
    found, is_whole = "", False
    async for event in _events(response):
        found += _piece(event)
        is_whole = is_whole or _ends(event)
    if not is_whole:
        raise httpx.RemoteProtocolError("the stream ended early")
    return found


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _request(dialect: str, instruction: str, heard: list[str], streams: bool) -> tuple[str, dict[str, Any]]:
    turns = [("user", instruction)]
    for answer in heard:
        turns += [("assistant", answer), ("user", "And now?")]
    match dialect:
        case "anthropic_messages":
            messages = [{"role": role, "content": text} for role, text in turns]
            return "/v1/messages", {"model": "m", "max_tokens": 64, "stream": streams, "messages": messages}
        case "openai_responses":
            items = [{"role": role, "content": text} for role, text in turns]
            return "/responses", {"model": "m", "stream": streams, "input": items}
        case "google_generate_content":
            contents = [
                {"role": "model" if role == "assistant" else role, "parts": [{"text": text}]} for role, text in turns
            ]
            method = "streamGenerateContent?alt=sse" if streams else "generateContent"
            return f"/v1beta/models/m:{method}", {"contents": contents}
        case _:
            messages = [{"role": role, "content": text} for role, text in turns]
            return "/chat/completions", {"model": "m", "stream": streams, "messages": messages}


def _words(body: dict[str, Any]) -> str:
    if "choices" in body:
        return body["choices"][0]["message"]["content"]
    if "candidates" in body:
        return _google(body)
    if "output" in body:
        return "".join(part["text"] for item in body["output"] for part in item.get("content", ()))
    return "".join(part["text"] for part in body["content"])


def _google(body: dict[str, Any]) -> str:
    return "".join(
        part.get("text", "") for one in body.get("candidates", ()) for part in one.get("content", {}).get("parts", ())
    )


def _piece(event: dict[str, Any]) -> str:
    if "choices" in event:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if event.get("type") == "content_block_delta":
        return event["delta"].get("text", "")
    if event.get("type") == "response.output_text.delta":
        return event["delta"]
    return _google(event)


def _ends(event: dict[str, Any]) -> bool:
    return (
        event.get("type") in ("message_stop", "response.completed")
        or any(choice.get("finish_reason") for choice in event.get("choices", ()))
        or any(one.get("finishReason") for one in event.get("candidates", ()))
    )
