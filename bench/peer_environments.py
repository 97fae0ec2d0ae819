"""Environments for the programs that benchmarks compare with: one each, made on first use from PyPI.

They lie in the folder GANGLINE_BENCH_PEERS, else in one in the temporary folder, so that none of them is a dependency.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["peer_python"]


def peer_python(name: str, requirement: str, version: tuple[int, int]) -> Path | None:
    """The interpreter of the peer's environment, made when it is not there; None when it cannot be.

    version: the oldest Python that the peer runs on.
    """
    folder = Path(os.environ.get("GANGLINE_BENCH_PEERS", Path(tempfile.gettempdir()) / "gangline-bench-peers")) / name
    python = folder / "bin" / "python"
    if not python.exists():
        base = _interpreter(version)
        if base is None:
            return None
        install = [str(python), "-m", "pip", "install", "-q", requirement]
        made = subprocess.run([base, "-m", "venv", str(folder)], check=False).returncode == 0
        if not made or subprocess.run(install, check=False).returncode != 0:
            shutil.rmtree(folder, ignore_errors=True)
            return None
    return python


def _interpreter(version: tuple[int, int]) -> str | None:
    names = [sys.executable, *(f"python3.{minor}" for minor in range(14, version[1] - 1, -1))]
    installed = sorted(Path.home().glob(".pyenv/versions/3.*/bin/python"))
    check = f"import sys; sys.exit(sys.version_info < {version})"
    for candidate in [*(shutil.which(name) for name in names), *installed]:
        if candidate and subprocess.run([candidate, "-c", check], check=False, capture_output=True).returncode == 0:
            return str(candidate)
    return None
