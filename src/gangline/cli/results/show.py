"""`gangline show`: a session's turns, down to its tokens; or a task's sessions."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.cli.results.export_options import VerdictsOption
from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, run

if TYPE_CHECKING:
    from gangline.domain.session import SessionResult
    from gangline.domain.trajectory import Trace
    from gangline.server.web.outline import OpenedSession
    from gangline.server.web.tokens import TokenBytes


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
            help="Tokenizer: smollm2, a folder, or a Hugging Face name. Default: the model's if it is known, else that "
            "of an engine of the running service; without one only ids are shown."
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
    known = None
    if session is not None and (tokens or html is not None or picture is not None):
        from gangline.cli.results.known_texts import known_texts
        from gangline.server.web.outline import open_session

        opened = open_session(session)
        known = run(known_texts(opened, tokenizer, data, server))
        _save(opened, session, known, html, picture)
    if as_json:
        _write_json(results if session is None else session)
    elif session is None:
        from gangline.cli.results.session_view import task_view

        console().print(task_view(results))
    else:
        _show_session(session, _chosen(session, trace), known if tokens else None, full=full)


def _save(
    page: OpenedSession, result: SessionResult, known: Mapping[str, TokenBytes], html: Path | None, picture: Path | None
) -> None:
    if html is not None:
        from gangline.server.web.saved import saved_page

        html.write_bytes(saved_page(page, known))
    if picture is not None:
        from gangline.cli.results.picture import draw_trajectory

        draw_trajectory(result, picture, known)


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
    result: SessionResult, chosen: list[tuple[int, Trace]], known: Mapping[str, TokenBytes] | None, *, full: bool
) -> None:
    """known: texts of ids by tokenizer, if tokens are shown."""
    from gangline.cli.results.session_view import session_view, token_legend, tokens_view, trace_view

    lineages = {completion.completion_id: completion.lineage for completion in result.completions}
    out = console()
    out.print(session_view(result))
    for index, trace in chosen:
        out.print()
        out.print(trace_view(trace, index, lineages, full=full))
        if known is not None:
            from gangline.cli.results.known_texts import text_of

            out.print(tokens_view(trace, text_of(trace, result.completions, known)), soft_wrap=False)
    if known is not None and chosen:
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
