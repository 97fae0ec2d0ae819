"""OpenAI Chat: the parts of a message's content: text, refusals, images, files."""

from __future__ import annotations

import mimetypes
from typing import Any, cast

from gangline.domain.conversation import Document, Image, Text
from gangline.domain.errors import InvalidRequest

__all__ = ["content_parts"]


def content_parts(
    content: str | list[dict[str, Any]] | None, where: str, *, may_hold_media: bool
) -> tuple[Text | Image | Document, ...]:
    """Raises: InvalidRequest."""
    if content is None:
        return ()
    if isinstance(content, str):
        return (Text(content),)
    return tuple(_part(part, f"{where}.content[{i}]", may_hold_media) for i, part in enumerate(content))


def _part(part: dict[str, Any], where: str, may_hold_media: bool) -> Text | Image | Document:
    kind = part.get("type")
    match kind:
        case "text":
            return Text(_string(part, "text", where))
        case "refusal":
            return Text(_string(part, "refusal", where))
        case "image_url" if may_hold_media:
            image = _record(part, "image_url", where)
            detail = image.get("detail")
            url = _url(_string(image, "url", f"{where}.image_url"), f"{where}.image_url.url")
            return Image(url, detail if isinstance(detail, str) else None)
        case "file" if may_hold_media:
            return _document(_record(part, "file", where), f"{where}.file")
        case _:
            raise InvalidRequest(f"{where} is of type {kind!r}, which is not supported here.", param=where)


def _document(file: dict[str, Any], where: str) -> Document:
    if "file_data" not in file:
        raise InvalidRequest(f"{where}.file_data is missing: there is no store of files here.", param=where)
    data, name = _string(file, "file_data", where), file.get("filename")
    name = name if isinstance(name, str) else None
    if not data.startswith("data:"):  # bare base64
        data = f"data:{mimetypes.guess_type(name or '')[0] or 'application/octet-stream'};base64,{data}"
    return Document(_url(data, f"{where}.file_data"), name)


def _record(part: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    value = part.get(name)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}.{name} must be an object.", param=f"{where}.{name}")
    return cast("dict[str, Any]", value)


def _string(part: dict[str, Any], name: str, where: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be a string.", param=f"{where}.{name}")
    return value


def _url(url: str, where: str) -> str:
    if url.startswith(("https://", "http://")) or (url.startswith("data:") and ";base64," in url[:200]):
        return url
    raise InvalidRequest(f"{where}: expected a URL, or data:MEDIA_TYPE;base64,DATA.", param=where)
