"""Parses the output of test runners into the status of each test.

The text comes from untrusted code, so everything here takes linear time, and unrecognised lines give no result. Parsers
of the `swebench` package are not as careful, so they run in a separate process.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from gangline.domain.errors import EvaluatorError
from gangline.grading.untrusted.isolated import ENVIRONMENT
from gangline.grading.untrusted.outcomes import Outcome, Status, TestLog, plain_lines
from gangline.grading.untrusted.pytest_logs import (
    has_pytest_summary,
    has_unnamed_tests_of_pytest,
    pytest_outcomes,
)
from gangline.grading.untrusted.unittest_logs import (
    has_unittest_summary,
    has_unnamed_tests_of_unittest,
    unittest_outcomes,
)
from gangline.settings.installation import package_command

_SWEBENCH_PREFIX = "parse_log_"
_WORDS: dict[str, Status] = {
    **dict.fromkeys(("PASSED", "XFAIL"), "passed"),
    **dict.fromkeys(("FAILED", "ERROR", "XPASS"), "failed"),
    "SKIPPED": "skipped",
}
STATUS_WORDS: dict[str, Status] = {word: _WORDS[word] for word in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
"""The words at the beginning of lines that `status_lines` reads."""
_TIMING = re.compile(r"(?:\[ ?\d{1,9}(?:\.\d{1,9})? ?m?s ?\]|\( ?\d{1,9}(?:\.\d{1,9})? ?m?s ?\))$", re.IGNORECASE)
_INLINE_TIMING = re.compile(r"\sin \d{1,9}(?:\.\d{1,9})? m?sec\b", re.IGNORECASE)
_R2E_SUMMARY = "short test summary info"
_R2E_WORDS = ("PASSED", "FAILED", "ERROR")

_CHILD = """
import json, sys, types
import swebench
harness = types.ModuleType("swebench.harness")  # its own __init__ needs Docker's client and much else
harness.__path__ = [f"{folder}/harness" for folder in swebench.__path__]
sys.modules["swebench.harness"] = harness
from swebench.harness.log_parsers import PARSER_REGISTRY
job = json.load(sys.stdin)
if job["parser"] not in PARSER_REGISTRY:
    sys.exit(f"swebench knows no {job['parser']}")
json.dump(PARSER_REGISTRY[job["parser"]](job["text"], None), sys.stdout)
"""


def _r2e_outcomes(text: str) -> Iterator[Outcome]:
    """Pytest's summary with R2E-Gym's names: the parts after the file, joined by dots."""
    for line in text.partition(_R2E_SUMMARY)[2].splitlines():
        if word := next((word for word in _R2E_WORDS if word in line), None):
            yield Outcome(".".join(line.split("::")[1:]).split(" - ")[0], _WORDS[word])


def _status_line_outcomes(text: str) -> Iterator[Outcome]:
    """Lines `PASSED NAME`, whatever printed them. The last line of a test counts. Source: Polar's test-on-output."""
    last: dict[str, Status] = {}
    for line in plain_lines(text):
        word, *rest = line.split(maxsplit=1) or [""]
        if word.startswith(tuple(STATUS_WORDS)) and rest and (name := name_in_status_lines(rest[0].rstrip())):
            last[name] = STATUS_WORDS.get(word, "failed")
    return (Outcome(name, status) for name, status in last.items())


def name_in_status_lines(test: str) -> str:
    """`Class.method` or `function` from a pytest test id; other names are returned unchanged."""
    *rest, name = test.split(" - ")[0].split("::")
    return f"{rest[-1]}.{name}" if len(rest) > 1 else name


def _has_none(_log: str) -> bool:
    """Status lines have no summary, and no tests besides the named ones."""
    return False


class _Parser(NamedTuple):
    outcomes: Callable[[str], Iterator[Outcome]]
    has_summary: Callable[[str], bool]
    """Whether the end of a log contains all results that follow the progress of its tests."""
    has_unnamed_tests: Callable[[str], bool]
    """Whether a log shows that tests ran without naming them."""


PARSERS: dict[str, _Parser] = {
    "pytest": _Parser(pytest_outcomes, has_pytest_summary, has_unnamed_tests_of_pytest),
    "unittest": _Parser(unittest_outcomes, has_unittest_summary, has_unnamed_tests_of_unittest),
    "r2e": _Parser(_r2e_outcomes, has_pytest_summary, has_unnamed_tests_of_pytest),
    "status_lines": _Parser(_status_line_outcomes, _has_none, _has_none),
}
"""By name."""


def without_timing(name: str) -> str:
    """A test's name without a duration written into it by its runner: `[1.3 ms]`, `(0.2s)`, `in 29 msec`."""
    return _INLINE_TIMING.sub("", _TIMING.sub("", name.strip())).strip()


def last_exit_code(text: str, name: str) -> int | None:
    """The code in the last line `NAME=CODE`; None if there is no such line."""
    found = re.findall(rf"^{re.escape(name)}=(\d{{1,3}})\s*$", text, re.MULTILINE)
    return int(found[-1]) if found else None


async def read_log(parser: str, text: str, *, timeout_s: float) -> TestLog:
    """Raises: EvaluatorError if the parser is unknown or not installed, or takes longer than `timeout_s`."""
    if parser in PARSERS:
        return await asyncio.to_thread(lambda: TestLog(PARSERS[parser].outcomes(text)))
    if parser.startswith(_SWEBENCH_PREFIX):
        return TestLog(await _swebench_outcomes(parser, text, timeout_s))
    raise EvaluatorError(f"no parser {parser!r}: known are {', '.join(PARSERS)}, and swebench's {_SWEBENCH_PREFIX}*")


async def _swebench_outcomes(parser: str, text: str, timeout_s: float) -> list[Outcome]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", _CHILD),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=ENVIRONMENT,
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await child.communicate(json.dumps({"parser": parser, "text": text}).encode())
    except TimeoutError:
        raise EvaluatorError(f"{parser} of swebench was not done in {timeout_s:g} s") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        why = (errors.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        install = package_command("swebench", "unidiff", with_dependencies=False)
        raise EvaluatorError(f"{parser} of swebench failed: {why}. Where the node runs: {install}")
    found: dict[str, str] = json.loads(output)
    return [Outcome(name, _WORDS.get(status, "failed")) for name, status in found.items()]
