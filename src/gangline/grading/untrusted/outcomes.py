"""Test results in a log: the status of each test, by its own name and by the other names used in lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

Status = Literal["passed", "failed", "skipped"]
"""`passed` includes expected failures. `failed` includes errors and unexpected successes."""

_ESCAPE = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
_OF_UNITTEST = re.compile(r"\S+ \(([^()\s]+)\)|([^()\s]+)$")


class Outcome(NamedTuple):
    """One result."""

    name: str
    """The test's own name, or the name of a group of tests."""
    status: Status
    aliases: tuple[str, ...] = ()
    """Other names that a list may use for the test."""
    is_group: bool = False
    """A file, module or class. It counts for its tests without a separate result."""


class TestLog:
    """Statuses of tests. If a name is reported more than once, the worst status counts; an own name takes precedence
    over an alias.
    """

    __test__ = False

    def __init__(self, outcomes: Iterable[Outcome] = ()) -> None:
        self.statuses: dict[str, Status] = {}
        """By the test's own name."""
        self._aliases: dict[str, Status] = {}
        self._groups: dict[str, Status] = {}
        for outcome in outcomes:
            _note(self._groups if outcome.is_group else self.statuses, outcome.name, outcome.status)
            for alias in outcome.aliases:
                _note(self._aliases, alias, outcome.status)

    def status_of(self, name: str) -> Status | None:
        """None if the log does not contain it. Tests of a failed group did not run, whatever their code printed."""
        of_groups: list[Status] = [self._groups[one] for one in _groups_of(name) if one in self._groups]
        if any(status == "failed" for status in of_groups):
            return "failed"
        if (found := self.statuses.get(name) or self._aliases.get(name)) is not None:
            return found
        if name.count("[") > name.count("]"):  # cut off within a parameter, as 676 names of SWE-bench Verified are
            worst: dict[str, Status] = {}
            for whole, status in self.statuses.items():
                if whole.startswith(name):
                    _note(worst, name, status)
            if worst:
                return worst[name]
        return of_groups[0] if of_groups else None

    def renamed(self, rename: Callable[[str], str]) -> TestLog:
        found = TestLog()
        for mine, theirs in ((self.statuses, found.statuses), (self._aliases, found._aliases)):
            for name, status in mine.items():
                _note(theirs, rename(name), status)
        found._groups = self._groups
        return found

    def has(self, status: Status) -> bool:
        return status in self.statuses.values() or status in self._groups.values()


def plain_lines(text: str) -> list[str]:
    """Lines without colours. Only line feeds separate lines: other separators may occur in names and reasons."""
    return [line.rstrip("\r") for line in _ESCAPE.sub("", text).split("\n")]


def worse(first: Status | None, second: Status) -> Status:
    """A failure is worst, and a test that ran takes precedence over a skipped one."""
    return second if first is None or second == "failed" or (first == "skipped") else first


def _note(statuses: dict[str, Status], name: str, status: Status) -> None:
    statuses[name] = worse(statuses.get(name), status)


def _groups_of(name: str) -> Iterator[str]:
    """For pytest, the test's file. For unittest, the test's class, module and packages, nearest first."""
    file, of_pytest, _rest = name.partition("::")
    if of_pytest:
        yield file
    elif found := _OF_UNITTEST.match(name):
        group = found[1] or found[2]
        while group:
            yield group
            group = group.rpartition(".")[0]
