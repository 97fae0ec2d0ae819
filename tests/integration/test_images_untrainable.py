"""Images, as each provider's SDK sends them: the call is answered, and no row that holds one is trained on."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import anthropic
import msgspec
import numpy as np
import pytest
from google import genai
from google.genai import types

from gangline.domain.completion import CompletionTree
from gangline.domain.contracts import Reward
from gangline.domain.conversation import Image, Message, Text, ToolResult
from gangline.domain.session import HarnessExit, SessionResult
from gangline.models.engines.contract import EngineDelta, EngineReply, EngineRequest
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.rows.rewards import apply_reward
from gangline.rows.rows import rows_of
from gangline.serving.scripted.server import scripted_server
from gangline.settings.plugins import make_builder
from gangline.train.collecting.groups import why_invalid
from support.node.proxy import Proxied, proxied_engine


def _png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0abc")) + chunk(b"IEND", b"")


PNG = _png()
DATA = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{DATA}"
SHOT: Any = {"name": "shot", "description": "Take a picture.", "input_schema": {"type": "object", "properties": {}}}


def _placed(messages: Sequence[Message]) -> tuple[Message, ...]:
    """As the template of a model that sees renders them: an id in place of each image."""

    def piece(part: Any) -> Any:
        if isinstance(part, ToolResult):
            return ToolResult(part.call_id, tuple(map(piece, part.content)), part.is_error)
        return Text("<image>") if isinstance(part, Image) else part

    return tuple(Message(one.role, tuple(map(piece, one.parts)), one.name) for one in messages)


class Seeing(VllmEngine):
    """A model that sees, for the scripted engine reads text only."""

    async def chat(self, request: EngineRequest) -> EngineReply:
        return await super().chat(self._read(request))

    def stream(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        return super().stream(self._read(request))

    @staticmethod
    def _read(request: EngineRequest) -> EngineRequest:
        call = msgspec.structs.replace(request.call, messages=_placed(request.call.messages))
        return msgspec.structs.replace(request, call=call)


@asynccontextmanager
async def seeing(script: dict[str, Any]) -> AsyncGenerator[Proxied]:
    async with scripted_server(script, "tiny") as url, proxied_engine(Seeing(url)) as running:
        yield running


async def chat(running: Proxied) -> None:
    parts: Any = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": URL}}]
    async with running.client() as client:
        await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": parts}])


async def responses(running: Proxied) -> None:
    content: Any = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": URL}]
    request: Any = [{"role": "user", "content": content}]
    async with running.client() as client:
        first = await client.responses.create(model="scripted", input=request)
        # The image is in the prompt of what continues from it, too, though the request does not say it again.
        await client.responses.create(model="scripted", input="And now?", previous_response_id=first.id)


def _anthropic(running: Proxied) -> anthropic.AsyncAnthropic:
    base = f"{running.url}/s/{running.session.session_id}"
    return anthropic.AsyncAnthropic(base_url=base, api_key=running.session.key, max_retries=0)


IMAGE_BLOCK: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}


async def messages(running: Proxied) -> None:
    content: Any = [{"type": "text", "text": "What is it?"}, IMAGE_BLOCK]
    said: Any = [{"role": "user", "content": content}]
    async with _anthropic(running) as client:
        await client.messages.create(model="scripted", max_tokens=50, messages=said)


async def image_in_a_tool_result(running: Proxied) -> None:
    """Two calls: the first without an image, and trained on."""
    said: list[Any] = [{"role": "user", "content": "Look."}]
    request: dict[str, Any] = {"model": "scripted", "max_tokens": 200, "tools": [SHOT], "messages": said}
    async with _anthropic(running) as client:
        first = cast(Any, await client.messages.create(**request))
        used: Any = next(block for block in first.content if block.type == "tool_use")
        answer: Any = {"type": "tool_result", "tool_use_id": used.id, "content": [IMAGE_BLOCK]}
        said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [answer]}]
        await client.messages.create(**request)


def _google(part: types.Part) -> Callable[[Proxied], Awaitable[None]]:
    async def ask(running: Proxied) -> None:
        base = f"{running.url}/s/{running.session.session_id}"
        client = genai.Client(api_key=running.session.key, http_options=types.HttpOptions(base_url=base))
        async with client.aio as aio:
            await aio.models.generate_content(model="scripted", contents=cast(Any, ["What is it?", part]))
        client.close()

    return ask


ASKS: dict[str, Callable[[Proxied], Awaitable[None]]] = {
    "chat": chat,
    "responses": responses,
    "anthropic": messages,
    "google inline": _google(types.Part.from_bytes(data=PNG, mime_type="image/png")),
    "google file": _google(types.Part.from_uri(file_uri="https://example.com/a.png", mime_type="image/png")),
}


def _result(running: Proxied, strategy: str) -> SessionResult:
    builder = make_builder(strategy, {})
    trajectory = builder.build(CompletionTree(running.journal.completions), session_id="s1", task_id="t1")
    return SessionResult(
        session_id="s1",
        task_id="t1",
        node_id="n1",
        attempt=1,
        fence=1,
        outcome="completed",
        failure=None,
        reward=1.0,
        reward_details={},
        harness_exit=HarnessExit(exit_code=0),
        trajectory=apply_reward(trajectory, Reward(reward=1.0)),
        completions=tuple(running.journal.completions),
        timings=(),
        artifacts={},
    )


@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
@pytest.mark.parametrize("strategy", ["prefix_merging", "per_request", "tree"])
@pytest.mark.parametrize("ask", ASKS)
async def test_a_call_with_an_image_is_answered_and_never_trained_on(ask: str, strategy: str) -> None:
    async with seeing({"default": {"text": "A dog."}}) as running:
        await ASKS[ask](running)
        assert running.journal.completions
        assert {one.certificate.untrainable for one in running.journal.completions} == {"images"}
        result = _result(running, strategy)
    rows = rows_of(result)
    assert rows
    assert [row.untrainable for row in rows] == ["images"] * len(rows)
    assert not any(np.any(row.loss_mask) for row in rows)
    assert why_invalid(result) == "it has no trace to train on"


@pytest.mark.parametrize("strategy", ["prefix_merging", "per_request", "tree"])
async def test_what_stands_before_the_first_image_is_trained_on(strategy: str) -> None:
    script: dict[str, Any] = {
        "rules": [{"turn": 0, "tool_calls": [{"name": "shot", "arguments": {}}]}],
        "default": {"text": "A dog."},
    }
    async with seeing(script) as running:
        await image_in_a_tool_result(running)
        result = _result(running, strategy)
    assert [(row.untrainable, bool(np.any(row.loss_mask))) for row in rows_of(result)] == [
        (None, True),
        ("images", False),
    ]


_AUDIO: Any = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
_WAV: Any = {"type": "audio", "source": {"type": "base64", "media_type": "audio/wav", "data": "AAAA"}}
AUDIO: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [_AUDIO]}]}, "input_audio"),
    "responses": ("/v1/responses", {"input": [{"role": "user", "content": [_AUDIO]}]}, "input_audio"),
    "anthropic": ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": [_WAV]}]}, "audio"),
    "google": (
        "/v1beta/models/m:generateContent",
        {"contents": [{"role": "user", "parts": [{"inlineData": {"mimeType": "audio/wav", "data": "AAAA"}}]}]},
        "audio/wav",
    ),
}


@pytest.mark.parametrize("dialect", AUDIO)
async def test_audio_is_refused_by_name(dialect: str) -> None:
    path, body, name = AUDIO[dialect]
    body = body if dialect == "google" else {"model": "scripted", **body}
    async with seeing({"default": {"text": "x"}}) as running, aiohttp.ClientSession() as client:
        key = running.session.key
        headers = {"Authorization": f"Bearer {key}", "x-api-key": str(key), "x-goog-api-key": str(key)}
        url = f"{running.url}/s/{running.session.session_id}{path}"
        async with client.post(url, json=body, headers=headers) as answer:
            assert answer.status == 400
            assert f"'{name}'" in await answer.text()
        assert running.journal.completions == []
