"""The options of `gangline eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_REPORT, _BUDGET, _SERVICE = "Report", "Budget", "Service"

TasksArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE|-|NAME", help="Tasks, as for `gangline submit`; or the NAME[@REVISION] of a benchmark."
    ),
]
NameOption = Annotated[
    str | None, typer.Option("--name", help="Name of the evaluation. Default: the file's.", show_default=False)
]
SamplesOption = Annotated[int, typer.Option("--samples", min=1, help="Sessions of each task.")]
HarnessOption = Annotated[
    list[str] | None, typer.Option("--harness", help="Agent program instead of the tasks' own; repeatable.")
]
KOption = Annotated[
    str | None, typer.Option("--k", metavar="K,...", help="k of pass@k and pass^k. Default: 1 and --samples.")
]
PassOption = Annotated[float, typer.Option("--pass", help="Reward from which a session has passed.")]
ByOption = Annotated[
    list[str] | None, typer.Option("--by", help="Key of the tasks' metadata to break down by; repeatable.")
]
MarkdownOption = Annotated[
    Path | None, typer.Option("--markdown", help="Write the report there.", rich_help_panel=_REPORT)
]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", help="Write it as one HTML file, to be sent.", rich_help_panel=_REPORT)
]
PredictionsOption = Annotated[
    Path | None,
    typer.Option("--predictions", help="Write patches as SWE-bench's predictions.", rich_help_panel=_REPORT),
]
PricesOption = Annotated[
    str | None,
    typer.Option("--prices", metavar="IN,OUT", help="Of a million prompt and sampled tokens.", rich_help_panel=_BUDGET),
]
MaxCostOption = Annotated[
    float | None, typer.Option("--max-cost", min=0, help="Begin no task beyond it.", rich_help_panel=_BUDGET)
]
MaxHoursOption = Annotated[
    float | None, typer.Option("--max-hours", min=0, help="Begin no task after it.", rich_help_panel=_BUDGET)
]
InFlightOption = Annotated[int, typer.Option("--in-flight", min=1, help="Tasks at a time.", rich_help_panel=_BUDGET)]
EngineOption = Annotated[
    str | None,
    typer.Option("--engine", help="Start a service with it, as `gangline up --engine` does.", rich_help_panel=_SERVICE),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option("--tokenizer", help="Of a scripted engine, as for `gangline up`.", rich_help_panel=_SERVICE),
]
CaptureOption = Annotated[
    str | None,
    typer.Option("--capture", help="text for an engine that reports no token ids.", rich_help_panel=_SERVICE),
]
EngineKeyOption = Annotated[
    str | None,
    typer.Option("--engine-key-env", help="Variable with the engine's API key.", rich_help_panel=_SERVICE),
]
TasksFileOption = Annotated[
    Path | None,
    typer.Option("--tasks", help="Take each task's evaluator from this file, by task_id.", show_default=False),
]
RegradeNameOption = Annotated[
    str, typer.Option("--name", help="Name of the verdicts; it belongs to one evaluator of each task.")
]
