"""`gangline regrade`: grades recorded sessions again, without running their agents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gangline.cli.options.evaluator import EvaluatorOption, checked_evaluator, given_evaluator
from gangline.cli.results.export_options import Choice, LeastRewardOption, OfOutcomeOption, WhereTaskOption
from gangline.cli.results.records import find_results_of, open_records, regrades_file
from gangline.cli.service.through import with_running
from gangline.cli.tasks.files import read_tasks
from gangline.cli.terminal.exits import Exit
from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, notes, print_json, run
from gangline.cli.terminal.tables import FactTable
from gangline.domain.errors import InvalidRequest, NotFound
from gangline.tasks.commands.evals.options import RegradeNameOption, TasksFileOption
from gangline.wire.client.running import find_service

if TYPE_CHECKING:
    from gangline.cli.results.records import RequestOf
    from gangline.domain.session import Grading, SessionResult
    from gangline.domain.task import EvaluatorSpec
    from gangline.rows.regraded import Grade
    from gangline.tasks.evals.regrading import Candidate, RegradeRun
    from gangline.wire.client.server import ServerClient

_MAX_SHOWN = 20


def regrade(
    names: Annotated[
        list[str],
        typer.Argument(metavar="TASK|SESSION|PATTERN...", help="Such as task-1, task-1.0, swe-*.", show_default=False),
    ],
    evaluator: EvaluatorOption = None,
    tasks: TasksFileOption = None,
    name: RegradeNameOption = "regrade",
    where: WhereTaskOption = None,
    outcome: OfOutcomeOption = None,
    min_reward: LeastRewardOption = None,
    in_flight: Annotated[int, typer.Option("--in-flight", min=1, help="Sessions at a time.")] = 16,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Grade recorded sessions again, by another evaluator or their tasks' own; their agents do not run again.

    The running service's nodes grade the files that were kept. Verdicts are written to DATA/regrades/NAME.jsonl, each
    with the recorded grade, which is not changed. A restarted run continues where it stopped. `export` and `data` use
    the verdicts with --verdicts NAME. Exit code 1 if nothing could be graded.
    """
    from gangline.tasks.evals.regrading import RegradeRun

    if evaluator is not None and tasks is not None:
        raise InvalidRequest("give either --evaluator or --tasks.")
    records = open_records(data, server)
    with records.requests() as request_of:
        choice = Choice(request_of, where=where or (), outcomes=outcome or (), min_reward=min_reward)
        evaluator_of = _choosing(evaluator, tasks, request_of)
        found = (one for one in find_results_of(records, names) if choice.takes(one))
        candidates = [_candidate(one, evaluator_of) for one in found]
    if not candidates:
        raise NotFound("no session that has ended is among those.")
    path = regrades_file(data, name)
    regrades = RegradeRun(candidates, path)
    try:
        run(with_running(find_service(data, server), lambda client, _: _graded(regrades, client, in_flight)))
    except typer.Exit:
        notes().print("Stopped. Start it again to continue.")
        raise
    _show(regrades, path, as_json=as_json)
    if not regrades.regrades:
        raise typer.Exit(Exit.FAILED)


def _choosing(evaluator: str | None, tasks: Path | None, request_of: RequestOf) -> Callable[[str], EvaluatorSpec]:
    """Task id -> the evaluator that grades its sessions. Raises: InvalidRequest, UnknownPlugin."""
    if evaluator is not None:
        given = given_evaluator(evaluator)
        return lambda _task_id: given
    if tasks is not None:
        changed = {
            str(body.get("task_id")): checked_evaluator(body.get("evaluator") or {}, f"{tasks}, {body.get('task_id')}")
            for body in read_tasks(str(tasks))
        }

        def of_file(task_id: str) -> EvaluatorSpec:
            if task_id not in changed:
                raise InvalidRequest(f"{tasks} has no task of the id {task_id!r}: name only tasks that it has.")
            return changed[task_id]

        return of_file

    def recorded(task_id: str) -> EvaluatorSpec:
        task = request_of(task_id)
        if task is None:
            raise InvalidRequest(f"nobody knows task {task_id!r} any more: name an evaluator with --evaluator.")
        return task.evaluator

    return recorded


def _candidate(result: SessionResult, evaluator_of: Callable[[str], EvaluatorSpec]) -> Candidate:
    from gangline.rows.regraded import Grade
    from gangline.tasks.evals.regrading import Candidate

    before = Grade(outcome=result.outcome, reward=result.reward, details=result.reward_details)
    return Candidate(session_id=result.session_id, before=before, evaluator=evaluator_of(result.task_id))


async def _graded(regrades: RegradeRun, client: ServerClient, num_in_flight: int) -> None:
    progress = Progress(
        *(TextColumn("sessions"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()),
        console=notes(),
        transient=True,
    )
    num_done = len(regrades.regrades)
    bar = progress.add_task("", total=num_done + len(regrades.left), completed=num_done)
    with progress:
        await regrades.run(client, num_in_flight=num_in_flight, on_session=lambda: progress.advance(bar))


def _show(regrades: RegradeRun, path: Path, *, as_json: bool) -> None:
    done = regrades.regrades
    changed = [one for one in done if _grade(one.before) != _grade(one.verdict)]
    if as_json:
        print_json(
            {
                "path": str(path),
                "num_graded": len(done),
                "num_changed": len(changed),
                "mean_before": _mean([one.before.reward for one in done]),
                "mean_now": _mean([one.verdict.reward for one in done]),
                "refused": regrades.refused,
            }
        )
        return
    table = FactTable("session", "before", "now")
    for one in changed[:_MAX_SHOWN]:
        table.add_row(one.session_id, *map(_shown, (one.before, one.verdict)))
    if changed:
        console().print(table, "")
    if len(changed) > _MAX_SHOWN:
        console().print(f"... and {len(changed) - _MAX_SHOWN} more")
    before, now = _mean([one.before.reward for one in done]), _mean([one.verdict.reward for one in done])
    means = "" if before is None or now is None else f", mean reward {before:g} before and {now:g} now"
    console().print(f"{path}: {len(done)} sessions graded again, {len(changed)} differ{means}", markup=False)
    for why, number in Counter(regrades.refused.values()).most_common(_MAX_SHOWN):
        notes().print(f"{number} not graded: {why}", markup=False, soft_wrap=True)


def _grade(one: Grade | Grading) -> tuple[str, float | None]:
    return one.outcome, one.reward


def _shown(one: Grade | Grading) -> str:
    return one.outcome if one.reward is None else f"{one.reward:g}"


def _mean(rewards: list[float | None]) -> float | None:
    """None if there are no rewards."""
    found = [reward for reward in rewards if reward is not None]
    return sum(found) / len(found) if found else None


def register(app: typer.Typer) -> None:
    app.command()(regrade)
