"""`gangline compare`: the difference between two evaluations, and whether it is significant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.cli.terminal.output import (
    DataOption,
    JsonOption,
    ServerOption,
    console,
    open_command,
    print_json,
)
from gangline.domain.errors import NotFound, ServerUnavailable
from gangline.settings.machine import Settings
from gangline.tasks.commands.evals.options import HtmlOption
from gangline.tasks.commands.evals.page import comparison_page
from gangline.tasks.commands.evals.view import comparison_lines, comparison_table
from gangline.wire.client.running import find_service

if TYPE_CHECKING:
    from gangline.tasks.evals.report import Report

NameArgument = Annotated[str, typer.Argument(help="Name of an evaluation, or the path of its folder.")]


def compare(
    first: NameArgument,
    second: NameArgument,
    html: HtmlOption = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two evaluations task by task: the difference, its interval, and the tasks that got better or worse."""
    from gangline.tasks.evals.comparison import compare_reports

    folder = (data or Settings.from_environ().data_dir).absolute() / "evals"
    one, other = _read(folder, first), _read(folder, second)
    comparison = compare_reports(one, other)
    if html is not None:
        html.write_text(comparison_page(comparison, other.bar, _running_url(data, server)))
    if as_json:
        print_json({"first": first, "second": second, "difference": comparison.difference})
        return
    for line in comparison_lines(first, second, comparison):
        console().print(line, markup=False)
    if comparison.difference.better or comparison.difference.worse:
        console().print("", comparison_table(comparison), sep="\n")
    if one.evaluation_id and other.evaluation_id:
        part = f"evaluations/{other.evaluation_id}?with={one.evaluation_id}"
        console().print(f"Side by side on the page: {open_command(part, data, server)}", markup=False)


def _running_url(data: Path | None, server: str | None) -> str | None:
    """None if no service runs: then no session is a link."""
    try:
        return find_service(data, server).server_url
    except ServerUnavailable:
        return None


def _read(folder: Path, name: str) -> Report:
    """Raises: NotFound."""
    import msgspec

    from gangline.tasks.evals.report import Report

    for path in (folder / name / "report.json", Path(name) / "report.json"):
        if path.exists():
            return msgspec.json.decode(path.read_bytes(), type=Report)
    there = sorted(path.parent.name for path in folder.glob("*/report.json"))
    raise NotFound(f"there is no report of {name!r} in {folder}. There are: {', '.join(there) or 'none'}.")


def register(app: typer.Typer) -> None:
    app.command()(compare)
