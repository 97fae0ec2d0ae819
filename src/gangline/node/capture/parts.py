"""Parts of a session that its calls share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from gangline.domain.conversation import ModelCall, SamplingParams
from gangline.domain.errors import EngineIncapable, EngineUnavailable, NotFound
from gangline.domain.evidence.contract import AskedEvidence, EvidenceKind
from gangline.domain.tokens import TokenIds
from gangline.machine.event_loop import Share
from gangline.models.engines.contract import Engine, EngineCapabilities, EngineReply
from gangline.node.backends.gate import Gate, GateMeter
from gangline.node.capture.ledger import Ledger
from gangline.node.capture.placing import PlaceIndex
from gangline.node.capture.prompt_tier import PromptTier

_POOL = "pool/"
"""Prefix of a role's name in a call's model: that role's engines answer, even if another role calls."""


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
    evidence: tuple[EvidenceKind, ...] = ()
    """The kinds of evidence that records keep."""
    empty_retries: int = 0
    """How often an empty generation of one call is sampled again."""
    share: Share = msgspec.field(default_factory=Share)
    """The session's share of the event loop, for the long-running work of all its calls."""
    checkpoint: Callable[[], Awaitable[str | None]] | None = None
    """Makes a checkpoint of the session's files and returns its id, or None if that failed. None: no checkpoints."""

    @property
    def index(self) -> PlaceIndex:
        return self.ledger.index_of(self.engine_role)

    @property
    def keeps_context(self) -> bool:
        """Whether records keep evidence of prompts, which may begin with a parent's context."""
        return any(kind.of_context for kind in self.evidence)

    def asks(
        self,
        capabilities: EngineCapabilities,
        sampling: SamplingParams,
        parent_id: str | None,
        sent_ids: TokenIds | None,
    ) -> tuple[AskedEvidence, ...]:
        """Returns the evidence to ask for: from the first position that the parent's record lacks, if the prompt is
        certain to begin with the parent's context. A role's own engines are not asked for evidence that they do not
        report.

        Raises: EngineIncapable when the policy's engine reports none.
        """
        found: list[AskedEvidence] = []
        before = None if parent_id is None or sent_ids is None else self.ledger.tree[parent_id].certificate
        for kind in self.evidence:
            if not kind.applies(sampling):
                continue
            if kind.name in capabilities.evidence:
                found.append(AskedEvidence(kind, kind.num_known(before)))
            elif self.engine_role is None:
                raise EngineIncapable(
                    f"{kind.setting} asks for {kind.what}, and the engine ({capabilities.engine} "
                    f"{capabilities.version}) reports none. {kind.how_to_report}"
                )
        return tuple(found)

    @staticmethod
    def check_evidence(answer: EngineReply, asked: Sequence[AskedEvidence]) -> None:
        """Raises: EngineIncapable when a reply lacks the evidence that was asked for. A choice without sampled tokens,
        as when the engine aborts a call, has none to report."""
        sampled = [one for one in answer.choices if one.sampled_ids is not None and len(one.sampled_ids)]
        for kind, _ in asked:
            if any(kind.name not in choice.evidence for choice in sampled):
                raise EngineIncapable(
                    f"the engine returned no {kind.title} for this call. Reach it without a router that strips them."
                )


class PartsByRole:
    """The shared parts of a session's calls: the policy's, and each role's that has engines."""

    def __init__(
        self,
        policy: CallParts,
        *,
        engine_of: Callable[[str], Engine | None],
        tier_of: Callable[[Engine], PromptTier],
        role_after_fork: str | None = None,
    ) -> None:
        """engine_of: a role's own engine; None: the policy's engines answer it.
        role_after_fork: the role whose engines answer a fork's calls in place of the policy's.
        """
        self.policy = policy
        self._engine_of = engine_of
        self._tier_of = tier_of
        self._role_after_fork = role_after_fork
        self._of_role: dict[str, CallParts] = {}

    def of(self, role: str | None) -> CallParts:
        """Returns the parts for a role's calls; None: for calls without a role. Raises: EngineUnavailable."""
        own = None if role is None else self._own(role)
        if own is None and self._role_after_fork is not None:
            own = self._own(self._role_after_fork)
            if own is None:
                raise EngineUnavailable(
                    f"no engine answers for role {self._role_after_fork!r}, which goes on behind the fork."
                )
        return own or self.policy

    def of_call(self, call: ModelCall) -> CallParts:
        """Returns the parts for a call: of the role that its model `pool/NAME` names, else of the call's own role.

        Raises: EngineUnavailable; NotFound when NAME has no engines: the policy never replaces a model of the pool.
        """
        if not call.model.startswith(_POOL):
            return self.of(call.agent_role)
        found = self._own(name := call.model.removeprefix(_POOL))
        if found is None:
            raise NotFound(f"the model {call.model!r} does not exist: this node has no engines for role {name!r}.")
        return found

    def _own(self, role: str) -> CallParts | None:
        """None if the role has no separate engines."""
        if role not in self._of_role:
            engine = self._engine_of(role)
            if engine is None:
                return None
            # Weight updates are the policy's: they neither hold calls to other engines nor number their weights.
            own = {"engine": engine, "engine_role": role, "tier": self._tier_of(engine)}
            self._of_role[role] = msgspec.structs.replace(self.policy, **own, gate=Gate(), meter=GateMeter())
        return self._of_role[role]
