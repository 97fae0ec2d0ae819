"""Who makes a call's prompt: we stitch, or the engine renders, for a reason that the certificate keeps."""

from __future__ import annotations

from typing import Literal

from gangline.domain.conversation import ModelCall
from gangline.domain.images import images_in, is_inline
from gangline.models.engines.contract import EngineCapabilities
from gangline.models.engines.fields import has_documents, has_media
from gangline.models.engines.templates.tails import CannotStitch
from gangline.node.capture.placing import Place
from gangline.node.capture.renderings import CheckedStitcher, Decision

__all__ = ["PromptTier", "Tier"]

Tier = Literal["auto", "observe"]
"""auto: stitch where the engine takes exact ids. observe: always let the engine render."""


class PromptTier:
    """Decides, for one session, whether prompts are stitched; an engine that ignored exact ids is not asked again."""

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
    """Why exact ids cannot go together with the media of a call; None when they can."""
    if has_documents(call.messages):
        return "documents in the conversation: ids alone do not hold them"
    if not capabilities.takes_images:
        return "images in the conversation: ids alone do not hold them, and this route takes no images beside ids"
    if not all(map(is_inline, images_in(call.messages))):
        return "an image is at an address: its placeholders are not known before the engine fetched it"
    return None
