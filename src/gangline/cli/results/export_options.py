"""The options of `gangline export`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class RowFormat(StrEnum):
    parquet = "parquet"
    jsonl = "jsonl"
    msgpack = "msgpack"
    messages = "messages"
    atif = "atif"
    verifiers = "verifiers"
    csv = "csv"


class HeldOut(StrEnum):
    exclude = "exclude"
    include = "include"


SessionNames = Annotated[
    list[str],
    typer.Argument(metavar="TASK|SESSION|PATTERN...", help="Such as task-1, task-1.0, swe-*.", show_default=False),
]
FormatOption = Annotated[
    RowFormat,
    typer.Option(
        "--format",
        help="messages: main conversations in OpenAI's form, as JSON lines. atif: a folder with one document for each "
        "session, for Harbor's tools. verifiers: a folder with traces.jsonl, for "
        "verifiers and prime-rl. csv: one line for each session, with its reward, tokens, seconds and resources.",
    ),
]
FileNameOption = Annotated[
    str | None, typer.Option("--name", help="Name of the file. Default: the task's, else rows.", show_default=False)
]
WhereTaskOption = Annotated[
    list[str] | None,
    typer.Option("--where", metavar="KEY=VALUE", help="Only tasks with this value in their metadata; repeatable."),
]
OfOutcomeOption = Annotated[
    list[str] | None, typer.Option("--outcome", help="Only sessions that ended so; repeatable.")
]
LeastRewardOption = Annotated[
    float | None, typer.Option("--min-reward", help="Only sessions of at least this reward.", show_default=False)
]
BuilderOption = Annotated[
    str | None,
    typer.Option(
        "--builder",
        help='Build the rows anew: a builder\'s name, or JSON with its settings, such as {"strategy": "tree"}.',
        show_default=False,
    ),
]
WholePromptsOption = Annotated[
    bool, typer.Option("--whole-prompts", help="Write full prompts for rows that share them (builder `tree`).")
]
VerdictsOption = Annotated[
    str | None,
    typer.Option(
        "--verdicts",
        metavar="NAME",
        help="Rewards of `gangline regrade --name NAME` instead of the recorded ones; sessions without one are left "
        "out.",
        show_default=False,
    ),
]
HeldOutOption = Annotated[
    HeldOut,
    typer.Option(
        "--held-out",
        help="Sessions that measure: of `gangline eval`, a run's evaluations, tasks with `held_out`. They are left out "
        "and counted, also where they are named.",
    ),
]
