"""Counts unusual English in the docstrings of a source tree, and fails above the bars.

Other code bases of the field use "what" at most 1.6 times per 1,000 docstring words and "tell" 0.16 times, and none of
their docstrings begins with "Of". A clause with "what" or "tells" usually hides a noun or a usual verb ("returns"). The
other marks are rarer still there (inspect_ai, verifiers, trl, verl and httpx, read on 2026-11-30): "is not an FOLDER"
0.03, "one that" 0.09, "those of" 0.02, "of its own" 0.09, "none" 0.51, "goes on" 0.06, "beside" 0.12, "nobody" 0.09. A
bar may only fall; the goal is three times the highest of theirs.

Run it as `python scripts/english.py [FOLDER ...]`. It prints the figures of every package and, above a bar, the places
with the most hits. `--all` lists every place.
"""

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`\"(*-])|\n\s*\n")
WHAT = re.compile(r"\b(?:what|whatever)\b", re.IGNORECASE)
TELL = re.compile(r"\b(?:tell|tells|told)\b", re.IGNORECASE)
BEGINS_WITH_OF = re.compile(r"\s*Of\b")

MARKS = {
    "what": WHAT,
    "tell": TELL,
    "is no": re.compile(r"(?<!there )(?<!There )\b(?:is|are) no (?!longer|more|other|such)\w"),
    "one that": re.compile(r"\bone (?:that|which|whose)\b"),
    "those of": re.compile(r"\bthose (?:of|that|which)\b"),
    "of its own": re.compile(r"\bof (?:ours|theirs|its own)\b"),
    "none": re.compile(r"\bnone\b"),
    "goes on": re.compile(r"\bgo(?:es)? on\b"),
    "beside": re.compile(r"\bbeside\b"),
    "nobody": re.compile(r"\b(?:nobody|somebody|whoever|anybody)\b"),
}

PER_1000_WORDS = {
    "what": 0.5,
    "tell": 0.1,
    "is no": 0.1,
    "one that": 0.27,
    "those of": 0.15,
    "of its own": 0.27,
    "none": 1.5,
    "goes on": 0.18,
    "beside": 0.36,
    "nobody": 0.27,
    "semicolons": 0.5,
}
"""Findings per 1,000 words; `semicolons` are sentences with more than one."""

OCCURRENCES = {"begins with Of": 0}
WORST_PLACES = 15


@dataclass(frozen=True)
class Docstring:
    """A docstring and the line on which it starts."""

    path: Path
    line: int
    text: str

    def hits(self) -> Iterator[tuple[str, int]]:
        """The kind and the line of each finding."""
        if BEGINS_WITH_OF.match(self.text):
            yield "begins with Of", self.line
        for kind, pattern in MARKS.items():
            for match in pattern.finditer(self.text):
                yield kind, self.line_at(match.start())
        start = 0
        for sentence in SENTENCE_END.split(self.text):
            start = self.text.index(sentence, start)
            if prose(sentence).count(";") > 1:
                yield "semicolons", self.line_at(start)

    def line_at(self, position: int) -> int:
        """The line in the file of a position in the text, as far as the text has no escaped line breaks."""
        return self.line + self.text.count("\n", 0, position)


def prose(sentence: str) -> str:
    """The sentence without literals between backquotes, whose semicolons are data."""
    return re.sub(r"``?[^`]*`?`", "", sentence)


def docstrings(path: Path) -> Iterator[Docstring]:
    """Yield the docstrings of a module, its classes and functions, and those under fields and constants."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield Docstring(path, node.lineno, text)
            case _:
                pass


def package_of(path: Path, root: Path) -> str:
    """The first folder under the root, or `.` for a module that lies in the root itself."""
    parts = path.relative_to(root).parts
    return parts[0] if len(parts) > 1 else "."


@dataclass
class Figures:
    """Docstring words and findings of one package."""

    words: int
    hits: Counter[str]

    def value(self, kind: str) -> float:
        """Hits per 1,000 words, or their number for kinds that must not occur."""
        return 1000 * self.hits[kind] / max(self.words, 1) if kind in PER_1000_WORDS else self.hits[kind]


def row(name: str, figures: Figures) -> str:
    """A line of the table."""
    cells = [f"{figures.value(kind):>11.2f}" for kind in PER_1000_WORDS]
    cells += [f"{figures.hits[kind]:>16}" for kind in OCCURRENCES]
    return f"{name:<10}{figures.words:>7}" + "".join(cells)


def main(arguments: list[str] | None = None) -> int:
    """Print the figures; 1 if one is above its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[Path("src/gangline")], metavar="FOLDER")
    parser.add_argument("--all", action="store_true", help="list every place")
    options = parser.parse_args(arguments)

    packages: defaultdict[str, Figures] = defaultdict(lambda: Figures(0, Counter()))
    total = Figures(0, Counter())
    places: defaultdict[str, defaultdict[Path, list[int]]] = defaultdict(lambda: defaultdict(list))
    for folder in options.folders:
        for path in sorted(folder.rglob("*.py")):
            for docstring in docstrings(path):
                for figures in (packages[package_of(path, folder)], total):
                    figures.words += len(WORD.findall(docstring.text))
                for kind, line in docstring.hits():
                    packages[package_of(path, folder)].hits[kind] += 1
                    total.hits[kind] += 1
                    places[kind][path].append(line)

    print(f"{'package':<10}{'words':>7}" + "".join(f"{kind:>11}" for kind in PER_1000_WORDS), end="")
    print("".join(f"{kind:>16}" for kind in OCCURRENCES))
    for name in sorted(packages):
        print(row(name, packages[name]))
    print(row("total", total))

    bars = PER_1000_WORDS | OCCURRENCES
    above = [kind for kind, bar in bars.items() if total.value(kind) > bar]
    for kind in bars if options.all else above:
        print(f"\n{kind}: {total.value(kind):.4g}, bar {bars[kind]:g}")
        files = sorted(places[kind].items(), key=lambda item: -len(item[1]))
        for path, lines in files[: None if options.all else WORST_PLACES]:
            print("".join(f"  {path}:{line}\n" for line in sorted(lines)), end="")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
