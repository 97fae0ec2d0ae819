"""`gangline export`: rows of tasks and sessions as one file, or their conversations.

Sessions as CSV have one line each: outcome, reward, tokens, seconds and resources, for example to plot cost per reward.

An empty field is unknown. Fields `agent_*` cover INIT and RUN, fields `grading_*` POSTRUN.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.cli.results.export_options import (
    BuilderOption,
    Choice,
    FileNameOption,
    FormatOption,
    HeldOut,
    HeldOutOption,
    LeastRewardOption,
    OfOutcomeOption,
    RowFormat,
    SessionNames,
    VerdictsOption,
    WhereTaskOption,
    WholePromptsOption,
)
from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, print_json
from gangline.domain.errors import InvalidRequest, NotFound
from gangline.domain.lifecycle import STAGES
from gangline.domain.session import SessionResult
from gangline.domain.usage import AMOUNTS
from gangline.machine.durable import replacing

if TYPE_CHECKING:
    from gangline.cli.results.records import RequestOf
    from gangline.domain.session import SessionResult

_PARTS = ("agent", "grading")
COLUMNS: tuple[str, ...] = (
    *("task_id", "session_id", "attempt", "outcome", "reward"),
    *("num_completions", "num_prompt_tokens", "num_sampled_tokens"),
    *(f"{stage}_s" for stage in STAGES),
    *(f"{part}_{amount}" for part in _PARTS for amount in AMOUNTS),
)


def write_sessions_csv(results: Iterable[SessionResult], path: Path) -> int:
    """Returns the number of sessions."""
    num = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside, aside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for result in results:
            writer.writerow(_line(result))
            num += 1
    return num


def _line(result: SessionResult) -> list[str | float | None]:
    calls = [completion for completion in result.completions if completion.choice_index == 0]
    num_prompt = sum(completion.prompt_shared + len(completion.prompt_suffix_ids) for completion in calls)
    num_sampled = sum(len(completion.sampled_ids) for completion in result.completions)
    timings = result.timings
    seconds = {
        stage: sum(timing.ended_at - timing.started_at for timing in timings if timing.stage == stage)
        for stage in STAGES
    }
    parts = [None if result.usage is None else getattr(result.usage, part) for part in _PARTS]
    return [
        *(result.task_id, result.session_id, result.attempt, result.outcome, result.reward),
        *(len(result.completions), num_prompt, num_sampled),
        *(f"{seconds[stage]:.3f}" for stage in STAGES),
        *(None if part is None else getattr(part, amount) for part in parts for amount in AMOUNTS),
    ]


class _Counted:
    """Transforms and counts results on their way to the writer, one session at a time."""

    def __init__(
        self, results: Iterable[SessionResult], changes: Sequence[Callable[[SessionResult], SessionResult]]
    ) -> None:
        self._results = results
        self._changes = changes
        self.num_rows = self.num_sessions = 0

    def __iter__(self) -> Iterator[SessionResult]:
        for result in self._results:
            changed = result
            for change in self._changes:
                changed = change(changed)
            self.num_sessions += 1
            self.num_rows += 0 if changed.trajectory is None else len(changed.trajectory.traces)
            yield changed


def _written_out(result: SessionResult) -> SessionResult:
    from msgspec.structs import replace

    from gangline.rows.shared_prefixes import with_whole_prompts

    if result.trajectory is None:
        return result
    traces = tuple(with_whole_prompts(result.trajectory.traces))
    return replace(result, trajectory=replace(result.trajectory, traces=traces))


def _rebuilding(text: str) -> Callable[[SessionResult], SessionResult]:
    """Rebuilds rows with another builder and keeps the sessions' rewards. Raises: InvalidRequest, UnknownPlugin."""
    from msgspec.structs import replace
    from pydantic import ValidationError

    from gangline.domain.task import BuilderSpec
    from gangline.rows.chains import built
    from gangline.rows.rewards import carry_rewards
    from gangline.settings.plugins import explain, make_builder

    try:
        spec = BuilderSpec.model_validate(json.loads(text) if text.startswith("{") else {"strategy": text})
    except (json.JSONDecodeError, ValidationError) as error:
        why = explain(error) if isinstance(error, ValidationError) else str(error)
        raise InvalidRequest(f"--builder: {why}") from error
    builder = make_builder(spec.strategy, spec.config)

    def rebuilt(result: SessionResult) -> SessionResult:
        if result.trajectory is None:
            return result
        made = built(builder, result.completions, session_id=result.session_id, task_id=result.task_id)
        return replace(result, trajectory=carry_rewards(result.trajectory, made))

    return rebuilt


