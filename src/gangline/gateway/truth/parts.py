"""Parts of a session that its calls share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from gangline.engines.contract import Engine
from gangline.event_loop import Share
from gangline.gateway.backends.gate import Gate, GateMeter
from gangline.gateway.truth.ledger import Ledger
from gangline.gateway.truth.placing import PlaceIndex
from gangline.gateway.truth.stitch import PromptTier

__all__ = ["CallParts", "PartsByRole"]


class CallParts(msgspec.Struct, frozen=True, kw_only=True):
    engine: Engine
    engine_role: str | None = None
    """The role whose own engines answer; None: the policy's."""
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

    @property
    def index(self) -> PlaceIndex:
        return self.ledger.index_of(self.engine_role)


class PartsByRole:
    """The parts of a session's calls: the policy's, and those of each role with engines of its own."""

    def __init__(
        self, policy: CallParts, *, engine_of: Callable[[str], Engine | None], tier_of: Callable[[Engine], PromptTier]
    ) -> None:
        """engine_of: a role's own engine; None where the policy's engines answer it."""
        self.policy = policy
        self._engine_of = engine_of
        self._tier_of = tier_of
        self._of_role: dict[str, CallParts] = {}

    def of(self, role: str | None) -> CallParts:
        """Parts of the calls of a role; None: of calls that name none."""
        if role is None:
            return self.policy
        if role not in self._of_role:
            engine = self._engine_of(role)
            if engine is None:
                return self.policy
            # A weight update is the policy's: it neither holds calls to other engines nor numbers their weights.
            own = {"engine": engine, "engine_role": role, "tier": self._tier_of(engine)}
            self._of_role[role] = msgspec.structs.replace(self.policy, **own, gate=Gate(), meter=GateMeter())
        return self._of_role[role]
