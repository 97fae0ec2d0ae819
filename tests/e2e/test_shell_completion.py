"""Completion of commands and options, in a real bash on a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from support.requirements import need_command

GIVE_UP_S = 60.0


class Terminal:
    """An interactive bash with a home folder of its own."""

    def __init__(self, home: Path) -> None:
        self._fd, theirs = pty.openpty()
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {"HOME": str(home), "PATH": path, "TERM": "dumb", "LANG": "C.UTF-8"}
        self._bash = subprocess.Popen(
            ["bash", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=home, start_new_session=True
        )
        os.close(theirs)

    def type(self, keys: str, *, until: str) -> str:
        """The output from these keys on, until it contains a text."""
        os.write(self._fd, keys.encode())
        output, deadline = "", time.monotonic() + GIVE_UP_S
        while until not in output:
            left = deadline - time.monotonic()
            assert left > 0, f"no {until!r} in {output!r}"
            if select.select([self._fd], [], [], left)[0]:
                output += os.read(self._fd, 65536).decode(errors="replace")
        return output

    def close(self) -> None:
        self._bash.kill()
        self._bash.wait()
        os.close(self._fd)


@pytest.fixture
def terminal(tmp_path: Path) -> Generator[Terminal]:
    """One in which completion was installed as a user does it."""
    need_command("bash", "apt-get install bash")
    (tmp_path / ".bashrc").write_text("PS1='> '\n")
    first = Terminal(tmp_path)
    try:
        first.type("gangline --install-completion && echo do''ne\n", until="done")
    finally:
        first.close()
    second = Terminal(tmp_path)
    second.type("echo rea''dy\n", until="ready")
    yield second
    second.close()


def test_tab_completes_commands_and_their_options(terminal: Terminal) -> None:
    terminal.type("gangline statu\t", until="gangline status ")
    ctrl_u = "\x15"  # clears the line
    terminal.type(f"{ctrl_u}gangline export --forma\t", until="--format ")
