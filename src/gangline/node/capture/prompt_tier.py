"""Decides who makes a call's prompt: we stitch it, or the engine renders it, for a reason that the certificate keeps.

Stitched prompts are compared with the template's rendering of the whole conversation, and differences are recorded. A
full rendering costs milliseconds per thousand ids, so it is done for a sample: the first call of each kind (the new
roles, with or without a system message, results, calls, thinking; for each length up to some 30 messages, then for each
doubling), then every 64th. If one call of a kind was not as rendered, every call of that kind is compared, and so is
every call of a kind that the template is known to rewrite (`TemplateFacts`). For a template that numbers tool results,
or looks back in another way, the whole history replaces the placeholder: the prompt is then as rendered, at the cost of
three renderings per call.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
import numpy as np

from gangline.domain.completion import CompletionTree, DivergenceCause
from gangline.domain.conversation import ModelCall, ToolCall
from gangline.domain.errors import ContextOverflow, EngineRefused
from gangline.domain.images import images_in, is_inline
from gangline.domain.node_views import TemplateFacts
from gangline.domain.tokens import TokenIds, token_ids
from gangline.models.engines.contract import Engine, EngineCapabilities
from gangline.models.engines.fields import has_documents, has_media
from gangline.models.engines.templates.as_rendered import difference
from gangline.models.engines.templates.tails import CannotStitch, rendered
from gangline.node.capture.placing import Place
from gangline.node.capture.stitch import Stitcher, has_thought

Tier = Literal["auto", "observe"]
"""auto: stitch if the engine takes exact ids. observe: always let the engine render."""

NotAsRendered = Literal["fall_back", "stitch"]
"""For a stitched prompt that the template would write differently: let the engine render, or send it and record
that."""

_EVERY = 64
_SHORT = 32
_MAX_SHAPES = 10_000
"""Beyond this all are forgotten, and their next calls are compared again."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    prompt_ids: TokenIds | None = None
    """Exact prompt to send [T]; None: the engine renders."""
    fallback: str | None = None
    cause: DivergenceCause | None = None
    as_rendered: bool | None = None
    """See `Certificate`, for `prompt_ids`."""
    unlike_rendering: str | None = None


class _Kind(NamedTuple):
    """Calls that a template is assumed to treat alike."""

    template: str
    branch_key: str
    roles: tuple[str, ...]
    """Roles of the new messages; consecutive messages of one role count once."""
    has_system: bool
    has_results: bool
    """Whether there were tool results before."""
    has_calls: bool
    """Whether the previous turn calls tools."""
    has_thought: bool


class Renderings:
    """Decides which stitched prompts are compared, for all sessions of a node."""

    def __init__(self) -> None:
        self._since: dict[tuple[_Kind, int], int] = {}
        """kind, `_length_class` -> calls since the last that was as rendered"""
        self._unlike: dict[_Kind, bool] = {}
        """Kinds with a call that was not as rendered -> whether it was as rendered with the whole history."""

    def is_due(self, kind: _Kind, num_messages: int) -> bool:
        shape = kind, _length_class(num_messages)
        if kind in self._unlike or shape not in self._since:
            return True
        self._since[shape] = (self._since[shape] + 1) % _EVERY
        return self._since[shape] == 0

    def needs_history(self, kind: _Kind) -> bool | None:
        """None: nothing speaks against a placeholder. False: neither placeholder nor history is as rendered."""
        return self._unlike.get(kind)

    def was_as_rendered(self, kind: _Kind, num_messages: int) -> None:
        if len(self._since) >= _MAX_SHAPES:
            self._since.clear()
        self._since.setdefault((kind, _length_class(num_messages)), 0)

    def was_unlike(self, kind: _Kind, *, but_behind_history: bool) -> None:
        if len(self._unlike) >= _MAX_SHAPES:
            self._unlike.clear()
        self._unlike[kind] = but_behind_history


def _length_class(num_messages: int) -> int:
    """One class per length of short conversations, one per doubling of long ones."""
    return min(num_messages, _SHORT - 1 + num_messages.bit_length())


