"""Query string parameters: one declaration parses, bounds and describes a parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from gangline.domain.errors import InvalidRequest
from gangline.domain.ids import validated_id

MAX_WAIT_S = 300.0
"""Longest long poll in seconds; a longer request is answered then, and the client polls again."""

_MAX_NAME_CHARS = 1000


@dataclass(frozen=True)
class Query:
    """One parameter. It must not be repeated."""

    name: str
    doc: str

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema."""
        return {"type": "string"}

    def text(self, request: web.Request) -> str | None:
        """The given text; None if the parameter is omitted. Raises: InvalidRequest."""
        given = request.query.getall(self.name, [])
        if len(given) > 1:
            raise self.refused(f"must be given once, got {len(given)} values")
        return given[0] if given else None

    def refused(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"query parameter {self.name} {why}.", param=self.name)


@dataclass(frozen=True)
class Number(Query):
    """A finite decimal number. Below `low` it is refused; above `high` it is reduced to `high`."""

    default: float = 0
    low: float = 0
    high: float = MAX_WAIT_S

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "number", "minimum": self.low, "maximum": self.high, "default": self.default}

    def read(self, request: web.Request) -> float:
        """Raises: InvalidRequest."""
        text = self.text(request)
        return self.default if text is None else min(self._parsed(text), self.high)

    def _parsed(self, text: str) -> float:
        try:
            value = msgspec.convert(text, float, strict=False)
        except msgspec.ValidationError:
            value = math.nan
        if not math.isfinite(value):
            raise self.refused(f"must be a number, got {text[:80]!r}")
        if value < self.low:
            raise self.refused(f"must be at least {self.low:g}, got {text[:80]!r}")
        return value


@dataclass(frozen=True)
class Whole(Number):
    """A whole number, up to 2**53."""

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    def read(self, request: web.Request) -> int:
        """Raises: InvalidRequest."""
        value = super().read(request)
        if not float(value).is_integer():
            raise self.refused(f"must be a whole number, got {value:g}")
        return int(value)


@dataclass(frozen=True)
class Flag(Query):
    """`1` or `true`, `0` or `false`."""

    default: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "enum": [0, 1], "default": int(self.default)}

    def read(self, request: web.Request) -> bool:
        """Raises: InvalidRequest."""
        text = self.text(request)
        if text not in (None, "0", "1", "false", "true"):
            raise self.refused(f"must be 0 or 1, got {text[:80]!r}")
        return self.default if text is None else text in ("1", "true")


@dataclass(frozen=True)
class Choice(Query):
    """One of a few words."""

    of: Sequence[str] = ()

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.of)}

    def read(self, request: web.Request) -> Any:
        """None if the parameter is omitted. Raises: InvalidRequest."""
        text = self.text(request)
        if text is not None and text not in self.of:
            raise self.refused(f"must be one of {', '.join(self.of)}, got {text[:80]!r}")
        return text


@dataclass(frozen=True)
class Text(Query):
    """An id, or the empty text."""

    def read(self, request: web.Request) -> str | None:
        """None if the parameter is omitted. Raises: InvalidRequest."""
        text = self.text(request)
        return validated_id(text, self.name) if text else text


@dataclass(frozen=True)
class Name(Query):
    """Any text of at most 1,000 characters, to be compared with known names."""

    def read(self, request: web.Request) -> str:
        """Empty if the parameter is omitted. Raises: InvalidRequest."""
        text = self.text(request) or ""
        if len(text) > _MAX_NAME_CHARS:
            raise self.refused(f"must have at most {_MAX_NAME_CHARS} characters, got {len(text)}")
        return text


def refuse_unknown(request: web.Request, known: Sequence[Query]) -> None:
    """Refuse parameters that the route does not have: a misspelled one would be ignored. Raises: InvalidRequest."""
    names = [one.name for one in known]
    for name in request.query:
        if name not in names:
            raise InvalidRequest(
                f"{request.method} {request.path} has no query parameter {name[:80]!r}; "
                f"it has: {', '.join(names) or 'none'}.",
                param=name[:80],
            )


def given(request: web.Request, queries: Sequence[Number | Choice | Text | Name | Flag]) -> dict[str, Any]:
    """name -> value of the parameters that were given. Raises: InvalidRequest."""
    return {query.name: query.read(request) for query in queries if query.text(request) is not None}
