"""Shell commands that carry their folder, environment and attempts; pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

__all__ = ["attempted", "surrounded"]

_LONGEST_REST_S = 5.0


def surrounded(command: str, cwd: Any, env: Mapping[str, Any]) -> str:
    """The command in its folder, with its environment."""
    exports = [f"export {name}={shlex.quote(str(value))}" for name, value in env.items()]
    entered = [] if cwd is None else [f"cd {shlex.quote(str(cwd))} || exit"]
    return "\n".join((*entered, *exports, command))


def attempted(command: str, attempts: int, rest_s: float) -> str:
    """The command, until it succeeds. Source: Polar's gateway: the rests double, up to five seconds."""
    rests = [min(rest_s * 2**number, _LONGEST_REST_S) for number in range(attempts - 1)]
    again = [f'if [ $status != 0 ]; then sleep {rest:g}; sh -c "$step"; status=$?; fi' for rest in rests]
    return "\n".join((f"step={shlex.quote(command)}", 'sh -c "$step"; status=$?', *again, "exit $status"))
