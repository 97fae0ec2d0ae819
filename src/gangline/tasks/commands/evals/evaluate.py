"""`gangline eval`: runs an agent on many tasks and reports results with standard errors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gangline.cli.options.evaluator import EvaluatorOption, evaluator_fields
from gangline.cli.options.settings import UP
from gangline.cli.service.through import with_own, with_running
from gangline.cli.service.up import plan_of
from gangline.cli.tasks.files import read_tasks, validated
from gangline.cli.tasks.overrides import with_harness
from gangline.cli.tasks.shards import ShardOption, of_shard
from gangline.cli.terminal.exits import Exit
from gangline.cli.terminal.output import (
    DataOption,
    JsonOption,
    ServerOption,
    console,
    notes,
    open_command,
    print_json,
    run,
)
from gangline.domain.errors import InvalidRequest
from gangline.settings.machine import Settings
from gangline.settings.service import resolve
from gangline.tasks.commands.benchmarks import benchmark_tasks
from gangline.tasks.commands.evals.options import (
    ByOption,
    CaptureOption,
    EngineKeyOption,
    EngineOption,
    HarnessOption,
    HtmlOption,
    InFlightOption,
    KOption,
    MarkdownOption,
    MaxCostOption,
    MaxHoursOption,
    NameOption,
    PassOption,
    PredictionsOption,
    PricesOption,
    SamplesOption,
    TasksArgument,
    TokenizerOption,
)
from gangline.tasks.commands.evals.page import report_page
from gangline.tasks.commands.evals.view import as_table, figures, tasks_rows, write_markdown
from gangline.tasks.commands.source_options import FromOption, LimitOption, NetworkOption, PythonOption, SplitOption
from gangline.wire.client.running import find_service

if TYPE_CHECKING:
    from gangline.tasks.evals.records import SessionRecord
    from gangline.tasks.evals.report import Prices, Report
    from gangline.tasks.evals.run import Budget, EvaluationRun, EvaluationSpec
    from gangline.wire.client.server import ServerClient

_SHOWN_TASKS = 20


def evaluate(
    source: TasksArgument,
    limit: LimitOption = None,
    split: SplitOption = None,
    files: FromOption = None,
    python: PythonOption = None,
    network: NetworkOption = None,
    name: NameOption = None,
    samples: SamplesOption = 1,
    harness: HarnessOption = None,
    evaluator: EvaluatorOption = None,
    shard: ShardOption = None,
    ks: KOption = None,
    bar: PassOption = 1.0,
    by: ByOption = None,
    markdown: MarkdownOption = None,
    html: HtmlOption = None,
    predictions: PredictionsOption = None,
    prices: PricesOption = None,
    max_cost: MaxCostOption = None,
    max_hours: MaxHoursOption = None,
    in_flight: InFlightOption = 16,
    engine: EngineOption = None,
    tokenizer: TokenizerOption = None,
    capture: CaptureOption = None,
    engine_key_env: EngineKeyOption = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate an agent on many tasks: pass@k, pass^k and mean reward with errors clustered by task, cost, failures.

    A restarted run continues where it stopped, and its report equals that of an uninterrupted run. Uses the running
    service, or starts one with --engine. Results are in DATA/evals/NAME.
    """
    from gangline.tasks.evals.run import Budget

    priced = _prices(prices, max_cost)
    bodies = benchmark_tasks(source, limit, split, files, python, network) or read_tasks(source)[:limit]
    spec = _spec(source, bodies, samples, tuple(harness or ()), evaluator, shard)
    spec = msgspec.structs.replace(spec, name=name or _name_of(source, split, limit, shard))
    wanted = {"ks": _ks(ks, samples), "bar": bar, "by": _keys(by, harness), "prices": priced}
    budget = Budget(max_cost=max_cost, prices=priced, max_s=None if max_hours is None else 3600 * max_hours)
    data_dir = (data or Settings.from_environ().data_dir).absolute()
    folder = data_dir / "evals" / spec.name
    given = _service(engine, tokenizer, capture, engine_key_env)
    try:
        done = _EvaluationCommand(spec, budget, folder, in_flight, wanted).through(given, data_dir, data, server)
    except typer.Exit:
        notes().print("Stopped. Start it again to continue.")
        raise
    report = done.report(**wanted)
    server_url = None if given or html is None else find_service(data, server).server_url
    _write(report, folder, markdown, html, server_url)
    _write_predictions(predictions, spec.name, folder)
    where = "On the page, while a service runs" if given else "On the page"
    _show(report, f"{where}: {open_command(f'evaluations/{report.evaluation_id}', data, server)}", as_json=as_json)
    if not report.whole.num_counted:
        raise typer.Exit(Exit.FAILED)


