"""Parses the output of pytest, with any options and those of pytest-xdist and pytest-subtests, into outcomes.

Results appear in the progress of a run (`-v`: `a.py::test_b PASSED [ 50%]`; pytest-xdist: `[gw0] [ 50%] PASSED
a.py::test_b`) and in its summary (`-rA`: `FAILED a.py::test_b - why`), which takes precedence. The reports in between,
which repeat the output of tests, are not read. A text without pytest's headings is read as both.

A name is ambiguous if a parameter contains ` - ` or a status: the first reading with balanced brackets is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal

from gangline.grading.untrusted.outcomes import Outcome, Status, plain_lines, worse

_STATUSES: dict[str, Status] = {
    **dict.fromkeys(("PASSED", "XFAIL"), "passed"),
    **dict.fromkeys(("FAILED", "ERROR", "XPASS", "SUBFAIL", "SUBFAILED"), "failed"),
    "SKIPPED": "skipped",
}
_WORD = "PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED"
_WORD_FIRST = re.compile(rf"({_WORD}) +(\S.*)")
_SUBTEST_FIRST = re.compile(r"(?:[\[(].* )?SUBFAIL(?:ED)?(?=[\[( ])")
_AT_WORKER = re.compile(r"\[gw\d+\] (?:\[[^\]]*\] +)?")
_WORD_BEHIND = re.compile(
    rf" ({_WORD}|SUBFAIL(?:ED)?)(?: \(| *$| +\[[^\]]{{1,20}}\]$| +[\d.]{{1,12}} ?[a-zµ]{{1,3}}$|(?<=SUBFAILED)[\[(]"
    r"|(?<=SKIPPED)\w|(?<=XFAIL)\w|(?<=XPASS)\w)"
)
"""Followed by a reason, which on a narrow terminal loses its first letters, by the progress, or by a duration."""
_TEST = re.compile(r"(?:\S+|[^\s:][^:]*\.py)::[^\s\[]+")
_SKIPPED_AT = re.compile(r"\[\d+\] (.+?)(?::\d+)?(?:: |:?$)")
"""Skipped tests by location, without their names."""
_SUMMARY = "short test summary info"
_START = "test session starts"
_REPORTS = ("FAILURES", "ERRORS", "PASSES", "XFAILURES", "XPASSES", "RERUNS", "warnings summary")
_DOTS = re.compile(r"(?:\S+ )?([.,sxXFERuUy-]+) +\[ *\d+%\]")
_PASSED = re.compile(r"\b[1-9]\d{0,8} passed\b.* in [\d.]+")
_FULL = re.compile(r"PASSED +\[100%\]")
_MAX_READINGS = 16

_Part = Literal["bare", "progress", "report", "summary"]


def pytest_outcomes(text: str) -> Iterator[Outcome]:
    reader = _Reader(plain_lines(text))
    statuses = reader.progress | reader.summary
    files = {name.partition("::")[0] for name in statuses if "::" in name}
    for name, status in statuses.items():
        yield Outcome(name, status, tuple(_aliases(name, reader.with_reasons.get(name, set()))))
    for file in reader.not_collected:
        yield Outcome(file, "failed", is_group=True)
    for file in reader.skipped_at - files:
        yield Outcome(file, "skipped", is_group=True)
    if reader.has_full_line:
        yield Outcome("", "passed", ("[100%]",))


def has_pytest_summary(text: str) -> bool:
    return any(_title(line) == _SUMMARY for line in plain_lines(text))


def has_unnamed_tests_of_pytest(text: str) -> bool:
    """Whether the text shows that tests passed, by dots or by their number."""
    lines = plain_lines(text)
    dots = (found[1] for line in lines if (found := _DOTS.fullmatch(line)))
    return any("." in dot for dot in dots) or any(_PASSED.search(line[-200:]) for line in lines)


class _Reader:
    """The results in the lines of one log."""

    def __init__(self, lines: list[str]) -> None:
        self.progress: dict[str, Status] = {}
        self.summary: dict[str, Status] = {}
        self.with_reasons: dict[str, set[str]] = {}
        """A test's name followed by the reason, the form in which lists of SWE-bench contain expected failures."""
        self.skipped_at: set[str] = set()
        """Files."""
        self.not_collected: set[str] = set()
        """Files. A file that a plug-in tests as a whole, such as for its style, can fail while its tests pass."""
        self.has_full_line = False
        """SWE-bench's lists for pytest's own repository contain such a line as a test."""
        self._begun: tuple[str, Status | None] | None = None
        """A test whose status did not follow its name."""
        self._section: dict[str, Status] = {}
        is_bare = not any(_title(line) in (_START, _SUMMARY) for line in lines)
        self._part: _Part = "bare" if is_bare else "progress"
        for line in lines:
            self._read(line)
        self._enter(self._part)

    def _read(self, line: str) -> None:
        title = _title(line)
        if title is None:
            self.has_full_line = self.has_full_line or _FULL.fullmatch(line) is not None
            if self._part == "summary" or (self._part == "bare" and _WORD_FIRST.fullmatch(line)):
                self._read_summary(line)
            elif self._part != "report":
                self._read_progress(line)
        elif title == _START:
            self._enter("progress")
        elif title == _SUMMARY:
            self._enter("summary")
        elif title in _REPORTS or self._part == "summary":
            self._enter("report")

    def _enter(self, part: _Part) -> None:
        """A later summary takes precedence: an earlier one may be output of pytest inside a test."""
        self._end_test()
        self.summary |= self._section
        self._section, self._part = {}, part

    def _read_summary(self, line: str) -> None:
        if found := _SUBTEST_FIRST.match(line):
            _note(self._section, _test_behind(line[found.end() :]), "failed")
        elif found := _WORD_FIRST.fullmatch(line):
            word, rest = found.groups()
            if word == "SKIPPED" and (place := _SKIPPED_AT.match(rest)):
                self.skipped_at.add(place[1])
            else:
                cuts = () if word == "PASSED" else (one.start() for one in re.finditer(" - ", rest))
                name = _reading(rest, cuts) or rest
                _note(self._section, name, _STATUSES[word])
                if word == "ERROR" and "::" not in name:
                    self.not_collected.add(name)
                self.with_reasons.setdefault(name, set()).add(rest)

    def _read_progress(self, line: str) -> None:
        if result := _result(line):
            self._end_test()
            _note(self.progress, *result)
        elif found := _TEST.match(line):
            self._end_test()
            closings = (one.end() for one in re.finditer(r"\](?= |$)", line))
            has_parameter = line.startswith("[", found.end())
            name = (_reading(line, closings) or found[0]) if has_parameter else found[0]
            self._begun = (name, _status_later(line[len(name) :]))
        elif self._begun is not None and (status := _status_later(line)):
            self._begun = (self._begun[0], status)

    def _end_test(self) -> None:
        if self._begun is not None and self._begun[1] is not None:
            _note(self.progress, self._begun[0], self._begun[1])
        self._begun = None


