"""Options of `gangline tasks from`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_PLACE = "Where they run"
_ROWS = "Rows of datasets"

SourceArgument = Annotated[
    str,
    typer.Argument(
        help="A task folder or a folder of them, a file of rows, a Hugging Face dataset's folder, the NAME[@REVISION] "
        "of a benchmark, inspect:FILE@TASK, verifiers:TASKSET, tau2:DOMAIN."
    ),
]
FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="PATH",
        help="Your copy of a benchmark's files, as they are published. Default: they are fetched.",
        show_default=False,
    ),
]
FormatOption = Annotated[
    str | None,
    typer.Option("--format", help="harbor, terminal-bench, swe or rows. Default: recognized.", show_default=False),
]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="Number of tasks.")]
FilterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        metavar="[FIELD=]PATTERN",
        help="Only tasks whose name, or field of the source, matches, such as 'repo=django/*'; repeatable.",
        show_default=False,
    ),
]
OutOption = Annotated[Path | None, typer.Option("--out", help="File for the tasks. Default: stdout.")]
PrefixOption = Annotated[
    str | None,
    typer.Option("--prefix", help="Give tasks the ids PREFIX-NAME, in place of NAME."),
]
PresetOption = Annotated[
    str | None, typer.Option("--preset", help="Preset of the rows: swe, stem, math, code.", rich_help_panel=_ROWS)
]
MapOption = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="FIELD=COLUMN",
        help="Column for instruction, answer, choices, files, image or a column of the preset; repeatable.",
        show_default=False,
        rich_help_panel=_ROWS,
    ),
]
SplitOption = Annotated[
    str | None, typer.Option("--split", help="Split of a dataset's folder, or of a benchmark.", rich_help_panel=_ROWS)
]
StrictOption = Annotated[
    bool,
    typer.Option("--strict", help="Write nothing when a row cannot be read or graded, in place of leaving it out."),
]
RuntimeOption = Annotated[
    str | None, typer.Option("--runtime", help="Runtime: sandbox, docker, ...", rich_help_panel=_PLACE)
]
ImageOption = Annotated[
    str | None,
    typer.Option(
        "--image",
        help="Image, or root folder for the sandbox; {instance_id} is filled in for the SWE family.",
        rich_help_panel=_PLACE,
    ),
]
NetworkOption = Annotated[
    str | None,
    typer.Option(
        "--network",
        help="Network of agents and tests: proxy, none, full, list (the hosts that a Harbor task names).",
        rich_help_panel=_PLACE,
    ),
]
PythonOption = Annotated[
    str | None,
    typer.Option(
        "--python",
        metavar="FOLDER",
        help="Python environment on the nodes and here that has inspect-ai (default: this one), verifiers or "
        "tau2-bench.",
        show_default=False,
        rich_help_panel=_PLACE,
    ),
]
RepositoriesOption = Annotated[
    str | None,
    typer.Option(
        "--repositories",
        metavar="FOLDER",
        help="Folder of clones named owner__name: for the SWE family without images, as a path inside the runtime; "
        "for --registry, on this machine.",
        rich_help_panel=_PLACE,
    ),
]
RegistryOption = Annotated[
    Path | None,
    typer.Option(
        "--registry",
        metavar="FILE",
        help="Registry of Harbor (registry.json); SOURCE is then the NAME@VERSION of one of its datasets.",
        show_default=False,
    ),
]
TestCommandOption = Annotated[
    str | None,
    typer.Option(
        "--test-command",
        help="SWE family: command that runs the tests; {tests} stands for their files.",
        rich_help_panel=_PLACE,
    ),
]
LogParserOption = Annotated[
    str | None,
    typer.Option(
        "--log-parser",
        help="SWE family: parser of the test log: pytest, unittest, or swebench's parse_log_*.",
        rich_help_panel=_PLACE,
    ),
]
