"""The grader's output as text, for the question why a session has its reward."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import cast

from rich.text import Text

from gangline.cli.terminal.output import printable_lines

__all__ = ["grading_lines"]


def grading_lines(details: Mapping[str, object]) -> Iterator[Text]:
    """A line for each finding, nested ones by dotted names; text of several lines below its name."""
    if details:
        yield Text("grading", "bold")
    for name, value in _findings(details):
        lines = printable_lines(_text(value)).splitlines()
        if len(lines) < 2:
            yield Text(f"  {name}: {''.join(lines)}")
            continue
        yield Text(f"  {name}:")
        yield from (Text(f"    {line}") for line in lines)


def _findings(details: Mapping[str, object], before: str = "") -> Iterator[tuple[str, object]]:
    for name, value in details.items():
        if isinstance(value, Mapping) and value:
            yield from _findings(cast("Mapping[str, object]", value), f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _text(value: object) -> str:
    """A list of texts has one on each line."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        items = cast("list[object]", value)
        if items and all(isinstance(one, str) for one in items):
            return "\n".join(cast("list[str]", items))
    return json.dumps(value, ensure_ascii=False, default=str)
