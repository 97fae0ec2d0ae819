"""Parts of a session that its calls share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from gangline.domain.conversation import ModelCall, SamplingParams
from gangline.domain.errors import EngineIncapable, EngineUnavailable, NotFound
from gangline.domain.tokens import TokenIds
from gangline.machine.event_loop import Share
from gangline.models.engines.contract import Engine, EngineCapabilities, EngineReply
from gangline.models.engines.evidence import cuts
from gangline.node.backends.gate import Gate, GateMeter
from gangline.node.capture.experts import num_known
from gangline.node.capture.ledger import Ledger
from gangline.node.capture.placing import PlaceIndex
from gangline.node.capture.prompt_tier import PromptTier

__all__ = ["CallParts", "PartsByRole"]


_HOW_TO_REPORT = (
    "Serve a mixture-of-experts model with `--enable-return-routed-experts` (vLLM and SGLang have it; of SGLang, give "
    "the engine's option experts_per_token too), reach it on its chat route, or leave the setting out."
)

_HOW_TO_MASK = (
    "vLLM reports them on its generate route with `--return-sampling-mask` (reach it as the engine kind generate), "
    "SGLang 0.5.23 on both routes, the embedded engine as vLLM does. Or leave the setting out."
)


_POOL = "pool/"
"""Before the name of a role in a call's model: its own engines answer, whatever role the call plays."""


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
    with_experts: bool = False
    """Whether records keep routed experts."""
    with_masks: bool = False
    """Whether records keep the ids that tokens were drawn among."""
    empty_retries: int = 0
    """How often an empty generation of one call is sampled again."""
    share: Share = msgspec.field(default_factory=Share)
    """The session's share of the event loop, for the long work of all its calls."""
    checkpoint: Callable[[], Awaitable[str | None]] | None = None
    """Makes a checkpoint of the session's files and returns its id, or None where that failed; None makes none."""

    @property
    def index(self) -> PlaceIndex:
        return self.ledger.index_of(self.engine_role)

    def experts_from(
        self, capabilities: EngineCapabilities, parent_id: str | None, sent_ids: TokenIds | None
    ) -> int | None:
        """First position whose experts a call asks for: the first that the parent's record lacks, where the prompt is
        sure to begin as the parent's context does. None: it asks for none, as engines of roles may not report them.

        Raises: EngineIncapable where the policy's engine reports none.
        """
        if not self.with_experts:
            return None
        if not capabilities.reports_experts:
            if self.engine_role is not None:
                return None
            raise EngineIncapable(
                f"capture.routed_experts asks for the experts of each token, and the engine ({capabilities.engine} "
                f"{capabilities.version}) reports none. {_HOW_TO_REPORT}"
            )
        if parent_id is None or sent_ids is None:
            return 0
        return num_known(self.ledger.tree[parent_id].certificate.routed_experts)

    def asks_mask(self, capabilities: EngineCapabilities, sampling: SamplingParams) -> bool:
        """Whether a call asks for sampling masks: nothing is to be kept where nothing is cut away, and engines of roles
        may not report them.

        Raises: EngineIncapable where the policy's engine reports none.
        """
        if not self.with_masks or not cuts(sampling):
            return False
        if not capabilities.reports_masks and self.engine_role is None:
            raise EngineIncapable(
                f"capture.sampling_masks asks for the ids that each token was drawn among, and the engine "
                f"({capabilities.engine} {capabilities.version}) reports none. {_HOW_TO_MASK}"
            )
        return capabilities.reports_masks

    @staticmethod
    def check_evidence(answer: EngineReply, experts_from: int | None, with_mask: bool) -> None:
        """Raises: EngineIncapable when the reply to a call that asked for experts or masks has none. Where nothing was
        sampled, as of a call that the engine aborts, there is none to report."""
        sampled = [one for one in answer.choices if one.sampled_ids is not None and len(one.sampled_ids)]
        if with_mask and any(choice.sampling_mask is None for choice in sampled):
            raise EngineIncapable(
                "the engine returned no sampling mask for this call. Reach it without a router that strips them."
            )
        if experts_from is not None and any(choice.experts is None for choice in sampled):
            raise EngineIncapable(
                "the engine returned no routed experts for this call. Reach it without a router that strips them."
            )


class PartsByRole:
    """The parts of a session's calls: the policy's, and those of each role with engines of its own."""

    def __init__(
        self,
        policy: CallParts,
        *,
        engine_of: Callable[[str], Engine | None],
        tier_of: Callable[[Engine], PromptTier],
        behind: str | None = None,
    ) -> None:
        """
        engine_of: a role's own engine; None where the policy's engines answer it.
        behind: the role whose engines answer a fork's calls in the place of the policy's.
        """
        self.policy = policy
        self._engine_of = engine_of
        self._tier_of = tier_of
        self._behind = behind
        self._of_role: dict[str, CallParts] = {}

    def of(self, role: str | None) -> CallParts:
        """Parts of the calls of a role; None: of calls that name none. Raises: EngineUnavailable."""
        own = None if role is None else self._own(role)
        if own is None and self._behind is not None:
            own = self._own(self._behind)
            if own is None:
                raise EngineUnavailable(f"no engine answers for role {self._behind!r}, which goes on behind the fork.")
        return own or self.policy

    def of_call(self, call: ModelCall) -> CallParts:
        """Parts of a call, by the role that its model `pool/NAME` names, or else by its own.

        Raises: EngineUnavailable; NotFound where NAME has no engines: the policy stands in for no model of the pool.
        """
        if not call.model.startswith(_POOL):
            return self.of(call.agent_role)
        found = self._own(name := call.model.removeprefix(_POOL))
        if found is None:
            raise NotFound(f"the model {call.model!r} does not exist: this node has no engines for role {name!r}.")
        return found

    def _own(self, role: str) -> CallParts | None:
        """None where it has no engines of its own."""
        if role not in self._of_role:
            engine = self._engine_of(role)
            if engine is None:
                return None
            # A weight update is the policy's: it neither holds calls to other engines nor numbers their weights.
            own = {"engine": engine, "engine_role": role, "tier": self._tier_of(engine)}
            self._of_role[role] = msgspec.structs.replace(self.policy, **own, gate=Gate(), meter=GateMeter())
        return self._of_role[role]
