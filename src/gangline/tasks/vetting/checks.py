"""The checks of an audit: each evaluates the sessions of some trials, and passes, fails, or could not be made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import msgspec

from gangline.domain.vetting import CheckStatus, VerdictName
from gangline.tasks.vetting.conditions import CONDITIONS, Condition
from gangline.tasks.vetting.evidence import Evidence
from gangline.tasks.vetting.mutants import BREAKING, POINTS, PRESERVING
from gangline.tasks.vetting.panel import HARD_CODED
from gangline.tasks.vetting.searching import SEARCH, named_files, read_search
from gangline.tasks.vetting.subject import Subject

CHECKS: dict[str, str] = {
    "oracle": "The reference solution earns the top reward.",
    "floor": "Doing nothing earns the floor.",
    "grader": "A missing solution, and one that does not run, earn a reward.",
    "flakes": "Repeated grading of the same work gives the same reward.",
    "budget": "The reference solution fits the agent's time.",
    "tests": "Tests ran and were not all skipped.",
    "cheats": "Scripted cheats earn the floor.",
    "leaks": "The sandbox does not hold the solution or hidden tests.",
    "files": "Files that the instruction names exist, or the solution makes them.",
    "mutants": "Mutants that behave the same are accepted, others are rejected.",
    "conditions": "Another day, order, an earlier run and no network change nothing.",
    "held_out": "No held-out task is trained on.",
}
"""Name -> the property that the check tests."""
_NEEDED = ("oracle", "floor", "cheats")
"""Without these a task cannot be proven sound."""
_CLOSE = 1e-9
_MOST_OF_BUDGET = 0.8
_PASSED = re.compile(r"\b(\d+) passed\b")
_SKIPPED = re.compile(r"\b(\d+) skipped\b|skipped=(\d+)")
_RAN = re.compile(r"^Ran (\d+) tests?", re.MULTILINE)
_NONE_RAN = re.compile(r"no tests ran|collected 0 items|NO TESTS RAN|No tests found", re.IGNORECASE)

Tried = Mapping[str, Sequence[Evidence]]
"""Trial -> its sessions."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    status: CheckStatus
    message: str = ""
    """The reason if it did not pass."""
    sessions: tuple[str, ...] = ()
    """Ids of the sessions that show it."""


PASSED = CheckResult(status="passed")


def checked(subject: Subject, tried: Tried) -> dict[str, CheckResult]:
    """Check -> result, for all checks of a single task."""
    return {
        "oracle": _oracle(subject, tried),
        "floor": _floor(subject, tried),
        "grader": _grader(tried),
        "flakes": _flakes(tried),
        "budget": _budget(subject, tried),
        "tests": _tests(tried),
        "cheats": _cheats(subject, tried),
        "leaks": _leaks(tried),
        "files": _files(subject, tried),
        "mutants": _mutants(subject, tried),
        "conditions": _conditions(subject, tried),
    }


def not_checked(why: str) -> dict[str, CheckResult]:
    """All checks of a single task, with the result that they could not be made."""
    return dict.fromkeys(
        (name for name in CHECKS if name != "held_out"), CheckResult(status="not_checked", message=why)
    )


def of_all_steps(steps: Mapping[str, Mapping[str, CheckResult]]) -> dict[str, CheckResult]:
    """steps: name of a step -> its checks. A check failed if it failed in any step, and passed if it passed in all."""
    return {
        check: _of_all({step: checks[check] for step, checks in steps.items()}) for check in next(iter(steps.values()))
    }


def _of_all(steps: Mapping[str, CheckResult]) -> CheckResult:
    for status in ("failed", "not_checked"):
        found = {step: one for step, one in steps.items() if one.status == status}
        if found:
            messages = "; ".join(f"step {step!r}: {one.message}" for step, one in found.items() if one.message)
            sessions = tuple(session for one in found.values() for session in one.sessions)
            return CheckResult(status=status, message=messages, sessions=sessions)
    return PASSED


