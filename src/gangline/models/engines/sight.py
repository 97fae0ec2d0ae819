"""Examines the images of a call on this side, for the certificate of its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from gangline.domain.conversation import Message
from gangline.domain.images import ImageEvidence, images_in
from gangline.domain.tokens import TokenIds
from gangline.models.engines.contract import EngineChoice, EngineDelta
from gangline.models.engines.fields import media_in
from gangline.models.language.vision import ImageReader

_NO_PROCESSOR = "no image processor is known: give the model's folder as `processor` of the engine"

PartT = TypeVar("PartT", EngineChoice, EngineDelta)


class Sight:
    """An engine's image processor, if the operator gave one."""

    def __init__(self, processor: str | Path | None) -> None:
        """processor: folder of the model that the engine serves. Raises: InvalidRequest."""
        self.reader = None if processor is None else ImageReader.load(processor)

    async def look(self, messages: Sequence[Message], prompt_ids: TokenIds | None) -> ImageEvidence | None:
        """The evidence of a prompt [T] made of `messages`; None without images. prompt_ids: None if the engine did not
        report them."""
        if media_in(messages) != "images":
            return None
        if self.reader is None:
            return ImageEvidence(refused=_NO_PROCESSOR)
        if prompt_ids is None:
            return ImageEvidence(processor=self.reader.identity, refused="the engine did not report the prompt's ids")
        # Decoding takes milliseconds per image.
        return await asyncio.to_thread(self.reader.evidence, list(images_in(messages)), prompt_ids)


def with_evidence(part: PartT, evidence: ImageEvidence | None) -> PartT:
    return part if evidence is None else msgspec.structs.replace(part, images=evidence)
