"""Tasks from the field for `gangline submit`: its options, and the choice of the importer."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import msgspec
import typer

from gangline.cli.terminal.output import notes
from gangline.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from gangline.domain.task import NetworkPolicy
    from gangline.importers.imported import Choices, Imported

__all__ = [
    "HarborOption",
    "ImageOption",
    "ImportRequest",
    "LogParserOption",
    "NetworkOption",
    "OnlyOption",
    "OracleOption",
    "RepositoriesOption",
    "SweBenchOption",
    "TerminalBenchOption",
    "TestCommandOption",
    "import_tasks",
]

_PANEL = "Tasks from the field"
_MAX_SHOWN_NOTES = 10

HarborOption = Annotated[
    Path | None,
    typer.Option("--harbor", help="A Harbor task folder, or a folder of them.", rich_help_panel=_PANEL),
]
TerminalBenchOption = Annotated[
    Path | None,
    typer.Option("--terminal-bench", help="A Terminal-Bench task folder, or a folder of them.", rich_help_panel=_PANEL),
]
SweBenchOption = Annotated[
    Path | None,
    typer.Option("--swe-bench", help="SWE-bench rows: JSON lines, JSON or Parquet.", rich_help_panel=_PANEL),
]
OnlyOption = Annotated[
    str | None,
    typer.Option(
        "--only", metavar="PATTERN", help="Only tasks whose name matches, such as 'py-*'.", rich_help_panel=_PANEL
    ),
]
OracleOption = Annotated[
    bool,
    typer.Option(
        "--oracle", help="Run each task's own solution as its agent; its reward must be 1.", rich_help_panel=_PANEL
    ),
]
ImageOption = Annotated[
    str | None,
    typer.Option(
        "--image",
        help="Image, or root folder for the sandbox; {instance_id} is filled in for SWE-bench.",
        rich_help_panel=_PANEL,
    ),
]
NetworkOption = Annotated[
    str | None,
    typer.Option("--network", help="Network of agents and tests: proxy, none, full.", rich_help_panel=_PANEL),
]
RepositoriesOption = Annotated[
    str | None,
    typer.Option(
        "--repositories",
        metavar="FOLDER",
        help="SWE-bench without images: folder of clones named owner__name, as a path inside the runtime.",
        rich_help_panel=_PANEL,
    ),
]
TestCommandOption = Annotated[
    str | None,
    typer.Option(
        "--test-command",
        help="SWE-bench: command that runs the tests; {tests} stands for the files of the test patch.",
        rich_help_panel=_PANEL,
    ),
]
LogParserOption = Annotated[
    str | None,
    typer.Option(
        "--log-parser",
        help="SWE-bench: parser of the test log: pytest, unittest, or swebench's parse_log_*.",
        rich_help_panel=_PANEL,
    ),
]


class ImportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one `gangline submit`."""

    harbor: Path | None
    terminal_bench: Path | None
    swe_bench: Path | None
    only: str | None
    oracle: bool
    image: str | None
    network: str | None
    repositories: str | None
    test_command: str | None
    log_parser: str | None

    @property
    def names_tasks(self) -> bool:
        """Raises: InvalidRequest when more than one kind is named, or options have nothing to be of."""
        named = [path for path in (self.harbor, self.terminal_bench, self.swe_bench) if path is not None]
        if len(named) > 1:
            raise InvalidRequest("give one of --harbor, --terminal-bench and --swe-bench.")
        if not named and (self.only or self.oracle or self.image or self.network or self.repositories):
            raise InvalidRequest(
                "--only, --oracle, --image, --network and --repositories go with --harbor, --terminal-bench or "
                "--swe-bench."
            )
        return bool(named)


def import_tasks(request: ImportRequest, runtime: str | None, *, is_quiet: bool = False) -> list[Imported]:
    """The tasks that the options name; unless `is_quiet`, notes about differences from their source go to stderr.

    Raises: InvalidRequest.
    """
    from gangline.domain.task import NetworkPolicy
    from gangline.importers.harbor import is_harbor_task, read_harbor_task
    from gangline.importers.imported import Choices
    from gangline.importers.terminal_bench import is_terminal_bench_task, read_terminal_bench_task

    if request.network is not None and request.network not in get_args(NetworkPolicy):
        raise InvalidRequest(f"--network {request.network}: must be one of {', '.join(get_args(NetworkPolicy))}.")
    choices = Choices(
        runtime=runtime,
        image=request.image,
        network=cast("NetworkPolicy | None", request.network),
        oracle=request.oracle,
    )
    if request.harbor is not None:
        folders = _task_folders("--harbor", request.harbor, is_harbor_task, request.only)
        tasks = [read_harbor_task(folder, choices) for folder in folders]
    elif request.terminal_bench is not None:
        folders = _task_folders("--terminal-bench", request.terminal_bench, is_terminal_bench_task, request.only)
        tasks = [read_terminal_bench_task(folder, choices) for folder in folders]
    else:
        tasks = _instances(request, choices)
    if not is_quiet:
        _tell_notes(tasks)
    return tasks


def _task_folders(option: str, folder: Path, is_task: Callable[[Path], bool], only: str | None) -> list[Path]:
    """The task in a folder, or those in its subfolders whose names match. Raises: InvalidRequest when there is none."""
    if not folder.is_dir():
        raise InvalidRequest(f"{option} {folder}: there is no such folder.")
    folders = [folder.resolve()] if is_task(folder) else sorted(path for path in folder.iterdir() if is_task(path))
    chosen = [path for path in folders if only is None or fnmatchcase(path.name, only)]
    if not chosen:
        raise InvalidRequest(f"{option} {folder}: holds no task{f' that matches {only!r}' if folders else ''}.")
    return chosen


def _instances(request: ImportRequest, choices: Choices) -> list[Imported]:
    from gangline.importers.swe_bench import InstanceChoices, read_instances

    assert request.swe_bench is not None
    how = InstanceChoices(
        repositories=request.repositories, test_command=request.test_command, log_parser=request.log_parser
    )
    return read_instances(request.swe_bench, choices, how, request.only)


def _tell_notes(tasks: list[Imported]) -> None:
    told = [note for task in tasks for note in task.notes]
    for note in told[:_MAX_SHOWN_NOTES]:
        notes().print(note, markup=False, soft_wrap=True, style="dim")
    if len(told) > _MAX_SHOWN_NOTES:
        notes().print(f"... and {len(told) - _MAX_SHOWN_NOTES} more of that kind", style="dim")
