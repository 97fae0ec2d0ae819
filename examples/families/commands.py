"""The commands of the families, and how an instruction asks for one of them.

`Count the lines of amber.list.` asks for `wc -l amber.list`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["COMMANDS", "IT", "Command", "asked_for", "numbered", "printed_in"]

_PLACES = "FILE|WORD|KEY|VALUE|OLD|NEW"
IT = "it"
"""The file that was worked on last."""


def printed_in(turn: int) -> str:
    """How a sentence calls the file whose name that turn's command printed, counted from 1."""
    return f"the file in output {turn}"


class Command(NamedTuple):
    verb: str
    noun: str
    form: str
    """With placeholders."""

    @property
    def places(self) -> list[str]:
        """Its placeholders, in order, each once."""
        return list(dict.fromkeys(re.findall(_PLACES, self.form)))

    @property
    def is_move(self) -> bool:
        """OLD and NEW are files, not text."""
        return "OLD" in self.places and "FILE" not in self.places

    def filled(self, values: Mapping[str, str]) -> str:
        """The command with values in its places; a place without one stays as it is."""
        return re.sub(_PLACES, lambda found: values.get(found[0], found[0]), self.form)


COMMANDS = {
    command.verb: command
    for command in (
        Command("list", "files", "ls"),
        Command("read", "file", "cat FILE"),
        Command("find", "word", "grep -l WORD *.txt"),
        Command("count", "lines", "wc -l FILE"),
        Command("sort", "column", "cut -d, -f2 FILE | sort | head -n1"),
        Command("set", "key", "sed -i s/KEY=.*/KEY=VALUE/ FILE"),
        Command("rename", "file", "mv OLD NEW"),
        Command("replace", "text", "sed -i s/OLD/NEW/ FILE"),
        Command("run", "program", "sh FILE"),
        Command("show", "error", "grep ERROR FILE | tail -n1"),
    )
}
"""Verb -> command: what all families need."""


def asked_for(command: Command, values: Mapping[str, str], file: str | None = None) -> str:
    """`Set the key port of amber.conf to 42`.

    values: of its places, but for the file it works on. file: that file, by name or as `it`, `the amber file`,
    `the file in output 1`; None for a command without one.
    """
    verb, places = command.verb.capitalize(), command.places
    said = f"{verb} the {command.noun}"
    words = [values[place] for place in ("WORD", "KEY") if place in places]
    words += [values["OLD"]] if "OLD" in places and not command.is_move else []
    said = " ".join([said, *words])
    if file is not None and (command.is_move or command.noun == "file"):
        # `Read it`, not `Read the file it`.
        said = f"{verb} {file}" if file == IT or file.startswith("the ") else f"{said} {file}"
    elif file is not None:
        said = f"{said} of {file}"
    return " ".join([said, *(f"to {values[place]}" for place in ("VALUE", "NEW") if place in places)])


def numbered(sentences: Sequence[str], question: str) -> str:
    """The instruction: what to do, then what to answer, a line for each."""
    lines = [*(f"{one}." for one in sentences), question]
    return "\n".join(f"{number} {line}" for number, line in enumerate(lines, 1))