def _service(engine: str | None, tokenizer: str | None, capture: str | None, key_env: str | None) -> dict[str, Any]:
    """Settings of the service to start; empty: the running one is used."""
    service = {"node.engines": engine, "up.tokenizer": tokenizer}
    service |= {"node.capture": capture, "node.engine_key_env": key_env}
    return {key: value for key, value in service.items() if value is not None}


class _EvaluationCommand:
    """Runs an evaluation through a service, with a progress bar."""

    def __init__(
        self, spec: EvaluationSpec, budget: Budget, folder: Path, num_in_flight: int, wanted: dict[str, Any]
    ) -> None:
        """wanted: what its report has, as for `EvaluationRun.report`."""
        self._spec, self._budget, self._folder, self._num_in_flight = spec, budget, folder, num_in_flight
        self._wanted = wanted

    def through(self, given: dict[str, Any], data_dir: Path, data: Path | None, server: str | None) -> EvaluationRun:
        """given: settings of a service to start, by key; empty: use the running one. Raises: the service's errors,
        typer.Exit when ended by a signal.
        """
        if "node.engines" not in given and given:
            raise InvalidRequest("--tokenizer, --capture and --engine-key-env are of a service that --engine starts.")
        if not given:
            return run(with_running(find_service(data, server), self._run))
        given["node.engines"] = (given["node.engines"],)
        plan = plan_of(resolve({**given, "data_dir": data_dir}, defaults=UP.defaults))
        try:
            return asyncio.run(with_own(plan, self._run))
        except (asyncio.CancelledError, KeyboardInterrupt):  # the service, started here, handles the signals
            raise typer.Exit(Exit.INTERRUPTED) from None

    async def _run(self, client: ServerClient, _token: str | None) -> EvaluationRun:
        from gangline.cli.tasks.unshown import lines_of_engines
        from gangline.cli.terminal.waiting import waits_told
        from gangline.domain.errors import ToolsNotRendered
        from gangline.domain.task import TaskRequest
        from gangline.tasks.evals.run import EvaluationRun
        from gangline.tasks.evals.sending import report_sent

        progress = Progress(
            *(TextColumn("tasks"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()),
            console=notes(),
            transient=True,
        )
        bar = progress.add_task("", total=len(self._spec.tasks))

        def count(_records: Sequence[SessionRecord]) -> None:
            progress.advance(bar)

        evaluation = EvaluationRun(
            client,
            self._spec,
            self._folder,
            num_in_flight=self._num_in_flight,
            budget=self._budget,
            on_task=count,
        )
        tasks = [TaskRequest.model_validate(body) for body in self._spec.tasks]
        refused = [task for task in tasks if not task.agent.allow_unrendered_tools]
        if evaluation.num_left and (lines := await lines_of_engines(client, refused)):
            raise ToolsNotRendered(" ".join(lines))
        progress.update(bar, completed=len(self._spec.tasks) - evaluation.num_left)

        def say(line: str) -> None:
            progress.console.print(line, markup=False, soft_wrap=True)

        report = partial(evaluation.report, **self._wanted)
        with progress:
            async with waits_told(client, say), report_sent(client, report, say):
                await evaluation.run()
        return evaluation


def _spec(
    source: str,
    bodies: Sequence[dict[str, Any]],
    num_samples: int,
    harnesses: tuple[str, ...],
    evaluator: str | None,
    shard: str | None,
) -> EvaluationSpec:
    """Every task of the shard with every harness. Raises: InvalidRequest, UnknownPlugin."""
    from gangline.tasks.evals.run import EvaluationSpec

    graded = {} if evaluator is None else {"evaluator": evaluator_fields(evaluator)}
    found = [_named({**body, **graded}, at) for at, body in enumerate(bodies)]
    if len({named for named, _ in found}) < len(found):
        raise InvalidRequest(f"{source}: two tasks have the same task_id.")
    mine = of_shard(found, shard)
    crossed = [
        _with_harness(named, body, harness, harnesses) for named, body in mine for harness in harnesses or (None,)
    ]
    for named, body in crossed:
        validated({**body, "num_samples": num_samples}, f"{source}, {named}")
    return EvaluationSpec(
        name=_name_of(source),
        tasks=tuple(body for _, body in crossed),
        names=tuple(named for named, _ in crossed),
        num_samples=num_samples,
    )


def _named(body: dict[str, Any], at: int) -> tuple[str, dict[str, Any]]:
    body = dict(body)
    return str(body.pop("task_id", None) or f"task-{at:05d}"), body


def _with_harness(
    named: str, body: dict[str, Any], harness: str | None, harnesses: tuple[str, ...]
) -> tuple[str, dict[str, Any]]:
    if harness is None:
        return named, body
    agent = with_harness(body.get("agent"), harness)
    metadata = {**cast("dict[str, Any]", body.get("metadata") or {}), "harness": harness}
    return f"{named} ({harness})" if len(harnesses) > 1 else named, {**body, "agent": agent, "metadata": metadata}


def _name_of(source: str, split: str | None = None, limit: int | None = None, shard: str | None = None) -> str:
    """A name for these tasks: other parts of a source are other evaluations."""
    title = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(source).stem).strip("-.")
    parts = (split, limit and f"first-{limit}", shard and shard.replace("/", "-of-"))
    return "-".join([title or "evaluation", *(part for part in parts if part)])


