"""The output of test runners -> the status of each test.

The text comes from code that an agent wrote, so nothing here takes more than linear time, and unrecognised lines give
no result. Parsers of the `swebench` package are not so careful: they run in a process of their own.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Literal

from gangline.domain.errors import EvaluatorError
from gangline.evaluators.untrusted.isolated import ENVIRONMENT
from gangline.installation import package_command

__all__ = ["PARSERS", "Status", "last_exit_code", "read_log", "without_timing"]

Status = Literal["passed", "failed", "skipped"]
"""`passed`: also an expected failure. `failed`: also an error, and an unexpected success."""

_SWEBENCH_PREFIX = "parse_log_"
_WORDS: dict[str, Status] = {
    **dict.fromkeys(("PASSED", "XFAIL", "ok", "expected"), "passed"),
    **dict.fromkeys(("FAILED", "ERROR", "XPASS", "FAIL", "unexpected"), "failed"),
    **dict.fromkeys(("SKIPPED", "skipped"), "skipped"),
}
_PYTEST_SUMMARY = re.compile(r"(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED) (\S.*)")
_PYTEST_VERBOSE = re.compile(r"(\S+::.*) (PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED)(?: +\[ *\d+%\])?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TIMING = re.compile(r"(?:\[ ?\d{1,9}(?:\.\d{1,9})? ?m?s ?\]|\( ?\d{1,9}(?:\.\d{1,9})? ?m?s ?\))$", re.IGNORECASE)
_INLINE_TIMING = re.compile(r"\sin \d{1,9}(?:\.\d{1,9})? m?sec\b", re.IGNORECASE)
_R2E_SUMMARY = "short test summary info"
_R2E_WORDS = ("PASSED", "FAILED", "ERROR")
_UNITTEST_ENDS = ("ok", "FAIL", "ERROR", "expected failure", "unexpected success")

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


def _pytest_lines(text: str) -> Iterator[tuple[str, Status]]:
    for line in _COLOUR.sub("", text).splitlines():
        if found := _PYTEST_SUMMARY.fullmatch(line):
            # A reason may follow; and lists of expected tests are often cut off at the first blank.
            names = {found[2], found[2].split(" - ", 1)[0].rstrip(), found[2].split(" ", 1)[0]}
            for name in names | {_listed(name) for name in names}:
                yield name, _WORDS[found[1]]
        elif found := _PYTEST_VERBOSE.fullmatch(line.rstrip()):
            yield found[1], _WORDS[found[2]]


def _listed(name: str) -> str:
    """The name in SWE-bench's lists, which have only the end of a parameter that is a path, and matplotlib's buttons
    as numbers."""
    test, _bracket, rest = name.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3").partition("[")
    option, closing, _after = rest.rpartition("]")
    if closing and option.startswith("/") and not option.startswith("//") and "*" not in option:
        return f"{test}[/{option.rpartition('/')[2]}]"
    return f"{test}[{rest}" if rest else test


def _unittest_lines(text: str) -> Iterator[tuple[str, Status]]:
    for line in text.splitlines():
        name, dots, end = line.strip().rpartition(" ... ")
        if dots and (end in _UNITTEST_ENDS or end.startswith("skipped")):
            yield name, _WORDS[end.split(" ")[0]]


def _r2e_lines(text: str) -> Iterator[tuple[str, Status]]:
    """Pytest's summary in R2E-Gym's names: the parts behind the file, joined by dots."""
    for line in text.partition(_R2E_SUMMARY)[2].splitlines():
        if word := next((word for word in _R2E_WORDS if word in line), None):
            yield ".".join(line.split("::")[1:]).split(" - ")[0], _WORDS[word]


PARSERS: dict[str, Callable[[str], Iterator[tuple[str, Status]]]] = {
    "pytest": _pytest_lines,
    "unittest": _unittest_lines,
    "r2e": _r2e_lines,
}
"""Name -> reader of (test, status), in the order of the text."""


def without_timing(name: str) -> str:
    """A test's name without a duration that its runner wrote into it: `[1.3 ms]`, `(0.2s)`, `in 29 msec`."""
    return _INLINE_TIMING.sub("", _TIMING.sub("", name.strip())).strip()


def last_exit_code(text: str, name: str) -> int | None:
    """The code in the last line `NAME=CODE`; None without one."""
    found = re.findall(rf"^{re.escape(name)}=(\d{{1,3}})\s*$", text, re.MULTILINE)
    return int(found[-1]) if found else None


async def read_log(parser: str, text: str, *, timeout_s: float) -> dict[str, Status]:
    """Test -> status; where a test is reported more than once, the worst counts.

    Raises: EvaluatorError when the parser is not known or not installed, or not done in `timeout_s`.
    """
    if parser in PARSERS:
        lines = await asyncio.to_thread(list, PARSERS[parser](text))
    elif parser.startswith(_SWEBENCH_PREFIX):
        lines = await _swebench_lines(parser, text, timeout_s)
    else:
        raise EvaluatorError(
            f"no parser {parser!r}: known are {', '.join(PARSERS)}, and swebench's {_SWEBENCH_PREFIX}*"
        )
    worst: dict[str, Status] = {}
    for name, status in lines:
        if worst.get(name) != "failed" and not (status == "skipped" and name in worst):
            worst[name] = status
    return worst


async def _swebench_lines(parser: str, text: str, timeout_s: float) -> list[tuple[str, Status]]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", _CHILD),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=ENVIRONMENT,
    )
    try:
        async with asyncio.timeout(timeout_s):
            said, errors = await child.communicate(json.dumps({"parser": parser, "text": text}).encode())
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
    found: dict[str, str] = json.loads(said)
    return [(name, _WORDS.get(status, "failed")) for name, status in found.items()]
