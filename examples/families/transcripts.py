"""Transcripts of made-up work in a shell, for the policy of the families to be taught on.

A world has a manual of three to nine lines. Two are real, how to list and to read files; the others are put together at
random from the families' own words, verbs, programs and forms of commands, so that a verb says nothing of its command:
no verb of the families has its real program there. An instruction asks in numbered sentences for two to four lines of
the manual, then for something in the last output. An author follows it. How careless an author is does not change
within a transcript, nor is it said.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from agent import RULES, observed
from families import KEYS, NAMES, WORDS
from manual import MANUAL, Line, asked_for, numbered

__all__ = ["SKILLED_SHARE", "Transcript", "drill", "transcript", "vocabulary"]

Transcript = list[tuple[str, str]]
"""Roles and what they say; the first is the system's, with the manual."""

LISTING, READING = MANUAL["list"], MANUAL["read"]
FEWEST_LINES, MOST_LINES = 3, 9
SKILLED_SHARE = 0.25
CARELESS = (0.2, 0.6)
"""Share of turns in which a careless author does something else: between these."""
VERBS = (
    *MANUAL,
    *[
        "check",
        "close",
        "copy",
        "cut",
        "drop",
        "fold",
        "join",
        "keep",
        "lift",
        "load",
        "mark",
        "match",
        "merge",
        "move",
        "open",
        "pack",
        "pick",
        "print",
        "save",
        "scan",
        "seal",
        "send",
        "shift",
        "sign",
        "split",
        "sum",
        "swap",
        "test",
        "trim",
        "turn",
    ],
)
NOUNS = (
    *sorted({line.noun for line in MANUAL.values()}),
    *[
        "block",
        "entry",
        "field",
        "group",
        "header",
        "image",
        "item",
        "label",
        "letter",
        "level",
        "limit",
        "line",
        "list",
        "map",
        "name",
        "note",
        "number",
        "page",
        "part",
        "path",
        "row",
        "rule",
        "table",
        "tag",
        "title",
        "total",
        "user",
        "value",
        "zone",
    ],
)
PROGRAMS = (
    *["ls", "cat", "grep", "wc", "cut", "sed", "mv", "sh", "sort", "head", "tail"],
    *[
        "awk",
        "bc",
        "comm",
        "cp",
        "dd",
        "df",
        "du",
        "ed",
        "fmt",
        "gz",
        "jq",
        "ln",
        "nl",
        "od",
        "paste",
        "pr",
        "rev",
        "rm",
        "tac",
        "tar",
        "tee",
        "tr",
        "uniq",
        "vi",
        "xz",
        "yq",
        "zip",
    ],
)
FLAGS = "abcdefghiklmnoprstuvwx"
LEVELS = ["DEBUG", "ERROR", "FAIL", "FATAL", "INFO", "NOTE", "TRACE", "WARN"]
ENDINGS = ["cfg", "conf", "csv", "dat", "list", "log", "md", "new", "old", "sh", "tab", "txt"]
SIGNS = "-+*"
FORMS = (
    *["{program} FILE"] * 2,
    *["{program} -{flag} FILE"] * 2,
    "{program} -{flag} WORD *.{ending}",
    "{program} WORD FILE",
    "{program} OLD NEW",
    "{program} -{flag} s/KEY=.*/KEY=VALUE/ FILE",
    "{program} -{flag} s/OLD/NEW/ FILE",
    "{program} {level} FILE | {second} -{flag}{number}",
    "{program} -{flag}, -{flag}{number} FILE | {second} | {third} -{flag}{number}",
    "{program} -{flag} VALUE FILE",
)


def vocabulary() -> list[str]:
    """Words that deserve a token of their own."""
    capital = [verb.capitalize() for verb in VERBS]
    return [*VERBS, *capital, *NOUNS, *PROGRAMS, *LEVELS, *ENDINGS, *NAMES, *WORDS, *KEYS]