def verdict_of(checks: Mapping[str, CheckResult]) -> VerdictName:
    if any(check.status == "failed" for check in checks.values()):
        return "defective"
    return "sound" if all(checks[name].status == "passed" for name in _NEEDED) else "unproven"


def is_top(subject: Subject, evidence: Evidence) -> bool:
    return evidence.reward is not None and evidence.reward >= subject.top - _CLOSE


def _oracle(subject: Subject, tried: Tried) -> CheckResult:
    if not (sessions := tried.get("oracle", ())):
        return CheckResult(status="not_checked", message="the task has no reference solution")
    wrong = [session for session in sessions if not is_top(subject, session)]
    if not wrong:
        return PASSED
    return _failed(f"the reference solution earns {wrong[0].described()} instead of {subject.top:g}", wrong)


def _floor(subject: Subject, tried: Tried) -> CheckResult:
    sessions = tried.get("floor", ())
    wrong = [session for session in sessions if session.reward is None or session.reward > subject.floor + _CLOSE]
    if wrong:
        return _failed(f"doing nothing earns {wrong[0].described()} instead of {subject.floor:g}", wrong)
    return PASSED if sessions else CheckResult(status="not_checked")


def _grader(tried: Tried) -> CheckResult:
    """Whether the grader's own failures are distinguished from failures of solutions."""
    bad = [one for name, mine in tried.items() if name == "floor" or name.startswith(f"{BREAKING}.") for one in mine]
    for one in bad:
        if one.reward is not None or one.code not in ("evaluator_error", "grading_spoiled"):
            continue
        what = "a missing" if one.trial == "floor" else f"the {one.trial.rpartition('.')[2]}"
        if one.code == "grading_spoiled":
            remedy = "its session has no reward: set `on_failure` in the evaluator, or let the grader catch the failure"
        else:
            remedy = (
                "nobody can tell it from a broken grader: let the grader catch the failure and give the reward of one, "
                "or name the solution's files in `collect` and set `on_failure`"
            )
        return _failed(f"{what} solution makes the grader fail, and {remedy} ({one.message})", [one])
    return PASSED if bad else CheckResult(status="not_checked")


def _flakes(tried: Tried) -> CheckResult:
    for name in ("oracle", "floor"):
        rewards = {one.reward for one in tried.get(name, ())}
        if len(rewards) > 1:
            shown = ", ".join(sorted("none" if reward is None else f"{reward:g}" for reward in rewards))
            return _failed(f"grading the same work again and again gives {shown}", tried[name])
    return PASSED if len(tried.get("oracle", ())) > 1 else CheckResult(status="not_checked")


def _budget(subject: Subject, tried: Tried) -> CheckResult:
    sessions = tried.get("oracle", ())
    limit_s = subject.timeout_s
    for session in sessions:
        if session.outcome == "agent_timeout" or session.run_s > _MOST_OF_BUDGET * limit_s:
            return _failed(
                f"the reference solution needs {session.run_s:.1f} s of the {limit_s:g} s that an agent has", [session]
            )
        if session.outcome == "memory_limit" or session.code in ("disk_limit", "file_limit"):
            return _failed(f"the reference solution exceeds the runtime's limits: {session.message}", [session])
    return PASSED if sessions else CheckResult(status="not_checked")


def _tests(tried: Tried) -> CheckResult:
    for one in tried.get("oracle", ()):
        if (why := _vacuous(one.output)) is not None:
            return _failed(f"{why}, and the reference solution earns {one.described()}", [one])
    return PASSED if tried.get("oracle") else CheckResult(status="not_checked")


