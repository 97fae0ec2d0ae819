"""Output of programs that repeat themselves, kept small."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["without_events"]

# $@ is the program and its arguments. POSIX pipelines answer with the filter's exit code: the program's own takes the
# way round by descriptor 3, while the events go on to the real stdout (descriptor 4).
_FILTERED = r"""
edits=$1; shift
exec 4>&1
code=$( { { "$@" 3>&- 4>&-; echo $? >&3; } | sed -u "$edits" >&4; } 3>&1 )
exit "${code:-1}"
"""


def without_events(command: Sequence[str], *edits: str) -> list[str]:
    """A command that runs `command` and edits its stdout line by line, so that repeated content does not fill up a
    bounded output. It exits as `command` does.

    edits: of sed, each for one line of events: `/^{"type":"x"/d`.
    """
    return ["sh", "-c", _FILTERED, "sh", "\n".join(edits), *command]
