"""`gangline submit`: a task, from a file or from options; with `--wait`, until it has ended."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.cli.tasks.imported import (
    HarborOption,
    ImageOption,
    ImportRequest,
    LogParserOption,
    NetworkOption,
    OnlyOption,
    OracleOption,
    RepositoriesOption,
    SweBenchOption,
    TerminalBenchOption,
    TestCommandOption,
    import_tasks,
)
from gangline.cli.terminal.exits import Exit
from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, notes, print_json, run
from gangline.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from gangline.client.running import Service
    from gangline.client.server import ServerClient
    from gangline.domain.task import TaskRequest
    from gangline.domain.views import TaskView

__all__ = ["register", "wait_with_progress"]

_POLL_S = 1.0
_QUIET_POLL_S = 30.0
_PATIENCE_S = 120.0
"""How long a server may be away, as while it is started again."""


def submit(
    source: Annotated[
        str | None, typer.Argument(metavar="[FILE|-]", help="JSON or TOML: one task, or a list of them.")
    ] = None,
    instruction: Annotated[str | None, typer.Option("--instruction", help="The problem to solve.")] = None,
    harness: Annotated[str | None, typer.Option("--harness", help="Agent program: shell, pi, ...")] = None,
    command: Annotated[str | None, typer.Option("--command", help="Command of the shell harness.")] = None,
    allow_no_model_call: Annotated[
        bool,
        typer.Option("--allow-no-model-call", help="Grade sessions whose agent never calls the model, too."),
    ] = False,
    samples: Annotated[int | None, typer.Option("--samples", help="Sessions in the group.")] = None,
    runtime: Annotated[str | None, typer.Option("--runtime", help="Runtime: sandbox, process, ...")] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file",
            metavar="LOCAL[=INSIDE]",
            help="File or folder to write into the working folder before the agent starts; repeatable.",
            show_default=False,
        ),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            "--python",
            metavar="VENV",
            help="Python environment of the node's machine that the agent runs with; sandboxes see it read-only.",
            show_default=False,
        ),
    ] = None,
    evaluator: Annotated[str | None, typer.Option("--evaluator", help="Evaluator that computes the reward.")] = None,
    timeout: Annotated[float | None, typer.Option("--timeout", help="Seconds the agent may run.")] = None,
    task_id: Annotated[
        str | None,
        typer.Option(
            "--task-id",
            help="Task id, which makes a repeated submission harmless; for imported tasks, the prefix of their ids.",
        ),
    ] = None,
    harbor: HarborOption = None,
    terminal_bench: TerminalBenchOption = None,
    swe_bench: SweBenchOption = None,
    only: OnlyOption = None,
    oracle: OracleOption = False,
    image: ImageOption = None,
    network: NetworkOption = None,
    repositories: RepositoriesOption = None,
    test_command: TestCommandOption = None,
    log_parser: LogParserOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the tasks as JSON; submit nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until every session has ended.")] = False,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit tasks: from FILE, standard input (-), other systems' folders, or options; options override the rest.

    With --wait the exit code is 1 if the infrastructure lost a session, a session was cancelled, or no session of a
    task completed.
    """
    from gangline.cli.tasks.files import read_tasks, sent_along, validated
    from gangline.client.running import find_service

    imports = ImportRequest(
        harbor=harbor,
        terminal_bench=terminal_bench,
        swe_bench=swe_bench,
        only=only,
        oracle=oracle,
        image=image,
        network=network,
        repositories=repositories,
        test_command=test_command,
        log_parser=log_parser,
    )
    bodies: list[dict[str, Any]]
    if imports.names_tasks:
        bodies = _imported(imports, source, runtime, task_id)
        task_id = None
    else:
        bodies = [{}] if source is None else read_tasks(source)
        if source is None and (instruction is None or (harness is None and command is None)):
            raise InvalidRequest("nothing to submit: give a FILE, or --instruction with --harness or --command.")
    options = _Overrides(
        instruction, harness, command, allow_no_model_call, samples, runtime, python, evaluator, timeout, task_id
    )
    files = [action for named in file or () for action in sent_along(named)]
    written = [_with_files(options.applied_to(body), files) for body in bodies]
    if imports.names_tasks and not all("harness" in body.get("agent", {}) for body in written):
        raise InvalidRequest("say which agent is to solve them: --harness NAME, --command, or --oracle.")
    tasks = [validated(body, source or "the options") for body in written]
    if dry_run:
        print_json([task.model_dump(mode="json", exclude_defaults=True) for task in tasks])
        return
    address = find_service(data, server)
    failed = [task for task in run(_submit(address, tasks, wait=wait, as_json=as_json)) if _has_failed(task)]
    if failed:
        which = failed[0].task_id
        notes().print(
            f"{len(failed)} of {len(tasks)} tasks failed, {which} among them: see `gangline status {which}`, and for "
            f"one session `gangline show {which}.0` and `gangline logs {which}.0`.",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(Exit.FAILED)


def _has_failed(task: TaskView) -> bool:
    return "completed" not in task.outcomes or bool(set(task.outcomes) & {"infra_error", "cancelled"})


def _imported(
    imports: ImportRequest, source: str | None, runtime: str | None, task_id: str | None
) -> list[dict[str, Any]]:
    """Bodies of the field's tasks; `task_id` begins the id of each."""
    if source is not None:
        raise InvalidRequest("give a FILE, or tasks from the field, not both.")
    found = import_tasks(imports, runtime)
    if task_id is None:
        return [one.body for one in found]
    return [{**one.body, "task_id": f"{task_id}-{re.sub(r'[^A-Za-z0-9._-]+', '-', one.name)}"} for one in found]


def _with_files(body: dict[str, Any], files: list[dict[str, Any]]) -> dict[str, Any]:
    """The files come before the task's own actions, whose commands may need them."""
    if files:
        runtime = body.setdefault("runtime", {})
        runtime["prepare"] = [*files, *runtime.get("prepare", ())]
    return body


class _Overrides:
    """Options that stand in for fields of a task."""

    def __init__(
        self,
        instruction: str | None,
        harness: str | None,
        command: str | None,
        allow_no_model_call: bool,
        samples: int | None,
        runtime: str | None,
        python: Path | None,
        evaluator: str | None,
        timeout_s: float | None,
        task_id: str | None,
    ) -> None:
        self._fields: tuple[tuple[tuple[str, ...], Any], ...] = (
            (("instruction",), instruction),
            (("agent", "harness"), harness if harness or command is None else "shell"),
            (("agent", "settings", "command"), command),
            (("agent", "allow_no_model_call"), allow_no_model_call or None),
            (("num_samples",), samples),
            (("runtime", "backend"), runtime),
            (("runtime", "python"), None if python is None else str(python.absolute())),
            (("evaluator", "strategy"), evaluator),
            (("timeout_seconds",), timeout_s),
            (("task_id",), task_id),
        )

    def applied_to(self, body: dict[str, Any]) -> dict[str, Any]:
        for path, value in self._fields:
            if value is None:
                continue
            inner = body
            for step in path[:-1]:
                inner = inner.setdefault(step, {})
            inner[path[-1]] = value
        return body


async def _submit(address: Service, tasks: list[TaskRequest], *, wait: bool, as_json: bool) -> list[TaskView]:
    from gangline.client.server import ServerClient

    async with ServerClient(address.server_url, address.control_token) as client:
        submitted = await client.submit_many(tasks)
        if not wait:
            for one in submitted:
                if as_json:
                    print_json(one)
                else:
                    again = "" if one.created else " (had been submitted before)"
                    console().print(f"{one.task_id}: {len(one.session_ids)} sessions{again}", markup=False)
            return []
        task_ids = [one.task_id for one in submitted]
        try:
            ended = await wait_with_progress(client, task_ids)
        except asyncio.CancelledError:
            which = task_ids[0] if len(task_ids) == 1 else "TASK"
            told = f"The tasks continue. `gangline status {which}` shows them, `gangline cancel {which}` ends them."
            notes().print(told, markup=False, soft_wrap=True)
            raise
    for task in ended:
        if as_json:
            print_json(task)
        else:
            _show(task)
    return ended


def _show(task: TaskView) -> None:
    from gangline.cli.terminal.views import groups_table, sessions_table

    console().print(groups_table([task]), sessions_table(task.sessions), sep="\n\n")
    console().print(f"See a session's tokens: gangline show {task.sessions[0].session_id}", markup=False)


async def wait_with_progress(client: ServerClient, task_ids: list[str]) -> list[TaskView]:
    """Long-poll until all tasks have ended; a bar for each on stderr where that is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    out = notes()
    ended: list[TaskView] = []
    with Progress(*columns, console=out, disable=not out.is_terminal, transient=True) as progress:
        bars = {task_id: progress.add_task(task_id, total=None) for task_id in task_ids}
        for task_id in task_ids:
            poll_s = _POLL_S if out.is_terminal else _QUIET_POLL_S
            async for view in client.progress(task_id, poll_s=poll_s, patience_s=_PATIENCE_S):
                progress.update(bars[task_id], total=view.num_samples, completed=view.num_samples - view.num_open)
                if view.ended:
                    ended.append(view)
    return ended


def register(app: typer.Typer) -> None:
    app.command()(submit)
