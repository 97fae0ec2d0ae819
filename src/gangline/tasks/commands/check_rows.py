"""`gangline check-rows`: finds faults in rows of any system, from their files alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.cli.terminal.exits import Exit
from gangline.cli.terminal.output import JsonOption, console, print_json

if TYPE_CHECKING:
    from gangline.tasks.check_rows.check import Report
    from gangline.tasks.check_rows.kinds import Finding
    from gangline.tasks.check_rows.rules import Vocabulary

_SHOWN = 20
ColumnsOption = Annotated[
    str | None,
    typer.Option(
        "--map",
        metavar="NAME=COLUMN,...",
        help="Columns of rows of no known form, such as ids=tokens,mask=loss_mask,logprobs=lp. Names: ids, or "
        "prompt and response; mask, logprobs, versions, session, reward.",
    ),
]


def check_rows(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE|FOLDER...", help="JSON lines, JSON, MessagePack, Parquet, .pt.")
    ],
    form: Annotated[
        str | None,
        typer.Option(
            help="gangline, trl, openenv, verifiers, nemo_gym, slime, verl, atif or messages. Default: by its fields."
        ),
    ] = None,
    columns: ColumnsOption = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer of the rows: smollm2, a folder, or a Hugging Face name.")
    ] = None,
    stop_id: Annotated[list[int] | None, typer.Option(help="Id that ends a turn; repeatable.")] = None,
    pad_id: Annotated[int | None, typer.Option(help="Id of padding.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Recompute log-probs with this model: smollm2, a folder, or a Hugging Face name."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Temperature of the recorded log-probs, for --model.")] = 1.0,
    tolerance: Annotated[
        float, typer.Option(help="Largest mean |recomputed - recorded| log-prob of a sample, for --model.")
    ] = 0.05,
    limit: Annotated[int, typer.Option(help="Findings listed per file; all are counted.")] = 1000,
    as_json: JsonOption = False,
) -> None:
    """Check rows of any trainer or environment for faults; exit code 1 if there are any."""
    from gangline.cli.results.audit import load_score
    from gangline.tasks.check_rows.check import check_records
    from gangline.tasks.check_rows.dump import files_in, read_records

    vocabulary = _vocabulary(tokenizer, stop_id, pad_id)
    score = None if model is None else load_score(model)
    documents: list[dict[str, Any]] = []
    for path in (found for file in files for found in files_in(file)):
        report = check_records(
            read_records(path),
            form=form,
            columns=_columns(columns),
            vocabulary=vocabulary,
            score=score,
            temperature=temperature,
            tolerance=tolerance,
            limit=limit,
        )
        documents.append(_document(path, report))
        if not as_json:
            _print(path, report)
    ok = all(document["ok"] for document in documents)
    if as_json:
        print_json({"ok": ok, "files": documents})
    if not ok:
        raise typer.Exit(Exit.FAILED)


def _columns(text: str | None) -> dict[str, str]:
    """Raises: InvalidRequest."""
    from gangline.domain.errors import InvalidRequest

    pairs = [one.partition("=") for one in (text or "").split(",") if one]
    if wrong := [name for name, _, column in pairs if not name.strip() or not column.strip()]:
        raise InvalidRequest(f"--map takes NAME=COLUMN, such as ids=tokens; got {wrong[0]!r}")
    return {name.strip(): column.strip() for name, _, column in pairs}


def _vocabulary(tokenizer: str | None, stop_ids: list[int] | None, pad_id: int | None) -> Vocabulary:
    from gangline.tasks.check_rows.rules import Vocabulary

    if tokenizer is None:
        return Vocabulary(stop_ids=frozenset(stop_ids or ()), pad_id=pad_id)
    from transformers import AutoTokenizer

    from gangline.domain.errors import NotFound
    from gangline.models.language.models import resolve_model

    folder = resolve_model(tokenizer)
    loader: Any = AutoTokenizer
    try:
        found = loader.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise NotFound(f"{folder} does not hold a tokenizer that can be loaded: {error}") from error
    stops = {*(stop_ids or ()), *([] if found.eos_token_id is None else [found.eos_token_id])}
    pad = found.pad_token_id if pad_id is None else pad_id
    return Vocabulary(
        size=len(found),
        stop_ids=frozenset(stops),
        pad_id=None if pad in stops else pad,
        special_ids=frozenset(found.all_special_ids),
    )


def _document(path: Path, report: Report) -> dict[str, Any]:
    import msgspec

    from gangline.tasks.check_rows.kinds import KINDS

    kinds = {kind: msgspec.to_builtins(KINDS[kind]) for kind in report.counts}
    return {"file": str(path), "ok": report.ok, "kinds": kinds, **msgspec.to_builtins(report)}


def _print(path: Path, report: Report) -> None:
    from rich.text import Text

    from gangline.cli.terminal.tables import FactTable, prose
    from gangline.tasks.check_rows.kinds import KINDS

    out = console()
    forms = ", ".join(f"{num} {form}" for form, num in report.forms.items())
    out.print(
        f"{path}: {report.num_records} records ({forms or 'none'}), {report.num_samples} samples, "
        f"{report.num_tokens} tokens, {report.num_trained} trained",
        markup=False,
        soft_wrap=True,
    )
    if report.mean_difference is not None:
        out.print(
            f"recomputed log-probs of {report.recomputed_tokens} tokens: |Δ| {report.mean_difference:.2g} on average"
        )
    if report.ok:
        out.print("✓ no finding", style="green")
        return
    table = FactTable("finding", "times#", prose("meaning"), prose("way out"))
    for kind, num in report.counts.items():
        style = "red" if KINDS[kind].severity == "error" else "yellow"
        table.add_row(Text(kind, style), str(num), KINDS[kind].meaning, KINDS[kind].advice)
    out.print(table)
    if report.given_up:
        out.print(f"none of the first {report.num_records} records can be read: the others were not tried")
    grouped: dict[str, list[Finding]] = {}
    for finding in report.findings:
        if finding.position is None and finding.kind in ("unreadable", "no_tokens"):
            grouped.setdefault(f"{finding.kind}: {finding.detail}", []).append(finding)
    for words, same in grouped.items():
        rows = f"row {same[0].row}" if len(same) == 1 else f"{len(same)} rows, the first is {same[0].row}"
        out.print(f"{rows}: {words}", markup=False, soft_wrap=True)
    single = [one for one in report.findings if one.kind not in ("unreadable", "no_tokens")]
    for finding in single[:_SHOWN]:
        place = "" if finding.position is None else f", position {finding.position}"
        number = "" if finding.sample == 1 else f", sample {finding.sample}"
        out.print(f"row {finding.row}{number}{place}: {finding.kind}: {finding.detail}", markup=False, soft_wrap=True)
    if sum(report.counts.values()) > _SHOWN and single:
        out.print(f"... {sum(report.counts.values())} in all; --json lists them")


def register(app: typer.Typer) -> None:
    app.command("check-rows")(check_rows)
