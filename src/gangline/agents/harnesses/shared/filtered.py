"""Filters the output of programs that repeat themselves."""

from __future__ import annotations

from collections.abc import Sequence

# $@ is the program and its arguments. A POSIX pipeline returns the filter's exit code, so the program's own is passed
# through descriptor 3, while the events go to the real stdout (descriptor 4).
_FILTERED = r"""
edits=$1; shift
exec 4>&1
code=$( { { "$@" 3>&- 4>&-; echo $? >&3; } | sed -u "$edits" >&4; } 3>&1 )
exit "${code:-1}"
"""


def without_events(command: Sequence[str], *edits: str) -> list[str]:
    """A command that runs `command` and edits its stdout line by line, so that repeated content does not fill up a
    bounded output. Its exit code is `command`'s.

    edits: sed commands, each for one line of events: `/^{"type":"x"/d`.
    """
    return ["sh", "-c", _FILTERED, "sh", "\n".join(edits), *command]
