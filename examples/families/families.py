"""Eight families of small shell tasks, each with files, an oracle's commands and what must be true afterwards.

A task needs two or three commands, and then an answer. Its instruction says in numbered sentences what to do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from commands import COMMANDS, IT, asked_for, numbered, printed_in

__all__ = ["FAMILIES", "KEYS", "NAMES", "WORDS", "Puzzle", "make_puzzle"]

NAMES = [
    "amber",
    "anchor",
    "apple",
    "basket",
    "bridge",
    "candle",
    "carpet",
    "cedar",
    "copper",
    "desert",
    "engine",
    "falcon",
    "garden",
    "hammer",
    "island",
    "jacket",
    "kettle",
    "ladder",
    "lantern",
    "marble",
    "meadow",
    "mirror",
    "needle",
    "orange",
    "paper",
    "pepper",
    "pillow",
    "pocket",
    "rabbit",
    "ribbon",
    "saddle",
    "silver",
]
WORDS = [
    "autumn",
    "bear",
    "bell",
    "bird",
    "boat",
    "book",
    "bread",
    "cake",
    "castle",
    "cherry",
    "cloud",
    "coffee",
    "corn",
    "crown",
    "dragon",
    "eagle",
    "fire",
    "fish",
    "flag",
    "flower",
    "forest",
    "frog",
    "glass",
    "grape",
    "honey",
    "horse",
    "king",
    "lake",
    "leaf",
    "lemon",
    "lion",
    "milk",
    "moon",
    "mouse",
    "music",
    "ocean",
]
KEYS = ["port", "size", "speed", "depth", "width", "height", "level", "limit"]


@dataclass(frozen=True)
class Puzzle:
    """One task before an agent is chosen for it."""

    family: str
    instruction: str
    files: Mapping[str, str]
    """Path -> content, in the sandbox when the agent starts."""
    commands: tuple[str, ...]
    """An oracle's, one after the other."""
    answer: str
    """That the agent must give."""
    changed: Mapping[str, str | None] = field(default_factory=dict)
    """Path -> content that it must have afterwards; None for a file that must be gone."""


def _names(draw: random.Random, *endings: str) -> list[str]:
    return [f"{name}.{ending}" for name, ending in zip(draw.sample(NAMES, len(endings)), endings, strict=True)]


def _did(verb: str, file: str | None = None, called: str | None = None, **values: str) -> tuple[str, str]:
    """The sentence that asks for a command, and that command.

    file: what it works on; called: how the sentence calls that, where it is not by its name.
    """
    command = COMMANDS[verb]
    place = "OLD" if command.is_move else "FILE"
    given = values if file is None else {**values, place: file}
    return asked_for(command, values, called or file), command.filled(given)


def _puzzle(
    family: str,
    steps: list[tuple[str, str]],
    question: str,
    answer: str,
    files: Mapping[str, str],
    changed: Mapping[str, str | None] | None = None,
) -> Puzzle:
    sentences, commands = zip(*steps, strict=True)
    return Puzzle(family, numbered(sentences, question), files, commands, answer, changed or {})


def _short(file: str) -> str:
    """How a sentence calls a listed file: the listing has the rest of its name."""
    return f"the {file.split('.')[0]} file"


LISTED = ("List the files", "ls")


def _read(draw: random.Random) -> Puzzle:
    first, other, last = _names(draw, "txt", "txt", "txt")
    word, wrong = draw.sample(WORDS, 2)
    steps = [_did("read", first), _did("read", last, printed_in(1))]
    files = {first: f"{last}\n", last: f"{word}\n", other: f"{wrong}\n"}
    return _puzzle("read", steps, "Which word is in output 2?", word, files)


