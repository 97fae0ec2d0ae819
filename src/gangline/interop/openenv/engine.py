"""The engine behind served tasks: it answers a session's model calls with its client's actions.

It listens on loopback, for the node alone. A call names its episode by the system message, which is a random key.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from gangline.interop.openenv.episode import Episode, WaitingCall

__all__ = ["MODEL", "create_engine"]

MODEL = "openenv-client"
_MAX_BODY_BYTES = 256 << 20


class _Call(msgspec.Struct):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []


def create_engine(episodes: Mapping[str, Episode]) -> web.Application:
    """An OpenAI-compatible server. episodes: by key, as they are at each call."""

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def health(_request: web.Request) -> web.Response:
        return web.Response()

    async def chat(request: web.Request) -> web.Response:
        call = msgspec.json.decode(await request.read(), type=_Call)
        first = call.messages[0] if call.messages else {}
        episode = episodes.get(str(first.get("content"))) if first.get("role") == "system" else None
        if episode is None:
            error = {"message": "no client plays this session: its episode was closed.", "code": "episode_closed"}
            return web.json_response({"error": error}, status=404)
        waiting = WaitingCall(call.messages, call.tools)
        episode.ask(waiting)
        return web.json_response(_completion(await waiting.reply))

    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.add_routes([web.get("/v1/models", models), web.get("/health", health), web.post("/v1/chat/completions", chat)])
    return app


def _completion(message: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": message["tool_calls"][0]["id"],
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "finish_reason": "tool_calls", "message": message}],
    }
