"""`gangline submit`: submits tasks from a file or from options; with `--wait`, waits for their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.cli.options.evaluator import EvaluatorOption
from gangline.cli.tasks.overrides import (
    AllowNoModelCallOption,
    CommandOption,
    FilesOption,
    HarnessOption,
    InstructionOption,
    Overrides,
    PythonOption,
    RuntimeOption,
    SamplesOption,
    TaskIdOption,
    TimeoutOption,
)
from gangline.cli.tasks.shards import ShardOption, of_shard
from gangline.cli.terminal.exits import Exit
from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, notes, print_json, run
from gangline.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from gangline.domain.task import TaskRequest
    from gangline.domain.views import Submitted, TaskView
    from gangline.wire.client.running import Service
    from gangline.wire.client.server import ServerClient

_POLL_S = 1.0
_QUIET_POLL_S = 30.0
_PATIENCE_S = 120.0
"""Seconds that a server may be away, for example during a restart."""


def submit(
    source: Annotated[
        str | None, typer.Argument(metavar="[FILE|-]", help="JSON or TOML: one task, or a list of them.")
    ] = None,
    instruction: InstructionOption = None,
    harness: HarnessOption = None,
    command: CommandOption = None,
    allow_no_model_call: AllowNoModelCallOption = False,
    samples: SamplesOption = None,
    runtime: RuntimeOption = None,
    file: FilesOption = None,
    python: PythonOption = None,
    evaluator: EvaluatorOption = None,
    timeout: TimeoutOption = None,
    task_id: TaskIdOption = None,
    oracle: Annotated[
        bool,
        typer.Option("--oracle", help="Run each task's reference solution as its agent; it must earn the top reward."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the tasks as JSON; submit nothing.")] = False,
    shard: ShardOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until every session has ended.")] = False,
    in_flight: Annotated[
        int | None,
        typer.Option("--in-flight", min=1, help="Tasks at a time, with --wait. Default: all.", show_default=False),
    ] = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit tasks: from FILE, standard input (-), or options; options override fields of the file.

    `gangline tasks from` makes files of other systems' tasks and of datasets.

    With --wait the exit code is 1 if the infrastructure lost a session, a session was cancelled, or no session of a
    task completed.
    """
    from gangline.wire.client.running import find_service

    overrides = Overrides(
        instruction, harness, command, allow_no_model_call, samples, runtime, python, evaluator, timeout, task_id
    )
    if in_flight is not None and not wait:
        raise InvalidRequest("--in-flight submits tasks as others end: add --wait.")
    tasks = of_shard(_wanted(source, overrides, file or [], oracle=oracle), shard)
    if dry_run:
        print_json([task.model_dump(mode="json", exclude_defaults=True) for task in tasks])
        return
    address = find_service(data, server)
    _fail_by(run(_submit(address, tasks, in_flight, wait=wait, as_json=as_json)), len(tasks))


def _wanted(source: str | None, overrides: Overrides, files: list[str], *, oracle: bool) -> list[TaskRequest]:
    """The command line's tasks, with its overrides and files. Raises: InvalidRequest."""
    from gangline.cli.tasks.files import names_of, read_tasks, sent_along, validated

    if source is None and not overrides.makes_task:
        raise InvalidRequest("nothing to submit: give a FILE, or --instruction with --harness or --command.")
    if oracle and (source is None or overrides.harness is not None or overrides.command is not None):
        raise InvalidRequest(
            "--oracle is the agent of the tasks of a FILE: give a FILE, and neither --harness nor --command."
        )
    bodies: list[dict[str, Any]] = [{}] if source is None else read_tasks(source)
    names = ["the options"] if source is None else [f"{source}, {name}" for name in names_of(bodies)]
    actions = [action for named in files for action in sent_along(named)]
    written = [_with_files(overrides.applied_to(body), actions) for body in bodies]
    if oracle:
        written = [_by_solution(body, name) for body, name in zip(written, names, strict=True)]
    elif not all(map(_has_agent, written)):
        raise InvalidRequest("the tasks have no agent: give --harness NAME or --command, or --oracle.")
    return [validated(body, name) for body, name in zip(written, names, strict=True)]


def _has_agent(body: dict[str, Any]) -> bool:
    agent: Any = body.get("agent")
    return agent is not None and not (isinstance(agent, dict) and "harness" not in agent)


def _by_solution(body: dict[str, Any], name: str) -> dict[str, Any]:
    """The task with its reference solution as agent. Raises: InvalidRequest."""
    from gangline.cli.tasks.files import validated
    from gangline.settings.wings import wing_part

    asked = {**body, "agent": {"harness": "shell", "settings": {"command": "true"}}}
    validated(asked, name)
    changes = wing_part("solved_task")(name, asked)
    if changes is None:
        raise InvalidRequest(
            f"{name}: has no solution for --oracle{', or not of each step' if body.get('steps') else ''}."
        )
    return {**body, **changes}


