"""A task under audit: its content without an agent, and its reference solution."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.domain.task import TaskRequest, WriteAction, vetted_digest
from gangline.vetting.grading import answered_on_stdout

__all__ = ["Solution", "Subject", "subject_of"]

_CONTENT = (
    "instruction",
    "runtime",
    "evaluator",
    "timeout_seconds",
    "init_timeout_seconds",
    "evaluation_timeout_seconds",
    "metadata",
)
_APPLY = "base64 -d | git apply --whitespace=nowarn -"
SolutionKind = Literal["answer", "files", "patch", "command"]


class Solution(msgspec.Struct, frozen=True, kw_only=True):
    """A reference solution as an agent of harness `shell`."""

    kind: SolutionKind
    command: tuple[str, ...]
    stdin: str | None = None
    files: tuple[str, ...] = ()
    """Paths of files that are written first; their contents are lines of base 64 on standard input."""
    env: dict[str, str] = {}
    prepare: tuple[dict[str, Any], ...] = ()
    """Actions beside the task's own, such as those that bring the files of a solution."""
    texts: dict[str, str] = {}
    """Name -> text that no agent may find: the solution itself."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """One task under audit."""

    name: str
    task: dict[str, Any]
    """As it was given; the verdict is stored with it."""
    base: dict[str, Any]
    """Its content: the body of a trial, but for the agent."""
    digest: str
    solution: Solution | None
    top: float = 1.0
    floor: float = 0.0

    @property
    def instruction(self) -> str:
        return str(self.base["instruction"])

    @property
    def runtime(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self.base.get("runtime") or {})

    @property
    def evaluator(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self.base.get("evaluator") or {})


def subject_of(name: str, task: Mapping[str, Any]) -> Subject:
    """task: a valid body of `POST /v1/tasks`.

    An evaluator that reads the model's last message reads standard output instead: no trial calls a model.
    Raises: InvalidRequest for a task with steps.
    """
    request = TaskRequest.model_validate(task)
    if request.steps:
        raise InvalidRequest(f"{name}: has steps; only tasks with one run can be vetted, or solved by a solution.")
    base = {name: value for name, value in task.items() if name in _CONTENT}
    base["evaluator"] = answered_on_stdout(cast("dict[str, Any]", base.get("evaluator") or {}))
    given = request.solution
    return Subject(
        name=name,
        task=dict(task),
        base=base,
        digest=vetted_digest(request),
        solution=_solution(request),
        top=1.0 if given is None else given.reward,
        floor=0.0 if given is None else given.floor,
    )


def _solution(request: TaskRequest) -> Solution | None:
    given = request.solution
    if given is None:
        return None
    if given.answer is not None:
        # Base 64, as harness `shell` replaces placeholders in its texts.
        return Solution(
            kind="answer", command=("base64", "-d"), stdin=_base64(given.answer), texts={"answer": given.answer}
        )
    if given.patch is not None:
        texts = {"patch": _added(given.patch)}
        return Solution(kind="patch", command=("sh", "-c", _APPLY), stdin=_base64(given.patch), texts=texts)
    if given.files:
        stdin = "".join(f"{_base64(text)}\n" for text in given.files.values())
        texts = dict(given.files)
        return Solution(kind="files", command=("true",), files=tuple(texts), stdin=stdin, texts=texts)
    assert given.command is not None
    command = ("sh", "-c", given.command) if isinstance(given.command, str) else given.command
    written = [one for one in given.prepare if isinstance(one, WriteAction) and one.encoding == "utf-8"]
    return Solution(
        kind="command",
        command=command,
        env=given.env,
        prepare=tuple(one.model_dump(mode="json") for one in given.prepare),
        texts={"command": "\n".join(command)} | {one.path: one.content for one in written},
    )


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _added(patch: str) -> str:
    """The lines that a patch adds."""
    lines = patch.splitlines()
    return "\n".join(line[1:] for line in lines if line.startswith("+") and not line.startswith("+++"))