def export(
    names: SessionNames,
    out: Annotated[Path, typer.Option("--out", help="Folder for NAME.FORMAT; created if missing.")] = Path(),
    row_format: FormatOption = RowFormat.parquet,
    file_name: FileNameOption = None,
    where: WhereTaskOption = None,
    outcome: OfOutcomeOption = None,
    min_reward: LeastRewardOption = None,
    verdicts: VerdictsOption = None,
    held_out: HeldOutOption = HeldOut.exclude,
    builder: BuilderOption = None,
    whole_prompts: WholePromptsOption = False,
    agent: Annotated[
        str | None, typer.Option("--agent", help="Name of the agent program, for atif. Default: the task's harness.")
    ] = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the rows of tasks' ended sessions: ids, masks, log-probs, versions, rewards, certificates."""
    from gangline.cli.results.records import find_results_of, open_records

    records = open_records(data, server, verdicts)
    changes = [] if builder is None else [_rebuilding(builder)]
    changes += [_written_out] if whole_prompts else []
    with records.requests() as request_of:
        include = held_out is HeldOut.include
        choice = Choice(request_of, where=where or (), outcomes=outcome or (), min_reward=min_reward, held_out=include)
        found = (one for one in find_results_of(records, names) if choice.takes(one))
        results = _Counted(_some(found, choice), changes)
        path, what, num = _write(results, out, file_name or _name_of(names), row_format, agent, request_of)
    if as_json:
        counts = {f"num_{what}": num, "num_sessions": results.num_sessions, "num_held_out": choice.num_held_out}
        print_json({"path": str(path), "format": row_format.value, **counts})
    else:
        left_out = f"; {choice.num_held_out} left out: held out; --held-out include" if choice.num_held_out else ""
        summary = f"{path}: {num} {what} of {results.num_sessions} sessions{left_out}"
        console().print(summary, markup=False, soft_wrap=True)


def _some(found: Iterator[SessionResult], choice: Choice) -> Iterator[SessionResult]:
    """Raises: NotFound, before a file is written, when all sessions are held out."""
    first = next(found, None)
    if first is None:
        if choice.num_held_out:
            raise NotFound(
                f"all {choice.num_held_out} sessions are held out: they measure, and are not to be trained on. "
                "`--held-out include` takes them."
            )
        return iter(())
    return itertools.chain([first], found)


def _name_of(names: Sequence[str]) -> str:
    """The name of a task or session; `rows` for several names, and for a pattern."""
    return names[0] if len(names) == 1 and re.fullmatch(r"[^*?\[]+", names[0]) else "rows"


def _write(
    results: _Counted, out: Path, name: str, row_format: RowFormat, agent: str | None, request_of: RequestOf
) -> tuple[Path, str, int]:
    """The file or folder, and the number and name of the items in it."""
    if row_format is RowFormat.messages:
        from gangline.rows.conversations.chat import write_messages

        path = out / f"{name}.messages.jsonl"
        return path, "conversations", write_messages(results, path)
    if row_format is RowFormat.atif:
        from gangline.rows.atif.export import write_atif

        @lru_cache(maxsize=8)
        def agent_of(task_id: str) -> str | None:
            task = request_of(task_id)
            return agent or (None if task is None else task.agent.harness)

        return out / f"{name}.atif", "documents", write_atif(results, out / f"{name}.atif", agent_of=agent_of)
    if row_format is RowFormat.verifiers:
        from gangline.rows.conversations.verifiers_traces import FILE_NAME, write_episodes

        path = out / f"{name}.verifiers" / FILE_NAME
        return path, "traces", write_episodes(results, path, request_of=lru_cache(maxsize=8)(request_of))
    if row_format is RowFormat.csv:
        from gangline.cli.results.export import write_sessions_csv

        return out / f"{name}.csv", "lines", write_sessions_csv(results, out / f"{name}.csv")
    from gangline.rows.export import export_rows

    path = export_rows(results, out, name=name, format=row_format.value)
    return path, "rows", results.num_rows


def register(app: typer.Typer) -> None:
    app.command("export")(export)
