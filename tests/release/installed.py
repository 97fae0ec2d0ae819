"""Gangline in its own environment, from a wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from uv import find_uv_bin

__all__ = ["ROOT", "Installed", "install", "run_uv"]

ROOT = Path(__file__).parents[2]
_GIVE_UP_S = 240.0


@dataclass(frozen=True)
class Installed:
    """An environment with Gangline from the wheel, whose programs do not see the checkout."""

    folder: Path
    work: Path
    """Where its commands run."""

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Start a command of `gangline`. Its output is piped."""
        command = [str(self.folder / "bin" / "gangline"), *map(str, arguments)]
        return subprocess.Popen(
            command, cwd=self.work, env=self._env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *arguments: object) -> str:
        """Output of a command of `gangline` that succeeds."""
        process = self.start(*arguments)
        output, errors = process.communicate(timeout=_GIVE_UP_S)
        assert process.returncode == 0, errors[-4000:]
        return output

    def modules(self) -> set[str]:
        """Names of the installed distributions, in lower case."""
        listed = run_uv("pip", "list", "--python", self.folder / "bin" / "python", "--format", "freeze")
        return {line.partition("==")[0].partition(" ")[0].lower() for line in listed.splitlines()}

    def _env(self) -> dict[str, str]:
        kept = ("HOME", "LANG", "TMPDIR", "SSL_CERT_FILE")
        path = f"{self.folder / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        return {**{name: os.environ[name] for name in kept if name in os.environ}, "PATH": path}


def run_uv(*arguments: object) -> str:
    """Output of a command of uv that succeeds."""
    done = subprocess.run(
        [find_uv_bin(), *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=_GIVE_UP_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def install(wheel: Path, extra: str, folder: Path) -> Installed:
    """A fresh environment below `folder` with the wheel and an extra such as `[tokenizer]`, or none."""
    work = folder / "work"
    work.mkdir()
    run_uv("venv", "--python", sys.executable, folder / "venv")
    run_uv("pip", "install", "--python", folder / "venv" / "bin" / "python", f"{wheel}{extra}")
    return Installed(folder / "venv", work)
