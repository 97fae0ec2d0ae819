"""`gangline show`: a session's turns, down to its tokens; or a task's sessions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.cli.results.export_options import VerdictsOption
from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, run

if TYPE_CHECKING:
    from gangline.domain.session import SessionResult
    from gangline.domain.trajectory import Trace


def show(
    name: Annotated[str, typer.Argument(metavar="TASK|SESSION")],
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show every token with its mask, log-prob and turn borders.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Show messages and tool results in full.")] = False,
    trace: Annotated[int | None, typer.Option(help="Show only this trace; 0 is the first.", show_default=False)] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Tokenizer: smollm2, a folder, or a Hugging Face name. Default: the model's if it is known, else only "
            "ids; for --html also the running engine's."
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the session into this PNG file.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Save the session's page in this file, with every token.", show_default=False),
    ] = None,
    verdicts: VerdictsOption = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a session: its turns with messages, tool results and certificates; its tokens. For a task: its sessions.

    `gangline logs SESSION` prints the output of the agent program.
    """
    from gangline.cli.results.records import find_results, open_records
    from gangline.domain.errors import InvalidRequest

    results = find_results(open_records(data, server, verdicts), name)
    session = next(results, None)
    if session is None or session.session_id != name:  # a task's sessions, taken one at a time: they may be many
        results = chain([] if session is None else [session], results)
        session = None
    if session is None and (tokens or trace is not None or picture is not None or html is not None):
        raise InvalidRequest(f"{name} is a task; name one of its sessions: {_names(results)}.")
    if as_json:
        _write_json(results if session is None else session)
    elif session is None:
        from gangline.cli.results.session_view import task_view

        console().print(task_view(results))
    else:
        _show_session(session, tokens, trace, tokenizer, full=full)
    if html is not None and session is not None:
        _save_page(session, html, tokenizer, data, server)
    if picture is not None and session is not None:
        from gangline.cli.results.picture import draw_trajectory
        from gangline.cli.results.token_runs import find_text_of

        draw_trajectory(session, picture, text_of=find_text_of(tokenizer, session))


def _save_page(result: SessionResult, path: Path, tokenizer: str | None, data: Path | None, server: str | None) -> None:
    """Raises: OSError; NotFound when the named tokenizer is unavailable."""
    from gangline.cli.results.known_texts import known_texts
    from gangline.server.web.outline import open_session
    from gangline.server.web.saved import saved_page

    session = open_session(result)
    path.write_bytes(saved_page(session, run(known_texts(session, tokenizer, data, server))))


def _names(results: Iterator[SessionResult]) -> str:
    shown = ", ".join(result.session_id for result in islice(results, 4))
    return f"{shown}, ..." if next(results, None) is not None else shown


def _write_json(document: SessionResult | Iterator[SessionResult]) -> None:
    """One JSON document: the session, or a list of sessions."""
    out = sys.stdout.buffer
    if isinstance(document, Iterator):
        out.write(b"[")
        for number, result in enumerate(document):
            out.write((b"," if number else b"") + _as_json(result))
        out.write(b"]\n")
    else:
        out.write(_as_json(document) + b"\n")
    sys.stdout.flush()


def _as_json(result: SessionResult) -> bytes:
    """Kept files become text, as in `gangline logs --json`, instead of base64."""
    from msgspec.structs import asdict

    from gangline.domain.tokens import encode_json

    files = {name: content.decode(errors="replace") for name, content in result.artifacts.items()}
    return encode_json({**asdict(result), "artifacts": files})


def _show_session(
    result: SessionResult, tokens: bool, number: int | None, tokenizer: str | None, *, full: bool
) -> None:
    from gangline.cli.results.session_view import session_view, token_legend, tokens_view, trace_view
    from gangline.cli.results.token_runs import find_text_of

    chosen = _chosen(result, number)
    text_of = find_text_of(tokenizer, result) if tokens else None
    lineages = {completion.completion_id: completion.lineage for completion in result.completions}
    out = console()
    out.print(session_view(result))
    for index, trace in chosen:
        out.print()
        out.print(trace_view(trace, index, lineages, full=full))
        if tokens:
            out.print(tokens_view(trace, text_of), soft_wrap=False)
    if tokens and chosen:
        out.print()
        out.print(token_legend())


def _chosen(result: SessionResult, number: int | None) -> list[tuple[int, Trace]]:
    from gangline.domain.errors import NotFound

    traces = list(enumerate(() if result.trajectory is None else result.trajectory.traces))
    if number is None:
        return traces
    if not 0 <= number < len(traces):
        raise NotFound(f"session {result.session_id} has {len(traces)} traces; there is no trace {number}.")
    return [traces[number]]


def register(app: typer.Typer) -> None:
    app.command("show")(show)
