"""Names in bodies of requests end where their pattern ends: Python's `$` is also before a line's end."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gangline.server.routes.annotations import AnnotationRequest
from gangline.server.routes.tokens import NewTokenRequest

NAMES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "dataset": (AnnotationRequest, {"verdict": "good"}),
    "tenant": (NewTokenRequest, {"role": "read"}),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\n\n", " ", "\x00", "\u2028"])
def test_a_name_has_nothing_behind_it(name: str, end: str) -> None:
    kind, fields = NAMES[name]
    assert getattr(msgspec.convert(fields | {name: "abc"}, kind), name) == "abc"
    for value in (f"abc{end}", end):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(fields | {name: value}, kind)
