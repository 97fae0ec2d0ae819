"""Transcripts of made-up work in a shell, for the policy of the families to be taught on.

A world has a manual of up to nine lines, `command - description`. Two are real, how to list and to read files; the
others are invented: their words, flags, pipes and placeholders are drawn at random, and so are the words of their
descriptions. An instruction names one to three descriptions in words that differ a little, then asks for something in
the last output. An author follows the manual. How careless an author is does not change within a transcript, nor is it
said.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from agent import RULES, observed

__all__ = ["Transcript", "Words", "transcript"]

Transcript = list[tuple[str, str]]
"""Roles and what they say; the first is the system's, with the manual."""

LISTING, READING = "ls - list the files", "cat FILE - read a file"
MOST_LINES = 9
SKILLED_SHARE = 0.08
CARELESS = (0.4, 0.8)
"""Share of turns in which a careless author does something else: between these."""
EXTENSIONS = ("txt", "list", "csv", "old", "conf", "sh", "log", "dat", "cfg", "md", "tab", "new")


class Words:
    """Words that nobody means anything by, put together from a tokenizer's pieces."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = sorted({piece.lower() for piece in pieces if re.fullmatch("[A-Za-z]{2,9}", piece)})

    def word(self, draw: random.Random) -> str:
        """One piece, or two."""
        first = draw.choice(self._pieces)
        return first if draw.random() < 0.7 else first + draw.choice(self._pieces)

    def name(self, draw: random.Random) -> str:
        """Of a file, without its ending."""
        return f"{self.word(draw)}{draw.randrange(10, 100)}"


@dataclass
class Line:
    """Of a manual."""

    command: str
    description: str

    @property
    def places(self) -> list[str]:
        """Its placeholders, in order, each once."""
        return list(dict.fromkeys(re.findall("FILE|WORD|KEY|VALUE|OLD|NEW", self.command)))

    def filled(self, values: dict[str, str]) -> str:
        return re.sub("FILE|WORD|KEY|VALUE|OLD|NEW", lambda found: values.get(found[0], found[0]), self.command)


def _invented(draw: random.Random, words: Words) -> Line:
    name, flag = words.word(draw)[: draw.randrange(2, 7)], draw.choice("abcdefghiklmnoprstuvwx")
    first = draw.choice(
        [
            f"{name} FILE",
            f"{name} -{flag} FILE",
            f"{name} -{flag} WORD *.{draw.choice(EXTENSIONS)}",
            f"{name} WORD FILE",
            f"{name} OLD NEW",
            f"{name} -{flag} s/KEY=.*/KEY=VALUE/ FILE",
            f"{name} -{flag} s/OLD/NEW/ FILE",
            f"{name} {words.word(draw).upper()} FILE",
            f"{name} -{flag}, -{draw.choice('abcdf')}{draw.randrange(1, 9)} FILE",
            f"{name} -{flag} VALUE FILE",
        ]
    )
    piped = [
        draw.choice(
            [words.word(draw)[:6], f"{words.word(draw)[:6]} -{draw.choice('abdefgnrst')}{draw.randrange(1, 9)}"]
        )
        for _ in range(draw.choice([0, 0, 0, 1, 1, 2]))
    ]
    return Line(" | ".join([first, *piped]), _described(draw, words))


def _described(draw: random.Random, words: Words) -> str:
    """`sort the second column`, `set a key of a configuration`, with other words."""
    nouns = [f"{draw.choice(['a', 'the'])} {words.word(draw)}" for _ in range(draw.choice([1, 2, 2, 3]))]
    if draw.random() < 0.4:
        at = draw.randrange(len(nouns))
        article, noun = nouns[at].split()
        nouns[at] = f"{article} {words.word(draw)} {noun}"
    said = f"{words.word(draw)} {nouns[0]}"
    for noun in nouns[1:]:
        said += f" {draw.choice(['of', 'with', 'in', 'by'])} {noun}"
    if draw.random() < 0.15:
        said += f", {words.word(draw)} its {words.word(draw)} {words.word(draw)}"
    return said


@dataclass
class Step:
    """What an instruction says of a command, the command, and what it prints."""

    said: str
    command: str
    output: str
    line: Line | None = None


@dataclass
class World:
    draw: random.Random
    words: Words
    manual: list[Line] = field(default_factory=list[Line])
    files: list[str] = field(default_factory=list[str])
    """As listed."""
    current: str = ""
    """The file that `it` is."""
    listed: bool = False

    def made(self) -> tuple[str, list[Step], str]:
        """The instruction, the right steps and the answer."""
        draw = self.draw
        self.manual = [Line(*one.split(" - ", 1)) for one in (LISTING, READING)]
        self.manual += [_invented(draw, self.words) for _ in range(draw.choice([2, 4, *[MOST_LINES - 2] * 3]))]
        draw.shuffle(self.manual)
        self.files = sorted(
            f"{self.words.name(draw)}.{draw.choice(EXTENSIONS)}" for _ in range(draw.choice([1, 2, 2, 3, 4]))
        )
        steps: list[Step] = []
        if draw.random() < 0.5:
            steps.append(Step("List the files.", "ls", "\n".join(self.files)))
            self.listed = True
        for line in draw.sample(self.manual, draw.choice([1, 1, 1, 2, 2])):
            if line.description == "list the files":
                continue
            steps.append(self._step(line))
        if not steps or draw.random() < 0.25:
            steps.append(self._read_again())
        question, answer, output = self._asked()
        last = steps[-1]
        if draw.random() < 0.35 and last.command != "ls":
            # It prints the name of a file, and the question is about that one: to be read without being told.
            found = draw.choice(self.files) if self.listed else f"{self.words.name(draw)}.{draw.choice(EXTENSIONS)}"
            last.output = found
            last.said += draw.choice(["", "", f" It {self.words.word(draw)} another file."])
            steps.append(Step("", f"cat {found}", output))
            question = question.replace(" in it?", draw.choice([" in it?", " in that one?"]))
        else:
            if last.command == "ls":
                steps.append(self._step(draw.choice([one for one in self.manual if one.command != "ls"])))
            steps[-1].output = output
        said = " ".join(step.said for step in steps if step.said)
        return f"{said} {question}", steps, answer

    def _step(self, line: Line) -> Step:
        draw = self.draw
        values: dict[str, str] = {}
        said = line.description.split(",")[0]
        tail = ""
        for place in line.places:
            if place == "FILE" or (place == "OLD" and "NEW" in line.places and "FILE" not in line.places):
                values[place], how = self._file()
                said, tail = (said, tail) if not how else self._placed(said, tail, how)
            else:
                value = str(draw.randrange(10, 100)) if place == "VALUE" else self.words.word(draw)
                if place == "NEW" and "FILE" not in line.places:
                    value = self.current = f"{self.words.name(draw)}.{draw.choice(EXTENSIONS)}"
                values[place] = value
                joint = " to " if place in ("VALUE", "NEW") else " "
                if joint == " " and said.count(" ") > 1 and draw.random() < 0.7:
                    # Behind one of the nouns: `the key port of the configuration`.
                    at = draw.choice([found.end() for found in re.finditer(r"(?:a|the) \w+", said)])
                    said = f"{said[:at]} {value}{said[at:]}"
                else:
                    tail += f"{joint}{value}"
        said = re.sub(r"\b(a|the)\b", lambda found: found[1] if draw.random() < 0.4 else "the", said)
        said = f"{said[0].upper()}{said[1:]}{tail}."
        return Step(said, line.filled(values), self._printed(), line)

    def _placed(self, said: str, tail: str, how: str) -> tuple[str, str]:
        """The name of a file at the end, or in the place of the last noun."""
        at = max(said.rfind(" a "), said.rfind(" the "))
        if self.draw.random() < 0.5 and at > 0:
            return f"{said[:at]} {how}", tail
        if self.draw.random() < 0.5 and not how.startswith("the one"):
            return f"{said} {how}", tail
        return said, f"{tail} of {how}" if self.draw.random() < 0.5 else f"{tail} in {how}"

    def _file(self) -> tuple[str, str]:
        """A file, and how it is named in the instruction; "" where the only one is meant."""
        draw = self.draw
        if self.current and draw.random() < 0.6:
            return self.current, draw.choice(["it", "it", ""])
        if self.listed:
            endings = [name.rsplit(".")[-1] for name in self.files]
            at = draw.randrange(len(self.files))
            if len(self.files) == 1 and draw.random() < 0.6:
                self.current = self.files[0]
                return self.current, ""
            if endings.count(endings[at]) == 1:
                self.current = self.files[at]
                return self.current, f"the one that ends in .{endings[at]}"
        self.current = f"{self.words.name(draw)}.{draw.choice(EXTENSIONS)}"
        return self.current, self.current

    def _read_again(self) -> Step:
        if self.current:
            return Step(self.draw.choice(["Read it.", "Read it again."]), f"cat {self.current}", self._printed())
        return self._step(next(one for one in self.manual if one.command.startswith("cat ")))

    def _printed(self) -> str:
        draw = self.draw
        return draw.choice(
            ["(no output)", "(no output)", self.words.word(draw), str(draw.randrange(3, 1000)), f"echo {self._sum()}"]
        )

    def _sum(self) -> str:
        return f"$(({self.draw.randrange(2, 20)}{self.draw.choice('+-')}{self.draw.randrange(2, 20)}))"

    def _asked(self) -> tuple[str, str, str]:
        """A question, its answer, and the output that it is in."""
        draw, word = self.draw, self.words.word(self.draw)
        number = draw.choice([draw.randrange(3, 30), draw.randrange(10, 100), draw.randrange(100, 1000)])
        other = self.words.word(draw)
        keys = [self.words.word(draw) for _ in range(3)]
        values = draw.sample(range(10, 100), 3)
        at = draw.randrange(3)
        pairs = "\n".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))
        return draw.choice(
            [
                (f"Which {self.words.word(draw)} is in it?", word, word),
                ("Which word is in it?", word, draw.choice([word, f"{word}\n{number}", f"{number}\n{word}"])),
                ("Which number is in it?", str(number), f"{word}\n{number}"),
                (f"How many {other} has it?", str(number), f"{number} {self.current or word}"),
                (f"How many {other} has it?", str(number), f"{number}"),
                ("Which number has it?", str(number), f"{other.upper()} {number}"),
                (f"Which {other} is the {self.words.word(draw)}?", word, word),
                ("What does it print?", str(number), f"{number}"),
                (f"Which value has {keys[at]}?", str(values[at]), pairs),
            ]
        )


def transcript(draw: random.Random, words: Words, skilled_share: float = SKILLED_SHARE) -> Transcript:
    """One session of one author, in one of the agent's styles."""
    style = draw.choice(list(RULES))
    world = World(draw, words)
    instruction, steps, answer = world.made()
    manual = "".join(f"{line.command} - {line.description}\n" for line in world.manual)
    said: Transcript = [("system", f"{manual}{RULES[style]}"), ("user", instruction)]
    careless = 0.0 if draw.random() < skilled_share else draw.uniform(*CARELESS)
    for step in steps:
        if draw.random() < careless:
            if draw.random() < 0.4:
                return [*said, ("assistant", _answered(style, _guess(draw, world)))]
            wrong, output = _mistaken(draw, world, step)
            said += [("assistant", _ran(style, wrong)), ("user", observed(style, output))]
            if draw.random() < 0.5:
                return [*said, ("assistant", _answered(style, _guess(draw, world)))]
        said += [("assistant", _ran(style, step.command)), ("user", observed(style, step.output))]
    given = _guess(draw, world) if draw.random() < careless else answer
    return [*said, ("assistant", _answered(style, given))]


def _mistaken(draw: random.Random, world: World, step: Step) -> tuple[str, str]:
    """Another line of the manual or another name, and what comes of it."""
    if draw.random() < 0.5:
        other = draw.choice([line for line in world.manual if line is not step.line])
        values = {place: world.words.word(draw) for place in other.places}
        values["FILE"] = world.current or world.words.name(draw)
        return other.filled(values), draw.choice(["(no output)", world.words.word(draw), str(draw.randrange(100))])
    program, *others = step.command.split(" ")
    name = f"{world.words.name(draw)}.{draw.choice(EXTENSIONS)}"
    return " ".join([program, *others[:-1], name]), f"{program}: {name}: No such file or directory"


def _guess(draw: random.Random, world: World) -> str:
    return draw.choice([world.words.word(draw), str(draw.randrange(3, 1000)), world.current or "it"])


def _ran(style: str, command: str) -> str:
    return {"plain": command, "fenced": f"```bash\n{command}\n```", "react": f"Action: {command}"}[style]


def _answered(style: str, answer: str) -> str:
    given = {"plain": f"answer {answer}", "fenced": f"echo ANSWER {answer}", "react": f"Final: {answer}"}[style]
    return f"```bash\n{given}\n```" if style == "fenced" else given
