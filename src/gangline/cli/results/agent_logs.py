"""`gangline logs`: the output of a session's agent program, and other files kept with its result."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gangline.cli.terminal.output import (
    DataOption,
    JsonOption,
    ServerOption,
    console,
    notes,
    print_json,
    printable_lines,
)
from gangline.domain.errors import InvalidRequest, NotFound

_OUTPUT = ("harness.stdout", "harness.stderr")


def logs(
    session: Annotated[str, typer.Argument(metavar="SESSION")],
    name: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="One kept file, as the last lines of the output list them.")
    ] = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the stdout and stderr of a session's agent program, or one of the files kept with its result.

    With --json it prints one object, file name to text. On a terminal, control characters are replaced; into a pipe,
    FILE is written byte for byte.
    """
    from gangline.cli.results.records import find_results, open_records

    result = next(find_results(open_records(data, server), session))
    if result.session_id != session:
        raise InvalidRequest(f"{session} is a task; name one of its sessions, such as {result.session_id}.")
    kept = result.artifacts
    if name is not None and name not in kept:
        listed = ", ".join(sorted(kept)) or "none"
        raise NotFound(f"session {session} has no file {name!r}. Its files: {listed}.")
    if as_json:
        chosen = kept if name is None else {name: kept[name]}
        print_json({one: content.decode(errors="replace") for one, content in chosen.items()})
    elif name is not None:
        _write(kept[name])
    else:
        _print_output(kept)


def _write(content: bytes) -> None:
    if sys.stdout.isatty():
        console().print(printable_lines(content.decode(errors="replace")), markup=False, soft_wrap=True)
    else:
        sys.stdout.buffer.write(content)
        sys.stdout.flush()


def _print_output(kept: dict[str, bytes]) -> None:
    out = console()
    for name in _OUTPUT:
        text = printable_lines(kept.get(name, b"").decode(errors="replace"))
        out.print(f"[bold]{name.removeprefix('harness.')}[/]" + ("" if text else "  (nothing)"))
        if text:
            out.print(text, markup=False, soft_wrap=True)
    others = sorted(set(kept) - set(_OUTPUT))
    if others:
        notes().print(f"Other files, shown with `gangline logs SESSION FILE`: {', '.join(others)}", markup=False)


def register(app: typer.Typer) -> None:
    app.command("logs")(logs)