class CheckedStitcher:
    """For one session and its engine."""

    def __init__(
        self, engine: Engine, tree: CompletionTree, stitcher: Stitcher, policy: NotAsRendered, renderings: Renderings
    ) -> None:
        self._engine = engine
        self._tree = tree
        self._stitcher = stitcher
        self._policy: NotAsRendered = policy
        self._renderings = renderings

    async def stitch(self, call: ModelCall, place: Place, facts: TemplateFacts) -> Decision:
        """`place` has a parent. Raises: CannotStitch, EngineUnavailable."""
        kind, num_messages = self._kind(call, place, facts), len(call.messages)
        with_history = self._renderings.needs_history(kind)
        ids = await self._stitcher.prompt_ids(call, place, behind_history=with_history is True)
        is_suspect = (facts.user_turns_as_rendered if "user" in kind.roles else facts.tool_turns_as_rendered) is False
        if has_media(call.messages) or not (self._renderings.is_due(kind, num_messages) or is_suspect):
            return Decision(prompt_ids=ids)
        whole = await self._whole(call)
        if isinstance(whole, str):
            # There is no rendering to fall back to.
            return Decision(prompt_ids=ids, as_rendered=False, unlike_rendering=whole)
        unlike = await self._difference(call, place, whole, ids)
        if unlike is None:
            self._renderings.was_as_rendered(kind, num_messages)
            return Decision(prompt_ids=ids, as_rendered=True)
        if with_history is None and (mended := await self._behind_history(call, place, whole)) is not None:
            self._renderings.was_unlike(kind, but_behind_history=True)
            return Decision(prompt_ids=mended, as_rendered=True)
        self._renderings.was_unlike(kind, but_behind_history=False)
        if self._policy == "fall_back":
            raise CannotStitch(f"the template would write another prompt: {unlike}", "template_rewrites")
        return Decision(prompt_ids=ids, as_rendered=False, unlike_rendering=f"the template writes another: {unlike}")

    def _kind(self, call: ModelCall, place: Place, facts: TemplateFacts) -> _Kind:
        roles: list[str] = []
        for message in place.new_messages:
            if message.role not in roles[-1:]:
                roles.append(message.role)
        before, echo = call.messages[: place.num_shared], call.messages[place.num_shared - 1]
        return _Kind(
            template=facts.template_digest,
            branch_key=place.branch_key,
            roles=tuple(roles),
            has_system=before[0].role in ("system", "developer"),
            has_results=any(message.role == "tool" for message in before),
            has_calls=any(isinstance(part, ToolCall) for part in echo.parts),
            has_thought=has_thought(echo),
        )

    async def _whole(self, call: ModelCall) -> TokenIds | str:
        """Returns the rendering of all messages, or why the template refuses them. Raises: EngineUnavailable."""
        try:
            return await rendered(self._engine, call.messages, call.tools, call.template_kwargs)
        except (EngineRefused, ContextOverflow) as refused:
            return f"the template refuses the whole conversation: {refused.message}"

    async def _behind_history(self, call: ModelCall, place: Place, whole: TokenIds) -> TokenIds | None:
        """Returns the prompt with new ids found after the whole history, if that is as rendered."""
        try:
            ids = await self._stitcher.prompt_ids(call, place, behind_history=True)
        except CannotStitch:
            return None
        return ids if await self._difference(call, place, whole, ids) is None else None

    async def _difference(self, call: ModelCall, place: Place, whole: TokenIds, ids: TokenIds) -> str | None:
        if np.array_equal(ids, whole):
            return None
        assert place.parent_id is not None
        at = self._tree[place.parent_id]
        added = [ids[self._tree.num_context_ids(place.parent_id) :]]
        while at.certificate.prompt_source == "stitched" and at.parent_id is not None:
            added.append(at.prompt_suffix_ids)
            at = self._tree[at.parent_id]
        try:
            opening = await self._stitcher.tails(call, place.branch_key).opening()
        except EngineRefused:  # the template refuses a lone user message: then nothing is skipped
            opening = token_ids()
        return difference(whole, self._tree.prompt_ids(at), added[::-1], opening)


class PromptTier:
    """Decides for one session whether prompts are stitched. An engine that ignored exact ids is not sent them again."""

    def __init__(self, tier: Tier, stitcher: CheckedStitcher) -> None:
        self._tier = tier
        self._stitcher = stitcher
        self._ignored = False

    async def decide(self, call: ModelCall, place: Place, capabilities: EngineCapabilities) -> Decision:
        """Raises: EngineUnavailable."""
        if self._tier == "observe" or place.parent_id is None or not capabilities.takes_prompt_ids:
            return Decision()
        if has_media(call.messages) and (why := _why_apart(call, capabilities)) is not None:
            return Decision(fallback=why)
        if self._ignored:
            return Decision(fallback="the engine ignored the exact prompt ids of an earlier call")
        if not capabilities.renders:
            return Decision(fallback="the engine has no route that renders a conversation (`/tokenize`)")
        try:
            return await self._stitcher.stitch(call, place, capabilities.template)
        except CannotStitch as why:
            return Decision(fallback=why.reason, cause=why.cause)

    def ids_were_ignored(self) -> None:
        self._ignored = True


def _why_apart(call: ModelCall, capabilities: EngineCapabilities) -> str | None:
    """Returns why exact ids cannot be combined with the media of a call; None if they can."""
    if has_documents(call.messages):
        return "documents in the conversation: ids alone do not hold them"
    if not capabilities.takes_images:
        return "images in the conversation: ids alone do not hold them, and this route takes no images alongside ids"
    if not all(map(is_inline, images_in(call.messages))):
        return "an image is at an address: its placeholders are not known before the engine fetched it"
    return None
