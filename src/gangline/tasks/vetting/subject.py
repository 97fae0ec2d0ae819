"""A task under audit: its content without an agent, and its reference solution.

Each step of a task with steps is audited separately, after the reference solutions of the steps before it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import msgspec

from gangline.domain.task import SolutionSpec, TaskRequest, WriteAction, vetted_digest
from gangline.grading.untrusted.patch_text import completed
from gangline.tasks.vetting.grading import answered_on_stdout

_CONTENT = (
    "instruction",
    "runtime",
    "evaluator",
    "steps",
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
    """Includes the solution's environment, because steps share the agent's."""
    stdin: str | None = None
    files: tuple[str, ...] = ()
    """Paths of files to write first; their contents are lines of base 64 on standard input."""
    prepare: tuple[dict[str, Any], ...] = ()
    """Actions in addition to the task's own, such as uploads of a solution's files."""
    texts: dict[str, str] = {}
    """Name -> text that no agent may find: the solution itself."""


Earlier = tuple[dict[str, Any], Solution]
"""A step as given in its task, and its solution."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """One task under audit, or one step of a task."""

    name: str
    task: dict[str, Any]
    """As given; the verdict is stored with it."""
    base: dict[str, Any]
    """Its content: the body of a trial without the agent. Its steps do not contain their solutions."""
    digest: str
    solution: Solution | None
    top: float = 1.0
    floor: float = 0.0
    steps: tuple[Subject, ...] = ()
    """The steps, if any; the task is then only audited through them."""
    step: dict[str, Any] | None = None
    """The task's step that this is."""
    before: tuple[Earlier, ...] = ()
    """The steps before this one."""
    blocked: str = ""
    """Why this step cannot be audited."""

    @property
    def instruction(self) -> str:
        return str((self.step or self.base)["instruction"])

    @property
    def evaluator(self) -> dict[str, Any]:
        return cast("dict[str, Any]", (self.step or self.base).get("evaluator") or {})

    @property
    def timeout_s(self) -> float:
        """The agent's time limit in seconds."""
        own = None if self.step is None else self.step.get("timeout_seconds")
        return float(own or self.base.get("timeout_seconds", 1200))

    @property
    def shown(self) -> str:
        """Text that an agent may know: its instruction, and the solutions of earlier steps."""
        return "\n".join([self.instruction, *(text for _, one in self.before for text in one.texts.values())])

    @property
    def runtime(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self.base.get("runtime") or {})


def subject_of(name: str, task: Mapping[str, Any]) -> Subject:
    """task: a valid body of `POST /v1/tasks`.

    An evaluator that reads the model's last message is changed to read standard output: trials never call a model.
    """
    request = TaskRequest.model_validate(task)
    base = {name: value for name, value in task.items() if name in _CONTENT}
    if request.steps:
        base["steps"] = [_on_stdout(_without(step, "solution")) for step in base["steps"]]
    else:
        base = _on_stdout(base)
    whole = Subject(
        name=name,
        task=dict(task),
        base=base,
        digest=vetted_digest(request),
        solution=_solution(request.solution),
        top=_top(request.solution),
        floor=_floor(request.solution),
    )
    return msgspec.structs.replace(whole, steps=tuple(_steps(whole, request)))


def _steps(whole: Subject, request: TaskRequest) -> Iterator[Subject]:
    before: list[Earlier] = []
    blocked = ""
    for step, given in zip(request.steps, whole.base.get("steps", ()), strict=True):
        solution = _solution(step.solution)
        yield msgspec.structs.replace(
            whole,
            solution=solution,
            top=_top(step.solution),
            floor=_floor(step.solution),
            step=given,
            before=tuple(before),
            blocked=blocked,
        )
        if solution is None:
            blocked = blocked or f"step {step.name!r} before it has no reference solution"
        else:
            before.append((given, solution))


def _without(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {one: value for one, value in fields.items() if one != name}


def _on_stdout(run: Mapping[str, Any]) -> dict[str, Any]:
    """run: a task or a step."""
    return {**run, "evaluator": answered_on_stdout(cast("dict[str, Any]", run.get("evaluator") or {}))}


def _top(solution: SolutionSpec | None) -> float:
    return 1.0 if solution is None else solution.reward


def _floor(solution: SolutionSpec | None) -> float:
    return 0.0 if solution is None else solution.floor


def _solution(given: SolutionSpec | None) -> Solution | None:
    if given is None:
        return None
    if given.answer is not None:
        # Base 64, because harness `shell` replaces placeholders in its texts.
        return Solution(
            kind="answer", command=("base64", "-d"), stdin=_base64(given.answer), texts={"answer": given.answer}
        )
    if given.patch is not None:
        texts = {"patch": _added(given.patch)}
        return Solution(kind="patch", command=("sh", "-c", _APPLY), stdin=_base64(completed(given.patch)), texts=texts)
    if given.files:
        stdin = "".join(f"{_base64(text)}\n" for text in given.files.values())
        texts = dict(given.files)
        return Solution(kind="files", command=("true",), files=tuple(texts), stdin=stdin, texts=texts)
    assert given.command is not None
    command = ("sh", "-c", given.command) if isinstance(given.command, str) else given.command
    written = [one for one in given.prepare if isinstance(one, WriteAction) and one.encoding == "utf-8"]
    variables = [f"{name}={value}" for name, value in given.env.items()]
    return Solution(
        kind="command",
        command=("env", *variables, *command) if variables else command,
        prepare=tuple(one.model_dump(mode="json") for one in given.prepare),
        texts={"command": "\n".join(command)} | {one.path: one.content for one in written},
    )


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _added(patch: str) -> str:
    """The lines that a patch adds."""
    lines = patch.splitlines()
    return "\n".join(line[1:] for line in lines if line.startswith("+") and not line.startswith("+++"))
