"""`gangline tasks list` and `gangline tasks show`: inspect the tasks in a file before submitting them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

from gangline.cli.tasks.files import by_name, names_of, read_tasks
from gangline.cli.terminal.output import JsonOption, console, print_json, printable, printable_lines
from gangline.domain.errors import NotFound
from gangline.tasks.commands.benchmarks import names
from gangline.tasks.commands.importing import from_source

_GOES = {"runtime": 1, "source": 2, "solution": 3, "image": 4}

tasks = typer.Typer(no_args_is_help=True, help="Make tasks of other systems' tasks and datasets, and look at them.")

FileArgument = Annotated[str, typer.Argument(metavar="FILE|-", help="Tasks, as for `gangline submit`.")]


@tasks.command("list")
def list_(file: FileArgument, as_json: JsonOption = False) -> None:
    """List the tasks in a file: their source, place, grading and agent. `gangline list tasks` lists submitted ones."""
    found = read_tasks(file)
    rows = [_summary(name, task) for name, task in zip(names_of(found), found, strict=True)]
    if as_json:
        print_json(rows)
        return
    from gangline.cli.terminal.tables import Column, FactTable

    name, *others = rows[0]
    table = FactTable(name, *(Column(title, _GOES.get(title, 0)) for title in others))
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    console().print(table)


@tasks.command()
def show(
    file: FileArgument,
    name: Annotated[str | None, typer.Argument(help="A task's name; not needed where there is one task.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show one task of a file; with --json as it is submitted. `gangline status TASK` shows a submitted one."""
    found = read_tasks(file)
    task = _named(found, name, file)
    if as_json:
        print_json(task)
        return
    shown: Sequence[tuple[str, Any]] = (
        *_summary(name or names_of(found)[0], task).items(),
        ("limits", _at(task, "runtime", "limits")),
        ("seconds", task.get("timeout_seconds")),
        ("fields of the source", list(cast("dict[str, Any]", _at(task, "metadata", "instance") or {}))),
    )
    out = console()
    for field, value in shown:
        if value not in (None, [], {}):
            out.print(f"{field:<22}{printable(_cell(value))}", markup=False, soft_wrap=True)
    out.print(f"\n{printable_lines(str(task.get('instruction', '')))}", markup=False, soft_wrap=True)


def _named(found: list[dict[str, Any]], name: str | None, file: str) -> dict[str, Any]:
    """Raises: NotFound."""
    if name is None and len(found) == 1:
        return found[0]
    named = by_name(found, file)
    if name not in named:
        raise NotFound(
            f"{file}: holds {len(found)} tasks: name one, as `gangline tasks list` shows them."
            if name is None
            else f"{file}: holds no task {name!r}; `gangline tasks list` shows their names."
        )
    return named[name]


def _summary(name: str, task: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "source": _at(task, "metadata", "preset") or _at(task, "metadata", "source"),
        "runtime": _at(task, "runtime", "backend") or "sandbox",
        "image": _at(task, "runtime", "image"),
        "evaluator": _at(task, "evaluator", "strategy") or "session_completed",
        "harness": _at(task, "agent", "harness"),
        "solution": all("solution" in one for one in task.get("steps") or [task]),
        "verdict": _at(task, "vetting", "verdict"),
    }


def _at(task: dict[str, Any], *path: str) -> Any:
    value: Any = task
    for name in path:
        value = cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None
    return value


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, cast("list[Any]", value)))
    if value is None or value is False:
        return "-"
    return "yes" if value is True else str(value)


def register(app: typer.Typer) -> None:
    tasks.command("from")(from_source)
    tasks.command()(names)
    app.add_typer(tasks, name="tasks")
