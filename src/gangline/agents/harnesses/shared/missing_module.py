"""Advice for an agent that cannot import a module: a Python environment on this machine that has it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

_MISSING = re.compile(rb"^ModuleNotFoundError: No module named '([A-Za-z_]\w*)", re.MULTILINE)
_SHOWN_BYTES = 1 << 16


def advice_on_import(stderr: bytes) -> str:
    """The remedy for a missing module, as a sentence; empty if no import failed. Blocks for a few look-ups."""
    found = _MISSING.findall(stderr[-_SHOWN_BYTES:])
    if not found:
        return ""
    module = found[-1].decode()
    holder = next((folder for folder in _environments() if _has(folder, module)), None)
    if holder is not None:
        return (
            f"{module} is installed in {holder}, which this sandbox does not use: pass --python {holder} to `gangline "
            "submit`, or set runtime.python in the task."
        )
    return (
        f"No Python of this machine that was looked at has {module}: install it into an environment, and pass --python "
        "VENV to `gangline submit`, or set runtime.python in the task."
    )


def _environments() -> Iterator[Path]:
    """Candidate Python environments: active ones, those in the node's folder, those in its PATH, and its own."""
    yield from (Path(os.environ[name]) for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if os.environ.get(name))
    yield from (Path.cwd() / name for name in (".venv", "venv"))
    programs = (shutil.which(name) for name in ("python3", "python"))
    yield from (Path(program).absolute().parents[1] for program in programs if program)
    yield Path(sys.prefix)


def _has(folder: Path, module: str) -> bool:
    if not (folder / "bin" / "python3").exists():
        return False
    packages = [path for path in folder.glob("lib/python3*/site-packages") if path.is_dir()]
    return any((path / module).is_dir() or (path / f"{module}.py").is_file() for path in packages)
