"""Parts of a session that its calls share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from gangline.engines.contract import Engine
from gangline.event_loop import Share
from gangline.gateway.backends.gate import Gate, GateMeter
from gangline.gateway.truth.ledger import Ledger
from gangline.gateway.truth.stitch import PromptTier

__all__ = ["CallParts"]


class CallParts(msgspec.Struct, frozen=True, kw_only=True):
    engine: Engine
    ledger: Ledger
    tier: PromptTier
    gate: Gate
    meter: GateMeter
    clock: Callable[[], float]
    """Unix time, UTC, seconds."""
    with_texts: bool
    """Whether records keep the texts of sampled tokens."""
    empty_retries: int = 0
    """How often an empty generation of one call is sampled again."""
    share: Share = msgspec.field(default_factory=Share)
    """The session's share of the event loop, for the long work of all its calls."""
    checkpoint: Callable[[], Awaitable[str | None]] | None = None
    """Makes a checkpoint of the session's files and returns its id, or None where that failed; None makes none."""
