"""The OpenAI Chat dialect: `POST /v1/chat/completions`, `GET /v1/models`."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from gangline.dialects.chat_reply import ChatEventWriter, chat_error, chat_reply_body
from gangline.dialects.chat_request import parse_chat_call
from gangline.dialects.contract import ErrorAnswer
from gangline.domain.conversation import ModelCall
from gangline.domain.errors import GanglineError
from gangline.domain.reply import Reply

__all__ = ["ChatDialect"]


class ChatDialect:
    name: ClassVar[str] = "openai_chat"

    def parse_call(self, body: bytes) -> ModelCall:
        return parse_chat_call(body)

    def reply_body(self, call: ModelCall, reply: Reply) -> bytes:
        return chat_reply_body(call, reply)

    def event_writer(self, call: ModelCall, *, reply_id: str, model: str, created_at: int) -> ChatEventWriter:
        return ChatEventWriter(call, reply_id=reply_id, model=model, created_at=created_at)

    def error_answer(self, error: GanglineError) -> ErrorAnswer:
        return chat_error(error)

    def model_list(self, models: list[str]) -> bytes:
        return msgspec.json.encode({"object": "list", "data": [_card(model) for model in models]})

    def model_card(self, model: str) -> bytes:
        return msgspec.json.encode(_card(model))


def _card(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "gangline"}
