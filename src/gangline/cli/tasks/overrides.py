"""Options of `gangline submit` that make a task, or override fields of a file's tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer

from gangline.cli.options.evaluator import evaluator_fields
from gangline.domain.errors import InvalidRequest

InstructionOption = Annotated[str | None, typer.Option("--instruction", help="The problem to solve.")]
HarnessOption = Annotated[str | None, typer.Option("--harness", help="Agent program: shell, pi, ...")]
CommandOption = Annotated[str | None, typer.Option("--command", help="Command of the shell harness.")]
AllowNoModelCallOption = Annotated[
    bool,
    typer.Option("--allow-no-model-call", help="Grade sessions whose agent never calls the model, too."),
]
SamplesOption = Annotated[int | None, typer.Option("--samples", help="Sessions in the group.")]
RuntimeOption = Annotated[str | None, typer.Option("--runtime", help="Runtime: sandbox, process, ...")]
FilesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--file",
        metavar="LOCAL[=INSIDE]",
        help="File or folder to write into the working folder before the agent starts; repeatable.",
        show_default=False,
    ),
]
PythonOption = Annotated[
    Path | None,
    typer.Option(
        "--python",
        metavar="VENV",
        help="Python environment of the node's machine that the agent runs with; sandboxes see it read-only.",
        show_default=False,
    ),
]
TimeoutOption = Annotated[float | None, typer.Option("--timeout", help="Seconds the agent may run.")]
TaskIdOption = Annotated[
    str | None,
    typer.Option(
        "--task-id",
        help="Task id, which makes a repeated submission harmless.",
    ),
]


class Overrides(msgspec.Struct, frozen=True):
    """Task fields given as options; None or False if not given."""

    instruction: str | None
    harness: str | None
    command: str | None
    allow_no_model_call: bool
    samples: int | None
    runtime: str | None
    python: Path | None
    evaluator: str | None
    """As in `given_evaluator`."""
    timeout_s: float | None
    task_id: str | None

    @property
    def makes_task(self) -> bool:
        """Whether they suffice for a task without a file."""
        return self.instruction is not None and not (self.harness is None and self.command is None)

    def applied_to(self, body: dict[str, Any]) -> dict[str, Any]:
        """Raises: InvalidRequest, UnknownPlugin for the evaluator."""
        harness = self.harness if self.harness or self.command is None else "shell"
        fields: tuple[tuple[tuple[str, ...], Any], ...] = (
            (("instruction",), self.instruction),
            (("agent",), None if harness is None else with_harness(body.get("agent"), harness)),
            (("agent", "settings", "command"), self.command),
            (("agent", "allow_no_model_call"), self.allow_no_model_call or None),
            (("num_samples",), self.samples),
            (("runtime", "backend"), self.runtime),
            (("runtime", "python"), None if self.python is None else str(self.python.absolute())),
            (("evaluator",), None if self.evaluator is None else evaluator_fields(self.evaluator)),
            (("timeout_seconds",), self.timeout_s),
            (("task_id",), self.task_id),
        )
        for path, value in fields:
            if value is None:
                continue
            inner = body
            for number, step in enumerate(path[:-1], 1):
                inner = _table(inner.setdefault(step, {}), ".".join(path[:number]))
            inner[path[-1]] = value
        return body


def with_harness(agent: object, harness: str) -> dict[str, Any]:
    """A task's `agent` with this harness. Settings of another one are dropped: they are that program's own.

    Raises: InvalidRequest.
    """
    agent = _table(agent or {}, "agent")
    is_same = agent.get("harness", harness) == harness
    return {name: value for name, value in agent.items() if is_same or name != "settings"} | {"harness": harness}


def _table(found: object, field: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise InvalidRequest(f"{field} must be a table of fields; got {str(found)[:80]!r}.")
    return cast("dict[str, Any]", found)
