"""The one command loads what it runs."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from gangline.cli.main import build_app


def commands_of(command: str | None) -> set[str]:
    root: Any = typer.main.get_command(build_app(command))
    return set(root.commands)


@pytest.mark.parametrize("command", sorted(commands_of(None)))
def test_a_command_is_found_without_most_others(command: str) -> None:
    assert command in commands_of(command)
    assert len(commands_of(command)) <= 2


def test_what_is_no_command_is_looked_for_among_all() -> None:
    assert commands_of("--help") == commands_of("submitt") == commands_of(None)
    assert len(commands_of(None)) > 20
