"""Answers of an action server, as validated on the node. They are the agent's claims."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Seconds = Annotated[float, Meta(ge=0)]
_Path = Annotated[str, Meta(max_length=8192)]
_KILLED = 137


class Nothing(msgspec.Struct, frozen=True):
    """The answer to an action without a result."""


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """A program's output: all of it, or its head and tail."""

    head: bytes = b""
    tail: bytes = b""
    omitted_bytes: _Count = 0
    """Bytes between head and tail that were not kept."""

    @property
    def is_whole(self) -> bool:
        return self.omitted_bytes == 0

    @property
    def text(self) -> str:
        """The output as UTF-8, with a line in place of omitted bytes."""
        if self.is_whole:
            return (self.head + self.tail).decode(errors="replace")
        notice = f"\n[{self.omitted_bytes} bytes omitted]\n"
        return self.head.decode(errors="replace") + notice + self.tail.decode(errors="replace")


class ShellResult(msgspec.Struct, frozen=True, kw_only=True):
    """The shell after an action."""

    state: Literal["ended", "running", "waiting", "idle"]
    """`ended`: the command is over. `running`: it timed out but still runs. `waiting`: it waits for terminal input.
    `idle`: there was no command.
    """
    output: Captured
    """Output since the last answer, unchanged."""
    earlier: Captured
    """Output of background jobs before the command began."""
    exit_code: Annotated[int, Meta(ge=0, le=255)] | None
    """Set in state `ended`; after a signal, 128 plus its number."""
    duration_s: _Seconds
    """Since the command began."""
    folder: _Path
    """The shell's folder after its last command."""
    foreground: Annotated[list[Annotated[str, Meta(max_length=1000)]], Meta(max_length=16)]
    """Command lines of running or waiting programs, shortened."""
    is_new: bool
    """A shell ended since the last answer: its folder, variables and jobs are gone, and it was replaced."""

    def status(self) -> str:
        """One line for a model about the command's state."""
        programs = f" ({'; '.join(self.foreground)})" if self.foreground else ""
        match self.state:
            case "ended":
                line = f"exit code {self.exit_code}"
            case "waiting":
                line = f"waiting for input{programs} after {self.duration_s:.1f} s"
            case "running":
                line = f"still running{programs} after {self.duration_s:.1f} s"
            case "idle":
                line = "no command runs"
        return f"{line}; the shell ended, and the next command starts in a new one" if self.is_new else line


class PythonResult(msgspec.Struct, frozen=True, kw_only=True):
    """The interpreter after a cell."""

    state: Literal["ended", "running", "died"]
    """`running`: the cell still runs after its timeout and interrupt. `died`: the interpreter ended, and its variables
    are lost; the next cell starts a new one.
    """
    output: Captured
    """stdout and stderr of the cell and the programs that it started, interleaved."""
    earlier: Captured
    """Output of threads and programs before the cell began."""
    result: str | None
    """The last expression's value as text."""
    traceback: str | None
    """Set when the cell raised."""
    images: Annotated[list[bytes], Meta(max_length=8)]
    """PNG: open matplotlib figures, and values that draw themselves."""
    num_images_omitted: _Count
    """Images beyond the limits of number and size."""
    exit_code: Annotated[int, Meta(ge=0, le=255)] | None
    """Set in state `died`; after a signal, 128 plus its number."""
    is_interrupted: bool
    """The cell was interrupted, by its timeout or by `interrupt`."""
    duration_s: _Seconds
    is_new: bool
    """This is the first answer of an interpreter that replaced another."""

    def status(self) -> str:
        """One line for a model about the cell's state."""
        if self.state == "died":
            cause = "it was killed, probably for its memory" if self.exit_code == _KILLED else f"code {self.exit_code}"
            return f"the interpreter ended ({cause}) and all variables are lost; the next cell starts a new one"
        if self.state == "running":
            return f"still running after {self.duration_s:.1f} s and an interrupt: restart the interpreter"
        if self.is_interrupted:
            return f"interrupted after {self.duration_s:.1f} s"
        return "error" if self.traceback is not None else "done"


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a file."""

    lines: list[str]
    """Without line ends."""
    first_line: _Count
    """Number of the first of `lines`, from 1."""
    num_lines: _Count
    """Number of lines in the file."""
    is_whole: bool
    """Whether `lines` contains the whole file."""

    def numbered(self) -> str:
        """The lines with their numbers, as printed by `cat -n`."""
        return "".join(f"{self.first_line + n:6}\t{line}\n" for n, line in enumerate(self.lines))


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A file after an edit."""

    num_bytes: _Count | None
    """Size; None if undoing its creation removed the file."""
    is_new: bool
    """The file did not exist before."""
    line: _Count | None = None
    """Line at which the replaced text began."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder below a viewed folder."""

    path: _Path
    """Relative to that folder."""
    kind: Literal["file", "folder", "link", "other"]
    num_bytes: _Count | None


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """A folder's entries, the nearest levels first."""

    entries: list[Entry]
    is_whole: bool
    """False if there are more entries than the limit; deeper levels do not count."""


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """A line that matches a pattern."""

    path: _Path
    line: _Count
    """Number from 1."""
    text: str
    """At most 500 characters."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Lines that match a pattern, sorted by path."""

    matches: list[Match]
    is_whole: bool
    """False if there are more matches than the limit."""
