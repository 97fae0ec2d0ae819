"""Trials: sessions of a task with a scripted agent of harness `shell`, which never calls a model."""

from __future__ import annotations

import importlib.resources
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gangline.tasks.vetting.grading import clears
from gangline.tasks.vetting.subject import Solution, Subject, subject_of

REPORT = "gangline-vet:"
"""Prefix of the lines that a trial's agent reports on standard error: graders may read its standard output."""

_BEGIN = """
V=$(mktemp -d) || exit 70
touch "$V/begun"; sleep 0.02
changed() {
  find . FOLDERS \\( -name .git -o -name .gangline -o -name __pycache__ \\) -prune \
    -o -type f -cnewer "$V/begun" -print 2>/dev/null | head -n 200
}
"""
_END = """
code=$?
AFTER
rm -rf "$V"
exit $code
"""
_LIST = f"""
changed | while IFS= read -r path; do
  printf '%s\\n' "{REPORT} changed $path" >&2
  [ "$(wc -c < "$path")" -lt 4096 ] && printf '%s\\n' "{REPORT} content $(base64 < "$path" | tr -d '\\n') $path" >&2
done
"""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of session."""

    name: str
    """`CHECK` or `CHECK.DETAIL`."""
    body: dict[str, Any]
    """Body of `POST /v1/tasks`, without id and number of samples."""
    num_samples: int = 1


def scripted(subject: Subject, name: str, script: str, *, stdin: str | None = None) -> Trial:
    """A trial whose agent is a shell script."""
    return Trial(name=name, body=_body(subject, _settings(["sh", "-c", script], stdin)))


def solving(
    subject: Subject,
    solution: Solution,
    name: str,
    *,
    after: str = _LIST,
    num_samples: int = 1,
    evaluator: Mapping[str, Any] | None = None,
    runtime: Mapping[str, Any] | None = None,
) -> Trial:
    """A trial of the reference solution. after: shell code that runs after it, with the written files listed in
    `changed`.

    evaluator, runtime: replace the task's own.
    """
    body = _body(
        subject,
        _doing(subject, solution, after),
        prepare=solution.prepare,
        evaluator=evaluator,
        runtime=runtime,
    )
    return Trial(name=name, body=body, num_samples=num_samples)


def solved_task(name: str, task: Mapping[str, Any]) -> dict[str, Any] | None:
    """The task's fields with its reference solution as the agent; None if a solution is missing."""
    return _solved(subject_of(name, task))


def _solved(subject: Subject) -> dict[str, Any] | None:
    if not subject.steps:
        if subject.solution is None:
            return None
        body = _body(subject, _doing(subject, subject.solution, ""), prepare=subject.solution.prepare)
        return {name: body[name] for name in ("agent", "runtime", "evaluator")}
    steps: list[dict[str, Any]] = []
    for step in subject.steps:
        if step.solution is None or step.step is None:
            return None
        steps.append(_step(step.step, _doing(step, step.solution, ""), step.solution.prepare))
    return {"agent": _agent({"command": ["true"]}), "steps": steps}


def _doing(subject: Subject, solution: Solution, after: str) -> dict[str, Any]:
    """Settings of an agent that runs the solution."""
    if solution.kind == "answer":
        return _settings(solution.command, solution.stdin)
    folders = " ".join(map(shlex.quote, _folders(subject)))
    script = f'{_BEGIN.replace("FOLDERS", folders)}{_given(solution)}"$@"{_END.replace("AFTER", after)}'
    return _settings(["sh", "-c", script, "sh", *solution.command], solution.stdin)


def _given(solution: Solution) -> str:
    """Shell code that writes a solution's files: after the mark, so that they count as changed.

    They are passed on standard input, because a command line has no room for large ones.
    """
    lines = [
        f'mkdir -p "$(dirname {path})" && IFS= read -r data && printf %s "$data" | base64 -d > {path} || exit 70'
        for path in map(shlex.quote, solution.files)
    ]
    return "\n".join([*lines, ""])


def _body(
    subject: Subject,
    settings: Mapping[str, Any],
    *,
    prepare: Sequence[Mapping[str, Any]] = (),
    evaluator: Mapping[str, Any] | None = None,
    runtime: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    # A broken grader or preparation is a finding: the service need not retry it.
    place = subject.runtime if runtime is None else runtime
    body: dict[str, Any] = {**subject.base, "max_attempts": 1, "runtime": place}
    given = subject.evaluator if evaluator is None else evaluator
    if subject.step is None:
        body |= {"agent": _agent(settings), "evaluator": given}
        return body | {"runtime": _prepared(place, prepare)} if prepare else body
    # Later steps are removed, and earlier ones may not end the session: its reward is this step's.
    earlier = [
        _step({**step, "min_reward": None}, _doing(subject, one, ""), one.prepare) for step, one in subject.before
    ]
    this = _step({**subject.step, "evaluator": given}, settings, prepare)
    return {**body, "agent": _agent({"command": ["true"]}), "steps": [*earlier, this], "step_reward": "final"}


def _agent(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"harness": "shell", "settings": dict(settings), "allow_no_model_call": True}


def _settings(command: Sequence[str], stdin: str | None) -> dict[str, Any]:
    return {"command": list(command)} | ({} if stdin is None else {"stdin": stdin})


def _step(step: Mapping[str, Any], settings: Mapping[str, Any], prepare: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return _prepared({**step, "settings": dict(settings)}, prepare)


def _prepared(fields: Mapping[str, Any], more: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {**fields, "prepare": [*(fields.get("prepare") or ()), *more]}


def _folders(subject: Subject) -> list[str]:
    """The session's folders outside the working folder that may contain results."""
    left_out = clears(subject.evaluator)
    return [path for path in subject.runtime.get("folders") or () if path not in left_out]


def program(name: str) -> str:
    """Source of a program of `in_sandbox`."""
    return importlib.resources.files("gangline.tasks.vetting.in_sandbox").joinpath(f"{name}.py").read_text()
