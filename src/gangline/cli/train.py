"""`gangline train`: what learns from groups. Today: which algorithms there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from gangline.cli.output import JsonOption, console, print_json

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["register"]

train = typer.Typer(no_args_is_help=True, help="Train on groups of sessions.")


@train.callback()
def _train() -> None:  # pyright: ignore[reportUnusedFunction]
    """Keeps `algorithms` a command of its own while it is the only one."""


@train.command()
def algorithms(as_json: JsonOption = False) -> None:
    """List the algorithms, each as its difference from the base, which is GRPO."""
    from gangline.training.algorithms import OVERRIDES, Algorithm, algorithm, differences

    changes = {name: differences(algorithm(name)) for name in OVERRIDES}
    if as_json:
        print_json(
            {"base": Algorithm().model_dump(), "algorithms": {name: _document(one) for name, one in changes.items()}}
        )
        return
    console().print(_table(changes))


def _document(changes: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    return {setting: {"base": before, "value": after} for setting, (before, after) in changes.items()}


def _table(changes: dict[str, dict[str, tuple[Any, Any]]]) -> Table:
    from rich.table import Table

    table = Table("algorithm", "setting", "base", "value")
    for name, differing in changes.items():
        if not differing:
            table.add_row(name, "(the base)", "", "")
        for index, (setting, (before, after)) in enumerate(differing.items()):
            table.add_row("" if index else name, setting, str(before), str(after))
    return table


def register(app: typer.Typer) -> None:
    app.add_typer(train, name="train")
