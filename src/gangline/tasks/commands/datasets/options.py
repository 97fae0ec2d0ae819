"""The options of `gangline data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gangline.tasks.datasets.kinds import Kind

_ACCEPT, _SPLIT, _PUBLISH = "Accepted sessions", "Split", "Publishing"


NamesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TASK|SESSION|PATTERN]...", help="Such as 'swe-*'. Default: all tasks.", show_default=False
    ),
]
OutOption = Annotated[Path, typer.Option("--out", help="Folder of the dataset; an earlier one in it is replaced.")]
KindOption = Annotated[
    list[Kind] | None,
    typer.Option(
        "--kind",
        help="Rows to write; repeatable, each is a configuration of the dataset. Default: messages.",
        show_default=False,
    ),
]
DatasetNameOption = Annotated[
    str | None, typer.Option("--name", help="Name of the dataset. Default: the folder's.", show_default=False)
]
LicenseOption = Annotated[
    str | None, typer.Option("--license", help="Its license, such as apache-2.0, for the card.", show_default=False)
]
WhereOption = Annotated[
    list[str] | None,
    typer.Option("--where", metavar="KEY=VALUE", help="Only tasks with this value in their metadata; repeatable."),
]
AnnotatedOption = Annotated[
    str | None,
    typer.Option(
        "--annotated",
        metavar="DATASET",
        help="Only sessions that an annotation, such as the page's, puts into this dataset. Verdicts good and bad take "
        "the place of the reward.",
        show_default=False,
    ),
]
MinRewardOption = Annotated[
    float, typer.Option("--min-reward", help="Reward from which a session is accepted.", rich_help_panel=_ACCEPT)
]
OutcomeOption = Annotated[
    list[str] | None,
    typer.Option("--outcome", help="Accepted outcomes; repeatable. Default: completed.", rich_help_panel=_ACCEPT),
]
ResolvedOption = Annotated[
    bool,
    typer.Option(
        "--resolved", help="Accept only if all fail-to-pass and pass-to-pass tests pass.", rich_help_panel=_ACCEPT
    ),
]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", min=1, help="Leave longer conversations out.", rich_help_panel=_ACCEPT)
]
MaxTurnsOption = Annotated[
    int | None, typer.Option("--max-turns", min=1, help="Leave longer conversations out.", rich_help_panel=_ACCEPT)
]
PerTaskOption = Annotated[
    int | None,
    typer.Option(
        "--per-task", min=1, help="Most accepted sessions of a task: the best, then shortest.", rich_help_panel=_ACCEPT
    ),
]
DuplicatesOption = Annotated[
    bool,
    typer.Option("--keep-duplicates", help="Keep sessions that say the same, too.", rich_help_panel=_ACCEPT),
]
CheatsOption = Annotated[
    bool,
    typer.Option(
        "--keep-cheats", help="Accept patches of protected files and spoiled grading, too.", rich_help_panel=_ACCEPT
    ),
]
ByOption = Annotated[
    str,
    typer.Option("--by", metavar="KEY", help="Metadata to stratify and to count by.", rich_help_panel=_SPLIT),
]
TestShareOption = Annotated[
    float,
    typer.Option("--test-share", min=0.0, max=0.9, help="Problems in the test split.", rich_help_panel=_SPLIT),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the split.", rich_help_panel=_SPLIT)]
PushOption = Annotated[
    str | None,
    typer.Option(
        "--push",
        metavar="OWNER/NAME",
        help="List what would be published there on the Hugging Face hub. With --no-dry-run, publish it: HF_TOKEN "
        "must be set.",
        rich_help_panel=_PUBLISH,
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run/--no-dry-run", help="For --push.", rich_help_panel=_PUBLISH)]
PublicOption = Annotated[
    bool, typer.Option("--public", help="A repository that --push creates is public.", rich_help_panel=_PUBLISH)
]
