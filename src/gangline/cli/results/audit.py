"""`gangline audit`: compares rows with the journal and, with a model, recorded log-probs with recomputed ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.cli.terminal.exits import Exit
from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, notes, print_json

if TYPE_CHECKING:
    from gangline.cli.terminal.tables import FactTable
    from gangline.domain.session import SessionResult
    from gangline.domain.trajectory import Trace, Trajectory
    from gangline.rows.audit import AuditReport
    from gangline.rows.logprob_audit import LogprobDifferences, Score

_SHOWN_VIOLATIONS = 20
TOLERANCE = 1e-3


def audit(
    name: Annotated[str, typer.Argument(metavar="TASK|SESSION|PATTERN")],
    model: Annotated[
        str | None,
        typer.Option(help="Recompute log-probs with this model: smollm2, a folder, or a Hugging Face name."),
    ] = None,
    policy_version: Annotated[
        int | None, typer.Option(help="Compare only tokens of this policy version; --model must be that version.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Largest mean |recomputed - recorded| log-prob of turns without splices.")
    ] = TOLERANCE,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check rows against the sampled tokens; exit code 1 if any differ."""
    from gangline.cli.results.records import find_results_of, open_records

    results = find_results_of(open_records(data, server), [name])
    document = audit_results(results, model=model, policy_version=policy_version, tolerance=tolerance)
    if as_json:
        print_json(document)
    else:
        print_audit(name, document)
    if not document["ok"]:
        raise typer.Exit(Exit.FAILED)


def audit_results(
    results: Iterable[SessionResult],
    *,
    model: str | None = None,
    policy_version: int | None = None,
    tolerance: float = TOLERANCE,
) -> dict[str, Any]:
    """The audit of many sessions as one JSON document.

    Keys: ok, report (`AuditReport`), logprobs (turn class -> `LogprobStats`; None without a model), not_comparable
    (reason -> tokens), problems (in words).
    Raises: NotFound when there are no rows to audit, or no such model; BuilderError.
    """
    import msgspec

    from gangline.domain.errors import NotFound
    from gangline.rows.audit import audit as audit_trajectory
    from gangline.rows.audit import merge_reports

    reports: list[AuditReport] = []

    def audited() -> Iterator[Trajectory]:
        """One session at a time: together they may exceed memory."""
        for result in results:
            if result.trajectory is not None:
                reports.append(audit_trajectory(result.trajectory, result.completions))
                yield result.trajectory

    trajectories = audited()
    first = next(trajectories, None)
    if first is None:
        raise NotFound("there is nothing to audit: no session has a trajectory.")
    whole = chain([first], trajectories)
    differences = None if model is None else _compare(whole, load_score(model), policy_version)
    for _ in whole:  # not consumed yet without a model
        pass
    report = merge_reports(reports)
    if report.num_traces == 0:
        raise NotFound(
            f"there is nothing to audit: {report.num_sessions} sessions have no rows, because none of their model "
            "calls was completed. `gangline show TASK` lists how they ended."
        )
    problems = [violation.message for violation in report.violations]
    if report.num_trained_tokens == 0:
        problems.append("nothing was proved: these rows have no trainable token; `gangline show SESSION` says why.")
    if differences is not None:
        problems += _disagreements(differences, tolerance)
    return {
        "ok": not problems,
        "problems": problems,
        "report": msgspec.to_builtins(report),
        "logprobs": None if differences is None else msgspec.to_builtins(differences.stats()),
        "not_comparable": {} if differences is None else differences.not_comparable,
    }


def _compare(trajectories: Iterable[Trajectory], score: Score, version: int | None) -> LogprobDifferences:
    from gangline.rows.logprob_audit import compare_logprobs

    with notes().status("") as status:
        num_done = 0

        def tell(_: Trace) -> None:
            nonlocal num_done
            num_done += 1
            status.update(f"re-computing log-probs: row {num_done}")

        return compare_logprobs(trajectories, score, version=version, on_trace=tell)


def _disagreements(differences: LogprobDifferences, tolerance: float) -> Iterator[str]:
    for name, stats in differences.stats().items():
        # `not <=`, so that NaN does not pass. Spliced turns are not judged: their context is declared inexact.
        if name != "spliced" and not stats.mean <= tolerance:
            yield (
                f"{name}: re-computed and recorded log-probs differ by {stats.mean:.2g} on average, more than "
                f"{tolerance:.2g}; is this the model, and the version, that sampled them?"
            )


def load_score(model: str) -> Score:
    """Teacher forcing with transformers' implementation in float32, independent of our engines.

    Raises: NotFound when the model is not on this machine.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    from gangline.domain.errors import NotFound
    from gangline.models.language.models import resolve_model
    from gangline.settings.wings import wing_part

    score_logprobs = wing_part("score_logprobs")
    hf_logging.disable_progress_bar()
    folder = resolve_model(model)
    loader: Any = AutoModelForCausalLM
    try:
        scorer = loader.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True).eval()
    except (OSError, ValueError) as error:
        raise NotFound(f"{folder} does not hold a model that can be loaded: {error}") from error
    return lambda ids, temperature: score_logprobs(scorer, ids.tolist(), temperature).numpy()


def print_audit(name: str, document: dict[str, Any]) -> None:
    """Print the document of `audit_results`."""
    from gangline.domain.unshown import UNSHOWN_GUIDE

    out, report = console(), document["report"]
    out.print(
        f"[bold]{name}[/]: {report['num_sessions']} sessions, {report['num_traces']} rows, "
        f"{report['num_completions']} completions, {report['num_sampled_tokens']} sampled tokens, "
        f"{report['num_trained_tokens']} of them trainable"
    )
    out.print(_classes_table(document))
    if report["dropped"]["turns"]:
        out.print(
            f"dropped by the builder: {report['dropped']['turns']} turns, "
            f"{report['dropped']['tokens']} sampled tokens: "
            f"{'; '.join(report['drop_reasons'])}",
            markup=False,
            soft_wrap=True,
        )
    if num := report["num_unshown"]:
        note = f"not shown to the model: tools, or their results, of {num} of {report['num_completions']} calls"
        out.print(f"{note}: {UNSHOWN_GUIDE}", style="yellow", markup=False, soft_wrap=True)
    if report["renderings"]:
        note = ", ".join(f"{num} {name.replace('_', ' ')}" for name, num in report["renderings"].items())
        out.print(f"stitched prompts: {note}", markup=False, soft_wrap=True)
    for reason, num in report["left_out"].items():
        out.print(f"left out by trainers: {num} tokens, {reason}", markup=False, soft_wrap=True)
    for reason, num in document["not_comparable"].items():
        out.print(f"not compared: {num} tokens, {reason}", markup=False)
    for problem in document["problems"][:_SHOWN_VIOLATIONS]:
        out.print(f"✗ {problem}", style="red", markup=False)
    if len(document["problems"]) > _SHOWN_VIOLATIONS:
        out.print(f"... and {len(document['problems']) - _SHOWN_VIOLATIONS} more; --json lists all", style="red")
    if document["ok"]:
        out.print(
            "✓ every trainable token is a sampled token, once, with its log-prob, version and context", style="green"
        )


def _classes_table(document: dict[str, Any]) -> FactTable:
    from gangline.cli.terminal.tables import FactTable

    logprobs = document["logprobs"]
    differences = () if logprobs is None else ("|Δ log-prob| mean#", "p50#", "p99#", "max#")
    table = FactTable("context", "turns#", "tokens#", *differences)
    for name, count in sorted(document["report"]["classes"].items()):
        cells = [name, str(count["turns"]), str(count["tokens"])]
        if logprobs is not None and name in logprobs:
            cells += [f"{logprobs[name][key]:.1e}" for key in ("mean", "p50", "p99", "max")]
        table.add_row(*cells)
    return table


def register(app: typer.Typer) -> None:
    app.command("audit")(audit)
