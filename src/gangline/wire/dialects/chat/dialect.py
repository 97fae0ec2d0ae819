"""The OpenAI Chat dialect: `POST /v1/chat/completions`, `GET /v1/models`; vLLM's `POST /v1/tokenize`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gangline.domain.conversation import ModelCall
from gangline.domain.errors import GanglineError, NotFound
from gangline.domain.reply import Reply
from gangline.wire.dialects.bodies import parse_body
from gangline.wire.dialects.chat.reply import ChatEventWriter, chat_error, chat_reply_body
from gangline.wire.dialects.chat.request import parse_chat_call, parse_tokenize
from gangline.wire.dialects.contract import DialectRoute, ErrorAnswer, OpenAiModels, RawRequest


class ChatDialect(OpenAiModels):
    name: ClassVar[str] = "openai_chat"
    title: ClassVar[str] = "OpenAI Chat"
    routes: ClassVar[Sequence[DialectRoute]] = (
        DialectRoute("POST", "/v1/chat/completions", "call"),
        DialectRoute("POST", "/v1/tokenize", "tokenize"),
        DialectRoute("GET", "/v1/models", "models"),
        DialectRoute("GET", "/v1/models/{model:.+}", "model"),
    )

    def speaks(self, request: RawRequest) -> bool:
        """Only a plain bearer token: other clients of `/v1/models` send further headers."""
        others = ("x-api-key", "anthropic-version", "anthropic-beta", "x-goog-api-key")
        return "authorization" in request.headers and not any(name in request.headers for name in others)

    def key_of(self, request: RawRequest) -> str | None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return key.strip() or None if scheme.lower() == "bearer" else None

    def parse_call(self, request: RawRequest) -> ModelCall:
        return parse_body(parse_chat_call, request.body)

    def parse_count(self, request: RawRequest) -> ModelCall:
        return parse_body(parse_tokenize, request.body)

    def reply_body(self, call: ModelCall, reply: Reply) -> bytes:
        return chat_reply_body(call, reply)

    def count_body(self, num_tokens: int) -> bytes:
        raise NotFound("OpenAI Chat has no route that counts tokens.")

    def event_writer(self, call: ModelCall, *, reply_id: str, model: str, created_at: int) -> ChatEventWriter:
        return ChatEventWriter(call, reply_id=reply_id, model=model, created_at=created_at)

    def error_answer(self, error: GanglineError) -> ErrorAnswer:
        return chat_error(error)
