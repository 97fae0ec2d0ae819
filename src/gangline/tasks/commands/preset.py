"""`gangline preset`: ready-made task families, and sample tasks."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from gangline.cli.terminal.output import JsonOption, console, print_json
from gangline.tasks.commands.importing import found_preset

preset = typer.Typer(no_args_is_help=True, help="Task families that are ready to use: swe, stem, math, code.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Preset: swe, stem, math or code.")]


@preset.command("list")
def list_(as_json: JsonOption = False) -> None:
    """List the presets, each with the dataset whose rows it reads."""
    from gangline.tasks.presets.preset import PRESETS

    if as_json:
        print_json([{"name": one.name, "purpose": one.purpose, "dataset": one.dataset} for one in PRESETS])
        return
    from gangline.cli.terminal.tables import FactTable, prose

    table = FactTable("name", prose("purpose"), prose("dataset"))
    for one in PRESETS:
        table.add_row(one.name, one.purpose, one.dataset)
    console().print(table)


@preset.command()
def show(name: NameArgument) -> None:
    """Print a preset's task template as JSON. `{field}` stands for a field of a row."""
    sys.stdout.write(json.dumps(found_preset(name).template, indent=2) + "\n")


@preset.command()
def tasks(
    name: NameArgument,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Samples to generate.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the generated samples.")] = 0,
) -> None:
    """Print generated sample tasks of a preset, one a line, for `gangline submit -`.

    `gangline tasks from DATA --preset NAME` makes tasks of its dataset's rows.
    """
    from gangline.tasks.presets.preset import NUM_SAMPLES

    found = found_preset(name)
    for sample in found.samples(limit or NUM_SAMPLES, seed):
        sys.stdout.write(json.dumps(found.solved(sample)) + "\n")


def register(app: typer.Typer) -> None:
    app.add_typer(preset, name="preset")
