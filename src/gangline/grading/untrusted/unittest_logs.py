"""Parses the output of `python -m unittest -v`, and of Django's runner, into outcomes.

| line | of |
|---|---|
| `test_a (m.C.test_a) ... ok` | a test; until Python 3.10 `test_a (m.C) ... ok` |
| `First line of it. ... ok` | a test with a docstring, whose name is on the line before |
| `ok` | a test that printed something |
| `  test_a (m.C.test_a) (i=1) ... FAIL` | a part of a test (`subTest`) |
| `setUpClass (m.C) ... skipped 'why'` | all tests of a class; `setUpModule (m)`: of a module |
| `FAIL: test_a (m.C.test_a)` | a report of a failure: the only one of a part until Python 3.10 |

Of reports only the headings are read, because the rest repeats the output of tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from gangline.grading.untrusted.outcomes import Outcome, Status, plain_lines

_STATUSES: dict[str, Status] = {
    **dict.fromkeys(("ok", "expected failure"), "passed"),
    **dict.fromkeys(("FAIL", "ERROR", "unexpected success"), "failed"),
}
_SKIPPED = re.compile(r"skipped u?(?:'.*'|\".*\")")
_TEST = re.compile(r" *(\S+) \(([^()\s]+)\)(?: [\[(].*)?")
_DOTS = " ... "
_REPORT = re.compile(r"(?:FAIL|ERROR|UNEXPECTED SUCCESS): (.+)")
_RAN = re.compile(r"Ran (\d{1,9}) tests? in [\d.]+s")
_VERDICT = re.compile(r"(?:OK|FAILED)(?: \((.*)\))?")
_OTHERS = re.compile(r"(?<!expected )\b(?:failures|errors|skipped|unexpected successes)=(\d{1,9})")
"""Numbers of tests that did not pass."""
_NOT_LOADED = ("unittest.loader._FailedTest", "unittest.loader.ModuleSkipped")
_MAX_READINGS = 16


def unittest_outcomes(text: str) -> Iterator[Outcome]:
    reader = _Reader()
    for before, line in pairwise(["", *plain_lines(text)]):
        yield from reader.read(before, line)
    yield from reader.end_test()


def has_unittest_summary(text: str) -> bool:
    return any(_RAN.fullmatch(line) for line in plain_lines(text))


def has_unnamed_tests_of_unittest(text: str) -> bool:
    """Whether the text shows that tests passed, by their number."""
    num_ran = 0
    for line in plain_lines(text):
        if (found := _RAN.fullmatch(line)) is not None:
            num_ran = int(found[1])
        elif num_ran and (verdict := _VERDICT.fullmatch(line)) is not None:
            if num_ran > sum(map(int, _OTHERS.findall(verdict[1] or ""))):
                return True
            num_ran = 0
    return num_ran > 0


class _Reader:
    """State of the parser between lines of a log."""

    def __init__(self) -> None:
        self._is_report = False
        self._test: re.Match[str] | None = None
        """The last test named."""
        self._described: str | None = None
        """The text before the dots; None before that line."""
        self._status: Status | None = None
        """Its status, which later lines may replace: a test can print text that looks like a status."""
        self._is_sure = False
        """Whether the status was alone on its line, or after dots."""

    def read(self, before: str, line: str) -> Iterator[Outcome]:
        if before.startswith("=====") and (report := _REPORT.fullmatch(line)):
            yield from self.end_test()
            self._is_report = True
            if named := _TEST.fullmatch(report[1]):
                yield from _outcomes(named, "failed")
        elif before.startswith("-----") and _RAN.fullmatch(line):
            yield from self.end_test()
            self._is_report = False
        elif not self._is_report:
            yield from self._read_progress(line)

    def end_test(self) -> Iterator[Outcome]:
        if self._test is not None and self._status is not None:
            yield from _outcomes(self._test, self._status, self._described)
        self._test = self._described = self._status = None
        self._is_sure = False

    def _read_progress(self, line: str) -> Iterator[Outcome]:
        described, status = _split(line)
        begin, dots, _rest = f"{line} ".partition(_DOTS)
        if self._test is not None and self._described is None:
            yield from self._read_described(line)
        elif status and (named := _named(described.rpartition(_DOTS)[2], is_certain=self._is_within)):
            yield from self.end_test()
            self._test, self._described, self._status, self._is_sure = named, described, status, True
        elif named := _named(begin.rstrip(), is_certain=self._is_within or not dots):
            yield from self.end_test()
            self._test = named
            if dots:
                yield from self._read_described(line)
        elif self._test is not None:
            self._note(status or _status(line.strip()), _status_at_end(line))
        elif status:
            yield Outcome(described.strip(), status)

    def _read_described(self, line: str) -> Iterator[Outcome]:
        """A line with dots: the test itself, or its docstring, is before them.

        Until Python 3.10 a test with failed parts has no status, and the next one follows on the same line.
        """
        self._described, status = _split(line)
        if status is None:
            self._described, _dots, rest = f"{line} ".partition(_DOTS)
        else:
            rest = self._described.rpartition(_DOTS)[2]
        if (following := _named(rest.rstrip(), is_certain=True)) and following[0] != self._described:
            yield from self.end_test()
            self._test, self._described = following, None if status is None else following[0]
        self._note(status, _status_at_end(rest))

    @property
    def _is_within(self) -> bool:
        """Whether a test may still print."""
        return self._test is not None and not self._is_sure

    def _note(self, sure: Status | None, likely: Status | None) -> None:
        if sure is not None:
            self._status, self._is_sure = sure, True
        elif likely is not None and not self._is_sure:
            self._status = likely


def _named(text: str, *, is_certain: bool) -> re.Match[str] | None:
    """A test's name. is_certain: it cannot be some other word followed by parentheses."""
    named = _TEST.fullmatch(text)
    if named is None or not is_certain:
        return named
    method, place = named[1], named[2]
    is_test = method.startswith("test") or method == "runTest" or place.endswith(f".{method}")
    return named if is_test or place.startswith(_NOT_LOADED) else None


def _split(line: str) -> tuple[str, Status | None]:
    """The text of a line before its status, and the status; the first reading with a status is used."""
    start = 0
    for _ in range(_MAX_READINGS):
        place = line.find(_DOTS, start)
        if place < 0:
            break
        if status := _status(line[place + len(_DOTS) :].strip()):
            return line[:place], status
        start = place + 1
    return line, None


def _status(text: str) -> Status | None:
    return _STATUSES.get(text) or ("skipped" if _SKIPPED.fullmatch(text) else None)


def _status_at_end(line: str) -> Status | None:
    """The status after a test's output."""
    line = line.strip()
    return _status(line) or next((status for word, status in _STATUSES.items() if line.endswith(word)), None)


def _outcomes(named: re.Match[str], status: Status, described: str | None = None) -> Iterator[Outcome]:
    """described: the text before the dots, which is a docstring or the test itself."""
    method, place = named[1], named[2]
    if place.startswith(_NOT_LOADED):
        yield Outcome(method, status, is_group=True)
    elif method in ("setUpClass", "setUpModule"):
        yield Outcome(place, status, is_group=True)
    case = place.removesuffix(f".{method}")
    other = f"{method} ({case})" if case != place else f"{method} ({place}.{method})"
    yield Outcome(
        f"{method} ({place})", status, tuple({other, f"{case}.{method}", *([described.strip()] if described else ())})
    )
