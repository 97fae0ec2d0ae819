"""Images in a prompt: which ids represent each, and which pixels those ids represented."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from gangline.domain.conversation import Image, Message, ToolResult


class PlacedImage(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a prompt. Its placeholder ids are `prompt[start : start + length]`, counted from the prompt's
    beginning."""

    start: int
    length: int
    digest: str
    """SHA-256 of the file as the client sent it, in hexadecimal."""
    pixel_digest: str
    """SHA-256 of its size and its decoded RGB bytes: equal for two files with the same pixels."""
    grid: tuple[int, int, int]
    """Patches of time, height and width that the processor makes of it (`image_grid_thw`)."""


class ImageEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Certified facts about the images of a call's prompt."""

    placed: tuple[PlacedImage, ...] = ()
    """Every image of the prompt, in order; empty if `refused` is set."""
    placeholder_id: int = -1
    """The id that represents a patch."""
    processor: str = ""
    """Class of the image processor, then a digest of its configuration."""
    refused: str | None = None
    """Why the pixels for the ids are uncertain; the call is untrainable then."""


def images_in(messages: Iterable[Message]) -> Iterator[Image]:
    """Yields images in the order of prompts: within a message, images of tool results come first."""
    for message in messages:
        for part in message.parts:
            if isinstance(part, ToolResult):
                yield from (piece for piece in part.content if isinstance(piece, Image))
        yield from (part for part in message.parts if isinstance(part, Image))


def is_inline(image: Image) -> bool:
    """Whether the image's bytes are in the message, rather than at an address."""
    return image.url.startswith("data:")
