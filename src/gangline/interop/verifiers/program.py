"""The programs of `inside/`: as commands of a Python that has verifiers, and as files for a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["CONFIG_FILE", "FOLDER", "TASKSET_FOLDER", "program_files", "reading", "running"]

_HERE = Path(__file__).parent
FOLDER = ".verifiers"
"""Relative to where the program runs."""
CONFIG_FILE = f"{FOLDER}/config.json"
TASKSET_FOLDER = f"{FOLDER}/taskset"
_MODULES = ("__init__", "box", "trace", "hooks")

_READ = "import sys; sys.path.append(sys.argv[1]); from inside.reading import main; main(sys.argv[2])"
_RUN = (
    "import os, sys; folder = os.path.abspath(sys.argv[1]); sys.path.append(folder);"
    " from inside.hooks import main; main(folder, sys.argv[2])"
)


def reading(python: str, asked: Mapping[str, Any]) -> tuple[str, ...]:
    """The command that prints a taskset as JSON. asked: see `inside/reading.py`."""
    return (python, "-c", _READ, str(_HERE), json.dumps(asked))


def running(python: str, stage: str) -> tuple[str, ...]:
    """The command that runs a task's hooks of a stage (`setup`, `score`), with its files beside it. Nothing that the
    agent wrote is imported."""
    return (python, "-I", "-c", _RUN, FOLDER, stage)


def program_files() -> dict[str, str]:
    """Path -> content of the program."""
    return {f"{FOLDER}/inside/{name}.py": (_HERE / "inside" / f"{name}.py").read_text() for name in _MODULES}
