"""A terminal for tests: a command on a pseudo-terminal, and what stands on its screen."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pyte

from support.service.cli_process import COMMAND, GIVE_UP_S, clean_environment

__all__ = ["Terminal", "terminal"]


class Terminal:
    """`columns` x `lines`; the command is the foreground process of it."""

    def __init__(self, master: int, slave: int, columns: int, lines: int) -> None:
        self._master = master
        self._slave = slave
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._news = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None
        self.written = b""
        """All that came out of the command."""
        self.before = termios.tcgetattr(slave)

    def restored(self) -> bool:
        """Whether modes, cursor and screen are as they were before the command."""
        cursor = self.written.rfind(b"\x1b[?25h") > self.written.rfind(b"\x1b[?25l")
        screen = self.written.rfind(b"\x1b[?1049l") > self.written.rfind(b"\x1b[?1049h")
        return cursor and screen and termios.tcgetattr(self._slave) == self.before

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self._screen.display)

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._master, 1 << 16):
                self.written += piece
                self._stream.feed(piece)
        self._news.set()

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._screen.resize(lines, columns)

    async def shows(self, *words: str) -> None:
        """Wait until all of them stand on the screen."""
        await self.until(lambda text: all(word in text for word in words), f"{words} were never shown")

    async def until(self, condition: Callable[[str], bool], complaint: str) -> None:
        try:
            async with asyncio.timeout(GIVE_UP_S):
                while not condition(self.text()):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"{complaint}; the screen is:\n{self.text()}") from None

    async def ended(self) -> int:
        assert self.process is not None
        async with asyncio.timeout(GIVE_UP_S):
            code = await self.process.wait()
        self.read()
        return code


@asynccontextmanager
async def terminal(*arguments: object, columns: int = 80, lines: int = 24, **env: str) -> AsyncIterator[Terminal]:
    """`gangline ARGUMENTS` in a terminal, with its keys: Ctrl-C is typed as any user types it."""
    master, slave = os.openpty()
    os.set_blocking(master, False)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    shown = Terminal(master, slave, columns, lines)
    loop = asyncio.get_running_loop()
    loop.add_reader(master, shown.read)

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        for number in (signal.SIGINT, signal.SIGHUP):  # which a test run in the background ignores
            signal.signal(number, signal.SIG_DFL)

    environment = clean_environment(TERM="xterm-256color", NO_COLOR="1", **env)
    for size in ("COLUMNS", "LINES"):
        environment.pop(size, None)
    try:
        shown.process = await asyncio.create_subprocess_exec(
            *(*COMMAND, *map(str, arguments)),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            preexec_fn=take_terminal,
        )
        yield shown
    finally:
        if shown.process is not None and shown.process.returncode is None:
            shown.process.kill()
            await shown.process.wait()
        loop.remove_reader(master)
        os.close(slave)
        os.close(master)
