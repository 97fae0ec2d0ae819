"""The one command loads what it runs."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from gangline.cli.commands import COMMANDS, load_command, module_of
from gangline.cli.main import build_app, load
from gangline.domain.errors import InvalidRequest

HEAVY = {"numpy", "httpx", "aiohttp", "sqlalchemy", "asyncio"}
"""Typer itself uses pydantic as soon as there is a value to read."""
SHORT = ("status", "cancel", "show", "gate", "backend", "runs", "list", "logs", "down", "drain", "actions", "open")


def imported(*arguments: str, among: Iterable[str], **environment: str) -> set[str]:
    """Those of the modules that `gangline ARGUMENTS` imports."""
    program = (
        "import sys\nfrom gangline.cli.main import load\n"
        "try:\n    load(sys.argv[1:])()\nfinally:\n    sys.stderr.write('\\n' + '\\n'.join(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env={**os.environ, **environment}, capture_output=True, text=True
    )
    loaded = set(done.stderr.splitlines())
    assert "gangline.cli.main" in loaded
    return loaded & set(among)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_table_has_the_first_paragraph_of_a_commands_help(command: str) -> None:
    loaded = load_command(command)
    first, *_ = inspect.cleandoc(loaded.help).split("\n\n")
    assert COMMANDS[command].help == " ".join(first.split())
    assert loaded.name == command
    assert not loaded.hidden


def test_the_help_of_all_shows_every_line() -> None:
    shown = CliRunner().invoke(build_app(), ["--help"], env={"COLUMNS": "300"}).output
    found = dict(re.findall(r"│ ([a-z-]+) +(\S.*?) +│", shown))
    assert {name: found[name] for name in COMMANDS} == {name: line.help for name, line in COMMANDS.items()}


def test_the_help_has_every_command_in_one_panel_of_few() -> None:
    shown = CliRunner().invoke(build_app(), ["--help"], env={"COLUMNS": "300"}).output
    panels = re.findall(r"╭─ (\w+) ─.*?╮\n(.*?)╰", shown, flags=re.DOTALL)
    named = {panel: re.findall(r"^│ ([a-z-]+) ", lines, flags=re.MULTILINE) for panel, lines in panels}
    assert list(named) == ["Options", "Start", "Run", "Look", "Data", "Train", "Operate"]
    del named["Options"]
    assert sorted(name for names in named.values() for name in names) == sorted(COMMANDS)


@pytest.mark.parametrize("command", ["up", "server", "node"])
def test_no_panel_of_options_is_long(command: str) -> None:
    shown = CliRunner().invoke(build_app(), [command, "--help"], env={"COLUMNS": "300"}).output
    panels = dict(re.findall(r"╭─ ([\w ]+?) ─.*?╮\n(.*?)╰", shown, flags=re.DOTALL))
    options = {panel: re.findall(r"^│ (--[a-z-]+)", lines, flags=re.MULTILINE) for panel, lines in panels.items()}
    assert "--engine" in options.get("Engines", ()) or command == "server"
    assert all(0 < len(names) <= 13 for names in options.values()), options


def test_the_help_of_all_imports_no_command_and_nothing_heavy() -> None:
    commands = set(map(module_of, COMMANDS))
    wings = {f"gangline.{name}" for name in ("interop", "serving", "tasks", "testing", "train")}
    assert imported("--help", among={*HEAVY, "pydantic", *commands, *wings}) == set()
    assert imported("submitt", among={*HEAVY, *commands}) == set()


def test_names_are_completed_without_their_commands() -> None:
    asked = {"_GANGLINE_COMPLETE": "complete_bash", "COMP_WORDS": "gangline sta", "COMP_CWORD": "1"}
    commands = set(map(module_of, COMMANDS))
    assert imported(among={*HEAVY, *commands}, **asked) == set()


@pytest.mark.parametrize("command", SHORT)
def test_a_short_command_starts_without_numpy(command: str) -> None:
    others = set(map(module_of, COMMANDS)) - {module_of(command)}
    assert imported(command, "--help", among={"numpy", "sqlalchemy", *others}) == set()


@pytest.mark.parametrize(
    ("words", "completed"),
    [("gangline sta", "status"), ("gangline gate pa", "pause"), ("gangline status --ser", "--server")],
)
def test_a_shell_completes_names_and_options(words: str, completed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"_GANGLINE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = CliRunner().invoke(build_app(), [], prog_name="gangline", env=environment)
    assert completed in done.output.split()


def test_a_wrong_name_is_told_the_nearest() -> None:
    done = CliRunner().invoke(build_app(), ["submitt"])
    assert done.exit_code == 2
    assert "Did you mean 'submit'?" in done.output


def test_a_command_whose_wing_is_not_there_says_so_and_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline.cli.commands.wing_entries", lambda _group: {})
    with pytest.raises(InvalidRequest, match="`gangline train` is not part of this installation"):
        CliRunner().invoke(build_app(), ["train", "run", "x.yaml"], catch_exceptions=False)
    listed = CliRunner().invoke(build_app(), ["--help"]).output
    assert "submit" in listed
    assert "Train on groups" not in listed


def test_a_group_shows_its_commands() -> None:
    group: Any = load_command("gate")
    done = CliRunner().invoke(build_app(), ["gate", "--help"])
    assert all(name in done.output for name in group.commands)


def test_a_command_is_imported_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    name = module_of("drain")
    monkeypatch.delitem(sys.modules, name, raising=False)
    load(["--debug", "drain", "--help"])
    assert name in sys.modules


def test_the_root_has_the_commands_of_the_table() -> None:
    root: Any = typer.main.get_command(build_app())
    assert list(root.commands) == list(COMMANDS)
