"""The terminal of the shell tool."""

from __future__ import annotations

import os
import select
import signal
from typing import Any

import pytest

from gangline.agents.tools.in_sandbox import terminal
from gangline.agents.tools.in_sandbox.loop import Loop
from support.requirements import need_command


def test_output_stays_as_it_is_where_the_shell_was_quicker_than_we(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a signal ended a command, bash restores the modes that it found at its start."""
    need_command("bash", "apt-get install bash")
    spawn = terminal._spawn  # pyright: ignore[reportPrivateUsage]

    def spawn_and_wait(*arguments: Any) -> tuple[int, int]:
        pid, master = spawn(*arguments)
        assert select.select([master], [], [], 20)[0], "no first prompt, so the modes may not have been read"
        return pid, master

    monkeypatch.setattr(terminal, "_spawn", spawn_and_wait)
    loop, output, codes = Loop(), bytearray(), list[int]()

    def next_step(code: int, _options: str, _folder: str) -> None:
        shell.drain()
        codes.append(code)
        if len(codes) == 1:
            output.clear()  # the prompt
            shell.evaluate(b"sh -c 'kill -9 $$'")
        else:
            loop.stop()

    shell = terminal.Terminal(loop, (24, 80), output.extend, next_step, lambda _shell: loop.stop())
    try:
        loop.run()
    finally:
        os.kill(shell.pid, signal.SIGKILL)
        os.waitpid(shell.pid, 0)
        shell.close()
    assert (codes, bytes(output)) == ([0, 137], b"Killed\n")
