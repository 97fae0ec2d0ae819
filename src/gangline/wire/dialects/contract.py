"""The interface between the proxy and a dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from gangline.domain.conversation import ModelCall
from gangline.domain.errors import GanglineError
from gangline.domain.reply import Reply, ReplyDelta

RouteKind = Literal["call", "count", "tokenize", "models", "model"]
"""A model call, a count of its prompt tokens without sampling, its prompt tokens as in vLLM, the list of models, one
model.
"""


class DialectRoute(msgspec.Struct, frozen=True):
    method: Literal["GET", "POST"]
    path: str
    """Path after the session's prefix; `{name}` and `{name:regex}` are variables, in aiohttp's syntax."""
    kind: RouteKind


class RawRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request as received, without anything that only a server knows."""

    body: bytes = b""
    params: Mapping[str, str] = {}
    """The path's variables."""
    query: Mapping[str, str] = {}
    headers: Mapping[str, str] = {}
    """Names in lower case."""


class ErrorAnswer(msgspec.Struct, frozen=True):
    """An error in the provider's own form."""

    status: int
    body: bytes
    headers: Mapping[str, str] = {}


class EventWriter(Protocol):
    """The provider's event grammar for one streamed reply. Each method returns the bytes to send, possibly empty."""

    @property
    def media_type(self) -> str:
        """Media type of the whole stream: `text/event-stream`, unless the client asked for another framing."""
        ...

    def start(self, num_prompt_tokens: int) -> bytes:
        """Everything before the first delta. Called once, unless the stream breaks before."""
        ...

    def keep_alive(self) -> bytes:
        """Bytes that keep this provider's clients from timing out, valid at any time, even before `start`."""
        ...

    def delta(self, delta: ReplyDelta) -> bytes: ...

    def finish(self, reply: Reply) -> bytes:
        """The end of the stream after the deltas: finish reasons, usage, end marker."""
        ...

    def error(self, error: GanglineError) -> bytes:
        """The end of a stream that broke after its first byte."""
        ...

    @property
    def error_stands_alone(self) -> bool:
        """Whether this provider's clients only see the error if it is sent separately from events."""
        ...


class Dialect(Protocol):
    name: ClassVar[str]
    title: ClassVar[str]
    """A readable name: `Anthropic Messages`."""
    routes: ClassVar[Sequence[DialectRoute]]

    def speaks(self, request: RawRequest) -> bool:
        """Whether the headers show a client of this dialect, for paths shared by several dialects."""
        ...

    def key_of(self, request: RawRequest) -> str | None:
        """The session key, from the place where this provider's clients send it."""
        ...

    def parse_call(self, request: RawRequest) -> ModelCall:
        """Raises: InvalidRequest, naming the field (`param` in its details)."""
        ...

    def parse_count(self, request: RawRequest) -> ModelCall:
        """The call whose prompt is to be counted. Raises: InvalidRequest."""
        ...

    def reply_body(self, call: ModelCall, reply: Reply) -> bytes: ...

    def count_body(self, num_tokens: int) -> bytes: ...

    def event_writer(self, call: ModelCall, *, reply_id: str, model: str, created_at: int) -> EventWriter: ...

    def error_answer(self, error: GanglineError) -> ErrorAnswer: ...

    def model_list(self, models: list[str], max_context: int | None = None) -> bytes: ...

    def model_card(self, model: str, max_context: int | None = None) -> bytes: ...


class OpenAiModels:
    """The lists of models, which OpenAI's two dialects have in common."""

    def model_list(self, models: list[str], max_context: int | None = None) -> bytes:
        return msgspec.json.encode({"object": "list", "data": [_card(model, max_context) for model in models]})

    def model_card(self, model: str, max_context: int | None = None) -> bytes:
        return msgspec.json.encode(_card(model, max_context))


def _card(model: str, max_context: int | None) -> dict[str, Any]:
    """`max_model_len` is vLLM's addition, which clients of local models use to size their prompts."""
    card: dict[str, Any] = {"id": model, "object": "model", "created": 0, "owned_by": "gangline"}
    return card if max_context is None else card | {"max_model_len": max_context}
