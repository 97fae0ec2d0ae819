"""Recorded requests of real clients, as files: what of them is kept, and how they are sent once more.

What is shortened, always in the same way, so that what was equal stays equal: a text of more than 160 characters keeps
its first 100 and its last 40; a tool's descriptions keep 60 characters. Number, order, roles and kinds of messages, of
their parts, of tools, and the schemas stay. What names a machine is replaced: paths of the tools, UUIDs, long hex ids.

A file holds the first request's body whole; of each later one, the fields that are not as before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from gangline.domain.conversation import Message
from gangline.wire.dialects.contract import RawRequest

__all__ = ["FOLDER", "Recording", "Request", "kept", "recordings"]

FOLDER = Path(__file__).parents[2] / "templates" / "recordings"

_LONGEST, _FRONT, _BACK, _DESCRIPTION = 160, 100, 40, 60
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_HEX = re.compile(r"\b[0-9a-f]{32,}\b")
_SAME = "as before"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request, and the reply that it got."""

    params: dict[str, str]
    query: dict[str, str]
    headers: dict[str, str]
    body: dict[str, Any]
    key: str
    """The record key that was behind every id of the reply."""
    reply: Message

    def raw(self, keys: dict[str, str]) -> RawRequest:
        """As it is sent to a node that gave other keys: recorded key -> that node's."""
        text = json.dumps(self.body, ensure_ascii=False)
        for old, new in keys.items():
            text = text.replace(old, new)
        return RawRequest(body=text.encode(), params=self.params, query=self.query, headers=self.headers)


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    client: str
    """Harness or SDK, and how it was set."""
    version: str
    date: str
    dialect: str
    path: str
    requests: tuple[Request, ...]


def recordings() -> dict[str, Recording]:
    """Name -> recording."""
    return {path.stem: _read(path) for path in sorted(FOLDER.glob("*.json"))}


def _read(path: Path) -> Recording:
    fields = json.loads(path.read_text(encoding="utf-8"))
    before: dict[str, Any] = {}
    for request in fields["requests"]:
        body = {name: before[name] if value == _SAME else value for name, value in request["body"].items()}
        request["body"] = before = body
    return msgspec.convert(fields, Recording)


def kept(client: str, version: str, date: str, calls: Sequence[dict[str, Any]], tools: Path) -> str:
    """The file of a client's calls, as `listening` wrote them down. tools: where its program is installed."""
    keys = [call["key"] for call in calls]
    short = _Short(keys, tools)
    requests: list[dict[str, Any]] = []
    before: dict[str, Any] = {}
    for call in calls:
        body = short.fields(call["body"])
        same = {name for name in body if len(json.dumps(body[name])) > len(_SAME) and before.get(name) == body[name]}
        requests.append(
            {
                "params": call["params"],
                "query": call["query"],
                "headers": call["headers"],
                "body": {name: _SAME if name in same else value for name, value in body.items()},
                "key": call["key"],
                "reply": call["reply"],
            }
        )
        before = body
    first = calls[0]
    document = {
        "client": client,
        "version": version,
        "date": date,
        "dialect": first["dialect"],
        "path": first["path"],
        "requests": requests,
    }
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


class _Short:
    """Shortens and scrubs values."""

    def __init__(self, keys: Iterable[str], tools: Path) -> None:
        self._keys = tuple(keys)
        self._tools = str(tools)
        self._uuids: dict[str, str] = {}

    def fields(self, body: dict[str, Any]) -> dict[str, Any]:
        return {name: self._tool(value) if name == "tools" else self._value(value) for name, value in body.items()}

    def _value(self, value: object) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return [self._value(one) for one in cast("list[object]", value)]
        if isinstance(value, dict):
            return {name: self._value(one) for name, one in cast("dict[str, object]", value).items()}
        return value

    def _tool(self, value: object) -> Any:
        """Descriptions, not properties of that name."""
        if isinstance(value, list):
            return [self._tool(one) for one in cast("list[object]", value)]
        if not isinstance(value, dict):
            return self._text(value) if isinstance(value, str) else value
        fields = cast("dict[str, object]", value)
        return {
            name: self._scrubbed(one)[:_DESCRIPTION]
            if name == "description" and isinstance(one, str)
            else self._tool(one)
            for name, one in fields.items()
        }

    def _text(self, text: str) -> str:
        text = self._scrubbed(text)
        if len(text) <= _LONGEST or any(key in text for key in self._keys):
            return text
        return f"{text[:_FRONT]} [...] {text[-_BACK:]}"

    def _scrubbed(self, text: str) -> str:
        text = text.replace(self._tools, "/opt/tools")
        text = _UUID.sub(lambda found: self._uuid(found[0]), text)
        return _HEX.sub(lambda found: "0" * len(found[0]), text)

    def _uuid(self, uuid: str) -> str:
        return self._uuids.setdefault(uuid, f"00000000-0000-4000-8000-{len(self._uuids):012d}")
