"""The programs of `inside/`: as commands of a Python that has Inspect, and as files for a sandbox."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CONFIG_FILE", "TASK_FOLDER", "reading", "scoring", "scoring_files"]

_HERE = Path(__file__).parent
_FOLDER = ".inspect"
"""Relative to where the scorer runs."""
CONFIG_FILE = f"{_FOLDER}/config.json"
TASK_FOLDER = f"{_FOLDER}/task"
_SCORING = ("__init__", "commands", "conversation", "solution", "scoring")

_READ = "import sys; sys.path.append(sys.argv[1]); from inside.reading import main; main(sys.argv[2])"
_SCORE = (
    "import os, sys; folder = os.path.abspath(sys.argv[1]); sys.path.append(folder);"
    " from inside.scoring import main; main(folder)"
)


def reading(python: str, source: str) -> tuple[str, ...]:
    """The command that prints a task as JSON. source: as `inspect eval` takes it."""
    return (python, "-c", _READ, str(_HERE), source)


def scoring(python: str) -> tuple[str, ...]:
    """The command that scores a session, with its files beside it. Nothing that the agent wrote is imported."""
    return (python, "-I", "-c", _SCORE, _FOLDER)


def scoring_files() -> dict[str, str]:
    """Path -> content of the program."""
    return {f"{_FOLDER}/inside/{name}.py": (_HERE / "inside" / f"{name}.py").read_text() for name in _SCORING}
