"""The commands and files of a page, run in their order in one folder, as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from support.service.cli_process import clean_environment, wait_for

__all__ = ["Block", "Terminal", "blocks"]

BLOCK = re.compile(r"(?:<!-- file: (?P<file>[\w.]+) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)```", re.DOTALL)


class Block(NamedTuple):
    kind: str
    text: str
    file: str | None


def blocks(text: str) -> Iterator[Block]:
    for found in BLOCK.finditer(text):
        yield Block(found["kind"], found["text"], found["file"])


class Terminal:
    """Runs blocks; a service that one starts continues, in its own terminal.

    shorter: a line of the page -> the line that is run in its place.
    """

    def __init__(self, home: Path, shorter: Mapping[str, str] | None = None) -> None:
        self.folder = home
        self.service: subprocess.Popen[bytes] | None = None
        self.printed: list[str] = []
        self._shorter = shorter or {}

    def run(self, block: Block) -> None:
        if block.file is not None:
            (self.folder / block.file).write_text(block.text)
        elif block.text == "gangline up\n":
            self.service = self._start(block.text)
            wait_for((self.folder / ".gangline" / "up.json").exists)
        elif block.kind == "python":
            self._run([sys.executable, "-c", block.text])
        else:
            for line in block.text.splitlines():
                self._line(self._shorter.get(line, line))

    def _line(self, command: str) -> None:
        for part in command.split(" && "):
            if part.startswith("cd "):
                self.folder /= part.removeprefix("cd ")
            else:
                self._run(["sh", "-c", part])

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, cwd=self.folder, env=self._env(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}{done.stderr}"
        self.printed.append(done.stdout)

    def _start(self, command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["sh", "-c", f"exec {command}"],
            cwd=self.folder,
            env=self._env(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _env(self) -> dict[str, str]:
        return clean_environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

    def close(self) -> None:
        if self.service is not None and self.service.poll() is None:
            self.service.terminate()
            self.service.wait(60)
