"""What the proxy asks of a dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import msgspec

from gangline.domain.conversation import ModelCall
from gangline.domain.errors import GanglineError
from gangline.domain.reply import Reply, ReplyDelta

__all__ = ["Dialect", "ErrorAnswer", "EventWriter"]


class ErrorAnswer(msgspec.Struct, frozen=True):
    """An error in the provider's own shape."""

    status: int
    body: bytes
    headers: Mapping[str, str] = {}


class EventWriter(Protocol):
    """The provider's event grammar for one streamed reply. Each call answers the bytes to send, possibly none."""

    def delta(self, delta: ReplyDelta) -> bytes: ...

    def finish(self, reply: Reply) -> bytes:
        """What the whole reply adds to the deltas: finish reasons, usage, end."""
        ...

    def error(self, error: GanglineError) -> bytes:
        """The end of a stream that broke after its first event."""
        ...


class Dialect(Protocol):
    name: ClassVar[str]

    def parse_call(self, body: bytes) -> ModelCall:
        """Raises: InvalidRequest, naming the field (`param` in its details)."""
        ...

    def reply_body(self, call: ModelCall, reply: Reply) -> bytes: ...

    def event_writer(self, call: ModelCall, *, reply_id: str, model: str, created_at: int) -> EventWriter: ...

    def error_answer(self, error: GanglineError) -> ErrorAnswer: ...

    def model_list(self, models: list[str]) -> bytes: ...

    def model_card(self, model: str) -> bytes: ...
