"""The verdict of evaluator `swe_bench` on the log of its tests.

Of an unlimited log only the head and the tail are kept. A result missing there is not the agent's failure: if the
verdict depends on it, there is no reward. The same holds for a log that counts its tests without naming them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from gangline.agents.tools.bounding import head_and_tail
from gangline.agents.tools.in_sandbox.output import Output
from gangline.domain.contracts import Reward
from gangline.domain.errors import EvaluatorError
from gangline.domain.sandbox import ExecResult, in_binary_units
from gangline.grading.untrusted.outcomes import Status, TestLog
from gangline.grading.untrusted.test_logs import PARSERS, last_exit_code, read_log, without_timing

MAX_SHOWN_TESTS = 20
_PARSE_TIMEOUT_S = 60.0
_MAX_SHOWN_BYTES = 4_000
_START, _END = ">>>>> Start Test Output", ">>>>> End Test Output"
"""Marks that a dataset's own script prints around the output for its parser."""
_EXIT_LINE = "GANGLINE_TESTS_EXIT"


class Criteria(Protocol):
    """The part of the configuration that determines the verdict."""

    @property
    def fail_to_pass(self) -> tuple[str, ...]: ...
    @property
    def pass_to_pass(self) -> tuple[str, ...]: ...
    @property
    def expected_statuses(self) -> dict[str, Status]: ...
    @property
    def exit_code_line(self) -> str | None: ...
    @property
    def ignore_timings(self) -> bool: ...
    @property
    def eval_script(self) -> str | None: ...
    @property
    def log_parser(self) -> str: ...
    @property
    def timeout_seconds(self) -> float: ...


class KeptLog(NamedTuple):
    """The tests' output: the whole, or its head and tail."""

    text: str
    tail: str
    """The part after the omission; the whole log if nothing was omitted."""
    num_left_out: int = 0
    """In bytes."""

    def between_marks(self) -> KeptLog:
        if _START not in self.text:
            return self
        text = self.text.split(_START, 1)[1].split(_END, 1)[0]
        return self._replace(text=text, tail=self.tail.split(_START, 1)[-1].split(_END, 1)[0])


def kept(output: Output) -> KeptLog:
    """Drops the truncated lines, because half a line could name another test."""
    head, tail = bytes(output.head), bytes(output.tail)
    if not output.num_omitted:
        whole = (head + tail).decode(errors="replace")
        return KeptLog(whole, whole)
    front, back = head.rpartition(b"\n")[0], tail.partition(b"\n")[2]
    num_left_out = output.num_omitted + len(head) + len(tail) - len(front) - len(back)
    last = back.decode(errors="replace")
    return KeptLog(f"{front.decode(errors='replace')}\n[{num_left_out} bytes left out]\n{last}", last, num_left_out)


def with_exit_line(script: str) -> str:
    """A dataset's script that also prints the exit code of its tests, since its own is the exit code of its last
    command.
    """
    lines = script.splitlines(keepends=True)
    at = next((at for at, line in enumerate(lines) if _END in line), None)
    if at is None:
        return script
    tell = f"printf '\\n{_EXIT_LINE}=%s\\n' \"${_EXIT_LINE}\"\n"
    return "".join([*lines[:at], f"{_EXIT_LINE}=$?\n", lines[at].rstrip("\n") + "\n", tell, *lines[at + 1 :]])


async def verdict(criteria: Criteria, tests: ExecResult, whole: KeptLog, details: dict[str, Any]) -> Reward:
    """tests: the result of their command.

    Raises: EvaluatorError if the log cannot be read, or lacks results needed for the verdict.
    """
    script, has_failed = criteria.eval_script, not tests.ok
    log = whole if script is None else whole.between_marks()
    details["output"] = head_and_tail(log.text.strip(), _MAX_SHOWN_BYTES)
    if tests.timed_out:
        return unresolved(f"the tests were not done in {criteria.timeout_seconds:g} s", details)
    if criteria.exit_code_line is not None:
        return _by_exit_code(last_exit_code(whole.text, criteria.exit_code_line), details)
    if script is not None:
        code = last_exit_code(whole.text, _EXIT_LINE)
        if code is None and _EXIT_LINE in with_exit_line(script):
            return unresolved("the tests' script did not reach its end", details)
        has_failed = code not in (None, 0)
    read = await read_log(criteria.log_parser, log.text, timeout_s=_PARSE_TIMEOUT_S)
    if criteria.expected_statuses:
        _refuse_a_cut_summary(criteria, log)
        return _by_statuses(criteria.expected_statuses, read.statuses, details)
    return _by_lists(criteria, log, read, has_failed, details)