def _find(draw: random.Random) -> Puzzle:
    names = _names(draw, *["txt"] * 4)
    words, numbers = draw.sample(WORDS, 4), draw.sample(range(10, 100), 4)
    files = {names[at]: f"{words[at]}\n{numbers[at]}\n" for at in range(4)}
    sought = draw.randrange(4)
    steps = [_did("find", WORD=words[sought]), _did("read", names[sought], printed_in(1))]
    return _puzzle("find", steps, "Which number is in output 2?", str(numbers[sought]), files)


def _count(draw: random.Random) -> Puzzle:
    listed, other = _names(draw, "list", "txt")
    number = draw.randrange(3, 30)
    files = {listed: "".join(f"{draw.choice(WORDS)}\n" for _ in range(number)), other: f"{draw.choice(WORDS)}\n"}
    steps = [LISTED, _did("count", listed, _short(listed))]
    return _puzzle("count", steps, "How many lines are in output 2?", str(number), files)


def _sort(draw: random.Random) -> Puzzle:
    table, other = _names(draw, "csv", "txt")
    rows = [(word, draw.choice(NAMES)) for word in draw.sample(WORDS, 6)]
    files = {table: "".join(f"{word},{name}\n" for word, name in rows), other: f"{draw.choice(WORDS)}\n"}
    steps = [LISTED, _did("sort", table, _short(table))]
    return _puzzle("sort", steps, "Which entry is in output 2?", min(name for _, name in rows), files)


def _edit(draw: random.Random) -> Puzzle:
    (name,) = _names(draw, "conf")
    keys = draw.sample(KEYS, 3)
    *values, new = draw.sample(range(10, 100), 4)
    lines = [f"{key}={value}\n" for key, value in zip(keys, values, strict=True)]
    steps = [_did("set", name, KEY=keys[1], VALUE=str(new)), _did("read", name, IT)]
    changed = {name: f"{lines[0]}{keys[1]}={new}\n{lines[2]}"}
    return _puzzle("edit", steps, f"Which {keys[0]} is in output 2?", str(values[0]), {name: "".join(lines)}, changed)


def _rename(draw: random.Random) -> Puzzle:
    old, new, other = _names(draw, "old", "txt", "txt")
    word = draw.choice(WORDS)
    files = {old: f"{word}\n", other: f"{draw.choice(WORDS)}\n"}
    steps = [LISTED, _did("rename", old, _short(old), NEW=new), _did("read", new, IT)]
    return _puzzle("rename", steps, "Which word is in output 3?", word, files, {old: None, new: f"{word}\n"})


def _fix(draw: random.Random) -> Puzzle:
    (name,) = _names(draw, "sh")
    first, second = draw.sample(range(2, 20), 2)
    steps = [_did("read", name), _did("replace", name, IT, OLD="-", NEW="+"), _did("run", name, IT)]
    files, changed = ({name: f"echo $(({first}{sign}{second}))\n"} for sign in "-+")
    return _puzzle("fix", steps, "Which number is in output 3?", str(first + second), files, changed)


def _log(draw: random.Random) -> Puzzle:
    name, other = _names(draw, "log", "txt")
    kinds = ["INFO", "ERROR", "INFO", "ERROR", "INFO"]
    numbers = draw.sample(range(100, 1000), 5)
    log = "".join(f"{kind} {number}\n" for kind, number in zip(kinds, numbers, strict=True))
    steps = [LISTED, _did("show", name, _short(name))]
    files = {name: log, other: f"{draw.choice(WORDS)}\n"}
    return _puzzle("log", steps, "Which number is in output 2?", str(numbers[3]), files)


FAMILIES: Mapping[str, Callable[[random.Random], Puzzle]] = {
    "read": _read,
    "find": _find,
    "count": _count,
    "sort": _sort,
    "edit": _edit,
    "rename": _rename,
    "fix": _fix,
    "log": _log,
}


def make_puzzle(family: str, seed: int, number: int) -> Puzzle:
    """The same arguments give the same puzzle."""
    return FAMILIES[family](random.Random(f"{family}/{seed}/{number}"))
