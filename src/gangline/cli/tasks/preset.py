"""`gangline preset`: task families that are ready to use, and tasks of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.cli.terminal.output import JsonOption, console, notes, print_json
from gangline.domain.errors import UnknownPlugin

if TYPE_CHECKING:
    from gangline.presets.preset import Preset

__all__ = ["register"]

preset = typer.Typer(no_args_is_help=True, help="Task families that are ready to use: swe, stem, math, code.")

_MAX_SHOWN_NOTES = 10

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Preset: swe, stem, math or code.")]


@preset.command("list")
def list_(as_json: JsonOption = False) -> None:
    """List the presets, each with the dataset whose rows it reads."""
    from gangline.presets.preset import PRESETS

    if as_json:
        print_json([{"name": one.name, "purpose": one.purpose, "dataset": one.dataset} for one in PRESETS])
        return
    from rich.table import Table

    table = Table("name", "purpose", "dataset", box=None)
    for one in PRESETS:
        table.add_row(one.name, one.purpose, one.dataset)
    console().print(table)


@preset.command()
def show(name: NameArgument) -> None:
    """Print a preset's task template as JSON. `{field}` stands for a field of a row."""
    sys.stdout.write(json.dumps(_find(name).template, indent=2) + "\n")


@preset.command()
def tasks(
    name: NameArgument,
    dataset: Annotated[
        Path | None,
        typer.Option("--dataset", help="Rows of the dataset: JSON lines, JSON or Parquet. Default: generated samples."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Rows to read, or samples to generate.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the generated samples.")] = 0,
) -> None:
    """Print a preset's tasks, one a line, for `gangline submit -`.

    Rows that have nothing to grade by are left out and reported on stderr.
    """
    found = _find(name)
    for body in _samples(found, limit, seed) if dataset is None else _rows(found, dataset, limit):
        sys.stdout.write(json.dumps(body) + "\n")


def _find(name: str) -> Preset:
    """Raises: UnknownPlugin."""
    from gangline.presets.preset import PRESETS, find_preset

    if (found := find_preset(name)) is None:
        raise UnknownPlugin.named("preset", name, [one.name for one in PRESETS])
    return found


def _samples(found: Preset, limit: int | None, seed: int) -> list[dict[str, Any]]:
    from gangline.presets.preset import NUM_SAMPLES

    return [found.solved(sample) for sample in found.samples(limit or NUM_SAMPLES, seed)]


def _rows(found: Preset, path: Path, limit: int | None) -> list[dict[str, Any]]:
    from gangline.importers.preset_rows import read_preset_rows
    from gangline.presets.rows.unsuitable import RowUnsuitable

    rows = read_preset_rows(path, found, limit)
    left_out = [row for row in rows if isinstance(row, RowUnsuitable)]
    for error in left_out[:_MAX_SHOWN_NOTES]:
        notes().print(f"left out: {error.message}", markup=False, soft_wrap=True, style="dim")
    if left_out:
        notes().print(f"{len(left_out)} of {len(rows)} rows left out", style="dim")
    return [row.body for row in rows if not isinstance(row, RowUnsuitable)]


def register(app: typer.Typer) -> None:
    app.add_typer(preset, name="preset")
