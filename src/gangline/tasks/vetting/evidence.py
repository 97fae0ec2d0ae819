"""Evidence of an audit: each session of a trial, reduced to the fields that checks and reports need."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from gangline.domain.session import SessionResult
from gangline.tasks.vetting.trials import REPORT

_OURS = frozenset({"engine", "node", "store", "caller", "builder"})
"""Boundaries of failures that are not the task's fault."""
_RUNTIME_FAULTS_OF_TASKS = frozenset({"prepare_failed"})
_SHOWN_CHARS = 1_000
_MOST_RESULTS = 20


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One session of a trial."""

    trial: str
    session_id: str
    outcome: str
    reward: float | None
    boundary: str | None = None
    code: str | None = None
    message: str = ""
    run_s: float = 0.0
    """Seconds that the agent ran."""
    grading_s: float = 0.0
    output: str = ""
    """End of the grader's output."""
    changed: tuple[str, ...] = ()
    """Files that the agent reports to have written."""
    num_mutated: int = 0
    reports: str = ""
    """Lines reported by the trial's agent; not stored."""

    @property
    def is_ours(self) -> bool:
        """Whether the service failed, so that the session is not informative about the task."""
        if self.outcome == "cancelled":
            return True
        if self.boundary == "runtime":
            return self.code not in _RUNTIME_FAULTS_OF_TASKS
        return self.outcome == "infra_error" and self.boundary in _OURS

    @property
    def results(self) -> dict[str, str]:
        """The short texts among the files that it wrote."""
        pairs = re.findall(rf"^{REPORT} content (\S+) (.+)$", self.reports, re.MULTILINE)
        return {path: base64.b64decode(data).decode(errors="replace") for data, path in pairs[:_MOST_RESULTS]}

    def described(self) -> str:
        if self.reward is not None:
            return f"reward {self.reward:g}"
        return f"no reward ({self.outcome}{f': {self.message}' if self.message else ''})"


def evidence_of(trial: str, sessions: Sequence[SessionResult]) -> list[Evidence]:
    return [_evidence(trial, session) for session in sessions]


def _evidence(trial: str, result: SessionResult) -> Evidence:
    stderr = result.artifacts.get("harness.stderr", b"").decode(errors="replace")
    reports = [line for line in stderr.splitlines() if line.startswith(REPORT)]
    times = {timing.stage: timing.ended_at - timing.started_at for timing in result.timings}
    failure = result.failure
    return Evidence(
        trial=trial,
        session_id=result.session_id,
        outcome=str(result.outcome),
        reward=result.reward,
        boundary=None if failure is None else failure.boundary,
        code=None if failure is None else failure.code,
        message="" if failure is None else failure.message[:_SHOWN_CHARS],
        run_s=times.get("run", 0.0),
        grading_s=times.get("postrun", 0.0),
        output=_output(result.reward_details)[-_SHOWN_CHARS:],
        changed=tuple(match[1] for line in reports if (match := re.match(rf"{REPORT} changed (.+)", line))),
        num_mutated=sum(line.startswith(f"{REPORT} mutated") for line in reports),
        reports="\n".join(reports),
    )


def _output(details: Any) -> str:
    """The grader's output, also inside a combining evaluator; for a task with steps, the last step's."""
    if isinstance(details, dict):
        if "step_reward" in details and details.get("steps"):  # pyright: ignore[reportUnknownMemberType]
            return _output(details["steps"][-1])  # pyright: ignore[reportUnknownArgumentType]
        own: Any = details.get("output")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if isinstance(own, str):
            return own
        return "\n".join(filter(None, map(_output, details.values())))  # pyright: ignore[reportUnknownArgumentType]
    return ""
