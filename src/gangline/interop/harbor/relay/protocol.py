"""The messages of Harbor's relay, as JSON: calls and cancellations to us, answers in pieces from us.

The relay takes at most 16 MiB a message and 256 unread pieces a call, and none larger is sent here: see `calls`. It
closes the connection at a message that it does not know.

Source: Harbor 0.26.0, `server/relay.py` and `server/README.md`.
"""

from __future__ import annotations

import hashlib

import msgspec

API_VERSION = "2026-10-30"
"""Sent as `Harbor-API-Version`; a Harbor with another version refuses it."""

MAX_MESSAGE_CHARS = 4096
MAX_HEADERS = 128


class RelayedCall(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """An agent's request. Its credentials are stripped."""

    rollout_id: str
    request_id: str
    """The relay's, new for each try of the agent's client."""
    method: str
    target: str
    """Path and query, as the agent sent them."""
    headers: list[tuple[str, str]]
    body: bytes = msgspec.field(name="body_b64")

    @property
    def digest(self) -> str:
        """Digest of what two tries of one call have in common."""
        digest = hashlib.sha256(f"{self.method}\0{self.target}\0".encode())
        digest.update(self.body)
        return digest.hexdigest()


class Cancelled(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Nobody waits for the answer any more."""

    request_id: str
    reason: str = ""


class AnswerStart(msgspec.Struct, frozen=True, kw_only=True, tag="response_start"):
    request_id: str
    status: int
    headers: list[tuple[str, str]]


class AnswerPiece(msgspec.Struct, frozen=True, kw_only=True, tag="response_chunk"):
    request_id: str
    body: bytes = msgspec.field(name="body_b64")


class AnswerEnd(msgspec.Struct, frozen=True, kw_only=True, tag="response_end"):
    request_id: str


class AnswerFailed(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """There is no answer, or no more of it. The agent gets status 502, or a broken stream."""

    request_id: str
    code: str
    message: str
    """At most `MAX_MESSAGE_CHARS`."""


FromRelay = RelayedCall | Cancelled
ToRelay = AnswerStart | AnswerPiece | AnswerEnd | AnswerFailed

_DECODER = msgspec.json.Decoder(FromRelay)


def decoded(text: str | bytes) -> FromRelay:
    """Raises: msgspec.MsgspecError."""
    return _DECODER.decode(text)


def encoded(message: ToRelay) -> str:
    return msgspec.json.encode(message).decode()
