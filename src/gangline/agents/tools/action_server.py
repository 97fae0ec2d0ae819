"""The node's side of an action server: starts one in a sandbox, and acts through it.

    async with await ActionServer.start(sandbox) as server:
        result = await server.shell.run("make test", timeout_s=60)
        cell = await server.python.run("2 ** 10", timeout_s=10)
        await server.files.replace("setup.py", old="1.0", new="1.1")

It provides a shell, an interpreter and files, each started on first use. Actions of one tool run in sequence; different
tools run concurrently.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from gangline.agents.tools.answers import Captured, Change, Found, Nothing, PythonResult, ShellResult, Tree, View
from gangline.agents.tools.link import Link
from gangline.agents.tools.program import server_argv, server_program
from gangline.domain.errors import ActionServerFailed, InvalidRequest
from gangline.domain.sandbox import RuntimeUser, Sandbox

_T = TypeVar("_T")
_Result = TypeVar("_Result", ShellResult, PythonResult)

_START_S = 60.0
_ENVIRONMENT = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat", "GIT_TERMINAL_PROMPT": "0"}
"""Keeps programs from waiting for a person at the terminal."""


class ActionServerOptions(BaseModel):
    """Settings of an action server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_output_bytes: int = Field(default=65_536, ge=2, le=1 << 20)
    """Bytes of output to keep in an answer, half from the head and half from the tail."""
    python: str = "python3"
    """Program in the sandbox that runs cells and the server itself; Python 3.8 or newer."""
    python_memory_bytes: int | None = Field(default=None, gt=0)
    """Memory limit of the interpreter's process; a cell that exceeds it gets a MemoryError."""
    grace_s: float = Field(default=30.0, ge=0)
    """Seconds by which an answer may exceed its action's own limit, on a busy machine, before the server counts as
    failed.
    """


class ActionServer:
    """Use as a context manager, or call `close`. Made by `start`."""

    def __init__(self, link: Link, options: ActionServerOptions) -> None:
        self._link = link
        self.shell = ShellTool(link, options)
        self.python = PythonTool(link, options)
        self.files = Files(link)

    @classmethod
    async def start(
        cls,
        sandbox: Sandbox,
        *,
        options: ActionServerOptions | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: RuntimeUser = "agent",
    ) -> Self:
        """Start an action server in a sandbox. cwd, env: for all tools, as `Sandbox.exec` takes them.

        Raises: RuntimeFailed if the sandbox is gone; ActionServerFailed if the server did not start.
        """
        options = options or ActionServerOptions()
        channel = await sandbox.channel(
            server_argv(options.python), cwd=cwd, env={**_ENVIRONMENT, **(env or {})}, user=user
        )
        link = Link(channel, options.grace_s)
        try:
            await link.listen(server_program(options.model_dump()), _START_S)
        except BaseException as error:
            await link.close()
            if isinstance(error, ActionServerFailed):
                raise ActionServerFailed(
                    f"the action server did not start in the sandbox, which needs {options.python} (3.8 or newer):"
                    f" {link.reason}"
                ) from error
            raise
        return cls(link, options)

    @property
    def has_ended(self) -> bool:
        """Whether it failed or was closed, and must be replaced."""
        return self._link.has_ended

    async def close(self) -> None:
        """End the server, its shell and its interpreter. Idempotent."""
        await self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()


class ShellTool:
    """Commands in a shell on a pseudo-terminal (bash if available) that keeps its folder, variables and jobs."""

    def __init__(self, link: Link, options: ActionServerOptions) -> None:
        self._link = link
        self._max_bytes = options.max_output_bytes

    async def run(self, command: str, *, timeout_s: float) -> ShellResult:
        """Run a command and wait until it ends, waits for input, or its time is over; it is not ended then.

        Raises: ActionRefused while an earlier command runs; ActionServerFailed; InvalidRequest for text that cannot be
        in a command.
        """
        _check_text(command)
        return await self._do("run", {"command": command}, timeout_s)

    async def wait(self, *, timeout_s: float) -> ShellResult:
        """Wait again for the running command. Raises: ActionRefused, ActionServerFailed."""
        return await self._do("wait", {}, timeout_s)

    async def send_keys(self, keys: str, *, timeout_s: float = 5.0) -> ShellResult:
        """Type keys: `\\n` is Enter, `\\x04` the end of input. Then wait as in `run`.

        Raises: ActionRefused, ActionServerFailed.
        """
        _check_text(keys.replace("\0", ""))
        return await self._do("keys", {"keys": keys}, timeout_s)

    async def interrupt(self, *, timeout_s: float = 5.0) -> ShellResult:
        """Send SIGINT to the foreground program, and wait for the command to end.

        Raises: ActionRefused, ActionServerFailed.
        """
        return await self._do("interrupt", {}, timeout_s)

    async def resize(self, rows: int, columns: int) -> None:
        """Set the terminal's size. Raises: InvalidRequest, ActionServerFailed."""
        if not (0 < rows <= 1000 and 0 < columns <= 1000):
            raise InvalidRequest(f"a terminal cannot have {rows} rows and {columns} columns: give 1 to 1000 of each")
        await self._link.ask("shell.resize", {"rows": rows, "columns": columns}, Nothing, 5.0)

    async def restart(self) -> None:
        """Kill the shell and its jobs; the next command runs in a new one. Raises: ActionServerFailed."""
        await self._link.ask("shell.restart", {}, Nothing, 30.0)

    async def _do(self, do: str, order: dict[str, Any], timeout_s: float) -> ShellResult:
        order["timeout_s"] = timeout_s
        result = await self._link.ask(f"shell.{do}", order, ShellResult, timeout_s)
        return await _bounded(self._link, result, self._max_bytes)


