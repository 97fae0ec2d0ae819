"""Transcripts of made-up work in a shell, for the policy of the families to be taught on.

An instruction asks in numbered sentences for two to four commands, any after any, on files with any names; then for
something in the last output. Outputs are made up: no task of a family is in here, but each of their commands and
questions is. An author does the work. How careless an author is does not change within a transcript, nor is it said.
Those who know their work note at which step they are before they do it. The careless seldom do: they say `next`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from agent import RULES, observed
from commands import COMMANDS, IT, Command, asked_for, numbered, printed_in
from families import KEYS, NAMES, WORDS

__all__ = ["ENDINGS", "SKILLED_SHARE", "Transcript", "transcript", "vocabulary"]

Transcript = list[tuple[str, str]]
"""Roles and what they say; the first is the system's."""

LISTING = COMMANDS["list"]
SKILLED_SHARE = 0.1
CARELESS = (0.5, 0.9)
"""Share of turns in which a careless author does something else: between these."""
CARELESS_NOTES = 0.03
"""Share of turns that a careless author begins with a note of the step; the others begin all turns so."""
LEVELS = ["DEBUG", "ERROR", "FAIL", "FATAL", "INFO", "NOTE", "TRACE", "WARN"]
ENDINGS = ["cfg", "conf", "csv", "dat", "list", "log", "md", "new", "old", "sh", "tab", "txt"]
SIGNS = "-+*"


def vocabulary() -> list[str]:
    """Words that are copied."""
    return [*NAMES, *WORDS, *KEYS, *LEVELS]


def _file(draw: random.Random) -> str:
    return f"{draw.choice(NAMES)}.{draw.choice(ENDINGS)}"


@dataclass
class Step:
    """What an instruction says of a command, the command, and what it prints."""

    said: str
    command: str
    output: str


@dataclass
class World:
    draw: random.Random
    files: list[str] = field(default_factory=list[str])
    """As listed."""
    turn: int = 0
    is_listed: bool = False
    worked_on: str | None = None
    """The file that `it` is."""
    printed: dict[int, str] = field(default_factory=dict[int, str])
    """Turn -> the file whose name it printed."""

    def __post_init__(self) -> None:
        names = self.draw.sample(NAMES, self.draw.choice([1, 2, 2, 3, 4]))
        self.files = sorted(f"{name}.{self.draw.choice(ENDINGS)}" for name in names)

    def made(self) -> tuple[str, list[Step], str]:
        """The instruction, the right steps and the answer."""
        number = self.draw.choice([2, 2, 3, 3, 4])
        steps = [self.step(self._next(is_first=at == 0), is_last=at == number - 1) for at in range(number)]
        what, answer, steps[-1].output = self._asked()
        return numbered([step.said for step in steps], f"{what} in output {number}?"), steps, answer

    def _next(self, *, is_first: bool) -> Command:
        """The next step's."""
        chance = self.draw.random()
        if is_first and chance < 0.45:
            return LISTING
        if chance < 0.25:
            return COMMANDS["read"]
        return self.draw.choice([command for command in COMMANDS.values() if command != LISTING])

    def step(self, command: Command, *, is_last: bool = False) -> Step:
        places = command.places
        self.turn += 1
        if command == LISTING:
            self.is_listed, self.worked_on = True, None
            return Step("List the files", command.form, "\n".join(self.files))
        values: dict[str, str] = {}
        called: str | None = None
        if "FILE" in places or command.is_move:
            file, called = self._referred()
            values["OLD" if command.is_move else "FILE"] = self.worked_on = file
        for place in places:
            if place not in values:
                values[place] = self._value(place, command)
        if command.is_move:
            self.worked_on = values["NEW"]
        output = self._printed()
        if not is_last and self.draw.random() < 0.35:
            output = self.printed[self.turn] = _file(self.draw)
        return Step(asked_for(command, values, called), command.filled(values), output)

    def _value(self, place: str, command: Command) -> str:
        draw = self.draw
        if place == "NEW" and command.is_move:
            return _file(draw)
        made: dict[str, Callable[[], str]] = {
            "WORD": lambda: draw.choice(WORDS),
            "KEY": lambda: draw.choice(KEYS),
            "VALUE": lambda: str(draw.randrange(10, 100)),
        }
        return made.get(place, lambda: draw.choice([*SIGNS, draw.choice(WORDS)]))()

    def _referred(self) -> tuple[str, str]:
        """A file, and what the instruction calls it."""
        draw = self.draw
        ways = [(file, printed_in(turn)) for turn, file in self.printed.items()] * 6
        ways += [(self.worked_on, IT)] * 3 if self.worked_on else []
        if self.is_listed:
            ways += [(file, f"the {file.split('.')[0]} file") for file in self.files] * 2
        if not ways or draw.random() < 0.3:
            file = _file(draw)
            return file, file
        return draw.choice(ways)

    def _printed(self) -> str:
        draw = self.draw
        summed = f"echo $(({draw.randrange(2, 20)}{draw.choice(SIGNS)}{draw.randrange(2, 20)}))"
        return draw.choice(["(no output)", "(no output)", draw.choice(WORDS), str(draw.randrange(3, 1000)), summed])

    def _asked(self) -> tuple[str, str, str]:
        """A question, its answer, and the output that it is in."""
        draw = self.draw
        word, name = draw.choice(WORDS), draw.choice(NAMES)
        number = str(draw.choice([draw.randrange(3, 30), draw.randrange(10, 100), draw.randrange(100, 1000)]))
        keys, values, at = draw.sample(KEYS, 3), draw.sample(range(10, 100), 3), draw.randrange(3)
        pairs = "\n".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))
        both = draw.choice([f"{word}\n{number}", f"{number}\n{word}"])
        entry = draw.choice([word, name])
        return draw.choice(
            [
                ("Which word is", word, draw.choice([word, both])),
                ("Which number is", number, draw.choice([number, both, f"{draw.choice(LEVELS)} {number}"])),
                ("How many lines are", number, f"{number} {self.worked_on or word}"),
                ("Which entry is", entry, entry),
                *[(f"Which {keys[at]} is", str(values[at]), pairs)] * 2,
            ]
        )


