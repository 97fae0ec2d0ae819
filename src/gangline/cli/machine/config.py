"""`gangline config`: the settings that commands would use, and their sources."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator
from typing import Annotated, Any

import typer
from pydantic_core import to_jsonable_python
from rich.text import Text

from gangline.cli.options.settings import COMMANDS, ConfigOption, given_to
from gangline.cli.terminal.output import JsonOption, console, print_json
from gangline.cli.terminal.tables import FactTable, prose
from gangline.domain.errors import InvalidRequest
from gangline.settings.fields import Leaf
from gangline.settings.service import LEAVES, Resolved, resolve

_PASSWORD = re.compile(r"((?<=://)[^:/@]*:|[?&]password=)[^@&]*")

config = typer.Typer(no_args_is_help=True, help="Show settings and where they come from.")


@config.command()
def show(
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OPTIONS", help="Behind `--`: options of --command, to see what they change.", show_default=False
        ),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--command", metavar="|".join(COMMANDS), help="Show the settings of one command, with its own defaults."
        ),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show each setting's value and where it came from: an option, an environment variable, the config file, a default.

    Secrets are shown only as the name of their environment variable.
    """
    if command is not None and command not in COMMANDS:
        raise InvalidRequest(f"--command must be one of {', '.join(COMMANDS)}, got {command!r}.")
    if options and command is None:
        raise InvalidRequest("options behind `--` are those of a command: name it with --command.")
    served = None if command is None else COMMANDS[command]
    given = {} if served is None else given_to(served, options or ())
    resolved = resolve(given, config=config, defaults=None if served is None else served.defaults)
    shown = list(_settings(resolved, LEAVES if served is None else served.keys))
    if as_json:
        print_json({"config_file": None if resolved.file is None else str(resolved.file), "settings": shown})
    else:
        _print(resolved, shown)


def _settings(resolved: Resolved, keys: Container[str]) -> Iterator[dict[str, Any]]:
    """In the order of the reference."""
    for key, leaf in LEAVES.items():
        if key in keys:
            source, where = resolved.origin(key)
            yield {"key": key, "value": _value(leaf, resolved.value(key)), "source": source, "where": where or None}


def _value(leaf: Leaf, value: Any) -> Any:
    """The value as JSON. Secrets, and passwords in URLs, are hidden."""
    if leaf.setting.is_secret:
        return None if value is None else f"${leaf.env[0]}"
    if leaf.key == "database_url" and value is not None:
        return _PASSWORD.sub(r"\1***", value)
    return to_jsonable_python(value)


def _print(resolved: Resolved, shown: list[dict[str, Any]]) -> None:
    out = console()
    out.print(f"Config file: {resolved.file or 'none'}", markup=False, soft_wrap=True)
    table = FactTable("setting", prose("value"), prose("from"))
    for one in shown:
        origin = Text(one["where"], "bold") if one["where"] else Text("default", "dim")
        table.add_row(one["key"], _text(one["value"]), origin)
    out.print(table)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def register(app: typer.Typer) -> None:
    app.add_typer(config, name="config")