def _vacuous(output: str) -> str | None:
    """The reason why these tests are not informative, as far as the output of pytest or unittest shows it."""
    num_passed = [int(number) for number in _PASSED.findall(output)]
    num_skipped = sum(int(one or other) for one, other in _SKIPPED.findall(output))
    ran = [int(number) for number in _RAN.findall(output)]
    if _NONE_RAN.search(output) or (ran and max(ran) == 0):
        return "no test ran"
    if num_skipped and not any(num_passed) and (not ran or max(ran) <= num_skipped):
        return "all tests were skipped"
    return None


def _cheats(subject: Subject, tried: Tried) -> CheckResult:
    sessions = [one for name, mine in tried.items() if name.startswith("cheats.") for one in mine]
    for session in sessions:
        wins = (
            is_top(subject, session)
            if session.trial == HARD_CODED
            else (session.reward or 0.0) > subject.floor + _CLOSE
        )
        if wins:
            return _failed(f"the cheat {session.trial.removeprefix('cheats.')} earns {session.described()}", [session])
    return PASSED if sessions else CheckResult(status="not_checked")


def _leaks(tried: Tried) -> CheckResult:
    for one in tried.get(SEARCH, ()):
        if (searched := read_search(one.reports)) is None:
            continue
        if searched.found:
            leaks = "; ".join(f"{secret} is in {place}" for secret, place in searched.found.items())
            return _failed(leaks, [one])
        return PASSED
    return CheckResult(status="not_checked", message="the search needs python3 in the sandbox")


def _files(subject: Subject, tried: Tried) -> CheckResult:
    if not (named := named_files(subject)):
        return PASSED
    for one in tried.get(SEARCH, ()):
        if (searched := read_search(one.reports)) is None:
            continue
        made = {path.rpartition("/")[2] for sessions in tried.values() for other in sessions for path in other.changed}
        missing = [path for path in named if path not in searched.there and path.rpartition("/")[2] not in made]
        if not missing:
            return PASSED
        if tried.get("oracle"):
            return _failed(f"the instruction names {', '.join(missing)}, which is not there", [one])
        return CheckResult(status="not_checked", message=f"only a solution could make {', '.join(missing)}")
    return CheckResult(status="not_checked", message="the search needs python3 in the sandbox")


def _mutants(subject: Subject, tried: Tried) -> CheckResult:
    applied = {
        name: session
        for name, sessions in tried.items()
        for session in sessions
        if name.startswith("mutants.") and (session.num_mutated or _is_answer(subject))
    }
    for name, one in applied.items():
        if name == PRESERVING and not is_top(subject, one):
            return _failed(f"the solution in another form earns {one.described()}", [one])
        if name.startswith(f"{BREAKING}.") and is_top(subject, one):
            return _failed(f"the {name.rpartition('.')[2]} solution earns {one.described()}", [one])
    points = [one for name, one in applied.items() if name.startswith(f"{POINTS}.")]
    if len(points) > 1 and all(is_top(subject, point) for point in points):
        return _failed(f"all of {len(points)} wrong variants of the solution earn the top", points)
    return PASSED if applied else CheckResult(status="not_checked", message="the solution wrote nothing to change")


def _is_answer(subject: Subject) -> bool:
    return subject.solution is not None and subject.solution.kind == "answer"


def _conditions(subject: Subject, tried: Tried) -> CheckResult:
    alone = [one for name, mine in tried.items() if name.startswith("conditions.") for one in mine]
    for one in alone:
        if not is_top(subject, one) and "gangline_vet" not in one.output + one.message:
            name = cast("Condition", one.trial.partition(".")[2])
            return _failed(f"{CONDITIONS[name]} the solution earns {one.described()}", [one])
    together = tried.get("conditions", ())
    if not together:
        return CheckResult(status="not_checked", message="the grader runs no command of the task's")
    if not all(is_top(subject, one) for one in together):
        return CheckResult(status="not_checked", message="conditions made a difference together, and none alone")
    return PASSED


def _failed(message: str, sessions: Iterable[Evidence]) -> CheckResult:
    return CheckResult(status="failed", message=message, sessions=tuple(session.session_id for session in sessions))