def _by_lists(criteria: Criteria, log: KeptLog, read: TestLog, has_failed: bool, details: dict[str, Any]) -> Reward:
    fail_to_pass, pass_to_pass = criteria.fail_to_pass, criteria.pass_to_pass
    if criteria.ignore_timings:
        read = read.renamed(without_timing)
        fail_to_pass, pass_to_pass = tuple(map(without_timing, fail_to_pass)), tuple(map(without_timing, pass_to_pass))
    found = {name: read.status_of(name) for name in (*fail_to_pass, *pass_to_pass)}
    failing = [name for name in fail_to_pass if found[name] != "passed"]
    broken = [name for name in pass_to_pass if found[name] not in ("passed", "skipped")]
    details |= {
        "fail_to_pass": f"{len(fail_to_pass) - len(failing)}/{len(fail_to_pass)}",
        "pass_to_pass": f"{len(pass_to_pass) - len(broken)}/{len(pass_to_pass)}",
        "failing": [*failing, *broken][:MAX_SHOWN_TESTS],
    }
    bad = [*failing, *broken]
    if all(found[name] is None for name in bad):
        _refuse_missing_results(criteria, log, read, bad)
    if bad:
        return unresolved("tests fail", details)
    if has_failed and not read.has("failed"):  # a patch can print fake results
        return unresolved("the tests' command failed while its log tells of no failure", details)
    return resolved(details)


def _refuse_missing_results(criteria: Criteria, log: KeptLog, read: TestLog, missing: list[str]) -> None:
    """missing: tests without a result, if no other test decides. Raises: EvaluatorError unless it is the agent's
    failure.
    """
    if missing and log.num_left_out:
        raise EvaluatorError(
            f"the tests' log is too long: {in_binary_units(log.num_left_out)} in its middle were left out, and the "
            f"rest has no result of {len(missing)} tests, such as {missing[0]}. Let the tests print less."
        )
    _refuse_a_cut_summary(criteria, log)
    parser = PARSERS.get(criteria.log_parser)
    if missing and parser is not None and not read.has("passed") and parser.has_unnamed_tests(log.text):
        raise EvaluatorError(
            f"the tests' log says that tests ran, but not which, so that {missing[0]} cannot be found in it. Run the "
            "tests with -v (pytest: also -rA)."
        )


def _refuse_a_cut_summary(criteria: Criteria, log: KeptLog) -> None:
    """Raises: EvaluatorError if failures may have been in the omitted part."""
    parser = PARSERS.get(criteria.log_parser)
    if log.num_left_out and not (parser is not None and parser.has_summary(log.tail)):
        raise EvaluatorError(
            f"the tests' log is too long: {in_binary_units(log.num_left_out)} in its middle were left out, and what "
            "follows has no whole summary of the tests. Let the tests print less."
        )


def _by_exit_code(code: int | None, details: dict[str, Any]) -> Reward:
    if code is None:
        return unresolved("the tests' script did not reach its exit code", details)
    return resolved(details) if code == 0 else unresolved(f"the tests' exit code is {code}", details)


def _by_statuses(expected: dict[str, Status], statuses: dict[str, Status], details: dict[str, Any]) -> Reward:
    names = {name for name in expected.keys() | statuses.keys() if name}
    other = sorted(name for name in names if expected.get(name) != statuses.get(name))
    details |= {"expected_statuses": f"{len(names) - len(other)}/{len(names)}", "failing": other[:MAX_SHOWN_TESTS]}
    return unresolved("tests have other statuses than expected", details) if other else resolved(details)


def resolved(details: dict[str, Any]) -> Reward:
    return Reward(reward=1.0, details={"resolved": True, **details})


def unresolved(why: str, details: dict[str, Any] | None = None) -> Reward:
    return Reward(reward=0.0, details={"resolved": False, "why": why, **(details or {})})