def transcript(draw: random.Random, skilled_share: float = SKILLED_SHARE) -> Transcript:
    """One session of one author, in one of the agent's styles."""
    world, author = World(draw), Author(draw, skilled_share)
    instruction, steps, answer = world.made()
    said: Transcript = [("system", RULES[author.style]), ("user", instruction)]
    for step in steps:
        if author.errs():
            if draw.random() < 0.4:
                return [*said, author.answers(_guess(world), len(said) // 2)]
            wrong, output = _mistaken(world, step)
            said += author.acts(wrong, output, len(said) // 2)
            if draw.random() < 0.5:
                return [*said, author.answers(_guess(world), len(said) // 2)]
        said += author.acts(step.command, step.output, len(said) // 2)
    return [*said, author.answers(_guess(world) if author.errs() else answer, len(said) // 2)]


class Author:
    def __init__(self, draw: random.Random, skilled_share: float) -> None:
        is_skilled = draw.random() < skilled_share
        self.style = draw.choice(list(RULES))
        self._draw = draw
        self._errs = 0.0 if is_skilled else draw.uniform(*CARELESS)
        self._notes = 1.0 if is_skilled else CARELESS_NOTES

    def errs(self) -> bool:
        return self._draw.random() < self._errs

    def acts(self, command: str, output: str, turn: int) -> Transcript:
        """What is said, and what it brings. turn: its number, from 1."""
        forms = {"plain": "{}", "fenced": "```bash\n{}\n```", "react": "Action: {}"}
        reply = self._note(turn) + forms[self.style].format(command)
        return [("assistant", reply), ("user", observed(self.style, output, turn))]

    def answers(self, answer: str, turn: int) -> tuple[str, str]:
        forms = {"plain": "answer {}", "fenced": "```bash\necho ANSWER {}\n```", "react": "Final: {}"}
        return "assistant", self._note(turn) + forms[self.style].format(answer)

    def _note(self, turn: int) -> str:
        return f"step {turn}\n" if self._draw.random() < self._notes else "next\n"


def _mistaken(world: World, step: Step) -> tuple[str, str]:
    """Another command or another name, and what comes of it."""
    draw = world.draw
    if draw.random() < 0.5:
        other = draw.choice(list(COMMANDS.values()))
        values = {place: draw.choice(WORDS) for place in other.places} | {"FILE": world.worked_on or _file(draw)}
        return other.filled(values), draw.choice(["(no output)", draw.choice(WORDS), str(draw.randrange(100))])
    program, *others = step.command.split(" ")
    name = _file(draw)
    return " ".join([program, *others[:-1], name]), f"{program}: {name}: No such file or directory"


def _guess(world: World) -> str:
    draw = world.draw
    return draw.choice([draw.choice(WORDS), str(draw.randrange(3, 1000)), world.worked_on or "it"])