def _invented(draw: random.Random, verb: str) -> Line:
    real = MANUAL[verb].command.split()[0] if verb in MANUAL else None
    first, second, third = (draw.choice(PROGRAMS) for _ in range(3))
    while first == real:
        first = draw.choice(PROGRAMS)
    command = draw.choice(FORMS)
    for place, made in (
        ("program", lambda: first),
        ("second", lambda: second),
        ("third", lambda: third),
        ("flag", lambda: draw.choice(FLAGS)),
        ("number", lambda: str(draw.randrange(1, 9))),
        ("level", lambda: draw.choice(LEVELS)),
        ("ending", lambda: draw.choice(ENDINGS)),
    ):
        while (mark := f"{{{place}}}") in command:
            command = command.replace(mark, made(), 1)
    return Line(verb, draw.choice(NOUNS), command)


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
    manual: list[Line] = field(default_factory=list[Line])
    files: list[str] = field(default_factory=list[str])
    """As listed."""
    is_listed: bool = False
    worked_on: str | None = None
    """The file that `it` is."""
    printed: str | None = None
    """The file that `that file` is."""

    def __post_init__(self) -> None:
        draw = self.draw
        self.files = sorted({_file(draw) for _ in range(draw.choice([1, 2, 2, 3, 4]))})
        others = draw.sample([verb for verb in VERBS if MANUAL.get(verb) not in (LISTING, READING)], MOST_LINES - 2)
        others = others[: draw.randrange(FEWEST_LINES - 2, MOST_LINES - 1)]
        self.manual = [LISTING, READING, *(_invented(draw, verb) for verb in others)]
        draw.shuffle(self.manual)

    @property
    def manual_text(self) -> str:
        return "".join(f"{line.text}\n" for line in self.manual)

    def made(self) -> tuple[str, list[Step], str]:
        """The instruction, the right steps and the answer."""
        number = self.draw.choice([2, 2, 3, 3, 4])
        steps = [self.step(self._next(is_first=at == 0), is_last=at == number - 1) for at in range(number)]
        question, answer, steps[-1].output = self._asked()
        return numbered([step.said for step in steps], question), steps, answer

    def _next(self, *, is_first: bool) -> Line:
        """The manual's line for the next step."""
        chance = self.draw.random()
        if is_first and chance < 0.45:
            return LISTING
        if chance < 0.25:
            return READING
        return self.draw.choice([line for line in self.manual if line != LISTING])

    def step(self, line: Line, *, is_last: bool = False) -> Step:
        places = line.places
        if line == LISTING:
            self.is_listed, self.worked_on, self.printed = True, None, None
            return Step("List the files", line.command, "\n".join(self.files))
        values: dict[str, str] = {}
        called: str | None = None
        if "FILE" in places or line.is_move:
            file, called = self._referred()
            values["OLD" if line.is_move else "FILE"] = self.worked_on = file
        self.printed = None
        for place in places:
            if place not in values:
                values[place] = self._value(place, line)
        if line.is_move:
            self.worked_on = values["NEW"]
        output = self._printed()
        if not is_last and self.draw.random() < 0.25:
            output = self.printed = self.worked_on = _file(self.draw)
        return Step(asked_for(line, values, called), line.filled(values), output)

    def _value(self, place: str, line: Line) -> str:
        draw = self.draw
        if place == "NEW" and line.is_move:
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
        ways = [(self.printed, "that file")] * 6 if self.printed else []
        ways += [(self.worked_on, "it")] * 3 if self.worked_on else []
        if self.is_listed:
            endings = [file.split(".")[1] for file in self.files]
            alone = [at for at, ending in enumerate(endings) if endings.count(ending) == 1]
            ways += [(self.files[at], f"the .{endings[at]} file") for at in alone] * 2
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
        word, name, noun = draw.choice(WORDS), draw.choice(NAMES), draw.choice(NOUNS)
        number = str(draw.choice([draw.randrange(3, 30), draw.randrange(10, 100), draw.randrange(100, 1000)]))
        keys, values, at = draw.sample(KEYS, 3), draw.sample(range(10, 100), 3), draw.randrange(3)
        both = draw.choice([f"{word}\n{number}", f"{number}\n{word}"])
        entry = draw.choice([word, name])
        return draw.choice(
            [
                ("Which word is in it?", word, draw.choice([word, both])),
                ("Which number is in it?", number, both),
                (f"How many {noun} has it?", number, f"{number} {self.worked_on or word}"),
                ("Which number has it?", number, f"{draw.choice(LEVELS)} {number}"),
                (f"Which {noun} is the first?", entry, entry),
                ("What does it print?", number, number),
                (
                    f"Which value has {keys[at]}?",
                    str(values[at]),
                    "\n".join(f"{key}={value}" for key, value in zip(keys, values, strict=True)),
                ),
            ]
        )


def drill(draw: random.Random) -> Transcript:
    """A manual, and one line of it after the other, asked for by itself: much to look up in few words."""
    style, world = draw.choice(list(RULES)), World(draw)
    said: Transcript = [("system", f"{world.manual_text}{RULES[style]}")]
    for _ in range(7):
        step = world.step(draw.choice(world.manual))
        # Sentences speak of a file that was printed, so it is shown.
        shown = [("user", observed(style, step.output))] if world.printed or step.command == LISTING.command else []
        said += [("user", f"{step.said}."), ("assistant", _ran(style, step.command)), *shown]
    return said


def transcript(draw: random.Random, skilled_share: float = SKILLED_SHARE) -> Transcript:
    """One session of one author, in one of the agent's styles."""
    style, world = draw.choice(list(RULES)), World(draw)
    instruction, steps, answer = world.made()
    said: Transcript = [("system", f"{world.manual_text}{RULES[style]}"), ("user", instruction)]
    careless = 0.0 if draw.random() < skilled_share else draw.uniform(*CARELESS)
    for step in steps:
        if draw.random() < careless:
            if draw.random() < 0.4:
                return [*said, ("assistant", _answered(style, _guess(world)))]
            wrong, output = _mistaken(world, step)
            said += [("assistant", _ran(style, wrong)), ("user", observed(style, output))]
            if draw.random() < 0.5:
                return [*said, ("assistant", _answered(style, _guess(world)))]
        said += [("assistant", _ran(style, step.command)), ("user", observed(style, step.output))]
    given = _guess(world) if draw.random() < careless else answer
    return [*said, ("assistant", _answered(style, given))]


def _mistaken(world: World, step: Step) -> tuple[str, str]:
    """Another line of the manual or another name, and what comes of it."""
    draw = world.draw
    if draw.random() < 0.5:
        other = draw.choice(world.manual)
        values = {place: draw.choice(WORDS) for place in other.places} | {"FILE": world.worked_on or _file(draw)}
        return other.filled(values), draw.choice(["(no output)", draw.choice(WORDS), str(draw.randrange(100))])
    program, *others = step.command.split(" ")
    name = _file(draw)
    return " ".join([program, *others[:-1], name]), f"{program}: {name}: No such file or directory"


def _guess(world: World) -> str:
    draw = world.draw
    return draw.choice([draw.choice(WORDS), str(draw.randrange(3, 1000)), world.worked_on or "it"])


def _ran(style: str, command: str) -> str:
    return {"plain": command, "fenced": f"```bash\n{command}\n```", "react": f"Action: {command}"}[style]


def _answered(style: str, answer: str) -> str:
    given = {"plain": f"answer {answer}", "fenced": f"echo ANSWER {answer}", "react": f"Final: {answer}"}[style]
    return f"```bash\n{given}\n```" if style == "fenced" else given