def _fail_by(ended: list[TaskView], num_tasks: int) -> None:
    """Exit with an error if a task failed."""
    failed = [task for task in ended if _has_failed(task)]
    if not failed:
        return
    which = failed[0].task_id
    notes().print(
        f"{len(failed)} of {num_tasks} tasks failed, {which} among them: see `gangline status {which}`, and for "
        f"one session `gangline show {which}.0` and `gangline logs {which}.0`.",
        markup=False,
        soft_wrap=True,
    )
    raise typer.Exit(Exit.FAILED)


def _has_failed(task: TaskView) -> bool:
    return "completed" not in task.outcomes or bool(set(task.outcomes) & {"infra_error", "cancelled"})


def _with_files(body: dict[str, Any], files: list[dict[str, Any]]) -> dict[str, Any]:
    """Files come before the task's own actions, whose commands may need them."""
    if files:
        runtime = body.setdefault("runtime", {})
        runtime["prepare"] = [*files, *runtime.get("prepare", ())]
    return body


async def _submit(
    address: Service, tasks: list[TaskRequest], in_flight: int | None, *, wait: bool, as_json: bool
) -> list[TaskView]:
    from gangline.cli.tasks.unshown import lines_of_sessions, lines_of_templates
    from gangline.wire.client.server import ServerClient

    async with ServerClient(address.server_url, address.control_token) as client:
        num_at_once = in_flight or len(tasks)
        submitted = await client.submit_many(tasks[:num_at_once])
        _tell(submitted, await lines_of_templates(client, tasks, to_train=False))
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
            async for one in _in_turn(client, task_ids, tasks[num_at_once:]):
                _tell([one])
                task_ids.append(one.task_id)
            ended = await wait_with_progress(client, task_ids)
        except asyncio.CancelledError:
            which = task_ids[0] if len(task_ids) == 1 else "TASK"
            hint = f"The tasks continue. `gangline status {which}` shows them, `gangline cancel {which}` ends them."
            notes().print(hint, markup=False, soft_wrap=True)
            raise
        for line in await lines_of_sessions(client, ended):
            notes().print(line, style="yellow", markup=False, soft_wrap=True)
    for task in ended:
        if as_json:
            print_json(task)
        else:
            _show(task)
    return ended


def _tell(submitted: Sequence[Submitted], more: Sequence[str] = ()) -> None:
    """Print why tasks wait, and warnings. more: additional warnings."""
    for why in dict.fromkeys(one.unplaced for one in submitted if one.unplaced is not None):
        first = next(one.task_id for one in submitted if one.unplaced == why)
        number = sum(one.unplaced == why for one in submitted)
        which = first if number == 1 else f"{number} tasks, {first} among them,"
        notice = f"{which} waits: {why}. It starts when a node that can run it joins."
        notes().print(notice, markup=False, soft_wrap=True)
    for line in dict.fromkeys((*(line for one in submitted for line in one.warnings), *more)):
        notes().print(line, style="yellow", markup=False, soft_wrap=True)


async def _in_turn(
    client: ServerClient, open_ids: Sequence[str], tasks: Sequence[TaskRequest]
) -> AsyncGenerator[Submitted]:
    """Submit each task as soon as an earlier one has ended. open_ids: tasks in progress."""
    waiting = {asyncio.create_task(client.wait(task_id)) for task_id in open_ids}
    num_at_once = len(waiting)
    try:
        for task in tasks:
            while len(waiting) == num_at_once:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    one.result()
            submitted = await client.submit(task)
            waiting.add(asyncio.create_task(client.wait(submitted.task_id)))
            yield submitted
    finally:
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _show(task: TaskView) -> None:
    from gangline.cli.terminal.views import groups_table, sessions_table

    console().print(groups_table([task]), "", sessions_table(task.sessions))
    console().print(f"See a session's tokens: gangline show {task.sessions[0].session_id}", markup=False)


async def wait_with_progress(client: ServerClient, task_ids: list[str]) -> list[TaskView]:
    """Long-poll until all tasks have ended. On a terminal, shows progress bars on stderr, and reasons for waiting."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from gangline.cli.terminal.waiting import waits_told

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    out = notes()
    ended: list[TaskView] = []

    def say(line: str) -> None:
        out.print(line, markup=False, soft_wrap=True)

    with Progress(*columns, console=out, disable=not out.is_terminal, transient=True) as progress:
        async with waits_told(client, say):
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
