"""`gangline data`: creates a dataset from recorded sessions, as a folder for Hugging Face's `datasets`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.cli.results.export_options import HeldOut, HeldOutOption, VerdictsOption, checked_outcomes, key_and_value
from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, notes, print_json
from gangline.cli.terminal.tables import FactTable
from gangline.domain.errors import InvalidRequest, NotFound
from gangline.tasks.datasets.kinds import Kind

if TYPE_CHECKING:
    from gangline.cli.results.records import Records, RequestOf
    from gangline.domain.views import Annotation
    from gangline.tasks.datasets.build import Dataset, DatasetSpec
    from gangline.tasks.datasets.selection import Recorded


def data(
    names: NamesArgument = None,
    out: OutOption = Path("dataset"),
    kind: KindOption = None,
    where: WhereOption = None,
    annotated: AnnotatedOption = None,
    min_reward: MinRewardOption = 1.0,
    outcome: OutcomeOption = None,
    resolved: ResolvedOption = False,
    max_tokens: MaxTokensOption = None,
    max_turns: MaxTurnsOption = None,
    per_task: PerTaskOption = None,
    keep_duplicates: DuplicatesOption = False,
    keep_cheats: CheatsOption = False,
    held_out: HeldOutOption = HeldOut.exclude,
    verdicts: VerdictsOption = None,
    by: ByOption = "repo",
    test_share: TestShareOption = 0.1,
    seed: SeedOption = 0,
    name: DatasetNameOption = None,
    license_name: LicenseOption = None,
    push: PushOption = None,
    dry_run: DryRunOption = True,
    public: PublicOption = False,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a dataset of recorded sessions: filter, deduplicate, split, and write Parquet with a dataset card.

    The folder loads with `datasets.load_dataset(FOLDER)`. Every row names its session. Exit code 4: none was accepted.
    """
    from gangline.cli.results.records import open_records
    from gangline.tasks.datasets.build import DatasetSpec
    from gangline.tasks.datasets.selection import Selection

    token = _token(push, dry_run)
    spec = DatasetSpec(
        name=name or out.absolute().name,
        kinds=tuple(dict.fromkeys(kind or ())) or (Kind.messages,),
        selection=Selection(
            annotated=annotated,
            min_reward=min_reward,
            outcomes=checked_outcomes(outcome or ("completed",)),
            resolved=resolved,
            cheats=keep_cheats,
            max_tokens=max_tokens,
            max_turns=max_turns,
            where=tuple(map(key_and_value, where or ())),
            per_task=per_task,
            duplicates=keep_duplicates,
            held_out=held_out is HeldOut.include,
        ),
        by=by,
        test_share=test_share,
        seed=seed,
    )
    made = _build(spec, open_records(data, server, verdicts), names, out, license_name)
    _show(made, out, as_json=as_json)
    _push(made, out, push, token, public=public)


def _annotations(records: Records, dataset: str, names: Sequence[str] | None) -> dict[str, Annotation]:
    """session id -> its newest annotation with a verdict, or its newest annotation. Raises: InvalidRequest,
    NotFound.
    """
    if names:
        raise InvalidRequest("name tasks and sessions, or a dataset of annotations with --annotated, but not both.")
    found: dict[str, Annotation] = {}
    for annotation in records.annotations(dataset):
        if annotation.session_id not in found or (
            found[annotation.session_id].verdict is None and annotation.verdict is not None
        ):
            found[annotation.session_id] = annotation
    if not found:
        raise NotFound(f"no annotation puts a session into the dataset {dataset!r}.")
    return dict(sorted(found.items(), key=lambda item: (item[1].task_id, item[0])))


def _build(
    spec: DatasetSpec, records: Records, names: Sequence[str] | None, out: Path, license_name: str | None
) -> Dataset:
    """Write rows and card, showing a count of the sessions on the terminal."""
    from gangline.tasks.datasets.build import build
    from gangline.tasks.datasets.card import write_card

    annotated = spec.selection.annotated
    annotations = None if annotated is None else _annotations(records, annotated, names)
    with records.requests() as request_of, notes().status("") as status:
        num = 0

        def count() -> None:
            nonlocal num
            num += 1
            status.update(f"session {num}")

        made = build(spec, RecordsSource(records, request_of, names or ("*",), annotations), out, on_session=count)
    write_card(made, out, license_name=license_name)
    return made


class RecordsSource:
    """Sessions of the named tasks, or the annotated sessions. `request_of` must outlive it."""

    def __init__(
        self,
        records: Records,
        request_of: RequestOf,
        names: Sequence[str],
        annotations: Mapping[str, Annotation] | None = None,
    ) -> None:
        self._records = records
        self._request_of = lru_cache(maxsize=8)(request_of)
        self._names = names
        self._said = annotations

    def sessions(self) -> Iterator[Recorded]:
        from gangline.cli.results.records import find_results_of
        from gangline.tasks.datasets.selection import Recorded

        if self._said is None:
            for result in find_results_of(self._records, self._names):
                yield Recorded(result, self._request_of(result.task_id))
            return
        for session_id, one in self._said.items():
            with suppress(NotFound):  # it has not ended, or was deleted
                yield self.read(one.task_id, session_id)

    def read(self, task_id: str, session_id: str) -> Recorded:
        from gangline.tasks.datasets.selection import Recorded

        result = self._records.read(task_id, session_id)
        if result is None:
            raise NotFound(f"session {session_id} was removed while the dataset was made.")
        verdict = None if self._said is None else self._said[session_id].verdict
        return Recorded(result, self._request_of(task_id), verdict)


def _token(push: str | None, dry_run: bool) -> str | None:
    """The token to publish with; None for a dry run. Raises: InvalidRequest."""
    if push is None or dry_run:
        return None
    token = os.environ.get("HF_TOKEN")
    if not token:
        raise InvalidRequest("--push --no-dry-run needs a token with write access in the variable HF_TOKEN.")
    return token


def _push(made: Dataset, out: Path, repository: str | None, token: str | None, *, public: bool) -> None:
    from gangline.tasks.datasets.hub import files_to_publish, publish

    if repository is None:
        return
    if token is None:
        listed = ", ".join(f"{one} ({(out / one).stat().st_size} bytes)" for one in files_to_publish(made))
        notes().print(f"Would publish to {repository}: {listed}. Add --no-dry-run to do it.", markup=False)
        return
    url = publish(made, out, repository, token=token, private=not public)
    notes().print(f"Published: {url}", markup=False, soft_wrap=True)


def _show(made: Dataset, out: Path, *, as_json: bool) -> None:
    from gangline.tasks.datasets.selection import HELD_OUT

    if as_json:
        print_json({"path": str(out), "dataset": made})
        return
    table = FactTable(made.by, "instances#", "attempts#", "accepted#", "rate#")
    for one in made.strata:
        counts = (one.num_instances, one.num_attempts, one.num_accepted)
        table.add_row(one.name, *map(str, counts), f"{one.rate:.1%}")
    console().print(table, "")
    for why, number in made.reasons.items():
        console().print(f"{number} {why}{'; --held-out include' if why == HELD_OUT else ''}", markup=False)
    for file in made.files:
        console().print(f"{out / file.path}: {file.num_rows} rows", markup=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    app.command("data")(data)


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
