"""Trials: sessions of a task with a scripted agent of harness `shell`, which never calls a model."""

from __future__ import annotations

import importlib.resources
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gangline.vetting.grading import clears
from gangline.vetting.subject import Solution, Subject

__all__ = ["REPORT", "Trial", "program", "scripted", "solving"]

REPORT = "gangline-vet:"
"""Begins each line that a trial's agent reports, on standard error: graders may read its standard output."""

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
    return Trial(name=name, body=_body(subject, ["sh", "-c", script], stdin=stdin))


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
    """A trial of the reference solution. after: shell code behind it, where `changed` lists the files that it wrote.

    evaluator, runtime: in place of the task's own.
    """
    if solution.kind == "answer":
        command = list(solution.command)
        body = _body(subject, command, stdin=solution.stdin)
    else:
        folders = " ".join(map(shlex.quote, _folders(subject)))
        script = f'{_BEGIN.replace("FOLDERS", folders)}{_given(solution)}"$@"{_END.replace("AFTER", after)}'
        command = ["sh", "-c", script, "sh", *solution.command]
        body = _body(subject, command, stdin=solution.stdin, env=solution.env)
    if evaluator is not None:
        body["evaluator"] = dict(evaluator)
    given = {**(subject.runtime if runtime is None else runtime)}
    if solution.prepare:
        given["prepare"] = [*(given.get("prepare") or []), *solution.prepare]
    return Trial(name=name, body={**body, "runtime": given}, num_samples=num_samples)


def _given(solution: Solution) -> str:
    """Shell code that writes a solution's files: after the mark, so that they count as changed.

    They come on standard input, as a command line has no room for large ones.
    """
    lines = [
        f'mkdir -p "$(dirname {path})" && IFS= read -r data && printf %s "$data" | base64 -d > {path} || exit 70'
        for path in map(shlex.quote, solution.files)
    ]
    return "\n".join([*lines, ""])


def _body(
    subject: Subject,
    command: Sequence[str],
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    settings: dict[str, Any] = {"command": list(command)}
    if stdin is not None:
        settings["stdin"] = stdin
    agent = {"harness": "shell", "settings": settings, "env": dict(env or {}), "allow_no_model_call": True}
    # A broken grader or preparation is a finding: the service need not try it again.
    return {**subject.base, "agent": agent, "max_attempts": 1}


def _folders(subject: Subject) -> list[str]:
    """The session's own folders beside the working folder, where results may be."""
    left_out = clears(subject.evaluator)
    return [path for path in subject.runtime.get("folders") or () if path not in left_out]


def program(name: str) -> str:
    """Source of a program of `inside`."""
    return importlib.resources.files("gangline.vetting.inside").joinpath(f"{name}.py").read_text()
