"""The Google generateContent dialect: `POST /v1beta/models/MODEL:generateContent`, `:streamGenerateContent`,
`:countTokens`, `GET /v1beta/models[/MODEL]`; the same under `/v1`.

A model's name may contain slashes. A stream is server-sent events with `?alt=sse`, else one JSON array, as in Google's
API.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from gangline.domain.conversation import ModelCall
from gangline.domain.errors import GanglineError
from gangline.domain.reply import Reply
from gangline.wire.dialects.bodies import parse_body
from gangline.wire.dialects.contract import DialectRoute, ErrorAnswer, RawRequest, RouteKind
from gangline.wire.dialects.google.errors import google_error
from gangline.wire.dialects.google.reply import GoogleEventWriter, google_reply_body
from gangline.wire.dialects.google.request import parse_google_call, parse_google_count

_ROUTES: tuple[tuple[Literal["GET", "POST"], str, RouteKind], ...] = (
    ("POST", "models/{model:.+}:{method:generateContent|streamGenerateContent}", "call"),
    ("POST", "models/{model:.+}:{method:countTokens}", "count"),
    ("GET", "models", "models"),
    ("GET", "models/{model:.+}", "model"),
)


class GoogleDialect:
    name: ClassVar[str] = "google"
    title: ClassVar[str] = "Google generateContent"
    routes: ClassVar[Sequence[DialectRoute]] = tuple(
        DialectRoute(method, f"/{version}/{path}", kind)
        for version in ("v1beta", "v1")  # the Python SDK's default is v1 since 3.0, everyone else's v1beta
        for method, path, kind in _ROUTES
    )

    def speaks(self, request: RawRequest) -> bool:
        return "x-goog-api-key" in request.headers or "x-goog-api-client" in request.headers

    def key_of(self, request: RawRequest) -> str | None:
        """The key from `x-goog-api-key`, `?key=`, or a bearer token (which Gemini CLI can be configured to send)."""
        given = request.headers.get("x-goog-api-key") or request.query.get("key")
        if given:
            return given.strip() or None
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return token.strip() or None if scheme.lower() == "bearer" else None

    def parse_call(self, request: RawRequest) -> ModelCall:
        return parse_body(lambda body: parse_google_call(_with_body(request, body)), request.body)

    def parse_count(self, request: RawRequest) -> ModelCall:
        return parse_body(lambda body: parse_google_count(_with_body(request, body)), request.body)

    def reply_body(self, call: ModelCall, reply: Reply) -> bytes:
        return google_reply_body(call, reply)

    def count_body(self, num_tokens: int) -> bytes:
        details = [{"modality": "TEXT", "tokenCount": num_tokens}]
        return msgspec.json.encode({"totalTokens": num_tokens, "promptTokensDetails": details})

    def event_writer(self, call: ModelCall, *, reply_id: str, model: str, created_at: int) -> GoogleEventWriter:
        return GoogleEventWriter(call, reply_id=reply_id, model=model, created_at=created_at)

    def error_answer(self, error: GanglineError) -> ErrorAnswer:
        return google_error(error)

    def model_list(self, models: list[str], max_context: int | None = None) -> bytes:
        return msgspec.json.encode({"models": [_card(model, max_context) for model in models]})

    def model_card(self, model: str, max_context: int | None = None) -> bytes:
        return msgspec.json.encode(_card(model, max_context))


def _with_body(request: RawRequest, body: bytes) -> RawRequest:
    return msgspec.structs.replace(request, body=body)


def _card(model: str, max_context: int | None) -> dict[str, Any]:
    card: dict[str, Any] = {
        "name": f"models/{model}",
        "version": "1",
        "displayName": model,
        "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
    }
    if max_context is not None:
        card |= {"inputTokenLimit": max_context, "outputTokenLimit": max_context}
    return card
