"""Eight families of small shell tasks, each with files, an oracle's commands and what must be true afterwards.

A task needs two to six commands, and then an answer. Which family it is follows from its instruction alone; the
commands of all families are in the manual that agents are shown.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["FAMILIES", "MANUAL", "Puzzle", "make_puzzle"]

MANUAL = (
    "ls - list the files",
    "cat FILE - read a file",
    "grep -l WORD *.txt - find the file with a word",
    "wc -l FILE - count the lines of a file",
    "cut -d, -f2 FILE | sort | head -n1 - sort the second column, show its first entry",
    "sed -i s/KEY=.*/KEY=VALUE/ FILE - set a key of a configuration",
    "mv OLD NEW - rename a file",
    "sed -i s/OLD/NEW/ FILE - fix a line of a program",
    "grep ERROR FILE | tail -n1 - show the last error of a log",
)

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


def _names(draw: random.Random, number: int) -> list[str]:
    return [f"{name}{draw.randrange(10, 100)}" for name in draw.sample(NAMES, number)]


def _read(draw: random.Random) -> Puzzle:
    first, other, last = (f"{name}.txt" for name in _names(draw, 3))
    word, wrong = draw.sample(WORDS, 2)
    return Puzzle(
        "read",
        f"Read {first}. It names another file. Which word is in that one?",
        {first: f"{last}\n", last: f"{word}\n", other: f"{wrong}\n"},
        (f"cat {first}", f"cat {last}"),
        word,
    )


def _find(draw: random.Random) -> Puzzle:
    names = [f"{name}.txt" for name in _names(draw, 4)]
    words = draw.sample(WORDS, 4)
    numbers = draw.sample(range(10, 100), 4)
    files = {names[at]: f"{words[at]}\n{numbers[at]}\n" for at in range(4)}
    sought = draw.randrange(4)
    return Puzzle(
        "find",
        f"Find the file with the word {words[sought]}. Which number is in it?",
        files,
        (f"grep -l {words[sought]} *.txt", f"cat {names[sought]}"),
        str(numbers[sought]),
    )


def _count(draw: random.Random) -> Puzzle:
    listed, other = _names(draw, 2)
    number = draw.randrange(3, 30)
    lines = "".join(f"{draw.choice(WORDS)}\n" for _ in range(number))
    return Puzzle(
        "count",
        "List the files. Count the lines of the one that ends in .list. How many lines has it?",
        {f"{listed}.list": lines, f"{other}.txt": f"{draw.choice(WORDS)}\n"},
        ("ls", f"wc -l {listed}.list"),
        str(number),
    )


def _sort(draw: random.Random) -> Puzzle:
    table, other = _names(draw, 2)
    rows = [(word, draw.choice(NAMES)) for word in draw.sample(WORDS, 6)]
    content = "".join(f"{word},{name}\n" for word, name in rows)
    return Puzzle(
        "sort",
        "List the files. Sort the second column of the one that ends in .csv. Which entry is the first?",
        {f"{table}.csv": content, f"{other}.txt": f"{draw.choice(WORDS)}\n"},
        ("ls", f"cut -d, -f2 {table}.csv | sort | head -n1"),
        min(name for _, name in rows),
    )


def _edit(draw: random.Random) -> Puzzle:
    (name,) = _names(draw, 1)
    keys = draw.sample(KEYS, 3)
    *values, new = draw.sample(range(10, 100), 4)
    lines = [f"{key}={value}\n" for key, value in zip(keys, values, strict=True)]
    key, value = keys[1], new
    return Puzzle(
        "edit",
        f"Set the key {key} of the configuration {name}.conf to {value}. Read it again. Which value has {keys[0]}?",
        {f"{name}.conf": "".join(lines)},
        (f"sed -i s/{key}=.*/{key}={value}/ {name}.conf", f"cat {name}.conf"),
        str(values[0]),
        {f"{name}.conf": f"{lines[0]}{key}={value}\n{lines[2]}"},
    )


def _rename(draw: random.Random) -> Puzzle:
    old, new, other = _names(draw, 3)
    word = draw.choice(WORDS)
    return Puzzle(
        "rename",
        f"List the files. Rename the one that ends in .old to {new}.txt. Read it. Which word is in it?",
        {f"{old}.old": f"{word}\n", f"{other}.txt": f"{draw.choice(WORDS)}\n"},
        ("ls", f"mv {old}.old {new}.txt", f"cat {new}.txt"),
        word,
        {f"{old}.old": None, f"{new}.txt": f"{word}\n"},
    )


def _fix(draw: random.Random) -> Puzzle:
    (name,) = _names(draw, 1)
    first, second = draw.sample(range(2, 20), 2)
    return Puzzle(
        "fix",
        f"Read {name}.sh. It should print a sum. Fix the line of the program. Run sh {name}.sh. What does it print?",
        {f"{name}.sh": f"echo $(({first}-{second}))\n"},
        (f"cat {name}.sh", f"sed -i s/-/+/ {name}.sh", f"sh {name}.sh"),
        str(first + second),
        {f"{name}.sh": f"echo $(({first}+{second}))\n"},
    )


def _log(draw: random.Random) -> Puzzle:
    (name,) = _names(draw, 1)
    kinds = ["INFO", "ERROR", "INFO", "ERROR", "INFO"]
    numbers = draw.sample(range(100, 1000), 5)
    lines = [f"{kind} {number}\n" for kind, number in zip(kinds, numbers, strict=True)]
    return Puzzle(
        "log",
        "List the files. Show the last error of the log. Which number has it?",
        {f"{name}.log": "".join(lines)},
        ("ls", f"grep ERROR {name}.log | tail -n1"),
        str(numbers[3]),
    )


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