class PythonTool:
    """Cells in an interpreter that keeps its variables: IPython if the sandbox's Python has it."""

    def __init__(self, link: Link, options: ActionServerOptions) -> None:
        self._link = link
        self._max_bytes = options.max_output_bytes

    async def run(self, code: str, *, timeout_s: float) -> PythonResult:
        """Run a cell. On a timeout it is interrupted (KeyboardInterrupt), and the variables are kept.

        Raises: ActionRefused while an earlier cell runs; ActionServerFailed.
        """
        order = {"code": code, "timeout_s": timeout_s}
        # An interpreter's start and a cell's interrupt come on top of the cell's own time.
        result = await self._link.ask("python.run", order, PythonResult, timeout_s + _START_S)
        return await _bounded(self._link, result, self._max_bytes)

    async def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the running cell, whose `run` then returns. Raises: ActionServerFailed."""
        await self._link.ask("python.interrupt", {}, Nothing, 5.0)

    async def restart(self) -> None:
        """End the interpreter; the next cell runs in a new one. Raises: ActionServerFailed."""
        await self._link.ask("python.restart", {}, Nothing, 30.0)


class Files:
    """Text files, as seen by the server's user. Paths are absolute, or relative to the server's folder.

    Every method raises ActionRefused with a `reason` (`not_found`, `binary`, `no_match`, `many_matches` ...) and
    ActionServerFailed. UTF-8, UTF-16 and Latin-1 files keep their encoding. In a file whose lines all end with CRLF,
    `\\n` stands for CRLF.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    async def view(
        self, path: str, *, first_line: int = 1, last_line: int | None = None, max_bytes: int = 65_536
    ) -> View:
        """Return lines of a file: as many as fit `max_bytes`, but at least the start of one."""
        if first_line < 1 or (last_line is not None and last_line < first_line):
            raise InvalidRequest(f"there are no lines {first_line} to {last_line}: lines are numbered from 1")
        max_bytes = min(max_bytes, 1 << 20)
        return await self._do(View, "view", path=path, first_line=first_line, last_line=last_line, max_bytes=max_bytes)

    async def write(self, path: str, text: str) -> Change:
        """Write a whole file in UTF-8, creating its folders."""
        return await self._do(Change, "write", path=path, text=text)

    async def replace(self, path: str, *, old: str, new: str) -> Change:
        """Replace a text that occurs exactly once; otherwise the error contains the count."""
        return await self._do(Change, "replace", path=path, old=old, new=new)

    async def insert(self, path: str, text: str, *, after_line: int) -> Change:
        """Insert whole lines after a line; 0: at the beginning."""
        if after_line < 0:
            raise InvalidRequest("lines are numbered from 1, and 0 is the place before them")
        return await self._do(Change, "insert", path=path, text=text, after_line=after_line)

    async def undo(self, path: str) -> Change:
        """Undo this tool's last change of a file, if it has not been changed since."""
        return await self._do(Change, "undo", path=path)

    async def tree(self, path: str = ".", *, max_depth: int = 2, max_entries: int = 500) -> Tree:
        """List a folder's contents to a maximum depth."""
        max_entries = min(max_entries, 10_000)
        return await self._do(Tree, "tree", path=path, max_depth=min(max_depth, 100), max_entries=max_entries)

    async def search(
        self, pattern: str, path: str = ".", *, is_regex: bool = True, glob: str | None = None, max_matches: int = 200
    ) -> Found:
        """Find lines, with ripgrep if the sandbox has it, else with Python's `re`. glob: only search matching files."""
        max_matches = min(max_matches, 1000)
        return await self._do(
            Found, "search", pattern=pattern, path=path, is_regex=is_regex, glob=glob, max_matches=max_matches
        )

    async def _do(self, kind: type[_T], act: str, **order: Any) -> _T:
        timeout_s = 60.0
        return await self._link.ask("files", {"act": act, "timeout_s": timeout_s, **order}, kind, timeout_s)


def _check_text(text: str) -> None:
    """Raises: InvalidRequest."""
    if "\0" in text:
        raise InvalidRequest("a command cannot hold a NUL byte")
    try:
        text.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"a command cannot hold {error.object[error.start]!r}: it is not a character") from None


async def _bounded(link: Link, result: _Result, max_bytes: int) -> _Result:
    """Raises: ActionServerFailed if a server returns more output than its limit."""

    def is_large(one: Captured) -> bool:
        return len(one.head) + len(one.tail) > max_bytes

    if is_large(result.output) or is_large(result.earlier):
        raise await link.fail(f"it sent more than {max_bytes} bytes of output")
    return result
