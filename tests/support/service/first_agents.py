"""Folders of `gangline init`, and the next steps that it prints, run as a newcomer would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.service.cli_process import clean_environment, gangline

__all__ = ["make_folder", "next_steps", "replies", "run_steps"]

TEMPLATES = Path(__file__).parents[3] / "src/gangline/cli/starting/templates"


def replies(*names: str) -> dict[str, Any]:
    """One script with the replies of several templates, each of which answers its own task alone."""
    scripts = [json.loads((TEMPLATES / name / "replies.json").read_text()) for name in names]
    return {"rules": [rule for script in scripts for rule in script["rules"]], "default": scripts[-1]["default"]}


def make_folder(folder: Path, template: str) -> str:
    """What `gangline init` prints."""
    done = gangline("init", folder, "--template", template)
    assert done.returncode == 0, done.stderr
    return done.stdout


def next_steps(printed: str) -> list[str]:
    """The printed commands, without their remarks."""
    lines = printed[printed.index("Next steps") :].splitlines()[1:]
    return [line.partition("  # ")[0].strip() for line in lines]


def run_steps(steps: list[str], folder: Path, data: Path, env: Mapping[str, str] | None = None) -> str:
    """Run the commands in one shell over the service of a data folder; their output. One that fails ends them."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-e", "-c", "\n".join(steps)],
        cwd=folder,
        env=clean_environment(PATH=path, GANGLINE_DATA=str(data), **(env or {})),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout
