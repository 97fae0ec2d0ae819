"""The OpenAI Responses dialect: `POST /v1/responses`, `POST /v1/responses/input_tokens`, `GET /v1/models`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from gangline.domain.conversation import ModelCall
from gangline.domain.errors import GanglineError
from gangline.domain.reply import Reply
from gangline.wire.dialects.bodies import parse_body
from gangline.wire.dialects.contract import DialectRoute, ErrorAnswer, OpenAiModels, RawRequest
from gangline.wire.dialects.responses.errors import responses_error
from gangline.wire.dialects.responses.reply import ResponsesEventWriter, responses_reply_body
from gangline.wire.dialects.responses.request import parse_responses_call, parse_responses_count


class ResponsesDialect(OpenAiModels):
    name: ClassVar[str] = "openai_responses"
    title: ClassVar[str] = "OpenAI Responses"
    routes: ClassVar[Sequence[DialectRoute]] = (
        DialectRoute("POST", "/v1/responses", "call"),
        DialectRoute("POST", "/v1/responses/input_tokens", "count"),
        DialectRoute("GET", "/v1/models", "models"),
        DialectRoute("GET", "/v1/models/{model:.+}", "model"),
    )

    def speaks(self, request: RawRequest) -> bool:
        """Codex identifies itself. Other clients look like OpenAI Chat's, whose model lists are the same."""
        return request.headers.get("originator", "").startswith("codex")

    def key_of(self, request: RawRequest) -> str | None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return key.strip() or None if scheme.lower() == "bearer" else None

    def parse_call(self, request: RawRequest) -> ModelCall:
        return parse_body(parse_responses_call, request.body)

    def parse_count(self, request: RawRequest) -> ModelCall:
        return parse_body(parse_responses_count, request.body)

    def reply_body(self, call: ModelCall, reply: Reply) -> bytes:
        return responses_reply_body(call, reply)

    def count_body(self, num_tokens: int) -> bytes:
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": num_tokens})

    def event_writer(self, call: ModelCall, *, reply_id: str, model: str, created_at: int) -> ResponsesEventWriter:
        return ResponsesEventWriter(call, reply_id=reply_id, model=model, created_at=created_at)

    def error_answer(self, error: GanglineError) -> ErrorAnswer:
        return responses_error(error)
