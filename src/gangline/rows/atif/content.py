"""Parts of a message as ATIF content: a text, or a list of texts and images."""

from __future__ import annotations

import base64
import binascii
import hashlib
import mimetypes
from collections.abc import Iterable

from gangline.domain.conversation import Document, Image, Part, Text
from gangline.rows.atif.document import AtifContent, AtifImage, AtifPart

__all__ = ["Images", "content_of"]

Images = dict[str, bytes]
"""Path relative to the document -> the image's bytes."""

_SUFFIXES = {"image/jpeg": "jpg", "image/png": "png", "image/gif": "gif", "image/webp": "webp"}


def content_of(parts: Iterable[Part], images: Images) -> AtifContent:
    """One text alone is a string. Inline images go into `images`; parts that ATIF cannot represent are named in a
    text."""
    content = [found for part in parts if (found := _part(part, images)) is not None]
    if not content:
        return ""
    only = content[0].text if len(content) == 1 else None
    return content if only is None else only


def _part(part: Part, images: Images) -> AtifPart | None:
    match part:
        case Text(text):
            return AtifPart(type="text", text=text)
        case Image(url):
            source = _image(url, images)
            return _named("image", url, None) if source is None else AtifPart(type="image", source=source)
        case Document(url, name):
            return _named("document", url, name)
        case _:
            return None


def _named(kind: str, url: str, name: str | None) -> AtifPart:
    """A text in place of a part that cannot be carried."""
    where = url.partition(",")[0] if url.startswith("data:") else url
    return AtifPart(type="text", text=f"[{kind}: {name or where}]")


def _image(url: str, images: Images) -> AtifImage | None:
    """None when it is of no media type that ATIF knows, or its bytes cannot be read."""
    if not url.startswith("data:"):
        guessed, _ = mimetypes.guess_type(url.partition("?")[0])
        return AtifImage(media_type=guessed, path=url) if guessed in _SUFFIXES else None
    head, _, data = url.removeprefix("data:").partition(",")
    media_type, _, encoding = head.partition(";")
    if media_type not in _SUFFIXES or encoding != "base64":
        return None
    try:
        image = base64.b64decode(data, validate=True)
    except binascii.Error:
        return None
    path = f"images/{hashlib.sha256(image).hexdigest()[:32]}.{_SUFFIXES[media_type]}"
    images[path] = image
    return AtifImage(media_type=media_type, path=path)