def _title(line: str) -> str | None:
    """The text of a heading: `=== FAILURES ===`."""
    title = line.strip("=")
    is_heading = line.startswith("=") and line.endswith("=") and title.startswith(" ") and title.endswith(" ")
    return title.strip() if is_heading else None


def _result(line: str) -> tuple[str, Status] | None:
    """Test and status in a line that contains both."""
    if found := _AT_WORKER.match(line):
        rest = line[found.end() :].rstrip()
        if part := _SUBTEST_FIRST.match(rest):
            return _test_behind(rest[part.end() :]), "failed"
        done = _WORD_FIRST.fullmatch(rest)
        return (done[2], _STATUSES[done[1]]) if done else None
    if "::" not in line:
        return None
    words = {one.start(): one[1] for one in islice(_WORD_BEHIND.finditer(line), _MAX_READINGS)}
    if any(word.startswith("SUB") for word in words.values()):
        return (_reading(line, (one.start() for one in re.finditer(r" [\[(]| SUBF", line))) or line), "failed"
    name = _reading(line, words)
    return None if name is None else (name, _STATUSES[words[len(name)]])


def _reading(line: str, cuts: Iterable[int]) -> str | None:
    """The text before one of the cuts, if it can be the name of a test."""
    open_ended = None
    for cut in islice(cuts, _MAX_READINGS):
        name = line[:cut]
        function, bracket, parameter = name.partition("::")[2].partition("[")
        if " " in function or (bracket and not parameter.endswith("]")):
            continue
        if name.count("[") == name.count("]"):
            return name
        open_ended = open_ended or name
    return open_ended


def _test_behind(text: str) -> str:
    """The name in ` (i=1) a.py::test_b - why`, the summary's form for a part of a test."""
    start = text.rfind(" ", 0, max(text.find("::"), 0)) + 1
    rest = text[start:].strip()
    return _reading(rest, (one.start() for one in re.finditer(" - ", rest))) or rest


def _status_later(line: str) -> Status | None:
    """The status in a line that begins with one, or ends with one after a test's output."""
    if found := re.match(_WORD, line):
        return _STATUSES[found[0]]
    place, word = max((line.rfind(word), word) for word in _WORD.split("|"))
    rest = line[place + len(word) :]
    is_end = not rest or (rest.startswith(" (") and rest.endswith(")")) or re.fullmatch(r" *\[[^\]]*\]", rest)
    return _STATUSES[word] if place >= 0 and is_end else None


def _aliases(name: str, with_reasons: set[str]) -> Iterator[str]:
    """Names as in lists of SWE-bench: cut off at a space, with spaces merged, and as in `_listed`."""
    for written in (name, name.split(" ", 1)[0], *(" ".join(one.split()) for one in (name, *with_reasons))):
        yield from {written, _listed(written)} - {name}


def _listed(name: str) -> str:
    """Reduces a parameter that is a path to its end, and matplotlib's buttons to numbers."""
    test, _bracket, rest = name.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3").partition("[")
    option, closing, _after = rest.rpartition("]")
    if closing and option.startswith("/") and not option.startswith("//") and "*" not in option:
        return f"{test}[/{option.rpartition('/')[2]}]"
    return f"{test}[{rest}" if rest else test


def _note(statuses: dict[str, Status], name: str, status: Status) -> None:
    statuses[name] = worse(statuses.get(name), status)
