"""The Anthropic dialect: `POST /v1/messages`, `POST /v1/messages/count_tokens`, `GET /v1/models`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from gangline.domain.conversation import ModelCall
from gangline.domain.errors import GanglineError
from gangline.domain.reply import Reply
from gangline.wire.dialects.anthropic.errors import messages_error
from gangline.wire.dialects.anthropic.events import AnthropicEventWriter
from gangline.wire.dialects.anthropic.reply import messages_reply_body
from gangline.wire.dialects.anthropic.request import parse_messages_call, parse_messages_count
from gangline.wire.dialects.bodies import parse_body
from gangline.wire.dialects.contract import DialectRoute, ErrorAnswer, RawRequest

_AGENT_ID = "x-claude-code-agent-id"
"""Header sent with the calls of sub-agents."""

_MAX_AGENT_ID_CHARS = 200


class AnthropicDialect:
    name: ClassVar[str] = "anthropic"
    title: ClassVar[str] = "Anthropic Messages"
    routes: ClassVar[Sequence[DialectRoute]] = (
        DialectRoute("POST", "/v1/messages", "call"),
        DialectRoute("POST", "/v1/messages/count_tokens", "count"),
        DialectRoute("GET", "/v1/models", "models"),
        DialectRoute("GET", "/v1/models/{model:.+}", "model"),
    )

    def speaks(self, request: RawRequest) -> bool:
        return "anthropic-version" in request.headers

    def key_of(self, request: RawRequest) -> str | None:
        """`x-api-key`, or a bearer token, which clients with `ANTHROPIC_AUTH_TOKEN` send."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        return request.headers.get("x-api-key", "").strip() or bearer or None

    def parse_call(self, request: RawRequest) -> ModelCall:
        call = parse_body(parse_messages_call, request.body, index=".{}")
        agent_id = request.headers.get(_AGENT_ID, "")[:_MAX_AGENT_ID_CHARS]
        return msgspec.structs.replace(call, agent_id=agent_id) if agent_id else call

    def parse_count(self, request: RawRequest) -> ModelCall:
        return parse_body(parse_messages_count, request.body, index=".{}")

    def reply_body(self, call: ModelCall, reply: Reply) -> bytes:
        return messages_reply_body(call, reply)

    def count_body(self, num_tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": num_tokens})

    def event_writer(self, call: ModelCall, *, reply_id: str, model: str, created_at: int) -> AnthropicEventWriter:
        return AnthropicEventWriter(call, reply_id=reply_id, model=model)

    def error_answer(self, error: GanglineError) -> ErrorAnswer:
        return messages_error(error)

    def model_list(self, models: list[str], max_context: int | None = None) -> bytes:
        ends = {"first_id": models[0], "last_id": models[-1]} if models else {"first_id": None, "last_id": None}
        return msgspec.json.encode({"data": [_card(model, max_context) for model in models], "has_more": False} | ends)

    def model_card(self, model: str, max_context: int | None = None) -> bytes:
        return msgspec.json.encode(_card(model, max_context))


def _card(model: str, max_context: int | None) -> dict[str, Any]:
    """The epoch stands for an unknown release date, as the provider's reference allows."""
    card = {"type": "model", "id": model, "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
    return card | {"lifecycle": "active", "max_input_tokens": max_context}