def _keys(by: list[str] | None, harnesses: list[str] | None) -> list[str]:
    return [*(by or ()), *(("harness",) if len(harnesses or ()) > 1 else ())]


def _ks(text: str | None, num_samples: int) -> list[int]:
    """Raises: InvalidRequest."""
    if text is None:
        return sorted({1, num_samples})
    try:
        found = sorted({int(one) for one in text.split(",")})
    except ValueError as error:
        raise InvalidRequest(f"--k is a list of numbers, such as 1,4; got {text!r}.") from error
    if found[0] < 1 or found[-1] > num_samples:
        raise InvalidRequest(f"--k {text}: k lies between 1 and --samples, {num_samples}.")
    return found


def _prices(text: str | None, max_cost: float | None) -> Prices | None:
    """Raises: InvalidRequest."""
    from gangline.tasks.evals.report import Prices

    if text is None and max_cost is not None:
        raise InvalidRequest("--max-cost needs --prices IN,OUT: the prices of a million prompt and sampled tokens.")
    if text is None:
        return None
    try:
        prompt, sampled = map(float, text.split(","))
    except ValueError as error:
        raise InvalidRequest(f"--prices are two numbers, such as 0.5,1.5; got {text!r}.") from error
    return Prices(prompt=prompt, sampled=sampled)


def _write(report: Report, folder: Path, markdown: Path | None, html: Path | None, server_url: str | None) -> None:
    from gangline.machine.durable import write_whole

    write_whole(folder / "report.json", msgspec.json.format(msgspec.json.encode(report)))
    if markdown is not None:
        write_markdown(markdown, [*figures(report), tasks_rows(report.lines)])
    if html is not None:
        html.write_text(report_page(report, server_url))


def _write_predictions(path: Path | None, model: str, folder: Path) -> None:
    """Source: SWE-bench's `run_evaluation --predictions_path`."""
    from gangline.tasks.evals.run import read_predictions

    if path is None:
        return
    lines = (
        {"instance_id": task, "model_name_or_path": model, "model_patch": patch}
        for task, patch in read_predictions(folder).items()
    )
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def _show(report: Report, last_line: str = "", *, as_json: bool) -> None:
    if report.num_left:
        notes().print(f"The budget is used up: {report.num_left} tasks were not run. Start it again to continue.")
    if as_json:
        print_json(report)
        return
    out = console()
    for rows in figures(report):
        out.print(as_table(rows), "")
    below = [line for line in report.lines if not line.always_passes(report.bar)]
    if below:
        out.print(as_table(tasks_rows(below[:_SHOWN_TASKS])), "")
        if len(below) > _SHOWN_TASKS:
            out.print(
                f"... and {len(below) - _SHOWN_TASKS} more tasks with such a session: --html FILE and --json have all"
            )
        out.print(f"See a session: gangline show {below[0].worst.session_id}", markup=False)
    if last_line:
        out.print(last_line, markup=False)


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)
