"""Lines of a manual, and how an instruction asks for one of them.

A line is `count lines: wc -l FILE`, an instruction's sentence `Count the lines of amber.list.` Made-up manuals, which a
policy is taught on, are put together from the same forms and words, and no verb has the program there that it has here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["MANUAL", "Line", "asked_for", "numbered"]

_PLACES = "FILE|WORD|KEY|VALUE|OLD|NEW"
REFERRED = ("it", "that file")
"""The file that was worked on last, and the one that was printed last."""


class Line(NamedTuple):
    verb: str
    noun: str
    command: str
    """With placeholders."""

    @property
    def text(self) -> str:
        return f"{self.verb} {self.noun}: {self.command}"

    @property
    def places(self) -> list[str]:
        """Its placeholders, in order, each once."""
        return list(dict.fromkeys(re.findall(_PLACES, self.command)))

    @property
    def is_move(self) -> bool:
        """OLD and NEW are files, not text."""
        return "OLD" in self.places and "FILE" not in self.places

    def filled(self, values: Mapping[str, str]) -> str:
        """The command with values in its places; a place without one stays as it is."""
        return re.sub(_PLACES, lambda found: values.get(found[0], found[0]), self.command)


MANUAL = {
    line.verb: line
    for line in (
        Line("list", "files", "ls"),
        Line("read", "file", "cat FILE"),
        Line("find", "word", "grep -l WORD *.txt"),
        Line("count", "lines", "wc -l FILE"),
        Line("sort", "column", "cut -d, -f2 FILE | sort | head -n1"),
        Line("set", "key", "sed -i s/KEY=.*/KEY=VALUE/ FILE"),
        Line("rename", "file", "mv OLD NEW"),
        Line("replace", "text", "sed -i s/OLD/NEW/ FILE"),
        Line("run", "program", "sh FILE"),
        Line("show", "error", "grep ERROR FILE | tail -n1"),
    )
}
"""Verb -> line: what all families need."""


def asked_for(line: Line, values: Mapping[str, str], file: str | None = None) -> str:
    """`Set the key port of amber.conf to 42`.

    values: of its places, but for the file it works on. file: that file, by name or as `it`, `that file`, `the .conf
    file`; None for a command without one.
    """
    verb, places = line.verb.capitalize(), line.places
    said = f"{verb} the {line.noun}"
    words = [values[place] for place in ("WORD", "KEY") if place in places]
    words += [values["OLD"]] if "OLD" in places and not line.is_move else []
    said = " ".join([said, *words])
    if file is not None and (line.is_move or line.noun == "file"):
        # `Read it`, not `Read the file it`.
        said = f"{verb} {file}" if file in REFERRED or file.startswith("the ") else f"{said} {file}"
    elif file is not None:
        said = f"{said} of {file}"
    return " ".join([said, *(f"to {values[place]}" for place in ("VALUE", "NEW") if place in places)])


def numbered(sentences: Sequence[str], question: str) -> str:
    """The instruction: what to do, then what to answer, a line for each."""
    lines = [*(f"{one}." for one in sentences), question]
    return "\n".join(f"{number} {line}" for number, line in enumerate(lines, 1))
