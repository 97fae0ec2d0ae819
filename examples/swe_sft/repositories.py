"""Six small repositories with ten planted bugs each, as SWE-bench has them: issue, hidden tests, base commit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

NAMES = ("kennel/sled", "kennel/harness", "trail/map", "trail/weather", "camp/stove", "camp/ledger")

_FUNCTIONS: tuple[tuple[str, str, str, str, str], ...] = (
    ("scale(x)", "x * {k}", "x / {k}", "x - {k}", "scale(5)"),
    ("shift(x)", "x + {k}", "x - {k}", "x * {k}", "shift(5)"),
    ("clamp(x)", "max(0, min(x, {k}))", "min(0, max(x, {k}))", "max(x, {k})", "clamp(99)"),
    ("is_full(items)", "len(items) >= {k}", "len(items) > {k}", "len(items) == 0", "is_full([0] * {k})"),
    ("last(items)", "items[-{k}:]", "items[:{k}]", "items[{k}]", "last([*range(20)])"),
    ("total(prices)", "sum(prices) + {k}", "sum(prices)", "len(prices) + {k}", "total([1, 2])"),
    ("spread(values)", "max(values) - min(values)", "min(values) - max(values)", "max(values)", "spread([1, {k}])"),
    ("initials(name)", "'.'.join(word[0] for word in name.split())", "name[0]", "name.split()", "initials('ab cd')"),
    ("evens(n)", "[i for i in range(n) if i % 2 == 0]", "[i for i in range(n) if i % 2]", "[n]", "evens({k} + 9)"),
    ("halves(n)", "(n // 2, n - n // 2)", "(n // 2, n // 2)", "n / 2", "halves(2 * {k} + 1)"),
)
"""Signature, right body, planted body, another wrong one, and a call that shows the difference."""

NUM_BUGS = len(_FUNCTIONS)


@dataclass(frozen=True)
class Bug:
    """One function of a repository that is wrong."""

    repository: str
    instance_id: str
    planted: str
    """Line of the wrong body."""
    fix: str
    wrong_fix: str
    files: dict[str, str]
    """The repository at its base commit."""
    tests: str
    """The hidden tests, as a patch."""
    fail_to_pass: str
    pass_to_pass: tuple[str, ...]
    issue: str


def bugs() -> Iterator[Bug]:
    """All sixty, the repositories in turn."""
    for number in range(NUM_BUGS):
        for place, repository in enumerate(NAMES):
            yield _bug(repository, place + 2, number)


def _bug(repository: str, k: int, broken: int) -> Bug:
    bodies: list[str] = []
    tests = ["import unittest", "import core", "", "", "class Tests(unittest.TestCase):"]
    names: list[str] = []
    for number, (signature, right, planted, _, call) in enumerate(_FUNCTIONS):
        name = signature.partition("(")[0]
        body = (planted if number == broken else right).format(k=k)
        bodies.append(f"def {signature}:\n    return {body}\n")
        function: dict[str, object] = {}
        exec(f"def {signature}:\n    return {right.format(k=k)}\nresult = {call.format(k=k)}", function)
        tests += [
            f"    def test_{name}(self):",
            f"        self.assertEqual(core.{call.format(k=k)}, {function['result']!r})",
            "",
        ]
        names.append(f"test_{name} (test_core.Tests.test_{name})")
    signature, right, planted, other, call = _FUNCTIONS[broken]
    wrong, good, call = (text.format(k=k) for text in (planted, right, call))
    return Bug(
        repository=repository,
        instance_id=f"{repository.replace('/', '__')}-{broken + 1}",
        planted=f"return {wrong}",
        fix=f"return {good}",
        wrong_fix=f"return {other.format(k=k)}",
        files={"core.py": "\n\n".join(bodies), "README.md": f"# {repository}\n"},
        tests=_new_file("test_core.py", tests),
        fail_to_pass=names[broken],
        pass_to_pass=tuple(name for number, name in enumerate(names) if number != broken),
        issue=f"`{call}` in `core.py` gives a wrong result: `{signature}` should return `{good}`.",
    )


def _new_file(path: str, lines: list[str]) -> str:
    head = (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n"
    )
    return head + "".join(f"+{line}\n" for line in lines)
