"""`gangline compare`: the difference between two evaluations, and whether it is significant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.cli.terminal.output import DataOption, JsonOption, console, print_json
from gangline.domain.errors import InvalidRequest, NotFound
from gangline.settings.machine import Settings
from gangline.tasks.commands.evals.view import comparison_lines, comparison_table

if TYPE_CHECKING:
    from gangline.tasks.evals.report import Report

NameArgument = Annotated[str, typer.Argument(help="Name of an evaluation, or the path of its folder.")]


def compare(first: NameArgument, second: NameArgument, data: DataOption = None, as_json: JsonOption = False) -> None:
    """Compare two evaluations task by task: the difference, its interval, and the tasks that got better or worse."""
    from gangline.tasks.evals.statistics import difference_of

    folder = (data or Settings.from_environ().data_dir).absolute() / "evals"
    one, other = _read(folder, first), _read(folder, second)
    difference = difference_of(one.tasks, other.tasks)
    if difference is None:
        raise InvalidRequest(f"{first} and {second} have no task in common that counts in both.")
    if as_json:
        print_json({"first": first, "second": second, "difference": difference})
        return
    for line in comparison_lines(first, second, difference):
        console().print(line, markup=False)
    if difference.better or difference.worse:
        console().print("", comparison_table(one, other, difference), sep="\n")


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
